"""Errors that would end a private run halfway, found before its first step: records that the model cannot take, and an
evaluation that fails.

May import: its folder, budget, evidence, rehearsal, release and below. Trusted: no.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify

from dpfunc.errors import InvalidArgument
from dpfunc.hf._facts import Facts, base_model, evaluating, facts_of_model, quantised_layers
from dpfunc.rehearsal import FAILURES
from dpfunc.rng import cpu_seeds, insecure_key, torch_seed
from dpfunc.sampling._records import read, spread

_AT_ONCE = 64  # records that are collated together
_READ = 1024  # records of images, sound and others whose batches hold floats, which are slow to make
_EVALUATED = 16
_LEARN_TOKENS = ("causal_lm", "masked_lm", "seq2seq", "vqa")  # tasks whose labels are token ids
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")  # may be in no table
_NOTHING = "Nothing was spent."
# Errors of a metric that is wrong for every record; others may come of how few records a rehearsal has.
_ALWAYS_WRONG = (AttributeError, TypeError, KeyError, NameError)


def refuse_records(dataset: Any, collate: Callable[[list[Any]], Any], model: Any, task: object, name: str) -> None:
    """Refuse token ids outside of the tables of a model, and records with more tokens than it has positions.

    Every record of a text data set is collated, and 1024 of one whose batches hold floats, e.g. pixels
    (tests/hf/trainer/test_rehearsal.py::test_one_record_in_the_midst_of_many). No value is in a message.
    """
    facts = facts_of_model(model)
    if facts.tables.tokens is None:
        return
    config = getattr(base_model(model), "config", None)
    elsewhere = [getattr(config, token) for token in _IMAGE_TOKENS if isinstance(getattr(config, token, None), int)]
    labels = ("labels",) if task in _LEARN_TOKENS else ()
    with cpu_seeds(insecure_key(0)), torch_seed(insecure_key(0), accelerators=False):
        for batch in _batches(dataset, collate):
            for key in ("input_ids", "decoder_input_ids", *labels):
                ids = batch.get(key)
                if isinstance(ids, Tensor) and not ids.is_floating_point():
                    _check_tokens(ids, key, batch, facts, elsewhere, name)


def is_indexed(dataset: Any) -> bool:
    """True if records can be read by their index; of a stream and of no data set none can."""
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset) and len(dataset) > 0


def _batches(dataset: Any, collate: Callable[[list[Any]], Any]) -> Iterator[Mapping[str, Any]]:
    """All records, collated, of a data set of texts, and some of any other; none where collating makes no mapping."""
    indices: Any = range(len(dataset))
    start = 0
    while start < len(indices):
        batch = collate(read(dataset, indices[start : start + _AT_ONCE]))
        if not isinstance(batch, Mapping):
            return
        yield batch
        start += _AT_ONCE
        tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1]
        if len(indices) > _READ and any(value.is_floating_point() for value in tensors):
            indices = spread(len(dataset), _READ)


def _check_tokens(
    ids: Tensor, key: str, batch: Mapping[str, Any], facts: Facts, elsewhere: list[int], name: str
) -> None:  # fmt: skip
    tables = facts.tables
    known = (ids >= 0) & (ids < (tables.tokens or 0)) | torch.isin(ids, ids.new_tensor(elsewhere))
    if key == "labels":
        used = ids >= 0  # others have no loss
        known |= ~used
    else:
        mask = batch.get("attention_mask" if key == "input_ids" else "decoder_attention_mask")
        used = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else ids == ids
    length = facts.soft_prompt + int(used.sum(-1).max()) if used.numel() and used.dim() > 1 else 0
    tables.refuse(known=bool(known.all()), length=length, where=f"in {key!r} of each record of {name}")


def rehearse_evaluation(trainer: Any, model: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Evaluate up to 16 records of each data set as the run will: loss, outputs and metrics; nothing is logged.

    Returns the metrics of each data set, and a warning where one fails in a way that may come of their number.
    """
    metrics: list[dict[str, Any]] = []
    warning = None
    if quantised_layers(trainer.model) and not torch.accelerator.is_available():
        return metrics, warning  # bitsandbytes packs the weights of a model that is evaluated; gradients do not pass
    several = isinstance(trainer.eval_dataset, Mapping)
    for name, dataset in (trainer.eval_dataset if several else {"": trainer.eval_dataset}).items():
        if not is_indexed(dataset):
            continue
        values, found = _rehearsed(trainer, model, dataset)
        metrics.append({f"eval_{name}_{each}" if name else f"eval_{each}": value for each, value in values.items()})
        warning = found or warning
        best = None if trainer.args.eval_strategy == "no" else trainer.args.metric_for_best_model
        wanted = None if best is None or several or found else best.removeprefix("eval_")
        if wanted is not None and wanted not in {*values, "runtime", "samples_per_second", "steps_per_second"}:
            raise InvalidArgument(
                f"Expected metric_for_best_model to be a metric of the evaluation, got {best!r}, and metrics "
                f"{', '.join(sorted(values))}. The first evaluation would end the run. {_NOTHING}"
            )
    return metrics, warning


def _rehearsed(trainer: Any, model: Any, dataset: Any) -> tuple[dict[str, Any], str | None]:
    """The metrics of a few records, by their names without a prefix, and a warning."""
    try:
        with evaluating(model), cpu_seeds(insecure_key(0)), torch_seed(insecure_key(0), accelerators=False):
            records = read(dataset, spread(len(dataset), _EVALUATED))
            batch = next(iter(trainer.get_eval_dataloader(records)))
            alone = trainer.compute_metrics is None or trainer.args.prediction_loss_only
            loss, predictions, labels = trainer.prediction_step(model, batch, alone)
            if not alone and predictions is not None and trainer.preprocess_logits_for_metrics is not None:
                predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
    except FAILURES as error:
        raise InvalidArgument(
            f"Expected eval_dataset to be evaluated as the run will, got {type(error).__name__}: {error} It would have "
            f"ended the run at its first evaluation. {_NOTHING}"
        ) from error
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
                f"{_NOTHING}"
            ) from error
        return own, f"Expected {wrong}, for {len(records)} records: if it fails for all of them too, it ends the run."
    return own | {name.removeprefix("eval_"): value for name, value in metrics.items()}, None
