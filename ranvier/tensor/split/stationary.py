"""Products y = x W^T on the row x col mesh in which one operand stays on its rank, and their gradients.

    output-stationary  Y[i,j] = X[i,:] W[j,:]^T        x is gathered along the row, W along the column, y stays
        dX = scatter along the row of dY W             dW = scatter along the column of dY^T X
    input-stationary   Y[i,:] = sum_j X[i,j] W[:,j]^T  W is gathered along the column, y is scattered along the row
        dX = dY W, dW = scatter along the column of dY^T X, with one gather of dY for both

"gather" is an all-gather, "scatter" a reduce-scatter. Row i has its sequences; column j has its shard of W's output
features (output-stationary) or input features (input-stationary), which the rows of the column share. The two alternate
in a transformer's sublayer, so that for each pair of products one activation is sent in the forward, instead of two as
in SUMMA (Xu et al., 2021, send both operands or the output). With one row these are Megatron-LM's ColumnParallelLinear
and RowParallelLinear (Shoeybi et al., 2019; with sequence parallelism Korthikanti et al., 2022).

A gathered weight is one matrix, and is multiplied once: the output-stationary weights of a column are sent transposed,
[in_i, out_j], so that the rows' parts follow each other in memory. If operands are in half precision, weight gradients
are summed, over panels and rows, in fp32; so are activations over columns, which are rounded once
(`TensorMesh.sum_dtype`).

Activations are sent in panels, the next one while one is multiplied, so that buffers stay bounded. A weight arrives
while the product before it is computed (`overlapped_transfers`), dX of an output-stationary product is summed while dW
is computed, and dW while the next products are (`TensorMesh.sums`). Rows may have different numbers of tokens, or none:
each row has its own number of panels, because they are sent along the row only, and each weight is sent once for every
product, whatever the number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from ranvier.comm.protocol import Work
from ranvier.precision import wide
from ranvier.tensor.activations import Panel
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving
from ranvier.tensor.split.local_products import multiply, multiply_rows, multiply_slabs
from ranvier.tensor.split.products import Gathered, Product, flat

# ---------------------------------------------------------------------- collectives


def _gathered_panels(mesh: TensorMesh, x: Tensor, *, exposed: bool = True) -> Sequence[Panel]:
    """Panels of an x that is gathered; one panel if nothing is sent."""
    return mesh.panels(x, exposed=exposed, travels=mesh.activations.num_parts > 1)


def _gather_whole(mesh: TensorMesh, x: Tensor) -> Gathered:
    """Start gathering all panels of `x`."""
    return [Arriving(*mesh.activations.gather(x, panel, lambda _, shape: x.new_empty(shape)))
            for panel in _gathered_panels(mesh, x)]


def _panels_of(mesh: TensorMesh, x: Tensor, gathered: Gathered | None, *, exposed: bool = True
               ) -> Iterator[tuple[Panel, Tensor]]:
    """(panel, tokens [m, width]) of each panel of x, while the next one is sent; the first starts immediately.

    gathered: x, if its gather has been started; only the shape of x is then used. exposed: False if products are
    computed before the first panel is needed.
    """
    panels = _gathered_panels(mesh, x, exposed=exposed or gathered is not None)
    coming = deque(gathered or ())

    def start(number: int) -> None:
        if gathered is None and number < len(panels):
            # Two buffers: one is multiplied while the next panel arrives in the other.
            buffer = partial(_panel_buffer, mesh, number % 2, x)
            coming.append(Arriving(*mesh.activations.gather(x, panels[number], buffer)))

    def in_turn() -> Iterator[tuple[Panel, Tensor]]:
        for number, panel in enumerate(panels):
            start(number + 1)
            yield panel, coming.popleft().wait().flatten(0, -2)

    start(0)
    return in_turn()


def scatter(mesh: TensorMesh, out: Tensor, fill: Callable[[Panel, Tensor], None], *, exposed: bool = True,
            bias: Tensor | None = None) -> Arriving:
    """Reduce-scatter partial sums over columns into `out`; one panel is summed while the next is computed.

    fill: (panel, slabs) -> None writes this rank's partial sums into the slabs, or on one column the result.
    exposed: False if products are computed before `out` is needed. bias: added to the sums, on several columns.
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


def _after_arrival(arriving: Arriving | None, panels: Iterable[tuple[Panel, Tensor]]) -> Iterator[tuple[Panel, Tensor]]:
    """`panels`, the first of which (or the end, if there is none) comes after `arriving` has arrived."""
    for panel in panels:
        if arriving is not None:
            arriving.wait()
            arriving = None
        yield panel
    if arriving is not None:
        arriving.wait()


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


def _summed_weight(mesh: TensorMesh, slabs: Tensor, out: Tensor, into: Tensor | None, summed: bool, *, is_empty: bool
                   ) -> Arriving | None:
    """dW as `Product.gradients` returns it, from partial sums [rows, ...]: this row's shard of their sum over a column,
    arriving in `out` if there are several rows.

    is_empty: nothing has been written into `slabs`, because there were no tokens.
    """
    if is_empty:
        slabs.zero_()
    if into is not None:
        return None
    if mesh.num_rows == 1 and summed:
        return Arriving(slabs[0])
    return mesh.sums.start(slabs, out) if summed else Arriving(slabs)


