"""The engine `captured` gives the numbers of `auto`, bit for bit, or computes as `auto` does and says why."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import random
import weakref
from array import array
from contextlib import nullcontext

import pytest
import torch
from models import CASES, build
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from zoo import language

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines import _recording, auto, captured
from dpfunc.engines._draws import OwnDraws
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.engines.capture import Replayed
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.state import allow_repeat

FAMILIES = ["BERT, LoRA", "GPT-2, full", "T5, norms", "LLaVA, full"]
OTHERS = [name for name in ("Llama, LoRA", *(f"{each}, full" for each in language.FAMILIES)) if name not in FAMILIES]


def case_of(name):
    return build(name) if name in CASES else language.build(*name.split(", "), torch.float32)


def others(values, number):
    """Other numbers of the same shapes, and other orders of rows where they are no floating ones."""
    generator = torch.Generator().manual_seed(number)

    def other(value):
        if value.is_floating_point():
            return value * (1 + 0.1 * torch.randn(value.shape, generator=generator))
        return value[torch.randperm(len(value), generator=generator)]

    return torch.utils._pytree.tree_map(other, values)


def results(engine, loss_fn, params, batch, seed=0, scale=1.0):
    """Losses, squared norms and weighted sums, all that a step takes of an engine."""
    with torch_seed(insecure_key(seed)):
        found = engine(loss_fn, params, batch)
        squares = found.sq_norms()
        factors = {
            name: scale * torch.linspace(0.1, 1, len(found.losses_B)).to(values) * (number + 1)
            for number, (name, values) in enumerate(squares.items())
        }
        state = torch.default_generator.get_state()
    return [found.losses_B, *squares.values(), *found.weighted_sum(factors).values(), state]


def same(one, other):
    return all(torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9)) for a, b in zip(one, other, strict=True))


def note(engine, loss_fn):
    return engine.decision(loss_fn).reason


def run(loss_fn, params, batch, steps=5):
    """Steps with other numbers: their results by both engines, and what became of the last."""
    engine, plain, found = captured(), auto(), []
    for step in range(steps):
        given = others(params, step), others(batch, step)
        found.append((results(engine, loss_fn, *given, step), results(plain, loss_fn, *given, step)))
    return found, note(engine, loss_fn)


@pytest.mark.parametrize("name", [*CASES, *FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_all_models_are_the_same_bit_for_bit(name):
    case = case_of(name)
    found, reason = run(case.loss_fn, case.params, case.batch)
    assert all(same(one, other) for one, other in found)
    # LLaVA compares the number of its image tokens
    assert ("Python reads numbers of tensors" if name.startswith("LLaVA") else "operations are replayed") in reason


def linear(params, batch):
    x, y = batch
    return ((x @ params["w"]).tanh() - y).square().mean(1)


PARAMS = {"w": torch.randn(6, 3, generator=torch.Generator().manual_seed(1))}
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)), torch.rand(8, 3)


class Dropouts(nn.Module):
    """Each kind of dropout, and attention with it."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.drop, self.alpha, self.channels = nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout1d(0.4)

    def forward(self, x):
        steps = self.drop(self.first(x)).unflatten(1, (4, 2)).flatten(1)[:, None].repeat(1, 5, 1)
        mixed = self.attention(steps, steps, steps, need_weights=False)[0]
        return self.alpha(self.channels(mixed)).mean(1)


def of_module(module):
    forward, params = dpfunc.functionalize(module)
    return lambda params, batch: forward(params, batch[0]).square().sum(1), params


def written(params, batch):
    x, y = batch
    x.mul_(2)
    return linear(params, (x, y))


