"""Records of a job: rows of a table, what is refused, what the model gets, one by one or by person, and batches.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.features.tables import TableFeatures, number_of
from dpfunc.hf import chats
from dpfunc.hf.losses import IGNORED
from dpfunc.hf.pairs import MADE_UP_PAIR, distinct, pair_messages, pair_tokens, show_pair
from dpfunc.hf.preferences import ANSWERS, CollatePairs
from dpfunc.hf.vision_language import image_text_collator
from dpfunc.hf.vision_language._images import check_readable, messages_with_images
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling.users import CollatePersons, group_by_person
from dpfunc.train._features import check_table
from dpfunc.train._views import views_of
from dpfunc.train.config import FEATURES, LANGUAGE, DataSection, Job
from dpfunc.train.tables import TURNS, Row, Table, is_held_out, read_images, read_table

_PADDING = 32  # few lengths of batches: engines look at each shape once
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
        """The batch: input_ids (B, T) or hidden (B, T, D), with attention_mask; or features (B, K) or (B, V, K) of
        V views; labels (B, L), (B,) or (B, V)."""
        first = records[0]
        labels = (
            torch.tensor([record["labels"] for record in records])
            if isinstance(first["labels"], int | float)
            else self._rows(records, "labels", IGNORED)
        )
        if "features" in first:
            features = torch.stack([record["features"] for record in records])
            if features.dim() > 2:  # of several views: each has the label of its record
                labels = labels[:, None].repeat(1, features.shape[1])
            return {"features": features, "labels": labels}
        name, fill = ("hidden", 0) if "hidden" in first else ("input_ids", self.pad)
        rows = self._rows(records, name, fill)
        lengths = torch.tensor([len(record[name]) for record in records])
        batch = {name: rows, "attention_mask": (torch.arange(rows.shape[1]) < lengths[:, None]).long()}
        if "token_type_ids" in first:
            batch["token_type_ids"] = self._rows(records, "token_type_ids", 0)
        return {**batch, "labels": labels}

    def _rows(self, records: Sequence[Mapping[str, Any]], name: str, fill: int) -> Tensor:
        """Lists of integers (T,), or tensors (T, width), padded to one length."""
        values = [
            v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.long) for v in map(itemgetter(name), records)
        ]
        length = min(-(-max(map(len, values)) // self.multiple) * self.multiple, self.max_length)
        return torch.stack([F.pad(v, (0, 0) * (v.ndim - 1) + (0, length - len(v)), value=fill) for v in values])


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


def collator(job: Job, processing: Any, *, longest: bool = False) -> Any:
    """Make the function that collates records of a job, or people with their records, into a batch."""
    data = job.data
    if job.task == "vqa":
        collate: Any = image_text_collator(
            processing, max_length=data.max_length, max_images=data.max_images, chat=bool(processing.chat_template),
            image_size=None if data.image_size is None else (data.image_size[0], data.image_size[1]),
        )  # fmt: skip
    else:
        pad = getattr(processing, "pad_token_id", 0)  # features are not padded
        collate = PadRight(pad, data.max_length, data.max_length if longest else _PADDING)
        collate = CollatePairs(collate) if job.task == "preference" else collate
    return collate if data.max_records_per_unit is None else CollatePersons(collate, data.max_records_per_unit)


def columns_of(job: Job) -> tuple[str, ...]:
    """The columns that the job reads, except the column of its unit."""
    data = job.data
    match job.task:
        case "causal_lm" | "vqa" | "preference" if data.chat is not None:
            beside = data.image_column if job.task == "vqa" else data.tools_column
            return tuple(filter(None, (*data.chat, beside)))
        case "causal_lm" | "seq2seq" | "preference":
            prompts = data.placeholders() if data.prompt_column is None else (data.prompt_column,)
            return tuple(dict.fromkeys((*prompts, *learnt_columns(job))))
        case "vqa":
            return data.image_column, data.question_column, data.answer_column
        case "image_classification":
            return "digest", data.label_column
        case "table_classification":
            return (*(data.numbers or ()), *(data.categories or ()), data.label_column)
    return tuple(filter(None, (data.text_column, data.text_pair_column, data.label_column)))


def learnt_columns(job: Job) -> tuple[str, ...]:
    """The columns of a language model's job with what it learns to write."""
    data, pair = job.data, job.task == "preference"
    if data.chat:
        return data.chat[-2 if pair else -1 :]
    return (data.chosen_column, data.rejected_column) if pair else (data.response_column or data.text_column,)


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


