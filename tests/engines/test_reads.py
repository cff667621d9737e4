"""Python reads numbers of rows: rows with equal answers go on together, and each writes its own memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rows_alone import W, X, engine_of, off, squares
from torch.nn import functional as F

from dpfunc.engines import auto
from dpfunc.errors import UnsupportedModel

READS = {
    "nothing": (squares, "one pass"),
    "what all rows agree on": (lambda p, x: squares(p, x) if (x < 100).all() else squares(p, 2 * x), "one pass"),
    "a sign": (lambda p, x: squares(p, x) if x[0, 0] > 0 else squares(p, 3 * x), "groups"),
    "a number of each row": (lambda p, x: squares(p, x) * x.sum().item(), "groups"),
    "a list": (lambda p, x: squares(p, x) * sum(x.tolist()[0]), "groups"),
    "numpy": (lambda p, x: squares(p, x) * float(x.numpy().max()), "groups"),
    "a text": (lambda p, x: squares(p, x) * len(f"{x[0, 0].item():.3f}"), "groups"),
    "a comparison": (lambda p, x: squares(p, x) * (2.0 if torch.equal(x, x.abs()) else 1.0), "groups"),
    "shapes that agree": (lambda p, x: (p["w"] * x)[x.abs() > -1].square().sum()[None], "one pass"),
    "shapes that follow from values": (lambda p, x: (p["w"] * x)[x > 0.7].square().sum()[None], "groups"),
    "positions": (lambda p, x: (p["w"] * x).flatten()[(x > 0.7).nonzero()[:, 1]].sum()[None], "groups"),
    "a slice up to a number of the row": (
        lambda p, x: (p["w"] * x)[0, : x[0, 0].abs().long() + 1].sum()[None],
        "groups",
    ),
    "different whole numbers": (lambda p, x: squares(p, x) * len(x.round().long().unique()), "groups"),
}


def _swallowing(p, x):
    try:
        positive = bool(x[0, 0] > 0)
    except:  # noqa: E722  (code of users that catches everything)
        positive = True
    return squares(p, x) if positive else squares(p, 3 * x)


READS["a bare except"] = (_swallowing, "groups")


@pytest.mark.parametrize("name", READS)
def test_reads_group_the_rows(name):
    loss_fn, expected = READS[name]
    assert engine_of(loss_fn, W, X) == expected


def test_rows_with_equal_numbers_stay_together():
    """Three groups for six rows, in the order of the batch."""
    x = torch.tensor([[1.0], [2.0], [1.0], [3.0], [2.0], [1.0]], dtype=torch.float64).expand(6, 3).contiguous()
    groups = []
    engine = replace(auto(), on_pass=lambda result: groups.append(len(result.losses_B)))

    def loss_fn(p, b):
        return squares(p, b) * b[0, 0].item()

    assert off(loss_fn, W, x, engine) < 1e-12
    assert sorted(groups[-3:]) == [1, 2, 3]
    assert engine.decision(loss_fn).reason == "groups of rows, which do not agree on what Python reads (item)"


# Writes, masks and selections of a row's own.

OWN = {
    "a mask is filled": lambda p, x: torch.where(x > 0, p["w"] * x, 0.0).sum(1),
    "written by numbers of the row after a slice": lambda p, x: _weighed(
        torch.zeros(2, 3, dtype=x.dtype) * x, (slice(None), x[0].argsort()), p["w"] * x),
    "written between slices by two lists of numbers": lambda p, x: _weighed(
        torch.zeros(2, 3, 3, dtype=x.dtype) * x, (slice(None), x[0].argsort(), [2, 0, 1]), p["w"] * x),
    "written by numbers that are apart": lambda p, x: _weighed(
        torch.zeros(2, 3, 2, dtype=x.dtype) * x.sum(), ([0, 1], slice(None), [1, 0]), p["w"] * x),
    "written where a mask is set": lambda p, x: _with(p["w"] * x, lambda h: h.__setitem__(h > 0, 0.0)),
    "written where a mask is set, beside a number": lambda p, x: _with(
        torch.zeros(2, 1, 3, dtype=x.dtype), lambda h: h.__setitem__((slice(None), 0, x[0] > 0.2),
        torch.stack((p["w"], 2 * p["w"]))[:, x[0] > 0.2] * x[0][x[0] > 0.2])).sum()[None],
    "written where a mask is set, after the last axis but one": lambda p, x: _with(
        torch.zeros(2, 3, 1, dtype=x.dtype), lambda h: h.__setitem__((..., x[0] > 0.2, slice(0, 1)),
        (p["w"] * x)[0][x[0] > 0.2][:, None])).sum()[None],
    "scattered by a mask": lambda p, x: (p["w"] * x).masked_scatter(x > 0.2, (2 * p["w"] * x).flatten()).sum(1),
    "changed by sparse numbers": lambda p, x: F.linear(x, torch.ones(3, 3, dtype=x.dtype) + torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2], [1, 0, 0]]), 2 * p["w"], (3, 3))).square().sum(1),
    "multiplied by sparse numbers of its own": lambda p, x: F.linear(x * p["w"], torch.ones(3, 3, dtype=x.dtype) +
        torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 0, 0]]), x[0], (3, 3))).square().sum(1),
    "split and counted by its own numbers": lambda p, x: (
        (p["w"] * x)[0].split([n := (x[0, 0] > 0).long() + 1, 3 - n])[0].sum() * torch.arange(n + 1).sum())[None],
    "made of its own numbers and others": lambda p, x: (
        p["w"] * x * torch.tensor([1.0, x[0, 0] > 0, 2], dtype=x.dtype)).sum(1),
    "repeated by its own numbers": lambda p, x: (p["w"] * x).flatten().repeat_interleave((x > 0.7).long().flatten()).sum()[None],
    "a function of torch that is written in Python": lambda p, x: F.multi_head_attention_forward(
        x[None], x[None], x[None], 3, 1, torch.outer(torch.ones(9, dtype=x.dtype), p["w"]), torch.zeros(9, dtype=x.dtype),
        None, None, False, 0.0, torch.eye(3, dtype=x.dtype), None)[0].sum((0, 2)),
}  # fmt: skip


def _weighed(h, place, value):
    """Each place of what was written counts differently."""
    h[place] = value
    return (h.flatten() @ torch.arange(1.0, h.numel() + 1, dtype=h.dtype))[None]


def _with(h, write):
    h = h.clone()
    write(h)
    return h.square().sum(1)


# torch says it once for each process that makes a sparse tensor
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", OWN)
def test_what_a_row_does_with_its_own_memory(name):
    assert engine_of(OWN[name], W, X) in ("one pass", "groups")


def test_memory_that_nobody_has_written_has_no_numbers_of_others():
    """`torch.empty` is zeros."""
    seen = []

    def loss_fn(p, x):
        left = torch.full((4096,), 7.0)
        del left
        seen.append(float(torch.empty(4096).abs().sum()))
        return (p["w"] * x).sum(1)

    auto()(loss_fn, W, X)
    assert set(seen[1:]) == {0.0}  # after a made-up row alone, which is nobody's


def test_a_number_of_a_row_selects_for_each_row():
    """Also one that Python reads from a tensor of its own (`for expert in hit`)."""
    place = torch.tensor([[0], [2], [1], [2]])

    def loss_fn(p, b):
        x, places = b
        chosen = (x[0] * p["w"])[places[0, 0]], (x[0] * p["w"])[..., places[0, 0]]
        return (chosen[0] * 3 + chosen[1].square()).reshape(1)

    engine = auto()
    assert off(loss_fn, W, (X, place), engine) < 1e-10


def test_a_shape_that_follows_from_values_is_read_where_rows_agree():
    """A loss that keeps it is refused: in the next step it may be another one."""
    counts = []

    def loss_fn(p, x):
        counts.append(len((x[0] > 0).nonzero()))
        return (p["w"] * x).sum(1)

    x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0], [-7.0, 8.0, 9.0]])
    with pytest.raises(UnsupportedModel, match="nonzero"):
        auto()(loss_fn, {"w": torch.ones(3)}, x)


@pytest.mark.parametrize(
    "repeat",
    [
        lambda p, x, n: torch.repeat_interleave(p["w"] * x[0], n),
        lambda p, x, n: (p["w"] * x).repeat_interleave(n[:1], dim=0),
        lambda p, x, n: torch.repeat_interleave(torch.eye(3, dtype=x.dtype) * p["w"], repeats=n, dim=1),
        lambda p, x, n: torch.repeat_interleave(n) * p["w"].sum() * x.sum(),
        lambda p, x, n: torch.stack(torch.where(n > 1)).sum() * (p["w"] * x).sum(1),
    ],
)
def test_repeats_and_places_of_a_row_have_gradients(repeat):
    loss_fn = lambda p, x: repeat(p, x, x[0].abs().long() + 1).square().sum()[None]
    assert engine_of(loss_fn, W, X) == "groups"
