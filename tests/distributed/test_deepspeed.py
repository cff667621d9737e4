"""Models that DeepSpeed ZeRO has partitioned. Skipped only where DeepSpeed cannot be imported: it is built on the spot."""

from __future__ import annotations

import importlib.util

import pytest
from sharded_cases import close
from workers import _pool, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: it has no wheels, and is not needed by dpfunc",
)


@pytest.fixture(autouse=True)
def _new_processes():
    """DeepSpeed keeps groups of an earlier run, and patches torch."""
    _pool.stop()
    yield
    _pool.stop()


@pytest.mark.parametrize(("stage", "engine"), [(1, "vmap"), (2, "auto"), (3, "auto"), (3, "ghost")])
def test_a_partitioned_model_gives_the_same(stage, engine):
    """Three noisy steps on `engine.module`; trained parameters are plain tensors, added after ZeRO-3."""
    [(wanted, _, _), _] = run(2, "deepspeed_jobs:zero", 0, "auto")
    for params, step, refused in run(2, "deepspeed_jobs:zero", stage, engine):
        assert refused.pop("steps") == ("ok", "")
        assert step == 3
        close(params, wanted)
        [(kind, text)] = refused.values()
        assert kind == "UnsupportedModel"
        assert "engine.module" in text


def test_what_patches_linear_layers_is_refused():
    """ZeRO-3 with its default `memory_efficient_linear` hides them: an error on all, and not zeros."""
    for _, step, refused in run(2, "deepspeed_jobs:zero", 3, "auto", True):
        kind, text = refused["steps"]
        assert (kind, step) == ("UnsupportedModel", 0)
        assert "custom autograd.Function" in text


def test_vmap_says_what_to_use():
    for _, step, refused in run(2, "deepspeed_jobs:zero", 3, "vmap"):
        kind, text = refused["steps"]
        assert (kind, step) == ("UnsupportedModel", 0)
        assert 'engine="auto"' in text