def _made_up_chat(job: Job, columns: Sequence[str], number: int, row: Mapping[str, str]) -> dict[str, str]:
    """The columns of a chat: a question and its answer; of turns the question has the image of the row; or a pair."""
    said: dict[str, Any] = {column: row[column] for column in columns}
    image = [{"type": "image"}] if job.task == "vqa" and len(columns) == 1 else []
    if job.task == "preference" and len(columns) == 2:
        said = dict(zip(columns, MADE_UP_PAIR, strict=True))
    if len(columns) == 1:
        asked, answered = chats.MADE_UP[2 * number : 2 * number + 2]
        said[columns[0]] = [{**asked, "content": [*image, {"type": "text", "text": asked["content"]}]}, answered]
    if job.task == "vqa":
        said[job.data.image_column] = [f"{number}.png"] if image else []
    given = {column: json.dumps(value) for column, value in said.items()}
    return given if job.data.tools_column is None else {**given, job.data.tools_column: ""}


def made_up_row(job: Job, number: int, folder: Path) -> dict[str, str]:
    """A row whose columns all differ, and its image."""
    data, words = job.data, ["made", "up", "again"][: 2 + number]
    row = {column: " ".join([*words, column]) for column in columns_of(job)}
    if job.task in ("image_classification", "vqa"):
        from PIL import Image

        row["image"] = f"{number}.png"
        row[data.image_column] = row["image"] if data.max_images == 1 else json.dumps([row["image"]])
        Image.linear_gradient("L").rotate(90 * number).convert("RGB").save(folder / f"{number}.png")
    numbers = data.numbers or {}
    for place, (column, (low, high)) in enumerate(numbers.items(), start=1):
        row[column] = str(low + (high - low) * (place + number / 2) / (len(numbers) + 2))
    row |= {column: values[number % len(values)] for column, values in (data.categories or {}).items()}
    row[data.label_column] = data.classes[number] if data.classes else "0.5"
    if job.task == "preference":
        row[learnt_columns(job)[1]] += " too"  # whatever the tokenizer knows, the answers have as many tokens as words
    if data.chat:
        row |= _made_up_chat(job, data.chat, number, row)
    if job.task == "token_classification":
        row |= {data.text_column: json.dumps(words), data.label_column: json.dumps([data.classes[0]] * len(words))}
    return row


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
         f"Expected at most data.max_images={data.max_images} images in {where}, got {len(images)}. It is "
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


def chat_lines(job: Job, processing: Any) -> list[str]:
    """A made-up chat as the template writes it, with what is learnt."""
    if not job.data.chat:
        return []
    if job.task == "preference":
        return [f"chat: what is learnt of a made-up pair stands in [[ ]]: {show_pair(processing)}"]
    inside = job.task == "vqa"
    tokenizer, template = (processing.tokenizer, processing.chat_template) if inside else (processing, None)
    said = chats.show_chat(tokenizer, template=template, parts=inside)
    return [f"chat: what is learnt of a made-up one stands in [[ ]]: {said}"] * (job.data.loss_on == "response")


def _token_labels_record(tokenizer: Any, row: Row, data: DataSection, where: str) -> Mapping[str, Any]:
    """Words with a label at the first token of each; what is cut off has none."""
    words, given = _texts_in(row[data.text_column]), _texts_in(row[data.label_column])
    refuse(
        (not words or len(words) != len(given),
         f"Expected words and one label for each in {where}, got {len(words)} words and {len(given)} labels. "
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
