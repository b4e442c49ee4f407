"""Sums of lookup tables' gradients over replicas: of the rows that some replica has added to, and of no others.

    replica 0   rows 3 and 7        all-reduce of one byte a row: 3, 7, 9        all-reduce of three rows
    replica 1   rows 7 and 9

All other rows are zero everywhere, and stay so. Whether it pays is decided by counts that all replicas have alike. A
replica that cannot vouch for its zeros (autograd, or a user, added to the gradient too; or no loss has reached it,
which it says by the sign of zero) says so in one more byte, and everything is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ranvier.comm.protocol import Group

_ROWS_PER_FOUND = 4
"""A table's rows are told apart where at most one of so many was found: packing copies twice."""


class TouchedRows:
    """Rows of one table's gradient that a batch has touched.

    start: where the gradient begins in the buffer. rows, width: the table's shape.
    """

    def __init__(self, start: int, rows: int, width: int) -> None:
        self.start, self.rows, self.width = start, rows, width
        self.additions = 0
        """Calls of `add`; each has written to the gradient once."""
        self.found: Tensor | None = None
        """Rows that are not zero on some replica, rising; None: any may be, or there are too many."""
        self.decided = False
        self._touched = torch.zeros(rows + 1, dtype=torch.uint8)

    def begin(self) -> None:
        """A new batch."""
        self._touched.zero_()
        self.additions, self.found, self.decided = 0, None, False

    def add(self, rows: Tensor) -> None:
        """Something was added to these rows."""
        self._touched[rows.long()] = 1
        self.additions += 1

    def agree(self, group: Group, *, any_row: bool) -> None:
        """The same `found` on all members. any_row: whether rows here may be other than +0.0 that `add` was not told.
        Collective; waits."""
        self._touched[-1] = any_row
        group.all_reduce(self._touched, "max").wait()
        found = self._touched[:-1].nonzero().reshape(-1)
        self.found = None if self._touched[-1] or _ROWS_PER_FOUND * len(found) > self.rows else found
        self.decided = True


class PackedChunk:
    """Elements of a chunk that are summed: all that is in no table's whole rows, and the found rows.

    gradients: the chunk's, which begin at `start` in the buffer. tables: those with found rows.
    """

    def __init__(self, gradients: Tensor, start: int, tables: Sequence[TouchedRows]) -> None:
        stop, edges = start + len(gradients), [start]
        self._rows: list[tuple[Tensor, Tensor]] = []
        for table in sorted(tables, key=lambda each: each.start):
            first = max(0, -(-(start - table.start) // table.width))
            last = min(table.rows, (stop - table.start) // table.width)
            if first < last and table.found is not None:
                begin, end = table.start + first * table.width, table.start + last * table.width
                inside = table.found[(table.found >= first) & (table.found < last)] - first
                self._rows.append((gradients[begin - start:end - start].view(-1, table.width), inside))
                edges += [begin, end]
        self._rest = [gradients[first - start:last - start] for first, last in list(pairwise([*edges, stop]))[::2]]
        self.size = sum(map(len, self._rest)) + sum(len(rows) * block.shape[1] for block, rows in self._rows)
        self.pays = 2 * self.size <= len(gradients)
        """Whether so little is left that packing costs less than sending zeros; the same on all members."""

    def take(self) -> Tensor:
        """[size]: a copy of what is summed."""
        return torch.cat([*self._rest, *(block.index_select(0, rows).reshape(-1) for block, rows in self._rows)])

    def put(self, sums: Tensor) -> None:
        """Write back what `take` returned."""
        parts = iter(sums.split([*map(len, self._rest), *(len(rows) * block.shape[1] for block, rows in self._rows)]))
        for piece in self._rest:
            piece.copy_(next(parts))
        for block, rows in self._rows:
            block.index_copy_(0, rows, next(parts).view(-1, block.shape[1]).to(block.dtype))
