"""Tokens that a job adds: their rows of the embedding, gradients of single records, and the model that is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import Case
from text_job import MODES, at_events, interrupt_at, same, train, write_job, write_rows
from trainer_cases import again
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo.parity import differences, truth_of

from dpfunc import engines
from dpfunc.functional import functionalize
from dpfunc.hf._facts import facts_of_model
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rng import insecure_key
from dpfunc.train._config_file import read_job
from dpfunc.train._model import choose_parameters, load_base, load_processing
from dpfunc.train._preferences import loss_of_record
from dpfunc.train._saved import load_trained, made_up_batch

MODELS = [("causal_lm", "llama"), ("causal_lm", "gpt2"), ("text_classification", "bert"), ("seq2seq", "t5")]
NEW = ("--model.new_tokens", "made,up,profit")  # of which the tokenizer knows the last one
# Resizing is said by PEFT where it saves the table of tokens beside an adapter.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")


@pytest.fixture
def here(tmp_path, monkeypatch):
    def job(task, kind):
        write_job(tmp_path, task, kind)
        monkeypatch.chdir(tmp_path)

    return job


def loaded(*flags):
    job = read_job("job.yaml", [*NEW, *flags])
    processing = load_processing(job)
    return job, choose_parameters(load_base(job, processing), job, processing), processing


@pytest.mark.parametrize("strategy", ["lora", "full"])
@pytest.mark.parametrize(("task", "kind"), MODELS, ids=[kind for _, kind in MODELS])
def test_gradients_of_new_rows_are_those_of_single_records(here, task, kind, strategy):
    here(task, kind)
    job, model, processing = loaded("--strategy", strategy)
    size = len(processing)
    assert model.get_input_embeddings().weight.shape[0] == size
    assert facts_of_model(model).tables.tokens == size  # so that records are still held against it
    forward, params = functionalize(model.eval())
    tables = {name: p.shape for name, p in params.items() if "trainable_tokens" in name}
    assert {shape[0] for shape in tables.values()} == ({3} if strategy == "lora" else set())
    assert len(tables) == (0 if strategy == "full" else 2 if kind == "llama" else 1)  # whose tables are not tied
    generator = torch.Generator().manual_seed(2)
    moved = {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}
    batch = made_up_batch(job, processing)
    assert any((ids >= size - 2).any() for ids in batch.values())
    case = Case(make_loss_fn(forward, loss_of_record(job)), moved, batch)
    assert max(differences(engines.auto(), case, truth_of(case)).values()) < 2e-4


@pytest.mark.parametrize("strategy", ["lora", "full"])
def test_new_rows_are_learnt_saved_and_read_back(here, strategy):
    """With another seed, as anybody reads them; of the other rows adapters change none."""
    here("causal_lm", "llama")
    write_rows("mails.jsonl", [{"label": "sport", "text": f"made {i} up profit"} for i in range(60)])
    flags = ("--strategy", strategy, "--batch_size", 8, "--dp_delta", "0.01")
    start = loaded("--strategy", strategy)[1].state_dict()
    result = train(*NEW, *flags)
    assert result.exit_code == 0, result.output
    assert ("resize_token_embeddings(26)" in result.stdout) == (strategy == "lora")
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    assert tokenizer.convert_tokens_to_ids(["profit", "made", "up"]) == [20, 24, 25]
    if strategy == "full":
        model = AutoModelForCausalLM.from_pretrained("run/model")
        assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 26
        return
    job, _, processing = loaded("--training.seed", "1")
    found, _ = load_trained(job, Path("run/model"), processing)
    found = found.state_dict()
    assert found.keys() == start.keys()
    for name in start:
        moves = "lora_" in name or "trainable_tokens_delta" in name
        assert torch.equal(found[name], start[name]) != moves, name


def test_a_run_with_new_tokens_goes_on_bit_for_bit(here, monkeypatch):
    here("causal_lm", "gpt2")
    flags = (*NEW, "--insecure-seed", 3)
    again(insecure_key(3))
    assert train("--output_dir", "whole", *flags).exit_code == 0
    again(insecure_key(3))
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(3))
        assert train("--output_dir", "parts", *flags).exit_code == 1
    again(insecure_key(3))
    resumed = train("--output_dir", "parts", *flags, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert same("whole", "parts")


def small_model():
    """The model has 20 rows, and the tokenizer 24 tokens, of which the last one is the padding."""
    config = json.loads(Path("tiny/config.json").read_text())
    Path("tiny/config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    config = json.loads(Path("tiny/tokenizer_config.json").read_text())
    Path("tiny/tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "money"}))


LAST = "profit,market,sport,money"  # tokens without a row


@MODES
def test_a_padding_token_without_a_row_is_named_and_the_job_can_say_it(here, mode):
    here("causal_lm", "llama")
    small_model()
    result = train(*mode)
    assert result.exit_code == 1
    assert "got 20 rows in 'tiny' and none for money. Name what is new in model.new_tokens" in result.stderr.replace(
        "\n", " "
    )
    result = train("--model.new_tokens", "money", *mode)
    assert result.exit_code == 1
    assert "none for profit, market, sport." in result.stderr.replace("\n", " ")
    result = train("--model.new_tokens", LAST, *mode)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("flags", "message"), [
    (("--model.new_tokens", "made,made"), "Expected different tokens, got model.new_tokens"),
    ((*NEW, "--strategy", "qlora", "--init", "pretrained"), "Expected no model.new_tokens with strategy='qlora'"),
    ((*NEW, "--lora.method", "vera"), "Expected no model.new_tokens with strategy='qlora' or lora.method=vera"),
])  # fmt: skip
def test_new_tokens_that_would_not_be_trained_are_refused(here, flags, message):
    here("causal_lm", "llama")
    result = train(*flags)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")
