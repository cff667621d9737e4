"""Canaries: what they add to a sum, and what they leave alone; exposure of texts."""

import pytest
import torch

import dpfunc
from dpfunc import clipping
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import Canaries, coins, exposure, loss_drops

PARAMS = {"w": torch.randn(5, 4), "b": torch.randn(5)}


def loss_fn(params, x):
    return torch.nn.functional.linear(x, params["w"], params["b"]).tanh().sum(1)


@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost", "loop"])
def test_what_a_canary_adds(engine):
    """The clip norm at its coordinate if it is in, and nothing if it is out."""
    from dpfunc.engines.by_name import engine_of

    canaries = Canaries.draw(PARAMS, 12, dpfunc.rng.insecure_key(3))
    records = canaries.extend(torch.randn(3, 4))
    only = dpfunc.take(records, torch.arange(3, 15))
    clipped, _ = dpfunc.clipped.clipped_grad(
        canaries.loss(loss_fn), PARAMS, only, clipping.Flat(0.5), engine=engine_of(engine), microbatch_size=5
    )
    assert torch.allclose(canaries.read(clipped.sums), 0.5 * canaries.present.double(), rtol=1e-3)
    assert sum(float(value.abs().sum()) for value in clipped.sums.values()) == pytest.approx(
        0.5 * int(canaries.present.sum()), rel=1e-3
    )


def test_other_records_are_untouched():
    data = torch.randn(6, 4)
    canaries = Canaries.draw(PARAMS, 4, dpfunc.rng.insecure_key(3))
    records = dpfunc.take(canaries.extend(data), torch.arange(6))
    with_canaries, _ = dpfunc.clipped.clipped_grad(canaries.loss(loss_fn), PARAMS, records, clipping.Flat(0.5))
    without, _ = dpfunc.clipped.clipped_grad(loss_fn, PARAMS, data, clipping.Flat(0.5))
    for name, value in without.sums.items():
        assert torch.allclose(with_canaries.sums[name], value, rtol=1e-5, atol=1e-6)


def test_coordinates_and_coins():
    canaries = Canaries.draw(PARAMS, 25, dpfunc.rng.insecure_key(4))
    assert len({*zip(canaries.names, canaries.positions.tolist(), strict=True)}) == 25
    assert sum(len(part) for part in canaries.split(torch.zeros(25))) == 25
    assert 400 < int(coins(1000, dpfunc.rng.insecure_key(1)).sum()) < 600
    with pytest.raises(InvalidArgument, match="count <= 25"):
        Canaries.draw(PARAMS, 26, dpfunc.rng.insecure_key(4))
    with pytest.raises(InvalidArgument, match="at least one record"):
        canaries.extend(torch.zeros(0, 4))


def test_loss_drops_are_those_of_the_loss():
    records, after = torch.randn(300, 4), {name: value + 0.1 for name, value in PARAMS.items()}
    expected = loss_fn(PARAMS, records) - loss_fn(after, records)
    assert torch.allclose(loss_drops(loss_fn, PARAMS, after, records), expected)


def test_exposure():
    """Of a text that nothing was learnt of, b bits or more have probability 2^-b."""
    candidates = torch.arange(1023.0)
    assert exposure([-1.0, 2000.0], candidates).tolist() == [10.0, 0.0]
    assert exposure([0.0], [0.0, 0.0, 0.0]).tolist() == [0.0]  # the last of equals
    bits = exposure(torch.arange(1023.0) - 0.5, candidates)
    assert float((bits >= 3).double().mean()) == pytest.approx(1 / 8, abs=0.01)
    with pytest.raises(InvalidArgument, match="lists of numbers"):
        exposure([1.0], [])


def test_each_parameter_has_its_canaries():
    """A bias of 8 numbers beside a matrix of 10,000 had none; a part that is not clipped was not seen there."""
    params = {"w": torch.zeros(100, 100), "b": torch.zeros(8), "v": torch.zeros(300)}
    canaries = Canaries.draw(params, 600, dpfunc.rng.insecure_key(0))
    counts = {name: canaries.names.count(name) for name in params}
    assert counts == {"b": 8, "v": 296, "w": 296}
    assert len({*zip(canaries.names, canaries.positions.tolist(), strict=True)}) == 600
    assert all(
        0 <= place < params[name].numel()
        for name, place in zip(canaries.names, canaries.positions.tolist(), strict=True)
    )
    everything = Canaries.draw(params, 10_308, dpfunc.rng.insecure_key(1))
    assert {name: everything.names.count(name) for name in params} == {n: p.numel() for n, p in params.items()}
