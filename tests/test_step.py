"""dp_step: scale of the noise, budget, states that work once, bad input that spends nothing."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from cases import as_batch, flat, linear_loss, params, random_rows
from scipy import stats
from torch.nn import functional as F

from dpfunc import Journal, Ledger, Plan, clipping, make_dp_step, sampling, secure_key, take
from dpfunc.accounting import Event
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.errors import (
    BudgetExhausted,
    InvalidArgument,
    LedgerConflict,
    NoGradientWarning,
    NoiseWarning,
    SamplingMismatch,
    StateReused,
    UnsupportedModel,
)
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.types import Schedule

DATA = as_batch(random_rows(0, 100))


def plan(**changes):
    values = {
        "sampler": sampling.Poisson(100, 0.2),
        "clip": clipping.Flat(clip_norm=1.0),
        "noise_multiplier": 1.0,
        "num_steps": 5,
        "delta": 1e-3,
    }
    return Plan(**{**values, **changes})


def run(the_plan, key=None, steps=None, **options):
    dp_step = make_dp_step(linear_loss, the_plan, **options)
    state = dp_step.init(params(), key or secure_key())
    released = []
    for indices in the_plan.batches(state):
        grads, state, _ = dp_step(params(), take(DATA, indices), state)
        released.append(grads)
        if steps is not None and len(released) == steps:
            break
    return released, state


def noise_only(noise_multiplier, clip_norm, adjacency="add_remove", groups=None, repeats=40):
    """Released values of empty batches, undivided: the noise and nothing else."""
    clip = clipping.Flat(clip_norm, groups=groups or clipping.AllParameters())
    wide = {name: torch.zeros(50, *p.shape) for name, p in params().items()}
    the_plan = plan(clip=clip, noise_multiplier=noise_multiplier, adjacency=adjacency, num_steps=repeats)
    dp_step = make_dp_step(linear_loss, the_plan, reduction="sum", verify_batch=False)
    state = allow_repeat(dp_step.init(wide, insecure_key(41)))
    empty = {name: torch.zeros(0, *p.shape) for name, p in wide.items()}
    values = []
    for _ in range(repeats):
        grads, state, _ = dp_step(wide, empty, state)
        values.append(flat(grads))
    return torch.cat(values)


def variance_accepts(values, std, level=1e-6):
    """Two-sided chi-square test of the standard deviation."""
    statistic = float(values.square().sum()) / std**2
    tail = stats.chi2.cdf(statistic, len(values))
    return level < tail < 1 - level


@pytest.mark.parametrize(
    ("adjacency", "groups", "expected"),
    [
        ("add_remove", None, 0.7 * 1.5),
        ("zero_out", None, 0.7 * 1.5),
        ("replace_one", None, 0.7 * 3.0),
        ("add_remove", clipping.PerLayer(), 0.7 * 1.5),
    ],
)
def test_noise_scale(adjacency, groups, expected):
    """std = noise_multiplier * sensitivity, and neither 0.9 nor 1.1 of it."""
    values = noise_only(0.7, 1.5, adjacency, groups)
    assert variance_accepts(values, expected)
    assert not variance_accepts(values, 0.9 * expected)
    assert not variance_accepts(values, 1.1 * expected)


def test_noise_follows_the_bound_of_each_plan():
    """A smaller bound means less noise *and* shorter gradients: they come from the same value."""
    for bound in (1.0, 0.001):
        assert variance_accepts(noise_only(1.0, bound), bound)
        grads, _, _ = make_dp_step(
            linear_loss, plan(clip=clipping.Flat(bound), noise_multiplier=1e-6), reduction="sum"
        )(params(), take(DATA, torch.arange(1)))
        assert 0 < float(flat(grads).norm()) <= bound * 1.01


def test_divided_by_the_expected_size_after_the_noise():
    """Released = (sum + noise) / (q n), whatever the size of the drawn batch; the noise is that of the sum."""
    key = insecure_key(17)
    mean, _ = run(plan(), key, steps=1)
    total, _ = run_again(plan(), key, reduction="sum")
    assert torch.allclose(flat(mean[0]) * 20.0, flat(total[0]), rtol=1e-5)


def run_again(the_plan, key, **options):
    dp_step = make_dp_step(linear_loss, the_plan, **options)
    state = allow_repeat(dp_step.init(params(), key))
    indices = next(iter(the_plan.batches(state)))
    grads, state, _ = dp_step(params(), take(DATA, indices), state)
    return [grads], state


def test_budget():
    """The plan's steps are taken, the next one is refused before anything is spent."""
    the_plan = plan()
    _, state = run(the_plan)
    before = state.ledger
    with pytest.raises(BudgetExhausted, match=r"the plan's 5 steps are taken. Spent epsilon=.*The step was not taken"):
        make_dp_step(linear_loss, the_plan, verify_batch=False)(params(), take(DATA, torch.arange(3)), state)
    assert state.ledger == before


