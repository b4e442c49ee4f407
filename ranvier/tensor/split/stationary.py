"""Products y = x W^T on the row x col mesh in which one operand stays on its rank, and their gradients.

    output-stationary  Y[i,j] = X[i,:] W[j,:]^T        x is gathered along the row, W along the column, y stays
        dX = scatter along the row of dY W             dW = scatter along the column of dY^T X
    input-stationary   Y[i,:] = sum_j X[i,j] W[:,j]^T  W is gathered along the column, y is scattered along the row
        dX = dY W, dW = scatter along the column of dY^T X, with one gather of dY for both

"gather" is an all-gather, "scatter" a reduce-scatter. Row i has its sequences; column j has its shard of W's output
features (output-stationary) or input features (input-stationary), which the rows of the column share. The two alternate
in a transformer's sublayer, so that of each pair of products one activation travels forward, and not two as in SUMMA
(Xu et al., 2021, send both operands or the output). With one row these are Megatron-LM's ColumnParallelLinear and
RowParallelLinear (Shoeybi et al., 2019; with sequence parallelism Korthikanti et al., 2022).

What has been gathered is one matrix, and is multiplied once: the output-stationary weights of a column travel
transposed, [in_i, out_j], so that the rows' parts follow each other in memory. Where operands are in half precision,
weight gradients are added, over panels and rows, in fp32; so are sums of activations over columns, which are rounded
once (`TensorMesh.sum_dtype`).

Activations travel in panels, the next one while one is multiplied, so that buffers stay bounded. A weight arrives while
the product before it is computed (`weight_gathers`), dX of an output-stationary product is summed while dW is computed,
and dW while the next products are (`TensorMesh.sums`). Rows may have different numbers of tokens, or none: each row
counts its own panels, because they travel along the row only, and each weight travels once for every product, whatever
the tokens are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ranvier.comm.protocol import Work
from ranvier.precision import wide
from ranvier.tensor.activations import Panel
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.local_products import multiply, multiply_rows, multiply_slabs
from ranvier.tensor.under_way import Arriving

Gathered = Sequence[Arriving]
"""The panels of a gathered tensor, each in memory of its own."""

# ---------------------------------------------------------------------- collectives


def gather_whole(mesh: TensorMesh, x: Tensor) -> Gathered:
    """Start gathering all panels of `x`."""
    found = []
    for panel in _gathered_panels(mesh, x):
        parts, work = mesh.activations.gather(x, panel, lambda _, shape: x.new_empty(shape))
        found.append(Arriving(parts, work))
    return found


def arrived(mesh: TensorMesh, x: Tensor, gathered: Gathered) -> Iterator[tuple[Panel, Tensor]]:
    """(panel, tokens) of each panel of `gathered`, that of an x of this shape, when it has arrived."""
    for panel, tokens in zip(_gathered_panels(mesh, x), gathered, strict=True):
        yield panel, tokens.wait().flatten(0, -2)


def _gathered_panels(mesh: TensorMesh, x: Tensor, *, exposed: bool = True) -> Sequence[Panel]:
    """Panels of an x that is gathered; one panel if nothing travels."""
    return mesh.panels(x, exposed=exposed, travels=mesh.activations.num_parts > 1)


class Stream:
    """Iterates over (panel, tokens [m, width]) of each panel of x, while the next one travels; the first starts
    at once.

    exposed: False where products are computed before the first panel is wanted.
    """

    def __init__(self, mesh: TensorMesh, x: Tensor, *, exposed: bool = True) -> None:
        self._mesh, self._x = mesh, x
        self._panels = _gathered_panels(mesh, x, exposed=exposed)
        self._coming = self._start(0) if self._panels else None

    def _start(self, number: int) -> tuple[Tensor, Work]:
        # Two buffers: one is multiplied while the next panel arrives in the other.
        return self._mesh.activations.gather(self._x, self._panels[number],
                                             partial(_panel_buffer, self._mesh, number % 2, self._x))

    def __iter__(self) -> Iterator[tuple[Panel, Tensor]]:
        for number, panel in enumerate(self._panels):
            assert self._coming is not None
            parts, work = self._coming
            if number + 1 < len(self._panels):
                self._coming = self._start(number + 1)
            work.wait()
            yield panel, parts.flatten(0, -2)


def scatter(mesh: TensorMesh, out: Tensor, fill: Callable[[Panel, Tensor], None], *, exposed: bool = True,
            bias: Tensor | None = None) -> Arriving:
    """Reduce-scatter partial sums over columns into `out`; the sum of one panel travels while the next is computed.

    fill: (panel, slabs) -> None writes this rank's partial sums into the slabs, or on one column the result.
    exposed: False where products are computed before `out` is wanted. bias: added to the sums, on several columns.
    """
    activations, under_way = mesh.activations, deque[Work]()
    if mesh.num_cols == 1:
        for panel in mesh.panels(out, travels=False):
            fill(panel, out.flatten(0, -2).unsqueeze(0))
        return Arriving(out)
    like = out.new_empty((), dtype=mesh.sum_dtype(out.dtype))
    for number, panel in enumerate(mesh.panels(out, exposed=exposed, dtype=like.dtype)):
        if len(under_way) == 2:
            under_way.popleft().wait()
        buffer = partial(_panel_buffer, mesh, number % 2, like)
        slabs = activations.partial(out, panel, like.dtype, buffer)
        fill(panel, slabs)
        under_way.append(activations.scatter(slabs, out, panel, buffer, bias))
    return Arriving(out, *under_way)


def _panel_buffer(mesh: TensorMesh, number: int, like: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    return mesh.workspace.take(f"{name} {number}", shape, like)


def _scatter_weight(mesh: TensorMesh, slabs: Tensor, out: Tensor) -> Arriving:
    """Reduce-scatter `slabs` [rows, ...] over a column: this row's shard of the sum, in `out` where there are several
    rows."""
    return Arriving(slabs[0]) if mesh.num_rows == 1 else mesh.sums.start(slabs, out)


def _after(arriving: Arriving | None, panels: Iterable[tuple[Panel, Tensor]]) -> Iterator[tuple[Panel, Tensor]]:
    """`panels`, of which the first (or the end, where there is none) comes after something else has arrived."""
    for panel in panels:
        if arriving is not None:
            arriving.wait()
            arriving = None
        yield panel
    if arriving is not None:
        arriving.wait()


# ---------------------------------------------------------------------- output-stationary


def column_matrix(weight: Tensor) -> Tensor:
    """[in, out_j], of a column's weight: [1, out_j, in] on one row, on several [rows, in_i, out_j]."""
    return weight[0].t() if len(weight) == 1 else weight.flatten(0, 1)


