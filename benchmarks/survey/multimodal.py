"""Text with images: images inside of the text, pairs, answers about images, documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.survey.case import (
    BATCH,
    END,
    IMAGE,
    START,
    Batch,
    Case,
    LossFn,
    Subject,
    cases_of,
    classes,
    hugging_face,
    images,
    randn,
    text,
    token_labels,
)  # fmt: skip
from benchmarks.survey.tiny import built, of, tiny, written
from benchmarks.survey.vision import SWIN
from dpfunc.hf import losses

WORDS = 40  # ids above are special


def in_text(tokens: int, padding: str = "right") -> Batch:
    """START, the tokens of one image, then words."""
    length = tokens + 6
    batch = text("right", (length, length - 3, length - 1, length - 2), length, WORDS, seed=5)
    batch["input_ids"][:, 0], batch["input_ids"][:, 1 : tokens + 1] = START, IMAGE
    if padding == "left":
        for row in range(BATCH):
            shift = length - int(batch["attention_mask"][row].sum())
            batch = {name: _rolled(value, row, shift) for name, value in batch.items()}
    labels = token_labels(batch)
    return {**batch, "labels": torch.where(batch["input_ids"] == IMAGE, losses.IGNORED, labels)}


def _rolled(value_BT: Tensor, row: int, shift: int) -> Tensor:
    return torch.cat((value_BT[:row], value_BT[row : row + 1].roll(shift, 1), value_BT[row + 1 :]))


def several(count: int, size: int = 16) -> Tensor:
    return randn(BATCH, count, 3, size, size)


SIZE = torch.tensor([[16, 16]] * BATCH)
GRID = torch.tensor([[1, 4, 4]] * BATCH)
PATCHES = 16
PLAIN: Callable[[], Batch] = lambda: {"pixel_values": images()}
SIZED: Callable[[], Batch] = lambda: {"pixel_values": images(32), "image_sizes": 2 * SIZE}
ONE_OF_SEVERAL: Callable[[], Batch] = lambda: {"pixel_values": several(1)}
TILES: Callable[[], Batch] = lambda: {"pixel_values": several(2), "image_sizes": SIZE}


def patches(width: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": randn(BATCH, PATCHES, width), "image_grid_thw": GRID}


def marked(batch: Batch) -> Batch:
    """Types of tokens: 1 for those of an image."""
    types = (batch["input_ids"] == IMAGE).long()
    return {**batch, "token_type_ids": types, "mm_token_type_ids": types}


VIT = {"vision_config": {"out_hidden_size": 16, "hidden_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2,
                         "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3,
                         "fullatt_block_indexes": [0], "window_size": 16, "deepstack_visual_indexes": [0],
                         "num_position_embeddings": 16, "image_size": 16}}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
QWEN = {**VIT, "text_config": MROPE}
PIXTRAL = {"vision_config": {"image_size": 32, "patch_size": 8, "head_dim": 8}, "spatial_merge_size": 2}
# family -> (image tokens, inputs, changes)
INSIDE: dict[str, tuple[int, Callable[[], Batch], dict[str, Any]]] = {
    "aria": (2, PLAIN, {"projector_patch_to_query_dict": {4: 2}, "text_config": {"moe_num_experts": 3, "moe_topk": 2}}),
    "aya_vision": (1, PLAIN, {"downsample_factor": 2, "adapter_layer_norm_eps": 1e-5}),
    "cohere2_vision": (1, PLAIN, {"downsample_factor": 2, "alignment_intermediate_size": 16}),
    "deepseek_vl": (4, PLAIN, {}),
    "fuyu": (4, lambda: {"image_patches": randn(BATCH, 4, 192)}, {"patch_size": 8}),
    "gemma3": (4, PLAIN, {"mm_tokens_per_image": 4}),
    "idefics2": (2, ONE_OF_SEVERAL, {"perceiver_config": {"resampler_n_latents": 2, "resampler_depth": 1,
                                                         "resampler_n_heads": 2, "resampler_head_dim": 8}}),
    "idefics3": (1, ONE_OF_SEVERAL, {"scale_factor": 2}),
    "internvl": (1, PLAIN, {"vision_config": {"image_size": [16, 16], "patch_size": [8, 8]}, "downsample_ratio": 0.5,
                            "image_seq_length": 1}),
    "lighton_ocr": (4, SIZED, PIXTRAL),
    "llama4": (1, PLAIN, {"vision_config": {"pixel_shuffle_ratio": 0.5, "vision_output_dim": 16,
        "intermediate_size": 64, "projector_input_dim": 16, "projector_output_dim": 16}}),
    "llava": (4, PLAIN, {}),
    "llava full vision": (5, PLAIN, {"vision_feature_select_strategy": "full"}),
    "llava siglip qwen2": (4, PLAIN, {"vision_config": {"model_type": "siglip_vision_model"}}),
    "llava_next": (10, TILES, {"image_grid_pinpoints": [[16, 16]]}),
    "llava_next_video": (10, TILES, {"image_grid_pinpoints": [[16, 16]]}),
    "llava_onevision": (10, TILES, {"image_grid_pinpoints": [[16, 16]]}),
    "mistral3": (4, SIZED, PIXTRAL),
    "ovis2": (4, PLAIN, {"vision_config": {"hidden_stride": 1, "num_visual_indicator_tokens": 5}}),
    "paligemma": (4, PLAIN, {"projection_dim": 16, "vision_config": {"projection_dim": 16}}),
    "qwen2_vl": (4, patches(48), QWEN),
    "qwen2_5_vl": (4, patches(48), QWEN),
    "qwen3_vl": (4, patches(48), QWEN),
    "qwen3_vl_moe": (4, patches(48), QWEN),
    "qwen3_5": (4, patches(48), {**VIT, "text_config": {**MROPE, "layer_types": ["linear_attention",
 "full_attention"]}}),
    "glm4v": (4, patches(48), {**VIT, "text_config": {"rope_parameters": {**MROPE["rope_parameters"],
 "partial_rotary_factor": 1.0}}}),
    "smolvlm": (1, ONE_OF_SEVERAL, {"scale_factor": 2}),
    "video_llava": (4, lambda: {"pixel_values_images": images()}, {}),
    "vipllava": (4, PLAIN, {"vision_feature_layers": [-1, -2]}),
}  # fmt: skip
FLAT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
MAIN = ("llava", "llava_next", "paligemma", "gemma3", "idefics3", "qwen2_vl", "qwen2_5_vl", "internvl")


def inside(kind: str, padding: str = "right") -> Callable[[], Subject]:
    def build() -> Subject:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

        tokens, inputs, changes = INSIDE[kind]
        name = NAMES[kind.split()[0]]
        module = built(name if isinstance(name, str) else name[0], kind.split()[0], **changes)
        batch = {**marked(in_text(tokens, padding)), **inputs()}
        if kind in ("paligemma", "gemma3") or kind not in FLAT:
            batch.pop("mm_token_type_ids")
        subject = hugging_face(module, batch, "causal")
        return flattened(subject) if kind in FLAT else subject

    return build


def flattened(subject: Subject) -> Subject:
    """Patches of all images on one axis, as the model wants them; samples stay on axis 0 of the batch."""

    def loss_of(forward: Callable[..., Any]) -> LossFn:
        loss_fn = subject.loss(forward)
        return lambda params, batch: loss_fn(params, {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)})

    return Subject(subject.module, subject.batch, loss_of)


def ended(batch: Batch) -> Batch:
    """Each text ends in END."""
    last_B1 = batch["attention_mask"].sum(1, keepdim=True) - 1
    return {**batch, "input_ids": batch["input_ids"].scatter(1, last_B1, END)}


def pair(auto: str, kind: str, loss: str = "pair", **changes: Any) -> Callable[[], Subject]:
    return of(auto, kind, lambda: {**ended(text("right", vocab=WORDS)), **PLAIN()}, loss, **changes)


PAIRS: Mapping[str, Callable[[], Subject]] = {
    "altclip": pair("AltCLIPModel", "altclip"),
    "chinese_clip": pair("ChineseCLIPModel", "chinese_clip"),
    "clip": pair("CLIPModel", "clip"),
    "clip contrastive": pair("CLIPModel", "clip", "contrastive"),
    "metaclip_2": pair("MetaClip2Model", "metaclip_2"),
    "siglip": pair("SiglipModel", "siglip"),
    "siglip contrastive": pair("SiglipModel", "siglip", "contrastive"),
    "tipsv2": pair("Tipsv2Model", "tipsv2"),
    "blip pair": pair("BlipModel", "blip"),
    "groupvit": pair("GroupViTModel", "groupvit", vision_config={"depths": [1, 1], "num_group_tokens": [4, 0],
        "num_output_groups": [4, 2], "assign_mlp_ratio": [0.5, 4]}, projection_intermediate_dim=16),
    "owlvit": pair("OwlViTModel", "owlvit"),
    "flava": pair("FlavaModel", "flava", "square"),
    "bridgetower": pair("BridgeTowerModel", "bridgetower", "square", hidden_size=64, num_attention_heads=2,
 text_config={"hidden_size": 64}, vision_config={"hidden_size": 64}),
    "clipseg": pair("CLIPSegForImageSegmentation", "clipseg", "logits", reduce_dim=8, extract_layers=[0, 1],
                    decoder_num_attention_heads=2, decoder_intermediate_size=24),
}  # fmt: skip


def captioned(auto: str, kind: str, tokens: int = 0, loss: str = "causal", **changes: Any) -> Callable[[], Subject]:
    """The image beside the text. Outputs for the image come first where a model has them."""
    return of(auto, kind, lambda: {**in_text(tokens), **PLAIN()}, loss, **changes)


def question(
    auto: str, kind: str, loss: str = "classes", extra: Callable[[], Batch] = PLAIN, **changes: Any
) -> Callable[[], Subject]:
    return of(auto, kind, lambda: {**text("right", vocab=WORDS), **extra(), "labels": classes()}, loss, **changes)


def image_writer(encoder: str, decoder: str, **changes: Any) -> Callable[[], Subject]:
    def build() -> Subject:
        sub = {"encoder": tiny(encoder, **changes), "decoder": tiny(decoder, is_decoder=True, add_cross_attention=True)}
        from transformers import VisionEncoderDecoderConfig, VisionEncoderDecoderModel

        config = VisionEncoderDecoderConfig(**{name: part.to_dict() for name, part in sub.items()})
        target = text("right", (3, 5, 2, 4), 5, seed=2)
        batch = {"pixel_values": images(), "decoder_input_ids": target["input_ids"],
                 "decoder_attention_mask": target["attention_mask"], "labels": token_labels(target)}  # fmt: skip
        return hugging_face(VisionEncoderDecoderModel(config), batch, "seq2seq")

    return build


BOXES: Callable[[], Batch] = lambda: {
    "bbox": torch.tensor([[[1, 2, 5, 6]] * 8] * BATCH), "pixel_values": images(),
}  # fmt: skip
REGIONS: Callable[[], Batch] = lambda: {
    "visual_feats": randn(BATCH, 3, 8), "visual_pos": randn(BATCH, 3, 4).abs(), "visual_embeds": randn(BATCH, 3, 8),
    "visual_attention_mask": torch.ones(BATCH, 3), "visual_token_type_ids": torch.ones(BATCH, 3, dtype=torch.long),
}  # fmt: skip
QFORMER = {"num_query_tokens": 2, "qformer_config": {"encoder_hidden_size": 16}, "text_config": {
    "word_embed_proj_dim": 16, "hidden_size": 16, "ffn_dim": 24}}  # fmt: skip
PATCHED: Callable[[], Batch] = lambda: {
    "flattened_patches": torch.cat((torch.ones(BATCH, 4, 2), randn(BATCH, 4, 192)), 2),
    "attention_mask": torch.ones(BATCH, 4),
}  # fmt: skip


def instructed() -> Batch:
    """The question for the resampler, too."""
    ask = text("right", vocab=WORDS, seed=6)
    return {**in_text(2), **PLAIN(), "qformer_input_ids": ask["input_ids"],
            "qformer_attention_mask": ask["attention_mask"]}  # fmt: skip


def attended() -> Batch:
    """Which token attends to which image."""
    batch = {**in_text(0), **ONE_OF_SEVERAL()}
    return {**batch, "image_attention_mask": torch.ones(BATCH, batch["input_ids"].shape[1], 1, dtype=torch.long)}


def tiled() -> Batch:
    """An image of one tile."""
    batch = {**in_text(0), "pixel_values": several(1)[:, None], "aspect_ratio_ids": torch.ones(BATCH, 1).long(),
             "aspect_ratio_mask": torch.ones(BATCH, 1, 1).long()}  # fmt: skip
    return {**batch, "cross_attention_mask": torch.ones(BATCH, batch["input_ids"].shape[1], 1, 1, dtype=torch.long)}


def placed() -> Batch:
    """Where the image is in the text."""
    batch = {**in_text(2), **PLAIN()}
    return {**batch, "image_embeds_position_mask": (batch["input_ids"] == IMAGE).long()}


OTHERS: Mapping[str, Callable[[], Subject]] = {
    "blip": captioned("BlipForConditionalGeneration", "blip"),
    "blip-2": captioned("Blip2ForConditionalGeneration", "blip-2", 2, **QFORMER),
    "instructblip": of("InstructBlipForConditionalGeneration", "instructblip", instructed, "causal", **QFORMER),
    "git": captioned("GitForCausalLM", "git", loss="last causal"),
    "idefics": of("IdeficsForVisionText2Text", "idefics", attended, "causal", cross_layer_interval=1,
                  additional_vocab_size=0, vision_config={"embed_dim": 16}, perceiver_config={"use_resampler": False}),
    "mllama": of("MllamaForConditionalGeneration", "mllama", tiled, "causal",
        text_config={"cross_attention_layers": [1], "vocab_size": 50}, vision_config={"num_global_layers": 1,
        "vision_output_dim": 32, "intermediate_layers_indices": [0], "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]]}),
    "kosmos-2": of("Kosmos2ForConditionalGeneration", "kosmos-2", placed, "causal", latent_query_num=2, text_config={
        "embed_dim": 16, "ffn_dim": 24, "layers": 1, "attention_heads": 2}),
    "vilt": question("ViltForQuestionAnswering", "vilt"),
    "visual_bert": question("VisualBertForQuestionAnswering", "visual_bert", extra=REGIONS, visual_embedding_dim=8),
    "lxmert": question("LxmertForQuestionAnswering", "lxmert", "answers", REGIONS, visual_feat_dim=8, num_qa_labels=3,
                       l_layers=1, x_layers=1, r_layers=1),
    "layoutlm": question("LayoutLMForSequenceClassification", "layoutlm", extra=BOXES, max_2d_position_embeddings=64),
    "layoutlmv3": question("LayoutLMv3ForSequenceClassification", "layoutlmv3", extra=BOXES,
                           max_2d_position_embeddings=64, coordinate_size=3, shape_size=2, input_size=16,
                           rel_pos_bins=8, rel_2d_pos_bins=8),
    "lilt": question("LiltForSequenceClassification", "lilt", extra=BOXES, max_2d_position_embeddings=64,
                     channel_shrink_ratio=2, hidden_size=24),
    "vision-encoder-decoder vit bert": image_writer("vit", "bert"),
    "vision-encoder-decoder deit trocr": image_writer("deit", "trocr"),
    "vision-encoder-decoder donut mbart": image_writer("donut-swin", "mbart", **SWIN),
    "pix2struct": written("Pix2StructForConditionalGeneration", "pix2struct", PATCHED, text_config={
        "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 24, "hidden_size": 16}, vision_config={
        "d_kv": 8, "patch_embed_hidden_size": 192, "d_ff": 24, "seq_len": 4}),
    "blip question": question("BlipForQuestionAnswering", "blip", "square", extra=lambda: {
        "pixel_values": images(), "decoder_input_ids": text("right", vocab=WORDS)["input_ids"]}),
    "mgp-str": of("MgpstrForSceneTextRecognition", "mgp-str", PLAIN, "all logits", image_size=[16, 16], patch_size=8,
                  max_token_length=4, num_character_labels=8, num_bpe_labels=8, num_wordpiece_labels=8),
}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for kind in INSIDE:
        found += cases_of("multimodal", kind, inside(kind), ["full eval", "LoRA train"], "right")
        if kind in MAIN:
            found += cases_of("multimodal", kind, inside(kind), ["full train", "biases eval"], "right")
            found += cases_of("multimodal", kind, inside(kind, "left"), ["full eval"], "left")
    for kind, subject in (*PAIRS.items(), *OTHERS.items()):
        found += cases_of("multimodal", kind, subject, ["full eval", "LoRA train"], "right")
    return found
