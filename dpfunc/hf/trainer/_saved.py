"""The weights that a run saves hold all that no folder has, and are read back as they were written.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging as levels

from dpfunc._utils.validation import refuse, shorten
from dpfunc.errors import CheckpointError
from dpfunc.hf._facts import base_model
from dpfunc.rehearsal import FAILURES, NOTHING_SPENT
from dpfunc.types import Params

_ADAPTER = "adapter_model.safetensors"
_BASE, _LAYER = "base_model.model.", ".base_layer."  # what PEFT adds to the names of a base


def beside_adapters(model: Any) -> list[str]:
    """Names of the parameters that neither an adapter nor the folder of its base has: trained ones, and drawn ones.

    A trained layer norm that PEFT has no place for, e.g., and a new pooler, which `from_pretrained` draws: read back
    with another seed the model would be another one. No weight is read. None without an adapter; of a base that was
    not read from a folder, or whose folder cannot be found again, those that are trained alone.
    """
    base: Any = base_model(model)
    if base is model:
        return []
    missing = _loaded(base, getattr(base, "name_or_path", ""))["missing_keys"]
    adapters = set(model.peft_config)
    starts = [str(getattr(config, "init_lora_weights", "")) for config in model.peft_config.values()]
    random = any(start.startswith("pissa_niter") for start in starts)  # takes a part of the base away, found at random
    return [
        name for name, param in model.named_parameters()
        if name.removeprefix(_BASE).replace(_LAYER, ".") in missing
        or (random and _LAYER in name)
        or (param.requires_grad and adapters.isdisjoint(name.split(".")))
    ]  # fmt: skip


def complete(folder: Path, model: Any, names: Sequence[str]) -> None:
    """Add parameters to adapters that were saved: PEFT gives each tensor in their files to the place of its name.

    tests/hf/trainer/test_saved.py::test_another_seed_gives_the_trained_model.
    """
    for path in folder.rglob(_ADAPTER) if names else ():
        added = {name: model.get_parameter(name).detach().cpu().clone().contiguous() for name in names}
        save_file({**added, **load_file(path)}, path, metadata={"format": "pt"})


def check_read_back(trainer: Any, folder: Path, params: Params) -> str | None:
    """Read the weights of a checkpoint back as `load_best_model_at_end` and a resumed run do; nothing is changed.

    Meanwhile the model has other values, so that what the files lack is missed. PEFT writes what p-tuning gives, not
    what it trains: read back it is another model, which a resumed run alone gets from elsewhere.

    Returns:
        A warning where they cannot be read, or not by `from_pretrained`, e.g. since the configuration has other shapes.

    Raises:
        CheckpointError: the files lack what is trained or was drawn; or cannot be read, and the run will need them.
    """
    written = {name: value.detach().clone() for name, value in params.items()}
    lost: list[str] = []
    failure, broken, best = "", False, trainer.args.load_best_model_at_end
    with torch.no_grad():
        try:
            for name, value in written.items():
                params[name].copy_(value + value.abs() + 1)
            trainer._load_from_checkpoint(str(folder), trainer.model)
            lost = [name for name, value in written.items() if not torch.equal(params[name].detach(), value)]
        except FAILURES as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            broken = not isinstance(error, ValueError)  # which says that there are no files that it knows
        finally:
            for name, value in written.items():
                params[name].copy_(value)
    got = failure or f"others for {shorten(lost)}"
    gone = _not_in(folder, trainer.model, {name: written[name] for name in lost})
    prompts = any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values())
    message = f"Expected weights that are read back as they were written, got {got}."
    refuse(
        ((gone or broken) and not prompts, CheckpointError(
            f"Expected saved weights that hold all that is trained or was newly drawn, got {got}: they would be lost. "
            f"Of PEFT name their modules in modules_to_save. {NOTHING_SPENT}")),
        (best and (failure or lost), CheckpointError(
            f"{message} Leave load_best_model_at_end out: it would end the run. {NOTHING_SPENT}")),
    )  # fmt: skip
    if failure:
        return f"{message} The run cannot be resumed after an interruption."
    if differ := sorted(set().union(*_loaded(trainer.model, str(folder)).values())):
        return (
            f"Expected a saved model that {type(trainer.model).__name__}.from_pretrained reads as it is, got other "
            f"shapes or places of {shorten(differ)}. Change model.config (num_labels, vocab_size) as the model was "
            "changed, or a user must: they would be drawn anew."
        )
    return None


def _not_in(folder: Path, model: Any, values: Params) -> list[str]:
    """Those of the values that `from_pretrained` does not give back either.

    It alone undoes the other names that files of some models have (LLaVA), for which a Trainer's own reading finds no
    place: tests/train/test_chats.py::test_pictures_in_chats_with_and_without.
    """
    if not values or not isinstance(model, PreTrainedModel):
        return [*values]
    try:
        with silent():
            read = dict(type(model).from_pretrained(folder, local_files_only=True, dtype="auto").named_parameters())
    except FAILURES:
        return [*values]
    return [
        name
        for name, value in values.items()
        if name not in read or not torch.equal(read[name].to(value.dtype), value.cpu())
    ]


def _loaded(model: Any, path: str) -> dict[str, set[str]]:
    """Names that do not fit when the class of a model is read from a folder; on no device, so that it costs no memory.

    All are empty where it cannot be read so: no model of Transformers, no folder, or other arguments of its class.
    """
    kinds: dict[str, set[str]] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    if not isinstance(model, PreTrainedModel) or not path:
        return kinds
    try:
        with silent():
            _, found = type(model).from_pretrained(
                path, device_map="meta", output_loading_info=True, local_files_only=True, ignore_mismatched_sizes=True
            )
    except FAILURES:
        return kinds
    return {name: {each if isinstance(each, str) else each[0] for each in found[name]} for name in kinds}


def read_adapters(model: Any, folder: Path) -> None:
    """Give adapters the values that `save_pretrained` has written into a folder, and change nothing else of the model.

    `load_adapter` of PEFT, which `Trainer` calls, would also train all of an adapter, leave one adapter active, end the
    training mode, and make new parameters in float32 of those in 16 bits, of which neither the optimizer nor the step
    of a run would know (tests/hf/trainer/test_saved.py::test_what_is_read_back_changes_no_part_of_the_model).
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    for name in model.peft_config:
        place = folder if name == "default" else folder / name
        set_peft_model_state_dict(model, load_peft_weights(str(place), device="cpu"), adapter_name=name)


@contextmanager
def silent() -> Iterator[None]:
    """Context in which Transformers shows no report of what it reads."""
    level, bars = levels.get_verbosity(), levels.is_progress_bar_enabled()
    levels.set_verbosity_error()
    levels.disable_progress_bar()
    try:
        yield
    finally:
        levels.set_verbosity(level)
        if bars:
            levels.enable_progress_bar()
