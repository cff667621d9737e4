"""Recurrent layers of a row: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A layer in one direction has two products, of its inputs and of its states. The gradients of all their steps go to the
rule of a linear layer together, which so sees each matrix once. Packed sequences are those of one row, as long as it
says. Axis letters: T steps, B samples, d features, H state, G gates times H, L layers times directions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._book_keeping import Tap, credit_use, made_plain
from dpfunc.engines._composite import gru_step, relu_step, tanh_step
from dpfunc.engines._levels import Handler, Node, Pass, apply_node, of_rows
from dpfunc.engines._native import ANCHOR, Kernel, Native, Results
from dpfunc.engines._numerics import exact
from dpfunc.engines._reads import read
from dpfunc.engines._rules import RULES

_LINEAR = RULES[F.linear]


class Product(NamedTuple):
    """A product `x W^T + b` in all steps of a layer; `wanted`: the parameters in it, by arguments of `F.linear`."""

    owner: Pass
    weight: Tensor
    bias: Tensor | None
    wanted: Mapping[str, tuple[str, Tensor]]

    def credit(self, grad_TBG: Tensor, x_TBd: Tensor) -> None:
        """Give the gradients of its parameters to their rule."""
        if self.wanted:
            given = {"input": x_TBd.detach()}
            use = _LINEAR.use("linear", self.owner.levels.rows, self.wanted, given, grad_TBG.shape, axis=1)
            with exact(grad_TBG.device):
                credit_use(self.owner, use, grad_TBG, given)


_Products = tuple[Product, Product]
"""Those of the inputs and of the states of a layer in one direction."""


def _begin(first_B: Tensor, length: int) -> Tensor:
    """Memory for the state before all steps, which is set, and after each."""
    states_TB = first_B.new_empty(length + 1, *first_B.shape)
    states_TB[0] = first_B
    return states_TB


class _Lstm(Node):
    """An LSTM from the share of the inputs: outputs (T, B, H), and the last cell (B, H).

    Its walk back gives the gradients of all gates, by fewer operations than the graph of torch.
    """

    @staticmethod
    def forward(ctx: Any, state: Product, gates_TBG: Tensor, h_BH: Tensor, c_BH: Tensor) -> tuple[Tensor, Tensor]:
        """`c = f c + i g`, `h = o tanh(c)`. The share of the inputs is overwritten with the gates."""
        states_TBH, cells_TBH = _begin(h_BH, len(gates_TBG)), _begin(c_BH, len(gates_TBG))
        tanh_TBH = torch.empty_like(cells_TBH[1:])
        h, c, tanh, gates = (value.unbind(0) for value in (states_TBH, cells_TBH, tanh_TBH, gates_TBG))
        i, f, g, o = (gate.unbind(0) for gate in gates_TBG.chunk(4, 2))
        i_and_f, weight = gates_TBG[..., : 2 * c_BH.shape[1]].unbind(0), state.weight.to(gates_TBG.dtype)
        turned = weight.T.contiguous()  # the products of all steps read it
        for t in range(len(gates)):
            gates[t].addmm_(h[t], turned)
            i_and_f[t].sigmoid_()
            o[t].sigmoid_()
            torch.mul(i[t], g[t].tanh_(), out=c[t + 1]).addcmul_(f[t], c[t])
            torch.mul(o[t], torch.tanh(c[t + 1], out=tanh[t]), out=h[t + 1])
        ctx.state = state
        ctx.save_for_backward(weight, states_TBH, gates_TBG, cells_TBH, tanh_TBH)
        return states_TBH[1:].clone(), c[-1].clone()  # the loss may write into them

    @staticmethod
    def backward(ctx: Any, grad_TBH: Tensor, grad_BH: Tensor) -> Any:
        weight, states_TBH, gates_TBG, cells_TBH, tanh_TBH = ctx.saved_tensors
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
        dh_BH, dc_BH = grads[-1], grad_BH
        for t in reversed(range(len(grads))):
            dc_BH = torch.addcmul(dc_BH, dh_BH, to_cells[t])
            of_cells[t].mul_(dc_BH[:, None])  # slopes become gradients
            of_outputs[t].mul_(dh_BH)
            dh_BH = torch.addmm(grads[t - 1], gates[t], weight) if t else gates[t] @ weight
            dc_BH = dc_BH * keeps[t]
        ctx.state.credit(shares_TBG, states_TBH[:-1])
        return None, shares_TBG, dh_BH, dc_BH


def _lstm(state: Product, gates_TBG: Tensor, *firsts: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = apply_node(_Lstm, state, gates_TBG, *firsts)
    return found


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The state after a step, from the shares of the input and of the state, and the state before."""


