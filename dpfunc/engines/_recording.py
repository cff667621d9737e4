"""Records the operations of a pass, of its norms and of its sums, as two functions of tensors.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A recording has the constants of the loss, such as frozen weights, as the same tensors, what Python computed as it was,
and draws of dropout as inputs. It is kept only if it can do nothing but return numbers.
"""

import importlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from dpfunc.engines._draws import DropoutMask, OwnDraws
from dpfunc.engines._levels import Stop
from dpfunc.engines._per_sample import PerSample

_ATEN = torch.ops.aten
_VIEW = _ATEN.view.default
# Operations that return their input, and the copy of a batch that is made when it is written into, which is refused.
_SAME = frozenset((_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default, _ATEN._lazy_clone.default))
# Operations whose results share memory with what they are given, other than their schemas say.
_UNDECLARED_VIEWS = frozenset((_ATEN._unsafe_view, _ATEN.unsafe_split, _ATEN.unsafe_split_with_sizes))


class CannotRecord(Stop):
    """These operations cannot be replayed."""


class _NotedDraws(OwnDraws):
    """Draws of a pass that is recorded, which are inputs of the recording."""

    def __init__(self, noted: list[tuple[DropoutMask, Tensor]], positions: Sequence[int], seed: Tensor) -> None:
        super().__init__(positions, seed)
        self._noted = noted

    def of_each(self, draw: Callable[[int], Tensor], device: torch.device) -> Tensor:
        if not isinstance(draw, DropoutMask):
            raise CannotRecord("it draws random numbers, other than for dropout")
        with _tracing().disable_proxy_modes_tracing():
            values_B = super().of_each(draw, device)
        self._noted.append((draw, values_B))
        return values_B


class Norms(NamedTuple):
    """Results of a replayed pass, as those of `PerSample`, and the values that its sums need."""

    losses_B: Tensor
    no_mark: Tensor
    sq_norms: dict[str, Tensor]
    aux: Any
    values: Sequence[Tensor]


