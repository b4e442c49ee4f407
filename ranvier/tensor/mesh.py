"""The tensor mesh of one stage: what its tensor-parallel layers share on one rank.

    over_rows   the group of one column, whose ranks differ in row: they share the column's shard of each weight
    over_cols   the group of one row, whose ranks differ in col: they share the row's sequences

With one row this is Megatron-LM's 1D tensor parallelism, and `over_cols` is the tensor-parallel group. With several it
is 2D tensor parallelism (Optimus: Xu et al., 2021): the microbatch is divided over rows, and features over columns.

Every rank of a stage runs the same layers in the same order, because one schedule decides for the stage. Collectives of
a group therefore match without tags. Code of a block that calls different layers on different ranks is detected before
an update (`layer_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm.fp32_sums import Fp32Sums
from ranvier.comm.protocol import Group
from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout.panels import PANEL_BYTES, panel_count
from ranvier.precision import sum_dtype
from ranvier.tensor.activations import Activations, Panel, activations_of
from ranvier.tensor.autograd import Function
from ranvier.tensor.layer_order import LayerOrder
from ranvier.tensor.overlapped_transfers import GradientSums, WeightGathers, WeightUse, gather_together
from ranvier.tensor.workspace import BUFFERS, Workspace

BUNDLE_ELEMENTS = {"cpu": 1 << 18}
"""Kind of device -> elements of gathered weights, or of partial sums of their gradients, that are sent together. On a
CPU each collective costs up to 1 ms of processor time in addition to its bytes; larger weights lose more by copies."""


class TensorMesh:
    """The row x col mesh of one stage, on one of its ranks.

    Args:
        over_rows, over_cols: see the top of the file; members in the order of their rows and columns.
        settings: scheme, sequence parallelism, and the number format of communicated sums.
        device: the kind of device, "cpu" or "cuda".
        panel_bytes: size of the largest panel of activations that is gathered or reduced in one piece, with panels as
            equal as possible; None for the settings, or the device's rule.
        check_order: before each layer and after each block, rows and columns compare which layer they run (slow; for
            debugging), and so find the exact call at which they diverge.
    """

    workspace_kind = Workspace

    def __init__(self, over_rows: Group, over_cols: Group, settings: TensorParallel, *, device: str = "cpu",
                 panel_bytes: int | None = None, check_order: bool = False) -> None:
        self.check_order = check_order
        self._device = device
        if sum_dtype(settings, torch.bfloat16, device) is torch.float32:
            over_rows, over_cols = Fp32Sums(over_rows), Fp32Sums(over_cols)
        self.over_rows, self.over_cols, self.settings = over_rows, over_cols, settings
        # Attributes, not properties: each torch function between layers reads some of them.
        self.num_rows, self.row = len(over_rows.ranks), over_rows.index
        """Ranks that share a column's weights, and this rank's place among them."""
        self.num_cols, self.col = len(over_cols.ranks), over_cols.index
        """Ranks that share a row's sequences, and this rank's place among them."""
        usual, wanted = PANEL_BYTES.get(device, PANEL_BYTES["cpu"]), settings.panel_bytes
        self._panel_bytes = panel_bytes or (usual if wanted == "auto" else wanted)
        self._hides = device == "cuda"
        self.workspace = self.workspace_kind()
        self.order = LayerOrder(over_rows, over_cols)
        limit = BUNDLE_ELEMENTS.get(device, 0) // self.num_rows
        self.weights = WeightGathers(limit, partial(gather_together, self.workspace, over_rows))
        self.sums = GradientSums(over_rows, self.workspace, limit)
        self.activations: Activations = activations_of(settings, self.over_cols)
        """The layout of the residual stream."""
        self.autocast: torch.dtype | None = None
        """The format to which split layers cast fp32 operands of their products, weights before they are gathered; as
        torch.autocast does for plain layers."""
        self.sequences: dict[int, int] = {}
        """Number of tokens -> number of sequences last seen with it, to divide flattened tokens in the same way; used
        with a sharded sequence."""
        self.runs_user_code = False
        """Whether code of a block or a loss is running, which must not read shards of weights."""

    @contextmanager
    def one_pass(self, uses: list[WeightUse]) -> Iterator[None]:
        """Inside, weights arrive ahead of their products and sums of weight gradients are added later; at the end all
        have been added. uses: as in `WeightGathers`."""
        try:
            with self.weights.one_pass(uses):
                yield
                self.sums.finish()
        finally:
            self.sums.clear()

    def bundle_sizes(self, uses: Sequence[WeightUse]) -> dict[tuple[str, torch.dtype], int]:
        """Bytes of the workspace buffers in which a pass with these uses gathers weights together."""
        found: dict[tuple[str, torch.dtype], int] = {}
        for bundle in self.weights.bundles(uses).values():
            dtype = bundle[0].layer.weight_dtype
            elements = sum(prod(use.layer.weight_shape) for use in bundle)
            for buffer in range(BUFFERS) if len(bundle) > 1 else ():
                for name, copies in (("own weights", 1), ("weight", self.num_rows)):
                    size = copies * elements * dtype.itemsize
                    found[f"{name} {buffer}", dtype] = max(found.get((f"{name} {buffer}", dtype), 0), size)
        return found

    def bundled_matrix_bytes(self, uses: Sequence[WeightUse]) -> int:
        """Bytes of the largest weight that a pass with these uses gathers with others: the shards of its rows, which
        have gaps between them, are copied into one matrix for the product."""
        return max((self.num_rows * prod(use.layer.weight_shape) * use.layer.weight_dtype.itemsize
                    for bundle in self.weights.bundles(uses).values() if len(bundle) > 1 for use in bundle), default=0)

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The format in which an operand of `dtype` is multiplied."""
        return self.autocast if self.autocast is not None and dtype is torch.float32 else dtype

    def cast(self, operand: Tensor) -> Tensor:
        """An operand in that format."""
        return operand if self.autocast is None else operand.to(self.product_dtype(operand.dtype))

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The number format of sums of activations of `dtype` over columns."""
        return sum_dtype(self.settings, dtype, self._device)

    def panels(self, x: Tensor, *, exposed: bool = False, travels: bool = True, dtype: torch.dtype | None = None
               ) -> Sequence[Panel]:
        """The panels in which x, in the layout of the residual stream, is gathered or reduced.

        exposed: whether one panel is sent while nothing is computed: on a GPU more panels make that panel smaller; a
        CPU's transfers take time of the cores that would compute. travels: whether there are other ranks to exchange x
        with; otherwise x is one panel. dtype: in which x is sent, by default its own.
        """
        if not x.numel():  # a row without tokens
            return ()
        size = self.activations.num_parts * x.numel() * (dtype or x.dtype).itemsize
        count = panel_count(size, self._panel_bytes, hides=exposed and self._hides) if travels else 1
        return self.activations.panels(x, count)

    def __deepcopy__(self, memo: dict[int, object]) -> TensorMesh:
        """Itself: a copy of a layer has the same place among the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ModelError("belongs to running ranks, and cannot be saved", code="split-layer-pickled",
                         where="a layer on rows and columns", remedy="Save its state_dict(), or write a checkpoint.")


