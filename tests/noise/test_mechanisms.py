"""Each noise mechanism of the table: its law, what it costs, its state, its keys, and all ways to take its steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import noise_jobs
import numpy as np
import pytest
import torch
from cases import SIZE, as_batch, flat, linear_loss, random_rows
from cases import params as zeros
from noise_cases import MECHANISMS, NUM_RECORDS, STEPS, Case, Lagged
from scipy import stats
from workers import run

from dpfunc import Journal, Ledger, Plan, clipping, load, make_dp_step, noise, sampling, save, take
from dpfunc.checkpoint import _format as format
from dpfunc.distributed._reduce import noise_windows
from dpfunc.errors import BudgetExhausted, CheckpointError, InvalidArgument
from dpfunc.evidence import replay as on_neighbours
from dpfunc.evidence._noise_check import NoiseCheck, with_noise_check
from dpfunc.evidence.watch import WatchedNoise
from dpfunc.rng import insecure_key, secure_key
from dpfunc.state import StepState, allow_repeat
from dpfunc.state import turn_of as turn_after
from dpfunc.types import ClippedSum

DATA = as_batch(random_rows(3, NUM_RECORDS, scale=20.0))
BOUNDS = {"a": 2.0, "b": 0.5}
LAYOUTS = ("replicas", "rows")


def turn_of(key, step, noise_state):
    return turn_after(StepState(step, STEPS, 0, key, noise_state, Ledger()))


@pytest.fixture(params=[
    pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in MECHANISMS.items()
])  # fmt: skip
def case(request):
    return MECHANISMS[request.param]


def noise_of(case, *, dtype=torch.float32, allocation="uniform", source="secure", key=None, used=None):
    """What the mechanism adds to zeros in each step, in units of the sensitivity that its standard deviation has."""
    sums = {f"p{i}": torch.zeros(size, dtype=dtype) for i, size in enumerate((9000, 3000))}
    clipped = ClippedSum(sums, {"p0": "a", "p1": "b"}, BOUNDS)
    scale = noise.noise_std(clipped, 1.0, allocation)
    mechanism = case.noise.mechanism(case.plan(allocation=allocation).run._replace(source=source))
    state, found = mechanism.init(sums), []
    for step in range(STEPS):
        turn = turn_of(insecure_key(5) if key is None else key, step, state)
        if used is not None:
            used.append((step, step))
            turn = turn._replace(
                key_of=lambda number, turn=turn: used.append((turn.step, number)) or turn.key_of(number)
            )
        released, state = mechanism.add(clipped, state, turn)
        found.append(torch.cat([released["p0"] / scale["a"], released["p1"] / scale["b"]]).double().numpy())
    return np.array(found)


def is_law(noise_TP, covariance, level=1e-6):
    """Two-sided: the noise, whitened by its covariance, has the variance of standard normals in each step, and no
    correlation over steps."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), noise_TP)
    size = white.shape[1]
    tails = stats.chi2.cdf((white**2).sum(1), size)
    products = (white @ white.T)[np.triu_indices(len(white), 1)] / math.sqrt(size)
    return bool(((level < tails) & (tails < 1 - level)).all() and (abs(products) < 5.5).all())


@pytest.mark.parametrize("allocation", ["uniform", "optimal"])
def test_law(case, allocation):
    """The covariance over steps is that of the formula, and neither 0.95 nor 1.05 of its deviation, nor without it."""
    drawn, covariance = noise_of(case, allocation=allocation), case.covariance()
    assert is_law(drawn, covariance)
    assert not is_law(drawn, 0.95**2 * covariance)
    assert not is_law(drawn, 1.05**2 * covariance)
    if case.inverse is not None:
        assert not is_law(drawn, np.diag(np.diag(covariance)))
    if allocation == "uniform":
        assert is_law(noise_of(case, dtype=torch.float64), covariance)
        assert is_law(noise_of(case, source="device"), covariance)


def stepped(case, data, key, *, params=None, batches=None, **options):
    """All releases of a run, as one vector a step, and its last state."""
    dp_step = make_dp_step(linear_loss, case.plan(), reduction="sum", verify_batch=batches is None, **options)
    params = zeros() if params is None else params
    state, found = allow_repeat(dp_step.init(params, key)), []
    for indices in case.plan().batches(state) if batches is None else batches:
        grads, state, _ = dp_step(params, take(data, indices), state)
        found.append(flat(grads))
    return torch.stack(found), state


def distance(events):
    """The squared distance of neighbours in units of the noise, of releases of all records."""
    assert all(type(event).__name__ == "Event" and event.sampling_prob == 1 for event in events)
    return sum(event.num_steps / event.noise_multiplier**2 for event in events)


