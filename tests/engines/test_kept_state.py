"""One record more or less moves each step by the bound at most, or the step is refused: losses that keep something."""

from __future__ import annotations

import functools
import importlib
import math

import pytest
import torch
from kept_state import PLACES
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, engines
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines.guards.kept_state import python_state
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import fold_in, insecure_key

D = 4
EVERY = ("auto", "vmap", "ghost", "loop")
every_engine = pytest.mark.parametrize("engine", EVERY)


def batch(size, seed, large=False):
    """Rows with gradients that point the same way; the first is much larger than the others if `large`."""
    x = torch.rand(size, D, generator=torch.Generator().manual_seed(seed)) + 0.5
    if large:
        x[0] *= 100
    return x


def steps(large=1):
    """Batches of steps that follow each other; one of them has a large first row."""
    return [batch(size, seed, seed == large) for seed, size in enumerate((8, 8, 8, 9))]


def linear(p, x, flipped=False):
    """Gradients are the rows: flipped ones move the sum by up to twice their number."""
    sign = torch.where(flipped, -1.0, 1.0) if isinstance(flipped, torch.Tensor) else -1.0 if flipped else 1.0
    return (p["w"] * x).sum(1) * sign


def weights():
    return {"w": torch.ones(D)}


def released(make, engine, batches, size=None):
    """The sums of all steps; None for those that were refused."""
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


def excess(make, engine, batches=None, size=None, step=1):
    """The largest distance between neighbours, minus what is allowed: the bound in the step of the record, else none.

    Steps count that both release, before one of them is refused.
    """
    batches = steps() if batches is None else batches
    other = [rows[1:] if number == step else rows for number, rows in enumerate(batches)]
    pairs = zip(released(make, engine, batches, size), released(make, engine, other, size), strict=True)
    off = [
        float((one - two).norm()) - (number == step)
        for number, (one, two) in enumerate(pairs)
        if one is not None and two is not None
    ]
    return max(off, default=0.0)


def refused(make, engine, batches=None, size=None):
    """True if a step was refused."""
    return any(sums is None for sums in released(make, engine, steps() if batches is None else batches, size))


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


places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
SWITCHES = {name: PLACES[name] for name in ("dict", "class", "attribute of a submodule", "itertools.count")}


@places
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_latch_that_is_idle_at_first(place, engine):
    assert excess(latch(place), engine) < 1e-4
    assert refused(latch(place), engine)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("place", SWITCHES.values(), ids=SWITCHES)
@every_engine
def test_a_latch_with_and_without_a_large_number(place, engine, wanted):
    """`any()` that is false says the same of each row, but not that nothing was kept."""
    assert excess(latch(place, wanted), engine) < 1e-4
    assert excess(latch(place, wanted), engine, steps(large=0), step=0) < 1e-4
    assert excess(latch(place, wanted), engine, steps(large=0), "auto", step=0) < 1e-4
    assert refused(latch(place, wanted), engine) or not wanted  # zeros, which come first, have no large number either


def test_what_an_error_would_keep_is_compared_as_well():
    """The read is followed by an operation that has no rule, so that rows are computed alone."""

    def make():
        seen = []

        def loss_fn(p, x):
            if (x > 20).any():
                seen.append(True)
            return linear(p, x, len(seen) > 0) + 0 * torch.kron(p["w"], x).view(len(x), -1).sum(1)

        return loss_fn

    assert excess(make, "auto") < 1e-4
    assert refused(make, "auto")


@places
def test_a_counter_over_rows(place):
    assert excess(counter(place), "loop") < 1e-4
    assert refused(counter(place), "loop")


@pytest.mark.parametrize("place", SWITCHES.values(), ids=SWITCHES)
@every_engine
def test_a_counter_over_microbatches(place, engine):
    for step in (0, 1):
        assert excess(counter(place), engine, size=4, step=step) < 1e-4
    assert refused(counter(place), engine, size=4)
    assert refused(counter(place), engine, [batch(5, 0), batch(6, 1)], size=4)
    assert refused(counter(place, 1000), engine, size=4)


