"""Two pictures of a run: one to share, and one of what no noise protects."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

UNRELEASED = "UNRELEASED_norms.png"


def plot_run(
    path: Path, curve: list[tuple[int, float]], spent: list[tuple[int, float]], target: float, twin: float | None
) -> None:
    """Accuracy on validation texts, which are not protected, and epsilon, over steps. It holds no private number.

    Args:
        path: of the picture. curve: (step, accuracy). spent: (step, epsilon). target: the budget.
        twin: accuracy of the non-private twin on the same texts, or None.
    """
    if not curve:  # a run that was finished before it was resumed keeps its picture
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), constrained_layout=True)
    left.plot(*zip(*curve, strict=True), marker="o", color="#1f77b4", label="private")
    if twin is not None:
        left.axhline(twin, color="#7f7f7f", linestyle="--", label="non-private twin (not covered by epsilon)")
    left.set(title="Accuracy on validation texts (not protected)", xlabel="step", ylabel="accuracy", ylim=(0, 1))
    right.plot(*zip(*spent, strict=True), color="#2ca02c", label="spent")
    right.axhline(target, color="#d62728", linestyle="--", label="budget")
    right.set(title="Epsilon spent", xlabel="step", ylabel="epsilon", ylim=(0, 1.1 * target))
    _save(figure, (left, right), path)


def plot_norms(folder: Path, norms: list[float], bound: float) -> None:
    """Norms of the last steps' gradients beside the clip bound, in a file whose name and title say UNRELEASED.

    Args:
        folder: of the run. norms: of per-sample gradients, before clipping. bound: clip bound on the whole gradient.
    """
    there = [norm for norm in norms if 0 < norm < float("inf")]
    if not there:
        return
    figure, axis = plt.subplots(figsize=(6, 3.8), constrained_layout=True)
    low, high = min(*there, bound), max(*there, bound)
    edges = [low * (high / low) ** (i / 40) for i in range(41)] if high > low else 40
    axis.hist(there, bins=edges, color="#7f7f7f")
    axis.axvline(bound, color="#d62728", linestyle="--", label=f"clip bound {bound:.3g}")
    axis.set(
        title="UNRELEASED: norms of per-sample gradients\nnot covered by epsilon; do not share", xlabel="norm",
        ylabel="samples", xscale="log",
    )  # fmt: skip
    _save(figure, (axis,), folder / UNRELEASED)


def _save(figure: plt.Figure, axes: tuple[plt.Axes, ...], path: Path) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
