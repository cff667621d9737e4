"""Standard normal noise from stateless keys, drawn tile by tile: on CPU threads (`secure`) or on a device (`device`).

May import: its folder, batches, rng and below. Trusted: yes.

`secure` takes words of AES from the CPU and makes them normal by the ziggurat; `device` takes words of ChaCha20, as
hard to guess, where the parameter lies, and other numbers (`_chacha.py`). A parameter is treated as a matrix (shape[0],
everything else) and divided into tiles: of at most 2**16 numbers in `secure`, 256 columns wide where it has as many.
Tile i comes from the key folded with the parameter's name and i, so it depends on nothing else: not on the other
parameters, the microbatches, the number of threads or processes, and a process that holds some rows or columns draws
only the tiles that they touch.

The ziggurat is that of numpy's `Generator.standard_normal`, for a whole tile of 64-bit words at a time. Marsaglia &
Tsang 2000, The ziggurat method for generating random variables: the area under exp(-x^2 / 2), x > 0, is
divided into 256 layers of equal area: rectangles as wide as `EDGES`, below them one with the tail beyond EDGES[255].
A word gives a layer (8 bits), a sign (1 bit) and a place in the layer (52 bits). 98.5 % of all words fall into the part
of their layer that is under the curve for certain, and are numbers: one product. The others need further words, to
decide or to draw from the tail, which has no end but that of 53-bit uniforms, at 12.2 sigma.

Words are used in the order in which numpy uses them, so the numbers are numpy's, bit for bit; but numpy may change its
own, and goes from word to word. All operations are rounded as IEEE 754 says, but for `exp`, which decides about 1 % of
the words, and `log1p`, which makes the numbers of the tail.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.processes import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise import _chacha as chacha
from dpfunc.rng import Key, Words, fold_in

TILE = 2**16
TILE_COLS = 2**8
_MAX_THREADS = 2  # more wait for the interpreter: 16 took up to 2.6 times as long as one, on 16 cores
_TOGETHER = 2**15  # numbers of small tiles that are made together
# Tiles of a device, and numbers that are made there together: so many that a launch is worth it, in a cache of a GPU.
_DEVICE_TILE, _DEVICE_TILE_COLS = 2**22, 2**11
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


class Part(NamedTuple):
    """A window of a parameter, with its dtype and device, of which the noise is drawn."""

    window: Window
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns that are held."""
        return self.window.shape


def tile(key: Key, name: str, number: int, size: int = TILE) -> npt.NDArray[np.float64]:
    """The first `size` numbers of one tile of a parameter: float64 standard normals, tails as far as float64 goes.

    Guarantees:
        tests/noise/test_streams.py: the distribution (test_is_standard_normal, test_tails), independence of
        tiles, parameters and keys (test_no_correlation), the same numbers in every version (test_known_numbers).
    """
    return normals(Words().opened(fold_in(key, "normal", name, number)), size)


class Tile(NamedTuple):
    """A tile, and the wanted numbers of it: their place in the tile (`inside`), and in the result (`there`)."""

    number: int  # of all tiles, counted row by row
    height: int
    width: int
    inside: tuple[slice, slice]
    there: tuple[slice, slice]

    @property
    def needed(self) -> int:
        """Count of numbers up to the last wanted row."""
        return int(self.inside[0].stop) * self.width


def rows_of_a_tile(num_cols: int) -> int:
    """The number of rows of a matrix with so many columns that tiles have."""
    return TILE // max(min(TILE_COLS, num_cols), 1)


