"""What torch does wrong without a word: checkpointing, buffers, batch norm, wrappers. Right here, or refused."""

from __future__ import annotations

import pytest
import torch
from models import tiny_bert
from module_cases import same, snapshot
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import dpfunc
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize, with_params
from dpfunc.state import replay


def batchnorm_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


def checkpointing():
    model = tiny_bert().train()
    model.activation_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (batchnorm_model, r"2 BatchNorm layers in training mode.*1, 4.*dpfunc.replace_batchnorm"),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), "1 BatchNorm layers"),
        (checkpointing, r"Gradient checkpointing is on.*gradient_checkpointing_disable\(\)"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "embeddings 0 have max_norm"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"the module \(DataParallel\).*Take its \.module.*one process a device"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), r"0 \(DataParallel\)"),
    ],
)  # fmt: skip
def test_modules_that_cannot_work_are_refused(make, message):
    with pytest.raises(UnsupportedModel, match=message):
        functionalize(make())


def test_batchnorm_switched_on_later_is_refused():
    module = batchnorm_model().eval()
    forward, params = functionalize(module)
    forward(params, torch.randn(1, 3, 8, 8))
    module.train()
    with pytest.raises(UnsupportedModel, match="2 BatchNorm layers"):
        forward(params, torch.randn(1, 3, 8, 8))


def per_sample(forward, params, x):
    return vmap(grad(lambda p, row: forward(p, row[None]).sum()), in_dims=(None, 0))(params, x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(3, 3), use_reentrant

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.use_reentrant)


def test_checkpointing_inside_the_module_is_refused():
    """Recomputing would take the module's own parameters: the gradient would be that of other parameters."""
    module = Checkpointed(False)
    forward, params = functionalize(module)
    x = torch.ones(1, 3)
    with torch.no_grad():  # harmless
        assert torch.equal(forward(params, x), module(x))
    with torch.autograd.graph.save_on_cpu():  # hooks are allowed again after the call
        pass
    with pytest.raises(UnsupportedModel, match=r"uses gradient checkpointing.*gradient_checkpointing_disable"):
        forward({name: p.requires_grad_() for name, p in params.items()}, x)
    with pytest.raises(UnsupportedModel, match="uses gradient checkpointing"):
        per_sample(forward, params, x)


