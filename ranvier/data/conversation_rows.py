"""Rows of tables as conversations, and as pairs of conversations that differ in their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ranvier.data.chat_template import Conversation, Message
from ranvier.data.tables import Row, no_column
from ranvier.errors import DataError
from ranvier.system.untrusted_file import parse_json

MESSAGES_SETTING = "data.messages-column"
_SYSTEM, _TOOLS, _VARIABLES = "system", "tools", "chat_template_kwargs"
"""Columns with a system message, and with the chat template's other inputs: functions, and further variables."""
_REFUSED = ("functions", "documents", "weight", "train")
"""Columns that other programs read and that would have no effect here."""
_LEARNT: Mapping[str, tuple[object, object]] = {"weight": (0, 1), "train": (False, True)}
"""Keys of messages -> the values for a turn that is not learnt and for a turn that is."""
OTHER_COLUMNS = (_SYSTEM, _TOOLS, _VARIABLES, *_REFUSED)
"""Columns that are read in addition to the messages, if a table has them."""


def conversation_of(row: Row, column: str = "messages") -> Conversation:
    """The conversation in a row. column: the one with its messages. DataError, with the place, for a row without
    one."""
    refused = next((name for name in _REFUSED if row.values.get(name) is not None), None)
    if refused is not None:
        raise row.error("column-without-effect", f"has a column {refused} of a conversation, which has no effect here",
                        row.values[refused], "Leave the column out of the data set; `weight` and `train` belong to "
                        "messages, functions into `tools`.")
    messages = _with_system(row, _messages(row, column))
    unlearnt = frozenset(number for number, message in enumerate(messages) if not _is_learnt(message, row.place))
    tools = _parse_field(row, _TOOLS, list, 'Give a list of JSON schemas, for example [{"type": "function", ...}].')
    variables = _parse_field(row, _VARIABLES, dict, 'Give an object, for example {"enable_thinking": false}.')
    plain = [{key: value for key, value in message.items() if key not in _LEARNT} for message in messages]
    return Conversation(messages=plain, unlearnt=unlearnt, tools=tools or None, variables=variables or {},
                        place=row.place)


