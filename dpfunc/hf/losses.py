"""Losses of language models with one value a sample: the mean over the sample's own tokens, never over the batch's.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.

Axis letters: B samples, T positions, L labels, V vocabulary, C classes, K outputs, D features.

All take outputs of any floating dtype and return (B,), unreleased, in float32, or float64 for float64 outputs. Labels
are numbers of classes, where nothing else is said; a sample without a label that counts has loss 0 and zero gradient.
They select nothing by value: what is ignored is multiplied away, so that every engine can run them. Shapes that do not
fit are an `InvalidArgument`; on a CPU also classes that the outputs do not have.
"""

import re
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.validation import one_of, positive, real, refuse
from dpfunc.errors import InvalidArgument

IGNORED = -100


def causal_lm(logits_BTV: Tensor, labels_BT: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Next-token cross entropy: `sum_t m_t CE(logits_{t-1}, labels_t) / max(1, sum_t m_t)` for each sample, t >= 1.

    Args:
        labels_BT: the input ids, not shifted. ignore_index: the label where nothing is to be learnt (padding, prompts,
            image tokens).

    Returns:
        (B,): torch's mean cross entropy of each sample alone, whatever the length that the batch is padded to
        (tests/hf/test_losses.py::test_causal_lm_equals_single_samples, test_the_length_of_the_batch_does_not_matter).

    >>> logits_BTV = torch.zeros(2, 3, 4)
    >>> causal_lm(logits_BTV, torch.tensor([[1, 2, 3], [1, -100, -100]]))
    tensor([1.3863, 0.0000])
    """
    _check("logits (B, T, V)", logits_BTV, "labels (B, T)", labels_BT)  # before they are shifted
    return token_mean(logits_BTV[:, :-1], labels_BT[:, 1:], ignore_index=ignore_index)


def token_mean(logits_BTV: Tensor, labels_BT: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Cross entropy of each token, mean over the sample's own labelled ones: `sum_t m_t CE_t / max(1, sum_t m_t)`.

    Position t is about `labels_BT[:, t]`, of a decoder's outputs the token that it predicts; m_t = 1 where that is not
    `ignore_index`.

    >>> token_mean(torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]]))
    tensor([1.3863])
    """
    count_B = (labels_BT != ignore_index).sum(1).clamp(min=1)
    return _token_sum(logits_BTV, labels_BT, ignore_index) / count_B


def _token_sum(logits_BTV: Tensor, labels_BT: Tensor, ignore_index: int) -> Tensor:
    """Cross entropy of each token, sum over the sample's own labelled ones."""
    _check("logits (B, T, V)", logits_BTV, "labels (B, T)", labels_BT)
    losses_N = _cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index)
    return losses_N.reshape(labels_BT.shape).sum(1)


seq2seq = token_classification = token_mean