def test_budget_with_an_earlier_phase():
    """What earlier phases spent counts: the run ends within the budget, and one step more would not be."""
    phase = Ledger((Event(0.2, 1.0, 30),))
    budget = 1.001 * phase.record(Event(0.2, 1.0, 15)).epsilon(1e-3).epsilon
    the_plan = plan(num_steps=40, epsilon=budget)
    dp_step = make_dp_step(linear_loss, the_plan)
    state = dp_step.init(params(), secure_key(), ledger=phase)
    assert state.limit == 15
    for indices in the_plan.batches(state):
        _, state, _ = dp_step(params(), take(DATA, indices), state)
    assert state.ledger.epsilon(1e-3).epsilon <= budget
    assert state.ledger.record(Event(0.2, 1.0, 1)).epsilon(1e-3).epsilon > budget
    with pytest.raises(BudgetExhausted, match="another step would exceed epsilon="):
        dp_step(params(), take(DATA, torch.arange(3)), state)


def test_state_reuse():
    the_plan = plan()
    dp_step = make_dp_step(linear_loss, the_plan)
    state = dp_step.init(params(), secure_key())
    batch = take(DATA, next(the_plan.batches(state)))
    _, after, _ = dp_step(params(), batch, state)
    with pytest.raises(StateReused, match=r"grads, state, unreleased = dp_step\(params, batch, state\)   # right"):
        dp_step(params(), batch, state)
    other = make_dp_step(linear_loss, the_plan)  # another function does not help
    with pytest.raises(StateReused, match="Step 0 of this run was already released"):
        other(params(), batch, state)
    dp_step(params(), take(DATA, next(the_plan.batches(after))), after)
    with pytest.raises(StateReused, match="a key that was used for an earlier run"):
        run(the_plan, state.key, steps=1)


def test_batch_that_was_not_drawn():
    the_plan = plan()
    dp_step = make_dp_step(linear_loss, the_plan)
    state = dp_step.init(params(), secure_key())
    drawn = len(next(the_plan.batches(state)))
    for number, told in ((drawn + 1, "more"), (drawn - 1, "fewer")):  # also one that dropped some; no size is said
        with pytest.raises(SamplingMismatch, match=f"for step 0, got one with {told} samples.*Nothing was spent"):
            dp_step(params(), take(DATA, torch.arange(number)), state)
    dp_step(params(), take(DATA, next(the_plan.batches(state))), state)  # the state is still good


def test_padded_batch():
    the_plan = plan()
    key = insecure_key(400)
    (expected,), _ = run_again(the_plan, key)
    dp_step = make_dp_step(linear_loss, the_plan)
    state = allow_repeat(dp_step.init(params(), key))
    batch = take(DATA, next(the_plan.batches(state)))
    size = len(next(iter(batch.values())))
    padded = {
        name: torch.cat([v, torch.full_like(v[:1], math.nan).expand(7, *v.shape[1:])]) for name, v in batch.items()
    }
    grads, _, unreleased = dp_step(params(), padded, state, mask_B=torch.arange(size + 7) < size)
    assert torch.allclose(flat(grads), flat(expected), atol=1e-6)
    assert len(unreleased.losses_B) == size


