"""What the workers of test_tensor_parallel.py do: each function runs on every rank and returns plain values."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from fsdp_jobs import LoRALinear
from jobs import steps_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from workers import caught

import dpfunc
from dpfunc import clipping, distributed, engines, sampling
from dpfunc._utils.parts import distributed as whole_of
from dpfunc.batches import rows, take
from dpfunc.engines.audit import rounded_params
from dpfunc.errors import DPFuncError
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.step import make_dp_step

VOCAB, LENGTH, BATCH = 32, 6, 5


class MLP(nn.Module):
    """Split, whole and split again, with biases; the norm and the head are whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.down(F.gelu(self.up(x))))).mean(1)


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def llama(rank=0):
    """A tiny one; with `rank`, only LoRA is trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if rank:
        model.requires_grad_(False)
        for part in (part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)):
            for name, child in list(part.named_children()):
                if name in COLUMNS + ROWS:
                    setattr(part, name, LoRALinear(child, rank))
    return model


def split_mlp(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_lora(model, mesh):
    for part in (part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)):
        for name, child in part.named_children():
            if name in COLUMNS:
                parallelize_module(child, mesh, {"base_layer": ColwiseParallel(), "lora_B": ColwiseParallel()})
            if name in ROWS:
                parallelize_module(child, mesh, {"base_layer": RowwiseParallel(), "lora_A": RowwiseParallel()})


def split_llama(model, mesh):
    for layer in model.model.layers:
        plan = {f"self_attn.{name}": ColwiseParallel() for name in COLUMNS[:3]}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in COLUMNS[3:]}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def pixels(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["x"]), b["y"], reduction="none")


def next_token(forward):
    def loss_fn(p, b):
        scores = forward(p, input_ids=b["ids"]).logits[:, :-1]
        return F.cross_entropy(scores.transpose(1, 2), b["ids"][:, 1:], reduction="none").mean(1)

    return loss_fn


def batch_of(size=BATCH):
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(size, 4, 6, generator=generator, dtype=torch.float64),
        "y": torch.randint(3, (size,), generator=generator),
        "ids": torch.randint(VOCAB, (size, LENGTH), generator=generator),
    }


CASES = {
    "mlp": (MLP, split_mlp, pixels),
    "llama lora": (lambda: llama(2), split_lora, next_token),
    "llama": (llama, split_llama, next_token),
}


def built(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CASES[name][0]().double()


def mesh_of():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def shaken_alike():
    """Parts of parameters that are moved by rounding, put together, against whole ones; whether they are DTensors."""
    whole, split = built("mlp"), built("mlp")
    split_mlp(split, mesh_of())
    expected = rounded_params(dpfunc.functionalize(whole).params, 2**40, 0)
    parts = dpfunc.functionalize(split).params
    found = rounded_params(parts, 2**40, 0)
    kept = all(isinstance(found[name], DTensor) == isinstance(param, DTensor) for name, param in parts.items())
    off = [float((value - expected[name]).abs().max()) for name, value in distributed.unshard(found).items()]
    return kept, max(off)


class Normed(nn.Module):
    """A whole norm is applied to the activations of this rank's own heads."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(4), nn.Linear(8, 6)

    def forward(self, x):
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        return self.down(heads.flatten(-2)).mean(1)[:, :3]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 6), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embed(ids)).mean(1)


class AcrossRecords(nn.Linear):
    """Each rank takes a part of the records."""

    def forward(self, x):
        x = distribute_tensor(x, self.weight.device_mesh, [Shard(0)])
        return F.linear(x, self.weight, self.bias).full_tensor().mean(1)


MODELS = {
    "sequence": (MLP, MLP), "table": (Table, Table), "own heads": (Normed, Normed),
    "across records": (lambda: AcrossRecords(6, 3), lambda: nn.Linear(6, 3)),
}  # fmt: skip


def unusual(kind):
    """Layers that are split in other ways: the error, or the relative difference to one process."""
    mesh, batch, loss = mesh_of(), batch_of(), pixels
    torch.manual_seed(0)
    split, whole = MODELS.get(kind, (MLP, MLP))
    model, whole = split(), whole()
    whole.load_state_dict(model.state_dict())
    if kind in ("frozen", "other records"):
        split_mlp(model, mesh)
    if kind == "frozen":
        for layer in (*(model.up, model.down), *(whole.up, whole.down)):
            layer.requires_grad_(False)
    if kind == "other records":
        batch["x"] = batch["x"] * (1 + dist.get_rank())
    if kind == "sequence":
        model.norm.register_forward_pre_hook(lambda part, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
        parallelize_module(model, mesh, {"norm": SequenceParallel(use_local_output=False)})
        model.head.register_forward_pre_hook(lambda part, args: (args[0].full_tensor(),))
    if kind == "own heads":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "table":
        parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
        loss = ids
    if kind == "across records":
        for name, param in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
        batch = rows(batch, 0, 4)
    if kind == "losses":
        parallelize_module(model, mesh, {"head": RowwiseParallel(input_layouts=Replicate(), use_local_output=False)})
        loss = squares
    forward, params = dpfunc.functionalize(model.double())
    try:
        found = engines.auto()(loss(forward), params, batch)
    except DPFuncError as error:
        return type(error).__name__, str(error)
    forward, wholes = dpfunc.functionalize(whole.double())
    expected = engines.loop()(loss(forward), wholes, batch)
    size, off = len(batch["x"]), 0.0
    for factors_B in (torch.ones(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)):
        sums, wanted = (each.weighted_sum(dict.fromkeys(params, factors_B)) for each in (found, expected))
        put_together = distributed.unshard({name: whole_of(value, params[name]) for name, value in sums.items()})
        off = max(off, *(float((value - wanted[name]).abs().max()) for name, value in put_together.items()))
    return None, off


def ids(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["ids"]), b["y"], reduction="none")


