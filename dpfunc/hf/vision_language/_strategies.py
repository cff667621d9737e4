"""Vision-language models: which parameters a strategy trains, and the model as a function of them.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfunc._utils.validation import expect, integer, one_of, refuse, shorten, suggestion
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize, with_params
from dpfunc.functional.names import outermost
from dpfunc.hf._facts import facts_of, quantised_layers
from dpfunc.hf.tasks import causal_lm
from dpfunc.lora import LoRA, attach
from dpfunc.rehearsal import FAILURES
from dpfunc.rng import Key
from dpfunc.types import Params

STRATEGIES = ("full", "lora", "qlora", "projector")
_ADAPTERS = ("lora", "qlora")
_USUAL = (  # names of the three parts
    ("vision_tower", "vision_model", "visual"),
    ("multi_modal_projector", "mm_projector", "connector", "merger"),
    ("language_model", "text_model"),
)
_GIB = 2**30
_MEANING = {
    "full": "noise in every weight; for large batches and much data",
    "lora": "noise in the adapters only; the usual choice",
    "qlora": "as lora; the base is rounded once, without data",
    "projector": "adapts what is seen, not what is said",
}


@dataclass(frozen=True)
class Strategy:
    """A model as a function of what a strategy trains: `forward(params, *args)`, and the parameters it starts with.

    `dpfunc.lora.save_adapter(path, adapter, params)` stores the adapter of `"lora"` and `"qlora"`; others have none.
    """

    name: str
    forward: Callable[..., Any] = field(repr=False)
    params: dict[str, Tensor] = field(repr=False)
    adapter: LoRA | None = field(repr=False)
    _model: nn.Module = field(repr=False)

    def merge(self, params: Params) -> nn.Module:
        """A copy of the model with trained parameters in it, in the model's own format: save it, or generate with it.

        Args:
            params: trained parameters; released.

        Raises:
            UnsupportedModel: a base in 4 bits, which cannot take an adapter into its weights.
        """
        if self.name == "qlora":
            raise UnsupportedModel(
                "A base in 4 bits cannot take an adapter. Store it with dpfunc.lora.save_adapter(path, "
                "strategy.adapter, params), and merge it into a base that was loaded in float."
            )
        return with_params(self._model, params) if self.adapter is None else self.adapter.merge(params)


def strategy(
    model: nn.Module, name: str, *, key: Key | None = None, rank: int | None = None, alpha: float | None = None,
    targets: str | Sequence[str] | None = None, train_projector: bool = False,
) -> Strategy:  # fmt: skip
    """A vision-language model as `(forward, params)`, for a loop of your own.

    `"full"`: every parameter that the output depends on. `"projector"`: the projector between images and text.
    `"lora"`: low-rank adapters on the linear layers of the language model. `"qlora"`: the same over a base that was
    loaded in 4 bits (Dettmers et al. 2023, QLoRA); the adapters stay in float, so noise and epsilon are those of LoRA.

    Args:
        model: LLaVA, or another model that has a vision tower, a projector and a language model. It is not changed.
            With gradient checkpointing it is in evaluation mode here; `model.train()` after it switches that on.
        name: `"full"`, `"lora"`, `"qlora"` or `"projector"`.
        key: from which A of the adapters is drawn. rank, alpha: of the adapters, see `lora.LoRAConfig`. The three are
            needed by `"lora"` and `"qlora"`, and by them only.
        targets: adapted layers; None for `language_layers(model)`.
        train_projector: train the projector as well, whole; for `"lora"` and `"qlora"`.

    Raises:
        InvalidArgument: an argument that the strategy does not use, or one that it needs.
        UnsupportedModel: no such parts; `"qlora"` without a base in 4 bits; others with one.

    Guarantees:
        tests/hf/vision_language/test_strategies.py: equals the loop over single samples
        (test_engines_equal_single_samples_for_each_strategy), leaves the model alone (test_the_model_is_not_changed).

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> from dpfunc.rng import insecure_key
    >>> lora = strategy(tiny_llava(), "lora", key=insecure_key(0), rank=2, alpha=4)
    >>> sum(p.numel() for p in lora.params.values())
    992
    """
    options: dict[str, Any] = {"key": key, "rank": rank, "alpha": alpha}
    _check(model, name, options, targets, train_projector)
    if name not in _ADAPTERS:
        forward, params = functionalize(model, trained_parameters(model, name))
        return Strategy(name, forward, params, None, model)
    layers = language_layers(model) if targets is None else targets
    projector = trained_parameters(model, "projector") if train_projector else ()
    adapter = attach(model, **options, targets=layers, also_train=projector)
    return Strategy(name, adapter.forward, adapter.params, adapter, model)


def prepare(
    model: nn.Module, name: str, *, rank: int | None = None, alpha: float | None = None,
    targets: str | Sequence[str] | None = None, train_projector: bool = False,
) -> nn.Module:  # fmt: skip
    """A vision-language model for a Trainer, or a `PeftModel` around it: what the strategy trains requires gradients.

    Arguments and errors are those of `strategy`, which trains the same (targets as PEFT takes them;
    tests/hf/vision_language/test_strategies.py::test_prepare_trains_what_the_strategy_trains). Unlike there the
    model is changed: `requires_grad` is set, and PEFT puts its layers into it.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> model = prepare(tiny_llava(), "projector")
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    544
    """
    _check(model, name, {"rank": rank, "alpha": alpha}, targets, train_projector)
    if name not in _ADAPTERS:
        wanted = set(trained_parameters(model, name))
        for parameter_name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(parameter_name in wanted)
        return model
    from peft import LoraConfig, get_peft_model

    chosen = language_layers(model) if targets is None else targets
    ends = [f".{name}" for name, _ in model.named_modules()]
    for target in () if isinstance(chosen, str) else chosen:  # PEFT drops those that it does not find beside others
        expect(any(end.endswith(f".{target}") for end in ends), "the end of the name of a module", "targets", target,
               suggestion(target, {end.rpartition(".")[2] for end in ends[1:]}))  # fmt: skip
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=chosen if isinstance(chosen, str) else list(chosen),
        modules_to_save=list(parts(model).projector) if train_projector else None,
    )  # fmt: skip
    return cast(nn.Module, get_peft_model(model, config))


def _check(model: nn.Module, name: str, needed: Mapping[str, object], targets: object, train_projector: bool) -> None:
    """Check that the options fit, that the base is in 4 bits exactly where it must be, and what is trained in float."""
    one_of("strategy", name, STRATEGIES)
    given = {**needed, "targets": targets, "train_projector": train_projector or None}
    missing = shorten([option for option, value in needed.items() if value is None])
    useless = shorten([option for option, value in given.items() if value is not None])
    refuse(
        (name in _ADAPTERS and missing,
         f"Expected {missing} with the strategy {name!r}, got none. Give all of them."),
        (name not in _ADAPTERS and useless,
         f"Expected no {useless} with the strategy {name!r}, which has no adapters. Take 'lora' or 'qlora'."),
    )  # fmt: skip
    if name in _ADAPTERS:
        integer("rank", needed["rank"], minimum=1)
    quantised = quantised_layers(model)
    packed = _below(parts(model).projector, quantised)
    refuse(
        (name == "qlora" and not quantised, UnsupportedModel(
         "Expected a base in 4 bits for the strategy 'qlora', got weights in float. Load it with from_pretrained(..., "
         "quantization_config=BitsAndBytesConfig(load_in_4bit=True)), which needs `pip install bitsandbytes`; or take "
         "'lora', which trains the same parameters with the same noise and the same epsilon, in more memory.")),
        (name in ("full", "lora") and quantised, UnsupportedModel(
         f"Expected weights in float for the strategy {name!r}, got quantised ones in {shorten(quantised)}. Take "
         "'qlora', or load the model without quantization_config.")),
        (packed and (name == "projector" or train_projector), UnsupportedModel(
         f"Expected a projector in float to train it, got quantised weights in {shorten(packed)}. Leave it out of the "
         "quantization: BitsAndBytesConfig(..., llm_int8_skip_modules=['model.multi_modal_projector', 'lm_head']), or "
         "modules_to_not_convert of TorchAoConfig.")),
    )  # fmt: skip


class Parts(NamedTuple):
    """Names of the modules that are the vision tower, the projector and the language model."""

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: tuple[str, ...]


def parts(model: nn.Module) -> Parts:
    """The vision tower, the projector and the language model, by their usual names."""
    every = [name for name, _ in model.named_modules()]
    found = Parts(*(tuple(outermost(at for at in every if at.rpartition(".")[2] in names)) for names in _USUAL))
    if missing := [name for name, modules in found._asdict().items() if not modules]:
        raise UnsupportedModel(
            f"Expected a vision-language model, got {type(model).__name__} without {shorten(missing)}. Looked for "
            f"{'; '.join(map(', '.join, _USUAL))}. Name the trained parameters yourself: "
            "dpfunc.functionalize(model, trainable=...)."
        )
    return found


def _below(modules: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that are inside of some modules."""
    return [name for name in names if name.startswith(tuple(f"{module}." for module in modules))]


