"""One record more or less moves each step by the bound at most, or the step is refused: losses that keep something."""

from __future__ import annotations

import builtins
import concurrent.futures
import enum
import fnmatch
import functools
import gc
import importlib
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import re
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path

import keepers
import numpy as np
import pytest
import torch
import tqdm
from keepers import KEEPERS, attribute, entry, of, user
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, engines
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import fold_in, insecure_key

# torch warns once a process where a kind of tensor is first made, so which test sees it depends on their order
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
D = 4
every_engine = pytest.mark.parametrize("engine", ["auto", "vmap", "ghost", "loop"])


# Places where a loss may keep something from call to call: each gives `value()` and `change()`.

COUNT, TABLE, SETTINGS = 0, [0], types.ModuleType("settings_of_a_user")


class Slot:
    __slots__ = ("n",)


def class_of_an_instance():
    def change(kept):
        type(kept).n += 1

    return of(user()(), lambda kept: kept.n, change)


def a_global():
    def change():
        global COUNT
        COUNT += 1

    before = COUNT
    return lambda: COUNT - before, change


def global_of_a_method():
    class User:
        def change(self):
            TABLE[0] += 1

        def value(self):
            return TABLE[0]

    TABLE[0] = 0
    return of(User(), lambda user: user.value(), lambda user: user.change())


def module_of_python():
    SETTINGS.n = 0

    def change():
        SETTINGS.n += 1

    return lambda: SETTINGS.n, change


def default_of_a_function():
    def value(kept=[0]):  # noqa: B006  (what this is about)
        return kept[0]

    return value, lambda: value.__defaults__[0].append(value.__defaults__[0].pop() + 1)


def closure():
    number = 0

    def change():
        nonlocal number
        number += 1

    return lambda: number, change


def buffer(new):
    def change(net):
        if new:
            net[0].num_batches_tracked = net[0].num_batches_tracked + 1
        else:
            net[0].num_batches_tracked += 1

    return of(nn.Sequential(nn.BatchNorm1d(1)), lambda net: net[0].num_batches_tracked.item(), change)


def draws_of_a_generator():
    other = torch.Generator()

    def value(kept):
        other.set_state(kept.get_state())
        return float(torch.rand((), generator=other) > 0.6)

    return of(torch.Generator().manual_seed(0), value, lambda kept: torch.rand((), generator=kept))


def python_generator():
    before = random.Random(0).getstate()
    return of(random.Random(0), lambda kept: float(kept.getstate() != before), lambda kept: kept.random())


def next_of_an_iterator():
    kept = itertools.count()
    return lambda: int(repr(kept)[6:-1]), kept.__next__


PLACES = {
    "dict": lambda: of({}, len, lambda seen: seen.update({len(seen): True})),
    "list": lambda: entry([0]),
    "list, from -1 to -2": lambda: of([-1], lambda n: -1 - n[0], lambda n: n.__setitem__(0, n[0] - 1)),  # equal hashes
    "number under a name of Transformers": lambda: attribute(types.SimpleNamespace(), "rope_deltas"),
    "deque": lambda: entry(deque([0])),
    "bytearray": lambda: entry(bytearray(1)),
    "numpy array": lambda: entry(np.zeros(3)),
    "large tensor": lambda: of(torch.zeros(1000), lambda kept: kept[0].item(), lambda kept: kept.add_(1)),
    "closure": closure,
    "global": a_global,
    "global of a method": global_of_a_method,
    "module of Python": module_of_python,
    "class": lambda: attribute(user()),
    "class of an instance": class_of_an_instance,
    "slot": lambda: attribute(Slot()),
    "subclass of list": lambda: attribute(type("Kept", (list,), {})()),
    "default of a function": default_of_a_function,
    "attribute of a function": lambda: attribute(lambda: None),
    "attribute of a submodule": lambda: attribute(nn.Sequential(nn.Linear(1, 1))[0]),
    "buffer of a submodule": lambda: buffer(new=False),
    "new buffer of a submodule": lambda: buffer(new=True),
    "seed of a generator": lambda: of(
        torch.Generator().manual_seed(0), lambda kept: kept.initial_seed(), lambda kept: kept.manual_seed(kept.initial_seed() + 1)),
    "draws of a generator": draws_of_a_generator,
    "numpy generator": lambda: of(
        np.random.default_rng(0), lambda kept: 1 - kept.bit_generator.state["state"]["state"] % 2, lambda kept: kept.random()),
    "Python generator of numbers": python_generator,
    "itertools.count": lambda: of(itertools.count(), lambda kept: int(repr(kept)[6:-1]), next),
    "iterator": lambda: of(iter(range(1000)), lambda kept: 1000 - kept.__length_hint__(), next),
    "generator function": lambda: of(
        (number for number in range(1000)), lambda kept: kept.gi_frame.f_locals.get("number", -1) + 1, next),
    "__next__ of an iterator": next_of_an_iterator,
    "context variable": lambda: of(ContextVar("kept", default=0), lambda kept: kept.get(), lambda kept: kept.set(kept.get() + 1)),
    "lru_cache": lambda: of(functools.lru_cache(None)(lambda n: n), lambda kept: kept.cache_info().currsize,
                            lambda kept: kept(kept.cache_info().currsize)),
}  # fmt: skip
SWITCHES = ["dict", "class", "attribute of a submodule", "itertools.count"]


