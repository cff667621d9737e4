"""The new head of a model: which of the trained parameters it is, and how long its inputs are.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfunc.hf._facts import evaluating
from dpfunc.recipes import Head

_ADAPTERS = ("lora_", "prompt_encoder", "adaption_")  # in names of parameters, beside those that PEFT lists
_PROBES = (8, 32)  # made-up texts and their tokens


def head_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trained parameters that are no adapters: what a new head beside them is, by its names.

    A bias without its weight is none either: one of a frozen layer, as `bias="lora_only"` and `"all"` of PEFT train.
    They go apart into `Recipe.optimizer(params.values(), head=head_of(params).values())`: a head that begins at zero
    has longer ways to go than adapters.

    >>> sorted(head_of({"layer.lora_A": torch.zeros(1), "classifier.weight": torch.zeros(2, 3)}))
    ['classifier.weight']
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    marks = (*_ADAPTERS, *PEFT_TYPE_TO_PREFIX_MAPPING.values())

    def of_adapter(name: str) -> bool:
        layer, dot, own = name.rpartition(".")
        weight = f"{layer}{dot}{own.replace('bias', 'weight')}"
        return weight not in params or any(part.startswith(marks) for part in name.split("."))

    return {name: p for name, p in params.items() if not of_adapter(name)}


def reads_unit_rows(model: nn.Module) -> bool:
    """True if a `Head` is trained, whose rows have norm 1 whatever is in them: nothing has to be measured."""
    return any(isinstance(module, Head) and module.weight.requires_grad for module in model.modules())


def measure_feature_norm(model: nn.Module, head: Iterable[str]) -> float | None:
    """Norm of what a row gives to a linear head, the 1 of its bias included, as `recipe(feature_norm=)` takes it.

    1 of a `Head`. Else the mean norm of the gradient of one logit, `|(x, 1)|` of inputs x, on made-up tokens: no record
    is read.

    Args:
        model: of Transformers, in evaluation mode or not; it is not changed. head: names of its parameters in
            the model, where they require gradients, e.g. `head_of(params)`.

    Returns:
        The norm; None where a model needs more than tokens, or nothing reaches the head.

    Guarantees:
        tests/hf/test_heads.py: the norm of a head behind known features (test_the_norm_is_that_of_the_inputs), the same
        at each call, and nothing else is changed (test_measuring_changes_nothing).

    >>> measure_feature_norm(Head(3, 2), ["weight"])
    1.0
    """
    params = [model.get_parameter(name) for name in head]
    if reads_unit_rows(model):
        return 1.0
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    longest = int(getattr(config, "max_position_embeddings", None) or 512) - 2  # some models begin at position 2
    shape = (_PROBES[0], min(_PROBES[1], max(1, longest)))
    ids = torch.randint(int(vocabulary), shape, generator=torch.Generator().manual_seed(0), device="cpu")
    norms = []
    try:
        with evaluating(model):
            for ids_1T in ids.to(params[0].device).split(1):
                logits = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits
                grads = torch.autograd.grad(logits[0, 0], params, allow_unused=True)
                norms.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads if grad is not None)))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it needs more than tokens
        return None
    return sum(norms) / len(norms) or None
