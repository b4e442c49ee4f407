"""The contenders, and the interface of a contender.

To add a contender: a `Builder` in its own module, and a line in `contenders`. The program and the tests use all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from benchmarks.pipeline.contender import Launch, Place
from benchmarks.tensor.stem import Stem


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of the table: a way to do the work of a `Stem` on row x col ranks.

    build: "module:function", a `Builder`. Only the contender's own ranks load the module.
    mesh: as in `ranvier.mesh.Mesh`: rows share the microbatch, columns the hidden dimension.
    transport: ranks of "mpi" are started by mpiexec, those of "gloo" one by one.
    settings: JSON values for the builder.
    """

    name: str
    build: str
    mesh: tuple[int, int]
    transport: Literal["gloo", "mpi"] = "gloo"
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))  # JSON has only lists

    @property
    def ranks(self) -> int:
        row, col = self.mesh
        return row * col

    @property
    def launch(self) -> Launch:
        return "mpi" if self.transport == "mpi" else "processes"


class Stack(Protocol):
    """One rank's part of the stack, ready to run. All ranks call every method, in the same order."""

    def share(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor [B, S, H] that all ranks have, x or dy, in its own memory."""

    def forward(self, x_local: Tensor) -> Tensor:
        """y of this rank's part. Keeps what the backward needs."""

    def backward(self, dy_local: Tensor) -> Tensor:
        """dx of this rank's part; parameters have their gradients."""

    def finish(self) -> None:
        """Sum gradients that are still partial sums over some positions: once a batch, not once a microbatch."""

    def clear(self) -> None:
        """Release all gradients."""

    def wait(self) -> None:
        """Return when all ranks have called this."""

    def saved_bytes(self, x_local: Tensor) -> int:
        """Bytes that are kept between a forward and its backward, without parameters and gradients. Has no side
        effects."""

    def assemble(self, local: Tensor) -> Tensor:
        """The full [B, S, H], from every rank's y or dx."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The name in `Layers` and the full gradient of each parameter, after `finish`."""


Builder = Callable[[Stem, Contender, Place], AbstractContextManager[Stack]]
"""Sets up one rank, within its `with`, from `Stem.network`'s weights. ValueError if ranks and sizes do not fit."""


def contenders(ranks: int = 4) -> list[Contender]:
    """All contenders on `ranks` ranks, in the order of the table."""
    dtensor, fsdp = "benchmarks.tensor.dtensor:open_dtensor", "benchmarks.tensor.fsdp:open_fsdp"
    return [
        Contender(name="dtensor-sp", build=dtensor, mesh=(1, ranks), settings={"sequence_parallel": True}),
        Contender(name="dtensor", build=dtensor, mesh=(1, ranks), settings={"sequence_parallel": False}),
        Contender(name="fsdp2", build=fsdp, mesh=(ranks, 1)),
        *_ours(ranks)]


def _ours(ranks: int) -> list[Contender]:
    """Every scheme on every mesh on which it differs from the others, over both transports."""
    meshes = [(row, ranks // row) for row in range(1, ranks + 1) if ranks % row == 0]
    schemes: list[tuple[str, tuple[int, int], dict[str, object]]] = [
        (scheme, mesh, {"scheme": scheme}) for scheme in ("stationary", "summa") for mesh in meshes]
    schemes += [("stationary-sp", mesh, {"scheme": "stationary", "sequence_sharding": True})
                for mesh in meshes if mesh[1] > 1]
    schemes += [("megatron", (1, ranks), {"scheme": "megatron"}),
                ("megatron-sp", (1, ranks), {"scheme": "megatron", "sequence_sharding": True})]
    return [Contender(name=f"{name}-{row}x{col}-{transport}", build="benchmarks.tensor.ours:open_ours",
                      mesh=(row, col), transport=transport, settings=settings)
            for transport in ("gloo", "mpi") for name, (row, col), settings in schemes]


def builder(contender: Contender) -> Builder:
    """The function named by `contender.build`; its module, with its imports, is loaded here."""
    module, _, function = contender.build.partition(":")
    return getattr(importlib.import_module(module), function)
