"""What the workers of test_fsdp.py do: a small run, sharded in one way or another; by DeepSpeed at the end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from jobs import steps_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workers import caught

import dpfunc
from dpfunc import clipping, distributed, sampling
from dpfunc._utils.parts import is_dtensor, local
from dpfunc.batches import take
from dpfunc.distributed import ranks as processes
from dpfunc.distributed.fsdp import functionalize_managed
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.step import make_dp_step

NUM_RECORDS, VOCAB, WIDTH, CLASSES = 40, 11, 7, 3  # sizes that no number of processes divides
LORA = r"lora_"


class LoRALinear(nn.Module):
    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        low = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return self.base_layer(x) + 2.0 * low.to(x.dtype)


def adapted(inner, outer):
    return LoRALinear(nn.Linear(inner, outer))


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 9), linear(9, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, two residual blocks, and a head whose 3 rows do not reach 4 processes."""

    def __init__(self, linear=adapted):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(linear) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gradient_checkpointing = False

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.gradient_checkpointing else layer(x)
        return self.head(x.mean(1))


def net(linear=adapted):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(linear)
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(VOCAB, (NUM_RECORDS, 5), generator=generator),
        "y": torch.randint(CLASSES, (NUM_RECORDS,), generator=generator),
    }


def mesh_of(hsdp=False):
    if hsdp:
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def ranks_of(mesh):
    return distributed.sharded(mesh, data=mesh.mesh_dim_names)


def by_hand(model, mesh, **options):
    """What a user writes without our helper; the frozen embedding and head still require gradients."""
    trained = {param for name, param in model.named_parameters() if "lora_" in name}
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, ignored_params=trained, **options)


def built(way, mesh, hsdp=False, bf16=False, gradient_checkpointing=False):
    """`(forward, params)` of a model that is sharded in a way; whole where there is no mesh."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    if way == "full":
        model = net(nn.Linear)
        forward, params = dpfunc.functionalize(model, ".")
        if mesh is not None:
            params = distributed.shard(params, mesh, min_size=4)
            model.to("meta")  # all parameters are arguments
        return forward, params
    if way == "attach":
        options = {"targets": "up|down", "rank": 2, "alpha": 4, "also_train": "norm"}
        adapter = dpfunc.lora.attach(net(nn.Linear), insecure_key(5), **options)
        if mesh is not None:
            adapter = distributed.shard_frozen(adapter, mesh, mp_policy=policy)
        return adapter.forward, adapter.params
    model = net()
    if mesh is not None and way == "by hand":
        by_hand(model, mesh, mp_policy=policy)
    elif mesh is not None:
        distributed.shard_frozen(model, mesh, trainable=LORA, mp_policy=policy)
    forward, params = dpfunc.functionalize(model, LORA)
    model.gradient_checkpointing = gradient_checkpointing
    if way == "sharded lora" and mesh is not None:
        params = distributed.shard(params, mesh, min_size=4)
    return forward, params


def managed(mesh, hsdp=False, gradient_checkpointing=False, unused=False):
    """A model all of whose parameters are trained, and managed by fully_shard."""
    model = net(nn.Linear)
    if unused:
        model.unused = nn.Linear(2, 2)
    by_hand(model, mesh)
    model.gradient_checkpointing = gradient_checkpointing
    return functionalize_managed(model, ranks_of(mesh))


def gathers_of(call, seen=lambda: None):
    """How often layers are put together in a call, and its result; `seen` is called each time."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    original, calls = groups.foreach_all_gather, []

    def gather(*args):
        calls.append(seen())
        return original(*args)

    call()  # the first one makes what is kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "foreach_all_gather", gather)
        found = call()
    return calls, found


