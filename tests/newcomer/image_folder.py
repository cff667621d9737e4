"""Photos of many kinds, and two commands: `dpfunc train` and `dpfunc predict`."""

from pathlib import Path

import numpy as np
from PIL import Image

from dpfunc.cli.main import main

drawn = np.random.default_rng(0)


def write_photo(path, upright):
    """Stripes that lie or stand; a phone saves a photo on its side, and says so."""
    height, width = drawn.integers(20, 40, 2)
    lines = np.arange(width)[None, :] if upright else np.arange(height)[:, None]
    grey = 255.0 * ((lines + drawn.integers(8)) // 4 % 2) + drawn.normal(
        0, 60, (height, width)
    )
    photo = Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if path.suffix == ".jpg":
        photo.getexif()[0x0112] = 6
        photo.transpose(Image.Transpose.ROTATE_90).save(path, exif=photo.getexif())
    elif path.suffix == ".tif":
        Image.fromarray((grey.clip(0, 255) * 257).astype(np.uint16)).save(path)
    else:
        photo.convert("P" if path.suffix == ".gif" else "RGB").save(path)


for folder, count in (("photos", 100), ("new", 30)):
    for kind in ("lying", "standing"):
        Path(folder, kind).mkdir(parents=True)
        for number in range(count):
            suffix = (".png", ".jpg", ".webp", ".tif", ".gif")[number % 5]
            write_photo(Path(folder, kind, f"{number}{suffix}"), kind == "standing")

Path(
    "job.yaml"
).write_text("""{task: image_classification, output_dir: run, strategy: head,
data: {train: photos, labels: [lying, standing], image_size: [24, 24]},
privacy: {dp_epsilon: 8, dp_delta: 1e-3}}""")
main(["train", "job.yaml"], standalone_mode=False)
main(["predict", "run", "new", "--out", "classes.jsonl"], standalone_mode=False)
