"""The files of a run's cache on a machine: one for each frozen depth, shared by the ranks of the machine.

    PARENT/ranvier-cache-TOKEN/    one start of a run; each rank that caches holds a shared lock (flock) on the folder
      KEY.rows                     a row for each sample, in their order: crc32 | payload

    payload    tensor | tensor | ...       in the order of the state
               position | position | ...   where samples have lengths of their own: each has the tensors' parts at one
                                           position, and a sample has as many of them as its length

A checksum covers the key, the format of the rows, the sample's number and the payload. A row that has not been written,
that is being written, or whose writer was killed is a miss. Two writers of one row write the same bytes, so they need
no lock.

Rows are read with `preadv` rather than a memory map: a truncated file or a failing disk is a miss here, and would be a
SIGBUS with a map. The page cache holds one copy for all ranks either way.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from ranvier.block import State, as_named_tensors, from_named_tensors
from ranvier.system.file_lock import lock_now, open_folder, remove_unlocked

Lengths = npt.NDArray[np.int64]
"""[samples] positions of each sample."""

Precision = Literal["half", "full"]
"""Number format of stored fp32 and fp64 values: fp16 or their own."""

WHERE = "the frozen blocks"
"""The source of a state in the errors of `ranvier.block.as_named_tensors`."""

CHECKSUM_BYTES = 4
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool}
_PREFIX = "ranvier-cache-"
_ABANDONED_AFTER_SECONDS = 60.0
_AHEAD_BYTES = 1 << 28


class NotCacheable(Exception):
    """A state that cannot be cached; the text gives the reason. The cache computes instead and warns once."""


# --- rows as bytes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One tensor of a row, or of one of its positions: its shape without the samples' dim (and the positions' dim), and
    its dtype in the state and in the payload."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the payload."""
        return prod(self.shape) * self.stored.itemsize


@dataclass(frozen=True)
class RowFormat:
    """Format of one sample's row of a carried state: its tensors in the order of their bytes.

    With the precision "half", fp32 and fp64 are stored as fp16, which has 11 significant bits where bf16 has 8;
    activations after a norm and their residuals stay far within its range. Half precision, integers and masks are
    stored unchanged.

    has_positions: rows have different lengths, and dim 1 of each tensor is the positions.
    """

    parts: tuple[Part, ...]
    has_positions: bool = False

    @property
    def record_bytes(self) -> int:
        """Size of one position, or of one row if all rows have the same shape."""
        return sum(part.num_bytes for part in self.parts)

    @staticmethod
    def from_state(state: State, precision: Precision, *, count: int, has_positions: bool = False) -> RowFormat:
        """The format of the rows of `state`. NotCacheable if its tensors do not all have `count` samples as their first
        dim (and positions as their second dim, if rows have different lengths), or for other dtypes."""
        tensors = as_named_tensors(state, WHERE)
        if any(tensor.shape[:1] != (count,) for tensor in tensors.values()):
            raise NotCacheable("the state's tensors do not all have the samples as their first dim")
        seconds = {tuple(tensor.shape[1:2]) for tensor in tensors.values()}
        if has_positions and (len(seconds) != 1 or () in seconds):
            raise NotCacheable("samples have different lengths, and not all of the state's tensors have the positions "
                               "as their second dim")
        parts: list[Part] = []
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise NotCacheable(f"tensors of {tensor.dtype} are not cached")
            is_narrowed = precision == "half" and tensor.dtype in (torch.float32, torch.float64)
            parts.append(Part(name, tuple(tensor.shape[1 + has_positions:]), tensor.dtype,
                              torch.float16 if is_narrowed else tensor.dtype))
        return RowFormat(tuple(parts), has_positions)

    def encode(self, state: State) -> tuple[Tensor, Tensor]:
        """([n, CHECKSUM_BYTES + payload] uint8 on the state's device, whose checksums are still 0; [n] bool: rows whose
        finite values are in the range of their format)."""
        tensors = as_named_tensors(state, WHERE)
        lead = next(iter(tensors.values())).shape[:1 + self.has_positions]
        records, in_range = list[Tensor](), torch.ones(lead[0], dtype=torch.bool)
        for part in self.parts:
            rows = tensors[part.name].reshape(*lead, prod(part.shape))
            # A copy, since a single row may have any stride and still count as contiguous.
            stored = rows.to(part.stored, copy=True, memory_format=torch.contiguous_format)
            if part.stored is not part.dtype:
                in_range &= (stored.isinf() == rows.isinf()).flatten(1).all(dim=1).cpu()
            records.append(stored.view(torch.uint8))
        payload = torch.cat(records, dim=-1).flatten(1)
        return functional.pad(payload, (CHECKSUM_BYTES, 0)), in_range

    def decode(self, rows: Tensor, length: int | None) -> State:
        """The state of `rows`, as returned by `encode`, on their device. length: positions of the state, if rows have
        different lengths; positions that a row lacks are zero."""
        payload = rows[:, CHECKSUM_BYTES:]
        lead = (len(payload),) if length is None else (len(payload), length)
        if length is not None:
            payload = functional.pad(payload, (0, length * self.record_bytes - payload.shape[1]))
        pieces = payload.reshape(*lead, self.record_bytes).split([part.num_bytes for part in self.parts], dim=-1)
        found: dict[str, Tensor] = {}
        for part, piece in zip(self.parts, pieces, strict=True):
            stored = torch.empty(*lead, *part.shape, dtype=part.stored, device=payload.device)
            stored.view(-1).view(torch.uint8).view(piece.shape).copy_(piece)
            found[part.name] = stored.to(part.dtype)
        return from_named_tensors(found)


