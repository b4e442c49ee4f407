"""The ranks of one contender as the driver sees them: `benchmarks.pipeline.team` with another program in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.pipeline.team import Team

PHASES = ("forward", "backward", "finish")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some steps of one contender; values per rank have one entry for each rank."""

    phase_seconds: dict[str, tuple[float, ...]]
    """Seconds of each phase, for each step: from the first rank's start to the last rank's end."""
    cpu_seconds: float
    """CPU seconds per step, all ranks together."""
    peak_bytes: tuple[int, ...]
    peak_above_imports_bytes: tuple[int, ...]
    peak_above_rest_bytes: tuple[int, ...]
    """Peak above the memory that is resident before the steps: weights are, gradients and activations are not."""
    peak_is_new: bool
    """Whether the peaks are those of these steps; otherwise of all steps since the start, including the check."""

    def seconds(self, *phases: str) -> float:
        """Median over the steps of the seconds of these phases together."""
        return median(map(sum, zip(*(self.phase_seconds[phase] for phase in phases), strict=True)))


class StackTeam(Team):
    """The processes of one contender."""

    program = "benchmarks.tensor.rank"

    def run(self, steps: int) -> Block:
        """Have the team run `steps` timed steps."""
        answers = self._commanded(steps)
        return Block(phase_seconds=phase_seconds([answer["spans"] for answer in answers]),
                     cpu_seconds=sum(answer["cpu_seconds"] for answer in answers) / steps,
                     peak_is_new=all(answer["peak_is_new"] for answer in answers),
                     **{name: tuple(answer[name] for answer in answers)
                        for name in ("peak_bytes", "peak_above_imports_bytes", "peak_above_rest_bytes")})


def phase_seconds(spans: Sequence[Sequence[Sequence[tuple[float, float]]]]) -> dict[str, tuple[float, ...]]:
    """Seconds of each phase and step from spans by rank, step and phase."""
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for steps in zip(*spans, strict=True):
        for phase, of_ranks in zip(PHASES, zip(*steps, strict=True), strict=True):
            found[phase].append(max(end for _, end in of_ranks) - min(start for start, _ in of_ranks))
    return {phase: tuple(seconds) for phase, seconds in found.items()}
