"""Conversations as tokens: a tokenizer's own chat template, and which tokens the assistant wrote.

    messages --template--> text --tokenizer--> tokens
                             |-- characters of the assistant's turns --> is_target, by token

The template (Jinja) is rendered by transformers. A template with {% generation %} says itself what the assistant wrote.
Of any other one, a turn of the assistant is what the template adds to the conversation before it with the prompt for
an answer; a template that writes earlier turns otherwise once others follow is refused, as no turn has a place then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.data.tables import has_package
from ranvier.errors import DataError
from ranvier.system.untrusted_file import read_json

_TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_FORM = "a folder with tokenizer.json, tokenizer_config.json and a chat template, as transformers saves a tokenizer"
Message = Mapping[str, Any]
"""A turn: `role` (system, user, assistant, ...) and `content`, and what else the template reads."""


class ChatTokenizer:
    """A tokenizer with a chat template; immutable.

    folder: as transformers saves a tokenizer. template: a file that replaces its chat template. DataError where files
    are missing or damaged, where there is no template, and without the package transformers.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        problem = look_at_folder(folder, template)
        if problem is not None:
            raise problem
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise missing_transformers() from error
        try:
            self._inner = PreTrainedTokenizerFast.from_pretrained(str(folder))
            if template is not None:
                self._inner.chat_template = template.read_text(encoding="utf-8")
        except Exception as error:  # the library raises many kinds
            raise DataError("is not a tokenizer as transformers saves it", where=str(folder),
                            value=f"{type(error).__name__}: {error}"[:200], remedy=f"Give {_FORM}.") from error
        if not self._inner.chat_template:
            raise _no_template(folder)
        self.vocab: int = len(self._inner)
        self._document = (folder / _TOKENIZER).read_text(encoding="utf-8")
        self._beside = {name: (folder / name).read_text(encoding="utf-8") for name in _BESIDE
                        if (folder / name).is_file()}
        if isinstance(self._inner.chat_template, str):
            self._beside["chat_template.jinja"] = self._inner.chat_template
        self.fingerprint: str = hashlib.blake2b(repr((self._document, self._inner.chat_template)).encode(),
                                                digest_size=8).hexdigest()

    def text(self) -> str:
        """Its tokenizer.json."""
        return self._document

    def files_beside(self) -> Mapping[str, str]:
        """Name -> text of the files that belong beside its tokenizer.json, the chat template among them."""
        return self._beside

    def tokens(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        found: str = self._inner.decode([int(token) for token in ids], skip_special_tokens=False)
        return found

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of a conversation. prompt: with the beginning of an answer behind it. DataError where the template
        refuses the conversation."""
        try:
            found: str = self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # jinja2's errors, and whatever the template raises
            raise DataError("is refused by the chat template", where="conversation",
                            value=f"{type(error).__name__}: {error}"[:200],
                            remedy="Correct the messages, or name another --data.chat-template.") from error
        return found

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], np.ndarray]:
        """Tokens of a conversation, and [n] bool: those that the assistant wrote, its end-of-turn token included."""
        template = self._inner.chat_template
        if "{% generation" in template or "{%- generation" in template:
            return self._by_markers(messages)
        text = self.render(messages)
        spans = self._assistant_spans(messages, text)
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
        # This tokenizer puts a space before each text: of its tokens of the whole those count that begin in a turn.
        starts = np.array([start if stop > start else -1 for start, stop in whole["offset_mapping"]])
        written_by = [(starts >= start) & (starts < stop) for start, stop in spans]
        return list(whole["input_ids"]), np.any([np.zeros(len(starts), dtype=bool), *written_by], axis=0)

    def _by_markers(self, messages: Sequence[Message]) -> tuple[list[int], np.ndarray]:
        found = self._inner.apply_chat_template(list(messages), tokenize=True, return_dict=True,
                                                return_assistant_tokens_mask=True)
        return list(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)

    def _assistant_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """(first character, the one after the last) of each turn of the assistant in the whole text."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:number], prompt=True), self.render(messages[:number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError("has no place for a turn of the assistant: the template writes a turn otherwise once "
                                "others follow it, or without its prompt for an answer", where="chat template",
                                value=f"turn {number + 1}", remedy="Name a --data.chat-template that marks what the "
                                "assistant writes with {% generation %} and {% endgeneration %}.")
            spans.append((len(before), len(after)))
        return spans


def look_at_folder(folder: Path, template: Path | None) -> DataError | None:
    """What is missing for a chat tokenizer, without loading it."""
    if not (folder / _TOKENIZER).is_file():
        return DataError("has no tokenizer.json", where="data.tokenizer", value=str(folder), remedy=f"Give {_FORM}.")
    if template is not None and not template.is_file():
        return DataError("is not a file that exists", where="data.chat-template", value=str(template),
                         remedy="Name a file with a Jinja template, or leave it out for the tokenizer's own.")
    if template is None and not (folder / "chat_template.jinja").is_file() and not _has_template(folder):
        return _no_template(folder)
    return None if has_package("transformers") and has_package("jinja2") else missing_transformers()


def missing_transformers() -> DataError:
    """The error for chat templates where nothing can render them."""
    return DataError("needs the packages transformers and jinja2 for chat templates, which are not installed",
                     where="data.task", value="chat", remedy="Run pip install transformers jinja2.")


def _has_template(folder: Path) -> bool:
    try:
        document: Any = read_json(folder / "tokenizer_config.json", 1 << 24)
        return bool(document.get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _no_template(folder: Path) -> DataError:
    return DataError("has no chat template", where="data.tokenizer", value=str(folder),
                     remedy="Name a file with one in --data.chat-template, or the tokenizer of a chat model.")