def test_neighbours_are_as_far_apart_as_the_events_say(case):
    """With one record left out, as a run releases it: never farther, and as far for the record that is most often in."""
    found, state = stepped(case, DATA, insecure_key(1))
    inverse = np.linalg.inv(case.covariance())
    most = 0.0
    first, last = (int(case.plan().draw(state, step)[0]) for step in (0, STEPS - 1))  # the first is in most batches
    for record in (first, last):
        without = {name: rows.clone().index_fill_(0, torch.tensor([record]), 0.0) for name, rows in DATA.items()}
        moved = (found - stepped(case, without, insecure_key(1))[0]).numpy()
        most = max(most, float(np.einsum("sp,st,tp->", moved, inverse, moved)))
    claimed = distance(state.ledger.events)
    assert most <= claimed * (1 + 1e-3)
    assert most >= claimed * (1 - case.spare)
    assert state.ledger == case.plan().ledger()


def test_keys(case):
    """A step takes its own key, and earlier ones only; other keys, and other steps, have other noise."""
    used = []
    found = noise_of(case, used=used)
    assert all(0 <= number <= step for step, number in used)
    if case.noise.mechanism(case.plan().run).init(zeros()) == ():
        assert all(number == step for step, number in used)
    assert np.array_equal(found, noise_of(case))
    for other in (noise_of(case, key=insecure_key(6)), np.roll(found, 1, axis=0)):
        assert not (found == other).any(1).all()
        assert abs(np.corrcoef(found[0], other[0])[0, 1]) < 0.5


def test_shares_add_up_to_the_noise_of_one_process(case):
    mechanism = case.noise.mechanism(case.plan().run)
    shapes = {"p0": (600, 300), "p1": (9,)}
    made = lambda: ClippedSum({n: torch.zeros(shape) for n, shape in shapes.items()}, {"p0": "a", "p1": "b"}, BOUNDS)
    state = mechanism.init(made().sums)
    for step in (0, 3) if mechanism.add_share else ():
        turn = turn_of(insecure_key(11), step, state)
        expected, after = mechanism.add(made(), state, turn)
        assert after == state  # a share leaves it as it is
        terms = [made() for _ in range(3)]
        for rank, term in enumerate(terms):
            mechanism.add_share(term, noise_windows(shapes, rank, 3), turn)
        for name, value in expected.items():
            assert torch.equal(sum(term.sums[name] for term in terms), value)


def test_microbatches_and_empty_batches(case):
    """The same releases in pieces; of no records, the noise alone."""
    whole, _ = stepped(case, DATA, insecure_key(2))
    pieces, state = stepped(case, DATA, insecure_key(2), microbatch_size=5)
    assert torch.allclose(whole, pieces, atol=1e-5)
    none = torch.zeros(0, dtype=torch.int64)
    empty, after = stepped(case, DATA, insecure_key(2), batches=[none] * STEPS)
    dp_step = make_dp_step(linear_loss, case.plan(), reduction="sum")
    clipped = ClippedSum(zeros(), dict.fromkeys(zeros(), "all"), {"all": 1.0})
    noise_state = dp_step.init(zeros(), insecure_key(2)).noise_state
    for step in range(STEPS):
        turn = turn_of(insecure_key(2), step, noise_state)
        released, noise_state = dp_step._mechanism.add(clipped, noise_state, turn)
        assert torch.equal(flat(released), empty[step])
    assert state.ledger == after.ledger


def test_bfloat16_parameters(case):
    """Sums and noise are float32, what is released is cast at the end; the state has no narrow tensors."""
    wide, _ = stepped(case, DATA, insecure_key(3))
    narrow, state = stepped(case, DATA, insecure_key(3), params=zeros(torch.bfloat16))
    assert torch.allclose(wide, narrow, rtol=2**-7, atol=2**-7)
    assert not torch.equal(wide, narrow)
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(state.noise_state) if isinstance(leaf, torch.Tensor)]
    assert all(tensor.dtype == torch.float32 for tensor in tensors)


def test_a_run_that_is_resumed_in_the_middle_goes_on_bit_for_bit(case, tmp_path, monkeypatch):
    """From a checkpoint of step 2, with the journal of all steps: the same values, at no cost."""
    monkeypatch.setattr(format, "_PARTS", {*format._PARTS, type(case.noise)})  # of a user: a public name does it
    plan = case.plan()
    journal = Journal(tmp_path / "journal.jsonl", plan)
    dp_step, params = make_dp_step(linear_loss, plan, journal=journal), zeros()
    state, found = dp_step.init(params, secure_key()), []
    saved = {"params": params, "plan": plan, "data": DATA}
    for indices in plan.batches(state):
        if state.step == 2:
            save(tmp_path / "run", state=state, journal=journal.path, **saved)
        grads, state, _ = dp_step(params, take(DATA, indices), state)
        found.append(flat(grads))
    again = load(tmp_path / "run", journal=journal.path, **saved).state
    assert again.ledger == state.ledger == plan.ledger()
    again = allow_repeat(again)
    for indices, before in zip(plan.batches(again), found[2:], strict=True):
        grads, again, _ = dp_step(params, take(DATA, indices), again)
        assert torch.equal(flat(grads), before)
    assert again.ledger == state.ledger
    if state.noise_state != ():
        with pytest.raises(CheckpointError, match="without state to go on from with a new key"):
            load(tmp_path / "run", without_journal="new_key", **saved)


