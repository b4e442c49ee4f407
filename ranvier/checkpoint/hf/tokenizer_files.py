"""The tokenizer of a model in Hugging Face's format: imported into a run's tokenizer.json, and exported from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ranvier.checkpoint.hf.pretrained import own_file
from ranvier.checkpoint.manifest import run_folders
from ranvier.config.run import Transformer
from ranvier.data import tokenizer as tokenizers
from ranvier.data import wordpiece
from ranvier.errors import DataError
from ranvier.system.untrusted_file import read_json

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
_MOST_BYTES = 1 << 22
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_tokenizer(model: Path, path: Path, config: Transformer, tell: Callable[[str], None]) -> str | None:
    """Write the tokenizer of the folder `model` to `path`, if it has one that fits the model. Returns its fingerprint
    if training can read it. `tell` gets the reason if it does not fit."""
    if config.family == "vit":
        return None
    try:
        vocab, fingerprint = (_import_wordpiece if config.family == "bert" else _import_bpe)(model, path)
        if vocab <= config.vocab:
            return fingerprint
        tell(f"left out: {model / TOKENIZER} has more tokens than the model")
    except DataError as error:
        tell(f"left out: {error.where} {error.what}")
    path.unlink(missing_ok=True)
    return None


def _import_bpe(model: Path, path: Path) -> tuple[int, str | None]:
    """Import tokenizer.json, or else vocab.json and merges.txt; returns the number of tokens, and the fingerprint."""
    if (model / TOKENIZER).exists():
        tokenizer = tokenizers.load(shutil.copyfile(own_file(model, TOKENIZER), path))
    elif (model / "vocab.json").exists() and (model / "merges.txt").exists():
        vocab, merges = (own_file(model, name).read_bytes() for name in ("vocab.json", "merges.txt"))
        tokenizer = tokenizers.from_merges(vocab, merges, model)
        tokenizer.save(path)
    else:
        return 0, None
    return tokenizer.vocab, tokenizer.fingerprint


def _import_wordpiece(model: Path, path: Path) -> tuple[int, str | None]:
    """Import tokenizer.json, or else vocab.txt; returns as `_import_bpe`. A tokenizer.json that training cannot read is
    copied too, without a fingerprint."""
    if (model / TOKENIZER).exists():
        vocab = _vocab_of(shutil.copyfile(own_file(model, TOKENIZER), path))
        with suppress(DataError):
            return vocab, wordpiece.load(path).fingerprint
        return vocab, None
    if not (model / "vocab.txt").exists():
        return 0, None
    own_file(model, "vocab.txt")
    tokenizer = wordpiece.from_folder(model)
    tokenizer.save(path)
    return tokenizer.vocab, tokenizer.fingerprint


def import_files_beside(model: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """Copy the generation configuration and the other files next to a language model's tokenizer. Without a generation
    configuration, one is written with the end tokens that config.json names."""
    _copy_files_beside(model, folder, tell)
    if not (folder / GENERATION).exists():
        document: Any = read_json(own_file(model, "config.json"), _MOST_BYTES)
        ends = {key: document[key] for key in _ENDS if document.get(key) is not None}
        if ends:
            (folder / GENERATION).write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")


def export_files_beside(folder: Path, source: Path, tell: Callable[[str], None]) -> dict[str, object]:
    """Copy these files from `source`, the folder of the tokenizer or the run. Returns the end tokens, for config.json.
    CheckpointError for a link out of that folder."""
    _copy_files_beside(source, folder, tell)
    if not (folder / GENERATION).exists():
        return {}
    try:
        document: Any = read_json(folder / GENERATION, _MOST_BYTES)
        return {key: document[key] for key in _ENDS if key in document}
    except (ValueError, TypeError) as error:
        raise DataError("is not a JSON object", code="generation-config-not-json",
                        where=str(source / GENERATION), value=str(error),
                        remedy="Fetch it again from the model's source, or delete it.") from error


def padding_of(folder: Path) -> dict[str, object]:
    """The padding token of an exported folder, for config.json: transformers takes the score of the token before it.
    Empty for tokenizers without one, with which it scores one text at a time."""
    settings: Any = read_json(folder / "tokenizer_config.json", _MOST_BYTES)
    token = settings.get("pad_token") if isinstance(settings, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    number = Tokenizer.from_file(str(folder / TOKENIZER)).token_to_id(token) if isinstance(token, str) else None
    return {} if number is None else {"pad_token_id": number}


def _copy_files_beside(source: Path, folder: Path, tell: Callable[[str], None]) -> None:
    for name in tokenizers.files_beside(source):
        path = own_file(source, name)
        if path.stat().st_size > _MOST_BYTES:
            tell(f"left out: {source / name} is too large")
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


def export_tokenizer(folder: Path, path: Path, config: Transformer) -> dict[str, object]:
    """Copy the tokenizer.json at `path` to `folder`, with a tokenizer_config.json. Returns the end tokens of a GPT, for
    config.json. DataError if it is not a tokenizer, or not one for this model."""
    ends: dict[str, object] = {}
    if config.family == "bert":
        vocab = _vocab_of(path)
        special: dict[str, object] = {f"{name}_token": f"[{name.upper()}]" for name in (
            "cls", "sep", "pad", "unk", "mask")}
    else:
        tokenizer = tokenizers.load(path)
        vocab = tokenizer.vocab
        ends = {"bos_token_id": tokenizer.nothing[-1], "eos_token_id": tokenizer.end}
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.end_text) | {
            "bos_token": tokenizer.token(tokenizer.nothing[-1]), "clean_up_tokenization_spaces": False}
    if vocab > config.vocab:
        raise DataError(f"has more tokens than the model, whose vocabulary is {config.vocab}",
                        code="tokenizer-above-model", where=str(path), value=vocab,
                        remedy="Name the run's own with `--tokenizer`.")
    shutil.copyfile(path, folder / TOKENIZER)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.max_positions or config.sequence, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return ends


def tokenizer_beside(run: Path, checkpoint: Path, imported: Path | None = None, fingerprint: object = None
                     ) -> Path | None:
    """The tokenizer.json in the folder of the run that wrote `checkpoint`. imported: the file that the run has read; it
    is preferred if it still exists with this fingerprint, since files next to it may belong to it."""
    if imported is not None and imported.is_file() and fingerprint is not None:
        with suppress(DataError):
            if tokenizers.load(imported).fingerprint == fingerprint:
                return imported
    return next((place / TOKENIZER for place in run_folders(run, checkpoint) if (place / TOKENIZER).is_file()), None)


def _vocab_of(path: Path) -> int:
    """The number of tokens of a tokenizer.json. DataError if it is not one."""
    try:
        return int(Tokenizer.from_file(str(path)).get_vocab_size())
    except Exception as error:  # the library raises nothing more precise
        raise DataError("is not a tokenizer", code="exported-tokenizer-unreadable", where=str(path),
                        value=str(error).partition("\n")[0], remedy="Name the run's own with `--tokenizer`.") from error