def _by_steps(step: Step, state: Product, gates_TBG: Tensor, first_BH: Tensor) -> tuple[Tensor, ...]:
    """A layer step by step, with the graph of torch. The bias stands for the product, whose gradients are its own."""
    bias = gates_TBG.new_zeros(()) if state.bias is None else state.bias.to(gates_TBG.dtype)
    states, before = [first_BH.clone()], list[Tensor]()  # the loss may write into the first one
    turned = state.weight.to(gates_TBG.dtype).T.contiguous()  # the products of all steps read it
    bias_TBG = apply_node(
        Tap, bias.expand(gates_TBG.shape), ANCHOR, lambda grad_TBG: state.credit(grad_TBG, torch.stack(before))
    )
    for share_BG, bias_BG in zip(gates_TBG.unbind(0), bias_TBG.unbind(0), strict=True):
        before.append(states[-1].detach())
        states.append(step(share_BG, torch.addmm(bias_BG, states[-1], turned), states[-1]))
    return (torch.stack(states[1:]),)


KINDS: Mapping[Callable[..., Any], Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: partial(_by_steps, gru_step),
    torch.rnn_tanh: partial(_by_steps, tanh_step),
    torch.rnn_relu: partial(_by_steps, relu_step),
}
"""The steps of a layer in one direction, from the product of its states, the share of its inputs, and first states."""


def _direction(func: Any, inputs: Product, state: Product, x_TBd: Tensor, firsts: Sequence[Tensor]) -> Results:
    """Outputs (T, B, H) of a layer in one direction; and, for an LSTM, the last cell (B, H)."""
    bias = inputs.bias
    if func is torch.lstm and bias is not None and state.bias is not None:
        bias = bias + state.bias
    x_TBd = x_TBd.contiguous()  # one product; torch would take a product for each step
    gates_TBG = apply_node(Tap, F.linear(x_TBd, inputs.weight, bias), ANCHOR, inputs.credit, x_TBd)
    with torch.autocast(x_TBd.device.type, enabled=False):
        return KINDS[func](state, gates_TBG, *(first.to(gates_TBG.dtype) for first in firsts))


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


def _layers(
    func: Any, products: Sequence[_Products], x_TBd: Tensor, firsts: Sequence[Sequence[Tensor]], bidirectional: bool
) -> Results:
    """All layers, one after the other: outputs (T, B, H), then the last states (L, B, H)."""
    lasts, outputs = [], list[Tensor]()
    for place, own in enumerate(products):
        turned = bidirectional and place % 2
        x = x_TBd.flip(0) if turned else x_TBd
        out, *cell = _direction(func, *own, x, [first[place] for first in firsts])
        lasts.append((out[-1], *cell))
        outputs.append(out.flip(0) if turned else out)
        if turned or not bidirectional:
            x_TBd = torch.cat(outputs, 2) if bidirectional else out
            outputs.clear()
    return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))


def _walked(owner: Pass, func: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    """One layer of a row by its steps below both levels; NotImplemented where vmap and grad are to do it."""
    axis = 0 if bound["batch_first"] else 1
    states = [bound["hx"]] if isinstance(bound["hx"], Tensor) else list(bound["hx"])
    products = _products(owner, bound) if owner.is_open() and _is_walked(bound, axis, states) else None
    if products is None:
        return NotImplemented

    def call(x_B: Tensor, *states_B: Tensor) -> Results:
        owner.expect(name for own in products for product in own for name, _ in product.wanted.values())
        firsts = [state_B.squeeze(2).unbind(1) for state_B in states_B]
        with torch._C.DisableTorchFunction():  # modes would take longer than the operations
            out, *lasts = _layers(func, products, x_B.squeeze(1 + axis).transpose(0, 1), firsts, bound["bidirectional"])
        return (out.transpose(0, 1).unsqueeze(1 + axis), *(last.transpose(0, 1).unsqueeze(2) for last in lasts))

    wanted = [value.requires_grad for value in (bound["input"], *states)]
    return apply_node(Native, Kernel(owner, call, wanted), owner.anchor, bound["input"], *states)


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


def _products(owner: Pass, bound: Mapping[str, Any]) -> list[_Products] | None:
    """The products of inputs and of states, direction by direction; None where weights are of a row."""
    found, each = list[Product](), 4 if bound["has_biases"] else 2
    for place in range(0, len(bound["params"]), each):
        inputs, state, *biases = bound["params"][place : place + each]
        for weight, bias in zip((inputs, state), biases or (None, None), strict=True):
            plain = {"weight": weight, "bias": bias}
            wanted = made_plain(owner, _LINEAR, "input", plain)
            if wanted is None:
                return None
            own = {name: value.detach() for name, value in plain.items() if value is not None}
            found.append(Product(owner, own["weight"], own.get("bias"), wanted))
    return list(zip(found[::2], found[1::2], strict=True))


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
