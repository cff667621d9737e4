"""Chats as people have them, as the token ids and labels of a language model that learns what the assistant says.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.

Roles, several formats and tool calls become one list of messages; the chat template of the tokenizer makes it a text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count, groupby
from typing import Any, cast

import numpy as np
from jinja2.exceptions import TemplateError

from dpfunc._utils.validation import integer, one_of, refuse
from dpfunc.errors import InvalidArgument
from dpfunc.hf.losses import IGNORED

Message = dict[str, Any]
"""`role`, `content`: a text, or a list of parts where there are images; and what else the template reads."""

FORMATS = (
    ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "input", "output"),
    ("instruction", "output"),
)  # fmt: skip
"""Columns by which the format of a record is known."""

MADE_UP: tuple[Message, ...] = (
    {"role": "user", "content": "is the picture red ?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "is the picture blue ?"},
    {"role": "assistant", "content": "no"},
)
"""A chat that nobody has had."""

_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
_KNOWN = ("system", "developer", "user", "assistant", "tool")
_NOT_LEARNT = ("weight", "train", "loss")  # by which some formats leave single turns out
_OWN = ("role", "from", "content", "value", *_NOT_LEARNT)
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")  # the template itself says which text is the assistant's
_SPOKEN = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # turns in a text, as Anthropic's files have them
_WRITTEN = re.compile(r"""\s*\[\s*\{(?=.*['"](?:role|from)['"]\s*:)(?=.*['"](?:content|value)['"]\s*:)""", re.DOTALL)
_TODAY = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # the time at which the template is read
_ONE_DAY = datetime(2024, 7, 26)  # of no place; templates of Llama name it themselves
_MADE_UP_NAME = "made_up_function_{}_of_none"
_MENDING = (
    "Write {% generation %} and {% endgeneration %} around what the assistant says in tokenizer.chat_template, save "
    "the tokenizer, and name its folder (model.tokenizer in a job)"
)


def chat_messages(record: Mapping[str, Any], columns: Sequence[str] | None = None) -> list[Message]:
    """The turns of a record, oldest first, in the form that chat templates read.

    Args:
        record: a row of a table, private. columns: those that the chat is made of, by default the first of `FORMATS`
            that the record has. One is a list of turns, with `role` and `content` (OpenAI, Hugging Face) or `from` and
            `value` (ShareGPT, LLaVA), or a text of turns behind `Human:` and `Assistant:` (Anthropic). Of several
            (prompt and completion, Alpaca) the last is the answer, the others are one question; each is a text, or a
            list of turns.

    Returns:
        Messages with the roles system, developer, user, assistant and tool. Parts of content that are all texts become
        one text. Arguments of tool calls are objects, as templates expect. None is nothing. Private.

    Raises:
        InvalidArgument: no such columns, no turn of the assistant, a turn without content, an unknown role; a turn of
            the assistant that is not to be learnt (`weight: 0`), or in a prompt. No word of the record is shown.

    >>> chat_messages({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]})
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    >>> chat_messages({"instruction": "Add.", "input": "2, 2", "output": "4"})
    [{'role': 'user', 'content': 'Add.\\n\\n2, 2'}, {'role': 'assistant', 'content': '4'}]
    """
    *asked, answer = (record[name] for name in columns_of(record, columns, FORMATS, "a chat", "Name yours"))
    before = turns(asked, "user") if asked else []
    found = [*before, *turns([answer], "assistant" if asked else None)]
    refuse(
        (any(turn["role"] == "assistant" for turn in before),
         "Expected a prompt without turns of the assistant, all of which would be learnt. Write the chat as one list "
         "of turns if they are to be, or as one text if they are not."),
        (all(turn["role"] != "assistant" for turn in found),
         "Expected a turn of the assistant to learn from, got none. Leave the record out."),
    )  # fmt: skip
    return found


def columns_of(
    record: Mapping[str, Any], columns: Sequence[str] | None, formats: Sequence[Sequence[str]], what: str, advice: str
) -> Sequence[str]:
    """The columns of a record that were named, or those of the first format that it has."""
    fewest = min(map(len, formats))
    for names in formats if columns is None else [columns]:
        if len(names) >= fewest and {*names} <= {*record}:
            return names
    raise InvalidArgument(
        f"Expected the columns of {what}, {' or '.join(map(' and '.join, formats))}, in each record, got one without "
        f"{' and '.join(columns or ()) or 'any of them'}. {advice}: columns (data.chat in a job)."
    )


def turns(values: Sequence[Any], role: str | None) -> list[Message]:
    """The turns in a list, of a turn alone, or in a text that names who speaks; or texts as one turn of this role."""
    first = values[0] if len(values) == 1 else None
    if isinstance(first, np.ndarray):  # as pandas reads a .parquet
        first = first.tolist()
    if isinstance(first, Mapping):
        refuse((first.get("tools"), "Expected the tools of a chat in a column of their own (data.tools_column in a "
                "job), got them beside its turns."))  # fmt: skip
        first = first.get("messages", [first])
    if isinstance(first, list | tuple):
        return [_message(turn) for turn in first]
    texts = [value for value in values if value is not None and value != ""]
    plain = all(isinstance(value, str) for value in texts)
    refuse(
        (plain and any(map(written_turns, texts)),
         "Expected turns of a chat as a list, or as a text of JSON in a job, got a text in which they are written in "
         "another way. Write the table as a .jsonl, or read the text (json.loads, or ast.literal_eval)."),
    )  # fmt: skip
    spoken = _spoken(texts[0]) if plain and role != "assistant" and len(texts) == 1 else []
    if role == "user" and spoken[-1:] == [{"role": "assistant", "content": ""}]:
        spoken.pop()  # it asks for the answer
    if spoken:
        return [_message(turn) for turn in spoken]
    if role is None or not plain:
        raise InvalidArgument(
            "Expected a list of turns, each with role and content, or from and value; or texts, of which several "
            "columns have a question and its answer."
        )
    return [_message({"role": role, "content": "\n\n".join(texts)})]


def _spoken(text: str) -> list[Message]:
    """The turns in a text that begins with the name of who speaks, the assistant among them; of any other text none."""
    begin, *spoken = _SPOKEN.split(text)
    pairs = [] if begin.strip() or "Assistant" not in spoken[::2] else zip(spoken[::2], spoken[1::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": said.strip()} for who, said in pairs]


def written_turns(text: str) -> bool:
    """True for a text that is a list of turns, in JSON or as Python writes it: it is no text to learn from."""
    return _WRITTEN.match(text) is not None


def _message(turn: Any) -> Message:
    """One turn with the names that templates read."""
    if not isinstance(turn, Mapping):
        raise InvalidArgument("Expected turns with names in a chat, role and content, got something else.")
    given = next((turn[name] for name in ("role", "from") if turn.get(name) is not None), None)
    content = next((turn[name] for name in ("content", "value") if turn.get(name) is not None), "")
    role = _ROLES.get(given, given) if isinstance(given, str) else None
    others = {name: value for name, value in turn.items() if name not in _OWN and value is not None}
    calls = [_json(content)] if given == "function_call" else others.get("tool_calls") or []
    if calls:
        others["tool_calls"] = [_call(call) for call in calls]
    content = "" if given == "function_call" else _content(content)
    refuse(
        (role not in _KNOWN,
         f"Expected turns of {', '.join(_KNOWN)} (or human, gpt, observation, function_call) in a chat, got another."),
        (any(turn.get(name) is not None and not turn[name] for name in _NOT_LEARNT),
         "Expected turns of the assistant that are all learnt, got one that is marked as not to be (weight, train or "
         "loss). Leave the turn out, or the mark."),
        (role == "assistant" and not calls and not (content.strip() if isinstance(content, str) else content),
         "Expected each turn of the assistant to say something, or to call a tool, got an empty one. Leave it out."),
    )  # fmt: skip
    return {"role": role, "content": content, **others}


def _content(content: Any) -> Any:
    """A text; or the parts of a content with images, of which templates look at type and text."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content] if isinstance(content, list | tuple) else [None]
    if None in parts:
        raise InvalidArgument("Expected texts and images in the turns of a chat, got another content.")
    texts = [part["text"] for part in parts if part and part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def _part(part: Any) -> Message | None:
    """A part of a content: a text, or an image with its path, if it has one; None for any other."""
    if isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
        return {"type": "text", "text": part if isinstance(part, str) else part["text"]}
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url", "input_image"):
        return None
    path = next((part[name] for name in ("image", "path", "url", "image_url") if part.get(name)), None)
    path = path.get("url") if isinstance(path, Mapping) else path
    return {"type": "image"} if path is None else {"type": "image", "path": path}


def images(messages: Sequence[Message]) -> list[str]:
    """The paths of images that the turns have in their contents."""
    parts = [part for turn in messages if not isinstance(turn["content"], str) for part in turn["content"]]
    return [part["path"] for part in parts if "path" in part]


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object: OpenAI writes them as a text of JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgument("Expected tool calls with a name and arguments in a chat, got another.")
    return {"type": "function", "function": {**function, "arguments": _json(function.get("arguments") or {})}}


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise InvalidArgument("Expected tool calls in JSON in a chat, got another text.") from None


def chat_tokens(
    tokenizer: Any, messages: Sequence[Message], *, max_length: int, learn: str = "assistant",
    tools: Sequence[Any] | None = None, context: int = 0,
) -> dict[str, list[int]]:  # fmt: skip
    """Token ids of a chat, and labels: the ids of what the assistant says, -100 elsewhere.

    A turn of the assistant is what its turn adds to the text of the chat behind the prompt for it
    (add_generation_prompt), with its end token, without white space behind it; or, in a template with
    `{% generation %}`, what stands between its marks. One rule cuts long chats: what follows on the last learnt token
    is left out, for nothing is learnt from it; of the others the last `max_length` stay. So something to learn stays.

    Args:
        tokenizer: a fast one, with a chat template. messages: as `chat_messages` returns them, texts alone.
        max_length: >= 2. learn: `"assistant"`, or `"all"` for every token. tools: definitions of functions, which the
            template shows. context: so many turns at the beginning are context: nothing of them is learnt.

    Returns:
        `input_ids` and `labels`, private: a record for DataCollatorForSeq2Seq and for the loss `"causal_lm"`.

    Raises:
        InvalidArgument: no chat template or none that takes these turns; a template that writes earlier turns in
            another way once later ones are there, so that the difference is not what the assistant says; images;
            nothing that is learnt. No word of the chat is shown.

    Guarantees:
        tests/hf/test_chats.py: the mask is that of turns rendered by hand (test_the_mask_is_that_of_the_turns), marks
        and prefixes agree (test_marks_and_prefixes_agree), losses are those of the loop
        (test_losses_of_chats_equal_single_chats), no length leaves nothing (test_every_length_leaves_a_target).
    """
    integer("max_length", max_length, minimum=2)
    integer("context", context, minimum=0)
    one_of("learn", learn, ("assistant", "all"))
    refuse((any(not isinstance(message.get("content", ""), str) for message in messages),
            "Expected a chat of texts, got one with images, which a language model does not read. Take a "
            "vision-language model: task vqa in a job, or dpfunc.hf.vision_language.image_text_collator."))  # fmt: skip
    ids, learnt = encode(tokenizer, messages, tools=tools, context=context)
    ids, labels = cut(ids, [True] * len(ids) if learn == "all" else learnt, max_length)
    return {"input_ids": ids, "labels": labels}


def asked(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a question, and of the beginning of the assistant's turn."""
    given = {"add_generation_prompt": True, "return_dict": True, "chat_template": of_one_day(tokenizer.chat_template)}
    return list(tokenizer.apply_chat_template([{"role": "user", "content": question}], **given)["input_ids"])


def of_one_day(template: Any) -> Any:
    """A template that names one public day in place of today; None where it is none, or one of several.

    Otherwise a run that is resumed on another day would have other tokens, and could repeat no step
    (tests/hf/test_chats.py::test_a_chat_has_the_tokens_of_one_day).
    """
    return _TODAY.sub(lambda call: repr(_ONE_DAY.strftime(call[2])), template) if isinstance(template, str) else None


def encode(
    tokenizer: Any, messages: Sequence[Message], *, template: str | None = None, tools: Sequence[Any] | None = None,
    context: int = 0,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Token ids of a whole chat, and for each if the assistant says it behind the context; template: of a processor."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    try:
        template = of_one_day(tokenizer.get_chat_template(template, tools))
    except ValueError:
        raise InvalidArgument(
            f"Expected a tokenizer with a chat template, got {name!r}, which has none. Take the one of a model that "
            "was trained for chats (model.tokenizer in a job), or set tokenizer.chat_template and save it."
        ) from None
    refuse((not tokenizer.is_fast,
            f"Expected a tokenizer that tells where its tokens begin, for the mask, got {type(tokenizer).__name__} in "
            f"{name!r}. Save a fast one (tokenizer.json)."))  # fmt: skip
    given: dict[str, Any] = {"tools": tools, "chat_template": template}
    turns = list(messages)
    try:
        text = tokenizer.apply_chat_template(turns, **given, tokenize=False)
        _check_functions(tokenizer, turns, given, name)
        spans = (
            _marked(tokenizer, turns, text, given, context)
            if _MARKS.search(template)
            else [*_spans(tokenizer, turns, text, given, name, context)]
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        kind = type(error).__name__
    else:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = found["offset_mapping"]  # of a token with the space before the first word, that begins before it
        return list(found["input_ids"]), [
            any(low < end and begin < high for low, high in spans) for begin, end in places
        ]
    raise InvalidArgument(
        f"Expected a chat that the chat template of {name!r} takes, got {kind} from it. Many take no system turn, or "
        "want the user and the assistant to speak in turn, the user first, or contents that are texts."
    )


def _check_functions(tokenizer: Any, messages: Sequence[Message], given: Mapping[str, Any], name: str) -> None:
    """Check that the text names each function: templates leave out what they do not know, without a word.

    The functions have made-up names meanwhile: the name of a function may stand in a question, too.
    """
    numbers = count()
    turns = [
        {**turn, "tool_calls": [_renamed(call, numbers) for call in turn["tool_calls"]]}
        if turn.get("tool_calls") else turn
        for turn in messages
    ]  # fmt: skip
    tools = [_renamed(tool, numbers) for tool in given["tools"] or ()]
    if not (total := next(numbers)):
        return
    text = tokenizer.apply_chat_template(turns, **{**given, "tools": tools or None}, tokenize=False)
    if not all(_MADE_UP_NAME.format(number) in text for number in range(total)):
        raise InvalidArgument(
            f"Expected a chat template that writes tool calls and definitions of tools, got that of {name!r}, which "
            "leaves them out: the assistant would learn to say nothing. Take a tokenizer whose template has them."
        )


def _renamed(each: Any, numbers: Iterator[int]) -> Any:
    """A call or a definition of a function with a name that no other text has."""
    own = {**_call(each)["function"], "name": _MADE_UP_NAME.format(next(numbers))}
    function = {key: own[key] for key in each.get("function", each)}
    return {**each, "function": function} if "function" in each else function


def _marked(
    tokenizer: Any, messages: Sequence[Message], text: str, given: Mapping[str, Any], context: int
) -> Sequence[tuple[int, int]]:
    """First and last place of what the template marks; `return_assistant_tokens_mask` itself loses the turns behind one
    that begins with white space of which the tokenizer makes no token, and learns all that is behind one that ends so.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    chats = [messages, messages[:context]] if context else [messages]
    written, found = render_jinja_template(
        chats, **given, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    if written[0] != text:
        raise ValueError
    return cast(Sequence[tuple[int, int]], found[0])[sum(map(len, found[1:])) :]


def _spans(
    tokenizer: Any, messages: Sequence[Message], text: str, given: Mapping[str, Any], name: str, context: int
) -> Iterator[tuple[int, int]]:
    """First and last place of what each turn of the assistant adds to the text."""
    for place, message in enumerate(messages):
        if place < context or message["role"] != "assistant":
            continue
        asked, answered = list(messages[:place]), list(messages[: place + 1])
        before = tokenizer.apply_chat_template(asked, **given, tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(answered, **given, tokenize=False)
        said = message["content"].strip() if isinstance(message["content"], str) else ""
        if not (text.startswith(after) and after.startswith(before) and said in after[len(before) :]):
            raise InvalidArgument(
                f"Expected a chat template that writes each turn once and for all, got that of {name!r}: with a later "
                "turn it writes earlier ones in another way, or does not go on from its prompt for an answer, so it "
                f"cannot be told what the assistant says. {_MENDING}; or give each answer as a chat of its own that "
                "ends with it."
            )
        yield len(before), len(after.rstrip())


def cut(
    ids: Sequence[int], learnt: Sequence[bool], most: int, kept: Collection[int] = ()
) -> tuple[list[int], list[int]]:
    """Ids and labels by the rule of `chat_tokens`: up to the last learnt the last `most`; and all tokens in `kept`."""
    if not any(learnt[1:]):
        raise InvalidArgument(f"Expected something that is learnt in each chat, got a mask of none. {_MENDING}.")
    last = max(place for place, is_learnt in enumerate(learnt) if is_learnt)
    words = [place for place, one in enumerate(ids) if one not in kept and place <= last][-most:]
    stay = sorted({*words, *(place for place, one in enumerate(ids) if one in kept)})
    labels = [ids[place] if learnt[place] and ids[place] not in kept else IGNORED for place in stay]
    return [ids[place] for place in stay], [IGNORED, *labels[1:]]  # no position predicts the first


def show_chat(tokenizer: Any, *, template: str | None = None, parts: bool = False) -> str:
    """A made-up chat as the template writes it, `MADE_UP`, in one line; what is learnt stands in [[ ]].

    Args:
        template: that of a processor. parts: contents are lists of parts, which vision-language models read.

    Returns:
        Nothing that is private. Of a template that writes earlier turns in another way, one question and its answer.
    """
    made = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} if parts else turn for turn in MADE_UP]
    try:
        ids, learnt = encode(tokenizer, made, template=template)
    except InvalidArgument:
        ids, learnt = encode(tokenizer, made[:2], template=template)
    return bracketed(tokenizer, ids, learnt)


def bracketed(tokenizer: Any, ids: Sequence[int], learnt: Sequence[bool]) -> str:
    """The text of these tokens in one line, with what is learnt in [[ ]]."""
    pieces = []
    for is_learnt, group in groupby(zip(learnt, ids, strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([one for _, one in group], clean_up_tokenization_spaces=False)
        pieces.append(f"[[{piece}]]" if is_learnt else piece)
    return "".join(pieces).replace("\n", "\\n")
