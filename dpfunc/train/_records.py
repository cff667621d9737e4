"""What the model gets of a row: the record of each task. No message shows anything of the row.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.features.tables import number_of
from dpfunc.hf import chats
from dpfunc.hf.losses import IGNORED
from dpfunc.hf.pairs import distinct, pair_messages, pair_tokens
from dpfunc.hf.preferences import ANSWERS
from dpfunc.hf.vision_language._images import check_readable, messages_with_images
from dpfunc.train._columns import columns_of, learnt_columns
from dpfunc.train.config import DataSection, Job
from dpfunc.train.tables import TURNS, Row


def record_of(job: Job, processing: Any, row: Row, folder: Path, where: str = "a made-up row") -> Mapping[str, Any]:
    """The record of a row, if it can be used; no message shows anything of the row.

    It has token ids and labels, or what the collator of images takes, or the source of its features.
    """
    data = job.data
    written = job.task == "preference" and not data.chat
    turns = [column for column in columns_of(job) if written and chats.written_turns(row[column])]
    refuse(
        (turns,
         f"Expected texts in {where}, got turns of a chat, written as a text, in {', '.join(turns)}. {TURNS}"),
    )  # fmt: skip
    if data.chat or job.task == "preference":
        try:
            record = _chat_record(job, processing, row, folder) if data.chat else _pair_record(job, processing, row)
        except InvalidArgument as error:
            what = "pair" if job.task == "preference" else "chat"
            raise InvalidArgument(f"The {what} in {where} cannot be used. {error}") from None
        if job.task == "vqa":
            _check_images(record["images"], data, where)
        return record
    match job.task:
        case "causal_lm":
            return language_record(processing, _prompt(row, data), row[learnt_columns(job)[0]], data)
        case "seq2seq":
            return _seq2seq_record(processing, _prompt(row, data), row[learnt_columns(job)[0]], data)
        case "vqa":
            return _vqa_record(processing, row, data, folder, where)
        case "token_classification":
            return _token_labels_record(processing, row, data, where)
        case "text_regression":
            number = number_of(row[data.label_column])
            refuse(
                (not math.isfinite(number),
                 f"Expected a finite number in the column {data.label_column!r} in {where}, got another."),
            )  # fmt: skip
            return {**_token_ids(processing, row, data), "labels": number}
    [label] = _classes([row[data.label_column]], data, where)
    if job.task == "image_classification":
        _check_image(folder / row["image"], where)
        return {"source": folder / row["image"], "labels": label}
    of_row = {"source": row} if job.task == "table_classification" else _token_ids(processing, row, data)
    return {**of_row, "labels": label}


def prompt_ids(tokenizer: Any, prompt: str, limit: int) -> list[int]:
    """Tokens of a prompt after a start token: the same in training and in generation. A long prompt loses its start.

    Tokenizers are silent: their warning of a long text says how long it is.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
    return [first, *ids[len(ids) - min(len(ids), limit - 1) :]]


