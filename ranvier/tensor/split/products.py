"""The products of a split Linear behind one interface: collectives differ from scheme to scheme, results do not.

    y = x W^T + b       forward, of x and W as they are sharded over the mesh
    dx, dW              gradients, together or one at a time

x is in the layout of the residual stream or [.., in_j], y in the other one; see `stationary` and `summa`. `x_slabs`,
`weight_slabs`, `dy_slabs`: operands that have been gathered already, in place of the operand itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from torch import Tensor

from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split import stationary, summa


class Product(ABC):
    """One kind of product on one mesh."""

    keeps = True
    """Whether it gathers operands that can be kept and used again."""

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh

    @abstractmethod
    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """The shape of y on this rank."""

    def gather_x(self, x: Tensor) -> Tensor | None:
        """Slabs of x in memory of their own; None where x does not travel."""
        return None

    def gather_dy(self, dy: Tensor) -> Tensor | None:
        """Slabs of dy in memory of their own; None where dy does not travel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, x_slabs: Tensor | None,
                weight_slabs: Tensor | None) -> Tensor:
        """y."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, *, weight_slabs: Tensor | None = None,
                       dy_slabs: Tensor | None = None) -> Tensor:
        """dx, in the shape of `like`."""

    @abstractmethod
    def weight_gradient(self, dy: Tensor, x: Tensor | None, weight: Tensor, *, x_slabs: Tensor | None = None,
                        dy_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        """dW, which may lie in the workspace. x is None where x_slabs is given.

        into: a gradient of the weight's dtype, to which dW is added where no sum over ranks is needed (None is returned
        then).
        """

    @abstractmethod
    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, *, weight_slabs: Tensor | None, into: Tensor | None,
                  reuse: bool) -> tuple[Tensor, Tensor | None]:
        """(dx, dW). reuse: dx may take the place of x in memory."""


class OutputStationary(Product):
    """x is gathered along the row and W along the column; y stays. See `stationary`."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        return (*self._mesh.activations.whole_dims(x), weight.shape[0])

    def gather_x(self, x: Tensor) -> Tensor | None:
        return stationary.gather_whole(self._mesh, x)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, x_slabs: Tensor | None,
                weight_slabs: Tensor | None) -> Tensor:
        shape = self.out_shape(x, weight)
        return stationary.output_forward(self._mesh, x, weight, bias, prod(shape[:-1]), x_slabs, weight_slabs
                                         ).view(shape)

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, *, weight_slabs: Tensor | None = None,
                       dy_slabs: Tensor | None = None) -> Tensor:
        return stationary.output_input_gradient(self._mesh, _flat(dy), weight, like, weight_slabs)

    def weight_gradient(self, dy: Tensor, x: Tensor | None, weight: Tensor, *, x_slabs: Tensor | None = None,
                        dy_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        return stationary.output_weight_gradient(self._mesh, _flat(dy), x, weight, x_slabs, into)

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, *, weight_slabs: Tensor | None, into: Tensor | None,
                  reuse: bool) -> tuple[Tensor, Tensor | None]:
        return (self.input_gradient(dy, x, weight, weight_slabs=weight_slabs),
                self.weight_gradient(dy, x, weight, into=into))


class InputStationary(Product):
    """W is gathered along the column and y is reduce-scattered along the row; x stays. See `stationary`."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        activations = self._mesh.activations
        return (*activations.own_dims(x.shape[:-1]),
                activations.own_width(weight.shape[0] * self._mesh.num_rows))

    def gather_dy(self, dy: Tensor) -> Tensor | None:
        return stationary.gather_whole(self._mesh, dy.contiguous())

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, x_slabs: Tensor | None,
                weight_slabs: Tensor | None) -> Tensor:
        y = stationary.input_forward(self._mesh, _flat(x), weight, x.new_empty(self.out_shape(x, weight)), weight_slabs)
        return y if bias is None else y.add_(bias)

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, *, weight_slabs: Tensor | None = None,
                       dy_slabs: Tensor | None = None) -> Tensor:
        dx, _ = stationary.input_gradients(self._mesh, dy.contiguous(), _flat(like), weight, wants_input=True,
                                           wants_weight=False, kept=weight_slabs, gathered=dy_slabs)
        assert dx is not None
        return dx.view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor | None, weight: Tensor, *, x_slabs: Tensor | None = None,
                        dy_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        assert x is not None
        _, dw = stationary.input_gradients(self._mesh, dy.contiguous(), _flat(x), weight, wants_input=False,
                                           wants_weight=True, gathered=dy_slabs, into=into)
        return dw

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, *, weight_slabs: Tensor | None, into: Tensor | None,
                  reuse: bool) -> tuple[Tensor, Tensor | None]:
        dx, dw = stationary.input_gradients(self._mesh, dy.contiguous(), _flat(x), weight, wants_input=True,
                                            wants_weight=True, kept=weight_slabs, into=into, reuse=reuse)
        assert dx is not None
        return dx.view(x.shape), dw


class _Summa(Product):
    """What Optimus' two uses of a weight share: x, W and y are all held in blocks, and nothing gathered is kept."""

    keeps = False

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor, *, weight_slabs: Tensor | None, into: Tensor | None,
                  reuse: bool) -> tuple[Tensor, Tensor | None]:
        dw = self.weight_gradient(dy, x, weight)
        return self._input_gradient(dy, x, weight, out=_flat(x) if reuse else None), dw

    def input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, *, weight_slabs: Tensor | None = None,
                       dy_slabs: Tensor | None = None) -> Tensor:
        return self._input_gradient(dy, like, weight, out=None)

    @abstractmethod
    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """dx in the shape of `like`; out: memory for it."""


class SummaProduct(_Summa):
    """C = AB with B = W^T; its gradients are AB^T and A^TB."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-1], weight.shape[0])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, x_slabs: Tensor | None,
                weight_slabs: Tensor | None) -> Tensor:
        return summa.ab(self._mesh, _flat(x), weight.t(), self._width(x), flip=True, bias=bias
                        ).view(self.out_shape(x, weight))

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return summa.abt(self._mesh, _flat(dy), weight.t(), self._width(like), flip=True, out=out).view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor | None, weight: Tensor, *, x_slabs: Tensor | None = None,
                        dy_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        assert x is not None
        return summa.atb(self._mesh, _flat(x), _flat(dy), self._width(x), flip=True).t()

    def _width(self, x: Tensor) -> int:
        return x.shape[-1] * self._mesh.num_cols


class SummaVocabulary(_Summa):
    """C = AB^T with the token embedding's table as B, of `vocab` rows; its gradients are AB and A^TB.

    own: entries of the vocabulary on this column.
    """

    def __init__(self, mesh: TensorMesh, vocab: int, own: int) -> None:
        super().__init__(mesh)
        self._vocab, self._own = vocab, own

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-1], self._own)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, x_slabs: Tensor | None,
                weight_slabs: Tensor | None) -> Tensor:
        return summa.abt(self._mesh, _flat(x), weight, self._vocab, flip=False).view(self.out_shape(x, weight))

    def _input_gradient(self, dy: Tensor, like: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        return summa.ab(self._mesh, _flat(dy), weight, self._vocab, flip=False).view(like.shape)

    def weight_gradient(self, dy: Tensor, x: Tensor | None, weight: Tensor, *, x_slabs: Tensor | None = None,
                        dy_slabs: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        assert x is not None
        return summa.atb(self._mesh, _flat(dy), _flat(x), self._vocab, flip=False)


def _flat(tensor: Tensor) -> Tensor:
    """[tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])
