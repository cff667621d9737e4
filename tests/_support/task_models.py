"""Tiny models for each kind of task, with a batch of rows of several lengths as their collators make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from zoo.parity import roughen

from benchmarks.survey.audio import CONVS, waves
from benchmarks.survey.case import classes, images, randn, text, token_labels
from benchmarks.survey.tiny import built
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import infer_task, make_loss_fn

IGNORED = -100
D_MODEL = {"d_model": 16}
T5 = {**D_MODEL, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
WHISPER = {**D_MODEL, "max_source_positions": 8, "max_target_positions": 16}
WAV2VEC2 = {**CONVS, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "mask_time_prob": 0.0}
PATCHES = {"max_length": 16, "frequency_stride": 4, "time_stride": 4, "patch_size": 4}


def language():
    return {**text(), "labels": token_labels(text())}


def masked():
    """A label at every second token."""
    batch = language()
    return {**batch, "labels": torch.where(torch.arange(8) % 2 == 0, batch["labels"], IGNORED)}


def tagged():
    batch = text()
    return {**batch, "labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, IGNORED)}


def answered():
    """From the first token to the last but one."""
    return {**text(), "start_positions": torch.zeros(4).long(), "end_positions": text()["attention_mask"].sum(1) - 2}


def pairs():
    """Two sentences in a row, the second one from the third token on."""
    batch = text()
    return {**batch, "token_type_ids": (torch.arange(8) >= 2).long() * batch["attention_mask"], "labels": classes()}


def choices():
    """Three texts a record."""
    together = {name: torch.stack([value, value.roll(1, 0), value.roll(2, 0)], 1) for name, value in text().items()}
    return {**together, "labels": classes()}


def ended():
    """Each text ends in a token 2, and has no other one."""
    batch = text()
    last_B1 = batch["attention_mask"].sum(1, keepdim=True) - 1
    return {**batch, "input_ids": batch["input_ids"].scatter(1, last_B1, 2), "labels": classes()}


def targets():
    return token_labels(text("right", (3, 5, 2, 4), 5, seed=2))


def spoken():
    return {**waves(), "labels": torch.tensor([[5, 6, 7], [8, 9, IGNORED], [5, 5, 6], [7, IGNORED, IGNORED]])}


@dataclass(frozen=True)
class TaskModel:
    """A class of transformers with its configuration, a batch, the task that its name says, the engine that auto takes.

    `own` is False where the model's own loss is another one, and `changes` are for the configuration.
    """

    name: str
    kind: str
    task: str
    batch: Callable[[], Mapping[str, torch.Tensor]]
    changes: Mapping[str, object] = field(default_factory=dict)
    engine: str = "one pass"
    own: bool = True


def classified(labels=None):
    return lambda: {**text(), "labels": classes() if labels is None else labels}


ONE = {"num_labels": 1}
SEVERAL = {"problem_type": "multi_label_classification"}
SEQ = "sequence_classification"
BERT = ("BertForSequenceClassification", "bert", SEQ)
SEVERAL_LABELS = classified(labels=classes(2, 4, 3).float())


def written():
    return {**text(), "labels": targets()}


def heard(name):
    return lambda: {name: randn(4, 8, 16) if name == "input_features" else randn(4, 16, 8), "labels": classes()}


MODELS = {
    "classes of a text": TaskModel(*BERT, classified()),
    "classes of a text, Llama": TaskModel("LlamaForSequenceClassification", "llama", SEQ, classified()),
    "classes of a text, BART": TaskModel("BartForSequenceClassification", "bart", SEQ, ended, D_MODEL),
    "pairs of sentences": TaskModel(*BERT, pairs),
    "regression": TaskModel(*BERT, classified(labels=randn(4)), ONE),
    "regression, whole numbers": TaskModel(*BERT, classified(labels=torch.tensor([1, 5, 3, 2])), ONE, own=False),
    "regression, a column": TaskModel(*BERT, classified(labels=randn(4, 1)), ONE),
    "regression, by configuration": TaskModel(*BERT, classified(labels=randn(4, 3)), {"problem_type": "regression"}),
    "several labels": TaskModel(*BERT, SEVERAL_LABELS),
    "several labels, by configuration": TaskModel(*BERT, SEVERAL_LABELS, SEVERAL),
    "multiple choice": TaskModel("BertForMultipleChoice", "bert", SEQ, choices),
    "next sentence": TaskModel("BertForNextSentencePrediction", "bert", SEQ, lambda: {**pairs(), "labels": classes(2)}),
    "classes of tokens": TaskModel("BertForTokenClassification", "bert", "token_classification", tagged),
    "answers in a text": TaskModel("BertForQuestionAnswering", "bert", "question_answering", answered, {"num_labels": 2}),
    "masked language model": TaskModel("BertForMaskedLM", "bert", "masked_lm", masked),
    "causal language model": TaskModel("LlamaForCausalLM", "llama", "causal_lm", language),
    "causal language model, experts": TaskModel("MixtralForCausalLM", "mixtral", "causal_lm", language),
    "T5": TaskModel("T5ForConditionalGeneration", "t5", "seq2seq", written, {**T5, "decoder_start_token_id": 0}),
    "BART": TaskModel("BartForConditionalGeneration", "bart", "seq2seq", written, D_MODEL),
    "mBART": TaskModel("MBartForConditionalGeneration", "mbart", "seq2seq", written, D_MODEL),
    "Marian": TaskModel("MarianMTModel", "marian", "seq2seq", written, D_MODEL),
    "Whisper": TaskModel("WhisperForConditionalGeneration", "whisper", "seq2seq",
                         lambda: {"input_features": randn(4, 8, 16), "labels": targets()}, WHISPER),
    "classes of sound, Whisper": TaskModel("WhisperForAudioClassification", "whisper", SEQ, heard("input_features"),
                                           {**WHISPER, "classifier_proj_size": 8}),
    "classes of sound, spectrogram": TaskModel("ASTForAudioClassification", "audio-spectrogram-transformer", SEQ,
                                               heard("input_values"), PATCHES),
    "Wav2Vec2, CTC": TaskModel("Wav2Vec2ForCTC", "wav2vec2", "ctc", spoken, WAV2VEC2, engine="groups"),
    "Wav2Vec2, CTC, mean": TaskModel("Wav2Vec2ForCTC", "wav2vec2", "ctc", spoken,
                                     {**WAV2VEC2, "ctc_loss_reduction": "mean"}, engine="groups"),
    "HuBERT, CTC": TaskModel("HubertForCTC", "hubert", "ctc", spoken, WAV2VEC2, engine="groups"),
    "classes of sound, Wav2Vec2": TaskModel("Wav2Vec2ForSequenceClassification", "wav2vec2", SEQ,
                                            lambda: {**waves(), "labels": classes()}, WAV2VEC2),
    "classes of images": TaskModel("ViTForImageClassification", "vit", "image_classification",
                                   lambda: {"pixel_values": images(), "labels": classes()}),
    "classes of videos": TaskModel("VideoMAEForVideoClassification", "videomae", SEQ,
                                   lambda: {"pixel_values": randn(4, 2, 3, 16, 16), "labels": classes()},
                                   {"num_frames": 2, "tubelet_size": 1}),
}  # fmt: skip


def build(name):
    """The model with random weights, in evaluation mode, and its batch."""
    entry = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = roughen(built(entry.name, entry.kind, **entry.changes)).eval()
    return model, dict(entry.batch())


def alone(name, batch, row):
    """One row of a batch, cut to its own length: no padding of inputs or labels."""
    result = {key: value[row : row + 1] for key, value in batch.items()}
    mask = result.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        length, longest = int(mask.sum()), mask.shape[1]
        result |= {key: value[:, :length] for key, value in result.items() if value.shape[1:2] == (longest,)}
    if MODELS[name].task in ("seq2seq", "ctc"):
        result["labels"] = result["labels"][:, : int((result["labels"] != IGNORED).sum())]
    return result


class Encoder(nn.Module):
    """As the first module of a SentenceTransformer: features in, features out."""

    def __init__(self):
        super().__init__()
        self.auto_model = built("BertModel", "bert")

    def forward(self, features):
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {**features, "token_embeddings": self.auto_model(**inputs).last_hidden_state}


class Pooling(nn.Module):
    """Mean over the tokens of a sentence."""

    def forward(self, features):
        mask_BT1 = features["attention_mask"][..., None]
        mean_BD = (features["token_embeddings"] * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        return {**features, "sentence_embedding": mean_BD}


class SoftmaxLoss(nn.Module):
    """As sentence-transformers has it: an encoder and a classifier of u, v, |u - v|."""

    def __init__(self, model):
        super().__init__()
        self.model, self.classifier = model, nn.Linear(3 * 16, 3)

    def forward(self, sentence_features, labels):
        u, v = (self.model(features)["sentence_embedding"] for features in sentence_features)
        logits = self.classifier(torch.cat([u, v, (u - v).abs()], 1))
        return ((u, v), logits) if labels is None else F.cross_entropy(logits, labels)


def sentence_model():
    """A stand-in for a SentenceTransformer, which is a sequence of such modules."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return roughen(nn.Sequential(Encoder(), Pooling())).eval()


def sentences():
    """As the collator of sentence-transformers has them."""
    first, second = text(), text(lengths=(2, 7, 4, 5), length=7, seed=3)
    return {
        **{f"premise_{name}": value for name, value in first.items()},
        **{f"hypothesis_{name}": value for name, value in second.items()},
    }


def loss_of(name, task=None):
    """The loss of a model, its parameters and a batch."""
    model, batch = build(name)
    forward, params = functionalize(model)
    return make_loss_fn(forward, task or infer_task(model)), params, batch


@torch.no_grad()
def ignores_later_tokens(forward, params, batch):
    """True if no logit moves when the last token of each row is replaced."""
    ids = batch["input_ids"]
    other = torch.cat((ids[:, :-1], torch.where(ids[:, -1:] == 0, 1, ids[:, -1:] - 1)), dim=1)
    one, two = (forward(params, **{**batch, "input_ids": each}).logits[:, :-1] for each in (ids, other))
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5)
