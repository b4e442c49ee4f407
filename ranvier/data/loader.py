"""The microbatches of one step for one rank: its replica's share, read from the token file."""

from __future__ import annotations

import torch

from ranvier.data.sampler import Sampler, microbatches, share
from ranvier.data.tokens import Tokens
from ranvier.pipeline.microbatch import Microbatch


class Loader:
    """Reads what this rank needs: inputs on the first stage, targets on the last, sample numbers everywhere.

    sequence: tokens of one sample. replica, num_replicas: this rank's index and the size of the mesh along `data`.
    Stateless: any step may be asked for, in any order.
    """

    def __init__(self, tokens: Tokens, sampler: Sampler, *, sequence: int, global_size: int, microbatch_size: int,
                 replica: int = 0, num_replicas: int = 1, needs_inputs: bool = True, needs_targets: bool = True,
                 device: torch.device | str = "cpu") -> None:
        self.tokens, self.sampler, self.sequence = tokens, sampler, sequence
        self.global_size, self.microbatch_size = global_size, microbatch_size
        self.replica, self.num_replicas = replica, num_replicas
        self.needs_inputs, self.needs_targets = needs_inputs, needs_targets
        self.device = torch.device(device)

    def microbatches(self, step: int) -> list[Microbatch]:
        """This replica's microbatches of step `step`, counted from 0; none where there are fewer samples than replicas.

        inputs and targets: [b, sequence] int64 on `device`, targets one token on; samples: [b] int64 on the CPU.
        """
        batch = self.sampler.global_batch(step, self.global_size)
        mine = batch[share(self.global_size, self.num_replicas, self.replica)]
        found = []
        for samples in microbatches(mine, self.microbatch_size):
            inputs = targets = None
            if self.needs_inputs or self.needs_targets:
                tokens = torch.from_numpy(self.tokens.sequences(samples, self.sequence))
                inputs = tokens[:, :-1].contiguous().to(self.device) if self.needs_inputs else None
                targets = tokens[:, 1:].contiguous().to(self.device) if self.needs_targets else None
            found.append(Microbatch(inputs=inputs, targets=targets, samples=torch.from_numpy(samples.copy())))
        return found
