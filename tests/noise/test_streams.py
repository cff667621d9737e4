"""Streams of normal numbers: their law and tails, nothing shared, all drawn again; and what numpy makes of rare words."""

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

from dpfunc._utils.parts import Window
from dpfunc.errors import InvalidArgument
from dpfunc.noise import _streams as streams
from dpfunc.noise._streams import TILE, device_normal, secure_normal, standard_normal, tiles
from dpfunc.rng import Key, Streams, fold_in, insecure_key, stream

KEY = insecure_key(0)
LEAVES = {"a": torch.zeros(3 * TILE + 17), "b.weight": torch.zeros(40, 50), "c": torch.zeros(()), "d": torch.zeros(0)}


def tile(key, name, number, size=TILE):
    """The first numbers of one tile of a parameter."""
    return stream(fold_in(key, "normal", name, number)).standard_normal(size)


def test_tiles_are_those_of_a_parameter():
    drawn = secure_normal(KEY, {"w": torch.zeros(3 * TILE, dtype=torch.float64)})["w"].numpy()
    assert np.array_equal(drawn, np.concatenate([tile(KEY, "w", number) for number in range(3)]))


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


def word(layer, place, sign=0):
    """A word that falls to this place of this layer of the ziggurat; layer 0 has the tail, layer 1 is the top."""
    return place << 9 | sign << 8 | layer


def uniform_word(value):
    """A word whose uniform number is the next below `value`."""
    return min(int(value * 2**53), 2**53 - 1) << 11


def of_words(*first, size=1):
    """The numbers that numpy makes of these words, and of those of a stream behind them."""
    words = itertools.chain(first, stream(KEY).bit_generator.random_raw(2048).tolist())
    return np.random.Generator(UserBitGenerator(lambda _: next(words), 64)).standard_normal(size)


def test_extreme_words_give_finite_numbers():
    """The largest number is 12.2; no word gives inf, NaN or a number of few bits."""
    farthest = 0.0
    for first, second in itertools.product([0, LAST, *map(uniform_word, 1 - 0.5 ** np.arange(1, 54))], repeat=2):
        for tail in (word(0, 2**52 - 1), word(0, 2**52 - 1, sign=1)):
            [value] = of_words(tail, first, second)
            assert math.isfinite(value)
            farthest = max(farthest, abs(value))
    assert 12.0 < farthest < 12.3
    assert 0 < of_words(word(7, 1))[0] < 2.0**-52  # 52 bits of each number are random
    assert of_words(word(7, 0))[0] == 0.0
    assert np.isfinite(of_words(*[word(1, 2**52 - 1), LAST] * 300, size=5)).all()  # refused 300 times
    assert np.isfinite(of_words(word(0, 2**52 - 1), *[LAST, 0] * 300, size=3)).all()  # a tail that takes 600 words


def test_a_stream_is_opened_from_its_beginning():
    """Whatever was drawn of the one before, halves of words and buffers included."""
    streams = Streams()
    for size in (0, 1, 7, TILE):
        key = fold_in(KEY, "opened", size)
        opened = streams.opened(key)
        assert np.array_equal(opened.standard_normal(size), stream(key).standard_normal(size))
        opened.integers(10, size=3, dtype=np.uint32)
        assert np.array_equal(streams.opened(key).integers(99, size=9), stream(key).integers(99, size=9))


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
