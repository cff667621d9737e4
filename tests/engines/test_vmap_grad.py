"""The engine vmap(grad(loss)): reads by agreement, draws of each row, what a loss keeps, hooks and inner gradients."""

from __future__ import annotations

import math
import struct
from functools import partial

import pytest
import torch
from models import tiny_bert
from needs import Doubled, own_gradient
from rows_alone import W, X, engine_of, off, squares
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines import auto, vmap_grad
from dpfunc.engines._row_pass import run_pass
from dpfunc.engines.by_name import ENGINES
from dpfunc.engines.vmap_grad import Decision
from dpfunc.errors import UnsupportedModel
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key, torch_seed

# Gradients and hooks inside of the loss.


def penalty(p, x):
    """A gradient with respect to the input, in the loss."""
    x = x.clone().requires_grad_()
    out = F.linear(x, p["w"][None]).tanh().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return grad.square().sum()[None] + out


def hooked_parameter(p, x):
    """A hook that scales by the largest number that it sees: that of one row."""
    p["w"].register_hook(lambda grad: grad * grad.abs().max())
    return F.linear(x, p["w"][None]).square().sum(1)


def checkpointed(p, x):
    h = checkpoint(lambda v: F.linear(v, torch.diag(p["w"])).tanh(), x, use_reentrant=False)
    return checkpoint(lambda v: F.linear(v, p["w"][None]).square().sum(1), h, use_reentrant=False)


@pytest.mark.parametrize("loss_fn", [penalty, hooked_parameter, checkpointed], ids=lambda f: f.__name__)
def test_gradients_and_hooks_inside_of_the_loss(loss_fn):
    assert engine_of(loss_fn, W, X) == "one pass"


# Random numbers.


def share_of(loss_fn, rows, steps):
    """How often the losses of a batch are 1."""
    engine, hits = auto(), 0.0
    for step in range(steps):
        with torch_seed(insecure_key(step)):
            hits += float(engine(loss_fn, W, X[:1].expand(rows, 3)).losses_B.sum())
    return hits / (rows * steps)


def by_python(p, x):
    """A branch that is taken with probability .3."""
    return (p["w"] * 0).sum()[None] + (1.0 if torch.rand([]) < 0.3 else 0.0)


def by_mask(p, x):
    return (p["w"] * 0).sum()[None] + F.dropout(torch.ones(1), 0.7) * 0.3


@pytest.mark.parametrize(("loss_fn", "rows"), [(by_python, 1), (by_python, 2), (by_python, 8), (by_mask, 4)])
def test_the_law_of_a_row_does_not_depend_on_the_others(loss_fn, rows):
    """Probability .3 within 4 sigma. One draw for all rows of a group, as torch gives it, would be .21, .17, .14."""
    share = share_of(loss_fn, rows, 800 // rows)
    off = {law: abs(share - law) / math.sqrt(law * (1 - law) / 800) for law in (0.3, 0.21)}
    assert off[0.3] < 4 < off[0.21]


# What a loss keeps.


@pytest.mark.parametrize("caught", [False, True])
def test_a_tensor_of_an_earlier_call_is_refused_when_it_is_used(caught):
    """A refusal is final, also where the loss catches it."""
    kept = []

    def loss_fn(p, x):
        h = p["w"] * x
        try:
            scale = 1.0 + kept[-1].sum() if kept else 1.0
        except Exception:
            if not caught:
                raise
            scale = 2.0
        kept.append(h.detach())
        return h.square().sum(1) * scale

    with pytest.raises(UnsupportedModel, match="kept from an earlier call"):
        auto()(loss_fn, W, X)  # also of a made-up row


def test_what_is_kept_and_never_used_or_a_constant_is_fine():
    kept, made = [], {}

    def loss_fn(p, x):
        scale = made.setdefault("scale", torch.arange(3, dtype=x.dtype))
        kept.append(p["w"] * x * scale)
        return kept[-1].square().sum(1)

    engine = auto()
    for _ in range(3):
        found = engine(loss_fn, W, X)
        assert torch.allclose(found.losses_B, (W["w"] * X * torch.arange(3.0)).square().sum(1))


def test_another_loss_of_the_same_code_starts_anew():
    """Whatever was learnt of a loss holds for that one."""
    engine = auto()
    first, second = (partial(lambda scale, p, x: squares(p, scale * x), scale) for scale in (1.0, 2.0))
    assert off(first, W, X, engine) < 1e-12
    assert off(second, W, X, engine) < 1e-12


# Errors.


def test_an_error_of_a_loss_comes_through_as_it_is():
    def loss_fn(p, x):
        raise KeyError("missing column")

    with pytest.raises(KeyError, match="missing column"):
        auto()(loss_fn, W, X)


def test_an_operation_of_another_library_does_not_see_all_rows():
    """Its rule for vmap, which may mix them, is not used."""
    library = torch.library.Library("dpfunc_test_rows", "DEF")
    library.define("centred(Tensor x) -> Tensor")
    library.impl("centred", lambda x: x - 0.5 * x.mean(0, keepdim=True), "CPU")
    centred = torch.ops.dpfunc_test_rows.centred
    torch.library.register_vmap("dpfunc_test_rows::centred", lambda info, dims, x: (centred(x), 0), lib=library)
    loss_fn = lambda p, x: (p["w"] * (x - centred(x))).square().sum(1)
    engine = auto()
    assert off(loss_fn, W, X, engine) < 1e-10
    assert "is of another library" in engine.decision(loss_fn).reason


def test_padded_rows_of_transformers_go_together():
    """With and without padding: masks are made without a look at their numbers, as where a model is compiled."""
    forward, params = dpfunc.functionalize(tiny_bert())
    ids = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])

    def loss_fn(p, b):
        return forward(p, input_ids=b[0], attention_mask=b[1])[0].flatten(1).square().mean(1)

    engine = auto()
    assert off(loss_fn, params, (ids, mask), engine) < 1e-5
    assert engine.decision(loss_fn) == Decision("one pass", "all rows together")