def test_replay(case):
    """On neighbouring data nothing moves but the clipped sum."""

    def init(dp_step, data, key):
        return {"params": zeros(), "state": dp_step.init(zeros(), key)}

    def step(dp_step, data, carry):
        state = carry["state"]
        grads, state, _ = dp_step(carry["params"], take(data, dp_step.plan.draw(state, state.step)), state)
        params = {name: value - 0.1 * grads[name] for name, value in carry["params"].items()}
        return None if state.step == state.limit else {"params": params, "state": state}

    found = on_neighbours(make_dp_step(linear_loss, case.plan()), init, step, DATA, candidates=1)
    assert found.holds, found
    assert found.steps == STEPS


def test_audit(case):
    """An audit takes the noise of earlier steps out by the weights that are claimed, and finds other ones."""
    claimed = getattr(case.noise, "weights", None)
    watched = with_noise_check(case.plan()).noise
    assert isinstance(watched, WatchedNoise) == (claimed is not None)
    if claimed is None:
        return
    noise_of(dataclasses.replace(case, noise=watched))
    assert watched.watch.differs() == ""
    for change in ((0.1, 0.0), (0.0, 0.1)):  # of the weights of new noise, and of that of the step before

        def others(run, step, change=change):
            new, before, *rest = (*claimed(run, step), 0.0)
            return (new * (1 + change[0]), before + new * change[1], *rest)

        other = NoiseCheck(others)
        noise_of(dataclasses.replace(case, noise=WatchedNoise(case.noise, other)))
        assert other.differs()


def test_budgets(case):
    """`for_budget` meets its target with the mechanism, and 1 % less noise does not; the budget holds a whole run."""
    facts = {"clip": clipping.Flat(1.0), "num_steps": STEPS, "delta": 1e-3, "adjacency": "zero_out"}
    plan = Plan.for_budget(epsilon=3.0, sampler=case.sampler, noise=case.noise, **facts)
    assert plan.noise == case.noise
    assert 2.99 < plan.guarantee().epsilon <= 3.0
    with pytest.raises(InvalidArgument, match="Expected a plan within its budget"):
        dataclasses.replace(plan, noise_multiplier=0.99 * plan.noise_multiplier)
    assert plan.step_limit(Ledger(adjacency="zero_out")) == STEPS
    first = plan.events(0, 1)
    later = tuple(event for step in range(1, STEPS) for event in plan.events(step, step + 1))
    assert Ledger((*first, *later), "zero_out") == plan.ledger()
    spent = Ledger(first, "zero_out")
    if later:
        assert 0 < plan.step_limit(spent) < STEPS
    else:  # as a whole, or not at all
        assert plan.step_limit(spent) == 0
        with pytest.raises(BudgetExhausted, match="does not allow one more step"):
            make_dp_step(linear_loss, plan).init(zeros(), secure_key(), ledger=spent)


@pytest.fixture(scope="module")
def alone():
    return noise_jobs.all_stepped("alone")


SEVERAL = [(2, "replicas"), (2, "rows"), *(pytest.param(4, kind, marks=pytest.mark.slow) for kind in LAYOUTS)]


@pytest.mark.parametrize(("size", "kind"), SEVERAL)
def test_several_processes_release_what_one_does(alone, size, kind):
    """With the parameters whole, or in parts; the noise, which is thousands of roundings larger, is the same."""
    found = run(size, "noise_jobs:all_stepped", kind)
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in MECHANISMS)
    for name, values in alone.items():
        assert torch.allclose(found[0][name], values, atol=2e-5), name


@pytest.mark.parametrize("kinds", [("rows", "alone"), ("alone", "rows")], ids=repr)
def test_a_run_goes_on_in_another_layout(alone, tmp_path, kinds):
    """Saved by two with parts of the parameters and of the buffers, loaded by one with all; and the other way round."""

    def taken(kind, job, *args):
        return getattr(noise_jobs, job)(kind, *args) if kind == "alone" else run(2, f"noise_jobs:{job}", kind, *args)[0]

    first, then = kinds
    taken(first, "stopped", tmp_path, 3)
    for name, values in taken(then, "resumed", tmp_path, 3).items():
        assert torch.allclose(values, alone[name][3:], atol=2e-5), name