def managed_costs():
    """All-gathers of one microbatch, numbers of its sums here, and the most numbers that are whole at once, of how many."""
    forward, params, engine, _ = managed(mesh_of())
    batch, loss_fn = take(data(), torch.arange(6)), classes(forward)
    every = list(engine.forward.gathered.values())
    calls, total = gathers_of(
        lambda: engine(loss_fn, params, batch).weighted_sum(dict.fromkeys(params, torch.ones(6))),
        lambda: sum(p.numel() for p in every if p.untyped_storage().size()),
    )
    kept = sum(local(value).numel() for value in total.values())
    return len(calls), kept, max(calls), sum(p.numel() for p in every)


def managed_refusals():
    """What is said about everything but the engine and the ranks that belong to a managed module."""
    mesh, found = mesh_of(), {}
    forward, params, engine, ranks = managed(mesh)
    for name, these in itertools.product(("ghost", "vmap", "loop", "auto"), (ranks, ranks_of(mesh))):
        found[name, these.keeps_parts] = one_step(forward, params, these, name)[:3]
    found["ranks"] = one_step(forward, params, ranks_of(mesh), engine)[:3]
    found["alone"] = one_step(forward, params, distributed.data_parallel(), engine)[:3]
    unused = managed(mesh, unused=True)
    found["unused"] = one_step(*unused[:2], unused.ranks, unused.engine)[:3]
    model = net()
    by_hand(model, mesh)
    found["ignored"] = [caught(functionalize_managed, model, ranks_of(mesh))], 0, 0
    found["frozen"] = [caught(functionalize_managed, net().requires_grad_(False), ranks_of(mesh))], 0, 0
    evaluated = forward(params, data()["ids"][:3])
    expected = net(nn.Linear)(data()["ids"][:3])
    sharded = all(is_dtensor(p) for p in dict(forward.module.layers.named_parameters()).values())
    return found, float((evaluated - expected).abs().max()), sharded


def plan(size=2.9, steps=8):
    return Plan(sampling.Poisson(NUM_RECORDS, size / NUM_RECORDS), clipping.Flat(1.0), 1.0, steps, delta=1e-3)


def classes(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["ids"]).float(), b["y"], reduction="none")


def placed(way, engine, whole, **options):
    """A model in parts, or whole on this process alone: forward, parameters, engine and ranks."""
    mesh = None if whole else mesh_of(options.get("hsdp", False))
    if way == "managed":
        return managed(mesh, **options)
    return *built(way, mesh, **options), engine, None if whole else ranks_of(mesh)