def test_empty_batch_is_a_step_that_costs():
    the_plan = plan(sampler=sampling.Poisson(100, 1e-9))
    dp_step = make_dp_step(linear_loss, the_plan)
    state = dp_step.init(params(), secure_key())
    (indices, *_) = the_plan.batches(state)
    grads, state, _ = dp_step(params(), take(DATA, indices), state)
    assert len(indices) == 0
    assert (flat(grads) != 0).all()
    assert state.ledger.num_steps == 1


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_a_sum_that_is_not_finite_is_refused(tmp_path, engine):
    """One sample with 1e36 beside 1e-44: its gradient is bounded, and would be NaN in a fast engine."""
    data = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weights = {"w": torch.zeros(64, 64)}
    the_plan = plan(sampler=sampling.Poisson(4, 1.0), clip=clipping.auto_v(1.0))
    journal = Journal(tmp_path / "journal.jsonl", the_plan)

    def loss_fn(params, batch):
        return (torch.nn.functional.linear(batch["x"], params["w"]) * batch["scale"]).sum(1)

    def batch(small, large):
        share, scale = torch.ones(4, 1), torch.ones(4, 1)
        share[0], scale[0] = small, large
        return {"x": data * share, "scale": scale}

    dp_step = make_dp_step(loss_fn, the_plan, engine=engine, journal=journal)
    state = dp_step.init(weights, secure_key())
    _, state, _ = dp_step(weights, batch(1.0, 1.0), state)
    if engine == "vmap":  # forms the gradients first
        grads, state, _ = dp_step(weights, batch(1e-44, 1e36), state)
        assert torch.isfinite(grads["w"]).all()
    else:
        with pytest.raises(InvalidArgument, match="finite sums of clipped gradients, got NaN or inf in w. A sample"):
            dp_step(weights, batch(1e-44, 1e36), state)
        assert journal_ledger(journal.path).num_steps == 1
    assert dp_step(weights, batch(1.0, 1.0), state).state.step > state.step


def test_without_a_state_each_call_is_a_run_of_its_own():
    dp_step = make_dp_step(linear_loss, plan())
    with pytest.raises(InvalidArgument, match="dtype"):
        dp_step(params(torch.long), take(DATA, torch.arange(4)))  # releases nothing, and is no run
    grads, state, _ = dp_step(params(), take(DATA, torch.arange(4)))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="Each such call is a run of its own.*Nothing was spent"):
            dp_step(params(), take(DATA, torch.arange(4)))
    other, _, _ = make_dp_step(linear_loss, plan())(params(), take(DATA, torch.arange(4)))
    assert not torch.allclose(flat(grads), flat(other))
    with pytest.raises(BudgetExhausted, match="a call without a state is a run of one step"):
        dp_step(params(), take(DATA, torch.arange(4)), state)


@pytest.mark.parametrize("noise", [1.0, Schedule(((1, 2.0), (4, 1.0)))], ids=["constant", "schedule"])
def test_a_batch_that_nobody_drew_claims_no_amplification(tmp_path, noise):
    """The ledger and the journal say the same; the batch sampler's event is for batches that it drew."""
    the_plan = plan(noise_multiplier=noise)
    journal = Journal(tmp_path / "journal.jsonl", the_plan)
    batch = take(DATA, torch.arange(4))
    _, state, _ = make_dp_step(linear_loss, the_plan, journal=journal)(params(), batch)
    sigma = 2.0 if isinstance(noise, Schedule) else noise
    assert state.ledger == Ledger((Event(1.0, sigma, 1),)) == journal_ledger(journal.path)
    elsewhere = make_dp_step(linear_loss, the_plan, verify_batch=False)  # whose claim it is that the law is the plan's
    _, state, _ = elsewhere(params(), batch, elsewhere.init(params(), secure_key()))
    assert state.ledger == Ledger((Event(0.2, sigma, 1),))


@pytest.mark.parametrize("spent", [Ledger(), Ledger((Event(0.1, 1.0, 200),))], ids=["alone", "with an earlier phase"])
def test_a_batch_that_nobody_drew_keeps_to_the_budget(spent):
    cost = spent.compose(Ledger((Event(1.0, 4.0, 1),))).epsilon(1e-3).epsilon
    drawn = spent.compose(Ledger((Event(0.2, 4.0, 1),))).epsilon(1e-3).epsilon
    options = {"noise_multiplier": 4.0, "num_steps": 1, "spent": spent}
    tight = make_dp_step(linear_loss, plan(epsilon=(cost + drawn) / 2, **options))
    with pytest.raises(BudgetExhausted, match="nobody drew its batch"):
        tight(params(), take(DATA, torch.arange(4)))
    wide = make_dp_step(linear_loss, plan(epsilon=cost * 1.001, **options))
    assert wide(params(), take(DATA, torch.arange(4))).state.ledger == spent.compose(Ledger((Event(1.0, 4.0, 1),)))


