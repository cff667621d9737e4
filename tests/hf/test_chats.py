"""Chats: formats become one list of messages, and the mask is what the assistant says, whatever the template."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
import torch
from chat_jobs import MARKED, PLAIN, STRICT, THINKS, chats, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from models import Case
from text_job import COMMON, TOPICS
from torch.nn import functional as F
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM
from transformers.utils import chat_template_utils
from zoo.parity import engine_that_equals_the_loop

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.chats import MADE_UP, asked, chat_messages, chat_tokens, cut, encode, show_chat
from dpfunc.hf.tasks import make_loss_fn

TOKENIZERS = {template: tokenizer(template) for template in (PLAIN, MARKED, THINKS, STRICT, None)}
WORDS = [*COMMON[:7], *TOPICS["sport"]]
SAID = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), SAID), max_size=6).flatmap(
    # the user first, and an answer at the end or before a question
    lambda middle: st.booleans().map(
        lambda asks: [("user", "the team"), *middle, ("assistant", "goal"), *([("user", "a coach")] if asks else [])]
    )
)
CHATS = TURNS.map(lambda turns: [{"role": role, "content": said} for role, said in turns])


def ids_of(text):
    return TOKENIZERS[PLAIN](text, add_special_tokens=False)["input_ids"]


def by_hand(chat):
    """Ids and mask, turn by turn: each word is a token."""
    ids, learnt = [], []
    for turn in chat:
        before = ids_of("<s> label :" if turn["role"] == "assistant" else "<s> text :")
        said = ids_of(f"{turn['content']} </s>")
        ids += before + said
        learnt += [False] * len(before) + [turn["role"] == "assistant"] * len(said)
    return ids, learnt


@given(CHATS)
def test_the_mask_is_that_of_the_turns(chat):
    ids, learnt = by_hand(chat)
    assert encode(TOKENIZERS[PLAIN], chat) == (ids, learnt)
    end = max(place for place, one in enumerate(learnt) if one) + 1
    found = chat_tokens(TOKENIZERS[PLAIN], chat, max_length=200)
    assert found["input_ids"] == ids[:end]
    assert found["labels"] == [one if is_learnt else -100 for one, is_learnt in zip(ids[:end], learnt, strict=False)]
    everything = chat_tokens(TOKENIZERS[PLAIN], chat, max_length=200, learn="all")
    assert everything == {"input_ids": ids, "labels": [-100, *ids[1:]]}


@given(CHATS)
def test_marks_and_prefixes_agree(chat):
    assert encode(TOKENIZERS[MARKED], chat) == encode(TOKENIZERS[PLAIN], chat)


@given(CHATS, st.integers(2, 40))
def test_every_length_leaves_a_target(chat, length):
    """The last tokens up to the last that is learnt; the first of a row is predicted by none."""
    whole, short = (chat_tokens(TOKENIZERS[PLAIN], chat, max_length=most) for most in (200, length))
    assert short["input_ids"] == whole["input_ids"][-length:]
    assert short["labels"] == [-100, *whole["labels"][-length:][1:]]
    assert any(label != -100 for label in short["labels"])


DATED = (
    "{%- set day = strftime_now('%d %b') if strftime_now is defined %}{{ day + strftime_now( \"%Y %H\") }}\n" + PLAIN
)


class NoClock(datetime):
    @classmethod
    def now(cls, tz=None):
        raise AssertionError


@pytest.mark.parametrize("template", [DATED, DATED.replace(PLAIN, MARKED)], ids=["plain", "marked"])
def test_a_chat_has_the_tokens_of_one_day(template, monkeypatch):
    """Many templates write the date; a run that is resumed tomorrow repeats its steps with the same tokens."""
    monkeypatch.setattr(chat_template_utils, "datetime", NoClock)
    dated, chat = (
        tokenizer(template),
        [{"role": "user", "content": "the team"}, {"role": "assistant", "content": "goal"}],
    )
    dated.add_tokens(["26", "Jul", "2024", "00"])
    ids, learnt = encode(dated, chat)
    assert dated.decode(ids).startswith("26 Jul 2024 00 <s> text")
    assert dated.decode([one for one, is_learnt in zip(ids, learnt, strict=True) if is_learnt]) == "goal </s>"
    assert dated.decode(asked(dated, "the team")).startswith("26 Jul 2024 00 <s> text")


def test_images_stay_where_words_are_cut():
    ids, learnt = [1, 9, 2, 3, 9, 4, 5, 9], [False, False, True, False, False, True, True, False]
    assert cut(ids, learnt, 2, (9,)) == ([9, 9, 4, 5, 9], [-100, -100, 4, 5, -100])
    assert cut(ids, learnt, 9, (9,)) == (ids, [-100, -100, 2, -100, -100, 4, 5, -100])


def test_losses_of_chats_equal_single_chats():
    """In one batch, by the default engine: each record's loss is that of its hand-made mask alone."""
    made = chats(6)
    collate = DataCollatorForSeq2Seq(TOKENIZERS[PLAIN], padding=True)
    batch = dict(collate([chat_tokens(TOKENIZERS[PLAIN], chat, max_length=64) for chat in made]))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZERS[PLAIN]), **sizes)).train(False)
    forward, params = functionalize(model)
    loss_fn = make_loss_fn(forward, "causal_lm")
    for loss, chat in zip(loss_fn(params, batch), made, strict=True):
        ids, learnt = by_hand(chat)
        scores = model(input_ids=torch.tensor([ids])).logits[0]
        alone = [F.cross_entropy(scores[t - 1], torch.tensor(ids[t])) for t in range(1, len(ids)) if learnt[t]]
        torch.testing.assert_close(loss, torch.stack(alone).mean(), rtol=1e-5, atol=1e-6)
    assert engine_that_equals_the_loop(Case(loss_fn, params, batch)) == "one pass"


