"""Models sharded by FSDP2, their frozen base or all of them, or by DeepSpeed: the step is that of one process."""

from __future__ import annotations

import importlib.util

import pytest
from sharded_cases import check, close, expected
from torch import nn
from workers import _pool, outcomes, run

from dpfunc.distributed.fsdp import _layer_names
from dpfunc.errors import InvalidArgument

CASES = [
    # processes, way, engine, microbatch size, options of the model, tolerance
    (2, "by hand", "auto", None, {}, 1e-6),
    (2, "helper", "vmap", 2, {}, 1e-6),
    (2, "helper", "loop", 1, {}, 1e-6),
    (2, "attach", "auto", None, {}, 1e-6),
    (2, "helper", "ghost", 2, {"gradient_checkpointing": True}, 1e-6),
    (2, "helper", "auto", None, {"bf16": True}, 2e-2),
    (4, "helper", "auto", None, {"hsdp": True}, 1e-6),
]
MANAGED = [(2, 2, {"gradient_checkpointing": True}), (4, None, {"hsdp": True})]  # processes, microbatch size, options


def test_a_layer_with_two_names_is_divided_once():
    """`fully_shard` takes no layer twice; an expression that finds it by its second name alone left it out in silence."""
    shared = nn.Linear(2, 2)
    module = nn.ModuleDict({"one": nn.ModuleList([shared]), "two": nn.ModuleList([nn.Linear(2, 2), shared])})
    assert _layer_names(module, None) == ["one.0", "two.0"]
    assert _layer_names(module, r"\.") == ["two.0", "one.0"]  # parts of others first
    with pytest.raises(InvalidArgument, match="'two.1' is 'one.0'"):
        _layer_names(module, r"two\.")
    with pytest.raises(InvalidArgument, match="got unknown"):
        _layer_names(module, ["two.0", ""])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([*case[1:3], *case[4]]))
def test_a_sharded_base_gives_the_same(case):
    """Eight noisy steps, with 2.9 records expected in a step; with HSDP two replicas, each sharded in two."""
    size, way, engine, microbatch_size, options, tolerance = case
    found = run(size, "fsdp_jobs:train_with", way, engine, microbatch_size=microbatch_size, **options)
    check(found, expected(way, "loop"), tolerance)


@pytest.mark.parametrize("case", MANAGED, ids=str)
def test_a_managed_model_gives_the_same(case):
    """Eight noisy steps with AdamW, of which each process holds parts."""
    size, microbatch_size, options = case
    options |= {"microbatch_size": microbatch_size, "adam": True}
    found, wanted = run(size, "fsdp_jobs:train_with", "managed", None, **options), expected("full", "loop", adam=True)
    check(found, wanted)
    assert all(sharded >= len(wanted[0]) - 1 and held < 0.65 * wanted[3][1] for _, _, _, (sharded, held) in found)


@pytest.mark.parametrize(
    ("size", "way", "options"), [(2, "managed", {}), (4, "managed", {"hsdp": True}), (2, "helper", {})]
)
def test_statistics_are_those_of_one_process(size, way, options):
    """Telemetry and the counts of adaptive clipping, also where a process has no records in a step."""
    [(wanted, params)] = run(1, "fsdp_jobs:statistics_with", "full" if way == "managed" else way, "loop", whole=True)
    found = run(size, "fsdp_jobs:statistics_with", way, "auto", **options)
    for told, its_params in found:
        close(its_params, params, 1e-5)
        assert [row[:3] for row in told] == [row[:3] for row in found[0][0]]
        for own, one in zip(told, wanted, strict=True):
            assert own[:3] == pytest.approx(one[:3], abs=1e-4)
    assert len({row[0] for row in wanted}) == 6
    dealt = list(zip(*([row[3] for row in told] for told, _ in found), strict=True))
    assert [sum(row) for row in dealt] == [row[3] for row in wanted]
    assert any(0 in row and sum(row) for row in dealt)


def test_functions_of_users_with_a_generated_rule_for_vmap_are_computed():
    """A frozen base, where rows go to the loop, and a managed model, where the function is a node of the level."""
    for found in run(2, "fsdp_jobs:functions_of_users"):
        for (errors, step, spent, grads), (*_, plain) in found.values():
            assert (errors, step, spent) == ([("ok", "")], 1, 1)
            close(grads, plain)


