"""What the workers of test_tensor_parallel_steps.py do: whole noisy runs of models that are sharded over processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from tp_jobs import CASES, batch_of, built

import dpfunc
from dpfunc import clipping, distributed, sampling
from dpfunc._utils.dtensor import is_dtensor
from dpfunc.batches import take
from dpfunc.errors import DPFuncError
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.state import replay
from dpfunc.step import make_dp_step

NUM_RECORDS = 24
STEPS = 3
KEY = insecure_key(24)  # 2.9 expected records: draws of 1, 0 and 4, so that some processes, and all, have none


def _whole(tensor):
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _mesh(parts):
    return init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", "tp"))


def train(name, parts, engine="auto", microbatch_size=None, clip="flat", frozen_sharded=False, expected=2.9):
    """Noisy steps; `parts` processes hold one replica. 0 is one whole model without ranks."""
    dtype = torch.float64
    model = built(name, dtype)
    ranks = None
    if parts:
        mesh = _mesh(parts)
        CASES[name][1](model, mesh["tp"])
        ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
        if frozen_sharded:
            trained = {p for p in model.parameters() if p.requires_grad}
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"], ignored_params=trained)
    forward, params = dpfunc.functionalize(model)
    groups = clipping.PerLayer() if clip == "layers" else clipping.AllParameters()
    plan = Plan(
        sampling.Poisson(NUM_RECORDS, expected / NUM_RECORDS), clipping.Flat(0.5, groups=groups), 1.0, STEPS, delta=1e-3
    )
    dp_step = make_dp_step(CASES[name][2](forward), plan, engine=engine, microbatch_size=microbatch_size, ranks=ranks)
    data, state = batch_of(NUM_RECORDS, dtype), replay(dp_step.init(params, KEY))
    counts = []
    for indices in plan.batches(state, ranks):
        grads, state, _ = dp_step(params, take(data, indices), state)
        assert all(type(grads[key]) is type(params[key]) for key in params)
        params = {key: p - 0.2 * grads[key] for key, p in params.items()}
        counts.append(len(indices))
    return {key: _whole(p).detach() for key, p in params.items()}, state.ledger.to_json(), counts


def plain(name, more):
    """One process, one whole model."""
    return train(name, 0, **more)


def in_parts(name, parts, more):
    """The model in parts."""
    return train(name, parts, **more)


def without_the_sum_of_norms(name):
    """The same run where each process clips by the norm of its own parts."""
    from dpfunc import clipped

    proper = clipped.full_norms
    clipped.full_norms = lambda params, sq_norms, ranks: sq_norms
    try:
        return train(name, dist.get_world_size())
    finally:
        clipped.full_norms = proper


def trouble(kind):
    """One step that must fail, on all processes: the type and text of what was raised."""
    mesh = _mesh(2)
    model = built("mlp", torch.float64)
    CASES["mlp"][1](model, mesh["tp"])
    forward, params = dpfunc.functionalize(model)
    ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
    if kind == "data parallel":
        ranks = distributed.data_parallel(mesh["dp"].get_group())
    if kind == "one process":
        ranks = None
    plan = Plan(sampling.Poisson(NUM_RECORDS, 0.5), clipping.Flat(0.5), 1.0, STEPS, delta=1e-3)
    options = {"engine": "auto"}
    mine = dist.get_rank() == dist.get_world_size() - 1
    data = batch_of(NUM_RECORDS, torch.float64)
    if kind == "other records" and mine:
        data["x"][:] = data["x"] + 1
    if kind == "one ulp" and mine:
        params["norm.weight"][2] = torch.nextafter(params["norm.weight"][2], torch.tensor(9.0, dtype=torch.float64))
    if kind == "one ulp of a part":  # sharded over processes with other records, alike over those with the same
        part = distribute_tensor(params["norm.weight"], mesh["dp"], [Shard(0)])
        params["norm.weight"] = part
        if mine:
            part.to_local()[0] = torch.nextafter(part.to_local()[0], torch.tensor(9.0, dtype=torch.float64))
    if kind == "nan" and mine:
        params["norm.weight"][2] = float("nan")
    state = None
    try:
        if kind == "microbatches":
            options["microbatch_size"] = "auto"
        dp_step = make_dp_step(CASES["mlp"][2](forward), plan, ranks=ranks, **options)
        good = {key: torch.nan_to_num(p) if not is_dtensor(p) else p for key, p in params.items()}
        state = replay(dp_step.init(good, KEY))
        (indices, *_) = plan.batches(state, ranks)
        dp_step(params, take(data, indices), state)
    except DPFuncError as error:
        return type(error).__name__, str(error), 0 if state is None else state.ledger.num_steps
    return "ok", "", 1


def mesh_dims(data, tensor):
    """What `sharded` says to dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("dp", "tp", "cp"))
    try:
        distributed.sharded(mesh, data=data, tensor=tensor)
    except DPFuncError as error:
        return str(error)
    return "ok"


def common_start():
    """What all processes hold after `replicate`, and who hears of a difference between any two."""
    ranks = distributed.sharded(_mesh(2), data=("dp",), tensor=("tp",))
    number = dist.get_rank()
    tensor = torch.full((2, 3), float(number + 1))
    distributed.replicate([tensor], ranks)
    said = []
    for odd in range(dist.get_world_size()):
        try:
            distributed.check_same("data", "other" if number == odd else "usual", ranks)
        except DPFuncError as error:
            said.append(type(error).__name__)
    distributed.check_same("data", "usual", ranks)
    return tensor, said
