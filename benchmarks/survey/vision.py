"""Classifiers of images, and some that reconstruct or segment them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.survey.case import BATCH, Batch, Case, Subject, cases_of, classes, images, seeded
from benchmarks.survey.tiny import of

FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
PYRAMID = {
    "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [4, 2, 1, 1], "mlp_ratios": [2, 2, 2, 2],
}  # fmt: skip
MOBILE = {"image_size": 64, "hidden_sizes": [8, 8, 16], "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 16]}
# family -> (size of images, changes, has BatchNorm)
NETS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "beit": (16, {}, False),
    "bit": (32, {**FOUR, "embedding_size": 8, "num_groups": 4}, False),
    "clip": (16, {}, False),
    "convnext": (64, {**FOUR, "num_stages": 4}, False),
    "convnextv2": (64, {**FOUR, "num_stages": 4}, False),
    "cvt": (32, {"embed_dim": [8, 8, 16], "num_heads": [1, 1, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0,
        0.1]}, True),
    "data2vec-vision": (16, {}, False),
    "deit": (16, {}, False),
    "dinov2": (16, {}, False),
    "dinov2_with_registers": (16, {}, False),
    "donut-swin": (16, SWIN, False),
    "efficientnet": (32, {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320,
                          "depth_divisor": 4}, True),
    "focalnet": (16, {"embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3],
                      "patch_size": 2}, False),
    "hgnet_v2": (64, {"embedding_size": 8, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
                      "stem_channels": [3, 4, 8], "stage_in_channels": [8, 8, 8, 16],
                      "stage_mid_channels": [4, 4, 4, 4], "stage_out_channels": [8, 8, 16, 16],
                      "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1]}, True),
    "hiera": (32, {"image_size": [32, 32], "embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 1, 2],
                   "query_stride": [2, 2], "num_query_pool": 2, "masked_unit_size": [4, 4],
                   "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1]}, False),
    "ijepa": (16, {}, False),
    "levit": (32, {"image_size": 32, "patch_size": 16, "hidden_sizes": [8, 16, 16], "num_attention_heads": [2, 2, 2],
                   "depths": [1, 1, 1], "key_dim": [4, 4, 4], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2],
                   "down_ops": [["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 4, 4, 2, 2]]}, True),
    "metaclip_2": (16, {}, False),
    "mobilenet_v1": (32, {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4}, True),
    "mobilenet_v2": (32, {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4}, True),
    "mobilevit": (64, {**MOBILE, "patch_size": 2, "num_attention_heads": 2}, True),
    "mobilevitv2": (64, {"image_size": 64, "width_multiplier": 0.25, "patch_size": 2,
        "base_attn_unit_dims": [16, 16, 16], "n_attn_blocks": [1, 1, 1]}, True),
    "poolformer": (32, {**FOUR, "num_encoder_blocks": 4, "strides": [2, 2, 2, 2], "patch_sizes": [3, 3, 3, 3],
                        "padding": [1, 1, 1, 1], "mlp_ratio": 2.0}, False),
    "pp_lcnet": (32, {"scale": 0.25}, True),
    "pvt": (32, {**PYRAMID, "image_size": 32, "num_encoder_blocks": 4, "sequence_reduction_ratios": [4, 2, 1, 1],
                 "patch_sizes": [4, 2, 2, 2]}, False),
    "pvt_v2": (32, {**PYRAMID, "image_size": 32}, False),
    "pvt_v2 linear": (32, {**PYRAMID, "image_size": 32, "linear_attention": True}, False),
    "regnet": (32, {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 4},
               True),
    "resnet": (64, {**FOUR, "embedding_size": 8}, True),
    "resnet basic": (64, {**FOUR, "embedding_size": 8, "layer_type": "basic"}, True),
    "segformer": (32, {**PYRAMID, "decoder_hidden_size": 16}, False),
    "siglip": (16, {}, False),
    "swiftformer": (32, {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "image_size": 32}, True),
    "swin": (16, SWIN, False),
    "swinv2": (16, SWIN, False),
    "textnet": (32, {"stem_num_channels": 3, "stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16],
                     "conv_layer_kernel_sizes": [[[3, 3]]] * 4, "conv_layer_strides": [[1], [2], [2], [2]]}, True),
    "vit": (16, {}, False),
    "vit_msn": (16, {}, False),
}  # fmt: skip
CLASSES_OF = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassification"}  # families with two
MAIN = ("vit", "beit", "deit", "swin", "dinov2", "convnext", "resnet")


def classifier(kind: str) -> Callable[[], Subject]:
    size, changes, _ = NETS[kind]
    auto = CLASSES_OF.get(kind, "AutoModelForImageClassification")
    loss = "square" if kind == "pp_lcnet" else "classes"
    return of(auto, kind, lambda: {"pixel_values": images(size), "labels": classes()}, loss, **changes)


def masked() -> Mapping[str, Callable[[], Subject]]:
    """ViT-MAE draws what it hides; here the draw is an input. SimMIM hides a fixed mask."""
    sizes = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
             "decoder_intermediate_size": 24, "mask_ratio": 0.5}  # fmt: skip
    mask = torch.tensor([[True, False, False, True]]).repeat(BATCH, 1)
    drawn = lambda: {"pixel_values": images(), "noise": torch.rand(BATCH, 4, generator=seeded(5))}
    fixed = lambda: {"pixel_values": images(), "bool_masked_pos": mask}
    return {
        "vit_mae": of("ViTMAEForPreTraining", "vit_mae", drawn, "logits", **sizes),
        "vit masked": of("ViTForMaskedImageModeling", "vit", fixed, "reconstruction", encoder_stride=8),
    }


def without_head(auto: str, kind: str, size: int, loss: str = "square", **changes: Any) -> Callable[[], Subject]:
    return of(auto, kind, lambda: {"pixel_values": images(size)}, loss, **changes)


def video(auto: str, kind: str, **changes: Any) -> Callable[[], Subject]:
    name = "pixel_values_videos" if kind == "vjepa2" else "pixel_values"

    def batch() -> Batch:
        frames = images(16)[:, None].repeat(1, 2, 1, 1, 1) + torch.tensor([0.0, 0.3])[None, :, None, None, None]
        return {name: frames, "labels": classes()}

    return of(auto, kind, batch, "classes", **changes)


OTHERS: Mapping[str, Callable[[], Subject]] = {
    **masked(),
    "segformer segmentation": without_head("SegformerForSemanticSegmentation", "segformer", 32, "logits", **PYRAMID,
        decoder_hidden_size=16),
    "mobilenet_v2 segmentation": without_head("MobileNetV2ForSemanticSegmentation", "mobilenet_v2", 64, "logits",
        depth_multiplier=0.25, min_depth=4),
    "swin2sr": without_head("Swin2SRForImageSuperResolution", "swin2sr", 8, "reconstruction", image_size=8, embed_dim=8,
        depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=1, upscale=2),
    "dpt": without_head("DPTForSemanticSegmentation", "dpt", 16, "logits", num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False, patch_size=4),
    "glpn": without_head("GLPNForDepthEstimation", "glpn", 32, "predicted_depth", depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], sr_ratios=[4, 2, 1, 1], decoder_hidden_size=8),
    "yolos": without_head("YolosForObjectDetection", "yolos", 16, "logits", image_size=[16, 16],
        num_detection_tokens=3),
    "vitpose": without_head("VitPoseForPoseEstimation", "vitpose", 16, "heatmaps", backbone_config={
        "num_experts": 1, "image_size": [16, 16], "patch_size": [8, 8]}),
    "imagegpt": of("ImageGPTForImageClassification", "imagegpt", lambda: {
        "input_ids": torch.randint(50, (BATCH, 16), generator=seeded(0)), "labels": classes()}, "classes",
        n_positions=64),
    "dinov3_vit": without_head("DINOv3ViTModel", "dinov3_vit", 16),
    "convnext backbone": without_head("ConvNextModel", "convnext", 64, **FOUR, num_stages=4),
    "sam vision": without_head("SamVisionModel", "sam_vision_model", 16, image_size=16, patch_size=4, output_channels=8,
        window_size=2, global_attn_indexes=[1], num_pos_feats=8, mlp_dim=24),
    "vivit": video("VivitForVideoClassification", "vivit", num_frames=2, tubelet_size=[2, 8, 8]),
    "timesformer": video("TimesformerForVideoClassification", "timesformer", num_frames=2),
    "videomae": video("VideoMAEForVideoClassification", "videomae", num_frames=2),
    "vjepa2": video("VJEPA2ForVideoClassification", "vjepa2", crop_size=16, frames_per_clip=2, num_pooler_layers=1,
        pred_hidden_size=16, pred_num_attention_heads=2, pred_num_hidden_layers=1, mlp_ratio=2),
}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for kind, (_, _, batchnorm) in NETS.items():
        variants = ["full eval", "LoRA train" if not batchnorm else "LoRA eval"]
        variants += ["full train", "GroupNorm train"] if batchnorm else []
        if kind == "levit":  # keeps what it computed in eval mode, so it has one backward pass only
            variants = ["full train", "GroupNorm train"]
        variants += ["biases eval", *([] if batchnorm else ["full train"])] if kind in MAIN else []
        found += cases_of("vision", kind, classifier(kind), variants)
    for kind, subject in OTHERS.items():
        found += cases_of("vision", kind, subject, ["full eval"])
    return found
