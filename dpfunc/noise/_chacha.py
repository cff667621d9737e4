"""ChaCha20 as operations of torch, and standard normals from its words: on any device, for many tiles at once.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

RFC 8439, section 2.3: a block of 16 words of 32 bits is made from four constants, a key of 8 words, a counter and a
nonce of 3 words, by 20 rounds of additions, exclusive ors and rotations. Here a block is a column. All are integers, so
each device gives the same words; the normals are float64, and may differ by rounding between devices.

A block gives four pairs of uniforms of 64 bits, and each pair two normals (Box & Muller 1958). The smallest uniform is
2**-65, so numbers go up to 9.49 sigma; a truncation there has probability 2e-21.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NORMALS = 8  # numbers of a block
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_STEPS = (16, 12, 8, 7)
_ROUNDS = 10  # of the columns, then of the diagonals


def blocks(keys_8n: Tensor, tails_4n: Tensor) -> Tensor:
    """Key streams of ChaCha20: (16, n) words as int32, a block a column.

    Args:
        keys_8n: words of each key, little-endian, int32.
        tails_4n: the counter and the three words of the nonce of each block, int32.

    Guarantees:
        tests/noise/test_chacha.py: the vectors of RFC 8439 (test_vectors_of_the_rfc).
    """
    constants = torch.tensor(_CONSTANTS, dtype=torch.int32, device=keys_8n.device)
    begin = torch.cat([constants[:, None].expand(4, keys_8n.shape[1]), keys_8n, tails_4n])
    a, b, c, d = begin.clone().view(4, 4, -1)
    room = torch.empty_like(a)
    for _ in range(_ROUNDS):
        _round(a, b, c, d, room)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _round(a, b, c, d, room)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(begin)


def _round(a: Tensor, b: Tensor, c: Tensor, d: Tensor, room: Tensor) -> None:
    """Four quarter rounds (RFC 8439, 2.1), in place."""
    for step, bits in enumerate(_STEPS):
        summed, changed, added = (c, b, d) if step % 2 else (a, d, b)
        summed.add_(added)
        changed.bitwise_xor_(summed)
        torch.bitwise_left_shift(changed, bits, out=room)
        # int32 is shifted with its sign, which the mask takes away
        changed.bitwise_right_shift_(32 - bits).bitwise_and_(2**bits - 1).bitwise_or_(room)


def normals(secrets: Sequence[bytes], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Standard normals (float64) for each key of 32 bytes: a function of the key and the position alone.

    Guarantees:
        tests/noise/test_chacha.py: the law (test_is_standard_normal), nothing shared (test_nothing_is_shared), a prefix
        is a prefix, alone or beside others (test_a_prefix_is_a_prefix).
    """
    counts = [-(-size // NORMALS) for size in sizes]
    of_block = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    tails_4n = torch.zeros(4, len(of_block), dtype=torch.int32, device="cpu")
    tails_4n[0] = torch.arange(len(of_block), device="cpu") - starts[of_block]
    words = torch.frombuffer(bytearray(b"".join(secrets)), dtype=torch.uint8).view(torch.int32).view(-1, 8)
    keys_8n = words.to(device).t()[:, of_block.to(device)]
    drawn = _box_muller(blocks(keys_8n, tails_4n.to(device)))
    return [drawn[start * NORMALS :][:size] for start, size in zip(starts.tolist()[:-1], sizes, strict=True)]


def _box_muller(words_16n: Tensor) -> Tensor:
    """Eight normals of each block, one block after the other."""
    high, low, turn, rest = words_16n.view(4, 4, -1)
    radius = _uniform(high, low).log_().mul_(-2.0).sqrt_()
    angle = _uniform(turn, rest).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()]).t().reshape(-1)


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    """Uniforms in (0, 1]; small ones keep all of their digits, which are the tail."""
    return (high.double() + 2.0**31).mul_(2.0**32).add_(low.double() + (2.0**31 + 0.5)).mul_(2.0**-64)
