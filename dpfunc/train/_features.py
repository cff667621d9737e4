"""Features of a record, from it and public facts alone, and the models on them: of a row of a table, and of an image,
by a scattering transform (Bruna and Mallat 2013; private heads on it: Tramer and Boneh 2021) or by a frozen encoder.

May import: its folder, hf and below. Trusted: yes.

Morlet wavelets at two scales, averaged; nothing is learnt. The filters are those of Kymatio 0.3, J = 2 and L = 8, to
which a test compares them; Kymatio itself cannot be imported by its documented path beside SciPy 1.17.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dpfunc.errors import InvalidArgument
from dpfunc.hf.vision_language._images import opened
from dpfunc.recipes import Head, unit_rows
from dpfunc.rng import Key, torch_seed
from dpfunc.train.config import Job
from dpfunc.train.tables import Row, Table, json_values, number_of

MISSING = ("", "?", "na", "n/a", "nan", "none", "null")  # of a number, in small letters
_PER_GROUP = 3  # channels that are normalised together in each image: 27 groups of 81, as Tramer and Boneh have it
_SCALES, _ANGLES = 2, 8
STRIDE = 1 << _SCALES  # pixels between positions of the result
CHANNELS = 1 + _ANGLES * _SCALES + _ANGLES * _ANGLES * _SCALES * (_SCALES - 1) // 2  # 81 of each colour


@dataclass(frozen=True)
class TableFeatures:
    """Features of a row: of each column a vector of norm 1, so rows have a norm that is known without the data.

    Number v, clipped to [low, high], with u = (2 v - low - high) / (high - low) in [-1, 1]:

        (sin(pi u / 2), cos(pi u / 2)), and 0; or (0, 0, 1) where it is missing and `missing` is `feature`

    Category: one-hot over its values and a last slot for all others, an empty text among them.

    Guarantees:
        tests/train/test_features.py: a row is encoded alone (test_one_row_more_changes_no_other_row), with norm
        sqrt(columns) (test_rows_have_a_public_norm).

    >>> front = TableFeatures({"age": (0, 100)}, {"sex": ("f", "m")})
    >>> front.encode({"age": "50", "sex": "x"})
    tensor([0., 1., 0., 0., 1.])
    """

    numbers: Mapping[str, Sequence[float]]
    categories: Mapping[str, Sequence[str]]
    missing: str = "refuse"

    @property
    def size(self) -> int:
        """Number of features of a row: of its numbers, marks of missing ones, and a place for each category."""
        each = 3 if self.missing == "feature" else 2
        return each * len(self.numbers) + sum(len(values) + 1 for values in self.categories.values())

    def encode(self, row: Row, where: str = "a row") -> Tensor:
        """Features (size,) of the texts of a row; messages say where it is and show nothing of it."""
        found: list[float] = []
        for column, ends in self.numbers.items():
            found += self._of_number(row[column], column, ends, where)
        for column, values in self.categories.items():
            text = row[column].strip()
            found += [float(text == value) for value in values] + [float(text not in values)]
        return torch.tensor(found)

    def _of_number(self, text: str, column: str, ends: Sequence[float], where: str) -> list[float]:
        slot = [0.0] * (self.missing == "feature")
        if text.strip().lower() in MISSING:
            if slot:
                return [0.0, 0.0, 1.0]
            raise InvalidArgument(
                f"Expected a number in the column {column!r} in {where}, which has none. Leave such rows out by a "
                "public rule; or data.missing: feature gives missing numbers a feature of their own."
            )
        value = number_of(text)
        if not math.isfinite(value):
            raise InvalidArgument(
                f"Expected a finite number in the column {column!r} in {where}, got another text. Write numbers as "
                "1234.5, or name the column in data.categories, with its values."
            )
        low, high = ends
        angle = math.pi * (max(low, min(high, value)) - (low + high) / 2) / (high - low)
        return [math.sin(angle), math.cos(angle), *slot]

    def check_table(self, table: Table, name: str) -> None:
        """Check each row, and that no column has all rows outside of its public facts. Changes no feature."""
        for number, row in zip(table.numbers, table.rows, strict=True):
            self.encode(row, f"row {number} of {name}")
        for column, values in self.categories.items():
            if not any(row[column].strip() in values for row in table.rows):
                raise InvalidArgument(
                    f"Expected values of data.categories.{column} in the column {column!r} of {name}, got none of them "
                    "in any row: all are unknown. Look for other spellings or capitals, or for the wrong column."
                )
        for column, (low, high) in self.numbers.items():
            if not any(low <= number_of(row[column]) <= high for row in table.rows):
                raise InvalidArgument(
                    f"Expected numbers in the range data.numbers.{column}: [{low:g}, {high:g}] in the column "
                    f"{column!r} of {name}, got none in any row. Give its range in the unit of the table."
                )


@dataclass(frozen=True)
class ScatteringFeatures:
    """Scattering coefficients of an image, each group of channels with mean 0, and variance 1 or less if faint."""

    # tests/train/test_features.py::test_an_image_is_encoded_alone

    height: int
    width: int
    grey: bool = False

    @property
    def size(self) -> int:
        """Number of features of an image: channels at each place of the reduced grid."""
        return (1 if self.grey else 3) * CHANNELS * (self.height // STRIDE) * (self.width // STRIDE)

    def encode(self, image: Any) -> Tensor:
        """Features (size,) of a file or a picture."""
        picture = opened(image, (self.height, self.width)).convert("L" if self.grey else "RGB")
        flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).float() / 255
        found_CSHW = scattering(rearrange(flat, "(h w c) -> c h w", h=self.height, w=self.width))
        x_BSHW = rearrange(found_CSHW, "c s h w -> 1 (c s) h w")
        return F.group_norm(x_BSHW, x_BSHW.shape[1] // _PER_GROUP).flatten()


@dataclass(frozen=True)
class EncoderFeatures:
    """Pooled features of a frozen image encoder of Transformers in evaluation mode, normalised within the image."""

    model: Any = field(repr=False)
    processor: Any = field(repr=False)

    @property
    def size(self) -> int:
        """Number of features, measured on a blank image."""
        from PIL import Image

        return len(self.encode(Image.new("RGB", (64, 64))))

    @torch.no_grad()
    def encode(self, image: Any) -> Tensor:
        """Features (size,) of a file or a picture: the pooled output; without one the mean over positions."""
        pixels = self.processor(images=[opened(image, None)], return_tensors="pt")["pixel_values"]
        output: Any = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            last = output.last_hidden_state
            pooled = reduce(last, "b t d -> b d" if last.dim() == 3 else "b d h w -> b d", "mean")
        return F.layer_norm(pooled.float().flatten(), (pooled.numel(),))


def load_encoder(path: str, options: Mapping[str, Any]) -> EncoderFeatures:
    """The encoder of single images in a folder, without a head, and its processor; nothing in it is trained."""
    return EncoderFeatures(
        AutoModel.from_pretrained(path, dtype=torch.float32, **options),
        AutoImageProcessor.from_pretrained(path, **options),
    )


def scattering(image_CHW: Tensor) -> Tensor:
    """Scattering coefficients (C, 81, H / 4, W / 4) of one image.

        x * phi,  |x * psi_i| * phi,  ||x * psi_i| * psi_j| * phi  with the scale of j above that of i

    Args:
        image_CHW: pixels, H and W multiples of 4, at least 8.

    >>> scattering(torch.ones(1, 8, 8)).shape
    torch.Size([1, 81, 2, 2])
    """
    x_CHW = F.pad(image_CHW, [STRIDE] * 4, mode="reflect")
    fine, coarse = _wavelets(*x_CHW.shape[1:])
    spectrum = torch.fft.fft2(x_CHW)[:, None]
    first, second = (torch.fft.ifft2(spectrum * psi).abs() for psi in (fine, coarse))
    higher = torch.fft.ifft2(torch.fft.fft2(first)[:, :, None] * coarse).abs().flatten(1, 2)
    rows, columns = (_low_pass(side) for side in x_CHW.shape[1:])
    moduli = torch.cat([x_CHW[:, None], first, second, higher], 1)
    return (rows @ moduli @ columns.mT)[..., 1:-1, 1:-1]


@cache
def _wavelets(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Spectra (8, H, W) of the wavelets of the fine and of the coarse scale, one for each angle."""
    made = []
    for scale in range(_SCALES):
        spread, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
        angles = [(_ANGLES // 2 - 1 - number) * math.pi / _ANGLES for number in range(_ANGLES)]
        made.append(torch.stack([_morlet(height, width, spread, angle, frequency) for angle in angles]))
    return made[0], made[1]


def _morlet(height: int, width: int, spread: float, angle: float, frequency: float) -> Tensor:
    """Spectrum of `g(u) (exp(i xi u) - beta)`, with mean 0; g is a Gaussian that is 2 times as long as wide."""
    slant = 4.0 / _ANGLES
    wave = torch.zeros(height, width, dtype=torch.complex128)
    envelope = torch.zeros_like(wave)
    for shift in torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3)).tolist():  # an image has no end
        y, x = torch.meshgrid(
            torch.arange(height, dtype=torch.float64) + shift[0] * height,
            torch.arange(width, dtype=torch.float64) + shift[1] * width, indexing="ij",
        )  # fmt: skip
        along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
        gauss = torch.exp(-(along.square() + (slant * across).square()) / (2 * spread**2))
        envelope += gauss
        wave += gauss * torch.exp(1j * frequency * along)
    values = (wave - wave.sum() / envelope.sum() * envelope) * slant / (2 * math.pi * spread**2)
    return cast(Tensor, torch.fft.fft2(values).real.float())  # the imaginary part is zero


