"""The plain loop over dp_step, with its journal and checkpoints, and the same training without privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import Processes
from torch import Tensor
from tqdm import tqdm

import dpfunc
from dpfunc.accounting.record import Record
from dpfunc.checkpoint import make_record
from dpfunc.checkpoint.journal import Journal
from dpfunc.evidence import Replay, replay

Rows = dict[str, Tensor]
TWIN = "accuracy of the non-private twin, which was trained on the same records"


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Args:
        losses: (params, rows) -> one loss a sample. right: (params, rows) -> number of right answers, and of all.
        params: where training starts. train, validation, test: rows. rate: share of the learning rate, by name.
        betas: of Adam.
    """

    losses: Callable[[Rows, Rows], Tensor]
    right: Callable[[Rows, Rows], tuple[int, int]]
    params: Rows
    train: Rows
    validation: Rows
    test: Rows
    rate: Callable[[str], float]
    betas: tuple[float, float] = (0.9, 0.999)


def num_rows(rows: Rows) -> int:
    """Number of samples."""
    return len(next(iter(rows.values())))


@torch.no_grad()
def accuracy(task: Task, params: Rows, part: Rows) -> float:
    """Share of right answers."""
    counts = [task.right(params, dpfunc.take(part, rows)) for rows in torch.arange(num_rows(part)).split(128)]
    return sum(right for right, _ in counts) / sum(asked for _, asked in counts)


def adam(task: Task, params: Rows, lr: float, num_steps: int) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """Any optimizer will do: what it gets is released. Linear decay to zero."""
    rates = [lr * task.rate(name) for name in params]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(params.values(), rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=task.betas)

    def set_rate(step: int) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / num_steps)

    return optimizer, set_rate


def train_plain(task: Task, lr: float, epochs: int, seed: int) -> Rows:
    """Without privacy: the same parameters, ordinary batches of 64."""
    params = {name: p.clone().requires_grad_() for name, p in task.params.items()}
    n, generator = num_rows(task.train), torch.Generator().manual_seed(seed)
    optimizer, set_rate = adam(task, params, lr, epochs * math.ceil(n / 64))
    step = 0
    for _ in tqdm(range(epochs), desc="without privacy", unit="epoch", leave=False):
        for indices in torch.randperm(n, generator=generator).split(64):
            set_rate(step)
            loss = task.losses(params, dpfunc.take(task.train, indices)).mean()
            for p, grad in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
                p.grad = grad
            optimizer.step()
            step += 1
    return {name: p.detach() for name, p in params.items()}


