"""Transfers on a tensor mesh that overlap computation: the next products' weights, and sums of weight gradients.

    gathers    | 0 | 1 | 2 | 3 |            weight 1 arrives while product 0 is computed
    products       | 0 | 1 | 2 | 3 |
    sums                   | 0 | 1 | 2 |    of weight gradient 0 while product 1 is computed; added to the gradient
                                            before product 2 overwrites the memory

All ranks of a column run the same products in the same order, so they start and await the same collectives.
The sum of a deferred product waits in the same queue. It is added when a later product needs its memory, at the end of
the stage's next pass, or at the end of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ranvier.comm.protocol import Group, Work
from ranvier.tensor.workspace import BUFFERS, Workspace


class Arriving:
    """A tensor that collectives write; `wait` returns it when they are done.

    source: the tensor that they read, kept alive until then. memory: identifies the memory of a bundle in which the
    tensor arrives.
    """

    def __init__(self, tensor: Tensor, *works: Work | Arriving, source: Tensor | None = None,
                 memory: str | None = None) -> None:
        self.tensor, self._works, self._source, self.memory = tensor, works, source, memory

    @property
    def is_coming(self) -> bool:
        """Whether `wait` has collectives to wait for."""
        return bool(self._works)

    def wait(self) -> Tensor:
        """Wait for and return the complete tensor. May be called again."""
        for work in self._works:
            work.wait()
        self._works, self._source = (), None
        return self.tensor


class GatheringLayer(Protocol):
    """A layer whose weight is gathered over a column."""

    @property
    def weight_shape(self) -> torch.Size:
        """Shape of this rank's weight."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """The parameters that make up the weight."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Number format in which this rank's weight is sent."""

    def own_weight(self, buffer: int) -> Tensor:
        """This rank's weight; buffer: which of the workspace's `BUFFERS` it may use."""

    def start_gather(self, buffer: int, kept: bool) -> Arriving:
        """Start the all-gather, into separate memory if the result is `kept`. buffer: which of the workspace's
        `BUFFERS` it may use."""


class WeightUse(NamedTuple):
    """A weight that a product of a pass uses. kept: in separate memory."""

    layer: GatheringLayer
    kept: bool


class WeightGathers:
    """Starts the gather of the next products' weights before a product is computed.

    Passes repeat, so the last pass of the same blocks in the same direction predicts the next weights. A pass that
    deviates from it, the first pass, and products outside of a pass gather each weight when it is needed.

    Args:
        limit: consecutive weights are gathered by one collective, up to this many elements of this rank, as FSDP
            gathers the weights of a layer; 0: each by its own collective.
        gather_together: starts such a collective, in one of the workspace's `BUFFERS`.
    """

    def __init__(self, limit: int = 0,
                 gather_together: Callable[[Sequence[GatheringLayer], int], list[Arriving]] | None = None) -> None:
        self._limit, self._gather_together = limit, gather_together
        self._expected: dict[int, list[WeightUse]] = {}
        self._uses: list[WeightUse] | None = None
        self._here: deque[tuple[WeightUse, Arriving]] = deque()
        self._ahead: deque[tuple[WeightUse, Arriving]] = deque()
        self._turn = 0

    @contextmanager
    def one_pass(self, uses: list[WeightUse]) -> Iterator[None]:
        """uses: the weights used in the last such pass, or none; replaced by those of this pass."""
        self._expected, self._uses = self.bundles(uses), []
        try:
            yield
            self._drop()
            if self._uses:  # else the weights were kept from an earlier pass
                uses[:] = self._uses
        finally:
            self._expected, self._uses = {}, None
            self._here.clear()
            self._ahead.clear()

    def take(self, layer: GatheringLayer, *, kept: bool = False) -> Arriving:
        """The weight of the next product, valid until the next call of `take` or, if `kept`, until it is released."""
        use, place = WeightUse(layer, kept), len(self._uses or ())
        expected = self._expected.get(place, [])
        begins = expected[:1] == [use]
        if not self._here or self._here[0][0] != use:
            if self._ahead and self._ahead[0][0] == use:
                self._here, self._ahead = self._ahead, deque()
            else:
                self._drop()
                self._here = self._start(expected if begins else [use])
        found = self._here.popleft()[1]
        if self._uses is not None:
            self._uses.append(use)
            following = self._expected.get(place + len(expected))
            if begins and following:
                self._ahead = self._start(following)
        return found

    def bundles(self, uses: Sequence[WeightUse]) -> dict[int, list[WeightUse]]:
        """Uses that are gathered together, by the position of the first: consecutive weights of one dtype that are not
        kept."""
        found: dict[int, list[WeightUse]] = {}
        last, elements = 0, 0
        for place, use in enumerate(uses):
            size = prod(use.layer.weight_shape) if self._limit and not use.kept else self._limit + 1
            if place and elements + size <= self._limit and use.layer.weight_dtype is uses[last].layer.weight_dtype:
                found[last].append(use)
                elements += size
            else:
                last, elements = place, size
                found[place] = [use]
        return found

    def _start(self, uses: Sequence[WeightUse]) -> deque[tuple[WeightUse, Arriving]]:
        self._turn = (self._turn + 1) % BUFFERS
        if len(uses) == 1 or self._gather_together is None:
            return deque((use, use.layer.start_gather(self._turn, use.kept)) for use in uses)
        return deque(zip(uses, self._gather_together([use.layer for use in uses], self._turn), strict=True))

    def _drop(self) -> None:
        """Discard gathers that were started and are not needed; their memory is reused once they have arrived."""
        for gathers in (self._here, self._ahead):
            for _, arriving in gathers:
                arriving.wait()
            gathers.clear()


def gather_together(workspace: Workspace, rows: Group, layers: Sequence[GatheringLayer], buffer: int
                    ) -> list[Arriving]:
    """Start one all-gather of these layers' weights over a column; each arrives as [rows, *weight_shape], with gaps
    between the rows. buffer: which of the workspace's `BUFFERS` they may use."""
    sizes, num_rows = [prod(layer.weight_shape) for layer in layers], len(rows.ranks)
    like = torch.empty(0, dtype=layers[0].weight_dtype, device=layers[0].weights[0].device)
    own = workspace.take_one(buffer, "own weights", (sum(sizes),), like)
    for layer, place in zip(layers, own.split(sizes), strict=True):
        place.view(layer.weight_shape).copy_(layer.own_weight(buffer))
    whole = workspace.take_one(buffer, "weight", (num_rows, sum(sizes)), own)
    bundle = Arriving(whole, rows.all_gather(whole, own))
    return [Arriving(share.view(num_rows, *layer.weight_shape), bundle)
            for layer, share in zip(layers, whole.split(sizes, 1), strict=True)]


