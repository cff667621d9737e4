"""Reading and writing of adapters as safetensors files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from torch import Tensor, nn

from dpfunc._utils.validation import shorten
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.functional.forward import check_params
from dpfunc.lora.adapter import LoRA, attach
from dpfunc.rng import insecure_key
from dpfunc.types import Params

SCHEMA = "dpfunc-lora-1"


def save(path: Path | str, adapter: LoRA, params: Params) -> None:
    """Write an adapter as one safetensors file: parameters, frozen A, and the configuration in its metadata.

    Args:
        path: the file; replaced as a whole. adapter: from `attach`. params: trained parameters; released.

    Raises:
        InvalidArgument: params of another adapter.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> adapter = attach(model, insecure_key(0), targets="0", rank=2, alpha=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/adapter.safetensors", adapter, adapter.params)
    ...     again, params = load(folder + "/adapter.safetensors", model)
    >>> again.config == adapter.config
    True
    """
    from safetensors.torch import save_file

    check_params(params, {name: param.shape for name, param in adapter.params.items()})
    every = {name: value.detach().cpu().clone().contiguous() for name, value in {**adapter.constants, **params}.items()}
    config = json.dumps(dataclasses.asdict(adapter.config))
    unfinished = Path(f"{path}.unfinished")
    save_file(every, unfinished, metadata={"format": "pt", "schema": SCHEMA, "config": config})
    os.replace(unfinished, path)


def load(path: Path | str, module: nn.Module) -> tuple[LoRA, dict[str, Tensor]]:
    """Read an adapter for a module.

    Args:
        path: file from `save`. module: the module that the adapter was made for, or one of the same form.

    Returns:
        The adapter and its trained parameters, in the dtype and on the device of the module.

    Raises:
        CheckpointError: not an adapter file, or it does not fit the module; the difference is shown.
    """
    saved, metadata = _read(path)
    if metadata.get("schema") != SCHEMA:
        raise CheckpointError(f"Expected an adapter with schema {SCHEMA!r} in {path}, got {metadata.get('schema')!r}.")
    try:
        adapter = attach(module, insecure_key(0), **json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:  # InvalidArgument is a ValueError
        problem = error if isinstance(error, InvalidArgument) else f"its configuration is damaged: {error!r}"
        raise CheckpointError(f"The adapter {path} does not fit the module: {problem}") from error
    expected = {**adapter.constants, **adapter.params}
    forms = {n: (_form(saved.get(n)), _form(expected.get(n))) for n in sorted(saved.keys() | expected.keys())}
    if differ := [f"{n}: saved {was}, module needs {need}" for n, (was, need) in forms.items() if was != need]:
        raise CheckpointError(f"The adapter {path} does not fit the module: {shorten(differ)}.")
    fitting = {name: saved[name].to(ours) for name, ours in expected.items()}
    return dataclasses.replace(adapter, constants={n: fitting.pop(n) for n in adapter.constants}), fitting


def _form(value: Tensor | None) -> str:
    return "absent" if value is None else str(tuple(value.shape))


def _read(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(str(path), framework="pt") as file:
            return load_file(path), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The adapter {path} cannot be read: {error}") from error
