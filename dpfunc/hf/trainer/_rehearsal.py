"""Errors that would end a private run halfway, found before its first step: each part of a run is tried, and put back.

May import: its folder, budget, evidence, rehearsal, release and below. Trusted: no.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify

from dpfunc import distributed
from dpfunc.errors import InvalidArgument
from dpfunc.hf._facts import evaluating, quantised_layers
from dpfunc.hf.trainer import _rehearsed_step as made_up
from dpfunc.hf.trainer._data import evaluated
from dpfunc.hf.trainer._run import trainable, without_words
from dpfunc.hf.trainer._saved import check_read_back, silent
from dpfunc.rehearsal import FAILURES, NOTHING_SPENT, tried
from dpfunc.rng import cpu_seeds, insecure_key, torch_seed
from dpfunc.sampling._loader import Collate, Drawn
from dpfunc.sampling._records import read, spread

_KEY = insecure_key(0)
_EVALUATED = 16
# Errors of a metric that is wrong for every record; others may come of how few records a rehearsal has.
_ALWAYS_WRONG = (AttributeError, TypeError, KeyError, NameError)


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


def rehearse_after_gradients(trainer: Any, limit: int, written: Path | None = None, *, callbacks: bool = False) -> None:
    """Try what a run does besides private steps: weights are read back, records evaluated, the optimizer steps.

    Args:
        trainer: is what it was, after it. limit: steps of the run. written: a checkpoint of it; None saves the weights
            into a folder that is removed. callbacks: tell them, too.
    """
    params = trainable(trainer.model)

    def read_back() -> None:
        saved = params | {name: trainer.model.get_parameter(name) for name in trainer._beside_adapters}
        with TemporaryDirectory() as folder:
            if written is None:
                with silent():
                    trainer._save(folder)
            trainer._warn(check_read_back(trainer, written or Path(folder), saved))

    distributed.once(trainer._ranks, read_back)
    metrics = _rehearse_evaluation(trainer)
    with made_up.put_back(trainer, params):
        if trainer.lr_scheduler is None:
            trainer.create_scheduler(limit)
        made_up.rehearse_step(params, trainer.optimizer, trainer.lr_scheduler, limit)
        if callbacks:
            made_up.rehearse_callbacks(trainer, metrics, limit)


def _rehearse_evaluation(trainer: Any) -> list[dict[str, Any]]:
    """Evaluate up to 16 records of each data set as the run will: loss, outputs and metrics; nothing is logged.

    Returns the metrics of each, and warns where one fails in a way that may come of their number.
    """
    metrics: list[dict[str, Any]] = []
    if quantised_layers(trainer.model) and not torch.accelerator.is_available():
        return metrics  # bitsandbytes packs the weights of a model that is evaluated; gradients do not pass
    best = None if trainer.args.eval_strategy == "no" else trainer.args.metric_for_best_model
    for name, dataset in evaluated(trainer.eval_dataset).items():
        values, warning = _rehearsed(trainer, dataset)
        trainer._warn(warning)
        metrics.append({f"eval_{name}_{each}" if name else f"eval_{each}": value for each, value in values.items()})
        known = {*values, "runtime", "samples_per_second", "steps_per_second"}
        if best is not None and not name and warning is None and best.removeprefix("eval_") not in known:
            raise InvalidArgument(
                f"Expected metric_for_best_model to be a metric of the evaluation, got {best!r}, and metrics "
                f"{', '.join(sorted(values))}. The first evaluation would end the run. {NOTHING_SPENT}"
            )
    return metrics


def _rehearsed(trainer: Any, dataset: Any) -> tuple[dict[str, Any], str | None]:
    """The metrics of a few records, by their names without a prefix, and a warning."""
    alone = trainer.compute_metrics is None or trainer.args.prediction_loss_only
    how, advice = "eval_dataset to be evaluated as the run will", "It would have ended the run at its first evaluation."
    with tried(how, advice), evaluating(trainer.model), cpu_seeds(_KEY), torch_seed(_KEY, accelerators=False):
        records = read(dataset, spread(len(dataset), _EVALUATED))
        batch = next(iter(trainer.get_eval_dataloader(records)))
        loss, predictions, labels = trainer.prediction_step(trainer.model, batch, alone)
        if not alone and predictions is not None and trainer.preprocess_logits_for_metrics is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
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
    except FAILURES as error:
        wrong = f"compute_metrics to take what the model predicts, got {type(error).__name__}: {error}"
        if isinstance(error, _ALWAYS_WRONG):
            raise InvalidArgument(
                f"Expected {wrong}. It was given predictions of type {type(predictions).__name__} and would have ended "
                "the run at its first evaluation. Of a tuple take the first, or give preprocess_logits_for_metrics. "
                f"{NOTHING_SPENT}"
            ) from error
        return own, f"Expected {wrong}, for {len(records)} records: if it fails for all of them too, it ends the run."
    return own | {name.removeprefix("eval_"): value for name, value in metrics.items()}, None
