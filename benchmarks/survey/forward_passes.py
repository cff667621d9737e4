"""Forward passes of nets that are made of named parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.survey.case import CLASSES


def graph(net: Any, x_BND: Tensor, adjacency_BNN: Tensor) -> Tensor:
    hidden = F.relu(adjacency_BNN @ net["first"](x_BND))
    return net["head"](F.relu(adjacency_BNN @ net["second"](hidden)).mean(1))


def graph_attention(net: Any, x_BND: Tensor, adjacency_BNN: Tensor) -> Tensor:
    hidden = net["first"](x_BND)
    scores = (hidden @ net["left"].weight[0])[:, :, None] + (hidden @ net["right"].weight[0])[:, None]
    weights = F.leaky_relu(scores).masked_fill(adjacency_BNN == 0, -1e9).softmax(-1)
    return net["head"]((weights @ hidden).mean(1))


def set_net(net: Any, x_BND: Tensor) -> Tensor:
    return net["outer"](net["inner"](x_BND).sum(1))


def point_net(net: Any, x_BND: Tensor) -> Tensor:
    turn = net["turn"](x_BND.max(1).values).view(-1, 3, 3)
    return net["head"](net["line"]((x_BND @ turn).transpose(1, 2)).amax(2))


def capsules(net: Any, x_BD: Tensor) -> Tensor:
    votes = torch.einsum(
        "bnd,nced->bnce", net["primary"](x_BD).view(-1, 4, 4), net["routes"].weight.view(4, CLASSES, 4, 4)
    )
    scores = torch.zeros(votes.shape[:3])
    out = votes.mean(1)
    for _ in range(2):
        out = torch.einsum("bnc,bnce->bce", scores.softmax(2), votes)
        norm = out.norm(dim=-1, keepdim=True)
        out = out * norm / (1 + norm.square())
        scores = scores + torch.einsum("bnce,bce->bnc", votes, out)
    return out.norm(dim=-1)


def perceiver(net: Any, x_BTD: Tensor) -> Tensor:
    latents = net["latents"].weight.expand(len(x_BTD), -1, -1)
    latents = latents + net["cross"](latents, x_BTD, x_BTD)[0]
    return net["head"]((latents + net["own"](latents, latents, latents)[0]).mean(1))


def experts(dense: bool) -> Callable[..., Tensor]:
    """Mixture of experts: all of them weighted, or each token sent to its best by index."""

    def run(net: Any, x_BTD: Tensor) -> Tensor:
        weights = net["gate"](x_BTD).softmax(-1)
        parts = [net[f"expert{i}"] for i in range(3)]
        if dense:
            out = sum(weights[..., i : i + 1] * part(x_BTD) for i, part in enumerate(parts))
        else:
            best, out = weights.argmax(-1), torch.zeros_like(x_BTD)
            for i, part in enumerate(parts):
                chosen = best == i
                out[chosen] = part(x_BTD[chosen]) * weights[chosen][:, i : i + 1]
        return net["head"](out.mean(1))

    return run


def hypernetwork(net: Any, x_BD: Tensor, code_BE: Tensor) -> Tensor:
    weight = net["hyper"](code_BE).view(-1, CLASSES, 6)
    return torch.einsum("bcd,bd->bc", weight, x_BD)


def layer_drop(net: Any, x: Tensor) -> Tensor:
    for name in ("a", "b", "c"):
        if not (net.training and torch.rand(()) < 0.3):
            x = x + torch.tanh(net[name](x))
    return net["head"](x)


def drop_path(net: Any, x: Tensor) -> Tensor:
    for name in ("a", "b", "c"):
        keep = torch.rand(len(x), 1).lt(0.8).float() / 0.8 if net.training else 1.0
        x = x + keep * torch.tanh(net[name](x))
    return net["head"](x)


def spec_augment(net: Any, x_BTD: Tensor) -> Tensor:
    if net.training:
        start_B1 = torch.randint(0, 4, (len(x_BTD), 1))
        steps = torch.arange(x_BTD.shape[1])[None]
        x_BTD = x_BTD.masked_fill(((steps >= start_B1) & (steps < start_B1 + 2))[..., None], 0.0)
    return net["head"](net["rnn"](x_BTD)[0].mean(1))


def early_exit(net: Any, x: Tensor) -> Tensor:
    hidden = net["a"](x)
    return net["head"](net["b"](hidden) if bool(hidden.sum() > 0) else hidden)
