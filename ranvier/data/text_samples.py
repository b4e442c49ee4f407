"""Texts and pairs of texts as a classifier reads them: cut, and with the special tokens of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from ranvier.data.cache import publish_file


class TextTokenizer:
    """Base of tokenizers of texts, around a tokenizer of the package `tokenizers`, `_inner`.

    cuts_beginnings: whether a text that is too long is cut at its beginning (truncation_side).
    """

    _inner: Tokenizer
    cuts_beginnings = False

    def encode_samples(self, texts: Sequence[tuple[str, str | None]], longest: int) -> list[Sample]:
        """See `encode`."""
        return encode(self._inner, texts, longest, cuts_beginnings=self.cuts_beginnings)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included. With byte-level tokens, bytes that are not UTF-8 become the
        replacement character; with WordPiece, case and white space may differ."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=False)

    def numbers(self) -> dict[str, int]:
        """Token -> number, special ones included."""
        found: dict[str, int] = self._inner.get_vocab()
        return found

    def text(self) -> str:
        """The content of a tokenizer.json, as `load` and Hugging Face's `tokenizers` read it."""
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write `text` to a file. DataError if it cannot be written."""
        with publish_file(path) as file:
            file.write(self.text().encode())


class Sample(NamedTuple):
    """An encoded sample. ids: token numbers. second_from: place of the second text's first token; None without one.
    is_cut: whether tokens of the texts were left out."""

    ids: list[int]
    second_from: int | None
    is_cut: bool


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str | None]], longest: int, *, cuts_beginnings: bool
           ) -> list[Sample]:
    """Encode each text, or pair of texts, as a sample of at most `longest` tokens, with the special tokens that the
    tokenizer puts around them. In a pair the longer text is cut; if both are, it keeps one token more.

    `Encoding.truncate` and `post_process` would also put special tokens around each combination of the parts that are
    cut off.
    """
    firsts = tokenizer.encode_batch_fast([first for first, _ in texts], add_special_tokens=False)
    seconds = iter(tokenizer.encode_batch_fast([second for _, second in texts if second is not None],
                                               add_special_tokens=False))
    alone, paired = _around(tokenizer, None), _around(tokenizer, "a")
    found = []
    for encoding, (_, text) in zip(firsts, texts, strict=True):
        first, second = encoding.ids, [] if text is None else next(seconds).ids
        begin, middle, *end = alone if text is None else paired
        room = longest - sum(map(len, (begin, middle, *end)))
        is_cut = len(first) + len(second) > room
        if is_cut:
            kept = min(len(first), max(room - len(second), (room + (len(first) > len(second))) // 2))
            first, second = (part[len(part) - size:] if cuts_beginnings else part[:size]
                             for part, size in ((first, kept), (second, room - kept)))
        ids = [*begin, *first, *middle]
        second_from = None if text is None else len(ids)
        found.append(Sample(ids=ids + sum(end, second), is_cut=is_cut, second_from=second_from))
    return found


def _around(tokenizer: Tokenizer, second: str | None) -> list[list[int]]:
    """The special tokens before the first text, and after each."""
    found: list[list[int]] = [[]]
    whole = tokenizer.encode("a", second)
    for token, text in zip(whole.ids, whole.sequence_ids, strict=True):
        if text is None:
            found[-1].append(token)
        elif len(found) == text + 1:
            found.append([])
    return found
