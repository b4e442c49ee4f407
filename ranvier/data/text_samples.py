"""Texts, and pairs of them, as a classifier reads them: cut, and with the special tokens of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer


class Sample(NamedTuple):
    """ids: numbers of tokens. second_from: place of the second text's first token; None without one. is_cut: whether
    tokens of the texts were left out."""

    ids: list[int]
    second_from: int | None
    is_cut: bool


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str | None]], longest: int) -> list[Sample]:
    """A sample of at most `longest` tokens of each text, or pair of texts, with the special tokens that the tokenizer
    puts around them. Of a pair the longer text is cut.

    `Encoding.truncate` and `post_process` would put those around each combination of the parts that are cut off, too.
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
        kept = min(len(first), max(room - len(second), -(-room // 2)))
        ids = [*begin, *first[:kept], *middle]
        second_from = None if text is None else len(ids)
        ids += sum(end, second[:room - kept])
        found.append(Sample(ids=ids, is_cut=len(first) + len(second) > room, second_from=second_from))
    return found


def _around(tokenizer: Tokenizer, second: str | None) -> list[list[int]]:
    """The special tokens before the first text, and behind each."""
    found: list[list[int]] = [[]]
    whole = tokenizer.encode("a", second)
    for token, text in zip(whole.ids, whole.sequence_ids, strict=True):
        if text is None:
            found[-1].append(token)
        elif len(found) == text + 1:
            found.append([])
    return found
