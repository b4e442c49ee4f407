"""Linear layers: products between the residual stream and sublayers, onto the vocabulary, and of replicated tensors.

B batch, S sequence, H hidden width, F inner width, V vocabulary, C classes; c columns. The scheme decides the sharding
over columns; see `ranvier.tensor.activations` for the residual stream x_BSH.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.arguments import check_arguments
from ranvier.config.run import TensorParallel
from ranvier.layout import Split
from ranvier.tensor import splittable
from ranvier.tensor.activations import layout_of
from ranvier.tensor.autograd import Function
from ranvier.tensor.deferred_linear import PaddedLinear
from ranvier.tensor.mesh import TensorMesh, exchange, gather_sequence
from ranvier.tensor.split.linear import SplitLinear, SplitVocabularyLinear
from ranvier.tensor.split.products import Product
from ranvier.tensor.split.stationary import InputStationary, OutputStationary
from ranvier.tensor.split.summa import SummaProduct
from ranvier.tensor.splittable import Constraint, Layer, SplitLayer, feature_split


class Linear(Layer, nn.Linear):
    """y = x W^T + b: x_BSH to y_BSF with `stationary="output"`, x_BSF to y_BSH with `stationary="input"`.

    With one row these are Megatron-LM's ColumnParallelLinear and RowParallelLinear.

    stationary: which of the two activations stays on its rank, if the scheme keeps one there: "output" for the first of
        a pair of products (queries, keys and values; H to 4H), "input" for the second.
    units: pieces of the output (input-stationary: of the input) that are never divided, such as heads.
    reuse_input: no other backward needs the input, such as a GELU's output. On a mesh its gradient overwrites it in
        memory unless the weight's gradient is deferred; the backward can then run only once.
    parts: names of outputs that are computed together, such as query, key and value. Each unit has the rows of the
        first part, then those of the next.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *,
                 stationary: Literal["output", "input"], units: int | None = None, reuse_input: bool = False,
                 parts: Sequence[str] = (), dtype: torch.dtype | None = None) -> None:
        check_arguments(Linear.__init__, locals())
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.stationary, self.units, self.reuse_input, self.parts = stationary, units, reuse_input, tuple(parts)
        self.takes, self.gives = ("stream", "inner") if stationary == "output" else ("inner", "stream")

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Output-stationary weights [out / col, in / row], input-stationary ones [out / row, in / col]; all of SUMMA's
        [out / col, in / row]."""
        if self.stationary == "output" or settings.scheme == "summa":
            found = {"weight": Split((("col",), ("row",))), "bias": Split((("col",),), summed=("row",))}
        else:
            found = {"weight": Split((("row",), ("col",))), "bias": feature_split(settings)}
        return found if self.bias is not None else {"weight": found["weight"]}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the units or inner features, and the residual stream's features; rows divide the latter,
        except with SUMMA."""
        inner = self.out_features if self.stationary == "output" else self.in_features
        outer = self.in_features if self.stationary == "output" else self.out_features
        yield "units" if self.units else "features", self.units or inner, "col", mesh.num_cols
        yield from splittable.hidden_constraint(mesh, outer, "features of the residual stream")
        if mesh.settings.scheme != "summa":
            yield "features of the residual stream", outer, "row", mesh.num_rows

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitLinear` with the scheme's product."""
        product: Product
        if mesh.settings.scheme == "summa":
            product = SummaProduct(mesh)
        else:
            product = OutputStationary(mesh) if self.stationary == "output" else InputStationary(mesh)
        return SplitLinear(self, mesh, product, reuse_input=self.reuse_input)


class VocabularyLinear(Layer, PaddedLinear):
    """The projection onto the vocabulary, x_BSH to logits_BSV, without bias.

    On a mesh each column has the logits of its part of the vocabulary, `layout.part(vocab, columns, column)`; the loss
    must be a `NextTokenLoss`, which computes on these parts.
    """

    gives = "vocabulary"

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden, vocab, bias=False, dtype=dtype)

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """[V / col, H / row]; for SUMMA [V / row, H / col] as in Optimus, so that the token embedding can be tied."""
        return {"weight": Split((("row",), ("col",)) if settings.scheme == "summa" else (("col",), ("row",)))}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns and rows divide the features; every column and row needs a part of the vocabulary."""
        yield from splittable.hidden_constraint(mesh, self.in_features, "features of the residual stream")
        if mesh.settings.scheme != "summa":
            yield "features of the residual stream", self.in_features, "row", mesh.num_rows
        yield from splittable.vocabulary_constraints(self.out_features, mesh)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitVocabularyLinear`."""
        return SplitVocabularyLinear(self, mesh, self.out_features)


class ClassifierHead(Layer, nn.Linear):
    """Scores of one token, x_BSH to [B, C], or of each token, to [B, S, C]; replicated over columns.

    token: the token's place in the sequence, counted from the end if negative; None for each token.
    """

    gives = "whole"

    def __init__(self, hidden: int, classes: int, bias: bool = True, *, token: int | None = 0,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden, classes, bias, dtype=dtype)
        self.token = token

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """The weight [C, H / col] if the residual stream's features are sharded, else [C, H]."""
        features = feature_split(settings)
        # Every column computes the gradients of all scores, and from them the bias gradient of its row. With a sharded
        # sequence and scores of each token, a column has the gradients of its own tokens only.
        sharded = self.token is None and layout_of(settings) == "sequence"
        summed = features.summed if sharded else tuple(axis for axis in features.summed if axis == "row")
        found = {"weight": Split(((), *features.dims), summed)}
        return found | ({"bias": Split(((),), summed)} if self.bias is not None else {})

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features if they are sharded."""
        return splittable.hidden_constraint(mesh, self.in_features)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitClassifierHead`."""
        return SplitClassifierHead(self, mesh, self.token)

    def forward(self, x: Tensor) -> Tensor:
        """x_BSH to [B, C], or to [B, S, C] if `token` is None."""
        return functional.linear(x if self.token is None else x[:, self.token], self.weight, self.bias)


