"""Records of a job: prompts and responses, words, numbers, pairs, translations, several images; and batches of few
lengths."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_job import TOPICS, rows, train, trained, write_job, write_model, write_rows, write_table
from transformers import AutoTokenizer

from dpfunc._utils.validation import signed
from dpfunc.errors import InvalidArgument
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.vision_language.tiny_llava import write as write_llava
from dpfunc.train._collate import PadRight, collator
from dpfunc.train._config_file import read_job
from dpfunc.train._dataset import read_records
from dpfunc.train._dry_run import dry_run
from dpfunc.train._metrics import classification
from dpfunc.train._model import choose_parameters, load_base, load_processing
from dpfunc.train._recipe import with_shape
from dpfunc.train._records import language_record, prompt_ids
from dpfunc.train.config import TASKS, DataSection
from dpfunc.train.tables import is_held_out, read_table


def words_of(row):
    return row["text"].split()


TABLES = {  # task -> the rows of its table
    "token_classification": lambda row, i: {
        "text": words_of(row), "label": ["TOPIC" if word in TOPICS[row["label"]] else "O" for word in words_of(row)],
    },
    "text_regression": lambda row, i: {"text": row["text"], "label": 1.0 if row["label"] == "sport" else -0.5},
    "text_classification": lambda row, i: {**row, "other": f"the market {i}"},
    "seq2seq": lambda row, i: row,
    "causal_lm": lambda row, i: row,
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A function that writes the job of a task, with its model and its table, into the present folder."""
    monkeypatch.chdir(tmp_path)

    def made(task, kind):
        write_job(tmp_path, task, kind)
        write_rows("mails.jsonl", [TABLES[task](row, i) for i, row in enumerate(rows(120))])
        if kind == "bert":
            Path("job.yaml").write_text(Path("job.yaml").read_text().replace(", init: random", ""))
        return tmp_path

    return made


def prepared(*flags):
    job = with_shape(read_job("job.yaml", flags))
    processing = load_processing(job)
    return job, processing, read_records(job, processing)


RUNS = {  # task -> model, flags, lines of the report, and what is in metrics.json
    "token_classification": (
        "bert", ["--strategy", "head"], ["eval_accuracy: 0.", "most frequent class of the evaluation records: 0.5"],
        {"eval_loss", "eval_accuracy", "eval_majority"},
    ),
    "text_regression": (
        "bert", ["--strategy", "head"],
        ["Frozen layers were computed once", "eval_rmse: ", "eval_rmse of their mean as the prediction for all: 0.7"],
        {"eval_loss", "eval_rmse", "eval_rmse_of_mean"},
    ),
    "seq2seq": ("t5", [], ["eval_loss: ", "for PeftModel.from_pretrained(base model, path)"], {"eval_loss"}),
}  # fmt: skip


