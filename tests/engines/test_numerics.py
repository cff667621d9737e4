"""Narrow numbers, checkpointing, dropout, and what is left behind: the sums are float32 and the module is as it was."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Case, next_token, tiny_gpt2, token_batch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.language import llama
from zoo.parity import ENGINES, differences, roughen, truth_of

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.engines._numerics import kernel_cost, matrix_cost, sum_cost, table_cost
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

B, T, D, VOCAB = 4, 6, 16, 50
every = pytest.mark.parametrize("engine", ENGINES)
fast = pytest.mark.parametrize("engine", ["auto", "vmap", "ghost"])


class Small(nn.Module):
    """A bit of everything: table, norm, convolution, matrices, scale."""

    def __init__(self, dropout=0.0, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.norm = nn.LayerNorm(D)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.scale = nn.Parameter(torch.ones(D))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(D, 3)
        self.checkpointed = checkpointed

    def block(self, x_BTd):
        hidden = self.dropout(F.gelu(self.up(self.norm(x_BTd))))
        return x_BTd + self.scale * self.down(hidden) + self.conv(x_BTd.mT).mT

    def forward(self, ids_BT):
        x_BTd = self.embed(ids_BT)
        for _ in range(2):
            x_BTd = checkpoint(self.block, x_BTd, use_reentrant=False) if self.checkpointed else self.block(x_BTd)
        return self.head(self.dropout(x_BTd.mean(1)))


def small(dtype=torch.float32, train=False, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return roughen(Small(**options)).to(dtype).train(train)


def case_of(module, wrap=nullcontext):
    forward, params = functionalize(module)

    def loss_fn(p, b):
        with wrap():
            return F.cross_entropy(forward(p, b["ids"]).float(), b["y"], reduction="none")

    return Case(loss_fn, params, token_batch(B))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def apart(got, expected):
    """Largest difference of norms and of sums, relative to the largest norm."""
    (norms, sums), (true_norms, true_sums) = got, expected
    largest = max(float(value.max()) for value in true_norms.values())
    off = max(float((norms[name] - true_norms[name]).abs().max()) for name in norms)
    return max(off, *(float((sums[name].double() - true_sums[name]).norm()) for name in sums)) / largest


def oracle(case):
    """Norms and sums of the loop over single samples."""
    truth = truth_of(case)
    return truth.norms, {name: rows.sum(0) for name, rows in truth.rows.items()}


NARROW = {
    "autocast in the loss": (lambda: case_of(small(), autocast), nullcontext),
    "autocast in a checkpointed loss": (lambda: case_of(small(checkpointed=True), autocast), nullcontext),
    "autocast around the engine": (lambda: case_of(small()), autocast),
    "autocast in the loss and around": (lambda: case_of(small(), autocast), autocast),
    "bfloat16 parameters": (lambda: case_of(small(torch.bfloat16)), nullcontext),
    "float16 parameters": (lambda: case_of(small(torch.float16)), nullcontext),
}


@pytest.mark.parametrize("name", NARROW)
@every
def test_narrow_models_are_summed_in_float32(engine, name):
    """Within 2 % of the float32 model, and as close to the narrow loop as the loop's own rounding lets it be."""
    make, outer = NARROW[name]
    case = make()
    with outer():
        result = ENGINES[engine]()(case.loss_fn, case.params, case.batch)
        sq_norms, sums = result.sq_norms(), result.weighted_sum(dict.fromkeys(case.params, torch.ones(B)))
        narrow = oracle(case_of(small(), autocast) if "checkpointed" in name else make())
    assert {value.dtype for value in (*sq_norms.values(), *sums.values())} == {torch.float32}
    found = {name: value.double().sqrt() for name, value in sq_norms.items()}, sums
    assert apart(found, oracle(case_of(small()))) < 0.02
    assert apart(found, narrow) < 0.01


@pytest.mark.parametrize(
    ("dtype", "outer", "last"),
    [(torch.float32, nullcontext, 2), (torch.bfloat16, nullcontext, 4), (torch.float32, autocast, 4)],
)
def test_microbatches_of_16_bits_have_one_size(dtype, outer, last):
    """Kernels of 16 bits round in another way for another number of rows: the last microbatch is padded."""
    sizes = []

    def engine(loss_fn, params, batch):
        sizes.append(len(batch))
        return ENGINES["vmap"]()(loss_fn, params, batch)

    params = {"w": torch.ones(3, dtype=dtype)}
    loss_fn = lambda p, x: (x * p["w"]).sum(1)
    with outer():
        clipped_grad(
            loss_fn, params, torch.ones(6, 3, dtype=dtype), clipping.Flat(1.0), engine=engine, microbatch_size=4
        )
    assert sizes == [4, last]


