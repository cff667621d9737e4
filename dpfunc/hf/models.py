"""Helpers for models of Transformers: a check before training, causal attention, a base in 4 bits.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfunc._utils.validation import refuse, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.batchnorm import count_batchnorm
from dpfunc.functional.refused import refuse_unsupported
from dpfunc.hf._facts import AnyForward, augments, base_model, facts_of_model, quantised_layers
from dpfunc.hf.tasks import infer_task
from dpfunc.types import Params


@dataclass(frozen=True)
class ModelCheck:
    """Result of `check_model`: size of a model, problems and advice.

    Args:
        task: of `dpfunc.hf.tasks`, or None where the class does not say it.
        trained, total: numbers of parameters. batchnorms: number of layers, in any mode.
        problems: what must be changed before training. advice: what may be.
    """

    task: str | None
    trained: int
    total: int
    batchnorms: int
    problems: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([
            f"{self.trained} of {self.total} parameters are trained; task: {self.task or 'not known'}",
            *(f"must be changed: {problem}" for problem in self.problems),
            *(f"advice: {advice}" for advice in self.advice),
        ])  # fmt: skip


def check_model(model: nn.Module) -> ModelCheck:
    """Look at a model before training: what would mix samples or fail, and what saves memory or noise.

    `problems` is empty for a model that can be trained. The model is not changed and not run: what a look cannot find,
    the engines do, which compare the first batch with single samples.

    Args:
        model: a model of Transformers or PEFT.

    >>> class TinyForCausalLM(nn.Linear): ...
    >>> print(check_model(TinyForCausalLM(2, 2)))
    6 of 6 parameters are trained; task: causal_lm
    """
    config = getattr(base_model(model), "config", None)
    batchnorms = count_batchnorm(model)
    experts = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    task: str | None = None
    with suppress(UnsupportedModel):
        task = infer_task(model)
    advice = {
        f"{batchnorms} BatchNorm layers: dpfunc.functional.replace_batchnorm(model) makes them GroupNorm. Frozen "
        "statistics of public data are fine too: model.eval().": batchnorms > 0,
        "The load-balancing loss of the experts is a mean over the batch, and is not used.": experts,
        "The first layer normalises over all of a recording, padding included: pad all recordings to one public length "
        '(padding="max_length"), or a record changes the gradients of others by its length.':
            getattr(config, "feat_extract_norm", None) == "group",
    }  # fmt: skip
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    texts = [tuple(text for text, applies in each.items() if applies) for each in (_problems(model, task), advice)]
    return ModelCheck(task, trained, total, batchnorms, *texts)


def _problems(model: nn.Module, task: str | None) -> dict[str, bool]:
    """Problems of models, with what to change -> True if this one has it."""
    base, quantised = base_model(model), quantised_layers(model)
    config = getattr(base, "config", None)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    unsupported = ""
    try:
        refuse_unsupported(model, checkpointing=True)
    except UnsupportedModel as error:
        unsupported = str(error)
    return {
        unsupported: unsupported != "",
        "Gradient checkpointing is of the reentrant kind, which loses track of the parameters. Call "
        'model.activation_checkpointing_enable({"use_reentrant": False}), or prepare_model_for_kbit_training('
        'model, gradient_checkpointing_kwargs={"use_reentrant": False}).': any(map(_is_reentrant, model.modules())),
        # decoders find the last token of a sequence by it
        "The model has no padding token, so it cannot tell where a sequence ends: set config.pad_token_id.":
            task == "sequence_classification" and facts_of_model(model).lacks_padding,
        # weights in few bits have no gradients, so that without adapters only what is beside them would be trained
        f"{len(quantised)} linear layers have quantised weights, which are not trained; without an adapter only "
        f"{shorten(trained)} would be. Attach one: peft.get_peft_model(model, LoraConfig(...)).":
            bool(quantised and trained) and not hasattr(model, "peft_config"),
        "The model masks its inputs at random by numpy's generator (SpecAugment), which the key of the run does not "
        "drive. Set model.config.apply_spec_augment = False.": augments(config),
        "No parameter requires gradients. Attach an adapter, or unfreeze some.": not trained,
    }  # fmt: skip


def _is_reentrant(part: nn.Module) -> bool:
    """True for a part whose checkpointing is switched on, and not of the kind that works."""
    function = getattr(part, "_gradient_checkpointing_func", None)
    switched_on = getattr(part, "gradient_checkpointing", False) is True
    return switched_on and isinstance(function, partial) and function.keywords.get("use_reentrant") is not False


def causal_mask(attention_mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask by which token t sees tokens s <= t that are not padding, and always itself.

    Args:
        attention_mask_BT: 1 for tokens, 0 for padding. dtype: floating, that of the model.

    Returns:
        (B, 1, T, T): 0 where attended, the lowest finite value where not. Transformers takes it as `attention_mask`.

    >>> causal_mask(torch.tensor([[1, 1]]), torch.float32)[0, 0] == 0
    tensor([[ True, False],
            [ True,  True]])
    """
    if attention_mask_BT.dim() != 2:
        raise InvalidArgument(f"Expected an attention mask (B, T), got {tuple(attention_mask_BT.shape)}.")
    every_TT = attention_mask_BT.new_ones([attention_mask_BT.shape[1]] * 2, dtype=torch.bool)
    itself_TT = every_TT.tril() & every_TT.triu()
    seen_BTT = (every_TT.tril() & (attention_mask_BT != 0)[:, None, :]) | itself_TT
    return torch.where(seen_BTT, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


@dataclass(frozen=True, eq=False)
class CausalForward:
    """A forward function with causal attention; see `with_causal_attention`."""

    forward: AnyForward
    module: nn.Module

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Call the model with a causal mask in place of `attention_mask`."""
        if "attention_mask" not in kwargs:
            raise InvalidArgument("Expected an attention_mask (B, T) among the inputs, by name, got none.")
        dtype = next(value.dtype for value in self.module.parameters() if value.is_floating_point())
        return self.forward(params, *args, **{**kwargs, "attention_mask": causal_mask(kwargs["attention_mask"], dtype)})


def with_causal_attention(forward: AnyForward) -> CausalForward:
    """The same function with causal attention, for models that look at later tokens (encoders, prefix models).

    A model that sees the token it predicts learns to copy it. The model is not changed.

    Args:
        forward: from `dpfunc.functionalize`, of a model that takes `attention_mask`. Models that make positions from
            the mask (OPT) need `position_ids` as well.

    Guarantees:
        later tokens have no influence (tests/hf/test_models.py::test_a_decoder_does_not_see_what_it_predicts).

    >>> with_causal_attention(lambda params, x: x)
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a forward function of dpfunc.functionalize, got function.
    """
    module = getattr(forward, "module", None)
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"Expected a forward function of dpfunc.functionalize, got {type(forward).__name__}.")
    return CausalForward(forward, module)


def four_bit(compute_dtype: torch.dtype) -> Any:
    """The `quantization_config` for `from_pretrained` of a base in 4 bits (NF4), to train adapters on.

    Args:
        compute_dtype: what weights are unpacked to: torch.bfloat16 on accelerators, torch.float32 on the CPU.

    Raises:
        InvalidArgument: not a floating dtype. UnsupportedModel: bitsandbytes is not installed.

    Paper: Dettmers, Pagnoni, Holtzman, Zettlemoyer 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3.

    >>> four_bit(torch.int8)
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a floating dtype, got compute_dtype=torch.int8.
    """
    refuse(
        (not isinstance(compute_dtype, torch.dtype) or not compute_dtype.is_floating_point,
         f"Expected a floating dtype, got compute_dtype={compute_dtype!r}."),
        (importlib.util.find_spec("bitsandbytes") is None, UnsupportedModel(
            "A base in 4 bits needs bitsandbytes, which is not installed: `pip install 'bitsandbytes>=0.46'`. On CPUs "
            "it is slow. Without it, LoRA on a base in bfloat16 trains the same parameters with the same noise, in "
            "four times the memory for weights."
        )),
    )  # fmt: skip
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)
