"""What worker processes run in tests of ranks, agreement, collectives: the same small run, seen by one process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import Subset, default_collate
from workers import caught

import dpfunc
from dpfunc import clipping, distributed, sampling
from dpfunc._utils.versions import installed
from dpfunc.batches import take
from dpfunc.distributed._agreement import digest_of_all
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.step import make_dp_step

NUM_RECORDS = 40


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(NUM_RECORDS, 6, generator=generator).to(dtype),
        "y": torch.randint(0, 3, (NUM_RECORDS,), generator=generator),
    }


def params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    shapes = {"in.weight": (9, 6), "in.bias": (9,), "out.weight": (3, 9)}
    return {name: (torch.randn(shape, generator=generator) * 0.5).to(dtype) for name, shape in shapes.items()}


def loss_fn(params, batch):
    hidden = functional.linear(batch["x"], params["in.weight"], params["in.bias"]).tanh()
    return functional.cross_entropy(functional.linear(hidden, params["out.weight"]), batch["y"], reduction="none")


def plan(**changes):
    values = {
        "sampler": sampling.Poisson(NUM_RECORDS, 2.9 / NUM_RECORDS),
        "clip": clipping.Flat(clip_norm=1.0),
        "noise_multiplier": 1.0,
        "num_steps": 8,
        "delta": 1e-3,
    }
    return Plan(**{**values, **changes})


CLIPS = {
    "flat": clipping.Flat(1.0),
    "automatic": clipping.Automatic(1.0),
    "layers": clipping.Flat(1.0, groups=clipping.PerLayer()),
}


def steps_of(loss_fn, the_plan, current, records, ranks, seed=7, **options):
    """A run of some noisy steps: parameters, ledger, how many records this process had in each step."""
    dp_step, counts = make_dp_step(loss_fn, the_plan, ranks=ranks, **options), []
    state = allow_repeat(dp_step.init(current, insecure_key(seed)))
    for indices in the_plan.batches(state, ranks):
        grads, state, _ = dp_step(current, take(records, indices), state)
        assert all(type(grads[name]) is type(p) for name, p in current.items())
        current = {name: p - 0.3 * grads[name] for name, p in current.items()}
        counts.append(len(indices))
    return current, state.ledger.to_json(), counts


def train(engine, clip, dtype, microbatch_size=None, size=2.9, use_ranks=True):
    """The run of `steps_of` with the records of this file."""
    ranks = distributed.data_parallel() if use_ranks else None
    the_plan = plan(clip=CLIPS[clip], sampler=sampling.Poisson(NUM_RECORDS, size / NUM_RECORDS))
    options = {"engine": engine, "microbatch_size": microbatch_size}
    return steps_of(loss_fn, the_plan, params(dtype), data(dtype), ranks, **options)


def step_of(dp_step, state, ranks, current=None):
    """One call with this process's share of the draw."""
    share = take(data(), dp_step.plan.draw(state, state.step, ranks))
    return dp_step(params() if current is None else current, share, state)


