"""Views of an image, a public list without randomness: their features are computed once, as those of the image are.

May import: its folder, features and below. Privacy depends on it: no.
"""

from typing import Any

from dpfunc.hf.vision_language._images import opened

_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))  # down and right, in steps of a 16th of the side
# Whether left and right change places, and the shift: the image itself is the first.
VIEWS = tuple((mirrored, shift) for shift in _SHIFTS for mirrored in (False, True))


def views_of(image: Any, count: int) -> list[Any]:
    """The first `count` views of a file or a picture, the first of which is what was given, untouched.

    They are the image, its mirror image, and both of them moved to the right, to the left, down and up by a 16th of the
    side, at least one pixel; at the border the last row or column is repeated. Nothing else than this image is read
    (tests/train/test_views.py::test_the_views_are_those_of_the_list).
    """
    import numpy as np
    from PIL import Image

    views = [image]
    for mirrored, (down, right) in VIEWS[1:count]:
        pixels_HWC = np.asarray(opened(image, None))
        height, width = pixels_HWC.shape[:2]
        rows = np.clip(np.arange(height) - down * max(1, height // 16), 0, height - 1)
        columns = np.clip(np.arange(width) - right * max(1, width // 16), 0, width - 1)
        if mirrored:
            columns = columns[::-1]
        views.append(Image.fromarray(pixels_HWC[rows][:, columns]))
    return views


def view_lines(count: int) -> list[str]:
    """A line that says how many views of an image are averaged, if there are several."""
    return [f"views: {count} of each image to train on, whose gradients are averaged before the clip"] * (count > 1)