def tiles(part: Window, size: int = TILE, columns: int = TILE_COLS) -> Iterator[Tile]:
    """The tiles that a part of a matrix touches."""
    wide = max(min(columns, part.num_cols), 1)
    high = size // wide
    in_a_row = math.ceil(part.num_cols / wide)
    (top, bottom), (left, right) = part.rows, part.cols
    if top >= bottom or left >= right:
        return
    for i in range(top // high, math.ceil(bottom / high)):
        for j in range(left // wide, math.ceil(right / wide)):
            row, col = i * high, j * wide
            height, width = min(high, part.num_rows - row), min(wide, part.num_cols - col)
            rows = max(row, top), min(row + height, bottom)
            cols = max(col, left), min(col + width, right)
            inside, there = (
                (slice(rows[0] - y, rows[1] - y), slice(cols[0] - x, cols[1] - x)) for y, x in ((row, col), (top, left))
            )
            yield Tile(i * in_a_row + j, height, width, inside, there)


Leaves = Mapping[str, Tensor | Part]  # what noise is for: name -> tensor, DTensor, or a part that is described only


def secure_normal(key: Key, like: Leaves, threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    The number of threads, one a core of this process unless given, has no influence on the result.
    """
    noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
    found: list[tuple[str, Tile]] = []
    for name, leaf in like.items():
        part = _window(leaf, name)
        noise[name] = np.empty(part.shape, _NUMPY_DTYPES[leaf.dtype])
        found += [(name, each) for each in tiles(part)]
    largest = max([_TOGETHER, *(each.needed for _, each in found)])
    jobs = deque(_groups(found, largest))
    others = min(threads or _cores(), len(jobs)) - 1

    def draw() -> None:
        memory, words = scratch(words_for(largest) + len(_BETWEEN)), Words()  # of this thread
        while True:
            try:
                group = jobs.popleft()
            except IndexError:
                return
            draws = (words.opened(fold_in(key, "normal", name, each.number)) for name, each in group)
            drawn = normals_of_each(draws, [each.needed for _, each in group], memory)
            for (name, each), values in zip(group, drawn, strict=True):
                numbers = tile(key, name, each.number, each.needed) if values is None else values
                noise[name][each.there] = numbers.reshape(-1, each.width)[each.inside]

    pool = ThreadPoolExecutor(max(others, 1), thread_name_prefix="noise")  # which begins a thread when it gets work
    try:
        begun = [pool.submit(draw) for _ in range(others)]
        draw()
        for thread in begun:
            thread.result()  # raises what it raised: no number is given out that was not drawn
    finally:
        jobs.clear()
        pool.shutdown()
    return {name: torch.from_numpy(noise[name]).reshape(_held(leaf).shape) for name, leaf in like.items()}


def _groups(found: Iterable[tuple[str, Tile]], most: int) -> Iterator[list[tuple[str, Tile]]]:
    """Groups of tiles that are drawn together: as many as the memory holds, at least one."""
    group: list[tuple[str, Tile]] = []
    total = 0
    for name, each in found:
        own = words_for(each.needed) + len(_BETWEEN)
        if group and total + own > words_for(most):
            yield group
            group, total = [], 0
        group.append((name, each))
        total += own
    if group:
        yield group


def _window(leaf: Tensor | Part, name: str) -> Window:
    return leaf.window if isinstance(leaf, Part) else window(leaf, name)


def _held(leaf: Tensor | Part) -> Tensor | Part:
    return leaf if isinstance(leaf, Part) else local(leaf)


def _cores() -> int:
    """Number of threads of this process: its share of the cores, if other processes of the run use this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun; otherwise all processes of the run could be here
    here = int(given) if given.isdecimal() else 0
    everywhere = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return max(1, min(usable // (here or everywhere), _MAX_THREADS))


def device_normal(key: Key, like: Leaves) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype of each leaf, drawn in float64 where it lies; a DTensor's own part."""
    noise: dict[str, Tensor] = {}
    found: dict[torch.device, list[tuple[str, Tile]]] = {}
    for name, leaf in like.items():
        part, held = _window(leaf, name), _held(leaf)
        noise[name] = torch.empty(part.shape, dtype=held.dtype, device=held.device)
        found.setdefault(held.device, []).extend((name, each) for each in tiles(part, _DEVICE_TILE, _DEVICE_TILE_COLS))
    for device, own in found.items():
        for group in _groups(own, _DEVICE_TILE):
            secrets = [fold_in(key, "chacha", name, each.number).secret for name, each in group]
            drawn = chacha.normals(secrets, [each.needed for _, each in group], device)
            for (name, each), values in zip(group, drawn, strict=True):
                noise[name][each.there] = values.view(-1, each.width)[each.inside].to(noise[name].dtype)
    return {name: values.reshape(_held(like[name]).shape) for name, values in noise.items()}


def standard_normal(key: Key, like: Leaves, source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf; of a DTensor the own part, as a plain tensor.

    Guarantees:
        the same key gives the same numbers, for any number of threads and whatever the other leaves are
        (tests/noise/test_streams.py::test_stateless), and however a leaf is divided
        (test_a_part_is_a_part_of_the_whole).
    """
    for name, leaf in like.items():
        if leaf.dtype not in _NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
    return (
        device_normal(key, like)
        if one_of("source", source, SOURCES) == "device"
        else {name: value.to(like[name].device) for name, value in secure_normal(key, like).items()}
    )


_Words = npt.NDArray[np.uint64]
_Floats = npt.NDArray[np.float64]

# EDGES[1:] are the right ends of the layers, from the top to the tail; EDGES[0] is the width of a rectangle with
# the area of the lowest layer, which has the tail.
# fmt: off
EDGES = np.array([
    3.910757959524912, 0.21524189598488003, 0.2861745917920715, 0.33573751921442435, 0.3751213328783798,
    0.40838913461199033, 0.4375184022078708, 0.4636343367908815, 0.4874439661392353, 0.509423329602091,
    0.5299097206615574, 0.5491517023271645, 0.5673382570538182, 0.5846167661063788, 0.6011046177559921,
    0.6168969900077509, 0.6320722363860606, 0.6466957148949931, 0.6608225742444191, 0.6744998228372932,
    0.6877678927957878, 0.7006618411068143, 0.7132122851909752, 0.7254461409099988, 0.7373872114342949,
    0.7490566620178146, 0.7604734064301074, 0.7716544242245675, 0.7826150233072324, 0.7933690588406226,
    0.8039291169899705, 0.8143066701352146, 0.8245122087522915, 0.8345553540863815, 0.8444449549091533,
    0.8541891710081632, 0.8637955455533082, 0.87327106808886, 0.882622229585165, 0.891855070732941,
    0.9009752244612214, 0.9099879534967181, 0.9188981836495902, 0.9277105334019996, 0.9364293402865748,
    0.945058684468165, 0.9536024098810856, 0.9620641432230401, 0.970447311064224, 0.9787551552942242,
    0.986990747099062, 0.9951569996350904, 1.0032566795446725, 1.011292417439995, 1.0192667174654835,
    1.027181966035645, 1.03504043983344, 1.0428443131441483, 1.0505956645909291, 1.0582964833306743,
    1.0659486747621219, 1.0735540657924356, 1.0811144097034033, 1.0886313906539793, 1.0961066278520208,
    1.103541679424639, 1.110938046013575, 1.1182971741193444, 1.1256204592155326, 1.1329092486525332,
    1.1401648443681507, 1.1473885054208484, 1.1545814503599272, 1.161744859445611, 1.1688798767308328,
    1.1759876120154515, 1.1830691426826863, 1.1901255154266914, 1.1971577478794408, 1.2041668301443809,
    1.2111537262436987, 1.218119375485481, 1.2250646937565302, 1.2319905747461355, 1.2388978911056867,
    1.2457874955486268, 1.2526602218948968, 1.2595168860637138, 1.266358287018229, 1.273185207665356,
    1.2799984157138176, 1.2867986644932434, 1.2935866937369476, 1.300363230330837, 1.307128989030731,
    1.3138846731502203, 1.3206309752210559, 1.3273685776279256, 1.3340981532193599, 1.3408203658964037,
    1.347535871180587, 1.3542453167626347, 1.3609493430332826, 1.3676485835974759, 1.374343665773166,
    1.381035211075855, 1.3877238356899757, 1.3944101509281406, 1.4010947636792506, 1.4077782768463984,
    1.4144612897754707, 1.4211443986753085, 1.4278281970302555, 1.4345132760058918, 1.4412002248487237,
    1.4478896312805758, 1.45458208188841, 1.4612781625102753, 1.4679784586180793, 1.4746835556978553,
    1.481394039628187, 1.4881104970574472, 1.4948335157804935, 1.5015636851154637, 1.5083015962813113,
    1.5150478427767144, 1.5218030207609978, 1.528567729437712, 1.5353425714415139, 1.5421281532290017,
    1.5489250854741732, 1.5557339834691761, 1.5625554675310445, 1.5693901634151233, 1.576238702735906,
    1.583101723396029, 1.5899798700241905, 1.5968737944227878, 1.6037841560260941, 1.6107116223698297,
    1.617656869573015, 1.624620582833034, 1.6316034569348727, 1.638606196775547, 1.6456295179047817,
    1.6526741470830553, 1.659740822858182, 1.666830296161665, 1.6739433309261247, 1.6810807047251735,
    1.688243209437195, 1.6954316519345614, 1.702646854799923, 1.7098896570713016, 1.7171609150178229,
    1.7244615029480448, 1.7317923140529632, 1.7391542612859117, 1.7465482782817225, 1.7539753203176716,
    1.7614363653189102, 1.7689324149112684, 1.7764644955245228, 1.7840336595494415, 1.7916409865521625,
    1.7992875845497203, 1.8069745913508208, 1.8147031759662826, 1.8224745400938858, 1.830289919682757,
    1.8381505865828067, 1.8460578502851857, 1.8540130597602023, 1.8620176053996746, 1.8700729210712674,
    1.8781804862929965, 1.8863418285367834, 1.8945585256707052, 1.9028322085504297, 1.9111645637712535,
    1.9195573365931882, 1.9280123340526658, 1.9365314282756947, 1.9451165600086784, 1.9537697423846467,
    1.962493064944363, 1.9712886979336592, 1.9801588969004766, 1.989106007617438, 1.9981324713584196,
    2.0072408305605287, 2.016433734906204, 2.025713947863854, 2.035084353729619, 2.0445479652175313,
    2.054107931650652, 2.063767547811732, 2.0735302635187427, 2.083399693998304, 2.0933796311387916,
    2.1034740557148766, 2.1136871506866526, 2.1240233156895227, 2.134487182846016, 2.145083634047888,
    2.1558178198767366, 2.1666951803543077, 2.1777214677402923, 2.1889027716263603, 2.200245546611276,
    2.2117566428841604, 2.22344334009251, 2.235313384929921, 2.247375032947389, 2.259637095173787, 2.2721089902283813,
    2.284800802724492, 2.2977233489028634, 2.310888250601372, 2.3243080188711325, 2.3379961487965284,
    2.3519672273791445, 2.366237056717291, 2.3808227951720857, 2.3957431197819274, 2.4110184139011195,
    2.4266709849371466, 2.442725318200364, 2.459208374334705, 2.476149939670523, 2.4935830412710467,
    2.511544441626694, 2.530075232159854, 2.549221550324783, 2.5690354526818435, 2.589575986708286, 2.610910518488823,
    2.6331163936315822, 2.656283037576743, 2.6805146432857447, 2.705933656123062, 2.7326853590440114,
    2.7609440052799865, 2.7909211740019275, 2.8228773968264433, 2.857138730873225, 2.8941210536134125,
    2.934366867208888, 2.9786032798818436, 3.027837791769594, 3.0835261320021434, 3.147889289518001,
    3.224575052047802, 3.320244733839826, 3.4492782985614316, 3.654152885361009,
])
# fmt: on
LAYERS = len(EDGES)
TAIL = float(EDGES[-1])  # where the tail begins
_TAIL_SCALE = 0.27366123732975828  # 1 / TAIL, as numpy writes it
_PLACES = 2.0**52
HEIGHTS = np.exp(-0.5 * EDGES * EDGES)
HEIGHTS[0] = 1.0  # of the curve at 0
# For the low nine bits of a word, layer and sign: the number is place * STEPS, and certain if place < CERTAIN. The top
# layer is certain nowhere, the lowest one up to the tail.
STEPS = np.concatenate([EDGES, -EDGES]) / _PLACES
CERTAIN = np.tile(np.floor(np.concatenate([[TAIL / EDGES[0], 0.0], EDGES[1:-1] / EDGES[2:]]) * _PLACES), 2)
LAYER_BITS, LAYER_AND_SIGN_BITS, PLACE_BITS = np.uint64(2**8 - 1), 2**9 - 1, 2**52 - 1


def words_for(size: int) -> int:
    """Number of words for `size` numbers; it suffices all but once in a million: a number takes 1.022 words."""
    return size + size // 40 + 64


class Scratch(NamedTuple):
    """Memory for intermediate results, reused for each tile: to allocate it costs more than to compute."""

    words: _Words
    bits: npt.NDArray[np.int64]
    places: _Floats
    limits: _Floats
    numbers: _Floats
    marks: npt.NDArray[np.bool_]


def scratch(count: int) -> Scratch:
    """Memory for up to `count` words."""
    places, limits, numbers = np.empty((3, count))
    return Scratch(
        np.empty(count, np.uint64), np.empty(count, np.int64), places, limits, numbers, np.empty(count, np.bool_)
    )


def normals(draw: Callable[[int], _Words], size: int) -> _Floats:
    """The first `size` standard normals that numpy's `Generator` would make of the words of a stream, `draw(n)`.

    Guarantees:
        tests/noise/test_streams.py: numpy's numbers for every word (test_numpy_agrees,
        test_numpy_agrees_on_rare_words), the law (test_layers_are_under_the_curve), the same bits on processors with
        other instructions (test_other_instructions).
    """
    words = draw(words_for(size))
    while True:
        numbers, doubtful = _products(words, scratch(len(words)))
        count = _squeeze(numbers, *_decide(words, numbers, doubtful))
        if count >= size:
            return numbers[:size]
        words = np.concatenate([words, draw(words_for(size - count))])


# Padding between the words of tiles that are made together: each is a number at once, and two of them end a draw from
# the tail. So no draw that begins in a tile reads words of the next one.
_BETWEEN = np.full(3, 100 | 1 << 40, np.uint64)


def normals_of_each(
    draws: Iterable[Callable[[int], _Words]], sizes: Sequence[int], room: Scratch
) -> list[_Floats | None]:
    """`normals` of several streams, whose words have room together; None where the first words do not suffice.

    An operation on an array takes longer to begin than for a few thousand numbers, of which many tiles have no more.

    Guarantees:
        tests/noise/test_streams.py: the numbers of each alone (test_several_are_as_each_alone).
    """
    parts, start = [], 0
    for draw, size in zip(draws, sizes, strict=True):
        stop = start + words_for(size)
        room.words[start:stop] = draw(stop - start)
        room.words[stop : stop + len(_BETWEEN)] = _BETWEEN
        parts.append((start, stop, size))
        start = stop + len(_BETWEEN)
    words = room.words[:start]
    numbers, doubtful = _products(words, room)
    keep, _ = _decide(words, numbers, doubtful)
    found: list[_Floats | None] = []
    for start, stop, size in parts:
        own = numbers[start:stop]
        count = _squeeze(own, keep[start:stop], stop - start)
        found.append(own[:size] if count > size else None)  # one more: the last that is wanted ends before it
    return found


def _products(words: _Words, room: Scratch) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """The number that each word is if it begins a number, and marks where it needs further words."""
    count = len(words)
    bits, places, limits = room.bits[:count], room.places[:count], room.limits[:count]
    numbers, doubtful = room.numbers[:count], room.marks[:count]
    np.bitwise_and(words.view(np.int64), LAYER_AND_SIGN_BITS, out=bits)
    STEPS.take(bits, out=numbers, mode="wrap")  # the default mode works on a copy
    CERTAIN.take(bits, out=limits, mode="wrap")
    np.right_shift(words.view(np.int64), 9, out=bits)
    np.bitwise_and(bits, PLACE_BITS, out=bits)
    np.copyto(places, bits)  # exact
    np.greater_equal(places, limits, out=doubtful)
    np.multiply(places, numbers, out=numbers)
    return numbers, doubtful


def _decide(words: _Words, numbers: _Floats, doubtful: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], int]:
    """Marks of the words that stay as numbers, and up to where; the memory of `doubtful` is used for them.

    A word that an earlier one has used up is no number. Nearly all doubtful words use up the next one, so only those
    that stand beside each other, and the tail, are gone through one by one.
    """
    where = doubtful.nonzero()[0]
    layers = (words[where] & LAYER_BITS).view(np.int64)
    tail = layers == 0
    near = tail.copy()
    near[:-1] |= where[1:] - where[:-1] == 1
    begins = np.ones(len(where), np.bool_)
    keep, end = doubtful, len(words)
    keep.fill(True)
    chosen = near.nonzero()[0]
    for i, first, layer in zip(chosen.tolist(), where[chosen].tolist(), layers[chosen].tolist(), strict=True):
        if not begins[i]:
            continue
        after = first + 2
        if layer == 0:
            number, after = _from_tail(words, first)
            if after > len(words):
                end = first
                break
            numbers[first] = number
            keep[first + 1 : after] = False
        while (i := i + 1) < len(where) and where[i] < after:
            begins[i] = False
    begins &= ~tail
    where, layers = where[begins], layers[begins]
    if len(where) and where[-1] + 1 == len(words):  # the word that would decide is not here
        end = min(end, int(where[-1]))
        where, layers = where[:-1], layers[:-1]
    keep[where + 1] = False
    keep[where] = _under_the_curve(numbers[where], layers, words[where + 1])
    return keep, end


def _under_the_curve(numbers: _Floats, layers: npt.NDArray[np.int64], words: _Words) -> npt.NDArray[np.bool_]:
    """Marks of the numbers whose point is under the curve; its height within the layer comes from a word of its own."""
    low, high = HEIGHTS[layers], HEIGHTS[layers - 1]
    uniforms = (words >> np.uint64(11)) * 2.0**-53
    return cast(npt.NDArray[np.bool_], (high - low) * uniforms + low < np.exp(-0.5 * numbers * numbers))


def _from_tail(words: _Words, first: int) -> tuple[float, int]:
    """A number beyond TAIL (Marsaglia 1964), with its sign from word `first`, and the place of the word after it.

    The place is beyond the last word if the words do not suffice.
    """
    negative = int(words[first]) >> 17 & 1
    for at in range(first + 1, len(words) - 1, 2):
        one, other = words[at : at + 2].tolist()
        beyond = -_TAIL_SCALE * math.log1p(-(one >> 11) * 2.0**-53)  # the logarithm of 1 - u, which is never 0
        height = -math.log1p(-(other >> 11) * 2.0**-53)
        if height + height > beyond * beyond:
            return -(TAIL + beyond) if negative else TAIL + beyond, at + 2
    return math.nan, len(words) + 1


def _squeeze(numbers: _Floats, keep: npt.NDArray[np.bool_], end: int) -> int:
    """Move the numbers that stay to the front; their count."""
    kept = numbers[:end][keep[:end]]
    numbers[: len(kept)] = kept
    return len(kept)