# Steps with and without one record.


def batch(size, seed, large=False, at=0):
    """Rows with gradients that point the same way; one of them is much larger than the others if `large`."""
    x = torch.rand(size, D, generator=torch.Generator().manual_seed(seed)) + 0.5
    if large:
        x[at] *= 100
    return x


def steps(large=1, at=0):
    """Batches of steps that follow each other; one of them has a large row."""
    return [batch(size, seed, seed == large, at) for seed, size in enumerate((8, 8, 8, 9))]


def linear(p, x, flipped=False):
    """Gradients are the rows: flipped ones move the sum by up to twice their number."""
    sign = torch.where(flipped, -1.0, 1.0) if isinstance(flipped, torch.Tensor) else -1.0 if flipped else 1.0
    return (p["w"] * x).sum(1) * sign


def weights():
    return {"w": torch.ones(D)}


def released(make, engine, batches, size=None):
    made = make()
    loss_fn, params = made if isinstance(made, tuple) else (made, weights())
    prepared = make_clipped_grad(loss_fn, clipping.Flat(1.0), engine=getattr(engines, engine)(), microbatch_size=size)
    found = []
    for step, rows in enumerate(batches):
        try:
            clipped, _ = prepared(params, rows.clone(), key=fold_in(insecure_key(7), step))
            found.append(torch.cat([value.flatten() for value in clipped.sums.values()]))
        except UnsupportedModel:
            found.append(None)
    return found


def refused(make, engine, batches=None, size=None, step=1, at=0):
    """True if a step was refused, of which each is taken with and without one record of one.

    Checks those that both release: the bound is allowed in that step, nothing in the others.
    """
    batches = steps() if batches is None else batches
    without = torch.arange(len(batches[step])) != at
    other = [rows[without] if number == step else rows for number, rows in enumerate(batches)]
    whole = released(make, engine, batches, size)
    pairs = enumerate(zip(whole, released(make, engine, other, size), strict=True))
    off = [float((one - two).norm()) - (n == step) for n, (one, two) in pairs if one is not None and two is not None]
    assert max(off, default=0.0) < 1e-4
    return any(sums is None for sums in whole)


def latch(place, wanted=True):
    """Changes what it keeps where a batch has a large number, or has none; the next call depends on that."""

    def make():
        value, change = place()

        def loss_fn(p, x):
            losses = linear(p, x, value() > 0)
            if bool((x > 20).any()) == wanted and not value():
                change()
            return losses

        return loss_fn

    return make


def counter(place, period=2):
    """Each other call is flipped; or two of four calls, which an audit after each call may not see."""

    def make():
        value, change = place()

        def loss_fn(p, x):
            losses = linear(p, x, value() % period >= period / 2)
            change()
            return losses

        return loss_fn

    return make


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_latch_that_is_idle_at_first(place, engine):
    assert refused(latch(PLACES[place]), engine)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("place", SWITCHES)
@every_engine
def test_a_latch_with_and_without_a_large_number(place, engine, wanted):
    """`any()` that is false says the same of each row, but not that nothing was kept."""
    make = latch(PLACES[place], wanted)
    assert refused(make, engine) or not wanted  # zeros, which come first, have no large number either
    refused(make, engine, steps(large=0), "auto", step=0)


