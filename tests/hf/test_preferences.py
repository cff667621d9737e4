"""Preferences: figures and formulas, gradients of single pairs, one pass for two answers, and the Trainer."""

from __future__ import annotations

import math

import pytest
import torch
from models import Case
from torch.nn import functional as F
from trainer_cases import PRIVACY, training_arguments
from zoo import language as zoo
from zoo.parity import ENGINES, differences, roughen, truth_of

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf import losses, peft
from dpfunc.hf.preferences import CollatePairs, Preference, log_probabilities, margins, reference_log_probabilities
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.lora import attach
from dpfunc.rng import insecure_key

FIGURES = [  # beta delta, smoothing, -log sigmoid to eight digits
    (0.0, 0.0, 0.69314718), (1.0, 0.0, 0.31326169), (-1.0, 0.0, 1.31326169), (2.0, 0.1, 0.32692801),
]  # fmt: skip


@pytest.mark.parametrize(("value", "smoothing", "figure"), FIGURES)
@pytest.mark.parametrize("beta", [0.1, 1.0, 4.0])
def test_figures(value, smoothing, figure, beta):
    margin = torch.tensor([value / beta], dtype=torch.float64)
    found = losses.preference(margin, beta=beta, label_smoothing=smoothing)
    assert abs(float(found) - figure) < 5e-9


def formula(kind, delta, beta, smoothing):
    """The loss of one pair in Python floats."""
    if kind == "ipo":
        return (delta - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return max(0.0, 1 - beta * delta)
    wrong = lambda value: math.log1p(math.exp(-value))
    return (1 - smoothing) * wrong(beta * delta) + smoothing * wrong(-beta * delta)


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)])
def test_each_kind_is_its_formula(kind, smoothing):
    deltas = [-30.0, -2.0, 0.0, 0.7, 5.0, 40.0]
    found = losses.preference(torch.tensor(deltas, dtype=torch.float64), kind=kind, beta=0.3, label_smoothing=smoothing)
    expected = torch.tensor([formula(kind, delta, 0.3, smoothing) for delta in deltas], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert losses.preference(torch.zeros(3, dtype=torch.bfloat16), kind=kind).dtype == torch.float32
    assert losses.preference(torch.zeros(0), kind=kind).shape == (0,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "kto"}, "kind='kto'"), ({"beta": 0.0}, "0 < beta"), ({"beta": math.nan}, "beta=nan"),
        ({"label_smoothing": 0.5}, "label_smoothing < 0.5"), ({"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ({"kind": "ipo", "label_smoothing": 0.1}, 'another kind than "sigmoid"'),
        ({"kind": "hinge", "label_smoothing": 0.1}, 'another kind than "sigmoid"'),
    ],
)  # fmt: skip
def test_arguments_outside_of_their_domain(options, said):
    for make in (Preference, lambda **given: losses.preference(torch.zeros(1), **given)):
        with pytest.raises(InvalidArgument, match=said):
            make(**options)


# Pairs, and models of them


