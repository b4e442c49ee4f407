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

Activations travel in panels, the next one while one is multiplied, so that buffers stay bounded. A weight arrives while
the product before it is computed (`weight_gathers`), dX of an output-stationary product is summed while dW is computed,
and dW while the next products are (`TensorMesh.sums`). Rows may have different numbers of tokens, or none: each row
counts its own panels, because they travel along the row only, and each weight travels once for every product, whatever
the tokens are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from ranvier.comm.protocol import Work
from ranvier.layout import part
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.under_way import Arriving

Gathered = Sequence[Arriving]
"""The panels of a gathered tensor, each in memory of its own."""

# ---------------------------------------------------------------------- collectives


def gather_whole(mesh: TensorMesh, x: Tensor) -> Gathered:
    """Start gathering all panels of `x`."""
    found = []
    for run in mesh.panels(x, "first"):
        parts, work = mesh.activations.gather(x, run, lambda _, shape: x.new_empty(shape))
        found.append(Arriving(parts, work))
    return found


def arrived(mesh: TensorMesh, x: Tensor, gathered: Gathered) -> Iterator[tuple[slice, Tensor]]:
    """(run of units, slabs) of each panel of `gathered`, that of an x of this shape, when it has arrived."""
    for run, panel in zip(mesh.panels(x, "first"), gathered, strict=True):
        yield run, mesh.activations.slabs(panel.wait())


class Stream:
    """Iterates over (run of units, slabs) of each panel of x, while the next one travels; the first starts at once.

    exposed: False where products are computed before the first panel is wanted.
    """

    def __init__(self, mesh: TensorMesh, x: Tensor, *, exposed: bool = True) -> None:
        self._mesh, self._x = mesh, x
        self._runs = mesh.panels(x, "first" if exposed else None)
        self._coming = self._start(0) if self._runs else None

    def _start(self, number: int) -> tuple[Tensor, Work]:
        # Two buffers: one is multiplied while the next panel arrives in the other.
        return self._mesh.activations.gather(self._x, self._runs[number],
                                             partial(_panel_buffer, self._mesh, number % 2, self._x))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for number, run in enumerate(self._runs):
            assert self._coming is not None
            parts, work = self._coming
            if number + 1 < len(self._runs):
                self._coming = self._start(number + 1)
            work.wait()
            yield run, self._mesh.activations.slabs(parts)


def scatter(mesh: TensorMesh, out: Tensor, fill: Callable[[slice, Tensor], None], *, exposed: bool = True) -> Arriving:
    """Reduce-scatter partial sums over columns into `out`; the sum of one panel travels while the next is computed.

    fill: (run of units, slabs) -> None writes this rank's partial sums into the slabs. exposed: False where products
    are computed before `out` is wanted.
    """
    activations, under_way = mesh.activations, deque[Work]()
    for number, run in enumerate(mesh.panels(out, "last" if exposed else None)):
        if len(under_way) == 2:
            under_way.popleft().wait()
        buffer = partial(_panel_buffer, mesh, number % 2, out)
        slabs = activations.partial(out, run, buffer)
        fill(run, slabs)
        under_way.append(activations.scatter(slabs, out, run, buffer))
    return Arriving(out, *under_way)