@dataclass(frozen=True)
class Recording:
    """The operations of one pass over rows of a shape: those up to the norms, and those of the sums.

    Args:
        to_norms, to_sums: the two parts. names: parameters, in order. draws: random numbers of a row, in order. aux:
            structure of the aux of the loss. dtype: of the factors. operations: number of all of them.
    """

    to_norms: fx.GraphModule
    to_sums: fx.GraphModule
    names: tuple[str, ...]
    draws: tuple[DropoutMask, ...]
    aux: Any
    dtype: torch.dtype
    operations: int

    def norms(self, inputs: Sequence[Tensor], positions: Sequence[int], seed: Tensor) -> Norms:
        """Replay the pass on parameters and rows of the same shapes, which draw as at these positions from a seed."""
        torch.default_generator.set_state(seed)
        own = OwnDraws(positions, seed)
        drawn = (own.of_each(draw, draw.device) for draw in self.draws)  # each where it is used
        with torch.no_grad():
            losses_B, no_mark, *others = self.to_norms.forward(*inputs, drawn)  # a call prints where it fails
        count = len(self.names)
        squares, rest = dict(zip(self.names, others[:count], strict=True)), others[count:]
        size = 0 if self.aux is None else self.aux.num_leaves
        aux = None if self.aux is None else pytree.tree_unflatten(rest[:size], self.aux)
        return Norms(losses_B, no_mark, squares, aux, rest[size:])

    def sums(self, found: Norms, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replay the weighted sums."""
        with torch.no_grad():
            sums = self.to_sums.forward(*found.values, *(factors[name].to(self.dtype) for name in self.names))
        return dict(zip(self.names, sums, strict=True))


def factors_of(sq_norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Made-up factors, others for each parameter and row."""
    return {
        name: torch.linspace(0.5, 1.0, len(values_B), dtype=values_B.dtype, device=values_B.device) / (1 + number)
        for number, (name, values_B) in enumerate(sq_norms.items())
    }


def record(
    compute: Callable[[Sequence[Tensor], Callable[[Sequence[int], Tensor], OwnDraws]], object],
    inputs: Sequence[Tensor], like: PerSample,
) -> Recording:  # fmt: skip
    """Record `compute(inputs, draws)`, which gives gradients as `like`, with their norms and sums.

    Raises:
        CannotRecord: the operations do more than to return numbers of their inputs.
    """
    factors = factors_of(like.unmarked().sq_norms())
    names, dtype = tuple(factors), next(iter(factors.values())).dtype
    aux_spec = None if like.aux is None else pytree.tree_flatten(like.aux)[1]
    noted: list[tuple[DropoutMask, Tensor]] = []

    def whole(*tensors: Tensor) -> list[Tensor]:
        found = compute(tensors[: len(inputs)], partial(_NotedDraws, noted))
        if not isinstance(found, PerSample):
            raise CannotRecord("its rows were not computed in one pass")
        found = found.unmarked()
        # it may be the memory of the batch, into which the caller of an ordinary pass cannot write
        aux = () if aux_spec is None else [leaf.clone() for leaf in pytree.tree_leaves(found.aux)]
        results = [found.losses_B, found.no_mark, *found.sq_norms().values(), *aux]
        return [*results, *found.weighted_sum(dict(zip(names, tensors[len(inputs) :], strict=True))).values()]

    graph = _tracing().make_fx(whole, {_ATEN._local_scalar_dense.default: _refuse_read})(*inputs, *factors.values())
    parts = _parts(graph, len(inputs), len(names), [values_B for _, values_B in noted])
    operations = sum(node.op == "call_function" for part in parts for node in part.graph.nodes)
    return Recording(*parts, names, tuple(draw for draw, _ in noted), aux_spec, dtype, operations)


def _refuse_read(value: Tensor) -> NoReturn:
    """A number that Python, or torch, reads of a tensor would be a constant."""
    raise CannotRecord("Python reads numbers of tensors")


def _tracing() -> Any:
    """torch's tracing, which takes a second to import: only who records pays for it."""
    return importlib.import_module("torch.fx.experimental.proxy_tensor")


def _parts(
    graph: fx.GraphModule, num_inputs: int, num_params: int, drawn: Sequence[Tensor]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The operations before the first that takes a factor, and those from there on, in the order of the recording."""
    *nodes, output = graph.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    body = [node for node in nodes if node.op != "placeholder"]
    inputs, factors = placeholders[:num_inputs], placeholders[num_inputs:]
    start = next((n for n, node in enumerate(body) if not set(factors).isdisjoint(node.all_input_nodes)), len(body))
    results, sums = output.args[0][:-num_params], output.args[0][-num_params:]
    first, second = {*inputs, *body[:start]}, body[start:]
    used = dict.fromkeys(node for late in (*second, *sums) for node in (late, *late.all_input_nodes) if node in first)
    to_norms, to_sums = fx.Graph(), fx.Graph()
    known = {node: to_norms.node_copy(node) for node in inputs}
    source, draws, taken = to_norms.placeholder("draws"), [*map(id, drawn)], list[fx.Node]()
    for node in body[:start]:
        constant = id(getattr(graph, str(node.target))) if node.op == "get_attr" else None
        if constant in draws:  # a draw is a constant of what was recorded; those before it come first, also without use
            last = draws.index(constant)
            taken += [to_norms.call_function(next, (source,)) for _ in draws[len(taken) : last + 1]]
            known[node] = taken[last]
        _copy([node], to_norms, known)
    taken += [to_norms.call_function(next, (source,)) for _ in draws[len(taken) :]]
    to_norms.output([known[node] for node in (*results, *used)])
    known = {node: to_sums.placeholder(f"value_{n}") for n, node in enumerate(used)}
    known |= {node: to_sums.placeholder(f"factor_{n}") for n, node in enumerate(factors)}
    _copy(second, to_sums, known)
    # a sum that no factor changes, as of a parameter that is not used: the caller may write into what it gets
    to_sums.output([to_sums.call_function(_ATEN.clone.default, (known[n],)) if n in first else known[n] for n in sums])
    return _module(graph, to_norms), _module(graph, to_sums)


def _copy(nodes: Iterable[fx.Node], graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> None:
    """Copy operations in their order; a view of a view is one of what that is a view of."""
    for node in nodes:
        source = known[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None and node.target in _SAME:
            known[node] = source
        elif source is not None and node.target is _VIEW and source.target is _VIEW:
            known[node] = graph.call_function(_VIEW, (source.args[0], *node.args[1:]))
        elif node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A function of its inputs, without operations whose results nobody uses."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is next)
    _refuse_effects(graph)
    for node in graph.nodes:
        node.meta.clear()  # descriptions of each result
    return fx.GraphModule(root, graph)


def _refuse_effects(graph: fx.Graph) -> None:
    """Raise where an operation writes into an input or a constant, or is none of torch's."""
    outer = set[fx.Node]()  # inputs and constants, and views of them
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outer.add(node)
        elif node.op == "call_function" and (
            node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in _UNDECLARED_VIEWS
        ):
            if not outer.isdisjoint(node.all_input_nodes):
                outer.add(node)
        elif node.op == "call_function" and node.target is not next:
            if not isinstance(node.target, OpOverload):
                raise CannotRecord(f"it calls {node.target}, which is no operation of torch")
            _refuse_write(node, node.target, outer)


def _refuse_write(node: fx.Node, operation: OpOverload, outer: set[fx.Node]) -> None:
    """Raise if an operation writes into one of these, or note its result as a view of them."""
    arguments = operation._schema.arguments
    given = {**dict(zip([each.name for each in arguments], node.args, strict=False)), **node.kwargs}
    for argument in arguments:
        value = given.get(argument.name)
        own = [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node) and each in outer]
        if own and argument.alias_info is not None:
            if argument.alias_info.is_write:
                raise CannotRecord(f"it writes into its batch, a parameter or a constant ({operation})")
            outer.add(node)


def same_numbers(one: Any, other: Any) -> bool:
    """True if the tensors of two structures are equal; NaN is equal to NaN."""
    left, right = ([leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)] for each in (one, other))
    if [(a.shape, a.dtype) for a in left] != [(b.shape, b.dtype) for b in right]:
        return False
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(left, right, strict=True))
