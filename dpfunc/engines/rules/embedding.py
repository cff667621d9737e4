"""Tables: `grad_i = sum_t e_{id_t} g_t^T`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, table
from dpfunc.engines.per_sample import Gather
from dpfunc.engines.rules.table import Grads, Rule, Use


def _costs(use: Use) -> Costs:
    """Costs of the table."""
    rows, d = use.shapes["weight"]
    return table(use.output.numel() // max(1, use.num_samples * d), rows, d)


def _embedding(
    use: Use,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Grads:
    """Rows of a table; the padding row gets nothing. `sparse` gives the same gradient, not a sparse one."""
    ids_BT, g_BTd = input.reshape(use.num_samples, -1).long(), use.positions(grad)
    rows, _ = use.shapes["weight"]
    if padding_idx is not None:
        padding = padding_idx % rows
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


RULES = (Rule((F.embedding,), _embedding, {"weight": ("input",)}, _costs),)
