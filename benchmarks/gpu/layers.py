"""Cost of the layers of `ranvier.tensor` on one rank: none, since they are torch's own layers there.

    python -m benchmarks.gpu.layers [--hidden 2048 ...] [--profile]

A stack of GPT layers written with them, and the same stack written only with torch's, forward and backward, in turns on
one device (CUDA if there is one): median times, and the ratio formed within each round. --profile prints the kernels of
both, by time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.device_events import device_events
from benchmarks.memory.program import table
from benchmarks.record import results_file, write_results
from benchmarks.tensor.stem import Stem


class PlainLayer(nn.Module):
    """One transformer layer in torch's own layers, with the parameters' order of `ranvier.models.gpt`."""

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        self.heads, dtype, hidden = stem.heads, stem.torch_dtype, stem.hidden
        self.norm1, self.norm2 = nn.LayerNorm(hidden, dtype=dtype), nn.LayerNorm(hidden, dtype=dtype)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, dtype=dtype), nn.Linear(hidden, hidden, dtype=dtype)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden, dtype=dtype), nn.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, 3, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def step(network: nn.Module, x: Tensor, dy: Tensor) -> None:
    network.zero_grad(set_to_none=True)
    network(x).backward(dy)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("hidden", 512), ("heads", 8), ("sequence", 256), ("microbatch", 4),
                        ("rounds", 7), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    stem = Stem(num_layers=options.layers, hidden=options.hidden, heads=options.heads, sequence=options.sequence,
                microbatch=options.microbatch, dtype=options.dtype)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    networks = {"torch": nn.Sequential(*(PlainLayer(stem) for _ in range(stem.num_layers))).to(device),
                "ranvier": stem.network().to(device)}
    x, dy = stem.inputs().to(device).requires_grad_(), stem.output_gradients().to(device)
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(options.rounds + 1):
        for name in networks if turn % 2 == 0 else reversed(networks):
            step(networks[name], x, dy)
            started = time.perf_counter()
            for _ in range(options.steps):
                step(networks[name], x, dy)
            if turn:
                seconds[name].append((time.perf_counter() - started) / options.steps)
    ratios = sorted(theirs / ours for theirs, ours in zip(seconds["torch"], seconds["ranvier"], strict=True))
    found: dict[str, Any] = {"stem": vars(options) | {"output": None}, "device": str(device),
             "milliseconds": {name: 1e3 * median(times) for name, times in seconds.items()},
             "speed_over_torch": {"middle": median(ratios), "least": ratios[0], "greatest": ratios[-1]}}
    print(table(("layers", "ms a step"), [(name, f"{value:.2f}") for name, value in found["milliseconds"].items()]))
    print(f"speed over torch's: {median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}] on {device}")
    if options.profile:
        for name, network in networks.items():
            spent: Counter[str] = Counter()
            for kernel, start, stop in device_events(lambda network=network: step(network, x, dy), device):
                spent[kernel[:60]] += stop - start
            print(f"{name}:\n" + table(("kernel", "ms"), [
                (kernel, f"{microseconds / 1e3:.3f}") for kernel, microseconds in spent.most_common(12)]))
    path = options.output or results_file("tensor", "one-rank")
    write_results(path, found)
    print(f"wrote {path}")
    return found


if __name__ == "__main__":
    main()
