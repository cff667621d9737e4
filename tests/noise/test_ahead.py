"""Noise that threads draw while gradients are computed: the same numbers, for one release and no other."""

import os
import threading
import time

import pytest
import torch

import dpfunc
from dpfunc import noise
from dpfunc import step as step_module
from dpfunc.noise import streams
from dpfunc.noise.streams import Drawing, drawn_ahead, free_cores, secure_normal
from dpfunc.noise.tiles import TILE
from dpfunc.rng import fold_in, insecure_key
from dpfunc.types import ClippedSum

KEY = insecure_key(0)
LEAVES = {"a": torch.zeros(5 * TILE + 17), "b": torch.zeros(40, 50, dtype=torch.float64), "c": torch.zeros(0)}


@pytest.fixture
def drawn(monkeypatch):
    """Number of each tile that is drawn, in order."""
    numbers, tile = [], streams.tile

    def counted(key, name, number, size, room):
        numbers.append((name, number))
        return tile(key, name, number, size, room)

    monkeypatch.setattr(streams, "tile", counted)
    return numbers


def noise_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("noise")]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("wait", [0.0, 0.1])
def test_the_same_numbers(drawn, threads, wait):
    expected = secure_normal(KEY, LEAVES, threads=1)
    count = len(drawn)
    with drawn_ahead(KEY, LEAVES, threads):
        time.sleep(wait)
        found = secure_normal(KEY, LEAVES)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(drawn) == 2 * count  # each tile once
    assert not noise_threads()


def test_it_is_drawn_ahead(drawn):
    with drawn_ahead(KEY, LEAVES, 1):
        give_up = time.monotonic() + 60
        while len(drawn) < 7 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert len(drawn) == 7
        secure_normal(KEY, LEAVES)
    assert len(drawn) == 7


@pytest.mark.parametrize(
    ("key", "leaves"),
    [
        (fold_in(KEY, "other"), LEAVES),
        (KEY, {**LEAVES, "a": torch.zeros(TILE)}),
        (KEY, {**LEAVES, "a": torch.zeros(5 * TILE + 17, dtype=torch.float64)}),
        (KEY, {**LEAVES, "d": torch.zeros(3)}),
    ],
    ids=["key", "shape", "dtype", "leaves"],
)
def test_other_noise_is_drawn_anew(key, leaves):
    expected = secure_normal(key, leaves)
    with drawn_ahead(KEY, LEAVES, 1):
        found = secure_normal(key, leaves)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_it_is_given_once():
    """The sum is written over the noise, so a second caller with the same key gets fresh memory."""
    expected = secure_normal(KEY, LEAVES)
    with drawn_ahead(KEY, LEAVES, 1):
        secure_normal(KEY, LEAVES)["a"].zero_()
        again = secure_normal(KEY, LEAVES)
    assert torch.equal(again["a"], expected["a"])


def test_an_error_leaves_nothing(drawn):
    """Neither threads nor numbers: what is drawn later is drawn from its own key."""
    many = {"a": torch.zeros(400 * TILE)}
    with pytest.raises(KeyboardInterrupt), drawn_ahead(KEY, many, 1):
        raise KeyboardInterrupt
    assert not noise_threads()
    assert len(drawn) < 400
    before = len(drawn)
    secure_normal(KEY, LEAVES)
    assert len(drawn) == before + 7


def test_an_error_of_a_thread_is_the_callers(monkeypatch):
    failed, tile = threading.Event(), streams.tile

    def fail(*args):
        if threading.current_thread() is threading.main_thread():
            return tile(*args)
        failed.set()
        raise MemoryError("no memory")

    def draw():
        with drawn_ahead(KEY, LEAVES, 2):
            assert failed.wait(60)
            return secure_normal(KEY, LEAVES)

    monkeypatch.setattr(streams, "tile", fail)
    with pytest.raises(MemoryError, match="no memory"):
        draw()
    assert not noise_threads()


def test_memory_without_noise_is_never_given_out():
    drawing = Drawing(KEY, LEAVES)
    drawing.stop()
    with pytest.raises(RuntimeError, match="Expected 7 tiles of noise, got 0"):
        drawing.finish(threads=1)


