"""The weights in an ONNX file, and which of its operations uses each: all that a conversion needs, without a library.

ONNX is protobuf: a message is a run of fields, each a number, a wire type and a value. Of a model are read

    ModelProto    7 graph                GraphProto    1 node, 5 initializer
    NodeProto     1 input, 3 name        TensorProto   1 dims, 2 data_type, 4 float_data, 8 name, 9 raw_data
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ranvier.errors import DataError

_FLOAT = 1
_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 5: 4}
"""Bytes of a value, by its wire type."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """tensors: fp32 weights by name; uses: the name of an operation -> its inputs, in order."""

    tensors: dict[str, np.ndarray]
    uses: dict[str, tuple[str, ...]]


def read_graph(data: bytes, where: str) -> Graph:
    """The graph of a model. Weights of other number formats are left out. DataError for what is no ONNX model."""
    tensors: dict[str, np.ndarray] = {}
    uses: dict[str, tuple[str, ...]] = {}
    try:
        for graph in _all(memoryview(data), 7):
            for number, value in _fields(graph):
                if number == 1:
                    name, inputs = _node(value)
                    uses[name] = inputs
                elif number == 5:
                    name, tensor = _tensor(value)
                    if tensor is not None:
                        tensors[name] = tensor
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise DataError("is no ONNX model, or a damaged one", where=where, value=str(error),
                        remedy="Delete it, and fetch it again.") from error
    return Graph(tensors=tensors, uses=uses)


def _node(data: memoryview) -> tuple[str, tuple[str, ...]]:
    return _text(data, 3), tuple(bytes(value).decode() for value in _all(data, 1))


def _text(data: memoryview, wanted: int) -> str:
    return b"".join(bytes(value) for value in _all(data, wanted)).decode()


def _tensor(data: memoryview) -> tuple[str, np.ndarray | None]:
    dims, kind, numbers = [], 0, np.empty(0, dtype="<f4")
    for number, value in _fields(data):
        if number == 1:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == 2:
            kind = value
        elif number in (4, 9):
            numbers = np.frombuffer(value, dtype="<f4") if kind in (0, _FLOAT) and len(value) % 4 == 0 else numbers
    if kind != _FLOAT:
        return _text(data, 8), None
    if prod(dims) != numbers.size:
        raise ValueError(f"{_text(data, 8)} has {numbers.size} numbers for the shape {dims}")
    return _text(data, 8), numbers.reshape(dims)


def _all(data: memoryview, wanted: int) -> Iterator[memoryview]:
    return (value for number, value in _fields(data) if number == wanted)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field: an int of varints, bytes of the others."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if at + size > len(data):
            raise ValueError("a field leaves its message")
        yield tag >> 3, data[at:at + size]
        at += size


def _varints(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits in each byte, the lowest first, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number of more than 64 bits")
