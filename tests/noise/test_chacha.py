"""ChaCha20 on tensors: the words of RFC 8439, and normals whose law, tails and independence are tested from both sides."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from devices import devices
from scipy import stats

from dpfunc.noise import _chacha as chacha
from dpfunc.rng import fold_in, insecure_key

KEY = insecure_key(0)
SECRET = bytes(range(32))


def words_of(key, counter, nonce, device="cpu"):
    """One block as bytes."""
    words = torch.tensor(struct.unpack("<8i", key), dtype=torch.int32, device=device)[:, None]
    tail = torch.tensor(
        struct.unpack("<i", struct.pack("<I", counter)) + struct.unpack("<3i", nonce), dtype=torch.int32
    )
    return chacha.blocks(words, tail[:, None].to(device))[:, 0].cpu().numpy().astype("<i4").tobytes()


# RFC 8439: key, counter, nonce, the block in hexadecimal digits.
VECTORS = {
    "2.3.2": (
        SECRET, 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1, 1": (
        bytes(32), 0, "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1, 2": (
        bytes(32), 1, "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1, 3": (
        bytes(31) + b"\1", 1, "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1, 4": (
        b"\0\xff" + bytes(30), 2, "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1, 5": (
        bytes(32), 0, "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}  # fmt: skip


@devices
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_the_rfc(name, device):
    key, counter, nonce, expected = VECTORS[name]
    assert words_of(key, counter, bytes.fromhex(nonce), device).hex() == expected


def drawn(*names, size=2**18, device="cpu"):
    """Numbers of some keys, made together."""
    keys = [fold_in(KEY, name).secret for name in names]
    return [values.cpu().numpy() for values in chacha.normals(keys, [size] * len(names), torch.device(device))]


def looks_normal(values, level=1e-5):
    spread = stats.chi2.cdf(float(np.square(values).sum()), values.size)
    return bool(stats.kstest(values, "norm").pvalue > level and level < spread < 1 - level)


@devices
def test_is_standard_normal(device):
    (values,) = drawn("law", device=device)
    assert looks_normal(values)
    for wrong in (0.99 * values, 1.01 * values, values + 0.02, stats.t(30).ppf(stats.norm.cdf(values))):
        assert not looks_normal(wrong)
    for sigma in (3.0, 4.0):
        beyond = int((np.abs(values) > sigma).sum())
        assert 1e-5 < stats.binom.cdf(beyond, values.size, 2 * stats.norm.sf(sigma)) < 1 - 1e-5


def test_the_smallest_and_the_largest_words_give_finite_numbers():
    least, most = torch.full((16, 1), -(2**31), dtype=torch.int32), torch.full((16, 1), 2**31 - 1, dtype=torch.int32)
    assert float(chacha._uniform(least[:4], least[4:8]).max()) == 2.0**-65
    assert float(chacha._uniform(most[:4], most[4:8]).max()) == 1.0
    for words in (least, most):
        assert bool(chacha._box_muller(words).isfinite().all())
    assert float(chacha._box_muller(least).abs().max()) == pytest.approx(math.sqrt(130 * math.log(2)))


def test_nothing_is_shared():
    """No number appears twice, within a key or between two; neither pairs of a block nor neighbours are correlated."""
    one, other = drawn("a", "b")
    assert len(np.unique(np.concatenate([one, other]))) == one.size + other.size
    pairs = [(one, other), (one[:-1], one[1:]), (np.square(one[:-1]), np.square(one[1:]))]
    blocks = one.reshape(-1, chacha.NORMALS)
    pairs += [(blocks[:, i], blocks[:, j]) for i in range(8) for j in range(i)]
    pairs += [(np.square(blocks[:, i]), np.square(blocks[:, j])) for i in range(8) for j in range(i)]
    for first, second in pairs:
        assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(first.size) < 5


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_a_prefix_is_a_prefix(size):
    whole = chacha.normals([SECRET], [1000], torch.device("cpu"))[0]
    beside = chacha.normals([bytes(32), SECRET, KEY.secret], [5, size, 0], torch.device("cpu"))
    assert [len(values) for values in beside] == [5, size, 0]
    assert torch.equal(beside[1], whole[:size])
