"""Jobs from a YAML file, flags that override it, and a grid; what is not understood is refused, never dropped.

May import: its folder, features and below. Privacy depends on it: no.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import yaml
from pydantic import TypeAdapter, ValidationError

from dpfunc._utils.validation import expect, refuse, suggestion
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import OTHER_NAMES, own_names
from dpfunc.train.config import ADAPTERS, SECTIONS, TOP, Job, explained, job_from_dict

# Far more than the largest job has, which lists every key and all labels and targets. A text of LONG characters counts
# as two values, so that aliases multiply no long text either.
MOST_BYTES, MOST_VALUES, LONG = 2**20, 10_000, 100
# A flag for one of these replaces the other one of the file.
_ALTERNATIVES = {
    "steps": "epochs", "dp_epsilon": "dp_noise_multiplier", "eval": "eval_fraction",
    "epochs": "steps", "dp_noise_multiplier": "dp_epsilon", "eval_fraction": "eval",
}  # fmt: skip
# Keys of a job that can be searched, with their sections.
GRID_KEYS = {
    "learning_rate": ("training", "learning_rate"), "batch_size": ("training", "batch_size"),
    "steps": ("training", "steps"), "rank": ("lora", "rank"),
}  # fmt: skip
_SPELT = {way: key for key, place in GRID_KEYS.items() for way in (key, ".".join(place), key.replace("_", "-"))}
FACTORS = (0.3, 1.0, 3.0)
_MOST_COMBINATIONS = 1000


def read_job(path: Path | str, flags: Sequence[str] = (), *, no_dp: bool = False) -> Job:
    """The job of a YAML file, with flags over it; or its twin without privacy, in a folder of its own."""
    # tests/train/test_config_file.py::test_a_key_twice_is_refused, ::test_flags_override_the_file
    values = override(read_yaml(path), parse_flags(flags))
    if no_dp:
        values = override(values, {("privacy", "dp_enabled"): "false"})
    job = job_from_dict(values)
    return replace(job, output_dir=f"{job.output_dir.rstrip('/')}-no-dp") if no_dp else job


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # has no types
    """Loader for which 1e-5 is a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file of plain values: no tags, no key twice, and no more than a job can have."""
    # Errors show nothing of it: tests/train/test_config_file.py::test_errors_show_no_value_of_the_file
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        refuse(
            (len(raw) > MOST_BYTES,
             f"Expected a job of at most {MOST_BYTES} bytes, got {str(path)!r}, which has more."),
        )  # fmt: skip
        loader = _Loader(raw.decode("utf-8"))
        tree = loader.get_single_node()
        refuse(
            (tree is None, f"Expected `key: value` lines in {str(path)!r}, which is empty."),
            (tree is not None and _size(tree, str(path), {}) > MOST_VALUES,
             f"Expected a job of at most {MOST_VALUES} values, got {str(path)!r}, which has more, or without end: "
             "aliases (*name) of aliases multiply. Write the values out."),
        )  # fmt: skip
        values = loader.construct_document(tree)
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
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    problem = re.sub(r"['\"].*['\"]", "...", str(error.problem), flags=re.DOTALL)
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {problem}"


def _size(node: Any, path: str, known: dict[int, int]) -> int:
    """Number of values below a node, aliases and long texts as several; a key that is there twice is refused."""
    if not isinstance(node.value, list):
        return 1 + len(node.value) // LONG
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # as long as it is counted: a node that contains itself has too many
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in parts], path)
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_size(part, path, known) for part in parts)
    return known[id(node)]


def _check_keys(keys: Sequence[Any], path: str) -> None:
    seen = set[str]()
    for key in (each for each in keys if isinstance(each, yaml.ScalarNode)):
        if key.value in seen:
            raise InvalidArgument(
                f"Expected each key once, got {key.value!r} again in {path!r}, line "
                f"{key.start_mark.line + 1}. YAML would take the last one and say nothing."
            )
        seen.add(key.value)


# Each key as (section, name), with its type; keys at the top have the section "".
_PLACES: dict[tuple[str, str], Any] = {("", key): str for key in TOP} | {
    (section, key): kind for section, each in SECTIONS.items() for key, kind in get_type_hints(each).items()
}
_PLACES |= {("privacy", name): _PLACES["privacy", key] for name, key in OTHER_NAMES.items()}


def parse_flags(arguments: Sequence[str]) -> dict[tuple[str, str], str]:
    """Flags as (section, key) -> text; the section of `task`, `strategy` and `output_dir` is empty.

    The section may be left out where the key is unique, dashes are underscores, and true may be left out.

    >>> parse_flags(["--dp-epsilon", "3", "--training.steps=10", "--bf16"])
    {('privacy', 'dp_epsilon'): '3', ('training', 'steps'): '10', ('training', 'bf16'): 'true'}
    >>> parse_flags(["--dp_epsilom", "3"])
    Traceback (most recent call last):
    click.exceptions.NoSuchOption: No such option '--dp_epsilom'.
    """
    keys = Counter(key for _, key in _PLACES)
    options: dict[click.Option, tuple[str, str]] = {}
    for (section, key), kind in _PLACES.items():
        words = [f"--{section}.{key}"] * bool(section) + [f"--{key}"] * (keys[key] == 1)
        bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if kind is bool else {}
        options[click.Option([f"{section}_{key}", *words], multiple=True, **bare)] = section, key
    command = click.Command(
        None, params=[*options], add_help_option=False,
        context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
    )  # fmt: skip
    given = command.make_context("dpfunc train CONFIG", [*arguments]).params
    flags: dict[tuple[str, str], str] = {}
    for option, place in options.items():
        texts = given[str(option.name)]
        refuse(
            (len(texts) > 1, click.UsageError(f"Expected each flag once, got {option.opts[-1]} again.")),
            *((not text or text.startswith("--"),
               click.UsageError(f"Expected a value after {option.opts[-1]}, got {text!r}.")) for text in texts),
        )  # fmt: skip
        for text in texts:
            flags[place] = text
    return flags


def override(values: Mapping[str, Any], flags: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The values of a file with those of flags over them; of two alternatives a flag replaces the other one."""
    given: dict[str, dict[str, Any]] = {}
    for (section, key), text in flags.items():
        given.setdefault(section, {})[key] = _from_text(section, key, text)
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


