"""Compare epsilon with the privacy loss distributions of dp_accounting, on random plans.

`pip install dp-accounting`, then `python tools/accountant_fuzz.py` takes about an hour. It writes the first plans, with
the numbers of dp_accounting, to peer_epsilons.json in tests/accounting/, which test_reference.py there reads.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "_support")]

from accounting_oracle import Undecided, agreed_delta

from dpfunc.accounting import Ledger, epsilon
from dpfunc.types import Event

LARGEST = 200.0  # epsilon; e^epsilon must fit into float64
PEER_ROUNDS = 1e-8  # delta, below which the rounding of its Fourier transform shows
DIRECTIONS = ("remove", "add")


def random_plan(rng: np.random.Generator) -> tuple[float, float, int, float]:
    """sampling_prob, noise_multiplier, num_steps, delta."""
    probs = [10 ** rng.uniform(-4, 0), rng.uniform(0, 1), 1 - 10 ** rng.uniform(-5, 0), 1.0]
    q = probs[rng.choice(4, p=[0.5, 0.25, 0.2, 0.05])]
    sigma, steps = math.exp(rng.uniform(math.log(0.2), math.log(50))), 10 ** rng.uniform(0, 6)
    return float(q), sigma, int(steps), 10 ** rng.uniform(-12, -1)


def interval(q: float, sigma: float, steps: int, found: float) -> float:
    """A distance of losses that is fine for one step and for all steps, as far as the memory allows."""
    x = np.linspace(-10 * sigma, 1 + 10 * sigma, 20_001)
    exponent = (x - 0.5) / sigma**2
    loss = np.log1p(q * np.expm1(np.minimum(exponent, 300.0))) if q < 1 else exponent
    mass = np.exp(-((x / sigma) ** 2) / 2) * (x[1] - x[0]) / sigma / math.sqrt(2 * math.pi) * np.exp(loss)
    first, second = float(mass @ np.abs(loss)), float(mass @ (loss * loss))
    span = found + 10 * math.sqrt(steps * second)
    fine = min(0.05 * second / first, span / 2**14)
    return max(fine, (float(loss[-1]) - float(loss[0])) / 20_000, span / 2**20)


def composed_epsilon(pmf: Any, steps: int, delta: float) -> float:
    """Epsilon of many steps: by the peer, or by a sum of its losses that is tilted, so that small deltas survive."""
    if delta >= PEER_ROUNDS:
        return float(pmf.self_compose(steps).get_epsilon_for_delta(delta))
    dense = pmf.to_dense_pmf()
    mass, h = np.asarray(dense._probs), dense._discretization
    mass, infinite = np.maximum(mass, 0.0), -math.expm1(steps * math.log1p(-dense._infinity_mass))
    loss = (dense._lower_loss + np.arange(len(mass))) * h

    def tilted(t: float) -> tuple[np.ndarray[Any, Any], float]:
        with np.errstate(divide="ignore"):
            exponents = np.log(mass) + t * loss
        top = exponents.max()
        weights = np.exp(exponents - top)
        return weights / weights.sum(), float(top + math.log(weights.sum()))

    def chernoff(t: float) -> float:
        return (steps * tilted(t)[1] - math.log(delta) - math.log(t) - math.log1p(t)) / t

    t = min(np.geomspace(1e-3, 1e3, 200), key=chernoff)
    weights, moment = tilted(t)
    mean = float(weights @ loss)
    spread = math.sqrt(steps * float(weights @ (loss - mean) ** 2))
    length = 1 << math.ceil(math.log2(max(40 * spread / h, 4 * len(loss), 2**16)))
    law = np.fft.irfft(np.fft.rfft(weights, length) ** steps, length)
    middle = round((steps * mean - steps * loss[0]) / h)
    places = middle - length // 2 + np.arange(length)
    total = steps * loss[0] + places * h
    law = np.maximum(law[places % length], 0.0)[::-1]
    total = total[::-1]
    log_law = np.log(np.maximum(law, 1e-300)) + steps * moment - t * total
    keep = log_law < 0
    upper = infinite + np.cumsum(np.where(keep, np.exp(np.minimum(log_law, 0.0)), 0.0))
    lower = np.cumsum(np.where(keep, np.exp(np.minimum(log_law - total, 0.0)), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        candidates = np.log(np.maximum(upper - delta, 0.0)) - np.log(lower)
    below = np.flatnonzero(candidates >= np.append(total[1:], -np.inf))
    return max(0.0, float(candidates[below[0]])) if len(below) else 0.0


def peer_epsilon(q: float, sigma: float, steps: int, delta: float, h: float, pessimistic: bool) -> float:
    """Its estimate, the larger of both directions."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, pessimistic_estimate=pessimistic, value_discretization_interval=h,
        use_connect_dots=pessimistic,
    )  # fmt: skip
    laws = {id(pmf): pmf for pmf in (one._pmf_remove, one._pmf_add)}
    try:
        return max(composed_epsilon(pmf, steps, delta) for pmf in laws.values())
    except OverflowError:  # e^-loss of losses below -700
        return math.nan


