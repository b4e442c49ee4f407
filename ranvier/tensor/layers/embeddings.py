"""Embeddings: of tokens, positions, token types and patches.

B batch, S sequence, H hidden width, V vocabulary, F features of a patch. All return the residual stream x_BSH, but for
`BiasTable`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.config.run import TensorParallel
from ranvier.layout import Split, TensorAxis
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.embeddings import (
    HiddenEmbedding,
    SplitPatchEmbedding,
    SplitPositionEmbedding,
    SplitTokenTypeEmbedding,
    SummaEmbedding,
    VocabularyEmbedding,
)
from ranvier.tensor.split.own_part import with_own_parts
from ranvier.tensor.splittable import Constraint, Layer, feature_split, hidden_constraint, vocabulary_constraints


class Embedding(Layer, nn.Embedding):
    """Token embedding: ids_BS int64 to x_BSH."""

    takes = "ids"

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """The table: stationary [V, H / (col row)], Optimus [V / row, H / col], Megatron-LM [V / col, H]."""
        dims: dict[str, tuple[tuple[TensorAxis, ...], ...]] = {
            "stationary": ((), ("col", "row")), "summa": (("row",), ("col",)), "megatron": (("col",), ())}
        return {"weight": Split(dims[settings.scheme])}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns, and for stationary rows too, divide the features; else each needs a part of the vocabulary."""
        if mesh.settings.scheme == "stationary":
            yield "features", self.embedding_dim, "col", mesh.num_cols
            yield f"features of one of {mesh.num_cols} columns", self.embedding_dim // mesh.num_cols, "row", \
                mesh.num_rows
        else:
            yield from hidden_constraint(mesh, self.embedding_dim)
            yield from vocabulary_constraints(self.num_embeddings, mesh)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The scheme's embedding."""
        vocab, padding = self.num_embeddings, self.padding_idx
        match mesh.settings.scheme:
            case "stationary":
                return HiddenEmbedding(self, mesh, padding)
            case "summa":
                return SummaEmbedding(self, mesh, vocab, padding)
            case "megatron":
                return VocabularyEmbedding(self, mesh, vocab, padding)


class _FeatureEmbedding(Layer, nn.Embedding):
    """An embedding whose table is small: every rank has all its entries, of the features that the rank has."""

    takes = "ids"

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """[entries, H / col] where the residual stream's features are sharded, else [entries, H]."""
        features = feature_split(settings)
        return {"weight": Split(((), *features.dims), features.summed)}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features, where they are sharded."""
        return hidden_constraint(mesh, self.embedding_dim)


class PositionEmbedding(_FeatureEmbedding):
    """Learned positions: a length S to the embedding [S, H] of the first S positions, or positions_BS int64, where they
    restart within a sequence, to x_BSH."""

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitPositionEmbedding`."""
        return SplitPositionEmbedding(self, mesh)

    def forward(self, positions: int | Tensor) -> Tensor:
        """[length, H] of a length, [B, S, H] of positions_BS."""
        return self.weight[:positions] if isinstance(positions, int) else functional.embedding(positions, self.weight)


class TokenTypeEmbedding(_FeatureEmbedding):
    """An embedding of few kinds, such as which segment a token belongs to (BERT): types_BS int64 to x_BSH."""

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitTokenTypeEmbedding`."""
        return SplitTokenTypeEmbedding(self, mesh)


class BiasTable(Layer, nn.Embedding):
    """A learned bias of scores for each head and kind of position, such as the distance between two tokens (T5).

        bias = self.table(buckets).permute(2, 0, 1)     # buckets [S, S] int64 -> [heads, S, S]
        scores = scores + bias                          # [B, heads, S, S], of Linears with units=heads

    Indices must not depend on the column.
    """

    takes = "ids"
    gives = "inner"

    def __init__(self, entries: int, heads: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(entries, heads, dtype=dtype)

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """[entries, heads / col]; each row has the gradient of its samples."""
        return {"weight": Split(((), ("col",)), summed=("row",))}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the heads."""
        yield "heads", self.embedding_dim, "col", mesh.num_cols

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The same layer with this column's heads."""
        return with_own_parts(self, mesh)


class PatchEmbedding(Layer):
    """Projected patches behind a learned first (class) token: patches [B, S - 1, F], replicated, to x_BSH.

    Patches are inputs of a model and get no gradient.

    length: S where it is known, so that a mesh whose columns cannot divide it is refused before it runs.
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

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """The weight [H / col, F] where the residual stream's features are sharded, else [H, F]; others alike."""
        features = feature_split(settings)
        return {"weight": Split((*features.dims, ()), features.summed), "bias": features, "first": features}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features or the sequence, whichever is sharded."""
        yield from hidden_constraint(mesh, self.hidden)
        if mesh.activations.name == "sequence" and self.length is not None:
            yield "tokens of an image, the first one included,", self.length, "col", mesh.num_cols

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitPatchEmbedding`."""
        return SplitPatchEmbedding(self, mesh)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, S - 1, F] to x_BSH."""
        first = self.first.expand(len(patches), 1, -1)
        return torch.cat([first, functional.linear(patches.detach(), self.weight, self.bias)], dim=1)
