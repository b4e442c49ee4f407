"""FSDP2 (`fully_shard`) over Gloo: each rank has its share of the sequences, and gathers one layer's weights at a time.

Its backward reduces the gradients of the weights, layer by layer, which the other contenders do not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.pipeline.contender import Place
from benchmarks.tensor.autograd_stack import AutogradStack, default_group
from benchmarks.tensor.contender import Contender
from benchmarks.tensor.stem import Stem


@contextmanager
def open_fsdp(stem: Stem, contender: Contender, place: Place) -> Iterator[AutogradStack]:
    """Each layer is a unit, and so is the root, which has no other parameters."""
    if stem.microbatch % place.size:
        raise ValueError(f"{place.size} ranks do not divide a microbatch of {stem.microbatch} sequences")
    with default_group(place):
        network, mesh = stem.network(), init_device_mesh("cpu", (place.size,))
        for unit in (*network.children(), network):
            fully_shard(unit, mesh=mesh)
            # Gradients are sums over the microbatch. Gloo has no scaled sum, and each unit has its own settings.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        yield AutogradStack(network, dim=0)