def train_with(way, engine, whole=False, microbatch_size=None, adam=False, **options):
    """Eight noisy steps: parameters put together, ledger, records here in each step, and what its optimizer holds."""
    forward, params, engine, ranks = placed(way, engine, whole, **options)
    the_plan, records, counts = plan(), data(), []
    dp_step = make_dp_step(classes(forward), the_plan, engine=engine, microbatch_size=microbatch_size, ranks=ranks)
    weights = {name: nn.Parameter(param) for name, param in params.items()}
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(weights.values(), lr=0.01 if adam else 0.3)
    state = allow_repeat(dp_step.init(weights, insecure_key(7)))
    for indices in the_plan.batches(state, ranks):
        grads, state, _ = dp_step(weights, take(records, indices), state)
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        counts.append(len(indices))
    held = [local(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim]
    sharded = sum(is_dtensor(p) and local(p).shape != p.shape for p in weights.values())
    return distributed.unshard(weights), state.ledger.to_json(), counts, (sharded, sum(v.numel() for v in held))


def statistics_with(way, engine, whole=False, **options):
    """Six noisy steps of which each releases statistics: what it released, and the parameters put together."""
    forward, params, engine, ranks = placed(way, engine, whole, **options)
    telemetry = clipping.Telemetry((clipping.Statistic("loss", high=3.0), clipping.Statistic("clipped")), 0.1)
    the_plan = dataclasses.replace(plan(steps=6), clip=clipping.Adaptive(0.5), telemetry=telemetry)
    dp_step = make_dp_step(classes(forward), the_plan, engine=engine, ranks=ranks)
    weights = {name: param.detach().clone() for name, param in params.items()}
    state, told = allow_repeat(dp_step.init(weights, insecure_key(7))), []
    for indices in the_plan.batches(state, ranks):
        grads, state, _ = dp_step(weights, take(data(), indices), state)
        weights = {name: weight - 0.3 * grads[name] for name, weight in weights.items()}
        told.append((state.clip_state["all"], state.telemetry["loss"], state.telemetry["clipped"], len(indices)))
    return told, distributed.unshard(weights)


def one_step(forward, params, ranks, engine="auto", loss_fn=None, steps=1):
    """What a step gives on this process: its error, or the gradients put together; and what was spent."""
    the_plan = plan(20.0)
    loss = loss_fn or classes(forward)
    with pytest.MonkeyPatch.context() as patch:
        if ranks is None:  # as if it could not be seen that there are others
            patch.setattr(processes, "check_alone", lambda environment: None)
        dp_step = make_dp_step(loss, the_plan, engine=engine, ranks=ranks)
        state = allow_repeat(dp_step.init(params, insecure_key(1)))
        result = []

        def take_it():
            nonlocal state
            indices = next(iter(the_plan.batches(state, ranks)))
            grads, state, _ = dp_step(params, take(data(), indices), state)
            result.append(distributed.unshard(grads))

        found = [caught(take_it) for _ in range(steps)]
    return found, state.step, state.ledger.num_steps, result[-1] if result else None


def refuse_to_communicate(engine, alone):
    """A sharded model with ranks for replicas, or with none."""
    forward, params = built("by hand", mesh_of())
    ranks, calls = None if alone else distributed.data_parallel(), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    found = one_step(forward, params, ranks, engine)
    handle.remove()
    return *found[:3], len(calls)


def refusals():
    """What functionalize and the helpers say about modules that cannot be functions."""
    mesh = mesh_of()
    sharded, early = net(), net(nn.Linear)
    by_hand(sharded, mesh)
    forward, params = dpfunc.functionalize(early, ".")
    for layer in early.layers:
        fully_shard(layer, mesh=mesh)
    batch = take(data(), torch.arange(4))
    engine = dpfunc.engines.auto()
    found = {
        "managed": caught(dpfunc.functionalize, sharded, "norm"),
        "sharded later": caught(engine, classes(forward), params, batch),
        "twice": caught(distributed.shard_frozen, sharded, mesh, trainable=LORA),
        "no layer": caught(distributed.shard_frozen, net(), mesh, layers="encoder", trainable=LORA),
        "unknown layer": caught(distributed.shard_frozen, net(), mesh, layers=["layers.9"], trainable=LORA),
        "nothing trained": caught(distributed.shard_frozen, net(nn.Linear), mesh, trainable="nothing"),
        "other mesh": caught(distributed.shard, {"w": torch.ones(2)},
                             init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))),
    }  # fmt: skip
    adapter = dpfunc.lora.attach(net(nn.Linear), insecure_key(0), targets="up", rank=1, alpha=1)
    found["adapter"] = caught(distributed.shard_frozen, adapter, mesh, trainable="up")
    return found


def what_is_held():
    """Numbers of frozen parameters that this process holds, and how often layers are put together in one step."""
    counts = {}
    for reshard in (None, False):
        model = net()
        frozen = {name for name, _ in model.named_parameters() if "lora_" not in name}
        every = sum(model.get_parameter(name).numel() for name in frozen)
        distributed.shard_frozen(model, mesh_of(), trainable=LORA, reshard_after_forward=reshard)
        held = sum(local(model.get_parameter(name)).numel() for name in frozen)
        forward, params = dpfunc.functionalize(model, LORA)
        batch, engine, loss_fn = take(data(), torch.arange(6)), dpfunc.engines.auto(), classes(forward)
        calls, _ = gathers_of(lambda: engine(loss_fn, params, batch))  # noqa: B023  (called in this turn)
        counts[reshard] = (held / every, len(calls), all(is_dtensor(model.get_parameter(name)) for name in frozen))
    return counts


