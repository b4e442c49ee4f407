"""Dropout whose masks do not depend on the mesh: on one rank, and on a rank's part of the residual stream."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ranvier import keyed_random
from ranvier.arguments import check_arguments
from ranvier.tensor import keyed_dropout
from ranvier.tensor.autograd import Function
from ranvier.tensor.fused import Fused, current
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import Layer, SplitLayer


class Dropout(Layer):
    """Dropout of the residual stream, or of a tensor added to it. Masks are keyed by place: the same on any mesh.

    probability: that an element is zeroed. whole: the input is replicated, such as the output of a `ClassifierHead`.
    """

    def __init__(self, probability: Annotated[float, Ge(0), Le(1)], *, whole: bool = False) -> None:
        check_arguments(Dropout.__init__, locals())
        super().__init__()
        self.probability, self.whole = probability, whole
        self.takes = self.gives = "whole" if whole else "stream"

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitDropout`, or for a replicated input the same layer."""
        return super().split(mesh) if self.whole else SplitDropout(self, mesh, self.probability)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x of any shape [B, ...], with elements zeroed and the others scaled while training.

        onto: a tensor of the same shape to which the result is added, such as the residual stream; if chains are
        compiled (`tensor/fused`), one kernel does both.
        """
        y = keyed_dropout.dropout(x, self.probability, self.training)
        return y if onto is None else onto + y


class SplitDropout(SplitLayer):
    """Drops the same elements as the unsplit layer: masks are keyed by the sample and the place in it."""

    def __init__(self, layer: Layer, mesh: TensorMesh, probability: float) -> None:
        super().__init__(layer, mesh)
        self._probability = probability

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x is this rank's part of x_BSH; onto is as in the unsplit layer."""
        if not (self.training and self._probability):
            return x if onto is None else onto + x
        sizes = list(x.shape[1:])
        start, full = [0] * len(sizes), list(sizes)
        for dim in self.mesh.activations.cut_dims:
            place = dim - 2  # of (S, H)
            start[place], full[place] = self.mesh.col * sizes[place], self.mesh.num_cols * sizes[place]
        fused = current()
        if x.is_meta:  # without values, one pass, whose backward computes the mask again
            return fused(_add_undropped, x, onto)
        if fused.compiles:
            keys = keyed_random.next_sample_keys(x.shape[0], x.device)
            return _Dropped.apply(x, onto, (keys, self._probability, tuple(start), tuple(full)), fused)
        y = keyed_dropout.dropout(x, self._probability, training=True, start=start, full_shape=full)
        return y if onto is None else onto + y


class _Dropped(Function):
    """Dropout whose backward recomputes the mask from the samples' keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, masked: tuple[Any, ...], fused: Fused) -> Tensor:
        ctx.masked, ctx.fused = masked, fused
        return fused(_drop, x, onto, *masked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        wants_input, wants_onto = ctx.needs_input_grad[:2]
        dx = ctx.fused(_drop, dy, None, *ctx.masked) if wants_input else None
        return dx, dy if wants_onto else None, None, None


def _drop(x: Tensor, onto: Tensor | None, keys: Tensor, probability: float, start: tuple[int, ...],
          full_shape: tuple[int, ...]) -> Tensor:
    y = keyed_random.dropped(x, keys, probability, start, full_shape)
    return y if onto is None else onto + y


def _add_undropped(x: Tensor, onto: Tensor | None) -> Tensor:
    y = 2.0 * x
    return y if onto is None else onto + y
