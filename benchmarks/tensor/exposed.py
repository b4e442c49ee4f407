"""Bytes of the tensor mesh that no product hides: is anything computed between the start of a collective and its wait?

    python -m benchmarks.tensor.exposed [--only 'stationary 1x8*'] [--cluster h100]

The layers of a GPT stage run forward and backward on the meta device, as one rank of a row x col mesh in name only,
with NCCL's collectives and CUDA's panel sizes. A collective runs on a stream of its group from its start, after those
that were started before; the rank continues to compute, and stalls if it calls `wait` too early. Only matrix products
take time here: attention and elementwise operations do not count, and collectives of every size do.

    no product    of the bytes, those of collectives without any product between start and wait
    waited for    time that the rank stands still, of the time of all collectives, at the cluster's rates. A product
                  hides as much as it takes, once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.program import table
from ranvier.comm.meta import MetaGroup
from ranvier.config.run import TensorParallel as Settings
from ranvier.config.run import Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.models.gpt import MLP, Attention
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import WeightUse
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.weight_gradients import WeightGradients, root_of

LAYERS = 8
"""Layers of a stage. The exposed bytes of its first weight and its last gradients count once, for any number of
layers."""
_PRODUCTS = {torch.ops.aten.mm: (0, 1), torch.ops.aten.addmm: (1, 2), torch.ops.aten.addmm_: (1, 2),
             torch.ops.aten.bmm: (0, 1), torch.ops.aten.baddbmm: (1, 2), torch.ops.aten.baddbmm_: (1, 2)}
"""Operation -> indices of its arguments that are multiplied."""
_IN_PLACE = {torch.ops.aten.addmm_, torch.ops.aten.baddbmm_}


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective. flop: of the products that were issued between its start and its wait. waited_seconds: stall of
    the rank for it."""

    name: str
    num_bytes: int
    flop: int
    seconds: float
    waited_seconds: float


@dataclass(kw_only=True, eq=False)
class Clock:
    """The compute stream of a rank: FLOP of the issued products, and when the last one ends."""

    flops_per_second: float = 1e15
    bytes_per_second: float = 1e12
    flop: int = 0
    now: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)


class Products(TorchDispatchMode):
    """While active, adds matrix products to a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = _PRODUCTS.get(function._overloadpacket)
        if operands is not None:
            left, right = (args[place] for place in operands)
            flop = 2 * left.numel() * right.shape[-1]
            self.clock.flop += flop
            self.clock.now += flop / self.clock.flops_per_second
            if kwargs and "out" in kwargs:  # there are no values to compute
                return kwargs["out"]
            if function._overloadpacket in _IN_PLACE:
                return args[0]
        return function(*args, **(kwargs or {}))


class _Pending:
    """The `Work` of a collective, which records the computation so far at the first wait."""

    def __init__(self, work: Any, clock: Clock, name: str, num_bytes: int, free: float) -> None:
        self._work, self._clock, self._name, self._bytes = work, clock, name, num_bytes
        self._flop, self._seconds = clock.flop, num_bytes / clock.bytes_per_second
        self.end = max(free, clock.now) + self._seconds
        self._waited = False

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        clock = self._clock
        if not self._waited:
            self._waited = True
            waited = max(0.0, self.end - clock.now)
            clock.transfers.append(Transfer(name=self._name, num_bytes=self._bytes, flop=clock.flop - self._flop,
                                            seconds=self._seconds, waited_seconds=waited))
            clock.now += waited
        self._work.wait()


class WatchedGroup(MetaGroup):
    """A group on the meta device whose collectives run one after another; the clock lists them in the order of their
    waits."""

    def __init__(self, purpose: str, size: int, clock: Clock, index: int = 0) -> None:
        super().__init__(purpose, size, index, device="cuda")
        self.clock, self.free = clock, 0.0


def _watched(name: str) -> Any:
    def call(self: WatchedGroup, *args: Any, **options: Any) -> _Pending:
        before = self.bytes_received
        work = getattr(MetaGroup, name)(self, *args, **options)
        pending = _Pending(work, self.clock, f"{self.purpose} {name}", self.bytes_received - before, self.free)
        self.free = pending.end
        return pending
    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"):
    setattr(WatchedGroup, _name, _watched(_name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers on a row x col mesh. sequences: sequences of a row. deferred: whether weight gradients wait until the
    backward has passed all layers. at: (row, col) of the rank."""

    scheme: str
    row: int
    col: int
    sequences: int
    sequence: int
    hidden: int
    recomputed: bool = False
    deferred: bool = False
    at: tuple[int, int] = (0, 0)

    @property
    def settings(self) -> Settings:
        """Settings by the name of the scheme."""
        return SETTINGS[self.scheme]

    def __str__(self) -> str:
        words = (f"{self.scheme} {self.row}x{self.col}, {self.sequences} of {self.sequence} tokens, hidden "
                 f"{self.hidden}")
        return words + ", recomputed" * self.recomputed + ", deferred" * self.deferred


