"""Files and jobs as people have them: each fault is found before the first step, in words that lead to its mending.

A row: the job, what is done to its files, its flags, and the message. Each is run by the command, with nothing spent.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import chat_jobs
import feature_jobs
import numpy as np
import pair_jobs
import pytest
import text_job
import torch
from feature_jobs import people, write_csv, write_photos
from PIL import Image
from text_job import rows, train, write_rows
from transformers import BartConfig, BertConfig, LlamaConfig, RobertaConfig, T5Config

from dpfunc import Ledger
from dpfunc.accounting import Event
from dpfunc.checkpoint.journal import count_steps
from dpfunc.errors import InvalidArgument
from dpfunc.features import ScatteringFeatures
from dpfunc.hf.vision_language._images import opened
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._model import load_processing
from dpfunc.train.predict import _records
from dpfunc.train.tables import read_table, visible_files

# Places in which a job and its files are made: kind -> a function of the folder.
KINDS = {
    "texts": lambda folder: text_job.write_job(folder, "text_classification", extra="strategy: head\n"),
    "numbers": lambda folder: text_job.write_job(folder, "text_regression", extra="strategy: head\n"),
    "prompts": text_job.write_job,
    "table": lambda folder: feature_jobs.write_job(folder, "table"),
    "images": lambda folder: feature_jobs.write_job(folder, "images"),
    "chats": chat_jobs.write_job,
    "llava": chat_jobs.write_llava_job,
    "pairs": pair_jobs.write_job,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of jobs, each written once."""
    there = {}

    def place(kind):
        if kind not in there:
            there[kind] = tmp_path_factory.mktemp(kind)
            KINDS[kind](there[kind])
        return there[kind]

    return place


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    """A function that copies the folder of a kind of job into a new one, which is then the present one."""

    def copied(kind):
        shutil.copytree(made(kind), tmp_path / "job")
        monkeypatch.chdir(tmp_path / "job")

    return copied


def jsonl(**change):
    """The third row of the texts has these values."""

    def write():
        table = rows(12)
        table[2] |= change
        write_rows("mails.jsonl", table)

    return write


def csv(*lines, end="\n", encoding="utf-8"):
    """A table of texts, its first ten rows as they should be."""
    good = [f"{row['label']},{row['text']}" for row in rows(10)]
    text = end.join(["label,text", *good, *lines]) + end
    return lambda: Path("mails.csv").write_bytes(text.encode(encoding))


def person(**change):
    """The third row of the people has these values, in a .jsonl."""

    def write():
        table = people(40)
        table[2] |= change
        write_rows("people.jsonl", table)

    return write


def photo(name, pixels=None, **options):
    """One more picture of bars, or a file of these bytes."""

    def write():
        path = Path("photos/bars", name)
        if isinstance(pixels, bytes):
            path.write_bytes(pixels)
        else:
            Image.fromarray(GREY if pixels is None else pixels).save(path, **options)

    return write


