"""Kits of the rows about texts: each runs where its weights and data are. The tests run them on small random weights.

Data are folders as their makers publish them: `train.tsv` and `dev.tsv` of SST-2 (GLUE), `trainset.csv` and
`devset.csv` of E2E.
"""

from __future__ import annotations

import csv
import html
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfunc
from benchmarks.published.rows import Setting, noise_of
from dpfunc.clipping import Flat
from dpfunc.rng import insecure_key
from dpfunc.sampling import Poisson
from dpfunc.state import allow_repeat

IGNORED = -100
ORDER = 4  # longest n-grams of BLEU
BEAMS, NEW_TOKENS = 5, 64
WORDS = ("negative", "positive")  # that a language model answers for the classes 0 and 1
FILES = {"classes": ("train.tsv", "dev.tsv"), "text": ("trainset.csv", "devset.csv")}
FILES["answer"] = FILES["classes"]
_ALONE = re.escape("".join(sorted({*string.punctuation} - {*"',-."})))  # characters that are words of BLEU
MARKS = (
    (f"([{_ALONE}])", r" \1 "),
    (r"([^0-9])([.,])", r"\1 \2 "),
    (r"([.,])([^0-9])", r" \1 \2"),
    (r"([0-9])(-)", r"\1 \2 "),
)

Pair = tuple[str, str]  # a sentence and its class; a meaning and a text for it
Texts = Sequence[Pair]


@dataclass(frozen=True)
class Kit:
    """Model and adapters of a row.

    Args:
        weights: where the weights come from. task: `classes` (a head on the encoder), `answer` (a language model says
            the class), or `text` (a language model writes). rank, alpha, targets: of LoRA. frozen_a: FFA-LoRA.
            quantised: the base in 4 bits. length: tokens of a record. decay: weight decay of AdamW.
    """

    weights: str
    task: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    frozen_a: bool = False
    quantised: bool = False
    length: int = 128
    decay: float = 0.01


_ROBERTA = ("query", "value")
KITS = {
    "roberta-8": Kit("FacebookAI/roberta-base", "classes", 8, 16.0, _ROBERTA),
    "roberta-2": Kit("FacebookAI/roberta-base", "classes", 2, 4.0, _ROBERTA),
    "roberta-ffa-16": Kit("FacebookAI/roberta-base", "classes", 16, 32.0, _ROBERTA, frozen_a=True),
    "gpt2": Kit("openai-community/gpt2", "text", 16, 32.0, ("c_attn",)),
    "mistral": Kit("mistralai/Mistral-7B-v0.1", "answer", 4, 32.0, ("q_proj", "v_proj"), quantised=True),
}


class Tabs(csv.excel_tab):
    """Files of GLUE: quotes are characters like others."""

    quoting = csv.QUOTE_NONE


def read_texts(folder: Path, task: str) -> tuple[list[Pair], list[Pair]]:
    """Records to train and to evaluate on."""
    columns, dialect = (("mr", "ref"), csv.excel) if task == "text" else (("sentence", "label"), Tabs)
    parts = []
    for name in FILES[task]:
        with (folder / name).open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines, dialect=dialect)
            parts.append([(row[columns[0]], row[columns[1]]) for row in rows])
    return parts[0], parts[1]


