"""Checks of a loss: one number a sample, that depends on the parameters; its graph; what it writes into, and keeps.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Tensors of rows of an earlier call may be kept, and must not be used; under levels torch marks them (`is_dead`).
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.processes import in_lockstep
from dpfunc._utils.validation import shorten
from dpfunc.batches import tree_leaves
from dpfunc.engines._levels import is_dead, is_row, is_row_of_earlier
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.types import Params


def check_depends(depends: bool, *, reads: bool) -> None:
    """Check that a loss depends on a parameter, or that Python has read numbers: LayerDrop leaves all of them out."""
    if not depends and (not reads or in_lockstep()):  # where the others wait for the backward pass
        raise InvalidArgument(
            "Expected loss_fn to depend on params, got a loss that gives none of them a gradient. Use the params that "
            "are passed in (forward(params, ...) of dpfunc.functionalize, not the module), and no torch.no_grad() or "
            "detach()."
        )


def check_losses(losses: object) -> Tensor:
    """The losses of one row, (1,), of floating dtype."""
    hint = 'Return one loss for each sample: use reduction="none" and take the mean over the other axes of each row.'
    if not isinstance(losses, Tensor):
        raise InvalidArgument(f"Expected loss_fn to return a tensor, got {type(losses).__name__}. {hint}")
    if losses.shape != (1,):
        raise InvalidArgument(
            f"Expected loss_fn to return shape (1,), got {tuple(losses.shape)}: a step calls it with each row as a "
            f"batch of one. {hint}"
        )
    if is_dtensor(losses):
        raise InvalidArgument(
            "Expected loss_fn to return a plain tensor, got a DTensor. Make the output of the last layer plain "
            "(use_local_output=True, output_layouts=Replicate()), or return losses.full_tensor()."
        )
    if not losses.is_floating_point():
        raise InvalidArgument(f"Expected loss_fn to return a floating dtype, got {losses.dtype}. {hint}")
    return losses


def split_aux(returned: object) -> tuple[Any, Any]:
    """Split what a loss returned into losses and aux, which is None where it returned nothing else."""
    return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)


def check_aux(aux: Any) -> None:
    """Check that each leaf of the aux of one row is a tensor with one row on axis 0; the error names it."""
    for path, leaf in pytree.tree_leaves_with_path(aux) if aux is not None else ():
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (1,) or is_dtensor(leaf):
            got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InvalidArgument(
                "Expected the aux of loss_fn, (losses, aux), to have plain tensors with 1 row on axis 0, as "
                f"the batch that it is given, got {got} for "
                f"aux{pytree.keystr(path)}. Compute it for each sample, and leave out what is the same for all."
            )


def joined_aux(parts: Sequence[Any], order: Tensor | None = None) -> Any:
    """The aux of several parts of a batch, one after the other; then in this order, if one is given."""
    if all(part is None for part in parts):
        return None
    try:
        joined = pytree.tree_map(lambda *own: torch.cat(own), *parts)
    except (ValueError, TypeError, RuntimeError) as error:
        refuse_out_of_memory(error)
        raise InvalidArgument(
            "Expected the aux of loss_fn, (losses, aux), to have the same names, shapes and dtypes for all samples, "
            "got others for some of them. Fill up to one length."
        ) from error
    return joined if order is None else pytree.tree_map(lambda leaf: leaf[order.to(leaf.device)], joined)


def refuse_reentrant(inputs: object, output: object) -> None:
    """Refuse reentrant checkpoints, which detach parameters, in a graph; torch itself refuses them under torch.func."""
    visited = {leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)} | {None}
    todo = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedModel(
                "The forward pass uses reentrant gradient checkpointing, which loses gradients of parameters. Use "
                "use_reentrant=False, or model.gradient_checkpointing_disable()."
            )
        visited.add(node)
        for before, _ in node.next_functions:  # a generator would double the time
            todo.append(before)


@contextmanager
def unwritten(tensors: Mapping[str, Tensor], refuse: Callable[[Sequence[str]], None]) -> Iterator[None]:
    """Context in which tensors must not be written in place: `refuse` gets the names of those that were."""
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    written = [name for name, version in before.items() if tensors[name]._version != version]
    if written:
        refuse(written)


def parameters_unchanged(params: Params) -> AbstractContextManager[None]:
    """Context in which writes into parameters are refused: engines and callers share their memory."""
    return unwritten(params, _refuse_written)


def _refuse_written(names: Sequence[str]) -> None:
    raise UnsupportedModel(
        f"The loss writes into the parameters {shorten(names)}. Use out-of-place operations. If it has kept parameters "
        "of its own and written into those, they are overwritten: start again from the last checkpoint."
    )


def refuse_written_buffers(names: Sequence[str]) -> None:
    """Refuse a forward pass that writes into buffers."""
    raise UnsupportedModel(
        f"The forward pass writes into the buffers {shorten(names)}: samples would influence each other. Use "
        "model.eval(), or replace the layer."
    )


def uncompiled() -> AbstractContextManager[None]:
    """Context in which code from `torch.compile` runs uncompiled, so that a step sees each operation."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing was compiled, and torch's compiler stays unloaded
        return nullcontext()
    eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return eager


