"""Telemetry of the Trainer: released statistics in the logs; and no number of records, and no times, anywhere."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from torch import nn
from trainer_cases import Seen, classifier, labelled, training_arguments
from transformers import HfArgumentParser
from transformers.utils import logging

import dpfunc
from dpfunc.clipping import Statistic, Telemetry
from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer._run import averaged, with_accuracy
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer

VALUES = {"dp_noise_multiplier": 1.0, "dp_delta": 1e-4, "dp_max_grad_norm": 1.0}
NAMES = ["loss:2", "accuracy", "clipped", "norm"]
NUM_RECORDS = 97  # a private number, below a public bound


class Twice(Seen):
    """Keeps what the steps have released."""

    def on_step_end(self, args, state, control, **kwargs):
        self.released = [*getattr(self, "released", []), self.trainer._run.state.telemetry]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a bound on the number of records: its logs, what was printed, and its folder."""
    folder, seen = tmp_path_factory.mktemp("run"), Twice()
    privacy = PrivacyArguments(**VALUES, dp_telemetry=NAMES, dp_dataset_size=120)
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": False}
    arguments = training_arguments(folder, **changes)
    seen.trainer = trainer = DPTrainer(
        classifier(), arguments, privacy=privacy, train_dataset=labelled(NUM_RECORDS), callbacks=[seen]
    )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    yield trainer, seen, folder
    logging.set_verbosity(verbosity)


def test_statistics_and_no_side_facts(run, capsys, caplog):
    """One run, for all of it: released statistics are logged as such, as means over the steps since the line before."""
    trainer, seen, folder = run
    output = trainer.train()
    told, printed = seen.released, capsys.readouterr()
    assert len(told) == 4
    for line, steps in zip(seen.logs[:2], (told[:2], told[2:]), strict=True):
        for name in ("loss", "accuracy", "clipped"):
            assert line[f"released/{name}"] == pytest.approx(sum(step[name] for step in steps) / 2, rel=1e-5)
        assert {f"released/norm_{place}" for place in range(6)} < line.keys()
    assert trainer.plan.telemetry.share == 0.05
    logged = [each.getMessage() for each in caplog.records if each.name.startswith(("transformers", "dpfunc"))]
    text = printed.out + printed.err + "\n".join(logged)
    for file in (file for file in folder.rglob("*") if file.is_file() and files.FOLDER not in file.parts):
        text += file.read_bytes().decode("latin-1") if file.suffix in (".json", ".jsonl", ".head") else ""
    assert "Num examples = 120" in text
    text = re.sub(r"\b[0-9a-f]{16,}\b", "", text)  # digests of random numbers, in which any number may stand
    assert not re.search(rf"(?<![\d.e-]){NUM_RECORDS}(?!\d)", text)
    text = re.sub(r"(Writing model shards|Loading weights)[^\n\r]*", "", text)  # bars over files and parameters
    assert not re.search(r"it/s|s/it|_runtime|per_second|\d\d:\d\d[,<\]]", text)
    assert "4/4" in printed.err
    assert not [name for name in output.metrics if "runtime" in name or "second" in name]
    assert "num_records=hidden" in repr(trainer._run.state)
    assert trainer._run.state.num_records == NUM_RECORDS


def test_accuracy_of_each_sample():
    forward, params = functionalize(nn.Linear(3, 4))
    telemetry = Telemetry((Statistic("accuracy", high=1.0),), 0.1)
    task = with_accuracy("sequence_classification", telemetry)
    assert with_accuracy("causal_lm", None) == "causal_lm"
    outputs = dataclasses.make_dataclass("Outputs", ["logits"])
    loss_fn = make_loss_fn(lambda p, x: outputs(forward(p, x)), task)
    batch = {"x": torch.randn(9, 3), "labels": torch.arange(9) % 4}
    _, unreleased = dpfunc.clipped_grad(loss_fn, params, batch, dpfunc.clipping.Flat(1.0))
    assert torch.equal(unreleased.aux["accuracy"], (forward(params, batch["x"]).argmax(1) == batch["labels"]).float())
    with pytest.raises(InvalidArgument, match="one class a sample for dp_telemetry='accuracy'"):
        loss_fn(params, {"x": torch.randn(2, 3), "labels": torch.zeros(2, 4)})


def test_arguments():
    flags = "--dp_noise_multiplier 1 --dp_delta 1e-4 --dp_max_grad_norm 2 --dp_telemetry loss:2 accuracy norm load:3"
    (parsed,) = HfArgumentParser(PrivacyArguments).parse_args_into_dataclasses(flags.split())
    telemetry = parsed.plan(1000, 10, 5).telemetry
    assert telemetry.statistics == (
        Statistic("loss", high=2.0), Statistic("accuracy", high=1.0), Statistic("norm", edges=(0.5, 1.0, 2.0, 4.0, 8.0)),
        Statistic("load", high=3.0),
    )  # fmt: skip
    for bad in ("loss:x", "load", "loss:-1", "loss:0"):
        with pytest.raises(InvalidArgument, match=r"NAME, or NAME:HIGHEST|public bound"):
            PrivacyArguments(**VALUES, dp_telemetry=[bad])
    with pytest.raises(InvalidArgument, match="0 < share < 1"):
        PrivacyArguments(**VALUES, dp_telemetry=["loss"], dp_telemetry_share=1.0)
    assert PrivacyArguments(**VALUES).telemetry() is None


def test_means_by_the_names_of_loggers():
    assert averaged([]) == averaged([None, None]) == {}
    found = averaged([{"loss": 1.0, "norm": [0.0, 1.0]}, {"loss": 2.0, "norm": [0.5, 0.5]}])
    assert found == {"released/loss": 1.5, "released/norm_0": 0.25, "released/norm_1": 0.75}
    assert all(math.isfinite(value) for value in found.values())
