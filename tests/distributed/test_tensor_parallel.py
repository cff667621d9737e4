"""Tensor parallel layers: the engines' local parts make the norms and clipped sums of one process."""

from __future__ import annotations

import pytest
from workers import run

CASES = [
    # processes, model, engine, microbatches
    (2, "mlp", "loop", (5,)),
    (2, "mlp", "ghost", (3, 2)),
    (2, "mlp", "auto", (2, 2, 1)),
    (2, "llama", "auto", (3, 2)),
    (2, "llama lora", "vmap", (4, 1)),
    (4, "llama lora", "auto", (5,)),
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
        assert found["engine"] == "loop"


def test_gradient_checkpointing():
    for found in run(2, "tp_jobs:parity", "llama lora", "auto", "float64", (5,), True):
        assert max(found["norms"], found["all"]) < 1e-10, found


@pytest.mark.parametrize("name", ["mlp", "llama lora"])
def test_float32(name):
    for found in run(2, "tp_jobs:parity", name, "auto", "float32"):
        assert max(found["losses"], found["norms"], found["sums"], found["all"]) < 1e-5, found
        assert found["dtypes"] == ["torch.float32"]


def test_norms_need_the_sum_over_ranks():
    """Without it they are too small, and clipping would let too much pass."""
    for found in run(2, "tp_jobs:parity", "llama lora", "auto"):
        assert found["norms"] < 1e-10
        assert found["without the sum"] > 0.01


def test_rounding_moves_parts_as_it_moves_the_whole():
    for still_dtensors, off in run(2, "tp_jobs:shaken_alike"):
        assert still_dtensors
        assert off == 0.0


UNUSUAL = [
    # what is split, and words of the error; None where rows alone give what one process gives
    ("vmap", None),
    ("frozen", None),
    ("sequence", None),
    ("table", None),
    ("transposed", None),
    ("scaled", None),
    ("own heads", ["norm.weight, norm.bias", "a part of the gradient"]),
    ("across records", ["cannot be computed", "redistribut"]),
    ("other records", ["Give all of them the same records"]),
    ("losses", ["a DTensor", "full_tensor()"]),
]


@pytest.mark.parametrize(("kind", "words"), UNUSUAL, ids=[kind for kind, _ in UNUSUAL])
def test_other_layers_give_the_same_or_are_refused_on_every_rank(kind, words):
    for error, said in run(2, "tp_jobs:unusual", kind, "vmap" if kind == "vmap" else "auto"):
        if words is None:
            assert error is None, said
            assert said < 1e-10
        else:
            assert error in ("UnsupportedModel", "InvalidArgument")
            assert all(word in said for word in words), said
