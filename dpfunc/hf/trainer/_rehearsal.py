"""Errors that would end a private run halfway, found before its first step: each part of a run is tried, and put back.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import copy
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree
from transformers import EvalPrediction, TrainerControl
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import denumpify_detensorize

from dpfunc import distributed
from dpfunc._utils.validation import refuse
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import InvalidArgument
from dpfunc.hf._facts import evaluating, quantised_layers
from dpfunc.hf.trainer._data import evaluated
from dpfunc.hf.trainer._run import made_up_logs, set_mode, trainable, without_words
from dpfunc.hf.trainer._saved import check_read_back, silent
from dpfunc.hf.trainer._settings import changed, refuse_optimizer
from dpfunc.rehearsal import FAILURES, NOTHING_SPENT, tried
from dpfunc.rng import cpu_seeds, insecure_key, torch_seed
from dpfunc.sampling.loader import Collate, Drawn
from dpfunc.sampling.records import read, spread
from dpfunc.updates import set_grads

_KEY = insecure_key(0)
_EVALUATED = 16
# Errors of a metric that is wrong for every record; others may come of how few records a rehearsal has.
_ALWAYS_WRONG = (AttributeError, TypeError, KeyError, NameError)
_GRADIENT = 2**-7  # a made-up one
_LEFT_OUT = " Name outputs that are no tensors in model.config.keys_to_ignore_at_inference, a list."
_TIMES = ("runtime", "samples_per_second", "steps_per_second")  # which each evaluation has, too
_IDLE = 0.05  # share of the steps that may have no rate at the end of a schedule
# What a callback gets at each event; and more at some.
_GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_MORE = {"on_log": "logs", "on_evaluate": "metrics"}
_EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end",
)  # fmt: skip
_REPLACED = ("optimizer", "lr_scheduler", "callback_handler", "state", "args")  # in a Trainer, by a rehearsal
_NOT_COPIED = ("model", "processing_class", "train_dataset", "eval_dataset", "optimizer", "lr_scheduler")
_NO_COPY = (*FAILURES, copy.Error, pickle.PickleError)


def rehearse_gradients(trainer: Any) -> None:
    """Compute the clipped sum of up to two records, and drop it."""
    views, training, params = trainer.privacy.dp_views, trainer.model.training, trainable(trainer.model)
    with cpu_seeds(_KEY), torch_seed(_KEY):
        clipped_grad = trainer._dp_step(params, None).clipped_grad
        indices = [index for index in range(min(2, len(trainer.train_dataset))) for _ in range(views)]
        records = [(Drawn(_KEY, 0), record) for record in read(trainer.train_dataset, indices)]
        batch = dict(trainer._prepare_inputs(Collate(trainer._collator(), views=views)(records)))
        with without_words(clipped_grad.loss_fn, params, batch):
            clipped_grad(params, batch, key=_KEY)
    trainer.model.train(training)


def rehearse_after_gradients(
    trainer: Any, limit: int, written: Path | None = None, *, ranks: Ranks | None = None, callbacks: bool = False
) -> None:
    """Try what a run does besides private steps: weights are read back, records evaluated, the optimizer steps.

    Args:
        trainer: is what it was, after it. limit: steps of the run. written: a checkpoint of it; None saves the weights
            into a folder that is removed. ranks: processes that are all here, of which one reads the weights back;
            None: this one, also where there are others. callbacks: tell them, too.
    """
    params = trainable(trainer.model)

    def read_back() -> None:
        saved = params | {name: trainer.model.get_parameter(name) for name in trainer._beside_adapters}
        with TemporaryDirectory() as folder:
            if written is None:
                with silent():
                    trainer._save(folder)
            trainer._warn(check_read_back(trainer, written or Path(folder), saved))

    distributed.once(ranks, read_back)
    metrics = _rehearse_evaluation(trainer)
    with put_back(trainer, params):
        refuse_optimizer(trainer.optimizer, params)
        if trainer.lr_scheduler is None:
            trainer.create_scheduler(limit)
        rehearse_step(params, trainer.optimizer, trainer.lr_scheduler, limit)
        if callbacks:
            rehearse_callbacks(trainer, metrics, limit)


def _rehearse_evaluation(trainer: Any) -> list[dict[str, Any]]:
    """Evaluate up to 16 records of each data set as the run will: loss, outputs and metrics; nothing is logged.

    Returns the metrics of each, and warns where one fails in a way that may come of their number.
    """
    metrics: list[dict[str, Any]] = []
    if quantised_layers(trainer.model) and not torch.accelerator.is_available():
        return metrics  # bitsandbytes packs the weights of a model that is evaluated; gradients do not pass
    every = evaluated(trainer.eval_dataset)
    sure = len(every) == (len(trainer.eval_dataset) if isinstance(trainer.eval_dataset, Mapping) else 1)
    for name, dataset in every.items():
        values, warning = _metrics_of_some(trainer, dataset)
        trainer._warn(warning)
        sure = sure and warning is None
        metrics.append({f"eval_{name}_{each}" if name else f"eval_{each}": value for each, value in values.items()})
    if trainer.args.eval_strategy != "no":
        _check_metrics(trainer, {name: value for each in metrics for name, value in each.items()}, sure=sure)
    return metrics


def _check_metrics(trainer: Any, metrics: Mapping[str, Any], *, sure: bool) -> None:
    """Check that a checkpoint can hold the metrics, and the one that is followed; `sure` if there are no others."""
    best, plateau = trainer.args.metric_for_best_model, isinstance(trainer.lr_scheduler, ReduceLROnPlateau)
    ends = f"The first evaluation would end the run. {NOTHING_SPENT}"
    known = {name.removeprefix("eval_"): value for name, value in denumpify_detensorize(metrics).items()}
    missing = best is not None and not best.endswith(_TIMES) and best.removeprefix("eval_") not in known
    with tried(
        "compute_metrics to return numbers, texts or lists of them, which a checkpoint can hold",
        "The first checkpoint behind an evaluation would end the run. Of an array take .tolist().",
    ):
        json.dumps(known if trainer.args.save_strategy != "no" else {}, sort_keys=True)
    refuse(
        (plateau and best is None,
         "Expected metric_for_best_model, by which ReduceLROnPlateau sets the rate, got None. Name one, for example "
         f"'loss'; of several evaluation data sets that of one, as in 'eval_name_loss'. {ends}"),
        (sure and missing,
         f"Expected metric_for_best_model to be a metric of the evaluation, got {best!r}, and metrics "
         f"{', '.join(sorted(known))}. {ends}"),
        (not isinstance(known.get(str(best).removeprefix("eval_"), 0), (int, float)),
         f"Expected metric_for_best_model to be one number, got {best!r}, which is none. {ends}"),
    )  # fmt: skip


def _metrics_of_some(trainer: Any, dataset: Any) -> tuple[dict[str, Any], str | None]:
    """The metrics of a few records, by their names without a prefix, and a warning."""
    alone = trainer.compute_metrics is None or trainer.args.prediction_loss_only
    how, advice = "eval_dataset to be evaluated as the run will", "It would have ended the run at its first evaluation."
    with tried(how, advice), evaluating(trainer.model), cpu_seeds(_KEY), torch_seed(_KEY, accelerators=False):
        records = read(dataset, spread(len(dataset), _EVALUATED))
        # with workers that stay the Trainer would keep the loader of these few for all of its evaluations
        once = changed(trainer, {"args": changed(trainer.args, {"dataloader_persistent_workers": False})})
        batch = next(iter(once.get_eval_dataloader(records)))
        loss, predictions, labels = trainer.prediction_step(trainer.model, batch, alone)
        gathered = [each for each in (predictions, labels) if each is not None]
        if not alone and predictions is not None and trainer.preprocess_logits_for_metrics is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
    with tried("outputs and labels that the Trainer can gather", advice + _LEFT_OUT):
        recursively_apply(lambda tensor: tensor, gathered, error_on_other_type=True)
    own = {} if loss is None else {"loss": float(loss.mean())}
    if alone or predictions is None or labels is None:
        return own, None
    by_batch = trainer.args.batch_eval_metrics  # of which this is the last: a metric begins anew after it
    inputs = batch if by_batch else batch.get(getattr(trainer.model, "main_input_name", "input_ids"))
    available = {"loss": ("losses", loss), "inputs": ("inputs", inputs)}
    more = dict(available[name] for name in trainer.args.include_for_metrics)
    given = {"predictions": predictions, "label_ids": labels, **more}
    try:
        if by_batch:
            metrics = trainer.compute_metrics(EvalPrediction(**given), compute_result=True)
        else:
            metrics = trainer.compute_metrics(EvalPrediction(**nested_numpify(given)))
        return own | {name.removeprefix("eval_"): value for name, value in metrics.items()}, None
    except FAILURES as error:
        what = "compute_metrics to take what the model predicts, and to return a dictionary from names to numbers"
        wrong = f"{what}, got {type(error).__name__}: {error}"
        if isinstance(error, _ALWAYS_WRONG):
            raise InvalidArgument(
                f"Expected {wrong}. It was given predictions of type {type(predictions).__name__} and would have ended "
                "the run at its first evaluation. Of a tuple take the first, or give preprocess_logits_for_metrics. "
                f"{NOTHING_SPENT}"
            ) from error
        return own, f"Expected {wrong}, for {len(records)} records: if it fails for all of them too, it ends the run."


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

    Of an optimizer, and of those inside of it: `state`, groups and attributes that are numbers or text.
    """
    own = {name: getattr(trainer, name) for name in _REPLACED}
    if trainer.optimizer is None:
        trainer.create_optimizer()
    optimizer, scheduler, made = trainer.optimizer, trainer.lr_scheduler, _optimizers(trainer.optimizer)
    values = {name: param.detach().clone() for name, param in params.items()}
    tables = [table for each in made for table in (each.state, *each.param_groups)]
    same = {id(param): param for each in made for group in each.param_groups for param in group["params"]}
    kept = copy.deepcopy([dict(table) for table in tables], same)  # parameters are not copied
    attributes = [dict(vars(each)) for each in made]
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        yield
    finally:
        if schedule is not None:
            scheduler.load_state_dict(schedule)
        optimizer.zero_grad()
        for each, own_before in zip(made, attributes, strict=True):
            vars(each).update({name: v for name, v in own_before.items() if isinstance(v, (int, float, str))})
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(values[name])
        vars(trainer).update(own)


