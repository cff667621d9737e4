"""What worker processes run in test_several_processes.py: a run with Adam, saved and loaded in several layouts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import NUM_RECORDS, data, loss_fn, params, plan
from noise_cases import remembering

from dpfunc import Journal, distributed, make_dp_step, sampling, take
from dpfunc import load as read_checkpoint
from dpfunc import save as write_checkpoint
from dpfunc.errors import DPFuncError
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.step import DPStep

PLAN = plan(sampler=sampling.Poisson(NUM_RECORDS, 0.3))


def placed(kind):
    """Parameters of a layout, and the ranks of the step."""
    if kind == "alone":
        return params(), None
    if kind == "replicas":
        return params(), distributed.data_parallel()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    if kind == "rows":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        ranks, cuts = distributed.sharded(mesh), (Shard(0),)
    elif kind == "copies":  # HSDP, with one part each
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "parts"))
        ranks, cuts = distributed.sharded(mesh, data=("dp", "parts")), (Replicate(), Shard(0))
    else:  # two dimensions: "grid" cuts rows and columns, "hybrid" has replicas of parts
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
        cuts = (Shard(0), Shard(1)) if kind == "grid" else (Replicate(), Shard(0))
    return {
        name: distribute_tensor(p, mesh, cuts if p.ndim > 1 or kind != "grid" else (Replicate(), Replicate()))
        for name, p in params().items()
    }, ranks


def whole(tensor):
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def start(kind):
    values, ranks = placed(kind)
    values = {name: p.requires_grad_() for name, p in values.items()}
    return values, ranks, torch.optim.Adam(values.values(), lr=0.05)


def load_into(folder, values, ranks, optimizer, **changes):
    options = {"plan": PLAN, "data": data(), "journal": Path(folder) / "journal.jsonl", **changes}
    saved = read_checkpoint(Path(folder) / "c", params=values, ranks=ranks, **options)
    with torch.no_grad():
        for name, p in values.items():
            p.copy_(saved.params[name])
    optimizer.load_state_dict(dict(saved.optimizer_state))
    return saved


def store(folder, values, ranks, optimizer, state, **changes):
    options = {"plan": PLAN, "data": data(), "optimizer_state": optimizer.state_dict(), **changes}
    options = {"journal": Path(folder) / "journal.jsonl", **options}
    return write_checkpoint(Path(folder) / "c", params=values, state=state, ranks=ranks, **options)


def train(folder, kind, stop, load=False, save=(), recharge=False, seen=lambda step: None, rate=None):
    """A run up to a step, from the start or a checkpoint. What everybody may see: parameters, ledger, steps, releases.

    Args:
        save: number of the step, or those, before which it is saved. seen: told of each step. rate: of this process.
    """
    values, ranks, optimizer = start(kind)
    journal, saves = Journal(Path(folder) / "journal.jsonl", PLAN), (save,) if isinstance(save, int) else save
    dp_step = make_dp_step(loss_fn, PLAN, engine="auto", ranks=ranks, journal=journal)
    if load:
        state = load_into(folder, values, ranks, optimizer, recharge=recharge).state
    else:
        state = allow_repeat(dp_step.init(values, insecure_key(5)))
    optimizer.param_groups[0]["lr"] = rate or 0.05
    first, records, releases = (state.step, state.charged), data(), []
    for indices in PLAN.batches(state, ranks):
        if state.step >= stop:
            break
        if state.step in saves:
            store(folder, values, ranks, optimizer, state)
        grads, state, _ = dp_step(values, take(records, indices), state)
        for name, p in values.items():
            p.grad = grads[name]
        optimizer.step()
        releases.append(whole(grads["in.bias"]))
        seen(state.step)
    if stop in saves:
        store(folder, values, ranks, optimizer, state)
    return {name: whole(p) for name, p in values.items()}, state.ledger.to_json(), first, releases


def train_remembering(*args, **options):
    """The same with noise that depends on the noise of the step before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DPStep, "_mechanism", property(lambda self: remembering(self.plan.noise_multiplier)))
        return train(*args, **options)


def odd_part(folder):
    """A resumed run where one process learns its own part at another rate, which nobody else holds."""
    seen = []
    try:
        train(folder, "rows", 8, load=True, seen=seen.append, rate=0.05 if dist.get_rank() == 0 else 1.0)
    except DPFuncError as error:
        return type(error).__name__, len(seen)
    return "nothing", len(seen)


def read(folder, kind):
    """Only load: whole parameters, one moment, and whether everything is laid out as the parameters are."""
    values, ranks, optimizer = start(kind)
    saved = load_into(folder, values, ranks, optimizer)
    moments = saved.optimizer_state["state"]
    pairs = [(values[name], saved.params[name]) for name in values]
    pairs += [(p, moments[i][key]) for i, p in enumerate(values.values()) for key in ("exp_avg", "exp_avg_sq")]
    alike = all(
        type(a.detach()) is type(b) and getattr(a, "placements", None) == getattr(b, "placements", None)
        for a, b in pairs
    )
    return {name: whole(p) for name, p in saved.params.items()}, whole(moments[0]["exp_avg"]), alike


