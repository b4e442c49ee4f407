"""Schedule of a rank: for each of its stages a state machine without clock, tensors or communication.

    on_message(...)  a forward or a return has arrived            F3  forward of microbatch 3
    next_action()    the action to run now, or Wait, or Done      B3  its backward (the input gradient)
    on_done(...)     that action has run                          W3  one weight-gradient product of microbatch 3
                                                                  C3  its credit is passed on: nothing to compute

Every microbatch crosses every edge twice: once forward, and once backward as its *return*, which carries gradients or
is just a credit (evaluation, a frozen prefix). Stage 0 keeps at most `in_flight` microbatches between its forward and
their return, so every queue in the pipeline is bounded, even with frozen layers. Edges are FIFO, so forwards, backwards
and the products of one weight run in microbatch order under every policy, and sums are bit-identical.

These rules determine which actions are ready; the policy (policies.py) chooses one of them. A rank with several
stages (`RankSchedule`) asks the policy for each stage, and runs the answer that is due first (`due`). If the number of
microbatches that its stages hold is bounded (`max_stored`), it runs the ready action that is due first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol

from ranvier.errors import ConfigError

ActionKind = Literal["F", "B", "W", "C"]


class Action(NamedTuple):
    """One unit of work on a stage.

    defer: for B, whether its weight-gradient products are queued (True) or computed inside it.
    product: for W, which of the microbatch's queued products.
    turn: which of the rank's stages, from the first on.
    """

    kind: ActionKind
    microbatch: int
    defer: bool = False
    product: int = 0
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.turn}" if self.turn else "")


class Wait(NamedTuple):
    """Nothing can run until one of these microbatches (None: not awaited) arrives for `stage`, or a message for
    another stage."""

    forward: int | None
    backward: int | None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The stage has done everything for every microbatch of this batch."""


class Product(NamedTuple):
    """A queued weight-gradient product: the bytes it keeps alive and the chunk of gradients that it belongs to."""

    alive_bytes: int
    chunk: int


Due = tuple[int, bool]
_NEVER: Due = (1 << 62, False)
_turn = itemgetter(0)
Turn = tuple[bool, Due]
"""Whether something is computed, and when it is due: credits come first, since they cost nothing and may unblock the
stages before."""


def due(kind: ActionKind, microbatch: int, *, stage: int, num_stages: int, in_flight: int) -> Due:
    """When a forward or a return should run on `stage`, in an even flow with `in_flight` microbatches under way: a
    microbatch begins every 2 `num_stages`, and advances one stage every `in_flight`. At equal times forwards come
    first."""
    hops = stage if kind == "F" else 2 * (num_stages - 1) - stage
    return 2 * num_stages * microbatch + in_flight * hops, kind != "F"


def forwards_before_returns(*, stage: int, num_stages: int, per_rank: int) -> int:
    """Forwards that the rank of `stage` runs, on all its stages, before the first return under interleaved 1F1B
    (Narayanan et al., 2021): those of all its stages but the last, for as many microbatches as ranks, and two for each
    rank that follows. The rank stores at most one more."""
    ranks = num_stages // per_rank
    return (per_rank - 1) * ranks + 2 * (ranks - 1 - stage % ranks)


