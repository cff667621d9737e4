"""Streams of normal numbers: their law and tails, nothing shared, all drawn again; the ziggurat gives numpy's, bit for bit."""

from __future__ import annotations

import itertools
import math
import os
import threading

import numpy as np
import pytest
import torch
from devices import devices
from hypothesis import example, given
from hypothesis import strategies as st
from new_python import python
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from randomgen import UserBitGenerator
from scipy import stats

from dpfunc._utils.processes import Window
from dpfunc.errors import InvalidArgument
from dpfunc.noise import _streams as streams
from dpfunc.noise._streams import (
    CERTAIN,
    EDGES,
    HEIGHTS,
    LAYERS,
    STEPS,
    TAIL,
    TILE,
    device_normal,
    normals,
    normals_of_each,
    scratch,
    secure_normal,
    standard_normal,
    tile,
    tiles,
    words_for,
)
from dpfunc.rng import Key, fold_in, insecure_key, stream

KEY = insecure_key(0)
LEAVES = {"a": torch.zeros(3 * TILE + 17), "b.weight": torch.zeros(40, 50), "c": torch.zeros(()), "d": torch.zeros(0)}


def numbers(key, name="w", tiles=4):
    return np.concatenate([tile(key, name, i) for i in range(tiles)])


def looks_normal(values, level=1e-5):
    """Kolmogorov-Smirnov and the variance, both two-sided."""
    spread = stats.chi2.cdf(float(np.square(values).sum()), values.size)
    return bool(stats.kstest(values, "norm").pvalue > level and level < spread < 1 - level)


def uncorrelated(one, other, bound=5.0):
    return abs(float(np.corrcoef(one, other)[0, 1])) * np.sqrt(one.size) < bound


def test_is_standard_normal():
    for key in (fold_in(KEY, "step", 1), insecure_key(2**200)):
        assert looks_normal(numbers(key))
    values = numbers(KEY)
    assert looks_normal(values)
    assert not looks_normal(0.99 * values)
    assert not looks_normal(1.01 * values)
    assert not looks_normal(values + 0.02)
    assert not looks_normal(stats.t(30).ppf(stats.norm.cdf(values)))  # the right middle with the wrong tails


def test_every_bit_of_a_key_changes_the_noise():
    """A generator of the CPU that keeps 32 bits of a seed would give 224 of these keys the noise of another."""
    keys = [Key((1 << bit).to_bytes(32, "big")) for bit in range(256)]
    drawn = {secure_normal(key, {"w": torch.zeros(4)})["w"].numpy().tobytes() for key in keys}
    assert len(drawn) == 256


def test_tails():
    """Beyond 5 sigma there is as much as there should be; noise of 0.9 or 1.1 sigma fails."""
    draws = 300 * TILE
    peaks = np.concatenate([values[np.abs(values) > 4] for values in (tile(KEY, "tails", i) for i in range(300))])

    def accepted(cut, scale):
        expected = 2 * stats.norm.sf(cut) * draws
        low, high = stats.poisson.interval(0.9999, expected)
        return low <= int((np.abs(peaks * scale) > cut).sum()) <= high

    for cut in (4.5, 5.0):
        assert accepted(cut, 1.0)
        assert not accepted(cut, 0.9)
        assert not accepted(cut, 1.1)
    assert (peaks > 5).any()
    assert (peaks < -5).any()


@pytest.mark.parametrize(("number", "index", "value"), [(800, 13261, -6.6147), (2811, 37476, 5.9450)])
def test_tails_are_not_truncated(number, index, value):
    """Numbers that a 24-bit Box-Muller transform cannot give: it ends at sqrt(48 ln 2) = 5.768."""
    found = tile(KEY, "w", number)[index]
    assert found == pytest.approx(value, abs=1e-4)
    assert abs(np.float32(found)) > np.sqrt(48 * np.log(2))


def test_known_numbers():
    """The noise of a key is the same in every version, so an interrupted run can be resumed with a newer one."""
    found = [float(value).hex() for value in tile(KEY, "w", 0, 3)]
    assert found == ["0x1.a9c265fe62715p-1", "-0x1.25e112ad153c8p-1", "0x1.62e19b71a3adbp-1"]


