"""DPTrainer: the steps of a plain loop inside the Trainer, what it says, and what it refuses."""

from __future__ import annotations

import json
import logging
import math
import random

import pytest
import torch
import trainer_cases as cases
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

import dpfunc
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import EXACT_SIZE
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import InvalidArgument, UnreachableBudget, UnsupportedModel
from dpfunc.functional import replace_batchnorm
from dpfunc.hf.trainer._settings import recomputed, refuse_model
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import LOGGED_LOSS, DPTrainer
from dpfunc.sampling import Shuffled

DATA = cases.labelled()
TEXTS = cases.texts()
VALUES = {"dp_noise_multiplier": 1.0, "dp_delta": 1e-3, "dp_max_grad_norm": 1.0}
KEY = dpfunc.rng.insecure_key


def sgd(params):
    """The optimizer and the schedule of a plain loop."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def written(folder, name="privacy_accounting.json"):
    return json.loads((folder / name).read_text())


def columns(records):
    return default_collate([{n: v for n, v in record.items() if n != "age"} for record in records])


# The run is the plain loop


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run over a budget with checkpoints, evaluation and a logger."""
    folder, seen = tmp_path_factory.mktemp("finished"), cases.Seen()
    changes = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"}
    trainer = cases.private(
        cases.classifier(),
        folder,
        key=KEY(1),
        privacy=cases.PRIVACY,
        changes=changes,
        callbacks=[seen],
        eval_dataset=DATA[:10],
    )
    return trainer, trainer.train(), seen, folder


def test_the_trainer_equals_a_plain_loop(finished):
    """The Trainer's AdamW, schedule and dropout, over records that are collated as usual: bit for bit."""
    trainer, output, _, _ = finished

    def adamw(params):
        optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, fused=True)
        return optimizer, get_linear_schedule_with_warmup(optimizer, 0, 10)

    by_hand = cases.plain_loop(cases.classifier(), DATA, columns, trainer.plan, KEY(1), adamw)
    assert output.global_step == 10
    assert cases.same(cases.trained(trainer.model), by_hand)
    assert not cases.same(cases.trained(trainer.model), cases.trained(cases.classifier()))


def test_language_model_with_padding_and_empty_draws_equals_a_plain_loop(tmp_path):
    """One record is expected in a batch: some draws are empty, and are steps like others. Optimizer and schedule given."""
    model = cases.language_model()
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 12}
    optimizers = sgd(model.parameters())
    trainer = cases.private(
        model, tmp_path, key=KEY(2), data=TEXTS, changes=changes, data_collator=cases.pad, optimizers=optimizers
    )
    trainer.train()
    sizes = [len(trainer.plan.sampler.indices(KEY(2), step)) for step in range(12)]
    assert 0 in sizes
    assert max(sizes) > 1
    by_hand = cases.plain_loop(cases.language_model(), TEXTS, cases.pad, trainer.plan, KEY(2), sgd, microbatch_size=1)
    assert cases.same(cases.trained(trainer.model), by_hand)


@pytest.mark.parametrize(
    ("privacy", "changes"),
    [
        ({"dp_physical_batch_size": 3}, {"dataloader_num_workers": 1}), ({"dp_engine": "loop"}, {}),
        ({}, {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, **recomputed(TrainingArguments)}),
    ],
    ids=["physical, workers", "engine", "accumulation, checkpointing"],
)  # fmt: skip
def test_memory_and_speed_change_no_result(finished_short, tmp_path, privacy, changes):
    """Physical batches, accumulation, engine, checkpointing, workers: the same draws, noise and mean."""
    trainer = short(tmp_path, privacy=PrivacyArguments(**VALUES, **privacy), **changes)
    assert trainer.logical_batch_size == 12
    trainer.train()
    for name, value in cases.trained(trainer.model).items():
        assert torch.allclose(value, finished_short[name], atol=1e-6), name


