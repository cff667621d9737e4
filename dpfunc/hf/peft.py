"""Adapters of PEFT: which of their parameters are trained, as a pure function, and back into PEFT's own files.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpfunc.functional
from dpfunc._utils.validation import refuse, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import Functional
from dpfunc.functional.copies import copied
from dpfunc.functional.forward import check_params
from dpfunc.functional.modules import unwrapped
from dpfunc.functional.names import select
from dpfunc.types import Params

# Initial values of LoRA that are computed from activations or gradients of data, without noise.
_LOOK_AT_DATA = ("eva", "corda", "lora_ga")
# Attributes of a layer whose adapter does nothing: what happened to it, and what undoes that.
_WITHOUT_EFFECT = {
    "merged_adapters": ("merged into", "Call peft_model.unmerge_adapter()."),
    "disable_adapters": (
        "switched off in",
        "Leave `with peft_model.disable_adapter()`, or call peft_model.base_model.enable_adapter_layers().",
    ),
}


def trainable(peft_model: nn.Module, *, initialized_on_public_data: bool = False) -> tuple[str, ...]:
    """The names of the parameters that are trained: those of the active adapters that require gradients.

    Whole copies of modules (`modules_to_save`), trained tokens and biases count; what belongs to other adapters does
    not, even where it requires gradients.

    Args:
        peft_model: from `peft.get_peft_model` or `PeftModel.from_pretrained(..., is_trainable=True)`.
        initialized_on_public_data: says that the data behind an initialization by EVA, CorDA or LoRA-GA, the text
            behind frozen tokens of a prompt, or what a mask of SHiRA follows from, is public.

    Raises:
        InvalidArgument: not a PEFT model, nothing to train, or an adapter whose initial value looked at data.
        UnsupportedModel: the adapter is merged or switched off, or its training looks at gradients of the batch.

    >>> trainable(nn.Linear(1, 1))
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a PEFT model, got Linear. Call peft.get_peft_model(model, config) before.
    """
    active = _active(peft_model)
    for config in active.values():
        _refuse_methods(config, initialized_on_public_data)
    layers = [(name, layer) for name, layer in peft_model.named_modules() if hasattr(layer, "merged_adapters")]
    for attribute, (where, advice) in _WITHOUT_EFFECT.items():
        if found := [name for name, layer in layers if getattr(layer, attribute, False)]:
            raise UnsupportedModel(f"The adapter is {where} {shorten(found)}: its parameters have no effect. {advice}")
    asleep = _parameters_of_others(peft_model, active)
    names = tuple(at for at, value in peft_model.named_parameters() if value.requires_grad and id(value) not in asleep)
    if not names:
        raise InvalidArgument(
            f"Expected at least one trainable parameter, got none in the adapters {list(active)}. They were loaded or "
            "frozen for inference: PeftModel.from_pretrained(..., is_trainable=True), or peft_model.set_adapter(...)."
        )
    fixed = [
        at for at, p in peft_model.named_parameters()
        if at.startswith("prompt_encoder.") and not p.requires_grad and id(p) not in asleep
    ]  # fmt: skip
    refuse(
        (fixed and not initialized_on_public_data,
         f"Expected prompts of which all tokens are trained, got {shorten(fixed)} frozen. They are saved as they are, "
         "without noise, and may be the cache of a text (initialize_kv_prefix_from_text). Set num_frozen_tokens=0. In "
         "a loop of your own, initialized_on_public_data=True says that they are random, or of a public text."),
    )  # fmt: skip
    return names


def _parameters_of_others(peft_model: Any, active: Mapping[str, Any]) -> set[int]:
    """The ids of what belongs to other adapters: PEFT keeps adapters in dictionaries, each under its name."""
    names = set(peft_model.peft_config)
    kept = [part for part in peft_model.modules() if isinstance(part, (nn.ModuleDict, nn.ParameterDict))]
    held = [part[name] for part in kept if set(part) <= names for name in part if name not in active]
    return {id(p) for each in held for p in (each.parameters() if isinstance(each, nn.Module) else [each])}


def functionalize(peft_model: nn.Module, *, initialized_on_public_data: bool = False) -> Functional:
    """A PEFT model as `(forward, params)` with the parameters of its active adapters: see `dpfunc.functionalize`.

    Arguments and errors are those of `trainable`. The model is not changed; call its `train()` for LoRA's dropout,
    `eval()` for none.

    Guarantees:
        every engine's gradients are those of single samples (tests/hf/test_peft.py::test_parity),
        and `save` gives them back to PEFT (test_saved_adapters_open_in_peft).
    """
    peft_model = unwrapped(peft_model)
    names = trainable(peft_model, initialized_on_public_data=initialized_on_public_data)
    return dpfunc.functional.functionalize(peft_model, names)


def save(peft_model: nn.Module, params: Params, directory: Path | str) -> Path:
    """Write the active adapters with these parameters in PEFT's own format; `PeftModel.from_pretrained` opens it.

    Args:
        peft_model: is not changed. params: trained parameters, released; some or all of those from `functionalize`.
        directory: made if it is absent. An adapter that is not called "default" goes into a folder of its name in it,
            as PEFT does.

    Returns:
        The folder with `adapter_config.json` and `adapter_model.safetensors`; of several adapters, the one around all.

    Raises:
        InvalidArgument: unknown names, wrong shapes, or parameters that PEFT's format has no place for.
    """
    peft_model = unwrapped(peft_model)
    active = _active(peft_model)
    named = select(peft_model, list(params))
    check_params(params, {name: value.shape for name, value in named.items()})
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*peft_model.parameters(), *peft_model.buffers())}
    for name, ours in named.items():
        value = params[name].detach().to(device=ours.device, dtype=ours.dtype, copy=True).contiguous()
        memo[id(ours)] = nn.Parameter(value, requires_grad=ours.requires_grad)
    filled = copied(peft_model, memo)
    if not any(config.is_prompt_learning for config in active.values()):
        _refuse_lost(filled, list(active), params)
    filled.save_pretrained(str(directory), selected_adapters=list(active))
    only = next(iter(active)) if len(active) == 1 else "default"
    return Path(directory) if only == "default" else Path(directory) / only


def _active(peft_model: nn.Module) -> dict[str, Any]:
    """The names and the configurations of the active adapters."""
    configs = getattr(peft_model, "peft_config", None)
    if not isinstance(configs, Mapping) or not hasattr(peft_model, "get_base_model"):
        raise InvalidArgument(
            f"Expected a PEFT model, got {type(peft_model).__name__}. Call peft.get_peft_model(model, config) before."
        )
    active: Any = peft_model.active_adapters
    return {name: configs[name] for name in active}


def _refuse_methods(config: Any, initialized_on_public_data: bool) -> None:
    from peft.tuners.shira.mask_functions import random_mask

    kind = str(getattr(config.peft_type, "value", config.peft_type))
    start = getattr(config, "init_lora_weights", True)
    refuse(
        (kind == "ADALORA", UnsupportedModel(
         "AdaLoRA moves ranks between layers by the gradients of the batch, before any noise. Use LoRA, with "
         "rank_pattern for ranks that differ.")),
        (kind == "CPT", UnsupportedModel(
         "CPT begins with the tokens of examples, and writes them into adapter_config.json, without noise. Use prompt "
         "tuning, from a text that is public.")),
        (getattr(config, "use_asa", False), UnsupportedModel(
         "AdaMSS with use_asa freezes parts of the adapter during a run, by gradients in the module, where a private "
         "step leaves none. Set use_asa=False.")),
        (getattr(config, "velora_config", None) is not None, UnsupportedModel(
         "VeLoRA compresses activations by averages over the batch, which mixes its samples. Set velora_config=None.")),
        (getattr(config, "target_parameters", None), UnsupportedModel(
         "LoRA of parameters (target_parameters) registers a parametrization in each forward pass, which sets the "
         "memory of the weight (Tensor.set_), and torch's transforms take no such write. Use target_modules.")),
        (start in _LOOK_AT_DATA and not initialized_on_public_data,
         f"Expected an adapter whose initial value depends on no private data, got init_lora_weights={start!r}. "
         "If it was computed from public data, say initialized_on_public_data=True."),
        (kind == "SHIRA" and config.mask_fn is not random_mask and not initialized_on_public_data,
         "Expected SHiRA with the random mask of PEFT, got a mask_fn of your own. The places that it chooses are saved "
         "as they are, without noise. If they follow from no private data, say initialized_on_public_data=True."),
    )  # fmt: skip


@torch.no_grad()
def _refuse_lost(filled: nn.Module, names: list[str], params: Params) -> None:
    """Parameters that PEFT would not write."""
    from peft import get_peft_model_state_dict

    written = [get_peft_model_state_dict(filled, adapter_name=name, save_embedding_layers=False) for name in names]
    places = {value.data_ptr() for state in written for value in state.values() if isinstance(value, Tensor)}
    named = dict(filled.named_parameters())
    if lost := [at for at in params if named[at].numel() and named[at].data_ptr() not in places]:
        raise InvalidArgument(
            f"Expected parameters of the adapters {names}, got {shorten(lost)}, which PEFT's format has no place for. "
            "Name their modules in modules_to_save, or save the whole model: dpfunc.with_params(peft_model, params)."
        )