class Times(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def checkpointed(params, batch):
    hidden = torch.utils.checkpoint.checkpoint(lambda x: (x @ params["w"]).tanh(), batch[0], use_reentrant=False)
    return (hidden - batch[1]).square().mean(1)


def drawing_twice(params, batch):
    """Both draws drop next to nothing, so that two passes show the same numbers."""
    drop = lambda x: F.dropout((x @ params["w"]).tanh(), 1e-4)
    return (torch.utils.checkpoint.checkpoint(drop, batch[0], use_reentrant=False) - batch[1]).square().mean(1)


REPLAYED = {
    "a product": linear,
    "checkpoints": checkpointed,
    "a use without a rule": lambda p, b: linear(p, b) + b[0].sum(1) * p["w"].sum(),
    "constants": lambda p, b: linear(p, (b[0] * torch.tensor([1.0, 2, 3, 4, 5, 6]), b[1])) * torch.arange(1, 2),
    "a write into what the loss makes": lambda p, b: linear(p, b) + torch.zeros(len(b[0])).add_(b[0].sum(1)),
    "aux": lambda p, b: (linear(p, b), {"outputs": b[0] @ p["w"], "one": [b[1]]}),
    "not finite": lambda p, b: linear(p, b) / (b[0].sum(1) > 0),
    "a gradient by hand": lambda p, b: linear(p, (Times.apply(b[0]), b[1])),
    "another parameter without a use": lambda p, b: linear(p, b),
}
ORDINARY = {
    "a write into the batch": (written, "writes into its batch"),
    "reads": (lambda p, b: linear(p, b) * (2 if b[0].sum() > -1e9 else 1), "Python reads numbers of tensors"),
    "other draws": (lambda p, b: linear(p, b) + torch.randn(1), "draws random numbers"),
    "draws that are drawn again": (drawing_twice, "another pass gave other numbers"),
    "draws that are seeded": (lambda p, b: linear(p, b) + 0 * torch.manual_seed(3).initial_seed(), "changes what it keeps"),
    "groups of rows": (lambda p, b: linear(p, b) * (2 if b[0].sum() > 0 else 1), "rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAYED)
def test_losses_that_are_replayed(name):
    params = {**PARAMS, "unused": torch.ones(2)} if "without" in name else PARAMS
    found, reason = run(REPLAYED[name], params, ROWS)
    assert all(same(one, other) for one, other in found)
    assert "recorded operations are replayed" in reason


@pytest.mark.parametrize("name", ORDINARY)
def test_losses_that_are_not(name, caplog):
    loss_fn, why = ORDINARY[name]
    with caplog.at_level(logging.WARNING, "dpfunc"):
        results_of = run(loss_fn, PARAMS, ROWS)
    assert all(same(one, other) for one, other in results_of[0])
    assert "not recorded, since" in results_of[1]
    assert why in results_of[1]
    assert "engine captured: not recorded" in caplog.text
    assert "engine loop" not in caplog.text  # which no row went through


def test_draws_of_dropout_are_those_of_auto():
    """And of a row by its position: another seed, or other positions, give others."""
    torch.manual_seed(0)
    loss_fn, params = of_module(Dropouts())
    found, reason = run(loss_fn, params, ROWS, steps=6)
    assert all(same(one, other) for one, other in found)
    assert "recorded operations are replayed" in reason
    engine = captured()
    for _ in range(4):
        one = results(engine, loss_fn, params, ROWS, seed=1)
    assert "replayed" in note(engine, loss_fn)
    assert same(one, results(engine, loss_fn, params, ROWS, seed=1))
    assert not same(one, results(engine, loss_fn, params, ROWS, seed=2))
    for positions in (range(8), range(8, 16)):
        with torch_seed(insecure_key(1)):
            moved = engine.rows(loss_fn, params, ROWS, positions)
        with torch_seed(insecure_key(1)):
            assert torch.equal(moved.losses_B, auto().rows(loss_fn, params, ROWS, positions).losses_B)


def test_a_mask_of_dropout_is_drawn_where_it_is_used(monkeypatch):
    """And gone before the next one; also one of a result that nobody uses is drawn."""

    def loss_fn(params, batch):
        hidden = F.dropout((batch[0] @ params["w"]).tanh(), 0.5)
        F.dropout(hidden, 0.2)
        return F.dropout(hidden, 0.3).square().sum(1)

    engine, of_each, masks, alive = replaying(loss_fn), OwnDraws.of_each, [], []
    expected = results(auto(), loss_fn, PARAMS, ROWS)

    def drawn(self, *given):
        alive.append(sum(mask() is not None for mask in masks))
        found = of_each(self, *given)
        masks.append(weakref.ref(found))
        return found

    monkeypatch.setattr(OwnDraws, "of_each", drawn)
    assert same(expected, results(engine, loss_fn, PARAMS, ROWS))
    assert alive == [0, 0, 0]


def replaying(loss_fn=linear, params=PARAMS, batch=ROWS):
    engine = captured()
    for step in range(4):
        engine(loss_fn, others(params, step), others(batch, step)).sq_norms()
    assert "replayed" in note(engine, loss_fn)
    return engine


HARD = {
    "a row that is not finite": lambda x: x.index_fill(0, torch.tensor(3), float("inf")),
    "NaN": lambda x: x.index_fill(0, torch.tensor(0), float("nan")),
    "near overflow": lambda x: x * 1e18,
    "all zero": lambda x: x * 0,
}


@pytest.mark.parametrize("name", HARD)
def test_numbers_that_need_care_take_the_ordinary_way(name):
    """Also where dropout has drawn before the mark is read, and in the sums of a step."""
    torch.manual_seed(0)
    loss_fn, params = of_module(Dropouts())
    hard = HARD[name](ROWS[0]), ROWS[1]
    for own_loss, own in ((linear, PARAMS), (loss_fn, params)):
        engine = replaying(own_loss, own)
        assert same(results(engine, own_loss, own, hard, 5), results(auto(), own_loss, own, hard, 5))
        clipped = [
            make_clipped_grad(own_loss, clipping.Flat(clip_norm=1.0), engine=each)(own, hard, key=insecure_key(3))
            for each in (engine, auto())
        ]
        assert same(list(clipped[0][0].sums.values()), list(clipped[1][0].sums.values()))


def test_what_is_frozen_is_read_as_it_is_now():
    """A constant that is changed in place is that of the recording, too."""
    frozen = torch.ones(3)
    loss_fn = lambda params, batch: linear(params, (batch[0], batch[1] * frozen))
    engine = replaying(loss_fn)
    frozen.mul_(3)
    assert same(results(engine, loss_fn, PARAMS, ROWS), results(auto(), loss_fn, PARAMS, ROWS))
    assert isinstance(engine(loss_fn, PARAMS, ROWS), Replayed)


def changing(change):
    """A loss whose factor is the first of these numbers, and a function that changes it."""
    return lambda params, batch: linear(params, batch) * change[0], PARAMS, lambda: change.__setitem__(0, 2.0)


def of_attribute(part, name, value):
    """A loss of a module with a frozen layer and dropout, and a function that changes an attribute of a part of it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), nn.Linear(3, 3), Scaled())
    module[2].requires_grad_(False)
    loss_fn, params = of_module(module)
    return loss_fn, params, lambda: setattr(module[part], name, value(module[part]))


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return x * self.scale * SCALE


SCALE = 1.0
MODULES = {
    "a flag": (1, "training", lambda part: False),
    "a probability": (1, "p", lambda part: 0.1),
    "a new attribute": (3, "scale", lambda part: 2.0),
    "another tensor": (2, "weight", lambda part: nn.Parameter(part.weight * 2, requires_grad=False)),
}


def seen_again(loss_fn, params, change, steps=5):
    """The same numbers as `auto` right after the change, and replays again."""
    engine = replaying(loss_fn, params)
    before = results(engine, loss_fn, params, ROWS)
    change()
    for step in range(steps):
        found = results(engine, loss_fn, params, ROWS)
        assert same(found, results(auto(), loss_fn, params, ROWS)), step
    assert not same(before, found)
    assert isinstance(engine(loss_fn, params, ROWS), Replayed)


@pytest.mark.parametrize("name", MODULES)
def test_attributes_that_change_are_recorded_again(name):
    seen_again(*of_attribute(*MODULES[name]))


def test_numbers_of_python_that_change_are_recorded_again(monkeypatch):
    """In a closure, in a default, and of a global name or a class."""
    factor = 1.0

    def rebind():
        nonlocal factor
        factor = 2.0

    seen_again(lambda params, batch: linear(params, batch) * factor, PARAMS, rebind)
    seen_again(*changing([1.0]))

    def of_default(params, batch, scale=1.0):
        return linear(params, batch) * scale

    seen_again(of_default, PARAMS, lambda: setattr(of_default, "__defaults__", (2.0,)))
    loss_fn, params, _ = of_attribute(3, "scale", lambda part: 1.0)
    seen_again(loss_fn, params, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))
    loss_fn, params, _ = of_attribute(3, "scale", lambda part: 1.0)
    seen_again(loss_fn, params, lambda: monkeypatch.setattr(Scaled, "scale", 4.0))


def test_a_replay_that_fails_is_the_way_back_to_auto():
    """Here a constant selects other columns, so that shapes are others: no replay has given old numbers."""
    mask = torch.tensor([True, True, False])
    loss_fn = lambda params, batch: (batch[0] @ params["w"])[:, mask].square().mean(1)
    engine = replaying(loss_fn)
    assert isinstance(engine(loss_fn, PARAMS, ROWS), Replayed)
    mask[1] = False
    for _ in range(2):
        assert same(results(engine, loss_fn, PARAMS, ROWS), results(auto(), loss_fn, PARAMS, ROWS))
    assert "not recorded" in note(engine, loss_fn)


def test_a_replay_that_fails_prints_no_generated_code(capsys):
    """Here a part of a constant, which is shorter now: it is no error of torch, but of the code that torch has made."""
    held = torch.ones(3)
    loss_fn = lambda params, batch: sum(linear(params, batch) * part for part in held.unbind())
    engine = replaying(loss_fn)
    held.resize_(2)
    assert same(results(engine, loss_fn, PARAMS, ROWS), results(auto(), loss_fn, PARAMS, ROWS))
    assert not capsys.readouterr().err


def test_tensors_that_begin_to_require_gradients_are_seen():
    frozen = torch.ones(3)
    loss_fn = lambda params, batch: linear(params, batch) * (2 if frozen.requires_grad else 1)
    seen_again(loss_fn, PARAMS, lambda: frozen.requires_grad_())


def test_what_changes_in_each_step_is_not_recorded():
    """A coefficient by schedule; and a counter of the loss, which would stand still in replays."""
    step, engine = [0], captured()
    scheduled = lambda params, batch: linear(params, batch) * (1 + step[0] / 100)
    for number in range(12):
        step[0] = number
        assert same(results(engine, scheduled, PARAMS, ROWS), results(auto(), scheduled, PARAMS, ROWS))
    assert "changes from step to step (closure 'step' (list)):" in note(engine, scheduled)
    calls, hidden = [0], itertools.count()

    def late(params, batch):
        calls[0] += 1
        return linear(params, batch) * (2 if calls[0] > 50 else 1)

    for loss_fn in (late, lambda params, batch: linear(params, batch) * (2 if next(hidden) > 50 else 1)):
        found = [(engine(loss_fn, PARAMS, ROWS), note(engine, loss_fn)) for _ in range(12)]
        assert not any(isinstance(each, Replayed) for each, _ in found)
        assert any("changes what it keeps from call to call" in why for _, why in found)
        assert "not recorded" in note(engine, loss_fn)


HELD = torch.tensor(2.0)
READ = {
    "item": lambda p: HELD.item(),
    "tolist": lambda p: HELD.tolist(),
    "if": lambda p: 2 if HELD > 2.5 else 1,
    "a result": lambda p: (HELD * 2).item(),
    "by torch": lambda p: torch.arange(1.0, 5)[HELD.long()],
    "of a parameter": lambda p: p["w"].sum().item(),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_of_constants_and_parameters_that_python_reads_are_no_constants(name):
    loss_fn = lambda params, batch: linear(params, batch) * READ[name](params)
    found, reason = run(loss_fn, PARAMS, ROWS)
    assert all(same(one, other) for one, other in found)
    assert "not recorded, since Python reads numbers of tensors" in reason


def test_draws_of_python_are_not_recorded():
    """Also where they change next to nothing, so that two passes show the same numbers."""
    loss_fn = lambda params, batch: linear(params, batch) * (2 if random.random() < 1e-9 else 1)
    assert "changes what it keeps from call to call" in run(loss_fn, PARAMS, ROWS)[1]


def unseen(monkeypatch):
    """Memory that no identity shows, and a short way to the next comparison."""
    monkeypatch.setattr("dpfunc.engines.capture.CHECKED", 8)
    return array("d", [1.0])


def test_a_change_that_is_not_seen_ends_the_run(monkeypatch):
    """At the next comparison: before anything of that step is released."""
    loss_fn, _, change = changing(unseen(monkeypatch))
    engine = replaying(loss_fn)
    change()
    for _ in range(6):
        old = engine(loss_fn, PARAMS, ROWS)
    assert isinstance(old, Replayed)
    with pytest.raises(UnsupportedModel, match="another one than when its operations were recorded"):
        engine(loss_fn, PARAMS, ROWS)
    again = results(engine, loss_fn, PARAMS, ROWS)  # by auto, from now on
    assert same(again, results(auto(), loss_fn, PARAMS, ROWS))
    assert "not recorded" in note(engine, loss_fn)


def test_groups_of_rows_that_begin_end_the_run(monkeypatch):
    """Such a pass is none to compare with, but it shows that the loss is another one."""
    scale = unseen(monkeypatch)
    loss_fn = lambda params, batch: linear(params, batch) * (2 if scale[0] > 1 and batch[0].sum() > 0 else 1)
    engine = replaying(loss_fn)
    scale[0] = 2.0
    for _ in range(6):
        engine(loss_fn, PARAMS, ROWS)
    with pytest.raises(UnsupportedModel, match="another one than when its operations were recorded"):
        engine(loss_fn, PARAMS, ROWS)


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy])
def test_numbers_that_python_begins_to_read_are_no_constants(read):
    """A recording keeps nothing of a row, also where the first pass did not read."""
    begun = []
    loss_fn = lambda params, batch: linear(params, batch) * (torch.tensor(read(batch[1][0]))[0] if begun else 1)
    engine, ones = captured(), torch.ones(8, 3)
    engine(loss_fn, PARAMS, (ROWS[0], ones))
    begun.append(True)
    for step in range(5):
        given = ROWS[0], ones * step
        assert same(results(engine, loss_fn, PARAMS, given), results(auto(), loss_fn, PARAMS, given))
    assert "Python reads numbers of tensors" in note(engine, loss_fn)


def test_aux_is_not_the_memory_of_the_batch():
    """Who writes into it changes no record."""
    loss_fn = lambda params, batch: (linear(params, batch), batch[0])
    rows = ROWS[0].clone(), ROWS[1]
    found = replaying(loss_fn)(loss_fn, PARAMS, rows)
    assert isinstance(found, Replayed)
    found.aux.zero_()
    assert torch.equal(rows[0], ROWS[0])


def pickled(engine):
    return pickle.loads(pickle.dumps(engine))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_an_engine_begins_anew(copied):
    """A pickle of an engine, of whatever name, was an error about a function inside of torch."""
    for name in ENGINES:
        assert copied(engine_of(name)) == engine_of(name)
    engine = copied(replaying())
    assert same(results(engine, linear, PARAMS, ROWS), results(auto(), linear, PARAMS, ROWS))
    assert not note(engine, linear).endswith("replayed")


def test_an_audit_sees_it_as_well(monkeypatch):
    """A row that is computed alone runs the loss as it is now."""
    monkeypatch.setattr("dpfunc.engines.microbatches.STEPS_IN", 1)
    loss_fn, _, change = changing(array("d", [1.0]))
    clipped = make_clipped_grad(loss_fn, clipping.Flat(clip_norm=1.0), engine=captured())
    for _ in range(4):
        clipped(PARAMS, ROWS)
    change()
    with pytest.raises(UnsupportedModel, match="differs from what it has beside the others"):
        clipped(PARAMS, ROWS)


CONSTANT = torch.zeros(4)
# Functions of a tensor, and whether they write into it, a constant, or a view of either.
WRITES = {
    "into it": (lambda x: x.add_(1), True),
    "into a view": (lambda x: x.view(2, 2).t()[0].mul_(2), True),
    "into one of several": (lambda x: x.unbind()[1].fill_(1.0), True),
    "into what an operation was given as out": (lambda x: torch.add(x, x, out=x), True),
    "into a constant": (lambda x: CONSTANT.add_(x), True),
    "into a part of which torch does not say so": (lambda x: torch.unsafe_chunk(x, 2)[0].mul_(2), True),
    "into another view of that kind": (lambda x: torch.ops.aten._unsafe_view(x, (2, 2)).mul_(2), True),
    "into a copy": (lambda x: x.clone().add_(1), False),
    "into a result": (lambda x: (x + 1).view(2, 2).add_(1), False),
    "none": (lambda x: x.view(2, 2) + 1, False),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_recording_may_write_into(name):
    function, refused = WRITES[name]
    graph = make_fx(function)(torch.ones(4)).graph
    with pytest.raises(_recording.CannotRecord, match="writes into") if refused else nullcontext():
        _recording._refuse_effects(graph)


WRONG = {
    "losses": lambda norms: norms._replace(losses_B=norms.losses_B * 1.0001),
    "norms": lambda norms: norms._replace(sq_norms={"w": norms.sq_norms["w"].nextafter(torch.tensor(9e9))}),
    "values": lambda norms: norms._replace(values=[value + 1e-3 for value in norms.values]),
}


@pytest.mark.parametrize("part", [*WRONG, "sums"])
def test_a_recording_that_gives_other_numbers_is_not_used(part, monkeypatch):
    norms, sums = _recording.Recording.norms, _recording.Recording.sums
    if part == "sums":
        scaled = lambda self, *given: {name: value * 1.0001 for name, value in sums(self, *given).items()}
        monkeypatch.setattr(_recording.Recording, "sums", scaled)
    else:
        monkeypatch.setattr(_recording.Recording, "norms", lambda self, *given: WRONG[part](norms(self, *given)))
    found, reason = run(linear, PARAMS, ROWS)
    assert all(same(one, other) for one, other in found)
    assert "another pass gave other numbers" in reason


def test_an_error_of_a_row_is_that_of_auto():
    table = {"table": torch.randn(5, 3, generator=torch.Generator().manual_seed(0))}
    loss_fn = lambda params, batch: F.embedding(batch, params["table"]).square().sum((1, 2))
    ids, wrong = torch.arange(4)[:, None] % 5, torch.full((4, 1), 7)
    engine = replaying(loss_fn, table, ids)
    errors = []
    for each in (engine, auto()):
        with pytest.raises((InvalidArgument, UnsupportedModel, IndexError)) as error:
            each(loss_fn, table, wrong)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_other_settings_of_torch_are_other_recordings():
    """Autocast, fewer digits and another default dtype are not those of the recording."""
    engine = replaying()
    with torch.autocast("cpu", torch.bfloat16):
        assert same(results(engine, linear, PARAMS, ROWS), results(auto(), linear, PARAMS, ROWS))
        assert "products are shortened" in note(engine, linear)
    torch.set_float32_matmul_precision("medium")
    try:
        assert same(results(engine, linear, PARAMS, ROWS), results(auto(), linear, PARAMS, ROWS))
        assert "products are shortened" in note(engine, linear)
    finally:
        torch.set_float32_matmul_precision("highest")
    results(engine, linear, PARAMS, ROWS)
    assert "replayed" in note(engine, linear)
    wide = {"w": PARAMS["w"].double()}, tuple(value.double() for value in ROWS)
    for _ in range(4):
        assert same(results(engine, linear, *wide), results(auto(), linear, *wide))
    assert "replayed" in note(engine, linear)
    strided = {"w": PARAMS["w"].T.contiguous().T}
    for _ in range(4):
        assert same(results(engine, linear, strided, ROWS), results(auto(), linear, strided, ROWS))


def test_rows_of_many_shapes_are_not_recorded(caplog):
    """One message says so, whatever their number."""
    engine = captured()
    for size in range(2, 12):
        for _ in range(3):
            results(engine, linear, PARAMS, tuple(value[:1].repeat(size, 1) for value in ROWS))
    assert "more than 8 shapes" in note(engine, linear)
    assert caplog.text.count("more than 8 shapes") == 1


def test_a_decision_is_about_rows_of_the_last_shape():
    """Of which there are groups, or a recording."""
    loss_fn = lambda params, batch: linear(params, batch[:2]) * (2 if len(batch) > 2 and batch[0].sum() > 0 else 1)
    engine = replaying(loss_fn)
    engine(loss_fn, PARAMS, (*ROWS, ROWS[0]))
    assert engine.decision(loss_fn).engine == "groups"
    engine(loss_fn, PARAMS, ROWS)
    assert engine.decision(loss_fn).engine == "one pass"
    assert "replayed" in note(engine, loss_fn)


@pytest.mark.parametrize("groups", ["all", "parameter"])
def test_a_step_releases_what_auto_releases(groups):
    """Batches of other sizes are filled up; the last microbatch, too. A rule by parameters has other factors for each."""
    params = {"w": PARAMS["w"], "v": torch.ones(3)}
    loss_fn = lambda params, batch: linear(params, batch) + (batch[0][:, :3] * params["v"]).sum(1)
    data = tuple(value.repeat(6, 1) * torch.linspace(0.5, 2, 48)[:, None] for value in ROWS)
    rule = {
        "all": clipping.Flat(0.5),
        "parameter": clipping.Flat({"w": 0.4, "v": 0.2}, groups=clipping.PerParameter()),
    }[groups]
    plan = dpfunc.Plan(sampling.Poisson(48, 0.25), rule, noise_multiplier=1.0, num_steps=8, delta=1e-3)
    released = {}
    for engine in ("auto", "captured"):
        dp_step, own = dpfunc.make_dp_step(loss_fn, plan, engine=engine, microbatch_size=5), dict(params)
        state = allow_repeat(dp_step.init(own, key=insecure_key(4)))
        for places in plan.batches(state):
            grads, state, _ = dp_step(own, tuple(value[places] for value in data), state)
            own = {name: value - 0.1 * grads[name] for name, value in own.items()}
        released[engine] = own
    last = dp_step.clipped_grad.engine
    assert "replayed" in last.decision(dp_step.clipped_grad.loss_fn).reason
    for name, value in released["auto"].items():
        assert torch.allclose(value, released["captured"][name], rtol=1e-5, atol=1e-6)


def test_batches_of_random_sizes_are_of_few_shapes():
    """A size is a function of the number of rows alone; what is released is what `auto` gives."""
    engine = captured()
    clipped, plain = (make_clipped_grad(linear, clipping.Flat(1.0), engine=each) for each in (engine, auto()))
    sizes = {clipped._microbatches._size(PARAMS, ROWS, count) for count in range(200, 320)}
    assert sizes == {224, 256, 320}
    for count in (5, 7, 6, 8, 5, 6):
        given = tuple(value[:count] for value in ROWS)
        one, other = clipped(PARAMS, given), plain(PARAMS, given)
        assert torch.allclose(one[0].sums["w"], other[0].sums["w"])
        assert torch.allclose(one[1].losses_B, other[1].losses_B)
    assert "replayed" in note(engine, clipped.loss_fn)
