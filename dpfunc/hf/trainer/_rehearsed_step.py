"""What the Trainer does with a private step, tried before the first one: the optimizer, the schedule, and callbacks.

May import: its folder, budget, evidence, rehearsal, release and below. Trusted: no.
"""

import copy
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerControl

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.rehearsal import FAILURES
from dpfunc.updates import set_grads

_NOTHING = "Nothing was spent."
_MADE_UP = 2**-7  # a gradient
_IDLE = 0.05  # share of the steps that may have no rate at the end of a schedule
# What a callback gets at each event; and more at some.
_GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_MORE = {"on_log": "logs", "on_evaluate": "metrics"}
_EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end",
)  # fmt: skip
_NO_COPY = (*FAILURES, copy.Error, pickle.PickleError)


def own_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Callbacks of the user: not those of Transformers, its loggers among them, nor those of a private run."""
    return [each for each in callbacks if type(each).__module__.partition(".")[0] not in ("transformers", "dpfunc")]


def refuse_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that cannot be called as the Trainer calls them; none is called."""
    for callback in own_callbacks(callbacks):
        for event in _EVENTS:
            names = (*_GIVEN, _MORE[event]) if event in _MORE else _GIVEN
            try:
                signature(getattr(callback, event)).bind("args", "state", "control", **dict.fromkeys(names))
            except TypeError as error:
                raise InvalidArgument(
                    f"Expected {type(callback).__name__}.{event} to take what the Trainer gives: {error}. Write it as "
                    f"{event}(self, args, state, control, **kwargs). {_NOTHING}"
                ) from error


@contextmanager
def put_back(params: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Context after which parameters, an optimizer and a schedule are what they were, and there are no gradients.

    Of an optimizer: its `state`, its groups and its attributes that are numbers or text.
    """
    values = {name: param.detach().clone() for name, param in params.items()}
    state = {param: copy.deepcopy(own) for param, own in optimizer.state.items()}
    groups = [copy.deepcopy(_without_params(group)) for group in optimizer.param_groups]
    inner = vars(getattr(optimizer, "optimizer", optimizer))
    plain = {name: value for name, value in inner.items() if isinstance(value, (int, float, str))}
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        yield
    finally:
        if schedule is not None:
            scheduler.load_state_dict(schedule)
        inner.update(plain)
        optimizer.zero_grad()
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            for name in _without_params(group).keys() - kept.keys():
                del group[name]
            group.update(kept)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(values[name])


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def rehearse_step(params: Mapping[str, Tensor], optimizer: Any, scheduler: Any, limit: int) -> None:
    """Step an optimizer with made-up gradients, and its schedule to the end of the run; see `put_back`.

    Raises:
        InvalidArgument: one of them fails, a rate is no number >= 0, or rates are 0 long before the end.
    """
    rates: list[list[float]] = []
    set_grads(params, {name: torch.full_like(param, _MADE_UP) for name, param in params.items()})
    try:
        optimizer.step()
        for _ in range(limit):
            rates.append([float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None])
            if not isinstance(scheduler, ReduceLROnPlateau) and type(scheduler).__name__ != "GreedyLR":
                scheduler.step()
    except FAILURES as error:
        what = f"a schedule of {limit} steps, got at step {len(rates)}" if rates else "an optimizer that steps, got"
        raise InvalidArgument(
            f"Expected {what} {type(error).__name__}: {error} It would end the run. {_NOTHING}"
        ) from error
    wrong = next((at for at, each in enumerate(rates) if not all(0 <= rate < math.inf for rate in each)), None)
    last = max((at for at, each in enumerate(rates) if any(each)), default=limit)
    refuse(
        (wrong is not None,
         f"Expected learning rates >= 0 in all steps, got {rates[wrong or 0]} at step {wrong}. {_NOTHING}"),
        (limit - 1 - last > max(1.0, _IDLE * limit),
         f"Expected a schedule of {limit} steps, got one whose rates are 0 from step {last + 1} on: those steps would "
         f"cost privacy and change nothing. {_NOTHING}"),
    )  # fmt: skip


def copies(callbacks: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Copies of the user's callbacks, in which some objects are the same ones: the model, e.g."""
    try:
        found: list[Any] = copy.deepcopy(own_callbacks(callbacks), {id(each): each for each in kept})
    except _NO_COPY as error:
        raise InvalidArgument(
            f"Expected callbacks that can be copied, got {type(error).__name__}: {error} What they hold would "
            f"be changed by a rehearsal. Give them __deepcopy__, or call rehearse() without callbacks=True. {_NOTHING}"
        ) from error
    return found


def tell(handler: Any, args: Any, state: Any, logs: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Tell callbacks of a step, of evaluations with these metrics, and of a save, as the Trainer does.

    Raises:
        InvalidArgument: one of them fails.
    """
    calls: list[tuple[str, dict[str, Any]]] = [(event, {}) for event in _EVENTS[:6]]
    calls.append(("on_log", {"logs": dict(logs)}))
    for each in metrics:
        calls += [
            ("on_prediction_step", {}),
            ("on_log", {"logs": dict(each)}),
            ("on_evaluate", {"metrics": dict(each)}),
        ]
    if args.save_strategy != "no":
        calls.append(("on_save", {}))
    control = TrainerControl()
    for event, more in [*calls, ("on_epoch_end", {}), ("on_train_end", {})]:
        if event == "on_log":
            state.log_history.append({**more["logs"], "step": state.global_step})
        try:
            control = getattr(handler, event)(args, state, control, **more)
        except FAILURES as error:
            raise InvalidArgument(
                f"Expected callbacks that take {event}, got {type(error).__name__}: {error} It would end the run. "
                f"{_NOTHING}"
            ) from error
