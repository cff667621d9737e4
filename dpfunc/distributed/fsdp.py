"""Models and parameters of which each process holds a part.

May import: its folder, lora and below. Privacy depends on it: yes.

`shard_frozen` shards the frozen parameters by FSDP2, and `shard` the trained ones, which are arguments. With
`functionalize_managed` all are FSDP2's: the module swaps its own tensors in and out while it runs. They stand for the
parameters: the engine of two passes recognises their uses, and each weighted sum is sharded as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dpfunc._utils.parts import is_dtensor, local
from dpfunc._utils.processes import is_independent
from dpfunc._utils.validation import expect, integer, refuse, shorten
from dpfunc.distributed._reduce import scattered
from dpfunc.distributed.ranks import Ranks
from dpfunc.engines._ghost import Ghost
from dpfunc.engines._guards.loss import refuse_written_buffers, until_backward, unwritten
from dpfunc.engines.vmap_grad import VmapGrad
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import fsdp
from dpfunc.functional.forward import check_params
from dpfunc.functional.modules import functionalize, unwrapped
from dpfunc.functional.names import chosen_names, first_names, outermost, select
from dpfunc.functional.refused import refuse_unsupported
from dpfunc.lora import LoRA
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

_Model = TypeVar("_Model", bound=nn.Module | LoRA)


def shard(params: Params, mesh: DeviceMesh, *, min_size: int = 1024) -> dict[str, Tensor]:
    """Parameters as DTensors: rows sharded over the processes of a mesh. A step's gradients are sharded replicated.

    At rest a process holds 1 / size of weights, of released gradients, and of the optimizer's state (a torch optimizer
    steps on DTensors). While a step lasts, `make_dp_step` gathers all of them once, and each sum once.

    Args:
        params: name -> full tensor, the same on all processes; those that are DTensors already stay as they are.
        mesh: of the processes that share the parameters, as for `fully_shard`: with one dimension rows are sharded over
            it; with two they are sharded over the second and replicated over the first (HSDP).
        min_size: numbers; smaller parameters, and those without dimensions, are replicated. They are DTensors too,
            since optimizers do not mix the two.

    Returns:
        name -> DTensor. Rows need not divide evenly. The released gradients are those of one process
        (tests/distributed/test_fsdp.py::test_parts_give_the_same).
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if mesh.ndim > 2:
        raise InvalidArgument(
            f"Expected a mesh with one dimension, or two (replicas, parts), got {mesh}. Take a part of it: mesh['dp']."
        )
    limit = integer("min_size", min_size, minimum=0)
    replicated: list[Any] = [Replicate()] * mesh.ndim
    sharded: list[Any] = [*replicated[1:], Shard(0)]

    found = dict(params)
    for name, param in ((name, param) for name, param in params.items() if not is_dtensor(param)):
        placements = sharded if param.ndim > 0 and param.numel() >= limit else replicated
        found[name] = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
    return found


