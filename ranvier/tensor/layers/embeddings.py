"""Embeddings: of tokens, positions, token types and patches. Each scheme shards the token table in its own way.

B batch, S sequence, H hidden width, V vocabulary, F features of a patch. All return the residual stream x_BSH, except
`BiasTable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.config.run import TensorParallel
from ranvier.layout import Split, TensorAxis, part
from ranvier.precision import wide
from ranvier.tensor import splittable
from ranvier.tensor.activations import Panel
from ranvier.tensor.autograd import Function
from ranvier.tensor.mesh import TensorMesh, transpose_shards
from ranvier.tensor.split.stationary import scatter
from ranvier.tensor.splittable import Constraint, Layer, SplitLayer, feature_split


class Embedding(Layer, nn.Embedding):
    """Token embedding: ids_BS int64 to x_BSH."""

    takes = "ids"

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """The table: stationary [V, H / (col row)], Optimus [V / row, H / col], Megatron-LM [V / col, H]."""
        dims: dict[str, tuple[tuple[TensorAxis, ...], ...]] = {
            "stationary": ((), ("col", "row")), "summa": (("row",), ("col",)), "megatron": (("col",), ())}
        return {"weight": Split(dims[settings.scheme])}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns, and stationary rows, divide the features; otherwise each needs a part of the vocabulary."""
        if mesh.settings.scheme == "stationary":
            yield "features", self.embedding_dim, "col", mesh.num_cols
            yield f"features of one of {mesh.num_cols} columns", self.embedding_dim // mesh.num_cols, "row", \
                mesh.num_rows
        else:
            yield from splittable.hidden_constraint(mesh, self.embedding_dim)
            yield from splittable.vocabulary_constraints(self.num_embeddings, mesh)

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
    """An embedding whose table is small: every rank has all its entries, for the features of that rank."""

    takes = "ids"

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """[entries, H / col] if the residual stream's features are sharded, else [entries, H]."""
        features = feature_split(settings)
        return {"weight": Split(((), *features.dims), features.summed)}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features if they are sharded."""
        return splittable.hidden_constraint(mesh, self.embedding_dim)

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitFeatureEmbedding`."""
        return SplitFeatureEmbedding(self, mesh)


class PositionEmbedding(_FeatureEmbedding):
    """Learned positions: a length S to the embedding [S, H] of the first S positions, or positions_BS int64, which may
    restart within a sequence, to x_BSH."""

    def forward(self, positions: int | Tensor) -> Tensor:
        """[length, H] for a length, [B, S, H] for positions_BS."""
        return self.weight[:positions] if isinstance(positions, int) else functional.embedding(positions, self.weight)


class TokenTypeEmbedding(_FeatureEmbedding):
    """An embedding of a few token types, such as the segment of a token (BERT): types_BS int64 to x_BSH."""


