"""Synthetic text from a language model that `dpfunc train` left behind: post-processing, which costs no privacy.

May import: its folder, features and below. Privacy depends on it: no.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc import distributed
from dpfunc._utils.validation import checked, count, expect, integer, positive, probability, refuse
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import RECORD_FILE, Record, SelectionRecord
from dpfunc.checkpoint.costs import read_cost
from dpfunc.distributed import all_or_none, rank_and_size
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.hf import chats
from dpfunc.rng import fold_in, insecure_key, torch_seed
from dpfunc.train._model import load_processing, one_line
from dpfunc.train._records import prompt_ids
from dpfunc.train._run_folder import MODEL, saved_job
from dpfunc.train._saved import load_trained
from dpfunc.train.tables import numbered_rows, read_table, same_file


@dataclass(frozen=True)
class Writer:
    """A trained language model; epsilon and delta of its training, None where nothing is protected."""

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    epsilon: float | None
    delta: float | None
    max_length: int
    chats: bool = False  # a prompt is a turn of the user


@dataclass(frozen=True)
@checked({
    "num": count, "max_new_tokens": count, "batch_size": count, "seed": integer, "temperature": positive,
    "top_p": probability,
})  # fmt: skip
class Sampling:
    """Settings for drawing texts: `num` in all, spread evenly over the prompts; `top_p` as in Holtzman et al. 2020."""

    num: int
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 16


def load_writer(folder: Path | str, *, allow_non_private: bool = False, prompts: Path | None = None) -> Writer:
    """The language model that `dpfunc train` left in its output_dir, if its accounting is there.

    With `allow_non_private` also the twin without privacy, or a run whose key anybody can guess; texts then come with
    epsilon null (tests/train/test_generate.py::test_a_model_without_privacy_is_refused).
    """
    root = Path(folder)
    job, insecure_seed, table = saved_job(root)
    refuse(
        (job.task not in ("causal_lm", "preference"),
         f"Expected a run with task causal_lm or preference, got {job.task!r} in {str(root)!r}."),
        (not (root / MODEL).is_dir(), CheckpointError(
            f"Expected a finished run, got {str(root)!r} without {MODEL}/. Go on with it: --resume.")),
    )  # fmt: skip
    why = "" if insecure_seed is None else "has a key that anybody can guess (--insecure-seed)"
    spent = _record_of(root, why if job.privacy.dp_enabled else "was trained without privacy", allow_non_private)
    refuse(
        (spent and prompts and same_file(prompts, table),
         f"Expected prompts that are public, got --prompts {prompts}, the table that the model was trained on. Its "
         "fields would go along with each text, and epsilon does not cover them. Write prompts of your own, e.g. "
         "one for each class."),
    )  # fmt: skip
    processing = load_processing(job)
    with one_line(f"the model that training saved in {str(root / MODEL)!r}"):
        model, _ = load_trained(job, root / MODEL, processing)
    epsilon, delta = (None, None) if spent is None else (spent.epsilon, spent.delta)
    return Writer(model, processing, epsilon, delta, job.data.max_length, job.data.chat is not None)


def _record_of(root: Path, why_not: str, allowed: bool) -> Record | SelectionRecord | None:
    """The record of a private run, or search; None of one that is not private, if that is allowed."""
    refuse(
        (why_not and not allowed,
         f"Expected a private model, but the one in {str(root)!r} {why_not}: its texts may repeat training records. "
         "Say --allow-non-private if they are only for yourself."),
    )  # fmt: skip
    if why_not:
        return None
    try:
        record = read_cost(root / RECORD_FILE)
        if isinstance(record, Ledger):
            raise InvalidArgument("A ledger has no epsilon.")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Expected {RECORD_FILE} in {str(root)!r}, which says what the model has cost. Without it no text is drawn."
        ) from error
    return record


def read_prompts(prompt: str | None, file: Path | str | None) -> tuple[Mapping[str, str], ...]:
    """Prompts, each with fields for its texts' lines: one text, or those of a .txt with one a line, or of a .jsonl."""
    refuse((prompt is not None and file is not None, "Expected --prompt or --prompts, got both."))
    if file is None:
        return ({"prompt": prompt or ""},)
    path = Path(file)
    column = {".txt": "text"}.get(path.suffix, "prompt")
    table = read_table(path, [column], deduplicate=False)
    if path.suffix != ".jsonl":
        return tuple({"prompt": row[column]} for row in table.values())
    fields = [{name: str(value) for name, value in row.items()} for _, row in numbered_rows(path, [column])]
    if reserved := {"text", "epsilon", "delta"} & set().union(*fields):
        raise InvalidArgument(f"Expected no field {min(reserved)} with a prompt in {path.name}: it is written here.")
    return tuple(fields)


