"""Several views of a record: read by the loader, and averaged before the clip."""

from __future__ import annotations

import pytest
import torch
from cases import as_batch, flat, linear_loss, params, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.distributed.ranks import Ranks
from dpfunc.engines.by_name import ENGINES, engine_of
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import mean_over_views
from dpfunc.state import allow_repeat

K = 3
N = 40


def views_of(seed, num_records, scale=1.0):
    """Gradients (B, K, ...), any."""
    rows = as_batch(random_rows(seed, num_records * K, scale))
    return {name: value.unflatten(0, (num_records, K)) for name, value in rows.items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_the_mean_is_before_the_clip(engine, microbatch_size):
    """Of gradients that are averaged by hand the clipped sum is the same; that of clipped views is another one."""
    batch = views_of(0, 5)
    mean = {name: value.mean(1) for name, value in batch.items()}
    single = {name: value.flatten(0, 1) for name, value in batch.items()}
    options = {"engine": engine_of(engine), "microbatch_size": microbatch_size}
    found, unreleased = dpfunc.clipped.clipped_grad(
        mean_over_views(linear_loss), params(), batch, clipping.Flat(1.0), **options
    )
    expected, theirs = dpfunc.clipped.clipped_grad(linear_loss, params(), mean, clipping.Flat(1.0), **options)
    other, _ = dpfunc.clipped.clipped_grad(linear_loss, params(), single, clipping.Flat(1.0), **options)
    torch.testing.assert_close(flat(found.sums), flat(expected.sums), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unreleased.norms_BG, theirs.norms_BG, rtol=1e-4, atol=1e-5)
    assert float((flat(found.sums) - flat(other.sums) / K).norm()) > 0.1


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), scale=st.sampled_from([1e-3, 1.0, 1e9]))
def test_a_record_with_views_has_bounded_sensitivity(seed, size, scale):
    batch = views_of(seed, size, scale)

    def summed(rows):
        clipped, _ = dpfunc.clipped.clipped_grad(mean_over_views(linear_loss), params(), rows, clipping.Flat(1.0))
        return flat(clipped.sums)

    rest = {name: value[1:] for name, value in batch.items()}
    assert (summed(batch) - summed(rest)).norm() <= 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_see_the_views_of_one_record(engine):
    """A network with a linear layer, dropout off: each engine, and aux, which is averaged as well."""
    generator = torch.Generator().manual_seed(0)
    values = {"w": torch.randn(4, 2, generator=generator), "b": torch.randn(4, generator=generator)}
    x, y = torch.randn(5, K, 2, generator=generator), torch.randint(0, 4, (5, K), generator=generator)

    def loss_fn(p, batch):
        logits = torch.nn.functional.linear(batch["x"], p["w"], p["b"])
        losses = torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")
        return losses, {"right": logits.argmax(1) == batch["y"]}

    found, unreleased = dpfunc.clipped.clipped_grad(
        mean_over_views(loss_fn), values, {"x": x, "y": y}, clipping.Flat(0.3), engine=engine_of(engine)
    )
    total = {name: torch.zeros_like(value) for name, value in values.items()}
    for row in range(5):
        grads = torch.func.grad(lambda p, r: loss_fn(p, {"x": x[r], "y": y[r]})[0].mean())(values, row)
        norm = torch.stack([value.square().sum() for value in grads.values()]).sum().sqrt()
        total = {name: total[name] + value * min(1.0, 0.3 / float(norm)) for name, value in grads.items()}
    torch.testing.assert_close(flat(found.sums), flat(total), rtol=1e-3, atol=1e-5)
    logits = torch.nn.functional.linear(x, values["w"], values["b"])
    torch.testing.assert_close(unreleased.aux["right"], (logits.argmax(2) == y).float().mean(1))


class Augmented:
    """Records with noise of their own each time that they are read."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"x": index + 0.4 * torch.rand(2), "y": torch.tensor(index)}


def plan_of(q=0.1, **changes):
    values = {"num_steps": 8, "delta": 1e-3, **changes}
    return dpfunc.Plan(sampling.Poisson(N, q), clipping.Flat(1.0), 1.0, **values)


def loss_of_x(p, batch):
    return batch["x"] @ p["w"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_draws_views(num_workers):
    """Rows are (B, K, ...), the draws are those of the plan, views of a record differ, and a repeated step has them."""
    plan = plan_of(0.03, num_steps=12)
    dp_step = dpfunc.make_dp_step(mean_over_views(loss_of_x), plan)
    start = allow_repeat(dp_step.init({"w": torch.zeros(2)}, insecure_key(3)))

    def batches():
        return list(plan.loader(Augmented(), start, views=K, num_workers=num_workers))

    found, again = batches(), batches()
    sizes = set()
    for indices, batch, other in zip(plan.batches(start), found, again, strict=True):
        sizes.add(len(indices))
        assert batch["x"].shape == (len(indices), K, 2)
        assert torch.equal(batch["y"], indices[:, None].expand(-1, K))
        assert torch.equal(batch["x"], other["x"])
        assert all(len(row.unique(dim=0)) == K for row in batch["x"])
    assert 0 in sizes
    assert max(sizes) > 1
    state = start
    for batch in found:
        _, state, _ = dp_step({"w": torch.zeros(2)}, batch, state)
    assert state.ledger == plan.ledger()


def test_processes_read_their_own_views():
    plan = plan_of(0.3)
    state = dpfunc.make_dp_step(loss_of_x, plan).init({"w": torch.zeros(2)}, insecure_key(3))
    rows = [[], []]
    for rank in range(2):
        ranks = Ranks(None, None, rank, 2, independent=True)
        draws = sampling.loader.Draws(plan.sampler, state.key, lambda: range(4), 4, ranks.rank, ranks.size, views=K)
        collate = sampling.loader.Collate(torch.utils.data.default_collate, views=K)
        rows[rank] = list(sampling.loader.data_loader(Augmented(), draws, collate))
    for step, (one, two) in enumerate(zip(*rows, strict=True)):
        together = torch.cat([one["y"][:, 0], two["y"][:, 0]]).sort().values
        assert torch.equal(together, plan.draw(state, step).sort().values)


def test_refused():
    plan = plan_of()
    state = dpfunc.make_dp_step(loss_of_x, plan).init({"w": torch.zeros(2)}, insecure_key(3))
    with pytest.raises(InvalidArgument, match="views"):
        plan.loader(Augmented(), state, views=0)
    with pytest.raises(InvalidArgument, match=r"leaves of shape \(B, K, ...\)"):
        mean_over_views(loss_of_x)({"w": torch.zeros(2)}, {"x": torch.zeros(3, K, 2), "y": torch.zeros(3)})
