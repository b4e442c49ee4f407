"""Rows of a data set, encoded by a chat tokenizer, in the cache: what the tasks of conversations and pairs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache import Progress, advance, processes_of
from ranvier.data.parallel import map_in_order
from ranvier.data.subset import check_parted, held_out, parted

_AT_ONCE = 100
"""Rows that one process encodes at once."""
_Row = TypeVar("_Row")
_Encoded = TypeVar("_Encoded")
TokenRun = tuple[Sequence[int] | np.ndarray, np.ndarray]
"""Tokens, and which of them are learnt."""


class Keyed(Protocol):
    """An encoded sample. key: by which it is held out, so that samples with the same one lie together."""

    @property
    def key(self) -> str: ...


class Counts(Protocol):
    """Counts of a data set's rows by how they were used: a dataclass of numbers."""

    def text(self, sequence: int) -> str:
        """In words, for the line of the data; empty where nothing is left out or cut."""
        ...


_Keyed = TypeVar("_Keyed", bound=Keyed)


def encode_rows(rows: Iterator[_Row | None], encode: Callable[[_Row], _Encoded], what: str, progress: Progress
                ) -> list[_Encoded | None]:
    """Encode each row by `encode`, with several processes where `progress` allows that; None stays None. what: the
    rows, in words."""
    found: list[_Encoded | None] = []
    pieces = iter(lambda: list(islice(rows, _AT_ONCE)), [])
    for piece in map_in_order(partial(_each, encode), pieces, processes_of(progress)):
        found += piece
        advance(progress, what, len(found))
    return found


def _each(encode: Callable[[_Row], _Encoded], piece: Sequence[_Row | None]) -> list[_Encoded | None]:
    return [None if row is None else encode(row) for row in piece]


def stored_parts(place: Path, train: str, held: str | None, read: Callable[[str, str], tuple[list[_Keyed], Any]],
                 write: Callable[[Path, list[_Keyed], Any], None], what: str, progress: Progress
                 ) -> tuple[Arrays, Arrays]:
    """Training and held-out samples at `place` in the cache.

    train, held: names of data sets; without `held` a tenth of the first one is held out. read: (name, setting) ->
    (samples, counts). what: the samples, in words. DataError for too few.
    """
    def make() -> None:
        progress(f"tokenising {train}")
        samples, counts = read(train, "train")
        if held is None:
            samples, held_samples = parted(samples, held_out([one.key for one in samples]))
            held_counts = counts
        else:
            held_samples, held_counts = read(held, "eval")
        check_parted(samples, held_samples, what, train)
        write(place / "eval", held_samples, held_counts)
        write(place / "train", samples, counts)

    return made_once(place, make, progress)


def write_runs(folder: Path, runs: Sequence[TokenRun], vocab: int, counts: Any, more: Mapping[str, np.ndarray]) -> None:
    """Write runs of tokens as one row with offsets, and further arrays. counts: a dataclass of numbers."""
    ids, is_target = zip(*runs, strict=True)
    write_arrays(folder, {
        **more, "tokens": np.concatenate(ids).astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
        "is_target": np.concatenate(is_target).astype(np.uint8),
        "offsets": np.cumsum([0, *map(len, ids)]).astype(np.int64)}, asdict(counts))


def counts_in(part: Arrays) -> dict[str, int]:
    """The counts that `write_runs` has written."""
    return {name: int(str(value)) for name, value in part.facts.items()}


def about_counts(told: Sequence[tuple[str, Counts]], sequence: int) -> str:
    """Description of rows that were left out, for the end of the line about the data. told: (data set, its counts), all
    that have counts of their own."""
    texts = [(where, text) for where, counts in told if (text := counts.text(sequence))]
    return "".join(f"; {where}: {text}" if len(told) > 1 else f"; {text}" for where, text in texts)
