"""Writes safetensors files tensor by tensor: only one tensor is in memory, which the library's own writer cannot do.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, data_offsets | the bytes of the tensors
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

import torch
from torch import Tensor

STORED = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Dtypes of parameters and their names in safetensors."""
_WRITTEN = {**STORED, torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
            torch.bool: "BOOL"}
_WRITE_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor of a file that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


def shards(slots: Sequence[Slot], most_bytes: int) -> list[list[Slot]]:
    """`slots` in their order, split into files of at most `most_bytes`; a larger tensor gets its own file."""
    found: list[list[Slot]] = [[]]
    room = most_bytes
    for slot in slots:
        if found[-1] and slot.size_bytes > room:
            found.append([])
            room = most_bytes
        found[-1].append(slot)
        room -= slot.size_bytes
    return found


def write_model(folder: Path, slots: Sequence[Slot], tensors: Iterable[Tensor], most_bytes: int) -> list[str]:
    """Write model.safetensors, or numbered files as split by `shards` and their index. Returns the names of the files.
    tensors: in the order of `slots`, taken one by one. Raises the errors of `write_tensors`."""
    parts, left = shards(slots, most_bytes), iter(tensors)
    names = ["model.safetensors"] if len(parts) == 1 else [
        f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        write_tensors(folder / name, part, islice(left, len(part)))
    if len(parts) > 1:
        placed = {slot.name: name for name, part in zip(names, parts, strict=True) for slot in part}
        index = {"metadata": {"total_size": sum(slot.size_bytes for slot in slots)}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def write_tensors(path: Path, slots: Sequence[Slot], tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Write `tensors`, which are taken one by one, to the places of `slots`. Returns the size of the file and its
    CRC-32. Raises OSError if they cannot be written; ValueError for a tensor of another dtype or shape than its
    slot, and for more or fewer tensors than slots."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for slot in slots:
        header[slot.name] = {"dtype": _WRITTEN[slot.dtype], "shape": slot.shape,
                             "data_offsets": (place, place + slot.size_bytes)}
        place += slot.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    checksum = 0
    with path.open("wb") as file:
        for block in _bytes([len(text).to_bytes(8, "little") + text], slots, tensors):
            file.write(block)
            checksum = zlib.crc32(block, checksum)
            del block  # or the copy of a tensor would be there when the next one is made
    return 8 + len(text) + place, checksum


def _bytes(first: list[bytes], slots: Sequence[Slot], tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield all bytes of a file, in pieces."""
    yield from first
    left = iter(tensors)
    for slot in slots:  # zip would keep the last tensor
        block = _memory(slot, next(left, None))
        for start in range(0, len(block), _WRITE_BYTES):
            yield block[start:start + _WRITE_BYTES]
        del block
    if next(left, None) is not None:
        raise ValueError(f"there are more tensors than slots, {len(slots)}")


def _memory(slot: Slot, tensor: Tensor | None) -> memoryview:
    """The bytes of a tensor, in host memory."""
    if tensor is None:
        raise ValueError(f"{slot} got no tensor")
    if tensor.dtype is not slot.dtype or tuple(tensor.shape) != slot.shape:
        raise ValueError(f"{slot} got a tensor of {tensor.dtype} and {tuple(tensor.shape)}")
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
