"""Imports: names that come when they are used, and accounting that does not import torch.

What a test looks at is which modules are there, never how long that took; `benchmarks/startup.py` has the seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

from journal_cases import line, written
from new_python import python
from record_cases import RECORD

import dpfunc
from dpfunc.accounting import Ledger
from dpfunc.budget import Budget
from dpfunc.types import Event

ROOT = Path(dpfunc.__file__).parent
HEAVY = ("torch", "opacus", "transformers", "peft", "accelerate", "psycopg", "yaml", "pydantic")
GAUSSIAN = ("-q", "1", "--steps", "10", "--sigma", "5", "--delta", "1e-5")
SAMPLED = ("-n", "60000", "-b", "256", "--epochs", "60")
HELP = ("", "epsilon", "sigma", "requirements", "ledger show", "ledger check", "train", "generate", "certify")
COMMANDS = {
    **{f"help of {command}": [*command.split(), "--help"] for command in HELP},
    "version": ["--version"],
    "epsilon": ["epsilon", *GAUSSIAN],
    "epsilon in JSON": ["epsilon", *GAUSSIAN, "--json"],
    "epsilon of a batch size": ["epsilon", "-n", "64", "-b", "64", "--epochs", "3", "--sigma", "5", "--delta", "1e-3"],
    "sigma": ["sigma", "-q", "1", "--steps", "10", "--epsilon", "3", "--delta", "1e-5"],
    "ledger": ["ledger", "show", "{ledger}", "--delta", "1e-5"],
    "journal": ["ledger", "show", "{journal}", "--delta", "1e-5"],
    "record": ["ledger", "show", "{folder}"],
    "record in JSON": ["ledger", "show", "{folder}/privacy_accounting.json", "--json"],
    "check": ["ledger", "check", "{folder}"],
    "budget": ["budget", "show", "{budget}"],
    "samples": ["epsilon", *SAMPLED, "--sigma", "1.1", "--delta", "1e-5", "--json"],
    "samples by rdp": ["epsilon", *SAMPLED, "--sigma", "1.1", "--delta", "1e-5", "--method", "rdp"],
    "samples by prv": ["epsilon", *SAMPLED, "--sigma", "1.1", "--delta", "1e-5", "--method", "prv"],
    "sigma of samples": ["sigma", *SAMPLED, "--epsilon", "3", "--delta", "1e-5", "--json"],
    "requirements": ["requirements", *SAMPLED, "--epsilon", "3", "--json"],
    "error": ["epsilon", "-q", "2", "--steps", "10", "--sigma", "5", "--delta", "1e-5"],
}
RUN = """
import contextlib, io, json, sys
from dpfunc.cli.main import main
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["dpfunc", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            main()
        except SystemExit as end:
            found[name] = output.getvalue(), end.code, sorted(set(name.split(".")[0] for name in sys.modules))
print(json.dumps(found))
"""


def test_commands_do_not_import_torch(tmp_path):
    """All in one process: what one of them imports, it has at the end."""
    ledger, journal = tmp_path / "ledger.json", tmp_path / "journal.jsonl"
    (tmp_path / "privacy_accounting.json").write_text(RECORD.to_json())
    ledger.write_text(Ledger((Event(1.0, 5.0, 10),)).to_json())
    written(journal, *(line(step) for step in range(10)))
    facts = {"epsilon": 8.0, "delta": 1e-3, "unit": "one patient", "adjacency": "add_remove", "spenders": ["ana"]}
    Budget(tmp_path / "mails.db").create(**facts)
    files = {"ledger": ledger, "journal": journal, "folder": tmp_path, "budget": tmp_path / "mails.db"}
    commands = {name: [word.format(**files) for word in words] for name, words in COMMANDS.items()}
    found = json.loads(python(RUN, json.dumps(commands)))
    assert found.keys() == commands.keys()
    for name, (_, code, modules) in found.items():
        assert (code, {*HEAVY} & {*modules}) == (1 if name == "error" else 0, set()), name
    assert "numpy" in modules  # what is there is seen


def test_the_quick_start_says_what_was_measured():
    root = ROOT.parent
    rows = json.loads((root / "benchmarks" / "results" / "startup.json").read_text())["rows"]
    ours, torch = (f"{rows[name]['best_seconds']:.1f}" for name in ("dpfunc --help", "import torch"))
    said = " ".join((root / "docs" / "quick_start.md").read_text().split())
    assert f"`dpfunc --help` takes {ours} CPU seconds, where `import torch` alone takes {torch} on" in said
    assert rows["after torch: import dpfunc"]["best_seconds"] <= 0.15
    assert rows["dpfunc --help"]["best_seconds"] <= 0.4
