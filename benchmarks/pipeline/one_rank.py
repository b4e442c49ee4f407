"""The engine on one rank against a plain loop: a user's modules, loss and optimizer, the same batches, in one process.

    python -m benchmarks.pipeline.one_rank [--rounds 7] [--steps 20]

Two small models, since the cost of the engine is a time per microbatch and not a share. The ratio is formed within each
round; the losses of all steps must agree. `host` is the additional time of a microbatch in the engine, as CPU time of
the fastest steps: other programs on the machine hardly change it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ranvier
from benchmarks.gpu.layers import PlainLayer
from benchmarks.memory.program import table
from benchmarks.record import results_file, write_results
from benchmarks.tensor.stem import Stem


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    layers: int
    sequences: int
    """Sequences of a microbatch."""
    tokens: int
    """Tokens of a sequence."""
    microbatches: int = 4
    vocabulary: int = 256


SIZES = (Size(width=128, layers=4, sequences=2, tokens=64), Size(width=32, layers=2, sequences=2, tokens=16))


def network(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    stem = Stem(num_layers=size.layers, hidden=size.width, heads=4, sequence=size.tokens, microbatch=size.sequences)
    return nn.Sequential(nn.Embedding(size.vocabulary, size.width), *(PlainLayer(stem) for _ in range(size.layers)),
                         nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary))


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def plain_loop(size: Size) -> Callable[[Tensor, Tensor], float]:
    model = network(size)
    optimizer = adamw(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for part, expected in zip(inputs.split(size.sequences), targets.split(size.sequences), strict=True):
            total, _ = cross_entropy(model(part), expected)
            total = total / targets.numel()
            total.backward()
            loss += total.detach()
        optimizer.step()
        return loss.item()

    return step


def engine_loop(size: Size, world: ranvier.World) -> Callable[[Tensor, Tensor], float]:
    engine = ranvier.Engine(network(size), world, loss=cross_entropy, optimizer=adamw)
    return lambda inputs, targets: engine.train_batch(ranvier.microbatches(inputs, targets, size.sequences)).loss


def compare(size: Size, world: ranvier.World, rounds: int, steps: int) -> dict[str, Any]:
    loops = {"plain": plain_loop(size), "ranvier": engine_loop(size, world)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    least = dict.fromkeys(loops, float("inf"))
    for turn in range(rounds + 1):
        generator = torch.Generator().manual_seed(turn)
        shape = (steps, size.microbatches * size.sequences, size.tokens)
        inputs = torch.randint(size.vocabulary, shape, generator=generator)
        targets = torch.randint(size.vocabulary, shape, generator=generator)
        for name in loops if turn % 2 == 0 else reversed(loops):
            started = time.perf_counter()
            for number in range(steps):
                began = time.thread_time()
                losses[name].append(loops[name](inputs[number], targets[number]))
                least[name] = min(least[name], time.thread_time() - began)
            if turn:
                seconds[name].append((time.perf_counter() - started) / steps)
    torch.testing.assert_close(losses["ranvier"], losses["plain"], rtol=1e-4, atol=0)
    ratios = sorted(theirs / ours for theirs, ours in zip(seconds["plain"], seconds["ranvier"], strict=True))
    return {"size": asdict(size), "milliseconds": {name: 1e3 * median(times) for name, times in seconds.items()},
            "speed_over_plain": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
            "host_milliseconds_a_microbatch": 1e3 * (least["ranvier"] - least["plain"]) / size.microbatches}


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    world = ranvier.start()
    torch.set_num_threads(options.threads)
    cases = [compare(size, world, rounds, steps) for size in SIZES]
    print(table(("width", "plain ms", "ranvier ms", "speed over plain", "host ms a microbatch"),
                [(str(case["size"]["width"]), *(f"{value:.2f}" for value in case["milliseconds"].values()),
                  "{median:.3f} [{least:.3f}, {greatest:.3f}]".format(**case["speed_over_plain"]),
                  f"{case['host_milliseconds_a_microbatch']:.3f}") for case in cases]))
    path = options.output or results_file("pipeline", "one-rank", quick=options.quick)
    found = {"rounds": rounds, "steps_a_round": steps, "threads": options.threads, "cases": cases}
    write_results(path, found)
    print(f"wrote {path}")
    return found


if __name__ == "__main__":
    main()
