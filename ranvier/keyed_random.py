"""Counter-based random numbers that depend on their purpose, and never on where or when they are drawn.

Every number is a hash of (key, index). The key identifies the purpose (seed and parameter name; or seed, step, sample,
block and call site); the index is the element's position in the unsharded tensor. So every mesh, slice and order of
execution has the same initial weights and the same dropout masks, and they may be drawn on any device.

Hashes and uniform numbers are bit-identical on every device: integers, and exact fp64 arithmetic. Normal numbers differ
between CPU and CUDA in the last digits of fp64 (of the inverse distribution), which rounding to fp32 removes except in
about one element in ten million.

The hash is the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) on
key + index * golden ratio, in wrapping 64-bit integers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ranvier.errors import ModelError

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _to_int64(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def key(*parts: object) -> int:
    """A 64-bit key (as int64) for `parts`, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _to_int64(int.from_bytes(digest, "little"))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch shifts int64 arithmetically, so the copies of the sign bit are masked out."""
    shifted: Tensor = (bits >> count) & ((1 << (64 - count)) - 1)
    return shifted


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits (int64) for each element of `index` (int64); a tensor `key` is broadcast against it."""
    mixed: Tensor = index * _to_int64(_GOLDEN) + key
    mixed = (mixed ^ _shift_right(mixed, 30)) * _to_int64(_MULTIPLIERS[0])
    mixed = (mixed ^ _shift_right(mixed, 27)) * _to_int64(_MULTIPLIERS[1])
    return mixed ^ _shift_right(mixed, 31)


def uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """Uniform fp64 numbers strictly between 0 and 1 for each element of `index`."""
    return (_shift_right(bits(key, index), 11).to(torch.float64) + 0.5) * 2.0**-53


def signed_uniform(key: int, index: Tensor) -> Tensor:
    """Uniform fp64 numbers strictly between -1 and 1 for each element of `index`."""
    return uniform(key, index) * 2.0 - 1.0


def normal(key: int, index: Tensor) -> Tensor:
    """Standard normal fp64 numbers for each element of `index`, by inversion."""
    numbers: Tensor = torch.special.ndtri(uniform(key, index))
    return numbers


def global_index(shape: Sequence[int], box: Sequence[tuple[int, int]] | None = None,
                 device: torch.device | None = None) -> Tensor:
    """Row-major indices, in a tensor of `shape`, of the elements in `box`: int64, of the shape of the box.

    box: (start, stop) for each dim; None for the full tensor. device: of the result; None for the default device.
    """
    box = [(0, size) for size in shape] if box is None else box
    index: Tensor | None = None
    for size, (start, stop) in zip(shape, box, strict=True):
        along = torch.arange(start, stop, dtype=torch.int64, device=device)
        index = along if index is None else index.unsqueeze(-1) * size + along
    return torch.zeros((), dtype=torch.int64, device=device) if index is None else index


@dataclass
class Scope:
    """The key of dropout in the forward pass of one block; as a context manager, it applies to dropout inside.

    samples: [b] int64, each sample's number in the data set, which is the same on every mesh.
    keys: [call sites, b] int64, `site_keys` of future calls if they are known, as in compiled blocks.
    calls: number of dropout calls so far, which distinguishes call sites.
    """

    seed: int
    step: int
    samples: Tensor
    block: str = ""
    keys: Tensor | None = None
    calls: int = field(default=0, compare=False)
    _before: Scope | None = field(default=None, init=False, compare=False, repr=False)

    def __enter__(self) -> Scope:
        self._before, _current.scope = _current.scope, self
        return self

    def __exit__(self, *_: object) -> None:
        _current.scope = self._before

    def site_keys(self, site: int) -> Tensor:
        """[b] int64: the keys of one call site."""
        return bits(key("dropout", self.seed, self.step, self.block, site), self.samples)


class _Current(threading.local):
    """The scope of each thread. torch.compile traces attributes of thread-local objects, but no ContextVar; torch 2.11
    would prefer an attribute of the class to the thread's."""

    def __init__(self) -> None:
        self.scope: Scope | None = None


_current = _Current()


def scope(seed: int, step: int, samples: Tensor, block: str = "") -> Scope:
    """Key the dropout inside of a `with` by these (see `Scope`). Repeated scopes with the same arguments draw the same
    masks, as activation recomputation needs."""
    return Scope(seed, step, samples, block)


def current_samples() -> tuple[int, ...]:
    """The sample numbers of the microbatch whose block runs now. Raises RuntimeError outside a `scope`."""
    current = _current.scope
    if current is None:
        raise RuntimeError("needs keyed_random.scope(seed, step, samples) around the forward pass")
    return tuple(current.samples.tolist())


def next_sample_keys(batch: int, device: torch.device) -> Tensor:
    """[batch] int64: the keys of the samples at the next dropout call of the current scope.

    Raises RuntimeError outside a `scope` (the engine opens one around every block); ModelError for another number of
    samples.
    """
    current = _current.scope
    if current is None:
        raise RuntimeError("keyed dropout needs keyed_random.scope(seed, step, samples) around the forward pass")
    site, current.calls = current.calls, current.calls + 1
    if current.keys is not None:
        return current.keys[site]
    if len(current.samples) != batch:
        raise ModelError(f"has {len(current.samples)} sample numbers for a batch of {batch}",
                         code="dropout-without-samples", where="keyed dropout",
                         remedy="Number the samples: ranvier.microbatches(inputs, targets, size, samples=numbers); or "
                                "use torch.nn.Dropout.")
    return current.site_keys(site).to(device, non_blocking=True)


def dropout(x: Tensor, probability: float, training: bool, *, start: Sequence[int] | None = None,
            full_shape: Sequence[int] | None = None) -> Tensor:
    """Dropout whose mask is keyed by (seed, step, sample, block, call site, index in the sample).

    x: [b, ...]. For a sharded x, `start` and `full_shape` are the offset and the unsharded shape of its trailing dims.
    Raises as `next_sample_keys`, except on the meta device, which has only shapes: there it is one pass that keeps a
    byte for each element, as compiled code does.
    """
    if not training or probability == 0.0:
        return x
    if x.is_meta:
        return x.masked_fill(torch.empty(x.shape, dtype=torch.bool, device="meta"), 0.0)
    keys = next_sample_keys(x.shape[0], x.device)
    return dropped(x, keys, probability, start or [0] * (x.dim() - 1), full_shape or x.shape[1:])


def dropped(x: Tensor, keys: Tensor, probability: float, start: Sequence[int], full_shape: Sequence[int]) -> Tensor:
    """x after `dropout` with these keys of its samples [b]."""
    box = [(begin, begin + size) for begin, size in zip(start, x.shape[1:], strict=True)]
    index = global_index(full_shape, box, x.device)
    chance = uniform(keys.view(-1, *[1] * (x.dim() - 1)), index.unsqueeze(0))
    return x * ((chance >= probability).to(x.dtype) / (1.0 - probability))
