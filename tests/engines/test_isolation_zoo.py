"""No engine releases a sum in which rows influenced each other, in any step; honest losses are computed."""

from __future__ import annotations

import pytest
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
PAGE = on_page()


@pytest.mark.parametrize("loss", ZOO.values(), ids=lambda loss: loss.name)
def test_no_row_feels_another(loss):
    """And docs/results/isolation.md says what comes out; `python tests/_support/isolation/table.py` writes it."""
    assert loss.plain or (mixed(loss) <= tolerance_of(loss) if loss.honest else mixed(loss) > 10 * tolerance_of(loss))
    found = {engine: cell(loss, engine) for engine in ENGINES}
    assert not [text for text in found.values() if text.startswith("WRONG")], found
    assert not found["auto"].startswith("RAISED"), found  # the others may pass on what torch says about a loss
    assert found["auto"] == "equal" or not loss.honest
    assert [word(text) for text in found.values()] == PAGE.get(loss.name, ["equal"] * len(ENGINES))


def test_the_page_has_no_other_cases():
    assert set(PAGE) <= set(ZOO)
    assert len(MIXING) >= 200
    assert len(HONEST) >= 85