QUESTION, ANSWER = {"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
FORMATS = {
    "messages": ({"messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
    "OpenAI, with nulls": ({"messages": [{**QUESTION, "tool_calls": None, "name": None}, ANSWER]}, [QUESTION, ANSWER]),
    "texts as parts": ({"messages": [QUESTION, {**ANSWER, "content": [{"type": "text", "text": "4", "image": None}]}]}, [QUESTION, ANSWER]),
    "tool calls": (
        {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
                      {"role": "tool", "tool_call_id": "1", "content": "4"}, ANSWER]},
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4", "tool_call_id": "1"}, ANSWER],
    ),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "2 + 2 ?"}, {"from": "gpt", "value": "4"}]}, [QUESTION, ANSWER]),
    "ShareGPT, tools": (
        {"conversations": [{"from": "system", "value": "Add."}, {"from": "human", "value": "2 + 2 ?"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                           {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]},
        [{"role": "system", "content": "Add."}, QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, ANSWER],
    ),
    "prompt and completion": ({"prompt": "2 + 2 ?", "completion": "4"}, [QUESTION, ANSWER]),
    "both as turns": ({"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION, ANSWER]),
    "Alpaca": ({"instruction": "2 +", "input": "2 ?", "output": "4"}, [{"role": "user", "content": "2 +\n\n2 ?"}, ANSWER]),
    "Alpaca without input": ({"instruction": "2 + 2 ?", "input": "", "output": "4"}, [QUESTION, ANSWER]),
    "Alpaca of two columns": ({"instruction": "2 + 2 ?", "output": "4"}, [QUESTION, ANSWER]),
    "images": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image"}, "2 + 2 ?"]}, ANSWER]},
        [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "image"}, {"type": "text", "text": "2 + 2 ?"}]}, ANSWER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_one_list_of_messages(name):
    record, expected = FORMATS[name]
    assert chat_messages(record) == expected
    assert chat_messages({**record, "other": 1}, list(record)) == expected
    assert chat_messages({"messages": expected}) == expected


def turns(*made):
    return {"messages": list(made)}


REFUSED = {
    "no columns": ({"text": "secret"}, "messages or conversations or prompt and completion"),
    "no turns": ({"messages": "secret"}, "a list of turns, each with role and content"),
    "turns that are texts": (turns("secret"), "turns with names"),
    "no answer": (turns(QUESTION), "Expected a turn of the assistant to learn from, got none"),
    "an empty answer": (turns(QUESTION, {**ANSWER, "content": ""}), "an empty one"),
    "an unknown role": (turns({"role": "secret", "content": "a"}, ANSWER), "Expected turns of system, developer, user"),
    "a role that is a list": (turns({"role": ["secret"], "content": "a"}, ANSWER), "Expected turns of system"),
    "a turn that is not learnt": (turns(QUESTION, {**ANSWER, "weight": 0}), "marked as not to be"),
    "sound": (turns({"role": "user", "content": [{"type": "audio", "audio": "secret"}]}, ANSWER), "texts and images"),
    "an answer in a prompt": ({"prompt": [QUESTION, ANSWER], "completion": [ANSWER]}, "a prompt without turns of"),
    "a call of no function": (turns(QUESTION, {"role": "assistant", "tool_calls": ["secret"]}), "a name and arguments"),
    "a call in no JSON": ({"conversations": [{"from": "function_call", "value": "secret"}]}, "tool calls in JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chat_is_refused(name):
    record, words = REFUSED[name]
    with pytest.raises(InvalidArgument, match=words) as told:
        chat_messages(record)
    assert "secret" not in str(told.value)


SECRET = {"role": "user", "content": "secret"}
PICTURE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "secret"}]}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
UNFIT = {  # a template, a chat, and words of the message
    "no template": (None, [SECRET, ANSWER], "a tokenizer with a chat template, got .*, which has none"),
    "images": (PLAIN, [PICTURE, ANSWER], "a chat of texts, got one with images"),
    "the assistant first": (PLAIN, [ANSWER, SECRET, ANSWER], "that the chat template of .* takes, got ValueError"),
    "a system turn": (STRICT, [{"role": "system", "content": "secret"}, ANSWER], "takes, got TemplateError"),
    "earlier turns change": (THINKS, [SECRET, ANSWER, SECRET, ANSWER], "writes earlier ones in another way"),
    "no tool calls": (THINKS, [SECRET, CALLS], "that writes tool calls and definitions of tools"),
    "marks around nothing": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}", [SECRET, ANSWER],
        "got a mask of none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_template_cannot_write_is_refused_by_name(name):
    template, chat, words = UNFIT[name]
    with pytest.raises(InvalidArgument, match=words) as told:
        chat_tokens(TOKENIZERS.get(template) or tokenizer(template), chat, max_length=20)
    assert "secret" not in str(told.value)


def test_a_template_that_is_stable_for_one_answer_is_taken_for_one():
    found = chat_tokens(TOKENIZERS[THINKS], [QUESTION, {"role": "assistant", "content": "goal"}], max_length=50)
    assert [one for one in found["labels"] if one != -100] == ids_of("new goal </s>")


def test_definitions_of_tools_must_be_in_the_text():
    tools = [{"type": "function", "function": {"name": "team", "parameters": {}}}]
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "goal"}]
    with pytest.raises(InvalidArgument, match="definitions of tools"):
        chat_tokens(TOKENIZERS[PLAIN], chat, max_length=50, tools=tools)
    knows = tokenizer("{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}" + PLAIN)
    found = chat_tokens(knows, chat, max_length=50, tools=tools)
    assert found["input_ids"][0] == ids_of("team")[0]
    assert sum(label != -100 for label in found["labels"]) == 2


