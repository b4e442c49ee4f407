"""The task lm: the next token of a text. From a corpus to token files: tokenizer, held-out split, cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.config.named_code import names_corpus
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import corpus as corpora
from ranvier.data import tokenizer as tokenizers
from ranvier.data.arrays import Tokens, made_once, write_tokens
from ranvier.data.cache import Progress, advance, cache_folder, fingerprint, make_once, processes_of
from ranvier.data.named_files import refusals
from ranvier.data.padding import padding_text
from ranvier.data.run_tokenizer import text_tokenizer, text_tokenizer_problems
from ranvier.data.subset import join, shares, sources_of, spread
from ranvier.data.task import Prepared, Task
from ranvier.data.token_samples import PackedSamples, TokenSamples, best_fit, cut_runs
from ranvier.data.tokenizer import Tokenizer
from ranvier.data.worker_processes import map_in_order
from ranvier.errors import DataError, RanvierError

TOKENIZER_BYTES = 4_000_000
"""Bytes of text that a tokenizer is trained on."""
NAMED_BYTES = 16_000_000
"""Bytes of text that are read of a corpus that is given by name, if the run does not set a limit."""
NO_LIMIT = 1 << 62
"""More bytes than any corpus has."""
HEAD_TOKENS = 1200
"""Held-out tokens from which a sample of text takes its prompt."""
PIECE_CHARACTERS = 1_000_000
"""Characters in a piece that one process encodes."""


class Sequences:
    """A token file as samples: inputs are `sequence` tokens, targets the same shifted by one token: both [samples,
    sequence] int64."""

    def __init__(self, tokens: Tokens, sequence: int) -> None:
        self.tokens, self.sequence = tokens, sequence

    def __len__(self) -> int:
        return self.tokens.num_sequences(self.sequence)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> Tensor:
        """[b, sequence] int64: the tokens of these sequences."""
        return torch.from_numpy(self.tokens.sequences(samples, self.sequence)[:, :-1].copy())

    def targets(self, samples: np.ndarray) -> Tensor:
        """[b, sequence] int64: the token after each."""
        return torch.from_numpy(self.tokens.sequences(samples, self.sequence)[:, 1:].copy())


class LanguageModelling(Task):
    """The task `lm`: sequences of one corpus or of several; whole documents if they are packed."""

    form = SHIPPED["lm"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the corpora. A corpus that is missing here may be on the machines that the run is meant for."""
        try:
            sources = sources_of(run.data, run.data.corpus)
        except DataError as problem:
            return [problem]
        found = text_tokenizer_problems(run)
        for source in sources:
            found = [*_missing(source.name, run.data.text_column, elsewhere), *found]
        if run.data.eval is not None:
            found += _missing(run.data.eval, run.data.text_column, elsewhere)
        return found

    def warnings(self, run: Run) -> list[RanvierError]:
        """Warnings about corpora that are larger than the limit and are therefore cut."""
        limit = run.data.max_bytes
        found: list[RanvierError] = []
        for source in sources_of(run.data, run.data.corpus) if limit != "auto" else ():
            there = 0 if names_corpus(source.name) else corpora.plain_bytes(source.name, run.data.text_column)
            if limit != "auto" and there > limit:
                found.append(DataError(
                    f"leaves out a part of {source.name}, which has {there:,} bytes of text", code="corpus-cut-short",
                    where="data.max-bytes", value=limit, remedy="Set `--data.max-bytes auto` to take all of it."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenizer and token files of this run (see ranvier.data.prepare). DataError when there is too little text for
        one sequence."""
        cache, sources = cache_folder(run), sources_of(run.data, run.data.corpus)
        opened = [corpora.open_corpus(source.name, cache, progress, run.data.text_column) for source in sources]
        tokenizer = text_tokenizer(run, lambda: _train_tokenizer(run, opened, cache, progress), progress)
        files = [_tokens(run, corpus, tokenizer, progress) for corpus in opened]
        parts = [[_samples(tokens, run, tokenizer) for tokens in pair] for pair in files]
        if run.data.eval is not None:
            return _with_held_out(run, self._prepare(run, tokenizer, opened, files, parts), tokenizer, progress)
        return self._prepare(run, tokenizer, opened, files, parts)

    def _prepare(self, run: Run, tokenizer: Tokenizer, opened: Sequence[corpora.OpenCorpus],
                 files: Sequence[tuple[Tokens, Tokens]], parts: Sequence[Sequence[Sequences | PackedSamples]]
                 ) -> Prepared:
        sources = sources_of(run.data, run.data.corpus)
        for (train, held), (train_samples, held_samples), source in zip(files, parts, sources, strict=True):
            for part, tokens, samples in (("training", train, train_samples), ("held-out", held, held_samples)):
                if len(samples) < 1 and (part == "training" or run.data.eval is None):
                    raise DataError(f"has too little {part} text for one sequence of {run.model.sequence} + 1 tokens",
                                    code="too-little-text", where=f"data.corpus {source.name}",
                                    value=f"{len(tokens)} tokens",
                                    remedy="Give more text (or a larger `--data.max-bytes`), or a shorter "
                                           "`--model.sequence`.")
        train_parts, held_parts = ([pair[place] for pair in parts] for place in (0, 1))
        packed = [samples for samples in train_parts if isinstance(samples, PackedSamples)]
        weight, padding = float(run.model.sequence), ""
        if packed:
            weight = sum(one.samples.num_targets() for one in packed) / sum(map(len, packed))
            padding = padding_text(np.concatenate([one.samples.sample_lengths for one in packed]), run, can_pack=True)
        digests = [digest for train, held in files for digest in (train.digest, held.digest)]
        more = (run.data.packing, run.data.mixture) if run.data.packing or run.data.mixture else ()
        return Prepared(tokenizer=tokenizer, train=join(train_parts), weight=weight,
                        eval=spread(held_parts) if run.data.eval is None else held_parts[0],
                        about="; ".join(_describe_corpus(run, source.name, corpus, *pair) for source, corpus,
                                        pair in zip(
                            sources, opened, files, strict=True)),
                        padding=padding, shares=shares(sources, list(map(len, train_parts))),
                        transform=f"{run.model.sequence} tokens", first_tokens=files[0][1].head(HEAD_TOKENS),
                        fingerprint=fingerprint(tokenizer.fingerprint, *digests, *more))


LM = LanguageModelling()
"""The task; it has no state."""


def _with_held_out(run: Run, prepared: Prepared, tokenizer: Tokenizer, progress: Progress) -> Prepared:
    """The run's data with all text of the corpus data.eval as held-out text; the training data stay the same."""
    name = run.data.eval
    assert name is not None
    corpus = corpora.open_corpus(name, cache_folder(run), progress, run.data.text_column)
    _, tokens = _tokens(run, corpus, tokenizer, progress, whole=True)
    samples = _samples(tokens, run, tokenizer)
    if len(samples) < 1:
        raise DataError(f"has too little text for one sequence of {run.model.sequence} + 1 tokens",
                        code="too-little-eval-text", where="data.eval", value=f"{len(tokens)} tokens",
                        remedy="Give more text, or a shorter `--model.sequence`.")
    return replace(prepared, eval=samples, about=f"{prepared.about}; held out is {name}: {len(tokens):,} tokens",
                   first_tokens=tokens.head(HEAD_TOKENS),
                   fingerprint=fingerprint(prepared.fingerprint, tokens.digest))


def _missing(name: str, column: str | None, elsewhere: bool) -> list[RanvierError]:
    """Problems of a corpus that a first look shows. elsewhere: it, and the package that reads it, may be on another
    machine."""
    missing = None if elsewhere else corpora.missing_path(name) or corpora.missing_package(name)
    found: list[RanvierError] = [missing] if missing else []
    with suppress(OSError, ValueError, RuntimeError):  # reported when the corpus is read
        found += refusals(lambda: corpora.look_at_columns(name, column))
    return found


def _tokens(run: Run, corpus: corpora.OpenCorpus, tokenizer: Tokenizer, progress: Progress, *, whole: bool = False
            ) -> tuple[Tokens, Tokens]:
    """The training and held-out tokens of a corpus, from the cache. whole: all of it is held out."""
    limit = _limit(run, corpus)
    text = fingerprint(corpus.fingerprint, limit, "whole" if whole else corpora.HELD_OUT_EVERY)
    folder = cache_folder(run) / "tokens" / fingerprint(text, tokenizer.fingerprint, tokenizer.end)
    train, held = made_once(folder, lambda: _write(folder, corpus, text, limit, tokenizer, progress, whole=whole),
                            progress)
    return Tokens(train), Tokens(held)


def _samples(tokens: Tokens, run: Run, tokenizer: Tokenizer) -> Sequences | PackedSamples:
    """Sequences of the continuous text, or of packed documents."""
    if not run.data.packing:
        return Sequences(tokens, run.model.sequence)
    documents = tokens.documents(tokenizer.end, tokenizer.start)
    samples = TokenSamples(tokens, *cut_runs(*documents, run.model.sequence), run.model.sequence)
    return PackedSamples(samples, best_fit(samples.sample_lengths, run.model.sequence))


def _describe_corpus(run: Run, name: str, corpus: corpora.OpenCorpus, train: Tokens, held: Tokens) -> str:
    limit = _limit(run, corpus)
    of = f"; only the first {limit:,} bytes are read (--data.max-bytes)" if train.cut else ""
    return f"{name}: {len(train):,} tokens, {len(held):,} held out{of}"


def _limit(run: Run, corpus: corpora.OpenCorpus) -> int:
    """The number of bytes that are read of the corpus."""
    if run.data.max_bytes != "auto":
        return run.data.max_bytes
    return NO_LIMIT if corpus.is_path else NAMED_BYTES


def _train_tokenizer(run: Run, opened: Sequence[corpora.OpenCorpus], cache: Path, progress: Progress) -> Tokenizer:
    """Train a tokenizer on the run's corpora."""
    same = [part for corpus in opened for part in (corpus.fingerprint, _limit(run, corpus))]
    name = fingerprint("bpe", *same, corpora.HELD_OUT_EVERY, TOKENIZER_BYTES, tokenizers.LONGEST_WORD, run.model.vocab)
    path = cache / "tokenizers" / f"{name}.json"

    def make() -> None:
        names = ", ".join(corpus.name for corpus in opened)
        progress(f"training a tokenizer of {run.model.vocab} entries on {names}")
        tokenizers.train((text for corpus in opened for text in _training_text(
            run, corpus, TOKENIZER_BYTES // len(opened))), run.model.vocab, progress).save(path)

    make_once(path, path.exists, make, progress)
    return tokenizers.load(path, tokenizers.REMAKE)


def _training_text(run: Run, corpus: corpora.OpenCorpus, limit: int) -> Iterator[str]:
    """The first text of a corpus that is not held out."""
    left = limit
    for document, held_out in corpora.split(corpus.documents(_limit(run, corpus))):
        if not held_out:
            yield document.text[:left]
            left -= len(document.text)
        if left <= 0:
            return


def _write(folder: Path, corpus: corpora.OpenCorpus, text: str, max_bytes: int, tokenizer: Tokenizer,
           progress: Progress, *, whole: bool = False) -> None:
    """Write the token files of a corpus. whole: all of it is held out."""
    cuts: list[bool] = []
    open_part = partial(write_tokens, vocab=tokenizer.vocab, tokenizer=tokenizer.fingerprint, corpus=text,
                        cut=lambda: bool(cuts))
    progress(f"tokenising {corpus.name}")
    done = reported = 0
    with open_part(folder / "train") as train, open_part(folder / "eval") as held:
        read = corpus.documents(max_bytes, lambda: cuts.append(True))
        documents = ((document, True) for document in read) if whole else corpora.split(read)
        told = _tell_special_tokens(documents, tokenizer, progress)
        pieces = map_in_order(partial(_encode_documents, tokenizer), _pieces(told), processes_of(progress))
        for ids, size, is_held in chain.from_iterable(pieces):
            append = held if is_held else train
            append(tokenizer.start)
            append(ids)
            append([tokenizer.end])
            done += size
            advance(progress, f"characters of {corpus.name}", done)
            if done - reported >= 10_000_000:
                reported = done
                progress(f"tokenising {corpus.name}: {done / 1e6:.0f} million characters")


def _tell_special_tokens(documents: Iterable[tuple[corpora.Document, bool]], tokenizer: Tokenizer, progress: Progress
                         ) -> Iterator[tuple[corpora.Document, bool]]:
    """Yield the documents, and report the first one whose text has a special token."""
    documents = iter(documents)
    for document, is_held in documents:
        yield document, is_held
        if token := tokenizer.special_in(document.text):
            progress(f"{document.name} has the text {token}: special tokens in texts are encoded as plain characters, "
                     "unlike in conversations (--data.task chat)")
            break
    yield from documents


def _pieces(documents: Iterable[tuple[corpora.Document, bool]]) -> Iterator[list[tuple[corpora.Document, bool]]]:
    """Documents in lists that are long enough for one process."""
    piece: list[tuple[corpora.Document, bool]] = []
    size = 0
    for document, is_held in documents:
        piece.append((document, is_held))
        size += len(document.text)
        if size >= PIECE_CHARACTERS:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _encode_documents(tokenizer: Tokenizer, piece: Sequence[tuple[corpora.Document, bool]]
                      ) -> list[tuple[np.ndarray, int, bool]]:
    """Tokens, characters, and whether it is held out, of each document."""
    found = []
    for document, is_held in piece:
        parts = [np.array(part, dtype=np.uint32) for part in tokenizer.encode_in_parts(document.text)]
        found.append((np.concatenate(parts), len(document.text), is_held))
    return found
