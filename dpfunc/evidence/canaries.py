"""What an audit plants and reads: canaries in gradients, canaries among the records, and texts that were learnt.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfunc._utils.validation import expect, integer, positive
from dpfunc.batches import batch_size, rows, tree_map
from dpfunc.engines._guards.loss import split_aux
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, check_key, fold_in, stream
from dpfunc.types import Batch, LossFn, Params

_ROWS = 256  # of a forward pass over canaries


def coins(count: int, key: Key) -> Tensor:
    """Fair coins, of the canaries of an audit: bool, (count,). Secret until the run has ended.

    >>> from dpfunc.rng import insecure_key
    >>> coins(4, insecure_key(0)).dtype
    torch.bool
    """
    drawn = stream(fold_in(check_key(key), "coins")).integers(0, 2, integer("count", count, minimum=1))
    return torch.from_numpy(drawn).bool()


@dataclass(frozen=True)
class Canaries:
    """Records whose gradients are known: canary i has the gradient `norm` at one coordinate of its own, if it is in.

    All of them are records of the data set, and drawn, clipped and summed like others; one that is out has the gradient
    zero. So one that is in or out is a record that was added or removed, and its score is the released gradient at its
    coordinate, summed over the steps: nothing else is there but noise and other records.

    Args:
        names: parameter of each canary. positions: coordinate in that parameter, flat. present: in, by a fair coin.
        norm: of the gradient before clipping. One larger than the clip norm also finds clipping that does not happen.

    Guarantees:
        a clipped canary is `C` in one coordinate (tests/evidence/test_canaries.py::test_what_a_canary_adds); other
        records are as without canaries (test_other_records_are_untouched).
    """

    names: tuple[str, ...] = field(repr=False)
    positions: Tensor = field(repr=False)
    present: Tensor = field(repr=False)
    norm: float

    @classmethod
    def draw(cls, params: Params, count: int, key: Key, *, norm: float = 100.0) -> "Canaries":
        """Draw coordinates, no two alike and equally many in each parameter as far as it has them, and coins.

        So a parameter that is not clipped, or has no noise, is seen also where it has few of all coordinates.

        Args:
            params: of the run, or some of them: per-sample gradients of these are formed, (B, *shape) each.
            count: number of canaries, at most that of coordinates. key: other than that of the run.
            norm: see the class.

        >>> from dpfunc.rng import insecure_key
        >>> Canaries.draw({"w": torch.zeros(4, 4)}, 10, insecure_key(0))
        Canaries(norm=100.0)
        """
        total, number = sum(param.numel() for param in params.values()), integer("count", count, minimum=1)
        expect(number <= total, f"count <= {total}, the number of coordinates of params", "count", count)
        draws = stream(fold_in(check_key(key), "coordinates"))
        positions: dict[str, Tensor] = {}
        left = number
        for place, name in enumerate(sorted(params, key=lambda name: params[name].numel())):
            size = params[name].numel()
            share = min(size, left // (len(params) - place))  # the last one takes what smaller ones could not
            positions[name] = torch.from_numpy(draws.choice(size, share, replace=False, shuffle=False))
            left -= share
        own = tuple(name for name in params for _ in range(len(positions[name])))
        return cls(own, torch.cat([positions[name] for name in params]), coins(number, key), positive("norm", norm))

    def extend(self, data: Batch) -> tuple[Batch, Tensor]:
        """The data set with the canaries behind it: `(data, number)`, where number is that of the canary, or -1.

        Args:
            data: pytree of tensors, n >= 1 rows. Its first row stands for each canary, without its loss.

        >>> from dpfunc.rng import insecure_key
        >>> canaries = Canaries.draw({"w": torch.zeros(4)}, 2, insecure_key(0))
        >>> canaries.extend(torch.zeros(3, 4))[1]
        tensor([-1, -1, -1,  0,  1])
        """
        if not batch_size(data):
            raise InvalidArgument("Expected data with at least one record, got none: canaries take its shapes.")
        return append_canaries(data, torch.arange(len(self.names), device="cpu"))

    def loss(self, loss_fn: LossFn) -> LossFn:
        """The loss of batches of `extend(data)`: that of each record, and `norm * param[position]` of each canary.

        Sampler, engine, clip rule and noise of the run are used as they are, in
        `make_dp_step(canaries.loss(loss_fn), plan)`; the plan counts the canaries as records.

        Args:
            loss_fn: `(params, batch) -> (B,)`, of the data.
        """
        owned, positions, norm = self._owned(), self.positions, self.norm

        def planted(params: Params, batch: Batch) -> Tensor:
            records, number_B = batch
            which_B, device = number_B.clamp(min=0), number_B.device
            losses_B, _ = split_aux(loss_fn(params, records))
            losses_B = torch.where(number_B < 0, losses_B, torch.zeros_like(losses_B))
            for name, owned_m in owned.items():
                flat = params[name].reshape(-1)
                value_B = norm * flat[positions.to(device)[which_B] % flat.numel()]
                here_B = (self.present & owned_m).to(device)[which_B] & (number_B >= 0)
                losses_B = losses_B + torch.where(here_B, value_B, torch.zeros_like(value_B))
            return losses_B

        return planted

    def read(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The coordinate of each canary in released gradients: float64, (m,). Released.

        A score is chosen before the run. The sum of all steps finds noise that is too small and records that are drawn
        too often; the largest minus the smallest finds noise that is used again.
        """
        reads = torch.zeros(len(self.names), dtype=torch.float64, device="cpu")
        for name, owned_m in self._owned().items():
            reads[owned_m] = grads[name].detach().reshape(-1).cpu().double()[self.positions[owned_m]]
        return reads

    def split(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of those that were in and of those that were out, for `audit`."""
        return scores[self.present], scores[~self.present]

    def _owned(self) -> dict[str, Tensor]:
        """Parameter -> canaries in it, bool, (m,)."""
        return {
            name: torch.tensor([own == name for own in self.names], device="cpu") for name in dict.fromkeys(self.names)
        }


def append_canaries(data: Batch, own: Tensor) -> tuple[Batch, Tensor]:
    """Data with the canaries of these numbers behind it, see `Canaries.extend`; with no record, ones stand for each."""

    def extended(leaf: Tensor) -> Tensor:
        row = leaf[:1] if len(leaf) else leaf.new_ones((1, *leaf.shape[1:]))
        return torch.cat([leaf, row.expand(len(own), *leaf.shape[1:])])

    return tree_map(extended, data), torch.cat([torch.full((batch_size(data),), -1, device="cpu"), own])


@torch.no_grad()
def loss_drops(loss_fn: LossFn, before: Params, after: Params, canaries: Batch) -> Tensor:
    """Scores of canaries among the records: by how much training has lowered the loss of each, (m,).

    Add those that were in (`coins`) to the data, and train. A record that the model would never guess, e.g. with a
    label at random, is a better canary than a typical one.

    Args:
        loss_fn: of the run. before, after: parameters; released. canaries: all of them, in and out.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> loss_drops(loss_fn, {"w": torch.zeros(2)}, {"w": -torch.ones(2)}, torch.eye(2))
    tensor([1., 1.])
    """
    drops = []
    for start in range(0, batch_size(canaries), _ROWS):
        some = rows(canaries, start, start + _ROWS)
        drops.append(split_aux(loss_fn(before, some))[0] - split_aux(loss_fn(after, some))[0])
    return torch.cat(drops)


def exposure(losses: Iterable[float] | Tensor, candidates: Iterable[float] | Tensor) -> Tensor:
    """Exposure of texts that were in the training data, in bits: `log2(1 + N) - log2(rank)`.

    The rank of a text is by its loss (sum of log perplexities) among N candidates that were drawn like it and were not
    in the data; of equals it is the last. A model that knows nothing of the text has exposure >= b with probability
    2^-b. Carlini et al. 2019, The Secret Sharer, Definition 4.

    Args:
        losses: of the m texts. candidates: losses of the N others.

    Raises:
        InvalidArgument: none, or losses that are not numbers.

    >>> exposure([1.0, 9.0], [2.0, 3.0, 4.0])
    tensor([2., 0.], dtype=torch.float64)
    """
    own, others = both = [torch.as_tensor(each, dtype=torch.float64).cpu() for each in (losses, candidates)]
    if any(each.ndim != 1 or not len(each) or each.isnan().any() for each in both):
        shapes = " and ".join(str(tuple(each.shape)) for each in both)
        raise InvalidArgument(f"Expected losses and candidates as lists of numbers, got shapes {shapes}, or NaN.")
    rank = 1 + torch.searchsorted(others.sort().values, own, right=True)
    return math.log2(1 + len(others)) - torch.log2(rank.double())
