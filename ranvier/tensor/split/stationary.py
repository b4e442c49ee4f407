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

Activations travel in panels, the next one while one is multiplied, so that buffers stay bounded. Weights are sent from
the parameter's own memory. Rows may have different numbers of tokens, or none: each row counts its own panels, because
they travel along the row only, and each weight travels once for every product, whatever the tokens are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ranvier.comm.protocol import Work
from ranvier.layout import part
from ranvier.tensor.activations import panels
from ranvier.tensor.mesh import TensorMesh

# ---------------------------------------------------------------------- collectives


def gather_weight(mesh: TensorMesh, weight: Tensor, *, keep: bool = False) -> tuple[Tensor, Work | None]:
    """Start the all-gather of a column's weight: [rows, *weight.shape], complete when the work (None: now) is done.

    keep: into memory of its own, not the workspace.
    """
    if mesh.num_rows == 1:
        return weight.unsqueeze(0), None
    shape = (mesh.num_rows, *weight.shape)
    slabs = weight.new_empty(shape) if keep else mesh.workspace.take("weight", shape, weight)
    return slabs, mesh.over_rows.all_gather(slabs, weight)


def gather_whole(mesh: TensorMesh, x: Tensor) -> Tensor:
    """All panels of `x` in memory of their own: slabs [k, tokens, width / k]."""
    slabs, work = mesh.activations.gather(mesh.activations.units(x), x.new_empty)
    work.wait()
    return slabs()