@pytest.mark.parametrize("task", RUNS)
def test_a_run_of_each_task(place, task):
    kind, flags, lines, names = RUNS[task]
    place(task, kind)
    result = train(*flags, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert [line for line in lines if line not in result.stdout] == []
    measured = json.loads(Path("run/metrics.json").read_text())
    assert names <= measured.keys()
    if task == "text_regression":
        assert measured["eval_loss"] == pytest.approx(measured["eval_rmse"] ** 2, rel=1e-3)


def test_a_table_of_texts_alone(place):
    """The records of a .txt are those of a .jsonl with one object a line."""
    place("causal_lm", "llama")
    table = rows(60)
    Path("mails.txt").write_text("".join(f"{row['text']}\n\n" for row in table))
    write_rows("texts.jsonl", [{"text": row["text"]} for row in table])
    flags = ["--prompt_template", "null", "--data.train"]
    assert prepared(*flags, "mails.txt")[2].train == prepared(*flags, "texts.jsonl")[2].train
    result = train(*flags, "mails.txt", "--steps", 1, "--batch_size", 8)
    assert result.exit_code == 0, result.output


def test_a_tokenizer_without_an_end_token_gets_one(place):
    """The advice of the error is followed, word for word."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place("causal_lm", "llama")
    PreTrainedTokenizerFast(tokenizer_file="tiny/tokenizer.json", unk_token="<unk>").save_pretrained("endless")
    advice = re.escape(
        "Expected an end-of-text token in the tokenizer of 'endless', which has none. Name one of its tokens, by "
        "tokenizer.eos_token = '...' and tokenizer.save_pretrained(folder), and the folder in model.tokenizer."
    )
    with pytest.raises(InvalidArgument, match=advice):
        prepared("--model.tokenizer", "endless")
    tokenizer = AutoTokenizer.from_pretrained("endless")
    tokenizer.eos_token = "</s>"
    tokenizer.save_pretrained("ending")
    _, processing, records = prepared("--model.tokenizer", "ending")
    assert {record["input_ids"][-1] for record in records.train} == {processing.eos_token_id} == {2}
    assert processing.pad_token == "</s>"


@pytest.mark.parametrize(
    ("task", "kind"), [("token_classification", "bert"), ("text_regression", "gpt2"), ("seq2seq", "t5")]
)
def test_the_loss_of_a_record_is_the_models_own(place, task, kind):
    """Of a batch of this record alone; the records are as the task says."""
    place(task, kind)
    job, processing, records = prepared("--init", "random")
    model = choose_parameters(load_base(job, processing), job, processing).eval()
    loss_fn = make_loss_fn(lambda params, **inputs: model(**inputs), TASKS[task].loss)
    with torch.no_grad():
        for record in records.train[:3]:
            batch = collator(job, processing)([record])
            own = {name: value for name, value in batch.items() if name != "labels"}
            if task == "seq2seq":  # shifted to the right by the model
                own["decoder_input_ids"] = model.get_base_model().prepare_decoder_input_ids_from_labels(batch["labels"])
            torch.testing.assert_close(loss_fn({}, {**own, "labels": batch["labels"]})[0], model(**batch).loss)


def test_metrics_of_classes():
    """Words without a label count in none; and a rare class counts as much as another one."""
    logits = np.zeros((1, 4, 2))
    logits[0, :, 1] = [1, -1, 1, 1]
    measured = classification(SimpleNamespace(predictions=logits, label_ids=np.array([[1, 1, -100, -100]])))
    assert measured == {"accuracy": 0.5, "majority": 1.0, "balanced_accuracy": 0.5, "loss_of_shares": 0.0}
    assert classification(SimpleNamespace(predictions=logits, label_ids=np.full((1, 4), -100))) == {}
    measured = classification(SimpleNamespace(predictions=np.array([[1, 0]] * 4), label_ids=np.array([0, 0, 0, 1])))
    entropy = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    expected = {"accuracy": 0.75, "majority": 0.75, "balanced_accuracy": 0.5, "loss_of_shares": entropy}
    assert measured == pytest.approx(expected)


def test_a_label_is_at_the_first_token_of_its_word(place):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place("token_classification", "bert")
    pieces = {word: i for i, word in enumerate(["<pad>", "<unk>", "</s>", "play", "##ing", "goal", "the"])}
    known = Tokenizer(models.WordPiece(pieces, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="</s>").save_pretrained("pieces")
    write_rows("mails.jsonl", [
        {"text": ["the", "playing", "goal"], "label": ["O", "TOPIC", "TOPIC"]}, {"text": "goal the", "label": "TOPIC O"},
        {"text": ["the"] * 15 + ["playing", "goal"], "label": ["O"] * 16 + ["TOPIC"]},
    ])  # fmt: skip
    _, _, records = prepared("--model.tokenizer", "pieces", "--eval_fraction", "0")
    first, second, long = records.train
    assert first == {"input_ids": [6, 3, 4, 5], "labels": [0, 1, -100, 1]}
    assert second == {"input_ids": [5, 6], "labels": [1, 0]}
    assert long["labels"] == [0] * 16
    assert len(long["input_ids"]) == 16


def test_the_decoder_learns_where_a_response_ends(place):
    place("seq2seq", "t5")
    job, tokenizer, records = prepared("--max_length", "8")
    for record in records.train[:20]:
        assert record["labels"][-1] == tokenizer.eos_token_id
        assert len(record["labels"]) <= 8
        assert tokenizer.decode(record["input_ids"][:3]) in ("label : sport", "label : money")
    batch = collator(job, tokenizer)([{"input_ids": [5, 6], "labels": [7] * 5}, {"input_ids": [5] * 3, "labels": [2]}])
    assert batch["labels"].shape == (2, 8)
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"][1].tolist() == [2] + [-100] * 7


def test_pairs_have_two_kinds_of_tokens(place):
    from transformers import PreTrainedTokenizerFast

    place("text_classification", "bert")
    words = {"pad_token": "<pad>", "eos_token": "</s>", "model_input_names": ["input_ids", "token_type_ids"]}
    PreTrainedTokenizerFast(tokenizer_file="tiny/tokenizer.json", **words).save_pretrained("kinds")
    flags = ["--text_pair_column", "other", "--model.tokenizer", "kinds"]
    job, processing, records = prepared(*flags)
    assert job.model.pooling == "model"
    first = records.train[0]
    assert sorted(set(first["token_type_ids"])) == [0, 1]
    batch = collator(job, processing)(records.train[:2])
    assert batch["token_type_ids"].shape == batch["input_ids"].shape
    assert train(*flags, "--dry-run").exit_code == 0
    mean = train(*flags, "--pooling", "mean", "--dry-run")
    assert "Expected model.pooling: mean with classes or numbers of single texts" in mean.stderr


BAD_ROWS = {  # task, the second row, message
    "another label": ("token_classification", {"text": ["secret"], "label": ["secret"]}, "Expected one of data.labels (O, TOPIC) in row 2"),
    "too few labels": ("token_classification", {"text": ["secret", "a"], "label": ["O"]}, "in row 2 of mails.jsonl, got another number of them. Write"),
    "no words": ("token_classification", {"text": [], "label": []}, "in row 2 of mails.jsonl, got another number of them"),
    "nested words": ("token_classification", {"text": [["secret"]], "label": ["O"]}, "in row 2 of mails.jsonl"),
    "a missing word": ("token_classification", {"text": ["secret", None], "label": "O O"}, "in row 2 of mails.jsonl"),
    "no number": ("text_regression", {"text": "a", "label": "secret"}, "Expected a finite number in the column 'label' in row 2"),
    "nan": ("text_regression", {"text": "secret", "label": float("nan")}, "Expected a text in the column 'label' in row 2 of mails.jsonl, got none. It is empty, null or NaN"),
    "true": ("text_regression", {"text": "secret", "label": True}, "Expected a finite number in the column 'label' in row 2"),
    "a list of texts": ("text_regression", {"text": ["secret"], "label": 1.0}, "Expected a text in the column 'text' in row 2"),
}  # fmt: skip


@pytest.mark.parametrize(("task", "row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_cannot_be_used_are_named_by_number(place, task, row, message):
    place(task, "gpt2")
    write_rows("mails.jsonl", [TABLES[task](rows(1)[0], 0), row])
    with pytest.raises(InvalidArgument, match=re.escape(message)) as caught:
        prepared()
    assert "secret" not in str(caught.value)


REFUSED = {  # task, flags -> message
    "labels of numbers": ("text_regression", ["--labels", "a,b"], "Expected data.labels with task text_classification or token_classification or"),
    "pairs of words": ("token_classification", ["--text_pair_column", "b"], "data.text_pair_column with task text_classification or text_regression only"),
    "nothing to read": ("seq2seq", ["--prompt_template", "null"], "Expected what the encoder reads with task='seq2seq'"),
    "loss of the encoder": ("seq2seq", ["--loss_on", "all"], "data.loss_on with task causal_lm only"),
    "images of texts": ("seq2seq", ["--max_images", "2"], "data.max_images with task vqa only"),
    "a size of texts": ("seq2seq", ["--image_size", "4,4"], "data.image_size with task vqa or image_classification only"),
    "one size": ("seq2seq", ["--image_size", "4"], "data.image_size to be [height, width], both >= 1"),
    "no size": ("seq2seq", ["--image_size", "4,0"], "data.image_size to be [height, width], both >= 1"),
    "no number as a size": ("seq2seq", ["--image_size", "4,x"], "Expected an integer, got --image_size='x'"),
    "no image": ("seq2seq", ["--max_images", "0"], "data.max_images >= 1"),
    "no labels": ("token_classification", ["--labels", "null"], "Expected data.labels, the list of classes"),
    "a head of a translator": ("seq2seq", ["--strategy", "head"], "Expected strategy to be one of 'lora', 'full', 'bitfit'"),
}  # fmt: skip


@pytest.mark.parametrize(("task", "flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_the_task_is_refused(place, task, flags, message):
    place(task, "gpt2")
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        prepared(*flags)


def test_questions_may_have_several_images_or_none(tmp_path, monkeypatch):
    """Several images, one as a text, and none; sizes that are fitted; how many there may be is public."""
    write_llava(tmp_path, 24)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        "task: vqa\nstrategy: projector\noutput_dir: run\nmodel: {path: llava}\n"
        "data: {train: data.jsonl, max_length: 32, image_size: [24, 16], max_images: 2}\n"
        "privacy: {dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0}\n"
        "training: {learning_rate: 1e-2, batch_size: 8, steps: 1, physical_batch_size: 4}\n"
    )
    result = train("--max_images", 1, "--eval_fraction", 0.2, "--output_dir", "single")
    assert result.exit_code == 0, result.output
    assert "eval_loss" in result.stdout
    table = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    table[0]["image"] = [table[0]["image"], table[1]["image"]]
    table[2]["image"] = []
    write_rows("data.jsonl", table)
    job, processing, records = prepared()
    assert job.data.image_size == (24, 16)
    assert [len(record["images"]) for record in records.train[:4]] == [2, 1, 0, 1]
    collate = collator(job, processing)
    assert (collate.image_size, collate.max_images) == ((24, 16), 2)
    assert collate(records.train[:3])["pixel_values"].shape[:2] == (3, 2)
    result = train("--eval_fraction", 0.2)
    assert result.exit_code == 0, result.output
    assert "eval_loss" in result.stdout  # its batches have several images too
    write_rows("people.jsonl", [{**row, "author": f"a{index // 2}"} for index, row in enumerate(table)])
    of_people = ("--eval", "data.jsonl", "--train", "people.jsonl", *PEOPLE, "--batch_size", 4)
    result = train(*of_people, "--output_dir", "people")
    assert result.exit_code == 0, result.output
    assert "eval_loss" in result.stdout
    assert "(lora)" in train("--strategy", "lora", "--output_dir", "other", "--dry-run").stdout
    one = train("--max_images", 1, "--output_dir", "other")
    assert "Expected a text in the column 'image' in row 1" in one.stderr
    table[1]["image"] = [table[1]["image"]] * 3
    write_rows("data.jsonl", table)
    assert "at most data.max_images=2 images in row 2 of data.jsonl, got more." in train("--output_dir", "other").stderr
    Path(table[1]["image"][0]).unlink()
    assert "Expected an image file for row 1 of data.jsonl" in train("--output_dir", "other").stderr
    with pytest.raises(InvalidArgument, match="max_length >= 10"):
        collator(read_job("job.yaml", ["--max_length", "9"]), processing)


def test_prompts_are_not_learnt_and_ends_are(tmp_path):
    """A long prompt leaves room for the response."""
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path))
    data = DataSection("t.jsonl", max_length=16)
    record = language_record(tokenizer, "label : sport", "the goal", data)
    words = tokenizer.convert_ids_to_tokens(record["input_ids"])
    assert words == ["<s>", "label", ":", "sport", "the", "goal", "</s>"]
    assert record["labels"] == [-100] * 4 + record["input_ids"][4:]
    everything = language_record(tokenizer, "a", "b", DataSection("t.jsonl", loss_on="all"))
    assert everything["labels"] == [-100, *everything["input_ids"][1:]]
    record = language_record(tokenizer, "a " * 50 + "sport", "goal " * 50, data)
    words = tokenizer.convert_ids_to_tokens(record["input_ids"])
    assert len(words) == 16
    assert words[7:9] == ["sport", "goal"]
    assert prompt_ids(tokenizer, "a " * 50 + "sport", 8) == record["input_ids"][:8]


def test_batches_have_few_lengths():
    collate = PadRight(pad=9, max_length=40, multiple=8)
    batch = collate([{"input_ids": [1, 2, 3], "labels": 1}, {"input_ids": list(range(9)), "labels": 0}])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"][0, 3:].unique().tolist() == [9]
    assert collate([{"input_ids": [1] * 39, "labels": 1}])["input_ids"].shape == (1, 40)


def test_prompt_and_response_columns(place):
    place("causal_lm", "llama")
    flags = ["--prompt_template", "null", "--prompt_column", "label", "--response_column", "text"]
    _, tokenizer, records = prepared(*flags)
    first, plain = records.train[0], prepared(*flags[:2])[2].train[0]
    assert tokenizer.convert_ids_to_tokens(first["input_ids"])[:2] == ["<s>", "sport"]
    assert first["labels"][:2] == [-100, -100]
    assert plain["labels"][0] == -100 != plain["labels"][1]


def test_evaluation_from_a_table_of_its_own(place):
    write_table(place("causal_lm", "llama") / "more.jsonl", 10, seed=1)
    records = prepared("--data.eval", "more.jsonl")[2]
    assert (len(records.train), len(records.evaluation)) == (120, 10)
    records = prepared("--eval_fraction", "0.5")[2]
    assert len(records.train) + len(records.evaluation) == 120
    assert 30 < len(records.train) < 90
    with pytest.raises(InvalidArgument, match="data.eval or data.eval_fraction"):
        read_job("job.yaml", ["--eval_fraction", "0.5", "--eval", "more.jsonl"])


# People as the unit: what is one person, what a person gives, and what is refused

UNIT = "one person: all records with the same value of the column 'author'"
PEOPLE = ["--unit_column", "author", "--max_records_per_unit", "3"]


def authored(count=120, people=30):
    """Rows of people with 1 to 6 records each, and the rest of the first ones."""
    authors = [f"p{i}" for i in range(people) for _ in range(1 + i % 6)]
    authors = (authors * count)[:count]
    random.Random(0).shuffle(authors)
    return [{**row, "author": author} for row, author in zip(rows(count), authors, strict=True)]


@pytest.fixture
def authors(place):
    place("causal_lm", "llama")
    write_rows("mails.jsonl", authored())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run over people, and what it printed."""
    place = tmp_path_factory.mktemp("people")
    write_job(place)
    write_rows(place / "mails.jsonl", authored())
    return place, trained(place, *PEOPLE, "--eval_fraction", 0.2, "--batch_size", 6, "--dp_delta", 1e-2)


def test_the_accounting_says_that_a_person_is_protected(finished):
    place, output = finished
    record = json.loads((place / "run/privacy_accounting.json").read_text())
    assert record["unit"] == UNIT
    people = {row["author"] for row in authored()}
    assert record["dataset_size"] < len(people)  # without those who are held out
    assert record["expected_batch_size"] == pytest.approx(6)
    assert "add_remove, one person protected." in output
    assert "eval_loss" in output


def test_costs_for_records_and_for_people_do_not_add_up(finished, monkeypatch):
    place, _ = finished
    monkeypatch.chdir(place)
    flags = ["--eval_fraction", 0.2, "--dp_delta", 1e-2, "--dp_epsilon", 20, "--output_dir", "next", "--dry-run"]
    for spent in ("run/privacy_accounting.json", "run/privacy_journal.jsonl"):
        assert "with 4 steps of earlier runs" in train(*flags, *PEOPLE, "--batch_size", 6, "--spent", spent).stdout
        refused = train(*flags, "--batch_size", 6, "--spent", spent)
        assert refused.exit_code == 1
        assert "Their costs do not add up" in refused.stderr
    Path("bare.json").write_text(json.dumps(json.loads(Path("run/privacy_accounting.json").read_text())["ledger"]))
    unknown = train(*flags, *PEOPLE, "--batch_size", 6, "--spent", "bare.json")
    assert "which protected 'an unknown unit'" in unknown.stderr
    assert "with 4 steps of earlier runs" in train(*flags, "--batch_size", 6, "--spent", "bare.json").stdout
    own = {**json.loads(Path("run/privacy_accounting.json").read_text()), "unit": "one person: all texts of one author"}
    Path("own.json").write_text(json.dumps(signed(own)))  # of a DPTrainer, whose unit is a text of its user
    refused = train(*flags, "--batch_size", 6, "--spent", "own.json")
    assert "which protected 'one person: all texts of one author'" in refused.stderr
    assert not Path("next").exists()
    flags = ["--eval_fraction", 0.2, "--batch_size", 6, "--dp_delta", 1e-2, "--resume", "--dry-run"]
    assert train(*flags, *PEOPLE).exit_code == 0
    assert "data.unit_column was 'author', now None" in train(*flags).stderr  # nor does a run go on for the other


def test_accuracy_of_people_is_released(place):
    """The mean over the records of a person, in a run that ends; it failed at its first step."""
    place("text_classification", "bert")
    job = Path("job.yaml")
    job.write_text(job.read_text().replace("dp_max_grad_norm: 1.0", "dp_max_grad_norm: 1.0, dp_telemetry: [accuracy]"))
    write_rows("mails.jsonl", ({**row, "author": f"p{i % 60}"} for i, row in enumerate(rows(120))))
    flags = ["--strategy", "head", *PEOPLE, "--batch_size", "16", "--dp_delta", "0.01", "--steps", "2"]
    result = train(*flags)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("run/privacy_accounting.json").read_text())["global_step"] == 2


