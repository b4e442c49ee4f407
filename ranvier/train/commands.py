"""Commands of rank 0 to idle ranks: change the mesh, admit ranks, or end with the run. Each is a dataclass;
`CommandChannel` sends and receives them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

import torch
from pydantic import TypeAdapter

from ranvier.comm.board import Board, call_with_timeout, read_actions
from ranvier.comm.edges import invalid_message
from ranvier.comm.message import Message, MessageKind, checksum
from ranvier.elastic.change import Change
from ranvier.errors import MessageTimeout, TransportError
from ranvier.launch.joining import Call
from ranvier.mesh import Mesh
from ranvier.world import World

_CAPACITY_BYTES = 1 << 12
_WAIT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run after `step`, without parameters and optimizer states; JSON-serialisable."""

    step: int
    samples: int
    """The position in the data: samples of all steps so far, including those that were skipped."""
    stops: bool
    """Whether a rank was asked to stop."""
    guards: Mapping[str, int]
    bad_steps: Mapping[str, Any] | None
    elastic: Mapping[str, Any]
    """Result of `Elasticity.document`."""
    best: Mapping[str, Any] | None
    saved_step: int | None
    """The step after which the last checkpoint was begun."""


@dataclass(frozen=True, kw_only=True)
class ChangeMesh:
    """Continue on another mesh, or with other frozen layers. save: a checkpoint of this step is due on the new mesh.
    block_times: see `MeasuredLimits`."""

    change: Change
    state: RunState
    save: bool = False
    block_times: Sequence[Sequence[float]] | None = None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ChangeMesh:
        """The inverse of `asdict`; `document` may have passed through JSON."""
        return cast(ChangeMesh, _KINDS[cls.__name__].validate_python(document))


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """The run has ended, with this summary."""

    summary: Mapping[str, Any]


Command = ChangeMesh | Call | EndRun
"""`Call`: take these ranks into the world."""
_KINDS: Mapping[str, TypeAdapter[Command]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Command)}


class CommandChannel:
    """A connection from rank 0 to every other rank of the world. Its construction is collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._transport = world.backend.transport("commands", on_host=True)
        others = list(range(1, world.size)) if world.rank == 0 else []
        self._transport.connect([0] if world.rank else [], others, _CAPACITY_BYTES)

    def send(self, command: Command, first: int) -> None:
        """Send `command` from rank 0 to the ranks from `first` on. Does nothing on other ranks."""
        if self._world.rank:
            return
        text = json.dumps([type(command).__name__, asdict(command)])
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for rank in range(first, self._world.size):
            self._transport.send(rank, Message(MessageKind.COMMAND, 0, 0, {"": data, "checksum": checksum(data)}))
        self._transport.progress()

    def close(self) -> None:
        """Free the connection. Collective over the ranks that constructed it."""
        self._transport.close()

    def wait(self, timeout_seconds: float) -> Command:
        """The next command. Waits without limit, since an idle rank has no work that could be late; meanwhile it keeps
        publishing its state, and watches that of rank 0. TransportError if rank 0 has gone, MessageTimeout if rank 0
        has been silent for `timeout_seconds`."""
        mesh = cast(Mesh, self._world.mesh)  # set by the run; a board that counts no calls may lack it
        board = Board(self._world.store, self._world.rank, mesh)
        board.action = "idleness, waiting for commands"
        try:
            message = self._next(timeout_seconds)
        finally:
            board.close()
        if message.kind is not MessageKind.COMMAND:
            raise TransportError("is not a command", code="not-a-command", where=f"message from rank {message.source}",
                                 value=str(message), remedy="Give all ranks one version of Ranvier.")
        data = message.tensors[""].cpu()
        if int(message.tensors["checksum"]) != int(checksum(data)):
            raise invalid_message("commands", message.source, "the command has been changed on its way")
        kind, document = json.loads(bytes(data.numpy()))
        return _KINDS[kind].validate_python(document)

    def _next(self, timeout_seconds: float) -> Message:
        heard, heard_at = None, time.monotonic()
        while (message := self._transport.wait(min(_WAIT_SECONDS, timeout_seconds))) is None:
            now = call_with_timeout(lambda: read_actions(self._world.store, [0]))
            if now is not None and now != heard:
                heard, heard_at = now, time.monotonic()
            elif time.monotonic() - heard_at > timeout_seconds:
                raise MessageTimeout("nothing was heard from rank 0, whose commands an idle rank awaits",
                                     code="rank-0-silent", where="commands", value=f"{timeout_seconds:g} s",
                                     remedy="Check what that rank does, and start again with `--resume auto`.")
        return message
