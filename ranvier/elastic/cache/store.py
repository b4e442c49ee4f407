"""The cache's files: one for each frozen depth, with a slot for each sample, shared by all ranks of a machine.

    KEY.json   describes the entries; written last, so a .bin without it is unfinished
    KEY.bin    sparse: slot i begins at byte i * stride        slot: header | payload

    header     magic | tag of key and format | sample number | crc32 of the payload | crc32 of the header so far
    payload    tensor | tensor | ...   in the order of the state; each begins at a multiple of 16 bytes
               position | position | ... where samples have lengths of their own: each has the tensors' parts at one
                                       position, and a sample has as many of them as its length

The valid headers are the bitmap of what is complete. A slot is an entry only if its header and the checksum of its
payload are valid. Anything else (a slot that was never written, a payload whose writer was killed, a flipped bit, bytes
of another file) is a miss. The payload is written before the header. Two writers of one entry write the same bytes, so
they need no lock.

The files are read with `pread` and not through a memory map: another process may truncate a file at any time, which is
a short read here and would be SIGBUS in a map. The page cache holds one copy for all ranks either way.

A process holds a shared lock (flock) on every file that it uses; the lock ends with the process. Only a process that
gets the exclusive lock removes a file, so no file in use is removed. An exclusive lock on the folder is held while
entries are written, so that all ranks of a machine share one quota.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional

from ranvier.block import State, carried, named
from ranvier.system.untrusted_file import read_json

Lengths = npt.NDArray[np.int64] | None
"""[samples] positions of each sample; None where all have one shape."""

Precision = Literal["half", "full"]
"""Number format of stored fp32 and fp64 values: fp16 or their own."""

WHERE = "the frozen blocks"
"""Who returned a state, in the errors of `ranvier.block.named`."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)}
_ALIGNED_BYTES = 16
_ROUNDS_TO_INF = 65520.0
"""The smallest number that becomes infinity in fp16."""
_Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 40)]
_DESCRIPTION = TypeAdapter(Annotated[
    list[tuple[str, Annotated[list[_Size], Field(max_length=16)], str]], Field(min_length=1, max_length=1000)])

_MAGIC = b"RVcache1"
_HEADER = struct.Struct("<8s8sqI")
_HEADER_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _HEADER_CHECKSUM.size
PAGE_BYTES = 4096
_WHOLE_PAGES_FROM = 1 << 15
"""Slots of this size begin at page boundaries, so that the disk space of one can be freed; smaller slots are packed."""
_PACKED_BYTES = 64
_MAX_DESCRIPTION_BYTES = 1 << 18
_MAX_OPEN_ATTEMPTS = 20
_PUNCH_HOLE_KEEP_SIZE = 3
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is not followed, and a named pipe does not block."""

_CACHE_FILE = re.compile(r"\.?([0-9a-f]{32})\.(bin|json)(\.[0-9a-f]{12})?")
_RESERVED_BYTES = 1 << 15
_METADATA_SHARE = 256
"""The file system counts its records of a sparse file's extents as the file's: at most one byte for so many of data."""
_LOCK_TIMEOUT_SECONDS = 2.0
_LOCK_POLL_SECONDS = 0.002


class NotCacheable(Exception):
    """A state or a file that cannot be cached; the text gives the reason. The cache computes instead and warns once."""


# --- rows as bytes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a row, or of a position of it: its shape without the samples' dim (and the positions'), its dtype
    in the state and in the payload, its offset there in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        """Numbers in one row, or at one position."""
        return prod(self.shape)

    @property
    def bytes(self) -> slice:
        """The part's bytes in the payload."""
        return slice(self.offset, self.offset + self.numel * self.stored.itemsize)


