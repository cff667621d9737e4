"""Replays and audits of jobs: that of a run folder, run again by the same Trainer, on neighbours or with canaries."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import RECORD_FILE
from dpfunc.checkpoint._chain import sha256
from dpfunc.checkpoint._folder import newest_key
from dpfunc.checkpoint.journal import read_steps
from dpfunc.errors import InvalidArgument
from dpfunc.evidence._canary_run import Planted, Score, planted_plan, planting
from dpfunc.evidence._neighbours import Replay, Rows, compare, left_in, lines_of
from dpfunc.evidence._one_run import Audit
from dpfunc.evidence._watch import Tape, described, watched_plan, watching
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer import _run as runs
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.plan import Plan
from dpfunc.rng import Key, cpu_seeds, fingerprint, insecure_key
from dpfunc.state import replay as repeated
from dpfunc.train import _run_folder as folders
from dpfunc.train._frozen import compute_frozen
from dpfunc.train.run import Prepared, make_trainer, prepare

_DATA = "records of a replay"  # the data set has no name and no digest: it is another one in each run


@dataclass(frozen=True)
class _Ways:
    """How a Trainer is watched: its plan, its step, and what is noted after each step."""

    plan: Callable[[Plan], Plan]
    begin: Callable[[runs.Run], runs.Run]
    note: Callable[[Any], None]
    steps: int


class _Watched(DPTrainer):
    """The Trainer of a job under watch; it ends after some steps, and saves nothing."""

    def __init__(self, ways: _Ways, data: Rows, /, *, args: Any, **options: Any) -> None:
        self._ways = ways
        self._seen: Plan | None = None
        args = dataclasses.replace(args, save_strategy="no", disable_tqdm=True)
        super().__init__(args=args, data_name=_DATA, **{**options, "train_dataset": data.rows})
        self.add_callback(_Noting(self, ways))

    @property
    def plan(self) -> Plan:
        """The plan of the run, as it is watched."""
        if self._seen is None:
            self._seen = self._ways.plan(super().plan)
        return self._seen

    def _begin(self, start: runs.Start) -> runs.Run:
        return self._ways.begin(super()._begin(start))


class _Noting(TrainerCallback):  # type: ignore[misc]  # has no types
    """Notes what there is after each step, and ends the training after some."""

    def __init__(self, trainer: Any, ways: _Ways) -> None:
        self._trainer, self._ways = trainer, ways

    def _noted(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._ways.note(self._trainer)
        ends = state.global_step >= self._ways.steps
        return dataclasses.replace(control, should_training_stop=True) if ends else control

    on_step_end = _noted


@dataclass(frozen=True)
class _JobLoop:
    """The training of a job as a loop that a replay takes."""

    prepared: Prepared
    key: Key = field(repr=False)
    folder: Path

    @property
    def adjacency(self) -> str:
        return str(self.prepared.job.privacy.adjacency)

    def run(self, data: Rows, steps: int, tape: Tape) -> Tape:
        """Train in an empty folder of the same name; note what the Trainer has after each step."""

        def begin(run: runs.Run) -> runs.Run:
            state = repeated(run.state)
            return dataclasses.replace(run, dp_step=watching(run.dp_step, tape), state=state, previous=state)

        def note(trainer: Any) -> None:
            own = {"params": trainer._run.params, "state": trainer._run.state, "log": trainer.state.log_history}
            optimizers = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
            tape.seen.append(described({**own, **optimizers}))

        shutil.rmtree(self.folder, ignore_errors=True)
        ways = _Ways(lambda plan: watched_plan(plan, tape), begin, note, steps)
        with lines_of() as lines, cpu_seeds(self.key):
            trainer = _train(self.prepared, data, self.key, ways)
        if tape.forced is None and trainer._run.state.step == trainer._run.state.limit:
            trainer.model.save_pretrained(self.folder.with_name(folders.MODEL))
            tape.weights.extend(_weights(self.folder.parent))
        written = json.loads((self.folder / RECORD_FILE).read_bytes())  # compared without its date
        kept = str({name: written[name] for name in sorted({*written} - {"date", "digest"})})
        tape.seen.append(left_in(self.folder, lines()) | {f"file {RECORD_FILE}": kept})
        tape.journal.update(read_steps(self.folder / files.JOURNAL, missing="empty").get(fingerprint(self.key), {}))
        return tape


def _train(prepared: Prepared, data: Rows, key: Key, ways: _Ways) -> Any:
    """Train a copy of the model; the Trainer that did it."""
    own = dataclasses.replace(prepared, model=copy.deepcopy(prepared.model))
    trainer = make_trainer(own, key, partial(_Watched, ways, data))
    trainer.train()
    return trainer


def _prepared(run: Path, folder: Path) -> tuple[Prepared, Key]:
    """The job of a run folder, to be run elsewhere, and the key that it had."""
    job, seed = folders.saved_job(run)
    if not job.privacy.dp_enabled:
        raise InvalidArgument(f"Expected a private run, got {str(run)!r}, the twin without privacy.")
    training = dataclasses.replace(job.training, report_to=None, eval_steps=None)
    # what was spent when the run began is in its journal; its budget, where it is reserved, counts the run itself now
    data = dataclasses.replace(job.data, spent=None, budget=None, budget_run=None, budget_spender=None)
    last = list(read_steps(run / files.JOURNAL).values())[-1]
    before = Ledger(next(iter(last.values())).before, job.privacy.adjacency)
    own = dataclasses.replace(job, output_dir=str(folder), training=training, data=data)
    prepared = prepare(own, before if before.events else None)
    records, _ = compute_frozen(prepared.job, prepared.model, prepared.records, shows=False)
    newest = files.newest(run) if seed is None else None
    if seed is None and newest is None:
        raise InvalidArgument(f"Expected a checkpoint in {str(run)!r}, which holds the key of the run, found none.")
    found = insecure_key(seed or 0) if newest is None else newest_key(newest / files.FOLDER)
    return dataclasses.replace(prepared, records=records), found


def _weights(folder: Path) -> list[str]:
    """Digests of the files of a model."""
    return [sha256(path) for path in sorted((folder / folders.MODEL).rglob("*.safetensors"))]


@dataclass(frozen=True)
class Recorded:
    """How far a run folder is what its job does, with the fingerprint of its key."""

    run: str
    reproduced: int
    """Replayed steps that its journal has with the same release, bit for bit."""
    weights: list[str] | None
    """Digests of the files of the trained model, if all steps were replayed."""
    same_model: bool | None


def replay_job(run: Path, *, steps: int, candidates: int) -> tuple[Replay, Recorded, Plan]:
    """Run the first steps of a job again, with the key of its run, on its records and on neighbours. UNRELEASED."""
    with tempfile.TemporaryDirectory() as name:
        prepared, key = _prepared(run, Path(name) / "run")
        loop = _JobLoop(prepared, key, Path(name) / "run")
        found, first = compare(loop, Rows(tuple(prepared.records.units)), steps, candidates)
    recorded = read_steps(run / files.JOURNAL).get(fingerprint(key), {})
    same = sum(step in recorded and recorded[step] == taken for step, taken in first.journal.items())
    if prepared.plan is None:
        raise InvalidArgument("Expected a private run, got the twin without privacy.")
    weights = first.weights or None
    same_model = None if weights is None else weights == _weights(run)
    return found, Recorded(fingerprint(key), same, weights, same_model), prepared.plan


def audit_job(run: Path, *, key: Key, count: int, steps: int, score: Score) -> tuple[Audit, int, Plan]:
    """Train the job of a run folder anew, with canaries in gradients: the audit, the steps it took, and its plan.

    It is one more run on the same records: what is published of it costs what its steps cost.
    """
    planted = Planted(key, count)

    def begin(run: runs.Run) -> runs.Run:
        planted.draw(run.params)
        return dataclasses.replace(run, dp_step=planting(run.dp_step, run.dp_step.plan, planted))

    with tempfile.TemporaryDirectory() as name:
        prepared, _ = _prepared(run, Path(name) / "run")
        ways = _Ways(lambda plan: planted_plan(plan, planted), begin, lambda trainer: None, steps)
        with lines_of():
            trainer = _train(prepared, Rows(tuple(prepared.records.units)), key, ways)
    return planted.verdict(trainer.plan, score), len(planted.reads), trainer.plan
