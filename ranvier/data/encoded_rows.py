"""Rows of a data set, encoded by a chat tokenizer, in the cache: shared by the tasks with conversations and with
pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache import Progress, advance, processes_of
from ranvier.data.subset import check_parted, held_out, split_held_out
from ranvier.data.worker_processes import map_in_order
from ranvier.errors import DataError

_AT_ONCE = 100
"""Rows in a piece that one process encodes."""
_WARNED_SHARE = 0.01
"""A larger share of left-out samples gives a warning."""
_Row = TypeVar("_Row")
Use = Literal["whole", "cut", "too_long", "silent"]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A sample: a conversation, or the two answers of a pair.

    runs: tokens, and which of them are learnt. key: decides whether it is held out; samples with the same key stay
    together. length: positions, before it is cut to the sequence. use: whether it is learnt, or left out since there is
    nothing to learn, or nothing within the sequence. margin: of a pair.
    """

    runs: tuple[tuple[Sequence[int] | np.ndarray, np.ndarray], ...]
    key: str
    length: int
    use: Use
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class Words:
    """Words for what a task counts. samples: in the plural. too_long, silent, empty: clauses about samples that are
    left out, and about rows without samples."""

    samples: str
    too_long: str
    silent: str
    empty: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a data set's rows by how they were used.

    empty: rows without a sample. samples: of all rows, counting one for each empty row. silent, too_long, cut: as of
    `Encoded.use`. longest: positions of the longest sample with something to learn. margins: samples with a margin.
    """

    rows: int
    empty: int
    samples: int
    silent: int
    too_long: int
    cut: int
    longest: int
    margins: int

    def text(self, words: Words, sequence: int) -> str:
        """The counts in words, for the line about the data; empty if everything is learnt."""
        counts = {f"left out, {words.too_long}": self.too_long, f"left out, {words.silent}": self.silent}
        counts[f"left out, {words.empty}"] = counts.get(f"left out, {words.empty}", 0) + self.empty
        counts[f"cut to {sequence} tokens"] = self.cut
        several = f" in {self.samples:,} samples" if self.samples != self.rows else ""
        return "; ".join(f"{count:,} of {self.rows:,}{several} {what}" for what, count in counts.items() if count)


def left_out_warning(code: str, counts: Counts, words: Words, setting: str, sequence: int, remedy: str
                     ) -> list[DataError]:
    """A warning if more than 1 % of the samples are left out. remedy: if the length is not the reason."""
    left_out = counts.too_long + counts.silent + counts.empty
    if left_out <= _WARNED_SHARE * counts.samples:
        return []
    text = counts.text(words, sequence)
    return [DataError(f"leaves out {left_out / counts.samples:.1%} of its {words.samples}: {text}", code=code,
                      where=setting, value=left_out,
                      remedy=f"Set a longer `--model.sequence`: all samples fit into {counts.longest}."
                      if counts.too_long else remedy)]


def stored_samples(place: Path, train: str, held: str | None, rows: Callable[[str, str], Iterator[_Row | None]],
                   encode: Callable[[_Row], list[Encoded]], nothing: Callable[[Counts, str], DataError], what: str,
                   vocab: int, progress: Progress) -> tuple[Arrays, Arrays]:
    """Training and held-out samples at `place` in the cache.

    train, held: names of data sets; without `held` a tenth of the first one is held out. rows: of (name, setting); None
    for a row without a sample. encode: gives the samples of a row, in several processes if `progress` allows them.
    nothing: the error for a data set in which nothing is learnt. what: the rows, in words. DataError for too few
    samples.
    """
    def read(name: str, setting: str) -> tuple[list[Encoded], Counts]:
        of_rows: list[list[Encoded] | None] = []
        found = rows(name, setting)
        pieces = iter(lambda: list(islice(found, _AT_ONCE)), [])
        for piece in map_in_order(partial(_encode_piece, encode), pieces, processes_of(progress)):
            of_rows += piece
            advance(progress, f"{what} of {name}", len(of_rows))
        samples = [sample for of_row in of_rows for sample in of_row or ()]
        uses = [sample.use for sample in samples]
        kept = [sample for sample in samples if sample.use in ("whole", "cut")]
        empty = of_rows.count(None)
        counts = Counts(rows=len(of_rows), empty=empty, samples=len(samples) + empty, silent=uses.count("silent"),
                        too_long=uses.count("too_long"), cut=uses.count("cut"),
                        longest=max((sample.length for sample in samples if sample.use != "silent"), default=0),
                        margins=sum(sample.margin is not None for sample in kept))
        if not kept:
            raise nothing(counts, f"data.{setting} {name}")
        return kept, counts

    def make() -> None:
        progress(f"tokenising {train}")
        samples, counts = read(train, "train")
        if held is None:
            samples, held_samples = split_held_out(samples, held_out([sample.key for sample in samples]))
            held_counts = counts
        else:
            held_samples, held_counts = read(held, "eval")
        check_parted(samples, held_samples, what, train)
        _write(place / "eval", held_samples, vocab, held_counts)
        _write(place / "train", samples, vocab, counts)

    return made_once(place, make, progress)


def _encode_piece(encode: Callable[[_Row], list[Encoded]], piece: Sequence[_Row | None]) -> list[list[Encoded] | None]:
    return [None if row is None else encode(row) for row in piece]


def _write(folder: Path, samples: Sequence[Encoded], vocab: int, counts: Counts) -> None:
    """Write the samples' tokens as one row with offsets."""
    ids, is_target = zip(*(run for sample in samples for run in sample.runs), strict=True)
    margins = {} if samples[0].margin is None else {
        "margins": np.array([sample.margin for sample in samples], dtype=np.float64)}
    write_arrays(folder, {
        **margins, "tokens": np.concatenate(ids).astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
        "is_target": np.concatenate(is_target).astype(np.uint8),
        "offsets": np.cumsum([0, *map(len, ids)]).astype(np.int64)}, asdict(counts))


def counts_of(parts: Sequence[Arrays], names: Sequence[str | None]) -> list[tuple[str, Counts]]:
    """(data set, its counts) of training and held-out samples. names: of their data sets; None for samples that were
    held out of the first data set."""
    return [(f"data.{setting} {name}", Counts(**{key: int(str(value)) for key, value in part.facts.items()}))
            for part, name, setting in zip(parts, names, ("train", "eval"), strict=True) if name is not None]


def about_counts(told: Sequence[tuple[str, Counts]], words: Words, sequence: int) -> str:
    """Description of rows that were left out, for the end of the line about the data. told: (data set, its counts), all
    that have their own counts."""
    texts = [(where, text) for where, counts in told if (text := counts.text(words, sequence))]
    return "".join(f"; {where}: {text}" if len(told) > 1 else f"; {text}" for where, text in texts)
