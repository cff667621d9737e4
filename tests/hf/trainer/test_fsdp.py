"""DPTrainer with FSDP2, as scripts and launchers ask for it: the run of one process, of which each holds a part."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import fsdp_trainer_jobs as jobs
import pytest
import torch
from safetensors.torch import load_file
from sharded_cases import close
from torch import nn
from workers import _pool, run

from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.hf.trainer import _fsdp as fsdp
from dpfunc.hf.trainer._fsdp import Sharding, sharding_of
from dpfunc.hf.trainer._settings import FSDP, SETTINGS, SHARDED, refuse_outside

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainer.md"
KINDS = ("full", "adapter")
WEIGHTS = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What two processes found, and the same runs by one process."""
    folder = tmp_path_factory.mktemp("fsdp")
    _pool.stop()  # accelerate keeps what it has found out about a process
    found = run(2, "fsdp_trainer_jobs:main", folder)
    _pool.stop()
    one = {kind: jobs.facts(jobs.trainer_of(kind, folder / "one" / kind), folder / "one" / kind) for kind in KINDS}
    return folder, found, one


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_trainer_gives_what_one_process_gives(launched, kind):
    """Every parameter, or an adapter on a model in bfloat16; texts of different lengths, a process without records."""
    _, found, one = launched
    expected = one[kind]
    start = dict(jobs.MODELS[kind](10).named_parameters())
    assert not any(torch.equal(p, start[name]) for name, p in expected["params"].items())
    if kind == "full":
        assert list(zip(*(each[kind]["draws"] for each in found), strict=True)) == [(1, 0), (2, 1), (1, 0), (0, 0)]
    for each in found:
        ours = each[kind]
        close(ours["params"], expected["params"])  # also: the second process began with another model
        assert (ours["ledger"], ours["epsilon"]) == (expected["ledger"], expected["epsilon"])
        torch.testing.assert_close(torch.tensor(ours["logs"]), torch.tensor(expected["logs"]), rtol=1e-5, atol=1e-5)
        assert ours["eval"] == pytest.approx(expected["eval"], abs=1e-3 if kind == "adapter" else 1e-5)
        assert ours["eval"][0] != ours["eval"][1]  # it sees what the optimizer has written
        assert ours["sharded"]
        assert ours["held"] < 0.6 * expected["held"]