STREAMS = {
    "steps": ((fold_in(KEY, "step", 0), "w"), (fold_in(KEY, "step", 1), "w")),
    "leaves": ((KEY, "layer.1.weight"), (KEY, "layer.2.weight")),
    "leaves of equal text": ((KEY, "w1"), (KEY, "w")),
    "keys": ((insecure_key(1), "w"), (insecure_key(2), "w")),
    "high bits of a seed": ((insecure_key(1), "w"), (insecure_key(1 + 2**32), "w")),
    "higher bits of a seed": ((insecure_key(1), "w"), (insecure_key(1 + 2**64), "w")),
    "purposes": ((fold_in(KEY, "release"), "w"), (fold_in(KEY, "dropout"), "w")),
}


@pytest.mark.parametrize("pair", STREAMS)
def test_no_correlation(pair):
    """Different steps, leaves, keys: uncorrelated, at every offset of less than a tile, and no number twice."""
    one, other = (numbers(*which) for which in STREAMS[pair])
    assert uncorrelated(one, other)
    assert not uncorrelated(one, other + 0.02 * one)
    assert np.intersect1d(one, other).size == 0
    lagged = np.fft.irfft(np.fft.rfft(one) * np.conj(np.fft.rfft(other)))
    assert np.abs(lagged).max() < 6.5 * np.sqrt(one.size)


def test_tiles_do_not_repeat():
    """Not within a leaf either: tile 1 of `w` is neither tile 0 nor tile 11 of it, nor a tile of `w1`."""
    drawn = [tile(KEY, "w", i) for i in range(12)] + [tile(KEY, "w1", i) for i in range(2)]
    flat = np.concatenate(drawn)
    assert np.unique(flat).size == len(drawn) * TILE
    for one, other in (*itertools.pairwise(drawn), (flat[:-1], flat[1:])):
        assert uncorrelated(one, other)
    half = Window(512, 512, (0, 512), (0, 256))  # of which no more is drawn than it touches
    assert [each.number for each in tiles(half)] == [0, 2]


