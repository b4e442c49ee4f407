"""One batch on one rank: messages that arrive are reported to the schedule, whose next action the stage runs.

    messages --> schedule --> action --> stage --> message to the neighbour
                    ^                      |
                    +----- what it did ----+         the leader of a row x col stage announces each action to its peers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from torch import Tensor

from ranvier.block import named
from ranvier.comm.message import Message, MessageKind
from ranvier.errors import ModelError
from ranvier.mesh import Coordinates, Mesh
from ranvier.optim.step import Updater
from ranvier.pipeline.connections import Connections
from ranvier.pipeline.look_ahead import LookAhead
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.nominal_weight import NominalWeight
from ranvier.pipeline.stage import Stage
from ranvier.pipeline.statistics import BatchStatistics
from ranvier.schedule.schedule import Action, Done, Policy, Product, Schedule, Wait, actions_text
from ranvier.schedule.spans import Category, Timeline

_CATEGORIES: dict[str, Category] = {"F": "forward", "B": "backward", "W": "weight"}


class ActionResult(TypedDict, total=False):
    """What the schedule wants to know of an action that is done."""

    expects_backward: bool
    deferrable_bytes: int
    products: list[Product]


class BatchRunner:
    """Runs batches on one rank.

    Args:
        progress: lets messages and reductions move; called between products.
        in_flight: most microbatches of a replica under way.
        look_ahead: how far the host runs ahead of a CUDA device.
        defer_bytes: most bytes that deferred weight gradients keep alive; None for those of `deferred` microbatches,
            as forwards show them.
        nominal_weight: agrees on the expected weight of a batch before its first backward; None where nobody asks.
        takes_nominal_weight: whether that becomes what losses are divided by.
    """

    def __init__(self, *, mesh: Mesh, at: Coordinates, stage: Stage, connections: Connections, updater: Updater,
                 statistics: BatchStatistics, timeline: Timeline, progress: Callable[[], None], policy: Policy,
                 in_flight: int, look_ahead: LookAhead, defer_bytes: int | None, deferred: int,
                 nominal_weight: NominalWeight | None, takes_nominal_weight: bool) -> None:
        self._mesh, self._at, self._stage, self._connections = mesh, at, stage, connections
        self._updater, self._statistics, self._timeline = updater, statistics, timeline
        self._progress, self._policy, self._in_flight = progress, policy, in_flight
        self._look_ahead = look_ahead
        self.defer_bytes, self._deferred = defer_bytes or 0, deferred if defer_bytes is None else 0
        self.nominal_weight, self._takes_nominal_weight = nominal_weight, takes_nominal_weight
        self._call = self._step = 0

    @property
    def _is_last_stage(self) -> bool:
        return self._at.pipe == self._mesh.pipe - 1

    def run(self, batch: Sequence[Microbatch], *, call: int, step: int, training: bool,
            keep_outputs: bool = False) -> None:
        """Run all actions of one batch. call: the number of batches on this engine, this one included. step: the
        training step that dropout is keyed by. keep_outputs: whether the last stage keeps what its blocks return."""
        self._call, self._step = call, step
        leads = self._connections.sequencer.leads
        self._stage.begin(training)
        if self._connections.tensor_mesh is not None:
            self._connections.tensor_mesh.whole_outputs = keep_outputs
        schedule = Schedule(
            stage=self._at.pipe, num_stages=self._mesh.pipe, num_microbatches=len(batch), policy=self._policy,
            in_flight=self._in_flight, training=training, defer_bytes=self.defer_bytes)
        ran: list[Action] = []
        running: Action | None = None
        try:
            self._connections.inbox.begin(call, step, len(batch), schedule.on_message if leads else _unheard)
            if training and self.nominal_weight is not None and not (self._is_last_stage and batch):
                self.nominal_weight.start(0.0)
            if not batch:
                self._reduce_statistics()
            while (action := self._next_action(schedule)) is not None:
                running = action
                result = self.execute(action, batch, training, keep_outputs)
                running = None
                if leads:
                    if self._deferred:
                        self.defer_bytes = max(self.defer_bytes, self._deferred * result.get("deferrable_bytes", 0))
                        schedule.defer_bytes = self.defer_bytes
                    schedule.on_done(action, **result)
                if training and self.nominal_weight is not None and self._is_last_stage and not ran:
                    self._estimate_weight(self.nominal_weight, len(batch))
                if action.kind == "F" and action.microbatch == len(batch) - 1:
                    self._reduce_statistics()
                ran.append(action)
        except Exception as error:
            self._stage.clear()
            board, text = self._connections.board, f"{actions_text(ran)} >{running}<" if running else actions_text(ran)
            error.add_note(f"{board.name(self._connections.rank)}: actions so far: {text.strip() or 'none'}")
            raise
        finally:
            self._stage.end()
        if training and self.nominal_weight is not None and self.nominal_weight.started:
            self._take_nominal_weight(self.nominal_weight)

    def _estimate_weight(self, nominal_weight: NominalWeight, num_microbatches: int) -> None:
        """After the first forward of the last stage: all its ranks need the estimate for their first backward."""
        counts = self._at.col == 0
        nominal_weight.start(float(self._stage.loss_and_weight[1]) * num_microbatches if counts else 0.0)
        self._take_nominal_weight(nominal_weight)

    def _take_nominal_weight(self, nominal_weight: NominalWeight) -> None:
        weight = nominal_weight.agree()
        if weight is not None:
            self._updater.expect_weight(weight, divide_by_it=self._takes_nominal_weight)
            self._stage.loss_factor = self._updater.loss_factor
            self.nominal_weight = None

    def _reduce_statistics(self) -> None:
        """Start summing loss and weight over all ranks; of a row of the last stage, all columns know the same."""
        counts = self._is_last_stage and self._at.col == 0
        self._statistics.reduce(self._stage.loss_and_weight if counts else None)

    # ------------------------------------------------------------------ one action

    def _next_action(self, schedule: Schedule) -> Action | None:
        connections = self._connections
        if not connections.sequencer.leads:
            return connections.sequencer.next(self._call)
        connections.inbox.poll()
        while isinstance(action := schedule.next_action(), Wait):
            if action.backward is not None:
                connections.inbox.wait(f"the backward of microbatch {action.backward}", _peer(connections.after))
            else:
                connections.inbox.wait(f"the forward of microbatch {action.forward}", _peer(connections.before))
        found = None if isinstance(action, Done) else action
        connections.sequencer.announce(self._call, found)
        return found

    def execute(self, action: Action, batch: Sequence[Microbatch], training: bool, keep_outputs: bool) -> ActionResult:
        """Run `action`, send what it produced, and return what the schedule wants to know about it."""
        number = action.microbatch
        match action.kind:
            case "F":
                started, result = self._forward(action, batch[number], training, keep_outputs)
            case "B":
                arrived = {} if self._is_last_stage else self._take_return(number).tensors
                started = self._start(action)
                gradients, products = self._stage.backward(number, self._to_device(arrived), defer=action.defer,
                                                           last=number == len(batch) - 1)
                self._send_return(number, gradients)
                result = {"products": products}
            case "C":
                if not self._is_last_stage:
                    self._take_return(number)
                self._send_return(number, {})
                return {}
            case "W":
                started, result = self._start(action), {}
                self._stage.weight(number, action.product)
                self._progress()
        self._timeline.add(_CATEGORIES[action.kind], str(action), self._step, started)
        self._look_ahead.launched()
        return result

    def _forward(self, action: Action, microbatch: Microbatch, training: bool, keep_outputs: bool
                 ) -> tuple[int, ActionResult]:
        """Run a forward and hand its outcome on; when it began, and what the schedule wants to know."""
        number = action.microbatch
        inputs, wants = self._inputs(number, microbatch)
        started = self._start(action)
        outcome = self._stage.forward(number, self._step, microbatch, inputs, wants, training=training,
                                      keep_outputs=keep_outputs)
        if not self._is_last_stage:
            self._connections.send(_peer(self._connections.after), Message(
                MessageKind.FORWARD, self._call, number, outcome.tensors, outcome.requires_grad))
        return started, {"expects_backward": outcome.expects_backward, "deferrable_bytes": outcome.deferrable_bytes}

    def _start(self, action: Action) -> int:
        self._connections.board.action = f"{_CATEGORIES[action.kind]} {action.microbatch}"
        return self._timeline.mark()

    def _inputs(self, number: int, microbatch: Microbatch) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The carried state that enters this stage, and which of it wants a gradient."""
        if self._at.pipe > 0:
            message = self._connections.inbox.take("forward", number, _peer(self._connections.before))
            return self._to_device(message.tensors), message.requires_grad
        if microbatch.inputs is None:
            raise ModelError("has no inputs on the first stage", where=f"microbatch {number}",
                             remedy="Give the ranks of the first stage the inputs of every microbatch.")
        return self._to_device(named(microbatch.inputs, f"inputs of microbatch {number}")), frozenset()

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self._connections.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def _take_return(self, number: int) -> Message:
        return self._connections.inbox.take("return", number, _peer(self._connections.after))

    def _send_return(self, number: int, gradients: dict[str, Tensor]) -> None:
        """What goes back over the edge before this stage: gradients where there are some, else a bare credit."""
        if self._at.pipe > 0:
            kind = MessageKind.BACKWARD if gradients else MessageKind.CREDIT
            self._connections.send(_peer(self._connections.before), Message(kind, self._call, number, gradients))


def _peer(rank: int | None) -> int:
    """The neighbour of a stage that has one."""
    assert rank is not None, "an end of the pipeline has no neighbour there"
    return rank


def _unheard(direction: str, microbatch: int) -> None:
    """Where the leader decides, nobody else needs to hear of arrivals."""
