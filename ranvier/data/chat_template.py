"""Conversations as tokens: a tokenizer's own chat template, and which tokens the assistant wrote.

    messages --template--> text --tokenizer--> tokens
                             |-- characters of the assistant's turns --> is_target, by token

The template (Jinja) is rendered by transformers, in a process with limits (`template_renderer`). A template with
{% generation %} marks what the assistant wrote. With any other template, a turn of the assistant is the text that the
template adds to the earlier conversation with the generation prompt. A template that writes earlier turns differently
once others follow, as Qwen 3 leaves out their thoughts, gives one sample for each turn of the assistant: the
conversation up to this turn, as the model sees it when it generates the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.data import template_renderer
from ranvier.data.cache import fingerprint
from ranvier.data.tables import has_package
from ranvier.data.template_renderer import Rendered, TemplateError, TemplateLimitError
from ranvier.data.tokenizer import files_beside
from ranvier.errors import DataError
from ranvier.system.untrusted_file import is_unicode, json_object, member, read_bytes, read_json

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"
_FORM = "a folder with tokenizer.json, tokenizer_config.json and a chat template, as transformers saves a tokenizer"
_MOST_TEMPLATE = 1 << 18
_MOST_BYTES = 1 << 24
_MOST_OBJECTS = 50_000
"""Most objects in tokenizer_config.json, of which transformers makes copies; Gemma's has 6,500."""
Message = Mapping[str, Any]
"""A turn: `role` (system, user, assistant, ...) and `content`, and any other keys that the template reads."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}
"""Roles of other formats -> ours. A template would write them unchanged, or leave them out."""
_KEYS = frozenset({"role", "content", "name", "tool_call_id"})
"""Keys that a template need not read. Without a check, it would silently drop the content of any other key."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, at least one, and the other inputs of the template.

    unlearnt: numbers of the assistant's turns that are not learnt. tools: JSON schemas of functions. variables: further
    variables of the template. place: in the data set, for errors.
    """

    messages: Sequence[Message]
    unlearnt: frozenset[int] = frozenset()
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    place: str = "conversation"


Sample = tuple[list[int], np.ndarray]
"""Tokens, and [n] bool: those that the model learns to write."""


class ChatTokenizer:
    """A tokenizer with a chat template; immutable.

    folder: as transformers saves a tokenizer. template: a file that replaces its chat template. DataError if files are
    missing or damaged, if there is no template, and without the package transformers.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        check_folder(folder, template)
        template_renderer.start()
        self._place = folder, template
        self._file = template or next(path for path in (folder / _TEMPLATE, folder / _SETTINGS) if path.is_file())
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise missing_transformers() from error
        try:
            own = {name: member(folder, name) for name in files_beside(folder)}
            _check_size(own)
            self._document = member(folder, _TOKENIZER).read_text(encoding="utf-8")
            self._beside = {name: read_bytes(path, _MOST_BYTES).decode() for name, path in own.items()
                            if template is None or not name.endswith(".jinja")}
            self._inner = PreTrainedTokenizerFast.from_pretrained(str(folder))
            if template is not None:
                self._inner.chat_template = template.read_text(encoding="utf-8")
        except Exception as error:  # the library raises many kinds
            raise DataError("is not a tokenizer as transformers saves it", code="not-a-transformers-tokenizer",
                            where=str(folder), value=f"{type(error).__name__}: {error}"[:200],
                            remedy=f"Give {_FORM}.") from error
        if not self._inner.chat_template:
            raise _no_template(folder)
        template_text = self._inner.chat_template
        source = template_text if isinstance(template_text, str) else json.dumps(template_text)
        if len(source) > _MOST_TEMPLATE or not is_unicode(source):
            raise DataError(f"has a chat template that is not a text of at most {_MOST_TEMPLATE:,} characters",
                            code="chat-template-too-long", where=str(template or folder),
                            value=f"{len(source):,} characters", remedy="Name another `--data.chat-template`.")
        self.vocab: int = len(self._inner)
        if isinstance(self._inner.chat_template, str):
            self._beside[_TEMPLATE] = self._inner.chat_template
        self.fingerprint: str = fingerprint(self._document, self._inner.chat_template)
        self.content: str = fingerprint(self.fingerprint, self._beside)
        """Hash of everything that decides the tokens of a conversation, including special tokens that the template
        names."""

    def __reduce__(self) -> tuple[Callable[..., ChatTokenizer], tuple[object, ...]]:
        return _rebuild, (*self._place, self.content)

    @property
    def padding(self) -> int | None:
        """The padding token, or None if the tokenizer has none."""
        found: int | None = self._inner.pad_token_id
        return found

    def numbers(self) -> dict[str, int]:
        """Token -> number, special ones included."""
        found: dict[str, int] = self._inner.get_vocab()
        return found

    def text(self) -> str:
        """Its tokenizer.json."""
        return self._document

    def files_beside(self) -> Mapping[str, str]:
        """Name -> text of the files that belong next to its tokenizer.json, including the chat template."""
        return self._beside

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers. DataError as `encode`."""
        self._check(conversation)
        return list(self._inner(self.render(conversation, prompt=True), add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        found: str = self._inner.decode([int(token) for token in ids], skip_special_tokens=False)
        return found

    def ends_of_turns(self) -> frozenset[int]:
        """The special token that the template writes after a turn of the assistant, if it writes one."""
        content = "Hello"
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            text = self._render(Conversation(messages=messages)).text
        except TemplateError:  # a template of other conversations
            return frozenset()
        behind = text[text.rindex(content) + len(content):] if content in text else ""
        special = set(self._inner.added_tokens_decoder)
        return frozenset(token for token in self._inner(behind, add_special_tokens=False)["input_ids"][:1]
                         if token in special) if behind else frozenset()

    def render(self, conversation: Conversation, *, prompt: bool = False, turns: int | None = None) -> str:
        """The text of a conversation. prompt: whether the beginning of an answer follows it. turns: only this many of
        its first messages; None for all. DataError if the template refuses the conversation."""
        return self._render_or_refuse(conversation, prompt=prompt, turns=turns).text

    def _render_or_refuse(self, conversation: Conversation, *, prompt: bool = False, turns: int | None = None,
                          marks: bool = False) -> Rendered:
        """`_render`, with a DataError if the template refuses the conversation."""
        try:
            return self._render(conversation, prompt=prompt, turns=turns, marks=marks)
        except TemplateError as error:
            raise _refused(conversation, error) from error

    def _render(self, conversation: Conversation, *, prompt: bool = False, turns: int | None = None,
                marks: bool = False) -> Rendered:
        """Render a conversation with the template. TemplateError if the template refuses it; DataError, which names the
        template's file, if rendering exceeds a limit."""
        messages = [{key: part for key, part in message.items() if part is not None}
                    for message in conversation.messages[:turns]]
        try:
            return template_renderer.render(
                messages=messages, template=self._template(conversation),
                tools=conversation.tools, variables={**self._inner.special_tokens_map, **conversation.variables},
                prompt=prompt, marks=marks)
        except TemplateLimitError as error:
            raise DataError(f"has a chat template that {error} for one conversation", code="chat-template-fails",
                            where=str(self._file), value=conversation.place,
                            remedy="Name another `--data.chat-template`, or leave the conversation out if it is very "
                                   "long.") from error

    def _template(self, conversation: Conversation) -> str:
        """The template of a conversation: a tokenizer may have another one for conversations with tools. TemplateError
        if it has none."""
        try:
            found: str = self._inner.get_chat_template(None, conversation.tools)
        except ValueError as error:
            raise TemplateError(str(error).partition("!")[0]) from error
        return found

    def encode(self, conversation: Conversation) -> list[Sample]:
        """The samples of a conversation: one, or, if the template writes earlier turns differently once others follow,
        one for each turn of the assistant that is learnt. What is learnt includes the end-of-turn token. DataError for
        keys and roles that the template does not read."""
        self._check(conversation)
        if _has_marks(self._template(conversation)):
            return [self._sample_by_markers(conversation)]
        learnt = [number for number, message in enumerate(conversation.messages)
                  if message["role"] == "assistant" and number not in conversation.unlearnt]
        text = self.render(conversation)
        spans = [self._span(conversation, number) for number in learnt]
        if all(text.startswith(after) for _, after in spans):
            return [self._sample(text, [(start, len(after)) for start, after in spans])]
        return [self._sample(after, [(start, len(after))]) for start, after in spans]

    def _check(self, conversation: Conversation) -> None:
        """DataError for what the template would silently drop."""
        try:
            words = _words_of(self._template(conversation))
        except TemplateError as error:
            raise _refused(conversation, error) from error
        for number, message in enumerate(conversation.messages, start=1):
            role = message["role"]
            if role not in _ROLES and (role in _OTHER_ROLES or role not in words):
                ours = _OTHER_ROLES.get(role)
                raise DataError(f"has the unknown role of message {number}", code="unknown-role",
                                where=conversation.place, value=role,
                                remedy=f"Rename it {ours}." if ours else f"Use one of {', '.join(sorted(_ROLES))}.")
            unknown = sorted(key for key in message.keys() - _KEYS
                             if key not in words and message[key] not in (None, "", []))
            if unknown:
                raise DataError(f"has a key of message {number} that the chat template does not read",
                                code="message-key-not-read", where=conversation.place, value=unknown[0],
                                remedy="Leave it out of the data set, or name a `--data.chat-template` that reads it.")
        unread = sorted(name for name in conversation.variables if name not in words)
        if conversation.tools and "tools" not in words:
            unread.insert(0, "tools")
        if unread:
            raise DataError(f"has {unread[0]}, which the chat template does not read",
                            code="conversation-column-not-read", where=conversation.place,
                            value=repr(conversation.variables.get(unread[0], conversation.tools))[:80],
                            remedy="Leave it out of the data set, or name a `--data.chat-template` that reads it.")

    def _span(self, conversation: Conversation, number: int) -> tuple[int, str]:
        """The first character of a turn of the assistant, and the text of the conversation up to the end of the turn.

        If the template's prompt has more than the turn itself, such as the beginning of a thought, the turn begins at
        the first token that is not the prompt's.
        """
        before = self.render(conversation, prompt=True, turns=number)
        after = self.render(conversation, turns=number + 1)
        if after.startswith(before):
            return len(before), after
        common = _common_length(before, after)
        offsets = self._inner(after, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        start = max((first for first, _ in offsets if first <= common), default=0)
        earlier = self.render(conversation, turns=number) if number else ""
        if not after.startswith(earlier) or start <= len(earlier):
            raise DataError("has no place for a turn of the assistant: the template writes it without its "
                            "generation prompt", code="turn-without-place", where=conversation.place,
                            value=f"turn {number + 1}",
                            remedy="Name a `--data.chat-template` that marks what the assistant writes with "
                                   "{% generation %} and {% endgeneration %}.")
        return start, after

    def _sample(self, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
        """Tokens of a text. spans: (start, stop) characters of the learnt parts."""
        ids: list[int] = []
        is_target: list[bool] = []
        place = 0
        # Cut where a turn of the assistant begins: a prompt for an answer has these tokens, and none of the answer's.
        for start, stop in [*spans, (len(text), len(text))]:
            for part, written in ((text[place:start], False), (text[start:stop], True)):
                tokens = self._inner(part, add_special_tokens=False)["input_ids"] if part else []
                ids += tokens
                is_target += [written] * len(tokens)
            place = stop
        whole = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        if ids == whole["input_ids"] or self.decode(ids) == self.decode(whole["input_ids"]):
            return ids, np.array(is_target, dtype=bool)
        # This tokenizer puts a space before each text: tokenize the full text, and learn the tokens that begin in a
        # turn.
        return list(whole["input_ids"]), _tokens_in_spans(whole["offset_mapping"], spans)

    def _sample_by_markers(self, conversation: Conversation) -> Sample:
        found = self._render_or_refuse(conversation, marks=True)
        text = found.text
        encoded = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        is_target = _overlap(offsets, found.spans)
        if conversation.unlearnt:
            # A turn lies between the common beginnings of the text with the conversations before and after the turn.
            ends = [_common_length(text, self.render(conversation, turns=turns)) if turns else 0
                    for turns in range(len(conversation.messages) + 1)]
            is_target &= ~_tokens_in_spans(offsets,
                                           [(ends[number], ends[number + 1]) for number in conversation.unlearnt])
        return ids, is_target


def _refused(conversation: Conversation, error: TemplateError) -> DataError:
    return DataError("is refused by the chat template", code="refused-by-chat-template", where=conversation.place,
                     value=str(error), remedy="Correct the messages, or name another `--data.chat-template`.")


@lru_cache(maxsize=2)
def _words_of(template: str) -> frozenset[str]:
    """The words in a template."""
    return frozenset(re.findall(r"\w+", template))


@lru_cache(maxsize=2)
def _has_marks(template: str) -> bool:
    """Whether a template marks what the assistant writes."""
    return re.search(r"\{%[-+]?\s*generation\b", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)) is not None


@lru_cache(maxsize=1)
def _rebuild(folder: Path, template: Path | None, content: str) -> ChatTokenizer:
    """Rebuild the tokenizer in another process, which encodes piece after piece. content: a part of the cache's key, so
    that a changed tokenizer is read again."""
    return ChatTokenizer(folder, template)


def _common_length(text: str, other: str) -> int:
    """The number of characters in the common beginning of both texts."""
    return next((place for place, (here, there) in enumerate(zip(text, other, strict=False)) if here != there),
                min(len(text), len(other)))


def _overlap(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[tokens] bool: whether a token has a character of one of the spans, or lies between two such tokens of one."""
    firsts, stops = (np.array([offset[end] for offset in offsets], dtype=np.int64) for end in (0, 1))
    found = np.zeros(len(firsts), dtype=bool)
    for start, stop in spans:
        inside = np.flatnonzero((stops > start) & (firsts < stop))
        if len(inside):
            found[inside[0]:inside[-1] + 1] = True
    return found


def _tokens_in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[tokens] bool: whether a token's first character is in one of the spans."""
    starts = np.array([start if stop > start else -1 for start, stop in offsets])
    found = np.zeros(len(starts), dtype=bool)
    for start, stop in spans:
        found |= (starts >= start) & (starts < stop)
    return found


def check_folder(folder: Path, template: Path | None) -> None:
    """DataError if a chat tokenizer's folder lacks something; nothing is loaded. Arguments as of `ChatTokenizer`."""
    if not (folder / _TOKENIZER).is_file():
        raise DataError("has no tokenizer.json", code="chat-tokenizer-missing", where="data.tokenizer",
                        value=str(folder), remedy=f"Give {_FORM}.")
    if template is not None and not template.is_file():
        raise DataError("is not a file that exists", code="chat-template-missing", where="data.chat-template",
                        value=str(template),
                        remedy="Name a file with a Jinja template, or leave it out for the tokenizer's own.")
    settings = json_object(folder / _SETTINGS, _MOST_BYTES)
    if template is None and not (folder / _TEMPLATE).is_file() and not settings.get("chat_template"):
        raise _no_template(folder)
    check_packages()


def _check_size(files: Mapping[str, Path]) -> None:
    """ValueError for a tokenizer_config.json that would take far more memory than its bytes."""
    if (path := files.get(_SETTINGS)) is None:
        return
    level, count = [read_json(path, _MOST_BYTES)], 0
    while level:
        count += len(level)
        if count > _MOST_OBJECTS:
            raise ValueError(f"{path.name} has more than {_MOST_OBJECTS:,} objects and lists")
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, (dict, list))]


def check_packages() -> None:
    """DataError if the packages that render chat templates are not installed."""
    if not (has_package("transformers") and has_package("jinja2")):
        raise missing_transformers()


def missing_transformers() -> DataError:
    """The error for chat templates without the packages that render them."""
    return DataError("needs the packages transformers and jinja2 for chat templates, which are not installed",
                     code="chat-packages-missing", where="data.task", value="chat",
                     remedy="Run pip install transformers jinja2.")


def _no_template(folder: Path) -> DataError:
    return DataError("has no chat template", code="folder-without-chat-template", where="data.tokenizer",
                     value=str(folder),
                     remedy="Name a file with one in `--data.chat-template`, or the tokenizer of a chat model.")
