"""Run a job: load, plan, train with DPTrainer, save, and report what was spent and what is not covered.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from dpfunc import distributed
from dpfunc._utils.files import replace_file
from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import fail, one_of, refuse, suggestion
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import RECORD_FILE
from dpfunc.budget import Budget
from dpfunc.distributed import all_or_none
from dpfunc.hf._facts import facts_of_model
from dpfunc.hf.tasks import TASKS
from dpfunc.hf.trainer._recipes import new_head
from dpfunc.hf.trainer._run import Loss, trainable, with_accuracy
from dpfunc.hf.trainer._settings import recomputed, refuse_environment
from dpfunc.plan import Plan
from dpfunc.recipes import Recipe
from dpfunc.rng import Key, insecure_key
from dpfunc.sampling import mean_over_views
from dpfunc.sampling.users import mean_over_texts
from dpfunc.train import _run_folder as folders
from dpfunc.train._collate import collator
from dpfunc.train._dataset import Records, read_records, seen_lines
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._made_up import chat_lines
from dpfunc.train._metrics import METRICS_FILE, measure_of, metric_lines
from dpfunc.train._model import choose_parameters, load_base, load_processing, one_line
from dpfunc.train._preferences import loss_of_record
from dpfunc.train._recipe import recipe_lines, with_recipe, with_shape
from dpfunc.train._saved import made_up_batch, rehearse_saving, save_model
from dpfunc.train._views import view_lines
from dpfunc.train.config import ADAPTERS, FEATURES, Job

LONGEST_WAIT = timedelta(minutes=30)  # for a process that writes a large model
_FEATURES_AT_ONCE = 4096  # rows of a few hundred numbers: little memory, and fewer calls
# Settings that have the same name in TrainingArguments.
_SAME_NAME = ("learning_rate", "weight_decay", "warmup_steps", "seed", "save_steps", "logging_steps", "bf16")
# Loggers of which Transformers does not say whether they are installed, and their modules.
_UNLISTED = {"azure_ml": "azureml", "flyte": "flytekit"}
NOT_COVERED = (
    "Not covered by epsilon: metrics on the evaluation records, a choice between runs made with them, the number of "
    "records, and what you read off the table yourself (labels, lengths, settings)."
)


@dataclass(frozen=True)
class Prepared:
    """Model, private records and plan of a job, loaded into memory; what is trained requires gradients."""

    job: Job  # with the values of its recipe
    model: nn.Module = field(repr=False)
    processing: Any = field(repr=False)  # tokenizer or processor
    records: Records = field(repr=False)
    plan: Plan | None  # None for the twin without privacy
    num_steps: int
    spent: Ledger | None = None  # by earlier runs
    recipe: Recipe | None = None  # of the values that the job has left out; None if there were none
    budget: Budget | None = None  # where the run reserves: no run of a search does

    @property
    def num_trained(self) -> int:
        """Number of scalars in the trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def prepare(job: Job, spent: Ledger | None = None) -> Prepared:
    """Read the tables, find the plan, load the model, and write nothing; spent: None for what the job says."""
    job = with_shape(job)
    check_packed(job)
    processing = load_processing(job)
    records = read_records(job, processing)
    size = job.privacy.public_size(len(records.units))
    model, recipe = None, None
    earlier = folders.spent_before(job) if spent is None else spent  # the twin takes the recipe of the private run
    if job.training.missing:
        model = choose_parameters(load_base(job, processing), job, processing)
        job, recipe = with_recipe(job, model, size, earlier)
    num_steps, spent, plan = job.training.num_steps(size), None, None
    if job.privacy.dp_enabled:
        spent, plan = earlier, job.privacy.plan(size, job.batch_size, num_steps, earlier)
        num_steps = plan.num_steps
    model = choose_parameters(load_base(job, processing), job, processing) if model is None else model
    made_up_batch(job, processing)  # which the saved model will be compared on
    return Prepared(job, model, processing, records, plan, num_steps, spent, recipe, folders.budget_of(job))


