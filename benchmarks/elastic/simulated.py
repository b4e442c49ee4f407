"""Ten epochs on the article's eight devices of 10 TFLOP/s, simulated: what freezing, packing and caching could give.

Every layer of a shape is two blocks of equal time, and a backward takes twice the time of a forward; embedding, head,
optimizer, transitions and the cache take no time. The run starts on pipe 8 x data 1; after each epoch layers freeze by
the cap. Then either AutoPipe's exact choice (memory is not considered, so replicas of the full model are always
allowed) or the article's own rule decides the mesh; both are timed by the engine's schedule on a simulated clock
(ranvier.schedule.simulator), with the best number of microbatches for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from benchmarks.elastic.bound import depths, speedup
from ranvier.elastic.auto_pipe import Situation, best_cut, compress, greedy, stage_sizes
from ranvier.elastic.inputs import BlockFacts
from ranvier.elastic.microbatch_profile import microbatch_counts
from ranvier.mesh import StagePlacement
from ranvier.schedule.policies import GPipe, MessageDriven


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer. flops: of one layer's forward on one sample; batch: samples of all devices together."""

    name: str
    layers: int
    hidden: int
    tokens: int
    batch: int

    @property
    def layer_flops(self) -> float:
        return 24.0 * self.tokens * self.hidden ** 2 + 4.0 * self.tokens ** 2 * self.hidden

    @property
    def parameters(self) -> tuple[int, ...]:
        """Parameters of each block: attention and MLP in turn."""
        return (4 * self.hidden ** 2, 8 * self.hidden ** 2) * self.layers


SHAPES = (Shape(name="ViT-B/16", layers=12, hidden=768, tokens=197, batch=320),
          Shape(name="BERT-base", layers=12, hidden=768, tokens=128, batch=320))


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch's mesh and its seconds of a step."""

    frozen: int
    data: int
    pipe: int
    seconds: float


def situation(shape: Shape, devices: int, flops_per_second: float, bandwidth: float) -> Situation:
    """The start on pipe `devices`. bandwidth: bytes a second between two devices."""
    block = shape.layer_flops / flops_per_second / 2
    blocks = 2 * shape.layers
    facts = BlockFacts(forward_seconds=(block,) * blocks, backward_seconds=(2 * block,) * blocks,
                       update_seconds=(0.0,) * blocks, output_bytes=(4 * shape.tokens * shape.hidden,) * blocks,
                       num_parameters=shape.parameters, parameter_bytes=tuple(4 * n for n in shape.parameters),
                       state_bytes=(0,) * blocks, cores=None, bandwidth=bandwidth, latency_seconds=0.0)
    return Situation(facts=facts, num_replicas=1, placement=StagePlacement(num_ranks=devices), samples=shape.batch,
                     microbatches=devices, policy=MessageDriven())


def course(start: Situation, frozen: Sequence[int], *, cache: bool, cut: Literal["exact", "reference"]) -> list[Epoch]:
    """The epochs with these numbers of frozen layers. An epoch reads outputs of the layers frozen in the previous
    one."""
    found, before, first = [], 0, start.placement.num_ranks
    ranks, pipe = start.num_replicas * first, first
    for number, depth in enumerate(frozen):
        here = replace(start, frozen=2 * depth, cached=2 * before if cache else 0)
        if number > 0 and cut == "exact":
            times = {pipe: _seconds_on(here, ranks // pipe, pipe)
                     for pipe in range(ranks, 0, -1) if ranks % pipe == 0 and here.cached + pipe <= here.num_blocks + 1}
            pipe = min(times, key=lambda pipe: float(f"{times[pipe]:.9g}"))
        elif number > 0:
            pipe = _packed(start, pipe, 2 * depth)
        data = ranks // pipe
        found.append(Epoch(frozen=depth, data=data, pipe=pipe, seconds=_seconds_on(here, data, pipe)))
        before = depth
    return found


def _seconds_on(here: Situation, data: int, pipe: int) -> float:
    """Seconds of the best cut of one mesh and number of microbatches; with fewer cached layers if its stages need
    them."""
    mesh = replace(here, num_replicas=data, placement=StagePlacement(num_ranks=pipe),
                   cached=min(here.cached, here.num_blocks - pipe + 1))
    times = [best_cut(replace(mesh, microbatches=count)).seconds
             for count in microbatch_counts(pipe, -(-here.samples // data))]
    return min(seconds for seconds in times if seconds is not None)


def _packed(start: Situation, pipe: int, frozen: int) -> int:
    """The article's pipeline length, by sizes."""
    sizes = [size / 4e6 for size in start.facts.parameter_bytes]
    largest = max(stage_sizes(sizes, greedy(sizes, start.placement.num_ranks)))
    return compress(sizes, pipe, frozen, largest)


def simulate_all(shape: Shape, *, devices: int = 8, alpha: float = 1 / 3, epochs: int = 10,
                 flops_per_second: float = 10e12, bandwidth: float = inf) -> dict[str, dict]:
    """Contender -> its epochs, and the speed-up over `none`."""
    start, frozen = situation(shape, devices, flops_per_second, bandwidth), depths(shape.layers, alpha, epochs)
    none = course(start, [0] * epochs, cache=False, cut="reference")
    gpipe = _seconds_on(replace(start, policy=GPipe()), 2, devices // 2)
    found = {"none": none, "gpipe-dp": [Epoch(frozen=0, data=2, pipe=devices // 2, seconds=gpipe)] * epochs}
    for cut in ("exact", "reference"):
        for name, cache in (("pipe-dp", False), ("all", True)):
            found[f"{name}, {cut}"] = course(start, frozen, cache=cache, cut=cut)
    whole = sum(epoch.seconds for epoch in none)
    bounds = {cache: speedup(shape.layers, alpha, epochs, cache=cache) for cache in (False, True)}
    return {name: {"speedup": whole / sum(epoch.seconds for epoch in mine),
                   "bound": bounds["all" in name] if mine[-1].frozen else 1.0,
                   "course": [(epoch.frozen, epoch.data, epoch.pipe) for epoch in mine]}
            for name, mine in found.items()}
