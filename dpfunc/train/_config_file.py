"""A job from a YAML file and from flags that override it; what is not understood is refused, never dropped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import yaml
from pydantic import TypeAdapter, ValidationError

from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import OTHER_NAMES, own_names
from dpfunc.train.config import SECTIONS, TOP, Job, explained, job_from_dict

# Far more than the largest job has, which lists every key and all labels and targets. A text of LONG characters counts
# as two values, so that aliases multiply no long text either.
MOST_BYTES, MOST_VALUES, LONG = 2**20, 10_000, 100
# A flag for one of these replaces the other one of the file.
_ALTERNATIVES = {"steps": "epochs", "dp_epsilon": "dp_noise_multiplier", "eval": "eval_fraction"}
_ALTERNATIVES |= {other: key for key, other in _ALTERNATIVES.items()}
_NOTHING = ("null", "none")


def read_job(path: Path | str, flags: Sequence[str] = ()) -> Job:
    """The job of a YAML file, with flags over it.

    Args:
        path: the file. flags: as on a command line, see `parse_flags`.

    Guarantees:
        tests/train/test_config_file.py: a key twice is refused (test_a_key_twice_is_refused), flags win
        (test_flags_override_the_file).
    """
    return job_from_dict(override(read_yaml(path), parse_flags(flags)))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # has no types
    """Loader of plain values, for which 1e-5 is a number, as in YAML 1.2 and JSON; in YAML 1.1 it is a text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file. Only plain values: no tags, no key twice, and no more than a job can have.

    Raises:
        InvalidArgument: it cannot be read; the message names the line, and shows nothing of it. Or it is too large,
            also by aliases of aliases, which a few lines can multiply to any size.

    Guarantees:
        tests/train/test_config_file.py::test_a_file_that_multiplies_itself_is_refused,
        ::test_errors_show_no_value_of_the_file.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InvalidArgument(f"Expected a job of at most {MOST_BYTES} bytes, got {str(path)!r}, which has more.")
        loader = _Loader(raw.decode("utf-8"))
        tree = loader.get_single_node()
        if _size(tree, str(path), {}) > MOST_VALUES:
            raise InvalidArgument(
                f"Expected a job of at most {MOST_VALUES} values, got {str(path)!r}, which has more, or without end: "
                "aliases (*name) of aliases multiply. Write the values out."
            )
        values = None if tree is None else loader.construct_document(tree)
    except InvalidArgument:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidArgument(f"Expected a YAML file, got {str(path)!r}: {_reason(error)}.") from None
    if not isinstance(values, dict):
        raise InvalidArgument(f"Expected `key: value` lines in {str(path)!r}, got {type(values).__name__}.")
    return values


def _reason(error: Exception) -> str:
    """The problem and its line. PyYAML also shows the line itself, which may hold a password."""
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = re.sub(r"['\"].*['\"]", "...", str(getattr(error, "problem", None)), flags=re.DOTALL)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _size(node: Any, path: str, known: dict[int, int]) -> int:
    """Number of values below a node, with each alias as often as it is used, and long texts as several.

    A node that contains itself has more than any job. A mapping with a key twice is refused on the way.
    """
    if node is None or not isinstance(node.value, list):
        return 1 if node is None else 1 + len(node.value) // LONG
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # as long as it is counted
        parts, keys = node.value, set()
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
            for key in parts[::2]:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise InvalidArgument(
                        f"Expected each key once, got {key.value!r} again in {path!r}, line "
                        f"{key.start_mark.line + 1}. YAML would take the last one and say nothing."
                    )
                keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        known[id(node)] = 1 + sum(_size(part, path, known) for part in parts)
    return known[id(node)]


def _places() -> dict[tuple[str, str], object]:
    """Each key as (section, name), with its type; keys at the top have the section ""."""
    kinds: dict[tuple[str, str], object] = {("", key): str for key in TOP}
    for section, cls in SECTIONS.items():
        kinds |= {(section, key): kind for key, kind in get_type_hints(cls).items()}
    return kinds | {("privacy", name): kinds["privacy", key] for name, key in OTHER_NAMES.items()}


def parse_flags(arguments: Sequence[str]) -> dict[tuple[str, str], str]:
    """Flags as (section, key) -> text; the section of `task`, `strategy` and `output_dir` is empty.

    Args:
        arguments: `--training.steps 10`, `--steps=10`, `--dp-epsilon 3`: the section may be left out where the key
            is unique, dashes are underscores, and true may be left out.

    >>> parse_flags(["--dp-epsilon", "3", "--training.steps=10", "--bf16"])
    {('privacy', 'dp_epsilon'): '3', ('training', 'steps'): '10', ('training', 'bf16'): 'true'}
    >>> parse_flags(["--dp_epsilom", "3"])
    Traceback (most recent call last):
    click.exceptions.NoSuchOption: No such option '--dp_epsilom'.
    """
    options = _options()
    settings = {"token_normalize_func": lambda name: name.replace("-", "_")}
    command = click.Command(None, params=[*options], add_help_option=False, context_settings=settings)
    given = command.make_context("dpfunc train CONFIG", [*arguments]).params
    flags: dict[tuple[str, str], str] = {}
    for option, place in options.items():
        texts = given[str(option.name)]
        if len(texts) > 1:
            raise click.UsageError(f"Expected each flag once, got {option.opts[-1]} again.")
        for text in texts:
            if not text or text.startswith("--"):
                raise click.UsageError(f"Expected a value after {option.opts[-1]}, got {text!r}.")
            flags[place] = text
    return flags


def _options() -> dict[click.Option, tuple[str, str]]:
    """Options of click for all keys, with their keys: `--section.key`, and `--key` where that is unique."""
    kinds = _places()
    keys = Counter(key for _, key in kinds)
    options: dict[click.Option, tuple[str, str]] = {}
    for (section, key), kind in kinds.items():
        words = [f"--{section}.{key}"] * bool(section) + [f"--{key}"] * (keys[key] == 1)
        option = partial(click.Option, [f"{section}_{key}", *words], multiple=True)
        options[option(is_flag=False, flag_value="true") if kind is bool else option()] = section, key
    return options


def override(values: Mapping[str, Any], flags: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The values of a file with those of flags over them.

    Args:
        values: as from `read_yaml`. flags: as from `parse_flags`; for one of two alternatives (steps and epochs, budget
            and noise multiplier) it replaces the other one of the file.
    """
    kinds = _places()
    given: dict[str, dict[str, Any]] = {}
    for (section, key), text in flags.items():
        given.setdefault(section, {})[key] = _from_text(f"--{key}", text, kinds[section, key])
    merged = {**values, **given.pop("", {})}
    for section, new in given.items():
        old = {} if merged.get(section) is None else merged[section]
        if not isinstance(old, Mapping):
            continue  # refused with the name of the section when the job is made
        if section == "privacy":
            old, new = own_names(old), own_names(new)
        replaced = {_ALTERNATIVES.get(key) for key in new}
        merged[section] = {key: value for key, value in old.items() if key not in replaced} | new
    return merged


def _from_text(flag: str, text: str, kind: Any) -> object:
    """The value of a flag: null, a list, or what pydantic makes of it. The limits of its key are checked in the job."""
    options = get_args(kind)
    if type(None) in options and text.lower() in _NOTHING:
        return None
    items = [get_args(option)[0] for option in options if get_origin(option) is tuple]
    adapter: TypeAdapter[object] = TypeAdapter(items[0] if items else kind)
    try:
        if items:
            return [adapter.validate_strings(item.strip()) for item in text.split(",")]
        return adapter.validate_strings(text)
    except ValidationError as error:
        raise explained(error, flag) from None
