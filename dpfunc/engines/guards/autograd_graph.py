"""Checks of the graph of a loss, and of the parameters after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from dpfunc._utils.validation import shorten
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Params


def refuse_reentrant(inputs: object, output: object) -> None:
    """Refuse reentrant checkpoints in the graph between inputs and output: they detach the parameters.

    Only for plain autograd; torch itself refuses them under torch.func. About a microsecond for each node of the graph.

    Raises:
        UnsupportedModel: a part of the module is checkpointed.
    """
    for node in nodes_behind(output, inputs):
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedModel(
                "The forward pass uses reentrant gradient checkpointing, which loses gradients of parameters. Use "
                "use_reentrant=False, or model.gradient_checkpointing_disable()."
            )


def nodes_behind(outputs: object, inputs: object = ()) -> Iterator[Node]:
    """Nodes of the graph between inputs and outputs, each once. About a microsecond a node.

    Args:
        outputs, inputs: containers of tensors.
    """
    visited = {leaf.grad_fn for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)} | {None}
    todo = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        for earlier, _ in node.next_functions:  # a generator would double the time
            todo.append(earlier)


@contextmanager
def parameters_unchanged(params: Params) -> Iterator[None]:
    """Inside, refuse writes into parameters: engines and callers share their memory.

    Raises:
        UnsupportedModel: the loss wrote into a parameter.
    """
    before = {name: param._version for name, param in params.items()}
    yield
    written = [name for name, param in params.items() if param._version != before[name]]
    if written:
        raise UnsupportedModel(
            f"The loss writes into the parameters {shorten(written)}: they are overwritten now. Use out-of-place "
            "operations, and start again from the last checkpoint."
        )
