"""A dry run: it writes nothing, counts memory, and refuses what training refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from text_job import MODES, files, train, write_job, write_table


def test_dry_run_writes_nothing(here):
    before = files(here)
    result = train("--dry-run", "--output_dir", "other")
    assert result.exit_code == 0, result.output
    for line in (
        "records: 120 to train on, 0 to evaluate on", "steps: 4", "logical batch: 32 expected, physical batch: 16",
        "sampling probability: 0.2667 (Poisson)", "noise multiplier: 0.5489, ", "at delta = 0.001, add_remove",
        "trained parameters: 512 of 3,504 (lora)", "memory: about", "what a forward pass keeps of one record at full length",
        "Nothing was trained, written or spent.",
    ):  # fmt: skip
        assert line in result.stdout
    epsilon = result.stdout.split("epsilon: ")[1].split(" (tilted), ")
    assert 7.9 < float(epsilon[0]) <= 8.0 < float(epsilon[1].split(" ")[0])
    for flags in (["--dp_dry_run"], ["--dry_run"]):
        assert "Nothing was trained" in train(*flags, "--output_dir", "other").stdout
    assert files(here) == before


def test_with_a_public_bound_no_number_of_held_out_records_is_printed(tmp_path, monkeypatch):
    """Neither itself nor in the memory of the features that are kept."""
    write_job(tmp_path, "text_classification", "bert")
    monkeypatch.chdir(tmp_path)

    def printed(rows, *flags):
        write_table(tmp_path / "mails.jsonl", rows)
        result = train("--dry-run", "--eval_fraction", 0.3, "--init", "pretrained", "--strategy", "head", *flags)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "to evaluate on" in printed(150)
    assert "features" in printed(150)
    assert printed(150, "--dp_dataset_size", 250) == printed(240, "--dp_dataset_size", 250)


def test_memory_grows_with_the_physical_batch_only(here):
    def activations(*flags):
        output = train("--dry-run", "--output_dir", "other", *flags).stdout
        return float(output.split("activations ")[1].split(",")[0])

    small, large = activations("--physical_batch_size", 8), activations("--physical_batch_size", 32)
    assert 0 < small < 1
    assert 3.8 < large / small < 4.2
    assert activations("--physical_batch_size", 8, "--batch_size", 64) == small


REFUSED = {  # flags, exit code, message
    "misspelt flag": (["--dp_epsilom", "3"], 2, "Did you mean one of: '--dp_epsilon',"),
    "bad value": (["--dp_delta", "2"], 1, "0 < dp_delta < 1"),
    "optimizer": (["--optimizer", "adamm"], 1, "adamm is not a valid OptimizerNames"),
    "optimizer of a package": (["--optimizer", "galore_adamw"], 1, "(optimizer, scheduler, report_to, bf16) that the Trainer takes: "),
    "scheduler": (["--scheduler", "x"], 1, "Expected --scheduler to be one of 'linear', 'cosine', "),
    "schedule with settings": (["--scheduler", "warmup_stable_decay"], 1, "Expected --scheduler to be one of 'linear', "),
    "schedule of evaluations": (["--scheduler", "greedy"], 1, "got --scheduler='greedy'. A rate that follows an evaluation would carry records"),
    "no model": (["--model.path", "nowhere"], 1, "got model.path='nowhere': there is no such folder here"),
    "no tokenizer": (["--model.tokenizer", "a/b/c"], 1, "got model.tokenizer='a/b/c': there is no such folder here"),
    "misspelt logger": (["--report_to", "tensorbord"], 1, "Did you mean 'tensorboard'?"),
    "unknown logger": (["--report_to", "x"], 1, "report_to to be one of 'azure_ml', 'clearml',"),
    "logger not installed": (["--report_to", "none-such"], 1, "got report_to='none-such', which is not. Install it"),
    "folder under a file": (["--output_dir", "mails.jsonl/x"], 1, "'mails.jsonl' is a file. Name another folder"),
    "folder is a file": (["--output_dir", "mails.jsonl"], 1, "'mails.jsonl' is a file. Name another folder"),
    "folder not ours": (["--output_dir", "locked/x"], 1, "'locked' may not be"),
    "no weights": (["--init", "pretrained"], 1, "Expected a model for causal_lm in 'tiny'"),
    "targets": (["--lora.targets", "nix"], 1, "Target modules {'nix'} not found"),
    "one of the targets": (["--lora.targets", "q_proj,v_prj"], 1, "got lora.targets='v_prj'. Did you mean 'v_proj'?"),
    "whole modules": (["--lora.modules_to_save", "lm_hed"], 1, "got lora.modules_to_save='lm_hed'. Did you mean 'lm_head'?"),
    "no table": (["--data.train", "nowhere.jsonl"], 1, "nowhere.jsonl"),
    "no journal": (["--spent", "nowhere.jsonl"], 1, "Expected a journal or ledger of a run, got 'nowhere.jsonl'"),
    "no column": (["--text_column", "body"], 1, "Expected a text in the column 'body' in row 1 of mails.jsonl"),
    "batch above the data": (["--batch_size", "500"], 1, "0 < batch_size <= dataset_size, got batch_size=500."),
    "delta 1/n": (["--dp_delta", "0.01"], 1, "got dp_delta=0.01."),
    "how to insist": (["--dp_delta", "0.01"], 1, "or pass dp_allow_large_delta: true and say so"),
    "no labels": (["--task", "text_classification", "--prompt_template", "null"], 1, "Expected data.labels"),
    "unknown label": (
        ["--task", "text_classification", "--prompt_template", "null", "--labels", "sport,art"], 1,
        "Expected one of data.labels (sport, art) in row 2 of mails.jsonl, got another",
    ),
    "no biases": (["--strategy", "bitfit"], 1, "Expected parameters for strategy='bitfit', LlamaForCausalLM has none"),
}  # fmt: skip


@pytest.fixture
def loggers(monkeypatch):
    """One more logger that is known, and not installed wherever the tests run."""
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "none-such", object)


@pytest.fixture
def locked(monkeypatch):
    """A folder that may not be written, also where the tests may do everything."""
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "locked" and may(path, mode))


@pytest.mark.usefixtures("loggers", "locked")
@MODES
@pytest.mark.parametrize(("flags", "code", "message"), REFUSED.values(), ids=REFUSED)
def test_the_dry_run_refuses_what_training_refuses(here, mode, flags, code, message):
    """With a message, and nothing is written."""
    Path("locked").mkdir(exist_ok=True)
    before = files(here)
    given = [] if "--output_dir" in flags else ["--output_dir", "other"]
    result = train(*given, *flags, *mode)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert code == 2 or result.stderr.rstrip().rpartition("\n")[2].startswith("Error: ")
    assert "Traceback" not in result.output
    assert files(here) == before


@pytest.mark.parametrize("names", ["none", "all"])
def test_words_for_all_loggers_are_no_names(here, names):
    assert train("--output_dir", "other", "--report_to", names, "--dry-run").exit_code == 0


def test_a_hub_name_with_downloads_is_not_a_missing_folder(here, monkeypatch):
    from transformers import AutoTokenizer

    def unreachable(path, **options):
        raise OSError("We couldn't connect")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    result = train("--output_dir", "other", "--model.path", "some/model", "--local_files_only", "false")
    assert "Expected a tokenizer in 'some/model': We couldn't connect" in result.stderr
