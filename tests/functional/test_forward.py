"""functionalize: a pure function, under vmap, grad and torch.compile, and a module that never changes."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest
import torch
from models import TinyCNN, TinyTransformer, tiny_bert, tiny_gpt2
from module_cases import IDS, assert_close, logits, loop, per_sample, same, snapshot
from new_python import python
from torch import nn
from torch.nn.utils import prune

import dpfunc
from dpfunc import engines
from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize, with_params
from dpfunc.functional.forward import parts_of
from dpfunc.state import allow_repeat


class Shared(nn.Module):
    """One layer under two names, and one tensor in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = self.a
        self.c = nn.Linear(6, 6, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(torch.tanh(self.a(x))))


class Recurrent(nn.Module):
    """nn.LSTM keeps a second list of its weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids):
        return self.lstm(self.embed(ids))[0][:, -1]


class T5(nn.Module):
    """One embedding under three names: `shared` is also that of the encoder and of the decoder."""

    def __init__(self):
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        config = T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
            tie_word_embeddings=True, attn_implementation="eager",
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config).eval()

    def forward(self, ids):
        return self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False)


def peft_gpt2():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True,
        init_lora_weights=False,
    )  # fmt: skip
    return get_peft_model(tiny_gpt2(), config).eval()


MODELS = {
    "shared": (Shared, IDS.float()),
    "cnn": (TinyCNN, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
    "tied": (lambda: TinyTransformer(tied=True).eval(), IDS),
    "recurrent": (Recurrent, IDS),
    "bert": (tiny_bert, IDS),
    "gpt2": (tiny_gpt2, IDS),
    "peft": (peft_gpt2, IDS),
    "t5": (T5, IDS),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_module_and_its_changed_copy(name):
    """Also in its gradients: those of a shared parameter are of all its uses."""
    make, x = MODELS[name]
    module = make()
    forward, params = functionalize(module)
    expected = logits(module(x))
    assert torch.allclose(logits(forward(params, x)), expected, atol=1e-5)
    got = torch.func.grad(lambda p: logits(forward(p, x)).square().sum())(params)
    expected.square().sum().backward()
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    assert_close(got, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
    changed = {k: p + 0.1 for k, p in params.items()}
    copied = with_params(module, changed)
    assert type(copied) is type(module)
    assert torch.allclose(logits(forward(changed, x)), logits(copied(x)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_module_is_never_changed(name):
    make, x = MODELS[name]
    module = make()
    before = snapshot(module)
    forward, params = functionalize(module)
    assert all(p.is_contiguous() and not p.requires_grad for p in params.values())
    changed = {k: p + 1.0 for k, p in params.items()}
    torch.func.grad(lambda p: logits(forward(p, x)).sum())(changed)
    leaf = {k: p.clone().requires_grad_() for k, p in changed.items()}
    logits(forward(leaf, x)).sum().backward()
    for p in params.values():
        p.add_(1.0)  # the parameters are copies
    with pytest.raises((IndexError, RuntimeError)):
        forward(changed, x[..., :0] if x.is_floating_point() else x + 999)
    assert same(before, snapshot(module))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", ["bert", "gpt2", "peft", "recurrent"])
def test_per_sample_gradients_equal_single_samples(name):
    make, x = MODELS[name]
    forward, params = functionalize(make())
    rows = per_sample(forward, params, x)
    assert_close(rows, loop(forward, params, x))
    assert any((rows[name][0] - rows[name][1]).abs().max() > 0 for name in rows)


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
    assert params["weight"].is_contiguous()
    assert params["weight"].data_ptr() != layer.weight.data_ptr()


def test_with_params_copies():
    module = nn.Linear(2, 1)
    before = snapshot(module)
    changed = with_params(module, {"weight": torch.full((1, 2), 7.0)})
    assert changed.weight.tolist() == [[7.0, 7.0]]
    assert torch.equal(changed.bias, module.bias)
    assert same(before, snapshot(module))
    with pytest.raises(InvalidArgument, match="Did you mean weight"):
        with_params(module, {"wieght": torch.ones(1, 2)})
    with pytest.raises(InvalidArgument, match=r"of shape \(1, 2\), got \(2,\)"):
        with_params(module, {"weight": torch.ones(2)})


def test_forward_follows_the_mode_of_the_module():
    """So does a deep copy of it; under vmap each sample has dropout of its own."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    forward, params = functionalize(module)
    x = torch.ones(1, 64)
    assert not torch.equal(forward(params, x), forward(params, x))
    rows = per_sample(forward, params, torch.ones(4, 64))["0.bias"]
    assert len({tuple((row == 0).tolist()) for row in rows}) == 4
    module.eval()
    assert torch.equal(forward(params, x), forward(params, x))
    assert torch.equal(copy.deepcopy(forward)(params, x), forward(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "tied"])