def inversion(q: float, sigma: float, steps: int, delta: float, found: float) -> str:
    """By the Laplace transform: `below` the truth, `within` 0.1 % of it, `above`, or `undecided`."""
    try:
        deltas = [max(agreed_delta(e, [(q, sigma, steps)], d) for d in DIRECTIONS) for e in (found, found * (1 - 1e-3))]
    except (Undecided, ValueError, FloatingPointError):
        return "undecided"
    return "below" if deltas[0] > delta * (1 + 1e-7) else "within" if deltas[1] > delta else "above"


def compare(plan: tuple[float, float, int, float]) -> dict[str, Any] | None:
    """One row: our epsilon and the peer's; None where epsilon is too large for it.

    `low` and `high` are its optimistic and pessimistic estimates. The error of `high` is of order h^2, which gives
    `limit`, an estimate of the truth, where those of h and 2 h are near each other.
    """
    q, sigma, steps, delta = plan
    answer = epsilon(Ledger((Event(q, sigma, steps),)), delta)
    if answer.epsilon > LARGEST:
        return None
    h = interval(q, sigma, steps, answer.epsilon)
    high, coarse, low = (peer_epsilon(*plan, width, safe) for width, safe in ((h, True), (2 * h, True), (2 * h, False)))
    by_inversion = answer.epsilon > 0 and q < 1 and steps % 4 == 0
    return {
        "plan": plan, "epsilon": answer.epsilon, "method": answer.method, "low": low, "high": high, "coarse": coarse,
        "limit": high - (coarse - high) / 3,
        "inversion": inversion(*plan, answer.epsilon) if by_inversion else "not asked",
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and extremes."""
    sharp = [row for row in rows if row["high"] > 0 and row["coarse"] < 1.002 * row["high"]]
    return {
        "plans": len(rows),
        "below the optimistic estimate": sum(row["epsilon"] < row["low"] * (1 - 1e-9) for row in rows),
        "more than 0.1 % above the pessimistic estimate": sum(row["epsilon"] > 1.001 * row["high"] for row in rows),
        "largest excess over the limit": max(row["epsilon"] / row["limit"] - 1 for row in sharp),
        "inversion": {word: sum(row["inversion"] == word for row in rows) for word in ("below", "within", "above")},
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--plans", default=2000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--stored", default=150, show_default=True, help="Rows for the tests.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path),
              default=ROOT / "tests" / "accounting" / "peer_epsilons.json", show_default=True)  # fmt: skip
def main(plans: int, seed: int, stored: int, out: Path) -> None:
    """Compare, and write the first rows."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < plans:
        row = compare(random_plan(rng))
        rows += [] if row is None else [row]
    click.echo(json.dumps(summary(rows), indent=1))
    out.write_text(stored_text(rows[:stored]))


def stored_text(rows: list[dict[str, Any]]) -> str:
    """Rows of sampling_prob, noise_multiplier, num_steps, delta, low, high; a low that is no number is 0."""
    lines = [json.dumps([*row["plan"], row["low"] if row["low"] >= 0 else 0.0, row["high"]]) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    main()
