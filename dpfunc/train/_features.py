"""The reader of features and the model of a job, from its public facts, and their files.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dpfunc._utils.validation import refuse
from dpfunc.features.images import EncoderFeatures, ScatteringFeatures, load_encoder
from dpfunc.features.tables import TableFeatures, number_of
from dpfunc.recipes import Head, unit_rows
from dpfunc.rng import Key, torch_seed
from dpfunc.train.config import Job
from dpfunc.train.tables import Table

Front = TableFeatures | ScatteringFeatures | EncoderFeatures
_ENCODER = "encoder"  # folder beside the weights of the head
_COLUMNS = {"numbers", "categories"}


class FeatureClassifier(PreTrainedModel):  # type: ignore[misc]  # has no types
    """A `Head` on features, or a network with one hidden layer on the same rows, brought to unit variance.

    logits = W unit_rows(x);    logits = V relu(U sqrt(k + 1) unit_rows(x) + u) + v;    config.hidden is 0 for a head
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
        """The default initial values of the layers."""

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


def names_of_classes(job: Job) -> dict[str, Any]:
    """The classes of a job in the configuration of a model."""
    names = dict(enumerate(job.data.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


def new_model(job: Job, front: Front, key: Key) -> nn.Module:
    """The model of a job before training; new weights by a public key."""
    facts = {} if isinstance(front, EncoderFeatures) else asdict(front)
    facts |= {name: [*facts[name].items()] for name in _COLUMNS & facts.keys()}  # `config.json` sorts a mapping
    config = PreTrainedConfig(
        **names_of_classes(job), num_features=front.size, front=facts, task=job.task,
        hidden=job.model.hidden if job.strategy == "full" else 0, problem_type="single_label_classification",
    )  # fmt: skip
    with torch_seed(key):
        return FeatureClassifier(config)


def check_table(front: TableFeatures, table: Table, name: str) -> None:
    """Check each row, and that no column has all rows outside of its public facts. Changes no feature."""
    for number, row in table.items():
        front.encode(row, f"row {number} of {name}")
    for column, values in front.categories.items():
        refuse(
            (not any(row[column].strip() in values for row in table.values()),
             f"Expected values of data.categories.{column} in the column {column!r} of {name}, got none of them "
             "in any row: all are unknown. Look for other spellings or capitals, or for the wrong column."),
        )  # fmt: skip
    for column, (low, high) in front.numbers.items():
        refuse(
            (not any(low <= number_of(row[column]) <= high for row in table.values()),
             f"Expected numbers in the range data.numbers.{column}: [{low:g}, {high:g}] in the column "
             f"{column!r} of {name}, got none in any row. Give its range in the unit of the table."),
        )  # fmt: skip


def save_features(folder: Path, front: Front) -> None:
    """Write the encoder beside its head, so that the folder is whole; other facts are in `config.json`."""
    for part in (front.model, front.processor) if isinstance(front, EncoderFeatures) else ():
        part.save_pretrained(folder / _ENCODER)


def load_features(folder: Path) -> tuple[Any, Front]:
    """The trained model of a folder, and the reader of the features of a record."""
    config = PreTrainedConfig.from_pretrained(folder)
    model = FeatureClassifier.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    if not config.front:
        return model, load_encoder(str(folder / _ENCODER), {"local_files_only": True})
    if config.task != "table_classification":
        return model, ScatteringFeatures(**config.front)
    columns = {name: config.front[name] for name in _COLUMNS}
    refuse(
        (any(isinstance(own, Mapping) and len(own) > 1 for own in columns.values()),
         f"Expected the columns of a table in the order of training, got {str(folder)!r}, which an older version wrote "
         "with sorted names: predictions would be those of other columns. Train it again."),
    )  # fmt: skip
    return model, TableFeatures(**config.front | {name: dict(own) for name, own in columns.items()})
