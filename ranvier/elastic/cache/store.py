"""The files of a run's cache on a machine, shared by its ranks: one for each frozen depth, with a slot for each sample.

    PARENT/RUN/     the folder of one run; each rank that uses it holds a shared lock (flock) on it
      KEY.json      the form of a row and its crc32, written whole before the first row
      KEY.bin       sparse: slot i begins at byte i * stride: checksum, filled up to 16 bytes | payload

    checksum   crc32 of the key, the form, the sample's number and the payload; 0 where nothing was written
    payload    tensor | tensor | ...   in the order of the state; each begins at a multiple of 16 bytes
               position | position | ... where samples have lengths of their own: each has the tensors' parts at one
                                       position, and a sample has as many of them as its length

The checksums are the bitmap of what is written; the payload is written before its checksum. A slot whose checksum is
not that of its payload (its writer was killed, a bit has flipped, a file is too short) is a miss. Two writers of one
entry write the same bytes, so they need no lock.

Slots are read with `pread` and not through a memory map: a file that is cut off, or a disk that fails, is a miss here
and would be SIGBUS in a map. The page cache holds one copy for all ranks either way.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from torch.nn import functional

from ranvier.block import State, carried, named
from ranvier.system.atomic_file import write_atomically
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
HEADER_BYTES = _ALIGNED_BYTES
_CHECKSUM_BYTES = 4
_PAGE_BYTES = 4096
_WHOLE_PAGES_FROM = 1 << 15
"""Slots of this size begin at page boundaries, so that each occupies no more disk space than its own; smaller slots are
packed."""
_ROUNDS_TO_INF = 65520.0
"""The smallest number that becomes infinity in fp16."""
_MAX_FORM_BYTES = 1 << 18
_Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 40)]
_Form = tuple[_Size | None, Annotated[list[tuple[str, Annotated[list[_Size], Field(max_length=16)], str]],
                                      Field(min_length=1, max_length=1000)]]
_FORM = TypeAdapter(tuple[int, _Form])
"""What KEY.json says: the crc32 of a form, and the form: positions, and name, shape and dtype of each tensor."""
_ABANDONED_AFTER_SECONDS = 3600.0
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is not followed, and a named pipe does not block."""


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

    def describe(self) -> _Form:
        """For JSON: the positions, and name, shape and dtype of each tensor."""
        return self.positions, [(part.name, [*part.shape], str(part.dtype).removeprefix("torch."))
                                for part in self.parts]

    @staticmethod
    def from_description(description: _Form, precision: Precision) -> RowFormat:
        """The inverse of `describe`. KeyError for other dtypes."""
        positions, parts = description
        return _row_format([(name, tuple(shape), _DTYPES[dtype]) for name, shape, dtype in parts], precision, positions)

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


def _checksum_of(form: _Form) -> int:
    return zlib.crc32(json.dumps(form).encode())


def _write_form(path: Path, rows: RowFormat) -> None:
    form = rows.describe()
    write_atomically(path, json.dumps([_checksum_of(form), form]))


def _read_form(path: Path, precision: Precision) -> RowFormat | None:
    """What `_write_form` wrote; None if it is damaged or does not exist. OSError if it cannot be read."""
    try:
        checksum, form = _FORM.validate_python(read_json(path, _MAX_FORM_BYTES, links=False))
        return RowFormat.from_description(form, precision) if checksum == _checksum_of(form) else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def digest_of(document: dict[str, Any]) -> str:
    """A hash of what can be JSON: 32 hexadecimal digits."""
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- the folder of a run ---------------------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run's cache. A lock on it is held from `acquire` to `release`, so that no rank removes it under
    another.

    parent: folder with those of several runs; None for a folder of this user in the system's temporary folder, where
    folders of killed runs are removed after an hour. max_bytes: the most disk space that the files may occupy. Each
    rank may exceed it by a page per microbatch.
    """

    def __init__(self, parent: Path | None, run: str, max_bytes: int) -> None:
        self._is_temporary = parent is None
        self._parent = parent or Path(tempfile.gettempdir()) / f"ranvier-cache-{os.getuid()}"
        self.path, self.max_bytes = self._parent / digest_of({"run": run}), max_bytes
        self._handle: int | None = None

    def acquire(self) -> None:
        """Create the folder if it does not exist, and lock it. OSError; NotCacheable if another user owns the temporary
        one."""
        if self._handle is None:
            self._parent.mkdir(parents=True, exist_ok=True, mode=0o700 if self._is_temporary else 0o777)
            found = os.stat(self._parent, follow_symlinks=not self._is_temporary)
            if self._is_temporary and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
                raise NotCacheable(f"{self._parent} belongs to another user")
            self.path.mkdir(exist_ok=True)
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            _lock(self._handle, fcntl.LOCK_SH)
            if self._is_temporary:
                _remove_abandoned(self._parent)

    def release(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def free_bytes(self) -> int:
        """Disk space that may still be written; holes of sparse files do not count as used. OSError without a
        folder."""
        blocks = sum(entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(self.path))
        return self.max_bytes - 512 * blocks

    def remove_others(self, prefix: str, keep: Collection[str]) -> None:
        """Remove the files whose keys begin with `prefix`, but for those of the keys in `keep`."""
        with suppress(OSError):
            for path in self.path.glob(f"{prefix}*"):
                if path.stem not in keep:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder unless another rank has opened it. Never raises OSError."""
        self.release()
        _remove(self.path)
        if self._is_temporary:
            with suppress(OSError):  # other runs have folders there
                self._parent.rmdir()


