"""The task lm: the next token of a text. From a corpus to token files: tokenizer, held-out split, cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.data import tokenizer as tokenizers
from ranvier.data.corpus import HELD_OUT_EVERY, Corpus, fingerprint, missing_path, open_corpus, split
from ranvier.data.prepare import cache_folder
from ranvier.data.publish import Progress, one_writer
from ranvier.data.task import Prepared
from ranvier.data.tokenizer import GPT2_VOCAB, SMALLEST_VOCAB, Tokenizer
from ranvier.data.tokens import Tokens, exists, open_tokens, write_tokens
from ranvier.errors import DataError
from ranvier.run import Run

TOKENIZER_BYTES = 4_000_000
"""Text that a tokenizer is trained on."""


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
    """What is wrong with the data settings, as far as it shows without reading anything."""
    found = [problem] if (problem := missing_path(run.data.corpus)) else []
    if run.data.tokenizer == "bpe" and run.model.vocab < SMALLEST_VOCAB:
        found.append(tokenizers.too_small(run.model.vocab))
    if run.data.tokenizer == "gpt2" and run.model.vocab < GPT2_VOCAB:
        found.append(_vocab_too_small(run.model.vocab, GPT2_VOCAB))
    return found


def prepare(run: Run, progress: Progress = lambda line: None) -> Prepared:
    """Tokenizer and token files of this run (see ranvier.data.prepare). DataError when there is too little text for one
    sequence."""
    cache = cache_folder(run)
    corpus = open_corpus(run.data.corpus, cache, progress)
    tokenizer = _tokenizer(run, corpus, cache, progress)
    if tokenizer.vocab > run.model.vocab:
        raise _vocab_too_small(run.model.vocab, tokenizer.vocab)
    text = fingerprint(corpus.fingerprint, run.data.max_bytes, HELD_OUT_EVERY)
    folder = cache / "tokens" / fingerprint(text, tokenizer.fingerprint)
    with one_writer(folder / "train", progress):
        if not (exists(folder / "train") and exists(folder / "eval")):
            _write(folder, corpus, text, run.data.max_bytes, tokenizer, progress)
    train, held = open_tokens(folder / "train"), open_tokens(folder / "eval")
    for part, tokens in (("training", train), ("held-out", held)):
        if tokens.num_sequences(run.model.sequence) < 1:
            raise DataError(f"has too little {part} text for one sequence of {run.model.sequence} + 1 tokens",
                            where=f"data.corpus {run.data.corpus}", value=f"{len(tokens)} tokens",
                            remedy="Give more text (or a larger --data.max-bytes), or a shorter --model.sequence.")
    return Prepared(tokenizer=tokenizer, train=Sequences(train, run.model.sequence),
                    eval=Sequences(held, run.model.sequence), weight=float(run.model.sequence),
                    about=f"{run.data.corpus}: {len(train):,} tokens, {len(held):,} held out",
                    transform=f"{run.model.sequence} tokens",
                    fingerprint=fingerprint(tokenizer.fingerprint, train.about.digest, held.about.digest))


def _tokenizer(run: Run, corpus: Corpus, cache: Path, progress: Progress) -> Tokenizer:
    if run.data.tokenizer == "gpt2":
        return tokenizers.gpt2(cache, progress)
    name = fingerprint("bpe", corpus.fingerprint, run.data.max_bytes, HELD_OUT_EVERY, TOKENIZER_BYTES, run.model.vocab)
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
        for document, held_out in split(corpus.documents(run.data.max_bytes)):
            if not held_out:
                yield document.text[:left]
                left -= len(document.text)
            if left <= 0:
                return

    return tokenizers.train(texts(), run.model.vocab)


def _write(folder: Path, corpus: Corpus, text: str, max_bytes: int, tokenizer: Tokenizer, progress: Progress) -> None:
    about = {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "corpus": text}
    progress(f"tokenising {corpus.name}")
    done = reported = 0
    with write_tokens(folder / "train", **about) as train, write_tokens(folder / "eval", **about) as held:
        for document, held_out in split(corpus.documents(max_bytes)):
            (held if held_out else train)([*tokenizer.encode(document.text), tokenizer.end])
            done += len(document.text)
            if done - reported >= 10_000_000:
                reported = done
                progress(f"tokenising {corpus.name}: {done / 1e6:.0f} million characters")


def _vocab_too_small(vocab: int, needed: int) -> DataError:
    return DataError(f"is smaller than the tokenizer's vocabulary of {needed}", where="model.vocab", value=vocab,
                     remedy=f"Set --model.vocab {needed} or more.")
