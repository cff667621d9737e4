"""Modules whose parameters are gathered for each forward pass, so that they cannot be arguments: FSDP2 and others.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: yes.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from dpfunc._utils.parts import fsdp_class, is_dtensor
from dpfunc._utils.processes import AllGather, over_gloo
from dpfunc._utils.validation import refuse, shorten
from dpfunc.errors import UnsupportedModel
from dpfunc.functional.names import outermost


def fsdp_parts(module: nn.Module) -> dict[str, Any]:
    """The parts of a module that `fully_shard` was called on, by name."""
    kind = fsdp_class("FSDPModule")
    return {} if kind is None else {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def settle(module: nn.Module) -> None:
    """Release parameters that `fully_shard` still holds gathered: they are shards again."""
    for part in fsdp_parts(module).values():
        part.reshard()


def managed(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that `fully_shard` swaps, by name; sharded or whole, whatever is there now."""
    groups = [group for part in fsdp_parts(module).values() for group in part._get_fsdp_state()._fsdp_param_groups]
    held = [each for group in groups for each in group.fsdp_params]
    known = {id(each.sharded_param) for each in held} | {id(getattr(each, "_unsharded_param", None)) for each in held}
    return {name: param for name, param in module.named_parameters() if id(param) in known}


def refuse_managed(module: nn.Module, trained: Collection[str]) -> None:
    """Refuse trained parameters that FSDP or DeepSpeed manage."""
    for name, part in module.named_modules():
        kind, old, where = type(part), fsdp_class("FullyShardedDataParallel"), name or "The module"
        refuse(
            (old is not None and isinstance(part, old), UnsupportedModel(
                f"{where} is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters. Use torch."
                "distributed.fsdp.fully_shard (FSDP2): dpfunc.distributed.shard_frozen(module, mesh, trainable=...)."
            )),
            (kind.__module__.startswith("deepspeed.") and kind.__name__.endswith("Engine"), UnsupportedModel(
                f"{where} is DeepSpeed's {kind.__name__}, which reduces gradients before they are clipped. Pass "
                "engine.module, and update parameters with an optimizer of torch."
            )),
        )  # fmt: skip
    refuse_swapped(module, trained)
    if partitioned := [name for name, param in module.named_parameters() if name in trained and _of_zero(param)]:
        raise UnsupportedModel(
            f"The parameters {shorten(partitioned)} are partitioned by DeepSpeed ZeRO-3, which does not take others in "
            "their place. Add what is trained after deepspeed.initialize, e.g. get_peft_model(engine.module, config), "
            "or use ZeRO-1 or 2."
        )


def refuse_swapped(module: nn.Module, names: Collection[str]) -> None:
    """Refuse parameters that `fully_shard` would overwrite after a function has replaced them."""
    swapped = managed(module)
    if own := [name for name in names if name in swapped]:
        raise UnsupportedModel(
            f"The parameters {shorten(own)} are managed by fully_shard, which overwrites in each forward pass what is "
            "given as an argument. Leave trained parameters to dpfunc: dpfunc.distributed.shard_frozen(module, mesh, "
            "trainable=...), or fully_shard(layer, ignored_params=trained); dpfunc.distributed.shard(params, mesh) "
            "then divides them, their gradients and the optimizer's state over the processes. Call functionalize "
            "after fully_shard. To train what it manages: dpfunc.distributed.functionalize_managed(module, ranks)."
        )


def _of_zero(param: Tensor) -> bool:
    return hasattr(param, "ds_id") and hasattr(param, "ds_shape")


def constant(module: nn.Module) -> set[str]:
    """Names of parameters that a wrapper gathers for each forward pass: they stay in the module."""
    return {*managed(module), *(name for name, param in module.named_parameters() if _of_zero(param))}


def communicates(module: nn.Module) -> str | None:
    """Describe the parts of a module that exchange parameters or activations with other processes, or None."""
    if parts := fsdp_parts(module):
        return f"parts that fully_shard was called on ({shorten([name or 'the module' for name in parts])})"
    if split := [name for name, param in module.named_parameters() if is_dtensor(param)]:
        return f"DTensors ({shorten(split)})"
    zero = [name for name, param in module.named_parameters() if _of_zero(param)]
    return f"parameters that DeepSpeed ZeRO-3 partitions ({shorten(zero)})" if zero else None


def refuse_communication(module: nn.Module) -> None:
    """Refuse a module that communicates in a step whose processes do not run in lockstep: it could hang."""
    if what := communicates(module):
        raise UnsupportedModel(
            f"The model communicates inside of the loss: it has {what}. All processes must take one step in lockstep, "
            "which no ranks, or those of data_parallel(), do not promise. Use ranks=dpfunc.distributed.sharded(mesh)."
        )


@contextmanager
def recovered(module: nn.Module) -> Iterator[None]:
    """Context in which an error resets sharded parts for the next pass; processes that wait see it (`arrived`)."""
    done = False
    for part in fsdp_parts(module).values() if over_gloo() else ():
        with suppress(ValueError):  # several meshes: a timeout ends the wait
            part.set_custom_all_gather(AllGather())
    try:
        yield
        done = True
    finally:
        if not done:
            parts = fsdp_parts(module)
            for root in map(parts.__getitem__, outermost(parts)):
                if root._get_fsdp_state()._is_root:
                    root.reset_iter_state()