def test_a_run_begins_with_what_its_plan_counts():
    """The noise was chosen for both: a record of the second phase alone would say less than was spent."""
    spent = Ledger((Event(0.2, 2.0, 5),))
    the_plan = Plan.for_budget(
        epsilon=3.0, delta=1e-3, dataset_size=500, expected_batch_size=100, num_steps=3, clip=plan().clip, spent=spent
    )
    init = make_dp_step(linear_loss, the_plan).init
    later = spent.compose(Ledger((Event(0.2, 3.0, 1),)))
    assert init(params(), secure_key()).ledger == spent
    assert init(params(), secure_key(), later).ledger == later
    for less in (Ledger(), Ledger((Event(0.2, 2.0, 4), Event(0.2, 2.1, 9)))):
        with pytest.raises(LedgerConflict, match="the 5 steps that the plan counts as spent, got one that lacks"):
            init(params(), secure_key(), less)


class OfNoSizeLater(sampling.Poisson):
    """A sampler of a user, which divides by zero in its second step."""

    def expected_batch_size(self, step):
        return super().expected_batch_size(step) if step == 0 else 0.0


def test_a_step_that_would_divide_by_zero_is_not_spent(tmp_path):
    the_plan = plan(sampler=OfNoSizeLater(100, 0.2))
    written = []
    with pytest.raises(InvalidArgument, match="Expected 0 < expected_batch_size of the sampler < inf, got"):
        run(the_plan, journal=written.append)
    assert [state.step for state in written] == [1]


def test_types_of_parameters():
    """What is released has that of the parameters; in float16, gradients beyond 65504 would be infinite and count as zero."""
    batch = {name: value.bfloat16() for name, value in take(DATA, torch.arange(4)).items()}
    grads, _, _ = make_dp_step(linear_loss, plan())(params(torch.bfloat16), batch)
    assert all(value.dtype == torch.bfloat16 for value in grads.values())
    with pytest.raises(InvalidArgument, match="in torch.float16. Large gradients are infinite"):
        make_dp_step(linear_loss, plan()).init(params(torch.float16), secure_key())


TWO_RATES = sampling.Poisson(100, Schedule(((2, 0.1), (3, 0.3))))
TWO_SCALES = Schedule(((3, 2.0), (2, 1.0)))
CHARGED = {
    "one rate and one scale": ({}, Ledger((Event(0.2, 1.0, 5),))),
    "schedules of noise and sampling": (
        {"sampler": TWO_RATES, "noise_multiplier": TWO_SCALES},
        Ledger((Event(0.1, 2.0, 2), Event(0.3, 2.0, 1), Event(0.3, 1.0, 2))),
    ),
    "two shuffled epochs of three steps": (  # claim no amplification
        {"sampler": sampling.Shuffled(100, 40), "adjacency": "zero_out", "num_steps": 6},
        Ledger((Event(1.0, 1.0, 2),), "zero_out"),
    ),
}


@pytest.mark.parametrize("name", CHARGED)
def test_what_a_run_costs(name):
    changes, expected = CHARGED[name]
    the_plan = plan(**changes)
    released, state = run(the_plan)
    assert state.ledger == the_plan.ledger() == expected
    assert state.step == state.charged == len(released) == the_plan.num_steps
    assert {name: g.shape for name, g in released[0].items()} == {name: p.shape for name, p in params().items()}


def test_journal_is_written_before_release_and_its_failure_stops_it():
    seen = []
    the_plan = plan()
    dp_step = make_dp_step(linear_loss, the_plan, journal=seen.append)
    state = dp_step.init(params(), secure_key())
    batch = take(DATA, next(the_plan.batches(state)))
    dp_step(params(), batch, state)
    assert [after.step for after in seen] == [1]

    def full(after):
        raise OSError("no space left on device")

    broken = make_dp_step(linear_loss, the_plan, journal=full)
    state = broken.init(params(), secure_key())
    batch = take(DATA, next(the_plan.batches(state)))
    with pytest.raises(OSError, match="no space"):
        broken(params(), batch, state)
    make_dp_step(linear_loss, the_plan)(params(), batch, state)  # nothing was released, so the state is good


