"""How a tensor lies over the columns of a tensor mesh, and what happens where two layouts meet.

    replicated   every column has all of it; each one's gradient is the whole gradient, the same on all columns
    cut          column j has part j of one dim; its gradient is that of its part

An operand that is replicated may meet one that is cut: every column then finds the gradient of the replicated one from
its own part alone, and the sum over columns is the gradient. This file works on plain tensors; `column_tensor` applies
it to what a block computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ranvier.errors import ModelError
from ranvier.layout import part

if TYPE_CHECKING:
    from ranvier.tensor.mesh import TensorMesh


class ColumnLayout(NamedTuple):
    """dim: the dim that the columns share, None where every column has all of the tensor. size: of that dim, on all
    columns together."""

    mesh: TensorMesh
    dim: int | None = None
    size: int = 0

    def own(self) -> tuple[int, int]:
        """(start, stop) of this column's part of the dim."""
        return part(self.size, self.mesh.num_cols, self.mesh.col)

    @property
    def is_even(self) -> bool:
        """Whether all columns have equally much."""
        return self.size % self.mesh.num_cols == 0

    def moved(self, dim: int, size: int | None = None) -> ColumnLayout:
        """The same with the cut in another dim, which may have another size."""
        return ColumnLayout(self.mesh, dim, self.size if size is None else size)

    def text(self, shape: tuple[int, ...]) -> str:
        """For messages: [4, 6, 12 of 24 on each of 2 columns]."""
        if self.dim is None:
            return f"{list(map(int, shape))} on every column"
        sizes = [f"{int(size)} of {self.size}" if dim == self.dim else str(int(size)) for dim, size in enumerate(shape)]
        return f"[{', '.join(sizes)}] on each of {self.mesh.num_cols} columns"


class LocalSize(int):
    """The size of a cut dim on this column. Sums, products and whole quotients of it are such sizes, too; a float of it
    (an average, a scale) would be another number on one rank, and is refused."""

    whole: int
    """The same on one rank."""

    def __new__(cls, value: int, whole: int) -> LocalSize:
        size = super().__new__(cls, value)
        size.whole = whole
        return size

    def __float__(self) -> float:
        refuse("takes the size of a dim that columns share for that of the whole", f"{int(self)} of {self.whole}",
               "Take the number from the model's settings, or use a layer of ranvier.tensor that divides by it.")

    def _no_float(self, *_: object) -> NoReturn:
        float(self)

    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _no_float

    def __reduce__(self) -> tuple:
        return int, (int(self),)


def _tracked(name: str) -> Callable:
    of_int = getattr(int, name)

    def operation(self: LocalSize, *other: object) -> int:
        if not all(isinstance(one, int) for one in other):  # a list that is repeated, for one
            return NotImplemented
        value, whole = (of_int(int(self), *map(int, other)),
                        of_int(self.whole, *(getattr(one, "whole", one) for one in other)))
        return value if value is NotImplemented or whole is NotImplemented else LocalSize(value, whole)

    return operation


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__",
              "__neg__"):
    setattr(LocalSize, _name, _tracked(_name))


# ---------------------------------------------------------------------- conversions


def summed_gradient(x: Tensor, mesh: TensorMesh) -> Tensor:
    """A replicated tensor for use beside a cut one: itself, and in the backward the sum over columns."""
    return _SummedGradient.apply(x, mesh) if torch.is_grad_enabled() and x.requires_grad else x


def own_part_of(x: Tensor, dim: int, layout: ColumnLayout) -> Tensor:
    """This column's part of `dim` of a replicated tensor; in the backward the parts' gradients are put together."""
    return _OwnPart.apply(x, dim, layout)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, mesh: TensorMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        total = dy.clone(memory_format=torch.contiguous_format)
        ctx.mesh.over_cols.all_reduce(total).wait()
        return total, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, layout: ColumnLayout) -> Tensor:
        ctx.shape, ctx.dim, ctx.layout = x.shape, dim, layout
        start, stop = layout.own()
        return x.narrow(dim, start, stop - start).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        start, stop = ctx.layout.own()
        dx = dy.new_zeros(ctx.shape)
        dx.narrow(ctx.dim, start, stop - start).copy_(dy)
        ctx.layout.mesh.over_cols.all_reduce(dx).wait()
        return dx, None, None


# ---------------------------------------------------------------------- refusals


def refuse(what: str, layout: object, remedy: str, where: str | None = None) -> NoReturn:
    """ModelError for what cannot be done with a part of a tensor; it names the module and the line that tried."""
    raise ModelError(what, where=where or _where(), value=layout, remedy=remedy)


def _where() -> str:
    """The innermost module of a split model that is running, and the line of its code."""
    frame, line, name = sys._getframe(2), None, None
    while frame is not None and name is None:
        module = frame.f_globals.get("__name__", "")
        inside = module.startswith(("torch.", "ranvier.tensor.column")) or module == "torch"
        if line is None and not inside:
            line = f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = owner.__dict__.get("_split_name")
        frame = frame.f_back
    return f"{name or 'a split model'} ({line})"
