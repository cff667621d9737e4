"""Runs with canaries and loops that a replay takes, with and without faults; tables for tests and `python -m benchmarks.evidence`."""

import dataclasses
import functools
import os
import tempfile
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines.by_name import engine_of
from dpfunc.evidence import Canaries, audit
from dpfunc.noise import Gaussian, Mechanism, Turn


def records(seed, n=48):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator) + torch.randn(4, generator=generator)
    return {"x": x, "y": torch.randint(2, (n,), generator=generator)}


def loss_fn(params, batch):
    logits = torch.nn.functional.linear(batch["x"], params["w"], params["b"])
    return torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")


def make_step(**options):
    settings = {"clip": clipping.Flat(1.0), "noise_multiplier": 1.0, "num_steps": 8, "delta": 1e-3} | options
    return dpfunc.make_dp_step(loss_fn, dpfunc.Plan(sampling.Poisson(48, 0.25), **settings))


def init(dp_step, data, key):
    params = {"w": torch.zeros(2, 4), "b": torch.zeros(2)}
    return {"params": params, "state": dp_step.init(params, key), "rate": 0.1, "key": key}


def drawn(dp_step, data, carry):
    return dpfunc.take(data, dp_step.plan.draw(carry["state"], carry["state"].step))


def take_step(dp_step, batch, carry, divide=1.0):
    grads, state, unreleased = dp_step(carry["params"], batch, carry["state"])
    params = {name: value - carry["rate"] * grads[name] / divide for name, value in carry["params"].items()}
    return {**carry, "params": params, "state": state}, unreleased


def step(dp_step, data, carry):
    carry, _ = take_step(dp_step, drawn(dp_step, data, carry), carry)
    print("step", carry["state"].step)
    return None if carry["state"].step == carry["state"].limit else carry


def momentum(dp_step, data, carry):
    """An optimizer and a schedule of torch, made in the first step."""
    params = carry["params"]
    if "optimizer" not in carry:
        optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
        carry = {**carry, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}
    grads, state, _ = dp_step(params, drawn(dp_step, data, carry), carry["state"])
    for name, param in params.items():
        param.grad = grads[name]
    carry["optimizer"].step()
    carry["scheduler"].step()
    return {**carry, "state": state}


def faulty(before=lambda x, data, carry: x, after=lambda carry, batch, seen: carry, divide=lambda batch: 1.0):
    """A step that changes features before the private step, or what the loop carries by what nothing protects."""

    def stepped(dp_step, data, carry):
        batch = drawn(dp_step, data, carry)
        changed = {**batch, "x": before(batch["x"], data, carry)}
        carry, unreleased = take_step(dp_step, changed, carry, divide(batch))
        return after(carry, batch, unreleased)

    return stepped


def banked(carry, batch, seen):
    return {**carry, "bank": torch.cat([carry.get("bank", torch.zeros(1, 4)), batch["x"]])[-20:]}


def private_bound(dp_step, data, carry):
    """A new clip norm each step, the median of the norms of the last batch."""
    clipped = make_clipped_grad(loss_fn, clipping.Flat(carry.get("bound", 1.0)), engine=dp_step.clipped_grad.engine)
    own_step = dataclasses.replace(dp_step, clipped_grad=clipped)
    after, unreleased = take_step(own_step, drawn(dp_step, data, carry), carry)
    return {**after, "bound": float(unreleased.norms_BG.median())} if len(unreleased.norms_BG) else after


def printed(carry, batch, seen):
    print(len(batch["y"]), "records")
    return carry


def written(carry, batch, seen):
    Path("losses.txt").write_text(f"{seen.losses_B.sum():.2f}")
    return carry


BANK = [torch.zeros(4)]  # that no carry shows


def kept(carry, batch, seen):
    BANK.append(batch["x"].sum(0))
    return carry


class Slotted:
    __slots__ = ("mean",)

    def __init__(self, mean):
        self.mean = mean


