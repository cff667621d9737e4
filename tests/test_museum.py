"""Faults of other libraries, and capabilities of the guides and trainers that this project replaces: each has its test."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent

MUSEUM = {
    "noise follows one bound, clipping another": "clipping/test_scheduled.py::test_noise_follows_the_bound",
    "only the last microbatch is counted": "test_clipped.py::test_microbatch_invariance",
    "the bound moves inside one logical batch": "clipping/test_adaptive.py::test_engines_agree",
    "an empty batch crashes": "test_step.py::test_empty_batch_is_a_step_that_costs",
    "a checkpoint restores neither bound nor sigma": "clipping/test_adaptive.py::test_a_resumed_run_has_its_bounds",
    "one NaN sample turns all parameters NaN": "test_clipped.py::test_rows_that_are_not_finite",
    "an engine returns the raw gradient": "engines/test_parity.py::test_clipped_sums_equal_the_loop",
    "grouped convolution is wrong": "engines/test_engine_rules.py::test_layers_equal_the_loop",
    "layers are silently not trained": "engines/test_parity.py::test_every_trained_parameter_gets_a_gradient",
    "a sample's norm depends on the length of others": "engines/test_parity.py::test_gradients_equal_the_loop",
    "per_layer is accepted and silently flat": "engines/test_parity.py::test_clipped_sums_of_groups_equal_the_loop",
    "AUTO-V gives NaN at a zero gradient": "clipping/test_rules.py::test_zero_gradient_stays_zero",
    "q is 1 / len(loader)": "sampling/test_poisson.py::test_the_probability_is_batch_size_over_data_set",
    "shuffled batches are accounted as Poisson": "sampling/test_base.py::test_shuffled_is_not_accounted_as_poisson",
    "the budget is checked after the breach": "test_step.py::test_budget",
    "delta = 1/n": "test_plan.py::test_contradictions_are_refused",
    "a closed formula for epsilon": "accounting/test_reference.py::test_museum_closed_form_epsilon",
    "a larger clip norm saves privacy": "test_plan.py::test_the_clip_norm_does_not_change_epsilon",
    "larger batches use less privacy": "test_plan.py::test_at_fixed_noise_larger_batches_cost_more",
    "GDP is used to calibrate": "accounting/test_calibration.py::test_museum_gdp_cannot_calibrate",
    "the tail of the accumulation is lost": "test_clipped.py::test_microbatch_invariance",
    "misspelt privacy arguments are swallowed": "test_step.py::test_misspelt_arguments_are_not_swallowed",
    "noise is drawn in another dtype than promised": "noise/test_gaussian.py::test_noise_is_drawn_as_promised",
    "the divisor is the drawn number of records": "test_step.py::test_divided_by_the_expected_size_after_the_noise",
    "the number of records is published": "evidence/test_certificate.py::test_what_is_published_has_no_number_of_records_no_batch_and_no_file_name",
    "a generator keeps 32 bits of its seed": "noise/test_streams.py::test_every_bit_of_a_key_changes_the_noise",
    "the step that crosses the budget is taken": "test_step.py::test_budget",
    "vmap gives each row the gradient of row 0, the value of the last row, the scale of the first": "engines/test_batching.py::test_rows_of_a_wrong_rule_are_those_alone",
    "vmap writes by an index after a slice into other places": "engines/test_reads.py::test_what_a_row_does_with_its_own_memory",
    "the sum is divided before the noise": "noise/test_gaussian.py::test_a_divided_sum_cannot_be_released",
}
# What a guide to private fine-tuning of LLaVA that this project replaces could do.
GUIDE = {
    "configuration names": "hf/trainer/test_arguments.py::test_flags_of_a_command_line",
    "noise from the budget": "hf/trainer/test_arguments.py::test_noise_is_computed_from_the_budget",
    "a given noise multiplier": "hf/trainer/test_arguments.py::test_a_noise_multiplier_is_used_as_it_is",
    "Poisson on and off": "hf/trainer/test_trainer.py::test_shuffled_batches_and_noise_of_the_device",
    "secure mode": "hf/trainer/test_trainer.py::test_shuffled_batches_and_noise_of_the_device",
    "physical and logical batch": "hf/trainer/test_trainer.py::test_memory_and_speed_change_no_result",
    "image and text": "hf/vision_language/test_strategies.py::test_batches_have_their_keys_shapes_and_labels",
    "strategies": "hf/vision_language/test_strategies.py::test_engines_equal_single_samples_for_each_strategy",
    "one command, under torchrun": "train/test_run.py::test_the_command_runs_under_torchrun_with_one_process",
    "metrics": "hf/trainer/test_trainer.py::test_metrics_reach_every_logger",
    "accounting at each checkpoint": "hf/trainer/test_trainer.py::test_each_checkpoint_and_the_end_have_their_accounting",
    "warning, stop before the breach": "hf/trainer/test_trainer.py::test_training_stops_before_the_breach",
    "requirements": "accounting/test_requirements.py::test_the_numbers_belong_together",
    "reading epsilon and delta": "accounting/test_requirements.py::test_tables",
    "model check, BatchNorm": "hf/test_models.py::test_batchnorms_are_counted",
    "several processes": "distributed/test_launch.py::test_the_trainer_is_the_same_on_two_processes",
    "length grouping": "hf/trainer/test_settings.py::test_arguments_that_break_privacy_are_refused",
    "bf16": "hf/trainer/test_trainer.py::test_bfloat16_trains_as_float32_does",
    "Trainer": "hf/trainer/test_trainer.py::test_the_trainer_equals_a_plain_loop",
    "the guide": "guides/test_llava_guide.py::test_the_whole_guide_runs",
    "resume": "hf/trainer/test_files.py::test_a_killed_run_resumes_bit_for_bit",
}
# What dp-transformers could do.
TRAINER = {
    "Trainer": "guides/test_trainer_guide.py::test_the_ordinary_script_becomes_private_by_the_diff",
    "arguments": "hf/trainer/test_arguments.py::test_incomplete_and_contradicting_values_are_refused",
    "no position_ids": "hf/test_tasks.py::test_labels_stay_and_all_else_goes_to_the_model",
    "Conv1D and rules of users": "engines/test_register.py::test_a_registered_rule_is_used",
    "launch": "distributed/test_launch.py::test_the_command_is_the_same_on_two_processes",
    "accumulation": "hf/trainer/test_trainer.py::test_memory_and_speed_change_no_result",
    "author level": "examples/test_authors.py::test_both_units_are_reported_side_by_side",
    "full and adapters": "train/test_run.py::test_the_adapter_opens_with_peft",
    "epsilon logged, final epsilon": "cli/test_train.py::test_what_a_run_says_and_leaves",
    "stop at max epsilon": "hf/trainer/test_arguments.py::test_a_ceiling_leaves_fewer_steps",
    "synthetic text": "examples/test_synthetic_text.py::test_synthetic_text_trains_a_classifier",
    "YAML jobs": "cli/test_train.py::test_what_a_run_says_and_leaves",
    "tips": "cli/test_train.py::test_commands_of_the_guide_work",
    "causal attention": "hf/test_models.py::test_a_decoder_does_not_see_what_it_predicts",
    "the twin": "hf/trainer/test_run.py::test_the_twin_is_an_ordinary_trainer",
}


def test_each_fault_and_each_capability_has_its_test():
    missing = []
    for what, where in [*MUSEUM.items(), *GUIDE.items(), *TRAINER.items()]:
        file, name = where.split("::")
        if not re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE):
            missing.append(what)
    assert missing == []


def test_no_capability_is_left_out():
    assert (len(GUIDE), len(TRAINER)) == (21, 15)


def test_names_of_tests_say_a_guarantee():
    """Letters with numbers are codes of a list that a reader does not have."""
    found = [
        name for path in HERE.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    ]
    assert len(found) > 1000
    assert [name for name in found if re.match(r"test_[A-Za-z]\d+_", name)] == []
