"""The engine of single samples with ordinary autograd: slow, correct, and without requirements on the model.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc._utils.parts import local, local_like
from dpfunc._utils.processes import in_lockstep, on_any_process, refused_by_all
from dpfunc.batches import Memo, batch_size, row_alone, tree_leaves, tree_map
from dpfunc.engines._draws import RANDOM, OwnDraws, inside_vmap, random_operation, without_form
from dpfunc.engines._guards import loss as checks
from dpfunc.engines._guards.collectives import CollectiveRecorder, check_replicated, own_only
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.engines._guards.operations import refuse_undeclared
from dpfunc.engines._guards.row_memory import RowMemory
from dpfunc.engines._levels import (
    MOST_RAISED,
    SETTING_DATA,
    Stop,
    is_set_from_inside,
    made_up_numbers,
    parts_of,
    run_backward,
    seen_as_compiling,
)
from dpfunc.engines._per_sample import Dense, PerSample
from dpfunc.engines._reads import READING
from dpfunc.engines._recurrent import KINDS, arguments, layer_by_layer
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.rng import cpu_seeds, insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

MAX_TRIAL_READS = 100
"""Numbers of made-up rows that Python may read: a loop of Python may wait for one that they never have."""

_TO_VALUE = frozenset(
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "numpy", "__int__", "__float__", "__index__", "__complex__", "__array__", "__format__",
        "__repr__",
    )
)  # fmt: skip


class RowResult(NamedTuple):
    """One row that was computed alone."""

    losses_1: Tensor
    grads: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]
    reads_any: bool
    reads: bool
    aux: Any = None


class Trial(NamedTuple):
    """Facts about a call with a made-up row: the loss called `backward()`, which levels refuse; or it failed.

    `unused` are parameters of which it is no function, where this was asked for and rows cannot go other ways.
    """

    backward: bool = False
    failed: bool = False
    unused: tuple[str, ...] = ()


class RowAlone(TorchFunctionMode):
    """Mode in which the loss is called with one row alone: it sees each torch function that the loss calls."""

    def __init__(self, row: Batch, position: int, allowed: int | None = None) -> None:
        super().__init__()
        self.memory, self.allowed = RowMemory(), allowed
        self.draws = OwnDraws([position], torch.default_generator.get_state(), one_row=True)
        self.reads_any = self.reads = self.backward = False
        self.stopped: BaseException | None = None
        self.raised = 0
        self.dtypes = set[torch.dtype]()  # of the numbers that the loss computes with
        self.memory.note(tree_leaves(row))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            checks.refuse_earlier(args, kwargs, self.memory.depends)
            refuse_undeclared(func)
            if func in SETTING_DATA and is_set_from_inside(args):
                raise UnsupportedModel(
                    "The loss sets the data of a tensor inside of a transform of torch.func (`tensor.data = value`). "
                    "Return the value from the function that is transformed."
                )
            if func in READING:
                self._note_read(func, args)
            self.backward |= func in (torch.autograd.backward, Tensor.backward)
        except (DPFuncError, Stop) as error:
            self.stopped, self.raised = self.stopped or error, self.raised + 1
            if self.raised <= MOST_RAISED:
                raise
            args, kwargs = made_up_numbers((tuple(args), dict(kwargs)), self.raised)
        found = self._computed(func, args, kwargs)
        if isinstance(found, Tensor) and found.is_floating_point():
            self.dtypes.add(found.dtype)
        self.memory.follow(func, args, kwargs, found)
        return found

    def refuse_stopped(self) -> None:
        """Raise the refusal, even if the loss has caught it."""
        if self.stopped is not None:
            raise self.stopped

    def _note_read(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        self.reads_any = True
        if not any(isinstance(value, Tensor) and self.memory.depends(value) for value in args):
            return
        self.reads = True
        if self.allowed is not None:
            self.allowed -= 1
            if self.allowed < 0 or func in _TO_VALUE:  # a loop of Python may wait for a number that zeros never have
                raise Stop

    def _computed(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in RANDOM and not without_form(kwargs) and not inside_vmap(0):
            found = random_operation(lambda values_1: values_1[0], self.draws, func, args, kwargs)
            if found is not NotImplemented:
                return found
        bound = arguments(args, kwargs) if func in KINDS else {"dropout": 0.0}
        drops = bound["dropout"] and bound["train"] and bound["num_layers"] > 1
        parts = partial(_recurrent, func) if drops else parts_of(func)
        if parts is None:
            return func(*args, **kwargs)
        with self:
            return parts(*args, **kwargs)


def _recurrent(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return layer_by_layer(func, arguments(args, kwargs))


@dataclass(frozen=True)
class Loop:
    """Engine that `loop` returns."""

    _trials: Memo[Trial] = field(default_factory=Memo, repr=False, compare=False)

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> Trial:
        """Let the loss build what it keeps for rows of this shape, or return what was seen before."""
        return self._trials(partial(warm_up, loss_fn, params, batch, looks=True), loss_fn, params, batch)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSample:
        return self.rows(loss_fn, params, batch, range(batch_size(batch)))

    def rows(self, loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int]) -> PerSample:
        """Gradients of rows at these positions of a batch."""
        self.prepare(loss_fn, params, batch)
        return rows_alone(loss_fn, params, batch, positions)

    def decision(self, loss_fn: LossFn) -> None:
        """None: this engine makes no decision."""


def loop() -> Loop:
    """The engine of last resort: one forward and backward pass a sample. All B gradients are in memory.

    Random numbers of a row are a function of the seed and of its position, the same as those of `auto`.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: the loss communicates between ranks, other than in tensor parallel layers; or these give
            parameters that are not split gradients in parts; or it changes what it keeps from call to call, or uses a
            tensor of another row.

    Guarantees:
        equals the reference (tests/engines/test_parity.py); draws what `auto` draws (tests/engines/test_draws.py);
        keeps nothing of a row (tests/engines/guards/test_kept_state.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> loop()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    """
    return Loop()


@checks.unfollowed_code_is_an_error()
def rows_alone(
    loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int], *, read: bool = False
) -> PerSample:
    """Gradients of rows at these positions of the batch, one after the other; see `loop`."""
    checks.refuse_kept(loss_fn)
    checks.forget_gone()
    num_samples = batch_size(batch)
    recorder, seed = CollectiveRecorder(), torch.default_generator.get_state()
    parts = {name: local(param.detach()) for name, param in params.items()}
    grads_B = {name: part.new_zeros(num_samples, *part.shape) for name, part in parts.items()}
    before = python_state(loss_fn) if num_samples else ()
    losses, aux, reached, reads_any, reads = list[Tensor](), list[Any](), not num_samples, read, False
    for row, position in enumerate(positions):
        torch.default_generator.set_state(seed)
        found = row_gradients(loss_fn, params, row_alone(batch, row), position, recorder)
        reached, reads_any, reads = reached or bool(found.grads), reads_any or found.reads_any, reads or found.reads
        losses.append(found.losses_1)
        aux.append(found.aux)
        _keep(grads_B, row, found.grads)
        # what one row changes, another could change back; what no row decides changes at the first call, or never
        if (found.reads or not row) and not in_lockstep():
            torch.default_generator.set_state(seed)  # a seed that the loss has set is no state: each row begins anew
            refuse_counting(loss_fn, before)
    checks.check_depends(reached, reads=reads_any)
    losses_B = torch.cat(losses) if losses else next(iter(parts.values())).new_zeros(0)
    check_replicated(losses_B, grads_B, params, recorder.meshes)
    grads = {name: Dense(grad_B) for name, grad_B in grads_B.items()}
    result = PerSample(losses_B, grads, needs_audit=False, aux=checks.joined_aux(aux))
    torch.default_generator.set_state(seed)
    torch.empty((), device="cpu").random_()  # the next step draws other numbers, whatever the rows have drawn
    if num_samples and not in_lockstep():  # FSDP keeps what it communicates
        refuse_counting(loss_fn, before)
    if on_any_process(reads and num_samples > 1):
        torch.default_generator.set_state(seed)
        again = row_gradients(loss_fn, params, row_alone(batch, 0), positions[0], recorder)
        with refused_by_all():
            _check_repeats(again, losses_B, grads_B)
    return result


def _keep(grads_B: dict[str, Tensor], row: int, grads: Mapping[str, Tensor]) -> None:
    """Write the gradients of one row into the result; a batch of one row is not copied."""
    for name, grad in grads.items():
        if len(grads_B[name]) == 1 and grad.dtype == grads_B[name].dtype:
            grads_B[name] = grad[None]
        else:
            grads_B[name][row] = grad


def _check_repeats(again: RowResult, losses_B: Tensor, grads_B: Mapping[str, Tensor]) -> None:
    """Compute the first row again and compare: a loss may keep state that `python_state` does not reach."""
    pairs = [(again.losses_1, losses_B[:1])]
    pairs += [(grad.norm(), grads_B[name][0].norm()) for name, grad in again.grads.items()]
    if not all(bool(torch.isclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True).all()) for one, other in pairs):
        raise UnsupportedModel(
            "The loss of a row, or its gradient, is another one after other rows were computed: it keeps Python "
            "numbers of rows from call to call, or draws random numbers of another library. Compute each loss from "
            "nothing but its own row, with torch's random numbers."
        )


@contextmanager
def _row_context(mode: RowAlone, recorder: CollectiveRecorder | None = None) -> Iterator[None]:
    """Context in which the loss of one row is called, and its backward pass runs."""
    try:
        with (
            own_only(recorder), torch.enable_grad(), checks.backward_inside(), checks.uncompiled(),
            seen_as_compiling(), mode.draws.of_row(), mode,
        ):  # fmt: skip
            yield
    finally:
        mode.memory.end()


def row_gradients(
    loss_fn: LossFn, params: Params, row: Batch, position: int, recorder: CollectiveRecorder | None = None
) -> RowResult:
    """Loss and gradients of a row, by its position in the batch. torch's generator is at the state of the step."""
    # a loss that writes into parameters (`.data`) changes these copies only
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    mode = RowAlone(row, position)
    with checks.parameters_unchanged(leaves), _row_context(mode, recorder):
        losses_1, aux = checks.split_aux(loss_fn(leaves, row))
        mode.refuse_stopped()
        checks.refuse_reentrant((), checks.check_losses(losses_1))
        checks.check_aux(aux)
        grads = run_backward(losses_1.sum(), tuple(leaves.values()))
        mode.refuse_stopped()
    used = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    local_grads = {
        name: local_like(grad.to_dense() if grad.is_sparse else grad, params[name]).detach()
        for name, grad in used.items()
    }
    aux = None if aux is None else tree_map(Tensor.detach, aux)
    return RowResult(losses_1.detach(), local_grads, frozenset(mode.dtypes), mode.reads_any, mode.reads, aux)


def made_up(params: Params) -> dict[str, Tensor]:
    """Made-up parameters: each output of a layer is a mean of its inputs, so that numbers stay in range."""
    return {name: torch.full_like(p.detach(), 1 / max(1, *p.shape[-1:])) for name, p in params.items()}


def made_up_row(batch: Batch, value: int) -> Batch:
    """A made-up row: one number everywhere."""
    return tree_map(lambda leaf: leaf.new_full((1, *leaf.shape[1:]), value), batch)


@contextmanager
def quiet_trial() -> Iterator[None]:
    """Context that restores random numbers and hides warnings; errors wait for the batch, unless processes wait."""
    key, quiet = insecure_key(0), warnings.catch_warnings(action="ignore")
    with nullcontext() if in_lockstep() else suppress(Exception), quiet, torch_seed(key), cpu_seeds(key):
        yield


def warm_up(loss_fn: LossFn, params: Params, batch: Batch, value: int = 0, *, looks: bool = False) -> Trial:
    """Call a loss on made-up rows, so that it builds what it caches for their shape (a mask, a table of positions).

    It is stopped where it would read numbers of a made-up row, or read more than a few: no loop of it goes on. With
    `looks` its backward pass says which parameters it uses.
    """
    if in_lockstep():  # FSDP would communicate
        return Trial()
    mode: RowAlone | None = None
    ended, unused = False, tuple[str, ...]()
    with quiet_trial():
        leaves = {name: param.requires_grad_() for name, param in made_up(params).items()}
        row = made_up_row(batch, value)
        mode = RowAlone(row, 0, MAX_TRIAL_READS)
        with suppress(Stop), _row_context(mode):  # what is made of the row is no table of a shape
            losses_1, _ = checks.split_aux(loss_fn(leaves, row))
            if looks and not mode.reads:
                grads = run_backward(losses_1.sum(), tuple(leaves.values()))
                unused = tuple(name for name, grad in zip(leaves, grads, strict=True) if grad is None)
        ended = True
    return Trial(mode is not None and mode.backward, not ended, unused)
