"""Private telemetry: gradient and statistics of a record are clipped together, and cost what the gradient costs."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import GROUPINGS, RULES, as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_cases import remembering
from scipy import stats

import dpfunc
from dpfunc import checkpoint, clipping, sampling
from dpfunc.checkpoint._format import plan_difference, plan_to_dict
from dpfunc.clipped import RULE_LEAF, make_clipped_grad
from dpfunc.clipping import Statistic, Telemetry
from dpfunc.clipping.telemetry import LEAF as _LEAF
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument, StateReused
from dpfunc.evidence import replay as replay_neighbours
from dpfunc.state import allow_repeat

EVERY = (
    Statistic("loss", -1.0, 4.0), Statistic("clipped"), Statistic("norm", edges=(0.3, 1.0, 3.0)),
    Statistic("load", high=2.0, size=3), Statistic("value", high=1.0),
)  # fmt: skip
UNEQUAL = clipping.Flat({"body": 0.3, "head": 2.0}, GROUPINGS["mapping"])
EXTREME = torch.tensor([0.0, 1.0, -1.0, 1e30, -1e30, math.inf, -math.inf, math.nan])
some = settings(max_examples=6)  # for each of 35 pairs: 210 in all


def loss_with_aux(params, batch):
    rows = {name: value for name, value in batch.items() if name in params}
    return linear_loss(params, rows) + batch["value"], {"value": batch["value"], "load": batch["load"]}


def records(seed, size, scale=1.0):
    """Records with gradients of any length, and statistics of any kind: infinite, NaN, huge."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, len(EXTREME), (size, 4), generator=generator)
    values = torch.where(pick < 4, torch.randn(size, 4, generator=generator) * 3, EXTREME[pick])
    return {**as_batch(random_rows(seed, size, scale)), "value": values[:, 0], "load": values[:, 1:]}


PREPARED = {}
SHARED = {name: engine_of(name) for name in ENGINES}


def clipped_sum(rule, batch, share=0.2, statistics=EVERY, values=None, **options):
    """By one computation for all sums with the same options, as in a run."""
    made = make_clipped_grad(loss_with_aux, rule, telemetry=Telemetry(statistics, share), **options)
    prepared = PREPARED.setdefault((repr(rule), share, statistics, *options.items()), made)
    return prepared(params() if values is None else values, batch)[0]


def plan_of(statistics=EVERY, share=0.1, noise_multiplier=1.0, size=40, q=0.5, **changes):
    values = {"sampler": sampling.Poisson(size, q), "clip": clipping.Flat(1.0), "num_steps": 40, "delta": 1e-3}
    return dpfunc.Plan(
        **{**values, **changes}, noise_multiplier=noise_multiplier, telemetry=Telemetry(statistics, share)
    )


def steps_of(plan, batch, seed=0, loss=loss_with_aux, steps=None, **options):
    """What the steps of a run release: gradients, and statistics."""
    dp_step = dpfunc.make_dp_step(loss, plan, **options)
    state = allow_repeat(dp_step.init(params(), dpfunc.rng.insecure_key(seed)))
    for indices, _ in zip(plan.batches(state), range(steps or plan.num_steps), strict=False):
        grads, state, _ = dp_step(params(), dpfunc.take(batch, indices), state)
        yield grads, state


@pytest.mark.parametrize(
    ("engine", "microbatch_size"), [*((name, None) for name in ENGINES if name != "captured"), ("auto", 3)]
)
@pytest.mark.parametrize("rule_name", [*RULES, "unequal"])
@some
@given(
    seed=st.integers(0, 2**31), size=st.integers(1, 8), grouping=st.sampled_from(sorted(GROUPINGS)),
    share=st.sampled_from([1e-3, 0.2, 0.99]), scale=st.sampled_from([1e-6, 1.0, 1e12]), spoiled=st.booleans(),
)  # fmt: skip
def test_sensitivity(rule_name, engine, microbatch_size, seed, size, grouping, share, scale, spoiled):
    """One record moves the sums of gradients and statistics by at most the clip norm, or twice when replaced."""
    rule = UNEQUAL if rule_name == "unequal" else RULES[rule_name][0](1.0, GROUPINGS[grouping])
    whole = math.hypot(0.3, 2.0) if rule_name == "unequal" else 1.0
    batch = records(seed, size + 1, scale)
    if spoiled:
        batch["head.weight"][0] = math.nan  # then it moves nothing
    options = {"engine": SHARED[engine], "microbatch_size": microbatch_size, "share": share}
    rows = {"full": range(size), "removed": range(1, size), "replaced": [size, *range(1, size)]}
    found = {
        name: clipped_sum(
            rule, dpfunc.take(batch, torch.tensor(list(chosen), dtype=torch.int64)),
            adjacency="replace_one" if name == "replaced" else "add_remove", **options,
        )
        for name, chosen in rows.items()
    }  # fmt: skip
    full = flat(found["full"].sums)
    assert len(full) == sum(value.numel() for value in params().values()) + 10
    assert found["full"].sensitivity == pytest.approx(whole)
    assert found["replaced"].sensitivity == pytest.approx(2 * whole)
    removed = (full - flat(found["removed"].sums)).norm()
    assert removed <= (0.0 if spoiled and size == 1 else whole)
    assert (full - flat(found["replaced"].sums)).norm() <= 2 * whole


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_that_is_not_finite_moves_nothing(engine):
    """Neither by its gradient nor by its statistics."""
    batch = records(0, 5)
    batch["load"].zero_()
    batch["value"].fill_(0.5)
    batch["head.weight"][2] = math.nan
    with_it, without = (
        clipped_sum(clipping.Flat(1.0), dpfunc.take(batch, torch.tensor(chosen)), engine=engine_of(engine))
        for chosen in ([0, 1, 2, 3, 4], [0, 1, 3, 4])
    )
    assert torch.equal(flat(with_it.sums), flat(without.sums))
    assert torch.isfinite(flat(with_it.sums)).all()


