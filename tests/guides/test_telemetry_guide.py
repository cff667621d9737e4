"""The guide of telemetry runs, and releases what it says."""

from __future__ import annotations

import re
from pathlib import Path

from trainer_cases import classifier, labelled, training_arguments

from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "telemetry.md").read_text()
LOOP, CALLBACK = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_loop_runs(capsys):
    names = {}
    exec(compile(LOOP, "telemetry.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 21
    errors, state = names["plan"].telemetry_errors(), names["state"]
    assert abs(state.telemetry["accuracy"] - 1 / 3) < 6 * errors["accuracy"] + 0.2
    assert len(state.telemetry["norm"]) == 4


def test_a_run_ends_early_by_what_it_releases(tmp_path):
    """Of 40 losses with noise, the odds that each is below all before are 1 to 40!; steps that are not taken cost nothing."""
    names = {}
    exec(compile(CALLBACK, "telemetry.md", "exec"), names)
    privacy = PrivacyArguments(
        dp_noise_multiplier=2.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_telemetry=["loss:4", "accuracy"]
    )
    trainer = DPTrainer(
        classifier(), training_arguments(tmp_path, max_steps=40, logging_steps=1), privacy=privacy,
        train_dataset=labelled(), callbacks=[names["StopAtReleasedLoss"]()],
    )  # fmt: skip
    trainer.train()
    steps = trainer.state.global_step
    assert steps == trainer.ledger.num_steps < 40
    losses = [line["released/loss"] for line in trainer.state.log_history if "released/loss" in line]
    assert losses[steps - 1] >= min(losses[: steps - 1])
