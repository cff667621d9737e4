"""The folder of a job with its finished run, for the tests of what may be done in it."""

from __future__ import annotations

import pytest
from text_job import finished_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return finished_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])
    return folder[0]