def test_the_share_is_used_up():
    """The statistics reach C sqrt(share), the gradient C sqrt(1 - share): no bound is looser than it must be."""
    batch = {**as_batch(random_rows(0, 1, 1e6)), "value": torch.full((1,), 9.0), "load": torch.full((1, 3), 9.0)}
    sums = clipped_sum(clipping.Flat(1.0), batch, share=0.3).sums
    assert float(sums[_LEAF].norm()) == pytest.approx(math.sqrt(0.3), rel=1e-3)
    assert float(flat({name: value for name, value in sums.items() if name != _LEAF}).norm()) == pytest.approx(
        math.sqrt(0.7), rel=1e-3
    )


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_noise_scale(adjacency):
    """The noise of each released number has the standard error that the plan says, and neither 0.9 nor 1.1 of it."""
    statistics = (Statistic("norm", edges=tuple(range(1, 150))), Statistic("value", high=5.0))
    plan = plan_of(statistics, noise_multiplier=1.7, q=1.0, adjacency=adjacency)
    batch = {**records(1, 40), "value": torch.full((40,), 2.0), "load": torch.zeros(40, 3)}
    norms = torch.cat([batch[name].flatten(1) for name in params()], 1).norm(dim=1)
    expected = torch.bincount(torch.bucketize(norms, torch.arange(1.0, 150.0), right=True), minlength=150) / 40
    found = [state.telemetry for _, state in steps_of(plan, batch, steps=40)]
    errors = plan.telemetry_errors()
    noise = torch.tensor([told["norm"] for told in found]) - expected
    assert errors["value"] == pytest.approx(2.5 * errors["norm"])
    assert errors["norm"] == pytest.approx((2 if adjacency == "replace_one" else 1) * 1.7 * 20**0.5 / 40, rel=1e-3)
    tails = [
        stats.chi2.cdf(float(noise.double().square().sum()) / (scale * errors["norm"]) ** 2, noise.numel())
        for scale in (1.0, 0.9, 1.1)
    ]
    assert 1e-6 < tails[0] < 1 - 1e-6
    assert tails[1] > 1 - 1e-6
    assert tails[2] < 1e-6
    values = torch.tensor([told["value"] for told in found]) - 2.0
    assert float(values.mean()) == pytest.approx(0.0, abs=5 * errors["value"] / 40**0.5)
    assert 0.5 < float(values.std()) / errors["value"] < 1.6


def test_unbiased():
    """The mean over many draws is that of all records, although no step is divided by the number that it drew."""
    batch = {**records(3, 10), "value": torch.linspace(0.2, 1.0, 10), "load": torch.eye(3)[torch.arange(10) % 3]}
    statistics = (Statistic("value", high=1.0), Statistic("load", high=1.0, size=3), Statistic("norm", edges=(1.0,)))
    plan = plan_of(statistics, share=0.5, noise_multiplier=0.05, size=10, q=0.3, num_steps=250, delta=1e-2)
    found = [state.telemetry for _, state in steps_of(plan, batch)]
    told = torch.tensor([[one["value"], *one["load"], *one["norm"]] for one in found]).double()
    norms = torch.cat([batch[name].flatten(1) for name in params()], 1).norm(dim=1)
    truth = torch.tensor([0.6, 0.4, 0.3, 0.3, float((norms < 1).double().mean()), float((norms >= 1).double().mean())])
    off = (told.mean(0) - truth) / (told.std(0) / len(told) ** 0.5)
    assert float(off.abs().max()) < 4.5
    biased = (told.mean(0) - 1.3 * truth) / (told.std(0) / len(told) ** 0.5)
    assert float(biased.abs().max()) > 4.5


