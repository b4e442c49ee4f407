"""Optimus' three products on the row x col mesh, by broadcasts and reductions along rows and columns.

    ab    C[i,j] = sum_k A[i,k] B[k,j]      broadcast A along rows, B along columns
    abt   C[i,k] = sum_j A[i,j] B[k,j]^T    broadcast B along columns, reduce C along rows
    atb   C[k,j] = sum_i A[i,k]^T B[i,j]    broadcast A along rows, reduce C along columns

(Xu et al., 2021, algorithms 1 to 3, after van de Geijn and Watts' SUMMA.) Of every tensor rank (i, j) of the r x c mesh
holds block (i, j): rows are cut in r, columns in c. Each one's gradients are the other two. The dim k, cut in r in one
tensor and in c in the other, is passed in panels that lie in one block of each; the next panel is on its way while one
is multiplied. On a square mesh a panel is a whole block, and roots send it from where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ranvier.layout import part
from ranvier.tensor.stationary import pieces

if TYPE_CHECKING:
    from ranvier.comm.protocol import Group, Work
    from ranvier.tensor.mesh import TensorMesh


@dataclass(frozen=True)
class _Panel:
    """A run of k: its place among panels, and where it is in the blocks cut in c and in r."""

    number: int
    col: int
    in_col: slice
    row: int
    in_row: slice

    @property
    def width(self) -> int:
        return self.in_col.stop - self.in_col.start


def _panels(mesh: TensorMesh, width: int) -> list[_Panel]:
    return [_Panel(number, col, in_col, row, in_row) for number, (col, in_col, row, in_row)
            in enumerate(pieces(width, mesh.num_cols, mesh.num_rows))]


def _broadcast(mesh: TensorMesh, group: Group, root: int, block: Tensor | None, width: int, other: int, flip: bool,
               name: str, like: Tensor) -> tuple[Tensor, Work | None]:
    """Start the broadcast of `block` [other, width] (of the root; None elsewhere) to `group`.

    flip: blocks lie in memory with their last dim first.
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
    """The panel's columns of a row's A [T, k_col], from the rank that has them."""
    own = a[:, panel.in_col] if mesh.col == panel.col else None
    return _broadcast(mesh, mesh.over_cols, panel.col, own, panel.width, len(a), False, f"a {panel.number % 2}", a)


def _down_column(mesh: TensorMesh, b: Tensor, panel: _Panel, flip: bool) -> tuple[Tensor, Work | None]:
    """The panel's rows of a column's B [k_row, n_j], transposed: [n_j, width], from the rank that has them.

    flip: B is the view of a tensor that lies in memory with n_j first.
    """
    own = b[panel.in_row].t() if mesh.row == panel.row else None
    return _broadcast(mesh, mesh.over_rows, panel.row, own, panel.width, b.shape[1], not flip, f"b {panel.number % 2}",
                      b)


def _ahead(panels: list[_Panel], *starts: Callable[[_Panel], tuple[Tensor, Work | None]]
           ) -> Iterator[tuple[_Panel, list[Tensor]]]:
    """Each panel with what `starts` have brought for it, while the next ones' are on their way."""
    coming = [start(panels[0]) for start in starts]
    for panel in panels:
        here = coming
        if panel.number + 1 < len(panels):
            coming = [start(panels[panel.number + 1]) for start in starts]
        for _, work in here:
            if work is not None:
                work.wait()
        yield panel, [tensor for tensor, _ in here]


def _into(mesh: TensorMesh, fill: Iterator[tuple[_Panel, Tensor]], roots: Literal["row", "col"],
          keep: Callable[[_Panel, Tensor], None]) -> None:
    """Compute each panel's partial result into memory of the workspace, and reduce it to its root, while the next one
    is computed. keep: (panel, sum), on the root."""
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
        if len(waiting) == 2:
            finish()
    while waiting:
        finish()


def ab(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool, bias: Tensor | None = None) -> Tensor:
    """C [T, n_j] of A [T, k_col] and B [k_row, n_j]. width: of the whole k. flip: B is a transposed view."""
    c = a.new_empty(len(a), b.shape[1])
    panels = _panels(mesh, width)
    for panel, (left, right) in _ahead(panels, lambda p: _along_row(mesh, a, p),
                                        lambda p: _down_column(mesh, b, p, flip)):
        if panel.number == 0 and bias is not None:
            torch.addmm(bias, left, right.t(), out=c)
        elif panel.number == 0:
            torch.mm(left, right.t(), out=c)
        else:
            c.addmm_(left, right.t())
    return c


def abt(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool, out: Tensor | None = None) -> Tensor:
    """C [T, k_col] of A [T, n_j] and B [k_row, n_j]. width: of the whole k. flip: B is a transposed view. out: where C
    shall be."""
    start, stop = part(width, mesh.num_cols, mesh.col)
    c = a.new_empty(len(a), stop - start) if out is None else out

    def fill() -> Iterator[tuple[_Panel, Tensor]]:
        for panel, (right,) in _ahead(_panels(mesh, width), lambda p: _down_column(mesh, b, p, flip)):
            partial = mesh.workspace.take(f"c {panel.number % 2}", (len(a), panel.width), a)
            yield panel, torch.mm(a, right, out=partial)

    _into(mesh, fill(), "col", lambda panel, total: c[:, panel.in_col].copy_(total))
    return c


def atb(mesh: TensorMesh, a: Tensor, b: Tensor, width: int, *, flip: bool) -> Tensor:
    """C [k_row, n_j] of A [T, k_col] and B [T, n_j]. width: of the whole k. flip: C as a transposed view."""
    start, stop = part(width, mesh.num_rows, mesh.row)
    shape = (b.shape[1], stop - start) if flip else (stop - start, b.shape[1])
    c = a.new_empty(shape)

    def fill() -> Iterator[tuple[_Panel, Tensor]]:
        for panel, (left,) in _ahead(_panels(mesh, width), lambda p: _along_row(mesh, a, p)):
            size = (b.shape[1], panel.width) if flip else (panel.width, b.shape[1])
            partial = mesh.workspace.take(f"c {panel.number % 2}", size, a)
            yield panel, torch.mm(b.t(), left, out=partial) if flip else torch.mm(left.t(), b, out=partial)

    def keep(panel: _Panel, total: Tensor) -> None:
        (c[:, panel.in_row] if flip else c[panel.in_row]).copy_(total)

    _into(mesh, fill(), "row", keep)
    return c.t() if flip else c
