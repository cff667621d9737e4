"""Operations that are made of others: they are decomposed, so that the rules of their parts apply."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional as F

from dpfunc.engines.rules.bags import embedding_bag
from dpfunc.engines.rules.recurrent import CELLS


@functools.cache
def without_dispatch(function: Any) -> Callable[..., Any]:
    """A private copy of a torch function written in Python that does not dispatch, so that modes get its parts.

    torch's own function is not touched.
    """
    quiet = {
        name: (lambda *args, **kwargs: False) for name in function.__globals__ if name.startswith("has_torch_function")
    }
    inside = {**function.__globals__, **quiet}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    return functools.partial(copy, **(function.__kwdefaults__ or {}))


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: without_dispatch(F.multi_head_attention_forward),
    F.embedding_bag: embedding_bag,
    **CELLS,
}