def test_a_change_that_the_last_call_takes_back_is_seen():
    """Three groups of rows, and the pass that parts them, are four calls: after them a switch is where it was."""
    switch = [False]

    def loss_fn(p, x):
        switch[0] = not switch[0]
        return (p["w"] * x).sum(1) * (x[0, 0].item() + switch[0])

    with pytest.raises(UnsupportedModel, match="what it keeps from call to call has changed"):
        engines.auto()(loss_fn, {"w": torch.ones(2)}, torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize(
    "read", [lambda x: x.sum() > 0, lambda x: x.sum().item() > 0, lambda x: x[0, 0] in x, lambda x: x.allclose(x)]
)
def test_a_row_that_is_another_one_after_the_others_is_refused(read):
    """By `loop`, where Python is told numbers of rows: it could keep them where no walk sees them."""

    def loss_fn(p, x):
        return (p["w"] * x).sum(1) * (random.random() if read(x) else 2.0)

    with pytest.raises(UnsupportedModel, match="after other rows were computed"):
        engines.loop()(loss_fn, {"w": torch.ones(2)}, torch.arange(6.0).reshape(3, 2) + 1)


def test_what_an_error_would_keep_is_compared_as_well():
    """The read is followed by an operation that has no rule, so that rows are computed alone."""

    def make():
        seen = []

        def loss_fn(p, x):
            if (x > 20).any():
                seen.append(True)
            return linear(p, x, len(seen) > 0) + 0 * torch.kron(p["w"], x).view(len(x), -1).sum(1)

        return loss_fn

    assert refused(make, "auto")


@pytest.mark.parametrize("place", KEEPERS)
def test_a_change_of_what_is_kept_is_seen_wherever_it_is(place):
    value, change = KEEPERS[place]()
    loss_fn = lambda p, x: (value(), change())
    value()  # what Python makes of an object when it is first asked is no change
    before = python_state(loss_fn)
    assert python_state(loss_fn) == before
    change()
    assert python_state(loss_fn) != before


FIRST, MIDDLE, LAST = 0, 4, 7
ORDERS = [
    (place, ("auto", "loop", "vmap", "loop", "ghost")[number % 5], (FIRST, MIDDLE, LAST)[number % 3])
    for number, place in enumerate(KEEPERS)
]


@pytest.mark.parametrize(("place", "engine", "at"), ORDERS)
def test_a_latch_is_refused_wherever_it_is_kept_and_the_large_record_stands(place, engine, at):
    """The latch is set before the losses are computed: those of the large record itself are as later ones."""

    def make():
        value, change = KEEPERS[place]()

        def loss_fn(p, x):
            if bool((x > 20).any()) and not value():
                change()
            return linear(p, x, value() > 0)

        return loss_fn

    assert refused(make, engine, steps(at=at), at=at)


LARGEST = [0.0]


def running(kept, found):
    """The largest number so far."""
    kept[0] = max(kept[0], float(found))
    return kept[0]


def function_that_keeps(forward, backward):
    """A custom function whose passes may keep what they see, in a global, an attribute or a default."""

    backward = backward or (lambda cls, x, kept=[0.0]: 10 / (1 + running(kept, x.abs().max())))

    class Keeping(torch.autograd.Function):
        largest = 0.0

        @staticmethod
        def forward(x):
            return x * forward(Keeping, x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, grad):
            return grad * backward(Keeping, ctx.saved_tensors[0])

    LARGEST[0] = 0.0
    return lambda p, x: Keeping.apply(linear(p, x).sqrt() * x.norm())


def of_class(cls, x):
    cls.largest = max(cls.largest, float(x.abs().max()))
    return 10 / (1 + cls.largest)


def as_it_is(cls, x):
    return 1.0


FUNCTIONS = {
    "class, forward": (of_class, as_it_is),
    "class, backward": (as_it_is, of_class),
    "global, forward": (lambda cls, x: 10 / (1 + running(LARGEST, x.abs().max())), as_it_is),
    "global, backward": (as_it_is, lambda cls, x: 10 / (1 + running(LARGEST, x.abs().max()))),
    "default, backward": (as_it_is, None),
}


@pytest.mark.parametrize("at", [FIRST, LAST])
@pytest.mark.parametrize("where", FUNCTIONS)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_custom_functions_that_keep_the_largest_number(engine, where, at):
    assert refused(lambda: function_that_keeps(*FUNCTIONS[where]), engine, steps(at=at), at=at)


@pytest.mark.parametrize("place", PLACES)
def test_a_counter_over_rows(place):
    assert refused(counter(PLACES[place]), "loop")


@pytest.mark.parametrize("place", SWITCHES)
@every_engine
def test_a_counter_over_microbatches(place, engine):
    make = counter(PLACES[place])
    assert all(refused(make, engine, size=4, step=step) for step in (0, 1))
    assert refused(make, engine, [batch(5, 0), batch(6, 1)], size=4)
    assert refused(counter(PLACES[place], 1000), engine, size=4)


class Statistics(nn.Module):
    """Computes statistics of a batch into its buffers, and flips the next loss where they are large."""

    def __init__(self, update):
        super().__init__()
        self.linear = nn.Linear(D, 1, bias=False)
        self.update = update
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("var", torch.ones(1))

    def forward(self, x):
        flip = torch.where(self.mean.clone() > 2.0, -1.0, 1.0)
        self.update(x.detach()[:, None, :], self.mean, self.var)
        return self.linear(x)[:, 0] * flip


ops = torch.ops.aten
UPDATES = {
    "F.batch_norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True, momentum=1.0),
    "F.instance_norm": lambda x, mean, var: F.instance_norm(x, mean, var, momentum=1.0),
    "batch_norm": lambda x, mean, var: ops.batch_norm(x, None, None, mean, var, True, 1.0, 1e-5, False),
    "_batch_norm_impl_index": lambda x, mean, var: ops._batch_norm_impl_index(x, None, None, mean, var, True, 1.0, 1e-5, False),
    "native_batch_norm": lambda x, mean, var: ops.native_batch_norm(x, None, None, mean, var, True, 1.0, 1e-5),
    "_native_batch_norm_legit": lambda x, mean, var: ops._native_batch_norm_legit(x, None, None, mean, var, True, 1.0, 1e-5),
    "_batch_norm_with_update": lambda x, mean, var: ops._batch_norm_with_update(x, None, None, mean, var, 1.0, 1e-5),
    "batch_norm_update_stats": lambda x, mean, var: ops.batch_norm_update_stats(x, mean, var, 1.0),
}  # fmt: skip


def statistics_of(update):
    forward, params = dpfunc.functionalize(Statistics(update))
    return (lambda p, x: forward(p, x)), {name: torch.ones_like(value) for name, value in params.items()}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@every_engine
def test_statistics_in_buffers_of_a_function(update, engine):
    assert refused(lambda: statistics_of(update), engine)


REFUSED = {
    "cudnn_batch_norm": lambda x, mean, var: ops.cudnn_batch_norm(x, torch.ones(1), None, mean, var, True, 1.0, 1e-5),
    "miopen_batch_norm": lambda x, mean, var: ops.miopen_batch_norm(x, torch.ones(1), None, mean, var, True, 1.0, 1e-5),
    "batch_norm_gather_stats": lambda x, mean, var: ops.batch_norm_gather_stats(
        x, x[:1, 0, :1], x[:1, 0, :1], mean, var, 1.0, 1e-5, 3),
    "batch_norm_gather_stats_with_counts": lambda x, mean, var: ops.batch_norm_gather_stats_with_counts(
        x, x[:1, 0, :1], x[:1, 0, :1], mean, var, 1.0, 1e-5, torch.ones(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_statistics_of_accelerators_are_refused_before_the_operation_runs(engine, name):
    loss_fn, params = statistics_of(REFUSED[name])
    prepared = make_clipped_grad(loss_fn, clipping.Flat(1.0), engine=getattr(engines, engine)())
    with pytest.raises(UnsupportedModel, match=f"writes values of the batch .{name}"):
        prepared(params, batch(8, 0), key=insecure_key(1))


def counter_over_groups_of_rows():
    """The number of calls follows from what rows say, so that a counter of calls would tell it."""
    value, change = PLACES["list"]()

    def loss_fn(p, x):
        losses = linear(p, x, value() % 2 >= 1) * (2.0 if bool((x > 20).any()) else 1.0)
        change()
        return losses

    return loss_fn


def batch_norm_in_a_closure():
    norm = nn.BatchNorm1d(1, momentum=1.0)

    def loss_fn(p, x):
        flipped = norm.running_mean.clone() > 2.0
        norm(x[:, None, :])
        return linear(p, x, flipped)

    return loss_fn


def spectral_norm_in_a_closure():
    """Its power iteration gives another weight at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D, bias=False))
    return lambda p, x: linear(p, torch.tanh(layer(x)).detach() + x)


def shape_of_selected_numbers():
    kept = {}

    def loss_fn(p, x):
        losses = linear(p, x, "large" in kept)
        if x[x > 20].shape[0]:
            kept["large"] = True
        return losses

    return loss_fn


def toggle():
    """Each other call is flipped, and after an even number of calls all is as it was."""
    kept = {"flipped": False}

    def loss_fn(p, x):
        losses = linear(p, x, kept["flipped"])
        kept["flipped"] = not kept["flipped"]
        return losses

    return loss_fn


def handed_on():
    """A large row sets what the next one takes: at the end all is as it was."""
    kept = {}

    def loss_fn(p, x):
        flipped = kept.pop("large", False)
        if bool((x > 20).any()):
            kept["large"] = True
        return linear(p, x, flipped)

    return loss_fn


def seed_of_torch():
    """torch's own generator is the counter."""

    def loss_fn(p, x):
        torch.manual_seed(torch.initial_seed() % 1000 + 1)
        return linear(p, x, torch.initial_seed() % 2 == 1)

    return loss_fn


# Loss -> where a step must be refused: a single pass of a step, for which nothing is kept yet, may release.
KEEPING = {
    batch_norm_in_a_closure: lambda engine, size: (engine, size) != ("auto", None),
    spectral_norm_in_a_closure: lambda engine, size: (engine, size) != ("auto", None),
    shape_of_selected_numbers: lambda engine, size: (engine, size) != ("auto", None),
    toggle: lambda engine, size: size == 2,  # an even number of microbatches
    handed_on: lambda engine, size: True,
    counter_over_groups_of_rows: lambda engine, size: size is None,
    seed_of_torch: lambda engine, size: False,
}


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_losses_that_keep_what_follows_from_rows(make, engine, size):
    assert refused(make, engine, size=size) or not KEEPING[make](engine.replace("ghost", "auto"), size)


def chosen_by_torch(p, x):
    return torch.cond((x > 20).any(), lambda y: -y, lambda y: y * 1.0, (linear(p, x),))


@torch.jit.script
def _scripted(w: torch.Tensor, x: torch.Tensor):
    losses = (w * x).sum(1)
    return -losses if bool((x > 20).any()) else losses


def scripted(p, x):
    return _scripted(p["w"], x)


class Scripted(nn.Module):
    """Keeps a latch where only TorchScript sees it."""

    def __init__(self):
        super().__init__()
        self.seen: bool = False

    def forward(self, x):
        before = self.seen
        if bool((x > 20).any()):
            self.seen = True
        return -x if before else x


def latch_of_torchscript():
    layer = torch.jit.script(Scripted())
    return lambda p, x: linear(p, layer(x))


def latch_that_is_compiled(fullgraph):
    torch._dynamo.reset()
    seen = []

    @functools.partial(torch.compile, backend="eager", fullgraph=fullgraph)
    def compiled(w, x):
        losses = linear({"w": w}, x, len(seen) > 0)
        if (x > 20).any():
            seen.append(True)
        return losses

    return lambda p, x: compiled(p["w"], x)


TORCHS = {
    "cond": lambda: chosen_by_torch, "scripted function": lambda: scripted, "scripted module": latch_of_torchscript,
    "compiled": lambda: latch_that_is_compiled(False), "compiled as a whole": lambda: latch_that_is_compiled(True),
}  # fmt: skip


@pytest.mark.parametrize("make", TORCHS.values(), ids=TORCHS)
@every_engine
def test_code_that_torch_runs_otherwise_is_computed_or_refused_by_name(make, engine):
    """No error of torch, which says nothing about a way out."""
    refused(make, engine, [rows[:2] for rows in steps()[:3]])  # or right; `cond` is traced for each row


def test_a_scripted_module_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="before torch.jit.script"):
        dpfunc.functionalize(torch.jit.script(nn.Linear(D, 1)))


class Positions(nn.Module):
    """A table that grows when it is too short, as those of rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 1, bias=False)
        self.length = 0
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(self.length) + 1.0
        return self.linear(x * self.table[: x.shape[1]])[:, 0]


def growing_table():
    module = Positions()
    return lambda p, x: torch.func.functional_call(module, {"linear.weight": p["w"][None]}, (x,))


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_what_is_built_for_a_shape_is_no_state(engine, size):
    calm = steps(large=None)
    for sums, rows in zip(released(growing_table, engine, calm, size), calm, strict=True):
        torch.testing.assert_close(
            sums, sum(_clipped(growing_table(), row) for row in rows.split(1)), rtol=1e-3, atol=1e-3
        )


def _clipped(loss_fn, row):
    leaf = torch.ones(D, requires_grad=True)
    (grad,) = torch.autograd.grad(loss_fn({"w": leaf}, row).sum(), leaf)
    return grad * (1.0 / grad.norm()).clamp(max=1.0)


def test_calls_may_be_counted_where_no_loss_depends_on_it():
    calls = []

    def loss_fn(p, x):
        calls.append(len(x))
        return linear(p, x)

    assert all(sums is not None for sums in released(lambda: loss_fn, "auto", steps()))
    assert set(calls) == {1}, "each over a batch of one"
    assert len(calls) <= 12, "one pass a step, and the audits"


def cached(kept):
    return lambda p, x: (
        linear(p, x) * kept.setdefault(x.shape[1:], torch.ones(())) * (2.0 if bool((x > 1e9).any()) else 1.0)
    )


@functools.lru_cache
def mask_of(length):
    return torch.ones(length)


@functools.singledispatch
def doubled(x):
    return 2 * x


class Scratch(nn.Module):
    """Keeps its last activations, as many models do, and its length; no loss reads them."""

    def __init__(self):
        super().__init__()
        self.last, self.layer = None, nn.Linear(D, D)

    def forward(self, x):
        self.last = x
        return x


class Lazy:
    @functools.cached_property
    def mask(self):
        return torch.ones(D)


def read(x):
    """1, after numbers of the rows were read."""
    return 2.0 if bool((x > 1e9).any()) else 1.0


def by_globals(p, x):
    """To be called among the names of a module that Python itself imported: pytest's loader reaches all tests."""
    return globals()["linear"](p, x) * read(x)


GENERATOR = torch.Generator().manual_seed(1)
HONEST = {
    "cache by shape": lambda: cached({}),
    "lru_cache of masks": lambda: lambda p, x: linear(p, x * mask_of(x.shape[1])) * read(x),
    "singledispatch": lambda: lambda p, x: linear(p, doubled(x)) * read(x),
    "cached property": lambda: (lambda lazy: lambda p, x: linear(p, x * lazy.mask) * read(x))(Lazy()),
    "last activations kept": lambda: (lambda net: lambda p, x: linear(p, net(x)) * read(x))(Scratch()),
    "table by length": lambda: (lambda f: lambda p, x: f(p, x) * read(x))(growing_table()),
    "isinstance of an abstract class": lambda: lambda p, x: linear(p, x) * (read(x) if isinstance(x, Iterable) else 2.0),
    "large list": lambda: (lambda huge: lambda p, x: linear(p, x) * read(x) * huge[1])(list(range(300_000))),
    "large tensor": lambda: (lambda t: lambda p, x: linear(p, x) * read(x) * t[0, 1])(torch.ones(3000, 100)),
    "large array": lambda: (lambda t: lambda p, x: linear(p, x) * read(x) * float(t[0, 1]))(np.ones((3000, 100))),
    "frozen model": lambda: (lambda net: lambda p, x: linear(p, x) * read(x) + 0 * net(x).sum(1))(nn.Linear(D, 600).eval()),
    "lstm": lambda: (lambda net: lambda p, x: linear(p, x) * read(x) + 0 * net(x[None])[0][0].sum(1))(nn.LSTM(D, 3)),
    "transformer layer": lambda: (lambda net: lambda p, x: linear(p, x) * read(x) + 0 * net(x[None])[0].sum(1))(nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0).eval()),
    "batch norm in eval": lambda: (lambda net: lambda p, x: linear(p, net(x)) * read(x))(nn.BatchNorm1d(D).eval()),
    "logger": lambda: lambda p, x: (logging.getLogger("honest").debug("%s", x.shape), linear(p, x) * read(x))[1],
    "autocast": lambda: (lambda layer: lambda p, x: linear(p, x) * read(x) + 0 * layer(x))(torch.autocast("cpu", enabled=False)(lambda x: x.sum(1))),
    "generator that nobody draws from": lambda: lambda p, x: linear(p, x) * read(x) * (1 + 0 * GENERATOR.initial_seed()),
    "environment": lambda: lambda p, x: linear(p, x) * read(x) * (1.0 if os.environ.get("NOT_SET") is None else 2.0),
    "globals": lambda: types.FunctionType(by_globals.__code__, {**vars(keepers), "linear": linear, "read": read}),
    "checkpoint": lambda: lambda p, x: torch.utils.checkpoint.checkpoint(linear, p, x, use_reentrant=False) * read(x),
    "warnings": lambda: lambda p, x: (warnings.catch_warnings(), linear(p, x) * read(x))[1],
    "random numbers of torch": lambda: lambda p, x: linear(p, x) * read(x) + 0 * torch.rand(()),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_honest_losses_are_computed(engine, name):
    with torch.random.fork_rng(devices=[]):
        calm = steps(large=None)
        found = released(HONEST[name], engine, calm)
    assert all(sums is not None for sums in found)
    assert all(float(sums.norm()) > 0.5 * len(rows) for sums, rows in zip(found, calm, strict=True))


@pytest.mark.parametrize("layer", [nn.Linear(D, 3), nn.LSTM(D, 3)], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("first", [True, False], ids=["before the model", "after it"])
@pytest.mark.parametrize("keeps", [True, False], ids=["keeps", "keeps nothing"])
def test_a_number_that_is_read_beside_a_model_is_no_state(keeps, first, layer):
    """Parameters of the pass are in the model only while it runs."""
    forward, params = dpfunc.functionalize(layer)
    kept = []

    def loss_fn(params, x):
        read = bool((x > 0).all()) if first else None
        out = forward(params, x[None] if isinstance(layer, nn.LSTM) else x)
        out = (out[0] if isinstance(out, tuple) else out).square().reshape(len(x), -1).sum(1)
        kept.extend([bool((x > 0).all())] if keeps else [])
        return out * 2 if read or bool((out > 1e9).all()) else out

    run = engines.auto()
    if keeps:
        with pytest.raises(UnsupportedModel, match="keeps"):
            run(loss_fn, params, batch(3, 0))
    else:
        run(loss_fn, params, batch(3, 0))
        assert run.decision(loss_fn).engine == "one pass"


def test_libraries_may_stand_in_any_folder_of_packages(tmp_path, monkeypatch):
    """Also in that of a user or of another environment: what torch fills for itself is no state of a loss."""
    for folder, keeps in {"site-packages": False, "project": True}.items():
        place = tmp_path / folder
        place.mkdir()
        (place / f"counting_{keeps}.py").write_text("calls = []\ndef count(x):\n    calls.append(1)\n    return x\n")
        monkeypatch.syspath_prepend(place)
        library = importlib.import_module(f"counting_{keeps}")

        def loss_fn(p, x, count=library.count):
            return linear(p, count(x))

        found = released(lambda loss_fn=loss_fn: loss_fn, "loop", steps())
        assert (None in found) == keeps


def test_a_tool_may_exchange_the_code_of_a_library(monkeypatch):
    """Tools that measure which lines run exchange the code of functions at any time: that says nothing of a loss."""
    library = functools.partial(F.relu, inplace=False)
    before = python_state(library)
    monkeypatch.setattr(F.relu, "__code__", F.relu.__code__.replace(co_firstlineno=1))
    assert python_state(library) == before

    def own(params, batch):
        return params["w"].sum()

    before, own.__code__ = python_state(own), own.__code__.replace(co_consts=(None, 1, 2))
    assert python_state(own) != before


class Cycle:
    """Unreachable, it stays until the collector runs."""

    def __init__(self):
        self.itself = self


def keys(value):
    """A weak container whose only entry is garbage."""
    kept = value()
    kept[Cycle()] = 1
    return kept


def entered(kept):
    with kept:
        pass


def exchanged(function):
    """As tools do that count lines: another code, with objects of their own among its constants."""
    code = function.__code__
    function.__code__ = code.replace(co_consts=(*code.co_consts, Cycle()), co_linetable=b"")


def of_a_thread(work):
    thread = threading.Thread(target=work.put, args=(1,))
    return (work, thread), lambda kept: (thread.start(), thread.join())


def pool():
    return concurrent.futures.ThreadPoolExecutor(1), lambda kept: kept.submit(int).result()


def written():
    return tempfile.TemporaryFile("w"), lambda kept: (print("message", file=kept, flush=True), kept.close())


def bar():
    return tqdm.tqdm(total=5, file=io.StringIO()), lambda kept: kept.update()


def with_globals():
    inside = types.FunctionType((lambda: globals()).__code__, {"warnings": warnings, "__builtins__": builtins})

    def warn(kept):
        with warnings.catch_warnings(action="ignore"):
            exec("warnings.warn('once')", kept.__globals__)
        kept.__globals__["__warningregistry__"]["once"] = True

    return inside, warn


def imported_later():
    sys.modules.pop("colorsys", None)
    return (lambda x: x.colorsys()), lambda kept: importlib.import_module("colorsys")


FLAG = enum.Flag("FLAG", "A B C")
# What a loss reaches, and what changes it at any time, and is no state of a loss.
OTHERS = {
    "weak set": lambda: (keys(weakref.WeakKeyDictionary), lambda kept: gc.collect()),
    "weak reference": lambda: (weakref.ref(Cycle()), lambda kept: gc.collect()),
    "weak proxy": lambda: (weakref.proxy(Cycle()), lambda kept: gc.collect()),
    "queue of a thread": lambda: of_a_thread(queue.Queue()),
    "event": lambda: (threading.Event(), threading.Event.set),
    "pool of threads": pool,
    "queue of processes": lambda: (multiprocessing.Queue(), lambda kept: kept.put(1)),
    "future": lambda: (concurrent.futures.Future(), lambda kept: kept.set_result(1)),
    "file": written,
    "progress bar": bar,
    "profile": lambda: (torch.profiler.record_function("forward"), entered),
    "no_grad": lambda: (torch.no_grad(), entered),
    "inference_mode": lambda: (torch.inference_mode(), entered),
    "catch_warnings": lambda: (warnings.catch_warnings(), entered),
    "path": lambda: (Path("a") / "b", lambda kept: (str(kept), hash(kept))),
    "warnings that were said": with_globals,
    "module that is imported": imported_later,
    "lru_cache of a library": lambda: (fnmatch._compile_pattern, lambda kept: kept("no such text*")),
    "code of a function": lambda: (lambda x: x + 1, exchanged),
    "annotation": lambda: (Iterable[int], lambda kept: isinstance(type("New", (), {})(), Iterable)),
    "flags": lambda: (FLAG, lambda kept: kept(7) | kept.A),
    "rows of a loader": lambda: (iter(torch.utils.data.DataLoader(torch.arange(4))), lambda kept: None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_change_is_no_state_of_a_loss(name):
    """The collector of garbage, other threads, tools and libraries: a refusal would end a job in the middle."""
    gc.disable()
    try:
        kept, change = OTHERS[name]()
        loss_fn = kept if isinstance(kept, types.FunctionType) else (lambda p, x: kept)
        before = python_state(loss_fn)
        change(kept)
        assert python_state(loss_fn) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_loss_beside_a_collector_and_a_thread(engine):
    """Between the calls of a loss garbage is collected, and a thread uses what the loss reaches."""
    work, known = queue.Queue(), weakref.WeakSet()

    def make():
        def loss_fn(p, x):
            known.add(Cycle())
            thread = threading.Thread(target=work.put, args=(None,))
            thread.start(), thread.join()
            if bool((x > 1e9).any()):
                work.get()
            if len(known) > 2:
                gc.collect()
            return linear(p, x)

        return loss_fn

    assert all(sums is not None for sums in released(make, engine, steps()[:2], size=4))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.BatchNorm1d(2)]), 0


def places_of_a_user():
    """Loss, change, and where the message says it is."""
    net, cache, names, number = Counting(), {"private": 1}, ["private"], 0
    helper = lambda: cache

    def count():
        nonlocal number
        number += 1

    def grow():
        net.mask = torch.ones(1)

    reached = lambda p, x: (net, helper, names, number, COUNT, settings_of(p))
    return {
        "closure 'net'.calls (int)": (reached, lambda: setattr(net, "calls", 1)),
        "closure 'net'.layers.0.running_mean (Tensor)": (reached, lambda: net.layers[0].running_mean.add_(1)),
        "closure 'net' (Counting)": (reached, grow),
        "closure 'helper', closure 'cache' (dict)": (reached, lambda: cache.update(more=1)),
        "closure 'names' (list)": (reached, lambda: names.append("more")),
        "closure 'number' (int)": (reached, count),
        "global 'COUNT' (int)": (reached, a_global()[1]),
        "global 'settings_of'.n (int)": (reached, lambda: setattr(settings_of, "n", 1)),
        "loss.layers.0.training (bool)": (net, net.layers[0].eval),
        "loss.calls (int)": (types.MethodType(lambda self, p, x: 0, net), lambda: setattr(net, "calls", 1)),
        "torch.initial_seed() (int)": (reached, lambda: torch.manual_seed(torch.initial_seed() + 1)),
    }


def settings_of(p):
    return p


settings_of.n = 0


@pytest.mark.parametrize("where", places_of_a_user())
def test_the_message_says_where_a_change_is(where):
    """By names, which are public; no values and no keys."""
    loss_fn, change = places_of_a_user()[where]
    settings_of.n = 0
    before = python_state(loss_fn)
    with torch.random.fork_rng(devices=[]):
        change()
        with pytest.raises(UnsupportedModel, match=re.escape(f"changed: {where}.")) as error:
            refuse_counting(loss_fn, before)
    assert "private" not in str(error.value)
