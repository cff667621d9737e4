"""Certificates of private searches: epsilon follows from the law of the number of runs, the candidates and the score."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jsonschema
import pytest
from certified import trained
from forgeries import altered, reshaped
from search_cases import FOUND, NOTHING, RECORD, left, own, search_record
from text_job import run as invoke

import dpfunc
from dpfunc.accounting import Ledger, RunCount, selection_epsilon
from dpfunc.accounting.record import GUESSABLE, SCORES, SEARCH_NOT_COVERED
from dpfunc.errors import InvalidArgument
from dpfunc.evidence import certify, check
from dpfunc.evidence._signature import canonical, digest_of
from dpfunc.evidence.certificate import _assumptions
from dpfunc.types import Event

ROOT = Path(dpfunc.__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "certificate.schema.json").read_text())
ALWAYS = "A second accountant, which shares no code with the first, has found this epsilon."
SIZE = "The number of records is not published by the record of the run."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return certify(left(tmp_path_factory.mktemp("searched") / "run"))


def values_of(path):
    return json.loads(path.read_text())


def wrong(path, **options):
    return [finding.name for finding in check(path, **options) if not finding.agrees]


def test_a_certificate_says_what_the_search_was(made):
    values = values_of(made)
    assert wrong(made) == []
    assert wrong(made, model=made.parent / "model" / "model.safetensors") == []
    assert "steps" not in values
    assert values["search"]["runs"]["mean"] == 8.0
    assert len(values["search"]["candidates"]) == 2
    assert values["digests"]["model"] == [*RECORD.weights]
    truth = selection_epsilon(RECORD.runs, [*FOUND.ledgers, Ledger((Event(1.0, 60.0, 1),))], 1e-5).epsilon
    assert values["result"]["epsilon"] == pytest.approx(truth, rel=1e-9)
    curve = dict(values["result"]["curve"])
    assert {delta: FOUND.guarantee(delta).epsilon for delta in curve} == pytest.approx(curve)
    assert {*SEARCH_NOT_COVERED} < {*values["claim"]["not_covered"]}
    assert [each["says"] for each in values["assumptions"] if each["met"] is False] == [ALWAYS, SIZE][::-1]
    jsonschema.validate(values, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "steps": []}, SCHEMA)
    shown = made.with_suffix(".html").read_text()
    for words in ("8 on average, negative binomial of shape 1", "one run of candidate 1", "10 steps of 1, 20"):
        assert words in shown
    assert RECORD.weights[0] in shown


SEARCHES = {
    "Poisson": {"runs": RunCount(3.0, math.inf)},
    "logarithmic": {"runs": RunCount(3.0, 0.0)},
    "zero out, earlier runs": {
        "spent": Ledger((Event(0.1, 3.0, 7),), "zero_out"),
        "ledgers": (Ledger((Event(0.2, 3.0, 9),), "zero_out"),) * 2,
    },
    "an insecure key": {"noise_key": GUESSABLE},
    "another score": {"score": SCORES[2]},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_honest_certificates_of_each_kind_agree(tmp_path, name):
    path = certify(left(tmp_path / "run", own(**SEARCHES[name])))
    assert wrong(path) == []
    jsonschema.validate(values_of(path), SCHEMA)
    unmet = [each["says"] for each in values_of(path)["assumptions"] if each["met"] is False]
    assert ("The key of the noise is secret." in unmet) == (name == "an insecure key")


def changed(*names, to):
    def change(values):
        place = values
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = to(place[names[-1]]) if callable(to) else to
        return values

    return change


EVENT = {"sampling_prob": 1.0, "noise_multiplier": 30.0, "num_steps": 10}
# change of a certificate with a fitting digest, and what the check names
FORGED = {
    "fewer runs": (changed("search", "runs", "mean", to=2.0), "epsilon"),
    "less than one run": (changed("search", "runs", "mean", to=0.5), "mean"),
    "another law": (changed("search", "runs", "shape", to=0.0), "epsilon"),
    "the law of Poisson": (changed("search", "runs", "shape", to=None), "epsilon"),
    "a law that is none": (changed("search", "runs", "shape", to=-2.0), "shape"),
    "a law in other words": (changed("search", "runs", "law", to="one run"), "search"),
    "more noise of each step": (
        changed("search", "candidates", to=[[EVENT], [EVENT]]), "epsilon"
    ),
    "less noise of the score": (changed("search", "score_noise", to=6.0), "epsilon"),
    "no noise of the score": (changed("search", "score_noise", to=0.0), "does not fit together"),
    "a score that is not bounded": (changed("search", "score", to="sum of the losses"), "score"),
    "another event": (changed("search", "candidates", 0, 0, "num_steps", to=1000), "epsilon"),
    "another kind of event": (changed("search", "candidates", 0, 0, "kind", to="zcdp"), "does not fit together"),
    "a candidate without steps": (changed("search", "candidates", 0, to=[]), "candidates"),
    "no candidates": (changed("search", "candidates", to=[]), "candidates"),
    "without the candidate that costs most": (changed("search", "candidates", to=lambda all_of: all_of[:1]), "epsilon"),
    "an earlier run more": (changed("earlier", to=[EVENT]), "epsilon"),
    "a smaller claim": (changed("claim", "epsilon", to=0.5), "epsilon"),
    "a smaller result": (changed("result", "epsilon", to=0.5), "result"),
    "the epsilon of one run": (changed("result", "accountants", 0, "epsilon", to=0.5), "result"),
    "a better curve": (changed("result", "curve", 0, 1, to=0.1), "result"),
    "weaker attackers": (changed("result", "attacker", 0, "true_positives", to=0.001), "result"),
    "another delta": (changed("claim", "delta", to=1e-2), "epsilon"),
    "another accountant": (changed("claim", "accountant", to="tilted"), "accountant"),
    "replaced records": (changed("claim", "adjacency", to="replace_one"), "adjacency"),
    "other neighbours": (changed("claim", "neighbours", to="nobody differs"), "claim"),
    "the time is covered": (changed("claim", "not_covered", to=lambda said: said[:1] + said[2:]), "claim"),
    "no weights": (changed("digests", "model", to=[]), "model"),
    "weights in words": (changed("digests", "model", to=["the best"]), "model"),
    "a journal": (changed("digests", "journal", to="0" * 32), "digests"),
    "an assumption less": (changed("assumptions", to=lambda each: each[1:]), "assumptions"),
    "a second accountant": (
        changed("assumptions", to=lambda all_of: [{**each, "met": True} for each in all_of]), "assumptions"
    ),
    "a replay of something": (
        changed("evidence", to=[{"kind": "replay", "holds": True, "file": "0" * 64}]), "evidence"
    ),
    "a place in a budget": (changed("budget", to={"run": "a", "number": 1}), "budget"),
    "steps beside the search": (
        lambda values: {**values, "steps": [{"run": "0" * 16, "first": 0, "last": 0, "events": [EVENT]}]}, "steps"
    ),
    "a run with these numbers": (changed("schema", to="dpfunc.certificate/2"), "max_grad_norm"),
    "no search": (lambda values: {name: value for name, value in values.items() if name != "search"}, "search"),
}  # fmt: skip


def forged(values, path):
    path.write_text(canonical({**values, "digest": digest_of(values)}))
    return path


def refusal(values, path):
    """Names of what a check refuses in these values, with the digest that fits them; "" if it agrees."""
    try:
        return " ".join(wrong(forged(values, path)))
    except InvalidArgument as error:
        return str(error)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_search_is_refused(made, tmp_path, name):
    """By the name of what does not fit; whoever can write a digest cannot claim less than the search has cost."""
    change, named = FORGED[name]
    said = refusal(change(values_of(made)), tmp_path / "c.json")
    assert named in said
    assert refusal(values_of(made), tmp_path / "c.json") == ""


# What nothing in the file contradicts: the word of who wrote it.
CLAIMED = ("date", "claim.unit", "claim.target_epsilon", "digests.", "versions")


def is_late(name):
    """True for points of the curve after the first ones: all are checked alike."""
    return bool(re.match(r"result\.curve\.(\d\d|[3-9])\D?", name))


def test_a_certificate_in_which_one_leaf_was_changed_is_refused(made, tmp_path):
    missed, count, path = [], 0, tmp_path / "c.json"
    for name, place, values in altered(values_of(made)):
        count += 1
        if place != ("digest",) and not is_late(name) and refusal(values, path) == "":
            missed.append(name)
    assert count > 150
    # candidates and a score that cost less than the dearest candidate may cost less still
    free = (*CLAIMED, "search.candidates.0.", "search.score_noise=", "search.score=")
    assert [name for name in missed if not name.startswith(free)] == []


def test_a_certificate_of_another_shape_is_refused(made, tmp_path):
    path = tmp_path / "c.json"
    missed = [name for name, values in reshaped(values_of(made)) if not is_late(name) and refusal(values, path) == ""]
    # candidates that are equal, or fewer of them, have the same cost
    allowed = ("all without digest", "digests.model twice", "digests.code ", "search.candidates twice",
               "search.candidates without the first", "search.candidates backwards")  # fmt: skip
    assert [name for name in missed if not name.startswith(allowed)] == []


FOLDERS = {  # change of a folder, and the error
    "other weights": (
        lambda folder: (folder / "model" / "model.safetensors").write_bytes(b"of another run"), "the weights"
    ),
    "no weights": (lambda folder: (folder / "model" / "model.safetensors").unlink(), "the weights that"),
    "weights more": (lambda folder: (folder / "a.safetensors").write_bytes(b"more"), "the weights that"),
    "a journal": (lambda folder: (folder / "privacy_journal.jsonl").write_text(""), "no journal beside the record"),
    "a place in a budget": (lambda folder: (folder / "privacy_budget.json").write_text("{}"), "place in a budget"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_of_something_else_are_refused(tmp_path, name):
    change, message = FOLDERS[name]
    folder = left(tmp_path / "run")
    change(folder)
    with pytest.raises(InvalidArgument, match=message):
        certify(folder)
    assert not (folder / "certificate.json").exists()


RECORDS = {  # of a search, and the error
    "a smaller epsilon": (dataclasses.replace(FOUND, epsilon=FOUND.epsilon * 0.9), "the cost of the search"),
    "fewer runs": (dataclasses.replace(FOUND, runs=RunCount(2.0, 1.0)), "the cost of the search"),
    "no model": (search_record(**NOTHING), "a search that released a model"),
    "a ledger that is empty": (search_record(ledgers=(RECORD.ledgers[0], Ledger())), "candidates, and steps of each"),
    "a score of a user": (search_record(score="my own"), "score"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_what_cannot_be_derived_is_refused(tmp_path, name):
    record, message = RECORDS[name]
    with pytest.raises(InvalidArgument, match=message):
        certify(left(tmp_path / "run", record))


def test_runs_and_evidence_beside_a_search_are_refused(made, tmp_path):
    for options in ({"beside": [tmp_path]}, {"evidence": [tmp_path / "replay.json"]}):
        with pytest.raises(InvalidArgument, match="no runs beside a search, and no evidence"):
            certify(made.parent, **options)
    trained(tmp_path / "run")
    with pytest.raises(InvalidArgument, match="A private search leaves none: certify it apart"):
        certify(tmp_path / "run", beside=[made.parent])


def test_the_command(made, tmp_path):
    path, model = tmp_path / "c.json", made.parent / "model" / "model.safetensors"
    result = invoke("certify", made.parent, "--out", path)
    assert (result.exit_code, ALWAYS in result.stderr) == (0, True), result.output
    shown = invoke("certify", "--check", path, "--model", model)
    assert (shown.exit_code, "It is not signed" in shown.output) == (0, True), shown.output
    assert "law of the number of runs" in " ".join(shown.output.replace("│", " ").split())
    (tmp_path / "other.safetensors").write_bytes(b"other")
    assert invoke("certify", "--check", path, "--model", tmp_path / "other.safetensors").exit_code == 1
    values = values_of(path)
    values["search"]["score_noise"] = 2.0
    values["assumptions"] = _assumptions(values)
    failed = invoke("certify", "--check", forged(values, path))
    assert failed.exit_code == 1
    assert "the cost of the search" in failed.stderr
