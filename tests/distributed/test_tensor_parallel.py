"""Tensor parallel models: the parameters, the ledger and the errors of one process."""

from __future__ import annotations

import pytest
import torch
from workers import run

JOBS = "tp_jobs"
# name of the model, processes, parts, more
RUNS = [
    ("mlp", 2, 2, {}),
    ("mlp", 4, 2, {"engine": "auto", "clip": "layers"}),
    ("mlp", 2, 2, {"engine": "ghost", "microbatch_size": 2, "expected": 9.0}),
    ("llama lora", 2, 2, {"engine": "loop"}),
    ("llama lora", 4, 2, {"frozen_sharded": True}),
    ("llama", 2, 2, {"engine": "vmap"}),
    ("llama lora", 2, 2, {"checkpointing": True, "microbatch_size": 3}),
    ("llama lora", 2, 1, {"frozen_sharded": True}),
]


@pytest.mark.parametrize("case", RUNS, ids=lambda case: "-".join(map(str, (*case[:3], *case[3].values()))))
def test_sharded_models_train_like_whole_ones(case):
    """Noisy steps, one of them without records; some also shard the frozen base by FSDP2; a tensor dimension may have size 1."""
    name, size, parts, more = case
    plain = {key: value for key, value in more.items() if key in ("clip", "expected")}
    [(expected, ledger, drawn)] = run(1, f"{JOBS}:train", name, 0, **plain)
    assert drawn == [1, 0, 4] or "expected" in more
    for params, its_ledger, _ in run(size, f"{JOBS}:train", name, parts, **more):
        assert its_ledger == ledger
        assert params.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(params[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "frozen"), [(2, ()), (2, ("up", "down")), (4, ())], ids=["2", "whole ones", "4"])
def test_norms_of_parts_are_found_out(size, frozen):
    """Without the sum over processes each clips by another norm: what nobody cuts then differs, and is not released."""
    for kind, said, written in run(size, f"{JOBS}:without_the_sum_of_norms", 2, frozen):
        assert (kind, written) == ("RankMismatch", 0)
        assert "would release different values of what they hold alike" in said


TROUBLE = {
    "data parallel": ("InvalidArgument", "dpfunc.distributed.sharded"),
    "one process": ("InvalidArgument", "the process group has 2 processes"),
    "microbatches": ("InvalidArgument", "what each process measures may differ"),
    "other records": ("RankMismatch", "same records"),
    "other mask": ("RankMismatch", "same mask_B"),
    "one ulp": ("RankMismatch", ""),
    "one ulp of a part": ("RankMismatch", ""),
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_trouble_is_an_error_of_all(kind):
    error, advice = TROUBLE[kind]
    for found, text, spent in run(4 if kind == "one ulp of a part" else 2, f"{JOBS}:trouble", kind):
        assert (found, spent) == (error, 0)
        assert advice in text


def test_trouble_of_one_is_an_error_of_all():
    found = run(4, f"{JOBS}:trouble", "nan")
    assert [row[0] for row in found] == ["StepAborted"] * 3 + ["InvalidArgument"]
    assert all(row[2] == 0 for row in found)


def test_every_dimension_of_the_mesh_is_named():
    assert run(2, f"{JOBS}:mesh_dims", ("dp", "cp"), ("tp",)) == [("ok", "")] * 2
    for dims in ((("dp",), ("tp",)), ((), ("tp", "dp", "cp")), (("dp", "dp"), ("tp",)), (("dp", "pp"), ("tp",))):
        for _, text in run(2, f"{JOBS}:mesh_dims", *dims):
            assert "Context, sequence and pipeline parallelism" in text


def test_a_common_start_is_that_of_all():
    """Of processes with other records, and of those with other parts."""
    for tensor, said in run(4, f"{JOBS}:common_start"):
        assert torch.equal(tensor, torch.ones(2, 3))
        assert said == ["RankMismatch"] * 4


def test_rounding_moves_parts_as_it_moves_the_whole():
    for still_dtensors, off in run(2, "tp_jobs:shaken_alike"):
        assert still_dtensors
        assert off == 0.0


UNUSUAL = [
    # what is split, and words of the error; None where rows alone give what one process gives
    ("frozen", None),
    ("sequence", None),
    ("table", None),
    ("own heads", ["norm.weight, norm.bias", "a part of the gradient"]),
    ("across records", ["cannot be computed", "redistribut"]),
    ("other records", ["Give all of them the same records"]),
    ("losses", ["a DTensor", "full_tensor()"]),
]


@pytest.mark.parametrize(("kind", "words"), UNUSUAL, ids=[kind for kind, _ in UNUSUAL])
def test_other_layers_give_the_same_or_are_refused_on_every_rank(kind, words):
    for error, said in run(2, "tp_jobs:unusual", kind):
        if words is None:
            assert error is None, said
            assert said < 1e-10
        else:
            assert error in ("UnsupportedModel", "InvalidArgument")
            assert all(word in said for word in words), said
