"""Tied parameters whose ends sit on different stages, or are cut differently over row x col.

One end owns the parameter: its master copy, its optimizer state, its place in the norm. The others send it their
gradient once it is complete, once a batch, and get the new value back before their next forward. The sums of the ends
stay separate until that addition, so every policy adds in the same order.

Ends that are cut differently are resharded on the way. Each rank sends the intersections of its box with those of the
other end's ranks; here an embedding cut by columns, and a head cut by rows:

    embedding   0 0 1 1         head   2 2 2 2         rank 0 sends to 2 and 3 the halves of its own half;
                0 0 1 1                3 3 3 3         ends with the same cut need one message, to the counterpart
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
    shape: of the full parameter. box: the part that the rank holds.
    trains: whether it trained when the engine was built. If it is frozen later, its ends still exchange zeros, and
        whether they are frozen.
    ends: number of ends that send gradients to an owner; 0 for other ends.
    is_compared: whether the rank is the first that has this box of this end, and checks whether it is written to.
    gradients: incoming moves if this end owns, in the order of addition; else outgoing moves.
    values: outgoing moves if this end owns; else incoming moves.

    Moves are named after the key of the end that does not own. Their boxes are relative to the full parameter.
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
        """The other ranks with which it exchanges messages."""
        return tuple(sorted({rank for move in (*self.gradients, *self.values)
                             for rank in (move.source, move.destination)} - {self.rank}))

    @property
    def gradient(self) -> Tensor:
        """Its gradient, which exists from the start of a batch."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return self.parameter.grad

    def part(self, tensor: Tensor, move: Move) -> Tensor:
        """The elements of a move, as a view of this end or of its gradient."""
        return tensor[index_of(move.box, self.box)]


def ties_of(layout: Layout, rank: int, parameters: dict[str, nn.Parameter]) -> tuple[Tie, ...]:
    """The ties of `rank`, from information that is the same on every rank. parameters: those of its stage, by key."""
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
    """All parameters of the model that have several ends, as errors name them."""
    return tuple(_text(layout, owner) for owner, ends in layout.tie_ends.items() if len(ends) > 1)


def _text(layout: Layout, owner: str) -> str:
    others = [parameter.name for parameter in layout.parameters if parameter.owner == owner and not parameter.is_owner]
    return f"parameter {owner}, tied as {', '.join(others)}"


def _plan_moves(layout: Layout, replica: int, name: str, source: Parameter, destination: Parameter, *,
                sums: bool) -> list[Move]:
    """The moves of elements from one end to the other in a replica, in order of their source.

    Of positions with the same elements, the destination's own sends, else the first. sums: the elements are gradients.
    Gradients of positions along `source.summed` differ and all move; along `destination.summed` each moves to one
    position.
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
    """The gradients of `rank` and their destinations, in the order of `layout.gradients`.

    parameters: those of its stage, by key. groups: axes of the tensor mesh -> the ranks that sum gradients whose parts
    are spread along these axes. splits: axes of the tensor mesh -> the ranks that share a parameter which is split
    along these, if updates need full parameters. tables: lookup tables whose gradients are reported row by row.
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
    """Gradients and values of ties that have arrived on a rank. Those of one kind, from one rank and for one end, are
    queued until they are taken: a replica that has nothing to compute may be batches ahead."""

    def __init__(self) -> None:
        self._arrived: dict[tuple[MessageKind, int, str], deque[tuple[Tensor, int]]] = defaultdict(deque)

    def put(self, message: Message) -> None:
        """Queue a gradient or a value that has arrived."""
        (end, tensor), = message.tensors.items()
        self._arrived[message.kind, message.source, end].append((tensor, message.microbatch))

    def arrived(self, kind: MessageKind, source: int, end: str) -> deque[tuple[Tensor, int]]:
        """Tensors that have arrived and have not been taken, the oldest first, with the note of each message."""
        return self._arrived[kind, source, end]


