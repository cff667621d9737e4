"""Compiled clipped sums: which microbatches are compiled, and how each compilation is compared with an eager step.

`compile="auto"` chooses from public settings, shapes and the number of the step alone, never from a clock or from what
this process did before, so that a run that is resumed takes the same steps in the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from dpfunc._utils.versions import check_compile, lacks_compile
from dpfunc.batches import rows, signature, tree_map
from dpfunc.engines.evidence import Evidence
from dpfunc.engines.guards.audit import Audits, Credited, audit
from dpfunc.engines.guards.lockstep import in_lockstep
from dpfunc.engines.guards.modes import DispatchMode
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.numerics import full_precision
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import Key, insecure_key, torch_seed
from dpfunc.types import Batch, Engine, LossFn, MicrobatchSums, Params, PerSampleGrads

_log = logging.getLogger("dpfunc")

Compile = bool | Literal["auto"]
"""True compiles or raises; "auto" compiles where it pays, and stays eager elsewhere."""

# Of "auto": these first steps of a run stay eager, whatever the process.
EAGER_STEPS = 2
# Forward operations of a run below which compilation takes longer than it saves; measured, see decision 0016.
_MIN_RUN_FLOPS = 1e14
# The last microbatch is padded by half of its rows on average, which may be at most this share of the expected batch.
_MAX_PADDING = 1 / 16
# Compiled microbatches are this share of the expected batch, so that padding costs little, and at least some rows.
_SHARE, _MIN_ROWS = 8, 4
# Rows of numbers that long are taken for features, whose number is fixed, and not for sequences.
_MAX_FEATURES = 4096
# Lengths up to this are always compiled; longer ones if they are a power of two, or three times one.
_SHORT = 16
# Shapes of microbatches, times graphs for each, that are compiled with True.
_GRAPHS = 64


ClipMicrobatch = Callable[[Params, Batch, Tensor, Key | None], MicrobatchSums]
"""Parameters, microbatch, mask of the real rows, key -> clipped sums."""


class _ClipAndSum(Protocol):
    """Clip and add per-sample gradients; `check` sees their squared norms before."""

    def __call__(
        self,
        params: Params,
        per_sample: PerSampleGrads,
        mask_B: Tensor,
        check: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> MicrobatchSums: ...


class RunFacts(NamedTuple):
    """Public facts of a step, by which it is compiled or not.

    Args:
        step: its number. num_steps: of the run. expected_rows: of one process in this step, before it was drawn.
    """

    step: int
    num_steps: int
    expected_rows: float


class Compilation(NamedTuple):
    """Record of the last step: compiled or eager, and why.

    Args:
        compiled: true if all its microbatches ran compiled. reason: in words, where they did not.

    >>> Compilation(False, "the first 2 steps are eager")
    Compilation(compiled=False, reason='the first 2 steps are eager')
    """

    compiled: bool
    reason: str = ""


def check_setting(compile: Compile, microbatch_size: object) -> None:
    """Check the argument `compile` of a step.

    Raises:
        InvalidArgument: neither a bool nor "auto"; True without a microbatch size, or with a torch that cannot compile.
    """
    if compile not in (True, False, "auto"):
        raise InvalidArgument(f'Expected compile to be True, False or "auto", got compile={compile!r}.')
    if compile is True and microbatch_size is None:
        raise InvalidArgument(
            "Expected microbatch_size to be given with compile=True: Poisson batches change their size, and each size "
            'would be compiled anew. The last microbatch is padded and masked. compile="auto" chooses a size.'
        )
    if compile is True:
        check_compile()


def rows_at_once(expected_rows: float, largest: int | None) -> int:
    """Rows of a compiled microbatch: a power of two, at most an eighth of the expected batch and `largest`.

    >>> rows_at_once(256.0, None), rows_at_once(16.0, None), rows_at_once(256.0, 20)
    (32, 4, 16)
    """
    wanted = 1 << int(math.log2(max(_MIN_ROWS, expected_rows / _SHARE)))
    return wanted if largest is None else min(wanted, 1 << (largest.bit_length() - 1))


@dataclass
class Compiler:
    """Compiled functions `ClipMicrobatch` of a loss function, by shapes, and reasons why others are eager.

    Args:
        loss_fn, engine: of the steps. mode: `compile` of `make_clipped_grad`. audits: of all steps.
        compiled: by parameters, sizes and dtypes of microbatches. flops: of the forward pass of a row, and of
            its convolutions, by shapes. last: of the last step.
    """

    loss_fn: LossFn
    engine: Engine
    mode: Compile
    audits: Audits
    compiled: dict[tuple[object, ...], _Compiled] = field(default_factory=dict)
    flops: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    last: Compilation = field(default_factory=lambda: Compilation(False, "no step was taken"))

    def stays_eager(self, params: Params, batch: Batch, size: int, run: RunFacts | None) -> bool:
        """True if "auto" leaves this step eager; the reason is noted, and logged where it changes.

        A function of public facts and shapes.

        Args:
            params, batch: of the step. size: of its microbatches, were they compiled. run: None for steps of no run,
                which are compiled whatever they cost.
        """
        reason = self._reason_against(params, batch, size, run)
        if reason and reason != self.last.reason:
            _log.info("not compiled: %s", reason)
        if reason:
            self.last = Compilation(False, reason)
        return bool(reason)

    def _reason_against(self, params: Params, batch: Batch, size: int, run: RunFacts | None) -> str:
        device = next(iter(params.values())).device.type
        if run is not None and run.step < EAGER_STEPS:
            return f"the first {EAGER_STEPS} steps of a run are eager"
        if device != "cpu":
            return f"compiled steps were not measured on {device}; compile=True compiles them"
        if in_lockstep():
            return "sharded models communicate inside of the loss"
        if not hasattr(self.engine, "prepare"):
            return 'of the engines, "auto" and "bookkeeping" are compiled'
        if size < 2:
            return "microbatches have one row"
        if run is not None and (size - 1) / 2 > _MAX_PADDING * run.expected_rows:
            return (
                f"{run.expected_rows:g} rows are expected, and padding a batch to microbatches of {size} costs what "
                "compilation saves; larger batches or a smaller microbatch_size are compiled"
            )
        return lacks_compile() or _off_the_ladder(batch) or self._too_little_work(params, batch, run)

    def _too_little_work(self, params: Params, batch: Batch, run: RunFacts | None) -> str:
        if run is None:
            return ""
        shapes = signature(batch)
        if shapes not in self.flops:
            self.flops[shapes] = _forward_flops(self.loss_fn, params, batch)
        row, convolutions = self.flops[shapes]
        if 2 * convolutions > row:
            return "convolutions are not faster when they are compiled"
        whole_run = row * run.expected_rows * run.num_steps
        if whole_run < _MIN_RUN_FLOPS:
            return (
                f"the forward passes of the run have {whole_run:.1e} operations, and compilation pays from "
                f"{_MIN_RUN_FLOPS:.0e} on"
            )
        return ""

    def clip_microbatch(
        self, params: Params, batch: Batch, size: int, clip_and_sum: _ClipAndSum, bound: float, eager: ClipMicrobatch
    ) -> ClipMicrobatch:
        """The function that clips and sums microbatches of `size` rows of a batch.

        Args:
            clip_and_sum: clips and adds per-sample gradients, with this bound on each. eager: the same function without
                compilation.
        """
        dtypes = tuple((name, param.dtype, param.device) for name, param in params.items())
        key = (size, *dtypes, *signature(batch), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self.compiled:
            self.compiled[key] = _Compiled(
                self.loss_fn, self.engine, self.mode == "auto", self.audits, clip_and_sum, bound
            )
        known = self.compiled[key]

        def step(params: Params, microbatch: Batch, mask_B: Tensor, own_key: Key | None) -> MicrobatchSums:
            result = known(params, microbatch, mask_B, own_key, eager)
            self.last = Compilation(not known.reason, known.reason)
            return result

        return step


def _origin(error: BaseException) -> BaseException:
    """The error that others wrap: the compiler's own say only that there was one."""
    return error if error.__cause__ is None else _origin(error.__cause__)


