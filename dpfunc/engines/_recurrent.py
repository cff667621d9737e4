"""Recurrent layers of a row: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A layer in one direction is one node: a walk through all steps, and a walk back that gives the gradients of all gates,
so that a rule sees each matrix once. Packed sequences are those of one row, as long as it says.
Axis letters: T steps, B samples, d features, H state, G gates times H, L layers times directions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._book_keeping import credit_use
from dpfunc.engines._composite import gru_step, relu_step, tanh_step
from dpfunc.engines._levels import Handler, Node, OutsideTransforms, Pass, apply_node, inside, of_rows
from dpfunc.engines._native import ANCHOR, Kernel, Native, Results
from dpfunc.engines._numerics import exact
from dpfunc.engines._reads import read
from dpfunc.engines._rules import RULES


class Weights(NamedTuple):
    """Weights of one layer in one direction."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None


class _Walked(NamedTuple):
    """The states of a layer and what its walk back needs; the last cell of an LSTM."""

    states_TBH: Tensor
    kept: tuple[Tensor, ...]
    cell_BH: Tensor | None = None


class _Gradients(NamedTuple):
    """Results of a walk back: gradients of the shares of inputs and of states, if they differ, and of first states."""

    inputs_TBG: Tensor
    states_TBG: Tensor
    firsts: Sequence[Tensor]


def _begin(first_B: Tensor, length: int) -> Tensor:
    """Memory for the state before all steps, which is set, and after each."""
    states_TB = first_B.new_empty(length + 1, *first_B.shape)
    states_TB[0] = first_B
    return states_TB


def _lstm(gates_TBG: Tensor, weights: Weights, h_BH: Tensor, c_BH: Tensor) -> _Walked:
    """`c = f c + i g`, `h = o tanh(c)`, from the share of the inputs, which is overwritten with the gates."""
    states_TBH, cells_TBH = _begin(h_BH, len(gates_TBG)), _begin(c_BH, len(gates_TBG))
    tanh_TBH = torch.empty_like(cells_TBH[1:])
    h, c, tanh, gates = (value.unbind(0) for value in (states_TBH, cells_TBH, tanh_TBH, gates_TBG))
    i, f, g, o = (gate.unbind(0) for gate in gates_TBG.chunk(4, 2))
    i_and_f, matrix = gates_TBG[..., : 2 * c_BH.shape[1]].unbind(0), weights.state.T
    for t in range(len(gates)):
        gates[t].addmm_(h[t], matrix)
        i_and_f[t].sigmoid_()
        o[t].sigmoid_()
        torch.mul(i[t], g[t].tanh_(), out=c[t + 1]).addcmul_(f[t], c[t])
        torch.mul(o[t], torch.tanh(c[t + 1], out=tanh[t]), out=h[t + 1])
    return _Walked(states_TBH, (gates_TBG, cells_TBH, tanh_TBH), c[-1])