# Decisions.


def test_what_vmap_cannot_compute_goes_to_the_loop_with_a_reason():
    def loss_fn(p, x):
        generator = torch.Generator().manual_seed(int(x.shape[1]))
        return squares(p, x + torch.rand(3, generator=generator, dtype=x.dtype))

    engine = auto()
    assert off(loss_fn, W, X, engine) < 1e-10
    assert engine.decision(loss_fn) == Decision("loop", "rows alone, since the loss draws from a generator of its own")


def test_a_pass_without_rules_says_why():
    """It is slower, and nobody would know."""

    def loss_fn(p, x):
        p["w"].register_hook(lambda grad: grad)
        return squares(p, x)

    engine = auto()
    engine(loss_fn, {"w": W["w"]}, X)
    said = "all rows together, without rules, since the loss has a hook on a parameter or a node"
    assert engine.decision(loss_fn) == Decision("one pass", said)


def test_the_step_says_what_was_decided():
    plan = Plan(sampling.Poisson(100, 0.2), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=2, delta=1e-3)
    dp_step, data, params = dpfunc.make_dp_step(squares, plan), torch.randn(100, 3), {"w": torch.ones(3)}
    assert dp_step.decision is None
    state = dp_step.init(params, dpfunc.secure_key())
    for indices in plan.batches(state):
        _, state, _ = dp_step(params, data[indices], state)
    assert dp_step.decision == Decision("one pass", "all rows together")


# What one batch needs is not remembered for others: a run that goes on in a new process has the same bits.


def own_memory(p, x, out):
    zeros = torch.zeros(5)
    zeros += x[0, :5]
    return out + zeros.sum() * p["v"].sum()


NEEDS = {
    "a gradient inside": own_gradient,
    "memory of its own": own_memory,
    "a plain function": lambda p, x, out: Doubled.apply(out),
    "another use of a parameter": lambda p, x, out: out + p["w"].square().sum() * x.sum(1),
}


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost"])
def test_a_batch_gives_the_same_bits_after_one_that_needed_other_settings(engine, needs):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.rand, generator=generator)
    params, factors_B = {"w": draw(7, 5), "v": draw(5)}, draw(33)

    def loss_fn(p, x):
        out = torch.tanh(F.linear(x[:, :5] * p["v"], p["w"])).square().sum(1)
        return NEEDS[needs](p, x, out) if bool((x > 20).any()) else out

    def computed(run, batch):
        found = run(loss_fn, params, batch)
        return [*found.sq_norms().values(), *found.weighted_sum(dict.fromkeys(params, factors_B)).values()]

    goes_on, batch = ENGINES[engine](), draw(33, 6)
    computed(goes_on, draw(33, 6) + 30)
    for one, other in zip(computed(goes_on, batch), computed(ENGINES[engine](), batch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_loss_that_always_needs_other_settings_pays_for_that_once(engine, needs, monkeypatch):
    passes, run = [], ENGINES[engine]()
    monkeypatch.setattr(vmap_grad, "run_pass", lambda *args: passes.append(1) or run_pass(*args))
    loss_fn = lambda p, x: NEEDS[needs](p, x, F.linear(x[:, :5] * p["v"], p["w"]).square().sum(1))
    per_step = []
    for _ in range(4):
        passes.clear()
        found = run(loss_fn, {"w": torch.ones(7, 5), "v": torch.ones(5)}, torch.ones(3, 6))
        per_step.append(len(passes))
    assert found.needs_audit
    assert per_step[2:] == [1, 1]


def test_numbers_that_c_asks_for_are_read_as_others():
    """C makes an error of its own of what ends a pass."""
    loss_fn = lambda p, x: (x @ p["w"]) * struct.unpack("f", struct.pack("f", x[0, 0]))[0]
    assert off(loss_fn, {"w": torch.ones(2)}, torch.rand(5, 2)) < 1e-5


class WithSlots:
    """A loss to which no weak reference can be made."""

    __slots__ = ()

    def __call__(self, p, x):
        return x["x"] @ p["w"] * (2.0 if int(x["n"][0]) > 1 else 1.0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("size", [None, "auto"])
@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_losses_with_slots_and_numbers_without_sign_are_computed(engine, size, dtype):
    batch = {"x": torch.ones(3, 2), "n": torch.tensor([0, 1, 2]).to(dtype)}
    params = {"w": torch.ones(2)}
    found, _ = dpfunc.clipped.clipped_grad(
        WithSlots(), params, batch, clipping.Flat(100.0), engine=ENGINES[engine](), microbatch_size=size
    )
    torch.testing.assert_close(found.sums["w"], torch.full((2,), 4.0))


def test_an_automatic_size_follows_from_made_up_rows():
    """A batch whose rows need more memory changes no size; the larger of two made-up rows decides, of ones and zeros."""
    params, wide = {"w": torch.ones(2)}, 2**22

    def loss_of(least):
        def loss_fn(p, x):
            large = x[:, 0].item() > least  # of one row: two have no single number
            kept = (x @ p["w"]).expand(wide if large else 1, 1).sin().square()
            return kept.mean(0)

        return make_clipped_grad(loss_fn, clipping.Flat(1.0), microbatch_size="auto")._microbatches

    for least, few in ((1.5, False), (0.5, True), (-0.5, True)):
        run = loss_of(least)
        sizes = {run._size(params, torch.full((64, 2), value), 64) for value in (0.0, 2.0, 0.0)}
        assert len(sizes) == 1
        assert (max(sizes) < 64) == few