@dataclass
class _Compiled:
    """A `ClipMicrobatch`, for one shape. Each compilation is compared with an eager step on all its rows.

    What was compiled runs the operations of that step again, in every later one: it is one graph, and what it depends
    on beside its inputs is guarded. So the trace of the step for which it was compiled is that of the others.

    Args:
        forgiving: what cannot be compiled is eager; else it is an error. bound: on the norm of a clipped gradient.
        random: the step draws random numbers. compared: one was compared. reason: why microbatches of this shape are
            eager; empty if they are not. traced: the compiled code. began: it has given a result.
    """

    loss_fn: LossFn
    engine: Engine
    forgiving: bool
    audits: Audits
    clip_and_sum: _ClipAndSum
    bound: float
    random: bool = False
    compared: bool = False
    reason: str = ""
    traced: Callable[[Params, Batch, Tensor], MicrobatchSums] | None = None
    began: bool = False

    def __call__(
        self, params: Params, microbatch: Batch, mask_B: Tensor, key: Key | None, eager: ClipMicrobatch
    ) -> MicrobatchSums:
        """The clipped sums: compiled, and eager as well to compare with where something was compiled now."""
        if self.reason:
            return eager(params, microbatch, mask_B, key)
        before, start = _graphs(), time.perf_counter()
        state = torch.default_generator.get_state()
        result = self._run(params, microbatch, mask_B)
        new = result is None or _graphs() != before or not self.compared  # graphs may be those of another dp_step
        if result is not None and not new and not self.random:
            with self.audits.choose_rows(key, microbatch, seconds=time.perf_counter() - start) as chosen:
                audit(self.loss_fn, params, microbatch, _credited(params, result, self.audits.coarse), chosen)
            return result
        if result is not None and not new and not self.audits.due(microbatch):
            return result
        torch.default_generator.set_state(state)  # the same random numbers again
        expected = eager(params, microbatch, mask_B, key)  # outside of what is forgiven: it may refuse the loss
        self.random = self.audits.random
        if result is None:
            self._give_up()
            return expected
        try:
            self._compare(params, microbatch, mask_B, result, expected)
        except UnsupportedModel as error:
            if not (self.forgiving and new):  # earlier results of the same graph were released
                raise
            self.reason = str(error)
            self._give_up(logging.WARNING)
            return expected
        self.compared = True
        return result

    def _run(self, params: Params, microbatch: Batch, mask_B: Tensor) -> MicrobatchSums | None:
        """The compiled step; None where it cannot be compiled and need not."""
        try:
            if self.traced is None:
                _log.info("compiling microbatches of %d rows, which may take minutes", len(mask_B))
                self.traced = self._trace(params, microbatch)
            before, state = _graphs(), torch.default_generator.get_state()
            # book-keeping differentiates inside
            options = torch._dynamo.config.patch(trace_autograd_ops=True, recompile_limit=_GRAPHS)
            with full_precision(mask_B.device), options:
                result = self.traced(params, microbatch, mask_B)
            if not self.began or _graphs() == before:
                self.began = True
                return result
        except (RuntimeError, UnsupportedModel, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            if not self.forgiving:
                raise
            self.reason = f"it cannot be compiled: {str(_origin(error)).strip().splitlines()[0]}"
            return None
        # Another graph: what the loss depends on has changed, and the proof was that of the loss before.
        self.traced, self.began = None, False
        torch.default_generator.set_state(state)
        return self._run(params, microbatch, mask_B)

    def _trace(self, params: Params, microbatch: Batch) -> Callable[[Params, Batch, Tensor], MicrobatchSums]:
        # The part of an engine that observes a loss cannot be traced by the compiler.
        prepare = getattr(self.engine, "prepare", lambda *args: self.engine)
        if self.forgiving:  # without a proof, rows alone are not compiled instead
            prepare = getattr(self.engine, "prepare_proven", prepare)
        with torch_seed(insecure_key(0)):
            engine: Engine = prepare(self.loss_fn, params, microbatch)

        def core(params: Params, microbatch: Batch, mask_B: Tensor) -> MicrobatchSums:
            if not _is_compiled():  # switched off from outside: nobody would look at such a step
                raise RuntimeError("torch.compile is switched off (TORCHDYNAMO_DISABLE, or torch.compiler.set_stance)")
            # Engines tell tensors apart by identity, and an input's would be compiled in.
            microbatch = tree_map(torch.detach, microbatch)
            return self.clip_and_sum(params, engine(self.loss_fn, params, microbatch), mask_B)

        # Sizes that the compiler leaves open would make the code depend on the order of the batches. Random numbers of
        # its own could be compared with none.
        return torch.compile(core, fullgraph=True, dynamic=False, options={"fallback_random": True})

    def _give_up(self, level: int = logging.INFO) -> None:
        self.traced = None
        _log.log(level, "not compiled: %s", self.reason)

    def _compare(
        self, params: Params, microbatch: Batch, mask_B: Tensor, result: MicrobatchSums, expected: MicrobatchSums
    ) -> None:
        """Check that losses, norms and sums are those of the eager step.

        Rows that differ by more than rounding are computed alone: at the kink of a ReLU, kernels that round differently
        may decide differently, which `audit` recognises. Rows that draw random numbers must not differ.

        Raises:
            UnsupportedModel: they are not.
        """
        credited = _credited(params, result, self.audits.coarse)
        tolerance = credited.tolerance(params)
        differing = _differing(result, expected, tolerance)
        if self.random and mask_B.device.type != "cpu":  # other generators are not set back
            return
        try:
            if self.random and differing:
                raise UnsupportedModel("They draw random numbers, and compiled code may draw others.")
            audit(self.loss_fn, params, microbatch, credited, differing)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                "The compiled step gives other losses or norms of gradients than rows that are computed without "
                f"compilation, in {len(differing)} of {len(mask_B)} rows: a fault of the compiler, or of this "
                f"library. Use compile=False. Nothing was released and nothing was spent. {error}"
            ) from error
        _check_sums(result, expected, mask_B, tolerance, self.bound, differing)


