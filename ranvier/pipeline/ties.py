"""Tied parameters whose ends sit on different stages.

One end owns the parameter: its master copy, its optimizer state, its place in the norm. The others send it their
gradient once it is complete, in one message a batch, and get the new value back before their next forward. The sums of
the two ends stay apart until that one addition, so every policy adds in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranvier.comm.message import Kind, Message
from ranvier.layout import Layout
from ranvier.mesh import Mesh


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


def gradient_message(step: int, tie: Tie) -> Message:
    return Message(Kind.TIED_GRADIENT, step, 0, {tie.name: tie.parameter.grad})


def value_message(step: int, tie: Tie) -> Message:
    return Message(Kind.TIED_VALUE, step, 0, {tie.name: tie.parameter.detach()})
