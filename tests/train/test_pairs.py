"""Jobs over pairs of chats: every file gives the same records; what is learnt, printed, refused, and searched."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from chat_jobs import PLAIN, THINKS, tokenizer
from pair_jobs import chats, pairs, write_job
from text_job import record, run, train, write_rows

from dpfunc.errors import InvalidArgument
from dpfunc.hf.pairs import pair_messages, pair_tokens
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._frozen import compute_frozen
from dpfunc.train._model import load_processing
from dpfunc.train._run_folder import saved_job
from dpfunc.train._search_runs import score
from dpfunc.train.generate import load_writer
from dpfunc.train.run import prepare


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(result):
    assert result.exit_code == 0, result.output
    return result


def read(*flags):
    job = read_job("job.yaml", [*flags, "--eval_fraction", "0"])
    return list(read_records(job, load_processing(job)).train)


def csv_of(rows):
    with Path("pairs.csv").open("w", newline="") as file:
        written = csv.DictWriter(file, [*rows[0]])
        written.writeheader()
        written.writerows({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows)  # fmt: skip


def split(row):
    return {"prompt": row["chosen"][:-1], **{name: row[name][-1:] for name in ("chosen", "rejected")}}


def spoken(chat):
    return "".join(f"\n\n{'Human' if turn['role'] == 'user' else 'Assistant'}: {turn['content']}" for turn in chat)


FILES = {  # a file of rows of whole chats, and its columns
    "prompts of their own": (lambda rows: write_rows("pairs.jsonl", map(split, rows)), ["--chat", "prompt,chosen,rejected"]),
    "answers that are texts": (lambda rows: write_rows("pairs.jsonl", [{**each, "chosen": each["chosen"][0]["content"]} for each in map(split, rows)]), ["--chat", "prompt,chosen,rejected"]),
    "csv": (csv_of, ["--data.train", "pairs.csv"]),
    "csv, prompts of their own": (lambda rows: csv_of([*map(split, rows)]), ["--data.train", "pairs.csv", "--chat", "prompt,chosen,rejected"]),
    "Anthropic": (lambda rows: write_rows("pairs.jsonl", [{name: spoken(row[name]) for name in ("chosen", "rejected")} for row in rows]), []),
    "UltraFeedback": (lambda rows: write_rows("pairs.jsonl", [{"prompt": row["chosen"][0]["content"], "prompt_id": "a", "messages": row["chosen"], "score_chosen": 8.5, **row} for row in rows]), []),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_records(here, name):
    expected = read()
    write, flags = FILES[name]
    write(chats())
    assert read(*flags) == expected
    words = tokenizer(PLAIN)
    assert expected == [
        pair_tokens(words, pair_messages(row, ["chosen", "rejected"]), max_length=24) for row in chats()
    ]


def test_a_run_learns_what_is_preferred(here):
    """As over texts; a made-up pair is printed, in the dry run, too; `generate` takes a prompt as a turn of the user."""
    for said in (done(train("--dry-run")).stdout, done(train("--insecure-seed", 5, "--steps", 16, "--dp-epsilon", 60)).stdout):  # fmt: skip
        assert "chat: what is learnt of a made-up pair stands in [[ ]]: chosen: <s> text : " in said
        assert said.count("[[<unk>") == 2
        assert "goal" not in said
    found = json.loads(Path("run/metrics.json").read_text())
    assert found["eval_loss_of_reference"] == pytest.approx(0.69314718)
    assert found["eval_loss"] < 0.99 * found["eval_loss_of_reference"]
    assert found["eval_reward_accuracy"] > 0.7
    assert record("run")["epsilon"] <= 60
    drawn = run("generate", "run", "-n", 2, "--out", "texts.jsonl", "--allow-non-private", "--max-new-tokens", 3, "--prompt", "the team")  # fmt: skip
    assert len(Path("texts.jsonl").read_text().splitlines()) == 2, drawn.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--unit_column", "who", "--max_records_per_unit", 2, "--batch_size", 8),
        ("--no-dp",),
        ("--strategy", "full", "--preference.loss", "ipo", "--bf16"),
    ],
    ids=["people", "twin", "full, IPO, bfloat16"],
)
def test_other_settings(here, flags):
    done(train("--steps", 2, *flags))
    found = json.loads(Path("run-no-dp" if "--no-dp" in flags else "run", "metrics.json").read_text())
    assert found["eval_loss"] != found["eval_loss_of_reference"]


def test_a_template_that_rewrites_earlier_turns_is_taken(tmp_path, monkeypatch):
    """Of a pair the answers alone are learnt, so a template may leave out what was thought before them."""
    write_job(tmp_path, THINKS)
    monkeypatch.chdir(tmp_path)
    done(train("--steps", 1))


def test_definitions_of_tools_are_a_column(here):
    tools = [{"type": "function", "function": {"name": "team"}}]
    rows = chats(2)
    write_rows("pairs.jsonl", [rows[0] | {"tools": tools}, rows[1]])
    knows = tokenizer("{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}" + PLAIN)
    job = read_job("job.yaml", ["--tools_column", "tools", "--eval_fraction", "0", "--max_length", "40"])
    one, other = read_records(job, knows).train
    assert [one[name]["input_ids"][0] for name in one] == knows("team", add_special_tokens=False)["input_ids"] * 2
    assert other == read("--max_length", "40")[1]


KEYS = {
    "one column": (["--chat", "chosen"], "at most two of its prompt, then those of the chosen and of the rejected"),
    "five columns": (["--chat", "a,b,c,d,e"], "at most two of its prompt, then those of the chosen and of the rejected"),
    "a column twice": (["--chat", "chosen,chosen"], "at most two of its prompt, then those of the chosen and of the"),
    "another name of an answer": (["--chosen_column", "best"], "no data.chosen_column with data.chat"),
    "a prompt and a chat": (["--prompt_column", "a"], "Expected data.chat or data.prompt_column, got both"),
    "loss on the prompt": (["--loss_on", "all"], "data.loss_on with task causal_lm only"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_contradict_each_other(here, name):
    flags, words = KEYS[name]
    with pytest.raises(InvalidArgument, match=words):
        read_job("job.yaml", flags)


# Searches


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A job over pairs of chats, with the reference in its records."""
    folder = tmp_path_factory.mktemp("search")
    write_job(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = prepare(read_job("job.yaml", ["--strategy", "full", "--eval_fraction", "0.3"]))
        records, _ = compute_frozen(made.job, made.model, made.records, shows=False)
    return dataclasses.replace(made, records=records)


def moved(model):
    """The model after some training."""
    other = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for value in other.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return other


def test_the_score_is_the_number_of_pairs_that_gained(prepared):
    """Each is computed alone, and adds 0 or 1; the model before training has gained nothing of any."""
    model, held_out = moved(prepared.model), prepared.records.evaluation
    each = [score(prepared, model, [row]) for row in held_out]
    assert {*each} == {0.0, 1.0}
    assert score(prepared, model, held_out) == sum(each)
    gained = []
    for row in held_out:
        values = []
        for name, before in zip(("chosen", "rejected"), row["reference"], strict=True):
            ids, labels = torch.tensor(row[name]["input_ids"]), row[name]["labels"]
            scores = model(input_ids=ids[None]).logits[0].log_softmax(-1).detach()
            values.append(sum(float(scores[t - 1, ids[t]]) for t, label in enumerate(labels) if label != -100) - before)
        gained.append(float(values[0] > values[1]))
    assert each == gained
    assert score(prepared, model, []) == 0.0


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_a_model_without_numbers_scores_in_the_same_range(prepared, monkeypatch, broken):
    real = type(prepared.model).forward

    def wrong(self, *arguments, **named):
        output = real(self, *arguments, **named)
        output.logits = output.logits * broken
        return output

    monkeypatch.setattr(type(prepared.model), "forward", wrong)
    assert all(0 <= score(prepared, prepared.model, [row]) <= 1 for row in prepared.records.evaluation[:3])


SEARCH = ("--private", "--mean-runs", 2, "--score-noise", 2, "--factors", "1", "--grid", "rank=2,4", "--steps", 1)


@pytest.mark.parametrize("form", ["chats", pytest.param("texts", marks=pytest.mark.slow)])
def test_a_private_search_releases_its_best_run_and_its_record(here, form):
    """The model is read back, texts are drawn from it with the cost of the search, and the record checks."""
    flags = []
    if form == "texts":
        write_rows("pairs.jsonl", pairs())
        flags = ["--chat", "null", "--prompt_column", "prompt"]
    result = done(run("tune", "job.yaml", *SEARCH, *flags))
    assert "score: number of held-out pairs whose chosen answer gained more probability" in result.stdout
    found = record("run")
    assert (found["schema"], found["epsilon"] <= 20, found["noise_key"]) == ("dpfunc.selection/4", True, "secret")
    chosen = found["candidates"][found["chosen"]]
    job, *_ = saved_job(Path("run"))
    assert (job.lora.rank, job.training.learning_rate) == (chosen["rank"], pytest.approx(chosen["learning_rate"]))
    writer = load_writer("run")
    assert (writer.epsilon, writer.delta) == (found["epsilon"], found["delta"])
    assert {value.shape[0] for name, value in writer.model.named_parameters() if "lora_A" in name} == {chosen["rank"]}
    done(run("generate", "run", "-n", 1, "--out", "texts.jsonl", "--max-new-tokens", 2, "--prompt", "the team"))
    assert json.loads(Path("texts.jsonl").read_text())["epsilon"] == found["epsilon"]
    assert "All agrees" in done(run("ledger", "check", "run")).output
    done(run("certify", "run"))
    (weights,) = Path("run/model").glob("*.safetensors")
    checked = done(run("certify", "--check", "run/certificate.json", "--model", weights))
    assert "It is not signed" in checked.output
    weights.write_bytes(b"of another run")
    refused = run("certify", "run")
    assert (refused.exit_code, "Expected the weights that the search released" in refused.stderr) == (1, True)


def test_a_public_search_writes_a_job_that_trains(here):
    rows = chats()
    write_rows("public.jsonl", [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows])
    refused = run("tune", "job.yaml", "--public", "pairs.jsonl")
    assert (refused.exit_code, "which is the private data.train" in refused.stderr) == (1, True)
    done(run("tune", "job.yaml", "--public", "public.jsonl", "--factors", "1", "--steps", 2))
    found = read_job("job.tuned.yaml")
    assert found.data.chat == ("chosen", "rejected")
    assert "Nothing was trained, written or spent." in done(run("train", "job.tuned.yaml", "--dry-run")).stdout


NO_SEARCH = {
    "people": (["--unit_column", "who", "--max_records_per_unit", 2], "no data.unit_column in a search"),
    "4 bits on a CPU": (["--strategy", "qlora", "--init", "pretrained"], "another strategy than 'qlora' for preferences"),
    "two prompts": ([], "The pair in row 121 of pairs.jsonl cannot be used. Expected two chats with one prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SEARCH)
def test_what_cannot_be_searched_is_refused(here, name):
    flags, message = NO_SEARCH[name]
    if name == "4 bits on a CPU" and torch.accelerator.is_available():
        message = "bitsandbytes"
    if name == "two prompts":
        one, other = chats(2)
        write_rows("pairs.jsonl", [*chats(), {**one, "rejected": other["rejected"]}])
    result = run("tune", "job.yaml", *SEARCH, *flags)
    assert (result.exit_code, message in result.stderr) == (1, True), result.output
    assert not Path("run").exists()
