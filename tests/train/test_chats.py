"""Jobs over chats: every file and format gives the same records, and what is learnt is printed of a made-up chat."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from chat_jobs import PLAIN, chats, llava_rows, tokenizer, write_job, write_llava_job
from PIL import Image
from text_job import record, train, write_rows
from torch.nn import functional as F

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.train import generate, tables
from dpfunc.train._collate import collator
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._made_up import chat_lines
from dpfunc.train._model import load_base, load_processing
from dpfunc.train._saved import made_up_batch
from dpfunc.train.tables import read_table

ROWS = [{"messages": chat} for chat in chats(6)]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the job, and one with that of LLaVA."""
    folder = tmp_path_factory.mktemp("chats")
    write_job(folder)
    (folder / "pictures").mkdir()
    write_llava_job(folder / "pictures")
    return folder


@pytest.fixture
def place(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def read(*flags):
    job = read_job("job.yaml", [*flags, "--eval_fraction", "0"])
    return list(read_records(job, load_processing(job)).train)


def csv_of(path):
    with Path(path).open("w", newline="") as file:
        written = csv.writer(file)
        written.writerow(["messages"])
        written.writerows([json.dumps(row["messages"])] for row in ROWS)


def gz_of(path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path(path).write_bytes(gzip.compress(lines.encode()))


def shared_gpt(path):
    turns = [[{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in row["messages"]] for row in ROWS]
    Path(path).write_text(json.dumps([{"conversations": each} for each in turns]))


FILES = {
    "jsonl": ("rows.jsonl", lambda path: write_rows(path, ROWS), "[messages]"),
    "json": ("rows.json", lambda path: Path(path).write_text(json.dumps(ROWS)), "[messages]"),
    "csv": ("rows.csv", csv_of, "[messages]"),
    "gz": ("rows.jsonl.gz", gz_of, "[messages]"),
    "ShareGPT": ("shared.json", shared_gpt, "[conversations]"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_records(place, name):
    file, write, columns = FILES[name]
    write(file)
    found = read("--data.train", file, "--chat", columns.strip("[]"))
    write_rows("plain.jsonl", ROWS)
    assert found == read("--data.train", "plain.jsonl")
    assert len(found) == len(ROWS)


def test_questions_and_answers_are_chats(place):
    """Alpaca and prompt with completion in the chat template, which is that of two turns."""
    pairs = [("the team", "goal"), ("a coach", "match"), ("new", "bank")]
    asked, said = ("user", "assistant")
    turns = [[{"role": asked, "content": one}, {"role": said, "content": other}] for one, other in pairs]
    write_rows("plain.jsonl", [{"messages": each} for each in turns])
    expected = read("--data.train", "plain.jsonl")
    write_rows("prompts.jsonl", [{"prompt": one, "completion": other} for one, other in pairs])
    assert read("--data.train", "prompts.jsonl", "--chat", "prompt,completion") == expected
    write_rows("turns.jsonl", [{"prompt": each[:1], "completion": each[1:]} for each in turns])
    assert read("--data.train", "turns.jsonl", "--chat", "prompt,completion") == expected
    alpaca = [{"instruction": one, "output": other} for one, other in pairs]
    alpaca[0] |= {"input": None}
    alpaca[1] |= {"instruction": "a", "input": "coach"}
    write_rows("alpaca.jsonl", alpaca)
    assert read("--data.train", "alpaca.jsonl", "--chat", "instruction,input,output") == expected


def test_losses_of_a_job_equal_those_of_single_chats(place):
    """The batch of the job's own collator and model; the mask is counted off by hand."""
    job = read_job("job.yaml", [])
    processing = load_processing(job)
    records = read()[:6]
    model = load_base(job, processing).train(False)
    forward, params = functionalize(model)
    losses = make_loss_fn(forward, "causal_lm")(params, collator(job, processing)(records))
    for loss, chat in zip(losses, chats(6), strict=True):
        pieces = [
            (turn["role"], ["<s> text :", "<s> label :"][turn["role"] == "assistant"], turn["content"]) for turn in chat
        ]
        ids, learnt = [], []
        for role, before, said in pieces:
            head, tail = (processing(text, add_special_tokens=False)["input_ids"] for text in (before, f"{said} </s>"))
            ids, learnt = ids + head + tail, learnt + [False] * len(head) + [role == "assistant"] * len(tail)
        scores = model(input_ids=torch.tensor([ids])).logits[0]
        alone = [F.cross_entropy(scores[t - 1], torch.tensor(ids[t])) for t in range(len(ids)) if learnt[t]]
        torch.testing.assert_close(loss, torch.stack(alone).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 5, 48])
def test_no_length_cuts_a_chat_to_nothing(place, length):
    for found in read("--max_length", str(length)):
        assert 2 <= len(found["input_ids"]) <= length
        assert any(label != -100 for label in found["labels"][1:])


@pytest.fixture(scope="module")
def finished(made):
    """What a run printed, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        result = train("--output_dir", "done", "--steps", "1")
    assert result.exit_code == 0, result.output
    return result, made / "done"


def test_a_made_up_chat_is_printed_with_its_mask(place, finished):
    for result in (finished[0], train("--output_dir", "other", "--steps", "1", "--dry-run")):
        assert result.exit_code == 0, result.output
        assert "chat: what is learnt of a made-up one stands in [[ ]]: <s> text : " in result.stdout
        assert result.stdout.count("[[<unk> </s>]]") == 2
        assert "goal" not in result.output
    job = read_job("job.yaml", ["--loss_on", "all"])
    assert chat_lines(job, load_processing(job)) == []


def test_a_prompt_of_generate_is_a_turn_of_the_user(place, finished, monkeypatch):
    writer = generate.load_writer(finished[1])
    seen = []

    def answer(**given):
        seen.append(given["input_ids"])
        return given["input_ids"]

    monkeypatch.setattr(writer.model, "generate", answer)
    texts = list(generate.sample(writer, [{"prompt": "the team"}], generate.Sampling(1)))
    asked = tokenizer(PLAIN)("<s> text : the team </s> <s> label :", add_special_tokens=False)["input_ids"]
    assert seen[0].tolist() == [asked]
    assert texts[0]["text"] == ""


def test_pictures_in_chats_with_and_without(place, monkeypatch, tmp_path):
    """LLaVA's file: of three records two have an image; one run from it."""
    monkeypatch.chdir(place / "pictures")
    found = read()
    assert [len(sample["images"]) for sample in found] == [int(bool(number % 3)) for number in range(40)]
    job = read_job("job.yaml", [])
    batch = collator(job, load_processing(job))(found)
    assert batch["pixel_values"].shape[0] == 40
    learnt = (batch["labels"] != -100).sum(1).tolist()
    assert learnt == [2 * (1 + number % 2) for number in range(40)]
    result = train("--output_dir", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "USER: is the picture red ? ASSISTANT:[[yes]]" in result.stdout
    assert record(tmp_path / "run")["epsilon"] <= 8


@pytest.mark.parametrize("most", [1, 2])
def test_a_made_up_chat_has_its_picture_however_many_there_may_be(place, monkeypatch, most):
    monkeypatch.chdir(place / "pictures")
    job = read_job("job.yaml", ["--max_images", str(most)])
    batch = made_up_batch(job, load_processing(job))
    red = batch["pixel_values"][..., 0, :, :].flatten(-2)  # of one colour where there is no picture
    assert int((red.amax(-1) > red.amin(-1)).sum()) == 2  # one of each of two chats


def test_paths_of_pictures_may_be_in_the_turns(place, monkeypatch):
    monkeypatch.chdir(place / "pictures")
    rows = llava_rows(6)
    inside = []
    for row in rows:
        turns = [
            {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
            for turn in row["conversations"]
        ]
        if "image" in row:
            text = turns[0]["content"].removeprefix("<image>\n")
            turns[0]["content"] = [{"type": "image", "path": row["image"]}, {"type": "text", "text": text}]
        inside.append({"messages": turns})
    write_rows("inside.jsonl", inside)
    write_rows("outside.jsonl", rows)
    job = read_job("job.yaml", [])
    collate = collator(job, load_processing(job))
    one = collate(read("--data.train", "outside.jsonl"))
    other = collate(read("--data.train", "inside.jsonl", "--chat", "messages"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# Readers that are no dependencies


def stub(monkeypatch, name, **functions):
    """A package of this name, with these functions."""
    package = ModuleType(name)
    package.__spec__ = SimpleNamespace(name=name)
    for key, value in functions.items():
        setattr(package, key, value)
    monkeypatch.setitem(sys.modules, name, package)
    return package


def test_what_to_install_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    (tmp_path / "disk").mkdir()
    for name, package in {"rows.parquet": "pyarrow", "disk": "datasets"}.items():
        with pytest.raises(InvalidArgument, match=f"{name}': pip install {package}. Or write the table as a .jsonl"):
            read_table(tmp_path / name, ["messages"])


def test_parquet_and_data_sets_on_disk_are_read_by_their_packages(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    (tmp_path / "disk").mkdir()
    stub(monkeypatch, "pyarrow")
    stub(
        monkeypatch,
        "pyarrow.parquet",
        read_table=lambda found: SimpleNamespace(to_pylist=lambda: ROWS * (found == path)),
    )
    stub(monkeypatch, "datasets", load_from_disk=lambda found: iter(ROWS * (found == str(tmp_path / "disk"))))
    expected = read_table(write_rows(tmp_path / "rows.jsonl", ROWS), ["messages"], values=["messages"])
    for name in ("rows.parquet", "disk"):
        assert read_table(tmp_path / name, ["messages"], values=["messages"]) == expected
    (tmp_path / "disk" / "dataset_dict.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="got several of them"):
        read_table(tmp_path / "disk", ["messages"])

    def damaged(found):
        raise ValueError("secret")

    stub(monkeypatch, "pyarrow.parquet", read_table=damaged)
    with pytest.raises(InvalidArgument, match="pyarrow raised ValueError") as told:
        read_table(path, ["messages"])
    assert "secret" not in str(told.value)


def test_objects_of_a_parquet_have_their_own_names(tmp_path, monkeypatch):
    """Arrow gives each object the names of all others, with null; a null of a column stays."""

    def read(row):
        table = SimpleNamespace(to_pylist=lambda: [row])
        stub(monkeypatch, "pyarrow.parquet", read_table=lambda found: table)
        names = ["messages", "tools"]
        return read_table(tmp_path / "rows.parquet", names, values=names, optional=["tools"])[1]

    stub(monkeypatch, "pyarrow")
    own, other = {"goal": 1, "bank": None}, {"goal": None, "bank": [{"a": 0, "b": None}]}
    assert read({"messages": [own, other], "tools": None}) == {
        "messages": '[{"goal": 1}, {"bank": [{"a": 0}]}]', "tools": "",
    }  # fmt: skip


def test_values_of_a_parquet_that_are_texts(tmp_path, monkeypatch):
    """Texts, numbers and times are; bytes, arrays, pictures and whatever a package decodes to are none."""

    def read(value):
        table = SimpleNamespace(to_pylist=lambda: [{"text": value}])
        stub(monkeypatch, "pyarrow.parquet", read_table=lambda found: table)
        return read_table(tmp_path / "rows.parquet", ["text"])[1]["text"]

    stub(monkeypatch, "pyarrow")
    known = ("a", 1, 0.5, True, Decimal("0.10"), np.int64(3), datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2))
    expected = ["a", "1", "0.5", "true", "0.10", "3", "2026-01-02", "2026-01-02 00:00:00"]
    assert [read(value) for value in known] == expected
    for other in (b"a", bytearray(b"a"), np.ones(2), Image.new("L", (2, 2)), object()):
        with pytest.raises(InvalidArgument, match=r"in row 1 of rows.parquet, got none. It is .* bytes or a picture"):
            read(other)


KEYS = {
    "a chat and a prompt": (["--prompt_template", "a"], "Expected data.chat or data.prompt_template, got both"),
    "a chat and a text column": (["--text_column", "a"], "Expected no data.text_column with data.chat"),
    "four columns": (["--chat", "a,b,c,d"], "one column of turns, or two or three of texts"),
    "a column twice": (["--chat", "a,a"], "one column of turns, or two or three of texts"),
    "tools without a chat": (
        ["--chat", "null", "--tools_column", "tools"],
        "Expected data.chat together with data.tools",
    ),
    "another task": (["--task", "seq2seq"], "data.chat with task causal_lm or vqa or preference only"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_contradict_each_other(place, name):
    flags, words = KEYS[name]
    with pytest.raises(InvalidArgument, match=words):
        read_job("job.yaml", flags)


def test_tools_are_a_column(place, monkeypatch):
    tools = [{"type": "function", "function": {"name": "team"}}]
    write_rows("tools.jsonl", [ROWS[0] | {"tools": tools}, ROWS[1]])
    knows = tokenizer("{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}" + PLAIN)
    job = read_job("job.yaml", ["--data.train", "tools.jsonl", "--tools_column", "tools"])
    one, other = read_records(job, knows).train
    assert one["input_ids"][0] == knows("team", add_special_tokens=False)["input_ids"][0]
    assert other["input_ids"] == read("--data.train", "tools.jsonl")[1]["input_ids"]
