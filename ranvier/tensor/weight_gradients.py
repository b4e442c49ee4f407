"""The queue of deferred weight gradients of one stage, as in zero-bubble pipelines (Qi et al., 2023).

    y = x W^T + b        forward
    dx = dy W            backward, at once: the stage before waits for it
    dW += dy^T x         a product in the queue, run when the stage would wait, or at the end of the step
    db += sum dy

Walking the autograd graph twice, once for each gradient, costs 10 to 15 % more time; queueing the one product costs
nothing, and adding straight into the gradient buffer saves the temporary that autograd would allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from ranvier.errors import ModelError
from ranvier.schedule.schedule import Product


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """One deferred product and its operands, which stay alive for it."""

    parameters: Sequence[nn.Parameter]
    """Parameters whose gradients the product adds to; they may belong to different chunks."""
    tensors: Sequence[Tensor]
    add_gradients: Callable[..., None]
    """Takes the tensors."""
    versions: Sequence[int]
    """Version counters of the tensors when the product was queued."""


class WeightGradients:
    """The deferred products of one stage, in order, and the switch that decides whether products are deferred.

    chunk_of: the chunk of gradients that a parameter belongs to.
    on_queued, on_added: called with each parameter that a product adds to, when the product is queued and when its
        result has been added.
    added_rows: called with a lookup table and the rows (rising) of its gradient that something was added to, once for
        each write.
    after: calls what it is given when all results so far have been added (`GradientSums.after`).
    """

    def __init__(self, chunk_of: Callable[[nn.Parameter], int], on_queued: Callable[[nn.Parameter], None],
                 on_added: Callable[[nn.Parameter], None],
                 added_rows: Callable[[nn.Parameter, Tensor], None] = lambda parameter, rows: None,
                 after: Callable[[Callable[[], object]], object] = lambda action: action()) -> None:
        self.added_rows, self._after = added_rows, after
        self._chunk_of, self._on_queued, self._on_added = chunk_of, on_queued, on_added
        self._waiting: dict[tuple[int, int], _Operands] = {}
        self._fresh: list[_Operands] = []
        self._task: int | None = None
        """Autograd's number of the backward that runs."""
        self.defers = False
        """Whether products of the backward that runs are deferred."""
        self.last = False
        """Whether no backward of the batch follows the one that runs."""
        self.forward_bytes = 0
        """Bytes that deferring the products of all forward passes since the last reset would keep alive."""

    def backward_pass(self, microbatch: int, roots: Collection[GradientEdge], gradients: Collection[Tensor],
                      defer: bool, *, last: bool = False) -> list[Product]:
        """Run autograd from `roots` (of `root_of`) with their gradients. With `defer` products wait under (microbatch,
        number); returns their descriptions. last: no other backward of the batch follows."""
        self._fresh, self.defers, self.last = [], defer, last
        for root in roots:
            root.node.register_prehook(self._begin_pass)  # which goes with the graph: the node is the stage's own
        try:
            if roots:
                # as torch.autograd.backward does, without a second look at shapes
                _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True,
                                     accumulate_grad=True)
        finally:
            fresh, self._fresh, self.defers, self._task = self._fresh, [], False, None
        if not fresh:
            return []
        for number, operands in enumerate(fresh):
            self._waiting[microbatch, number] = operands
        return [Product(size, min(map(self._chunk_of, operands.parameters)))
                for size, operands in zip(_freed_bytes(fresh), fresh, strict=True)]

    def _begin_pass(self, gradients: Sequence[Tensor]) -> None:
        self._task = torch._C._current_graph_task_id()

    def in_pass(self) -> bool:
        """Whether the stage's own backward runs this code.

        False in an autograd call of a block: outside of the backward, or inside it, by a hook or a function (an
        implicit layer that solves for its gradient, reentrant checkpointing). What such a call computes for a weight
        may be no part of the weight's gradient, so it goes where the call sends it.
        """
        return self._task is not None and torch._C._current_graph_task_id() == self._task

    def add(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor],
            add_gradients: Callable[..., None]) -> None:
        """Call `add_gradients(*tensors)`, which adds to the gradients of `parameters`: later, where the pass defers.

        A layer's backward calls this.
        """
        if not self.defers:
            add_gradients(*tensors)
        else:
            alone = [_alone(tensor) for tensor in tensors]
            self._fresh.append(_Operands(parameters, alone, add_gradients, [one._version for one in alone]))
            for parameter in parameters:
                self._on_queued(parameter)

    def run(self, microbatch: int, product: int) -> None:
        """Compute one deferred product and release its operands. Its sum over ranks may be added later. ModelError
        where an operand has been changed since: a plain loop would have had the gradient before."""
        operands = self._waiting.pop((microbatch, product))
        if [one._version for one in operands.tensors] != operands.versions:
            raise ModelError("has an input or a gradient that was changed in place after its backward, before the "
                             "weight's gradient, which waits for an idle moment", code="waiting-operand-changed",
                             where=f"weight of shape {tuple(operands.parameters[0].shape)}",
                             remedy="Give layers new tensors instead of memory that is written again for each "
                                    "microbatch, or let nothing wait: Pipeline(defer_bytes=0).")
        operands.add_gradients(*operands.tensors)
        for parameter in operands.parameters:
            self._after(partial(self._on_added, parameter))

    def __len__(self) -> int:
        """Products that wait."""
        return len(self._waiting)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Reduces to None: a copy of a layer, made while a batch runs, leaves its weight gradients to autograd."""
        return type(None), ()

    def clear(self) -> None:
        """Drop all products: the batch has failed."""
        self._waiting.clear()


def root_of(tensor: Tensor) -> GradientEdge:
    """The edge at which the backward of a stage's output begins: a node of its own, so that no hook of a block runs
    before it."""
    node = tensor.view_as(tensor).grad_fn
    assert node is not None, "only an output that requires a gradient has a root"
    return GradientEdge(node, 0)


def _alone(tensor: Tensor) -> Tensor:
    """`tensor` without its graph; a copy where it is a view of a larger storage, which would stay alive for it.

    Rows that are padded by little are no reason for a copy.
    """
    own_bytes = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() > 1.05 * own_bytes else tensor.detach()


def _freed_bytes(products: list[_Operands]) -> list[int]:
    """Bytes that each product frees when they run in order: a storage counts for the last product that uses it."""
    last_user: dict[int, tuple[int, int]] = {}
    for number, operands in enumerate(products):
        for tensor in operands.tensors:
            storage = tensor.untyped_storage()
            last_user[storage.data_ptr()] = number, storage.nbytes()
    freed = [0] * len(products)
    for number, size in last_user.values():
        freed[number] += size
    return freed
