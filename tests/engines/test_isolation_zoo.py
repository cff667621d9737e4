"""No engine releases a sum in which rows influenced each other, in any step; honest losses are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from isolation.table import cell, on_page, word
from isolation.truth import ENGINES, mixed, tolerance_of
from isolation.zoo import HONEST, MIXING, ZOO

# An error in place of a warning would hide what an engine gives, or the truth itself.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:std.*degrees of freedom is <= 0:UserWarning"),  # of one row
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),  # rows that are kept
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),  # of torch
]
PAGE = on_page(Path(__file__).parents[2] / "docs" / "results" / "isolation.md")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("loss", ZOO.values(), ids=lambda loss: loss.name)
def test_no_row_feels_another(loss):
    """And docs/results/isolation.md says what comes out; `python tests/_support/isolation/table.py --markdown` writes it."""
    assert loss.plain or (mixed(loss) <= tolerance_of(loss) if loss.honest else mixed(loss) > 10 * tolerance_of(loss))
    found = {engine: cell(loss, engine) for engine in ENGINES}
    assert not [text for text in found.values() if text.startswith("WRONG")], found
    assert not found["auto"].startswith("RAISED"), found  # the others may pass on what torch says about a loss
    assert found["auto"] == "equal" or not loss.honest
    assert {engine: word(text) for engine, text in found.items()} == PAGE.get(
        loss.name, dict.fromkeys(ENGINES, "equal")
    )


def test_the_page_has_no_other_cases():
    assert set(PAGE) <= set(ZOO)
    assert len(MIXING) >= 200
    assert len(HONEST) >= 85
