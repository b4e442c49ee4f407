"""Embeddings on a row x col mesh: each scheme cuts the table of tokens in its own way; see `ranvier.tensor.split`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier.layout import part
from ranvier.tensor.layers import Embedding
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.own_part import SplitLayer
from ranvier.tensor.stationary import gather_whole, scatter


def _check_ids(ids: Tensor, vocab: int) -> None:
    """IndexError, as torch's embedding, for ids outside the vocabulary; on CUDA, where asking would wait, not asked."""
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise IndexError(f"a token is out of range of the vocabulary of {vocab}: {int(ids.min())} to {int(ids.max())}")


class HiddenEmbedding(SplitLayer):
    """Each rank has a part of every token's features; the tokens of a column's rows travel once, in one all-to-all.

    The table is cut as [V, (col, row)]: what a column's ranks have of one token is that column's part of it.
    """

    def __init__(self, layer: Embedding, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._padding = layer.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        counts = self.mesh.over_rows.gather_number(ids.numel())
        if len(set(counts)) == 1:
            return _AllToAllEmbedding.apply(self.weight, ids, self.mesh, self._padding)
        padded = functional.pad(ids.reshape(-1), (0, max(counts) - ids.numel()))
        found = _AllToAllEmbedding.apply(self.weight, padded, self.mesh, self._padding)
        return found[:ids.numel()].view(*ids.shape, found.shape[-1])


class _AllToAllEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, mesh: TensorMesh, padding: int | None) -> Tensor:
        rows = mesh.num_rows
        everyones = ids.reshape(1, -1)
        if rows > 1:
            everyones = ids.new_empty(rows, ids.numel())
            mesh.over_rows.all_gather(everyones, ids.reshape(-1)).wait()
        ctx.save_for_backward(everyones)
        ctx.mesh, ctx.shape, ctx.padding = mesh, table.shape, -1 if padding is None else padding
        found = functional.embedding(everyones, table)  # [rows, tokens, part of a row's share]
        if rows > 1:
            received = torch.empty_like(found)
            mesh.over_rows.all_to_all(received, found).wait()
            found = received
        return found.movedim(0, 1).reshape(*ids.shape, rows * table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        everyones, = ctx.saved_tensors
        rows, width = ctx.mesh.num_rows, ctx.shape[1]
        parts = dx.reshape(-1, rows, width).movedim(1, 0).contiguous()
        if rows > 1:
            received = torch.empty_like(parts)
            ctx.mesh.over_rows.all_to_all(received, parts).wait()
            parts = received
        table = torch.ops.aten.embedding_dense_backward(parts, everyones, ctx.shape[0], ctx.padding, False)
        return table, None, None, None


class SummaEmbedding(SplitLayer):
    """Optimus' embedding: the blocks [V_i, H_j] of a column's table are broadcast down it, one after the other."""

    def __init__(self, layer: Embedding, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._vocab, self._padding = layer.num_embeddings, layer.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        _check_ids(ids, self._vocab)
        return _BroadcastEmbedding.apply(self.weight, ids, self.mesh, self._vocab, self._padding)


class _BroadcastEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, mesh: TensorMesh, vocab: int, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.mesh, ctx.vocab, ctx.padding = mesh, vocab, padding
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
    def backward(ctx, dx: Tensor):
        ids, = ctx.saved_tensors
        mesh, own = ctx.mesh, None
        for row in range(mesh.num_rows):
            start, stop = part(ctx.vocab, mesh.num_rows, row)
            gradient = _table_gradient(dx, ids, start, stop, ctx.padding)
            if mesh.num_rows > 1:
                mesh.over_rows.reduce(gradient, row).wait()
            if row == mesh.row:
                own = gradient
        return own, None, None, None, None


def _rows_of(block: Tensor, ids: Tensor, start: int) -> Tensor:
    """Embeddings of those ids that are in `block`, whose first is `start`; zero for others."""
    inside = (ids >= start) & (ids < start + len(block))
    return functional.embedding((ids - start).where(inside, 0), block) * inside.unsqueeze(-1)


def _table_gradient(dx: Tensor, ids: Tensor, start: int, stop: int, padding: int | None) -> Tensor:
    """Gradient of the rows start..stop of a table; the token `padding` has none."""
    inside = (ids >= start) & (ids < stop)
    if padding is not None:
        inside &= ids != padding
    gradient = dx.new_zeros(stop - start, dx.shape[-1])
    return gradient.index_add_(0, (ids - start).where(inside, 0).flatten(),
                               (dx * inside.unsqueeze(-1)).reshape(-1, dx.shape[-1]))


class VocabularyEmbedding(SplitLayer):
    """Megatron's embedding: columns have parts of the vocabulary, and their sum is what a column's activations are."""

    def __init__(self, layer: Embedding, mesh: TensorMesh) -> None:
        super().__init__(layer, mesh)
        self._vocab = layer.num_embeddings
        self._places = (*part(self._vocab, mesh.num_cols, mesh.col), layer.padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        _check_ids(ids, self._vocab)
        return _SumEmbedding.apply(self.weight, ids, self.mesh, self._places)


class _SumEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, mesh: TensorMesh, places: tuple[int, int, int | None]) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.mesh, ctx.places = mesh, places
        out = table.new_empty(*mesh.activations.own_dims(ids.shape), table.shape[1])
        rows = _rows_of(table, ids.flatten(), places[0])
        return scatter(mesh, out, lambda where, slabs: slabs.copy_(rows[where]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        ids, = ctx.saved_tensors
        whole = gather_whole(ctx.mesh, dx.contiguous()).flatten(0, 1)
        return _table_gradient(whole, ids.flatten(), *ctx.places), None, None, None


class SplitPositionEmbedding(SplitLayer):
    """Positions of this rank's part of the residual stream."""

    def forward(self, length: int) -> Tensor:
        return self.weight[own_tokens(self.mesh, length)]


class SplitSmallEmbedding(SplitLayer):
    """Kinds of this rank's part of the residual stream."""

    def forward(self, kinds: Tensor) -> Tensor:
        return functional.embedding(kinds[:, own_tokens(self.mesh, kinds.shape[1])], self.weight)


class SplitPatchEmbedding(SplitLayer):
    """Patches of this rank's part of the residual stream, and the first token where it is part of it."""

    def forward(self, patches: Tensor) -> Tensor:
        tokens = own_tokens(self.mesh, patches.shape[1] + 1)
        own = patches.detach()[:, max(tokens.start - 1, 0):tokens.stop - 1]
        x = functional.linear(own, self.weight, self.bias)
        return torch.cat([self.first.expand(len(x), int(tokens.start == 0), -1), x], dim=1)


def own_tokens(mesh: TensorMesh, length: int) -> slice:
    """Of `length` tokens of a sequence those of this rank's part of the residual stream."""
    if mesh.activations.name != "sequence":
        return slice(0, length)
    own = mesh.activations.own_dims((1, length))[1]
    return slice(mesh.col * own, (mesh.col + 1) * own)
