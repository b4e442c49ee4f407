"""The WordPiece tokenizer of a run: that of its pretrained model, or one trained on its training text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ranvier.config.run import Run
from ranvier.data import wordpiece
from ranvier.data.cache_folder import cache_folder
from ranvier.data.fingerprint import fingerprint
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.data.publish import Progress, one_writer
from ranvier.data.wordpiece import SMALLEST_VOCAB, WordPiece
from ranvier.errors import DataError
from ranvier.system.untrusted_file import read_json

BUILT_IN = ("bpe", "gpt2")
"""Names of data.tokenizer that are no paths. They are the task lm's; other tasks train a WordPiece."""


def problems(run: Run) -> list[DataError]:
    """What is wrong with the settings of a tokenizer."""
    if run.model.pretrained is not None:
        return []
    if run.data.tokenizer in BUILT_IN:
        return [wordpiece.too_small(run.model.vocab)] if run.model.vocab < SMALLEST_VOCAB else []
    try:
        _given(run)
    except DataError as problem:
        return [problem]
    return []


def _given(run: Run) -> WordPiece:
    """The tokenizer whose file data.tokenizer names. DataError where it is none, or has too many tokens."""
    path = Path(run.data.tokenizer).expanduser()
    if not path.is_file():
        raise DataError("is no tokenizer.json that exists", where="data.tokenizer", value=run.data.tokenizer,
                        remedy="Name the tokenizer.json of the model that training starts from, or leave it out.")
    tokenizer = wordpiece.load(path)
    if tokenizer.vocab > run.model.vocab:
        raise DataError(f"is smaller than the tokenizer's vocabulary of {tokenizer.vocab}", where="model.vocab",
                        value=run.model.vocab, remedy=f"Set --model.vocab {tokenizer.vocab} or more.")
    return tokenizer


def run_tokenizer(run: Run, texts: Callable[[], Iterable[str]], source: str, progress: Progress) -> WordPiece:
    """texts: gives the training text, where the run has no pretrained model; source: its fingerprint. DataError when
    the model has a smaller vocabulary than the tokenizer."""
    cache = cache_folder(run)
    if run.model.pretrained is not None:
        folder = folder_of(run.model.pretrained, cache, progress)
        tokenizer = wordpiece.from_folder(folder)
        vocab = _vocab_of(folder, run.model.vocab)
        if tokenizer.vocab > vocab:
            raise DataError(f"has a smaller vocabulary than its tokenizer, which has {tokenizer.vocab}",
                            where=f"model.pretrained {run.model.pretrained}", value=vocab,
                            remedy="Put the tokenizer that belongs to the model into its folder.")
        return tokenizer
    if run.data.tokenizer not in BUILT_IN:
        return _given(run)
    path = cache / "tokenizers" / f"{fingerprint('wordpiece', source, run.model.vocab)}.json"
    if not path.exists():
        with one_writer(path, progress):
            if not path.exists():
                progress(f"training a tokenizer of {run.model.vocab} entries on {run.data.train}")
                wordpiece.train(texts(), run.model.vocab).save(path)
    return wordpiece.load(path)


def _vocab_of(folder: Path, default: int) -> int:
    """The vocabulary of the model in this folder; how it is read otherwise is not the tokenizer's matter."""
    try:
        document: Any = read_json(folder / "config.json", 1 << 24)
        vocab = document["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return default
    return vocab if type(vocab) is int else default
