"""Transfer of state directly between ranks, from an engine on one layout to an engine on another.

    held = take(engine)              its state in host memory; the old engine may be closed then
    ...                              the new engine is built, on other ranks perhaps
    moved = hand_over(held, new_engine, backend)

All ranks take part, including those of neither layout. Each announces the state that it has and the state that it
needs, as boxes of full tensors; from these all ranks compute the same list of moves, and execute it in rounds of
bounded size. Until all ranks have acknowledged, what they hold is the complete old layout; a rank that fails before
that ends the run, which resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ranvier.checkpoint import state
from ranvier.checkpoint.manifest import ITEM_BYTES, Manifest, OptimizerGroup, SavedTensor, ScaleState
from ranvier.checkpoint.state import Piece
from ranvier.checkpoint.user_optimizer import merge_groups
from ranvier.comm.edges import invalid_message
from ranvier.comm.message import Message, MessageKind, checksum
from ranvier.comm.protocol import Backend, Group, Transport
from ranvier.errors import CheckpointError, MessageTimeout
from ranvier.layout import Box, Move, box_size, index_of, plan_moves
from ranvier.pipeline.state_dict import set_extra_states
from ranvier.tensor.quantized_weight import dense

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine

MESSAGE_BYTES = 16 << 20
"""Larger boxes are sent in several messages."""
ROUND_BYTES = 64 << 20
"""Bytes that a rank sends before it waits for these sends to complete."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """State of one rank before a transition: tensors in host memory, and the numbers that all ranks share."""

    pieces: list[Piece]
    numbers: dict[str, Any]
    frozen: list[str]
    missed_updates: dict[str, int]
    optimizer_groups: list[OptimizerGroup]


def take(engine: Engine, host_buffers: Held | None = None, *, ends: bool = False) -> Held:
    """Copy the state of this rank to host memory. CheckpointError for state that cannot be sent.

    host_buffers: an earlier copy that is no longer needed, whose memory is reused where shapes and dtypes match. ends:
    the engine is closed next, so state that is in host memory is not copied.
    """
    pieces, buffers = [], [] if host_buffers is None else [piece.tensor for piece in host_buffers.pieces]
    for number, piece in enumerate(state.pieces_held(engine)):
        if state.dtype_name(piece.tensor) not in ITEM_BYTES:
            raise CheckpointError("has a number format that cannot be sent", code="number-format-not-sent",
                                  where=f"{piece.kind} {piece.name}", value=state.dtype_name(piece.tensor),
                                  remedy=f"Keep it in one of these: {', '.join(ITEM_BYTES)}.")
        source, copy = piece.tensor.detach(), buffers[number] if number < len(buffers) else None
        if ends and not source.is_cuda:
            copy = source
        elif copy is not None and type(source) is Tensor and (copy.shape, copy.dtype) == (source.shape, source.dtype):
            copy.copy_(source)
        else:
            copy = source.to("cpu", copy=True).contiguous()
        pieces.append(Piece(kind=piece.kind, name=piece.name, shape=piece.shape, box=piece.box, tensor=copy))
    numbers = state.numbers(engine)
    scale = numbers["loss_scale"]
    return Held(pieces=pieces, numbers={**numbers, "loss_scale": scale and asdict(scale)},
                frozen=state.frozen_parameters(engine),
                missed_updates=state.missed_updates(engine), optimizer_groups=state.optimizer_groups(engine))


def hand_over(held: Held | None, engine: Engine | None, backend: Backend, *, timeout_seconds: float) -> int:
    """Restore `engine` from the state that the ranks hold. Collective over all ranks of `backend`: `held` is None on
    ranks without a part in the old layout, `engine` on ranks without a part in the new one; rank 0 has a part in both.

    Returns the bytes sent between ranks, the same on every rank. MessageTimeout if a rank is silent for
    `timeout_seconds`.
    """
    whole = backend.subset(backend.size)  # a separate backend, so that nothing of it is left afterwards
    assert whole is not None, "a subset of all ranks has every rank"
    ranks = whole.group("transition", [range(whole.size)])
    source = _Ranks(ranks.gather_objects(_announcement(held)), {} if held is None else {
        number: piece.tensor for number, piece in enumerate(held.pieces)})
    extra_states = {}
    if engine is not None:
        state.check_fits(engine, source)
        state.fill(engine, source, freezes=False)  # the new engine determines what trains
        extra_states = state.extra_states(engine, source)
    needs = ranks.gather_objects([(key, box) for key, reads in source.wanted.items() for box, _ in reads])
    travelling = list(source.plan_moves(needs))
    transport = whole.transport("transition", on_host=True)  # since `take` copies to the host
    _carry_out(travelling, source, transport, whole.rank, timeout_seconds)
    if engine is not None:
        set_extra_states(engine, extra_states)
        state.restore_counters(engine, source.manifest)
    ranks.barrier()  # all ranks have acknowledged
    whole.close()
    return sum(source.size_bytes(move) for move in travelling if move.source != move.destination)


def _announcement(held: Held | None) -> dict[str, object]:
    """Description of this rank's state for JSON. Tensors without dims come with their value."""
    if held is None:
        return {"pieces": [], "numbers": None, "frozen": [], "missed_updates": {}, "optimizer_groups": []}
    return {"pieces": [[piece.kind, piece.name, piece.shape, piece.box, state.dtype_name(piece.tensor),
                        None if piece.shape else piece.tensor.item()] for piece in held.pieces],
            "numbers": held.numbers, "frozen": held.frozen, "missed_updates": held.missed_updates,
            "optimizer_groups": [asdict(group) for group in held.optimizer_groups]}


