"""Pairs of answers over the words of `text_job`, as texts and as chats, and a job over these."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from chat_jobs import PLAIN, tokenizer
from text_job import COMMON, TOPICS, write_model, write_rows

JOB = """
task: preference
output_dir: run
model: {path: tiny, init: random}
data: {train: pairs.jsonl, chat: [chosen, rejected], max_length: 24, eval_fraction: 0.2}
privacy: {dp_epsilon: 20, dp_delta: 1e-3, dp_max_grad_norm: 1.0}
training: {learning_rate: 5e-2, batch_size: 32, steps: 6, physical_batch_size: 16, save_steps: 2}
preference: {beta: 0.5}
"""


def pairs(count: int = 120, seed: int = 0) -> list[dict[str, str]]:
    """Answers about the topic of the prompt are chosen."""
    draw, out = random.Random(seed), []
    for i in range(count):
        topic, other = list(TOPICS)[:: 1 if i % 2 else -1]
        out.append({
            "prompt": f"label : {topic} text :", "who": f"person {i // 3}",
            "chosen": " ".join([*draw.choices(TOPICS[topic], k=3), *draw.choices(COMMON[:7], k=2)]),
            "rejected": " ".join(draw.choices(TOPICS[other], k=draw.randint(2, 4))),
        })  # fmt: skip
    return out


def chats(count: int = 120) -> list[dict[str, Any]]:
    """The pairs as whole chats; every third has a turn of the assistant in its prompt."""
    made = []
    for number, row in enumerate(pairs(count)):
        earlier = [{"role": "user", "content": "the team"}, {"role": "assistant", "content": "today"}]
        asked = [*earlier * (number % 3 == 0), {"role": "user", "content": row["prompt"]}]
        answers = {
            name: [*asked, {"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")
        }  # fmt: skip
        made.append({"who": row["who"], **answers})
    return made


def write_job(folder: Path, template: str = PLAIN) -> Path:
    """A folder with a model, whose tokenizer has a chat template, a table of pairs of chats and a job."""
    write_model(folder / "tiny")
    tokenizer(template).save_pretrained(folder / "tiny")
    write_rows(folder / "pairs.jsonl", chats())
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path
