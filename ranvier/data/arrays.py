"""A task's samples in the cache, memory-mapped: named arrays and what they are, and the tokens of a corpus.

    FOLDER/NAME.npy      one array; its first dim is the samples
    FOLDER/about.json    shapes, number formats, digests, and facts such as the names of classes; written last
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier.data.cache import Progress, make_once, published
from ranvier.errors import DataError
from ranvier.system.untrusted_file import open_regular_file, read_json

_ABOUT = "about.json"
_MOST_ABOUT_BYTES = 1 << 30
MOST_READ_BYTES = 256 << 20
"""Largest file whose content is checked when it is opened; of a larger one only the size is, since reading terabytes
would delay every start."""
_PIECE_BYTES = 16 << 20
_TYPES = ("uint8", "uint16", "uint32", "int32", "int64", "float64")


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of one array: its number format, little-endian, its shape, and the hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """arrays: read-only, for any thread. facts: as they were given. digest: of all arrays and facts."""

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, object]
    digest: str

    def names(self, fact: str) -> list[str]:
        """A fact that is a list of texts."""
        found = self.facts[fact]
        assert isinstance(found, list), fact
        return [str(name) for name in found]


def made_once(folder: Path, make: Callable[[], None], progress: Progress) -> tuple[Arrays, Arrays]:
    """The arrays in folder/train and folder/eval, which `make` writes unless both are there."""
    names = ("train", "eval")
    make_once(folder / "arrays", lambda: all((folder / name / _ABOUT).exists() for name in names), make, progress)
    train, held = (open_arrays(folder / name) for name in names)
    return train, held


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]) -> None:
    """Write all of them at once. DataError when that cannot be."""
    forms = {name: Form(dtype=array.dtype.name, shape=array.shape) for name, array in arrays.items()}
    write_in_pieces(folder, forms, [arrays], facts)


def write_in_pieces(folder: Path, forms: Mapping[str, Form], pieces: Iterable[Mapping[str, np.ndarray]],
                    facts: Mapping[str, object]) -> None:
    """Write arrays of known shapes from pieces of consecutive samples, of which only one is in memory."""
    digests = {name: hashlib.blake2b(digest_size=16) for name in forms}
    with ExitStack() as stack:
        files = {name: stack.enter_context(published(folder / f"{name}.npy")) for name in forms}
        for name, form in forms.items():
            np.lib.format.write_array_header_1_0(files[name], {
                "descr": np.dtype(form.dtype).newbyteorder("<").str, "fortran_order": False,
                "shape": tuple(form.shape)})
        for piece in pieces:
            for name, form in forms.items():
                array = piece[name]
                assert array.dtype == form.dtype and array.shape[1:] == tuple(form.shape[1:])
                data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
                files[name].write(data)
                digests[name].update(data)
    about = {"arrays": {name: asdict(form) | {"digest": digests[name].hexdigest()} for name, form in forms.items()},
             "facts": dict(facts)}
    with published(folder / _ABOUT) as file:
        file.write(json.dumps({"digest": _digest(about), **about}).encode())


def open_arrays(folder: Path) -> Arrays:
    """Arrays that `write_arrays` has left. DataError when missing, contradictory, or changed since; arrays of more than
    256 MiB, which are images, are looked at by their size alone."""
    path = folder / _ABOUT
    try:
        about: Any = read_json(path, _MOST_ABOUT_BYTES, unshared=True)
        digest = about.pop("digest")
        if digest != _digest(about):
            raise ValueError(f"{_ABOUT} has been changed")
        forms = {str(name): Form(dtype=form["dtype"], shape=tuple(form["shape"]), digest=form["digest"])
                 for name, form in about["arrays"].items()}
        arrays = {name: _open(folder / f"{name}.npy", form) for name, form in forms.items()}
    except Exception as error:  # NumPy's reader of headers raises many kinds
        raise DataError("was changed after it was written", code="cached-arrays-changed", where=str(folder),
                        value=f"{type(error).__name__}: {error}",
                        remedy="Delete this folder; it is then written again.") from error
    return Arrays(arrays=arrays, facts=about["facts"], digest=digest)


def _digest(about: object) -> str:
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()


_HEADERS = threading.Lock()
"""NumPy parses headers as literals, and CPython 3.11 may miscount when several threads do so at once (SystemError)."""


def _open(path: Path, form: Form) -> np.ndarray:
    if form.dtype not in _TYPES:
        raise ValueError(f"{path.name}: no known format")
    wanted = np.dtype(form.dtype).newbyteorder("<")
    with open_regular_file(path, unshared=True) as file:
        with _HEADERS:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"{path.name} has the form {version}")
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if (dtype, shape, is_fortran) != (wanted, form.shape, False) or not shape:
            raise ValueError(f"{path.name} has {dtype} {shape} instead of {form.dtype} {form.shape}")
        array: np.ndarray = np.empty(shape, wanted) if 0 in shape else np.memmap(
            file, wanted, mode="r", offset=file.tell(), shape=shape)
    if array.nbytes <= MOST_READ_BYTES:
        digest, rows = hashlib.blake2b(digest_size=16), max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start:start + rows]).data)
        if digest.hexdigest() != form.digest:
            raise ValueError(f"{path.name} has been changed")
    return array


# --- token files ------------------------------------------------------------------------------------------------------

# Token files: a corpus as one long sequence of token numbers, memory-mapped.
#
# NAME.bin     the numbers, little-endian uint16 (vocabularies up to 65,536) or uint32
# NAME.json    describes them; written last, so a .bin without it is unfinished


_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SCAN = 1 << 22
Ids = Sequence[int] | npt.NDArray[Any]
"""Token numbers."""
_MOST_TOKENS_ABOUT_BYTES = 1 << 16
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
        found = read_json(path, _MOST_TOKENS_ABOUT_BYTES, unshared=True)
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
