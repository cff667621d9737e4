"""Who takes part: the step without privacy, dpfunc's engines, Opacus, opake, JAX. Each may change its module."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import dpfunc
from benchmarks.engines.cases import Case
from benchmarks.engines.problem import Problem, trained
from benchmarks.measure import AGAINST, ROOT, Contestant, Spec, TakesNoPart

PLAIN = "plain"
ENGINES = ("vmap", "loop", "ghost", "auto", "captured")
OPACUS = ("opacus-hooks", "opacus-ghost", "opacus-functorch")
OPAKE = "opake"
JAX_PLAIN, JAX_PRIVACY = "jax-plain", "jax-privacy"
JAX = (JAX_PLAIN, JAX_PRIVACY, *(f"{JAX_PRIVACY}/{size}" for size in (1, 4, 8)))
WHOLE_PLAIN, WHOLE_DPFUNC, WHOLE_JAX = "whole-plain", "whole-dpfunc", "whole-jax"
WHOLE_DEVICE = "whole-dpfunc-device"  # noise from the GPU
NAMES = (PLAIN, *ENGINES, *OPACUS, OPAKE, *JAX, WHOLE_PLAIN, WHOLE_DPFUNC, WHOLE_JAX)
OURS = (*ENGINES, WHOLE_DPFUNC, WHOLE_DEVICE)
INNER = 1 - 2.0**-13  # of the clip norm: dpfunc leaves room for rounding
JAX_MODES = {JAX_PLAIN: "plain", JAX_PRIVACY: "clipped", WHOLE_JAX: "whole"}
# JAX has an interpreter of its own: this variable names it, else the one that `make jax` installs is used.
VARIABLE = "DPFUNC_JAX_PYTHON"
INSTALLED = ROOT / ".cache" / "jax" / "bin" / "python"
# opake is installed apart by `make opake`, in a folder that only its own process reads.
OPAKE_FOLDER = ROOT / ".cache" / "opake"
LIMIT_SECONDS = 240.0
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def known(name: str) -> bool:
    """Whether a contestant of this name exists: an engine or JAX Privacy may carry its microbatch, as in `auto/4`."""
    base, slash, size = name.partition("/")
    if slash:
        named = size in ("none", "auto") and base in ENGINES
        return base in (*ENGINES, JAX_PRIVACY, WHOLE_JAX) and (named or (size.isdigit() and int(size) > 0))
    return name in (*NAMES, WHOLE_DEVICE)


def arrays(sums: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    wide = lambda value: value.float() if value.dtype == torch.bfloat16 else value  # numpy has no bfloat16
    return {name: wide(value.detach()).cpu().numpy() for name, value in sums.items()}


def plain(problem: Problem) -> Contestant:
    """Forward, mean loss, backward into `.grad`; no optimizer."""
    module = problem.module
    clear = partial(module.zero_grad, set_to_none=True)

    def step() -> None:
        clear()
        problem.losses(module(problem.inputs), problem.targets).mean().backward()

    return Contestant(step, clear=clear)


def clipped_grad_of(problem: Problem, engine: str, microbatch: str = "none") -> Callable[[], Mapping[str, Tensor]]:
    """The clipped sum of one of dpfunc's engines, by flat clipping."""
    if not hasattr(dpfunc.engines, engine):
        raise NotImplementedError(f"dpfunc has no engine {engine}")
    # the name of the file differs between the releases that are compared
    file = "clipped" if importlib.util.find_spec("dpfunc.clipped") else "clipped_grad"
    make = importlib.import_module(f"dpfunc.{file}").make_clipped_grad
    size = None if microbatch == "none" else microbatch if microbatch == "auto" else int(microbatch)
    loss_fn, params = problem.functional()
    clip = dpfunc.clipping.Flat(clip_norm=problem.clip_norm)
    clipped_grad = make(loss_fn, clip, engine=getattr(dpfunc.engines, engine)(), microbatch_size=size)
    step = lambda: clipped_grad(params, (problem.inputs, problem.targets))[0].sums
    for _ in range(3 if engine == "captured" else 0):  # what is measured is a replay
        step()
    return step


def opacus_module(problem: Problem) -> nn.Module:
    """The module, or its stand-in where Opacus has a layer of its own because it has no rule for torch's."""
    return problem.stand_in(problem.module).train() if problem.stand_in else problem.module


def opacus_instantiated(problem: Problem, *, functorch: bool) -> Contestant:
    """Opacus with one gradient a sample in memory, by layer rules or by functorch, then flat clipping."""
    from opacus import GradSampleModule

    module = opacus_module(problem)
    names = trained(module)
    wrapped = GradSampleModule(module, force_functorch=functorch)
    clear = partial(wrapped.zero_grad, set_to_none=True)  # its grad_sample as well

    def step() -> Mapping[str, Tensor]:
        clear()
        problem.losses(wrapped(problem.inputs), problem.targets).mean().backward()
        grads = {name: param.grad_sample for name, param in names.items()}
        norms_B = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
        factors_B = (problem.clip_norm / (norms_B + 1e-6)).clamp(max=1.0)
        return {name: torch.einsum("i,i...", factors_B, grad) for name, grad in grads.items()}

    return Contestant(step, arrays, clear)


