"""Random numbers that depend on what they are for, never on where they are drawn.

Every number is a hash of (key, index): the key names the purpose (seed, parameter name; or seed, step, sample, block,
call site), the index is the element's place in the whole, unsharded tensor. So any mesh, any slice and any order of
execution sees the same initial weights and the same dropout masks, on CPU and CUDA alike.

The hash is the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) on
key + index * golden ratio, in wrapping 64-bit integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as the int64 that has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def key(*parts: object) -> int:
    """A 64-bit key (as int64) for these parts, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's shift of int64 copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits (int64) for each element of `index` (int64); `key` is a number or broadcasts against it."""
    mixed = index * _signed(_GOLDEN) + key
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(_MULTIPLIERS[0])
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(_MULTIPLIERS[1])
    return mixed ^ _shift_right(mixed, 31)


def uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """Uniform fp64 numbers strictly between 0 and 1 for each element of `index`."""
    return (_shift_right(bits(key, index), 11).to(torch.float64) + 0.5) * 2.0**-53


def normal(key: int, index: Tensor) -> Tensor:
    """Standard normal fp64 numbers for each element of `index`, by inversion."""
    return torch.special.ndtri(uniform(key, index))


def global_index(shape: Sequence[int], box: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """Row-major places, in a tensor of `shape`, of the elements in `box` ((start, stop) per dim); int64, box-shaped."""
    box = [(0, size) for size in shape] if box is None else box
    index = torch.zeros((), dtype=torch.int64)
    for size, (start, stop) in zip(shape, box, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, stop, dtype=torch.int64)
    return index


@dataclass
class Scope:
    """What dropout inside one block's forward is keyed by.

    samples: [b] int64, the data set's own number of each sample of the microbatch, known on every rank.
    """

    seed: int
    step: int
    samples: Tensor
    block: str = ""
    calls: int = field(default=0, compare=False)


_scope: ContextVar[Scope | None] = ContextVar("ranvier_random_scope", default=None)


@contextmanager
def scope(seed: int, step: int, samples: Tensor, block: str = ""):
    """Key the dropout inside by these; nested or repeated scopes with the same arguments draw the same masks."""
    token = _scope.set(Scope(seed, step, samples, block))
    try:
        yield
    finally:
        _scope.reset(token)


def dropout(x: Tensor, probability: float, training: bool, *, start: Sequence[int] | None = None,
            full_shape: Sequence[int] | None = None) -> Tensor:
    """Dropout whose mask is keyed by (seed, step, sample, block, call site, place in the sample).

    x: [b, ...]; `start` and `full_shape` place x's trailing dims inside the unsharded sample, for a sharded x.
    RuntimeError outside a `scope` (the engine opens one around every block), except on the meta device, which has
    shapes only.
    """
    if not training or probability == 0.0 or x.is_meta:
        return x
    here = _scope.get()
    if here is None:
        raise RuntimeError("keyed dropout needs keyed_random.scope(seed, step, samples) around the forward pass")
    if len(here.samples) != x.shape[0]:
        raise RuntimeError(f"keyed dropout has {len(here.samples)} sample numbers for a batch of {x.shape[0]}")
    site, here.calls = here.calls, here.calls + 1
    start = start or [0] * (x.dim() - 1)
    full_shape = full_shape or x.shape[1:]
    box = [(begin, begin + size) for begin, size in zip(start, x.shape[1:], strict=True)]
    place = global_index(full_shape, box).to(x.device)
    sample_keys = bits(key("dropout", here.seed, here.step, here.block, site), here.samples.to(x.device))
    chance = uniform(sample_keys.view(-1, *[1] * (x.dim() - 1)), place.unsqueeze(0))
    return x * ((chance >= probability).to(x.dtype) / (1.0 - probability))
