"""Every engine against the loop over single samples, on every model. A new engine or model is a new line."""

from __future__ import annotations

import pytest
import torch
from devices import devices
from models import CASES, build
from reference import loop_clipped_sum, loop_gradients

from dpfunc import clipping
from dpfunc import engines as engines_module
from dpfunc.clipped import clipped_grad, make_clipped_grad
from dpfunc.clipping.bounds import SLACK
from dpfunc.engines import auto, bookkeeping, ghost, loop, vmap, vmap_grad
from dpfunc.errors import UnsupportedModel

ENGINES = {
    "vmap": vmap(),
    "vmap in chunks": vmap(chunk_size=2),
    "loop": loop(),
    "bookkeeping": bookkeeping(),
    "ghost": ghost(),
    "auto": auto(),
    "vmap_grad": vmap_grad(),
    "vmap_grad without rules": vmap_grad(rules=False),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

engines = pytest.mark.parametrize("engine", ENGINES)
models = pytest.mark.parametrize("name", CASES)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def gradients(engine, case):
    """Losses, squared norms and gradients of each sample; those of an engine without gradients as sums with factor 1."""
    per_sample = engine(case.loss_fn, case.params, case.batch)
    if hasattr(per_sample, "grads"):
        grads = {name: grad.dense() for name, grad in per_sample.grads.items()}
        return per_sample.losses_B, per_sample.sq_norms(), grads
    rows = []
    for one in torch.eye(len(per_sample.losses_B), dtype=torch.float64):
        again = engine(case.loss_fn, case.params, case.batch)
        rows.append(again.weighted_sum(dict.fromkeys(case.params, one.to(next(iter(case.params.values())).dtype))))
    grads = {name: torch.stack([row[name] for row in rows]) for name in case.params}
    return per_sample.losses_B, per_sample.sq_norms(), grads


@devices
@engines
@models
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_gradients_equal_the_loop(engine, name, dtype, device):
    case = build(name, dtype=dtype, device=device)
    losses_B, sq_norms, grads_B = gradients(ENGINES[engine], case)
    truth = loop_gradients(case.loss_fn, case.params, case.batch)
    losses = torch.stack([loss for loss, _ in truth])
    assert relative(losses_B, losses) < TOLERANCE[dtype]
    largest = max(float(g.double().norm()) for _, grads in truth for g in grads.values())
    for param in case.params:
        got, expected = grads_B[param], torch.stack([grads[param] for _, grads in truth])
        assert (got.double() - expected.double()).norm() < TOLERANCE[dtype] * largest, param
        assert (
            relative(sq_norms[param], expected.double().flatten(1).square().sum(1)) < (10 * TOLERANCE[dtype])
            or expected.norm() < TOLERANCE[dtype] * largest
        )


@engines
@models
def test_no_graph_is_left(engine, name):
    """Parameters that are not trained may require gradients; nothing is recorded for them."""
    case = build(name)
    per_sample = ENGINES[engine](case.loss_fn, case.params, case.batch)
    assert not per_sample.losses_B.requires_grad
    sums = per_sample.weighted_sum(dict.fromkeys(case.params, torch.ones(len(per_sample.losses_B))))
    assert not any(value.requires_grad for value in sums.values())


@devices
@engines
@models
def test_clipped_sums_equal_the_loop(engine, name, device):
    case = build(name, size=7, dtype=torch.float64, device=device)
    group_of = dict.fromkeys(case.params, "all")
    flat = lambda n, c: c / max(n, c)
    bound = 0.5
    expected = loop_clipped_sum(case.loss_fn, case.params, case.batch, flat, group_of, {"all": bound * (1 - SLACK)})
    got, _ = clipped_grad(
        case.loss_fn, case.params, case.batch, clipping.Flat(bound), engine=ENGINES[engine], microbatch_size=3
    )
    for param in case.params:
        assert torch.allclose(got.sums[param], expected[param], atol=1e-10), param


COMPILED = [
    ("vmap", "mlp"),
    ("vmap", "transformer LoRA"),
    ("bookkeeping", "mlp"),
    ("bookkeeping", "cnn"),
    ("bookkeeping", "transformer LoRA"),
    ("bookkeeping", "tied weights"),
    ("auto", "GPT-2 full, tied"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), COMPILED)
def test_compiled_equals_eager(engine, name):
    """The whole clipped sum in one graph, with a last microbatch that is padded."""
    torch._dynamo.reset()  # it counts compilations of one code object over all tests
    case = build(name, size=5)
    prepared = getattr(engines_module, engine)()
    compiled = make_clipped_grad(case.loss_fn, clipping.Flat(0.5), engine=prepared, microbatch_size=3, compile=True)
    got, _ = compiled(case.params, case.batch)
    expected, _ = clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(0.5))
    for param in case.params:
        assert torch.allclose(got.sums[param], expected.sums[param], atol=1e-5), param


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_one_compilation_serves_all_steps(engine):
    """New batches and new parameters, whole microbatches and padded ones."""
    torch._dynamo.reset()
    case = build("mlp", size=5)
    prepared = getattr(engines_module, engine)()
    compiled = make_clipped_grad(case.loss_fn, clipping.Flat(0.5), engine=prepared, microbatch_size=3, compile=True)
    compiled(case.params, case.batch)
    with torch.compiler.set_stance("fail_on_recompile"):
        for scale in (1.1, 1.2):
            params = {name: scale * param for name, param in case.params.items()}
            batch = {name: value.clone() for name, value in case.batch.items()}
            got, _ = compiled(params, batch)
            expected, _ = clipped_grad(case.loss_fn, params, batch, clipping.Flat(0.5))
            for param in params:
                assert torch.allclose(got.sums[param], expected.sums[param], atol=1e-5), param


