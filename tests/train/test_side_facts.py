"""What `dpfunc train` prints and writes beside checkpoints says nothing of private numbers, nor how long a step takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from text_job import train, write_job, write_table

NUM_RECORDS = 137
FLAGS = ["--dp_dataset_size", "250", "--eval_fraction", "0"]


@pytest.mark.parametrize("strategy", ["head", "lora"])
def test_no_number_of_records_and_no_times(tmp_path, monkeypatch, strategy):
    """With a public bound on the number of records: in the dry run, the run, and its files."""
    write_job(tmp_path, "text_classification", "bert")
    table = write_table(tmp_path / "mails.jsonl", NUM_RECORDS)
    table.write_text(table.read_text() + table.read_text().splitlines()[0] + "\n")  # an exact duplicate
    monkeypatch.chdir(tmp_path)
    results = [train(*FLAGS, "--init", "pretrained", "--strategy", strategy, *more) for more in (["--dry-run"], [])]
    for result in results:
        assert result.exit_code == 0, result.output
    assert "records: 250 to train on" in results[0].stdout
    assert "sampling probability: 0.128 (Poisson)" in results[0].stdout
    text = "".join(result.stdout + result.stderr for result in results)
    for file in Path("run").rglob("*"):
        if file.suffix in (".json", ".jsonl", ".head") and "dpfunc" not in file.parts and file.name != "tokenizer.json":
            text += file.read_text()
    assert '"dataset_size": 250' in text
    text = re.sub(r"\b[0-9a-f]{16,}\b", "", text)  # digests of random numbers, in which any number may stand
    assert not re.search(rf"(?<![\d.e-])({NUM_RECORDS}|{NUM_RECORDS + 1})(?!\d)", text)
    assert "duplicate" not in results[1].stdout
    text = re.sub(r"(Writing model shards|Loading weights)[^\n\r]*", "", text)  # bars over files and parameters
    assert not re.search(r"it/s|s/it|_runtime|per_second|\d\d:\d\d[,<\]]", text)
