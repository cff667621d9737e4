"""First and second moments of gradients, released together: joint moment estimation.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpfunc._utils.validation import checked, expect, positive
from dpfunc.types import Params

_SQUARES = "(squares) "  # before the name of a parameter: that of the sum of its squared gradients


def _summed(loss_fn: Callable[..., Any], batch: Any, params: Params) -> tuple[Tensor, Tensor]:
    losses = loss_fn(params, batch)
    return losses.sum(), losses


@dataclass(frozen=True)
@checked({"clip_norm": positive, "weight": positive})
class JointMoments:
    """Sums of clipped gradients g and of their squares, in one release of `(g, sqrt(weight) g * g)` for each record.

    An optimizer that divides by the root of a second moment (Adam) squares noise with the gradient, where it has but
    the first moment. Here the second one is a sum with noise of its own, without bias. A record has the norm
    `sqrt(|g|^2 + weight |g * g|^2) <= bound` at most, since `|g * g| <= |g|^2`: with add/remove neighbours the
    second moment costs a factor `bound / clip_norm` of noise on the first one.
    Kalinin, Upadhyay and Lampert 2025, Continual Release Moment Estimation with Differential Privacy, arXiv 2502.06597.

    Args:
        clip_norm: R > 0, to which gradients are clipped before they are squared.
        weight: lambda > 0. The noise of the mean of squares has `1 / sqrt(weight)` of the deviation of that of the
            mean of gradients; `1 / R^2` makes the bound sqrt(2) R.

    Gradients are formed for each row, by a backward pass inside of the loss: it takes about as long as engine "vmap".

    Guarantees:
        tests/updates/test_moments.py: with each engine the sums are those of single rows
        (test_sums_are_those_of_single_rows), one record moves them by at most the bound (test_sensitivity), and the
        sensitivity of replaced records is the largest (test_the_sensitivity_of_replaced_records).

    >>> import dpfunc, torch
    >>> moments = JointMoments(clip_norm=1.0, weight=1.0)
    >>> plan = dpfunc.Plan(dpfunc.sampling.Poisson(100, 0.5), dpfunc.clipping.Flat(moments.bound), 1.0, 5, 1e-3)
    >>> params = {"w": torch.zeros(2)}
    >>> dp_step = dpfunc.make_dp_step(moments.loss(lambda params, x: x @ params["w"]), plan)
    >>> state = dp_step.init(moments.params(params), dpfunc.secure_key())
    >>> batch = torch.ones(100, 2)[next(iter(plan.batches(state)))]
    >>> grads, state, unreleased = dp_step(moments.params(params), batch, state)
    >>> first, second = moments.read(grads)
    >>> first["w"].shape, second["w"].shape
    (torch.Size([2]), torch.Size([2]))
    """

    clip_norm: float
    weight: float

    @property
    def bound(self) -> float:
        """Largest norm of a record's gradient and squares: the clip norm of the plan, `clipping.Flat(moments.bound)`.

        The step enforces it, whatever the loss does. With replace_one it counts twice, more than `replaced` says.
        """
        return self.clip_norm * math.sqrt(1 + self.weight * self.clip_norm**2)

    @property
    def replaced(self) -> float:
        """Largest distance of the vectors of two records: `max over D <= 2 R of sqrt(D^2 + weight M(D))`.

        D is the distance of their gradients, and `M(D) = D^2 (2 R - D)^2` for D <= 2 R / 3, else
        `2 D^2 (R^2 - D^2 / 4)`, that of their squares at most. It is 2 R for `weight <= 1 / (2 R^2)`.
        """
        radius, weight = self.clip_norm, self.weight
        # beyond 2 R / 3 the square is D^2 (1 + 2 weight R^2) - weight D^4 / 2, largest at D^2 = 2 R^2 + 1 / weight
        far = min(4 * radius**2, 2 * radius**2 + 1 / weight)
        return math.sqrt(far + weight * 2 * far * (radius**2 - far / 4))

    def params(self, params: Params) -> dict[str, Tensor]:
        """Parameters for the step: these, and as many numbers for the squares, which train nothing."""
        taken = [name for name in params if name.startswith(_SQUARES)]
        expect(not taken, f"no parameter whose name begins with {_SQUARES!r}", "params", taken, "Rename it.")
        return {**params, **{_SQUARES + name: torch.zeros_like(value) for name, value in params.items()}}

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[[Params, Any], Tensor]:
        """The loss of each row, whose gradient is the clipped one of `loss_fn`, and its squares.

        Args:
            loss_fn: `(params, batch) -> (B,)`, without aux.
        """

        def joint_loss(params: Params, batch: Any) -> Tensor:
            own = {name: value for name, value in params.items() if not name.startswith(_SQUARES)}
            fixed = {name: value.detach() for name, value in own.items()}
            grads, (_, losses) = torch.func.grad_and_value(partial(_summed, loss_fn, batch), has_aux=True)(fixed)
            norm = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
            scale = self.clip_norm / norm.clamp(min=self.clip_norm)
            clipped = {name: (grad.double() * scale).to(grad.dtype).detach() for name, grad in grads.items()}
            moved = [((own[name] - fixed[name]) * grad).sum() for name, grad in clipped.items()]
            for name, grad in clipped.items():
                squares = params[_SQUARES + name]
                moved.append(((squares - squares.detach()) * (math.sqrt(self.weight) * grad.square())).sum())
            value: Tensor = losses.detach() + torch.stack(moved).sum()
            return value

        return joint_loss

    def read(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Means of the gradients and of their squares, by parameter, from what a step released. Released.

        The second ones have noise, and may be negative.

        Raises:
            InvalidArgument: gradients of a step without squares.
        """
        first = {name: grad for name, grad in grads.items() if not name.startswith(_SQUARES)}
        missing = [name for name in first if _SQUARES + name not in grads]
        expect(not missing, "squares of each parameter: a step with moments.params(params)", "missing", missing)
        return first, {name: grads[_SQUARES + name] / math.sqrt(self.weight) for name in first}