def one_step_of(trouble):
    """One step in which one process may behave differently; what a caller would see."""
    mine = dist.get_rank() == trouble.get("rank", 1)
    own = trouble if mine else {}
    ranks = distributed.data_parallel(dummy=trouble.get("dummy"))
    the_plan = plan(noise_multiplier=own.get("noise_multiplier", 1.0), sampler=sampling.Poisson(NUM_RECORDS, 0.5))
    current, records, written = params(), data(), []
    if "ulp" in own:
        current["in.bias"][3] = torch.nextafter(current["in.bias"][3], torch.tensor(100.0))

    def loss(params, batch):
        if "raises" in own:
            raise ValueError("the loss of this process fails")
        if own.get("killed") == "inside":
            os.kill(os.getpid(), signal.SIGKILL)
        if "other code" in own:
            params = {name: param.cos() for name, param in params.items()}
        return loss_fn(params, batch)

    def journal(after):
        if own.get("journal") == "full":
            raise OSError("no space left")
        written.append(after.step)

    options = {name: own[name] for name in ("engine", "reduction") if name in own}
    dp_step = make_dp_step(
        loss, the_plan, ranks=ranks, journal=None if own.get("journal") == "none" else journal, **options
    )
    state = allow_repeat(dp_step.init(current, insecure_key(own.get("seed", 3))))
    state = allow_repeat(state._replace(step=own.get("step", 0)))
    indices = the_plan.draw(state, state.step, ranks)[own.get("drop", 0) :]
    if "nan" in own:
        current["in.bias"][0] = float("nan")
    if own.get("killed") == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if "stalls" in trouble:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    while "stalls" in own and not os.path.exists(trouble["stalls"]):  # until the others have given up
        time.sleep(0.05)
    with mock.patch("dpfunc.step.installed", return_value={**installed(), **own.get("versions", {})}):
        try:
            grads, after, _ = dp_step(current, take(records, indices), state)
        except (dpfunc.errors.DPFuncError, RuntimeError, ValueError, OSError) as error:
            if "stalls" in trouble:
                open(trouble["stalls"], "w").close()
            again = None
            if own.pop("raises", None) or "raises" in trouble:  # what failed may be tried again: nothing was spent
                grads, after, _ = dp_step(current, take(records, indices), state)
                again = (grads["in.bias"], after.step)
            return type(error).__name__, str(error), state.step, state.ledger.num_steps, written, again
    return "ok", grads, after.step, after.ledger.num_steps, written, None


def document(code):
    """A script of a guide: its parameters and what it spent."""
    names = {}
    exec(compile(code, "guide.py", "exec"), names)
    return {name: value.detach() for name, value in names["params"].items()}, names["state"].ledger.to_json()


def telemetry(seed, use_ranks):
    """Four steps with telemetry: what they released, and how many rows of aux this process had."""
    ranks = distributed.data_parallel() if use_ranks else None
    statistics = (clipping.Statistic("loss", high=3.0), clipping.Statistic("y", edges=(0.5, 1.5)))
    rule = clipping.Adaptive(0.5, groups=clipping.PerLayer())
    the_plan = plan(num_steps=4, clip=rule, telemetry=clipping.Telemetry(statistics, 0.1))
    dp_step = make_dp_step(lambda p, b: (loss_fn(p, b), {"y": b["y"]}), the_plan, ranks=ranks)
    state, released, counts = allow_repeat(dp_step.init(params(), insecure_key(seed))), [], []
    for indices in the_plan.batches(state, ranks):
        grads, state, unreleased = dp_step(params(), take(data(), indices), state)
        released.append((grads["in.bias"].tolist(), state.telemetry, state.clip_state))
        counts.append((len(indices), 0 if unreleased.aux is None else len(unreleased.aux["y"])))
    return released, counts


def part_of_the_mesh():
    """Parameters that are sharded over some of the processes with other records only: what a step says."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("rep", "shard"))
    ranks = distributed.sharded(mesh, data=("rep", "shard"))
    current = distributed.shard(params(), mesh["shard"], min_size=1)
    dp_step = make_dp_step(loss_fn, plan(sampler=sampling.Poisson(NUM_RECORDS, 0.5)), ranks=ranks)
    return caught(step_of, dp_step, allow_repeat(dp_step.init(current, insecure_key(3))), ranks, current)


def shared_keys():
    """What keys say of themselves, that only one process knows beforehand."""
    ranks = distributed.data_parallel()
    known = distributed.shared_key(ranks, insecure_key(3) if ranks.writes else dpfunc.secure_key())
    return repr(known), known == insecure_key(3), repr(distributed.shared_key(ranks))


def groups_with_one_key():
    """Steps of two groups of one job with the key of all, on records of one draw: what each process sees."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    key, ranks = distributed.shared_key(distributed.data_parallel()), distributed.data_parallel(alone)
    dp_step = make_dp_step(loss_fn, plan(), ranks=ranks)
    if dist.get_rank():
        dist.barrier()  # the first group takes its step first
    found = caught(step_of, dp_step, dp_step.init(params(), key), ranks)
    if not dist.get_rank():
        dist.barrier()
    own = dp_step.init(params(), distributed.shared_key(ranks))
    whole = make_dp_step(loss_fn, plan(), ranks=distributed.data_parallel())
    state = whole.init(params(), distributed.shared_key(whole.ranks))
    for _ in range(2):  # all processes again, from a state that went through `init` a second time
        _, state, _ = step_of(whole, state, whole.ranks)
        whole.init(params(), state.key)
    return *found, caught(step_of, dp_step, own, ranks)


