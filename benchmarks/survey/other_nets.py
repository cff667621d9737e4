"""Nets written in plain torch: what people have in their own projects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.survey import forward_passes as passes
from benchmarks.survey import generative_nets
from benchmarks.survey.case import (
    BATCH,
    CLASSES,
    Case,
    Subject,
    cases_of,
    class_loss,
    classes,
    images,
    lambda_net,
    mean_square,
    plain_net,
    randn,
)  # fmt: skip

Loss = Callable[..., Tensor]


def linear(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def recurrent(kind: str, **options: Any) -> Callable[[], nn.Module]:
    width = 8 * (2 if options.get("bidirectional") else 1)
    return lambda_net(
        lambda: {"rnn": getattr(nn, kind)(6, 8, batch_first=True, **options), "head": nn.Linear(width, CLASSES)},
        lambda net, x: net["head"](net["rnn"](x)[0].mean(1)),
    )


def packed(kind: str) -> Callable[[], nn.Module]:
    def run(net: Any, x: Tensor, lengths_B: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, lengths_B.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(net["rnn"](rows)[0], batch_first=True, total_length=x.shape[1])
        return net["head"](out.sum(1) / lengths_B[:, None])

    return lambda_net(lambda: {"rnn": getattr(nn, kind)(6, 8, batch_first=True), "head": nn.Linear(8, CLASSES)}, run)


def cells(kind: str) -> Callable[[], nn.Module]:
    def run(net: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(x.shape[1]):
            state = net["cell"](x[:, step], state)
        return net["head"](state[0] if isinstance(state, tuple) else state)

    return lambda_net(lambda: {"cell": getattr(nn, kind)(6, 8), "head": nn.Linear(8, CLASSES)}, run)


def encoder(**options: Any) -> Callable[[], nn.Module]:
    def parts() -> dict[str, nn.Module]:
        layer = nn.TransformerEncoderLayer(
            16, 2, 24, batch_first=options.get("first", True), **options.get("layer", {})
        )
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return {"stack": stack, "head": nn.Linear(16, CLASSES)}

    def run(net: Any, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        if not options.get("first", True):
            return net["head"](net["stack"](x.transpose(0, 1)).mean(0))
        return net["head"](net["stack"](x, src_key_padding_mask=hidden)[:, 0])

    return lambda_net(parts, run)


def convolutional(norm: Callable[[int], nn.Module], last: Callable[[], nn.Module] = nn.ReLU) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(8), last(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2), norm(8), last(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, CLASSES)
    )


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and used
        return torch.nn.utils.weight_norm(layer)


class Symmetric(nn.Module):
    """A parametrization: w + w^T."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    layer = nn.Linear(6, 6)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, CLASSES))


def blocks(*names: str) -> dict[str, nn.Module]:
    return {**{name: nn.Linear(6, 6) for name in names}, "head": nn.Linear(6, CLASSES)}


