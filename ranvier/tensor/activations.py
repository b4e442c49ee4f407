"""How the residual stream is laid out over the columns, and how products gather it and reduce what they add to it.

    layout     x_BSH on a rank       gather                      scatter (of partial sums)
    hidden     [B/r, S, H/c]         all-gather over cols        reduce-scatter over cols
    sequence   [B, S/c, H]           all-gather over cols        reduce-scatter over cols
    whole      [B, S, H]             identity                    all-reduce over cols

B batch, S sequence, H hidden width, T = B S tokens; r rows, c columns of the mesh. `hidden` is the layout of 2D tensor
parallelism (Optimus: Xu et al., 2021), `whole` that of Megatron-LM's 1D tensor parallelism (Shoeybi et al.,
2019), `sequence` that of Megatron-LM's sequence parallelism (Korthikanti et al., 2022).

A product computes on flat tokens: all T tokens of a row. It works on panels, which are runs of `units`: tokens, or
sequences where the tokens of one lie on several ranks. It takes x as slabs [k, T, width / k] that follow each other in
width: as an all-gather leaves them, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, Protocol

from torch import Tensor

from ranvier.comm.protocol import Group, Work
from ranvier.config.run import TensorParallel
from ranvier.errors import DivisibilityError

Buffer = Callable[[Sequence[int]], Tensor]
"""Uninitialised memory of a shape, such as from a `Workspace`."""
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

    def units(self, x: Tensor) -> Tensor:
        """x as [units, ...], a view: what panels are runs of."""

    def tokens(self, x: Tensor) -> int:
        """Tokens behind one unit of `x`, on all columns together."""

    def gather(self, panel: Tensor, buffer: Buffer) -> tuple[Callable[[], Tensor], Work]:
        """Start gathering a panel; once the work is done, the call returns its slabs."""

    def partial(self, out: Tensor, tokens: int, buffer: Buffer) -> Tensor:
        """Slabs for this rank's partial sums of `out`, which are units of the residual stream."""

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Buffer) -> Work:
        """Start summing all columns' slabs; `out` becomes this rank's part of the sum."""


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

    def units(self, x: Tensor) -> Tensor:
        """Tokens: [T, H/c]."""
        return x.reshape(-1, x.shape[-1])

    def tokens(self, x: Tensor) -> int:
        """1."""
        return 1

    def gather(self, panel: Tensor, buffer: Buffer) -> tuple[Callable[[], Tensor], Work]:
        """All-gather; the parts are the slabs."""
        slabs = buffer((self.num_slabs, *panel.shape))
        return lambda: slabs, self._group.all_gather(slabs, panel.contiguous())

    def partial(self, out: Tensor, tokens: int, buffer: Buffer) -> Tensor:
        """[c, tokens, H/c]."""
        return buffer((self.num_slabs, *out.shape))

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Buffer) -> Work:
        """Reduce-scatter of the slabs."""
        return self._group.reduce_scatter(out, slabs)


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

    def units(self, x: Tensor) -> Tensor:
        """Sequences: [B, S/c, H]. A run of tokens of the gathered tensor would not be contiguous in the parts."""
        return x

    def tokens(self, x: Tensor) -> int:
        """S."""
        return x.shape[1] * self.num_parts

    def gather(self, panel: Tensor, buffer: Buffer) -> tuple[Callable[[], Tensor], Work]:
        """All-gather; one slab [1, B S, H] in the order of tokens, which is a copy."""
        parts = buffer((self.num_parts, *panel.shape))
        return (lambda: parts.movedim(0, 1).reshape(1, -1, panel.shape[-1]),
                self._group.all_gather(parts, panel.contiguous()))

    def partial(self, out: Tensor, tokens: int, buffer: Buffer) -> Tensor:
        """[1, tokens, H]."""
        return buffer((1, tokens, out.shape[-1]))

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Buffer) -> Work:
        """Reduce-scatter of the columns' tokens, which are copied next to each other where the panel has several
        sequences."""
        parts = slabs.view(out.shape[0], self.num_parts, *out.shape[1:]).movedim(1, 0)
        if not parts.is_contiguous():
            parts = buffer(parts.shape).copy_(parts)
        return self._group.reduce_scatter(out, parts)


class Replicated(HiddenSplit):
    """Every column holds the whole residual stream: the width has one part."""

    name: ActivationLayout = "whole"
    cut_dims: tuple[int, ...] = ()

    def __init__(self, over_cols: Group) -> None:
        self._group = over_cols
        self.num_slabs = self.num_parts = 1

    def gather(self, panel: Tensor, buffer: Buffer) -> tuple[Callable[[], Tensor], Work]:
        """Nothing travels."""
        return lambda: panel.unsqueeze(0), _Done()

    def partial(self, out: Tensor, tokens: int, buffer: Buffer) -> Tensor:
        """`out` itself, as one slab: the all-reduce works in place."""
        return out.unsqueeze(0)

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Buffer) -> Work:
        """All-reduce of `out`, which the slab is a view of."""
        return self._group.all_reduce(out)


class _Done:
    """Work that was never started."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def activations_of(settings: TensorParallel, over_cols: Group) -> Activations:
    """The layout that a scheme works on, over the ranks of a row."""
    kinds: dict[ActivationLayout, type[HiddenSplit | SequenceSplit]] = {
        "hidden": HiddenSplit, "sequence": SequenceSplit, "whole": Replicated}
    return kinds[layout_of(settings.scheme, settings.sequence_sharding)](over_cols)


def layout_of(scheme: str, sequence_sharding: bool) -> ActivationLayout:
    """The name of the layout that a scheme works on."""
    if scheme != "megatron":
        return "hidden"
    return "sequence" if sequence_sharding else "whole"


def panels(num_units: int, unit_bytes: int, panel_bytes: int) -> Iterator[slice]:
    """Runs of units, as equal as possible, of at most `panel_bytes` each (but of one unit at least)."""
    count = min(num_units, max(1, -(-num_units * unit_bytes // panel_bytes)))
    edges = [num_units * number // count for number in range(count + 1)] if count else [0]
    yield from (slice(start, stop) for start, stop in pairwise(edges))
