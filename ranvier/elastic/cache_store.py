"""One file of the cache: a slot per sample, read and written by all ranks of a node at once, whatever dies meanwhile.

    KEY.json   what the entries are; written last, so a .bin without it is unfinished
    KEY.bin    sparse: slot i at i x stride     slot: head | payload

    head, 32 bytes     magic | tag of key and form | sample number | crc32 of the payload | crc32 of the head so far

A slot is an entry only when all of its head and the payload's checksum are as they should be; whatever else is there
(nothing yet, a payload whose writer was killed, a flipped bit, another file's bytes) is no entry. A writer puts the
payload there before the head. Two that write the same entry write the same bytes. Files are read by `pread`: the ranks
of a node share their pages, and a file that somebody cuts off is a short read, not a signal.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.elastic.cache_folder import Folder, lock
from ranvier.elastic.cache_form import Form, Precision, Unfit

_MAGIC = b"RVcache1"
_HEAD = struct.Struct("<8s8sqI")
_CHECK = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CHECK.size
_PAGE_BYTES = 4096
_WHOLE_PAGES_FROM = 1 << 15
"""Slots of this size begin at pages, so that one can be given back without its neighbours; smaller ones are packed."""
_PACKED_BYTES = 64
_MOST_DESCRIPTION_BYTES = 1 << 18
_PUNCH_HOLE_KEEP_SIZE = 3
_MOST_REMOVALS = 20


@dataclass(frozen=True, eq=False)
class Entries:
    """What a read has found. places: [n] int64, where in the asked samples; payload: [n, payload_bytes] uint8."""

    places: Tensor
    payload: Tensor
    seconds: float


class Store:
    """An open file. Any number of threads may read while one writes. Use `find` or `create`."""

    def __init__(self, folder: Folder, key: str, form: Form, file: int) -> None:
        self.folder, self.key, self.form, self._file = folder, key, form, file
        text = json.dumps([key, form.describe()])
        self._tag = hashlib.blake2b(text.encode(), digest_size=8).digest()
        slot = HEAD_BYTES + form.payload_bytes
        self.whole_pages = slot >= _WHOLE_PAGES_FROM
        aligned = _PAGE_BYTES if self.whole_pages else _PACKED_BYTES
        self.stride = -(-slot // aligned) * aligned

    # ------------------------------------------------------------------ opening

    @staticmethod
    def find(folder: Folder, key: str, precision: Precision) -> Store | None:
        """The file of `key` if there is one whose description is as it was written. OSError when it cannot be opened;
        Unfit when something else has its name."""
        form = _described(folder.path / f"{key}.json", key, precision)
        if form is None or form.payload_bytes > folder.quota_bytes:
            return None
        file = _open(folder.path / f"{key}.bin", create=False)
        return None if file is None else Store(folder, key, form, file)

    @staticmethod
    def create(folder: Folder, key: str, form: Form, precision: Precision, about: dict) -> Store:
        """The file of `key`, made if it is not there. Unfit when it has entries of another form; OSError."""
        folder.make()
        file = _open(folder.path / f"{key}.bin", create=True)
        try:
            there = _described(folder.path / f"{key}.json", key, precision)
            if there is None:
                _describe(folder.path / f"{key}.json", key, form, about)
            elif there != form:
                raise Unfit("the state's shapes differ between microbatches, or from those of an earlier run")
            return Store(folder, key, form, file)
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        """No thread may be reading."""
        os.close(self._file)

    # ------------------------------------------------------------------ entries

    def has(self, sample: int) -> bool:
        """Whether the head of an entry is there; its payload is not looked at."""
        return self._checksum(sample) is not None

    def read(self, samples: Sequence[int], *, pinned: bool = False) -> Entries:
        """The entries of `samples`, those that are there. Never raises for what a disk or a stranger did."""
        start = time.perf_counter()
        heads = [(place, sample, checksum) for place, sample in enumerate(samples)
                 if (checksum := self._checksum(sample)) is not None]
        payload = torch.empty(len(heads), self.form.payload_bytes, dtype=torch.uint8, pin_memory=pinned and bool(heads))
        rows, places = payload.numpy(), []
        for place, sample, checksum in heads:
            row = memoryview(rows[len(places)])
            if self._fill(row, sample * self.stride + HEAD_BYTES) and zlib.crc32(row) == checksum:
                places.append(place)
        return Entries(torch.tensor(places, dtype=torch.int64), payload[:len(places)], time.perf_counter() - start)

    def write(self, sample: int, payload: np.ndarray) -> None:
        """Publish one entry. OSError when the disk does not take it; the slot is then no entry."""
        start = sample * self.stride
        self._put(memoryview(payload), start + HEAD_BYTES)
        head = _HEAD.pack(_MAGIC, self._tag, sample, zlib.crc32(payload))
        self._put(memoryview(head + _CHECK.pack(zlib.crc32(head))), start)

    def pages(self, sample: int) -> range:
        """Numbers of the pages that the slot touches."""
        start = sample * self.stride
        return range(start // _PAGE_BYTES, -(-(start + HEAD_BYTES + self.form.payload_bytes) // _PAGE_BYTES))

    def give_back(self, samples: Sequence[int]) -> bool:
        """Return the disk space of these slots; what they held is no entry any more. False where that cannot be done:
        slots that share pages, and file systems without holes."""
        return self.whole_pages and all(_punch(self._file, sample * self.stride, self.stride) for sample in samples)

    def _checksum(self, sample: int) -> int | None:
        """Of the payload, as a whole head says; None where there is no entry."""
        head = bytearray(HEAD_BYTES)
        if not self._fill(memoryview(head), sample * self.stride):
            return None
        magic, tag, number, checksum = _HEAD.unpack_from(head)
        check, = _CHECK.unpack_from(head, _HEAD.size)
        whole = (magic, tag, number) == (_MAGIC, self._tag, sample) and check == zlib.crc32(head[:_HEAD.size])
        return checksum if whole else None

    def _fill(self, room: memoryview, place: int) -> bool:
        done = 0
        try:
            while done < len(room):
                count = os.preadv(self._file, [room[done:]], place + done)
                if count == 0:
                    return False
                done += count
        except (OSError, OverflowError):
            return False
        return True

    def _put(self, data: memoryview, place: int) -> None:
        data = data.cast("B") if data.nbytes else data
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._file, data[done:], place + done)


def _open(path: Path, *, create: bool) -> int | None:
    """A file that is held (shared lock) and still has its name; None when there is none. Nobody removes it then."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    for _ in range(_MOST_REMOVALS):
        try:
            file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Unfit(f"{path} is no file")
            lock(file, exclusive=False)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False)):
                    held, file = file, -1
                    return held
        finally:
            if file >= 0:
                os.close(file)
    raise Unfit(f"{path} is removed as often as it is made")


