"""Outputs of frozen layers, computed once: the same logits, each record alone, within the memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from text_job import rows, write_job, write_rows

from dpfunc.train._collate import collator
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import choose_parameters, load_base, load_processing
from dpfunc.train._recipe import with_shape


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A function that reads a job with flags: job, model, processing and records."""
    write_job(tmp_path, "text_classification", "bert")
    monkeypatch.chdir(tmp_path)

    def read(*flags):
        job = with_shape(read_job("job.yaml", ["--init", "pretrained", *flags]))
        processing = load_processing(job)
        model = choose_parameters(load_base(job, processing), job, processing)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
        return job, model.eval(), processing, read_records(job, processing)

    return read


FLAGS = {"head": ["--strategy", "head"], "lora": ["--strategy", "lora", "--top_layers", "1"]}
PEOPLE = ["--unit_column", "author", "--max_records_per_unit", "3"]


@pytest.mark.parametrize("unit", [[], PEOPLE], ids=["records", "people"])
@pytest.mark.parametrize("strategy", FLAGS)
def test_logits_are_those_of_the_whole_model(prepared, strategy, unit):
    write_rows("mails.jsonl", ({**row, "author": f"p{i % 50}"} for i, row in enumerate(rows(120))))
    job, model, processing, records = prepared(*FLAGS[strategy], *unit)
    computed, told = compute_frozen(job, model, records, shows=False)
    assert "computed once for each record" in told[0]
    pairs = (
        [(records.units, computed.units)]
        if unit
        else [(records.units, computed.units), (records.evaluation, computed.evaluation)]
    )
    for before, after in pairs:
        whole, kept = (collator(job, processing)(each) for each in (before, after))
        assert "input_ids" not in kept
        for name in ("labels", "text_mask") if unit else ("labels",):
            assert torch.equal(whole.pop(name), kept.pop(name))
        with torch.no_grad():
            logits = [
                model(**{k: v.flatten(0, 1) if unit else v for k, v in each.items()}).logits for each in (whole, kept)
            ]
        torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("strategy", FLAGS)
def test_a_record_is_computed_alone(prepared, strategy):
    """The last bit of what is kept of a record does not depend on which other records there are."""
    job, model, _, records = prepared(*FLAGS[strategy])
    few = dataclasses.replace(records, train=records.train[5:6], evaluation=())
    (alone,) = compute_frozen(job, model, few, shows=False)[0].train
    among = compute_frozen(job, model, records, shows=False)[0].train[5]
    (kind,) = alone.keys() - {"labels"}
    assert torch.equal(alone[kind], among[kind])


def test_the_limit(prepared):
    """By the most that the texts could need: no text decides how the hidden states of others are rounded."""
    job, model, _, records = prepared(*FLAGS["lora"], "--max_length", "64")
    for length, limit, kept in ((16, 0, False), (1, 1, False), (16, 1, False), (16, 2, True)):
        # 600 records, 64 tokens at most, 16 numbers of 2 bytes: 1.2 MiB
        texts = tuple({**record, "input_ids": [4] * length} for record in records.train) * 6
        many = dataclasses.replace(records, train=texts)
        limited = dataclasses.replace(job, training=dataclasses.replace(job.training, cache_mib=limit))
        computed, told = compute_frozen(limited, model, many, shows=False)
        assert ("hidden" in computed.train[0]) is kept
        assert (told == []) is (limit == 0)


def test_the_limit_says_nothing_of_how_many_are_held_out(prepared):
    """Their number is as private as that of the records to train on; the share of the bound counts."""
    job, model, _, records = prepared(*FLAGS["lora"], "--max_length", "64", "--dp_dataset_size", "600")
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, eval_fraction=0.5))
    limited = dataclasses.replace(job, training=dataclasses.replace(job.training, cache_mib=1))
    told = []
    for times in (1, 100):
        many = dataclasses.replace(records, evaluation=records.train * times)
        computed, lines = compute_frozen(limited, model, many, shows=False)
        assert computed is many
        told.append(lines)
    assert told[0] == told[1]
    assert "may need 3 MiB" in told[0][0]  # 1,200 records of 2 KiB


@pytest.mark.parametrize("flags", [["--strategy", "lora"], ["--strategy", "head", "--pooling", "model"]])
def test_what_cannot_be_cut_is_left_as_it_is(prepared, flags):
    job, model, _, records = prepared(*flags)
    computed, told = compute_frozen(job, model, records, shows=False)
    assert computed is records
    assert told == []


def test_nothing_that_is_trained_is_cut_off(prepared):
    job, model, _, records = prepared(*FLAGS["lora"])
    model.get_base_model().backbone.encoder.layer[0].output.dense.bias.requires_grad_(True)
    assert compute_frozen(job, model, records, shows=False)[0] is records
