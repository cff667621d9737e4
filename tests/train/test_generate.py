"""`dpfunc generate`: private models only, epsilon with every text, the same seed the same texts."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from text_job import TOPICS, run, trained, write_job

from dpfunc.errors import InvalidArgument
from dpfunc.train._run_folder import saved_job
from dpfunc.train.generate import Sampling, Writer, load_writer, read_prompts, sample, write_texts

ACCOUNTING = "privacy_accounting.json"
# Hardly any noise: these tests are about what is drawn, and the model shall have learnt something whatever the key.
LEARNS = [
    "--strategy", "full", "--learning_rate", 0.05, "--scheduler", "constant", "--steps", 24, "--batch_size", 120,
    "--physical_batch_size", 120, "--dp_noise_multiplier", 0.1, "--save_steps", 24,
]  # fmt: skip


def generate(*arguments, folder="run"):
    options = ["--max-new-tokens", 8, *arguments]
    return run("generate", folder, *options)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A private run."""
    place = tmp_path_factory.mktemp("generate")
    write_job(place)
    trained(place, *LEARNS)
    return place


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    """The run by its relative path; what is written goes elsewhere."""
    monkeypatch.chdir(folder)
    return tmp_path


def test_generated_texts_carry_their_epsilon(here):
    Path(here, "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"label : {topic} text : ", "label": topic}) + "\n" for topic in TOPICS)
    )
    result = generate(
        "--num", 60, "--prompts", here / "prompts.jsonl", "--out", here / "texts.jsonl", "--batch-size", 32
    )
    assert result.exit_code == 0, result.output
    assert "60 texts" in result.stdout
    assert "with no further cost" in result.stdout
    texts = lines(here / "texts.jsonl")
    spent = json.loads(Path("run/privacy_accounting.json").read_text())
    assert {(row["epsilon"], row["delta"]) for row in texts} == {(spent["epsilon"], spent["delta"])}
    assert Counter(row["label"] for row in texts) == dict.fromkeys(TOPICS, 30)
    words = {
        topic: Counter(w for row in texts if row["label"] == topic for w in row["text"].split()) for topic in TOPICS
    }
    for topic, other in (("sport", "money"), ("money", "sport")):  # it learnt which words go with which label
        right = sum(words[topic][word] for word in TOPICS[topic])
        wrong = sum(words[topic][word] for word in TOPICS[other])
        assert right > 1.3 * wrong, words


def test_the_same_seed_gives_the_same_texts(here):
    """As JSON there is one value on stdout, and the texts are in their file, without their prompt."""
    spent = json.loads(Path("run/privacy_accounting.json").read_text())
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        out = here / f"{name}.jsonl"
        result = generate("--num", 6, "--seed", seed, "--prompt", "label : sport text : ", "--out", out, "--json")
        assert result.exit_code == 0, result.output
        told = {"num_texts": 6, "out": str(out), "epsilon": spent["epsilon"], "delta": spent["delta"]}
        assert json.loads(result.stdout) == told
    assert lines(here / "a.jsonl") == lines(here / "b.jsonl") != lines(here / "c.jsonl")
    for row in lines(here / "a.jsonl"):
        assert not row["text"].startswith("label : sport")
        assert row["prompt"] == "label : sport text : "
        assert "<" not in row["text"]


def test_padding_changes_no_distribution(here):
    """A short prompt next to a long one: padded on the left, and masked."""
    import torch

    writer = load_writer("run")
    short, long = "label : sport", "a a a a label : sport"
    ids = [writer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (short, long)]
    alone = writer.model.generate(
        input_ids=torch.tensor([[1, *ids[0]]]), attention_mask=torch.ones(1, 4, dtype=torch.long), do_sample=False,
        max_new_tokens=3, pad_token_id=0,
    )[0, 4:]  # fmt: skip
    how = Sampling(2, max_new_tokens=3, temperature=1e-6)  # likely words of a topic differ by little
    texts = [row["text"] for row in sample(writer, ({"prompt": short}, {"prompt": long}), how)]
    assert texts[0] == writer.tokenizer.decode(alone, skip_special_tokens=True)


def changed_job(folder, change):
    content = json.loads((folder / "job.json").read_text())
    change(content)
    (folder / "job.json").write_text(json.dumps(content))


def without_privacy(content):
    content["filled"]["privacy"]["dp_enabled"] = False


NOT_PRIVATE = {
    "was trained without privacy": without_privacy,
    "anybody can guess": lambda content: content.update(insecure_seed=303),
}


@pytest.mark.parametrize("message", NOT_PRIVATE)
def test_a_model_without_privacy_is_refused(here, message):
    copy = Path(shutil.copytree("run", here / "copy"))
    changed_job(copy, NOT_PRIVATE[message])
    result = generate("--num", 1, "--out", here / "x.jsonl", folder=copy)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (here / "x.jsonl").exists()
    allowed = generate("--num", 1, "--out", here / "x.jsonl", "--allow-non-private", folder=copy)
    assert allowed.exit_code == 0, allowed.output
    assert "nothing protects the training records" in allowed.stdout
    assert lines(here / "x.jsonl")[0]["epsilon"] is None


