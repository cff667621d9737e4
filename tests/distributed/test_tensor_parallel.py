"""Tensor parallel layers: the engines' local parts make the norms and clipped sums of one process."""

from __future__ import annotations

import pytest
from workers import run

CASES = [
    # processes, model, engine, microbatches
    (2, "mlp", "loop", (5,)),
    (2, "mlp", "bookkeeping", (5,)),
    (2, "mlp", "ghost", (3, 2)),
    (2, "mlp", "auto", (2, 2, 1)),
    (2, "llama", "bookkeeping", (3, 2)),
    (2, "llama lora", "bookkeeping", (4, 1)),
    (2, "llama lora", "ghost", (5,)),
    (2, "llama lora", "auto", (5,)),
    (4, "llama lora", "bookkeeping", (5,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_norms_and_sums_are_those_of_one_process(case):
    """On every rank, so also those of parameters that are on all ranks."""
    size, name, engine, microbatches = case
    for found in run(size, "tp_jobs:parity", name, engine, "float64", microbatches):
        assert max(found["losses"], found["norms"], found["sums"], found["all"]) < 1e-10, found
        assert found["plain"]
        assert found["local shapes"]
        assert found["sharded"] >= 3
        assert found["engine"] == ("bookkeeping" if engine == "auto" else engine)


def test_gradient_checkpointing():
    for found in run(2, "tp_jobs:parity", "llama lora", "bookkeeping", "float64", (5,), True):
        assert max(found["norms"], found["all"]) < 1e-10, found


@pytest.mark.parametrize("name", ["mlp", "llama lora"])
def test_float32(name):
    for found in run(2, "tp_jobs:parity", name, "bookkeeping", "float32"):
        assert max(found["losses"], found["norms"], found["sums"], found["all"]) < 1e-5, found
        assert found["dtypes"] == ["torch.float32"]


def test_norms_need_the_sum_over_ranks():
    """Without it they are too small, and clipping would let too much pass."""
    for found in run(2, "tp_jobs:parity", "llama lora", "bookkeeping"):
        assert found["norms"] < 1e-10
        assert found["without the sum"] > 0.01


def test_learning_shakes_parts_as_it_shakes_the_whole():
    for still_dtensors, off in run(2, "tp_jobs:shaken_alike"):
        assert still_dtensors
        assert off == 0.0


REFUSED = [
    ("vmap", "vmap", ["up.weight", 'engine="bookkeeping"']),
    ("frozen", "vmap", ["tensor parallel", 'engine="bookkeeping"']),
    ("compiled", "auto", ["up.weight", "compile=False"]),
    ("sequence", "bookkeeping", ["layer_norm of parameter 'norm.weight'", "(1)}", "leave this one out"]),
    ("own heads", "bookkeeping", ["norm.weight, norm.bias", "a part of the gradient"]),
    ("own heads", "loop", ["norm.weight, norm.bias", "a part of the gradient"]),
    ("own heads", "auto", ["a part of the gradient"]),
    ("table", "bookkeeping", ["embedding of parameter 'embed.weight'", "(0)}"]),
    ("transposed", "bookkeeping", ["t of parameter 'weight'"]),
    ("scaled", "bookkeeping", ["mul of parameter 'scale'"]),
    ("across records", "bookkeeping", ["linear of parameter 'bias', 'weight'", "input (4, 4, 6) {tp: S(0)}"]),
    ("other records", "bookkeeping", ["Give all of them the same records"]),
    ("losses", "bookkeeping", ["a DTensor", "full_tensor()"]),
]


@pytest.mark.parametrize(("kind", "engine", "words"), REFUSED, ids=[f"{kind}-{engine}" for kind, engine, _ in REFUSED])
def test_what_is_not_covered_is_refused_on_every_rank(kind, engine, words):
    for error, said in run(2, "tp_jobs:refused", kind, engine):
        assert error in ("UnsupportedModel", "InvalidArgument")
        assert all(word in said for word in words), said
