"""One picture of a run."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def plot_run(
    path: Path, curve: list[tuple[int, float]], spent: list[tuple[int, float]], norms: list[float], target: float
) -> None:
    """Validation accuracy over steps, epsilon over steps, and the norms of the last steps, which are not released."""
    if not curve:  # a run that was finished before it was resumed keeps its picture
        return
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    left.plot(*zip(*curve, strict=True), marker="o", color="#1f77b4")
    left.set(title="Validation accuracy", xlabel="step", ylabel="accuracy", ylim=(0, 1))
    middle.plot(*zip(*spent, strict=True), color="#2ca02c", label="spent")
    middle.axhline(target, color="#d62728", linestyle="--", label="budget")
    middle.set(title="Epsilon spent", xlabel="step", ylabel="epsilon", ylim=(0, 1.1 * target))
    middle.legend()
    right.hist(norms, bins=40, color="#7f7f7f")
    right.set(
        title="Norms of per-sample gradients\nUNRELEASED: not covered by epsilon", xlabel="norm", ylabel="samples"
    )
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
