"""The engine's own schedule on a simulated clock.

Discrete events: each rank is a `RankSchedule`; actions and messages take the times given; messages of one edge keep
their order and wait for each other; ranks that share cores wait for a free one. The result is the order of actions and
the step time that the engine would need with these times and no other cost: the bound with which a measured step is
compared.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, count, repeat
from operator import add, mul
from typing import Literal, NamedTuple

from ranvier.mesh import StagePlacement
from ranvier.schedule.limits import rule_limits
from ranvier.schedule.schedule import Action, Done, Policy, Product, RankSchedule, actions_text

PRODUCTS = 4
"""Number of deferred products of a stage if they are not counted: that of one transformer layer. Between products a
rank may run what has arrived."""

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
    longer_backward: float = 0.0
    """Seconds by which a backward that defers takes longer than `backward`; negative if it is shorter."""
    alive_bytes: int = 1
    """Bytes that the deferred products of one microbatch keep alive together."""
    kept_bytes: float = 1.0
    """Bytes that one microbatch keeps between forward and return."""
    trains: bool = True
    """False: no parameter of this stage needs a gradient, and `weight` does not count."""

    @property
    def product_bytes(self) -> int:
        """Bytes that one deferred product keeps alive."""
        return self.alive_bytes // self.products

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of all actions of one microbatch."""
        return self.forward + self.backward + (self.weight if self.trains else 0.0)

    def longer_by_deferral(self, action: Action) -> float:
        """Seconds by which deferral lengthens this action, a backward that defers or a deferred product."""
        product = (self.deferred_factor - 1.0) * self.weight / self.products
        return product if action.kind == "W" else self.longer_backward


State = tuple[int, ...]
"""State of a rank, for each of its stages in turn: microbatches between forward and return, and queued products."""


class RankPeak(NamedTuple):
    """Peak bytes of a rank: kept between forward and return, kept alive by deferred products, and of both together; and
    for each stage, at that last peak, the microbatches between forward and return, and the products."""

    kept: float
    queued: int
    alive: float
    at_most_alive: tuple[tuple[int, int], ...]


def rank_peaks(states: Sequence[State], kept_bytes: Sequence[float], product_bytes: Sequence[int]) -> RankPeak:
    """Peaks of a rank with these bytes for each microbatch and each product on its stages. states: in the order in
    which they occurred."""
    kept = [sum(map(mul, kept_bytes, state[::2])) for state in states]
    queued = [sum(map(mul, product_bytes, state[1::2])) for state in states]
    alive = list(map(add, kept, queued))
    most = max(alive, default=0.0)
    state = states[alive.index(most)] if most else (0, 0) * len(kept_bytes)
    return RankPeak(max(kept, default=0.0), max(queued, default=0), most,
                    tuple(zip(state[::2], state[1::2], strict=True)))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of a simulation: seconds until the last rank was done, and each rank's (action, start, stop).

    states: for each rank those in which it holds more than before, each once, in the order in which they occurred.
    """

    seconds: float
    actions: tuple[tuple[tuple[Action, float, float], ...], ...]
    states: tuple[tuple[State, ...], ...]
    stages: tuple[StageTimes, ...]
    placement: StagePlacement

    @cached_property
    def held(self) -> tuple[RankPeak, ...]:
        """Peak bytes of each rank."""
        return tuple(rank_peaks(states, [self.stages[stage].kept_bytes for stage in held],
                                [self.stages[stage].product_bytes for stage in held])
                     for rank, states in enumerate(self.states) for held in [self.placement.stages_of(rank)])

    @property
    def most_stored(self) -> tuple[int, ...]:
        """Per stage, the maximum number of microbatches between forward and return."""
        found = [0] * len(self.stages)
        for rank, states in enumerate(self.states):
            for turn, stage in enumerate(self.placement.stages_of(rank)):
                found[stage] = max((state[2 * turn] for state in states), default=0)
        return tuple(found)

    @property
    def most_queued_bytes(self) -> tuple[int, ...]:
        """Per rank, the peak bytes that its deferred products kept alive."""
        return tuple(one.queued for one in self.held)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time, until the last one is done, in which they were idle."""
        busy = sum(stop - start for rank in self.actions for _, start, stop in rank)
        return 1.0 - busy / (self.seconds * len(self.actions)) if self.seconds else 0.0