def test_reentrant_checkpointing_is_refused():
    """It would cut the parameters off, or write gradients into the module's own; before the call it is harmless."""
    x = torch.ones(1, 3, requires_grad=True)
    forward, params = functionalize(Checkpointed(True))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    with pytest.raises(UnsupportedModel, match=r"reentrant gradient checkpointing.*gradient_checkpointing_disable"):
        forward(leaves, x)
    with pytest.raises(RuntimeError, match="setup_context"):  # torch itself
        per_sample(forward, params, torch.ones(2, 3))
    forward, params = functionalize(nn.Linear(3, 3))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    assert forward(leaves, checkpoint(torch.tanh, x, use_reentrant=True)).requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_the_whole_call_is_right(use_reentrant):
    forward, params = functionalize(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    params = {name: (p + 1).requires_grad_() for name, p in params.items()}
    x = torch.randn(2, 3)
    call = lambda y, *values: forward(dict(zip(params, values, strict=True)), y).sum()
    checkpoint(call, x, *params.values(), use_reentrant=use_reentrant).backward()
    got = [p.grad for p in params.values()]
    expected = torch.autograd.grad(forward(params, x).sum(), list(params.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class InPlace(nn.Module):
    """Two owners of one buffer; the second one writes."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(3, 3), nn.Module()
        self.register_buffer("mean", torch.zeros(3))
        self.other.register_buffer("alias", self.mean)

    def forward(self, x):
        if self.training:
            self.other.alias.add_(1.0)
        return self.linear(x) + self.mean


class Reassigns(InPlace):
    def forward(self, x):
        if self.training:
            self.mean = self.mean + 1.0
        return self.linear(x) + self.mean


@pytest.mark.parametrize("kind", [InPlace, Reassigns])
@pytest.mark.parametrize("call", [lambda f, p, x: f(p, x), per_sample], ids=["plain", "vmap"])
def test_buffers_that_are_written_are_refused_and_nothing_moves(kind, call):
    module, x = kind().train(), torch.ones(2, 3)
    before = snapshot(module)
    forward, params = functionalize(module)
    with pytest.raises(UnsupportedModel, match="mean"):
        call(forward, params, x)
    assert same(before, snapshot(module))
    assert torch.equal(forward.buffers["mean"], torch.zeros(3))
    module.eval()
    assert torch.equal(forward(params, x), module(x))  # the refused call left nothing behind


def test_buffers_that_are_written_under_compile_are_thrown_away():
    module, x = InPlace().train(), torch.ones(2, 3)
    forward, params = functionalize(module)
    compiled = torch.compile(lambda p, y: forward(p, y), fullgraph=True, backend="aot_eager")
    first, second = compiled(params, x), compiled(params, x)
    assert torch.equal(first, second)
    assert torch.allclose(first, module.linear(x) + 1.0)  # written inside, so that it is not skipped either
    assert torch.equal(module.mean, torch.zeros(3))
    assert torch.equal(forward.buffers["mean"], torch.zeros(3))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


BATCH = torch.arange(80.0).view(20, 4) / 80


def step_of(module):
    """What a private step releases, the names of parameters, and the engine that was chosen."""
    forward, params = functionalize(module)
    plan = dpfunc.Plan(dpfunc.sampling.Poisson(20, 1.0), dpfunc.clipping.Flat(1.0), 1.0, 1, delta=1e-3)
    dp_step = dpfunc.make_dp_step(lambda p, x: forward(p, x).square().sum(1), plan)
    state = replay(dp_step.init(params, dpfunc.insecure_key(4)))
    grads, *_ = dp_step(params, BATCH, state)
    return grads, list(params), dp_step.decision


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": True}])
def test_the_wrapper_of_torch_compile_is_taken_off(options):
    """Names have no prefix, and the step is that of the module inside, with the same engine."""
    module = Parts()
    compiled = torch.compile(module, backend="eager", **options)
    wanted, names, decision = step_of(module)
    found, its_names, its_decision = step_of(compiled)
    assert names == its_names == [name for name, _ in module.named_parameters()]
    assert decision == its_decision
    assert decision.engine == "one pass"
    assert all(torch.equal(found[name], wanted[name]) for name in names)
    trained = dpfunc.with_params(compiled, wanted)
    assert type(trained) is Parts
    assert torch.equal(trained.head.bias, wanted["head.bias"])
    adapter = dpfunc.lora.attach(compiled, dpfunc.insecure_key(0), targets="head", rank=2, alpha=2)
    assert list(adapter.params) == ["head.lora_A", "head.lora_B"]
    assert type(adapter.merge(adapter.params)) is Parts


def clipped_sums(module, engine):
    forward, params = functionalize(module)
    clipped, _ = dpfunc.clipped_grad(
        lambda p, x: forward(p, x).square().sum(1), params, BATCH, dpfunc.clipping.Flat(1.0),
        engine=getattr(dpfunc.engines, engine)(),
    )  # fmt: skip
    return {name.replace("_orig_mod.", ""): value for name, value in clipped.sums.items()}


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("kind", ["a part", "a part as one graph", "in place"])
def test_parts_that_are_compiled_run_without_compilation(engine, kind):
    """In a step, which must see each operation, also where a part says `fullgraph=True`."""
    module = Parts()
    wanted = clipped_sums(module, engine)
    if kind == "in place":
        module.compile(backend="eager", fullgraph=True)
    else:
        module.body = torch.compile(module.body, backend="eager", fullgraph=kind != "a part")
    found = clipped_sums(module, engine)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("function", [functionalize, lambda module: with_params(module, {})])
def test_what_is_no_module_is_named(function):
    with pytest.raises(InvalidArgument, match=r"^Expected a torch module, got dict.$"):
        function({"weight": torch.zeros(2)})
