"""A refusal of one process is one of all."""

from __future__ import annotations

import pytest

from dpfunc._utils import processes
from dpfunc._utils.processes import refused_by_all
from dpfunc.errors import UnsupportedModel


def test_a_refusal_of_one_process_is_one_of_all(monkeypatch):
    said = []
    monkeypatch.setattr(processes, "on_any_process", lambda flag: said.append(flag) or True)
    with pytest.raises(UnsupportedModel, match="own reason"), refused_by_all():
        raise UnsupportedModel("own reason")
    with pytest.raises(UnsupportedModel, match="Another process"), refused_by_all():
        pass
    assert said == [True, False]
