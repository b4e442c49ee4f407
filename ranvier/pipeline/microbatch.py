"""The samples that travel the pipeline together, as one rank of one stage needs them.

Only the first stage needs inputs and only the last needs targets, so either may be absent; the sample numbers are
known to every stage, because dropout masks are keyed by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.block import State
from ranvier.errors import ModelError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """inputs: what the first block takes, or None on later stages.
    targets: what the loss takes beside the last block's output, or None on earlier stages.
    samples: [b] int64, the data set's own number of each sample; None only where nothing is keyed by it (no dropout).
    """

    inputs: State | None = None
    targets: object | None = None
    samples: Tensor | None = None


def microbatches(inputs: State, targets: object, size: int, samples: Tensor | None = None) -> list[Microbatch]:
    """A batch cut along dim 0 into microbatches of `size` samples; the last one takes what is left.

    inputs, targets: tensors, or nested dicts, lists and tuples of tensors, all with the batch in dim 0. Nothing is cut
    by guess: ModelError when their first dims differ. samples: [b] int64, the samples' own numbers.
    """
    count = {leaf.shape[0] if leaf.dim() else None for leaf in tree_leaves((inputs, targets, samples))
             if isinstance(leaf, Tensor)}
    if len(count) != 1 or None in count:
        raise ModelError("must all have the batch in dim 0", where="microbatches(inputs, targets)",
                         value=sorted(map(str, count)),
                         remedy="Where a tensor has no batch dim, cut by hand and pass ranvier.Microbatch objects.")
    if size < 1:
        raise ModelError("must be at least 1", where="microbatches(size)", value=size,
                         remedy="Give samples per microbatch.")

    def part(value: Any, start: int) -> Any:
        return tree_map(lambda leaf: leaf[start:start + size] if isinstance(leaf, Tensor) else leaf, value)

    return [Microbatch(part(inputs, start), part(targets, start), part(samples, start))
            for start in range(0, count.pop() or 0, size)]