ALIGNED = 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("microbatch_size", [None, 7])
@every
def test_many_aligned_gradients_sum_to_their_bound(engine, microbatch_size, dtype):
    """In bfloat16 the sum of 256 equal rows would stop growing or overshoot; autocast may not change it."""
    bound = 0.3
    x = torch.full((ALIGNED, 5, 8), 0.7, dtype=dtype)
    params = {"w": torch.ones(6, 8, dtype=dtype), "b": torch.ones(6, dtype=dtype)}
    loss_fn = lambda p, x: F.linear(x, p["w"], p["b"]).sum((1, 2))
    with autocast():
        clipped, _ = clipped_grad(
            loss_fn, params, x, clipping.Flat(bound), engine=ENGINES[engine](), microbatch_size=microbatch_size
        )
    assert {value.dtype for value in clipped.sums.values()} == {torch.float32}
    total = float(torch.cat([value.double().flatten() for value in clipped.sums.values()]).norm())
    assert total <= ALIGNED * bound * (1 + 1e-4)
    assert total == pytest.approx(ALIGNED * bound, rel=5e-4)


LAYERS = {
    "linear": (lambda: nn.Linear(512, 1, bias=False), (512,)),
    "linear on sequences": (lambda: nn.Linear(64, 64, bias=False), (4, 64)),
    "conv1d": (lambda: nn.Conv1d(16, 32, 3, bias=False), (16, 5)),
    "conv2d with groups": (lambda: nn.Conv2d(16, 32, 3, groups=2, bias=False), (16, 4, 4)),
}


def of_layer(name, scales):
    """A loss of a layer whose rows have inputs of these sizes, and factors that take them back."""
    make, shape = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = make(), torch.randn(len(scales), *shape)
    forward, params = functionalize(module)
    batch = {
        "x": torch.stack([row * scale for row, scale in zip(x, scales, strict=True)]),
        "factor": torch.ones(len(scales)),
    }
    return lambda p, b: forward(p, b["x"]).flatten(1).sum(1) * b["factor"], params, batch


@fast
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flushed", [False, True])
def test_squares_too_small_for_their_dtype_hide_no_gradient(engine, layer, flushed):
    """Inputs of 1e-23 beside a factor of 1e19: the gradient is ordinary, and the square of the input is 0."""
    loss_fn, params, batch = of_layer(layer, [1.0, 1.0, 1e-23, 1.0, 1.0, 1.0])
    batch["factor"][2] = 1e19
    of = lambda rows: {name: value[rows] for name, value in batch.items()}
    clipped = lambda rows, rule, engine: clipped_grad(loss_fn, params, of(rows), rule, engine=ENGINES[engine]())
    for rule in (clipping.Flat(0.01), clipping.normalized(1.0, 1e-3), clipping.auto_v(1.0)):
        torch.set_flush_denormal(flushed)
        try:
            one, unreleased = clipped(slice(None), rule, engine)
            other, _ = clipped([0, 1, 3, 4, 5], rule, engine)
        finally:
            torch.set_flush_denormal(False)
        moved = (one.sums["weight"] - other.sums["weight"]).norm()
        assert moved <= one.sensitivity * (1 + 1e-6)
        if not flushed:
            alone, _ = clipped([2], rule, "loop")
            torch.testing.assert_close(moved, alone.sums["weight"].norm(), rtol=0.01, atol=0)
        assert unreleased.norms_BG[2] > 0


@fast
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("exponent", [14, 18])
def test_small_inputs_beside_large_factors_are_no_doubt(engine, layer, exponent):
    """What is lost in their squares is measured again, and the norm is that of the sample alone."""
    loss_fn, params, batch = of_layer(layer, [10.0**-exponent] * 3)
    batch["factor"] *= 10.0**exponent
    found, expected = (
        clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), engine=ENGINES[name]())[1] for name in (engine, "loop")
    )
    torch.testing.assert_close(found.norms_BG, expected.norms_BG, rtol=1e-4, atol=0)


