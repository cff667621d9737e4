"""Images from files and bytes: none takes all memory, and each is read to its end."""

from __future__ import annotations

import struct
import zlib

import pytest

from dpfunc.errors import InvalidArgument
from dpfunc.hf.vision_language._images import image_text_collator
from dpfunc.hf.vision_language.tiny_llava import draw, tiny_processor
from dpfunc.train._dataset import _check_image


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def large_png(width, height):
    """A valid PNG of very many pixels, and few bytes."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + -(-width // 8))) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


IMAGES = {
    "large": (lambda: large_png(9000, 9000), "at most 67108864 pixels, got 9000 x 9000"),
    "larger, PIL would warn": (lambda: large_png(10_000, 10_000), "at most 67108864 pixels, got one with more"),
    "so large that PIL refuses": (lambda: large_png(20_000, 20_000), "at most 67108864 pixels, got one with more"),
    "text": (lambda: b"my secret", "it is of no format that is known"),
    "nothing": (lambda: b"", "it is of no format that is known"),
    "half": (lambda: large_png(64, 4000)[:60], "it is damaged"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_that_take_all_memory_are_refused(processor, tmp_path, name):
    """And those that cannot be read: by the collator, and before training, which must not end when it draws one."""
    make, message = IMAGES[name]
    path = tmp_path / "secret.png"
    path.write_bytes(make())
    collate = image_text_collator(processor, max_length=16)
    with pytest.raises(InvalidArgument, match=message) as caught:
        collate([{"prompt": "colour ?", "answer": "red", "image": path}])
    assert "secret" not in str(caught.value)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"The image of row 7 of data.jsonl cannot be used. .*{message}"):
            _check_image(path, "row 7 of data.jsonl")


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
