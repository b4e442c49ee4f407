"""The tokenizer of a run: its pretrained model's, the one that it names, or one trained on its training text.

    text_tokenizer    of decoders, as in tokenizer.json (`ranvier.data.tokenizer`)
    run_tokenizer     of encoders: WordPiece
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import tokenizers

from ranvier.config.run import Run, Transformer
from ranvier.data import tokenizer as byte_level
from ranvier.data import wordpiece
from ranvier.data.cache import Progress, cache_folder, fingerprint, make_once
from ranvier.data.named_files import refusals
from ranvier.data.offline.pretrained_models import folder_of, has_weights
from ranvier.data.tokenizer import GPT2_VOCAB, SMALLEST_VOCAB, Tokenizer
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError
from ranvier.system.untrusted_file import json_object, read_bytes

BUILT_IN = ("bpe", "gpt2")
"""Names in data.tokenizer that are not paths. They are for decoders; encoders train a WordPiece tokenizer."""


# --- decoders --------------------------------------------------------------------------------------------------------


def text_tokenizer_problems(run: Run) -> list[RanvierError]:
    """Problems of a decoder's tokenizer, if it is on this machine."""
    return [*refusals(lambda: _look_at_text_tokenizer(run))]


def _look_at_text_tokenizer(run: Run) -> None:
    name, folder = run.data.tokenizer, local_folder(run)
    if folder is not None and name != "gpt2":
        _text_tokenizer_of_model(run, folder, None)
    if run.model.pretrained is not None:
        return
    smallest = {"bpe": SMALLEST_VOCAB, "gpt2": GPT2_VOCAB}.get(name) or byte_level.from_path(name).vocab
    kind = {"bpe": "a byte-level tokenizer", "gpt2": "GPT-2's tokenizer"}.get(name, f"the tokenizer {name}")
    if run.model.vocab < smallest:
        raise DataError(f"is less than {kind} has: {smallest}", code="vocab-too-small", where="model.vocab",
                        value=run.model.vocab, remedy=f"Set `--model.vocab {smallest}` or more.")


def sentence_tokenizer(run: Run, texts: Callable[[], Iterable[str]], source: str, progress: Progress) -> Tokenizer:
    """`text_tokenizer`, trained on sentences if necessary. texts, source: as of `run_tokenizer`."""
    def trained() -> Tokenizer:
        return byte_level.load(_make_file("bpe of sentences", run, lambda: byte_level.train(
            texts(), run.model.vocab, progress), source, progress), byte_level.REMAKE)

    return text_tokenizer(run, trained, progress)


def text_tokenizer(run: Run, trained: Callable[[], Tokenizer], progress: Progress) -> Tokenizer:
    """The tokenizer of a decoder. trained: trains a new one on its training text, for bpe. DataError if its numbers are
    not those of the model's tokens."""
    cache = cache_folder(run)
    gpt2 = byte_level.gpt2(cache, progress) if run.data.tokenizer == "gpt2" else None
    if run.model.pretrained is not None:
        return _text_tokenizer_of_model(run, folder_of(run.model.pretrained, cache, progress), gpt2)
    found = gpt2 or (trained() if run.data.tokenizer == "bpe" else byte_level.from_path(run.data.tokenizer))
    check_numbers(found.numbers(), run, None, None)
    return found


def _text_tokenizer_of_model(run: Run, folder: Path, gpt2: Tokenizer | None) -> Tokenizer:
    """The tokenizer of the model that training starts from, in `folder`, or the one that data.tokenizer names; gpt2:
    GPT-2's, if it is named. DataError if there is none, or its numbers are not those of the model's tokens."""
    path = folder / _TOKENIZER
    own = byte_level.load(path, remedy="Put the tokenizer.json that belongs to the model into its folder.") \
        if path.is_file() else None
    found = own if run.data.tokenizer == "bpe" else gpt2 or byte_level.from_path(run.data.tokenizer)
    if found is None:
        raise DataError(f"is missing: `model.pretrained` {run.model.pretrained} has no tokenizer.json, and in a new "
                        "tokenizer its numbers would be other tokens", code="tokenizer-missing", where="data.tokenizer",
                        value=run.data.tokenizer,
                        remedy="Name the tokenizer.json of the model: `--data.tokenizer FILE`.")
    check_numbers(found.numbers(), run, folder, None if own is None else own.numbers())
    return found


# --- encoders --------------------------------------------------------------------------------------------------------


def problems(run: Run) -> list[RanvierError]:
    """Problems of an encoder's tokenizer, if it is on this machine."""
    if run.model.pretrained is not None:
        folder = local_folder(run)
        return [] if folder is None else [*refusals(lambda: _existing(run, folder))]
    if run.data.tokenizer in BUILT_IN:
        return [wordpiece.too_small(run.model.vocab)] if run.model.vocab < wordpiece.SMALLEST_VOCAB else []
    return [*refusals(lambda: _existing(run, None))]


def _existing(run: Run, folder: Path | None) -> WordPiece | None:
    """The tokenizer that data.tokenizer names, or that of the model in this folder; None if there is neither. DataError
    if the file is not a tokenizer, has too many tokens, or its numbers are not those of the model's tokens."""
    own = None if folder is None else wordpiece.from_folder(folder)
    found = own if run.data.tokenizer in BUILT_IN else _load(run)
    if found is not None:
        check_numbers(found.numbers(), run, folder, None if own is None else own.numbers())
    return found


