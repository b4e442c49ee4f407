"""The layers that a model is written with, and what each becomes on a row x col mesh.

On one rank they are torch's own: `Linear` is an nn.Linear with a word on how it may be split. `split_layers` replaces
those of a block by split ones, which hold their part of the parameters; the model's code does not change, and does not
know the scheme. It follows three rules:

    the residual stream is what `Linear(stationary="input")`, embeddings and norms return; it may be cut in any dim
    what lies between an output- and an input-stationary Linear has all tokens of a row, and a part of the features
    sizes are read from tensors, or left to unflatten(-1, ...): never written down

On several columns each activation carries its layout, and what breaks a rule is refused by name: an operation either
gives what it gives on one rank, gradients included, or raises a ModelError (`ranvier.tensor.column_tensor`).
`ranvier.testing.check_split` compares a model with the unsplit one. A layer of your own takes part if it is
`Splittable`.

    class MLP(nn.Module):
        def __init__(self, hidden):
            self.norm = tensor.LayerNorm(hidden)
            self.fc1 = tensor.Linear(hidden, 4 * hidden, stationary="output")
            self.fc2 = tensor.Linear(4 * hidden, hidden, stationary="input")

        def forward(self, x):
            return x + self.fc2(gelu(self.fc1(self.norm(x))))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier import keyed_random
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.activations import layout_of
from ranvier.tensor.column_tensor import layout_of_tensor, mark, plain

if TYPE_CHECKING:
    from ranvier.run import TensorParallel as Settings
    from ranvier.tensor.mesh import TensorMesh


@runtime_checkable
class Splittable(Protocol):
    """A module whose parameters can lie on a mesh.

    What takes its place is called with this rank's part as a plain tensor, and returns one. A class that does not keep
    shape and layout of what it is given has the attributes `takes` and `gives`: "stream", "inner" or "whole" (see
    `ranvier.tensor.boundaries`).
    """

    def splits(self, settings: Settings) -> dict[str, Split]:
        """Name of each of its own parameters -> how it lies on a mesh."""

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        """What has to be divided: (what, its size, axis, that axis' size); see `split_layers`."""

    def split(self, mesh: TensorMesh) -> nn.Module:
        """What takes its place, with this rank's part of each parameter under the same name."""


Over = Literal["stream", "inner", "heads"]
"""What a norm is of: each token's features in the residual stream, or of what lies between two Linears; or a head's."""


class _Layer:
    """What the layers here have in common. takes, gives: layouts of what goes in and comes out on several columns."""

    takes: str = "stream"
    gives: str = "stream"

    def split(self, mesh: TensorMesh) -> nn.Module:
        from ranvier.tensor.split import split_layer  # which is written for these layers

        return split_layer(self, mesh)


class Linear(_Layer, nn.Linear):
    """y = x W^T + b.

    stationary: which of the two activations stays on its rank, where the scheme lets one stay: "output" for the first
        of a pair of products (queries, keys and values; h to 4h), "input" for the second.
    units: pieces of the output (input-stationary: of the input) that are never cut, such as heads.
    reuse_input: nobody else needs the input in a backward, such as a GELU's output; on a mesh its gradient takes its
        place in memory, where the weight's gradient is not postponed. The backward runs once then.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *,
                 stationary: Literal["output", "input"], units: int | None = None, reuse_input: bool = False,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.stationary, self.units, self.reuse_input = stationary, units, reuse_input
        self.takes, self.gives = ("stream", "inner") if stationary == "output" else ("inner", "stream")

    def splits(self, settings: Settings) -> dict[str, Split]:
        """Parameter's name -> how it lies on the mesh."""
        layout = layout_of(settings.scheme, settings.sequence_sharding)
        if self.stationary == "output" or settings.scheme == "summa":
            found = {"weight": Split((("col",), ("row",))), "bias": Split((("col",),), summed=("row",))}
        else:
            found = {"weight": Split((("row",), ("col",))), "bias": _feature_split(layout)}
        return found if self.bias is not None else {"weight": found["weight"]}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        """What does not divide: (what, its size, axis, that axis' size)."""
        layout, summa = mesh.activations.name, mesh.settings.scheme == "summa"
        inner = self.out_features if self.stationary == "output" else self.in_features
        outer = self.in_features if self.stationary == "output" else self.out_features
        yield "units" if self.units else "features", self.units or inner, "col", mesh.num_cols
        if layout == "hidden":
            yield "features of the residual stream", outer, "col", mesh.num_cols
        if not summa:
            yield "features of the residual stream", outer, "row", mesh.num_rows


class VocabularyLinear(_Layer, nn.Linear):
    """The projection onto the vocabulary, without bias. Columns have logits of their part of it:
    `layout.part(vocab, columns, column)`; the loss must be a `NextTokenLoss`, which knows."""

    gives = "vocabulary"

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden, vocab, bias=False, dtype=dtype)

    def splits(self, settings: Settings) -> dict[str, Split]:
        """As for `Linear`; for summa as the paper has it, where the table of embeddings is used again."""
        return {"weight": Split((("row",), ("col",)) if settings.scheme == "summa" else (("col",), ("row",)))}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features of the residual stream", self.in_features, "col", mesh.num_cols
        if mesh.settings.scheme != "summa":
            yield "features of the residual stream", self.in_features, "row", mesh.num_rows
        yield from _vocabulary(self.out_features, mesh)


