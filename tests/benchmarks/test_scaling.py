"""The model of memory and traffic: its parts against real modules and engines, its sums, and the document it fills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import scaling
from benchmarks.engines.nets import decoder
from benchmarks.scaling import LAYOUTS, MODELS, Job, Shape
from dpfunc import lora
from dpfunc.engines import auto
from dpfunc.engines._per_sample import Dense
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

TINY = Shape("tiny", layers=3, width=64, hidden=160, heads=8, kv_heads=2, vocabulary=100)


def llama(shape):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_parameters_are_those_of_modules_and_papers():
    for shape in (TINY, MODELS["7B"], MODELS["70B"], MODELS["405B"]):
        with torch.device("meta"):
            assert sum(param.numel() for param in llama(shape).parameters()) == shape.parameters
    for name, published in (("7B", 6.74e9), ("70B", 70.6e9), ("405B", 405e9), ("100B", 100e9)):
        assert MODELS[name].parameters == pytest.approx(published, rel=0.02)
    for matrix in (*TINY.layer, TINY.head):  # of A and B of an adapter the side that the layer divides is divided
        parts, wholes = ([side.numbers for side in matrix.lora(4, ranks)] for ranks in (2, 1))
        divided = 1 if matrix.split == "column" else 0
        assert [part * (2 if side == divided else 1) for side, part in enumerate(parts)] == wholes
    adapter = lora.attach(llama(TINY), insecure_key(0), targets=r"_proj$", rank=4, alpha=1.0)
    assert sum(param.numel() for param in adapter.params.values()) == TINY.lora_parameters(4)


def test_activations_of_a_block():
    """What autograd saves of a real one, but for one copy of the mixed values that other kernels do not make."""
    shape = Shape("", layers=1, width=256, hidden=700, heads=4, kv_heads=4, vocabulary=50)
    sizes = {"layers": 1, "width": 256, "hidden": 700, "length": 96, "vocabulary": 50}
    block, seen = decoder(3, **sizes, norm="rms", lora=True).module[1], {}
    held = {param.untyped_storage().data_ptr() for param in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            seen[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(torch.randn(3, 96, 256, requires_grad=True))
    job = Job(shape, 8, LAYOUTS["replicated"], 1, "auto", length=96, microbatch=3)
    assert result.shape == (3, 96, 256)
    assert scaling.layer_activations(job) / 2 == 3 * 96 * (8 * 256 + 4 * 700)
    assert 1 <= sum(seen.values()) / (scaling.layer_activations(job) / 2) < 1.1


@pytest.mark.parametrize(("length", "width"), [(8, 64), (256, 64), (24, 32)])
def test_book_keeping_forms_what_the_model_says(length, width):
    """The engine's decisions on a real decoder, matrix by matrix; in a large one the budget bounds them."""
    sizes = {"layers": 1, "width": width, "hidden": 3 * width, "length": length, "vocabulary": 50}
    problem = decoder(2, **sizes, norm="rms", lora=False)
    forward, params = functionalize(problem.module)
    grads = auto()(lambda p, x: forward(p, x).square().mean((1, 2)), params, problem.inputs).grads
    shape = Shape("", layers=1, width=width, hidden=3 * width, heads=1, kv_heads=1, vocabulary=50)
    job = Job(shape, None, LAYOUTS["replicated"], 1, "auto", length=length, microbatch=2)
    names = [matrix.name for matrix in scaling.trained_matrices(job)]
    part = lambda name: next((part for part in names if f".{part}." in name), "head")
    matrices = [name for name in grads if params[name].ndim == 2 and not name.startswith("0.")]
    found = {part(name): isinstance(grads[name], Dense) for name in matrices}
    assert found == dict(zip(names, scaling.formed(job), strict=True))
    large = Job(MODELS["70B"], None, LAYOUTS["replicated"], 8, "auto")
    decided = list(zip(scaling.trained_matrices(large), scaling.formed(large), strict=True))
    assert decided[0][1]
    assert {matrix.name for matrix, dense in decided[20:] if dense} == {"k", "v"}


def test_known_jobs():
    """By hand: a replicated 7B model with adapters, and all its parameters under FSDP2 on 8 GPUs."""
    shape, trained = MODELS["7B"], 39_976_960
    small = scaling.parts(Job(shape, 16, LAYOUTS["replicated"], 8, "ghost"))
    by_hand = {"frozen": 2 * shape.parameters, "optimizer": 12 * trained, "sums": 8 * trained, "gathered": 0}
    assert {**small, **by_hand, "releasing": 12 * trained} == small
    large = scaling.parts(Job(shape, None, LAYOUTS["all cut"], 8, "ghost"))
    by_hand = {"trained": 2 * (shape.parameters // 8), "gathered": 2 * shape.parameters, "sums": 8 * shape.parameters}
    assert {**large, **by_hand, "frozen": 0} == large


def test_traffic():
    """Of adapters one message of float32 sums a step; of a cut model gathers in each pass of each microbatch."""
    assert [scaling.all_reduce(100, ranks) for ranks in (1, 2, 4)] == [0, 100, 150]
    job = Job(MODELS["7B"], 16, LAYOUTS["replicated"], 64, "auto")
    found = scaling.sent(job)
    assert found["sums"] == 2 * 63 / 64 * 4 * job.shape.lora_parameters(16)
    assert sum(found.values()) == found["sums"] + found["handshake"]
    assert scaling.sent(replace(job, microbatch=8)) == found
    job = Job(MODELS["70B"], 16, LAYOUTS["frozen cut"], 64, "auto")
    once = 63 / 64 * 2 * job.shape.parameters
    for engine, passes in (("auto", 2), ("ghost", 3)):
        gathered = scaling.sent(replace(job, engine=engine))["frozen parameters"]
        assert gathered == pytest.approx(once * passes * 32)
    full = scaling.sent(Job(MODELS["7B"], None, LAYOUTS["all cut"], 64, "ghost"))
    assert full["sums"] == 2 * full["trained parameters"]
    tensor = replace(job, layout=LAYOUTS["tensor"])
    assert scaling.sent(tensor)["norms"] == 256 * 2 * 7 / 8 * 8 * (80 * 7) * 2
    assert scaling.sent(job)["norms"] == 0
