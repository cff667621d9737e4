"""`LoRAConfig`: every argument has a domain, and a value outside of it is named."""

from __future__ import annotations

import pytest

from dpfunc.errors import InvalidArgument
from dpfunc.lora import LoRAConfig

BAD = {
    "rank 0": ({"rank": 0}, "Expected an integer rank >= 1, got rank=0"),
    "float rank": ({"rank": 2.0}, r"got rank=2.0"),
    "alpha": ({"alpha": 0.0}, "Expected 0 < alpha < inf"),
    "dropout": ({"dropout": 1.0}, "Expected 0 <= dropout < 1"),
    "train": ({"train": "A"}, "Expected train to be one of 'AB', 'B'"),
    "init": ({"init": "zeros"}, "Expected init to be one of 'kaiming', 'orthonormal'"),
    "rslora": ({"rslora": "no"}, "Expected rslora to be true or false, got rslora='no'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        LoRAConfig(**{"targets": ["head"], "rank": 2, "alpha": 6, **changes})


def test_what_is_kept_can_be_compared_and_scales_by_rank():
    config = LoRAConfig(["a", "b"], 4, 6)
    assert config == LoRAConfig(("a", "b"), 4, 6.0)
    assert (config.scale, LoRAConfig(("a",), 4, 6, rslora=True).scale) == (1.5, 3.0)
