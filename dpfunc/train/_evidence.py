"""Replays and audits of jobs: that of a run folder, run again by the same Trainer, on neighbours or with canaries.

May import: its folder, features and below. Privacy depends on it: no.
"""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback

from dpfunc._utils.files import weights_in
from dpfunc._utils.validation import refuse
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import RECORD_FILE
from dpfunc.checkpoint.journal import Taken, read_steps
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import Audit, Replay
from dpfunc.evidence.canary_run import Planted, PlantedStep, Score, planted_plan
from dpfunc.evidence.neighbours import Rows, compare, files_written, left_in, lines_of
from dpfunc.evidence.result import audit_values, replay_values
from dpfunc.evidence.watch import Tape, WatchedStep, described, settings_of, watched_plan
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer import _run as runs
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.plan import Plan
from dpfunc.rng import Key, cpu_seeds, fingerprint, insecure_key
from dpfunc.state import allow_repeat
from dpfunc.train import _run_folder as folders
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._saved import save_model
from dpfunc.train.run import Prepared, make_trainer, prepare

_DATA = "records of a replay"  # the data set has no name and no digest: it is another one in each run


@dataclass(eq=False)
class _Watch(TrainerCallback):  # type: ignore[misc]  # has no types
    """Observation of a Trainer: its plan, its run, the last step, and the record of its steps."""

    plan: Callable[[Plan], Plan]
    begin: Callable[[runs.Run], runs.Run]
    steps: int
    tape: Tape | None = None
    trainer: Any = None

    def join(self, trainer: Any) -> None:
        self.trainer = trainer

    def _noted(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        run, trainer = self.trainer._run, self.trainer
        if self.tape is not None:
            self.tape.seen.append(described({
                "params": run.params, "state": run.state, "log": state.log_history, "optimizer": trainer.optimizer,
                "scheduler": trainer.lr_scheduler,
            }))  # fmt: skip
        return replace(control, should_training_stop=True) if state.global_step >= self.steps else control

    on_step_end = _noted


class _Watched(DPTrainer):
    """The observed Trainer of a job; it saves nothing."""

    def __init__(self, watch: _Watch, data: Rows, /, *, args: Any, **options: Any) -> None:
        self._watch = watch
        super().__init__(**options | {
            "args": replace(args, save_strategy="no", disable_tqdm=True), "data_name": _DATA, "callbacks": [watch],
            "train_dataset": data.rows,
        })  # fmt: skip
        watch.join(self)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run, as it is watched."""
        return self._watch.plan(super().plan)

    def _begin(self, start: runs.Start) -> runs.Run:
        return self._watch.begin(super()._begin(start))


@dataclass
class _JobLoop:
    """The training of a job as a loop; of a first run the journal's steps, and digests of the model at its end."""

    prepared: Prepared
    key: Key = field(repr=False)
    folder: Path
    journal: dict[int, Taken] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)

    def __call__(self, data: Rows, steps: int, tape: Tape) -> None:
        """Train in an empty folder of the same name."""

        def begin(run: runs.Run) -> runs.Run:
            state = allow_repeat(run.state)
            return replace(run, dp_step=WatchedStep(**settings_of(run.dp_step), tape=tape), state=state, previous=state)

        shutil.rmtree(self.folder, ignore_errors=True)
        watch = _Watch(lambda plan: watched_plan(plan, tape), begin, steps, tape)
        with lines_of() as lines, cpu_seeds(self.key), files_written() as elsewhere:
            trainer = _train(self.prepared, data, self.key, watch)
        record = json.loads((self.folder / RECORD_FILE).read_bytes())  # whose date and digest are those of a day
        public = {name: record[name] for name in sorted({*record} - {"date", "digest"})}
        tape.seen.append(left_in(self.folder, lines(), elsewhere) | {f"file {RECORD_FILE}": str(public)})
        if tape.forced is None:
            self.journal = read_steps(self.folder / files.JOURNAL, missing="empty").get(fingerprint(self.key), {})
            if trainer._run.state.step == trainer._run.state.limit:
                save_model(
                    self.folder.with_name(folders.MODEL), self.prepared.job, trainer.model, self.prepared.processing
                )
                self.weights = weights_in(self.folder.parent)


