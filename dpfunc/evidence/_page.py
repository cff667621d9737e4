"""A certificate as one HTML page to print: no script, no style and no picture from elsewhere.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dpfunc.accounting._trade_off import true_positives
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.ledger import in_short

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:44em;margin:2em auto;padding:0 1em;color:#111;background:#fff}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.25em .5em;text-align:left;"
    "vertical-align:top;overflow-wrap:anywhere}h1{font-size:1.5em}h2{font-size:1.15em;break-after:avoid}"
    "tr,svg{break-inside:avoid}.no{font-weight:bold}@page{margin:2cm}"
)
_MET = {True: "met", False: "NOT MET", None: "not shown"}
NO_BUDGET = "none: nobody counts this run together with others"
_SIDE = 300  # of the picture
_PLAIN = ("kind", "sampling_prob", "noise_multiplier", "num_steps")


def page(values: Mapping[str, Any]) -> str:
    claim, result = values["claim"], values["result"]
    budget = values["budget"] or {"place": NO_BUDGET, "others": []}
    attack = [
        (f"{each['false_positives']:.1%}", f"at most {each['true_positives']:.2%}") for each in result["attacker"]
    ]
    steps = [
        (f"{row['first']} to {row['last']} of {row['run']}", _events(row["events"])) for row in values.get("steps", ())
    ]
    earlier = [(f"{event['num_steps']} steps of earlier runs", _events([event])) for event in values["earlier"]]
    sections = {
        "The claim": _table([
            ("protected", claim["unit"]),
            ("epsilon, delta", f"epsilon {upper(claim['epsilon'])} at delta {claim['delta']:g}"),
            ("neighbours", f"{claim['neighbours']} ({claim['adjacency']})"),
            ("covered", "; ".join(claim["covered"])),
            ("not covered", "; ".join(claim["not_covered"])),
        ]),
        "Assumptions": _table((each["says"], _MET[each["met"]]) for each in values["assumptions"]),
        "Epsilon by two accountants": _table(
            (each["name"], f"{upper(each['epsilon'])}: {each['error']}") for each in result["accountants"]
        ),
        "What an attacker can reach": (
            "<p>An attacker who knows all other records guesses whether one unit was there. Whatever the attack is:</p>"
            + _table(attack, ("false positives", "true positives")) + _picture(result["curve"])
        ),
        "Replays and audits": _table((each["kind"], _verdict(each)) for each in values["evidence"]),
        "Budget of the data set": _table(_words({**budget, "others": _events(budget["others"], "none")})),
        "How it was done": _table(_words(values["mechanism"])),
        "The search": _search(values["search"]) if "search" in values else "",
        "Steps": _table(steps, ("steps", "sampling probability, noise multiplier")) + _table(earlier),
        "Digests": _table(_words(values["digests"])),
        "Versions": _table(values["versions"].items()),
        "Signature": _table([
            ("digest", values["digest"]), *values.get("signature", {"signed": "no: nobody vouches for it"}).items(),
        ]),
    }  # fmt: skip
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections.items() if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Certificate of differential privacy</title>'
        f"<style>{_STYLE}</style></head><body><h1>Certificate of differential privacy</h1><p>Made {values['date']} "
        "from the files of the run. The JSON file with this digest counts, not this page; to check it: "
        f"<code>dpfunc certify --check FILE</code></p>{body}</body></html>\n"
    )


def _search(search: Mapping[str, Any]) -> str:
    runs = search["runs"]
    rows = [
        ("number of runs", f"{runs['mean']:g} on average, {runs['law']}; how many there were is secret"),
        ("score", f"{search['score']}; noise of standard deviation {search['score_noise']:g}"),
    ]
    for number, events in enumerate(search["candidates"]):
        steps = ", ".join(f"{event['num_steps']} steps of {_events([event])}" for event in events)
        rows.append((f"one run of candidate {number}", steps))
    return _table(rows)


def _table(rows: Iterable[tuple[str, str]], header: tuple[str, str] | None = None) -> str:
    top = f"<tr><th>{header[0]}</th><th>{header[1]}</th></tr>" if header else ""
    body = "".join(
        f"<tr><td>{escape(name)}</td><td{' class=no' if text == _MET[False] else ''}>{escape(text)}</td></tr>"
        for name, text in rows
    )
    return f"<table>{top}{body}</table>" if body else ""


def _words(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = {n: ", ".join(value) or "none" if isinstance(value, list) else str(value) for n, value in values.items()}
    return [(name.replace("_", " "), text) for name, text in shown.items()]


def _verdict(each: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in each.items() if name not in ("kind", "holds") and value is not None}
    about = ", ".join(f"{name} {text}" for name, text in _words(shown))
    return f"{'holds' if each['holds'] else 'DOES NOT HOLD'}: {about}"


def _events(events: Iterable[Mapping[str, Any]], none: str = "paid by an earlier step") -> str:
    """Sampling probability and noise of events; of one that is not plain also its kind, and what only it has."""
    shown = []
    for event in events:
        more = [f"{name} {in_short(value)}, " for name, value in event.items() if name not in _PLAIN]
        kind = f"{event['kind']}: {''.join(more)}" if "kind" in event else ""
        shown.append(f"{kind}{event['sampling_prob']:g}, {event['noise_multiplier']:g}")
    return "; ".join(shown) or none


def _picture(curve: Iterable[Sequence[float]]) -> str:
    """The largest share of true positives over that of false ones, and the line of a guess without knowledge."""
    points = [(delta, epsilon) for delta, epsilon in curve]
    rates = [k / 100 for k in range(101)]
    line = " ".join(f"{rate * _SIDE:.1f},{(1 - true_positives(points, rate)) * _SIDE:.1f}" for rate in rates)
    return (
        f'<svg viewBox="-40 -10 {_SIDE + 50} {_SIDE + 50}" width="{_SIDE + 50}" role="img" '
        'aria-label="trade-off curve" font-size="12" font-family="sans-serif">'
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>'
        f'<path d="M0 {_SIDE}L{_SIDE} 0" stroke="#999" stroke-dasharray="4"/>'
        f'<polyline points="{line}" fill="none" stroke="#111" stroke-width="2"/>'
        f'<text x="{_SIDE // 2}" y="{_SIDE + 30}" text-anchor="middle">false positives</text>'
        f'<text transform="translate(-20 {_SIDE // 2}) rotate(-90)" text-anchor="middle">true positives</text>'
        f'<text x="0" y="{_SIDE + 15}">0</text><text x="{_SIDE}" y="{_SIDE + 15}" text-anchor="end">1</text></svg>'
    )