def check_packed(job: Job) -> None:
    """Check that a base in 4 bits is not evaluated before it is trained where that packs its weights."""
    packs = job.strategy == "qlora" and not torch.accelerator.is_available()
    why = "on a CPU, where bitsandbytes packs the weights when the model is evaluated, and gradients no longer pass."
    refuse(
        (packs and job.training.eval_steps is not None,
         f"Expected no training.eval_steps with strategy='qlora' {why} Leave it out: the end of training evaluates."),
        (packs and job.task == "preference",
         f"Expected another strategy than 'qlora' for preferences {why} Take lora: the model before training is "
         "evaluated as the reference."),
    )  # fmt: skip


def run_job(
    job: Job, *, resume: bool = False, insecure_seed: int | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train, save, and report what was spent; of several processes each calls it, and one writes and prints.

    Args:
        job: what to do. resume: go on with the run in its output_dir after an interruption, bit for bit.
        insecure_seed: a key that anybody can guess: for tests and public data. say: gets each line of the report.

    Returns:
        What `privacy_accounting.json` holds; {} for the twin without privacy, and on processes that do not write.

    Guarantees:
        tests/checkpoint/test_kills.py::test_killed_runs_go_on_bit_for_bit,
        tests/train/test_run_folder.py::test_two_commands_at_the_same_time.
    """
    ranks, folder = distributed.from_environment(LONGEST_WAIT), Path(job.output_dir)
    with ExitStack() as held:

        def begin() -> None:
            check_job(job, resume, insecure_seed)
            held.enter_context(only_process(folder))
            folders.check_folder(job, resume, insecure_seed)  # again: another process may have finished there meanwhile

        distributed.once(ranks, begin)
        writes = distributed.is_writer(ranks)
        prepared = all_or_none(
            lambda: prepare(folders.recorded_job(job) if resume else job), ranks, "Nothing was trained"
        )
        records, about = compute_frozen(prepared.job, prepared.model, prepared.records, shows=writes)
        lines = [
            *seen_lines(records), *chat_lines(prepared.job, prepared.processing),
            *view_lines(prepared.job.privacy.dp_views), *recipe_lines(prepared.recipe, job.training.missing), *about,
        ]  # fmt: skip
        for line in lines if writes else ():
            say(line)
        prepared = replace(prepared, records=records)
        trainer = make_trainer(prepared, None if insecure_seed is None else insecure_key(insecure_seed))
        if not resume:
            distributed.once(
                ranks, lambda: rehearse_saving(prepared.job, prepared.model, prepared.processing)
            )  # which writes nothing into the folder
            reasons = {} if prepared.recipe is None else prepared.recipe.reasons()
            distributed.once(ranks, lambda: folders.write_job(job, prepared.job, reasons, folder, insecure_seed))
        # A private run always has a checkpoint to go on from. A twin may have saved none: it then starts at its begin.
        trainer.train(resume_from_checkpoint=resume and (job.privacy.dp_enabled or folders.has_checkpoint(job)))
        if job.privacy.dp_enabled:  # no model is saved whose accounting lacks steps of the journal
            distributed.once(ranks, lambda: folders.check_accounting(folder))
        distributed.once(
            ranks, lambda: save_model(folder / folders.MODEL, prepared.job, trainer.model, prepared.processing)
        )
        measured = trainer.evaluate() if records.evaluation else {}  # by all processes: each takes a share
        finished: list[dict[str, Any]] = []
        distributed.once(ranks, lambda: finished.append(_finish(prepared, folder, measured, insecure_seed, say)))
        return next(iter(finished), {})


def check_job(job: Job, resume: bool, insecure_seed: int | None) -> None:
    """Check what can be checked before a table is read, in training as in a dry run. Nothing is written."""
    # tests/train/test_dry_run.py::test_the_dry_run_refuses_what_training_refuses
    if job.privacy.dp_enabled:
        refuse_environment(os.environ)
    if job.training.report_to not in (None, ("all",), ("none",)):
        _check_loggers(job.training.report_to or ())
    folders.check_folder(job, resume, insecure_seed)
    refuse(
        (insecure_seed is not None and not job.privacy.dp_enabled,
         fail("no --insecure-seed without privacy, where there is no noise", "insecure_seed", insecure_seed,
              "All that is random there follows from training.seed.")),
    )  # fmt: skip


def _check_loggers(names: Sequence[str]) -> None:
    """Check that the loggers of report_to are known and installed, without making them: some write when made."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as KNOWN

    installed = [*get_available_reporting_integrations(), *(name for name, m in _UNLISTED.items() if find_spec(m))]
    for name in names:
        one_of("report_to", name, sorted(KNOWN), suggestion(name, sorted(KNOWN)))
        refuse(
            (name not in installed,
             f"Expected loggers that are installed, got report_to={name!r}, which is not. Install it, or leave it "
             f"out. Installed: {', '.join(sorted(installed)) or 'none'}."),
        )  # fmt: skip


def loss_of_job(job: Job) -> Loss:
    """The loss of one unit: the name of the task's; of a person, or of views, the mean over records, or over views."""
    task = loss_of_record(job)
    if job.privacy.dp_views == 1 and job.data.unit_column is None:
        return task
    of_each = mean_over_views if job.privacy.dp_views > 1 else mean_over_texts
    own = with_accuracy(task, job.privacy.telemetry())
    return of_each(TASKS[own] if isinstance(own, str) else own)


def make_trainer(prepared: Prepared, key: Key | None, kind: Callable[..., Any] | None = None) -> Any:
    """Build the DPTrainer that runs a job, or one of this kind; without a key it takes a secret one."""
    from dpfunc.hf.trainer.trainer import DPTrainer

    job, records = prepared.job, prepared.records
    many = _FEATURES_AT_ONCE // (job.data.units_size * job.privacy.dp_views)
    at_once = max(many, job.physical_batch_size) if "features" in records.train[0] else job.physical_batch_size
    return (kind or DPTrainer)(
        model=prepared.model, args=training_arguments(prepared),
        # views are in the records already, with their mean in the loss: the loader reads each record once
        privacy=replace(job.privacy, dp_physical_batch_size=min(at_once, job.batch_size), dp_dry_run=False, dp_views=1),
        loss=loss_of_job(job), unit=folders.unit_of(job), key=key, ledger=prepared.spent, budget=prepared.budget,
        train_dataset=records.units, eval_dataset=records.evaluation or None,
        data_collator=collator(job, prepared.processing),
        processing_class=None if job.task in FEATURES else prepared.processing,  # written at the end alone
        compute_metrics=measure_of(job), optimizers=(_optimizer(prepared), None),
    )  # fmt: skip


def rehearse(prepared: Prepared) -> None:
    """Look at every record, evaluate, save and read back as the run will, in a folder that is removed."""
    with TemporaryDirectory() as folder:
        quiet = replace(prepared.job, output_dir=folder, training=replace(prepared.job.training, report_to=None))
        trainer = make_trainer(replace(prepared, job=quiet), None)
        if prepared.plan is not None:
            trainer.rehearse()
    rehearse_saving(prepared.job, prepared.model, prepared.processing)


def _optimizer(prepared: Prepared) -> torch.optim.Optimizer | None:
    """AdamW in which a new head beside adapters has its own rate; None leaves it to the Trainer."""
    training, model = prepared.job.training, prepared.model
    head = new_head("lora", model) if training.head_rate is not None and prepared.job.strategy in ADAPTERS else {}
    if not head:
        return None
    rest = [p for name, p in trainable(model).items() if name not in head]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [*head.values()], "lr": training.head_rate}]
    return torch.optim.AdamW(groups, lr=training.learning_rate or 0.0, weight_decay=training.weight_decay)


