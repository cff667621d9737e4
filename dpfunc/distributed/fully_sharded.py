"""Full fine-tuning of a model that `fully_shard` manages: one layer is gathered at a time, in weights and in sums.

The module swaps its own tensors in and out while it runs. They stand for the parameters: the ghost engine recognises
their uses, and each weighted sum is sharded over the processes as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import shorten
from dpfunc.batches import batch_size, pad_rows
from dpfunc.distributed.ranks import Ranks
from dpfunc.distributed.reduce import scattered
from dpfunc.engines.ghost import Ghost, GhostEngine
from dpfunc.engines.guards.lockstep import is_independent
from dpfunc.engines.guards.scope import until_backward
from dpfunc.engines.per_sample import PerSample, Zeros
from dpfunc.engines.uses.parameter_source import has_parameter_source, using_source
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.fsdp import fsdp_parts, managed, recovered, refuse_communication
from dpfunc.functional.names import check_params
from dpfunc.functional.refuse import refuse_unsupported
from dpfunc.types import Batch, LossFn, Params


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
        under_functorch = torch._C._functorch.maybe_current_level() is not None
        if under_functorch or (scope is not None and not has_parameter_source()):
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

    def write(self, params: Params) -> None:
        """Write parameter shards into the module; layers still gathered from an earlier pass are released."""
        for part in fsdp_parts(self.module).values():
            part.reshard()
        with torch.no_grad():
            for name, own in self.parts.items():
                own.copy_(params[name])

    def gathered_tensors(self) -> dict[str, Tensor]:
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
    """The ghost engine over the tensors of a sharded module; see `functionalize_managed`."""

    forward: ManagedForward = field(repr=False)
    ranks: Ranks = field(repr=False)
    _ghost: GhostEngine = field(default_factory=GhostEngine, repr=False, compare=False)

    @cached_property
    def _gathered(self) -> dict[str, Tensor]:
        """The module's own tensors, which are the same in each step."""
        return self.forward.gathered_tensors()

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> ManagedSamples:
        num_samples = batch_size(batch)
        if not all(is_dtensor(param) for param in params.values()):
            raise InvalidArgument("Expected parameters in parts. Use the ranks that functionalize_managed returned.")
        _ = self._gathered  # found before the source of parameters is in use
        with using_source(self):  # one row is computed twice, and counted once
            found = self._ghost(loss_fn, params, pad_rows(batch, 2) if num_samples == 1 else batch)
        if not isinstance(found, Ghost):
            raise UnsupportedModel("Expected at least two rows.")
        unused = [name for name, grad in found.kept.grads.items() if isinstance(grad, Zeros)]
        if unused:
            raise UnsupportedModel(
                f"The loss does not use the trained parameters {shorten(unused)}, or FSDP shows others in their place. "
                "Freeze what is not used."
            )
        return ManagedSamples(found, num_samples, self)

    def leaves(self, params: Params) -> dict[str, Tensor]:
        """The module's own tensors, after these parts were written into it."""
        self.forward.write(params)
        return dict(self._gathered)

    def reduced(self, name: str, total: Tensor) -> Tensor:
        """The part of a sum over all processes that belongs to this one."""
        return scattered(total, self.forward.parts[name], self.ranks)


@dataclass(frozen=True)
class ManagedSamples:
    """Per-sample gradients of a batch, whose weighted sums are sharded over the processes."""

    found: Ghost = field(repr=False)
    num_samples: int
    engine: ManagedEngine = field(repr=False)

    @property
    def losses_B(self) -> Tensor:
        return self.found.losses_B[: self.num_samples]

    @property
    def grads(self) -> Mapping[str, Any]:
        """Mapping without gradients: only norms and sums are computed."""
        return PerSample(self.losses_B, {}).grads

    def sq_norms(self) -> dict[str, Tensor]:
        return {name: norms[: self.num_samples] for name, norms in self.found.sq_norms().items()}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums of all processes: name -> DTensor."""
        missing = len(self.found.losses_B) - self.num_samples
        padded = {name: torch.cat([row, row.new_zeros(missing)]) for name, row in factors.items()}
        with using_source(self.engine):
            sums = self.found.weighted_sum(padded)
        return {name: s if is_dtensor(s) else self.engine.reduced(name, s) for name, s in sums.items()}
