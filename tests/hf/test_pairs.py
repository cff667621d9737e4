"""Pairs of chats: formats become two chats with one prompt, and what is learnt of each is where they differ."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from chat_jobs import MARKED, PLAIN, STRICT, THINKS, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from models import Case
from text_job import COMMON, TOPICS
from trainer_cases import PRIVACY, training_arguments
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.chats import show_chat
from dpfunc.hf.pairs import MADE_UP_PAIR, context_of, distinct, pair_messages, pair_tokens, show_pair
from dpfunc.hf.preferences import CollatePairs, Preference, log_probabilities, reference_log_probabilities
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.rng import insecure_key

TOKENIZERS = {template: tokenizer(template) for template in (PLAIN, MARKED, THINKS, STRICT, None)}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def user(said):
    return {"role": "user", "content": said}


def assistant(said):
    return {"role": "assistant", "content": said}


ASKED, YES, NO = user("2 + 2 ?"), assistant("4"), assistant("5")
EARLIER = [user("1 + 1 ?"), assistant("2")]
PAIR = ([ASKED, YES], [ASKED, NO])
LONG = ([*EARLIER, ASKED, YES], [*EARLIER, ASKED, NO])
HUMAN = "\n\nHuman: 1 + 1 ?\n\nAssistant: 2\n\nHuman: 2 + 2 ?\n\nAssistant:"
GPT = {"from": "gpt", "value": "4"}, {"from": "gpt", "value": "5"}
FORMATS = {
    "texts": ({"prompt": "2 + 2 ?", "chosen": "4", "rejected": "5"}, PAIR),
    "a text and turns": ({"prompt": "2 + 2 ?", "chosen": [YES], "rejected": [NO]}, PAIR),
    "turns": ({"prompt": [*EARLIER, ASKED], "chosen": [YES], "rejected": [NO]}, LONG),
    "one turn each": ({"prompt": [ASKED], "chosen": YES, "rejected": NO}, PAIR),
    "the prompt in both": ({"chosen": LONG[0], "rejected": LONG[1], "score_chosen": 9.0}, LONG),
    "Anthropic": ({"chosen": f"{HUMAN} 4", "rejected": f"{HUMAN} 5"}, LONG),
    "Anthropic, a prompt of its own": ({"prompt": HUMAN, "chosen": " 4", "rejected": " 5"}, ([*LONG[0][:3], assistant(" 4")], [*LONG[1][:3], assistant(" 5")])),
    "a question that begins with a name": ({"prompt": "Human: 2 + 2 ?", "chosen": "4", "rejected": "5"}, ([user("Human: 2 + 2 ?"), YES], [user("Human: 2 + 2 ?"), NO])),
    "arrays of pandas": ({"chosen": np.array(LONG[0]), "rejected": np.array(LONG[1])}, LONG),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "2 + 2 ?"}], "chosen": GPT[0], "rejected": GPT[1]}, PAIR),
    "Alpaca": ({"instruction": "2 +", "input": "2 ?", "chosen": "4", "rejected": "5"}, ([user("2 +\n\n2 ?"), YES], [user("2 +\n\n2 ?"), NO])),
    "Alpaca without input": ({"instruction": "2 + 2 ?", "chosen": "4", "rejected": "5"}, PAIR),
    "OpenAI": ({"input": {"messages": [ASKED], "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]}, PAIR),
    "several turns differ": ({"prompt": [ASKED], "chosen": [YES, *EARLIER], "rejected": [NO, *EARLIER]}, ([ASKED, YES, *EARLIER], [ASKED, NO, *EARLIER])),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_two_chats_with_one_prompt(name):
    record, expected = FORMATS[name]
    assert pair_messages(record) == expected
    assert pair_messages({"id": 1, **record}, [name for name in record if name != "score_chosen"]) == expected
    assert pair_messages({"chosen": expected[0], "rejected": expected[1]}) == expected


SECRET = user("secret")
REFUSED = {
    "no columns": ({"text": "secret"}, "Expected the columns of a pair, prompt and chosen and rejected or .* without any of them"),
    "another prompt": ({"chosen": [SECRET, YES], "rejected": [ASKED, YES]}, "two chats with one prompt"),
    "another prompt and answer": ({"chosen": [SECRET, YES], "rejected": [ASKED, NO]}, "two chats with one prompt"),
    "another system turn": ({"chosen": [{"role": "system", "content": "secret"}, ASKED, YES], "rejected": [ASKED, NO]}, "two chats with one prompt"),
    "one goes on": ({"chosen": [SECRET, YES], "rejected": [SECRET, YES, SECRET, NO]}, "one ends where the other goes on"),
    "an answer is lacking": ({"prompt": [SECRET], "chosen": [YES], "rejected": []}, "one ends where the other goes on"),
    "equal answers": ({"prompt": "secret", "chosen": "4", "rejected": "4"}, "a pair of equal ones"),
    "equal chats": ({"chosen": [SECRET, YES], "rejected": [SECRET, YES]}, "a pair of equal ones"),
    "an empty answer": ({"prompt": "secret", "chosen": "4", "rejected": ""}, "an empty one"),
    "a blank answer": ({"prompt": "secret", "chosen": [YES], "rejected": [assistant(" \n")]}, "an empty one"),
    "no answer behind a name": ({"chosen": f"{HUMAN} 4", "rejected": HUMAN}, "an empty one"),
    "the prompt twice": ({"prompt": "secret", "chosen": [SECRET, YES], "rejected": [SECRET, NO]}, r"name them alone: columns .* data.chat: \[chosen, rejected\]"),
    "the prompt in one": ({"prompt": "secret", "chosen": [SECRET, YES], "rejected": [NO]}, r"name them alone: columns .* data.chat: \[chosen, rejected\]"),
    "no prompt": ({"chosen": [YES], "rejected": [NO]}, r"data.chat: \[prompt, chosen, rejected\]"),
    "texts without a prompt": ({"chosen": "secret", "rejected": "5"}, "a list of turns, each with role and content"),
    "turns as Python writes them": ({"prompt": "secret", "chosen": str([YES]), "rejected": str([NO])}, "a text in which they are written in another way"),
    "tools beside the turns": ({"input": {"messages": [SECRET], "tools": [CALL]}, "preferred_output": [YES], "non_preferred_output": [NO]}, "the tools of a chat in a column of their own"),
    "a turn that is not learnt": ({"prompt": [SECRET], "chosen": [YES | {"weight": 0}], "rejected": [NO]}, "marked as not to be"),
    "numbers": ({"prompt": "secret", "chosen": 4, "rejected": 5}, "a list of turns, each with role and content"),
    "an unknown role": ({"prompt": [SECRET], "chosen": [{"role": "secret", "content": "4"}], "rejected": [NO]}, "Expected turns of system"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_refused(name):
    record, words = REFUSED[name]
    with pytest.raises(InvalidArgument, match=words) as told:
        pair_messages(record)
    assert "secret" not in str(told.value)


def test_columns_that_are_not_there():
    with pytest.raises(InvalidArgument, match="without prompt and best and worst. Name yours"):
        pair_messages({"prompt": "secret", "chosen": "4", "rejected": "5"}, ["prompt", "best", "worst"])


# What is learnt

SAID = st.lists(st.sampled_from([*COMMON[:7], *TOPICS["sport"]]), min_size=1, max_size=5).map(" ".join)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), SAID), max_size=6)
ANSWERS = st.lists(SAID, min_size=2, max_size=2, unique=True)
MADE = st.tuples(TURNS, ANSWERS).map(lambda made: tuple(
    [{"role": role, "content": said} for role, said in [("user", "the team"), *made[0], ("user", "a coach")]] + [assistant(answer)]
    for answer in made[1]
))  # fmt: skip


def ids_of(text):
    return TOKENIZERS[PLAIN](text, add_special_tokens=False)["input_ids"]


def by_hand(chat):
    """Ids of a chat of the template PLAIN, and labels of its last answer alone."""
    before = [("<s> label : " if turn["role"] == "assistant" else "<s> text : ") + turn["content"] + " </s> " for turn in chat[:-1]]  # fmt: skip
    asked, said = ids_of("".join(before) + "<s> label :"), ids_of(chat[-1]["content"] + " </s>")
    return {"input_ids": asked + said, "labels": [-100] * len(asked) + said}


@given(MADE)
def test_what_is_learnt_is_where_the_chats_differ(pair):
    """Answers that both chats share are context, and nothing of them is learnt."""
    found = pair_tokens(TOKENIZERS[PLAIN], pair, max_length=200)
    assert found == {"chosen": by_hand(pair[0]), "rejected": by_hand(pair[1])}


@given(MADE)
def test_marks_and_prefixes_agree(pair):
    found = [pair_tokens(TOKENIZERS[template], pair, max_length=200) for template in (PLAIN, MARKED)]
    assert found[0] == found[1]


@given(MADE, st.integers(2, 30))
def test_each_chat_is_cut_by_the_rule_of_chats(pair, length):
    """The last tokens stay; a pair whose answers are then equal is refused."""
    whole = pair_tokens(TOKENIZERS[PLAIN], pair, max_length=200)
    short = {name: {key: value[-length:] for key, value in chat.items()} for name, chat in whole.items()}
    for chat in short.values():
        chat["labels"][0] = -100
    if short["chosen"] == short["rejected"]:
        with pytest.raises(InvalidArgument, match=f"differ in the max_length={length} tokens"):
            pair_tokens(TOKENIZERS[PLAIN], pair, max_length=length)
    else:
        assert pair_tokens(TOKENIZERS[PLAIN], pair, max_length=length) == short


def test_a_template_that_rewrites_earlier_turns_is_taken():
    """Earlier answers are context: how they are written does not matter, as long as both chats have them alike."""
    found = pair_tokens(TOKENIZERS[THINKS], ([user("a"), assistant("the"), user("a"), assistant("goal")],
                                             [user("a"), assistant("the"), user("a"), assistant("match")]), max_length=50)  # fmt: skip
    learnt = [[one for one in found[name]["labels"] if one != -100] for name in found]
    assert learnt == [ids_of("new goal </s>"), ids_of("new match </s>")]


def test_calls_of_tools_are_answers():
    """A call against a text; and calls that both chats share are context."""
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "big"}
    one = pair_messages({"prompt": [user("a")], "chosen": [call], "rejected": [assistant("new")]})
    both = pair_messages({"prompt": [user("a"), call, result], "chosen": "the", "rejected": "was"})
    for template in (PLAIN, MARKED):
        learnt = [
            [[one for one in chat["labels"] if one != -100] for chat in pair_tokens(TOKENIZERS[template], pair, max_length=60).values()]
            for pair in (one, both)
        ]  # fmt: skip
        assert learnt[0][0][0] == ids_of("add")[0]
        assert learnt[0][1] == ids_of("new </s>")
        assert learnt[1] == [ids_of("the </s>"), ids_of("was </s>")]
    with pytest.raises(InvalidArgument, match="that writes tool calls and definitions of tools"):
        pair_tokens(TOKENIZERS[THINKS], one, max_length=60)


UNFIT = {
    "no template": (None, PAIR, "a tokenizer with a chat template"),
    "a system turn": (STRICT, tuple([{"role": "system", "content": "secret"}, *chat] for chat in PAIR), "takes, got TemplateError"),
    "images": (PLAIN, tuple([user([{"type": "image"}]), *chat] for chat in PAIR), "a chat of texts, got one with images"),
    "words that the tokenizer does not know": (PLAIN, PAIR, "a pair of equal ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_template_cannot_write_is_refused(name):
    template, pair, words = UNFIT[name]
    with pytest.raises(InvalidArgument, match=words) as told:
        pair_tokens(TOKENIZERS[template], pair, max_length=40)
    assert "secret" not in str(told.value)


def test_a_made_up_pair_shows_its_mask():
    shown = show_pair(TOKENIZERS[PLAIN])
    assert (shown.count("[["), shown.count("\n")) == (2, 0)
    assert shown.startswith("chosen: <s> text : ")
    assert show_pair(TOKENIZERS[THINKS]).count("[[") == 2
    assert context_of(MADE_UP_PAIR) == 3


@pytest.mark.parametrize("kind", ["bytes", "words with the space before them"])
def test_the_first_word_is_learnt_where_a_space_is_in_its_token(kind):
    """A template ends its prompt for an answer with a space; it was lost, and with it an answer of one word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pieces, known = Tokenizer(models.BPE()), ["<s>", "</s>", "<unk>"]
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bytes" else pre_tokenizers.Metaspace()  # fmt: skip
    text = "USER: is the picture red ? blue ASSISTANT: yes no it is , "
    pieces.train_from_iterator([text] * 9, trainers.BpeTrainer(special_tokens=known))
    words = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for marks in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        words.chat_template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: " + marks[0] + "{{ m.content }}</s>" + marks[1]
            + "{% else %}USER: {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
        )  # fmt: skip
        assert re.search(r"\[\[.yes </s>]]", show_chat(words))
        found = pair_tokens(words, ([user("red"), assistant("yes")], [user("red"), assistant("no")]), max_length=20)
        assert [sum(label != -100 for label in chat["labels"]) for chat in found.values()] == [2, 2]


