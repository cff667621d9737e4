"""Parts of the main job on which its claims rest: the cut of the encoder, and what a resumed run starts from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts import ran

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "main_job"
sys.path.insert(0, str(JOB))


@pytest.fixture(scope="module")
def encoder():
    from fetch import fetch_model
    from model import load_encoder

    return load_encoder(fetch_model())


def test_cached_layers_are_those_of_the_encoder(encoder):
    from model import lower_part, tokenize

    texts = ["a short text", "a rather longer text, about football and money"]
    tokens = tokenize(encoder, texts, 16)
    with torch.no_grad():
        expected = encoder.model(**tokens, output_hidden_states=True).hidden_states[5]
    cached = lower_part(encoder, texts, 5, 16)
    real = cached["mask"]
    assert torch.equal(real, tokens["attention_mask"].bool())
    torch.testing.assert_close(cached["hidden"].float()[real], expected[real], rtol=2e-3, atol=5e-3)


def test_a_cached_text_does_not_depend_on_its_neighbours(encoder):
    from model import lower_part

    alone = lower_part(encoder, ["one text"], 5, 12)["hidden"]
    together = lower_part(encoder, ["one text", "another, which is longer"], 5, 12)["hidden"]
    torch.testing.assert_close(alone[0].float(), together[0].float(), rtol=2e-3, atol=5e-3)


@pytest.mark.slow
def test_a_run_with_a_secret_key_resumes_with_the_same_adapter(tmp_path):
    # A is frozen and not in the checkpoint: drawn from the secret key, it would differ in the resumed run.
    assert ran(JOB / "train.py", "--smoke", "--out", tmp_path).exit_code == 0
    before = load_file(tmp_path / "adapter.safetensors")
    names = ("run.png", "UNRELEASED_norms.png")
    pictures = [(tmp_path / name).read_bytes() for name in names]
    assert ran(JOB / "train.py", "--smoke", "--resume", tmp_path).exit_code == 0
    after = load_file(tmp_path / "adapter.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [(tmp_path / name).read_bytes() for name in names] == pictures


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


def test_no_norms_no_picture(tmp_path):
    import plots

    plots.plot_norms(tmp_path, [], 1.0)
    plots.plot_norms(tmp_path, [1.0], 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["UNRELEASED_norms.png"]
