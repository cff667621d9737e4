"""Launchers, precision, sharding: every row of the table in docs/guides/trainer.md, as a user would write it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType
from launcher import PATHS
from text_job import write_job
from trainer_cases import again, classifier, labelled, same, trained, training_arguments
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import dpfunc
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.hf.trainer import _recipes as recipes
from dpfunc.hf.trainer import _settings as settings
from dpfunc.hf.trainer._settings import ACCELERATOR, SCRIPT, SETTINGS, SHARDED, attributes, changed, refuse_outside
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.train._config_file import read_yaml
from dpfunc.train.config import job_from_dict
from dpfunc.train.run import check_job

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainer.md"
KEY = dpfunc.rng.insecure_key(5207)
PRIVACY = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_engine="auto")
# Constructing these arguments asks for packages or devices that are not here: they are written into finished ones.
WRITTEN = {"deepspeed", "parallelism_config", "_n_gpu", "distributed_state"}


def table():
    """The rows of the guide: setting -> what happens."""
    section = GUIDE.read_text().split("## Launchers, precision, sharding")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return dict(rows[1:])


def arguments(folder, values):
    made = training_arguments(folder, max_steps=2, **{n: v for n, v in values.items() if n not in WRITTEN})
    return changed(made, {name: value for name, value in values.items() if name in WRITTEN})


def trainer_of(made, model):
    return DPTrainer(model, made, privacy=PRIVACY, key=KEY, train_dataset=labelled())


def run(folder, values):
    """Two private steps; returns what was trained."""
    trainer = trainer_of(arguments(folder, values), classifier())
    again(KEY)
    trainer.train()
    return trained(trainer.model)


def sharded_on_load():
    model = classifier()
    model._tp_size = 2  # as from_pretrained leaves it
    return model


def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = torch.nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
    finally:
        dist.destroy_process_group()
    return model


# Setting in the guide that is no code -> arguments, or environment in capitals, that say the same here.
CASES = {
    "`python train.py` with two CUDA devices": {"_n_gpu": 2},
    "devices other than CPUs and CUDA": {
        "distributed_state": SimpleNamespace(distributed_type=DistributedType.MULTI_XPU)
    },
    "`accelerate launch --cpu --num_processes 2 train.py`": {
        "MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"
    },
}  # fmt: skip
CODE = re.compile(r"`(?:TrainingArguments\((.*)\)|(accelerator_config=.*))`")
MODELS = {"`from_pretrained(..., tp_size=2)`": sharded_on_load, "a model whose parameters are DTensors": dtensors}
LAUNCHED = {
    "`torchrun --nproc-per-node 2 train.py`": "tests/distributed/test_launch.py",
    "`accelerate launch --num_processes 1 train.py`": "test_accelerate_launch_with_one_process",
    "`TrainingArguments(fsdp=True)`": "test_fsdp.py",
    '`TrainingArguments(fsdp="full_shard auto_wrap")`': "test_fsdp.py",
    "`ACCELERATE_USE_FSDP=true`": "test_fsdp.py",
}


def case(setting):
    """Arguments and environment of a row of the guide."""
    variable, code = re.fullmatch(r"`([A-Z_]+)=(\S+)`", setting), CODE.fullmatch(setting)
    values = {variable[1]: variable[2]} if variable else CASES.get(setting, {})
    if code:
        values = eval(f"dict({code[1] or code[2]})", {"ParallelismConfig": ParallelismConfig})
    return {n: v for n, v in values.items() if not n.isupper()}, {n: v for n, v in values.items() if n.isupper()}


def outcomes(*kinds):
    return [setting for setting, outcome in table().items() if outcome.startswith(kinds)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return run(folder / "float32", {}), run(folder / "bf16", {"bf16": True})


def test_every_row_of_the_guide_is_tried():
    rows = table()
    assert {outcome.split()[0].strip(":.,") for outcome in rows.values()} == {"works", "refused"}
    read = {setting for setting in rows if any(case(setting))}
    assert rows.keys() == MODELS.keys() | LAUNCHED.keys() | read
    assert CASES.keys() <= rows.keys()


# Besides the guide's table: argument -> a value that breaks privacy.
REFUSED = [
    ("train_sampling_strategy", "batch_rebalance"), ("train_sampling_strategy", "sequential"),
    ("train_sampling_strategy", "group_by_length"),
    ("group_by_length", True), ("dataloader_drop_last", True), ("auto_find_batch_size", True),
    ("label_smoothing_factor", 0.1), ("neftune_noise_alpha", 5.0), ("packing", True), ("padding_free", True),
    ("use_liger_kernel", True), ("max_grad_norm", 0.5), ("optim", "galore_adamw_layerwise"), ("optim", "lomo"),
    ("activation_checkpointing_kwargs", {"use_reentrant": True}),
    ("gradient_checkpointing_kwargs", {"use_reentrant": True}), ("include_num_input_tokens_seen", "all"),
    ("mixed_precision", "fp16"), ("skip_memory_metrics", False), ("length_column_name", "size"),
]  # fmt: skip
SIZES = [
    ("per_device_train_batch_size", 0, "integer per_device_train_batch_size >= 1"),
    ("gradient_accumulation_steps", 1.5, "integer gradient_accumulation_steps >= 1"),
    ("num_train_epochs", float("nan"), "0 < num_train_epochs < inf"),
]


def test_arguments_that_break_privacy_are_refused(tmp_path):
    """And sizes are named as the user names them."""
    model, args = classifier(), training_arguments(tmp_path)
    for name, value, message in [
        (n, v, f"Expected {SCRIPT}, got {n}={re.escape(repr(v))}. ...") for n, v in REFUSED
    ] + SIZES:
        with pytest.raises(InvalidArgument, match=message):
            trainer_of(changed(args, {name: value}), model)


SGD = {"optim": "sgd"}
UNREAD = [  # arguments, optimizer of the script, the one that has no effect
    ({"optim_target_modules": ["q_lin"]}, None, "optim_target_modules=['q_lin']"),
    ({"optim_args": "momentum=0.9"}, None, "optim_args='momentum=0.9'"),
    ({**SGD, "optim_args": "momentum=0.9, nesterow=true"}, None, "optim_args='nesterow=true'"),
    ({**SGD, "adam_beta1": 0.5}, None, "adam_beta1=0.5"), ({**SGD, "adam_epsilon": 0.1}, None, "adam_epsilon=0.1"),
({"adam_beta2": 0.9}, torch.optim.SGD, "adam_beta2=0.9"),
    ({**SGD, "optim_args": "momentum=0.9,nesterov=true"}, None, None), ({"optim": "adagrad", "optim_args": "eps=1e-10"}, None, None),
    ({"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 0.1}, None, None), ({"optim": "adamw_torch"}, None, None),
    ({"optim": "galore_adamw", "optim_args": "rank=2", "optim_target_modules": ["q_lin"]}, None, None),  # not installed
]  # fmt: skip


@pytest.mark.parametrize(("values", "own", "unread"), UNREAD, ids=[str(case[0]) for case in UNREAD])
def test_a_setting_of_another_optimizer_is_refused(tmp_path, values, own, unread):
    """It had no effect; so had any beside an optimizer of the script's own."""
    model = classifier()
    optimizers = (None if own is None else own(model.parameters(), lr=0.1), None)
    free = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    args = changed(training_arguments(tmp_path), {**free, **values})
    expected = (
        nullcontext()
        if unread is None
        else pytest.raises(InvalidArgument, match=rf"the run reads, got {re.escape(unread)}\.")
    )
    with expected:
        DPTrainer(model, args, privacy=PRIVACY, train_dataset=labelled(), optimizers=optimizers)


