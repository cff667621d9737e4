"""What the Trainer does with a private step, tried before the first one: the optimizer, the schedule, and callbacks.

May import: its folder, budget, evidence, rehearsal, release and below. Trusted: no.
"""

import copy
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerControl

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer._data import evaluated
from dpfunc.hf.trainer._run import made_up_logs
from dpfunc.hf.trainer._settings import changed
from dpfunc.rehearsal import FAILURES, NOTHING_SPENT, tried
from dpfunc.updates import set_grads

_MADE_UP = 2**-7  # a gradient
_IDLE = 0.05  # share of the steps that may have no rate at the end of a schedule
# What a callback gets at each event; and more at some.
_GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_MORE = {"on_log": "logs", "on_evaluate": "metrics"}
_EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end",
)  # fmt: skip
_REPLACED = ("optimizer", "lr_scheduler", "callback_handler", "state", "args")  # in a Trainer, by a rehearsal
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
                    f"{event}(self, args, state, control, **kwargs). {NOTHING_SPENT}"
                ) from error


@contextmanager
def put_back(trainer: Any, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Context with an optimizer, after which a Trainer and its parameters are what they were, and have no gradients.

    Of an optimizer: its `state`, its groups and its attributes that are numbers or text.
    """
    own = {name: getattr(trainer, name) for name in _REPLACED}
    if trainer.optimizer is None:
        trainer.create_optimizer()
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    values = {name: param.detach().clone() for name, param in params.items()}
    same = {id(param): param for group in optimizer.param_groups for param in group["params"]}  # are not copied
    kept = copy.deepcopy([dict(table) for table in (optimizer.state, *optimizer.param_groups)], same)
    inner = vars(getattr(optimizer, "optimizer", optimizer))
    plain = {name: value for name, value in inner.items() if isinstance(value, (int, float, str))}
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        yield
    finally:
        if schedule is not None:
            scheduler.load_state_dict(schedule)
        optimizer.zero_grad()
        inner.update(plain)
        for table, before in zip((optimizer.state, *optimizer.param_groups), kept, strict=True):
            table.clear()
            table.update(before)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(values[name])
        vars(trainer).update(own)


def rehearse_step(params: Mapping[str, Tensor], optimizer: Any, scheduler: Any, limit: int) -> None:
    """Step an optimizer with made-up gradients, and its schedule to the end of the run; see `put_back`.

    Raises:
        InvalidArgument: one of them fails, a rate is no number >= 0, or rates are 0 long before the end.
    """
    set_grads(params, {name: torch.full_like(param, _MADE_UP) for name, param in params.items()})
    with tried("an optimizer that steps"):
        optimizer.step()
    by_itself = not isinstance(scheduler, ReduceLROnPlateau) and type(scheduler).__name__ != "GreedyLR"
    rates: list[list[float]] = []
    for step in range(limit + 1):
        with tried(f"a schedule of {limit} steps", place=f"at step {step} "):
            if step and by_itself:
                scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None])
    del rates[limit]  # which no step has
    wrong = next((at for at, each in enumerate(rates) if not all(0 <= rate < math.inf for rate in each)), None)
    last = max((at for at, each in enumerate(rates) if any(each)), default=limit)
    refuse(
        (wrong is not None,
         f"Expected learning rates >= 0 in all steps, got {rates[wrong or 0]} at step {wrong}. {NOTHING_SPENT}"),
        (limit - 1 - last > max(1.0, _IDLE * limit),
         f"Expected a schedule of {limit} steps, got one whose rates are 0 from step {last + 1} on: those steps would "
         f"cost privacy and change nothing. {NOTHING_SPENT}"),
    )  # fmt: skip


def rehearse_callbacks(trainer: Any, metrics: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Tell copies of the user's callbacks of a step, of evaluations with these metrics, and of a save; see `put_back`.

    They see a run whose folder is removed, whose name is "rehearsal", and the model itself.

    Raises:
        InvalidArgument: one of them cannot be copied, or fails.
    """
    used = {"optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
    same = [
        trainer,
        trainer.model,
        trainer.processing_class,
        trainer.train_dataset,
        trainer.eval_dataset,
        *used.values(),
    ]
    advice = (
        "What they hold would be changed by a rehearsal. Give them __deepcopy__, or call rehearse() without "
        "callbacks=True."
    )
    with tried("callbacks that can be copied", advice, failures=_NO_COPY):
        callbacks = copy.deepcopy(own_callbacks(trainer.callback_handler.callbacks), {id(each): each for each in same})
    given = {**used, "train_dataloader": trainer.get_train_dataloader(), "eval_dataloader": None}
    if evaluated(trainer.eval_dataset):
        given["eval_dataloader"] = trainer.get_eval_dataloader()
    beginning = {"global_step": 1, "max_steps": limit, "epoch": 1 / limit, "trial_name": "rehearsal", "log_history": []}
    with TemporaryDirectory() as folder:
        handler = changed(trainer.callback_handler, {**given, "callbacks": callbacks})
        args, state = changed(trainer.args, {"output_dir": folder}), changed(trainer.state, beginning)
        vars(trainer).update(callback_handler=handler, args=args, state=state)  # also for a callback that evaluates
        trainer._save(str(Path(folder) / "checkpoint-1"))
        _tell(handler, args, state, made_up_logs(trainer.plan), metrics)


def _tell(handler: Any, args: Any, state: Any, logs: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> None:
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
        with tried(f"callbacks that take {event}"):
            control = getattr(handler, event)(args, state, control, **more)
