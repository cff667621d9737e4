"""Certificates: what they say follows from the journal, any change is found, and who checks needs only the file."""

import dataclasses
import json
import random
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
from certified import plan_of, trained
from new_python import python
from scipy.stats import norm
from text_job import run as invoke

import dpfunc
from dpfunc import sampling
from dpfunc.accounting import Ledger
from dpfunc.accounting._trade_off import RATES, curve, true_positives
from dpfunc.accounting.record import Record
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.evidence import Audit, Replay, certify, check
from dpfunc.evidence._one_run import Guesses
from dpfunc.evidence._page import page
from dpfunc.evidence._result import audit_values
from dpfunc.evidence.certificate import SCHEMA as SCHEMA_NAME
from dpfunc.evidence.certificate import _canonical, _digest, ledger_of
from dpfunc.types import Event, Schedule

ROOT = Path(dpfunc.__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "certificate.schema.json").read_text())
POISSON = sampling.Poisson(1000, 0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certified") / "run"
    trained(folder)
    (folder / "adapter.safetensors").write_bytes(b"weights")
    script, results = folder.with_name("loop.py"), [folder.with_name("replay.json"), folder.with_name("audit.json")]
    script.write_text("# a loop")
    Replay(4, 3, 0.9, (), ()).save(results[0], script, plan_of())
    found = Audit(0.1, 0.2, 1e-3, 0.95, 100, 10, Guesses(5, 5, 6), claim=2.0, exceeds=False)
    about = {"space": "gradient", "score": "sum"}
    results[1].write_text(json.dumps(audit_values(found, script, plan_of(), 4, about)))
    return certify(folder, evidence=results)


def values_of(path):
    return json.loads(path.read_text())


def agrees(path, **options):
    return all(finding.agrees for finding in check(path, **options))


def rewritten(path, change):
    """A forged certificate: other values, and the digest that fits them."""
    values = change(values_of(path)) or values_of(path)
    values["digest"] = _digest(values)
    path.write_text(_canonical(values))
    return path


def unmet(path):
    return [each["says"] for each in values_of(path)["assumptions"] if each["met"] is False]


def test_figures_of_the_gaussian_mechanism():
    """mu = 1: delta(1), and the exact trade-off curve, which the bound is above by little."""
    points = curve(Ledger((Event(1.0, 1.0, 1),)), 1e-5)
    for rate in RATES:
        exact = norm.cdf(norm.ppf(rate) + 1)
        assert exact <= true_positives(points, rate) <= exact * 1.01
    assert norm.cdf(norm.ppf(0.1) + 1) == pytest.approx(0.38914, abs=1e-5)
    assert true_positives(points, 0.1) == pytest.approx(0.38914, abs=2e-3)


def test_a_certificate_says_what_the_run_was(made):
    values = values_of(made)
    record = Record.from_json((made.parent / "privacy_accounting.json").read_bytes())
    assert ledger_of(values) == record.ledger
    assert values["claim"]["epsilon"] == record.epsilon
    assert values["result"]["epsilon"] == pytest.approx(record.epsilon, rel=1e-6)
    assert [each["name"] for each in values["result"]["accountants"]] == ["gaussian", "opacus"]
    assert [(row["first"], row["last"]) for row in values["steps"]] == [(0, 3)]
    assert values["digests"]["data_order"] == [values["steps"][0]["run"]]
    assert len(values["digests"]["model"]) == 1
    assert {"says": "Results of replays and audits are as their files say: nobody has signed these.", "met": None} in (
        values["assumptions"]
    )
    # which record moves most, and by how much, are in the results alone, of which it has digests
    told = {name for each in values["evidence"] for name in each}
    assert not {"record", "ratio", "moved", "not_compared", "salt"} & told
    assert unmet(made) == []
    assert agrees(made)
    shown = made.with_suffix(".html").read_text()
    assert values["digest"] in shown
    assert re.findall(r"(?:src|href|url)\W", shown) == []  # self-contained
    jsonschema.validate(values, SCHEMA)
    assert set(SCHEMA["properties"]) == {*values, "signature", "budget"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "steps": 3}, SCHEMA)