def _panel_buffer(mesh: TensorMesh, number: int, like: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    return mesh.workspace.take(f"{name} {number}", shape, like)


def _scatter_weight(mesh: TensorMesh, slabs: Tensor, out: Tensor) -> Arriving:
    """Reduce-scatter `slabs` [rows, ...] over a column: this row's shard of the sum, in `out` where there are several
    rows."""
    return Arriving(slabs[0]) if mesh.num_rows == 1 else mesh.sums.start(slabs, out)


# ---------------------------------------------------------------------- local products


@lru_cache(maxsize=256)  # each product asks, and sizes are few
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


def _multiply(out: Tensor, a: Tensor, b: Tensor, begin: bool) -> None:
    """out = a b, or out += a b where not `begin`."""
    if begin:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


def _multiply_rows(out: Tensor, a: Tensor, b: Tensor, begin: bool, bias: Tensor | None = None) -> None:
    """out = a b (+ bias), or out += a b where not `begin`; out [n, m, F] or a [n, m, ..] may be rows of a panel, which
    have gaps between them, the other one has the same tokens, and b is a matrix."""
    if out.shape[0] == a.shape[0] == 1:
        if begin and bias is not None:
            torch.addmm(bias, a[0], b, out=out[0])
        else:
            _multiply(out[0], a[0], b, begin)
        return
    batches = max(len(out), len(a))
    a, out = (one if len(one) == batches else one.view(batches, -1, one.shape[-1]) for one in (a, out))
    many = b.expand(batches, *b.shape)
    if begin and bias is not None:
        torch.baddbmm(bias, a, many, out=out)
    elif begin:
        torch.bmm(a, many, out=out)
    else:
        out.baddbmm_(a, many)


def _after(arriving: Arriving | None, panels: Iterable[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """`panels`, of which the first (or the end, where there is none) comes after something else has arrived."""
    for panel in panels:
        if arriving is not None:
            arriving.wait()
            arriving = None
        yield panel
    if arriving is not None:
        arriving.wait()


# ---------------------------------------------------------------------- output-stationary


def output_forward(mesh: TensorMesh, x: Tensor, weight: Arriving, bias: Tensor | None, tokens: int,
                   gathered: Gathered | None = None) -> Tensor:
    """y [tokens, out_j] of x, in the layout of the residual stream, and a column's weight [rows, out_j, in_i].

    gathered: x, on its way already.
    """
    slabs = weight.tensor
    y = x.new_empty(tokens, slabs.shape[1])
    for run, panel in _after(weight, Stream(mesh, x) if gathered is None else arrived(mesh, x, gathered)):
        begin, rows = True, mesh.activations.rows(y, x, run)
        for i, a, j, b in pieces(_width(panel), len(panel), len(slabs)):
            _multiply_rows(rows, panel[i][:, a].unsqueeze(0), slabs[j][:, b].t(), begin, bias)
            begin = False
    return y


def output_input_gradient(mesh: TensorMesh, dy: Tensor, weight: Arriving, like: Tensor, *,
                          exposed: bool = True) -> Arriving:
    """dx, in the layout and shape of `like`, of dy [tokens, out_j] and a column's weight [rows, out_j, in_i].

    exposed: as of `scatter`.
    """
    slabs = weight.wait()

    def fill(run: slice, dx_slabs: Tensor) -> None:
        rows = mesh.activations.rows(dy, like, run)
        for i, a, j, b in pieces(_width(dx_slabs), len(dx_slabs), len(slabs)):
            _multiply_rows(dx_slabs[i][:, a].unsqueeze(0), rows, slabs[j][:, b], True)

    return scatter(mesh, dy.new_empty(like.shape), fill, exposed=exposed)


def output_weight_gradient(mesh: TensorMesh, dy: Tensor, like: Tensor, panels: Iterable[tuple[slice, Tensor]],
                           shape: torch.Size, into: Tensor | None = None, *, summed: bool = True) -> Arriving | None:
    """dW [out_j, in_i] = `shape`, on its way into the workspace; or None, and it has been added to `into`: on one row
    only. panels: of x, whose shape `like` has. summed: False for this row's part of the sum, [rows, *shape]."""
    slabs, out, begin = _gradient_buffers(mesh, shape, dy, into)
    for run, panel in panels:
        rows = mesh.activations.rows(dy, like, run).flatten(0, 1)
        for i, a, j, b in pieces(_width(panel), len(panel), len(slabs)):
            _multiply(slabs[j][:, b], rows.t(), panel[i][:, a], begin)
        begin = False
    if begin:  # no tokens
        slabs.zero_()
    if into is not None:
        return None
    return _scatter_weight(mesh, slabs, out) if summed else Arriving(slabs)


def _gradient_buffers(mesh: TensorMesh, shape: torch.Size, like: Tensor,
                      into: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Memory for the partial sums [rows, *shape] of a weight's gradient and for their sum, and whether the first holds
    nothing yet."""
    if into is not None:
        return into.unsqueeze(0), into, False
    if mesh.num_rows == 1:
        partial_sums = total = mesh.workspace.take("weight gradient", (1, *shape), like)
    else:
        partial_sums, total = mesh.sums.buffers(shape, like)
    return partial_sums, total, True


def _width(slabs: Tensor) -> int:
    return len(slabs) * slabs.shape[-1]


# ---------------------------------------------------------------------- input-stationary


def input_forward(mesh: TensorMesh, x: Tensor, weight: Arriving, out: Tensor) -> Tensor:
    """y of x [tokens, in_j] and a column's weight [rows, out_i, in_j], into `out` in the layout of the residual
    stream."""
    whole = weight.wait().flatten(0, 1)  # [out, in_j]

    def fill(run: slice, y_slabs: Tensor) -> None:
        rows = mesh.activations.rows(x, out, run)
        for y_slab, features in zip(y_slabs, torch.split(whole, y_slabs.shape[-1]), strict=True):
            _multiply_rows(y_slab.unsqueeze(0), rows, features.t(), True)

    return scatter(mesh, out, fill).wait()


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
    for run, dy_slabs in _after(weight, Stream(mesh, dy) if gathered is None else arrived(mesh, dy, gathered)):
        width = dy_slabs.shape[-1]
        # dW first: with `reuse` dx overwrites x.
        if dw is not None:
            x_rows = mesh.activations.rows(x, dy, run).flatten(0, 1)
            for number, dy_slab in enumerate(dy_slabs):
                features = slice(number * width, (number + 1) * width)
                _multiply(dw.flatten(0, 1)[features], dy_slab.t(), x_rows, begin)
        if dx is not None and weight is not None:
            whole = weight.tensor.flatten(0, 1) if whole is None else whole  # [out, in_j]; here now
            dx_rows = mesh.activations.rows(dx, dy, run)
            for number, dy_slab in enumerate(dy_slabs):
                _multiply_rows(dx_rows, dy_slab.unsqueeze(0), whole[number * width:(number + 1) * width], number == 0)
        begin = False
    if dw is not None and begin:  # no tokens
        dw.zero_()
    if dw is None or out is None or into is not None:
        return dx, None
    return dx, _scatter_weight(mesh, dw, out) if summed else Arriving(dw)
