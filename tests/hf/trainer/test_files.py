"""A killed or stopped Trainer run goes on bit for bit, pays for each step once, and only with what it was started with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import trainer_cases as cases
from full_disk import allow
from journal_cases import written
from record_cases import record
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import dpfunc
from dpfunc.checkpoint.chain import head_path, known_end
from dpfunc.checkpoint.costs import read_spent
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import CheckpointError, InvalidArgument, LedgerConflict, NotWritten
from dpfunc.hf.trainer import _files as trainer_state
from dpfunc.hf.trainer import trainer as trainer_module
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.rng import fingerprint

DATA = cases.labelled()
CHANGES = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
KEY = dpfunc.rng.insecure_key(11)


def run(folder, *, privacy=cases.PRIVACY, changes=None, **options):
    return cases.private(cases.classifier(), folder, privacy=privacy, changes={**CHANGES, **(changes or {})}, **options)


JOURNAL, HEAD, ACCOUNTING = "privacy_journal.jsonl", "privacy_journal.jsonl.head", "privacy_accounting.json"


def resumed(folder, checkpoint=True, **options):
    """A new trainer that has gone on with the run of a folder to its end."""
    trainer = run(folder, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def interrupted(folder, step, **options):
    """A trainer whose run was interrupted after a step."""
    callback = cases.at("on_step_end", cases.interrupt, step)
    trainer = run(folder, callbacks=[callback], **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(callback)
    return trainer


def test_a_model_that_cannot_be_saved_is_found_before_anything_is_spent(tmp_path, monkeypatch):
    """It is saved before the first step, as at the end: what a class refuses then, it refuses now."""

    def save_pretrained(*args, **kwargs):
        raise RuntimeError("this class cannot be saved")

    trainer = run(tmp_path)
    monkeypatch.setattr(type(trainer.model), "save_pretrained", save_pretrained)
    with pytest.raises(RuntimeError, match="this class cannot be saved"):
        trainer.train()
    assert trainer.ledger.num_steps == 0


def refused(said, trainer, checkpoint=True):
    with pytest.raises(CheckpointError, match=said):
        trainer.train(resume_from_checkpoint=checkpoint)


def steps_of(folder):
    return journal_ledger(folder / JOURNAL)


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def masked(records):
    """`pad` with tokens masked at random, by torch's generator."""
    batch = cases.pad(records)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 39)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    trainer = run(tmp_path_factory.mktemp("uninterrupted"), key=KEY)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder as a kill leaves it in step 7 (from 0), whose private gradients are there, after checkpoint 6."""
    folder = tmp_path_factory.mktemp("killed")
    copy = cases.at("on_pre_optimizer_step", lambda *args: shutil.copytree(folder / "run", folder / "left"), 7)
    run(folder / "run", key=KEY, callbacks=[copy, cases.stop(8)]).train()
    shutil.rmtree(folder / "run")
    return folder / "left"


def copy_of(folder, target):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(uninterrupted, killed, tmp_path):
    """Step 7 was journalled and may have been seen: it is repeated with the same noise, and paid for once."""
    folder = copy_of(killed, tmp_path)
    assert names(folder) == ["checkpoint-6"]  # save_total_limit
    plan = uninterrupted.plan
    assert steps_of(folder) == plan.ledger(8)  # all that was released, and no less
    spent = {}
    keep = cases.at("on_step_end", lambda args, state, control: spent.update({state.global_step: trainer.ledger}))
    trainer = run(folder, callbacks=[keep])
    output = trainer.train(resume_from_checkpoint=True)
    assert cases.same(cases.trained(trainer.model), cases.trained(uninterrupted.model))
    assert output.global_step == 10
    assert trainer.ledger == plan.ledger()
    assert steps_of(folder) == plan.ledger()
    assert spent[7] == spent[8] == plan.ledger(8)  # step 8 was taken in the killed process
    assert json.loads((folder / ACCOUNTING).read_text())["epsilon"] == plan.guarantee().epsilon
    for name in ("epoch", "learning_rate"):
        told = [[logs.get(name) for logs in one.state.log_history] for one in (trainer, uninterrupted)]
        assert told[0] == told[1]


def test_a_stopped_language_model_with_adapters_and_random_masks_resumes(tmp_path):
    """Dropout, random masking in the collator, a worker, and an epoch that is resumed in its middle."""

    def model():
        made = cases.adapted(lora_dropout=0.2)
        made.get_base_model().transformer.ln_f.weight.requires_grad_(True)  # PEFT does not save it
        return made

    def start(folder, **options):
        changes = {**CHANGES, "max_steps": 7, "dataloader_num_workers": 1, "adam_beta1": 0.5, "learning_rate": 0.1}
        return cases.private(model(), folder, data=cases.texts(), data_collator=masked, changes=changes, **options)

    key = dpfunc.rng.insecure_key(13)
    whole = start(tmp_path / "whole", key=key)
    whole.train()
    start(tmp_path / "parts", key=key, callbacks=[cases.stop(4)]).train()
    second = start(tmp_path / "parts")
    torch.manual_seed(99)  # nothing may depend on it
    second.train(resume_from_checkpoint=True)
    assert cases.same(cases.trained(second.model), cases.trained(whole.model))
    assert not cases.same(cases.trained(second.model), cases.trained(model()))
    assert second.ledger == whole.ledger


def test_what_was_frozen_stays_frozen(tmp_path):
    """FFA-LoRA: when PEFT reads an adapter with a name of its own, it lets all of it require gradients."""
    from peft import LoraConfig, get_peft_model

    def model():
        settings = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        base = cases.language_model()
        torch.manual_seed(5)
        made = get_peft_model(base, settings, adapter_name="mine")
        for name, parameter in made.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
        return made

    def start(folder, **options):
        return cases.private(
            model(), folder, data=cases.texts(), data_collator=cases.pad, changes={**CHANGES, "max_steps": 5}, **options
        )

    key = dpfunc.rng.insecure_key(14)
    whole = start(tmp_path / "whole", key=key)
    whole.train()
    start(tmp_path / "parts", key=key, callbacks=[cases.stop(4)]).train()
    second = start(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert [name for name in cases.trained(second.model) if "lora_B" not in name] == []
    before, after = model().state_dict(), second.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {*cases.trained(second.model)}
    assert cases.same(cases.trained(second.model), cases.trained(whole.model))


def test_the_same_trainer_goes_on_after_an_interruption(uninterrupted, tmp_path):
    trainer = interrupted(tmp_path, 5, key=KEY)
    assert json.loads((tmp_path / ACCOUNTING).read_text())["global_step"] == 5
    trainer.train(resume_from_checkpoint=True)
    assert cases.same(cases.trained(trainer.model), cases.trained(uninterrupted.model))


def test_a_trainer_goes_on_with_its_own_run_and_all_of_its_journal(tmp_path):
    trainer = interrupted(tmp_path / "one", 5)
    journal = tmp_path / "one" / JOURNAL
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join(lines[:4]) + b"\n")
    refused("Expected 5 lines in the journal .* got 4", trainer)
    journal.unlink()
    head_path(journal).unlink()
    written(journal, *(json.loads(line) for line in lines[:4]))  # as from a backup, which fits together
    refused("have all 5 steps that this trainer took, got 4", trainer)
    assert trainer.ledger == trainer.plan.ledger(5)
    run(tmp_path / "two", callbacks=[cases.stop(4)]).train()
    copy_journal(tmp_path / "two", tmp_path / "one")
    missing(JOURNAL, HEAD)(tmp_path / "two")
    refused("another run than this trainer's", trainer, str(tmp_path / "two" / "checkpoint-3"))


def test_what_a_resumed_run_leaves_and_removes(killed, tmp_path):
    """Looking at batches inside and after a run changes nothing; what kills left is swept; the accounting of an earlier
    interruption, which would count fewer steps than were taken, is gone at once."""

    def look(args, state, control):
        trainer.get_train_dataloader()
        assert trainer.ledger.num_steps >= state.global_step
        assert not (folder / ACCOUNTING).exists()

    folder = copy_of(killed, tmp_path)
    left = [folder / ".removing-checkpoint-3-ab", folder / "checkpoint-6" / "dpfunc" / ".saving-xyz"]
    for path in left:
        path.mkdir()
        (path / "state.json").write_text("the key")
    spent = dpfunc.Ledger((dpfunc.accounting.Event(0.5, 2.0, 4),))
    (folder / ACCOUNTING).write_text(
        record(ledger=spent, epsilon=spent.epsilon(1e-5, "rdp").epsilon, accountant="rdp", global_step=4).to_json()
    )
    with pytest.raises(InvalidArgument, match="with 4; the journal beside it has 8"):
        read_spent([folder / ACCOUNTING])
    cases.again(KEY)
    trainer = run(folder, callbacks=[cases.at("on_step_end", look)])
    trainer.train(resume_from_checkpoint=True)
    assert not any(path.exists() for path in left)
    assert read_spent([folder / ACCOUNTING]).num_steps == 10
    after = {name: p.clone() for name, p in cases.trained(trainer.model).items()}
    assert len(list(trainer.get_train_dataloader())) == 5
    assert trainer.ledger == trainer.plan.ledger()
    assert cases.same(cases.trained(trainer.model), after)


def test_half_written_and_half_removed_checkpoints_are_passed_over(killed, tmp_path, caplog):
    """Their numbers can be higher than those to come, and they are no reason to remove a whole one."""
    folder = copy_of(killed, tmp_path)
    for number in (3, 7, 8, 9):
        shutil.copytree(folder / "checkpoint-6", folder / f"checkpoint-{number}")
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    (folder / "checkpoint-7" / "trainer_state.json").write_text('{"global')
    (folder / "checkpoint-8" / "dpfunc" / "trainer_files.json").unlink()
    next((folder / "checkpoint-9" / "dpfunc").glob("step-*/state.json")).unlink()
    assert trainer_state.newest(folder).name == "checkpoint-6"
    assert "checkpoint-9 is not complete" in caplog.text
    assert {path.name[-1] for path in trainer_state.outdated(folder, 1, None)} == {*"3789"}
    refused("Expected a complete checkpoint", run(folder), str(folder / "checkpoint-7"))


def test_a_folder_of_several_runs_is_not_guessed_about(killed, tmp_path, caplog):
    """A higher number is not a newer run; and runs that use a folder one after the other leave no mixture of files."""
    folder, options = copy_of(killed, tmp_path), {"privacy": cases.NOISY}
    run(folder, changes={"save_strategy": "no", "max_steps": 1}, ledger=steps_of(folder), **options).train()
    refused("The run that began last .* left no checkpoint; checkpoint-6 is of another", run(folder))
    options["changes"] = {"save_steps": 1, "save_total_limit": 9}
    run(folder, callbacks=[cases.stop(2)], ledger=steps_of(folder), **options).train()
    several = r"Expected checkpoints of one run, got several: checkpoint-2 of run .* checkpoint-6 of run"
    refused(several, run(folder, **options))
    last = run(folder, callbacks=[cases.stop(2)], ledger=steps_of(folder), **options)
    last.train()
    for path in (folder / "checkpoint-1", folder / "checkpoint-2"):
        (state,) = (path / "dpfunc").glob("step-*/state.json")
        assert json.loads(state.read_text())["key"] == last._run.state.key.secret.hex()
    resumed(folder, str(folder / "checkpoint-6"))
    assert "has 5 steps of other runs" in caplog.text


def test_no_checkpoint_is_removed_before_the_next_one_is_whole(killed, tmp_path, monkeypatch):
    """A kill after the Trainer's own files: the old checkpoint is there, and the other is passed over."""

    folder = copy_of(killed, tmp_path)
    monkeypatch.setattr(trainer_state, "finish", cases.interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(folder).train(resume_from_checkpoint=True)
    assert names(folder) == ["checkpoint-6", "checkpoint-9"]
    assert trainer_state.newest(folder).name == "checkpoint-6"


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_that_a_signal_asks_for_is_gone_on_from(uninterrupted, tmp_path, event):
    """Transformers marks it as incomplete with a file, which it removes after all others are listed."""

    def signalled(args, state, control):
        (manager,) = [c.jit_manager for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]
        manager.is_checkpoint_requested = True

    changes = {"enable_jit_checkpoint": True}
    trainer = run(tmp_path, key=KEY, changes=changes)
    trainer.callback_handler.callbacks.insert(0, cases.at(event, signalled, 4))
    trainer.train()
    assert trainer.ledger.num_steps < 10
    assert cases.same(cases.trained(resumed(tmp_path, changes=changes).model), cases.trained(uninterrupted.model))


def test_a_checkpoint_between_gradients_and_optimizer_is_of_before_both(uninterrupted, tmp_path):
    def save(*args):
        trainer._save_checkpoint(trainer.model, trial=None)
        raise KeyboardInterrupt

    trainer = run(tmp_path, key=KEY, callbacks=[cases.at("on_pre_optimizer_step", save, 4)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    second = resumed(tmp_path, str(tmp_path / "checkpoint-4"))
    assert cases.same(cases.trained(second.model), cases.trained(uninterrupted.model))
    assert second.ledger == uninterrupted.plan.ledger()


def changed(name):
    return lambda folder: (folder / "checkpoint-6" / name).write_bytes(
        (folder / "checkpoint-6" / name).read_bytes() + b" "
    )


def missing(*names):
    def take_away(folder):
        for path in (folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    return take_away


HALF = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-3, dp_max_grad_norm=0.5)
OTHER = [{**record, "labels": 1 - record["labels"]} for record in DATA]
REFUSED = {  # options, what happens to the folder, what is said
    "key": ({"key": dpfunc.rng.insecure_key(999)}, None, "another key"),
    "labels": ({"data": OTHER}, None, "another data set"), "order": ({"data": DATA[::-1]}, None, "another data set"),
    "name": ({"data_name": "mails-2026-02"}, None, "another data set"),
    "steps": ({"changes": {"num_train_epochs": 3}}, None, "another plan.*num_steps"),
    "batch": ({"changes": {"per_device_train_batch_size": 8}}, None, "another plan.*sampling_prob"),
    "bound": ({"privacy": HALF}, None, "another plan.*clip_norm"),
    # the Trainer would start the optimizer anew: other parameters, and later steps, with the same noise
    **{name: ({}, missing(f"checkpoint-6/{name}"), f"{name} is missing or was changed")
       for name in ("optimizer.pt", "rng_state.pth")},
    **{name: ({}, changed(name), f"{name} is missing or was changed")
       for name in ("scheduler.pt", "trainer_state.json", "model.safetensors")},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused(killed, tmp_path, name):
    """And files of the Trainer that are missing or changed."""
    folder, (options, change, said) = copy_of(killed, tmp_path), REFUSED[name]
    before = (folder / JOURNAL).read_bytes()
    if change is not None:
        change(folder)
    refused(said, run(folder, **options))
    assert (folder / JOURNAL).read_bytes() == before


def copy_journal(source, folder):
    for name in (JOURNAL, HEAD):
        shutil.copy(source / name, folder)


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A folder after the first release of a run that would save at its end."""
    folder = tmp_path_factory.mktemp("early")
    as_a_kill = lambda *args: shutil.copytree(folder / "run", folder / "killed")
    copy = cases.at("on_pre_optimizer_step", as_a_kill)
    run(folder / "run", key=KEY, changes={"save_steps": 50}, callbacks=[copy, cases.stop()]).train()
    shutil.rmtree(folder / "run")
    return folder / "killed"


def test_a_run_killed_after_its_first_step_goes_on_bit_for_bit(early, uninterrupted, tmp_path):
    folder = copy_of(early, tmp_path)
    assert names(folder) == ["checkpoint-0"]
    assert steps_of(folder).num_steps == 1
    cases.again(KEY)
    trainer = resumed(folder, changes={"save_steps": 50})
    assert cases.same(cases.trained(trainer.model), cases.trained(uninterrupted.model))
    assert steps_of(folder) == trainer.ledger == trainer.plan.ledger()
    assert names(folder) == ["checkpoint-10"]


@pytest.mark.parametrize(
    "left", [["checkpoint-0", JOURNAL, HEAD], ["checkpoint-0"], ["checkpoint-0/trainer_state.json"]]
)
def test_a_run_that_released_nothing_begins_again(early, tmp_path, left):
    """With what a kill before the first step may have left out."""
    folder = copy_of(early, tmp_path)
    missing(JOURNAL, HEAD)(folder)
    known_end(folder / JOURNAL)
    missing(*left)(folder)
    (folder / "runs").mkdir()  # of a logger
    trainer = resumed(folder, changes={"max_steps": 1})
    assert steps_of(folder) == trainer.ledger == trainer.plan.ledger(1)


RELEASED = {  # what is missing, and what is said
    "no checkpoint": (["checkpoint-0"], "The journal counts 1 steps"),
    "half a checkpoint": (["checkpoint-0/trainer_state.json"], "The journal counts 1 steps"),
    "no journal, nor its end": ([JOURNAL, HEAD], "got no such file. Restore the journal"),
    "no journal": ([JOURNAL, "checkpoint-0"], "line 1 and those after it are missing"),
    "only the accounting": (
        [JOURNAL, HEAD, "checkpoint-0"],
        "files there are of steps that its journal lacks. Restore",
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_run_that_may_have_released_a_step_does_not(early, tmp_path, name):
    folder = copy_of(early, tmp_path)
    lost, said = RELEASED[name]
    missing(*lost)(folder)
    if "accounting" in name:
        (folder / ACCOUNTING).write_text("of an earlier end")
    refused(said, run(folder))


def test_a_new_run_counts_those_in_its_journal(killed, tmp_path):
    """An earlier run whose model may have been kept is not forgotten, and the new one begins with its cost."""
    copy_journal(killed, tmp_path)
    earlier = steps_of(tmp_path)
    settings = {"privacy": cases.NOISY, "changes": {"max_steps": 1, "save_strategy": "no"}}
    (tmp_path / ACCOUNTING).write_text("of the run before")
    with pytest.raises(LedgerConflict, match="got one that lacks 8.*dpfunc.checkpoint.journal_ledger"):
        run(tmp_path, **settings).train()
    assert steps_of(tmp_path) == earlier
    assert (tmp_path / ACCOUNTING).exists()
    trainer = run(tmp_path, ledger=earlier, **settings)
    trainer.train()
    assert trainer.ledger.num_steps == 9


def test_a_resumed_run_is_given_no_other_ledger(tmp_path):
    """What another run has spent since cannot be slipped in: the plan was made without it, and it would be lost."""
    earlier, more = (dpfunc.Ledger((dpfunc.accounting.Event(0.5, 2.0, steps),)) for steps in (3, 5))
    run(tmp_path, privacy=cases.NOISY, ledger=earlier, callbacks=[cases.stop(4)]).train()
    refused("Expected the ledger that the run was started with", run(tmp_path, privacy=cases.NOISY, ledger=more))
    trainer = resumed(tmp_path, privacy=cases.NOISY, ledger=earlier, callbacks=[cases.stop(6)])
    assert trainer.ledger == earlier.compose(trainer.plan.ledger(trainer.ledger.num_steps - 3))


def test_the_key_is_readable_by_its_owner_alone(killed):
    (state,) = (killed / "checkpoint-6" / "dpfunc").glob("step-*/state.json")
    assert state.stat().st_mode & 0o077 == 0
    assert KEY.secret.hex() in state.read_text()
    told = [path for path in killed.rglob("*") if path.is_file() and path != state]
    assert not any(KEY.secret.hex().encode() in path.read_bytes() for path in told)
    assert fingerprint(KEY) in (killed / JOURNAL).read_text()


def test_an_interruption_after_a_release_is_counted(tmp_path, monkeypatch):
    """Ctrl-C between the release of a step and the assignment of its result: the accounting has the step."""
    adaptive = PrivacyArguments(**{**vars(cases.PRIVACY), "dp_clip": "adaptive"})
    options = {"privacy": adaptive, "changes": {"max_steps": 4}}
    trainer = run(tmp_path, key=dpfunc.secure_key(), **options)
    real = trainer_module.replace

    def stopping(run, **changes):
        if "state" in changes and changes["state"].step == 3:
            raise KeyboardInterrupt
        return real(run, **changes)

    monkeypatch.setattr(trainer_module, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.ledger.num_steps == 2
    said = json.loads((tmp_path / ACCOUNTING).read_text())
    assert steps_of(tmp_path).num_steps == said["global_step"] == 3
    assert read_spent([tmp_path / ACCOUNTING]) == steps_of(tmp_path) == trainer.plan.ledger(3)
    assert trainer_module.OLD_BOUND in said["not_covered"]  # what the last step released of the norms is not known here
    monkeypatch.undo()
    second = resumed(tmp_path, **options)
    assert second.ledger == steps_of(tmp_path) == second.plan.ledger()
    assert trainer_module.OLD_BOUND not in json.loads((tmp_path / ACCOUNTING).read_text())["not_covered"]


@pytest.mark.parametrize("when", ["on_step_begin", "on_train_end"])
def test_a_full_disk_loses_nothing(tmp_path, when):
    """Nor does the accounting that cannot be written hide why a run ended."""
    short = {"max_steps": 2}
    trainer = run(
        tmp_path, key=dpfunc.secure_key(), changes=short, callbacks=[cases.at(when, lambda *args: allow(700))]
    )
    try:
        with pytest.raises(NotWritten, match=r"could not be written: .* steps were released and epsilon=\d") as told:
            trainer.train()
    finally:
        allow()
    assert (ACCOUNTING if "end" in when else "checkpoint-0") in str(told.value).split(" could")[0]
    second = resumed(tmp_path, changes=short)
    assert second.ledger == second.plan.ledger()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    trainer = run(tmp_path / "run")
    trainer.args.output_dir = str(tmp_path / "file" / "run")
    with pytest.raises(
        InvalidArgument, match=r"Expected a folder that can be written, got .*: Not a directory. Nothing"
    ):
        trainer.train()


def test_a_journal_that_lost_steps_is_no_accounting(tmp_path, monkeypatch):
    trainer = run(tmp_path, key=dpfunc.secure_key(), changes={"max_steps": 1})
    monkeypatch.setattr(trainer_state, "read_steps", lambda *args, **options: {})
    with pytest.raises(CheckpointError, match=r"Expected the \d+ steps of this run in the journal .*, got 0"):
        trainer.train()
