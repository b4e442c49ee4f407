"""Fault injection: shows what a run does when a rank dies, a message is lost, or memory or the disk runs out.

    faulty(world, [Fault(kind="drop", rank=1, message=20)])        # a world whose rank 1 loses its 20th message

The command with faults is `python -m ranvier.cli.faults`.

A fault belongs to one rank and is triggered once (slow stays from then on). Its trigger is that rank's N-th `call` (a
message that it sends or a collective that it starts; their order is the same in every run, unlike that of polls and
waits), the N-th `message` that it sends, or a number of `seconds` after the start. `of` restricts what is counted:
`of=state` and `of=command` count only messages of that kind, `of=transition` counts from the first transition to
another mesh.

    kind        effect                                                                  parameters
    kill        SIGKILL: the process ends immediately
    stop        SIGSTOP: the process exists but does nothing, as if its machine hung
    delay       the rank sleeps before its next message                                 for=SECONDS
    slow        the rank sleeps before every message and collective: a straggler        for=SECONDS
    drop        its next message is not sent
    corrupt     one bit of its next message's tensors is flipped                        bit=NUMBER
    allocation  an allocation beyond the available memory fails
    disk        files cannot grow beyond a size: writes fail, as on a full disk         bytes=SIZE, for=SECONDS

kill, stop and disk affect the entire process: if ranks are threads, all ranks.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch

from ranvier.comm.message import Message
from ranvier.comm.protocol import COLLECTIVES, Backend, Group, Transport
from ranvier.errors import ConfigError
from ranvier.world import World

FaultKind = Literal["kill", "stop", "delay", "slow", "drop", "corrupt", "allocation", "disk"]
"""See above."""
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""All kinds of faults."""
_OF_MESSAGES = ("delay", "drop", "corrupt")
_OF_PROCESSES = ("kill", "stop", "disk")
_TRIGGERS = ("call", "message", "seconds")
_SCOPES = ("state", "command", "transition")
_UNAVAILABLE_BYTES = 1 << 60
_REMEDY = (f"Write KIND:rank=R,call=N (or message=N, or seconds=T), where KIND is one of {', '.join(KINDS)}, for "
           "example kill:rank=1,call=200 or slow:rank=1,call=200,for=0.1.")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one rank. ConfigError for contradictory or missing fields.

    call, message, seconds: its trigger; exactly one of them. Calls and messages count from 1, seconds from `faulty`.
    for_seconds: duration of a delay (for slow: of each one), or of a full disk, which otherwise stays full.
    of: what the trigger counts: "state" or "command" messages only, or everything since the first "transition".
    bit: index of the flipped bit in the tensors' bytes, modulo their number.
    limit_bytes: size beyond which files cannot grow; smaller ones, such as a log, can still be written.
    """

    kind: FaultKind
    rank: int
    call: int | None = None
    message: int | None = None
    seconds: float | None = None
    for_seconds: float | None = None
    of: str | None = None
    bit: int = 0
    limit_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _invalid(f"there is no kind {self.kind!r}", self)
        if len([name for name in _TRIGGERS if getattr(self, name) is not None]) != 1:
            raise _invalid("needs exactly one of call, message and seconds", self)
        if self.of not in (None, *_SCOPES):
            raise _invalid(f"of must be one of {', '.join(_SCOPES)}", self)
        if self.of in ("state", "command") and self.message is None:
            raise _invalid(f"of={self.of} needs message=", self)
        for name, least in (("rank", 0), ("call", 1), ("message", 1), ("seconds", 0), ("for_seconds", 0), ("bit", 0),
                            ("limit_bytes", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise _invalid(f"{_key(name)} must be at least {least}, and finite", self)
        if self.kind in ("delay", "slow") and self.for_seconds is None:
            raise _invalid(f"{'a delay' if self.kind == 'delay' else self.kind} needs for=SECONDS", self)
        for name, kinds in (("for_seconds", ("delay", "slow", "disk")), ("bit", ("corrupt",)),
                            ("limit_bytes", ("disk",))):
            if self.kind not in kinds and getattr(self, name) != getattr(Fault, name):
                raise _invalid(f"{_key(name)} has no effect on {self.kind}", self)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        shown = [(field.name, getattr(self, field.name)) for field in fields(self)[1:]]
        return f"{self.kind}:" + ",".join(f"{_key(name)}={value}" for name, value in shown
                                          if value != getattr(Fault, name, None))


def _key(name: str) -> str:
    """Name of a field in text."""
    return {"for_seconds": "for", "limit_bytes": "bytes"}.get(name, name)


def _invalid(what: str, fault: Fault | str) -> ConfigError:
    return ConfigError(what, code="malformed-fault", where="fault", value=str(fault), remedy=_REMEDY)


def parse(text: str) -> Fault:
    """The fault that a text such as `kill:rank=1,call=200` describes. ConfigError for an invalid text."""
    kind, _, rest = text.partition(":")
    names = {_key(field.name): field for field in fields(Fault)[1:]}
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, sign, value = part.partition("=")
        if key not in names or not sign:
            raise _invalid(f"{part!r} is not one of {'=, '.join(names)}=", text)
        name = names[key].name
        convert: type[float | str | int] = float if "seconds" in name else str if key == "of" else int
        if name in found:
            raise _invalid(f"{key} is given twice", text)
        try:
            found[name] = convert(value)
        except ValueError:
            raise _invalid(f"{key} is not a {'whole ' if convert is int else ''}number", text) from None
    if "rank" not in found:
        raise _invalid("needs a rank", text)
    return Fault(kind=cast(FaultKind, kind), **found)  # Fault refuses other kinds


def faulty(world: World, faults: Sequence[Fault]) -> World:
    """Inject those of `faults` that are for this rank into `world`, and return `world` itself. Seconds count from this
    call. A copy would not see ranks that are lost or join, although other parts of the program use the original world.

    ConfigError for a fault of a rank that does not exist.
    """
    for fault in faults:
        if fault.rank >= world.size:
            raise _invalid(f"there are only ranks 0 to {world.size - 1}", fault)
    plan = _Plan([fault for fault in faults if fault.rank == world.rank], world.device)
    world.backend = _FaultyBackend(world.backend, plan)
    return world


class _Plan:
    """The faults of one rank that have not been triggered yet, and the counts that trigger them."""

    def __init__(self, faults: Sequence[Fault], device: torch.device) -> None:
        self._device, self._start = device, time.monotonic()
        self._calls = self._messages = 0
        self._by_kind: Counter[str] = Counter()
        self._transition: tuple[int, int, float] | None = None
        """Calls, messages and time at the start of the first transition."""
        self._lock = threading.Lock()  # checkpoints are written, and send messages, on another thread
        # Faults of the entire process do not wait for a call of the rank.
        self._timed = [fault for fault in faults if fault.kind in _OF_PROCESSES and fault.seconds is not None]
        self._waiting = [fault for fault in faults if fault not in self._timed]
        self._start_timers(None)

    def _start_timers(self, scope: str | None) -> None:
        for fault in self._timed:
            if fault.of == scope and fault.seconds is not None:
                _call_later(fault.seconds, self._trigger, fault)

    def transition(self) -> None:
        """Record the first transition; called before the ranks of another mesh connect."""
        if self._transition is None:
            self._transition = (self._calls, self._messages, time.monotonic())
            self._start_timers("transition")

    def _take(self, message: Message | None) -> list[Fault]:
        """Count a message (or a collective: None), and remove the faults that it triggers."""
        with self._lock:
            self._calls += 1
            if message is not None:
                self._messages += 1
                self._by_kind[message.kind.name.lower()] += 1
            taken = [fault for fault in self._waiting if self._is_due(fault) and (
                fault.kind not in _OF_MESSAGES or (message is not None and (
                    fault.kind != "corrupt" or message.payload_bytes > 0)))]
            self._waiting = [fault for fault in self._waiting if fault not in taken or fault.kind == "slow"]
            return taken

    def _is_due(self, fault: Fault) -> bool:
        calls, messages, start = 0, 0, self._start
        if fault.of == "transition":
            if self._transition is None:
                return False
            calls, messages, start = self._transition
        if fault.seconds is not None:
            return time.monotonic() - start >= fault.seconds
        if fault.call is not None:
            return self._calls - calls >= fault.call
        assert fault.message is not None, "a fault has one trigger"
        count_all = fault.of is None or fault.of == "transition"
        sent = self._messages - messages if count_all else self._by_kind[str(fault.of)]
        return sent >= fault.message

    def collective(self) -> None:
        """Trigger due faults; called before a collective starts."""
        for fault in self._take(None):
            self._trigger(fault)

    def message(self, message: Message) -> Message | None:
        """The message to send instead of `message`: usually itself, None for nothing."""
        for fault in self._take(message):
            match fault.kind:
                case "drop":
                    return None
                case "corrupt":
                    message = flip_bit(message, fault.bit)
                case _:
                    self._trigger(fault)
        return message

    def _trigger(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay" | "slow":
                time.sleep(fault.for_seconds or 0.0)
            case "allocation":
                torch.empty(_UNAVAILABLE_BYTES, dtype=torch.uint8, device=self._device)
            case "disk":
                # Writes beyond the limit fail with EFBIG ("File too large"); Python ignores the signal that comes
                # with it.
                before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit_bytes, hard))
                if fault.for_seconds is not None:
                    _call_later(fault.for_seconds, resource.setrlimit, resource.RLIMIT_FSIZE, (before, hard))


def _call_later(seconds: float, function: Callable[..., object], *args: object) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def flip_bit(message: Message, bit: int) -> Message:
    """A copy of `message` with one bit of its tensors flipped: number `bit` of all their bits, modulo their number."""
    tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format)
               for name, tensor in message.tensors.items()}
    place, bit = divmod(bit % (8 * message.payload_bytes), 8)
    for tensor in tensors.values():
        raw = tensor.reshape(-1).view(torch.uint8)
        if place < raw.numel():
            raw[place] ^= 1 << bit
            break
        place -= raw.numel()
    return replace(message, tensors=tensors)


class _FaultyBackend:
    """Applies the plan before each message and collective of the inner backend."""

    def __init__(self, inner: Backend, plan: _Plan) -> None:
        self._inner, self._plan = inner, plan
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.abort, self.close = inner.abort, inner.close

    def transport(self, purpose: str, *, on_host: bool = False) -> Transport:
        return cast(Transport, _FaultyTransport(self._inner.transport(purpose, on_host=on_host), self._plan))

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        return cast(Group, _FaultyGroup(self._inner.group(purpose, partition), self._plan))

    def subset(self, count: int) -> Backend | None:
        self._plan.transition()
        inner = self._inner.subset(count)
        return inner and _FaultyBackend(inner, self._plan)


class _FaultyTransport:
    """A `protocol.Transport`; everything except sends is that of the inner one."""

    def __init__(self, inner: Transport, plan: _Plan) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, destination: int, message: Message) -> None:
        sent = self._plan.message(message)
        if sent is not None:
            self._inner.send(destination, sent)


class _FaultyGroup:
    """A `protocol.Group`; everything except collectives is that of the inner one."""

    def __init__(self, inner: Group, plan: _Plan) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._call, found) if name in COLLECTIVES else found

    def _call(self, start: Callable[..., object], *args: object, **options: object) -> object:
        self._plan.collective()
        return start(*args, **options)
