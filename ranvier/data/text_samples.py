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
    puts around them. Of a pair the longer text is cut."""
    firsts = tokenizer.encode_batch_fast([first for first, _ in texts], add_special_tokens=False)
    seconds = iter(tokenizer.encode_batch_fast([second for _, second in texts if second is not None],
                                               add_special_tokens=False))
    found = []
    for first, (_, text) in zip(firsts, texts, strict=True):
        second = None if text is None else next(seconds)
        room = longest - tokenizer.num_special_tokens_to_add(second is not None)
        lengths = len(first), 0 if second is None else len(second)
        kept = min(lengths[0], max(room - lengths[1], -(-room // 2)))
        first.truncate(kept)
        if second is not None:
            second.truncate(room - kept)
        whole = tokenizer.post_process(first, second)
        found.append(Sample(ids=whole.ids, is_cut=sum(lengths) > room,
                            second_from=None if second is None else whole.type_ids.count(0)))
    return found