def descend(
    dp_step: Any, params: Rows, rows: Rows, state: dpfunc.state.StepState, optimizer: torch.optim.Optimizer
) -> tuple[dpfunc.state.StepState, dpfunc.types.Unreleased]:
    """One private step: its gradients are those of any optimizer."""
    grads, state, unreleased = dp_step(params, rows, state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
    return state, unreleased


def verify(task: Task, plan: dpfunc.Plan, lr: float, steps: int = 2) -> Replay:
    """A replay of the first steps on neighbouring data: nothing but the clipped sum moves."""

    def init(dp_step: Any, data: Rows, key: dpfunc.rng.Key) -> dict[str, Any]:
        params = {n: p.clone().requires_grad_() for n, p in task.params.items()}
        optimizer, set_rate = adam(task, params, lr, plan.num_steps)
        return {"params": params, "state": dp_step.init(params, key), "optimizer": optimizer, "set_rate": set_rate}

    def step(dp_step: Any, data: Rows, carry: dict[str, Any]) -> dict[str, Any]:
        params, state = carry["params"], carry["state"]
        carry["set_rate"](state.step)
        rows = dpfunc.take(data, dp_step.plan.draw(state, state.step))
        state, _ = descend(dp_step, params, rows, state, carry["optimizer"])
        return {**carry, "state": state}

    dp_step = dpfunc.make_dp_step(task.losses, plan, microbatch_size=32)
    return replay(dp_step, init, step, task.train, steps=steps, candidates=2)


def spent_curve(plan: dpfunc.Plan) -> list[tuple[int, float]]:
    """Epsilon after a few numbers of steps, found once before training: an accountant in every step would be slow."""
    steps = sorted({round(plan.num_steps * share / 12) for share in range(1, 13)} - {0})
    return [(step, plan.guarantee(step).epsilon) for step in steps]


@dataclass(frozen=True)
class Run:
    """A finished private run.

    Args:
        params, state: at its end. curve: (step, validation accuracy). spent: (step, epsilon).
        norms: of the last gradients, unreleased. record: of its cost. twin: validation accuracy of the plain twin.
    """

    params: Rows
    state: dpfunc.state.StepState
    curve: list[tuple[int, float]]
    spent: list[tuple[int, float]]
    norms: list[float]
    record: Record
    twin: float | None


def train_private(
    name: str, task: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.rng.Key, processes: Processes, *, unit: str,
    not_covered: list[str], folder: Path | None = None, resume: bool = False, twin: float | None = None,
    microbatch_size: int | str = 32,
) -> Run:  # fmt: skip
    """The loop. With a folder it keeps a journal and checkpoints, from which it can be resumed."""
    journal = Journal(folder / "journal.jsonl", plan) if folder else None
    dp_step = dpfunc.make_dp_step(
        task.losses, plan, microbatch_size=microbatch_size, journal=journal, ranks=processes.ranks
    )
    params = {n: p.clone().requires_grad_() for n, p in task.params.items()}
    optimizer, set_rate = adam(task, params, lr, plan.num_steps)
    curve: list[tuple[int, float]] = []
    norms: list[float] = []
    if resume and folder:
        saved = dpfunc.load(
            folder / "checkpoint", plan=plan, params=params, data=task.train, journal=folder / "journal.jsonl",
            ranks=processes.ranks,
        )  # fmt: skip
        for n, p in params.items():
            p.data.copy_(saved.params[n])
        optimizer.load_state_dict(dict(saved.optimizer_state or {}))
        state, twin = saved.state, saved.extra["twin"]
        curve, norms = [tuple(point) for point in saved.extra["curve"]], list(saved.extra["norms"])
        processes.say(f"Resumed at step {state.step}; {state.ledger.num_steps} steps are in the ledger.")
    else:
        state = dp_step.init(params, key)
    spent = spent_curve(plan)

    def checkpoint() -> None:
        if folder:
            dpfunc.save(
                folder / "checkpoint", params=params, state=state, plan=plan, data=task.train,
                optimizer_state=optimizer.state_dict(), journal=folder / "journal.jsonl", ranks=processes.ranks,
                extra=processes.shared({"curve": curve, "norms": norms, "twin": twin}),
            )  # fmt: skip

    checkpoint()
    batches = plan.batches(state, processes.ranks)
    shown = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"  # no times: a step takes as long as its batch is large
    bar = tqdm(
        batches, desc=name, total=state.limit, initial=state.step, bar_format=shown, disable=not processes.writes
    )
    for indices in bar:
        set_rate(state.step)
        state, unreleased = descend(dp_step, params, dpfunc.take(task.train, indices), state, optimizer)
        bound = next(epsilon for at, epsilon in spent if at >= state.step)
        bar.set_postfix_str(f"epsilon <= {bound:.2f} of {plan.epsilon:g}")
        if state.step > state.limit - 4:
            norms += unreleased.norms_BG.square().sum(1).sqrt().tolist()
        if state.step % max(1, plan.num_steps // 8) == 0 or state.step == state.limit:
            curve.append((state.step, accuracy(task, params, task.validation)))
            checkpoint()
    not_covered = [*not_covered, *([TWIN] if twin is not None else [])]
    record = make_record(dp_step, state, unit=unit, not_covered=not_covered)
    return Run({n: p.detach() for n, p in params.items()}, state, curve, spent, norms, record, twin)