def short(folder, model=None, privacy=cases.NOISY, **changes):
    return cases.private(
        cases.language_model(dropout=0.0) if model is None else model, folder, key=KEY(4), data=TEXTS, data_collator=cases.pad,
        privacy=privacy, changes={"max_steps": 3, "optim": "sgd", **changes},
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished_short(tmp_path_factory):
    trainer = short(tmp_path_factory.mktemp("short"))
    trainer.train()
    return cases.trained(trainer.model)


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bfloat16_trains_as_float32_does(tmp_path, finished_short, how):
    dtype = torch.bfloat16 if how == "weights" else torch.float32
    model = cases.language_model(dropout=0.0).to(dtype)
    short(tmp_path, model, bf16=how == "autocast").train()
    for name, value in cases.trained(model).items():
        assert value.dtype == dtype
        assert torch.allclose(value.float(), finished_short[name], atol=2e-2), name


@pytest.mark.filterwarnings("default::dpfunc.errors.InsecureKeyWarning")  # that pyproject.toml ignores
def test_shuffled_batches_and_noise_of_the_device(tmp_path):
    """Stopped after three steps. Without a CUDA device there is one source of noise, the secure one. A key that everybody
    knows is told, the loss is logged as unreleased, and the caller's arguments are left alone."""
    seen = cases.Seen()
    switches = {"dp_poisson_sampling": False, "dp_secure_mode": False, "dp_log_unreleased": True}
    privacy, arguments = PrivacyArguments(**VALUES, **switches), cases.training_arguments(tmp_path)
    cases.again(KEY(5))
    trainer = DPTrainer(
        cases.classifier(), arguments, privacy=privacy, key=KEY(5), train_dataset=DATA, callbacks=[seen, cases.stop(3)]
    )
    batch = next(iter(trainer.get_train_dataloader()))  # which is no run
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(dpfunc.errors.InsecureKeyWarning, match="known to everybody"):
        output = trainer.train()
    record = written(tmp_path)
    assert trainer.plan.sampler == Shuffled(60, 12)
    assert trainer.plan.ledger() == Ledger((dpfunc.accounting.Event(1.0, 1.0, 2),), "zero_out")
    assert output.global_step == record["global_step"] == 3
    assert output.metrics["privacy/epsilon"] == record["epsilon"] == trainer.plan.guarantee(3).epsilon
    assert trainer._run.dp_step.noise_source == "secure"
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 3)
    assert (arguments.max_grad_norm, trainer.args.max_grad_norm) == (1.0, 0.0)
    assert LOGGED_LOSS in record["not_covered"]
    for logs, name in ((seen.logs[0], "unreleased/loss"), (seen.logs[-1], "unreleased/train_loss")):
        assert 0.3 < logs[name] < 1.5
        assert not {"loss", "train_loss"} & logs.keys()


# What is said and written


def test_a_public_bound_on_the_number_of_records(tmp_path):
    """What is written and published is about the bound: a run on other records of that bound writes the same."""
    records = {}
    for number in (60, 50):
        folder = tmp_path / str(number)
        privacy = PrivacyArguments(**VALUES, dp_dataset_size=64)
        trainer = cases.private(
            cases.classifier(), folder, key=KEY(3), privacy=privacy, data=DATA[:number], changes={"max_steps": 2}
        )
        trainer.train()
        assert trainer._run.state.num_records == number
        records[number] = {**written(folder), "date": "", "digest": ""}  # the second is of the first as well
    assert records[60] == records[50]
    assert (records[60]["dataset_size"], records[60]["sampling_prob"]) == (64, 12 / 64)
    assert records[60]["dataset_size_is"] == "public bound on the number of records"
    assert EXACT_SIZE not in records[60]["not_covered"]
    with pytest.raises(InvalidArgument, match="at most dp_dataset_size=50 records, got more"):
        cases.private(cases.classifier(), tmp_path, privacy=PrivacyArguments(**VALUES, dp_dataset_size=50)).train()


