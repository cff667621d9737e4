"""Who takes part: the step without privacy, dpfunc's engines, Opacus, JAX. Each may change the module it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dpfunc
from benchmarks.engines.jax_peer import Peer, TakesNoPart
from benchmarks.engines.problem import Problem, trained
from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping import Flat
from dpfunc.clipping.bounds import SLACK

PLAIN = "plain"
ENGINES = ("vmap", "loop", "ghost", "auto")
OPACUS = ("opacus-hooks", "opacus-ghost", "opacus-functorch")
JAX_PLAIN = "jax-plain"
JAX_PRIVACY = "jax-privacy"
JAX = (JAX_PLAIN, JAX_PRIVACY, *(f"{JAX_PRIVACY}/{size}" for size in (1, 4, 8)))
WHOLE_PLAIN, WHOLE_DPFUNC, WHOLE_JAX = "whole-plain", "whole-dpfunc", "whole-jax"
WHOLE = (WHOLE_PLAIN, WHOLE_DPFUNC, WHOLE_JAX)
NAMES = (PLAIN, *ENGINES, *OPACUS, *JAX, *WHOLE)
NO_SUM = (PLAIN, WHOLE_PLAIN)  # nothing that could be compared with the truth
_TAKES_MICROBATCH = (*ENGINES, JAX_PRIVACY, WHOLE_JAX)


def _as_returned(result: Any) -> Any:
    return result


def _nothing() -> None:
    pass


class Contestant(NamedTuple):
    """A prepared step.

    Args:
        step: one step. clear: drop what a step leaves behind. bound: the clip norm that is kept to.
        sums: the clipped sum from what a step returned; without privacy the sum, or None where it is not looked at.
        close: at the end. memory: measures a step whose memory torch does not see. facts: for the result file.
    """

    step: Callable[[], Any]
    clear: Callable[[], None]
    bound: float
    sums: Callable[[Any], Mapping[str, Tensor] | None] = _as_returned
    close: Callable[[], None] = _nothing
    memory: Callable[[], dict[str, float]] | None = None
    facts: Mapping[str, Any] = {}


def plain(problem: Problem) -> Contestant:
    """Forward, mean loss, backward into `.grad`; no optimizer."""
    module = problem.module

    def clear() -> None:
        module.zero_grad(set_to_none=True)

    def step() -> None:
        clear()
        problem.losses(module(problem.inputs), problem.targets).mean().backward()

    return Contestant(step, clear, problem.clip_norm)


def microbatch(text: str) -> int | str | None:
    """`none`, `auto` or a number, as `make_clipped_grad` wants it."""
    return None if text == "none" else text if text == "auto" else int(text)


def ours(problem: Problem, engine_name: str, microbatch_size: str) -> Contestant:
    """One of dpfunc's engines with flat clipping."""
    make_engine = getattr(dpfunc.engines, engine_name, None)
    if make_engine is None:
        raise NotImplementedError(f"dpfunc has no engine {engine_name}")
    loss_fn, params = problem.functional()

    clip, size = Flat(clip_norm=problem.clip_norm), microbatch(microbatch_size)
    clipped_grad = make_clipped_grad(loss_fn, clip, engine=make_engine(), microbatch_size=size)
    batch = (problem.inputs, problem.targets)

    def step() -> Mapping[str, Tensor]:
        clipped, _ = clipped_grad(params, batch)
        return clipped.sums

    return Contestant(step, lambda: None, problem.clip_norm * (1 - SLACK))


def opacus_module(problem: Problem) -> nn.Module:
    """The module, or its stand-in where Opacus has a layer of its own because it has no rule for torch's."""
    return problem.stand_in(problem.module).train() if problem.stand_in else problem.module


def opacus_instantiated(problem: Problem, *, functorch: bool) -> Contestant:
    """Opacus with one gradient a sample in memory, by layer rules or by functorch, then flat clipping."""
    from opacus import GradSampleModule

    module = opacus_module(problem)
    names = trained(module)
    wrapped = GradSampleModule(module, force_functorch=functorch)

    def clear() -> None:
        wrapped.zero_grad(set_to_none=True)  # its grad_sample as well

    def step() -> Mapping[str, Tensor]:
        clear()
        problem.losses(wrapped(problem.inputs), problem.targets).mean().backward()
        grads = {name: param.grad_sample for name, param in names.items()}
        norms_B = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
        factors_B = (problem.clip_norm / (norms_B + 1e-6)).clamp(max=1.0)
        return {name: torch.einsum("i,i...", factors_B, grad) for name, grad in grads.items()}

    return Contestant(step, clear, problem.clip_norm)


