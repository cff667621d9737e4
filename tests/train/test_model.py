"""The model of a job: where it starts, what each strategy trains; a base in 4 bits, for which a stand-in is loaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from packed import PackedLinear, pack
from safetensors.torch import load_file
from text_job import train, write_job
from torch import nn

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf.vision_language.tiny_llava import write as write_llava
from dpfunc.train import _model as train_model
from dpfunc.train._config_file import read_job
from dpfunc.train._model import choose_parameters, load_base, load_processing

TRAINED = {
    ("text_classification", "head"): lambda name: name == "score.weight",
    ("text_classification", "bitfit"): lambda name: name.endswith("bias") or name == "score.weight",
    ("text_classification", "full"): lambda name: True,
    ("text_classification", "lora"): lambda name: "lora_" in name or "score.modules_to_save" in name,
    ("causal_lm", "lora"): lambda name: "lora_" in name,
    ("causal_lm", "bitfit"): lambda name: name.endswith("bias"),
    ("causal_lm", "full"): lambda name: True,
}


@pytest.mark.parametrize("case", TRAINED, ids="-".join)
def test_strategies_train_what_they_say(tmp_path, monkeypatch, case):
    task, strategy = case
    write_job(tmp_path, task, "gpt2")
    monkeypatch.chdir(tmp_path)
    job = read_job("job.yaml", ["--strategy", strategy])
    processing = load_processing(job)
    model = choose_parameters(load_base(job, processing), job, processing)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if TRAINED[case](name)}
    assert trained


def test_the_start_is_drawn_from_the_public_seed(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)

    def start(seed):
        job = read_job("job.yaml", ["--seed", str(seed)])
        processing = load_processing(job)
        model = choose_parameters(load_base(job, processing), job, processing)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(1)
    one = start(0)
    before = torch.get_rng_state()
    assert torch.equal(one, start(0))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one, start(1))


NAMES = {  # task, flags, the name that is refused, or None
    "a target": ("causal_lm", ["--lora.targets", "q_proj,v_prj"], "lora.targets='v_prj'"),
    "an end of a word": ("causal_lm", ["--lora.targets", "q_proj,proj"], "lora.targets='proj'"),
    "all and one more": ("causal_lm", ["--lora.targets", "all-linear,q_proj"], "lora.targets='all-linear'"),
    "a whole module": ("causal_lm", ["--lora.modules_to_save", "norm,lm_hed"], "lora.modules_to_save='lm_hed'"),
    "images": ("vqa", ["--lora.targets", "q_proj,v_prj"], "got targets='v_prj'. Did you mean 'v_proj'"),
    "good names": ("causal_lm", ["--lora.targets", "self_attn.q_proj,v_proj", "--lora.modules_to_save", "norm,lm_head"], None),
    "good names of images": ("vqa", ["--lora.targets", "q_proj,v_proj"], None),
    "all": ("causal_lm", ["--lora.targets", "all-linear"], None),
    "vera": ("causal_lm", ["--lora.targets", "q_proj", "--lora.method", "vera"], None),
}  # fmt: skip


@pytest.mark.parametrize(("task", "flags", "refused"), NAMES.values(), ids=NAMES)
def test_a_name_of_no_module_is_refused(here, task, flags, refused):
    """PEFT trains the others, and says nothing."""
    here(task)
    job = read_job("job.yaml", flags)
    processing = load_processing(job)
    base = load_base(job, processing)
    if refused is None:
        assert any(p.requires_grad for p in choose_parameters(base, job, processing).parameters())
        return
    with pytest.raises(InvalidArgument, match=refused):
        choose_parameters(base, job, processing)


# Bases in 4 bits

CLASSES = {
    "text_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "vqa": "AutoModelForImageTextToText",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the job of a task over weights; and a function that makes it."""
    monkeypatch.chdir(tmp_path)

    def made(task="causal_lm"):
        if task == "vqa":
            write_llava(tmp_path, 16)
            Path("job.yaml").write_text(
                "task: vqa\noutput_dir: run\nmodel: {path: llava}\ndata: {train: data.jsonl, max_length: 24}\n"
                "privacy: {dp_epsilon: 8, dp_delta: 1e-3}\ntraining: {learning_rate: 1e-2, batch_size: 4, steps: 1}\n"
            )
            return
        write_job(tmp_path, task, "llama")
        job = read_job("job.yaml")
        load_base(job, load_processing(job)).save_pretrained("tiny")
        Path("job.yaml").write_text(Path("job.yaml").read_text().replace(", init: random", ""))

    return made


