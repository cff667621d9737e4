"""A projector by its recipe: rates on validation data, and test images: `python -m benchmarks.recipes.projector`.

As in LLaVA, a trained projector turns the output of a frozen vision network into tokens of a frozen language model:
four visual tokens of EfficientNet-Lite0 (examples/vqa/vision.py), one linear layer or two with GELU, and the highest
layer of all-MiniLM-L6-v2. The mean of its outputs is compared with the sentence vectors of the classes ("a photo of a
shirt"), as that model compares sentences; nothing but the projector is trained. Images: those of easy-VQA of which
questions tell both colour and form, which are the classes; and 3,500 each of Fashion-MNIST and MNIST. 70 % are for
training, the rest for validation.

With `--apart`, accuracies on other images: of the most frequent class; of the best of `PLAIN` without clipping and
noise; of the best private run of a grid (`RATES` x `SCHEDULES`), which epsilon does not count, both chosen on
validation data; and of the recipe, with seeds, and nothing chosen. The test part is read at the end of each run, and
nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.__main__ import (
    EPSILON,
    SEEDS,
    accuracy,
    delta_of,
    facts_of,
    plan_of,
    spread,
    train_private,
)  # fmt: skip
from benchmarks.recipes.data import FOLDER, ROOT, Part, examples, mean_states, mnist_pixels, pixels
from benchmarks.recipes.rules import MULTIPLES
from benchmarks.results import FOLDER as RESULTS
from benchmarks.results import keep, row, rows_of
from dpfunc.recipes import Recipe, recipe

RESULT, APART = RESULTS / "recipes_projector.json", RESULTS / "recipes_projector_apart.json"
PLAIN = (3e-4, 1e-3, 3e-3)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
SCHEDULES = ((0.16, 40), (0.5, 100))  # sampling probability, number of steps
REFERENCES = ("majority", "non_private", "tuned", "tuned_settings", "tuned_validation")
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


Start = Callable[[int], Reader]  # makes a model of a seed


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


def recipe_of(module: Reader, n: int) -> Recipe:
    """The recipe of the projector of a model for n images."""
    size = sum(p.numel() for p in module.projector.parameters())
    return recipe("projector", dataset_size=n, num_parameters=size, epsilon=EPSILON, delta=delta_of(n))


def rates(start: Start, train: Part, validation: Part, seeds: int) -> dict[str, Any]:
    """Accuracies at multiples of the recipe's rate."""
    plain = [without_privacy(start(0), train, rate) for rate in PLAIN]
    best = max(accuracy(module, validation, 1.0) for module in plain)
    found = recipe_of(start(0), len(train.y))
    plan, accuracies = found.plan(), []
    for multiple in MULTIPLES:
        rate = multiple * found.learning_rate
        runs = [train_private(start(seed), train, 1.0, plan, rate) for seed in range(seeds)]
        accuracies.append(sum(accuracy(run, validation, 1.0) for run in runs) / seeds)
    return {
        "epsilon": EPSILON, "parameters": found.num_parameters, "noise_to_signal": found.noise_to_signal,
        "rate": found.learning_rate, "multiples": MULTIPLES, "non_private": best, "validation": accuracies,
    }  # fmt: skip


def references(start: Start, train: Part, validation: Part, test: Part) -> dict[str, Any]:
    """What the recipe is compared with."""
    plain = [without_privacy(start(0), train, rate) for rate in PLAIN]
    settings = [{"lr": rate, "q": q, "steps": steps} for q, steps in SCHEDULES for rate in RATES]
    grid = [
        train_private(start(0), train, 1.0, plan_of(len(train.y), each["q"], each["steps"]), each["lr"])
        for each in settings
    ]
    reference = max(plain, key=lambda module: accuracy(module, validation, 1.0))
    scores = [accuracy(module, validation, 1.0) for module in grid]
    best = scores.index(max(scores))
    return {
        "majority": float((test.y == train.y.mode().values).float().mean()),
        "non_private": accuracy(reference, test, 1.0), "tuned": accuracy(grid[best], test, 1.0),
        "tuned_settings": settings[best], "tuned_validation": scores,
    }  # fmt: skip