def stops(grad):
    raise ValueError("stop")


def stopped(x):
    """The same values; the backward pass ends here."""
    x = x.clone()
    x.register_hook(stops)
    return x


@contextmanager
def blocks_that(fail, backward):
    """Inside, `fail` is called before each block, or its backward pass stops."""
    modules = torch.nn.modules.module
    register = modules.register_module_forward_hook if backward else modules.register_module_forward_pre_hook

    def hook(module, *args):
        if isinstance(module, Block):
            return stopped(args[-1]) if backward else fail()
        return None

    handle = register(hook)
    yield
    handle.remove()


def after_an_error(backward):
    """An error in the middle of a pass, on all processes; the step is then taken as if there had been none."""
    model = net()
    distributed.shard_frozen(model, mesh_of(), trainable=LORA)
    forward, params = dpfunc.functionalize(model, LORA)

    def stop():
        raise ValueError("stop")

    with blocks_that(stop, backward):
        first = one_step(forward, params, ranks_of(mesh_of()))
    found = one_step(forward, params, ranks_of(mesh_of()))
    sharded = all(is_dtensor(p) for name, p in model.named_parameters() if "lora_" not in name)
    return first[0], found, one_step(*built("helper", mesh_of()), ranks_of(mesh_of())), sharded


def one_fails(place, engine):
    """One process fails inside of a sharded model: what each sees, after how long, and what it sees when it tries again."""
    mesh, mine = mesh_of(), dist.get_rank() == 1
    if engine == "managed":
        forward, params, engine, ranks = managed(mesh)
    else:
        (forward, params), ranks = built("helper", mesh), ranks_of(mesh)
    plainly, inside = classes(forward), nullcontext()

    def fails():
        raise (RuntimeError if place == "loss, as torch" else ValueError)("the rows of one process")

    def loss_fn(p, b):
        losses_B = plainly(p, b)
        if mine and place.startswith("loss"):
            fails()
        return losses_B

    if mine and not place.startswith("loss"):
        inside = blocks_that(fails, place == "backward")
    start = time.monotonic()
    with inside:
        found, step, spent, _ = one_step(forward, params, ranks, engine, loss_fn, steps=2)
    seconds = time.monotonic() - start
    dist.destroy_process_group()  # a worker must not use a group in which others still wait
    return found, step, spent, seconds


def one_fails_with_parts():
    """One process fails, twice, where the model is whole and its parameters are parts."""
    forward, params = built("full", mesh_of())

    def fails(p, b):
        raise ValueError("the rows of one process")

    return one_step(forward, params, distributed.data_parallel(), loss_fn=fails if dist.get_rank() else None, steps=2)


def one_begins_with_nan(whole):
    """The first state of a run where the parameters of one process have NaN: what each sees, after how long."""
    ranks = distributed.data_parallel() if whole else ranks_of(mesh_of())
    params = {"w": torch.full((2,), float("nan") if dist.get_rank() == 1 else 1.0)}
    dp_step = make_dp_step(lambda p, b: (p["w"] * b["y"][:, None]).sum(1), plan(), engine="loop", ranks=ranks)
    start = time.monotonic()

    def begin_and_step():
        state = dp_step.init(params, insecure_key(1))
        dp_step(params, take(data(), next(iter(plan().batches(state, ranks)))), state)

    found = caught(begin_and_step)
    return found, time.monotonic() - start


def one_replica_differs():
    """Parameters of HSDP: one process holds another part than its replica."""
    mesh = mesh_of(True)
    forward, params = built("full", mesh)
    if dist.get_rank() == 3:
        name = next(name for name, p in params.items() if local(p).numel())
        with torch.no_grad():
            local(params[name]).view(-1)[0].add_(1e-7)
    return one_step(forward, params, ranks_of(mesh))[:3]


