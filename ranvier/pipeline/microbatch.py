"""The samples that travel the pipeline together, as one rank of one stage needs them.

Only the first stage needs inputs and only the last needs targets, so either may be absent; the sample numbers are
known to every stage, because dropout masks are keyed by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ranvier.models.block import State


@dataclass(frozen=True, slots=True)
class Microbatch:
    """inputs: what the first block takes, or None on later stages.
    targets: what the loss takes beside the last block's output, or None on earlier stages.
    samples: [b] int64, the data set's own number of each sample; None only where nothing is keyed by it (no dropout).
    """

    inputs: State | None = None
    targets: object | None = None
    samples: Tensor | None = None
