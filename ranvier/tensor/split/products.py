"""The products of a split Linear behind one interface: collectives differ from scheme to scheme, results do not.

    y = x W^T + b       forward, of x and W as they are sharded over the mesh
    dx, dW              gradients, together or one at a time

x is in the layout of the residual stream or [.., in_j], y in the other one; see `stationary` and `summa`. The weight is
[rows, out, in] of a column, or transposed, on its way or here already; for SUMMA it is this rank's block, [1, out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from ranvier.tensor.activations import Panel
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split import stationary, summa
from ranvier.tensor.split.stationary import Gathered
from ranvier.tensor.under_way import Arriving


class Product(ABC):
    """One kind of product on one mesh."""

    gathers_weight = True
    """Whether the weight of a column is gathered, as a whole."""
    transposes_weight = False
    """Whether it travels transposed, [rows, in_i, out_j], so that the rows' parts are one matrix; so does its
    gradient."""

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh

    @abstractmethod
    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        """The shape of y on this rank. features: rows of the weight."""

    def gather_x(self, x: Tensor) -> Gathered | None:
        """Start gathering x into memory of its own; None where x does not travel."""
        return None

    def gather_dy(self, dy: Tensor) -> Gathered | None:
        """Start gathering dy into memory of its own; None where dy does not travel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        """y. gathered: x, on its way already."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, gathered: Gathered | None = None) -> Tensor:
        """dx, in the shape of `like`. gathered: dy, on its way already."""

    @abstractmethod
    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered_x: Gathered | None = None,
                        gathered_dy: Gathered | None = None, into: Tensor | None = None,
                        summed: bool = True) -> Arriving | None:
        """dW [shape], in fp32 where operands are in half precision; it may lie in the workspace. With `gathered_x` only
        the shape of x is used, with `gathered_dy` dy is of the shape alone.

        into: a gradient in the format of dW, to which that is added where no sum over ranks is needed (None is returned
        then). summed: False for this row's part of the sum over rows, [rows, *shape]; stationary products only.
        """

    @abstractmethod
    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving, shape: torch.Size, *, gathered_x: Gathered | None,
                  into: Tensor | None, reuse: bool, summed: bool = True) -> tuple[Tensor, Arriving | None]:
        """(dx, dW), as the two above, with dx on its way while dW is computed. reuse: dx may take the place of x in
        memory."""


class OutputStationary(Product):
    """x is gathered along the row and W along the column; y stays. See `stationary`."""

    def __init__(self, mesh: TensorMesh) -> None:
        super().__init__(mesh)
        self.transposes_weight = mesh.num_rows > 1

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        return (*self._mesh.activations.whole_dims(x), features)

    def gather_x(self, x: Tensor) -> Gathered:
        return stationary.gather_whole(self._mesh, x)

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        shape = self.out_shape(x, weight.tensor.shape[2 if self.transposes_weight else 1])
        y = x.new_empty(prod(shape[:-1]), shape[-1])
        return stationary.output_forward(self._mesh, x, weight, bias, y, gathered).view(shape)

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, gathered: Gathered | None = None) -> Tensor:
        return stationary.output_input_gradient(self._mesh, _flat(dy), weight, like).wait()

    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered_x: Gathered | None = None,
                        gathered_dy: Gathered | None = None, into: Tensor | None = None,
                        summed: bool = True) -> Arriving | None:
        return stationary.output_weight_gradient(self._mesh, _flat(dy), x, self._panels(x, gathered_x), shape, into,
                                                 summed=summed)

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving, shape: torch.Size, *, gathered_x: Gathered | None,
                  into: Tensor | None, reuse: bool, summed: bool = True) -> tuple[Tensor, Arriving | None]:
        panels = self._panels(x, gathered_x, exposed=False)
        dx = stationary.output_input_gradient(self._mesh, _flat(dy), weight, x, exposed=False)
        dw = stationary.output_weight_gradient(self._mesh, _flat(dy), x, panels, shape, into, summed=summed)
        return dx.wait(), dw

    def _panels(self, x: Tensor, gathered: Gathered | None, *, exposed: bool = True) -> Iterable[tuple[Panel, Tensor]]:
        return (stationary.Stream(self._mesh, x, exposed=exposed) if gathered is None
                else stationary.arrived(self._mesh, x, gathered))


class InputStationary(Product):
    """W is gathered along the column and y is reduce-scattered along the row; x stays. See `stationary`."""

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        activations = self._mesh.activations
        return *activations.own_dims(x.shape[:-1]), activations.own_width(features * self._mesh.num_rows)

    def gather_dy(self, dy: Tensor) -> Gathered:
        return stationary.gather_whole(self._mesh, dy.contiguous())

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        out = x.new_empty(self.out_shape(x, weight.tensor.shape[1]))
        return stationary.input_forward(self._mesh, _flat(x), weight, bias, out)

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, gathered: Gathered | None = None) -> Tensor:
        dx, _ = stationary.input_gradients(self._mesh, dy.contiguous(), _flat(like), weight, None, gathered=gathered)
        assert dx is not None
        return dx.view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered_x: Gathered | None = None,
                        gathered_dy: Gathered | None = None, into: Tensor | None = None,
                        summed: bool = True) -> Arriving | None:
        dy = dy if gathered_dy is not None else dy.contiguous()
        _, dw = stationary.input_gradients(self._mesh, dy, _flat(x), None, shape, gathered=gathered_dy, into=into,
                                           summed=summed)
        return dw

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving, shape: torch.Size, *, gathered_x: Gathered | None,
                  into: Tensor | None, reuse: bool, summed: bool = True) -> tuple[Tensor, Arriving | None]:
        dx, dw = stationary.input_gradients(self._mesh, dy.contiguous(), _flat(x), weight, shape, into=into,
                                            reuse=reuse, summed=summed)
        assert dx is not None
        return dx.view(x.shape), dw


class _Summa(Product):
    """Base of Optimus' two uses of a weight: x, W and y are all held in blocks, and nothing gathered is kept."""

    gathers_weight = False

    def gradients(self, dy: Tensor, x: Tensor, weight: Arriving, shape: torch.Size, *, gathered_x: Gathered | None,
                  into: Tensor | None, reuse: bool, summed: bool = True) -> tuple[Tensor, Arriving | None]:
        dw = self.weight_gradient(dy, x, shape)
        return self._input_gradient(dy, x, weight.tensor[0], out=_flat(x) if reuse else None), dw

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Arriving, gathered: Gathered | None = None) -> Tensor:
        return self._input_gradient(dy, like, weight.tensor[0], out=None)

    @abstractmethod
    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """dx in the shape of `like`; out: memory for it."""


