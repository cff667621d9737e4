"""Image features -> trained projector -> visual tokens -> language model with LoRA -> answer: LLaVA in small.

The questions run through the lower layers of MiniLM once. The visual tokens enter before its last layer, which is
computed at the answer token and nowhere else: nothing uses its other outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import downloads  # noqa: F401  (puts the main job on the path)
import torch
from model import Encoder, run_layers, tokenize
from torch import Tensor, nn
from torch.nn import functional as F

MAX_TOKENS = 14  # the longest question of easy-VQA has 11
TEXT_FEATURES = 128
FREQUENCY = 3.0  # of the cosines, for inputs of length 1
SHRINKAGE = 1e-3
TOKEN_LENGTH = 0.1  # of visual tokens at the start, for words of length 1: at first they hardly disturb the question
# Questions that anybody could write who knows the task and its answers, which are public as the classes of a classifier
# are. They centre and whiten what the language model says; no question of the data set has a part in it.
WORDS = (
    "car", "dog", "cat", "tree", "boat", "cup", "chair", "apple", "horse", "bird", "house", "ball", "white", "pink",
    "orange", "purple",
)  # fmt: skip
FORMS = ("is there a {}?", "is there not a {} in the image?", "is no {} present?", "what is the {} thing?")


@torch.no_grad()
def lower_layers(encoder: Encoder, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Hidden states (n, T, d) before the last layer and masks (n, T): functions of each question alone."""
    tokens = tokenize(encoder, texts, MAX_TOKENS)
    mask = tokens["attention_mask"].bool()
    x_QTd = encoder.model.embeddings(input_ids=tokens["input_ids"])
    return run_layers(encoder.model.encoder.layer[:-1], x_QTd, mask), mask


class Words(NamedTuple):
    """What the last layer needs of the words of questions (...): nothing below it is trained, so it is kept.

    Args:
        start: (..., d) mean state of the words. keys, values: (..., T, h, e) of h attention heads. mask: (..., T).
    """

    start: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor


