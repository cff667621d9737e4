"""Author-level privacy: spam detection on public mails, where the unit of privacy is the sender of many mails.

    python examples/main_job/fetch.py mail              needs npm
    python examples/authors/train.py
    python examples/authors/train.py --data my.csv      your own; columns author, text, label (0 or 1)

The same model is trained twice with the same noise, sampling probability and steps: once with a mail as a row, once
with a sender as a row. Both have the same epsilon, but for different units; the table says what it means for a sender.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from mails_by_author import WIDTH, DataError, Table, features, load_table
from torch import Tensor, nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, distributed
from dpfunc.sampling.users import group_by_person, mean_over_texts

sys.path.append(str(Path(__file__).resolve().parents[1] / "main_job"))
from fetch import FetchError
from processes import Processes, join

TEXTS = (1, 2, 4, 8, 16, 64)  # how many mails a sender has, in the table of epsilons


def sample_loss(forward: Any, params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The loss of each mail."""
    return F.cross_entropy(forward(params, batch["x"]), batch["labels"], reduction="none")


def split(table: Table, test_share: float) -> tuple[list[int], list[int]]:
    """Rows for training and for the test: whole authors, so that no test author was seen."""
    authors = sorted(set(table.authors))
    random.Random(0).shuffle(authors)
    held_out = set(authors[: round(test_share * len(authors))])
    rows = range(len(table.authors))
    return [r for r in rows if table.authors[r] not in held_out], [r for r in rows if table.authors[r] in held_out]


def epsilon_of_group(plan: dpfunc.Plan, k: int) -> float:
    """What a plan over single texts claims for a person with k of them: the smaller of two upper bounds."""
    return min(group_privacy(plan.ledger(), plan.delta, k), group_as_one(plan, k))


def group_privacy(ledger: dpfunc.Ledger, delta: float, k: int) -> float:
    """The general bound: k epsilon', where (epsilon', delta') holds and delta' (e^(k epsilon') - 1) / (e^epsilon' - 1)
    is delta. Infinite where there is no such epsilon' (Vadhan 2017, lemma 2.2)."""
    guess = 0.0
    for _ in range(100):
        if k * guess > 500:
            return math.inf
        share = math.expm1(guess) / math.expm1(k * guess) if guess else 1 / k
        needed = dpfunc.epsilon(ledger, delta * share, "rdp").epsilon
        if needed <= guess:
            return k * guess
        guess = 1.001 * needed
    return math.inf


def group_as_one(plan: dpfunc.Plan, k: int) -> float:
    """A bound from the mechanism: the group as one record that is in a batch where any of its texts is.

    With J ~ Binomial(k, q) texts in a batch the person moves the sum by at most J C <= k C, and not at all where J = 0.
    The hockey-stick divergence is convex in each distribution and grows with the shift of a Gaussian, so the step is no
    worse than one with sampling probability 1 - (1 - q)^k and noise multiplier sigma / k. (Ganesh 2024, Tight
    Group-Level DP Guarantees for DP-SGD, keeps the distribution of J and is tighter.)
    """
    event = plan.events(0, 1)[0]
    at_least_one = 1 - (1 - event.sampling_prob) ** k
    group = dpfunc.accounting.Event(at_least_one, event.noise_multiplier / k, plan.num_steps)
    return dpfunc.epsilon(dpfunc.Ledger((group,)), plan.delta, "rdp").epsilon


def train(
    loss_fn: Any, plan: dpfunc.Plan, batches: Any, params: dict[str, Tensor], lr: float, key: dpfunc.rng.Key,
    processes: Processes,
) -> tuple[dict[str, Tensor], dpfunc.state.StepState]:  # fmt: skip
    """The loop; `batches` gives the batch of some indices."""
    params = {name: param.clone().requires_grad_() for name, param in params.items()}
    optimizer = torch.optim.Adam(list(params.values()), lr=lr)
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=512, ranks=processes.ranks)
    state = dp_step.init(params, key)
    for indices in plan.batches(state, processes.ranks):
        grads, state, _ = dp_step(params, batches(indices), state)
        dpfunc.set_grads(params, grads)
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}, state


def accuracies(
    forward: dpfunc.functional.Forward, params: dict[str, Tensor], test: dict[str, Tensor], authors: list[str]
) -> dict[str, float]:
    """Share of right answers: mean over mails, and mean over authors of the share of their own mails."""
    with torch.no_grad():
        right = (forward(params, test["x"]).argmax(1) == test["labels"]).double()
    shares: dict[str, list[float]] = {}
    for author, value in zip(authors, right.tolist(), strict=True):
        shares.setdefault(author, []).append(value)
    return {
        "accuracy_of_mails": float(right.mean()),
        "accuracy_of_authors": sum(sum(own) / len(own) for own in shares.values()) / len(shares),
    }


