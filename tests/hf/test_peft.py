"""Adapters of PEFT: every engine gives the gradients of single samples, and PEFT opens what is saved."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from zoo.language import llama, text
from zoo.parity import roughen

from dpfunc import engines
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import with_params
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import infer_task, make_loss_fn

TASK = {"task_type": "CAUSAL_LM"}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **TASK}


def config(kind, **options):
    import peft

    return getattr(peft, kind)(**options)


CONFIGS = {
    "LoRA": lambda: config("LoraConfig", **LORA),
    "rsLoRA": lambda: config("LoraConfig", **LORA, use_rslora=True),
    "DoRA": lambda: config("LoraConfig", **LORA, use_dora=True),
    "biases": lambda: config("LoraConfig", **LORA, bias="lora_only"),
    "modules_to_save": lambda: config("LoraConfig", **LORA, modules_to_save=["lm_head"]),
    "embeddings": lambda: config("LoraConfig", **{**LORA, "target_modules": ["embed_tokens", "q_proj"]}),
    "new tokens": lambda: config("LoraConfig", **LORA, trainable_token_indices=[8, 31]),
    "IA3": lambda: config(
        "IA3Config", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK
    ),
    "prefix": lambda: config("PrefixTuningConfig", num_virtual_tokens=3, **TASK),
    "prefix with projection": lambda: config(
        "PrefixTuningConfig", num_virtual_tokens=3, prefix_projection=True, **TASK
    ),
    "prompt": lambda: config("PromptTuningConfig", num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: config("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
}


def base():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return roughen(llama()).eval()


def adapted(name):
    from peft import get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(base(), CONFIGS[name]()).eval()


def batch():
    rows = text(torch.float32)
    labels = torch.where(rows["mask"] == 1, rows["ids"], -100)
    return {"input_ids": rows["ids"], "attention_mask": rows["mask"], "labels": labels}


def moved(params):
    generator = torch.Generator().manual_seed(2)
    return {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}


def assert_parity(loss_fn, params, batch, *, engine=None, without_gradient=(), tolerance=1e-4):
    """Norms, sums and losses of an engine equal those of the loop over single samples."""
    expected, found = engines.loop()(loss_fn, params, batch), (engine or engines.auto())(loss_fn, params, batch)
    torch.testing.assert_close(found.losses_B, expected.losses_B, rtol=tolerance, atol=tolerance)
    norms, theirs = expected.sq_norms(), found.sq_norms()
    largest = max(float(norms_B.max()) for norms_B in norms.values()) ** 0.5
    factors = {name: torch.linspace(0, 1, len(expected.losses_B)) for name in params}
    sums, their_sums = expected.weighted_sum(factors), found.weighted_sum(factors)
    for name in params:
        off_B = (norms[name].sqrt() - theirs[name].sqrt()).abs()
        assert float(off_B.max()) <= tolerance * largest, name
        assert float((sums[name] - their_sums[name]).norm()) <= tolerance * largest, name
    assert {name for name in params if not norms[name].any()} == set(without_gradient)


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name):
    """L7, T8: the default engine for every kind of adapter."""
    model = adapted(name)
    forward, params = adapters.functionalize(model)
    assert infer_task(model) == "causal_lm"
    assert_parity(make_loss_fn(forward, "causal_lm"), moved(params), batch())


@pytest.mark.parametrize("name", ["DoRA", "prefix"])
def test_rows_are_not_computed_one_by_one(name):
    forward, params = adapters.functionalize(adapted(name))
    engine, loss_fn = engines.auto(), make_loss_fn(forward, "causal_lm")
    engine(loss_fn, moved(params), batch())
    assert engine.decision(loss_fn).engine in ("one pass", "groups")


def test_dora_starts_as_the_model_and_moves_both_parts():
    """DoRA's magnitude and directions are trained; the norm of the weight counts as a constant, as in PEFT."""
    model = adapted("DoRA")
    forward, params = adapters.functionalize(model)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    torch.testing.assert_close(forward(params, **inputs).logits, base()(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert {name.rsplit(".", 3)[1] for name in params} == {"lora_A", "lora_B", "lora_magnitude_vector"}


# What PEFT itself warns of when it saves or loads.
QUIET = ("embedding layers found", "Could not find a config file", "tie")


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_adapters_open_in_peft(name, tmp_path):
    """L7: released parameters in PEFT's own format; the user's model is not changed."""
    from peft import PeftModel

    model = adapted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = copy.deepcopy(model.peft_config)
    forward, params = adapters.functionalize(model)
    params = moved(params)
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message=f".*{message}")  # PEFT, about models that have no home
        folder = adapters.save(model, params, tmp_path / "adapter")
        again = PeftModel.from_pretrained(base(), str(folder)).eval()
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    with torch.no_grad():
        expected, found = forward(params, **inputs).logits, again(**inputs, use_cache=False).logits
        assert not torch.allclose(expected, model(**inputs, use_cache=False).logits, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert model.peft_config == settings
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    copied = with_params(model, params)
    with torch.no_grad():
        torch.testing.assert_close(copied(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def two_adapters():
    from peft import get_peft_model

    model = get_peft_model(base(), config("LoraConfig", **LORA, modules_to_save=["lm_head"]), adapter_name="first")
    model.add_adapter("second", config("LoraConfig", **LORA, modules_to_save=["lm_head"]))
    return model.eval()


def test_only_the_active_adapter_is_trained(tmp_path):
    from peft import PeftModel

    model = two_adapters()
    assert all("first" in name for name in adapters.trainable(model))
    model.set_adapter("second")
    for name, parameter in model.named_parameters():
        if ".first." in name:
            parameter.requires_grad_(True)
    names = adapters.trainable(model)
    assert any("lm_head" in name and "second" in name for name in names)
    assert not any("first" in name for name in names)
    forward, params = adapters.functionalize(model)
    assert len(params) == 9
    assert_parity(make_loss_fn(forward, "causal_lm"), moved(params), batch())
    folder = adapters.save(model, moved(params), tmp_path)
    assert folder == tmp_path / "second"
    again = PeftModel.from_pretrained(base(), str(folder)).eval()
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    torch.testing.assert_close(again(**inputs).logits, forward(moved(params), **inputs).logits, rtol=1e-5, atol=1e-5)


def test_two_active_adapters_are_trained_and_saved(tmp_path):
    from peft import PeftModel, get_peft_model

    model = get_peft_model(base(), config("LoraConfig", **LORA), adapter_name="first").eval()
    model.add_adapter("second", config("LoraConfig", **LORA))
    model.base_model.set_adapter(["first", "second"])
    names = adapters.trainable(model)
    assert {which for name in names for which in ("first", "second") if f".{which}." in name} == {"first", "second"}
    forward, params = adapters.functionalize(model)
    assert_parity(make_loss_fn(forward, "causal_lm"), moved(params), batch())
    assert adapters.save(model, moved(params), tmp_path) == tmp_path
    again = PeftModel.from_pretrained(base(), str(tmp_path / "first"), adapter_name="first")
    again.load_adapter(str(tmp_path / "second"), adapter_name="second")
    again.base_model.set_adapter(["first", "second"])
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    expected = forward(moved(params), **inputs).logits
    torch.testing.assert_close(again.eval()(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # PEFT makes sparse tensors
def test_sparse_changes_of_weights_are_trained():
    """SHiRA adds a sparse matrix of trained numbers to a weight."""
    from peft import get_peft_model

    model = get_peft_model(base(), config("ShiraConfig", r=2, target_modules=["q_proj", "v_proj"], **TASK)).eval()
    forward, params = adapters.functionalize(model)
    assert_parity(make_loss_fn(forward, "causal_lm"), moved(params), batch())


def test_dropout_of_the_adapter_follows_the_mode():
    from peft import get_peft_model

    model = get_peft_model(base(), config("LoraConfig", **LORA, lora_dropout=0.5))
    forward, params = adapters.functionalize(model)
    loss_fn, params = make_loss_fn(forward, "causal_lm"), moved(params)
    model.train()
    assert not torch.equal(loss_fn(params, batch()), loss_fn(params, batch()))
    engine = engines.auto()
    engine(loss_fn, params, batch())
    assert engine.decision(loss_fn).engine in ("one pass", "groups")
    model.eval()
    assert torch.equal(loss_fn(params, batch()), loss_fn(params, batch()))
    assert_parity(loss_fn, params, batch())


def tied():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, **ids, tie_word_embeddings=True))


def test_tied_weights_under_an_adapter():
    """The head reads the adapted table's base: one tensor with two uses."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights
        model = get_peft_model(tied(), config("LoraConfig", **{**LORA, "target_modules": ["embed_tokens", "q_proj"]}))
    forward, params = adapters.functionalize(model.eval())
    assert_parity(make_loss_fn(forward, "causal_lm"), moved(params), batch())


def merged():
    model = adapted("LoRA")
    model.merge_adapter()
    return model


def switched_off():
    model = adapted("LoRA")
    model.base_model.disable_adapter_layers()
    return model


def frozen():
    model = adapted("LoRA")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def made(kind, **options):
    from peft import get_peft_model

    return get_peft_model(base(), config(kind, **options))


def says(model, **settings):
    """With these settings in its configuration."""
    for name, value in settings.items():
        object.__setattr__(model.peft_config["default"], name, value)
    return model


REFUSED = {
    "plain model": (base, InvalidArgument, "get_peft_model"),
    "frozen": (frozen, InvalidArgument, "is_trainable=True"),
    "merged": (merged, UnsupportedModel, "unmerge_adapter"),
    "switched off": (switched_off, UnsupportedModel, "enable_adapter_layers"),
    "AdaLoRA": (
        lambda: made("AdaLoraConfig", init_r=3, target_r=2, total_step=9, target_modules=["q_proj"], **TASK),
        UnsupportedModel, "by the gradients of the batch",
    ),
    "EVA": (lambda: says(adapted("LoRA"), init_lora_weights="eva"), InvalidArgument, "initialized_on_public_data"),
    "VeLoRA": (lambda: says(adapted("LoRA"), velora_config=object()), UnsupportedModel, "averages over the batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        adapters.functionalize(make())


def test_data_behind_an_initialization_may_be_public():
    model = says(adapted("LoRA"), init_lora_weights="eva")
    assert adapters.trainable(model, initialized_on_public_data=True)


def test_parameters_that_would_be_lost_are_not_saved(tmp_path):
    """A layer that was unfrozen beside the adapter has no place in PEFT's files."""
    model = adapted("LoRA")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    _, params = adapters.functionalize(model)
    assert any(name.endswith("norm.weight") for name in params)
    with pytest.raises(InvalidArgument, match="modules_to_save"):
        adapters.save(model, params, tmp_path)
    with pytest.raises(InvalidArgument, match="unknown"):
        adapters.save(model, {"nothing": torch.zeros(1)}, tmp_path)
    assert not any(tmp_path.iterdir())


def test_sums_of_gradients_in_the_model_are_not_touched():
    model = adapted("LoRA")
    forward, params = adapters.functionalize(model)
    engines.auto()(make_loss_fn(forward, "causal_lm"), moved(params), batch()).sq_norms()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(forward.module, nn.Module)
