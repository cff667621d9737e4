"""Pairs of chats as people have them for preferences: one prompt and two answers, as token ids and labels of both.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.

A pair is two chats that are the same up to an answer of the assistant. What both share is context, and is not learnt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dpfunc._utils.validation import refuse
from dpfunc.hf.chats import MADE_UP, Message, bracketed, chat_tokens, columns_of, encode, turns
from dpfunc.hf.preferences import ANSWERS

FORMATS = (
    ("prompt", "chosen", "rejected"), ("conversations", "chosen", "rejected"),
    ("instruction", "input", "chosen", "rejected"), ("instruction", "chosen", "rejected"),
    ("question", "chosen", "rejected"), ("input", "preferred_output", "non_preferred_output"), ("chosen", "rejected"),
)  # fmt: skip
"""Columns by which the format of a pair is known; the last two have the answers."""

Pair = tuple[list[Message], list[Message]]
"""The chat with the chosen answer, and that with the rejected one."""

MADE_UP_PAIR: Pair = ([*MADE_UP], [*MADE_UP[:3], {"role": "assistant", "content": "yes , it is blue"}])
"""A pair that nobody has had; of its four turns three are shared."""


def pair_messages(record: Mapping[str, Any], columns: Sequence[str] | None = None) -> Pair:
    """The two chats of a record, with the chosen and with the rejected answer, in the form that chat templates read.

    Args:
        record: a row of a table, private. columns: those that the pair is made of, by default the first of `FORMATS`
            that the record has. The last two are the chosen and the rejected answer; what stands before them is their
            prompt. An answer is a text, a turn, or a list of turns that begins with the assistant's. Without a prompt
            each of the two is a whole chat (UltraFeedback; Anthropic's texts with `Human:` and `Assistant:`).
            A prompt is a list of turns, in which the assistant may have answered before; or texts, which are one
            question.

    Returns:
        Both chats, with the prompt in each, as `dpfunc.hf.chat_messages` gives them. Private.

    Raises:
        InvalidArgument: no such columns; what no chat is; another prompt in each chat, one of them in no column, or in
            two; two equal chats. No word of the record is shown.

    >>> pair_messages({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})[1]
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '5'}]
    """
    advice = "Name yours, those of the chosen and of the rejected answer last"
    names = columns_of(record, columns, FORMATS, "a pair", advice)
    *asked, chosen, rejected = (record[name] for name in names)
    prompt = turns(asked, "user") if asked else []
    answers = [turns([answer], "assistant" if asked else None) for answer in (chosen, rejected)]
    own, other = ([*prompt, *answer] for answer in answers)
    both, differ = ", ".join(names[-2:]), context_of((own, other))
    begin = [answer[0]["role"] == "assistant" for answer in answers if answer]
    first = [turn["role"] for chat in (own, other) for turn in chat[differ : differ + 1]]
    refuse(
        (asked and not all(begin),
         "Expected answers to the prompt, got chats that begin with another turn than the assistant's. If they have "
         f"the prompt in them, name them alone: columns [{both}], in a job data.chat: [{both}]."),
        (not asked and any(begin),
         "Expected whole chats, got a pair that begins with what the assistant says. Name the columns of the prompt "
         f"before those of the answers: columns [prompt, {both}], in a job data.chat: [prompt, {both}]."),
        (own == other,
         "Expected two answers, got a pair of equal ones, from which nothing is learnt. Leave the record out."),
        (first != ["assistant", "assistant"],
         "Expected two chats with one prompt, which differ from an answer of the assistant on, got a pair that "
         "differs in another turn, or of which one ends where the other goes on. Give both the same prompt, or leave "
         "the record out."),
    )  # fmt: skip
    return own, other


def context_of(pair: Pair) -> int:
    """Number of turns at the beginning that both chats share."""
    shorter = min(map(len, pair))
    return next((place for place in range(shorter) if pair[0][place] != pair[1][place]), shorter)


def pair_tokens(
    tokenizer: Any, pair: Pair, *, max_length: int, tools: Sequence[Any] | None = None
) -> dict[str, dict[str, list[int]]]:
    """Token ids and labels of both chats of a pair: the ids of what the assistant says where they differ, else -100.

    Each chat is written, and cut, as `dpfunc.hf.chat_tokens` does it. What both share is context: it is not learnt.

    Args:
        tokenizer, max_length, tools: see `chat_tokens`. pair: of `pair_messages`.

    Returns:
        `{"chosen": {"input_ids", "labels"}, "rejected": ...}`, private: a record for `dpfunc.hf.CollatePairs`, for
        `dpfunc.hf.reference_log_probabilities` and for the loss `dpfunc.hf.Preference`.

    Raises:
        InvalidArgument: as `chat_tokens`; two answers that are equal in the tokens that stay. No word is shown.

    Guarantees:
        tests/hf/test_pairs.py: the labels are the answers (test_what_is_learnt_is_where_the_chats_differ), whatever
        the template (test_marks_and_prefixes_agree), and losses are those of the loop over single pairs
        (test_losses_of_pairs_equal_the_loop).
    """
    context = context_of(pair)
    return distinct({
        name: chat_tokens(tokenizer, chat, max_length=max_length, tools=tools, context=context)
        for name, chat in zip(ANSWERS, pair, strict=True)
    }, max_length)  # fmt: skip


def distinct(record: dict[str, Any], max_length: int) -> dict[str, Any]:
    """The tokens of a pair, if its answers are not the same: such a pair has the gradient 0, and is learnt by none."""
    chosen, rejected = (record[name] for name in ANSWERS)
    refuse(
        (chosen == rejected,
         f"Expected two answers that differ in the max_length={max_length} tokens that are used, got a pair of equal "
         "ones, from which nothing is learnt. Leave the record out, or raise max_length (data.max_length in a job)."),
    )  # fmt: skip
    return record


def show_pair(tokenizer: Any) -> str:
    """A made-up pair as the template writes it, both chats in one line; what is learnt stands in [[ ]].

    Returns:
        Nothing that is private.
    """
    return "; ".join(
        f"{name}: {bracketed(tokenizer, *encode(tokenizer, chat, context=3))}"
        for name, chat in zip(ANSWERS, MADE_UP_PAIR, strict=True)
    )
