"""What a run needs; and meanings of epsilon and delta that are true."""

import math
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfunc._utils.validation import total_steps
from dpfunc.accounting import DELTA_TABLE, EPSILON_TABLE, Ledger, epsilon, privacy_requirements
from dpfunc.accounting.requirements import explain_delta, explain_epsilon, suggest_delta
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

ASK = partial(privacy_requirements, dataset_size=1000, batch_size=32, epochs=3, target_epsilon=3.0)


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 200))
def test_no_step_is_lost_to_rounding(n, batch, epochs):
    steps = total_steps(n, batch, epochs)
    assert steps * batch >= epochs * n > (steps - 1) * batch
    tenths = total_steps(n, batch, epochs / 10)
    assert tenths * batch >= Fraction(epochs, 10) * n > (tenths - 1) * batch


def test_the_numbers_belong_together():
    need = ASK()
    assert need.total_steps == 94
    assert need.sampling_prob == 0.032
    assert need.delta == pytest.approx(1e-5)
    run = Ledger((Event(need.sampling_prob, need.noise_multiplier, need.total_steps),))
    assert need.guarantee == epsilon(run, need.delta)
    assert 2.99 <= need.guarantee.epsilon <= 3.0
    assert "larger batches cost MORE" in " ".join(need.guidance)
    assert all(c.noise_per_step == pytest.approx(c.noise_multiplier / c.batch_size) for c in need.choices)
    assert [choice.noise_multiplier for choice in need.choices] == sorted(c.noise_multiplier for c in need.choices)


@pytest.mark.parametrize(
    ("n", "epochs", "sizes", "advice"), [(60000, 60, (256, 6000), 4096), (50, 10, (1, 20, 50), 32)]
)
def test_advice_does_not_depend_on_the_batch_size_asked_for(n, epochs, sizes, advice):
    """A size asked for is one row more in the table, and no candidate."""
    for size in sizes:
        need = privacy_requirements(dataset_size=n, batch_size=size, epochs=epochs, target_epsilon=3.0)
        assert need.recommended_batch_size == advice
        assert size in [choice.batch_size for choice in need.choices]


BAD = {
    "dataset_size": (1, 1000.0, 2**2000), "batch_size": (0, 1001), "epochs": (0, math.nan), "target_epsilon": (0.0,),
    "delta": (1e-3, 0.5, 0.0),
}  # fmt: skip
REFUSED = {
    **{f"{name}={str(value)[:9]}": partial(ASK, **{name: value}) for name, values in BAD.items() for value in values},
    **{f"epsilon {value}": partial(explain_epsilon, value) for value in (-1.0, math.nan, math.inf)},
    **{f"2**{power} records": partial(explain_delta, 0.1, 2**power) for power in (2000, 20_000)},
    **{f"a delta for 2**{power} records": partial(suggest_delta, 2**power) for power in (2000, 20_000)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused(name):
    with pytest.raises(InvalidArgument):
        REFUSED[name]()


@given(st.integers(2, 10**9))
def test_suggested_delta_is_below_one_over_n(n):
    assert 0 < suggest_delta(n) < 1 / (10 * n)
    assert suggest_delta(n) <= 1e-5
    assert "Prefer a smaller one" not in explain_delta(suggest_delta(n), n).words


def test_tables():
    assert [row.epsilon for row in EPSILON_TABLE] == sorted(row.epsilon for row in EPSILON_TABLE)
    assert explain_epsilon(1e6).odds_factor == math.inf
    assert "one random record" in explain_delta(1 / 1000, 1000).words
    assert explain_delta(1e-9, 1000).words == DELTA_TABLE[-1].words
    for ratio, said in ((0.33, "1/(10n) to 1/(2n)"), (0.05, "below 10 %"), (0.7, "1/(2n) to 1/n"), (1e-4, "no longer")):
        assert said in explain_delta(ratio / 1000, 1000).words