# --- exchanges over columns -------------------------------------------------------------------------------------------

# Exchanges of activations among the columns of a tensor mesh, with their gradients.
#
# Empty tensors are not sent: all columns of a row have the same tokens.


Sharded = Literal["features", "tokens", "none"]
"""The dim of an activation that the columns shard."""


def exchange(u: Tensor, mesh: TensorMesh, enters: Sharded, leaves: Sharded) -> Tensor:
    """u [B, S, R], which each column has computed from its part of x, in the form from which it computes its part of y.

        enters: x is      leaves: y is      u forward          u backward
        features sharded  features sharded  all-reduce         all-reduce
        features sharded  replicated        all-reduce         identity         Megatron-LM's g
        features sharded  tokens sharded    reduce-scatter     all-gather
        tokens sharded    features sharded  all-gather         reduce-scatter
        replicated        features sharded  identity           all-reduce       Megatron-LM's f
    """
    return _Exchange.apply(u, mesh, enters, leaves)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, mesh: TensorMesh, enters: Sharded, leaves: Sharded) -> Tensor:
        ctx.mesh, ctx.enters, ctx.leaves = mesh, enters, leaves
        if enters == "tokens":
            return gather_sequence(u, mesh)
        if enters == "none":
            return u.view_as(u)
        return _scatter_sums(u, mesh) if leaves == "tokens" else _sum_over_cols(u, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.enters == "tokens":
            du = _scatter_sums(du, ctx.mesh)
        elif ctx.leaves == "tokens":
            du = gather_sequence(du, ctx.mesh)
        elif ctx.leaves == "features":
            du = _sum_over_cols(du, ctx.mesh)
        return du, None, None, None


def _sum_over_cols(u: Tensor, mesh: TensorMesh) -> Tensor:
    total = u.clone(memory_format=torch.contiguous_format)  # autograd may pass a gradient to others too
    if total.numel():
        mesh.over_cols.all_reduce(total).wait()
    return total


def gather_sequence(u: Tensor, mesh: TensorMesh) -> Tensor:
    """[B, S, R] of the columns' [B, S / c, R], without a gradient."""
    parts = u.new_empty(mesh.num_cols, *u.shape)
    if u.numel():
        mesh.over_cols.all_gather(parts, u.contiguous()).wait()
    return parts.movedim(0, 1).flatten(1, 2)


def _scatter_sums(u: Tensor, mesh: TensorMesh) -> Tensor:
    """This column's [B, S / c, R] of the sum of the columns' [B, S, R]."""
    parts = u.unflatten(1, (mesh.num_cols, -1)).movedim(1, 0).contiguous()
    own = u.new_empty(parts.shape[1:])
    if own.numel():
        mesh.over_cols.reduce_scatter(own, parts).wait()
    return own


def transpose_shards(x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
    """x with each column's full dim `given` and shard of `taken` changed to a shard of `given` and the full `taken`, by
    an all-to-all. The columns divide both."""
    return _Transposed.apply(x, given, taken, mesh)


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
        ctx.given, ctx.taken, ctx.mesh = given, taken, mesh
        return _transpose_shards(x, given, taken, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _transpose_shards(dy, ctx.taken, ctx.given, ctx.mesh), None, None, None


def _transpose_shards(x: Tensor, given: int, taken: int, mesh: TensorMesh) -> Tensor:
    parts = torch.stack(x.chunk(mesh.num_cols, given))
    received = torch.empty_like(parts)
    mesh.over_cols.all_to_all(received, parts).wait()
    return torch.cat(received.unbind(), taken)
