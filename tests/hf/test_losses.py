"""Losses: one value a sample, whatever stands beside it; equal to torch's own means over single samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from dpfunc import clipping, engines
from dpfunc.clipped import clipped_grad
from dpfunc.errors import InvalidArgument
from dpfunc.hf import losses

VOCAB = 5
shapes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))


def draw(shape, dtype=torch.float32):
    """Logits and labels, about a third of them ignored; the first row has none."""
    samples, length, seed = shape
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, length, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (samples, length), generator=generator)
    labels = torch.where(torch.rand(labels.shape, generator=generator) < 0.35, losses.IGNORED, labels)
    labels[0] = losses.IGNORED
    return logits.to(dtype).requires_grad_(), labels


def single(logits_TV, labels_T):
    """torch's own mean cross entropy of one sample; 0 where it has no labels."""
    if not (labels_T != losses.IGNORED).any():
        return logits_TV.float().sum() * 0
    return F.cross_entropy(logits_TV.float(), labels_T, ignore_index=losses.IGNORED)


def gradients(losses_B, logits):
    return torch.stack([torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses_B])


@given(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_causal_lm_equals_single_samples(shape, dtype):
    """The mean over the sample's own tokens, in float32, with its gradient, whatever stands beside it."""
    logits, labels = draw(shape, dtype)
    found = losses.causal_lm(logits, labels)
    expected = torch.stack([single(row[:-1], y[1:]) for row, y in zip(logits, labels, strict=True)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, logits), gradients(expected, logits), rtol=1e-2, atol=1e-3)
    assert found[0] == 0
    assert not gradients(found, logits)[0].any()


@given(shapes, st.integers(1, 4))
def test_the_length_of_the_batch_does_not_matter(shape, more):
    logits, labels = draw(shape)
    longer = F.pad(logits, (0, 0, 0, more), value=7.0), F.pad(labels, (0, more), value=losses.IGNORED)
    for loss in (losses.causal_lm, losses.seq2seq):
        torch.testing.assert_close(loss(*longer), loss(logits, labels))


def test_answers_outside_of_the_text_are_ignored():
    start, end = torch.randn(3, 4), torch.randn(3, 4)
    first, last = torch.tensor([0, 1, 9]), torch.tensor([2, 7, -1])
    found = losses.question_answering(start, end, first, last)
    expected = (F.cross_entropy(start[:1], first[:1]) + F.cross_entropy(end[:1], last[:1])) / 2
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], F.cross_entropy(start[1:2], first[1:2]) / 2)
    assert found[2] == 0
    for loss in (losses.causal_lm, losses.token_mean):  # empty batches, no positions, float64
        assert loss(torch.zeros(0, 3, VOCAB), torch.zeros(0, 3, dtype=torch.long)).shape == (0,)
        assert loss(*draw((2, 3, 0), torch.float64)).dtype == torch.float64
    assert losses.causal_lm(torch.zeros(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.long)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: losses.causal_lm(torch.zeros(2, 3, 4), torch.zeros(2, 2).long()), r"\(2, 3, 4\) and \(2, 2\)"),
        (lambda: losses.causal_lm(torch.zeros(2, 3, 4), torch.zeros(2, 3)), "whole numbers"),
        (lambda: losses.classification(torch.zeros(2, 4), torch.zeros(2, 4).long()), "fit"),
        (lambda: losses.regression(torch.zeros(2, 2), torch.zeros(2)), "fit"),
        (lambda: losses.multi_label(torch.zeros(2, 2), torch.zeros(2)), "fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, said):
    with pytest.raises(InvalidArgument, match=said):
        call()


@pytest.mark.parametrize("label", [VOCAB, -1, 7919])
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_a_class_that_does_not_exist_is_refused_and_not_named(label, engine):
    """The number is of a private record."""

    def loss_fn(params, batch):
        return losses.classification(batch["x"] @ params["w"], batch["y"])

    batch = {"x": torch.ones(3, 2), "y": torch.tensor([0, label, losses.IGNORED])}
    with pytest.raises(InvalidArgument, match=r"Expected labels 0 <= label < 5.*or -100.*num_labels") as caught:
        clipped_grad(
            loss_fn, {"w": torch.zeros(2, VOCAB)}, batch, clipping.Flat(1.0), engine=getattr(engines, engine)()
        )
    assert str(label) not in str(caught.value).replace("-100", "").replace("< 5", "").replace("the 5", "")
