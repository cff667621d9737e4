"""Training tasks: losses that map a forward function and a batch to one value per sample.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.

The model is called without labels. What it would compute from them is a mean over the batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dpfunc._utils.validation import one_of, refuse
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf import losses
from dpfunc.hf._facts import AnyForward, base_model, facts_of, with_facts
from dpfunc.types import LossFn, Params

CLASSES = "single_label_classification"
"""The `problem_type` of one class a sample."""

SampleLoss = Callable[[AnyForward, Params, Mapping[str, Tensor]], Tensor]
"""`(forward, params, batch) -> (B,)`: one loss for each sample of a batch with the samples on axis 0."""


def causal_lm(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Next-token loss, mean over the sample's own labelled tokens; "labels" (B, T) are the ids or -100.

    A token after padding is not predicted: with padding on the left, how much of it there is depends on the longest
    sample of the batch, and the loss of the others must not.
    """
    return losses.causal_lm(*next_tokens(forward, params, batch))


def next_tokens(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) of a language model, and labels (B, T), not shifted, without those of tokens after padding."""
    inputs, labels_BT = _split(batch)
    found = [name for name in _PACKED if name in inputs]
    if not found and "position_ids" in inputs and "attention_mask" not in inputs:
        found = ["position_ids without attention_mask"]
    if found:  # of TRL, or DataCollatorWithFlattening
        raise InvalidArgument(
            f"Expected one record in each row, got {', '.join(found)}: the sign of packed rows, in which records share "
            "a row, and a record can be in two. A row is what is clipped and protected, so the records in it would "
            "not be. Switch packing off (packing=False, padding_free=False) and pad: one row, one record. For rows "
            "that are not packed add an attention_mask, or leave position_ids out."
        )
    if (mask_BT := inputs.get("attention_mask")) is not None and mask_BT.shape == labels_BT.shape:
        before_BT = torch.cat((torch.ones_like(mask_BT[:, :1]), mask_BT[:, :-1]), dim=1)
        labels_BT = torch.where(before_BT == 0, losses.IGNORED, labels_BT)
    return _logits_of_tokens(forward, params, inputs, labels_BT), labels_BT


def vqa(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """`causal_lm` of a vision-language model: the batch has "pixel_values", labels are -100 at image tokens."""
    if "pixel_values" not in batch:
        raise InvalidArgument(
            f"Expected images under 'pixel_values' in the batch, got {sorted(batch)}. For text alone use \"causal_lm\"."
        )
    return causal_lm(forward, params, facts_of(forward).flatten_images(batch))


def sequence_classification(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """One class, several labels, or numbers for each sample: what the model's configuration says, or else the labels.

    Without `problem_type`, one output is regression, whole numbers are classes, other labels are several labels. The
    "labels" are (B,) or (B, C).
    """
    inputs, labels = _split(batch)
    if "attention_mask" in inputs and facts_of(forward).lacks_padding:
        raise UnsupportedModel(
            "Expected a model with a padding token, by which it tells the last token of a text, got "
            "config.pad_token_id=None: the class of a padded text would be that of its padding. Set "
            "model.config.pad_token_id = tokenizer.pad_token_id."
        )
    outputs_BC = _logits(forward(params, **inputs))
    problem = problem_of(facts_of(forward).problem, outputs_BC.shape[-1], labels)
    if problem == CLASSES and not labels.is_floating_point() and labels.dim() == 2 and labels.shape == outputs_BC.shape:
        raise InvalidArgument(
            f"Expected classes (B,), or floats (B, C) for several labels a sample, got {labels.dtype} of "
            f"{tuple(labels.shape)}. Make several labels labels.float(), or set config.problem_type."
        )
    known = {"regression": losses.regression, "multi_label_classification": losses.multi_label}
    return known.get(problem, losses.classification)(outputs_BC, labels)


def problem_of(given: str | None, num_outputs: int, labels: Tensor) -> str:
    """The `problem_type` of a configuration, or what Transformers takes if it is None."""
    several = "multi_label_classification" if labels.is_floating_point() else CLASSES
    return given if given is not None else "regression" if num_outputs == 1 else several


def token_classification(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """A class, or a masked word, for each token: mean over the sample's own tokens with labels, (B, T), others -100."""
    inputs, labels_BT = _split(batch)
    return losses.token_mean(_logits_of_tokens(forward, params, inputs, labels_BT), labels_BT)


