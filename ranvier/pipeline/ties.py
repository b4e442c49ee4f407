"""Tied parameters whose ends sit on different stages, or are cut differently over row x col.

One end owns the parameter: its master copy, its optimizer state, its place in the norm. The others send it their
gradient once it is complete, once a batch, and get the new value back before their next forward. The sums of the ends
stay apart until that one addition, so every policy adds in the same order.

Ends that are cut differently are re-laid on the way. Each rank sends what its box has in common with those of the other
end's ranks; here an embedding cut by columns, and a head cut by rows:

    embedding   0 0 1 1         head   2 2 2 2         rank 0 sends to 2 and 3 the halves of its own half;
                0 0 1 1                3 3 3 3         ends cut alike need one message, to the counterpart
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn

from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Group
from ranvier.errors import ModelError
from ranvier.layout import Box, Layout, Move, Parameter, TensorAxis, index_of, intersection
from ranvier.mesh import Position
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.tensor_update import TensorSplit
from ranvier.pipeline.same_on_ranks import NUMBER_BITS, ODD


@dataclass(frozen=True, kw_only=True)
class Tie:
    """An end of a tied parameter on a rank, under the key `name`.

    text: the parameter in an error, with all of its names.
    shape: of the whole parameter. box: what the rank holds of it.
    trains: whether it did when the engine was built. If it is frozen later, its ends still exchange zeros, and whether
        they are frozen.
    ends: of an owner, how many ends send it gradients; else 0.
    is_compared: whether the rank is the first that has this box of this end, and sees whether somebody writes it.
    gradients: what comes in where this end owns, in the order in which it is added; else what goes out.
    values: what goes out where this end owns; else what comes in.

    Moves are named after the end that does not own: its key. Their boxes are those of the whole parameter.
    """

    rank: int
    name: str
    text: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    box: Box
    owns: bool
    trains: bool
    ends: int
    is_compared: bool
    gradients: tuple[Move, ...]
    values: tuple[Move, ...]

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that it exchanges with."""
        return tuple(sorted({rank for move in (*self.gradients, *self.values)
                             for rank in (move.source, move.destination)} - {self.rank}))

    @property
    def gradient(self) -> Tensor:
        """Its gradient, which is there from the start of a batch."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return self.parameter.grad

    def part(self, tensor: Tensor, move: Move) -> Tensor:
        """The elements of a move, as a view of this end or of its gradient."""
        return tensor[index_of(move.box, self.box)]


def ties_of(layout: Layout, rank: int, parameters: dict[str, nn.Parameter]) -> tuple[Tie, ...]:
    """The ties of `rank`, from what every rank knows alike. parameters: those of its stage, by key."""
    at, ties = layout.mesh.coordinates(rank), []
    pipeline_rank = at.pipeline_rank
    for owner, ends in layout.tie_ends.items():
        if len(ends) == 1:
            continue
        home = layout.pipe_of(layout[owner].block), owner
        for place, parameter in ends.items():
            if place[0] != pipeline_rank:
                continue
            owns = place == home
            others = [other for other in ends if other != home] if owns else [place]
            gradients, values = [], []
            for other in others:
                gradients += [move
                              for move in _plan_moves(layout, at.replica, other[1], ends[other], ends[home], sums=True)
                              if rank == (move.destination if owns else move.source)]
                values += [move
                           for move in _plan_moves(layout, at.replica, other[1], ends[home], ends[other], sums=False)
                           if rank == (move.source if owns else move.destination)]
            ties.append(Tie(rank=rank, name=place[1], text=_text(layout, owner), parameter=parameters[place[1]],
                            shape=parameter.shape, box=layout.box(parameter, at.position), owns=owns,
                            trains=parameter.trainable, ends=len(others) if owns else 0,
                            gradients=tuple(gradients), values=tuple(values),
                            is_compared=layout.is_first_holder(parameter, at.position) and not parameter.quantized))
    return tuple(ties)


def tied_parameters(layout: Layout) -> tuple[str, ...]:
    """All of the model that have several ends, as errors name them."""
    return tuple(_text(layout, owner) for owner, ends in layout.tie_ends.items() if len(ends) > 1)


def _text(layout: Layout, owner: str) -> str:
    others = [parameter.name for parameter in layout.parameters if parameter.owner == owner and not parameter.is_owner]
    return f"parameter {owner}, tied as {', '.join(others)}"


def _plan_moves(layout: Layout, replica: int, name: str, source: Parameter, destination: Parameter, *,
                sums: bool) -> list[Move]:
    """The moves of elements from one end to the other in a replica, in order of their source.

    Of positions with the same elements the destination's own sends, else the first. sums: they are gradients. Those of
    positions along `source.summed` differ and all move; along `destination.summed` each moves to one position.
    """
    mesh = layout.mesh

    def rank(parameter: Parameter, position: Position) -> int:
        return mesh.rank(mesh.place(replica=replica, pipeline_rank=layout.pipe_of(parameter.block), position=position))

    def indices(position: Position, axes: Sequence[TensorAxis]) -> list[int]:
        return [index for axis, index in zip(mesh.stage_axes, position, strict=True) if axis in axes]

    copies: dict[tuple[Box, tuple[int, ...]], list[Position]] = {}
    for position in mesh.positions:
        summand = tuple(indices(position, source.summed) if sums else ())
        copies.setdefault((layout.box(source, position), summand), []).append(position)
    moves = []
    for there in mesh.positions:
        for (held, _), holders in copies.items():
            box = intersection(held, layout.box(destination, there))
            if box is None or (sums and indices(there, destination.summed) != indices(holders[0], destination.summed)):
                continue
            holder = there if there in holders else holders[0]
            moves.append(Move(name, box, rank(source, holder), rank(destination, there)))
    return sorted(moves, key=lambda move: (move.source, move.destination))


def gradient_specs(layout: Layout, rank: int, parameters: Mapping[str, nn.Parameter],
                   groups: Mapping[tuple[TensorAxis, ...], Group],
                   splits: Mapping[tuple[TensorAxis, ...], Group] | None = None, *,
                   tables: Collection[nn.Parameter] = ()) -> list[GradientSpec]:
    """The gradients of `rank` and where they go, in the order of `layout.gradients`.

    parameters: those of its stage, by key. groups: axes of the tensor mesh -> the ranks over which gradients are summed
    whose parts are spread along these axes. splits: axes of the tensor mesh -> the ranks that share a parameter which
    is split along these, where updates need whole parameters. tables: lookup tables whose gradients are told row by
    row.
    """
    specs = []
    for gradient in layout.gradients(rank):
        summed = () if gradient.sent_to_owner else layout.summed_axes(gradient.name)
        parameter, axes = parameters[gradient.name], layout.split_axes(gradient.name) if gradient.whole else ()
        split = None
        if splits and axes and not gradient.sent_to_owner:
            places = map(layout.mesh.coordinates, splits[axes].ranks)
            boxes = [layout.box(layout[gradient.name], at.position) for at in places]
            split = TensorSplit(group=splits[axes], boxes=boxes, device=parameter.device)
        specs.append(GradientSpec.from_layout(gradient, parameter, groups[summed] if summed else None, split,
                                              is_table=parameter in tables))
    return specs


class TieMessages:
    """Gradients and values of ties that have come to a rank. Those of one kind, from one rank and for one end, queue up
    until they are asked for: a replica that has nothing to compute may be batches ahead."""

    def __init__(self) -> None:
        self._arrived: dict[tuple[MessageKind, int, str], deque[tuple[Tensor, int]]] = defaultdict(deque)

    def put(self, message: Message) -> None:
        """A gradient or a value has come, maybe before anyone has asked for it."""
        (end, tensor), = message.tensors.items()
        self._arrived[message.kind, message.source, end].append((tensor, message.microbatch))

    def arrived(self, kind: MessageKind, source: int, end: str) -> deque[tuple[Tensor, int]]:
        """Tensors that have arrived and wait to be taken, the oldest first, with the note of each message."""
        return self._arrived[kind, source, end]


class TiedParameters:
    """Exchanges gradients and values among the ends of this rank's ties, batch by batch.

        owner   ... forwards, backwards, wait for all gradients, add, reduce, update, send the value
        end     wait for the value, forwards, backwards, send the gradient ...

    A program that writes an end between batches, freezes it or gives it a hook must do so at all ends. Whether it has
    frozen them, and how many hooks they have, goes along with the gradients. Of what it has written each end makes a
    number (`number`), which the ranks sum up.

    arrived: what others have sent. send: (destination, message), without blocking. wait: (what for, from whom), returns
    when a message has come. names: `tied_parameters`, of which other ranks may have ends.
    """

    def __init__(self, ties: Sequence[Tie], arrived: TieMessages, send: Callable[[int, Message], None],
                 wait: Callable[[str, int], None], names: Sequence[str] = ()) -> None:
        self.ties, self._arrived, self._send, self._wait, self.names = tuple(ties), arrived, send, wait, names
        self.owns = any(tie.owns and tie.trains for tie in self.ties)
        """Whether other ends wait for values from here after each step."""
        self._due = dict.fromkeys((tie.name for tie in ties), 0)
        self._sent: dict[str, int] = {}
        self._known = {tie.name: _memory_of(tie.parameter) for tie in ties}
        """Of an owner when it has last sent its value, of an end when that was sent, or has come."""

    def _pass(self, kind: MessageKind, batch: int, move: Move, tensor: Tensor, note: int) -> None:
        """Send `tensor` with `note`, or hand it over where its destination is this rank."""
        if move.source == move.destination:
            self._arrived.put(Message(kind, batch, note, {move.parameter: tensor}, source=move.source))
        else:
            self._send(move.destination, Message(kind, batch, note, {move.parameter: tensor.contiguous()}))

    def _take(self, kind: MessageKind, what: str, move: Move) -> tuple[Tensor, int]:
        """The tensor of this move and its note; waits until it has arrived."""
        arrived = self._arrived.arrived(kind, move.source, move.parameter)
        while not arrived:
            self._wait(what, move.source)
        return arrived.popleft()

    def send_gradient(self, name: str, batch: int) -> None:
        """The complete gradient of an end that does not own, once a batch."""
        for tie in self.ties:
            if tie.name == name and self._sent.get(name) != batch:
                self._sent[name] = batch
                for move in tie.gradients:
                    self._pass(MessageKind.TIED_GRADIENT, batch, move, tie.part(tie.gradient, move),
                               2 * _num_hooks(tie.parameter) + tie.parameter.requires_grad)

    @torch.no_grad()
    def add_gradients(self, batch: int) -> list[Tie]:
        """Every backward has run: wait for the gradients of all other ends and add them to the owner's; a tie for each
        end that is added. Ends here that have not sent theirs do so first: their turn in the order of reductions may
        come after that of an owner, which waits. ModelError where only one of two ends is frozen or has a hook."""
        for tie in self.ties:
            if tie.trains and not tie.owns:
                self.send_gradient(tie.name, batch)
        added = []
        for tie in self.ties:
            if tie.trains and tie.owns:
                for move in tie.gradients:
                    what = f"the gradient of tied parameter {tie.name}"
                    gradient, note = self._take(MessageKind.TIED_GRADIENT, what, move)
                    hooks, trains = divmod(note, 2)
                    if trains != tie.parameter.requires_grad:
                        raise ModelError(
                            "is frozen at one end of its tie, and trains at another",
                            code="tied-end-frozen", where=tie.text, value=f"requires_grad={bool(trains)}",
                            remedy="Freeze it under all of its names, or let it train under all: all that "
                                   "engine.named_parameters() returns, on all ranks.")
                    if hooks != (own := _num_hooks(tie.parameter)):
                        raise ModelError(
                            f"has {own} gradient hooks at one end of its tie, and {hooks} at another, which has a part "
                            "of its gradient", code="tied-end-hooked", where=tie.text,
                            remedy="Register hooks before the engine is built, or on all that "
                                   "engine.named_parameters() returns, on all ranks.")
                    tie.part(tie.gradient, move).add_(gradient.to(tie.parameter.device))
                added += [tie] * tie.ends
        return added

    def send_values(self, batch: int, *, trained: bool, replaces: bool = False) -> None:
        """Owners send their values; other ends note that one more is due (it may have come already).
        trained: only of parameters that train. replaces: an owner that somebody has written since it last sent its
        value decides for all ends, also for those that somebody has written."""
        for tie in self.ties:
            if trained and not tie.trains:
                continue
            written = self._is_written(tie)
            if not tie.owns:
                self._due[tie.name] += 1
                if not replaces:
                    self._known[tie.name] = _memory_of(tie.parameter)
                continue
            for move in tie.values:
                self._pass(MessageKind.TIED_VALUE, batch, move, tie.part(tie.parameter.detach(), move),
                           int(replaces and written))
            self._known[tie.name] = _memory_of(tie.parameter)

    @torch.no_grad()
    def receive_values(self) -> None:
        """Wait until no value of an end held here is due. An end that someone has written since stays as it is, unless
        its owner's value replaces it: whoever writes one end writes the others too."""
        for tie in self.ties:
            due, self._due[tie.name] = self._due[tie.name], 0
            for _ in range(due):
                written = self._is_written(tie)
                what = f"the value of tied parameter {tie.name}"
                for value, replaces, move in [(*self._take(MessageKind.TIED_VALUE, what, move), move)
                                              for move in tie.values]:
                    if replaces or not written:
                        tie.part(tie.parameter, move).copy_(value)
                        self._known[tie.name] = _memory_of(tie.parameter)

    def _is_written(self, tie: Tie) -> bool:
        return self._known[tie.name] != _memory_of(tie.parameter)

    # ------------------------------------------------------------------ whether all ends were written alike

    def number(self) -> float:
        """The number that this rank adds to the sums of a batch, made of the values of ends of ties that somebody has
        written here since they were exchanged, in this batch's forwards, too. An owner adds it once for each other end,
        which take it away again if they have the same values."""
        written = {tie.text for tie in self.ties if self._is_written(tie)}
        return float(sum((tie.ends if tie.owns else -1) * _number_of(tie) for tie in self.ties
                         if tie.is_compared and tie.text in written))

    def check(self, total: float) -> None:
        """ModelError where the sum over all ranks shows that ends have different values."""
        if int(total) % (1 << NUMBER_BITS):
            places = dict.fromkeys([tie.text for tie in self.ties if self._is_written(tie)] or self.names)
            raise ModelError("was written at one end of its tie, and has other values at another",
                             code="tied-end-written", where=" or ".join(places),
                             remedy="Write all that engine.named_parameters() returns, on all ranks and not in a "
                                    "forward. To update by engine.optimizer, call engine.step(result) in place of its "
                                    "step().")


