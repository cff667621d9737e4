"""The classifier over mean hidden states: padding, parts of the encoder, what is saved."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, DistilBertConfig

from dpfunc.hf.pooled import MeanPooledClassifier, load_mean_pooled, wants_mean
from dpfunc.recipes import Head

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def model(**changes):
    torch.manual_seed(0)
    made = MeanPooledClassifier(BertConfig(vocab_size=50, num_labels=3, **SIZES, **changes)).eval()
    torch.nn.init.normal_(made.classifier.weight)
    return made


def rows():
    ids = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 5, 1, 7])[:, None]).long()
    return ids * mask, mask


def test_the_head_has_rows_of_norm_1(tmp_path):
    """Whatever the length of the features: they are those of `unit_rows`."""
    ids, mask = rows()
    made = model()
    features = made.pooled(ids, mask)
    torch.testing.assert_close(made(features=7 * features).logits, made(ids, mask).logits)
    assert isinstance(made.classifier, Head)
    torch.testing.assert_close(features.norm(dim=1), torch.full((4,), 4.0), rtol=1e-3, atol=0.0)
    new = MeanPooledClassifier(BertConfig(vocab_size=50, num_labels=3, **SIZES))
    assert not new.classifier.weight.any()
    assert new.classifier.bias is None  # a constant feature stands for it
    assert any(p.any() for p in new.backbone.encoder.parameters())
    made.save_pretrained(tmp_path)
    assert torch.equal(load_mean_pooled(str(tmp_path)).eval()(ids, mask).logits, made(ids, mask).logits)


def test_padding_changes_nothing():
    ids, mask = rows()
    made = model()
    together = made(ids, mask).logits
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = made(ids[row : row + 1, :length]).logits
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_what_is_frozen_can_be_computed_before(layer):
    ids, mask = rows()
    made = model()
    assert made.split_at(layer)
    whole = made(ids, mask).logits
    torch.testing.assert_close(made(hidden=made.lower(ids, mask), attention_mask=mask).logits, whole)
    torch.testing.assert_close(made(features=made.pooled(ids, mask)).logits, whole)


def test_an_encoder_of_another_form_is_not_cut():
    config = DistilBertConfig(vocab_size=50, num_labels=3, dim=16, hidden_dim=24, n_layers=2, n_heads=2)
    made = MeanPooledClassifier(config)
    assert not made.split_at(1)
    assert made.training
    ids, mask = rows()
    assert made(ids, mask).logits.shape == (4, 3)


def test_a_cut_in_the_wrong_place_is_seen(monkeypatch):
    """The parts are compared with the whole: layers that take another mask, e.g., are not divided."""
    made = model()
    monkeypatch.setattr("dpfunc.hf.pooled._through", lambda layers, x, mask: x)
    assert not made.split_at(1)


@pytest.mark.parametrize(
    ("content", "mean"),
    [('{"pooling_mode_mean_tokens": true}', True), ('{"pooling_mode_cls_token": true}', False), ("[1]", False),
     ("{", False)],
)  # fmt: skip
def test_the_folder_says_how_tokens_are_pooled(tmp_path, content, mean):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(content)
    assert wants_mean(str(tmp_path)) is mean
