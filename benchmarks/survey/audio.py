"""Speech and sound, and series of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.survey.case import BATCH, Batch, Case, LossFn, Subject, cases_of, classes, mean_square, randn, text
from benchmarks.survey.tiny import of, written

CONVS: dict[str, Any] = {
    "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "mask_time_length": 2,
    "mask_feature_length": 2,
}  # fmt: skip
SPEECH: dict[str, dict[str, Any]] = {
    "data2vec-audio": {**CONVS, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "hubert": CONVS,
    "sew": {**CONVS, "squeeze_factor": 2},
    "sew-d": {**CONVS, "squeeze_factor": 2, "position_buckets": 8},
    "unispeech": CONVS,
    "unispeech-sat": {**CONVS, "tdnn_dim": [8, 8], "tdnn_kernel": [3, 1], "tdnn_dilation": [1, 1],
        "xvector_output_dim": 8},
    "wav2vec2": CONVS,
    "wav2vec2 layer norm": {**CONVS, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    "wav2vec2-conformer": {**CONVS, "conv_depthwise_kernel_size": 3},
    "wavlm": CONVS,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "lasr_ctc": {},
    "parakeet_ctc": {},
    "wav2vec2-bert": {"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "num_attention_heads": 2,
                      "classifier_proj_size": 8, "left_max_position_embeddings": 4, "right_max_position_embeddings": 2},
}  # fmt: skip
SAMPLES = 400


def waves(padded: bool = True) -> Batch:
    lengths_B1 = torch.tensor([400, 300, 360, 240])[:, None]
    mask_BT = (torch.arange(SAMPLES)[None] < lengths_B1).long() if padded else torch.ones(BATCH, SAMPLES).long()
    return {"input_values": randn(BATCH, SAMPLES) * mask_BT, "attention_mask": mask_BT}


def transcribed(auto: str, kind: str, batch: Callable[[], Batch], **changes: Any) -> Callable[[], Subject]:
    """CTC: the output for each frame against a short text."""
    labels = torch.tensor([[5, 6, 7], [8, 9, 0], [5, 5, 6], [7, 0, 0]])
    return of(auto, kind, lambda: {**batch(), "labels": labels}, "ctc", **changes)


def features(frames: int = 16, mels: int = 8) -> Batch:
    mask_BT = (torch.arange(frames)[None] < torch.tensor([frames, frames - 4, frames, frames - 8])[:, None]).long()
    return {"input_features": randn(BATCH, frames, mels) * mask_BT[..., None], "attention_mask": mask_BT}


MELS: Callable[[], Batch] = lambda: {"input_features": randn(BATCH, 8, 16)}
WHISPER = {"max_source_positions": 8, "max_target_positions": 16, "d_model": 16}
OTHERS: Mapping[str, Callable[[], Subject]] = {
    "audio-spectrogram-transformer": of("ASTForAudioClassification", "audio-spectrogram-transformer", lambda: {
        "input_values": randn(BATCH, 16, 8), "labels": classes()}, "classes", max_length=16, frequency_stride=4,
        time_stride=4, patch_size=4),
    "clap": of("ClapModel", "clap", lambda: {**text("right"), "input_features": randn(BATCH, 1, 64, 8)}, "square",
        audio_config={"spec_size": 32, "num_mel_bins": 8, "patch_embeds_hidden_size": 16, "patch_size": 2,
        "window_size": 4, "depths": [1, 1], "num_attention_heads": [2, 2], "hidden_size": 32, "patch_stride": 2,
        "num_classes": 3}),
    "whisper": written("WhisperForConditionalGeneration", "whisper", MELS, **WHISPER),
    "whisper classifier": of("WhisperForAudioClassification", "whisper", lambda: {**MELS(), "labels": classes()},
                             "classes", **WHISPER, classifier_proj_size=8),
    "speech_to_text": written("Speech2TextForConditionalGeneration", "speech_to_text", features, d_model=16,
        input_feat_per_channel=8, conv_channels=8, max_source_positions=64, max_target_positions=64),
    "moonshine": written("MoonshineForConditionalGeneration", "moonshine", lambda: {
        "input_values": randn(BATCH, 1600), "attention_mask": torch.ones(BATCH, 1600).long()}),
    "speecht5": written("SpeechT5ForSpeechToText", "speecht5", waves, **CONVS),
    "seamless_m4t speech": written("SeamlessM4TForSpeechToText", "seamless_m4t", lambda: {
        "input_features": randn(BATCH, 16, 8)}, feature_projection_input_dim=8, speech_encoder_layers=1,
        speech_encoder_attention_heads=2, speech_encoder_intermediate_size=16, conv_depthwise_kernel_size=3),
    "lasr_ctc": transcribed("LasrForCTC", "lasr_ctc", lambda: features(64)),
    "parakeet_ctc": transcribed("ParakeetForCTC", "parakeet_ctc", lambda: features(64), encoder_config={
        "subsampling_conv_channels": 8, "num_mel_bins": 8, "conv_kernel_size": 3}),
    "wav2vec2-bert": transcribed("Wav2Vec2BertForCTC", "wav2vec2-bert", features, **FEATURES["wav2vec2-bert"]),
    "wav2vec2 ctc": transcribed("Wav2Vec2ForCTC", "wav2vec2", waves, **CONVS),
    "hubert ctc": transcribed("HubertForCTC", "hubert", waves, **CONVS),
    "wavlm ctc": transcribed("WavLMForCTC", "wavlm", waves, **CONVS),
    "sew ctc": transcribed("SEWForCTC", "sew", waves, **SPEECH["sew"]),
    "unispeech ctc": transcribed("UniSpeechForCTC", "unispeech", waves, **CONVS),
    "encodec": of("EncodecModel", "encodec", lambda: {"input_values": randn(BATCH, 1, 64)}, "audio_values",
        num_filters=4, hidden_size=8, upsampling_ratios=[2, 2], codebook_size=8, codebook_dim=8,
        norm_type="weight_norm", num_lstm_layers=1, kernel_size=3, last_kernel_size=3, compress=2,
        target_bandwidths=[1.5], sampling_rate=400),
}  # fmt: skip

TIME = {"input_size": 1, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16, "prediction_length": 4,
        "context_length": 8, "encoder_layers": 1, "decoder_layers": 1, "moving_average": 3,
            "label_length": 4}  # fmt: skip
PATCHED = {"context_length": 16, "prediction_length": 4, "num_input_channels": 2, "patch_length": 4, "patch_stride": 4,
           "d_model": 16, "ffn_dim": 24, "expansion_factor": 1, "num_layers": 1}  # fmt: skip


def series() -> Batch:
    return {
        "past_values": randn(BATCH, 10), "past_time_features": randn(BATCH, 10, 1, seed=4),
        "past_observed_mask": torch.ones(BATCH, 10), "future_values": randn(BATCH, 4, seed=5),
        "future_time_features": randn(BATCH, 4, 1, seed=6),
    }  # fmt: skip


def forecast(auto: str, kind: str, **changes: Any) -> Callable[[], Subject]:
    """The parameters of the predicted distributions, pulled to zero; the own loss of these models mixes samples."""
    return of(auto, kind, series, "parameters", **{**TIME, **changes})


def patched(auto: str, kind: str, loss: str = "prediction_outputs", **changes: Any) -> Callable[[], Subject]:
    return of(auto, kind, lambda: {"past_values": randn(BATCH, 16, 2), "future_values": randn(BATCH, 4, 2, seed=5)},
              loss, **PATCHED, **changes)  # fmt: skip


def steps() -> Batch:
    """Of a game, for a decision transformer."""
    return {"states": randn(BATCH, 4, 3), "actions": randn(BATCH, 4, 2), "rewards": randn(BATCH, 4, 1),
            "returns_to_go": randn(BATCH, 4, 1), "timesteps": torch.arange(4).repeat(BATCH, 1),
            "attention_mask": torch.ones(BATCH, 4).long()}  # fmt: skip


def times() -> Subject:
    """TimesFM, which wants a list of series."""
    make = of("TimesFmModelForPrediction", "timesfm", lambda: {
        "past_values": randn(BATCH, 32), "freq": torch.zeros(BATCH, 1).long()}, "mean_predictions", context_length=32,
        patch_length=8, horizon_length=8, quantiles=[0.5])  # fmt: skip
    subject = make()

    def loss_of(forward: Callable[..., Any]) -> LossFn:
        def loss_fn(params: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
            options = {"freq": list(batch["freq"])} if "freq" in batch else {}
            return mean_square(forward(params, past_values=list(batch["past_values"]), **options).mean_predictions)

        return loss_fn

    return Subject(subject.module, subject.batch, loss_of)


SERIES: Mapping[str, Callable[[], Subject]] = {
    "time_series_transformer": forecast("TimeSeriesTransformerForPrediction", "time_series_transformer"),
    "informer": forecast("InformerForPrediction", "informer"),
    "informer full attention": forecast("InformerForPrediction", "informer", attention_type="full", distil=False),
    "autoformer": forecast("AutoformerForPrediction", "autoformer"),
    "patchtst forecast": patched("PatchTSTForPrediction", "patchtst"),
    "patchtst batch norm": patched("PatchTSTForPrediction", "patchtst", norm_type="batchnorm"),
    "patchtst classes": patched("PatchTSTForClassification", "patchtst", loss="prediction_logits", num_targets=3),
    "patchtst layer norm": patched("PatchTSTForPrediction", "patchtst", norm_type="layernorm"),
    "patchtsmixer forecast": patched("PatchTSMixerForPrediction", "patchtsmixer"),
    "patchtsmixer layer norm": patched("PatchTSMixerForPrediction", "patchtsmixer", norm_mlp="LayerNorm"),
    "timesfm": times,
    "decision_transformer": of("DecisionTransformerModel", "decision_transformer", steps, "square", state_dim=3,
                               act_dim=2, max_ep_len=16, n_positions=32),
}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for kind, changes in SPEECH.items():
        sound = of(
            "AutoModelForAudioClassification", kind, lambda: {**waves(), "labels": classes()}, "classes", **changes
        )
        found += cases_of("audio", f"{kind} classifier", sound, ["full eval", "full train", "LoRA train"], "right")
    for kind, subject in OTHERS.items():
        variants = ["full eval"] if kind == "encodec" else ["full eval", "LoRA train"]
        found += cases_of("audio", kind, subject, variants, "right")
    for kind, subject in SERIES.items():
        found += cases_of("series", kind, subject, ["full eval", "full train"])
    return found
