"""nn.LSTM, nn.GRU and nn.RNN, taken apart step by step: torch's own results, and the gradients of single samples."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of, without_gradient

from dpfunc import engines
from dpfunc.engines.rules.recurrent import RECURRENT
from dpfunc.functional import functionalize, with_params

# torch says once that projections are slower
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WORDS, D, H, CLASSES, LENGTH = 9, 4, 5, 3, 4
FAST = ("auto", "vmap")
LAYERS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, batch first": (nn.LSTM, {"batch_first": True}),
    "LSTM, deep, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, no bias": (nn.LSTM, {"bias": False, "batch_first": True}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True, "batch_first": True}),
    "LSTM, projected, no bias": (nn.LSTM, {"proj_size": 2, "bias": False}),
    "GRU": (nn.GRU, {"batch_first": True}),
    "GRU, deep, both directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "GRU, no bias": (nn.GRU, {"bias": False}),
    "tanh": (nn.RNN, {}),
    "relu, deep, both directions": (
        nn.RNN,
        {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True, "batch_first": True},
    ),
    "tanh, no bias": (nn.RNN, {"bias": False, "batch_first": True}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def run(func, *args):
    """An operation on parameters, as it is."""
    return func(*args)


class Classifier(nn.Module):
    """Words -> logits, from all outputs and all last states. `start`: trained initial states."""

    def __init__(self, layer, options, start=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.layer = layer(D, H, **options)
        self.head = nn.LazyLinear(CLASSES)
        directions = self.layer.num_layers * (1 + self.layer.bidirectional)
        sizes = [self.layer.proj_size or H] + [H] * (layer is nn.LSTM)
        self.start = nn.ParameterList([nn.Parameter(torch.randn(directions, 1, size)) for size in sizes * start])

    def forward(self, ids_BT):
        x = self.embed(ids_BT if self.layer.batch_first else ids_BT.T)
        states = tuple(start.expand(-1, len(ids_BT), -1) for start in self.start)
        output, last = self.layer(x, (states if len(states) > 1 else states[0]) if states else None)
        lasts = [last] if isinstance(last, torch.Tensor) else last
        own = output.mean(1 if self.layer.batch_first else 0)
        return self.head(torch.cat([own, *(state.movedim(1, 0).flatten(1) for state in lasts)], 1))


def loss_of(forward):
    return lambda params, batch: F.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")


def batch_of(size, length):
    generator = torch.Generator().manual_seed(10 * size + length)
    return (
        torch.randint(WORDS, (size, length), generator=generator),
        torch.randint(CLASSES, (size,), generator=generator),
    )


def made(make, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        model(batch_of(2, LENGTH)[0].clamp(min=1))  # sizes of the head
        return model.to(dtype)


@cache
def built(name, dtype, start=False):
    """(loss function, parameters) of a classifier."""
    forward, params = functionalize(made(lambda: Classifier(*LAYERS[name], start), dtype))
    return loss_of(forward), params


def check(engine, loss_fn, params, size, length=LENGTH):
    case = Case(loss_fn, params, batch_of(size, length))
    found = differences(engine, case, truth_of(case))
    tolerance = TOLERANCE[next(iter(params.values())).dtype]
    assert not {what: value for what, value in found.items() if not value < tolerance}, f"B={size} T={length}"


@every_layer
def test_results_are_those_of_torch(name):
    layer, options = LAYERS[name]
    recurrent = made(lambda: Classifier(layer, options, True))
    recurrent, start = recurrent.layer, recurrent.start
    x = torch.randn(4, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hx = tuple(each.repeat(1, 3, 1) for each in start)
    function = getattr(torch, recurrent.mode.lower())
    weights = [getattr(recurrent, name) for name in recurrent._flat_weights_names]
    arguments = (x, hx if len(hx) > 1 else hx[0], weights, recurrent.bias, recurrent.num_layers)
    wanted = function(*arguments, 0.0, False, recurrent.bidirectional, False)
    found = RECURRENT[function](run, *arguments, recurrent.bidirectional)
    assert len(found) == len(wanted)
    for own, others in zip(found, wanted, strict=True):
        assert own.shape == others.shape
        assert (own - others).abs().max() < 1e-12


@every_layer
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("engine", ["loop", *FAST])
def test_classifiers_equal_the_loop(engine, dtype, name):
    """Four samples of four words among them."""
    run = ENGINES[engine]()
    for size in (1, 3, 4, 5):
        check(run, *built(name, dtype), size)


@every_layer
def test_every_parameter_has_a_gradient(name):
    """Otherwise the comparisons say nothing about it."""
    loss_fn, params = built(name, torch.float64, start=True)
    assert not without_gradient(truth_of(Case(loss_fn, params, batch_of(5, LENGTH))))


@every_layer
@pytest.mark.parametrize("engine", FAST)
def test_trained_initial_states(engine, name):
    check(ENGINES[engine](), *built(name, torch.float64, start=True), 3)


@pytest.mark.parametrize("name", ["LSTM", "GRU, deep, both directions"])
@pytest.mark.parametrize("engine", FAST)
def test_sequences_of_other_lengths(engine, name):
    """The cache from the first batch does not change the results for batches of another size and length."""
    run = ENGINES[engine]()
    for size, length in ((2, 1), (3, 3), (5, 5), (2, 7)):
        check(run, *built(name, torch.float64), size, length)


@pytest.mark.parametrize("trainable", [r"bias_hh", r"weight_ih", r"weight_hh_l1_reverse|bias_ih_l0$", r"embed|head"])
@pytest.mark.parametrize("engine", FAST)
def test_some_parameters_alone(engine, trainable):
    model = made(lambda: Classifier(*LAYERS["LSTM, deep, both directions"]))
    forward, params = functionalize(model, trainable)
    check(ENGINES[engine](), loss_of(forward), params, 3)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("engine", FAST)
def test_dropout_between_layers(engine, layer):
    """Gradients fit the losses of the same masks, which differ between samples."""
    forward, params = functionalize(made(lambda: Classifier(layer, {"num_layers": 3, "dropout": 0.5})).train())
    ids_BT, labels_B = batch_of(1, LENGTH)
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
    model = made(lambda: Classifier(*LAYERS["LSTM, batch first"]))
    forward, params = functionalize(model)
    (ids_BT, _), before = batch_of(3, LENGTH), model(batch_of(3, LENGTH)[0])
    moved = {name: param + 0.3 for name, param in params.items()}
    check(ENGINES[engine](), loss_of(forward), moved, 3)
    assert (forward(moved, ids_BT) - with_params(model, moved)(ids_BT)).abs().max() < 1e-12
    assert (forward(moved, ids_BT) - before).abs().min() > 1e-3
    assert torch.equal(model(ids_BT), before)


class Packed(Classifier):
    """Sequences of different lengths: those of a sample are its words before the first 0."""

    def __init__(self, layer, options, start=False, enforce_sorted=True):
        super().__init__(layer, options, start)
        self.enforce_sorted = enforce_sorted

    def forward(self, ids_BT):
        first, lengths_B = self.layer.batch_first, (ids_BT != 0).sum(1).clamp(min=1)
        x = self.embed(ids_BT if first else ids_BT.T)
        packed = pack_padded_sequence(x, lengths_B.cpu(), batch_first=first, enforce_sorted=self.enforce_sorted)
        states = tuple(start.expand(-1, len(ids_BT), -1) for start in self.start)
        output, last = self.layer(packed, (states if len(states) > 1 else states[0]) if states else None)
        lasts = [last] if isinstance(last, torch.Tensor) else last
        own = pad_packed_sequence(output, batch_first=first, total_length=ids_BT.shape[1])[0].tanh()
        own = own.sum(1 if first else 0)
        return self.head(torch.cat([own, *(state.movedim(1, 0).flatten(1) for state in lasts)], 1))


def shortened(batch, lengths):
    ids_BT, labels_B = batch
    ids_BT = ids_BT.clamp(min=1)
    return ids_BT * (torch.arange(ids_BT.shape[1])[None] < torch.tensor(lengths)[:, None]), labels_B


PACKED_LENGTHS = ((4, 4, 2), (5, 3, 2, 1), (3, 2, 1, 1, 1))


@every_layer
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "not enforced"])
@pytest.mark.parametrize("engine", FAST)
def test_packed_sequences(engine, enforce_sorted, dtype, name):
    """The longest first."""
    forward, params = functionalize(made(lambda: Packed(*LAYERS[name], True, enforce_sorted), dtype))
    run = ENGINES[engine]()
    for lengths in PACKED_LENGTHS:
        case = Case(loss_of(forward), params, shortened(batch_of(len(lengths), 5), lengths))
        truth = truth_of(case)
        assert not without_gradient(truth)
        found = differences(run, case, truth)
        assert not {what: value for what, value in found.items() if not value < TOLERANCE[dtype]}, lengths


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("engine", FAST)
def test_packed_sequences_in_any_order(engine, layer):
    """What is found out with sorted sequences must not credit the rows of others to the wrong sample."""
    forward, params = functionalize(made(lambda: Packed(layer, {"batch_first": True}, enforce_sorted=False)))
    loss_fn, run = loss_of(forward), ENGINES[engine]()
    for lengths in ((4, 4, 2), (2, 4, 3), (1, 3, 4, 2)):
        case = Case(loss_fn, params, shortened(batch_of(len(lengths), 4), lengths))
        found = differences(run, case, truth_of(case))
        assert not {what: value for what, value in found.items() if not value < 1e-10}, lengths


@every_layer
@pytest.mark.parametrize("engine", FAST)
def test_autocast(engine, name):
    """As near to float32 as single samples are."""
    loss_fn, params = built(name, torch.float32, start=True)
    batch = batch_of(5, LENGTH)

    def shortened_loss(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(params, batch).float()

    wanted = engines.loop()(loss_fn, params, batch).sq_norms()
    found = ENGINES[engine]()(shortened_loss, params, batch).sq_norms()
    largest = max(float(norms_B.max()) for norms_B in wanted.values()) ** 0.5
    for key, norms_B in wanted.items():
        assert (found[key].sqrt() - norms_B.sqrt()).abs().max() < 0.01 * largest, key


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_sixteen_bits_keep_small_numbers(layer):
    """Twice a sigmoid less one has few digits of the tanh of a small number."""
    gates = {}
    for dtype in (torch.float64, torch.float16):
        forward, params = functionalize(made(lambda: Classifier(layer, {"batch_first": True})).layer)
        params = {name: (0.01 * param).to(dtype) for name, param in params.items()}
        x = torch.randn(5, LENGTH, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        found = engines.auto()(lambda params, x, run=forward: run(params, x)[0].sum((1, 2)), params, x)
        first = {name: torch.eye(5, dtype=torch.float64)[0] for name in params}
        gates[dtype] = found.weighted_sum(first)["bias_ih_l0"].double().reshape(-1, H)
    assert ((gates[torch.float16] - gates[torch.float64]).norm(dim=1) < 0.01 * gates[torch.float64].norm(dim=1)).all()


def test_gates_that_are_closed():
    """Where the sigmoid of an output gate is 0, the tanh of the cell cannot be found from the result."""
    forward, params = functionalize(made(lambda: Classifier(*LAYERS["LSTM, batch first"]), torch.float32).layer)
    params["bias_ih_l0"] = params["bias_ih_l0"].clone().index_fill_(0, torch.arange(3 * H, 4 * H - 1), -200.0)
    x = torch.randn(5, LENGTH, D, generator=torch.Generator().manual_seed(0))
    loss_fn = lambda params, x: forward(params, x)[0].square().sum((1, 2))
    wanted, found = (run(loss_fn, params, x).sq_norms() for run in (engines.loop(), engines.auto()))
    for name, norms_B in wanted.items():
        assert (found[name] - norms_B).abs().max() < 1e-5, name


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["LSTM, deep, both directions", "GRU", "tanh"])
def test_longer_sequences_make_no_more_calls(name):
    """An engine looks at each call, so there is none for single steps."""
    layer = made(lambda: Classifier(*LAYERS[name])).layer
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    function = getattr(torch, layer.mode.lower())
    counts = []
    for length in (2, 20):
        hx = torch.zeros(len(weights) // 4, 3, H, dtype=torch.float64)
        with Counting() as mode:
            x = torch.ones(length, 3, D, dtype=torch.float64)
            states = (hx, hx) if layer.mode == "LSTM" else hx
            RECURRENT[function](run, x, states, weights, True, layer.num_layers, layer.bidirectional)
        counts.append(mode.calls)
    assert counts[0] == counts[1] <= 25 * len(weights)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.5}], ids=["", "dropout"])
@pytest.mark.parametrize("model", [Classifier, Packed])
def test_matrices_go_to_their_rule(model, options):
    forward, params = functionalize(made(lambda: model(nn.LSTM, {"batch_first": True, **options})).train())
    uses = engines.explain(loss_of(forward), params, batch_of(3, LENGTH)).uses
    assert {use.op for use in uses if use.parameter.startswith("layer.")} == {"gates"}


@pytest.mark.parametrize("engine", FAST)
def test_gradient_checkpointing(engine):
    forward, params = functionalize(made(lambda: Classifier(*LAYERS["LSTM, batch first"])))
    check(
        ENGINES[engine](),
        loss_of(lambda params, ids_BT: checkpoint(lambda ids: forward(params, ids), ids_BT, use_reentrant=False)),
        params,
        3,
    )