def test_epochs_are_steps_by_the_exact_rule(tmp_path):
    """0.07 * 100 is 7.000000000000001 in float64: that was one step more."""
    privacy = dataclasses.replace(PRIVACY, dp_dataset_size=1200, dp_delta=1e-4)
    args = training_arguments(tmp_path, num_train_epochs=0.07)
    assert DPTrainer(classifier(), args, privacy=privacy, train_dataset=labelled()).plan.num_steps == 7


@dataclasses.dataclass
class OfTrl(TrainingArguments):
    """Fields as `SFTConfig` of TRL has them, and another default of one that the Trainer knows."""

    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    max_length: int | None = 1024
    dataset_kwargs: dict[str, object] = dataclasses.field(default_factory=dict)
    logging_steps: float = 10


UNKNOWN = [
    (OfTrl, {"assistant_only_loss": True}), (OfTrl, {"completion_only_loss": True}), (OfTrl, {"max_length": 512}),
    (OfTrl, {"dataset_kwargs": {"skip": True}}), (Seq2SeqTrainingArguments, {"predict_with_generate": True}),
    (Seq2SeqTrainingArguments, {"sortish_sampler": True}), (Seq2SeqTrainingArguments, {"generation_max_length": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), UNKNOWN, ids=[next(iter(values)) for _, values in UNKNOWN])
def test_a_setting_that_the_trainer_does_not_read_is_refused_by_name(tmp_path, kind, values):
    """In a private run and in its twin; without it the arguments are as good as any."""
    for privacy in (PRIVACY, PrivacyArguments(dp_enabled=False)):
        options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 2}
        DPTrainer(classifier(), kind(**options), privacy=privacy, train_dataset=labelled())
        with pytest.raises(InvalidArgument, match=f"got {next(iter(values))}=.* has and TrainingArguments has not"):
            DPTrainer(classifier(), kind(**options, **values), privacy=privacy, train_dataset=labelled())


