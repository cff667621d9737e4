"""Facts about a model of Transformers on which its loss depends.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf import losses
from dpfunc.types import Params

AnyForward = Callable[..., Any]  # `forward(params, **inputs) -> output`, e.g. of `dpfunc.functionalize`.

# Decoders with a table of positions that is looked up from the start of the row, padding or not.
_COUNT_PADDING = ("gpt2", "gpt_neo", "gpt_bigcode")
# Layers that look positions up in a table.
_POSITIONS = ("wpe", "position_embeddings", "embed_positions", "positions_embed")
_NESTED = ("idefics", "smolvlm", "mllama")  # images have an axis for the samples and one for those of a sample


@dataclass(frozen=True)
class Tables:
    """Sizes of the tables of a language model; None where it has none, or where its configuration does not say."""

    tokens: int | None = None
    positions: int | None = None

    def explain(self, error: Exception, ids: object) -> None:
        """Raise a better error for token ids outside of these tables, or long rows; without reading ids, for `vmap`."""
        if not isinstance(ids, Tensor) or self.tokens is None:
            return
        longest = self.positions
        long = longest is not None and ids.dim() > 1 and ids.shape[-1] > longest
        if (long and "size" in str(error)) or "index out of range" in str(error):
            raise InvalidArgument(self._refusal("", "Nothing was spent by this step.")) from error

    def refuse(self, *, known: bool, length: int, where: str) -> None:
        """Raise an error if not all token ids are known, or a row has more tokens than there are positions."""
        if not known or (self.positions is not None and length > self.positions):
            raise InvalidArgument(self._refusal(where, "Nothing was spent."))

    def _refusal(self, where: str, spent: str) -> str:
        longest = self.positions
        most = "" if longest is None else f" and rows of at most {longest} tokens"
        cut = "" if longest is None else (
            f"; and truncate: tokenizer(..., truncation=True, max_length={longest}), or data.max_length in a job"
        )  # fmt: skip
        return (
            f"Expected token ids 0 <= id < {self.tokens}{most}{where}, as the tables of this model have them; got "
            "others in at least one record, which is private and not shown. Use the tokenizer that belongs to the "
            "model (model.tokenizer in a job), or name its new tokens in a job (model.new_tokens); in a loop call "
            f"model.resize_token_embeddings(len(tokenizer)) before its parameters are taken{cut}. {spent}"
        )


@dataclass(frozen=True)
class Facts:
    """Facts about a model on which its loss depends."""

    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of every call, e.g. no cache
    soft_prompt: int = 0  # positions that PEFT's prompt tuning puts before the tokens
    counts_padding: bool = False  # positions are numbered from the start of the padding
    problem: str | None = None  # as `problem_type` of the configuration; None for what the labels say
    decoder_inputs: Callable[[Tensor], Tensor] | None = None  # of labels (B, T), None if not known
    ctc: Callable[..., Tensor] | None = None  # `losses.ctc` with the options of the configuration; None without them
    frames: Callable[[Tensor], Tensor] | None = None  # of lengths of inputs (B,); None if not known
    augmented: nn.Module | None = field(default=None, repr=False)  # masks its inputs at random in training mode
    scores: nn.Module | None = field(default=None, repr=False)  # takes the class of a text from its last token
    blocks: bool = False  # "token_type_ids" say which tokens see later ones
    nested_images: bool = False  # the model takes images as (B, I, ...)
    tables: Tables = field(default=Tables(), repr=False)

    @property
    def lacks_padding(self) -> bool:
        """True for a model without a padding token, by which it would tell the last token of a text."""
        return self.scores is not None and getattr(getattr(self.scores, "config", None), "pad_token_id", 0) is None

    def flatten_images(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch with its images as the model takes them: those of a sample next to each other on axis 0.

        Patches in rows (B, P, D) come with `image_grid_thw` (B, 3) or (B, I, 3); several images (B, I, C, H, W), or
        (B, I, P, C, H, W) with `image_sizes` (B, I, 2). All others are left as they are, as are those with a
        `pixel_attention_mask`, and where the model takes (B, I, ...) itself.
        """
        if self.nested_images or "pixel_values" not in batch or "pixel_attention_mask" in batch:
            return dict(batch)
        # names of tensors in which axis 1 goes over the images of a sample
        found = [name for name in ("image_grid_thw", "image_sizes") if name in batch and batch[name].dim() == 3]
        pixels_have_it = batch["pixel_values"].dim() == 5 if "image_sizes" not in batch else "image_sizes" in found
        found += ["pixel_values"] if "image_grid_thw" in batch or pixels_have_it else []
        return {**batch, **{name: rearrange(batch[name], "b i ... -> (b i) ...") for name in found}}


