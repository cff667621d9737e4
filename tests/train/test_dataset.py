"""Records of a job: prompts and responses, what is held out, and batches of few lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_job import write_job, write_table

from dpfunc.errors import InvalidArgument
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import PadRight, read_records
from dpfunc.train._model import load_processing


def test_batches_have_few_lengths():
    collate = PadRight(pad=9, max_length=40, multiple=8)
    batch = collate([{"input_ids": [1, 2, 3], "labels": 1}, {"input_ids": list(range(9)), "labels": 0}])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"][0, 3:].unique().tolist() == [9]
    assert collate([{"input_ids": [1] * 39, "labels": 1}])["input_ids"].shape == (1, 40)


def test_prompt_and_response_columns(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ["--prompt_template", "null", "--prompt_column", "label", "--response_column", "text"]
    job = read_job("job.yaml", flags)
    tokenizer = load_processing(job)
    first = read_records(job, tokenizer).train[0]
    assert tokenizer.convert_ids_to_tokens(first["input_ids"])[:2] == ["<s>", "sport"]
    assert first["labels"][:2] == [-100, -100]
    plain = read_job("job.yaml", ["--prompt_template", "null"])
    assert read_records(plain, tokenizer).train[0]["labels"][0] == -100
    assert read_records(plain, tokenizer).train[0]["labels"][1] != -100


def test_evaluation_from_a_table_of_its_own(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_table(Path("more.jsonl"), 10, seed=1)
    job = read_job("job.yaml", ["--data.eval", "more.jsonl"])
    records = read_records(job, load_processing(job))
    assert (len(records.train), len(records.evaluation)) == (120, 10)
    both = read_job("job.yaml", ["--eval_fraction", "0.5"])
    records = read_records(both, load_processing(both))
    assert len(records.train) + len(records.evaluation) == 120
    assert 30 < len(records.train) < 90
    with pytest.raises(InvalidArgument, match="data.eval or data.eval_fraction"):
        read_job("job.yaml", ["--eval_fraction", "0.5", "--eval", "more.jsonl"])
