"""A task's samples in the cache, memory-mapped: named arrays with their descriptions, and the tokens of a corpus.

    FOLDER/NAME.npy      one array; its first dim is the samples
    FOLDER/about.json    shapes, number formats, digests, and facts such as the names of classes; written last
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier.data.cache import Progress, make_once, publish_file
from ranvier.errors import DataError
from ranvier.system.untrusted_file import open_regular_file, read_json

_ABOUT = "about.json"
_MOST_ABOUT_BYTES = 1 << 30
MOST_READ_BYTES = 256 << 20
"""Largest file whose content is checked when it is opened. For a larger file only the size is checked, since reading
terabytes would delay every start."""
_PIECE_BYTES = 16 << 20
_TYPES = ("uint8", "uint16", "uint32", "int32", "int64", "float64")


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of one array: its number format, little-endian, its shape, and the hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Named arrays and facts. arrays: read-only, for any thread. facts: as they were given. digest: of all arrays and
    facts. folder, forms: the location and the forms of the arrays, if they are in the cache."""

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, object]
    digest: str
    folder: Path = Path()
    forms: Mapping[str, Form] = field(default_factory=dict)

    def names(self, fact: str) -> list[str]:
        """The fact of this name, which is a list of texts."""
        found = self.facts[fact]
        assert isinstance(found, list), fact
        return [str(name) for name in found]


def made_once(folder: Path, make: Callable[[], None], progress: Progress) -> tuple[Arrays, Arrays]:
    """Return the arrays in folder/train and folder/eval, which `make` writes unless both exist."""
    folders = (folder / "train", folder / "eval")
    make_once(folder / "arrays", lambda: all((each / _ABOUT).exists() for each in folders), make, progress, folders)
    train, held = map(open_arrays, folders)
    return train, held


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]) -> None:
    """Write complete arrays. DataError when the files cannot be written."""
    kinds = {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}
    with array_writer(folder, kinds, facts) as append:
        append(arrays)


@contextmanager
def array_writer(folder: Path, kinds: Mapping[str, tuple[str, tuple[int, ...]]],
                 facts: Mapping[str, object]) -> Iterator[Callable[[Mapping[str, np.ndarray]], None]]:
    """A context with a function that appends samples to each array; the files appear when it ends without an exception.
    kinds: name -> number format, and shape of a sample. facts: read at the end. DataError when the files cannot be
    written."""
    counts, digests = dict.fromkeys(kinds, 0), {name: hashlib.blake2b(digest_size=16) for name in kinds}
    with ExitStack() as stack:
        files = {name: stack.enter_context(publish_file(folder / f"{name}.npy")) for name in kinds}

        def write_headers() -> None:
            """Write the headers. NumPy leaves space in them for any number of samples, so that their length does not
            change."""
            for name, (dtype, shape) in kinds.items():
                files[name].seek(0)
                np.lib.format.write_array_header_1_0(files[name], {
                    "descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False,
                    "shape": (counts[name], *shape)})

        def append(piece: Mapping[str, np.ndarray]) -> None:
            for name, (dtype, shape) in kinds.items():
                array = piece[name]
                assert array.dtype == dtype and array.shape[1:] == shape
                data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
                files[name].write(data)
                digests[name].update(data)
                counts[name] += len(array)

        write_headers()
        yield append
        write_headers()
    about = {"arrays": {name: {"dtype": dtype, "shape": (counts[name], *shape), "digest": digests[name].hexdigest()}
                        for name, (dtype, shape) in kinds.items()}, "facts": dict(facts)}
    with publish_file(folder / _ABOUT) as file:
        file.write(json.dumps({"digest": _digest(about), **about}).encode())


def open_arrays(folder: Path) -> Arrays:
    """Open arrays that `write_arrays` has written. DataError when they are missing, contradictory, or changed since;
    only the size is checked of arrays of more than 256 MiB, which are images."""
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
    return Arrays(folder=folder, arrays=arrays, forms=forms, facts=about["facts"], digest=digest)


def _digest(about: object) -> str:
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()


_HEADERS = threading.Lock()
"""NumPy parses headers as literals, and CPython 3.11 may miscount when several threads do so at the same time
(SystemError)."""


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
        size, whole = os.fstat(file.fileno()).st_size, file.tell() + prod(shape) * wanted.itemsize
        if size != whole:
            raise ValueError(f"{path.name} has {size} bytes and should have {whole} bytes")
        array: np.ndarray = np.empty(shape, wanted) if 0 in shape else np.memmap(
            file, wanted, mode="r", offset=file.tell(), shape=shape)
    if array.nbytes <= MOST_READ_BYTES:
        digest, rows = hashlib.blake2b(digest_size=16), max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start:start + rows]).data)
        if digest.hexdigest() != form.digest:
            raise ValueError(f"{path.name} has been changed")
    return array