def test_noise_of_the_gradient_stays():
    """The gradient's draws are in the tiles that they have without telemetry, and the ledger is the same."""
    batch = {name: torch.zeros_like(value) for name, value in records(0, 40).items()}
    plan = plan_of(num_steps=1)
    plain = dataclasses.replace(plan, telemetry=None)
    for (grads, state), (others, other) in zip(
        steps_of(plan, batch), steps_of(plain, batch, loss=lambda p, b: loss_with_aux(p, b)[0]), strict=True
    ):
        assert all(torch.equal(value, others[name]) for name, value in grads.items())
        assert _LEAF not in grads
        assert state.ledger == other.ledger
        assert other.telemetry is None


def test_correlated_noise():
    """A mechanism with a state gets a leaf for the statistics, as for a parameter."""

    @dataclasses.dataclass(frozen=True)
    class Correlated(dpfunc.noise.Gaussian):
        def mechanism(self, run):
            return remembering(run.noise_multiplier)

    plan = dataclasses.replace(plan_of(num_steps=3), noise=Correlated())
    states = [state for _, state in steps_of(plan, records(0, 40))]
    assert all(math.isfinite(state.telemetry["clipped"]) for state in states)
    assert set(states[-1].noise_state["previous"]) == {*params(), _LEAF}
    other = dataclasses.replace(plan, noise=SimpleNamespace(**{m: getattr(Correlated(), m) for m in PARTS_OF_NOISE}))
    with pytest.raises(InvalidArgument, match="noise that says its weights"):
        other.telemetry_errors()


PARTS_OF_NOISE = ("check", "events", "mechanism")


def test_a_repeated_step_with_other_statistics_is_refused():
    """The digest of a release has the statistics: two with one noise would give both away."""
    plan, batch = plan_of((Statistic("value", high=1.0),)), {**records(0, 40), "value": torch.full((40,), 0.5)}
    list(steps_of(plan, batch, steps=1))
    dp_step = dpfunc.make_dp_step(lambda p, b: (loss_with_aux(p, b)[0], {"value": b["value"] + 0.1}), plan)
    state = dp_step.init(params(), dpfunc.rng.insecure_key(0))
    state = state._replace(charged=1, released=((0, "0" * 16),))
    with pytest.raises(StateReused):
        dp_step(params(), dpfunc.take(batch, plan.draw(state, 0)), dpfunc.state.resumed(state))


def test_a_checkpoint_has_them(tmp_path):
    """And a resumed run releases them again."""
    plan, batch, path = plan_of(num_steps=2), records(0, 40), tmp_path / "journal.jsonl"
    run = {"params": params(), "plan": plan, "data": "these", "journal": path}
    dp_step = dpfunc.make_dp_step(loss_with_aux, plan, journal=checkpoint.Journal(path, plan))
    state = dp_step.init(params(), dpfunc.secure_key())
    _, state, _ = dp_step(params(), dpfunc.take(batch, plan.draw(state, 0)), state)
    assert set(state.telemetry) == {each.name for each in EVERY}
    checkpoint.save(tmp_path / "run", state=state, **run)
    _, after, _ = dp_step(params(), dpfunc.take(batch, plan.draw(state, 1)), state)
    resumed = checkpoint.load(tmp_path / "run", **run).state
    assert resumed.telemetry == state.telemetry
    _, again, _ = dp_step(params(), dpfunc.take(batch, plan.draw(resumed, 1)), resumed)
    assert again.telemetry == after.telemetry != state.telemetry
    assert plan_difference(plan, json.loads(json.dumps(plan_to_dict(plan)))) == []
    others = dataclasses.replace(plan, telemetry=Telemetry(EVERY, 0.2))
    assert plan_difference(others, plan_to_dict(plan)) == ["plan.telemetry.share: saved 0.1, now 0.2"]


