"""What a run saves is what was trained: each newly drawn module is in it, and what is not is found before a step."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import NOISY, adapted, classifier, labelled, language_model, pad, texts, training_arguments
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from dpfunc.checkpoint.journal import count_steps
from dpfunc.errors import CheckpointError
from dpfunc.hf.trainer.trainer import DPTrainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a language model, which has neither a pooler nor a classifier."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    )).save_pretrained(folder)  # fmt: skip
    return folder


def read_base(folder, seed):
    torch.manual_seed(seed)
    return BertForSequenceClassification.from_pretrained(folder)


def trainer_of(folder, model, data=None, kind=DPTrainer, **options):
    changes = {"max_steps": 2, "per_device_train_batch_size": 4, **options.pop("changes", {})}
    args = training_arguments(folder, **changes)
    return kind(model, args, privacy=NOISY, train_dataset=labelled(40) if data is None else data, **options)


def logits_of(model):
    batch = {name: torch.stack([record[name] for record in labelled(4)]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**batch).logits


METHODS = {
    "LoRA": {"target_modules": ["query", "value"]},
    "LoRA of a layer that was drawn": {"target_modules": ["query", "pooler.dense"]},
    "LoRA of all layers": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": ["query"], "use_dora": True},
    "PiSSA by random products": {"target_modules": ["query"], "init_lora_weights": "pissa_niter_1"},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "steps", "save_steps": 1, "save_only_model": True},
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_another_seed_gives_the_trained_model(tmp_path, base, name, changes):
    """An adapter of a classifier, whose pooler the folder of its base does not have."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, **METHODS[name])
    trainer = trainer_of(tmp_path / "run", peft.get_peft_model(read_base(base, 1), config), changes=changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", *tmp_path.glob("run/checkpoint-2")):
        names = load_file(folder / "adapter_model.safetensors")
        assert sum("pooler.dense" in each and "lora" not in each for each in names) == 2
        again = peft.PeftModel.from_pretrained(read_base(base, 2), folder)
        assert torch.equal(logits_of(again), logits_of(trainer.model))


def without_a_place(model):
    """The classifier is trained, and PEFT does not know of it."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    for name, param in model.named_parameters():
        if "classifier" in name:
            param.requires_grad_(True)
    return model


@pytest.mark.parametrize("kind", ["drawn", "known"])
def test_a_classifier_that_peft_does_not_know_is_saved(tmp_path, base, kind):
    """Of a base that was read from a folder, and of one that was not."""

    def made(seed):
        return read_base(base, seed) if kind == "drawn" else classifier()

    trainer = trainer_of(tmp_path / "run", without_a_place(made(1)))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = peft.PeftModel.from_pretrained(made(2), tmp_path / "saved")
    assert torch.equal(logits_of(again), logits_of(trainer.model))


@pytest.mark.parametrize("save", ["steps", "no"])
@pytest.mark.parametrize("kind", ["16 bits", "two active", "one asleep"])
def test_what_is_read_back_changes_no_part_of_the_model(tmp_path, kind, save):
    """PEFT makes new parameters in float32 of an adapter in bfloat16, which a run would never train; and of several
    active adapters it leaves one."""
    torch.manual_seed(5)
    model = adapted(lora_dropout=0.2)
    if kind == "16 bits":
        model.to(torch.bfloat16)
    else:
        config = {"target_modules": ["c_proj"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
        model.add_adapter("second", peft.LoraConfig(r=2, **config))
        model.base_model.set_adapter(["default", "second"] if kind == "two active" else "default")
    before, active = (
        {name: (param, param.detach().clone()) for name, param in trainable_of(model)},
        model.active_adapters,
    )
    modes = []

    class Seen(DPTrainer):
        def _mask(self, batch, before):
            modes.append(self.model.training)
            return super()._mask(batch, before)

    changes = {"save_strategy": save, "learning_rate": 0.5}
    trainer = trainer_of(tmp_path, model, texts(), kind=Seen, data_collator=pad, changes=changes)
    trainer.train()
    assert model.active_adapters == active
    assert modes == [True] * 2
    now = dict(trainable_of(model))
    assert now.keys() == before.keys() == trainer._run.params.keys()
    assert all(now[name] is param for name, (param, _) in before.items())
    assert not any(torch.equal(now[name], value) for name, (_, value) in before.items())


def trainable_of(model):
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


class Forgets(DPTrainer):
    """Saves no classifier."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        from pathlib import Path

        for path in Path(output_dir).glob("*.safetensors"):
            save_file(
                {name: value for name, value in load_file(path).items() if "classifier" not in name},
                path,
                metadata={"format": "pt"},
            )


class Rounds(DPTrainer):
    """Saves bfloat16."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, {name: value.bfloat16() for name, value in self.model.state_dict().items()})


def adapter(base):
    return peft.get_peft_model(read_base(base, 1), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


LOST = {  # model, kind of Trainer, names in the message
    "a classifier that is trained beside LoRA": (lambda base: without_a_place(classifier()), Forgets, "classifier"),
    "a classifier that is not saved": (lambda base: read_base(base, 1), Forgets, "classifier"),
    "an adapter's classifier": (adapter, Forgets, "classifier"),
    "fewer digits": (lambda base: read_base(base, 1), Rounds, "bert"),
}


@pytest.mark.parametrize("changes", [{}, {"save_strategy": "steps", "save_steps": 1}])
@pytest.mark.parametrize("name", LOST)
def test_what_is_not_saved_is_found_before_the_first_step(tmp_path, base, name, changes):
    make, kind, lost = LOST[name]
    trainer = trainer_of(tmp_path, make(base), kind=kind, changes=changes)
    before = {each: value.clone() for each, value in trainer.model.state_dict().items()}
    for act in (trainer.rehearse, trainer.train):
        with pytest.raises(CheckpointError, match=f"all that is trained.*{lost}.*Nothing was spent"):
            act()
    assert count_steps(tmp_path / "privacy_journal.jsonl") == 0
    assert all(torch.equal(before[each], value) for each, value in trainer.model.state_dict().items())


def with_another_head(base):
    model = read_base(base, 1)
    model.classifier = torch.nn.Linear(16, 5)
    return model


def with_more(base):
    model = read_base(base, 1)
    model.classifier = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 2))
    return model


@pytest.mark.parametrize("make", [with_another_head, with_more])
def test_a_model_whose_configuration_is_of_another_is_warned_of(tmp_path, base, make, caplog):
    """Its weights are saved, and `from_pretrained` draws others in their place."""
    caplog.set_level(logging.WARNING)
    trainer = trainer_of(tmp_path, make(base))
    trainer.rehearse()
    assert "got other shapes or places of classifier" in caplog.text
    assert "model.config" in caplog.text


@pytest.mark.parametrize("make", [classifier, language_model, lambda: read_base_of(50)])
def test_nothing_is_said_of_a_sound_model(tmp_path, make, caplog, capfd):
    caplog.set_level(logging.WARNING, logger="dpfunc")
    model = make()
    lm = type(model).__name__.startswith("GPT2")
    trainer = trainer_of(tmp_path, model, texts() if lm else None, data_collator=pad if lm else None)
    trainer.rehearse()
    assert not [line for line in caplog.text.splitlines() if "Expected" in line]
    said = capfd.readouterr()
    assert "LOAD REPORT" not in said.err
    assert "Writing model" not in said.err


def read_base_of(vocab):
    """A classifier with more tokens than it began with."""
    model = classifier()
    model.resize_token_embeddings(vocab + 7, mean_resizing=False)
    return model


# PEFT warns that it does what is wanted here.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_new_tokens_are_saved_with_an_adapter(tmp_path, base):
    """The embedding that was made larger is read back by another seed."""

    def larger(seed):
        model = read_base(base, seed)
        model.resize_token_embeddings(57, mean_resizing=False)
        return model

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    trainer = trainer_of(tmp_path / "run", peft.get_peft_model(larger(1), config))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = peft.PeftModel.from_pretrained(larger(2), tmp_path / "saved")
    own, read = trainer.model.state_dict(), again.state_dict()
    name = next(each for each in own if each.endswith("word_embeddings.weight"))
    assert torch.equal(own[name], read[name])