SETTINGS = {"stationary": Settings(), "summa": Settings(scheme="summa"), "megatron": Settings(scheme="megatron"),
            "stationary-sequence": Settings(sequence_sharding=True),
            "megatron-sequence": Settings(scheme="megatron", sequence_sharding=True),
            "keep-weights": Settings(keep_weights=True)}
HELD = [Case(scheme=scheme, row=row, col=col, sequences=sequences, sequence=4096, hidden=hidden, recomputed=recomputed,
             deferred=deferred)
        for scheme, row, col in (("stationary", 1, 8), ("stationary", 2, 4), ("stationary", 8, 1), ("stationary", 4, 4),
                                 ("stationary-sequence", 2, 4), ("megatron-sequence", 1, 8))
        for hidden in (4096, 8192) for sequences in (1, 4) for recomputed, deferred in (
            (False, False), (True, False), (False, True))]
"""Cases in which at most the share `LIMIT` of the bytes may be hidden by no product."""
LIMIT = 0.51
"""The share with eight columns, one sequence and deferred products: half of each activation, in the first of two
panels."""
WAITED = {4096: 0.61, 8192: 0.56}
"""Hidden size -> share of the time of all collectives that a rank may stall at the rates of an H100, which is that of
the same cases. More panels would hide more, but their products would lose more than that (`layout.panels`)."""
CASES = HELD + [Case(scheme=scheme, row=row, col=col, sequences=1, sequence=4096, hidden=8192)
                for scheme, row, col in (("megatron", 1, 8), ("summa", 4, 4), ("keep-weights", 4, 4))]


def transfers(case: Case, cluster: Cluster | None = None) -> list[Transfer]:
    """All collectives of the layers, forward and backward, in the second step. cluster: None for any."""
    clock = Clock() if cluster is None else _clock(cluster)
    over_rows, over_cols = (WatchedGroup(axis, size, clock, index) for axis, size, index in (
        ("row", case.row, case.at[0]), ("col", case.col, case.at[1])))
    mesh = TensorMesh(over_rows, over_cols, case.settings, device="cuda")
    config = Transformer(num_layers=LAYERS, hidden=case.hidden, heads=case.hidden // 128, vocab=50000,
                         sequence=case.sequence)
    shape = [case.sequences, case.sequence, case.hidden]
    for dim in mesh.activations.cut_dims:
        shape[dim + 1] //= case.col
    with torch.device("meta"):
        layers = [nn.Sequential(*(split_layers(block, mesh, "block") for block in (
            Attention(config, torch.bfloat16), MLP(config, torch.bfloat16)))) for _ in range(LAYERS)]
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.grad = torch.empty_like(parameter)
    linears = [module for layer in layers for module in layer.modules() if isinstance(module, SplitLinear)]
    gradients = WeightGradients(lambda parameters: [0], lambda chunks: None, after=mesh.sums.call_after)
    for linear in linears:
        linear.weight_gradients, linear.has_own_weights, linear.may_wait = gradients, True, case.deferred
        linear.recomputed = case.recomputed
    forward, backward = list[WeightUse](), list[WeightUse]()
    with Products(clock):
        for _ in range(1 if case.row == 1 else 2):  # the first step learns which weight follows which
            clock.transfers.clear()
            with mesh.one_pass(forward):
                y: Tensor = x
                for layer in layers:
                    y = cast(Tensor, checkpoint(layer, y, use_reentrant=False)) if case.recomputed else layer(y)
            with mesh.one_pass(backward):
                products = gradients.backward_pass(0, [root_of(y)], [torch.empty_like(y)], case.deferred)
            for number in range(len(products)):
                gradients.run(0, number)
            mesh.sums.finish()
            for linear in linears:
                linear.forget()
    return clock.transfers


def _clock(cluster: Cluster) -> Clock:
    rate = cluster.device.rates["bf16"]
    return Clock(flops_per_second=rate.peak_flops * rate.share, bytes_per_second=cluster.inside.rate())


def hidden_bytes(several: Sequence[Transfer]) -> tuple[int, int]:
    """(bytes with a product between start and wait, all bytes)."""
    return sum(one.num_bytes for one in several if one.flop), sum(one.num_bytes for one in several)


def waited_share(several: Sequence[Transfer]) -> float:
    """Stall of the rank as a share of the time of all collectives."""
    return sum(one.waited_seconds for one in several) / (sum(one.seconds for one in several) or 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases whose name fits")
    parser.add_argument("--cluster", default="h100", help="name or file of a cluster, for the rates")
    options, rows = parser.parse_args(arguments), []
    cluster = load_cluster(options.cluster)
    for case in CASES:
        if any(fnmatch(str(case), pattern) for pattern in options.only):
            found = transfers(case, cluster)
            hidden, total = hidden_bytes(found)
            rows.append([case, len(found) // LAYERS, f"{total / LAYERS / 2**20:.0f}",
                         f"{100 * (1 - hidden / max(1, total)):.1f} %", f"{100 * waited_share(found):.0f} %"])
    print(table(["case", "collectives a layer", "MiB", "no product", "waited for"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
