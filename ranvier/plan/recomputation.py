"""Activation recomputation: which blocks keep only their inputs, and recompute the rest in their backward.

    layers    | 0 | 1 | 2 | 3 | 4 | 5 |          of one stage
    segments  | s   -   - | s   -   - |          interval 3: s is stored, for every microbatch in flight
    backward                <-- recompute 3 4 5, keep their insides until their backward is through

A stage of L layers that stores f microbatches keeps f ceil(L / ac) carried states and the insides of ac layers. The
paper's rule (AxoNN, section V-A) gives both the same weight; `auto` counts bytes. Recomputing costs one forward,
whatever the interval; if every second layer keeps its inside (`alternate`), half of one. `selective` keeps the inputs
of each block and the outputs of its expensive operations, and recomputes only what is between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ranvier.cost.blocks import BlockCost
from ranvier.schedule.schedule import Policy

Recompute = Literal["none", "auto", "selective", "alternate", "axonn"] | int
_MANY = 64
"""Assumed microbatches of a batch: recomputation is decided before the first batch."""


def stored_bytes(kept: Sequence[int], stored: Sequence[int], interval: int, microbatches: int) -> int:
    """Peak activation bytes of a stage's layers.

    kept, stored: bytes inside each layer, and of the carried state that enters it, for one microbatch. interval:
    layers per segment, 0 for no recomputation. microbatches: number stored at the same time.
    """
    if not interval:
        return microbatches * sum(kept)
    starts = range(0, len(kept), interval)
    insides = max((sum(kept[start:start + interval]) for start in starts), default=0)
    return microbatches * sum(stored[start] for start in starts) + insides


@lru_cache(maxsize=4096)  # a search repeats the same arguments for very many candidates
def best_interval(kept: tuple[int, ...], stored: tuple[int, ...], microbatches: int) -> int:
    """The interval that needs the fewest bytes, the longest of equal ones; 0 if recomputation saves nothing.

    For equal layers this is near sqrt(f L C / I), with C and I the bytes of a carried state and of a layer's inside.
    """
    return min(range(len(kept), -1, -1),
               key=lambda interval: (stored_bytes(kept, stored, interval, microbatches), interval != 0))


def paper_interval(num_layers: int, stage_layers: int) -> int:
    """AxoNN's rule: the divisor of the stage's number of layers that is nearest to sqrt(layers of the model)."""
    divisors = [size for size in range(1, stage_layers + 1) if stage_layers % size == 0]
    return min(divisors, key=lambda size: (abs(size - math.sqrt(num_layers)), size), default=0)


def stage_segments(recompute: Recompute, blocks: Sequence[str], layers: Sequence[Sequence[str]],
                   kept: Sequence[int], entered: Sequence[int], microbatches: int) -> list[range]:
    """The segments of one stage, as places in `blocks`.

    recompute: the setting. kept, entered: bytes inside each block and of what enters it, for one microbatch; used only
    by auto. microbatches: number that the stage stores at the same time.
    """
    if recompute == "none":
        return []
    own = layers_of(blocks, layers)
    match recompute:
        case "alternate":
            return own[::2]
        case "selective":
            return [range(place, place + 1) for layer in own for place in layer]
        case "axonn":
            interval = paper_interval(len(layers) or len(blocks), len(own))
        case "auto":
            interval = best_interval(tuple(sum(kept[layer.start:layer.stop]) for layer in own),
                                     tuple(entered[layer.start] for layer in own), microbatches)
        case _:
            interval = recompute
    return segments_of(own, interval)


def recomputed_segments(recompute: Recompute, blocks: Sequence[str], layers: Sequence[Sequence[str]],
                        costs: Sequence[BlockCost], policy: Policy, in_flight: int, at: tuple[int, int]) -> list[range]:
    """`stage_segments` of a stage under a policy. costs: of its blocks, which auto needs. at: (stage, stages)."""
    stored = policy.stored(policy.in_flight(in_flight, _MANY), *at)
    return stage_segments(recompute, blocks, layers, [cost.kept_bytes for cost in costs],
                          [cost.input_bytes for cost in costs], stored)


def layers_of(blocks: Sequence[str], layers: Sequence[Sequence[str]]) -> list[range]:
    """The stage's blocks (their places in `blocks`) layer by layer; a layer may be cut by the stage's ends.

    Without declared layers each block counts as one.
    """
    if not layers:
        return [range(place, place + 1) for place in range(len(blocks))]
    number = {block: index for index, layer in enumerate(layers) for block in layer}
    found: list[range] = []
    for place, block in enumerate(blocks):
        if block not in number:
            continue
        if found and found[-1].stop == place and number[blocks[place - 1]] == number[block]:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


def segments_of(layers: Sequence[range], interval: int) -> list[range]:
    """Runs of `interval` consecutive layers; none for interval 0. Blocks between layers end a run."""
    found: list[range] = []
    lengths: list[int] = []
    for layer in layers if interval else ():
        if found and found[-1].stop == layer.start and lengths[-1] < interval:
            found[-1], lengths[-1] = range(found[-1].start, layer.stop), lengths[-1] + 1
        else:
            found.append(layer)
            lengths.append(1)
    return found


def runs_of(num_blocks: int, segments: Sequence[range]) -> list[tuple[range, bool]]:
    """Blocks in order, as recomputed segments and single blocks between them; True for recomputed ones."""
    inside = {place: segment for segment in segments for place in segment}
    runs: list[tuple[range, bool]] = []
    for place in range(num_blocks):
        segment = inside.get(place)
        if segment is None:
            runs.append((range(place, place + 1), False))
        elif place == segment.start:
            runs.append((segment, True))
    return runs
