"""The task lm: the next token of a text. From a corpus to token files: tokenizer, held-out split, cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.data import tokenizer as tokenizers
from ranvier.data.corpus import (
    HELD_OUT_EVERY,
    JSON_LINES,
    Corpus,
    fingerprint,
    json_lines,
    missing_path,
    open_corpus,
    size_bytes,
    split,
)
from ranvier.data.prepare import cache_folder
from ranvier.data.publish import Progress, one_writer
from ranvier.data.task import Prepared
from ranvier.data.tokenizer import GPT2_VOCAB, SMALLEST_VOCAB, Tokenizer
from ranvier.data.tokens import Tokens, exists, open_tokens, write_tokens
from ranvier.errors import DataError
from ranvier.run import Run

TOKENIZER_BYTES = 4_000_000
"""Text that a tokenizer is trained on."""
NAMED_BYTES = 16_000_000
"""Text that is read of a corpus that is given by name, where the run does not say."""
NO_LIMIT = 1 << 62


class Sequences:
    """A token file as samples: inputs are `sequence` tokens, targets the same one token on: both [samples, sequence]
    int64."""

    def __init__(self, tokens: Tokens, sequence: int) -> None:
        self.tokens, self.sequence = tokens, sequence

    def __len__(self) -> int:
        return self.tokens.num_sequences(self.sequence)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> Tensor:
        return torch.from_numpy(self.tokens.sequences(samples, self.sequence)[:, :-1].copy())

    def targets(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(self.tokens.sequences(samples, self.sequence)[:, 1:].copy())


def problems(run: Run) -> list[DataError]:
    """What is wrong with the data settings, as far as it shows without reading much."""
    found = [problem] if (problem := missing_path(run.data.corpus)) else []
    return found + first_look(run)


def first_look(run: Run) -> list[DataError]:
    """What is wrong with the tokenizer, and with the first line of a file of JSON lines; a corpus that is not there is
    left to the machine that the run is meant for."""
    found, name, path = [], run.data.tokenizer, Path(run.data.corpus).expanduser()
    try:
        smallest = {"bpe": SMALLEST_VOCAB, "gpt2": GPT2_VOCAB}.get(name) or tokenizers.from_path(name).vocab
        kind = {"bpe": "a byte-level tokenizer", "gpt2": "GPT-2's tokenizer"}.get(name, f"the tokenizer {name}")
        if run.model.vocab < smallest:
            found.append(DataError(f"is less than {kind} has: {smallest}", where="model.vocab", value=run.model.vocab,
                                   remedy=f"Set --model.vocab {smallest} or more."))
    except DataError as problem:
        found.append(problem)
    try:
        if path.suffix.lower() in JSON_LINES and path.is_file():
            next(json_lines(path), None)
    except DataError as problem:
        found.append(problem)
    except (OSError, ValueError):  # told where all of it is read
        pass
    return found


def warnings(run: Run) -> list[DataError]:
    """What of a corpus is left out, as far as its size tells."""
    limit = run.data.max_bytes
    there = None if limit == "auto" else size_bytes(run.data.corpus)
    if there is None or there <= limit:
        return []
    return [DataError(f"leaves out a part of {run.data.corpus}, which has {there:,} bytes", where="data.max-bytes",
                      value=limit, remedy="Set --data.max-bytes auto to take all of it.")]


def prepare(run: Run, progress: Progress = lambda line: None) -> Prepared:
    """Tokenizer and token files of this run (see ranvier.data.prepare). DataError when there is too little text for one
    sequence."""
    cache = cache_folder(run)
    corpus = open_corpus(run.data.corpus, cache, progress)
    tokenizer = _tokenizer(run, corpus, cache, progress)
    if tokenizer.vocab > run.model.vocab:
        raise _vocab_too_small(run.model.vocab, tokenizer.vocab)
    limit = _limit(run, corpus)
    text = fingerprint(corpus.fingerprint, limit, HELD_OUT_EVERY)
    folder = cache / "tokens" / fingerprint(text, tokenizer.fingerprint, "knows cut")
    with one_writer(folder / "train", progress):
        if not (exists(folder / "train") and exists(folder / "eval")):
            _write(folder, corpus, text, limit, tokenizer, progress)
    train, held = open_tokens(folder / "train"), open_tokens(folder / "eval")
    for part, tokens in (("training", train), ("held-out", held)):
        if tokens.num_sequences(run.model.sequence) < 1:
            raise DataError(f"has too little {part} text for one sequence of {run.model.sequence} + 1 tokens",
                            where=f"data.corpus {run.data.corpus}", value=f"{len(tokens)} tokens",
                            remedy="Give more text (or a larger --data.max-bytes), or a shorter --model.sequence.")
    of = f", of its first {limit:,} bytes: data.max-bytes leaves out the rest" if train.about.cut else ""
    return Prepared(tokenizer=tokenizer, train=Sequences(train, run.model.sequence),
                    eval=Sequences(held, run.model.sequence), weight=float(run.model.sequence),
                    about=f"{run.data.corpus}: {len(train):,} tokens, {len(held):,} held out{of}",
                    transform=f"{run.model.sequence} tokens",
                    fingerprint=fingerprint(tokenizer.fingerprint, train.about.digest, held.about.digest))


def _limit(run: Run, corpus: Corpus) -> int:
    """Bytes that are read of the corpus."""
    if run.data.max_bytes != "auto":
        return run.data.max_bytes
    return NO_LIMIT if corpus.is_path else NAMED_BYTES


def _tokenizer(run: Run, corpus: Corpus, cache: Path, progress: Progress) -> Tokenizer:
    if run.data.tokenizer == "gpt2":
        return tokenizers.gpt2(cache, progress)
    if run.data.tokenizer != "bpe":
        return tokenizers.from_path(run.data.tokenizer)
    limit = _limit(run, corpus)
    name = fingerprint("bpe", corpus.fingerprint, limit, HELD_OUT_EVERY, TOKENIZER_BYTES, run.model.vocab)
    path = cache / "tokenizers" / f"{name}.json"
    with one_writer(path, progress):
        if not path.exists():
            progress(f"training a tokenizer of {run.model.vocab} entries on {corpus.name}")
            _training_sample(run, corpus).save(path)
    return tokenizers.load(path)


def _training_sample(run: Run, corpus: Corpus) -> Tokenizer:
    """A tokenizer trained on the first text that is not held out."""
    def texts():
        left = TOKENIZER_BYTES
        for document, held_out in split(corpus.documents(_limit(run, corpus))):
            if not held_out:
                yield document.text[:left]
                left -= len(document.text)
            if left <= 0:
                return

    return tokenizers.train(texts(), run.model.vocab)


def _write(folder: Path, corpus: Corpus, text: str, max_bytes: int, tokenizer: Tokenizer, progress: Progress) -> None:
    cuts: list[bool] = []
    about = {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "corpus": text, "cut": lambda: bool(cuts)}
    progress(f"tokenising {corpus.name}")
    done = reported = 0
    with write_tokens(folder / "train", **about) as train, write_tokens(folder / "eval", **about) as held:
        for document, held_out in split(corpus.documents(max_bytes, lambda: cuts.append(True))):
            append = held if held_out else train
            for part in tokenizer.encode_in_parts(document.text):
                append(part)
            append([tokenizer.end])
            done += len(document.text)
            if done - reported >= 10_000_000:
                reported = done
                progress(f"tokenising {corpus.name}: {done / 1e6:.0f} million characters")


def _vocab_too_small(vocab: int, needed: int) -> DataError:
    return DataError(f"is smaller than the tokenizer's vocabulary of {needed}", where="model.vocab", value=vocab,
                     remedy=f"Set --model.vocab {needed} or more.")