def training_arguments(prepared: Prepared) -> Any:
    """Translate the settings of a job into `TrainingArguments` of Transformers."""
    from transformers import Trainer, TrainingArguments

    job, training = prepared.job, prepared.job.training
    batch, accumulated = (job.batch_size, 1) if prepared.plan is not None else _batches_of_twin(job)
    checkpointing = recomputed(TrainingArguments) if training.gradient_checkpointing else {}
    evaluates = training.eval_steps is not None and bool(prepared.records.evaluation)
    with one_line("settings (optimizer, scheduler, report_to, bf16) that the Trainer takes"):
        arguments = TrainingArguments(
            output_dir=job.output_dir, max_steps=prepared.num_steps, per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated, per_device_eval_batch_size=job.physical_batch_size,
            optim=training.optimizer, lr_scheduler_type=training.scheduler,
            eval_strategy="steps" if evaluates else "no", eval_steps=training.eval_steps if evaluates else None,
            save_strategy="steps", save_total_limit=training.keep_checkpoints,
            report_to="none" if training.report_to is None else list(training.report_to),
            **{name: getattr(training, name) for name in _SAME_NAME}, **checkpointing, remove_unused_columns=False,
            use_cpu=not torch.accelerator.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        Trainer.get_optimizer_cls_and_kwargs(arguments, prepared.model)  # many are of packages that are not there
    return arguments


def _batches_of_twin(job: Job) -> tuple[int, int]:
    """Number of records that each process takes at once, and how often in a step: together its share of a batch."""
    ranks = distributed.from_environment(LONGEST_WAIT)
    size = 1 if ranks is None else ranks.size
    share, rest = divmod(job.batch_size, size)
    refuse(
        (rest,
         f"Expected a training.batch_size that {size} processes can share evenly, got {job.batch_size}: "
         "the twin without privacy has batches of one size."),
    )  # fmt: skip
    at_once = next(count for count in range(min(job.physical_batch_size, share), 0, -1) if share % count == 0)
    return at_once, share // at_once


def _finish(
    prepared: Prepared, folder: Path, measured: Mapping[str, float], insecure_seed: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Write the metrics, print privacy cost, files and metrics, and return the accounting."""
    job, private, spent = prepared.job, prepared.job.privacy.dp_enabled, dict[str, Any]()
    replace_file(folder / METRICS_FILE, json.dumps(measured, indent=1) + "\n")
    cost = "epsilon=inf. This is the twin without privacy."
    if private:
        spent = json.loads((folder / RECORD_FILE).read_text())
        cost = (
            f"epsilon={spent['epsilon']:.4g} at delta={spent['delta']:g} ({spent['accountant']}; rdp says "
            f"{spent['epsilon_rdp']:.4g}), {spent['global_step']} steps, {spent['adjacency']}, "
            f"one {'record' if job.data.unit_column is None else 'person'} protected."
        )
    say(f"Spent: {cost}")
    if private and insecure_seed is not None:
        say(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    base, load = (
        (f"load_mean_pooled({job.model_path!r})", "dpfunc.hf.pooled.load_mean_pooled(path)")
        if job.model.pooling == "mean"
        else ("base model", "from_pretrained(path)")
    )
    if job.model.new_tokens and job.strategy in ADAPTERS:  # PEFT opens the adapter over a base with these rows
        base = f"{base} after resize_token_embeddings({facts_of_model(prepared.model).tables.tokens})"
    if job.task in FEATURES:
        load = f"`dpfunc predict {folder} TABLE_OR_FOLDER --out FILE`"
    how = f"PeftModel.from_pretrained({base}, path)" if job.strategy in ADAPTERS else load
    secret = f"Accounting: {folder / RECORD_FILE}. Checkpoints hold the key of the run: as secret as the data."
    say(f"Saved: {folder / folders.MODEL}, for {how}.")
    for line in (*metric_lines(measured, folder, private=private), *((secret, NOT_COVERED) if private else ())):
        say(line)
    return spent
