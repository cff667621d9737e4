"""A classifier over the mean of an encoder's last hidden states: what sentence encoders were trained for.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dpfunc.hf._facts import evaluating
from dpfunc.recipes import Head

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # of encoders of BERT's form


class MeanPooledClassifier(PreTrainedModel):  # type: ignore[misc]  # has no types
    """An encoder, the mean of its last hidden states over the tokens, and a linear layer that starts at zero.

        logits = W unit_rows(layer_norm(mean over tokens of encoder(input_ids)))

    The inputs of W have norm 1, a constant among them, so its gradients have a bound that is known without the data: a
    `dpfunc.recipes.Head`. The configuration is that of the encoder, with `num_labels`.

    Guarantees:
        tests/hf/test_pooled.py: a row is not changed by padding (test_padding_changes_nothing); the part that was
        computed before training gives the same logits (test_what_is_frozen_can_be_computed_before).
    """

    base_model_prefix = "backbone"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        try:  # without a pooler, which would be trained and not used
            self.backbone: Any = AutoModel.from_config(config, add_pooling_layer=False)
        except TypeError:  # this kind has none
            self.backbone = AutoModel.from_config(config)
        self.classifier = Head(config.hidden_size, config.num_labels)
        self.first_layer: int | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "classifier", None):
            self.classifier.reset_parameters()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, hidden: Tensor | None = None,
        features: Tensor | None = None, labels: Tensor | None = None, **unused: object,
    ) -> SequenceClassifierOutput:  # fmt: skip
        """Logits (B, classes), from whatever part of the way was computed before.

        Args:
            input_ids: (B, T). attention_mask: (B, T), 1 at tokens. hidden: (B, T, width), as `lower` gives it.
            features: (B, width), as `pooled` gives them. labels: (B,) classes; the loss is their mean cross-entropy.
                With problem_type "regression" numbers; the loss is their mean squared error.
        """
        if features is None:
            features = self.pooled(input_ids, attention_mask, hidden)
        logits = self.classifier(features.to(self.classifier.weight.dtype))
        loss = None
        if labels is not None and getattr(self.config, "problem_type", None) == "regression":
            loss = F.mse_loss(logits.squeeze(1), labels.to(logits.dtype))
        elif labels is not None:
            loss = F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pooled(self, input_ids: Tensor | None, attention_mask: Tensor | None, hidden: Tensor | None = None) -> Tensor:
        """Normalised mean (B, width) over the tokens."""
        x_BTd = (
            self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if hidden is None
            else _through(self.backbone.encoder.layer[self.first_layer :], hidden.to(self.dtype), attention_mask)
        )
        mask_BT1 = torch.ones_like(x_BTd[..., :1]) if attention_mask is None else attention_mask[..., None].to(x_BTd)
        mean_Bd = (x_BTd * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        return F.layer_norm(mean_Bd, mean_Bd.shape[-1:])

    def lower(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states (B, T, width) before the layer at which `split_at` has divided the encoder."""
        x_BTd = self.backbone.embeddings(input_ids=input_ids)
        return _through(self.backbone.encoder.layer[: self.first_layer], x_BTd, attention_mask)

    @torch.no_grad()
    def split_at(self, layer: int) -> bool:
        """Divide the encoder below a layer: `lower` computes what is below, `forward(hidden=...)` goes on from there.

        Returns:
            False if the encoder is not of BERT's form: on a public input the parts do not give what the encoder gives.
        """
        self.first_layer = layer
        ids = torch.tensor([[1, 2, 3, 0]], device=self.device).clamp(max=self.config.vocab_size - 1)
        mask = torch.tensor([[1, 1, 1, 0]], device=self.device)
        try:
            with evaluating(self):
                whole = self.pooled(ids, mask)
                same = torch.allclose(self.pooled(None, mask, self.lower(ids, mask)), whole, rtol=1e-3, atol=1e-3)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # another form
            same = False
        self.first_layer = layer if same else None
        return same


def _through(layers: Iterable[nn.Module], x_BTd: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Hidden states after layers of BERT's form."""
    bias_B11T = (
        None
        if attention_mask is None
        else x_BTd.new_zeros(attention_mask.shape).masked_fill(attention_mask == 0, -1e9)[:, None, None, :]
    )
    for layer in layers:
        output = layer(x_BTd, bias_B11T)
        x_BTd = output[0] if isinstance(output, tuple) else output
    return x_BTd


def load_mean_pooled(
    path: str, *, config: Any = None, num_labels: int | None = None, local_files_only: bool = True
) -> MeanPooledClassifier:
    """Read a bare encoder, or a classifier that was saved, in float32.

    Args:
        path: folder, as save_pretrained writes it. config: None reads that of the folder; of a bare encoder give one
            with `num_labels`. num_labels: classes of the new head of a bare encoder, whose configuration is then read
            from the folder, without dropout: noise is regularisation enough. local_files_only: False allows downloads.
    """
    if config is None:
        new = {} if num_labels is None else {"num_labels": num_labels, **NO_DROPOUT}
        config = AutoConfig.from_pretrained(path, local_files_only=local_files_only, **new)
    model: MeanPooledClassifier = MeanPooledClassifier.from_pretrained(
        path, config=config, dtype=torch.float32, local_files_only=local_files_only
    )
    return model


def wants_mean(path: str) -> bool:
    """True if `1_Pooling/config.json` in the folder of a model says that it averages tokens (Sentence Transformers)."""
    file = Path(path) / "1_Pooling" / "config.json"
    try:
        return json.loads(file.read_text("utf-8")).get("pooling_mode_mean_tokens") is True
    except (OSError, ValueError, AttributeError):
        return False
