"""What torch does wrong without a word: shared layers, checkpointing, buffers, tied names. Right here, or refused."""

from __future__ import annotations

import pytest
import torch
from models import TinyTransformer, tiny_gpt2
from module_cases import same, snapshot
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import dpfunc
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import ATTENTION, functionalize
from dpfunc.state import replay


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def test_one_embedding_under_three_names():
    """T5: `shared` is also `encoder.embed_tokens` and `decoder.embed_tokens`."""
    model, ids = tiny_t5(), torch.tensor([[3, 4, 5]])
    assert model.shared is model.encoder.embed_tokens or model.shared.weight is model.encoder.embed_tokens.weight
    before = snapshot(model)
    forward, params = functionalize(model)
    call = lambda p: forward(p, input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
    got = grad(lambda p: call(p).square().sum())(params)
    assert same(before, snapshot(model))
    model(input_ids=ids, decoder_input_ids=ids).logits.square().sum().backward()
    for name, param in model.named_parameters():
        assert torch.allclose(got[name], param.grad, rtol=1e-4, atol=1e-4 * float(param.grad.abs().max())), name


def test_module_is_put_back_when_its_forward_fails():
    model = TinyTransformer()
    before = snapshot(model)
    forward, params = functionalize(model)
    with pytest.raises(IndexError):
        forward({name: p + 1 for name, p in params.items()}, torch.full((1, 6), 999))
    assert same(before, snapshot(model))


def test_no_gradient_reaches_parameters_that_are_not_trained():
    model = TinyTransformer()
    forward, params = functionalize(model, ["head.bias"])
    leaf = params["head.bias"].requires_grad_()
    forward({"head.bias": leaf}, torch.zeros(1, 6, dtype=torch.long)).sum().backward()
    assert leaf.grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_params_are_contiguous_copies():
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).T)
    params = functionalize(layer).params
    assert all(p.is_contiguous() and not p.requires_grad for p in params.values())
    assert params["weight"].data_ptr() != layer.weight.data_ptr()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(3, 3), use_reentrant

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.use_reentrant)


def test_checkpointing_inside_the_module_is_refused():
    """Recomputing would take the module's own parameters: the gradient would be that of other parameters."""
    forward, params = functionalize(Checkpointed(False))
    x = torch.ones(1, 3)
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    with pytest.raises(UnsupportedModel, match=r"uses gradient checkpointing.*gradient_checkpointing_disable"):
        forward(leaves, x)
    with pytest.raises(UnsupportedModel, match="uses gradient checkpointing"):
        vmap(grad(lambda p, row: forward(p, row[None]).sum()), in_dims=(None, 0))(params, x)


def test_checkpointing_inside_the_module_is_harmless_without_gradients():
    module = Checkpointed(False)
    forward, params = functionalize(module)
    with torch.no_grad():
        assert torch.equal(forward(params, torch.ones(1, 3)), module(torch.ones(1, 3)))
    with torch.autograd.graph.save_on_cpu():  # hooks are allowed again after the call
        pass


def test_reentrant_checkpointing_is_refused():
    """It would cut the parameters off, or write gradients into the module's own."""
    module = Checkpointed(True)
    forward, params = functionalize(module)
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    with pytest.raises(UnsupportedModel, match=r"reentrant gradient checkpointing.*gradient_checkpointing_disable"):
        forward(leaves, torch.ones(1, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="setup_context"):  # torch itself
        per_sample(forward, params, torch.ones(2, 3))


def test_checkpoints_before_the_call_are_none_of_our_business():
    forward, params = functionalize(nn.Linear(3, 3))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    x = checkpoint(torch.tanh, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
    assert forward(leaves, x).requires_grad


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


def per_sample(forward, params, x):
    return vmap(grad(lambda p, row: forward(p, row[None]).sum()), in_dims=(None, 0))(params, x)


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


def test_embeddings_that_renormalise_their_weight_are_refused():
    with pytest.raises(UnsupportedModel, match="embeddings 0 have max_norm"):
        functionalize(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))


def test_bad_regular_expression():
    with pytest.raises(InvalidArgument, match=r"Expected a regular expression, got trainable='\('"):
        functionalize(TinyTransformer(), "(")


def test_second_name_of_a_tied_parameter_is_explained():
    with pytest.raises(InvalidArgument, match=r"'head.weight' is 'embed.weight'"):
        functionalize(TinyTransformer(tied=True), ["head.weight"])


def test_lazy_parameters_are_refused():
    with pytest.raises(InvalidArgument, match="got lazy 'weight'. Run the model once"):
        functionalize(nn.LazyLinear(3))


def test_arguments_in_the_wrong_order():
    forward, params = functionalize(nn.Linear(3, 3))
    with pytest.raises(InvalidArgument, match=r"got Tensor. It is the first argument: forward\(params, \*args\)"):
        forward(torch.ones(1, 3), params)


def test_attention_of_gpt2():
    names = list(functionalize(tiny_gpt2(), ATTENTION).params)
    assert "transformer.h.0.attn.c_attn.weight" in names
    assert not any("mlp" in name or "wte" in name for name in names)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


def step_of(module):
    """What a private step releases, the names of parameters, and the engine that was chosen."""
    forward, params = functionalize(module)
    plan = dpfunc.Plan(dpfunc.sampling.Poisson(20, 1.0), dpfunc.clipping.Flat(1.0), 1.0, 1, delta=1e-3)
    dp_step = dpfunc.make_dp_step(lambda p, x: forward(p, x).square().sum(1), plan)
    state = replay(dp_step.init(params, dpfunc.insecure_key(4)))
    grads, *_ = dp_step(params, torch.arange(80.0).view(20, 4) / 80, state)
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
    batch = torch.arange(80.0).view(20, 4) / 80
    clipped, _ = dpfunc.clipped_grad(
        lambda p, x: forward(p, x).square().sum(1), params, batch, dpfunc.clipping.Flat(1.0),
        engine=getattr(dpfunc.engines, engine)(),
    )  # fmt: skip
    return clipped.sums


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_parts_that_are_compiled_run_without_compilation(engine):
    """In a step, which must see each operation, also where a part says `fullgraph=True`."""
    module = Parts()
    wanted = clipped_sums(module, engine)
    module.body = torch.compile(module.body, backend="eager")
    for name, value in clipped_sums(module, engine).items():
        assert torch.equal(value, wanted[name.replace("_orig_mod.", "")])
    for kind in ("wrapped", "in place"):
        module = Parts()
        wanted = clipped_sums(module, engine)
        if kind == "wrapped":
            module.head = torch.compile(module.head, backend="eager", fullgraph=True)
        else:
            module.compile(backend="eager", fullgraph=True)
        for name, value in clipped_sums(module, engine).items():
            assert torch.equal(value, wanted[name.replace("_orig_mod.", "")])


def test_data_parallel_is_refused():
    with pytest.raises(UnsupportedModel, match=r"the module \(DataParallel\).*Take its \.module.*one process a device"):
        functionalize(nn.DataParallel(Parts()))
    with pytest.raises(UnsupportedModel, match=r"0 \(DataParallel\)"):
        functionalize(nn.Sequential(nn.DataParallel(Parts())))
