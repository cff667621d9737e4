"""The scattering transform: Kymatio's numbers, and what a scattering transform does to shifts and constants."""

from __future__ import annotations

import pytest
import torch

from dpfunc.train._scattering import CHANNELS, scattering

# Means over positions of each channel by kymatio 0.3 (Scattering2D(J=2, shape=(16, 16))), of the image below.
KYMATIO = """
0.5377 0.0693 0.0577 0.058 0.0514 0.0588 0.0579 0.0675 0.0792 0.0321 0.0348 0.0336 0.0311 0.0298 0.0253 0.0361 0.0373
0.0069 0.0054 0.0063 0.0067 0.0043 0.0039 0.0057 0.0062 0.0042 0.0045 0.0044 0.0048 0.003 0.004 0.0046 0.0045 0.0045
0.0045 0.0059 0.0072 0.0053 0.0034 0.0034 0.0034 0.0049 0.0048 0.0067 0.0093 0.0062 0.0045 0.0057 0.0057 0.0031 0.0032
0.0049 0.0078 0.0066 0.0064 0.0059 0.0044 0.0037 0.0043 0.0037 0.0041 0.0048 0.0042 0.0064 0.005 0.0071 0.0042 0.0049
0.0078 0.0062 0.0059 0.0073 0.0062 0.0094 0.008 0.0067 0.0072 0.0077 0.0073 0.0067 0.0089
"""
PLACE = [0.5159, 0.1053, 0.0636, 0.0344, 0.0291, 0.0488, 0.0613, 0.077, 0.0601, 0.0374, 0.0436, 0.0186, 0.019, 0.0288]
"""The first channels at position (1, 2)."""


def picture(side=16):
    i, j = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return ((7 * i * i + 3 * i * j + 5 * j) % 32 / 31.0)[None]


def test_the_numbers_are_those_of_kymatio():
    """Kymatio throws pixels away between the two wavelets, which costs it up to 1 % of a mean."""
    found = scattering(picture())[0]
    assert found.shape == (CHANNELS, 4, 4)
    torch.testing.assert_close(
        found.mean((1, 2)), torch.tensor([float(text) for text in KYMATIO.split()]), rtol=0.02, atol=1e-4
    )
    torch.testing.assert_close(found[: len(PLACE), 1, 2], torch.tensor(PLACE), rtol=0.06, atol=1e-4)


def test_other_filters_would_be_seen(monkeypatch):
    from dpfunc.train import _scattering as module

    fine, coarse = module._wavelets(24, 24)
    monkeypatch.setattr(module, "_wavelets", lambda *shape: (fine.roll(1, 0), coarse))
    with pytest.raises(AssertionError):
        test_the_numbers_are_those_of_kymatio()


def test_a_constant_has_no_moduli_and_colours_are_apart():
    found = scattering(torch.stack([torch.full((8, 12), 0.5), picture(12)[0, :8]]))
    torch.testing.assert_close(found[0, 0], torch.full((2, 3), 0.5))
    assert found[0, 1:].abs().max() < 1e-5
    assert torch.equal(found[1:], scattering(picture(12)[:, :8]))


def test_it_is_homogeneous_and_blind_to_added_light_beyond_the_mean():
    x, found = picture(), scattering(picture())
    torch.testing.assert_close(scattering(3 * x), 3 * found)
    torch.testing.assert_close(scattering(x + 1)[:, 1:], found[:, 1:], rtol=1e-4, atol=1e-5)