def siamese(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    return (F.cosine_similarity(call(b["x"]), call(b["other"])) - b["same"]).square()


def triplet(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    anchor, near, far = call(b["x"]), call(b["near"]), call(b["far"])
    distance = torch.cdist(anchor[:, None], torch.stack((near, far), 1))[:, 0]
    return F.relu(distance[:, 0] - distance[:, 1] + 1.0)


def factors(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    return (call(b["user"], b["items"]) - b["rating"]).square()


def factorised(net: Any, user_B: Tensor, items_BK: Tensor) -> Tensor:
    """Bags of items as one row of indices with offsets, as recommenders write it."""
    offsets = torch.arange(len(items_BK)) * items_BK.shape[1]
    return (net["user"](user_B) * net["bag"](items_BK.flatten(), offsets)).sum(1) + net["bias"](user_B)[:, 0]


def ctc(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    scores = call(b["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, b["labels"], b["frames"], b["lengths"], reduction="none")


def mixed_up(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """Mixes the samples of a batch; a row alone is mixed with itself."""
    other = b["x"].flip(0)
    return F.cross_entropy(call(0.7 * b["x"] + 0.3 * other), b["y"], reduction="none")


def penalised(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """The gradient with respect to the input is in the loss."""
    x = b["x"].detach().requires_grad_()
    out = call(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    return F.cross_entropy(out, b["y"], reduction="none") + slope.square().sum(1)


def gnn() -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, 8), "second": nn.Linear(8, 8), "head": nn.Linear(8, CLASSES)}


X, SEQUENCE, Y = randn(BATCH, 6), randn(BATCH, 7, 6), classes()
TOKENS_, POINTS = randn(BATCH, 7, 16), randn(BATCH, 9, 3)
PADDING = torch.arange(7)[None] >= torch.tensor([7, 3, 5, 2])[:, None]
ADJACENCY = (randn(BATCH, 7, 7) > 0).float() + torch.eye(7)


def on(make: Callable[[], nn.Module], x: Tensor = X) -> Callable[[], Subject]:
    return plain_net(make, class_loss, x=x, y=Y)


def two(make: Callable[[], nn.Module], **inputs: Tensor) -> Callable[[], Subject]:
    """Class losses of nets with several inputs."""

    def loss(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(call(*(b[name] for name in inputs)), b["y"], reduction="none")

    return plain_net(make, loss, **inputs, y=Y)


def with_two(
    parts: Callable[[], Mapping[str, nn.Module]], run: Callable[..., Any], **inputs: Tensor
) -> Callable[[], Subject]:
    return two(lambda_net(parts, run), **inputs)


def net_of(parts: Callable[[], Mapping[str, nn.Module]], run: Callable[..., Any], x: Tensor) -> Callable[[], Subject]:
    return on(lambda_net(parts, run), x)


def same_norm(kind: str, *before: int) -> Callable[[int], nn.Module]:
    return lambda width: getattr(nn, kind)(*before, width)


def moe_parts() -> dict[str, nn.Module]:
    return {"gate": nn.Linear(6, 3), **{f"expert{i}": linear(6, 8, 6) for i in range(3)}, "head": nn.Linear(6, CLASSES)}


NETS: dict[str, Callable[[], Subject]] = {
    "MLP": on(lambda: linear(6, 16, 16, CLASSES)),
    "MLP dropout": on(lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))),
    "MLP BatchNorm": on(lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))),
    "MLP LayerNorm": on(lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES))),
    "MLP RMSNorm PReLU": on(lambda: nn.Sequential(nn.Linear(6, 16), nn.RMSNorm(16), nn.PReLU(16), nn.Linear(16,
        CLASSES))),
    "logistic regression": on(lambda: nn.Linear(6, CLASSES)),
    "bilinear": with_two(lambda: {"b": nn.Bilinear(6, 6, CLASSES)}, lambda net, x, z: net["b"](x, z), x=X,
        z=randn(BATCH, 6, seed=9)),
    "CNN": on(convolutional(lambda width: nn.Identity()), images(8)),
    "CNN GroupNorm": on(convolutional(same_norm("GroupNorm", 2)), images(8)),
    "CNN BatchNorm": on(convolutional(same_norm("BatchNorm2d")), images(8)),
    "CNN InstanceNorm": on(convolutional(lambda width: nn.InstanceNorm2d(width, affine=True)), images(8)),
    "CNN Dropout2d": on(convolutional(lambda width: nn.Dropout2d(0.2)), images(8)),
    "conv 3d": on(lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2), nn.Flatten(),
        nn.Linear(128, CLASSES)), randn(BATCH, 1, 5, 5, 5)),
    "LSTM": on(recurrent("LSTM"), SEQUENCE),
    "LSTM two layers dropout": on(recurrent("LSTM", num_layers=2, dropout=0.1), SEQUENCE),
    "GRU": on(recurrent("GRU"), SEQUENCE),
    "RNN": on(recurrent("RNN"), SEQUENCE),
    "BiLSTM": on(recurrent("LSTM", bidirectional=True), SEQUENCE),
    "BiGRU two layers": on(recurrent("GRU", bidirectional=True, num_layers=2), SEQUENCE),
    "LSTM packed": two(packed("LSTM"), x=SEQUENCE, n=torch.tensor([7, 3, 5, 2])),
    "GRU packed": two(packed("GRU"), x=SEQUENCE, n=torch.tensor([7, 3, 5, 2])),
    "LSTM cells": on(cells("LSTMCell"), SEQUENCE),
    "GRU cells": on(cells("GRUCell"), SEQUENCE),
    "transformer encoder": on(encoder(), TOKENS_),
    "transformer encoder pre-norm": on(encoder(layer={"norm_first": True, "activation": "gelu"}), TOKENS_),
    "transformer encoder (T, B)": on(encoder(first=False), TOKENS_),
    "transformer encoder padded": two(encoder(), x=TOKENS_, hidden=PADDING),
    "transformer": plain_net(
        lambda: nn.Transformer(16, 2, 1, 1, 24, batch_first=True), lambda call, b: mean_square(call(b["x"],
            b["z"]) - b["z"]),
        x=TOKENS_, z=randn(BATCH, 3, 16, seed=7)),
    "graph convolution": with_two(gnn, passes.graph, x=SEQUENCE, a=ADJACENCY),
    "graph attention": with_two(lambda: {"first": nn.Linear(6, 8), "left": nn.Linear(8, 1), "right": nn.Linear(8, 1),
                                         "head": nn.Linear(8, CLASSES)}, passes.graph_attention, x=SEQUENCE,
                                             a=ADJACENCY),
    "DeepSets": net_of(lambda: {"inner": linear(6, 8, 8), "outer": linear(8, 8, CLASSES)}, passes.set_net, SEQUENCE),
    "PointNet": net_of(lambda: {"turn": nn.Linear(3, 9), "line": nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU()),
                                "head": nn.Linear(8, CLASSES)}, passes.point_net, POINTS),
    "capsules": net_of(lambda: {"primary": nn.Linear(6, 16), "routes": nn.Linear(12, 16, bias=False)},
        passes.capsules, X),
    "Perceiver": net_of(lambda: {"latents": nn.Embedding(3, 16), "cross": nn.MultiheadAttention(16, 2,
        batch_first=True),
                                 "own": nn.MultiheadAttention(16, 2, batch_first=True), "head": nn.Linear(16, CLASSES)},
                        passes.perceiver, TOKENS_),
    "experts, dense": net_of(moe_parts, passes.experts(True), SEQUENCE),
    "experts, selected": net_of(moe_parts, passes.experts(False), SEQUENCE),
    "hypernetwork": with_two(lambda: {"hyper": linear(4, 8, 6 * CLASSES)}, passes.hypernetwork, x=X, code=randn(BATCH,
        4,
        seed=8)),
    "LayerDrop": net_of(lambda: blocks("a", "b", "c"), passes.layer_drop, X),
    "drop path": net_of(lambda: blocks("a", "b", "c"), passes.drop_path, X),
    "SpecAugment": net_of(lambda: {"rnn": nn.GRU(6, 8, batch_first=True), "head": nn.Linear(8, CLASSES)},
        passes.spec_augment, SEQUENCE),
    "early exit by value": net_of(lambda: blocks("a", "b"), passes.early_exit, X),
    "spectral norm": on(wrapped(spectral_norm)),
    "weight norm": on(wrapped(weight_norm)),
    "weight norm, old": on(wrapped(old_weight_norm)),
    "orthogonal": on(wrapped(orthogonal)),
    "parametrized symmetric": on(symmetric),
    "Siamese": plain_net(lambda: linear(6, 16, 8), siamese, x=X, other=randn(BATCH, 6, seed=9),
        same=torch.tensor([1.0, 0.0, 1.0, 0.0])),
    "triplet": plain_net(lambda: linear(6, 16, 8), triplet, x=X, near=randn(BATCH, 6, seed=9), far=randn(BATCH, 6,
        seed=10)),
    "matrix factorisation": plain_net(
        lambda_net(lambda: {"user": nn.Embedding(9, 4), "bag": nn.EmbeddingBag(9, 4, mode="mean"),
            "bias": nn.Embedding(9, 1)}, factorised),
        factors, user=classes(9), items=torch.randint(9, (BATCH, 3), generator=torch.Generator().manual_seed(2)),
            rating=randn(BATCH)),
    "CTC": plain_net(lambda_net(lambda: {"rnn": nn.GRU(6, 8, batch_first=True), "head": nn.Linear(8, 5)},
                                        lambda net, x: net["head"](net["rnn"](x)[0])), ctc, x=SEQUENCE,
                     labels=torch.tensor([[1, 2], [3, 3], [4, 1], [2, 0]]), frames=torch.tensor([7, 6, 7, 5]),
                     lengths=torch.tensor([2, 2, 2, 1])),
    "mixup in the batch": plain_net(lambda: linear(6, 16, CLASSES), mixed_up, x=X, y=Y),
    "gradient penalty": plain_net(lambda: linear(6, 16, CLASSES, act=nn.Tanh), penalised, x=X, y=Y),
    **generative_nets.NETS,
}  # fmt: skip
TRAINED_TOO = (
    "MLP dropout", "MLP BatchNorm", "CNN BatchNorm", "CNN InstanceNorm", "CNN Dropout2d", "LSTM two layers dropout",
        "LayerDrop",
    "drop path", "SpecAugment", "spectral norm", "transformer encoder", "transformer encoder padded", "LSTM packed",
)  # fmt: skip
WITH_LORA = ("MLP", "transformer encoder", "graph convolution", "U-Net", "Siamese", "experts, selected", "Perceiver")


def cases() -> list[Case]:
    found = []
    for name, subject in NETS.items():
        more = {"full train": TRAINED_TOO, "LoRA train": WITH_LORA}
        variants = ["full eval", *(variant for variant, names in more.items() if name in names)]
        found += cases_of("other", name, subject, variants)
    for name in ("MLP BatchNorm", "CNN BatchNorm"):
        found += cases_of("other", name, NETS[name], ["GroupNorm train"])
    return found
