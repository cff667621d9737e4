"""Losses of pairs of sentences, as sentence-transformers has them; and the refusal of losses that compare records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf import losses
from dpfunc.hf.facts import AnyForward
from dpfunc.types import Params

LABELS = ("label", "labels", "score")
IDS = "_input_ids"

_COMPARE_RECORDS = (
    "Negatives", "Batch", "GIST", "CoSENT", "AnglE", "OnlineContrastive", "Tension", "InfoNCE", "NTXent", "Clip",
    "SigLip",
)  # fmt: skip
"""Parts of the names of losses in which the records of a batch are compared with each other."""


def sentence_similarity(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Squared error of the cosine of two sentences, as `CosineSimilarityLoss` has it by default.

    Args:
        forward: of a model that returns a "sentence_embedding" (B, D) for a mapping of inputs, as SentenceTransformer.
        params: its parameters. batch: two sentences as "<column>_input_ids", "<column>_attention_mask", ..., in the
            order of their columns, and "label", "labels" or "score" (B,).
    """
    sentences, scores_B = _parts(batch)
    if len(sentences) != 2:
        raise InvalidArgument(f"Expected two sentences in the batch, got {len(sentences)}, from {sorted(batch)}.")
    first, second = (_embedding(forward(params, sentence)) for sentence in sentences)
    return losses.cosine_similarity(first, second, scores_B)


def sentence_classes(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of a class of a pair of sentences, as `SoftmaxLoss` has it by default.

    Args:
        forward: of the SoftmaxLoss module itself, which has the encoder and the classifier: called with a list of
            mappings and no labels it returns embeddings and logits.
        params, batch: see `sentence_similarity`; labels are class numbers.
    """
    sentences, labels_B = _parts(batch)
    _, logits_BC = forward(params, sentences, None)
    return losses.classification(logits_BC, labels_B)


def refusal(task: object) -> UnsupportedModel:
    """Error about a module given as a loss: it has one value for a batch, and may compare records.

    >>> str(refusal(type("MultipleNegativesRankingLoss", (), {})()))[:58]
    'MultipleNegativesRankingLoss compares the records of a bat'
    """
    name = type(task).__name__
    if any(part in name for part in _COMPARE_RECORDS):
        return UnsupportedModel(
            f"{name} compares the records of a batch with each other (in-batch negatives): no part of its gradient "
            "belongs to one record, so clipping bounds nobody's. Take a loss of single pairs, task="
            '"sentence_similarity" or "sentence_classes", or give each record negatives of its own and a function '
            "(forward, params, batch) -> losses_B."
        )
    return UnsupportedModel(
        f"Expected one loss a sample, got the module {name}, which gives one value for a batch. For "
        'CosineSimilarityLoss functionalize the encoder and take task="sentence_similarity"; for SoftmaxLoss '
        'functionalize the loss and take task="sentence_classes"; for others pass a function (forward, params, batch) '
        "-> losses_B."
    )


def _parts(batch: Mapping[str, Tensor]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Inputs of each sentence, and the labels."""
    columns = [name.removesuffix(IDS) for name in batch if name.endswith(IDS)]
    labels = [batch[name] for name in LABELS if name in batch]
    if not columns or len(labels) != 1:
        raise InvalidArgument(
            f"Expected sentences as '<column>{IDS}', and one of {', '.join(LABELS)} in the batch, got {sorted(batch)}."
        )
    return [
        {name.removeprefix(f"{column}_"): value for name, value in batch.items() if name.startswith(f"{column}_")}
        for column in columns
    ], labels[0]


def _embedding(output: Any) -> Tensor:
    found = output.get("sentence_embedding") if isinstance(output, Mapping) else None
    if not isinstance(found, Tensor):
        raise InvalidArgument(
            f"Expected a model that returns a mapping with 'sentence_embedding', got {type(output).__name__}. For an "
            "encoder of Transformers add pooling: nn.Sequential(encoder, pooling), or a loss function of your own."
        )
    return found
