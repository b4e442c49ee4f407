"""Tied parameters whose ends sit on different stages.

One end owns the parameter: its master copy, its optimizer state, its place in the norm. The others send it their
gradient once it is complete, in one message a batch, and get the new value back before their next forward. The sums of
the two ends stay apart until that one addition, so every policy adds in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranvier.comm.message import Kind, Message
from ranvier.layout import Layout
from ranvier.mesh import Mesh
from ranvier.optim.gradients import GradientSpec


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A tied parameter that this stage holds an end of. `peers`: ranks of the other stages' ends, in stage order.

    trains: whether it did when the engine was built. If it is frozen later, its ends go on exchanging zeros, so that
    they agree without a word.
    """

    name: str
    parameter: nn.Parameter
    owns: bool
    trains: bool
    peers: tuple[int, ...]


def ties_of(layout: Layout, mesh: Mesh, rank: int, parameters: dict[str, nn.Parameter]) -> tuple[Tie, ...]:
    """The ties of `rank` to other stages. parameters: owner's name -> this stage's parameter."""
    stage = mesh.coordinates(rank).pipe
    ends: dict[str, set[int]] = {}
    for parameter in layout.parameters:
        ends.setdefault(parameter.owner, set()).add(layout.stage_of(parameter.block))
    ties = []
    for owner, stages in ends.items():
        if stage not in stages or len(stages) == 1:
            continue
        home = layout.stage_of(layout[owner].block)
        others = sorted(stages - {stage}) if stage == home else [home]
        ties.append(Tie(name=owner, parameter=parameters[owner], owns=stage == home, trains=layout[owner].trainable,
                        peers=tuple(mesh.rank(mesh.coordinates(rank).replace("pipe", other)) for other in others)))
    return tuple(ties)


def gradient_specs(layout: Layout, stage: int, parameters: dict[str, nn.Parameter],
                   ties: Sequence[Tie]) -> list[GradientSpec]:
    """What a stage's gradients are and where they go. parameters: owner's name -> this stage's parameter."""
    blocks: dict[str, set[int]] = {}
    for parameter in layout.parameters:
        if parameter.block in layout.blocks(stage):
            blocks.setdefault(parameter.owner, set()).add(parameter.block)
    tied, order = {tie.name: tie for tie in ties}, [parameter.owner for parameter in layout.parameters]
    specs = []
    for name in sorted(blocks, key=order.index):
        parameter, tie = parameters[name], tied.get(name)
        if parameter.requires_grad:
            specs.append(GradientSpec(name=name, parameter=parameter, blocks=frozenset(blocks[name]),
                                      remote_ends=len(tie.peers) if tie and tie.owns else 0,
                                      sent_to_owner=bool(tie) and not tie.owns))
    return specs


class TiedGradients:
    """The gradients that have arrived from other ends, added in stage order once all of one tie are here.

    Each end sends one a batch, and a replica that has nothing to compute may be batches ahead: they queue up in order.
    """

    def __init__(self, ties: Sequence[Tie]) -> None:
        self._owned = {tie.name: tie for tie in ties if tie.owns and tie.trains}
        self._arrived = {name: {peer: deque[Tensor]() for peer in tie.peers} for name, tie in self._owned.items()}

    def receive(self, message: Message) -> None:
        (name, gradient), = message.tensors.items()
        self._arrived[name][message.source].append(gradient)

    def missing(self) -> tuple[str, int] | None:
        """A (parameter, rank) whose gradient is still awaited, or None."""
        return next(((name, peer) for name, tie in self._owned.items() for peer in tie.peers
                     if not self._arrived[name][peer]), None)

    @torch.no_grad()
    def add(self) -> list[Tie]:
        """Add what has arrived, in stage order; call it once everything is here. Returns a tie for each addition."""
        added = []
        for name, tie in self._owned.items():
            for peer in tie.peers:
                tie.parameter.grad.add_(self._arrived[name][peer].popleft().to(tie.parameter.device))
                added.append(tie)
        return added


class TiedParameters:
    """What the ends of this rank's ties send each other, batch by batch.

        owner   ... forwards, backwards, wait for all gradients, add, reduce, update, send the value
        end     wait for the value, forwards, backwards, send the gradient ...

    send: (destination, message), without blocking. wait: (what for, from whom), returns when a message has come.
    """

    def __init__(self, ties: Sequence[Tie], send: Callable[[int, Message], None],
                 wait: Callable[[str, int], None]) -> None:
        self.ties, self._send, self._wait = tuple(ties), send, wait
        self._gradients = TiedGradients(ties)
        self._due = dict.fromkeys((tie.name for tie in ties), 0)

    @property
    def owns(self) -> bool:
        """Whether other ends wait for values from here after each step."""
        return any(tie.owns and tie.trains for tie in self.ties)

    def receive(self, message: Message) -> None:
        """A gradient or a value has come, maybe before anyone has asked for it."""
        if message.kind is Kind.TIED_GRADIENT:
            self._gradients.receive(message)
            return
        (name, value), = message.tensors.items()
        with torch.no_grad():
            next(tie for tie in self.ties if tie.name == name).parameter.copy_(value)
        self._due[name] -= 1

    def send_gradient(self, name: str, batch: int) -> None:
        """The complete gradient of an end whose owner is elsewhere."""
        for tie in self.ties:
            if tie.name == name:
                self._send(tie.peers[0], Message(Kind.TIED_GRADIENT, batch, 0, {name: tie.parameter.grad}))

    def add_gradients(self) -> list[Tie]:
        """Wait for the gradients of all other ends and add them to the owner's; a tie for each addition."""
        while (missing := self._gradients.missing()) is not None:
            self._wait(f"the gradient of tied parameter {missing[0]}", missing[1])
        return self._gradients.add()

    def send_values(self, batch: int, *, trained: bool) -> None:
        """Owners send their new values; other ends note that one more is due (it may have come already).
        trained: only of parameters that train."""
        for tie in self.ties:
            if trained and not tie.trains:
                continue
            if not tie.owns:
                self._due[tie.name] += 1
                continue
            for peer in tie.peers:
                self._send(peer, Message(Kind.TIED_VALUE, batch, 0, {tie.name: tie.parameter.detach()}))

    def receive_values(self) -> None:
        """Wait until no value of an end held here is due."""
        for tie in self.ties:
            while self._due[tie.name] > 0:
                self._wait(f"the value of tied parameter {tie.name}", tie.peers[0])
