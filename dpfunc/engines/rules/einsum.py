"""torch.einsum of two operands, one of them a parameter: the same sum, with the letter of the samples kept."""

from __future__ import annotations

import string

import torch
from torch import Tensor

from dpfunc.engines.numerics import to_accumulation_dtype
from dpfunc.engines.per_sample import Dense
from dpfunc.engines.rules.table import Grads, Rule, Use


def _einsum(use: Use, grad: Tensor, equation: str, first: Tensor | None, second: Tensor | None) -> Grads:
    """`y = einsum("bti,oi->bto", x, W)` gives `grad = einsum("bti,bto->boi", x, g)`; repeated letters are refused."""
    inputs, arrow, right = equation.replace(" ", "").partition("->")
    letters = dict(zip(("first", "second"), inputs.split(","), strict=True))
    (name,) = use.wanted
    other_tensor = first if name == "second" else second
    own, other = letters[name], letters["first" if name == "second" else "second"]
    if other_tensor is None or not arrow:
        raise use.refuse("only explicit equations without dots and repeated letters have a rule.")
    if "." in equation and "..." not in own:
        spare = iter(letter for letter in string.ascii_letters if letter not in equation)
        dots = "".join(next(spare) for _ in range(other_tensor.ndim - len(other.replace("...", ""))))
        other, right = other.replace("...", dots), right.replace("...", dots)
        equation = f"{other},{own}->{right}"
    _check_letters(use, own, other, right)
    sample = right[use.sample_axis.axis]
    fresh = next(letter for letter in string.ascii_letters if letter not in equation)
    other, right = other.replace(sample, fresh), right.replace(sample, fresh)
    return {
        name: Dense(
            torch.einsum(
                f"{other},{right}->{fresh}{own}", to_accumulation_dtype(other_tensor), to_accumulation_dtype(grad)
            )
        )
    }


def _check_letters(use: Use, own: str, other: str, right: str) -> None:
    """Check that the letters of the parameter (own), the other operand and the result have a rule.

    Raises:
        UnsupportedModel: they have none.
    """
    if any("." in part or len(set(part)) < len(part) for part in (own, other, right)):
        raise use.refuse("only explicit equations without dots and repeated letters have a rule.")
    sample = right[use.sample_axis.axis]
    if sample in own or sample not in other or use.output[use.sample_axis.axis] != use.num_samples:
        raise use.refuse("the samples are not on an axis of their own.")
    if any(letter not in right and letter not in other for letter in own):
        raise use.refuse("a letter of the parameter occurs nowhere else.")


RULES = (Rule((torch.einsum,), _einsum, {"first": ("second",), "second": ("first",)}),)