@dataclass(frozen=True, eq=False)
class Caller:
    """Forward function with the facts about its model."""

    forward: AnyForward
    facts: Facts

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output, the same for a sample whatever padding the batch has on its left."""
        if self.facts.augmented is not None and self.facts.augmented.training:
            raise UnsupportedModel(
                f"{type(self.facts.augmented).__name__} masks its inputs at random in training mode (SpecAugment), by "
                "numpy's generator, which the key of the run does not drive: no step could be repeated, and no row "
                "compared. Set model.config.apply_spec_augment = False, or mask in the collator with torch."
            )
        if self.facts.blocks and "token_type_ids" not in kwargs:
            raise InvalidArgument(
                "Expected 'token_type_ids' in the batch: which tokens of this model (PaliGemma) see later ones depends "
                "on them, and without them on whether any record of the batch is padded. Its processor makes them: "
                "processor(..., suffix=answers)."
            )
        mask_BT = kwargs.get("attention_mask")
        if self.facts.counts_padding and "position_ids" not in kwargs and mask_BT is not None and mask_BT.dim() == 2:
            kwargs["position_ids"] = (mask_BT.long().cumsum(1) - 1).clamp(min=0)  # counts tokens only
        try:
            return self.forward(params, *args, **{**self.facts.options, **kwargs})
        except (IndexError, RuntimeError) as error:
            self.facts.tables.explain(error, kwargs.get("input_ids"))
            raise


def with_facts(forward: AnyForward) -> Caller:
    """The forward function with the facts about its model."""
    return forward if isinstance(forward, Caller) else Caller(forward, facts_of(forward))


def base_model(model: Any) -> nn.Module:
    """The model of Transformers inside of a PEFT model; any other model as it is."""
    adapted = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return cast(nn.Module, model.get_base_model() if adapted else model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode; after it each of its parts is in the mode that it had."""
    training = {part: part.training for part in model.modules()}
    model.train(False)
    try:
        yield
    finally:
        for part, mode in training.items():  # parents come first, and set their children
            part.train(mode)