def seq2seq(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Loss of an encoder-decoder, mean over the sample's own target tokens, "labels" (B, T).

    "decoder_input_ids" are the labels shifted to the right, made here if they are absent.
    """
    inputs, labels_BT = _split(batch)
    if not any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        shifted = facts_of(forward).decoder_inputs
        if shifted is None:
            raise InvalidArgument(
                "Expected 'decoder_input_ids' in the batch, since the model's configuration does not say how decoders "
                "start. DataCollatorForSeq2Seq(tokenizer, model=model) adds them."
            )
        inputs["decoder_input_ids"] = shifted(labels_BT)
    return losses.token_mean(_logits(forward(params, **inputs)), labels_BT)


def question_answering(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """First and last position of an answer: "start_positions" (B,) and "end_positions" (B,), or "labels" (B, 2).

    Where "attention_mask" (B, T) is 0, no answer can be.

    Guarantees:
        tests/hf/test_tasks.py: a row that is padded to another length has the same loss
        (test_answers_do_not_depend_on_padding).
    """
    both = tuple(batch[name] for name in _ANSWER if name in batch)
    if len(both) < len(_ANSWER):
        _, labels = _split(batch)
        if labels.dim() != 2 or labels.shape[1] != 2:
            raise InvalidArgument(
                "Expected 'start_positions' and 'end_positions', or 'labels' (B, 2) with both, got labels "
                f'{tuple(labels.shape)}. Where answers are classes (ViLT) name the task "sequence_classification".'
            )
        both = labels.unbind(1)
    output = forward(params, **{name: value for name, value in batch.items() if name not in ("labels", *_ANSWER)})
    mask_BT = batch.get("attention_mask")
    (start_BT, first_B), (end_BT, last_B) = (
        _among_tokens(scores_BT, at_B, mask_BT)
        for scores_BT, at_B in zip((output.start_logits, output.end_logits), both, strict=True)
    )
    return losses.question_answering(start_BT, end_BT, first_B, last_B)


def _among_tokens(scores_BT: Tensor, position_B: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores of tokens to choose from, those of padding being -inf, and a chosen position, ignored if it is padding."""
    if mask_BT is None or mask_BT.shape != scores_BT.shape:
        return scores_BT, position_B
    padding_BT, at_B = mask_BT == 0, position_B.clamp(0, mask_BT.shape[1] - 1)
    is_padding_B = padding_BT.gather(1, at_B[:, None])[:, 0]
    return scores_BT.masked_fill(padding_BT, -torch.inf), torch.where(is_padding_B, losses.IGNORED, position_B)


def ctc(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Text of speech, by connectionist temporal classification (Wav2Vec2, HuBERT); as the model's own, for each sample.

    The batch has "input_values" or "input_features", "attention_mask" where they are padded, and "labels" (B, L) with
    -100 where a sample has fewer.

    Raises:
        UnsupportedModel: the model does not say which frames are padding.
    """
    inputs, labels_BL = _split(batch)
    facts = facts_of(forward)
    if facts.ctc is None or (facts.frames is None and "attention_mask" in inputs):
        raise UnsupportedModel(
            "Expected a model with a CTC loss that tells how many frames an input has (Wav2Vec2, HuBERT, WavLM), got "
            "another one. Pass a loss function of your own, e.g. with dpfunc.hf.losses.ctc."
        )
    logits_BTV = _logits(forward(params, **inputs))
    frames_B = (
        facts.frames(inputs["attention_mask"].sum(1))
        if facts.frames is not None and "attention_mask" in inputs
        else torch.full_like(labels_BL[:, 0], logits_BTV.shape[1])
    )
    return facts.ctc(logits_BTV, labels_BL, frames_B)


def sentence_similarity(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Squared error of the cosine of two sentences, as `CosineSimilarityLoss` has it by default.

    The model returns a "sentence_embedding" (B, D) for a mapping of inputs, as SentenceTransformer. The batch has two
    sentences as "<column>_input_ids", "<column>_attention_mask", ..., and "label", "labels" or "score" (B,).
    """
    sentences, scores_B = _sentences(batch)
    if len(sentences) != 2:
        raise InvalidArgument(f"Expected two sentences in the batch, got {len(sentences)}, from {sorted(batch)}.")
    embeddings = []
    for sentence in sentences:
        output = forward(params, sentence)
        found = output.get("sentence_embedding") if isinstance(output, Mapping) else None
        if not isinstance(found, Tensor):
            raise InvalidArgument(
                f"Expected a model that returns a mapping with 'sentence_embedding', got {type(output).__name__}. For "
                "an encoder of Transformers add pooling: nn.Sequential(encoder, pooling), or a loss function of your "
                "own."
            )
        embeddings.append(found)
    return losses.cosine_similarity(embeddings[0], embeddings[1], scores_B)


def sentence_classes(forward: AnyForward, params: Params, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of a class of two sentences, see `sentence_similarity`; the model is the `SoftmaxLoss` itself.

    Called with a list of mappings and no labels it returns embeddings and logits.
    """
    sentences, labels_B = _sentences(batch)
    _, logits_BC = forward(params, sentences, None)
    return losses.classification(logits_BC, labels_B)


_SEQUENCE = ("ForSequenceClassification", "MeanPooledClassifier", "ForAudioClassification", "ForVideoClassification",
             "ForMultipleChoice", "ForNextSentencePrediction")  # fmt: skip
# name of a task, its loss, endings of the names of model classes that are trained for it
_TABLE: tuple[tuple[str, SampleLoss, tuple[str, ...]], ...] = (
    ("causal_lm", causal_lm, ("ForCausalLM", "LMHeadModel")),
    ("sequence_classification", sequence_classification, _SEQUENCE),
    ("image_classification", sequence_classification, ("ForImageClassification",)),
    ("token_classification", token_classification, ("ForTokenClassification",)),
    ("masked_lm", token_classification, ("ForMaskedLM",)),
    ("seq2seq", seq2seq, ()),
    ("question_answering", question_answering, ("ForQuestionAnswering",)),
    ("ctc", ctc, ("ForCTC",)),
    ("sentence_similarity", sentence_similarity, ()),
    ("sentence_classes", sentence_classes, ()),
    ("vqa", vqa, ()),
)

TASKS: Mapping[str, SampleLoss] = MappingProxyType({name: loss for name, loss, _ in _TABLE})
"""Name of a task -> its loss."""

_FUNCTION = "a function (forward, params, batch) -> losses_B"
_ANSWER = ("start_positions", "end_positions")
_SENTENCE_LABELS = ("label", "labels", "score")
_IDS = "_input_ids"
# Endings of names that say too little: Flaubert's head is masked, XLM's either, the others see some later tokens.
_NO_GUESS = ("WithLMHeadModel", "XLNetLMHeadModel", "CpmAntForCausalLM", "ProphetNetForCausalLM")
# Decoders whose configuration has `is_decoder`, and does not use it.
_ALWAYS_DECODERS = ("gpt_neox", "gpt_neox_japanese")
# Parts of the names of losses in which the records of a batch are compared with each other.
_COMPARE_RECORDS = ("Negatives", "Batch", "GIST", "CoSENT", "AnglE", "OnlineContrastive", "Tension", "InfoNCE",
                    "NTXent", "Clip", "SigLip")  # fmt: skip
# Names by which collators say where the texts begin that they have put into one row.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths")


def make_loss_fn(forward: AnyForward, task: str | SampleLoss) -> LossFn:
    """A loss function `(params, batch) -> (B,)` for `dpfunc.make_dp_step`. Make it once: engines know it by identity.

    Args:
        forward: `forward(params, **inputs)`, e.g. from `dpfunc.functionalize` or `dpfunc.hf.peft`. Models
            that can keep a cache are called with use_cache=False.
        task: a name in `TASKS`, or a function `(forward, params, batch) -> losses_B`.

    Returns:
        The loss function of a batch: names -> tensors with the samples on axis 0, labels among them.

    Raises:
        InvalidArgument: no such task, or something that is not callable. UnsupportedModel: a module as a loss.

    Guarantees:
        equals the loop over single samples for each family of models
        (tests/hf/test_tasks.py::test_the_default_engine_equals_single_samples).

    >>> from dpfunc.functional import functionalize
    >>> forward, params = functionalize(nn.Linear(2, 3))
    >>> loss_fn = make_loss_fn(forward, lambda forward, params, batch: forward(params, batch["x"]).square().sum(1))
    >>> loss_fn(params, {"x": torch.ones(4, 2)}).shape
    torch.Size([4])
    """
    if isinstance(task, str):
        task = TASKS[one_of("task", task, TASKS, "Or pass a function.")]
    refuse(
        (not callable(forward), f"Expected forward to be a function (params, **inputs), got {forward!r}."),
        (isinstance(task, nn.Module), _refusal(type(task).__name__)),
        (not callable(task), f"Expected task to be a name or {_FUNCTION}, got {task!r}."),
    )
    return partial(task, with_facts(forward))


def _refusal(name: str) -> UnsupportedModel:
    """Error about a module given as a loss: it has one value for a batch, and may compare records."""
    if any(part in name for part in _COMPARE_RECORDS):
        return UnsupportedModel(
            f"{name} compares the records of a batch with each other (in-batch negatives): no part of its gradient "
            "belongs to one record, so clipping bounds no record. Take a loss of single pairs, task="
            f'"sentence_similarity" or "sentence_classes", or give each record negatives of its own and {_FUNCTION}.'
        )
    return UnsupportedModel(
        f"Expected one loss a sample, got the module {name}, which gives one value for a batch. For "
        'CosineSimilarityLoss functionalize the encoder and take task="sentence_similarity"; for SoftmaxLoss '
        f'functionalize the loss and take task="sentence_classes"; for others pass {_FUNCTION}.'
    )


def infer_task(model: nn.Module) -> str:
    """The task that a model of Transformers was built for, by the name of its class; adapters are looked through.

    Raises:
        UnsupportedModel: the class does not say it.

    >>> class TinyForCausalLM(nn.Module): ...
    >>> infer_task(TinyForCausalLM())
    'causal_lm'
    """
    base = base_model(model)
    config: Any = getattr(base, "config", None)
    task = _guess(base, config)
    encodes = getattr(config, "is_decoder", None) is False and config.model_type not in _ALWAYS_DECODERS
    if task == "causal_lm" and encodes:
        raise UnsupportedModel(
            f"{type(base).__name__} is an encoder: each token sees the next one, which it would learn to copy. Load it "
            "with is_decoder=True, or wrap its forward function in dpfunc.hf.models.with_causal_attention and name the "
            'task "causal_lm".'
        )
    if task is None:
        raise UnsupportedModel(
            f"It cannot be told from the class {type(base).__name__} what the model is trained for. Name the task: one "
            f"of {', '.join(map(repr, TASKS))}, or pass {_FUNCTION}."
        )
    return task


def task_of(loss: object, model: nn.Module) -> str | None:
    """The name of the task of a loss, also of one of people or of views; None for a function that is not in `TASKS`.

    >>> from dpfunc.sampling.users import mean_over_texts
    >>> task_of(mean_over_texts(TASKS["seq2seq"]), nn.Linear(2, 3))
    'seq2seq'
    """
    own, base = getattr(loss, "sample_loss", loss), base_model(model)
    names = [name for name, each in TASKS.items() if own in (name, each)]
    guess = _guess(base, getattr(base, "config", None))
    return guess if guess in names else next(iter(names), None)


def _guess(base: Any, config: object) -> str | None:
    """The task by the ending of the name of a class; or of a model that writes, where its class does not say it."""
    names = [kind.__name__ for kind in type(base).__mro__]
    if any(name.endswith(_NO_GUESS) for name in names):
        return None
    found = [task for name in names for task, _, endings in _TABLE if name.endswith(endings)]
    reads_images = getattr(config, "vision_config", None) is not None
    writes_apart = bool(getattr(config, "is_encoder_decoder", False))
    if getattr(base, "can_generate", lambda: False)() and reads_images != writes_apart:
        found.append("vqa" if reads_images else "seq2seq")
    return next(iter(found), None)


def _split(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    dropped = "The Trainer drops columns that the model's forward function does not name."
    got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    refuse(
        (not isinstance(batch, Mapping) or "labels" not in batch,
         f"Expected a batch with 'labels', got {got}. The collator makes them of a column 'label' or 'labels' with "
         f"numbers, or of the token ids of language models (DataCollatorForLanguageModeling, mlm=False). {dropped}"),
        (got == ["labels"],
         "Expected inputs of the model beside 'labels' in the batch, got none. Tokenize the texts first: "
         f"dataset.map(lambda row: tokenizer(row['text'], truncation=True)). {dropped}"),
    )  # fmt: skip
    return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]


def _logits_of_tokens(forward: AnyForward, params: Params, inputs: Mapping[str, Tensor], labels_BT: Tensor) -> Tensor:
    """Logits (B, T, C) of the tokens that have labels; those of a soft prompt, which come first, are left out."""
    logits_BTC = _logits(forward(params, **inputs))
    soft_prompt = facts_of(forward).soft_prompt
    first = bool(soft_prompt) and logits_BTC.shape[1] == labels_BT.shape[1] + soft_prompt
    return logits_BTC[:, soft_prompt:] if first else logits_BTC


def _logits(output: object) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise InvalidArgument(
            f"Expected a model whose output has .logits, got {type(output).__name__}. Pass a loss function of your own."
        )
    return logits


def _sentences(batch: Mapping[str, Tensor]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Inputs of each sentence, and the labels."""
    columns = [name.removesuffix(_IDS) for name in batch if name.endswith(_IDS)]
    labels = [batch[name] for name in _SENTENCE_LABELS if name in batch]
    if not columns or len(labels) != 1:
        raise InvalidArgument(
            f"Expected sentences as '<column>{_IDS}', and one of {', '.join(_SENTENCE_LABELS)} in the batch, got "
            f"{sorted(batch)}."
        )
    return [
        {name.removeprefix(f"{column}_"): value for name, value in batch.items() if name.startswith(f"{column}_")}
        for column in columns
    ], labels[0]
