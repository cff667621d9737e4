"""Noise that processes draw together: each number once, as one process would draw it, or no release."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workers import run

from dpfunc import noise
from dpfunc.distributed._reduce import noise_windows, num_bands
from dpfunc.errors import InvalidArgument
from dpfunc.noise._streams import TILE
from dpfunc.rng import insecure_key
from dpfunc.types import ClippedSum

SHAPES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.one_of(
        st.just(()), st.tuples(st.integers(0, 200_000)), st.tuples(st.integers(0, 1500), st.integers(0, 700)),
        st.tuples(st.integers(0, 600), st.integers(0, 20), st.integers(0, 20)),
    ),
    min_size=1,
)  # fmt: skip


@given(SHAPES, st.integers(1, 9))
def test_each_number_belongs_to_one_process(shapes, size):
    """And no process draws more than its share and the bands at the two ends of it."""
    shares = [noise_windows(shapes, rank, size) for rank in range(size)]
    for name, shape in shapes.items():
        rows = sorted(share[name].rows for share in shares if name in share)
        if math.prod(shape):
            num_rows = shape[0] if shape else 1
            assert [0, *(stop for _, stop in rows)] == [*(first for first, _ in rows), num_rows]
        else:
            assert not rows
    counts = [sum((p.rows[1] - p.rows[0]) * p.num_cols for p in share.values()) for share in shares]
    widest = max((p.num_cols for share in shares for p in share.values()), default=0)
    assert max(counts) <= sum(counts) / size + max(TILE, 256 * widest)
    assert sum(map(num_bands, shares)) == num_bands(noise_windows(shapes, 0, 1))


@given(st.integers(1, 5), st.sampled_from([torch.float32, torch.float64]), st.sampled_from(["uniform", "optimal"]))
def test_shares_add_up_to_the_noise_of_one_process(size, dtype, allocation):
    """Bit for bit where the terms are zero, whatever the clip groups: the std is that of all sums together."""
    shapes = {"w": (600, 300), "b": (9,), "s": ()}
    groups = {"w": "first", "b": "second", "s": "second"}
    bounds = {"first": 1.0, "second": 0.3}
    mechanism, turn = noise.gaussian(1.3, allocation=allocation), noise.Turn(0, insecure_key(11), insecure_key)

    def zeros():
        return ClippedSum({n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}, groups, bounds)

    expected, _ = mechanism.add(zeros(), (), turn)
    terms = [zeros() for _ in range(size)]
    for rank, term in enumerate(terms):
        mechanism.add_share(term, noise_windows(shapes, rank, size), turn)
    for name, value in expected.items():
        assert torch.equal(sum(term.sums[name] for term in terms), value)


def test_a_share_needs_a_key():
    clipped = ClippedSum({"w": torch.zeros(3)}, {"w": "all"}, {"all": 1.0})
    with pytest.raises(InvalidArgument, match="Expected key to be a dpfunc Key"):
        noise.gaussian(1.0).add_share(clipped, noise_windows({"w": (3,)}, 0, 1), noise.Turn(0, b"secret", insecure_key))


@pytest.fixture(scope="module")
def alone():
    [found] = run(1, "jobs:noise_share")
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_each_tile_is_drawn_by_one_process(alone, size):
    kind, expected, tiles = alone
    found = run(size, "jobs:noise_share")
    assert [each[0] for each in found] == [kind] * size == ["ok"] * size
    assert sorted(each for _, _, drawn in found for each in drawn) == sorted(tiles)
    assert all(drawn for _, _, drawn in found)
    for _, released, _ in found:
        assert all(torch.equal(released[name], value) for name, value in expected.items())
    assert abs(float(expected["w"].std()) - 1.0) < 0.01


@pytest.mark.parametrize("trouble", ["missing", "twice"])
def test_noise_that_is_missing_is_an_error_of_all(trouble):
    for kind, message, _ in run(2, "jobs:noise_share", trouble):
        assert kind == "StepAborted"
        assert "Expected noise in each row once" in message


def test_a_process_that_cannot_draw_its_noise_stops_all():
    (first, message, _), (second, _, _) = run(2, "jobs:noise_share", "fails")
    assert (first, second) == ("StepAborted", "MemoryError")
    assert "nothing was released" in message


OWN_NOISE = {
    # what is wrong with it, the errors of both processes, words of the second one's
    "other numbers": (["RankMismatch"] * 2, "whose mean has less"),
    "part": (["InvalidArgument"] * 2, "noise of the names, dtypes and shapes"),
    "fails": (["StepAborted", "MemoryError"], "no room for noise"),
}


@pytest.mark.parametrize("trouble", OWN_NOISE)
def test_noise_of_a_user_is_the_same_on_all_processes_or_an_error_of_all(trouble):
    kinds, words = OWN_NOISE[trouble]
    found = run(2, "jobs:noise_of_a_user", trouble)
    assert [(kind, written) for kind, _, written in found] == [(kind, 0) for kind in kinds]
    assert words in found[1][1]
    assert run(2, "jobs:noise_of_a_user", "none") == [("ok", "", 1), ("ok", "", 0)]
