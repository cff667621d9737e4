"""Kinds of LoRA in a job: what each trains, gradients of single records, a run that goes on, and the saved adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import Case
from safetensors.torch import load_file
from text_job import at_events, interrupt_at, record, same, train, write_job
from trainer_cases import again
from zoo.parity import differences, truth_of, without_gradient

from dpfunc import engines
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rng import insecure_key
from dpfunc.train._config_file import read_job
from dpfunc.train._model import choose_parameters, load_base, load_processing
from dpfunc.train._preferences import loss_of_record
from dpfunc.train._saved import made_up_batch

KINDS = {"causal_lm": ("llama", "gpt2"), "text_classification": ("bert",), "seq2seq": ("t5",)}
MODELS = [(task, kind) for task, kinds in KINDS.items() for kind in kinds]
PARTS = {
    "lora": {"lora_A", "lora_B"},
    "ffa": {"lora_B"},
    "dora": {"lora_A", "lora_B", "lora_magnitude_vector"},
    "vera": {"vera_lambda_b", "vera_lambda_d"},
}


def adapted(*flags):
    """The job of this folder, its model before training, and what makes records of it."""
    job = read_job("job.yaml", flags)
    processing = load_processing(job)
    return job, choose_parameters(load_base(job, processing), job, processing), processing


def parts(names):
    """Which parts of adapters these parameters are."""
    return {part for name in names for part in name.split(".") if part.startswith(("lora_", "vera_"))}


def moved(params):
    generator = torch.Generator().manual_seed(2)
    return {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}


@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize(("task", "kind"), MODELS, ids=[kind for _, kind in MODELS])
def test_gradients_are_those_of_single_records(tmp_path, monkeypatch, task, kind, method):
    write_job(tmp_path, task, kind)
    monkeypatch.chdir(tmp_path)
    job, model, processing = adapted("--lora.method", method)
    forward, params = adapters.functionalize(model.eval())
    assert parts(params) == PARTS[method]
    loss_fn = make_loss_fn(forward, loss_of_record(job))
    case = Case(loss_fn, moved(params), made_up_batch(job, processing))
    truth = truth_of(case)
    assert not without_gradient(truth)
    assert max(differences(engines.auto(), case, truth).values()) < 2e-4


def test_ffa_trains_the_factor_that_begins_at_zero(tmp_path, monkeypatch):
    """Of an embedding PEFT draws B and not A: to freeze A would leave nothing that learns."""
    write_job(tmp_path, "causal_lm", "llama")
    monkeypatch.chdir(tmp_path)
    _, model, _ = adapted("--lora.method", "ffa", "--targets", "embed_tokens,q_proj")
    _, params = adapters.functionalize(model)
    assert parts(params) == {"lora_B", "lora_embedding_A"}
    assert all(not value.any() for value in params.values())
    frozen = [p for name, p in model.named_parameters() if "lora_" in name and not p.requires_grad]
    assert len(frozen) == len(params)
    assert all(value.any() for value in frozen)


@pytest.mark.parametrize("method", ["ffa", "vera", pytest.param("dora", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit_and_its_adapter_opens(tmp_path, monkeypatch, method):
    """Of FFA nothing but B is another tensor than before, of VeRA nothing but its vectors: A and B are as drawn."""
    from peft import PeftModel

    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ("--lora.method", method, "--insecure-seed", 3)
    job, start, processing = adapted("--lora.method", method)
    again(insecure_key(3))
    whole = train("--output_dir", "whole", *flags)
    assert whole.exit_code == 0, whole.output
    again(insecure_key(3))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train("--output_dir", "parts", *flags).exit_code == 1
    again(insecure_key(3))
    resumed = train("--output_dir", "parts", *flags, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert same("whole", "parts")
    assert record("parts")["global_step"] == 4
    opened = PeftModel.from_pretrained(load_base(job, processing), "parts/model").state_dict()
    changed = {name for name, value in start.state_dict().items() if not torch.equal(opened[name], value)}
    assert changed == {name for name in opened if parts([name]) & PARTS[method]}
    assert parts(changed) == PARTS[method]


def test_dora_over_a_base_in_4_bits_is_refused(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = train("--strategy", "qlora", "--lora.method", "dora", "--init", "pretrained")
    assert result.exit_code == 1
    assert "Expected no lora.method=dora over a base in 4 bits" in result.stderr


VERA = ("--lora.method", "vera")


def projections(tensors):
    """The shared matrices in these tensors: of the whole model, and as each layer has them."""
    return {name: value for name, value in tensors.items() if ".vera_A" in name or ".vera_B" in name}


def test_the_matrices_of_vera_are_those_of_the_public_seed_and_in_every_file(tmp_path, monkeypatch):
    """With a key from the system: neither it nor the records have a part in them; each checkpoint pins them."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    drawn = projections(adapted(*VERA)[1].state_dict())
    assert not any(torch.equal(value, drawn[name]) for name, value in projections(
        adapted(*VERA, "--training.seed", 1)[1].state_dict()
    ).items())  # fmt: skip
    assert train(*VERA).exit_code == 0
    for folder in ("checkpoint-2", "checkpoint-4", "model"):
        saved = projections(load_file(f"run/{folder}/adapter_model.safetensors"))
        assert saved.keys() == {"base_model.vera_A", "base_model.vera_B"}
        assert all(torch.equal(value, drawn[f"{name}.default"]) for name, value in saved.items())
        config = json.loads(Path(f"run/{folder}/adapter_config.json").read_text())
        assert (config["projection_prng_key"], config["save_projection"]) == (0, True)


def test_vera_cuts_its_matrices_for_layers_of_several_sizes(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    job, model, processing = adapted(*VERA, "--targets", "all-linear", "--rank", 20)
    forward, params = adapters.functionalize(model.eval())
    assert {value.numel() for value in params.values()} == {16, 20, 24}
    case = Case(make_loss_fn(forward, loss_of_record(job)), moved(params), made_up_batch(job, processing))
    assert max(differences(engines.auto(), case, truth_of(case)).values()) < 2e-4


@pytest.mark.parametrize(("flags", "message"), [
    (("--alpha", 8), "Expected no lora.alpha and no lora.rslora with lora.method=vera"),
    (("--rslora",), "Expected no lora.alpha and no lora.rslora with lora.method=vera"),
    (("--strategy", "qlora", "--init", "pretrained"), "Expected no lora.method=vera over a base in 4 bits"),
    (("--targets", "embed_tokens"), "Expected lora.targets that name layers of the model"),
])  # fmt: skip
def test_what_vera_has_no_use_for_is_refused(tmp_path, monkeypatch, flags, message):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = train(*VERA, *flags)
    assert result.exit_code == 1
    assert message in result.stderr
