"""Modules as pure functions `forward(params, *args)`, and errors for modules that cannot be one.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Trusted: yes.
"""

import copy
import functools
import operator
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pickle import PickleError
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from dpfunc._utils.processes import any_fully_sharded, initialized, is_independent, local
from dpfunc._utils.validation import apart, shorten, warn
from dpfunc.engines._guards.loss import (
    refuse_reentrant,
    refuse_written_buffers,
    unfollowed_code_is_an_error,
    until_backward,
    unwritten,
)
from dpfunc.engines._levels import at_a_level, inside
from dpfunc.engines._row_pass import ORDINARY
from dpfunc.errors import InvalidArgument, RunWarning, UnsupportedModel
from dpfunc.functional import _fsdp as fsdp
from dpfunc.functional._names import select, storage_places
from dpfunc.types import Params

_CHECKPOINTED = (
    "its second forward pass would run with the module's own parameters and give wrong gradients. Call "
    "model.gradient_checkpointing_disable(); to save memory use microbatch_size, or checkpoint a function that calls "
    "forward(params, ...) as a whole."
)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel, which averages gradients, and torch.compile, which hides code."""
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"Expected a torch module, got {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return unwrapped(module.module)
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if compiled is not None and isinstance(module, compiled):
        return unwrapped(module.get_submodule("_orig_mod"))
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inside = [(name or "the module", part) for name, part in module.named_modules() if isinstance(part, wrappers)]
    if where := shorten([f"{name} ({type(part).__name__})" for name, part in inside]):
        raise UnsupportedModel(
            f"The module is wrapped for several devices in {where}: parameters are copied in each forward "
            "pass, or gradients averaged before they are clipped. Take its .module, and use one process a device."
        )
    return module


class Several(nn.ModuleDict):
    """Modules as one: `forward(name, *args)` calls one of them. Names of parameters begin with its name and a dot."""

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The output of the module of this name."""
        if not isinstance(name, str) or name not in self:
            raise InvalidArgument(f"Expected a name of {list(self)} first: forward(params, name, *args), got {name!r}.")
        return self[name](*args, **kwargs)