def _lstm_back(walked: Sequence[Tensor], weights: Weights, grad_TBH: Tensor, grad_BH: Tensor) -> _Gradients:
    _, gates_TBG, cells_TBH, tanh_TBH = walked
    i, f, g, o = gates_TBG.chunk(4, 2)
    shares_TB4H = torch.addcmul(gates_TBG, gates_TBG, gates_TBG, value=-1).unflatten(2, (4, -1))
    shares_TB4H[:, :, 0].mul_(g)
    shares_TB4H[:, :, 1].mul_(cells_TBH[:-1])
    torch.addcmul(i, i, g * g, value=-1, out=shares_TB4H[:, :, 2])
    shares_TB4H[:, :, 3].mul_(tanh_TBH)
    to_cell_TBH = torch.addcmul(o, o * tanh_TBH, tanh_TBH, value=-1)
    shares_TBG = shares_TB4H.flatten(2)
    grads, keeps, to_cells, gates = (value.unbind(0) for value in (grad_TBH, f, to_cell_TBH, shares_TBG))
    of_cells, of_outputs = shares_TB4H[:, :, :3].unbind(0), shares_TB4H[:, :, 3].unbind(0)
    dh_BH, dc_BH = torch.zeros_like(grads[0]), grad_BH
    for t in reversed(range(len(grads))):
        dh_BH = dh_BH + grads[t]
        dc_BH = torch.addcmul(dc_BH, dh_BH, to_cells[t])
        of_cells[t].mul_(dc_BH[:, None])  # slopes become gradients
        of_outputs[t].mul_(dh_BH)
        dh_BH = gates[t] @ weights.state
        dc_BH = dc_BH * keeps[t]
    return _Gradients(shares_TBG, shares_TBG, (dh_BH, dc_BH))


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The state after a step, from the shares of the input and of the state, and the state before."""


def _by_steps(step: Step, gates_TBG: Tensor, weights: Weights, first_BH: Tensor) -> _Walked:
    """A layer step by step, with a graph of torch for the walk back."""
    with torch.enable_grad():
        shares_TBG, state = gates_TBG.detach().requires_grad_(), first_BH.detach().requires_grad_()
        own, states = list[Tensor](), [state]
        for share in shares_TBG.unbind(0):
            own.append(F.linear(states[-1], weights.state, weights.state_bias))
            states.append(step(share, own[-1], states[-1]))
    return _Walked(torch.stack(states).detach(), (shares_TBG, *states, *own))


def _by_graph(walked: Sequence[Tensor], weights: Weights, grad_TBH: Tensor) -> _Gradients:
    length = len(grad_TBH)
    shares_TBG, first, *after = walked[1:]
    states, own = after[:length], after[length:]
    of_shares, of_first, *of_own = torch.autograd.grad(states, (shares_TBG, first, *own), grad_TBH.unbind(0))
    return _Gradients(of_shares, torch.stack(of_own), (of_first,))


class Kind(NamedTuple):
    """A kind of recurrent layer: the walk through time, and the walk back; and whether its biases add up."""

    walk: Callable[..., _Walked]
    back: Callable[..., _Gradients] = _by_graph
    adds: bool = False


KINDS: Mapping[Callable[..., Any], Kind] = {
    torch.lstm: Kind(_lstm, _lstm_back, adds=True),
    torch.gru: Kind(partial(_by_steps, gru_step)),
    torch.rnn_tanh: Kind(partial(_by_steps, tanh_step)),
    torch.rnn_relu: Kind(partial(_by_steps, relu_step)),
}


_LINEAR = RULES[F.linear]
Credit = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Function of the input, weight and bias of a product `x W^T + b`, and the gradient of its result (T, B, ...)."""