def mean_loss(params, batch):
    return linear_loss(params, batch).mean()


GOOD = take(DATA, torch.arange(4))


def nested(rows, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(1 + row) for row in range(rows)], **options)


BAD_STEPS = {
    "scalar loss": (mean_loss, params(), GOOD, r'Expected loss_fn to return shape \(1,\).*got \(\): a step calls it with each row as a batch of one.*reduction="none"'),
    "scalar loss of rows alone": (mean_loss, params(), GOOD, r"return shape \(1,\), got \(\): a step calls it with each row as a batch of one"),
    "loss of wrong length": (
        lambda p, b: linear_loss(p, b).repeat(2), params(), GOOD, r"loss_fn to return shape \(1,\).*got \(2,\)",
    ),
    "loss that is no tensor": (lambda p, b: 1.0, params(), GOOD, "Expected loss_fn to return a tensor, got float"),
    "integer loss": (lambda p, b: linear_loss(p, b).long(), params(), GOOD, "floating dtype, got torch.int64"),
    "loss without gradient": (
        lambda p, b: b["head.weight"].flatten(1).sum(1), params(), GOOD, "Expected loss_fn to depend on params",
    ),
    "detached loss": (lambda p, b: linear_loss(p, b).detach(), params(), GOOD, "Expected loss_fn to depend on params"),
    "leaves disagree": (
        linear_loss, params(), {**GOOD, "head.weight": GOOD["head.weight"][:3]}, r"same number of samples on axis 0[^0-9]* batch\['head.weight'\]\. ",
    ),
    "0-d leaf": (linear_loss, params(), {**GOOD, "t": torch.tensor(1.0)}, r"batch\['t'\].*0-dimensional"),
    "sparse leaf": (linear_loss, params(), {**GOOD, "t": torch.eye(4).to_sparse()}, r"dense tensor, got batch\['t'\], one of layout"),
    "nested leaf": (linear_loss, params(), {**GOOD, "t": nested(2)}, r"dense tensor, got batch\['t'\], a nested tensor"),
    "jagged leaf": (linear_loss, params(), {**GOOD, "t": nested(2, layout=torch.jagged)}, r"dense tensor, got batch\['t'\], a nested"),
    "leaf that is no tensor": (linear_loss, params(), {**GOOD, "t": [1.0]}, r"batch\['t'\]\[0\] of type float.*with one row a record.*loss_fn reads beside the batch is not clipped"),
    "empty pytree": (linear_loss, params(), {}, "at least one tensor"),
    "NaN parameter": (
        linear_loss, {**params(), "head.weight": torch.full((4,), math.nan)}, GOOD, "NaN or inf in head.weight",
    ),
    "integer parameter": (
        linear_loss, {**params(), "head.weight": torch.zeros(4, dtype=torch.long)}, GOOD,
        r"Expected params\['head.weight'\] to have a floating dtype, got torch.int64",
    ),
    "complex parameter": (
        linear_loss, {**params(), "head.weight": torch.zeros(4, dtype=torch.complex64)}, GOOD,
        r"floating dtype, got torch.complex64. .*torch.view_as_real\(weight\).*torch.view_as_complex",
    ),
    "float16 parameter": (
        linear_loss, {**params(), "head.weight": torch.zeros(4, dtype=torch.float16)}, GOOD,
        "in float32, bfloat16 or float64, got 'head.weight' in torch.float16",
    ),
    "sparse parameter": (linear_loss, {**params(), "t": torch.eye(4).to_sparse()}, GOOD, r"params\['t'\] to be a dense tensor.* of layout torch.sparse_coo"),
    "parameter without numbers": (linear_loss, {**params(), "t": torch.zeros(4, device="meta")}, GOOD, "has numbers.* on meta"),
    "parameter of inference_mode": (
        linear_loss, {**params(), "t": torch.inference_mode()(torch.zeros)(4)}, GOOD, "Leave inference_mode before the step",
    ),
    "no parameters": (linear_loss, {}, GOOD, "Expected at least one parameter"),
    "params that are no mapping": (linear_loss, list(params().values()), GOOD, "mapping name -> tensor, got list"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_input(name):
    """A clear error, nothing spent, and the state still works."""
    loss_fn, bad_params, batch, message = BAD_STEPS[name]
    the_plan = plan()
    dp_step = make_dp_step(
        loss_fn, the_plan, engine="loop" if name.endswith("rows alone") else "auto", verify_batch=False
    )
    state = dp_step.init(params(), secure_key())
    with pytest.raises(InvalidArgument, match=message):
        dp_step(bad_params, batch, state)
    after = make_dp_step(linear_loss, the_plan, verify_batch=False)(params(), GOOD, state).state
    assert after.ledger.num_steps == 1


BAD_MAKES = {
    "plan": ({"plan": "plan"}, "Expected plan to be a dpfunc.Plan"),
    "engine": (
        {"engine": "bookkeeping"},
        "Expected engine to be one of 'auto', 'ghost', 'vmap', 'loop', 'captured', got engine='bookkeeping'",
    ),
    "ranks": ({"ranks": 2}, "Expected ranks made by dpfunc.distributed.data_parallel"),
    "microbatch_size": ({"microbatch_size": 0}, "Expected an integer microbatch_size >= 1, got microbatch_size=0"),
    "reduction": ({"reduction": "avg"}, "Expected reduction to be one of 'mean', 'sum'"),
    "noise_source": ({"noise_source": "torch"}, "Expected noise_source to be one of 'secure', 'device'"),
    "journal": ({"journal": "file"}, "Expected journal to be dpfunc.Journal"),
}


@pytest.mark.parametrize("name", BAD_MAKES)
def test_bad_make(name):
    options, message = BAD_MAKES[name]
    with pytest.raises(InvalidArgument, match=message):
        make_dp_step(linear_loss, **{"plan": plan(), **options})


def test_misspelt_arguments_are_not_swallowed():
    with pytest.raises(TypeError, match="microbatchsize"):
        make_dp_step(linear_loss, plan(), microbatchsize=3)
    with pytest.raises(TypeError, match="noise_multipler"):
        Plan(sampling.Poisson(10, 0.1), clipping.Flat(1.0), noise_multipler=1.0, num_steps=1, delta=1e-3)


def test_bad_init():
    dp_step = make_dp_step(linear_loss, plan())
    with pytest.raises(InvalidArgument, match=r"Use dpfunc.secure_key"):
        dp_step.init(params(), 42)
    with pytest.raises(LedgerConflict, match=r"add_remove.*replace_one"):
        dp_step.init(params(), secure_key(), ledger=Ledger((), "replace_one"))
    with pytest.raises(InvalidArgument, match=r"Start with state = dp_step.init"):
        dp_step(params(), GOOD, "state")
    two = make_dp_step(linear_loss, plan(clip=clipping.Flat({"a": 1.0}, groups=clipping.PerLayer())))
    with pytest.raises(InvalidArgument, match="Expected clip_norm to name the groups"):
        two.init(params(), secure_key())


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_with_a_tensor_for_each_record_is_refused(kind):
    """Of fixed batches: a list of 4 tensors of 4 rows is read as 4 columns; a tuple says that it is meant."""
    the_plan = plan(sampler=sampling.FixedSize(100, 4), adjacency="zero_out")
    dp_step = make_dp_step(linear_loss, the_plan)
    state, batch = dp_step.init(params(), secure_key()), {**GOOD, "boxes": kind(torch.zeros(4, 2) for _ in range(4))}
    if kind is list:
        with pytest.raises(
            InvalidArgument, match=r"got batch\['boxes'\], a list of 4 tensors, in a batch of 4 records"
        ):
            dp_step(params(), batch, state)
    else:
        assert dp_step(params(), batch, state).state.step == 1


def test_processes_that_join_after_the_step_was_made_are_seen(monkeypatch):
    """Each would be a run of its own on the same data."""
    plan = Plan(sampling.Poisson(20, 0.5), clipping.Flat(1.0), 1.0, 3, 1e-2)
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    weights = {"w": torch.zeros(2)}
    state = dp_step.init(weights, secure_key())
    batch = torch.ones(20, 2)[next(iter(plan.batches(state)))]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 2)
    with pytest.raises(InvalidArgument, match="the process group has 2 processes"):
        dp_step(weights, batch, state)
    monkeypatch.undo()
    assert dp_step(weights, batch, state).state.step == 1


def spoilt(rows, bad):
    """Rows, the first of which have no finite gradient."""
    batch = take(DATA, torch.arange(rows))
    batch["head.weight"] = batch["head.weight"].clone()
    batch["head.weight"][:bad] = math.nan
    return batch


def lost_steps(batches, engine="auto"):
    """A step with each of these batches (rows, bad ones, mask); the warnings of each."""
    dp_step = make_dp_step(linear_loss, plan(num_steps=len(batches)), verify_batch=False, engine=engine)
    state, said = dp_step.init(params(), secure_key()), []
    for rows, bad, *mask_B in batches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            grads, state, _ = dp_step(
                params(), spoilt(rows, bad), state, mask_B=torch.tensor(*mask_B) if mask_B else None
            )
        assert torch.isfinite(flat(grads)).all()
        said.append([(each.category, each.filename) for each in caught])
    return said


LOST, NOTHING, SAID = (3, 3), [], [(NoGradientWarning, __file__)]
PADDED = (3, 2, [True, True, False])  # a row of padding does not save a step whose real rows are lost
LOST_RUNS = {
    "once, from the second one on": ([LOST, (3, 1), LOST, LOST], [NOTHING, NOTHING, SAID, NOTHING]),
    "half of the rows": ([(4, 2), (4, 1), (4, 2), (4, 2)], [NOTHING, NOTHING, SAID, NOTHING]),
    "others": ([(3, 1)] * 3 + [(0, 0)] * 3 + [LOST], [NOTHING] * 7),
    "padding has no gradient to miss": ([(3, 3, [False] * 3)] * 2 + [PADDED] * 2, [NOTHING] * 3 + [SAID]),
}


@pytest.mark.parametrize("name", LOST_RUNS)
def test_steps_without_a_finite_gradient_are_said(name):
    batches, expected = LOST_RUNS[name]
    for engine in ("auto", "ghost", "vmap", "loop") if name.startswith("once") else ("auto",):
        assert lost_steps(batches, engine) == expected, engine


def test_steps_whose_branches_leave_out_the_params_are_said():
    """A gradient of zero is right for LayerDrop, and is what a loss of the model's own parameters gives as well."""
    loss_fn = lambda p, b: (
        (b["head.weight"] * (p["head.weight"] if b["head.weight"].isnan().any() else 1)).flatten(1).sum(1)
    )
    dp_step = make_dp_step(loss_fn, plan(), verify_batch=False)
    _, state, _ = dp_step(params(), GOOD, dp_step.init(params(), secure_key()))
    with pytest.raises(NoGradientWarning, match="leaves out the params"):  # an error in tests
        dp_step(params(), GOOD, state)


def test_as_an_error_the_warning_costs_no_step():
    dp_step = make_dp_step(linear_loss, plan(), verify_batch=False)
    state = dp_step.init(params(), secure_key())
    _, state, _ = dp_step(params(), spoilt(3, 3), state)
    with pytest.raises(NoGradientWarning, match="computed from private data: it reveals this"):  # an error in tests
        dp_step(params(), spoilt(3, 3), state)
    assert dp_step(params(), spoilt(3, 0), state).state.step == 2


CLASS, FLAT_LABELS = torch.tensor([0, 1, 2, 7]), torch.tensor([0, 1, 2, 0])
OUT_OF_RANGE = {  # the loss of logits and labels; labels; a word of torch that stays
    "a class": (lambda z, y: F.cross_entropy(z, y, reduction="none"), CLASS, "out of bounds"),
    "below": (lambda z, y: F.cross_entropy(z, y, reduction="none"), CLASS - 1, "out of bounds"),
    "not whole": (lambda z, y: F.cross_entropy(z, y, reduction="none"), FLAT_LABELS.float(), "Float"),
    "int32": (lambda z, y: F.cross_entropy(z, y, reduction="none"), FLAT_LABELS.int(), "Int"),
    "a column": (lambda z, y: F.cross_entropy(z, y, reduction="none"), FLAT_LABELS[:, None], "multi-target"),
    "nll": (lambda z, y: F.nll_loss(z, y, reduction="none"), CLASS, "out of bounds"),
    "a margin": (lambda z, y: F.multi_margin_loss(z, y, reduction="none"), CLASS, "out of range"),
    "binary": (
        lambda z, y: F.binary_cross_entropy(torch.sigmoid(z[:, 0]), y, reduction="none"), CLASS.float(), "between",
    ),
    "one hot": (lambda z, y: (z - F.one_hot(y, 3)).square().sum(1), CLASS, "class"),
    "gathered": (lambda z, y: z.gather(1, y[:, None])[:, 0], CLASS, "out of bounds"),
    "an index": (lambda z, y: torch.eye(3)[y].sum(1) + z.sum(1), CLASS, "out of bounds"),
    "an id": (lambda z, y: F.embedding(y, torch.eye(3)).sum(1) + z.sum(1), CLASS, "out of range"),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_labels_out_of_range_are_told(name, engine):
    """In one message for all, without the label of a record; nothing is spent, and the next batch is taken."""
    loss, labels, word = OUT_OF_RANGE[name]
    the_plan = plan(sampler=sampling.Poisson(4, 1.0))
    loss_fn = lambda params, batch: loss(batch[0] @ params["w"], batch[1])
    dp_step, values = make_dp_step(loss_fn, the_plan, engine=engine), {"w": torch.ones(2, 3)}
    state = dp_step.init(values, secure_key())
    with pytest.raises(InvalidArgument, match=word) as caught:
        dp_step(values, (torch.ones(4, 2), labels), state)
    assert "batch[1]" in str(caught.value)
    assert "7" not in str(caught.value)
    if labels is CLASS:
        assert dp_step(values, (torch.ones(4, 2), FLAT_LABELS), state).state.step == 1


@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost", "loop"])
def test_parameters_that_the_loss_does_not_use_are_said(engine):
    """By name, before anything is spent; not where Python reads numbers of rows, by which others may use them."""
    values, the_plan = {"w": torch.ones(2), "idle": torch.ones(2)}, plan(sampler=sampling.Poisson(4, 1.0))
    data = torch.ones(4, 2)

    def step_of(loss_fn):
        dp_step = make_dp_step(loss_fn, the_plan, engine=engine)
        return dp_step, dp_step.init(values, secure_key())

    dp_step, state = step_of(lambda params, x: x @ params["w"])
    with pytest.raises(NoiseWarning, match="does not use .idle.*only noise"):
        dp_step(values, data, state)
    with pytest.warns(NoiseWarning, match="idle"):
        make_dp_step(lambda params, x: x @ params["w"], the_plan, engine=engine)(values, data, state)
    for uses in (
        lambda params, x: x @ (params["w"] + params["idle"]),
        lambda params, x: x @ (params["idle"] if float(x.sum()) > 5 else params["w"]),
    ):
        dp_step, state = step_of(uses)
        assert dp_step(values, data, state).state.step == 1


def test_data_that_are_shorter_than_the_plan_says_are_told():
    with pytest.raises(InvalidArgument, match="a tensor of fewer rows than the plan has records"):
        take({"x": torch.ones(3, 2)}, torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("indices", "given"),
    [(range(2), "range"), ([0, 1], "list"), (np.arange(2), "ndarray"), (1, "int"), (torch.tensor(1), "0 axes"),
     (torch.tensor([True, False, True]), "torch.bool"), (torch.tensor([0.0]), "float32"), (torch.zeros(1, 1).long(), "2 axes")],
    ids=str,
)  # fmt: skip
def test_rows_are_taken_by_a_tensor_of_whole_numbers(indices, given):
    with pytest.raises(InvalidArgument, match=f"a tensor of int64 with one axis, got .*{given}"):
        take({"x": torch.ones(3, 2)}, indices)


def test_errors_of_the_loss_itself_come_through():
    def loss_fn(params, batch):
        raise RuntimeError("a file of mine")

    with pytest.raises((RuntimeError, UnsupportedModel), match="a file of mine"):
        make_dp_step(loss_fn, plan())(params(), as_batch(random_rows(3, 4)))
