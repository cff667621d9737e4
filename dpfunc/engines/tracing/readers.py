"""Code that reads numbers and shapes of the batch: who it is, and whom of it is trusted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch

# Loops over the experts that any token chose: the others would add nothing.
LOOPING = (
    ("transformers.models.dbrx.*", "DbrxExperts.forward"),
    ("transformers.models.switch_transformers.*", "SwitchTransformersExperts.forward"),
)
# Functions of libraries that ask the batch which of several equal ways to take: an attention mask that masks nothing is
# left out, for example.
TRUSTED = (
    *LOOPING,
    ("dpfunc.engines.rules.*", "*"),
    ("transformers.masking_utils", "*"), ("transformers.modeling_attn_mask_utils", "*"),
    # Checks: they raise, or nothing follows from them but a message.
    ("transformers.utils.import_utils", "torch_compilable_check"), ("transformers.models.*", "*.get_placeholder_mask"),
    ("transformers.models.xlm.*", "get_masks"), ("transformers.models.flaubert.*", "get_masks"),
    ("transformers.models.xlm.*", "XLMModel.forward"), ("transformers.models.flaubert.*", "FlaubertModel.forward"),
    # "All examples must have the same number of <eos> tokens": raises; the rest views the rows of each sample.
    *((f"transformers.models.{kind}.*", "*ForSequenceClassification.forward") for kind in
      ("bart", "mbart", "plbart", "bigbird_pegasus", "led", "mvp", "t5", "mt5", "umt5", "longt5")),
    # Shapes of logits, by which they are only reshaped.
    ("dpfunc.integrations.losses", "*"),
)  # fmt: skip
# Functions that draw a mask for each sample, with numbers of other libraries and the length of the sample's own row.
DRAWING = (("transformers.models.*", "*._mask_hidden_states"), ("transformers.models.*", "_compute_mask_indices"))


# Frames between the one who reads a number and the operation.
PLUMBING = ("torch", "dpfunc.engines", "contextlib", "functools", "typing_extensions")

# Between the one who reads a shape and the trace.
WATCHING = (
    *(f"dpfunc.engines.tracing.{name}" for name in ("trace", "credit", "declared", "entries", "results", "writes")),
    "dpfunc.engines.tracing.places",
    "dpfunc.engines.tracking",
    "torch.overrides",
)
CHECKING_SHAPES = ("torch.nn.modules.rnn", "torch.nn.utils.rnn")


def listed(listed: Sequence[tuple[str, str]], module: str, name: str) -> bool:
    return any(fnmatch(module, place) and fnmatch(name, function) for place, function in listed)


def reader() -> tuple[str, int, str]:
    """Module and line of the code that reads a number, and its function."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module.startswith("dpfunc.engines.rules"):
            return module, frame.f_lineno, frame.f_code.co_qualname
        if not any(module == prefix or module.startswith(f"{prefix}.") for prefix in PLUMBING):
            return module, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
    return "?", 0, ""


def loops_over_experts() -> bool:
    """True if an operation is that of a loop over experts."""
    module, _, name = reader()
    return listed(LOOPING, module, name)


def checks_itself() -> bool:
    """True if a shape is read by torch's recurrent layers, which only check it, or by an engine, not by the loss."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module not in WATCHING:
            return module in CHECKING_SHAPES or module.startswith("dpfunc.engines.")
        frame = frame.f_back  # type: ignore[assignment]
    return False
