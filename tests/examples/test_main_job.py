"""The main job in small: it runs, writes what it promises, can be resumed, and explains bad input."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import works
from safetensors.torch import load_file
from scripts import ran

from dpfunc.accounting import Ledger
from dpfunc.accounting.record import Record
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.evidence import check

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "main_job"
sys.path.insert(0, str(JOB))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a process of its own: what the others resume, they do not have in memory."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(JOB / "train.py"), "--smoke", "--insecure-seed", "5", "--out", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder, result.stdout


@pytest.mark.slow
def test_the_table_is_printed(finished):
    _, output = finished
    for line in ("majority class", "non-private twin", "DP head only", "DP-LoRA", "Layers 1-5 are frozen"):
        assert line in output


@pytest.mark.slow
def test_the_run_folder_is_complete(finished):
    folder, _ = finished
    names = {
        "privacy_accounting.json", "ledger.json", "journal.jsonl", "adapter.safetensors", "metrics.json", "run.png",
        "certificate.json", "certificate.html", "UNRELEASED_norms.png", "UNRELEASED_replay.json", "checkpoint",
    }  # fmt: skip
    assert names <= {path.name for path in folder.iterdir()}
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_certificate_is_named_and_holds(finished):
    folder, output = finished
    assert f"Certificate: {folder / 'certificate.json'}" in output.replace("\n", " ")
    findings = check(folder / "certificate.json")
    assert all(finding.agrees for finding in findings)
    assert f"All {len(findings)} checks of it agree." in " ".join(output.split())
    evidence = json.loads((folder / "certificate.json").read_text())["evidence"]
    assert [(each["kind"], each["holds"], each["steps"]) for each in evidence] == [("replay", True, 2)]
    assert "Replay on neighbouring texts: holds." in output


@pytest.mark.slow
def test_the_accounting_is_that_of_the_ledger(finished):
    folder, _ = finished
    values = json.loads((folder / "privacy_accounting.json").read_text())
    names = {"epsilon", "delta", "target_epsilon", "max_grad_norm", "noise_multiplier", "global_step", "epoch"}
    assert names <= values.keys()
    ledger = Ledger.from_json((folder / "ledger.json").read_text())
    assert values["epsilon"] == ledger.epsilon(values["delta"]).epsilon <= values["target_epsilon"]
    assert values["global_step"] == ledger.num_steps == 4
    assert journal_ledger(folder / "journal.jsonl") == ledger


def contents(folder):
    """The results of a run; the order of a safetensors header is not one of them."""
    adapter = {name: value.tolist() for name, value in load_file(folder / "adapter.safetensors").items()}
    record = Record.from_json((folder / "privacy_accounting.json").read_text())
    return adapter, (folder / "ledger.json").read_text(), dataclasses.replace(record, date="")


@pytest.mark.slow
def test_two_processes_give_the_same(finished, tmp_path):
    folder, _ = finished
    output, _ = works(JOB / "train.py", "--smoke", "--insecure-seed", 5, "--out", tmp_path)
    assert output.count("Plan: 4 steps") == output.count("Written to") == 1
    adapter, *accounts = contents(folder)
    other, *theirs = contents(tmp_path)
    assert adapter.keys() == other.keys()
    for name, value in adapter.items():
        torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-6, atol=1e-6)
    assert accounts == theirs
    assert journal_ledger(tmp_path / "journal.jsonl") == journal_ledger(folder / "journal.jsonl")


@pytest.mark.slow
def test_a_finished_run_resumes_to_the_same_result_at_no_cost(finished):
    folder, _ = finished
    before = contents(folder)
    result = ran(JOB / "train.py", "--smoke", "--insecure-seed", 5, "--resume", folder)
    assert result.exit_code == 0, result.stderr[-2000:]
    assert "Resumed at step 4; 4 steps are in the ledger." in result.stdout
    assert before == contents(folder)


@pytest.mark.slow
def test_another_plan_is_not_resumed(finished):
    folder, _ = finished
    result = ran(JOB / "train.py", "--smoke", "--insecure-seed", 5, "--epsilon", 5, "--resume", folder)
    assert result.exit_code != 0
    assert "another plan: plan.epsilon: saved 3.0, now 5.0" in result.stderr


BAD = {
    "no such file": (["--data", "nowhere.csv"], "No such file"),
    "delta": (["--smoke", "--delta", "0.5"], "Expected delta < 1 / dataset_size"),
    "epsilon": (["--smoke", "--epsilon", "-1"], "Expected 0 < epsilon < inf"),
    "layers": (["--smoke", "--layers", "9"], "layers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_explained(name, tmp_path):
    arguments, message = BAD[name]
    result = ran(JOB / "train.py", *arguments, "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert message in result.stderr


def test_csv_and_jsonl(tmp_path):
    from data import DataError, load, read_file

    rows = [(f"text {i}, with a comma", "ab"[i % 2]) for i in range(40)]
    csv_path, jsonl_path = tmp_path / "d.csv", tmp_path / "d.jsonl"
    csv_path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    jsonl_path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    assert read_file(csv_path) == read_file(jsonl_path) == rows
    data = load(str(csv_path), seed=0)
    assert (len(data.train.texts), len(data.validation.texts), len(data.test.texts)) == (29, 3, 8)
    parts = [set(part.texts) for part in (data.train, data.validation, data.test)]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 40
    (tmp_path / "bad.csv").write_text("text,class\nx,y\n")
    with pytest.raises(DataError, match="Expected a text in the column 'label' in row 1 of bad.csv"):
        read_file(tmp_path / "bad.csv")
    with pytest.raises(DataError, match=r"Expected a .jsonl, .csv or .txt file"):
        read_file(csv_path.rename(tmp_path / "d.tsv"))


def test_duplicates_are_removed_before_the_split(tmp_path):
    from data import load

    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": f"t{i % 20}", "label": str(i % 2)}) for i in range(60)]
    path.write_text("\n".join(lines))
    data = load(str(path), seed=0)
    assert data.duplicates == 40
    texts = data.train.texts + data.validation.texts + data.test.texts
    assert len(texts) == len(set(texts)) == 20


def test_mail_text_has_no_headers_and_no_markup():
    from data import mail_text

    raw = "From: a@b.c\nReceived: by spamassassin.taint.org\nSubject: Hello\nContent-Type: text/html\n\n<b>Buy</b> now"
    assert mail_text(raw) == "Hello. Buy now"


def test_wilson_interval():
    from report import wilson

    low, high = wilson(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)


def test_a_changed_download_is_refused(tmp_path):
    from fetch import FetchError, verify

    (tmp_path / "x.whl").write_bytes(b"other")
    with pytest.raises(FetchError, match=r"Expected x.whl with sha256 abc, got"):
        verify(tmp_path / "x.whl", "abc")
