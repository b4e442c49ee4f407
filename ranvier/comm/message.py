"""Messages between ranks: a kind, a microbatch number, and named tensors of any shape; and their wire format.

A message on the wire is one contiguous sequence of bytes:

    | preamble (fixed) | description (JSON: names, dtypes, shapes, requires-grad) | tensors, each 64-byte aligned |

The description repeats from microbatch to microbatch, so encoding and decoding it is cached. Shapes may still change at
any time, because every message carries its own. Preamble and description have checksums: a flipped bit there would
send a tensor to the wrong microbatch, or make the receiver wait for bytes that are never sent. Tensors have no
checksum.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ranvier.errors import TransportError


class MessageKind(IntEnum):
    """Purpose of a message."""

    FORWARD = 1
    """Carried state of a microbatch, to the next stage."""
    BACKWARD = 2
    """Gradients of that carried state, to the previous stage."""
    CREDIT = 3
    """A microbatch is released without a gradient (evaluation, frozen prefix): to the previous stage."""
    ACTION = 4
    """The stage leader's next action, to its row and column peers."""
    TIED_GRADIENT = 5
    """Accumulated gradient of the other end of a tied parameter, to its owner."""
    TIED_VALUE = 6
    """Updated value of a tied parameter, from its owner."""
    STATE = 7
    """A slice of the run's state, from its holder before a transition to its holder after it."""
    COMMAND = 8
    """Rank 0's next command for an idle rank."""


@dataclass(slots=True, eq=False)
class Message:
    """One message.

    tensors: name -> tensor of any shape and dtype; the single tensor of a carried state that is not a dict has the name
        "".
    requires_grad: names of tensors whose gradient the sender expects back.
    source: the sender's rank, filled in by the transport on arrival.
    stage: of a message of the pipeline's flow, the stage that it goes to.
    sent_ns: the sender's monotonic clock in nanoseconds, comparable on one machine only; filled in when encoded.
    """

    kind: MessageKind
    step: int
    microbatch: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    requires_grad: frozenset[str] = frozenset()
    source: int = -1
    sent_ns: int = 0
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of microbatch {self.microbatch}"

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        total = 0
        for tensor in self.tensors.values():
            total += tensor.nbytes
        return total