def test_tool_calls_are_learnt():
    chat = chat_messages(FORMATS["tool calls"][0])
    for template in (PLAIN, MARKED):
        ids, learnt = encode(TOKENIZERS[template], chat)
        written = json.dumps(CALL["function"]["arguments"])
        said = ids_of(f"add {written} </s>"), ids_of("4 </s>")
        assert [one for one, is_learnt in zip(ids, learnt, strict=True) if is_learnt] == [*said[0], *said[1]]


def test_a_made_up_chat_shows_its_mask():
    assert show_chat(TOKENIZERS[PLAIN]).count("[[") == 2
    assert show_chat(TOKENIZERS[THINKS]).count("[[") == 1  # of a template that is stable for one answer, one answer
    marks = [show_chat(TOKENIZERS[name]).count("\n") for name in (PLAIN, MARKED)]
    assert marks == [0, 0]
    assert all(turn["role"] in ("user", "assistant") for turn in MADE_UP)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast, name_or_path = False, "slow"

        def get_chat_template(self, template, tools):
            return PLAIN

    with pytest.raises(InvalidArgument, match="a tokenizer that tells where its tokens begin"):
        chat_tokens(Slow(), [QUESTION, ANSWER], max_length=9)


@pytest.mark.parametrize("asked", [{"max_length": 1}, {"max_length": 9, "learn": "user"}])
def test_domains(asked):
    with pytest.raises(InvalidArgument, match=next(reversed(asked))):
        chat_tokens(TOKENIZERS[PLAIN], [QUESTION, ANSWER], **asked)