def masks():
    """The dropout masks that a process draws in two steps, seen in its losses: all records are alike."""

    def dropped(params, batch):
        return functional.dropout(batch["x"] * params["w"].sum(), 0.5).sum(1)

    ranks = distributed.data_parallel()
    the_plan = plan(sampler=sampling.Poisson(NUM_RECORDS, 0.5), num_steps=2)
    dp_step = make_dp_step(dropped, the_plan, engine="loop", ranks=ranks, verify_batch=False)
    values, found = {"w": torch.ones(1)}, []
    state = allow_repeat(dp_step.init(values, insecure_key(8)))
    for _ in range(2):
        _, state, unreleased = dp_step(values, {"x": torch.ones(3, 64)}, state)
        found.append(unreleased.losses_B.tolist())
    return found


def lost_share():
    """Three steps in which the records of the second process have no finite gradient: what each process is told."""
    ranks = distributed.data_parallel()
    dp_step = make_dp_step(loss_fn, plan(), ranks=ranks, verify_batch=False)
    state, batch, said = allow_repeat(dp_step.init(params(), insecure_key(3))), take(data(), torch.arange(3)), []
    if ranks.rank == 1:
        batch["x"].fill_(float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            _, state, _ = dp_step(params(), batch, state)
            said.append([str(each.message) for each in caught])
    return said


def endless():
    """What is said to a group that would wait longer than an hour."""
    group = dist.new_group(timeout=timedelta(hours=2), backend="gloo")
    return caught(distributed.data_parallel, group)


def noise_share(trouble=None):
    """One step in which the second process draws no noise, or fails to: what it releases, or how it ends; its tiles."""
    from dpfunc.distributed import _reduce as reduce
    from dpfunc.noise import _streams as streams

    ranks = distributed.data_parallel()
    windows, fold_in, drawn = reduce.noise_windows, streams.fold_in, []
    own = {"missing": lambda *args: {}, "twice": lambda shapes, rank, size: windows(shapes, 0, 1)}

    def counted(key, purpose, name, number):
        drawn.append((name, number))
        return fold_in(key, purpose, name, number)

    def full(*args):
        raise MemoryError("no room for noise")

    weights = {"w": torch.zeros(1100, 300), "b": torch.zeros(700), "s": torch.zeros(())}
    dp_step = make_dp_step(
        lambda p, batch: (p["w"] * 0 + p["s"] + p["b"].sum()).sum() * batch["x"].sum(1) * 0,
        plan(sampler=sampling.Poisson(NUM_RECORDS, 0.1)), ranks=ranks, engine="loop", reduction="sum",
    )  # fmt: skip
    state = allow_repeat(dp_step.init(weights, insecure_key(4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "fold_in", counted)
        if ranks.rank == 1 and trouble == "fails":
            patch.setattr(streams, "secure_normal", full)
        elif ranks.rank == 1 and trouble:
            patch.setattr(reduce, "noise_windows", own[trouble])
        try:
            released = step_of(dp_step, state, ranks, weights).grads
        except (DPFuncError, MemoryError) as error:
            return type(error).__name__, str(error), drawn
    return "ok", {name: value.clone() for name, value in released.items()}, drawn


def spoiled_sums(whole):
    """What a digest says of sums with NaN: in the part of one process, or alike on all."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    ranks = distributed.sharded(mesh, data=("shard",))
    sums = {"w": torch.zeros(8, 2), "v": torch.zeros(3)}
    (sums["v"] if whole else sums["w"])[0] = float("nan")  # row 0 is of the first process
    try:
        parts = {**distributed.shard({"w": sums["w"]}, mesh, min_size=1), "v": sums["v"]}
        return digest_of_all(parts, ranks, torch.tensor(False), one_draw=False)[0]
    except InvalidArgument as error:
        return str(error)


class Records:
    """The records of jobs.py, one by one, with some noise of torch's generator in a column that no loss reads."""

    def __len__(self):
        return NUM_RECORDS

    def __getitem__(self, index):
        record = {name: value[index] for name, value in data().items()}
        return {**record, "number": index, "noise": torch.rand(())}


def collate(records):
    batch = default_collate(records)
    return {name: batch[name] for name in ("x", "y")}


def train_by_loader(use_ranks=True):
    """The run on batches of a loader: parameters, ledger, numbers of the records of this process in each step, noise."""
    ranks = distributed.data_parallel() if use_ranks else None
    the_plan = plan()
    dp_step = make_dp_step(loss_fn, the_plan, ranks=ranks)
    current = params()
    state = allow_repeat(dp_step.init(current, insecure_key(7)))
    numbers = [b["number"].tolist() for b in the_plan.loader(Records(), state, ranks)]
    noise = [b["noise"].tolist() for b in the_plan.loader(Records(), state, ranks)]
    for batch in the_plan.loader(Records(), state, ranks, collate_fn=collate):
        grads, state, _ = dp_step(current, batch, state)
        current = {name: p - 0.3 * grads[name] for name, p in current.items()}
    return current, state.ledger.to_json(), numbers, noise


class Unreadable(Records):
    def __getitem__(self, index):
        raise OSError("the file of this record is gone")


def _said(dataset, ranks, **settings):
    state = allow_repeat(make_dp_step(loss_fn, plan(), ranks=ranks).init(params(), insecure_key(7)))
    return caught(plan().loader, dataset, state, ranks, **settings)


def data_sets():
    """What is said of data sets that are another one on the second process."""
    ranks = distributed.data_parallel()
    first = ranks.rank == 0
    usual = Records()
    swapped = [*range(10), 11, 10, *range(12, NUM_RECORDS)]
    return {
        "same": _said(usual, ranks),
        "reversed": _said(usual if first else Subset(usual, range(NUM_RECORDS)[::-1]), ranks),
        "two swapped": _said(usual if first else Subset(usual, swapped), ranks),
        "other preprocessing": _said(usual, ranks, collate_fn=default_collate if first else collate),
        "shorter": _said(usual if first else Subset(usual, range(NUM_RECORDS - 1)), ranks),
        "unreadable": _said(usual if first else Unreadable(), ranks),
        "names": _said(Unreadable(), ranks, data_name="mails of May"),
        "other names": _said(usual, ranks, data_name=f"mails of {ranks.rank}"),
    }


class OwnNoise(dpfunc.noise.Gaussian):
    """Noise of a user that does not do what it should, in one way or another, maybe on the second process only."""

    def mechanism(self, run):
        def add(clipped, state, turn):
            if self.trouble == "fails" and dist.get_rank() == 1:
                raise MemoryError("no room for noise")
            own = torch.Generator().manual_seed(dist.get_rank() if self.trouble == "other numbers" else 0)
            released = {name: value + torch.randn(value.shape, generator=own) for name, value in clipped.sums.items()}
            return {name: value for name, value in released.items() if "in" in name or self.trouble != "part"}, state

        return dpfunc.noise.Mechanism(lambda params: (), add)


def noise_of_a_user(trouble):
    """One step with such noise: what a process is told, and how many steps were written by then."""
    ranks, written, noise = distributed.data_parallel(), [], OwnNoise()
    object.__setattr__(noise, "trouble", trouble)
    dp_step = make_dp_step(loss_fn, plan(noise=noise), ranks=ranks, journal=written.append)
    state = allow_repeat(dp_step.init(params(), insecure_key(3)))
    return (*caught(step_of, dp_step, state, ranks), len(written))