class Embedding(_Layer, nn.Embedding):
    """Token embedding: ids [B, S] int64 to the residual stream."""

    takes = "ids"

    def splits(self, settings: Settings) -> dict[str, Split]:
        dims = {"stationary": ((), ("col", "row")), "summa": (("row",), ("col",)), "megatron": (("col",), ())}
        return {"weight": Split(dims[settings.scheme])}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features", self.embedding_dim, "col", mesh.num_cols
        if mesh.settings.scheme == "stationary":
            yield f"features of one of {mesh.num_cols} columns", self.embedding_dim // mesh.num_cols, "row", \
                mesh.num_rows
        else:
            yield from _vocabulary(self.num_embeddings, mesh)


class PositionEmbedding(_Layer, nn.Embedding):
    """Learned positions: the embedding of the first `length` positions, as the residual stream has them."""

    takes = "ids"

    def splits(self, settings: Settings) -> dict[str, Split]:
        features = _feature_split(layout_of(settings.scheme, settings.sequence_sharding))
        return {"weight": Split(((), *features.dims), features.summed)}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features", self.embedding_dim, "col", mesh.num_cols

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class SmallEmbedding(_Layer, nn.Embedding):
    """An embedding of few kinds, such as which text a token is of: kinds [B, S] int64 to the residual stream. Every
    rank has all kinds, of the features that are its own."""

    takes = "ids"

    def splits(self, settings: Settings) -> dict[str, Split]:
        features = _feature_split(layout_of(settings.scheme, settings.sequence_sharding))
        return {"weight": Split(((), *features.dims), features.summed)}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features", self.embedding_dim, "col", mesh.num_cols


