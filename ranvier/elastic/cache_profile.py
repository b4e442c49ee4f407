"""Whether caching the outputs of frozen blocks saves time: a decision from measured seconds. Pure.

For a sample that is not cached yet, with n reads of it still to come (this one included):

    without the cache    n compute
    with the cache       compute + write + (n - 1) read

so the cache saves time if (n - 1) (compute - read) > write.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measured seconds per sample: the forward of the frozen blocks, reading an entry, writing it."""

    compute: float
    read: float
    write: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether the cache is used, and why. saved_seconds: in the rest of the run, on the samples of one rank; negative
    if the cache would cost time."""

    pays: bool
    saved_seconds: float
    why: str


def decide(times: Times, *, frozen_layers: int, remaining_reads: int, num_samples: int) -> Decision:
    """Decide whether the cache is used from now on.

    Args:
        remaining_reads: (epochs left) x (samples), as this rank will read them.
        num_samples: distinct samples among them.
    """
    fresh = min(num_samples, remaining_reads)  # computed once before their entry exists
    saved = (remaining_reads - fresh) * (times.compute - times.read) - fresh * times.write
    each = (f"a sample's {frozen_layers} frozen layers take {_ms(times.compute)}, reading their output "
            f"{_ms(times.read)} and writing it {_ms(times.write)}")
    if remaining_reads <= num_samples:
        why = f"no sample that would be kept comes again; {each}"
    elif times.compute <= times.read:
        why = f"reading takes no less than computing: {each}"
    else:
        is_earned = f"it saves {saved:.3g} s" if saved > 0 else "writing would not be earned back"
        return Decision(pays=saved > 0, saved_seconds=saved,
                        why=f"{is_earned}: {each}; {remaining_reads} reads of {num_samples} samples are to come")
    return Decision(pays=False, saved_seconds=saved, why=why)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
