"""A run of a job: other tasks and numbers, kills, a full disk, and launchers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import allow
from text_job import JOURNAL, at_events, files, record, train, weights, write_job, write_table
from trainer_cases import again

from dpfunc.accounting.accountant import upper
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.rng import insecure_key
from dpfunc.train import _run_folder as run_folder
from dpfunc.train import run as train_job
from dpfunc.train._config_file import read_job
from dpfunc.train._model import load_base, load_processing


def test_the_adapter_opens_with_peft(here):
    from peft import PeftModel

    job = read_job("job.yaml")
    base = load_base(job, load_processing(job))
    before = base.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    model = PeftModel.from_pretrained(base, here / "run" / "model")
    trained = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert any(value.abs().max() > 0 for value in trained)
    assert sum("lora_" in name for name in weights("run")) == 2 * len(trained)  # and the base, whose weights are random
    assert torch.equal(before, model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight)


FULL = {  # when the disk is full, for files of how many bytes, what could not be written, steps that were released
    "job": ("make_trainer", 10, "The run in {folder} could not go on: [Errno 27] File too large. Stopped", 0),
    "first checkpoint": ("on_train_begin", 1000, "{folder}/checkpoint-0/dpfunc could not be written: ", 0),
    "journal": ("on_step_end", 400, "{folder}/privacy_journal.jsonl could not be written: File too large", 1),
    "checkpoint": ("on_step_end", 3000, "{folder}/checkpoint-2/dpfunc could not be written: ", 2),
    "record": ("on_train_end", 1500, "{folder}/privacy_accounting.json could not be written: File too large", 4),
    "model": ("check_accounting", 100, "The run in {folder} could not go on: ", 4),
}


@pytest.mark.parametrize(("when", "size", "said", "steps"), FULL.values(), ids=FULL)
def test_a_full_disk_says_what_was_spent_and_how_to_go_on(here, tmp_path, monkeypatch, when, size, said, steps):
    folder, owner = tmp_path / "full", next((each for each in (train_job, run_folder) if hasattr(each, when)), None)
    real = getattr(owner, when, None)
    flags = ["--output_dir", folder, "--insecure-seed", 3]

    def filled(*given):
        result = real(*given)
        allow(size)
        return result

    again(insecure_key(3))
    with monkeypatch.context() as patch:
        if real is None:
            at_events(patch, **{when: lambda *given: allow(size)})
        else:
            patch.setattr(owner, when, filled)
        try:
            result = train(*flags)
        finally:
            allow()
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert "Error: " + said.format(folder=folder) in result.stderr
    assert "Traceback" not in result.output
    spent = "Stopped before the first step was released: nothing was spent."
    if steps:
        known = journal_ledger(folder / JOURNAL)
        assert known.num_steps == steps
        spent = (
            f"Stopped. The journal has {steps} steps, which spent epsilon={upper(known.epsilon(1e-3).epsilon, 4)} at"
        )
        assert result.stderr.endswith("--resume goes on with this run.\n")
    assert spent in result.stderr
    again(insecure_key(3))
    result = train(*flags, *(["--resume"] if steps else []))
    assert result.exit_code == 0, result.output
    assert journal_ledger(folder / JOURNAL).num_steps == 4


LAUNCHERS = {  # environment -> message
    "one process only": ({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}, "`accelerate launch`"),
    "FSDP": ({"ACCELERATE_USE_FSDP": "true"}, "got ACCELERATE_USE_FSDP='true' in the environment"),
    "DeepSpeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "got ACCELERATE_USE_DEEPSPEED='true' in the environment"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_does_not_keep_privacy_is_refused(here, monkeypatch, name):
    environment, message = LAUNCHERS[name]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    before = files(here)
    for flags in ([], ["--dry-run"], *([["--no-dp"]] if name == "one process only" else [])):
        result = train("--output_dir", "other", *flags)
        assert result.exit_code == 1
        assert message in result.stderr
        assert "torchrun --nproc-per-node N" in result.stderr
    assert files(here) == before


@pytest.mark.slow
def test_the_command_runs_under_torchrun_with_one_process(here):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "dpfunc.cli.main", "train"]
    options = ["job.yaml", "--output_dir", "launched", "--steps", "2", "--save_steps", "2", "--dp-epsilon", "3"]
    result = subprocess.run([*command, *options], cwd=here, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Spent: epsilon=" in result.stdout
    assert record("launched")["epsilon"] <= 3.0
    assert weights("launched")


def test_bf16_with_gradient_checkpointing(here):
    result = train("--bf16", "--gradient_checkpointing", "--steps", 1, "--output_dir", "narrow")
    assert result.exit_code == 0, result.output
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights("narrow").values())


@pytest.mark.parametrize("strategy", ["head", "lora"])
def test_no_number_of_records_and_no_times(tmp_path, monkeypatch, strategy):
    """With a public bound on the number of records: in the dry run, the run, and its files."""
    write_job(tmp_path, "text_classification", "bert")
    table = write_table(tmp_path / "mails.jsonl", 137)
    table.write_text(table.read_text() + table.read_text().splitlines()[0] + "\n")  # an exact duplicate
    monkeypatch.chdir(tmp_path)
    results = [
        train("--dp_dataset_size", "250", "--eval_fraction", "0", "--init", "pretrained", "--strategy", strategy, *more)
        for more in (["--dry-run"], [])
    ]
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
    assert not re.search(r"(?<![\d.e-])(137|138)(?!\d)", text)
    assert "duplicate" not in results[1].stdout
    text = re.sub(r"(Writing model shards|Loading weights)[^\n\r]*", "", text)  # bars over files and parameters
    assert not re.search(r"it/s|s/it|_runtime|per_second|\d\d:\d\d[,<\]]", text)