@dataclass(frozen=True)
class RowFormat:
    """How one sample's row of a carried state becomes bytes: its tensors in the order of their bytes.

    With the precision "half", fp32 and fp64 are stored as fp16, which has 11 significant bits where bf16 has 8;
    activations behind a norm and their residuals stay far within its range. A row with a finite value outside that
    range is not stored. Half precision, integers and masks are stored as they are.

    positions: where rows have lengths of their own, the most positions of a row; dim 1 of each tensor is the positions,
    and a shorter row has fewer bytes. None: all rows have one shape.
    """

    parts: tuple[Part, ...]
    positions: int | None = None

    @property
    def record_bytes(self) -> int:
        """Size of one position, or of one row where all have one shape."""
        return _round_up(self.parts[-1].bytes.stop, _ALIGNED_BYTES)

    @property
    def payload_bytes(self) -> int:
        """Size of one row, the longest where they differ."""
        return self.record_bytes * (1 if self.positions is None else self.positions)

    @staticmethod
    def of(state: State, precision: Precision, positions: int | None = None) -> RowFormat:
        """The format of the rows of `state`, whose first dim is samples. NotCacheable if it is not, or for other
        dtypes. positions: the most that a row may have, where rows have lengths of their own."""
        tensors = named(state, WHERE)
        if len({tensor.shape[:1] for tensor in tensors.values()}) != 1 or not all(map(Tensor.dim, tensors.values())):
            raise NotCacheable("the state's tensors do not all have the samples as their first dim")
        seconds = {tuple(tensor.shape[1:2]) for tensor in tensors.values()}
        if positions is not None and (len(seconds) != 1 or () in seconds):
            raise NotCacheable("samples have different lengths, and not all of the state's tensors have the positions "
                               "as their second dim")
        first = 1 if positions is None else 2
        return _row_format([(name, tuple(tensor.shape[first:]), tensor.dtype) for name, tensor in tensors.items()],
                           precision, positions)

    def describe(self) -> list[list[Any]]:
        """A description for JSON: (name, shape, dtype) of each tensor of the longest row."""
        first = [] if self.positions is None else [self.positions]
        return [[part.name, [*first, *part.shape], str(part.dtype).removeprefix("torch.")] for part in self.parts]

    @staticmethod
    def from_description(description: object, precision: Precision, *, own_lengths: bool = False) -> RowFormat:
        """The inverse of `describe`. NotCacheable for anything that it did not write. own_lengths: of rows that have
        lengths of their own."""
        first = 1 if own_lengths else 0
        try:
            rows = [(name, tuple(shape[first:]), _DTYPES[dtype])
                    for name, shape, dtype in _DESCRIPTION.validate_python(description)]
            positions = {tuple(shape[:first]) for _, shape, _ in _DESCRIPTION.validate_python(description)}
            if len(positions) != 1 or (own_lengths and () in positions):
                raise NotCacheable("not a description of a state with positions")
        except (ValidationError, KeyError) as error:
            raise NotCacheable("not a description of a state") from error
        names = {name for name, _, _ in rows}
        if len(names) != len(rows) or (len(rows) > 1 and "" in names):
            raise NotCacheable("these names are not those of a state")
        return _row_format(rows, precision, positions.pop()[0] if own_lengths else None)

    def encode(self, state: State) -> tuple[Tensor, Tensor]:
        """([n, payload_bytes] uint8 on the state's device, [n] bool: rows whose values are in the range of their
        format). Rows with lengths of their own have the bytes of the state's positions."""
        tensors = named(state, WHERE)
        first = next(iter(tensors.values()))
        count = 1 if self.positions is None else first.shape[1]
        records = torch.zeros(first.shape[0], count, self.record_bytes, dtype=torch.uint8, device=first.device)
        in_range = torch.ones(first.shape[0], dtype=torch.bool, device=first.device)
        for part in self.parts:
            rows = tensors[part.name].reshape(len(records), count * part.numel)
            # A copy, as a single row may have any stride and still count as contiguous.
            stored = rows.to(part.stored, copy=True, memory_format=torch.contiguous_format)
            is_narrowed = part.stored is not part.dtype and part.numel > 0
            # Infinities and NaNs are kept, so where there are any, which is rare, all values have to be compared.
            if is_narrowed and not bool((rows.abs().amax(dim=1) < _ROUNDS_TO_INF).all()):
                in_range &= (stored.isinf() == rows.isinf()).all(dim=1)
            records[..., part.bytes] = stored.view(torch.uint8).reshape(len(records), count, -1)
        return records.flatten(1), in_range

    def decode(self, payload: Tensor, length: int | None = None) -> State:
        """The rows of `payload` [n, bytes] uint8, on its device; the state may share its memory. length: positions of
        the state, where rows have lengths of their own; those that a row lacks are zero."""
        if self.positions is None:
            return carried({part.name: payload[:, part.bytes].view(part.stored).to(part.dtype)
                            .reshape(len(payload), *part.shape).contiguous() for part in self.parts})
        assert length is not None and length * self.record_bytes >= payload.shape[1]
        whole = functional.pad(payload, (0, length * self.record_bytes - payload.shape[1]))
        records = whole.reshape(len(payload), length, self.record_bytes)
        return carried({part.name: records[..., part.bytes].contiguous().view(part.stored).to(part.dtype)
                        .reshape(len(payload), length, *part.shape) for part in self.parts})