def output_forward(mesh: TensorMesh, x: Tensor, weight: Arriving, bias: Tensor | None, y: Tensor,
                   gathered: Gathered | None = None) -> Tensor:
    """y [tokens, out_j] of x, in the layout of the residual stream, and a column's weight.

    gathered: x, on its way already.
    """
    matrix = None
    for panel, tokens in _after(weight, Stream(mesh, x) if gathered is None else arrived(mesh, x, gathered)):
        matrix = column_matrix(weight.tensor) if matrix is None else matrix  # here now
        multiply_rows(mesh.activations.rows(y, x, panel), tokens.unsqueeze(0), matrix, bias)
    return y


def output_input_gradient(mesh: TensorMesh, dy: Tensor, weight: Arriving, like: Tensor, *,
                          exposed: bool = True) -> Arriving:
    """dx, in the layout and shape of `like`, of dy [tokens, out_j] and a column's weight.

    exposed: as of `scatter`.
    """
    matrix = column_matrix(weight.wait())

    def fill(panel: Panel, dx_slabs: Tensor) -> None:
        multiply_slabs(dx_slabs, mesh.activations.rows(dy, like, panel), matrix.t())

    return scatter(mesh, dy.new_empty(like.shape), fill, exposed=exposed)


def output_weight_gradient(mesh: TensorMesh, dy: Tensor, like: Tensor, panels: Iterable[tuple[Panel, Tensor]],
                           shape: torch.Size, into: Tensor | None = None, *, summed: bool = True) -> Arriving | None:
    """dW in the shape and order of the weight as it travels, on its way into the workspace; or None, and it has been
    added to `into`: on one row only. panels: of x, whose shape `like` has. summed: False for this row's part of the
    sum, [rows, *shape]."""
    partial_sums, total, begin = _gradient_buffers(mesh, shape, dy, into)
    for panel, tokens in panels:
        rows = mesh.activations.rows(dy, like, panel).flatten(0, 1)
        if mesh.num_rows == 1:
            multiply(partial_sums[0], rows.t(), tokens, adds=not begin)
        else:
            multiply(partial_sums.flatten(0, 1), tokens.t(), rows, adds=not begin)
        begin = False
    if begin:  # no tokens
        partial_sums.zero_()
    if into is not None:
        return None
    return _scatter_weight(mesh, partial_sums, total) if summed else Arriving(partial_sums)