def simulate(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
             hop: float | Callable[[int, int], float] = 0.0, transfer: float | Callable[[int, int], float] = 0.0,
             cores: int | None = None, defer_bytes: int | Sequence[int] | Literal["auto"] = 0,
             training: bool = True, jitter: Callable[[int, Action], float] | None = None,
             placement: StagePlacement | None = None, defer_last: int | None = None, max_stored: int | None = None,
             alternating: bool = False) -> Simulated:
    """Simulate one batch.

    hop: seconds of a message, or a function of (source, destination), which are ranks. transfer: seconds for which a
    message keeps its edge busy before that, in the same form; the next message waits. cores: number of ranks that may
    compute at the same time. jitter: factor on the time of an action of a rank.
    defer_bytes: bound on what deferred products keep alive, of all ranks or of each; auto is that of `rule_limits`.
    placement: which stages each rank has; by default one each. defer_last, max_stored, alternating: as for
    `RankSchedule`.
    """
    placement = placement or StagePlacement(num_ranks=len(stages))
    assert len(stages) == placement.num_stages, "a placement has as many stages as there are"
    ranks = range(placement.num_ranks)
    if defer_bytes == "auto":
        deferred = rule_limits([stage.trains for stage in stages], placement).deferred
        defer_bytes = [sum(stages[stage].alive_bytes for stage in placement.stages_of(rank)) * deferred[rank]
                       for rank in ranks]
    budgets = [defer_bytes] * len(ranks) if isinstance(defer_bytes, int) else defer_bytes
    schedules = [RankSchedule(stages=placement.stages_of(rank), num_stages=placement.num_stages,
                              num_microbatches=num_microbatches, policy=policy, in_flight=in_flight, training=training,
                              defer_bytes=budgets[rank], defer_last=defer_last, max_stored=max_stored,
                              alternating=alternating) for rank in ranks]
    return _Simulation(stages, placement, schedules, training=training, cores=cores, jitter=jitter,
                       hop=hop if callable(hop) else (lambda source, destination: hop),
                       transfer=transfer if callable(transfer) else (lambda source, destination: transfer)).run()


