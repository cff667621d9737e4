"""The records of a job: rows of its tables that can be used, held out or trained on, one by one or by person.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from dpfunc._utils.validation import refuse
from dpfunc.features.tables import TableFeatures
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling.users import group_by_person
from dpfunc.train._columns import columns_of, learnt_columns
from dpfunc.train._features import check_table
from dpfunc.train._records import record_of
from dpfunc.train._views import views_of
from dpfunc.train.config import FEATURES, LANGUAGE, Job
from dpfunc.train.tables import Row, Table, is_held_out, read_images, read_table

_Made = tuple[Row, Mapping[str, Any]]  # a row, and its record


@dataclass(frozen=True)
class Records:
    """Records to train on and to evaluate on. Private, numbers included."""

    train: tuple[Mapping[str, Any], ...]
    evaluation: tuple[Mapping[str, Any], ...]
    # Positions in `train` of the records of each person, where people are the unit.
    persons: tuple[range, ...] | None = None
    seen: bool = False  # evaluation records are trained on as well

    @property
    def units(self) -> tuple[Any, ...]:
        """The data set that batches are drawn from: records, or for each person the list of that person's records."""
        persons = self.persons
        return self.train if persons is None else tuple([self.train[place] for place in own] for own in persons)


def read_records(job: Job, processing: Any) -> Records:
    """Read the training and evaluation records of a job; messages name a row by its number."""
    # tests/train/test_dataset.py::test_one_person_more_changes_nothing_of_the_others
    data, unit = job.data, job.data.unit_column
    made = _read_rows(job, processing, data.train, unit, job.deduplicates)
    train, held_out = ([each for each in made if _is_held_out(job, each[0]) == side] for side in (False, True))
    if data.eval is not None:
        held_out = _read_rows(job, processing, data.eval, None, deduplicate=False)
    refuse((not train, f"Expected records to train on in {data.train!r}, got none after the split."))
    content = itemgetter(*columns_of(job))
    seen = not {content(row) for row, _ in train}.isdisjoint(content(row) for row, _ in held_out)
    persons = None
    if unit is not None:
        train, persons = _by_person(job, train, unit)
    trained_on, units = [record for _, record in train], len(train if persons is None else persons)
    _check_trainable(job, trained_on, units, len(held_out), processing)
    evaluated_on = with_features(processing, [record for _, record in held_out])
    return Records(with_features(processing, trained_on, views=job.privacy.dp_views), evaluated_on, persons, seen)


def num_vectors(job: Job, units: int, held_out: int) -> int:
    """Number of records, those to train on with all of their views, as far as it is public.

    Of a private number of records the bound is counted, and of those that are held out its share.
    """
    size, share = job.privacy.dp_dataset_size or units, job.data.eval_fraction
    if job.privacy.dp_dataset_size is not None and job.data.eval is None:
        held_out = math.ceil(size * job.data.units_size * share / (1 - share))
    return size * job.data.units_size * job.privacy.dp_views + held_out


def with_features(
    processing: Any, records: Sequence[Mapping[str, Any]], *, views: int = 1
) -> tuple[Mapping[str, Any], ...]:
    """Records with features in the place of their source, rows of one tensor: (K,) of each or (V, K) of V views.

    A tensor for each would lie between the fragments of the heap that computing it has left, which are 20 times as
    large as the features of a small image (test_features_take_the_memory_that_they_need).
    """
    if not records or "source" not in records[0]:
        return tuple(records)
    whole = torch.empty(len(records), *([] if views == 1 else [views]), processing.size)
    for x, record in zip(whole, records, strict=True):
        seen = [record["source"]] if views == 1 else views_of(record["source"], views)
        x.copy_(torch.stack([processing.encode(view) for view in seen]).view_as(x))
    return tuple({"features": x, "labels": record["labels"]} for x, record in zip(whole, records, strict=True))