@given(
    st.tuples(st.integers(1, 700), st.integers(1, 700)),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.sampled_from([torch.float32, torch.float64]),
)
@example((700, 600), (0.5, 0.9, 0.0, 1.0), torch.float32)  # begins in a later row of tiles
@example((300, 700), (0.0, 1.0, 0.6, 1.0), torch.float64)  # and in a later column
def test_a_part_is_a_part_of_the_whole(shape, cuts, dtype):
    """Who holds some rows and columns of a leaf draws what is there in the noise of the whole, with both sources."""
    rows, cols = (
        tuple(sorted(round(share * size) for share in pair))
        for size, pair in zip(shape, (cuts[:2], cuts[2:]), strict=True)
    )
    leaf = torch.zeros(shape, dtype=dtype)
    part = torch.zeros(rows[1] - rows[0], cols[1] - cols[0], dtype=dtype)
    held = Window(*shape, rows, cols)
    for draw in (lambda leaf: secure_normal(KEY, {"w": leaf})["w"], lambda leaf: device_normal(KEY, {"w": leaf})["w"]):
        whole = draw(leaf)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "window", lambda leaf, name: held)
            assert torch.equal(draw(part), whole[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("threads", [1, 3])
def test_stateless(threads):
    """The same key gives the same bits: again, with any number of threads, in any order, in any company."""
    expected = secure_normal(KEY, LEAVES, threads=1)
    backwards = secure_normal(KEY, dict(reversed(LEAVES.items())), threads=threads)
    for name, leaf in LEAVES.items():
        assert expected[name].shape == leaf.shape
        assert torch.equal(backwards[name], expected[name])
        assert torch.equal(secure_normal(KEY, {name: leaf}, threads=threads)[name], expected[name])
        assert torch.equal(standard_normal(KEY, {name: leaf})[name], expected[name])


@pytest.mark.parametrize(
    ("cores", "processes", "expected"), [(8, "", 2), (1, "1", 1), (8, "3", 2), (2, "4", 1), (4, "3", 1)]
)
def test_processes_share_the_cores(monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert streams._cores() == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # not started by torchrun: all processes of the run could be here
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert streams._cores() == max(1, cores // 4)


@pytest.mark.parametrize("here", [True, False])
def test_an_error_of_a_thread_is_the_callers(monkeypatch, here):
    """Memory without noise is never given out, and no thread goes on."""
    drawn, failed = [], threading.Event()

    def failing(*words):
        drawn.append(words)
        if (threading.current_thread() is threading.main_thread()) == here:
            failed.set()
            raise MemoryError("no memory")
        failed.wait(60)
        return fold_in(*words)

    monkeypatch.setattr(streams, "fold_in", failing)
    with pytest.raises(MemoryError, match="no memory"):
        secure_normal(KEY, {"a": torch.zeros(40 * TILE)}, threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("noise")]
    assert here is False or len(drawn) < 40


def test_noise_that_cannot_be_good_is_refused():
    for dtype, source in itertools.product((torch.bfloat16, torch.float16), streams.SOURCES):
        with pytest.raises(InvalidArgument, match=f"noise in float32 or float64, got {dtype} for w"):
            standard_normal(KEY, {"w": torch.zeros(3, dtype=dtype)}, source)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_a_device(device, dtype, monkeypatch):
    """Normal, stateless, a stream of its own for each leaf, tile and key; and the same in any company."""
    monkeypatch.setattr(streams, "_DEVICE_TILE", 2**15)
    leaf, small = torch.zeros(256, 512, dtype=dtype, device=device), torch.zeros(3, device=device)

    def draw(key=KEY, name="w", leaf=leaf):
        return standard_normal(key, {"a": small, name: leaf, "b": small}, "device")[name]

    values = draw()
    assert (values.shape, values.dtype, values.device) == (leaf.shape, leaf.dtype, leaf.device)
    assert torch.equal(values, draw())
    assert torch.equal(values, standard_normal(KEY, {"w": leaf}, "device")["w"])
    flat = values.cpu().double().numpy().ravel()
    assert looks_normal(flat)
    assert not looks_normal(1.01 * flat)
    halves = np.split(flat, 2), np.split(flat, 4)[1:3]
    others = [draw(name="v"), draw(insecure_key(2**32)), draw(fold_in(KEY, "step", 1))]
    for one, other in (*halves, *((flat, other.cpu().double().numpy().ravel()) for other in others)):
        assert uncorrelated(one, other)
    wide = draw(leaf=leaf.double())
    assert torch.equal(values, wide.to(dtype))  # drawn in float64, whatever the dtype of the leaf
    assert not torch.equal(wide, wide.float().double())
    on_host = standard_normal(KEY, {"w": leaf.cpu()})["w"].double().numpy().ravel()
    assert uncorrelated(flat, on_host)  # no key serves both


def test_every_bit_of_a_key_changes_the_noise_of_a_device():
    keys = [Key((1 << bit).to_bytes(32, "big")) for bit in range(256)]
    drawn = {device_normal(key, {"w": torch.zeros(4)})["w"].numpy().tobytes() for key in keys}
    assert len(drawn) == 256


@pytest.mark.parametrize("shapes", [[(3,), (), (0,), (70, 600), (5, 5)], [(2**12,)] * 3])
def test_no_number_of_a_device_appears_twice(shapes, monkeypatch):
    monkeypatch.setattr(streams, "_DEVICE_TILE", 2**12)
    monkeypatch.setattr(streams, "_DEVICE_TILE_COLS", 2**6)
    like = {f"{number}": torch.zeros(shape, dtype=torch.float64) for number, shape in enumerate(shapes)}
    drawn = torch.cat([values.reshape(-1) for values in device_normal(KEY, like).values()])
    assert len(drawn.unique()) == len(drawn) == sum(leaf.numel() for leaf in like.values())


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
    for number in range(15):
        key = fold_in(KEY, size, number)
        assert np.array_equal(normals(stream(key).bit_generator.random_raw, size), stream(key).standard_normal(size))


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
    """Used again, also for fewer numbers, or of one's own: the numbers are the same."""
    room = scratch(words_for(TILE) + 3)
    for number, size in [(0, TILE), (1, TILE), (1, 10), (0, TILE)]:
        draw = stream(fold_in(KEY, "normal", "w", number)).bit_generator.random_raw
        assert np.array_equal(normals_of_each([draw], [size], room)[0], tile(KEY, "w", number, size))


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