class _Simulation:
    """The ranks' schedules, and the events that are to come. Arguments are those of `simulate`."""

    def __init__(self, stages: Sequence[StageTimes], placement: StagePlacement, schedules: Sequence[RankSchedule], *,
                 hop: Callable[[int, int], float], transfer: Callable[[int, int], float], training: bool,
                 cores: int | None, jitter: Callable[[int, Action], float] | None) -> None:
        self._stages, self._placement, self._ranks = stages, placement, schedules
        self._hop, self._transfer, self._jitter, self._cores = hop, transfer, jitter, cores
        self._rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self._held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        self._schedule_of = [schedules[rank].stages[stage] for stage, rank in enumerate(self._rank_of)]
        self._returns = [training and any(times.trains for times in stages[:stage + 1])
                         for stage in range(placement.num_stages)]
        """Per stage, whether its forwards are followed by a backward."""
        self._products = [[Product(times.product_bytes, 0)] * times.products for times in stages]
        self._seconds = [{
            ("F", False): times.forward, ("B", True): times.backward + times.longer_backward, ("C", False): 0.0,
            ("B", False): times.backward + (times.weight if times.trains else 0.0),
            ("W", False): times.deferred_factor * times.weight / times.products} for times in stages]
        self._events: list[tuple[float, int, int, _What, int | Action]] = []
        """(time, number, stage, what, microbatch or action)"""
        self._number = count()
        self._busy: list[Action | None] = [None] * placement.num_ranks
        self._log: list[list[tuple[Action, float, float]]] = [[] for _ in schedules]
        self._state = [[0, 0] * placement.per_rank for _ in schedules]
        self._states: list[dict[State, None]] = [{} for _ in schedules]
        self._edge_free: dict[tuple[int, int], float] = {}
        self._arrived: dict[tuple[int, int], float] = {}
        self._without_core: deque[int] = deque()

    def run(self) -> Simulated:
        """Run the batch to its end."""
        for rank in range(len(self._ranks)):
            self._start(0.0, rank)
        events, busy, waiting = self._events, self._busy, self._without_core
        while events:
            now, _, stage, what, payload = heapq.heappop(events)
            rank = self._rank_of[stage]
            if what == "done":
                assert isinstance(payload, Action)
                self._finish(now, rank, stage, payload)
            else:
                assert isinstance(payload, int)
                self._schedule_of[stage].on_message(what, payload)
            if busy[rank] is None:
                self._start(now, rank)
            while waiting and len(busy) - busy.count(None) < (self._cores or 0):
                self._start(now, waiting.popleft())
        stuck = [rank for rank, schedule in enumerate(self._ranks) if not isinstance(schedule.next_action(), Done)]
        if stuck:
            raise AssertionError("the schedule ends with unfinished stages:\n" + "\n".join(
                f"rank {rank}: {actions_text([action for action, _, _ in self._log[rank]])} then "
                f"{self._ranks[rank].next_action()}" for rank in stuck))
        return Simulated(seconds=max((rank[-1][2] for rank in self._log if rank), default=0.0),
                         actions=tuple(map(tuple, self._log)), states=tuple(map(tuple, self._states)),
                         stages=tuple(self._stages), placement=self._placement)

    def _start(self, now: float, rank: int) -> None:
        """Start the next action of a rank that is idle, if there is one and a core is free."""
        if self._cores is not None:
            if rank in self._without_core:
                return
            if len(self._busy) - self._busy.count(None) >= self._cores:
                self._without_core.append(rank)
                return
        action = self._ranks[rank].possible_action()
        if action is None:
            return
        stage = self._held[rank][action.turn]
        seconds = self._seconds[stage][action.kind, action.defer]
        done = now + (seconds if self._jitter is None else seconds * self._jitter(rank, action))
        self._busy[rank] = action
        self._log[rank].append((action, now, done))
        heapq.heappush(self._events, (done, next(self._number), stage, "done", action))

    def _finish(self, now: float, rank: int, stage: int, action: Action) -> None:
        """An action is done: tell the schedule, send what it has made, and note what the rank holds."""
        schedule, state, place = self._schedule_of[stage], self._state[rank], 2 * action.turn
        self._busy[rank] = None
        match action.kind:
            case "W":
                schedule.on_done(action)
                state[place + 1] -= 1
            case "F":
                times = self._stages[stage]
                schedule.on_done(action, expects_backward=self._returns[stage],
                                 deferrable_bytes=times.alive_bytes if times.trains else 0)
                self._send(now, stage, stage + 1, "forward", action.microbatch)
                state[place] += 1
                self._states[rank][tuple(state)] = None
            case _:
                products: Sequence[Product] = self._products[stage] if action.defer else ()
                schedule.on_done(action, products=products)
                self._send(now, stage, stage - 1, "return", action.microbatch)
                state[place] -= 1
                state[place + 1] += len(products)
                if products:
                    self._states[rank][tuple(state)] = None

    def _send(self, now: float, stage: int, to: int, what: Literal["forward", "return"], microbatch: int) -> None:
        """Send a message to a neighbour; the ends of the pipeline have none."""
        if not 0 <= to < len(self._stages):
            return
        edge = source, destination = self._rank_of[stage], self._rank_of[to]
        if source == destination:
            self._schedule_of[to].on_message(what, microbatch)
            return
        sent = max(now, self._edge_free.get(edge, 0.0)) + self._transfer(source, destination)
        arrival = max(sent + self._hop(source, destination), self._arrived.get(edge, 0.0))
        self._edge_free[edge], self._arrived[edge] = sent, arrival
        heapq.heappush(self._events, (arrival, next(self._number), to, what, microbatch))


