"""What a run of the Trainer says about its plan and its budget; its twin without privacy; telemetry; no side facts."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from unittest import mock

import pytest
import torch
import trainer_cases as cases
from torch import nn
from transformers import DefaultFlowCallback, HfArgumentParser, ProgressCallback, Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.utils import logging as transformers_logging

import dpfunc
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import ONE_RECORD
from dpfunc.budget import Budget
from dpfunc.checkpoint.chain import known_end
from dpfunc.clipping import Statistic, Telemetry
from dpfunc.errors import BudgetExhausted, CheckpointError, InvalidArgument, NotWritten
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer._run import StepsBar, with_accuracy
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.rng import Key

DATA = cases.labelled()
JOURNAL = files.JOURNAL


def replace_bias(model):
    model.classifier.bias = nn.Parameter(model.classifier.bias.detach().clone())


CHANGES = {
    "freezes": (lambda model: model.classifier.requires_grad_(False), "classifier.weight, classifier.bias"),
    "unfreezes": (lambda model: model.bert.embeddings.requires_grad_(True), "bert.embeddings.word_embeddings.weight"),
    "replaces": (replace_bias, "classifier.bias"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_a_callback_changes_end_the_run(tmp_path, change):
    """Frozen ones were trained all the same; others would have had no gradient, in silence. The step is not taken."""
    act, names = CHANGES[change]
    model = cases.classifier()
    model.bert.embeddings.requires_grad_(False)
    trainer = cases.private(model, tmp_path, callbacks=[cases.at("on_step_end", lambda *_: act(model), 2)])
    with pytest.raises(InvalidArgument, match=rf"got \[{names}.*\] frozen, unfrozen or replaced .* spent nothing"):
        trainer.train()
    assert trainer.ledger.num_steps == 2


def test_a_warning_near_exhaustion_comes_once(tmp_path, caplog):
    privacy = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_warn_at=0.8)
    trainer = cases.private(cases.classifier(), tmp_path, privacy=privacy)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    warned = [record.getMessage() for record in caplog.records if "Privacy budget" in record.getMessage()]
    first = next(step for step in range(1, 11) if trainer.plan.guarantee(step).epsilon > 0.8 * 8.0)
    assert len(warned) == 1
    assert f"after step {first}. {10 - first} steps are left" in warned[0]


def test_the_twin_is_an_ordinary_trainer(tmp_path):
    """One label a sample: the mean over samples is the Trainer's own loss, with the same batches and dropout."""
    changes = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 4}
    twin = cases.private(
        cases.classifier(), tmp_path / "twin", privacy=PrivacyArguments(dp_enabled=False), changes=changes
    )
    output = twin.train()
    plain = Trainer(cases.classifier(), cases.training_arguments(tmp_path / "plain", **changes), train_dataset=DATA)
    plain.train()
    assert output.training_loss == pytest.approx(plain.state.log_history[-1]["train_loss"])
    ours = cases.trained(twin.model)
    assert all(torch.allclose(ours[name], value, atol=1e-6) for name, value in cases.trained(plain.model).items())
    assert not (tmp_path / "twin" / "privacy_journal.jsonl").exists()


