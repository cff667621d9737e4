"""The model of memory and traffic: its parts against real modules and engines, its sums, and the document it fills."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
import torch
from click.testing import CliRunner

from benchmarks.engines.nets import decoder
from benchmarks.results import rounded
from benchmarks.scaling import __main__ as command
from benchmarks.scaling import model as traffic
from benchmarks.scaling.__main__ import DOCUMENT, RESULT, TABLES, amount, in_bytes, main
from benchmarks.scaling.model import (
    ENGINES,
    GPUS,
    LAYOUTS,
    MODELS,
    Job,
    Layout,
    Shape,
    fits,
    formed,
    jobs,
    layer_activations,
    modelled,
    parts,
    peak,
    trained_matrices,
)
from dpfunc import lora
from dpfunc.engines import auto
from dpfunc.engines._per_sample import Dense
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

TINY = Shape("tiny", layers=2, width=64, hidden=160, heads=8, kv_heads=2, vocabulary=100)
REPORT = json.loads(RESULT.read_text())
SOME = slice(0, None, 7)  # of all jobs: 7 and the numbers of models, layouts, engines and GPUs have no common factor
SOME_JOBS = list(jobs())[SOME]


def llama(shape):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(("name", "published"), [("7B", 6.74e9), ("70B", 70.6e9), ("405B", 405e9), ("100B", 100e9)])
def test_parameters_of_named_models(name, published):
    assert MODELS[name].parameters == pytest.approx(published, rel=0.01 if name != "100B" else 0.02)


@pytest.mark.parametrize("shape", [TINY, MODELS["7B"], MODELS["70B"], MODELS["405B"]], ids=lambda shape: shape.title)
def test_parameters_are_those_of_the_module(shape):
    with torch.device("meta"):
        assert sum(param.numel() for param in llama(shape).parameters()) == shape.parameters


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_adapters_are_those_of_the_library(rank, layers):
    shape = dataclasses.replace(TINY, layers=layers)
    adapter = lora.attach(llama(shape), insecure_key(0), targets=r"_proj$", rank=rank, alpha=1.0)
    assert sum(param.numel() for param in adapter.params.values()) == shape.lora_parameters(rank)


def test_tensor_parallel_ranks_hold_the_whole_together():
    for matrix in (*TINY.layer, TINY.head):
        assert 2 * matrix.part(2).numbers == matrix.numbers
        a, b = matrix.lora(4, 2)
        whole_a, whole_b = matrix.lora(4, 1)
        divided, whole = (b, a) if matrix.split == "column" else (a, b)
        divided_1, whole_1 = (whole_b, whole_a) if matrix.split == "column" else (whole_a, whole_b)
        assert (2 * divided.numbers, whole.numbers) == (divided_1.numbers, whole_1.numbers)


def saved_numbers(module, x):
    seen = {}
    held = {param.untyped_storage().data_ptr() for param in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            seen[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)
    return sum(seen.values()), result


def test_activations_of_a_block():
    """What autograd saves of a real one, but for one copy of the mixed values that other kernels do not make."""
    shape = Shape("", layers=1, width=256, hidden=700, heads=4, kv_heads=4, vocabulary=50)
    sizes = {"layers": 1, "width": 256, "hidden": 700, "length": 96, "vocabulary": 50}
    block = decoder(3, **sizes, norm="rms", lora=True).module[1]
    measured, _ = saved_numbers(block, torch.randn(3, 96, 256, requires_grad=True))
    job = Job(shape, 8, LAYOUTS["replicated"], 1, "auto", length=96, microbatch=3)
    assert layer_activations(job) / 2 == 3 * 96 * (8 * 256 + 4 * 700)
    assert 1 <= measured / (layer_activations(job) / 2) < 1.1


@pytest.mark.parametrize(("length", "width"), [(8, 64), (256, 64), (24, 32)])
def test_book_keeping_forms_what_the_model_says(length, width):
    """The engine's decisions on a real decoder, matrix by matrix."""
    sizes = {"layers": 1, "width": width, "hidden": 3 * width, "length": length, "vocabulary": 50}
    problem = decoder(2, **sizes, norm="rms", lora=False)
    forward, params = functionalize(problem.module)
    grads = auto()(lambda p, x: forward(p, x).square().mean((1, 2)), params, problem.inputs).grads
    found = {
        name: isinstance(grad, Dense)
        for name, grad in grads.items()
        if params[name].ndim == 2 and not name.startswith("0.")
    }
    order = ("q", "k", "v", "o", "gate", "up", "down")
    shape = Shape("", layers=1, width=width, hidden=3 * width, heads=1, kv_heads=1, vocabulary=50)
    job = Job(shape, None, LAYOUTS["replicated"], 1, "auto", length=length, microbatch=2)
    expected = dict(zip([matrix.name for matrix in trained_matrices(job)], formed(job), strict=True))
    names = {name: next((part for part in order if f".{part}." in name), "head") for name in found}
    assert {names[name]: dense for name, dense in found.items()} == expected