@every_engine
def test_a_counter_over_groups_of_rows(engine):
    """The number of calls follows from what rows say, so that a counter of calls would tell it."""

    def make():
        value, change = PLACES["list"]()

        def loss_fn(p, x):
            losses = linear(p, x, value() % 2 >= 1) * (2.0 if bool((x > 20).any()) else 1.0)
            change()
            return losses

        return loss_fn

    assert excess(counter(PLACES["list"]), engine) < 1e-4
    assert excess(make, engine) < 1e-4
    assert refused(make, engine)


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
    "_batch_norm_impl_index": lambda x, mean, var: ops._batch_norm_impl_index(
        x, None, None, mean, var, True, 1.0, 1e-5, False
    ),
    "native_batch_norm": lambda x, mean, var: ops.native_batch_norm(x, None, None, mean, var, True, 1.0, 1e-5),
    "_native_batch_norm_legit": lambda x, mean, var: ops._native_batch_norm_legit(
        x, None, None, mean, var, True, 1.0, 1e-5
    ),
    "_batch_norm_with_update": lambda x, mean, var: ops._batch_norm_with_update(x, None, None, mean, var, 1.0, 1e-5),
    "batch_norm_update_stats": lambda x, mean, var: ops.batch_norm_update_stats(x, mean, var, 1.0),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@every_engine
def test_statistics_in_buffers_of_a_function(update, engine):
    make = lambda: _as_loss(Statistics(update))
    assert excess(make, engine) < 1e-4
    assert refused(make, engine)


@pytest.mark.parametrize("name", ["cudnn_batch_norm", "miopen_batch_norm"])
def test_statistics_of_accelerators_are_refused_before_the_operation_runs(name):
    update = lambda x, mean, var: getattr(ops, name)(x, torch.ones(1), None, mean, var, True, 1.0, 1e-5)
    for engine in ("auto", "loop"):
        with pytest.raises(UnsupportedModel, match=f"writes values of the batch .{name}"):
            _step(_as_loss(Statistics(update)), engine)


def test_gathered_statistics_are_refused_before_the_operation_runs():
    for more in ((3, ops.batch_norm_gather_stats), (torch.ones(1), ops.batch_norm_gather_stats_with_counts)):
        update = lambda x, mean, var, more=more: more[1](x, x[:1, 0, :1], x[:1, 0, :1], mean, var, 1.0, 1e-5, more[0])
        with pytest.raises(UnsupportedModel, match="writes values of the batch .batch_norm_gather_stats"):
            _step(_as_loss(Statistics(update)), "auto")


def _as_loss(module):
    forward, params = dpfunc.functionalize(module)
    return (lambda p, x: forward(p, x)), {name: torch.ones_like(value) for name, value in params.items()}


def _step(made, engine):
    loss_fn, params = made if isinstance(made, tuple) else (made, weights())
    prepared = make_clipped_grad(loss_fn, clipping.Flat(1.0), engine=getattr(engines, engine)())
    return prepared(params, batch(8, 0), key=insecure_key(1))


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


def seed_of_torch():
    """torch's own generator is the counter."""

    def loss_fn(p, x):
        torch.manual_seed(torch.initial_seed() % 1000 + 1)
        return linear(p, x, torch.initial_seed() % 2 == 1)

    return loss_fn


def shape_of_repeated_rows():
    seen = []

    def loss_fn(p, x):
        losses = linear(p, x, len(seen) > 0)
        if len(x.flatten().repeat_interleave(x.flatten().long())) > 100 * len(x):
            seen.append(True)
        return losses

    return loss_fn


def shape_of_selected_numbers():
    kept = {}

    def loss_fn(p, x):
        losses = linear(p, x, "large" in kept)
        if x[x > 20].shape[0]:
            kept["large"] = True
        return losses

    return loss_fn


KEEPING = [batch_norm_in_a_closure, spectral_norm_in_a_closure, shape_of_repeated_rows,
           shape_of_selected_numbers]  # fmt: skip


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_losses_that_keep_what_follows_from_rows(make, engine, size):
    assert excess(make, engine, size=size) < 1e-4
    assert refused(make, engine, size=size) or (engine, size) == ("auto", None)  # one call a step


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_seed_of_torch_counts_rows(engine):
    assert excess(seed_of_torch, engine) < 1e-4


