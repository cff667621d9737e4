"""A module called with tensors in place of its own, and left as it was: `forward(params, *args)`.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: yes.
"""

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfunc._utils.parts import any_fully_sharded
from dpfunc._utils.processes import initialized, is_independent
from dpfunc._utils.validation import apart, shorten
from dpfunc.engines._guards.loss import (
    refuse_reentrant,
    refuse_written_buffers,
    unfollowed_code_is_an_error,
    until_backward,
    unwritten,
)
from dpfunc.engines._levels import inside
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import fsdp
from dpfunc.functional.names import OF_TORCH
from dpfunc.functional.refused import checkpoint_is_an_error, refusals, refuse_unsupported
from dpfunc.types import Params


def check_params(params: Params, shapes: Mapping[str, torch.Size]) -> None:
    """Check that parameters have exactly the expected names and shapes."""
    if not isinstance(params, Mapping):
        raise InvalidArgument(
            f"Expected params as a mapping from names to tensors, got {type(params).__name__}. "
            "It is the first argument: forward(params, *args)."
        )
    if params.keys() != shapes.keys():
        named = apart(shapes.keys() - params.keys(), params.keys() - shapes.keys())
        raise InvalidArgument(
            f"Expected the parameters that functionalize returned, got params {named}. Those of several modules in one "
            'mapping: forward, params = functionalize({"encoder": encoder, "decoder": decoder}).'
        )
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise InvalidArgument(
                f"Expected params[{name!r}] of shape {tuple(shape)}, got {tuple(params[name].shape)}."
            )


Owners = Mapping[str, tuple[nn.Module, str]]
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_HOLDS = (dict, list, defaultdict, OrderedDict)
_NO_PLACE = (nn.Module, Tensor, type, ModuleType, FunctionType)
_LIBRARIES = ("torch", "deepspeed", "accelerate")  # what they keep for a module is theirs, e.g. of fully_shard
_MOST_HELD = 1000  # entries of a list or dictionary: a longer one is a table of the module
_MOST_PLACES = 100  # of a part: more are a library or a data set that it refers to


