"""Tables: embedding, indexing by integers. `grad_i = sum_t e_{id_t} g_t^T`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.cost import Costs, table
from dpfunc.engines.per_sample import Gather
from dpfunc.engines.rules.table import Grads, Rule, Use


def _costs(use: Use) -> Costs:
    """Costs of the table."""
    (shape,) = use.shapes.values()
    d = math.prod(shape[1:])
    return table(use.output.numel() // max(1, use.num_samples * d), shape[0], d)


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
    if max_norm is not None or scale_grad_by_freq:
        raise use.refuse("max_norm and scale_grad_by_freq look at the whole batch.")
    ids_BT = use.split(input).reshape(use.num_samples, -1).long()
    g_BTd = use.positions(grad)
    rows, _ = use.shapes["weight"]
    if padding_idx is not None:
        padding = padding_idx % rows
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


def _getitem(use: Use, grad: Tensor, input: Tensor, index: Tensor) -> Grads:
    """Gradient of the table in `table[ids]`, of any shape."""
    if (
        not isinstance(index, Tensor)
        or index.dtype not in (torch.int64, torch.int32)
        or use.shapes["input"].numel() == 0
    ):
        raise use.refuse("only indexing by one tensor of integers has a rule.")
    shape = use.shapes["input"]
    ids_BT = use.split(index).reshape(use.num_samples, -1).long() % shape[0]
    g_BTd = use.split(grad).reshape(*ids_BT.shape, math.prod(shape[1:]))
    return {"input": Gather(ids_BT, g_BTd, tuple(shape))}


def _index_select(use: Use, grad: Tensor, input: Tensor, dim: int, index: Tensor) -> Grads:
    """Gradient of the table in `torch.index_select(table, 0, ids)`."""
    if dim != 0:
        raise use.refuse("only dim=0 has a rule.")
    return _getitem(use, grad, input, index)


RULES = (
    Rule((F.embedding,), _embedding, {"weight": ("input",)}, _costs),
    Rule((Tensor.__getitem__,), _getitem, {"input": ("index",)}, _costs),
    Rule((torch.index_select, Tensor.index_select), _index_select, {"input": ("index",)}, _costs),
)