class TiedParameters:
    """Exchanges gradients and values among the ends of this rank's ties, batch by batch.

        owner   ... forwards, backwards, wait for all gradients, add, reduce, update, send the value
        end     wait for the value, forwards, backwards, send the gradient ...

    A program that writes an end between batches, freezes it or gives it a hook must do so at all ends. Whether ends are
    frozen, and how many hooks they have, is sent with the gradients. Each end computes a checksum of written values
    (`number`), and the ranks sum the checksums.

    arrived: what others have sent. send: (destination, message), without blocking. wait: (what, source), returns when a
    message has arrived. names: `tied_parameters`, of which other ranks may have ends.
    """

    def __init__(self, ties: Sequence[Tie], arrived: TieMessages, send: Callable[[int, Message], None],
                 wait: Callable[[str, int], None], names: Sequence[str] = ()) -> None:
        self.ties, self._arrived, self._send, self._wait, self.names = tuple(ties), arrived, send, wait, names
        self.owns = any(tie.owns and tie.trains for tie in self.ties)
        """Whether other ends wait for values from this rank after each step."""
        self._due = dict.fromkeys((tie.name for tie in ties), 0)
        self._sent: dict[str, int] = {}
        self._known = {tie.name: _memory_of(tie.parameter) for tie in ties}
        """`_memory_of` of an owner when it last sent its value, of another end when the value was sent or arrived."""

    def _pass(self, kind: MessageKind, batch: int, move: Move, tensor: Tensor, note: int) -> None:
        """Send `tensor` with `note`, or deliver it directly if its destination is this rank."""
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
        """Send the complete gradient of an end that does not own, once a batch."""
        for tie in self.ties:
            if tie.name == name and self._sent.get(name) != batch:
                self._sent[name] = batch
                for move in tie.gradients:
                    self._pass(MessageKind.TIED_GRADIENT, batch, move, tie.part(tie.gradient, move),
                               2 * _num_hooks(tie.parameter) + tie.parameter.requires_grad)

    @torch.no_grad()
    def add_gradients(self, batch: int) -> list[Tie]:
        """After all backwards, wait for the gradients of all other ends and add them to the owner's; returns a tie for
        each end that is added. Ends here that have not sent their gradients do so first: their turn in the order of
        reductions may come after that of an owner, which waits. Raises ModelError if only one of two ends is frozen or
        has a hook."""
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
        """Owners send their values; other ends note that one more is due (it may have arrived already). trained: only
        for parameters that train. replaces: the value of an owner that was written to since it last sent its value
        replaces all ends, including those that were written to."""
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
        """Wait until no value of an end held here is due. An end that was written to since then stays as it is, unless
        its owner's value replaces it: a program that writes one end must write the others, too."""
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

    # ------------------------------------------------------------------ whether all ends have the same values

    def number(self) -> float:
        """The checksum that this rank adds to the sums of a batch: of the values of ends of ties that were written to
        here since the last exchange, including in this batch's forwards. An owner adds it once for each other end; ends
        with the same values subtract it again."""
        written = {tie.text for tie in self.ties if self._is_written(tie)}
        return float(sum((tie.ends if tie.owns else -1) * _number_of(tie) for tie in self.ties
                         if tie.is_compared and tie.text in written))

    def check(self, total: float) -> None:
        """Raise ModelError if the sum over all ranks shows that ends have different values."""
        if int(total) % (1 << NUMBER_BITS):
            places = dict.fromkeys([tie.text for tie in self.ties if self._is_written(tie)] or self.names)
            raise ModelError("was written at one end of its tie, and has other values at another",
                             code="tied-end-written", where=" or ".join(places),
                             remedy="Write all that engine.named_parameters() returns, on all ranks and not in a "
                                    "forward. To update by engine.optimizer, call engine.step(result) instead of its "
                                    "step().")


def _num_hooks(parameter: nn.Parameter) -> int:
    """Number of hooks that see the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _memory_of(tensor: Tensor) -> tuple[int, int, int]:
    """A value that changes when `tensor` is written to, or gets other memory. Writes into `tensor.data`, which do not
    change the version, show in a sample of the values; not on a device, for which the host would have to wait."""
    sample = 0
    if tensor.device.type == "cpu" and tensor.is_contiguous() and type(tensor) in (Tensor, nn.Parameter):
        values = tensor.detach().view(-1)[::max(tensor.numel() // _SAMPLED, 1)].contiguous()
        sample = crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0
    return tensor.data_ptr(), tensor._version, sample


# --- a checksum of a parameter's values -------------------------------------------------------------------------------

_ELEMENTS = 1 << 20
"""Number of elements of a large parameter that are processed together: each takes several times eight bytes."""
_SAMPLED = 4096
"""Approximate number of elements that are sampled to see whether a parameter was written to."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Bytes of an element -> the integer format in which its bits are read."""


def _number_of(tie: Tie) -> int:
    """A checksum of the values of an end. The sum over a parameter's boxes is the same for every cut."""
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
