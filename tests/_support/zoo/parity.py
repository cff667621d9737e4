"""How far an engine is from the loop over single samples, in one number for each thing that it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference import loop_gradients
from torch import nn

from dpfunc import engines

ENGINES = {
    "loop": engines.loop,
    "vmap": engines.vmap,
    "ghost": engines.ghost,
    "auto": engines.auto,
}

# Below this share of the largest gradient norm, the norm of a parameter's gradient counts as this share.
FLOOR = 1e-3


@dataclass(frozen=True)
class Truth:
    """Losses (B,) and gradients, name -> (B, *shape), in float64; `largest` is the largest norm of them."""

    losses_B: torch.Tensor
    rows: dict[str, torch.Tensor]
    norms: dict[str, torch.Tensor]
    largest: float


def truth_of(case):
    """The loop over single samples."""
    samples = loop_gradients(case.loss_fn, case.params, case.batch)
    rows = {name: torch.stack([grads[name] for _, grads in samples]).double() for name in case.params}
    norms = {name: _norms(row) for name, row in rows.items()}
    largest = max(float(norms_B.max()) for norms_B in norms.values())
    return Truth(torch.stack([loss for loss, _ in samples]).double(), rows, norms, largest)


def factors_of(case, size, device="cpu"):
    """Factors that differ between samples and between parameters; one of them is 0."""
    generator = torch.Generator().manual_seed(0)
    factors = {name: torch.rand(size, generator=generator).to(device) for name in case.params}
    for i, factors_B in enumerate(factors.values()):
        factors_B[i % size] = 0.0
    return factors


def differences(engine, case, truth):
    """name of a result -> its largest difference from the truth, all but the losses' relative to the largest norm.

    That of squared norms is `|got^2 - norm^2| / (norm * largest)`: about twice that of the norms. Per-sample gradients
    are left out where an engine does not give them.
    """
    result = engine(case.loss_fn, case.params, case.batch)
    size = len(truth.losses_B)
    factors = factors_of(case, size, truth.losses_B.device)
    sq_norms, sums = result.sq_norms(), result.weighted_sum(factors)
    assert result.losses_B.shape == (size,)
    assert set(sq_norms) == set(sums) == set(case.params)
    found = {"losses": float((result.losses_B.double() - truth.losses_B).norm() / truth.losses_B.norm())}
    found["squared norms"] = max(
        float((sq_norms[name].double() - norms_B.square()).abs().max())
        / (truth.largest * max(float(norms_B.max()), FLOOR * truth.largest))
        for name, norms_B in truth.norms.items()
    )
    found["sums"] = max(
        float((sums[name].double() - torch.tensordot(factors[name].double(), rows, 1)).norm()) / truth.largest
        for name, rows in truth.rows.items()
    )
    grads = getattr(result, "grads", {})
    if grads and all(hasattr(grad, "dense") for grad in grads.values()):
        assert set(grads) == set(case.params)
        found["gradients"] = max(
            float(_norms(grads[name].dense().double() - rows).max()) / truth.largest
            for name, rows in truth.rows.items()
        )
    return found


def _norms(rows):
    """(B, *shape) -> (B,), scalars included."""
    return rows.reshape(rows.shape[0], -1).norm(dim=1)


def roughen(module: nn.Module, scale: float = 0.1) -> nn.Module:
    """Add noise to all parameters in place: no bias, scale, token or table keeps a special value such as 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(scale * torch.randn(param.shape, generator=generator))
    return module


def without_gradient(truth):
    """The parameters that no sample has a gradient for."""
    return [name for name, norms_B in truth.norms.items() if not (norms_B > 0).any()]


def nonzero_b(params):
    """Adapter parameters with random B: as they start, with B = 0, A has no gradient."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: 0.3 * torch.randn(p.shape, generator=generator).to(p) if "lora_B" in name else p
        for name, p in params.items()
    }


def engine_that_equals_the_loop(case):
    """How the default engine went, after a comparison with single samples."""
    auto = engines.auto()
    assert max(differences(auto, case, truth_of(case)).values()) < 1e-5
    return auto.decision(case.loss_fn).engine
