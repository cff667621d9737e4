"""Rates of a projector on validation data: `python -m benchmarks.recipes.projector`.

As in LLaVA, a trained projector turns the output of a frozen vision network into tokens of a frozen language model:
four visual tokens of EfficientNet-Lite0 (examples/vqa/vision.py), one linear layer or two with GELU, and the highest
layer of all-MiniLM-L6-v2. The mean of its outputs is compared with the sentence vectors of the classes ("a photo of a
shirt"), as that model compares sentences; nothing but the projector is trained. Images: those of easy-VQA of which
questions tell both colour and form, which are the classes; and 3,500 each of Fashion-MNIST and MNIST. 70 % are for
training, the rest for validation. `projector_apart.py` reads other images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pages import row
from benchmarks.recipes.__main__ import accuracy, delta_of, train_private
from benchmarks.recipes.data import FOLDER, ROOT, Part, examples, mean_states, mnist_pixels, pixels
from benchmarks.recipes.rules import MULTIPLES
from dpfunc.recipes import Recipe, recipe

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_projector.json"
EPSILONS = (3.0,)
SEEDS = 1
IMAGES, SHARE = 3500, 0.7  # of a data set, and of them for training
SHARPNESS = 20.0  # of cosines of sentence vectors, as in the training of this language model
CLOTHES = (
    "t-shirt", "pair of trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
)  # fmt: skip
FORMS = ("circle", "rectangle", "triangle")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Reader(nn.Module):
    """Logits (B, classes) of visual features (B, V, c).

    Args:
        encoder: the language model, of which the highest layer is used, frozen. classes: in words.
        features: c. deep: two linear layers with GELU between them, as in LLaVA 1.5; else one. seed: of their start.
    """

    def __init__(self, encoder: Any, classes: Tensor, features: int, deep: bool, seed: int) -> None:
        super().__init__()
        width = encoder.config.hidden_size
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(features, width)] + ([nn.GELU(), nn.Linear(width, width)] if deep else [])
        self.projector = nn.Sequential(*layers)
        self.top = encoder.encoder.layer[-1].requires_grad_(False)
        self.register_buffer("classes_Kd", classes)

    def forward(self, features_BVc: Tensor) -> Tensor:
        """Similarity to each class, for its softmax."""
        output = self.top(self.projector(features_BVc))
        x_BVd = output[0] if isinstance(output, tuple) else output
        return SHARPNESS * F.normalize(x_BVd.mean(1), dim=1) @ self.classes_Kd.T


@torch.no_grad()
def sentence_vectors(encoder: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Unit vectors of texts, less their mean."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    x_Bd = F.normalize(mean_states(encoder, tokens), dim=1)
    return F.normalize(x_Bd - x_Bd.mean(0), dim=1)


@dataclass(frozen=True)
class Images:
    """Images (n, 3, H, W) and classes (n,) for training and validation, others for a test, and the names of classes."""

    pixels: Tensor
    y: Tensor
    test_pixels: Tensor
    test_y: Tensor
    names: list[str]


def shapes() -> Images:
    """easy-VQA: images of 64 x 64 of which questions tell both colour and form; those of its test part are the test."""
    from downloads import fetch_questions
    from questions import load

    data = load(fetch_questions())
    colours = [answer for answer in data.answers if answer not in (*FORMS, "yes", "no")]

    def told(part: Any) -> tuple[Tensor, Tensor]:
        rows, classes = [], []
        for image, (answers, asked) in enumerate(zip(part.answer, part.asked, strict=True)):
            answered = {data.answers[answer] for answer in answers[asked].tolist()}
            for form in answered & {*FORMS}:
                for colour in answered & {*colours}:
                    rows.append(image)
                    classes.append(colours.index(colour) * len(FORMS) + FORMS.index(form))
        return part.pixels[rows], torch.tensor(classes)

    names = [f"{colour} {form}" for colour in colours for form in FORMS]
    return Images(*told(data.train), *told(data.test), names)


def coloured(x: Tensor) -> Tensor:
    """Grey images (n, 784) as (n, 3, 28, 28)."""
    return x.view(-1, 1, 28, 28).expand(-1, 3, -1, -1)


def clothes() -> Images:
    """Fashion-MNIST; the test is of images that are in no other part of this project."""
    (x, y), (test_x, test_y) = pixels(0, IMAGES), pixels(30_000, 31_500)
    return Images(coloured(x), y, coloured(test_x), test_y, list(CLOTHES))


def digits() -> Images:
    """MNIST; the test is of the images that are left."""
    x, y = mnist_pixels()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    rows, others = order[:IMAGES], order[IMAGES:]
    return Images(coloured(x[rows]), y[rows], coloured(x[others]), y[others], list(DIGITS))


SETS: dict[str, Callable[[], Images]] = {"easy-vqa": shapes, "fashion": clothes, "mnist": digits}


def features(name: str, images: Tensor) -> Tensor:
    """Visual features (n, V, c) of unit variance, kept in a file."""
    from downloads import fetch_vision
    from vision import image_features, load_vision

    file = FOLDER / f"features-projector-{name}.pt"
    if not file.exists():
        torch.save(image_features(load_vision(fetch_vision()), images).float(), file)
    x = torch.load(file, weights_only=True)
    return x * x.shape[-1] ** 0.5


def parts(name: str, images: Images) -> tuple[Part, Part]:
    """Visual features for training and for validation."""
    x, y = features(name, images.pixels), images.y
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, second = order.split([round(SHARE * len(y)), len(y) - round(SHARE * len(y))])
    return Part(x[first], y[first]), Part(x[second], y[second])


def without_privacy(module: nn.Module, part: Part, rate: float, steps: int = 300, size: int = 256) -> nn.Module:
    """Adam on batches without clipping and noise; the rate falls linearly."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randperm(len(part.y), generator=generator)[:size]
        loss = F.cross_entropy(module(part.x[rows]), part.y[rows])
        for p, grad in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            p.grad = grad
        optimizer.step()
        scheduler.step()
    return module


