"""The engine's own schedule on a simulated clock.

Discrete events: each rank is a `RankSchedule`; actions and messages take the times given; messages of one edge keep
their order and wait for each other; ranks that share cores wait for a free one. What comes out is the order of actions
and the time of the step that the engine would need with these times and no other cost: the bound beside which a
measured step is judged.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ranvier.mesh import StagePlacement
from ranvier.schedule.limits import rule_limits
from ranvier.schedule.schedule import Action, Done, Policy, Product, RankSchedule, Wait, actions_text

PRODUCTS = 4
"""Deferred products of a stage where they are not counted, as many as of one transformer layer: between them a rank may
run what has arrived."""

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
    deferred_factor: float = 1.0
    """Factor by which a weight gradient takes longer if it was deferred."""
    alive_bytes: int = 1
    """Bytes that the deferred products of one microbatch keep alive together."""
    kept_bytes: float = 1.0
    """Bytes that one microbatch keeps between forward and return."""
    trains: bool = True
    """False: no parameter of this stage needs a gradient, and `weight` does not count."""

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of all actions of one microbatch."""
        return self.forward + self.backward + (self.weight if self.trains else 0.0)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of a simulation: seconds until the last rank was done, and each rank's (action, start, stop).

    most_stored: per stage, the most microbatches between forward and return at once. most_queued_bytes: per rank, the
    most that its deferred products kept alive at once. most_kept_bytes: per rank, the most that microbatches kept
    between forward and return at once, on all its stages. most_alive_bytes: per rank, the most of both at once.
    at_most_alive: per stage at that time, the microbatches between forward and return, and those with queued products.
    """

    seconds: float
    actions: tuple[tuple[tuple[Action, float, float], ...], ...]
    most_stored: tuple[int, ...]
    most_queued_bytes: tuple[int, ...]
    most_kept_bytes: tuple[float, ...]
    most_alive_bytes: tuple[float, ...]
    at_most_alive: tuple[tuple[int, float], ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time, until the last one is done, in which they did nothing."""
        busy = sum(stop - start for rank in self.actions for _, start, stop in rank)
        return 1.0 - busy / (self.seconds * len(self.actions)) if self.seconds else 0.0