def test_metrics_reach_every_logger(finished):
    from transformers.integrations.integration_utils import rewrite_logs

    trainer, output, seen, _ = finished
    steps = [logs for logs in seen.logs if "learning_rate" in logs]
    assert [logs["privacy/steps_left"] for logs in steps] == [8, 6, 4, 2, 0]
    for taken, logs in zip((2, 4, 6, 8, 10), steps, strict=True):
        assert logs["privacy/epsilon"] == trainer.plan.guarantee(taken).epsilon
        assert logs["privacy/epsilon_rdp"] == trainer.plan.ledger(taken).epsilon(1e-3, "rdp").epsilon
        assert logs["privacy/remaining_epsilon"] == 8.0 - logs["privacy/epsilon"]
        assert (logs["privacy/delta"], logs["privacy/max_grad_norm"]) == (1e-3, 1.0)
        assert logs["privacy/noise_multiplier"] == trainer.plan.noise_multiplier
    assert "train/privacy/epsilon" in rewrite_logs(steps[0])  # what tensorboard is given
    assert 7.9 < output.metrics["privacy/epsilon"] <= 8.0
    assert seen.logs[-1]["privacy/epsilon"] == output.metrics["privacy/epsilon"]


def test_the_training_loss_and_counts_of_drawn_records_are_not_told(finished):
    _, output, seen, folder = finished
    assert math.isnan(output.training_loss)
    for logs in [*seen.logs, output.metrics]:
        assert not {"loss", "train_loss"} & logs.keys()
        assert logs.get("total_flos", 0) == 0
    assert any("eval_loss" in logs for logs in seen.logs)
    told = written(folder, "checkpoint-10/trainer_state.json")
    assert told["total_flos"] == 0
    assert '"loss"' not in json.dumps(told)


def test_each_checkpoint_and_the_end_have_their_accounting(finished):
    trainer, _, _, folder = finished
    for where, taken in (("checkpoint-4", 4), ("checkpoint-8", 8), ("checkpoint-10", 10), (".", 10)):
        record = written(folder / where)
        assert record["epsilon"] == trainer.plan.guarantee(taken).epsilon
        assert (record["global_step"], record["epoch"]) == (taken, taken / 5)
        assert (record["delta"], record["target_epsilon"], record["max_grad_norm"]) == (1e-3, 8.0, 1.0)
        assert record["noise_multiplier"] == trainer.plan.noise_multiplier
        assert Ledger.from_json(json.dumps(record["ledger"])) == trainer.plan.ledger(taken)
        assert EXACT_SIZE in record["not_covered"]
        assert LOGGED_LOSS not in record["not_covered"]
    assert journal_ledger(folder / "privacy_journal.jsonl") == trainer.plan.ledger()


def test_a_checkpoint_to_publish_holds_no_key(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "save_only_model": True}
    cases.private(cases.classifier(), tmp_path, key=KEY(6), changes=changes).train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "checkpoint-1" / "privacy_accounting.json" in files
    assert not any(KEY(6).secret.hex().encode() in path.read_bytes() for path in files)


def test_training_stops_before_the_breach(tmp_path, caplog):
    """An earlier phase has spent a part of the budget: fewer steps fit, and training ends after them in good order."""
    earlier = Ledger((dpfunc.accounting.Event(0.2, 1.0, 6),))
    ceiling = earlier.compose(Ledger((dpfunc.accounting.Event(0.2, 1.0, 4),))).epsilon(1e-3).epsilon + 0.01
    privacy = PrivacyArguments(**VALUES, dp_max_epsilon=ceiling)
    trainer = cases.private(cases.classifier(), tmp_path, privacy=privacy, ledger=earlier)
    with caplog.at_level(logging.WARNING):
        output = trainer.train()
    assert output.global_step == 4
    assert output.metrics["privacy/epsilon"] <= ceiling
    assert trainer.ledger == Ledger((dpfunc.accounting.Event(0.2, 1.0, 10),))
    assert "The budget allows 4 steps" in caplog.text
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]  # the schedule knew it
    with pytest.raises(UnreachableBudget):
        cases.private(cases.classifier(), tmp_path, privacy=privacy, ledger=trainer.ledger).train()


