"""How the residual stream is laid out over the columns, and how products gather it and reduce what they add to it.

    layout     x_BSH on a rank       gather                      scatter (of partial sums)
    hidden     [B/r, S, H/c]         all-gather over cols        reduce-scatter over cols
    sequence   [B, S/c, H]           all-gather over cols        reduce-scatter over cols
    whole      [B, S, H]             identity                    all-reduce over cols

B batch, S sequence, H hidden width, T = B S tokens; r rows, c columns of the mesh. `hidden` is the layout of 2D tensor
parallelism (Optimus: Xu et al., 2021), `whole` that of Megatron-LM's 1D tensor parallelism (Shoeybi et al.,
2019), `sequence` that of Megatron-LM's sequence parallelism (Korthikanti et al., 2022).

A product computes on flat tokens: all T tokens of a row. Activations travel in panels, which are runs of `units`:
tokens, or positions of every sequence where the tokens of one lie on several ranks. A product takes x as slabs
[k, tokens, width / k] that follow each other in width: as an all-gather leaves them, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ranvier.comm.collectives import ChainedWork, CompletedWork
from ranvier.comm.protocol import Group, Work
from ranvier.config.run import TensorParallel
from ranvier.errors import DivisibilityError
from ranvier.layout.panels import FIRST_SHARE

Buffer = Callable[[str, Sequence[int]], Tensor]
"""Uninitialised memory for a purpose, of a shape, such as from a `Workspace`."""
ActivationLayout = Literal["hidden", "sequence", "whole"]


class Activations(Protocol):
    """One of the three layouts of the residual stream."""

    name: ActivationLayout
    num_slabs: int
    """Slabs that the width of a gathered tensor comes in."""
    num_parts: int
    """Ranks whose parts of a panel are gathered."""
    cut_dims: tuple[int, ...]
    """Of the trailing dims (S, H) those that are sharded over columns."""

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """Leading dims, all but the width, of what all columns hold together."""

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The inverse: leading dims on this rank. DivisibilityError when columns cannot divide them."""

    def own_width(self, width: int) -> int:
        """Of `width` features, those on this rank."""

    def units(self, x: Tensor) -> int:
        """Units of x: what panels are runs of."""

    def rows(self, flat: Tensor, x: Tensor, run: slice) -> Tensor:
        """Of `flat` [T, F], the tokens of a panel of x: a view [n, m, F] of n m tokens, in the order of `slabs`."""

    def gather(self, x: Tensor, run: slice, buffer: Buffer) -> tuple[Tensor, Work]:
        """Start gathering a panel, which is complete when the work is done."""

    def slabs(self, parts: Tensor) -> Tensor:
        """[k, tokens, width / k] of a gathered panel."""

    def partial(self, out: Tensor, run: slice, buffer: Buffer) -> Tensor:
        """Slabs for this rank's partial sums of a panel of `out`, a tensor in this layout."""

    def scatter(self, slabs: Tensor, out: Tensor, run: slice, buffer: Buffer) -> Work:
        """Start summing all columns' slabs; the panel of `out` becomes this rank's part of the sum."""


