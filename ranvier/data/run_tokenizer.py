"""The WordPiece tokenizer of a run: that of its pretrained model, or one trained on its training text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from ranvier.data import wordpiece
from ranvier.data.corpus import fingerprint
from ranvier.data.prepare import cache_folder
from ranvier.data.pretrained_models import folder_of
from ranvier.data.publish import Progress, one_writer
from ranvier.data.wordpiece import SMALLEST_VOCAB, WordPiece
from ranvier.errors import DataError
from ranvier.run import Run


def problems(run: Run) -> list[DataError]:
    """What is wrong with the settings of a tokenizer."""
    needs_more = run.model.pretrained is None and run.model.vocab < SMALLEST_VOCAB
    return [wordpiece.too_small(run.model.vocab)] if needs_more else []


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
        vocab = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return default
    return vocab if type(vocab) is int else default
