"""Self-check of the engines: a tiny loss with rules, beside single rows. Rules are for speed: no result shows them.

May import: its folder, batches, rng and below. Privacy depends on it: no.

It runs the nodes that stand on torch's private parts: those of a layer, of a recurrent one, and of a cross-entropy.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.validation import warn
from dpfunc.engines._levels import Stop
from dpfunc.engines._per_sample import Kept, PerSample
from dpfunc.engines._row_pass import ORDINARY, Rows, Settings, run_pass
from dpfunc.errors import EngineWarning
from dpfunc.types import Params

_TRIED = "2.13 and 2.14.1"


@dataclass(frozen=True)
class SelfCheck:
    """Result of `self_check`.

    Args:
        torch: its version. rules: True if operations went to their rules, and gradients equal those of single rows.
        reason: what went wrong; empty if nothing did.

    >>> SelfCheck("2.13.0", True).rules
    True
    """

    torch: str
    rules: bool
    reason: str = ""


def _loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A linear layer, a recurrent one and a cross-entropy."""
    x_BTd, labels_B = batch
    inputs, state, head = params.values()
    first_BH = x_BTd.new_zeros(1, len(x_BTd), 3)
    h_BTH, _ = torch.rnn_tanh(x_BTd, first_BH, [inputs, state], False, 1, 0.0, False, False, True)
    return F.cross_entropy(F.linear(h_BTH[:, -1], head), labels_B, reduction="none")


def self_check(device: str | torch.device = "cpu") -> SelfCheck:
    """Compute a tiny loss with the rules of `auto` and compare its gradients with those of single rows.

    Without rules results are the same; they take longer, and more memory. No random number is drawn.

    Args:
        device: of the tensors of the loss.

    Returns:
        What was found. Public: no record has a part in it.

    Guarantees:
        rules that fail, and rules that are wrong, are found (tests/engines/test_check.py).

    >>> self_check().rules
    True
    """
    sizes = {"inputs": (3, 2), "state": (3, 3), "head": (2, 3)}
    linspace = functools.partial(torch.linspace, dtype=torch.float64, device=device)
    params = {name: linspace(-1, 1, m * n).reshape(m, n) for name, (m, n) in sizes.items()}
    x_BTd = linspace(-2, 1, 24).reshape(3, 4, 2)
    batch = (x_BTd, torch.tensor([0, 1, 1], device=device))
    kept = Kept()
    try:
        result = run_pass(Rows(_loss, params, batch, range(3)), Settings(), {}, kept, True)
        kept.take_formed(result.rest)
        found = PerSample(result.losses_B, {name: kept.joined(name, param, 3) for name, param in params.items()})
        sums = [found.weighted_sum(dict.fromkeys(params, weights_B)) for weights_B in x_BTd.new_ones(3).diag()]
    except (Stop, *ORDINARY) as error:
        return SelfCheck(torch.__version__, False, f"{type(error).__name__}: {(str(error).splitlines() or ['-'])[0]}")
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    for row, own in enumerate(sums):
        with torch.enable_grad():
            loss = _loss(leaves, (x_BTd[row : row + 1], batch[1][row : row + 1])).sum()
        right = torch.autograd.grad(loss, list(leaves.values()))
        if not all(torch.allclose(own[name], grad) for name, grad in zip(params, right, strict=True)):
            return SelfCheck(torch.__version__, False, "gradients of rules differ from those of single rows")
    used = {name for use in result.uses for name in use.wanted.values()}
    unused = ", ".join(sorted(params.keys() - used))
    return SelfCheck(torch.__version__, not unused, f"no rule was used for {unused}" if unused else "")


@functools.cache
def warn_without_rules() -> None:
    """Warn, once in a process, if rules cannot be used at all."""
    found = self_check()
    if not found.rules:
        warn(
            f"Expected the rules of operations, the fast way of the engines, to work with this torch, got torch "
            f"{found.torch} and {found.reason}. Every loss is computed without rules: its gradients are the same, "
            f"but a small step takes about 1.5 times as long, and a large one 2 to 30 times the memory. Install a "
            f"version of torch that was tried ({_TRIED}). `dpfunc doctor` looks at the rest.",
            EngineWarning,
        )
