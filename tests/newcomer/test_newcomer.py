"""Programs as new users write them from the documents: each runs, and what it claims is true of its result.

Each stands in a file of its own beside this one. Seeds and keys are here: no accuracy is missed by a rare noise.
"""

from __future__ import annotations

import ast
import itertools
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launcher import works
from tiny_models import write_model
from torch.nn import functional as F
from transformers import AutoTokenizer

import dpfunc

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FOLDER = Path(__file__).parent
PROGRAMS = sorted(
    path
    for path in FOLDER.glob("*.py")
    if path.name not in ("conftest.py", Path(__file__).name)
)
# Order in which keys are numbered: a new program is the last.
ORDER = ["aux_metrics", "first_loop", "head", "images", "language_model", "opacus_moved", "rare_class", "released_loss",
         "resume", "sweep", "two_processes", "users", "chat", "image_folder", "preferences", "two_modules",
         "federated"]  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Secure RNG turned off:UserWarning"
    ),  # Opacus, in each run
    pytest.mark.filterwarnings(
        "ignore:Optimal order is the largest alpha:UserWarning"
    ),  # Opacus, in short runs
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing:UserWarning"
    ),  # hooks of Opacus on first layers
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The names of a program after its last line, in an empty folder."""

    def run(name):
        numbers = itertools.count(100 * ORDER.index(name))
        monkeypatch.setattr(
            dpfunc,
            "secure_key",
            lambda: replace(
                dpfunc.rng.insecure_key(next(numbers)), guessable=False
            ),
        )
        monkeypatch.chdir(tmp_path)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return runpy.run_path(str(FOLDER / f"{name}.py"))

    return run


def within(names, budget):
    return 0.98 * budget < names["epsilon"] <= budget


def test_each_is_short_and_has_a_test():
    assert sorted(ORDER) == [path.stem for path in PROGRAMS]
    for path in PROGRAMS:
        assert (
            sum(
                isinstance(node, ast.stmt)
                for node in ast.walk(ast.parse(path.read_text()))
            )
            <= 35
        ), path.name
        assert f"def test_{path.stem}(" in Path(__file__).read_text()


def test_first_loop(run, tmp_path):
    names = run("first_loop")
    assert within(names, 3.0)
    assert names["accuracy"] > 0.85  # a constant has 0.5
    assert (
        len((tmp_path / "journal.jsonl").read_text().splitlines())
        >= names["plan"].num_steps
    )
    assert not torch.equal(names["trained"].weight, names["model"].weight)


def test_head(run):
    names = run("head")
    assert within(names, 3.0)
    assert names["accuracy"] > 0.8  # a constant has 0.2
    assert all(p.grad is None for p in names["encoder"].parameters())


def test_rare_class(run):
    """Probabilities better than the shares of the classes, and positives that are found."""
    names = run("rare_class")
    y, logits = names["test_y"], names["logits"]
    share = y.double().mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log())
    assert within(names, 3.0)
    assert 0.02 < share < 0.15
    assert F.cross_entropy(logits, y) < 0.75 * constant
    assert (logits.argmax(1)[y == 1] == 1).double().mean() > 0.25


def test_images(run):
    names = run("images")
    assert within(names, 8.0)
    assert names["accuracy"] > 0.7  # a constant has 0.33


@pytest.mark.slow
def test_image_folder(run, tmp_path):
    """Lying and standing are told apart, those too that a phone has saved on their side."""
    run("image_folder")
    record = json.loads((tmp_path / "run" / "privacy_accounting.json").read_text())
    assert within(record, 8.0)
    found = [
        json.loads(line)
        for line in (tmp_path / "classes.jsonl").read_text().splitlines()
    ]
    assert len(found) == 60
    right = {
        each["image"]: Path(each["image"]).parent.name == each["label"]
        for each in found
    }
    assert sum(right.values()) > 0.9 * len(right)  # a constant has 0.5
    assert all(right[image] for image in right if image.endswith(".jpg"))


def test_users(run):
    names = run("users")
    assert within(names, 3.0)
    assert (
        names["plan"].sampler.dataset_size == names["USERS"] < len(names["names"])
    )
    assert names["people"].max_texts == 4
    assert names["people"].dropped > 0
    assert names["accuracy"] > 0.8  # a constant has 0.5


def test_resume(run):
    """Steps 11 to 13 were taken twice, with the same bits; nothing is counted twice."""
    names = run("resume")
    assert names["saved"].state.step == 10
    assert sorted(
        step for step, taken in names["seen"].items() if len(taken) == 2
    ) == [11, 12, 13]
    for step in (11, 12, 13):
        before, again = names["seen"][step]
        assert all(torch.equal(p, again[name]) for name, p in before.items())
    assert names["state"].step == 20
    assert names["state"].ledger.epsilon(1e-5).epsilon <= 3.0


def test_sweep(run):
    names = run("sweep")
    assert within(names, 3.0)
    assert names["together"] == names["ledger"]
    assert names["ledgers"][0].epsilon(1e-5).epsilon < 3.0 / 2
    assert max(names["accuracies"].values()) > 0.8
    assert names["accuracies"][0.01] < max(names["accuracies"].values())


def test_language_model(run, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "lines.txt").write_text(
        "".join(f"my favourite number is {i % 3}\n" for i in range(1000))
    )
    names = run("language_model")
    assert within(names, 8.0)
    assert (
        names["after"] < 0.96 * names["before"]
    )  # what a random model with a frozen head can learn is little
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert all("lora_" in name for name in names["params"])


def test_chat(run, tmp_path):
    """The tiny model learns answers of one word from the topic that is asked about."""
    write_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [
        [("user", f"my favourite number is {i % 3} ?"), ("assistant", f"{i % 3}")]
        for i in range(1000)
    ]
    rows = [
        {"messages": [{"role": role, "content": said} for role, said in each]}
        for each in turns
    ]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    names = run("chat")
    assert within(names, 8.0)
    assert names["after"] < 0.96 * names["before"]
    assert names["shown"].count("[[") == 2
    learnt = [
        sum(label != -100 for label in record["labels"])
        for record in names["dataset"]
    ]
    assert 0 < min(learnt) <= max(learnt) < 20
    assert all("lora_" in name for name in names["params"])


def test_preferences(run, tmp_path):
    """Small numbers are chosen, large ones rejected; before training each margin is 0."""
    write_model(tmp_path / "model")
    rows = [
        {
            "prompt": "my favourite number is",
            "chosen": f"{i % 5}",
            "rejected": f"{5 + i % 4}",
        }
        for i in range(500)
    ]
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    names = run("preferences")
    assert within(names, 8.0)
    assert names["preferred"] > 0.9
    assert names["data"]["reference"].shape == (500, 2)
    assert all("lora_" in name for name in names["params"])


def test_two_modules(run):
    """Two numbers explain most of eight; the criterion has learnt how much is left."""
    names = run("two_modules")
    assert within(names, 8.0)
    assert {name.partition(".")[0] for name in names["params"]} == {
        "encoder",
        "decoder",
        "likelihood",
    }
    trained, x = names["trained"], names["x"]
    with torch.no_grad():
        found = trained["decoder"](trained["encoder"](x)[:, :2])
    assert (found - x).square().mean() < 0.2 * x.var()
    assert 0 < trained["likelihood"].log_std.exp() < 0.6
    assert all(
        not torch.equal(trained[name].weight, names["modules"][name].weight)
        for name in ("encoder", "decoder")
    )


def test_federated(run):
    """Each phase costs more than the one before; what is counted is one ledger of all rounds."""
    names = run("federated")
    assert names["ledger"].num_steps == 15
    assert names["costs"] == sorted(set(names["costs"]))
    assert names["costs"][-1] == names["ledger"].epsilon(1e-4).epsilon < 4.0
    logits = torch.func.functional_call(
        names["model"], names["params"], (names["x"],)
    )
    assert (
        logits.argmax(-1) == names["y"]
    ).float().mean() > 0.85  # a constant has 0.5


def test_opacus_moved(run):
    names = run("opacus_moved")
    x, y = names["dataset"].tensors
    assert within(names, 3.0)
    for logits in (names["theirs"](x), names["forward"](names["params"], x)):
        assert (logits.argmax(1) == y).double().mean() > 0.8  # a constant has 0.5
    assert (
        names["plan"].noise_multiplier <= names["optimizer"].noise_multiplier * 1.01
    )


def test_aux_metrics(run):
    names = run("aux_metrics")
    assert within(names, 3.0)
    assert all(drawn == seen for drawn, seen in names["sizes"])
    assert (
        sum(names["curve"][-5:]) / 5 > 0.85 > 0.6 > names["curve"][0]
    )  # zeros in the head: class 0 for all
    assert "correct" not in repr(names["unreleased"])


def test_released_loss(run):
    names = run("released_loss")
    assert names["trained"] <= 2.5 < names["epsilon"] <= 3.0
    assert (
        abs(float(names["released"].mean) - names["truth"])
        < 6 * names["released"].std
    )
    assert names["released"].std == pytest.approx(8.0 * 2.0 / 4000)


@pytest.mark.slow
def test_two_processes(tmp_path):
    works(FOLDER / "two_processes.py", cwd=tmp_path)
    first, second = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    assert first["weights"] == second["weights"]
    assert first["epsilon"] == second["epsilon"] <= 3.0
    assert (
        abs(first["rows"] - second["rows"]) <= 20
    )  # shares of each of 20 draws differ by one record at most
    assert first["accuracy"] > 0.75  # a constant has 0.5