class BiasTable(Layer, nn.Embedding):
    """A learned bias of attention scores for each head and bucket, such as the distance between two tokens (T5).

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


class PatchEmbedding(Layer):
    """Projected patches after a learned first (class) token: patches [B, S - 1, F], replicated, to x_BSH.

    Patches are inputs of a model and get no gradient.

    length: S if it is known, so that a mesh whose columns do not divide it is refused before it runs.
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
        """The weight [H / col, F] if the residual stream's features are sharded, else [H, F]; the others likewise."""
        features = feature_split(settings)
        return {"weight": Split((*features.dims, ()), features.summed), "bias": features, "first": features}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterator[Constraint]:
        """Columns divide the features or the sequence, whichever is sharded."""
        yield from splittable.hidden_constraint(mesh, self.hidden)
        if mesh.activations.name == "sequence" and self.length is not None:
            yield "tokens of an image, the first one included,", self.length, "col", mesh.num_cols

    def split(self, mesh: TensorMesh) -> nn.Module:
        """A `SplitPatchEmbedding`."""
        return SplitPatchEmbedding(self, mesh)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, S - 1, F] to x_BSH."""
        first = self.first.expand(len(patches), 1, -1)
        return torch.cat([first, functional.linear(patches.detach(), self.weight, self.bias)], dim=1)


def _check_ids(ids: Tensor, vocab: int) -> None:
    """Raise an IndexError, like torch's embedding, for ids outside the vocabulary. Not on CUDA, where reading the ids
    would wait for the device."""
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise IndexError(f"a token is out of range of the vocabulary of {vocab}: {int(ids.min())} to {int(ids.max())}")


class HiddenEmbedding(SplitLayer):
    """Each rank has a part of every token's features; embeddings are sent once, in an all-to-all along the column, and
    if the sequence is sharded in another all-to-all along the row.

    The table is sharded as [V, H / (col, row)]: the shards of a column's ranks together are the column's features.
    """

    def __init__(self, layer: Layer, mesh: TensorMesh, padding: int | None) -> None:
        super().__init__(layer, mesh)
        self._padding = padding

    def forward(self, ids: Tensor) -> Tensor:
        """ids_BS to this rank's part of x_BSH. Rows may have different numbers of tokens; an all-to-all needs equal
        numbers, so ids are padded."""
        x = self._own_features(ids)
        if self.mesh.activations.name != "sequence" or self.mesh.num_cols == 1:
            return x
        self.mesh.activations.own_dims(ids.shape)  # refuses a sequence that the columns cannot share
        return transpose_shards(x, 1, 2, self.mesh)

    def _own_features(self, ids: Tensor) -> Tensor:
        """[B, S, H/c]."""
        counts = self.mesh.over_rows.gather_number(ids.numel())
        if len(set(counts)) == 1:
            return _AllToAllEmbedding.apply(self.weight, ids, self, self._padding)
        padded = functional.pad(ids.reshape(-1), (0, max(counts) - ids.numel()))
        found = _AllToAllEmbedding.apply(self.weight, padded, self, self._padding)
        return found[:ids.numel()].view(*ids.shape, found.shape[-1])


class _AllToAllEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, layer: SplitLayer, padding: int | None) -> Tensor:
        mesh, rows = layer.mesh, layer.mesh.num_rows
        everyones = ids.reshape(1, -1)
        if rows > 1:
            everyones = ids.new_empty(rows, ids.numel())
            mesh.over_rows.all_gather(everyones, ids.reshape(-1)).wait()
        ctx.save_for_backward(everyones)
        ctx.layer, ctx.shape, ctx.padding = layer, table.shape, -1 if padding is None else padding
        found = functional.embedding(everyones, table)  # [rows, tokens, H / (c r)]
        if rows > 1:
            received = torch.empty_like(found)
            mesh.over_rows.all_to_all(received, found).wait()
            found = received
        return found.movedim(0, 1).reshape(*ids.shape, rows * table.shape[1]).data  # as in `_Multiply`

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        everyones, = ctx.saved_tensors
        ctx.layer.begins("backward")
        mesh, width = ctx.layer.mesh, ctx.shape[1]
        rows = mesh.num_rows
        parts = dx.reshape(-1, rows, width).movedim(1, 0).contiguous()
        if rows > 1:
            received = torch.empty_like(parts)
            mesh.over_rows.all_to_all(received, parts).wait()
            parts = received
        table = torch.ops.aten.embedding_dense_backward(parts, everyones, ctx.shape[0], ctx.padding, False)
        return table, None, None, None


class SummaEmbedding(SplitLayer):
    """Optimus' embedding (Xu et al., 2021): blocks [V_i, H_j] of the table are broadcast down column j,
    one after the other."""

    def __init__(self, layer: Layer, mesh: TensorMesh, vocab: int, padding: int | None) -> None:
        super().__init__(layer, mesh)
        self._vocab, self._padding = vocab, padding

    def forward(self, ids: Tensor) -> Tensor:
        """ids_BS to [B, S, H/c]."""
        _check_ids(ids, self._vocab)
        return _BroadcastEmbedding.apply(self.weight, ids, self, self._vocab, self._padding)


class _BroadcastEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, layer: SplitLayer, vocab: int, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        mesh, ctx.layer, ctx.vocab, ctx.padding = layer.mesh, layer, vocab, padding
        x = table.new_zeros(*ids.shape, table.shape[1])
        for row in range(mesh.num_rows):
            start, stop = part(vocab, mesh.num_rows, row)
            block = table if row == mesh.row else mesh.workspace.take("table", (stop - start, table.shape[1]), table)
            if mesh.num_rows > 1:
                mesh.over_rows.broadcast(block, row).wait()
            x += _rows_of(block, ids, start)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        ctx.layer.begins("backward")
        ids, = ctx.saved_tensors
        mesh, own = ctx.layer.mesh, None
        for row in range(mesh.num_rows):
            start, stop = part(ctx.vocab, mesh.num_rows, row)
            gradient = _table_gradient(dx, ids, start, stop, ctx.padding)
            if mesh.num_rows > 1:
                mesh.over_rows.reduce(gradient, row).wait()
            if row == mesh.row:
                own = gradient.to(dx.dtype)
        return own, None, None, None, None


def _rows_of(block: Tensor, ids: Tensor, start: int) -> Tensor:
    """Embeddings of the ids that are in `block`, whose first entry is `start`; zero for others."""
    inside = (ids >= start) & (ids < start + len(block))
    return functional.embedding((ids - start).where(inside, 0), block) * inside.unsqueeze(-1)


def _table_gradient(dx: Tensor, ids: Tensor, start: int, stop: int, padding: int | None) -> Tensor:
    """Gradient of the entries start..stop of a table, in fp32 at least; the token `padding` has none."""
    inside = (ids >= start) & (ids < stop)
    if padding is not None:
        inside &= ids != padding
    dx = dx.to(wide(dx.dtype))
    gradient = dx.new_zeros(stop - start, dx.shape[-1])
    return gradient.index_add_(0, (ids - start).where(inside, 0).flatten(),
                               (dx * inside.unsqueeze(-1)).reshape(-1, dx.shape[-1]))


class VocabularyEmbedding(SplitLayer):
    """Megatron-LM's VocabParallelEmbedding: columns have parts of the vocabulary, and their partial embeddings are
    summed into the layout of the residual stream."""

    def __init__(self, layer: Layer, mesh: TensorMesh, vocab: int, padding: int | None) -> None:
        super().__init__(layer, mesh)
        self._vocab = vocab
        self._places = (*part(vocab, mesh.num_cols, mesh.col), padding)

    def forward(self, ids: Tensor) -> Tensor:
        """ids_BS to this rank's part of x_BSH."""
        _check_ids(ids, self._vocab)
        return _SumEmbedding.apply(self.weight, ids, self.mesh, self._places)


