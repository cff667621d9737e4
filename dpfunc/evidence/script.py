"""The loop of a Python file, as `dpfunc verify` and `dpfunc audit` take it.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import fail, refuse
from dpfunc.errors import InvalidArgument
from dpfunc.evidence._one_run import Audit
from dpfunc.evidence.canary_run import Planted, Score, audit_loop
from dpfunc.evidence.neighbours import Init, Replay, Step, replay
from dpfunc.evidence.result import audit_values, replay_values
from dpfunc.evidence.watch import Running
from dpfunc.rng import Key
from dpfunc.step import DPStep
from dpfunc.types import Batch


@dataclass(frozen=True)
class Script:
    """The loop of a file, and canaries among the records if it has some."""

    dp_step: DPStep
    data: Batch = field(repr=False)
    init: Init
    step: Step
    canaries: Batch | None = field(default=None, repr=False)


def read_script(path: Path) -> Script:
    """Run a file, and take its loop: `init(dp_step, data, key)` and `step(dp_step, data, carry)`, as in `replay`; or
    `train(dp_step, data, key)`, a plain loop that yields what it has, before its first step and after each.
    """
    names = runpy.run_path(str(path), run_name="__dpfunc__")
    own: dict[str, Any] = {name: names.get(name) for name in ("dp_step", "data", "init", "step", "train")}
    (dp_step, data, init, step, train), canaries = own.values(), names.get("canaries")
    functions = callable(init) and callable(step)
    if not isinstance(dp_step, DPStep) or data is None or not (functions or callable(train)):
        kinds = ", ".join(f"{name}={type(value).__name__}" for name, value in own.items())
        raise InvalidArgument(
            f"Expected dp_step, data, and either init and step or train in {path.name}; dp_step is that of "
            f"dpfunc.make_dp_step, got {kinds}."
        )
    if functions:
        return Script(dp_step, data, init, step, canaries)

    def begin(dp_step: Any, data: Batch, key: Key) -> Running:
        loop = iter(train(dp_step, data, key))
        return Running(loop, next(loop))

    def go_on(dp_step: Any, data: Batch, carry: Running) -> Running | None:
        try:
            return Running(carry.loop, next(carry.loop))
        except StopIteration:
            return None

    return Script(dp_step, data, begin, go_on, canaries)


def verify(path: Path, *, steps: int, candidates: int) -> tuple[Replay, dict[str, Any]]:
    """The replay of the loop of a file on neighbouring data, see `replay`, and its values. UNRELEASED."""
    own = read_script(path)
    result = replay(own.dp_step, own.init, own.step, own.data, steps=steps, candidates=candidates)
    return result, replay_values(result, path, own.dp_step.plan, {})


def audit(path: Path, *, key: Key, count: int | None, steps: int, score: Score) -> tuple[Audit, dict[str, Any]]:
    """The audit of the loop of a file by so many canaries, or those of the file, and its values. It is one more run."""
    own = read_script(path)
    refuse(
        (count is not None and own.canaries is not None,
         fail(f"no --canaries, as {path.name} has canaries of its own, which are all that are planted", "canaries",
              count)),
    )  # fmt: skip
    planted = Planted(key, count or 1000, own.canaries)
    result, taken, plan = audit_loop(
        own.dp_step, own.init, own.step, own.data, planted, key=key, steps=steps, score=score
    )
    space = "gradient" if own.canaries is None else "input"
    return result, audit_values(result, path, plan, taken, {"space": space, "score": score})
