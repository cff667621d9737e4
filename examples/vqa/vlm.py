"""Image features -> trained projector -> visual tokens -> language model with LoRA -> answer: LLaVA in small.

The questions run through the lower layers of MiniLM once. The visual tokens enter before its last layer, which is
computed where the answer is read and nowhere else: nothing uses its other outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import downloads  # noqa: F401  (puts the main job on the path)
import torch
from model import Encoder, run_layers, tokenize
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

MAX_TOKENS = 14  # the longest question of easy-VQA has 11
TEXT_RANK = 32
# Questions that anybody could write without the data set. They centre and scale what the language model says.
THINGS = ("car", "dog", "cat", "tree", "boat", "cup", "chair", "apple", "horse", "bird", "house", "ball")
FORMS = (
    "is there a {}?", "is there not a {} in the image?", "does the image contain a {}?", "is no {} present?",
    "what is the {}?", "what color is the {}?",
)  # fmt: skip
PUBLIC_QUESTIONS = [form.format(thing) for form in FORMS for thing in THINGS]


@torch.no_grad()
def lower_layers(encoder: Encoder, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Hidden states (n, T, d) before the last layer and masks (n, T): functions of each question alone."""
    tokens = tokenize(encoder, texts, MAX_TOKENS)
    mask = tokens["attention_mask"].bool()
    x_QTd = encoder.model.embeddings(input_ids=tokens["input_ids"])
    return run_layers(encoder.model.encoder.layer[:-1], x_QTd, mask), mask


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix (rows, columns) with orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator))[0]


class Words(NamedTuple):
    """What the last layer needs of the words of questions (...): nothing below it is trained, so it is kept.

    Args:
        first: (..., d) state of the first word. keys, values: (..., T, h, e) of h attention heads. mask: (..., T).
    """

    first: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor


class VisionLanguage(nn.Module):
    """Logits (B, K, answers) of the K questions about each of B images.

    The answer is linear in the products of what the language model says after it has seen question and image, and what
    the projector says about the image: the first in a fixed random basis, the second in the one it starts with.

    Args:
        encoder: the language model. texts: the distinct questions. features: width of the visual features.
        num_answers: classes. seed: of the fixed bases and of the projector; public.
    """

    def __init__(self, encoder: Encoder, texts: list[str], features: int, num_answers: int, seed: int) -> None:
        super().__init__()
        generator, width = torch.Generator().manual_seed(seed), encoder.width
        self.heads = encoder.model.config.num_attention_heads
        self.layer = encoder.model.encoder.layer[-1]
        self.projector = nn.Linear(features, width, bias=False)
        self.head = nn.Linear((TEXT_RANK + 1) * (features + 1), num_answers)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        hidden_QTd, mask_QT = lower_layers(encoder, texts)
        for name, value in self.words(hidden_QTd, mask_QT)._asdict().items():
            self.register_buffer(f"words_{name}", value)
        with torch.no_grad():
            length = float(hidden_QTd[mask_QT].norm(dim=-1).mean())
            basis_dc = orthonormal(width, features, generator)
            self.projector.weight.copy_(length * basis_dc)  # features of length 1 become tokens as long as words
            public = Words(*(x[None] for x in self.words(*lower_layers(encoder, PUBLIC_QUESTIONS))))
            said_Kd = self.read(torch.zeros(1, 1, width), public)[0]
            centred_Kr = (said_Kd - said_Kd.mean(0)) @ (basis_dr := orthonormal(width, TEXT_RANK, generator))
            spread = float(centred_Kr.square().sum(1).mean().sqrt())
        self.register_buffer("image_basis_dc", basis_dc / length)
        self.register_buffer("text_basis_dr", basis_dr / spread)
        self.register_buffer("centre_d", said_Kd.mean(0))

    def forward(self, features_BVc: Tensor, question_BK: Tensor) -> Tensor:
        """Answer."""
        tokens_BVd = self.projector(features_BVc.float())
        said_BKd = self.read(tokens_BVd, self.asked(question_BK))
        text_BKr = F.pad((said_BKd - self.centre_d) @ self.text_basis_dr, (0, 1), value=1.0)
        image_Br = F.pad(tokens_BVd.mean(1) @ self.image_basis_dc, (0, 1), value=1.0)
        return self.head((text_BKr[..., :, None] * image_Br[:, None, None, :]).flatten(-2))

    @torch.no_grad()
    def words(self, hidden: Tensor, mask: Tensor) -> Words:
        """Of hidden states (n, T, d) before the last layer."""
        own = self.layer.attention.self
        return Words(hidden[:, 0], self.split(own.key(hidden)), self.split(own.value(hidden)), mask)

    def asked(self, question_BK: Tensor) -> Words:
        """The words of questions."""
        return Words(*(getattr(self, f"words_{name}")[question_BK] for name in Words._fields))

    def split(self, x: Tensor) -> Tensor:
        """(..., d) as (..., h, e)."""
        return x.unflatten(-1, (self.heads, -1))

    def read(self, tokens_BVd: Tensor, words: Words) -> Tensor:
        """Output (B, K, d) of the last layer at the first word of each question, over visual tokens and words."""
        attention = self.layer.attention
        query = self.split(attention.self.query(words.first))
        of_image = torch.einsum("bkhe,bvhe->bkhv", query, self.split(attention.self.key(tokens_BVd)))
        of_words = torch.einsum("bkhe,bkthe->bkht", query, words.keys).masked_fill(~words.mask[:, :, None, :], -1e9)
        weights = (torch.cat([of_image, of_words], -1) / query.shape[-1] ** 0.5).softmax(-1)
        seen, read = weights.split([of_image.shape[-1], of_words.shape[-1]], -1)
        mixed = torch.einsum("bkhv,bvhe->bkhe", seen, self.split(attention.self.value(tokens_BVd)))
        mixed = mixed + torch.einsum("bkht,bkthe->bkhe", read, words.values)
        x_BKd = attention.output(mixed.flatten(-2), words.first)
        return self.layer.output(self.layer.intermediate(x_BKd), x_BKd)


def per_image_loss(logits_BKA: Tensor, answer_BK: Tensor, asked_BK: Tensor) -> Tensor:
    """Mean cross-entropy over the questions of each image."""
    losses_BK = F.cross_entropy(logits_BKA.movedim(-1, 1), answer_BK, reduction="none")
    return (losses_BK * asked_BK).sum(1) / asked_BK.sum(1).clamp(min=1)
