"""Shared test settings: derandomised properties, one thread order, no surprises from the machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings

# One thread a process, set before torch is imported: `make test` runs a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30, database=None)
settings.register_profile("explore", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("DPFUNC_HYPOTHESIS_PROFILE", "ci"))

# No test loses power: files need not reach the disk, for which others wait. Tests of it put a function of their own there.
os.fsync = lambda handle: None

# A shell that starts the tests in the background lets them ignore Ctrl-C, and tests of interrupts would see none.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Lines of dpfunc that run are noted by slipcover, and its workers do not hear of a --threshold. After so many calls of a line
# that was seen before, it looks for functions without what notes their lines, at 40 ms and more a time, for most lines of dpfunc.
if (coverage := getattr(sys.modules.get("slipcover.pytest_plugin"), "_slipcover_instance", None)) is not None:
    coverage.d_miss_threshold = 100_000

# The files that take longest. They begin first: if one begins last, the other processes wait for its end.
_LONGEST = (
    "test_launch.py", "test_isolation_zoo.py", "test_kept_state.py", "test_parity.py", "test_engine_rules.py",
    "test_main_job.py", "test_clipped.py", "test_recurrent.py", "test_fsdp.py",
    "test_llava_guide.py", "test_zoo_vision.py", "test_tilted.py", "test_kills.py", "test_package.py",
    "test_vqa.py", "test_run_folder.py", "test_run.py", "test_files.py",
    "test_tensor_parallel.py",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """No collection of garbage looks again at what was there before: imports of torch alone make 300,000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_earlier_runs() -> None:
    """Each file stands for a process of its own: which files share one, and with it insecure keys, is chance.

    Models of earlier files live on in caches, and each pass of the engine looks at all memory that they hold of rows.
    """
    if (state := sys.modules.get("dpfunc.state")) is not None:
        for known in (state._runs, state._ledgers):
            known.clear()
    if (loss := sys.modules.get("dpfunc.engines._guards.loss")) is not None:
        loss.memory_of_earlier.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))