def test_each_row_of_the_table_is_tried():
    """Of scripts and launchers, by its name in the guide or above."""
    tried = f"{REFUSED} {CASES} {[*table()]} _n_gpu torch_compile_backend torch_compile_mode"
    rows = (*SETTINGS[SCRIPT], *settings._INSTEAD, *SETTINGS[settings.LAUNCHER])
    assert [name for name in rows if name.split(".")[-1] not in tried] == ["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"]


@dataclasses.dataclass
class OfALaterVersion(TrainingArguments):
    """As `TrainingArguments` of a version with a field that nobody here knows."""

    mixes_records: float = 0.0


def test_a_field_that_is_not_on_the_list_must_have_its_default(tmp_path, monkeypatch):
    """Whatever it does: each such field of today's `TrainingArguments`, and one of tomorrow's."""
    args = training_arguments(tmp_path)
    settings.refuse_fields(args, private=True)
    others = {each.name for each in dataclasses.fields(args)} - settings.FOLLOWED
    assert len(others) > 20
    for name in others:
        other = changed(args, {name: False if getattr(args, name) is True else "another"})
        with pytest.raises(InvalidArgument, match=f"got {name}="):
            settings.refuse_fields(other, private=True)
        settings.refuse_fields(other, private=False)
    monkeypatch.setattr(settings, "TrainingArguments", OfALaterVersion)
    later = OfALaterVersion(str(tmp_path), use_cpu=True, report_to="none")
    settings.refuse_fields(later, private=True)
    with pytest.raises(InvalidArgument, match="got mixes_records=0.5. A private run does not follow it"):
        settings.refuse_fields(changed(later, {"mixes_records": 0.5}), private=True)


@pytest.mark.parametrize("setting", [setting for setting in outcomes("works") if setting not in LAUNCHED])
def test_what_works_gives_the_run_that_it_names(tmp_path, monkeypatch, plain, setting):
    values, environment = case(setting)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    narrow = "bf16" in setting
    assert same(run(tmp_path, values), plain[narrow])
    assert not same(*plain)


