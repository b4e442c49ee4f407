"""Optimus' three products on the row x col mesh, by broadcasts and reductions along rows and columns.

    ab    C[i,j] = sum_k A[i,k] B[k,j]      broadcast A along rows, B along columns
    abt   C[i,k] = sum_j A[i,j] B[k,j]^T    broadcast B along columns, reduce C along rows
    atb   C[k,j] = sum_i A[i,k]^T B[i,j]    broadcast A along rows, reduce C along columns

(Optimus: Xu et al., 2021, algorithms 1 to 3, after van de Geijn and Watts' SUMMA.) Rank (i, j) of the r x c mesh holds
block (i, j) of every tensor: its rows are divided by r, its columns by c. The gradients of each product are the other
two products. The dim k, divided by r in one tensor and by c in the other, is processed in panels that lie in one block
of each; the next panel is sent while one is multiplied. On a square mesh a panel is an entire block, which its root
sends without a copy. Half-precision products are summed in fp32, over panels and over ranks, and rounded once; A^T B,
the gradient of a weight, stays in fp32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ranvier.comm.protocol import Group, Work
from ranvier.layout import part
from ranvier.precision import wide
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving
from ranvier.tensor.split.local_products import multiply
from ranvier.tensor.split.products import Gathered, Product, flat


@lru_cache(maxsize=256)  # called by each product, with few different sizes
def pieces(width: int, first: int, second: int) -> tuple[tuple[int, slice, int, slice], ...]:
    """Ranges of `width`, divided into `first` and into `second` slabs, that lie in one slab of each.

    Each is (slab of the first, its range there, slab of the second, its range there).
    """
    def place(start: int, stop: int, count: int) -> tuple[int, slice]:
        slab = next(index for index in range(count) if start < part(width, count, index)[1])
        begin = part(width, count, slab)[0]
        return slab, slice(start - begin, stop - begin)

    edges = sorted({part(width, count, index)[0] for count in (first, second) for index in range(count)} | {width})
    return tuple((*place(start, stop, first), *place(start, stop, second)) for start, stop in pairwise(edges))


@dataclass(frozen=True)
class _Panel:
    """A range of k that lies in one column's block (k divided by c) and in one row's block (k divided by r)."""

    number: int
    col: int
    in_col: slice
    row: int
    in_row: slice

    @property
    def width(self) -> int:
        """Elements of k."""
        width: int = self.in_col.stop - self.in_col.start
        return width


def _panels(mesh: TensorMesh, width: int) -> list[_Panel]:
    """The panels of a k of `width`, in order."""
    return [_Panel(number, col, in_col, row, in_row) for number, (col, in_col, row, in_row)
            in enumerate(pieces(width, mesh.num_cols, mesh.num_rows))]


def _broadcast(mesh: TensorMesh, group: Group, root: int, block: Tensor | None, width: int, other: int, flip: bool,
               name: str, like: Tensor) -> tuple[Tensor, Work | None]:
    """Start the broadcast of `block` [other, width] (on the root; None elsewhere) to `group`.

    flip: blocks are transposed views: their last dim comes first in memory.
    """
    shape = (width, other) if flip else (other, width)
    if block is None:
        memory = mesh.workspace.take(name, shape, like)
    else:
        memory = block.t() if flip else block
        if not memory.is_contiguous():
            memory = mesh.workspace.take(name, shape, like).copy_(memory)
    work = group.broadcast(memory, root) if len(group.ranks) > 1 else None
    return (memory.t() if flip else memory), work


def _along_row(mesh: TensorMesh, a: Tensor, panel: _Panel) -> tuple[Tensor, Work | None]:
    """The panel's columns of a row's A [T, k_col], broadcast along the row by the rank that has them."""
    own = a[:, panel.in_col] if mesh.col == panel.col else None
    return _broadcast(mesh, mesh.over_cols, panel.col, own, panel.width, len(a), False, f"a {panel.number % 2}", a)


def _down_column(mesh: TensorMesh, b: Tensor, panel: _Panel, flip: bool) -> tuple[Tensor, Work | None]:
    """The panel's rows of a column's B [k_row, n_j], transposed to [n_j, width], broadcast along the column.

    flip: B is a transposed view of a tensor with n_j first in memory.
    """
    own = b[panel.in_row].t() if mesh.row == panel.row else None
    return _broadcast(mesh, mesh.over_rows, panel.row, own, panel.width, b.shape[1], not flip, f"b {panel.number % 2}",
                      b)


def _prefetch(panels: list[_Panel], *starts: Callable[[_Panel], tuple[Tensor, Work | None]]
              ) -> Iterator[tuple[_Panel, list[Tensor]]]:
    """Each panel with the tensors that `starts` broadcast for it, while those of the next panel are sent."""
    coming = [start(panels[0]) for start in starts]
    for panel in panels:
        here = coming
        if panel.number + 1 < len(panels):
            coming = [start(panels[panel.number + 1]) for start in starts]
        for _, work in here:
            if work is not None:
                work.wait()
        yield panel, [tensor for tensor, _ in here]


def _reduce_panels(mesh: TensorMesh, fill: Iterator[tuple[_Panel, Tensor]], roots: Literal["row", "col"],
                   keep: Callable[[_Panel, Tensor], None]) -> None:
    """Compute each panel's partial result in the workspace, and reduce it to its root while the next is computed.

    roots: the axis along which the root of a panel is found. keep: called with (panel, sum) on the root.
    """
    group, own = (mesh.over_cols, mesh.col) if roots == "col" else (mesh.over_rows, mesh.row)
    waiting: list[tuple[_Panel, Tensor, Work | None]] = []

    def finish() -> None:
        panel, partial, work = waiting.pop(0)
        if work is not None:
            work.wait()
        if getattr(panel, roots) == own:
            keep(panel, partial)

    for panel, partial in fill:
        waiting.append((panel, partial, group.reduce(partial, getattr(panel, roots)) if len(group.ranks) > 1 else None))
        if len(waiting) == 2:  # two buffers: the next panel overwrites the older one
            finish()
    while waiting:
        finish()


def ab(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool, bias: Tensor | None = None) -> Tensor:
    """C [T, n_j] of A [T, k_col] and B [k_row, n_j]. width: of the full k. flip: B is a transposed view."""
    c = a.new_empty(len(a), b.shape[1])
    panels = _panels(mesh, width)
    total = c
    if len(panels) > 1 and wide(a.dtype) is not a.dtype:
        total = mesh.workspace.take("c", c.shape, a.new_empty((), dtype=wide(a.dtype)))
    for panel, (left, right) in _prefetch(panels, lambda p: _along_row(mesh, a, p),
                                        lambda p: _down_column(mesh, b, p, flip)):
        multiply(total, left, right.t(), adds=panel.number > 0, bias=bias if total is c else None)
    if total is c:
        return c
    return c.copy_(total) if bias is None else torch.add(total, bias, out=c)


def abt(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool, out: Tensor | None = None) -> Tensor:
    """C [T, k_col] of A [T, n_j] and B [k_row, n_j]. width: of the full k. flip: B is a transposed view. out: memory
    for C."""
    start, stop = part(width, mesh.num_cols, mesh.col)
    c = a.new_empty(len(a), stop - start) if out is None else out
    like = a.new_empty((), dtype=mesh.sum_dtype(a.dtype) if mesh.num_cols > 1 else a.dtype)

    def fill() -> Iterator[tuple[_Panel, Tensor]]:
        for panel, (right,) in _prefetch(_panels(mesh, width), lambda p: _down_column(mesh, b, p, flip)):
            partial = mesh.workspace.take(f"c {panel.number % 2}", (len(a), panel.width), like)
            multiply(partial, a, right)
            yield panel, partial

    def keep(panel: _Panel, total: Tensor) -> None:
        c[:, panel.in_col].copy_(total)

    _reduce_panels(mesh, fill(), "col", keep)
    return c


def atb(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool) -> Tensor:
    """C [k_row, n_j] of A [T, k_col] and B [T, n_j], in fp32 if those are in half precision. width: of the full k.
    flip: C as a transposed view."""
    start, stop = part(width, mesh.num_rows, mesh.row)
    shape = (b.shape[1], stop - start) if flip else (stop - start, b.shape[1])
    c = a.new_empty(shape, dtype=wide(a.dtype))

    def fill() -> Iterator[tuple[_Panel, Tensor]]:
        for panel, (left,) in _prefetch(_panels(mesh, width), lambda p: _along_row(mesh, a, p)):
            size = (b.shape[1], panel.width) if flip else (panel.width, b.shape[1])
            partial = mesh.workspace.take(f"c {panel.number % 2}", size, c)
            multiply(partial, *((b.t(), left) if flip else (left.t(), b)))
            yield panel, partial

    def keep(panel: _Panel, total: Tensor) -> None:
        (c[:, panel.in_row] if flip else c[panel.in_row]).copy_(total)

    _reduce_panels(mesh, fill(), "row", keep)
    return c.t() if flip else c


class _Summa(Product):
    """Base of Optimus' two uses of a weight: x, W and y are all held in blocks, and nothing gathered is kept."""

    gathers_weight = False

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                  gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                  summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
        dw = None if shape is None else Arriving(self._weight_gradient(dy, x))
        dx = None if weight is None else self._input_gradient(dy, x, weight.tensor[0], flat(x) if reuse else None)
        return dx, dw

    @abstractmethod
    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """dx in the shape of `like`; out: memory for it."""

    @abstractmethod
    def _weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dW."""


class SummaProduct(_Summa):
    """C = AB with B = W^T; its gradients are AB^T and A^TB."""

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        return (*x.shape[:-1], features)

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        w = weight.tensor[0]
        return ab(self._mesh, flat(x), w.t(), self._width(x), flip=True, bias=bias
                        ).view(self.out_shape(x, len(w)))

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return abt(self._mesh, flat(dy), weight.t(), self._width(like), flip=True, out=out).view(like.shape)

    def _weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return atb(self._mesh, flat(x), flat(dy), self._width(x), flip=True).t()

    def _width(self, x: Tensor) -> int:
        return x.shape[-1] * self._mesh.num_cols


class SummaVocabulary(_Summa):
    """C = AB^T with the token embedding's table as B, of `vocab` rows; its gradients are AB and A^TB.

    own: entries of the vocabulary on this column.
    """

    def __init__(self, mesh: TensorMesh, vocab: int, own: int) -> None:
        super().__init__(mesh)
        self._vocab, self._own = vocab, own

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        return (*x.shape[:-1], self._own)

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        return abt(self._mesh, flat(x), weight.tensor[0], self._vocab, flip=False).view(*x.shape[:-1], self._own)

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return ab(self._mesh, flat(dy), weight, self._vocab, flip=False).view(like.shape)

    def _weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return atb(self._mesh, flat(dy), flat(x), self._vocab, flip=False)
