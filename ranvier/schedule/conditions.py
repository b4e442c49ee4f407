"""Conditions of a pipeline beside its stages' mean times: message delays, variation, what deferral costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import NamedTuple


class Deferral(NamedTuple):
    """Time by which messages of the tensor mesh hold up one stage longer if its weight gradients wait, relative to the
    time of these: in the backward, below 0 where it is shorter, and in the gradients."""

    backward: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """messages: seconds of a message, relative to the slowest stage's forward. variation: standard deviation of an
    action's time, relative to its mean. deferral: of each stage; empty where it costs nothing, or is not known. The
    defaults are for pipelines of which nothing was measured."""

    messages: float = 0.05
    variation: float = 0.05
    deferral: tuple[Deferral, ...] = ()


_MOST_VARIATION = 0.3
"""Largest variation that is used. Steps of a few milliseconds on shared cores vary much more, and then no order is
better than another."""
Actions = Mapping[tuple[int, str], tuple[float, float]]
"""Start and stop of each action of a rank, by step and text (F3), on the rank's clock, in any unit."""


def measured_conditions(ranks: Sequence[Actions]) -> Conditions | None:
    """Conditions measured from the actions of one pipeline's ranks, with one stage on each; None if there are too few.

    Clocks of ranks may differ. A message takes the least time from the end of an action to the start of the one that it
    leads to, which has not waited for anything else then: the mean of both ways between two neighbours, in which the
    difference of their clocks cancels.
    """
    forwards = [[stop - start for (_, text), (start, stop) in actions.items() if text.startswith("F")]
                for actions in ranks]
    if not all(len(times) > 1 and fmean(times) > 0 for times in forwards):
        return None
    ways = [(_least(one, other, "F"), _least(other, one, "B")) for one, other in pairwise(ranks)]
    messages = [(forth + back) / 2 for forth, back in ways if forth is not None and back is not None]
    return Conditions(variation=min(_MOST_VARIATION, fmean(pstdev(times) / fmean(times) for times in forwards)),
                      messages=max(0.0, *messages, 0.0) / max(map(fmean, forwards)))


def _least(source: Actions, destination: Actions, kind: str) -> float | None:
    """Least time from the end of an action on `source` to the start of the same microbatch's on `destination`."""
    return min((destination[key][0] - stop for key, (_, stop) in source.items()
                if key in destination and key[1].startswith(kind)), default=None)
