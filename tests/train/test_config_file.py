"""Files and flags of a job: flags over the file, and no file that is swallowed, multiplies itself or shows its values."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback

import click
import pytest
import yaml
from text_job import write_job

from dpfunc.errors import InvalidArgument
from dpfunc.train._config_file import FACTORS, parse_flags, parse_grid, read_job, read_yaml, trials
from dpfunc.train.config import SECTIONS, TOP, job_from_dict, job_to_dict

JOB = """
task: causal_lm
output_dir: runs/one
model: {path: tiny}
data: {train: mails.jsonl, max_length: 32}
lora: {rank: 4}
privacy: {dp_epsilon: 8, dp_delta: 1e-5, dp_max_grad_norm: 1.0}
training: {learning_rate: 1e-3, batch_size: 256, epochs: 3}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_a_job_survives_json(config):
    job = read_job(config, ["--lora.targets", "q_proj,v_proj", "--spent", "0,1"])
    values = json.loads(json.dumps(job_to_dict(job)))
    assert values == job_to_dict(job)
    assert values["lora"]["targets"] == ["q_proj", "v_proj"]
    assert job_from_dict(values) == job


def test_flags_override_the_file(config):
    flags = ["--dp-epsilon", "3", "--dp_delta=1e-6", "--training.learning_rate", "0.01", "--batch-size", "64", "--bf16"]
    job = read_job(config, [*flags, "--output_dir", "elsewhere", "--lora.rank=2"])
    assert (job.privacy.dp_epsilon, job.privacy.dp_delta) == (3.0, 1e-6)
    assert (job.training.learning_rate, job.training.batch_size, job.training.bf16) == (0.01, 64, True)
    assert (job.output_dir, job.lora.rank) == ("elsewhere", 2)


def test_a_flag_replaces_its_alternative(config):
    """Also in the words of another library."""
    job = read_job(config, ["--steps", "7", "--noise_multiplier", "1.5"])
    assert (job.training.steps, job.training.epochs) == (7, None)
    assert (job.privacy.dp_noise_multiplier, job.privacy.dp_epsilon) == (1.5, None)
    assert read_job(config, ["--target_epsilon", "2"]).privacy.dp_epsilon == 2.0
    assert read_job(config, ["--disable_dp"]).privacy.dp_enabled is False
    with pytest.raises(InvalidArgument, match="contradict"):
        read_job(config, ["--target_epsilon", "2", "--dp_epsilon", "3"])


def test_a_flag_does_not_replace_what_is_no_section(tmp_path):
    path = tmp_path / "job.yaml"
    for value in (False, 0, "", [], "tiny"):
        path.write_text(JOB.replace("lora: {rank: 4}", f"lora: {json.dumps(value)}"))
        with pytest.raises(InvalidArgument, match="Expected keys under lora, got lora"):
            read_job(path, ["--lora.rank", "2"])
    path.write_text(JOB.replace("lora: {rank: 4}", "lora:"))
    assert read_job(path, ["--lora.rank", "2"]).lora.rank == 2


def test_every_key_is_a_flag():
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            assert parse_flags([f"--{section}.{field.name}", "1"]) == {(section, field.name): "1"}
    for key in TOP:
        assert parse_flags([f"--{key}=x"]) == {("", key): "x"}


