"""Narrow numbers, checkpointing, dropout, and what is left behind: the sums are float32 and the module is as it was."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from models import Case, next_token, token_batch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, roughen, truth_of

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

B, T, D, VOCAB = 4, 6, 16, 50
FAST = ("auto", "vmap", "ghost")
MAKE = ENGINES
fast = pytest.mark.parametrize("engine", FAST)
every = pytest.mark.parametrize("engine", ["loop", *FAST])
all_engines = pytest.mark.parametrize("engine", MAKE)


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


def measured(engine, case, outer=nullcontext):
    """Norms (B,) over all parameters and the plain sum of gradients, with their dtypes."""
    with outer():
        result = MAKE[engine]()(case.loss_fn, case.params, case.batch)
        sq_norms = result.sq_norms()
        sums = result.weighted_sum(dict.fromkeys(case.params, torch.ones(B)))
    dtypes = {value.dtype for value in (*sq_norms.values(), *sums.values())}
    return sq_norms, sums, dtypes


def apart(got, expected):
    """Largest difference of norms and of sums, relative to the largest norm."""
    (norms, sums), (true_norms, true_sums) = got, expected
    largest = max(float(value.double().sqrt().max()) for value in true_norms.values())
    off = max(float((norms[n].double().sqrt() - true_norms[n].double().sqrt()).abs().max()) for n in norms)
    return off / largest, max(float((sums[n].double() - true_sums[n].double()).norm()) for n in sums) / largest


def oracle(case):
    """Norms and sums of the loop over single samples."""
    truth = truth_of(case)
    return {n: v.square() for n, v in truth.norms.items()}, {n: v.sum(0) for n, v in truth.rows.items()}


NARROW = {
    "autocast in the loss": (lambda: case_of(small(), autocast), nullcontext),
    "autocast around the engine": (lambda: case_of(small()), autocast),
    "autocast in the loss and around": (lambda: case_of(small(), autocast), autocast),
    "bfloat16 parameters": (lambda: case_of(small(torch.bfloat16)), nullcontext),
    "float16 parameters": (lambda: case_of(small(torch.float16)), nullcontext),
}


@pytest.mark.parametrize("name", NARROW)
@fast
def test_narrow_models_are_summed_in_float32(engine, name):
    """Within 2 % of the float32 model, and as close to the narrow loop as the loop's own rounding lets it be."""
    make, outer = NARROW[name]
    norms, sums, dtypes = measured(engine, make(), outer)
    assert dtypes == {torch.float32}
    assert max(apart((norms, sums), oracle(case_of(small())))) < 0.02
    with outer():
        narrow = oracle(make())
    assert max(apart((norms, sums), narrow)) < 0.01


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("engine", MAKE)
def test_clipped_sums_of_narrow_models_are_float32(engine, name):
    make, outer = NARROW[name]
    case = make()
    with outer():
        clipped, unreleased = clipped_grad(
            case.loss_fn, case.params, case.batch, clipping.Flat(0.5), engine=MAKE[engine](), microbatch_size=3
        )
    assert {value.dtype for value in clipped.sums.values()} == {torch.float32}
    assert unreleased.norms_BG.dtype == torch.float32
    expected, true = clipped_grad(*vars(case_of(small())).values(), clipping.Flat(0.5))
    assert torch.allclose(unreleased.norms_BG, true.norms_BG, rtol=0.02)
    for param, value in clipped.sums.items():
        assert (value - expected.sums[param]).norm() < 0.02 * 0.5 * B, param


ALIGNED = 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("microbatch_size", [None, 1, 7, 64])
@all_engines
def test_many_aligned_gradients_sum_to_their_bound(engine, microbatch_size, dtype):
    """In bfloat16 the sum of 256 equal rows would stop growing or overshoot; autocast may not change it."""
    bound = 0.3
    x = torch.full((ALIGNED, 5, 8), 0.7, dtype=dtype)
    params = {"w": torch.ones(6, 8, dtype=dtype), "b": torch.ones(6, dtype=dtype)}
    loss_fn = lambda p, x: F.linear(x, p["w"], p["b"]).sum((1, 2))
    with autocast():
        clipped, _ = clipped_grad(
            loss_fn, params, x, clipping.Flat(bound), engine=MAKE[engine](), microbatch_size=microbatch_size
        )
    assert {value.dtype for value in clipped.sums.values()} == {torch.float32}
    total = float(torch.cat([value.double().flatten() for value in clipped.sums.values()]).norm())
    assert total <= ALIGNED * bound * (1 + 1e-4)
    assert total == pytest.approx(ALIGNED * bound, rel=5e-4)


