"""Warns of tensors outside all blocks that get gradients from a batch, such as a parameter in a closure of the loss.

Found in the graphs of the first microbatches of two batches: a tensor that a forward creates is a different one in
each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node


class LeafCheck:
    """Checks the graphs of one stage."""

    def __init__(self) -> None:
        self._before: list[ref[Tensor]] = []
        """Leaves of the last batch, which may be gone."""

    def check(self, outputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
        """Check the graph of `outputs` before its backward. known: tensors whose gradients the engine handles."""
        ids = {id(tensor) for tensor in known}
        found = {id(leaf): leaf for leaf in _leaves(outputs) if id(leaf) not in ids}
        twice = [leaf for before in self._before if (leaf := before()) is not None and id(leaf) in found]
        self._before = [ref(leaf) for leaf in found.values()]
        if twice:
            warnings.warn("a block or the loss uses trainable tensors outside all blocks "
                          f"({len(twice)}, the first of shape {tuple(twice[0].shape)}); their gradients are neither "
                          "summed over replicas nor divided by the weight of the batch. Make what is to be trained an "
                          "attribute of a block, or of a loss that is a module; call requires_grad_(False) for "
                          "what is not", stacklevel=2)


def _leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    todo: list[Node] = [node for tensor in outputs if (node := tensor.grad_fn) is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if leaf is not None:
            yield leaf
        following = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= following
        todo += following