def log_probability(logits_BTV: Tensor, labels_BT: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Log-probability of the labelled tokens of a text: `sum_t m_t log p(labels_t | the tokens before)`, t >= 1.

    Args:
        labels_BT: the input ids, not shifted. ignore_index: the label of what is given (the prompt) or padding.

    Returns:
        (B,): log pi(answer | prompt) of each sample, not divided by its length.

    >>> log_probability(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 3]]))  # 2 log(1/4)
    tensor([-2.7726])
    """
    _check("logits (B, T, V)", logits_BTV, "labels (B, T)", labels_BT)  # before they are shifted
    return -_token_sum(logits_BTV[:, :-1], labels_BT[:, 1:], ignore_index)


PREFERENCES = ("sigmoid", "ipo", "hinge")
"""Kinds of `preference`."""


def preference(
    margin_B: Tensor, *, kind: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:  # fmt: skip
    """Loss of a pair of answers of which people chose one, by how much more the model has moved towards that one.

    With pi the model that is trained, pi_ref the one before, x the prompt, y_w the chosen and y_l the rejected answer,
    the margin is `delta = log pi(y_w | x) / pi_ref(y_w | x) - log pi(y_l | x) / pi_ref(y_l | x)`.

    Args:
        margin_B: delta of each pair, from two `log_probability` for each model.
        kind: "sigmoid" (DPO) is `-(1 - s) log sigmoid(beta delta) - s log sigmoid(-beta delta)`; "ipo" is
            `(delta - 1 / (2 beta))^2`; "hinge" is `max(0, 1 - beta delta)`.
        beta: > 0; a larger one keeps the model nearer to the reference.
        label_smoothing: s, 0 <= s < 0.5, the share of pairs whose answers are taken to be the wrong way round; of
            "sigmoid" only.

    Returns:
        (B,): the loss of each pair, unreleased.

    Raises:
        InvalidArgument: margins that are not (B,), or an argument outside of its domain.

    Guarantees:
        tests/hf/test_preferences.py: published figures (test_figures); per-sample gradients are those of single pairs
        (test_per_sample_gradients_are_those_of_the_loop).

    Papers: Rafailov et al. 2023, "Direct Preference Optimization", arXiv 2305.18290, equation 7 (sigmoid); Azar et al.
    2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv 2310.12036, equation 17
    with tau = beta (ipo); Zhao et al. 2023, "SLiC-HF", arXiv 2305.10425, equation 1, with the reference in the margin
    (hinge); Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO" (label_smoothing).

    >>> preference(torch.tensor([0.0, 1.0, -1.0]), beta=1.0)
    tensor([0.6931, 0.3133, 1.3133])
    """
    one_of("kind", kind, PREFERENCES)
    positive("beta", beta)
    domain = '0 <= label_smoothing < 0.5, and 0 of another kind than "sigmoid"'
    real("label_smoothing", label_smoothing, domain, inside=lambda s: s == 0 or (kind == "sigmoid" and 0 < s < 0.5))
    if margin_B.dim() != 1:
        raise InvalidArgument(f"Expected margins (B,), one for each pair, got {tuple(margin_B.shape)}.")
    margin_B = _at_least_float32(margin_B)
    if kind == "ipo":
        return (margin_B - 1 / (2 * beta)).square()
    if kind == "hinge":
        return (1 - beta * margin_B).relu()
    right_B = F.logsigmoid(beta * margin_B)
    wrong_B = F.logsigmoid(-beta * margin_B)
    return -(1 - label_smoothing) * right_B - label_smoothing * wrong_B


def classification(logits_BC: Tensor, labels_B: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Cross entropy of one class for each sample; 0 where the label is `ignore_index`.

    >>> classification(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([1.3863, 1.3863])
    """
    _check("logits (B, C)", logits_BC, "labels (B,)", labels_B)
    return _cross_entropy(logits_BC, labels_B, ignore_index)


def multi_label(logits_BC: Tensor, labels_BC: Tensor) -> Tensor:
    """Binary cross entropy, mean over the classes of each sample; labels are 0 or 1, or probabilities.

    >>> multi_label(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    tensor([0.6931])
    """
    _check("logits (B, C)", logits_BC, "labels (B, C)", labels_BC, whole=False)
    logits_BC = _at_least_float32(logits_BC)
    return F.binary_cross_entropy_with_logits(logits_BC, labels_BC.to(logits_BC.dtype), reduction="none").mean(1)


def regression(outputs_BK: Tensor, labels: Tensor) -> Tensor:
    """Squared error, mean over the K outputs of each sample; labels are numbers (B, K), or (B,) for K = 1.

    >>> regression(torch.zeros(2, 1), torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """
    targets_BK = labels[:, None] if labels.dim() == 1 else labels
    _check("outputs (B, K)", outputs_BK, "labels (B, K)", targets_BK, whole=False)
    outputs_BK = _at_least_float32(outputs_BK)
    return (outputs_BK - targets_BK.to(outputs_BK.dtype)).square().mean(1)


def question_answering(start_BT: Tensor, end_BT: Tensor, first_B: Tensor, last_B: Tensor) -> Tensor:
    """Mean of the cross entropies of the answer's first and last position, from logits over positions.

    Positions outside of 0 <= position < T are ignored, as for answers that were truncated.

    >>> zeros_BT = torch.zeros(1, 4)
    >>> question_answering(zeros_BT, zeros_BT, torch.tensor([1]), torch.tensor([4]))
    tensor([0.6931])
    """
    each = []
    for logits_BT, position_B in ((start_BT, first_B), (end_BT, last_B)):
        _check("logits (B, T)", logits_BT, "positions (B,)", position_B)
        outside_B = (position_B < 0) | (position_B >= logits_BT.shape[1])
        each.append(classification(logits_BT, torch.where(outside_B, IGNORED, position_B)))
    return (each[0] + each[1]) / 2


