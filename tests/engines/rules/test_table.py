"""Each rule at unusual values of each argument, against the loop: what a rule does not name takes vmap(grad)."""

from __future__ import annotations

import pytest
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from zoo.parity import ENGINES, differences, truth_of

from dpfunc import engines
from dpfunc.engines._rules import RULES
from dpfunc.engines._rules.table import of_products

# torch says once that "same" padding of even kernels copies the input
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

B, T, D, OUT, VOCAB = 4, 3, 4, 5, 7


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class P(tuple):
    """The shape of a parameter."""


class X(tuple):
    """The shape of a row, without its axis of rows, which is a batch of one."""


IDS = "ids"
NORMED = {"eps": (1e-5, 0.1)}
CONV = {"stride": (1, 2, (2,), [1]), "dilation": (1, 2), "bias": (None, P((OUT,)), P((1,)), P(()))}
SIZES = {"input": (X((2, T + 4)), "row"), "weight": (P((OUT, 2, 3)), P((OUT, 1, 3)))}
# operation -> name of each argument -> values, the usual one first; each is tried with the usual others.
CALLS = {
    F.linear: {
        "input": (X((T, D)), X((D,)), X(()), "row"), "weight": (P((OUT, D)), P((D,)), P((1, D))),
        "bias": (None, P((OUT,)), P((1,)), P(()), P((1, OUT)), P((T, OUT)), P((1, T, OUT))),
    },
    torch.addmm: {
        "input": (P((OUT,)), P((1,)), P(()), P((1, OUT)), P((1, 1))), "mat1": (X((D,)), X((T, D)), "row"),
        "mat2": (P((D, OUT)), P((D, 1))), "beta": (1, 1.0, 2, 0), "alpha": (1, 0.5, True),
    },
    torch.matmul: {"input": (X((T, D)), X((D,)), "row"), "other": (P((D, OUT)), P((D,)), P((1, D, OUT)), P((T, D, OUT)))},
    torch.mm: {"input": (X((D,)), "row"), "mat2": (P((D, OUT)), P((D, 1)))},
    F.embedding: {
        "input": (IDS, "int32 ids"), "weight": (P((VOCAB, D)), P((VOCAB, 1))), "padding_idx": (None, 0, -1, 2),
        "norm_type": (2.0, 2, 1.0), "scale_grad_by_freq": (False, True), "sparse": (False, True),
    },
    F.embedding_bag: {
        "input": (IDS, "ids of a row"), "weight": (P((VOCAB, D)),), "offsets": (None, "one bag", "two", "left out", "turned"),
        "scale_grad_by_freq": (False, True), "mode": ("mean", "sum", "max"), "sparse": (False, True),
        "padding_idx": (None, 1, -2), "include_last_offset": (False, True),
    },
    torch.index_select: {"input": (P((VOCAB, D)), P((VOCAB,))), "dim": (0, -2, 1, -1), "index": ("ids of a row", "turned ids")},
    torch.Tensor.__getitem__: {"input": (P((VOCAB, D)), P((VOCAB,)), P((VOCAB, D, 2))), "index": (IDS, "turned ids", "mask")},
    F.bilinear: {
        "input1": (X((D,)), X((T, D))), "input2": (X((2,)), X((T, 2))), "weight": (P((OUT, D, 2)), P((1, D, 2))),
        "bias": (None, P((OUT,)), P((1,)), P(())),
    },
    F.layer_norm: {
        "input": (X((T, D)), X((D,)), "row"), "normalized_shape": ((D,), [D], (T, D), torch.Size((D,))),
        "weight": (None, P((D,)), P((T, D)), P((1,)), P((1, D))), "bias": (None, P((D,)), P((T, D)), P((1,))), **NORMED,
    },
    F.group_norm: {
        "input": (X((D, T)), X((D,)), "row"), "num_groups": (2, 1, D), "weight": (None, P((D,)), P((1,)), P((D, 1))),
        "bias": (None, P((D,)), P((1,))), **NORMED,
    },
    F.rms_norm: {"input": (X((T, D)),), "normalized_shape": ((D,), (T, D)), "weight": (None, P((D,)), P((T, D)), P((1,)))},
    F.conv1d: {**SIZES, "padding": (0, 1, (2,), "same", "valid"), "groups": (1, 2), **CONV},
    F.conv_transpose1d: {
        **SIZES, "weight": (P((2, OUT, 3)), P((2, 1, 3))), "padding": (0, 1, [2]), "output_padding": (0, (0,), 1),
        "groups": (1, 2), **CONV,
    },
    F.conv2d: {
        "input": (X((2, 5, 4)), "row"), "weight": (P((OUT, 2, 3, 2)), P((OUT, 2, 1, 1)), P((OUT, 2, 2, 2))), "padding": (0, (1, 0), "same", "valid"),
        "stride": (1, (2, 1), (2,)), "bias": (None, P((OUT,)), P((1,))),
    },
}  # fmt: skip
OFFSETS = {"one bag": (0,), "two": (0, 2), "left out": (0, 1, 2), "turned": (0, 2, 1)}


