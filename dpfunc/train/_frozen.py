"""Outputs of frozen layers for each record, computed once before training, not in every step.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from rich.console import Console
from torch import nn

from dpfunc.hf._facts import evaluating
from dpfunc.hf.pooled import MeanPooledClassifier
from dpfunc.train._dataset import Records, num_vectors
from dpfunc.train._preferences import with_references
from dpfunc.train.config import FEATURES, Job

_BYTES = {"features": 4, "hidden": 2}  # of a number


def compute_frozen(job: Job, model: nn.Module, records: Records, *, shows: bool) -> tuple[Records, list[str]]:
    """Records with outputs of the frozen part instead of tokens, if that part is known; and a line for the report.

    Each is computed alone and without dropout: what is kept is a function of this record, and costs no privacy
    (tests/train/test_frozen.py: test_a_record_is_computed_alone, test_logits_are_those_of_the_whole_model,
    test_the_limit).
    """
    if job.task == "preference":
        return with_references(job, model, records, shows=shows), []
    needed = -(-frozen_bytes(job, model, records) // 2**20)
    if not needed or not job.training.cache_mib:
        return records, []
    if needed > job.training.cache_mib:
        return records, [
            f"Frozen layers are computed in every step: to keep what they give may need {needed} MiB, more than "
            f"training.cache_mib={job.training.cache_mib}."
        ]
    computed = _computed(_base(model), _kind(job), [*records.train, *records.evaluation], shows)
    split = len(records.train)
    return dataclasses.replace(records, train=tuple(computed[:split]), evaluation=tuple(computed[split:])), [
        f"Frozen layers were computed once for each record and take about {needed} MiB."
    ]


def kept_bytes(job: Job, model: nn.Module, size: int, records: Records) -> int:
    """Bytes of the features of all records, of this size where a job reads features, or of what frozen layers give."""
    if job.task in FEATURES:
        return num_vectors(job, len(records.units), len(records.evaluation)) * size * _BYTES["features"]
    needed = frozen_bytes(job, model, records)
    return needed if needed <= job.training.cache_mib * 2**20 else 0


def frozen_bytes(job: Job, model: nn.Module, records: Records) -> int:
    """Bytes for the outputs of the frozen layers; 0 if unknown."""
    base, kind = _base(model), _kind(job)
    if not isinstance(base, MeanPooledClassifier) or (
        kind == "hidden" and not _is_divided(base, job.lora.top_layers, model)
    ):
        return 0
    # not what the texts need: one longer text would decide how the hidden states of all others are rounded
    each = 1 if kind == "features" else job.data.max_length
    vectors = num_vectors(job, len(records.units), len(records.evaluation))
    return int(vectors * each * base.config.hidden_size * _BYTES[kind])


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _kind(job: Job) -> str:
    return "features" if job.strategy == "head" else "hidden"


def _is_divided(base: MeanPooledClassifier, top_layers: int | None, model: nn.Module) -> bool:
    """True if the layers below the adapters could be divided from the rest, and nothing in them is trained."""
    if top_layers is None or not base.split_at(base.config.num_hidden_layers - top_layers):
        return False
    upper = nn.ModuleList([*base.backbone.encoder.layer[base.first_layer :], base.classifier])
    return {p for p in model.parameters() if p.requires_grad} <= {*upper.parameters()}


def _computed(
    base: MeanPooledClassifier, kind: str, records: Sequence[Mapping[str, Any]], shows: bool
) -> list[Mapping[str, Any]]:
    """The records as the frozen part gives them, each alone, on the device that there is."""
    if torch.accelerator.is_available():
        base.to(torch.accelerator.current_accelerator())
    computed: list[Mapping[str, Any]] = []
    whole_ND = torch.empty(len(records) if kind == "features" else 0, base.config.hidden_size)  # as in read_records
    # no bar: how fast it grows would tell how many records there are
    with evaluating(base), torch.no_grad(), Console(stderr=True).status("frozen layers") if shows else nullcontext():
        for number, record in enumerate(records):
            ids = torch.tensor([record["input_ids"]], device=base.device)
            mask = torch.ones_like(ids)
            if kind == "features":
                output = whole_ND[number].copy_(base.pooled(ids, mask)[0])
            else:
                output = base.lower(ids, mask)[0].half().cpu()
            computed.append({kind: output, "labels": record["labels"]})
    return computed