# Losses, gradients, and the Trainer


def made():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZERS[PLAIN]), **sizes)).train(False)


def records(count=6):
    words = ["goal", "match", "team", "coach", "bank", "shares"]
    rows = []
    for number in range(count):
        shared = [user(f"the {words[number % 6]}"), assistant("a"), user("big")][2 * (number % 2) :]
        rows.append({"prompt": shared, "chosen": words[number % 4], "rejected": [assistant(" ".join(words[4:] * (1 + number % 2)))]})  # fmt: skip
    return rows, [pair_tokens(TOKENIZERS[PLAIN], pair_messages(row), max_length=24) for row in rows]


def test_losses_of_pairs_equal_the_loop():
    """Log-probabilities of hand-made masks, one chat at a time; gradients of each engine against single pairs."""
    model, (rows, pairs) = made(), records()
    collate = CollatePairs(DataCollatorForSeq2Seq(TOKENIZERS[PLAIN]))
    batch = collate(pairs)
    forward, params = functionalize(model.double())
    found = log_probabilities(make_loss_fn(forward, "causal_lm").args[0], params, batch)
    for row, chats in enumerate(map(pair_messages, rows)):
        for place, chat in enumerate(chats):
            tokens = by_hand(chat)
            scores = model(input_ids=torch.tensor([tokens["input_ids"]])).logits[0].log_softmax(-1)
            learnt = [t for t, label in enumerate(tokens["labels"]) if label != -100]
            alone = sum(scores[t - 1, tokens["input_ids"][t]] for t in learnt)
            torch.testing.assert_close(found[row, place], alone.to(found.dtype), rtol=1e-5, atol=1e-5)
    batch["reference"] = found.detach() + 1.0
    case = Case(make_loss_fn(forward, Preference(beta=0.5)), params, batch)
    truth = truth_of(case)
    assert truth.largest > 0
    assert all(value < 1e-9 for value in differences(ENGINES["auto"](), case, truth).values())