def ctc(
    logits_BTV: Tensor, labels_BL: Tensor, frames_B: Tensor, *, blank: int = 0, by_length: bool = True,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Connectionist temporal classification: `-log P(labels | frames)` of each sample.

    Args:
        labels_BL: negative where a sample has fewer. frames_B: frames of each sample that are not padding.
        blank: class of the blank. by_length: divide by the number of labels, at least 1. zero_infinity: 0 instead of
            infinity for a sample with more labels than its frames can give.

    Paper: Graves, Fernandez, Gomez, Schmidhuber 2006, "Connectionist Temporal Classification", section 3.

    >>> ctc(torch.zeros(1, 2, 2), torch.tensor([[1, -100]]), torch.tensor([2]))
    tensor([0.2877])
    """
    _check("logits (B, T, V)", logits_BTV, "labels (B, L)", labels_BL, whole=False)
    there_BL = labels_BL >= 0
    scores_TBV = F.log_softmax(_at_least_float32(logits_BTV), dim=2).transpose(0, 1)
    count_B, labels_BL = there_BL.sum(1), torch.where(there_BL, labels_BL, 0)
    losses_B = F.ctc_loss(scores_TBV, labels_BL, frames_B, count_B, blank, "none", zero_infinity)
    return losses_B / count_B.clamp(min=1) if by_length else losses_B


def cosine_similarity(first_BD: Tensor, second_BD: Tensor, scores_B: Tensor) -> Tensor:
    """Squared error of the cosine of two vectors: `(cos(u, v) - score)^2`, with the wanted cosine of each pair.

    >>> cosine_similarity(torch.ones(1, 2), torch.ones(1, 2), torch.tensor([0.5]))
    tensor([0.2500])
    """
    _check("vectors (B, D)", first_BD, "vectors (B, D)", second_BD, whole=False)
    cosines_B = F.cosine_similarity(_at_least_float32(first_BD), _at_least_float32(second_BD))
    return regression(cosines_B[:, None], scores_B)


def _at_least_float32(values: Tensor) -> Tensor:
    """float32 for what is narrower; a mean over many tokens is not exact in 16 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _cross_entropy(logits_NC: Tensor, labels_N: Tensor, ignore_index: int) -> Tensor:
    """Cross entropy of each row, (N,); the message about a class that does not exist names no record's label."""
    try:
        return F.cross_entropy(_at_least_float32(logits_NC), labels_N, ignore_index=ignore_index, reduction="none")
    except (IndexError, RuntimeError) as error:  # the second under torch.func.vmap
        if "out of bounds" not in str(error):
            raise
        count = logits_NC.shape[-1]
        raise InvalidArgument(
            f"Expected labels 0 <= label < {count}, for the {count} classes or tokens of the model, or {ignore_index}, "
            "which is left out; got a label outside of them. Map the labels to 0, 1, ..., or load the model with more "
            "classes (num_labels). Nothing was spent by this step."
        ) from None


def _check(what: str, outputs: Tensor, other: str, labels: Tensor, *, whole: bool = True) -> None:
    """Both have the axes that are named, each letter with one size, and labels are whole numbers if they are to be."""
    axes = [re.findall(r"\w", text.partition(" ")[2]) for text in (what, other)]
    shapes = [tuple(outputs.shape), tuple(labels.shape)]
    sizes = set(zip(chain(*axes), chain(*shapes), strict=False))
    refuse(
        ([*map(len, axes)] != [*map(len, shapes)] or len(sizes) > len(set(chain(*axes))),
         f"Expected {what} and {other} that fit, got {shapes[0]} and {shapes[1]}."),
        (whole and (labels.is_floating_point() or labels.dtype == torch.bool),
         f"Expected whole numbers as {other}, got {labels.dtype}."),
    )  # fmt: skip