def opacus_ghost(problem: Problem) -> Contestant:
    """Opacus' ghost clipping: norms in a first backward pass, the weighted sum in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = opacus_module(problem)
    names = trained(module)
    wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=problem.clip_norm)
    optimizer = torch.optim.SGD(names.values(), lr=0.0)  # its zero_grad is called between the passes

    def clear() -> None:
        wrapped.zero_grad(set_to_none=True)

    def step() -> Mapping[str, Tensor]:
        clear()
        losses_B = problem.losses(wrapped(problem.inputs), problem.targets)
        DPTensorFastGradientClipping(wrapped, optimizer, losses_B).backward()
        return {name: param.grad for name, param in names.items() if param.grad is not None}

    return Contestant(step, clear, problem.clip_norm)


def whole_plain(problem: Problem) -> Contestant:
    """The plain step, and SGD; its rate is zero, so that each step starts from the same weights."""
    inner, optimizer = plain(problem), torch.optim.SGD(trained(problem.module).values(), lr=0.0)

    def step() -> None:
        inner.step()
        optimizer.step()

    return Contestant(step, inner.clear, inner.bound)


def whole_dpfunc(problem: Problem) -> Contestant:
    """A private step of the default engine with noise from a secure key, its records and the ledger; then SGD."""
    loss_fn, params = problem.functional()
    batch, clip = (problem.inputs, problem.targets), Flat(clip_norm=problem.clip_norm)
    sampler = dpfunc.sampling.Poisson(problem.batch_size, 1.0)
    plan = dpfunc.Plan(sampler, clip, noise_multiplier=1.0, num_steps=100_000, delta=1e-3)
    dp_step = dpfunc.make_dp_step(loss_fn, plan)
    state = dp_step.init(params, key=dpfunc.secure_key())
    optimizer = torch.optim.SGD(params.values(), lr=0.0)

    def step() -> None:
        nonlocal state
        grads, state, _ = dp_step(params, batch, state)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()

    def clear() -> None:
        optimizer.zero_grad(set_to_none=True)

    def sums(result: object) -> Mapping[str, Tensor]:
        return make_clipped_grad(loss_fn, clip, engine=dpfunc.engines.auto())(params, batch)[0].sums

    return Contestant(step, clear, problem.clip_norm * (1 - SLACK), sums)


def jax(problem: Problem, name: str) -> Contestant:
    """JAX in a process of its own: the mean gradient, the clipped sum of JAX Privacy, or a whole step around it."""
    base, _, size = name.partition("/")
    mode = {JAX_PLAIN: "plain", JAX_PRIVACY: "clipped", WHOLE_JAX: "whole"}[base]
    peer = Peer(problem, mode, int(size) if size else None)
    bound = math.inf if base == JAX_PLAIN else problem.clip_norm
    sums, facts = lambda result: peer.sums(), {"versions": peer.versions}
    return Contestant(peer.step, _nothing, bound, sums, peer.close, peer.memory, facts)


def known(name: str) -> bool:
    """Whether a contestant of this name exists: an engine may carry its microbatch, as in `auto/4`."""
    base, slash, size = name.partition("/")
    if slash:
        named = size in ("none", "auto") and base in ENGINES
        return base in _TAKES_MICROBATCH and (named or (size.isdigit() and int(size) > 0))
    return name in NAMES


def microbatch_of(name: str, default: str) -> str:
    """The microbatch of a contestant: its own, else the default for engines, else none."""
    base, _, size = name.partition("/")
    return size or (default if base in ENGINES else "none")


def prepare(name: str, problem: Problem, microbatch_size: str = "none") -> Contestant:
    """Set a contestant up.

    Args:
        name: one of NAMES, an engine with or without its microbatch. problem: its module is the contestant's now.
        microbatch_size: of engines whose name carries none.

    Raises:
        whatever the contestant raises when it does not take the module.
    """
    base = name.partition("/")[0]
    if name == PLAIN:
        return plain(problem)
    if base in ENGINES:
        return ours(problem, base, microbatch_of(name, microbatch_size))
    if name == WHOLE_PLAIN:
        return whole_plain(problem)
    if name == WHOLE_DPFUNC:
        return whole_dpfunc(problem)
    if base in (*JAX, WHOLE_JAX):
        return jax(problem, name)
    if name == "opacus-ghost":
        return opacus_ghost(problem)
    return opacus_instantiated(problem, functorch=name == "opacus-functorch")


def reason(error: BaseException) -> str:
    """Why a contestant does not run, in one line."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, TakesNoPart):
        return f"x: {lines[0]}"
    text = f"{type(error).__name__}: {lines[0].strip()}"
    return "x: " + (text if len(text) <= 180 else text[:177] + "...")