def simulate(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
             hop: float | Callable[[int, int], float] = 0.0, transfer: float | Callable[[int, int], float] = 0.0,
             cores: int | None = None, defer_bytes: int | Sequence[int] | Literal["auto"] = 0,
             training: bool = True, jitter: Callable[[int, Action], float] = lambda rank, action: 1.0,
             placement: StagePlacement | None = None, defer_last: int | None = None, max_stored: int | None = None,
             alternating: bool = False) -> Simulated:
    """One batch through the pipeline.

    hop: seconds of a message, or a function of (source, destination), which are ranks. transfer: seconds for which it
    keeps its edge busy before that, likewise; the next one waits. cores: ranks that may compute at once. jitter: factor
    on the time of an action of a rank.
    defer_bytes: bound on what deferred products keep alive, of all ranks or of each; auto is that of `rule_limits`.
    placement: which stages each rank has; by default one each. defer_last, max_stored, alternating: as of
    `RankSchedule`.
    """
    placement = placement or StagePlacement(num_ranks=len(stages))
    depth, ranks = placement.num_stages, range(placement.num_ranks)
    assert len(stages) == depth, "a placement has as many stages as there are"
    trained_below = [any(stage.trains for stage in stages[:index + 1]) for index in range(depth)]
    if defer_bytes == "auto":
        deferred = rule_limits([stage.trains for stage in stages], placement).deferred
        defer_bytes = [sum(stages[stage].alive_bytes for stage in placement.stages_of(rank)) * deferred[rank]
                       for rank in ranks]
    budgets = [defer_bytes] * len(ranks) if isinstance(defer_bytes, int) else defer_bytes
    held = [placement.stages_of(rank) for rank in ranks]
    rank_of = [placement.rank_of(stage) for stage in range(depth)]
    queued = [[Product(times.alive_bytes // times.products, 0)] * times.products for times in stages]
    schedules = [RankSchedule(stages=held[rank], num_stages=depth, num_microbatches=num_microbatches, policy=policy,
                              in_flight=in_flight, training=training, defer_bytes=budgets[rank],
                              defer_last=defer_last, max_stored=max_stored, alternating=alternating)
                 for rank in ranks]
    hop_of = hop if callable(hop) else (lambda source, destination: hop)
    transfer_of = transfer if callable(transfer) else (lambda source, destination: transfer)
    events: list[tuple[float, int, int, _What, int | Action]] = []  # (time, number, stage, what, microbatch or action)
    busy: list[Action | None] = [None for _ in ranks]
    log: list[list[tuple[Action, float, float]]] = [[] for _ in ranks]
    most_stored, most_queued = [0] * depth, [0 for _ in ranks]
    stored, kept_now = [0] * depth, [0.0 for _ in ranks]
    most_kept, most_alive = [0.0 for _ in ranks], [0.0 for _ in ranks]
    at_most_alive = [(0, 0.0)] * depth
    edge_free: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], float] = {}
    without_core: deque[int] = deque()
    counter = iter(range(1 << 62))

    def post(when: float, stage: int, what: _What, payload: int | Action) -> None:
        heapq.heappush(events, (when, next(counter), stage, what, payload))

    def send(now: float, stage: int, to: int, what: Literal["forward", "return"], microbatch: int) -> None:
        if not 0 <= to < depth:
            return
        edge = source, destination = rank_of[stage], rank_of[to]
        if source == destination:
            schedules[source].on_message(what, microbatch, to)
            return
        sent = max(now, edge_free.get(edge, 0.0)) + transfer_of(source, destination)
        arrival = max(sent + hop_of(source, destination), arrived.get(edge, 0.0))
        edge_free[edge], arrived[edge] = sent, arrival
        post(arrival, to, what, microbatch)

    def start(now: float, rank: int) -> None:
        if busy[rank] is not None or rank in without_core:
            return
        if cores is not None and len(busy) - busy.count(None) >= cores:
            without_core.append(rank)
            return
        action = schedules[rank].next_action()
        if isinstance(action, (Wait, Done)):
            return
        stage = held[rank][action.turn]
        times = stages[stage]
        match action.kind:
            case "F":
                seconds = times.forward
            case "B":
                seconds = times.backward + (times.weight if times.trains and not action.defer else 0.0)
            case "W":
                seconds = times.deferred_factor * times.weight / times.products
            case "C":
                seconds = 0.0
        seconds *= jitter(rank, action)
        busy[rank] = action
        log[rank].append((action, now, now + seconds))
        post(now + seconds, stage, "done", action)

    def finish(now: float, rank: int, stage: int, action: Action) -> None:
        times, schedule = stages[stage], schedules[rank]
        schedule.on_done(action, expects_backward=training and trained_below[stage],
                         deferrable_bytes=times.alive_bytes if times.trains else 0,
                         products=queued[stage] if action.defer else ())
        if action.kind == "F":
            send(now, stage, stage + 1, "forward", action.microbatch)
        elif action.kind in "BC":
            send(now, stage, stage - 1, "return", action.microbatch)
        busy[rank] = None
        if action.kind != "W":
            stored[stage] += 1 if action.kind == "F" else -1
            kept_now[rank] = kept = sum(stages[each].kept_bytes * stored[each] for each in held[rank])
            most_stored[stage], most_kept[rank] = max(most_stored[stage], stored[stage]), max(most_kept[rank], kept)
        most_queued[rank] = max(most_queued[rank], schedule.budget.used)
        alive = kept_now[rank] + schedule.budget.used
        if alive > most_alive[rank]:
            most_alive[rank] = alive
            for each, one in schedule.stages.items():
                at_most_alive[each] = stored[each], one.num_queued / stages[each].products

    now = 0.0
    for rank in ranks:
        start(now, rank)
    while events:
        now, _, stage, what, payload = heapq.heappop(events)
        rank = rank_of[stage]
        if what == "done":
            assert isinstance(payload, Action)
            finish(now, rank, stage, payload)
        else:
            assert isinstance(payload, int)
            schedules[rank].on_message(what, payload, stage)
        start(now, rank)
        while without_core and len(busy) - busy.count(None) < (cores or 0):
            start(now, without_core.popleft())
    stuck = [rank for rank, schedule in enumerate(schedules) if not isinstance(schedule.next_action(), Done)]
    if stuck:
        raise AssertionError("the schedule ends with unfinished stages:\n" + "\n".join(
            f"rank {rank}: {actions_text([action for action, _, _ in log[rank]])} then {schedules[rank].next_action()}"
            for rank in stuck))
    return Simulated(seconds=max((stop for rank in log for _, _, stop in rank), default=0.0),
                     actions=tuple(map(tuple, log)), most_stored=tuple(most_stored),
                     most_queued_bytes=tuple(most_queued), most_kept_bytes=tuple(most_kept),
                     most_alive_bytes=tuple(most_alive), at_most_alive=tuple(at_most_alive))