@pytest.fixture
def in_4_bits(monkeypatch):
    """Stand in for bitsandbytes: what is loaded with its configuration has packed layers, all but the last."""
    import transformers

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(train_model, "four_bit", lambda compute_dtype: {"computes in": compute_dtype})
    for name in CLASSES.values():
        kind = getattr(transformers, name)

        def load(path, quantization_config=None, read=kind.from_pretrained, **options):
            model = read(path, **options)
            if quantization_config is None:
                return model
            assert quantization_config == {"computes in": torch.float32}
            layers = [n for n, part in model.named_modules() if isinstance(part, nn.Linear)]
            return pack(model, [n for n in layers if n.rpartition(".")[2] not in ("lm_head", "score")])

        monkeypatch.setattr(kind, "from_pretrained", load)


@pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_without_bitsandbytes_nothing_is_done(here, monkeypatch, mode):
    here()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    result = train("--strategy", "qlora", *mode)
    assert result.exit_code == 1
    assert "A base in 4 bits needs bitsandbytes, which is not installed" in result.stderr
    assert "LoRA on a base in bfloat16 trains the same parameters with the same noise" in result.stderr
    assert not Path("run").exists()


@pytest.mark.usefixtures("in_4_bits")
def test_a_run_over_a_base_in_4_bits(here, recwarn):
    """Noise and epsilon are those of LoRA; adapters are in float, and only they are saved."""
    here()
    float_run = train("--dry-run").stdout
    assert train("--strategy", "qlora", "--dry-run").exit_code == 0
    result = train("--strategy", "qlora", "--steps", 4)
    assert result.exit_code == 0, result.output
    record = json.loads(Path("run/privacy_accounting.json").read_text())
    assert f"noise multiplier: {record['noise_multiplier']:.4g}, " in float_run
    saved = load_file("run/model/adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all("lora_" in name for name in saved)
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
    from dpfunc.train.generate import load_writer

    layers = [part for part in load_writer("run").model.modules() if isinstance(part, PackedLinear)]
    assert layers
    assert not [warning for warning in recwarn if "autograd" in str(warning.message)]


@pytest.mark.usefixtures("in_4_bits")
@pytest.mark.parametrize("task", CLASSES)
def test_adapters_are_trained_and_nothing_of_the_base(here, task):
    here(task)
    job = read_job("job.yaml", ["--strategy", "qlora"])
    processing = load_processing(job)
    model = choose_parameters(load_base(job, processing), job, processing)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.uint8}


@pytest.mark.usefixtures("in_4_bits")
def test_4_bits_are_named_and_only_they(here, monkeypatch):
    here()
    packed = read_job("job.yaml", ["--strategy", "qlora"])
    monkeypatch.setattr(train_model, "quantised_layers", lambda model: ())
    with pytest.raises(UnsupportedModel, match="got strategy='qlora' and weights in float"):
        load_base(packed, load_processing(packed))
    monkeypatch.setattr(train_model, "quantised_layers", lambda model: ("a", "b"))
    for strategy in ("lora", "full", "bitfit"):
        job = read_job("job.yaml", ["--strategy", strategy])
        with pytest.raises(UnsupportedModel, match=f"got strategy='{strategy}' and quantised weights in a, b"):
            load_base(job, load_processing(job))


@pytest.mark.usefixtures("in_4_bits")
def test_what_4_bits_do_not_do(here):
    here()
    for flags in (["--init", "random"], ["--gguf_file", "model.gguf"]):
        with pytest.raises(InvalidArgument, match="weights in float that are read in 4 bits with strategy='qlora'"):
            read_job("job.yaml", ["--strategy", "qlora", *flags])
    result = train("--strategy", "qlora", "--eval_fraction", 0.2, "--eval_steps", 1)
    assert "Expected no training.eval_steps with strategy='qlora' on a CPU" in result.stderr
    assert not Path("run").exists()
