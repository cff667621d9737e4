"""Targets beside what was measured: `python -m benchmarks.targets`, which `make bench` runs last.

Nothing is measured here: each target names a number in a committed result file. The table goes into
docs/performance.md, which says why targets are missed, and pictures of times and memory beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import freed_memory, loader, overhead, pictures, small_steps
from benchmarks.engines.contestants import JAX_PRIVACY, OPACUS, OPAKE, WHOLE_DPFUNC, WHOLE_JAX, WHOLE_PLAIN
from benchmarks.launches.__main__ import OURS
from benchmarks.launches.cases import CASES as LAUNCHES
from benchmarks.results import DOCS, FOLDER, fill, markdown, printed, read

PAGE = DOCS / "performance.md"
SCALES = {"x": 1.0, "ms": 1e3, "ns": 1.0, "s": 1.0, "operations": 1.0}


@dataclass(frozen=True)
class Target:
    """A largest value, and where the measured one stands.

    Args:
        title: one line for the table. limit: in the unit. unit: one of `SCALES`.
        file: of benchmarks/results, without `.json`. path: keys that lead to the number in it.
        why: a word that the page explains, for when it is missed.
    """

    title: str
    limit: float
    unit: str
    file: str
    path: tuple[str, ...]
    why: str = ""

    def measured(self, reports: dict[str, Any]) -> float | None:
        """The number in the unit; None where it was not measured."""
        value: Any = reports.get(self.file)
        for key in self.path:
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else SCALES[self.unit] * value


def contestant(title: str, limit: float, unit: str, file: str, case: str, who: str, *path: str, why: str) -> Target:
    return Target(title, limit, unit, file, ("cases", case, "contestants", who, *path), why)


# (title, limit, unit, file, case, contestant, number, reason when it is missed): of the default engine, of a whole step
# of two processes beside training without privacy, and of a number of noise.
_CONTESTANTS = (
    ("w1: decoder, LoRA", 1.00, "x", "engines", "w1", "auto", "time", "ratio", "lora"),
    ("w2n: decoder, all parameters", 1.12, "x", "engines", "w2n", "auto", "time", "ratio", "full"),
    ("w3: convolutional network", 1.30, "x", "engines", "w3", "auto", "time", "ratio", "convolution"),
    ("w4: ViT, LoRA", 1.03, "x", "engines", "w4", "auto", "time", "ratio", "lora"),
    ("BERT, LoRA", 1.03, "x", "engines", "bert", "auto", "time", "ratio", "lora"),
    ("GPT-2, all parameters", 1.20, "x", "engines", "gpt2", "auto", "time", "ratio", "full"),
    ("ResNet18", 1.30, "x", "engines", "resnet18", "auto", "time", "ratio", "convolution"),
    ("VGG11", 1.40, "x", "engines", "vgg11", "auto", "time", "ratio", "convolution"),
    ("VGG19", 1.40, "x", "engines", "vgg19", "auto", "time", "ratio", "convolution"),
    ("ResNeXt", 1.40, "x", "engines", "resnext", "auto", "time", "ratio", "convolution"),
    *((f"{case}: memory", limit, "x", "engines", case, "auto", "memory", "ratio", "memory")
      for limit, cases in ((1.05, "w1 w2n gpt2 bert w4 w4f"), (1.10, "w3 resnet18 vgg11 vgg19 resnext"))
      for case in cases.split()),
    ("DP-MNIST, B = 256", 1.5, "x", "engines", "mnist", "auto", "time", "ratio", "mnist"),
    ("LSTM", 2.0, "x", "engines", "layer:lstm", "auto", "time", "ratio", "lstm"),
    ("LoRA, 2 processes (CPU time)", 1.05, "x", "distributed", "w1 x 2", "dp_step", "cpu", "ratio", "processes"),
    ("all parameters, 2 processes (CPU time)", 1.20, "x", "distributed", "w2n x 2", "dp_step", "cpu", "ratio",
     "processes"),
    *((title, 8.0, "ns", "noise_cost", case, "secure float32, 1 thread", "best_cpu_ns_per_element", "noise")
      for title, case in (("noise, a number, one thread (CPU time)", "flat, 1e7"),
                          ("noise, 200 leaves of 32768", "LoRA, 200 x 32768"))),
)  # fmt: skip
TARGETS = (
    *(contestant(*numbers, why=why) for *numbers, why in _CONTESTANTS),
    Target("import dpfunc", 150.0, "ms", "startup", ("rows", "import dpfunc", "best_seconds")),
    Target("import dpfunc.accounting", 0.4, "s", "startup", ("rows", "import dpfunc.accounting", "best_seconds")),
    *(contestant(f"launches, {case.title}", case.aim, "operations", "launches", name, OURS, "operations",
                 why="launches")
      for name, case in LAUNCHES.items() if case.aim is not None),
    *(Target(f"loader, {case}: {name}", 1.2, "x", "loader", ("ratios", case, name), "loader")
      for name in ("100 steps", "memory") for case in loader.CASES),
)  # fmt: skip

# Steps of at most this many milliseconds have a target of their own: 1.5 x plain + 3 ms.
SMALL_STEP_MS, SMALL_RATIO, SMALL_ADDED_MS = 5.0, 1.5, 3.0


def reports(folder: Path = FOLDER) -> dict[str, Any]:
    """All result files, by name; of loaders, the ratios too."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    cases = cases_of(found, "loader")
    ratios = {name: loader.ratios(case) for name, case in cases.items() if case["contestants"]}
    return {**found, "loader": {"cases": cases, "ratios": ratios}}