@cache
def _low_pass(side: int) -> Tensor:
    """Matrix (side / 4, side) of a Gaussian average around every fourth position; the image goes round."""
    spread = 0.8 * 2 ** (_SCALES - 1)
    gap = torch.arange(side, dtype=torch.float64) - STRIDE * torch.arange(side // STRIDE)[:, None]
    periods = side * torch.arange(-2, 3)[:, None, None]
    gauss = torch.exp(-(gap + periods).square() / (2 * spread**2)).sum(0)
    return cast(Tensor, (gauss / (math.sqrt(2 * math.pi) * spread)).float())


Front = TableFeatures | ScatteringFeatures | EncoderFeatures
_ENCODER = "encoder"  # folder beside the weights of the head
_COLUMNS = {"numbers", "categories"}


class FeatureClassifier(PreTrainedModel):  # type: ignore[misc]  # has no types
    """A `Head` on features, or a network with one hidden layer on the same rows, brought to unit variance.

    logits = W unit_rows(x);    logits = V relu(U sqrt(k + 1) unit_rows(x) + u) + v;    config.hidden is 0 for a head
    """

    base_model_prefix = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        k, hidden = config.num_features, config.hidden
        if hidden:
            self.hidden: Any = nn.Linear(k + 1, hidden)
        self.classifier: Any = nn.Linear(hidden, config.num_labels) if hidden else Head(k, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The default initial values of the layers."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Logits (B, classes) of features (B, k); with labels (B,) their mean cross-entropy too."""
        if self.config.hidden:
            features = F.relu(self.hidden(unit_rows(features) * math.sqrt(self.config.num_features + 1)))
        logits = self.classifier(features)
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def load_front(job: Job, options: Mapping[str, Any]) -> Front:
    """Reader of the features of a record, from the public facts of a job."""
    data = job.data
    if job.task == "table_classification":
        return TableFeatures(data.numbers or {}, data.categories or {}, data.missing)
    if job.model.path is not None:
        return load_encoder(job.model.path, options)
    height, width = data.image_size or (0, 0)
    return ScatteringFeatures(height, width, data.grey)


def names_of_classes(job: Job) -> dict[str, Any]:
    """The classes of a job in the configuration of a model."""
    names = dict(enumerate(job.data.classes))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


def new_model(job: Job, front: Front, key: Key) -> nn.Module:
    """The model of a job before training; new weights by a public key."""
    facts = {} if isinstance(front, EncoderFeatures) else asdict(front)
    facts |= {name: [*facts[name].items()] for name in _COLUMNS & facts.keys()}  # `config.json` sorts a mapping
    config = PreTrainedConfig(
        **names_of_classes(job), num_features=front.size, front=facts, task=job.task,
        hidden=job.model.hidden if job.strategy == "full" else 0, problem_type="single_label_classification",
    )  # fmt: skip
    with torch_seed(key):
        return FeatureClassifier(config)


def save_features(folder: Path, front: Front) -> None:
    """Write the encoder beside its head, so that the folder is whole; other facts are in `config.json`."""
    for part in (front.model, front.processor) if isinstance(front, EncoderFeatures) else ():
        part.save_pretrained(folder / _ENCODER)


def load_features(folder: Path) -> tuple[Any, Front]:
    """The trained model of a folder, and the reader of the features of a record."""
    config = PreTrainedConfig.from_pretrained(folder)
    model = FeatureClassifier.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    if not config.front:
        return model, load_encoder(str(folder / _ENCODER), {"local_files_only": True})
    if config.task != "table_classification":
        return model, ScatteringFeatures(**config.front)
    ordered = {name: _ordered(folder, name, config.front[name]) for name in _COLUMNS}
    return model, TableFeatures(**{**config.front, **ordered})


def _ordered(folder: Path, name: str, columns: Any) -> dict[str, Any]:
    """Columns in the order of training, which folders of older versions have in the job file beside them alone."""
    if not isinstance(columns, Mapping) or len(columns) < 2:
        return dict(columns)
    job = json_values(folder.absolute().parent / "job.json")
    known = job.get("filled", {}).get("data", {}).get(name)
    if known != columns:
        raise InvalidArgument(
            f"Expected the order of the columns in data.{name}, got {str(folder)!r}, which an older version wrote with "
            "sorted names: predictions would be those of other columns. Put the folder back beside the job.json of its "
            "run, which has the order."
        )
    return dict(known)
