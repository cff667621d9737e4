"""What the workers of test_sharded_models.py and test_sharded_params.py do: a small run, sharded in one way or another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import dpfunc
from dpfunc import clipping, distributed, sampling
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.sharding import is_dtensor, local
from dpfunc.step import make_dp_step, replay
from dpfunc.tree import take

NUM_RECORDS, VOCAB, WIDTH, CLASSES = 40, 11, 7, 3  # sizes that no number of processes divides
LORA = r"lora_"


class LoRALinear(nn.Module):
    def __init__(self, inner, outer, rank=2):
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.lora_A = nn.Linear(inner, rank, bias=False)
        self.lora_B = nn.Linear(rank, outer, bias=False)

    def forward(self, x):
        low = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return self.base(x) + 2.0 * low.to(x.dtype)


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 9), linear(9, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, two residual blocks, and a head whose 3 rows do not reach 4 processes."""

    def __init__(self, linear=LoRALinear):
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


def net(linear=LoRALinear):
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
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=trained, **options)
    fully_shard(model, mesh=mesh, ignored_params=trained, **options)


def built(way, mesh, hsdp=False, bf16=False, reshard=None, gradient_checkpointing=False):
    """`(forward, params)` of a model that is sharded in a way; whole where there is no mesh."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    if way == "full":
        forward, params = dpfunc.functionalize(net(nn.Linear), ".")
        return forward, params if mesh is None else distributed.shard(params, mesh, min_size=4)
    if way == "attach":
        adapter = dpfunc.lora.attach(
            net(nn.Linear), insecure_key(5), targets="up|down", rank=2, alpha=4, also_train="norm"
        )
        if mesh is not None:
            adapter = distributed.shard_frozen(adapter, mesh, mp_policy=policy, reshard_after_forward=reshard)
        return adapter.forward, adapter.params
    model = net()
    if mesh is not None and way == "by hand":
        by_hand(model, mesh, mp_policy=policy, reshard_after_forward=reshard)
    elif mesh is not None:
        distributed.shard_frozen(model, mesh, trainable=LORA, mp_policy=policy, reshard_after_forward=reshard)
    forward, params = dpfunc.functionalize(model, LORA)
    model.gradient_checkpointing = gradient_checkpointing
    if way == "sharded lora" and mesh is not None:
        params = distributed.shard(params, mesh, min_size=4)
    return forward, params


def plan(size=2.9, steps=8, clip=None):
    return Plan(
        sampler=sampling.Poisson(NUM_RECORDS, size / NUM_RECORDS),
        clip=clipping.Flat(1.0) if clip is None else clip,
        noise_multiplier=1.0,
        num_steps=steps,
        delta=1e-3,
    )


def classes(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["ids"]).float(), b["y"], reduction="none")


def train(way, engine, whole=False, microbatch_size=None, size=2.9, adam=False, seed=7, **options):
    """A run of eight noisy steps: parameters put together, ledger, records of this process in each step."""
    mesh = None if whole else mesh_of(options.get("hsdp", False))
    ranks = None if whole else ranks_of(mesh)
    forward, params = built(way, mesh, **options)
    the_plan = plan(size)
    dp_step = make_dp_step(classes(forward), the_plan, engine=engine, microbatch_size=microbatch_size, ranks=ranks)
    weights = {name: nn.Parameter(param) for name, param in params.items()}
    optimizer = (
        torch.optim.AdamW(weights.values(), lr=0.01) if adam else torch.optim.SGD(weights.values(), 0.3, momentum=0.5)
    )
    records, counts = data(), []
    state = replay(dp_step.init(weights, insecure_key(seed)))
    for indices in the_plan.batches(state, ranks):
        grads, state, _ = dp_step(weights, take(records, indices), state)
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        counts.append(len(indices))
    held = [local(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim]
    cut = sum(is_dtensor(p) and local(p).shape != p.shape for p in weights.values())
    return distributed.whole(weights), state.ledger.to_json(), counts, (cut, sum(v.numel() for v in held))


def train_with(options):
    """The same, with its arguments as one."""
    return train(**options)