def test_the_twin_takes_the_mean_over_samples_over_accumulated_batches(tmp_path):
    model = cases.language_model(dropout=0.0)
    changes = {"per_device_train_batch_size": 20, "max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 0}
    twin = cases.private(
        model, tmp_path, data=cases.texts(), privacy=PrivacyArguments(dp_enabled=False), data_collator=cases.pad,
        changes={**changes, "optim": "sgd"},
    )  # fmt: skip
    twin.train()
    by_hand = cases.language_model(dropout=0.0)
    losses = [by_hand(**cases.pad([record])).loss for record in cases.texts()]  # 3 batches of 20: all records
    torch.stack(losses).mean().backward()
    ours = cases.trained(model)
    for name, param in by_hand.named_parameters():
        assert torch.allclose(ours[name], param.detach() - param.grad, atol=1e-5), name


def test_a_dry_run_trains_nothing(tmp_path, capsys):
    model = cases.classifier()
    trainer = cases.private(model, tmp_path, privacy=dataclasses.replace(cases.NOISY, dp_dry_run=True))
    output = trainer.train()
    assert "10 steps, expected batch 12 of 60 records" in capsys.readouterr().out
    assert output.metrics["privacy/planned_epsilon"] == trainer.plan.guarantee().epsilon
    assert cases.same(cases.trained(model), cases.trained(cases.classifier()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("privacy", [cases.NOISY, PrivacyArguments(dp_enabled=False)], ids=["private", "twin"])
def test_processes_that_do_not_know_each_other_are_refused(tmp_path, monkeypatch, privacy):
    """Each would be a run of its own, with its own noise."""
    arguments = cases.training_arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match=r"Expected 2 processes, as WORLD_SIZE says, got 1.*use_cpu=True"):
        DPTrainer(cases.classifier(), arguments, privacy=privacy, train_dataset=DATA)


# Telemetry

VALUES = {"dp_noise_multiplier": 1.0, "dp_delta": 1e-4, "dp_max_grad_norm": 1.0}
NUM_RECORDS = 97  # a private number, below a public bound


def test_statistics_and_no_side_facts(tmp_path, capsys, caplog):
    """One run, for all of it: released statistics are logged as such, as means over the steps since the line before."""
    seen, told = cases.Seen(), []
    keep = cases.at("on_step_end", lambda args, state, control: told.append(trainer._run.state.telemetry))
    names = ["loss:2", "accuracy", "clipped", "norm"]
    trainer = DPTrainer(
        cases.classifier(), cases.training_arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, disable_tqdm=False),
        privacy=PrivacyArguments(**VALUES, dp_telemetry=names, dp_dataset_size=120),
        train_dataset=cases.labelled(NUM_RECORDS), callbacks=[seen, keep],
    )  # fmt: skip
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    output, printed = trainer.train(), capsys.readouterr()
    transformers_logging.set_verbosity(verbosity)
    assert len(told) == 4
    for line, steps in zip(seen.logs[:2], (told[:2], told[2:]), strict=True):
        for name in ("loss", "accuracy", "clipped"):
            assert line[f"released/{name}"] == pytest.approx(sum(step[name] for step in steps) / 2, rel=1e-5, abs=1e-5)
        norms = [sum(step["norm"][place] for step in steps) / 2 for place in range(6)]
        assert [line[f"released/norm_{place}"] for place in range(6)] == pytest.approx(norms, rel=1e-5, abs=1e-5)
    assert trainer.plan.telemetry.share == 0.05
    logged = [each.getMessage() for each in caplog.records if each.name.startswith(("transformers", "dpfunc"))]
    text = printed.out + printed.err + "\n".join(logged)
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and files.FOLDER not in file.parts):
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


class OwnBar(ProgressCallback):
    """A bar of a user."""


class InNotebook(TrainerCallback):
    """As the stock bar of notebooks, which is no `ProgressCallback`."""


@pytest.mark.parametrize("stock", [ProgressCallback, InNotebook])
@pytest.mark.parametrize("own", [[], [OwnBar], [ProgressCallback]])
def test_no_bar_of_transformers_shows_times(tmp_path, monkeypatch, stock, own):
    """Also in notebooks, and beside a bar of the user, which stays."""
    monkeypatch.setattr(trainer_module, "DEFAULT_PROGRESS_CALLBACK", stock)
    for enabled in (True, False):
        privacy = PrivacyArguments(**VALUES, dp_enabled=enabled)
        trainer = cases.private(
            cases.classifier(), tmp_path, privacy=privacy, changes={"disable_tqdm": False}, callbacks=own
        )
        bars = [type(each) for each in trainer.callback_handler.callbacks if not isinstance(each, DefaultFlowCallback)]
        assert bars == ([each for each in own if each is OwnBar] + [StepsBar] if enabled else [*own, stock])


def test_accuracy_of_each_sample():
    forward, params = functionalize(nn.Linear(3, 4))
    telemetry = Telemetry((Statistic("accuracy", high=1.0),), 0.1)
    task = with_accuracy("sequence_classification", telemetry)
    assert with_accuracy("causal_lm", None) == "causal_lm"
    outputs = dataclasses.make_dataclass("Outputs", ["logits"])
    loss_fn = make_loss_fn(lambda p, x: outputs(forward(p, x)), task)
    batch = {"x": torch.randn(9, 3), "labels": torch.arange(9) % 4}
    _, unreleased = dpfunc.clipped.clipped_grad(loss_fn, params, batch, dpfunc.clipping.Flat(1.0))
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


# A budget: reserved before the first step, settled at the end


@pytest.fixture
def budget(tmp_path):
    return Budget(tmp_path / "budget.db", run="first", spender="ana").create(
        epsilon=8.0, delta=1e-3, unit=ONE_RECORD, adjacency="add_remove", spenders=["ana"],
        earlier=Ledger((dpfunc.accounting.Event(0.2, 2.0, 5),)),
    )  # fmt: skip


def trainer(budget, folder, **options):
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    return cases.private(cases.classifier(), folder, privacy=cases.PRIVACY, changes=changes, budget=budget, **options)


def test_a_run_reserves_and_settles(budget, tmp_path):
    run = trainer(budget, tmp_path / "run")
    run.train()
    entry = budget.account().entries["first"]
    assert (entry.state, entry.charged) == ("settled", run.plan.ledger())
    assert budget.account().ledger() == run.ledger
    assert 7.9 < run.ledger.epsilon(1e-3).epsilon <= 8.0
    place = json.loads((tmp_path / "run" / "privacy_budget.json").read_text())
    assert (place["run"], place["number"], place["epsilon"]) == ("first", 1, 8.0)
    with pytest.raises(BudgetExhausted, match="of the data set"):  # whose plan was made for another budget
        trainer(dataclasses.replace(budget, run="second"), tmp_path / "second", ledger=Ledger()).train()
    assert not (tmp_path / "second" / "privacy_journal.jsonl").exists()


