"""The microbatches of one step for one rank, from any task's samples: its share of the batch, and its part of each
microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.data.sampler import Sampler, microbatches, order_by_node, share
from ranvier.data.task import Dataset, Targets, padded_inputs, padded_targets
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.split.loss import IGNORED


@dataclass(frozen=True, eq=False)
class _PrefetchedBatch:
    """A prefetched batch, and the event after which it is on the device."""

    of: tuple[int, ...]
    batch: list[Microbatch]
    copied: torch.cuda.Event


class Loader:
    """Reads what this rank needs: inputs on the first stage, targets on the last, sample numbers everywhere.

    replica, num_replicas: which share of each batch is this rank's, of how many. part, num_parts: the same for each
    microbatch. A microbatch that does not divide into this many parts is padded with samples without a target.
    nodes: the machine of each replica, if each sample is to come to the same machine in every epoch
        (`order_by_node`).
    total: number of samples, for an evaluation, which reads each sample once.
    lengths: positions of each sample. A batch is then sorted by length before it is shared, so that microbatches with
    the same number have similar lengths on all replicas, and a microbatch is padded to its longest sample, rounded up
    to `length_multiple`. All ranks compute the same lengths from the same index. None: samples have one length.

    Steps may be requested in any order. Batches are made on request; on a CUDA device the batch of the next step may be
    made and copied while the device computes (`prefetch`).
    """

    def __init__(self, data: Dataset, sampler: Sampler, *, global_size: int, microbatch_size: int,
                 replica: int = 0, num_replicas: int = 1, part: int = 0, num_parts: int = 1,
                 needs_inputs: bool = True, needs_targets: bool = True, device: torch.device | str = "cpu",
                 total: int | None = None, nodes: Sequence[int] = (), lengths: np.ndarray | None = None,
                 length_multiple: int = 1) -> None:
        self.data, self.sampler = data, sampler
        self.global_size, self.microbatch_size = global_size, microbatch_size
        self.replica, self.num_replicas = replica, num_replicas
        self.part, self.num_parts = part, num_parts
        self.needs_inputs, self.needs_targets = needs_inputs, needs_targets
        self.device, self.total, self.nodes = torch.device(device), total, nodes
        self.lengths, self.length_multiple = lengths, length_multiple
        self.offset = 0
        """Samples that were taken in addition to those of earlier steps: by steps of another size, or left out."""
        self._ahead: _PrefetchedBatch | None = None
        self._copies: torch.cuda.Stream | None = None

    def size(self, step: int) -> int:
        """The number of samples in step `step`, over all replicas: fewer at the end of `total`."""
        return self.global_size if self.total is None else max(0, min(self.global_size,
                                                                      self.total - step * self.global_size))

    def microbatches(self, step: int) -> list[Microbatch]:
        """This replica's microbatches of step `step`, counted from 0; may be empty if there are fewer samples than
        replicas.

        inputs and targets: those of the task, b / rows of them, on `device`; samples: int64 on the CPU.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.of != self._sizes(step):
            return self._read(step)
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ahead.copied)
        for tensor in tree_leaves([(microbatch.inputs, microbatch.targets) for microbatch in ahead.batch]):
            if tensor is not None:
                tensor.record_stream(stream)  # else its memory could be reused by a later batch while a kernel reads it
        return ahead.batch

    def prefetch(self, step: int) -> None:
        """Read step `step` now and copy it on a separate stream while a CUDA device computes. The next `microbatches`
        returns it, if it asks for the same step. On other devices this does nothing."""
        if self.device.type != "cuda":
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copies):
            batch, copied = self._read(step), torch.cuda.Event()
        copied.record(self._copies)
        self._ahead = _PrefetchedBatch(self._sizes(step), batch, copied)

    def _sizes(self, step: int) -> tuple[int, ...]:
        """Everything that a batch depends on and that may change."""
        return step, self.global_size, self.microbatch_size, self.offset

    def _read(self, step: int) -> list[Microbatch]:
        batch, mine = self._step_samples(step)
        epochs = self.sampler.epochs(step, self.global_size, self.offset)[:self.size(step)][mine]
        found = []
        for whole, theirs in zip(microbatches(batch, self.microbatch_size), microbatches(epochs, self.microbatch_size),
                                 strict=True):
            (samples, valid), (theirs, _), length = self._own_part(whole), self._own_part(theirs), self._length(whole)
            inputs = targets = None
            if self.needs_inputs:
                inputs = self._on_device(padded_inputs(self.data, samples, theirs, length))
            if self.needs_targets:
                targets = self._on_device(_without(padded_targets(self.data, samples, length), valid))
            found.append(Microbatch(inputs=inputs, targets=targets, samples=torch.from_numpy(samples.copy())))
        return found

    def samples(self, step: int) -> list[Tensor]:
        """The numbers of the samples in each microbatch of this step, without reading them."""
        batch, _ = self._step_samples(step)
        return [torch.from_numpy(self._own_part(whole)[0].copy())
                for whole in microbatches(batch, self.microbatch_size)]

    def _step_samples(self, step: int) -> tuple[np.ndarray, slice | np.ndarray]:
        """This replica's samples of a step, and their places in the global batch."""
        size = self.size(step)
        mine: slice | np.ndarray = share(size, self.num_replicas, self.replica)
        batch = self.sampler.global_batch(step, self.global_size, self.offset)[:size]
        if len(set(self.nodes)) > 1:
            mine = order_by_node(batch, self.nodes)[mine]
            if self.lengths is not None:
                mine = mine[longest_first(self.lengths[batch[mine]])]
        elif self.lengths is not None:
            mine = longest_first(self.lengths[batch])[self.replica::self.num_replicas]
        return batch[mine], mine

    def _length(self, microbatch: np.ndarray) -> int | None:
        """Positions of all rows of a microbatch; None if all samples have the same length."""
        if self.lengths is None:
            return None
        return -(-int(self.lengths[microbatch].max()) // self.length_multiple) * self.length_multiple

    def _own_part(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """This rank's part of a microbatch, and how many of its samples count; the last sample is repeated to fill it
        up."""
        each = -(-len(samples) // self.num_parts)
        own = samples[self.part * each:(self.part + 1) * each]
        return np.concatenate([own, np.repeat(samples[-1:], each - len(own))]), len(own)

    def _on_device(self, tensors: Targets) -> Targets:
        """The tensors on the device. On a CUDA device the copies are asynchronous; from memory that is not pinned, the
        host would wait for each."""
        def move(tensor: Tensor) -> Tensor:
            if self.device.type != "cuda":
                return tensor.to(self.device)
            return tensor.pin_memory().to(self.device, non_blocking=True)

        moved: Targets = tree_map(move, tensors)
        return moved


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Places of the lengths, the longest first; equal lengths keep their order. Memory use thus peaks in the first
    microbatch."""
    return np.argsort(-lengths, kind="stable")


def _without(targets: Targets, valid: int) -> Targets:
    """The targets, with those from `valid` on ignored: they belong to samples that only fill up the microbatch."""
    def left_out(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:valid], torch.full_like(tensor[valid:], IGNORED)])

    valid_alone: Targets = tree_map(left_out, targets)
    return valid_alone
