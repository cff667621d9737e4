"""What `plan.loader` costs beside torch's own loader: `python -m benchmarks.loader`.

Both draw the same records and make the same batches, which is compared first; what is over 1 is the check that rows are
made of their own records alone (`dpfunc/sampling/_own_rows.py`), in one of 100 steps, the first one included, and the
seeds of each step. CPU time; the resident memory is that of a process which makes the data set and has both loaders. No
step is taken and no model is there. The case `hugging_face` needs the package `datasets`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import dpfunc
from benchmarks.measure import Contestant, Numbers, Spec, compete
from benchmarks.results import FOLDER, question
from dpfunc import clipping, sampling
from dpfunc.rng import insecure_key

RESULT = FOLDER / "loader.json"
STEPS, SPANS = 100, (1, 20, 100)
LOADERS = ("plain", "dpfunc")
HEADS = ("case", "records", "batch", *(f"{span} steps" if span > 1 else "first batch" for span in SPANS), "memory")


class Case(NamedTuple):
    """A data set of so many records, read in batches of an expected size."""

    make: Callable[[int], Any]
    size: int
    batch: int
    collate: Callable[[list[Any]], Any] = default_collate


class Mapped(list[Any]):
    """Records that are made when they are read."""

    def __init__(self, stored: Iterable[Any], read: Callable[[Any], Any]) -> None:
        super().__init__(stored)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        return self._read(super().__getitem__(index))


def tensors(size: int) -> Any:
    return TensorDataset(torch.randn(size, 784), torch.arange(size))


def tokens(size: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(128)), "attention_mask": [1] * 128, "label": number} for number in range(size)]


def hugging_face(size: int) -> Any:
    from datasets import Dataset

    return Dataset.from_list(tokens(size))


def pixels(side: int, size: int) -> list[Any]:
    """Images of bytes, a few of them many times."""
    few = np.random.default_rng(0).integers(0, 256, (16, side, side, 3), np.uint8)
    return [few[number % 16] for number in range(size)]


def images(size: int) -> Any:
    """Images of PIL, which the collate function makes tensors of."""
    from PIL import Image

    return Mapped(pixels(128, size), Image.fromarray)


def of_images(records: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255.0 for image in records])


def of_lists(records: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([record[name] for record in records]) for name in records[0]}


def columns(size: int) -> Any:
    """Many numbers by name, and a tensor for each ten of them."""
    number = lambda at: torch.full((4,), 1.0 * at) if at % 10 == 0 else 1.0 * at
    return [{f"c{at}": number(at) for at in range(100)} for _ in range(size)]


def nested(size: int) -> Any:
    values = torch.randn(size, 64)
    return [{"facts": {"x": values[at], "parts": [{"y": values[at, :8], "n": at}] * 3}} for at in range(size)]


CASES = {
    "tensors": Case(tensors, 60_000, 256),
    "small batch": Case(tensors, 60_000, 32),
    "arrays": Case(lambda size: list(zip(np.ones((size, 784), np.float32), range(size), strict=True)), 60_000, 256),
    "token lists": Case(tokens, 20_000, 64, of_lists),
    "hugging_face": Case(hugging_face, 20_000, 64, of_lists),
    "images": Case(images, 5_000, 32, of_images),
    "large images": Case(
        lambda size: Mapped(pixels(512, size), lambda image: torch.from_numpy(image).permute(2, 0, 1).float()),
        1_000,
        16,
    ),
    "columns": Case(columns, 5_000, 64),
    "nested": Case(nested, 20_000, 64),
}


def contestant(spec: Spec) -> Contestant:
    """For `measure`: all batches of one of the loaders; CPU seconds until those of `SPANS` are there."""
    case = CASES[spec["case"]]
    size, batch = (max(20, case.size // 200), 8) if spec["quick"] else (case.size, case.batch)
    dataset = case.make(size)
    plan = dpfunc.Plan(sampling.Poisson(size, batch / size), clipping.Flat(1.0), 1.0, STEPS, 1e-6)
    state = dpfunc.make_dp_step(lambda params, batch: batch, plan).init({"w": torch.zeros(1)}, insecure_key(0))
    both = {
        "plain": lambda: DataLoader(
            dataset, batch_sampler=map(torch.Tensor.tolist, plan.batches(state)), collate_fn=case.collate
        ),
        "dpfunc": lambda: plan.loader(dataset, state, collate_fn=case.collate),
    }
    if spec["contestant"] == "dpfunc":  # warms up, too
        for one, other in zip(*(make() for make in both.values()), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)

    def step() -> Numbers:
        start, times = time.process_time(), []
        for _ in both[spec["contestant"]]():
            times.append(time.process_time() - start)
        return Numbers({f"{span} steps": times[span - 1] for span in SPANS})

    return Contestant(step)


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Time and memory of a case; or why there are none."""
    if name == "hugging_face" and find_spec("datasets") is None:
        return {"status": "not installed", "contestants": {}}
    spec = {"module": "benchmarks.loader", "case": name, "quick": quick, "freed": "given back"}
    found = compete({who: {**spec, "contestant": who} for who in LOADERS}, rounds, base="plain")
    return {"records": CASES[name].size, "batch": CASES[name].batch, "rounds": rounds, "contestants": found}


def ratios(case: Mapping[str, Any]) -> dict[str, float]:
    """The loader of a plan over torch's: CPU time until some batches are there, and resident memory."""
    plain, own = (case["contestants"][who] for who in LOADERS)
    spans = {f"{span} steps": own[f"{span} steps"]["ratio"] for span in SPANS}
    return {**spans, "memory": own["resident_mib"] / plain["resident_mib"]}


def rows(cases: Mapping[str, Any]) -> list[list[str]]:
    found = {name: case for name, case in cases.items() if case["contestants"]}
    return [
        [n, str(c["records"]), str(c["batch"]), *(f"{x:.2f}" for x in ratios(c).values())] for n, c in found.items()
    ]


main = question(__doc__, RESULT, CASES, measure)

if __name__ == "__main__":
    main()
