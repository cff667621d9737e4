"""Jobs of preferences: the reference in each record, what is learnt, refused, saved, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pair_jobs import pairs
from text_job import (
    at_events,
    files,
    interrupt_at,
    record,
    run,
    same,
    train,
    weights,
    write_model,
    write_rows,
)
from trainer_cases import again

from dpfunc.functional import functionalize
from dpfunc.hf.preferences import CollatePairs, Preference
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rng import insecure_key
from dpfunc.train import run as train_job
from dpfunc.train._collate import PadRight
from dpfunc.train._config_file import read_job
from dpfunc.train._frozen import compute_frozen
from dpfunc.train.run import prepare

JOB = """
task: preference
output_dir: run
model: {path: tiny, init: random}
data: {train: pairs.jsonl, max_length: 16, prompt_column: prompt, eval_fraction: 0.2}
privacy: {dp_epsilon: 20, dp_delta: 1e-3, dp_max_grad_norm: 1.0}
training: {learning_rate: 5e-2, batch_size: 32, steps: 6, physical_batch_size: 16, save_steps: 2}
preference: {beta: 0.5}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_model(tmp_path / "tiny")
    write_rows(tmp_path / "pairs.jsonl", pairs())
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(result):
    assert result.exit_code == 0, result.output
    return result


def test_the_reference_is_the_model_before_training(here):
    """Of each record alone, on both sides of the split; one record more changes no number of the others."""
    job = read_job("job.yaml")
    prepared = prepare(job)
    found, _ = compute_frozen(job, prepared.model, prepared.records, shows=False)
    base = prepared.model.get_base_model().eval()
    forward, params = functionalize(base, [next(name for name, _ in base.named_parameters())])
    for each in (*found.train[:5], *found.evaluation[:5]):
        for place, name in enumerate(("chosen", "rejected")):
            ids, labels = (torch.tensor(each[name][key]) for key in ("input_ids", "labels"))
            scores = forward(params, input_ids=ids[None]).logits[0].log_softmax(-1)
            learnt = [t for t in range(1, len(ids)) if labels[t] != -100]
            expected = sum(float(scores[t - 1, ids[t]]) for t in learnt)
            assert each["reference"][place] == pytest.approx(expected, rel=1e-4)
            assert len(learnt) >= 3  # with the end token
    write_rows("pairs.jsonl", [*pairs(), {**pairs(1, seed=5)[0], "chosen": "the goal was big and new today"}])
    more, _ = compute_frozen(job, prepared.model, prepare(job).records, shows=False)
    assert set(map(str, found.train)) < set(map(str, more.train)) or set(map(str, found.evaluation)) < set(
        map(str, more.evaluation)
    )


def test_a_run_learns_what_is_preferred(here):
    """Metrics are about pairs; the model that is saved has the loss that was told; a dry run writes nothing."""
    before = files(here)
    said = done(train("--dry-run")).stdout
    assert files(here) == before
    assert "trained parameters" in said
    assert "Nothing was trained, written or spent." in said
    again(insecure_key(5))
    said = done(train("--insecure-seed", 5, "--steps", 16, "--dp-epsilon", 60)).stdout
    found = json.loads(Path("run/metrics.json").read_text())
    assert found["eval_loss_of_reference"] == pytest.approx(0.69314718)
    assert found["eval_loss"] < 0.99 * found["eval_loss_of_reference"]
    assert found["eval_reward_accuracy"] > 0.7
    assert found["eval_reward_margin"] > 0
    assert "eval_reward_accuracy: " in said
    assert "eval_loss of the model before training: 0.6931" in said
    assert "one record protected" in said
    assert record("run")["epsilon"] <= 60
    assert any("lora_B" in name and value.any() for name, value in weights("run").items())
    drawn = done(
        run(
            "generate",
            "run",
            "-n",
            2,
            "--out",
            "texts.jsonl",
            "--allow-non-private",
            "--max-new-tokens",
            3,
            "--prompt",
            "label : sport text :",
        )
    )
    assert len(Path("texts.jsonl").read_text().splitlines()) == 2, drawn.output


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(here, monkeypatch):
    done(train("--output_dir", "whole", "--insecure-seed", 3))
    again(insecure_key(3))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train("--output_dir", "parts", "--insecure-seed", 3).exit_code == 1
    again(insecure_key(3))
    done(train("--output_dir", "parts", "--insecure-seed", 3, "--resume"))
    assert same("whole", "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--unit_column", "who", "--max_records_per_unit", 2, "--batch_size", 8),
        ("--no-dp",),
        ("--strategy", "full", "--preference.loss", "ipo", "--beta", 0.3, "--bf16"),
        ("--preference.loss", "hinge", "--eval_steps", 1, "--prompt_column", "null"),
    ],
    ids=["people", "twin", "full, IPO, bfloat16", "hinge, no prompt"],
)
def test_other_settings(here, flags):
    done(train("--steps", 2, *flags))
    folder = "run-no-dp" if "--no-dp" in flags else "run"
    found = json.loads(Path(folder, "metrics.json").read_text())
    beta = 0.3 if "ipo" in flags else 0.5
    start = 1 / (2 * beta) ** 2 if "ipo" in flags else 1.0 if "hinge" in flags else 0.69314718
    assert found["eval_loss_of_reference"] == pytest.approx(start, rel=1e-4)
    assert found["eval_loss"] != found["eval_loss_of_reference"]