# Parts of torch's messages about code that a step cannot follow -> advice.
_NOT_FOLLOWED = {
    ("TorchScript", "Jitted modules"): (
        "A part of the loss was compiled by torch.jit, and failed inside of a step. Call the function or module from "
        "which it was made, before torch.jit.script or torch.jit.trace."
    ),
    ("Cannot access storage of TensorWrapper", "Cannot access data pointer"): (
        "The loss asks for the memory of a tensor (untyped_storage, data_ptr, numpy), which vmap does not have. Use "
        'operations of torch, or engine="loop".'
    ),
    ("torch.distributed.nn.functional",): (
        "The loss communicates between ranks (torch.distributed.nn.functional): the loss of a record would depend on "
        "records of other ranks, which breaks the privacy proof. Compute the loss of each record from its own row; "
        "what is summed over ranks is summed after clipping (ranks=... of dpfunc.make_dp_step)."
    ),
    ("Batching rule not implemented",): (
        'The loss runs an operation that vmap cannot compute. Use engine="auto", or "loop".'
    ),
    ("Batch norm got a batched tensor", "Expected more than 1 value per channel"): (
        "BatchNorm in training mode normalises with statistics of the batch, and writes them into its buffers. Use "
        "dpfunc.functional.replace_batchnorm(model); or, in a loop of your own, model.eval() if its statistics come "
        "from public data."
    ),
}


@contextmanager
def unfollowed_code_is_an_error() -> Iterator[None]:
    """Context in which errors of torch about code that a step cannot follow say what to do."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        for symptoms, advice in _NOT_FOLLOWED.items():
            if any(symptom in str(error) for symptom in symptoms):
                raise UnsupportedModel(advice) from error
        raise


# Gradient checkpointing runs parts of the forward pass again inside of the backward pass, with whatever a module holds
# then: tensors that were swapped into it stay until the backward pass is done.
class OpenPass(ExitStack):
    """Contexts that end with a pass, and the first module function that was called with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.called = dict[int, Any]()


_open: ContextVar[OpenPass | None] = ContextVar("dpfunc_until_backward", default=None)


@contextmanager
def backward_inside() -> Iterator[None]:
    """Context that leaves, at its end, all contexts entered into the stack of `until_backward()`."""
    with OpenPass() as stack:
        token = _open.set(stack)
        try:
            yield
        finally:
            _open.reset(token)


def until_backward() -> OpenPass | None:
    """Contexts that the engine that is running leaves after its backward pass; None outside of engines."""
    return _open.get()


# Losses that have kept something; no result depends on it.
kept_by_loss: MutableMapping[object, str] = WeakIdKeyDictionary()


