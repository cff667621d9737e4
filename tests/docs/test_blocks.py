"""Every Python block of every page is run, in the order of its page: here, or by the test that is named here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping
from dpfunc.engines import _rules, register
from dpfunc.engines.vmap_grad import Decision

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Page -> the test that runs it, which names the page.
ELSEWHERE = {
    "extending.md": "docs/test_extending.py",
    "quick_start.md": "docs/test_site.py",
    "gallery.md": "newcomer/test_newcomer.py",
    "guides/budget.md": "guides/test_guides.py",
    "guides/certificate.md": "guides/test_guides.py",
    "guides/distributed.md": "guides/test_guides.py",
    "guides/evidence.md": "guides/test_evidence_guide.py",
    "guides/llava.md": "guides/test_llava_guide.py",
    "guides/loop.md": "guides/test_guides.py",
    "guides/models.md": "guides/test_models_guide.py",
    "guides/peft.md": "guides/test_guides.py",
    "guides/sharded.md": "guides/test_guides.py",
    "guides/sharded_checkpoints.md": "checkpoint/test_several_processes.py",
    "guides/telemetry.md": "guides/test_telemetry_guide.py",
    "guides/trainer.md": "guides/test_trainer_guide.py",
    **{f"moving/{path.name}": "docs/test_moving.py" for path in (DOCS / "moving").glob("*.md")},
}
HERE = {"index.md", "recipes.md", "padding.md", "engines.md"}


def blocks(page):
    return re.findall(r"```python\b[^\n]*\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(page, **names):
    for number, code in enumerate(blocks(page)):
        exec(compile(code, f"{page}: block {number}", "exec"), names)
    return names


def test_every_page_with_blocks_has_its_test():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if blocks(page)} == set(ELSEWHERE) | HERE
    for page, test in ELSEWHERE.items():
        text = (ROOT / "tests" / test).read_text()
        assert page.rpartition("/")[2] in text or page.startswith(("moving/", "gallery")), (page, test)


def test_the_gallery_shows_programs_that_run():
    shown = re.findall(r'^--8<-- "(.*)"$', (DOCS / "gallery.md").read_text(), re.MULTILINE)
    assert len(shown) == 5
    assert all((ROOT / path).exists() and path.startswith("tests/newcomer/") for path in shown)


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
    names = run("index.md", dpfunc=dpfunc, F=F, model=toy.model, plan=plan, dataset=dataset, update=update)
    assert names["state"].step == 4
    assert not torch.equal(names["params"]["weight"], toy.params["weight"])


def test_recipes(toy, tmp_path):
    from transformers import TrainingArguments

    from dpfunc.hf import PrivacyArguments

    local = {"report_to": "none", "use_cpu": True}
    names = run(
        "recipes.md", dpfunc=dpfunc, n=2000, params=toy.params, PrivacyArguments=PrivacyArguments,
        TrainingArguments=lambda output_dir, **values: TrainingArguments(str(tmp_path / output_dir), **local, **values),
    )  # fmt: skip
    assert sum(p.numel() for p in names["model"].parameters()) == names["recipe"].num_parameters
    assert names["args"].max_steps == names["plan"].num_steps
    assert names["privacy"].dp_epsilon == names["plan"].epsilon == 3.0


def test_padding(capsys):
    batch = {"ids": torch.tensor([[1, 2, 0], [3, 0, 0]]), "mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]])}
    loss_fn = lambda params, batch: (params["w"][batch["ids"]] * batch["mask"]).sum(1)
    run(
        "padding.md", torch=torch, batch=batch, loss_fn=loss_fn, params={"w": torch.randn(4)}, PAD={"ids": 0, "mask": 0}
    )
    short, longer = re.findall(r"tensor\(\[(.*?)\]\)", capsys.readouterr().out)
    assert short == longer


def test_engines():
    """What a decision looks like, and a rule that is compared before it is taken."""
    x, weight = torch.randn(3, 5), torch.randn(5)
    rule = lambda grad, input, weight: grad[:, None] * input
    try:
        names = run(
            "engines.md", Decision=Decision, my_op=torch.linalg.vecdot, per_sample_grad=rule, x=x, w=weight,
        )  # fmt: skip
        assert names["register_rule"] is register.register_rule
    finally:
        register.REGISTERED.pop(torch.linalg.vecdot, None)
        _rules.RULES.pop(torch.linalg.vecdot, None)
