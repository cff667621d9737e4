"""The model that a run leaves: read back by another seed it is the trained one, in each task; and what is said else."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from feature_jobs import write_job as write_feature_job
from safetensors.torch import load_file, save_file
from text_job import MODES, at_events, train, write_job

from dpfunc.checkpoint.journal import count_steps
from dpfunc.errors import InvalidArgument
from dpfunc.train import _saved as saved
from dpfunc.train._config_file import read_job
from dpfunc.train._model import load_base, load_processing
from dpfunc.train.predict import predict

FAST = ("--steps", 1, "--physical_batch_size", 32)


def write_base(folder, task, kind):
    """The job, over a base with weights that lacks what the task adds: a head, a pooler, layers before the head."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DistilBertConfig

    write_job(folder, task, "gpt2" if kind == "distilbert" else kind)
    if kind == "distilbert":
        sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}
        DistilBertConfig(vocab_size=30, **sizes).save_pretrained(folder / "tiny")
    config = AutoConfig.from_pretrained(folder / "tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "t5":
            base = AutoModelForSeq2SeqLM.from_config(config)
        elif task == "causal_lm":
            base = AutoModelForCausalLM.from_config(config)
        else:
            base = AutoModel.from_config(config, **({"add_pooling_layer": False} if kind == "bert" else {}))
    base.save_pretrained(folder / "tiny")
    shutil.rmtree(folder / "tiny" / "1_Pooling", ignore_errors=True)
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace(", init: random", ""))


TEXTS = {
    "classes, lora, new pooler": ("text_classification", "bert", "lora"),
    "classes, lora, layers before the head": ("text_classification", "distilbert", "lora"),
    "classes, lora": ("text_classification", "llama", "lora"),
    "classes, full": ("text_classification", "bert", "full"),
    "classes, head": ("text_classification", "bert", "head"),
    "classes, bitfit": ("text_classification", "bert", "bitfit"),
    "a number, lora, new pooler": ("text_regression", "bert", "lora"),
    "a number, full": ("text_regression", "gpt2", "full"),
    "words, lora": ("token_classification", "bert", "lora"),
    "words, full": ("token_classification", "bert", "full"),
    "language, lora": ("causal_lm", "gpt2", "lora"),
    "language, full": ("causal_lm", "gpt2", "full"),
    "sequences, lora": ("seq2seq", "t5", "lora"),
    "sequences, full": ("seq2seq", "t5", "full"),
}


def trained(patch, *flags):
    """Train the job of this folder; a copy of the model as it was at the end."""
    kept = []
    at_events(patch, on_train_end=lambda trainer, state: kept.append(copy.deepcopy(trainer.model)))
    result = train(*FAST, *flags)
    assert result.exit_code == 0, result.output
    return kept[0].train(False)


@pytest.mark.parametrize(("task", "kind", "strategy"), TEXTS.values(), ids=TEXTS)
def test_the_model_that_is_read_back_is_the_trained_one(tmp_path, monkeypatch, task, kind, strategy):
    write_base(tmp_path, task, kind)
    if task == "token_classification":
        rows = [json.loads(line) for line in (tmp_path / "mails.jsonl").read_text().splitlines()]
        lines = [json.dumps({"text": row["text"], "label": "O O TOPIC O O O O"}) for row in rows]
        (tmp_path / "mails.jsonl").write_text("\n".join(lines))
    elif task == "text_regression":
        (tmp_path / "mails.jsonl").write_text(
            (tmp_path / "mails.jsonl").read_text().replace('"sport"', "1.5").replace('"money"', "0.5")
        )
    monkeypatch.chdir(tmp_path)
    flags = ["--strategy", strategy, *(["--targets", "q_lin"] if kind == "distilbert" else [])]
    model = trained(monkeypatch, *flags)
    ids = torch.tensor([[4, 5, 6, 7], [9, 8, 7, 6]])
    batch = {"input_ids": ids, **({"labels": ids} if task == "seq2seq" else {})}
    job = read_job("job.yaml", [*flags, "--seed", "7"])
    if strategy == "lora":
        from peft import PeftModel

        again = PeftModel.from_pretrained(load_base(job, load_processing(job)), "run/model")
    else:
        again = type(model).from_pretrained("run/model", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again.train(False)(**batch).logits, model(**batch).logits, rtol=0, atol=1e-6)


def test_columns_in_any_order(tmp_path, monkeypatch):
    """Predictions are those of training, where columns are in no alphabetical order; folders that sorted them are refused."""
    write_feature_job(tmp_path, "table")
    monkeypatch.chdir(tmp_path)
    job = Path("job.yaml")
    text = job.read_text().replace("age: [18, 90], hours: [0, 80]", "hours: [0, 80], age: [18, 90]")
    job.write_text(text.replace(", eval_fraction: 0.2", ", eval: people.csv"))
    assert train().exit_code == 0
    config = json.loads(Path("run/model/config.json").read_text())
    assert [name for name, _ in config["front"]["numbers"]] == ["hours", "age"]

    def accuracy():
        rows = list(csv.DictReader(Path("people.csv").read_text().splitlines()))
        found = predict("run", "people.csv")
        return sum(each["label"] == row["income"] for each, row in zip(found, rows, strict=True)) / len(rows)

    measured = json.loads(Path("run/metrics.json").read_text())["eval_accuracy"]
    assert accuracy() == pytest.approx(measured)
    for name in ("numbers", "categories"):  # as an older version wrote it
        config["front"][name] = dict(sorted(config["front"][name]))
    Path("run/model/config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidArgument, match=r"Expected the columns of a table in the order of training, got 'run/model'"
    ):
        next(predict("run", "people.csv"))


def zeroed(folder, name="classifier.weight"):
    path = folder / "model.safetensors"
    save_file({key: value * (key != name) for key, value in load_file(path).items()}, path, metadata={"format": "pt"})


def rounded(folder, name="classifier.weight"):
    path = folder / "model.safetensors"
    read = load_file(path)
    save_file({**read, name: read[name].bfloat16().float()}, path, metadata={"format": "pt"})


def turned(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["front"]["numbers"].reverse()
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("lose", [zeroed, turned], ids=["a weight", "the order of columns"])
def test_what_is_lost_is_named_before_the_run_says_saved(tmp_path, monkeypatch, lose):
    write_feature_job(tmp_path, "table")
    monkeypatch.chdir(tmp_path)
    saves = iter(range(9))  # the first is that of the rehearsal
    monkeypatch.setattr(saved, "save_features", lambda folder, front: next(saves) and lose(folder))
    result = train()
    assert result.exit_code == 1
    named = "classifier.weight" if lose is zeroed else "inputs.features"
    assert f"got others for {named}" in result.stderr.replace("\n", " ")
    assert "Saved" not in result.stdout
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "Saved" in train("--resume").stdout


@MODES
@pytest.mark.parametrize("lose", [zeroed, rounded, turned], ids=["a weight", "digits", "the order of columns"])
def test_what_will_be_lost_is_named_before_the_first_step(tmp_path, monkeypatch, lose, mode):
    """Also a weight that begins at zero."""
    write_feature_job(tmp_path, "table")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved, "save_features", lambda folder, front: lose(folder))
    result = train(*mode)
    assert result.exit_code == 1
    named = "inputs.features" if lose is turned else "classifier.weight"
    assert f"got others for {named}" in result.stderr.replace("\n", " ")
    assert "Do not use it. Nothing was spent." in result.stderr
    assert count_steps(Path("run/privacy_journal.jsonl")) == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "Saved" in train().stdout