def _gradient_buffers(mesh: TensorMesh, shape: torch.Size, like: Tensor,
                      into: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Memory for the partial sums [rows, *shape] of a weight's gradient and for their sum, in fp32 for a `like` in half
    precision, and whether the first holds nothing yet."""
    if into is not None:
        return into.unsqueeze(0), into, False
    like = like.new_empty((), dtype=wide(like.dtype))
    if mesh.num_rows == 1:
        partial_sums = total = mesh.workspace.take("weight gradient", (1, *shape), like)
    else:
        partial_sums, total = mesh.sums.buffers(shape, like)
    return partial_sums, total, True


# ---------------------------------------------------------------------- input-stationary


def input_forward(mesh: TensorMesh, x: Tensor, weight: Arriving, bias: Tensor | None, out: Tensor) -> Tensor:
    """y of x [tokens, in_j] and a column's weight [rows, out_i, in_j], into `out` in the layout of the residual
    stream."""
    whole = weight.wait().flatten(0, 1)  # [out, in_j]

    def fill(panel: Panel, y_slabs: Tensor) -> None:
        multiply_slabs(y_slabs, mesh.activations.rows(x, out, panel), whole.t(), bias if mesh.num_cols == 1 else None)

    return scatter(mesh, out, fill, bias=bias).wait()


def input_gradients(mesh: TensorMesh, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                    gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                    summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
    """dx [tokens, in_j], and dW [out_i, in_j] on its way into the workspace, of dy in the residual stream's layout.

    weight: the column's; None: dx is not wanted. shape: of dW; None: it is not wanted. gathered: dy, on its way
    already. into, summed: as in `output_weight_gradient`. reuse: dx takes the place of x in memory.
    """
    whole = None
    dx = None if weight is None else x if reuse else dy.new_empty(x.shape)
    dw, out, begin = (None, None, True) if shape is None else _gradient_buffers(mesh, shape, dy, into)
    for panel, tokens in _after(weight, Stream(mesh, dy) if gathered is None else arrived(mesh, dy, gathered)):
        # dW first: with `reuse` dx overwrites x.
        if dw is not None:
            multiply(dw.flatten(0, 1), tokens.t(), mesh.activations.rows(x, dy, panel).flatten(0, 1), adds=not begin)
        if dx is not None and weight is not None:
            whole = weight.tensor.flatten(0, 1) if whole is None else whole  # [out, in_j]; here now
            multiply_rows(mesh.activations.rows(dx, dy, panel), tokens.unsqueeze(0), whole)
        begin = False
    if dw is not None and begin:  # no tokens
        dw.zero_()
    if dw is None or out is None or into is not None:
        return dx, None
    return dx, _scatter_weight(mesh, dw, out) if summed else Arriving(dw)
