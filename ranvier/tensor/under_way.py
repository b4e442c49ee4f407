"""What travels on a tensor mesh while a stage computes: the next product's weight, and sums of weight gradients.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from ranvier.comm.protocol import Work

BUFFERS = 2
"""Of each kind: one is computed with while another one is filled."""


class Arriving:
    """A tensor that collectives write; `wait` returns it when they are done.

    source: what they read, which stays alive until then.
    """

    def __init__(self, tensor: Tensor, *works: Work, source: Tensor | None = None) -> None:
        self.tensor, self._works, self._source = tensor, works, source

    def wait(self) -> Tensor:
        """The tensor, complete. May be called again."""
        for work in self._works:
            work.wait()
        self._works, self._source = (), None
        return self.tensor


class GatheringLayer(Protocol):
    """A layer whose weight is gathered over a column."""

    def start_gather(self, buffer: int, kept: bool) -> Arriving:
        """Start the all-gather, into memory of its own where it is `kept`. buffer: which of the `BUFFERS` of the
        workspace it may use."""


class WeightUse(NamedTuple):
    """A weight that a product of a pass takes. kept: in memory of its own."""

    layer: GatheringLayer
    kept: bool


class WeightGathers:
    """Starts the gather of the next product's weight before a product is computed.

    Passes are alike, so the last one of the same blocks in the same direction says which weight is the next. A pass
    that departs from it, the first one, and products outside of a pass gather each weight when it is wanted.
    """

    def __init__(self) -> None:
        self._expected: list[WeightUse] = []
        self._uses: list[WeightUse] | None = None
        self._ahead: tuple[WeightUse, Arriving] | None = None
        self._turn = 0

    @contextmanager
    def one_pass(self, uses: list[WeightUse]) -> Iterator[None]:
        """uses: those of the last such pass, or none; become those of this one."""
        self._expected, self._uses = uses[:], []
        try:
            yield
            self._drop()
            if self._uses:  # else the weights were kept from an earlier pass
                uses[:] = self._uses
        finally:
            self._expected, self._uses, self._ahead = [], None, None

    def take(self, layer: GatheringLayer, *, kept: bool = False) -> Arriving:
        """The weight of the product that follows, until the one after it is taken; kept: until it is let go."""
        use = WeightUse(layer, kept)
        if self._ahead is not None and self._ahead[0] == use:
            found, self._ahead = self._ahead[1], None
        else:
            self._drop()
            found = self._start(use)
        if self._uses is not None:
            place = len(self._uses)
            self._uses.append(use)
            if self._expected[place:place + 1] == [use] and place + 1 < len(self._expected):
                following = self._expected[place + 1]
                self._ahead = following, self._start(following)
        return found

    def _start(self, use: WeightUse) -> Arriving:
        self._turn = (self._turn + 1) % BUFFERS
        return use.layer.start_gather(self._turn, use.kept)

    def _drop(self) -> None:
        """What was started is not wanted; its memory is, once it has arrived."""
        if self._ahead is not None:
            self._ahead[1].wait()
            self._ahead = None


class GradientSums:
    """Sums of weight gradients over a column, each of which is added to its gradient while later products are computed.

    What must come after them waits in the same line: that the backward has passed a block, for instance.
    """

    def __init__(self) -> None:
        self._line: deque[tuple[int | None, Callable[[], object]]] = deque()
        self._turn = 0

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
