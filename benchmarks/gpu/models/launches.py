"""Kernel launches and host reads of a training step, counted on a CPU.

    python -m benchmarks.gpu.models.launches

On CUDA every operation that computes is at least one kernel launch, which takes the host some microseconds, and every
operation that reads a number back to the host (`Tensor.item`, a branch on a tensor) makes the host wait for the device
(CUDA programming guide, "Asynchronous Concurrent Execution"). If launches take longer than the kernels, the host is
the bottleneck.

A small bf16 GPT trains in the engine, and every operation that reaches the dispatcher is counted, except for views and
allocations, which launch nothing. Differences between numbers of layers and microbatches separate

    layer         operations of a layer for each microbatch, forward and backward
    microbatch    the rest of a microbatch: embedding, head, loss
    step          the rest of a step: norm, update, guard
    host reads    operations `_local_scalar_dense` of a full step
    dropout       additional operations of a step of 2 layers with dropout 0.1

The second table counts AdamW's calls for models of 1.3 and 6.7 billion parameters, from the segments and buckets into
which the optimizer divides them: about four launches for each call, and one for each bucket. The counts are those of
the CPU's operators; a device may use another number of kernels for one operator.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory.program import table
from ranvier.config.parameter_groups import group_of
from ranvier.config.resolve import bucket_size
from ranvier.config.run import Guard, Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.optim.buckets import Segment, buckets_of, within
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.world import World

HOST_READ = "_local_scalar_dense"
_NO_KERNEL = frozenset({"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
                        "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "record_stream"})


class Launches(TorchDispatchMode):
    """Counts, while it is active, the operations that launch a kernel or read a number back, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[1]
        if not function.is_view and name not in _NO_KERNEL:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def step_launches(layers: int, microbatches: int, dropout: float = 0.0) -> Counter[str]:
    """Operations of the second step of a small GPT on one rank."""
    config = Transformer(num_layers=layers, hidden=64, heads=2, vocab=256, sequence=32, dropout=dropout)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    batch = [Microbatch(tokens, tokens, torch.arange(2) + 2 * number) for number in range(microbatches)]

    def train(world: World) -> Counter[str]:
        engine = Engine(gpt(config, dtype=torch.bfloat16), world, mesh=Mesh(), optim=Optim(offload="none"),
                        learning_rate=1e-3, nominal_weight=64.0, dtype=torch.bfloat16, guard=Guard())
        engine.train_batch(batch)
        with Launches() as launches:
            engine.train_batch(batch)
        engine.close()
        counts: Counter[str] = launches.counts
        return counts

    return run_ranks(train, 1)[0]


@dataclass(frozen=True, kw_only=True)
class StepLaunches:
    """The parts of a step, as described above."""

    layer: float
    microbatch: float
    step: float
    host_reads: int
    dropout: int
    by_name: dict[str, float]
    """Operations of a layer, by name."""


def parts() -> StepLaunches:
    """Four small runs, and one with dropout."""
    runs = {(layers, microbatches): step_launches(layers, microbatches) for layers in (2, 4) for microbatches in (1, 3)}
    total = {key: counts.total() for key, counts in runs.items()}
    layer = (total[4, 3] - total[4, 1] - total[2, 3] + total[2, 1]) / 4
    microbatch = (total[2, 3] - total[2, 1]) / 2 - 2 * layer
    each = {name: (runs[4, 3][name] - runs[4, 1][name] - runs[2, 3][name] + runs[2, 1][name]) / 4
            for name in runs[4, 3]}
    return StepLaunches(
        layer=layer, microbatch=microbatch, step=total[2, 1] - microbatch - 2 * layer,
        host_reads=runs[2, 1][HOST_READ], dropout=step_launches(2, 1, dropout=0.1).total() - total[2, 1],
        by_name={name: count for name, count in sorted(each.items(), key=lambda item: -item[1]) if count})


@dataclass(frozen=True, kw_only=True)
class UpdateCalls:
    """parameters: number of the model's parameters. calls: calls of AdamW in one update."""

    parameters: int
    buckets: int
    calls: int


def update_calls(layers: int, hidden: int, heads: int, decay: Literal["all", "matrices"]) -> UpdateCalls:
    """One update of a GPT with vocabulary 50304 and sequence 2048 on one rank, with `Optim`'s own sizes."""
    optim = Optim(decay=decay)
    config = Transformer(num_layers=layers, hidden=hidden, heads=heads, vocab=50304, sequence=2048)
    with torch.device("meta"):
        modules = {name: build() for name, build in gpt(config, dtype=torch.bfloat16).blocks.items()}
    segments, start = list[Segment](), 0
    for block, module in reversed(modules.items()):
        for name, parameter in reversed(list(module.named_parameters())):
            if (block, name) == ("head", "projection.weight"):  # tied to the embedding
                continue
            group = group_of(optim, f"{block}.{name}", parameter.dim())
            stop = start + parameter.numel()
            segments.append(Segment(start, stop, group.learning_rate_factor, group.weight_decay))
            start = stop
    size = bucket_size(optim, "cuda")
    chunk = size * optim.chunk_buckets
    chunks = [(first, min(first + chunk, start)) for first in range(0, start, chunk)]
    buckets = [bucket for part in buckets_of(chunks, size) for bucket in part]
    return UpdateCalls(parameters=start, buckets=len(buckets),
                       calls=sum(len(within(segments, bucket.start, bucket.stop)) for bucket in buckets))


def main() -> int:
    torch.set_num_threads(1)
    found = parts()
    print(table(["operations", "layer", "microbatch", "step", "host reads", "dropout"],
                [["of the engine", *(f"{value:g}" for value in (found.layer, found.microbatch, found.step)),
                  found.host_reads, found.dropout]]))
    print("of a layer: " + ", ".join(f"{name} {count:g}" for name, count in found.by_name.items()) + "\n")
    rows = []
    decays: tuple[Literal["all", "matrices"], ...] = ("all", "matrices")
    for name, layers, hidden, heads in (("1.3B", 24, 2048, 16), ("6.7B", 32, 4096, 32)):
        for decay in decays:
            update = update_calls(layers, hidden, heads, decay)
            rows.append([f"{name}, decay {decay}", f"{update.parameters / 1e9:.2f}B", update.buckets, update.calls,
                         4 * update.calls + update.buckets])
    print(table(["update", "parameters", "buckets", "AdamW calls", "launches, about"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