def recipe_of(module: Reader, n: int, epsilon: float) -> Recipe:
    """The recipe of the projector of a model for n images."""
    size = sum(p.numel() for p in module.projector.parameters())
    return recipe("projector", dataset_size=n, num_parameters=size, epsilon=epsilon, delta=delta_of(n))


def measure(start: Callable[[int], Reader], train: Part, validation: Part, seeds: int) -> Iterator[dict[str, Any]]:
    """Accuracies at multiples of the recipe's rate, for each epsilon; `start` makes a model from a seed."""
    plain = [without_privacy(start(0), train, rate) for rate in (3e-4, 1e-3, 3e-3)]
    best = max(accuracy(module, validation, 1.0) for module in plain)
    for epsilon in EPSILONS:
        found = recipe_of(start(0), len(train.y), epsilon)
        plan, accuracies = found.plan(), []
        for multiple in MULTIPLES:
            rate = multiple * found.learning_rate
            runs = [train_private(start(seed), train, 1.0, plan, rate) for seed in range(seeds)]
            accuracies.append(sum(accuracy(run, validation, 1.0) for run in runs) / seeds)
        yield {
            "epsilon": epsilon, "parameters": found.num_parameters, "noise_to_signal": found.noise_to_signal,
            "rate": found.learning_rate, "multiples": MULTIPLES, "non_private": best, "validation": accuracies,
        }  # fmt: skip


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    cells = [
        result["data"], str(result["layers"]), f"{result['epsilon']:g}", str(result["parameters"]),
        f"{result['noise_to_signal']:.3f}", f"{result['rate']:.3g}", f"{result['non_private']:.3f}",
        *(f"{value:.3f}" for value in result["validation"]),
    ]  # fmt: skip
    return row(cells)


def starts(classes: list[str], width: int) -> Callable[[bool, int], Reader]:
    """Make a model of (two layers or one, seed), for images of these classes with features of this width."""
    from transformers import AutoModel, AutoTokenizer

    folder = ROOT / ".cache" / "model"
    encoder = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = sentence_vectors(encoder, tokenizer, [f"a photo of a {each}" for each in classes])
    return partial(Reader, encoder, texts, width)


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--layers", type=click.Choice(["1", "2"]), multiple=True, help="Both by default.")
@click.option("--seeds", type=int, default=SEEDS, help="Runs of each.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(names: tuple[str, ...], layers: tuple[str, ...], seeds: int, out: Path) -> None:
    """Measure, print, and keep the results; others in the file stay."""
    examples()
    console = Console(width=200)
    torch.set_num_threads(1)
    for name in names or tuple(SETS):
        images = SETS[name]()
        train, validation = parts(name, images)
        start = starts(images.names, train.x.shape[-1])
        for form in layers or ("1", "2"):
            for result in measure(partial(start, form == "2"), train, validation, seeds):
                kept = json.loads(out.read_text("utf-8")) if out.exists() else []
                known = {(old["data"], old["layers"], old["epsilon"]): old for old in kept}
                known[name, int(form), result["epsilon"]] = {"data": name, "layers": int(form), **result}
                console.print(line(known[name, int(form), result["epsilon"]]))
                out.write_text(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
