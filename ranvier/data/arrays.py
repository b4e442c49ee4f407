"""A task's samples in the cache: named arrays, memory-mapped, and what they are.

    FOLDER/NAME.npy      one array; its first dim is the samples
    FOLDER/about.json    shapes, number formats, digests, and facts such as the names of classes; written last
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
        raise DataError("is not what was written there", code="cached-arrays-changed", where=str(folder),
                        value=f"{type(error).__name__}: {error}",
                        remedy="Delete this folder; it is then made again.") from error
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