class VisionLanguage(nn.Module):
    """Logits (B, K, answers) of the K questions about each of B images.

    What the language model says after it has seen question and image becomes fixed random cosine features (Rahimi and
    Recht 2007); from what the projector says about the image, the head makes the classifier that reads them. So the
    answer is linear in the products of both, and the head is one linear layer.

    Args:
        encoder: the language model. texts: the distinct questions. answers: the classes.
        features: width of the visual features. seed: of projector and random features; public.
    """

    def __init__(self, encoder: Encoder, texts: list[str], answers: list[str], features: int, seed: int) -> None:
        super().__init__()
        generator, width = torch.Generator().manual_seed(seed), encoder.width
        self.heads, self.num_answers = encoder.model.config.num_attention_heads, len(answers)
        self.layer = encoder.model.encoder.layer[-1]
        self.projector = nn.Linear(features, width, bias=False)
        self.head = nn.Linear(features, (TEXT_FEATURES + 1) * len(answers))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        hidden_QTd, mask_QT = lower_layers(encoder, texts)
        for name, value in self.words(hidden_QTd, mask_QT)._asdict().items():
            self.register_buffer(f"words_{name}", value)
        length = TOKEN_LENGTH * float(hidden_QTd[mask_QT].norm(dim=-1).mean())
        basis_dc = torch.linalg.qr(torch.randn(width, features, generator=generator))[0]
        with torch.no_grad():
            self.projector.weight.copy_(length * basis_dc)
        self.register_buffer("image_basis_dc", basis_dc / length)
        self._measure(encoder, answers, generator)

    @torch.no_grad()
    def _measure(self, encoder: Encoder, answers: list[str], generator: torch.Generator) -> None:
        """Centre and whiten by public questions, without an image; draw the frequencies of the cosines."""
        texts = [form.format(word) for form in FORMS for word in (*WORDS, *answers)]
        words = Words(*(x[None] for x in self.words(*lower_layers(encoder, texts))))
        said_Kd = self.read(torch.zeros(1, 1, encoder.width), words)[0]
        self.register_buffer("centre_d", said_Kd.mean(0))
        _, lengths_m, axes_md = torch.linalg.svd(said_Kd - self.centre_d, full_matrices=False)
        variances_m = lengths_m.square() / len(texts)
        whiten_dm = axes_md.T / (variances_m + SHRINKAGE * variances_m.sum()).sqrt()
        size = float(((said_Kd - self.centre_d) @ whiten_dm).square().sum(1).mean().sqrt())
        frequencies_mr = FREQUENCY * torch.randn(len(lengths_m), TEXT_FEATURES, generator=generator)
        self.register_buffer("text_basis_dr", whiten_dm @ frequencies_mr / size)
        self.register_buffer("phase_r", 2 * torch.pi * torch.rand(TEXT_FEATURES, generator=generator))
        self.register_buffer("mean_r", torch.cos((said_Kd - self.centre_d) @ self.text_basis_dr + self.phase_r).mean(0))

    def forward(self, features_BVc: Tensor, question_BK: Tensor) -> Tensor:
        """Answer."""
        tokens_BVd = self.projector(features_BVc.float())
        said_BKd = self.read(tokens_BVd, self.asked(question_BK))
        text_BKr = torch.cos((said_BKd - self.centre_d) @ self.text_basis_dr + self.phase_r) - self.mean_r
        text_BKr = F.pad(text_BKr * (2 / TEXT_FEATURES) ** 0.5, (0, 1), value=1.0)
        classifier_BAr = self.head(tokens_BVd.mean(1) @ self.image_basis_dc).unflatten(-1, (self.num_answers, -1))
        return torch.einsum("bar,bkr->bka", classifier_BAr, text_BKr)

    @torch.no_grad()
    def words(self, hidden: Tensor, mask: Tensor) -> Words:
        """Of hidden states (n, T, d) before the last layer."""
        own = self.layer.attention.self
        weights = mask[..., None] / mask.sum(1)[:, None, None]
        return Words((hidden * weights).sum(1), self.split(own.key(hidden)), self.split(own.value(hidden)), mask)

    def asked(self, question_BK: Tensor) -> Words:
        """The words of questions."""
        return Words(*(getattr(self, f"words_{name}")[question_BK] for name in Words._fields))

    def split(self, x: Tensor) -> Tensor:
        """(..., d) as (..., h, e)."""
        return x.unflatten(-1, (self.heads, -1))

    def read(self, tokens_BVd: Tensor, words: Words) -> Tensor:
        """Output (B, K, d) of the last layer at the answer token, which starts as the mean of the words.

        It sees visual tokens and words, not itself.
        """
        attention = self.layer.attention
        query = self.split(attention.self.query(words.start))
        of_image = torch.einsum("bkhe,bvhe->bkhv", query, self.split(attention.self.key(tokens_BVd)))
        of_words = torch.einsum("bkhe,bkthe->bkht", query, words.keys).masked_fill(~words.mask[:, :, None, :], -1e9)
        weights = (torch.cat([of_image, of_words], -1) / query.shape[-1] ** 0.5).softmax(-1)
        seen, read = weights.split([of_image.shape[-1], of_words.shape[-1]], -1)
        mixed = torch.einsum("bkhv,bvhe->bkhe", seen, self.split(attention.self.value(tokens_BVd)))
        mixed = mixed + torch.einsum("bkht,bkthe->bkhe", read, words.values)
        x_BKd = attention.output(mixed.flatten(-2), words.start)
        return self.layer.output(self.layer.intermediate(x_BKd), x_BKd)


def per_image_loss(logits_BKA: Tensor, answer_BK: Tensor, asked_BK: Tensor) -> Tensor:
    """Mean cross-entropy over the questions of each image."""
    losses_BK = F.cross_entropy(logits_BKA.movedim(-1, 1), answer_BK, reduction="none")
    return (losses_BK * asked_BK).sum(1) / asked_BK.sum(1).clamp(min=1)