def test_compiled_whole(name):
    """One graph: vmap(grad(forward)) and the squared norms."""
    make, x = MODELS[name]
    forward, params = functionalize(make())

    def step(p, batch):
        rows = per_sample(forward, p, batch)
        return rows, sum(row.flatten(1).square().sum(1) for row in rows.values())

    rows, norms = torch.compile(step, fullgraph=True)(params, x)
    expected, expected_norms = step(params, x)
    assert_close(rows, expected)
    assert_close(rows, loop(forward, params, x))
    assert torch.allclose(norms, expected_norms, rtol=1e-4)


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


COMPILED = """
module, x = InPlace().train(), torch.ones(2, 3)
forward, params = dpfunc.functionalize(module)
compiled = torch.compile(lambda p, y: forward(p, y), fullgraph=True, backend="aot_eager")
first, second = compiled(params, x), compiled(params, x)
assert torch.equal(first, second)
assert torch.allclose(first, module.linear(x) + 1.0)  # written inside, so that it is not skipped either
assert torch.equal(module.mean, torch.zeros(3))
assert torch.equal(forward.buffers["mean"], torch.zeros(3))
"""


def test_buffers_that_are_written_under_compile_are_thrown_away():
    """In a process of its own: the compiler cannot follow what counts lines of source."""
    python(f"import torch\nfrom torch import nn\nimport dpfunc\n{inspect.getsource(InPlace)}\n{COMPILED}")


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
    state = allow_repeat(dp_step.init(params, dpfunc.rng.insecure_key(4)))
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
    adapter = dpfunc.lora.attach(compiled, dpfunc.rng.insecure_key(0), targets="head", rank=2, alpha=2)
    assert list(adapter.params) == ["head.lora_A", "head.lora_B"]
    assert type(adapter.merge(adapter.params)) is Parts


