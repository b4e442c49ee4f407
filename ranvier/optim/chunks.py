"""One trainable parameter's gradient, and one piece of all gradients that is reduced as a unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from ranvier.comm.collectives import CompletedWork
from ranvier.comm.protocol import Group, Work
from ranvier.layout import ChunkCut, FlatGradient

if TYPE_CHECKING:
    from ranvier.optim.tensor_update import TensorSplit


@dataclass(frozen=True, kw_only=True)
class GradientSpec(FlatGradient):
    """One trainable parameter of this rank, and where its gradient goes.

    group: the ranks over which this gradient is summed; None: those given to `Gradients`.
    split: how the parameter is split, if its update needs all of it; None if this rank has the full parameter.
    is_table: whether it is a lookup table [rows, width] whose gradient is reported by row; the same on all replicas.
    """

    parameter: nn.Parameter
    group: Group | None = None
    split: TensorSplit | None = None
    is_table: bool = False

    @classmethod
    def from_layout(cls, gradient: FlatGradient, parameter: nn.Parameter, group: Group | None = None,
                    split: TensorSplit | None = None, *, is_table: bool = False) -> GradientSpec:
        """The spec of this parameter for a gradient of the layout."""
        return cls(**{**vars(gradient), "group": group}, parameter=parameter, split=split, is_table=is_table)

    @property
    def rule_name(self) -> str:
        """The name by which update rules and groups of settings are chosen."""
        return self.settings_name or self.name

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter without rows and columns."""
        return tuple(self.parameter.shape) if self.shape is None else self.shape


@dataclass(eq=False)
class Chunk:
    """Elements [start, stop) of all gradients, summed over `group`, and the progress of the sum.

    share: the part of it that is summed here; all of it unless the reduction scatters. shares: as in `ChunkCut`.
    offset: added to a position to find it in the buffer.
    run: the blocks with which it takes turns in its memory, from `entered` on; None if it has its own memory.
    blocks: those that the last backward has not passed. outstanding: deferred products, and gradients of other ends.
    gather: starts the second half of a half-precision sum: members collect the shares of the others.
    """

    start: int
    stop: int
    specs: list[GradientSpec]
    share: tuple[int, int]
    group: Group
    counts: bool
    offset: int = 0
    run: range | None = None
    shares: tuple[tuple[int, int], ...] | None = None
    entered: bool = False
    blocks: set[int] = field(default_factory=set)
    outstanding: int = 0
    work: Work = field(default_factory=CompletedWork)
    gather: Callable[[], Work] | None = None

    @classmethod
    def from_layout(cls, cut: ChunkCut, specs: list[GradientSpec], group: Group) -> Chunk:
        """A chunk as the layout cuts it, of these gradients."""
        return cls(start=cut.start, stop=cut.stop, specs=specs, share=cut.share, group=group, counts=cut.counts,
                   offset=cut.offset, run=cut.run, shares=cut.shares)

    @property
    def sent_to_owner(self) -> bool:
        """Whether it is one gradient that goes to the stage that owns its parameter, instead of being summed here."""
        return self.specs[0].sent_to_owner

    @property
    def adds_parts(self) -> bool:
        """Whether rows or columns take part in its sum, each with a part of one gradient."""
        return self.specs[0].group is not None

    @property
    def reused(self) -> bool:
        """Whether other chunks use its memory too."""
        return self.run is not None