def unshard(params: Params) -> dict[str, Tensor]:
    """Parameters gathered on every process: to evaluate, to save, or for `dpfunc.with_params`. All must call it.

    Args:
        params: name -> tensor, DTensors or not.

    >>> import torch
    >>> unshard({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    detached: dict[str, Any] = {name: param.detach() for name, param in params.items()}
    return {name: param.full_tensor() if is_dtensor(param) else param for name, param in detached.items()}


def shard_frozen(
    model: _Model, mesh: DeviceMesh, *, layers: str | Sequence[str] | None = None,
    trainable: str | Sequence[str] | None = None, mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> _Model:  # fmt: skip
    """FSDP2 for all that is not trained: `fully_shard` on each layer and on the module.

    Trained parameters stay unsharded, for `dpfunc.functionalize(module, trainable)`; `distributed.shard` shards them.

    Args:
        model: a module, which is sharded in place (its frozen parameters no longer require gradients); or an adapter of
            `dpfunc.lora.attach`, of which a copy is. Leave its own `module`, which stays unsharded, on the CPU.
        mesh: as for `fully_shard`: one dimension, or two (replicas, parts) for HSDP. Parameters move to its device.
        layers: the parts that are gathered at once: a regular expression that is searched in their names (of nested
            matches the outermost is taken), or a list of names. None is each element of every outermost ModuleList.
        trainable: trained parameters of a module, as for `functionalize`; an adapter knows them.
        mp_policy: of the frozen layers, e.g. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. Trained layers then
            get inputs of that dtype; adapters convert them.
        reshard_after_forward: see `fully_shard`; False keeps layers gathered until their backward pass.

    Returns:
        The module, or a new adapter with the same parameters. Use `ranks=dpfunc.distributed.sharded(mesh, ...)`.

    Raises:
        InvalidArgument: no such layer, no trained parameter, or trained parameters for an adapter.
        UnsupportedModel: the module is sharded already.

    Guarantees:
        the released gradients are those of one process without sharding
        (tests/distributed/test_fsdp.py::test_a_sharded_base_gives_the_same).
    """
    if isinstance(model, LoRA):
        if trainable is not None:
            raise InvalidArgument("Expected trainable=None for an adapter, which knows what is trained.")
        module = model.adapted
        names = [*model.constants, *model.params]
        # The copy shares its frozen parameters with the original, and FSDP changes what they hold.
        _replace(module, {p: nn.Parameter(p.detach(), False) for n, p in module.named_parameters() if n not in names})
        _shard(module, mesh, layers, names, mp_policy, reshard_after_forward)
        params, constants = (
            {name: tensor.to(mesh.device_type) for name, tensor in tensors.items()}
            for tensors in (model.params, model.constants)
        )
        return replace(model, params=params, constants=constants, _adapted=functionalize(module, names).forward)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"Expected a torch module or an adapter of dpfunc.lora.attach, got {type(model).__name__}."
        )
    module = unwrapped(model)
    _shard(module, mesh, layers, list(select(module, trainable)), mp_policy, reshard_after_forward)
    return model


def _shard(
    module: nn.Module, mesh: DeviceMesh, layers: str | Sequence[str] | None, trained: Sequence[str],
    mp_policy: MixedPrecisionPolicy | None, reshard_after_forward: bool | None,
) -> None:  # fmt: skip
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if found := fsdp.communicates(module):
        raise UnsupportedModel(
            f"Expected a module that is not sharded, got one with {found}. For tensor parallelism as well, call "
            "parallelize_module, then fully_shard(layer, mesh=mesh['dp'], ignored_params=trained)."
        )
    parts = [module.get_submodule(name) for name in _layer_names(module, layers)]
    device = mesh.device_type  # FSDP ignores the trained parameters, and does not move them
    elsewhere = [p for p in map(module.get_parameter, trained) if p.device.type != device]
    _replace(module, {p: nn.Parameter(p.detach().to(device), p.requires_grad) for p in elsewhere})
    ignored = {*map(module.get_parameter, trained)}
    for param in {*module.parameters()} - ignored:
        param.requires_grad_(False)
    policy, again = mp_policy or MixedPrecisionPolicy(), reshard_after_forward
    for part in (*parts, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again, ignored_params=ignored)


def _layer_names(module: nn.Module, layers: str | Sequence[str] | None) -> list[str]:
    every = first_names(module.named_modules(remove_duplicate=False))
    del every[""]  # the module itself
    names = [name for name, first in every.items() if name == first]
    if layers is None:
        lists = outermost(name for name in names if isinstance(module.get_submodule(name), nn.ModuleList))
        inside = [f"{name}.{index}" for name in lists for index, _ in module.get_submodule(name).named_children()]
        return [name for name in inside if every[name] == name]
    chosen = chosen_names("layers", layers, every, "layer")
    if unknown := chosen.keys() - every:
        raise InvalidArgument(f"Expected names of layers, got unknown {shorten(sorted(unknown))}.")
    found = [name for name in names if name in chosen]
    found = outermost(found) if isinstance(layers, str) else found
    expect(found, "at least one layer", "layers", layers, f"The names begin {shorten(names)}.")
    return found[::-1]  # parts of others first


def _replace(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters by others; tied parameters stay tied."""
    for owner in module.modules():
        for attribute, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if param in new:
                owner.register_parameter(attribute, new[param])