def test_the_ghost_engine_is_not_compiled():
    case = build("mlp")
    compiled = make_clipped_grad(case.loss_fn, clipping.Flat(0.5), engine=ghost(), microbatch_size=3, compile=True)
    with pytest.raises(UnsupportedModel, match='engine="bookkeeping"'):
        compiled(case.params, case.batch)


@engines
@models
@pytest.mark.parametrize("microbatch_size", [1, 2, "auto"])
def test_microbatches_change_nothing(engine, name, microbatch_size):
    case = build(name, size=5, dtype=torch.float64)
    options = {"engine": ENGINES[engine]}
    whole, _ = clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(0.5), **options)
    parts, _ = clipped_grad(
        case.loss_fn, case.params, case.batch, clipping.Flat(0.5), microbatch_size=microbatch_size, **options
    )
    for param in case.params:
        assert torch.allclose(whole.sums[param], parts.sums[param], atol=1e-10), param


@models
def test_every_trained_parameter_gets_a_gradient(name):
    """Nothing is silently left out."""
    case = build(name)
    norms = vmap()(case.loss_fn, case.params, case.batch).sq_norms()
    zero = [param for param, value in norms.items() if not (value > 0).any()]
    assert zero == [] or all("position_embeddings" in param or "key" in param for param in zero)


def test_token_mean_depends_on_the_sample_alone():
    """The norm of a sample's gradient does not depend on how long the others are."""
    case = build("GPT-2 full, tied", size=4)
    together = vmap()(case.loss_fn, case.params, case.batch).sq_norms()["transformer.wte.weight"]
    alone = [
        vmap()(case.loss_fn, case.params, {k: v[i : i + 1] for k, v in case.batch.items()}).sq_norms()[
            "transformer.wte.weight"
        ]
        for i in range(4)
    ]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-5)


def test_dropout_is_replayed_by_key():
    from dpfunc.rng import insecure_key

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).train()
    from dpfunc.functional import functionalize

    forward, params = functionalize(model)
    batch = torch.randn(6, 4)
    loss_fn = lambda p, b: forward(p, b).square().sum(1)
    state = torch.random.get_rng_state()
    sums = [
        clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), microbatch_size=4, key=insecure_key(seed))[0].sums
        for seed in (1, 1, 2)
    ]
    assert torch.equal(sums[0]["0.weight"], sums[1]["0.weight"])
    assert not torch.equal(sums[0]["0.weight"], sums[2]["0.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is as it was


def test_dropout_masks_differ_between_samples():
    model = torch.nn.Dropout(0.5).train()
    losses = vmap()(lambda p, b: (model(b) * p["w"]).sum(1), {"w": torch.ones(64)}, torch.ones(4, 64)).losses_B
    assert len(set(losses.tolist())) > 1


UNSUPPORTED = {
    "gradient checkpointing": (
        lambda p, b: torch.utils.checkpoint.checkpoint(lambda x: x * p["w"], b, use_reentrant=False).sum(1),
        "gradient checkpointing",
    ),
    "branch on a value": (lambda p, b: (b * p["w"]).sum(1) * (1 if (b > 0).all() else 2), "attn_implementation"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_torch_cannot_do_is_explained(name):
    import torch.utils.checkpoint

    loss_fn, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModel, match=message):
        vmap()(loss_fn, {"w": torch.ones(3)}, torch.ones(2, 3))
