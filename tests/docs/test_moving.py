"""The pages about moving from other libraries: our blocks run; those of Opacus run too, with the same clipped sum."""

from __future__ import annotations

import re

import pages
import pytest
import torch
from pages import DOCS
from tiny_models import word_tokenizer
from torch import nn

import dpfunc
from dpfunc import clipping

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),  # Opacus, in each run
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),  # Opacus, in short runs
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),  # hooks of Opacus on first layers
]
PAGES = DOCS / "moving"


def run(page, *titles, **names):
    """The names after the blocks with these titles, one after another, as a reader runs a page from top to bottom."""
    found = re.findall(r'```python title="([^"]*)"\n(.*?)```', (PAGES / page).read_text(), re.DOTALL)
    return pages.run(*(code for title, code in found if title in titles), **names)


def pictures(n=600):
    return torch.utils.data.TensorDataset(torch.randn(n, 3, 4, 4), torch.randint(2, (n,)))


def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def test_every_block_has_a_title_that_says_whether_it_runs():
    for page in PAGES.glob("*.md"):
        titles = re.findall(r"```python(.*)", page.read_text())
        assert titles
        for title in titles:
            expected = r' title="(dpfunc|both|Opacus 1\.6\.0|[^"]+ \((not run|run by hand)\))"'
            assert re.fullmatch(expected, title), (page, title)


def test_earlier_steps_are_entered_as_events(capsys):
    names = run("README.md", "dpfunc")
    assert names["earlier"].num_steps == 500
    assert "epsilon=" in capsys.readouterr().out


def test_all_blocks_of_opacus_run_in_order(capsys):
    """What Opacus does to its model changes nothing for ours: each trains from the same start."""
    import opacus

    assert opacus.__version__ == "1.6.0"  # the version that the page names
    torch.manual_seed(0)
    before = run("opacus.md", "both")["model"].parameters()
    torch.manual_seed(0)
    titles = re.findall(r'```python title="([^"]*)"', (PAGES / "opacus.md").read_text())
    assert titles == ["both", "Opacus 1.6.0", "dpfunc"]
    names = run("opacus.md", *titles)
    assert names["engine"].get_epsilon(1e-5) == pytest.approx(3.0, abs=0.1)
    assert names["state"].step == 20
    assert names["state"].ledger.epsilon(1e-5).epsilon <= 3.0
    assert all(torch.equal(p, q) for p, q in zip(before, names["model"].parameters(), strict=True))
    assert not torch.equal(names["params"]["0.weight"], names["model"][0].weight)
    assert not torch.equal(names["module"][0].weight, names["model"][0].weight)
    assert "epsilon=2.9" in capsys.readouterr().out


def opacus_clipped_sum(model, batch, clip_norm):
    """`summed_grad` of Opacus for one batch: clipped, not yet divided, without noise."""
    from opacus.grad_sample.utils import wrap_model
    from opacus.optimizers import DPOptimizer

    x, y = batch
    wrapped = wrap_model(model, grad_sample_mode="hooks")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(x),
    )
    nn.functional.cross_entropy(wrapped(x), y).backward()
    optimizer.clip_and_accumulate()
    return {name: p.summed_grad.clone() for name, p in wrapped._module.named_parameters()}


def our_clipped_sum(model, batch, clip_norm):
    forward, params = dpfunc.functionalize(model)

    def loss_fn(params, batch):
        return nn.functional.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")

    return dpfunc.clipped.clipped_grad(loss_fn, params, batch, clipping.Flat(clip_norm=clip_norm))


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_opacus_has_the_same_clipped_sum(clip_norm):
    torch.manual_seed(0)
    names = run("opacus.md", "both")
    batch = (torch.randn(9, 8), torch.randint(3, (9,)))
    clipped, unreleased = our_clipped_sum(names["model"], batch, clip_norm)
    bent = int((unreleased.norms_BG > clip_norm).sum())
    assert bent == (9 if clip_norm < 1 else 0)
    theirs = opacus_clipped_sum(names["model"], batch, clip_norm)
    whole = sum(float(value.square().sum()) for value in theirs.values()) ** 0.5
    off = sum(float((clipped.sums[name] - value).square().sum()) for name, value in theirs.items()) ** 0.5
    assert off <= 2e-4 * whole


def test_what_the_pages_say_of_opacus():
    """A NaN in one sample is in all of the sum; q = 1 / len(loader); an argument that does not exist is accepted."""
    from opacus import PrivacyEngine

    names = run("opacus.md", "both")
    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    batch[0][1, 0] = float("nan")
    assert not any(value.isfinite().all() for value in opacus_clipped_sum(names["model"], batch, 1.0).values())
    clipped, _ = our_clipped_sum(run("opacus.md", "both")["model"], batch, 1.0)
    assert all(value.isfinite().all() for value in clipped.sums.values())
    model = nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        noize_multiplier=3.0,
    )  # fmt: skip
    assert loader.batch_sampler.sample_rate == 0.5
    assert optimizer.expected_batch_size == 32


@pytest.mark.parametrize("page", ["fastdp.md", "private_cnn.md"])
def test_our_block_of_pictures_runs(page):
    model = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)) if page == "fastdp.md" else convolutional()
    )
    names = run(page, "dpfunc", model=model, dataset=pictures())
    assert names["state"].step == 9 == names["plan"].num_steps
    assert names["state"].ledger.epsilon(1e-6).epsilon <= names["plan"].epsilon


def test_our_block_of_linear_regression_runs():
    names = run("jax_privacy.md", "dpfunc")
    assert names["plan"].adjacency == "replace_one"
    assert names["state"].step == 40
    assert names["noisy_sum"].keys() == {"w", "b"}


# The Trainer's own loaders ask for pinned memory on a machine without an accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_our_block_of_the_trainer_runs(tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[EOS]", *"abcdef"]
    tokenizer = word_tokenizer(words, "[EOS]", pad_token="[PAD]", eos_token="[EOS]")
    config = GPT2Config(
        vocab_size=len(words), n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    dataset = [{"input_ids": torch.randint(2, 8, (4 + i % 3,)).tolist()} for i in range(300)]
    names = run("dp_transformers.md", "dpfunc", model=GPT2LMHeadModel(config), tokenizer=tokenizer, dataset=dataset)
    assert names["trainer"].state.global_step == 5
    assert names["trainer"].ledger.epsilon(1e-5).epsilon <= 8.0
