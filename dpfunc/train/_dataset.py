"""Records of a job: what is trained on and evaluated on, one by one or by person, and their collation into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.errors import InvalidArgument
from dpfunc.hf.losses import IGNORED
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling.users import CollatePersons, group_by_person
from dpfunc.train._inputs import check_row, columns_of, lists_of, record_of
from dpfunc.train.config import CLASSIFIES, Job
from dpfunc.train.tables import Row, Table, read_table, split

_PADDING = 32  # few lengths of batches: engines look at each shape once


@dataclass(frozen=True)
class Records:
    """Records to train on and to evaluate on, with what was left out. Private, numbers included."""

    train: tuple[Mapping[str, Any], ...]
    evaluation: tuple[Mapping[str, Any], ...]
    duplicates: int
    """Rows left out."""
    persons: tuple[range, ...] | None = None
    """Positions in `train` of the records of each person, where people are the unit."""
    above_limit: int = 0
    """Records left out because their person has more than `data.max_records_per_unit`."""
    seen: int = 0
    """Evaluation records that are trained on as well."""

    @property
    def units(self) -> tuple[Any, ...]:
        """The data set that batches are drawn from: records, or for each person the list of that person's records."""
        if self.persons is None:
            return self.train
        return tuple([self.train[place] for place in own] for own in self.persons)


@dataclass(frozen=True)
class PadRight:
    """A collator that pads on the right, to a multiple of `multiple` and at most to `max_length`.

    >>> batch = PadRight(pad=0, max_length=8, multiple=4)([{"input_ids": [5, 6], "labels": [-100, 6]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 0, 0]], [[-100, 6, -100, -100]])
    """

    pad: int
    max_length: int
    multiple: int = _PADDING

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch: input_ids (B, T) or hidden (B, T, D), with attention_mask; or features; labels (B, L) or (B,)."""
        first = records[0]
        if isinstance(first["labels"], int | float):
            labels = torch.tensor([record["labels"] for record in records])
        else:
            labels = self._rows(records, "labels", IGNORED)
        if "features" in first:
            return {"features": torch.stack([record["features"] for record in records]), "labels": labels}
        name, fill = ("hidden", 0) if "hidden" in first else ("input_ids", self.pad)
        rows = self._rows(records, name, fill)
        lengths = torch.tensor([len(record[name]) for record in records])
        batch = {name: rows, "attention_mask": (torch.arange(rows.shape[1]) < lengths[:, None]).long()}
        if "token_type_ids" in first:
            batch["token_type_ids"] = self._rows(records, "token_type_ids", 0)
        return {**batch, "labels": labels}

    def _rows(self, records: Sequence[Mapping[str, Any]], name: str, fill: int) -> Tensor:
        """Lists of integers (T,), or tensors (T, width), padded to one length."""
        given = (record[name] for record in records)
        values = [v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.long) for v in given]
        longest = max(map(len, values))
        length = min(-(-longest // self.multiple) * self.multiple, self.max_length)
        sides = [(0, 0) * (value.ndim - 1) + (0, length - len(value)) for value in values]
        return torch.stack([F.pad(value, side, value=fill) for value, side in zip(values, sides, strict=True)])


def read_records(job: Job, processing: Any) -> Records:
    """Read the training and evaluation records of a job; messages name a row by its number.

    One person more changes nothing of the others
    (tests/train/test_people.py::test_one_person_more_changes_nothing_of_the_others).
    """
    data, unit = job.data, job.data.unit_column
    if job.task in CLASSIFIES and data.labels is None:
        raise InvalidArgument(
            "Expected data.labels, the list of classes, e.g. [ham, spam]. They are published with the model, so they "
            "are not read off the private table."
        )
    table = _table(job, data.train, unit, data.deduplicate)
    train, held_out = split(table.rows, data.eval_fraction, job.training.seed, unit)
    if data.eval is not None:
        held_out = _table(job, data.eval, None, deduplicate=False).rows
    _check_trainable(job, train)
    columns = columns_of(job)
    known = {tuple(row[column] for column in columns) for row in train}
    seen = sum(tuple(row[column] for column in columns) in known for row in held_out)
    persons, above = None, 0
    if unit is not None:
        train, persons, above = _by_person(job, train, unit)
    trained_on, evaluated_on = (
        tuple(record_of(job, processing, row, Path(file).parent) for row in rows)
        for rows, file in ((train, data.train), (held_out, data.eval or data.train))
    )
    return Records(trained_on, evaluated_on, table.duplicates, persons, above, seen)


def _check_trainable(job: Job, train: Sequence[Row]) -> None:
    """Check that there are records to train on; classes of texts must be two or more."""
    data = job.data
    if not train:
        raise InvalidArgument(f"Expected records to train on in {data.train!r}, got none after the split.")
    if job.task == "text_classification" and len({row[data.label_column] for row in train}) == 1:
        raise InvalidArgument(
            f"Expected records of two classes or more to train on in {data.train!r}, got one class alone, which every "
            "text would be given. Check data.label_column, and that the table is whole."
        )


def count_records(job: Job) -> int:
    """Number of records that a job trains on; nothing else of its table is looked at."""
    table = read_table(job.data.train, columns_of(job), deduplicate=job.data.deduplicate, lists=lists_of(job))
    return len(split(table.rows, job.data.eval_fraction, job.training.seed)[0])


def _table(job: Job, file: str, unit: str | None, deduplicate: bool) -> Table:
    """A table of the job, if its labels are known and its images are there."""
    columns = tuple(dict.fromkeys((*columns_of(job), *([] if unit is None else [unit]))))
    table = read_table(file, columns, deduplicate=deduplicate, unit=unit, lists=lists_of(job))
    path = Path(file)
    for number, row in zip(table.numbers, table.rows, strict=True):
        check_row(job, row, f"row {number} of {path.name}", path.parent)
    return table


def _by_person(job: Job, rows: Sequence[Row], unit: str) -> tuple[tuple[Row, ...], tuple[range, ...], int]:
    """The rows that are used, the positions of each person's among them, and how many were left out."""
    key = fold_in(insecure_key(job.training.seed), "records of a person")
    limit = job.data.max_records_per_unit or 1
    found = group_by_person([row[unit] for row in rows], max_texts=limit, key=key)
    kept: list[Row] = []
    persons = []
    for own in found.rows():
        persons.append(range(len(kept), len(kept) + len(own)))
        kept += [rows[place] for place in own]
    return tuple(kept), tuple(persons), found.dropped


