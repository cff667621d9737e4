"""Training with and without privacy, of the same function with the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from processes import Processes
from torch import Tensor
from tqdm import tqdm
from vlm import per_image_loss

import dpfunc
from dpfunc import clipping
from dpfunc.accounting.record import Record
from dpfunc.checkpoint import make_record
from dpfunc.checkpoint.journal import Journal

# Learning rates and shares of the clip norm by kind of parameter. Chosen on the validation images.
RATES = {"head": 1.0, "projector": 0.003, "adapters": 0.01}
BOUNDS = {"head": 1.0, "projector": 0.3, "adapters": 0.3}
Rows = dict[str, Tensor]
VALIDATION = "validation and test images, which are held out: the table shows accuracy on them"


@dataclass(frozen=True)
class Task:
    """What is trained: a function `(params, features, question) -> logits`, where it starts, and its three parts."""

    forward: Callable[..., Tensor]
    params: dict[str, Tensor]
    train: Rows
    validation: Rows
    test: Rows

    def losses(self, params: dict[str, Tensor], batch: Rows) -> Tensor:
        """One loss an image."""
        return per_image_loss(
            self.forward(params, batch["features"], batch["question"]), batch["answer"], batch["asked"]
        )


@torch.no_grad()
def accuracy(task: Task, params: dict[str, Tensor], part: Rows) -> float:
    """Share of the questions that are answered correctly."""
    right, asked = 0, 0
    for start in range(0, len(part["asked"]), 128):
        rows = {name: value[start : start + 128] for name, value in part.items()}
        correct = task.forward(params, rows["features"], rows["question"]).argmax(-1) == rows["answer"]
        right, asked = right + int((correct & rows["asked"]).sum()), asked + int(rows["asked"].sum())
    return right / asked


def blind(task: Task) -> Task:
    """The same task without images: what the questions alone give away."""
    parts = (
        {**rows, "features": torch.zeros_like(rows["features"])} for rows in (task.train, task.validation, task.test)
    )
    return Task(task.forward, task.params, *parts)


def kind(name: str) -> str:
    """Head, projector or adapters."""
    return "adapters" if "lora" in name else name.partition(".")[0]


def adam(params: dict[str, Tensor], lr: float, num_steps: int) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """Any optimizer will do: what it gets is released. Linear decay to zero."""
    rates = [lr * RATES[kind(name)] for name in params]
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": rate} for p, rate in zip(params.values(), rates, strict=True)], betas=(0.9, 0.99)
    )

    def set_rate(step: int) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / num_steps)

    return optimizer, set_rate


def train_plain(task: Task, lr: float, epochs: int, seed: int) -> dict[str, Tensor]:
    """Without privacy: ordinary batches of 64 images."""
    params = {name: p.clone().requires_grad_() for name, p in task.params.items()}
    n, generator = len(task.train["asked"]), torch.Generator().manual_seed(seed)
    optimizer, set_rate = adam(params, lr, epochs * math.ceil(n / 64))
    step = 0
    for _ in tqdm(range(epochs), desc="without privacy", unit="epoch", leave=False):
        for indices in torch.randperm(n, generator=generator).split(64):
            set_rate(step)
            loss = task.losses(params, dpfunc.take(task.train, indices)).mean()
            for (_, p), grad in zip(params.items(), torch.autograd.grad(loss, list(params.values())), strict=True):
                p.grad = grad
            optimizer.step()
            step += 1
    return {name: p.detach() for name, p in params.items()}


def make_plan(
    params: dict[str, Tensor], *, epsilon: float, delta: float, n: int, batch: int, steps: int
) -> dpfunc.Plan:
    """Automatic clipping with a bound for each kind of parameter, and the noise that the budget asks for."""
    group_of = {name: kind(name) for name in params}
    bounds = {group: BOUNDS[group] for group in sorted(set(group_of.values()))}
    return dpfunc.Plan.for_budget(
        epsilon=epsilon, delta=delta, dataset_size=n, expected_batch_size=min(batch, n), num_steps=steps,
        clip=clipping.Automatic(clip_norm=bounds, groups=clipping.ByName(group_of)),
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished private run; `curve` is validation accuracy after some steps."""

    params: dict[str, Tensor]
    state: dpfunc.StepState
    curve: list[tuple[int, float]]
    record: Record


def train_private(
    task: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.Key, folder: Path, resume: bool, processes: Processes
) -> Run:
    """The loop, with a journal and checkpoints from which it can be resumed."""
    dp_step = dpfunc.make_dp_step(
        task.losses, plan, engine="auto", microbatch_size="auto", journal=Journal(folder / "journal.jsonl", plan),
        ranks=processes.ranks,
    )  # fmt: skip
    params = {n: p.clone().requires_grad_() for n, p in task.params.items()}
    optimizer, set_rate = adam(params, lr, plan.num_steps)
    curve: list[tuple[int, float]] = []
    if resume:
        saved = dpfunc.load(
            folder / "checkpoint",
            plan=plan,
            params=params,
            data=task.train,
            journal=folder / "journal.jsonl",
            ranks=processes.ranks,
        )
        for n, p in params.items():
            p.data.copy_(saved.params[n])
        optimizer.load_state_dict(dict(saved.optimizer_state or {}))
        state, curve = saved.state, [tuple(point) for point in saved.extra["curve"]]
        processes.say(f"Resumed at step {state.step}; {state.ledger.num_steps} steps are in the ledger.")
    else:
        state = dp_step.init(params, key)

    def checkpoint() -> None:
        dpfunc.save(
            folder / "checkpoint", params=params, state=state, plan=plan, data=task.train,
            optimizer_state=optimizer.state_dict(),
            extra=processes.shared({"curve": curve}),
            journal=folder / "journal.jsonl", ranks=processes.ranks,
        )  # fmt: skip

    checkpoint()
    batches = plan.batches(state, processes.ranks)
    quiet = not processes.writes
    for indices in tqdm(batches, desc="DP", total=state.limit, initial=state.step, unit="step", disable=quiet):
        set_rate(state.step)
        grads, state, _ = dp_step(params, dpfunc.take(task.train, indices), state)
        for n, p in params.items():
            p.grad = grads[n]
        optimizer.step()
        if state.step % max(1, plan.num_steps // 6) == 0 or state.step == state.limit:
            curve.append((state.step, accuracy(task, params, task.validation)))
            checkpoint()
    processes.say(dp_step.decision)
    record = make_record(dp_step, state, unit="one image with all its questions", not_covered=[VALIDATION])
    return Run({n: p.detach() for n, p in params.items()}, state, curve, record)
