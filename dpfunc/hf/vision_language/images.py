"""Images and text as one batch: every sample has the same number of images and of image tokens, real or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dpfunc._utils.validation import fail, one_of, shorten, whole
from dpfunc.errors import InvalidArgument, UnsupportedModel

IGNORED = -100
MOST_PIXELS = 2**26  # 192 MiB in memory
KEYS = ("prompt", "answer", "image", "images")


@dataclass(frozen=True)
class ImageTextCollator:
    """A collate function for samples of images and text; see `image_text_collator`."""

    processor: Any = field(repr=False)
    max_length: int
    max_images: int
    padding_side: Literal["left", "right"]
    pad_to_multiple_of: int | None
    chat: bool
    tokens_per_image: int
    blank_CHW: Tensor = field(repr=False, compare=False)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of a list of samples; with no rows for the empty list."""
        encoded = [self._encode(sample) for sample in samples]
        length = self._length([len(ids) + (self.max_images - n) * self.tokens_per_image for ids, _, n in encoded])
        rows = [self._pad(ids, labels, images, length) for ids, labels, images in encoded]
        batch = {
            name: torch.tensor([row[i] for row in rows], dtype=torch.long).reshape(len(rows), length)
            for i, name in enumerate(("input_ids", "attention_mask", "labels"))
        }
        if self.max_images:
            batch["pixel_values"] = self._pixels([_images_of(sample) for sample in samples])
        return batch

    def _encode(self, sample: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
        """Ids, labels and number of images of a sample, without padding."""
        unknown = [key for key in sample if key not in KEYS]
        if unknown or not {"prompt", "answer"} <= sample.keys():
            raise InvalidArgument(
                f"Expected samples with prompt, answer, and image or images, got the keys {shorten(list(sample))}. "
                "Rename the columns of the table."
            )
        images = len(_images_of(sample))
        if images > self.max_images:
            raise fail(
                f"at most max_images={self.max_images} images a sample", "images", images,
                "max_images is public: choose it for all samples that there could be.",
            )  # fmt: skip
        prompt = self._prompt_ids(sample["prompt"], images)
        tokenizer = self.processor.tokenizer
        answer = [*tokenizer(sample["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        prompt, answer = self._shorten(prompt, answer)
        return prompt + answer, [IGNORED] * len(prompt) + answer, images

    def _prompt_ids(self, prompt: str, images: int) -> list[int]:
        token, image_id = self.processor.image_token, self.processor.image_token_id
        if self.chat:
            content = [{"type": "image"}] * images + [{"type": "text", "text": prompt}]
            prompt = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        tokenizer = self.processor.tokenizer
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = tokenizer(prompt, add_special_tokens=not begins)["input_ids"]
        if not self.chat and tokenizer.eos_token_id is not None and ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # the prompt goes on with the answer
        if ids.count(image_id) != images:
            raise InvalidArgument(
                f"Expected one {token} in the prompt for each of its {images} images, got {ids.count(image_id)}. "
                "With chat=True the template puts them in: leave them out of the prompt."
            )
        return [i for one in ids for i in ([one] * self.tokens_per_image if one == image_id else [one])]

    def _shorten(self, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Remove words, never image tokens. The answer may take half of the room; the prompt keeps its beginning, and
        its end, which asks for the answer."""
        room = self.max_length - self.max_images * self.tokens_per_image
        words = [i for i, one in enumerate(prompt) if one != self.processor.image_token_id]
        answer = answer[: max(room - len(words), room // 2)]
        kept = room - len(answer)
        dropped = set(words[1 : len(words) - kept + 1])
        return [one for i, one in enumerate(prompt) if i not in dropped], answer

    def _length(self, lengths: list[int]) -> int:
        step = self.pad_to_multiple_of
        if step is None:
            return self.max_length
        longest = max([*lengths, self.max_images * self.tokens_per_image + 1])
        return min(-(-longest // step) * step, self.max_length)

    def _pad(self, ids: list[int], labels: list[int], images: int, length: int) -> tuple[list[int], ...]:
        """Blank images take image tokens too, in the padding, where the attention mask is 0."""
        blank = [self.processor.image_token_id] * ((self.max_images - images) * self.tokens_per_image)
        fill = [self.processor.tokenizer.pad_token_id] * (length - len(ids) - len(blank))
        missing = len(blank) + len(fill)
        mask, ignored = [1] * len(ids), [IGNORED] * missing
        if self.padding_side == "right":
            return ids + blank + fill, mask + [0] * missing, labels + ignored
        return fill + blank + ids, [0] * missing + mask, ignored + labels

    def _pixels(self, images_of: list[list[Any]]) -> Tensor:
        every = [image for images in images_of for image in images]
        pixels = iter(_pixel_values(self.processor, every)) if every else iter(())
        rows = []
        for images in images_of:
            real = [next(pixels).to(self.blank_CHW.dtype) for _ in images]
            blank = [self.blank_CHW] * (self.max_images - len(real))
            rows.append(torch.stack(real + blank if self.padding_side == "right" else blank + real))
        shape = (self.max_images, *self.blank_CHW.shape)
        pixels_BICHW = torch.stack(rows) if rows else self.blank_CHW.new_zeros((0, *shape))
        return pixels_BICHW[:, 0] if self.max_images == 1 else pixels_BICHW


def image_text_collator(
    processor: Any,  # noqa: ANN401  (of Transformers)
    *,
    max_length: int,
    max_images: int = 1,
    padding_side: Literal["left", "right"] = "right",
    pad_to_multiple_of: int | None = None,
    chat: bool = True,
) -> ImageTextCollator:
    """A collate function for LLaVA: `{"prompt", "answer", "image" or "images"}` -> a batch with axis 0 = sample.

    LLaVA puts the features of all images of a batch, in order, where the image tokens of all texts are. So that this
    order never crosses from one sample to another, every sample has `max_images` images: a blank one where it has
    fewer, whose image tokens are in the padding. Blank images change nothing.

    Args:
        processor: `LlavaProcessor`, or another one that gives each image the same number of tokens.
        max_length: positions of the longest row, image tokens included. Where it is too short the prompt
            loses words after its first one, and an answer over half of the room its end; image tokens are never
            removed.
        max_images: images of a sample, 0 or more; a public number. A sample with more is an error.
        padding_side: `"right"`, or `"left"`.
        pad_to_multiple_of: None pads every batch to max_length: one shape, which engines look at once and which says
            nothing about the batch. A number pads to the next multiple of it.
        chat: put prompts into the processor's chat template, images first. False takes them as they are, with one image
            token for each image.

    Returns:
        A function of a list of samples. An image is a PIL image, an array or a path. The batch: input_ids,
        attention_mask and labels (B, T), int64, labels -100 where the position is not of the answer; pixel_values
        (B, C, H, W), or (B, I, C, H, W) with I = max_images > 1, which `flatten_images` takes apart; absent with
        max_images=0. The empty list gives a batch of no rows.

    Raises:
        InvalidArgument: a max_length that has no room for the images and two more tokens; from the function also
            samples with other keys or too many images.
        UnsupportedModel: the number of tokens of an image depends on the image.

    Guarantees:
        tests/hf/vision_language/test_strategies.py: padding and blank images change no loss
        (test_L7_padding_and_blank_images_change_nothing), no row depends on another
        (test_L7_rows_do_not_depend_on_each_other).

    >>> from dpfunc.hf.vision_language.tiny_llava import draw, tiny_processor
    >>> collate = image_text_collator(tiny_processor(), max_length=24)
    >>> batch = collate([{"image": draw("red", "circle", 24, 0), "prompt": "what is the colour ?", "answer": "red"}])
    >>> {name: tuple(value.shape) for name, value in batch.items()}
    {'input_ids': (1, 24), 'attention_mask': (1, 24), 'labels': (1, 24), 'pixel_values': (1, 3, 16, 16)}
    """
    whole("max_length", max_length, minimum=2)
    whole("max_images", max_images)
    one_of("padding_side", padding_side, ("left", "right"))
    if pad_to_multiple_of is not None:
        whole("pad_to_multiple_of", pad_to_multiple_of, minimum=1)
    if processor.tokenizer.pad_token_id is None or processor.tokenizer.eos_token_id is None:
        raise InvalidArgument("Expected a tokenizer with a padding token and an end token. Set tokenizer.pad_token.")
    tokens, blank_CHW = _tokens_of_an_image(processor) if max_images else (0, torch.zeros(3, 1, 1))
    needed = max_images * tokens + 2
    if max_length < needed:
        raise fail(
            f"max_length >= {needed}: {max_images} images of {tokens} tokens, a beginning and an answer",
            "max_length", max_length,
        )  # fmt: skip
    return ImageTextCollator(
        processor, max_length, max_images, padding_side, pad_to_multiple_of, chat, tokens, blank_CHW
    )


def flatten_images(pixel_values: Tensor) -> Tensor:
    """(B, I, C, H, W) -> (B * I, C, H, W), the images of a sample next to each other; (B, C, H, W) as it is.

    Args:
        pixel_values: from an `ImageTextCollator`.

    >>> flatten_images(torch.zeros(4, 2, 3, 8, 8)).shape
    torch.Size([8, 3, 8, 8])
    """
    return pixel_values.flatten(0, 1) if pixel_values.dim() == 5 else pixel_values


def _images_of(sample: Mapping[str, Any]) -> list[Any]:
    if "image" in sample and "images" in sample:
        raise InvalidArgument("Expected image or images in a sample, got both.")
    if sample.get("image") is not None:
        return [sample["image"]]
    return list(sample.get("images") or ())


def _pixel_values(processor: Any, images: Sequence[Any]) -> Tensor:  # noqa: ANN401
    opened = [_opened(image) for image in images]
    pixels: Tensor = processor.image_processor(images=opened, return_tensors="pt")["pixel_values"]
    return pixels


def _opened(image: Any) -> Any:  # noqa: ANN401
    if not isinstance(image, (str, Path)):
        return image.convert("RGB") if hasattr(image, "convert") else image
    with opened_image(image) as file:
        return file.convert("RGB")


@contextmanager
def opened_image(path: Path | str) -> Iterator[Any]:
    """Open an image file, of which only the header is read so far, if it has no more than `MOST_PIXELS`.

    Args:
        path: of the file.

    Raises:
        InvalidArgument: no image, damaged, or so large that a small file could take all memory. The message does not
            name the file, which can be private.

    Guarantees:
        tests/hf/vision_language/test_strategies.py::test_images_that_take_all_memory_are_refused.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                if file.width * file.height > MOST_PIXELS:
                    raise InvalidArgument(
                        f"Expected an image of at most {MOST_PIXELS} pixels, got {file.width} x {file.height}. Make it "
                        "smaller: the model sees far fewer."
                    )
                yield file
    except InvalidArgument:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidArgument(
            f"Expected an image of at most {MOST_PIXELS} pixels, got one with more. Make it smaller."
        ) from error
    except UnidentifiedImageError:
        reason = "it is of no format that is known"
    except FileNotFoundError:
        reason = "there is no such file"
    except (OSError, ValueError, SyntaxError, EOFError):  # of PIL, about a damaged file
        reason = "it is damaged"
    else:
        return
    raise InvalidArgument(f"Expected an image that can be read, got a file that cannot: {reason}.")


def _tokens_of_an_image(processor: Any) -> tuple[int, Tensor]:  # noqa: ANN401
    """Number of tokens of an image, and the pixels of a blank one.

    Raises:
        UnsupportedModel: the number depends on the image.
    """
    from PIL import Image

    seen = []
    for size in ((32, 32), (96, 32)):
        image = Image.new("RGB", size)
        out = processor(text=[processor.image_token], images=[image], return_tensors="pt")
        count = int((out["input_ids"] == processor.image_token_id).sum())
        seen.append((count, tuple(out["pixel_values"].shape)))
    if seen[0] != seen[1] or len(seen[0][1]) != 4:
        raise UnsupportedModel(
            f"Expected a processor that gives every image the same number of tokens and pixels, got {seen[0]} for a "
            f"square and {seen[1]} for a wide one. Use the fixed size of LLaVA 1.5, or resize images to one size."
        )
    return seen[0][0], torch.zeros_like(out["pixel_values"][0])
