"""Rows of a table as inputs of the model: which columns a task reads, what it refuses, and what it makes of a row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpfunc.errors import InvalidArgument
from dpfunc.hf.losses import IGNORED
from dpfunc.train.config import DataSection, Job
from dpfunc.train.tables import Row


def columns_of(job: Job) -> tuple[str, ...]:
    """The columns that the job reads, besides that of its unit."""
    data = job.data
    if job.task == "vqa":
        return data.image_column, data.question_column, data.answer_column
    if job.task in ("causal_lm", "seq2seq"):
        if data.prompt_column is not None and data.response_column is not None:
            return data.prompt_column, data.response_column
        return tuple(dict.fromkeys((*data.placeholders(), data.text_column)))
    pair = () if data.text_pair_column is None else (data.text_pair_column,)
    return (data.text_column, *pair, data.label_column)


def lists_of(job: Job) -> tuple[str, ...]:
    """The columns that may hold a list of texts."""
    data = job.data
    if job.task == "token_classification":
        return data.text_column, data.label_column
    return (data.image_column,) if job.task == "vqa" and data.max_images > 1 else ()


def check_row(job: Job, row: Row, where: str, folder: Path) -> None:
    """Check the label or the images of a row, before anything is spent; no message shows anything of the row.

    Guarantees:
        tests/train/test_inputs.py::test_rows_that_cannot_be_used_are_named_by_number.
    """
    if job.task == "text_classification":
        _check_known([row[job.data.label_column]], job.data, where)
    elif job.task == "text_regression":
        _check_number(row[job.data.label_column], job.data, where)
    elif job.task == "token_classification":
        _check_words(_texts(row[job.data.text_column]), _texts(row[job.data.label_column]), job.data, where)
    elif job.task == "vqa":
        _check_images(_images(job.data, row), job.data, where, folder)


def _check_known(given: list[str], data: DataSection, where: str) -> None:
    labels = data.labels or ()
    others = set(given) - set(labels)
    if others:
        alike = {label.strip().casefold() for label in labels} & {label.strip().casefold() for label in others}
        hint = "an empty one" if others == {""} else "another"
        hint += ", which differs in capitals or in spaces around it" if alike else ""
        raise InvalidArgument(f"Expected one of data.labels ({', '.join(labels)}) in {where}, got {hint}.")


def _check_number(text: str, data: DataSection, where: str) -> None:
    try:
        finite = math.isfinite(float(text))
    except ValueError:
        finite = False
    if not finite:
        raise InvalidArgument(f"Expected a finite number in the column {data.label_column!r} in {where}, got another.")


def _check_words(words: list[str], given: list[str], data: DataSection, where: str) -> None:
    if not words or len(words) != len(given):
        raise InvalidArgument(
            f"Expected words and one label for each in {where}, got {len(words)} words and {len(given)} labels. Write "
            "two lists, or two texts with spaces between the words and between the labels."
        )
    _check_known(given, data, where)


def _check_images(images: list[str], data: DataSection, where: str, folder: Path) -> None:
    if len(images) > data.max_images:
        raise InvalidArgument(
            f"Expected at most data.max_images={data.max_images} images in {where}, got {len(images)}. It is public: "
            "choose it for all records that there could be."
        )
    for image in images:
        _check_image(folder / image, where)


def _check_image(image: Path, where: str) -> None:
    """Check that an image can be read to its end: a run must not die when it draws the record."""
    if not image.is_file():
        raise InvalidArgument(f"Expected an image file for {where}, which is missing.")
    error = _unreadable(image, image.stat().st_mtime_ns, image.stat().st_size)
    if error is not None:
        raise InvalidArgument(f"The image of {where} cannot be used. {error}")


@lru_cache(maxsize=2**20)
def _unreadable(image: Path, changed: int, size: int) -> str | None:
    """The reason why an image cannot be read, if so. One that many rows show is read once."""
    from dpfunc.hf.vision_language._reading import check_readable

    try:
        check_readable(image)
    except InvalidArgument as error:
        return str(error)
    return None


def record_of(job: Job, processing: Any, row: Row, folder: Path) -> Mapping[str, Any]:
    """Make the record of a row: token ids and labels, or what the collator of images takes."""
    data = job.data
    if job.task == "causal_lm":
        return language_record(processing, *_prompt_and_response(data, row), data)
    if job.task == "seq2seq":
        return _translated(processing, *_prompt_and_response(data, row), data.max_length)
    if job.task == "vqa":
        return _asked(processing, row, data, folder)
    if job.task == "token_classification":
        return _labelled(processing, row, data)
    label = row[data.label_column]
    pair = () if data.text_pair_column is None else (row[data.text_pair_column],)
    encoded = processing(row[data.text_column], *pair, truncation=True, max_length=data.max_length)
    return {
        "input_ids": list(encoded["input_ids"]),
        **({"token_type_ids": list(encoded["token_type_ids"])} if pair and "token_type_ids" in encoded else {}),
        "labels": float(label) if job.task == "text_regression" else (data.labels or ()).index(label),
    }


def _texts(value: str) -> list[str]:
    """The list in a column of lists; words of a text."""
    found = json.loads(value)
    return found.split() if isinstance(found, str) else list(found)


def _images(data: DataSection, row: Row) -> list[str]:
    """The paths of the images of a row."""
    if data.max_images == 1:
        return [row[data.image_column]]
    found = json.loads(row[data.image_column])
    return [found] if isinstance(found, str) else list(found)


def _labelled(tokenizer: Any, row: Row, data: DataSection) -> Mapping[str, Any]:
    """Words with a label at the first token of each; what is cut off has none."""
    given = [(data.labels or ()).index(label) for label in _texts(row[data.label_column])]
    encoded = tokenizer(
        _texts(row[data.text_column]), is_split_into_words=True, truncation=True, max_length=data.max_length
    )
    words = encoded.word_ids()
    first = [word is not None and word != before for word, before in zip(words, [None, *words], strict=False)]
    labels = [given[word] if begins else IGNORED for word, begins in zip(words, first, strict=True)]
    return {"input_ids": list(encoded["input_ids"]), "labels": labels}


def _translated(tokenizer: Any, prompt: str, response: str, limit: int) -> Mapping[str, Any]:
    """Tokens that the encoder reads, and those that the decoder learns, with an end token."""
    ids = tokenizer(prompt, truncation=True, max_length=limit)["input_ids"]
    learnt = list(tokenizer(text_target=response, truncation=True, max_length=limit)["input_ids"])
    if tokenizer.eos_token_id not in learnt:
        learnt = [*learnt[: limit - 1], tokenizer.eos_token_id]
    return {"input_ids": list(ids), "labels": learnt}


def _asked(processor: Any, row: Row, data: DataSection, folder: Path) -> Mapping[str, Any]:
    """Question, answer and paths of the images; without a chat template the images are put before the question.

    Marks of images that the texts have, as those of LLaVA's tables, are taken out: each image has one mark, put here.
    """
    images = [str(folder / image) for image in _images(data, row)]
    question, answer = (
        row[column].replace(processor.image_token, "").strip() for column in (data.question_column, data.answer_column)
    )
    if not processor.chat_template:
        question = " ".join([*[processor.image_token] * len(images), question])
    shown = {"image": images[0]} if data.max_images == 1 else {"images": images}
    return {"prompt": question, "answer": answer, **shown}


def _prompt_and_response(data: DataSection, row: Row) -> tuple[str, str]:
    """Prompt of a row, and the response that the model learns."""
    if data.prompt_column is not None and data.response_column is not None:
        return row[data.prompt_column], row[data.response_column]
    prompt = "" if data.prompt_template is None else data.prompt_template.format(**row)
    return prompt, row[data.text_column]


def prompt_ids(tokenizer: Any, prompt: str, limit: int) -> list[int]:
    """Tokens of a prompt after a start token: the same in training and in generation. A long prompt loses its start."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    return [first, *ids[len(ids) - min(len(ids), limit - 1) :]]


def language_record(tokenizer: Any, prompt: str, response: str, data: DataSection) -> Mapping[str, Any]:
    """Start token, prompt, response and end token, at most max_length; the prompt takes at most half of it."""
    before = prompt_ids(tokenizer, prompt, max(1, data.max_length // 2))
    after = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = [*before, *after][: data.max_length]
    hidden = len(before) if data.loss_on == "response" else 1
    return {"input_ids": ids, "labels": [IGNORED] * hidden + ids[hidden:]}