class _Ranks:
    """A `state.StateSource` of the other ranks' state. Reads are recorded; `copy` performs them once the elements have
    arrived."""

    folder = "of the ranks' own memory"

    def __init__(self, announced: Sequence[Mapping[str, Any]], own: dict[int, Tensor]) -> None:
        self._own = own
        self._have: dict[str, list[tuple[int, Box]]] = {}
        self._pieces: dict[tuple[str, int, Box], int] = {}
        self._values: dict[tuple[str, str], float] = {}
        tensors: dict[str, dict[str, SavedTensor]] = {}
        for rank, document in enumerate(announced):
            for number, (kind, name, shape, box, dtype, value) in enumerate(document["pieces"]):
                box = tuple(map(tuple, box))
                tensors.setdefault(kind, {})[name] = SavedTensor(dtype, tuple(shape), ())
                if value is not None:
                    self._values[kind, name] = value
                if box_size(box):
                    self._have.setdefault(_key(kind, name), []).append((rank, box))
                    self._pieces[_key(kind, name), rank, box] = number
        numbers = dict(announced[0]["numbers"])
        scale = numbers.pop("loss_scale")
        self.manifest = Manifest(**numbers, loss_scale=scale and ScaleState(**scale), files=(), tensors=tensors,
                                 frozen=tuple(sorted({name for document in announced for name in document["frozen"]})),
                                 missed_updates={name: count for document in announced
                                                 for name, count in document["missed_updates"].items()},
                                 optimizer_groups=merge_groups(group for document in announced
                                                               for group in document["optimizer_groups"]))
        self.wanted: dict[str, list[tuple[Box, Tensor]]] = {}
        """Key of a tensor -> (box, target) of every read."""

    # --- as a source

    def tensor(self, kind: str, name: str) -> SavedTensor:
        try:
            return self.manifest.tensors[kind][name]
        except KeyError:
            raise CheckpointError(f"no rank has the {kind} of {name}", code="state-on-no-rank", where="transition",
                                  remedy="Build the new engine with the model and the optimizer of the old one."
                                  ) from None

    def read(self, kind: str, name: str) -> Tensor:
        """The value of a tensor without dims, which came with the announcements."""
        return torch.tensor(self._values[kind, name], dtype=getattr(torch, self.tensor(kind, name).dtype))

    def read_into(self, kind: str, name: str, box: Box, target: Tensor) -> None:
        self.tensor(kind, name)
        self.wanted.setdefault(_key(kind, name), []).append((box, target))

    # --- moving

    def plan_moves(self, needs: Sequence[Sequence[Any]]) -> Iterator[Move]:
        """The moves of all ranks, the same list everywhere, each small enough for one message."""
        need: dict[str, list[tuple[int, Box]]] = {}
        for rank, wanted in enumerate(needs):
            for key, box in wanted:
                box = tuple(map(tuple, box))
                if box_size(box):
                    need.setdefault(key, []).append((rank, box))
        for move in plan_moves(self._have, need):
            yield from _split_move(move, self._item_bytes(move.parameter))

    def size_bytes(self, move: Move) -> int:
        return box_size(move.box) * self._item_bytes(move.parameter)

    def _item_bytes(self, key: str) -> int:
        kind, name = json.loads(key)
        return ITEM_BYTES[self.manifest.tensors[kind][name].dtype]

    def cut(self, move: Move) -> Tensor:
        """The elements of a move from this rank."""
        for rank, box in self._have[move.parameter]:
            if rank == move.source and _is_within(move.box, box):
                elements: Tensor = dense(self._own[self._pieces[move.parameter, rank, box]][index_of(move.box, box)])
                return elements
        raise AssertionError(f"nothing here holds {move}")

    def copy(self, move: Move, elements: Tensor) -> None:
        """Copy the elements of a move to this rank into the targets of the reads that need them."""
        for box, target in self.wanted[move.parameter]:
            if _is_within(move.box, box):
                target[index_of(move.box, box)].copy_(elements)


