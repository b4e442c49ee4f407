"""How the residual stream lies on the mesh, and how products gather it and add up what they leave of it.

    layout     x_BSH on a rank       gather                      scatter (of partial sums)
    hidden     [B/r, S, H/c]         all-gather over cols        reduce-scatter over cols
    sequence   [B, S/c, H]           all-gather over cols        reduce-scatter over cols
    whole      [B, S, H]             itself                      all-reduce over cols

B, S, H: the microbatch, its sequence and hidden width; r x c the mesh. `hidden` is Optimus' (and ours), `whole` is
Megatron's, `sequence` is Megatron's with sequence sharding. A product sees flat tokens: T = what a row's ranks have
together. It works on panels, runs of `units` (tokens, or sequences where tokens of one lie on several ranks), and
takes x as slabs [k, T, width / k] that follow each other in width: as they arrive, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ranvier.errors import DivisibilityError

if TYPE_CHECKING:
    from ranvier.comm.protocol import Work
    from ranvier.tensor.mesh import TensorMesh


class Activations(Protocol):
    """One of the three layouts."""

    name: str
    num_slabs: int
    """Pieces in which the width of a gathered tensor comes."""
    num_parts: int
    """Ranks whose parts of a panel are gathered."""
    cut_dims: tuple[int, ...]
    """Of the trailing dims (S, H) those that the columns share."""

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        """Leading dims of what all columns have together."""

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The inverse: leading dims on this rank. DivisibilityError when they cannot be shared."""

    def own_width(self, width: int) -> int:
        """Of `width` features, those on this rank."""

    def units(self, x: Tensor) -> Tensor:
        """x as [units, ...], a view: what panels are cut from."""

    def tokens(self, x: Tensor) -> int:
        """Tokens behind one unit of `x`, on all columns together."""

    def gather(self, panel: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> tuple[Callable[[], Tensor], Work]:
        """Start collecting a panel; once the work is done, the call gives its slabs."""

    def partial(self, out: Tensor, tokens: int, buffer: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """Slabs for this rank's share of the sums that will be `out` (units of an x)."""

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> Work:
        """Start adding up all columns' slabs; `out` gets this rank's part of the sum."""


class HiddenSplit:
    """Columns share the width."""

    name, cut_dims = "hidden", (1,)

    def __init__(self, mesh: TensorMesh) -> None:
        self._group = mesh.over_cols
        self.num_slabs = self.num_parts = mesh.num_cols

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[:-1])

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        return tuple(whole)

    def own_width(self, width: int) -> int:
        return width // self.num_slabs

    def units(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def tokens(self, x: Tensor) -> int:
        return 1

    def gather(self, panel: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> tuple[Callable[[], Tensor], Work]:
        slabs = buffer((self.num_slabs, *panel.shape))
        return lambda: slabs, self._group.all_gather(slabs, panel.contiguous())

    def partial(self, out: Tensor, tokens: int, buffer: Callable[[Sequence[int]], Tensor]) -> Tensor:
        return buffer((self.num_slabs, *out.shape))

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> Work:
        return self._group.reduce_scatter(out, slabs)


class SequenceSplit:
    """Columns share the sequence."""

    name, cut_dims, num_slabs = "sequence", (0,), 1

    def __init__(self, mesh: TensorMesh) -> None:
        self._group = mesh.over_cols
        self.num_parts = mesh.num_cols

    def whole_dims(self, x: Tensor) -> tuple[int, ...]:
        return x.shape[0], x.shape[1] * self.num_parts

    def own_dims(self, whole: Sequence[int]) -> tuple[int, ...]:
        if whole[1] % self.num_parts:
            raise DivisibilityError(f"cannot be shared by {self.num_parts} columns", where="sequence of the inputs",
                                    value=whole[1], remedy="Feed sequences whose length mesh.col divides, or set "
                                                           "--tensor.sequence-sharding false.")
        return whole[0], whole[1] // self.num_parts

    def own_width(self, width: int) -> int:
        return width

    def units(self, x: Tensor) -> Tensor:
        return x

    def tokens(self, x: Tensor) -> int:
        return x.shape[1] * self.num_parts

    def gather(self, panel: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> tuple[Callable[[], Tensor], Work]:
        parts = buffer((self.num_parts, *panel.shape))
        return (lambda: parts.movedim(0, 1).reshape(1, -1, panel.shape[-1]),
                self._group.all_gather(parts, panel.contiguous()))

    def partial(self, out: Tensor, tokens: int, buffer: Callable[[Sequence[int]], Tensor]) -> Tensor:
        return buffer((1, tokens, out.shape[-1]))

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> Work:
        parts = slabs.view(out.shape[0], self.num_parts, *out.shape[1:]).movedim(1, 0)
        if not parts.is_contiguous():
            parts = buffer(parts.shape).copy_(parts)
        return self._group.reduce_scatter(out, parts)


class Replicated(HiddenSplit):
    """Columns share nothing: as if the width had one part."""

    name, cut_dims = "whole", ()

    def __init__(self, mesh: TensorMesh) -> None:
        self._group = mesh.over_cols
        self.num_slabs = self.num_parts = 1

    def gather(self, panel: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> tuple[Callable[[], Tensor], Work]:
        return lambda: panel.unsqueeze(0), _Done()

    def partial(self, out: Tensor, tokens: int, buffer: Callable[[Sequence[int]], Tensor]) -> Tensor:
        return out.unsqueeze(0)

    def scatter(self, slabs: Tensor, out: Tensor, buffer: Callable[[Sequence[int]], Tensor]) -> Work:
        return self._group.all_reduce(out)


class _Done:
    def wait(self) -> None:
        pass


def activations_of(mesh: TensorMesh) -> Activations:
    """The layout that the mesh's scheme works on."""
    kinds = {"hidden": HiddenSplit, "sequence": SequenceSplit, "whole": Replicated}
    return kinds[layout_of(mesh.settings.scheme, mesh.settings.sequence_sharding)](mesh)


def layout_of(scheme: str, sequence_sharding: bool) -> str:
    """hidden, sequence or whole."""
    if scheme != "megatron":
        return "hidden"
    return "sequence" if sequence_sharding else "whole"


def panels(num_units: int, unit_bytes: int, panel_bytes: int) -> Iterator[slice]:
    """Runs of units, as equal as can be, of at most `panel_bytes` each (one unit at least)."""
    count = min(num_units, max(1, -(-num_units * unit_bytes // panel_bytes)))
    edges = [num_units * number // count for number in range(count + 1)] if count else [0]
    yield from (slice(start, stop) for start, stop in pairwise(edges))