def squares(forward):
    return lambda p, b: forward(p, b["x"]).square().sum(1)


NUM_RECORDS, STEPS = 24, 3
SEED = 24  # 2.9 expected records: draws of 1, 0 and 4, so that some processes, and all, have none


def _mesh(parts):
    return init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", "tp"))


def train(name, parts, clip="flat", frozen_sharded=False, expected=2.9, checkpointing=False, **options):
    """Noisy steps; `parts` processes hold one replica. 0 is one whole model without ranks."""
    model, ranks = built(name), None
    if parts:
        mesh = _mesh(parts)
        CASES[name][1](model, mesh["tp"])
        ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
        if frozen_sharded:
            trained = {p for p in model.parameters() if p.requires_grad}
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"], ignored_params=trained)
    forward, params = dpfunc.functionalize(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    groups = clipping.PerLayer() if clip == "layers" else clipping.AllParameters()
    sampler = sampling.Poisson(NUM_RECORDS, expected / NUM_RECORDS)
    plan = Plan(sampler, clipping.Flat(0.5, groups=groups), 1.0, STEPS, delta=1e-3)
    params, ledger, counts = steps_of(
        CASES[name][2](forward), plan, params, batch_of(NUM_RECORDS), ranks, SEED, **options
    )
    return distributed.unshard(params), ledger, counts


def without_the_sum_of_norms(parts, frozen=()):
    """One step where each process clips by the norm of its own parts: what was raised, and the steps on disk by then.

    Without any (`frozen`) by a bound of its own.
    """
    mesh, written = _mesh(parts), []
    model = built("mlp")
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    split_mlp(model, mesh["tp"])
    ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
    forward, params = dpfunc.functionalize(model)
    plan = Plan(sampling.Poisson(NUM_RECORDS, 0.5), clipping.Flat(0.01), 1.0, STEPS, delta=1e-3)
    dp_step = make_dp_step(pixels(forward), plan, ranks=ranks, journal=written.append)
    state = dp_step.init(params, distributed.shared_key(ranks))
    batch = take(batch_of(NUM_RECORDS), next(iter(plan.batches(state, ranks))))
    factor = 1 + mesh["tp"].get_local_rank() if frozen else 1

    def own_norms(params, sq_norms, ranks):
        return {name: value * factor for name, value in sq_norms.items()}

    with mock.patch("dpfunc.clipped.full_norms", own_norms):
        return (*caught(dp_step, params, batch, state), len(written))


def trouble(kind):
    """One step that must fail, on all processes: the type and text of what was raised."""
    mesh = _mesh(2)
    model = built("mlp")
    CASES["mlp"][1](model, mesh["tp"])
    forward, params = dpfunc.functionalize(model)
    ranks = distributed.sharded(mesh, data=("dp",), tensor=("tp",))
    if kind == "data parallel":
        ranks = distributed.data_parallel(mesh["dp"].get_group())
    if kind == "one process":
        ranks = None
    plan = Plan(sampling.Poisson(NUM_RECORDS, 0.5), clipping.Flat(0.5), 1.0, STEPS, delta=1e-3)
    mine = dist.get_rank() == dist.get_world_size() - 1
    data = batch_of(NUM_RECORDS)
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
    spent = []

    def begin_and_step():
        size = {"microbatch_size": "auto"} if kind == "microbatches" else {}
        dp_step = make_dp_step(CASES["mlp"][2](forward), plan, ranks=ranks, **size)
        good = {key: torch.nan_to_num(p) if not isinstance(p, DTensor) else p for key, p in params.items()}
        state = allow_repeat(dp_step.init(good, insecure_key(SEED)))
        spent.append(state.ledger.num_steps)
        drawn, mask_B = next(iter(plan.batches(state, ranks))), None
        if kind == "other mask":  # of one row more, with as many real ones
            drawn = torch.cat([drawn, drawn[:1]])
            mask_B = torch.arange(len(drawn)) != (0 if mine else len(drawn) - 1)
        dp_step(params, take(data, drawn), state, mask_B=mask_B)

    return (*caught(begin_and_step), sum(spent))


def mesh_dims(data, tensor):
    """What `sharded` says to dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("dp", "tp", "cp"))
    return caught(distributed.sharded, mesh, data=data, tensor=tensor)


def common_start():
    """What all processes hold after `replicate`, and who hears of a difference between any two."""
    ranks = distributed.sharded(_mesh(2), data=("dp",), tensor=("tp",))
    number = dist.get_rank()
    tensor = torch.full((2, 3), float(number + 1))
    distributed.replicate([tensor], ranks)
    texts = ["other" if number == odd else "usual" for odd in range(dist.get_world_size())]
    said = [caught(distributed.check_same, "data", text, ranks)[0] for text in texts]
    distributed.check_same("data", "usual", ranks)
    return tensor, said
