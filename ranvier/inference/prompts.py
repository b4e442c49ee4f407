"""Prompts as tokens, and tokens as text: plain texts, and a user's messages in a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranvier.data import tokenizer as tokenizers
from ranvier.data.chat_template import ChatTokenizer
from ranvier.data.conversation_rows import conversation_of
from ranvier.data.tables import Row
from ranvier.errors import ConfigError


class TextPrompts:
    """A tokenizer.json. A prompt is a text."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizers.load(path)
        self.vocab: int = self._tokenizer.vocab
        self.ends = self._tokenizer.ends

    def encode(self, prompt: Any) -> list[int]:
        """The tokens of a text. ConfigError for messages, which need a chat template."""
        if not isinstance(prompt, str):
            raise ConfigError("are messages, which need a chat template", code="prompts-are-messages", where="prompts",
                              value=str(prompt)[:80], remedy="Add `--chat`.")
        return self._tokenizer.encode_from_start(prompt)

    def special_in(self, prompt: Any) -> str | None:
        """The first special token whose characters are in a text, where they are encoded as plain text."""
        return self._tokenizer.special_in(prompt) if isinstance(prompt, str) else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(ids)


class ChatPrompts:
    """A tokenizer with a chat template, in the folder of its tokenizer.json, as transformers saves it. A prompt is a
    message of the user, a list of messages with `role` and `content`, or an object like a row of the task chat."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = ChatTokenizer(path.parent)
        self.vocab: int = self._tokenizer.vocab
        self.ends = tokenizers.load(path).ends | self._tokenizer.ends_of_turns()

    def encode(self, prompt: Any) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = messages if isinstance(messages, dict) else {"messages": messages}
        return self._tokenizer.prompt(conversation_of(Row("prompt", row)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(ids)
