"""Large operations without parameters that run as native kernels below both levels: for speed only.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

One node of level 2 joins them to the pass. Axis letters: B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from dpfunc.engines._levels import Handler, Node, Pass, apply_node, gradients, inside, is_row, outside_levels


class _Start(Node):
    """The start of a native graph. It holds no values: leaves would keep the input of each layer in memory."""

    @staticmethod
    def forward(anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """The backward pass needs no value."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(None for _ in grads)


ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
Results = tuple[Tensor, ...]


@dataclass
class Kernel:
    """Native operations and their graph, below both levels."""

    owner: Pass
    call: Callable[..., Results]
    wanted: Sequence[bool]
    starts: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    again: bool = False

    def build(self, values: Sequence[Tensor], again: bool) -> Results:
        """The results with their graph, which is held by its edges, not by its values; `again` in the backward pass."""
        self.again = again
        given = [value.detach() for value in values]
        places = [place for place, wanted in enumerate(self.wanted) if wanted]
        for place, value in zip(places, apply_node(_Start, ANCHOR, *(given[place] for place in places)), strict=True):
            given[place] = value
        found = self.call(*given)
        self.starts = [get_gradient_edge(value) if value.requires_grad else None for value in given]
        self.ends = [get_gradient_edge(value) if value.requires_grad else None for value in found]
        return tuple(value.detach() for value in found)

    def back(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; those that go to rules are credited on the way. The graph is released."""
        starts = [edge for edge in self.starts if edge is not None]
        both = zip(self.ends, grads, strict=True)
        pairs = [(end, grad) for end, grad in both if end is not None and grad is not None]
        ends, given = zip(*pairs, strict=True)
        found = iter(gradients(ends, given, (*starts, ANCHOR)))
        wanted = [None if edge is None else next(found) for edge in self.starts]
        self.starts = self.ends = ()
        del self.call  # circles would keep memory until they are collected
        return wanted


class Native(Node):
    """The node around a native graph."""

    @staticmethod
    def forward(kernel: Kernel, anchor: Tensor, *inputs: Tensor) -> Any:
        # checkpointing, offloading: save inputs where their hooks hold, and build the native graph in the backward pass
        again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        values = [kernel.owner.levels.all_rows(value) for value in inputs]
        with outside_levels(), torch.set_grad_enabled(not again):
            found = kernel.build(values, again)
        made = tuple(kernel.owner.levels.row(value) for value in found)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        made = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(value for value in made if not (value.is_floating_point() or value.is_complex())))
        ctx.kernel, _, *given = inputs
        if ctx.kernel.again:
            ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kernel: Kernel = ctx.kernel
        kernel.owner.backward_node()
        values = [kernel.owner.levels.all_rows(value) for value in ctx.saved_tensors]
        grads_B = [None if grad is None else kernel.owner.levels.all_rows(grad) for grad in grads]
        with outside_levels():
            if kernel.again:
                with torch.enable_grad():
                    kernel.build(values, True)
            with torch._C.DisableTorchFunction():
                found = kernel.back(grads_B)
        return None, None, *[None if value is None else kernel.owner.levels.row(value) for value in found]


def as_one_node(
    owner: Pass, call: Callable[..., Results], inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The results of a function of all rows, as those of a row; one node where gradients of inputs are wanted."""
    if any(wanted):
        made = apply_node(Native, Kernel(owner, call, wanted), owner.anchor, *inputs)
        return made if isinstance(made, tuple) else (made,)
    values = [owner.levels.all_rows(value) for value in inputs]
    with outside_levels(), torch.no_grad():
        found = call(*values)
    return tuple(map(owner.levels.row, found))


# A smaller norm takes less time under vmap than the node around its native kernel.
_LARGE = 1 << 16
_OF_RMS_NORM = ("input", "normalized_shape", "weight", "eps")


def rms_norm(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A norm without a weight by torch's own kernel, which vmap takes apart; NotImplemented where vmap is to do it."""
    bound = {"weight": None, "eps": None, **dict(zip(_OF_RMS_NORM, args, strict=False)), **kwargs}
    given, shape, weight, eps = (bound[name] for name in _OF_RMS_NORM)
    large = is_row(given) and owner.levels.rows * given.numel() >= _LARGE
    if not large or not owner.is_open() or not given.requires_grad or weight is not None:
        return NotImplemented
    return as_one_node(owner, lambda x_B: (func(x_B, shape, None, eps),), [given], [True])[0]


_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _merged(value: Tensor, images: torch.Size, rows: int) -> Tensor:
    """(B, ..., heads, positions, features) with these axes of images -> (B * images, heads, positions, features)."""
    given, own = value.shape[1:-3], (1, *value.shape[1:])[-3:]
    count = rows if images.numel() > 1 else len(value)
    if len(value) * given.numel() != count * images.numel():
        value = value.reshape(len(value), *[1] * (len(images) - len(given)), *given, *own).expand(count, *images, *own)
    return value.reshape(count * images.numel(), *own)


def attention(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Attention of all rows at once: rows are one more axis of its batch, and torch chooses the kernel.

    vmap would call the kernels of a CPU row by row. NotImplemented inside of a transform of the loss, and without rows.
    """
    bound = {**dict(zip(_OF_ATTENTION, args, strict=False)), **kwargs}
    names = [name for name in _OF_ATTENTION[:4] if isinstance(bound.get(name), Tensor)]
    axes = [bound[name].ndim for name in names]
    if not owner.at_levels() or not any(is_row(bound[name]) for name in names) or min(axes) < 2:
        return NotImplemented
    own, alike = max(axes), {}  # a mask that is the same for all rows is not repeated
    if "attn_mask" in names and not is_row(bound["attn_mask"]) and not bound["attn_mask"].requires_grad:
        alike["attn_mask"] = inside(bound["attn_mask"]).unsqueeze(0)
        names.remove("attn_mask")

    def call(*given: Tensor) -> Results:
        whole = {**dict(zip(names, given, strict=True)), **alike}
        shapes = {value.shape[1:-3] for value in whole.values()}
        images = torch.broadcast_shapes(*shapes) if len(shapes) > 1 else shapes.pop()
        merged = {name: _merged(value, images, owner.levels.rows) for name, value in whole.items()}
        found: Tensor = func(**{**bound, **merged})
        return (found.reshape(owner.levels.rows, *images, *found.shape[-min(own, 3) :]),)

    inputs = [bound[name] for name in names]
    return as_one_node(owner, call, inputs, [value.requires_grad and torch.is_grad_enabled() for value in inputs])[0]


WITHOUT_PARAMETERS: Mapping[Any, Handler] = {
    F.rms_norm: rms_norm,
    F.scaled_dot_product_attention: attention,
}
