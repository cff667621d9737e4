"""A tiny random LLaVA, its processor and a few drawn images: try a script in seconds before the real model.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.

`python -m dpfunc.hf.vision_language.tiny_llava FOLDER` writes FOLDER/llava, FOLDER/images and FOLDER/data.jsonl.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click
from torch import nn

from dpfunc._utils.validation import integer
from dpfunc.rng import insecure_key, stream, torch_seed

_WORDS = (
    "<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "what", "which", "is", "the", "a", "of", "in",
    "colour", "shape", "picture", "?", "red", "green", "blue", "yellow", "circle", "square", "yes", "no",
)  # fmt: skip
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50),
}  # fmt: skip
_SHAPES = ("circle", "square")
IMAGE_SIZE, PATCH_SIZE = 16, 8
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | upper }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def tiny_llava(width: int = 16, seed: int = 0) -> nn.Module:
    """A `LlavaForConditionalGeneration` with two layers and random weights; the width of both towers is even."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    integer("width", width, minimum=2)
    sizes = {
        "hidden_size": width, "intermediate_size": 3 * width // 2, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE),
        text_config=LlamaConfig(**sizes, vocab_size=len(_WORDS), max_position_embeddings=128, **ids),
        image_token_index=_WORDS.index("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        **ids,
    )
    with torch_seed(insecure_key(seed)):
        return cast(nn.Module, LlavaForConditionalGeneration(config).train(False))


def tiny_processor() -> Any:
    """The processor of `tiny_llava`: images by PIL and numpy, words by a list."""
    from tokenizers import Tokenizer
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {
            "type": "WordLevel", "vocab": {word: i for i, word in enumerate(_WORDS)}, "unk_token": "<unk>",
        },
    }  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(words)), pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        ),
        tokenizer=tokenizer, patch_size=PATCH_SIZE, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_TEMPLATE,
    )  # fmt: skip


def draw(colour: str, shape: str, size: int, seed: int) -> Any:
    """A shape of a colour at a random place, as a PIL image."""
    from PIL import Image, ImageDraw

    random = stream(insecure_key(seed))
    image = Image.new("RGB", (size, size), (255, 255, 255))
    radius = size // 4
    x, y = (int(v) for v in random.integers(radius, size - radius, 2))
    box = (x - radius, y - radius, x + radius, y + radius)
    pen = ImageDraw.Draw(image)
    (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=COLOURS[colour])
    return image


def write(folder: Path | str, count: int = 40, seed: int = 0) -> None:
    """Write `llava/` (model and processor), `images/*.png` and `data.jsonl` with image, question and answer."""
    root = Path(folder)
    (root / "images").mkdir(parents=True, exist_ok=True)
    model: Any = tiny_llava(seed=seed)
    model.save_pretrained(root / "llava")
    tiny_processor().save_pretrained(root / "llava")
    lines = []
    for i in range(integer("count", count, minimum=1)):
        colour, shape = list(COLOURS)[i % 4], _SHAPES[i // 4 % 2]
        draw(colour, shape, 24, seed + i).save(root / "images" / f"{i:03}.png")
        asked, answer = ("colour", colour) if i // 8 % 2 == 0 else ("shape", shape)
        row = {"image": f"images/{i:03}.png", "question": f"what is the {asked} ?", "answer": answer}
        lines.append(json.dumps(row) + "\n")
    (root / "data.jsonl").write_text("".join(lines), "utf-8")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--count", default=40, show_default=True, help="Number of images.")
def main(folder: Path, count: int) -> None:
    """Write a tiny random LLaVA, drawn images and questions about them into FOLDER."""
    write(folder, count)
    click.echo(f"{folder}: llava/, images/, data.jsonl with {count} questions")


if __name__ == "__main__":
    main()
