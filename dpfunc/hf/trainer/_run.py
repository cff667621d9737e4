"""A private run of the Trainer: its processes, each with a replica that nothing wraps, its start, and what it says.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import trainer as trainers
from transformers.trainer_callback import ProgressCallback, TrainerCallback, tqdm

from dpfunc import distributed
from dpfunc._utils.validation import refuse, shorten
from dpfunc.accounting import Ledger, affordable_steps
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.record import Record
from dpfunc.batches import batch_size, rows
from dpfunc.checkpoint import Checkpoint
from dpfunc.clipping import Telemetry
from dpfunc.distributed.fsdp import functionalize_managed
from dpfunc.distributed.ranks import Ranks, check_launch
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument, UnsupportedModel
from dpfunc.functional.fsdp import fsdp_parts
from dpfunc.functional.modules import function_of, unwrapped
from dpfunc.functional.names import select
from dpfunc.hf import peft
from dpfunc.hf._facts import AnyForward, Caller, base_model, facts_of_model
from dpfunc.hf.tasks import TASKS, make_loss_fn
from dpfunc.plan import Plan
from dpfunc.rehearsal import FAILURES
from dpfunc.rng import Key
from dpfunc.state import StepState
from dpfunc.step import DPStep
from dpfunc.types import Batch, Engine, LossFn, Params, schedule_at
from dpfunc.updates.averages import Average

Loss = str | Callable[..., Tensor]
_METRICS = ("epsilon", "epsilon_rdp", "delta", "max_grad_norm", "noise_multiplier")


@dataclass(frozen=True)
class Start:
    """Decisions made before the Trainer begins: a new run, or a resumed one, and the step at which it ends."""

    key: Key = field(repr=False)
    limit: int
    data: str
    resumed: Checkpoint | None = None


@dataclass(frozen=True)
class Run:
    """A run under way. `params` are the model's own parameters, which the optimizer changes in place.

    A checkpoint between a private step and the optimizer's is one of the state before both. `places`: see `places_of`.
    """

    dp_step: DPStep
    params: dict[str, Tensor]
    state: StepState
    previous: StepState
    start: Start
    places: tuple[tuple[str, Mapping[str, Any], str, Tensor | None], ...] = field(repr=False)

    def at(self, step: int) -> StepState:
        """The state before this step: the present one, or the earlier one if the optimizer has not stepped yet."""
        if step not in (self.state.step, self.previous.step):
            raise CheckpointError(
                f"Expected the Trainer at step {self.state.step}, where the private run is, got step {step}. Nothing "
                "was spent."
            )
        return self.state if step == self.state.step else self.previous


class Replicas(Accelerator):  # type: ignore[misc]  # has no types
    """An Accelerator that does not wrap models: DistributedDataParallel would average gradients before clipping."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.__dict__.update(vars(accelerator))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> nn.Module:
        """As the `Accelerator` does for evaluation; the parts of a sharded model stay in place."""
        place = False if fsdp_parts(model) else device_placement
        return cast(nn.Module, super().prepare_model(model, place, evaluation_mode=True))


class StepsBar(ProgressCallback):  # type: ignore[misc]  # has no types
    """Progress bar of a private run. It shows no times, since they would reveal how many records a step has drawn."""

    def _begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}")
        self.current_step = 0

    on_train_begin = _begin


def without_times(callbacks: list[Any]) -> None:
    """Replace the bars that Transformers shows, also in notebooks; a bar that a user has derived from one stays."""
    kept = [each for each in callbacks if type(each) not in (ProgressCallback, trainers.DEFAULT_PROGRESS_CALLBACK)]
    if len(kept) < len(callbacks):
        callbacks[:] = [*kept, StepsBar()]