def carried(make):
    """A fault: the loop carries what is made of the mean of its batch, in a form of its own."""
    return faulty(after=lambda carry, batch, seen: {**carry, "kept": make(batch["x"].mean())})


def elsewhere(write):
    """A fault: a file with the number of records, in another folder than that of the run."""

    def after(carry, batch, seen):
        write(Path(tempfile.gettempdir()) / f"dpfunc-{os.getpid()}.txt", str(len(batch["y"])))
        return carry

    return faulty(after=after)


def by_descriptor(path, text):
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(handle, text.encode())
    os.close(handle)


# what carries a private number -> step, and words of what moves
CARRIED = {
    "an array of numpy": (carried(lambda mean: np.full(3, float(mean))), "['kept']"),
    "a number of numpy": (carried(lambda mean: np.float32(mean)), "['kept']"),
    "an object array": (carried(lambda mean: np.array([float(mean), "a"], dtype=object)), "['kept']"),
    "a deque": (carried(lambda mean: deque([mean])), "['kept'][0]"),
    "a slot": (carried(Slotted), "['kept'].mean"),
    "a slot of a base class": (carried(type("Derived", (Slotted,), {})), "['kept'].mean"),
    "a closure": (carried(lambda mean: lambda x: x * mean), "over mean"),
    "a default": (carried(lambda mean: eval("lambda x, y=y: x", {"y": float(mean)})), "__defaults__"),
    "a partial function": (carried(lambda mean: functools.partial(max, float(mean))), ".args"),
    "a method": (carried(lambda mean: [float(mean)].copy), "['kept']"),
    "a date": (carried(lambda mean: datetime.fromtimestamp(abs(float(mean)) * 1e9)), "['kept']"),
    "bytes that change": (carried(lambda mean: bytearray(np.float32(mean))), "['kept']"),
    "a generator of numpy": (carried(lambda mean: np.random.default_rng(int(1e9 * abs(float(mean))))), "['kept']"),
    "a file elsewhere": (elsewhere(Path.write_text), "dpfunc-"),
    "a file elsewhere, by its descriptor": (elsewhere(by_descriptor), "dpfunc-"),
    "lines by the descriptor of the output": (
        faulty(after=lambda carry, batch, seen: os.write(1, f"{len(batch['y'])} records\n".encode()) and carry), "prints"
    ),
}  # fmt: skip

# fault -> step, and words of what moves
FAULTS = {
    "batch statistics": (faulty(lambda x, data, carry: x - x.mean(0)), "rows of other records"),
    "a divisor by the drawn size": (faulty(divide=lambda batch: max(1, len(batch["y"])) / 12), "['params']"),
    "a stop that depends on losses": (
        faulty(after=lambda carry, batch, seen: carry if seen.losses_B.mean() < 0.72 else None), "number of steps"
    ),
    "a learning rate that follows losses": (
        faulty(after=lambda carry, batch, seen: {**carry, "rate": 0.1 if seen.losses_B.mean() < 0.69 else 0.05}),
        "['rate']",
    ),
    "a memory bank": (
        faulty(lambda x, data, carry: x + carry.get("bank", torch.zeros(1, 4)).mean(0), banked), "['bank']"
    ),
    "a normaliser fitted on private data": (
        faulty(lambda x, data, carry: (x - data["x"].mean(0)) / data["x"].std(0)), "rows of other records"
    ),
    "a clip bound that follows norms": (private_bound, "sensitivity"),
    "a file of losses": (faulty(after=written), "file losses.txt"),
    "a line with the number of records": (faulty(after=printed), "what it prints"),
    "a memory bank outside of the loop": (faulty(lambda x, data, carry: x + sum(BANK) / len(BANK), kept), "same data"),
}  # fmt: skip


@dataclass(frozen=True)
class Less(Gaussian):
    """A part of the noise that is claimed."""

    factor: float = 0.0

    def mechanism(self, run):
        return super().mechanism(run._replace(noise_multiplier=run.noise_multiplier * self.factor))


