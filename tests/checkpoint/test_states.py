"""States of optimizers and of noise come back as they were, and no file runs code."""

from __future__ import annotations

import collections
import enum
import io
import os
import pathlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from noise_cases import remembering
from run_cases import DATA, PLAN, Run, rewrite, start, steps, store

from dpfunc import Journal, load
from dpfunc.checkpoint._states import _Unpickler
from dpfunc.errors import CheckpointError, InvalidArgument, StateReused
from dpfunc.step import DPStep


def read_back(place, values):
    return load(place, plan=PLAN, params=values, data=DATA, without_journal="new_key").optimizer_state


def same(found, expected):
    pairs = zip(found["previous"].items(), expected["previous"].items(), strict=True)
    return found["steps"] == expected["steps"] and all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def test_noise_with_a_state_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    """The noise of each step depends on that of the one before, also of the one before the checkpoint."""
    monkeypatch.setattr(DPStep, "_mechanism", property(lambda self: remembering(self.plan.noise_multiplier)))
    run = Run(tmp_path)
    assert run.state.noise_state["steps"] == 0
    path = run.step(3).save()
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.iterdir())
    assert "noise_state=hidden" in repr(run.state)
    before, state, saved = run.state.noise_state, run.step(5).state, run.resume().state
    assert same(saved.noise_state, before)
    forgotten = saved._replace(noise_state=start()[0].noise_state)
    with pytest.raises(StateReused, match="with other values"):
        steps(forgotten, run.copies(), run.optimizer, 1, Journal(run.path, PLAN))
    again = run.step(5, state=saved).state
    assert (again.ledger, again.step) == (state.ledger, 8)
    assert same(again.noise_state, state.noise_state)
    with pytest.raises(CheckpointError, match="its noise may be correlated over steps"):
        run.load(journal=None, without_journal="new_key")
    with pytest.raises(InvalidArgument, match="Expected noise_state to have tensors.*type builtin_function"):
        run.save(state=state._replace(noise_state=[len]))


def test_states_of_all_kinds_come_back_as_they_were(tmp_path):
    kinds = [
        collections.Counter({3: 2}), collections.OrderedDict(b=1, a=2), (1, (2.5, None)), {1, 2}, torch.Size([2, 3]), 1 - 2j,
        b"\xff", torch.bfloat16, torch.device("cpu"), float("inf"), -0.0, True, {(0, "x"): [{}]},
    ]  # fmt: skip
    tensors = (torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16))
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer, optimizer_state={"kinds": kinds, 3: tensors})
    found = read_back(tmp_path, values)
    assert list(found) == ["kinds", 3]
    assert repr(found["kinds"]) == repr(kinds)
    assert [type(value) for value in found["kinds"]] == [type(value) for value in kinds]
    assert type(found[3]) is tuple
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found[3], tensors, strict=True))


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    LOW = 1


UNREADABLE = {
    "rate of numpy": ({"param_groups": [{"lr": np.float64(0.1)}]}, r"\['param_groups'\]\[0\]\['lr'\] of type numpy.float64. Convert it: float\(x\)"),
    "number of numpy": ({"step": np.int64(3)}, r"optimizer_state\['step'\] of type numpy.int64. Convert it: float\(x\) or int\(x\)"),
    "array of numpy": ({"m": np.ones(2)}, r"numpy.ndarray. .*torch.from_numpy"),
    "deque": ({"losses": collections.deque([1.0])}, r"optimizer_state\['losses'\] of type collections.deque. Convert it with list"),
    "enum": ({"mode": Mode.FAST}, r"optimizer_state\['mode'\] of type .*test_states.Mode. Store its .value"),
    "number that is an enum": ({"level": Level.LOW}, r"test_states.Level. Store its .value"),
    "path": ({"where": Path("x")}, r"optimizer_state\['where'\] of type pathlib"),
    "function": ({"rate": lambda step: 0.1}, r"optimizer_state\['rate'\] of type function. Store what it consists of"),
    "key of numpy": ({np.int64(3): 1}, r"a key of optimizer_state of type numpy.int64"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_state_that_cannot_be_read_is_refused_when_it_is_saved(tmp_path, content, message):
    state, values, optimizer = start()
    with pytest.raises(InvalidArgument, match=message):
        store(tmp_path, state, values, optimizer, optimizer_state={"good": torch.ones(2), **content})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor", "LBFGS", "RMSprop", "NAdam"])
def test_states_of_the_optimizers_of_torch(tmp_path, kind):
    state, values, _ = start()
    values = {name: p for name, p in values.items() if p.ndim}
    optimizer = getattr(torch.optim, kind)(values.values(), lr=0.1)
    for p in values.values():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: torch.zeros(()))
    store(tmp_path, state, values, optimizer)
    assert str(read_back(tmp_path, values)) == str(optimizer.state_dict())


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("evil", [Evil(), {"x": Path("y").exists}])
def test_pickles_are_not_executed(tmp_path, evil):
    state, values, optimizer = start()
    rewrite(store(tmp_path, state, values, optimizer), ".metadata", pickle.dumps(evil))
    with pytest.raises(CheckpointError, match="Expected a description of tensors"):
        read_back(tmp_path, values)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_have_another_module_in_python_3_13(module):
    read = _Unpickler(io.BytesIO())
    assert read.find_class(module, "PosixPath") is pathlib.PosixPath
    for name in ("Path", "os", "UnsupportedOperation"):
        with pytest.raises(CheckpointError, match="Expected a description of tensors"):
            read.find_class(module, name)
