"""Parameters and buffers that several ranks have, up to date on this one.

    updates of other replicas (`optim.shard`)     the updater gathers them                      optim/step
    ties                                          an owner sends its value to the other ends    ties
    buffers                                       replicas exchange them after each batch       below
    parameters that a program has replaced        their values are adopted                      held_parameters
    a user's modules that other ranks train       are old here, and a warning says so           trained_elsewhere

A step returns when they have arrived: a program may read and write its modules without a call of the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from ranvier.comm.board import Board
from ranvier.comm.protocol import Group, Work
from ranvier.errors import ConfigError, ModelError
from ranvier.optim.step import Updater
from ranvier.originals.same_memory import ByMemory
from ranvier.pipeline.held_parameters import HeldParameters
from ranvier.pipeline.rank_stages import RankStages
from ranvier.pipeline.ties import TiedParameters
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere
from ranvier.precision import wide


class SharedValues:
    """Keeps them up to date on one rank. board: counts the batches, which distinguish messages of ties."""

    def __init__(self, updater: Updater, ties: TiedParameters, buffers: ReplicaBuffers, held: HeldParameters,
                 elsewhere: TrainedElsewhere, stages: RankStages, board: Board) -> None:
        self._updater, self._ties, self._buffers, self._held = updater, ties, buffers, held
        self._elsewhere, self._stages, self._board = elsewhere, stages, board
        self._were_loaded = self._has_trained = self._are_averages = False

    def wait(self) -> None:
        """Return when parameters and buffers are those of the last step, and replacements since then have been
        adopted."""
        self.wait_for_step()
        self._held.adopt()

    def wait_for_step(self) -> None:
        """Return when parameters and buffers are those of the last step."""
        self._updater.wait()
        if self._ties.ties:
            self._ties.receive_values()
        self.wait_for_buffers()

    def wait_for_buffers(self) -> None:
        """Return when the buffers are those that replicas share."""
        self._buffers.finish()

    def begin(self, *, training: bool) -> None:
        """Begin a batch with values up to date. Ends of ties take their owners' values if all ranks know that code
        outside the engine may have written these."""
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

    def after_evaluation(self) -> None:
        """Called after an evaluation on this rank."""
        self._buffers.after_evaluation()

    def after_backwards(self) -> None:
        """Called when all backwards of a training batch have run here, and the reduction of every chunk of gradients
        has begun, so that all replicas start the exchange of buffers in the same order."""
        for tie in self._ties.add_gradients(self._board.calls):
            self._updater.gradients.note_added(self._updater.gradients.chunks_of([tie.parameter]))
        self._buffers.start()

    def after_update(self) -> None:
        """Called when the parameters of this rank are updated, as far as the host knows: if the device skips the
        update, unchanged values are sent."""
        if self._ties.owns:
            self._updater.wait()
        self._ties.send_values(self._board.calls, trained=True)
        self._elsewhere.after_update()

    def after_load(self) -> None:
        """Called after the full state of all ranks was written."""
        self._were_loaded = True
        self._elsewhere.after_load()
        self._stages.forget_weights()

    @property
    def may_be_written_apart(self) -> bool:
        """Whether a program may have written ends of ties to different values, as a training loop does."""
        return self._has_trained and bool(self._ties.names)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Engine.averaged`."""
        flat = self._updater.flat
        if flat is None or not self._updater.has_averages:
            raise ConfigError("keeps no moving average of the parameters", code="ema-not-kept", where="optim.ema",
                              value=0.0, remedy="Set `--optim.ema`, for example to 0.999.")
        self.wait()
        self.refuse_in_averages("averaged")
        before, self._are_averages = flat.take_averages(), True
        self._after_new_values()
        try:
            yield
        finally:
            self._are_averages = False
            self.wait()
            flat.weights.copy_(before)
            self._after_new_values()

    def _after_new_values(self) -> None:
        """Called when parameters have other values: release gathered weights, and send values to other ends of ties."""
        self._stages.forget_weights()
        self._ties.send_values(self._board.calls, trained=True)

    def refuse_in_averages(self, call: str) -> None:
        """Raise ConfigError inside `averaged`."""
        if self._are_averages:
            raise ConfigError("is called inside Engine.averaged(), whose end restores the parameters from before it",
                              code="step-inside-averages", where=call if "." in call else f"Engine.{call}",
                              remedy="Leave averaged() first; evaluate, predict and exports may be inside.")