@pytest.mark.parametrize(("ahead", "threads", "expected"), [(0, 1, 0), (0, 3, 2), (1, 2, 1), (1, 4, 3), (3, 2, 3)])
def test_threads_that_draw_ahead_are_counted(monkeypatch, ahead, threads, expected):
    begun, tile = threading.Event(), streams.tile
    monkeypatch.setattr(streams, "tile", lambda *args: begun.wait(60) and tile(*args))
    drawing = Drawing(KEY, LEAVES)
    drawing.start(ahead)
    start = drawing.start
    monkeypatch.setattr(drawing, "start", lambda more: (start(more), begun.set()))  # no thread ends before
    drawing.finish(threads)
    assert len(drawing._started) == expected


def test_free_cores(monkeypatch):
    monkeypatch.setattr(streams, "_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert (free_cores(on_cpu=True), free_cores(on_cpu=False)) == (2, 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    assert free_cores(on_cpu=True) == 0


@pytest.mark.parametrize(("cores", "processes", "expected"), [(8, "", 8), (8, "1", 8), (8, "3", 2), (2, "4", 1)])
def test_processes_share_the_cores(monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert streams._cores() == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # not started by torchrun: all processes of the run could be here
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert streams._cores() == max(1, cores // 4)


@pytest.fixture
def job():
    """Step, parameters, batch, state and key of a run with more numbers than one tile."""
    plan = dpfunc.Plan(
        dpfunc.sampling.Poisson(4, 1.0), dpfunc.clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3
    )
    dp_step = dpfunc.make_dp_step(lambda params, batch: (batch @ params["w"]).sum(1), plan)
    params, key = {"w": torch.zeros(700, 500)}, dpfunc.secure_key()
    return dp_step, params, torch.randn(4, 700), dp_step.init(params, key=key), key


@pytest.mark.parametrize("threads", [0, 2])
def test_a_step_draws_its_own_noise_once(monkeypatch, drawn, job, threads):
    dp_step, params, batch, state, key = job
    monkeypatch.setattr(streams, "free_cores", lambda on_cpu: threads)
    clipped, _ = dp_step.clipped_grad(params, batch, key=fold_in(fold_in(key, "step", 0), "dropout"))
    release = fold_in(fold_in(key, "step", 0), "release")
    expected = noise.add_gaussian(ClippedSum(clipped.sums, clipped.group_of, clipped.sensitivities), 1.0, release)
    drawn.clear()
    grads, _, _ = dp_step(params, batch, state)
    assert torch.equal(grads["w"], expected["w"] / 4)
    assert len(drawn) == len(set(drawn)) == 6


@pytest.mark.parametrize(("size", "begun"), [(700, 1), (5, 0)])
def test_a_step_begins_to_draw_if_it_is_worth_a_thread(monkeypatch, size, begun):
    """With the key of the step and the cores that are free."""
    asked = []

    def spied(key, like, threads):
        asked.append((key, {name: (leaf.shape, leaf.dtype) for name, leaf in like.items()}, threads))
        return drawn_ahead(key, like, threads)

    monkeypatch.setattr(step_module, "drawn_ahead", spied)
    monkeypatch.setattr(streams, "free_cores", lambda on_cpu: 3 if on_cpu else 0)
    plan = dpfunc.Plan(
        dpfunc.sampling.Poisson(4, 1.0), dpfunc.clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3
    )
    dp_step = dpfunc.make_dp_step(lambda params, batch: (batch @ params["w"].float()).sum(1), plan)
    params, key = {"w": torch.zeros(size, 500, dtype=torch.bfloat16)}, dpfunc.secure_key()
    dp_step(params, torch.randn(4, size), dp_step.init(params, key=key))
    expected = (fold_in(fold_in(key, "step", 0), "release"), {"w": ((size, 500), torch.float32)}, 3)
    assert asked == [expected] * begun


def test_a_step_that_fails_leaves_no_noise_for_another(monkeypatch, drawn, job):
    """The next try is the same release; other data with the same step are refused once it was released."""
    dp_step, params, batch, state, _ = job
    monkeypatch.setattr(streams, "free_cores", lambda on_cpu: 1)
    with pytest.raises(dpfunc.errors.InvalidArgument, match="finite"):
        dp_step({"w": params["w"] + float("nan")}, batch, state)
    assert not noise_threads()
    assert streams._ahead.get([]) == []
    grads, after, _ = dp_step(params, batch, state)
    with pytest.raises(dpfunc.errors.StateReused):
        dp_step(params, 2 * batch, state)
    others, _, _ = dp_step(params, batch, after)
    assert not torch.equal(grads["w"], others["w"])
