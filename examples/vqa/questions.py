"""easy-VQA as records: one image with all its questions is one record, and one unit of privacy."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

NUM_VALIDATION = 400  # images taken out of the training part; settings were chosen on them, so they are not protected
PER_IMAGE = 12  # questions of an image that are used; 637 of the 4000 training images have more


@dataclass(frozen=True)
class Part:
    """Images and their questions.

    Args:
        pixels: (n, 3, 64, 64) uint8. question: (n, PER_IMAGE) rows of `texts`. answer: (n, PER_IMAGE).
        asked: (n, PER_IMAGE), False where an image has fewer questions.
    """

    pixels: Tensor
    question: Tensor
    answer: Tensor
    asked: Tensor


@dataclass(frozen=True)
class ImageQuestions:
    """The three parts. `texts` are the distinct questions, in order of their letters; `answers` are public."""

    texts: list[str]
    answers: list[str]
    train: Part
    validation: Part
    test: Part

    @property
    def majority_accuracy(self) -> float:
        """Share of the test questions whose answer is the most frequent one in training."""
        majority = Counter(self.train.answer[self.train.asked].tolist()).most_common(1)[0][0]
        return float((self.test.answer[self.test.asked] == majority).float().mean())


def load(folder: Path, limit: int | None = None) -> ImageQuestions:
    """Read the data set; `limit` keeps the first images of each part only."""
    answers = sorted((folder / "answers.txt").read_text().split())
    asked = {name: by_image(folder / name / "questions.json") for name in ("train", "test")}
    texts = sorted({text for images in asked.values() for rows in images.values() for text, _ in rows})
    ids = sorted(asked["train"])
    random.Random(0).shuffle(ids)
    chosen = {
        "train": ("train", ids[NUM_VALIDATION:]),
        "validation": ("train", ids[:NUM_VALIDATION]),
        "test": ("test", sorted(asked["test"])),
    }
    parts = [
        read_part(folder / source / "images", {i: asked[source][i] for i in images[:limit]}, texts, answers, name)
        for name, (source, images) in chosen.items()
    ]
    return ImageQuestions(texts, answers, *parts)


def by_image(path: Path) -> dict[int, list[tuple[str, str]]]:
    """Image -> its (question, answer) pairs."""
    images: dict[int, list[tuple[str, str]]] = {}
    for text, answer, image in json.loads(path.read_text("utf-8")):
        images.setdefault(image, []).append((text, answer))
    return images


def read_part(
    folder: Path, images: dict[int, list[tuple[str, str]]], texts: list[str], answers: list[str], name: str
) -> Part:
    """Tensors of one part. Of the test part every question is used, of the others PER_IMAGE an image."""
    width = max(map(len, images.values())) if name == "test" else PER_IMAGE
    row_of, class_of = {text: i for i, text in enumerate(texts)}, {answer: i for i, answer in enumerate(answers)}
    question = torch.zeros(len(images), width, dtype=torch.long)
    answer, asked = torch.zeros_like(question), torch.zeros(len(images), width, dtype=torch.bool)
    pixels = []
    for row, (image, pairs) in enumerate(images.items()):
        with Image.open(folder / f"{image}.png") as file:
            pixels.append(torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1))
        for column, (text, label) in enumerate(pairs[:width]):
            question[row, column], answer[row, column] = row_of[text], class_of[label]
            asked[row, column] = True
    return Part(torch.stack(pixels), question, answer, asked)
