"""One case: build it, take plain steps, take private steps, compare norms with those of single samples."""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpfunc
from benchmarks.measure import Contestant, Spec
from benchmarks.survey import audio, multimodal, other_nets, peft_methods, texts, vision
from benchmarks.survey.case import Batch, Case, LossFn, Subject
from dpfunc import engines
from dpfunc.functional import BIASES, functionalize
from dpfunc.lora import attach
from dpfunc.rng import insecure_key

FIELDS = (texts, vision, multimodal, audio, peft_methods, other_nets)
REPEATS, WARMUP, TRIES = 3, 1, 8
ROUGH = 0.05
FILES = re.compile(r"(?:/[\w.+-]+){2,}/")  # folders of this machine
NORMS = "norm|ln_"
Step, Forward = Callable[[], object], Callable[..., Any]


def cases() -> dict[str, Case]:
    """By name, in the order of the fields."""
    found = [case for field in FIELDS for case in field.cases()]
    named = {case.name: case for case in found}
    if len(named) != len(found):
        raise ValueError("Two cases have the same name.")
    return named


class OutOfTime(BaseException):
    """Not an Exception: nothing on the way may take it for an error of the model."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End what runs longer, as far as it is Python."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(case: Case, limit: int = 60) -> dict[str, Any]:
    """A line of the table. With "left_out" it is none: the model cannot be built here, or does not run by itself."""
    row, start = case.about, time.perf_counter()
    blamed = "left_out"
    try:
        with limited(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models: the survey lists errors
            torch.manual_seed(0)
            np.random.seed(0)  # masks of speech models are drawn with it
            random.seed(0)
            subject = prepared(case)
            inside = subject.module.get_base_model() if hasattr(subject.module, "peft_config") else subject.module
            pattern = trained_names(case, subject.module)
            row |= {"model": type(inside).__name__, "trained": "norms" if pattern == NORMS else case.trained}
            targets = adapted_layers(subject.module) if case.trained == "LoRA" else []
            blamed = "error"
            forward, params = functions(case, subject, targets, pattern)
            blamed = "left_out"
            row["plain_ms"] = milliseconds(plain_step(case, subject, forward, params, pattern))
            blamed = "error"
            row.update(private(subject, forward, params, row["plain_ms"]))
    except OutOfTime:
        row[blamed] = f"took more than {limit} s"
    except Exception as error:  # noqa: BLE001  (any error of a model or of an engine is a finding)
        row[blamed] = f"{type(error).__name__}: {FILES.sub('...', str(error))}"
    if "error" in row:
        row.update(engine="refused", reason=row["error"].splitlines()[0])
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def contestant(spec: Spec) -> Contestant:
    """For `benchmarks.measure`: it answers with the row of a case."""
    known = cases()
    return Contestant(lambda: None, answer=lambda name: measure(known[name], spec["limit"]))


def prepared(case: Case) -> Subject:
    """The subject in its mode, its parameters moved so that none has a special value."""
    subject = case.subject()
    module = subject.module
    if case.trained == "GroupNorm":
        module = dpfunc.functional.replace_batchnorm(module, max_groups=4)
    module.train(case.mode == "train")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(ROUGH * torch.randn(parameter.shape).to(parameter))
    return Subject(module, subject.batch, subject.loss)


def adapted_layers(module: nn.Module) -> list[str]:
    """Layers that get an adapter: linear ones and convolutions that are large enough, without heads."""
    heads = ("lm_head", "classifier", "score", "head", "proj_out")
    fits = lambda layer: isinstance(layer, nn.Linear | nn.Conv2d) or type(layer).__name__ == "Conv1D"
    large = lambda layer: min(layer.weight.shape[:2]) >= 4 and getattr(layer, "groups", 1) == 1
    layers = module.named_modules()
    found = [name for name, layer in layers if fits(layer) and large(layer) and not name.endswith(heads)]
    if not found:
        raise LookupError("No layer for an adapter.")
    return found


def trained_names(case: Case, module: nn.Module) -> str | None:
    """A pattern for what is trained: of biases, or of norms where there are none; None is everything."""
    if case.trained != "biases":
        return None
    return BIASES if any(re.search(BIASES, name) for name, _ in module.named_parameters()) else NORMS


def plain_step(case: Case, subject: Subject, forward: Forward, params: Mapping[str, Tensor], names: str | None) -> Step:
    """Gradients of the mean loss, as a step without privacy computes them: of the module itself where it can be."""
    if case.trained in ("full", "biases", "GroupNorm"):
        loss_fn, leaves = subject.loss(lambda params, *args, **options: subject.module(*args, **options)), {}
        found = [(name, p) for name, p in subject.module.named_parameters() if p.requires_grad]
        wanted = [p for name, p in found if re.search(names or "", name)]
    else:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss_fn, wanted = subject.loss(forward), list(leaves.values())

    def step() -> None:
        losses_B = loss_fn(leaves, subject.batch)
        if not bool(torch.isfinite(losses_B).all()):
            raise ArithmeticError(f"losses of the plain model are {losses_B.tolist()}")
        torch.autograd.grad(losses_B.mean(), wanted, allow_unused=True)

    return step


def functions(case: Case, subject: Subject, targets: list[str], names: str | None) -> tuple[Forward, dict[str, Tensor]]:
    """The forward function and its parameters; those of adapters moved away from where they start."""
    if case.trained == "LoRA":
        dropout = 0.1 if case.mode == "train" else 0.0
        adapter = attach(subject.module, insecure_key(0), targets=targets, rank=2, alpha=4, dropout=dropout)
        return adapter.forward, {name: p + 0.1 * torch.randn(p.shape) for name, p in adapter.params.items()}
    if hasattr(subject.module, "peft_config") and case.trained not in ("full", "biases", "GroupNorm"):
        from dpfunc.hf import peft

        return peft.functionalize(subject.module)
    return functionalize(subject.module, names)


def private(subject: Subject, forward: Forward, params: Mapping[str, Tensor], plain_ms: float) -> dict[str, Any]:
    """What `auto` does with it, and how it computed a step."""
    loss_fn, engine = subject.loss(forward), engines.auto()

    def step() -> None:
        """Per-sample norms and a clipped sum."""
        result = engine(loss_fn, params, subject.batch)
        norms_B = torch.stack(list(result.sq_norms().values())).sum(0).sqrt()
        result.weighted_sum(dict.fromkeys(params, 1.0 / norms_B.clamp(min=1.0)))

    start = time.perf_counter()
    step()
    first_ms, step_ms = 1e3 * (time.perf_counter() - start), milliseconds(step)
    decision = engine.decision(loss_fn)
    found = {
        "engine": decision.engine, "reason": (decision.reason or "nothing").splitlines()[0],
        "first_ms": round(first_ms, 1), "step_ms": step_ms, "ratio": round(step_ms / plain_ms, 2),
    }  # fmt: skip
    return {**found, **compared(engine, loss_fn, params, subject)}


def milliseconds(step: Step) -> float:
    times = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[WARMUP:]), 3)


def compared(engine: Any, loss_fn: LossFn, params: Mapping[str, Tensor], subject: Subject) -> dict[str, Any]:
    """Norms of each parameter's gradient against the loop's, relative to the norm of the sample's whole gradient.

    A model that draws random numbers is compared in eval mode; not at all if it draws them there too, as a VAE does.
    """
    if not repeatable(loss_fn, params, subject.batch):
        subject.module.eval()
        if not differentiable(loss_fn, params, subject.batch) or not repeatable(loss_fn, params, subject.batch):
            return {}
    found = engine(loss_fn, params, subject.batch).sq_norms()
    single = engines.loop()(loss_fn, params, subject.batch).sq_norms()
    total_B = torch.stack([sq_B.double() for sq_B in single.values()]).sum(0).sqrt()
    off = lambda name: (found[name].double().sqrt() - single[name].double().sqrt()).abs().div(total_B + 1e-12).max()
    return {
        "parity": float(f"{max(float(off(name)) for name in single):.2g}"),
        "parity_mode": "train" if subject.module.training else "eval", "parameters": len(single),
        "without_gradient": sum(not bool(sq_B.any()) for sq_B in single.values()),
    }  # fmt: skip


def differentiable(loss_fn: LossFn, params: Mapping[str, Tensor], batch: Batch) -> bool:
    """A few models have gradients in training mode only."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    try:
        torch.autograd.grad(loss_fn(leaves, batch).sum(), list(leaves.values()), allow_unused=True)
    except AssertionError:
        return False
    return True


def repeatable(loss_fn: LossFn, params: Mapping[str, Tensor], batch: Batch) -> bool:
    """Losses do not depend on random numbers."""
    first_B = loss_fn(params, batch).detach()  # with gradients: they may be a part of the loss
    return all(bool(torch.equal(loss_fn(params, batch).detach(), first_B)) for _ in range(TRIES))