class Managed(NamedTuple):
    """A sharded module as a function, its parameters in parts, and the engine and ranks to train it with."""

    forward: _ManagedForward
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
        the released gradients are those of one process
        (tests/distributed/test_fsdp.py::test_a_managed_model_gives_the_same).
    """
    refuse_unsupported(module, checkpointing=True)  # repeated passes run with the module's own parameters: these
    own = fsdp.managed(module)
    fsdp.settle(module)
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    others = sorted(trained.keys() - own)
    refuse(
        (not trained or ranks.tensor_group is not None or ranks.independent,
         "Expected a module with parameters that require gradients, and ranks=dpfunc.distributed.sharded(mesh, "
         f"data=...), got {len(trained)} parameters and ranks={ranks}."),
        (others, UnsupportedModel(
            f"The parameters {shorten(others)} are trained, but fully_shard does not manage them. Call it on "
            "all of the module, or freeze them; for trained parameters outside of FSDP use dpfunc.functionalize.")),
    )  # fmt: skip
    forward = _ManagedForward(module, trained)
    params = {name: param.detach().clone() for name, param in trained.items()}
    sharding_ranks = replace(ranks, keeps_parts=True)
    return Managed(forward, params, ManagedEngine(forward, sharding_ranks), sharding_ranks)


@dataclass(frozen=True)
class _ManagedForward:
    """The module as `forward(params, *args)`."""

    module: nn.Module = field(repr=False)
    parts: Mapping[str, Tensor] = field(repr=False)

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's output with these parameters."""
        if is_independent():
            fsdp.refuse_communication(self.module)
        stack, own = until_backward(), vars(self).get("gathered", {})
        if stack is not None and any(own.get(name) is not param for name, param in params.items()):
            raise UnsupportedModel(
                "Parameters that fully_shard manages have no per-sample gradients in this engine. Use the engine and "
                "the ranks that functionalize_managed returned."
            )
        check_params(params, {name: part.shape for name, part in self.parts.items()})
        refuse_unsupported(self.module, checkpointing=True)
        if all(is_dtensor(param) for param in params.values()):
            self.write(params)
        with unwritten(dict(self.module.named_buffers()), refuse_written_buffers), ExitStack() as this_call:
            (this_call if stack is None else stack).enter_context(fsdp.recovered(self.module))
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def write(self, params: Params) -> None:
        """Write parameter shards into the module; layers still gathered from an earlier pass are released."""
        fsdp.settle(self.module)
        for name, own in self.parts.items():
            if local(own).data_ptr() != local(params[name]).data_ptr():  # they may be the module's own
                own.copy_(params[name])

    @cached_property
    def gathered(self) -> dict[str, Tensor]:
        """The tensors that the module computes with, without their values. FSDP makes them once, and keeps them."""
        found: dict[str, Tensor] = {}
        for part in fsdp.fsdp_parts(self.module).values():
            part.unshard()
            found |= {n: p for n, p in self.module.named_parameters() if n in self.parts and p is not self.parts[n]}
            part.reshard()
        if found.keys() != self.parts.keys() or any(is_dtensor(tensor) for tensor in found.values()):
            raise UnsupportedModel("This version of torch does not show the gathered parameters of fully_shard.")
        return {name: found[name] for name in self.parts}


@dataclass(frozen=True)
class ManagedEngine:
    """The engine of two passes over the tensors of a sharded module; see `functionalize_managed`."""

    forward: _ManagedForward = field(repr=False)
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