@pytest.mark.usefixtures("authors")
def test_the_dry_run_counts_people():
    job = read_job("job.yaml", [*PEOPLE, "--batch_size", "6", "--dp_delta", "1e-2", "--physical_batch_size", "4"])
    people = len({row["author"] for row in authored()})
    lines = "\n".join(dry_run(job))
    assert f"people: {people}, each of them protected, with at most 3 records each" in lines
    assert f"sampling probability: {6 / people:.4g} (Poisson)" in lines
    small = read_job("job.yaml", [*PEOPLE, "--batch_size", "6"])  # delta 1e-3 of the file is below 1 / people
    assert small.privacy.dp_delta < 1 / people
    with pytest.raises(InvalidArgument, match="dataset_size"):
        dry_run(read_job("job.yaml", [*PEOPLE, "--batch_size", str(people + 1)]))
    for flags in (PEOPLE[:2], PEOPLE[2:]):
        with pytest.raises(InvalidArgument, match="data.unit_column and data.max_records_per_unit together"):
            read_job("job.yaml", flags)
    with pytest.raises(InvalidArgument, match="data.max_records_per_unit >= 1"):
        read_job("job.yaml", [*PEOPLE[:3], "0"])


@pytest.mark.usefixtures("authors")
def test_a_person_is_the_mean_over_at_most_so_many_records():
    job, tokenizer, records = prepared(*PEOPLE)
    by_author = {}
    for row in authored():
        by_author.setdefault(row["author"], []).append(row)
    assert [len(own) for own in records.units] == [min(3, len(own)) for own in by_author.values()]
    for own, theirs in zip(records.units, by_author.values(), strict=True):
        texts = {" ".join(tokenizer.convert_ids_to_tokens(record["input_ids"])) for record in own}
        known = {" ".join(f"<s> label : {r['label']} text : {r['text']} </s>".split()[:16]) for r in theirs}
        known = {" ".join(tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(k.split()))) for k in known}
        assert texts <= known
    batch = collator(job, tokenizer)(records.units)
    assert batch["input_ids"].shape[:2] == batch["text_mask"].shape == (len(by_author), 3)
    assert batch["text_mask"].sum(1).tolist() == [len(own) for own in records.units]
    assert {len(own) for own in records.units} > {3}
    write_rows("mails.jsonl", [row for row in authored() if row["author"] != "p4"])  # who else is there changes nothing
    without = prepared(*PEOPLE)[2]
    drawn, left = ({tuple(tuple(r["input_ids"]) for r in own) for own in each.units} for each in (records, without))
    assert (left < drawn, len(drawn) - len(left)) == (True, 1)


people = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz")), max_size=20)


@given(table=people, own=st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=5), seed=st.integers(0, 5))
def test_one_person_more_changes_nothing_of_the_others(tmp_path_factory, table, own, seed):
    """Not what is a duplicate, not which side of the split they are on, and not which records are drawn."""
    folder = tmp_path_factory.mktemp("t")
    before = [{"author": "first", "text": "goal"}, *({"author": a, "text": t} for a, t in table)]
    places = range(0, 2 * len(own), 2)
    after = list(before)
    for place, text in zip(places, own, strict=True):
        after.insert(min(place, len(after)), {"author": "new", "text": text})
    found = []
    for table_of in (before, after):
        write_rows(folder / "t.jsonl", table_of)
        read = [*read_table(folder / "t.jsonl", ["text", "author"], unit="author").values()]
        sides = [[row for row in read if is_held_out(row, 0.4, seed, "author") == side] for side in (False, True)]
        found.append([[row for row in side if row["author"] != "new"] for side in sides])
        assert not {row["author"] for row in sides[0]} & {row["author"] for row in sides[1]}
    assert found[0] == found[1]


NOBODY = "Expected a person in the column 'author' in row 2"
NOBODYS = {  # the value of one row -> message
    "missing": ({}, f"{NOBODY} of mails.jsonl, got a row without that column. Name in data.unit_column"),
    "missing in a chat": ({"messages": [{"role": "user", "content": "secret"}]}, f"{NOBODY} of mails.jsonl, got a row"),
    "null": ({"author": None}, NOBODY),
    "a list": ({"author": ["secret"]}, NOBODY),
    "no sign that shows": ({"author": "\u200b "}, NOBODY),
    **{str(value): ({"author": value}, NOBODY) for value in ("", "  ", 7.5, float("nan"), True)},
}


