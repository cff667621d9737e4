"""A search on public records, with the noise that the private run will have; it costs no privacy."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import fail
from dpfunc.checkpoint.prior_ledgers import read_spent
from dpfunc.errors import InvalidArgument
from dpfunc.rng import fold_in, insecure_key, secure_key, stream
from dpfunc.train.candidates import Candidate, check_scored, load, score, train_candidate
from dpfunc.train.config import ADAPTERS, Job
from dpfunc.train.dataset import Records, count_records, read_records
from dpfunc.train.grid import Trial
from dpfunc.train.model import key_of, load_processing
from dpfunc.train.run_folder import check_spent_units
from dpfunc.train.tables import same_file

_HELD_OUT = 0.2  # of the public records, where the job has no share


@dataclass(frozen=True)
class PublicSearch:
    """A search on public records, ready to begin.

    Args:
        candidates: with the noise, the batch size and the steps of the private run. records: public.
        size: number of private records that the plan publishes.
    """

    candidates: tuple[Candidate, ...]
    records: Records
    size: int


def prepare_public(trials: Sequence[Trial], public: Path, *, shows: bool = False) -> PublicSearch:
    """Load the public table, and plan each candidate as it will run on the private one.

    Of the private table the records are counted, since their number is in the plan; with `dp_dataset_size` it is not
    read. Of a larger public table as many records are used. On a smaller one batches and noise stay the same, and so
    each step has the same ratio of noise to signal; but records are seen more often.

    Args:
        trials: combinations of a grid. public: table with the columns of the job. shows: draw progress bars.

    Guarantees:
        tests/train/test_public_search.py::test_public_runs_have_the_noise_of_the_private_run.
    """
    job = trials[0].job
    check_scored(job)
    if not job.privacy.dp_enabled or job.privacy.dp_epsilon is None:
        raise fail("dp_epsilon, the budget of the private run", "dp_epsilon", job.privacy.dp_epsilon)
    if same_file(public, Path(job.data.train)):
        raise InvalidArgument(
            f"Expected a table of public records, got --public {public}, which is the private data.train. What is "
            "chosen by private records costs privacy: search without --public, and the search is counted."
        )
    given = job.privacy.dp_dataset_size
    size = count_records(job) if given is None else given
    data = dataclasses.replace(
        job.data, train=str(public), eval=None, spent=None, eval_fraction=job.data.eval_fraction or _HELD_OUT
    )
    processing = load_processing(job)
    records = read_records(dataclasses.replace(job, data=data), processing)
    if not records.evaluation:
        raise fail("public records to compare on", "data.eval_fraction", data.eval_fraction, "The table is too small.")
    order = stream(key_of(job, "public records")).permutation(len(records.train))[:size]
    records = dataclasses.replace(records, train=tuple(records.train[row] for row in order))
    spent = read_spent(job.data.spent)
    check_spent_units(job)
    found = load(trials, processing, records, size, list, spent=spent, shows=shows)
    return PublicSearch(tuple(_on_public(candidate) for candidate in found), records, size)


def _on_public(candidate: Candidate) -> Candidate:
    """The candidate with what its privacy arguments say about the number of records left out."""
    prepared = candidate.prepared
    there, batch = len(prepared.records.train), prepared.job.batch_size
    if there < batch:
        raise InvalidArgument(
            f"Expected at least {batch} public records to train on, the batch size of a candidate, got {there}. Take a "
            "larger public table, or smaller batches: --grid batch_size=..."
        )
    privacy = dataclasses.replace(prepared.job.privacy, dp_dataset_size=None, dp_allow_large_delta=True)
    job = dataclasses.replace(prepared.job, privacy=privacy)
    return dataclasses.replace(candidate, prepared=dataclasses.replace(prepared, job=job))


def run_public(search: PublicSearch, insecure_seed: int | None = None) -> Iterator[float]:
    """Train each candidate once, and give its mean score on the held-out public records, in their order."""
    root = secure_key() if insecure_seed is None else insecure_key(insecure_seed)
    for number, candidate in enumerate(search.candidates):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            model = train_candidate(candidate, Path(folder), fold_in(root, "public", number))
        held_out = candidate.prepared.records.evaluation
        yield score(candidate.prepared, model, held_out) / len(held_out)


def tuned(values: Mapping[str, Any], chosen: Job) -> dict[str, Any]:
    """The values of a job file with those of a candidate, for `dpfunc train`."""
    training = {
        name: getattr(chosen.training, name)
        for name in ("learning_rate", "head_rate", "batch_size", "steps", "physical_batch_size")
        if getattr(chosen.training, name) is not None
    }
    kept = {name: value for name, value in (values.get("training") or {}).items() if name != "epochs"}
    found = {**values, "training": {**kept, **training}}
    if chosen.strategy in ADAPTERS:
        lora = {"rank": chosen.lora.rank, "top_layers": chosen.lora.top_layers}
        shape = {name: value for name, value in lora.items() if value is not None}
        found["lora"] = {**(values.get("lora") or {}), **shape}
    return found
