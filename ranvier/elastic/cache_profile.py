"""Whether caching the outputs of frozen blocks saves time: a decision from measured seconds. Pure.

For a sample that is not cached yet, with n reads of it still to come (this one included):

    without the cache    n compute
    with it              compute + write + (n - 1) read

so the cache pays if (n - 1) (compute - read) > write. For a sample that is cached, it pays if compute > read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measured seconds per sample: the forward of the frozen blocks, reading an entry, writing it."""

    compute: float
    read: float
    write: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether the cache is used, and why. saved_seconds: over the rest of the run, on the samples of one rank; negative
    if the cache would cost time."""

    pays: bool
    saved_seconds: float
    why: str


def decide(cache_from: Literal["auto"] | int, *, frozen_layers: int, times: Times | None, remaining_reads: int,
           num_samples: int, kept: int = 0) -> Decision:
    """Whether the cache is used from now on.

    Args:
        cache_from: the number of frozen layers from which it is used, whatever it costs; "auto" decides by `times`.
        remaining_reads: (epochs left) x (samples), as this rank will read them.
        num_samples: distinct samples among them.
        kept: how many of these the files already have.
    """
    if frozen_layers < 1:
        return Decision(pays=False, saved_seconds=0.0, why="nothing is frozen")
    fresh = min(max(0, num_samples - kept), remaining_reads)  # asked for once before their entry is there
    saved = 0.0 if times is None else \
        (remaining_reads - fresh) * (times.compute - times.read) - fresh * times.write
    if cache_from != "auto":
        return Decision(pays=frozen_layers >= cache_from, saved_seconds=saved,
                        why=f"{frozen_layers} layers are frozen, and the cache is on from {cache_from}")
    if times is None:
        return Decision(pays=False, saved_seconds=0.0, why="nothing has been measured yet")
    each = (f"a sample's {frozen_layers} frozen layers take {_ms(times.compute)}, reading their output "
            f"{_ms(times.read)} and writing it {_ms(times.write)}")
    if remaining_reads <= num_samples - kept:
        return Decision(pays=False, saved_seconds=saved, why=f"no sample that would be kept comes again; {each}")
    if times.compute <= times.read:
        return Decision(pays=False, saved_seconds=saved, why=f"reading takes no less than computing: {each}")
    again = f"{remaining_reads} reads of {num_samples} samples are to come"
    if saved <= 0:
        return Decision(pays=False, saved_seconds=saved, why=f"writing would not be earned back: {each}; {again}")
    return Decision(pays=True, saved_seconds=saved, why=f"it saves {saved:.3g} s: {each}; {again}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
