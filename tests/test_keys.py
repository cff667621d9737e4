"""A key is of one process, and says whether others can know it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cases import linear_loss, params
from test_checkpoint import DATA, PLAN

import dpfunc
from dpfunc.checkpoint import load
from dpfunc.distributed_checkpoint import load_sharded, save_sharded
from dpfunc.errors import InsecureKeyWarning, StateReused
from dpfunc.rng import Key, fold_in, insecure_key, process_mark, secure_key
from dpfunc.step import make_dp_step
from dpfunc.tree import take


def test_a_run_with_a_key_that_everybody_knows_says_so():
    dp_step = make_dp_step(linear_loss, PLAN)
    with pytest.warns(InsecureKeyWarning, match="known to everybody.*dpfunc.secure_key"):
        dp_step.init(params(), insecure_key(0))
    with pytest.warns(InsecureKeyWarning):
        dp_step.init(params(), fold_in(insecure_key(0), "a purpose"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp_step.init(params(), secure_key())


@pytest.mark.filterwarnings("ignore::dpfunc.errors.InsecureKeyWarning")
def test_a_key_that_everybody_knows_is_told_apart(tmp_path):
    """In what is printed, and after a resume."""
    for key, said in ((insecure_key(0), "Key(hidden, guessable)"), (secure_key(), "Key(hidden)")):
        place = tmp_path / str(key.guessable)
        assert repr(key) == repr(fold_in(key, "a", 1)) == said
        state = make_dp_step(linear_loss, PLAN).init(params(), key)
        assert f"key={said}" in repr(state)
        path = place / "journal.jsonl"
        run = {"plan": PLAN, "params": params(), "data": DATA, "journal": path}
        dpfunc.save(place / "c", state=state, **run)
        save_sharded(place / "s", state=state, ranks=None, **run)
        for found in (load(place / "c", **run), load_sharded(place / "s", ranks=None, **run)):
            assert found.state == state
            assert repr(found.state.key) == said
    assert insecure_key(0) == Key(insecure_key(0).secret)  # the same noise, whoever knows it


FORK = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from cases import linear_loss, params
from test_checkpoint import DATA, PLAN
from dpfunc.errors import StateReused
from dpfunc.rng import fold_in, secure_key
from dpfunc.step import make_dp_step
from dpfunc.tree import take

dp_step = make_dp_step(linear_loss, PLAN, engine="loop")
key = secure_key()
state = dp_step.init(params(), key)
first, second = list(PLAN.batches(state))[:2]
_, state, _ = dp_step(params(), take(DATA, first), state)

def attempt(state):
    try:
        dp_step(params(), take(DATA, next(iter(PLAN.batches(state)))), state)
    except StateReused as error:
        assert "forked" in str(error), error
        return "refused"
    return "released"

child = os.fork()
if child == 0:
    print("inherited state", attempt(state), flush=True)
    print("inherited key", attempt(dp_step.init(params(), key)), flush=True)
    print("derived key", attempt(dp_step.init(params(), fold_in(key, "mine"))), flush=True)
    print("own key", attempt(dp_step.init(params(), secure_key())), flush=True)
    print("same draw", bool(torch.equal(PLAN.draw(state, 1), second)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", attempt(state), flush=True)
"""


def test_a_forked_process_draws_no_noise_of_its_parent():
    """It may draw the batches, as the workers of a data loader do; to train it makes a key of its own."""
    code = FORK.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        "inherited state refused", "inherited key refused", "derived key refused", "own key released",
        "same draw True", "parent released",
    ]  # fmt: skip


def test_a_pickle_carries_no_noise_into_another_process(tmp_path):
    """What is pickled and read here is the same; another process makes its own key, or loads a checkpoint."""
    dp_step = make_dp_step(linear_loss, PLAN)
    state = dp_step.init(params(), secure_key())
    (tmp_path / "state").write_bytes(pickle.dumps(state))
    code = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from cases import linear_loss, params
from test_checkpoint import DATA, PLAN
from dpfunc.errors import StateReused
from dpfunc.step import make_dp_step
from dpfunc.tree import take
state = pickle.load(open({str(tmp_path / "state")!r}, "rb"))
try:
    make_dp_step(linear_loss, PLAN)(params(), take(DATA, next(iter(PLAN.batches(state)))), state)
except StateReused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "made in another process" in done.stdout
    again = pickle.loads((tmp_path / "state").read_bytes())
    assert dp_step(params(), take(DATA, next(iter(PLAN.batches(again)))), again).state.step == 1


def test_each_process_has_a_mark():
    mine = process_mark()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, process_mark().encode())
        os._exit(0)
    os.waitpid(child, 0)
    pairs = list(zip(os.read(reader, 100).decode().split("."), mine.split("."), strict=True))
    assert all(theirs != ours for theirs, ours in pairs)  # the random part too: numbers of processes are used again
    assert process_mark() == mine == secure_key().made_in
    assert fold_in(Key(bytes(32), made_in="elsewhere"), 1).made_in == "elsewhere"
    dp_step = make_dp_step(linear_loss, PLAN)
    state = dp_step.init(params(), Key(os.urandom(32), made_in="elsewhere"))
    batch = take(DATA, next(iter(PLAN.batches(state))))
    with pytest.raises(StateReused, match="made in another process"):
        dp_step(params(), batch, state)