class ReplicatedLinear(Layer, nn.Linear):
    """y = x W^T + b for a replicated x, such as the output of a `ClassifierHead`; y is replicated too."""

    takes = gives = "whole"

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Replicated; each row has the gradient of its samples."""
        found = {"weight": Split(((), ()), summed=("row",))}
        return found | ({"bias": Split(((),), summed=("row",))} if self.bias is not None else {})


class SplitClassifierHead(SplitLayer):
    """A `ClassifierHead` on the mesh, of one token or (None) of each."""

    def __init__(self, layer: Layer, mesh: TensorMesh, token: int | None) -> None:
        super().__init__(layer, mesh)
        self.token = token

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of x_BSH to [B, C] or [B, S, C], the same on every column."""
        match self.mesh.activations.name, self.token:
            case "whole", token:
                return functional.linear(x if token is None else x[:, token], self.weight, self.bias)
            case "sequence", None:
                return _TokensOfColumns.apply(functional.linear(x, self.weight, self.bias), self.mesh)
            case "sequence", token:
                return functional.linear(_TokenOfColumn.apply(x, token, self.mesh), self.weight, self.bias)
            case _, token:
                x = x if token is None else x[:, token]
        dtype, total = x.dtype, self.mesh.sum_dtype(x.dtype)
        own = functional.linear(x.to(total), self.weight.to(total))
        scores = exchange(own, self.mesh, "features", "none")
        return (scores if self.bias is None else scores + self.bias).to(dtype)


class _TokenOfColumn(Function):
    """One token of every sequence, broadcast from the column that has it: [B, S/c, H] to [B, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: int, mesh: TensorMesh) -> Tensor:
        length = mesh.num_cols * x.shape[1]
        if not -length <= token < length:
            raise IndexError(f"token {token} is out of range of a sequence of {length}")
        token %= length
        column, ctx.place = divmod(token, x.shape[1])
        ctx.here, ctx.shape = column == mesh.col, x.shape
        found = x[:, ctx.place].contiguous() if ctx.here else x.new_empty(x.shape[0], x.shape[2])
        mesh.over_cols.broadcast(found, column).wait()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = dy.new_zeros(ctx.shape)
        if ctx.here:
            dx[:, ctx.place] = dy
        return dx, None, None


class _TokensOfColumns(Function):
    """All-gather of the sequence: [B, S/c, C] to [B, S, C]. Every column has the gradient of all tokens, and takes the
    gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: TensorMesh) -> Tensor:
        ctx.mesh, ctx.length = mesh, x.shape[1]
        return gather_sequence(x, mesh).data  # not a view, which a block could not change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy[:, ctx.mesh.col * ctx.length:(ctx.mesh.col + 1) * ctx.length], None
