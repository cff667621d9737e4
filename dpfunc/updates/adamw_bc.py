"""AdamW that takes the noise of released gradients out of its second moment.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dpfunc._utils.validation import below_one, each, expect, named, non_negative, positive, suggestion


def _betas(name: str, value: Any) -> tuple[float, ...]:
    expect(isinstance(value, tuple | list) and len(value) == 2, "betas (b1, b2)", name, value)
    return each(below_one, "betas (b1, b2)", (tuple, list))(name, value)


_SETTINGS = {
    "lr": positive, "betas": _betas, "eps": positive, "weight_decay": non_negative, "noise_std": non_negative
}  # fmt: skip
# What torch has in a group beside settings; the rates and momenta are those of its schedules.
_OF_TORCH = (
    "params", "param_names", "initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"
)  # fmt: skip


@named
class AdamWBC(torch.optim.Optimizer):
    """AdamW whose second moment is that of the gradient without its noise, as far as that is known.

        m   <- b1 m + (1 - b1) g
        v   <- b2 v + (1 - b2) g^2
        phi <- b2 phi + (1 - b2) noise_std^2
        u   =  v - phi where that is positive, else v
        w   <- (1 - lr weight_decay) w - lr m_hat / (sqrt(u_hat) + eps)

    with m_hat = m / (1 - b1^t) and u_hat = u / (1 - b2^t). The noise adds its variance to v, so that where it is larger
    than the gradient Adam takes steps of one length in each coordinate. phi is that part of v; it follows the noise
    where that changes. m and v of parameters of 16 bits are float32. Released gradients go in, and nothing is paid.
    Chooi et al. 2025, DP-AdamW, arXiv 2511.07843 (DP-AdamW-BC; they found it less accurate than AdamW on their tasks:
    measure it); Tang et al. 2024, arXiv 2312.14334, for Adam.

    Args:
        params: tensors to train, or groups of them, as of `torch.optim.AdamW`, with these settings and no others;
            `.grad` is the released gradient.
        lr: > 0. betas: (b1, b2), each in [0, 1). eps: > 0. weight_decay: >= 0, decoupled.
        noise_std: standard deviation of the noise in each coordinate of a gradient, >= 0: a value of
            `dp_step.gradient_noise(params, state)`. Where it changes, write it before each step, as a learning rate:
            `group["noise_std"] = ...` for each of `optimizer.param_groups`.

    Guarantees:
        tests/updates/test_adamw_bc.py: AdamW of torch without noise (test_without_noise_it_is_adamw), the formulas
        (test_the_formulas_of_the_paper), the second moment of the gradient alone
        (test_the_noise_is_taken_out), and the same steps after a checkpoint (test_its_state_goes_on).

    >>> w = torch.zeros(2, requires_grad=True)
    >>> optimizer = AdamWBC([w], lr=0.1, noise_std=0.5)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> w.detach()  # g = 1: u = 1 - 0.25
    tensor([-0.1155, -0.1155])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, noise_std: float = 0.0,
    ) -> None:  # fmt: skip
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "noise_std": noise_std}
        super().__init__(params, {name: check(name, given[name]) for name, check in _SETTINGS.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, once its settings are checked.

        Args:
            param_group: `params`, and settings of this class.
        """
        _check_names(param_group)
        checked = {name: check(name, param_group[name]) for name, check in _SETTINGS.items() if name in param_group}
        super().add_param_group({**param_group, **checked})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch, which would round the moments of a parameter of 16 bits to its dtype.

        Args:
            state_dict: what `state_dict()` has returned.
        """
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.to(param.device, _wide(param))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step by the gradients in `.grad`.

        Args:
            closure: as of optimizers of torch; evaluated first.

        Returns:
            What the closure returns; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_names(group)
            noise = non_negative("noise_std", group["noise_std"])
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group, noise)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], noise_std: float) -> None:
        state, wide = self.state[param], _wide(param)
        if not state:
            zeros = {name: torch.zeros_like(param, dtype=wide) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=0, phi=0.0, **zeros)
        first, second = group["betas"]
        step = state["step"] + 1
        phi = second * state["phi"] + (1 - second) * noise_std**2
        state.update(step=step, phi=phi)
        grad, value = grad.to(wide), param.to(wide)
        state["exp_avg"].lerp_(grad, 1 - first)
        v = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        moment = torch.where(v > phi, v - phi, v) / (1 - second**step)
        value.mul_(1 - group["lr"] * group["weight_decay"])
        value.addcdiv_(state["exp_avg"], moment.sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - first**step))
        param.copy_(value)


def _check_names(group: dict[str, Any]) -> None:
    for name in group:
        expect(
            name in _SETTINGS or name in _OF_TORCH, "settings of AdamWBC in a group", "setting", name,
            suggestion(name, _SETTINGS),
        )  # fmt: skip


def _wide(param: Tensor) -> torch.dtype:
    """The dtype of a parameter, or float32 for 16 bits, which would round away what a step adds to a moment."""
    return torch.promote_types(param.dtype, torch.float32)
