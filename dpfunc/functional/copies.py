"""Copies of modules, and what keeps a module from being copied.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: yes.
"""

import copy
from collections.abc import Mapping
from pickle import PickleError
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfunc._utils.validation import shorten
from dpfunc.engines._levels import at_a_level
from dpfunc.engines._row_pass import ORDINARY
from dpfunc.errors import UnsupportedModel
from dpfunc.functional.names import OF_TORCH


def _tensors(module: nn.Module) -> dict[int, Tensor]:
    """Tensors in a module, its lists and dictionaries, by their ids; but for those of a pass that has ended."""
    held = [value for part in module.modules() for value in pytree.tree_leaves(part.__dict__)]
    return {id(value): value for value in held if isinstance(value, Tensor) and not at_a_level(value)}


def _problem(value: object, tensors: Mapping[int, Tensor]) -> str:
    """The error of a deep copy, in which these tensors stay themselves; empty without one."""
    try:
        copy.deepcopy(value, dict(tensors))
    except (*ORDINARY, copy.Error, PickleError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uncopied(module: nn.Module) -> str:
    """Why a module cannot be copied, and by which attributes; empty if it can. The memory of tensors is not copied.

    Guarantees:
        tests/functional/test_copies.py::test_a_module_that_cannot_be_copied_is_named_before_the_run.
    """
    tensors = _tensors(module)
    problem = _problem(module, tensors)
    named = module.named_modules(prefix=type(module).__name__) if problem else ()
    held = ((f"{at}.{name}", value) for at, part in named for name, value in part.__dict__.items())
    names = [at for at, value in held if at.rpartition(".")[2] not in OF_TORCH and _problem(value, tensors)]
    return problem and (
        f"Expected a module that can be copied, got {shorten(names) or type(module).__name__}: {problem}. Take it out "
        "of the module, or load_state_dict(params, strict=False) into another module of the class."
    )


def copied(module: nn.Module, memo: Mapping[int, Any] | None = None) -> Any:
    """A deep copy of a module; `copy.deepcopy` gets the memo, whose objects replace originals."""
    if problem := uncopied(module):
        raise UnsupportedModel(problem)
    # computed from parameters, as nn.utils.weight_norm and prune do, and computed again in each forward pass
    values = {place: value.detach().clone() for place, value in _tensors(module).items() if value.grad_fn is not None}
    return copy.deepcopy(module, {**values, **(memo or {})})
