"""Every Python block of every page is run, in the order of its page: here, or by a test that names the page."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import DOCS, ROOT, blocks, run, text_of
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping
from dpfunc.engines import _rules, register
from dpfunc.engines.vmap_grad import Decision


def test_every_page_with_blocks_has_its_test():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    pages = [path.relative_to(DOCS) for path in DOCS.rglob("*.md") if blocks(path)]
    assert len(pages) > 20
    assert [page for page in pages if not any(f"{page.name}" in text for text in texts)] == []
    shown = re.findall(r'^--8<-- "(.*)"$', text_of("gallery.md"), re.MULTILINE)
    assert all((ROOT / path).exists() and path.startswith("tests/newcomer/") for path in shown)


def test_code_is_at_most_84_columns_wide():
    """What a page of the site shows beside its two menus; tools/site.py looks at what is wider, in a browser."""
    pages = {path: path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md"))}
    code = [
        (path.name, block)
        for path, text in pages.items()
        for block in re.findall(r"^```.*?^```", text, re.M | re.DOTALL)
    ]
    shown = re.findall(r'^--8<-- "(.*)"$', pages[DOCS / "gallery.md"], re.MULTILINE)
    code += [(path, (ROOT / path).read_text()) for path in shown]
    assert len(code) > 150
    assert [(name, line) for name, block in code for line in block.splitlines() if len(line) > 84] == []


def digits(return_X_y):
    """The digits of scikit-learn 1.9.1, from its file."""
    table = np.loadtxt(ROOT / "tests" / "_support" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


def test_the_loop_of_the_readme(capsys):
    """As it stands, but for the import of its data: at most 15 lines from the model on, and what the page says it prints."""
    (code,) = blocks("../README.md")
    names = run(code.replace("from sklearn.datasets import load_digits", ""), load_digits=digits)
    assert names["state"].step == names["plan"].num_steps
    assert names["recipe"].num_parameters == sum(p.numel() for p in names["params"].values())
    assert 0.75 < float(names["accuracy"]) < 0.95
    assert "about 0.85" in text_of("../README.md")
    printed = capsys.readouterr().out
    assert re.search(r"\(epsilon=2\.9\d+, delta=1e-05\)-DP", printed)[0] in text_of("../README.md")
    loop = code[code.index("forward, params") : code.index("accuracy =")].strip()
    assert len([line for line in loop.splitlines() if line.strip()]) <= 15
    assert max(map(len, code.splitlines())) <= 84


def test_the_quick_start(capsys):
    (code,) = blocks("quick_start.md")
    assert run(code.replace("num_steps=100", "num_steps=3"))["state"].step == 3
    assert "epsilon=" in capsys.readouterr().out


@pytest.fixture
def toy():
    x = torch.randn(200, 4)
    model = nn.Linear(4, 2)
    forward, params = dpfunc.functionalize(model)
    loss_fn = lambda params, batch: F.cross_entropy(forward(params, batch["x"]), batch["y"], reduction="none")
    data = {"x": x, "y": (x[:, 0] > 0).long()}
    return SimpleNamespace(model=model, params=params, loss_fn=loss_fn, data=data)


def test_the_loop_of_the_first_page(toy):
    plan = dpfunc.Plan.for_budget(
        epsilon=3.0, delta=1e-5, dataset_size=200, expected_batch_size=50, num_steps=4, clip=clipping.Flat(1.0)
    )
    update = lambda params, grads: {name: p - 0.1 * grads[name] for name, p in params.items()}
    dataset = torch.utils.data.TensorDataset(*toy.data.values())
    names = run(*blocks("index.md"), dpfunc=dpfunc, F=F, model=toy.model, plan=plan, dataset=dataset, update=update)
    assert names["state"].step == 4
    assert not torch.equal(names["params"]["weight"], toy.params["weight"])


def test_recipes(toy, tmp_path):
    from transformers import TrainingArguments

    from dpfunc.hf import PrivacyArguments

    local = {"report_to": "none", "use_cpu": True}
    names = run(
        *blocks("recipes.md")[:2], dpfunc=dpfunc, n=2000, params=toy.params, PrivacyArguments=PrivacyArguments,
        TrainingArguments=lambda output_dir, **values: TrainingArguments(str(tmp_path / output_dir), **local, **values),
    )  # fmt: skip
    assert sum(p.numel() for p in names["model"].parameters()) == names["recipe"].num_parameters
    assert names["args"].max_steps == names["plan"].num_steps
    assert names["privacy"].dp_epsilon == names["plan"].epsilon == 3.0


def test_recipes_views_and_averages(toy):
    """Views of images that are flipped at random; the average of a run on the same plan."""
    views, averages, both, adam, scaled, moments = blocks("recipes.md")[2:]
    plan = dpfunc.Plan(dpfunc.sampling.Poisson(200, 0.1), clipping.Flat(1.0), 1.0, num_steps=5, delta=1e-3)
    facts = {"dpfunc": dpfunc, "torch": torch, "plan": plan}
    images, labels = torch.randn(200, 1, 2, 2), torch.randint(0, 2, (200,))
    names = run(views, images=images, labels=labels, params={"w": torch.zeros(4, 2)}, **facts)
    assert names["state"].ledger == plan.ledger()
    assert names["batch"]["x"].shape[1:] == (4, 1, 2, 2)
    dp_step = dpfunc.make_dp_step(toy.loss_fn, plan)
    params, seen = toy.params, []
    state = dp_step.init(params, dpfunc.rng.insecure_key(0))
    run(averages, dp_step=dp_step, state=state, params=params, data=toy.data, evaluate=seen.append, **facts)
    assert seen[0].keys() == params.keys()
    names = run(both, **{**names, "n": 200, "params": {"w": torch.zeros(4, 2)}})
    assert names["batch"]["x"].shape[1:] == (2, 1, 2, 2)
    assert names["averaged"]["step"] == names["plan"].num_steps == 100
    values = {name: value.detach().clone() for name, value in params.items()}
    given = {"params": values, "data": toy.data, "loss_fn": toy.loss_fn}
    dp_step = dpfunc.make_dp_step(toy.loss_fn, plan)
    names = run(adam, dp_step=dp_step, state=dp_step.init(values, dpfunc.rng.insecure_key(1)), **given, **facts)
    assert names["optimizer"].param_groups[0]["noise_std"] == 1.0 / 20  # z C / b
    after = run(scaled, state=names["state"], **given, **facts)
    assert after["state"].ledger.num_steps == 10
    after = run(moments, state=after["state"], **given, **facts)
    assert after["state"].ledger.num_steps == 13
    assert all(torch.isfinite(value).all() for value in values.values())


def test_padding(capsys):
    batch = {"ids": torch.tensor([[1, 2, 0], [3, 0, 0]]), "attention_mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]])}
    loss_fn = lambda params, batch: (params["w"][batch["ids"]] * batch["attention_mask"]).sum(1)
    facts = {"torch": torch, "batch": batch, "loss_fn": loss_fn, "params": {"w": torch.randn(4)}}
    names = run(*blocks("padding.md"), **facts, PAD={"ids": 0, "attention_mask": 0})
    expected, _ = names["gradient"](facts["params"], batch)
    torch.testing.assert_close(names["whole"].sums, expected.sums)
    short, longer = re.findall(r"tensor\(\[(.*?)\]\)", capsys.readouterr().out)
    assert short == longer


def test_engines():
    """What a decision looks like, and a rule that is compared before it is taken."""
    facts = {"my_op": torch.linalg.vecdot, "per_sample_grad": lambda grad, input, weight: grad[:, None] * input}
    try:
        names = run(*blocks("engines.md"), Decision=Decision, x=torch.randn(3, 5), w=torch.randn(5), **facts)
        assert names["register_rule"] is register.register_rule
    finally:
        register.REGISTERED.pop(torch.linalg.vecdot, None)
        _rules.RULES.pop(torch.linalg.vecdot, None)
