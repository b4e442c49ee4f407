"""Layouts of the residual stream over the columns, and how products gather from it and reduce into it.

    layout     x_BSH on a rank       gather                      scatter (of partial sums)
    hidden     [B/r, S, H/c]         all-gather over cols        reduce-scatter over cols
    sequence   [B, S/c, H]           all-gather over cols        reduce-scatter over cols
    whole      [B, S, H]             identity                    all-reduce over cols

B batch, S sequence, H hidden width, T = B S tokens; r rows, c columns of the mesh. `hidden` is the layout of 2D tensor
parallelism (Optimus: Xu et al., 2021), `whole` that of Megatron-LM's 1D tensor parallelism (Shoeybi et al.,
2019), `sequence` that of Megatron-LM's sequence parallelism (Korthikanti et al., 2022).

A product computes on flat tokens: all T tokens of a row. Activations are sent in panels: runs of tokens or, if the
tokens of a sequence lie on several ranks, runs of sequences or of positions of every sequence. A gathered panel is a
matrix of whole tokens. Partial sums are slabs [k, tokens, width / k] that follow each other in width, so that a
reduce-scatter takes them without a copy; they may be in fp32 when the residual stream is in half precision, and are
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from ranvier.comm.collectives import ChainedWork, CompletedWork
from ranvier.comm.protocol import Group, Work
from ranvier.config.run import TensorParallel
from ranvier.errors import DivisibilityError
from ranvier.layout.panels import equal_runs, power_of_two

_EVEN = 4
"""Number of sequences in a panel from which one more or less matters little."""
Buffer = Callable[[str, Sequence[int]], Tensor]
"""Returns uninitialised memory for a purpose, of a given shape, for example from a `Workspace`."""
Panel = tuple[slice, ...]
"""Index of a panel: of the flat tokens or, if columns share the sequence, of sequences and their positions here."""
ActivationLayout = Literal["hidden", "sequence", "whole"]


class Activations(Protocol):
    """One of the three layouts of the residual stream."""

    name: ActivationLayout
    num_parts: int
    """Ranks whose parts of a panel are gathered."""
    cut_dims: tuple[int, ...]
    """The trailing dims (S, H) that are sharded over columns."""

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """Leading dims (all but the width) of the tensor that all columns hold together."""

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The inverse: leading dims on this rank. DivisibilityError when the columns do not divide them."""

    def own_width(self, width: int) -> int:
        """Number of `width` features that are on this rank."""

    def panels(self, x: Tensor, count: int) -> list[Panel]:
        """`count` panels of a nonempty x, or up to twice that number."""

    def rows(self, flat: Tensor, x: Tensor, panel: Panel) -> Tensor:
        """The tokens of a panel of x in `flat` [T, F]: a view [n, m, F] of n m tokens, in the order of `gather`."""

    def gather(self, x: Tensor, panel: Panel, buffer: Buffer) -> tuple[Tensor, Work]:
        """Start gathering a panel [.., width], of whole tokens, which is complete when the work is done."""

    def partial(self, out: Tensor, panel: Panel, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        """Slabs of this format for this rank's partial sums of a panel of `out`, a tensor in this layout."""

    def scatter(self, slabs: Tensor, out: Tensor, panel: Panel, buffer: Buffer, bias: Tensor | None) -> Work:
        """Start summing all columns' slabs; the panel of `out` becomes this rank's part of the sum, plus its bias."""


class HiddenSplit:
    """The hidden width is sharded over columns."""

    name: ActivationLayout = "hidden"
    cut_dims: tuple[int, ...] = (1,)

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_parts = len(over_cols.ranks)

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """[B, S] of x [B, S, H/c]."""
        return tuple(x.shape[:-1])

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The same dims: only the width is sharded."""
        return tuple(whole)

    def own_width(self, width: int) -> int:
        """H/c."""
        return width // self.num_parts

    def panels(self, x: Tensor, count: int) -> list[Panel]:
        """Runs of tokens."""
        return [(run,) for run in equal_runs(x.shape[:-1].numel(), power_of_two(count))]

    def rows(self, flat: Tensor, x: Tensor, panel: Panel) -> Tensor:
        """[1, m, F]."""
        return flat[panel].unsqueeze(0)

    def gather(self, x: Tensor, panel: Panel, buffer: Buffer) -> tuple[Tensor, Work]:
        """All-gather along the width: [m, H]."""
        part = _flat(x)[panel].contiguous()
        if self.num_parts == 1:
            return part, CompletedWork()
        whole = buffer("gathered", (len(part), self.num_parts * part.shape[1]))
        return whole, self._group.all_gather(whole, part, 1, buffer("gathered parts", (whole.numel(),)))

    def partial(self, out: Tensor, panel: Panel, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        """[c, m, H/c]."""
        return buffer("partial", (self.num_parts, *_flat(out)[panel].shape))

    def scatter(self, slabs: Tensor, out: Tensor, panel: Panel, buffer: Buffer, bias: Tensor | None) -> Work:
        """Reduce-scatter of the slabs."""
        return _start_rounded(_flat(out)[panel], slabs.dtype, buffer, bias,
                              lambda total: self._group.reduce_scatter(total, slabs))


class SequenceSplit:
    """The sequence is sharded over columns."""

    name: ActivationLayout = "sequence"
    cut_dims: tuple[int, ...] = (0,)

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_parts = len(over_cols.ranks)

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """[B, S] of x [B, S/c, H]."""
        return x.shape[0], x.shape[1] * self.num_parts

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """[B, S/c] of [B, S]. DivisibilityError for a sequence that columns do not divide."""
        if whole[1] % self.num_parts:
            raise DivisibilityError(f"cannot be shared by {self.num_parts} columns",
                                    code="sequence-not-shared-by-columns", where="sequence of the inputs",
                                    value=whole[1],
                                    remedy="Feed sequences whose length `mesh.col` divides, or set "
                                           "`--tensor.sequence-sharding false`.")
        return whole[0], whole[1] // self.num_parts

    def own_width(self, width: int) -> int:
        """H."""
        return width

    def panels(self, x: Tensor, count: int) -> list[Panel]:
        """Runs of sequences if these are about equal. Otherwise runs of positions: a panel has the same positions of
        every sequence's part on every column, so its products are batched."""
        sequences, positions = x.shape[0], x.shape[1]
        equal = next((more for more in range(count, 2 * count) if sequences % more == 0), None)
        if equal is not None or sequences >= _EVEN * count:
            return [(run, slice(None)) for run in equal_runs(sequences, equal or count)]
        return [(slice(None), run) for run in equal_runs(positions, power_of_two(count))]

    def rows(self, flat: Tensor, x: Tensor, panel: Panel) -> Tensor:
        """[B c, m, F], or [1, m, F] of whole sequences."""
        sequences, positions = panel
        by_part: Tensor = flat.unflatten(0, (x.shape[0], self.num_parts, x.shape[1]))
        if positions == slice(None):
            return by_part[sequences].flatten(0, 2).unsqueeze(0)
        return by_part[:, :, positions].flatten(0, 1)

    def gather(self, x: Tensor, panel: Panel, buffer: Buffer) -> tuple[Tensor, Work]:
        """All-gather along the sequence: [B, c m, H]."""
        part = x[panel].contiguous()
        if self.num_parts == 1:
            return part, CompletedWork()
        whole = buffer("gathered", (part.shape[0], self.num_parts * part.shape[1], part.shape[2]))
        return whole, self._group.all_gather(whole, part, 1)

    def partial(self, out: Tensor, panel: Panel, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        """[1, B c m, H]."""
        own = out[panel]
        return buffer("partial", (1, self.num_parts * own.shape[:-1].numel(), out.shape[-1]))

    def scatter(self, slabs: Tensor, out: Tensor, panel: Panel, buffer: Buffer, bias: Tensor | None) -> Work:
        """Reduce-scatter along the sequence. Sums of a panel of several sequences are then copied to their places."""
        own = out[panel]
        whole = slabs.view(own.shape[0], -1, own.shape[2])
        space = buffer("parts", (whole.numel(),)) if len(own) > 1 else None
        return _start_rounded(own, slabs.dtype, buffer, bias,
                              lambda total: self._group.reduce_scatter(total, whole, space, 1))


class Replicated(HiddenSplit):
    """Every column holds the whole residual stream: the width has one part."""

    name: ActivationLayout = "whole"
    cut_dims: tuple[int, ...] = ()

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_parts = 1

    def partial(self, out: Tensor, panel: Panel, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        """[1, m, H]: the panel of `out` itself, if the all-reduce may work in place."""
        own = _flat(out)[panel].unsqueeze(0)
        return own if dtype is out.dtype else buffer("partial", own.shape)

    def scatter(self, slabs: Tensor, out: Tensor, panel: Panel, buffer: Buffer, bias: Tensor | None) -> Work:
        """All-reduce of the slab."""
        own, total = _flat(out)[panel], slabs[0]
        work = self._group.all_reduce(total)
        if total.dtype is out.dtype and bias is None:
            return work
        return ChainedWork(work, lambda: _round(own, total, bias))


def _flat(x: Tensor) -> Tensor:
    """[T, width], a view."""
    return x.flatten(0, -2)


def _start_rounded(tensor: Tensor, dtype: torch.dtype, buffer: Buffer, bias: Tensor | None,
                   start: Callable[[Tensor], Work]
                   ) -> Work:
    """`start(total)`, a sum of this dtype, whose total plus bias becomes `own`: in place if possible."""
    if dtype is tensor.dtype and bias is None and tensor.is_contiguous():
        return start(tensor)
    total = buffer("summed", tensor.shape)
    return ChainedWork(start(total), lambda: _round(tensor, total, bias))


def _round(own: Tensor, total: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        own.copy_(total)
    else:
        torch.add(total, bias, out=own)


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
