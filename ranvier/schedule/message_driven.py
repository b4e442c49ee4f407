"""The simulation of `ranvier.schedule.simulator` for the message-driven policy with a core for each rank, several times
as fast: counts in lists in place of objects, and no list of actions. A search simulates thousands of schedules.

The rules are those of `Schedule`, `RankSchedule` and `MessageDriven`, and the times the same to the last bit
(`tests/planner/test_simulation.py`): what these rules say is said there. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ranvier.mesh import StagePlacement
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.schedule import ActionKind, Policy, due, stored_in_even_flow
from ranvier.schedule.simulator import StageTimes, State

Factor = Callable[[int, ActionKind, int, int, int], float]
"""(rank, kind, microbatch, product, turn) -> factor on the time of that action."""
_FORWARD, _DEFERRING, _BACKWARD, _WEIGHT, _CREDIT, _FORWARD_ARRIVES, _RETURN_ARRIVES = range(7)
_KINDS: tuple[ActionKind, ...] = ("F", "B", "B", "W", "C")


class Traced(NamedTuple):
    """seconds, states: as of `Simulated`. deferred: of each rank the stages of its deferred products, in their
    order."""

    seconds: float
    states: tuple[tuple[State, ...], ...]
    deferred: tuple[tuple[int, ...], ...]


def is_message_driven(policy: Policy) -> bool:
    """Whether this file knows the policy's choices."""
    return type(policy) is MessageDriven and policy.defers