def _train(prepared: Prepared, data: Rows, key: Key, watch: _Watch) -> Any:
    """Train a copy of the model; the Trainer that did it."""
    trainer = make_trainer(replace(prepared, model=copy.deepcopy(prepared.model)), key, partial(_Watched, watch, data))
    trainer.train()
    return trainer


def _prepared(run: Path, folder: Path) -> tuple[Prepared, Key]:
    """The job of a run folder, to be run elsewhere, and the key that it had."""
    job, seed, _ = folders.saved_job(run)
    refuse((not job.privacy.dp_enabled, f"Expected a private run, got {str(run)!r}, the twin without privacy."))
    training = replace(job.training, report_to=None, eval_steps=None)
    # what was spent when the run began is in its journal; its budget, where it is reserved, counts the run itself now
    data = replace(job.data, spent=None, budget=None, budget_run=None, budget_spender=None)
    newest_run = [*read_steps(run / files.JOURNAL).values()][-1]
    before = Ledger(next(iter(newest_run.values())).before, job.privacy.adjacency)
    prepared = prepare(
        replace(job, output_dir=str(folder), training=training, data=data), before if before.events else None
    )
    records, _ = compute_frozen(prepared.job, prepared.model, prepared.records, shows=False)
    prepared = replace(prepared, records=records)
    if seed is not None:
        return prepared, insecure_key(seed)
    if newest := files.newest(run):
        return prepared, files.key_of(newest)
    raise InvalidArgument(f"Expected a checkpoint in {str(run)!r}, which holds the key of the run, found none.")


def verify(run: Path, *, steps: int, candidates: int) -> tuple[Replay, dict[str, Any]]:
    """Run the first steps of a job again, with the key of its run, on its records and on neighbours. UNRELEASED.

    Returns:
        The replay, and its values: `run` is the fingerprint of the key, `reproduced` the number of steps that the
        journal has with the same release, bit for bit; `weights` are digests of the model, if all steps were replayed.
    """
    with tempfile.TemporaryDirectory() as name:
        prepared, key = _prepared(run, Path(name) / "run")
        loop, plan = _JobLoop(prepared, key, Path(name) / "run"), cast(Plan, prepared.plan)
        data, removed = Rows(tuple(prepared.records.units)), plan.adjacency != "replace_one"
        result = compare(loop, data, steps, candidates, removed=removed)
    recorded = read_steps(run / files.JOURNAL).get(fingerprint(key), {})
    return result, replay_values(result, run / folders.JOB_FILE, plan, {
        "run": fingerprint(key),
        "reproduced": sum(recorded.get(step) == taken for step, taken in loop.journal.items()),
        "weights": loop.weights or None,
        "same_model": loop.weights == weights_in(run) if loop.weights else None,
    })  # fmt: skip


def audit(run: Path, *, key: Key, count: int | None, steps: int, score: Score) -> tuple[Audit, dict[str, Any]]:
    """Train the job of a run folder anew, with canaries in gradients: the audit, and its values. It is one more run."""
    planted = Planted(key, count or 1000)

    def begin(run: runs.Run) -> runs.Run:
        planted.draw(run.params)
        return replace(run, dp_step=PlantedStep(**settings_of(run.dp_step), planted=planted))

    with tempfile.TemporaryDirectory() as name:
        prepared, _ = _prepared(run, Path(name) / "run")
        watch = _Watch(lambda plan: planted_plan(plan, planted), begin, steps)
        with lines_of():
            plan = _train(prepared, Rows(tuple(prepared.records.units)), key, watch).plan
    result, about = planted.verdict(plan, score), {"space": "gradient", "score": score}
    return result, audit_values(result, run / folders.JOB_FILE, plan, len(planted.reads), about)