def damaged(name):
    def write():
        photo(name)()
        path = Path("photos/bars", name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return write


def formatted(name, value, **others):
    """A table in another format, whose rows have these columns."""
    return lambda: write_rows("mails.jsonl", [{name: value, **others}] * 3)


def chat(**change):
    """The third row of the chats has these values; without those that are `...`."""

    def write():
        table = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
        table[2] = {name: value for name, value in (table[2] | change).items() if value is not ...}
        write_rows("chats.jsonl", table)

    return write


def llava(**change):
    """The third row of LLaVA's JSON has these values."""

    def write():
        table = json.loads(Path("data.json").read_text())
        table[2] |= change
        Path("data.json").write_text(json.dumps(table))

    return write


def pair(**change):
    """The third row of the pairs has these values; without those that are `...`."""

    def write():
        table = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
        table[2] = {name: value for name, value in (table[2] | change).items() if value is not ...}
        write_rows("pairs.jsonl", table)

    return write


def pairs_of(**values):
    """A table of three pairs with these columns."""
    return lambda: write_rows("pairs.jsonl", [values] * 3)


def both(*changes):
    def write():
        for change in changes:
            change()

    return write


def template(text):
    """The tokenizer has another chat template, or none."""

    def write():
        Path("tiny/chat_template.jinja").unlink()
        chat_jobs.tokenizer(text).save_pretrained("tiny")

    return write


ASKED, ANSWER = {"role": "user", "content": "secret"}, {"role": "assistant", "content": "goal"}
GIVEN = {"chosen": [ASKED, ANSWER], "rejected": [ASKED, {"role": "assistant", "content": "bank"}]}
ANSWERS = {name: chat[1:] for name, chat in GIVEN.items()}
PAIR = "The pair in row 3 of pairs.jsonl cannot be used. Expected"
TEXTS = ["--chat", "null", "--prompt_column", "prompt"]  # pairs of texts
PROMPT = ["--chat", "prompt,chosen,rejected"]
RAW = ["--prompt_template", "null"]
GREY = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
CSV = ["--data.train", "mails.csv"]
PEOPLE = ["--data.train", "people.jsonl"]
NONE = "in row 3 of mails.jsonl, got none. It is empty, null or NaN"
PLACE = "file 1 of the class 'bars', in the order of names,"

FAULTS = {
    # missing values: null and NaN of JSON, and empty or blank cells
    "null text": ("texts", jsonl(text=None), [], f"'text' {NONE}"),
    "NaN text": ("texts", jsonl(text=float("nan")), [], f"'text' {NONE}"),
    "empty text": ("texts", jsonl(text=""), [], f"'text' {NONE}"),
    "blank text": ("texts", jsonl(text=" \t"), [], f"'text' {NONE}"),
    "null label": ("texts", jsonl(label=None), [], f"'label' {NONE}"),
    "NaN label": ("texts", jsonl(label=float("nan")), [], f"'label' {NONE}"),
    "empty label": ("texts", jsonl(label=""), [], f"'label' {NONE}"),
    "null number": ("numbers", jsonl(label=None), [], f"'label' {NONE}"),
    "NaN number": ("numbers", jsonl(label=float("nan")), [], f"'label' {NONE}"),
    "infinite number": ("numbers", jsonl(label=float("inf")), [], "a finite number in the column 'label' in row 1"),
    "NaN response": ("prompts", jsonl(text=float("nan")), [], f"'text' {NONE}"),
    "null response": ("prompts", jsonl(text=None), [], f"'text' {NONE}"),
    "null number of a table": ("table", person(age=None), PEOPLE, "'age' in row 3 of people.jsonl, which has none"),
    "NaN number of a table": ("table", person(age=float("nan")), PEOPLE, "'age' in row 3 of people.jsonl, which has none"),
    "empty number of a table": ("table", person(age=""), PEOPLE, "'age' in row 3 of people.jsonl, which has none"),
    "null class of a table": ("table", person(income=None), PEOPLE, "'income' in row 3 of people.jsonl, got none"),
    "empty cell of a csv": ("texts", csv("sport,"), CSV, "'text' in row 11 of mails.csv, got none. It is empty, null"),
    "blank cell of a csv": ("texts", csv("sport,  "), CSV, "'text' in row 11 of mails.csv, got none. It is empty, null"),
    # faults of a .csv name the line
    "short row": ("texts", csv("sport"), CSV, "'text' in row 11 (line 12) of mails.csv, got a row that ends before it"),
    "long row": ("texts", csv("sport,my secret, of mine"), CSV, "at most 2 values in row 11 (line 12) of mails.csv"),
    "lines in a text": ("texts", csv('sport,"my\nsecret"', "sport"), CSV, "in row 12 (line 14) of mails.csv"),
    "open quote": ("texts", csv('sport,"my secret', "sport,match"), CSV, "in the row that begins in line 12, a quote there"),
    "quote inside": ("texts", csv('sport,"my" secret'), CSV, "in the row that begins in line 12, ',' expected after"),
    "quote in the header": ("texts", lambda: Path("mails.csv").write_text('"label,text\n'), CSV, "that begins in line 1, a quote"),
    "Latin-1": ("texts", csv("sport,secret caf\xe9", encoding="latin-1"), CSV, "in line 12. Convert it from the encoding"),
    "Windows-1252": ("texts", csv("sport,secret \u20ac", encoding="cp1252"), CSV, "iconv -f WINDOWS-1252 -t UTF-8"),
    "UTF-16": ("texts", csv(encoding="utf-16"), CSV, "iconv -f UTF-16 -t UTF-8"),
    "Latin-1 in a jsonl": ("texts", lambda: Path("mails.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n'), [], "in line 2"),
    # formats
    "a chat": ("prompts", formatted("messages", [{"role": "user", "content": "secret"}]), RAW, "The rows have messages: chats. Write chat: [messages] in the section data"),
    "ShareGPT": ("prompts", formatted("conversations", [{"from": "human", "value": "secret"}]), RAW, "The rows have conversations: chats. Write chat: [conversations]"),
    "Alpaca": ("prompts", formatted("instruction", "secret", output="a"), RAW, "prompt_template: '{instruction} {input} ' and text_column: output; or, in the chat template of the tokenizer, chat: [instruction"),
    "prompts": ("prompts", formatted("prompt", "secret", completion="a"), RAW, "prompt_column: prompt and response_column: completion"),
    "preferences": ("prompts", formatted("prompt", "secret", chosen="a", rejected="b"), RAW, "The rows have chosen and rejected: preferences"),
    "pairs of chats": ("prompts", lambda: write_rows("mails.jsonl", [GIVEN] * 3), RAW, "The rows have pairs of chats. Write task: preference, and chat: [chosen, rejected] in the section data"),
    "pairs of chats, one prompt": ("prompts", lambda: write_rows("mails.jsonl", [{"prompt": [ASKED], **ANSWERS}] * 3), RAW, "Write task: preference, and chat: [prompt, chosen, rejected]"),
    "answers with labels": ("prompts", formatted("prompt", "secret", completion="a", label=True), RAW, "single answers with a label (KTO)"),
    "a chat in a text column": ("prompts", jsonl(text=[ASKED, ANSWER]), RAW, "in row 3 of mails.jsonl, got none. It is a list of turns: a chat. Write chat: [COLUMN]"),
    "parquet": ("texts", lambda: Path("mails.parquet").write_bytes(b"PAR1"), ["--data.train", "mails.parquet"], "'mails.parquet'"),
    "a data set on disk": ("texts", lambda: Path("mails").mkdir(), ["--data.train", "mails"], "'mails'"),
    # chats
    "another format of chats": ("chats", chat(conversations=[{"from": "human", "value": "secret"}], messages=...), [], "The rows have conversations: chats. Write chat: [conversations]"),
    "no answer": ("chats", chat(messages=[ASKED]), [], "The chat in row 3 of chats.jsonl cannot be used. Expected a turn of the assistant to learn from"),
    "an empty answer": ("chats", chat(messages=[ASKED, {"role": "assistant", "content": ""}]), [], "in row 3 of chats.jsonl cannot be used. Expected each turn of the assistant to say something"),
    "no chat": ("chats", chat(messages=[]), [], "in row 3 of chats.jsonl cannot be used. Expected a turn of the assistant"),
    "null for a chat": ("chats", chat(messages=None), [], "in the column 'messages' in row 3 of chats.jsonl, got none"),
    "a text for a chat": ("chats", chat(messages="secret"), [], "in row 3 of chats.jsonl cannot be used. Expected a list of turns"),
    "an unknown role": ("chats", chat(messages=[{"role": "secret", "content": "secret"}]), [], "in row 3 of chats.jsonl cannot be used. Expected turns of system, developer, user"),
    "images in a chat of texts": ("chats", chat(messages=[{"role": "user", "content": [{"type": "image"}]}, ANSWER]), [], "in row 3 of chats.jsonl cannot be used. Expected a chat of texts, got one with images"),
    "no chat template": ("chats", template(None), [], "in row 1 of chats.jsonl cannot be used. Expected a tokenizer with a chat template, got 'tiny'"),
    "a template that rewrites turns": ("chats", template(chat_jobs.THINKS), [], "Expected a chat template that writes each turn once and for all, got that of 'tiny'"),
    "a template without system turns": ("chats", template(chat_jobs.STRICT), [], "in row 1 of chats.jsonl cannot be used. Expected a chat that the chat template of 'tiny' takes"),
    # pairs of chats
    "another prompt": ("pairs", pair(chosen=[ASKED, ANSWER]), [], f"{PAIR} two chats with one prompt"),
    "one chat goes on": ("pairs", pair(chosen=[ASKED, ANSWER], rejected=[ASKED, ANSWER, ASKED, ANSWER]), [], f"{PAIR} two chats with one prompt"),
    "equal chats": ("pairs", pair(**{name: [ASKED, ANSWER] for name in GIVEN}), [], f"{PAIR} two answers, got a pair of equal ones"),
    "equal tokens": ("pairs", pair(chosen=GIVEN["chosen"], rejected=[ASKED, {"role": "assistant", "content": "goal  "}]), [], f"{PAIR} two answers that differ in the max_length=24 tokens"),
    "equal where they are cut": ("pairs", pair(**{name: [ASKED, {"role": "assistant", "content": f"{name} {'goal ' * 40}"}] for name in GIVEN}), [], f"{PAIR} two answers that differ in the max_length=24 tokens"),
    "an empty turn": ("pairs", pair(rejected=[ASKED, {"role": "assistant", "content": ""}]), [], f"{PAIR} each turn of the assistant to say something"),
    "a blank turn": ("pairs", pair(rejected=[ASKED, {"role": "assistant", "content": " \n"}]), [], f"{PAIR} each turn of the assistant to say something"),
    "a chat that ends with a question": ("pairs", pair(chosen=[ASKED], rejected=[ASKED]), [], f"{PAIR} two answers, got a pair of equal ones"),
    "no chat of one answer": ("pairs", pair(rejected=[]), [], f"{PAIR} two chats with one prompt"),
    "null for an answer": ("pairs", pair(rejected=None), [], "in the column 'rejected' in row 3 of pairs.jsonl, got none"),
    "no column of an answer": ("pairs", pair(rejected=...), [], "in the column 'rejected' in row 3 of pairs.jsonl, got none"),
    "texts for chats": ("pairs", pairs_of(prompt="secret", chosen="goal", rejected="bank"), [], "Expected a list of turns, each with role and content"),
    "a prompt of its own that is not named": ("pairs", pairs_of(prompt=[ASKED], **ANSWERS), [], "Name the columns of the prompt before those of the answers: columns [prompt, chosen, rejected], in a job data.chat: [prompt, chosen, rejected]"),
    "a prompt that the chats have": ("pairs", pairs_of(prompt="secret", **GIVEN), PROMPT, "name them alone: columns [chosen, rejected], in a job data.chat: [chosen, rejected]"),
    "a prompt that is lacking": ("pairs", lambda: None, PROMPT, "Expected a text in the column 'prompt' in row 1 of pairs.jsonl, got none. The rows have pairs of chats. Write task: preference, and chat: [chosen, rejected]"),
    "chats for texts": ("pairs", pairs_of(prompt="secret", **GIVEN), TEXTS, "in the column 'chosen' in row 1 of pairs.jsonl, got none. The rows have pairs of chats. Write task: preference, and chat: [chosen, rejected]"),
    "a prompt of turns for a text": ("pairs", pairs_of(prompt=[ASKED], **ANSWERS), TEXTS, "Write task: preference, and chat: [prompt, chosen, rejected]"),
    "chats written as texts": ("pairs", pairs_of(prompt="secret", **{name: json.dumps(chat) for name, chat in GIVEN.items()}), TEXTS, "Expected texts in row 1 of pairs.jsonl, got turns of a chat, written as a text, in chosen, rejected. Write chat: [COLUMN]"),
    "chats as Python writes them": ("pairs", pair(**{name: str(chat) for name, chat in GIVEN.items()}), [], f"{PAIR} turns of a chat as a list, or as a text of JSON"),
    "single chats": ("pairs", pairs_of(messages=[ASKED, ANSWER]), [], "The rows have messages: chats. Write chat: [messages] in the section data, with task causal_lm"),
    "answers with labels for pairs": ("pairs", pairs_of(prompt="secret", completion="goal", label=True), TEXTS, "single answers with a label (KTO). The task preference takes two answers"),
    "equal texts": ("pairs", pairs_of(prompt="secret", chosen="goal", rejected="goal"), TEXTS, "The pair in row 1 of pairs.jsonl cannot be used. Expected two answers that differ"),
    "texts equal where they are cut": ("pairs", pairs_of(prompt="secret", chosen="goal " * 40, rejected="goal " * 41), TEXTS, "Expected two answers that differ in the max_length=24 tokens"),
    "images in a pair": ("pairs", pair(**{name: [{"role": "user", "content": [{"type": "image"}]}, *chat[1:]] for name, chat in GIVEN.items()}), [], f"{PAIR} a chat of texts, got one with images"),
    "tools that the template leaves out": ("pairs", both(template(chat_jobs.THINKS), pair(chosen=[ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "secret", "arguments": "{}"}}]}], rejected=GIVEN["rejected"])), [], f"{PAIR} a chat template that writes tool calls"),
    "a call in no JSON": ("pairs", pair(chosen=[ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "goal", "arguments": "{secret"}}]}], rejected=GIVEN["rejected"]), [], f"{PAIR} tool calls in JSON in a chat"),
    "no template for a pair": ("pairs", template(None), [], "The pair in row 1 of pairs.jsonl cannot be used. Expected a tokenizer with a chat template, got 'tiny'"),
    "a template that takes no system turn": ("pairs", both(template(chat_jobs.STRICT), pair(**{name: [{"role": "system", "content": "secret"}, *chat] for name, chat in GIVEN.items()})), [], f"{PAIR} a chat that the chat template of 'tiny' takes"),
    "a template of the last answer alone": ("pairs", template("{{ messages[-1].content }}{% if add_generation_prompt %}label : {% endif %}"), [], "in row 1 of pairs.jsonl cannot be used. Expected a chat template that writes each turn once and for all"),
    "one file in another format": ("pairs", pair(chosen=ANSWERS["chosen"], rejected=ANSWERS["rejected"]), [], f"{PAIR} whole chats, got a pair that begins with what the assistant says"),
    "an image that LLaVA's text lacks": ("llava", llava(conversations=[{"from": "human", "value": "secret"}, {"from": "gpt", "value": "red"}]), [], "in row 3 of data.json cannot be used. Expected a part of a turn, or <image> in its text, for each of the 1 images"),
    "an object for the path of an image": ("llava", llava(image={"path": "secret"}), [], "in row 3 of data.json cannot be used. Expected a path, or a list of paths, of the images of a chat"),
    "objects for the path of an image": ("llava", llava(image=[{"path": "secret"}]), [], "in row 3 of data.json cannot be used. Expected a path, or a list of paths, of the images of a chat"),
    "a number for the path of an image": ("llava", llava(image=7), [], "in row 3 of data.json cannot be used. Expected a path, or a list of paths, of the images of a chat"),
    "an image that the row lacks": ("llava", llava(image=None), [], "in row 3 of data.json cannot be used. Expected a part of a turn, or <image> in its text, for each of the 0 images of a chat, got 1"),
    "a missing image of a chat": ("llava", llava(image="secret.png"), [], "Expected an image file for row 3 of data.json"),
    "two images for one": ("llava", llava(image=["images/000.png", "images/001.png"], conversations=[{"from": "human", "value": "<image> <image> secret"}, {"from": "gpt", "value": "red"}]), [], "at most data.max_images=1 images in row 3"),
    "a damaged list": ("texts", lambda: Path("mails.json").write_text('[{"text": "secret"'), ["--data.train", "mails.json"], "a list of JSON objects in 'mails.json', which is none"),
    "a damaged gz": ("texts", lambda: Path("mails.jsonl.gz").write_bytes(gzip.compress(b"secret")[:-9]), ["--data.train", "mails.jsonl.gz"], "a table that can be read, got 'mails.jsonl.gz'"),
    "no gz": ("texts", lambda: Path("mails.jsonl.gz").write_bytes(b"secret"), ["--data.train", "mails.jsonl.gz"], "Not a gzipped file"),
    # images
    "text among images": ("images", photo("0.txt", b"secret"), [], f"got another in {PLACE} which would be left out"),
    "no suffix": ("images", photo("0", b"secret"), [], f"got another in {PLACE} which would be left out"),
    "damaged png": ("images", damaged("0.png"), [], f"The image of {PLACE} cannot be used"),
    "damaged jpg": ("images", damaged("0.jpg"), [], f"The image of {PLACE} cannot be used"),
    "damaged webp": ("images", damaged("0.webp"), [], f"The image of {PLACE} cannot be used"),
    "damaged tif": ("images", damaged("0.tif"), [], f"The image of {PLACE} cannot be used"),
    "empty file": ("images", photo("0.png", b""), [], f"The image of {PLACE} cannot be used"),
    "text named png": ("images", photo("0.png", b"secret"), [], "it is of no format that is known"),
    "a link that leads nowhere": ("images", lambda: Path("photos/bars/0.png").symlink_to("secret"), [], f"got another in {PLACE} which would be left out"),
    "a link to a folder": ("images", lambda: Path("photos/bars/0").symlink_to("../flat"), [], f"got another in {PLACE} which would be left out"),
    "floats beyond 1": ("images", photo("0.tif", GREY.astype(np.float32)), [], "floats from 0 to 1, got one with others"),
    "NaN pixels": ("images", photo("0.tif", np.full((8, 8), np.nan, np.float32)), [], "floats from 0 to 1"),
    "32 bits": ("images", photo("0.tif", GREY.astype(np.int32)), [], "floats from 0 to 1, got one with others"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_can_be_seen_beforehand_costs_nothing(job, name):
    kind, change, flags, message = FAULTS[name]
    job(kind)
    change()
    result = train("--output_dir", "other", *flags)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert "secret" not in result.output
    assert "Traceback" not in result.output
    assert not Path("other").exists()


# What is missing, and may be


def test_the_same_table_in_every_format(job):
    """And Alpaca's, by the line that its error tells."""
    job("prompts")
    text = Path("mails.jsonl").read_text()
    table = [json.loads(line) for line in text.splitlines()]
    Path("mails.json").write_text(json.dumps(table, indent=1))
    Path("lines.json").write_text(text)
    for name in ("mails.jsonl", "mails.json"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    tables = [
        read_table(name, ["text", "label"]) for name in ("mails.json", "lines.json", "mails.jsonl.gz", "mails.json.gz")
    ]
    assert all(found == read_table("mails.jsonl", ["text", "label"]) for found in tables)
    alpaca = [{"instruction": row["label"], "input": "", "output": row["text"]} for row in table]
    write_rows("mails.jsonl", alpaca)
    asked = read_job("job.yaml", ["--prompt_template", "{instruction} {input} ", "--text_column", "output"])
    assert len(read_records(asked, load_processing(asked)).train) == 120


def test_missing_values_of_a_table_are_one_thing(job):
    """Numbers that are missing share a feature, and categories the one of unknown values, whatever the file."""
    job("table")
    given = {"null": None, "nan": float("nan"), "empty": "", "blank": " "}
    found = {}
    for name, value in given.items():
        person(age=value, work=value)()
        asked = read_job("job.yaml", [*PEOPLE, "--data.missing", "feature", "--eval_fraction", "0"])
        found[name] = read_records(asked, load_processing(asked)).train[2]["features"].tolist()
    write_csv(
        Path("people.csv"), [row | ({"age": "", "work": ""} if i == 2 else {}) for i, row in enumerate(people(40))]
    )
    asked = read_job("job.yaml", ["--data.missing", "feature", "--eval_fraction", "0"])
    found["csv"] = read_records(asked, load_processing(asked)).train[2]["features"].tolist()
    assert found["null"][:3] == [0, 0, 1]
    assert found["null"][-4:] == [0, 0, 0, 1]
    assert len({tuple(each) for each in found.values()}) == 1


def test_a_missing_part_of_a_prompt_is_an_empty_text(job):
    job("prompts")
    texts = {}
    for name, value in {"null": None, "nan": float("nan"), "empty": ""}.items():
        jsonl(label=value)()
        asked = read_job("job.yaml", [])
        texts[name] = read_records(asked, load_processing(asked)).train[2]
    assert texts["null"] == texts["nan"] == texts["empty"]


# Images: one rule for each kind of pixel

RAMP = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)
COLOURS = np.stack([RAMP, RAMP.T, 255 - RAMP], -1)
CLEAR = np.where(np.arange(256).reshape(16, 16) < 128, 0, 255).astype(np.uint8)
over_white = np.where(CLEAR[..., None] == 0, 255, COLOURS)


def palette(folder):
    Image.fromarray(RAMP).convert("P").save(folder / "a.png")


def clear_palette(folder):
    picture = Image.fromarray(RAMP).convert("P")
    picture.info["transparency"] = 0
    picture.save(folder / "a.png")


def turned(folder):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rows of the file are columns of the picture, from the right
    Image.fromarray(COLOURS).save(folder / "a.png", exif=exif)


def grey(values):
    return np.repeat(values[..., None], 3, -1)


PICTURES = {  # how a file is written -> its pixels
    "16 bits, png": (lambda f: Image.fromarray(RAMP.astype(np.uint16) * 257).save(f / "a.png"), grey(RAMP)),
    "16 bits, tif": (lambda f: Image.fromarray(RAMP.astype(np.uint16) * 257).save(f / "a.tif"), grey(RAMP)),
    "16 bits, dark": (lambda f: Image.fromarray(RAMP.astype(np.uint16)).save(f / "a.png"), grey((RAMP > 128).astype(np.uint8))),
    "16 bits, pgm": (lambda f: (f / "a.pgm").write_bytes(b"P5 16 16 65535\n" + (RAMP.astype(">u2") * 257).tobytes()), grey(RAMP)),
    "floats": (lambda f: Image.fromarray((RAMP / 255).astype(np.float32)).save(f / "a.tif"), grey(RAMP)),
    "one bit": (lambda f: Image.fromarray(RAMP > 100).save(f / "a.png"), grey(np.where(RAMP > 100, 255, 0))),
    "palette": (palette, grey(RAMP)),
    "palette with a clear colour": (clear_palette, grey(np.where(RAMP == 0, 255, RAMP))),
    "alpha": (lambda f: Image.fromarray(np.dstack([COLOURS, CLEAR])).save(f / "a.png"), over_white),
    "grey and alpha": (lambda f: Image.fromarray(np.dstack([RAMP, CLEAR])).save(f / "a.png"), grey(np.where(CLEAR == 0, 255, RAMP))),
    "CMYK": (lambda f: Image.fromarray(COLOURS).convert("CMYK").save(f / "a.tif"), COLOURS),
    "turned": (turned, np.rot90(COLOURS, -1)),
    "webp": (lambda f: Image.fromarray(COLOURS).save(f / "a.webp", lossless=True), COLOURS),
    "bmp": (lambda f: Image.fromarray(COLOURS).save(f / "a.bmp"), COLOURS),
    "gif": (lambda f: Image.fromarray(RAMP).save(f / "a.gif"), grey(RAMP)),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_of_every_kind_have_one_rule(tmp_path, name):
    """From a file and from a picture in memory; nothing is saturated."""
    write, expected = PICTURES[name]
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    found = np.asarray(opened(path, None))
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(opened(picture, None)), found)


def test_every_suffix_that_pillow_reads_is_a_record(job):
    """Classes whose files end in .webp and .tif have their share; what systems put into folders is no record."""
    job("images")
    shutil.rmtree("photos")
    write_photos(Path("photos"), 24)
    for path in [*Path("photos/flat").iterdir()]:
        with Image.open(path) as picture:
            picture.save(path.with_suffix(".webp"), lossless=True)
        path.unlink()
    for path in [*Path("photos/bars").iterdir()]:
        with Image.open(path) as picture:
            picture.save(path.with_suffix(".TIF"))
        path.unlink()
    Path("photos/flat/.DS_Store").write_bytes(b"x")
    Path("photos/flat/Thumbs.db").write_bytes(b"x")
    asked = read_job("job.yaml", ["--eval_fraction", "0"])
    found = read_records(asked, ScatteringFeatures(8, 8)).train
    assert [record["labels"] for record in found] == [0] * 12 + [1] * 12


def test_predictions_name_the_image_that_cannot_be_read(tmp_path):
    folder = write_photos(tmp_path / "photos", 4)
    (folder / "flat" / "1.png").write_bytes(b"none")
    with pytest.raises(
        InvalidArgument, match=r"The image '.*flat/1.png' cannot be used. Expected an image that can be read"
    ):
        list(_records(ScatteringFeatures(8, 8), folder))


# What is told


@pytest.mark.parametrize("flags", [["--max_length", "16"], ["--prompt_template", "null", "--max_length", "16"]])
def test_lengths_of_texts_are_not_told(job, caplog, flags):
    """A tokenizer that knows the most tokens of its model warns of a longer text, with its length."""
    job("prompts")
    config = json.loads(Path("tiny/tokenizer_config.json").read_text())
    Path("tiny/tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 16}))
    jsonl(text="goal " * 701, label="bank " * 701)()
    result = train("--dry-run", "--batch_size", 8, "--dp_delta", "0.05", *flags)
    assert result.exit_code == 0, result.output
    assert "701" not in result.output + caplog.text
    assert "longer than" not in result.output + caplog.text


# Memory


def test_features_are_rows_of_one_tensor_and_in_the_estimate(job):
    job("images")
    asked = read_job("job.yaml", ["--eval_fraction", "0"])
    front = ScatteringFeatures(8, 8)
    found = [record["features"] for record in read_records(asked, front).train]
    assert {each.data_ptr() - found[0].data_ptr() for each in found} == {4 * front.size * i for i in range(len(found))}
    assert all(
        torch.equal(each, front.encode(path))
        for each, path in zip(found, visible_files(Path("photos/flat")), strict=False)
    )
    result = train("--dry-run", "--eval_fraction", "0")
    assert f"features {100 * 4 * front.size / 2**20:.3g}" in result.stdout


@pytest.mark.slow
def test_features_take_the_memory_that_they_need(tmp_path):
    """Resident memory of a new process grows by at most three times their size, and 30 MiB; it was by 20 times."""
    write_photos(tmp_path / "photos", 700)
    (tmp_path / "job.yaml").write_text(feature_jobs.IMAGES.replace("[8, 8]", "[28, 28], grey: true"))
    grown, needed = map(float, subprocess.run(
        [sys.executable, "-c", _GROWTH], cwd=tmp_path, env=text_job.ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout.split())  # fmt: skip
    assert grown <= 3 * needed + 30
    assert needed > 10


_GROWTH = """
from pathlib import Path
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._model import load_processing

resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
job = read_job("job.yaml", [])
front = load_processing(job)
front.encode(next(Path("photos/flat").iterdir()))
before = resident()
records = read_records(job, front)
print(resident() - before, (len(records.train) + len(records.evaluation)) * front.size * 4 / 2**20)
"""


# Warnings that come before the first step


WARNED = {  # kind of job, flags -> a line before the first step
    "a spent budget": ("table", ["--spent", "spent.json", "--steps", 20], "Expected noise with room for at least 100 trained parameters"),
}  # fmt: skip


@text_job.MODES
@pytest.mark.parametrize("name", WARNED)
def test_what_will_not_be_learnt_is_said_before_the_first_step(job, monkeypatch, caplog, name, mode):
    kind, flags, message = WARNED[name]
    job(kind)
    ledger = Ledger((Event(0.3125, 1.0, 6),))
    Path("spent.json").write_text(ledger.to_json())
    text_job.at_events(monkeypatch, on_train_begin=text_job.interrupt_at(0))
    budget = ledger.epsilon(1e-3).epsilon + 1e-3
    result = train(*flags, "--dp_epsilon", budget, *mode)
    assert message in result.output + caplog.text  # of the Trainer, by its logger
    assert mode or "nothing was spent" in result.output


# The model of a job, its records and its settings


def model_of(kind):
    """A model of this kind in the folder of the job, in which the tokenizer's words are."""

    return lambda: MODELS[kind]().save_pretrained("tiny")


IDS = {"vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "t5": lambda: T5Config(**IDS, **T5, decoder_start_token_id=0),
    "bart": lambda: BartConfig(**IDS, **BART, max_position_embeddings=64),
    "roberta": lambda: RobertaConfig(**IDS, **ENCODER, max_position_embeddings=18),
    "small llama": lambda: LlamaConfig(**{**IDS, "vocab_size": 20}, **ENCODER, max_position_embeddings=64),
    "bert": lambda: BertConfig(**IDS, **ENCODER, max_position_embeddings=64),
    "small bert": lambda: BertConfig(**{**IDS, "vocab_size": 20}, **ENCODER, max_position_embeddings=64),
}


def unknown_word():
    """One record in the midst has a word beyond the tables of the model; the others have few words."""

    def write():
        table = [{"label": row["label"], "text": f"the a was mail{i}"} for i, row in enumerate(rows(60))]
        table[41]["text"] = "the profit market"  # the last words of the tokenizer
        write_rows("mails.jsonl", table)

    return write


def padding_last():
    """The padding token is the last of the tokenizer."""
    config = json.loads(Path("tiny/tokenizer_config.json").read_text())
    Path("tiny/tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "money"}))


HEAD = ["--init", "random", "--pooling", "model"]
TABLES = "as the tables of this model have them; got others in at least one record, which is private and not shown"
JOBS = {
    "a token beyond the table": ("texts", both(model_of("small bert"), unknown_word()), HEAD, TABLES),
    "a token beyond the table of a language model": ("prompts", both(model_of("small llama"), unknown_word()), ["--prompt_template", "null"], TABLES),
    "a padding token beyond the table": ("prompts", both(model_of("small llama"), padding_last), [], "got 20 rows in 'tiny' and none for money. Name what is new in model.new_tokens"),
    "one token of another model's tokenizer": ("prompts", model_of("small llama"), ["--model.new_tokens", "money"], "none for profit, market, sport. Name"),
    "a new token in a job whose method does not train it": ("prompts", model_of("small llama"), ["--model.new_tokens", "money", "--lora.method", "vera"], "Expected no model.new_tokens with"),
    "more tokens than RoBERTa has positions": ("texts", model_of("roberta"), [*HEAD, "--max_length", 18], "Expected data.max_length <= 17"),
    "more tokens than BERT has positions": ("texts", model_of("bert"), [*HEAD, "--max_length", 65], "Expected data.max_length <= 64"),
}  # fmt: skip


@text_job.MODES
@pytest.mark.parametrize("name", JOBS)
def test_what_a_model_cannot_take_costs_nothing(job, name, mode):
    kind, change, flags, message = JOBS[name]
    job(kind)
    change()
    result = train("--output_dir", "other", *flags, *mode)
    assert result.exit_code == 1, result.output
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output
    assert count_steps(Path("other/privacy_journal.jsonl")) == 0


def ending():
    """The tokenizer puts an end token behind each text, as those of T5 and BART do; labels are numbers in half of them."""
    tokenizer = json.loads(Path("tiny/tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, end], "pair": [text, end],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }  # fmt: skip
    Path("tiny/tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("task", ["texts", "numbers"])
@pytest.mark.parametrize("kind", ["t5", "bart", "roberta"])
def test_classifiers_of_every_kind_end_with_their_metrics(job, task, kind):
    """T5 and BART give hidden states after their logits; RoBERTa has fewer positions than its configuration says."""
    job(task)
    model_of(kind)()
    ending()
    if task == "numbers":
        write_rows("mails.jsonl", [{**row, "label": i % 2} for i, row in enumerate(rows(60))])
    result = train(
        *HEAD, "--strategy", "full", "--steps", 1, "--batch_size", 8, "--dp_delta", "0.01", "--max_length", 16
    )
    assert result.exit_code == 0, result.output
    measured = json.loads(Path("run/metrics.json").read_text())
    assert ("eval_accuracy" if task == "texts" else "eval_rmse") in measured
