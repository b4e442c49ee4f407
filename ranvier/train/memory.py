"""Memory of a run: refuse what cannot fit, measure what was predicted, and explain what ran out.

    before the model is built    predicted bytes of the ranks on each machine against what that machine has
    --memory-report true         every storage counted where it is made, beside the prediction
    when memory runs out         the prediction and the remedies instead of an allocator's traceback
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from ranvier.check import laid_out, memory_table
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.errors import ConfigError, OutOfMemory
from ranvier.machine import available_memory_bytes
from ranvier.pipeline.engine import Engine
from ranvier.planner.memory import RankMemory, remedies, too_large
from ranvier.run import Run
from ranvier.testing.memory import MemoryTracker
from ranvier.world import World

_WORKING = ("activations", "postponed", "workspace", "messages", "arriving")


def check_fits(run: Run, world: World) -> tuple[Run, tuple[RankMemory, ...]]:
    """The run with `optim.offload` resolved for this device, and the prediction for each stage. ConfigError when a rank
    of this machine needs more than there is: memory that is free now, since the ranks themselves are there already."""
    run = replace(run, launch=replace(run.launch, device=world.device.type))
    first = world.rank - world.local_rank
    ranks = range(first, min(first + world.local_size, world.size))

    def judged(run: Run) -> tuple[Run, tuple[RankMemory, ...], ConfigError | None]:
        memory = laid_out(run)[1]
        local = [memory[run.mesh.coordinates(rank).pipe] for rank in ranks]
        on_cuda, problem = world.device.type == "cuda", None
        if on_cuda:
            problem = too_large(local, run=run, place="device", processes=1,
                                available_bytes=torch.cuda.mem_get_info(world.device)[0])
        return run, memory, problem or too_large(local, run=run, place="host" if on_cuda else "both",
                                                 processes=len(local), available_bytes=available_memory_bytes())

    offload = run.optim.offload
    found = judged(replace(run, optim=replace(run.optim, offload="none" if offload == "auto" else offload)))
    if offload == "auto" and world.device.type == "cuda" and found[2] is not None:
        found = judged(replace(run, optim=replace(run.optim, offload="stream")))
    if found[2] is not None:
        raise found[2]
    return found[:2]


def explained(error: BaseException, run: Run, where: str) -> OutOfMemory | None:
    """`error` as one that tells where the memory went and what to do, if it is an allocator's."""
    if not is_out_of_memory(error):
        return None
    return OutOfMemory(f"ran out of memory\n{prediction_text(run)}\n", where=where, value=str(error).splitlines()[0],
                       remedy="In this order: " + "; ".join(remedies(run, shared=run.launch.device != "cuda")) + ".")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has given up, on the device or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in (
            "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")))


def prediction_text(run: Run) -> str:
    """The table of predicted memory, as text."""
    from rich.console import Console

    console = Console(width=200, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print("predicted memory, MiB:")
        console.print(memory_table(laid_out(run)[1]))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Measured:
    """What one rank's memory comes to while it trains. Without `wanted` it costs nothing and knows nothing."""

    def __init__(self, engine: Engine, device: torch.device, *, wanted: bool) -> None:
        self._engine, self._device = engine, device
        self._tracker = MemoryTracker() if wanted and device.type == "cpu" else None
        if self._tracker is not None:
            for place, categories in engine.tensors().items():
                for category, tensors in categories.items():
                    self._tracker.tag(tensors, category, place=place)

    def step(self):
        """A context around a step whose storages are counted."""
        return nullcontext() if self._tracker is None else self._tracker

    def facts(self, checkpoints: Checkpoints) -> dict[str, dict[str, int]]:
        """{"device": {category: bytes}, "host": {...}} at the peak. What is neither parameters, gradients, states nor
        buckets is "working": activations, postponed operands, workspace, messages, small sums on their way."""
        found = self._engine.memory()
        lasting = sum(found["device"].values())
        peak = torch.cuda.max_memory_allocated(self._device) if self._tracker is None else self._tracker.peak_bytes()
        found["device"]["working"] = max(0, peak - lasting)
        found["host"]["checkpoint"] = checkpoints.host_bytes
        return found


def report_text(predicted: Sequence[RankMemory], measured: Sequence[Mapping[str, Mapping[str, int]]],
                stage_of: Callable[[int], int]) -> str:
    """Predicted and measured MiB side by side, for the rank of each stage that needed most. measured: by rank."""
    from rich.console import Console
    from rich.table import Table

    table = Table("memory in MiB", *(f"stage {entry.pipe}: predicted" if column == 0 else "measured"
                                     for entry in predicted for column in range(2)), box=None, header_style="bold")
    dearest = [max((facts for rank, facts in enumerate(measured) if stage_of(rank) == entry.pipe),
                   key=lambda facts: sum(facts["device"].values())) for entry in predicted]
    folded = [{"device": _folded(entry.device), "host": dict(entry.host)} for entry in predicted]
    for place in ("device", "host"):
        names = dict.fromkeys(name for facts in (*folded, *dearest) for name, size in facts[place].items() if size)
        for name in names:
            sizes = [facts[place].get(name, 0) for pair in zip(folded, dearest, strict=True) for facts in pair]
            table.add_row(name if place == "device" else f"host {name}", *(f"{size / 2**20:,.1f}" for size in sizes))
        if names:
            sums = [sum(facts[place].values()) for pair in zip(folded, dearest, strict=True) for facts in pair]
            table.add_row(f"{place} in all", *(f"{size / 2**20:,.1f}" for size in sums), style="bold")
    console = Console(width=200, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _folded(device: Mapping[str, int]) -> dict[str, int]:
    """The prediction with the categories that one measurement covers in one."""
    lasting = {name: size for name, size in device.items() if name not in _WORKING}
    return lasting | {"working": sum(device.get(name, 0) for name in _WORKING)}