# Magic, kind, step, microbatch, stage, sent_ns, total bytes, description bytes, CRC-32 of the description. The CRC-32
# of all these follows.
_PREAMBLE = struct.Struct("<4sBiiiqqII")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"RNV1"
_ALIGNMENT = 64
_KINDS = {kind.value: kind for kind in MessageKind}
_APART = 0x80
"""Added to the kind of a message whose tensors follow separately."""
PREAMBLE_BYTES = _PREAMBLE.size + _CHECKSUM.size
"""Size of the fixed part at the start of every message."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_Fields = tuple[tuple[str, str, tuple[int, ...], bool], ...]


@lru_cache(maxsize=1024)
def _describe(fields: _Fields) -> tuple[bytes, tuple[tuple[int, int], ...], int]:
    """Description bytes, (start, stop) of each tensor in the message, and the message's total size."""
    description = json.dumps(fields).encode()
    offset, places = PREAMBLE_BYTES + len(description), []
    for _, dtype, shape, _ in fields:
        start = -(-offset // _ALIGNMENT) * _ALIGNMENT
        offset = start + prod(shape) * _DTYPES[dtype].itemsize
        places.append((start, offset))
    return description, tuple(places), offset


@lru_cache(maxsize=1024)
def _parse(description: bytes) -> _Fields:
    """The inverse of `_describe`. ValueError for any text that `_describe` cannot have produced."""
    try:
        fields = tuple((name, dtype, tuple(shape), wants) for name, dtype, shape, wants in json.loads(description))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("the description of this message cannot be read") from error
    for name, dtype, shape, wants in fields:
        if not (type(name) is str and type(dtype) is str and dtype in _DTYPES and type(wants) is bool
                and all(type(size) is int and size >= 0 for size in shape)):
            raise ValueError(f"this message has an invalid description of tensor {name!r}")
    if len({name for name, *_ in fields}) != len(fields):
        raise ValueError("two tensors of this message have the same name")
    return fields


def _fields(message: Message) -> _Fields:
    try:
        return tuple([(name, _DTYPE_NAMES[tensor.dtype], tensor.shape, name in message.requires_grad)
                      for name, tensor in message.tensors.items()])
    except KeyError as error:
        raise TransportError("has a tensor of a dtype that messages cannot carry", code="message-dtype",
                             where=f"{message}", value=error.args[0],
                             remedy=f"Convert it to one of {', '.join(_DTYPES)}.") from error


def encoded_bytes(message: Message) -> int:
    """Size of `message` on the wire, in bytes. TransportError for a dtype that messages cannot carry."""
    return _describe(_fields(message))[2]


def _head(message: Message, mark: int = 0) -> tuple[bytes, tuple[tuple[int, int], ...], int]:
    """The bytes before the tensors, with the current monotonic clock; (start, stop) of each tensor; total bytes. mark:
    added to the kind."""
    description, places, total = _describe(_fields(message))
    preamble = _PREAMBLE.pack(_MAGIC, message.kind | mark, message.step, message.microbatch, message.stage,
                              time.monotonic_ns(), total, len(description), zlib.crc32(description))
    return preamble + _CHECKSUM.pack(zlib.crc32(preamble)) + description, places, total


def _place(message: Message, places: tuple[tuple[int, int], ...], wire: Tensor) -> None:
    for tensor, (start, stop) in zip(message.tensors.values(), places, strict=True):
        if stop > start:
            _view(wire, tensor.dtype, start, tensor.shape).copy_(tensor.detach(), non_blocking=True)


def _view(wire: Tensor, dtype: torch.dtype, start: int, shape: Sequence[int]) -> Tensor:
    """A tensor in the memory of `wire`, from byte `start` on, with its own version count."""
    place = wire.storage_offset() + start
    if place % dtype.itemsize:
        raise ValueError(f"byte {place} of the buffer is not a place for a tensor of {dtype}")
    return torch.empty(0, dtype=dtype, device=wire.device).set_(
        wire.untyped_storage(), place // dtype.itemsize, shape, ())


def encode(message: Message) -> Tensor:
    """The message as one contiguous uint8 tensor on the host. If tensors come from a CUDA device, it is pinned, and
    they are in it once their device's current stream has reached this point."""
    head, places, total = _head(message)
    wire = torch.empty(total, dtype=torch.uint8,
                       pin_memory=any([tensor.is_cuda for tensor in message.tensors.values()]))
    wire.numpy().data[:len(head)] = head
    _place(message, places, wire)
    return wire


def encode_head(message: Message) -> Tensor:
    """Only the bytes before the tensors, for a message whose tensors travel separately, as `pack` writes them."""
    return torch.frombuffer(bytearray(_head(message, _APART)[0]), dtype=torch.uint8)


def pack(message: Message, device: torch.device, wire: Tensor | None = None) -> Tensor:
    """The tensors in one uint8 tensor on `device`, each at its offset in the message.

    wire: the tensor to write into, of at least the message's total size; None makes one of exactly that size.
    """
    _, places, total = _describe(_fields(message))
    wire = torch.empty(total, dtype=torch.uint8, device=device) if wire is None else wire
    _place(message, places, wire)
    return wire


def checksum(tensor: Tensor) -> Tensor:
    """CRC-32 of the tensor's bytes (int64 scalar), to be sent with tensors in which a flipped bit would persist."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.tensor(zlib.crc32(raw.numpy().data), dtype=torch.int64)


class Head(NamedTuple):
    """The fixed part of a message. total: bytes of the whole message. length: of the description."""

    mark: int
    step: int
    microbatch: int
    stage: int
    sent_ns: int
    total: int
    length: int
    checksum: int

    @property
    def tensors_follow(self) -> bool:
        """Whether the message is one of `encode_head`."""
        return bool(self.mark & _APART)


def read_head(wire: Tensor) -> Head:
    """The head of a message that starts with `wire`. ValueError if the bytes are not a message."""
    raw = wire.numpy().data
    if len(raw) < PREAMBLE_BYTES:
        raise ValueError(f"these are {len(raw)} bytes, and a message has at least {PREAMBLE_BYTES}")
    magic, *fields = _PREAMBLE.unpack_from(raw)
    head = Head(*fields)
    if magic != _MAGIC:
        raise ValueError(f"these bytes are not a message (they start with {magic!r})")
    if zlib.crc32(raw[:_PREAMBLE.size]) != _CHECKSUM.unpack_from(raw, _PREAMBLE.size)[0]:
        raise ValueError("the header of this message was corrupted in transit")
    if head.total < PREAMBLE_BYTES + head.length:
        raise ValueError(f"the header of this message states {head.total} bytes, fewer than the header itself")
    return head


def decode(wire: Tensor, source: int, packed: Tensor | None = None, head: Head | None = None) -> Message:
    """The message in `wire`, with this head, from rank `source`. Its tensors are in the memory of `wire`, or of
    `packed` (see `pack`) if given, each with its own version count: one may be changed in place while autograd has
    saved another.

    ValueError if the bytes are not a message.
    """
    mark, step, microbatch, stage, sent_ns, total, length, checksum = head or read_head(wire)
    raw = wire.numpy().data
    body = wire if packed is None else packed
    description = bytes(raw[PREAMBLE_BYTES:PREAMBLE_BYTES + length])
    if zlib.crc32(description) != checksum:
        raise ValueError("the description of this message was corrupted in transit")
    fields = _parse(description)
    _, places, expected = _describe(fields)
    if total != expected or total > body.numel() or PREAMBLE_BYTES + length > len(raw):
        raise ValueError(f"the header of this message states {total} bytes, its description {expected}; it has "
                         f"{body.numel()}")
    try:
        tensors = {name: _view(body, _DTYPES[dtype], start, shape)
                   for (name, dtype, shape, _), (start, _) in zip(fields, places, strict=True)}
        kind = _KINDS[mark & ~_APART]
    except (KeyError, RuntimeError, OverflowError, TypeError) as error:
        raise ValueError("the description of this message does not fit its bytes") from error
    return Message(kind, step, microbatch, tensors, frozenset([name for name, _, _, wants in fields if wants]),
                   source, sent_ns, stage)