def _joined(module: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """The module, or several modules joined under their names."""
    several = isinstance(module, Mapping) and all(isinstance(part, nn.Module) for part in module.values())
    if not several and type(module) is not nn.ModuleDict:  # a class made of it has a forward of its own
        return unwrapped(module)  # type: ignore[arg-type]  # or refused there
    parts = {name: unwrapped(part) for name, part in module.items()}  # type: ignore[operator]  # several
    try:
        return Several(parts)
    except (KeyError, TypeError) as error:
        raise InvalidArgument(
            f"Expected names of modules, texts without a dot that nn.Module does not use, got {list(parts)}: {error}."
        ) from error


def refuse_unsupported(
    module: nn.Module, parts: Sequence[nn.Module] | None = None, *, checkpointing: bool = False
) -> None:
    """Refuse modules that cannot work (`_REFUSED`); with `checkpointing`, gradient checkpointing is allowed."""
    for part in _all_parts(module) if parts is None else parts:
        kind: Any = type(part)
        for is_refused, message in _of_kind(kind):
            if is_refused(part) and not (checkpointing and is_refused is _checkpoints):
                names = [name or type(own).__name__ for name, own in module.named_modules() if is_refused(own)]
                raise UnsupportedModel(message.format(names=shorten(names), count=len(names)))


def _all_parts(module: nn.Module) -> list[nn.Module]:
    """A module and all in it, each once, in any order: each step asks, and `modules()` takes ten times as long."""
    parts, known = [module], {id(module)}
    for part in parts:
        for inner in part._modules.values():
            if inner is not None and id(inner) not in known:
                known.add(id(inner))
                parts.append(inner)
    return parts


def _checkpoints(part: Any) -> bool:
    own = part.__dict__.get("gradient_checkpointing")  # quick: nearly no part has it
    named = own is not None or hasattr(type(part), "gradient_checkpointing")
    return named and part.training and part.gradient_checkpointing is True


# Kinds of modules that cannot work: by their class; then what each part is asked, and the message.
_REFUSED: tuple[tuple[Callable[[type], bool], Callable[[Any], bool], str], ...] = (
    (
        lambda kind: issubclass(kind, _BatchNorm),
        lambda part: isinstance(part, _BatchNorm) and (part.training or part.running_mean is None),
        "{count} BatchNorm layers in training mode mix the samples of a batch, or keep statistics of a record's own "
        "rows from step to step: {names}. Use dpfunc.functional.replace_batchnorm(model), or model.eval() if their "
        "statistics come from public data; F.batch_norm without running statistics may normalise the rows of one "
        "record.",
    ),
    (
        lambda kind: kind.__name__ == "Linear8bitLt",
        lambda part: type(part).__name__ == "Linear8bitLt",  # their rounding depends on other rows
        "The LLM.int8 layers {names} choose outlier columns over the whole batch, so samples influence each other. "
        "Load the model with 4 bits (NF4) or in bfloat16.",
    ),
    (lambda kind: True, _checkpoints, f"Gradient checkpointing is on in {{names}}: {_CHECKPOINTED}"),
    (
        lambda kind: issubclass(kind, (nn.Embedding, nn.EmbeddingBag)),
        lambda part: isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None,
        "The embeddings {names} have max_norm, which overwrites their weights in each forward pass. "
        "Build them with max_norm=None.",
    ),
    (
        lambda kind: issubclass(kind, torch.jit.ScriptModule),
        lambda part: isinstance(part, torch.jit.ScriptModule),
        "The parts {names} are compiled by torch.jit, whose parameters cannot be replaced. "
        "Functionalize the module from which they were made, before torch.jit.script or torch.jit.trace.",
    ),
)


@functools.lru_cache(4096)
def _of_kind(kind: type) -> tuple[tuple[Callable[[Any], bool], str], ...]:
    return tuple((is_refused, message) for concerns, is_refused, message in _REFUSED if concerns(kind))


@contextmanager
def _checkpoint_is_an_error() -> Iterator[None]:
    """Context in which `torch.utils.checkpoint` of a part of the module is an error, not a wrong gradient.

    It saves tensors through hooks, which torch lets us forbid. Hooks that are there already belong to code around
    us, who may checkpoint all of `forward(params, ...)`: that is right, and is let pass. The reentrant kind uses no
    hooks: see `refuse_reentrant`.
    """
    message = f"The forward pass uses gradient checkpointing or other saved tensor hooks: {_CHECKPOINTED}"
    with ExitStack() as stack:
        try:
            stack.enter_context(disable_saved_tensors_hooks(message))
        except RuntimeError as error:
            if message not in str(error):
                raise
        try:
            yield
        except RuntimeError as error:
            if message in str(error):
                raise UnsupportedModel(message) from error
            raise


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


_Owners = Mapping[str, tuple[nn.Module, str]]
_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOLDS = (dict, list, defaultdict, OrderedDict)
_OF_TORCH = nn.Module().__dict__.keys()
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
    _owners: _Owners = field(default_factory=dict, repr=False, compare=False)
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
        stack, parts = until_backward(), _all_parts(self.module)
        if any_fully_sharded(parts):  # since it was functionalized
            fsdp.refuse_swapped(self.module, (*self.shapes, *self.frozen))
        refuse_unsupported(self.module, parts, checkpointing=stack is not None)
        if stack is not None:  # until the backward pass is done, since checkpointing repeats parts of the forward pass
            self._refuse_merged(stack.called.setdefault(id(params[next(iter(self.shapes))]), self))
            with self._writing_is_an_error():
                stack.enter_context(_nothing_kept(parts))
                stack.enter_context(self._swapped(params, parts))
                with _put_back(parts):
                    return self.module(*args, **kwargs)
        with (
            unfollowed_code_is_an_error(), _checkpoint_is_an_error(), self._writing_is_an_error(),
            self._swapped(params, parts), _put_back(parts),
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
        """Context in which the tensors are in the module, as in `functional_call`, without a search for each place."""
        owners = self._owners if self._parts == parts else _owners(self.module, self.places)
        state, swapped = self._state(params, self.buffers), list[tuple[dict[str, Any], str, Any]]()
        found: dict[str, Any] = {}
        try:
            for place, tensor in state.items():
                owner, name = owners[place]
                held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
                swapped.append((held, name, held.get(name, _ABSENT)))
                held[name] = tensor
            with fsdp.recovered(self.module) if any_fully_sharded(parts) else nullcontext():
                yield
        finally:
            for place, (held, name, before) in zip(state, swapped, strict=False):
                found[place] = held.pop(name, None) if before is _ABSENT else held.get(name)
                if before is not _ABSENT:
                    held[name] = before
        _refuse_replaced(state, found)

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


def _owners(module: nn.Module, places: Mapping[str, Sequence[str]]) -> _Owners:
    """The part and the attribute of each place."""
    split = {place: place.rpartition(".") for own in places.values() for place in own}
    return {place: (module.get_submodule(owner), name) for place, (owner, _, name) in split.items()}


@contextmanager
def _put_back(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which an error puts back tensors that a module has moved during a call, as PEFT does."""
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
        (part, part._parameters.copy(), part._buffers.copy()) for part in parts
    ]
    try:
        yield
        before.clear()
    finally:
        for part, parameters, buffers in before:
            for name in part.__dict__.keys() & (parameters.keys() | buffers.keys()):  # registered names are not there
                del part.__dict__[name]
            for place, held in ((part._parameters, parameters), (part._buffers, buffers)):
                place.clear()
                place.update(held)


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
            listed = isinstance(holder, list)
            now, then = (each if listed else each.values() for each in (holder, held))
            if len(now) == len(then) and all(map(operator.is_, now, then)):  # quick: nearly no part has changed
                continue
            same = {id(value) for value in then}
            if any(type(value) not in _PLAIN and id(value) not in same for value in now):
                holder.clear()
                (holder.extend if listed else holder.update)(held)


def _holders(attributes: dict[str, Any], known: set[int]) -> list[Any]:
    """The attributes of a part, and the dictionaries, lists and objects among them, and in these; each once."""
    found: list[Any] = [attributes, attributes["_buffers"]]
    todo = [_place(v) for name, v in attributes.items() if name not in _OF_TORCH and type(v) not in _PLAIN]
    for place in todo:
        small = place is not None and len(place) <= _MOST_HELD and len(found) < _MOST_PLACES
        if small and id(place) not in known:
            known.add(id(place))
            found.append(place)
            todo += map(_place, place.values() if isinstance(place, dict) else place)
    return found


def _place(value: Any) -> Any:
    """A list or dictionary, or the attributes of an object, which a pass can put a tensor into; else None."""
    own = value if type(value) in _HOLDS else getattr(value, "__dict__", None)
    theirs = isinstance(value, _NO_PLACE) or type(value).__module__.partition(".")[0] in _LIBRARIES
    return None if theirs or not isinstance(own, dict | list) else own


def _refuse_replaced(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse a call in which another tensor was put into a place; at a level `buffer.to(device)` is another object."""
    other = {place: tensor for place, tensor in before.items() if after[place] is not tensor}
    if replaced := [place for place, tensor in other.items() if inside(after[place]) is not inside(tensor)]:
        refuse_written_buffers(replaced)


class Functional(NamedTuple):
    """A module as a function, and the parameters to call it with."""

    forward: Forward
    params: dict[str, Tensor]


def functionalize(
    module: nn.Module | Mapping[str, nn.Module], trainable: str | Sequence[str] | None = None
) -> Functional:
    """A module as `(forward, params)`: `forward(params, *args)` is what `module(*args)` is with those parameters.

    Args:
        module: any module. It is not changed, now or later; it must not be changed while `forward` is used, but for
            `module.train()` and `module.eval()`, which `forward` follows. DistributedDataParallel and the wrapper of
            `torch.compile` are taken off: names have no prefix, nothing is communicated, and nothing is compiled.
            Parameters that `fully_shard` manages are constants. Several modules are a mapping {"enc": enc, "dec": dec}:
            parameters are then named "enc.weight", and `forward(params, "enc", x)` calls one. (`{**a, **b}` of two
            mappings of parameters loses those of a whose names b has too: it is refused inside of a step.)
        trainable: which parameters are arguments: a regular expression that is searched in their names
            (`dpfunc.functional` has `BIASES`, `HEADS`, `ATTENTION` and `PROJECTOR`), or a list of names. None takes
            those that require gradients. All others are constants.

    Returns:
        `forward`, and `params`: name -> detached contiguous copy that shares no memory with the module. Parameters that
        are tied count once, under their first name, and are replaced everywhere.

    Raises:
        InvalidArgument: no parameter selected, unknown names, or parameters that are not floating; from `forward` also
            params with other names or shapes, or of two modules in one call of a loss.
        UnsupportedModel: BatchNorm in training mode, gradient checkpointing, a forward that writes buffers, or trained
            parameters that `fully_shard` or ZeRO-3 manage. Where torch.compile traces `forward`, checkpointing and
            writes are not seen: writes into buffers are thrown away.

    Guarantees:
        the module is bit-identical afterwards, tied and shared layers included
        (tests/functional/test_forward.py::test_module_is_never_changed).

    >>> model = nn.Linear(3, 2)
    >>> forward, params = functionalize(model)
    >>> x = torch.ones(1, 3)
    >>> torch.equal(forward(params, x), model(x))
    True
    """
    module = _joined(module)
    problem = "" if fsdp.fsdp_parts(module) else uncopied(module)  # a sharded one gives its parameters to another
    if problem:
        warn(f"dpfunc.with_params(module, params) will fail after the run. {problem}", RunWarning)
    return function_of(module, trainable)


def function_of(module: nn.Module, trainable: str | Sequence[str] | None = None) -> Functional:
    """As `functionalize`, for a module without wrappers that is not copied at the end."""
    refuse_unsupported(module)
    chosen = select(module, trainable)
    fsdp.refuse_managed(module, chosen)
    stay = fsdp.constant(module) | chosen.keys()
    others = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in stay}
    buffers = dict(module.named_buffers())
    places = storage_places(module)
    params = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in chosen.items()}
    own = {name: places[id(tensor)] for name, tensor in {**buffers, **others, **chosen}.items()}
    return Functional(Forward(
        module,
        {name: param.shape for name, param in params.items()},
        own,
        {name: param.detach() for name, param in others.items()},
        {name: buffer.detach().clone() for name, buffer in buffers.items()},
        _all_parts(module),
        _owners(module, own),
        tuple(0.0 if p.is_meta or not local(p).numel() else float(local(p).flatten()[0]) for p in params.values()),
    ), params)  # fmt: skip


def _tensors(module: nn.Module) -> dict[int, Tensor]:
    """Tensors in a module, its lists and dictionaries, by their ids; but for those of a pass that has ended."""
    held = [value for part in module.modules() for value in pytree.tree_leaves(part.__dict__)]
    return {id(value): value for value in held if isinstance(value, Tensor) and not at_a_level(value)}


def _problem(value: object, tensors: Mapping[int, Tensor]) -> str:
    """The error of a deep copy, in which these tensors stay themselves; empty without one."""
    try:
        copy.deepcopy(value, dict(tensors))
    except (*ORDINARY, copy.Error, PickleError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uncopied(module: nn.Module) -> str:
    """Why a module cannot be copied, and by which attributes; empty if it can. The memory of tensors is not copied.

    Guarantees:
        tests/functional/test_forward.py::test_a_module_that_cannot_be_copied_is_named_before_the_run.
    """
    tensors = _tensors(module)
    problem = _problem(module, tensors)
    named = module.named_modules(prefix=type(module).__name__) if problem else ()
    held = ((f"{at}.{name}", value) for at, part in named for name, value in part.__dict__.items())
    names = [at for at, value in held if at.rpartition(".")[2] not in _OF_TORCH and _problem(value, tensors)]
    return problem and (
        f"Expected a module that can be copied, got {shorten(names) or type(module).__name__}: {problem}. Take it out "
        "of the module, or load_state_dict(params, strict=False) into another module of the class."
    )


def copied(module: nn.Module, memo: Mapping[int, Any] | None = None) -> Any:
    """A deep copy of a module; `copy.deepcopy` gets the memo, whose objects replace originals."""
    if problem := uncopied(module):
        raise UnsupportedModel(problem)
    # computed from parameters, as nn.utils.weight_norm and prune do, and computed again in each forward pass
    values = {place: value.detach().clone() for place, value in _tensors(module).items() if value.grad_fn is not None}
    return copy.deepcopy(module, {**values, **(memo or {})})


def with_params(module: nn.Module | Mapping[str, nn.Module], params: Params) -> nn.Module:
    """A deep copy of a module with these parameters in place, e.g. to save a trained model in its own format.

    Args:
        module: the module that was functionalized, or the mapping of several, of which a `nn.ModuleDict` is made;
            wrappers are taken off as there. params: name -> tensor, some or all of its parameters.

    Raises:
        InvalidArgument: an unknown name or a wrong shape. UnsupportedModel: attributes that cannot be copied.

    >>> model = nn.Linear(2, 1)
    >>> with_params(model, {"bias": torch.ones(1)}).bias.item()
    1.0
    """
    result: nn.Module = copied(_joined(module))
    named = select(result, list(params))
    check_params(params, {name: param.shape for name, param in named.items()})
    with torch.no_grad():
        for name, value in params.items():
            named[name].copy_(value)
    return result
