"""Families of vision-language models with their own processors: one size for all images, rows of samples on axis 0."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
import torch
from image_text_models import FAMILIES, family, samples
from models import Case
from trainer_cases import PRIVACY, training_arguments
from zoo.parity import engine_that_equals_the_loop, nonzero_b, truth_of, without_gradient

import dpfunc
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf._facts import Facts
from dpfunc.hf.tasks import infer_task, make_loss_fn
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.hf.vision_language._images import image_text_collator
from dpfunc.hf.vision_language._strategies import image_text_loss, language_layers, prepare, strategy
from dpfunc.hf.vision_language.tiny_llava import draw, tiny_processor
from dpfunc.rng import insecure_key
from dpfunc.train._records import _check_image

QWEN = ("Qwen2-VL", "Qwen2.5-VL")


def collator(name, images, length=60, **options):
    model, processor, size = family(name)
    return model, image_text_collator(
        processor, max_length=length, max_images=images, chat=False, image_size=size, **options
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_all_parameters_and_one_image_each(name):
    model, collate = collator(name, 1)
    forward, params = functionalize(model)
    batch = collate(samples(name, (1, 1, 1, 1)))
    assert {len(value) for value in batch.values()} == {4}
    assert infer_task(model) == "vqa"
    assert engine_that_equals_the_loop(Case(make_loss_fn(forward, "vqa"), params, batch)) == (
        "groups" if name in QWEN else "one pass"
    )


SIDES = ("left", "right", "left", "right", "left", "right")


@pytest.mark.parametrize(("name", "side"), [*zip(FAMILIES, SIDES, strict=True)])
def test_adapters_and_several_images_or_none(name, side):
    """Rows with blank images of Qwen2-VL have other positions than rows without, so they are grouped."""
    model, collate = collator(name, 2, padding_side=side)
    lora = strategy(model, "lora", key=insecure_key(0), rank=2, alpha=4.0)
    assert all(target in {layer + "." + end for layer in language_layers(model) for end in ("lora_A", "lora_B")}
               for target in lora.params)  # fmt: skip
    case = Case(
        make_loss_fn(lora.forward, image_text_loss), nonzero_b(lora.params), collate(samples(name, (1, 2, 0, 2)))
    )
    assert engine_that_equals_the_loop(case) == ("groups" if name in QWEN else "one pass")
    assert not without_gradient(truth_of(case))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_what_the_model_makes_of_the_sample_alone(name, side):
    """Neither blank images nor padding nor the images of others change a loss; labels are given to the model here."""
    counts = (1, 2, 0, 2)
    model, collate = collator(name, 2, padding_side=side)
    forward, params = functionalize(model)
    with torch.no_grad():
        found = make_loss_fn(forward, image_text_loss)(params, collate(samples(name, counts)))
        torch.testing.assert_close(make_loss_fn(forward, "vqa")(params, collate(samples(name, counts))), found)
        for loss, sample, count in zip(found, samples(name, counts), counts, strict=True):
            _, own = collator(name, count, pad_to_multiple_of=1)
            alone = model(**Facts().flatten_images(own([sample]))).loss
            torch.testing.assert_close(loss, alone, rtol=1e-4, atol=1e-5)
        batch = collate(samples(name, counts))
        if batch.pop("pixel_attention_mask", None) is not None:  # a collator of the user's own may leave it out
            assert make_loss_fn(forward, "vqa")(params, batch).shape == (4,)


def test_an_image_of_another_shape_is_refused():
    """A processor that gives images of some size another number of pixels than those that were tried."""
    for name in [name for name in FAMILIES if name != "LLaVA 1.5"]:
        with pytest.raises(UnsupportedModel, match="image_size"):
            image_text_collator(family(name)[1], max_length=60, chat=False)
    for size in (3, (4,), (0, 4), "ab", (1.5, 2)):
        with pytest.raises(InvalidArgument, match="image_size"):
            image_text_collator(family("LLaVA-NeXT")[1], max_length=60, image_size=size)
    _, collate = collator("SmolVLM", 1)
    larger = {"pixel_values": torch.zeros(1, 1, 3, 32, 32), "pixel_attention_mask": torch.ones(1, 1, 32, 32)}
    collate.processor.image_processor = lambda images, return_tensors: larger
    with pytest.raises(UnsupportedModel, match="every image the same shape, got pixel_values"):
        collate(samples("SmolVLM", (1,)))


def test_arrays_are_fitted_or_refused():
    _, collate = collator("LLaVA-NeXT", 1)
    sample = samples("LLaVA-NeXT", (1,))[0]
    pixels = torch.zeros(24, 30, 3, dtype=torch.uint8)
    assert collate([{**sample, "images": [pixels.numpy()]}])["pixel_values"].shape == (1, 3, 3, 16, 16)
    for wrong in (pixels.float(), pixels.permute(2, 0, 1), pixels[..., 0]):
        with pytest.raises(InvalidArgument, match="colours on the last axis"):
            collate([{**sample, "images": [wrong.numpy()]}])


def test_images_in_one_tensor_for_all_samples_are_refused():
    """As Qwen's processor makes them: rows of pixels that no axis attributes to samples."""
    model, collate = collator("Qwen2-VL", 1)
    batch = Facts().flatten_images(collate(samples("Qwen2-VL", (1, 1))))
    forward, params = functionalize(model)
    with pytest.raises(InvalidArgument, match=r"pixel_values.*image_text_collator"):
        dpfunc.clipped.clipped_grad(make_loss_fn(forward, "vqa"), params, batch, dpfunc.clipping.Flat(1.0))


