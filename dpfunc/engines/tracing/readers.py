"""Code that reads numbers and shapes of the batch: how it is found, and the functions that are trusted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from types import FrameType

# Loops over the experts that any token chose: the others would add nothing.
_LOOPING = (
    ("transformers.models.dbrx.*", "DbrxExperts.forward"),
    ("transformers.models.switch_transformers.*", "SwitchTransformersExperts.forward"),
)
# Functions of libraries that choose between equal computations by values of the batch: for example, they omit an
# attention mask that masks nothing.
TRUSTED = (
    *_LOOPING,
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
    ("dpfunc.hf.losses", "*"),
)  # fmt: skip
# Functions that draw a mask for each sample, with numbers of other libraries and the length of the sample's own row.
DRAWING = (("transformers.models.*", "*._mask_hidden_states"), ("transformers.models.*", "_compute_mask_indices"))
# Functions that compute positions and lengths of images from their grids (frames, height, width), image by image, and
# join the results in the order of the images. Where all images have the same grid, the results for the images of a
# sample are, position by position, those of the sample alone.
SAME_FOR_ALL = (
    # Lengths of sequences, and where each ends; of q, k, v only parts of that length are split off.
    ("transformers.vision_utils", "get_vision_cu_seqlens"),
    # Row and column of each patch in its image.
    ("transformers.vision_utils", "get_vision_position_ids"),
    # The order of patches in windows of their image, counted from its first patch on.
    ("transformers.vision_utils", "get_vision_window_index"),
    # Entries of a table of positions for each patch, and their weights, from its row and column.
    ("transformers.vision_utils", "get_vision_interpolation_indices_and_weights"),
    *((f"transformers.models.{kind}.modeling_{kind}", f"*Model.{function}") for kind in
      ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
      # The number of patches of each image, by which the images are separated; positions of one image.
      for function in ("get_image_features", "get_video_features", "get_vision_position_ids")),
    # How many parts an image of a size has been split into, and its padding.
    *((f"transformers.models.{kind}.modeling_{kind}", function)
      for kind in ("llava_next", "llava_next_video", "llava_onevision")
      for function in ("get_anyres_image_grid_shape", "image_size_to_num_patches", "unpad_image")),
    # The number of real images of each sample, by which the images are separated.
    *((f"transformers.models.{kind}.modeling_{kind}", "*Model.get_image_features") for kind in
      ("idefics2", "idefics3", "smolvlm")),
)  # fmt: skip
# Models of images, each on its own, whose number (without those that are padding) follows from values of the batch:
# what they do with it is to give a batch of images its shape.
EACH_IMAGE = (
    *((f"transformers.models.{kind}.modeling_{kind}", part)
      for kind in ("idefics2", "idefics3", "smolvlm")
      for part in ("*Model.get_image_features*", "*Model.inputs_merger", "*Vision*", "*Connector.*", "*Perceiver*",
                   "eager_attention_forward", "repeat_kv")),
    ("transformers.integrations.sdpa_attention", "*"),
)  # fmt: skip
# Functions that go through the samples one by one and compute positions of each from its own row. From one sample to
# the next they only count images, which `SAME_FOR_ALL` finds to have the same grid.
ONE_BY_ONE = tuple((module, "*Model.get_rope_index") for module in dict.fromkeys(
    module for module, name in SAME_FOR_ALL if name.endswith("get_vision_position_ids") and ".models." in module
))  # fmt: skip

# Modules of the frames between the code that reads a number and the operation.
_PLUMBING = ("torch", "dpfunc.engines", "contextlib", "functools", "typing_extensions")

# Modules of the frames between the code that reads a shape and the trace.
_TRACING_MODULES = (
    *(f"dpfunc.engines.tracing.{name}" for name in ("trace", "credit", "declared", "entries", "results", "writes")),
    "dpfunc.engines.tracing.python_values",
    "dpfunc.engines.tracing.sample_axis_discovery",
    "dpfunc.engines.uses.tracker",
    "torch.overrides",
    "torch._tensor",  # len
    "torch.autograd",
)
_SHAPE_CHECKING_MODULES = ("torch.nn.modules.rnn", "torch.nn.utils.rnn")


class FirstRead(BaseException):
    """Numbers of the batch are about to be given to a loss whose state is not known; never leaves the engines."""


def listed(listed: Sequence[tuple[str, str]], module: str, name: str) -> bool:
    """True if a function of a module matches one of these pairs of patterns."""
    return any(fnmatch(module, modules) and fnmatch(name, functions) for modules, functions in listed)


def reader() -> tuple[str, int, str]:
    """Module and line of the code that reads a number, and its function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        plumbing = any(module == prefix or module.startswith(f"{prefix}.") for prefix in _PLUMBING)
        if not plumbing or module.startswith("dpfunc.engines.rules"):
            return module, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back
    return "?", 0, ""


def omits_mask_wrongly() -> bool:
    """True if Transformers asks for a causal mask for layers that are not causal without one (PaliGemma).

    It omits a mask where no row has padding, and relies on the layers, which then see all tokens.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.masking_utils" and "config" in frame.f_locals:
            config = frame.f_locals["config"]
            if "causal" in frame.f_code.co_name:
                return getattr(config, "use_bidirectional_attention", None) is True
        frame = frame.f_back
    return False


def loops_over_experts() -> bool:
    """True if an operation is that of a loop over experts."""
    module, _, name = reader()
    return listed(_LOOPING, module, name)


def checks_itself() -> bool:
    """True if a shape is read by torch's recurrent layers, which only check it, or by an engine, not by the loss."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module not in _TRACING_MODULES:
            return module in _SHAPE_CHECKING_MODULES or module.startswith("dpfunc.engines.")
        frame = frame.f_back
    return False
