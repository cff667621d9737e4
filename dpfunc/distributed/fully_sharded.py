"""Full fine-tuning of a model that `fully_shard` manages: one layer is gathered at a time, in weights and in sums.

The module swaps its own tensors in and out while it runs. They stand for the parameters: the engine of two passes
recognises their uses, and each weighted sum is sharded over the processes as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc._utils.validation import shorten
from dpfunc.distributed.ranks import Ranks
from dpfunc.distributed.reduce import scattered
from dpfunc.engines.ghost import Ghost
from dpfunc.engines.guards.lockstep import is_independent
from dpfunc.engines.guards.loss import until_backward
from dpfunc.engines.vmap_grad import VmapGrad
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.fsdp import fsdp_parts, managed, recovered, refuse_communication
from dpfunc.functional.names import check_params
from dpfunc.functional.refuse import refuse_unsupported
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads


class Managed(NamedTuple):
    """A sharded module as a function, its parameters in parts, and the engine and ranks to train it with."""

    forward: ManagedForward
    params: dict[str, Tensor]
    engine: ManagedEngine
    ranks: Ranks


def functionalize_managed(module: nn.Module, ranks: Ranks) -> Managed:
    """A module whose trained parameters `fully_shard` manages, as a function of their parts.

    Args:
        module: `fully_shard` was called on its layers and on itself; every parameter that requires a gradient is
            trained. `forward` writes the parts that it is given into the module.
        ranks: `distributed.sharded(mesh, data=...)` with the mesh of `fully_shard`.

    Returns:
        `(forward, params, engine, ranks)`: params are DTensors, copies of the module's; engine and ranks are for
        `make_dp_step(loss_fn, plan, engine=engine, ranks=ranks)`. No other engine can be used.

    Raises:
        InvalidArgument: nothing is trained, or there is a tensor group.
        UnsupportedModel: trained parameters outside of `fully_shard`; from a step also parameters that are not used.

    Guarantees:
        the released gradients are those of one process (tests/distributed/test_fully_sharded.py).
    """
    refuse_unsupported(module, checkpointing=True)  # repeated passes run with the module's own parameters: these
    own = managed(module)
    for part in fsdp_parts(module).values():
        part.reshard()
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not trained or ranks.tensor_group is not None or ranks.independent:
        raise InvalidArgument(
            "Expected a module with parameters that require gradients, and ranks=dpfunc.distributed.sharded(mesh, "
            f"data=...), got {len(trained)} parameters and ranks={ranks}."
        )
    others = [name for name in trained if name not in own]
    if others:
        raise UnsupportedModel(
            f"The parameters {shorten(others)} are trained, but fully_shard does not manage them. Call it on all of "
            "the module, or freeze them; for trained parameters outside of FSDP use dpfunc.functionalize."
        )
    forward = ManagedForward(module, trained)
    params = {name: param.detach().clone() for name, param in trained.items()}
    sharding_ranks = replace(ranks, keeps_parts=True)
    return Managed(forward, params, ManagedEngine(forward, sharding_ranks), sharding_ranks)


@dataclass(frozen=True)
class ManagedForward:
    """The module as `forward(params, *args)`; see `functionalize_managed`."""

    module: nn.Module = field(repr=False)
    parts: Mapping[str, Tensor] = field(repr=False)

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's output with these parameters."""
        if is_independent():
            refuse_communication(self.module)
        scope = until_backward()
        if scope is not None and not self._stands_for(params):
            raise UnsupportedModel(
                "Parameters that fully_shard manages have no per-sample gradients in this engine. Use the engine and "
                "the ranks that functionalize_managed returned."
            )
        check_params(params, {name: part.shape for name, part in self.parts.items()})
        refuse_unsupported(self.module, checkpointing=True)
        if all(is_dtensor(param) for param in params.values()):
            self.write(params)
        with _buffers_unchanged(self.module):
            if scope is not None:
                scope.hold(partial(recovered, self.module))
                return self.module(*args, **kwargs)
            with recovered(self.module):
                return self.module(*args, **kwargs)

    def _stands_for(self, params: Params) -> bool:
        """True if these are the module's own tensors, as its engine gives them."""
        own = vars(self).get("gathered", {})
        return all(own.get(name) is param for name, param in params.items())

    def write(self, params: Params) -> None:
        """Write parameter shards into the module; layers still gathered from an earlier pass are released."""
        for part in fsdp_parts(self.module).values():
            part.reshard()
        with torch.no_grad():
            for name, own in self.parts.items():
                if local(own).data_ptr() != local(params[name]).data_ptr():  # they may be the module's own
                    own.copy_(params[name])

    @cached_property
    def gathered(self) -> dict[str, Tensor]:
        """The tensors that the module computes with, without their values. FSDP makes them once, and keeps them."""
        found: dict[str, Tensor] = {}
        for part in fsdp_parts(self.module).values():
            part.unshard()
            found |= {n: p for n, p in self.module.named_parameters() if n in self.parts and p is not self.parts[n]}
            part.reshard()
        if found.keys() != self.parts.keys() or any(is_dtensor(tensor) for tensor in found.values()):
            raise UnsupportedModel("This version of torch does not show the gathered parameters of fully_shard.")
        return {name: found[name] for name in self.parts}


@contextmanager
def _buffers_unchanged(module: nn.Module) -> Iterator[None]:
    """Refuse forward passes inside that write into buffers.

    Raises:
        UnsupportedModel: the forward pass wrote into one.
    """
    before = {name: buffer._version for name, buffer in module.named_buffers()}
    yield
    written = [name for name, buffer in module.named_buffers() if buffer._version != before[name]]
    if written:
        raise UnsupportedModel(
            f"The forward pass writes into the buffers {shorten(written)}: samples would influence each other."
        )


@dataclass(frozen=True)
class ManagedEngine:
    """The engine of two passes over the tensors of a sharded module; see `functionalize_managed`."""

    forward: ManagedForward = field(repr=False)
    ranks: Ranks = field(repr=False)

    @cached_property
    def _engine(self) -> VmapGrad:
        return VmapGrad(two_passes=True, source=self)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Losses and norms of a batch; each weighted sum is sharded over the processes when it is made."""
        if not all(is_dtensor(param) for param in params.values()):
            raise InvalidArgument("Expected parameters in parts. Use the ranks that functionalize_managed returned.")
        found = self._engine(loss_fn, params, batch)
        if isinstance(found, Ghost) and found.unused:
            raise UnsupportedModel(
                f"The loss does not use the trained parameters {shorten(found.unused)}, or FSDP shows others in their "
                "place. Freeze what is not used."
            )
        return found

    def leaves(self, params: Params) -> dict[str, Tensor]:
        """The module's own tensors, after these parts were written into it."""
        gathered = dict(self.forward.gathered)
        self.forward.write(params)
        return gathered

    def reduced(self, name: str, total: Tensor) -> Tensor:
        """The part of a sum over all processes that belongs to this one."""
        return scattered(total, self.forward.parts[name], self.ranks)
