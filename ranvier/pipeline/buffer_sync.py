"""Buffers that a forward changes, such as BatchNorm's running statistics: each replica sees other samples.

    broadcast   all replicas have the first one's, as with DistributedDataParallel(broadcast_buffers=True)
    average     all have the mean; of integers and the like the first one's
    local       each keeps its own; checkpoints and exports have the first one's

What replicas have in common is exchanged when a training batch has run, so that evaluations, checkpoints, exports and
transitions between two batches find it everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ranvier.comm.protocol import Group, Work
from ranvier.errors import ConfigError, ModelError
from ranvier.originals.same_memory import ByMemory
from ranvier.precision import wide

BufferSync = Literal["broadcast", "average", "local"]
CHOICES = ("broadcast", "average", "local")


class ReplicaBuffers:
    """The buffers of one stage's blocks.

    replicas: the ranks that compute the same blocks for other samples. Each calls `start` equally often.
    """

    def __init__(self, blocks: Sequence[tuple[int, str, nn.Module]], replicas: Group, how: BufferSync) -> None:
        if how not in CHOICES:
            raise ConfigError(f"must be one of {', '.join(CHOICES)}", code="unknown-buffer-sync",
                              where="Engine(buffers=...)", value=how,
                              remedy="Leave it out for broadcast, which is what DistributedDataParallel does.")
        self._blocks, self._replicas, self._average = blocks, replicas, how == "average"
        self._shared = how != "local" and len(replicas.ranks) > 1
        parameters = ByMemory((None, one) for _, _, module in blocks for one in module.parameters())
        self._values_of_parameters = {
            f"{block}.{name}" for _, block, module in blocks for name, buffer in module.named_buffers()
            if parameters.over(buffer)}
        """Buffers over the memory of parameters, which replicas have alike, and which a step updates meanwhile."""
        self._shapes = {name: buffer.shape for name, buffer in self._named().items()}
        self._under_way: list[tuple[list[Tensor], Tensor, Work]] = []
        self._before_evaluation: dict[str, tuple[Tensor, int]] = {}
        """The buffers of floating-point numbers and their versions, until the engine has warned of one."""
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._shapes)

    def _named(self) -> dict[str, Tensor]:
        return {f"{block}.{name}": buffer for _, block, module in self._blocks
                for name, buffer in module.named_buffers() if f"{block}.{name}" not in self._values_of_parameters}

    def start(self) -> None:
        """A training batch has run on this replica. ModelError where a buffer has become another size."""
        if not (self._shared and self._shapes):
            return
        buffers = self._named()
        for name in self._shapes | buffers:
            shapes = [None if shape is None else tuple(shape) for shape in (
                self._shapes.get(name), buffers[name].shape if name in buffers else None)]
            if shapes[0] != shapes[1]:
                raise ModelError(f"cannot be shared by replicas: its shape was {shapes[0]} when the engine was built, "
                                 f"and is {shapes[1]} now", code="buffer-shape-changed", where=f"buffer {name}",
                                 remedy="Give buffers one shape for good, or leave them to each replica: "
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
        """Buffers that an evaluation changes, such as those of quantization observers, do so by each replica's own
        samples: see `evaluated`."""
        self._before_evaluation = {
            name: (buffer, buffer._version) for name, buffer in self._named().items()
            if buffer.is_floating_point() and not buffer.is_inference()
        } if self._shared and self._replicas.index == 0 and not self._has_warned else {}

    def evaluated(self) -> None:
        """An evaluation has run: warn of the first buffer that it has changed."""
        before, self._before_evaluation = self._before_evaluation, {}
        now = self._named() if before else {}
        for name, (buffer, version) in before.items():
            new = now.get(name, buffer)
            if buffer._version != version or not (new is buffer or torch.equal(new.to(buffer), buffer)):
                self._has_warned = True
                warnings.warn(f"evaluations change buffer {name}, on each replica by its own samples: their results "
                              "may differ from those of one process, and until a training batch has run replicas may "
                              "have different values. Switch this off for evaluations, for example by "
                              "model.apply(torch.ao.quantization.disable_observer)", stacklevel=6)
                return
