"""The example of authors in small: on a made table, since the mails need another package manager."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from scripts import names, ran

import dpfunc
from dpfunc import clipping, sampling

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "authors"
sys.path.append(str(JOB))


@pytest.fixture(scope="module")
def example():
    return names(JOB / "train.py")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """60 authors with 1 to 12 texts; one author has 100."""
    random.seed(0)
    path = tmp_path_factory.mktemp("data") / "texts.csv"
    lines = ["author,text,label"]
    for number in range(60):
        label = number % 2
        words = ("buy", "cheap", "now") if label else ("meeting", "code", "thanks")
        for _ in range(100 if number == 7 else 1 + number % 12):
            lines.append(f"a{number},{' '.join(random.choices((*words, 'the', 'and'), k=8))},{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "results.json"
    options = ("--steps", 10, "--batch-size", 20, "--max-texts", 3, "--epsilon", 8, "--insecure-seed", 3)
    result = ran(JOB / "train.py", "--data", table, *options, "--out", path)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.output


def test_both_units_are_reported_side_by_side(finished):
    """Author level is the same for everybody, and sample level is not."""
    values, output = finished
    by_mail, by_author = values["results"]
    assert (by_mail["unit"], by_author["unit"]) == ("mail", "author")
    assert by_mail["epsilon_of_the_unit"] == by_author["epsilon_of_the_unit"] <= 8
    assert values["train_authors"] == 48
    assert values["unused_mails"] > 0
    assert all(row["accuracy_of_authors"] > 0.6 for row in values["results"])
    assert "epsilon of a person" in output
    per_mail, per_author = (row["epsilon_of_a_person_with_texts"] for row in values["results"])
    assert len(set(per_author.values())) == 1
    mails = list(per_mail.values())
    assert mails == sorted(mails)
    assert mails[0] == per_author["1"]
    assert mails[1] > 1.5 * mails[0]
    assert mails[-1] > 20 * mails[0]


def plan(sampling_prob, noise_multiplier, steps):
    sampler = sampling.Poisson(1000, sampling_prob)
    return dpfunc.Plan(sampler, clipping.Flat(1.0), noise_multiplier, steps, 1e-5)


def test_the_group_as_one_is_exact_without_subsampling(example):
    """With q = 1 a person with k texts moves the sum by exactly k C: the Gaussian mechanism with noise sigma / k."""
    one, half = (dpfunc.epsilon(plan(1.0, sigma, 3).ledger(), 1e-5, "rdp").epsilon for sigma in (8.0, 4.0))
    assert example.group_as_one(plan(1.0, 8.0, 3), 1) == pytest.approx(one)
    assert example.group_as_one(plan(1.0, 8.0, 3), 2) == pytest.approx(half)


def test_group_privacy_is_consistent(example):
    """epsilon' = bound / k holds at the delta' that the lemma asks for; where there is none, the bound is infinite."""
    private, k = plan(0.05, 2.0, 50), 3
    one = example.group_privacy(private.ledger(), 1e-5, k) / k
    delta = 1e-5 * math.expm1(one) / math.expm1(k * one)
    assert 0.99 * one < dpfunc.epsilon(private.ledger(), delta, "rdp").epsilon <= one
    assert math.isinf(example.group_privacy(private.ledger(), 1e-5, 10**4))


def test_bounds_of_groups_are_not_below_the_truth(example):
    """The truth of a group of 2 in one step, as a lower bound: hockey-stick divergence of the two mixtures."""
    private, delta = plan(0.3, 1.0, 1), 1e-5
    draws = torch.randn(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = torch.multinomial(torch.tensor([0.49, 0.42, 0.09]), len(draws), replacement=True) * 1.0
    x = draws + shift
    ratio = torch.log(0.49 + 0.42 * torch.exp(x - 0.5) + 0.09 * torch.exp(2 * x - 2))
    for epsilon in (example.group_privacy(private.ledger(), delta, 2), example.group_as_one(private, 2)):
        assert float((1 - torch.exp(epsilon - ratio)).clamp(min=0).mean()) <= delta * 1.1
    assert float((1 - torch.exp(private.guarantee().epsilon - ratio)).clamp(min=0).mean()) > 10 * delta


def test_whole_authors_are_held_out(example, table):
    found = example.load_table(str(table))
    train, test = example.split(found, 0.2)
    assert sorted(train + test) == list(range(len(found.authors)))
    assert {found.authors[row] for row in train}.isdisjoint({found.authors[row] for row in test})
    assert len({found.authors[row] for row in test}) == 12


def test_senders_are_addresses_and_features_are_of_each_text_alone():
    from mails_by_author import features, sender

    assert sender("From: Ann Lee <Ann@Example.org>\nSubject: Hi\n\nbody") == "ann@example.org"
    assert sender("Subject: Hi\n\nbody") == ""
    texts = ["Buy now, buy 2", "a meeting", ""]
    assert (features(texts)[1] == features(texts[1:2])[0]).all()
    assert features(texts).norm(dim=1).tolist() == pytest.approx([1, 1, 0])


def test_bad_options_and_tables_are_explained(table, tmp_path):
    path = tmp_path / "x.csv"
    for options, row, message in (
        (["--data", "nowhere.csv"], "", "No such file"),
        (["--data", table, "--batch-size", 20, "--delta", "0.5"], "", "Expected delta < 1 / dataset_size"),
        (["--data", path], ",t,0", "Expected a person in the column 'author' in row 2"),
        (["--data", path], "a,t,2", "a label 0 or 1 in row 2"),
    ):
        path.write_text(f"author,text,label\na,t,1\n{row}\n")
        result = ran(JOB / "train.py", *options)
        assert result.exit_code != 0
        assert message in " ".join(result.output.split())


def test_the_table_of_authors_is_the_committed_result():
    values = json.loads((ROOT / "docs" / "results" / "authors.json").read_text())
    by_mail, by_author = values["results"]
    assert 0.9 * 3 < by_author["epsilon_of_the_unit"] <= 3
    assert by_mail["epsilon_of_a_person_with_texts"]["8"] > 5 * by_author["epsilon_of_a_person_with_texts"]["8"]
    assert by_author["accuracy_of_mails"] > values["majority"]
    text = (JOB / "README.md").read_text()
    for row in values["results"]:
        scores = [f"{row[name]:.3f}".lstrip("0") for name in ("accuracy_of_mails", "accuracy_of_authors")]
        epsilons = list(row["epsilon_of_a_person_with_texts"].values())
        shown = [f"{value:.1f}" if value < 10 else f"{value:,.0f}" for value in epsilons]
        assert f"| a {row['unit'].replace('author', 'sender')} | {' | '.join([*scores, *shown])} |" in text
    assert f"{values['train_authors']:,} senders with" in text
    assert f"{values['train_mails']:,} mails" in text