class SummaProduct(_Summa):
    """C = AB with B = W^T; its gradients are AB^T and A^TB."""

    def out_shape(self, x: Tensor, features: int) -> tuple[int, ...]:
        return (*x.shape[:-1], features)

    def forward(self, x: Tensor, weight: Arriving, bias: Tensor | None, gathered: Gathered | None) -> Tensor:
        w = weight.tensor[0]
        return summa.ab(self._mesh, _flat(x), w.t(), self._width(x), flip=True, bias=bias
                        ).view(self.out_shape(x, len(w)))

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return summa.abt(self._mesh, _flat(dy), weight.t(), self._width(like), flip=True, out=out).view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered_x: Gathered | None = None,
                        gathered_dy: Gathered | None = None, into: Tensor | None = None,
                        summed: bool = True) -> Arriving:
        return Arriving(summa.atb(self._mesh, _flat(x), _flat(dy), self._width(x), flip=True).t())

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
        return summa.abt(self._mesh, _flat(x), weight.tensor[0], self._vocab, flip=False).view(*x.shape[:-1], self._own)

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return summa.ab(self._mesh, _flat(dy), weight, self._vocab, flip=False).view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor, shape: torch.Size, *, gathered_x: Gathered | None = None,
                        gathered_dy: Gathered | None = None, into: Tensor | None = None,
                        summed: bool = True) -> Arriving:
        return Arriving(summa.atb(self._mesh, _flat(dy), _flat(x), self._vocab, flip=False))


def _flat(tensor: Tensor) -> Tensor:
    """[tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])