def opacus_ghost(problem: Problem) -> Contestant:
    """Opacus' ghost clipping: norms in a first backward pass, the weighted sum in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = opacus_module(problem)
    names = trained(module)
    wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=problem.clip_norm)
    optimizer = torch.optim.SGD(names.values(), lr=0.0)  # its zero_grad is called between the passes
    clear = partial(wrapped.zero_grad, set_to_none=True)

    def step() -> Mapping[str, Tensor]:
        clear()
        losses_B = problem.losses(wrapped(problem.inputs), problem.targets)
        DPTensorFastGradientClipping(wrapped, optimizer, losses_B).backward()
        return {name: param.grad for name, param in names.items() if param.grad is not None}

    return Contestant(step, arrays, clear)


def opake(problem: Problem) -> Contestant:
    """Clipped sum of opake: `vmap(grad)` of the loss of one example.

    Raises:
        TakesNoPart: it is not installed.
    """
    if not OPAKE_FOLDER.exists():
        raise TakesNoPart("not installed. Run `make opake`.")
    sys.path.append(str(OPAKE_FOLDER))
    clipped_grad = importlib.import_module("opake.dpsgd.clipping").clipped_grad

    def loss_fn(params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(problem.module, dict(params), (x[None],))
        return problem.losses(output, y[None])[0]

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=problem.clip_norm, batch_argnums=(1, 2))
    params = {name: param.detach() for name, param in trained(problem.module).items()}

    def step() -> Mapping[str, Tensor]:
        nonlocal state
        clipped, state = grad_fn(params, problem.inputs, problem.targets, state=state)
        return clipped.pytree

    return Contestant(step, arrays)


def whole_plain(problem: Problem) -> Contestant:
    """The plain step, and SGD; its rate is zero, so that each step starts from the same weights."""
    inner, optimizer = plain(problem), torch.optim.SGD(trained(problem.module).values(), lr=0.0)
    return inner._replace(step=lambda: (inner.step(), optimizer.step()))


def whole_dpfunc(problem: Problem, source: Literal["secure", "device"] = "secure") -> Contestant:
    """A private step of the default engine, with noise from a secure key and the ledger; then SGD."""
    loss_fn, params = problem.functional()
    clip = dpfunc.clipping.Flat(clip_norm=problem.clip_norm)
    sampler = dpfunc.sampling.Poisson(problem.batch_size, 1.0)
    plan = dpfunc.Plan(sampler, clip, noise_multiplier=1.0, num_steps=100_000, delta=1e-3)
    dp_step = dpfunc.make_dp_step(loss_fn, plan, noise_source=source)
    optimizer = torch.optim.SGD(params.values(), lr=0.0)
    state = dp_step.init(params, key=dpfunc.secure_key())

    def step() -> None:
        nonlocal state
        grads, state, _ = dp_step(params, (problem.inputs, problem.targets), state)
        for name, grad in grads.items():
            params[name].grad = grad
        optimizer.step()

    clear = partial(optimizer.zero_grad, set_to_none=True)
    return Contestant(step, lambda result: arrays(clipped_grad_of(problem, "auto")()), clear)


OTHERS: dict[str, Callable[[Problem], Contestant]] = {
    PLAIN: plain, WHOLE_PLAIN: whole_plain, WHOLE_DPFUNC: whole_dpfunc,
    WHOLE_DEVICE: partial(whole_dpfunc, source="device"), "opacus-ghost": opacus_ghost,
    "opacus-hooks": partial(opacus_instantiated, functorch=False),
    "opacus-functorch": partial(opacus_instantiated, functorch=True),
    OPAKE: opake,
}  # fmt: skip


def case_of(spec: Spec) -> Case:
    """The case that is named, of the module that has it."""
    return importlib.import_module(spec["cases"]).ALL_CASES[spec["case"]]


def problem_of(spec: Spec) -> Problem:
    """The problem of a case, clipped to the norm that its truth has chosen."""
    problem = case_of(spec).problem(quick=spec["quick"]).to(spec["device"])
    problem = replace(problem, clip_norm=spec.get("clip_norm", problem.clip_norm))
    return problem.double() if spec.get("double") else problem


def contestant(spec: Spec) -> Contestant:
    """Set one up from what its process is told."""
    return contestant_of(spec["contestant"].removesuffix(AGAINST), problem_of(spec))


def contestant_of(name: str, problem: Problem) -> Contestant:
    """Set one up (not JAX); it raises whatever it does where it does not take the module, which is its own."""
    base, _, size = name.partition("/")
    if base in ENGINES:
        return Contestant(clipped_grad_of(problem, base, size or "none"), arrays)
    return OTHERS[name](problem)


def jax_spec(name: str, problem: Problem, spec: Spec, folder: Path) -> dict[str, Any]:
    """What a process of JAX is told: JAX Privacy, or JAX without privacy, for the same weights and batch.

    Raises:
        TakesNoPart: there is no JAX, the model is not written in jax.numpy, or it is not on a CPU.
    """
    named = os.environ.get(VARIABLE) or (str(INSTALLED) if INSTALLED.exists() else None)
    if named is None:
        raise TakesNoPart(f"not installed. Run `make jax`, or name an interpreter that has JAX Privacy in {VARIABLE}.")
    if not problem.jax_model:
        raise TakesNoPart(f"left out: {problem.no_jax_model}")
    if spec["device"] != "cpu":
        raise TakesNoPart("left out: JAX is measured on CPUs only")
    file = folder / "arrays.npz"
    if not file.exists():
        parameters = {
            f"{'trained' if param.requires_grad else 'frozen'}/{key}": param.detach().numpy()
            for key, param in problem.module.named_parameters()
        }
        np.savez(file, inputs=problem.inputs.numpy(), targets=problem.targets.numpy(), **parameters)
    base, _, size = name.partition("/")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTHON"))}
    flags = {"XLA_FLAGS": ONE_THREAD} if spec["threads"] == 1 else {}
    return {
        **spec, "module": "benchmarks.engines.jax_models", "python": named, "limit_seconds": LIMIT_SECONDS,
        "variables": {**kept, **flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        "model": problem.jax_model, "arrays": str(file), "mode": JAX_MODES[base],
        "microbatch": int(size) if size else None,
    }  # fmt: skip
