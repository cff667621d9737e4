"""Records of a job: rows of its tables as inputs of the model, and their collation into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfunc.errors import InvalidArgument
from dpfunc.train.config import DataSection, Job
from dpfunc.train.tables import Row, Table, read_table, split

IGNORED = -100
PADDING = 32  # few lengths of batches: engines look at each shape once


@dataclass(frozen=True)
class Records:
    """Records to train on and to evaluate on, with what was left out. Private, numbers included.

    Args:
        train, evaluation: one item a record. duplicates: rows left out.
    """

    train: tuple[Mapping[str, Any], ...]
    evaluation: tuple[Mapping[str, Any], ...]
    duplicates: int


@dataclass(frozen=True)
class PadRight:
    """A collator that pads on the right, to a multiple of `multiple` and at most to `max_length`.

    >>> batch = PadRight(pad=0, max_length=8, multiple=4)([{"input_ids": [5, 6], "labels": [-100, 6]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 0, 0]], [[-100, 6, -100, -100]])
    """

    pad: int
    max_length: int
    multiple: int = PADDING

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch: input_ids, attention_mask (B, T), and labels (B, T) or (B,); int64."""
        longest = max((len(record["input_ids"]) for record in records), default=1)
        length = min(-(-longest // self.multiple) * self.multiple, self.max_length)

        def rows(name: str, fill: int) -> Tensor:
            return torch.tensor([[*r[name], *[fill] * (length - len(r[name]))] for r in records], dtype=torch.long)

        lengths = torch.tensor([len(record["input_ids"]) for record in records], dtype=torch.long)
        mask = (torch.arange(length) < lengths[:, None]).long()
        if records and isinstance(records[0]["labels"], int):
            labels = torch.tensor([record["labels"] for record in records], dtype=torch.long)
        else:
            labels = rows("labels", IGNORED)
        return {"input_ids": rows("input_ids", self.pad), "attention_mask": mask, "labels": labels}


def _columns_of(job: Job) -> tuple[str, ...]:
    """The columns that the job reads."""
    data = job.data
    if job.task == "text_classification":
        return data.text_column, data.label_column
    if job.task == "vqa":
        return data.image_column, data.question_column, data.answer_column
    if data.prompt_column is not None and data.response_column is not None:
        return data.prompt_column, data.response_column
    return tuple(dict.fromkeys((*data.placeholders(), data.text_column)))


def read_records(job: Job, processing: Any) -> Records:  # noqa: ANN401  (tokenizer or processor)
    """Read the training and evaluation records of a job.

    Args:
        job: its section data. processing: as from `load_processing`.

    Raises:
        InvalidArgument: a table, a label or an image that cannot be used; the row is named by its number.
    """
    data, columns = job.data, _columns_of(job)
    if job.task == "text_classification" and data.labels is None:
        raise InvalidArgument(
            "Expected data.labels, the list of classes, e.g. [ham, spam]. They are published with the model, so they "
            "are not read off the private table."
        )
    table = _checked(job, read_table(data.train, columns, deduplicate=data.deduplicate), data.train)
    train, held_out = split(table.rows, data.eval_fraction, job.training.seed)
    evaluation = data.train if data.eval is None else data.eval
    if data.eval is not None:
        held_out = _checked(job, read_table(data.eval, columns, deduplicate=False), data.eval).rows
    if not train:
        raise InvalidArgument(f"Expected records to train on in {data.train!r}, got none after the split.")
    return Records(
        tuple(_record(job, processing, row, Path(data.train)) for row in train),
        tuple(_record(job, processing, row, Path(evaluation)) for row in held_out),
        table.duplicates,
    )


def count_records(job: Job) -> int:
    """Number of records that a job trains on; nothing else of its table is looked at."""
    table = read_table(job.data.train, _columns_of(job), deduplicate=job.data.deduplicate)
    return len(split(table.rows, job.data.eval_fraction, job.training.seed)[0])


def _checked(job: Job, table: Table, file: str) -> Table:
    """The table, if its labels are known and its images are there."""
    path, labels = Path(file), job.data.labels or ()
    for number, row in zip(table.numbers, table.rows, strict=True):
        if job.task == "text_classification" and row[job.data.label_column] not in labels:
            raise InvalidArgument(
                f"Expected one of data.labels ({', '.join(labels)}) in row {number} of {path.name}, got another."
            )
        if job.task == "vqa":
            _check_image(path.parent / row[job.data.image_column], number, path)
    return table


def _check_image(image: Path, number: int, table: Path) -> None:
    """Check the header of an image, before anything is spent."""
    from dpfunc.hf.vision_language.reading import opened_image

    if not image.is_file():
        raise InvalidArgument(f"Expected an image file for row {number} of {table.name}, which is missing.")
    try:
        with opened_image(image):
            return
    except InvalidArgument as error:
        raise InvalidArgument(f"The image of row {number} of {table.name} cannot be used. {error}") from None


def _record(job: Job, processing: Any, row: Row, table: Path) -> Mapping[str, Any]:  # noqa: ANN401
    data = job.data
    if job.task == "text_classification":
        ids = processing(row[data.text_column], truncation=True, max_length=data.max_length)["input_ids"]
        return {"input_ids": list(ids), "labels": (data.labels or ()).index(row[data.label_column])}
    if job.task == "causal_lm":
        return language_record(processing, *_prompt_and_response(data, row), data)
    question = row[data.question_column]
    if not processing.chat_template:
        question = f"{processing.image_token} {question}"
    return {"prompt": question, "answer": row[data.answer_column], "image": str(table.parent / row[data.image_column])}


def _prompt_and_response(data: DataSection, row: Row) -> tuple[str, str]:
    """Prompt of a row, and the response that the language model learns."""
    if data.prompt_column is not None and data.response_column is not None:
        return row[data.prompt_column], row[data.response_column]
    prompt = "" if data.prompt_template is None else data.prompt_template.format(**row)
    return prompt, row[data.text_column]


def prompt_ids(tokenizer: Any, prompt: str, limit: int) -> list[int]:  # noqa: ANN401
    """Tokens of a prompt after a start token: the same in training and in generation. A long prompt loses its start."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    return [first, *ids[len(ids) - min(len(ids), limit - 1) :]]


def language_record(tokenizer: Any, prompt: str, response: str, data: DataSection) -> Mapping[str, Any]:  # noqa: ANN401
    """Start token, prompt, response and end token, at most max_length; the prompt takes at most half of it."""
    before = prompt_ids(tokenizer, prompt, max(1, data.max_length // 2))
    after = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = [*before, *after][: data.max_length]
    hidden = len(before) if data.loss_on == "response" else 1
    return {"input_ids": ids, "labels": [IGNORED] * hidden + ids[hidden:]}


def collator(job: Job, processing: Any, *, longest: bool = False) -> Any:  # noqa: ANN401  (a collate function)
    """Make the function that collates records of a job into a batch.

    Args:
        job, processing: of the records. longest: pad to max_length, whatever the records are.
    """
    if job.task == "vqa":
        from dpfunc.hf.vision_language.images import image_text_collator

        return image_text_collator(processing, max_length=job.data.max_length, chat=bool(processing.chat_template))
    limit = job.data.max_length
    return PadRight(processing.pad_token_id, limit, limit if longest else PADDING)
