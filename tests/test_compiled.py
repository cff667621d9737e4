"""compile="auto" and compile=True: what is compiled, parity, faults of a compiler, and runs that are resumed."""

import logging

import pytest
import torch
from torch import nn

import dpfunc
from dpfunc import clipping, compiled, engines, sampling
from dpfunc.clipped import clipped_grad, make_clipped_grad
from dpfunc.compiled import Compilation, RunFacts, rows_at_once
from dpfunc.engines.guards import audit as audit_module
from dpfunc.engines.guards.row_independence import rounded_params
from dpfunc.errors import InvalidArgument, UnsupportedModel
from tests._support.models import build

TORCH_COMPILE = torch.compile
FLAT = clipping.Flat(0.5)


@pytest.fixture
def quick(monkeypatch):
    """The graph is that of the compiler, and its operations run one by one: no code is generated."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile",
        lambda f, *, fullgraph, dynamic, options: TORCH_COMPILE(f, fullgraph=fullgraph, dynamic=dynamic, backend="eager"),
    )  # fmt: skip


def fake(monkeypatch, function):
    """A compiler that returns `function(core)`, and passes for one where that runs as Python."""
    monkeypatch.setattr(compiled, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda core, **options: function(core))


def prepared(loss_fn, compile="auto", **options):
    return make_clipped_grad(loss_fn, FLAT, engine=options.pop("engine", engines.auto()), compile=compile, **options)


def linear(params, batch):
    return (params["w"] * batch["x"]).sum(1) + batch["y"]


def numbers(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, 3, generator=generator), "y": torch.randn(count, generator=generator)}


W = {"w": torch.tensor([1.0, -2.0, 0.5])}


# What is compiled, by rule.


@pytest.mark.parametrize(
    ("expected", "largest", "size"),
    [
        (256, None, 32),
        (16, None, 4),
        (2, None, 4),
        (1000, None, 64),
        (500, None, 32),
        (256, 20, 16),
        (256, 1, 1),
        (256, 3, 2),
    ],
)
def test_microbatches_are_a_power_of_two_up_to_an_eighth_of_the_batch(expected, largest, size):
    assert rows_at_once(expected, largest) == size


def test_microbatches_of_that_size_are_never_left_eager_for_their_padding():
    for expected in range(24, 3000):
        assert (rows_at_once(expected, None) - 1) / 2 <= compiled._MAX_PADDING * expected


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (torch.zeros(2, 128, dtype=torch.long), ""),
        (torch.zeros(2, 384, dtype=torch.long), ""),
        (torch.zeros(2, 11, dtype=torch.long), ""),
        (torch.zeros(2, 127, dtype=torch.long), "lengths 128"),
        (torch.zeros(2, 200, dtype=torch.bool), "lengths 256"),
        (torch.zeros(2, 100, 8), "lengths 128"),
        (torch.zeros(2, 100), ""),
        (torch.zeros(2, 16001), "lengths 16384"),
        (torch.zeros(2, 3, 100, 100), ""),
        (torch.zeros(2), ""),
        (torch.zeros(2, 0), ""),
    ],
)
def test_lengths_on_a_ladder_are_compiled(leaf, reason):
    found = compiled._off_the_ladder({"x": leaf})
    assert reason in found
    assert bool(found) == bool(reason)


class Reasons:
    """Reasons not to compile a step of a run, without compiling one that has none."""

    def __init__(self, loss_fn=linear, engine=None):
        self.compiler = compiled.Compiler(loss_fn, engine or engines.auto(), "auto", audit_module.Audits())

    def __call__(self, batch, step=2, num_steps=10**13, rows=32.0, size=4, params=W):
        return self.compiler._reason_against(params, batch, size, RunFacts(step, num_steps, rows))


def products(params, batch):
    return (batch["x"] @ params["w"][:, None])[:, 0] + batch["y"]


def test_reasons_follow_from_public_facts():
    reasons = Reasons(products)
    assert "first 2 steps" in reasons(numbers(4), step=1)
    assert not reasons(numbers(4), step=2)
    assert "1.9e+04 operations" in reasons(numbers(4), num_steps=100)
    assert "padding" in reasons(numbers(4), size=8)
    assert not reasons(numbers(4), size=8, rows=64.0)
    assert "one row" in reasons(numbers(4), size=1)
    assert "engines" in Reasons(products, engines.vmap())(numbers(4))
    assert "not measured on meta" in reasons(numbers(4), params={"w": torch.zeros(3, device="meta")})


def test_convolutions_stay_eager():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    forward, params = dpfunc.functionalize(net)
    reasons = Reasons(lambda params, batch: forward(params, batch["x"]).square().sum(1))
    assert "convolutions" in reasons({"x": torch.randn(2, 3, 8, 8)}, params=params)


def test_a_torch_that_cannot_compile_stays_eager(monkeypatch):
    monkeypatch.setattr(compiled, "lacks_compile", lambda: "torch 2.6 cannot")
    assert Reasons(products)(numbers(4)) == "torch 2.6 cannot"


@pytest.mark.parametrize("value", ["always", None, 2])
def test_other_settings_are_refused(value):
    with pytest.raises(InvalidArgument, match="compile to be True, False"):
        prepared(linear, compile=value)


def test_why_a_step_is_eager_is_logged_once(caplog):
    plan = dpfunc.Plan(sampling.Poisson(40, 0.9), FLAT, 1.0, 4, 1e-3)
    dp_step = dpfunc.make_dp_step(linear, plan, compile="auto", verify_batch=False)
    state = dp_step.init(W, dpfunc.secure_key())
    with caplog.at_level(logging.INFO, logger="dpfunc"):
        for _ in range(4):
            state = dp_step(W, numbers(8), state).state
    lines = [record.message for record in caplog.records if "compiled" in record.message]
    assert len(lines) == 2
    assert "first 2 steps" in lines[0]
    assert "compilation pays from" in lines[1]
    assert not dp_step.compilation.compiled
    assert "compilation pays from" in dp_step.compilation.reason


# Parity.


def squares_with(power):
    def loss_fn(params, batch):
        return ((1 - params["w"] * batch["x"]) ** power / 2.0).sum(1) + 2.0 ** batch["y"]

    return loss_fn


@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer LoRA", marks=pytest.mark.slow)])
def test_auto_equals_eager(name, quick):
    """Batches of several sizes, one compiled size."""
    case = build(name, size=9)
    step = prepared(case.loss_fn)
    for count in (9, 5, 1):
        batch = dpfunc.take(case.batch, torch.arange(count))
        got, unreleased = step(case.params, batch)
        expected, wanted = clipped_grad(case.loss_fn, case.params, batch, FLAT)
        assert step.compilation == Compilation(True)
        assert torch.allclose(unreleased.losses_B, wanted.losses_B, atol=1e-5)
        for param in case.params:
            assert torch.allclose(got.sums[param], expected.sums[param], atol=1e-5), param
    assert len(step._compiler.compiled) == 1


def test_powers_and_reflected_operators_are_compiled(quick):
    """dynamo hashes these functions of torch in another way than Python does."""
    step = prepared(squares_with(2))
    got, _ = step(W, numbers(6))
    assert step.compilation.compiled
    expected, _ = clipped_grad(squares_with(2), W, numbers(6), FLAT)
    assert torch.allclose(got.sums["w"], expected.sums["w"], atol=1e-6)


POSITIONS = (torch.arange(8)[None] - torch.arange(8)[:, None]).abs()


def with_relative_positions(params, batch):
    """A bias that is looked up alike for all samples, as in MPNet and T5."""
    bias_1TT = nn.functional.embedding(POSITIONS, params["w"]).permute(2, 0, 1)
    scores_BTT = batch["x"][:, :1, None] + bias_1TT.expand(len(batch["x"]), 8, 8)
    return (scores_BTT.softmax(-1) * POSITIONS).square().sum((1, 2)) + batch["y"]


def test_what_is_the_same_for_all_samples_is_compiled_so(quick):
    """Each sample could own two of eight rows of positions; the eager step finds that they are not the same."""
    params = {"w": torch.randn(8, 1, generator=torch.Generator().manual_seed(0))}
    step = prepared(with_relative_positions, microbatch_size=4)
    got, _ = step(params, numbers(4))
    assert step.compilation.compiled, step.compilation.reason
    expected, _ = clipped_grad(with_relative_positions, params, numbers(4), FLAT, engine=engines.loop())
    assert torch.allclose(got.sums["w"], expected.sums["w"], atol=1e-6)


def dropping(params, batch):
    return (nn.functional.dropout(params["w"] * batch["x"], 0.5, training=True)).sum(1)


def test_dropout_is_compiled_with_the_numbers_of_an_eager_step(quick):
    key = dpfunc.insecure_key(5)
    step = prepared(dropping, microbatch_size=4)
    for _ in range(2):
        got, _ = step(W, numbers(8), key=key)
        assert step.compilation.compiled
        expected, _ = clipped_grad(dropping, W, numbers(8), FLAT, engine=engines.auto(), microbatch_size=4, key=key)
        assert torch.allclose(got.sums["w"], expected.sums["w"], atol=1e-6)


def test_16_bits(quick):
    params = {"w": W["w"].bfloat16()}
    step = prepared(linear)
    got, _ = step(params, numbers(8))
    assert step.compilation.compiled
    expected, _ = clipped_grad(linear, params, numbers(8), FLAT)
    assert torch.allclose(got.sums["w"], expected.sums["w"], rtol=0.1, atol=0.05)


# Proofs and faults.


def default_of_the_batch(params, batch):
    own = params["w"] * batch["x"]
    return torch.where(batch["x"].sum(1, keepdim=True) > -100, own, own.mean(0, keepdim=True)).square().sum(1)


@pytest.mark.parametrize("compile", [True, "auto"])
def test_a_proof_that_reads_numbers_is_none_for_a_compiled_step(compile, quick):
    """The condition is true for all rows of the first batch, for which code is compiled, and not of the second."""
    step = prepared(default_of_the_batch, compile, microbatch_size=8)
    first, second = numbers(8), numbers(8)
    second["x"][3] = -1000.0
    step(W, first)
    if compile == "auto":
        assert "follow from numbers" in step.compilation.reason
        with pytest.raises(UnsupportedModel, match="depends on the other samples"):
            step(W, second)
        return
    got, _ = step(W, second)  # compiled for rows alone
    alone, _ = clipped_grad(default_of_the_batch, W, second, FLAT, engine=engines.loop())
    assert torch.allclose(got.sums["w"], alone.sums["w"], atol=1e-6)


def rounded(core):
    """Code that rounds differently: as if with parameters that differ by rounding."""
    return lambda params, batch, mask_B: core(rounded_params(params, 2.0, 0), batch, mask_B)


def changed(**changes):
    def compiler(core):
        def run(*args):
            result = core(*args)
            return result._replace(**{name: change(getattr(result, name)) for name, change in changes.items()})

        return run

    return compiler


def relu_net(params, batch):
    """Every second row has the input of a ReLU at zero, but for rounding."""
    h = torch.relu(batch["x"] @ params["w"] - batch["t"])
    return (torch.relu(h[:, None] * params["v"]) + batch["x"][:, :3] * params["v"]).square().sum(1)


def kinks():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3000, generator=generator), "v": torch.tensor([1.0, 2.0, 3.0])}
    x_Bd = torch.randn(64, 3000, generator=generator)
    t_B = torch.cat([x_1d @ params["w"] for x_1d in x_Bd.split(1)])
    return params, {"x": x_Bd, "t": t_B + 50.0 * (torch.arange(64) % 2)}


def test_a_relu_net_is_not_refused_for_its_kinks(monkeypatch):
    params, batch = kinks()
    fake(monkeypatch, rounded)
    prepared(relu_net, True, microbatch_size=64)(params, batch)
    monkeypatch.setattr(audit_module, "_TRIES", 0)
    with pytest.raises(UnsupportedModel, match="norm 0 alone"):
        prepared(relu_net, True, microbatch_size=64)(params, batch)


@pytest.mark.parametrize("row", [0, 1], ids=["at a kink", "elsewhere"])
def test_a_fault_beside_a_kink_is_found(row, monkeypatch):
    params, batch = kinks()
    scale_B = torch.ones(64).index_fill(0, torch.tensor([row]), 100.0)

    def scaled(sq_norms):
        return {name: value * scale_B for name, value in sq_norms.items()}

    fake(monkeypatch, lambda core: changed(sq_norms=scaled)(rounded(core)))
    with pytest.raises(UnsupportedModel, match=r"fault of the compiler.*row \d+ has"):
        prepared(relu_net, True, microbatch_size=64)(params, batch)


FAULTS = {
    "losses": {"losses_B": lambda losses_B: 1.01 * losses_B},
    "one loss": {"losses_B": lambda losses_B: losses_B + torch.eye(len(losses_B))[0]},
    "norms": {"sq_norms": lambda sq_norms: {name: 1.01 * value for name, value in sq_norms.items()}},
    "a NaN": {"losses_B": lambda losses_B: losses_B.index_fill(0, torch.tensor([2]), torch.nan)},
    "sums": {"sums": lambda sums: {name: 1.01 * value for name, value in sums.items()}},
    "a sum that is not clipped": {"sums": lambda sums: {name: value + 3.0 for name, value in sums.items()}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_compiler_is_found(fault, monkeypatch, caplog):
    """True refuses before anything is released; "auto" gives the eager step, and says so."""
    fake(monkeypatch, changed(**FAULTS[fault]))
    batch = {"x": numbers(8)["x"].abs() * torch.tensor([1.0, -1.0, 1.0]), "y": numbers(8)["y"]}
    with pytest.raises(UnsupportedModel, match=r"fault of the compiler.*Nothing was released"):
        prepared(linear, True, microbatch_size=8)(W, batch)
    step = prepared(linear, microbatch_size=8)
    with caplog.at_level(logging.WARNING, logger="dpfunc"):
        got, _ = step(W, batch)
    assert "fault of the compiler" in caplog.text
    assert "fault of the compiler" in step.compilation.reason
    expected, _ = clipped_grad(linear, W, batch, FLAT)
    assert torch.allclose(got.sums["w"], expected.sums["w"])


def test_a_graph_of_another_step_is_compared_as_well(monkeypatch):
    """The compiler may have nothing to compile for a second step function with the same loss."""
    fake(monkeypatch, changed(**FAULTS["losses"]))
    before = compiled._graphs()
    with pytest.raises(UnsupportedModel, match="fault of the compiler"):
        prepared(linear, True, microbatch_size=8)(W, numbers(8))
    assert compiled._graphs() == before


@pytest.mark.parametrize("loss_fn", [linear, dropping])
@pytest.mark.parametrize("compile", [True, "auto"])
def test_a_fault_that_begins_later_is_found_by_an_audit(compile, loss_fn, monkeypatch):
    calls = []

    def later(core):
        def run(*args):
            calls.append(1)
            result = core(*args)
            return result._replace(losses_B=result.losses_B + 0.1 * (len(calls) > 3))

        return run

    fake(monkeypatch, later)
    step = prepared(loss_fn, compile, microbatch_size=8)

    def steps():
        for _ in range(audit_module.STEPS_IN + 4):
            step(W, numbers(8), key=dpfunc.insecure_key(1))

    with pytest.raises(UnsupportedModel):
        steps()
    assert len(calls) > 3


def test_what_cannot_be_compiled_stays_eager(monkeypatch):
    """And is not tried again."""
    tried = []

    def broken(core):
        def run(*args):
            tried.append(1)
            raise RuntimeError("observed: no C++ compiler") from OSError("no C++ compiler\nand more")

        return run

    fake(monkeypatch, broken)
    step = prepared(linear)
    for _ in range(3):
        got, _ = step(W, numbers(8))
    assert tried == [1]
    assert step.compilation == Compilation(False, "it cannot be compiled: no C++ compiler")
    assert torch.allclose(got.sums["w"], clipped_grad(linear, W, numbers(8), FLAT)[0].sums["w"])
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        prepared(linear, True, microbatch_size=8)(W, numbers(8))


def reading(params, batch):
    return linear(params, batch) * (2.0 if float(batch["x"].max()) > 100 else 1.0)


@pytest.mark.parametrize("compile", ["auto", True])
def test_a_graph_that_is_compiled_later_has_a_proof_of_its_own(compile, quick):
    """A flag changes after compilation: rows mix then, for rare rows, which the batch at hand has not."""
    phase = {"mixes": False}

    def loss_fn(params, batch):
        own = params["w"] * batch["x"]
        if phase["mixes"]:
            own = torch.where(batch["x"].sum(1, keepdim=True) > -100, own, own.mean(0, keepdim=True))
        return own.square().sum(1) + batch["y"]

    step = prepared(loss_fn, compile, microbatch_size=8)
    for seed in range(2):
        step(W, numbers(8, seed))
    assert step.compilation.compiled
    phase["mixes"] = True
    step(W, numbers(8, 3))
    rare, other = numbers(8, 4), numbers(8, 4)
    rare["x"][3] = other["x"][3] = -1000.0
    other["x"][5] *= 1e4
    try:
        one, two = (step(W, batch)[1].norms_BG[3] for batch in (rare, other))
    except UnsupportedModel:
        return
    assert one == two  # rows alone: no influence of the other row


def switched_off(how, monkeypatch):
    if how == "not compiled":
        monkeypatch.setattr(torch, "compile", lambda core, **options: core)
    else:
        torch.compiler.set_stance(how)


@pytest.mark.parametrize("how", ["not compiled", "force_eager", "eager_on_recompile"])
def test_a_step_that_is_not_compiled_after_all_is_no_compiled_step(how, quick, monkeypatch):
    """Nobody would look at what its trace finds."""
    phase = {"mixes": False}

    def mixing(params, batch):
        own = params["w"] * batch["x"]
        return (own - own.mean(0) if phase["mixes"] else own).square().sum(1) + batch["y"]

    try:
        if how == "eager_on_recompile":
            step = prepared(mixing, "auto", microbatch_size=8)
            step(W, numbers(8))
            switched_off(how, monkeypatch)
            phase["mixes"] = True
            with pytest.raises(UnsupportedModel):
                step(W, numbers(8, 1))
            return
        switched_off(how, monkeypatch)
        auto = prepared(linear, "auto", microbatch_size=8)
        auto(W, numbers(8))
        assert "switched off" in auto.compilation.reason
        with pytest.raises(RuntimeError, match=r"torch\.compile is switched off"):
            prepared(linear, True, microbatch_size=8)(W, numbers(8))
    finally:
        torch.compiler.set_stance("default")


def test_too_many_graphs_are_eager_again(quick, monkeypatch):
    """As with a temperature that is another number at each step."""
    monkeypatch.setattr(compiled, "_GRAPHS", 2)
    temperature = [1.0]

    def loss_fn(params, batch):
        return (params["w"] * batch["x"]).sum(1) * temperature[0] + batch["y"]

    step = prepared(loss_fn, "auto", microbatch_size=8)
    for number in range(8):
        temperature[0] = 1.0 + number
        found, _ = step(W, numbers(8, number))
        expected, _ = clipped_grad(loss_fn, W, numbers(8, number), FLAT)
        torch.testing.assert_close(found.sums, expected.sums)
    assert not step.compilation.compiled


def test_products_are_not_shortened(quick, monkeypatch):
    """The user lets products of float32 be computed in 16 bits: norms and sums are not."""
    before, seen, to_graph = torch.get_float32_matmul_precision(), [], torch.compile

    def compile(core, **options):
        graph = to_graph(core, **options)

        def called(*args):
            seen.append(torch.get_float32_matmul_precision())
            return graph(*args)

        return called

    monkeypatch.setattr(torch, "compile", compile)
    try:
        torch.set_float32_matmul_precision("medium")
        prepared(linear, True, microbatch_size=8)(W, numbers(8))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


def test_parts_of_a_record_that_cancel_do_not_move_the_sum(quick):
    """Look-ups of one row of a table, +R, small ones and -R: added to others one by one, the small ones would be lost."""
    table = torch.zeros(300, 4)
    looked_up, scale = 200, 2.0**20

    def loss_fn(params, batch):
        return (params["t"][batch["ids"]] * batch["y"]).sum((1, 2))

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (4, looked_up), generator=generator)
    y = torch.zeros(4, looked_up, 4)
    ids[1] = 3
    y[1, 0], y[1, 1:-1], y[1, -1] = scale, scale * 0.4 * 2**-23, -scale
    without = torch.where(torch.arange(4)[:, None, None] == 1, 0.0, y)
    for compile in (False, True):
        step = prepared(loss_fn, compile, microbatch_size=4)
        (one, _), (other, _) = (step({"t": table}, {"ids": ids, "y": each}) for each in (y, without))
        moved = (one.sums["t"] - other.sums["t"]).norm()
        assert moved <= one.sensitivity


def test_a_loss_that_reads_numbers_stays_eager(quick):
    step = prepared(reading)
    step(W, numbers(8))
    assert not step.compilation.compiled


def by_size(params, batch):
    return linear(params, batch) / len(batch["x"])


def test_a_loss_that_depends_on_the_size_of_its_batch_is_refused(quick):
    """A failure of privacy is an error with "auto" as well: what is compared with is an audited step."""
    with pytest.raises(UnsupportedModel, match="size of the batch"):
        prepared(by_size)(W, numbers(8))


# Runs.


def run_of(loss_fn, params, batches, start=None, **options):
    """Gradients and states of a run, from a state on, in what might be a new process."""
    torch._dynamo.reset()
    plan = dpfunc.Plan(sampling.Poisson(400, 0.1), FLAT, 1.0, 8, 1e-4)
    dp_step = dpfunc.make_dp_step(loss_fn, plan, compile="auto", verify_batch=False, **options)
    state = dpfunc.state.replay(start) if start else dp_step.init(params, dpfunc.secure_key())
    grads, states, how = [], [state], []
    for batch in batches[state.step :]:
        result = dp_step(params, batch, states[-1])
        grads.append(result.grads)
        states.append(result.state)
        how.append(dp_step.compilation.compiled)
    return grads, states, how


def check_resumed(loss_fn, params, batches, ends):
    grads, states, how = run_of(loss_fn, params, batches)
    assert how == [False, False, *[True] * (len(batches) - 2)]
    for end in ends:
        again, _, _ = run_of(loss_fn, params, batches, states[end])
        for one, other in zip(grads[end:], again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one), end


@pytest.fixture
def cheap(monkeypatch):
    """Runs of any size are compiled."""
    monkeypatch.setattr(compiled, "_MIN_RUN_FLOPS", 0.0)


def test_a_run_that_is_resumed_anywhere_is_the_same_run(quick, cheap):
    """Batches of other sizes and lengths first, in the process that goes on; also before the steps that are compiled."""
    check_resumed(squares_with(2), W, [numbers(count, count) for count in (8, 12, 7, 3)], [1, 3])


def test_one_size_serves_all_draws_of_a_run(monkeypatch, cheap):
    """The size of compiled microbatches follows from the expected batch, not from the drawn one."""
    fake(monkeypatch, lambda core: core)
    plan = dpfunc.Plan(sampling.Poisson(400, 0.1), FLAT, 1.0, 8, 1e-4)
    dp_step = dpfunc.make_dp_step(linear, plan, compile="auto", verify_batch=False)
    state = dp_step.init(W, dpfunc.secure_key())
    for count in (40, 40, 40, 130, 3, 300):
        state = dp_step(W, numbers(count), state).state
    assert dp_step.compilation.compiled
    assert len(dp_step.clipped_grad._compiler.compiled) == 1


@pytest.mark.slow
def test_lengths_that_differ_are_compiled_by_the_ladder_in_any_order(quick, cheap):
    def loss_fn(params, batch):
        return (params["w"] * batch["x"][..., None]).square().sum((1, 2))

    batches = [{"x": torch.randn(8, length, 1)[..., 0]} for length in (12, 7, 4097, 8192, 5000, 6)]
    grads, states, how = run_of(loss_fn, W, batches)
    assert how == [False, False, False, True, False, True]
    again, _, _ = run_of(loss_fn, W, batches, states[3])
    assert all(torch.equal(one["w"], other["w"]) for one, other in zip(grads[3:], again, strict=True))


@pytest.mark.slow
def test_a_compiled_run_that_is_resumed_is_the_same_run(cheap):
    """With generated code, and dropout."""
    batches = [numbers(count) for count in (8, 12, 7, 11)]
    check_resumed(dropping, W, batches, [3])


def test_an_empty_batch_is_a_normal_step(quick, cheap):
    grads, _, how = run_of(linear, W, [numbers(count) for count in (4, 4, 4, 0, 4)])
    assert how == [False, False, True, True, True]
    assert grads[3]["w"].shape == (3,)


def test_processes_agree_on_the_setting():
    described = []
    for compile in (False, "auto"):
        plan = dpfunc.Plan(sampling.Poisson(40, 0.2), FLAT, 1.0, 4, 1e-3)
        dp_step = dpfunc.make_dp_step(linear, plan, compile=compile)
        described.append(dp_step._described(dp_step.init(W, dpfunc.insecure_key(1))))
    assert described[0] != described[1]
