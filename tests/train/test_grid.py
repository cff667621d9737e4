"""Grids of a search: what flags may describe, and the jobs that come of it."""

from __future__ import annotations

import pytest
from text_job import write_job

from dpfunc.errors import InvalidArgument
from dpfunc.train._config_file import FACTORS, Grid, parse_flags, parse_grid, read_yaml, trials

WRONG = {
    "unknown key": (["rate=1"], None), "no value": (["steps="], None), "no key": (["steps"], None),
    "a value twice": (["steps=1,1"], None), "a key twice": (["steps=1", "training.steps=2"], None),
    "another section": (["lora.steps=1"], None), "two ways": (["learning_rate=1"], "1,2"),
    "factors in words": ([], "one"), "factor 0": ([], "0,1"), "factors twice": ([], "1,1"), "factor inf": ([], "inf"),
    "too many": (["steps=" + ",".join(map(str, range(1, 500)))], None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_grids_are_refused(name):
    with pytest.raises(InvalidArgument, match="Expected"):
        parse_grid(*WRONG[name])


def test_values_of_the_grid_are_those_of_a_job(tmp_path):
    assert parse_grid([], None) == Grid({}, FACTORS)
    assert parse_grid(["learning-rate=1e-3, 2e-3"], None).factors == (1.0,)
    values = read_yaml(write_job(tmp_path))
    for flags, grid, message in (([], "steps=many", "steps"), (["--strategy", "full"], "rank=2", "no section lora")):
        with pytest.raises(InvalidArgument, match=message):
            trials(values, parse_flags(flags), parse_grid([grid], None))