@pytest.mark.parametrize("setting", outcomes("refused"))
def test_what_is_refused_is_named_before_anything_is_spent(tmp_path, monkeypatch, setting):
    values, environment = case(setting)
    made = arguments(tmp_path / "run", values)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "ACCELERATE_USE_DEEPSPEED" not in environment:  # these arguments would ask for it to be installed
        made = arguments(tmp_path / "run", values)
    with pytest.raises(DPFuncError) as caught:
        trainer_of(made, MODELS[setting]() if setting in MODELS else classifier())
    message = str(caught.value)
    known = {**environment, **values, **dict.fromkeys(["tp_size"] if "tp_size" in setting else [])}
    named = [name.strip("_").split("_state")[0] for name in known] or ["weight"]
    assert any(name in message for name in named) or "`accelerate launch`" in message, message
    assert re.search(r"Use |use |Leave|Give|Unset|Start", message)
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_the_same_environment(tmp_path, monkeypatch):
    """Also in a dry run, and before a table is read. The twin without privacy is the Trainer's own."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = read_yaml(Path("job.yaml"))
    twin = job_from_dict({**values, "privacy": {**values["privacy"], "dp_enabled": False}})
    for setting in (setting for setting, outcome in table().items() if "refuse" in outcome):
        for name, value in case(setting)[1].items() if setting.startswith("`ACCELERATE") else ():
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(InvalidArgument, match=name):
                    check_job(job_from_dict(values), False, None)
                check_job(twin, False, None)
    for value in ("TRUE", "1", "yes", "on", "anything"):  # a switch is off only if it says so
        with pytest.raises(InvalidArgument, match="ACCELERATE_USE_FSDP"):
            settings.refuse_environment({"ACCELERATE_USE_FSDP": value})
        settings.refuse_environment({"ACCELERATE_USE_FSDP": value}, fsdp=True)  # `fsdp.sharding_of` looks at it
    settings.refuse_environment({"ACCELERATE_USE_FSDP": "False", "ACCELERATE_DYNAMO_BACKEND": "NO"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"distributed_type": DistributedType.FSDP}, "distributed_type"),
        ({"distributed_type": DistributedType.MULTI_HPU}, "distributed_type"),
        ({"state.fsdp_plugin": object()}, "state.fsdp_plugin"),
        ({"state.deepspeed_plugin": object()}, "state.deepspeed_plugin"),
        ({"state.dynamo_plugin.backend": "INDUCTOR"}, "state.dynamo_plugin.backend='INDUCTOR'"),
    ],
)
def test_the_accelerator_itself_is_checked(change, named):
    """However it was configured: a state that was there before, a subclass of the Trainer."""
    known = {
        "mixed_precision": "bf16", "distributed_type": DistributedType.MULTI_CPU,
        "state.dynamo_plugin.backend": "NO", **change,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=re.escape(named)):
        refuse_outside(ACCELERATOR, known.get)
    refuse_outside(ACCELERATOR, attributes(Accelerator(cpu=True)))


def test_a_subclass_that_makes_another_accelerator_is_refused(tmp_path):
    class Compiled(DPTrainer):
        def _build_accelerator_args(self, **kwargs):
            return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "fp16"}

    with pytest.raises(InvalidArgument, match="mixed_precision='fp16'"):
        Compiled(classifier(), training_arguments(tmp_path), privacy=PRIVACY, train_dataset=labelled())


TRAIN = """
from pathlib import Path
import torch
from test_settings import run
torch.save(run(Path("run"), {}), "trained.pt")
"""


@pytest.mark.slow
def test_accelerate_launch_with_one_process(tmp_path, plain):
    """The launcher itself, with the variables that this version of it sets."""
    (tmp_path / "train.py").write_text(TRAIN)
    paths = os.pathsep.join([str(Path(__file__).parent), PATHS])
    words = ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_cpu_threads_per_process", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "trained.pt")
    for name, value in plain[0].items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("logger", "values", "allowed"),
    [
        ("wandb", {}, True), ("wandb", {"WANDB_LOG_MODEL": "end"}, True),
        ("wandb", {"WANDB_LOG_MODEL": "checkpoint"}, False), ("wandb", {"WANDB_LOG_MODEL": "Checkpoint"}, False),
        ("tensorboard", {"WANDB_LOG_MODEL": "checkpoint"}, True),
        ("mlflow", {"HF_MLFLOW_LOG_ARTIFACTS": "1"}, False), ("dagshub", {"HF_MLFLOW_LOG_ARTIFACTS": "true"}, False),
        ("dagshub", {"HF_DAGSHUB_LOG_ARTIFACTS": "TRUE"}, False), ("dagshub", {}, True), ("flyte", {}, False),
        ("comet_ml", {"COMET_LOG_ASSETS": "TRUE"}, False), ("comet_ml", {}, True), ("clearml", {}, False), ("clearml", {"CLEARML_LOG_MODEL": "False"}, True),
        ("dvclive", {"HF_DVCLIVE_LOG_MODEL": "all"}, False), ("dvclive", {"HF_DVCLIVE_LOG_MODEL": "true"}, True),
        ("swanlab", {}, True), ("swanlab", {"SWANLAB_LOG_MODEL": "checkpoint"}, False),
    ],
)  # fmt: skip
def test_loggers_that_send_checkpoints(tmp_path, monkeypatch, logger, values, allowed):
    """They would send the key of the run. The Trainer looks at what is uploaded."""
    args = changed(training_arguments(tmp_path, save_strategy="steps"), {"report_to": [logger]})
    if allowed:
        settings.refuse_uploads(args, values)
        return
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    said = "holds the key of the run.* Set .*=false in the environment" if logger != "flyte" else "Take another logger"
    with pytest.raises(InvalidArgument, match=said):
        trainer_of(args, classifier())
    for other in ({"save_only_model": True}, {"save_strategy": "no"}):
        settings.refuse_uploads(changed(args, other), values)
    pushed = changed(training_arguments(tmp_path), {"push_to_hub": True, "hub_strategy": "checkpoint"})
    with pytest.raises(InvalidArgument, match="hub_strategy='checkpoint'.*holds the key"):
        trainer_of(pushed, classifier())


@pytest.mark.parametrize("name", ["wandb", "neptune", "dvclive"])
@pytest.mark.parametrize("late", [False, True])
def test_a_logger_among_the_callbacks_sends_no_checkpoint(tmp_path, monkeypatch, name, late):
    """As those of `report_to`, whoever has made it, and whenever the Trainer has got it."""
    if late:
        monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")

    class Mine(INTEGRATION_TO_CALLBACK[name]):
        _log_checkpoints, _volatile_checkpoints_dir, _run, _stop_run_if_exists = "last", None, None, lambda self: None

        def __init__(self):
            """No package of a logger is here."""
            self._log_model = {"wandb": "checkpoint", "dvclive": "all"}.get(name)

    given = {} if late else {"callbacks": [Mine()]}
    args = training_arguments(tmp_path, save_strategy="steps", max_steps=2)
    trainer = DPTrainer(classifier(), args, privacy=PRIVACY, train_dataset=labelled(), **given)
    if late:
        trainer.add_callback(Mine())
    for act in (trainer.rehearse, trainer.train):
        with pytest.raises(InvalidArgument, match="callback Mine.*holds the key of the run"):
            act()
    assert trainer.ledger.num_steps == 0
    settings.refuse_uploads(changed(args, {"save_only_model": True}), {}, [Mine()])


def missing(names, owner):
    """Those names, with dots, that an object does not have; what is None has any."""
    found = []
    for name in names:
        at = owner
        for part in name.split("."):
            if at is not None and not hasattr(at, part):
                found.append(name)
            at = getattr(at, part, None)
    return found


def test_names_of_settings_are_those_of_transformers(tmp_path):
    """A name that nobody has would switch its check off. Older versions, and TRL, have the first ones."""
    arguments = training_arguments(tmp_path)
    assert missing(SETTINGS[SCRIPT], arguments) == []
    assert missing(settings._INSTEAD, arguments) == ["group_by_length", "packing", "padding_free"]
    assert missing(settings.FOLLOWED, arguments) == ["logging_dir"]
    assert missing(recipes._DECIDED, arguments) == []
    beside = ["dp_engine", "dp_views", "dp_average", "optimizers"]  # of PrivacyArguments, the last of the Trainer
    assert missing(SETTINGS[SHARDED], arguments) == beside
    asked_for = ["state.fsdp_plugin", "state.megatron_lm_plugin"]  # are there only then
    assert missing(SETTINGS[ACCELERATOR], Accelerator(cpu=True)) == asked_for
    assert missing(settings._OVERRIDES, DPTrainer) == []
