"""A job from a YAML file and from flags that override it; what is not understood is refused, never dropped."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfunc.errors import InvalidArgument
from dpfunc.train.config import SECTIONS, TOP, Job, aliases, job_from_dict, kinds_of
from dpfunc.train.config_values import convert, suggestion

# Far more than the largest job has, which lists every key and all labels and targets.
MOST_BYTES, MOST_VALUES = 2**20, 10_000
# A flag for one of these replaces the other one of the file.
ALTERNATIVES = {
    ("training", "steps"): ("training", "epochs"),
    ("training", "epochs"): ("training", "steps"),
    ("privacy", "dp_epsilon"): ("privacy", "dp_noise_multiplier"),
    ("privacy", "dp_noise_multiplier"): ("privacy", "dp_epsilon"),
    ("data", "eval"): ("data", "eval_fraction"),
    ("data", "eval_fraction"): ("data", "eval"),
}


def read_job(path: Path | str, flags: Sequence[str] = ()) -> Job:
    """The job of a YAML file, with flags over it.

    Args:
        path: the file. flags: as on a command line, see `parse_flags`.

    Raises:
        InvalidArgument: unreadable, a key twice, an unknown or missing key, a value of another type.

    Guarantees:
        tests/train/test_config.py: a key twice is refused (test_a_key_twice_is_refused), flags win
        (test_flags_override_the_file).
    """
    return job_from_dict(override(read_yaml(path), parse_flags(flags)))


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file. Only plain values: no tags, no key twice, and no more than a job can have.

    Raises:
        InvalidArgument: it cannot be read; the message names the line. Or it is too large, also by aliases of aliases,
            which a few lines can multiply to any size.

    Guarantees:
        tests/train/test_config.py::test_a_file_that_multiplies_itself_is_refused.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise InvalidArgument('Expected PyYAML to read a job. Run: pip install "dpfunc[hf]".') from error
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InvalidArgument(f"Expected a job of at most {MOST_BYTES} bytes, got {str(path)!r}, which has more.")
        text = raw.decode("utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if _size(tree, {}) > MOST_VALUES:
            raise InvalidArgument(
                f"Expected a job of at most {MOST_VALUES} values, got {str(path)!r}, which has more, or without end: "
                "aliases (*name) of aliases multiply. Write the values out."
            )
        _refuse_twice(tree, str(path), set())
        values = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, InvalidArgument):
            raise
        deep = isinstance(error, RecursionError)
        reason = "its values are nested too deeply" if deep else " ".join(str(error).split())
        raise InvalidArgument(f"Expected a YAML file, got {str(path)!r}: {reason}.") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"Expected `key: value` lines in {str(path)!r}, got {type(values).__name__}.")
    return values


def _size(node: Any, known: dict[int, float]) -> float:  # noqa: ANN401  (a node of PyYAML)
    """Number of values below a node, with each alias as often as it is used; infinity for one that contains itself."""
    if node is None or not isinstance(node.value, list):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # as long as it is counted
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _refuse_twice(node: Any, path: str, seen: set[int]) -> None:  # noqa: ANN401  (a node of PyYAML)
    if node is None or id(node) in seen or not isinstance(node.value, list):
        return
    seen.add(id(node))
    keys: set[str] = set()
    for item in node.value:
        if isinstance(item, tuple):
            key, value = item
            if key.value in keys:
                raise InvalidArgument(
                    f"Expected each key once, got {key.value!r} again in {path!r}, line {key.start_mark.line + 1}. "
                    "YAML would take the last one and say nothing."
                )
            if isinstance(key.value, str):
                keys.add(key.value)
            _refuse_twice(value, path, seen)
        else:
            _refuse_twice(item, path, seen)


def parse_flags(arguments: Sequence[str]) -> dict[tuple[str, str], str]:
    """Flags as (section, key) -> text; the section of `task`, `strategy` and `output_dir` is empty.

    Args:
        arguments: `--training.steps 10`, `--steps=10`, `--dp-epsilon 3`: the section may be left out where the key
            is unique, dashes are underscores, and true may be left out.

    Raises:
        InvalidArgument: an unknown or ambiguous name, a flag twice, or a word that belongs to no flag.

    >>> parse_flags(["--dp-epsilon", "3", "--training.steps=10", "--bf16"])
    {('privacy', 'dp_epsilon'): '3', ('training', 'steps'): '10', ('training', 'bf16'): 'true'}
    >>> parse_flags(["--dp_epsilom", "3"])
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: No such flag: --dp_epsilom. Did you mean 'dp_epsilon'?
    """
    found: dict[tuple[str, str], str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise InvalidArgument(f"Expected a flag, got {word!r}. Values follow their flag: --steps 10.")
        name, equals, value = word.partition("=")
        place = _place(name)
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
            if not value:
                if _kind(place) is not bool:
                    raise InvalidArgument(f"Expected a value after {name}.")
                value = "true"
        if place in found:
            raise InvalidArgument(f"Expected each flag once, got {name} again.")
        found[place] = value
    return found


def _place(flag: str) -> tuple[str, str]:
    name = flag.removeprefix("--").replace("-", "_")
    places = {("", key): key for key in TOP}
    for section in SECTIONS:
        for key in (*kinds_of(section), *aliases(section)):
            places[section, key] = key
    full = {f"{section}.{key}": (section, key) for section, key in places if section}
    if name in full:
        return full[name]
    matches = [place for place, key in places.items() if key == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        options = " or ".join(f"--{section}.{key}" for section, key in matches)
        raise InvalidArgument(f"Expected one key for the flag {flag}, got several: say {options}.")
    known = list(full) if "." in name else list(places.values())
    raise InvalidArgument(f"No such flag: {flag}. {suggestion(name, known)}")


def _kind(place: tuple[str, str]) -> object:
    section, key = place
    return kinds_of(section)[aliases(section).get(key, key)] if section else str


def override(values: Mapping[str, Any], flags: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The values of a file with those of flags over them.

    Args:
        values: as from `read_yaml`. flags: as from `parse_flags`; for one of two alternatives (steps and epochs, budget
            and noise multiplier) it replaces the other one of the file.

    Raises:
        InvalidArgument: the text of a flag is not of the key's type.
    """
    merged = copy.deepcopy(dict(values))
    for place, text in flags.items():
        section, key = place
        if not section:
            merged[key] = text
            continue
        target = merged.get(section)
        if target is None:
            target = merged[section] = {}
        if not isinstance(target, dict):
            continue  # refused with the name of the section when the job is made
        other = aliases(section)
        canonical = other.get(key, key)
        replaced = ALTERNATIVES.get((section, canonical))
        gone = {canonical} | ({replaced[1]} if replaced and not _given(flags, replaced) else set())
        for present in [name for name in target if other.get(name, name) in gone]:
            if (section, present) not in flags or present == key:
                del target[present]
        target[key] = convert(f"--{key}", text, _kind(place), from_text=True)
    return merged


def _given(flags: Mapping[tuple[str, str], str], place: tuple[str, str]) -> bool:
    section, key = place
    return any(s == section and aliases(s).get(k, k) == key for s, k in flags)
