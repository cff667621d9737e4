"""Made-up rows, by which models are tried, and what the template of a chat writes of one.

May import: its folder, features and below. Privacy depends on it: no.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfunc.hf import chats
from dpfunc.hf.pairs import MADE_UP_PAIR, show_pair
from dpfunc.train._columns import columns_of, learnt_columns
from dpfunc.train.config import Job


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
