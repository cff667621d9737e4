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
CAPABILITIES = {
    "L1 configuration names": "hf/trainer/test_arguments.py::test_L1_flags_of_a_command_line",
    "L2 noise from the budget": "hf/trainer/test_arguments.py::test_L2_noise_is_computed_from_the_budget",
    "L3 a given noise multiplier": "hf/trainer/test_arguments.py::test_L3_a_noise_multiplier_is_used_as_it_is",
    "L4 Poisson on and off": "hf/trainer/test_trainer.py::test_L4_L5_shuffled_batches_and_noise_of_the_device",
    "L5 secure mode": "hf/trainer/test_trainer.py::test_L4_L5_shuffled_batches_and_noise_of_the_device",
    "L6 physical and logical batch": "hf/trainer/test_trainer.py::test_L6_T6_memory_and_speed_change_no_result",
    "L7 image and text": "hf/vision_language/test_strategies.py::test_L7_keys_shapes_and_labels",
    "L8 strategies": "hf/vision_language/test_strategies.py::test_L8_parity",
    "L9 one command, under torchrun": "train/test_run.py::test_L9_T5_torchrun_with_one_process",
    "L10 metrics": "hf/trainer/test_trainer.py::test_L10_T9_metrics_reach_every_logger",
    "L11 accounting at each checkpoint": "hf/trainer/test_trainer.py::test_L11_accounting_in_each_checkpoint_and_at_the_end",
    "L12 warning, stop before the breach": "hf/trainer/test_trainer.py::test_L12_T10_training_stops_before_the_breach",
    "L13 requirements": "accounting/test_requirements.py::test_the_numbers_belong_together",
    "L14 reading epsilon and delta": "accounting/test_requirements.py::test_tables",
    "L15 model check, BatchNorm": "hf/test_models.py::test_L15_batchnorms_are_counted",
    "L16 several processes": "distributed/test_launch.py::test_the_trainer_is_the_same_on_two_processes",
    "L17 length grouping": "hf/trainer/test_settings.py::test_arguments_that_break_privacy_are_refused",
    "L18 bf16": "hf/trainer/test_trainer.py::test_L18_bfloat16",
    "L19 Trainer": "hf/trainer/test_trainer.py::test_L19_trainer_equals_a_plain_loop",
    "L20 the guide": "guides/test_llava_guide.py::test_L20_the_whole_guide_runs",
    "L21 resume": "hf/trainer/test_files.py::test_L21_killed_run_resumes_bit_for_bit",
    "T1 Trainer": "guides/test_trainer_guide.py::test_T1_the_ordinary_script_becomes_private_by_the_diff",
    "T2 arguments": "hf/trainer/test_arguments.py::test_T2_incomplete_and_contradicting_values_are_refused",
    "T3 no position_ids": "hf/test_tasks.py::test_T3_labels_stay_and_all_else_goes_to_the_model",
    "T4 Conv1D and rules of users": "engines/test_register.py::test_a_registered_rule_is_used",
    "T5 launch": "distributed/test_launch.py::test_the_command_is_the_same_on_two_processes",
    "T6 accumulation": "hf/trainer/test_trainer.py::test_L6_T6_memory_and_speed_change_no_result",
    "T7 author level": "examples/test_authors.py::test_T7_both_units_are_reported_side_by_side",
    "T8 full and adapters": "train/test_run.py::test_T8_the_adapter_opens_with_peft",
    "T9 epsilon logged, final epsilon": "cli/test_train.py::test_T9_T12_what_a_run_says_and_leaves",
    "T10 stop at max epsilon": "hf/trainer/test_arguments.py::test_T10_a_ceiling_leaves_fewer_steps",
    "T11 synthetic text": "examples/test_synthetic_text.py::test_T11_synthetic_text_trains_a_classifier",
    "T12 YAML jobs": "cli/test_train.py::test_T9_T12_what_a_run_says_and_leaves",
    "T13 tips": "cli/test_train.py::test_T12_T13_commands_of_the_guide_work",
    "T14 causal attention": "hf/test_models.py::test_T14_causal_attention",
    "T15 the twin": "hf/trainer/test_run.py::test_T15_twin_is_an_ordinary_trainer",
}


def test_each_fault_and_each_capability_has_its_test():
    missing = []
    for what, where in {**MUSEUM, **CAPABILITIES}.items():
        file, name = where.split("::")
        if not re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE):
            missing.append(what)
    assert missing == []


def test_no_capability_is_left_out():
    rows = {row.split()[0] for row in CAPABILITIES}
    assert rows == {f"L{i}" for i in range(1, 22)} | {f"T{i}" for i in range(1, 16)}