# --- buffers ----------------------------------------------------------------------------------------------------------

# Buffers that a forward changes, such as BatchNorm's running statistics: each replica sees other samples.
#
#     broadcast   all replicas have the first one's, as with DistributedDataParallel(broadcast_buffers=True)
#     average     all have the mean; for integers and the like the first one's
#     local       each keeps its own; checkpoints and exports have the first one's
#
# Shared values are exchanged when a training batch has run, so that evaluations, checkpoints, exports and transitions
# between two batches find them everywhere.


BufferSync = Literal["broadcast", "average", "local"]


class ReplicaBuffers:
    """The buffers of one stage's blocks.

    replicas: the ranks that compute the same blocks for other samples. Each calls `start` the same number of times.
    """

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]], replicas: Group, how: BufferSync) -> None:
        self._blocks, self._replicas, self._average = blocks, replicas, how == "average"
        self._shared = how != "local" and len(replicas.ranks) > 1
        parameters = ByMemory((None, parameter) for _, _, module in blocks for parameter in module.parameters())
        self._values_of_parameters = {
            f"{block}.{name}" for _, block, module in blocks for name, buffer in module.named_buffers()
            if parameters.overlapping(buffer)}
        """Buffers in the memory of parameters, which are the same on all replicas, and which a step updates at the same
        time."""
        self._shapes = {name: buffer.shape for name, buffer in self._named_buffers().items()}
        self._under_way: list[tuple[list[Tensor], Tensor, Work]] = []
        self._before_evaluation: dict[str, tuple[Tensor, int]] = {}
        """The floating-point buffers and their versions, until the engine has warned of one."""
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._shapes)

    def _named_buffers(self) -> dict[str, Tensor]:
        return {f"{block}.{name}": buffer for _, block, module in self._blocks
                for name, buffer in module.named_buffers() if f"{block}.{name}" not in self._values_of_parameters}

    def start(self) -> None:
        """Start the exchange after a training batch. Raises ModelError if the shape of a buffer has changed."""
        if not (self._shared and self._shapes):
            return
        buffers = self._named_buffers()
        for name in self._shapes | buffers:
            shapes = [None if shape is None else tuple(shape) for shape in (
                self._shapes.get(name), buffers[name].shape if name in buffers else None)]
            if shapes[0] != shapes[1]:
                raise ModelError(f"cannot be shared by replicas: its shape was {shapes[0]} when the engine was built, "
                                 f"and is {shapes[1]} now", code="buffer-shape-changed", where=f"buffer {name}",
                                 remedy="Give buffers a fixed shape, or leave them to each replica: "
                                        "Engine(buffers='local').")
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in {id(buffer): buffer for buffer in buffers.values()}.values():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, _), alike in kinds.items():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
            if self._average and dtype.is_floating_point:
                flat = flat.to(wide(dtype))
                self._under_way.append((alike, flat, self._replicas.all_reduce(flat)))
            else:
                self._under_way.append((alike, flat, self._replicas.broadcast(flat)))

    @torch.no_grad()
    def finish(self) -> None:
        """Return when the buffers are those that replicas share."""
        for buffers, flat, work in self._under_way:
            work.wait()
            if self._average and flat.is_floating_point():
                flat.div_(len(self._replicas.ranks))
            for buffer, value in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(value.view(buffer.shape))
        self._under_way = []

    def evaluation_begins(self) -> None:
        """Note buffers before an evaluation: those that it changes, such as those of quantization observers, depend on
        each replica's own samples. See `after_evaluation`."""
        self._before_evaluation = {
            name: (buffer, buffer._version) for name, buffer in self._named_buffers().items()
            if buffer.is_floating_point() and not buffer.is_inference()
        } if self._shared and self._replicas.index == 0 and not self._has_warned else {}

    def after_evaluation(self) -> None:
        """After an evaluation, warn of the first buffer that it has changed."""
        before, self._before_evaluation = self._before_evaluation, {}
        now = self._named_buffers() if before else {}
        for name, (buffer, version) in before.items():
            new = now.get(name, buffer)
            if buffer._version != version or not (new is buffer or torch.equal(new.to(buffer), buffer)):
                self._has_warned = True
                warnings.warn(f"evaluations change buffer {name}, on each replica from its own samples: their results "
                              "may differ from those of one process, and until a training batch has run replicas may "
                              "have different values. Switch this off for evaluations, for example by "
                              "model.apply(torch.ao.quantization.disable_observer)", stacklevel=6)
                return
