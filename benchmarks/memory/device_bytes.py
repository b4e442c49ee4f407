"""Device bytes of parameters, gradients, states and buckets, measured while one rank trains, against the formulas.

    python -m benchmarks.memory.device_bytes [--quick]

Claims about memory are compared with counted bytes: every storage from the operation that makes it
(ranvier.testing.memory), with a CPU as the device. With phi parameters in bf16, buckets of b parameters and d of them
in flight, AdamW needs

    offload   gradients add up in fp32    in bf16
    none      18 phi                      16 phi + 4 b
    stream    6 phi + 12 d b              4 phi + (12 d + 4) b
    host      6 phi                       4 phi

(The paper's 20 phi keeps a full fp32 gradient in addition to the bf16 one; there is no such buffer here.) Master copies
are compared with parameters before an update, 16,384 elements at a time on a CPU, which takes 3 bytes for each of
these.

`measured` is the larger of two peaks: of a full step, less the activations that live at its peak; and of the update
alone with all that it allocates. "without" is the need of the same step with offload none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.memory.program import build_engine, mib, parser, replica_batch, table, write
from benchmarks.pipeline.workload import Workload
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.testing.memory import MemoryTracker
from ranvier.testing.ranks import run_ranks
from ranvier.world import World

FULL = Workload(num_layers=4, hidden=256, vocab=4096, sequence=32, sequences=4, microbatches=2)
COMPARED_BYTES = 3 * 16_384
QUICK = Workload(num_layers=2, hidden=64, heads=2, vocab=1024, sequence=16, sequences=2, microbatches=2)


def predicted_bytes(optim: Optim, phi: int) -> int:
    """The formula for bf16 parameters and AdamW."""
    size, depth, half = optim.bucket_size, optim.buckets_in_flight, optim.accumulate == "half"
    lasting = (4 if half else 6) * phi
    scaled = 4 * size if half else 0
    match optim.offload:
        case "none":
            return lasting + 12 * phi + scaled
        case "stream":
            return lasting + 12 * depth * size + scaled
        case _:
            return lasting


def measure_one(world: World, workload: Workload, optim: Optim) -> dict[str, object]:
    """phi, and device bytes by category at the peaks."""
    engine = build_engine(workload, world, Mesh(), optim, torch.bfloat16)
    engine.train_batch(replica_batch(workload, engine, 0))
    tracker = MemoryTracker()
    for place, categories in engine.tensors().items():
        for category, tensors in categories.items():
            tracker.tag(tensors, category, place=place)
    with tracker:
        loss = engine.train_batch(replica_batch(workload, engine, 1)).loss
        step = tracker.at_peak()
        result = engine.forward_backward(replica_batch(workload, engine, 2))
        tracker.reset_peak()
        with tracker.category("update"):
            engine.step(result)
        update = tracker.at_peak()
    phi = sum(parameter.numel() for parameter in engine.parameters())
    engine.close()
    lasting = {category: size for category, size in step.items() if category != "activations"}
    during = {category: size for category, size in update.items() if category != "activations"}
    return {"phi": phi, "loss": loss, "step": lasting, "update": during, "activations": step.get("activations", 0),
            "measured": max(sum(lasting.values()), sum(during.values()))}


def cases(sizes: Sequence[int], depths: Sequence[int]) -> list[Optim]:
    """Every setting once: bucket sizes matter if there are buckets, depths if they are streamed."""
    return [Optim(accumulate=accumulate, offload=offload, bucket_size=size, buckets_in_flight=depth)
            for accumulate in ("fp32", "half") for offload in ("none", "stream", "host") for size in sizes
            for depth in (depths if offload == "stream" else depths[:1])]


def measure(options: argparse.Namespace) -> list[dict]:
    workload = QUICK if options.quick else FULL
    rows = []
    for optim in cases(options.bucket_sizes, options.depths):
        (found,) = run_ranks(lambda world, optim=optim: measure_one(world, workload, optim), 1)
        predicted = predicted_bytes(optim, found["phi"]) + COMPARED_BYTES
        rows.append({"accumulate": optim.accumulate, "offload": optim.offload, "bucket_size": optim.bucket_size,
                     "in_flight": optim.buckets_in_flight, **found, "predicted": predicted,
                     "ratio": found["measured"] / predicted})
    without = {(row["accumulate"], row["bucket_size"]): row["measured"] for row in rows if row["offload"] == "none"}
    for row in rows:
        row["without_offload"] = without[row["accumulate"], row["bucket_size"]]
    head = ("accumulate", "offload", "phi", "b", "d", "predicted MiB", "measured MiB", "ratio", "without MiB",
            "of without", "bytes/phi")
    print(table(head, [(row["accumulate"], row["offload"], row["phi"], row["bucket_size"],
                        row["in_flight"] if row["offload"] == "stream" else "-", mib(row["predicted"]),
                        mib(row["measured"]), f"{row['ratio']:.4f}", mib(row["without_offload"]),
                        f"{row['measured'] / row['without_offload']:.3f}", f"{row['measured'] / row['phi']:.2f}")
                       for row in rows]))
    write(options, "device-bytes", {"workload": asdict(workload), "rows": rows})
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--bucket-sizes", type=int, nargs="+", help="parameters in a bucket")
    made.add_argument("--depths", type=int, nargs="+", default=[1, 3], help="buckets in flight")
    options = made.parse_args(arguments)
    options.bucket_sizes = options.bucket_sizes or ([4096, 16384] if options.quick else [65536, 262144])
    return options


if __name__ == "__main__":
    measure(parse())