class _Direction(Node):
    """A layer in one direction: outputs (T, B, H) and, for an LSTM, the last cell (B, H)."""

    @staticmethod
    def forward(
        kind: Kind, weights: Weights, credit: Credit, kept: list[Tensor | None], anchor: Tensor, x_TBd: Tensor,
        *firsts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        bias, further = weights.inputs_bias, weights.state_bias if kind.adds else None
        bias = bias if bias is None or further is None else bias + further
        with torch._C.DisableTorchFunction():
            gates_TBG = F.linear(x_TBd, weights.inputs, bias)
            own = _like(weights, gates_TBG.dtype)
            with torch.autocast(x_TBd.device.type, enabled=False):
                walked = kind.walk(gates_TBG, own, *(first.to(gates_TBG.dtype) for first in firsts))
        kept += (x_TBd, walked.states_TBH, *walked.kept)
        results = (walked.states_TBH[1:], walked.cell_BH)
        return tuple(result.clone() for result in results if result is not None)  # the loss may write into them

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.around, kept = inputs[:4]
        ctx.save_for_backward(*kept)
        kept.clear()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Walk back through time; modes are off, since they would take longer than the operations."""
        (kind, weights, credit), (x_TBd, *walked) = ctx.around, ctx.saved_tensors
        with torch._C.DisableTorchFunction(), torch.autocast(x_TBd.device.type, enabled=False):
            own = _like(weights, grads[0].dtype)
            found = kind.back(walked, own, *grads)
            credit(x_TBd, weights.inputs, weights.inputs_bias, found.inputs_TBG)
            credit(walked[0][:-1], weights.state, weights.state_bias, found.states_TBG)
            x_grad = (found.inputs_TBG @ own.inputs).to(x_TBd.dtype) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, x_grad, *found.firsts


def _like(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights in the dtype of the gates: under autocast another than theirs."""
    return Weights._make(None if value is None else value.to(dtype) for value in weights)


def layers(
    kind: Kind, credit: Credit, x_TBd: Tensor, states: Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A recurrent function of torch on (T, B, d): outputs (T, B, H), then the last states (L, B, H)."""
    directions = 2 if bidirectional else 1
    each, no_biases = len(params) // (num_layers * directions), () if has_biases else (None, None)
    lasts = []
    for layer in range(num_layers):
        outputs = []
        for place in range(layer * directions, (layer + 1) * directions):
            own, turned = params[place * each : (place + 1) * each], place % directions
            weights, firsts = Weights(*own[:2], *no_biases, *own[2:]), (state[place] for state in states)
            out, *cell = apply_node(
                _Direction, kind, weights, credit, [], ANCHOR, x_TBd.flip(0) if turned else x_TBd, *firsts
            )
            lasts.append((out[-1], *cell))
            outputs.append(out.flip(0) if turned else out)
        x_TBd = torch.cat(outputs, 2) if bidirectional else outputs[0]
    return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))


NAMES = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("input", "batch_sizes", *NAMES[1:-1])


def _pack(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pack_padded_sequence` of one sequence: its steps, and a size of one for each."""
    x, lengths, batch_first = args
    numbers = read(owner, Tensor.tolist, (lengths,), {})
    x_TBd = x.transpose(0, 1) if batch_first else x
    if len(numbers) != 1 or x_TBd.shape[1] != 1 or not 0 < numbers[0] <= len(x_TBd):
        return func(x, torch.tensor(numbers, device="cpu"), batch_first)
    return x_TBd[: numbers[0], 0], torch.ones(numbers[0], dtype=torch.int64, device="cpu")


def _pad(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pad_packed_sequence` of one sequence."""
    data, batch_sizes, batch_first, padding_value, total_length = args
    sizes = read(owner, Tensor.tolist, (batch_sizes,), {})
    if set(sizes) != {1}:
        return func(data, torch.tensor(sizes, device="cpu"), *args[2:])
    missing = max(0, total_length - len(sizes))
    padded = torch.cat([data, data.new_full((missing, *data.shape[1:]), padding_value)]) if missing else data
    return padded.unsqueeze(0 if batch_first else 1), torch.tensor([len(sizes)], device="cpu")


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a recurrent layer by name, `batch_sizes` among them for a packed sequence."""
    packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple)))
    return dict(zip(_PACKED if packed else NAMES, args, strict=False), **kwargs)


def _as_padded(owner: Pass, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of a recurrent layer by name, and True for a packed sequence of one row, as a sequence (T, 1, d)."""
    bound = arguments(args, kwargs)
    if "batch_sizes" in bound and set(read(owner, Tensor.tolist, (bound["batch_sizes"],), {})) == {1}:
        del bound["batch_sizes"]
        return {**bound, "input": bound["input"].unsqueeze(1), "batch_first": False}, True
    return bound, False


def layer_by_layer(func: Callable[..., Any], bound: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The layers one after the other, with dropout between them."""
    x, each, directions = bound["input"], len(bound["params"]) // bound["num_layers"], 1 + bound["bidirectional"]
    single = isinstance(bound["hx"], Tensor)
    states, lasts = [bound["hx"]] if single else list(bound["hx"]), []
    for layer in range(bound["num_layers"]):
        own = [state[layer * directions : (layer + 1) * directions] for state in states]
        weights = bound["params"][layer * each : (layer + 1) * each]
        x = F.dropout(x, bound["dropout"], True) if layer else x
        options = (bound["has_biases"], 1, 0.0, False, bound["bidirectional"])
        hx, axis = own[0] if single else own, (bound["batch_first"],) if "batch_first" in bound else ()
        sizes = (bound["batch_sizes"],) if "batch_sizes" in bound else ()
        x, *last = func(x, *sizes, hx, weights, *options, *axis)
        lasts.append(last)
    return (x, *(torch.cat(last) for last in zip(*lasts, strict=True)))


def _crediting(owner: Pass, names: Mapping[int, str]) -> Credit:
    """Gives the gradients of plain parameters, whose names are known by their id, to their rules."""

    def credit(x_TBd: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> None:
        bound = {"input": x_TBd, "weight": weight, "bias": bias}
        trained = {name: value for name, value in bound.items() if value is not None and id(value) in names}
        wanted = {name: (names[id(value)], value) for name, value in trained.items()}
        if wanted:
            use = _LINEAR.use("linear", owner.levels.rows, wanted, bound, grad.shape, axis=1)
            with exact(grad.device):
                credit_use(owner, use, grad, {"input": x_TBd.detach()})

    return credit


def _walked(owner: Pass, func: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    """A recurrent layer of a row by its walks below both levels; NotImplemented where vmap and grad are to do it."""
    axis = 0 if bound["batch_first"] else 1
    states = [bound["hx"]] if isinstance(bound["hx"], Tensor) else list(bound["hx"])
    if not owner.is_open() or not _is_walked(bound, axis, states):
        return NotImplemented
    found = _plain_weights(owner, bound["params"])
    if found is None:
        return NotImplemented
    (plain, credited), given = found, bound["input"]
    states = [_of_row(owner, state) for state in states]
    options = (bound["has_biases"], bound["num_layers"], bound["bidirectional"])

    def call(x_B: Tensor, *states_B: Tensor) -> Results:
        x = x_B.squeeze(1 + axis)  # (B, T, d)
        first = [state_B.squeeze(2).transpose(0, 1) for state_B in states_B]  # (L, B, H)
        owner.expect(credited.values())
        out, *lasts = layers(KINDS[func], _crediting(owner, credited), x.transpose(0, 1), first, plain, *options)
        out = out.transpose(0, 1)
        return (out.unsqueeze(1 + axis), *(last.transpose(0, 1).unsqueeze(2) for last in lasts))

    wanted = [value.requires_grad for value in (given, *states)]
    return apply_node(Native, Kernel(owner, call, wanted), owner.anchor, given, *states)


def _is_walked(bound: Mapping[str, Any], axis: int, states: Sequence[Tensor]) -> bool:
    """True for a batch of one that is not packed, without dropout and projections, with states of all layers."""
    given = bound["input"]
    if "batch_sizes" in bound or of_rows(given) is None or (bound["train"] and bound["dropout"]):
        return False
    length = bound["num_layers"] * (1 + bound["bidirectional"])
    sizes = {state.shape[-1] for state in states}  # an LSTM with projections has two
    return (
        given.ndim == 3
        and given.shape[axis] == 1
        and len(sizes) == 1
        and all(s.ndim == 3 and len(s) == length for s in states)
    )


def _plain_weights(owner: Pass, params: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, str]] | None:
    """Plain weights, and the names of parameters among them by their id; None where other weights are of a row."""
    plain: list[Tensor] = []
    credited: dict[int, str] = {}
    for value in params:
        known = owner.plain(value)
        if known is not None:
            plain.append(known[1].detach())
            credited[id(plain[-1])] = known[0]
        elif value.requires_grad or of_rows(value) is not None:
            return None
        else:
            plain.append(inside(value))
    return plain, credited


def _of_row(owner: Pass, state: Tensor) -> Tensor:
    """A state of a row: those that are the same for all rows, trained ones among them, get an axis of rows."""
    if of_rows(state) is not None:
        return state
    with OutsideTransforms():
        zeros_B = inside(state).new_zeros(owner.levels.rows, 1)
    return state + owner.levels.row(zeros_B)


def _recurrent(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A recurrent layer of a row; NotImplemented where vmap and grad are to do it."""
    bound, packed = _as_padded(owner, args, kwargs)
    if bound["train"] and bound["dropout"] and bound["num_layers"] > 1:
        found = owner.seen(layer_by_layer, (func, bound), {})
    else:
        found = _walked(owner, func, bound) if owner.rules else NotImplemented
        if found is NotImplemented and packed:
            found = func(*bound.values())
    if not packed or found is NotImplemented:
        return found
    output, *lasts = found
    return (output.squeeze(1), *lasts)


RECURRENT_LAYERS: Mapping[Any, Handler] = {
    torch._C._VariableFunctions._pack_padded_sequence: _pack,
    torch._C._VariableFunctions._pad_packed_sequence: _pad,
    **dict.fromkeys(KINDS, _recurrent),
}
