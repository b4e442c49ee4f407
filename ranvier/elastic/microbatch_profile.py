"""Search for the fastest number of microbatches of a replica's share, by measured steps, once per (pipe, data).

PipeTransformer (He et al., 2021, section 3.2) tries K to 6 K microbatches on K stages, and so does this search. The
measurements are plain data, which checkpoints save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

MOST_PER_STAGE = 6
TRIAL_STEPS = 3
"""Measured steps of each number of microbatches; the first step warms up."""


def microbatch_counts(stages: int, share: int) -> tuple[int, ...]:
    """Numbers of microbatches worth trying, rising, for a replica's `share` of samples: one near each multiple of
    `stages` up to 6 `stages`.

    The engine cuts a share into microbatches of one size and a remainder, so a count determines a size. Counts whose
    last microbatch lacks more than an eighth of the share are excluded, unless there are no others. A share with fewer
    samples than stages is cut into single samples.
    """
    assert stages >= 1 and share >= 1
    if share <= stages:
        return (share,)
    most = MOST_PER_STAGE * stages
    sizes = {size for wanted in range(stages, most + 1, stages) for size in (share // wanted, -(-share // wanted))}
    counts = {-(-share // size) for size in sizes if size}
    lacks = {count: -share % -(-share // count) for count in counts if stages <= count <= most}
    even = [count for count, lack in lacks.items() if 8 * lack <= share] or list(lacks)
    return tuple(sorted({min(even, key=lambda count: (abs(count - wanted), lacks[count]))
                         for wanted in range(stages, most + 1, stages)}))


def size_of(share: int, count: int, rows: int) -> int:
    """Samples in a microbatch if a `share` is cut into `count`, rounded up so that `rows` can split it."""
    size = -(-share // count)
    return -(-size // rows) * rows


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measured seconds of a step, the least of several measurements."""

    pipe: int
    data: int
    frozen: int
    microbatches: int
    seconds: float


@dataclass(frozen=True)
class MicrobatchProfile:
    """Measurements so far; immutable: a new measurement gives a new profile.

    A search tries every candidate once at one (pipe, data, frozen). It is done once per (pipe, data): at later depths
    the best count stays, as in the paper. If the depth changes in the middle of a search, the search starts again,
    because a step with more frozen layers is faster whatever its microbatches.
    """

    trials: tuple[Trial, ...] = ()

    def next_count(self, pipe: int, data: int, frozen: int, candidates: Sequence[int]) -> int | None:
        """The number of microbatches to measure next; None when the search is over."""
        if self._searched_depth(pipe, data, candidates) is not None:
            return None
        tried = self._trials(pipe, data, frozen)
        return next(count for count in candidates if count not in tried)

    def best(self, pipe: int, data: int, frozen: int, candidates: Sequence[int]) -> int:
        """The fastest count of the finished search, else of those tried at this depth, else the first candidate."""
        found = self.best_count(pipe, data, candidates)
        if found is not None:
            return found
        tried = self._trials(pipe, data, frozen)
        return min((count for count in candidates if count in tried), key=lambda count: tried[count],
                   default=candidates[0])

    def best_count(self, pipe: int, data: int, candidates: Sequence[int]) -> int | None:
        """The fastest count of the finished search; None until a search is finished."""
        searched = self._searched_depth(pipe, data, candidates)
        if searched is None:
            return None
        tried = self._trials(pipe, data, searched)
        return min(candidates, key=lambda count: tried[count])

    def with_measurement(self, pipe: int, data: int, frozen: int, microbatches: int,
                         seconds: float) -> MicrobatchProfile:
        """The profile with one more measurement; a measurement that is not finite is ignored."""
        if not isfinite(seconds):
            return self
        new = Trial(pipe=pipe, data=data, frozen=frozen, microbatches=microbatches, seconds=seconds)
        same = [trial for trial in self.trials if replace(trial, seconds=seconds) == new]
        fastest = min([*same, new], key=lambda trial: trial.seconds)
        return MicrobatchProfile((*(trial for trial in self.trials if trial not in same), fastest))

    def _trials(self, pipe: int, data: int, frozen: int) -> dict[int, float]:
        """Count -> seconds."""
        return {trial.microbatches: trial.seconds for trial in self.trials
                if (trial.pipe, trial.data, trial.frozen) == (pipe, data, frozen)}

    def _searched_depth(self, pipe: int, data: int, candidates: Sequence[int]) -> int | None:
        """The largest depth at which every candidate was measured."""
        depths = {trial.frozen for trial in self.trials if (trial.pipe, trial.data) == (pipe, data)}
        return max((frozen for frozen in depths if set(candidates) <= set(self._trials(pipe, data, frozen))),
                   default=None)
