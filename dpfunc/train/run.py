"""Run a job: load, plan, train with DPTrainer, save, and report what was spent and what is not covered."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfunc import distributed
from dpfunc._utils.locks import LOCK_FILE, only_process
from dpfunc._utils.validation import one_of, shorten, unique_json
from dpfunc.accounting import Ledger
from dpfunc.checkpoint.chain import replace_file
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.checkpoint.prior_ledgers import read_spent
from dpfunc.distributed.object_collectives import all_or_none
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.hf.trainer.files import JOURNAL, count_steps, is_whole, newest
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.train.config import Job, job_from_dict, job_to_dict
from dpfunc.train.config_values import suggestion
from dpfunc.train.dataset import Records, collator, read_records
from dpfunc.train.model import choose_parameters, load_base, load_processing, one_line

LONGEST_WAIT = timedelta(minutes=30)  # a process that writes a large model keeps the others waiting
JOB_FILE, MODEL, ACCOUNTING = "job.json", "model", "privacy_accounting.json"
LOSSES = {"text_classification": "sequence_classification", "causal_lm": "causal_lm", "vqa": "vqa"}
# A resumed run may differ in these: they change nothing that is trained.
FREE = ("logging_steps", "save_steps", "keep_checkpoints", "eval_steps", "report_to")
# Loggers of which Transformers does not say whether they are installed, and their modules.
UNLISTED = {"azure_ml": "azureml", "flyte": "flytekit"}
NOT_COVERED = (
    "Not covered by epsilon: metrics on the evaluation records, a choice between runs made with them, the number of "
    "records, and what you read off the table yourself (labels, lengths, settings)."
)


@dataclass(frozen=True)
class Prepared:
    """Model, records and plan of a job, loaded into memory.

    Args:
        model: with what is trained requiring gradients. processing: tokenizer or processor. records: private.
        plan: None for the twin without privacy. num_steps: of the optimizer. spent: by earlier runs.
    """

    model: nn.Module = field(repr=False)
    processing: Any = field(repr=False)
    records: Records = field(repr=False)
    plan: Plan | None
    num_steps: int
    spent: Ledger | None = None

    @property
    def num_trained(self) -> int:
        """Number of scalars in the trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def prepare(job: Job) -> Prepared:
    """Read the tables, find the plan, load the model; in this order, so that what is cheap is refused first.

    Raises:
        InvalidArgument, UnreachableBudget, UnsupportedModel: something of the job cannot be used. Nothing is written.
    """
    processing = load_processing(job)
    records = read_records(job, processing)
    size = job.privacy.public_size(len(records.train))
    num_steps = job.training.num_steps(size)
    private = job.privacy.dp_enabled
    spent = read_spent(job.data.spent) if private else None
    plan = job.privacy.plan(size, job.training.batch_size, num_steps, spent) if private else None
    model = choose_parameters(load_base(job, processing), job)
    return Prepared(model, processing, records, plan, num_steps if plan is None else plan.num_steps, spent)


def twin(job: Job) -> Job:
    """The same job without privacy, into a folder of its own."""
    privacy = dataclasses.replace(job.privacy, dp_enabled=False)
    return dataclasses.replace(job, privacy=privacy, output_dir=f"{job.output_dir.rstrip('/')}-no-dp")


