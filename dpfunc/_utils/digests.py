"""Digests of texts and tensors, made for accidents, not for adversaries.

May import: its folder, errors. Privacy depends on it: yes.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.parts import local

_WORD = 8  # bytes
_COLUMNS = 4095  # odd: where a number of bits in a row are flipped, all of them, their sum changes


def digest(text: str | bytes) -> int:
    """Hash of a text as a non-negative integer of 63 bits."""
    raw = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """A digest of names, shapes and all bits, weighted by position: it detects one changed bit, and a changed order."""
    return checksum_and_marks(tensors, ())[0]


def checksum_and_marks(tensors: Iterable[tuple[str, Tensor]], marks: Iterable[Tensor]) -> tuple[int, list[bool]]:
    """The digest of `checksum`, and marks (0-d, bool), in one read from the device."""
    descriptions, sums = [], []
    for name, tensor in tensors:
        part = local(tensor).detach().contiguous()
        descriptions.append(f"{name}{part.dtype}{tuple(part.shape)}")
        flat = part.reshape(-1).view(torch.uint8)
        words = len(flat) // _WORD * _WORD
        head = flat[:words] if flat.storage_offset() % _WORD == 0 else flat[:words].clone()
        tail = F.pad(flat[words:], (0, -len(flat) % _WORD))  # the bytes after the last whole word, as one
        sums += [_hash_words(_condensed(head.view(torch.int64))), _hash_words(tail.view(torch.int64))]
    known = [mark.to(sums[0] if sums else torch.int64) for mark in marks]
    values = torch.stack(sums + known).tolist() if sums or known else []
    return digest(f"{descriptions}{values[: len(sums)]}"), [bool(value) for value in values[len(sums) :]]


def _condensed(words: Tensor) -> Tensor:
    """A short list of words unchanged; of a long one, sums of rows and columns, so that one or two changes show."""
    count = len(words) // _COLUMNS
    if count < 2:
        return words
    rows = words[: count * _COLUMNS].view(count, _COLUMNS)
    return torch.cat([rows.sum(0), rows.sum(1), words[count * _COLUMNS :]])


def _hash_words(words: Tensor) -> Tensor:
    """`sum_i (2 i + 1) (w_i xor (w_i >> 29))`: the shift lets high bits count in low places, too."""
    weights = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
    return (words >> 29).bitwise_xor_(words).mul_(weights).sum()


def in_hex(digest: int) -> str:
    """A digest as a text of 16 digits."""
    return f"{digest:016x}"