def language_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers of the language model, the output layer left out: what LoRA adapts."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return tuple(name for name in _below(parts(model).language, linear) if not name.endswith("lm_head"))


def trained_parameters(model: nn.Module, name: str) -> tuple[str, ...]:
    """The names of the model's own parameters that `"full"` or `"projector"` trains."""
    one_of("strategy", name, ("full", "projector"))
    named = [parameter for parameter, _ in model.named_parameters()]
    if name == "projector":
        return tuple(_below(parts(model).projector, named))
    unused = set(unused_parameters(model))
    return tuple(parameter for parameter in named if parameter not in unused)


def unused_parameters(model: nn.Module) -> tuple[str, ...]:
    """The parameters of the vision tower on which no image feature depends: they would get noise and nothing else.

    LLaVA takes the features from a layer before the last one. A copy of the structure runs on the meta device. None are
    found where `get_image_features` needs more than images of one size, or is not there
    (tests/hf/vision_language/test_strategies.py::test_unused_parameters_have_no_gradient).
    """
    # deepcopy takes what its memo holds in place of the original: tensors on the meta device
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    structure: Any = copy.deepcopy(model, memo)
    named = dict(structure.named_parameters())
    vision = {name: named[name].requires_grad_() for name in _below(parts(model).vision, named)}
    with torch.enable_grad():
        try:
            size = structure.config.vision_config.image_size
            shape = (1, 3, size, size) if isinstance(size, int) else (1, 3, *size)
            pixels = torch.empty(shape, device="meta", dtype=next(iter(vision.values())).dtype)
            output = structure.get_image_features(pixel_values=pixels)
        except FAILURES:
            return ()
        features = pytree.tree_leaves(getattr(output, "pooler_output", output))
        total = torch.stack([each.sum() for each in features if isinstance(each, Tensor)]).sum()
        grads = torch.autograd.grad(total, list(vision.values()), allow_unused=True)
    return tuple(name for name, grad in zip(vision, grads, strict=True) if grad is None)