def cases_of(found: dict[str, Any], file: str) -> dict[str, Any]:
    return found.get(file, {}).get("cases", {})


def judged(found: dict[str, Any]) -> list[tuple[Target, float | None, list[str]]]:
    """Each target with its measured value and its row of the table; those of small steps too."""
    targets = list(TARGETS)
    for name, case in cases_of(found, "small_steps").items():
        if name != "chain" and (plain := 1e3 * small_steps.best(case, "plain")) <= SMALL_STEP_MS:
            title, limit = f"{name}: a step of {plain:.1f} ms", SMALL_RATIO * plain + SMALL_ADDED_MS
            number = ("small_steps", name, "auto", "cpu", "best_seconds")
            targets.append(contestant(title, limit, "ms", *number, why="small"))
    return [(target, value, row_of(target, value)) for target in targets for value in [target.measured(found)]]


def row_of(target: Target, value: float | None) -> list[str]:
    verdict = "met" if value is not None else "not measured"
    if value is not None and value > target.limit:
        percent = 100 * (value / target.limit - 1)
        verdict = f"missed by {percent:.{0 if percent >= 1 else 1}f} %"
    numbers = ["" if v is None else f"{v:.3g}" if v < 1000 else f"{v:,.0f}" for v in (target.limit, value)]
    shown = [f"{number} {target.unit.replace('x', '')}".strip() if number else "" for number in numbers]
    return [target.title, *shown, verdict]


HEADS = ("target", "at most", "measured", "verdict")
ENGINE_HEADS = (
    "case", "plain step, ms", "default engine: time", "memory", "captured: time", "memory", "vmap: time", "memory",
    "fastest mode of Opacus: time", "memory",
)  # fmt: skip
JAX_HEADS = (
    "case", "plain step of JAX", "JAX Privacy, vmap", "fastest microbatch", "the faster of both / plain step of JAX",
    "memory, MiB: plain PyTorch", "default engine", "plain JAX", "JAX Privacy, vmap", "fastest microbatch",
    "whole step / whole plain step: dpfunc", "JAX Privacy",
)  # fmt: skip
OPAKE_HEADS = (
    "case", "plain step, CPU ms", "CPU time: dpfunc", "dpfunc, vmap", "opake", "memory: dpfunc", "dpfunc, vmap", "opake"
)  # fmt: skip
BEFORE_HEADS = (
    "case", "plain step, ms", "CPU time: before", "now", "captured", "now / before", "captured / before",
    "memory: before", "now", "captured",
)  # fmt: skip


