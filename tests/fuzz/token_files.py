"""Token files and tokenizers as a cache that is shared, copied and full may have them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ranvier.data import tokenizer as tokenizers
from ranvier.data.arrays import open_tokens, write_tokens
from tests.fuzz.checkpoints import KINDS, put
from tests.fuzz.inputs import BYTE_CHANGES, JSON_CHANGES, change_bytes, change_json, try_all

TEXTS = ["the arrow flies over a green field\n" * 3, "def f(x):\n    return x * 2\n", "grüße, 你好 \0 \x7f\t", ""]


class Kept:
    """A token file and a tokenizer that are whole."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.changed = folder / "whole", folder / "changed"
        self.numbers = np.random.default_rng(0).integers(0, 300, 500)
        with write_tokens(self.folder / "train", vocab=300, tokenizer="t", corpus="c") as append:
            append(self.numbers.tolist())
        tokenizers.train(TEXTS * 9, 280).save(self.folder / "tokenizer.json")
        shutil.copytree(self.folder, self.changed)

    def restore(self) -> None:
        shutil.rmtree(self.changed)
        shutil.copytree(self.folder, self.changed)

    def check_tokens(self) -> None:
        tokens = open_tokens(self.changed / "train")
        assert tokens.head(len(tokens)) == self.numbers.tolist()

    def check_tokenizer(self) -> None:
        """Whatever it makes of a text, its tokens are of its vocabulary and the text comes back."""
        tokenizer = tokenizers.load(self.changed / "tokenizer.json")
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert all(0 <= token < tokenizer.vocab for token in [*ids, tokenizer.end])


def side_file_bytes(kept: Kept, count: int) -> int:
    return _changed_bytes(kept, "train.json", kept.check_tokens, count)


def number_bytes(kept: Kept, count: int) -> int:
    return _changed_bytes(kept, "train.bin", kept.check_tokens, count)


def tokenizer_bytes(kept: Kept, count: int) -> int:
    return _changed_bytes(kept, "tokenizer.json", kept.check_tokenizer, count)


def _changed_bytes(kept: Kept, name: str, check: Callable, count: int) -> int:
    original = (kept.folder / name).read_bytes()

    def work(changes):
        (kept.changed / name).write_bytes(change_bytes(original, changes))
        check()

    found = try_all(BYTE_CHANGES, work, count)
    (kept.changed / name).write_bytes(original)
    return found


def side_file_tree(kept: Kept, count: int) -> int:
    return _changed_tree(kept, "train.json", kept.check_tokens, count)


def tokenizer_tree(kept: Kept, count: int) -> int:
    return _changed_tree(kept, "tokenizer.json", kept.check_tokenizer, count)


def _changed_tree(kept: Kept, name: str, check: Callable, count: int) -> int:
    original = (kept.folder / name).read_bytes()
    document = json.loads(original)

    def work(changes):
        (kept.changed / name).write_text(json.dumps(change_json(document, changes)))
        check()

    found = try_all(JSON_CHANGES, work, count)
    (kept.changed / name).write_bytes(original)
    return found


def other_than_files(kept: Kept, count: int) -> int:
    """A folder, a pipe, a link, nothing: in the place of one file or of several."""
    def work(kinds):
        kept.restore()
        for name, kind in zip(sorted(os.listdir(kept.folder)), kinds, strict=True):
            put(kept.changed / name, kind)
        try:
            kept.check_tokens()
        finally:
            kept.check_tokenizer()

    found = try_all(st.tuples(*[st.sampled_from(KINDS)] * 3), work, count)
    kept.restore()
    return found


FUZZERS: dict[Callable[[Kept, int], int], int] = {
    side_file_bytes: 4, number_bytes: 4, side_file_tree: 5, tokenizer_bytes: 5, tokenizer_tree: 6, other_than_files: 3}
"""And how many of a round's inputs each has."""
