"""Images in folders named by their classes, and features of one image: of a scattering transform, or an encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn import functional as F

from dpfunc.errors import InvalidArgument
from dpfunc.hf.vision_language._images import opened
from dpfunc.train._scattering import CHANNELS, STRIDE, scattering
from dpfunc.train.tables import Row, Table

_SUFFIXES = (".png", ".jpg", ".jpeg")
_PER_GROUP = 3  # channels that are normalised together in each image: 27 groups of 81, as Tramer and Boneh have it


@dataclass(frozen=True)
class ScatteringFeatures:
    """Scattering coefficients of an image, each group of channels with mean 0 and variance 1, less where it is faint.

    Guarantees:
        tests/train/test_image_features.py::test_an_image_is_encoded_alone.
    """

    height: int
    width: int
    grey: bool = False

    @property
    def size(self) -> int:
        """Number of features."""
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
        """Number of features, those of a blank image."""
        from PIL import Image

        return len(self.encode(Image.new("RGB", (64, 64))))

    def encode(self, image: Any) -> Tensor:
        """Features (size,) of a file or a picture: the pooled output; without one the mean over positions."""
        pixels = self.processor(images=[opened(image, None)], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            output: Any = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            last = output.last_hidden_state
            pooled = reduce(last, "b t d -> b d" if last.dim() == 3 else "b d h w -> b d", "mean")
        return F.layer_norm(pooled.float().flatten(), (pooled.numel(),))


def load_encoder(path: str, options: Mapping[str, Any]) -> EncoderFeatures:
    """The encoder of single images in a folder, without a head, and its processor; nothing in it is trained."""
    from transformers import AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32, **options)
    return EncoderFeatures(model, AutoImageProcessor.from_pretrained(path, **options))


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def read_images(folder: Path, labels: Sequence[str], label_column: str, *, deduplicate: bool) -> Table:
    """The images of `folder/class/*.png|jpg`: a row has the path below the folder, a digest of the file, the class.

    Files are numbered class by class, in the order of their names; equal files of one class are duplicates.
    """
    there = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    lacking, others = [label for label in labels if label not in there], there - {*labels}
    if lacking or others:
        raise InvalidArgument(
            f"Expected a folder with a folder for each of data.labels ({', '.join(labels)}), and no other, got "
            f"data.train={str(folder)!r} without {', '.join(lacking) or 'none of them'}, with {len(others)} others. "
            "Classes are public; one that has no image has an empty folder."
        )
    rows: dict[int, Row] = {}
    for label in labels:
        for path in image_files(folder / label):
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            rows[len(rows) + 1] = {"image": path.relative_to(folder).as_posix(), "digest": digest, label_column: label}
    if not rows:
        raise InvalidArgument(f"Expected images (.png, .jpg) in the folders of {str(folder)!r}, got none.")
    first = {(row["digest"], row[label_column]): number for number, row in reversed(rows.items())}
    kept = sorted(first.values()) if deduplicate else [*rows]
    return Table(tuple(rows[number] for number in kept), tuple(kept), len(rows) - len(kept))