def _with_system(row: Row, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, after that of the column `system` unless they begin with a system message."""
    text = row.values.get(_SYSTEM)
    if not text or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": text_in(row, _SYSTEM)}, *messages]


def text_in(row: Row, column: str) -> str:
    """The text in a column."""
    value = row.values.get(column)
    if not isinstance(value, str):
        raise row.error("form-column-not-text", f"has no text in `{column}`", value,
                        "Give a text, or a function that makes messages of rows: `--data.form`.")
    return value


def _parse_field(row: Row, column: str, kind: type, remedy: str) -> Any:
    """Return a value of this kind, or parse it from JSON text; None if the row has none."""
    value = _as_written(row, row.values.get(column))
    if isinstance(value, str) and value:
        with suppress(ValueError):
            value = parse_json(value)
    if value and not isinstance(value, kind):
        raise row.error("column-of-other-kind", f"has {column} of another kind", value, remedy)
    return value


def _as_written(row: Row, value: Any) -> Any:
    """A value of a row without the keys that Arrow adds to its objects: a template would write each of them."""
    if row.is_arrow and isinstance(value, dict):
        return {key: _as_written(row, part) for key, part in value.items() if part is not None}
    return [_as_written(row, part) for part in value] if row.is_arrow and isinstance(value, list) else value


def _is_learnt(message: Message, place: str) -> bool:
    """Whether a turn of the assistant is learnt by its keys `weight` and `train`; without them, it is."""
    for key, values in _LEARNT.items():
        value = message.get(key, values[1])
        if not isinstance(value, (bool, int, float)) or value not in values:
            raise DataError(f"has a message whose `{key}` is neither {values[0]} nor {values[1]}",
                            code="message-weight", where=place, value=value,
                            remedy="A turn is learned or not; there are no weights in between.")
        if value and key in message and message["role"] != "assistant":
            raise DataError(f"has a message with `{key}` {value} which is not the assistant's",
                            code="weight-of-other-role", where=place, value=message["role"],
                            remedy="Leave it out: only the assistant's turns are learned.")
        if not value:
            return False
    return True


def _messages(row: Row, column: str) -> list[Message]:
    if column not in row.values:
        raise no_column(row.place, column, row.values, MESSAGES_SETTING)
    value = row.values[column]
    remedy = 'Give a list of messages, for example [{"role": "user", "content": "..."}, ...].'
    if not isinstance(value, list) or not value:
        raise row.error("not-a-conversation", "is not a conversation", value, remedy)
    found: list[Message] = []
    for message in value:
        has_content = isinstance(message, dict) and (
            message.get("content") is not None or bool(message.get("tool_calls")))
        if not has_content or not isinstance(message.get("role"), str):
            raise row.error("message-without-role", "has a message without `role` and `content`", message, remedy)
        # A template may read `content` without testing whether it exists.
        parts = {key: _as_written(row, part) for key, part in message.items() if part is not None or key == "content"}
        found.append({key: _parsed_calls(part) if key == "tool_calls" else part for key, part in parts.items()})
        if not isinstance(message.get("content"), (str, type(None))):
            found[-1] = {**found[-1], "content": _text_of_parts(found[-1], row)}
    return found


def _text_of_parts(message: Message, row: Row) -> Any:
    """The text of a content in parts. DataError if a part is not text, or the content is neither a text nor a list of
    parts: most templates would write it as Python prints it. What a tool returns may be anything."""
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    others = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text"
                                             and isinstance(part.get("text"), str))]
    if not others and isinstance(content, list):
        return "".join(part["text"] for part in parts)
    if message["role"] == "tool":
        return content
    raise row.error("content-not-text", "has a message whose content has other parts than text", (others or parts)[0],
                    'Give a text, or parts of the form {"type": "text", "text": "..."}.')


def _parsed_calls(calls: Any) -> Any:
    """Function calls with their arguments as objects: OpenAI gives them as JSON text, and templates write objects."""
    if not isinstance(calls, list):
        return calls
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(arguments, str):
            with suppress(ValueError):
                if isinstance(made := parse_json(arguments), dict):
                    call = {**call, "function": {**function, "arguments": made}}
        found.append(call)
    return found


# --- pairs -----------------------------------------------------------------------------------------------------------

PAIR_COLUMNS = ("prompt", "chosen", "rejected")
"""Columns of pairs. Without `prompt`, the prompt is the common beginning of both conversations."""
MARGIN = "margin"
"""Column of a pair's margin: by how much the chosen answer's reward is to exceed the rejected one's, as in TRL."""
_PAIR_FORM = ('Give {"prompt": "...", "chosen": "...", "rejected": "..."}; each may be a list of messages, and without '
              "a prompt both answers are whole conversations.")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two conversations that differ in the answer; only the answer is learnt. margin: for a reward model, or None."""

    chosen: Conversation
    rejected: Conversation
    margin: float | None = None


def pair_of(row: Row) -> Pair | None:
    """The pair in a row; None if both answers are the same, since nothing can be learnt from them. A text is one turn:
    the user's in the prompt, the assistant's in an answer. DataError, with the place, for a row without a pair."""
    prompt = None if row.values.get("prompt") in (None, "", []) else turns_in(row, "prompt", "user")
    answers = [turns_in(row, name, "assistant") for name in ("chosen", "rejected")]
    if any(answer[0]["role"] != "assistant" for answer in answers):  # whole conversations
        size = next((place for place, (one, other) in enumerate(zip(*answers, strict=False)) if one != other),
                    min(map(len, answers)))
        context = answers[0][:size]
        if prompt is not None and context[-len(prompt):] != prompt:
            raise _row_error(row, "has answers whose conversations do not begin with its prompt", row.values["prompt"])
        answers = [answer[size:] for answer in answers]
    elif prompt is None:
        raise _row_error(row, "has no prompt", row.values.get("prompt"))
    else:
        context = prompt
    if answers[0] == answers[1]:
        return None
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer or {answer[0]["role"], answer[-1]["role"]} != {"assistant"}:
            raise _row_error(row, f"has no answer of the assistant in `{name}`", row.values[name])
    chosen, rejected = (with_answer(row, context, answer) for answer in answers)
    return Pair(chosen=chosen, rejected=rejected, margin=_margin_in(row))


def _margin_in(row: Row) -> float | None:
    """The margin of a pair; in text files, a number is text."""
    value: Any = row.values.get(MARGIN)
    if value in (None, ""):
        return None
    with suppress(TypeError, ValueError):
        if not isinstance(value, bool) and math.isfinite(found := float(value)):
            return found
    raise row.error("margin-not-number", "has a margin that is not a finite number", value,
                    "Give a number, or leave the column out of the data set.")


def turns_in(row: Row, column: str, role: str) -> list[Message]:
    """The messages in a column; a text is one message of `role`."""
    value = row.values.get(column)
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise row.error("not-a-turn", f"has no text and no messages in `{column}`", value,
                        "Give a text, or a list of messages.")
    return _messages(row, column)


def with_answer(row: Row, context: Sequence[Message], answer: Sequence[Message]) -> Conversation:
    """The conversation with only the answer learnt. row: gives its other fields."""
    context = _with_system(row, context)
    found = conversation_of(replace(row, values={**row.values, "messages": [*context, *answer]}))
    earlier = (number for number, message in enumerate(context) if message["role"] == "assistant")
    return replace(found, unlearnt=found.unlearnt.union(earlier))


def _row_error(row: Row, what: str, value: object) -> DataError:
    return row.error("not-a-pair", what, value, _PAIR_FORM)