def sample(
    writer: Writer, prompts: Sequence[Mapping[str, str]], how: Sampling, ranks: Ranks | None = None
) -> Iterator[dict[str, Any]]:
    """Draw texts, a batch at a time: `{"text", the fields of its prompt, "epsilon", "delta"}`, the same for a seed.

    What is drawn from released parameters costs no more than they did (Dwork and Roth 2014, Proposition 2.1), however
    many texts there are. Processes share the batches: all iterate, and each gets all texts
    (tests/train/test_generate.py::test_the_same_seed_gives_the_same_texts).
    """
    wanted = [prompts[i * len(prompts) // how.num] if len(prompts) < how.num else prompts[i] for i in range(how.num)]
    rank, size = rank_and_size(ranks)
    for first in range(0, how.num, size * how.batch_size):
        start = first + rank * how.batch_size
        own = [row["prompt"] for row in wanted[start : start + how.batch_size]]
        texts = all_or_none(partial(_drawn, writer, own, how, start), ranks, "No more texts are drawn")
        if ranks is not None:
            of_each: list[list[str]] = [[]] * size
            dist.all_gather_object(of_each, texts, group=ranks.group)
            texts = [text for theirs in of_each for text in theirs]
        for row, text in zip(wanted[first : first + len(texts)], texts, strict=True):
            yield {"text": text, **row, "epsilon": writer.epsilon, "delta": writer.delta}


def _drawn(writer: Writer, prompts: Sequence[str], how: Sampling, start: int) -> list[str]:
    """The texts of the batch that begins at this place."""
    if not prompts:
        return []
    tokenizer, model = writer.tokenizer, writer.model
    limit = max(1, writer.max_length // 2)
    rows = [
        chats.asked(tokenizer, prompt)[-limit:] if writer.chats else prompt_ids(tokenizer, prompt, limit)
        for prompt in prompts
    ]
    length, device = max(map(len, rows)), next(model.parameters()).device
    padded = [[tokenizer.pad_token_id] * (length - len(row)) + row for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    with torch.no_grad(), torch_seed(fold_in(insecure_key(how.seed), "generate", start)):
        ids: Tensor = model.generate(
            input_ids=torch.tensor(padded, device=device), attention_mask=torch.tensor(mask, device=device),
            do_sample=True, temperature=how.temperature, top_p=how.top_p, top_k=0, max_new_tokens=how.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return [text.strip() for text in tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)]


def write_texts(path: Path, texts: Iterator[dict[str, Any]], ranks: Ranks | None = None) -> int:
    """Write texts to a new .jsonl file, and count them. All processes iterate, and one writes; what it cannot write
    stops all (tests/distributed/test_launch.py::test_what_one_process_cannot_write_stops_all).
    """
    expect(path.suffix == ".jsonl", "a .jsonl file", "out", str(path))
    files: list[TextIO] = []
    count = 0
    try:
        with ExitStack() as stack:
            distributed.once(ranks, lambda: files.append(stack.enter_context(open(path, "x", encoding="utf-8"))))
            for text in texts:
                count += 1
                distributed.once(ranks, partial(_write, files, text))
            distributed.once(ranks, stack.close)
    except OSError as error:
        raise InvalidArgument(f"Expected to write a new file {str(path)!r}: {error.strerror}.") from error
    return count


def _write(files: Sequence[TextIO], text: Mapping[str, Any]) -> None:
    files[0].write(json.dumps(text, ensure_ascii=False) + "\n")
