"""Digests of texts and of tensors. Made for accidents, not for adversaries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local

_WORD, _PIECE = 8, 2**16


def digest(text: str | bytes) -> int:
    """Hash of a text as a non-negative integer of 63 bits.

    >>> digest("a") == digest(b"a")
    True
    """
    raw = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """A digest of names, shapes and all bits, weighted by position: it detects one changed bit, and a changed order.

    Made for accidents, not for adversaries.

    >>> checksum([("w", torch.ones(3))]) == checksum([("w", torch.tensor([1, 1, 1 + 2**-23]))])
    False
    """
    return checksum_and_marks(tensors, ())[0]


def checksum_and_marks(tensors: Iterable[tuple[str, Tensor]], marks: Iterable[Tensor]) -> tuple[int, list[bool]]:
    """The digest of `checksum`, and marks (0-d, bool), in one read from the device.

    >>> checksum_and_marks([], [torch.tensor(True)])[1]
    [True]
    """
    descriptions, sums = [], []
    for name, tensor in tensors:
        part = local(tensor).detach().contiguous()
        descriptions.append(f"{name}{part.dtype}{tuple(part.shape)}")
        flat = part.reshape(-1).view(torch.uint8)
        words = len(flat) // _WORD * _WORD
        head = flat[:words] if flat.storage_offset() % _WORD == 0 else flat[:words].clone()
        sums += [_hash_words(head.view(torch.int64)), flat[words:].sum()]
    known = [mark.to(sums[0] if sums else torch.int64) for mark in marks]
    values = torch.stack(sums + known).tolist() if sums or known else []
    return digest(f"{descriptions}{values[: len(sums)]}"), [bool(value) for value in values[len(sums) :]]


def _hash_words(words: Tensor) -> Tensor:
    """`sum_i (2 i + 1) (w_i xor (w_i >> 29))` in pieces: the shift lets high bits count in low places, too."""
    total = words.new_zeros(())
    piece_size = min(len(words), _PIECE if words.is_cpu else 64 * _PIECE)  # as fits into a cache, or fills a GPU
    weights = torch.arange(1, 2 * piece_size + 1, 2, device=words.device)
    buffer = torch.empty_like(weights)
    for number, piece in enumerate(torch.split(words, max(piece_size, 1))):
        hashed = torch.bitwise_right_shift(piece, 29, out=buffer[: len(piece)])
        hashed.bitwise_xor_(piece).mul_(weights[: len(piece)])
        total = total * 31 + hashed.sum() + number
    return total


def in_hex(digest: int) -> str:
    """A digest as a text of 16 digits.

    >>> in_hex(255)
    '00000000000000ff'
    """
    return f"{digest:016x}"
