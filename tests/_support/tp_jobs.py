"""What the workers of the tests of tensor parallelism do: each function runs on every rank and returns plain numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import dpfunc
from dpfunc import engines
from dpfunc._utils.dtensor import distributed, is_sharded, local
from dpfunc.batches import rows
from dpfunc.engines.guards.audit import rounded_params
from dpfunc.errors import DPFuncError

VOCAB, LENGTH, BATCH = 32, 6, 5
CLIP = 0.5


class MLP(nn.Module):
    """Split, whole and split again, with biases; the norm and the head are whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.down(F.gelu(self.up(x))))).mean(1)


class LoRALinear(nn.Module):
    def __init__(self, base_layer, rank):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


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
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if name in COLUMNS + ROWS:
                        setattr(part, name, LoRALinear(child, rank))
    return model


def _split_lora(layer, mesh):
    for part in (layer.self_attn, layer.mlp):
        for name, child in part.named_children():
            if name in COLUMNS:
                parallelize_module(child, mesh, {"base_layer": ColwiseParallel(), "lora_B": ColwiseParallel()})
            if name in ROWS:
                parallelize_module(child, mesh, {"base_layer": RowwiseParallel(), "lora_A": RowwiseParallel()})


def split_mlp(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_lora(model, mesh):
    for layer in model.model.layers:
        _split_lora(layer, mesh)


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


def batch_of(size=BATCH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(size, 4, 6, generator=generator, dtype=torch.float64).to(dtype),
        "y": torch.randint(3, (size,), generator=generator),
        "ids": torch.randint(VOCAB, (size, LENGTH), generator=generator),
    }


CASES = {
    "mlp": (MLP, split_mlp, pixels),
    "llama lora": (lambda: llama(2), split_lora, next_token),
    "llama": (llama, split_llama, next_token),
}


def built(name, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CASES[name][0]().to(dtype)


def mesh_of(name="tp"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def summed(sq_norms, params):
    """What a step does: the parts of one gradient are on several ranks."""
    return {name: _summed(norm) if is_sharded(params[name]) else norm for name, norm in sq_norms.items()}


def _summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def clipped(engine, loss_fn, params, batch, sizes, sum_norms):
    """Losses, norms and the clipped sum, in microbatches."""
    losses, norms, sums, start = [], [], {}, 0
    for size in sizes:
        part = rows(batch, start, start + size)
        start += size
        result = engine(loss_fn, params, part)
        norms_B = sum(sum_norms(result.sq_norms(), params).values()).sqrt()
        factors_B = (CLIP / norms_B).clamp(max=1.0)
        for name, value in result.weighted_sum(dict.fromkeys(params, factors_B)).items():
            sums[name] = sums.get(name, 0) + value
        losses.append(result.losses_B)
        norms.append(norms_B)
    return torch.cat(losses), torch.cat(norms), sums


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def parity(name, engine_name, dtype_name="float64", sizes=(BATCH,), checkpointing=False):
    """Differences, relative, to a loop over single samples in one process; and without the sum over ranks."""
    dtype = getattr(torch, dtype_name)
    batch = batch_of(dtype=dtype)
    model = built(name, dtype)
    forward, params = dpfunc.functionalize(model)
    loss_fn = CASES[name][2](forward)
    expected = clipped(engines.loop(), loss_fn, params, batch, (BATCH,), lambda norms, params: norms)

    split = built(name, dtype)
    CASES[name][1](split, mesh_of())
    forward, parts = dpfunc.functionalize(split)
    if checkpointing:
        split.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        split.train()
    loss_fn = CASES[name][2](forward)
    engine = getattr(engines, engine_name)()
    losses_B, norms_B, sums = clipped(engine, loss_fn, parts, batch, sizes, summed)
    whole = {}
    for key, value in sums.items():
        found = distributed(value, parts[key])
        whole[key] = found.full_tensor() if is_sharded(parts[key]) else local(found)
    every = torch.cat([value.flatten() for value in whole.values()])
    every_expected = torch.cat([value.flatten() for value in expected[2].values()])
    unsummed = (
        clipped(engine, loss_fn, parts, batch, (BATCH,), lambda norms, params: norms)
        if engine_name != "ghost"
        else None
    )
    plain = [not hasattr(value, "placements") for value in sums.values()]
    return {
        "losses": relative(losses_B, expected[0]),
        "norms": relative(norms_B, expected[1]),
        "sums": max(relative(whole[key], expected[2][key]) for key in whole if expected[2][key].abs().max() > 1e-9),
        "all": relative(every, every_expected),
        "without the sum": None if unsummed is None else relative(unsummed[1], expected[1]),
        "plain": all(plain),
        "local shapes": all(value.shape == local(parts[key].detach()).shape for key, value in sums.items()),
        "sharded": sum(is_sharded(param) for param in parts.values()),
        "dtypes": sorted({str(value.dtype) for value in sums.values()}),
        "engine": engine.decision(loss_fn).engine if engine_name != "loop" else "loop",
        "first": float(next(iter(whole.values())).flatten()[0]),
    }


def shaken_alike():
    """Parts of parameters that are moved by rounding, put together, against whole ones; whether they are DTensors."""
    whole, split = built("mlp", torch.float64), built("mlp", torch.float64)
    split_mlp(split, mesh_of())
    expected = rounded_params(dpfunc.functionalize(whole).params, 2**40, 0)
    parts = dpfunc.functionalize(split).params
    found = rounded_params(parts, 2**40, 0)
    kept = all(isinstance(found[name], DTensor) == isinstance(param, DTensor) for name, param in parts.items())
    off = [float((full(found[name]) - value).abs().max()) for name, value in expected.items()]
    return kept, max(off)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


class Transposed(nn.Linear):
    def forward(self, x):
        return (DTensor.from_local(x, self.weight.device_mesh, [Replicate()]) @ self.weight.t()).to_local().mean(1)


class Scaled(nn.Module):
    """A split weight that is multiplied by, and not by a matrix product."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x):
        mesh = self.scale.device_mesh
        return self.head((DTensor.from_local(x, mesh, [Replicate()]) * self.scale).full_tensor()).mean(1)


class AcrossRecords(nn.Linear):
    """Each rank takes a part of the records."""

    def forward(self, x):
        x = distribute_tensor(x, self.weight.device_mesh, [Shard(0)])
        return F.linear(x, self.weight, self.bias).full_tensor().mean(1)


def _replicate(part, mesh):
    for name, param in list(part.named_parameters(recurse=False)):
        part.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))


class WholeTransposed(nn.Linear):
    def forward(self, x):
        return (x @ self.weight.t()).mean(1)


class WholeScaled(Scaled):
    def forward(self, x):
        return self.head(x * self.scale).mean(1)


MODELS = {
    "sequence": (MLP, MLP), "table": (Table, Table), "own heads": (Normed, Normed), "scaled": (Scaled, WholeScaled),
    "transposed": (lambda: Transposed(6, 4), lambda: WholeTransposed(6, 4)),
    "across records": (lambda: AcrossRecords(6, 3), lambda: nn.Linear(6, 3)),
}  # fmt: skip


def unusual(kind, engine="auto"):
    """Layers that are split in other ways: the error, or the relative difference to one process."""
    mesh, batch, loss = mesh_of(), batch_of(), pixels
    torch.manual_seed(0)
    split, whole = MODELS.get(kind, (MLP, MLP))
    model, whole = split(), whole()
    whole.load_state_dict(model.state_dict())
    if kind in ("vmap", "frozen", "other records"):
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
    if kind in ("transposed", "scaled", "across records"):
        _replicate(model, mesh)
        batch = rows(batch, 0, 4)
    if kind == "losses":
        parallelize_module(model, mesh, {"head": RowwiseParallel(input_layouts=Replicate(), use_local_output=False)})
        loss = squares
    forward, params = dpfunc.functionalize(model.double())
    try:
        found = getattr(engines, engine)()(loss(forward), params, batch)
    except DPFuncError as error:
        return type(error).__name__, str(error)
    forward, wholes = dpfunc.functionalize(whole.double())
    expected = engines.loop()(loss(forward), wholes, batch)
    size, off = len(batch["x"]), 0.0
    for factors_B in (torch.ones(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)):
        sums, wanted = (each.weighted_sum(dict.fromkeys(params, factors_B)) for each in (found, expected))
        for name, value in sums.items():
            value = distributed(value, params[name])
            value = value.full_tensor() if isinstance(value, DTensor) else value
            off = max(off, float((value - wanted[name]).abs().max()))
    return None, off


def ids(forward):
    return lambda p, b: F.cross_entropy(forward(p, b["ids"]), b["y"], reduction="none")


def squares(forward):
    return lambda p, b: forward(p, b["x"]).square().sum(1)
