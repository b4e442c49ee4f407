"""torch.distributed.tensor.parallel on a mesh of all ranks: Megatron's sharding, with and without sequence parallelism.

The plan is torchtitan's: projections into a sublayer are sharded by columns, those out of it by rows; between sublayers
everything is sharded along the sequence, including norms, or replicated. `qkv` is one projection (torchtitan has three,
and gathers their common input in a PrepareModuleInput), so the input of each sublayer is gathered once, by the
ColwiseParallel of its only consumer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from benchmarks.pipeline.contender import Place
from benchmarks.tensor.autograd_stack import AutogradStack, default_group
from benchmarks.tensor.contender import Contender
from benchmarks.tensor.stem import Layers, Stem


@contextmanager
def open_dtensor(stem: Stem, contender: Contender, place: Place) -> Iterator[AutogradStack]:
    """Settings: `sequence_parallel`."""
    along_sequence = bool(contender.settings["sequence_parallel"])
    if stem.heads % place.size or (along_sequence and stem.sequence % place.size):
        raise ValueError(f"{place.size} ranks do not divide {stem.heads} heads and {stem.sequence} positions")
    with default_group(place):
        yield DTensorStack(parallel(stem.network(), place.size, along_sequence), dim=1 if along_sequence else None)


def parallel(network: Layers, size: int, along_sequence: bool) -> Layers:
    """`network`, sharded in place."""
    between = Shard(1) if along_sequence else Replicate()
    into, out_of = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    plan = {"attention.qkv": into, "attention.projection": out_of, "mlp.fc1": into, "mlp.fc2": out_of}
    if along_sequence:
        plan |= {"attention.norm": SequenceParallel(), "mlp.norm": SequenceParallel()}
    mesh = init_device_mesh("cpu", (size,))
    for layer in network.children():
        parallelize_module(layer, mesh, plan)
    return network


class DTensorStack(AutogradStack):
    """`finish` sums the gradients of norms under sequence parallelism, which DTensor leaves partial."""

    def finish(self) -> None:
        partial = [parameter for parameter in self.network.parameters() if isinstance(parameter.grad, DTensor)
                   and any(placement.is_partial() for placement in parameter.grad.placements)]
        for parameter in partial:
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()], async_op=True)
        for parameter in partial:
            local = parameter.grad.to_local()
            if isinstance(local, AsyncCollectiveTensor):
                local.wait()