def texts(side="right", length=8, seed=0):
    """Four pairs: a prompt of two tokens, answers of several lengths, padding on a side."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([[5, 3], [4, 4], [2 + 1, 6], [6, 5]])
    places = torch.arange(length)
    places = places if side == "right" else places.flip(0)
    mask = (places < sizes[..., None]).long()
    ids = torch.where(mask == 1, torch.randint(4, 50, (4, 2, length), generator=generator), 0)
    first = mask.argmax(-1, keepdim=True)
    answered = (torch.arange(length) >= first + 2) & (mask == 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(answered, ids, losses.IGNORED)}


def moved(model, seed=1):
    """The parameters of a model after some training."""
    generator = torch.Generator().manual_seed(seed)
    forward, params = functionalize(model)
    return forward, {name: p + 0.05 * torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}


def made(make=zoo.llama):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return roughen(make()).eval()


def by_hand(model, ids, mask, labels):
    """log p of the labelled tokens of one text, without its padding."""
    real = mask == 1
    logits = model(ids[real][None]).logits[0]
    tokens, learnt = ids[real], labels[real] != losses.IGNORED
    scores = logits.log_softmax(-1)
    return sum(scores[t - 1, tokens[t]] for t in range(1, len(tokens)) if learnt[t])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_log_probabilities_are_those_of_single_texts(make, side):
    model, batch = made(make), texts(side)
    forward, params = functionalize(model)
    found = log_probabilities(make_caller(forward), params, batch)
    with torch.no_grad():
        expected = [
            [
                by_hand(model, *(batch[name][row, answer] for name in ("input_ids", "attention_mask", "labels")))
                for answer in (0, 1)
            ]
            for row in range(4)
        ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert (found < 0).all()


def make_caller(forward):
    """What a task is called with."""
    return make_loss_fn(forward, "causal_lm").args[0]


def test_margins_begin_at_zero():
    """The model before its first step is the reference; dropout is off, and modes and weights stay as they are."""
    model, batch = made(lambda: zoo.gpt2(resid_pdrop=0.5, embd_pdrop=0.5)), texts()
    model.train()
    model.transformer.h[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    batch["reference"] = reference_log_probabilities(model, batch)
    assert modes == [part.training for part in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    forward, params = functionalize(model.eval())
    torch.testing.assert_close(margins(make_caller(forward), params, batch), torch.zeros(4), rtol=0, atol=1e-4)
    found = make_loss_fn(forward, Preference())(params, batch)
    torch.testing.assert_close(found, torch.full((4,), math.log(2)), rtol=1e-4, atol=0)
    chosen = {name: value.flip(1) for name, value in batch.items()}
    other = moved(model)[1]
    up, down = (margins(make_caller(forward), other, each) for each in (batch, chosen))
    torch.testing.assert_close(up, -down)  # answers the other way round
    assert up.abs().min() > 1e-3


def test_the_reference_of_a_pair_is_computed_alone():
    model, batch = made(), texts()
    found = reference_log_probabilities(model, batch)
    for row in range(4):
        others = {name: torch.cat((value[row : row + 1], value.flip(0))) for name, value in batch.items()}
        assert torch.equal(reference_log_probabilities(model, others)[0], found[row])
    none = {name: value[:0] for name, value in batch.items()}
    assert reference_log_probabilities(model, none).shape == (0, 2)


def test_the_reference_of_adapters_that_are_switched_off():
    """As the model below them; adapters that have been trained say something else."""
    from peft import LoraConfig, get_peft_model

    base, batch = made(), texts()
    expected = reference_log_probabilities(base, batch)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()
    torch.testing.assert_close(reference_log_probabilities(model, batch), expected)  # they add nothing yet
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.add_(0.3)
    assert (reference_log_probabilities(model, batch) - expected).abs().max() > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(reference_log_probabilities(model, batch), expected)


def peft_llama():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()


MADE = {
    "Llama, full": lambda: moved(made().double()),
    "GPT-2, full": lambda: moved(made(zoo.gpt2).double()),
    "Qwen2, tied": lambda: moved(made(zoo.qwen2).double()),
    "Llama, LoRA": lambda: adapted(attach(made().double(), insecure_key(0), targets=r"q_proj|v_proj", rank=2, alpha=4)),
    "Llama, PEFT": lambda: adapted(peft.functionalize(peft_llama().double())),
}
KINDS = [
    Preference(beta=0.5),
    Preference(beta=0.5, label_smoothing=0.1),
    Preference("ipo", 0.05),
    Preference("hinge", 0.05),
]


def adapted(functional):
    generator = torch.Generator().manual_seed(2)
    noise = lambda p: 0.1 * torch.randn(p.shape, generator=generator).to(p)
    return functional.forward, {name: p + noise(p) for name, p in functional.params.items()}


def case_of(name, loss):
    forward, params = MADE[name]()
    batch = texts()
    reference = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))
    batch["reference"] = log_probabilities(make_caller(forward), params, batch).detach() + reference
    return Case(make_loss_fn(forward, loss), params, batch)


@pytest.mark.parametrize(
    ("name", "loss", "engine"),
    [
        *((name, KINDS[0], engine) for name in MADE for engine in ("auto", *(["vmap", "ghost", "loop"] if name == "Llama, full" else []))),
        *(("Llama, LoRA", loss, "auto") for loss in KINDS[1:]),
    ],
)  # fmt: skip
def test_per_sample_gradients_are_those_of_the_loop(name, loss, engine):
    """Losses, squared norms and weighted sums of pairs, against one backward pass for each pair; in float64."""
    case = case_of(name, loss)
    truth = truth_of(case)
    assert truth.largest > 0
    found = differences(ENGINES[engine](), case, truth)
    assert all(value < 1e-9 for value in found.values()), found


def test_the_gradient_is_that_of_the_formula():
    """Of both answers, in plain autograd on texts one by one."""
    model, batch = made().requires_grad_(), {**texts(), "reference": torch.zeros(4, 2)}
    forward, params = functionalize(model)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = torch.autograd.grad(make_loss_fn(forward, Preference(beta=0.5))(leaves, batch).sum(), [*leaves.values()])
    names = ("input_ids", "attention_mask", "labels")
    scores = [[by_hand(model, *(batch[name][row, answer] for name in names)) for answer in (0, 1)] for row in range(4)]
    total = sum(F.softplus(-0.5 * (chosen - rejected)) for chosen, rejected in scores)
    expected = torch.autograd.grad(total, [dict(model.named_parameters())[name] for name in leaves])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_one_pass_for_both_answers():
    model, calls = made(), []
    forward, params = functionalize(model)
    batch = {**texts(), "reference": torch.zeros(4, 2)}

    def counted(params, **inputs):
        calls.append(inputs["input_ids"].shape)
        return forward(params, **inputs)

    make_loss_fn(counted, Preference())(params, batch)
    assert calls == [(8, 8)]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_matter(side):
    forward, params = moved(made(zoo.gpt2))
    loss_fn, found = make_loss_fn(forward, Preference(beta=0.5)), []
    for length in (6, 11):
        batch = {**texts(side, 6), "reference": torch.zeros(4, 2)}
        more = (0, length - 6) if side == "right" else (length - 6, 0)
        fill = {"labels": losses.IGNORED}
        batch |= {
            name: F.pad(batch[name], more, value=fill.get(name, 0))
            for name in ("input_ids", "attention_mask", "labels")
        }
        found.append(loss_fn(params, batch))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_batches_of_another_form_are_refused():
    forward, params = functionalize(made())
    loss_fn, batch = make_loss_fn(forward, Preference()), texts()
    with pytest.raises(
        InvalidArgument, match=r"'reference' \(B, 2\).*reference_log_probabilities.*remove_unused_columns"
    ):
        loss_fn(params, batch)
    with pytest.raises(InvalidArgument, match=r"'reference' \(B, 2\) .* got \(4,\)"):
        loss_fn(params, {**batch, "reference": torch.zeros(4)})
    with pytest.raises(InvalidArgument, match=r"'labels' \(B, 2, T\).*got \(4, 8\)"):
        loss_fn(params, {**{name: value[:, 0] for name, value in batch.items()}, "reference": torch.zeros(4, 2)})
    with pytest.raises(InvalidArgument, match=r"Expected margins \(B,\)"):
        losses.preference(torch.zeros(2, 2))
    with pytest.raises(InvalidArgument, match="one without 'rejected'"):
        CollatePairs(stacked)([{"chosen": {}}])


# The Trainer


def stacked(records):
    return {name: torch.tensor([record[name] for record in records]) for name in records[0]}


def records(model, count=48):
    """Pairs in which the answer with the larger tokens is chosen."""
    generator = torch.Generator().manual_seed(4)
    answers = torch.stack(
        (torch.randint(30, 50, (count, 4), generator=generator), torch.randint(4, 25, (count, 4), generator=generator)),
        1,
    )
    ids = torch.cat((torch.full((count, 2, 2), 5), answers), 2)
    labels = torch.cat((torch.full((count, 2, 2), losses.IGNORED), answers), 2)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    reference = reference_log_probabilities(model, batch)
    one = lambda row, answer: {name: value[row, answer].tolist() for name, value in batch.items()}
    return [
        {"chosen": one(row, 0), "rejected": one(row, 1), "reference": reference[row].tolist()} for row in range(count)
    ]


def test_the_trainer_learns_preferences(tmp_path):
    """And evaluates the loss of pairs, not of tokens, with their margins as predictions."""
    model = made()
    pairs = records(model)
    args = training_arguments(tmp_path, max_steps=6, learning_rate=0.05, remove_unused_columns=False)
    trainer = DPTrainer(
        model, args, privacy=PRIVACY, loss=Preference(beta=0.5), train_dataset=pairs, eval_dataset=pairs[:20],
        data_collator=CollatePairs(stacked), key=insecure_key(0),
        compute_metrics=lambda found: {"right": float((found.predictions > 0).mean())},
    )  # fmt: skip
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_right"] > 0.9
    forward, params = functionalize(trainer.model.cpu().eval())
    expected = make_loss_fn(forward, Preference(beta=0.5))(params, CollatePairs(stacked)(pairs[:20]))
    assert after["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)
