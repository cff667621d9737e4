"""Certificates: what they say follows from the journal, any change is found, and who checks needs only the file."""

import contextlib
import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from certified import plan_of, trained
from forgeries import altered, reshaped
from new_python import python
from scipy.stats import norm
from text_job import run as invoke

import dpfunc
from dpfunc import sampling
from dpfunc._utils.validation import signed
from dpfunc.accounting import Ledger
from dpfunc.accounting._trade_off import RATES, curve, true_positives
from dpfunc.accounting.record import Record
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.evidence import Audit, Replay, certify, check
from dpfunc.evidence._figures import _OPACUS, by_renyi, compare_with_opacus
from dpfunc.evidence._one_run import Guesses
from dpfunc.evidence._page import page
from dpfunc.evidence._runs import RUNS, ledger_of
from dpfunc.evidence._signature import canonical, digest_of
from dpfunc.evidence.certificate import NO_WEIGHTS, NOBODY, _assumptions
from dpfunc.evidence.result import audit_values
from dpfunc.noise import BISR, Correlated, Gaussian
from dpfunc.types import Event, Schedule

ROOT = Path(dpfunc.__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "certificate.schema.json").read_text())
POISSON = sampling.Poisson(1000, 0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certified") / "run"
    own, script = folder.with_name("loop.py"), folder.with_name("another.py")
    results = [folder.with_name("replay.json"), folder.with_name("audit.json")]
    own.write_text("# a loop")
    script.write_text("# another one, of the same plan")
    with pytest.MonkeyPatch.context() as patch:  # as `python loop.py`
        patch.setattr(sys.modules["__main__"], "__file__", str(own), raising=False)
        trained(folder)
    (folder / "adapter.safetensors").write_bytes(b"weights")
    Replay(4, 3, 0.9, (), ()).save(results[0], own, plan_of())
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
    values["digest"] = digest_of(values)
    path.write_text(canonical(values))
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
    # of the replay is the code that took the steps; of the audit is another script, which shows nothing about this run
    assert [each["same_code"] for each in values["evidence"]] == [True, False]
    met = {each["says"]: each["met"] for each in values["assumptions"]}
    assert [value for says, value in met.items() if "(replay)" in says or "(audit)" in says] == [True, None]
    # which record moves most, and by how much, are in the results alone, of which it has digests
    told = {name for each in values["evidence"] for name in each}
    assert not {"record", "ratio", "moved", "not_compared", "salt"} & told
    assert unmet(made) == []
    assert agrees(made)
    shown = made.with_suffix(".html").read_text()
    assert values["digest"] in shown
    assert re.findall(r"(?:src|href|url)\W", shown) == []  # self-contained
    jsonschema.validate(values, SCHEMA)
    assert set(SCHEMA["properties"]) == {*values, "signature", "search"}
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
    "insecure key": ({"key": dpfunc.rng.insecure_key(1)}, "The key of the noise is secret."),
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
    fitting = lambda values: {**values, "assumptions": _assumptions(values)}
    placed = changed("budget", to={**place, "adjacency": "zero_out"})  # every field that there can be
    rewritten(path, lambda values: fitting(placed(values)))
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(400):
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


KINDS = {
    "all records": {},
    "sampled, a schedule": {
        "plan": plan_of(POISSON, adjacency="add_remove", delta=1e-5, noise_multiplier=Schedule(((2, 0.7), (2, 0.8))))
    },
    "replaced": {"plan": plan_of(adjacency="replace_one")},
    "fixed size": {"plan": plan_of(sampling.FixedSize(1000, 50), adjacency="replace_one", delta=1e-4)},
    "capped": {"plan": plan_of(sampling.CappedPoisson(1000, 0.05, cap=80), adjacency="zero_out", delta=1e-4)},
    "allocated": {"plan": plan_of(sampling.RandomAllocation(1000, 2), adjacency="zero_out", delta=1e-4)},
    "shuffled": {"plan": plan_of(sampling.Shuffled(1000, 500), delta=1e-4)},
    "by Renyi": {"plan": plan_of(POISSON, delta=1e-5, accountant="rdp")},
    "a budget, and an insecure key": {"plan": plan_of(epsilon=9.0), "key": dpfunc.rng.insecure_key(3)},
}  # fmt: skip
PLACE = {
    "run": "third", "number": 3, "epsilon": 50.0, "delta": 1e-3, "unit": "one patient", "adjacency": "zero_out",
    "others": [{"sampling_prob": 1.0, "noise_multiplier": 3.0, "num_steps": 7}],
}  # fmt: skip
# What nothing in the file contradicts: the word of who wrote it, in its domain.
CLAIMED = {
    "date": "when it was made",
    "claim.unit": "what a row is",
    "claim.target_epsilon": "the budget of the plan; a claim above it is an assumption that is not met",
    "mechanism.max_grad_norm": "noise is relative to it",
    "digests.model": "of files that the reader has, or has not",
    "digests.journal": "of a file that is not published",
    "digests.record": "of another file",
    "digests.code": "of a script; evidence of another one is then not of this code",
    "versions": "of what made it",
    "budget.run": "a name",
    "budget.number": "in the order of reservations",
    "budget.epsilon": "of the data set; all runs together must be within",
    "budget.others": "what others were charged",
    "evidence": "results that nobody has signed, as an assumption says; what follows from them is an assumption",
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    made = {name: folder / f"{name}.pem" for name in ("own", "own_public", "other", "other_public")}
    for secret in ("own", "other"):
        public = made[f"{secret}_public"]
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", made[secret]], check=True)
        subprocess.run(["openssl", "pkey", "-in", made[secret], "-pubout", "-out", public], check=True)
    return made


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory, keys):
    """The values of a certificate that has all there can be, and those of the same one with a signature."""
    place = made.parent / "privacy_budget.json"
    place.write_text(json.dumps(signed(PLACE)))
    folder = tmp_path_factory.mktemp("whole")
    results = [made.parents[1] / name for name in ("replay.json", "audit.json")]
    try:
        plain = certify(made.parent, out=folder / "plain.json", evidence=results)
        own = certify(made.parent, out=folder / "signed.json", evidence=results, private_key=keys["own"])
    finally:
        place.unlink()
    return values_of(plain), values_of(own)


def holds(values, path, **options):
    """True if these values, with the digest that fits them, are accepted."""
    try:
        path.write_text(canonical({**values, "digest": digest_of(values)}))
        return agrees(path, **options)
    except InvalidArgument:
        return False


SLOW = ("fixed size", "capped", "allocated")


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def test_honest_certificates_of_each_kind_agree(name, tmp_path):
    trained(tmp_path / "run", **KINDS[name])
    path = certify(tmp_path / "run")
    assert agrees(path), check(path)
    jsonschema.validate(values_of(path), SCHEMA)


def test_correlated_noise_is_certified(tmp_path):
    """The whole run is paid for in its first row of steps; the law of noise and sampler are among those proven."""
    sampler = sampling.ShuffledOnce(100, 50)
    plan = plan_of(sampler, noise=Correlated(BISR(3)))
    trained(tmp_path / "run", plan)
    path = certify(tmp_path / "run")
    assert agrees(path)
    rows = values_of(path)["steps"]
    assert [(row["first"], row["last"], len(row["events"])) for row in rows] == [(0, 0, 1), (1, 3, 0)]
    assert ledger_of(values_of(path)) == plan.ledger()
    assert not any("mechanism" in words or "sampler" in words for words in unmet(path))
    own = plan_of(sampler, noise=Correlated(OwnStrategy(3)))
    trained(tmp_path / "own", own)
    assert "The mechanism of the noise is one that is proven." in unmet(certify(tmp_path / "own"))


class OwnStrategy(BISR):
    """A matrix of a user, by whose claim its sensitivity holds."""


def test_parts_of_a_user_with_a_name_of_dpfunc_are_not_called_proven(tmp_path):
    """A sampler that overrides `Poisson`, a noise and a strategy: their class says whose they are, not its name."""
    poisson, gaussian, strategy = (type(kind.__name__, (kind,), {}) for kind in (sampling.Poisson, Gaussian, BISR))
    law, mechanism = (
        "The law of the sampler is one that is proven.",
        "The mechanism of the noise is one that is proven.",
    )
    once = sampling.ShuffledOnce(100, 50)
    for number, (plan, says) in enumerate((
        (plan_of(poisson(100, 0.5)), law), (plan_of(noise=gaussian()), mechanism),
        (plan_of(once, noise=Correlated(strategy(3))), mechanism),
    )):  # fmt: skip
        trained(tmp_path / str(number), plan)
        assert says in unmet(certify(tmp_path / str(number)))


def test_a_certificate_in_which_one_leaf_was_changed_is_refused(whole, tmp_path, keys):
    """Each leaf, with a fitting digest: refused, or the word of who wrote it; with a signature always refused."""
    plain, own = whole
    path, missed, count = tmp_path / "certificate.json", [], 0
    assert holds(plain, path)
    assert holds(own, path, public_key=keys["own_public"])
    for name, place, values in altered(plain):
        count += 1
        if place != ("digest",) and holds(values, path):
            missed.append(name)
    assert count > 200
    assert [name for name in missed if not name.startswith(tuple(CLAIMED))] == []
    for name, place, values in [*altered(own)][::2]:
        assert place == ("digest",) or not holds(values, path, public_key=keys["own_public"]), name


def test_a_certificate_of_another_shape_is_refused(whole, tmp_path):
    """An object with a name more or fewer, a list with an element more, fewer or elsewhere."""
    plain, own = whole
    signature = [(name, values) for name, values in reshaped(own) if "signature" in name]
    path, forged = tmp_path / "certificate.json", dict([*reshaped(plain), *signature])
    missed = [name for name, values in forged.items() if name != "all without digest" and holds(values, path)]
    assert len(forged) > 300
    # what there may be, and nothing follows from: a file of weights, a result of other code, a signature
    allowed = ("digests.model ", "digests.code ", "budget.others ", "evidence without ", "all without signature")
    assert not {name for name in missed if not name.startswith(allowed)}


def both(*changes):
    def change(values):
        for each in changes:
            values = each(values)
        return values

    return change


def row(*rows):
    def change(values):
        first = values["steps"][0]
        return {
            **values,
            "steps": [{**first, **dict(zip(("run", "first", "last"), each, strict=True))} for each in rows],
        }

    return change


A, B = "0123456789abcdef", "fedcba9876543210"
FORGED = {
    "a smaller epsilon": changed("result", "epsilon", to=0.1),
    "a smaller claim": changed("claim", "epsilon", to=0.1),
    "another bound": changed("result", "accountants", 0, "epsilon", to=0.1),
    "fewer steps": changed("steps", 0, "last", to=1),
    "another accountant below": changed("result", "accountants", 1, "epsilon", to=0.1),
    "weaker attackers": changed("result", "attacker", 0, "true_positives", to=0.001),
    "a better curve": changed("result", "curve", 0, 1, to=0.1),
    "an assumption less": changed("assumptions", to=[]),
    "a replay that did not hold": changed("evidence", 0, "holds", to=False),
    "an audit that was not made": changed("evidence", to=[]),
    "a key that is not secret": changed("mechanism", "noise_key", to="guessable"),
    "a second accountant of one name": lambda v: changed("result", "accountants", to=[
        {**v["result"]["accountants"][0], "epsilon": 0.1, "error": "exact"}, *v["result"]["accountants"]
    ])(v),
    "exact beside a bound": changed("result", "accountants", 1, "error", to="exact, rounded up by 1e-9 of itself"),
    "other neighbours": changed("claim", "neighbours", to="nobody differs"),
    "another adjacency": changed("claim", "adjacency", to="add_remove"),
    "another adjacency in words and name": both(
        changed("claim", "adjacency", to="add_remove"),
        changed("claim", "neighbours", to="data sets that differ by one unit, which is in one of them and not in the other"),
    ),
    "another law": changed("mechanism", "law", to="each unit is in few batches"),
    "another sampler": changed("mechanism", "sampler", to="RandomAllocation"),
    "a sampler without a law": changed("mechanism", "sampler", to="Magic"),
    "another noise": changed("mechanism", "mechanism", to="better than Gaussian"),
    "another source": changed("mechanism", "noise_source", to="AES that was audited"),
    "rows kept apart by words": changed("mechanism", "rows", to="each row is proven"),
    "another rule": changed("mechanism", "clip", to="Nothing"),
    "another accountant of the claim": changed("claim", "accountant", to="gdp-approximation"),
    "another delta": changed("claim", "delta", to=1e-2),
    "more is covered": changed("claim", "covered", to=["everything"]),
    "nothing is not covered": changed("claim", "not_covered", to=[]),
    "one sentence is covered": lambda v: changed("claim", "not_covered", to=v["claim"]["not_covered"][1:])(v),
    "overlapping steps": row((A, 0, 3), (A, 2, 3)),
    "missing steps": row((A, 0, 0), (A, 2, 3)),
    "steps that go back": row((A, 0, 3), (A, 3, 1)),
    "steps from the middle": row((A, 1, 4)),
    "steps of two runs that are mixed": row((A, 0, 0), (B, 0, 0), (A, 1, 1), (B, 1, 1)),
    "a run that begins after a gap": row((A, 0, 1), (B, 4, 5)),
    "rows that are one": row((A, 0, 1), (A, 2, 3)),
    "a negative step": row((A, -1, 2)),
    "a run of another name": lambda v: changed("steps", 0, "run", to=A)(v),
    "a run absent from the data order": changed("digests", "data_order", to=[A]),
    "a run more in the data order": lambda v: changed("digests", "data_order", to=[*v["digests"]["data_order"], A])(v),
    "a step of other kind": changed("steps", 0, "events", 0, "kind", to="zcdp"),
    "a step with less": changed("steps", 0, "events", 0, "noise_multiplier", to=20.0),
    "a step with a comment": changed("steps", 0, "events", 0, "comment", to="fine"),
    "no steps": changed("steps", to=[]),
    "no events": changed("steps", 0, "events", to=[]),
    "an earlier step more": changed("earlier", to=PLACE["others"]),
    "twenty thousand points": lambda v: changed("result", "curve", to=v["result"]["curve"] * 1500)(v),
    "twenty thousand other points": lambda v: changed(
        "result", "curve", to=[[(k + 1) / 20002, 1.0] for k in range(20000)]
    )(v),
    "other rates": changed("result", "attacker", 0, "false_positives", to=0.5),
    "an accountant more": lambda v: changed("result", "accountants", to=v["result"]["accountants"] * 2)(v),
    "accountants the other way": lambda v: changed("result", "accountants", to=v["result"]["accountants"][::-1])(v),
    "an assumption that is met": changed("assumptions", 0, "met", to=None),
    "an assumption in other words": changed("assumptions", 0, "says", to="All is well."),
    "no line about a budget": lambda v: {name: value for name, value in v.items() if name != "budget"},
    "no budget, as if that were nothing": changed("budget", to=None),
    "a place in another budget's words": changed("budget", "unit", to="one visit"),
    "a place of another delta": changed("budget", "delta", to=1e-4),
    "a place of other neighbours": changed("budget", "adjacency", to="add_remove"),
    "a budget that is spent": changed("budget", "epsilon", to=3.5),
    "a place before the first": changed("budget", "number", to=0),
    "others that cost nothing": changed("budget", "others", 0, "noise_multiplier", to=0.0),
    "a replay of more steps than it reproduced": changed("evidence", 0, "reproduced", to=3),
    "a replay of another run": changed("evidence", 0, "run", to=A),
    "a replay of other weights": changed("evidence", 0, "weights", to=["0" * 64]),
    "a result of the code of the run": changed("evidence", 1, "same_code", to=True),
    "a result of other code": changed("evidence", 0, "same_code", to=False),
    "a script in the code of the run": lambda v: changed("digests", "code", to=[v["evidence"][1]["source"]])(v),
    "another kind of result": changed("evidence", 0, "kind", to="proof"),
    "a result with a comment": changed("evidence", 0, "comment", to="fine"),
    "digests in words": changed("digests", "model", to=["a good model"]),
    "versions in many words": changed("versions", "proven", to="yes"),
    "a claim as text": changed("claim", "epsilon", to="0.1"),
    "a truth as number": changed("claim", "delta_below_one_over_records", to=1),
    "control characters": changed("claim", "unit", to="one\x1b[2Kpatient"),
    "an unsigned signature": changed("signature", to={"algorithm": "Ed25519"}),
    "words in the signature": changed(
        "signature", to={"algorithm": "Ed25519", "public_key": "0" * 64, "value": "0" * 128, "by": "an auditor"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_certificate_contradicts_itself(whole, tmp_path, name):
    """Whoever can write a digest cannot write what does not follow from the steps in it."""
    values = json.loads(json.dumps(whole[0]))
    assert not holds(FORGED[name](values), tmp_path / "certificate.json")


SPELLINGS = {
    "a name twice": lambda text: text.replace('"claim": {', '"claim": {"unit": "one person",', 1),
    "not a number": lambda text: text.replace('"met": null', '"met": NaN', 1),
    "another spelling of a number": lambda text: text.replace("0.001,", "1e-3,", 1),
    "spaces": lambda text: text.replace("\n", "\n ", 1),
    "no end of line": lambda text: text[:-1],
    "an escape": lambda text: text.replace("one patient", "one p\\u0061tient", 1),
    "words after it": lambda text: text + "fine",
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_there_is_one_spelling(whole, tmp_path, name):
    path = tmp_path / "certificate.json"
    assert holds(whole[0], path)
    text = path.read_text()
    path.write_text(SPELLINGS[name](text))
    assert path.read_text() != text
    with contextlib.suppress(InvalidArgument):
        assert not agrees(path)


def test_the_second_accountant_is_opacus(tmp_path):
    """A check computes without Opacus what Opacus finds: its orders, over a grid of steps."""
    from opacus.accountants import RDPAccountant

    assert [*_OPACUS] == [*map(float, RDPAccountant.DEFAULT_ALPHAS)]
    for q, sigma, steps in ((1e-4, 0.5, 10**4), (0.01, 1.0, 1000), (0.3, 2.0, 10), (1.0, 30.0, 1)):
        ledger = Ledger((Event(q, sigma, steps),))
        for delta in (1e-5, 1e-9):
            compare_with_opacus(ledger, delta, {"accountants": [{}, {"epsilon": by_renyi(ledger, delta)}]})
    with pytest.raises(InvalidArgument, match="by the accountant of Opacus"):
        compare_with_opacus(ledger, 1e-5, {"accountants": [{}, {"epsilon": 9.0}]})


def test_other_files_are_no_certificates(made, tmp_path):
    other_shapes = json.dumps(dict.fromkeys(values_of(made), 3) | {"schema": RUNS.schema})
    for text in ("{", "[]", '{"schema": 1}', '{"schema": "dpfunc.certificate/2"}', other_shapes):
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
    "of another run": (with_result(run="0123456789abcdef"), "a result of this run, got run="),
    "of another job": (with_result(of="job"), "source"),
    "of another model": (with_result(weights=["00"]), "a result of this run, got weights="),
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


def test_what_is_missing_is_said(whole, tmp_path):
    """Whoever takes a budget, replays or weights out of a file that nobody has signed, and makes the rest fit, shows it."""
    path = tmp_path / "certificate.json"
    for name, said in (("budget", "place in a budget"), ("evidence", "(replay)"), ("digests", "")):
        values = {**whole[0], name: {"budget": None, "evidence": []}.get(name, {**whole[0]["digests"], "model": []})}
        values = {**values, "assumptions": _assumptions(values)}
        assert holds(values, path)
        wanted = {each["says"]: each["met"] for each in values["assumptions"]}
        assert [met for says, met in wanted.items() if said and said in says] == [None] * bool(said)
        found, shown = {each.name: each.found for each in check(path)}, page(values_of(path))
        assert found[name] == {"budget": "none: nobody counts this run together with others"}.get(name, "as it follows")
        assert found["signature"] == NOBODY
        assert {"budget": "none: nobody counts", "evidence": "not shown", "digests": "<td>none</td>"}[name] in shown


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


def test_a_certificate_that_names_no_weights_says_so(tmp_path):
    """Nothing can be compared, which is no contradiction, and no agreement either."""
    trained(tmp_path / "run")
    path = certify(tmp_path / "run")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    (found,) = [finding for finding in check(path, model=weights) if finding.name == "model"]
    assert (found.agrees, found.found) == (None, NO_WEIGHTS)
    shown = invoke("certify", "--check", path, "--model", weights)
    assert shown.exit_code == 1
    assert "names no weights" in " ".join(shown.output.replace("│", " ").split())
    assert "WRONG" not in shown.output
    assert "Do not rely on it: see not shown." in shown.output


def test_the_page_does_not_take_the_place_of_the_certificate(tmp_path):
    trained(tmp_path / "run")
    with pytest.raises(InvalidArgument, match=r"Expected a JSON file, beside which its page \(.html\) is written"):
        certify(tmp_path / "run", out=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def test_one_certificate_of_several_runs(tmp_path):
    """Steps, budgets and weights of all; what the others had counted before; nobody can claim less with a new digest."""
    plans = [plan_of(), plan_of(noise_multiplier=3.0, num_steps=2), plan_of(noise_multiplier=5.0, num_steps=7)]
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, own in zip(folders, plans, strict=True):
        trained(folder, own)
        (folder / "model.safetensors").write_bytes(folder.name.encode())
    path = certify(folders[0], beside=folders[1:])
    values, whole = values_of(path), Ledger(adjacency="zero_out").compose(*(own.ledger() for own in plans))
    assert ledger_of(values) == whole
    assert values["claim"]["epsilon"] == whole.epsilon(1e-3).epsilon
    assert [row["last"] + 1 for row in values["steps"]] == [4, 2, 7]
    assert len({*values["digests"]["model"]}) == len({*values["digests"]["data_order"]}) == 3
    assert all(agrees(path, model=folder / "model.safetensors") for folder in folders)
    jsonschema.validate(values, SCHEMA)
    alone = values_of(certify(folders[0], out=tmp_path / "alone.json"))
    assert values["digests"]["journal"] != alone["digests"]["journal"]
    values["steps"].pop()
    with pytest.raises(InvalidArgument, match="does not fit together"):
        check(rewritten(path, lambda _: values))


def test_runs_of_which_not_one_thing_can_be_said_are_refused(tmp_path):
    trained(tmp_path / "a")
    trained(tmp_path / "b", plan_of(sampling.Poisson(100, 1.0)))
    with pytest.raises(InvalidArgument, match="sampler"):
        certify(tmp_path / "a", beside=[tmp_path / "b"])
    with pytest.raises(InvalidArgument, match="each run in one folder"):
        certify(tmp_path / "a", beside=[tmp_path / "a"])
    (tmp_path / "a" / "privacy_budget.json").write_text("{}")
    trained(tmp_path / "c")
    with pytest.raises(InvalidArgument, match="counts all runs"):
        certify(tmp_path / "a", beside=[tmp_path / "c"])


def test_signatures(made, tmp_path, keys):
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


def test_the_command(made, tmp_path, keys):
    assert invoke("certify", made.parent, "--out", tmp_path / "c.json").exit_code == 0
    assert (tmp_path / "c.html").exists()
    shown = invoke("certify", "--check", tmp_path / "c.json").output
    assert "It is not signed: nobody vouches for it." in shown
    assert "All agrees." not in shown
    values = json.loads(invoke("certify", "--check", tmp_path / "c.json", "--json").stdout)
    assert (values["agrees"], values["signed"]) == (True, False)
    assert invoke("certify", made.parent, "--out", tmp_path / "s.json", "--sign", keys["own"]).exit_code == 0
    assert "All agrees." in invoke("certify", "--check", tmp_path / "s.json").output
    rewritten(tmp_path / "c.json", changed("result", "epsilon", to=0.1))
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
    assert "It fits together." in python(code)


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
