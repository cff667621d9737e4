"""A tiny language model with a tokenizer of words, a table of labelled texts, and a job over them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TOPICS = {"sport": ["goal", "match", "team", "coach"], "money": ["bank", "shares", "profit", "market"]}
COMMON = ["the", "a", "was", "today", "and", "big", "new", "label", ":", "text"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]

JOB = """
task: {task}
output_dir: run
model: {{path: tiny, init: random}}
data: {{train: mails.jsonl, max_length: 16, {data}}}
privacy: {{dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0}}
training: {{learning_rate: 1e-2, batch_size: 32, steps: 4, physical_batch_size: 16, save_steps: 2, logging_steps: 2}}
"""
DATA = {
    "causal_lm": 'prompt_template: "label : {label} text : "',
    "text_classification": "labels: [sport, money], eval_fraction: 0.2",
    "text_regression": "eval_fraction: 0.2",
    "token_classification": "labels: [O, TOPIC], eval_fraction: 0.2",
    "seq2seq": 'prompt_template: "label : {label} text :", eval_fraction: 0.2',
}


def write_model(folder: Path, kind: str = "llama") -> Path:
    """The configuration of a tiny model, and a tokenizer that knows the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, T5Config

    words = [*SPECIAL, *COMMON, *(word for words in TOPICS.values() for word in words), *TOPICS]
    known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "bert":  # a sentence encoder with weights; each word starts with a vector of its own
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = BertConfig(**ids, **sizes, max_position_embeddings=64, initializer_range=0.5)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            BertModel(config).save_pretrained(folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        return folder
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(**ids, **sizes, max_position_embeddings=64, tie_word_embeddings=False)
    elif kind == "t5":
        sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        config = T5Config(vocab_size=len(words), pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, **sizes)
    else:
        config = GPT2Config(**ids, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0)
    config.save_pretrained(folder)
    return folder


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Texts of six words, three of them from the topic."""
    draw = random.Random(seed)
    out = []
    for i in range(count):
        label = list(TOPICS)[i % 2]
        words = [*draw.choices(TOPICS[label], k=3), *draw.choices(COMMON[:7], k=3), f"mail{i}"]
        draw.shuffle(words)
        out.append({"label": label, "text": " ".join(words)})
    return out


def write_rows(path: Path | str, table: Iterable[Mapping[str, Any]]) -> Path:
    """Rows as .jsonl."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in table))
    return Path(path)


def write_table(path: Path, count: int = 120, seed: int = 0) -> Path:
    """So many of `rows` as .jsonl."""
    return write_rows(path, rows(count, seed))


def write_job(folder: Path, task: str = "causal_lm", kind: str = "llama", extra: str = "") -> Path:
    """A folder with a model, a table and a job; its paths are relative to the folder."""
    write_model(folder / "tiny", kind)
    write_table(folder / "mails.jsonl")
    path = folder / "job.yaml"
    path.write_text(JOB.format(task=task, data=DATA[task]) + extra)
    return path


def run(*arguments: object) -> Any:
    """Exit code and output of a command of dpfunc."""
    from click.testing import CliRunner

    from dpfunc.cli.main import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def train(*arguments: object) -> Any:
    """The same of `dpfunc train` with the job of the present folder."""
    return run("train", "job.yaml", *arguments)


def at_events(patch: Any, **events: Any) -> None:
    """Each Trainer that `dpfunc train` makes from now on calls a function of (trainer, state) at an event of its own.

    Args:
        patch: a MonkeyPatch, which undoes it. events: e.g. on_step_end=function.
    """
    from transformers import TrainerCallback

    from dpfunc.train import run as train_job

    make = train_job.make_trainer

    def made(*given: Any) -> Any:
        trainer, callback = make(*given), TrainerCallback()
        for name, function in events.items():
            setattr(callback, name, lambda args, state, control, f=function, **_: f(trainer, state))
        trainer.add_callback(callback)
        return trainer

    patch.setattr(train_job, "make_trainer", made)


def interrupt_at(step: int) -> Any:
    """Ctrl-C after a step, for `at_events(patch, on_step_end=...)`."""

    def stop(trainer: Any, state: Any) -> None:
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    return stop


# Finished runs of `dpfunc train`, and what is looked at in their folders

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
JOURNAL = "privacy_journal.jsonl"
MODES = pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["train", "dry run"])


def files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))


def weights(folder):
    (path,) = Path(folder, "model").glob("*.safetensors")
    return load_file(path)


def same(one, two):
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def record(folder):
    return json.loads(Path(folder, "privacy_accounting.json").read_text())


def trained(place, *flags):
    """What `dpfunc train` prints in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        result = train(*flags)
    assert result.exit_code == 0, result.output
    return result.stdout


@functools.cache
def _finished():
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place)
    (place / "made").mkdir()
    write_job(place / "made")
    said = trained(place / "made")
    return (place / "made").rename(place / "moved"), said  # a copy does not go on beside the run in its own place


def finished_job(place):
    """A folder with a job and its finished run, which this process did once; and what that said."""
    source, said = _finished()
    shutil.copytree(source, place, dirs_exist_ok=True)
    return place, said
