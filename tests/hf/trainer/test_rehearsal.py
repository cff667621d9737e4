"""What would end a run in the midst of it is found before its first step: one record among many, an evaluation, weights
that are not read back."""

from __future__ import annotations

import logging
import sys
import traceback
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer_cases import (
    NOISY,
    again,
    at,
    classifier,
    labelled,
    language_model,
    pad,
    same,
    texts,
    trained,
    training_arguments,
)
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

from dpfunc.checkpoint.journal import count_steps
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.hf.tasks import TASKS
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.rng import insecure_key

KEY = insecure_key(77)
# One microbatch, but in large draws.
STEPS = {"max_steps": 4, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}


def trainer_of(folder, model, data, **options):
    changes = {**STEPS, "save_strategy": "steps", "save_steps": 2, **options.pop("changes", {})}
    return DPTrainer(model, training_arguments(folder, **changes), privacy=NOISY, train_dataset=data, **options)


def refused(folder, trainer, message, kind=InvalidArgument):
    """The run ends before its first step, with a message that shows nothing of a record."""
    with pytest.raises(kind, match=message) as caught:
        trainer.train()
    assert count_steps(folder / "privacy_journal.jsonl") == 0
    assert trainer.ledger.num_steps == 0
    assert "Nothing was spent" in str(caught.value)


def roberta(**more):
    torch.manual_seed(0)
    return RobertaForSequenceClassification(RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=18, pad_token_id=1, **more,
    ))  # fmt: skip


def t5(kind=T5ForSequenceClassification, **more):
    torch.manual_seed(0)
    return kind(T5Config(
        vocab_size=50, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0, **more,
    ))  # fmt: skip


def bart(**more):
    torch.manual_seed(0)
    return BartForSequenceClassification(BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=1,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16, eos_token_id=2,
        **more,
    ))  # fmt: skip


def ended(num_records=60, **change):
    """Token lists that end with the token 2, which is nowhere else; one of them in the midst has other values."""
    found = []
    for i, record in enumerate(labelled(num_records)):
        ids = [*record["input_ids"].clamp(min=3).tolist()[:5], 2]
        found.append({"input_ids": ids, "attention_mask": [1] * 6, "labels": i % 2})
    if change:
        found[37] |= {**change, "attention_mask": [1] * len(change["input_ids"])}
    return found


def lists(ids):
    data = texts()
    data[37] = {"input_ids": ids}
    return data


def answers(labels):
    return [
        {"input_ids": [3, 4, 2], "attention_mask": [1, 1, 1], "labels": labels if i == 37 else [5, 2]}
        for i in range(60)
    ]


def typed(kind):
    return [{**row, "token_type_ids": [0, kind * (i == 37)] + [0] * 4} for i, row in enumerate(ended())]


def typing(records):
    return {**padded(records), "token_type_ids": torch.tensor([row["token_type_ids"] for row in records])}


MARKED = [39, 39, 39]


def masked_by_minus_one(records):
    """A collator that masks a token of one record by another number than -100."""
    batch = pad(records)
    for row, record in enumerate(records):
        if record["input_ids"] == MARKED:
            batch["labels"][row, 1] = -1
    return batch


