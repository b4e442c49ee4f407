"""Protocol by which ranks join a running run: messages in the run's store between newcomers, rank 0 and the run's other
ranks.

    newcomers                      rank 0                              all ranks of the run
    say that they are ready
                                   takes their request, calls them
    answer                         hears all of them, has all ranks grow
    connect, say how it went                                           connect
                                   reads that                          gather how it went
    read the verdict               gives the verdict                   all went well: the new backend is the run's

Until the verdict the run's own backend is untouched, and every wait has a limit: newcomers that die or do not answer
are refused, and the run continues without them. From the verdict on they are ranks like the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ranvier.comm.protocol import Backend, Group
from ranvier.comm.signed_store import SharedStore, await_keys
from ranvier.comm.torch_backend import TorchBackend, torch_generation
from ranvier.errors import LaunchError, RanvierError
from ranvier.world import World

REQUEST_ID = "RANVIER_JOIN"
"""Environment variable with the ID of the request of ranks that want to join."""
_KEYS = "ranvier/join/"
_ANSWER_SECONDS = 10.0
_CONNECT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call to newcomers to become ranks `first` to `size` - 1. request_id: ID of their request. local_size: that of the
    run's ranks. timeout_seconds: the run's limit; each wait here takes at most a third of it, since ranks that have
    finished wait for the others. members: the names of the ranks before `first` (ranvier.launch.lost_ranks).
    num_lost_ranks: lost ranks that the run has survived."""

    request_id: str
    first: int
    size: int
    local_size: int
    timeout_seconds: float
    members: list[str] = field(default_factory=list)
    num_lost_ranks: int = 0

    @property
    def all_members(self) -> tuple[str, ...]:
        """The names of all ranks, including the newcomers."""
        return (*self.members, *(member_name(self.request_id, number) for number in range(self.size - self.first)))

    @property
    def answer_seconds(self) -> float:
        """Limit for the newcomers' answers."""
        return min(_ANSWER_SECONDS, self.timeout_seconds / 3)

    @property
    def connect_seconds(self) -> float:
        """Limit for the connections, once all have answered."""
        return min(_CONNECT_SECONDS, self.timeout_seconds / 3)


def member_name(request_id: str, number: int) -> str:
    """The name of the `number`-th newcomer of a request (ranvier.launch.lost_ranks)."""
    return f"{request_id}/{number}"


def call_newcomers(world: World, call: Call) -> str | None:
    """On rank 0: call the newcomers; returns None once all have answered, otherwise why they are refused."""
    world.store.set(f"{_KEYS}{call.request_id}/call", json.dumps(asdict(call)))
    answers = _answers(world.store, call, "here", call.answer_seconds)
    missing = call.size - call.first - len(answers)
    return f"{missing} of {call.size - call.first} ranks that wanted to join do not answer" if missing else None


def grow(world: World, everyone: Group, call: Call) -> str | None:
    """Connect this rank of the run to the newcomers; returns None if they are ranks of `world` now, otherwise why not,
    the same on every rank. Collective over the ranks of the run, which are those of `everyone`."""
    before = world.backend if isinstance(world.backend, TorchBackend) else None
    made, problem = _connect(world, world.rank, call, call.connect_seconds, before)
    if world.rank == 0 and problem is None:
        texts = _answers(world.store, call, "connected", call.connect_seconds)
        newcomers = range(call.size - call.first)
        problem = next((texts.get(number, f"rank {call.first + number}, which was joining, is gone")
                        for number in newcomers if texts.get(number) != ""), None)
    problem = next((found for found in everyone.gather_objects(problem) if found is not None), None)
    if world.rank == 0:
        give_verdict(world.store, call.request_id, problem)
    if problem is None:
        assert made is not None, "it was made without a problem"
        world.change(made, call.all_members)
    elif made is not None:
        made.close()
    return problem


def give_verdict(store: SharedStore, request_id: str, problem: str | None) -> None:
    """On rank 0: publish that the newcomers are ranks of the run, or are refused for `problem`."""
    store.set(f"{_KEYS}{request_id}/verdict", json.dumps(problem))


