"""Time of each block on this machine, while as many ranks as the contenders use are busy.

The cut of the stages and the computed bounds come from these times. Each block runs on its own between detached leaves,
in the order of a training step; the share of the weight products is what the backward saves when the linear layers'
weights need no gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.pipeline.contender import Contender, Place
from benchmarks.pipeline.workload import Loss, Stepper, Workload, build_blocks


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """One entry per block; seconds of one microbatch. The loss belongs to the last block.

    backward: without the products of `weight`. products, alive_bytes: number of linear layers, and bytes that deferring
    their products keeps alive.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    num_parameters: tuple[int, ...]
    products: tuple[int, ...]
    alive_bytes: tuple[int, ...]
    optimizer_seconds_per_parameter: float

    def seconds(self, blocks: range) -> float:
        """Forward and backward of one microbatch."""
        return sum(self.forward[b] + self.backward[b] + self.weight[b] for b in blocks)


def mean_times(several: list[dict]) -> BlockTimes:
    """The mean of what several ranks reported."""
    def mean(name: str) -> tuple[float, ...]:
        return tuple(sum(values) / len(several) for values in zip(*(one[name] for one in several), strict=True))

    first = several[0]
    return BlockTimes(
        forward=mean("forward"), backward=mean("backward"), weight=mean("weight"),
        num_parameters=tuple(first["num_parameters"]), products=tuple(first["products"]),
        alive_bytes=tuple(first["alive_bytes"]),
        optimizer_seconds_per_parameter=sum(one["optimizer_seconds_per_parameter"] for one in several) / len(several))


@contextmanager
def open_times(workload: Workload, contender: Contender, place: Place) -> Iterator[Stepper]:
    """A "step" times one microbatch with and one without the weight products, and one update of all parameters.

    Tied parameters are measured as separate ones: each block holds all parameters that it uses.
    """
    workload = replace(workload, tied=False)
    model = workload.model()
    blocks = list(build_blocks(workload, model, range(workload.num_blocks)).values())
    inputs, targets = (tensor[:workload.microbatch_size] for tensor in workload.batch(0, replica=place.rank))
    linears = [[module for module in block.modules() if isinstance(module, nn.Linear)] for block in blocks]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    optimizer = workload.optimizer(parameters)
    alive_bytes = _alive_bytes(blocks, linears, inputs)
    full: list[_Chain] = []
    without_weights: list[_Chain] = []
    updates: list[float] = []

    def loss(logits: Tensor) -> Tensor:
        return model.loss(logits, targets)[0] / workload.tokens_per_step

    def step(number: int) -> Loss:
        for chains, wanted in ((full, True), (without_weights, False)):
            for linear in (linear for group in linears for linear in group):
                linear.weight.requires_grad_(wanted)
            chains.append(_chain(blocks, inputs, loss))
        started = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - started)
        return lambda: None

    def report() -> dict:
        whole = [median(times) for times in zip(*(chain.backward for chain in full), strict=True)]
        partly = [median(times) for times in zip(*(chain.backward for chain in without_weights), strict=True)]
        weight = [max(0.0, a - b) if group else 0.0 for a, b, group in zip(whole, partly, linears, strict=True)]
        forward = [median(times) for times in zip(*(chain.forward for chain in full + without_weights), strict=True)]
        found = {"forward": forward, "weight": weight,
                 "backward": [a - b for a, b in zip(whole, weight, strict=True)],
                 "num_parameters": [sum(p.numel() for p in block.parameters()) for block in blocks],
                 "products": [len(group) for group in linears], "alive_bytes": alive_bytes,
                 "optimizer_seconds_per_parameter": median(updates) / sum(p.numel() for p in parameters)}
        for samples in (full, without_weights, updates):
            samples.clear()
        return found

    yield Stepper(run=step, report=report)


@dataclass(frozen=True)
class _Chain:
    """Seconds of each block."""

    forward: list[float]
    backward: list[float]


def _chain(blocks: list[nn.Module], inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> _Chain:
    """One microbatch through all blocks and back, block by block."""
    forward, backward, graphs = [], [], []
    state = inputs
    for number, block in enumerate(blocks):
        leaf = state.detach().requires_grad_(state.is_floating_point())
        started = time.perf_counter()
        state = block(leaf)
        if number == len(blocks) - 1:
            state = loss(state)
        forward.append(time.perf_counter() - started)
        graphs.append((leaf, state))
    gradient = None
    while graphs:
        leaf, state = graphs.pop()
        started = time.perf_counter()
        torch.autograd.backward(state, gradient)
        backward.append(time.perf_counter() - started)
        gradient = leaf.grad
    return _Chain(forward, backward[::-1])


@torch.no_grad()
def _alive_bytes(blocks: list[nn.Module], linears: list[list[nn.Linear]], inputs: Tensor) -> list[int]:
    """Bytes of the inputs and outputs of each block's linear layers."""
    counts = [0] * len(blocks)

    def count(number: int, x: Tensor, y: Tensor) -> None:
        counts[number] += sum(tensor.numel() * tensor.element_size() for tensor in (x, y))

    hooks = [linear.register_forward_hook(lambda module, args, y, number=number: count(number, args[0], y))
             for number, group in enumerate(linears) for linear in group]
    state = inputs
    for block in blocks:
        state = block(state)
    for hook in hooks:
        hook.remove()
    return counts
