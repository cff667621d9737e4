"""How often the host reads numbers from the device in a step: each read waits for all that was launched before.

CPU tensors stand for those of a device: every read by Python is counted, and every operation whose shape depends on
numbers. In a step after the first, in which no row is audited, it is at most two: one for all marks by which the host
decides what is computed next (`engines.numerics`), one for the digest of what is released. A step with audited rows reads
what it compares.
"""

from collections import Counter

import pytest
import torch
from devices import devices
from torch.utils._python_dispatch import TorchDispatchMode

import dpfunc
from dpfunc import Journal, batches
from dpfunc.engines.microbatches import Audits
from dpfunc.errors import InvalidArgument

B, T, WIDTH = 16, 5, 8
READING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__")
READING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Reads(TorchDispatchMode):
    """Count of reads, by name; a method and the operation that it runs count once."""

    __module__ = "torch"  # a step refuses modes of others

    def __init__(self):
        super().__init__()
        self.seen, self.inside = Counter(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        masks = [*args[1]] if name in ("index", "index_put", "index_put_") else []
        by_mask = any(isinstance(mask, torch.Tensor) and mask.dtype == torch.bool for mask in masks)
        if not self.inside and (name in READING_OPERATIONS or by_mask):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

    def counted(self, name, method):
        def call(tensor, *args, **kwargs):
            before, self.inside = self.inside, True
            self.seen[name] += not before and tensor.dtype != torch.uint8  # the state of a generator, never on a device
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self.inside = before

        return call


@pytest.fixture
def reads(monkeypatch):
    """Function that runs another one and returns what was read."""

    def count(run):
        mode = Reads()
        with monkeypatch.context() as patch, mode:
            for name in READING_METHODS:
                patch.setattr(torch.Tensor, name, mode.counted(name, getattr(torch.Tensor, name)))
            patch.setattr(batches, "_are_different", lambda drawn: True)  # it reads the draw, which is on no device
            run()
        return mode.seen

    return count


class Net(torch.nn.Module):
    """An embedding, wide layers (whose norms are ghost norms), a norm and a convolution."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 64)
        self.wide = torch.nn.Linear(64, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.conv = torch.nn.Conv1d(64, 4, 3)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, ids):
        hidden = self.norm(torch.relu(self.wide(self.table(ids))))
        return self.head(self.conv(hidden.transpose(1, 2)).mean(2))


def job(lora, journal, batches=4, device="cpu", **options):
    torch.manual_seed(0)
    model = Net().to(device)
    if lora:
        adapter = dpfunc.lora.attach(model, dpfunc.rng.insecure_key(0), targets="wide|head", rank=2, alpha=2.0)
        forward, params = adapter.forward, adapter.params
    else:
        forward, params = dpfunc.functionalize(model)

    def loss_fn(params, ids):
        return torch.nn.functional.cross_entropy(forward(params, ids), ids[:, 0] % 2, reduction="none")

    plan = dpfunc.Plan(
        dpfunc.sampling.Poisson(B, 1.0), dpfunc.clipping.Flat(1.0), noise_multiplier=1.0, num_steps=batches, delta=1e-3
    )
    step = dpfunc.make_dp_step(loss_fn, plan, journal=Journal(journal, plan) if journal else None, **options)
    return step, params, torch.randint(0, 11, (B, T)).to(device), step.init(params, key=dpfunc.secure_key())


@devices
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize("with_journal", [False, True], ids=["", "journal"])
def test_two_reads_in_a_later_step(reads, tmp_path, lora, with_journal, device, monkeypatch):
    step, params, batch, state = job(lora, tmp_path / "journal" if with_journal else None, device=device)
    grads, state, _ = step(params, batch, state)
    monkeypatch.setattr(Audits, "due", lambda *_: 0)  # by chance, a later step compares a row
    for _ in range(2):
        with torch.no_grad():  # as an optimizer does: a loop that changes nothing is looked at more closely
            for name, p in params.items():
                p -= 0.1 * grads[name]
        results = []
        seen = reads(lambda: results.append(step(params, batch, state)))  # noqa: B023  (called at once)
        assert step.decision.engine == "one pass"
        assert sum(seen.values()) <= 2, seen
        grads, state = results[0].grads, results[0].state


def test_reads_are_counted(reads):
    """Each way of reading, so that the count above can fail."""
    numbers = torch.arange(3.0)
    ways = [
        lambda: numbers.tolist(), lambda: float(numbers.sum()), lambda: bool(numbers.any()), lambda: numbers.sum().item(),
        lambda: numbers[numbers > 1], lambda: numbers.nonzero(), lambda: numbers.cpu(), lambda: list(numbers),
        lambda: torch.equal(numbers, numbers), lambda: torch.where(numbers > 0), lambda: numbers.numpy(),
    ]  # fmt: skip
    for way in ways:
        assert sum(reads(way).values()) == 1, way


@pytest.mark.parametrize("spoilt", [0, 1, 3])
def test_when_the_mark_is_read_changes_no_bit(spoilt):
    """Before the sums, or after them; and rows that are dropped leave what the others alone give, up to rounding."""
    step, params, batch, _ = job(False, None)
    scale = torch.ones(B, 1)
    scale[:spoilt] = float("nan")
    inner = step.clipped_grad.loss_fn
    clipped_grad = dpfunc.clipped.make_clipped_grad(
        lambda params, rows: inner(params, rows[0]) * rows[1][:, 0], dpfunc.clipping.Flat(1.0),
        engine=dpfunc.engines.auto(),
    )  # fmt: skip
    run = lambda start: clipped_grad(params, (batch[start:], scale[start:]), key=dpfunc.rng.insecure_key(0))
    late, reading = run(0), clipped_grad._microbatches.late_mark.early
    early, alone = run(0), run(spoilt)
    assert reading == (spoilt > 0)
    assert not clipped_grad._microbatches.late_mark.early
    assert all(torch.equal(late[0].sums[name], early[0].sums[name]) for name in params)
    assert torch.equal(late[1].norms_BG.nan_to_num(), early[1].norms_BG.nan_to_num())
    torch.testing.assert_close(late[0].sums, alone[0].sums)
    torch.testing.assert_close(late[1].norms_BG[spoilt:], alone[1].norms_BG, rtol=1e-6, atol=0)
    assert late[1].norms_BG[:spoilt].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_parameters_that_are_not_finite_release_nothing(tmp_path, bad, steps_before):
    """They are looked at with the digest, after the sum: the journal has no such step, and the state can be used."""
    path = tmp_path / "journal"
    step, params, batch, state = job(False, path)
    for _ in range(steps_before):
        _, state, _ = step(params, batch, state)
    written = path.read_bytes() if steps_before else b""
    worse = dict(params)
    worse["table.weight"] = params["table.weight"].detach().clone().index_fill_(0, torch.tensor([10]), bad)
    with pytest.raises(InvalidArgument, match="table.weight"):
        step(worse, batch.clamp(max=9), state)  # no row looks it up, so all gradients are finite
    assert (path.read_bytes() if path.exists() else b"") == written
    _, after, _ = step(params, batch, state)
    assert after.step == steps_before + 1