def rank_of_newcomer(store: SharedStore, request_id: str, number: int) -> int | None:
    """Rank in the run of the `number`-th newcomer of a request, present or future; None if the run has not called it,
    refuses it, or does not answer. For the supervisor of a newcomer that has died, which must report the death to the
    run: the verdict may still come, and accept the newcomer."""
    if not store.check([f"{_KEYS}{request_id}/call"]):
        return None
    call = Call(**json.loads(store.get(f"{_KEYS}{request_id}/call")))
    verdict = f"{_KEYS}{request_id}/verdict"
    if not await_keys(store, [verdict], call.answer_seconds + 2 * call.connect_seconds):
        return None
    return call.first + number if json.loads(store.get(verdict)) is None else None


def _connect(world: World, rank: int, call: Call, seconds: float, before: TorchBackend | None
             ) -> tuple[TorchBackend | None, str | None]:
    assert world.torch_store is not None, "the run takes ranks"
    try:
        return torch_generation(call.request_id, rank, call.size, world.torch_store, world.device, call.timeout_seconds,
                                connect_seconds=seconds, before=before), None
    except RanvierError as error:
        return None, f"{error.where} {error.what}"


def _answers(store: SharedStore, call: Call, what: str, seconds: float) -> dict[int, str]:
    """Answers of newcomers under `what`, by the number of the newcomer, once all have answered or the time is over."""
    keys = {number: f"{_KEYS}{call.request_id}/{what}/{number}" for number in range(call.size - call.first)}
    await_keys(store, list(keys.values()), seconds)
    return {number: store.get(key).decode() for number, key in keys.items() if store.check([key])}


class Newcomer:
    """The `number`-th of `count` processes that want to join a run together.

    world: its world before it joins, without ranks of the run. request_id: ID of their request.
    """

    def __init__(self, world: World, request_id: str, number: int, count: int) -> None:
        self._world, self._request_id, self._number, self._count = world, request_id, number, count

    def await_others(self, seconds: float) -> None:
        """Return once all newcomers are ready. LaunchError if they are not ready in time."""
        self._report("ready")
        for number in range(self._count):
            self._await(f"ready/{number}", seconds, f"joining rank {number} is not ready")

    def join(self, seconds: float) -> World:
        """The world of the run, with this rank. LaunchError if the run has not called within `seconds`, or refuses."""
        called: Mapping[str, object] = json.loads(self._await("call", seconds, "the run has not taken the request"))
        if self._is_refused():
            self._await_verdict(0.0)
        call = Call(**called)  # type: ignore[arg-type]  # written by rank 0
        self._report("here")
        made, problem = _connect(self._world, call.first + self._number, call,
                                 call.answer_seconds + call.connect_seconds, None)
        self._report("connected", problem or "")
        self._await_verdict(3 * call.timeout_seconds)
        assert made is not None, "the verdict would be another one"
        backend: Backend = made
        return replace(self._world, backend=backend, local_size=call.local_size,
                       members=call.all_members, local_ranks=tuple(range(call.first, call.size)),
                       num_lost_ranks=call.num_lost_ranks, overdue=made.waits.overdue, lost=made.waits.lost_peer,
                       sever=made.sockets.sever)

    def _await_verdict(self, seconds: float) -> None:
        problem = json.loads(self._await("verdict", seconds, "the run has not said whether it takes this rank"))
        if problem is not None:
            raise LaunchError(f"is refused: {problem}", code="join-refused", where=f"joining rank {self._number}",
                              remedy="Check the run's output, and join again.")

    def _is_refused(self) -> bool:
        return self._world.store.check([f"{_KEYS}{self._request_id}/verdict"])

    def _report(self, what: str, text: str = "") -> None:
        self._world.store.set(f"{_KEYS}{self._request_id}/{what}/{self._number}", text)

    def _await(self, what: str, seconds: float, late: str) -> str:
        """The value of a key of this request. A verdict that comes first ends the wait for any other key."""
        key, store = f"{_KEYS}{self._request_id}/{what}", self._world.store
        try:
            if not await_keys(store, [key], seconds, stops=lambda: what != "verdict" and self._is_refused()):
                if what != "verdict" and self._is_refused():
                    self._await_verdict(0.0)
                raise LaunchError(late, code="join-late", where="join", value=f"{seconds:g} s",
                                  remedy="Check that it is running; if its steps are long, wait longer with `--wait`.")
            return store.get(key).decode()
        except RuntimeError as error:
            raise LaunchError("has ended or is restarting", code="join-run-gone", where="the run",
                              value=str(error).partition("\n")[0], remedy="Join a run that is in progress.") from error
