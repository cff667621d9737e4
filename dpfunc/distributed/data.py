"""Data sets of several processes: all have the same records in the same order, or none trains."""

from __future__ import annotations

from collections.abc import Callable

from dpfunc.distributed.launch import check_same
from dpfunc.distributed.ranks import Ranks, all_or_raise
from dpfunc.errors import StepAborted

_SAME_ORDER = (
    "A draw is a list of record numbers: all processes need the same records in the same order, prepared alike. "
    "Otherwise a record can be in one batch twice. Sort lists of files, do not iterate over sets, and shuffle with the "
    "same seed. If records differ each time they are read (random numbers other than torch's), name the data set: "
    "data_name=..., a version or a hash."
)


def check_same_data(describe: Callable[[], str], ranks: Ranks | None) -> str:
    """Check that all processes describe their data set alike.

    Args:
        describe: reads the data set of this process and returns a text; it must not communicate. ranks: of the run.

    Returns:
        The text.

    Raises:
        RankMismatch: on all processes, if the texts differ. StepAborted: another process could not read its data set.
        Whatever `describe` raises.

    Guarantees:
        tests/distributed/test_data.py::test_a_data_set_in_another_order_is_an_error_of_all.

    >>> check_same_data(lambda: "mails of May", None)
    'mails of May'
    """
    unread = "Another process could not read its data set; its own error says why. Nothing was spent."
    text = all_or_raise(describe, ranks, StepAborted(unread))
    check_same("data sets", text, ranks, _SAME_ORDER)
    return text