def trace(stages: Sequence[StageTimes], num_microbatches: int, in_flight: int, *, placement: StagePlacement,
          budgets: Sequence[int], hop: Callable[[int, int], float], transfer: Callable[[int, int], float],
          factor: Factor | None = None, defer_last: int | None = None, max_stored: int | None = None,
          alternating: bool = False) -> Traced:
    """One batch. budgets: bytes of deferred products on each rank; other arguments as of `simulate`."""
    depth, ranks, count = placement.num_stages, range(placement.num_ranks), num_microbatches
    held = [placement.stages_of(rank) for rank in ranks]
    rank_of = [placement.rank_of(stage) for stage in range(depth)]
    turn_of = [held[rank_of[stage]].index(stage) for stage in range(depth)]
    has_graph = [any(times.trains for times in stages[:stage + 1]) for stage in range(depth)]
    needed = [times.alive_bytes if times.trains else 0 for times in stages]
    seconds_of = [(times.forward, times.backward, times.backward + (times.weight if times.trains else 0.0),
                   times.deferred_factor * times.weight / times.products, 0.0) for times in stages]
    most_stored = [stored_in_even_flow(stage=stage, num_stages=depth, in_flight=in_flight)
                   if placement.per_rank == 1 else count for stage in range(depth)]
    between = 2 * depth
    due_forward, due_return = ([due(kind, 0, stage=stage, num_stages=depth, in_flight=in_flight)[0]
                                for stage in range(depth)] for kind in ("F", "B"))  # of the first microbatch
    first_deferred = 0 if defer_last is None else count - defer_last
    forwards, returns, arrived, returned = ([0] * depth for _ in range(4))
    """Of each stage the forwards and returns that have run, and those that have arrived and have not."""
    waiting = [deque[int]() for _ in stages]  # microbatches with queued products
    products = [0] * depth  # that have run of the first of these
    used = [0] * len(ranks)
    busy = [False] * len(ranks)
    state, states = [[0, 0] * placement.per_rank for _ in ranks], [dict[State, None]() for _ in ranks]
    deferred: list[list[int]] = [[] for _ in ranks]
    events: list[tuple[float, int, int, int, int]] = []  # (time, number, stage, what, microbatch)
    edge_free: dict[tuple[int, int], float] = {}
    last_arrival: dict[tuple[int, int], float] = {}
    number, end_of_all = 0, 0.0

    def may_begin(stage: int) -> bool:
        if stage:
            return arrived[stage] > 0
        return forwards[0] < count and forwards[0] - returns[0] < in_flight

    def backward(stage: int) -> int:
        if not has_graph[stage]:
            return _CREDIT
        rank = rank_of[stage]
        if 0 < needed[stage] <= budgets[rank] - used[rank] and returns[stage] >= first_deferred:
            return _DEFERRING
        return _WEIGHT if waiting[stage] else _BACKWARD

    def own_choice(stage: int) -> int | None:
        """`Schedule.next_action` with `MessageDriven.choose`."""
        begins, goes_back = may_begin(stage), returned[stage] > 0
        if goes_back and not has_graph[stage]:
            return _CREDIT
        if (forwards[stage] - returns[stage] if has_graph[stage] else 0) >= most_stored[stage]:
            begins = False
        elif alternating and forwards[stage] < count:
            goes_back = False
        if begins and goes_back:
            begins = (between * forwards[stage] + due_forward[stage]
                      <= between * returns[stage] + due_return[stage])
        if begins:
            return _FORWARD
        return backward(stage) if goes_back else _WEIGHT if waiting[stage] else None

    def choice(rank: int) -> tuple[int, int] | None:
        """`RankSchedule.next_action` without a bound: (stage, what)."""
        if len(held[rank]) == 1:
            what = own_choice(held[rank][0])
            return None if what is None else (held[rank][0], what)
        found, first = None, (2, 0, False)
        for stage in reversed(held[rank]):
            what = own_choice(stage)
            if what is None:
                continue
            if what == _WEIGHT:
                turn = 1, 1 << 62, False
            elif what == _FORWARD:
                turn = 1, between * forwards[stage] + due_forward[stage], False
            else:
                turn = what != _CREDIT, between * returns[stage] + due_return[stage], True
            if turn < first:
                found, first = (stage, what), turn
        return found

    def weight(rank: int) -> tuple[int, int] | None:
        for stage in reversed(held[rank]):
            if waiting[stage]:
                return stage, _WEIGHT
        return None

    def first_due(rank: int, most: int) -> tuple[int, int] | None:
        """`RankSchedule._first_due`."""
        ready, stored, own = [], 0, held[rank]
        for stage in own:
            if has_graph[stage]:
                stored += forwards[stage] - returns[stage]
            stored += len(waiting[stage])
            if may_begin(stage):
                ready.append((True, between * forwards[stage] + due_forward[stage], False, stage))
            if returned[stage]:
                ready.append((has_graph[stage], between * returns[stage] + due_return[stage], True, stage))
        if len(ready) > 1:
            ready.sort()
        for _, when, goes_back, stage in ready:
            if goes_back:
                return stage, backward(stage)
            due_before = stored
            for other in own:
                before = min(-((due_forward[other] - when) // between), count) - forwards[other]
                if before > 0:
                    due_before += before
            if due_before < most:
                return stage, _FORWARD
            for other in own:
                if forwards[other] < count and between * forwards[other] + due_forward[other] < when:
                    break
                if returns[other] < count and between * returns[other] + due_return[other] < when:
                    break
            else:
                return weight(rank) or (stage, _FORWARD)
        return weight(rank)

    def start(now: float, rank: int) -> None:
        nonlocal number, end_of_all
        found = choice(rank) if max_stored is None else first_due(rank, max_stored)
        if found is None:
            return
        stage, what = found
        microbatch = forwards[stage] if what == _FORWARD else returns[stage]
        if what == _WEIGHT:
            microbatch = waiting[stage][0]
            deferred[rank].append(stage)
        seconds = seconds_of[stage][what]
        if factor is not None:
            seconds *= factor(rank, _KINDS[what], microbatch, products[stage] if what == _WEIGHT else 0, turn_of[stage])
        busy[rank] = True
        end = now + seconds
        end_of_all = max(end_of_all, end)
        heappush(events, (end, number, stage, what, microbatch))
        number += 1

    def send(now: float, stage: int, to: int, what: int, microbatch: int) -> None:
        nonlocal number
        edge = source, destination = rank_of[stage], rank_of[to]
        if source == destination:
            (arrived if what == _FORWARD_ARRIVES else returned)[to] += 1
            return
        sent = max(now, edge_free.get(edge, 0.0)) + transfer(source, destination)
        arrival = max(sent + hop(source, destination), last_arrival.get(edge, 0.0))
        edge_free[edge], last_arrival[edge] = sent, arrival
        heappush(events, (arrival, number, to, what, microbatch))
        number += 1

    def finish(now: float, rank: int, stage: int, what: int, microbatch: int) -> None:
        times, at = stages[stage], 2 * turn_of[stage]
        if what == _FORWARD:
            forwards[stage] += 1
            arrived[stage] -= stage > 0
            state[rank][at] += 1
            if stage == depth - 1:
                returned[stage] += 1
            else:
                send(now, stage, stage + 1, _FORWARD_ARRIVES, microbatch)
        elif what == _WEIGHT:
            used[rank] -= times.product_bytes
            products[stage] += 1
            if products[stage] == times.products:
                products[stage] = 0
                waiting[stage].popleft()
        else:
            returned[stage] -= 1
            returns[stage] += 1
            state[rank][at] -= 1
            if what == _DEFERRING:
                waiting[stage].append(microbatch)
                used[rank] += times.products * times.product_bytes
            if stage:
                send(now, stage, stage - 1, _RETURN_ARRIVES, microbatch)
        state[rank][at + 1] = len(waiting[stage]) * times.products - products[stage]
        states[rank][tuple(state[rank])] = None
        busy[rank] = False

    for rank in ranks:
        start(0.0, rank)
    while events:
        now, _, stage, what, microbatch = heappop(events)
        rank = rank_of[stage]
        if what == _FORWARD_ARRIVES:
            arrived[stage] += 1
        elif what == _RETURN_ARRIVES:
            returned[stage] += 1
        else:
            finish(now, rank, stage, what, microbatch)
        if not busy[rank]:
            start(now, rank)
    assert all(each == count for each in returns) and not any(waiting), "the schedule ends with unfinished stages"
    return Traced(end_of_all, tuple(map(tuple, states)), tuple(map(tuple, deferred)))
