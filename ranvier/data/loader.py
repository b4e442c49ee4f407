"""The microbatches of one step for one rank, from the token file: its replica's, and its row's share of each."""

from __future__ import annotations

import numpy as np
import torch

from ranvier.data.sampler import Sampler, microbatches, share
from ranvier.data.tokens import Tokens
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.loss import IGNORED


class Loader:
    """Reads what this rank needs: inputs on the first stage, targets on the last, sample numbers everywhere.

    sequence: tokens of one sample. replica, num_replicas: this rank's index and the size of the mesh along `data`; row,
    num_rows: along `row`. A microbatch that the rows cannot share is filled up with samples that have no target.
    Stateless: any step may be asked for, in any order.
    """

    def __init__(self, tokens: Tokens, sampler: Sampler, *, sequence: int, global_size: int, microbatch_size: int,
                 replica: int = 0, num_replicas: int = 1, row: int = 0, num_rows: int = 1,
                 needs_inputs: bool = True, needs_targets: bool = True, device: torch.device | str = "cpu") -> None:
        self.tokens, self.sampler, self.sequence = tokens, sampler, sequence
        self.global_size, self.microbatch_size = global_size, microbatch_size
        self.replica, self.num_replicas = replica, num_replicas
        self.row, self.num_rows = row, num_rows
        self.needs_inputs, self.needs_targets = needs_inputs, needs_targets
        self.device = torch.device(device)
        self.offset = 0
        """Sequences that were taken beside those of earlier steps: by steps of another size, or left out."""

    def microbatches(self, step: int) -> list[Microbatch]:
        """This replica's microbatches of step `step`, counted from 0; none where there are fewer samples than replicas.

        inputs and targets: [b / rows, sequence] int64 on `device`, targets one token on; samples: int64 on the CPU.
        """
        batch = self.sampler.global_batch(step, self.global_size, self.offset)
        mine = batch[share(self.global_size, self.num_replicas, self.replica)]
        found = []
        for whole in microbatches(mine, self.microbatch_size):
            samples, valid = self._of_row(whole)
            inputs = targets = None
            if self.needs_inputs or self.needs_targets:
                tokens = torch.from_numpy(self.tokens.sequences(samples, self.sequence))
                inputs = tokens[:, :-1].contiguous().to(self.device) if self.needs_inputs else None
                if self.needs_targets:
                    targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
                    targets[valid:] = IGNORED
                    targets = targets.to(self.device)
            found.append(Microbatch(inputs=inputs, targets=targets, samples=torch.from_numpy(samples.copy())))
        return found

    def _of_row(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """This row's share of a microbatch, and how many of it count; the last sample is repeated where it must."""
        each = -(-len(samples) // self.num_rows)
        mine = samples[self.row * each:(self.row + 1) * each]
        return np.concatenate([mine, np.repeat(samples[-1:], each - len(mine))]), len(mine)
