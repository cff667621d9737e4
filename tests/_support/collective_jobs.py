"""What the workers of test_engine_collectives.py do: losses that communicate, with and without being told off."""

from __future__ import annotations

import warnings
from types import FunctionType

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workers import caught

import dpfunc
from dpfunc import engines
from dpfunc._utils.processes import process_context
from dpfunc.errors import DPFuncError


def scaled_by_all(params, batch):
    """Divides by a number of all ranks: functional."""
    total = funcol.all_reduce(batch["x"].detach().abs().sum((1, 2)), "sum", dist.group.WORLD)
    return _losses(params, batch) / total


def scaled_in_place(params, batch):
    """The same, with the ordinary collective."""
    total = batch["x"].detach().abs().sum((1, 2)).clone()
    dist.all_reduce(total)
    return _losses(params, batch) / total


def gathered(params, batch):
    """In-batch negatives over ranks."""
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    every = gather(batch["x"].mean((1, 2)), 0, dist.group.WORLD)
    return _losses(params, batch) - every.sum()


def autograd_function(params, batch):
    """A collective that autograd knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and used
        return all_reduce(_losses(params, batch), group=dist.group.WORLD)


def trained_by_all(params, batch):
    """The sum of a trained parameter over ranks, whose backward pass would sum gradients of records over ranks."""
    name, weight = next(iter(params.items()))
    return _losses({**params, name: funcol.all_reduce(weight, "sum", dist.group.WORLD) / 2}, batch)


def sums_weights(params, batch):
    """Communicates what does not depend on a sample, as FSDP2 does when it gathers frozen weights."""
    weight = torch.full((3,), 2.0)
    total = funcol.all_reduce(weight, "sum", dist.group.WORLD)
    return _losses(params, batch) * total.sum()


def _said_by(module):
    """The loss with an ordinary collective, as if its code were in another module."""
    return FunctionType(scaled_in_place.__code__, {**globals(), "__name__": module}, "as_in_" + module)


def _losses(params, batch):
    return F.cross_entropy(F.linear(batch["x"], params["w"], params["b"]).mean(1), batch["y"], reduction="none")


ALL = (scaled_by_all, scaled_in_place, gathered, autograd_function, trained_by_all, sums_weights)
LOSSES = {
    **{loss.__name__: loss for loss in ALL},
    "context_parallel": _said_by("torch.distributed.tensor.experimental._context_parallel"),
    "pipeline": _said_by("torch.distributed.pipelining.stage"),
}


def case():
    generator = torch.Generator().manual_seed(10 + dist.get_rank())  # other records on each rank
    params, x = {"w": torch.ones(3, 6) / 3, "b": torch.zeros(3)}, torch.randn(4, 5, 6, generator=generator)
    return params, {"x": x, "y": torch.randint(3, (4,), generator=generator)}


def message(loss, engine):
    """The error that an engine raises, or its losses."""
    params, batch = case()
    try:
        result = getattr(engines, engine)()(LOSSES[loss], params, batch)
    except (DPFuncError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "losses", result.losses_B.tolist()


def data_parallel_module():
    """Names and per-sample gradients of a module in DistributedDataParallel, and what the wrong wrappers say."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    wrapped = DistributedDataParallel(inner)
    _, batch = case()
    results = []
    for module in (inner, wrapped):
        forward, params = dpfunc.functionalize(module)
        loss_fn = _of(forward)
        every = [getattr(engines, name)()(loss_fn, params, batch) for name in ("vmap", "auto")]
        results.append((list(params), [result.grads["0.weight"].dense() for result in every]))
    same = results[0][0] == results[1][0]
    off = max(float((a - results[0][1][0]).abs().max()) for a in (*results[0][1], *results[1][1]))
    trained = dpfunc.functional.with_params(wrapped, {"0.bias": torch.ones(4)})
    bad = (nn.DataParallel(inner), nn.Sequential(wrapped), nn.Sequential(nn.DataParallel(inner)))
    refused = [caught(dpfunc.functionalize, module)[1] for module in bad]
    return same, off, type(trained).__name__, refused


def _of(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["x"]).mean(1), b["y"], reduction="none")


def late_use(engine, independent):
    """A use that the first batch does not have, and the second one on the last process only: norms are those of rows alone."""

    def losses(params, batch):
        outputs = F.linear(batch, params["w"])
        large_B1 = (batch > 100).any(1, keepdim=True)
        if bool(large_B1.any()):
            outputs = outputs + torch.where(large_B1, batch @ params["w"].T, 0.0)
        return outputs.square().sum(1)

    run, params = getattr(engines, engine)(), {"w": torch.linspace(-1, 1, 6).reshape(2, 3)}
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    with process_context("independent" if independent else dist.group.WORLD):
        run(losses, params, batch).sq_norms()
        batch *= 1000 if dist.get_rank() == 1 else 1
        found = run(losses, params, batch).sq_norms()["w"]
    return found, engines.loop()(losses, params, batch).sq_norms()["w"]
