"""The benchmarks of adapters and projectors: closed gradients are those of the library; tables are committed results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import dpfunc
from benchmarks.pages import filled
from benchmarks.recipes import adapters, page, projector, projector_apart
from dpfunc.recipes import recipe


def top_layer():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=20, **sizes)).eval().requires_grad_(False).encoder.layer[0]


@pytest.mark.parametrize("train", ["B", "AB"])
@pytest.mark.parametrize("bound", [None, 0.3])
def test_the_clipped_sum_is_that_of_the_library(train, bound):
    top, source = top_layer(), torch.Generator().manual_seed(1)
    params = adapters.fresh(2, 8, 3, source)
    params = {name: p + 0.3 * torch.randn(p.shape, generator=source) for name, p in params.items()}
    states = [torch.randn(length, 8, generator=source) for length in (3, 5, 2, 5)]
    ((hidden, mask, y),) = adapters.padded(states, torch.tensor([0, 1, 2, 1]), torch.arange(4), 96)
    trained = [name for name in params if train == "AB" or not name.endswith("A")]
    fixed = {name: p for name, p in params.items() if name not in trained}

    def loss_fn(free, batch):
        hidden, mask, y = batch
        return nn.functional.cross_entropy(adapters.logits(top, {**fixed, **free}, hidden, mask), y, reduction="none")

    group_of = {name: "head" if name in "Wb" else "adapters" for name in trained}
    rule = dpfunc.clipping.Automatic()
    if bound is not None:
        rule = dpfunc.clipping.Automatic({"head": 1.0, "adapters": bound}, groups=dpfunc.clipping.ByName(group_of))
    free = {name: params[name] for name in trained}
    clipped, _ = dpfunc.clipped_grad(loss_fn, free, (hidden, mask, y), rule, engine=dpfunc.engines.loop())
    found = adapters.summed(top, params, trained, hidden, mask, y, bound)
    for name in trained:
        torch.testing.assert_close(found[name], clipped.sums[name], rtol=2e-3, atol=1e-4)


def test_the_tables_of_the_page_are_the_committed_results():
    document = page.PAGE.read_text("utf-8")
    tables = page.tables()
    assert filled(document, tables) == document
    for name, table in tables.items():
        head, line, *rows = table.splitlines()
        assert rows, name
        assert {each.count("|") for each in (head, line, *rows)} == {head.count("|")}


def test_the_results_of_projectors_have_the_recipe_of_now():
    """A rule that is changed must be measured again."""
    for result in page.read(projector_apart.RESULT):
        facts = {"dataset_size": result["n"], "num_parameters": result["parameters"], "epsilon": result["epsilon"]}
        found = recipe("projector", **facts, delta=result["delta"])
        assert result["recipe_settings"] == {
            "lr": pytest.approx(found.learning_rate), "expected_batch_size": found.expected_batch_size,
            "steps": found.num_steps,
        }  # fmt: skip
    for result in page.read(projector.RESULT):
        if result["layers"] == 2:  # one layer was measured at multiples of 0.02, and showed that it needs more
            found = recipe(
                "projector", dataset_size=10**6, num_parameters=result["parameters"], epsilon=3.0, delta=1e-5
            )
            assert result["rate"] == pytest.approx(found.learning_rate)
