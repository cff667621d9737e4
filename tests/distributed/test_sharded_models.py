"""Models whose frozen base is sharded by FSDP2: the step is that of one process without sharding."""

from __future__ import annotations

import pytest
from sharded_cases import check, close, expected
from workers import outcomes, run

CASES = [
    # way, engine, options of the model, microbatch size, tolerance
    ("by hand", "auto", {}, None, 1e-6),
    ("by hand", "vmap", {}, 2, 1e-6),
    ("helper", "ghost", {"reshard": False}, None, 1e-6),
    ("helper", "loop", {}, 1, 1e-6),
    ("helper", "auto", {}, 1, 1e-6),
    ("attach", "auto", {}, None, 1e-6),
    ("helper", "auto", {"gradient_checkpointing": True}, None, 1e-6),
    ("helper", "ghost", {"gradient_checkpointing": True}, 2, 1e-6),
    ("helper", "auto", {"bf16": True}, None, 2e-2),
    ("helper", "vmap", {"bf16": True}, None, 2e-2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([*case[:2], *case[2]]))
def test_a_sharded_base_gives_the_same(case):
    """Eight noisy steps of two processes, with 2.9 records expected in a step."""
    way, engine, options, microbatch_size, tolerance = case
    found = run(
        2, "fsdp_jobs:train_with", {"way": way, "engine": engine, "microbatch_size": microbatch_size, **options}
    )
    check(found, expected(way, "loop"), tolerance)


def test_replicas_of_parts():
    """HSDP: two replicas, each sharded in two."""
    found = run(4, "fsdp_jobs:train_with", {"way": "helper", "engine": "auto", "hsdp": True})
    check(found, expected("helper", "loop"))


def test_transformers_and_peft_with_gradient_checkpointing():
    (wanted, _), *_ = run(1, "fsdp_jobs:hugging_face", False)
    for params, repeated in run(2, "fsdp_jobs:hugging_face", True):
        close(params, wanted)
        assert repeated


def test_each_process_holds_its_part():
    """And puts layers together once for each forward and each backward pass."""
    for counts in run(2, "fsdp_jobs:what_is_held"):
        share, gathers, sharded = counts[None]
        assert 0.4 < share < 0.6
        assert (gathers, sharded) == (5, True)  # two layers and the rest, and the layers once more
        assert counts[False][1:] == (3, True)


@pytest.mark.parametrize(("engine", "alone"), [("vmap", False), ("auto", False), ("auto", True), ("loop", True)])
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
    "sharded later, vmap": ("UnsupportedModel", "managed by fully_shard"),
    "twice": ("UnsupportedModel", "not sharded, got one with parts that fully_shard was called on"),
    "no layer": ("InvalidArgument", "at least one layer"),
    "unknown layer": ("InvalidArgument", "unknown layers.9"),
    "nothing trained": ("InvalidArgument", "at least one trainable parameter"),
    "other mesh": ("InvalidArgument", "mesh with one dimension, or two"),
    "adapter": ("InvalidArgument", "knows what is trained"),
}


def test_refusals():
    for found in run(2, "fsdp_jobs:refusals"):
        assert found.keys() == REFUSED.keys()
        for name, (kind, text) in found.items():
            assert kind == REFUSED[name][0], (name, text)
            assert all(part in text for part in REFUSED[name][1].split(".*")), (name, text)


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_older_versions_of_torch(engine):
    """Their hooks are unknown to torch.func: rows are computed one by one."""
    assert [found[0] for found in run(2, "fsdp_jobs:without_new_hooks", engine)] == [[("ok", "")]] * 2


LIMIT = 60.0  # seconds, of the group; those that wait for another process must not wait for it


@pytest.mark.parametrize(
    ("place", "engine"),
    [
        ("loss", "auto"),
        ("loss, as torch", "auto"),
        ("layer", "managed"),
        ("backward", "ghost"),
    ],
)
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
