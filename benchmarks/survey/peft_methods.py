"""Methods of PEFT, on a decoder, an encoder and a model for images, and the adapters of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks.survey.case import CLASSES, Case, LossFn, Subject, cases_of, classes, images, randn, text, token_labels
from benchmarks.survey.other_nets import net_of, on
from benchmarks.survey.tiny import built

BASES: dict[str, tuple[str, str, str, list[str]]] = {
    "llama": ("AutoModelForCausalLM", "CAUSAL_LM", "causal_lm", ["q_proj", "v_proj"]),
    "bert": ("AutoModelForSequenceClassification", "SEQ_CLS", "sequence_classification", ["query", "value"]),
    "vit": ("AutoModelForImageClassification", "", "image_classification", ["q_proj", "v_proj"]),
}
# method -> (configuration, options)
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA of PEFT": ("LoraConfig", {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "PiSSA": ("LoraConfig", {"r": 2, "init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {"r": 2, "init_lora_weights": "olora"}),
    "LoRA with biases": ("LoraConfig", {"r": 2, "bias": "lora_only"}),
    "LoHa": ("LoHaConfig", {"r": 2, "module_dropout": 0.0}),
    "LoKr": ("LoKrConfig", {"r": 2}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 9}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10}),
    "HRA": ("HRAConfig", {"r": 2}),
    "VBLoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    "RandLora": ("RandLoraConfig", {"r": 2}),
    "MiSS": ("MissConfig", {"r": 2}),
    "C3A": ("C3AConfig", {"block_size": 4}),
    "SHiRA": ("ShiraConfig", {"r": 1}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 10}),
    "RoAd": ("RoadConfig", {"variant": "road_1", "group_size": 4}),
    "DeLoRA": ("DeloraConfig", {"r": 2}),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "OSF": ("OSFConfig", {"effective_rank": 4}),
}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prefix with projection": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
}
DECODER_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA of embeddings": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA of all layers": ("LoraConfig", {"r": 2, "target_modules": "all-linear"}),
    "LoRA of new tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [8, 31]}),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [8, 31], "target_modules": ["embed_tokens"]}),
    "LoRA and head": ("LoraConfig", {"r": 2, "modules_to_save": ["lm_head"]}),
    "LoRA and norms": ("LoraConfig", {"r": 2, "modules_to_save": ["norm", "input_layernorm"]}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "LLaMA adapter": ("AdaptionPromptConfig", {"adapter_len": 2, "adapter_layers": 1}),
    "CPT": ("CPTConfig", {"cpt_token_ids": [5, 6], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}),
    "aLoRA": ("LoraConfig", {"r": 2, "alora_invocation_tokens": [5]}),
    "LoRA of a parameter": ("LoraConfig", {"r": 2, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
}
Change = Callable[[nn.Module], nn.Module]


def configured(kind: str, options: dict[str, Any]) -> Any:
    import peft

    return getattr(peft, kind)(**{name: value for name, value in options.items() if value != ""})


def adapted(
    base: str, kind: str, options: dict[str, Any], change: Change = lambda model: model
) -> Callable[[], Subject]:
    def build() -> Subject:
        from peft import get_peft_model

        from dpfunc.hf.tasks import make_loss_fn

        auto, task_type, task, targets = BASES[base]
        module = built(auto, base)
        own = {} if kind in NO_TARGETS else {"target_modules": targets}
        model = get_peft_model(module, configured(kind, {**own, "task_type": task_type, **options}))

        def loss_of(forward: Callable[..., Any]) -> LossFn:
            return make_loss_fn(forward, task)

        return Subject(change(model), batch_for(base), loss_of)

    return build


NO_TARGETS = {kind for kind, _ in PROMPTS.values()} | {"AdaptionPromptConfig", "CPTConfig"}


def batch_for(base: str) -> dict[str, Tensor]:
    if base == "vit":
        return {"pixel_values": images(), "labels": classes()}
    batch = text("right")
    batch["input_ids"][:, 1] = 5  # calls the adapter of aLoRA
    return {**batch, "labels": token_labels(batch) if base == "llama" else classes()}


def with_second(active: bool) -> Change:
    """Another adapter beside the first one, active together with it or not."""

    def change(model: Any) -> nn.Module:
        model.add_adapter("second", configured("LoraConfig", {"r": 2, "target_modules": ["q_proj", "down_proj"]}))
        if active:
            model.base_model.set_adapter(["default", "second"])
        else:
            model.set_adapter("second")
        result: nn.Module = model
        return result

    return change


ATTENTION = net_of(
    lambda: {"attention": nn.MultiheadAttention(16, 2, batch_first=True), "head": nn.Linear(16, CLASSES)},
    lambda net, x: net["head"](net["attention"](x, x, x)[0].mean(1)),
)
CONVS = net_of(
    lambda: {"conv": nn.Conv2d(3, 8, 3), "line": nn.Conv1d(8, 8, 3), "head": nn.Linear(8, CLASSES)},
    lambda net, x: net["head"](net["line"](net["conv"](x).relu().flatten(2)).relu().mean(2)),
)


def on_net(
    make: Callable[[], nn.Module], x: Tensor, targets: list[str], kind: str = "LoraConfig", **options: Any
) -> Callable[[], Subject]:
    def wrapped() -> nn.Module:
        from peft import get_peft_model

        return get_peft_model(make(), configured(kind, {"target_modules": targets, "r": 2, **options}))

    return on(wrapped, x)


def cases() -> list[Case]:
    """Each is named by its method, which is also what is trained."""
    found: list[Case] = []

    def add(family: str, method: str, subject: Callable[[], Subject], *modes: str) -> None:
        variants = [f"{method} {mode}" for mode in modes or ("train",)]
        found.extend(cases_of("PEFT", family, subject, variants, "none" if family in ("vit", "net") else "right"))

    for method, (kind, options) in ADAPTERS.items():
        for base in BASES:
            add(base, method, adapted(base, kind, options), "train")
    for method, (kind, options) in PROMPTS.items():
        for base in ("llama", "bert"):
            add(base, method, adapted(base, kind, options), "train")
    for method, (kind, options) in DECODER_ONLY.items():
        add("llama", method, adapted("llama", kind, options), "train")
    lora = {"r": 2, "lora_alpha": 4}
    add("llama", "two adapters, second active", adapted("llama", "LoraConfig", lora, with_second(False)))
    add("llama", "two active adapters", adapted("llama", "LoraConfig", lora, with_second(True)))
    x = randn(4, 5, 16)
    add("net", "LoRA of MultiheadAttention", on_net(ATTENTION, x, ["attention"]), "train", "eval")
    add("net", "LoRA of convolutions", on_net(CONVS, images(8), ["conv", "line"]))
    add("net", "DoRA of convolutions", on_net(CONVS, images(8), ["conv"], use_dora=True))
    add("net", "LoHa of convolutions", on_net(CONVS, images(8), ["conv"], "LoHaConfig"))
    add("net", "LoKr of convolutions", on_net(CONVS, images(8), ["conv"], "LoKrConfig"))
    return found