def test_private_training(tmp_path):
    """Fewer images than max_images, an odd number of records, drawn batches of any size."""
    model, collate = collator("SmolVLM", 2)
    before = {at: value.clone() for at, value in model.named_parameters()}
    trainer = DPTrainer(
        prepare(model, "projector"),
        training_arguments(tmp_path, max_steps=2, remove_unused_columns=False),
        privacy=PRIVACY, loss=image_text_loss, data_collator=collate, train_dataset=samples("SmolVLM", (1, 2, 0) * 9),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    changed = [at for at, value in model.named_parameters() if not torch.equal(value, before[at])]
    assert changed
    assert all("connector" in at for at in changed)


# Images from files and bytes: none takes all memory, and each is read to its end


def large_png(width, height):
    """A valid PNG of very many pixels, and few bytes."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + -(-width // 8))) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def with_exif(content):
    """A picture with this in the place where it says how it is turned."""
    file = io.BytesIO()
    draw("red", "circle", 20, 0).save(file, "png", exif=content)
    return file.getvalue()


IMAGES = {
    "large": (lambda: large_png(9000, 9000), "at most 67108864 pixels, got 9000 x 9000"),
    "larger, PIL would warn": (lambda: large_png(10_000, 10_000), "at most 67108864 pixels, got one with more"),
    "so large that PIL refuses": (lambda: large_png(20_000, 20_000), "at most 67108864 pixels, got one with more"),
    "a line": (lambda: large_png(1, 201), "at most 200 times the shorter one, got 1 x 201: enlarged"),
    "text": (lambda: b"my secret", "it is of no format that is known"),
    "nothing": (lambda: b"", "it is of no format that is known"),
    "half": (lambda: large_png(64, 4000)[:60], "it is damaged"),
    "no EXIF in the place of EXIF": (lambda: with_exif(b"Exif\0\0nonsense"), "it is damaged"),
    "a part of EXIF": (lambda: with_exif(b"Exif\0\0II*\0"), "it is damaged"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_that_take_all_memory_are_refused(tmp_path, name):
    """And those that cannot be read: by the collator, and before training, which must not end when it draws one."""
    make, message = IMAGES[name]
    path = tmp_path / "secret.png"
    path.write_bytes(make())
    collate = image_text_collator(tiny_processor(), max_length=16)
    with pytest.raises(InvalidArgument, match=message) as caught:
        collate([{"prompt": "colour ?", "answer": "red", "image": path}])
    assert "secret" not in str(caught.value)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"The image of row 7 of data.jsonl cannot be used. .*{message}"):
            _check_image(path, "row 7 of data.jsonl")


def test_a_long_image_is_no_line(tmp_path):
    large = tmp_path / "image.png"
    large.write_bytes(large_png(400, 2))
    _check_image(large, "row 1")
    batch = image_text_collator(tiny_processor(), max_length=16)([{"prompt": "?", "answer": "red", "image": large}])
    assert batch["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_an_image_is_read_to_its_end(tmp_path, kind):
    """Its header is there long before its end; a file that was repaired is read again."""
    path = tmp_path / "image"
    draw("red", "circle", 200, 0).save(path, kind)
    content = path.read_bytes()
    for kept in (len(content) - 64, 3 * len(content) // 4):
        path.write_bytes(content[:kept])
        with pytest.raises(InvalidArgument, match="cannot be used. .*it is damaged"):
            _check_image(path, "row 1")
    path.write_bytes(content)
    _check_image(path, "row 1")
