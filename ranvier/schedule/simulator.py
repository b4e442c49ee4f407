"""The engine's own schedule on a simulated clock.

Discrete events: each stage is a `Schedule`; actions and messages take the times given; messages of one edge keep their
order and wait for each other; stages that share cores wait for a free one. What comes out is the order of actions and
the time of the step that the engine would need with these times and no other cost: the bound beside which a measured
step is judged.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ranvier.schedule.limits import rule_limits
from ranvier.schedule.schedule import Action, Done, Policy, Product, Schedule, Wait

_What = Literal["forward", "return", "done"]
"""The kind of an event: a message has arrived, or an action is done."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of each action of one stage. `weight` is the sum over `products` deferred products of a microbatch; a
    backward that does not defer takes `backward` + `weight`."""

    forward: float
    backward: float
    weight: float
    products: int = 1
    alive_bytes: int = 1
    """What the deferred products of one microbatch keep alive together."""
    trains: bool = True
    """False: no parameter of this stage needs a gradient, and `weight` does not count."""

    @property
    def microbatch_seconds(self) -> float:
        """Of all actions of one microbatch."""
        return self.forward + self.backward + (self.weight if self.trains else 0.0)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came out: seconds until the last stage was done, and each stage's (action, start, stop)."""

    seconds: float
    actions: tuple[tuple[tuple[Action, float, float], ...], ...]
    most_stored: tuple[int, ...]
    """Per stage: the most microbatches between forward and return at once."""
    most_queued_bytes: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of all stages' time, until the last one is done, in which they did nothing."""
        busy = sum(stop - start for stage in self.actions for _, start, stop in stage)
        return 1.0 - busy / (self.seconds * len(self.actions)) if self.seconds else 0.0


def simulate(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
             hop: float | Callable[[int, int], float] = 0.0, transfer: float | Callable[[int, int], float] = 0.0,
             cores: int | None = None, defer_bytes: int | Sequence[int] | Literal["auto"] = 0,
             training: bool = True, jitter: Callable[[int, Action], float] = lambda stage, action: 1.0) -> Simulated:
    """One batch through the pipeline.

    hop: seconds of a message, or a function of (source, destination). transfer: seconds for which it keeps its edge
    busy before that, likewise; the next one waits. cores: stages that may compute at once. jitter: factor on the time
    of an action.
    defer_bytes: bound on what deferred products keep alive, of all stages or of each; auto is that of `rule_limits`.
    """
    depth = len(stages)
    trained_below = [any(stage.trains for stage in stages[:index + 1]) for index in range(depth)]
    if defer_bytes == "auto":
        deferred = rule_limits([stage.trains for stage in stages]).deferred
        defer_bytes = [stage.alive_bytes * count for stage, count in zip(stages, deferred, strict=True)]
    budgets = [defer_bytes] * depth if isinstance(defer_bytes, int) else defer_bytes
    schedules = [Schedule(stage=index, num_stages=depth, num_microbatches=num_microbatches, policy=policy,
                          in_flight=in_flight, training=training, defer_bytes=budgets[index]) for index in range(depth)]
    hop_of = hop if callable(hop) else (lambda source, destination: hop)
    transfer_of = transfer if callable(transfer) else (lambda source, destination: transfer)
    events: list[tuple[float, int, int, _What, int | Action]] = []
    busy: list[Action | None] = [None] * depth
    log: list[list[tuple[Action, float, float]]] = [[] for _ in stages]
    most_stored, most_queued = [0] * depth, [0] * depth
    edge_free: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], float] = {}
    without_core: deque[int] = deque()
    counter = iter(range(1 << 62))

    def post(when: float, stage: int, what: _What, payload: int | Action) -> None:
        heapq.heappush(events, (when, next(counter), stage, what, payload))

    def send(now: float, source: int, destination: int, what: Literal["forward", "return"], microbatch: int) -> None:
        if 0 <= destination < depth:
            sent = max(now, edge_free.get((source, destination), 0.0)) + transfer_of(source, destination)
            arrival = max(sent + hop_of(source, destination), arrived.get((source, destination), 0.0))
            edge_free[source, destination], arrived[source, destination] = sent, arrival
            post(arrival, destination, what, microbatch)

    def start(now: float, stage: int) -> None:
        if busy[stage] is not None or stage in without_core:
            return
        if cores is not None and len(busy) - busy.count(None) >= cores:
            without_core.append(stage)
            return
        action = schedules[stage].next_action()
        if isinstance(action, (Wait, Done)):
            return
        times = stages[stage]
        seconds = {"F": times.forward, "C": 0.0,
                   "B": times.backward + (times.weight if times.trains and not action.defer else 0.0),
                   "W": times.weight / times.products}[action.kind] * jitter(stage, action)
        busy[stage] = action
        log[stage].append((action, now, now + seconds))
        post(now + seconds, stage, "done", action)

    def finish(now: float, stage: int, action: Action) -> None:
        times, schedule = stages[stage], schedules[stage]
        products = [Product(times.alive_bytes // times.products, 0)] * times.products if action.defer else ()
        schedule.on_done(action, expects_backward=training and trained_below[stage],
                         deferrable_bytes=times.alive_bytes if times.trains else 0, products=products)
        if action.kind == "F":
            send(now, stage, stage + 1, "forward", action.microbatch)
        elif action.kind in "BC":
            send(now, stage, stage - 1, "return", action.microbatch)
        busy[stage] = None
        most_stored[stage] = max(most_stored[stage], schedule.forwards_done - schedule.returns_done)
        most_queued[stage] = max(most_queued[stage], schedule.queued_bytes)

    now = 0.0
    for stage in range(depth):
        start(now, stage)
    while events:
        now, _, stage, what, payload = heapq.heappop(events)
        if what == "done":
            assert isinstance(payload, Action)
            finish(now, stage, payload)
        else:
            assert isinstance(payload, int)
            schedules[stage].on_message(what, payload)
        start(now, stage)
        while without_core and len(busy) - busy.count(None) < (cores or 0):
            start(now, without_core.popleft())
    stuck = [index for index, schedule in enumerate(schedules) if not isinstance(schedule.next_action(), Done)]
    if stuck:
        raise AssertionError("the schedule ends with unfinished stages:\n" + "\n".join(
            f"stage {index}: {schedules[index].text()} then {schedules[index].next_action()}" for index in stuck))
    return Simulated(seconds=max((stop for stage in log for _, _, stop in stage), default=0.0),
                     actions=tuple(map(tuple, log)), most_stored=tuple(most_stored),
                     most_queued_bytes=tuple(most_queued))