def memory_of_a_view(p, x):
    memory = torch.empty(0).set_(x.untyped_storage())
    return linear(p, x, memory.max() > 20)


def memory_of_a_base(p, x):
    base = x if x._base is None else x._base
    return linear(p, x, base.max() > 20)


def memory_by_strides(p, x):
    try:
        memory = x.as_strided((4 * D,), (1,), 0)
    except RuntimeError:
        memory = x
    return linear(p, x, memory.max() > 20)


def memory_of_numpy(p, x):
    array = x.detach().numpy()
    return linear(p, x, bool((array if array.base is None else torch.empty(0).set_(x.untyped_storage())).max() > 20))


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("loss_fn", [memory_of_a_view, memory_of_a_base, memory_by_strides, memory_of_numpy])
@every_engine
def test_rows_alone_have_memory_of_their_own(loss_fn, engine, size):
    assert excess(lambda: loss_fn, engine, size=size) < 1e-4


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
    assert excess(make, engine) < 1e-4


def test_a_scripted_module_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="before torch.jit.script"):
        dpfunc.functionalize(torch.jit.script(nn.Linear(D, 1)))


def masks_by_length():
    masks = {}

    def loss_fn(p, x):
        mask = masks.setdefault(x.shape[1:], torch.ones(x.shape[1:]).cumsum(0))
        return linear(p, x * mask)

    return loss_fn


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


def number_of_each_row():
    """Numbers of rows are read, and nothing is kept."""
    return lambda p, x: torch.stack([linear(p, row[None])[0] * math.exp(-float(row.sum())) for row in x])


HONEST = [
    (masks_by_length, "auto"),
    (masks_by_length, "loop"),
    (growing_table, "auto"),
    (growing_table, "loop"),
    (number_of_each_row, "auto"),
    (number_of_each_row, "loop"),
]


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize(("make", "engine"), HONEST)
def test_what_is_built_for_a_shape_is_no_state(make, engine, size):
    calm = steps(large=None)
    for sums, rows in zip(released(make, engine, calm, size), calm, strict=True):
        torch.testing.assert_close(sums, sum(_clipped(make(), row) for row in rows.split(1)), rtol=1e-3, atol=1e-3)


def _clipped(loss_fn, row):
    leaf = torch.ones(D, requires_grad=True)
    (grad,) = torch.autograd.grad(loss_fn({"w": leaf}, row).sum(), leaf)
    return grad * (1.0 / grad.norm()).clamp(max=1.0)


def test_calls_may_be_counted_where_no_loss_depends_on_it():
    calls = []

    def loss_fn(p, x):
        calls.append(len(x))
        return linear(p, x)

    assert not refused(lambda: loss_fn, "auto")
    assert set(calls) == {1}, "each over a batch of one"
    assert len(calls) <= 12, "one pass a step, and the audits"


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

        before = python_state(loss_fn)
        library.count(None)
        assert (python_state(loss_fn) != before) == keeps


def toggle():
    """Each other call is flipped, and after an even number of calls all is as it was."""
    kept = {"flipped": False}

    def loss_fn(p, x):
        losses = linear(p, x, kept["flipped"])
        kept["flipped"] = not kept["flipped"]
        return losses

    return loss_fn


@pytest.mark.parametrize("size", [None, 1, 2])
@every_engine
def test_state_that_comes_back_after_some_calls(engine, size):
    """As many rows or microbatches as it takes: an even number."""
    assert excess(toggle, engine, size=size) < 1e-4
    assert size != 2 or refused(toggle, engine, size=size)


def handed_on():
    """A large row sets what the next one takes: at the end all is as it was."""
    kept = {}

    def loss_fn(p, x):
        flipped = kept.pop("large", False)
        if bool((x > 20).any()):
            kept["large"] = True
        return linear(p, x, flipped)

    return loss_fn


@pytest.mark.parametrize("size", [None, 1, 2, 4])
@every_engine
def test_state_that_one_row_hands_to_the_next(engine, size):
    assert excess(handed_on, engine, size=size) < 1e-4
    assert refused(handed_on, engine, size=size)
