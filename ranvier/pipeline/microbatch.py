"""The samples that pass through the pipeline together, as one rank of one stage needs them.

Only the first stage needs inputs and only the last needs targets, so either may be absent; the sample numbers are
known to every stage, because dropout masks are keyed by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ranvier.arguments import fits
from ranvier.block import State
from ranvier.errors import ModelError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """inputs: what the first block takes, or None on later stages.
    targets: what the loss takes in addition to the last block's output, or None on earlier stages.
    samples: [b] int64, the data set's own number of each sample; None only if nothing is keyed by it (no dropout).
    """

    inputs: State | None = None
    targets: object | None = None
    samples: Tensor | None = None


Batch = Sequence[Microbatch | tuple[Any, ...]]
"""Microbatches, or (inputs, targets) pairs."""


def microbatches(inputs: State | Mapping[str, Tensor], targets: object, size: int, samples: Tensor | None = None
                 ) -> list[Microbatch]:
    """Split a batch along dim 0 into microbatches of `size` samples; the last one takes the rest.

    inputs, targets: tensors, or nested dicts, lists and tuples of tensors, all with the batch in dim 0. Raises
    ModelError if their first dims differ. samples: [b] int64, the samples' own numbers. Other mappings, such as what a
    tokenizer of transformers returns, are converted to a dict.
    """
    inputs = _as_dict(inputs)
    count = _batch_size(inputs, targets, samples)
    if not (isinstance(size, int) or fits(size, int)) or size < 1:
        raise ModelError("must be a whole number of at least 1", code="microbatch-size",
                         where="microbatches(size)", value=size, remedy="Give samples per microbatch.")
    return _cut(inputs, targets, samples, [slice(start, start + size) for start in range(0, count, size)])


def cut_batch(inputs: State | Mapping[str, Tensor], targets: object, samples: Tensor | None, places: Sequence[slice]
              ) -> list[Microbatch]:
    """Return a microbatch for each of these slices of dim 0. Raises ModelError if first dims differ."""
    inputs = _as_dict(inputs)
    _batch_size(inputs, targets, samples)
    return _cut(inputs, targets, samples, places)


def _cut(inputs: Any, targets: object, samples: Tensor | None, places: Sequence[slice]) -> list[Microbatch]:
    def part(value: Any, place: slice) -> Any:
        return value[place] if isinstance(value, Tensor) else None if value is None else tree_map_only(
            Tensor, lambda leaf: leaf[place], value)

    return [Microbatch(part(inputs, place), part(targets, place), part(samples, place)) for place in places]


def _as_dict(inputs: Any) -> Any:
    """Return `inputs`, with a mapping that `tree_map_only` would treat as a leaf converted to a dict."""
    return dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs


def _batch_size(*trees: object) -> int:
    """The size of dim 0 of all tensors. Raises ModelError for per-sample values that are not tensors: all microbatches
    would get those of the full batch."""
    leaves = [[tree] if isinstance(tree, Tensor) else tree_leaves(tree, is_leaf=_is_list_of_values) for tree in trees]
    tensors = [[leaf for leaf in of_tree if isinstance(leaf, Tensor)] for of_tree in leaves]
    sizes = {tensor.shape[0] if tensor.dim() else None for found in tensors for tensor in found}
    others: list[object] = [tree for tree, found in zip(trees, tensors, strict=True)
                            if isinstance(tree, (list, tuple)) and tree and not found]
    others += [leaf for of_tree in leaves for leaf in of_tree if _has_samples(leaf, sizes)]
    if others:
        raise ModelError("is not a tensor, and cannot be cut into microbatches", code="batch-of-arrays",
                         where="microbatches(inputs, targets)", value=type(others[0]).__name__,
                         remedy="Pass torch.from_numpy(array), torch.as_tensor(values), or a dict of tensors.")
    if len(sizes) != 1 or None in sizes:
        raise ModelError("must all have the batch in dim 0", code="batch-not-in-dim-0",
                         where="microbatches(inputs, targets)", value=sorted(map(str, sizes)),
                         remedy="If a tensor has no batch dim, cut by hand and pass ranvier.Microbatch objects.")
    return sizes.pop() or 0


def _has_samples(leaf: object, sizes: set[int | None]) -> bool:
    """Whether it holds per-sample values, as an array, a list or an object with tensors does. sizes: of dim 0."""
    if leaf is None or isinstance(leaf, Tensor):
        return False
    held = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
    return (isinstance(leaf, list) and {len(leaf)} == sizes) or bool(getattr(leaf, "shape", None)) or any(
        isinstance(value, Tensor) for value in held)


def _is_list_of_values(tree: object) -> bool:
    return isinstance(tree, list) and bool(tree) and not any(
        isinstance(item, (Tensor, list, tuple, Mapping)) for item in tree)


def as_microbatches(batch: Batch, where: str = "batch") -> list[Microbatch]:
    """Return the batch with a `Microbatch` for each pair. Raises ModelError for other entries."""
    is_one = isinstance(batch, (Tensor, str, bytes, Mapping)) or not isinstance(batch, Iterable)
    entries: list[Any] = [batch] if is_one else list(batch)
    for entry in entries:
        if not isinstance(entry, Microbatch) and not (isinstance(entry, (tuple, list)) and 1 <= len(entry) <= 3):
            raise ModelError("is not a microbatch", code="not-a-microbatch", where=where, value=type(entry).__name__,
                             remedy="Pass a list of ranvier.Microbatch or of (inputs, targets), for example "
                                    "ranvier.microbatches(inputs, targets, size=8).")
    return [entry if isinstance(entry, Microbatch) else Microbatch(*entry) for entry in entries]


def check_microbatches(batch: Sequence[Microbatch], *, needs_inputs: bool, needs_targets: bool, training: bool) -> None:
    """Raise ModelError if a rank that needs inputs or targets has none, or if those for training require a gradient."""
    for number, microbatch in enumerate(batch):
        for what, stage, is_needed, value in (("inputs", "first", needs_inputs, microbatch.inputs),
                                              ("targets", "last", needs_targets, microbatch.targets)):
            if is_needed and value is None:
                raise ModelError(f"has no {what} on the {stage} stage", code="microbatch-lacks-data",
                                 where=f"microbatch {number}",
                                 remedy=f"Give the ranks of the {stage} stage the {what} of every microbatch."
                                 + " If the loss needs none, give it the inputs." * (what == "targets"))
            if training and (value.requires_grad if isinstance(value, Tensor) else value is not None and any(
                    isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))):
                raise ModelError("require a gradient, which ends where the engine begins",
                                 code="microbatch-wants-gradient", where=f"{what} of microbatch {number}",
                                 remedy="Detach them, compute them inside torch.no_grad(), or let a block, or a "
                                        "loss that is a module, contain what trains.")
