"""State between calls, kept by modules: buffers, attributes, frozen weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from isolation.cases import Built, D, add, module, squares, usual


class Running(nn.Module):
    """Subtracts an average of earlier batches, kept in a buffer or in an attribute."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.linear = nn.Linear(D, D)
        self.register_buffer("average", torch.zeros(D, dtype=torch.float64))
        self.kept = None

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        if self.where == "buffer":
            out = h - self.average.clone()
            with torch.no_grad():
                self.average.mul_(0.5).add_(0.5 * h.detach().mean(0))
            return out
        if self.where == "new buffer":
            out, self.average = h - self.average, 0.5 * self.average + 0.5 * h.detach().mean(0)
            return out
        out = h if self.kept is None else h - self.kept
        self.kept = h.detach().mean(0)
        return out


class OwnWeights(nn.Module):
    """Changes a frozen weight of its own while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.frozen = nn.Linear(D, D, bias=False).requires_grad_(False)

    def forward(self, x):
        out = self.linear(torch.tanh(self.frozen(x)))
        self.frozen.weight.data += 0.1 * x.detach().mean(0)
        return out


class Lagging(nn.Module):
    """Normalises by the statistics of earlier batches: those of this batch count from the next one on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D, affine=False)

    def forward(self, x):
        out = F.batch_norm(x, self.norm.running_mean.clone(), self.norm.running_var.clone())
        with torch.no_grad():
            self.norm.running_mean.lerp_(x.mean(0), 0.5)
            self.norm.num_batches_tracked += 1
        return out


def _keeps(make, trained="linear"):
    def build():
        net, parameters = module(make)
        chosen = {name: value for name, value in parameters.items() if trained in name}
        return Built(lambda p, b: squares(functional_call(net, p, (b["y"],))), chosen, usual())

    return build


for _where in ("buffer", "new buffer", "attribute"):
    add(f"module with an average in its {_where}", "state: modules", _keeps(lambda w=_where: Running(w)), honest=False)
add("module that changes its own weights", "state: modules", _keeps(OwnWeights), honest=False)
add(
    "batch norm with momentum, then its statistics",
    "state: modules",
    _keeps(lambda: nn.Sequential(nn.Linear(D, D), Lagging()), "0."),
    honest=False,
)