def refuse_kept(loss_fn: object) -> None:
    """Refuse a loss that keeps something from call to call."""
    if kept_by_loss and loss_fn in kept_by_loss:
        raise UnsupportedModel(
            f"The loss {kept_by_loss[loss_fn]}. Samples of this step or of later ones would influence each other. Keep "
            "nothing from call to call: model.eval() for BatchNorm and spectral norm, torch's default generator for "
            "random numbers, tensors in place of Python numbers; or count in the training loop, and give the count as "
            "a column of the batch."
        )


# Memory of rows of calls that have ended, which is still in use. Weak references; no result depends on them.
memory_of_earlier: dict[int, StorageWeakRef] = {}


def forget_gone() -> None:
    """Drop records of memory that no object uses any more."""
    for key in [key for key, reference in memory_of_earlier.items() if reference.expired()]:
        del memory_of_earlier[key]


def refuse_earlier(
    args: Sequence[Any], kwargs: Mapping[str, Any], own: Callable[[Tensor], bool] | None = None
) -> type[Tensor] | None:
    """Refuse to compute with a tensor of a row of an earlier call; `own` knows the tensors of a row alone.

    Returns a class among the tensors that computes its operations itself.
    """
    found = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, (list, tuple)):
            found = refuse_earlier(value, {}, own) or found
        elif isinstance(value, Tensor):
            if (is_dead(value) and _is_kept(value, own)) or (memory_of_earlier and is_earlier(value)):
                raise UnsupportedModel(
                    "The loss uses a tensor that it has kept from an earlier call: numbers of other rows would reach "
                    "this one. Compute each loss from nothing but its own row and the parameters."
                )
            if type(value) is not Tensor and computes_itself(type(value)):
                found = type(value)
    return found


def _is_kept(value: Tensor, own: Callable[[Tensor], bool] | None) -> bool:
    """True for a row of a level that is closed, unless it is a level of the present call."""
    return is_row_of_earlier(value) if own is None else is_row(value) and not own(value)


def is_earlier(tensor: Tensor) -> bool:
    """True for a plain tensor that was computed from a row of an earlier call."""
    reference = memory_of_earlier.get(memory_of(tensor))
    return reference is not None and not reference.expired()


def plain_memory(tensor: Tensor) -> Tensor | None:
    """The tensor with the memory; None where there is no single one."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    own_dispatch = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    own_dispatch |= functorch.is_legacy_batchedtensor(tensor)  # of `autograd.grad(is_grads_batched=True)`
    return None if own_dispatch or tensor.layout is not torch.strided else tensor


def memory_of(tensor: Tensor) -> int:
    """Identity of the memory of a tensor; 0 where there is no single one."""
    plain = plain_memory(tensor)
    return 0 if plain is None else plain.untyped_storage()._cdata


open_modes = torch._C._len_torch_dispatch_stack
"""Number of modes below all levels (`TorchDispatchMode`) that are active."""


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "dpfunc")


def refuse_modes() -> None:
    """Refuse a step inside of a foreign mode. Modes of torch (`FlopCounterMode`) are allowed."""
    for mode in (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()):
        if _is_foreign(type(mode)):
            raise UnsupportedModel(
                f"The step runs inside of the mode {type(mode).__qualname__}, which is given all rows of a batch at "
                "once and may mix them, or change what is clipped. Leave it before the step. Nothing was spent."
            )


def entered_modes(before: int) -> str:
    """Names of the modes entered after the first `before`, but for selective checkpointing, which keeps rows apart."""
    entered = map(type, _get_current_dispatch_mode_stack()[before:])
    return ", ".join(mode.__qualname__ for mode in entered if mode.__module__ != "torch.utils.checkpoint")


@functools.cache
def computes_itself(kind: type[Tensor]) -> bool:
    """True for a class of tensors, not of torch, that computes its operations itself (`__torch_dispatch__`)."""
    return _is_foreign(kind) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
