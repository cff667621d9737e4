"""Scripts with a loop: both forms are read, and what is missing is named."""

from __future__ import annotations

import pytest
from evidence_scripts import LOOP, PLAIN, written

import dpfunc
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import replay
from dpfunc.evidence._canary_run import read_script


@pytest.mark.parametrize("form", [LOOP, PLAIN])
def test_both_forms_are_the_same_loop(tmp_path, form):
    """A plain loop that yields, and its two functions."""
    own = read_script(written(tmp_path, form))
    found = replay(own.dp_step, own.init, own.step, own.data, candidates=2, key=dpfunc.insecure_key(0))
    assert found.holds, found
    assert (found.steps, found.not_compared) == (5, ())


@pytest.mark.parametrize("form", [LOOP, PLAIN])
def test_a_fault_of_each_form_is_found(tmp_path, form):
    own = read_script(
        written(tmp_path, form.replace("dpfunc.take(data, indices)", "dpfunc.take(data, indices) - data.mean(0)"))
    )
    found = replay(own.dp_step, own.init, own.step, own.data, candidates=2, key=dpfunc.insecure_key(0))
    assert any("rows of other records" in moved for moved in found.moved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("dp_step = ", "other = "), "dp_step=NoneType"),
        (("data = ", "other = "), "data=NoneType"),
        (("def train", "def other"), "got neither"),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, words):
    with pytest.raises(InvalidArgument, match=words):
        read_script(written(tmp_path, PLAIN.replace(*change)))