# --- the time of a batch ----------------------------------------------------------------------------------------------

# Time that one batch takes to pass through a pipeline: a lower bound in closed form, and the engine's schedule.
#
#     T = max_i (sum_j<i (t_j + 2 hop_j) + m t_i)         m microbatches, stage i needs t_i for one
#
# is reached by equal stages without messages. With weight gradients w_i that may be deferred it is the longer of
#
#     T = max_i (sum_j<i (t_j - w_j) + m (t_i - w_i)) + w_0        no stage waits for one
#     T = max_i (sum_j<i f_j + m t_i)                              a stage begins, and then never rests
#
# (f_i for a forward), and with at most f in flight, (m - 1) / f full round trips come first, and the rest of the
# microbatches after them. The schedule itself is simulated, with few microbatches: once the pipeline is full, each
# further one takes about the same time, so that two short simulations give the long one.


@dataclass(frozen=True, kw_only=True)
class EdgeTimes:
    """The edges of a pipeline: seconds for which a message keeps edge i (between stages i and i + 1) busy, and seconds
    until it arrives after that."""

    transfer: tuple[float, ...] = ()
    latency: tuple[float, ...] = ()

    def hop(self, source: int, destination: int) -> float:
        """Seconds of a message between two neighbours, after its edge is free again."""
        return self.latency[min(source, destination)] if self.latency else 0.0

    def busy(self, source: int, destination: int) -> float:
        """Seconds for which a message between two neighbours keeps their edge busy."""
        return self.transfer[min(source, destination)] if self.transfer else 0.0

    @property
    def round_trip(self) -> float:
        """Seconds of a microbatch's messages there and back."""
        return 2 * (sum(self.transfer) + sum(self.latency))


DIRECT = EdgeTimes()
"""Messages take no time."""


@dataclass(frozen=True, kw_only=True)
class BatchTime:
    """Predicted time of a batch. bubble_fraction: share of all stages' time in which they do nothing."""

    seconds: float
    bubble_fraction: float


def predict_batch_time(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *,
                       edges: EdgeTimes = DIRECT, defer_bytes: int | Sequence[int] | Literal["auto"] = "auto",
                       exact: bool = True, cores: int | None = None, placement: StagePlacement | None = None,
                       defer_last: int | None = None, max_stored: int | None = None, alternating: bool = False
                       ) -> BatchTime:
    """Predict the time of one batch of equal microbatches. exact: simulate; otherwise the closed form, which takes
    microseconds; with several stages on each rank it is a lower bound. cores: number of ranks that may compute at the
    same time, in a simulation. placement, defer_last, max_stored, alternating: as for `simulate`."""
    each = [stage.microbatch_seconds for stage in stages]
    limit = policy.in_flight(in_flight, num_microbatches)
    placement = placement or StagePlacement(num_ranks=len(stages))
    busy = num_microbatches * sum(each)
    if exact and len(stages) > 1:
        run = partial(simulate, stages, policy=policy, in_flight=limit, hop=edges.hop, transfer=edges.busy,
                      defer_bytes=defer_bytes, cores=cores, placement=placement, defer_last=defer_last,
                      max_stored=max_stored, alternating=alternating)
        seconds, busy = _extrapolate(run, num_microbatches, *_steady_counts(len(stages), limit))
    elif placement.per_rank > 1:
        seconds = lower_bound_by_rank(stages, num_microbatches, placement)
    else:
        seconds = closed_form(each, num_microbatches, limit, edges)
        if policy.defers and defer_bytes and len(stages) > 1:
            seconds = min(seconds, _deferring(stages, each, num_microbatches, limit, edges))
    idle = max(0.0, 1.0 - busy / (seconds * placement.num_ranks)) if seconds else 0.0
    return BatchTime(seconds=seconds, bubble_fraction=idle)