RECORDS = {  # model, data, collator, message
    "a token beyond the table": (roberta, ended(input_ids=[4, 50, 2]), None, "0 <= id < 50"),
    "a negative token": (roberta, ended(input_ids=[4, -7, 2]), None, "0 <= id < 50"),
    "more tokens than RoBERTa has positions": (roberta, ended(input_ids=[4] * 17), None, "rows of at most 16 tokens"),
    "more tokens than BERT has positions": (classifier, ended(input_ids=[4] * 17), None, "rows of at most 16 tokens"),
    "a token beyond a language model": (language_model, lists([4, 40, 2]), pad, "0 <= id < 40 .*'input_ids'"),
    "more tokens than GPT-2 has positions": (language_model, lists([4] * 17), pad, "rows of at most 16 tokens"),
    "no token": (language_model, lists([]), pad, "a token or more in each record of train_dataset"),
    "null for its tokens": (language_model, lists(None), pad, "a token or more in each record of train_dataset"),
    "a type that BERT has not": (classifier, typed(2), typing, "'token_type_ids' below 2 in each record of train_dataset"),
    "a class beyond the table": (classifier, [{**row, "labels": 2 if i == 37 else 0} for i, row in enumerate(ended())], None, "classes 0 <= label < 2.* in 'labels' of each record of train_dataset"),
    "a label below 0": (language_model, lists(MARKED), masked_by_minus_one, "0 <= id < 40 .*or -100 for none, in 'labels' of each record of train_dataset"),
    "an answer below 0": (lambda: t5(T5ForConditionalGeneration), answers([-1, 2]), None, "-100 for none, in 'labels'"),
    "an answer beyond the table": (lambda: t5(T5ForConditionalGeneration), answers([50, 2]), None, "in 'labels' of each record of train_dataset"),
}  # fmt: skip


def padded(records):
    """A collator of token lists for models whose padding is 1."""
    longest = max(len(record["input_ids"]) for record in records)
    rows = {
        name: torch.tensor([[*record[name], *[fill] * (longest - len(record[name]))] for record in records])
        for name, fill in (("input_ids", 1), ("attention_mask", 0))
    }
    labels = [record["labels"] for record in records]
    if isinstance(labels[0], list):
        width = max(map(len, labels))
        labels = [[*each, *[-100] * (width - len(each))] for each in labels]
    return {**rows, "labels": torch.tensor(labels)}


@pytest.mark.parametrize("name", RECORDS)
def test_one_record_in_the_midst_of_many(tmp_path, name):
    make, data, collate, message = RECORDS[name]
    trainer = trainer_of(tmp_path, make(), data, data_collator=collate or padded)
    refused(tmp_path, trainer, message)
    trainer = trainer_of(tmp_path / "eval", make(), data[:30], eval_dataset=data, data_collator=collate or padded)
    refused(tmp_path / "eval", trainer, message.replace("train_dataset", "eval_dataset"))