def test_a_budget_bounds_what_is_formed():
    """The first matrices of a large model are formed, later ones only where the factors are larger."""
    job = Job(MODELS["70B"], None, LAYOUTS["replicated"], 8, "auto")
    decided = formed(job)
    assert decided[0]
    names = {matrix.name for matrix, dense in list(zip(trained_matrices(job), decided, strict=True))[20:] if dense}
    assert names == {"k", "v"}
    assert not any(formed(Job(MODELS["7B"], None, LAYOUTS["replicated"], 8, "ghost")))
    assert all(formed(Job(MODELS["7B"], None, LAYOUTS["replicated"], 8, "vmap")))


def test_parts_add_up_and_grow_with_the_job():
    for *_, job in SOME_JOBS:
        found, whole = parts(job), peak(job)
        assert all(value >= 0 for value in found.values())
        assert found["computing"] == sum(found[name] for name in ("gathered", "activations", "engine", "sums"))
        held = found["frozen"] + found["trained"] + found["optimizer"]
        assert whole == held + max(found["computing"], found["releasing"])
        assert all(peak(dataclasses.replace(job, gpus=more)) <= whole for more in GPUS if more > job.gpus)
        for name in ("length", "microbatch"):
            larger = dataclasses.replace(job, **{name: 2 * getattr(job, name)})
            assert peak(larger) >= whole
            assert parts(larger)["activations"] > found["activations"]


