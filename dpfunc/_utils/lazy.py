"""Packages whose names are imported when they are first used: accounting and the command do not wait for torch.

May import: its folder, errors. Privacy depends on it: no.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

_BUDGET = "dpfunc.Plan.for_budget(epsilon=..., ...), which finds the noise for a budget"
WORDS = {  # of other libraries, and what is there in their place: for errors of unknown names and keywords
    **dict.fromkeys(
        ("PrivacyEngine", "DPOptimizer", "GradSampleModule", "ModuleValidator", "make_private"),
        "dpfunc.make_dp_step(loss_fn, plan), which wraps nothing; docs/moving/opacus.md has more names",
    ),
    **dict.fromkeys(("make_private_with_epsilon", "get_noise_multiplier", "epsilon", "delta"), _BUDGET),
    **dict.fromkeys(
        ("max_grad_norm", "l2_norm_clip", "l2_clip_norm", "clip_norm"),
        "clip_norm of a clip rule, clip=dpfunc.clipping.Flat(clip_norm=...)",
    ),
    **dict.fromkeys(
        ("dataset_size", "sample_size", "num_examples"), "dataset_size of dpfunc.Plan.for_budget, or of the sampler"
    ),
    **dict.fromkeys(
        ("sampler", "batch_sampler"),
        "sampler of dpfunc.Plan, e.g. dpfunc.sampling.Poisson(dataset_size, sampling_prob): who is in a batch decides "
        "epsilon. Rare classes: weigh their losses in loss_fn, do not draw them more often",
    ),
    "shuffle": "nothing to set: the plan's sampler draws each batch at random",
    "drop_last": "nothing to set: take a step with each batch, also a small or empty one, or epsilon does not hold",
    "generator": "key of dp_step.init(params, key): draws follow from it and from the number of the step",
    "in_order": "always true: batches come in the order of the steps",
    "batch_size": "expected_batch_size of dpfunc.Plan.for_budget, or an argument of TrainingArguments with DPTrainer",
    "epochs": "num_steps = epochs * dataset_size / expected_batch_size, or num_train_epochs with DPTrainer",
    "noise_multiplier": f"noise_multiplier of dpfunc.Plan, or {_BUDGET}",
    "sample_rate": "sampling_prob of dpfunc.sampling.Poisson, = expected_batch_size / dataset_size",
}


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Make the `__getattr__` of a package; `homes`: module in it -> its public names. Other names are modules of it."""
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def attribute(name: str) -> object:
        if name in modules:
            value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        elif name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(package, name)}")
        vars(sys.modules[package])[name] = value
        return value

    return attribute


def _elsewhere(package: str, name: str) -> str:
    """Advice that names the modules which define a missing name. It searches the text of files, and imports nothing."""
    if not name.isidentifier() or name.startswith("_"):
        return ""
    root = Path(str(sys.modules[package].__file__)).parent
    public = re.compile(rf'(?m)^__all__ = \[[^]]*"{name}"|^(class|def) {name}\b')
    files = sorted([*root.glob("*.py"), *root.glob("*/__init__.py")])
    homes = [path.relative_to(root).parts[0] for path in files if public.search(path.read_text("utf-8"))]
    here = " or ".join(f"{package}.{home.removesuffix('.py')}.{name}" for home in homes) or WORDS.get(name)
    return f". Here: {here}." if here else ""