def test_an_interrupted_run_stays_charged_and_goes_on(budget, tmp_path):
    run = trainer(budget, tmp_path / "run", callbacks=[cases.at("on_pre_optimizer_step", cases.interrupt, 5)])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    account = budget.account()
    assert account.entries["first"].state == "reserved"
    assert account.ledger() == budget.account().facts.earlier + run.plan.ledger()
    assert budget.settle(tmp_path / "run").charged == run.plan.ledger(6)  # by hand: it was thought dead
    again = trainer(budget, tmp_path / "run")
    assert again.plan == run.plan
    again.train(resume_from_checkpoint=True)
    assert budget.account().entries["first"].charged == run.plan.ledger()
    assert budget.account().ledger() == again.ledger


KILLED = {  # where it is killed, and what is left
    "before its first checkpoint": ("_begin", ["checkpoint-key", JOURNAL, f"{JOURNAL}.head"]),
    "after it": ("_mask", ["checkpoint-0", "checkpoint-key", JOURNAL, f"{JOURNAL}.head"]),
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_before_its_first_step_finds_its_reservation(budget, tmp_path, name, resume):
    """It goes on as an uninterrupted one; or it is settled by its folder, which has the key and no step."""
    (method, left), folder = KILLED[name], tmp_path / "run"
    killed, noise = trainer(budget, folder), cases.again
    with mock.patch.object(killed, method, cases.interrupt), pytest.raises(KeyboardInterrupt):
        killed.train()
    assert sorted(path.name for path in folder.iterdir()) == left
    file = folder / "checkpoint-key" / "key.json"
    assert file.stat().st_mode & 0o777 == 0o600
    key = Key(bytes.fromhex(json.loads(file.read_text())["key"]))
    assert budget.settle(folder).charged == Ledger()
    again = trainer(budget, folder)
    assert again.plan == killed.plan
    again.train(resume_from_checkpoint=resume)
    assert not file.parent.exists()  # it is in the checkpoints
    assert budget.account().entries["first"].charged == again.plan.ledger()
    noise(key)
    whole = cases.private(cases.classifier(), tmp_path / "whole", key=key, privacy=cases.PRIVACY,
                          changes={"max_steps": 6}, ledger=budget.account().facts.earlier)  # fmt: skip
    whole.train()
    assert cases.same(cases.trained(again.model), cases.trained(whole.model))


def lost(folder, *names):
    for name in names:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


NOT_UNUSED = {  # what is done to the folder, and what is said
    "a journal that was lost": (lambda f: lost(f, JOURNAL, f"{JOURNAL}.head"), "has none"),
    "a journal that lost its line": (lambda f: (f / JOURNAL).write_text(""), "those after it are missing"),
    "the key of another run": (lambda f: lost(f, "checkpoint-key"), "has none"),
}


@pytest.mark.parametrize("name", NOT_UNUSED)
def test_a_run_that_may_have_released_a_step_is_not_settled_as_unused(budget, tmp_path, name):
    folder, (change, said) = tmp_path / "run", NOT_UNUSED[name]
    stopped = trainer(budget, folder, callbacks=[cases.at("on_pre_optimizer_step", cases.interrupt)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    if name == "the key of another run":
        lost(folder, JOURNAL, f"{JOURNAL}.head")
        known_end(folder / JOURNAL)
    change(folder)
    with pytest.raises((InvalidArgument, CheckpointError), match=said):
        budget.settle(folder)
    assert budget.account().entries["first"].charged == stopped.plan.ledger()


def test_a_copy_of_a_folder_does_not_begin_with_the_same_key(budget, tmp_path):
    killed = trainer(budget, tmp_path / "run")
    with mock.patch.object(killed, "_begin", cases.interrupt), pytest.raises(KeyboardInterrupt):
        killed.train()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="Expected the folder in which this run has reserved"):
            trainer(budget, tmp_path / "copy").train(resume_from_checkpoint=resume)


def test_another_unit_is_refused_before_a_step(budget, tmp_path):
    with pytest.raises(InvalidArgument, match="unit to be one of 'one record"):
        trainer(budget, tmp_path / "run", unit="one person").train()
    assert budget.account().number == 0
    assert not (tmp_path / "run" / "privacy_journal.jsonl").exists()


def test_a_finished_run_is_not_lost_with_the_database(budget, tmp_path, caplog, monkeypatch):
    """It stays charged in full, and is settled later."""
    run = trainer(budget, tmp_path / "run")
    monkeypatch.setattr(Budget, "settle", mock.Mock(side_effect=NotWritten("The database is away.")))
    run.train()
    assert "until `dpfunc budget settle`" in caplog.text
    monkeypatch.undo()
    assert budget.account().entries["first"].state == "reserved"
    assert budget.settle(tmp_path / "run").charged == run.plan.ledger()
