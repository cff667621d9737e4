"""Operations on parameters: when their gradients are formed. Parity is in test_engine_rules.py."""

import torch

from benchmarks.engines.cases import CASES
from benchmarks.measure import allocated
from dpfunc.engines import _book_keeping, auto
from dpfunc.engines._per_sample import Dense
from dpfunc.functional import functionalize


def test_gradients_larger_than_their_factors_wait_for_the_end_of_the_pass(monkeypatch):
    """Activations are gone then: the peak is lower, and the gradients are the same bits."""
    problem = CASES["mnist"].problem(batch_size=64)
    forward, params = functionalize(problem.module)
    loss_fn, batch = lambda p, b: problem.losses(forward(p, b[0]), b[1]), (problem.inputs, problem.targets)
    engine = auto()
    engine(loss_fn, params, batch)
    found, memory = allocated(lambda: engine(loss_fn, params, batch))
    monkeypatch.setattr(_book_keeping, "DeferredGrad", lambda grad: Dense(grad.dense()))
    at_once, more = allocated(lambda: engine(loss_fn, params, batch))
    assert memory.peak < 0.8 * more.peak
    assert all(torch.equal(grad.dense(), at_once.grads[name].dense()) for name, grad in found.grads.items())