class _Bundle:
    """Sums of small weight gradients that are sent together: when the next one does not fit, or when one is awaited."""

    def __init__(self, number: int, limit: int, like: Tensor, rows: Group, workspace: Workspace) -> None:
        self.memory, self.dtype, self._limit, self._rows = f"bundle {number}", like.dtype, limit, rows
        whole = len(rows.ranks) * limit
        self._sums = workspace.take_one(number, "bundled sums", (limit,), like)
        self._partial = workspace.take_one(number, "bundled gradients", (whole,), like)
        self._sent = workspace.take_one(number, "bundle", (whole,), like)
        self._ends = [0]
        self._work: Work | None = None

    def fits(self, size: int, dtype: torch.dtype) -> bool:
        """Whether a sum of `size` elements of this dtype may still be added."""
        return self._work is None and dtype is self.dtype and self._ends[-1] + size <= self._limit

    def place(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Memory for the next partial sums [rows, *shape], and for their sum."""
        start, size, rows = self._ends[-1], prod(shape), len(self._rows.ranks)
        return (self._partial[rows * start:rows * (start + size)].view(rows, *shape),
                self._sums[start:start + size].view(*shape))

    def add(self, size: int) -> None:
        """Record that the partial sums placed last are complete."""
        self._ends.append(self._ends[-1] + size)

    def done(self) -> bool:
        """See `protocol.Work`."""
        return self._work is not None and self._work.done()

    def wait(self) -> None:
        """Start the reduce-scatter, unless it has been started, and wait."""
        self.start()
        assert self._work is not None
        self._work.wait()

    def start(self) -> None:
        """Start the reduce-scatter of all that has been added, if anything has."""
        rows, used = len(self._rows.ranks), self._ends[-1]
        if self._work is None and used:
            sent, partial = self._sent[:rows * used], self._partial[:rows * used]
            torch.cat([partial[rows * start:rows * stop].view(rows, -1) for start, stop in pairwise(self._ends)], 1,
                      out=sent.view(rows, used))
            self._work = self._rows.reduce_scatter(self._sums[:used], sent, partial)


class GradientSums:
    """Sums of weight gradients over a column, each of which is added to its gradient while later products are computed.

    Actions that must follow them wait in the same queue, such as the report that the backward has passed a block.

    Args:
        limit: consecutive sums are sent together, up to this many elements of this rank; 0: each separately.
        rows: of the column. workspace: holds the partial sums.
    """

    def __init__(self, rows: Group, workspace: Workspace, limit: int = 0) -> None:
        self._rows, self._workspace, self._limit = rows, workspace, limit
        self._line: deque[tuple[int | str | None, Callable[[], object]]] = deque()
        self._turn = self._bundle_turn = 0
        self._open: _Bundle | None = None

    def buffers(self, shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the partial sums [rows, *shape] of a weight's gradient, and for their sum."""
        size = prod(shape)
        if 2 * size <= self._limit:
            if self._open is None or not self._open.fits(size, like.dtype):
                self._open = self._next_bundle(like)
            return self._open.place(shape)
        number, workspace = self.next_buffer(), self._workspace
        return (workspace.take_one(number, "weight gradients", (len(self._rows.ranks), *shape), like),
                workspace.take_one(number, "weight gradient", shape, like))

    def start(self, partial_sums: Tensor, total: Tensor) -> Arriving:
        """The sum `total` of the partial sums from the last `buffers` call: started, or to be sent with later sums."""
        if 2 * total.numel() <= self._limit:
            assert self._open is not None
            self._open.add(total.numel())
            return Arriving(total, self._open, memory=self._open.memory)
        buffer = None  # allocating one for each sum takes longer than filling it
        if self._rows.buffer_bytes("reduce_scatter", partial_sums.numel(), partial_sums.dtype, partial_sums.device.type
                                   ) == partial_sums.nbytes:
            buffer = self._workspace.take_one(self._turn, "weight shares", partial_sums.shape, partial_sums)
        return Arriving(total, self._rows.reduce_scatter(total, partial_sums, buffer))

    def _next_bundle(self, like: Tensor) -> _Bundle:
        if self._open is not None:
            self._open.start()
        self._bundle_turn = (self._bundle_turn + 1) % BUFFERS
        self._free(f"bundle {self._bundle_turn}")
        return _Bundle(self._bundle_turn, self._limit, like, self._rows, self._workspace)

    def next_buffer(self) -> int:
        """One of the `BUFFERS`, whose last sum has been added."""
        self._turn = (self._turn + 1) % BUFFERS
        self._free(self._turn)
        return self._turn

    def _free(self, memory: int | str) -> None:
        while any(used == memory for used, _ in self._line):
            self._finish_first()

    def add(self, total: Arriving, then: Callable[[Tensor], object]) -> None:
        """Call `then` later with the sum, which is in the memory returned last."""
        self._line.append((self._turn if total.memory is None else total.memory, lambda: then(total.wait())))

    def call_after(self, action: Callable[[], object]) -> None:
        """Call `action` when all sums so far have been added."""
        if self._line:
            self._line.append((None, action))
        else:
            action()

    def finish(self) -> None:
        """Add all sums."""
        while self._line:
            self._finish_first()

    def clear(self) -> None:
        """Discard all sums: the batch has failed."""
        self._line.clear()
        self._open = None

    def _finish_first(self) -> None:
        self._line.popleft()[1]()