def _row_format(rows: Sequence[tuple[str, tuple[int, ...], torch.dtype]], precision: Precision,
                positions: int | None) -> RowFormat:
    parts: list[Part] = []
    for name, shape, dtype in rows:
        if dtype not in _DTYPES.values():
            raise NotCacheable(f"tensors of {dtype} are not cached")
        is_narrowed = precision == "half" and dtype in (torch.float32, torch.float64)
        parts.append(Part(name=name, shape=shape, dtype=dtype, stored=torch.float16 if is_narrowed else dtype,
                          offset=_round_up(parts[-1].bytes.stop, _ALIGNED_BYTES) if parts else 0))
    return RowFormat(tuple(parts), positions)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# --- the folder ------------------------------------------------------------------------------------------------------


class Folder:
    """The folder of the cache: its quota, and which files may be removed.

    path: None for a folder of this user in the system's temporary folder, whose files are removed when no run uses
    them. quota_bytes: the most disk space that all cache files in it may occupy.
    """

    def __init__(self, path: Path | None, quota_bytes: int) -> None:
        self.is_temporary = path is None
        self.path = path or Path(tempfile.gettempdir()) / f"ranvier-cache-{os.getuid()}"
        self.quota_bytes = quota_bytes

    def create(self) -> None:
        """Create it if it does not exist. OSError; NotCacheable if another user owns the temporary one."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700 if self.is_temporary else 0o777)
        found = os.stat(self.path, follow_symlinks=not self.is_temporary)
        if self.is_temporary and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
            raise NotCacheable(f"{self.path} belongs to another user")

    def free_bytes(self) -> int:
        """Disk space that may still be written; holes of sparse files do not count as used."""
        used = sum(512 * entry.st_blocks for _, entry in self._files())
        return self.quota_bytes - used - used // _METADATA_SHARE - _RESERVED_BYTES

    def remove_unused(self, keep: Collection[str] = (), *, min_age_seconds: float = 0.0,
                      needed_bytes: int | None = None, prefix: str = "") -> None:
        """Remove files that no process uses, the oldest first, until `needed_bytes` are free. The keys in `keep` and
        files that were written less than `min_age_seconds` ago stay, and those whose keys do not begin with
        `prefix`."""
        written: dict[str, float] = {}
        for key, entry in self._files():
            if key.startswith(prefix):
                written[key] = max(written.get(key, 0.0), entry.st_mtime)
        for key in sorted(written, key=written.__getitem__):
            if needed_bytes is not None and self.free_bytes() >= needed_bytes:
                return
            if key not in keep and written[key] <= time.time() - min_age_seconds:
                self.remove(key)

    def remove(self, key: str) -> None:
        """Remove the files of `key` unless a process uses them. Never raises OSError."""
        binary = self.path / f"{key}.bin"
        file = None
        with suppress(OSError):  # another process uses the file, or the folder is gone
            with suppress(FileNotFoundError):
                file = os.open(binary, os.O_RDWR | _OPEN_FLAGS)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The description goes first: a file that is half removed looks unfinished.
            for path in (self.path / f"{key}.json", *self.path.glob(f".{key}.json.*"), binary):
                path.unlink(missing_ok=True)
        if file is not None:
            os.close(file)

    @contextmanager
    def write_lock(self) -> Iterator[bool]:
        """Hold the lock of the machine's one writer; False if another writer kept it for `_LOCK_TIMEOUT_SECONDS`. On a
        file system without locks several may write, and exceed the quota by what they write. OSError without a
        folder."""
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield lock(file, exclusive=True)
        finally:
            os.close(file)

    def remove_if_empty(self) -> None:
        """Remove the temporary folder if nothing is in it."""
        if self.is_temporary:
            with suppress(OSError):
                self.path.rmdir()

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """(key, stat) of every cache file."""
        with suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if match := _CACHE_FILE.fullmatch(entry.name):
                    with suppress(OSError):
                        yield match[1], entry.stat(follow_symlinks=False)


def lock(file: int, *, exclusive: bool) -> bool:
    """Lock an open file or folder; False if others keep theirs. True as well if the file system has no locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        except OSError:
            return True
        time.sleep(_LOCK_POLL_SECONDS)