def test_a_resumed_run_is_the_same_bit_for_bit(launched):
    """From the middle, with steps in the journal that are repeated: parameters, and the optimizer's parts."""
    for each in launched[1]:
        params, ledger = each["resumed"]
        assert ledger == each["full"]["ledger"]
        assert all(torch.equal(params[name], value) for name, value in each["full"]["params"].items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_written_whole_by_one_process(launched, kind):
    folder, _, _ = launched
    for place in ("model", f"checkpoint-{jobs.STEPS}"):
        written = load_file(folder / kind / place / WEIGHTS[kind])
        expected = load_file(folder / "one" / kind / place / WEIGHTS[kind])
        close(written, expected)
    assert '"GPT2LMHeadModel"' in (folder / "full" / "model" / "config.json").read_text()
    assert not list((folder / kind).glob("checkpoint-*/optimizer.pt"))  # it would be the part of one process


def test_one_process_goes_on_with_what_two_have_begun(launched):
    """With the optimizer from the parts of both, and no step after the checkpoint; layers compute in bfloat16."""
    folder, _, _ = launched
    trainer = jobs.trainer_of("stopped", folder / "stopped")
    trainer.train(resume_from_checkpoint=True)
    whole = jobs.trainer_of("stopped", folder / "one" / "stopped")
    whole.train()
    assert trainer.state.global_step == jobs.STEPS
    close(*({n: p.detach() for n, p in t.model.named_parameters()} for t in (trainer, whole)), 1e-4)


def test_all_processes_refuse_together(launched):
    _, (first, second), _ = launched
    for each in (first, second):
        refused = each["refused"]
        assert refused["base"][0] == "CheckpointError"
        assert "Load the same pretrained model" in refused["base"][1]
        assert refused["adapters"][0] == "UnsupportedModel"
        assert "belong to no active adapter" in refused["adapters"][1]
        assert refused["settings"][0] == "RankMismatch"
        assert refused["twice"][0] == "UnsupportedModel"
    assert "another process failed" in first["refused"]["values"][1]
    assert "on the meta device" in second["refused"]["values"][1]


def test_what_has_no_effect_is_told_once(launched):
    _, (first, second), _ = launched
    lines = [line for line in first["told"] if "have no use for" in line and "sync_module_states" in line]
    assert len(lines) == 3  # a line for each adapter that is trained: by the process that writes
    assert all(name in lines[0] for name in ("use_orig_params=true", "state_dict_type=SHARDED_STATE_DICT"))
    assert not second["told"]


# What is asked for


def asked(environment=None, fsdp=True, **config):
    return sharding_of(SimpleNamespace(fsdp=fsdp, fsdp_config=config or None), environment or {})


def settings_table():
    section = GUIDE.read_text().split("### Settings of FSDP")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {re.fullmatch(r"`(\w+=[^`]*)`", setting)[1]: outcome for setting, outcome in rows}


NEEDED = {"min_num_params": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}
VARIABLES = {"transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP", "cpu_offload": "OFFLOAD_PARAMS"}


@pytest.mark.parametrize(("setting", "outcome"), settings_table().items())
def test_no_setting_is_ignored_in_silence(setting, outcome):
    """Each row of the guide, as `fsdp_config` and as a variable of the environment."""
    name, value = setting.split("=")
    needed = {"min_num_params": "7"} if value == "SIZE_BASED_WRAP" else NEEDED.get(name, {})
    variables = {f"FSDP_{VARIABLES.get(n, n.upper())}": v for n, v in {"version": "2", **needed, name: value}.items()}
    if name == "transformer_layer_cls_to_wrap":
        variables["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    variables["ACCELERATE_USE_FSDP"] = "true"
    ways = [lambda: asked(**needed, **{name: value}), lambda: asked(variables, fsdp=None)]
    for way in ways:
        if outcome.startswith("refused"):
            with pytest.raises(InvalidArgument, match=f"{name}={value!r}|version=") as caught:
                way()
            assert re.search(r"Leave|Set|Freeze|Load", str(caught.value))
        else:
            named = any(setting in line for line in way().without_effect)
            assert named == outcome.startswith("no effect")
    if outcome.startswith("works") and "default" not in outcome:
        assert asked(**needed, **{name: value}) != asked()


def test_the_guide_has_each_setting_of_the_table():
    assert {setting.split("=")[0] for setting in settings_table()} == SETTINGS[FSDP].keys()


def test_scripts_ask_as_they_do_for_the_trainer(tmp_path):
    from trainer_cases import training_arguments

    for values in ({"fsdp": True}, {"fsdp": "full_shard"}, {"fsdp": "full_shard auto_wrap"}):
        assert sharding_of(training_arguments(tmp_path, **values), {}) == Sharding("TRANSFORMER_BASED_WRAP")
    kept = {"fsdp": "shard_grad_op", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}}
    expected = Sharding("TRANSFORMER_BASED_WRAP", ("GPT2Block",), reshard=False)
    assert sharding_of(training_arguments(tmp_path, **kept), {}) == expected
    with pytest.raises(InvalidArgument, match="cpu_offload=True"):
        sharding_of(training_arguments(tmp_path, fsdp="full_shard offload"), {})
    found = sharding_of(training_arguments(tmp_path), jobs.LAUNCHED)
    assert found.policy == "TRANSFORMER_BASED_WRAP"
    assert found.layers == ("GPT2Block",)
    assert sharding_of(training_arguments(tmp_path), {**jobs.LAUNCHED, "ACCELERATE_USE_FSDP": "false"}) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"environment": {"ACCELERATE_USE_FSDP": "true"}, "fsdp": None}, "version=1"),
        ({"environment": {"ACCELERATE_USE_FSDP": "perhaps"}, "fsdp": None}, "ACCELERATE_USE_FSDP to be true or false"),
        ({"fsdp": None, "version": 2}, "fsdp=True beside fsdp_config"),
        ({"sharding": "all"}, "known, got sharding='all'"),
        ({"environment": {"FSDP_SHARDING": "all"}}, "known, got sharding='all'"),
        ({"auto_wrap_policy": "BY_NAME"}, "auto_wrap_policy"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "min_num_params >= 1"),
        ({"min_num_params": 100}, "min_num_params=100"),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": ["A"]}, "transformer_layer_cls_to_wrap with"),
        ({"reshard_after_forward": "FULL_SHARD"}, "reshard_after_forward='FULL_SHARD'. Set it to true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, named):
    with pytest.raises(InvalidArgument, match=re.escape(named)):
        asked(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 1), ("dp_engine", "vmap"), ("load_best_model_at_end", True), ("bf16_full_eval", True),
        ("accelerator_config.even_batches", False), ("optimizers", (object(), None)),
        ("dp_views", 2), ("dp_average", "last:2"),
    ],
)  # fmt: skip
def test_what_a_sharded_run_cannot_do_is_refused(name, value):
    known = {"world_size": 2, "dp_engine": "auto", "dp_views": 1, "optimizers": (None, None)}
    refuse_outside(SHARDED, known.get)
    with pytest.raises(InvalidArgument, match=re.escape(f"{name}={value!r}")):
        refuse_outside(SHARDED, {**known, name: value}.get)


def test_accelerate_does_not_see_the_launcher(monkeypatch):
    """On CUDA devices it would wrap the model; and other libraries see the variable as it was."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(OSError, match="None"), fsdp.without_fsdp():
        raise OSError(os.environ.get("ACCELERATE_USE_FSDP"))
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_one_process_is_refused_before_its_model_is_touched(tmp_path):
    with pytest.raises(InvalidArgument, match="world_size=1"):
        jobs.trainer_of("full", tmp_path / "run", fsdp=True)
    assert not (tmp_path / "run").exists()


# Parts


def test_a_tied_tensor_is_in_one_part():
    """Of several modules that hold it none is sharded alone: each would train a tensor of its own."""
    model = jobs.writer(0)
    names = fsdp.part_names(model, Sharding("SIZE_BASED_WRAP", min_num_params=500))
    assert "transformer.h.0" in names
    assert not {"lm_head", "transformer.wte", "transformer"} & set(names)
    with pytest.raises(UnsupportedModel, match="one tensor"):
        fsdp.part_names(model, Sharding("TRANSFORMER_BASED_WRAP", layers=("Embedding",)))
    assert fsdp.part_names(model, Sharding("TRANSFORMER_BASED_WRAP")) == ["transformer.h.1", "transformer.h.0"]
    for layers in (("NoBlock",), ("GPT2Block", "NoBlock")):
        with pytest.raises(InvalidArgument, match="NoBlock"):
            fsdp.part_names(model, Sharding("TRANSFORMER_BASED_WRAP", layers=layers))
    with pytest.raises(InvalidArgument, match="_no_split_modules"):
        fsdp.part_names(nn.Linear(2, 2), Sharding("TRANSFORMER_BASED_WRAP"))
    with pytest.raises(CheckpointError, match="a run without"):
        fsdp.check_frozen(fsdp.Division(None, "00"), None)