def test_processes_agree_about_the_state_of_the_noise():
    """Of one that has other buffers the others would not hear: each adds all noise to the sum of all."""
    assert run(2, "noise_jobs:other_buffers") == ["RankMismatch", "RankMismatch"]


def test_earlier_keys_need_a_state():
    """A run whose noise has no state may go on with a new key, and with it earlier noise would be another one."""
    assert turn_of(insecure_key(0), 3, ()).key == turn_of(insecure_key(0), 5, {"some": 1}).key_of(3)
    with pytest.raises(InvalidArgument, match=r"Expected a mechanism whose noise needs the key of step 2 in step 3"):
        turn_of(insecure_key(0), 3, ()).key_of(2)
    with pytest.raises(InvalidArgument, match="step"):
        turn_of(insecure_key(0), 3, {"some": 1}).key_of(-1)


def test_what_is_released_as_a_whole_has_no_new_key_in_its_middle(tmp_path, monkeypatch):
    """Its later steps would be drawn anew at no cost. A state would forbid it as well; this user has none."""

    @dataclasses.dataclass(frozen=True)
    class Whole(noise.Gaussian):
        def events(self, run, start, stop):
            return super().events(run, 0, run.num_steps) if start == 0 < stop else ()

    monkeypatch.setattr(format, "_PARTS", {*format._PARTS, Whole})
    case = Case(Whole(), sampler=sampling.Poisson(NUM_RECORDS, 0.5))
    plan, params = case.plan(), zeros()
    dp_step = make_dp_step(linear_loss, plan)
    state = dp_step.init(params, secure_key())
    _, state, _ = dp_step(params, take(DATA, plan.draw(state, 0)), state)
    assert state.ledger == plan.ledger()
    saved = {"params": params, "plan": plan, "data": DATA}
    save(tmp_path, state=state, **saved)
    with pytest.raises(CheckpointError, match=r"end of an epoch to go on from with a new key, got one of step 1"):
        load(tmp_path, without_journal="new_key", **saved)


def test_a_call_without_a_state_claims_no_sampling():
    """Nobody drew its batch: as all records in each step."""
    plan = Case(Lagged(), sampler=sampling.Poisson(NUM_RECORDS, 0.5)).plan()
    _, state, _ = make_dp_step(linear_loss, plan)(zeros(), take(DATA, torch.arange(4)))
    assert state.ledger == plan.ledger()
    assert sum(value.numel() for value in zeros().values()) == SIZE


def test_sampler_or_sizes():
    facts = {"epsilon": 3.0, "delta": 1e-3, "num_steps": 3, "clip": clipping.Flat(1.0)}
    poisson = sampling.Poisson(50, 0.2)
    assert Plan.for_budget(sampler=poisson, **facts) == Plan.for_budget(
        dataset_size=50, expected_batch_size=10, **facts
    )
    for given in ({}, {"dataset_size": 50}, {"sampler": poisson, "dataset_size": 50}):
        with pytest.raises(InvalidArgument, match="Expected dataset_size and expected_batch_size, of Poisson sampling"):
            Plan.for_budget(**given, **facts)


@dataclasses.dataclass(frozen=True)
class Returning:
    """Noise of a user whose mechanism returns something else in the place of the sums."""

    change: Any

    def check(self, run):
        """Nothing is refused."""

    def events(self, run, start, stop):
        return noise.Gaussian().events(run, start, stop)

    def mechanism(self, run):
        return noise.Mechanism(lambda params: (), lambda clipped, state, turn: (self.change(dict(clipped.sums)), ()))


OTHERS = {
    "a shape that broadcasts": lambda sums: {name: value[..., :1] for name, value in sums.items()},
    "more rows": lambda sums: {name: value.expand(5, *value.shape) for name, value in sums.items()},
    "a narrow dtype": lambda sums: {name: value.half() for name, value in sums.items()},
    "one name more": lambda sums: {**sums, "more": torch.zeros(1)},
    "one name less": lambda sums: dict([*sums.items()][1:]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_mechanism_that_returns_something_else_releases_nothing(name, tmp_path):
    plan = Plan(sampling.Poisson(12, 1.0), clipping.Flat(1.0), 1.0, 2, 1e-2, noise=Returning(OTHERS[name]))
    journal = Journal(tmp_path / "journal.jsonl", plan)
    dp_step = make_dp_step(linear_loss, plan, journal=journal)
    state = dp_step.init(zeros(), secure_key())
    with pytest.raises(InvalidArgument, match="Expected noise of the names, dtypes and shapes of the sums"):
        dp_step(zeros(), as_batch(random_rows(0, 12)), state)
    assert not journal.path.exists()