def _num_hooks(parameter: nn.Parameter) -> int:
    """Hooks that see its gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _memory_of(tensor: Tensor) -> tuple[int, int, int]:
    """Changes when somebody writes `tensor`, or gives it other memory. Of writes into `tensor.data`, which leave no
    trace, a sample of the values tells; not on a device, for which the host would have to wait."""
    sample = 0
    if tensor.device.type == "cpu" and tensor.is_contiguous() and type(tensor) in (Tensor, nn.Parameter):
        values = tensor.detach().view(-1)[::max(tensor.numel() // _SAMPLED, 1)].contiguous()
        sample = crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0
    return tensor.data_ptr(), tensor._version, sample


# --- a number of a parameter's values ---------------------------------------------------------------------------------

_ELEMENTS = 1 << 20
"""Of a large parameter so many elements are looked at at once: each takes eight bytes, several times."""
_SAMPLED = 4096
"""About so many elements tell whether a parameter has been written."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element: what its bits are read as."""


def _number_of(tie: Tie) -> int:
    """A number made of the values of an end. However a parameter is cut, the numbers of its boxes have one sum."""
    values, total = tie.parameter.detach().contiguous(), 0
    if not values.numel():
        return 0
    places = torch.zeros((), dtype=torch.int64, device=values.device)
    for (start, stop), size in zip(tie.box, tie.shape, strict=True):
        places = places.unsqueeze(-1) * size + torch.arange(start, stop, device=values.device)
    bits = values.view(-1).view(_INTEGERS[values.itemsize]).view(values.numel(), -1)
    for chunk, at in zip(bits.split(_ELEMENTS), places.view(-1).split(_ELEMENTS), strict=True):
        mixed = (chunk.to(torch.int64) ^ (at * 2 + 1).unsqueeze(-1) * ODD) * ODD  # depends on value and place
        total += int((mixed >> 64 - NUMBER_BITS).sum())  # the highest bits, which depend on all others
    return total % (1 << NUMBER_BITS)
