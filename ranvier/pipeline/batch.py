"""One batch on one rank: messages that arrive are reported to the schedule, whose next action the stage runs.

    messages --> schedule --> action --> stage --> message to the neighbour
                    ^                      |
                    +----- what it did ----+         the leader of a row x col stage announces each action to its peers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from torch import Tensor

from ranvier.block import as_named_tensors
from ranvier.comm.message import Message, MessageKind
from ranvier.errors import ConfigError, MessageTimeout, TransportError
from ranvier.mesh import Coordinates
from ranvier.optim.step import Updater
from ranvier.pipeline.connections import Connections, whole_names
from ranvier.pipeline.device_timeline import LookAhead
from ranvier.pipeline.inbox import call_number
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.result import LastOutputs
from ranvier.pipeline.stage import Stage
from ranvier.pipeline.statistics import BatchStatistics, NominalWeight
from ranvier.plan.plan import Plan
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Action, Done, Policy, Product, RankSchedule, Wait, actions_text
from ranvier.schedule.spans import CATEGORIES, Timeline


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
        plan: the engine's. at: the place of this rank. policy: instead of the plan's.
        nominal_weight: agrees on the expected weight of a batch before its first backward; None if it is not needed.
        takes_nominal_weight: whether that becomes what losses are divided by.
        forwards_ended: called when the last forward of a training batch has run here.
    """

    def __init__(self, plan: Plan, at: Coordinates, *, policy: Policy | None, stages: RankStages,
                 connections: Connections, updater: Updater, statistics: BatchStatistics, timeline: Timeline,
                 nominal_weight: NominalWeight | None, takes_nominal_weight: bool,
                 forwards_ended: Callable[[], None]) -> None:
        self._at, self._stages, self._connections, placement = at, stages, connections, plan.layout.stages
        self._numbers, self._num_stages = placement.stages_of(at.pipeline_rank), placement.num_stages
        self._has_loss, self._on_cpu = self._numbers[-1] == self._num_stages - 1, connections.device.type == "cpu"
        self._places = [_Place(number, stage, connections.rank_of(number - 1) if number else None,
                               connections.rank_of(number + 1) if number < self._num_stages - 1 else None)
                        for number, stage in zip(self._numbers, stages.all, strict=True)]
        self._updater, self._statistics, self._timeline = updater, statistics, timeline
        self._needs_progress = connections.needs_progress
        self._policy, self._forwards_ended = policy or policy_named(plan.policy), forwards_ended
        self._look_ahead = LookAhead(plan.pipeline.look_ahead, device=connections.device, num_stages=self._num_stages)
        self._deferrable = [0] * len(self._numbers)
        """Per stage, the most bytes that one microbatch's deferred products would keep alive."""
        defer_bytes = 0 if updater.in_backward else plan.pipeline.defer_bytes  # a product holds a block's gradients
        self._limits_follow = defer_bytes == "auto"
        self.defer_bytes, self._deferred = 0 if defer_bytes == "auto" else defer_bytes, 0
        """Maximum bytes that deferred weight gradients keep alive; for auto those of the microbatches that the limits
        allow, as measured in forwards."""
        self._defer_last: int | None = None
        self.use_limits(plan.limits)
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
        leads, nominal_weight = self._connections.sequencer.leads, self.nominal_weight if training else None
        schedule = RankSchedule(
            stages=self._numbers, num_stages=self._num_stages, num_microbatches=len(batch), policy=self._policy,
            in_flight=self._in_flight, training=training, defer_bytes=self.defer_bytes,
            defer_last=self._defer_last, max_stored=self._max_stored, alternating=self._alternating)
        ran: list[Action] = []
        running: Action | None = None
        try:
            self._stages.begin(training, len(batch), wanted)
            self._statistics.begin(batch, training=training, predicts=wanted is not None and not wanted.has_loss)
            self._connections.inbox.begin(self._call, step, len(batch),
                                          schedule.on_message if leads else lambda *_: None)  # the leader decides
            if nominal_weight is not None and not (self._has_loss and batch):
                nominal_weight.start(0.0)
            if not batch:
                self._reduce_statistics(training)
            while (action := self._next_action(schedule)) is not None:
                running = action
                result = self.execute(action, batch)
                running = None
                if leads:
                    if self._deferred and result.get("deferrable_bytes", 0) > self._deferrable[action.turn]:
                        self._deferrable[action.turn] = result["deferrable_bytes"]  # _deferred microbatches may wait
                        schedule.budget.limit = self.defer_bytes = max(
                            self.defer_bytes, self._deferred * sum(self._deferrable))
                    schedule.on_done(action, **result)
                if action.kind == "F" and action.turn == len(self._numbers) - 1:
                    if nominal_weight is not None and self._has_loss and action.microbatch == 0:
                        weight = float(self._stages.last.loss_and_weight[1]) if self._at.is_first_with_samples else 0.0
                        nominal_weight.start(weight * len(batch))
                        self._take_nominal_weight(nominal_weight)  # all ranks need it for their first backward
                    if action.microbatch == len(batch) - 1:
                        self._forwards_ended()
                        self._reduce_statistics(training)
                ran.append(action)
            if self._connections.tensor_mesh is not None:
                self._connections.tensor_mesh.sums.finish()  # those of the last deferred products
                self._connections.tensor_mesh.order.end()
        except Exception as error:
            self._explain(error, ran, running)
            self._stages.clear()
            raise
        finally:
            self._stages.end()
        if nominal_weight is not None and nominal_weight.started:
            self._take_nominal_weight(nominal_weight)

    def _explain(self, error: Exception, ran: Sequence[Action], running: Action | None) -> None:
        """Add the actions so far to the error. If a collective between layers has failed, add its layer; if it did not
        end, the layer that each rank is in."""
        board = self._connections.board
        if running is not None and isinstance(error, MessageTimeout):
            error.extend(f"\n{board.report_all()}")
        elif running is not None and isinstance(error, TransportError) and (place := board.place()):
            error.extend(f" (in {place})")
        text = f"{actions_text(ran)} >{running}<" if running else actions_text(ran)
        error.add_note(f"{board.name(self._connections.rank)}: actions so far: {text.strip() or 'none'}")

    def _take_nominal_weight(self, nominal_weight: NominalWeight) -> None:
        weight = nominal_weight.agree()
        if weight is not None:
            self._updater.expect_weight(weight, divide_by_it=self._takes_nominal_weight)
            self._stages.last.loss_factor = self._updater.loss_factor
            self.nominal_weight = None

    def _reduce_statistics(self, training: bool) -> None:
        """Start summing loss and weight over all ranks; in a row of the last stage, all columns have the same
        values."""
        counts = self._has_loss and self._at.is_first_with_samples
        self._statistics.reduce(self._stages.last.loss_and_weight if counts else None,
                                at_once=not training or self._updater.in_backward)  # if another rank waits for it

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
            elif action.forward is not None:
                what, source = f"the forward of microbatch {action.forward}", action.stage - 1
            else:
                raise ConfigError("waits although nothing can arrive", code="policy-waits-for-nothing",
                                  where="Engine(policy=...)", value=self._policy.name,
                                  remedy="Return None only if a forward or a return is still to arrive.")
            connections.inbox.wait(what, connections.rank_of(source))
        found = None if isinstance(action, Done) else action
        connections.sequencer.announce(self._call, found)
        return found

    def execute(self, action: Action, batch: Sequence[Microbatch]) -> ActionResult:
        """Run `action`, send what it produced, and return its report to the schedule."""
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
                arrived = {} if place.after is None else self._gather_message(
                    self._connections.inbox.take("return", number, place.number, place.after))
                started = self._start(action)
                gradients, products = place.stage.backward(number, arrived, defer=action.defer,
                                                           last=number == len(batch) - 1)
                self._send_return(number, place, gradients)
                result = {"products": products}
            case "C":
                if place.after is not None:
                    self._connections.inbox.take("return", number, place.number, place.after)
                self._send_return(number, place, {})
                return result
            case "W":
                started = self._start(action)
                place.stage.weight(number, action.product)
                if self._needs_progress:
                    self._updater.progress()
        self._timeline.add(CATEGORIES[action.kind], str(action), self._step, started)
        self._look_ahead.after_launch()
        return result

    def _start(self, action: Action) -> int:
        self._connections.board.action = f"{CATEGORIES[action.kind]} {action.microbatch}"
        return self._timeline.mark()

    def _inputs(self, number: int, place: _Place, microbatch: Microbatch
                ) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The carried state that enters a stage, and the names of its tensors that want a gradient."""
        if place.before is None:
            return self._to_device(as_named_tensors(
                microbatch.inputs, f"inputs of microbatch {number}", is_input=True)), frozenset()
        message = self._connections.inbox.take("forward", number, place.number, place.before)
        wants = message.requires_grad
        return self._gather_message(message), wants if self._connections.tensor_mesh is None else whole_names(wants)

    def _gather_message(self, message: Message) -> dict[str, Tensor]:
        """The full tensors of a message from another stage."""
        tensors = message.tensors if self._on_cpu else self._to_device(message.tensors)
        return self._connections.column_parts.gather(tensors)

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self._connections.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def _send_return(self, number: int, place: _Place, gradients: dict[str, Tensor]) -> None:
        """Send a microbatch's return over the edge before a stage: its gradients, or a bare credit if there are
        none."""
        if place.before is not None:
            kind = MessageKind.BACKWARD if gradients else MessageKind.CREDIT
            self._connections.send(place.before,
                                   Message(kind, self._call, number, gradients, stage=place.number - 1))