def _credited(params: Params, result: MicrobatchSums, coarse: bool) -> Credited:
    return Credited(result.losses_B, {name: result.sq_norms[name] for name in params}, Evidence(coarse=coarse), None)


def _differing(result: MicrobatchSums, expected: MicrobatchSums, tolerance: float) -> list[int]:
    """The rows whose loss, or the norm of whose gradient by a parameter, differs by more than rounding."""
    total_B = torch.stack([value.double() for value in expected.sq_norms.values()]).sum(0).clamp(min=0).sqrt()
    pairs = [(result.losses_B, expected.losses_B, expected.losses_B.double().abs())]
    pairs += [
        (value.clamp(min=0).sqrt(), expected.sq_norms[name].clamp(min=0).sqrt(), total_B)
        for name, value in result.sq_norms.items()
    ]
    differs_B = torch.zeros_like(total_B, dtype=torch.bool)
    for one_B, other_B, scale_B in pairs:
        one_B, other_B = one_B.double(), other_B.double()
        known_B = torch.isfinite(one_B) & torch.isfinite(other_B)
        off_B = torch.where(known_B, one_B - other_B, 0.0).abs()
        differs_B |= torch.isfinite(one_B) != torch.isfinite(other_B)
        differs_B |= known_B & (off_B > tolerance * scale_B.nan_to_num(0.0, 0.0, 0.0) + 1e-12)
    return differs_B.nonzero().flatten().tolist()