def calls(names):
    """The usual arguments, and each value of each argument in place of its usual one; pairs of parameters too."""
    usual = {name: values[0] for name, values in names.items()}
    changed = [(name, value) for name, values in names.items() for value in values[1:]]
    yield usual
    for place, (name, value) in enumerate(changed):
        yield {**usual, name: value}
        for other, second in changed[place + 1 :]:
            if other != name:
                yield {**usual, name: value, other: second}


def case_of(func, call):
    params = {name: random(*value) for name, value in call.items() if isinstance(value, P)}
    params["beside"] = random(1)
    shapes = [value for values in CALLS[func].values() for value in values if isinstance(value, X)]
    rows = random(B, *(shapes[0] if shapes else (1,)))
    ids = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(0))
    given = {name: random(B, *value) for name, value in call.items() if isinstance(value, X)}

    def loss_fn(params, batch):
        rows, ids, given = batch
        made = {
            "row": lambda: rows[0], IDS: lambda: ids, "int32 ids": lambda: ids.int(), "ids of a row": lambda: ids[0],
            "turned ids": lambda: -1 - ids[0] if func is torch.index_select else -1 - ids, "mask": lambda: torch.arange(VOCAB) < 3,
        }  # fmt: skip
        arguments = {}
        for name, value in call.items():
            if isinstance(value, str) and name == "offsets":
                arguments[name] = torch.tensor(OFFSETS[value])
            elif isinstance(value, str) and value in made:
                arguments[name] = made[value]()
            else:
                arguments[name] = params[name] if isinstance(value, P) else given.get(name, value)
        out = func(*arguments.values()) if func is torch.Tensor.__getitem__ else func(**arguments)
        flat = out.reshape(1, -1)
        return (flat.square() + flat * torch.arange(1.0, flat.shape[1] + 1, dtype=flat.dtype).sin()).sum(1) * params[
            "beside"
        ]

    return Case(loss_fn, params, (rows, ids, given))


@pytest.mark.parametrize("func", CALLS, ids=lambda func: func.__name__)
def test_each_value_of_each_argument(func):
    """Nothing that torch computes for a row alone is computed otherwise."""
    wrong, compared = {}, 0
    for call in calls(CALLS[func]):
        if func is F.embedding_bag and (call["offsets"] is None) is (call["input"] != IDS):
            continue
        case = case_of(func, call)
        try:
            truth = truth_of(case)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            continue
        compared += 1
        for name in ("auto",) if compared % 3 else ("auto", "ghost"):
            found = differences(ENGINES[name](), case, truth)
            if not all(value < 1e-9 for value in found.values()):
                wrong[name, str(call)] = found
    assert compared
    assert not wrong


def test_each_rule_is_in_the_table():
    known = {of_products, torch.Tensor.addmm, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__}
    known |= {F.conv3d, F.conv_transpose2d, F.conv_transpose3d}  # as those of one and two axes
    known |= {F.cross_entropy}  # without a parameter: tests/engines/test_native.py
    assert RULES.keys() - CALLS.keys() == known


@pytest.mark.parametrize("sizes", [(20, 10), (10, 20)])
def test_one_engine_for_tables_of_several_sizes(sizes):
    run = engines.auto()
    ids = torch.tensor([[1, 2], [3, 3]])
    loss_fn = lambda params, batch: F.embedding(batch, params["v"]).square().sum((1, 2))
    for rows in sizes:
        case = Case(loss_fn, {"v": random(rows, 2)}, ids)
        assert max(differences(run, case, truth_of(case)).values()) < 1e-9


def test_unknown_arguments_take_vmap():
    rule = RULES[F.linear]
    assert rule.bind((1, 2, 3, 4), {}) is None
    assert rule.bind((1, 2), {"out": 3}) is None
    assert rule.bind((1,), {}) is None
    assert not rule.covers({"input": random(2), "weight": nn.Linear(2, 2).weight, "bias": random(1)})
