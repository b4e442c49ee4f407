"""The microbatches of one step for one rank, from any task's samples: its replica's, and its row's share of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ranvier.data.sampler import Sampler, at_home, microbatches, share
from ranvier.data.task import Dataset, Targets
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.loss import IGNORED


class Loader:
    """Reads what this rank needs: inputs on the first stage, targets on the last, sample numbers everywhere.

    replica, num_replicas: this rank's index and the size of the mesh along `data`; row, num_rows: along `row`. A
    microbatch that the rows cannot share is filled up with samples that have no target.
    nodes: the machine of each replica, where each sample is to come to the same machine in every epoch (`at_home`).
    total: samples after which there are no more, where an evaluation goes once through all. Stateless: any step may be
    asked for, in any order.
    """

    def __init__(self, data: Dataset, sampler: Sampler, *, global_size: int, microbatch_size: int,
                 replica: int = 0, num_replicas: int = 1, row: int = 0, num_rows: int = 1,
                 needs_inputs: bool = True, needs_targets: bool = True, device: torch.device | str = "cpu",
                 total: int | None = None, nodes: Sequence[int] = ()) -> None:
        self.data, self.sampler = data, sampler
        self.global_size, self.microbatch_size = global_size, microbatch_size
        self.replica, self.num_replicas = replica, num_replicas
        self.row, self.num_rows = row, num_rows
        self.needs_inputs, self.needs_targets = needs_inputs, needs_targets
        self.device, self.total, self.nodes = torch.device(device), total, nodes
        self.offset = 0
        """Samples that were taken beside those of earlier steps: by steps of another size, or left out."""

    def size(self, step: int) -> int:
        """Samples in step `step`, over all replicas: fewer where `total` ends."""
        return self.global_size if self.total is None else max(0, min(self.global_size,
                                                                      self.total - step * self.global_size))

    def microbatches(self, step: int) -> list[Microbatch]:
        """This replica's microbatches of step `step`, counted from 0; none where there are fewer samples than replicas.

        inputs and targets: those of the task, b / rows of them, on `device`; samples: int64 on the CPU.
        """
        batch, mine = self._taken(step)
        epochs = self.sampler.epochs(step, self.global_size, self.offset)[:self.size(step)][mine]
        found = []
        for whole, theirs in zip(microbatches(batch, self.microbatch_size), microbatches(epochs, self.microbatch_size),
                                 strict=True):
            (samples, valid), (theirs, _) = self._of_row(whole), self._of_row(theirs)
            inputs = self._on_device(self.data.inputs(samples, theirs)) if self.needs_inputs else None
            targets = self._on_device(_without(self.data.targets(samples), valid)) if self.needs_targets else None
            found.append(Microbatch(inputs=inputs, targets=targets, samples=torch.from_numpy(samples.copy())))
        return found

    def samples(self, step: int) -> list[Tensor]:
        """The numbers of the samples of each of these microbatches, without reading them."""
        batch, _ = self._taken(step)
        return [torch.from_numpy(self._of_row(whole)[0].copy()) for whole in microbatches(batch, self.microbatch_size)]

    def _taken(self, step: int) -> tuple[np.ndarray, slice | np.ndarray]:
        """This replica's samples of a step, and which of all replicas' they are."""
        size = self.size(step)
        mine = share(size, self.num_replicas, self.replica)
        batch = self.sampler.global_batch(step, self.global_size, self.offset)[:size]
        mine = at_home(batch, self.nodes)[mine] if len(set(self.nodes)) > 1 else mine
        return batch[mine], mine

    def _of_row(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """This row's share of a microbatch, and how many of it count; the last sample is repeated where it must."""
        each = -(-len(samples) // self.num_rows)
        mine = samples[self.row * each:(self.row + 1) * each]
        return np.concatenate([mine, np.repeat(samples[-1:], each - len(mine))]), len(mine)

    def _on_device(self, tensors):
        return tree_map(lambda tensor: tensor.to(self.device), tensors)


def _without(targets: Targets, valid: int) -> Targets:
    """The targets with those from `valid` on left out: they are of samples that fill up."""
    def left_out(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:valid], torch.full_like(tensor[valid:], IGNORED)])

    return tree_map(left_out, targets)
