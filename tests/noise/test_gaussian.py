"""The Gaussian mechanism: scale, allocation, dtypes, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfunc.errors import InvalidArgument, StateReused
from dpfunc.noise import Turn, add_gaussian, gaussian, noise_std
from dpfunc.noise._streams import standard_normal
from dpfunc.rng import Key, fold_in, insecure_key, secure_key
from dpfunc.types import ClippedSum, Schedule

KEY = insecure_key(0)


def turn(key):
    return Turn(0, key, lambda step: key)


def clipped_sum(sizes, sensitivities, dtype=torch.float32):
    """Zeros, one leaf a group, with the given numbers of coordinates. The zeros take no memory."""
    names = [f"p{i}" for i in range(len(sizes))]
    sums = {name: torch.zeros(1, dtype=dtype).expand(size) for name, size in zip(names, sizes, strict=True)}
    groups = {name: f"g{i}" for i, name in enumerate(names)}
    return ClippedSum(sums, groups, {f"g{i}": s for i, s in enumerate(sensitivities)})


def std_accepted(values, std, level=1e-6):
    """Two-sided chi-square test of the standard deviation around zero."""
    tail = stats.chi2.cdf(float(values.double().square().sum()) / std**2, values.numel())
    return level < tail < 1 - level


def total_variance(clipped, std_of_group):
    return sum(v.numel() * std_of_group[clipped.group_of[name]] ** 2 for name, v in clipped.sums.items())


def test_a_secret_key_releases_once():
    """The difference of two releases with one key has no noise; the same release may be repeated."""
    key, clipped = secure_key(), clipped_sum([3, 2], [1.0, 2.0])
    moved = dataclasses.replace(clipped, sums={name: value + 1e-3 for name, value in clipped.sums.items()})
    first = add_gaussian(clipped, 1.0, key)
    for other, multiplier, allocation in (
        (moved, 1.0, "uniform"),
        (clipped, 1.1, "uniform"),
        (clipped, 1.0, "optimal"),
    ):
        with pytest.raises(StateReused, match="This key has released other values before"):
            add_gaussian(other, multiplier, key, allocation=allocation)
        with pytest.raises(StateReused, match="This key has released other values before"):
            gaussian(multiplier, allocation=allocation).add(other, (), turn(key))
    mechanism = gaussian(1.0)
    assert mechanism.init(clipped.sums) == ()
    for again in (add_gaussian(clipped, 1.0, key), mechanism.add(clipped, (), turn(key))[0]):
        assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not torch.equal(add_gaussian(moved, 1.0, fold_in(key, 1))["p0"], first["p0"] + 1e-3)
    with pytest.raises(StateReused, match="made in another process"):  # where it may have released other values
        add_gaussian(clipped, 1.0, Key(bytes(range(32)), made_in="elsewhere"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("allocation", ["uniform", "optimal"])
@pytest.mark.parametrize("sensitivities", [(0.01,), (1.0, 2.0, 0.5)])
def test_scale(dtype, allocation, sensitivities):
    """The noise of each group has the stated standard deviation, and neither 0.9 nor 1.1 of it."""
    clipped = clipped_sum([5000, 20_000, 80_000][: len(sensitivities)], sensitivities, dtype)
    released = add_gaussian(clipped, 1.7, KEY, allocation=allocation)
    stds = noise_std(clipped, 1.7, allocation)
    for name, value in released.items():
        std = stds[clipped.group_of[name]]
        assert std_accepted(value, std)
        assert not std_accepted(value, 0.9 * std)
        assert not std_accepted(value, 1.1 * std)
        mean = float(value.double().mean()) / std * math.sqrt(value.numel())
        assert abs(mean) < 5


sizes_and_sensitivities = st.lists(st.tuples(st.integers(1, 10**7), st.floats(1e-3, 1e3)), min_size=1, max_size=6).map(
    lambda pairs: clipped_sum([size for size, _ in pairs], [s for _, s in pairs])
)
multipliers = st.floats(1e-2, 1e2)


@given(clipped=sizes_and_sensitivities, noise_multiplier=multipliers)
def test_allocations_have_equal_privacy(clipped, noise_multiplier):
    """sum_g S_g^2 / v_g = 1 / z^2: the L2 distance of neighbours in units of the noise is 1 / z."""
    for allocation in ("uniform", "optimal"):
        stds = noise_std(clipped, noise_multiplier, allocation)
        distance = sum((s / stds[group]) ** 2 for group, s in clipped.sensitivities.items())
        assert distance == pytest.approx(noise_multiplier**-2, rel=1e-9)


@given(clipped=sizes_and_sensitivities, data=st.data())
def test_optimal_is_optimal(clipped, data):
    """Every other allocation with equal privacy has at least as much noise in total."""
    groups = list(clipped.sensitivities)
    stds = data.draw(st.lists(st.floats(0.01, 100.0), min_size=len(groups), max_size=len(groups)))
    raw = dict(zip(groups, stds, strict=True))
    distance = sum((clipped.sensitivities[g] / raw[g]) ** 2 for g in groups)
    other = {g: raw[g] * math.sqrt(distance) for g in groups}  # now it is that of z = 1
    best = total_variance(clipped, noise_std(clipped, 1.0, "optimal"))
    assert best <= total_variance(clipped, other) * (1 + 1e-9)
    assert best <= total_variance(clipped, noise_std(clipped, 1.0, "uniform")) * (1 + 1e-9)
    expected = sum(
        s * math.sqrt(v.numel()) for s, v in zip(clipped.sensitivities.values(), clipped.sums.values(), strict=True)
    )
    assert best == pytest.approx(expected**2, rel=1e-9)


def test_stds_of_some_groups():
    """Uniform: all coordinates get z * sqrt(sum S_g^2). The size of a group is that of all its leaves together."""
    clipped = clipped_sum([10, 10], [3.0, 4.0])
    assert noise_std(clipped, 2.0, "uniform") == {"g0": 10.0, "g1": 10.0}
    alone = clipped_sum([1000], [3.0])
    assert noise_std(alone, 2.0, "uniform") == {"g0": 6.0} == pytest.approx(noise_std(alone, 2.0, "optimal"))
    joint = ClippedSum({"a": torch.zeros(60), "b": torch.zeros(40), "c": torch.zeros(5)},
                       {"a": "g0", "b": "g0", "c": "g1"}, {"g0": 1.0, "g1": 1.0})  # fmt: skip
    assert noise_std(joint, 1.0, "optimal") == noise_std(clipped_sum([100, 5], [1.0, 1.0]), 1.0, "optimal")
    large = clipped_sum([10**3, 10**5, 10**6], [1.0, 1.0, 1.0])  # 45 % less noise for the same epsilon
    uniform, optimal = (total_variance(large, noise_std(large, 1.0, how)) for how in ("uniform", "optimal"))
    assert (uniform, optimal) == (pytest.approx(3.303e6), pytest.approx(1.817e6, rel=1e-3))


def test_the_sum_is_kept():
    """Released = sum + noise; the sum that came in is not changed."""
    sums = {"a": torch.linspace(-5, 5, 1000, dtype=torch.float64), "b": torch.full((3, 4), 7.0)}
    clipped = ClippedSum(sums, {"a": "all", "b": "all"}, {"all": 2.0})
    before = {name: value.clone() for name, value in sums.items()}
    released = add_gaussian(clipped, 0.5, KEY)
    zeros = dataclasses.replace(clipped, sums={name: torch.zeros_like(value) for name, value in sums.items()})
    noise = add_gaussian(zeros, 0.5, KEY)
    for name, value in sums.items():
        assert torch.equal(value, before[name])
        assert torch.allclose(released[name] - noise[name], value, rtol=1e-6, atol=1e-6)
        assert not torch.equal(released[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_drawn_as_promised(dtype):
    """Drawn in float64, added and returned in the dtype of the sum, without its graph; float64 noise is not float32
    noise widened, and float32 noise is that noise rounded."""
    clipped = clipped_sum([1000], [1.0], dtype)
    value = add_gaussian(clipped, 1.0, KEY)["p0"]
    assert value.dtype == dtype
    assert torch.equal(value, standard_normal(KEY, clipped.sums)["p0"])
    assert torch.equal(value, value.float().to(dtype)) == (dtype == torch.float32)
    wide = add_gaussian(clipped_sum([1000], [1.0], torch.float64), 1.0, KEY)["p0"]
    assert torch.equal(value, wide.to(dtype))
    assert int((value.bfloat16().to(dtype) == value).sum()) < 20  # and not bfloat16 noise either
    weight = torch.zeros(3, requires_grad=True)
    assert add_gaussian(ClippedSum({"w": weight * 2}, {"w": "all"}, {"all": 1.0}), 1.0, KEY)["w"].grad_fn is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shapes(shape):
    clipped = ClippedSum({"w": torch.zeros(shape), "v": torch.zeros(3)}, {"w": "a", "v": "b"}, {"a": 1.0, "b": 1.0})
    for allocation in ("uniform", "optimal"):
        assert add_gaussian(clipped, 1.0, KEY, allocation=allocation)["w"].shape == shape
        assert torch.equal(add_gaussian(clipped, 0.0, KEY, allocation=allocation)["w"], clipped.sums["w"])  # no noise


def test_noise_inside_inference_mode_and_under_another_default_device():
    """Modes of the caller do not reach the draw."""
    clipped = clipped_sum([200_000], [1.0])
    expected = add_gaussian(clipped, 1.0, KEY)["p0"]
    with torch.inference_mode():
        assert torch.equal(add_gaussian(clipped, 1.0, KEY)["p0"], expected)
    with torch.device("meta"):
        assert torch.equal(add_gaussian(clipped, 1.0, KEY)["p0"], expected)


@pytest.mark.parametrize("key", [KEY, secure_key()], ids=["insecure", "secure"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_not_finite_is_refused(bad, key):
    """Noise does not hide it; and the key has released nothing."""
    clipped = clipped_sum([4, 3], [1.0, 1.0])
    spoiled = dataclasses.replace(clipped, sums={**clipped.sums, "p1": torch.tensor([0.0, bad, 0.0])})
    with pytest.raises(InvalidArgument, match=r"Expected finite sums of clipped gradients, got NaN or inf in p1"):
        add_gaussian(spoiled, 1.0, key)
    with pytest.raises(InvalidArgument, match=r"Expected finite sums of clipped gradients, got NaN or inf in p1"):
        gaussian(1.0).add(spoiled, (), turn(key))
    assert add_gaussian(clipped, 1.0, key)["p1"].isfinite().all()


def test_a_divided_sum_cannot_be_released():
    """Noise for the undivided sum on a divided one: there is no way to say it."""
    clipped = clipped_sum([10], [1.0])
    divided = {name: value / 32 for name, value in clipped.sums.items()}
    with pytest.raises(InvalidArgument, match=r"Expected a ClippedSum, got dict.*Divide after the noise"):
        add_gaussian(divided, 1.0, KEY)
    with pytest.raises(InvalidArgument, match=r"Expected a ClippedSum, got Tensor"):
        gaussian(1.0).add(clipped.sums["p0"] / 32, (), turn(KEY))
    with pytest.raises(TypeError):
        add_gaussian(clipped, std=1.0, key=KEY)


GOOD = clipped_sum([10, 5], [1.0, 1.0])
BAD = {
    "no sums": (ClippedSum({}, {}, {}), {}, "at least one sum"),
    "bfloat16": (clipped_sum([10], [1.0], torch.bfloat16), {}, "float32 or float64 sums, got torch.bfloat16 for p0"),
    "float16": (clipped_sum([10], [1.0], torch.float16), {}, "float32 or float64 sums, got torch.float16 for p0"),
    "integers": (clipped_sum([10], [1.0], torch.int64), {}, "float32 or float64 sums, got torch.int64"),
    "zero sensitivity": (clipped_sum([10], [0.0]), {}, r"0 < sensitivities\['g0'\] < inf"),
    "NaN sensitivity": (clipped_sum([10, 2], [1.0, math.nan]), {}, r"0 < sensitivities\['g1'\] < inf"),
    "infinite sensitivity": (clipped_sum([10], [math.inf]), {}, r"0 < sensitivities\['g0'\] < inf"),
    "no sensitivity": (dataclasses.replace(GOOD, sensitivities={"g0": 1.0}), {}, "sensitivity for each sum.*p1"),
    "no group": (dataclasses.replace(GOOD, group_of={"p0": "g0"}), {}, "sensitivity for each sum.*p1"),
    "negative": (GOOD, {"noise_multiplier": -1.0}, "0 <= noise_multiplier < inf, got noise_multiplier=-1.0"),
    "NaN": (GOOD, {"noise_multiplier": math.nan}, "0 <= noise_multiplier < inf"),
    "infinite": (GOOD, {"noise_multiplier": math.inf}, "0 <= noise_multiplier < inf"),
    "bool": (GOOD, {"noise_multiplier": True}, "not bool"),
    "text": (GOOD, {"noise_multiplier": "1.0"}, "not str"),
    "schedule": (GOOD, {"noise_multiplier": Schedule(((1, 1.0),))}, "not Schedule"),
    "key": (GOOD, {"key": 42}, r"key to be a dpfunc Key, got int. Use dpfunc.secure_key"),
    "allocation": (GOOD, {"allocation": "optimum"}, "allocation to be one of 'uniform', 'optimal'"),
    "source": (GOOD, {"source": "torch"}, "source to be one of 'secure', 'device'"),
    "noise below float32": (clipped_sum([10], [1e-42]), {}, "noise std that torch.float32 can hold for p0"),
    "noise above float32": (clipped_sum([10], [1e38]), {}, "noise std that torch.float32 can hold for p0"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    clipped, changes, message = BAD[case]
    arguments = {"noise_multiplier": 1.0, "key": KEY, **changes}
    with pytest.raises(InvalidArgument, match=message):
        add_gaussian(clipped, **arguments)
    if clipped is GOOD and "key" not in changes:
        with pytest.raises(InvalidArgument, match=message):  # already when the mechanism is made
            gaussian(**{"noise_multiplier": 1.0, **changes})
