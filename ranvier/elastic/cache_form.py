"""How one sample's row of a carried state becomes bytes, and bytes a row again.

    payload: tensor | tensor | ...   in the state's order, each beginning at a multiple of 16 bytes

In `half`, fp32 and fp64 are kept as fp16: 11 significant bits against bf16's 8, and activations behind a norm and its
residuals stay far within its range. A row that does not (a finite number beyond 65504) is not kept at all. What is half
precision already, and all numbers and masks, are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ranvier.models.carried_state import State, carried, named

Precision = Literal["half", "full"]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)}
_ALIGNED = 16
_ROUNDS_TO_INF = 65520.0
"""The smallest number that is an infinity as fp16."""
_MOST_PARTS = 1000
_MOST_DIMS = 16


class Unfit(Exception):
    """What cannot be kept; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a row: its shape without the samples' dim, and its number formats outside and in the payload."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.stored.itemsize


@dataclass(frozen=True)
class Form:
    """The tensors of a row, in the order of their bytes."""

    parts: tuple[Part, ...]

    @property
    def payload_bytes(self) -> int:
        last = self.parts[-1]
        return _up(last.offset + last.size_bytes)

    @staticmethod
    def of(state: State, precision: Precision) -> Form:
        """The form of `state`, whose first dim is samples. Unfit when it cannot be kept."""
        tensors = named(state, "the frozen blocks")
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors.values()}
        if len(sizes) != 1 or None in sizes:
            raise Unfit("the state's tensors do not all have the samples as their first dim")
        return _form([(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()], precision)

    def describe(self) -> list[list]:
        """As JSON has it."""
        return [[part.name, list(part.shape), str(part.dtype).removeprefix("torch.")] for part in self.parts]

    @staticmethod
    def described(description: object, precision: Precision) -> Form:
        """The inverse of `describe`. Unfit for anything that it did not write."""
        if not isinstance(description, list) or not 0 < len(description) <= _MOST_PARTS:
            raise Unfit("no list of tensors")
        rows = []
        for entry in description:
            match entry:
                case [str(name), list(shape), str(dtype)] if dtype in DTYPES and len(shape) <= _MOST_DIMS and all(
                        type(size) is int and 0 <= size < 1 << 40 for size in shape):
                    rows.append((name, tuple(shape), DTYPES[dtype]))
                case _:
                    raise Unfit(f"no tensor: {str(entry)[:100]}")
        if len({name for name, _, _ in rows}) != len(rows) or (len(rows) > 1 and "" in [name for name, _, _ in rows]):
            raise Unfit("names that are no state's")
        return _form(rows, precision)

    def encode(self, state: State) -> tuple[Tensor, Tensor]:
        """([n, payload_bytes] uint8 on the state's device, [n] bool: rows whose numbers fit their stored format)."""
        tensors = named(state, "the frozen blocks")
        first = next(iter(tensors.values()))
        payload = torch.zeros(first.shape[0], self.payload_bytes, dtype=torch.uint8, device=first.device)
        fits = torch.ones(first.shape[0], dtype=torch.bool, device=first.device)
        for part in self.parts:
            rows = tensors[part.name].reshape(len(payload), part.numel)
            kept = rows.to(part.stored, copy=True, memory_format=torch.contiguous_format)  # one row may have any stride
            if part.stored is not part.dtype and part.numel:
                small = rows.abs().amax(dim=1) < _ROUNDS_TO_INF
                if not bool(small.all()):  # seldom, and slower: infinities and NaNs may stay
                    fits &= (kept.isinf() == rows.isinf()).all(dim=1)
            payload[:, part.offset:part.offset + part.size_bytes] = kept.view(torch.uint8)
        return payload, fits

    def decode(self, payload: Tensor) -> State:
        """The rows of [n, payload_bytes] uint8, on its device; may share its memory."""
        return carried({part.name: payload[:, part.offset:part.offset + part.size_bytes].view(part.stored)
                        .to(part.dtype).reshape(len(payload), *part.shape).contiguous() for part in self.parts})


def _form(rows: list[tuple[str, tuple[int, ...], torch.dtype]], precision: Precision) -> Form:
    parts: list[Part] = []
    offset = 0
    for name, shape, dtype in rows:
        if dtype not in DTYPES.values():
            raise Unfit(f"tensors of {dtype} are not kept")
        narrowed = precision == "half" and dtype in (torch.float32, torch.float64)
        parts.append(Part(name=name, shape=shape, dtype=dtype, stored=torch.float16 if narrowed else dtype,
                          offset=offset))
        offset = _up(offset + parts[-1].size_bytes)
    return Form(tuple(parts))


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

