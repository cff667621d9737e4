"""Chats with images, of several families: each loss is that of the chat alone, with none, one or several images."""

from __future__ import annotations

from datetime import datetime

import pytest
import torch
from image_text_models import COLOURS, FAMILIES, IMAGE, family
from models import Case
from transformers.utils import chat_template_utils
from zoo.parity import engine_that_equals_the_loop

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf._facts import Facts
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.vision_language._images import image_text_collator
from dpfunc.hf.vision_language.tiny_llava import draw

TEMPLATE = (
    "{% for m in messages %}<s> {% for part in m.content %}{% if part.type == 'image' %}MARK {% else %}{{ part.text }} "
    "{% endif %}{% endfor %}</s> {% endfor %}{% if add_generation_prompt %}<s> {% endif %}"
)


def collator(name, images, length=80, **options):
    model, processor, size = family(name)
    processor.chat_template = TEMPLATE.replace("MARK", FAMILIES[name][2])
    return model, image_text_collator(processor, max_length=length, max_images=images, image_size=size, **options)


def chat(number, count):
    """A chat of two questions, the images in the first and, of several, the last in the second."""
    pictures = [
        draw(COLOURS[(number + j) % 4], "circle", 20 + 7 * number + 4 * j, 10 * number + j) for j in range(count)
    ]
    first, last = (count - 1, 1) if count > 1 else (count, 0)
    turns = [("user", f"{'<image> ' * first}what is the colour ?"), ("assistant", "red"),
             ("user", f"{'<image> ' * last}is the colour"), ("assistant", "blue is green")]  # fmt: skip
    return {"messages": [{"role": role, "content": said} for role, said in turns], "images": pictures}


@pytest.mark.parametrize("name", ["LLaVA 1.5", "Idefics3", "Qwen2-VL"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_chat_among_others_has_the_loss_that_it_has_alone(name, side):
    """By the model's own loss; what is learnt are the words of the assistant and its end token, and nothing else."""
    counts = (1, 2, 0, 2)
    model, collate = collator(name, 2, padding_side=side)
    made = [chat(number, count) for number, count in enumerate(counts)]
    batch = collate(made)
    answers = collate.processor.tokenizer("red </s> blue is green </s>", add_special_tokens=False)["input_ids"]
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert labels[labels != -100].tolist() == answers
        assert bool((labels[ids == IMAGE] == -100).all())
    forward, params = functionalize(model)
    with torch.no_grad():
        found = make_loss_fn(forward, "vqa")(params, batch)
        for loss, sample, count in zip(found, made, counts, strict=True):
            _, own = collator(name, count, pad_to_multiple_of=1)
            torch.testing.assert_close(loss, model(**Facts().flatten_images(own([sample]))).loss, rtol=1e-4, atol=1e-5)


def test_gradients_of_chats_with_images_are_those_of_the_loop():
    model, collate = collator("LLaVA 1.5", 2)
    forward, params = functionalize(model)
    batch = collate([chat(number, count) for number, count in enumerate((1, 2, 0))])
    assert engine_that_equals_the_loop(Case(make_loss_fn(forward, "vqa"), params, batch)) == "one pass"


def test_a_long_chat_keeps_its_images_and_its_last_words():
    _, collate = collator("LLaVA 1.5", 1, length=9)
    (ids,), (labels,) = (collate([chat(0, 1)])[name].tolist() for name in ("input_ids", "labels"))
    tokens = collate.processor.tokenizer("<s> blue is green </s>", add_special_tokens=False)["input_ids"]
    assert collate.tokens_per_image == 4
    assert ids == [IMAGE] * 4 + tokens
    assert labels == [-100] * 5 + tokens[1:]


def test_images_of_turns_need_no_list():
    _, collate = collator("LLaVA 1.5", 1)
    sample = chat(0, 1)
    content = [{"type": "image", "path": sample["images"][0]}, {"type": "text", "text": "what is the colour ?"}]
    inside = [{**sample["messages"][0], "content": content}, *sample["messages"][1:]]
    one, other = collate([sample]), collate([{"messages": inside}])
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_images_and_their_marks_must_fit():
    _, collate = collator("LLaVA 1.5", 2)
    with pytest.raises(InvalidArgument, match="for each of the 1 images of a chat, got 0"):
        collate([{**chat(0, 0), "images": chat(0, 1)["images"]}])
    with pytest.raises(InvalidArgument, match="at most max_images=2"):
        collate([chat(0, 3)])


def test_no_row_depends_on_the_date(monkeypatch):
    """Rows are made when they are drawn: of a step that is repeated tomorrow they are the same."""

    class NoClock(datetime):
        @classmethod
        def now(cls, tz=None):
            raise AssertionError

    monkeypatch.setattr(chat_template_utils, "datetime", NoClock)
    _, collate = collator("LLaVA 1.5", 1)
    collate.processor.chat_template = "{{ strftime_now('%d %b %Y') }} " + collate.processor.chat_template
    prompt = {"prompt": "what is the colour ?", "answer": "red", "images": chat(0, 1)["images"]}
    assert collate([chat(0, 1), prompt])["input_ids"].shape == (2, 80)