def stored_in_even_flow(*, stage: int, num_stages: int, in_flight: int) -> int:
    """Maximum number of microbatches that `stage` stores in the flow of `due`: with as many in flight as stages, the
    same as under 1F1B. The last stage's forward is followed by its backward."""
    return 1 if stage == num_stages - 1 else max(1, -(-in_flight * (num_stages - stage) // num_stages))


class Ready(NamedTuple):
    """Input of a policy: the next action of each kind that could run now, and the stage's progress."""

    forward: Action | None
    backward: Action | None
    weight: Action | None
    stage: int
    num_stages: int
    num_microbatches: int
    forwards_done: int
    returns_done: int
    in_flight: int
    """The limit that applies to this run."""
    may_store: bool = True
    """Whether the stage stores the activations of fewer microbatches than the maximum in an even flow."""
    alternating: bool = False
    """`Limits.alternating`."""


class Policy(Protocol):
    """Picks the next action among those that are ready. Stateless: the same `Ready` gives the same choice."""

    @property
    def name(self) -> str:
        """Name of the policy in `pipeline.policy`."""

    @property
    def defers(self) -> bool:
        """Whether backwards may queue their weight-gradient products."""

    def choose(self, ready: Ready) -> Action | None:
        """Return one of the ready actions, or None to wait although something is ready."""

    def in_flight(self, in_flight: int, num_microbatches: int) -> int:
        """The limit that applies to a run with this setting."""

    def stored(self, in_flight: int, stage: int, num_stages: int) -> int:
        """Maximum number of microbatches whose activations `stage` stores at the same time, under that limit. `choose`
        must respect it, for example by `ready.forwards_done - ready.returns_done`: memory is predicted from it, and
        nothing else checks it."""


def check_policy_object(policy: object, where: str = "Engine(policy=...)") -> None:
    """Raise ConfigError unless `policy` is an object with the members of a `Policy`."""
    if isinstance(policy, str):
        raise ConfigError("is not a policy object", code="policy-object-is-a-name", where=where, value=policy,
                          remedy="Name a policy in Pipeline(policy=...).")
    lacking = [name for name in ("name", "defers") if not hasattr(policy, name)] + [
        f"{name}()" for name in ("choose", "in_flight", "stored") if not callable(getattr(policy, name, None))]
    if lacking or isinstance(policy, type):
        raise ConfigError("is a class, not an object" if isinstance(policy, type) else
                          f"is not a Policy: it lacks {', '.join(lacking)}", code="policy-object-incomplete",
                          where=where, value=getattr(policy, "__name__", type(policy).__name__),
                          remedy="The docstring of ranvier.testing.policies has a policy in five lines.")


@dataclass(slots=True)
class DeferBudget:
    """Bytes that the queued products of a rank keep alive, and their limit. held: microbatches that it stores, or that
    have queued products, counted per stage. version: increases when another forward or return may be ready, or `held`
    changes."""

    limit: int
    used: int = 0
    held: int = 0
    version: int = 0


class Schedule:
    """The actions of one stage for one batch.

    Args:
        in_flight: microbatches between stage 0's forward and their return; at least 1.
        training: False runs forwards only.
        defer_bytes: bound on what queued products keep alive; a `DeferBudget` is shared with other stages.
        defer_last: only the products of this many last microbatches may be queued; None for all microbatches.
        alternating: as in `Limits`.
        turn: which of its rank's stages it is. of: number of the rank's stages.
    """

    def __init__(self, *, stage: int, num_stages: int, num_microbatches: int, policy: Policy, in_flight: int,
                 training: bool = True, defer_bytes: int | DeferBudget = 0, defer_last: int | None = None,
                 alternating: bool = False, turn: int = 0, of: int = 1) -> None:
        assert 0 <= stage < num_stages and in_flight >= 1 and num_microbatches >= 0
        self.stage, self.num_stages, self.num_microbatches = stage, num_stages, num_microbatches
        self.policy, self.training, self.turn = policy, training, turn
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        """Whether the stage has the model's inputs, and whether it has the loss."""
        self.budget = DeferBudget(defer_bytes) if isinstance(defer_bytes, int) else defer_bytes
        self.in_flight, self.alternating = policy.in_flight(in_flight, num_microbatches), alternating
        self._most_stored = stored_in_even_flow(stage=stage, num_stages=num_stages, in_flight=self.in_flight) \
            if of == 1 else num_microbatches
        self._period, self._burst = 2 * num_stages, 1
        """`_burst` microbatches follow each other, and the next ones are due a `_period` later."""
        self._first_dues = [due(kind, 0, stage=stage, num_stages=num_stages, in_flight=self.in_flight)[0]
                            for kind in ("F", "B")]
        """When the forward and the return of the first microbatch are due."""
        if alternating and of > 1:
            self._period, self._burst = num_stages, num_stages // of
            self._first_dues = [turn * self._burst, (of - 1 - turn) * self._burst
                                + forwards_before_returns(stage=stage, num_stages=num_stages, per_rank=of)]
        self._first_deferred = 0 if defer_last is None else num_microbatches - defer_last
        self.forwards_done = 0
        self.returns_done = 0
        self.history: list[Action] = []
        self._forwards_arrived = 0
        self._returns_arrived = 0
        self._forward_due, self._return_due = self.due("F", 0), self.due("B", 0)
        """When the next forward and the next return are due, arrived or not."""
        self._expects_backward: dict[int, int] = {}  # microbatch with a graph -> bytes its products would keep alive
        self.queue: dict[Action, Product] = {}  # in the order in which they run
        self._ready: list[tuple[Turn, ActionKind, Schedule]] | None = None
        """Cached result of `ready`, until something happens."""
        self._waiting: dict[int, int] = {}  # microbatch with queued products -> how many of them

    # ------------------------------------------------------------------ what happened

    def on_message(self, kind: Literal["forward", "return"], microbatch: int) -> None:
        """Note that a message has arrived. Messages of one kind arrive in microbatch order, returns after their forward
        has run."""
        if kind == "forward":
            expected, end = self._forwards_arrived, 0 if self.is_first else self.num_microbatches
            self._forwards_arrived += 1
        else:
            expected, end = self._returns_arrived, 0 if self.is_last else self.forwards_done
            self._returns_arrived += 1
        if microbatch != expected or microbatch >= end:
            raise AssertionError(f"stage {self.stage} got the {kind} of microbatch {microbatch}, expected "
                                 f"{expected if expected < end else 'none'} of {self.num_microbatches}; "
                                 f"so far: {self.text() or 'nothing'}")
        self._ready = None
        self.budget.version += 1

    def on_done(self, action: Action, *, expects_backward: bool = False, deferrable_bytes: int = 0,
                products: Sequence[Product] = ()) -> None:
        """Note that `action` has run.

        After F: expects_backward says whether a graph was kept, deferrable_bytes what its products would keep alive.
        After B: products are those it has queued.
        """
        self.history.append(action)
        kind, microbatch = action.kind, action.microbatch
        if kind == "W":
            self.budget.used -= self.queue.pop(action).alive_bytes
            self._waiting[microbatch] -= 1
            if not self._waiting[microbatch]:
                del self._waiting[microbatch]
                self.budget.held -= 1
                self.budget.version += 1
            return
        self._ready = None
        self.budget.version += 1
        match kind:
            case "F":
                self.forwards_done += 1
                self._forward_due = self.due(kind, self.forwards_done)
                if expects_backward:
                    self._expects_backward[microbatch] = deferrable_bytes
                    self.budget.held += 1
                if self.is_last:
                    self._returns_arrived += 1
            case "B":
                self._return(microbatch)
                del self._expects_backward[microbatch]
                for number, product in enumerate(products):
                    self.queue[Action("W", microbatch, False, number, self.turn)] = product
                    self.budget.used += product.alive_bytes
                if products:
                    self._waiting[microbatch] = len(products)
                else:
                    self.budget.held -= 1
            case "C":
                self._return(microbatch)
        if kind != "F" and self.returns_done == self.num_microbatches:
            # the last products run chunk by chunk in reduction order
            self.queue = dict(sorted(self.queue.items(), key=lambda item: item[1].chunk))

    def _return(self, microbatch: int) -> None:
        assert self.returns_done == microbatch < self._returns_arrived
        self.returns_done += 1
        self._return_due = self.due("B", self.returns_done)

    # ------------------------------------------------------------------ what next

    def next_action(self) -> Action | Wait | Done:
        """The action to run now. Asking again without an event in between gives the same answer."""
        return self.possible_action() or self.wait_or_done()

    def possible_action(self) -> Action | None:
        """The action to run now, if there is one."""
        backward = self._backward()
        if backward is not None and backward.kind == "C":
            return backward  # a credit costs nothing and may unblock the stages before
        if self.queue and self.returns_done == self.num_microbatches:
            return self.weight()
        may_forward = self._may_forward()
        if backward is None and not may_forward and not self.queue:
            return None  # in half of all calls
        ready = Ready(self.forward() if may_forward else None, backward, self.weight(), self.stage,
                      self.num_stages, self.num_microbatches, self.forwards_done, self.returns_done, self.in_flight,
                      len(self._expects_backward) < self._most_stored, self.alternating)
        chosen = self.policy.choose(ready)
        if chosen is None:
            return None
        if chosen not in ready[:3]:
            raise ConfigError(f"has chosen {chosen}, which is not ready", code="policy-chooses-other-action",
                              where="Engine(policy=...)", value=self.policy.name,
                              remedy="Return ready.forward, ready.backward or ready.weight, or None to wait.")
        return self._possible(chosen)

    def backward(self) -> Action | None:
        """The next return, or the product that has to run before it; None if no return has arrived."""
        found = self._backward()
        return None if found is None else self._possible(found)

    def _possible(self, chosen: Action) -> Action:
        """`chosen`, or the product that has to run before it."""
        if chosen.kind == "B" and self.policy.defers and not chosen.defer and self.queue:
            # No room: the oldest products run first, since those of one weight must stay in microbatch order.
            weight = self.weight()
            assert weight is not None  # the queue has products
            return weight
        return chosen

    def wait_or_done(self) -> Wait | Done:
        """The answer when no action is ready."""
        if self.returns_done == self.num_microbatches:
            return Done()
        forward, backward = self._forwards_arrived, self._returns_arrived
        wants_forward = not self.is_first and forward < self.num_microbatches
        wants_backward = not self.is_last and backward < self.forwards_done
        return Wait(forward if wants_forward else None, backward if wants_backward else None, self.stage)

    def _may_forward(self) -> bool:
        if self.is_first:
            outstanding = self.forwards_done - self.returns_done
            return self.forwards_done < self.num_microbatches and outstanding < self.in_flight
        return self.forwards_done < self._forwards_arrived

    def forward(self) -> Action:
        """The next forward."""
        return Action("F", self.forwards_done, False, 0, self.turn)

    def _backward(self) -> Action | None:
        microbatch = self.returns_done
        if microbatch == self._returns_arrived:
            return None
        if microbatch not in self._expects_backward:
            return Action("C", microbatch, False, 0, self.turn)
        needed = self._expects_backward[microbatch]
        fits = 0 < needed <= self.budget.limit - self.budget.used
        defer = self.policy.defers and fits and microbatch >= self._first_deferred
        return Action("B", microbatch, defer, 0, self.turn)

    def weight(self) -> Action | None:
        """The next queued product."""
        return next(iter(self.queue)) if self.queue else None

    # ------------------------------------------------------------------ when it is due

    def due(self, kind: ActionKind, microbatch: int) -> Due:
        """When the forward or return of a microbatch should run; never after the last microbatch. See `due`."""
        if microbatch >= self.num_microbatches:
            return _NEVER
        round_, place = microbatch // self._burst, microbatch % self._burst
        return self._period * round_ + place + self._first_dues[kind != "F"], kind != "F"

    def next_due(self) -> Due:
        """The earliest due time of forwards and returns that have not run, arrived or not."""
        return min(self._forward_due, self._return_due)

    def forwards_due_before(self, due: Due) -> int:
        """Number of forwards due before `due` that have not run."""
        rounds, rest = divmod(due[0] - self._first_dues[0], self._period)
        before = min(rounds * self._burst + min(rest, self._burst), self.num_microbatches)
        return before - self.forwards_done if before > self.forwards_done else 0

    def ready(self) -> list[tuple[Turn, ActionKind, Schedule]]:
        """The next forward and the next return, if they have arrived, each with this schedule. Whether the return
        defers is decided when it is chosen (`backward`)."""
        if self._ready is None:
            self._ready = [((True, self._forward_due), "F", self)] if self._may_forward() else []
            if self.returns_done < self._returns_arrived:
                computes = self.returns_done in self._expects_backward
                self._ready.append(((computes, self._return_due), "B" if computes else "C", self))
        return self._ready

    # ------------------------------------------------------------------ for people

    def text(self) -> str:
        """The actions so far, `F0 F1 B0 W0x4 ...`."""
        return actions_text(self.history)


class RankSchedule:
    """The actions of all stages of one rank for one batch.

    stages: by ascending number; they share the budget of `defer_bytes`. max_stored: in training, maximum number of
    microbatches that all of them store or have queued products of, counted per stage; None for no bound. alternating:
    with several stages, placed interleaved, the order and bound of interleaved 1F1B. Other arguments as for `Schedule`.
    """

    def __init__(self, *, stages: Sequence[int], num_stages: int, num_microbatches: int, policy: Policy, in_flight: int,
                 training: bool = True, defer_bytes: int = 0, defer_last: int | None = None,
                 max_stored: int | None = None, alternating: bool = False) -> None:
        self._in_order = alternating and len(stages) > 1
        if self._in_order:
            assert stages[1] - stages[0] == num_stages // len(stages), "the order is that of interleaved stages"
            max_stored = 1 + forwards_before_returns(stage=stages[0], num_stages=num_stages, per_rank=len(stages))
        self.budget, self.max_stored = DeferBudget(defer_bytes), max_stored if training else None
        self.stages = {stage: Schedule(
            stage=stage, num_stages=num_stages, num_microbatches=num_microbatches, policy=policy, in_flight=in_flight,
            training=training, defer_bytes=self.budget, defer_last=defer_last, alternating=alternating, turn=turn,
            of=len(stages))
            for turn, stage in enumerate(stages)}
        self._of_turn = list(self.stages.values())
        self._blocked: int | None = None
        """The version of the budget at which no forward and no return may run."""

    def on_message(self, kind: Literal["forward", "return"], microbatch: int, stage: int) -> None:
        """Note that a message for `stage` has arrived; see `Schedule.on_message`."""
        self.stages[stage].on_message(kind, microbatch)

    def on_done(self, action: Action, *, expects_backward: bool = False, deferrable_bytes: int = 0,
                products: Sequence[Product] = ()) -> None:
        """Note that `action` has run; see `Schedule.on_done`."""
        self._of_turn[action.turn].on_done(action, expects_backward=expects_backward,
                                           deferrable_bytes=deferrable_bytes, products=products)

    def next_action(self) -> Action | Wait | Done:
        """The action to run now. Asking again without an event in between gives the same answer."""
        return self.possible_action() or self._wait_or_done()

    def possible_action(self) -> Action | None:
        """The action to run now, if there is one."""
        if self.max_stored is not None:
            return self._first_due(self.max_stored)
        if len(self._of_turn) == 1:
            return self._of_turn[0].possible_action()
        actions = [((action.kind != "C", _NEVER if action.kind == "W" else stage.due(action.kind, action.microbatch)),
                    action) for stage in reversed(self._of_turn) if (action := stage.possible_action()) is not None]
        return min(actions, key=_turn)[1] if actions else None

    def _first_due(self, max_stored: int) -> Action | None:
        """The ready action that is due first; a forward only if there is memory for it and for all those due before it.

        So a forward that runs early takes no room from one that is due, and the action that is due first on its rank,
        which always runs, needs no more than the even flow does. Every batch ends: the action that is due first on all
        ranks is ready, since its inputs are due earlier. The more room, the more may run early. In 1F1B's order nothing
        runs early.
        """
        if self._blocked == self.budget.version:
            return self._weight()
        stages = self._of_turn
        ready = sorted(chain.from_iterable([stage.ready() for stage in stages]), key=_turn)
        for (_, due), kind, chosen in ready:
            if self._in_order and kind != "C" and any([due > stage.next_due() for stage in stages]):
                break
            if kind != "F":
                return chosen.backward()
            if self.budget.held + sum([stage.forwards_due_before(due) for stage in stages]) < max_stored:
                return chosen.forward()
            if all([due <= stage.next_due() for stage in stages]):
                return self._weight() or chosen.forward()
        self._blocked = self.budget.version
        return self._weight()

    def _weight(self) -> Action | None:
        """The next queued product, of the last stage that has one."""
        for stage in reversed(self._of_turn):
            for action in stage.queue:
                return action
        return None

    def _wait_or_done(self) -> Wait | Done:
        """The answer when no action is ready: what another rank must send, not what a stage here must compute."""
        waits = [each._replace(forward=None if each.stage - 1 in self.stages else each.forward,
                               backward=None if each.stage + 1 in self.stages else each.backward)
                 for stage in reversed(self._of_turn) if isinstance(each := stage.wait_or_done(), Wait)]
        awaited = (each for each in waits if each.forward is not None or each.backward is not None)
        return next(awaited, waits[0] if waits else Done())


def actions_text(actions: Sequence[Action]) -> str:
    """Actions as text; repeated weight products of one microbatch are counted."""
    words: list[tuple[str, int]] = []
    for action in actions:
        if words and action.kind == "W" and words[-1][0] == str(action):
            words[-1] = (words[-1][0], words[-1][1] + 1)
        else:
            words.append((str(action), 1))
    return " ".join(word if count == 1 else f"{word}x{count}" for word, count in words)