class HiddenSplit:
    """The hidden width is sharded over columns."""

    name: ActivationLayout = "hidden"
    cut_dims: tuple[int, ...] = (1,)

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_slabs = self.num_parts = len(over_cols.ranks)

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """[B, S] of x [B, S, H/c]."""
        return tuple(x.shape[:-1])

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The same dims: only the width is sharded."""
        return tuple(whole)

    def own_width(self, width: int) -> int:
        """H/c."""
        return width // self.num_slabs

    def units(self, x: Tensor) -> int:
        """T tokens."""
        return x.shape[:-1].numel()

    def rows(self, flat: Tensor, x: Tensor, run: slice) -> Tensor:
        """[1, m, F]."""
        return flat[run].unsqueeze(0)

    def gather(self, x: Tensor, run: slice, buffer: Buffer) -> tuple[Tensor, Work]:
        """All-gather: [k, m, H/c]."""
        panel = _flat(x)[run].contiguous()
        parts = buffer("gathered", (self.num_slabs, *panel.shape))
        return parts, self._group.all_gather(parts, panel)

    def slabs(self, parts: Tensor) -> Tensor:
        """The parts."""
        return parts

    def partial(self, out: Tensor, run: slice, buffer: Buffer) -> Tensor:
        """[c, m, H/c]."""
        return buffer("partial", (self.num_slabs, *_flat(out)[run].shape))

    def scatter(self, slabs: Tensor, out: Tensor, run: slice, buffer: Buffer) -> Work:
        """Reduce-scatter of the slabs."""
        return self._group.reduce_scatter(_flat(out)[run], slabs)


class SequenceSplit:
    """The sequence is sharded over columns."""

    name: ActivationLayout = "sequence"
    cut_dims: tuple[int, ...] = (0,)
    num_slabs = 1

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_parts = len(over_cols.ranks)

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """[B, S] of x [B, S/c, H]."""
        return x.shape[0], x.shape[1] * self.num_parts

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """[B, S/c] of [B, S]. DivisibilityError for a sequence that columns do not divide."""
        if whole[1] % self.num_parts:
            raise DivisibilityError(f"cannot be shared by {self.num_parts} columns", where="sequence of the inputs",
                                    value=whole[1], remedy="Feed sequences whose length mesh.col divides, or set "
                                                           "--tensor.sequence-sharding false.")
        return whole[0], whole[1] // self.num_parts

    def own_width(self, width: int) -> int:
        """H."""
        return width

    def units(self, x: Tensor) -> int:
        """S/c positions: a panel has the same ones of every sequence's part on every column. Of many sequences, B."""
        return x.shape[0] if self._by_sequence(x) else x.shape[1]

    def _by_sequence(self, x: Tensor) -> bool:
        return x.shape[0] * FIRST_SHARE >= 1

    def _panel(self, x: Tensor, run: slice) -> Tensor:
        return x[run] if self._by_sequence(x) else x[:, run]

    def rows(self, flat: Tensor, x: Tensor, run: slice) -> Tensor:
        """[B c, m, F], or [1, m, F] of whole sequences."""
        if self._by_sequence(x):
            per_sequence = x.shape[1] * self.num_parts
            return flat[run.start * per_sequence:run.stop * per_sequence].unsqueeze(0)
        if run == slice(0, x.shape[1]):
            return flat.unsqueeze(0)
        by_part: Tensor = flat.unflatten(0, (x.shape[0], self.num_parts, x.shape[1]))
        return by_part[:, :, run].flatten(0, 1)

    def gather(self, x: Tensor, run: slice, buffer: Buffer) -> tuple[Tensor, Work]:
        """All-gather along the sequence: [B, c m, H]."""
        panel = self._panel(x, run).contiguous()
        whole = buffer("gathered", (panel.shape[0], self.num_parts * panel.shape[1], panel.shape[2]))
        return whole, self._group.all_gather(whole, panel, 1)

    def slabs(self, parts: Tensor) -> Tensor:
        """One slab [1, B c m, H]."""
        return parts.view(1, -1, parts.shape[-1])

    def partial(self, out: Tensor, run: slice, buffer: Buffer) -> Tensor:
        """[1, B c m, H]."""
        own = self._panel(out, run)
        return buffer("partial", (1, self.num_parts * own.shape[:-1].numel(), out.shape[-1]))

    def scatter(self, slabs: Tensor, out: Tensor, run: slice, buffer: Buffer) -> Work:
        """Reduce-scatter along the sequence. Sums of a panel of several sequences are copied to their places after."""
        own = self._panel(out, run)
        whole = slabs.view(own.shape[0], -1, own.shape[2])
        space = buffer("parts", (whole.numel(),)) if len(own) > 1 else None
        if own.is_contiguous():
            return self._group.reduce_scatter(own, whole, space, 1)
        summed = buffer("summed", own.shape)
        return ChainedWork(self._group.reduce_scatter(summed, whole, space, 1), lambda: own.copy_(summed))


class Replicated(HiddenSplit):
    """Every column holds the whole residual stream: the width has one part."""

    name: ActivationLayout = "whole"
    cut_dims: tuple[int, ...] = ()

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_slabs = self.num_parts = 1

    def gather(self, x: Tensor, run: slice, buffer: Buffer) -> tuple[Tensor, Work]:
        """Nothing travels."""
        return _flat(x)[run].unsqueeze(0), CompletedWork()

    def partial(self, out: Tensor, run: slice, buffer: Buffer) -> Tensor:
        """The panel of `out` itself, as one slab: the all-reduce works in place."""
        return _flat(out)[run].unsqueeze(0)

    def scatter(self, slabs: Tensor, out: Tensor, run: slice, buffer: Buffer) -> Work:
        """All-reduce of the panel of `out`, which the slab is a view of."""
        return self._group.all_reduce(_flat(out)[run])


def _flat(x: Tensor) -> Tensor:
    """[T, width], a view."""
    return x.flatten(0, -2)


def activations_of(settings: TensorParallel, over_cols: Group) -> Activations:
    """The layout that a scheme works on, over the ranks of a row."""
    kinds: dict[ActivationLayout, type[HiddenSplit | SequenceSplit]] = {
        "hidden": HiddenSplit, "sequence": SequenceSplit, "whole": Replicated}
    return kinds[layout_of(settings)](over_cols)


def layout_of(settings: TensorParallel) -> ActivationLayout:
    """The name of the layout that a scheme works on."""
    if settings.shards_sequence:
        return "sequence"
    return "whole" if settings.scheme == "megatron" else "hidden"