def stream(mesh: TensorMesh, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(its tokens, its slabs) of each panel of x, while the next one travels."""
    activations, units = mesh.activations, mesh.activations.units(x)
    per_unit, unit_bytes = activations.tokens(x), _bytes_of_unit(mesh, units)
    runs = list(panels(len(units), unit_bytes, mesh.panel_bytes))
    if not runs:  # a row without tokens
        return

    def start(number: int) -> tuple[Callable[[], Tensor], Work]:
        # Two buffers: one is multiplied while the next panel arrives in the other.
        return activations.gather(units[runs[number]],
                                  partial(mesh.workspace.take, f"gathered {number % 2}", like=x))

    coming = start(0)
    for number, run in enumerate(runs):
        slabs, work = coming
        if number + 1 < len(runs):
            coming = start(number + 1)
        work.wait()
        yield slice(run.start * per_unit, run.stop * per_unit), slabs()


def scatter(mesh: TensorMesh, out: Tensor, fill: Callable[[slice, Tensor], None]) -> Tensor:
    """Reduce-scatter partial sums over columns into `out`; the sum of one panel travels while the next is computed.

    fill: (tokens, slabs) -> None writes this rank's partial sums of these tokens into the slabs.
    """
    activations, units = mesh.activations, mesh.activations.units(out)
    per_unit = activations.tokens(out)
    under_way: deque[Work] = deque()
    for number, run in enumerate(panels(len(units), _bytes_of_unit(mesh, units), mesh.panel_bytes)):
        if len(under_way) == 2:
            under_way.popleft().wait()
        part_of_out = units[run]
        slabs = activations.partial(part_of_out, per_unit * len(part_of_out),
                                    partial(mesh.workspace.take, f"partial {number % 2}", like=out))
        fill(slice(run.start * per_unit, run.stop * per_unit), slabs)
        under_way.append(activations.scatter(
            slabs, part_of_out, partial(mesh.workspace.take, f"parts {number % 2}", like=out)))
    while under_way:
        under_way.popleft().wait()
    return out


def _after(work: Work | None, gathered: Iterable[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """`gathered`, of which the first panel (or the end, where there is none) comes after `work` is done."""
    for panel in gathered:
        if work is not None:
            work.wait()
            work = None
        yield panel
    if work is not None:
        work.wait()


def _bytes_of_unit(mesh: TensorMesh, units: Tensor) -> int:
    """Bytes of one gathered unit."""
    return mesh.activations.num_parts * units[0].numel() * units.element_size() if len(units) else 1


def scatter_weight(mesh: TensorMesh, slabs: Tensor) -> Tensor:
    """Reduce-scatter `slabs` [rows, ...] over a column: this row's shard of the sum, in the workspace where there are
    several rows."""
    if mesh.num_rows == 1:
        return slabs[0]
    out = mesh.workspace.take("weight gradient", slabs.shape[1:], slabs)
    mesh.over_rows.reduce_scatter(out, slabs).wait()
    return out


# ---------------------------------------------------------------------- local products


def pieces(width: int, first: int, second: int) -> Iterator[tuple[int, slice, int, slice]]:
    """Ranges of `width`, divided into `first` and into `second` slabs, that lie in one slab of each.

    Yields (slab of the first, its range there, slab of the second, its range there).
    """
    def place(start: int, stop: int, count: int) -> tuple[int, slice]:
        slab = next(index for index in range(count) if start < part(width, count, index)[1])
        begin = part(width, count, slab)[0]
        return slab, slice(start - begin, stop - begin)

    edges = sorted({part(width, count, index)[0] for count in (first, second) for index in range(count)} | {width})
    for start, stop in pairwise(edges):
        yield *place(start, stop, first), *place(start, stop, second)


def _multiply(out: Tensor, a: Tensor, b: Tensor, begin: bool) -> None:
    """out = a b, or out += a b where not `begin`."""
    if begin:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


# ---------------------------------------------------------------------- output-stationary


def output_forward(mesh: TensorMesh, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: int,
                   x_slabs: Tensor | None = None, weight_slabs: Tensor | None = None) -> Tensor:
    """y [tokens, out_j] of x, in the layout of the residual stream, and weight [out_j, in_i].

    x_slabs, weight_slabs: operands that have been gathered already.
    """
    slabs, work = (weight_slabs, None) if weight_slabs is not None else gather_weight(mesh, weight)
    y = x.new_empty(tokens, weight.shape[0])
    gathered = [(slice(0, tokens), x_slabs)] if x_slabs is not None else stream(mesh, x)
    for where, panel in _after(work, gathered):
        begin, y_part = True, y[where]
        for i, a, j, b in pieces(_width(panel), len(panel), len(slabs)):
            if begin and bias is not None:
                torch.addmm(bias, panel[i][:, a], slabs[j][:, b].t(), out=y_part)
            else:
                _multiply(y_part, panel[i][:, a], slabs[j][:, b].t(), begin)
            begin = False
    return y


def output_input_gradient(mesh: TensorMesh, dy: Tensor, weight: Tensor, like: Tensor,
                          kept: Tensor | None = None) -> Tensor:
    """dx, in the layout and shape of `like`, of dy [tokens, out_j] and weight [out_j, in_i]."""
    slabs, work = (kept, None) if kept is not None else gather_weight(mesh, weight)

    def fill(where: slice, dx_slabs: Tensor) -> None:
        for i, a, j, b in pieces(_width(dx_slabs), len(dx_slabs), len(slabs)):
            torch.mm(dy[where], slabs[j][:, b], out=dx_slabs[i][:, a])

    if work is not None:
        work.wait()
    return scatter(mesh, dy.new_empty(like.shape), fill)


def output_weight_gradient(mesh: TensorMesh, dy: Tensor, x: Tensor | None, weight: Tensor,
                           x_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
    """dW [out_j, in_i] in the workspace; or None, and it has been added to `into`: on one row only. x or x_slabs."""
    slabs, begin = _gradient_buffer(mesh, weight, into)
    gathered = [(slice(0, len(dy)), x_slabs)] if x_slabs is not None else stream(mesh, _given(x))
    for where, panel in gathered:
        for i, a, j, b in pieces(_width(panel), len(panel), len(slabs)):
            _multiply(slabs[j][:, b], dy[where].t(), panel[i][:, a], begin)
        begin = False
    if begin:  # no tokens
        slabs.zero_()
    return scatter_weight(mesh, slabs) if into is None else None


def _given(x: Tensor | None) -> Tensor:
    assert x is not None  # saved wherever its slabs were not
    return x


def _gradient_buffer(mesh: TensorMesh, weight: Tensor, into: Tensor | None) -> tuple[Tensor, bool]:
    """Memory for the partial sums [rows, *weight.shape] of a weight's gradient, and whether it holds nothing yet."""
    if into is not None:
        return into.unsqueeze(0), False
    return mesh.workspace.take("weight gradients", (mesh.num_rows, *weight.shape), weight), True


def _width(slabs: Tensor) -> int:
    return len(slabs) * slabs.shape[-1]


# ---------------------------------------------------------------------- input-stationary


def input_forward(mesh: TensorMesh, x: Tensor, weight: Tensor, out: Tensor, kept: Tensor | None = None) -> Tensor:
    """y of x [tokens, in_j] and weight [out_i, in_j], into `out` in the layout of the residual stream."""
    slabs, work = (kept, None) if kept is not None else gather_weight(mesh, weight)
    whole = slabs.flatten(0, 1)  # [out, in_j]

    def fill(where: slice, y_slabs: Tensor) -> None:
        for y_slab, rows in zip(y_slabs, torch.split(whole, y_slabs.shape[-1]), strict=True):
            torch.mm(x[where], rows.t(), out=y_slab)

    if work is not None:
        work.wait()
    return scatter(mesh, out, fill)


def input_gradients(mesh: TensorMesh, dy: Tensor, x: Tensor, weight: Tensor, *, wants_input: bool, wants_weight: bool,
                    kept: Tensor | None = None, gathered: Tensor | None = None,
                    into: Tensor | None = None, reuse: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """dx [tokens, in_j] and dW [out_i, in_j] (in the workspace) of dy in the layout of the residual stream.

    kept: the weight, gathered already. gathered: slabs of dy, gathered already. into: as in `output_weight_gradient`.
    reuse: dx takes the place of x in memory.
    """
    slabs, work = (kept, None) if kept is not None or not wants_input else gather_weight(mesh, weight)
    whole = weight if slabs is None else slabs.flatten(0, 1)  # [out, in_j], for dx alone
    dx = (x if reuse else dy.new_empty(x.shape)) if wants_input else None
    dw, first = _gradient_buffer(mesh, weight, into) if wants_weight else (None, True)
    for where, dy_slabs in _after(work, [(slice(0, len(x)), gathered)] if gathered is not None else stream(mesh, dy)):
        width = dy_slabs.shape[-1]
        # dW first: with `reuse` dx overwrites x.
        if dw is not None:
            for number, dy_slab in enumerate(dy_slabs):
                rows = slice(number * width, (number + 1) * width)
                _multiply(dw.flatten(0, 1)[rows], dy_slab.t(), x[where], first)
        if dx is not None:
            for number, dy_slab in enumerate(dy_slabs):
                _multiply(dx[where], dy_slab, whole[number * width:(number + 1) * width], number == 0)
        first = False
    if dw is not None and first:  # no tokens
        dw.zero_()
    return dx, None if dw is None or into is not None else scatter_weight(mesh, dw)