# --- the folder of a run ---------------------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run's cache, which the run's last rank removes.

    parent: None for the system's temporary folder. token: known only to the ranks of this start of the run. Cache
    folders of killed runs and starts, which no process has locked, are removed a minute after their last file was
    created.
    """

    def __init__(self, parent: Path | None, token: str) -> None:
        self._is_temporary = parent is None
        self._parent = parent or Path(tempfile.gettempdir())
        self.path = self._parent / f"{_PREFIX}{token}"
        self._handle: int | None = None

    def acquire(self) -> None:
        """Create the folder if it does not exist, and lock it. May raise OSError."""
        if self._handle is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True, mode=0o700)
            self._handle = open_folder(self.path)
            if self._is_temporary and os.fstat(self._handle).st_uid != os.getuid():
                raise OSError(f"{self.path} belongs to another user")
            lock_now(self._handle, shared=True)
            for folder in self._parent.glob(f"{_PREFIX}*"):
                with suppress(OSError):
                    if folder.lstat().st_mtime < time.time() - _ABANDONED_AFTER_SECONDS:
                        remove_unlocked(folder)

    def remove_others(self, prefix: str, keep: set[str]) -> None:
        """Remove the files whose keys begin with `prefix`, except those with keys in `keep`."""
        with suppress(OSError):
            for path in self.path.glob(f"{prefix}*"):
                if path.stem not in keep:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Release the lock, and remove the folder unless another rank uses it. Never raises OSError."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            with suppress(OSError):
                remove_unlocked(self.path)


# --- one file --------------------------------------------------------------------------------------------------------


class CacheFile:
    """An open file with the entries of `depth` frozen blocks. One thread uses it.

    lengths: positions of each sample; all 1 if rows have the same shape. max_bytes: rows beyond this size are not kept.
    creates: if False, FileNotFoundError unless a rank has created the file. May raise OSError.
    """

    def __init__(self, folder: RunFolder, key: str, depth: int, rows: RowFormat, lengths: Lengths, max_bytes: int, *,
                 creates: bool) -> None:
        self.key, self.depth, self.rows = key, depth, rows
        self._sizes = CHECKSUM_BYTES + lengths * rows.record_bytes
        ends = np.cumsum(self._sizes)
        self._starts, self._kept, self.num_bytes = ends - self._sizes, ends <= max_bytes, int(ends[-1])
        self._tag = zlib.crc32(key.encode())
        # Links are not followed, and a named pipe does not block.
        self._file = os.open(folder.path / f"{key}.rows", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC |
                             (os.O_CREAT if creates else 0), 0o600)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise OSError(f"{folder.path / key}.rows is not a file")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ranvier-cache")
        self._ahead: dict[tuple[int, ...], Future[tuple[Tensor, Tensor]]] = {}

    def close(self) -> None:
        """Close the file once no read is in progress."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._file)

    def prefetch(self, microbatches: Sequence[Sequence[int]], *, pinned: bool) -> None:
        """Start to read these microbatches in a thread, in this order; microbatches of an earlier call that are not
        among them are dropped. Memory is bounded by their size and by `_AHEAD_BYTES`."""
        free_bytes, before, self._ahead = _AHEAD_BYTES, self._ahead, {}
        for samples in map(tuple, microbatches):
            free_bytes -= int(self._sizes[list(samples)].sum())
            if free_bytes < 0:
                break
            self._ahead[samples] = before.pop(samples) if samples in before else self._thread.submit(
                self._read, samples, pinned)
        for future in before.values():
            future.cancel()

    def read(self, samples: Sequence[int], *, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """The entries of `samples` that exist: ([n] int64, their places among `samples`; [n, bytes] uint8, their
        rows, with zeros after shorter ones). Rows that were read ahead are not read again, unless an entry was missing.
        A read error, a damaged row or a short file is a miss."""
        future = self._ahead.pop(tuple(samples), None)
        # Does not wait for a microbatch that the thread has not begun.
        if future is not None and not future.cancel() and future.exception() is None:
            found = future.result()
            if len(found[0]) == len(samples):
                return found
        return self._read(samples, pinned)

    def _read(self, samples: Sequence[int], pinned: bool) -> tuple[Tensor, Tensor]:
        sizes = [int(self._sizes[sample]) for sample in samples]
        slots = torch.zeros(len(samples), max(sizes, default=CHECKSUM_BYTES), dtype=torch.uint8,
                            pin_memory=pinned and bool(samples))
        rows, found = slots.numpy(), list[int]()
        for place, (sample, size) in enumerate(zip(samples, sizes, strict=True)):
            row = rows[len(found), :size]  # the slot of the next entry: an invalid entry is overwritten
            with suppress(OSError):
                if os.preadv(self._file, [row.data], int(self._starts[sample])) == size and \
                        row[:CHECKSUM_BYTES].tobytes() == self._checksum(sample, row):
                    found.append(place)
                    continue
            row[:] = 0
        return torch.tensor(found, dtype=torch.int64), slots[:len(found)]

    def write(self, sample: int, row: npt.NDArray[np.uint8]) -> int:
        """Write one entry; returns its number of bytes, 0 if the sample's row is beyond the limit. OSError if the disk
        cannot store it; the row is then a miss. row: as returned by `encode`; bytes after the sample's own are not
        written."""
        if not self._kept[sample]:
            return 0
        own, start, done = row[:self._sizes[sample]], int(self._starts[sample]), 0
        own[:CHECKSUM_BYTES] = np.frombuffer(self._checksum(sample, own), np.uint8)
        while done < len(own):
            done += os.pwrite(self._file, own[done:].data, start + done)
        return done

    def _checksum(self, sample: int, row: npt.NDArray[np.uint8]) -> bytes:
        """The checksum of a row; never 0, which is that of a hole in the file."""
        tag = zlib.crc32(sample.to_bytes(8, "little"), self._tag)
        return (zlib.crc32(row[CHECKSUM_BYTES:].data, tag) or 1).to_bytes(CHECKSUM_BYTES, "little")
