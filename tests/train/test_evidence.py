"""Jobs of `dpfunc train`, replayed and audited: an honest one holds, planted faults and swapped folders are found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from evidence_loops import Less
from job_faults import JOB_FAULTS, finished
from text_job import run as command

import dpfunc
from dpfunc.checkpoint import chain
from dpfunc.evidence.neighbours import Rows, compare
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.train import _evidence
from dpfunc.train._evidence import _JobLoop, _prepared


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield finished(tmp_path_factory.mktemp("job"), patch)


@pytest.fixture(scope="module")
def honest(job):
    out = job.with_name("replay.json")
    done = command("verify", job, "--candidates", "2", "--out", out)
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.fixture(scope="module")
def loop(job):
    folder = job.with_name("replayed") / "run"
    prepared, _ = _prepared(job, folder)
    return lambda key: _JobLoop(prepared, key, folder), Rows(tuple(prepared.records.units))


def test_an_honest_job_holds_and_is_the_recorded_one(honest):
    path, told = honest
    values = json.loads(path.read_text())
    assert (values["steps"], values["reproduced"], values["same_model"], values["moved"]) == (8, 8, True, [])
    assert values["not_compared"] == []  # a date that is the same in two runs by chance is no alarm in a third
    assert 0.5 < values["ratio"] <= 1.001
    assert "8 of 8 releases are those of the journal" in told


@pytest.mark.slow
@pytest.mark.parametrize(("step", "words"), JOB_FAULTS.values(), ids=JOB_FAULTS)
def test_faults_of_a_job_are_found(loop, monkeypatch, step, words):
    """`python -m benchmarks.evidence` does it with 20 seeds each."""
    monkeypatch.setattr(DPTrainer, "training_step", step)
    found = compare(loop[0](dpfunc.rng.insecure_key(11)), loop[1], 8, 1)
    assert any(words in moved for moved in found.moved), found


def other_table(folder):
    """The job names other records than those that it was trained on."""
    path, other = folder / "job.json", folder.with_name("other.jsonl")
    other.write_text(Path("mails.jsonl").read_text().replace("goal", "bank"))
    path.write_text(path.read_text().replace('"mails.jsonl"', json.dumps(str(other))))


def other_model(folder):
    weights = next((folder / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def other_rate(folder):
    values = json.loads((folder / "job.json").read_text())
    values["filled"]["training"]["learning_rate"] *= 2
    (folder / "job.json").write_text(json.dumps(values))


def shorter_journal(folder):
    """Its end is cut, with what says where it ends."""
    journal = folder / "privacy_journal.jsonl"
    lines, ends = journal.read_text().splitlines(keepends=True), [end for end, _ in chain.read_chain(journal)]
    journal.write_text("".join(lines[:-1]))
    assert command("verify", folder, "--candidates", "1").exit_code == 1  # its head says how many lines there are
    chain.write_head(journal, ends[-2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_table, "of 8 releases"), (other_model, "NOT the one"), (other_rate, "NOT the one"),
        (shorter_journal, "7 of 8 releases"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_of_this_job_is_found(job, honest, tmp_path, change, words):
    """Made by hand: records, model, settings or journal are not those of the run."""
    folder = tmp_path / "run"
    shutil.copytree(job, folder)
    change(folder)
    done = command("verify", folder, "--candidates", "1")
    assert done.exit_code == 1
    assert "DOES NOT HOLD" in done.output
    assert words in done.output
    if change is other_model:
        refused = command("certify", folder, "--evidence", honest[0])
        assert refused.exit_code == 1
        assert "weights" in refused.output


def test_results_of_the_job_are_in_its_certificate(job, honest, tmp_path):
    audited, path, picture = tmp_path / "audit.json", tmp_path / "c.json", tmp_path / "audit.png"
    files = ("--out", audited, "--plot", picture)
    done = command("audit", job, "--canaries", "200", "--insecure-seed", "90317", *files)
    assert done.exit_code == 0, done.output
    assert [file.stat().st_mode & 0o777 for file in (audited, picture)] == [0o600, 0o600]
    done = command("certify", job, "--evidence", honest[0], "--evidence", audited, "--out", path)
    assert done.exit_code == 0, done.output
    values = json.loads(path.read_text())
    assert [(each["kind"], each["holds"]) for each in values["evidence"]] == [("replay", True), ("audit", True)]
    unmet = [each["says"] for each in values["assumptions"] if each["met"] is False]
    assert "No other run on the same records was looked at, or it is counted here." in unmet  # the audit's own
    assert values["evidence"][0]["weights"] == values["digests"]["model"]
    checked = command("certify", "--check", path, "--model", next((job / "model").glob("*.safetensors")))
    assert checked.exit_code == 0, checked.output


def test_files_that_cannot_be_written_are_refused_before_the_run(job, tmp_path, monkeypatch):
    for name in ("audit", "verify"):
        monkeypatch.setattr(_evidence, name, lambda *_, **__: pytest.fail("it ran"))
    (tmp_path / "there.png").write_text("a picture")
    for name, option, file in (
        ("audit", "--plot", "there.png"), ("audit", "--plot", "none/new.png"), ("audit", "--out", "none/new.json"),
        ("verify", "--out", "none/new.json"),
    ):  # fmt: skip
        done = command(name, job, option, tmp_path / file)
        assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
        assert f"got {option} {tmp_path / file}" in done.stderr
    assert (tmp_path / "there.png").read_text() == "a picture"


def test_an_audit_finds_noise_that_is_missing(job, monkeypatch):
    own = _evidence.planted_plan
    monkeypatch.setattr(_evidence, "planted_plan", lambda *given: replace(own(*given), noise=Less(factor=0.01)))
    done = command("audit", job, "--canaries", "400", "--insecure-seed", "90555")
    assert done.exit_code == 1, done.output
    assert "is refuted" in done.output