@click.command(context_settings={"show_default": True})
@click.option("--data", "data_name", default="mails", help="mails, or a CSV file with author, text and label.")
@click.option("--epsilon", default=3.0, help="Privacy budget of a person.")
@click.option("--delta", default=1e-5, help="Must be below 1 / number of training authors.")
@click.option("--steps", default=60, help="Steps of each run.")
@click.option("--batch-size", default=256, help="Expected number of authors in a batch.")
@click.option("--max-texts", default=8, help="Public cap on the texts of an author that are used.")
@click.option("--lr", default=0.05, help="Learning rate of Adam.")
@click.option("--insecure-seed", default=None, type=int, help="A guessable privacy key, to repeat a run exactly.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the results to this JSON file.")
def main(
    data_name: str, epsilon: float, delta: float, steps: int, batch_size: int, max_texts: int, lr: float,
    insecure_seed: int | None, out: Path | None,
) -> None:  # fmt: skip
    """Train with a mail and with an author as the unit of privacy, at the same noise."""
    settings, since = dict(click.get_current_context().params), time.perf_counter()
    try:
        processes = join()
        processes.first(lambda: load_table(data_name))  # downloads
        table = load_table(data_name)
        train_rows, test_rows = split(table, 0.2)
        public_key = dpfunc.rng.insecure_key(0)  # which texts of an author are used is no secret
        persons = group_by_person([table.authors[r] for r in train_rows], max_texts=max_texts, key=public_key)
        clip = clipping.Flat(1.0)
        by_author = dpfunc.Plan.for_budget(
            epsilon=epsilon, delta=delta, dataset_size=len(persons), expected_batch_size=batch_size, num_steps=steps,
            clip=clip,
        )  # fmt: skip
        sampler = dpfunc.sampling.Poisson(len(train_rows), by_author.events(0, 1)[0].sampling_prob)
        by_text = dpfunc.Plan(sampler, clip, by_author.noise_multiplier, steps, delta)
    except (DataError, FetchError, dpfunc.errors.DPFuncError) as error:
        raise click.ClickException(str(error)) from error
    x_NW, labels_N = features(table.texts), torch.tensor(table.labels)
    texts, test = ({"x": x_NW[rows], "labels": labels_N[rows]} for rows in (train_rows, test_rows))
    test_authors = [table.authors[r] for r in test_rows]
    forward, params = dpfunc.functionalize(nn.Linear(WIDTH, 2))
    params = {name: torch.zeros_like(param) for name, param in params.items()}
    key = processes.key(insecure_seed)

    rows: list[dict[str, Any]] = []
    for unit, plan, loss, batches in (
        ("mail", by_text, sample_loss, partial(dpfunc.take, texts)),
        ("author", by_author, mean_over_texts(sample_loss), partial(persons.batch, texts)),
    ):
        found, state = train(
            partial(loss, forward), plan, batches, params, lr, dpfunc.rng.fold_in(key, unit), processes
        )
        spent = state.ledger.epsilon(delta).epsilon
        claims = {str(k): epsilon_of_group(plan, k) if unit == "mail" and k > 1 else spent for k in TEXTS}
        scores = accuracies(forward, found, test, test_authors)
        rows.append({"unit": unit, "epsilon_of_the_unit": spent, "epsilon_of_a_person_with_texts": claims, **scores})
    distributed.shutdown()
    if not processes.writes:
        return
    report(rows, len(persons), len(train_rows), persons.dropped, max_texts, by_author, delta)
    majority = max(table.labels.count(value) for value in (0, 1)) / len(table.labels)
    print(f"Majority class: {majority:.3f}. Test: {len(test_rows)} mails of {len(set(test_authors))} other authors.")
    if out:
        facts = {
            "train_authors": len(persons), "train_mails": len(train_rows), "test_mails": len(test_rows),
            "test_authors": len(set(test_authors)), "unused_mails": persons.dropped, "majority": majority,
            "noise_multiplier": by_author.noise_multiplier, "seconds": round(time.perf_counter() - since, 1),
        }  # fmt: skip
        out.write_text(json.dumps({"results": rows, "settings": {**settings, "out": None}, **facts}, indent=2) + "\n")


def report(
    rows: list[dict[str, Any]], num_authors: int, num_mails: int, dropped: int, cap: int, plan: dpfunc.Plan,
    delta: float,
) -> None:  # fmt: skip
    """The table, for people."""
    print(
        f"{num_authors} authors with {num_mails} mails; {dropped} mails above the cap of {cap} are not used by author."
    )
    print(f"Noise multiplier {plan.noise_multiplier:.3f}, {plan.num_steps} steps, delta {delta:g}, the same for both.")
    print(f"{'one row is':>10} {'accuracy: mails':>16} {'authors':>8}   epsilon of a person with that many mails")
    print(" " * 38 + "".join(f"{k:>10}" for k in TEXTS))
    for row in rows:
        claims = "".join(f"{value:10.2f}" for value in row["epsilon_of_a_person_with_texts"].values())
        print(f"{row['unit']:>10} {row['accuracy_of_mails']:16.3f} {row['accuracy_of_authors']:8.3f}  {claims}")


if __name__ == "__main__":
    main()