def _described(path: Path, key: str, precision: Precision) -> Form | None:
    """What KEY.json says; None when it is not there or not as it was written."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        with open(file, "rb", closefd=False) as whole:
            data = whole.read(_MOST_DESCRIPTION_BYTES + 1)
        if len(data) > _MOST_DESCRIPTION_BYTES:
            return None
        text = json.loads(data)
        if not isinstance(text, dict) or text.pop("digest", None) != _digest(text) or text.get("key") != key:
            return None
        return Form.described(text.get("form"), precision)
    except (OSError, ValueError, RecursionError, Unfit):
        return None
    finally:
        os.close(file)


def _describe(path: Path, key: str, form: Form, about: dict) -> None:
    text = {"key": key, "form": form.describe(), "about": about}
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        unfinished.write_text(json.dumps({**text, "digest": _digest(text)}, indent=1), encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(text: dict) -> str:
    return hashlib.blake2b(json.dumps(text, sort_keys=True).encode(), digest_size=16).hexdigest()


@cache
def _fallocate():
    """The C library's function; None where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _punch(file: int, start: int, length: int) -> bool:
    """Make a hole of part of a file."""
    function = _fallocate()
    return function is not None and function(file, _PUNCH_HOLE_KEEP_SIZE, start, length) == 0
