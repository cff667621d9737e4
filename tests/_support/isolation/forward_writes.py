"""Mixing in the forward pass: values of other rows are written into memory."""

from __future__ import annotations

import torch

from isolation.cases import D, case, features, squares

writes = case("forward: written in place")


@writes
def into_an_output(p, b):
    h = features(p, b)
    mean = torch.empty(D, dtype=h.dtype)
    torch.mean(h.detach(), 0, out=mean)
    return squares(h - mean)


@writes
def rows_one_further(p, b):
    h = features(p, b)
    buffer = torch.zeros_like(h)
    buffer[1:] = h[:-1]
    return squares(h + buffer)


@writes
def put_at_an_index(p, b):
    h = features(p, b)
    buffer = torch.zeros_like(h).index_put((b["label"],), h, accumulate=True) if len(h) > 1 else h
    return squares(h + buffer)


@writes
def mean_subtracted_in_place(p, b):
    h = features(p, b).clone()
    h.sub_(h.detach().mean(0))
    return squares(h)


@writes
def copied_behind_autograd(p, b):
    h = features(p, b) * 1.0
    h.data.copy_(h.data.roll(1, 0))
    return squares(h.clone() * b["y"])


@writes
def numpy_writes_into_memory(p, b):
    y = b["y"].clone()
    y.numpy()[:] += y.numpy().mean(0)
    return squares(features(p, {"y": y}))


@writes
def batch_written_into(p, b):
    """The caller's batch is another one after the call."""
    if len(b["y"]) > 1:
        b["y"].sub_(b["y"].mean(0))
    return squares(features(p, b))


@writes
def prefix_sums_in_a_loop(p, b):
    h, state, out = features(p, b), torch.zeros(D, dtype=p["w"].dtype), []
    for i in range(len(h)):
        state = 0.5 * state + h[i]
        out.append(state)
    return squares(torch.stack(out))
