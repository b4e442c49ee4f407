"""Token files: a corpus as one long sequence of token numbers, memory-mapped.

    NAME.bin     the numbers, little-endian uint16 (vocabularies up to 65,536) or uint32
    NAME.json    describes them; written last, so a .bin without it is unfinished
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier.data.arrays import MOST_READ_BYTES
from ranvier.data.cache import published
from ranvier.errors import DataError
from ranvier.system.untrusted_file import open_regular_file, read_json

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SCAN = 1 << 22
Ids = Sequence[int] | npt.NDArray[Any]
"""Token numbers."""
_MOST_ABOUT_BYTES = 1 << 16
"""A larger NAME.json was not written by us."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The content of NAME.json. tokenizer, corpus: fingerprints; digest: hash of the bytes of NAME.bin; cut: whether
    the corpus has more text than these tokens."""

    dtype: str
    count: int
    vocab: int
    tokenizer: str
    corpus: str
    digest: str
    cut: bool = False


class Tokens:
    """A checked token file; sequence i of length s covers the tokens [i s, i s + s], the last one only as a target.

    mapped: what `numbers` are read from, if it is a file.
    """

    def __init__(self, path: Path, about: About, numbers: npt.NDArray[Any], mapped: mmap.mmap | None = None) -> None:
        self.path, self.about, self._numbers, self._mapped = path, about, numbers, mapped

    def __len__(self) -> int:
        return self.about.count

    def num_sequences(self, length: int) -> int:
        """The number of whole sequences of `length` tokens, each with a target for its last token."""
        return max(0, (len(self) - 1) // length)

    def sequences(self, which: npt.NDArray[Any], length: int) -> npt.NDArray[np.int64]:
        """[len(which), length + 1] int64: the tokens of these sequences and the one after each. DataError as
        `tokens[place]`."""
        return self[which[:, None] * length + np.arange(length + 1)]

    def __getitem__(self, place: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The tokens at these places. DataError if the file was cut since it was opened, or has a number outside the
        vocabulary."""
        self._require_whole()
        found: npt.NDArray[np.int64] = self._numbers[place].astype(np.int64)
        self._require_known(found)
        return found

    def check_numbers(self) -> Iterator[npt.NDArray[Any]]:
        """All tokens, part by part. DataError as `tokens[place]`."""
        for start in range(0, len(self), _SCAN):
            self._require_whole()
            part = self._numbers[start:start + _SCAN]
            self._require_known(part)
            yield part

    def _require_whole(self) -> None:
        """A read beyond the end of a mapped file ends the process by SIGBUS."""
        if self._mapped is not None and self._mapped.size() < self._numbers.nbytes:
            raise _damaged("token-file-size", self.path.with_suffix(".bin"),
                           f"should have {self._numbers.nbytes} bytes", self._mapped.size())

    def _require_known(self, numbers: npt.NDArray[Any]) -> None:
        if numbers.size and int(numbers.max()) >= self.about.vocab:
            raise _damaged("token-file-beyond-vocabulary", self.path.with_suffix(".bin"),
                           f"has a token beyond its vocabulary of {self.about.vocab}", int(numbers.max()))

    def documents(self, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First token of each document, and the one after its last, which is the separator `end`."""
        found = [number * _SCAN + np.flatnonzero(part == end) for number, part in enumerate(self.check_numbers())]
        stops = np.concatenate([*found, [len(self) - 1]]).astype(np.int64) + 1
        stops = np.unique(stops[stops > 0])
        return np.concatenate([[0], stops[:-1]]).astype(np.int64)[:len(stops)], stops

    def head(self, count: int) -> list[int]:
        """The first `count` tokens."""
        return [int(number) for number in self[np.arange(min(count, len(self)))]]


@contextmanager
def write_tokens(path: Path, *, vocab: int, tokenizer: str, corpus: str,
                 cut: Callable[[], bool] = lambda: False) -> Iterator[Callable[[Ids], None]]:
    """A context with a function that appends token numbers; path.bin and path.json appear when it ends without an
    exception. tokenizer, corpus: fingerprints; cut: called at the end, as `About.cut`. DataError if they cannot be
    written."""
    name = "uint16" if vocab <= 1 << 16 else "uint32"
    count, digest = 0, hashlib.blake2b(digest_size=16)
    with published(path.with_suffix(".bin")) as file:
        def append(ids: Ids) -> None:
            nonlocal count
            data = np.asarray(ids, dtype=_DTYPES[name]).tobytes()
            file.write(data)
            digest.update(data)
            count += len(ids)

        yield append
    about = About(dtype=name, count=count, vocab=vocab, tokenizer=tokenizer, corpus=corpus, digest=digest.hexdigest(),
                  cut=cut())
    with published(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(about), indent=2).encode())


def open_tokens(path: Path) -> Tokens:
    """The token file path.bin with path.json; up to MOST_READ_BYTES it is read once to check it. DataError if it is
    missing, was changed after it was written, or has a number outside the vocabulary."""
    binary = path.with_suffix(".bin")
    about = _about(path.with_suffix(".json"))
    dtype = _DTYPES[about.dtype]
    try:
        with open_regular_file(binary, unshared=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size != about.count * dtype.itemsize:
                raise _damaged("token-file-size", binary, f"should have {about.count * dtype.itemsize} bytes", size)
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise _damaged("token-file-unreadable", binary, "cannot be read", error.strerror or str(error)) from error
    tokens = Tokens(path, about, np.frombuffer(mapped or b"", dtype), mapped)
    if size <= MOST_READ_BYTES:
        digest = hashlib.blake2b(digest_size=16)
        for part in tokens.check_numbers():
            digest.update(part.tobytes())
        if digest.hexdigest() != about.digest:
            raise _damaged("token-file-changed", binary,
                           f"has been changed: {path.with_suffix('.json').name} has another digest", digest.hexdigest())
    return tokens


def exists(path: Path) -> bool:
    """Whether this token file is finished."""
    return path.with_suffix(".json").exists()


def _about(path: Path) -> About:
    try:
        found = read_json(path, _MOST_ABOUT_BYTES, unshared=True)
        if not isinstance(found, dict):
            raise ValueError("is no object")
        about = About(**found)
        texts = (about.dtype, about.tokenizer, about.corpus, about.digest)
        if not all(type(part) is int and part >= 0 for part in (about.count, about.vocab)) or not all(
                isinstance(part, str) for part in texts) or about.dtype not in _DTYPES or type(about.cut) is not bool:
            raise ValueError(f"unknown content {about}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _damaged("token-file-description", path, "does not describe a token file", reason) from error
    return about


def _damaged(code: str, path: Path, what: str, value: object) -> DataError:
    return DataError(what, code=code, where=str(path), value=value,
                     remedy=f"Delete {path.with_suffix('.json').name} and {path.with_suffix('.bin').name} there; they "
                            "are then written again.")
