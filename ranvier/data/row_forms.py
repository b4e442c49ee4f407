"""Forms of conversation data: detection of a table's form, and conversion of its rows to conversations.

    messages             messages, conversation or conversations: [{"role", "content", ...}]; tools   (OpenAI)
    sharegpt             conversations, conversation or messages: [{"from", "value"}]; system, tools
    alpaca               instruction, output; input, system, history
    prompt-completion    prompt, completion: texts or messages
    module:function      a function of a row: its messages, a row in one of these forms, or None to leave it out

A form is recognised by the columns, and, if these fit two forms, by the first row. Pairs of answers
(`conversation_rows.pair_of`) have one form, and may also come from a function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ranvier.config.named_object import blame_user_code, is_object_name, load_object
from ranvier.config.run import Data
from ranvier.data.cache import fingerprint
from ranvier.data.chat_template import Conversation, Message
from ranvier.data.conversation_rows import (
    MESSAGES_SETTING,
    OTHER_COLUMNS,
    conversation_of,
    text_in,
    turns_in,
    with_answer,
)
from ranvier.data.tables import Row, Table
from ranvier.errors import DataError
from ranvier.system.untrusted_file import parse_json

SETTING = "data.form"
_MESSAGES = ("messages", "conversation", "conversations")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                   "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool",
                   "observation": "tool", "function_response": "tool", "function_call": "assistant"}
"""Names of speakers in ShareGPT's form -> roles."""


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """A form of rows. words: for the line about the data. columns: required; more: read if they exist. read: the
    conversation of a row, None for a row without an answer; DataError, with the place, for a row that is not a
    conversation. fingerprint: differs if conversations may."""

    words: str
    columns: tuple[str, ...]
    more: tuple[str, ...] = ()
    read: Callable[[Row], Conversation | None]
    fingerprint: str


def form_of_table(table: Table, data: Data) -> RowForm:
    """The form that `data.form` names, or that the columns have. DataError if the table lacks its columns, or has none
    of the forms."""
    name, columns = data.form, set(table.columns)
    if is_object_name(name):
        return RowForm(words=f"the form {name}", columns=table.columns, read=partial(_call_users_function, name),
                       fingerprint=function_fingerprint(name))
    names = (data.messages_column,) if data.messages_column else _MESSAGES
    column = next((name for name in names if name in columns),
                  None)
    if name == "auto":
        if data.messages_column or column:
            column = table.column(data.messages_column, _MESSAGES, MESSAGES_SETTING)
            name = "sharegpt" if _is_sharegpt(table, column) else "messages"
        elif columns >= {"instruction", "output"}:
            name = "alpaca"
        elif columns >= {"prompt", "completion"}:
            name = "prompt-completion"
        else:
            raise _unknown_form_error(table)
    match name:
        case "messages" | "sharegpt":
            column = column or table.column(data.messages_column, _MESSAGES, MESSAGES_SETTING)
            read, words = ((_sharegpt, "ShareGPT form") if name == "sharegpt" else
                           (conversation_of, "OpenAI's form"))
            found = RowForm(words=words, columns=(column,), more=OTHER_COLUMNS, read=partial(read, column=column),
                            fingerprint=f"{name} {column}")
        case "alpaca":
            found = RowForm(words="Alpaca form", columns=("instruction", "output"), fingerprint=name,
                            more=("input", "history", *OTHER_COLUMNS), read=_alpaca)
        case _:
            found = RowForm(words="the form of prompts and completions", columns=("prompt", "completion"),
                            more=OTHER_COLUMNS, read=_prompt_completion, fingerprint=name)
    missing = next((column for column in found.columns if column not in columns), None)
    if missing is not None:
        raise DataError(f"has no column `{missing}`, which the form {name} needs", code="form-column-missing",
                        where=table.name, value=", ".join(sorted(columns)), remedy="Set `--data.form auto`.")
    return found


