"""Parameters and buffers that several ranks have, up to date on this one.

    updates of other replicas (`optim.shard`)     the updater gathers them                      optim/step
    ties                                          an owner sends its value to the other ends    ties
    buffers                                       replicas exchange them after each batch       shared_buffers
    parameters that a program has replaced        their values are taken over                   held_parameters
    a user's modules that other ranks train       are old here, and say so                      trained_elsewhere

They travel while the program goes on, and are waited for when somebody reads them, or the next batch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ranvier.comm.board import Board
from ranvier.errors import ConfigError
from ranvier.optim.step import Updater
from ranvier.pipeline.buffer_sync import ReplicaBuffers
from ranvier.pipeline.held_parameters import HeldParameters
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.ties import TiedParameters
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere


class SharedValues:
    """board: counts the batches, by which messages of ties are told apart."""

    def __init__(self, updater: Updater, ties: TiedParameters, buffers: ReplicaBuffers, held: HeldParameters,
                 elsewhere: TrainedElsewhere, stages: RankStages, board: Board) -> None:
        self._updater, self._ties, self._buffers, self._held = updater, ties, buffers, held
        self._elsewhere, self._stages, self._board = elsewhere, stages, board
        self._were_loaded = self._has_trained = self._are_averages = False

    def wait(self) -> None:
        """Return when parameters and buffers are those of the last step, and what has been replaced since is taken
        over."""
        self._updater.wait()
        self._ties.receive_values()
        self.wait_for_buffers()
        self._held.adopt()

    def wait_for_buffers(self) -> None:
        """Return when the buffers are those that replicas share."""
        self._buffers.finish()

    def begin(self, *, training: bool) -> None:
        """A batch begins: values are up to date. Ends of ties take their owners' where all ranks know that others than
        the engine may have written these."""
        self.wait()
        users_update = not self._updater.updates and (training or self._has_trained)
        if self._were_loaded or users_update:
            self._ties.send_values(self._board.calls, trained=True, replaces=True)
            self._ties.receive_values()
            self._held.adopt()
        self._were_loaded = False
        self._has_trained |= training
        if not training:
            self._buffers.evaluation_begins()

    def evaluated(self) -> None:
        """An evaluation has run here."""
        self._buffers.evaluated()

    def ran(self) -> None:
        """All backwards of a training batch have run here, and the reduction of every chunk of gradients has begun: so
        the exchange of buffers is begun in one order on all replicas."""
        for tie in self._ties.add_gradients(self._board.calls):
            self._updater.gradients.added(tie.parameter)
        self._buffers.start()

    def updated(self) -> None:
        """The parameters of this rank are updated, as far as the host knows: where only the device knows better, values
        that it has not changed are sent."""
        if self._ties.owns:
            self._updater.wait()
        self._ties.send_values(self._board.calls, trained=True)
        self._elsewhere.updated()

    def loaded(self) -> None:
        """Somebody has written the whole state of all ranks."""
        self._were_loaded = True
        self._elsewhere.loaded()
        self._stages.forget_weights()

    @property
    def may_be_written_apart(self) -> bool:
        """Whether a program may have written ends of ties to different values, as a training loop does."""
        return self._has_trained and bool(self._ties.names)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Of `Engine.averaged`."""
        flat = self._updater.flat
        if flat is None or not self._updater.has_averages:
            raise ConfigError("keeps no moving average of the parameters", code="ema-not-kept", where="optim.ema",
                              value=0.0, remedy="Set `--optim.ema`, for example to 0.999.")
        self.wait()
        self.refuse_in_averages("averaged")
        before, self._are_averages = flat.take_averages(), True
        self._replaced()
        try:
            yield
        finally:
            self._are_averages = False
            self.wait()
            flat.weights.copy_(before)
            self._replaced()

    def _replaced(self) -> None:
        """Parameters have other values: what was gathered of them is let go, and other ends of ties get theirs."""
        self._stages.forget_weights()
        self._ties.send_values(self._board.calls, trained=True)

    def refuse_in_averages(self, call: str) -> None:
        """ConfigError inside `averaged`."""
        if self._are_averages:
            raise ConfigError("is called inside Engine.averaged(), whose end restores the parameters from before it",
                              code="step-inside-averages", where=call if "." in call else f"Engine.{call}",
                              remedy="Leave averaged() first; evaluate, predict and exports may be inside.")
