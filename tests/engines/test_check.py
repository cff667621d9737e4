"""The self-check finds rules that do not work, and every loss that is computed without them says so once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from dpfunc import engines
from dpfunc.engines import SelfCheck, _book_keeping, _recurrent, check, self_check
from dpfunc.errors import EngineWarning

BATCH = torch.linspace(-1, 1, 12).reshape(4, 3)
PARAMS = {"w": torch.linspace(0, 1, 6).reshape(2, 3)}


def loss_fn(params, batch):
    return F.linear(batch, params["w"]).square().sum(1)


def own_backward(params, batch):
    """Rules do not take it, for a reason that is documented."""
    (grad,) = torch.autograd.grad(F.linear(batch, params["w"]).square().sum(), params["w"], create_graph=True)
    return grad.square().sum().expand(len(batch))


def refused(*args):
    raise RuntimeError("it must override the setup_context staticmethod")


@pytest.fixture(autouse=True)
def _not_yet_warned():
    check.warn_without_rules.cache_clear()
    yield
    check.warn_without_rules.cache_clear()


def broken(monkeypatch):
    for module in (_book_keeping, _recurrent):
        monkeypatch.setattr(module, "apply_node", refused)


def test_rules_work_here():
    assert self_check() == SelfCheck(torch.__version__, True, "")


def test_it_is_the_same_where_others_have_changed_defaults():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.set_default_dtype(torch.float16)
        try:
            before = torch.random.get_rng_state()
            assert self_check().rules
            assert torch.equal(before, torch.random.get_rng_state())
        finally:
            torch.set_default_dtype(torch.float32)


def test_nodes_that_torch_refuses(monkeypatch):
    broken(monkeypatch)
    found = self_check()
    assert not found.rules
    assert "setup_context" in found.reason


def test_rules_that_are_not_used(monkeypatch):
    from dpfunc.engines import _row_pass

    monkeypatch.setattr(_row_pass, "_HANDLERS_WITH_RULES", _row_pass._HANDLERS_WITHOUT_RULES)
    assert self_check().reason == "no rule was used for head"


def test_rules_that_are_wrong(monkeypatch):
    right = _book_keeping.credit_use
    monkeypatch.setattr(
        _book_keeping, "credit_use", lambda owner, use, grad, tensors: right(owner, use, 2 * grad, tensors)
    )
    assert self_check().reason == "gradients of rules differ from those of single rows"


@pytest.mark.parametrize("engine", [engines.auto, engines.ghost])
def test_every_loss_without_rules_is_a_warning_once(monkeypatch, engine):
    broken(monkeypatch)
    with pytest.warns(EngineWarning, match=r"(?s)torch 2.*setup_context.*1.5 times as long.*2.13.*doctor"):
        found = engine()(loss_fn, PARAMS, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine()(lambda params, batch: loss_fn(params, batch), PARAMS, BATCH)
    assert torch.allclose(found.sq_norms()["w"], engines.loop()(loss_fn, PARAMS, BATCH).sq_norms()["w"])


@pytest.mark.parametrize(("engine", "loss"), [(engines.auto, own_backward), (engines.vmap, loss_fn)])
def test_no_warning_for_a_loss_that_needs_no_rules(engine, loss):
    made = engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(loss, PARAMS, BATCH)
    assert made.decision(loss).engine == "one pass"
