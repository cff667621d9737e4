"""The folder of a run: whose it is, when it may be used again, and what a kill leaves in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from text_job import ENVIRONMENT, JOURNAL, MODES, at_events, files, interrupt_at, record, run, same, train
from trainer_cases import again

from dpfunc.checkpoint.chain import known_end
from dpfunc.checkpoint.journal import Journal, journal_ledger
from dpfunc.rng import insecure_key, secure_key
from dpfunc.train._config_file import read_job
from dpfunc.train._run_folder import interrupted


@MODES
def test_a_used_folder_is_refused(here, mode):
    before = files(here)
    result = train(*mode, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Expected an empty output_dir, got 'run'" in result.stderr
    assert "--resume" in result.stderr
    assert files(here) == before


@pytest.fixture(scope="module")
def early(folder):
    """A folder that a kill would leave after the first step, and one from before it."""

    def copied(trainer, state):
        shutil.copytree("early", "early-killed")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder[0])
        at_events(patch, on_pre_optimizer_step=copied)
        assert train("--output_dir", "early", "--insecure-seed", 3).exit_code == 1
    return folder[0] / "early-killed"


BEFORE_THE_FIRST_STEP = {  # what is in the folder
    "a lock": [".dpfunc.lock"], "half a job": ["job.json.0a1b.new"], "the job": ["job.json"],
    "the job and logs": ["job.json", "runs"], "a journal without lines": ["job.json", "journal"],
    "half a checkpoint": ["job.json", "journal", "checkpoint-0", "half"],
    "a checkpoint": ["job.json", "journal", "checkpoint-0"],
}  # fmt: skip


def left_in(folder, early, names):
    """A folder with these files of a run that was killed before its first step."""
    folder.mkdir()
    for name in names:
        if name == "journal":
            known_end(folder / "privacy_journal.jsonl")
        elif name == "half":
            (folder / "checkpoint-0" / "trainer_state.json").unlink()
        elif (early / name).is_dir():
            shutil.copytree(early / name, folder / name)
        elif (early / name).is_file():
            shutil.copy(early / name, folder)
        elif "." in name:
            (folder / name).touch()
        else:
            (folder / name).mkdir()


@pytest.mark.parametrize("mode", [[], ["--resume"]], ids=["start", "resume"])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_STEP)
def test_a_run_killed_before_its_first_step_begins_again(here, early, tmp_path, name, mode):
    """Whichever of the two is tried, and with the same result; where there is no job yet, there is nothing to resume."""
    names, flags = BEFORE_THE_FIRST_STEP[name], ["--output_dir", tmp_path / "again", "--insecure-seed", 3, *mode]
    left_in(tmp_path / "again", early, names)
    result = train(*flags, "--dry-run")
    if mode and "job.json" not in names:
        assert "found none. Start it without --resume." in result.stderr
        return
    assert result.exit_code == 0, result.output
    if name == "half a checkpoint" and mode:
        again(insecure_key(3))
        result = train(*flags)
        assert result.exit_code == 0, result.output
        assert journal_ledger(tmp_path / "again" / JOURNAL).num_steps == 4
        assert not (tmp_path / "again" / "checkpoint-0").exists()


NOT_OURS = {  # what is in the folder besides, and what is said
    "a file of the user": (["notes.txt"], "which is not. Name another folder, --output_dir."),
    "a step": (
        ["job.json", "checkpoint-0", "privacy_journal.jsonl", "privacy_journal.jsonl.head"],
        "Go on with the run there: --resume; or name another folder, --output_dir, and count what was spent here: --spent",
    ),
    "a run that lost its journal": (["job.json", "checkpoint-0"], "which is not. Go on"),
    "a step without a checkpoint": (["job.json", "privacy_journal.jsonl", "privacy_journal.jsonl.head"], "--spent"),
    "a journal that lost a line": (["job.json", "privacy_journal.jsonl.head"], "those after it are missing"),
    "a model": (["job.json", "model"], "which is not. Name another folder, --output_dir."),
}


@pytest.mark.parametrize(("names", "said"), NOT_OURS.values(), ids=NOT_OURS)
def test_a_folder_in_which_something_may_have_been_released_is_not_used(here, early, tmp_path, names, said):
    left_in(tmp_path / "used", early, names)
    before = files(tmp_path)
    result = train("--output_dir", tmp_path / "used", "--insecure-seed", 3)
    assert result.exit_code == 1
    assert said in result.stderr
    assert (f"--spent {tmp_path}/used/{JOURNAL}" in result.stderr) == ("--spent" in said)
    assert files(tmp_path) == before


def test_a_run_without_checkpoints_is_counted(here, monkeypatch):
    """The message says how, and the next noise is for what is left."""
    flags = ["--steps", "4", "--save_steps", "50"]
    with monkeypatch.context() as patch:
        at_events(patch, on_step_end=interrupt_at(2))
        assert train(*flags, "--output_dir", "lost").exit_code == 1
    for path in Path("lost").glob("checkpoint-*"):
        shutil.rmtree(path)
    told = train(*flags, "--output_dir", "lost", "--resume")
    assert told.exit_code == 1
    (path,) = re.findall(r"--spent (\S+)", told.stderr)
    assert "The journal counts 2 steps" in told.stderr
    dry = train(*flags, "--output_dir", "next", "--spent", path, "--dry-run").stdout
    assert 7.9 < float(re.findall(r"with 2 steps of earlier runs: epsilon: (\S+) in all", dry)[0]) <= 8.0
    assert not Path("next").exists()
    result = train(*flags, "--output_dir", "next", "--spent", path)
    assert result.exit_code == 0, result.output
    spent = record("next")
    assert 7.9 < spent["epsilon"] <= 8.0
    assert spent["noise_multiplier"] > 1.1 * record("run")["noise_multiplier"]
    assert sum(event["num_steps"] for event in spent["ledger"]["events"]) == 6
    third = train(*flags, "--output_dir", "third", "--spent", "next/privacy_accounting.json", "--dp_epsilon", 7)
    assert third.exit_code == 1  # nothing is left of a smaller budget
    assert not Path("third").exists()
    assert train(*flags, "--output_dir", "next", "--resume").exit_code == 1  # without --spent it is another job


def test_a_folder_in_which_another_process_trains_is_refused(here):
    """Before anything is prepared, and with nothing written; also when it is resumed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom dpfunc._utils.locks import only_process\n"
        "with only_process(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": here, "env": ENVIRONMENT}
    for name, flags in (("busy", []), ("run", ["--resume"])):
        with subprocess.Popen([sys.executable, "-c", code, name], **pipes) as other:
            assert other.stdout.readline() == b"held\n"
            before = files(here)
            result = train("--output_dir", name, *flags)
            other.communicate(b"")
        assert result.exit_code == 1
        assert f"no other process in '{name}', got process {other.pid}, which trains there now" in result.stderr
        assert "Two runs in one folder would publish one ledger for the steps of both" in result.stderr
        assert [path for path, _ in before if ".dpfunc.lock" in path]
    assert not Path("busy").exists()
    assert not Path("run/.dpfunc.lock").exists()


