"""A tensor mesh for blocks on the meta device, which may run equal panels of a product once and count them all.

A long sequence is sent in up to 128 panels (`layout.panels`), and most run the same operations on tensors of the same
sizes. A panel's operations depend on its own length, on that of the next panel, which is sent at the same time, on that
of the last but one, whose sum is awaited, and on which of two buffers it has. So the panels from `start` up to `stop`
are left out if all of this has been seen, and the panels at both ends of the gap follow equal ones:

    panels    0 1 ... start-1 | start ... stop-1 | stop ... n-1
    run       0 1 ... start-1                      stop ... n-1
    counted   0 1 ... start-1   as equal panels    stop ... n-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ranvier.tensor.activations import Panel
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.workspace import BUFFERS, Workspace

_Sums = tuple[int, ...]
_Length = tuple[int, ...]
_Kind = tuple[_Length, _Length, _Length, int]


class RepeatCounter(Protocol):
    """Counts operations."""

    def sums(self) -> _Sums:
        """The counts so far."""

    def repeat(self, before: _Sums, after: _Sums) -> None:
        """Count again what was counted between these two sums."""


class NoCounter:
    """Counts nothing."""

    def sums(self) -> _Sums:
        """See `RepeatCounter`."""
        return ()

    def repeat(self, before: _Sums, after: _Sums) -> None:
        """See `RepeatCounter`."""


class _MetaWorkspace(Workspace):
    """Memory of the mesh, hidden from the counter of a block's allocations."""

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """See `Workspace`."""
        with _disable_current_modes():
            return super().take(name, shape, like)


class MetaMesh(TensorMesh):
    """A tensor mesh without peers."""

    workspace_kind = _MetaWorkspace
    _count: RepeatCounter | None = None
    _only_equal = False

    @contextmanager
    def like_panels_once(self, count: RepeatCounter, *, only_equal: bool = False) -> Iterator[None]:
        """Inside, equal panels run once, and `count` repeats the others. only_equal: only if all have one length."""
        before = self._count, self._only_equal
        self._count, self._only_equal = count, only_equal
        try:
            yield
        finally:
            self._count, self._only_equal = before

    def panels(self, x: Tensor, *, exposed: bool = False, travels: bool = True, dtype: torch.dtype | None = None
               ) -> Sequence[Panel]:
        """See `TensorMesh`."""
        panels = super().panels(x, exposed=exposed, travels=travels, dtype=dtype)
        if self._count is None:
            return panels
        lengths = tuple(tuple(0 if run.stop is None else run.stop - run.start for run in panel) for panel in panels)
        gap = None if self._only_equal and len(set(lengths)) > 1 else _gap(lengths)
        return panels if gap is None else _WithoutGap(panels, gap, self._count)


@contextmanager
def like_panels_once(module: nn.Module, count: RepeatCounter) -> Iterator[None]:
    """Inside, equal panels of the products of a block on meta meshes run once, and `count` repeats the others."""
    meshes = {mesh for layer in module.modules() if isinstance(mesh := getattr(layer, "mesh", None), MetaMesh)}
    with ExitStack() as inside:
        for mesh in meshes:
            inside.enter_context(mesh.like_panels_once(count))
        yield


class _Gap(NamedTuple):
    """Panels from `start` to `stop` that are left out. kinds: of panels; those before `settled` make buffers."""

    start: int
    stop: int
    settled: int
    kinds: tuple[_Kind, ...]


@lru_cache(maxsize=256)  # called by each product, with few different lengths
def _gap(lengths: tuple[_Length, ...]) -> _Gap | None:
    """The widest gap that begins as early as possible in panels of these lengths."""
    count = len(lengths)
    if count < 4 * BUFFERS:
        return None
    kinds = tuple((lengths[max(0, place - BUFFERS)], lengths[place], lengths[place + 1], place % BUFFERS)
                  for place in range(count - 1))
    of_buffers = [lengths[buffer::BUFFERS] for buffer in range(BUFFERS)]
    settled = BUFFERS * (1 + max(each.index(max(each)) for each in of_buffers)) + 1
    for start in range(settled + BUFFERS, count // 2):
        seen, around = set(kinds[settled:start]), lengths[start - BUFFERS:start + 1]
        # not the last panel: no other is sent while it is multiplied
        stop = next((place for place in range(start, count - 1) if kinds[place] not in seen), count - 1)
        while stop > start and ((stop - start) % BUFFERS or lengths[stop - BUFFERS:stop + 1] != around):
            stop -= 1
        if stop > count // 2:
            return _Gap(start, stop, settled, kinds)
    return None


class _WithoutGap(Sequence[Panel]):
    """Panels without those of a gap."""

    def __init__(self, panels: Sequence[Panel], gap: _Gap, count: RepeatCounter) -> None:
        self._panels, self._gap, self._count = [*panels[:gap.start], *panels[gap.stop:]], gap, count

    def __len__(self) -> int:
        return len(self._panels)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # a panel, or some
        return self._panels[number]

    def __iter__(self) -> Iterator[Panel]:
        start, stop, settled, kinds = self._gap
        seen = dict[_Kind, tuple[_Sums, _Sums]]()
        for place, panel in enumerate(self._panels):
            if place == start:
                for kind in kinds[start:stop]:
                    self._count.repeat(*seen[kind])
            before = self._count.sums()
            yield panel
            if settled <= place < start:
                seen[kinds[place]] = before, self._count.sums()