def guide(code, folder):
    """The blocks of docs/guides/sharded.md, in order."""
    os.chdir(folder)
    names = {}
    exec(compile(code, "sharded.md", "exec"), names)
    held = {name: (tuple(p.shape), tuple(local(p).shape)) for name, p in names["parts"].items()}
    return names["state"].step, held, names["trained"]


def an_adapter_is_sharded():
    """Whether the original module is as it was, merging works, and the adapter's own parts are sharded."""
    original = net(nn.Linear)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in original.named_parameters()}
    adapter = dpfunc.lora.attach(original, insecure_key(5), targets="up", rank=2, alpha=4, train="B")
    adapter = distributed.shard_frozen(adapter, mesh_of(), layers=["layers.1", "layers.1.down", "layers.0"])
    after = dict(original.named_parameters())
    kept = all(torch.equal(after[name], p) and after[name].requires_grad == flag for name, (p, flag) in before.items())
    whole = not any(is_dtensor(p) for p in after.values())
    frozen = [p for name, p in adapter.adapted.named_parameters() if "lora_" not in name]
    params = {name: torch.ones_like(p) for name, p in adapter.params.items()}
    ids = data()["ids"][:4]
    merged = (adapter.merge(params)(ids) - adapter.forward(params, ids)).abs().max()
    return kept, whole, all(is_dtensor(p) for p in frozen), float(merged), len(adapter.constants)


def adapt(model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in model.layers:
            layer.up, layer.down = LoRALinear(layer.up), LoRALinear(layer.down)
    return model


def initialize(model, stage, efficient):
    import deepspeed

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(dict(zip(names, (rank, rank, size, size, "0", "1"), strict=True)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", DS_ACCELERATOR="cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled now
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    zero = {"stage": stage, "memory_efficient_linear": efficient, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}  # fmt: skip
    optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
    return deepspeed.initialize(
        model=model, model_parameters=trained or None, optimizer=optimizer, config=config, dist_init_required=False
    )[0]


def zero(stage, engine, efficient=False):
    """Three steps on a model that DeepSpeed has partitioned; stage 0 is the model without DeepSpeed."""
    refused, frozen = {}, net(nn.Linear).requires_grad_(False)
    ranks = distributed.data_parallel() if stage < 3 else ranks_of(mesh_of())
    if stage in (1, 2):
        wrapped = initialize(adapt(frozen), stage, efficient)
        refused["engine"] = caught(dpfunc.functionalize, wrapped, LORA)
        model = wrapped.module
    elif stage == 3:
        model = initialize(frozen, stage, efficient).module
        refused["partitioned"] = caught(dpfunc.functionalize, model, "head")
        model = adapt(model)
    else:
        model = adapt(frozen)
    forward, params = dpfunc.functionalize(model, LORA)
    found = []
    run = lambda: found.extend(steps_of(classes(forward), plan(6.0, steps=3), params, data(), ranks, engine=engine))
    refused["steps"] = caught(run)
    return (*found, refused) if found else (params, None, [], refused)


class Doubled(torch.autograd.Function):
    """A function of a user, with a rule for vmap that torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * torch.ones_like(x)


def functions_of_users():
    """One step of a loss with such a function, and of one that multiplies by 2: of a frozen base, and with all managed."""
    found = {}
    for name in ("helper", "managed"):
        for doubled in (Doubled.apply, lambda x: x * 2):
            mesh = mesh_of()
            forward, params, engine, ranks = (
                managed(mesh) if name == "managed" else (*built(name, mesh), "auto", ranks_of(mesh))
            )
            loss = classes(forward)
            found.setdefault(name, []).append(
                one_step(forward, params, ranks, engine, lambda p, b, loss=loss, doubled=doubled: doubled(loss(p, b)))
            )
    return found