@pytest.mark.slow
def test_two_commands_at_the_same_time(here):
    """One of them trains, and its ledger has all that was taken."""
    command = [sys.executable, "-m", "dpfunc.cli.main", "train", "job.yaml", "--output_dir", "twice"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": here, "env": ENVIRONMENT}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    refused = said[[process.returncode for process in both].index(1)]
    assert "Expected no other process in" in refused or "Expected an empty output_dir" in refused
    assert journal_ledger(Path("twice", JOURNAL)).num_steps == record("twice")["global_step"] == 4


@pytest.mark.parametrize("step", [2, 4])
def test_a_model_is_saved_with_the_cost_of_its_whole_journal(here, monkeypatch, step):
    """Where locks do nothing, as on some file systems, the next step or the end finds steps of others."""
    journal = Path(f"mixed-{step}", JOURNAL)

    def other(trainer, state):
        if state.global_step == step:
            another = trainer._run.dp_step.init(trainer._run.params, secure_key())
            spent = journal_ledger(journal).compose(trainer.plan.ledger(1))
            Journal(journal, trainer.plan)(another._replace(step=1, ledger=spent))

    at_events(monkeypatch, on_step_end=other)
    result = train("--output_dir", journal.parent)
    assert result.exit_code == 1
    assert not (journal.parent / "model").exists()
    if step == 4:
        assert f"to count the steps of {journal}, Ledger(5 steps" in result.stderr
        assert f"--spent {journal}" in result.stderr
    else:
        assert f"{journal} one after the other" in result.stderr
        assert journal_ledger(journal).num_steps == 3


DAMAGED_JOBS = {
    "short": ('{"job": {"task"', "Expecting"),
    "empty": ("", "Expecting value"),
    "list": ("[1]", "it does not hold a job"),
    "no job": ("{}", "it does not hold a job"),
    "text": ('{"job": "x", "insecure_seed": null}', "it does not hold a job"),
    "deep": ("[" * 100_000, "its values are nested too deeply"),
    "bytes": ("\udcff\udcfe", "cannot be read"),
    "half a pair": ('{"job": {"task": "\\ud800"}, "filled": {}, "insecure_seed": null}', "was started with"),
}


@pytest.mark.parametrize("name", DAMAGED_JOBS)
def test_a_damaged_job_file_says_so(here, tmp_path, name):
    text, message = DAMAGED_JOBS[name]
    folder = tmp_path / "run"
    shutil.copytree(here / "run", folder)
    (folder / "job.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    resumed, drawn = train("--output_dir", folder, "--resume"), run("generate", folder, "-n", 1, "--out", "x.jsonl")
    assert message in resumed.stderr
    for result in (resumed, drawn):
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
        assert name == "half a pair" or f"--spent {folder}/{JOURNAL}" in result.stderr


RESUMES = {
    "no run": (["--resume", "--output_dir", "nowhere"], "Expected a run in 'nowhere' to resume, found none"),
    "another rate": (["--resume", "--learning_rate", "0.1"], "learning_rate was 0.01, now 0.1"),
    "another budget": (["--resume", "--dp_epsilon", "9"], "dp_epsilon was 8.0, now 9.0"),
    "another key": (["--resume", "--insecure-seed", "1"], "--insecure-seed was None, now 1"),
    "without privacy": (["--resume", "--dp_enabled", "false"], "dp_enabled was True, now False"),
}


@MODES
@pytest.mark.parametrize(("flags", "message"), RESUMES.values(), ids=RESUMES)
def test_what_cannot_be_resumed(here, mode, flags, message):
    before = files(here)
    result = train(*flags, *mode)
    assert result.exit_code == 1
    assert message in result.stderr
    assert files(here) == before


def test_a_finished_run_resumes_to_itself(here, tmp_path):
    shutil.copytree("run/model", tmp_path / "model")
    result = train("--resume", "--logging_steps", 1)
    assert result.exit_code == 0, result.output
    assert same(tmp_path, "run")
    before = files(here)
    assert "Nothing was trained" in train("--resume", "--dry-run").stdout
    assert files(here) == before


def test_an_interrupt_without_a_checkpoint_promises_no_resume(here, early, tmp_path):
    left_in(tmp_path / "lost", early, ["job.json", JOURNAL, f"{JOURNAL}.head"])
    said = interrupted(read_job("job.yaml", ["--output_dir", str(tmp_path / "lost")]))
    assert said.endswith("There is no checkpoint to resume.")
