"""The guides that are scripts: each block and each command runs, in its order, and what it prints is what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import warnings

import pages
import pytest
import torch
from certified import plan_of, trained
from chat_jobs import PLAIN, chats, tokenizer
from jobs import document
from pages import ROOT, text_of
from search_cases import left
from text_job import run
from text_job import write_model as write_encoder
from tiny_models import NAME, write_model
from trainer_cases import classifier, labelled, training_arguments
from transformers import AutoTokenizer
from workers import run as on_processes

import dpfunc
from benchmarks import adapters
from benchmarks.results import rows_of
from dpfunc import sampling
from dpfunc.budget import Budget
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.cli._train import tune
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.rng import insecure_key

PEER = ROOT / ".cache" / "dp_accounting"
execute = pages.run


def blocks(page, language="python"):
    return pages.blocks(f"guides/{page}", language)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_budget(here):
    page = text_of("guides/budget.md").replace("\\\n", "")  # lines that go on
    create, *others = re.findall(r"(?m)^dpfunc (.*?)(?: +#.*)?$", page)
    assert run(*shlex.split(create)).exit_code == 0
    names = execute(*blocks("budget.md"))
    account = Budget("patients.db").account()
    assert account.entries["first model"].charged == names["state"].ledger == names["plan"].ledger()
    assert 2.9 < account.ledger().epsilon(1e-6).epsilon <= 3.0
    assert len(others) == 2
    for command in others:  # to settle once more changes nothing
        result = run(*shlex.split(command))
        assert result.exit_code == 0, result.output
    assert Budget("patients.db").account().number == 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    plan = plan_of(sampling.Poisson(1000, 0.1), adjacency="add_remove", delta=1e-5, noise_multiplier=0.8)
    trained(folder / "run", plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        execute(blocks("certificate.md")[0])
    return folder / "run" / "certificate.json"


def test_certificate_of_all_that_was_spent(certificate, monkeypatch):
    monkeypatch.chdir(certificate.parents[1])
    execute("\n".join(blocks("certificate.md")[:2]))
    steps = json.loads((certificate.parents[1] / "all" / "certificate.json").read_bytes())["steps"]
    assert [row["last"] - row["first"] + 1 for row in steps] == [5, 1]


def test_certificate_an_outsider_finds_the_same(certificate, capsys):
    """With Opacus alone."""
    outside, values = blocks("certificate.md")[-1], json.loads(certificate.read_text())
    assert len([line for line in outside.splitlines() if line]) <= 40
    assert "import dpfunc" not in outside
    opened = "json.load(open(sys.argv[1]))"
    assert outside.count(opened) == 1
    execute(outside.replace(opened, "content"), content=json.loads(certificate.read_text()))
    told = re.match(r"claimed ([\d.]+); Opacus, by Renyi: ([\d.]+)", capsys.readouterr().out)
    claimed, found = map(float, told.groups())
    assert found == pytest.approx(values["result"]["accountants"][1]["epsilon"], abs=1e-4)
    assert values["claim"]["epsilon"] == pytest.approx(claimed, abs=1e-4)
    assert claimed <= found


@pytest.mark.slow
@pytest.mark.skipif(not (PEER / "dp_accounting").is_dir(), reason="needs `make downloads`")
def test_certificate_the_losses_of_another_library_say_the_same(certificate):
    environment = {**os.environ, "PYTHONPATH": str(PEER)}
    command = [sys.executable, "-c", blocks("certificate.md")[-1], certificate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    by_losses = float(re.search(r"by privacy loss distributions: ([\d.]+)", done.stdout).group(1))
    assert by_losses == pytest.approx(json.loads(certificate.read_text())["claim"]["epsilon"], rel=1e-3)


def test_certificate_commands(here):
    """In order, in a folder with a run."""
    (here / "runs").mkdir()
    for name in ("mails", "best", "first", "second"):
        trained(here / "runs" / name)
    commands = [line for block in blocks("certificate.md", "bash") for line in block.splitlines()]
    left(here / "run")
    assert len(commands) == 10
    for command in commands:
        if command.startswith("dpfunc tune"):  # left above
            continue
        words = command.replace("--check certificate.json", "--check runs/mails/certificate.json").split()
        if words[0] == "dpfunc":
            assert run(*words[1:]).exit_code == 0, command
        else:
            subprocess.run(words, check=True)


def test_distributed(capsys):
    """In one process and in two."""
    (code,) = blocks("distributed.md")
    alone, ledger = document(code)
    assert "epsilon=2.99" in capsys.readouterr().out
    first, second = on_processes(2, "jobs:document", code)
    assert first[1] == second[1] == ledger
    for name, value in alone.items():
        assert torch.equal(first[0][name], second[0][name])
        assert first[0][name].shape == value.shape


def test_loop(here, capsys):
    train, rehearsal, resume, rates, stream, people, several, publish = blocks("loop.md")
    names = execute(train)
    assert "epsilon=2.9" in capsys.readouterr().out
    assert execute(rehearsal, **names)["warnings"] == ()
    assert names["state"].step == 20
    assert dict(names["trained"].named_parameters()).keys() == names["params"].keys()
    newest = sorted(path for path in (here / "run").iterdir() if path.is_dir())[-1]
    for path in newest.iterdir():  # as after a crash between the checkpoints of step 15 and 20
        path.unlink()
    newest.rmdir()
    before, spent = dict(names["params"]), names["state"].ledger
    names = execute(resume, **names)
    assert names["saved"].state.step == 15
    execute(f"from pathlib import Path\n{publish}", **names)
    assert '"one patient"' in (here / "privacy_accounting.json").read_text()
    assert names["state"].ledger == spent == journal_ledger(here / "run" / "journal.jsonl")
    assert all(torch.equal(p, before[name]) for name, p in names["params"].items())
    released = execute(rates, **names)
    assert released["table"].ledger.num_steps == 2
    assert abs(float(released["recall"].share[0, 0]) - 0.5) < 0.05
    assert abs(float(released["area"]) - 0.4) < 0.15  # of scores that say nothing: (.9^2 - .1^2) / 2
    names = execute(stream, **names)
    assert names["state"].step == 20
    assert [event.num_steps for event in names["state"].ledger.events] == [2]
    assert names["state"].ledger.epsilon(1e-5).epsilon <= 3.0
    before = names["model"][0].weight.clone()
    names = execute(people, **names)
    assert names["state"].step == 10
    assert torch.equal(names["model"][0].weight, before)
    assert not torch.equal(names["model_of_people"][0].weight, before)
    execute(several, **names)
    assert "torch.Size([60])" in capsys.readouterr().out


def test_peft(here, capsys):
    """The own loop, saving, several adapters, prefix tuning, checkpointing; with a tiny model."""
    write_model(here / "model")
    write_encoder(here / "encoder", "bert")
    code = "\n".join(blocks("peft.md")).replace(NAME, str(here / "model"))
    encoder = re.search(r'^ENCODER = "(.*)"$', code, re.MULTILINE)[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable. is deprecated")  # PEFT calls it
        names = execute(code.replace(encoder, str(here / "encoder")))
    assert names["state"].step == 30
    saved = sorted(path.name for path in (here / "adapter").iterdir())
    assert saved == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert float(names["plan"].epsilon) == 8.0
    assert len(names["ffa"]) == len(names["params"]) / 2
    assert adapters.tables(rows_of(adapters.RESULT))["adapters"] in text_of("guides/peft.md")
    assert "causal_lm" in capsys.readouterr().out
    assert 2.9 < names["spent"].epsilon(1e-4).epsilon <= 3.0


def test_peft_the_loop_of_a_classifier(here, capsys):
    """In a folder of its own, without the other blocks; what it saves opens, and adapters beside a head are trained."""
    write_encoder(here / "encoder", "bert")
    (code,) = (block for block in blocks("peft.md") if "def private_head" in block)
    names = execute(re.sub(r'^ENCODER = ".*"$', 'ENCODER = "encoder"', code, flags=re.MULTILINE))
    assert re.search(r"tensor\(\d\.\d*\) .*epsilon=2\.9", capsys.readouterr().out)
    names["classifier"].save_pretrained("classifier")
    inputs = {name: names["rows"][name][:4] for name in ("input_ids", "attention_mask")}
    again = names["load_mean_pooled"]("classifier")
    torch.testing.assert_close(again(**inputs).logits, names["classifier"](**inputs).logits)
    labels = torch.arange(400) % 2
    trained, ledger = names["private_lora"]("encoder", names["rows"], labels, 2, epsilon=8.0, delta=1e-3)
    assert ledger.num_steps == 40
    assert 7.9 < ledger.epsilon(1e-3).epsilon <= 8.0
    assert trained(**inputs).logits.shape == (4, 2)
    zero = ("lora_B", "modules_to_save")  # where they begin
    begun = {name: value for name, value in trained.named_parameters() if any(mark in name for mark in zero)}
    assert len(begun) == 3
    assert all(value.any() for value in begun.values())


@pytest.mark.slow
def test_sharded(tmp_path):
    """In two processes and with a tiny model."""
    write_model(tmp_path / "model")
    code = "\n".join(blocks("sharded.md"))
    assert NAME in code
    code = code.replace(NAME, str(tmp_path / "model")).replace("num_steps=4", "num_steps=2")
    first, second = on_processes(2, "fsdp_jobs:guide", code, tmp_path)
    for step, held, trained_there in (first, second):
        assert step == 2
        for name, value in trained_there.items():
            assert torch.equal(value, first[2][name])
            assert held[name][0] == tuple(value.shape)


def test_tune():
    """Its options are those of the command, and its numbers those of the committed result."""
    guide = text_of("guides/tune.md")
    result = json.loads((ROOT / "benchmarks" / "results" / "tune.json").read_text("utf-8"))
    options = {name for option in tune.params for name in option.opts if name.startswith("--") and "_" not in name}
    assert set(re.findall(r"^\| `(--[a-z-]+)", guide, re.MULTILINE)) == options
    for each in (result["private_search"], result["public_search"], *result["without_search"].values()):
        assert f"| {each['mean']:.3f} ({each['low']:.3f} - {each['high']:.3f}) |" in guide
    for kind in ("private_search", "public_search"):
        assert f"| {', '.join(f'{factor:g}' for factor in result[kind]['chosen'])} |" in guide
    for text in (
        f"{result['n']} private texts", f"{result['test']} to test on", f"noise multiplier {result['noise_in_search']:.2f}",
        f"instead of {result['noise_alone']:.2f}", f"epsilon {result['epsilon_of_one_run_in_search']:.2f}",
        f"at most {result['most_runs_99']} runs",
    ):  # fmt: skip
        assert text in guide, text


LOOPS = blocks("evidence.md")
FAULTY = LOOPS[0].replace("dpfunc.take(data, indices)", "dpfunc.take(data, indices) - data.mean(0)")


def test_evidence(capsys):
    loop, replayed, audited, exposed = LOOPS
    for text, words in ((loop, ["Replay(holds"]), (FAULTY, ["DOES NOT HOLD", "rows of other records"])):
        names = execute(text + replayed)
        told = capsys.readouterr().out
        assert [word for word in words if word not in told] == []
    names = execute(audited, **names)
    assert "claim" in capsys.readouterr().out
    execute(exposed, **names)
    assert "[10.]" in capsys.readouterr().out


def test_evidence_commands(here):
    """On its loop, beside a run of the same plan; a loop with a fault ends in 1."""
    (here / "loop.py").write_text(LOOPS[0])
    trained(here / "run", plan_of(sampling.Poisson(50, 0.2), adjacency="add_remove", noise_multiplier=1.0))
    (commands,) = blocks("evidence.md", "bash")
    for command in commands.splitlines():
        done = run(*command.split()[1:])
        assert done.exit_code == 0, (command, done.output)
    assert (here / "audit.png").stat().st_size > 1000
    evidence = json.loads((here / "run" / "certificate.json").read_text())["evidence"]
    assert [(each["kind"], each["holds"]) for each in evidence] == [("replay", True), ("audit", True)]
    (here / "loop.py").write_text(FAULTY)
    again = run("verify", "loop.py", "--json")
    assert (again.exit_code, json.loads(again.stdout)["holds"]) == (1, False)
    refused = run("verify", "loop.py", "--out", "replay.json")
    assert (refused.exit_code, "exists" in refused.output) == (1, True)


def test_evidence_has_the_table_of_the_benchmark():
    guide = text_of("guides/evidence.md")
    found = json.loads((ROOT / "benchmarks" / "results" / "evidence.json").read_text())
    for part, faults in (("loops", 10), ("jobs", 8), ("runs", 5)):
        counts = [count for name, count in found[part].items() if not name.startswith("none")]
        assert counts == ["20 of 20"] * faults
        assert {count for name, count in found[part].items() if name.startswith("none")} == {"0 of 20"}
    for each in found["calibration"].values():
        shares = [100 * share for share in (each["refuted"], *each["interval"])]
        shown = [f"{share:.2f}" for share in shares]
        assert re.search(rf"{shown[0]} % of {each['audits']} audits.* \[{shown[1]}, {shown[2]}\]", guide)
    for column in range(2):
        figures = [str(both[column]).removesuffix(".0") for both in found["figures"].values()]
        assert ", ".join(figures) in guide


def test_clipping():
    """The bound that adapts is near the quantile that it is to bound; the schedule ends at a quarter."""
    adapts, *others = blocks("clipping.md")
    names = execute(adapts)
    data, params, bound = names["data"], names["params"], names["state"].clip_state["all"]
    per_row = torch.func.vmap(torch.func.grad(lambda p, x, y: names["loss_fn"](p, {"x": x[None], "y": y[None]})[0]),
                              in_dims=(None, 0, 0))  # fmt: skip
    norms = per_row(params, data["x"], data["y"])["w"].flatten(1).norm(dim=1)
    assert 0.35 < float((norms <= bound).double().mean()) < 0.65
    scheduled = execute(adapts + others[0])
    assert scheduled["schedule"].at(59) == 0.25
    assert execute(adapts + others[1])["state"].ledger == names["state"].ledger == scheduled["state"].ledger


def test_noise(capsys):
    """Each run costs its budget; the strategies have less noise in sums; samples in cycles are amplified."""
    names = execute("\n".join(blocks("noise.md")))
    shown = capsys.readouterr().out.splitlines()
    shares = [float(line.split()[1]) for line in shown if "squared error" in line]
    assert len(shares) == 4
    assert max(shares) < 0.6
    (event,) = names["state"].ledger.events
    assert (event.sampling_prob, event.num_steps) == (0.2, 15)
    assert names["state"].ledger == names["plan"].ledger()
    with pytest.raises(InvalidArgument, match="bounds how often a record takes part"):
        names["plan_of"](names["plan"].noise, sampling.Poisson(2000, 0.05))


def test_telemetry(capsys):
    names = execute(blocks("telemetry.md")[0])
    assert len(capsys.readouterr().out.splitlines()) == 21
    errors, state = names["plan"].telemetry_errors(), names["state"]
    assert abs(state.telemetry["accuracy"] - 1 / 3) < 6 * errors["accuracy"] + 0.2
    assert len(state.telemetry["norm"]) == 4


def test_telemetry_a_run_ends_early_by_what_it_releases(tmp_path):
    """Of 40 losses with noise, the odds that each is below all before are 1 to 40!; steps that are not taken cost nothing."""
    names = execute(blocks("telemetry.md")[1])
    privacy = PrivacyArguments(
        dp_noise_multiplier=2.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_telemetry=["loss:4", "accuracy"]
    )
    trainer = DPTrainer(
        classifier(), training_arguments(tmp_path, max_steps=40, logging_steps=1), privacy=privacy,
        train_dataset=labelled(), callbacks=[names["StopAtReleasedLoss"]()],
    )  # fmt: skip
    trainer.train()
    steps = trainer.state.global_step
    assert steps == trainer.ledger.num_steps < 40
    losses = [line["released/loss"] for line in trainer.state.log_history if "released/loss" in line]
    assert losses[steps - 1] >= min(losses[: steps - 1])


def test_chats_of_the_command_are_functions_for_loops():
    (code,) = blocks("train.md")
    names = execute(code, tokenizer=tokenizer(), rows=[{"messages": chat} for chat in chats(3)])
    assert names["batch"]["labels"].shape[0] == 3
    assert ((names["batch"]["labels"] != -100).sum(1) > 0).all()


def test_preferences(here, capsys, monkeypatch):
    keys = (dataclasses.replace(insecure_key(seed), guessable=False) for seed in range(2))
    monkeypatch.setattr(dpfunc, "secure_key", lambda: next(keys))
    write_model(here / "model")
    words = AutoTokenizer.from_pretrained("model")
    words.chat_template = PLAIN
    words.save_pretrained("model")
    names = execute(*blocks("preferences.md"))
    found = names["margins"], capsys.readouterr().out
    assert "epsilon=7.9" in found[1]
    assert ".6931, 0.3133, 1.3133, 0.1269" in found[1]
    assert "0.3269" in found[1]
    margins = names["hf"].preferences.margins(names["adapter"].forward, names["params"], names["data"])
    assert float((margins > 0).float().mean()) > 0.8  # 0 before
    assert found[1].count("[[") == 2
    assert len({tuple(each["chosen"]["input_ids"]) for each in names["records"]}) == 5
    assert all(each["reference"] < [-1.0, -1.0] for each in names["records"])


def test_modules(capsys):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = execute(*blocks("modules.md"))
    assert "['student.weight', 'student.bias', 'scale.weight']" in capsys.readouterr().out
    assert not torch.equal(names["student"].weight, names["modules"]["student"].weight)
    assert names["state"].ledger.num_steps == 6
    assert names["state"].ledger.epsilon(1e-4).epsilon <= 8.0


def test_federated(capsys):
    names = execute(*blocks("federated.md"))
    assert capsys.readouterr().out.startswith("8 ")
    assert names["ledger"] == names["first"].ledger() + names["first"].ledger()
    assert (names["params"]["w"] > 1.0).all()  # 8 rounds of a mean update of length 1, and noise of 0.05


@pytest.mark.slow
def test_rare_classes(monkeypatch):
    keys = (dataclasses.replace(insecure_key(seed), guessable=False) for seed in (2, 3))
    monkeypatch.setattr(dpfunc, "secure_key", lambda: next(keys))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = execute(*blocks("rare_classes.md"))
    rare = names["y"] == 1
    true = float((names["found"][rare] == 1).float().mean())
    assert 0.04 < float(rare.float().mean()) < 0.2
    assert true > 0.5
    assert abs(names["recall"] - true) < 0.5
    assert names["released"].ledger.num_steps == names["plan"].num_steps + 1