def _key(kind: str, name: str) -> str:
    """The key of a tensor: its kind and name."""
    return json.dumps([kind, name])


def _is_within(inner: Box, outer: Box) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(inner, outer, strict=True))


def _split_move(move: Move, item_bytes: int) -> Iterator[Move]:
    """`move` in parts of at most MESSAGE_BYTES, or of one index along the first dim."""
    if not move.box or box_size(move.box) * item_bytes <= MESSAGE_BYTES:
        yield move
        return
    (start, stop), rest = move.box[0], move.box[1:]
    rows = max(1, MESSAGE_BYTES // (item_bytes * prod(last - first for first, last in rest)))
    for first in range(start, stop, rows):
        yield Move(move.parameter, ((first, min(first + rows, stop)), *rest), move.source, move.destination)


def _carry_out(moves: Sequence[Move], source: _Ranks, transport: Transport, rank: int, timeout_seconds: float) -> None:
    """Execute the moves from and to this rank, in rounds, so that no rank has more than one round in progress."""
    outgoing = sorted({move.destination for move in moves if move.source == rank} - {rank})
    incoming = sorted({move.source for move in moves if move.destination == rank} - {rank})
    transport.connect(incoming, outgoing, 1 << 16)
    came: set[int] = set()  # a source may be a round ahead
    with torch.no_grad():
        for part in _rounds(moves, source):
            awaited = set()
            for number, move in part:
                if rank == move.source == move.destination:
                    source.copy(move, source.cut(move))
                elif rank == move.source:
                    elements = source.cut(move).contiguous()
                    transport.send(move.destination, Message(MessageKind.STATE, 0, number, {
                        "": elements, "checksum": checksum(elements)}))
                elif rank == move.destination:
                    awaited.add(number)
            while missing := awaited - came:
                message = _next(transport, moves, missing, timeout_seconds)
                source.copy(moves[message.microbatch], _checked_tensor(message))
                came.add(message.microbatch)
            if not transport.flush(timeout_seconds):
                raise MessageTimeout("not all that this rank sends has left it", code="transition-send-late",
                                     where="transition", value=f"{timeout_seconds:g} s",
                                     remedy="Check what the other ranks do, or raise `--comm.timeout-seconds`.")
    transport.close()


def _checked_tensor(message: Message) -> Tensor:
    """The tensor of a message, after comparing its checksum: a bit flipped in transit would stay in the weights."""
    elements = message.tensors[""]
    if int(message.tensors["checksum"]) != int(checksum(elements)):
        raise invalid_message("transition", message.source, "its elements have been changed on their way")
    return elements


def _rounds(moves: Sequence[Move], source: _Ranks) -> Iterator[list[tuple[int, Move]]]:
    """The numbered moves, in rounds in which no rank sends more than ROUND_BYTES."""
    part: list[tuple[int, Move]] = []
    sent: dict[int, int] = {}
    for number, move in enumerate(moves):
        size = source.size_bytes(move) if move.source != move.destination else 0
        if part and sent.get(move.source, 0) + size > ROUND_BYTES:
            yield part
            part, sent = [], {}
        part.append((number, move))
        sent[move.source] = sent.get(move.source, 0) + size
    if part:
        yield part


def _next(transport: Transport, moves: Sequence[Move], missing: set[int], timeout_seconds: float) -> Message:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        message = transport.wait(min(5.0, timeout_seconds))
        if message is not None:
            return message
    late = moves[min(missing)]
    kind, name = json.loads(late.parameter)
    raise MessageTimeout(f"the {kind} of {name} has not come from rank {late.source}", code="transition-receive-late",
                         where="transition", value=f"{timeout_seconds:g} s",
                         remedy="Check what that rank does, or raise `--comm.timeout-seconds`.")


# --- copies of a neighbour's states -----------------------------------------------------------------------------------

# A rank's share of the optimizer's states, copied to the next replica: with sharded states no other rank has it.
#
# Each message is the length of its head (8 bytes), the head (JSON: kind, name, shape, box and number format of each
# piece, and which parameters have missed updates) and the elements of all pieces, one after the other.


_LENGTH_BYTES = 8


def with_states_of_neighbour(held: Held, group: Group) -> Held:
    """Send the optimizer's states in `held` to the next member of `group`, cyclically; returns `held` with those of the
    previous member. Collective. Returns `held` itself in a group of one."""
    size, index = len(group.ranks), group.index
    if size == 1:
        return held
    own = _pack([piece for piece in held.pieces if piece.kind not in state.NO_STATES], held.missed_updates)
    sizes = group.gather_number(own.numel())
    before, after = (index - 1) % size, (index + 1) % size
    found = torch.empty(sizes[before], dtype=torch.uint8)
    group.all_to_all(found, own, [sizes[before] if other == before else 0 for other in range(size)],
                     [own.numel() if other == after else 0 for other in range(size)]).wait()
    pieces, missed_updates = _unpack(found)
    return replace(held, pieces=[*held.pieces, *pieces], missed_updates={**missed_updates, **held.missed_updates})


def _pack(pieces: Sequence[Piece], missed_updates: Mapping[str, int]) -> Tensor:
    head = json.dumps([missed_updates, [[piece.kind, piece.name, piece.shape, piece.box, state.dtype_name(piece.tensor),
                                         tuple(piece.tensor.shape)] for piece in pieces]]).encode()
    parts = [torch.tensor([len(head)]).view(torch.uint8), torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    return torch.cat([*parts, *(piece.tensor.reshape(-1).view(torch.uint8) for piece in pieces)])


def _unpack(message: Tensor) -> tuple[list[Piece], dict[str, int]]:
    """The pieces, each with its own, aligned memory; and which parameters have missed updates."""
    length = int(message[:_LENGTH_BYTES].clone().view(torch.int64))
    start, pieces = _LENGTH_BYTES + length, []
    missed_updates, described = json.loads(message[_LENGTH_BYTES:start].numpy().tobytes())
    for kind, name, shape, box, dtype, held in described:
        number_format = getattr(torch, dtype)
        numel = torch.Size(held).numel()
        stop = start + numel * number_format.itemsize
        tensor = torch.empty(held, dtype=number_format)
        tensor.view(-1).view(torch.uint8).copy_(message[start:stop])
        pieces.append(Piece(kind=kind, name=name, shape=tuple(shape), box=tuple(map(tuple, box)), tensor=tensor))
        start = stop
    return pieces, missed_updates