def _check_sums(
    result: MicrobatchSums,
    expected: MicrobatchSums,
    mask_B: Tensor,
    tolerance: float,
    bound: float,
    differing: Sequence[int],
) -> None:
    """Check the clipped sums against those of the eager step; a row that differs at a kink may do so by twice a bound.

    Raises:
        UnsupportedModel: they differ.
    """
    squares = [(result.sums[name].double() - value.double()).square().sum() for name, value in expected.sums.items()]
    off = float(torch.stack(squares).sum().sqrt())
    allowed = bound * (tolerance * int(mask_B.sum()) + 2 * sum(bool(mask_B[row]) for row in differing))
    if not off <= allowed:
        raise UnsupportedModel(
            f"The compiled step gives a sum of clipped gradients that differs by {off:.3g} from the one that is "
            f"computed without compilation (at most {allowed:.3g} is rounding): a fault of the compiler, or of "
            "this library. Use compile=False. Nothing was released and nothing was spent."
        )


def _is_compiled() -> bool:
    return torch.compiler.is_compiling()


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _off_the_ladder(batch: Batch) -> str:
    """Reason why rows of this length are not compiled; empty if they are.

    The lengths of texts may change from batch to batch, and each would be compiled by itself. Padding more would not be
    the same for each model, so lengths on a short ladder are compiled, and others are not.
    """
    for path, leaf in pytree.tree_leaves_with_path(batch):
        features = leaf.is_floating_point() and leaf.ndim == 2 and leaf.shape[1] <= _MAX_FEATURES
        if leaf.ndim not in (2, 3) or features or _on_the_ladder(leaf.shape[1]):
            continue
        above = next(length for length in range(leaf.shape[1], 2 * leaf.shape[1]) if _on_the_ladder(length))
        return (
            f"batch{pytree.keystr(path)} has rows of length {leaf.shape[1]}; lengths {above}, and all 2^k and 3*2^k, "
            "are compiled: pad to one of them where the model masks it"
        )
    return ""


def _on_the_ladder(length: int) -> bool:
    odd = length // (length & -length) if length else 1
    return length <= _SHORT or odd in (1, 3)


class _Flops(DispatchMode):
    """Counts the operations of matrix products, attention and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.convolutions = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            flops = int(count(*args, **(kwargs or {}), out_val=result))
            self.total += flops
            self.convolutions += flops if "convolution" in str(func) else 0
        return result


def _forward_flops(loss_fn: LossFn, params: Params, batch: Batch) -> tuple[int, int]:
    """Operations of the forward pass of one row: all that are counted, and those of convolutions."""
    leaves = {name: param.detach() for name, param in params.items()}
    with torch_seed(insecure_key(0)), torch.no_grad(), backward_inside(), _Flops() as counter:
        loss_fn(leaves, rows(batch, 0, 1))
    return counter.total, counter.convolutions
