"""Token files: a corpus as one long row of token numbers, memory-mapped.

    NAME.bin     the numbers, little-endian uint16 (vocabularies up to 65,536) or uint32
    NAME.json    what they are; written last, so a .bin without it is unfinished
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ranvier.data.publish import published
from ranvier.errors import DataError

_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SCAN = 1 << 22
_MOST_ABOUT_BYTES = 1 << 16
"""A side file that is larger is none of ours."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The side file. tokenizer and corpus are fingerprints; digest is the hash of the numbers as the file has them.
    cut: whether the corpus has more text than was taken."""

    dtype: str
    count: int
    vocab: int
    tokenizer: str
    corpus: str
    digest: str
    cut: bool = False


class Tokens:
    """A token file that has been checked; sequence i covers tokens [i s, i s + s], its last one only as a target."""

    def __init__(self, path: Path, about: About, numbers: np.ndarray) -> None:
        self.path, self.about, self._numbers = path, about, numbers

    def __len__(self) -> int:
        return self.about.count

    def num_sequences(self, length: int) -> int:
        """Whole sequences of `length` tokens, each with a target for its last token."""
        return max(0, (len(self) - 1) // length)

    def sequences(self, which: np.ndarray, length: int) -> np.ndarray:
        """[len(which), length + 1] int64: the tokens of these sequences and the one after each."""
        place = which[:, None] * length + np.arange(length + 1)
        return self._numbers[place].astype(np.int64)

    def head(self, count: int) -> list[int]:
        """The first `count` tokens."""
        return self._numbers[:count].tolist()


@contextmanager
def write_tokens(path: Path, *, vocab: int, tokenizer: str, corpus: str,
                 cut: Callable[[], bool] = lambda: False) -> Iterator[Callable[[Sequence[int]], None]]:
    """Gives a function that appends token numbers; path.bin and path.json appear when the block ends well. cut: asked
    at the end."""
    name = "uint16" if vocab <= 1 << 16 else "uint32"
    count, digest = 0, hashlib.blake2b(digest_size=16)
    with published(path.with_suffix(".bin")) as file:
        def append(ids: Sequence[int]) -> None:
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
    """The token file path.bin with its path.json, all of it read once. DataError when missing, contradictory, changed
    since it was written, or with a number too large."""
    binary = path.with_suffix(".bin")
    about = _about(path.with_suffix(".json"))
    dtype = _DTYPES[about.dtype]
    try:
        size = binary.stat().st_size if binary.is_file() else 0
        if size != about.count * dtype.itemsize:
            raise _damaged(binary, f"should have {about.count * dtype.itemsize} bytes", size)
        numbers = np.memmap(binary, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    except OSError as error:
        raise _damaged(binary, "cannot be read", error.strerror or str(error)) from error
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, about.count, _SCAN):
        part = numbers[start:start + _SCAN]
        if int(part.max()) >= about.vocab:
            raise _damaged(binary, f"has a token beyond its vocabulary of {about.vocab}", int(part.max()))
        digest.update(part)
    if digest.hexdigest() != about.digest:
        raise _damaged(binary, f"has been changed: {path.with_suffix('.json').name} has another digest",
                       digest.hexdigest())
    return Tokens(path, about, numbers)


def exists(path: Path) -> bool:
    """Whether this token file is finished."""
    return path.with_suffix(".json").exists()


def _about(path: Path) -> About:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        if path.stat().st_size > _MOST_ABOUT_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        about = About(**json.loads(path.read_text(encoding="utf-8")))
        texts = (about.dtype, about.tokenizer, about.corpus, about.digest)
        if not all(type(part) is int and part >= 0 for part in (about.count, about.vocab)) or not all(
                isinstance(part, str) for part in texts) or about.dtype not in _DTYPES or type(about.cut) is not bool:
            raise ValueError(f"unknown content {about}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, "does not describe a token file", str(error)) from error
    return about


def _damaged(path: Path, what: str, value: object) -> DataError:
    return DataError(what, where=str(path), value=value,
                     remedy=f"Delete {path.with_suffix('.json').name} and {path.with_suffix('.bin').name} there; they "
                            "are then made again.")