def quantised_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers whose weight is not an ordinary tensor of floats."""
    kinds = {Tensor, nn.Parameter}  # packed formats are subclasses of tensor, or hold bytes
    linear = [(name, layer.weight) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    weights = [(name, weight) for name, weight in linear if isinstance(weight, Tensor)]
    return tuple(name for name, w in weights if not w.is_floating_point() or {type(w), type(w.data)} - kinds)


def facts_of(forward: AnyForward) -> Facts:
    """Facts about the model behind a forward function; the defaults for an ordinary function."""
    if isinstance(forward, Caller):
        return forward.facts
    module = getattr(forward, "module", getattr(getattr(forward, "__self__", None), "module", None))
    # an adapter of `dpfunc.lora.attach` has it beside its method
    return facts_of_model(module) if isinstance(module, nn.Module) else Facts()


def facts_of_model(module: nn.Module) -> Facts:
    """Facts about a model, or about the one inside of a PEFT model."""
    base = base_model(module)
    config = getattr(base, "config", None)
    inputs = inspect.signature(base.forward).parameters
    soft_prompt = _soft_prompt(module)
    # A language model without a causal flag gets causal masks from the vision-language model around it. Transformers
    # leaves them out where a batch has no padding, and relies on the flag: all tokens then see all others.
    bidirectional = getattr(getattr(config, "text_config", None), "use_bidirectional_attention", None) is True
    return Facts(
        options=MappingProxyType({"use_cache": False} if "use_cache" in inputs else {}),
        soft_prompt=soft_prompt,
        counts_padding=getattr(config, "model_type", "") in _COUNT_PADDING and not soft_prompt,
        problem=getattr(config, "problem_type", None),
        decoder_inputs=_decoder_inputs(base),
        ctc=_ctc(config),
        frames=getattr(base, "_get_feat_extract_output_lengths", None),
        augmented=base if augments(config) else None,
        scores=base if hasattr(base, "score") else None,
        blocks=bidirectional and getattr(config, "vision_config", None) is not None,
        nested_images=str(getattr(config, "model_type", "")).startswith(_NESTED),
        tables=_tables(base) if "input_ids" in inputs else Tables(),
    )


def _soft_prompt(module: nn.Module) -> int:
    """The positions that prompt tuning adds; prefix tuning goes through the cache and adds none."""
    config: Any = getattr(module, "active_peft_config", None) if hasattr(module, "peft_config") else None
    adds = config is not None and config.is_prompt_learning and "PREFIX" not in str(config.peft_type)
    return int(config.num_virtual_tokens) if adds else 0


def _tables(base: nn.Module) -> Tables:
    inputs: Any = None
    with suppress(AttributeError, NotImplementedError):  # a class of a user, whose names Transformers does not know
        inputs = base.get_input_embeddings()  # type: ignore[operator]  # of Transformers
    inside = () if inputs is None else inputs.modules()  # PEFT has the table of tokens within a module of its own
    tokens = next((module.num_embeddings for module in inside if hasattr(module, "num_embeddings")), None)
    found = []
    for name, module in base.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            # RoBERTa and its like number positions from behind the padding's, OPT and BART from 2
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - max(unused, int(getattr(module, "offset", 0))))
    # input_ids go to the encoder, which comes first; an encoder of images comes before its language model
    first = 0 if getattr(getattr(base, "config", None), "is_encoder_decoder", False) else -1
    return Tables(tokens, found[first] if found else None)


def augments(config: object) -> bool:
    """True if a configuration asks for SpecAugment, whose default in speech models is on."""
    names = ("mask_time_prob", "mask_feature_prob")
    return bool(getattr(config, "apply_spec_augment", False)) and any(getattr(config, name, 0) for name in names)


def _ctc(config: object) -> Callable[..., Tensor] | None:
    reduction, blank = getattr(config, "ctc_loss_reduction", None), getattr(config, "pad_token_id", None)
    if reduction is None or blank is None:
        return None
    zero_infinity = bool(getattr(config, "ctc_zero_infinity", False))
    return partial(losses.ctc, blank=int(blank), by_length=reduction == "mean", zero_infinity=zero_infinity)


def _decoder_inputs(base: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The labels shifted to the right; by the model itself where it does more than that (mBART: the language first)."""
    config = getattr(base, "config", None)
    start, pad = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    own: Any = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if start is None or pad is None:
        return own  # type: ignore[no-any-return]  # of the model

    def shifted(labels_BT: Tensor) -> Tensor:
        start_B1 = torch.full_like(labels_BT[:, :1], start)
        shifted_BT = torch.cat((start_B1, labels_BT[:, :-1]), dim=1)
        return torch.where(shifted_BT == losses.IGNORED, pad, shifted_BT)

    example = torch.tensor([[3, 4, losses.IGNORED]])
    return shifted if own is None or torch.equal(shifted(example), own(example)) else own
