"""Whether a transition pays: its predicted gain against its expected cost, and the measured outcome.

A transition costs seconds once (tensors are sent, groups and engines are built) and saves some on each remaining step.
PipeTransformer (He et al., 2021) changes the pipeline whenever its memory criterion allows; Ranvier only if the gain is
larger than the cost. Neither number comes from a model alone: the predicted time of a step is the measured time, scaled
by the ratio of the model's predictions for the two meshes, so that what the model omits on both cancels; the cost is
that of earlier transitions of any kind, by the bytes that they moved.

Seconds per step are of steps with the same number of samples. If the global batch grows with the replicas, scale them,
and count the remaining steps with the previous global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from ranvier.cost.transition import transition_seconds
from ranvier.errors import counted


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One transition: its expected values (None if it was not judged: layers froze and the mesh stayed, the paper's
    rule, a user's request), and its measured values (None until measured)."""

    step: int
    """Optimizer steps done before the transition."""
    old: str
    """The mesh before the transition, in words, and the mesh after it."""
    new: str
    moved_bytes: int
    """Bytes that ranks send each other: predicted, and after the transition measured."""
    seconds_before: float | None = None
    """Measured seconds per step."""
    seconds_after: float | None = None
    """Predicted seconds per step."""
    remaining_steps: int
    expected_cost: float | None = None
    """Seconds."""
    measured_cost: float | None = None
    """Seconds."""
    measured_after: float | None = None
    """Measured seconds per step after the transition."""

    def __str__(self) -> str:
        parts = []
        if self.measured_cost is not None:
            parts.append(f"cost {self.measured_cost:.1f} s")
        if self.seconds_before is not None:
            parts.append(f"{self.seconds_before:.3g} s a step before")
        if self.measured_after is not None:
            parts.append(f"{self.measured_after:.3g} s after")
        predicted = "" if self.seconds_after is None else f" ({self.seconds_after:.3g} s were predicted)"
        return f"step {self.step}: {self.old} -> {self.new}: {', '.join(parts)}{predicted}"


@dataclass(frozen=True)
class Decision:
    """Whether a transition pays, why, in one line, and its ledger entry."""

    pays: bool
    text: str
    entry: Entry


@dataclass(frozen=True)
class Ledger:
    """All transitions of a run, in order. Methods return a new ledger."""

    entries: tuple[Entry, ...] = ()

    def expected_cost(self, moved_bytes: int) -> float:
        """Seconds of a transition that moves this many bytes: those of the prior, times the median ratio of measured
        transitions to the prior."""
        return transition_seconds(moved_bytes, [(entry.measured_cost, entry.moved_bytes) for entry in self.entries
                                                if entry.measured_cost is not None])

    def decide(self, *, step: int, old: str, new: str, seconds_before: float, model_before: float, model_after: float,
               remaining_steps: int, moved_bytes: int) -> Decision:
        """Decide whether to change from mesh `old` to `new` (in words) after `step` steps.

        seconds_before: measured seconds of a step; model_before, model_after: the model's predictions for both meshes.
        If one of the three is not a positive finite number, the transition cannot be judged, and the answer is no.
        """
        cost = self.expected_cost(moved_bytes)
        known = all(isfinite(seconds) and seconds > 0 for seconds in (seconds_before, model_before, model_after))
        after = seconds_before * (model_after / model_before) if known else seconds_before
        entry = Entry(step=step, old=old, new=new, moved_bytes=moved_bytes, seconds_before=seconds_before,
                      seconds_after=after, remaining_steps=remaining_steps, expected_cost=cost)
        where = f"{old} -> {new}"
        if not known:
            return Decision(False, f"{where} cannot be judged: a step takes {seconds_before:g} s, and {model_before:g} "
                                  f"and {model_after:g} s were predicted", entry)
        gain = (seconds_before - after) * remaining_steps
        verb = "gain" if gain >= 0 else "lose"
        text = (f"{where} would {verb} {abs(gain):.1f} s over "
                f"{counted(remaining_steps, 'step')} and cost about {cost:.1f} s")
        return Decision(gain > cost, text, entry)

    def with_entry(self, entry: Entry) -> Ledger:
        """The ledger with one more transition."""
        return Ledger((*self.entries, entry))

    def with_measured(self, *, cost: float | None = None, after: float | None = None,
                      moved_bytes: int | None = None) -> Ledger:
        """The ledger with measurements of its last transition: its cost in seconds, seconds per step after it, bytes
        moved. Values that are not finite are ignored."""
        *earlier, last = self.entries
        if cost is not None and isfinite(cost):
            last = replace(last, measured_cost=cost)
        if after is not None and isfinite(after):
            last = replace(last, measured_after=after)
        if moved_bytes is not None:
            last = replace(last, moved_bytes=moved_bytes)
        return Ledger((*earlier, last))