def test_sampled_batches_and_schedules(tmp_path):
    plan = plan_of(POISSON, adjacency="add_remove", delta=1e-5, noise_multiplier=Schedule(((2, 0.7), (2, 0.8))))
    trained(tmp_path / "run", plan)
    path = certify(tmp_path / "run")
    values = values_of(path)
    assert [(row["first"], row["last"]) for row in values["steps"]] == [(0, 1), (2, 3)]
    first, second = values["result"]["accountants"]
    assert (first["name"], second["name"]) == ("tilted", "opacus")
    assert first["epsilon"] <= second["epsilon"]
    assert unmet(path) == ["The number of records is not published by the record of the run."]
    assert agrees(path)


UNMET = {
    "insecure key": ({"key": dpfunc.insecure_key(1)}, "The key of the noise is secret."),
    "batches from elsewhere": ({"verify_batch": False}, "Batches are the draws of the sampler: each was compared."),
    "an engine of the user": (
        {"engine": lambda *a: dpfunc.engines.auto()(*a)}, "No row changes the gradient of another."
    ),
    "large delta": (
        {"plan": plan_of(delta=0.02, allow_large_delta=True)}, "Delta is below 1 / number of records."
    ),
    "replaced records": ({"plan": plan_of(adjacency="replace_one")}, "The two accountants share no code."),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMET)
def test_assumptions_that_are_not_met_are_named(tmp_path, name):
    options, says = UNMET[name]
    trained(tmp_path / "run", **options)
    path = certify(tmp_path / "run")
    assert unmet(path) == [says]
    assert agrees(path)
    assert "NOT MET" in path.with_suffix(".html").read_text()


def test_one_changed_byte_is_found(made, tmp_path):
    path = tmp_path / "certificate.json"
    path.write_bytes(made.read_bytes())
    place = {"run": "third", "number": 3, "epsilon": 50.0, "delta": 1e-3, "unit": "one patient", "others": []}
    rewritten(path, changed("budget", to={**place, "adjacency": "zero_out"}))  # every field that there can be
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(1000):
        at = draw.randrange(len(whole))
        other = bytes([draw.choice([byte for byte in range(256) if byte != whole[at]])])
        path.write_bytes(whole[:at] + other + whole[at + 1 :])
        try:
            found = agrees(path)
        except InvalidArgument:
            found = False
        assert not found, f"byte {at}: {other!r}"
    path.write_bytes(whole)
    assert agrees(path)


def changed(*names, to):
    def change(values):
        place = values
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = to
        return values

    return change


