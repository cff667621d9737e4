"""What a job leaves out: values of the recipe, their reasons, their record; and what a run is compared with."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from text_job import at_events, interrupt_at, train, write_job
from transformers import TrainingArguments

from dpfunc import Ledger, recipes
from dpfunc.accounting import Event
from dpfunc.hf import DPTrainer, PrivacyArguments
from dpfunc.train import run as train_job
from dpfunc.train._collate import PadRight
from dpfunc.train._config_file import read_job
from dpfunc.train.run import prepare

TRAINING = "training: {learning_rate: 1e-2, batch_size: 32, steps: 4, physical_batch_size: 16, save_steps: 2, logging_steps: 2}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job that leaves everything out but the budget."""
    path = write_job(tmp_path, "text_classification", "bert")
    text = path.read_text().replace(", init: random", "").replace(", dp_max_grad_norm: 1.0", "")
    assert TRAINING in text
    path.write_text(text.replace(TRAINING, "strategy: head"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_first_run_says_what_it_derives_and_what_to_compare_with(here, monkeypatch):
    monkeypatch.setattr(recipes, "_HEAD_STEPS", (20, 20))
    result = train("--eval_steps", 10)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("run/model/config.json").read_text())["id2label"] == {"0": "sport", "1": "money"}
    size = next(line for line in result.stdout.splitlines() if line.startswith("recipe head, from "))
    assert "epsilon=8 and delta=0.001, which are public" in size
    for text in (
        "  learning_rate = ", "  batch_size = ", "  steps = 20: ", "Frozen layers were computed once", "eval_accuracy: ",
        "most frequent class of the evaluation records: 0.", "non-private reference: none. --no-dp trains the twin",
        "Not covered by epsilon: metrics on the evaluation records", "dpfunc.hf.pooled.load_mean_pooled(path)",
    ):  # fmt: skip
        assert text in result.stdout, text
    content = json.loads(Path("run/job.json").read_text())
    assert content["job"]["training"]["learning_rate"] is None
    assert content["filled"]["training"]["steps"] == 20
    assert content["filled"]["privacy"]["dp_clip"] == "flat"
    assert content["job"]["privacy"]["dp_clip"] is None
    assert content["filled"]["model"]["pooling"] == "mean"
    assert content["recipe"]["learning_rate"].startswith(f"{content['filled']['training']['learning_rate']:.3g} ")
    accounting = json.loads(Path("run/privacy_accounting.json").read_text())
    assert (accounting["global_step"], accounting["epsilon"] <= 8.0) == (20, True)
    measured = json.loads(Path("run/metrics.json").read_text())
    assert 0 <= measured["eval_accuracy"] <= 1
    assert 0.5 <= measured["eval_majority"] < 0.6


def test_the_twin_is_the_reference_and_a_damaged_record_no_new_recipe(here):
    Path("run-no-dp").mkdir()
    Path("run-no-dp/metrics.json").write_text('{"eval_accuracy": 0.875}')
    flags = ["--steps", 2, "--save_steps", 1]
    assert "non-private reference, eval_accuracy of the twin in run-no-dp: 0.875" in train(*flags).stdout
    content = json.loads(Path("run/job.json").read_text())
    del content["filled"]
    Path("run/job.json").write_text(json.dumps(content))
    result = train(*flags, "--resume")
    assert result.exit_code == 1
    assert "cannot be read: it does not hold a job" in result.stderr


def test_what_is_given_stays(here):
    given = {"learning_rate": 0.25, "batch_size": 7, "steps": 9, "epochs": 2.5}
    for name, value in given.items():
        job = prepare(read_job("job.yaml", [f"--{name}", str(value)])).job
        assert getattr(job.training, name) == value
        assert job.training.missing == ()
        assert (job.training.steps is None) is (name == "epochs")
    assert prepare(read_job("job.yaml", ["--learning_rate", "1", "--batch_size", "8", "--epochs", "1"])).recipe is None


def test_a_recipe_is_for_what_is_left_of_the_budget(here):
    """With most of it spent the rate is lower, the warning comes, and the twin takes the same values."""
    spent = Ledger((Event(0.5, 0.5, 4),))
    Path("spent.json").write_text(spent.to_json())
    whole = prepare(read_job("job.yaml", [])).recipe
    budget = spent.epsilon(1e-3).epsilon * 1.00001
    flags = ["--spent", "spent.json", "--dp-epsilon", f"{budget:.9f}"]
    left = prepare(read_job("job.yaml", flags)).recipe
    assert whole.epsilon == 8.0
    assert left.epsilon < 0.1
    assert left.learning_rate < whole.learning_rate
    outputs = [train(*flags, *more, "--dry-run").stdout for more in ([], ["--no-dp"])]
    assert all(f"  learning_rate = {left.learning_rate:.3g} " in output for output in outputs)
    assert "WARNING: this will hardly learn. Expected noise_to_signal <= 0.25" in outputs[0]
    lines = [line for line in outputs[0].splitlines() if line.startswith(("  ", "steps", "logical", "recipe"))]
    assert [line for line in lines if line not in outputs[1] and "noise" not in line] == []


def test_adapters_in_the_highest_layer_and_a_rate_for_the_head(here):
    prepared = prepare(read_job("job.yaml", ["--strategy", "lora"]))
    job, found = prepared.job, prepared.recipe
    assert (job.lora.top_layers, job.training.head_rate) == (1, found.head_rate)
    trained = [name for name, p in prepared.model.named_parameters() if p.requires_grad]
    assert all("layer.1." in name or "classifier" in name for name in trained)
    rates = {
        group["lr"]: len(group["params"]) for group in train_job.make_trainer(prepared, None).optimizer.param_groups
    }
    assert rates == {found.learning_rate: len(trained) - 1, found.head_rate: 1}
    own = prepare(read_job("job.yaml", ["--strategy", "lora", "--learning_rate", "0.1", "--top_layers", "2"])).job
    assert (own.lora.top_layers, own.training.head_rate) == (2, None)


@pytest.mark.parametrize("strategy", ["head", "lora"])
def test_the_trainer_with_the_recipe_is_the_run_of_the_command(here, strategy):
    """`DPTrainer` is told the recipe's name, the budget and what fits into memory: the same plan, rates and schedule."""
    prepared = prepare(read_job("job.yaml", ["--strategy", strategy]))
    job, model, found = prepared.job, copy.deepcopy(prepared.model), []
    told = PrivacyArguments(
        dp_epsilon=job.privacy.dp_epsilon, dp_delta=job.privacy.dp_delta, dp_recipe=strategy,
        dp_physical_batch_size=job.training.physical_batch_size,
    )  # fmt: skip
    by_name = DPTrainer(
        model=model, args=TrainingArguments("by-name", report_to="none", remove_unused_columns=False), privacy=told,
        loss="text_classification", train_dataset=prepared.records.train,
        data_collator=PadRight(0, job.data.max_length),
    )  # fmt: skip
    for trainer in (train_job.make_trainer(prepared, None), by_name):
        trainer.create_optimizer_and_scheduler(trainer.plan.num_steps)
        settings = {
            tuple(p.shape): [group[name] for name in ("initial_lr", "weight_decay", "betas", "eps")]
            for group in trainer.optimizer.param_groups
            for p in group["params"]
        }
        found.append((trainer.plan, trainer.args.lr_scheduler_type, trainer.args.warmup_steps, settings))
    assert found[0] == found[1]


REFUSED = {
    "there is no recipe for strategy='bitfit'": ["--strategy", "bitfit"],
    "the recipe needs privacy.dp_epsilon and privacy.dp_delta": ["--dp_noise_multiplier", "1.0"],
    "model.pooling: mean with classes or numbers of single texts": ["--strategy", "full", "--pooling", "mean"],
    "Expected lora.top_layers <= 2": ["--strategy", "lora", "--top_layers", "3"],
    "Expected no dp_recipe in a job": ["--dp_recipe", "head"],
    "Expected privacy.dp_views=1 with task='text_classification'": ["--dp_views", "2"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_recipe_is_refused_before_anything_is_written(here, message):
    result = train(*REFUSED[message])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not Path("run/job.json").exists()


def test_mistakes_in_the_tables_are_told_before_anything_is_spent(here):
    table = Path("mails.jsonl").read_text()
    Path("same.jsonl").write_text(table)
    seen = train("--eval_fraction", "0", "--data.eval", "same.jsonl", "--dry-run")
    assert seen.exit_code == 0, seen.output
    assert "WARNING: evaluation records are trained on as well" in seen.stdout
    assert "WARNING" not in train("--dry-run").stdout
    long = train("--max_length", "4096", "--dry-run")
    assert "Expected data.max_length <= " in long.stderr
    rows = [json.loads(line) for line in table.splitlines()]
    Path("mails.jsonl").write_text("".join(json.dumps({**row, "label": "sport"}) + "\n" for row in rows))
    assert "of two classes or more to train on in 'mails.jsonl', got one class alone" in train("--dry-run").stderr
    for label, hint in {
        " Sport": "which differs in capitals",
        "": "got none. It is empty, null or NaN",
        "eggs": "got another.",
    }.items():
        Path("mails.jsonl").write_text(table + json.dumps({**rows[0], "label": label}) + "\n")
        assert hint in train("--dry-run").stderr


@pytest.mark.slow
def test_a_resumed_run_has_the_recorded_values(here, monkeypatch):
    """A version of the library with other recipes goes on with the old values."""
    flags = ["--batch_size", 20, "--save_steps", 2, "--insecure-seed", 61001]
    monkeypatch.setattr(recipes, "_HEAD_STEPS", (20, 20))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train(*flags).exit_code == 1
    begun = json.loads(Path("run/job.json").read_text())
    other = dataclasses.replace(recipes._RULES["head"], steps=5, sampling_prob=0.9)
    monkeypatch.setitem(recipes._RULES, "head", other)
    monkeypatch.setattr(recipes, "_HEAD_WAY", 99.0)
    monkeypatch.setattr(recipes, "_HEAD_STEPS", (5, 5))
    result = train(*flags, "--resume", "--logging_steps", 50)
    assert result.exit_code == 0, result.output
    assert "recipe head" not in result.stdout
    assert json.loads(Path("run/privacy_accounting.json").read_text())["global_step"] == 20
    assert json.loads(Path("run/job.json").read_text()) == begun