def test_each_process_holds_its_part():
    """And puts layers together once for each forward and each backward pass."""
    for counts in run(2, "fsdp_jobs:what_is_held"):
        share, gathers, sharded = counts[None]
        assert 0.4 < share < 0.6
        assert (gathers, sharded) == (5, True)  # two layers and the rest, and the layers once more
        assert counts[False][1:] == (3, True)


@pytest.mark.parametrize(("engine", "alone"), [("auto", False), ("loop", True)])
def test_steps_without_lockstep_must_not_communicate(engine, alone):
    """`data_parallel()`, or no ranks, with a sharded model: an error on all, before anything is computed or spent."""
    for [(kind, text)], step, spent, calls in run(2, "fsdp_jobs:refuse_to_communicate", engine, alone):
        assert kind == "UnsupportedModel"
        assert "fully_shard" in text
        assert "ranks=dpfunc.distributed.sharded(mesh)" in text
        assert (step, spent, calls) == (0, 0, 0)


REFUSED = {
    "managed": ("UnsupportedModel", "layers.0.norm.weight.*managed by fully_shard.*distributed.shard"),
    "sharded later": ("UnsupportedModel", "managed by fully_shard"),
    "twice": ("UnsupportedModel", "not sharded, got one with parts that fully_shard was called on"),
    "no layer": ("InvalidArgument", "at least one layer"),
    "unknown layer": ("InvalidArgument", "unknown layers.9"),
    "nothing trained": ("InvalidArgument", "at least one trainable parameter"),
    "other mesh": ("InvalidArgument", "mesh with one dimension, or two"),
    "adapter": ("InvalidArgument", "knows what is trained"),
}


def test_refusals_of_modules():
    for found in run(2, "fsdp_jobs:refusals"):
        assert found.keys() == REFUSED.keys()
        for name, (kind, text) in found.items():
            assert kind == REFUSED[name][0], (name, text)
            assert all(part in text for part in REFUSED[name][1].split(".*")), (name, text)


LIMIT = 300.0  # seconds, of the group; those that wait for another process must not wait for it, on a busy machine too


@pytest.mark.parametrize(("place", "engine"), [("loss, as torch", "auto"), ("layer", "managed"), ("backward", "ghost")])
def test_an_error_of_one_process_ends_the_step_on_all(place, engine):
    """Its own error there; elsewhere StepAborted with the process and the reason, long before the time is over."""
    first, second = (each.value for each in outcomes(2, "fsdp_jobs:one_fails", place, engine, seconds=LIMIT))
    own = "stop" if place == "backward" else "the rows of one process"
    kind = "RuntimeError" if place == "loss, as torch" else "ValueError"
    assert first[0][0][0] == "StepAborted"
    assert f"process 1: {kind}: {own}" in first[0][0][1]
    assert second[0][0] == (kind, own)
    for (_, (again, said)), step, spent, seconds in (first, second):
        assert (step, spent) == (0, 0)
        assert seconds < LIMIT / 3
        assert again == "StepAborted"  # the messages of the broken step may still be on their way
        assert f"process 1: {kind}: {own}" in said
        assert "start all of them again" in said


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_begins_on_all_processes_or_on_none(whole):
    first, second = (each.value for each in outcomes(2, "fsdp_jobs:one_begins_with_nan", whole, seconds=LIMIT))
    assert first[0][0] == "StepAborted"
    assert "process 1: InvalidArgument: Expected finite" in first[0][1]
    assert second[0][0] == "InvalidArgument"
    assert max(first[1], second[1]) < LIMIT / 3


@pytest.mark.parametrize("backward", [False, True])
def test_a_step_after_an_error(backward):
    """Nothing of the broken pass is left: the gradients are right, and layers are sharded again."""
    for [(kind, _)], (found, step, spent, grads), wanted, sharded in run(2, "fsdp_jobs:after_an_error", backward):
        assert (kind, found) == ("ValueError", [("ok", "")])
        assert (step, spent, sharded) == (1, 1, True)
        close(grads, wanted[3], 0)


def test_the_original_of_an_adapter_is_left_alone():
    """Its parameters stay whole and equal, so that merging still works; those of the adapter's copy are sharded."""
    for kept, whole, sharded, difference, constants in run(2, "fsdp_jobs:an_adapter_is_sharded"):
        assert (kept, whole, sharded, constants) == (True, True, True, 2)
        assert difference < 1e-6