# --- tokens -----------------------------------------------------------------------------------------------------------

_SCAN = 1 << 22
_TOKENS = "tokens"
Ids = Sequence[int] | npt.NDArray[Any]
"""Token numbers."""


class Tokens:
    """A corpus as one long sequence of token numbers: the array `tokens`, uint16 (vocabularies up to 65,536) or uint32.

    Sequence i of length s covers the tokens [i s, i s + s], the last one only as a target. Up to MOST_READ_BYTES, all
    numbers are checked here. DataError if a number is outside the vocabulary.
    """

    def __init__(self, found: Arrays) -> None:
        self.folder, self.digest = found.folder, found.forms[_TOKENS].digest
        self.vocab: int = int(str(found.facts["vocab"]))
        self.cut = bool(found.facts["cut"])
        """Whether the corpus has more text than these tokens."""
        self._array = found.arrays[_TOKENS]
        self._numbers = np.asarray(self._array)
        if self._numbers.nbytes <= MOST_READ_BYTES:
            for _ in self.check_numbers():
                pass

    def __len__(self) -> int:
        return len(self._numbers)

    def num_sequences(self, length: int) -> int:
        """The number of full sequences of `length` tokens, each with a target for its last token."""
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
        """Check and yield all tokens, part by part. DataError as `tokens[place]`."""
        for start in range(0, len(self), _SCAN):
            self._require_whole()
            part = self._numbers[start:start + _SCAN]
            self._require_known(part)
            yield part

    def _require_whole(self) -> None:
        """Check the file's size: a read beyond the end of a mapped file ends the process with SIGBUS."""
        if isinstance(self._array, np.memmap) and isinstance(mapped := self._array.base, mmap.mmap):
            whole = self._array.offset + self._array.nbytes
            if mapped.size() < whole:
                raise self._damaged_error("token-file-size", f"should have {whole} bytes", mapped.size())

    def _require_known(self, numbers: npt.NDArray[Any]) -> None:
        if numbers.size and int(numbers.max()) >= self.vocab:
            raise self._damaged_error("token-file-beyond-vocabulary",
                                      f"has a token beyond its vocabulary of {self.vocab}", int(numbers.max()))

    def _damaged_error(self, code: str, what: str, value: object) -> DataError:
        return DataError(what, code=code, where=str(self.folder / f"{_TOKENS}.npy"), value=value,
                         remedy="Delete its folder; it is then made again.")

    def documents(self, end: int, start: Sequence[int] = ()) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The start of each document, and its stop, the place after its last token, the separator `end`. start: tokens
        with which each document starts; the last of them may also be the separator."""
        found = [number * _SCAN + np.flatnonzero(part == end) for number, part in enumerate(self.check_numbers())]
        stops = np.concatenate([*found, [len(self) - 1]]).astype(np.int64) + 1
        stops = np.unique(stops[stops > 0])
        starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[:len(stops)]
        if tuple(start[-1:]) != (end,):
            return starts, stops
        short = np.flatnonzero(stops - starts == len(start))
        equal = short[(self[starts[short, None] + np.arange(len(start))] == np.array(start)).all(1)]
        beginnings: list[int] = []
        for place in equal[equal < len(starts) - 1].tolist():
            if place - 1 not in beginnings[-1:]:  # a document without tokens may follow a beginning
                beginnings.append(place)
        return np.delete(starts, np.array(beginnings, dtype=int) + 1), np.delete(stops, beginnings)

    def head(self, count: int) -> list[int]:
        """The first `count` tokens."""
        return [int(number) for number in self[np.arange(min(count, len(self)))]]


@contextmanager
def write_tokens(folder: Path, *, vocab: int, tokenizer: str, corpus: str,
                 cut: Callable[[], bool] = lambda: False) -> Iterator[Callable[[Ids], None]]:
    """A context with a function that appends token numbers, as `array_writer`. tokenizer, corpus: fingerprints; cut:
    called at the end, as `Tokens.cut`."""
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    facts: dict[str, object] = {"vocab": vocab, "tokenizer": tokenizer, "corpus": corpus}
    with array_writer(folder, {_TOKENS: (dtype, ())}, facts) as append:
        yield lambda ids: append({_TOKENS: np.asarray(ids, dtype=dtype)})
        facts["cut"] = cut()
