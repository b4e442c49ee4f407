"""Bytes of the tensor mesh that no product hides: between the start of a collective and its wait, what is computed?

    python -m benchmarks.tensor.exposed [--only 'stationary 1x8*']

A GPT layer runs forward and backward on the meta device, as rank (0, 0) of a row x col mesh in name only, with NCCL's
collectives and CUDA's panel sizes. A collective runs on a stream of its own from its start; the rank waits for it where
it calls `wait`. So its bytes are hidden, at most, behind matrix products that are issued between the two, and exposed
if there are none.
Attention and elementwise operations do not count.

Only collectives of more than 1 MiB are listed. The figure is an upper bound of what is hidden: it asks for any product
at all, not for one that takes as long as the transfer, and one product may hide several transfers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory.program import MIB, table
from ranvier.comm.meta import MetaGroup
from ranvier.config.run import TensorParallel as Settings
from ranvier.config.run import Transformer
from ranvier.models.gpt import MLP, Attention
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers

_PRODUCTS = {torch.ops.aten.mm: (0, 1), torch.ops.aten.addmm: (1, 2), torch.ops.aten.addmm_: (1, 2),
             torch.ops.aten.bmm: (0, 1)}
"""Operation -> its arguments that are multiplied."""


class Products(TorchDispatchMode):
    """Adds up, while it is active, the operations (FLOP) of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.flop = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = _PRODUCTS.get(function._overloadpacket)
        if operands is not None:
            left, right = (args[place] for place in operands)
            self.flop += 2 * left.numel() * right.shape[-1]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective. flop: of the products that were issued between its start and its wait."""

    name: str
    num_bytes: int
    flop: int


@dataclass(eq=False)
class _Pending:
    """The `Work` of a collective that notes what was computed when it is first waited for."""

    work: Any
    group: WatchedGroup
    name: str
    num_bytes: int
    flop: int
    waited: bool = field(default=False)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            flop = self.group.products.flop - self.flop
            self.group.transfers.append(Transfer(name=self.name, num_bytes=self.num_bytes, flop=flop))
        self.work.wait()


class WatchedGroup(MetaGroup):
    """A group on the meta device that lists its collectives in `transfers`, in the order of their waits."""

    def __init__(self, purpose: str, size: int, products: Products, transfers: list[Transfer]) -> None:
        super().__init__(purpose, size, device="cuda")
        self.products, self.transfers = products, transfers


def _watched(name: str) -> Any:
    def call(self: WatchedGroup, *args: Any, **options: Any) -> _Pending:
        before, flop = self.bytes_received, self.products.flop
        work = getattr(MetaGroup, name)(self, *args, **options)
        return _Pending(work, self, f"{self.purpose} {name}", self.bytes_received - before, flop)
    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"):
    setattr(WatchedGroup, _name, _watched(_name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer on a row x col mesh; batch is in sequences of all rows together."""

    scheme: str
    row: int
    col: int
    batch: int
    sequence: int
    hidden: int
    settings: Settings

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, sequence {self.sequence}, hidden {self.hidden}"
        return f"{self.scheme} {self.row}x{self.col}, {sizes}"


def _cases() -> list[Case]:
    stationary, megatron = Settings(), Settings(scheme="megatron")
    sequence, summa = Settings(scheme="megatron", sequence_sharding=True), Settings(scheme="summa")
    rows = [("stationary", stationary, 1, 8, 1, 4096, 4096), ("stationary", stationary, 1, 8, 1, 4096, 8192),
            ("stationary", stationary, 2, 4, 2, 4096, 8192), ("stationary", stationary, 8, 1, 8, 4096, 4096),
            ("stationary", stationary, 4, 4, 4, 8192, 8192), ("summa", summa, 4, 4, 4, 4096, 8192),
            ("megatron", megatron, 1, 8, 1, 4096, 8192), ("megatron-sequence", sequence, 1, 8, 1, 8192, 8192),
            ("megatron-sequence", sequence, 1, 8, 4, 8192, 8192),
            ("keep-weights", Settings(keep_weights=True), 4, 4, 4, 8192, 8192)]
    return [Case(scheme=scheme, settings=settings, row=row, col=col, batch=batch, sequence=length, hidden=hidden)
            for scheme, settings, row, col, batch, length, hidden in rows]


CASES = _cases()


def transfers(case: Case) -> list[Transfer]:
    """All collectives of one layer, forward and backward."""
    products, found = Products(), list[Transfer]()
    mesh = TensorMesh(WatchedGroup("row", case.row, products, found), WatchedGroup("col", case.col, products, found),
                      case.settings, device="cuda")
    config = Transformer(num_layers=1, hidden=case.hidden, heads=case.hidden // 128, vocab=50000,
                         sequence=case.sequence)
    shape = [case.batch // case.row, case.sequence, case.hidden]
    for dim in mesh.activations.cut_dims:
        shape[dim + 1] //= case.col
    with torch.device("meta"):
        blocks = (Attention(config, torch.bfloat16), MLP(config, torch.bfloat16))
        layer = nn.Sequential(*(split_layers(block, mesh, "block") for block in blocks))
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    with products:
        y = layer(x)
        y.backward(torch.empty_like(y))
    return found


def hidden_bytes(several: Sequence[Transfer]) -> tuple[int, int]:
    """(bytes with a product between start and wait, all bytes)."""
    return sum(one.num_bytes for one in several if one.flop), sum(one.num_bytes for one in several)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases whose name fits")
    only, rows = parser.parse_args(arguments).only, []
    for case in CASES:
        if any(fnmatch(str(case), pattern) for pattern in only):
            large = [one for one in transfers(case) if one.num_bytes > MIB]
            hidden, total = hidden_bytes(large)
            rows.append([case, len(large), f"{total / MIB:.0f}", sum(one.flop > 0 for one in large),
                         f"{100 * hidden / max(1, total):.0f} %"])
    print(table(["case", "collectives", "MiB", "with a product", "of the bytes"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