def apart(start: Start, parts: tuple[Part, Part, Part], seeds: int, known: dict[str, Any] | None) -> dict[str, Any]:
    """All accuracies on the test part; with known references, the recipe's alone."""
    started, (train, validation, test) = time.perf_counter(), parts
    compared = references(start, train, validation, test) if known is None else {key: known[key] for key in REFERENCES}
    found = recipe_of(start(0), len(train.y))
    models = [
        train_private(start(seed), train, 1.0, found.plan(), found.learning_rate) for seed in range(100, 100 + seeds)
    ]
    tests = [accuracy(model, test, 1.0) for model in models]
    return {"n": len(train.y), "test": len(test.y), **compared, **facts_of(found, tests, started)}


def line(result: dict[str, Any]) -> str:
    """One row of the table of rates in docs/recipes.md."""
    cells = [
        result["data"], result["layers"], f"{result['epsilon']:g}", result["parameters"],
        f"{result['noise_to_signal']:.3f}", f"{result['rate']:.3g}", f"{result['non_private']:.3f}",
        *(f"{value:.3f}" for value in result["validation"]),
    ]  # fmt: skip
    return row(cells)


def line_apart(result: dict[str, Any]) -> str:
    """One row of the table of test images in docs/recipes.md."""
    values = [f"{result[key]:.3f}" for key in ("noise_to_signal", "majority", "non_private", "tuned")]
    facts = [result["data"], result["layers"], result["n"], result["parameters"]]
    return row([*facts, *values, spread(result["recipe"])])


def starts(classes: list[str], width: int) -> Callable[[bool, int], Reader]:
    """Make a model of (two layers or one, seed), for images of these classes with features of this width."""
    from transformers import AutoModel, AutoTokenizer

    folder = ROOT / ".cache" / "model"
    encoder = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = sentence_vectors(encoder, tokenizer, [f"a photo of a {each}" for each in classes])
    return partial(Reader, encoder, texts, width)


def place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a result in its file."""
    return result["data"], result["layers"], result["epsilon"]


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--apart", "reads_test", is_flag=True, help="Test images, instead of rates.")
@click.option("--layers", type=click.Choice(["1", "2"]), multiple=True, help="Both by default.")
@click.option("--seeds", type=int, help=f"Runs of each: 1 at each rate, {SEEDS} of the recipe on test images.")
@click.option("--keep-references", is_flag=True, help="Of test images, measure the recipe alone.")
@click.option("--out", type=click.Path(path_type=Path), help="File of the results.")
def main(
    names: tuple[str, ...], reads_test: bool, layers: tuple[str, ...], seeds: int | None, keep_references: bool,
    out: Path | None,
) -> None:  # fmt: skip
    """Measure, print, and keep the results; others in the file stay."""
    examples()
    torch.set_num_threads(1)
    file = out or (APART if reads_test else RESULT)
    for name in names or tuple(SETS):
        images = SETS[name]()
        train, validation = parts(name, images)
        make = starts(images.names, train.x.shape[-1])
        for form in layers or ("1", "2"):
            about = {"data": name, "layers": int(form), "epsilon": EPSILON}
            start = partial(make, form == "2")
            if reads_test:
                test = Part(features(f"{name}-test", images.test_pixels), images.test_y)
                known = next((old for old in rows_of(file) if place(old) == place(about)), None)
                every = (train, validation, test)
                result = {**about, **apart(start, every, seeds or SEEDS, known if keep_references else None)}
            else:
                result = {**about, **rates(start, train, validation, seeds or 1)}
            Console(width=200).print((line_apart if reads_test else line)(result))
            keep(file, result, place)


if __name__ == "__main__":
    main()
