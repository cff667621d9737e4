"""Contestants of a benchmark in the process of the test: without the seconds that the imports of each process take."""

from __future__ import annotations

import logging
import tempfile
import warnings

import pytest
import torch

from benchmarks import measure


class Local(measure.Process):
    """What `measure.Process` is to `compete`, without a process."""

    def __init__(self, spec):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in the process of a contestant
            try:
                self.server = measure.Server(spec)
            except Exception as error:
                raise measure.Failed(measure.reason(error)) from error
        self.folder, self.facts = tempfile.TemporaryDirectory(), self.server.facts()

    def ask(self, command):
        name, _, argument = command.partition(" ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same
            return getattr(self.server, name)(*([argument] if argument else []))

    def close(self):
        self.folder.cleanup()


@pytest.fixture
def locally(monkeypatch):
    """Contestants run in this process."""
    monkeypatch.setattr(measure, "Process", Local)


@pytest.fixture
def settings_stay_as_they_were():
    """Of the process: the number of threads, and which messages are logged."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)
