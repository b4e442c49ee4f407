"""The check of every task that a tokenizer's numbers stand for the model's tokens.

A model that training starts from gives each number the meaning of its own tokenizer. Another tokenizer may have further
tokens, at numbers that are free there, or beyond them with a larger `model.vocab`; a number that stands for another
token is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from ranvier.config.run import Run, Transformer
from ranvier.data.offline.pretrained_models import has_weights
from ranvier.errors import DataError
from ranvier.system.untrusted_file import json_object, read_bytes

TOKENIZER = "tokenizer.json"
_MOST_TOKENIZER_BYTES, _MOST_CONFIG_BYTES = 1 << 30, 1 << 24


def check(numbers: Mapping[str, int], run: Run, folder: Path | None, own: Mapping[str, int] | None) -> None:
    """DataError for a tokenizer that does not fit the run's model.

    numbers: token -> number. folder: of `model.pretrained`, in Hugging Face's format; None without one. own: token ->
    number of the tokenizer in this folder, where it has one.
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
                        f"{numbers[other]} here, which there is {tokens.get(numbers[other])!r}",
                        code="tokenizer-of-other-model", where="data.tokenizer", value=run.data.tokenizer,
                        remedy="Leave it out: the model's own is taken.")


def local_folder(run: Run) -> Path | None:
    """The folder of `model.pretrained` where the model is on this machine; not one that has only its sizes."""
    path = None if run.model.pretrained is None else Path(os.path.expanduser(run.model.pretrained))
    is_here = path is not None and path.is_dir() and (has_weights(path) or (path / TOKENIZER).exists())
    return path if is_here else None


def numbers_in(folder: Path) -> dict[str, int] | None:
    """Token -> number of the tokenizer.json in a folder; None without one. DataError where it is damaged."""
    path = folder / TOKENIZER
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
    """The vocabulary of the model in this folder; how it is read otherwise is not the tokenizer's matter."""
    if folder is None:
        return default
    vocab = json_object(folder / "config.json", _MOST_CONFIG_BYTES).get("vocab_size")
    return vocab if type(vocab) is int else default
