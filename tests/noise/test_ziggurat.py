"""The ziggurat: numpy's numbers bit for bit, its law by direct evaluation, and the words that come once in a lifetime."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from new_python import python
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from randomgen import UserBitGenerator
from scipy import stats

from dpfunc.noise._streams import (
    CERTAIN,
    EDGES,
    HEIGHTS,
    LAYERS,
    STEPS,
    TAIL,
    TILE,
    normals,
    normals_of_each,
    room_for,
    scratch,
    tile,
    words_for,
)
from dpfunc.rng import fold_in, insecure_key, stream

KEY = insecure_key(0)
LAST = 2**64 - 1
AREA = EDGES[0] * HEIGHTS[-1]
FURTHER = stream(KEY).bit_generator.random_raw(2048).tolist()


def word(layer, place, sign=0, rest=0):
    """A word that falls to this place of this layer; `rest` are the three bits that nothing uses."""
    return rest << 61 | place << 9 | sign << 8 | layer


def uniform_word(value):
    """A word whose uniform number is the next below `value`."""
    return min(int(value * 2**53), 2**53 - 1) << 11


def drawing(first):
    """A function that gives these words and then those of a stream, as many as are asked for."""
    words = itertools.chain(first, FURTHER)
    return lambda count: np.array([next(words) for _ in range(count)], np.uint64)


def of_numpy(first, size):
    """The numbers that numpy makes of the same words."""
    draw = drawing(first)
    return np.random.Generator(UserBitGenerator(lambda _: int(draw(1)[0]), 64)).standard_normal(size)


def of_word(*words):
    return normals(drawing(words), 1)[0]


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 12288, TILE - 1, TILE])
def test_numpy_agrees(size):
    """Bit for bit, over many tiles; about 1 of 70 words is doubtful, and 1 of 4000 numbers is from the tail."""
    room = scratch(words_for(size))
    for number in range(15):
        key = fold_in(KEY, size, number)
        assert np.array_equal(
            normals(stream(key).bit_generator.random_raw, size, room), stream(key).standard_normal(size)
        )


layers = st.sampled_from([0, 1, 2, 100, LAYERS - 1])
# one place beside the end of the certain part numpy's table differs: it was rounded otherwise
places = st.sampled_from([0, 1, 2**51, 2**52 - 2, 2**52 - 1])
words = st.one_of(
    st.builds(word, layers, places, st.integers(0, 1), st.integers(0, 7)),
    st.builds(
        lambda i, off: word(i, min(int(CERTAIN[i]) + off, 2**52 - 1)), st.integers(2, 255), st.sampled_from([-2, 2])
    ),
    st.sampled_from([0, LAST, 1 << 63, uniform_word(0.5)]),
    st.integers(0, LAST),
)


@given(st.lists(words, max_size=200), st.integers(0, 100))
@example([word(0, 2**52 - 1)] * 9, 5)  # tails that draw from words that look like tails
@example([word(1, 2**51)] * 7, 5)  # each second one decides about the one before it
@example([word(1, 2**52 - 1), LAST] * 300, 5)  # refused 300 times: more words are needed
@example([word(0, 2**52 - 1)] + [LAST, 0] * 300, 3)  # a tail that asks for more words than there are at first
@example([0] * 65 + [word(0, 2**52 - 1)], 66)
def test_numpy_agrees_on_rare_words(first, size):
    assert np.array_equal(normals(drawing(first), size), of_numpy(first, size))


ENDS = {"top": word(1, 5), "refused": word(1, 2**52 - 1), "tail": word(0, 2**52 - 1), "edge": word(255, 2**52 - 1)}


@pytest.mark.parametrize("last", ENDS)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_numpy_agrees_where_words_end(last, before):
    """The last number that is wanted begins with the last words that were drawn, and needs words that were not."""
    size = 20
    spare = words_for(size) - size
    first = [word(1, 2**52 - 1), LAST] * (spare // 2)  # two words for no number
    first += [word(9, 5)] * (size - before) + [ENDS[last]]
    assert np.array_equal(normals(drawing(first), size), of_numpy(first, size))


@given(st.lists(st.tuples(st.lists(words, max_size=40), st.integers(0, 60)), min_size=1, max_size=5))
@example([([word(9, 5)] * 83 + [ENDS[end]], 84) for end in ENDS] * 2)  # the last word of a tile needs more
@example([([word(9, 5)] * 83 + [word(0, 2**52 - 1)], 83), ([0] * 90, 20)])
@example([([word(9, 5)] * 80 + [word(0, 2**52 - 1)] + [LAST, 0] * 300, 80), ([word(9, 5)], 20)])
def test_several_are_as_each_alone(parts):
    """Or they are drawn again; what the words of one need is not taken from the next."""
    room = scratch(sum(words_for(size) + 3 for _, size in parts))
    found = normals_of_each((drawing(first) for first, _ in parts), [size for _, size in parts], room)
    alone = [of_numpy(first, size) for first, size in parts]
    assert all(values is None or np.array_equal(values, own) for values, own in zip(found, alone, strict=True))


def test_small_tiles_are_made_together():
    """Nearly always: their words suffice; and in any company they are the same, bit for bit."""
    sizes = [1, 700, 2048, 0, 9000, 2048]
    keys = [fold_in(KEY, "together", number) for number in range(40)]
    for key in keys:
        draws = [stream(fold_in(key, i)).bit_generator.random_raw for i in range(len(sizes))]
        found = normals_of_each(draws, sizes, scratch(20_000))
        for i, (size, values) in enumerate(zip(sizes, found, strict=True)):
            assert np.array_equal(values, stream(fold_in(key, i)).standard_normal(size))


def test_scratch_memory_does_not_matter():
    """Used again, too small, or none: the numbers are the same."""
    room = room_for(TILE)
    expected = [tile(KEY, "w", number) for number in range(3)]
    for memory in (room, room_for(10), None):
        assert all(np.array_equal(tile(KEY, "w", i, TILE, memory), expected[i]) for i in range(3))
    assert np.array_equal(tile(KEY, "w", 1, 10, room), expected[1][:10])


def test_layers_are_under_the_curve():
    """The law without a draw: layers of equal area, all of them and the tail; what is certain is under the curve."""
    assert HEIGHTS[1:] == pytest.approx(np.exp(-0.5 * EDGES[1:] ** 2), rel=1e-15)
    assert (HEIGHTS[:-1] - HEIGHTS[1:])[:] * EDGES[1:] == pytest.approx(np.full(LAYERS - 1, AREA), rel=1e-13)
    tail = math.sqrt(2 * math.pi) * stats.norm.sf(TAIL)
    assert pytest.approx(AREA, rel=1e-13) == TAIL * HEIGHTS[-1] + tail
    assert CERTAIN[2:LAYERS] * STEPS[2:LAYERS] == pytest.approx(EDGES[1:-1], rel=1e-15)
    assert CERTAIN[0] * STEPS[0] == pytest.approx(TAIL, rel=1e-15)
    assert CERTAIN[1] == 0  # above the second layer no rectangle is under the curve
    assert (STEPS[LAYERS:] == -STEPS[:LAYERS]).all()
    assert STEPS[:LAYERS] * 2.0**52 == pytest.approx(EDGES, rel=0)  # 52 bits of each number are random


def test_extreme_words_give_finite_numbers():
    """The largest number is 12.2; no word gives inf, NaN or a number of few bits."""
    farthest = 0.0
    for first, second in itertools.product([0, LAST, *map(uniform_word, 1 - 0.5 ** np.arange(1, 54))], repeat=2):
        for tail in (word(0, 2**52 - 1), word(0, int(CERTAIN[0]))):
            value = of_word(tail, first, second)
            assert math.isfinite(value)
            farthest = max(farthest, abs(value))
    assert 12.0 < farthest < 12.3
    assert of_word(word(7, 1)) == STEPS[7] < 2.0**-52
    assert of_word(word(7, 0)) == 0.0


PROGRAM = """
import hashlib, torch
from dpfunc.noise import add_gaussian
from dpfunc.rng import insecure_key
from dpfunc.types import ClippedSum
digest = hashlib.sha256()
for dtype in (torch.float32, torch.float64):
    sums = {"w": torch.linspace(-1, 1, 300_000).to(dtype)}
    released = add_gaussian(ClippedSum(sums, {"w": "all"}, {"all": 1.0}), 1.1, insecure_key(0))
    digest.update(released["w"].numpy().tobytes())
print(digest.hexdigest())
"""


def test_other_instructions(monkeypatch, capsys):
    """The same bits on a processor without AVX2, AVX-512 or FMA: a run can go on there."""
    exec(PROGRAM, {})
    here = capsys.readouterr().out
    monkeypatch.setenv(
        "NPY_DISABLE_CPU_FEATURES", " ".join(each for each in __cpu_dispatch__ if __cpu_features__[each])
    )
    assert python(PROGRAM).strip() == here.strip()
