"""Records that a private run cannot learn from, refused before anything is spent: labels, and padding of short rows.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from dpfunc._utils.validation import refuse
from dpfunc.batches import rows
from dpfunc.engines.loop import loop
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf._facts import Facts, base_model, evaluating, facts_of_model
from dpfunc.hf.losses import IGNORED
from dpfunc.hf.tasks import CLASSES, problem_of, task_of
from dpfunc.rng import cpu_generators, cpu_seeds, insecure_key, torch_seed
from dpfunc.sampling.records import collated, read, spread
from dpfunc.sampling.users import MeanOverTexts
from dpfunc.types import Batch, LossFn, Params

_COLUMNS = ("labels", "label", "label_ids")  # collators of Transformers take each of them for the labels
_TASKS = ("sequence_classification", "image_classification", "token_classification")
# Their outputs are choices, or two sentences: `num_labels` says nothing about them.
_OTHER_OUTPUTS = ("ForMultipleChoice", "ForNextSentencePrediction")
_PROBED = 16
_READ = 1024  # records of a data set that may read, tokenize or decode each; read at once of any
_AT_ONCE = 64  # records that are collated together
_COLLATED = 256  # records with pixels or sound, 30 ms each: a fault of one in 85 is found with probability 0.95
_LEARN_TOKENS = ("causal_lm", "masked_lm", "seq2seq", "vqa")  # tasks whose labels are token ids
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")  # may be in no table
_COMPARED = 64  # records whose lengths are compared
_ROUNDING, _ROUNDING_16_BITS = 0.02, 0.2  # of the gradient


def refuse_labels(
    dataset: Any, collate: Callable[[list[Any]], Any], model: nn.Module, loss: object, name: str = "train_dataset"
) -> str | None:  # fmt: skip
    """Refuse labels outside of the classes of the model, and numbers that are not finite, whose gradient would be zero.

    They are read from all records of a list or of Hugging Face, from 1024 of others, from 16 that the collator makes.
    Returns a warning if all of them are one class.
    """
    base = base_model(model)
    classes, task = getattr(getattr(base, "config", None), "num_labels", None), task_of(loss, model)
    if task not in _TASKS or not isinstance(classes, int) or not _has_outputs(base, classes):
        return None
    with torch_seed(insecure_key(0), accelerators=False):
        records = read(dataset, spread(len(dataset), _PROBED))
        people = isinstance(loss, MeanOverTexts) and not isinstance(records[0], Mapping)  # evaluated are single texts
        sample = _texts(records, people)
        batch = _collated(sample, (lambda texts: collate([[text] for text in texts])) if people else collate, name)
        seen = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(seen, Tensor):
            return None  # the loss says what it misses
        seen = seen[:, 0] if people else seen  # behind it are copies of the one text
        given = getattr(base.config, "problem_type", None)
        problem = CLASSES if task == "token_classification" else problem_of(given, classes, seen)
        column = _column_of(sample, seen)
        refuse(
            (problem == "multi_label_classification" and not seen.is_floating_point(),
             f"Expected floats in {column or 'labels'!r} of each record of {name}, for several labels, got "
             f"{seen.dtype}: the model's own loss, with which the Trainer evaluates, takes no others. Make them "
             "labels.float(). Nothing was spent."),
        )  # fmt: skip
        found: set[float] = set()
        for labels in [seen] if column is None else _labels(dataset, column, people):
            _check(_flat(labels), f"in {column or 'labels'!r} of each record of {name}", problem, classes)
            found.update(np.unique(_flat(labels)).tolist() if problem == CLASSES else ())
    if len(found - {IGNORED}) != 1 or len(dataset) < _PROBED:
        return None
    return (
        "All labels that were read of train_dataset are one class, which every record would be given. Is the data set "
        "whole? This line was computed from private data: do not publish it."
    )


def _has_outputs(base: nn.Module, classes: int) -> bool:
    """True if a layer has as many outputs as the configuration says, and they are classes."""
    widths = {getattr(module, name, None) for module in base.modules() for name in ("out_features", "out_channels")}
    return classes in widths and not type(base).__name__.endswith(_OTHER_OUTPUTS)


def _collated(sample: list[Any], collate: Callable[[list[Any]], Any], name: str) -> Any:
    try:
        return collate(sample)
    except ValueError as error:
        texts = [column for column in _COLUMNS if column in sample[0] and isinstance(sample[0][column], str)]
        if not texts:
            raise
        raise InvalidArgument(
            f"Expected numbers in {texts[0]!r} of each record of {name}, got a text, which the collator cannot make "
            "a tensor of. Number the classes from 0, and keep their names in model.config.id2label."
        ) from error


def _column_of(sample: list[Any], seen: Tensor) -> str | None:
    """The column that the collator takes for the labels, as far as a few records show; it may pad them."""
    for name in _COLUMNS:
        if all(isinstance(record, Mapping) and name in record for record in sample):
            try:
                found, expected = _flat([record[name] for record in sample]), _flat(seen)
            except (TypeError, ValueError):  # texts, of which the collator makes numbers
                continue
            if np.array_equal(found[found != IGNORED], expected[expected != IGNORED], equal_nan=True):
                return name
    return None


def _texts(records: list[Any], people: bool) -> list[Any]:
    return [text for person in records for text in person] if people else records


def _labels(dataset: Any, column: str, people: bool) -> Iterator[list[Any]]:
    """The labels of many records at a time."""
    form = getattr(dataset, "format", None)
    narrow = hasattr(dataset, "select_columns") and isinstance(form, Mapping) and form.get("type") != "custom"
    source = dataset.select_columns([column]) if narrow else dataset
    whole = narrow or isinstance(dataset, (list, tuple))
    indices = range(len(dataset)) if whole else spread(len(dataset), _READ)
    for start in range(0, len(indices), _READ):
        yield [record[column] for record in _texts(read(source, indices[start : start + _READ]), people)]


def _flat(labels: Any) -> npt.NDArray[np.float64]:
    """Numbers in nested lists, arrays and tensors, in their order."""
    labels = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(labels, (list, tuple)) and any(hasattr(e, "tolist") or isinstance(e, (list, tuple)) for e in labels):
        return np.concatenate([_flat(each) for each in labels])
    return np.atleast_1d(np.asarray(labels, dtype=np.float64))


def _check(labels: npt.NDArray[np.float64], where: str, problem: str, classes: int) -> None:
    if problem == "regression":
        with np.errstate(over="ignore"):  # the loss has float32
            fits = np.isfinite(labels.astype(np.float32))
        domain, hint = "finite numbers", "Leave out the records that have none."
    elif problem == "multi_label_classification":
        fits = (labels >= 0) & (labels <= 1)
        domain = f"{classes} numbers from 0 to 1"
        hint = "One class a record is a whole number; to predict numbers, set model.config.problem_type = 'regression'."
    else:
        fits = (labels >= 0) & (labels < classes) & (labels == np.trunc(labels)) | (labels == IGNORED)
        domain = f"classes 0 <= label < {classes}, or {IGNORED} for none,"
        hint = (
            f"The model has {classes} classes: number them from 0, or load it with num_labels=... Leave out records "
            "without a class, which some data sets mark with -1."
        )
    refuse(
        (not fits.all(),
         f"Expected {domain} {where}, got something else in at least one, which is private and not shown. {hint} "
         "Nothing was spent."),
    )  # fmt: skip


def refuse_records(dataset: Any, collate: Callable[[list[Any]], Any], model: Any, loss: object, name: str) -> None:
    """Refuse token ids and types outside of the tables of a model, and records with no token, or more than it takes.

    Every record of a text data set is collated, and 256 of one whose batches hold floats, e.g. pixels
    (tests/hf/trainer/test_rehearsal.py::test_one_record_in_the_midst_of_many). No value is in a message.
    """
    facts = facts_of_model(model)
    if facts.tables.tokens is None:
        return
    config = getattr(base_model(model), "config", None)
    elsewhere = [getattr(config, token) for token in _IMAGE_TOKENS if isinstance(getattr(config, token, None), int)]
    labels = ("labels",) if task_of(loss, model) in _LEARN_TOKENS else ()
    kinds = getattr(config, "type_vocab_size", None)
    with cpu_seeds(insecure_key(0)), torch_seed(insecure_key(0), accelerators=False):
        for batch in _batches(dataset, collate, name):
            refuse(
                (kinds and bool((torch.as_tensor(batch.get("token_type_ids", 0)) >= kinds).any()),
                 f"Expected 'token_type_ids' below {kinds} in each record of {name}, the types that this model knows, "
                 "got another in at least one, which is private and not shown. Use the tokenizer that belongs to the "
                 "model, or leave the column out. Nothing was spent."),
            )  # fmt: skip
            for key in ("input_ids", "decoder_input_ids", *labels):
                ids = batch.get(key)
                if isinstance(ids, Tensor) and not ids.is_floating_point():
                    _check_tokens(ids, key, batch, facts, elsewhere, name)


def evaluated(eval_dataset: Any) -> dict[str, Any]:
    """The data sets of which records can be read by their index, no streams, by names; one alone has the empty name.

    An empty one is refused.
    """
    every = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    indexed = {name: each for name, each in every.items() if not isinstance(each, IterableDataset)}
    found = {name: each for name, each in indexed.items() if hasattr(each, "__len__")}
    if empty := [name or "eval_dataset" for name, each in found.items() if not len(each)]:
        raise InvalidArgument(
            f"Expected records in each data set to evaluate on, got none in {empty[0]!r}: an evaluation of it has no "
            "loss and no metrics. Leave it out (eval_dataset=None), or look how it was split. Nothing was spent."
        )
    return found


def _batches(dataset: Any, collate: Callable[[list[Any]], Any], name: str) -> Iterator[Mapping[str, Any]]:
    """All records, collated, of a data set of texts, and some of any other; none where collating makes no mapping."""
    indices: Any = range(len(dataset))
    start = 0
    while start < len(indices):
        records = read(dataset, indices[start : start + _AT_ONCE])
        refuse(
            (any(map(_without_token, records)),
             f"Expected a token or more in each record of {name}, got at least one of none, as empty lines give: a "
             "batch of it alone would end the run. Leave them out, e.g. dataset.filter(lambda row: "
             "len(row['input_ids']) > 0). Nothing was spent."),
        )  # fmt: skip
        batch = collate(records)
        if not isinstance(batch, Mapping):
            return
        yield batch
        start += _AT_ONCE
        tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1]
        if len(indices) > _COLLATED and any(value.is_floating_point() for value in tensors):
            indices, start = spread(len(dataset), _COLLATED), 0


def _without_token(record: Any) -> bool:
    if isinstance(record, (list, tuple)):  # the texts of a person
        return any(map(_without_token, record))
    ids = record.get("input_ids", "-") if isinstance(record, Mapping) else "-"
    return ids is None or len(ids) == 0


def _check_tokens(
    ids: Tensor, key: str, batch: Mapping[str, Any], facts: Facts, elsewhere: list[int], name: str
) -> None:  # fmt: skip
    tables = facts.tables
    known = (ids >= 0) & (ids < (tables.tokens or 0)) | torch.isin(ids, ids.new_tensor(elsewhere))
    if key == "labels":
        used = ids != IGNORED
        known |= ~used
    else:
        mask = batch.get("attention_mask" if key == "input_ids" else "decoder_attention_mask")
        used = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else ids == ids
    where = f"{f', or {IGNORED} for none,' if key == 'labels' else ''} in {key!r} of each record of {name}"
    length = facts.soft_prompt + int(used.sum(-1).max()) if used.numel() and used.dim() > 1 else 0
    tables.refuse(known=bool(known.all()), length=length, where=where)


def refuse_padding(
    loss_fn: LossFn, params: Params, model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Any],
    prepare: Callable[[Any], Mapping[str, Any]],
) -> None:  # fmt: skip
    """Refuse a model whose gradient of a short row changes when the row is padded to a longer one.

    Of 64 records the shortest that has a gradient is computed alone, and in a batch with the longest, in evaluation
    mode; where that can be repeated. No number is in the message (tests/hf/trainer/test_data.py::test_models).
    """
    with cpu_seeds(insecure_key(0)):
        records = read(dataset, spread(len(dataset), _COMPARED))
    alone = [batch for record in records if (batch := _without_draws(collate, [record])) is not None]
    if len(alone) < len(records):
        return

    def gradient(batch: Batch) -> Params:
        """The gradient of a batch of one row, with the same random numbers at each call."""
        with cpu_seeds(insecure_key(0)):
            per_sample = loop()(loss_fn, params, dict(prepare(batch)))
        return per_sample.weighted_sum({name: torch.ones(1, device=param.device) for name, param in params.items()})

    with evaluating(model):
        compared = _two_gradients(gradient, collate, records, alone)
    if compared is None:
        return
    one, other = compared
    narrow = any(value.is_floating_point() and value.element_size() < 4 for value in model.parameters())
    limit = _ROUNDING_16_BITS if narrow else _ROUNDING
    if _norm({name: one[name] - other[name] for name in one}) > limit * max(_norm(one), _norm(other)):
        raise UnsupportedModel(
            "Expected the gradient of a short row to stay when the row is padded to a longer one, got another one "
            f"of {type(model).__name__}. The longest record of a batch would change the gradients of all others, and "
            "epsilon would not hold. Pad all rows to one length, in the data set or the collator "
            '(padding="max_length"); or pad on the other side, or with a mask. See docs/padding.md. Nothing was spent.'
        )


def _two_gradients(
    gradient: Callable[[Batch], Params], collate: Callable[[list[Any]], Any], records: list[Any], alone: list[Batch]
) -> tuple[Params, Params] | None:
    """The gradient of the shortest row that has one: alone, and beside the longest; None where that cannot be."""
    sizes = [sum(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)) for batch in alone]
    longest = sizes.index(max(sizes))
    for index in sorted(range(len(records)), key=sizes.__getitem__):
        if sizes[index] == sizes[longest]:
            return None
        one = gradient(alone[index])
        if _norm(one) > 0:
            both = _without_draws(collate, [records[index], records[longest]])
            return None if both is None else (one, gradient(rows(both, 0, 1)))
    return None


def _without_draws(collate: Callable[[list[Any]], Any], records: list[Any]) -> Batch | None:
    """A batch of copies; None if there are none, or the collator drew random numbers, which are those of its seed."""
    with cpu_seeds(insecure_key(0)):
        before = cpu_generators()
        batch = collated(collate, records)
        return batch if before == cpu_generators() else None


def _norm(gradient: Params) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))