def language_record(tokenizer: Any, prompt: str, response: str, data: DataSection) -> Mapping[str, Any]:
    """Start token, prompt, response and end token, at most max_length; the prompt takes at most half of it."""
    before = prompt_ids(tokenizer, prompt, max(1, data.max_length // 2))
    after = [*tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
    ids = [*before, *after][: data.max_length]
    hidden = len(before) if data.loss_on == "response" else 1
    return {"input_ids": ids, "labels": [IGNORED] * hidden + ids[hidden:]}


def _classes(given: Sequence[str], data: DataSection, where: str) -> list[int]:
    """The numbers of the classes with these labels."""
    labels = data.classes
    if others := {*given} - {*labels}:
        alike = {label.strip().casefold() for label in labels} & {label.strip().casefold() for label in others}
        hint = "an empty one" if others == {""} else "another"
        hint += ", which differs in capitals or in spaces around it" if alike else ""
        raise InvalidArgument(f"Expected one of data.labels ({', '.join(labels)}) in {where}, got {hint}.")
    return [labels.index(label) for label in given]


def _check_images(images: Sequence[str], data: DataSection, where: str) -> None:
    """Check the number of images of a record, and each of them."""
    refuse(
        (len(images) > data.max_images,
         f"Expected at most data.max_images={data.max_images} images in {where}, got more. It is "
         "public: choose it for all records that there could be."),
    )  # fmt: skip
    for image in images:
        _check_image(Path(image), where)


def _check_image(image: Path, where: str) -> None:
    """Check that an image can be read to its end: a run must not die when it draws the record."""
    refuse((not image.is_file(), f"Expected an image file for {where}, which is missing."))
    try:
        _read_once(image, image.stat().st_mtime_ns, image.stat().st_size)
    except InvalidArgument as error:
        raise InvalidArgument(f"The image of {where} cannot be used. {error}") from error


@lru_cache(maxsize=2**20)
def _read_once(image: Path, changed: int, size: int) -> None:
    """Read an image, which many rows may show."""
    check_readable(image)


def _pair_record(job: Job, tokenizer: Any, row: Row) -> Mapping[str, Any]:
    """Token ids and labels of both answers to the prompt of a row."""
    prompt, data = _prompt(row, job.data), job.data
    answers = zip(ANSWERS, learnt_columns(job), strict=True)
    return distinct({
        name: language_record(tokenizer, prompt, row[column], data) for name, column in answers
    }, data.max_length)  # fmt: skip


def _prompt(row: Row, data: DataSection) -> str:
    """The prompt of a row: from its column, or from its template."""
    return row[data.prompt_column] if data.prompt_column else (data.prompt_template or "").format(**row)


def _token_ids(tokenizer: Any, row: Row, data: DataSection) -> dict[str, Any]:
    """Token ids of a text, or of two, whose tokens are of two types if the tokenizer has these."""
    pair = [row[data.text_pair_column]] if data.text_pair_column else []
    encoded = tokenizer(row[data.text_column], *pair, truncation=True, max_length=data.max_length)
    names = ["input_ids", "token_type_ids"] if pair and "token_type_ids" in encoded else ["input_ids"]
    return {name: list(encoded[name]) for name in names}


def _texts_in(value: str, whole: bool = False) -> list[str]:
    """The list in a column of lists; the words of a text, or the whole text alone."""
    listed = json.loads(value)
    if isinstance(listed, str):
        return [listed] if whole else listed.split()
    refuse(
        (not isinstance(listed, list) or any(not isinstance(each, str) for each in listed),
         "Expected a path, or a list of paths, of the images of a chat, got another value. Of an object write its "
         "path."),
    )  # fmt: skip
    return cast(list[str], listed)


def _values(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    """The values of JSON in columns; turns, or one column alone, may be a text of JSON in it, as a .csv has them."""
    values = {column: json.loads(row[column]) if row[column] else None for column in columns}
    for column, value in values.items():
        if isinstance(value, str) and (len(columns) == 1 or chats.written_turns(value)):
            with suppress(ValueError, RecursionError):
                values[column] = json.loads(value)
    return values


def _chat_record(job: Job, processing: Any, row: Row, folder: Path) -> Mapping[str, Any]:
    """Token ids and labels of a chat, or of both of a pair; or the chat with the paths of its images."""
    data, tools, values = job.data, None, _values(row, job.data.chat or ())
    if data.tools_column is not None:
        tools = _values(row, [data.tools_column])[data.tools_column]
    if job.task == "preference":
        return pair_tokens(processing, pair_messages(values, data.chat), max_length=data.max_length, tools=tools)
    turns = chats.chat_messages(values, data.chat)
    if job.task == "vqa":
        images = chats.images(turns) or _texts_in(row[data.image_column] or "[]", whole=True)
        sample = {"messages": turns, "images": [str(folder / image) for image in images]}
        messages_with_images(processing, sample)
        return sample
    return chats.chat_tokens(
        processing, turns, max_length=data.max_length, tools=tools,
        learn="assistant" if data.loss_on == "response" else "all",
    )  # fmt: skip


def _token_labels_record(tokenizer: Any, row: Row, data: DataSection, where: str) -> Mapping[str, Any]:
    """Words with a label at the first token of each; what is cut off has none."""
    words, given = _texts_in(row[data.text_column]), _texts_in(row[data.label_column])
    refuse(
        (not words or len(words) != len(given),
         f"Expected words and one label for each in {where}, got another number of them. "
         "Write two lists, or two texts with spaces between the words and between the labels."),
    )  # fmt: skip
    classes = _classes(given, data, where)
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=data.max_length)
    places = encoded.word_ids()
    labels = [
        IGNORED if place is None or place == before else classes[place]
        for place, before in zip(places, [None, *places], strict=False)
    ]
    return {"input_ids": list(encoded["input_ids"]), "labels": labels}


def _seq2seq_record(tokenizer: Any, prompt: str, response: str, data: DataSection) -> Mapping[str, Any]:
    """Tokens that the encoder reads, and those that the decoder learns, with an end token."""
    limit = data.max_length
    learnt = list(tokenizer(text_target=response, truncation=True, max_length=limit)["input_ids"])
    if tokenizer.eos_token_id not in learnt:
        learnt = [*learnt[: limit - 1], tokenizer.eos_token_id]
    return {"input_ids": list(tokenizer(prompt, truncation=True, max_length=limit)["input_ids"]), "labels": learnt}


def _vqa_record(processor: Any, row: Row, data: DataSection, folder: Path, where: str) -> Mapping[str, Any]:
    """Question, answer and paths of the images; marks of images in the texts are taken out: each has one, put here."""
    of_row = row[data.image_column]
    images = [str(folder / image) for image in ([of_row] if data.max_images == 1 else _texts_in(of_row, whole=True))]
    _check_images(images, data, where)
    question, answer = (
        _unmarked(row[column], processor.image_token) for column in (data.question_column, data.answer_column)
    )
    if not processor.chat_template:
        question = " ".join([*[processor.image_token] * len(images), question])
    shown = {"image": images[0]} if data.max_images == 1 else {"images": images}
    return {"prompt": question, "answer": answer, **shown}


def _unmarked(text: str, mark: str) -> str:
    """A text without marks, also those that stand there once others inside of them are taken out."""
    while mark in text:
        text = text.replace(mark, "")
    return text.strip()
