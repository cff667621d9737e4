"""nn.LSTM, nn.GRU and nn.RNN, taken apart step by step: torch's own results, and the gradients of single samples."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of, without_gradient

from dpfunc import engines
from dpfunc.functional import functionalize, with_params

# torch says once that projections are slower
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WORDS, D, H, CLASSES, LENGTH = 9, 4, 5, 3, 4
DEEP = {"num_layers": 2, "bidirectional": True}
LAYERS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, batch first": (nn.LSTM, {"batch_first": True}),
    "LSTM, deep, both directions": (nn.LSTM, DEEP),
    "LSTM, no bias": (nn.LSTM, {"bias": False, "batch_first": True}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 2, "batch_first": True, **DEEP}),
    "LSTM, projected, no bias": (nn.LSTM, {"proj_size": 2, "bias": False}),
    "GRU": (nn.GRU, {"batch_first": True}),
    "GRU, deep, both directions": (nn.GRU, DEEP),
    "GRU, no bias": (nn.GRU, {"bias": False}),
    "tanh": (nn.RNN, {}),
    "relu, deep, both directions": (nn.RNN, {"nonlinearity": "relu", "batch_first": True, **DEEP}),
    "tanh, no bias": (nn.RNN, {"bias": False, "batch_first": True}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
fast = pytest.mark.parametrize("engine", ["auto", "vmap"])


class Classifier(nn.Module):
    """Words -> logits, from all outputs and all last states.

    `start`: trained initial states. `packed`: sequences of different lengths, a sample's words before the first 0;
    "sorted" if the longest comes first.
    """

    def __init__(self, layer, options, start=False, packed=None):
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.layer = layer(D, H, **options)
        self.head = nn.LazyLinear(CLASSES)
        directions = self.layer.num_layers * (1 + self.layer.bidirectional)
        sizes = [self.layer.proj_size or H] + [H] * (layer is nn.LSTM)
        self.start = nn.ParameterList([nn.Parameter(torch.randn(directions, 1, size)) for size in sizes * start])
        self.packed = packed

    def forward(self, ids_BT):
        first = self.layer.batch_first
        x = self.embed(ids_BT if first else ids_BT.T)
        if self.packed:
            lengths_B = (ids_BT != 0).sum(1).clamp(min=1).cpu()
            x = pack_padded_sequence(x, lengths_B, batch_first=first, enforce_sorted=self.packed == "sorted")
        states = tuple(start.expand(-1, len(ids_BT), -1) for start in self.start)
        output, last = self.layer(x, (states if len(states) > 1 else states[0]) if states else None)
        if self.packed:
            output = pad_packed_sequence(output, batch_first=first, total_length=ids_BT.shape[1])[0]
        lasts = [last] if isinstance(last, torch.Tensor) else last
        own = output.tanh().sum(1 if first else 0)
        return self.head(torch.cat([own, *(state.movedim(1, 0).flatten(1) for state in lasts)], 1))


def loss_of(forward):
    return lambda params, batch: F.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")


def batch_of(size, length=LENGTH, lengths=None):
    generator = torch.Generator().manual_seed(10 * size + length)
    ids_BT = torch.randint(WORDS, (size, length), generator=generator)
    labels_B = torch.randint(CLASSES, (size,), generator=generator)
    if lengths:
        ids_BT = ids_BT.clamp(min=1) * (torch.arange(length)[None] < torch.tensor(lengths)[:, None])
    return ids_BT, labels_B


def made(layer, options, dtype=torch.float64, **further):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier(layer, options, **further)
        model(batch_of(2)[0].clamp(min=1))  # sizes of the head
        return model.to(dtype)


@cache
def loss_and_params(name, dtype=torch.float64, start=False, packed=None):
    forward, params = functionalize(made(*LAYERS[name], dtype, start=start, packed=packed))
    return loss_of(forward), params


@cache
def case_and_truth(name, *batch, **further):
    """All batches of a model have one loss, as in a run."""
    case = Case(*loss_and_params(name, **further), batch_of(*batch))
    return case, truth_of(case)


def agrees(engine, case, truth):
    found = differences(engine, case, truth)
    tolerance = TOLERANCE[next(iter(case.params.values())).dtype]
    assert not {what: value for what, value in found.items() if not value < tolerance}, len(truth.losses_B)


def check(engine, forward, params, batch):
    case = Case(loss_of(forward), params, batch)
    agrees(engine, case, truth_of(case))


@every_layer
@pytest.mark.parametrize("start", [False, True], ids=["", "trained initial states"])
@pytest.mark.parametrize("engine", ["loop", "auto", "vmap"])
def test_classifiers_equal_the_loop(engine, start, name):
    """Four samples of four words among them; one engine for batches of other sizes and lengths."""
    run = ENGINES[engine]()
    for size, length in ((3, LENGTH), (4, LENGTH)) if start else ((1, LENGTH), (4, LENGTH), (2, 1), (5, 7)):
        agrees(run, *case_and_truth(name, size, length, start=start))
    assert not without_gradient(case_and_truth(name, 5, start=start)[1])
    agrees(run, *case_and_truth(name, 3, dtype=torch.float32, start=start))


@every_layer
@fast
def test_packed_sequences(engine, name):
    """The rows of others must not be credited to the wrong sample, in whatever order they come."""
    run = ENGINES[engine]()
    for lengths in ((4, 4, 2), (2, 4, 3), (1, 3, 4, 2), (3, 2, 1, 1, 1)):
        case, truth = case_and_truth(name, len(lengths), 5, lengths, start=True, packed="in any order")
        agrees(run, case, truth)
        assert not without_gradient(truth)
    agrees(run, *case_and_truth(name, 4, 5, (5, 3, 2, 1), packed="sorted"))


@pytest.mark.parametrize("trainable", [r"bias_hh", r"weight_ih", r"weight_hh_l1_reverse|bias_ih_l0$", r"embed|head"])
@fast
def test_some_parameters_alone(engine, trainable):
    check(ENGINES[engine](), *functionalize(made(nn.LSTM, DEEP), trainable), batch_of(3))


@pytest.mark.parametrize("packed", [None, "in any order"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_dropout_between_layers(engine, layer, packed):
    """Gradients fit the losses of the same masks, which differ between samples."""
    forward, params = functionalize(made(layer, {"num_layers": 3, "dropout": 0.5}, packed=packed).train())
    ids_BT, labels_B = batch_of(1)
    batch, run = (ids_BT.expand(5, -1), labels_B.expand(5)), ENGINES[engine]()
    generator = torch.Generator().manual_seed(0)
    step = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}

    def at(scale):
        torch.manual_seed(1)
        return run(loss_of(forward), {name: p + scale * step[name] for name, p in params.items()}, batch)

    found = at(0.0)
    along_B = sum((found.grads[name].dense() * step[name]).flatten(1).sum(1) for name in params)
    change_B = (at(1e-6).losses_B - at(-1e-6).losses_B) / 2e-6
    assert len(set(found.losses_B.tolist())) == 5
    assert (along_B - change_B).abs().max() < 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_use_the_parameters_that_are_passed(engine):
    """Recurrent layers keep a second list of their weights: that of the module must not be used, nor be changed."""
    model = made(nn.LSTM, {"batch_first": True})
    forward, params = functionalize(model)
    ids_BT, before = batch_of(3)[0], model(batch_of(3)[0])
    moved = {name: param + 0.3 for name, param in params.items()}
    check(ENGINES[engine](), forward, moved, batch_of(3))
    assert (forward(moved, ids_BT) - with_params(model, moved)(ids_BT)).abs().max() < 1e-12
    assert (forward(moved, ids_BT) - before).abs().min() > 1e-3
    assert torch.equal(model(ids_BT), before)


@every_layer
@fast
def test_autocast(engine, name):
    """As near to float32 as single samples are."""
    model = made(*LAYERS[name], dtype=torch.float32, start=True)
    forward, params = functionalize(model)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(batch_of(5)[0])
    except RuntimeError:  # torch alone cannot run it, on a CPU without instructions for bfloat16
        pytest.skip("torch has no kernel for a recurrent layer in bfloat16 on this CPU")

    def loss_fn(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(forward)(params, batch).float()

    wanted = engines.loop()(loss_of(forward), params, batch_of(5)).sq_norms()
    found = ENGINES[engine]()(loss_fn, params, batch_of(5)).sq_norms()
    largest = max(float(norms_B.max()) for norms_B in wanted.values()) ** 0.5
    for key, norms_B in wanted.items():
        assert (found[key].sqrt() - norms_B.sqrt()).abs().max() < 0.01 * largest, key


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_sixteen_bits_keep_small_numbers(layer):
    """Twice a sigmoid less one has few digits of the tanh of a small number."""
    gates = {}
    for dtype in (torch.float64, torch.float16):
        forward, params = functionalize(made(layer, {"batch_first": True}).layer)
        params = {name: (0.01 * param).to(dtype) for name, param in params.items()}
        x = torch.randn(5, LENGTH, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        found = engines.auto()(lambda params, x, run=forward: run(params, x)[0].sum((1, 2)), params, x)
        first = {name: torch.eye(5, dtype=torch.float64)[0] for name in params}
        gates[dtype] = found.weighted_sum(first)["bias_ih_l0"].double().reshape(-1, H)
    assert ((gates[torch.float16] - gates[torch.float64]).norm(dim=1) < 0.01 * gates[torch.float64].norm(dim=1)).all()


def test_gates_that_are_closed():
    """Where the sigmoid of an output gate is 0, the tanh of the cell cannot be found from the result."""
    forward, params = functionalize(made(nn.LSTM, {"batch_first": True}, torch.float32).layer)
    params["bias_ih_l0"] = params["bias_ih_l0"].clone().index_fill_(0, torch.arange(3 * H, 4 * H - 1), -200.0)
    x = torch.randn(5, LENGTH, D, generator=torch.Generator().manual_seed(0))
    loss_fn = lambda params, x: forward(params, x)[0].square().sum((1, 2))
    wanted, found = (run(loss_fn, params, x).sq_norms() for run in (engines.loop(), engines.auto()))
    for name, norms_B in wanted.items():
        assert (found[name] - norms_B).abs().max() < 1e-5, name


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.5}], ids=["", "dropout"])
@pytest.mark.parametrize("packed", [None, "in any order"])
@every_layer
def test_matrices_go_to_their_rule(name, packed, options):
    """All but those of layers with projections, which vmap and grad compute."""
    layer, own = LAYERS[name]
    forward, params = functionalize(made(layer, {**own, **options}, packed=packed).train())
    uses = engines.explain(loss_of(forward), params, batch_of(3)).uses
    ways = {use.op for use in uses if use.parameter.startswith("layer.")}
    assert ways == {"vmap(grad)" if "proj_size" in own else "linear"}


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_loss_may_write_into_states_and_results(layer):
    """Of the values that it gave and got, none is needed in the backward pass."""
    forward, params = functionalize(made(layer, {"batch_first": True}).layer)

    def loss_with(given):
        def loss_fn(params, x):
            first = (x * params["scale"]).mean((1, 2)).expand(1, 1, H) * torch.ones(H, dtype=x.dtype)
            states = (given(first), given(first)) if layer is nn.LSTM else given(first)
            output, last = forward({name: value for name, value in params.items() if name != "scale"}, x, states)
            last = last[0] if layer is nn.LSTM else last
            first.mul_(3)
            return (output.mul_(2).square().sum() + last.add_(1).sum() + first.sum()).reshape(1)

        return loss_fn

    x = torch.randn(3, LENGTH, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = {**params, "scale": torch.ones(D, dtype=torch.float64)}
    engine, loss_fn = engines.auto(), loss_with(lambda first: first)
    truth = truth_of(Case(loss_with(torch.clone), params, x))
    agrees(engine, Case(loss_fn, params, x), truth)
    assert engine.decision(loss_fn).reason == "all rows together"


@fast
def test_gradient_checkpointing(engine):
    forward, params = functionalize(made(nn.LSTM, {"batch_first": True}))
    again = lambda params, ids_BT: checkpoint(lambda ids: forward(params, ids), ids_BT, use_reentrant=False)
    check(ENGINES[engine](), again, params, batch_of(3))