def _optimizers(optimizer: Any) -> list[Any]:
    """An optimizer, and those that it or one of them keeps: of Accelerate, of a look-ahead, several as one."""
    found = [optimizer]
    for each in found:  # which grows
        inside = pytree.tree_leaves([*vars(each).values()])
        found += [o for o in inside if isinstance(o, torch.optim.Optimizer) and all(o is not known for known in found)]
    return found


def rehearse_step(params: Mapping[str, Tensor], optimizer: Any, scheduler: Any, limit: int) -> None:
    """Step an optimizer with made-up gradients, and its schedule to the end of the run; see `put_back`.

    Raises:
        InvalidArgument: one of them fails, a rate is no number >= 0, or rates are 0 long before the end.
    """
    set_grads(params, {name: torch.full_like(param, _GRADIENT) for name, param in params.items()})
    with tried("an optimizer that steps"):
        set_mode(optimizer, "train")
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
    same = [trainer, *(getattr(trainer, name) for name in _NOT_COPIED)]
    advice = (
        "What they hold would be changed by a rehearsal. Give them __deepcopy__, or call rehearse() without "
        "callbacks=True."
    )
    with tried("callbacks that can be copied", advice, failures=_NO_COPY):
        callbacks = copy.deepcopy(own_callbacks(trainer.callback_handler.callbacks), {id(each): each for each in same})
    given = {
        "optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler,
        "train_dataloader": trainer.get_train_dataloader(), "eval_dataloader": None, "callbacks": callbacks,
    }  # fmt: skip
    if evaluated(trainer.eval_dataset):
        given["eval_dataloader"] = trainer.get_eval_dataloader()
    beginning = {"global_step": 1, "max_steps": limit, "epoch": 1 / limit, "trial_name": "rehearsal", "log_history": []}
    with TemporaryDirectory() as folder:
        handler = changed(trainer.callback_handler, given)
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
