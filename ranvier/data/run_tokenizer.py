"""The WordPiece tokenizer of a run: that of its pretrained model, or one trained on its training text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ranvier.config.run import Run
from ranvier.data import token_numbers, wordpiece
from ranvier.data.cache_folder import cache_folder
from ranvier.data.fingerprint import fingerprint
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.data.publish import Progress, make_once
from ranvier.data.wordpiece import SMALLEST_VOCAB, WordPiece
from ranvier.errors import DataError

BUILT_IN = ("bpe", "gpt2")
"""Names of data.tokenizer that are no paths. They are the task lm's; other tasks train a WordPiece."""


def problems(run: Run) -> list[DataError]:
    """What is wrong with the settings of a tokenizer."""
    if run.model.pretrained is not None:
        folder = token_numbers.local_folder(run)
        try:
            if folder is not None:
                _of_model(run, folder)
        except DataError as problem:
            return [problem]
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
    tokenizer = _load(run)
    token_numbers.check(tokenizer.numbers(), run, None, None)
    return tokenizer


def _of_model(run: Run, folder: Path) -> WordPiece:
    """The tokenizer of the model in this folder, or the one that data.tokenizer names. DataError where its numbers are
    not those of the model's tokens."""
    own = wordpiece.from_folder(folder)
    tokenizer = own if run.data.tokenizer in BUILT_IN else _load(run)
    token_numbers.check(tokenizer.numbers(), run, folder, own.numbers())
    return tokenizer


def _load(run: Run) -> WordPiece:
    path = Path(run.data.tokenizer).expanduser()
    if not path.is_file():
        raise DataError("is no tokenizer.json that exists", code="tokenizer-file-missing", where="data.tokenizer",
                        value=run.data.tokenizer,
                        remedy="Name the tokenizer.json of the model that training starts from, or leave it out.")
    return wordpiece.load(path)


def run_tokenizer(run: Run, texts: Callable[[], Iterable[str]], source: str, progress: Progress) -> WordPiece:
    """texts: gives the training text, where the run has no pretrained model; source: its fingerprint. DataError when
    the model has a smaller vocabulary than the tokenizer."""
    cache = cache_folder(run)
    if run.model.pretrained is not None:
        return _of_model(run, folder_of(run.model.pretrained, cache, progress))
    if run.data.tokenizer not in BUILT_IN:
        return _given(run)
    path = cache / "tokenizers" / f"{fingerprint('wordpiece', source, run.model.vocab)}.json"

    def make() -> None:
        progress(f"training a tokenizer of {run.model.vocab} entries on {run.data.train}")
        wordpiece.train(texts(), run.model.vocab).save(path)

    make_once(path, path.exists, make, progress)
    return wordpiece.load(path)
