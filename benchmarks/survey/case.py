"""What a case of the survey is made of: a module, a batch, a loss, what is trained, and the mode of the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfunc.hf import losses

Batch = dict[str, Tensor]
LossFn = Callable[[Mapping[str, Tensor], Batch], Tensor]
LossOf = Callable[[Callable[..., Any]], LossFn]

BATCH, VOCAB, CLASSES = 4, 50, 3
PAD, START, END, IMAGE, FIRST_WORD = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Subject:
    """A module, a batch for it, and its loss: from a forward function to one loss per sample."""

    module: nn.Module
    batch: Batch
    loss: LossOf


@dataclass(frozen=True)
class Case:
    """One line of the survey.

    Args:
        field: the part of the survey. family: of the model. subject: builds module, batch and loss.
        trained: "full", "LoRA", "biases", "GroupNorm" (full, with replaced BatchNorm), or the name of a PEFT method,
            where the module is a PEFT model. mode: "train" or "eval". padding: "right", "left" or "none".
    """

    field: str
    family: str
    subject: Callable[[], Subject]
    trained: str = "full"
    mode: str = "eval"
    padding: str = "none"

    @property
    def name(self) -> str:
        """Unique, for `--only` and `--append`."""
        return "/".join((self.field, self.family, self.trained, self.mode, self.padding))

    @property
    def about(self) -> dict[str, Any]:
        """What a row of the result says first."""
        names = ("field", "family", "trained", "mode", "padding")
        return {"case": self.name, "model": "", **{name: getattr(self, name) for name in names}}


def cases_of(
    field: str, family: str, subject: Callable[[], Subject], variants: Iterable[str], padding: str = "none"
) -> list[Case]:
    """A case for each variant, written as "full eval" or "LoRA train"."""
    return [Case(field, family, subject, *variant.rsplit(" ", 1), padding) for variant in variants]


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def classes(count: int = CLASSES, *shape: int) -> Tensor:
    return torch.randint(count, shape or (BATCH,), generator=seeded(1))


def text(
    padding: str = "right", lengths: Sequence[int] = (8, 3, 6, 2), length: int = 8, vocab: int = VOCAB, seed: int = 0
) -> Batch:
    """Ids and mask of samples of several lengths, the first one whole."""
    mask_BT = (torch.arange(length)[None] < torch.tensor(lengths)[:, None]).long()
    ids_BT = torch.randint(FIRST_WORD, vocab, (len(lengths), length), generator=seeded(seed))
    ids_BT = torch.where(mask_BT == 1, ids_BT, PAD)
    if padding == "left":
        ids_BT, mask_BT = ids_BT.flip(1), mask_BT.flip(1)
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


def token_labels(batch: Batch) -> Tensor:
    return torch.where(batch["attention_mask"] == 1, batch["input_ids"], losses.IGNORED)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return randn(BATCH, channels, size, size)


def mean_square(output: Tensor) -> Tensor:
    """For models without a head: any smooth function of a sample's own output."""
    return output.float().square().flatten(1).mean(1)


def tensor_of(output: Any) -> Tensor:
    """The first floating tensor of an output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim())


def ctc(logits_BTV: Tensor, labels_BL: Tensor) -> Tensor:
    """All frames against the labels that are not 0, the blank."""
    frames_B = torch.full((len(labels_BL),), logits_BTV.shape[1])
    lengths_B = (labels_BL > 0).sum(1)
    scores_TBV = F.log_softmax(logits_BTV.float(), dim=2).transpose(0, 1)
    return F.ctc_loss(scores_TBV, labels_BL, frames_B, lengths_B, reduction="none")


# name -> (output, labels) -> losses (B,); any other name is that of an output, whose mean square is the loss
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "causal": lambda out, y: losses.causal_lm(out.logits, y),
    "tokens": lambda out, y: losses.token_mean(out.logits[:, : y.shape[1]], y),
    "seq2seq": lambda out, y: losses.seq2seq(out.logits, y),
    "classes": lambda out, y: losses.classification(out.logits, y),
    "ctc": lambda out, y: ctc(out.logits, y),
    "parameters": lambda out, y: torch.stack([mean_square(part) for part in out.params]).sum(0),
    "last causal": lambda out, y: losses.causal_lm(out.logits[:, -y.shape[1] :], y),
    "answers": lambda out, y: losses.classification(out.question_answering_score, y),
    "pair": lambda out, y: 1 - F.cosine_similarity(out.text_embeds, out.image_embeds),
    "contrastive": lambda out, y: F.cross_entropy(
        out.logits_per_text, torch.arange(len(out.logits_per_text)), reduction="none"
    ),
    "all logits": lambda out, y: torch.stack([mean_square(part) for part in out.logits]).sum(0),
    "square": lambda out, y: mean_square(tensor_of(out)),
}


def hugging_face(module: nn.Module, batch: Batch, loss: str, **options: Any) -> Subject:
    """A model of Transformers: its inputs are what its forward function accepts; labels are not given to it."""
    accepted = inspect.signature(module.forward).parameters
    wide = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    batch = {key: value for key, value in batch.items() if key == "labels" or key in accepted or wide}
    options = {**({"use_cache": False} if "use_cache" in accepted else {}), **options}
    losses_of = LOSSES.get(loss, lambda out, y: mean_square(getattr(out, loss)))

    def loss_of(forward: Callable[..., Any]) -> LossFn:
        def loss_fn(params: Mapping[str, Tensor], batch: Batch) -> Tensor:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            return losses_of(forward(params, **inputs, **options), batch.get("labels"))

        return loss_fn

    return Subject(module, batch, loss_of)
