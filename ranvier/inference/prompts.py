"""Prompts as tokens, and tokens as text: plain texts, and a user's messages in a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranvier.data import tokenizer as tokenizers
from ranvier.data.chat_template import ChatTokenizer
from ranvier.errors import ConfigError
from ranvier.system.untrusted_file import read_json


class TextPrompts:
    """A tokenizer.json. A prompt is a text; one without tokens is the separator of texts."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizers.load(path)
        self.vocab: int = self._tokenizer.vocab
        self.end: int | None = self._tokenizer.end

    def encode(self, prompt: Any) -> list[int]:
        """The tokens of a text. ConfigError for messages, which need a chat template."""
        if not isinstance(prompt, str):
            raise ConfigError("are messages, which need a chat template", where="prompts", value=str(prompt)[:80],
                              remedy="Add --chat.")
        return self._tokenizer.encode(prompt) or [self._tokenizer.end]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(ids)


class ChatPrompts:
    """A tokenizer with a chat template, in the folder of its tokenizer.json, as transformers saves it. A prompt is a
    message of the user, or a list of messages with `role` and `content`."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = ChatTokenizer(path.parent)
        self._text = tokenizers.load(path)
        self.vocab: int = self._tokenizer.vocab
        self.end: int | None = _end_of_turn(path.parent, self._text)

    def encode(self, prompt: Any) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._tokenizer.tokens(self._tokenizer.render(messages, prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(ids)


def _end_of_turn(folder: Path, tokenizer: tokenizers.Tokenizer) -> int:
    """The token that ends an answer: eos_token of tokenizer_config.json, else the separator of texts."""
    try:
        document: Any = read_json(folder / "tokenizer_config.json", 1 << 24)
        named = document.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return tokenizer.end
    text = named.get("content") if isinstance(named, dict) else named
    found = tokenizer.number_of(text) if isinstance(text, str) else None
    return tokenizer.end if found is None else found