def strided(folder):
    """Parameters as FSDP2 shards those that are sharded for tensor parallelism already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(6, 9)
    with torch.no_grad():
        model.weight.copy_(params()["in.weight"])
        model.bias.copy_(params()["in.bias"])
    fully_shard(parallelize_module(model, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
    ranks, values = distributed.sharded(mesh, tensor=("tp",)), {f"in.{n}": p for n, p in model.named_parameters()}
    state = allow_repeat(make_dp_step(loss_fn, PLAN, ranks=ranks).init(params(), insecure_key(5)))
    run = {"params": values, "plan": PLAN, "data": "d", "ranks": ranks, "journal": Path(folder) / "journal.jsonl"}
    write_checkpoint(folder, state=state, **run)
    found = read_checkpoint(folder, **run).params
    return all(torch.equal(found[name].to_local(), p.to_local()) for name, p in values.items())


def trouble_while_saving(folder, moments):
    """Save, then save again while one process has trouble, once for each of (moment, rank, what happens)."""
    import torch.distributed.checkpoint.filesystem as filesystem

    from dpfunc.checkpoint import folder as folder_module
    from dpfunc.checkpoint import saving

    places = {
        "tensors": (filesystem.FileSystemWriter, "write_data"),
        "part": (saving, "_list_own_files"),
        "commit": (saving, "_commit"),
        "rename": (folder_module, "free_name"),
    }
    values, ranks, optimizer = start("rows")
    state = allow_repeat(make_dp_step(loss_fn, PLAN, ranks=ranks).init(values, insecure_key(5)))
    store(folder, values, ranks, optimizer, state, extra={"number": 0})
    errors = []
    for moment, rank, what in moments:
        owner, name = places[moment]
        usual = getattr(owner, name)

        def trouble(*args, what=what, **options):
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no space left")

        if dist.get_rank() == rank:
            setattr(owner, name, trouble)
        errors.append(told(lambda: store(folder, values, ranks, optimizer, state, extra={"number": 1})))
        setattr(owner, name, usual)
    return errors


def differing(folder, what):
    """One process passes something else."""
    values, ranks, optimizer = start("copies" if what == "copy" else "replicas")
    state, odd = (
        allow_repeat(make_dp_step(loss_fn, PLAN, ranks=ranks).init(values, insecure_key(5))),
        dist.get_rank() == 1,
    )
    if odd and what in ("parameter", "copy"):
        bias = values["in.bias"].detach()
        (bias if what == "parameter" else bias.to_local())[2] += 1e-7
    changes = {
        "moment": {"optimizer_state": {"moments": torch.full((3,), float(odd))}},
        "plan": {"plan": plan(sampler=sampling.Poisson(NUM_RECORDS, 0.2))},
        "unsupported": {"optimizer_state": {"hook": print}},
    }.get(what, {})
    state = state._replace(step=1) if odd and what == "step" else state
    return told(lambda: store(folder, values, ranks, optimizer, state, **(changes if odd or what == "moment" else {})))


def told(action):
    """The error that an action raises, or nothing, for the test."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  (told to the test)
        return f"{type(error).__name__}: {error}"
    return ""


def refused(folder, kind, changes_of_one):
    """Load where process 1 passes something else; what each process is told."""
    values, ranks, optimizer = start(kind)
    changes = changes_of_one if dist.get_rank() == 1 else {}
    return told(lambda: load_into(folder, values, ranks, optimizer, **changes))


def without_ranks(folder):
    """Save and load parts without saying that there are others."""
    values, ranks, optimizer = start("rows")
    state = allow_repeat(make_dp_step(loss_fn, PLAN, ranks=ranks).init(values, insecure_key(5)))
    store(Path(folder) / "good", values, ranks, optimizer, state)
    return [
        told(lambda: store(folder, values, None, optimizer, state)),
        told(lambda: load_into(Path(folder) / "good", values, None, optimizer)),
    ]


def guide(code, folder, stop):
    """The script of the guide, stopped after a step; what was spent, and where it started."""
    code = code.replace('Path("run")', f"Path({str(folder)!r})")
    line = "    optimizer.step()\n"
    assert code.count(line) == 1
    code = code.replace("for indices in", "first = state.step\nfor indices in")
    names = {"__name__": "guide"}
    exec(compile(code.replace(line, f"{line}    if state.step == {stop}: break\n"), "guide", "exec"), names)
    values = {name: p.detach() for name, p in names["weights"].items()}
    return names["first"], names["state"].ledger.to_json(), values


if __name__ == "__main__":  # one process of a job that is started, and killed, from outside
    import sys
    from datetime import timedelta

    torch.set_num_threads(1)
    place, number, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=number, world_size=size, timeout=timedelta(seconds=120)
    )
    train(place, "rows", 8, save=range(0, 8, 2), seen=lambda step: number or print(step, flush=True))