class PatchEmbedding(_Layer, nn.Module):
    """Projected patches behind a learnt first token: patches [B, S - 1, F], whole on every rank of a row, to the
    residual stream. Patches are inputs of a model and get no gradient.

    length: S, where it is known beforehand, so that a mesh that cannot share it is refused before it runs.
    """

    takes = "whole"

    def __init__(self, in_features: int, hidden: int, *, length: int | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden, self.length = hidden, length
        self.weight = nn.Parameter(torch.empty(hidden, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=dtype))
        self.first = nn.Parameter(torch.empty(hidden, dtype=dtype))
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.trunc_normal_(self.first, std=0.02)

    def splits(self, settings: Settings) -> dict[str, Split]:
        features = _feature_split(layout_of(settings.scheme, settings.sequence_sharding))
        return {"weight": Split((*features.dims, ()), features.summed), "bias": features, "first": features}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features", self.hidden, "col", mesh.num_cols
        if mesh.activations.name == "sequence" and self.length is not None:
            yield "tokens of an image, the first one included,", self.length, "col", mesh.num_cols

    def forward(self, patches: Tensor) -> Tensor:
        first = self.first.expand(len(patches), 1, -1)
        return torch.cat([first, functional.linear(patches.detach(), self.weight, self.bias)], dim=1)


class _Norm(_Layer):
    """What norms over the last dim have in common."""

    def _lies_over(self, over: Over) -> None:
        if over not in ("stream", "inner", "heads"):
            raise ModelError("must be stream, inner or heads", where=f"over of {type(self).__name__}", value=over,
                             remedy="Say what the norm is of: the residual stream, what lies between two Linears, or "
                                    "the features of a head.")
        self.over = self.takes = self.gives = over

    def splits(self, settings: Settings) -> dict[str, Split]:
        layout = layout_of(settings.scheme, settings.sequence_sharding)
        split = {"stream": _feature_split(layout), "inner": Split((("col",),), summed=("row",)),
                 "heads": Split(((),), summed=("row", "col"))}[self.over]
        return {name: split for name, parameter in self._parameters.items() if parameter is not None}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if self.over == "inner" or (self.over == "stream" and mesh.activations.name == "hidden"):
            yield "features", self.normalized_shape[-1], "col", mesh.num_cols


class LayerNorm(_Norm, nn.LayerNorm):
    """Layer norm over the last dim. over: of the residual stream, of "inner" activations (all features between an
    output- and an input-stationary Linear), or of the features of each of the "heads" ([..., heads, ..., width])."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, *, over: Over = "stream", dtype: torch.dtype | None = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, dtype=dtype)
        self._lies_over(over)


class RMSNorm(_Norm, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) over the last dim, times a weight (Zhang and Sennrich, 2019). over: as of `LayerNorm`;
    a norm of queries and keys is over "inner" where it is over all heads together, over "heads" where each has its
    own."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-6, elementwise_affine: bool = True, *,
                 over: Over = "stream", dtype: torch.dtype | None = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, dtype=dtype)
        self._lies_over(over)


class Dropout(_Layer, nn.Module):
    """Dropout of the residual stream, or of what is added to it; masks are keyed by place, the same on any mesh.

    whole: its input is one that every rank of a row has all of, such as what a `TokenLinear` returns.
    """

    def __init__(self, probability: float, *, whole: bool = False) -> None:
        super().__init__()
        self.probability, self.whole = probability, whole
        self.takes = self.gives = "whole" if whole else "stream"

    def splits(self, settings: Settings) -> dict[str, Split]:
        return {}

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        yield from ()

    def forward(self, x: Tensor) -> Tensor:
        return keyed_random.dropout(x, self.probability, self.training)


class TokenLinear(_Layer, nn.Linear):
    """A head on one token, [B, S, H] to [B, classes], or on each, to [B, S, classes]; whole on every rank of a row.

    token: its place in the sequence; None for each.
    """

    gives = "whole"

    def __init__(self, hidden: int, classes: int, bias: bool = True, *, token: int | None = 0,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden, classes, bias, dtype=dtype)
        self.token = token

    def splits(self, settings: Settings) -> dict[str, Split]:
        layout = layout_of(settings.scheme, settings.sequence_sharding)
        features = _feature_split(layout)
        # A column sees the gradients of all scores, and with them the bias' of its row; but where columns share the
        # sequence and each token has scores, those of its own tokens.
        shares = self.token is None and layout == "sequence"
        summed = features.summed if shares else tuple(axis for axis in features.summed if axis == "row")
        found = {"weight": Split(((), *features.dims), summed)}
        return found | ({"bias": Split(((),), summed)} if self.bias is not None else {})

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        if mesh.activations.name == "hidden":
            yield "features", self.in_features, "col", mesh.num_cols

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x if self.token is None else x[:, self.token], self.weight, self.bias)


class WholeLinear(_Layer, nn.Linear):
    """y = x W^T + b of what every rank of a row has all of, such as what a `TokenLinear` returns; so it is with y."""

    takes = gives = "whole"

    def splits(self, settings: Settings) -> dict[str, Split]:
        found = {"weight": Split(((), ()), summed=("row",))}
        return found | ({"bias": Split(((),), summed=("row",))} if self.bias is not None else {})

    def cannot(self, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
        yield from ()


def gelu(x: Tensor, *, approximate: Literal["tanh", "none"] = "tanh") -> Tensor:
    """GELU, by its tanh approximation or exact ("none"), of a tensor that nobody else needs in a backward, such as a
    product's output.

    Its gradient takes x's place in memory (Xu et al., 2021, section 3.2.3, method 1), so the backward runs once;
    autograd raises a RuntimeError where someone else would see the changed values.
    """
    y, layout = _GELU.apply(plain(x), approximate), layout_of_tensor(x)
    return y if layout is None else mark(y, layout)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return functional.gelu(x, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        x, = ctx.saved_tensors
        return torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=ctx.approximate, grad_input=x), None


Layer = (Linear | VocabularyLinear | Embedding | PositionEmbedding | SmallEmbedding | PatchEmbedding | LayerNorm
         | RMSNorm | Dropout | TokenLinear | WholeLinear)


def _feature_split(layout: str) -> Split:
    """How a parameter of one value for each feature of the residual stream lies on the mesh."""
    return {"hidden": Split((("col",),), summed=("row",)), "sequence": Split(((),), summed=("col",)),
            "whole": Split(((),))}[layout]


def _vocabulary(size: int, mesh: TensorMesh) -> Iterator[tuple[str, int, str, int]]:
    """A vocabulary may be cut unevenly, but everyone needs a part."""
    for axis, count in (("col", mesh.num_cols), ("row", mesh.num_rows)):
        if size < count:
            yield "vocabulary", size, axis, count


def check_plain(layer: Splittable, where: str) -> None:
    """ModelError for a layer of ours with more to it than its split form knows of."""
    if not isinstance(layer, _Layer) or type(layer).split is not _Layer.split:
        return
    ours = next(kind for kind in type(layer).__mro__ if kind.__module__ == _Layer.__module__)
    more = {"a forward of its own": type(layer).forward is not ours.forward,
            "hooks": bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
                          or layer._backward_pre_hooks),
            "max_norm": getattr(layer, "max_norm", None) is not None,
            "scale_grad_by_freq": getattr(layer, "scale_grad_by_freq", False),
            "several normalized dims": len(getattr(layer, "normalized_shape", (1,))) > 1}
    for what, has in more.items():
        if has:
            raise ModelError(f"has {what}, which would be lost on rows and columns", where=where,
                             value=type(layer).__name__,
                             remedy="Leave it out, or give the layer a split(mesh) of its own.")


def block_splits(block: str, module: nn.Module, settings: Settings) -> dict[str, Split]:
    """Parameter's name within the block -> how it lies on a mesh. ModelError for parameters that no layer splits."""
    found: dict[str, Split] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, Splittable):
            check_plain(layer, f"block {block}.{path}" if path else f"block {block}")
            for name, split in layer.splits(settings).items():
                found[f"{path}.{name}" if path else name] = split
    for name, _ in module.named_parameters():
        if name not in found:
            raise ModelError("belongs to a layer that cannot be split over rows and columns",
                             where=f"parameter {block}.{name}", value=type(module).__name__,
                             remedy="Use the layers of ranvier.tensor in its place, or set --mesh.row 1 --mesh.col 1.")
    return found
