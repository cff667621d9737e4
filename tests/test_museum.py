"""Faults reproduced in other libraries, and the test that keeps each out of this one. The test must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

MUSEUM = {
    "noise follows one bound, clipping another": "test_step.py::test_noise_follows_the_bound_of_each_plan",
    "only the last microbatch is counted": "test_guarantees.py::test_microbatch_invariance",
    "an empty batch crashes": "test_step.py::test_empty_batch_is_a_step_that_costs",
    "a checkpoint restores neither bound nor sigma": "checkpoint/test_one_process.py::test_another_run_is_refused_with_the_difference",
    "one NaN sample turns all parameters NaN": "test_step.py::test_nan_sample_leaves_the_rest_alone",
    "an engine returns the raw gradient": "engines/test_museum_engines.py::test_no_engine_returns_the_raw_gradient",
    "grouped convolution is wrong": "engines/test_museum_engines.py::test_grouped_and_3d_convolutions_are_trained_in_any_order",
    "layers are silently not trained": "engines/test_parity.py::test_every_trained_parameter_gets_a_gradient",
    "a sample's norm depends on the length of others": "engines/test_museum_engines.py::test_the_length_of_others_does_not_matter",
    "per_layer is accepted and silently flat": "engines/test_museum_engines.py::test_per_layer_is_not_silently_flat",
    "AUTO-V gives NaN at a zero gradient": "engines/test_museum_engines.py::test_auto_v_at_a_zero_gradient",
    "q is 1 / len(loader)": "sampling/test_poisson.py::test_the_probability_is_batch_size_over_data_set",
    "shuffled batches are accounted as Poisson": "sampling/test_base.py::test_shuffled_is_not_accounted_as_poisson",
    "the budget is checked after the breach": "test_step.py::test_budget",
    "delta = 1/n": "test_plan.py::test_contradictions_are_refused",
    "a closed formula for epsilon": "accounting/test_reference.py::test_museum_closed_form_epsilon",
    "a larger clip norm saves privacy": "test_plan.py::test_the_clip_norm_does_not_change_epsilon",
    "larger batches use less privacy": "test_plan.py::test_at_fixed_noise_larger_batches_cost_more",
    "GDP is used to calibrate": "accounting/test_calibration.py::test_museum_gdp_cannot_calibrate",
    "the tail of the accumulation is lost": "test_guarantees.py::test_microbatch_invariance",
    "misspelt privacy arguments are swallowed": "test_step.py::test_misspelt_arguments_are_not_swallowed",
    "noise is drawn in another dtype than promised": "noise/test_gaussian.py::test_noise_is_drawn_as_promised",
    "the divisor is the drawn number of records": "test_step.py::test_divided_by_the_expected_size_after_the_noise",
    "the number of records is published": "evidence/test_certificate.py::test_what_is_published_has_no_number_of_records_no_batch_and_no_file_name",
    "a generator keeps 32 bits of its seed": "noise/test_streams.py::test_every_bit_of_a_key_changes_the_noise",
    "the step that crosses the budget is taken": "test_step.py::test_budget",
    "the sum is divided before the noise": "noise/test_gaussian.py::test_a_divided_sum_cannot_be_released",
}


@pytest.mark.parametrize("fault", MUSEUM)
def test_each_fault_has_its_test(fault):
    file, name = MUSEUM[fault].split("::")
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE)
