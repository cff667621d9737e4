"""A key is of one process, and says whether others can know it."""

import copy
import dataclasses
import json
import os
import pickle
import pprint
import sys
import warnings

import pytest
import torch
from cases import linear_loss, params
from new_python import python
from run_cases import DATA, PLAN

import dpfunc
from dpfunc import load, make_dp_step, secure_key, take
from dpfunc.checkpoint._resume_policy import History
from dpfunc.errors import InsecureKeyWarning, InvalidArgument
from dpfunc.rng import Key, fold_in, insecure_key, process_mark


def test_a_run_with_a_key_that_everybody_knows_says_so():
    dp_step = make_dp_step(linear_loss, PLAN)
    with pytest.warns(InsecureKeyWarning, match="known to everybody.*dpfunc.secure_key"):
        dp_step.init(params(), insecure_key(0))
    with pytest.warns(InsecureKeyWarning):
        dp_step.init(params(), fold_in(insecure_key(0), "a purpose"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This process has taken steps")  # in other tests
        dp_step.init(params(), secure_key())


def test_a_known_key_is_marked(tmp_path):
    """In what is printed, and after a resume."""
    for key, said in ((insecure_key(0), "Key(hidden, guessable)"), (secure_key(), "Key(hidden)")):
        place = tmp_path / str(key.guessable)
        assert repr(key) == repr(fold_in(key, "a", 1)) == said
        state = make_dp_step(linear_loss, PLAN).init(params(), key)
        assert f"key={said}" in repr(state)
        path = place / "journal.jsonl"
        run = {"plan": PLAN, "params": params(), "data": DATA, "journal": path}
        dpfunc.save(place / "c", state=state, **run)
        found = load(place / "c", **run)
        assert found.state._replace(journal="") == state
        assert repr(found.state.key) == said
    assert insecure_key(0) == Key(insecure_key(0).secret)  # the same noise, whoever knows it


OTHER_PROCESS = """
import sys
sys.path[:0] = {paths!r}
from test_rng import *
from dpfunc.errors import StateReused

dp_step = make_dp_step(linear_loss, PLAN, engine="loop")
key = secure_key()
state = dp_step.init(params(), key)
first, second = list(PLAN.batches(state))[:2]

def attempt(state):
    try:
        dp_step(params(), take(DATA, next(iter(PLAN.batches(state)))), state)
    except StateReused as error:
        assert "made in another process, from which this one was forked" in str(error), error
        return "refused"
    return "released"

print("state of a pickle", attempt(pickle.load(open({pickled!r}, "rb"))))
_, state, _ = dp_step(params(), take(DATA, first), state)
sys.stdout.flush()
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


def test_no_process_draws_the_noise_of_another(tmp_path):
    """A fork may draw the batches, as the workers of a data loader do; to train it makes a key of its own. What is pickled
    and read in the same process is the same; another process makes its own key, or loads a checkpoint."""
    dp_step = make_dp_step(linear_loss, PLAN)
    state = dp_step.init(params(), secure_key())
    (tmp_path / "state").write_bytes(pickle.dumps(state))
    assert python(OTHER_PROCESS.format(paths=sys.path, pickled=str(tmp_path / "state"))).splitlines() == [
        "state of a pickle refused", "inherited state refused", "inherited key refused", "derived key refused",
        "own key released", "same draw True", "parent released",
    ]  # fmt: skip
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


def test_no_way_of_printing_shows_the_key(tmp_path):
    """Also not what prints an object field by field, and not messages about objects that cannot be written."""
    dp_step = make_dp_step(linear_loss, PLAN)
    state = dp_step.init(params(), secure_key())
    path = dpfunc.save(tmp_path, params=params(), state=state, plan=PLAN, data=DATA)
    saved = load(tmp_path, plan=PLAN, params=params(), data=DATA, journal=None, without_journal="new_key")
    shown = []
    for key, thing in ((state.key, state.key), (state.key, state), (saved.state.key, saved), (state.key, PLAN)):
        fields = [vars(thing)] if hasattr(thing, "__dict__") else [thing._asdict()]
        if dataclasses.is_dataclass(thing):
            fields += [dataclasses.asdict(thing), dataclasses.astuple(thing), dataclasses.replace(thing)]
        for each in (thing, *fields):
            shown += [(key, text) for text in (repr(each), str(each), f"{each}", f"{each!r:>9}", pprint.pformat(each))]
            try:
                json.dumps(each)
            except (TypeError, ValueError) as error:
                shown.append((key, str(error)))
    history = History({"key": state.key.secret.hex()}, [], None)
    shown += [(state.key, repr(history)), (state.key, f"{state.key.secret} {state.key.secret!s:>9}")]
    with pytest.raises((pickle.PicklingError, AttributeError)) as unpicklable:
        pickle.dumps((state, lambda: None))
    torch.save({"state": state}, tmp_path / "all.pt")
    with pytest.raises(pickle.UnpicklingError) as unsafe:
        torch.load(tmp_path / "all.pt", weights_only=True)
    shown += [(state.key, str(error.value)) for error in (unpicklable, unsafe)]
    for key, text in shown:
        secret = bytes(key.secret)
        for hidden in (secret.hex(), repr(secret)[2:-1], str(int.from_bytes(secret)), str(list(secret))[1:-1]):
            assert hidden not in text
    assert len(shown) > 40
    assert state.key.secret.hex() in (path / "state.json").read_text()


def test_a_hidden_key_is_the_key():
    key = secure_key()
    again = pickle.loads(pickle.dumps(key))
    assert again == key == copy.deepcopy(key) == Key(bytes(key.secret))
    assert hash(again) == hash(key)
    assert (bytes(again.secret), again.secret[:4]) == (bytes(key.secret), bytes(key.secret)[:4])
    with pytest.raises(InvalidArgument, match="Expected a key of 32 bytes, got 31"):
        Key(bytes(31))