def _from_text(section: str, key: str, text: str) -> object:
    """The value of a flag: null, a list, or what pydantic makes of it. The limits of its key are checked in the job."""
    kind: Any = _PLACES[section, key]
    options = get_args(kind)
    if type(None) in options and text.lower() in ("null", "none"):
        return None
    items = [get_args(option)[0] for option in options if get_origin(option) in (list, tuple)]
    adapter: TypeAdapter[object] = TypeAdapter(items[0] if items else kind)
    try:
        if items:
            return [adapter.validate_strings(item.strip()) for item in text.split(",")]
        return adapter.validate_strings(text)
    except ValidationError as error:
        raise explained(error, f"--{key}", f"{section}.{key}") from None


# Values to try: key of `GRID_KEYS` -> texts as of flags; and factors of the learning rate.
Grid = tuple[Mapping[str, tuple[str, ...]], tuple[float, ...]]


def parse_grid(texts: Sequence[str], factors: str | None) -> Grid:
    """The grid of `key=value,value` with or without sections, and of `0.3,1,3`; None for `FACTORS`.

    >>> parse_grid(["batch_size=64,128"], None)
    ({'batch_size': ('64', '128')}, (0.3, 1.0, 3.0))
    """
    values: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        key = _SPELT.get(name.strip(), "")
        expect(key, "key=value,value in --grid", "--grid", text, suggestion(name.strip(), GRID_KEYS))
        choices = tuple(part.strip() for part in listed.split(","))
        expect(
            key not in values and all(choices) and len(set(choices)) == len(choices),
            "each key of --grid once, with different values", "--grid", text,
        )  # fmt: skip
        values[key] = choices
    chosen = _factors(factors)
    if "learning_rate" in values:
        refuse(
            (factors is not None,
             "Expected --factors or learning rates in --grid, got both: factors multiply these."),
        )  # fmt: skip
        chosen = (1.0,)
    size = len(chosen) * math.prod(map(len, values.values()))
    expect(size <= _MOST_COMBINATIONS, f"at most {_MOST_COMBINATIONS} combinations in --grid", "combinations", size)
    return values, chosen


def _factors(text: str | None) -> tuple[float, ...]:
    if text is None:
        return FACTORS
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    expect(
        factors and all(0 < each < math.inf for each in factors) and len(set(factors)) == len(factors),
        "different numbers > 0 in --factors, with commas", "--factors", text,
    )  # fmt: skip
    return factors


def trials(
    values: Mapping[str, Any], flags: Mapping[tuple[str, str], str], grid: Grid
) -> tuple[tuple[Job, float], ...]:
    """All combinations of a grid over a job: the job, and a factor of its learning rate, which a recipe may give."""
    tried, factors = grid
    jobs = [
        job_from_dict(override(values, {**flags, **dict(zip(map(GRID_KEYS.__getitem__, tried), texts, strict=True))}))
        for texts in itertools.product(*tried.values())
    ]
    return tuple(itertools.product(jobs, factors))


def tuned(values: Mapping[str, Any], chosen: Job) -> dict[str, Any]:
    """The values of a job file with those of a candidate, for `dpfunc train`."""

    def given(section: object, *names: str) -> dict[str, Any]:
        return {name: getattr(section, name) for name in names if getattr(section, name) is not None}

    kept = {
        **{name: value for name, value in (values.get("training") or {}).items() if name != "epochs"},
        **given(chosen.training, "learning_rate", "head_rate", "batch_size", "steps", "physical_batch_size"),
    }
    privacy = (values.get("privacy") or {}) | given(chosen.privacy, "dp_clip", "dp_max_grad_norm")  # of a recipe, too
    lora = {"lora": (values.get("lora") or {}) | given(chosen.lora, "rank", "top_layers")}
    return {**values, "privacy": privacy, "training": kept, **(lora if chosen.strategy in ADAPTERS else {})}