# ---------------------------------------------------------------------- the two kinds of product


class OutputStationary(Product):
    """x is gathered along the row and W along the column; y stays."""

    def __init__(self, mesh: TensorMesh) -> None:
        super().__init__(mesh)
        self.transposes_weight = mesh.num_rows > 1

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        return (*self._mesh.activations.whole_dims(x), features)

    def gather_x(self, x: Tensor) -> Gathered:
        return _gather_whole(self._mesh, x)

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        shape = self.out_shape(x, weight.tensor.shape[2 if self.transposes_weight else 1])
        y, matrix = x.new_empty(prod(shape[:-1]), shape[-1]), None
        for panel, tokens in _after_arrival(weight, _panels_of(self._mesh, x, gathered)):
            matrix = _column_matrix(weight.tensor) if matrix is None else matrix  # here now
            multiply_rows(self._mesh.activations.rows(y, x, panel), tokens.unsqueeze(0), matrix, bias)
        return y.view(shape)

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                  gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                  summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
        panels: Iterable[tuple[Panel, Tensor]] = () if shape is None else _panels_of(
            self._mesh, x, gathered, exposed=weight is None)
        dx = None if weight is None else self._input_gradient(flat(dy), x, weight, exposed=shape is None)
        dw = None if shape is None else self._weight_gradient(flat(dy), x, panels, shape, into, summed)
        return None if dx is None else dx.wait(), dw

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, *, exposed: bool) -> Arriving:
        """dx from dy [tokens, out_j]. exposed: as in `scatter`."""
        matrix = _column_matrix(weight.wait())

        def fill(panel: Panel, dx_slabs: Tensor) -> None:
            multiply_slabs(dx_slabs, self._mesh.activations.rows(dy, like, panel), matrix.t())

        return scatter(self._mesh, dy.new_empty(like.shape), fill, exposed=exposed)

    def _weight_gradient(self, dy: Tensor, like: Tensor, panels: Iterable[tuple[Panel, Tensor]], shape: torch.Size,
                         into: Tensor | None, summed: bool) -> Arriving | None:
        """dW from dy [tokens, out_j], in the layout of the sent weight. panels: of x, whose shape `like` has."""
        partial_sums, total, begin = _gradient_buffers(self._mesh, shape, dy, into)
        for panel, tokens in panels:
            rows = self._mesh.activations.rows(dy, like, panel).flatten(0, 1)
            if self._mesh.num_rows == 1:
                multiply(partial_sums[0], rows.t(), tokens, adds=not begin)
            else:
                multiply(partial_sums.flatten(0, 1), tokens.t(), rows, adds=not begin)
            begin = False
        return _summed_weight(self._mesh, partial_sums, total, into, summed, is_empty=begin)


def _column_matrix(weight: Tensor) -> Tensor:
    """[in, out_j], of a column's weight: [1, out_j, in] on one row, on several [rows, in_i, out_j]."""
    return weight[0].t() if len(weight) == 1 else weight.flatten(0, 1)


class InputStationary(Product):
    """W is gathered along the column and y is reduce-scattered along the row; x stays."""

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        activations = self._mesh.activations
        return *activations.own_dims(x.shape[:-1]), activations.own_width(features * self._mesh.num_rows)

    def gather_dy(self, dy: Tensor) -> Gathered:
        return _gather_whole(self._mesh, dy.contiguous())

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        mesh, tokens = self._mesh, flat(x)
        out, whole = x.new_empty(self.out_shape(x, weight.tensor.shape[1])), weight.wait().flatten(0, 1)  # [out, in_j]

        def fill(panel: Panel, y_slabs: Tensor) -> None:
            multiply_slabs(y_slabs, mesh.activations.rows(tokens, out, panel), whole.t(),
                           bias if mesh.num_cols == 1 else None)

        return scatter(mesh, out, fill, bias=bias).wait()

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving | None, shape: torch.Size | None, *,
                  gathered: Gathered | None = None, into: Tensor | None = None, reuse: bool = False,
                  summed: bool = True) -> tuple[Tensor | None, Arriving | None]:
        mesh, dy, tokens_x, whole = self._mesh, dy if gathered is not None else dy.contiguous(), flat(x), None
        dx = None if weight is None else tokens_x if reuse else dy.new_empty(tokens_x.shape)
        dw, total, begin = (None, None, True) if shape is None else _gradient_buffers(mesh, shape, dy, into)
        for panel, tokens in _after_arrival(weight, _panels_of(mesh, dy, gathered)):
            # dW first: with `reuse` dx overwrites x.
            if dw is not None:
                rows = mesh.activations.rows(tokens_x, dy, panel).flatten(0, 1)
                multiply(dw.flatten(0, 1), tokens.t(), rows, adds=not begin)
            if dx is not None and weight is not None:
                whole = weight.tensor.flatten(0, 1) if whole is None else whole  # [out, in_j]; here now
                multiply_rows(mesh.activations.rows(dx, dy, panel), tokens.unsqueeze(0), whole)
            begin = False
        dx = None if dx is None else dx.view(x.shape)
        if dw is None or total is None:
            return dx, None
        return dx, _summed_weight(mesh, dw, total, into, summed, is_empty=begin)
