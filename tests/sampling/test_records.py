"""A resumed run recognises its data: every record, and the images that records name."""

import dataclasses
from array import array
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpfunc.sampling.records import data_name


class Elsewhere:
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


@pytest.mark.parametrize("kind", [list, tuple, Elsewhere])
@pytest.mark.parametrize("changed", [0, 2, 1027, 4998, 4999])
def test_a_change_of_any_record_is_another_data_set(kind, changed):
    records = [{"text": str(number), "input_ids": [number, 1]} for number in range(5000)]
    edited = list(records)
    edited[changed] = {**records[changed], "input_ids": [changed, 2]}
    assert data_name(kind(records)) == data_name(kind([dict(record) for record in records]))
    assert data_name(kind(records)) != data_name(kind(edited))


def test_large_data_sets_elsewhere_are_sampled():
    records = [{"text": str(number)} for number in range(20_001)]
    edited = [*records[:7], {"text": "edited"}, *records[8:]]
    assert data_name(Elsewhere(records)) == data_name(Elsewhere(edited))  # as the guide says
    assert data_name(records) != data_name(edited)
    assert data_name(Elsewhere(records)) != data_name(Elsewhere(records[::-1]))


@dataclasses.dataclass(frozen=True)
class Asked:
    image: Path
    question: str


@pytest.mark.parametrize("record", [lambda path: {"image": str(path)}, lambda path: Asked(path, "what?")])
def test_images_that_records_name_are_part_of_them(tmp_path, record):
    file = tmp_path / "a.PNG"
    file.write_bytes(b"1")
    before = data_name([record(file)])
    file.write_bytes(b"2")
    assert data_name([record(file)]) != before
    file.write_bytes(b"1")
    assert data_name([record(file)]) == before
    file.unlink()
    assert data_name([record(file)]) != before


@pytest.mark.parametrize("ending", ["png", "WAV"])
@pytest.mark.parametrize("record", [lambda path: {"image": str(path)}, lambda path: Asked(path, "what?")])
def test_files_are_recognised_at_another_place(tmp_path, record, ending):
    """By their contents and names: a folder that is mounted elsewhere was another data set."""
    names = set()
    for folder, name, pixels in (
        ("a", "1", b"1"),
        ("b", "1", b"1"),
        ("a", "2", b"1"),
        ("c", "1", b"2"),
    ):
        file = tmp_path / folder / f"{name}.{ending}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pixels)
        names.add(data_name([record(file)]))
    assert len(names) == 3


def test_a_long_text_that_ends_like_the_name_of_an_image_is_a_text():
    """No system call can take it; the error would have quoted the record."""
    assert data_name(["word " * 2000 + "cat.png"]) != data_name(["word " * 2000 + "dog.png"])


def test_texts_between_types_are_not_confused():
    names = {data_name([value]) for value in ([1, 2], (1, 2), [1, 2.0], [[1], 2], [True, 2], ["1", 2], "12", [12])}
    assert len(names) == 8


def test_other_values_of_python_are_parts_of_records():
    """Dates, for example, of which only the type was looked at; and where a mapping inside of another one ends."""
    days = [datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2)]
    pairs = [days, [day.date() for day in days], [day.time().replace(second=day.day) for day in days]]
    pairs += [(Decimal(1), Decimal(2)), (1j, 2j), ({1, 2}, {3}), ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}})]
    assert all(data_name([one]) != data_name([other]) for one, other in pairs)
    assert data_name([{"b", "a", "c"}]) == data_name([{"c", "b", "a"}])


def test_pictures_of_the_same_bytes_are_not_confused():
    """Of other sizes, of another mode, and with other colours in their palettes."""
    grey = Image.frombytes("L", (6, 1), bytes(range(6)))
    palette = grey.convert("P")
    other = palette.copy()
    other.putpalette([9, 9, 9] * 6)
    pictures = [grey, Image.frombytes("L", (3, 2), bytes(range(6))), palette, other]
    pictures.append(Image.frombytes("RGB", (2, 1), bytes(range(6))))
    assert len({picture.tobytes() for picture in pictures}) == 1
    assert len({data_name([picture]) for picture in pictures}) == len(pictures)
    assert data_name([grey]) == data_name([grey.copy()])
    assert data_name([array("i", [1])]) != data_name([array("I", [1])])


def test_arrays_of_objects_are_known_by_their_contents():
    words = ["".join(["a", str(number)]) for number in range(3)]  # other objects than those of the second array
    one, other = (np.array([*words, number], dtype=object) for number in (1000, 1001))
    again = np.array(["".join(word) for word in ("a0", "a1", "a2")] + [int("1000")], dtype=object)
    assert data_name([one]) == data_name([again]) != data_name([other])
