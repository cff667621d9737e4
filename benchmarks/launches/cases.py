"""The cases of `python -m benchmarks.launches`: small models of each kind, since counts depend little on sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import nets
from benchmarks.engines.cases import Case
from benchmarks.engines.problem import Problem, classification, images, next_token, text
from benchmarks.small_steps import recurrent
from dpfunc.types import LossFn

ROWS, LAYERS, WIDTH, LENGTH, VOCABULARY = 8, 4, 64, 32, 500
SIZES = {"layers": LAYERS, "width": WIDTH, "length": LENGTH, "vocabulary": VOCABULARY}


class Logits(nn.Module):
    """A model of Transformers that is given one tensor under one or several names, as `logits = module(tensor)`."""

    def __init__(self, model: nn.Module, *names: str, **options: Any) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(**dict.fromkeys(self.names, inputs), **self.options).logits


class Answer(nn.Module):
    """A model of images and text with one question for all images: logits of the first word of the answer."""

    def __init__(self, model: nn.Module, question_T: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("question_T", question_T)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        ids_BT = self.question_T.expand(len(images_BCHW), -1)
        return self.model(input_ids=ids_BT, pixel_values=images_BCHW, use_cache=False).logits[:, -1]


def vit(rows: int) -> Problem:
    """A vision transformer of Transformers, all parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=2 * WIDTH, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=nets.CLASSES,
    )  # fmt: skip
    module = Logits(ViTForImageClassification(config), "pixel_values")
    return Problem(module, *images(rows, 32, nets.CLASSES), classification)


class Checkpointed(Problem):
    """A problem whose module computes activations anew in the backward pass; `functionalize` wants it in `eval()`."""

    def functional(self) -> tuple[LossFn, dict[str, Tensor]]:
        self.module.eval()
        found = super().functional()
        self.module.train()
        return found


def llama(rows: int, *, checkpointed: bool = False) -> Problem:
    """Llama of Transformers, with grouped queries, and LoRA of PEFT on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    module, (inputs, targets) = Logits(model, "input_ids", use_cache=False), text(rows, LENGTH, VOCABULARY)
    if not checkpointed:
        return Problem(module, inputs, targets, next_token)
    model.activation_checkpointing_enable()
    return Checkpointed(module, inputs, targets, next_token)


def t5(rows: int) -> Problem:
    """T5, all parameters: a text is read and written."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    module = Logits(model, "input_ids", "decoder_input_ids", use_cache=False)
    return Problem(module, *text(rows, LENGTH, VOCABULARY), next_token)


def llava(rows: int) -> Problem:
    """LLaVA: a vision transformer (CLIP), a projector and Llama, all parameters."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    image = VOCABULARY - 1
    sides = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sides, image_size=32, patch_size=16),
        text_config=LlamaConfig(**sides, num_key_value_heads=2, vocab_size=VOCABULARY), image_token_index=image,
    )  # fmt: skip
    question_T = torch.cat([torch.full((4,), image), torch.arange(10, 18)])
    module = Answer(LlavaForConditionalGeneration(config), question_T)
    return Problem(module, torch.randn(rows, 3, 32, 32), torch.randint(image, (rows,)), classification)


def with_lstm_of_opacus(module: nn.Module) -> nn.Module:
    from opacus.layers import DPLSTM

    module = copy.deepcopy(module)
    own, module.layer = module.layer, DPLSTM(32, 64, batch_first=True)
    module.layer.load_state_dict({name: value.clone() for name, value in own.state_dict().items()})
    return module


def lstm(rows: int) -> Problem:
    return replace(recurrent(rows), stand_in=with_lstm_of_opacus)


@dataclass(frozen=True)
class Counted:
    """A case of the table.

    Args:
        title: one line. build: makes the problem. sizes: its arguments. engine: of dpfunc.
        aim: the most operations that were aimed at, where a number was named.
    """

    title: str
    build: Callable[..., Problem]
    sizes: Mapping[str, Any]
    engine: str = "auto"
    aim: int | None = None


DECODER = {**SIZES, "hidden": 2 * WIDTH, "norm": "layer", "lora": False}
CASES = {
    "gpt2": Counted("GPT-2, all parameters", nets.gpt2, SIZES, aim=480),
    "vit": Counted("ViT, all parameters", vit, {}, aim=390),
    "lora": Counted("Llama, LoRA on all linear layers", llama, {}, aim=950),
    "mnist": Counted("MNIST net", nets.mnist_net, {"widths": (16, 32, 32)}, aim=75),
    "perceptron": Counted("perceptron", nets.perceptron, {"width": 64}, aim=55),
    "decoder": Counted("decoder with LayerNorm, all parameters", nets.decoder, DECODER),
    "t5": Counted("T5, all parameters", t5, {}),
    "bert": Counted("BERT, LoRA", nets.bert, SIZES),
    "resnet18": Counted("ResNet18", nets.residual_net,
        {"kind": "basic", "widths": (16, 32, 64, 128), "blocks": 2, "image": 16}),
    "lstm": Counted("LSTM", lstm, {}),
    "llava": Counted("LLaVA, all parameters", llava, {}),
    "checkpointed": Counted("Llama, LoRA, layers checkpointed", llama, {"checkpointed": True}),
    "ghost": Counted("MNIST net, engine ghost", nets.mnist_net, {"widths": (16, 32, 32)}, "ghost"),
    "decoder ghost": Counted("decoder with LayerNorm, engine ghost", nets.decoder, DECODER, "ghost"),
}  # fmt: skip
ALL_CASES = {name: Case(each.title, each.build, ROWS, each.sizes, each.sizes) for name, each in CASES.items()}