def _remove(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(handle, fcntl.LOCK_EX):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _remove_abandoned(parent: Path) -> None:
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            if entry.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED_AFTER_SECONDS:
                _remove(parent / entry.name)


def _lock(handle: int, operation: int) -> bool:
    """Lock a folder without waiting; False if others keep theirs. True as well if the file system has no locks."""
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# --- one file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Entries:
    """Entries that a read has found in `store`.

    places: [n] int64, their places among the requested samples; slots: [n, HEADER_BYTES + bytes] uint8, which begin
    with the header; seconds: the duration of the read.
    """

    store: Store
    places: Tensor
    slots: Tensor
    seconds: float


class Store:
    """An open file with the entries of `depth` frozen blocks. Threads may read while one writes. Use `find` or
    `create`.

    lengths: positions of each sample, where rows have lengths of their own; None where all have one shape.
    """

    def __init__(self, folder: RunFolder, key: str, depth: int, rows: RowFormat, lengths: Lengths, *,
                 creates: bool = False) -> None:
        self.key, self.depth, self.rows, self._lengths = key, depth, rows, lengths
        self._tag = zlib.crc32(key.encode(), _checksum_of(rows.describe()))
        self._has_own_pages = HEADER_BYTES + rows.payload_bytes >= _WHOLE_PAGES_FROM
        self.stride = self._on_disk(rows.payload_bytes)
        self._file = os.open(folder.path / f"{key}.bin", _OPEN_FLAGS | (os.O_CREAT if creates else 0), 0o600)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise NotCacheable(f"{folder.path / key}.bin is not a file")
        self.unverified: npt.NDArray[np.bool_] | None = None
        """[samples]: the entries that were there when the file was opened; None once one of them has been compared."""

    @staticmethod
    def find(folder: RunFolder, key: str, depth: int, precision: Precision, lengths: Lengths) -> Store | None:
        """The file of `key`; None if there is none, or the form of its rows is damaged. OSError; NotCacheable if it is
        not a file."""
        rows = _read_form(folder.path / f"{key}.json", precision)
        if rows is None or rows.payload_bytes > folder.max_bytes:
            return None
        with suppress(FileNotFoundError):
            return Store(folder, key, depth, rows, lengths)
        return None

    @staticmethod
    def create(folder: RunFolder, key: str, depth: int, rows: RowFormat, lengths: Lengths) -> Store:
        """A new file of `key`, or the one that another rank has just created. OSError; NotCacheable if something that
        is not a file has its name."""
        _write_form(folder.path / f"{key}.json", rows)
        return Store(folder, key, depth, rows, lengths, creates=True)

    def close(self) -> None:
        """Close the file. No thread may be reading."""
        os.close(self._file)

    def written(self, num_samples: int) -> npt.NDArray[np.bool_]:
        """[num_samples]: which slots were written, as far as their checksums say."""
        return np.fromiter((any(os.pread(self._file, _CHECKSUM_BYTES, sample * self.stride))
                            for sample in range(num_samples)), bool, num_samples)

    def read(self, samples: Sequence[int], *, pinned: bool = False) -> Entries:
        """Those entries of `samples` that exist. A read error, a damaged slot or a short file is a miss."""
        start = time.perf_counter()
        width = HEADER_BYTES + max(map(self._payload_bytes, samples), default=0)
        slots = torch.zeros(len(samples), width, dtype=torch.uint8, pin_memory=pinned and bool(samples))
        found, rows = list[int](), slots.numpy()
        for place, sample in enumerate(samples):
            # the place of the next entry: a slot that is not one is written over
            slot = rows[len(found), :HEADER_BYTES + self._payload_bytes(sample)]
            with suppress(OSError, OverflowError):
                if os.preadv(self._file, [slot.data], sample * self.stride) == len(slot) and any(
                        slot[:_CHECKSUM_BYTES]) and slot[:_CHECKSUM_BYTES].tobytes() == self._checksum(
                            sample, slot[HEADER_BYTES:]):
                    found.append(place)
                    continue
            rows[len(found)] = 0
        return Entries(store=self, places=torch.tensor(found, dtype=torch.int64), slots=slots[:len(found)],
                       seconds=time.perf_counter() - start)

    def write(self, sample: int, payload: npt.NDArray[np.uint8]) -> None:
        """Write one entry. OSError or OverflowError if the disk does not take it; the slot is then a miss. payload: may
        have bytes behind those of the sample, which are not written."""
        start, own = sample * self.stride, payload[:self._payload_bytes(sample)]
        self._write_from(own.data, start + HEADER_BYTES)
        self._write_from(memoryview(self._checksum(sample, own)), start)

    def clear(self) -> None:
        """Drop all entries, for every process that has the file open."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)

    def bytes_of(self, sample: int) -> int:
        """Disk space of a sample's slot."""
        return self._on_disk(self._payload_bytes(sample))

    def _on_disk(self, payload_bytes: int) -> int:
        return _round_up(HEADER_BYTES + payload_bytes, _PAGE_BYTES if self._has_own_pages else _ALIGNED_BYTES)

    def _payload_bytes(self, sample: int) -> int:
        return self.rows.payload_bytes if self._lengths is None else int(
            self._lengths[sample]) * self.rows.record_bytes

    def _checksum(self, sample: int, payload: npt.NDArray[np.uint8]) -> bytes:
        return zlib.crc32(payload.data, zlib.crc32(sample.to_bytes(8, "little"), self._tag)).to_bytes(
            _CHECKSUM_BYTES, "little")

    def _write_from(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._file, data[done:], offset + done)


# --- reading ahead ---------------------------------------------------------------------------------------------------


class Reader:
    """Reads for one thread, which must call `forget` before it closes a store.

    Only the microbatches of the last call of `prefetch` are read ahead, so memory is bounded by them and by
    `max_bytes`. The caller reads a microbatch that the thread has not begun, and one with which the thread failed.
    """

    def __init__(self, max_bytes: int, *, pinned: bool) -> None:
        self._max_bytes, self._pinned = max_bytes, pinned
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, ...], Future[Entries]] = {}
        self._running: list[Future[Entries]] = []

    def prefetch(self, microbatches: Sequence[Sequence[int]], store: Store) -> None:
        """Start to read these microbatches, in this order."""
        wanted: list[tuple[int, ...]] = []
        free_bytes = self._max_bytes
        for samples in microbatches:
            free_bytes -= len(samples) * store.rows.payload_bytes
            if free_bytes < 0:
                break
            wanted.append(tuple(samples))
        for samples in self._ahead.keys() - set(wanted):
            self._ahead.pop(samples).cancel()
        for samples in wanted:
            if samples not in self._ahead:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="ranvier-cache")
                self._ahead[samples] = self._thread.submit(store.read, samples, pinned=self._pinned)
        self._running = [future for future in {*self._running, *self._ahead.values()} if not future.done()]

    def read(self, samples: Sequence[int], store: Store) -> list[Entries]:
        """The entries of `samples`: those that were read ahead, and those that were not there then."""
        found: list[Entries] = []
        future = self._ahead.pop(tuple(samples), None)
        if future is not None and not future.cancel() and future.exception() is None:
            found = [entries for entries in (future.result(),) if entries.store is store]
        missing = torch.ones(len(samples), dtype=torch.bool)
        for entries in found:
            missing[entries.places] = False
        places = missing.nonzero().flatten()
        if len(places):
            now = store.read([samples[place] for place in places.tolist()], pinned=self._pinned)
            found.append(replace(now, places=places[now.places]))
        return found

    def forget(self) -> None:
        """Return when nothing is being read, and drop what was read ahead."""
        for future in self._ahead.values():
            future.cancel()
        for future in [*self._ahead.values(), *self._running]:
            if not future.cancelled():
                future.exception()
        self._ahead, self._running = {}, []

    def close(self) -> None:
        """End the thread."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
