"""The queue of deferred weight gradients of one stage, as in zero-bubble pipelines (Qi et al., 2023).

    y = x W^T + b        forward
    dx = dy W            backward, immediately: the previous stage waits for it
    dW += dy^T x         a product in the queue, run when the stage would wait, or at the end of the step
    db += sum dy

Walking the autograd graph twice, once for each gradient, costs 10 to 15 % more time; queueing the one product costs
nothing, and adding directly to the gradient buffer saves the temporary that autograd would allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from ranvier.errors import ModelError
from ranvier.schedule.schedule import Product

_SMALL_BYTES = 1 << 17
"""Bytes of a small product's operands: with 64 rows of 256 fp32 inputs and outputs it takes 0.3 ms on a core."""


class _Operands(NamedTuple):
    """One deferred product and its operands, which it keeps alive."""

    parameters: Sequence[nn.Parameter]
    """Parameters whose gradients the product adds to; they may belong to different chunks."""
    chunks: Sequence[int]
    """Those chunks."""
    tensors: Sequence[Tensor]
    add_gradients: Callable[..., None]
    """Takes the tensors."""
    versions: Sequence[int]
    """Version counters of the tensors when the product was queued."""


class WeightGradients:
    """The deferred products of one stage, in order, and the switch that decides whether products are deferred.

    on_queued: called with the parameters that a product adds to, when it is queued; returns the chunks of gradients
        that they belong to.
    on_added: called with these chunks when the product's result has been added.
    added_rows: called with a lookup table and the rows (ascending) of its gradient that were added to, once for each
        write.
    after: calls its argument when all results so far have been added (`GradientSums.call_after`); None on a stage of
        one rank, where they have been added when a product has run.

    Consecutive small products of one chunk are combined into one: choosing what to run takes longer than running them.
    Ranks of a stage may disagree about what is small.
    """

    def __init__(self, on_queued: Callable[[Sequence[nn.Parameter]], Sequence[int]],
                 on_added: Callable[[Sequence[int]], None],
                 added_rows: Callable[[nn.Parameter, Tensor], None] = lambda parameter, rows: None,
                 after: Callable[[Callable[[], object]], object] | None = None) -> None:
        self.added_rows, self._after = added_rows, after
        self._on_queued, self._on_added = on_queued, on_added
        self._waiting: dict[tuple[int, int], list[_Operands]] = {}
        self._fresh: list[_Operands] = []
        """Products that the running backward has deferred."""
        self._last_users: dict[int, tuple[int, int]] = {}
        """Address of a storage kept alive by these products -> the last product that uses it, and the bytes of it."""
        self._task: int | None = None
        """Autograd's number of the running backward."""
        self.defers = False
        """Whether products of the running backward are deferred."""
        self.last = False
        """Whether the running backward is the last of the batch."""
        self.forward_bytes = 0
        """Bytes that deferring the products of all forward passes since the last reset would keep alive."""

    def backward_pass(self, microbatch: int, roots: Collection[GradientEdge], gradients: Collection[Tensor],
                      defer: bool, *, last: bool = False) -> list[Product]:
        """Run autograd from `roots` (of `root_of`) with their gradients. With `defer` products wait under (microbatch,
        number); returns their descriptions. last: no other backward of the batch follows."""
        self._fresh, self._last_users, self.defers, self.last = [], {}, defer, last
        for root in roots:
            root.node.register_prehook(self._begin_pass)  # freed with the graph: the node is the stage's own
        try:
            if roots:
                # as torch.autograd.backward does, without a second look at shapes
                _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True,
                                     accumulate_grad=True)
        finally:
            fresh, self._fresh, self.defers, self._task = self._fresh, [], False, None
        if not fresh:
            return []
        freed = [0] * len(fresh)  # bytes, when the products run in order
        for number, size in self._last_users.values():
            freed[number] += size
        products: list[Product] = []
        for operands, size in zip(fresh, freed, strict=True):
            chunk, last_product = min(operands.chunks), products[-1] if products else None
            if last_product is None or self._after is not None or last_product.chunk != chunk or (
                    last_product.alive_bytes >= _SMALL_BYTES):
                products.append(Product(size, chunk))
                self._waiting[microbatch, len(products) - 1] = [operands]
            else:
                products[-1] = Product(last_product.alive_bytes + size, chunk)
                self._waiting[microbatch, len(products) - 1].append(operands)
        return products

    def _begin_pass(self, gradients: Sequence[Tensor]) -> None:
        self._task = torch._C._current_graph_task_id()

    def in_pass(self) -> bool:
        """Whether this code is run by the stage's own backward.

        False in an autograd call of a block: outside of the backward, or inside it, by a hook or a function (an
        implicit layer that solves for its gradient, reentrant checkpointing). Such a call's result for a weight may not
        be part of the weight's gradient, so it goes where the call sends it.
        """
        return self._task is not None and torch._C._current_graph_task_id() == self._task

    def add(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor],
            add_gradients: Callable[..., None]) -> None:
        """Call `add_gradients(*tensors)`, which adds to the gradients of `parameters`: later, if the pass defers.

        A layer's backward calls this. The tensors are kept without their graphs; a view of a larger storage is copied,
        since it would keep that storage alive. Slightly padded rows are not copied.
        """
        if not self.defers:
            add_gradients(*tensors)
            return
        waiting = []
        for tensor in tensors:
            one = tensor.detach()
            if (storage := one.untyped_storage()).nbytes() > 1.05 * one.nbytes:
                storage = (one := one.clone()).untyped_storage()
            self._last_users[storage.data_ptr()] = len(self._fresh), storage.nbytes()
            waiting.append(one)
        self._fresh.append(_Operands(parameters, self._on_queued(parameters), waiting, add_gradients,
                                     [one._version for one in waiting]))

    def run(self, microbatch: int, product: int) -> None:
        """Compute one deferred product and release its operands. Its sum over ranks may be added later. ModelError if
        an operand has been changed since: a plain loop would have computed the gradient before the change."""
        for operands in self._waiting.pop((microbatch, product)):
            if [tensor._version for tensor in operands.tensors] != operands.versions:
                raise ModelError("has an input or an output gradient that was changed in place after its backward, "
                                 "before the deferred weight gradient was computed", code="waiting-operand-changed",
                                 where=f"weight of shape {tuple(operands.parameters[0].shape)}",
                                 remedy="Give layers new tensors instead of memory that is overwritten for each "
                                        "microbatch, or defer nothing: Pipeline(defer_bytes=0).")
            operands.add_gradients(*operands.tensors)
            if self._after is None:
                self._on_added(operands.chunks)
            else:
                self._after(partial(self._on_added, operands.chunks))

    def __len__(self) -> int:
        """Number of layers' products that wait."""
        return sum(map(len, self._waiting.values()))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickles as None: a copy of a layer, made while a batch runs, leaves its weight gradients to autograd."""
        return type(None), ()

    def clear(self) -> None:
        """Drop all products: the batch has failed."""
        self._waiting.clear()


def root_of(tensor: Tensor) -> GradientEdge:
    """The edge at which the backward of a stage's output begins: a separate node, so that no hook of a block runs
    before it."""
    node = tensor.view_as(tensor).grad_fn
    assert node is not None, "only an output that requires a gradient has a root"
    return GradientEdge(node, 0)