def run_job(
    job: Job, *, resume: bool = False, insecure_seed: int | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train, save, and report what was spent.

    Of several processes under torchrun each calls it: they share each draw, and one of them writes and prints.

    Args:
        job: what to do. resume: go on with the run in its output_dir after an interruption, bit for bit.
        insecure_seed: a key that anybody can guess, to repeat a run exactly: for tests and public data.
        say: gets each line of the report.

    Returns:
        What `privacy_accounting.json` holds; {} for the twin without privacy, and on processes that do not write.

    Raises:
        InvalidArgument: the job cannot be run, or output_dir cannot be used, e.g. because another process trains there.
        CheckpointError: resume without a checkpoint of this very job; or the ledger lacks steps of the journal.

    Guarantees:
        tests/cli/test_train.py::test_L21_killed_command_resumes_bit_for_bit,
        ::test_two_commands_at_the_same_time.
    """
    ranks = distributed.from_environment(LONGEST_WAIT)
    with ExitStack() as held:

        def begin() -> None:
            check_job(job, resume, insecure_seed)
            held.enter_context(only_process(Path(job.output_dir)))
            check_folder(
                job, Path(job.output_dir), resume, insecure_seed
            )  # again: another process may have ended there

        distributed.once(ranks, begin)
        return _run(job, ranks, resume, insecure_seed, say)


def _run(
    job: Job, ranks: Ranks | None, resume: bool, insecure_seed: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a job in a folder that no other process uses."""
    folder, writes = Path(job.output_dir), distributed.is_writer(ranks)
    prepared = all_or_none(partial(prepare, job), ranks, "Nothing was trained")
    if writes and prepared.records.duplicates:
        say(f"{prepared.records.duplicates} exact duplicates were left out (a private number).")
    trainer = make_trainer(job, prepared, insecure_seed)
    if not resume:
        distributed.once(ranks, lambda: write_job(job, folder, insecure_seed))
    trainer.train(resume_from_checkpoint=True if resume else None)
    if job.privacy.dp_enabled:
        distributed.once(ranks, lambda: check_accounting(folder, prepared.spent))
    distributed.once(ranks, lambda: save_model(folder / MODEL, trainer.model, prepared.processing))
    measured = trainer.evaluate() if prepared.records.evaluation else {}  # all processes, each some of the records
    accounting: dict[str, Any] = {}

    def finish() -> None:
        accounting.update(json.loads((folder / ACCOUNTING).read_text()) if job.privacy.dp_enabled else {})
        for line in report(job, folder, accounting, measured, insecure_seed):
            say(line)

    distributed.once(ranks, finish)
    return accounting


def check_accounting(folder: Path, spent: Ledger | None) -> None:
    """Check, before a model is saved, that its accounting has every step in the journal of the folder.

    Args:
        folder: of the run. spent: by earlier runs.

    Raises:
        CheckpointError: another process has trained into the same folder, or lines were lost.

    Guarantees:
        tests/cli/test_train.py::test_a_model_is_saved_with_the_cost_of_its_whole_journal.
    """
    journal, path = folder / JOURNAL, folder / ACCOUNTING
    taken = journal_ledger(journal)
    said = Ledger.from_json(json.dumps(json.loads(path.read_text())["ledger"]))
    if said != (taken if spent is None else spent.compose(taken)):
        raise CheckpointError(
            f"Expected {path} to count the steps of {journal}, {taken}, got {said}. Another process has used this "
            f"folder. No model was saved. A new run counts all of it: --spent {journal}, and another --output_dir."
        )


def save_model(folder: Path, model: Any, processing: Any) -> None:  # noqa: ANN401  (of Transformers or PEFT)
    """The model with its tokenizer or processor, for from_pretrained."""
    model.save_pretrained(folder)
    processing.save_pretrained(folder)


def write_job(job: Job, folder: Path, insecure_seed: int | None) -> None:
    """Keep the job in its folder, to recognise it when it is resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"job": job_to_dict(job), "insecure_seed": insecure_seed}
    replace_file(folder / JOB_FILE, json.dumps(content, indent=1) + "\n")


def read_job_file(folder: Path) -> tuple[Mapping[str, Any], int | None]:
    """The job of a folder as JSON values, and its insecure seed.

    Raises:
        CheckpointError: damaged.
    """
    path = folder / JOB_FILE
    try:
        content = unique_json(path.read_bytes())
        job, seed = content["job"], content["insecure_seed"]
        fits = isinstance(job, dict) and isinstance(seed, int | None)
        problem = "" if fits else "it does not hold a job"
    except (OSError, ValueError) as error:
        problem = str(error)
    except (KeyError, TypeError):
        problem = "it does not hold a job"
    if problem:
        raise CheckpointError(
            f"The file {path} cannot be read: {problem}. Restore it; or begin a new run in another --output_dir, which "
            f"counts this one: --spent {folder / JOURNAL}."
        )
    return job, seed


def check_job(job: Job, resume: bool, insecure_seed: int | None) -> None:
    """Check what can be checked before a table is read, in training as in a dry run. Nothing is written.

    Args:
        job: what to do. resume, insecure_seed: as for `run_job`.

    Raises:
        InvalidArgument: a logger that is unknown or not installed, or an output_dir that cannot be used.
        CheckpointError: resume without a checkpoint of this very job.

    Guarantees:
        tests/cli/test_train.py::test_the_dry_run_refuses_what_training_refuses.
    """
    check_loggers(job.training.report_to)
    check_folder(job, Path(job.output_dir), resume, insecure_seed)


def check_loggers(names: Sequence[str] | None) -> None:
    """Check that the loggers of report_to are known and installed, without making them: some write when they are made.

    Raises:
        InvalidArgument: one is not.
    """
    if names is None or tuple(names) in (("all",), ("none",)):
        return
    with one_line('transformers, from pip install "dpfunc[hf]"'):
        from transformers.integrations import get_available_reporting_integrations
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as KNOWN
    installed = [*get_available_reporting_integrations(), *(name for name, m in UNLISTED.items() if find_spec(m))]
    for name in names:
        one_of("report_to", name, sorted(KNOWN), suggestion(name, sorted(KNOWN)))
        if name not in installed:
            raise InvalidArgument(
                f"Expected loggers that are installed, got report_to={name!r}, which is not. Install it, or leave it "
                f"out. Installed: {', '.join(sorted(installed)) or 'none'}."
            )


def check_folder(job: Job, folder: Path, resume: bool, insecure_seed: int | None) -> None:
    """Check that the output folder can be made, is empty, or holds the run to resume.

    Raises:
        InvalidArgument: a new run in a folder with files, or in none that can be written.
        CheckpointError: nothing to resume, or another job.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise InvalidArgument(
            f"Expected an output_dir that is a folder or can be made, got output_dir={str(folder)!r}: {str(there)!r} "
            "is a file. Name another folder: --output_dir."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"Expected an output_dir that can be written, got output_dir={str(folder)!r}: {str(there)!r} may not be. "
            "Name another folder: --output_dir."
        )
    if not resume:
        if folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise InvalidArgument(
                f"Expected an empty output_dir, got {str(folder)!r}, which is not. Go on with the run there: --resume; "
                "or name another folder: --output_dir."
            )
        return
    if not (folder / JOB_FILE).is_file():
        raise CheckpointError(f"Expected a run in {str(folder)!r} to resume, found none. Start it without --resume.")
    saved, seed = read_job_file(folder)
    changed = difference(saved, job_to_dict(job))
    if seed != insecure_seed:
        changed.append(f"--insecure-seed was {seed}, now {insecure_seed}")
    if changed:
        raise CheckpointError(
            f"Expected the job that {str(folder)!r} was started with, got another: {shorten(changed)}. A resumed run "
            "repeats steps with the same noise, so nothing else may change."
        )
    if not has_checkpoint(job):
        newest(folder)  # raises, and says how the steps of the journal are counted


def has_checkpoint(job: Job) -> bool:
    """True if the folder has a checkpoint that `--resume` can continue from."""
    found = list(Path(job.output_dir).glob("checkpoint-*"))
    return any(is_whole(path) for path in found) if job.privacy.dp_enabled else bool(found)


def interrupted(job: Job) -> str:
    """Message after the user interrupts a run: its privacy cost, and how to resume or count it."""
    journal = Path(job.output_dir) / JOURNAL
    steps, delta = count_steps(journal), job.privacy.dp_delta
    if delta is None or not job.privacy.dp_enabled:
        said = "Interrupted. The twin without privacy spends nothing."
    elif not steps:
        said = "Interrupted before the first step was released: nothing was spent."
    else:
        epsilon = journal_ledger(journal).epsilon(delta, job.privacy.dp_accountant).epsilon
        earlier = ", earlier runs not counted" if job.data.spent else ""
        said = (
            f"Interrupted. The journal has {steps} steps, which spent epsilon={epsilon:.4g} at delta={delta:g}"
            f"{earlier}. A new run on these records counts them: --spent {journal}."
        )
    return f"{said} {'--resume goes on with this run.' if has_checkpoint(job) else 'There is no checkpoint to resume.'}"


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two jobs as `job_to_dict` gives them, except in keys that do not change the training."""
    changed = []
    for name in sorted({*saved, *now} - {"output_dir"}):
        one, two = saved.get(name), now.get(name)
        if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
            one, two = {name: one}, {name: two}
        changed += [
            f"{key} was {one.get(key)!r}, now {two.get(key)!r}"
            for key in {**one, **two}
            if key not in FREE and key != "dp_dry_run" and one.get(key) != two.get(key)
        ]
    return changed


def make_trainer(job: Job, prepared: Prepared, insecure_seed: int | None) -> Any:  # noqa: ANN401  (a DPTrainer)
    """Build the DPTrainer that runs a job."""
    from dpfunc.hf.trainer.trainer import DPTrainer

    records = prepared.records
    return DPTrainer(
        model=prepared.model,
        args=training_arguments(job, prepared),
        privacy=dataclasses.replace(job.privacy, dp_physical_batch_size=job.physical_batch_size, dp_dry_run=False),
        loss=LOSSES[job.task],
        key=None if insecure_seed is None else insecure_key(insecure_seed),
        ledger=prepared.spent,
        train_dataset=records.train,
        eval_dataset=records.evaluation or None,
        data_collator=collator(job, prepared.processing),
        processing_class=prepared.processing,
        compute_metrics=_accuracy if job.task == "text_classification" else None,
    )


def _accuracy(prediction: Any) -> dict[str, float]:  # noqa: ANN401  (an EvalPrediction)
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def training_arguments(job: Job, prepared: Prepared) -> Any:  # noqa: ANN401  (TrainingArguments)
    """Translate the settings of a job into `TrainingArguments` of Transformers.

    Raises:
        InvalidArgument: an optimizer, scheduler or logger that Transformers does not know.
    """
    from transformers import TrainingArguments

    training, physical = job.training, job.physical_batch_size
    batch = logical = training.batch_size
    if prepared.plan is None:  # the twin: as many at once as divide the logical batch of each process evenly
        logical = share_of(training.batch_size)
        batch = next(size for size in range(min(physical, logical), 0, -1) if logical % size == 0)
    checkpointing: dict[str, Any] = {}
    if training.gradient_checkpointing:
        name = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
        checkpointing = {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}
    evaluates = training.eval_steps is not None and bool(prepared.records.evaluation)
    with one_line("settings (optimizer, scheduler, report_to, bf16) that the Trainer takes"):
        return TrainingArguments(
            output_dir=job.output_dir,
            max_steps=prepared.num_steps,
            learning_rate=training.learning_rate,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=logical // batch,
            per_device_eval_batch_size=physical,
            optim=training.optimizer,
            weight_decay=training.weight_decay,
            lr_scheduler_type=training.scheduler,
            warmup_steps=training.warmup_steps,
            seed=training.seed,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=training.eval_steps if evaluates else None,
            save_strategy="steps",
            save_steps=training.save_steps,
            save_total_limit=training.keep_checkpoints,
            logging_steps=training.logging_steps,
            report_to="none" if training.report_to is None else list(training.report_to),
            bf16=training.bf16,
            **checkpointing,
            remove_unused_columns=False,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        )


def share_of(batch_size: int) -> int:
    """The records of a batch of the twin that each process gets.

    Raises:
        InvalidArgument: the batch cannot be shared evenly.

    >>> share_of(32)
    32
    """
    ranks = distributed.from_environment(LONGEST_WAIT)
    size = 1 if ranks is None else ranks.size
    if batch_size % size:
        raise InvalidArgument(
            f"Expected a training.batch_size that {size} processes can share evenly, got {batch_size}: the twin "
            "without privacy has batches of one size."
        )
    return batch_size // size


def report(
    job: Job, folder: Path, accounting: Mapping[str, Any], measured: Mapping[str, float], insecure_seed: int | None
) -> list[str]:
    """Lines to print at the end of a run: privacy cost, files and metrics."""
    if job.privacy.dp_enabled:
        lines = [
            f"Spent: epsilon={accounting['epsilon']:.4g} at delta={accounting['delta']:g} "
            f"({accounting['accountant']}; rdp says {accounting['epsilon_rdp']:.4g}), {accounting['global_step']} "
            f"steps, {accounting['adjacency']}, one record protected.",
        ]
        if insecure_seed is not None:
            lines.append(f"BUT anybody can guess the noise: --insecure-seed {insecure_seed}. Nothing is protected.")
    else:
        lines = ["Spent: epsilon=inf. This is the twin without privacy."]
    how = "PeftModel.from_pretrained(base model, path)" if job.strategy == "lora" else "from_pretrained(path)"
    lines.append(f"Saved: {folder / MODEL}, for {how}.")
    lines += [f"{name}: {measured[name]:.4g}" for name in ("eval_loss", "eval_accuracy") if name in measured]
    if job.privacy.dp_enabled:
        lines.append(f"Accounting: {folder / ACCOUNTING}. Checkpoints hold the key of the run: as secret as the data.")
        lines.append(NOT_COVERED)
    return lines


def saved_job(folder: Path) -> tuple[Job, int | None]:
    """The job of a run folder, and its insecure seed.

    Raises:
        CheckpointError: not a folder of `dpfunc train`.
    """
    path = folder / JOB_FILE
    if not path.is_file():
        raise CheckpointError(f"Expected the folder of a run of dpfunc train, got {str(folder)!r} without {JOB_FILE}.")
    values, seed = read_job_file(folder)
    return job_from_dict(values), seed
