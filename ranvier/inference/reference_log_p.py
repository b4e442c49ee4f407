"""Log-probabilities of the answers of pairs under a model, on any mesh: the reference of preference tuning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.comm.protocol import Group
from ranvier.data.loader import Loader
from ranvier.data.preference_pairs import answer_log_p
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.split.loss import IGNORED


def log_p_of_pairs(engine: Engine, ranks: Group, loader: Loader) -> np.ndarray:
    """[pairs, 2] float64: log p of the chosen and the rejected answer of each pair, without dropout. Collective over
    `ranks`, those of the engine; all of them get the same. loader: goes through all pairs once."""
    assert loader.total == len(loader.data)
    found = torch.zeros(len(loader.data), 2, dtype=torch.float64, device=engine.world.device)
    for step in range(-(-len(loader.data) // loader.global_size)):
        batch = loader.microbatches(step)

        def observe(place: int, output: State, batch: Sequence[Microbatch] = batch) -> None:
            samples, targets = batch[place].samples, batch[place].targets
            assert isinstance(output, Tensor) and isinstance(targets, dict) and samples is not None
            is_pair_B1 = (targets["tokens"] != IGNORED).any(1, keepdim=True)  # the others fill up a row
            log_p_B2 = answer_log_p(output, targets).double().where(is_pair_B1, 0)
            if engine.coordinates.is_first_with_samples:  # all columns have the same
                found.index_add_(0, samples.to(found.device), log_p_B2)

        engine.predict(batch, observe)
    ranks.all_reduce(found).wait()  # each pair is one rank's
    return found.cpu().numpy()