@pytest.mark.parametrize(("values", "message"), NOBODYS.values(), ids=NOBODYS)
def test_a_row_that_is_nobodys_is_refused(tmp_path, values, message):
    table = authored(6, 3)
    del table[1]["author"]
    table[1] |= values
    write_rows(tmp_path / "mails.jsonl", table)
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_table(tmp_path / "mails.jsonl", ["text", "author"], unit="author")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("other", ["secret ", "secret\u200b", "sec\u00adret", "s\u0065cret\ufeff", "\uff53ecret"])
def test_one_person_in_two_spellings_is_refused(tmp_path, other):
    """Nobody can see that they are two: each would be protected for itself, and one could be held out."""
    table = [{**row, "author": author} for row, author in zip(rows(3), ("secret", other, "ann"), strict=True)]
    write_rows(tmp_path / "mails.jsonl", table)
    with pytest.raises(InvalidArgument, match="Expected each person in one spelling in the column 'author'") as caught:
        read_table(tmp_path / "mails.jsonl", ["text", "author"], unit="author")
    assert "secret" not in str(caught.value)
    assert read_table(write_rows(tmp_path / "one.jsonl", table[1:]), ["text", "author"], unit="author")


def test_costs_of_people_by_another_column_do_not_add_up(finished, monkeypatch):
    """A budget, and earlier runs, are about the people of one column: those of another one are others."""
    place, _ = finished
    monkeypatch.chdir(place)
    of_texts = ["--unit_column", "text", "--max_records_per_unit", 1, "--batch_size", 6, "--dp_delta", 1e-3]
    for spent in ("run/privacy_accounting.json", "run/privacy_journal.jsonl"):
        refused = train(*of_texts, "--dp_epsilon", 20, "--output_dir", "next", "--dry-run", "--spent", spent)
        assert refused.exit_code == 1
        assert "got data.spent=" in refused.stderr
        assert "the column 'author'" in refused.stderr
        assert "the column 'text'" in refused.stderr


def test_a_head_over_people_and_its_twin(place):
    """On cached features, with what is missing from the recipe; batches and steps count people."""
    place("text_classification", "bert")
    write_rows("mails.jsonl", authored(200, 60))
    text = Path("job.yaml").read_text()
    for old, new in (("learning_rate: 1e-2, batch_size: 32, ", ""), ("1e-3", "1e-2")):
        text = text.replace(old, new)
    Path("job.yaml").write_text(text)
    flags = ["--strategy", "head", "--physical_batch_size", "null", *PEOPLE]
    result = train(*flags)
    assert result.exit_code == 0, result.output
    assert "Frozen layers were computed once for each record" in result.stdout
    assert "one person protected" in result.stdout
    record = json.loads(Path("run/privacy_accounting.json").read_text())
    assert f"from {record['dataset_size']} records" in result.stdout
    filled = json.loads(Path("run/job.json").read_text())["filled"]["training"]
    assert filled["physical_batch_size"] == min(64 // 3, filled["batch_size"])
    twin = train(*flags, "--no-dp")
    assert twin.exit_code == 0, twin.output
    assert "eval_accuracy" in json.loads(Path("run-no-dp/metrics.json").read_text())