def test_the_loss_is_that_of_the_settings(here, monkeypatch):
    """The Trainer of the job gets the loss, and records with their references, in training and in evaluation."""
    seen = []
    make = train_job.make_trainer
    monkeypatch.setattr(train_job, "make_trainer", lambda *given: seen.append(make(*given)) or seen[-1])
    done(train("--steps", 1, "--label_smoothing", 0.1))
    (trainer,) = seen
    assert trainer._task == Preference("sigmoid", 0.5, 0.1)
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert all(each["reference"] < (-1.0, -1.0) for each in dataset)
    model = trainer.model.cpu().eval()
    forward, params = functionalize(model)
    batch = CollatePairs(PadRight(0, 16))(trainer.eval_dataset)
    mean = float(make_loss_fn(forward, trainer._task)(params, batch).mean())
    assert json.loads(Path("run/metrics.json").read_text())["eval_loss"] == pytest.approx(mean, rel=1e-4)


REFUSED = {
    "an empty answer": (({**pairs(1)[0], "rejected": " "},), (), "column 'rejected' in row 121 of pairs.jsonl"),
    "no answer": (({"prompt": "a", "chosen": "b"},), (), "column 'rejected' in row 121"),
    "no such column": ((), ("--chosen_column", "best"), "column 'best'"),
    "smoothing of IPO": ((), ("--preference.loss", "ipo", "--label_smoothing", 0.1), "no label_smoothing with another loss than sigmoid"),
    "smoothing": ((), ("--label_smoothing", 0.5), "0 <= preference.label_smoothing < 0.5"),
    "beta": ((), ("--beta", 0), "0 < preference.beta"),
    "a loss that is none": ((), ("--preference.loss", "kto"), "--loss to be one of 'sigmoid', 'ipo' or 'hinge'"),
    "loss on the prompt": ((), ("--loss_on", "all"), "data.loss_on with task causal_lm only"),
    "of another task": ((), ("--task", "causal_lm", "--prompt_column", "null", "--beta", 0.2), "preference.beta with task preference only"),
    "a response": ((), ("--response_column", "chosen"), "data.response_column with task causal_lm or seq2seq only"),
    "4 bits on a CPU": ((), ("--strategy", "qlora", "--init", "pretrained"), "Expected another strategy than 'qlora' for preferences"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_what_is_refused_before_anything_is_spent(here, name, mode):
    more, flags, message = REFUSED[name]
    if name == "4 bits on a CPU" and torch.accelerator.is_available():
        message = "bitsandbytes"
    write_rows("pairs.jsonl", [*pairs(), *more])
    before = files(here)
    result = train(*flags, *mode)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert files(here) == before


def test_an_empty_prompt_is_a_prompt(here):
    write_rows("pairs.jsonl", [{**each, "prompt": None} for each in pairs()])
    done(train("--steps", 1))