def test_a_stream_is_evaluated_as_it_comes(tmp_path):
    """Nothing of it is looked at before."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(ended(4))

        def __len__(self):
            return 4

    trainer = trainer_of(tmp_path, classifier(), ended(), eval_dataset=Stream(), data_collator=padded)
    trainer.train()
    assert trainer.ledger.num_steps == 4


@pytest.mark.parametrize("make", [roberta, classifier])
def test_the_longest_record_that_fits_is_trained_on(tmp_path, make):
    """Padding takes no position of RoBERTa, and 16 tokens fit."""
    trainer = trainer_of(tmp_path, make(), ended(input_ids=[4] * 16), data_collator=padded)
    trainer.train()
    assert trainer.ledger.num_steps == 4


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class OfMyOwn(torch.nn.Module):
    """A model that is none of Transformers, with its own loss."""

    def __init__(self):
        super().__init__()
        self.classifier = torch.nn.Linear(6, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.classifier(input_ids.float() / 50)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class WithMore(OfMyOwn):
    def forward(self, input_ids, attention_mask=None, labels=None):
        return {**super().forward(input_ids, attention_mask, labels), "more": [None]}


def own_loss(forward, params, batch):
    logits = forward(params, input_ids=batch["input_ids"], labels=batch["labels"])["logits"]
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


EVERY = {"eval_strategy": "steps", "eval_steps": 2}
NAMED = {"a": ended(20), "b": ended(3)}
EMPTY = {**EVERY, "metric_for_best_model": "b_loss"}
EVALUATIONS = {  # model, options, message
    "T5 gives hidden states after its logits": (t5, {"compute_metrics": accuracy}, "'tuple' object has no attribute 'argmax'.* Of a tuple take the first"),
    "so does BART": (bart, {"compute_metrics": accuracy}, "'tuple' object has no attribute 'argmax'"),
    "a metric of another name": (classifier, {"compute_metrics": accuracy, "changes": {**EVERY, "metric_for_best_model": "acuracy"}}, "got 'acuracy', and metrics accuracy, loss"),
    "a metric without metrics": (classifier, {"changes": {**EVERY, "metric_for_best_model": "f1"}}, "got 'f1', and metrics loss"),
    "a metric of no data set": (classifier, {"eval_dataset": NAMED, "changes": {**EVERY, "metric_for_best_model": "loss"}}, "got 'loss', and metrics a_loss, b_loss"),
    "a metric that is an array": (classifier, {"compute_metrics": lambda prediction: {"a": np.eye(2)}, "changes": EVERY}, "which a checkpoint can hold, got TypeError: Object of type ndarray.* take .tolist"),
    "a metric that is no number": (classifier, {"compute_metrics": lambda prediction: {"a": "good"}, "changes": {**EVERY, "metric_for_best_model": "a"}}, "metric_for_best_model to be one number, got 'a'"),
    "no record": (classifier, {"eval_dataset": [], "changes": EVERY}, "none in 'eval_dataset'.*Leave it out"),
    "no record under one name": (classifier, {"eval_dataset": {"a": ended(20), "b": []}, "changes": EMPTY}, "none in 'b'"),
    "metrics without names": (classifier, {"compute_metrics": lambda prediction: 0.5, "changes": EVERY}, "to return a dictionary from names to numbers, got AttributeError"),
    "a name that is nowhere": (classifier, {"compute_metrics": lambda prediction: {"a": undefined}}, "NameError"),  # noqa: F821  (as it is meant)
    "LLaVA of Transformers 5.24 gives an output that is none": (WithMore, {"loss": own_loss, "compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits[0]}, "outputs and labels that the Trainer can gather, got TypeError.*keys_to_ignore_at_inference"),
    "outputs of another kind": (classifier, {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits["x"]}, "eval_dataset to be evaluated as the run will"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_that_fails_is_found_before_the_first_step(tmp_path, name):
    make, options, message = EVALUATIONS[name]
    trainer = trainer_of(tmp_path, make(), ended(), **{"eval_dataset": ended(20), "data_collator": padded, **options})
    refused(tmp_path, trainer, message)


@pytest.mark.parametrize(("data", "best"), [(ended(20), None), (NAMED, None), (NAMED, "a_loss"), (ended(20), "loss")])
def test_a_rate_that_follows_an_evaluation_has_its_metric(tmp_path, data, best):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = trainer_of(
        tmp_path, model, ended(), eval_dataset=data, data_collator=padded, optimizers=(optimizer, plateau),
        changes={**EVERY, "metric_for_best_model": best},
    )  # fmt: skip
    if best is None:
        refused(tmp_path, trainer, "Expected metric_for_best_model, by which ReduceLROnPlateau")
    else:
        trainer.train()
        assert trainer.ledger.num_steps == 4


def test_a_model_that_is_none_of_transformers(tmp_path):
    trainer = trainer_of(
        tmp_path, OfMyOwn(), ended(), eval_dataset=ended(20), data_collator=padded, loss=own_loss, compute_metrics=accuracy,
        changes={**EVERY, "include_for_metrics": ["inputs", "loss"], "metric_for_best_model": "accuracy"},
    )  # fmt: skip
    trainer.train()
    assert trainer.ledger.num_steps == 4
    assert sum("eval_accuracy" in line for line in trainer.state.log_history) == 2


def test_labels_of_several_classes_are_floats(tmp_path):
    data = [{**record, "labels": [i % 2, 1, 0]} for i, record in enumerate(ended())]
    model = roberta(problem_type="multi_label_classification", num_labels=3)
    refused(tmp_path, trainer_of(tmp_path, model, data, eval_dataset=data, data_collator=padded), "labels.float")


def test_a_metric_that_needs_more_records_is_warned_of(tmp_path, caplog):
    caplog.set_level(logging.WARNING)

    def needs_many(prediction):
        if len(prediction.label_ids) < 17:
            raise ValueError("Expected more records.")
        return {"many": 1.0}

    trainer = trainer_of(
        tmp_path, classifier(), ended(), eval_dataset=ended(), compute_metrics=needs_many, data_collator=padded
    )
    trainer.train()
    assert trainer.evaluate()["eval_many"] == 1.0
    assert "ValueError: Expected more records., for 16 records" in caplog.text
    caplog.clear()
    trainer.eval_dataset = {"many": ended(), "few": ended(3)}
    trainer.rehearse()
    for count in (16, 3):  # of each data set
        assert f"Expected more records., for {count} records" in caplog.text


def test_a_rehearsal_changes_no_bit_of_the_run(tmp_path):
    """Of a model with dropout; and what it evaluates is not logged."""
    found = []
    for name, held_out in (("with", ended(20)), ("without", None)):
        trainer = trainer_of(
            tmp_path / name, classifier(), ended(), eval_dataset=held_out, data_collator=padded, key=KEY,
            compute_metrics=accuracy,
        )  # fmt: skip
        again(KEY)
        trainer.train()
        assert not any("eval_loss" in line for line in trainer.state.log_history)
        found.append(trained(trainer.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_evaluation_after_a_rehearsal_has_all_records(tmp_path):
    """The Trainer keeps the first loader of a data set whose workers stay."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = trainer_of(
        tmp_path, classifier(), ended(), eval_dataset=ended(40), data_collator=padded, changes={**EVERY, **workers},
        compute_metrics=lambda prediction: {"records": len(prediction.label_ids)},
    )  # fmt: skip
    trainer.train()
    assert [line["eval_records"] for line in trainer.state.log_history if "eval_records" in line] == [40, 40]


