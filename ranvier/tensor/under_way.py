"""What travels on a tensor mesh while a stage computes: the next products' weights, and sums of weight gradients.

    gathers    | 0 | 1 | 2 | 3 |            weight 1 arrives while product 0 is computed
    products       | 0 | 1 | 2 | 3 |
    sums                   | 0 | 1 | 2 |    of weight gradient 0 while product 1 is computed; added to the gradient
                                            before product 2 overwrites the memory

All ranks of a column run the same products in the same order, so they start and await the same collectives.
The sum of a deferred product waits in the same line. It is added when a later product needs its memory, at the end of
the stage's next pass, or at the end of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ranvier.comm.protocol import Work

BUFFERS = 2
"""Of each kind: one is computed with while another one is filled."""


class Arriving:
    """A tensor that collectives write; `wait` returns it when they are done.

    source: what they read, which stays alive until then.
    """

    def __init__(self, tensor: Tensor, *works: Work | Arriving, source: Tensor | None = None) -> None:
        self.tensor, self._works, self._source = tensor, works, source

    def wait(self) -> Tensor:
        """The tensor, complete. May be called again."""
        for work in self._works:
            work.wait()
        self._works, self._source = (), None
        return self.tensor


class GatheringLayer(Protocol):
    """A layer whose weight is gathered over a column."""

    @property
    def weight_shape(self) -> torch.Size:
        """Of this rank's weight."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """The parameters that it is made of."""

    def own_weight(self, buffer: int) -> Tensor:
        """This rank's weight; buffer: which of the `BUFFERS` of the workspace it may lie in."""

    def start_gather(self, buffer: int, kept: bool) -> Arriving:
        """Start the all-gather, into memory of its own where it is `kept`. buffer: which of the `BUFFERS` of the
        workspace it may use."""


class WeightUse(NamedTuple):
    """A weight that a product of a pass takes. kept: in memory of its own."""

    layer: GatheringLayer
    kept: bool


class WeightGathers:
    """Starts the gather of the next products' weights before a product is computed.

    Passes are alike, so the last one of the same blocks in the same direction says which weights are the next. A pass
    that departs from it, the first one, and products outside of a pass gather each weight when it is wanted.

    Args:
        limit: weights that follow each other are gathered by one collective, up to so many elements of this rank, as
            FSDP gathers those of a layer; 0: each by its own.
        gather_together: starts such a collective, in one of the `BUFFERS` of the workspace.
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
        """uses: those of the last such pass, or none; become those of this one."""
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
        """The weight of the product that follows, until the one after it is taken; kept: until it is let go."""
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
        """Which uses are gathered together, by the place of the first: weights of one dtype that follow each other and
        are not kept."""
        found: dict[int, list[WeightUse]] = {}
        last, elements = 0, 0
        for place, use in enumerate(uses):
            size = prod(use.layer.weight_shape) if self._limit and not use.kept else self._limit + 1
            if place and elements + size <= self._limit and _dtype(use) is _dtype(uses[last]):
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
        """What was started is not wanted; its memory is, once it has arrived."""
        for gathers in (self._here, self._ahead):
            for _, arriving in gathers:
                arriving.wait()
            gathers.clear()


def _dtype(use: WeightUse) -> torch.dtype:
    return use.layer.weights[0].dtype


class GradientSums:
    """Sums of weight gradients over a column, each of which is added to its gradient while later products are computed.

    What must come after them waits in the same line: that the backward has passed a block, for instance.
    """

    def __init__(self) -> None:
        self._line: deque[tuple[int | None, Callable[[], object]]] = deque()
        self._turn = 0

    @property
    def buffer(self) -> int:
        """The one that was given last."""
        return self._turn

    def next_buffer(self) -> int:
        """One of the `BUFFERS`, whose last sum has been added."""
        self._turn = (self._turn + 1) % BUFFERS
        while any(buffer == self._turn for buffer, _ in self._line):
            self._finish_first()
        return self._turn

    def add(self, total: Arriving, then: Callable[[Tensor], object]) -> None:
        """Call `then` with the sum, which lies in the buffer given last, later."""
        self._line.append((self._turn, lambda: then(total.wait())))

    def after(self, action: Callable[[], object]) -> None:
        """Call `action` when all sums so far have been added."""
        if self._line:
            self._line.append((None, action))
        else:
            action()

    def finish(self) -> None:
        """Add all."""
        while self._line:
            self._finish_first()

    def clear(self) -> None:
        """Forget all: the batch has failed."""
        self._line.clear()

    def _finish_first(self) -> None:
        self._line.popleft()[1]()
