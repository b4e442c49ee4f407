"""What the split layers of one stage share: this rank's place on the row x col mesh, two groups, and memory to work in.

    over_rows   the ranks of one column, which differ in row: they share its weights
    over_cols   the ranks of one row, which differ in col: they share its sequences

Every rank of a stage makes the same calls in the same order (one schedule for each stage sees to it), so a group's
collectives need no other agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.comm.wide import WideSums
from ranvier.errors import ConfigError, ModelError
from ranvier.mesh import Mesh
from ranvier.tensor.activations import Activations, activations_of

if TYPE_CHECKING:
    from ranvier.comm.protocol import Group
    from ranvier.run import TensorParallel as Settings

PANEL_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Largest gathered panel of activations: what stays in a CPU's cache, or fills a GPU with one product."""


def tensor_problems(mesh: Mesh, settings: Settings) -> Iterator[ConfigError]:
    """What a scheme cannot do on `mesh`."""
    if settings.scheme == "megatron" and mesh.row > 1:
        yield ConfigError(f"splits blocks over columns only, and mesh.row is {mesh.row}", where="tensor.scheme",
                          value="megatron", remedy=f"Set --mesh.row 1 --mesh.col {mesh.stage_size}, or "
                                                   "--tensor.scheme stationary.")


class Workspace:
    """Memory that products use in turn: one buffer for each name, as large as the largest that was asked for.

    A buffer belongs to whoever took it last; what leaves a product never lies in one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised [*shape] of the dtype and on the device of `like`."""
        size, key = prod(shape), (name, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size or buffer.device != like.device:
            buffer = self._buffers[key] = like.new_empty(size)
        return buffer[:size].view(*shape)

    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def sizes(self) -> dict[tuple[str, torch.dtype], int]:
        """Bytes of each buffer."""
        return {key: buffer.numel() * buffer.element_size() for key, buffer in self._buffers.items()}

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes().values())


class TensorMesh:
    """The row x col mesh of one stage, as one of its ranks sees it.

    Args:
        over_rows, over_cols: see above; members in the order of their rows and columns.
        settings: scheme, sequence sharding, and the format in which sums travel.
        panel_bytes: largest panel of activations that is gathered, or reduced, in one piece; None for the device's.
        check_order: before each layer, and after each block, the rows of a column compare where they are (slow; for
            debugging): a layer that one row leaves out would pair its collectives with another layer's.
    """

    def __init__(self, over_rows: Group, over_cols: Group, settings: Settings, *, device: str = "cpu",
                 panel_bytes: int | None = None, check_order: bool = False) -> None:
        self.check_order = check_order
        if settings.reduce_dtype == "fp32":
            over_rows, over_cols = WideSums(over_rows), WideSums(over_cols)
        self.over_rows, self.over_cols, self.settings = over_rows, over_cols, settings
        self.panel_bytes = panel_bytes or PANEL_BYTES.get(device, PANEL_BYTES["cpu"])
        self.workspace = Workspace()
        self.activations: Activations = activations_of(self)
        """How the residual stream lies on the mesh."""
        self.whole_outputs = False
        """Whether the last layer returns its whole output on every rank: for predictions."""

    def __deepcopy__(self, memo: dict) -> TensorMesh:
        """A copy of a layer has the same place among the same ranks."""
        return self

    def __reduce__(self):
        raise ModelError("belongs to ranks that run now, and cannot be saved", where="a layer on rows and columns",
                         remedy="Save its state_dict(), or write a checkpoint.")

    @property
    def num_rows(self) -> int:
        return len(self.over_rows.ranks)

    @property
    def num_cols(self) -> int:
        return len(self.over_cols.ranks)

    @property
    def row(self) -> int:
        return self.over_rows.index

    @property
    def col(self) -> int:
        return self.over_cols.index