class _SumEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, mesh: TensorMesh, places: tuple[int, int, int | None]) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.mesh, ctx.places = mesh, places
        out = table.new_empty(*mesh.activations.own_dims(ids.shape), table.shape[1])
        rows = _rows_of(table, ids.flatten(), places[0])

        def fill(panel: Panel, slabs: Tensor) -> None:
            slabs.copy_(mesh.activations.rows(rows, out, panel).flatten(0, 1))

        return scatter(mesh, out, fill).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        ids, = ctx.saved_tensors
        activations, dx = ctx.mesh.activations, dx.contiguous()
        parts, work = activations.gather(dx, (slice(None),), lambda _, shape: dx.new_empty(shape))
        work.wait()
        whole = parts.flatten(0, -2)
        return _table_gradient(whole, ids.flatten(), *ctx.places).to(dx.dtype), None, None, None


class SplitFeatureEmbedding(SplitLayer):
    """Embeddings of positions or token types in this rank's part of the residual stream."""

    def forward(self, indices: int | Tensor) -> Tensor:
        """A whole sequence's length to [tokens here, features here]; indices_BS of whole sequences to this rank's part
        of x_BSH."""
        if isinstance(indices, int):
            return self.weight[own_tokens(self.mesh, indices)]
        return functional.embedding(indices[:, own_tokens(self.mesh, indices.shape[1])], self.weight)


class SplitPatchEmbedding(SplitLayer):
    """Patches of this rank's part of the residual stream, and the first token if it belongs to that part."""

    first: nn.Parameter

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [B, S - 1, F] of whole sequences to this rank's part of x_BSH."""
        tokens = own_tokens(self.mesh, patches.shape[1] + 1)
        # Token t > 0 is patch t - 1.
        own = patches.detach()[:, max(tokens.start - 1, 0):tokens.stop - 1]
        x = functional.linear(own, self.weight, self.bias)
        return torch.cat([self.first.expand(len(x), int(tokens.start == 0), -1), x], dim=1)


def own_tokens(mesh: TensorMesh, length: int) -> slice:
    """The tokens of a sequence of `length` in this rank's part of the residual stream."""
    if mesh.activations.name != "sequence":
        return slice(0, length)
    own = mesh.activations.own_dims((1, length))[1]
    return slice(mesh.col * own, (mesh.col + 1) * own)
