"""Chats of many formats over the words of `text_job`, with chat templates for its tokenizer, and jobs over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import text_job

# What the assistant says stands between `label :` and `</s>`.
PLAIN = (
    "{% for m in messages %}{{ '<s> label : ' if m.role == 'assistant' else '<s> text : ' }}{{ m.content }}"
    "{% for call in m.tool_calls or () %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    " </s>\n{% endfor %}{% if add_generation_prompt %}<s> label : {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<s> label : {% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or () %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    " </s>{% endgeneration %}\n{% else %}<s> text : {{ m.content }} </s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s> label : {% endif %}"
)
# As Qwen 3: the last answer is written in another way than earlier ones.
THINKS = (
    "{% for m in messages %}<s> {{ 'label' if m.role == 'assistant' else 'text' }} : "
    "{% if m.role == 'assistant' and loop.last %}new {% endif %}{{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s> label : {% endif %}"
)
# As Gemma: no system turn, and the user first.
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('secret') }}{% endif %}" + PLAIN

JOB = """
task: causal_lm
output_dir: run
model: {path: tiny, init: random}
data: {train: chats.jsonl, chat: [messages], max_length: 48}
privacy: {dp_epsilon: 8, dp_delta: 1.0e-3, dp_max_grad_norm: 1.0}
training: {learning_rate: 1.0e-2, batch_size: 32, steps: 2, physical_batch_size: 16, save_steps: 2, logging_steps: 2}
"""


def tokenizer(template: str | None = PLAIN) -> Any:
    """The tokenizer of words, with a chat template."""
    import tempfile

    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        made = AutoTokenizer.from_pretrained(text_job.write_model(Path(name)))
    made.chat_template = template
    return made


def chats(count: int) -> list[list[dict[str, Any]]]:
    """Chats of one or two questions, each with its answer, and of some a system turn."""
    made = []
    for number, row in enumerate(text_job.rows(count)):
        chat = [{"role": "system", "content": "the team"}] * (number % 3 == 0)
        words = row["text"].split()
        for turn in range(1 + number % 2):
            chat.append({"role": "user", "content": " ".join(words[turn:])})
            chat.append({"role": "assistant", "content": f"{row['label']} {words[turn]}"})
        made.append(chat)
    return made


def write_chats(path: Path | str, count: int = 120) -> Path:
    """A table of chats as .jsonl."""
    return text_job.write_rows(path, [{"messages": chat} for chat in chats(count)])


def write_job(folder: Path, template: str | None = PLAIN) -> Path:
    """A folder with a model, whose tokenizer has a chat template, a table of chats and a job."""
    text_job.write_model(folder / "tiny")
    tokenizer(template).save_pretrained(folder / "tiny")
    write_chats(folder / "chats.jsonl")
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def llava_rows(count: int) -> list[dict[str, Any]]:
    """Rows as LLaVA's file of instructions has them: of three records two have an image, and one of these two turns."""
    rows = []
    for number in range(count):
        asked = [("what is the colour ?", "red"), ("what is the shape ?", "circle")][: 1 + number % 2]
        row: dict[str, Any] = {"id": str(number), "conversations": []}
        if number % 3:
            row["image"] = f"images/{number % 8:03}.png"
        for place, (question, answer) in enumerate(asked):
            mark = "<image>\n" if number % 3 and place == 0 else ""
            row["conversations"].append({"from": "human", "value": f"{mark}{question}"})
            row["conversations"].append({"from": "gpt", "value": f"{answer} {['yes', 'no'][number // 3 % 2]}"})
        rows.append(row)
    return rows


LLAVA_JOB = """
task: vqa
output_dir: run
strategy: projector
model: {path: llava}
data: {train: data.json, chat: [conversations], max_length: 48, deduplicate: false}
privacy: {dp_epsilon: 8, dp_delta: 1.0e-2, dp_max_grad_norm: 1.0}
training: {learning_rate: 1.0e-3, batch_size: 8, steps: 1, physical_batch_size: 8}
"""


def write_llava_job(folder: Path) -> Path:
    """A folder with a tiny LLaVA, images, LLaVA's JSON and a job."""
    from dpfunc.hf.vision_language.tiny_llava import write

    write(folder, 8)
    (folder / "data.json").write_text(json.dumps(llava_rows(40)))
    path = folder / "job.yaml"
    path.write_text(LLAVA_JOB)
    return path