# Gradient checkpointing


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=2 * D, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_gpt2(dropout=0.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=D, n_layer=2, n_head=2, n_positions=16, attn_implementation="eager", use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def language_case(make, checkpointed, dtype=torch.float64):
    """The model is made functional first: `functionalize` itself refuses checkpointing, engines can do it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(dtype).train()
    forward, params = functionalize(model)
    if checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Case(next_token(forward, lambda out: out.logits), params, token_batch(B))


LAYERS = {
    "linear": (lambda: nn.Linear(512, 1, bias=False), (512,)),
    "linear on sequences": (lambda: nn.Linear(64, 64, bias=False), (4, 64)),
    "conv1d": (lambda: nn.Conv1d(16, 32, 3, bias=False), (16, 5)),
    "conv2d with groups": (lambda: nn.Conv2d(16, 32, 3, groups=2, bias=False), (16, 4, 4)),
}


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("rule", [clipping.Flat(0.01), clipping.normalized(1.0, 1e-3), clipping.auto_v(1.0)])
def test_squares_too_small_for_their_dtype_hide_no_gradient(engine, layer, flushed, rule):
    """Inputs of 1e-23 beside a factor of 1e19: the gradient is ordinary, and the square of the input is 0."""
    make, shape = LAYERS[layer]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = make(), torch.randn(6, *shape)
    forward, params = functionalize(module)
    x[2] *= 1e-23
    factor = torch.ones(6)
    factor[2] = 1e19

    def loss_fn(params, batch):
        return forward(params, batch["x"]).flatten(1).sum(1) * batch["factor"]

    others = torch.arange(6) != 2
    torch.set_flush_denormal(flushed)
    try:
        one, unreleased = clipped_grad(loss_fn, params, {"x": x, "factor": factor}, rule, engine=MAKE[engine]())
        other, _ = clipped_grad(
            loss_fn, params, {"x": x[others], "factor": factor[others]}, rule, engine=MAKE[engine]()
        )
    finally:
        torch.set_flush_denormal(False)
    moved = (one.sums["weight"] - other.sums["weight"]).norm()
    assert moved <= one.sensitivity * (1 + 1e-6)
    alone, _ = clipped_grad(loss_fn, params, {"x": x[2:3], "factor": factor[2:3]}, rule, engine=MAKE["loop"]())
    if not flushed:
        torch.testing.assert_close(moved, alone.sums["weight"].norm(), rtol=0.01, atol=0)
    assert unreleased.norms_BG[2] > 0


def test_gradients_of_zero_stay_zero():
    """Nothing is measured again for a row without a gradient, and nothing of it is released."""
    forward, params = functionalize(nn.Linear(512, 1, bias=False))
    batch = {"x": torch.randn(4, 512), "used": torch.tensor([1.0, 0.0, 0.0, 1.0])}

    def loss_fn(params, batch):
        return forward(params, batch["x"])[:, 0] * batch["used"]

    found, unreleased = clipped_grad(loss_fn, params, batch, clipping.auto_v(1.0), engine=MAKE["auto"]())
    expected, _ = clipped_grad(loss_fn, params, batch, clipping.auto_v(1.0), engine=MAKE["loop"]())
    torch.testing.assert_close(found.sums, expected.sums)
    assert (unreleased.norms_BG[1:3] < 1e-12).all()


@pytest.mark.parametrize("engine", FAST)
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
            clipped_grad(loss_fn, {"t": table}, {"ids": ids, "y": each}, clipping.Flat(0.5), engine=MAKE[engine]())[0]
            for each in (y, torch.where(torch.arange(3)[:, None] == 1, 0.0, y))
        ]
        assert (sums[0].sums["t"] - sums[1].sums["t"]).norm() <= sums[0].sensitivity


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["GPT-2", "Llama"])
@every
def test_checkpointed_language_models_equal_the_loop(engine, make):
    truth = truth_of(language_case(make, checkpointed=False))
    run, case = MAKE[engine](), language_case(make, checkpointed=True)
    for _ in range(2):
        assert all(value < 1e-10 for value in differences(run, case, truth).values())


@every
def test_a_checkpointed_module_equals_the_loop(engine):
    truth = truth_of(case_of(small(torch.float64)))
    run, case = MAKE[engine](), case_of(small(torch.float64, checkpointed=True))
    for _ in range(2):
        assert all(value < 1e-10 for value in differences(run, case, truth).values())


@every
def test_a_checkpointed_loss_equals_the_loop(engine):
    """A function of parameters and rows that is checkpointed as a whole, without a module."""
    batch = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = {"w": torch.eye(D, dtype=torch.float64) + 0.1, "b": torch.ones(D, dtype=torch.float64)}

    def loss_fn(p, x, run=lambda function, x: checkpoint(function, x, use_reentrant=False)):
        for _ in range(2):
            x = run(lambda x: torch.tanh(x @ p["w"]) * p["b"], x)
        return x.square().sum((1, 2))

    truth = truth_of(Case(lambda p, x: loss_fn(p, x, run=lambda function, x: function(x)), params, batch))
    found = differences(MAKE[engine](), Case(loss_fn, params, batch), truth)
    assert all(value < 1e-10 for value in found.values())


@fast
def test_checkpointing_under_autocast(engine):
    case = case_of(small(checkpointed=True), autocast)
    norms, sums, dtypes = measured(engine, case)
    assert dtypes == {torch.float32}
    assert max(apart((norms, sums), oracle(case_of(small())))) < 0.02


# Dropout


@pytest.mark.parametrize("checkpointed", [False, True])
@fast
def test_dropout_is_replayed(engine, checkpointed):
    """Bit by bit: by the first call, which fills the cache, and by those after it; and it is dropout."""
    case = case_of(small(train=True, dropout=0.5, checkpointed=checkpointed))
    run = MAKE[engine]()

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


@fast
def test_dropout_differs_between_samples_and_fits_its_loss(engine):
    """The gradient belongs to the mask that the loss saw: for a loss `m * w`, it is the loss itself at w = 1."""
    params = {"w": torch.ones(64)}
    loss_fn = lambda p, x: F.dropout(x * p["w"], 0.5).sum(1)
    result = MAKE[engine]()(loss_fn, params, torch.ones(B, 64))
    sums = result.weighted_sum({"w": torch.tensor([1.0, 0.0, 0.0, 0.0])})
    assert len(set(result.losses_B.tolist())) > 1
    assert float(sums["w"].sum()) == pytest.approx(float(result.losses_B[0]))
    assert torch.allclose(result.sq_norms()["w"], 2 * result.losses_B)


@pytest.mark.parametrize("checkpointed", [False, True])
@fast
def test_checkpointed_dropout_has_one_mask(engine, checkpointed):
    """The repeated forward pass draws the mask of the first: sums and norms are those of one function."""
    params = {"w": torch.ones(64)}
    part = lambda p, x: F.dropout(x * p["w"], 0.5)
    run = (lambda f, p, x: checkpoint(f, p, x, use_reentrant=False)) if checkpointed else (lambda f, p, x: f(p, x))
    result = MAKE[engine]()(lambda p, x: run(part, p, x).sum(1), params, torch.ones(B, 64))
    sums = result.weighted_sum({"w": torch.tensor([0.0, 0.0, 0.0, 1.0])})
    assert float(sums["w"].sum()) == pytest.approx(float(result.losses_B[3]))


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
    """The same tensors in the same places, with the same values, no hooks, no gradients; also after an error."""
    module = small(checkpointed=checkpointed)
    before, case = state_of(module), case_of(module)
    values = {name: param.clone() for name, param in case.params.items()}
    loss_fn = FAILURES[failure](case.loss_fn)
    with nullcontext() if failure == "none" else pytest.raises(Failing):
        result = MAKE[engine]()(loss_fn, case.params, case.batch)
        result.sq_norms()
        result.weighted_sum(dict.fromkeys(case.params, torch.ones(B)))
    after = state_of(module)
    assert before[:2] == after[:2]
    assert all(torch.equal(value, after[2][name]) for name, value in before[2].items())
    assert all(param.grad is None for param in module.parameters())
    assert all(torch.equal(value, case.params[name]) for name, value in values.items())
    assert not any(param.requires_grad for param in case.params.values())
    assert torch.equal(module(case.batch["ids"]), small()(case.batch["ids"]))


@pytest.mark.parametrize("failure", ["forward", "backward"])
@fast
def test_an_engine_works_after_an_error(engine, failure):
    run, case = MAKE[engine](), case_of(small(torch.float64))
    with pytest.raises(Failing):
        run(FAILURES[failure](case.loss_fn), case.params, case.batch)
    found = differences(run, case, truth_of(case))
    assert all(value < 1e-10 for value in found.values())


@fast
def test_a_ghost_whose_sums_are_not_taken_leaves_nothing(engine):
    """Norms only, then the model is used for something else."""
    module = small()
    before, case = state_of(module), case_of(module)
    MAKE[engine]()(case.loss_fn, case.params, case.batch).sq_norms()
    assert state_of(module)[:2] == before[:2]


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("exponent", [14, 16, 18])
def test_small_inputs_beside_large_factors_are_no_doubt(engine, layer, exponent):
    """What is lost in their squares is measured again, and the norm is that of the sample alone."""
    make, shape = LAYERS[layer]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = make(), torch.randn(3, *shape) * 10.0**-exponent
    forward, params = functionalize(module)

    def loss_fn(params, batch):
        return forward(params, batch).flatten(1).sum(1) * 10.0**exponent

    _, unreleased = clipped_grad(loss_fn, params, x, clipping.Flat(1.0), engine=MAKE[engine]())
    _, expected = clipped_grad(loss_fn, params, x, clipping.Flat(1.0), engine=MAKE["loop"]())
    torch.testing.assert_close(unreleased.norms_BG, expected.norms_BG, rtol=1e-4, atol=0)
