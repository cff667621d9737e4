"""Lower bounds on epsilon from one run: who guesses which canaries were in is right too often for a false claim.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import bdtrc, expit, ndtr, ndtri

from dpfunc._utils.validation import expect, integer, non_negative, one_of, open_unit
from dpfunc.accounting import Ledger
from dpfunc.accounting._gaussian import gaussian_epsilon
from dpfunc.accounting._losses import Array
from dpfunc.accounting._trade_off import true_positives
from dpfunc.errors import InvalidArgument

# Inverse of a trade-off curve: true positives -> the least false positives that the claim allows for them.
Curve = Callable[[float], float]

# Numbers of guesses that are tried: shares of all canaries, as guesses of both kinds, and of "in" alone.
_BOTH = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TOP = (0.01, 0.05, 0.2)
_ROOT_BITS = 40  # of the search for a bound: far below what a number of canaries can tell


class Guesses(NamedTuple):
    """Numbers of guesses about the highest scores (in) and the lowest ones (out), and how many of both are right."""

    highest: int
    lowest: int
    correct: int

    @property
    def total(self) -> int:
        return self.highest + self.lowest


@dataclass(frozen=True)
class Audit:
    """The result of `audit`.

    Args:
        epsilon: lower bound at delta, for all that an (epsilon, delta) mechanism can do.
        epsilon_gaussian: lower bound at delta, if the mechanism's trade-off curve is that of a Gaussian one.
        delta, confidence: of both bounds, each for itself.
        num_canaries: in and out.
        tries: numbers of guesses that were tried, for which both bounds and the verdict are corrected.
        best: the guesses of the bound epsilon, or of the most correct ones where the bound is 0.
        claim: epsilon of the claim; None without one.
        exceeds: the claim is refuted at this confidence, or the noise is not what is claimed; None without a claim.
        noise: how the noise of the run differs from what its plan claims, in words; empty where it was not seen to. The
            audit of a loop or a job compares it where it is added, which finds far less than guesses can.

    >>> Audit(0.0, 0.0, 1e-5, 0.95, 100, 10, Guesses(5, 5, 6), claim=1.0, exceeds=False)
    Audit(epsilon >= 0, 0 if Gaussian, at delta=1e-05, confidence 0.95; 6 of 10 guesses right; claim 1 is not refuted)
    """

    epsilon: float
    epsilon_gaussian: float
    delta: float
    confidence: float
    num_canaries: int
    tries: int
    best: Guesses
    claim: float | None = None
    exceeds: bool | None = None
    noise: str = ""

    def __repr__(self) -> str:
        verdict = "" if self.claim is None else f"; claim {self.claim:.4g} is {'' if self.exceeds else 'not '}refuted"
        verdict += f"; {self.noise}" if self.noise else ""
        return (
            f"Audit(epsilon >= {self.epsilon:.4g}, {self.epsilon_gaussian:.4g} if Gaussian, at delta={self.delta:g}, "
            f"confidence {self.confidence:g}; {self.best.correct} of {self.best.total} guesses right{verdict})"
        )


def audit(
    scores_in: Any, scores_out: Any, *, delta: float, confidence: float = 0.95, claim: float | Ledger | None = None,
    guesses: Literal["grid", "hull"] | Sequence[tuple[int, int]] = "grid",
) -> Audit:  # fmt: skip
    """Lower bounds on epsilon, and a verdict on a claim, from the scores of canaries in one run.

    With m canaries, r guesses and v right ones, epsilon is refuted at level alpha if
    `P[B >= v] + 2 m delta max_(1<=i<=v) P[v > B >= v - i] / i <= alpha` for `B ~ Binomial(r, 1 / (1 + e^-epsilon))`:
    Steinke, Nasr and Jagielski 2023, Privacy Auditing with One (1) Training Run, Theorem 5.2. A trade-off curve is
    refuted by the recursion of Mahloujifar, Melis and Chaudhuri 2024, Auditing f-Differential Privacy in One Run.

    Args:
        scores_in, scores_out: scores of the canaries that were in and out, each by its own fair coin (`coins`); higher
            means rather in. Finite numbers; which score it is was chosen before the run.
        delta: 0 < delta < 1.
        confidence: 1 - alpha: a claim that holds is refuted with probability alpha at most.
        claim: None; an epsilon at delta, judged by the bound on (epsilon, delta) mechanisms; or the ledger of the run,
            judged by its whole trade-off curve, which refutes more.
        guesses: pairs (highest, lowest) that were fixed before the run; or "grid", ten pairs that follow from the
            number of canaries alone. Alpha is divided by the number of pairs, so that the best one may be taken.
            "hull" is the rule of the `auditing` module of JAX Privacy, to compare figures: guesses "in" above each
            threshold on the convex hull of the scores. It is chosen with the coins known, so no theorem bounds its
            error, which `python -m benchmarks.evidence` measures.

    Returns:
        Released as far as the scores are: the bounds follow from them and the coins.

    Guarantees:
        at most a share alpha of audits refutes what holds (tests/evidence/test_one_run.py::test_calibration); the
        figures of JAX Privacy (test_figures_of_jax_privacy); faults are found (test_power).

    >>> rng = np.random.default_rng(0)
    >>> audit(rng.normal(4.0, 1.0, 500), rng.normal(0.0, 1.0, 500), delta=1e-5, claim=1.0)  # doctest: +ELLIPSIS
    Audit(epsilon >= 4.439, 7.366 if Gaussian, at delta=1e-05, ...; 500 of 500 guesses right; claim 1 is refuted)
    """
    inside, outside = _scores("scores_in", scores_in), _scores("scores_out", scores_out)
    open_unit("delta", delta)
    alpha = 1.0 - open_unit("confidence", confidence)
    tried = _tried(inside, outside, guesses)
    m, level = len(inside) + len(outside), alpha / len(tried)

    epsilon, best = _largest(lambda epsilon, made: _p_value(m, made, epsilon, delta) <= level, tried)
    mu, _ = _largest(lambda mu, made: _refutes_curve(m, made, level, lambda t: float(ndtr(ndtri(t) - mu))), tried)
    claimed, exceeds = None, None
    if isinstance(claim, Ledger):
        claimed, curve = claim.epsilon(delta).epsilon, _ledger_curve(claim)
        exceeds = math.isfinite(claimed) and any(_refutes_curve(m, made, level, curve) for made in tried)
    elif claim is not None:
        claimed = non_negative("claim", claim)
        exceeds = epsilon > claimed
    return Audit(epsilon, gaussian_epsilon(mu, delta), delta, confidence, m, len(tried), best, claimed, exceeds)


def _scores(name: str, values: Any) -> Array:
    scores = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(scores).all()
    if scores.ndim != 1 or not len(scores) or not finite:
        shape = f"shape {scores.shape}{'' if finite else ' with numbers that are not finite'}"
        raise InvalidArgument(f"Expected {name} to be a list of at least one finite number, got {shape}.")
    return scores


def _tried(inside: Array, outside: Array, guesses: str | Sequence[tuple[int, int]]) -> list[Guesses]:
    """Guesses that are tried; the number of right ones is that of the worst order of equal scores."""
    m = len(inside) + len(outside)
    if isinstance(guesses, str):
        if one_of("guesses", guesses, ("grid", "hull")) == "hull":
            return _hull(inside, outside)
        guesses = grid(m)
    pairs = [(integer("highest", a), integer("lowest", b)) for a, b in guesses]
    expect(
        pairs and all(0 < a + b <= m for a, b in pairs),
        f"pairs of 1 to {m} guesses together, the number of canaries", "guesses", guesses,
    )  # fmt: skip
    was_in = np.concatenate([np.ones(len(inside)), np.zeros(len(outside))])
    both = np.concatenate([inside, outside])
    from_top, from_bottom = _right(-both, was_in), _right(both, 1.0 - was_in)
    return [Guesses(a, b, int(from_top[a] + from_bottom[b])) for a, b in pairs]


def largest_bound(num_canaries: int, *, delta: float, confidence: float = 0.95) -> tuple[float, float]:
    """The largest bounds that an audit can give: those of a run in which every guess is right.

    Args:
        num_canaries: in and out together, >= 2. delta, confidence: as in `audit`, each in (0, 1).

    Returns:
        `(epsilon, epsilon_gaussian)` of such an `Audit`; public facts, to be known before a run is paid for.

    Guarantees:
        no audit of so many canaries gives more (tests/evidence/test_one_run.py::test_no_audit_gives_more).

    >>> [round(bound, 2) for bound in largest_bound(100, delta=1e-5)]
    [2.92, 5.57]
    """
    inside = integer("num_canaries", num_canaries, minimum=2) // 2
    best = audit(np.ones(inside), np.zeros(num_canaries - inside), delta=delta, confidence=confidence)
    return best.epsilon, best.epsilon_gaussian


def _right(order: Array, was: Array) -> Array:
    """Number of right ones of the first 0, 1, ... guesses in an order; of equal scores the wrong ones come first."""
    return np.concatenate([[0.0], np.cumsum(was[np.lexsort((was, order))])])


def grid(num_canaries: int) -> list[tuple[int, int]]:
    """The pairs (highest, lowest) of guesses that `audit` tries; a function of the number of canaries alone."""
    counts = [round(share * num_canaries) for share in _BOTH]
    pairs = {(count // 2, count - count // 2) for count in counts} | {(round(s * num_canaries / 2), 0) for s in _TOP}
    return sorted(pair for pair in pairs if sum(pair)) or [(num_canaries, 0)]


def _hull(inside: Array, outside: Array) -> list[Guesses]:
    """Guesses "in" above each threshold that is a corner of the convex hull of (true, false) positives."""
    values = np.unique(np.concatenate([inside, outside]))[::-1]
    true, false = (np.searchsorted(np.sort(-own), -values, side="right").tolist() for own in (inside, outside))
    corners: list[tuple[int, int]] = [(0, 0)]
    for x, y in zip(false, true, strict=True):
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y2 - y1) * (x - x2) > (y - y2) * (x2 - x1):  # it lies above the line from the one before to this one
                break
            corners.pop()
        corners.append((x, y))
    return [Guesses(a + b, 0, b) for a, b in corners]


def _largest(refutes: Callable[[float, Guesses], bool], tried: Sequence[Guesses]) -> tuple[float, Guesses]:
    """The largest parameter that some guesses refute, from below, and these guesses."""
    ordered = sorted(tried, key=lambda made: -made.correct / max(made.total, 1))
    bound, best = 0.0, ordered[0]
    for made in ordered:
        if not made.total or not refutes(bound, made):
            continue
        low, high = bound, max(1.0, 2.0 * bound)
        while refutes(high, made):
            low, high = high, 2.0 * high
        for _ in range(_ROOT_BITS):
            middle = (low + high) / 2
            low, high = (middle, high) if refutes(middle, made) else (low, middle)
        bound, best = low, made
    return bound, best


def _p_value(m: int, made: Guesses, epsilon: float, delta: float) -> float:
    """The probability of so many right guesses, at most, if (epsilon, delta) holds; Theorem 5.2."""
    if not made.correct:
        return 1.0
    q = float(expit(epsilon))
    tail = float(bdtrc(made.correct - 1, made.total, q))
    steps = np.arange(1, made.correct + 1)
    lower = np.append(bdtrc(made.correct - 1 - steps[:-1], made.total, q), 1.0)
    return tail + 2 * m * delta * float(np.max((lower - tail) / steps))


def _ledger_curve(ledger: Ledger) -> Curve:
    """The curve of a ledger, taken from below: the best of its epsilon at many delta."""
    deltas = np.concatenate([np.geomspace(1e-8, 0.2, 20), np.linspace(0.25, 0.95, 12)])
    points = [(delta, ledger.epsilon(delta).epsilon) for delta in deltas.tolist()]
    return lambda true: 1 - true_positives(points, 1 - true)  # a curve of both orders is its own mirror image


def _refutes_curve(m: int, made: Guesses, level: float, curve: Curve) -> bool:
    """True if this many right guesses have less probability than `level` under the claim.

    Suppose the tail P[right >= v] is `level`, with all of it at v. For each number n < v the claim bounds
    `sum_(i>n) i p_i` by `sum_(i>=n) (r - i) p_i`, with p_i = P[right = i], so p_n is at least something. If all these
    probabilities add up to more than 1, the tail is smaller than `level`.
    """
    count, correct = made.total, made.correct
    right, wrong = level * correct / m, level * (count - correct) / m
    for n in range(correct - 1, -1, -1):
        least = curve(min(right, 1.0))
        if least <= wrong:  # and so for all smaller n
            break
        right += n / (count - n) * (least - wrong)
        wrong = least
    return right + wrong > count / m


def plot(audits: Iterable[Audit], path: str | Path) -> None:
    """Draw claims against lower bounds into a file: what holds lies below the diagonal.

    Args:
        audits: with claims. path: of a picture, e.g. `audits.png`.

    Raises:
        InvalidArgument: an audit without a claim, or matplotlib is not installed.

    >>> plot([], "audits.png")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected audits with finite claims, got audits=[]. Pass claim= to audit(...).
    """
    shown = list(audits)
    expect(
        shown and not any(one.claim is None or math.isinf(one.claim) for one in shown),
        "audits with finite claims", "audits", shown, "Pass claim= to audit(...).",
    )  # fmt: skip
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument('Expected matplotlib for plot(...). Run: pip install "dpfunc[demo]".') from error
    claims = [one.claim for one in shown if one.claim is not None]
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color="gray", linestyle="--", label="claim")
    axes.plot(claims, [one.epsilon for one in shown], "o", label="lower bound, any mechanism")
    axes.plot(claims, [one.epsilon_gaussian for one in shown], "s", label="lower bound, if Gaussian")
    axes.set(
        xlabel=f"claimed epsilon at delta={shown[0].delta:g}", ylabel=f"lower bound, confidence {shown[0].confidence:g}"
    )
    axes.legend()
    figure.savefig(path)
