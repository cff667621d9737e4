"""Adapters as safetensors files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from torch import Tensor, nn

from dpfunc.checks import shorten
from dpfunc.errors import CheckpointError
from dpfunc.lora.adapter import LoRA, attach
from dpfunc.rng import insecure_key
from dpfunc.types import Params

SCHEMA = "dpfunc-lora-1"


def save(path: Path | str, adapter: LoRA, params: Params) -> None:
    """Write an adapter as one safetensors file: parameters, frozen A, and the configuration in its metadata.

    Args:
        path: the file; overwritten. adapter: from `attach`. params: trained parameters; released.

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

    every = {name: value.detach().cpu().contiguous() for name, value in {**adapter.constants, **params}.items()}
    config = json.dumps(dataclasses.asdict(adapter.config))
    save_file(every, Path(path), metadata={"format": "pt", "schema": SCHEMA, "config": config})


def load(path: Path | str, module: nn.Module) -> tuple[LoRA, dict[str, Tensor]]:
    """Read an adapter for a module.

    Args:
        path: file from `save`. module: the module that the adapter was made for, or one of the same form.

    Returns:
        The adapter and its trained parameters.

    Raises:
        CheckpointError: not an adapter file, or its tensors do not fit; the difference is shown.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The adapter {path} cannot be read: {error}") from error
    if metadata.get("schema") != SCHEMA:
        raise CheckpointError(f"Expected an adapter with schema {SCHEMA!r} in {path}, got {metadata.get('schema')!r}.")
    config = json.loads(metadata["config"])
    adapter = attach(module, insecure_key(0), **{**config, "targets": tuple(config["targets"])})
    expected = {**adapter.constants, **adapter.params}
    differ = [
        f"{name}: saved {describe(saved.get(name))}, module needs {describe(expected.get(name))}"
        for name in sorted(saved.keys() | expected.keys())
        if describe(saved.get(name)) != describe(expected.get(name))
    ]
    if differ:
        raise CheckpointError(f"The adapter {path} does not fit the module: {shorten(differ)}.")
    constants, params = (
        {name: saved[name].to(ours) for name, ours in part.items()} for part in (adapter.constants, adapter.params)
    )
    return dataclasses.replace(adapter, constants=constants), params


def describe(value: Tensor | None) -> str:
    """Shape of a tensor, for messages."""
    return "absent" if value is None else str(tuple(value.shape))
