"""Author-level privacy: the unit is a person with several texts, one row of a batch a person.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfunc._utils.validation import checked, count, integer, wrong_type
from dpfunc.batches import batch_size, tree_map
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, check_key, fold_in, stream

_TEXT_MASK = "text_mask"

# `(params, batch) -> (B,)`, or `(forward, params, batch) -> (B,)`, as the losses of `dpfunc.hf.tasks` are.
SampleLoss = Callable[..., Tensor]


@dataclass(frozen=True)
class Persons:
    """Rows of a table grouped by person; see `group_by_person`. As secret as the table, but for `max_texts`.

    Args:
        index_PK: row numbers of a person's texts in the table, int64 (P, K); free places repeat the first text.
        mask_PK: true where there is a text, bool (P, K). dropped: texts above the cap, which are not used.
    """

    index_PK: Tensor = field(repr=False)
    mask_PK: Tensor = field(repr=False)
    dropped: int = field(repr=False)

    def __len__(self) -> int:
        """The number of persons P: the `dataset_size` of a plan whose unit of privacy is a person."""
        return self.index_PK.shape[0]

    @property
    def max_texts(self) -> int:
        """Public cap K on the texts of a person."""
        return self.index_PK.shape[1]

    def rows(self) -> list[list[int]]:
        """Row numbers of the texts of each person, without repetitions: at least one, at most K."""
        return [index_K[mask_K].tolist() for index_K, mask_K in zip(self.index_PK, self.mask_PK, strict=True)]

    def batch(self, texts: Any, persons_B: Tensor | None = None) -> Any:
        """The texts of some persons as a batch of (B, K, ...) tensors, and which of them there are, bool (B, K).

        Args:
            texts: tensors with one row a text of the table: a mapping, a tuple, one tensor, or another pytree of them.
            persons_B: int64 (B,), e.g. from `plan.batches(state)`; may be empty. None takes all.

        Returns:
            Of a mapping, a dictionary with `text_mask` beside its tensors; of anything else the pair (texts, mask).
            Both are what `mean_over_texts` takes. Unreleased.

        Raises:
            InvalidArgument: no tensors, tensors with fewer rows than the table, or one named `text_mask`.
        """
        given, needed = batch_size(texts), int(self.index_PK.max()) + 1 if self.index_PK.numel() else 0
        if given < needed:
            raise InvalidArgument("Expected tensors with a row for each text of the table, got some with fewer rows.")
        chosen = torch.arange(len(self), device="cpu") if persons_B is None else persons_B.cpu()
        index_BK, mask_BK = self.index_PK[chosen], self.mask_PK[chosen].to(tree_leaves(texts)[0].device)
        own = tree_map(lambda leaf: leaf[index_BK.to(leaf.device)], texts)
        return _masked(own, mask_BK) if isinstance(texts, Mapping) else (own, mask_BK)


def _masked(texts: Mapping[str, Tensor], mask_BK: Tensor) -> dict[str, Tensor]:
    if _TEXT_MASK in texts:
        raise InvalidArgument(f"Expected tensors of texts under other names than {_TEXT_MASK!r}. Rename it.")
    return {**texts, _TEXT_MASK: mask_BK}


def group_by_person(persons: Sequence[Hashable], *, max_texts: int, key: Key) -> Persons:
    """Group the rows of a table by its column of persons, in the order in which they first appear.

    Args:
        persons: who wrote each text: one value a row (a person under two names is two units, and protected as two).
        max_texts: K >= 1, a public number chosen without a look at the data. A person with more texts gives K of them,
            drawn by the key and how many there are, not by other persons. key: of the draw; not the key of the run.

    Returns:
        `Persons`. Adding or removing a person adds or removes one row, so that a plan with `dataset_size=len(persons)`
        and `adjacency="add_remove"` protects persons. K decides time and memory, not epsilon.

    Guarantees:
        tests/sampling/test_users.py: removing a person leaves the rows of all others as they are
        (test_removing_a_person_removes_one_row).

    Raises:
        InvalidArgument: max_texts < 1, a row without a person, or two persons whose values look the same.

    >>> from dpfunc.rng import insecure_key
    >>> people = group_by_person(["ann", "bob", "ann"], max_texts=2, key=insecure_key(0))
    >>> people.mask_PK
    tensor([[ True,  True],
            [ True, False]])
    """
    cap = integer("max_texts", max_texts, minimum=1)
    check_key(key)
    rows = _rows_by_person(persons)
    kept = [own if len(own) <= cap else _chosen(own, cap, key, person) for person, own in rows.items()]
    index, mask_PK = _filled(kept, cap)
    return Persons(torch.tensor(index, dtype=torch.int64).reshape(-1, cap), mask_PK, len(persons) - int(mask_PK.sum()))


def _filled(groups: Sequence[Sequence[Any]], cap: int) -> tuple[list[Any], Tensor]:
    """All groups in one list, each filled to `cap` by its first element; and which places (P, K) are its own."""
    own_PK = torch.arange(cap) < torch.tensor([len(own) for own in groups], dtype=torch.int64)[:, None]
    return [each for own in groups for each in (*own, *[own[0]] * (cap - len(own)))], own_PK


def _rows_by_person(persons: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    if isinstance(persons, (str, bytes, Mapping, Set)):  # whose parts are no rows
        raise wrong_type("a list with one person a row", "persons", persons)
    rows: dict[Hashable, list[int]] = {}
    for number, person in enumerate(persons):
        if person is None or person == "" or person != person:  # NaN, as tables have it for a missing value
            raise InvalidArgument(
                f"Expected a person in each row, got {person!r} in row {number}. Leave such texts out, or give each a "
                "name of its own if it is nobody else's."
            )
        rows.setdefault(person, []).append(number)
    if len({spelling(person) for person in rows}) < len(rows):
        raise InvalidArgument(
            f"Expected each person in one spelling, got two whose values look the same: {LOOK_THE_SAME} would make two "
            "people of one, each of them protected for itself. Write each of them in one way."
        )
    return rows


LOOK_THE_SAME = 'spaces, signs that do not show, two ways to write an accent, or a number and its text (7 and "7")'


def spelling(person: Hashable) -> str:
    """The text that a reader sees of a person's value: equal for values that look the same (`LOOK_THE_SAME`).

    >>> spelling(" ann\\u200b  lee ") == spelling("ann lee"), spelling("Zoe\\u0301") == spelling("Zo\\u00e9")
    (True, True)
    """
    shown = "".join(sign for sign in unicodedata.normalize("NFKC", str(person)) if sign.isprintable() or sign.isspace())
    return " ".join(shown.split())


def _chosen(own: list[int], cap: int, key: Key, person: Hashable) -> list[int]:
    places = stream(fold_in(key, "texts of a person", repr(person))).choice(len(own), cap, replace=False)
    return [own[place] for place in sorted(places.tolist())]


@dataclass(frozen=True)
@checked({"max_texts": count})
class CollatePersons:
    """A collator of persons, each a list of at most `max_texts` records, for a data set in a Trainer or a loader.

    Args:
        collate: of single records: a list of mappings -> tensors with one row a record. max_texts: public K >= 1.

    >>> collate = CollatePersons(lambda records: {"x": torch.tensor([r["x"] for r in records])}, max_texts=2)
    >>> collate([[{"x": 1}, {"x": 2}], [{"x": 3}]])
    {'x': tensor([[1, 2],
            [3, 3]]), 'text_mask': tensor([[ True,  True],
            [ True, False]])}
    """

    collate: Callable[[list[Any]], Mapping[str, Tensor]] = field(repr=False)
    max_texts: int

    def __call__(self, persons: Sequence[Any]) -> dict[str, Tensor]:
        """The batch of some persons, (B, K, ...) and `text_mask` (B, K); of records, which are mappings, as `collate`.

        Raises:
            InvalidArgument: a person with no records, or with more than K.
        """
        if persons and isinstance(persons[0], Mapping):  # to evaluate, where no person is protected
            return dict(self.collate(list(persons)))
        cap = self.max_texts
        if not all(1 <= len(own) <= cap for own in persons):
            raise InvalidArgument(
                f"Expected 1 to max_texts={cap} records of each person, got another number. group_by_person draws "
                "those of a person who has more."
            )
        records, mask_BK = _filled(persons, cap)
        batch = self.collate(records).items()
        return _masked({name: rearrange(value, "(B K) ... -> B K ...", K=cap) for name, value in batch}, mask_BK)


@dataclass(frozen=True)
class MeanOverTexts:
    """A loss of persons; see `mean_over_texts`."""

    sample_loss: SampleLoss

    def __call__(self, *parameters_and_batch: Any) -> Any:
        """Losses of people (B,), or with aux, from (params, batch) or (forward, params, batch) of `Persons.batch`."""
        *before, batch = parameters_and_batch
        texts, mask_BK = _without_mask(batch)
        if not isinstance(mask_BK, Tensor) or mask_BK.ndim != 2:
            raise InvalidArgument(f"Expected a batch of Persons.batch, with a {_TEXT_MASK!r} of shape (B, K).")
        texts = tree_map(lambda value: rearrange(value, "B K ... -> (B K) ..."), texts)
        losses, shape = self.sample_loss(*before, texts), mask_BK.shape

        def mean(values: Tensor) -> Tensor:
            own = (values if values.is_floating_point() else values.float()).unflatten(0, shape)
            there = mask_BK.reshape(*shape, *[1] * (own.dim() - 2))
            own = torch.where(there, own, torch.zeros_like(own))
            return own.sum(1) / there.sum(1).clamp(min=1).to(own.dtype)

        return tree_map(mean, losses)


def _without_mask(batch: Any) -> tuple[Any, Tensor | None]:
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != _TEXT_MASK}, batch.get(_TEXT_MASK)
    return batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)


def mean_over_texts(sample_loss: SampleLoss) -> MeanOverTexts:
    """The loss of a person: the mean of the losses of that person's own texts, `sum_k m_k loss_k / sum_k m_k`.

    Args:
        sample_loss: `(params, batch) -> (B,)` or `(forward, params, batch) -> (B,)`, the loss of single texts; or
            `(losses, aux)`, whose aux is averaged as well.

    Returns:
        The same kind of function on batches of `Persons.batch`. Its per-sample gradient is that of a whole person, so
        clipping bounds a person's contribution, however many texts there are.

    Guarantees:
        tests/sampling/test_users.py: all engines agree with the loop (test_engines_agree_on_persons), and a
        person moves the clipped sum by at most the sensitivity (test_a_person_has_bounded_sensitivity).

    >>> from dpfunc.rng import insecure_key
    >>> loss = mean_over_texts(lambda forward, params, batch: forward(params, batch["x"]))
    >>> people = group_by_person(["ann", "bob", "ann"], max_texts=2, key=insecure_key(0))
    >>> batch = people.batch({"x": torch.tensor([1.0, 5.0, 3.0])})
    >>> loss(lambda params, x: params["w"] * x, {"w": torch.tensor(1.0)}, batch)
    tensor([2., 5.])
    """
    return MeanOverTexts(sample_loss)
