"""What travels between ranks: a kind, a microbatch number, and named tensors of any shape.

A message on the wire is one run of bytes:

    | preamble (fixed) | description (JSON: names, dtypes, shapes, requires-grad) | tensors, each 64-byte aligned |

The description repeats from microbatch to microbatch, so encoding and decoding it is cached; shapes may change at any
time nevertheless, because every message carries its own.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import prod

import torch
from torch import Tensor


class Kind(IntEnum):
    """What a message is for."""

    FORWARD = 1
    """Carried state of a microbatch, to the next stage."""
    BACKWARD = 2
    """Gradients of that carried state, to the stage before."""
    CREDIT = 3
    """A microbatch is released and no gradient returns (evaluation, frozen prefix): to the stage before."""
    ACTION = 4
    """The stage leader's next action, to its row and column peers."""
    TIED_GRADIENT = 5
    """Summed gradient of the other end of a tied parameter, to its owner."""
    TIED_VALUE = 6
    """Updated value of a tied parameter, from its owner."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message.

    `tensors` maps names to tensors of any shape and dtype; the single unnamed tensor of a plain carried state has the
    name "". A name in `requires_grad` wants a gradient back. `sent_ns` is the sender's monotonic clock, comparable on
    one machine only; it is filled in by the transport.
    """

    kind: Kind
    step: int
    microbatch: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    requires_grad: frozenset[str] = frozenset()
    source: int = -1
    sent_ns: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of microbatch {self.microbatch}"

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


_PREAMBLE = struct.Struct("<4sBiiqqI")  # magic, kind, step, microbatch, sent_ns, total bytes, description bytes
_MAGIC = b"RNV1"
_ALIGNMENT = 64
PREAMBLE_BYTES = _PREAMBLE.size

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_Fields = tuple[tuple[str, str, tuple[int, ...], bool], ...]


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=1024)
def _describe(fields: _Fields) -> tuple[bytes, tuple[tuple[int, int], ...], int]:
    """Description bytes, (start, stop) of each tensor in the message, and the message's total size."""
    description = json.dumps(fields).encode()
    offset, places = _PREAMBLE.size + len(description), []
    for _, dtype, shape, _ in fields:
        start = _align(offset)
        offset = start + prod(shape) * _DTYPES[dtype].itemsize
        places.append((start, offset))
    return description, tuple(places), offset


@lru_cache(maxsize=1024)
def _parse(description: bytes) -> _Fields:
    return tuple((name, dtype, tuple(shape), wants) for name, dtype, shape, wants in json.loads(description))


def encoded_bytes(message: Message) -> int:
    """Size of `message` on the wire."""
    return _describe(_fields(message))[2]


def _fields(message: Message) -> _Fields:
    return tuple((name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), name in message.requires_grad)
                 for name, tensor in message.tensors.items())


def encode(message: Message) -> Tensor:
    """The message as one contiguous uint8 tensor on the host, stamped with the current monotonic clock."""
    fields = _fields(message)
    description, places, total = _describe(fields)
    wire = torch.empty(total, dtype=torch.uint8)
    head = _PREAMBLE.pack(_MAGIC, message.kind, message.step, message.microbatch, time.monotonic_ns(), total,
                          len(description)) + description
    wire[:len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor, (start, stop) in zip(message.tensors.values(), places, strict=True):
        if stop > start:
            wire[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return wire


def total_bytes(wire: Tensor) -> int:
    """Size of the whole message whose first bytes are `wire`."""
    return _unpack(wire)[4]


def _unpack(wire: Tensor):
    magic, kind, step, microbatch, sent_ns, total, length = _PREAMBLE.unpack(
        wire[:_PREAMBLE.size].numpy().tobytes())
    if magic != _MAGIC:
        raise ValueError(f"these bytes are not a message (they start with {magic!r})")
    return kind, step, microbatch, sent_ns, total, length


def decode(wire: Tensor, source: int) -> Message:
    """The message in `wire`, whose tensors are views of it. ValueError when the bytes are not a message."""
    kind, step, microbatch, sent_ns, _, length = _unpack(wire)
    fields = _parse(wire[_PREAMBLE.size:_PREAMBLE.size + length].numpy().tobytes())
    _, places, _ = _describe(fields)
    tensors = {name: wire[start:stop].view(_DTYPES[dtype]).view(shape)
               for (name, dtype, shape, _), (start, stop) in zip(fields, places, strict=True)}
    return Message(Kind(kind), step, microbatch, tensors, frozenset(name for name, _, _, wants in fields if wants),
                   source, sent_ns)
