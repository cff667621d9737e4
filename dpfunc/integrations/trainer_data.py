"""Batches for the Trainer: one logical draw for each optimizer step, the same again when a step is repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, fold_in, insecure_key, torch_seed
from dpfunc.sampling import Sampler, deal
from dpfunc.types import Batch

Drawn = tuple[int, int]
"""A step and the index of a record that was drawn for it."""

# Records that are read to recognise a data set, and to see whether reading it twice gives the same.
WHOLE = 1_000_000  # of a list or tuple: measured 8 us for a text of 100 words, 70 us for ids and mask of 128 tokens
WHOLE_ELSEWHERE = 20_000  # of a data set that may read, tokenize or decode each
RECOGNISED = 1024  # of larger ones
PROBED = 16
NUMBERS = frozenset((int, float, bool))
# Records may name files of images, which are read when the record is drawn.
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class EpochSampler:
    """The draws of one epoch of the Trainer, from where the run stands: lists of (step, index), some of them empty.

    Args:
        sampler, key: of the run. steps_per_epoch: what the Trainer calls an epoch, a public number.
        limit: the step at which the run ends. first_step: returns the step at which an iteration starts.
        rank, size: of this process among several. One that has no records of a draw reads the first
            record of the data set, as a placeholder that gets weight zero.
    """

    sampler: Sampler
    key: Key = field(repr=False)
    steps_per_epoch: int
    limit: int
    first_step: Callable[[], int] = field(repr=False)
    rank: int = 0
    size: int = 1

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[Drawn]]:
        first = self.first_step()
        for step in range(first, min(first + self.steps_per_epoch, self.limit)):
            own = deal(self.sampler.indices(self.key, step), self.rank, self.size).tolist()
            yield [(step, index) for index in own or [0] * (self.size > 1)]


@dataclass(frozen=True)
class Records(Dataset[Any]):
    """A data set whose records are read with torch's randomness fixed by the step: a repeated step reads the same.

    Processes with other records (`rank`) draw other randomness.
    """

    dataset: Any
    key: Key = field(repr=False)
    rank: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, drawn: Drawn) -> tuple[int, Any]:
        return self.__getitems__([drawn])[0]

    def __getitems__(self, drawn: Sequence[Drawn]) -> list[tuple[int, Any]]:
        """Read the records of one step, with torch's CPU generator seeded by the step."""
        if not drawn:
            return []
        step, indices = drawn[0][0], [index for _, index in drawn]
        with torch_seed(fold_in(self.key, "records", step, *_of(self.rank)), accelerators=False):
            return [(step, record) for record in read(self.dataset, indices)]


@dataclass(frozen=True)
class Collate:
    """A collator of records as `Records` gives them; an empty draw becomes a batch without rows.

    A batch without rows is never run through the model, so it needs no example to take its shape from.
    """

    collate: Callable[[list[Any]], Batch]
    key: Key = field(repr=False)
    rank: int = 0

    def __call__(self, records: Sequence[tuple[int, Any]]) -> Batch:
        """Collate the records of one step, with torch's CPU generator seeded by the step."""
        if not records:
            return {"labels": torch.zeros(0, dtype=torch.long)}
        with torch_seed(fold_in(self.key, "collate", records[0][0], *_of(self.rank)), accelerators=False):
            return self.collate([record for _, record in records])


def _of(rank: int) -> tuple[int, ...]:
    return (rank,) if rank else ()


def loader(dataset: Any, collate: Callable[[list[Any]], Batch], sampler: EpochSampler, args: Any) -> DataLoader[Any]:  # noqa: ANN401
    """The draws of a run as batches, with the workers that `TrainingArguments` ask for."""
    return DataLoader(
        Records(dataset, sampler.key, sampler.rank),
        batch_sampler=sampler,
        collate_fn=Collate(collate, sampler.key, sampler.rank),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
    )


def read(dataset: Any, indices: Sequence[int]) -> list[Any]:  # noqa: ANN401  (any map-style data set)
    """The records at the indices, at once where the data set can."""
    at_once = getattr(dataset, "__getitems__", None)
    return list(at_once(list(indices))) if at_once else [dataset[index] for index in indices]


def data_name(dataset: Any) -> str:  # noqa: ANN401  (any map-style data set)
    """A digest by which a resumed run recognises its data: the length, and what is in the records.

    All records are read of a list or tuple of up to a million, and of another data set of up to 20000; image files that
    they name are read too. Of larger ones 1024 records that are spread over the set: that catches another split, order
    or version, not a change of one record between those it reads.

    Guarantees:
        tests/integrations/test_data_name.py::test_a_change_of_any_record_is_another_data_set.
    """
    known = WHOLE if isinstance(dataset, (list, tuple)) else WHOLE_ELSEWHERE
    indices = range(len(dataset)) if len(dataset) <= known else spread(len(dataset), RECOGNISED)
    state = hashlib.blake2b(digest_size=16)
    with torch_seed(insecure_key(0), accelerators=False):
        for start in range(0, len(indices), RECOGNISED):
            for record in read(dataset, indices[start : start + RECOGNISED]):
                _update(state, record)
    return f"{len(dataset)} records {state.hexdigest()}"


def check_repeatable(dataset: Any, collate: Callable[[list[Any]], Batch]) -> None:  # noqa: ANN401
    """Check that reading and collating can be repeated: a resumed run must repeat the steps that it has paid for.

    Raises:
        InvalidArgument: two readings differ.
    """

    def once() -> str:
        with torch_seed(insecure_key(0), accelerators=False):
            return digest(collate(read(dataset, spread(len(dataset), PROBED))))

    if once() != once():
        raise InvalidArgument(
            "Expected the data set and the collator to give the same records when they are read twice with torch's "
            "generator seeded alike, got different ones: they draw from Python's, numpy's or their own generator. A "
            "run that is resumed repeats steps with the same noise, so the batch must be the same too. Use torch's "
            "generator for random augmentation and masking."
        )


def spread(length: int, count: int) -> list[int]:
    """Up to `count` indices from first to last."""
    return sorted({int(index) for index in np.linspace(0, length - 1, min(length, count))})


def digest(value: object) -> str:
    """A digest of nested records: tensors, arrays, numbers, strings, images, files of images, dataclasses.

    Of anything else only its type counts.
    """
    state = hashlib.blake2b(digest_size=16)
    _update(state, value)
    return state.hexdigest()


def _update(state: hashlib.blake2b, value: object) -> None:
    state.update(type(value).__name__.encode() + b";")
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            state.update(f"{name}:".encode())
            _update(state, value[name])
    elif isinstance(value, (list, tuple)):
        state.update(f"{len(value)}:".encode())
        if NUMBERS.issuperset(map(type, value)):  # tokens: at once, many times faster
            state.update(repr(value).encode())
            return
        for item in value:
            _update(state, item)
    elif isinstance(value, Tensor):
        _update(state, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes, PurePath)):
        state.update(repr(value).encode())
        if isinstance(value, (str, PurePath)) and str(value).lower().endswith(IMAGES):
            _update_file(state, Path(value))
    elif is_dataclass(value) and not isinstance(value, type):
        _update(state, {each.name: getattr(value, each.name) for each in fields(value)})
    elif callable(getattr(value, "tobytes", None)):  # images, numpy scalars
        state.update(value.tobytes())  # type: ignore[attr-defined]


def _update_file(state: hashlib.blake2b, path: Path) -> None:
    """The bytes of a file that a record names, when there is one."""
    if path.is_file():
        with open(path, "rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
