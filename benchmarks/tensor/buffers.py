"""Optimus' memory methods (Xu et al., 2021, section 3.2.3) against reference counting.

    python -m benchmarks.tensor.buffers [--hidden 256] [--layers 3] ...

The paper keeps five buffers for a layer under activation checkpointing: a workspace, a forward and a backward buffer
for outputs and input gradients of products, a conjunction buffer between layers, and one for parameter gradients; its
method 1 would put outputs and their gradients into the same memory. Here the workspace is such a buffer, parameter
gradients can be (`--optim.update-in-backward`), and the rest is left to the allocator, which takes memory back as soon
as autograd releases a tensor. The program counts the live bytes of one rank at their peak, in a stack of layers that
are each recomputed in their backward, on threads of this process, without the transport's memory for a sum in progress
(Gloo and MPI exchange sums, and so do threads). In units of E / p, E = b s h of the activations' dtype:

    forward buffer    9   outputs of qkv (3), projection (1), fc1 (4), fc2 (1)
    backward buffer   7   input gradients of qkv (1), projection (1), fc1 (1), fc2 (4)
    conjunction       1   the gradient between layers
    others            7   outputs of two norms (2), attention (1), GELU (4), less the first norm's input
    paper             24  with method 1, which shares 7 of them: 17
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.program import MIB, table
from benchmarks.record import results_file, write_results
from benchmarks.tensor.ours import OurStack
from benchmarks.tensor.stem import Stem
from ranvier.comm.protocol import Work
from ranvier.config.run import TensorParallel
from ranvier.mesh import Mesh
from ranvier.tensor.boundaries import guard_block
from ranvier.tensor.split.linear import SplitLinear
from ranvier.testing.memory import MemoryTracker
from ranvier.testing.ranks import run_ranks
from ranvier.world import World

PAPER = {"forward": 9, "backward": 7, "conjunction": 1, "others": 7}
METHOD_1 = 7
"""Units of these buffers that would be shared."""


class Checkpointed(nn.Module):
    """A stack in which each layer keeps only its input."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def measure(world: World, stem: Stem, mesh: Mesh, settings: TensorParallel) -> dict[str, int]:
    """Live bytes of this rank at the peak of a forward and backward: workspace, layers' inputs, and the rest."""
    stack = OurStack(stem, mesh, settings, world.backend)
    x, dy = stack.share(stem.inputs()), stack.share(stem.output_gradients())
    for layer in stack.network.modules():
        if isinstance(layer, SplitLinear):
            layer.recomputed = True
    stack.network = Checkpointed(list(stack.network.children()))
    guard_block(stack.network, stack.tensor_mesh, "stem", in_chain=False)
    stack.forward(x)
    stack.backward(dy)  # gives the workspace its final size
    tracker = MemoryTracker()
    tracker.tag([*stack._parameters.values(), *(p.grad for p in stack._parameters.values())], "parameters")
    tracker.tag(stack.tensor_mesh.workspace.buffers(), "workspace")
    tracker.tag([x, dy], "given")
    for group in (stack.tensor_mesh.over_rows, stack.tensor_mesh.over_cols):
        group.reduce = _apart(tracker, group.reduce)
    with tracker:
        stack.forward(x)
        forward = tracker.at_peak()
        tracker.reset_peak()
        stack.backward(dy)
    found = tracker.at_peak()
    kept = (stem.num_layers - 1) * x.numel() * x.element_size()  # the first layer's is "given"
    return {"workspace": found["workspace"], "forward": forward["activations"], "inputs": kept,
            "working": found["activations"] - kept, "exchange": tracker.at_peak("host").get("exchange", 0)}


def _apart(tracker: MemoryTracker, reduce: Callable[..., Work]) -> Callable[..., Work]:
    """`reduce`, with the transport's memory for a sum in progress counted in a separate place, and not at the peak."""
    def counted(*arguments: object) -> Work:
        with tracker.category("exchange", place="host"):
            return reduce(*arguments)
    return counted


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 3), ("hidden", 256), ("heads", 8), ("sequence", 256), ("microbatch", 4), ("row", 2),
                        ("col", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    stem = Stem(num_layers=options.layers, hidden=options.hidden, heads=options.heads, sequence=options.sequence,
                microbatch=options.microbatch)
    mesh = Mesh(row=options.row, col=options.col)
    unit = stem.microbatch * stem.sequence * stem.hidden * stem.torch_dtype.itemsize / mesh.size
    entries = []
    for scheme in ("summa", "stationary"):
        settings = TensorParallel(scheme=scheme)
        worst = max(run_ranks(lambda world, s=settings: measure(world, stem, mesh, s), mesh.size),
                    key=lambda found: found["working"])
        entries.append({"scheme": scheme, "bytes": worst, "units": {name: size / unit for name, size in worst.items()}})
    paper = sum(PAPER.values())
    lines = [(entry["scheme"], f"{entry['units']['working']:.1f}", f"{paper} ({paper - METHOD_1})",
              f"{entry['units']['inputs']:.1f}", f"{entry['units']['workspace']:.1f}",
              f"{entry['bytes']['workspace'] / MIB:.2f}", f"{entry['units']['exchange']:.1f}") for entry in entries]
    print(table(("scheme", "live besides inputs, E/p", "paper's buffers (method 1)", "layers' inputs", "workspace",
                 "workspace MiB", "sums under way"), lines))
    path = options.output or results_file("tensor", "buffers")
    write_results(path, {"stem": vars(options) | {"output": None}, "paper_units": PAPER, "entries": entries})
    print(f"wrote {path}")
    return entries


if __name__ == "__main__":
    main()
