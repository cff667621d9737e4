"""The language model in small: the cut is exact, the short mode runs, and what is committed is a run's result."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from scripts import ran

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "language_model"
WEIGHTS = ROOT / ".cache" / "smollm2"
sys.path.append(str(JOB))


def train(*arguments):
    """The command, in this process: importing what it needs takes longer than running it."""
    return ran(JOB / "train.py", "--short", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "results.json"
    result = train("--model", "tiny", "--out", path)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.output


def test_the_short_mode_reports_before_twin_and_private(finished):
    values, output = finished
    assert [row["name"] for row in values["results"]] == ["before", "non-private twin", "DP-LoRA, epsilon 8"]
    before, twin, private = values["results"]
    assert before["perplexity"] != twin["perplexity"] != private["perplexity"]
    assert all(math.isfinite(row["perplexity"]) and row["sample"] for row in values["results"])
    assert 0 < private["epsilon"] <= 8
    assert before["epsilon"] is twin["epsilon"] is None
    assert "The unit of privacy is one document" in output
    refused = train("--model", "tiny", "--delta", "0.5")
    assert (refused.exit_code != 0, "Expected delta < 1 / dataset_size" in refused.output) == (True, True)
    assert values["settings"]["unit"] == "one document"


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason="needs examples/language_model/fetch_smollm.py")
def test_two_private_steps_on_the_real_weights(tmp_path):
    path = tmp_path / "results.json"
    result = train("--epsilon", 3, "--out", path)
    assert result.exit_code == 0, result.output
    before, _, private = json.loads(path.read_text())["results"]
    assert private["epsilon"] <= 3
    assert private["perplexity"] == pytest.approx(before["perplexity"], rel=0.2)  # two steps: changed, not broken
    assert private["perplexity"] != before["perplexity"]


@pytest.fixture(scope="module")
def tiny():
    from cut import tiny_model

    return tiny_model()


TEXTS = ["a short text", "another text, which is rather longer than the first"]


def test_lower_and_upper_part_are_the_model(tiny):
    from cut import cut, joined, run_lower, tokenize

    ids, _ = tokenize(tiny, TEXTS, 20)
    lower, upper = cut(tiny.model, 2)
    with torch.no_grad():
        expected = tiny.model(input_ids=ids).logits
        got = upper(inputs_embeds=run_lower(lower, ids)).logits
        again = joined(tiny.model, upper)(input_ids=ids).logits
    assert len(upper.model.layers) == len(lower.model.layers) == 2
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(again, expected)


def test_padding_does_not_change_a_loss(tiny):
    """Attention is causal and padding comes last: a document has the same loss at every padded length."""
    from cut import IGNORED, cut, run_lower, tokenize

    import dpfunc
    from dpfunc.hf.tasks import make_loss_fn

    lower, upper = cut(tiny.model, 2)
    forward, params = dpfunc.functionalize(upper)
    loss_fn = make_loss_fn(forward, "causal_lm")
    losses = []
    for length in (12, 30):
        ids, labels = tokenize(tiny, TEXTS[:1], length)
        assert int((labels != IGNORED).sum()) == 12
        losses.append(loss_fn(params, {"inputs_embeds": run_lower(lower, ids), "labels": labels}))
    torch.testing.assert_close(*losses)


@pytest.mark.skipif(not WEIGHTS.exists(), reason="needs examples/language_model/fetch_smollm.py")
def test_the_tokenizer_gives_texts_back_and_keeps_digits_apart():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS, local_files_only=True)
    text = "Profits jumped 76% to £600m.\n\nÄ new line, <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == ids[-1] == tokenizer.eos_token_id == 2
    assert {"7", "6"} <= set(tokenizer.convert_ids_to_tokens(ids))


def test_the_table_of_the_language_model_is_the_committed_result():
    values = json.loads((ROOT / "docs" / "results" / "language_model.json").read_text())
    before, twin, *private = values["results"]
    assert [row["name"] for row in private] == ["DP-LoRA, epsilon 8", "DP-LoRA, epsilon 3"]
    for row, budget in zip(private, (8, 3), strict=True):
        assert 0.9 * budget < row["epsilon"] <= budget
        assert row["perplexity"] < before["perplexity"]
        assert row["loss_change"][2] < 0  # the interval lies below zero
    assert twin["perplexity"] < private[0]["perplexity"]
    text = (JOB / "README.md").read_text()
    for row in values["results"]:
        epsilon = "-" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        assert f"| {row['name']} | {epsilon} | {row['perplexity']:.2f} |" in text
        if "loss_change" in row:
            assert "{1:+.3f} ({0:+.3f} to {2:+.3f})".format(*row["loss_change"]) in text
    assert f"learning rate {values['settings']['lr']:g}." in text