@dataclass(frozen=True)
class Forward:
    """The module as `forward(params, *args)`; see `functionalize`.

    Args:
        module: whose code runs; never changed. shapes: parameter name -> shape.
        places: tensor name -> every module attribute that holds it. A tied tensor has several.
        frozen: other parameters that require gradients, detached: no gradient reaches the module's own.
        buffers: copies, so that the module's own are safe.
    """

    module: nn.Module = field(repr=False)
    shapes: Mapping[str, torch.Size]
    places: Mapping[str, tuple[str, ...]] = field(repr=False)
    frozen: Mapping[str, Tensor] = field(repr=False)
    buffers: Mapping[str, Tensor] = field(repr=False)
    _parts: list[nn.Module] = field(default_factory=list, repr=False, compare=False)
    _owners: Owners = field(default_factory=dict, repr=False, compare=False)
    _begins: tuple[float, ...] = field(default=(), repr=False, compare=False)  # a number of each parameter

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's output with these parameters in place of its own."""
        if torch.compiler.is_dynamo_compiling():  # it traces no version counters: what is written is thrown away
            check_params(params, self.shapes)
            state = self._state(params, {name: value.clone() for name, value in self.buffers.items()})
            before = dict(state)
            output = functional_call(self.module, state, args, kwargs, tie_weights=False)
            _refuse_replaced(before, state)
            return output
        with torch._C.DisableTorchFunction():  # an engine does not look at each shape
            check_params(params, self.shapes)
        if is_independent() and initialized():
            fsdp.refuse_communication(self.module)
        stack = until_backward()
        parts = parts_of(self.module)
        kinds: set[Any] = {*map(type, parts)}
        if any_fully_sharded(parts):  # since it was functionalized
            fsdp.refuse_swapped(self.module, (*self.shapes, *self.frozen))
        if any(refusals(kind, stack is not None) for kind in kinds):
            refuse_unsupported(self.module, checkpointing=stack is not None)
        if stack is not None:  # until the backward pass is done, since checkpointing repeats parts of the forward pass
            self._refuse_merged(stack.called.setdefault(id(params[next(iter(self.shapes))]), self))
            with self._writing_is_an_error():
                stack.enter_context(_nothing_kept(parts))
                stack.enter_context(self._swapped(params, parts))
                return self.module(*args, **kwargs)
        with (
            unfollowed_code_is_an_error(), checkpoint_is_an_error(), self._writing_is_an_error(),
            self._swapped(params, parts),
        ):  # fmt: skip
            output = self.module(*args, **kwargs)
        refuse_reentrant((dict(params), args, kwargs), output)
        return output

    def _refuse_merged(self, other: Any) -> None:
        """Refuse parameters that were given to the function of another module, which had other ones, in this call."""
        if other.module is not self.module and other._begins != self._begins:
            raise InvalidArgument(
                f"Expected params of one module in each forward(params), got the same {shorten(list(self.shapes))} "
                f"for two: {type(other.module).__name__} and {type(self.module).__name__}. {{**a, **b}} loses the "
                "parameters of a whose names b has too, so that a would not be trained. Take forward, params = "
                'functionalize({"first": first, "second": second}) and forward(params, "first", x). If both are to '
                "share them, load equal values into both modules before functionalize."
            )

    @contextmanager
    def _swapped(self, params: Params, parts: list[nn.Module]) -> Iterator[None]:
        """Context in which the tensors are in the module, as in `functional_call`, without a search for each place.

        At its end, or after an error, each part has the parameters and buffers that it had, also those that the module
        has moved during the call, as PEFT does.
        """
        at = self._owners if self._parts == parts else owners(self.module, self.places)
        state = self._state(params, self.buffers)
        tables: list[tuple[Any, dict[str, Any]]] = [(p, own) for p in parts for own in (p._parameters, p._buffers)]
        before = [(part.__dict__, table, table.copy()) for part, table in tables]
        try:
            for place, tensor in state.items():
                _registered(*at[place])[at[place][1]] = tensor
            with fsdp.recovered(self.module) if any_fully_sharded(parts) else nullcontext():
                yield
            _refuse_replaced(state, {place: _registered(*at[place]).get(at[place][1]) for place in state})
        finally:
            for attributes, table, tensors in before:
                if table or tensors:  # quick: most parts have none
                    for name in attributes.keys() & tensors.keys():  # moved there
                        del attributes[name]
                    table.clear()
                    table.update(tensors)

    def _state(self, params: Params, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {**buffers, **self.frozen, **params}
        return {place: tensor for name, tensor in tensors.items() for place in self.places[name]}

    @contextmanager
    def _writing_is_an_error(self) -> Iterator[None]:
        try:
            with unwritten(self.buffers, self._refuse_written):
                yield
        except RuntimeError as error:
            if "mutate a captured Tensor" in str(error):  # torch.func stops a write before it happens
                raise UnsupportedModel(
                    "The forward pass writes in place into a tensor that it did not make, "
                    f"probably a buffer: [{shorten(list(self.buffers))}]. Use model.eval(), or replace the layer."
                ) from error
            raise

    def _refuse_written(self, names: Sequence[str]) -> None:
        own = dict(self.module.named_buffers())
        for name in names:
            self.buffers[name].copy_(own[name])
        refuse_written_buffers(names)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """`[*module.modules()]`, without generators in generators, which take milliseconds where there are many parts."""
    found, waiting = dict[nn.Module, None](), [module]
    while waiting:
        part = waiting.pop()
        if part not in found:
            found[part] = None
            waiting += [inner for inner in reversed(part._modules.values()) if inner is not None]
    return list(found)


def owners(module: nn.Module, places: Mapping[str, Sequence[str]]) -> Owners:
    """The part and the attribute of each place."""
    split = {place: place.rpartition(".") for own in places.values() for place in own}
    return {place: (module.get_submodule(owner), name) for place, (owner, _, name) in split.items()}


def _registered(owner: nn.Module, name: str) -> dict[str, Any]:
    """The table of a part, of parameters or of buffers, that has a name."""
    return owner._parameters if name in owner._parameters else owner._buffers


@contextmanager
def _nothing_kept(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context of an engine's pass: at its end, attributes of modules that now hold a tensor get their earlier values.

    What is kept would be the activations of rows, and tensors of a pass that has ended can be neither copied nor saved.
    Until then the loss may read them. Numbers and texts stay: the engines compare them from call to call.
    """
    known = set[int]()  # a configuration is an attribute of each part
    before = [(holder, holder.copy()) for part in parts for holder in _holders(part.__dict__, known)]
    try:
        yield
    finally:
        for holder, held in before:
            now, then = _values(holder), _values(held)
            if len(now) == len(then) and all(map(operator.is_, now, then)):  # quick: nearly no part has changed
                continue
            same = {id(value) for value in then}
            if any(type(value) not in _PLAIN and id(value) not in same for value in now):
                holder.clear()
                (holder.extend if isinstance(holder, list) else holder.update)(held)


def _values(holder: Any) -> Any:
    """What a list or dictionary holds."""
    return holder if isinstance(holder, list) else holder.values()


def _holders(attributes: dict[str, Any], known: set[int]) -> list[Any]:
    """The attributes of a part, and the dictionaries, lists and objects among them, and in these; each once."""
    found: list[Any] = [attributes, attributes["_buffers"]]
    todo = [v for name, v in attributes.items() if name not in OF_TORCH]
    for value in todo:
        place = None if type(value) in _PLAIN else _place(value)
        if place is None or id(place) in known or len(place) > _MOST_HELD or len(found) >= _MOST_PLACES:
            continue
        known.add(id(place))
        found.append(place)
        todo += _values(place)
    return found


def _place(value: Any) -> Any:
    """A list or dictionary, or the attributes of an object, which a pass can put a tensor into; else None."""
    if type(value) in _HOLDS:
        return value
    own = getattr(value, "__dict__", None)
    theirs = isinstance(value, _NO_PLACE) or type(value).__module__.partition(".")[0] in _LIBRARIES
    return None if theirs or not isinstance(own, dict) else own


def _refuse_replaced(before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Refuse a call in which another tensor was put into a place; at a level `buffer.to(device)` is another object."""
    other = {place: tensor for place, tensor in before.items() if after[place] is not tensor}
    if replaced := [place for place, tensor in other.items() if inside(after[place]) is not inside(tensor)]:
        refuse_written_buffers(replaced)
