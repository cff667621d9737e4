"""The type of a call that occurs again is the one that typing it anew gives."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from oracle import FAILS, quiet
from programs import made, run

import dpfunc
from dpfunc.engines.tracing import repeated, trace
from dpfunc.engines.uses import repeated_uses
from dpfunc.errors import UnsupportedModel


@dataclass
class Compared:
    """Calls that were answered from memory and typed anew, and the keys of those whose answers differ."""

    calls: int = 0
    different: list[object] = field(default_factory=list)


@contextmanager
def typed_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    """Inside, each call that would be answered from memory is typed by its rule, and both answers are compared.

    The rule must do nothing else than to note the types of the results.
    """
    compared, asked = Compared(), []
    real_keep = repeated.keep

    def effects(trace, results=()):
        own = {repeated.key_of(tensor) for tensor in results}
        entries = {key: entry for key, (_, entry) in trace.entries.items() if key not in own}
        return entries, list(trace.doubts), list(trace.integers), set(trace.marks), trace.ragged, trace.shuffled

    def recall(trace, key, result):
        for missing, _ in asked:  # its rule looked at numbers, or gave a doubt that is not kept
            compared.different.append(missing)
        asked.clear()
        if key in repeated._answers:
            compared.calls += 1
            results = result if isinstance(result, (tuple, list)) else (result,)
            asked.append((key, (repeated._answers.pop(key), results, effects(trace, results))))
        return None

    def keep(trace, key, inputs, result):
        real_keep(trace, key, inputs, result)
        if asked:
            before, (answers, results, state) = asked.pop()
            same = effects(trace, results)[1:] == state[1:] and effects(trace, results)[0] == state[0]
            if before != key or repeated._answers.get(key) != answers or not same:
                compared.different.append(key)

    with monkeypatch.context() as patch:
        patch.setattr(trace, "recall", recall)
        patch.setattr(trace, "keep", keep)
        repeated._answers.clear()
        repeated_uses._known.clear()  # functions that run as a whole type no calls
        yield compared
    compared.different += [key for key, _ in asked]


@pytest.mark.parametrize("honest", [True, False])
def test_random_programs(monkeypatch, honest):
    with typed_anew(monkeypatch) as compared, quiet():
        for seed in range(150):
            run(*made(90_000 + seed, random.Random(seed).randint(1, 30), honest=honest))
    assert compared.calls > 500
    assert not compared.different


def test_the_cases_of_isolation(monkeypatch):
    from isolation.truth import outcomes
    from isolation.zoo import ZOO

    with typed_anew(monkeypatch) as compared, quiet():
        for loss in list(ZOO.values())[::4]:
            try:
                outcomes(loss, "bookkeeping")
            except FAILS:
                continue
    assert compared.calls > 500
    assert not compared.different


def losses(params, batch, bias):
    return torch.nn.functional.gelu(batch @ params["w"] + bias).sum(1)


@pytest.mark.parametrize("warm", [False, True])
def test_constants_are_looked_at_in_each_step(warm):
    """A constant that is equal for all samples in one step, and not in the next: only its numbers tell."""
    batch, params = torch.randn(4, 3), {"w": torch.randn(3, 4)}
    bias = torch.ones(4, 4)
    engine = dpfunc.engines.bookkeeping()
    if warm:
        for _ in range(2):
            engine(lambda params, batch: losses(params, batch, bias), params, batch)
    bias[1] = 2.0
    with pytest.raises(UnsupportedModel, match="differ between positions"):
        engine(lambda params, batch: losses(params, batch, bias), params, batch)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(repeated, "_KEPT", 20)
    with quiet():
        for seed in range(20):
            run(*made(seed, 20))
            assert len(repeated._answers) <= 20


READING = {"item", "tolist", "all", "any", "equal", "unique", "nonzero", "numpy", "are_own_integers", "keep_integers",
           "mark", "marked"}  # fmt: skip
NOT_PURE = {"along.py: _sorted_among_all", "products.py: _grouped", "shaping.py: _samples_put_back"}
"""Functions of files of `PURE` that read numbers: of operations not in it; `_samples_put_back` reads the ids of rows."""


def test_pure_families_read_no_numbers():
    """A rule that reads numbers must not be answered from memory: take its operations out of `families.PURE`."""
    from dpfunc.engines.tracing import families

    files = {Path(inspect.getfile(inspect.unwrap(families.FAMILIES[name]))) for name in families.PURE}
    found = set()
    for path in files:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                if any(isinstance(func, ast.Attribute) and func.attr in READING for func in called):
                    found.add(f"{path.name}: {function.name}")
    assert found == NOT_PURE
    assert not families.PURE & {"sort", "argsort", "_grouped_mm", "all", "any"}
