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
    [(wanted, *_), _] = run(2, "deepspeed_jobs:zero", 0, "auto")
    for params, _, counts, refused in run(2, "deepspeed_jobs:zero", stage, engine):
        assert refused.pop("steps") == ("ok", "")
        assert len(counts) == 3
        close(params, wanted)
        [(kind, text)] = refused.values()
        assert kind == "UnsupportedModel"
        assert "engine.module" in text


REFUSED = {
    # of ZeRO-3: engine, `memory_efficient_linear`, words of the error
    "linear layers that are patched": ("auto", True, "custom autograd.Function"),  # its default hides them
    "vmap": ("vmap", False, 'engine="auto"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradients_is_refused_by_all(name):
    engine, efficient, words = REFUSED[name]
    for *_, counts, refused in run(2, "deepspeed_jobs:zero", 3, engine, efficient):
        kind, text = refused["steps"]
        assert (kind, counts) == ("UnsupportedModel", [])
        assert words in text