class Averaging(TrainerCallback):  # type: ignore[misc]  # has no types
    """The average of trained parameters over the steps of a run, which they are at its end."""

    def __init__(self, average: Average, params: Params) -> None:
        self.average, self.params, self.state = average, params, average.begin()

    def _add(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.state = self.average.add(self.state, self.params)  # which the optimizer has changed

    on_step_end = _add

    def load(self, file: Path) -> None:
        """Go on with the average of a checkpoint."""
        device = next(iter(self.params.values())).device
        self.state = torch.load(file, map_location=device, weights_only=True)

    @torch.no_grad()
    def _finish(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        for name, value in self.state["params"].items():
            self.params[name].copy_(value)

    on_train_end = _finish


def ranks_of(args: Any) -> Ranks | None:
    """The processes that the Trainer knows, None where it is alone; an error where the environment promises more."""
    world = int(args.world_size)
    try:
        check_launch(os.environ, world)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{error} Without an accelerator the Trainer joins other processes with TrainingArguments(use_cpu=True) "
            "only."
        ) from error
    return distributed.data_parallel() if world > 1 else None


def mean_loss(losses_B: Tensor, ranks: Ranks | None) -> Tensor:
    """The mean loss of the records of all processes; 0 where there are none. UNRELEASED."""
    total = torch.stack(
        [losses_B.detach().double().sum().cpu(), torch.tensor(float(len(losses_B)), device="cpu").double()]
    )
    if ranks is not None:
        total = total.to(ranks.device)
        dist.all_reduce(total, group=ranks.group)
    return (total[0] / total[1].clamp(min=1)).float()


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters that are trained: which require gradients; in PEFT of the active adapter."""
    return select(model, None if base_model(model) is model else peft.trainable(model))


def places_of(model: nn.Module, params: Params) -> tuple[tuple[str, Mapping[str, Any], str, Tensor | None], ...]:
    """For `refuse_changed`: of each trained or frozen parameter its name, its place in a module, and itself if trained.

    What requires gradients and is not trained, as other adapters may, is left out.
    """
    found = []
    for name, param in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        if name in params or not param.requires_grad:
            found.append((name, model.get_submodule(owner)._parameters, attribute, params.get(name)))
    return tuple(found)


def refuse_changed(places: Iterable[tuple[str, Mapping[str, Any], str, Tensor | None]]) -> None:
    """Refuse other trained parameters than those with which the run began, which are what each step trains and pays."""
    changed = [
        name for name, table, attribute, trained in places
        if getattr(table.get(attribute), "requires_grad", False) != (trained is not None)
        or (trained is not None and table[attribute] is not trained)
    ]  # fmt: skip
    refuse(
        (changed,
         f"Expected the parameters that were trained when the run began, got [{shorten(changed)}] frozen, unfrozen or "
         "replaced in it, e.g. by a callback: a private run trains the same ones in each step. Choose them before "
         "train(). The step was not taken, and spent nothing."),
    )  # fmt: skip


def set_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Put a schedule-free optimizer into the mode of its steps, or of their average; others have none."""
    if callable(getattr(optimizer, mode, None)):
        getattr(optimizer, mode)()


def as_function(
    model: nn.Module, params: Params, engine: str, ranks: Ranks | None
) -> tuple[AnyForward, str | Engine, Ranks | None]:
    """The model as a function, with the engine and the ranks that its steps need."""
    if ranks is None or not fsdp_parts(model):
        model.train(False)  # functionalize refuses checkpointed modules in training mode; inside of an engine they work
        forward, _ = function_of(unwrapped(model), list(params))
        model.train()
        return forward, engine, ranks
    managed = functionalize_managed(model, ranks)
    if others := shorten(sorted(managed.params.keys() ^ params.keys())):
        raise UnsupportedModel(
            f"The parameters {others} require gradients but belong to no active adapter. Freeze them: "
            "requires_grad_(False)."
        )
    return managed.forward, managed.engine, managed.ranks


def called(model: nn.Module, wrapped: nn.Module) -> Caller:
    """The wrapped model as a function of parameters that are its own, with the facts about the model inside."""

    def forward(params: Params, *args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return Caller(forward, facts_of_model(model))


def twin_loss(model: nn.Module, wrapped: nn.Module, task: Loss) -> Callable[[Mapping[str, Any]], Tensor]:
    """The loss of the twin without privacy, of the wrapped model: the mean over the samples of the loss of each."""
    loss_fn: Callable[..., Any] = make_loss_fn(called(model, wrapped), task)

    def mean(batch: Mapping[str, Any]) -> Tensor:
        returned = loss_fn({}, dict(batch))
        losses_B: Tensor = returned[0] if isinstance(returned, tuple) else returned  # else with aux beside it
        return losses_B.mean()

    return mean


def warning_step(plan: Plan, before: Ledger, limit: int, share: float) -> float:
    """The first step after which this share of the budget is spent; infinity without a budget."""
    if plan.epsilon is None:
        return math.inf
    return 1 + affordable_steps(
        lambda steps: before.compose(plan.ledger(steps)),
        epsilon=share * plan.epsilon, delta=plan.delta, limit=limit, method=plan.accountant,
    )  # fmt: skip


def warning_text(plan: Plan, state: StepState) -> str:
    """Warning that most of the budget is spent, with the number of steps left."""
    return (
        f"Privacy budget: epsilon={upper(state.ledger.epsilon(plan.delta, plan.accountant).epsilon, 4)} of "
        f"{plan.epsilon:g} at delta={plan.delta:g} is spent after step {state.step}. {state.limit - state.step} steps "
        "are left, and they stay within the budget."
    )


def plan_text(plan: Plan, microbatch: int) -> str:
    """Text that describes a plan and its guarantee, for a dry run."""
    n, size = plan.sampler.dataset_size, plan.sampler.expected_batch_size(0)
    return (
        f"Plan: {plan.num_steps} steps, expected batch {size:g} of {n} records ({type(plan.sampler).__name__}, "
        f"sampling probability {size / n:.4g}), {microbatch} at once, noise multiplier "
        f"{schedule_at(plan.noise_multiplier, 0):.4g}.\n{plan.guarantee()}\nNothing was trained and nothing was spent."
    )


def metrics(record: Record) -> dict[str, float]:
    """Privacy metrics for loggers, from the accounting of a state."""
    values = {f"privacy/{name}": getattr(record, name) for name in _METRICS}
    values["privacy/steps_left"] = record.num_steps - record.global_step
    if record.target_epsilon is not None:
        values["privacy/remaining_epsilon"] = max(0.0, record.target_epsilon - record.epsilon)
    return values


def made_up_logs(plan: Plan) -> dict[str, float]:
    """A log of one step with the names that a private run gives its callbacks; all values are zero."""
    names = [*_METRICS, "steps_left", *(["remaining_epsilon"] if plan.epsilon is not None else [])]
    return dict.fromkeys(("learning_rate", "grad_norm", *(f"privacy/{name}" for name in names), "epoch"), 0.0)


@contextmanager
def without_words(loss_fn: LossFn, params: Params, batch: Batch) -> Iterator[None]:
    """Raise an error of a loss without its message, which may quote a record, unless two records give the same one.

    tests/hf/trainer/test_rehearsal.py::test_an_error_of_one_record_ends_the_run_without_its_words.
    """
    try:
        yield
        return
    except DPFuncError:
        raise
    except FAILURES as error:
        count = batch_size(batch)
        if count > 1 and len({_told(loss_fn, params, rows(batch, place, place + 1)) for place in (0, count - 1)}) == 1:
            raise
        place, kind = extract_tb(error.__traceback__)[-1], type(error).__name__
    raise InvalidArgument(
        f"Expected a loss of each record, got {kind} from a record of this draw, in {place.name}, line {place.lineno} "
        f"of {Path(place.filename).name}. Its message may quote the record, and is not shown. Nothing was spent by "
        "this step. Mend the record or the loss, and resume; that the run ended here tells that the record was drawn: "
        "do not publish it."
    ) from None


def _told(loss_fn: LossFn, params: Params, row: Batch) -> object:
    """Kind and words of the error that the loss of one row raises; without one an object that equals no other."""
    try:
        loss_fn(params, row)
    except FAILURES as error:
        return type(error), str(error)
    return object()


def with_accuracy(task: Loss, telemetry: Telemetry | None) -> Any:
    """The loss of a task by name, as `(losses, aux)` with the accuracy of each sample, if telemetry needs it."""
    if telemetry is None or not isinstance(task, str) or "accuracy" not in {each.name for each in telemetry.statistics}:
        return task
    own = TASKS[task]

    def both(forward: Caller, params: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found: list[Any] = []

        def _noted(*args: Any, **inputs: Any) -> Any:
            found.append(forward.forward(*args, **inputs))
            return found[-1]

        losses_B = own(replace(forward, forward=_noted), params, batch)
        logits, labels = getattr(found[-1], "logits", None), batch.get("labels")
        if logits is None or labels is None or labels.ndim != 1 or logits.ndim != 2 or labels.is_floating_point():
            raise InvalidArgument(
                "Expected one class a sample for dp_telemetry='accuracy', labels (B,) and logits (B, C), got others. "
                "Leave it out, or pass a loss that returns (losses, aux) and name a key of aux."
            )
        return losses_B, {"accuracy": (logits.argmax(1) == labels).float()}

    return both


def averaged(statistics: Sequence[Any]) -> dict[str, float]:
    """The means of released statistics over some steps, by the names that loggers get. Released."""
    means = {
        name: torch.tensor([step[name] for step in statistics], device="cpu").mean(0)
        for name in (statistics[0] or () if statistics else ())
    }
    return {
        f"released/{name}{f'_{place}' if values.ndim else ''}": number
        for name, values in means.items() for place, number in enumerate(values.reshape(-1).tolist())
    }  # fmt: skip
