"""Classes and probabilities of new records, from a model of a table or of images that `dpfunc train` left.

May import: its folder, features and below. Privacy depends on it: no.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.features.tables import TableFeatures
from dpfunc.train._features import Front, load_features
from dpfunc.train._model import one_line
from dpfunc.train._run_folder import MODEL
from dpfunc.train.tables import read_table, visible_files


def predict(folder: Path | str, source: Path | str) -> Iterator[dict[str, Any]]:
    """Predict the class of each row of a table, or of each image; post-processing of what training released.

    Args:
        folder: output_dir of `dpfunc train`, or a copy of its `model/` alone.
        source: a .csv or .jsonl with the columns of the training table, with labels or not; an image, or a folder.

    Returns:
        For each record its number or its path, the most likely class, and the probability of each class, each computed
        alone. Not released by a mechanism: as private as the new records.

    Raises:
        InvalidArgument: no such model, a source that cannot be read, or a row that training would refuse.

    Guarantees:
        tests/train/test_predict.py::test_predictions_are_those_of_the_evaluation.
    """
    root = Path(folder)
    place = root / MODEL if (root / MODEL).is_dir() else root
    with one_line(f"the model of a run over a table or images in {str(place)!r}"):
        model, front = load_features(place)
    for about, x_k in _records(front, Path(source)):
        with torch.no_grad():
            shares = model(x_k[None]).logits[0].softmax(0).tolist()
        probabilities = {model.config.id2label[number]: share for number, share in enumerate(shares)}
        yield {**about, "label": max(probabilities, key=probabilities.__getitem__), "probabilities": probabilities}


def _records(front: Front, path: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The name of each record, and its features."""
    if isinstance(front, TableFeatures):
        columns = [*front.numbers, *front.categories]
        table = read_table(path, columns, deduplicate=False, optional=columns)
        for number, row in table.items():
            yield {"row": number}, front.encode(row, f"row {number} of {path.name}")
        return
    files = [path] if path.is_file() else visible_files(path)
    refuse((not files, f"Expected images in {str(path)!r}, got none."))
    for file in files:
        try:
            features = front.encode(file)
        except InvalidArgument as error:
            raise InvalidArgument(f"The image {str(file)!r} cannot be used. {error}") from error
        yield {"image": str(file)}, features