def clipped_sums(module, engine):
    forward, params = functionalize(module)
    clipped, _ = dpfunc.clipped.clipped_grad(
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


def test_parts_are_those_of_torch():
    """In its order, shared ones once, with empty places and circles."""
    shared, circle = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    circle[0].outside = nn.ModuleList([circle[1], shared])
    module = nn.ModuleDict({"a": shared, "b": nn.Sequential(circle, nn.ModuleList([shared, circle])), "c": tiny_bert()})
    module.register_module("empty", None)
    circle[1].itself = circle
    assert parts_of(module) == [*module.modules()]


@pytest.mark.parametrize("function", [functionalize, lambda module: with_params(module, {})])
def test_what_is_no_module_is_named(function):
    with pytest.raises(InvalidArgument, match=r"^Expected a torch module, got dict.$"):
        function({"weight": torch.zeros(2)})


# Several modules


def two():
    torch.manual_seed(0)
    return {"enc": nn.Linear(3, 3), "dec": nn.Linear(3, 3)}


@pytest.mark.parametrize("kind", [dict, nn.ModuleDict], ids=["dict", "ModuleDict"])
def test_several_modules_are_one_function(kind):
    """Both are trained, also where their own names are the same: `{**enc, **dec}` would lose one."""
    modules = two()
    forward, params = functionalize(kind(modules))
    assert list(params) == ["enc.weight", "enc.bias", "dec.weight", "dec.bias"]
    x = torch.randn(5, 3)

    def loss_fn(params, batch):
        return (forward(params, "dec", forward(params, "enc", batch).tanh()) - batch).square().sum(1)

    assert torch.equal(forward(params, "enc", x), modules["enc"](x))
    clipped, _ = dpfunc.clipped.clipped_grad(loss_fn, params, x, dpfunc.clipping.Flat(1e6))
    (modules["dec"](modules["enc"](x).tanh()) - x).square().sum().backward()
    for name, value in clipped.sums.items():
        owner, _, own = name.partition(".")
        torch.testing.assert_close(value, getattr(modules[owner], own).grad)
    trained = with_params(kind(modules), {name: p + 1 for name, p in params.items()})
    assert torch.equal(trained["enc"].weight, modules["enc"].weight + 1)
    assert torch.equal(trained["dec"].bias, modules["dec"].bias + 1)


def test_several_modules_with_shared_parts():
    modules = two()
    modules["dec"].weight = modules["enc"].weight
    assert list(functionalize(modules).params) == ["enc.weight", "enc.bias", "dec.bias"]
    assert list(functionalize(modules, r"^dec\.bias").params) == ["dec.bias"]
    with pytest.raises(InvalidArgument, match="'dec.weight' is 'enc.weight'"):
        functionalize(modules, r"^dec\.")
    modules["dec"].eval()
    seen = []
    modules["dec"].forward = lambda x: seen.append(modules["dec"].training)  # no code of the wrapper changes the mode
    forward, params = functionalize(modules)
    forward(params, "dec", torch.zeros(3))
    assert seen == [False]
    assert modules["enc"].training


SEVERAL = {
    "a dot": (lambda: functionalize({"a.b": nn.Linear(1, 1)}), "without a dot"),
    "a name of nn.Module": (lambda: functionalize({"training": nn.Linear(1, 1)}), "that nn.Module does not use"),
    "no text": (lambda: functionalize({1: nn.Linear(1, 1)}), "Expected names of modules"),
    "no module": (lambda: functionalize({"a": 1}), "Expected a torch module, got dict"),
    "empty": (lambda: functionalize({}), "Expected a module with parameters"),
    "no name in the call": (lambda: functionalize(two()).forward(functionalize(two()).params, torch.zeros(3)), r"Expected a name of \['enc', 'dec'\] first"),
    "another name": (lambda: functionalize(two()).forward(functionalize(two()).params, "head", torch.zeros(3)), "got 'head'"),
    "merged": (
        lambda: functionalize(nn.Linear(3, 3)).forward({**functionalize(nn.Linear(3, 3)).params, "x": torch.zeros(1)}, torch.zeros(3)),
        r"with the unknown x. Those of several modules in one mapping: .*functionalize\(\{",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_modules_that_are_refused(name):
    call, message = SEVERAL[name]
    with pytest.raises(InvalidArgument, match=message):
        call()


# What a module keeps


class Keeps(nn.Module):
    """A layer that keeps what it has computed, or makes a constant at the first call."""

    def __init__(self, keep=None):
        super().__init__()
        self.layer, self.keep, self.own, self.by_name = nn.Linear(4, 3), keep, [], {"none": None}

    def forward(self, x):
        h = self.layer(x)
        return h * 1.0 if self.keep is None else self.keep(self, h)


def _attribute(part, h):
    part.attention, part.mask = h, torch.ones(3)
    return part.attention * part.mask


def _table(part, h):
    if not hasattr(part, "table"):
        part.table, part.length = torch.arange(3.0), 3
    return h * part.table[: part.length]


def _buffer(part, h):
    part.register_buffer("late", torch.ones(3))
    return h * part.late


KEPT = {
    "attributes": Keeps(_attribute),
    "a constant and its length": Keeps(_table),
    "a buffer of its own": Keeps(_buffer),
    "a list": Keeps(lambda part, h: part.own.append(h) or part.own[-1]),
    "a dictionary": Keeps(lambda part, h: part.by_name.update(h=h) or h),
    "lists in a dictionary": Keeps(lambda part, h: part.by_name.setdefault("all", [[]])[0].append(h) or h),
    "a pair": Keeps(lambda part, h: setattr(part, "pair", (h, {"h": h})) or part.pair[0]),
    "an object": Keeps(lambda part, h: setattr(part, "output", Output(h)) or part.output.h),
    "a function": Keeps(lambda part, h: setattr(part, "later", lambda: h) or part.later()),
    "an attribute of a part": Keeps(lambda part, h: setattr(part.layer, "last", h) or h),
    "weight_norm of old": Keeps(),
    "prune": Keeps(),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch advises against it, and users have it
    nn.utils.weight_norm(KEPT["weight_norm of old"].layer)
prune.l1_unstructured(KEPT["prune"].layer, "weight", 0.5)


class Output:
    def __init__(self, h):
        self.h = h


@pytest.mark.parametrize("engine", [dpfunc.engines.auto, dpfunc.engines.loop])
@pytest.mark.parametrize("module", KEPT.values(), ids=KEPT)
def test_nothing_of_a_pass_stays_on_the_module(module, engine, tmp_path):
    """It can be copied and saved after steps, and no activation of a row is in it."""
    before = [set(part.__dict__) for part in module.modules()]
    forward, params = functionalize(module)
    x, losses = torch.randn(5, 4), lambda p, x: forward(p, x).square().sum(1)
    for _ in range(3):
        clipped, _ = dpfunc.clipped.clipped_grad(losses, params, x, dpfunc.clipping.Flat(1.0), engine=engine())
    assert all(torch.isfinite(value).all() for value in clipped.sums.values())
    assert [set(part.__dict__) for part in module.modules()] == before
    assert (module.own, module.by_name) == ([], {"none": None})
    assert dict(module.named_buffers()).keys() == dict(functionalize(module).forward.buffers).keys()
    torch.save(module.state_dict(), tmp_path / "state")
    assert with_params(module, params).state_dict().keys() == module.state_dict().keys()


def test_a_loss_may_read_what_its_pass_has_kept():
    """A loss beside the output, as routers of experts leave it on the module."""
    module = Keeps(lambda part, h: setattr(part, "aux", h.square().mean(1)) or h)
    forward, params = functionalize(module)
    losses = lambda p, x: forward(p, x).sum(1) + module.aux
    x = torch.randn(5, 4)
    found, _ = dpfunc.clipped.clipped_grad(losses, params, x, dpfunc.clipping.Flat(1e3))
    whole, _ = dpfunc.clipped.clipped_grad(
        lambda p, x: (x @ p["layer.weight"].T + p["layer.bias"]).sum(1)
        + (x @ p["layer.weight"].T + p["layer.bias"]).square().mean(1), params, x, dpfunc.clipping.Flat(1e3),
    )  # fmt: skip
    torch.testing.assert_close(found.sums, whole.sums)
    assert not hasattr(module, "aux")


@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost", "loop"])
@pytest.mark.parametrize("kind", ["merged", "equal modules", "one module twice", "each its own"])
def test_one_dictionary_for_two_modules_is_refused(engine, kind):
    """Of equal names and shapes, the second one would be trained and the first one not; nothing is said by shapes."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if kind == "equal modules":
        second.load_state_dict(first.state_dict())
    encode, enc = dpfunc.functionalize(first)
    decode, dec = dpfunc.functionalize(first if kind == "one module twice" else second)
    own = kind == "each its own"
    params = (
        {f"e.{name}": p for name, p in enc.items()} | {f"d.{name}": p for name, p in dec.items()}
        if own
        else {**enc, **dec}
    )

    def loss_fn(p, x):
        of = (
            (lambda key: {name[2:]: value for name, value in p.items() if name.startswith(key)})
            if own
            else lambda key: p
        )
        return decode(of("d."), encode(of("e."), x).tanh()).square().sum(1)

    run = lambda: dpfunc.clipped.clipped_grad(
        loss_fn, params, torch.randn(4, 3), Flat(1.0), engine=getattr(engines, engine)()
    )
    if kind == "merged":
        with pytest.raises(InvalidArgument, match="got the same .*weight.* for two: Linear and Linear"):
            run()
    else:
        assert all(value.any() for value in run()[0].sums.values())


class Box:
    """An object of a user, in which a forward pass keeps what it has computed."""

    last = None


@pytest.mark.parametrize("wrapped", [lambda y: y, lambda y: [y], lambda y: {"y": (y,)}])
@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap", "loop"])
def test_a_pass_leaves_no_rows_in_an_object_of_a_module(wrapped, engine):
    """They are private, and tensors of a pass that has ended can neither be copied nor saved."""

    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.box, self.boxes = Box(), [Box()]

        def forward(self, x):
            self.box.last = self.boxes[0].last = wrapped(super().forward(x).detach())
            return super().forward(x)

    module = Keeps()
    forward, params = functionalize(module)
    loss_fn = lambda p, x: forward(p, x).square().sum(1)
    dpfunc.clipped.clipped_grad(loss_fn, params, torch.randn(5, 4), Flat(1.0), engine=getattr(engines, engine)())
    assert module.box.last is None is module.boxes[0].last
    trained = with_params(module, {name: p + 1 for name, p in params.items()})
    assert torch.equal(trained.weight, module.weight + 1)
    torch.save(trained.state_dict(), io.BytesIO())