def number(one: dict[str, Any] | None, kind: str = "time", key: str = "ratio", digits: int = 2) -> str:
    """A number of a contestant; empty where it was not measured."""
    value = (one or {}).get(kind, {}).get(key)
    return "" if value is None else f"{value:.{digits}f}"


def timed_of(case: dict[str, Any]) -> dict[str, Any]:
    return {who: one for who, one in case["contestants"].items() if "time" in one}


def fastest(timed: dict[str, Any], start: str) -> str:
    """The fastest contestant whose name begins so; or empty."""
    names = [who for who in timed if who.startswith(start)]
    return min(names, key=lambda who: timed[who]["time"]["ratio"], default="")


def why_not(case: dict[str, Any], start: str) -> str:
    """Why a library has no figure for a case, in two words."""
    states = [one["status"] for who, one in case["contestants"].items() if who.startswith(start)]
    kinds = ("not installed", "left out", "no step")
    return next((kind for state in states for kind in kinds if kind in state), "x" if states else "not measured")


def engine_rows(cases: dict[str, Any]) -> list[list[str]]:
    """Ratios to the step without privacy: of three engines, and of the fastest mode of Opacus."""
    found = []
    for name, case in cases.items():
        timed = timed_of(case)
        cells = [f"{case['title']} ({name})", f"{1e3 * timed['plain']['time']['median_seconds']:.0f}"]
        for who in ("auto", "captured", "vmap"):
            cells += [number(timed.get(who)), number(timed.get(who), "memory")]
        best = fastest(timed, "opacus-")
        cells.append(f"{number(timed[best])} ({best.removeprefix('opacus-')})" if best else why_not(case, "opacus-"))
        found.append([*cells, number(timed.get(best), "memory")])
    return found


def jax_section(cases: dict[str, Any]) -> str:
    """Cases in which JAX Privacy takes part: ratios of times to the plain step of PyTorch, and to that of JAX.

    Or that JAX Privacy is not installed, if no case has it.
    """
    found = []
    for name, case in cases.items():
        timed = timed_of(case)
        best, parts = fastest(timed, JAX_PRIVACY), fastest(timed, f"{JAX_PRIVACY}/")
        pairs = [(best, "jax-plain"), *((who, WHOLE_PLAIN) for who in (WHOLE_DPFUNC, fastest(timed, WHOLE_JAX)))]
        medians = {who: one["time"]["median_seconds"] for who, one in timed.items()}
        over = [f"{medians[who] / medians[base]:.2f}" if {who, base} <= medians.keys() else "" for who, base in pairs]
        if best:
            size = f" ({parts.partition('/')[2]})" if parts else ""
            times = [number(timed.get(who)) for who in ("jax-plain", JAX_PRIVACY, parts)]
            names = ("plain", "auto", "jax-plain", JAX_PRIVACY, parts)
            mib = [number(timed.get(who), "memory", "peak_mib", 0) for who in names]
            found.append([name, *times[:2], times[2] + size, over[0], *mib, *over[1:]])
    if found:
        return markdown(JAX_HEADS, found)
    reasons = {why_not(case, JAX_PRIVACY) for case in cases.values()} or {"not measured"}
    return f"JAX Privacy: {', '.join(sorted(reasons))}."


def opake_rows(cases: dict[str, Any]) -> list[list[str]]:
    """CPU time and memory of dpfunc's default engine, of plain `vmap` and of opake over those of the plain step."""
    found = []
    for case in cases.values():
        plain, *others = (case["contestants"][who] for who in ("plain", "auto", "vmap", OPAKE))
        milliseconds = f"{1e3 * plain['cpu']['median_seconds']:.0f}"
        ratios = [number(other, kind) for kind in ("cpu", "memory") for other in others]
        found.append([case["title"], milliseconds, *ratios])
    return found


