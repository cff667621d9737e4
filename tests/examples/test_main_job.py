"""The main job in small: it runs, writes what it promises, can be resumed, and explains bad input; and its parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from launcher import works
from scripts import ran, smoke_run, written

from dpfunc.evidence import check

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "main_job"
sys.path.insert(0, str(JOB))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return smoke_run(JOB / "train.py", tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(finished):
    """The table, all files, a certificate that holds, and an accounting that is that of its ledger."""
    folder, output = finished
    for line in ("majority class", "non-private twin", "DP head only", "DP-LoRA", "Layers 1-5 are frozen"):
        assert line in output
    assert {
        "privacy_accounting.json", "ledger.json", "journal.jsonl", "adapter.safetensors", "metrics.json",
        "certificate.json", "certificate.html", "run.png", "UNRELEASED_norms.png",
        "UNRELEASED_replay.json", "checkpoint",
    } <= {path.name for path in folder.iterdir()}  # fmt: skip
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert f"Certificate: {folder / 'certificate.json'}" in output.replace("\n", " ")
    findings = check(folder / "certificate.json")
    assert all(finding.agrees for finding in findings)
    assert f"All {len(findings)} checks of it agree." in " ".join(output.split())
    evidence = json.loads((folder / "certificate.json").read_text())["evidence"]
    assert [(each["kind"], each["holds"], each["steps"]) for each in evidence] == [("replay", True, 2)]
    assert "Replay on neighbouring texts: holds." in output
    written(folder, 4)


@pytest.mark.slow
def test_two_processes_give_the_same(finished, tmp_path):
    folder, _ = finished
    output, _ = works(JOB / "train.py", "--smoke", "--insecure-seed", 5, "--out", tmp_path)
    assert output.count("Plan: 4 steps") == output.count("Written to") == 1
    (adapter, *accounts), (other, *theirs) = written(folder, 4), written(tmp_path, 4)
    assert adapter.keys() == other.keys()
    for name, value in adapter.items():
        torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-6, atol=1e-6)
    assert accounts == theirs


@pytest.mark.slow
def test_a_finished_run_resumes_to_the_same_result_at_no_cost(finished):
    """And no run of another plan."""
    folder, _ = finished
    before, options = written(folder, 4), ("--smoke", "--insecure-seed", 5, "--resume", folder)
    result = ran(JOB / "train.py", *options)
    assert result.exit_code == 0, result.stderr[-2000:]
    assert "Resumed at step 4; 4 steps are in the ledger." in result.stdout
    assert before == written(folder, 4)
    result = ran(JOB / "train.py", *options, "--epsilon", 5)
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
    lines = [json.dumps({"text": f"t{i % 20}", "label": str(i % 2)}) for i in range(60)]
    (tmp_path / "twice.jsonl").write_text("\n".join(lines))
    data = load(str(tmp_path / "twice.jsonl"), seed=0)  # duplicates are removed before the split
    texts = data.train.texts + data.validation.texts + data.test.texts
    assert (data.duplicates, len(texts), len(set(texts))) == (40, 20, 20)
    (tmp_path / "bad.csv").write_text("text,class\nx,y\n")
    with pytest.raises(DataError, match="Expected a text in the column 'label' in row 1 of bad.csv"):
        read_file(tmp_path / "bad.csv")
    with pytest.raises(DataError, match=r"Expected a .jsonl, .json, .csv or .txt file"):
        read_file(csv_path.rename(tmp_path / "d.tsv"))


def test_small_parts(tmp_path):
    """A mail without its headers and markup; an interval; a download that was changed; no norms, no picture."""
    import plots
    from data import mail_text
    from fetch import FetchError, verify
    from report import wilson

    raw = "From: a@b.c\nReceived: by spamassassin.taint.org\nSubject: Hello\nContent-Type: text/html\n\n<b>Buy</b> now"
    assert mail_text(raw) == "Hello. Buy now"
    assert wilson(0.5, 100) == pytest.approx((0.404, 0.596), abs=5e-4)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)
    (tmp_path / "x.whl").write_bytes(b"other")
    with pytest.raises(FetchError, match=r"Expected x.whl with sha256 abc, got"):
        verify(tmp_path / "x.whl", "abc")
    plots.plot_norms(tmp_path, [], 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["x.whl"]
    plots.plot_norms(tmp_path, [1.0], 1.0)
    assert (tmp_path / "UNRELEASED_norms.png").exists()


@pytest.fixture(scope="module")
def encoder():
    from fetch import fetch_model
    from model import load_encoder

    return load_encoder(fetch_model())


def test_cached_layers_are_those_of_the_encoder(encoder):
    """And a cached text does not depend on its neighbours."""
    from model import lower_part, tokenize

    texts = ["a short text", "a rather longer text, about football and money"]
    tokens = tokenize(encoder, texts, 16)
    with torch.no_grad():
        expected = encoder.model(**tokens, output_hidden_states=True).hidden_states[5]
    cached = lower_part(encoder, texts, 5, 16)
    real = cached["mask"]
    assert torch.equal(real, tokens["attention_mask"].bool())
    torch.testing.assert_close(cached["hidden"].float()[real], expected[real], rtol=2e-3, atol=5e-3)
    alone = lower_part(encoder, texts[:1], 5, 16)["hidden"]
    torch.testing.assert_close(alone[0].float(), cached["hidden"][0].float(), rtol=2e-3, atol=5e-3)


@pytest.mark.slow
def test_a_run_with_a_secret_key_resumes_with_the_same_adapter(tmp_path):
    # A is frozen and not in the checkpoint: drawn from the secret key, it would differ in the resumed run.
    assert ran(JOB / "train.py", "--smoke", "--out", tmp_path).exit_code == 0
    adapter, pictures = written(tmp_path, 4)[0], ("run.png", "UNRELEASED_norms.png")
    before = [(tmp_path / name).read_bytes() for name in pictures]
    assert ran(JOB / "train.py", "--smoke", "--resume", tmp_path).exit_code == 0
    assert written(tmp_path, 4)[0] == adapter
    assert [(tmp_path / name).read_bytes() for name in pictures] == before


def test_the_picture_to_share_has_no_private_number(tmp_path, monkeypatch):
    """What is drawn into run.png, and what only into the file whose name and title say UNRELEASED."""
    import plots
    from matplotlib.axes import Axes

    drawn = []
    for name in ("plot", "hist", "axhline", "axvline", "set"):
        real = getattr(Axes, name)

        def kept(self, *args, _real=real, _name=name, **kwargs):
            drawn.append((_name, args, kwargs))
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(Axes, name, kept)
    plots.plot_run(tmp_path / "run.png", [(1, 0.5), (2, 0.75)], [(1, 1.0), (2, 2.0)], 3.0, 0.9)
    names = [name for name, _, _ in drawn]
    assert "hist" not in names
    assert [args for name, args, _ in drawn if name == "axhline"] == [(0.9,), (3.0,)]  # the twin, the budget
    assert not any("UNRELEASED" in str(options) for _, _, options in drawn)
    drawn.clear()
    plots.plot_norms(tmp_path, [0.01, 0.5, 20.0, float("nan"), 0.0], 1.5)
    assert {path.name for path in tmp_path.iterdir()} == {"run.png", "UNRELEASED_norms.png"}
    (options,) = [options for name, _, options in drawn if name == "set" and "xscale" in options]
    assert options["title"].startswith("UNRELEASED")
    assert options["xscale"] == "log"
    assert [args for name, args, _ in drawn if name == "axvline"] == [(1.5,)]  # the clip bound
