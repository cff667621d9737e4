"""Places where a loss may keep something from call to call: each gives `value()` and `change()`."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import deque
from contextvars import ContextVar

import numpy as np
import torch
from torch import nn

COUNT = 0
SETTINGS = types.ModuleType("settings_of_a_user")


class _Slots:
    __slots__ = ("n",)


def _attribute(place, name="n"):
    """An attribute of any object."""
    setattr(place, name, 0)
    return lambda: getattr(place, name), lambda: setattr(place, name, getattr(place, name) + 1)


def _entry(place):
    """The first number of a container."""

    def change():
        place[0] = place[0] + 1

    return lambda: float(place[0]), change


def _dictionary():
    seen = {}
    return lambda: len(seen), lambda: seen.update({len(seen): True})


def _from_minus_one():
    """The hashes of -1 and -2 are equal."""
    number = [-1]

    def change():
        number[0] -= 1

    return lambda: -1 - number[0], change


def _global():
    def change():
        global COUNT
        COUNT += 1

    before = COUNT
    return lambda: COUNT - before, change


def _global_of_a_method():
    class User:
        def change(self):
            _TABLE[0] += 1

        def value(self):
            return _TABLE[0]

    _TABLE[0] = 0
    user = User()
    return lambda: user.value(), lambda: user.change()


_TABLE = [0]


def _class():
    return _attribute(type("User", (), {"__module__": __name__}))


def _class_of_an_instance():
    user = type("User", (), {"n": 0, "__module__": __name__})()

    def change():
        type(user).n += 1

    return lambda: user.n, change


def _module_of_python():
    SETTINGS.n = 0

    def change():
        SETTINGS.n += 1

    return lambda: SETTINGS.n, change


def _default():
    def value(kept=[0]):  # noqa: B006  (what this is about)
        return kept[0]

    return value, lambda: value.__defaults__[0].append(value.__defaults__[0].pop() + 1)


def _attribute_of_a_function():
    def value():
        return value.n

    value.n = 0

    def change():
        value.n += 1

    return value, change


def _attribute_of_a_module():
    net = nn.Sequential(nn.Linear(1, 1))
    return _attribute(net[0])


def _buffer(new):
    net = nn.Sequential(nn.BatchNorm1d(1))

    def change():
        if new:
            net[0].num_batches_tracked = net[0].num_batches_tracked + 1
        else:
            net[0].num_batches_tracked += 1

    return lambda: net[0].num_batches_tracked.item(), change


def _large_tensor():
    kept = torch.zeros(1000)
    return lambda: kept[0].item(), lambda: kept.add_(1)


def _seed():
    kept = torch.Generator().manual_seed(0)
    return kept.initial_seed, lambda: kept.manual_seed(kept.initial_seed() + 1)


def _draws():
    kept, other = torch.Generator().manual_seed(0), torch.Generator()

    def value():
        other.set_state(kept.get_state())
        return float(torch.rand((), generator=other) > 0.6)

    return value, lambda: torch.rand((), generator=kept)


def _numpy_generator():
    kept = np.random.default_rng(0)
    return lambda: 1 - kept.bit_generator.state["state"]["state"] % 2, kept.random


def _python_generator():
    kept = random.Random(0)
    before = kept.getstate()
    return lambda: float(kept.getstate() != before), kept.random


def _count():
    kept = itertools.count()
    return lambda: int(repr(kept)[6:-1]), lambda: next(kept)


def _iterator():
    kept = iter(range(1000))
    return lambda: 1000 - kept.__length_hint__(), lambda: next(kept)


def _generator_function():
    kept = (number for number in range(1000))
    return lambda: kept.gi_frame.f_locals.get("number", -1) + 1, lambda: next(kept)


def _next_of_an_iterator():
    kept = itertools.count()
    following = kept.__next__
    return lambda: int(repr(kept)[6:-1]), following


def _deque():
    kept = deque([0])
    return _entry(kept)


def _context():
    kept = ContextVar("kept", default=0)
    return kept.get, lambda: kept.set(kept.get() + 1)


def _lru_cache():
    @functools.lru_cache(None)
    def kept(number):
        return number

    return lambda: kept.cache_info().currsize, lambda: kept(kept.cache_info().currsize)


def _nonlocal():
    number = 0

    def change():
        nonlocal number
        number += 1

    return lambda: number, change


PLACES = {
    "dict": _dictionary,
    "list": lambda: _entry([0]),
    "list, from -1 to -2": _from_minus_one,
    "number under a name of Transformers": lambda: _attribute(types.SimpleNamespace(), "rope_deltas"),
    "deque": _deque,
    "bytearray": lambda: _entry(bytearray(1)),
    "numpy array": lambda: _entry(np.zeros(3)),
    "large tensor": _large_tensor,
    "closure": _nonlocal,
    "global": _global,
    "global of a method": _global_of_a_method,
    "module of Python": _module_of_python,
    "class": _class,
    "class of an instance": _class_of_an_instance,
    "slot": lambda: _attribute(_Slots()),
    "subclass of list": lambda: _attribute(type("Kept", (list,), {})()),
    "default of a function": _default,
    "attribute of a function": _attribute_of_a_function,
    "attribute of a submodule": _attribute_of_a_module,
    "buffer of a submodule": lambda: _buffer(new=False),
    "new buffer of a submodule": lambda: _buffer(new=True),
    "seed of a generator": _seed,
    "draws of a generator": _draws,
    "numpy generator": _numpy_generator,
    "Python generator of numbers": _python_generator,
    "itertools.count": _count,
    "iterator": _iterator,
    "generator function": _generator_function,
    "__next__ of an iterator": _next_of_an_iterator,
    "context variable": _context,
    "lru_cache": _lru_cache,
}
