"""Images, and text with them as one batch: each sample has as many images and image tokens, real or not.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import re
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.validation import checked, count, expect, integer, one_of, optional, set_fields, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf import chats
from dpfunc.hf.losses import IGNORED

_MOST_PIXELS = 2**26  # 192 MiB in memory
_LONGEST = 200  # side, relative to the other one; processors enlarge an image until its shorter side is long enough
_WIDE_BUT_16_BITS = ("PNG", "PPM")  # formats that Pillow reads into 32 bits, and whose numbers have 16 at most
_KEYS = ("prompt", "answer", "image", "images")
_MARK = "<image>"  # in the texts of LLaVA's chats
_ONE_SIZE = (
    "Fit all images into one size: image_text_collator(..., image_size=(height, width)), a public choice; or take a "
    "processor with a fixed size, as that of LLaVA 1.5."
)


class _OneImage(NamedTuple):
    """Parts of an input that each image adds, the same number for every image."""

    tokens: tuple[int, ...] = ()  # what stands for an image in a text
    tensors: Mapping[str, Tensor] = MappingProxyType({})  # of a blank image, as the image processor gives them
    nested: bool = False  # the image processor makes one row of a list of images, (1, I, ...), not a row of each
    marks: tuple[str, ...] = ()  # inputs of the model that are 1 at image tokens


def _height_and_width(name: str, value: Any) -> tuple[int, int]:
    expect(isinstance(value, (tuple, list)) and len(value) == 2, f"{name} to be (height, width)", name, value)
    return integer(name, value[0], minimum=1), integer(name, value[1], minimum=1)


@dataclass(frozen=True)
@checked({
    "max_length": partial(integer, minimum=2),
    "max_images": integer,
    "padding_side": partial(one_of, allowed=("left", "right")),
    "pad_to_multiple_of": optional(count),
    "image_size": optional(_height_and_width),
})  # fmt: skip
class ImageTextCollator:
    """A collate function for samples of images and text; see `image_text_collator`."""

    processor: Any = field(repr=False)
    max_length: int
    max_images: int
    padding_side: Literal["left", "right"]
    pad_to_multiple_of: int | None
    chat: bool
    image_size: tuple[int, int] | None
    image: _OneImage = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.processor.tokenizer.pad_token_id is None or self.processor.tokenizer.eos_token_id is None:
            raise InvalidArgument(
                "Expected a tokenizer with a padding token and an end token. Name two of its tokens: "
                "tokenizer.pad_token = '...', tokenizer.eos_token = '...'."
            )
        set_fields(self, {"image": _one_image(self.processor, self.image_size) if self.max_images else _OneImage()})
        needed = self.max_images * self.tokens_per_image + 2
        expect(
            self.max_length >= needed,
            f"max_length >= {needed}: {self.max_images} images of {self.tokens_per_image} tokens, a beginning and an "
            "answer",
            "max_length", self.max_length,
        )  # fmt: skip

    @property
    def tokens_per_image(self) -> int:
        """Number of positions that an image takes."""
        return len(self.image.tokens)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of a list of samples; with no rows for the empty list."""
        encoded = [self._encode(sample) for sample in samples]
        length = self.max_length
        if (step := self.pad_to_multiple_of) is not None:
            lengths = [len(ids) + (self.max_images - n) * self.tokens_per_image for ids, _, n in encoded]
            longest = max([*lengths, self.max_images * self.tokens_per_image + 1])
            length = min(-(-longest // step) * step, length)
        rows = [self._pad(ids, labels, images, length) for ids, labels, images in encoded]
        batch = {
            name: torch.tensor([row[i] for row in rows], dtype=torch.long).reshape(len(rows), length)
            for i, name in enumerate(("input_ids", "attention_mask", "labels"))
        }
        if self.max_images:
            batch |= dict.fromkeys(self.image.marks, (batch["input_ids"] == self.processor.image_token_id).long())
            batch |= self._tensors([_images_of(sample) for sample in samples])
        return batch

    def _encode(self, sample: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
        """Ids, labels and number of images of a sample, without padding; its images stay, however long it is."""
        images, image_id = len(_images_of(sample)), self.processor.image_token_id
        expect(
            images <= self.max_images, f"at most max_images={self.max_images} images a sample", "images", images,
            "max_images is public: choose it for all samples that there could be.",
        )  # fmt: skip
        room = self.max_length - self.max_images * self.tokens_per_image
        if "messages" in sample:  # by the rule of `dpfunc.hf.chat_tokens`
            ids, labels = chats.cut(*messages_with_images(self.processor, sample), room, (image_id,))
        else:
            ids, labels = self._prompt_and_answer(sample, images, room)
        groups = [self.image.tokens if one == image_id else (one,) for one in ids]
        labels = [label for label, group in zip(labels, groups, strict=True) for _ in group]
        return [one for group in groups for one in group], labels, images

    def _prompt_and_answer(
        self, sample: Mapping[str, Any], images: int, room: int
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Ids with one token for each image, and labels; without the middle of a long prompt, and the end of an answer
        that takes over half of the room."""
        if not {"prompt", "answer"} <= sample.keys() <= {*_KEYS}:
            raise InvalidArgument(
                "Expected samples with prompt, answer, and image or images, got the keys "
                f"{shorten(list(sample))}. Rename the columns of the table."
            )
        prompt, tokenizer = self._prompt_ids(sample["prompt"], images), self.processor.tokenizer
        ids = tokenizer(sample["answer"], add_special_tokens=False, verbose=False)["input_ids"]  # silent about lengths
        answer = [*ids, tokenizer.eos_token_id]
        if self.processor.image_token_id in answer:
            raise InvalidArgument(
                f"Expected an answer without {self.processor.image_token}, which stands for an image. Take it out."
            )
        words = [i for i, one in enumerate(prompt) if one != self.processor.image_token_id]
        answer = answer[: max(room - len(words), room // 2)]
        dropped = {*words[1 : 1 + max(0, len(words) + len(answer) - room)]}
        prompt = [one for i, one in enumerate(prompt) if i not in dropped]
        return prompt + answer, [IGNORED] * len(prompt) + answer

    def _prompt_ids(self, prompt: str, images: int) -> list[int]:
        token, image_id = self.processor.image_token, self.processor.image_token_id
        if self.chat:
            user = {"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": prompt}]}
            template = chats.of_one_day(self.processor.chat_template)
            prompt = self.processor.apply_chat_template([user], chat_template=template, add_generation_prompt=True)
        tokenizer = self.processor.tokenizer
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = tokenizer(prompt, add_special_tokens=not begins, verbose=False)["input_ids"]
        if not self.chat and ids[-1:] == [tokenizer.eos_token_id]:
            ids = ids[:-1]  # the prompt goes on with the answer
        if ids.count(image_id) != images:
            raise InvalidArgument(
                f"Expected one {token} in the prompt for each of its {images} images, got {ids.count(image_id)}. "
                "With chat=True the template puts them in: leave them out of the prompt."
            )
        return list(ids)

    def _pad(self, ids: list[int], labels: list[int], images: int, length: int) -> tuple[list[int], ...]:
        """Ids, attention mask and labels of a row. Blank images take image tokens too, in the padding."""
        blank = list(self.image.tokens) * (self.max_images - images)
        padding = [self.processor.tokenizer.pad_token_id] * (length - len(ids) - len(blank))
        missing = len(blank) + len(padding)
        mask, ignored = [1] * len(ids), [IGNORED] * missing
        return (
            (ids + blank + padding, mask + [0] * missing, labels + ignored)
            if self.padding_side == "right"
            else (padding + blank + ids, [0] * missing + mask, ignored + labels)
        )

    def _tensors(self, images_of: list[list[Any]]) -> dict[str, Tensor]:
        """Tensors of all images of a sample one after another on axis 1."""
        rows, batch = [], {}
        for images in images_of:
            real = [self._tensors_of(image) for image in images]
            blanks = [dict(self.image.tensors)] * (self.max_images - len(real))
            rows.append(real + blanks if self.padding_side == "right" else blanks + real)
        for name, blank in self.image.tensors.items():
            shape = (self.max_images * len(blank), *blank.shape[1:])
            stacked = [torch.cat([each[name] for each in row]) for row in rows]
            values = torch.stack(stacked) if rows else blank.new_zeros((0, *shape))
            batch[name] = values[:, 0] if shape[0] == 1 and not self.image.nested else values
        return batch

    def _tensors_of(self, image: Any) -> dict[str, Tensor]:
        """Tensors of one image, with those of a blank one as the example."""
        found = _processed(self.processor, [opened(image, self.image_size)])
        tensors = {}
        for name, blank in self.image.tensors.items():
            value = found[name][0] if self.image.nested else found[name]
            if value.shape != blank.shape:
                raise UnsupportedModel(
                    f"Expected a processor that gives every image the same shape, got {name} of {tuple(blank.shape)} "
                    f"and of {tuple(value.shape)}. {_ONE_SIZE}"
                )
            tensors[name] = value.to(blank.dtype)
        return tensors


def image_text_collator(
    processor: Any, *, max_length: int, max_images: int = 1, padding_side: Literal["left", "right"] = "right",
    pad_to_multiple_of: int | None = None, chat: bool = True, image_size: tuple[int, int] | None = None,
) -> ImageTextCollator:  # fmt: skip
    """A collate function for images in text: `{"prompt", "answer", "image" or "images"}` -> a batch, axis 0 = sample.

    LLaVA, and most models like it, put the features of all images of a batch, in order, where the image tokens of all
    texts are. So that this order never crosses from one sample to another, every sample has `max_images` images: a
    blank one where it has fewer, whose image tokens are in the padding. Blank images change nothing.

    Args:
        processor: of LLaVA 1.5, or another one that gives each image the same number of tokens; with image_size of
            LLaVA-NeXT, Qwen2-VL, Qwen2.5-VL, Idefics3, SmolVLM.
        max_length: positions of the longest row, image tokens included. Where it is too short the prompt loses words
            after its first one, and an answer over half of the room its end.
        max_images: images of a sample, 0 or more; a public number. A sample with more is an error.
        padding_side: `"right"`, or `"left"`. pad_to_multiple_of: None pads every batch to max_length.
        chat: put prompts into the processor's chat template, images first. False takes them as they are, with one image
            token for each image.
        image_size: height and width, a public choice into which every image is fitted, with a margin, before the
            processor sees it: for processors that give images of different sizes different numbers of tokens.

    Returns:
        A function of a list of samples, or of none. An image is a PIL image, an array or a path. The batch: input_ids,
        attention_mask and labels (B, T), int64, labels -100 where the position is not of the answer; pixel_values
        (B, C, H, W), or (B, I, C, H, W) with I = max_images > 1, and what else the processor says about images, with
        samples on axis 0. The losses `image_text_loss` and `"vqa"` give them to the model as it takes them.

    Raises:
        InvalidArgument: no room for the images and two more tokens; samples with other keys or too many images.
        UnsupportedModel: the number of tokens of an image depends on the image, and there is no image_size.

    Guarantees:
        padding, blank images and other rows change no loss
        (tests/hf/vision_language/test_images.py::test_a_row_is_what_the_model_makes_of_the_sample_alone).

    >>> from dpfunc.hf.vision_language.tiny_llava import draw, tiny_processor
    >>> collate = image_text_collator(tiny_processor(), max_length=24)
    >>> batch = collate([{"image": draw("red", "circle", 24, 0), "prompt": "what is the colour ?", "answer": "red"}])
    >>> {name: tuple(value.shape) for name, value in batch.items()}
    {'input_ids': (1, 24), 'attention_mask': (1, 24), 'labels': (1, 24), 'pixel_values': (1, 3, 16, 16)}
    """
    return ImageTextCollator(
        processor, max_length, max_images, padding_side, pad_to_multiple_of, chat, image_size
    )  # fmt: skip


def _one_image(processor: Any, size: tuple[int, int] | None) -> _OneImage:
    """Tokens and tensors of a blank image, which is grey: models take images of zeros for none."""
    from PIL import Image

    square, wide = (opened(Image.new("RGB", shape, (128, 128, 128)), size) for shape in ((32, 32), (96, 32)))
    found, other = (_look(processor, [picture]) for picture in (square, wide))
    shapes = [(len(e.tokens), {name: tuple(value.shape) for name, value in e.tensors.items()}) for e in (found, other)]
    if shapes[0] != shapes[1] or not found.tokens or "pixel_values" not in found.tensors:
        raise UnsupportedModel(
            f"Expected a processor that gives every image the same number of tokens and pixels, got {shapes[0]} for a "
            f"square and {shapes[1]} for a wide one. {_ONE_SIZE}"
        )
    if len(_processed(processor, [square, square])["pixel_values"]) != 1:
        return found
    return found._replace(tensors={name: value[0] for name, value in found.tensors.items()}, nested=True)


def _look(processor: Any, images: list[Any]) -> _OneImage:
    token, image_id = processor.image_token, processor.image_token_id
    plain = list(processor.tokenizer(token)["input_ids"])
    out = processor(text=[token], images=images, return_tensors="pt")
    ids = out["input_ids"][0]
    if plain.count(image_id) != 1:
        return _OneImage()
    first = plain.index(image_id)
    tokens = tuple(ids.tolist()[first : len(ids) - (len(plain) - 1 - first)])
    where = (ids == image_id).tolist()
    types = {name: out[name] for name in ("token_type_ids", "mm_token_type_ids") if name in out}
    marks = tuple(name for name, values in types.items() if torch.as_tensor(values[0]).bool().tolist() == where)
    return _OneImage(tokens, _processed(processor, images), marks=marks)


def _processed(processor: Any, images: list[Any]) -> dict[str, Tensor]:
    """Tensors that the image processor makes of a list of pictures or arrays."""
    found = processor.image_processor(images=images, return_tensors="pt")
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and value.dim()}


def messages_with_images(processor: Any, sample: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Ids of a chat with one token for each image, and for each id if the assistant says it.

    Turns have their images as parts, or as `<image>` in their texts; the paths are in the sample.
    """
    images, image_id = len(_images_of(sample)), processor.image_token_id
    marks = {_MARK, processor.image_token} if images else set()
    turns = [{**turn, "content": _parts(turn["content"], marks)} for turn in sample["messages"]]
    ids, learnt = chats.encode(processor.tokenizer, turns, template=processor.chat_template)
    if ids.count(image_id) != images:
        raise InvalidArgument(
            f"Expected a part of a turn, or {_MARK} in its text, for each of the {images} images of a chat, got "
            f"{ids.count(image_id)}."
        )
    return ids, learnt


def _parts(content: Any, marks: Collection[str]) -> list[dict[str, str]]:
    """A content as parts: texts, and images without their paths."""
    if not isinstance(content, str):
        return [{"type": "image"} if part["type"] == "image" else part for part in content]
    between = "|".join(map(re.escape, marks))
    pieces = re.split(f"({between})", content) if marks else [content]
    texts = [piece.strip() if len(pieces) > 1 else piece for piece in pieces]
    return [{"type": "image"} if text in marks else {"type": "text", "text": text} for text in texts if text]


def _images_of(sample: Mapping[str, Any]) -> list[Any]:
    if "image" in sample and "images" in sample:
        raise InvalidArgument("Expected image or images in a sample, got both.")
    if "messages" in sample and not {"image", "images"} & sample.keys():
        return chats.images(sample["messages"])
    return list(sample.get("images") or ()) if sample.get("image") is None else [sample["image"]]


def opened(image: Any, size: tuple[int, int] | None) -> Any:
    """A picture or an array, read from a file if it is a path, and fitted into a height and width, if given.

    Pictures become 8 bits of red, green and blue: see `_in_colour`.
    """
    if isinstance(image, (str, Path)):
        with _opened_image(image) as file:
            image = _in_colour(file)
    elif hasattr(image, "convert"):
        image = _in_colour(image)
    if size is None:
        return image
    import numpy as np
    from PIL import Image, ImageOps

    if not hasattr(image, "convert"):
        values = np.asarray(image)
        if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (3, 4):
            raise InvalidArgument(
                "Expected an image of whole numbers 0 to 255 with the colours on the last axis, to fit it into a size, "
                f"got {values.dtype} of {values.shape}. Give PIL images, or files."
            )
        image = Image.fromarray(values).convert("RGB")
    return ImageOps.pad(image, size[::-1])


def _in_colour(picture: Any) -> Any:
    """A picture as people see it, in 8 bits of red, green and blue, by one rule for each kind of pixel.

    It is turned as its EXIF orientation says. Whole numbers of 16 bits are divided by 257, and floats from 0 to 1 are
    multiplied by 255: Pillow itself would make all of them white, or black. What is transparent is laid over white.
    Palettes, CMYK and grey are converted as Pillow does. Of several frames the first is taken.
    """
    from PIL import Image, ImageOps

    picture = _eight_bits(ImageOps.exif_transpose(picture), picture.format)
    if picture.has_transparency_data:
        over = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return picture.convert("RGB")


def _eight_bits(picture: Any, written_as: str | None) -> Any:
    """A picture of 16 bits or of floats, from a file of this format, in 8 bits of grey; any other as it is."""
    import numpy as np
    from PIL import Image

    if picture.mode != "F" and not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture, dtype=np.float64)
    top = 1.0 if picture.mode == "F" else 65535.0
    wide = picture.mode == "I" and written_as not in _WIDE_BUT_16_BITS
    if wide or not ((values >= 0) & (values <= top)).all():
        raise InvalidArgument(
            "Expected an image with pixels of 8 bits, of 16 bits, or floats from 0 to 1, got one with others, of which "
            "nobody can tell how bright they are. Save it as a PNG of 8 or 16 bits."
        )
    return Image.fromarray(np.round(values * (255 / top)).astype(np.uint8))


def is_image(path: Path) -> bool:
    """True if the suffix of a file is one that Pillow reads.

    >>> [name for name in ("a.png", "a.WEBP", "a.tif", "a.txt", "a") if is_image(Path(name))]
    ['a.png', 'a.WEBP', 'a.tif']
    """
    from PIL import Image

    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


def check_readable(path: Path | str) -> None:
    """Check that an image can be read as `opened` reads it; a JPEG is decoded in a small size, which is faster."""
    with _opened_image(path) as file:
        file.draft("RGB", (1, 1))
        _in_colour(file)


@contextmanager
def _opened_image(path: Path | str) -> Iterator[Any]:
    """Open an image file, of which only the header is read so far; messages do not name it, which can be private.

    (tests/hf/vision_language/test_images.py::test_images_that_take_all_memory_are_refused)
    """
    from PIL import Image, UnidentifiedImageError

    large, missing = f"Expected an image of at most {_MOST_PIXELS} pixels, got", "there is no such file"
    known: dict[type, str] = {UnidentifiedImageError: "it is of no format that is known", FileNotFoundError: missing}
    try:
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path) as file,
        ):
            if file.width * file.height > _MOST_PIXELS:
                raise InvalidArgument(f"{large} {file.width} x {file.height}. Make it smaller.")
            if max(file.size) > _LONGEST * min(file.size):
                raise InvalidArgument(
                    f"Expected an image whose longer side is at most {_LONGEST} times the shorter one, got "
                    f"{file.width} x {file.height}: enlarged for a model it would take all memory. Cut it, or leave "
                    "the record out."
                )
            yield file
            return
    except InvalidArgument:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidArgument(f"{large} one with more. Make it smaller.") from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:  # of PIL, about a damaged file
        reason = known.get(type(error), "it is damaged")
    raise InvalidArgument(f"Expected an image that can be read, got a file that cannot: {reason}.")