def lower_bound_by_rank(stages: Sequence[StageTimes], num_microbatches: int, placement: StagePlacement) -> float:
    """Lower bound of a batch's time: each rank begins after the forwards of the stages before its first one, has work
    from then on, and if no weight gradient waits, their backwards follow its own."""
    begins = list(accumulate((stage.forward for stage in stages), initial=0.0))
    ends = list(accumulate((stage.backward for stage in stages), initial=0.0))
    found = []
    for rank in range(placement.num_ranks):
        held = placement.stages_of(rank)
        waits = any(stages[stage].weight and stages[stage].trains for stage in held)
        found.append(begins[held[0]] + (0.0 if waits else ends[held[0]])
                     + num_microbatches * sum(stages[stage].microbatch_seconds for stage in held))
    return max(found)


def _deferring(stages: Sequence[StageTimes], each: Sequence[float], num_microbatches: int, in_flight: int,
               edges: EdgeTimes) -> float:
    """The closed form if weight gradients may wait."""
    waits = [stage.weight - stage.longer_backward if stage.trains else 0.0 for stage in stages]
    others = [total - wait for total, wait in zip(each, waits, strict=True)]
    begins = accumulate((stage.forward for stage in stages), initial=0.0)
    hops = accumulate((latency + transfer for latency, transfer in zip(edges.latency, edges.transfer, strict=True)),
                      initial=0.0) if edges.latency else repeat(0.0)
    return max(closed_form(others, num_microbatches, in_flight, edges) + waits[0],
               *(begin + hop + num_microbatches * total for begin, hop, total in zip(begins, hops, each, strict=False)))


def closed_form(each: Sequence[float], num_microbatches: int, in_flight: int, edges: EdgeTimes = DIRECT) -> float:
    """Lower bound of the seconds, from each stage's seconds for one microbatch: a stage waits for the forwards before
    it, runs all microbatches, and is followed by the backwards of the stages before it; an edge carries all
    messages."""
    trips = [2 * (latency + transfer) for latency, transfer in zip(edges.latency, edges.transfer, strict=True)]
    before: list[float] = list(accumulate(map(add, each, trips or repeat(0.0)), initial=0.0))
    once = sum(each) + edges.round_trip

    def passes(count: int) -> float:
        busy = max(first + count * seconds for first, seconds in zip(before, each, strict=False))
        return max(busy, once + (count - 1) * max(edges.transfer, default=0.0))

    rounds, rest = divmod(num_microbatches - 1, in_flight)  # one begins when the one `in_flight` before it has returned
    return max(passes(num_microbatches), rounds * once + passes(rest + 1))


def _extrapolate(run: Callable[[int], Simulated], num_microbatches: int, full: int, more: int) -> tuple[float, float]:
    """Seconds of the batch, and busy seconds summed over ranks. run: simulates a number of microbatches. full, more:
    results of `_steady_counts`."""
    def measured(count: int) -> tuple[float, float]:
        made = run(count)
        return made.seconds, sum(stop - start for rank in made.actions for _, start, stop in rank)

    if num_microbatches <= full + more:
        return measured(num_microbatches)
    first, longer = measured(full), measured(full + more)
    times = (num_microbatches - full) / more
    return first[0] + times * (longer[0] - first[0]), first[1] + times * (longer[1] - first[1])


def _steady_counts(num_stages: int, in_flight: int) -> tuple[int, int]:
    """Number of microbatches after which each further one takes the same time, and number over which that time is
    measured: a multiple of the period in which a full pipeline repeats itself; uneven stages of a short pipeline need
    more."""
    depth = max(num_stages, in_flight)
    full, more = (8, 8) if depth <= 8 else (6, 4) if depth <= 16 else (3, 2)
    return full * depth, more * depth