def test_evaluation_is_the_trainers_own(finished, tmp_path):
    trainer, _, _, _ = finished
    plain = Trainer(trainer.model, cases.training_arguments(tmp_path), eval_dataset=DATA[:10])
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


# What is refused, before anything is spent


@pytest.mark.parametrize(
    "method", ["compute_loss", "training_step", "get_train_dataloader", "get_batch_samples", "_get_train_sampler"]
)
def test_overrides_that_replace_private_parts_are_refused(tmp_path, method):
    override = type("Override", (DPTrainer,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(InvalidArgument, match=f"{method}.*Override"):
        override(cases.classifier(), cases.training_arguments(tmp_path), privacy=cases.NOISY, train_dataset=DATA)


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


def draw_elsewhere(records):
    return {**columns(records), "attention_mask": torch.tensor([[random.randint(0, 1)] * 6 for _ in records])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_loss_func": lambda *args, **kwargs: None}, "compute_loss_func"),
        ({"model_init": cases.classifier}, "model_init"),
        ({"train_dataset": Stream()}, "a length and an index, got train_dataset of type Stream"),
        ({"train_dataset": {"train": DATA}}, r"train_dataset of type dict with the names \['train'\].*one split"),
        ({"train_dataset": DataLoader(DATA)}, "Expected train_dataset to be a data set, got a DataLoader"),
        ({"train_dataset": None}, "train_dataset to be given"),
        ({"data_collator": draw_elsewhere}, "generator"),
        ({"privacy": {"dp_epsilon": 8.0}}, "privacy to be PrivacyArguments"),
        ({"key": 7}, "key to be a dpfunc Key"),
        *[({"data_name": name}, "Give a text as data_name") for name in (3, "", b"hash")],
        *[({"unit": unit}, "one row of a batch is") for unit in (3, " ", "one\nperson")],
        ({"model": "gpt2"}, "model to be a module"),
        ({"loss": "sequence_clasification"}, "task to be one of"),
    ],
)
def test_what_is_no_private_run_is_refused(tmp_path, options, message):
    values = {"model": cases.classifier(), "privacy": cases.NOISY, "train_dataset": DATA, **options}
    arguments = cases.training_arguments(tmp_path, max_steps=2)
    with pytest.raises(InvalidArgument, match=message):
        DPTrainer(args=arguments, **values).train()
    assert not (tmp_path / "privacy_journal.jsonl").exists()


def test_models_that_mix_samples_and_float16_are_refused(tmp_path):
    """A folder that was saved in float16 is read in it; frozen, it does no harm."""
    mixes = cases.classifier()
    mixes.norm = torch.nn.BatchNorm1d(6)
    for model in (mixes, mixes.eval()):  # a Trainer trains in training mode
        with pytest.raises(UnsupportedModel, match=r"BatchNorm.*replace_batchnorm\(model\); or, in a loop of your own"):
            cases.private(model, tmp_path).train()
    with pytest.raises(InvalidArgument, match=r"float16.* load the model with from_pretrained\(..., dtype=torch.flo"):
        cases.private(cases.classifier().half(), tmp_path).train()
    assert not (tmp_path / "privacy_journal.jsonl").exists()
    refuse_model(replace_batchnorm(mixes).train())
    refuse_model(cases.classifier().half().requires_grad_(False))
    refuse_model(cases.classifier().bfloat16())


def test_a_trainer_trains_once_and_searches_nothing(finished):
    trainer, _, _, _ = finished
    with pytest.raises(InvalidArgument, match="one run for each DPTrainer"):
        trainer.train()
    with pytest.raises(InvalidArgument, match="search"):
        trainer.hyperparameter_search()
    with pytest.raises(InvalidArgument, match="trial"):
        trainer.train(trial={"lr": 1})
