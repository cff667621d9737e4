"""Checksums of tensors see each bit and each place."""

from __future__ import annotations

import pytest
import torch

from dpfunc._utils.digests import checksum

ROWS, COLUMNS = 6, 4095  # as words of 8 bytes are summed
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64]


def differ(*tensors):
    return len({checksum([("x", tensor)]) for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_one_bit(dtype):
    tensor = torch.ones(1000).to(dtype)
    changed = tensor.clone()
    view = changed.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[changed.element_size()])
    view[517] ^= 1
    assert checksum([("w", tensor)]) == checksum([("w", tensor.clone())])
    assert differ(torch.arange(1000).to(dtype), torch.arange(1000).to(dtype).flip(0))
    others = [[("w", changed)], [("v", tensor)], [("w", tensor.reshape(10, 100))], [("w", tensor), ("v", tensor)]]
    assert len({checksum(each) for each in [[("w", tensor)], *others]}) == 5


def test_a_checksum_of_few_bytes_sees_each_of_them():
    """What is left after whole words counts as a word, too: bytes that are added up would often agree."""
    assert differ(*torch.randn(2000, 1, generator=torch.Generator().manual_seed(0)).unique()[:, None])
    assert differ(*torch.tensor([[1, 2, 3], [3, 2, 1]], dtype=torch.uint8))


def test_a_checksum_sees_two_signs_and_two_rows():
    """Changes that a plain sum of words would not see."""
    rows = torch.randn(64, 8, dtype=torch.float64)
    signs = rows.clone()
    signs[3] = -signs[3]
    assert differ(rows, signs, rows.flip(0))
    assert not differ(rows, rows + 0.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 7), (1, 4000)), ((1, 7), (4, 7)), ((0, 0), (5, 4094)), ((2, 8), (6, 3)), ((6, 1), (6, 3))],
)
def test_a_checksum_of_many_words_sees_where_they_are(first, second):
    """Two words that change places, or that change by as much as each other: in a row, in a column, in neither, in no whole row."""
    words = torch.arange(ROWS * COLUMNS + 9) ** 3
    pair = [row * COLUMNS + column for row, column in (first, second)]
    exchanged, balanced, flipped = words.clone(), words.clone(), words.clone()
    exchanged[pair] = words[pair[::-1]]
    balanced[pair] += torch.tensor([1, -1])
    flipped[pair] ^= -(2**63)
    assert differ(words, exchanged, balanced, flipped)


@pytest.mark.parametrize("count", [COLUMNS, ROWS * COLUMNS, (ROWS + 1) * COLUMNS, 2**16])
def test_a_checksum_sees_that_all_signs_changed(count):
    values = torch.randn(count, dtype=torch.float64)
    assert differ(values, -values, torch.cat([-values[: count // 2], values[count // 2 :]]))