def load_kit(kit: Kit, weights: str, device: str) -> tuple[Any, Any]:
    """Tokenizer, and model with adapters; what is trained requires gradients."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.pytorch_utils import Conv1D

    tokenizer = AutoTokenizer.from_pretrained(weights)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options: dict[str, Any] = {"dtype": torch.float32}
    if kit.quantised and device != "cpu":
        from transformers import BitsAndBytesConfig

        four = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        options = {"quantization_config": four, "dtype": torch.bfloat16}
    kind: Any = AutoModelForCausalLM
    if kit.task == "classes":
        kind, options = AutoModelForSequenceClassification, {**options, "num_labels": len(WORDS)}
    model = kind.from_pretrained(weights, **options).to(device)
    task_type = "SEQ_CLS" if kit.task == "classes" else "CAUSAL_LM"
    config = LoraConfig(
        r=kit.rank,
        lora_alpha=kit.alpha,
        target_modules=list(kit.targets),
        lora_dropout=0.0,
        task_type=task_type,
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in model.modules()),
    )
    adapted = get_peft_model(model, config)
    if kit.frozen_a:
        for name, param in adapted.named_parameters():
            if "lora_A" in name:
                param.requires_grad_(False)
    return tokenizer, adapted.eval()  # no dropout of the base


def prompt_of(kit: Kit, text: str) -> str:
    """What a language model sees before its answer."""
    return f"{text} ->" if kit.task == "text" else f"Sentence : {text} Label :"


def encoded(kit: Kit, tokenizer: Any, texts: Texts) -> dict[str, Tensor]:
    """Rows of one length: tokens, mask, and the labels of classes or of tokens."""
    if kit.task == "classes":
        rows = tokenizer(
            [text for text, _ in texts], truncation=True, max_length=kit.length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip
        labels = torch.tensor([int(label) for _, label in texts])
        return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"], "labels": labels}
    shape = len(texts), kit.length
    ids = torch.full(shape, tokenizer.pad_token_id)
    labels = torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, (text, label) in enumerate(texts):
        prompt = tokenizer(prompt_of(kit, text))["input_ids"]
        answer = answer_of(kit, tokenizer, label)
        tokens = torch.tensor((prompt[: kit.length - len(answer)] + answer)[: kit.length])
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, len(tokens) - len(answer) : len(tokens)] = torch.tensor(answer)
    if kit.task == "text":
        labels = ids  # the tutorial learns the prompt and the padding, too
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer_of(kit: Kit, tokenizer: Any, label: str) -> list[int]:
    """Tokens of the text and its end; or the last token of the word of a class."""
    if kit.task == "answer":
        return [tokenizer(WORDS[int(label)])["input_ids"][-1]]
    return [*tokenizer(" " + label)["input_ids"], tokenizer.eos_token_id]


def losses(kit: Kit, logits: Tensor, labels: Tensor) -> Tensor:
    """One cross-entropy a row: of the class, or the mean over the tokens that are learnt."""
    if kit.task == "classes":
        return F.cross_entropy(logits, labels, reduction="none")
    known = (labels[:, 1:] != IGNORED).float()
    each = F.cross_entropy(logits[:, :-1].mT.float(), labels[:, 1:], reduction="none", ignore_index=IGNORED)
    return (each * known).sum(1) / known.sum(1).clamp_min(1)


def train(
    kit: Kit, setting: Setting, weights: str, texts: Texts, seed: int, device: str, rows_at_once: int = 32
) -> tuple[Any, nn.Module]:
    """Tokenizer, and the model after a run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, model = load_kit(kit, weights, device)
    forward, params = dpfunc.functionalize(model)
    data = {name: value.to(device) for name, value in encoded(kit, tokenizer, texts).items()}

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        output = forward(params, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return losses(kit, output.logits, batch["labels"])

    plan = dpfunc.Plan(
        Poisson(len(texts), setting.batch / setting.dataset_size), Flat(setting.clip), noise_of(setting),
        setting.steps, setting.delta, allow_large_delta=True,
    )  # fmt: skip
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=rows_at_once)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpfunc.errors.InsecureKeyWarning)  # the data are public
        state = allow_repeat(dp_step.init(params, insecure_key(seed)))  # a seed may run again
    optimizer = torch.optim.AdamW(params.values(), lr=setting.rate, weight_decay=kit.decay)
    for indices in plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take(data, indices), state)
        dpfunc.set_grads(params, grads)
        optimizer.step()
    return tokenizer, dpfunc.with_params(model, params).eval()


@torch.no_grad()
def accuracy(kit: Kit, tokenizer: Any, model: nn.Module, texts: Texts, device: str, rows_at_once: int = 64) -> float:
    """Share of the records whose class the model says."""
    right = 0
    for start in range(0, len(texts), rows_at_once):
        batch = {k: v.to(device) for k, v in encoded(kit, tokenizer, texts[start : start + rows_at_once]).items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"]
        if kit.task == "answer":
            places = (labels != IGNORED).long().argmax(1)
            rows = torch.arange(len(labels), device=labels.device)
            logits, labels = logits[rows, places - 1], labels[rows, places]
        right += int((logits.argmax(1) == labels).sum())
    return right / len(texts)


@torch.no_grad()
def written(kit: Kit, tokenizer: Any, model: Any, texts: Texts, device: str) -> float:
    """BLEU of what the model writes for each meaning, against all texts for it."""
    references: dict[str, list[list[str]]] = {}
    for meaning, text in texts:
        references.setdefault(meaning, []).append(words(text))
    found = []
    for meaning in references:
        prompt = tokenizer(prompt_of(kit, meaning), return_tensors="pt")["input_ids"].to(device)
        tokens = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), num_beams=BEAMS, max_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        found.append(words(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)))
    return bleu(found, [*references.values()])


def words(text: str) -> list[str]:
    """Words and marks of a text by the rules 13a of mteval, which sacreBLEU has too."""
    found = f" {html.unescape(text)} "
    for pattern, apart in MARKS:
        found = re.sub(pattern, apart, found)
    return found.split()


def bleu(texts: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> float:
    """BLEU of a corpus, 0..100 (Papineni et al. 2002).

    100 exp(min(0, 1 - r / c)) (p_1 p_2 p_3 p_4)^(1/4)

    with the clipped precisions p_n of n-grams, c words in all, and r words in the references of the nearest lengths.
    """
    right, seen = [0] * ORDER, [0] * ORDER
    length, nearest = 0, 0
    for said, known in zip(texts, references, strict=True):
        length += len(said)
        nearest += min((abs(len(each) - len(said)), len(each)) for each in known)[1]
        for n in range(1, ORDER + 1):
            most: Counter[tuple[str, ...]] = Counter()
            for each in known:
                most |= _grams(each, n)
            grams = _grams(said, n)
            right[n - 1] += (grams & most).total()
            seen[n - 1] += grams.total()
    if min(right) == 0:
        return 0.0
    precision = math.fsum(math.log(a / b) for a, b in zip(right, seen, strict=True)) / ORDER
    return 100 * math.exp(precision + min(0.0, 1 - nearest / length))


def _grams(said: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(said[start : start + n]) for start in range(len(said) - n + 1))


def run(kit: Kit, setting: Setting, weights: str, folder: Path, seed: int, device: str | None = None) -> float:
    """Train on the records of a folder, and measure on its others: accuracy, or BLEU."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    texts, others = read_texts(folder, kit.task)
    tokenizer, model = train(kit, setting, weights, texts, seed, where)
    measure = written if kit.task == "text" else accuracy
    return measure(kit, tokenizer, model, others, where)