BAD = {
    "no share": (lambda: Telemetry(EVERY, 1.0), "0 < share < 1"),
    "nothing": (lambda: Telemetry((), 0.1), "some clipping.Statistic"),
    "twice": (lambda: Telemetry((Statistic("clipped"), Statistic("clipped")), 0.1), "one statistic of each name"),
    "no bound": (lambda: Statistic("loss"), "a public bound high > low = 0 of 'loss', got high=None"),
    "no text": (lambda: Statistic(2, high=1.0), "a line of printable text, got name=2"),
    "bounds": (lambda: Statistic("loss", 2.0, 1.0), "a public bound high > low = 2"),
    "edges": (lambda: Statistic("norm", edges=(1.0, 0.5)), "increasing edges"),
    "interval of a norm": (lambda: Statistic("load", 0.5, 1.0, size=3), "one of low, edges and size"),
    "optimal": (lambda: plan_of(allocation="optimal"), 'allocation="uniform" with telemetry'),
    "type": (lambda: dataclasses.replace(plan_of(), telemetry="loss"), "a clipping.Telemetry, or None"),
}


def test_numbers_of_numpy_and_torch_become_those_of_python():
    """A checkpoint holds no others, and would be refused after the first steps."""
    found = Statistic("loss", np.float32(0.5), torch.tensor(2.0)), Statistic("load", high=1, size=np.int64(3))
    assert found == (Statistic("loss", 0.5, 2.0), Statistic("load", high=1.0, size=3))
    assert {type(value) for each in found for value in (each.low, each.high, each.size)} == {float, int, type(None)}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_loss_without_them_spends_nothing():
    plan, batch = plan_of(), records(0, 40)
    with pytest.raises(InvalidArgument, match=r"where the mapping aux has 'load'.*got loss, norm, clipped, value"):
        list(steps_of(plan, batch, loss=lambda p, b: (loss_with_aux(p, b)[0], {"value": b["value"]})))
    with pytest.raises(InvalidArgument, match=r"aux\['load'\] of shape \(B, 3\)"):
        list(
            steps_of(
                plan, batch, loss=lambda p, b: (loss_with_aux(p, b)[0], dict.fromkeys(("value", "load"), b["value"]))
            )
        )
    with pytest.raises(InvalidArgument, match="no parameter and no clip group of the name"):
        dpfunc.make_dp_step(loss_with_aux, plan).init({_LEAF: torch.zeros(2)}, dpfunc.secure_key())


@pytest.mark.parametrize("leaf", [_LEAF, RULE_LEAF])
def test_a_clip_group_with_the_name_of_statistics_is_refused(leaf):
    """Both had one bound and one sensitivity, so that the noise was too small by the square root of two."""
    clip = clipping.Flat(1.0, clipping.ByName(dict.fromkeys(params(), leaf)))
    if leaf == RULE_LEAF:
        clip = clipping.Adaptive(1.0, quantile=0.5, share=0.1, groups=clip.groups)
    step = dpfunc.make_dp_step(loss_with_aux, plan_of(clip=clip))
    with pytest.raises(InvalidArgument, match="no clip group of the name"):
        step.init(params(), dpfunc.secure_key())
    with pytest.raises(InvalidArgument, match="no clip group of the name"):
        step.clipped_grad.at(0, None if leaf == _LEAF else step.plan.clip.initial((leaf,))).bounds((leaf,))


@pytest.mark.parametrize("size", [None, 2])
def test_a_number_at_the_end_of_float64_counts_as_its_bound(size):
    """Scaled it was infinite, and its share of itself NaN: one record ended the run."""
    far = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)[:, None].expand(2, size or 1)
    scaled_BN = Statistic("value", high=0.1, size=size)._scaled(far if size else far[:, 0])
    torch.testing.assert_close(scaled_BN.norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert bool((scaled_BN[0] > 0).all() and (scaled_BN[1] < 0).all())


def test_a_replay_on_neighbours_holds():
    """Also for a loop whose learning rate follows the released loss; not for one that follows the unreleased one."""
    plan = plan_of((Statistic("loss", -4.0, 4.0), Statistic("value", high=1.0)), num_steps=6)

    def init(dp_step, data, key):
        return 0.1, params(), dp_step.init(params(), key)

    def follow(measure):
        def step(dp_step, data, carry):
            rate, values, state = carry
            batch = dpfunc.take(data, dp_step.plan.draw(state, state.step))
            grads, state, unreleased = dp_step(values, batch, state)
            values = {name: value - rate * grads[name] for name, value in values.items()}
            rate = 0.1 if measure(state, unreleased) < 1.0 else 0.01 * measure(state, unreleased)
            return None if state.step == state.limit else (rate, values, state)

        return step

    data = {**records(0, 40), "value": torch.linspace(0, 1, 40), "load": torch.zeros(40, 3)}
    dp_step = dpfunc.make_dp_step(loss_with_aux, plan)
    assert replay_neighbours(dp_step, init, follow(lambda state, _: state.telemetry["loss"]), data).holds
    found = replay_neighbours(dp_step, init, follow(lambda _, private: float(private.losses_B.abs().sum())), data)
    assert not found.holds