def _load(run: Run) -> WordPiece:
    path = Path(os.path.expanduser(run.data.tokenizer))
    if not path.is_file():
        raise DataError("is not an existing tokenizer.json", code="tokenizer-file-missing", where="data.tokenizer",
                        value=run.data.tokenizer,
                        remedy="Name the tokenizer.json of the model that training starts from, or leave it out.")
    return wordpiece.load(path)


def run_tokenizer(run: Run, texts: Callable[[], Iterable[str]], source: str, progress: Progress) -> WordPiece:
    """The tokenizer of an encoder. texts: gives the training text, if the run has no pretrained model; source: its
    fingerprint. DataError when the model has a smaller vocabulary than the tokenizer."""
    name = run.model.pretrained
    found = _existing(run, None if name is None else folder_of(name, cache_folder(run), progress))
    return found or wordpiece.load(_make_file(
        "wordpiece", run, lambda: wordpiece.train(texts(), run.model.vocab), source, progress))


def _make_file(kind: str, run: Run, train: Callable[[], Tokenizer | WordPiece], source: str,
               progress: Progress) -> Path:
    """The file of a new tokenizer, in the cache. source: the fingerprint of its text."""
    path = cache_folder(run) / "tokenizers" / f"{fingerprint(kind, source, run.model.vocab)}.json"

    def make() -> None:
        progress(f"training a tokenizer of {run.model.vocab} entries on {run.data.train}")
        train().save(path)

    make_once(path, path.exists, make, progress)
    return path


# --- numbers of tokens ------------------------------------------------------------------------------------------------

# In a pretrained model, each number means a token of its own tokenizer. Another tokenizer may have further tokens, at
# numbers that are unused there, or beyond them with a larger `model.vocab`; a tokenizer that uses a number for another
# token is refused.


_TOKENIZER = "tokenizer.json"
_MOST_TOKENIZER_BYTES, _MOST_CONFIG_BYTES = 1 << 30, 1 << 24


def check_numbers(numbers: Mapping[str, int], run: Run, folder: Path | None, own: Mapping[str, int] | None) -> None:
    """DataError for a tokenizer that does not fit the run's model.

    numbers: token -> number. folder: of `model.pretrained`, in Hugging Face's format; None without one. own: token ->
    number of the tokenizer in this folder, if it has one.
    """
    needed, vocab = max(numbers.values()) + 1, _vocab_of(folder, run.model.vocab)
    if folder is not None and run.model.vocab != Transformer.vocab:
        vocab = max(vocab, run.model.vocab)  # rows are added
    if needed > vocab and folder is None:
        raise DataError(f"is smaller than the tokenizer's vocabulary of {needed}", code="vocab-below-tokenizer",
                        where="model.vocab", value=vocab, remedy=f"Set `--model.vocab {needed}` or more.")
    if needed > vocab:
        raise DataError(f"has {needed} tokens, and `model.pretrained` {run.model.pretrained} has only {vocab}",
                        code="tokenizer-above-pretrained", where="data.tokenizer", value=run.data.tokenizer,
                        remedy="Put the tokenizer that belongs to the model into its folder, or name it; or set "
                               f"`--model.vocab {needed}` or more for rows for the further tokens.")
    if own is None:
        return
    tokens = {number: token for token, number in own.items()}
    other = min((token for token, number in numbers.items()
                 if own.get(token, number) != number or tokens.get(number, token) != token),
                key=numbers.__getitem__, default=None)
    if other is not None:
        raise DataError(f"is not the tokenizer of `model.pretrained` {run.model.pretrained}: {other!r} is token "
                        f"{numbers[other]} here, which is {tokens.get(numbers[other])!r} there",
                        code="tokenizer-of-other-model", where="data.tokenizer", value=run.data.tokenizer,
                        remedy="Leave it out: the model's own tokenizer is used.")


def local_folder(run: Run) -> Path | None:
    """The folder of `model.pretrained` if the model is on this machine; None for a folder that has only its sizes."""
    path = None if run.model.pretrained is None else Path(os.path.expanduser(run.model.pretrained))
    is_here = path is not None and path.is_dir() and (has_weights(path) or (path / _TOKENIZER).exists())
    return path if is_here else None


def numbers_in(folder: Path) -> dict[str, int] | None:
    """Token -> number of the tokenizer.json in a folder; None without one. DataError if it is damaged."""
    path = folder / _TOKENIZER
    if not path.exists():
        return None
    try:
        text = read_bytes(path, _MOST_TOKENIZER_BYTES).decode("utf-8")
        found: dict[str, int] = tokenizers.Tokenizer.from_str(text).get_vocab()
    except Exception as error:  # the library raises nothing more precise
        raise DataError("is not a tokenizer", code="tokenizer-file-unreadable", where=str(path),
                        value=str(error).partition("\n")[0],
                        remedy="Fetch it again from the model's source.") from error
    return found


def _vocab_of(folder: Path | None, default: int) -> int:
    """The vocabulary of the model in this folder, or `default`; other problems of its config.json are reported
    elsewhere."""
    if folder is None:
        return default
    vocab = json_object(folder / "config.json", _MOST_CONFIG_BYTES).get("vocab_size")
    return vocab if type(vocab) is int else default