BAD_FLAGS = {
    "twice": (["--steps", "1", "--training.steps", "2"], "each flag once"),
    "no value": (["--steps"], "'--steps' requires an argument"),
    "an empty value": (["--output_dir="], "Expected a value after --output_dir, got ''"),
    "a flag as the value": (["--output_dir", "--bf16"], "Expected a value after --output_dir, got '--bf16'"),
    "a loose word": (["--bf16", "true", "tru"], r"unexpected extra argument \(tru\)"),
    "a short flag": (["-s", "3"], "No such option '-s'"),
    "a part of a name": (["--learning", "3"], "No such option '--learning'"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_flags_that_do_not_parse(flags, message):
    with pytest.raises(click.UsageError, match=message):
        parse_flags(flags)


@pytest.mark.parametrize(
    "text",
    ["privacy:\n  dp_epsilon: 8\n  dp_epsilon: 80", "task: a\ntask: b", "data:\n  labels: [{a: 1, a: 2}]"],
    ids=["in a section", "at the top", "in a list"],
)
def test_a_key_twice_is_refused(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"Expected each key once.*line \d"):
        read_job(path)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
TOO_LARGE = {
    "aliases of aliases": LAUGHS + "data: *a39\n",
    "an alias of itself": "data: &a [*a]\n",
    "a mapping in itself": "data: &a {labels: *a}\n",
    "merged keys": "".join(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" if i else "m0: &m0 {a: 1}\n" for i in range(9)),
    "many values": f"data: [{'x, ' * 11_000}]\n",
    "aliases of a long text": f"task: &a {'x' * 200_000}\ndata: [{'*a, ' * 20}]\n",
    "many bytes": f"data: {'x' * 2**21}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_file_that_multiplies_itself_is_refused(tmp_path, name):
    """At once, and with a short message: not after all memory is taken."""
    path = tmp_path / "job.yaml"
    path.write_text(TOO_LARGE[name])
    begun = time.process_time()
    with pytest.raises(InvalidArgument, match="Expected a job of at most") as caught:
        read_job(path)
    assert len(str(caught.value)) < 400
    assert time.process_time() - begun < 20


UNREADABLE = {
    "deep": ("[" * 600, "Expected a YAML file, got .*: its values are nested too deeply"),
    "no day": ("task: 2001-99-99", "Expected a YAML file"),
    "a long number": (f"task: {'7' * 5000}", "Expected a YAML file"),
    "half a pair": ('task: causal_lm\noutput_dir: x\nmodel: {path: "\\uD800"}\ndata: {}\nprivacy: {}\ntraining: {}', "half of a surrogate pair"),
    "a tag": ("task: !!python/object/apply:os.system ['true']", "Expected a YAML file"),
    "broken": ("task: [", "Expected a YAML file"),
    "a list": ("- task", "Expected `key: value` lines"),
    "empty": ("", "Expected `key: value` lines"),
    "a section without keys": ("task: causal_lm\noutput_dir: x\nmodel: tiny\ndata: {}\nprivacy: {}\ntraining: {}",
                               "Expected keys under model, got model='tiny'"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_files_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_job(path)
    assert "\n" not in str(caught.value)


SECRETS = {  # what YAML or a job cannot be, with a password in it
    "no YAML": "task: causal_lm\npassword: hunter2: [\n",
    "an unknown key": "task: causal_lm\npassword: hunter2\n",
    "an unknown key of a section": "task: causal_lm\nmodel: {path: tiny, token: hunter2}\n",
    "a tag": "task: causal_lm\npassword: !hunter2\n",
    "a tag with quotes": "task: causal_lm\npassword: !it's\"hunter2\n",
    "a handle": "task: causal_lm\npassword: !hunter2!x\n",
    "an alias": "task: causal_lm\npassword: *hunter2\n",
    "an escape": 'task: causal_lm\npassword: "hunter2\\q"\n',
    "a tab": "task: causal_lm\npassword:\n\t- hunter2\n",
    "a byte": b"task: causal_lm\npassword: hunter2\xff\n",
    "a control character": "task: causal_lm\npassword: hunter2\x01\n",
    "too many": f"task: causal_lm\npassword: [{'hunter2, ' * 10_000}]\n",
    "a section of text": "task: causal_lm\npassword: {a: hunter2}\nmodel: {path: {b: hunter2}}\n",
}


@pytest.mark.parametrize("name", SECRETS)
def test_errors_show_no_value_of_the_file(tmp_path, name):
    path, text = tmp_path / "job.yaml", SECRETS[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidArgument) as caught:
        read_job(path)
    told = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in told.replace(str(path), "")
    assert "\n" not in str(caught.value)


def test_values_as_people_write_them(tmp_path, config):
    """Numbers that are labels are texts, and 1e-5 is a number, which it is not for PyYAML itself."""
    path = tmp_path / "other.yaml"
    path.write_text(
        JOB.replace("causal_lm", "text_classification").replace(
            "train: mails.jsonl", "train: mails.jsonl, labels: [0, 1]"
        )
    )
    assert (
        read_job(path).data.labels
        == read_job(config, ["--task", "text_classification", "--labels", "0, 1"]).data.labels
        == ("0", "1")
    )
    for text in ("1e-5", "1E-5", "1.0e-5", "1e-05", "0.00001", "+1e-5"):
        path.write_text(JOB.replace("1e-5", text))
        assert read_job(path).privacy.dp_delta == read_job(config, ["--dp-delta", text]).privacy.dp_delta == 1e-5
    assert yaml.safe_load("1e-5") == "1e-5"
    path.write_text("task: &name causal_lm\noutput_dir: *name\n")
    assert read_yaml(path) == {"task": "causal_lm", "output_dir": "causal_lm"}


FLAGS = {  # as text -> place and value
    "true": (["--bf16", "true"], ("training", "bf16", True)),
    "bare": (["--bf16"], ("training", "bf16", True)),
    "no": (["--deduplicate", "no"], ("data", "deduplicate", False)),
    "nothing": (["--physical_batch_size", "null"], ("training", "physical_batch_size", None)),
    "digits are a text": (["--text_column", "7"], ("data", "text_column", "7")),
    "no is a text": (["--text_column", "no"], ("data", "text_column", "no")),
    "null is a text": (["--text_column", "null"], ("data", "text_column", "null")),
    "a list": (["--targets", "q_proj, v_proj"], ("lora", "targets", ("q_proj", "v_proj"))),
    "a list of words": (["--dp_telemetry", "accuracy"], ("privacy", "dp_telemetry", ["accuracy"])),
    "no list": (["--targets", "none"], ("lora", "targets", None)),
    "negative": (["--lora.alpha=3e0"], ("lora", "alpha", 3.0)),
}


def test_flags_have_the_type_of_their_key(config):
    for flags, (section, key, value) in FLAGS.values():
        found = dataclasses.asdict(read_job(config, flags))[section][key]
        assert (found, type(found)) == (value, type(value)), flags


BAD_VALUES_OF_FLAGS = {
    "integer": (["--steps", "ten"], "Expected an integer, got --steps='ten'"),
    "number": (["--dp-delta", "small"], "Expected a finite number, got --dp_delta='small'"),
    "true": (["--bf16", "maybe"], "Expected true or false, got --bf16='maybe'"),
    "one of": (
        ["--dp-clip", "soft"],
        "Expected --dp_clip to be one of 'flat', 'automatic' or 'adaptive', got --dp_clip='soft'",
    ),
    "an empty text in a list": (["--labels", "a,,b"], "Expected text, got data.labels.1=''"),
    "no opposite": (["--disable_dp", "maybe"], "Expected true or false, got --disable_dp='maybe'"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_VALUES_OF_FLAGS.values(), ids=BAD_VALUES_OF_FLAGS)
def test_values_of_flags_that_are_refused(config, flags, message):
    with pytest.raises(InvalidArgument, match=message):
        read_job(config, flags)


WRONG = {
    "unknown key": (["rate=1"], None), "no value": (["steps="], None), "no key": (["steps"], None),
    "a value twice": (["steps=1,1"], None), "a key twice": (["steps=1", "training.steps=2"], None),
    "another section": (["lora.steps=1"], None), "two ways": (["learning_rate=1"], "1,2"),
    "factors in words": ([], "one"), "factor 0": ([], "0,1"), "factors twice": ([], "1,1"), "factor inf": ([], "inf"),
    "too many": (["steps=" + ",".join(map(str, range(1, 500)))], None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_grids_are_refused(name):
    with pytest.raises(InvalidArgument, match="Expected"):
        parse_grid(*WRONG[name])


def test_values_of_the_grid_are_those_of_a_job(tmp_path):
    assert parse_grid([], None) == ({}, FACTORS)
    assert parse_grid(["learning-rate=1e-3, 2e-3"], None)[1] == (1.0,)
    values = read_yaml(write_job(tmp_path))
    for flags, grid, message in (([], "steps=many", "steps"), (["--strategy", "full"], "rank=2", "no section lora")):
        with pytest.raises(InvalidArgument, match=message):
            trials(values, parse_flags(flags), parse_grid([grid], None))
