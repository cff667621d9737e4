"""Preferences between two answers (DPO): a pair is a record, with what a frozen reference model says of it in its row.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.

Axis letters: B pairs, T positions. On axis 1 of a pair are the chosen answer, then the rejected one, each behind the
same prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dpfunc.batches import rows
from dpfunc.errors import InvalidArgument
from dpfunc.functional.modules import function_of, unwrapped
from dpfunc.hf import losses
from dpfunc.hf._facts import AnyForward, evaluating, with_facts
from dpfunc.hf.tasks import next_tokens
from dpfunc.types import Params

ANSWERS = ("chosen", "rejected")
REFERENCE = "reference"
"""The name under which a batch has the log-probabilities of the reference model."""


@dataclass(frozen=True)
class Preference:
    """DPO and its relatives as a loss of single pairs, `(forward, params, batch) -> (B,)`; both answers in one pass.

    The batch has "input_ids", "attention_mask" and "labels" (B, 2, T), the labels -100 at the prompt and at padding,
    and "reference" (B, 2) of `reference_log_probabilities`. Other inputs of the model have both answers on axis 1, too.

    Args:
        kind, beta, label_smoothing: see `dpfunc.hf.losses.preference`, which has the formulas.

    Returns:
        For `make_loss_fn(forward, Preference(...))` and `DPTrainer(loss=Preference(...))`. A pair is one row, so
        clipping bounds a pair with both of its answers.

    Raises:
        InvalidArgument: an argument outside of its domain; when it is called, a batch of another form.

    Guarantees:
        tests/hf/test_preferences.py: per-sample gradients are those of single pairs
        (test_per_sample_gradients_are_those_of_the_loop), the model is called once (test_one_pass_for_both_answers),
        and the length that a batch is padded to does not matter (test_padding_does_not_matter).

    >>> Preference(kind="ipo", beta=0.2)
    Preference(kind='ipo', beta=0.2, label_smoothing=0.0)
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        self.loss(torch.zeros(0))  # which checks the arguments

    def __call__(self, forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of each pair, (B,)."""
        return self.loss(margins(forward, params, batch))

    def loss(self, margin_B: Tensor) -> Tensor:
        """The loss of pairs with these margins, (B,)."""
        return losses.preference(margin_B, kind=self.kind, beta=self.beta, label_smoothing=self.label_smoothing)


def margins(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probability gained by each chosen answer minus that of the rejected one, (B,).

    It is delta of `dpfunc.hf.losses.preference`.

    Args:
        forward, params: the model, from `dpfunc.functionalize`. batch: as for `Preference`.

    Returns:
        Unreleased numbers. `beta * delta` is the difference of the two rewards; where it is positive the model prefers
        the chosen answer, compared with the reference.
    """
    reference_B2 = batch.get(REFERENCE)
    if not isinstance(reference_B2, Tensor) or reference_B2.dim() != 2 or reference_B2.shape[1] != 2:
        got = tuple(reference_B2.shape) if isinstance(reference_B2, Tensor) else sorted(map(str, batch))
        raise InvalidArgument(
            f"Expected {REFERENCE!r} (B, 2) in the batch, the log-probabilities of the reference model, got {got}. "
            "Compute them once, before training: dpfunc.hf.reference_log_probabilities(model, batch). With "
            "the Trainer set remove_unused_columns=False."
        )
    gained_B2 = log_probabilities(forward, params, batch) - reference_B2
    return gained_B2[:, 0] - gained_B2[:, 1]


def log_probabilities(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of both answers, (B, 2): see `dpfunc.hf.losses.log_probability`; one pass of the model.

    Args:
        forward, params, batch: as for `margins`; "reference" is not needed.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 3 or labels.shape[1] != 2:
        got = tuple(labels.shape) if isinstance(labels, Tensor) else sorted(map(str, batch))
        raise InvalidArgument(
            f"Expected 'labels' (B, 2, T) in the batch, of the chosen and of the rejected answer, got {got}. "
            "dpfunc.hf.CollatePairs makes them."
        )
    inputs = {name: value.flatten(0, 1) for name, value in batch.items() if name != REFERENCE}
    each_N = losses.log_probability(*next_tokens(with_facts(forward), params, inputs))
    return rearrange(each_N, "(B two) -> B two", two=2)


def reference_log_probabilities(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of both answers by the reference model, (B, 2), for the rows of the pairs.

    They are computed once, before training.

    Call it with the model before its first step: a new adapter of LoRA adds nothing yet. Where the adapter has been
    trained before and the model below it is to be the reference, switch it off:
    `with peft_model.disable_adapter(): ...`.

    Args:
        model: is evaluated without dropout and without gradients, on its own device, and not changed.
        batch: as for `Preference`, without "reference". Each pair is computed alone, so that what is kept in its row is
            a function of this pair only.

    Returns:
        (B, 2) on the device of the batch, unreleased: as private as the records.

    Guarantees:
        tests/hf/test_preferences.py: margins of an untrained model are 0 (test_margins_begin_at_zero); other pairs of
        the batch change no bit (test_the_reference_of_a_pair_is_computed_alone).
    """
    model = unwrapped(model)
    first = next(name for name, value in model.named_parameters() if value.is_floating_point())
    with evaluating(model), torch.no_grad():
        forward, params = function_of(model, [first])
        there = {name: value.to(params[first].device) for name, value in batch.items()}
        found = [
            log_probabilities(forward, params, rows(there, place, place + 1)) for place in range(len(batch["labels"]))
        ]
    return torch.cat(
        [batch["labels"].new_zeros(0, 2, dtype=torch.float32), *(each.to(batch["labels"].device) for each in found)]
    )


@dataclass(frozen=True)
class CollatePairs:
    """A collator of pairs from one of single texts, for `plan.loader(..., collate_fn=...)` and the Trainer.

    Args:
        collate: makes a batch (B, ...) of records with "input_ids" and "labels", padded to one length, e.g.
            `DataCollatorForTokenClassification(tokenizer)`, which pads labels with -100.

    Returns:
        A function of a list of records {"chosen": ..., "rejected": ..., "reference": (number, number)}, the first two
        as `collate` takes them; "reference" may be absent, for `reference_log_probabilities`. It gives a batch
        (B, 2, ...) for `Preference`.

    >>> texts = {"input_ids": [1, 2], "labels": [-100, 2]}
    >>> to_tensors = lambda records: {name: torch.tensor([each[name] for each in records]) for name in records[0]}
    >>> CollatePairs(to_tensors)([{"chosen": texts, "rejected": texts}])["labels"].shape
    torch.Size([1, 2, 2])
    """

    collate: Callable[[list[Any]], Mapping[str, Tensor]] = field(repr=False)

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of some pairs."""
        if missing := [name for name in ANSWERS if any(name not in record for record in records)]:
            raise InvalidArgument(
                f"Expected tokens of 'chosen' and of 'rejected' in each record, got one without {missing[0]!r}."
            )
        answers = [record[name] for record in records for name in ANSWERS]
        batch = {
            name: rearrange(value, "(B two) ... -> B two ...", two=2) for name, value in self.collate(answers).items()
        }
        if any(REFERENCE in record for record in records):
            batch[REFERENCE] = torch.tensor([record[REFERENCE] for record in records])
        return batch