def test_gradients_of_zero_stay_zero():
    """Nothing is measured again for a row without a gradient, and nothing of it is released."""
    forward, params = functionalize(nn.Linear(512, 1, bias=False))
    batch = {"x": torch.randn(4, 512), "used": torch.tensor([1.0, 0.0, 0.0, 1.0])}

    def loss_fn(params, batch):
        return forward(params, batch["x"])[:, 0] * batch["used"]

    found, unreleased = clipped_grad(loss_fn, params, batch, clipping.auto_v(1.0), engine=ENGINES["auto"]())
    expected, _ = clipped_grad(loss_fn, params, batch, clipping.auto_v(1.0), engine=ENGINES["loop"]())
    torch.testing.assert_close(found.sums, expected.sums)
    assert (unreleased.norms_BG[1:3] < 1e-12).all()


@fast
def test_many_look_ups_of_one_row_keep_the_bound(engine):
    """Added one by one to a large partial sum, each would lose digits; with the sample's own sum they lose none."""
    table, looked_up = torch.zeros(50, 1), 1000

    def loss_fn(params, batch):
        return (F.embedding(batch["ids"], params["t"])[..., 0] * batch["y"]).sum(1)

    ids = torch.randint(0, 50, (3, looked_up), generator=torch.Generator().manual_seed(0))
    ids[1] = 3
    y = torch.zeros(3, looked_up)
    for share in (0.3, 0.4, 0.49):
        y[1, 0], y[1, 1:-1], y[1, -1] = 32.0, share * 32.0 * 2.0**-23, -31.5
        sums = [
            clipped_grad(loss_fn, {"t": table}, {"ids": ids, "y": each}, clipping.Flat(0.5), engine=ENGINES[engine]())[
                0
            ]
            for each in (y, torch.where(torch.arange(3)[:, None] == 1, 0.0, y))
        ]
        assert (sums[0].sums["t"] - sums[1].sums["t"]).norm() <= sums[0].sensitivity


# Gradient checkpointing


