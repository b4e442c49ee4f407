"""The share of padding in the sequences of a run, with its settings and with others."""

from __future__ import annotations

import numpy as np

from ranvier.config.run import Run
from ranvier.data.loader import longest_first
from ranvier.data.sampler import Sampler
from ranvier.data.task import Dataset, sample_lengths
from ranvier.data.token_samples import best_fit

_MOST_LOOKED_AT = 100_000
"""Most samples from which shares are computed; packing more would take long."""


def padding_of(data: Dataset, run: Run) -> str:
    """`padding_text` of a dataset whose samples are not packed; empty if all have the same length."""
    lengths = sample_lengths(data)
    return "" if lengths is None else padding_text(lengths, run, can_pack=False)


def padding_text(lengths: np.ndarray, run: Run, *, can_pack: bool) -> str:
    """The share of padding in words, with that of the run's settings first. lengths: positions of each sample.
    can_pack: whether the task can pack samples."""
    shares = padding_shares(lengths, run, can_pack=can_pack)
    names = {"packing": "packed", "longest": "padded to the longest of a microbatch",
             "maximum": f"padded to {run.model.sequence} tokens"}
    chosen = "packing" if can_pack and run.data.packing else run.data.padding
    others = ", ".join(f"{shares[name]:.1%} {names[name]}" for name in shares if name != chosen)
    return f"{shares[chosen]:.1%} {names[chosen]} ({others})"


def padding_shares(lengths: np.ndarray, run: Run, *, can_pack: bool) -> dict[str, float]:
    """Share of the computed positions that are padding, by `packing`, `longest` and `maximum`."""
    lengths = lengths[:_MOST_LOOKED_AT]
    total, size = int(lengths.sum()), run.model.sequence
    found = {}
    if can_pack:
        found["packing"] = 1 - total / (size * (int(best_fit(lengths, size).max()) + 1))
    found["longest"] = 1 - total / _positions(lengths, run)
    found["maximum"] = 1 - total / (size * len(lengths))
    return found


def _positions(lengths: np.ndarray, run: Run) -> int:
    """Positions that an epoch computes if microbatches are padded to their longest sample, on one replica."""
    size = run.batch.global_size
    micro = size if run.batch.microbatch_size == "auto" else run.batch.microbatch_size
    order = Sampler(len(lengths), run.seed, lengths=lengths).global_batch(0, len(lengths))
    positions = 0
    for start in range(0, len(order), size):
        batch = lengths[order[start:start + size]]
        batch = batch[longest_first(batch)]
        positions += sum(int(batch[at]) * len(batch[at:at + micro]) for at in range(0, len(batch), micro))
    return positions
