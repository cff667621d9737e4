"""Checkpoints that another version of Python wrote."""

from __future__ import annotations

import io
import pathlib

import pytest

from dpfunc.checkpoint.states import _Unpickler
from dpfunc.errors import CheckpointError


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_have_another_module_in_python_3_13(module):
    read = _Unpickler(io.BytesIO())
    assert read.find_class(module, "PosixPath") is pathlib.PosixPath
    for name in ("Path", "os", "UnsupportedOperation"):
        with pytest.raises(CheckpointError, match="Expected a description of tensors"):
            read.find_class(module, name)