def test_known_jobs():
    """By hand: a replicated 7B model with adapters, and all its parameters under FSDP2 on 8 GPUs."""
    shape = MODELS["7B"]
    small = parts(Job(shape, 16, LAYOUTS["replicated"], 8, "ghost"))
    assert small["frozen"] == 2 * shape.parameters
    assert small["optimizer"] == 12 * 39_976_960
    assert small["sums"] == 2 * 4 * 39_976_960
    assert small["releasing"] == 3 * 4 * 39_976_960
    assert small["gathered"] == 0
    large = parts(Job(shape, None, LAYOUTS["all cut"], 8, "ghost"))
    assert large["trained"] == 2 * (shape.parameters // 8)
    assert large["gathered"] == 2 * shape.parameters
    assert large["sums"] == 8 * shape.parameters
    assert large["frozen"] == 0


def test_order_of_engines_and_layouts():
    """Ghost needs least; each division of parameters saves; sums that are never whole save most."""
    for model, rank in itertools.product(MODELS.values(), (16, None)):
        for layout in LAYOUTS.values():
            sizes = [peak(job) for engine in ENGINES if (job := Job(model, rank, layout, 64, engine)).possible]
            assert sizes == sorted(sizes, reverse=True)
        order = ["replicated", "all cut", "tensor"] if rank is None else ["replicated", "frozen cut", "all cut"]
        order += ["streamed"] if rank is None and model.parameters > 1e10 else []
        sizes = [peak(Job(model, rank, LAYOUTS[name], 64, "ghost")) for name in order]
        assert sizes == sorted(sizes, reverse=True)


def test_rings():
    assert traffic.all_reduce(100, 2) == 100
    assert traffic.all_reduce(100, 1) == traffic.all_gather(100, 1) == 0
    assert traffic.all_reduce(100, 4) == 2 * traffic.all_gather(100, 4) == 150


def test_traffic_of_replicated_adapters():
    """One message of float32 sums in each step, whatever the microbatches; and nothing else of size."""
    job = Job(MODELS["7B"], 16, LAYOUTS["replicated"], 64, "auto")
    found = traffic.sent(job)
    assert found["sums"] == 2 * 63 / 64 * 4 * job.shape.lora_parameters(16)
    assert sum(found.values()) == found["sums"] + found["handshake"]
    assert traffic.sent(dataclasses.replace(job, microbatch=8)) == found


def test_traffic_of_sharded_models():
    """Gathers in each pass of each microbatch; norms of divided layers over the tensor group."""
    job = Job(MODELS["70B"], 16, LAYOUTS["frozen cut"], 64, "auto")
    once = 63 / 64 * 2 * job.shape.parameters
    assert traffic.sent(job)["frozen parameters"] == pytest.approx(once * 2 * 32)
    ghost = dataclasses.replace(job, engine="ghost")
    assert traffic.sent(ghost)["frozen parameters"] == pytest.approx(once * 3 * 32)
    full = Job(MODELS["7B"], None, LAYOUTS["all cut"], 64, "ghost")
    assert traffic.sent(full)["sums"] == 2 * traffic.sent(full)["trained parameters"]
    tensor = dataclasses.replace(job, layout=LAYOUTS["tensor"])
    assert tensor.microbatches == 256
    assert traffic.sent(tensor)["norms"] == 256 * 2 * 7 / 8 * 8 * (80 * 7) * 2
    assert traffic.sent(job)["norms"] == 0


def test_fits():
    assert [fits(size) for size in (71.9e9, 72.1e9, 126e9, 127e9)] == [80, 141, 141, None]


def test_combinations_that_do_not_exist():
    assert not Job(TINY, 4, LAYOUTS["tensor"], 8, "vmap").possible
    assert not Job(TINY, None, LAYOUTS["frozen cut"], 8, "ghost").possible
    assert not Job(TINY, None, LAYOUTS["streamed"], 8, "auto").possible
    assert Job(TINY, None, Layout("x", cut_frozen=True, cut_trained=True), 8, "vmap").possible


def test_the_result_file_is_that_of_this_model(monkeypatch):
    monkeypatch.setattr(traffic, "jobs", lambda: iter(SOME_JOBS))
    again = json.loads(json.dumps(rounded(modelled())))
    assert {**{key: REPORT[key] for key in again}, "jobs": REPORT["jobs"][SOME]} == again


def test_the_document_has_no_other_numbers():
    """Sizes that appear in the sentences are names (70B) or stand in a table."""
    prose = re.sub(r"<!-- [^>]+ -->\n.*?<!-- end -->", "", DOCUMENT.read_text(), flags=re.DOTALL)
    known = {"100B", "512", "7B", "80", "141", "float32", "float64", "bfloat16", "FSDP2", "2023", "4096", "64"}
    assert set(re.findall(r"\b\w*\d\w*\b", prose)) <= known


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.012"), (1.26, "1.3"), (12.3, "12"), (99.96, "100"), (123.4, "123"), (12345, "12,300")],
)
def test_amounts(value, text):
    assert amount(value) == text
    assert in_bytes(1e9 * value if value else 0) == (f"{text} GB" if 1 <= value < 1000 else in_bytes(1e9 * value))


def test_the_command_writes_the_file_and_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "modelled", lambda: REPORT)  # which another test computes
    out, document = tmp_path / "scaling.json", tmp_path / "scaling.md"
    document.write_text("\n".join(f"<!-- {name} -->\nold\n<!-- end -->" for name in TABLES))
    result = CliRunner().invoke(main, ["--out", str(out), "--document", str(document)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["jobs"] == REPORT["jobs"]
    assert "| 70B |" in document.read_text()
    assert "old" not in document.read_text()