def test_a_rehearsal_that_is_asked_for_waits_for_no_other_process(tmp_path, monkeypatch):
    """A dry run of the command does it on the one that writes, and the others have ended."""
    trainer = trainer_of(tmp_path, classifier(), ended(), data_collator=padded)
    monkeypatch.setattr(sys.modules[DPTrainer.__module__], "rehearse_gradients", lambda trainer: None)
    trainer._ranks = SimpleNamespace(writes=True)  # which cannot communicate
    trainer.rehearse()


def test_a_rehearsal_has_the_padding_token_of_the_run(tmp_path):
    """Which a Trainer takes of the tokenizer when it begins: without it the gradient depends on the padding."""
    words = {f"w{i}": i for i in range(38)} | {"<unk>": 38, "<pad>": 39}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", pad_token="<pad>"
    )

    def made():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=2, bos_token_id=0, eos_token_id=0
        )
        return GPT2ForSequenceClassification(config)

    data = [
        {"input_ids": [*range(1, 3 + i % 5)], "attention_mask": [1] * (2 + i % 5), "labels": i % 2} for i in range(60)
    ]
    trainer_of(tmp_path / "rehearsed", made(), data, processing_class=tokenizer).rehearse()
    trainer_of(tmp_path / "trained", made(), data, processing_class=tokenizer).train()
    without = trainer_of(tmp_path / "without", made(), data, data_collator=DataCollatorWithPadding(tokenizer))
    for begin in (without.rehearse, without.train):
        with pytest.raises(UnsupportedModel, match="model with a padding token"):
            begin()


