"""Tokens in a text, and tensors, that a processor of Transformers makes of one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfunc.errors import UnsupportedModel
from dpfunc.hf.vision_language.reading import opened

ONE_SIZE = (
    "Fit all images into one size: image_text_collator(..., image_size=(height, width)), a public choice; or take a "
    "processor with a fixed size, as that of LLaVA 1.5."
)
"""Advice where an image has other tokens or tensors than another one."""


@dataclass(frozen=True)
class OneImage:
    """Tokens and tensors of one image, of which every image has as many.

    Args:
        tokens: what stands for an image in a text. tensors: of a blank image, as the image processor gives them.
        nested: the image processor makes one row of a list of images, (1, I, ...); otherwise a row of each, (I, ...).
        marks: inputs of the model that are 1 at image tokens.
    """

    tokens: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    nested: bool
    marks: tuple[str, ...]


def one_image(processor: Any, size: tuple[int, int] | None) -> OneImage:
    """Tokens and tensors of a blank image, which is grey: models take images of zeros for none.

    Args:
        processor: with `tokenizer` and `image_processor`. size: height and width of all images, or None.

    Raises:
        UnsupportedModel: they depend on the image.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_processor
    >>> len(one_image(tiny_processor(), None).tokens)
    4
    """
    from PIL import Image

    square, wide = (opened(Image.new("RGB", shape, (128, 128, 128)), size) for shape in ((32, 32), (96, 32)))
    seen = [_look(processor, [picture]) for picture in (square, wide)]
    shapes = [(len(tokens), {name: tuple(value.shape) for name, value in out.items()}) for tokens, out, _ in seen]
    if shapes[0] != shapes[1] or not seen[0][0] or "pixel_values" not in seen[0][1]:
        raise UnsupportedModel(
            f"Expected a processor that gives every image the same number of tokens and pixels, got {shapes[0]} for a "
            f"square and {shapes[1]} for a wide one. {ONE_SIZE}"
        )
    tokens, tensors, marks = seen[0]
    nested = len(processed(processor, [square, square])["pixel_values"]) == 1
    return OneImage(tokens, {name: value[0] if nested else value for name, value in tensors.items()}, nested, marks)


def _look(processor: Any, images: list[Any]) -> tuple[tuple[int, ...], dict[str, Tensor], tuple[str, ...]]:
    """Tokens of one image, its tensors, and the inputs that are 1 at image tokens."""
    token, image_id = processor.image_token, processor.image_token_id
    plain = list(processor.tokenizer(token)["input_ids"])
    out = processor(text=[token], images=images, return_tensors="pt")
    ids = out["input_ids"][0]
    if plain.count(image_id) != 1:
        return (), {}, ()
    first = plain.index(image_id)
    tokens = tuple(ids.tolist()[first : len(ids) - (len(plain) - 1 - first)])
    where = (ids == image_id).tolist()
    types = {name: out[name] for name in ("token_type_ids", "mm_token_type_ids") if name in out}
    marks = tuple(name for name, values in types.items() if torch.as_tensor(values[0]).bool().tolist() == where)
    return tokens, processed(processor, images), marks


def processed(processor: Any, images: list[Any]) -> dict[str, Tensor]:
    """Tensors that the image processor makes of a list of images.

    Args:
        processor: see `one_image`. images: pictures or arrays.
    """
    found = processor.image_processor(images=images, return_tensors="pt")
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and value.dim()}