def language_case(make, checkpointed):
    """The model is made functional first: `functionalize` itself refuses checkpointing, engines can do it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    forward, params = functionalize(model)
    if checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Case(next_token(forward, lambda out: out.logits), params, token_batch(B))


def loss_case(checkpointed):
    """A function of parameters and rows that is checkpointed as a whole, without a module."""
    run = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if checkpointed else (lambda f, x: f(x))
    batch = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = {"w": torch.eye(D, dtype=torch.float64) + 0.1, "b": torch.ones(D, dtype=torch.float64)}

    def loss_fn(p, x):
        for _ in range(2):
            x = run(lambda x: torch.tanh(x @ p["w"]) * p["b"], x)
        return x.square().sum((1, 2))

    return Case(loss_fn, params, batch)


CHECKPOINTED = {
    "GPT-2": lambda checkpointed: language_case(tiny_gpt2, checkpointed),
    "Llama": lambda checkpointed: language_case(llama, checkpointed),
    "a module": lambda checkpointed: case_of(small(torch.float64, checkpointed=checkpointed)),
    "a loss": loss_case,
}


@pytest.mark.parametrize("name", CHECKPOINTED)
@every
def test_checkpointed_models_equal_the_loop(engine, name):
    truth, run, case = truth_of(CHECKPOINTED[name](False)), ENGINES[engine](), CHECKPOINTED[name](True)
    for _ in range(2):
        assert all(value < 1e-10 for value in differences(run, case, truth).values())


# Dropout


@pytest.mark.parametrize("checkpointed", [False, True])
@fast
def test_dropout_is_replayed(engine, checkpointed):
    """Bit by bit: by the first call, which fills the cache, and by those after it; and it is dropout."""
    case = case_of(small(train=True, dropout=0.5, checkpointed=checkpointed))
    run = ENGINES[engine]()

    def sums(seed):
        clipped, unreleased = clipped_grad(
            case.loss_fn, case.params, case.batch, clipping.Flat(0.5), engine=run, microbatch_size=3,
            key=insecure_key(seed),
        )  # fmt: skip
        return {**clipped.sums, "losses": unreleased.losses_B, "norms": unreleased.norms_BG}

    state = torch.random.get_rng_state()
    first, second, third, other = sums(1), sums(1), sums(1), sums(2)
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, third[name]), name
    assert not torch.equal(first["losses"], other["losses"])


@pytest.mark.parametrize("checkpointed", [False, True])
@fast
def test_dropout_differs_between_samples_and_fits_its_loss(engine, checkpointed):
    """The gradient belongs to the mask that the loss saw, also where a repeated forward pass draws it again.

    For a loss `m * w` it is the loss itself at w = 1.
    """
    part = lambda p, x: F.dropout(x * p["w"], 0.5)
    run = (lambda f, p, x: checkpoint(f, p, x, use_reentrant=False)) if checkpointed else (lambda f, p, x: f(p, x))
    params = {"w": torch.ones(64)}
    result = ENGINES[engine]()(lambda p, x: run(part, p, x).sum(1), params, torch.ones(B, 64))
    sums = result.weighted_sum({"w": torch.tensor([1.0, 0.0, 0.0, 0.0])})
    assert len(set(result.losses_B.tolist())) > 1
    assert float(sums["w"].sum()) == pytest.approx(float(result.losses_B[0]))
    assert torch.allclose(result.sq_norms()["w"], 2 * result.losses_B)


# What is left behind


class Failing(Exception):
    pass


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Failing


def fails_forward(loss_fn):
    def wrapped(p, b):
        loss_fn(p, b)
        raise Failing

    return wrapped


def fails_backward(loss_fn):
    return lambda p, b: FailsBackward.apply(loss_fn(p, b))


def state_of(module):
    hooks = [
        {name: len(value) for name, value in vars(part).items() if "hook" in name and hasattr(value, "__len__")}
        for part in module.modules()
    ]
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    return {name: id(tensor) for name, tensor in tensors.items()}, hooks, copy.deepcopy(module.state_dict())


FAILURES = {"none": lambda loss_fn: loss_fn, "forward": fails_forward, "backward": fails_backward}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("checkpointed", [False, True])
@every
def test_the_module_is_as_it_was(engine, checkpointed, failure):
    """The same tensors in the same places, with the same values, no hooks, no gradients; also after an error.

    And the engine works again.
    """
    module = small(checkpointed=checkpointed)
    before, case = state_of(module), case_of(module)
    values = {name: param.clone() for name, param in case.params.items()}
    run, loss_fn = ENGINES[engine](), FAILURES[failure](case.loss_fn)
    with nullcontext() if failure == "none" else pytest.raises(Failing):
        result = run(loss_fn, case.params, case.batch)
        result.sq_norms()
        result.weighted_sum(dict.fromkeys(case.params, torch.ones(B)))
    after = state_of(module)
    assert before[:2] == after[:2]
    assert all(torch.equal(value, after[2][name]) for name, value in before[2].items())
    assert all(param.grad is None for param in module.parameters())
    assert all(torch.equal(value, case.params[name]) for name, value in values.items())
    assert not any(param.requires_grad for param in case.params.values())
    assert torch.equal(module(case.batch["ids"]), small()(case.batch["ids"]))
    assert all(value < 1e-4 for value in differences(run, case, truth_of(case_of(small()))).values())


SIZES = st.integers(1, 4096)


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_nothing_is_formed_beyond_the_budget_but_what_is_smaller_than_its_factors(positions, p, d, num_samples):
    choice = matrix_cost(positions, p, d).choose(num_samples, 0)
    assert choice.representation != "formed" or choice.num_bytes <= 4 * num_samples * positions * (p + d)


CHOSEN = {
    "few positions": (matrix_cost(64, 1024, 1024), "ghost"),
    "many positions": (matrix_cost(4096, 1024, 1024), "formed"),
    "LoRA: a narrow matrix is nearly free": (matrix_cost(128, 8, 384), "formed"),
    "small table": (table_cost(lookups=128, rows=16, d=64), "formed"),
    "kernel, many positions": (kernel_cost(1024, 1024, 1, (16, 3, 3, 3), 1), "formed"),
    "kernel, few positions": (kernel_cost(16, 16, 1, (512, 512, 3, 3), 1), "ghost"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name):
    costs, representation = CHOSEN[name]
    assert costs.choose(32).representation == representation


def test_large_tables_are_not_formed_and_sums_are():
    assert table_cost(lookups=128, rows=50_000, d=64).choose(32).representation != "formed"
    assert sum_cost(384, 128).choose(32, 0).representation == "formed"