LORA = ("LoraConfig", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True})
ADAPTERS = {
    "LoRA": LORA,
    "one factor alone": LORA,
    "DoRA": (LORA[0], {**LORA[1], "use_dora": True}),
    "modules_to_save": (LORA[0], {**LORA[1], "modules_to_save": ["ln_f"]}),
    "embeddings": (LORA[0], {**LORA[1], "target_modules": ["wte"], "fan_in_fan_out": False}),
    "new tokens": (LORA[0], {**LORA[1], "trainable_token_indices": [8, 31]}),
    "IA3": ("IA3Config", {"target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prefix with projection": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
}  # fmt: skip


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


def copied(model):
    return {name: value.clone() for name, value in trained(model).items()}


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_best_model_is_read_back_at_the_end(tmp_path, name):
    """It is the first one here; adapters of another name are in a folder of that name."""
    import peft

    torch.manual_seed(5)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model, seen, evaluations = peft.get_peft_model(language_model(), adapters, adapter_name=name), {}, []

    def worse(prediction):
        evaluations.append(prediction)
        return {"rank": -len(evaluations)}

    keep = at("on_step_end", lambda args, state, control: seen.update({state.global_step: copied(model)}))
    changes = {
        **BEST,
        "metric_for_best_model": "rank",
        "greater_is_better": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trainer_of(
        tmp_path, model, texts(), eval_dataset=texts(8), data_collator=pad, changes=changes, callbacks=[keep],
        compute_metrics=worse,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert same(seen[2], copied(model))
    assert not same(seen[2], seen[4])


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_read_back_before_the_first_step(tmp_path, caplog, name):
    """What PEFT cannot read back is refused where the run needs it; all others are trained after it, as before."""
    import peft

    kind, options = ADAPTERS[name]

    def made():
        torch.manual_seed(5)
        model = peft.get_peft_model(language_model(), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
        for each, param in model.named_parameters():
            if name == "one factor alone" and "lora_A" in each:
                param.requires_grad_(False)
        return model

    best = trainer_of(tmp_path / "best", made(), texts(), eval_dataset=texts(8), data_collator=pad, changes=BEST)
    if name in ("prefix with projection", "p-tuning"):
        refused(tmp_path / "best", best, "Leave load_best_model_at_end out", CheckpointError)
    else:
        best.train()
    found = []
    for save in ("steps", "no"):
        trainer = trainer_of(
            tmp_path / save,
            made(),
            texts(),
            data_collator=pad,
            key=KEY,
            changes={"max_steps": 1, "save_strategy": save},
        )
        again(KEY)
        trainer.train()
        found.append(trained(trainer.model))
    assert all(torch.equal(found[0][each], found[1][each]) for each in found[1])
    assert ("cannot be resumed after an interruption" in caplog.text) == (name == "prefix with projection")


def quoting(bad):
    """A loss that quotes the record of which the first token is `bad`; or any record, in the same words."""

    def loss(forward, params, batch):
        for ids in batch["input_ids"].tolist() if bad != "all" else [[]]:
            if not ids or ids[0] == bad:
                raise KeyError(f"secret {ids}" if ids else "no such column")
        return TASKS["sequence_classification"](forward, params, batch)

    return loss


def test_an_error_of_one_record_ends_the_run_without_its_words(tmp_path, caplog, capfd):
    """The type and the line are told; what was spent is known, and the run goes on once the record is mended."""
    data = labelled()
    for record in data:
        record["input_ids"][0] = 7
    data[11]["input_ids"][0] = 49
    options = {"changes": {"max_steps": 20, "save_steps": 4}, "key": insecure_key(95)}
    trainer = trainer_of(tmp_path, classifier(), data, loss=quoting(49), **options)
    trainer.privacy = replace(trainer.privacy, dp_engine="loop")
    with pytest.raises(
        InvalidArgument, match=r"got KeyError from a record of this draw, in loss, line \d+ of test_rehearsal.py"
    ) as told:
        trainer.train()
    said = "".join(traceback.format_exception(told.value)) + caplog.text + "".join(capfd.readouterr())
    assert "secret" not in said
    taken = count_steps(tmp_path / "privacy_journal.jsonl")
    assert taken == 7
    assert trainer.ledger.num_steps == taken
    resumed = trainer_of(tmp_path, classifier(), data, loss=quoting(None), **options)
    resumed.privacy = trainer.privacy
    resumed.train(resume_from_checkpoint=True)
    assert resumed.ledger.num_steps == 20


def test_an_error_of_all_records_keeps_its_message(tmp_path):
    trainer = trainer_of(
        tmp_path,
        classifier(),
        labelled(),
        loss=quoting("all"),
        changes={"per_device_train_batch_size": 16, "gradient_accumulation_steps": 3},
    )
    with pytest.raises(KeyError, match="no such column"):
        trainer.train()
    assert count_steps(tmp_path / "privacy_journal.jsonl") == 0
