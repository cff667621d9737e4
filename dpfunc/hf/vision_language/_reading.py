"""Images of a data set: files, pictures and arrays, read and fitted into one size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpfunc.errors import InvalidArgument

_MOST_PIXELS = 2**26  # 192 MiB in memory


def opened(image: Any, size: tuple[int, int] | None) -> Any:
    """A picture or an array, read from a file if it is a path.

    Args:
        image: a path, a PIL image or an array. size: height and width to fit it into, or None.

    >>> from PIL import Image
    >>> opened(Image.new("RGB", (4, 8)), (16, 24)).size
    (24, 16)
    """
    if isinstance(image, (str, Path)):
        with _opened_image(image) as file:
            image = file.convert("RGB")
    elif hasattr(image, "convert"):
        image = image.convert("RGB")
    return image if size is None else _fitted(image, size)


def check_readable(path: Path | str) -> None:
    """Check that an image can be read to its end; a JPEG is decoded in a small size, which is faster."""
    with _opened_image(path) as file:
        file.draft("RGB", (1, 1))
        file.load()


def _fitted(image: Any, size: tuple[int, int]) -> Any:
    """The image in a frame of this height and width, as large as it can be."""
    import numpy as np
    from PIL import Image, ImageOps

    if not hasattr(image, "convert"):
        values = np.asarray(image)
        if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (3, 4):
            raise InvalidArgument(
                "Expected an image of whole numbers 0 to 255 with the colours on the last axis, to fit it into a size, "
                f"got {values.dtype} of {values.shape}. Give PIL images, or files."
            )
    picture = image if hasattr(image, "convert") else Image.fromarray(values).convert("RGB")
    return ImageOps.pad(picture, (size[1], size[0]))


@contextmanager
def _opened_image(path: Path | str) -> Iterator[Any]:
    """Open an image file, of which only the header is read so far.

    Raises:
        InvalidArgument: no image, damaged, or so large that a small file could take all memory. The message does not
            name the file, which can be private.

    Guarantees:
        tests/hf/vision_language/test_reading.py::test_images_that_take_all_memory_are_refused.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                if file.width * file.height > _MOST_PIXELS:
                    raise InvalidArgument(
                        f"Expected an image of at most {_MOST_PIXELS} pixels, got {file.width} x {file.height}. Make "
                        "it smaller: the model sees far fewer."
                    )
                yield file
    except InvalidArgument:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidArgument(
            f"Expected an image of at most {_MOST_PIXELS} pixels, got one with more. Make it smaller."
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