FORGED = {
    "a smaller epsilon": (changed("result", "epsilon", to=0.1), "epsilon"),
    "a smaller claim": (changed("claim", "epsilon", to=0.1), "claim"),
    "another bound": (changed("result", "accountants", 0, "epsilon", to=0.1), "epsilon by gaussian"),
    "fewer steps": (changed("steps", 0, "last", to=1), "epsilon by gaussian"),
    "another accountant below": (changed("result", "accountants", 1, "epsilon", to=0.1), "epsilon by another"),
    "weaker attackers": (changed("result", "attacker", 0, "true_positives", to=0.001), "true positives at 0.001"),
    "a better curve": (changed("result", "curve", 0, 1, to=0.1), "trade-off curve"),
    "an assumption less": (changed("assumptions", to=[]), "assumptions"),
    "a replay that did not hold": (changed("evidence", 0, "holds", to=False), "assumptions"),
    "an audit that was not made": (changed("evidence", to=[]), "assumptions"),
    "a key that is not secret": (changed("mechanism", "noise_key", to="guessable"), "assumptions"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_certificate_contradicts_itself(made, tmp_path, name):
    """Whoever can write a digest cannot write a claim that does not follow from the steps in it."""
    change, where = FORGED[name]
    path = tmp_path / "certificate.json"
    path.write_bytes(made.read_bytes())
    wrong = [finding.name for finding in check(rewritten(path, change)) if not finding.agrees]
    assert where in wrong
    assert "bytes" not in wrong


def test_other_files_are_no_certificates(made, tmp_path):
    other_shapes = json.dumps(dict.fromkeys(values_of(made), 3) | {"schema": SCHEMA_NAME})
    for text in ("{", "[]", '{"schema": 1}', '{"schema": "dpfunc.certificate/1"}', other_shapes):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"Expected .*certificate"):
            check(tmp_path / "x.json")


def fewer_steps(folder):
    text = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text("".join(text[:-1]))


def with_record(**changes):
    def change(folder):
        path = folder / "privacy_accounting.json"
        path.write_text(dataclasses.replace(Record.from_json(path.read_bytes()), **changes).to_json())

    return change


REFUSED = {
    "no record": (lambda folder: (folder / "privacy_accounting.json").unlink(), "Expected the folder of a run"),
    "no journal": (lambda folder: (folder / "journal.jsonl").unlink(), "one journal"),
    "lost lines": (fewer_steps, "Expected 4 lines in the journal"),
    "a record of less": (with_record(ledger=Ledger((Event(1.0, 2.0, 3),), "zero_out")), "cannot be derived"),
    "a claim that is too small": (with_record(epsilon=0.2), "does not follow from the steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_derived_is_refused(tmp_path, name):
    change, message = REFUSED[name]
    trained(tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(DPFuncError, match=message):
        certify(tmp_path / "run")
    assert not (tmp_path / "run" / "certificate.json").exists()


def with_result(**changes):
    from dpfunc._utils.validation import signed

    def write(made, tmp_path):
        values = json.loads((made.parents[1] / "replay.json").read_text()) | changes
        (tmp_path / "other.json").write_text(json.dumps(signed(values)))

    return write


def without_digest(made, tmp_path):
    text = (made.parents[1] / "replay.json").read_text()
    (tmp_path / "other.json").write_text(text.replace('"steps": 4', '"steps": 40'))


OTHER_RESULTS = {
    "of another plan": (
        with_result(events=[{"sampling_prob": 1.0, "noise_multiplier": 9.0, "num_steps": 1}]), "events"
    ),
    "of no step": (with_result(events=[]), "events"),
    "of other neighbours": (with_result(adjacency="add_remove"), "adjacency"),
    "of another run": (with_result(run="0123456789abcdef"), "run"),
    "of another job": (with_result(of="job"), "source"),
    "of another model": (with_result(weights=["00"]), "weights"),
    "changed by hand": (without_digest, "digest"),
    "a certificate": (lambda made, tmp_path: (tmp_path / "other.json").write_bytes(made.read_bytes()), "schema"),
    "no file": (lambda made, tmp_path: None, "result of dpfunc verify or audit"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_RESULTS)
def test_results_of_something_else_are_refused(made, tmp_path, name):
    write, words = OTHER_RESULTS[name]
    write(made, tmp_path)
    with pytest.raises(InvalidArgument, match=words):
        certify(made.parent, out=tmp_path / "c.json", evidence=[tmp_path / "other.json"])
    assert not (tmp_path / "c.json").exists()


def test_what_did_not_hold_is_an_assumption_that_is_not_met(made, tmp_path):
    with_result(holds=False, moved=["number of steps, 3 and 4"])(made, tmp_path)
    path = certify(made.parent, out=tmp_path / "c.json", evidence=[tmp_path / "other.json"])
    assert unmet(path) == ["On neighbouring records nothing moves but the clipped sum (replay)."]
    assert agrees(path)
    assert "DOES NOT HOLD" in path.with_suffix(".html").read_text()


def test_the_page_shows_the_place_in_a_budget(made):
    event = {"sampling_prob": 0.25, "noise_multiplier": 3.0, "num_steps": 7}
    place = {"run": "third & last", "number": 3, "epsilon": 50.0, "delta": 1e-3, "unit": "u", "adjacency": "zero_out"}
    for others, words in (([], "none"), ([event], "0.25, 3")):
        shown = page({**values_of(made), "budget": {**place, "others": others}})
        assert "third &amp; last" in shown
        assert words in shown


def test_the_model_that_a_certificate_is_about(made, tmp_path):
    own, other = made.parent / "adapter.safetensors", tmp_path / "other.safetensors"
    other.write_bytes(b"other weights")
    assert agrees(made, model=own)
    assert [finding.name for finding in check(made, model=other) if not finding.agrees] == ["model"]
    with pytest.raises(InvalidArgument, match="file of weights"):
        check(made, model=tmp_path / "nowhere")


def test_signatures(made, tmp_path):
    keys = {name: tmp_path / f"{name}.pem" for name in ("own", "own_public", "other", "other_public")}
    for secret in ("own", "other"):
        public = keys[f"{secret}_public"]
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", keys[secret]], check=True)
        subprocess.run(["openssl", "pkey", "-in", keys[secret], "-pubout", "-out", public], check=True)
    path = certify(made.parent, out=tmp_path / "signed.json", private_key=keys["own"])
    found = [agrees(path, public_key=key) for key in (None, keys["own_public"], keys["other_public"])]
    assert found == [True, True, False]
    assert not agrees(made, public_key=keys["own_public"])  # which has no signature
    swapped = certify(made.parent, out=tmp_path / "swapped.json", private_key=keys["other"])
    assert [agrees(swapped), agrees(swapped, public_key=keys["own_public"])] == [True, False]  # by whoever has that key
    rewritten(swapped, changed("signature", "public_key", to=values_of(path)["signature"]["public_key"]))
    assert [agrees(swapped), agrees(swapped, public_key=keys["own_public"])] == [False, False]
    rewritten(path, changed("claim", "unit", to="one person"))
    assert [finding.name for finding in check(path, keys["own_public"]) if not finding.agrees] == ["signature"]
    for wrong in (keys["own_public"], tmp_path / "nowhere.pem"):
        with pytest.raises(InvalidArgument, match="Expected an Ed25519 private key"):
            certify(made.parent, out=tmp_path / "x.json", private_key=wrong)
    with pytest.raises(InvalidArgument, match="Expected an Ed25519 public key"):
        check(path, keys["own"])


def test_the_command(made, tmp_path):
    assert invoke("certify", made.parent, "--out", tmp_path / "c.json").exit_code == 0
    assert (tmp_path / "c.html").exists()
    assert "All agrees." in invoke("certify", "--check", tmp_path / "c.json").output
    assert json.loads(invoke("certify", "--check", tmp_path / "c.json", "--json").stdout)["agrees"]
    rewritten(tmp_path / "c.json", changed("claim", "epsilon", to=0.1))
    failed = invoke("certify", "--check", tmp_path / "c.json")
    assert failed.exit_code == 1
    assert "WRONG" in failed.output
    run = made.parent
    for wrong in ((), (run, "--check", made), (run, "--public-key", "x"), ("--check", made, "--out", "x")):
        assert invoke("certify", *wrong).exit_code == 2


def test_a_check_needs_the_file_alone(made, tmp_path):
    """Neither torch nor Opacus can be imported, and of the run there is nothing but the certificate."""
    (tmp_path / "c.json").write_bytes(made.read_bytes())
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "opacus", "transformers")))
from dpfunc.cli.main import main
main(["certify", "--check", {str(tmp_path / "c.json")!r}], standalone_mode=False)
"""
    assert "All agrees." in python(code)


def test_what_is_published_has_no_number_of_records_no_batch_and_no_file_name(tmp_path, capsys, caplog):
    """Of a run with a public bound on the number of records: in files that may be published, and in lines that are printed."""
    place = tmp_path / "secret_name_of_a_study"
    plan = plan_of(sampling.Poisson(10000, 0.02), adjacency="add_remove", delta=1e-5, num_steps=5, noise_multiplier=0.6)
    with caplog.at_level("DEBUG"):
        _, sizes = trained(place, plan, num_records=8713, public_bound=True)
        path = certify(place)
    files = [path, path.with_suffix(".html"), place / "privacy_accounting.json"]
    said = "\n".join(record.getMessage() for record in caplog.records)  # without lines of source, which are numbers
    printed = [said, *capsys.readouterr()]
    for text in [*(file.read_text() for file in files), *printed]:
        assert "8713" not in text
        assert "secret_name_of_a_study" not in text
        assert "journal.jsonl" not in text
    journal = (place / "journal.jsonl").read_text()
    assert "8713" not in journal
    alone = [rf"(?<![\w.]){size}(?![\w.])" for size in sizes]
    assert [size for size in alone for text in (path.read_text(), journal, *printed) if re.search(size, text)] == []
    assert unmet(path) == []
