"""Tables: `grad_i = sum_t e_{id_t} g_t^T`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, table
from dpfunc.engines.per_sample import Gather
from dpfunc.engines.rules.table import REQUIRED, Grads, Rule, Use


def _costs(use: Use) -> Costs:
    """Costs of the table."""
    rows, d = use.shapes["weight"]
    return table(use.output.numel() // max(1, use.num_samples * d), rows, d)


def _embedding(use: Use, grad: Tensor, input: Tensor, padding_idx: int | None, **_: Any) -> Grads:
    """Rows of a table; the padding row gets nothing. `sparse` gives the same gradient, not a sparse one."""
    ids_BT, g_BTd = input.reshape(use.num_samples, -1).long(), use.positions(grad)
    if padding_idx is not None:
        padding = padding_idx % use.shapes["weight"][0]
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


_ARGUMENTS = {
    "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip
RULES = (Rule((F.embedding,), _ARGUMENTS, _embedding, {"weight": ("input",)}, _costs),)