def _check_trainable(job: Job, train: Sequence[Mapping[str, Any]], units: int, held_out: int, processing: Any) -> None:
    """Check that there are two classes, about as many records as the plan is for, and memory for their features."""
    data, bound, most = job.data, job.privacy.dp_dataset_size, job.training.cache_mib
    size = processing.size if job.task in FEATURES else 0
    what = "records" if job.privacy.dp_views == 1 else "views of records"
    vectors = num_vectors(job, units, held_out) if size else 0
    needed = -(-vectors * size * 4 // 2**20)
    refuse(
        (job.task in ("text_classification", *FEATURES) and len({record["labels"] for record in train}) == 1,
         f"Expected records of two classes or more to train on in {data.train!r}, got one class alone, which every "
         "record would be given. Check data.label_column, and that the table is whole."),
        (job.task in FEATURES and bound is not None and 2 * units < bound,
         f"Expected at least half of privacy.dp_dataset_size={bound} records, for which the noise is, got fewer. "
         "Is the table whole? Or choose a lower bound."),
        (needed > most,
         f"Expected features that take at most training.cache_mib={most} MiB, got {vectors} {what} of "
         f"{size} features, which take {needed}. Raise it, or take smaller images."),
    )  # fmt: skip


def _is_held_out(job: Job, row: Row) -> bool:
    """True for a row that is not trained on; images are divided by their content, not by their names."""
    unit = "digest" if job.task == "image_classification" else job.data.unit_column
    return is_held_out(row, job.data.eval_fraction, job.training.seed, unit)


def count_records(job: Job) -> int:
    """Number of records that a job trains on; nothing else of its table is looked at."""
    return sum(not _is_held_out(job, row) for row in _read(job, job.data.train, None, job.deduplicates).values())


def _read(job: Job, file: str, unit: str | None, deduplicate: bool) -> Table:
    """A table of the job, not yet checked."""
    if job.task == "image_classification":
        return read_images(Path(file), job.data.classes, job.data.label_column, deduplicate=deduplicate)
    data, lists = job.data, list[str]()  # columns that may hold a list of texts
    if job.task == "token_classification":
        lists = [data.text_column, data.label_column]
    elif job.task == "vqa" and data.max_images > 1:
        lists = [data.image_column]
    columns = columns_of(job)
    optional = [*(data.numbers or ()), *(data.categories or ())]
    if data.chat:  # the last has the answer; a chat may have no image and no tools, a question no second part
        optional = [*data.chat[1 : -len(learnt_columns(job))], *columns[len(data.chat) :]]
    elif job.task in LANGUAGE:  # a part of a prompt may be empty, what is learnt may not
        optional = [column for column in columns if column not in learnt_columns(job)]
    return read_table(
        file, tuple(dict.fromkeys((*columns, *([] if unit is None else [unit])))), deduplicate=deduplicate, unit=unit,
        lists=lists, values=columns if data.chat else (), optional=optional,
    )  # fmt: skip


def _read_rows(job: Job, processing: Any, file: str, unit: str | None, deduplicate: bool) -> list[_Made]:
    """The rows of a table and their records, if all can be used, and the columns are as the job says."""
    table, path = _read(job, file, unit, deduplicate), Path(file)
    made: list[_Made] = []
    for number, row in table.items():
        where = row["place"] if job.task == "image_classification" else f"row {number} of {path.name}"
        made.append((row, record_of(job, processing, row, path.parent, where)))
    if isinstance(processing, TableFeatures):
        check_table(processing, table, path.name)
    return made


def _by_person(job: Job, made: Sequence[_Made], unit: str) -> tuple[list[_Made], tuple[range, ...]]:
    """The rows and records that are used, person by person, and the range of places that each person has there."""
    key, limit = fold_in(insecure_key(job.training.seed), "records of a person"), job.data.units_size
    owned = group_by_person([row[unit] for row, _ in made], max_texts=limit, key=key).rows()
    ends = [0, *accumulate(map(len, owned))]
    return [made[place] for own in owned for place in own], tuple(range(*pair) for pair in pairwise(ends))


def seen_lines(records: Records) -> list[str]:
    """A warning of evaluation records that are trained on as well, without their number, which is private."""
    return [
        "WARNING: evaluation records are trained on as well: metrics will say little about new records. This line was "
        "computed from private data: do not publish it."
    ] * records.seen