def image_text_loss(forward: Callable[..., Any], params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of the answers in batches of an `ImageTextCollator`: one or several images a sample, or none.

    For `make_loss_fn(forward, image_text_loss)` and `DPTrainer(loss=image_text_loss)`; the task `"vqa"` is the same,
    and refuses batches without images.

    Returns:
        (B,), float32: cross entropy of a sample's answer, mean over its own tokens. Unreleased.

    >>> from dpfunc.hf.vision_language._images import image_text_collator
    >>> from dpfunc.hf.vision_language.tiny_llava import draw, tiny_llava, tiny_processor
    >>> collate = image_text_collator(tiny_processor(), max_length=24, max_images=2)
    >>> batch = collate([{"images": [draw("red", "circle", 24, 0)], "prompt": "what ?", "answer": "red"}])
    >>> projector = strategy(tiny_llava(), "projector")
    >>> image_text_loss(projector.forward, projector.params, batch).shape
    torch.Size([1])
    """
    return causal_lm(forward, params, facts_of(forward).flatten_images(batch))


def strategy_table(model: nn.Module, *, rank: int, noise_multiplier: float, expected_batch_size: float) -> str:
    """The strategies side by side, with adapters of a rank, as a table in Markdown; a meta model is enough.

    Training adds the trained copy, the released gradient and two moments of Adam, and in float32 the sum before and
    after the noise. The last number is `noise_multiplier * sqrt(trained) / expected_batch_size`: the norm of the noise
    in a step, over the norm that the clipped sum has if all samples agree.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> print(strategy_table(tiny_llava(), rank=2, noise_multiplier=1.0, expected_batch_size=10).splitlines()[-1])
    | projector | 544 | 4.2 % | 0.0 | 0.0 | 2.3 | adapts what is seen, not what is said |
    """
    integer("rank", rank, minimum=1)
    if quantised_layers(model):
        raise InvalidArgument("Expected weights in float, got quantised ones. Load the model without quantization.")
    own = dict(model.named_parameters())
    packed = {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in language_layers(model)}
    total, weights = sum(map(Tensor.numel, own.values())), sum(parameter.nbytes for parameter in own.values())
    in_4_bits = weights - sum(own[name].nbytes - own[name].numel() // 2 for name in packed.keys() & own.keys())
    item = max(map(Tensor.element_size, own.values()))
    lines = [
        "| strategy | trained | share | weights, GiB | training adds, GiB | noise / signal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, meaning in _MEANING.items():
        size = (
            sum(rank * sum(weight.shape) for weight in packed.values())
            if name in _ADAPTERS
            else sum(own[parameter].numel() for parameter in trained_parameters(model, name))
        )
        held, adds = in_4_bits if name == "qlora" else weights, size * (4 * item + 8)
        lines.append(
            f"| {name} | {size:,} | {100 * size / total:.1f} % | {held / _GIB:.1f} | {adds / _GIB:.1f} | "
            f"{noise_multiplier * math.sqrt(size) / expected_batch_size:.2g} | {meaning} |"
        )
    return "\n".join(lines)
