"""A tensor mesh for blocks on the meta device, which may run equal panels of a product once and count them all.

A long sequence travels in up to 128 panels (`layout.panels`), and each runs the same operations on tensors of the same
sizes. Only the first ones differ, for which buffers are made, and the last one, after which none travels:

    panels    0 1 | 2 3 | 4 5 | ... | n-4 n-3 | n-2 n-1        two buffers take turns, so that a period has two panels
    run       0 1 | 2 3 |                       n-2 n-1
    counted   0 1 | 2 3   x (n - 4) / 2         n-2 n-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ranvier.tensor.activations import Panel
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.workspace import BUFFERS


class Repeats(Protocol):
    """Counts operations."""

    def sums(self) -> tuple[int, ...]:
        """What is counted so far."""

    def repeat(self, before: tuple[int, ...], times: int) -> None:
        """Count so many times more what was counted since `before`."""


class MetaMesh(TensorMesh):
    """A tensor mesh without peers."""

    _count: Repeats | None = None

    @contextmanager
    def equal_panels_once(self, count: Repeats) -> Iterator[None]:
        """Inside, equal panels run once, and `count` is told how many there are."""
        before, self._count = self._count, count
        try:
            yield
        finally:
            self._count = before

    def panels(self, x: Tensor, *, exposed: bool = False, travels: bool = True, dtype: torch.dtype | None = None
               ) -> Sequence[Panel]:
        """See `TensorMesh`."""
        panels = super().panels(x, exposed=exposed, travels=travels, dtype=dtype)
        return panels if self._count is None else _shortened(panels, self._count)


@contextmanager
def equal_panels_once(module: nn.Module, count: Repeats) -> Iterator[None]:
    """Inside, equal panels of the products of a block on meta meshes run once, and `count` is told how many there
    are."""
    meshes = {mesh for layer in module.modules() if isinstance(mesh := getattr(layer, "mesh", None), MetaMesh)}
    with ExitStack() as inside:
        for mesh in meshes:
            inside.enter_context(mesh.equal_panels_once(count))
        yield


class _Shortened(Sequence[Panel]):
    """Panels of which one period is left of several equal ones."""

    def __init__(self, panels: Sequence[Panel], period: int, times: int, count: Repeats) -> None:
        self._panels, self._period, self._times, self._count = panels, period, times, count

    def __len__(self) -> int:
        return len(self._panels)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # a panel, or some
        return self._panels[number]

    def __iter__(self) -> Iterator[Panel]:
        period = self._period
        yield from self._panels[:period]
        before = self._count.sums()
        yield from self._panels[period:2 * period]
        self._count.repeat(before, self._times)
        yield from self._panels[2 * period:]


def _shortened(panels: Sequence[Panel], count: Repeats) -> Sequence[Panel]:
    """The panels without periods that are equal to the second one. The last panel is not in a period: no other travels
    while it is multiplied."""
    lengths = [tuple(None if run.stop is None else run.stop - run.start for run in panel) for panel in panels]
    # Runs as equal as possible repeat their lengths; most are equal.
    period = next((period for period in range(BUFFERS, len(panels) // 3 + 1, BUFFERS)
                   if lengths[period:] == lengths[:-period]), None)
    if period is None:
        return panels
    times = (len(panels) - 1 - period) // period - 1
    return _Shortened(panels[:len(panels) - times * period], period, times, count) if times > 0 else panels
