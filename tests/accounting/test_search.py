"""Searches find the edge of a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpfunc.accounting._search import largest_integer, least_scale


@given(st.floats(0.2, 3.0), st.floats(1e-3, 1e3), st.integers(0, 10**6), st.floats(0.1, 10.0))
def test_the_integer_search_finds_the_last_that_fits(power, scale, guess, target):
    limit = 10**6

    def cost(k):
        return scale * (k / 1000) ** power

    k = largest_integer(cost, target, limit, guess)
    assert cost(k) <= target
    assert k == limit or cost(k + 1) > target


@given(st.floats(-3.0, -0.2), st.floats(0.01, 100.0), st.booleans())
def test_the_real_search_finds_the_edge(power, root, jump):
    def cost(s):
        return (s / root) ** power * (3.0 if jump and s < root else 1.0)

    found = least_scale(cost, 1.0)
    assert cost(found) <= 1.0 < cost(found * (1 - 2.1e-4))