def before_rows(cases: dict[str, Any]) -> list[list[str]]:
    """Ratios to the plain step: of the default engine in another checkout and in this one, and of `captured`."""
    found = []
    for name, case in cases.items():
        plain, *ours = (case["contestants"][who] for who in ("plain", "auto@against", "auto", "captured"))
        first, before, *now = (one["cpu"]["median_seconds"] for one in (plain, *ours))
        times = [*(number(one, "cpu") for one in ours), *(f"{seconds / before:.2f}" for seconds in now)]
        found.append([name, f"{1e3 * first:.0f}", *times, *(number(one, "memory") for one in ours)])
    return found


def tables(found: dict[str, Any]) -> dict[str, str]:
    engines = cases_of(found, "engines")
    places = {
        "engines": markdown(ENGINE_HEADS, engine_rows(engines)),
        "before": markdown(BEFORE_HEADS, before_rows(cases_of(found, "engines_before"))),
        "jax": jax_section(cases_of(found, "engines_jax")),
        "opake": markdown(OPAKE_HEADS, opake_rows(cases_of(found, "engines_opake"))),
        "targets": section(found),
    }
    for place, question in {"overhead": overhead, "freed memory": freed_memory, "loaders": loader}.items():
        places[place] = markdown(question.HEADS, question.rows(cases_of(found, question.RESULT.stem)))
    small = cases_of(found, "small_steps")
    return {**places, "small steps": small_steps.section(small)} if small else places


def section(found: dict[str, Any]) -> str:
    """The section of the page: the targets that are missed, and a word for why, which the page explains."""
    rows = judged(found)
    measured, met = sum(value is not None for _, value, _ in rows), sum(row[-1] == "met" for *_, row in rows)
    others = [[*row, target.why] for target, _, row in rows if row[-1] != "met"]
    return f"{met} of {measured} measured targets are met; the others:\n\n" + markdown((*HEADS, "why"), others)


# Pictures of the engines.

KINDS = {"time": "Time of a step", "memory": "Peak memory over the model"}
# Of each, the best of its modes is drawn.
DRAWN = {"Opacus, best mode": (OPACUS, "s", pictures.THEIRS, 9), "dpfunc": (("auto",), "o", pictures.OURS, 6)}


def best(case: Mapping[str, Any], modes: Sequence[str], kind: str) -> float | None:
    """The least time or memory of some contestants over that of the plain step, if it was measured."""
    ratios = [case["contestants"].get(mode, {}).get(kind, {}).get("ratio") for mode in modes]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def picture(cases: Mapping[str, Any], kind: str, path: Path) -> None:
    """A line for each case, with a point for dpfunc and one for the best mode of Opacus; the plain step is at 1."""
    with pictures.figure(path, f"{KINDS[kind]}, times the plain step", 1.4 + 0.27 * len(cases)) as axes:
        most = 1.0
        for label, (modes, marker, color, size) in DRAWN.items():
            ratios = [best(case, modes, kind) for case in cases.values()]
            found = {place: ratio for place, ratio in enumerate(ratios) if ratio is not None}
            most = max([most, *found.values()])
            axes.plot(list(found.values()), list(found), marker, color=color, label=label, markersize=size)
        axes.axvline(1.0, color=pictures.PLAIN, linewidth=1, linestyle="--", label="without privacy")
        axes.set_xscale("log", base=2)
        axes.set_xticks([tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 16) if tick <= 1.1 * most])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_yticks(range(len(cases)), list(cases))
        axes.invert_yaxis()
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.06), ncols=2, frameon=False)


@click.command(help=__doc__.splitlines()[0])
@click.option("--page", default=PAGE, type=click.Path(dir_okay=False, path_type=Path), help="Where the table goes.")
def main(page: Path) -> None:
    found = reports()
    printed(HEADS, [row for *_, row in judged(found)])
    fill(page, tables(found))
    cases = {name: case for name, case in cases_of(found, "engines").items() if not name.startswith("layer:")}
    for kind in KINDS:
        picture(cases, kind, page.parent / "results" / f"engines_{kind}.svg")


if __name__ == "__main__":
    main()