def classifier(content):
    content["filled"]["task"] = "text_regression"
    content["filled"]["data"]["prompt_template"] = None


FOLDERS = {  # what happened to the folder of a run -> message
    "no accounting": (lambda folder: (folder / ACCOUNTING).unlink(), f"Expected {ACCOUNTING} in"),
    "no values": (lambda folder: (folder / ACCOUNTING).write_text("{}"), f"Expected {ACCOUNTING} in"),
    "no JSON": (lambda folder: (folder / ACCOUNTING).write_text("broken"), f"Expected {ACCOUNTING} in"),
    "no epsilon": (lambda folder: (folder / ACCOUNTING).write_text('{"epsilon": null, "delta": 1e-5}'), f"Expected {ACCOUNTING} in"),
    "no model": (lambda folder: shutil.rmtree(folder / "model"), "Expected a finished run"),
    "no job": (lambda folder: (folder / "job.json").unlink(), "without job.json"),
    "no folder": (shutil.rmtree, "does not exist"),
    "a classifier": (lambda folder: changed_job(folder, classifier), "Expected a run with task causal_lm or preference, got 'text_regression'"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FOLDERS.values(), ids=FOLDERS)
def test_no_text_from_another_folder(here, change, message):
    copy = Path(shutil.copytree("run", here / "copy"))
    change(copy)
    result = generate("--num", 1, "--out", here / "x.jsonl", folder=copy)
    assert result.exit_code != 0
    assert message in result.stderr


BAD = {
    "num": (["--num", 0], 1, "num >= 1"),
    "top_p": (["--num", 1, "--top-p", 1.5], 1, "0 < top_p <= 1"),
    "two prompts": (["--num", 1, "--prompt", "a", "--prompts", "job.yaml"], 1, "--prompt or --prompts, got both"),
    "misspelt": (["--num", 1, "--temprature", 1], 2, "No such option"),
}


@pytest.mark.parametrize(("options", "code", "message"), BAD.values(), ids=BAD)
def test_bad_options_are_refused(here, options, code, message):
    result = generate(*options, "--out", here / "x.jsonl")
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_nothing_is_overwritten(here):
    (here / "x.jsonl").write_text("mine")
    assert "Expected a new file" in generate("--num", 1, "--out", here / "x.jsonl").stderr
    assert (here / "x.jsonl").read_text() == "mine"
    with pytest.raises(InvalidArgument, match="to write a new file"):
        write_texts(here / "x.jsonl", iter(()))
    with pytest.raises(InvalidArgument, match="a .jsonl file"):
        write_texts(here / "x.txt", iter(()))


def test_the_training_table_is_no_file_of_prompts(here, monkeypatch):
    """Its responses would be written beside an epsilon that does not cover them."""
    job, seed, trained_on = saved_job(Path("run"))
    assert trained_on == Path.cwd() / "mails.jsonl"  # also from another folder
    table, copy = here / "mails.jsonl", here / "copy.jsonl"
    for file in (table, copy):
        file.write_text('{"prompt": "a", "response": "b"}\n')
    monkeypatch.setattr("dpfunc.train.generate.saved_job", lambda folder: (job, seed, table))
    for private in (table, copy):
        result = generate("--num", 2, "--prompts", private, "--out", here / "texts.jsonl")
        assert (result.exit_code, "the table that the model was trained on" in result.stderr) == (1, True)
        assert not (here / "texts.jsonl").exists()


def test_prompts_from_files(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo: \n")
    assert read_prompts(None, tmp_path / "p.txt") == ({"prompt": "one"}, {"prompt": "two: "})
    (tmp_path / "p.csv").write_text("prompt\none\n")
    assert read_prompts(None, tmp_path / "p.csv") == ({"prompt": "one"},)
    (tmp_path / "p.jsonl").write_text('\n{"prompt": "one", "label": 3}\n')
    assert read_prompts(None, tmp_path / "p.jsonl") == ({"prompt": "one", "label": "3"},)
    (tmp_path / "old.jsonl").write_bytes(b'{"prompt": "one"}\r\r{"prompt": "two", "label": 3}\r')  # of another system
    assert read_prompts(None, tmp_path / "old.jsonl") == ({"prompt": "one"}, {"prompt": "two", "label": "3"})
    assert read_prompts(None, None) == ({"prompt": ""},)
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "epsilon": 0}\n')
    with pytest.raises(InvalidArgument, match="no field epsilon with a prompt"):
        read_prompts(None, tmp_path / "p.jsonl")
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(InvalidArgument, match="Expected records in '.*p.txt', got none"):
        read_prompts(None, tmp_path / "p.txt")


@pytest.mark.parametrize(("num", "count", "expected"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (6, 2, [3, 3])])
def test_texts_are_spread_over_prompts(monkeypatch, num, count, expected):
    monkeypatch.setitem(sample.__globals__, "_drawn", lambda writer, prompts, how, start: list(prompts))
    prompts = [{"prompt": str(i)} for i in range(count)]
    drawn = Counter(
        row["text"] for row in sample(Writer(None, None, 1.0, 1e-5, 8), prompts, Sampling(num, batch_size=4))
    )
    assert [drawn[str(i)] for i in range(count)] == expected