def test_the_trainer_learns_pairs_of_chats(tmp_path):
    model, (_, pairs) = made(), records(48)
    collate = CollatePairs(DataCollatorForSeq2Seq(TOKENIZERS[PLAIN], padding="max_length", max_length=24))
    dataset = [{**pair, "reference": reference_log_probabilities(model, collate([pair]))[0].tolist()} for pair in pairs]
    trainer = DPTrainer(
        model, training_arguments(tmp_path, max_steps=6, learning_rate=0.05, remove_unused_columns=False),
        privacy=PRIVACY, loss=Preference(beta=0.5), train_dataset=dataset, eval_dataset=dataset[:20],
        data_collator=collate, key=insecure_key(0),
        compute_metrics=lambda found: {"right": float((found.predictions > 0).mean())},
    )  # fmt: skip
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.69
    assert after["eval_right"] > 0.9


def test_answers_that_are_equal_are_refused_whatever_made_them():
    same = {"input_ids": [1, 2], "labels": [-100, 2]}
    other = {"input_ids": [1, 3], "labels": [-100, 3]}
    assert distinct({"chosen": same, "rejected": other}, 8)["rejected"] == other
    with pytest.raises(InvalidArgument, match="max_length=8"):
        distinct({"chosen": same, "rejected": dict(same)}, 8)


def test_context_is_a_number_of_turns():
    from dpfunc.hf.chats import chat_tokens

    chat = [user("a"), assistant("the"), user("a"), assistant("goal")]
    found = chat_tokens(tokenizer(PLAIN), chat, max_length=50, context=2)
    assert [one for one in found["labels"] if one != -100] == ids_of("goal </s>")
    with pytest.raises(InvalidArgument, match="context"):
        chat_tokens(tokenizer(PLAIN), chat, max_length=50, context=-1)
    with pytest.raises(InvalidArgument, match="a mask of none"):
        chat_tokens(tokenizer(PLAIN), chat, max_length=50, context=4)
