"""One batch on one rank: messages that arrive are reported to the schedule, whose next action the stage runs.

    messages --> schedule --> action --> stage --> message to the neighbour
                    ^                      |
                    +----- what it did ----+         the leader of a row x col stage announces each action to its peers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from torch import Tensor

from ranvier.block import named
from ranvier.comm.message import Message, MessageKind
from ranvier.errors import MessageTimeout, TransportError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.optim.step import Updater
from ranvier.pipeline.column_parts import whole_names
from ranvier.pipeline.connections import Connections
from ranvier.pipeline.device_timeline import LookAhead
from ranvier.pipeline.inbox import call_number
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.result import LastOutputs
from ranvier.pipeline.stage import Stage
from ranvier.pipeline.statistics import BatchStatistics, NominalWeight
from ranvier.schedule.limits import Limits
from ranvier.schedule.schedule import Action, Done, Policy, Product, RankSchedule, Wait, actions_text
from ranvier.schedule.spans import Category, Timeline

_CATEGORIES: dict[str, Category] = {"F": "forward", "B": "backward", "W": "weight"}


class ActionResult(TypedDict, total=False):
    """Report of an action to the schedule when it is done."""

    expects_backward: bool
    deferrable_bytes: int
    products: list[Product]


class _Place(NamedTuple):
    """One of this rank's stages, and the ranks that have the stages before and after it (None: it is the first, or the
    last)."""

    number: int
    stage: Stage
    before: int | None
    after: int | None


class BatchRunner:
    """Runs batches on one rank.

    Args:
        placement: which rank has which stage. stages: those of this one.
        limits: of what may be under way.
        look_ahead: how far the host runs ahead of a CUDA device.
        defer_bytes: most bytes that deferred weight gradients keep alive; None for those of the microbatches that
            `limits` allows, as forwards show them.
        nominal_weight: agrees on the expected weight of a batch before its first backward; None where nobody asks.
        takes_nominal_weight: whether that becomes what losses are divided by.
        forwards_ended: called when the last forward of a training batch has run here.
    """

    def __init__(self, *, placement: StagePlacement, at: Coordinates, stages: RankStages, connections: Connections,
                 updater: Updater, statistics: BatchStatistics, timeline: Timeline, policy: Policy,
                 limits: Limits, look_ahead: LookAhead, defer_bytes: int | None,
                 nominal_weight: NominalWeight | None, takes_nominal_weight: bool,
                 forwards_ended: Callable[[], None]) -> None:
        self._at, self._stages, self._connections = at, stages, connections
        self._numbers, self._num_stages = placement.stages_of(at.pipeline_rank), placement.num_stages
        self._has_loss = self._numbers[-1] == self._num_stages - 1
        self._places = [_Place(number, stages[turn], connections.rank_of(number - 1) if number else None,
                               connections.rank_of(number + 1) if number < self._num_stages - 1 else None)
                        for turn, number in enumerate(self._numbers)]
        self._updater, self._statistics, self._timeline = updater, statistics, timeline
        self._policy, self._look_ahead, self._forwards_ended = policy, look_ahead, forwards_ended
        self._deferrable = [0] * len(stages)
        """Per stage, the most bytes that one microbatch's deferred products would keep alive."""
        self._limits_follow = defer_bytes is None
        self.defer_bytes, self._deferred = defer_bytes or 0, 0
        self._defer_last: int | None = None
        self.use_limits(limits)
        self.nominal_weight, self._takes_nominal_weight = nominal_weight, takes_nominal_weight
        self._call = self._step = 0

    def use_limits(self, limits: Limits) -> None:
        """Limits from the next batch on. Bytes that were set stay."""
        self._in_flight, self._max_stored, self._alternating = limits.in_flight, limits.max_stored, limits.alternating
        if self._limits_follow:
            self._deferred, self._defer_last = limits.deferred[self._at.pipeline_rank], limits.last
            self.defer_bytes = self._deferred * sum(self._deferrable)

    def run(self, batch: Sequence[Microbatch], *, call: int, step: int, training: bool,
            wanted: LastOutputs | None = None) -> None:
        """Run all actions of one batch. call: the number of batches on this engine, this one included. step: the
        training step that dropout is keyed by. wanted: takes what the last block returns."""
        self._call, self._step = call_number(call, training=training), step
        leads = self._connections.sequencer.leads
        schedule = RankSchedule(
            stages=self._numbers, num_stages=self._num_stages, num_microbatches=len(batch), policy=self._policy,
            in_flight=self._in_flight, training=training, defer_bytes=self.defer_bytes,
            defer_last=self._defer_last, max_stored=self._max_stored, alternating=self._alternating)
        ran: list[Action] = []
        running: Action | None = None
        try:
            self._stages.begin(training, len(batch), wanted)
            self._statistics.begin(batch, training=training)
            self._connections.inbox.begin(self._call, step, len(batch), schedule.on_message if leads else _unheard)
            if training and self.nominal_weight is not None and not (self._has_loss and batch):
                self.nominal_weight.start(0.0)
            if not batch:
                self._reduce_statistics(training)
            while (action := self._next_action(schedule)) is not None:
                running = action
                result = self.execute(action, batch)
                running = None
                if leads:
                    if self._deferred and result.get("deferrable_bytes", 0) > self._deferrable[action.turn]:
                        self._deferrable[action.turn] = result["deferrable_bytes"]  # so many microbatches may wait
                        schedule.budget.limit = self.defer_bytes = max(
                            self.defer_bytes, self._deferred * sum(self._deferrable))
                    schedule.on_done(action, **result)
                if action.kind == "F" and action.turn == len(self._numbers) - 1:
                    if training and self.nominal_weight is not None and self._has_loss and action.microbatch == 0:
                        self._estimate_weight(self.nominal_weight, len(batch))
                    if action.microbatch == len(batch) - 1:
                        self._forwards_ended()
                        self._reduce_statistics(training)
                ran.append(action)
            if self._connections.tensor_mesh is not None:
                self._connections.tensor_mesh.sums.finish()  # those of the last deferred products
                self._connections.tensor_mesh.order.end()
        except Exception as error:
            if running is not None and isinstance(error, TransportError):
                self._describe(error)
            self._stages.clear()
            board, text = self._connections.board, f"{actions_text(ran)} >{running}<" if running else actions_text(ran)
            error.add_note(f"{board.name(self._connections.rank)}: actions so far: {text.strip() or 'none'}")
            raise
        finally:
            self._stages.end()
        if training and self.nominal_weight is not None and self.nominal_weight.started:
            self._take_nominal_weight(self.nominal_weight)

    def _describe(self, error: TransportError) -> None:
        """A collective between layers has failed: say in which layer, and of one that did not end in which layer each
        rank is."""
        place = self._connections.board.place()
        if isinstance(error, MessageTimeout):
            error.extend(f"\n{self._connections.board.report_all()}")
        elif place:
            error.extend(f" (in {place})")

    def _estimate_weight(self, nominal_weight: NominalWeight, num_microbatches: int) -> None:
        """After the first forward of the last stage: all its ranks need the estimate for their first backward."""
        counts = self._at.is_first_with_samples
        nominal_weight.start(float(self._stages.loss_and_weight[1]) * num_microbatches if counts else 0.0)
        self._take_nominal_weight(nominal_weight)

    def _take_nominal_weight(self, nominal_weight: NominalWeight) -> None:
        weight = nominal_weight.agree()
        if weight is not None:
            self._updater.expect_weight(weight, divide_by_it=self._takes_nominal_weight)
            self._stages.set_loss_factor(self._updater.loss_factor)
            self.nominal_weight = None

    def _reduce_statistics(self, training: bool) -> None:
        """Start summing loss and weight over all ranks; of a row of the last stage, all columns know the same."""
        counts = self._has_loss and self._at.is_first_with_samples
        self._statistics.reduce(self._stages.loss_and_weight if counts else None, at_once=not training)

    # ------------------------------------------------------------------ one action

    def _next_action(self, schedule: RankSchedule) -> Action | None:
        connections = self._connections
        if not connections.sequencer.leads:
            return connections.sequencer.next(self._call)
        if connections.has_peers:
            connections.inbox.poll()
        while isinstance(action := schedule.next_action(), Wait):
            if action.backward is not None:
                what, source = f"the backward of microbatch {action.backward}", action.stage + 1
            else:
                what, source = f"the forward of microbatch {action.forward}", action.stage - 1
            connections.inbox.wait(what, connections.rank_of(source))
        found = None if isinstance(action, Done) else action
        connections.sequencer.announce(self._call, found)
        return found

    def execute(self, action: Action, batch: Sequence[Microbatch]) -> ActionResult:
        """Run `action`, send what it produced, and return what the schedule wants to know about it."""
        number, place = action.microbatch, self._places[action.turn]
        result: ActionResult = {}
        match action.kind:
            case "F":
                inputs, wants = self._inputs(number, place, batch[number])
                started = self._start(action)
                outcome = place.stage.forward(number, self._step, batch[number], inputs, wants)
                if place.after is not None:
                    self._connections.send(place.after, Message(MessageKind.FORWARD, self._call, number,
                                                                outcome.tensors, outcome.requires_grad,
                                                                stage=place.number + 1))
                result = {"expects_backward": outcome.expects_backward, "deferrable_bytes": outcome.deferrable_bytes}
            case "B":
                arrived = {} if place.after is None else self._arrived(self._take_return(number, place, place.after))
                started = self._start(action)
                gradients, products = place.stage.backward(number, arrived, defer=action.defer,
                                                           last=number == len(batch) - 1)
                self._send_return(number, place, gradients)
                result = {"products": products}
            case "C":
                if place.after is not None:
                    self._take_return(number, place, place.after)
                self._send_return(number, place, {})
                return result
            case "W":
                started = self._start(action)
                place.stage.weight(number, action.product)
                self._updater.progress()
        self._timeline.add(_CATEGORIES[action.kind], str(action), self._step, started)
        self._look_ahead.launched()
        return result

    def _start(self, action: Action) -> int:
        self._connections.board.action = f"{_CATEGORIES[action.kind]} {action.microbatch}"
        return self._timeline.mark()

    def _inputs(self, number: int, place: _Place, microbatch: Microbatch
                ) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The carried state that enters a stage, and which of it wants a gradient."""
        if place.before is None:
            return self._to_device(named(microbatch.inputs, f"inputs of microbatch {number}")), frozenset()
        message = self._connections.inbox.take("forward", number, place.number, place.before)
        wants = message.requires_grad
        return self._arrived(message), wants if self._connections.tensor_mesh is None else whole_names(wants)

    def _arrived(self, message: Message) -> dict[str, Tensor]:
        """The whole tensors of a message from another stage."""
        tensors = message.tensors if self._connections.device.type == "cpu" else self._to_device(message.tensors)
        return self._connections.column_parts.gathered(tensors)

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self._connections.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def _take_return(self, number: int, place: _Place, after: int) -> Message:
        return self._connections.inbox.take("return", number, place.number, after)

    def _send_return(self, number: int, place: _Place, gradients: dict[str, Tensor]) -> None:
        """Send a microbatch's return over the edge before a stage: its gradients, or a bare credit if there are
        none."""
        if place.before is not None:
            kind = MessageKind.BACKWARD if gradients else MessageKind.CREDIT
            self._connections.send(place.before,
                                   Message(kind, self._call, number, gradients, stage=place.number - 1))


def _unheard(direction: str, microbatch: int, stage: int) -> None:
    """Ignore an arrival: the leader decides, and no other rank needs to know."""