# --- one file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Entries:
    """Entries that a read has found in `store`.

    places: [n] int64, their places among the requested samples; payload: [n, payload_bytes] uint8; seconds: the
    duration of the read; waited: how much of it the calling thread waited.
    """

    store: Store
    places: Tensor
    payload: Tensor
    seconds: float
    waited: float


class Store:
    """An open file with the entries of one frozen depth. Threads may read while one writes. Use `find` or `create`.

    lengths: positions of each sample, where rows have lengths of their own; None where all have one shape.
    """

    def __init__(self, folder: Folder, key: str, rows: RowFormat, file: int, lengths: Lengths = None) -> None:
        self.folder, self.key, self.rows, self._file, self._lengths = folder, key, rows, file, lengths
        self._tag = hashlib.blake2b(json.dumps([key, rows.describe()]).encode(), digest_size=8).digest()
        slot = HEADER_BYTES + rows.payload_bytes
        self._has_own_pages = slot >= _WHOLE_PAGES_FROM
        self.stride = _round_up(slot, PAGE_BYTES if self._has_own_pages else _PACKED_BYTES)

    @staticmethod
    def find(folder: Folder, key: str, precision: Precision, lengths: Lengths = None) -> Store | None:
        """The file of `key` if there is one with a valid description. OSError if it cannot be opened; NotCacheable if
        something that is not a file has its name."""
        rows = _read_description(folder.path / f"{key}.json", key, precision, lengths)
        if rows is None or rows.payload_bytes > folder.quota_bytes:
            return None
        try:
            return Store(folder, key, rows, _open(folder.path / f"{key}.bin", os.O_RDWR), lengths)
        except FileNotFoundError:
            return None

    @staticmethod
    def create(folder: Folder, key: str, rows: RowFormat, precision: Precision, about: dict[str, Any],
               lengths: Lengths = None) -> Store:
        """The file of `key`, created if it does not exist. NotCacheable if it has entries of another format;
        OSError."""
        folder.create()
        file = _open(folder.path / f"{key}.bin", os.O_RDWR | os.O_CREAT)
        try:
            found = _read_description(folder.path / f"{key}.json", key, precision, lengths)
            if found is None:
                _write_description(folder.path / f"{key}.json", key, rows, about)
            elif found != rows:
                raise NotCacheable("the state's shapes differ between microbatches, or from those of an earlier run")
            return Store(folder, key, rows, file, lengths)
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        """Close the file and release its lock. No thread may be reading."""
        os.close(self._file)

    def has(self, sample: int) -> bool:
        """Whether the header of an entry is valid; its payload is not read."""
        return self._payload_checksum(sample) is not None

    def read(self, samples: Sequence[int], *, pinned: bool = False) -> Entries:
        """Those entries of `samples` that exist. A read error, a damaged slot or a short file is a miss."""
        start = time.perf_counter()
        checksums = [(place, checksum) for place, sample in enumerate(samples)
                     if (checksum := self._payload_checksum(sample)) is not None]
        width = max((self.own_bytes(samples[place]) for place, _ in checksums), default=self.rows.payload_bytes)
        payload = torch.zeros(len(checksums), width, dtype=torch.uint8, pin_memory=pinned and bool(checksums))
        rows = payload.numpy()
        places: list[int] = []
        for place, checksum in checksums:
            row = rows[len(places), :self.own_bytes(samples[place])].data
            if self._read_into(row, samples[place] * self.stride + HEADER_BYTES) and zlib.crc32(row) == checksum:
                places.append(place)
        seconds = time.perf_counter() - start
        return Entries(store=self, places=torch.tensor(places, dtype=torch.int64), payload=payload[:len(places)],
                       seconds=seconds, waited=seconds)

    def write(self, sample: int, payload: npt.NDArray[np.uint8]) -> None:
        """Write one entry. OSError or OverflowError if the disk does not take it; the slot is then a miss. payload: may
        have bytes behind those of the sample, which are not written."""
        start, own = sample * self.stride, payload[:self.own_bytes(sample)].data
        self._write_from(own, start + HEADER_BYTES)
        header = _HEADER.pack(_MAGIC, self._tag, sample, zlib.crc32(own))
        self._write_from(memoryview(header + _HEADER_CHECKSUM.pack(zlib.crc32(header))), start)

    def clear(self) -> None:
        """Drop all entries, for every process that has the file open."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)

    def own_bytes(self, sample: int) -> int:
        """Bytes of a sample's payload."""
        if self.rows.positions is None or self._lengths is None:
            return self.rows.payload_bytes
        return int(self._lengths[sample]) * self.rows.record_bytes

    def pages(self, sample: int) -> range:
        """The numbers of the pages of the slot that the sample's bytes are in."""
        start = sample * self.stride
        return range(start // PAGE_BYTES, -(-(start + HEADER_BYTES + self.own_bytes(sample)) // PAGE_BYTES))

    def free_slots(self, samples: Sequence[int]) -> bool:
        """Free the disk space of these slots, which are misses then. False if that is not possible: slots share pages,
        or the file system has no holes."""
        return self._has_own_pages and all(
            _punch_hole(self._file, sample * self.stride, self.stride) for sample in samples)

    def _payload_checksum(self, sample: int) -> int | None:
        """The checksum in a valid header; None if there is no entry."""
        header = bytearray(HEADER_BYTES)
        if not self._read_into(memoryview(header), sample * self.stride):
            return None
        magic, tag, number, checksum = _HEADER.unpack_from(header)
        is_whole = header[_HEADER.size:] == _HEADER_CHECKSUM.pack(zlib.crc32(header[:_HEADER.size]))
        return int(checksum) if is_whole and (magic, tag, number) == (_MAGIC, self._tag, sample) else None

    def _read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill `buffer`; False if the file ends before, or cannot be read."""
        done = 0
        with suppress(OSError, OverflowError):
            while done < len(buffer):
                count = os.preadv(self._file, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done == len(buffer)

    def _write_from(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._file, data[done:], offset + done)


def _open(path: Path, flags: int) -> int:
    """A file on which a shared lock is held, and which still has its name then, so that nobody removes it. OSError;
    NotCacheable for what is not a file."""
    for _ in range(_MAX_OPEN_ATTEMPTS):
        file = os.open(path, flags | _OPEN_FLAGS, 0o600)
        is_held = False
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise NotCacheable(f"{path} is not a file")
            lock(file, exclusive=False)
            with suppress(FileNotFoundError):  # it was removed between opening and locking: try again
                is_held = os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
            if is_held:
                return file
        finally:
            if not is_held:
                os.close(file)
    raise NotCacheable(f"{path} is removed whenever it is created")


def _read_description(path: Path, key: str, precision: Precision, lengths: Lengths) -> RowFormat | None:
    """What KEY.json describes; None if it does not exist or is damaged."""
    try:
        document = read_json(path, _MAX_DESCRIPTION_BYTES, links=False)
        if not isinstance(document, dict) or document.pop("digest", None) != digest_of(document) or document.get(
                "key") != key:
            return None
        return RowFormat.from_description(document.get("form"), precision, own_lengths=lengths is not None)
    except (OSError, ValueError, NotCacheable):
        return None


def _write_description(path: Path, key: str, rows: RowFormat, about: dict[str, Any]) -> None:
    document = {"key": key, "form": rows.describe(), "about": about}
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        unfinished.write_text(json.dumps({**document, "digest": digest_of(document)}, indent=1), encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def digest_of(document: dict[str, Any]) -> str:
    """A hash of what can be JSON: 32 hexadecimal digits. It is also the key of the files of what `document`
    describes."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


@cache
def _fallocate() -> Any:
    """The C library's function; None if it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _punch_hole(file: int, start: int, length: int) -> bool:
    """Free the disk space of a part of a file."""
    function = _fallocate()
    return function is not None and bool(function(file, _PUNCH_HOLE_KEEP_SIZE, start, length) == 0)
