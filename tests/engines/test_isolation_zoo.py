"""No engine releases a sum in which rows influenced each other, in any step; honest losses are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from isolation.table import cell, on_page, word
from isolation.truth import ENGINES, mixed, outcomes, tolerance_of
from isolation.zoo import HONEST, MIXING

# An error in place of a warning would hide what an engine gives, or the truth itself.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:std.*degrees of freedom is <= 0:UserWarning"),  # of one row
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),  # rows that are kept
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),  # of torch
]
PAGE = on_page(Path(__file__).parents[2] / "docs" / "results" / "isolation.md")
named = {"ids": lambda loss: loss.name}
every_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@every_engine
@pytest.mark.parametrize("loss", MIXING, **named)
def test_mixed_rows_are_never_released(loss, engine):
    tolerance = tolerance_of(loss)
    found = outcomes(loss, engine)
    assert not [outcome.told(tolerance) for outcome in found if outcome.wrong(tolerance)]
    if engine == "auto":  # the others may pass on what torch says about a loss
        assert not [outcome.told(tolerance) for outcome in found if outcome.error]


@every_engine
@pytest.mark.parametrize("loss", HONEST, **named)
def test_honest_losses_are_right_and_auto_computes_them(loss, engine):
    tolerance = tolerance_of(loss)
    found = outcomes(loss, engine)
    assert not [outcome.told(tolerance) for outcome in found if outcome.wrong(tolerance)]
    if engine == "auto":
        assert [outcome.told(tolerance) for outcome in found] == ["equal"] * len(found)


@every_engine
@pytest.mark.parametrize("loss", [*MIXING, *HONEST], **named)
def test_the_page_says_what_comes_out(loss, engine):
    """docs/results/isolation.md; `python tests/_support/isolation/table.py --markdown docs/results/isolation.md` writes it anew."""
    assert word(cell(loss, engine)) == PAGE.get(loss.name, {}).get(engine, "equal")


@pytest.mark.parametrize("loss", MIXING, **named)
def test_each_mixing_loss_mixes(loss):
    assert mixed(loss) > 10 * tolerance_of(loss)


@pytest.mark.parametrize("loss", HONEST, **named)
def test_each_honest_loss_is_honest(loss):
    assert loss.plain or mixed(loss) <= tolerance_of(loss)


def test_the_zoo_is_large():
    assert len(MIXING) >= 300
    assert len(HONEST) >= 140