def left_out(records: Records) -> list[str]:
    """Lines on what was left out, and what is trained and evaluated on; numbers that are private."""
    lines = [f"{records.duplicates} exact duplicates were left out (a private number)."] * bool(records.duplicates)
    if records.persons is not None:
        lines.append(
            f"{len(records.persons)} people with {len(records.train)} records are trained on; {records.above_limit} "
            "records above max_records_per_unit were left out (private numbers)."
        )
    return lines + seen_lines(records)


def seen_lines(records: Records) -> list[str]:
    """A warning of evaluation records that are trained on as well."""
    number = f"{records.seen} of {len(records.evaluation)}"
    text = f"WARNING: {number} evaluation records are trained on as well (private numbers): metrics will say little "
    return [f"{text}about new records."] if records.seen else []


def collator(job: Job, processing: Any, *, longest: bool = False) -> Any:
    """Make the function that collates records of a job, or people with their records, into a batch."""
    data = job.data
    if job.task == "vqa":
        from dpfunc.hf.vision_language.images import image_text_collator

        height_and_width = None if data.image_size is None else (data.image_size[0], data.image_size[1])
        collate: Any = image_text_collator(
            processing, max_length=data.max_length, max_images=data.max_images, image_size=height_and_width,
            chat=bool(processing.chat_template),
        )  # fmt: skip
    else:
        collate = PadRight(processing.pad_token_id, data.max_length, data.max_length if longest else _PADDING)
    limit = data.max_records_per_unit
    return collate if limit is None else CollatePersons(collate, limit)
