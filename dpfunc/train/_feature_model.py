"""Models of tables and images: features of a record, and on them a head or a network with one hidden layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dpfunc.recipes import Head, unit_rows
from dpfunc.rng import Key, torch_seed
from dpfunc.train._features import EncoderFeatures, ScatteringFeatures, TableFeatures, load_encoder
from dpfunc.train.config import Job

Front = TableFeatures | ScatteringFeatures | EncoderFeatures
_ENCODER = "encoder"  # folder beside the weights of the head


class FeatureClassifier(PreTrainedModel):  # type: ignore[misc]  # has no types
    """A `Head` on features, or a network with one hidden layer on the same rows, brought to unit variance.

        logits = W unit_rows(x);    logits = V relu(U sqrt(k + 1) unit_rows(x) + u) + v

    Args:
        config: with `num_features`, `num_labels`, and `hidden` neurons, 0 for a head.
    """

    base_model_prefix = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        k, hidden = config.num_features, config.hidden
        if hidden:
            self.hidden: Any = nn.Linear(k + 1, hidden)
        self.classifier: Any = nn.Linear(hidden, config.num_labels) if hidden else Head(k, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """As the layers begin by themselves."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Logits (B, classes) of features (B, k); with labels (B,) their mean cross-entropy too."""
        if self.config.hidden:
            features = F.relu(self.hidden(unit_rows(features) * math.sqrt(self.config.num_features + 1)))
        logits = self.classifier(features)
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def load_front(job: Job, options: Mapping[str, Any]) -> Front:
    """Reader of the features of a record, from the public facts of a job."""
    data = job.data
    if job.task == "table_classification":
        return TableFeatures(data.numbers or {}, data.categories or {}, data.missing)
    if job.model.path is not None:
        return load_encoder(job.model.path, options)
    height, width = data.image_size or (0, 0)
    return ScatteringFeatures(height, width, data.grey)


def new_model(job: Job, front: Front, key: Key) -> nn.Module:
    """The model of a job before training; new weights by a public key."""
    names = dict(enumerate(job.data.labels or ()))
    facts = {} if isinstance(front, EncoderFeatures) else dataclasses.asdict(front)
    config = PreTrainedConfig(
        num_labels=len(names), id2label=names, label2id={label: number for number, label in names.items()},
        num_features=front.size, hidden=job.model.hidden if job.strategy == "full" else 0, front=facts,
        task=job.task, problem_type="single_label_classification",
    )  # fmt: skip
    with torch_seed(key):
        return FeatureClassifier(config)


def save_features(folder: Path, front: Front) -> None:
    """Write the encoder beside its head, so that the folder is whole; other facts are in `config.json`."""
    for part in (front.model, front.processor) if isinstance(front, EncoderFeatures) else ():
        part.save_pretrained(folder / _ENCODER)


def load_features(folder: Path) -> tuple[Front, Any]:
    """The reader of the features of a record, and the trained model of a folder."""
    config = PreTrainedConfig.from_pretrained(folder)
    model = FeatureClassifier.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    if not config.front:
        return load_encoder(str(folder / _ENCODER), {"local_files_only": True}), model
    return (TableFeatures if config.task == "table_classification" else ScatteringFeatures)(**config.front), model