@dataclass(frozen=True)
class OnHalf(Gaussian):
    """Noise on the first half of each parameter alone; with a larger one the total variance is that of the claim."""

    factor: float = 1.0

    def mechanism(self, run):
        init, add, _ = super().mechanism(run._replace(noise_multiplier=run.noise_multiplier * self.factor))

        def halved(clipped, state, turn):
            sums = {name: value.clone() for name, value in clipped.sums.items()}
            values, state = add(clipped, state, turn)
            for name, value in values.items():
                value.flatten()[value.numel() // 2 :] = sums[name].flatten()[value.numel() // 2 :]
            return values, state

        return Mechanism(init, halved)


@dataclass(frozen=True)
class Reused(Gaussian):
    def mechanism(self, run):
        init, add, _ = super().mechanism(run)
        same = Turn(0, dpfunc.rng.insecure_key(5), dpfunc.rng.insecure_key)
        return Mechanism(init, lambda clipped, state, turn: add(clipped, state, same))


@dataclass(frozen=True)
class Everybody(sampling.Poisson):
    def indices(self, key, step):
        return torch.arange(self.dataset_size)


class LayerLeftOut:
    def __init__(self, per_sample):
        self._inner, self.losses_B = per_sample, per_sample.losses_B
        self.weighted_sum = per_sample.weighted_sum

    def sq_norms(self):
        return {name: norms * (name != "w") for name, norms in self._inner.sq_norms().items()}


def left_out(loss_fn, params, batch):
    return LayerLeftOut(engine_of("auto")(loss_fn, params, batch))


BOTH, HIGHEST = [(50, 50)], [(100, 0)]
# fault -> settings of the plan, options of the step, score, guesses. What a canary adds too much is among the highest
# scores; the lowest ones are then those of parameters that are clipped, of which little is known.
RUNS = {
    "none": ({}, {}, "sum", BOTH),
    "none, by spread": ({"sampling_prob": 0.5, "num_steps": 3}, {}, "spread", HIGHEST),
    "no noise": ({"noise": Less()}, {}, "sum", BOTH),
    "half the noise": ({"noise": Less(factor=0.5)}, {}, "sum", BOTH),
    "a layer is not clipped": ({}, {"engine": left_out}, "sum", HIGHEST),
    "a key is used again": ({"sampling_prob": 0.5, "num_steps": 3, "noise": Reused()}, {}, "spread", HIGHEST),
    "the sampler does not sample": (
        {"sampler": Everybody, "sampling_prob": 0.05, "noise_multiplier": 1.0}, {}, "sum", BOTH
    ),
}  # fmt: skip


def audited(seed, changes, options, score, guesses, count=2000):
    settings = {"sampler": sampling.Poisson, "sampling_prob": 1.0, "noise_multiplier": 1.4, "num_steps": 1} | changes
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(16, 48, generator=generator)
    params = {"w": torch.zeros(48, 48), "b": torch.zeros(48)}
    sampler = settings.pop("sampler")(len(data) + count, settings.pop("sampling_prob"))
    plan = dpfunc.Plan(sampler, clipping.Flat(1.0), delta=1e-5, **settings)
    canaries = Canaries.draw(params, count, dpfunc.rng.insecure_key(seed))

    def loss_fn(params, x):
        return (torch.nn.functional.linear(x, params["w"], params["b"]) - 1).square().sum(1)

    dp_step = dpfunc.make_dp_step(canaries.loss(loss_fn), plan, microbatch_size=512, **options)
    records, reads = canaries.extend(data), []
    state = dp_step.init(params, dpfunc.rng.insecure_key(1_000_000 + seed))
    for indices in plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take(records, indices), state)
        reads.append(canaries.read(grads))
    reads = torch.stack(reads)
    scores = canaries.split(reads.sum(0) if score == "sum" else reads.amax(0) - reads.amin(0))
    return audit(*scores, delta=plan.delta, claim=state.ledger, guesses=guesses)
