"""Collators: records of a job become a batch.

May import: its folder, features and below. Privacy depends on it: yes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.hf.losses import IGNORED
from dpfunc.hf.preferences import CollatePairs
from dpfunc.hf.vision_language import image_text_collator
from dpfunc.sampling.users import CollatePersons
from dpfunc.train.config import Job

_PADDING = 32  # few lengths of batches: engines look at each shape once


@dataclass(frozen=True)
class PadRight:
    """A collator that pads on the right, to a multiple of `multiple` and at most to `max_length`.

    >>> batch = PadRight(pad=0, max_length=8, multiple=4)([{"input_ids": [5, 6], "labels": [-100, 6]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 0, 0]], [[-100, 6, -100, -100]])
    """

    pad: int
    max_length: int
    multiple: int = _PADDING

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch: input_ids (B, T) or hidden (B, T, D), with attention_mask; or features (B, K) or (B, V, K) of
        V views; labels (B, L), (B,) or (B, V)."""
        first = records[0]
        labels = (
            torch.tensor([record["labels"] for record in records])
            if isinstance(first["labels"], int | float)
            else self._rows(records, "labels", IGNORED)
        )
        if "features" in first:
            features = torch.stack([record["features"] for record in records])
            if features.dim() > 2:  # of several views: each has the label of its record
                labels = labels[:, None].repeat(1, features.shape[1])
            return {"features": features, "labels": labels}
        name, fill = ("hidden", 0) if "hidden" in first else ("input_ids", self.pad)
        rows = self._rows(records, name, fill)
        lengths = torch.tensor([len(record[name]) for record in records])
        batch = {name: rows, "attention_mask": (torch.arange(rows.shape[1]) < lengths[:, None]).long()}
        if "token_type_ids" in first:
            batch["token_type_ids"] = self._rows(records, "token_type_ids", 0)
        return {**batch, "labels": labels}

    def _rows(self, records: Sequence[Mapping[str, Any]], name: str, fill: int) -> Tensor:
        """Lists of integers (T,), or tensors (T, width), padded to one length."""
        values = [
            v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.long) for v in map(itemgetter(name), records)
        ]
        length = min(-(-max(map(len, values)) // self.multiple) * self.multiple, self.max_length)
        return torch.stack([F.pad(v, (0, 0) * (v.ndim - 1) + (0, length - len(v)), value=fill) for v in values])


def collator(job: Job, processing: Any, *, longest: bool = False) -> Any:
    """Make the function that collates records of a job, or people with their records, into a batch."""
    data = job.data
    if job.task == "vqa":
        collate: Any = image_text_collator(
            processing, max_length=data.max_length, max_images=data.max_images, chat=bool(processing.chat_template),
            image_size=None if data.image_size is None else (data.image_size[0], data.image_size[1]),
        )  # fmt: skip
    else:
        pad = getattr(processing, "pad_token_id", 0)  # features are not padded
        collate = PadRight(pad, data.max_length, data.max_length if longest else _PADDING)
        collate = CollatePairs(collate) if job.task == "preference" else collate
    return collate if data.max_records_per_unit is None else CollatePersons(collate, data.max_records_per_unit)
