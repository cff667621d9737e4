"""Networks and training of the rows about images: the same loop for all, with dpfunc; and one with Opacus."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfunc
from benchmarks.published.rows import Setting, noise_of
from benchmarks.recipes.data import CLOTHES, FOLDER, ROOT, clothes
from dpfunc.clipping import Flat
from dpfunc.features.images import CHANNELS, STRIDE, scattering
from dpfunc.rng import insecure_key
from dpfunc.sampling import Poisson
from dpfunc.state import allow_repeat

DIGITS = ROOT / ".cache" / "mnist"  # the four files of MNIST, if somebody put them there
GROUPS = 27  # of channels, each normalised in each image
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST, as the example of Opacus has them
CHUNK = 100  # images that are scattered at once
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Images:
    """Inputs and classes to train and to test with."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def scattered(images: Tensor) -> Tensor:
    """Normalised scattering coefficients (n, 81, h / 4, w / 4), in half precision, of images (n, h, w) from 0 to 1."""
    height, width = (side // STRIDE for side in images.shape[1:])
    found = torch.empty(len(images), CHANNELS, height, width, dtype=torch.half)  # parts would lie between freed memory
    for rows, chunk in zip(found.split(CHUNK), images.split(CHUNK), strict=True):
        rows.copy_(F.group_norm(scattering(chunk), GROUPS))
    return found


def clothes_scattered() -> Images:
    """Fashion-MNIST, scattered once and kept in `.cache/recipes`."""
    parts = []
    for part in ("train", "t10k"):
        file, (x, y) = FOLDER / f"scattered-fashion-{part}.pt", clothes(part)
        if not file.exists():
            torch.save(scattered(x.view(-1, 28, 28) / 255), file)
        parts += [torch.load(file, weights_only=True), y]
    return Images(*parts)


def clothes_pixels() -> Images:
    """Fashion-MNIST from 0 to 1."""
    (x, y), (test_x, test_y) = clothes("train"), clothes("t10k")
    return Images(x.view(-1, 1, 28, 28) / 255, y, test_x.view(-1, 1, 28, 28) / 255, test_y)


def standardized(images: Images) -> Images:
    """The public constants of the example taken off."""
    return Images((images.x - MEAN) / DEVIATION, images.y, (images.test_x - MEAN) / DEVIATION, images.test_y)


def digits(folder: Path = DIGITS) -> Images:
    """MNIST, from its four files."""
    found = []
    for part in ("train", "t10k"):
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            classes = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)
        found += [pixels.view(-1, 1, 28, 28).float() / 255, classes.long()]
    return standardized(Images(*found))


def linear() -> nn.Module:
    """On coefficients of 7 x 7 positions."""
    return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 7 * 7, 10))


def scatter_cnn() -> nn.Module:
    """The small CNN of Tramèr and Boneh on coefficients."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 16, 3, 2, 1), nn.Tanh(), nn.Conv2d(16, 32, 3, 1, 1), nn.Tanh(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def pixel_cnn(act: Callable[[], nn.Module], padding: int) -> nn.Module:
    """The CNN of 26,010 parameters that all of these works have."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding), act(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), act(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), act(), nn.Linear(32, 10),
    )  # fmt: skip


NETS: dict[str, Callable[[], nn.Module]] = {
    "scatter-linear": linear,
    "scatter-cnn": scatter_cnn,
    "pixel-cnn": lambda: pixel_cnn(nn.Tanh, 2),
    "digit-cnn": lambda: pixel_cnn(nn.ReLU, 3),
}


def new_net(name: str, seed: int) -> nn.Module:
    """A network by name, with weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETS[name]()


def missing(row: str) -> str | None:
    """What to do before a row can run; None if its data are here."""
    if row.startswith("mnist"):
        return None if DIGITS.exists() else "put the four files of MNIST into .cache/mnist"
    return None if CLOTHES.exists() else "add --fetch, which gets Fashion-MNIST from Debian"


def images_of(row: str, model: str) -> Images:
    """The data of a row."""
    if row.startswith("mnist"):
        return digits()
    if model.startswith("scatter"):
        return clothes_scattered()
    return standardized(clothes_pixels()) if model == "digit-cnn" else clothes_pixels()


def accuracy(forward: Callable[[Tensor], Tensor], images: Images) -> float:
    """Share of the test images whose class is found."""
    with torch.no_grad():
        found = [forward(x.float()).argmax(1) for x in images.test_x.split(ROWS_AT_ONCE)]
    return float((torch.cat(found) == images.test_y).float().mean())


def train(net: nn.Module, images: Images, setting: Setting, seed: int) -> nn.Module:
    """The network after a run of dpfunc. Its key can be guessed: the data are public."""
    forward, params = dpfunc.functionalize(net)

    def loss_fn(params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(forward(params, batch[0].float()), batch[1], reduction="none")

    plan = dpfunc.Plan(
        Poisson(len(images.y), setting.batch / len(images.y)), Flat(setting.clip), noise_of(setting), setting.steps,
        setting.delta, allow_large_delta=True,
    )  # fmt: skip
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=ROWS_AT_ONCE if len(params) > 2 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpfunc.errors.InsecureKeyWarning)  # the data are public
        state = allow_repeat(dp_step.init(params, insecure_key(seed)))  # a seed may run again
    optimizer = torch.optim.SGD(params.values(), lr=setting.rate, momentum=setting.momentum)
    for indices in plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take((images.x, images.y), indices), state)
        dpfunc.set_grads(params, grads)
        optimizer.step()
    return dpfunc.with_params(net, params)


def train_by_opacus(net: nn.Module, images: Images, setting: Setting, seed: int) -> nn.Module:
    """The network after the same run of Opacus, which leaves its hooks in it."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    source = torch.Generator().manual_seed(seed)
    module = GradSampleModule(net, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=setting.rate, momentum=setting.momentum),
        noise_multiplier=noise_of(setting), max_grad_norm=setting.clip, expected_batch_size=round(setting.batch),
        generator=source,
    )  # fmt: skip
    for _ in range(setting.steps):
        rows = torch.nonzero(torch.rand(len(images.y), generator=source) < setting.batch / len(images.y))[:, 0]
        optimizer.zero_grad()
        F.cross_entropy(module(images.x[rows].float()), images.y[rows]).backward()
        optimizer.step()
    return module