def test_a_managed_model_needs_its_engine_and_its_ranks():
    """Any other would give no gradient, or that of one process: an error on all, nothing is spent."""
    for found, difference, sharded in run(2, "fsdp_jobs:managed_refusals"):
        for case, (errors, step, spent) in found.items():
            kind, text = errors[0]
            assert kind in ("UnsupportedModel", "InvalidArgument"), (case, kind, text)
            assert (step, spent) == (0, 0)
        assert "does not use the trained parameters" in found["unused"][0][0][1]
        assert "does not manage them" in found["ignored"][0][0][1]
        assert difference < 1e-6
        assert sharded


def test_one_layer_is_gathered_at_a_time():
    """Each layer is put together four times, forward and backward for norms and for sums; half of the sums is kept."""
    for gathers, kept, most, every in run(2, "fsdp_jobs:managed_costs"):
        assert gathers == 10  # two layers four times, and what is outside of them twice
        assert kept < 0.6 * every
        assert most < 0.75 * every


# Trained parameters of which each process holds a part, and their noise

PARTS = [("sharded lora", "vmap", 2), ("full", "ghost", 2)]


@pytest.mark.parametrize("case", PARTS, ids=lambda case: "-".join(case[:2]))
def test_parts_give_the_same(case):
    """Eight noisy steps of two processes; the optimizer holds parts only."""
    way, engine, microbatch_size = case
    found = run(2, "fsdp_jobs:train_with", way, engine, microbatch_size=microbatch_size, adam=True)
    wanted = expected(way, "loop", adam=True)
    check(found, wanted)
    whole = wanted[3][1]
    assert sum(held for _, _, _, (_, held) in found) < 1.2 * whole  # a few small ones are held by both
    assert all(sharded > len(wanted[0]) // 2 and held < 0.65 * whole for _, _, _, (sharded, held) in found)


def test_replicas_of_parts():
    """HSDP: each half of the parameters is held by two processes, and stays the same on both in every bit."""
    check(run(4, "fsdp_jobs:train_with", "full", "auto", hsdp=True), expected("full", "loop"))


def test_an_error_of_one_process_with_parts_aborts_the_step_on_all():
    """And processes stay in step: when they try again they see the same."""
    for (found, step, spent, _), kind in zip(
        run(2, "fsdp_jobs:one_fails_with_parts"), ("StepAborted", "ValueError"), strict=True
    ):
        assert [each[0] for each in found] == [kind, kind]
        assert (step, spent) == (0, 0)


def test_replicas_that_differ_are_found():
    """One entry of one part, in one of its two replicas."""
    for [(kind, text)], step, spent in run(4, "fsdp_jobs:one_replica_differs"):
        assert (kind, step, spent) == ("RankMismatch", 0, 0)
        assert "differ in at least one bit" in text


# DeepSpeed ZeRO: skipped only where it cannot be imported, since it is built on the spot


@pytest.fixture
def deepspeed():
    """It keeps groups of an earlier run, and patches torch: new processes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: it has no wheels, and is not needed by dpfunc")
    _pool.stop()
    yield
    _pool.stop()


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(("stage", "engine"), [(1, "vmap"), (2, "auto"), (3, "auto"), (3, "ghost")])
def test_a_model_partitioned_by_deepspeed_gives_the_same(stage, engine):
    """Three noisy steps on `engine.module`; trained parameters are plain tensors, added after ZeRO-3."""
    [(wanted, *_), _] = run(2, "fsdp_jobs:zero", 0, "auto")
    for params, _, counts, refused in run(2, "fsdp_jobs:zero", stage, engine):
        assert refused.pop("steps") == ("ok", "")
        assert len(counts) == 3
        close(params, wanted)
        [(kind, text)] = refused.values()
        assert kind == "UnsupportedModel"
        assert "engine.module" in text


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(
    ("engine", "efficient", "words"),
    [("auto", True, "custom autograd.Function"), ("vmap", False, 'engine="auto"')],
    ids=["linear layers that ZeRO-3 patches by default", "vmap"],
)
def test_what_has_no_gradients_under_deepspeed_is_refused_by_all(engine, efficient, words):
    for *_, counts, refused in run(2, "fsdp_jobs:zero", 3, engine, efficient):
        kind, text = refused["steps"]
        assert (kind, counts) == ("UnsupportedModel", [])
        assert words in text
