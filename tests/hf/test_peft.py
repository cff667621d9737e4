"""Adapters of PEFT: every engine gives the gradients of single samples, and PEFT opens what is saved."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import Case
from zoo.language import llama, text
from zoo.parity import differences, roughen, truth_of, without_gradient

from benchmarks.survey.tiny import built
from dpfunc import engines
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import with_params
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import infer_task, make_loss_fn

TASK = {"task_type": "CAUSAL_LM"}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **TASK}
IA3 = {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


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
    "IA3": lambda: config("IA3Config", **IA3, **TASK),
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
    return made(CONFIGS[name]())


def made(settings, model=None, **options):
    from peft import get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(base() if model is None else model, settings, **options).eval()


def inputs():
    rows = text(torch.float32)
    return {"input_ids": rows["ids"], "attention_mask": rows["mask"]}


def batch():
    given = inputs()
    return {**given, "labels": torch.where(given["attention_mask"] == 1, given["input_ids"], -100)}


def opened(folder, *names):
    """What PEFT reads from a folder, or several adapters from folders of their names."""
    from peft import PeftModel

    if not names:
        return PeftModel.from_pretrained(base(), str(folder)).eval()
    model = PeftModel.from_pretrained(base(), str(folder / names[0]), adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(str(folder / name), adapter_name=name)
    model.base_model.set_adapter([*names])
    return model.eval()


def moved(params):
    generator = torch.Generator().manual_seed(2)
    return {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}


def assert_parity(model):
    """Norms, sums and losses of the default engine equal those of single samples; each parameter has a gradient."""
    forward, params = adapters.functionalize(model)
    case = Case(make_loss_fn(forward, "causal_lm"), moved(params), batch())
    truth, auto = truth_of(case), engines.auto()
    assert max(differences(auto, case, truth).values()) < 2e-4
    assert not without_gradient(truth)
    assert auto.decision(case.loss_fn).engine in ("one pass", "groups")


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name):
    """The default engine for every kind of adapter."""
    model = adapted(name)
    assert infer_task(model) == "causal_lm"
    assert_parity(model)
    if name == "DoRA":  # its magnitude is trained too; the norm of the weight counts as a constant, as in PEFT
        forward, params = adapters.functionalize(model)
        torch.testing.assert_close(forward(params, **inputs()).logits, base()(**inputs()).logits, rtol=1e-4, atol=1e-4)
        assert {at.rsplit(".", 3)[1] for at in params} == {"lora_A", "lora_B", "lora_magnitude_vector"}
    assert all(parameter.grad is None for parameter in model.parameters())


# What PEFT itself warns of when it saves or loads.
QUIET = ("embedding layers found", "Could not find a config file", "tie")


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_adapters_open_in_peft(name, tmp_path):
    """Released parameters in PEFT's own format; the user's model is not changed."""
    model = adapted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = copy.deepcopy(model.peft_config)
    forward, params = adapters.functionalize(model)
    params = moved(params)
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message=f".*{message}")  # PEFT, about models that have no home
        again = opened(adapters.save(model, params, tmp_path / "adapter"))
    with torch.no_grad():
        expected = forward(params, **inputs()).logits
        assert not torch.allclose(expected, model(**inputs(), use_cache=False).logits, atol=1e-3)
        for other in (again, with_params(model, params)):
            torch.testing.assert_close(other(**inputs(), use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert model.peft_config == settings
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def two_adapters(**options):
    model = made(config("LoraConfig", **LORA, **options), adapter_name="first")
    model.add_adapter("second", config("LoraConfig", **LORA, **options))
    return model.eval()


def test_only_the_active_adapter_is_trained(tmp_path):
    model = two_adapters(modules_to_save=["lm_head"])
    assert all("first" in name for name in adapters.trainable(model))
    model.set_adapter("second")
    for name, parameter in model.named_parameters():
        if ".first." in name:
            parameter.requires_grad_(True)
    forward, params = adapters.functionalize(model)
    assert any("lm_head" in name and "second" in name for name in params)
    assert not any("first" in name for name in params)
    assert len(params) == 9
    assert_parity(model)
    folder = adapters.save(model, moved(params), tmp_path)
    assert folder == tmp_path / "second"
    expected = forward(moved(params), **inputs()).logits
    torch.testing.assert_close(opened(folder)(**inputs()).logits, expected, rtol=1e-5, atol=1e-5)
    model = two_adapters()
    model.base_model.set_adapter(["first", "second"])  # both
    forward, params = adapters.functionalize(model)
    assert {which for name in params for which in ("first", "second") if f".{which}." in name} == {"first", "second"}
    assert_parity(model)
    assert adapters.save(model, moved(params), tmp_path / "two") == tmp_path / "two"
    expected = forward(moved(params), **inputs()).logits
    again = opened(tmp_path / "two", "first", "second")
    torch.testing.assert_close(again(**inputs()).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # PEFT makes sparse tensors
def test_sparse_changes_of_weights_are_trained():
    """SHiRA adds a sparse matrix of trained numbers to a weight."""
    assert_parity(made(config("ShiraConfig", r=2, target_modules=["q_proj", "v_proj"], **TASK)))


def test_tied_weights_under_an_adapter():
    """The head reads the adapted table's base: one tensor with two uses."""
    tied = roughen(built("LlamaForCausalLM", "llama", tie_word_embeddings=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights
        model = made(config("LoraConfig", **{**LORA, "target_modules": ["embed_tokens", "q_proj"]}), tied)
    assert_parity(model)


def changed(change):
    """A model with LoRA, after a change."""
    model = adapted("LoRA")
    change(model)
    return model


def says(model, **settings):
    """With these settings in its configuration."""
    for name, value in settings.items():
        object.__setattr__(model.peft_config["default"], name, value)
    return model


REFUSED = {
    "plain model": (base, InvalidArgument, "get_peft_model"),
    "frozen": (
        lambda: changed(lambda model: model.requires_grad_(False)), InvalidArgument, "is_trainable=True",
    ),
    "none is active": (
        lambda: changed(lambda model: model.base_model.set_adapter([])), InvalidArgument, r"none in .* \[\].*set_adapter",
    ),
    "merged": (lambda: changed(lambda model: model.merge_adapter()), UnsupportedModel, "unmerge_adapter"),
    "switched off": (
        lambda: changed(lambda model: model.base_model.disable_adapter_layers()),
        UnsupportedModel, "enable_adapter_layers",
    ),
    "AdaLoRA": (
        lambda: made(config("AdaLoraConfig", init_r=3, target_r=2, total_step=9, target_modules=["q_proj"], **TASK)),
        UnsupportedModel, "by the gradients of the batch",
    ),
    "EVA": (lambda: says(adapted("LoRA"), init_lora_weights="eva"), InvalidArgument, "initialized_on_public_data"),
    "parameters": (lambda: says(adapted("LoRA"), target_parameters=["weight"]), UnsupportedModel, "Use target_modules"),
    "CPT": (
        lambda: made(config("CPTConfig", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], **TASK)),
        UnsupportedModel, "tokens of examples",
    ),
    "OSF": (
        lambda: made(config("OSFConfig", effective_rank=2, target_modules=["q_proj"], **TASK)),
        UnsupportedModel, "hooks, got some on .*U_low.*apply what they do to the released gradients",
    ),
    "AdaMSS": (lambda: says(adapted("LoRA"), use_asa=True), UnsupportedModel, "use_asa=False"),
    "VeLoRA": (lambda: says(adapted("LoRA"), velora_config=object()), UnsupportedModel, "averages over the batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        adapters.functionalize(make())
    if name == "EVA":  # the data behind an initialization may be public
        assert adapters.trainable(make(), initialized_on_public_data=True)


def test_frozen_tokens_may_hold_a_text(tmp_path):
    """PEFT saves them beside those that are trained: the cache of a text would be published."""
    model = made(config("CartridgeConfig", num_virtual_tokens=4, num_frozen_tokens=2, **TASK))
    with pytest.raises(InvalidArgument, match="frozen_embedding.* frozen.*num_frozen_tokens=0"):
        adapters.functionalize(model)
    forward, params = adapters.functionalize(model, initialized_on_public_data=True)
    assert list(params) == ["prompt_encoder.default.trainable_embedding"]
    again = opened(adapters.save(model, moved(params), tmp_path / "adapter"))
    torch.testing.assert_close(
        again(**inputs(), use_cache=False).logits, forward(moved(params), **inputs()).logits, rtol=1e-5, atol=1e-5
    )
    assert adapters.trainable(made(config("CartridgeConfig", num_virtual_tokens=4, num_frozen_tokens=0, **TASK)))


def test_a_sparse_adapter_may_be_where_data_say():
    """PEFT saves the places that a function of the user has chosen, perhaps by gradients."""
    own = config("ShiraConfig", r=2, target_modules=["q_proj"], **TASK)

    def first_numbers(layer, r, **_):
        weight = layer.weight
        return (torch.arange(weight.numel()).reshape(weight.shape) < r * sum(weight.shape)).to(weight)

    own.mask_fn = first_numbers
    model = made(own)
    with pytest.raises(InvalidArgument, match="mask_fn of your own"):
        adapters.functionalize(model)
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
