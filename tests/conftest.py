"""Shared test settings: derandomised properties, one thread order, no surprises from the machine."""

from __future__ import annotations

import os
import signal
import threading

from hypothesis import HealthCheck, settings

# One thread a process, set before torch is imported: `make test` runs a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30, database=None)
settings.register_profile("explore", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("DPFUNC_HYPOTHESIS_PROFILE", "ci"))

# A shell that starts the tests in the background lets them ignore Ctrl-C, and tests of interrupts would see none.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
