"""The script that measures small steps."""

from __future__ import annotations

from benchmarks import small_steps


def test_small_steps_are_measured(monkeypatch):
    monkeypatch.setattr(small_steps, "STEPS", 1)
    found = small_steps.measure(small_steps.CASES["perceptron, 3 layers"](), 1)
    assert found["private"] > 0
    assert found["ratio"] > 0
