"""Bounds that follow a quantile: the algorithm of the paper, in the release of the gradient, at its cost."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import GROUPINGS, as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_cases import remembering
from scipy import stats
from text_job import run

import dpfunc
from dpfunc import checkpoint, clipping, noise, sampling
from dpfunc.accounting.record import CLIPS
from dpfunc.checkpoint._format import state_from_dict, state_to_dict
from dpfunc.clipped import RULE_LEAF, make_clipped_grad
from dpfunc.clipping import Adaptive, Statistic, Telemetry, count_share
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import replay as replay_neighbours
from dpfunc.rng import fold_in, insecure_key
from dpfunc.state import allow_repeat

N = 40
LOSSES = Telemetry((Statistic("loss", -4.0, 4.0),), 0.1)
GROUPS = {name: 1 if name == "all" else 2 for name in ("all", "layer", "mapping")} | {"layer": 3}


@dataclasses.dataclass(frozen=True)
class Nothing(noise.Gaussian):
    """Noise of zero, for what the algorithm does without it."""

    def mechanism(self, run):
        return super().mechanism(run._replace(noise_multiplier=0.0))


@dataclasses.dataclass(frozen=True)
class Correlated(noise.Gaussian):
    def mechanism(self, run):
        return remembering(run.noise_multiplier)


def plan_of(clip=None, **changes):
    values = {
        "sampler": sampling.Poisson(N, 0.3), "clip": Adaptive() if clip is None else clip, "noise_multiplier": 1.0,
        "num_steps": 12, "delta": 1e-3,
    }  # fmt: skip
    return dpfunc.Plan(**{**values, **changes})


def steps_of(plan, batch, seed=0, **options):
    """What the steps of a run release, with the numbers of the records of each."""
    dp_step = dpfunc.make_dp_step(linear_loss, plan, **options)
    state = allow_repeat(dp_step.init(params(), insecure_key(seed)))
    for indices in plan.batches(state):
        grads, state, _ = dp_step(params(), dpfunc.take(batch, indices), state)
        yield grads, state, indices


def test_noise_multipliers_of_the_paper():
    """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), of Theorem 1; with G counts each has sensitivity 1/2."""
    assert 1.1 / math.sqrt(1 - count_share(1.1, 12.8)) == pytest.approx(1.10101688, rel=1e-8)
    for z, sigma_b, groups in ((0.5, 0.3, 1), (2.0, 12.8, 3), (7.0, 40.0, 100)):
        share = count_share(z, sigma_b, groups)
        assert 1 / z**2 == pytest.approx((1 - share) / z**2 + groups / (2 * sigma_b) ** 2, rel=1e-12)
        assert z * math.sqrt(groups / share) / 2 == pytest.approx(sigma_b, rel=1e-12)
    with pytest.raises(InvalidArgument, match=r"count_noise > noise_multiplier \* sqrt\(num_groups\) / 2 = 1, got"):
        count_share(1.0, 1.0, num_groups=4)


def test_bounds_go_by_the_names_of_their_groups():
    """Not by their places: parameters may come in another order, e.g. from a file that sorts them."""
    plan = plan_of(Adaptive(0.7, groups=GROUPINGS["layer"]), noise=Nothing())
    dp_step = dpfunc.make_dp_step(linear_loss, plan)
    state = allow_repeat(dp_step.init(params(), insecure_key(0)))
    batch = dpfunc.take(as_batch(random_rows(0, N, 1.0)), next(plan.batches(state)))
    batch["head.weight"] *= 1e-3  # the one bound that falls
    expected = dp_step(params(), batch, state).state.clip_state
    again = dp_step(dict(reversed(params().items())), batch, allow_repeat(state)).state.clip_state
    assert len(set(expected.values())) > 1
    assert again == expected


@pytest.mark.parametrize("grouping", GROUPS)
@pytest.mark.parametrize("q", [0.3, 0.02])
def test_the_algorithm_of_the_paper(grouping, q):
    """Algorithm 1, written again row by row, without noise; with q = 0.02 most batches have no records."""
    rule = Adaptive(0.7, quantile=0.4, rate=0.5, share=0.2, groups=GROUPINGS[grouping])
    plan = plan_of(rule, sampler=sampling.Poisson(N, q), noise=Nothing())
    batch = as_batch(random_rows(0, N))
    group_of = dict(zip(params(), rule.groups.assign(tuple(params())), strict=True))
    names = list(dict.fromkeys(group_of.values()))
    bounds = {group: 0.7 / math.sqrt(len(names)) for group in names}
    sizes = set()
    for grads, state, indices in steps_of(plan, batch, reduction="sum"):
        sizes.add(len(indices))
        expected = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in params().items()}
        for group in names:
            members = [name for name in params() if group_of[name] == group]
            centred = 0.0
            for row in indices.tolist():
                norm = math.sqrt(sum(float(batch[name][row].double().square().sum()) for name in members))
                centred += 0.5 if norm <= bounds[group] else -0.5
                for name in members:
                    expected[name] += min(1.0, bounds[group] / norm) * batch[name][row].double()
            bounds[group] *= math.exp(-0.5 * (0.5 + centred / (q * N) - 0.4))
        assert float((flat(grads) - flat(expected)).norm()) <= 2**-12 * float(flat(expected).norm())
        assert state.clip_state == pytest.approx(bounds, rel=1e-6)
    assert (0 in sizes) == (q == 0.02)
    assert max(sizes) > 0


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31), size=st.integers(1, 8), grouping=st.sampled_from(sorted(GROUPINGS)),
    engine=st.sampled_from(sorted(ENGINES)), share=st.sampled_from([1e-3, 0.2, 0.8]), told=st.booleans(),
    scale=st.sampled_from([1e-6, 1.0, 1e12]), spoiled=st.booleans(), bound=st.sampled_from([1e-6, 1.0, 1e6]),
)  # fmt: skip
def test_sensitivity(seed, size, grouping, engine, share, told, scale, spoiled, bound):
    """One record moves gradient and counts together by at most the sensitivity, or twice when it is replaced."""
    rule = Adaptive(1.0, share=share, groups=GROUPINGS[grouping])
    batch = as_batch(random_rows(seed, size + 1, scale))
    if spoiled:
        batch["head.weight"][0] = math.nan
    group_names = tuple(dict.fromkeys(rule.groups.assign(tuple(params()))))
    state = {group: bound * 2.0**-place for place, group in enumerate(group_names)}
    options = {"engine": engine_of(engine), "telemetry": LOSSES if told else None}

    def found(chosen, adjacency):
        prepared = make_clipped_grad(linear_loss, rule, adjacency=adjacency, **options)
        rows = dpfunc.take(batch, torch.tensor(chosen, dtype=torch.int64))
        clipped, _ = prepared.of_step(prepared.at(0, state), params(), rows, mask_B=None, key=None)
        assert clipped.sums[RULE_LEAF].shape == (len(group_names),)
        return flat(clipped.sums), clipped.sensitivity

    whole = math.hypot(*state.values()) / math.sqrt(1 - share)
    full, sensitivity = found([*range(size)], "add_remove")
    removed, _ = found([*range(1, size)], "add_remove")
    replaced, twice = found([size, *range(1, size)], "replace_one")
    assert sensitivity == pytest.approx(whole)
    assert twice == pytest.approx(2 * whole)
    assert (full - removed).norm() <= (0.0 if spoiled and size == 1 else sensitivity)
    assert (full - replaced).norm() <= twice


def test_the_sensitivity_is_used_up():
    """A record with a long gradient has all of it: gradient C, counts the rest."""
    for grouping in GROUPINGS.values():
        prepared = make_clipped_grad(linear_loss, Adaptive(1.0, share=0.3, groups=grouping))
        state = prepared.clip.initial(tuple(dict.fromkeys(grouping.assign(tuple(params())))))
        clipped, _ = prepared.of_step(
            prepared.at(0, state), params(), as_batch(random_rows(0, 1, 1e6)), mask_B=None, key=None
        )
        counts = clipped.sums[RULE_LEAF]
        gradient = flat({name: value for name, value in clipped.sums.items() if name != RULE_LEAF})
        assert float(gradient.norm()) == pytest.approx(1.0, rel=1e-3)
        assert float(counts.norm()) == pytest.approx(math.sqrt(0.3 / 0.7), rel=1e-3)


@pytest.mark.parametrize("adjacency", [pytest.param("add_remove", marks=pytest.mark.slow), "replace_one"])
def test_the_noise_of_the_count(adjacency):
    """The count has noise of sigma_b, and the gradient z_delta C: neither 0.9 nor 1.1 of it; the mean has no bias."""
    z, sigma_b, size, rounds = 1.1, 12.8, 100, 700
    rule = Adaptive(1.0, share=count_share(z, sigma_b))
    prepared = make_clipped_grad(linear_loss, rule, adjacency=adjacency)
    clip = prepared.at(0, {"all": 20.0})
    clipped, unreleased = prepared.of_step(clip, params(), as_batch(random_rows(3, size)), mask_B=None, key=None)
    below = int((unreleased.norms_BG <= 20.0).sum())
    counts, gradients = [], []
    for number in range(rounds):
        released = noise.add_gaussian(clipped, z, fold_in(insecure_key(1), "release", number))
        told = clip.read(released, size)[RULE_LEAF]
        moved = rule.next({"all": 20.0}, told)["all"]
        counts.append(size * (0.5 - math.log(moved / 20.0) / 0.2) - below)
        gradients.append(float(released["head.weight"][0] - clipped.sums["head.weight"][0]))
    twice = 2.0 if adjacency == "replace_one" else 1.0
    for found, scale in ((counts, twice * sigma_b), (gradients, twice * 20.0 * 1.10101688)):
        told = torch.tensor(found).double()
        tails = [stats.chi2.cdf(float(told.square().sum()) / (other * scale) ** 2, rounds) for other in (1.0, 0.8, 1.2)]
        assert 1e-6 < tails[0] < 1 - 1e-6
        assert tails[1] > 1 - 1e-6
        assert tails[2] < 1e-6
        assert abs(float(told.mean())) < 4.5 * scale / rounds**0.5
    # the count that a step would have if it were not centred
    assert abs(float(torch.tensor(counts).mean()) + below / 2) > 4.5 * twice * sigma_b / rounds**0.5


@pytest.mark.parametrize(
    ("quantile", "first"),
    [(0.3, 1e2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.5, 1e-3), (0.8, 1.0)))],
)
def test_convergence(quantile, first):
    """From any first bound to the quantile of the norms, and it stays there."""
    batch = as_batch(random_rows(5, 400))
    norms = torch.cat([value.flatten(1) for value in batch.values()], 1).norm(dim=1)
    plan = plan_of(Adaptive(first, quantile=quantile), sampler=sampling.Poisson(400, 0.3), num_steps=150, delta=1e-4)
    last = [state.clip_state["all"] for *_, state, _ in steps_of(plan, batch)][-30:]
    shares = torch.tensor([float((norms <= bound).double().mean()) for bound in last])
    assert float(shares.mean()) == pytest.approx(quantile, abs=0.05)
    assert abs(float(shares.mean()) - (1 - quantile if quantile != 0.5 else 0.3)) > 0.1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatch_size", [None, 1, 5])
def test_engines_agree(engine, microbatch_size):
    """The bound moves once a step, by the records of all microbatches, and a step without records is one."""
    plan = plan_of(Adaptive(0.5, groups=GROUPINGS["layer"]), sampler=sampling.Poisson(N, 0.04), num_steps=8)
    batch = as_batch(random_rows(1, N))
    expected = list(steps_of(plan, batch, engine="loop"))
    found = list(steps_of(plan, batch, engine=engine, microbatch_size=microbatch_size))
    assert min(len(indices) for *_, indices in found) == 0
    assert max(len(indices) for *_, indices in found) > 1
    for (grads, state, _), (its_grads, its_state, _) in zip(found, expected, strict=True):
        assert state.clip_state == its_state.clip_state
        assert torch.allclose(flat(grads), flat(its_grads), rtol=1e-5, atol=1e-6)
    bounds = [tuple(state.clip_state.values()) for _, state, _ in found]
    assert len(set(bounds)) == plan.num_steps


def test_the_cost_is_that_of_a_bound_that_stays():
    """The ledger, and the noise of the gradient in units of C but for the share of the counts."""
    batch = {name: torch.zeros_like(value) for name, value in as_batch(random_rows(0, N)).items()}
    plan = plan_of(Adaptive(1.0, share=0.19), num_steps=1)
    other = dataclasses.replace(plan, clip=clipping.Flat(1.0))
    [(grads, state, _)], [(its_grads, its_state, _)] = steps_of(plan, batch), steps_of(other, batch)
    assert state.ledger == its_state.ledger
    assert set(grads) == set(its_grads)
    assert torch.allclose(0.9 * flat(grads), flat(its_grads), rtol=1e-5)
    assert its_state.clip_state is None


@pytest.mark.parametrize("correlated", [False, True])
def test_a_resumed_run_has_its_bounds(correlated, tmp_path):
    """Bound and noise of the next step are those of the run, bit for bit, with a schedule of noise too."""
    made = Correlated() if correlated else noise.Gaussian()
    noises = 2.0 if correlated else dpfunc.types.Schedule(((2, 2.0), (2, 1.0)))
    plan = plan_of(
        Adaptive(groups=GROUPINGS["mapping"]), noise_multiplier=noises, num_steps=4, telemetry=LOSSES, noise=made
    )
    batch, path = as_batch(random_rows(2, N)), tmp_path / "journal.jsonl"
    facts = {"params": params(), "plan": plan, "data": "these", "journal": path}
    dp_step = dpfunc.make_dp_step(linear_loss, plan, journal=checkpoint.Journal(path, plan))
    state = dp_step.init(params(), dpfunc.secure_key())
    if correlated:  # not of dpfunc: no checkpoint describes it
        with pytest.raises(InvalidArgument, match="a plan of dpfunc's own parts"):
            checkpoint.save(tmp_path / "run", state=state, **facts)
        assert set(state.noise_state["previous"]) == {*params(), "(telemetry)", RULE_LEAF}
        return
    for step in range(2):
        _, state, _ = dp_step(params(), dpfunc.take(batch, plan.draw(state, step)), state)
    checkpoint.save(tmp_path / "run", state=state, **facts)
    resumed = checkpoint.load(tmp_path / "run", **facts).state
    assert resumed.clip_state == state.clip_state
    assert list(resumed.clip_state) == list(state.clip_state)
    for step in (2, 3):
        grads, state, _ = dp_step(params(), dpfunc.take(batch, plan.draw(state, step)), state)
        if step == 2:
            first, after = grads, state
    resumed = dpfunc.state.resumed(resumed)
    again, its_after, _ = dp_step(params(), dpfunc.take(batch, plan.draw(resumed, 2)), resumed)
    assert all(torch.equal(value, first[name]) for name, value in again.items())
    assert its_after.clip_state == after.clip_state


def test_checkpoints_from_before():
    """They have no clip state, and load; a run that needs one does not go on without."""
    for clip in (clipping.Flat(1.0), Adaptive()):
        plan = plan_of(clip)
        dp_step = dpfunc.make_dp_step(linear_loss, plan)
        values = state_to_dict(dp_step.init(params(), dpfunc.secure_key()))
        del values["clip_state"]
        state = state_from_dict(values, plan, {})
        assert state.clip_state is None
        batch = dpfunc.take(as_batch(random_rows(0, N)), plan.draw(state, 0))
        if isinstance(clip, Adaptive):
            with pytest.raises(InvalidArgument, match=r"the state of clipping.Adaptive.*got none"):
                dp_step(params(), batch, state)
        else:
            assert dp_step(params(), batch, state).state.step == 1


def test_processes_agree_on_the_bounds():
    """What each tells the others of its state has its bounds: with other ones they refuse the step."""
    dp_step = dpfunc.make_dp_step(linear_loss, plan_of())
    state = dp_step.init(params(), insecure_key(3))
    assert dp_step._must_be_equal(state) == dp_step._must_be_equal(state._replace(clip_state=dict(state.clip_state)))
    assert dp_step._must_be_equal(state) != dp_step._must_be_equal(state._replace(clip_state={"all": 0.2}))


def test_a_replay_on_neighbours_holds():
    """The bounds follow what is released; bounds that follow unreleased norms are found."""

    @dataclasses.dataclass(frozen=True)
    class Peeking(Adaptive):
        def next(self, state, released):
            return {group: bound * (1 + float(seen.pop()[0])) for group, bound in state.items()}

    seen = []
    batch = as_batch(random_rows(0, N))

    def init(dp_step, data, key):
        return params(), dp_step.init(params(), key)

    def step(dp_step, data, carry):
        values, state = carry
        rows = dpfunc.take(data, dp_step.plan.draw(state, state.step))
        seen.append(rows["head.weight"].square().mean(0))
        grads, state, _ = dp_step(values, rows, state)
        values = {name: value - 0.1 * grads[name] for name, value in values.items()}
        return None if state.step == state.limit else (values, state)

    for rule, holds in ((Adaptive(), True), (Peeking(), False)):
        dp_step = dpfunc.make_dp_step(linear_loss, plan_of(rule, num_steps=4))
        assert replay_neighbours(dp_step, init, step, batch).holds == holds


def test_bounds_stay_in_their_domain():
    """Also after releases that no sane run has."""
    rule = Adaptive(1.0, share=0.5)
    state = {"a": 1e-10, "b": 1e10, "c": 1.0}
    for mean in (1e6, -1e6, 0.0):
        state = rule.next(state, {"(below)": [mean, mean, mean]})
        assert all(1e-10 <= bound <= 1e10 for bound in rule.at(0, state).clip_norm.values())


BAD = {
    "quantile": (lambda: Adaptive(quantile=1.0), "quantile"),
    "rate": (lambda: Adaptive(rate=0.0), "rate"),
    "share": (lambda: Adaptive(share=0.0), "0 < share < 1"),
    "bound": (lambda: Adaptive(0.0), "clip_norm"),
    "optimal": (lambda: plan_of(allocation="optimal"), "clipping.Adaptive"),
    "shares": (
        lambda: plan_of(Adaptive(share=0.95), telemetry=LOSSES), "leave a share of the squared bound to the gradient"
    ),
    "a name": (
        lambda: dpfunc.make_dp_step(linear_loss, plan_of()).init({RULE_LEAF: torch.zeros(2)}, dpfunc.secure_key()),
        "no parameter and no clip group of the name",
    ),
    "groups": (
        lambda: dpfunc.make_dp_step(linear_loss, plan_of(Adaptive({"body": 1.0}))).init(
            params(), dpfunc.secure_key()
        ),
        "clip_norm to name the groups",
    ),
    "no state": (
        lambda: dpfunc.clipped.clipped_grad(linear_loss, params(), as_batch(random_rows(0, 2)), Adaptive()),
        "In a sum alone use clipping.Flat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_record_says_where_the_bound_is_at_the_end(tmp_path, monkeypatch):
    """It is proven; `dpfunc ledger show` does not take it for the bound of all steps."""
    monkeypatch.setenv("COLUMNS", "200")
    plan = plan_of()
    dp_step = dpfunc.make_dp_step(linear_loss, plan)
    state = dp_step.init(params(), dpfunc.secure_key())
    _, state, _ = dp_step(params(), dpfunc.take(as_batch(random_rows(0, N)), plan.draw(state, 0)), state)
    record = checkpoint.make_record(dp_step, state, unit="one row")
    assert record.clip == "Adaptive"
    assert record.clip in CLIPS
    assert record.max_grad_norm == pytest.approx(state.clip_state["all"] / math.sqrt(0.99))
    path = tmp_path / "privacy_accounting.json"
    path.write_text(record.to_json())
    assert f"Adaptive, norm at most {record.max_grad_norm:g} at the end" in run("ledger", "show", path).output
