"""Four processes at once, killed at 200 points: what they had told in files of their own is what the budget says."""

from __future__ import annotations

import pytest
from budget_truth import check, killed


@pytest.mark.slow  # 200 processes
def test_no_charge_is_lost_or_counted_twice(tmp_path):
    found = killed(str(tmp_path / "budget.db"), tmp_path / "told", kills=200)
    where = check(found)
    assert found["kills"] == 200
    assert where["planned"] >= 20  # killed while they reserved
    assert where["settling"] >= 5


def test_a_few_kills(tmp_path):
    check(killed(str(tmp_path / "budget.db"), tmp_path / "told", kills=12))