def _unknown_form_error(table: Table) -> DataError:
    columns = set(table.columns)
    remedy = ("Set `--data.task preference` for pairs of answers." if columns >= {"chosen", "rejected"} else
              "Give texts to the task lm, as `--data.corpus`." if columns == {"text"} else
              "Set `--data.messages-column` to its column of messages, or `--data.form` to a function that makes "
              "messages of a row: module:function.")
    return DataError("has the columns of no known format of conversations: messages, conversations (ShareGPT), "
                     "instruction and output (Alpaca), or prompt and completion", code="form-unknown",
                     where=table.name, value=", ".join(sorted(columns)), remedy=remedy)


def _is_sharegpt(table: Table, column: str) -> bool:
    first = next(iter(table.rows([column])), None)
    value = None if first is None else first.values.get(column)
    turn = value[0] if isinstance(value, list) and value else None
    return isinstance(turn, dict) and {"from", "value"} <= turn.keys()


# --- each form -------------------------------------------------------------------------------------------------------


def _sharegpt(row: Row, column: str) -> Conversation:
    value = row.values.get(column)
    remedy = 'Give a list of turns, for example [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}].'
    if not isinstance(value, list) or not value:
        raise row.error("not-a-conversation", "is not a conversation", value, remedy)
    messages: list[Message] = []
    for turn in value:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or (
                turn.get("from") not in _SHAREGPT_ROLES):
            raise row.error("not-a-sharegpt-turn", "has a turn without a known speaker in `from` and a text in `value`",
                            turn, remedy)
        others = {key: part for key, part in turn.items() if key not in ("from", "value")}
        if turn["from"] == "function_call":
            messages.append({**others, "role": "assistant", "content": None,
                             "tool_calls": [{"type": "function", "function": _call(row, turn["value"])}]})
        else:
            messages.append({**others, "role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return conversation_of(_with_messages(row, messages))


def _call(row: Row, text: str) -> Mapping[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"name", "arguments"} <= found.keys():
        raise row.error("not-a-function-call", "has a function call that is not a JSON object with a name and "
                        "arguments", text, 'Give for example {"name": "weather", "arguments": {"city": "Paris"}}.')
    return found


def _alpaca(row: Row) -> Conversation | None:
    instruction, output = (text_in(row, name) for name in ("instruction", "output"))
    if not output.strip():
        return None
    messages, more = list[Message](), row.values.get("input")
    history = row.values.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise row.error("not-an-alpaca-history", "has a `history` that is not a list of questions and answers", history,
                        'Give for example [["...", "..."]].')
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = instruction if more in (None, "") else f"{instruction}\n\n{text_in(row, 'input')}"
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return conversation_of(_with_messages(row, messages))


def _prompt_completion(row: Row) -> Conversation | None:
    if row.values.get("completion") in (None, "", []):
        return None
    return with_answer(row, turns_in(row, "prompt", "user"), turns_in(row, "completion", "assistant"))


def _call_users_function(name: str, row: Row) -> Conversation | None:
    made = made_by_function(name, row)
    if made is None:
        return None
    if isinstance(made, list):
        made = {"messages": made}
    if not isinstance(made, dict):
        raise DataError(f"returns a {type(made).__name__} for a row", code="form-function-result", where=SETTING,
                        value=name, remedy="Return a list of messages, a dict with the columns of a form, or None.")
    found = replace(row, values=made)
    table = Table(name=row.place, columns=tuple(made), fingerprint="", rows=lambda wanted: iter([found]))
    return form_of_table(table, Data()).read(found)


def made_by_function(name: str, row: Row) -> Any:
    """Result of a user's function for a row; the function gets the columns as a dict."""
    function: Any = load_object(name, SETTING, ())
    with blame_user_code(name, SETTING, f"the function, for {row.place}"):
        return function(dict(row.values))


def function_fingerprint(name: str) -> str:
    """A fingerprint of the file with the function."""
    load_object(name, SETTING, ())
    try:
        source = inspect.getsource(sys.modules[name.partition(":")[0]])
    except (KeyError, OSError, TypeError):  # a module without a file
        source = ""
    return fingerprint(name, source)


def _with_messages(row: Row, messages: Sequence[Message]) -> Row:
    others = {name: value for name, value in row.values.items() if name in OTHER_COLUMNS}
    return replace(row, values={**others, "messages": list(messages)})
