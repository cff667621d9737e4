"""Words of other libraries, and what is there in their place, for the errors of unknown names and keywords."""

_STEP = "dpfunc.make_dp_step(loss_fn, plan), which wraps nothing; docs/moving/opacus.md has more names"
_BUDGET = "dpfunc.Plan.for_budget(epsilon=..., ...), which finds the noise for a budget"
_BOUND = "clip_norm of a clip rule, clip=dpfunc.clipping.Flat(clip_norm=...)"
_SIZE = "dataset_size of dpfunc.Plan.for_budget, or of the sampler"
WORDS = {
    **dict.fromkeys(("PrivacyEngine", "DPOptimizer", "GradSampleModule", "ModuleValidator", "make_private"), _STEP),
    **dict.fromkeys(("make_private_with_epsilon", "get_noise_multiplier", "epsilon", "delta"), _BUDGET),
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "l2_clip_norm", "clip_norm"), _BOUND),
    **dict.fromkeys(("dataset_size", "sample_size", "num_examples"), _SIZE),
    "batch_size": "expected_batch_size of dpfunc.Plan.for_budget, or an argument of TrainingArguments with DPTrainer",
    "epochs": "num_steps = epochs * dataset_size / expected_batch_size, or num_train_epochs with DPTrainer",
    "noise_multiplier": f"noise_multiplier of dpfunc.Plan, or {_BUDGET}",
    "sample_rate": "sampling_prob of dpfunc.sampling.Poisson, = expected_batch_size / dataset_size",
}
