"""Memory of a run: refuse runs that cannot fit, measure what was predicted, and explain out-of-memory errors.

    before the model is built    predicted bytes of the ranks on each machine against the memory of that machine
    before a transition          the same for another mesh (`MemoryBudget`)
    --memory-report true         every storage counted when it is allocated, next to the prediction
    when memory runs out         the prediction and the remedies instead of an allocator's traceback
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.comm.protocol import Group
from ranvier.config.resolve import Facts, ResolvedRun, auto_offload, resolve
from ranvier.cost.device_overhead import with_overhead
from ranvier.cost.memory import PROCESS_BYTES, RankMemory, remedies, too_large, with_offload_share
from ranvier.cost.memory_table import memory_table
from ranvier.elastic.auto_pipe import StageBytes
from ranvier.elastic.freezing import FrozenLayers
from ranvier.errors import ConfigError, OutOfMemory, RanvierError
from ranvier.pipeline.engine import Engine
from ranvier.plan.limits import first_that_fits, schedules
from ranvier.planner.count import device_bytes_of_stages, laid_out
from ranvier.planner.problems import problems
from ranvier.system.machine import available_memory_bytes
from ranvier.system.memory_tracker import MemoryPlace, MemoryTracker, free_bytes
from ranvier.system.terminal import TextTable, three_digits
from ranvier.world import World

_WORKING = ("activations", "deferred", "inputs", "workspace", "messages", "arriving")


def check_fits(run: ResolvedRun, world: World, everyone: Group) -> ResolvedRun:
    """The run with device and `optim.offload` resolved for this rank, and the first of its `schedules` that fits on all
    machines. ConfigError if a rank of this machine needs more memory than is free now (the processes already exist),
    and for a report that cannot be measured. Collective."""
    on_cuda = world.device.type == "cuda"
    available_bytes = free_bytes(world.device) if on_cuda else 0

    def local_memory(run: ResolvedRun) -> list[RankMemory]:
        memory = laid_out(run)[1]
        return [memory[run.mesh.coordinates(rank).pipeline_rank] for rank in world.local_ranks]

    run = resolve(run, Facts(device="cuda" if on_cuda else "cpu"))
    if run.memory_report and run.model.compile is True and run.mesh.stage_size == 1 and not on_cuda:
        raise ConfigError("does not measure compiled blocks on a CPU", code="memory-report-compiled",
                          where="memory-report", value="true",
                          remedy="Leave `--memory-report` out, or set `--model.compile false`.")
    needed_bytes = max(with_overhead(entry).device_bytes if on_cuda else entry.device_bytes
                       for entry in local_memory(resolve(run, Facts(offload="none"))))
    run = resolve(run, Facts(offload=auto_offload(world.device.type, needed_bytes, available_bytes)))
    run = with_offload_share(run, lambda run: [with_overhead(entry) for entry in local_memory(run)], available_bytes)
    host_bytes = available_memory_bytes()

    def problem_of(run: ResolvedRun, memory: Sequence[RankMemory]) -> ConfigError | None:
        problem = too_large([with_overhead(entry) for entry in memory], run=run, place="device", processes=1,
                            available_bytes=available_bytes) if on_cuda else None
        return problem or too_large(memory, run=run, place="host" if on_cuda else "both", processes=len(memory),
                                    available_bytes=host_bytes)

    found, memory = first_that_fits(run, local_memory, lambda run, memory: problem_of(run, memory) is None)
    if (problem := problem_of(found, memory)) is not None:
        raise problem
    tried = schedules(run)
    return tried[max(everyone.gather_number(tried.index(found)))]


def explain_out_of_memory(error: BaseException, run: ResolvedRun, where: str) -> OutOfMemory | None:
    """An error that explains where the memory went and what to do, if `error` is an allocator's; else None."""
    if not is_out_of_memory(error):
        return None
    return OutOfMemory(f"ran out of memory\n{prediction_text(run)}\n", code="out-of-memory", where=where,
                       value=str(error).splitlines()[0],
                       remedy="In this order: " + "; ".join(remedies(run, shared=run.launch.device != "cuda")) + ".")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has run out of memory, on the device or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in (
            "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")))


def prediction_text(run: ResolvedRun) -> str:
    """The table of predicted memory, as text."""
    return f"predicted memory, MiB:\n{memory_table(laid_out(run)[1])}"


class Measured:
    """Measured peak memory of one rank during training; measures nothing unless `wanted`."""

    def __init__(self, engine: Engine, device: torch.device, *, wanted: bool) -> None:
        self._engine, self._device = engine, device
        self._tracker = MemoryTracker() if wanted and device.type == "cpu" else None
        if self._tracker is not None:
            found = engine.tensors()
            for place in get_args(MemoryPlace):
                for category, tensors in found.get(place, {}).items():
                    self._tracker.tag(tensors, category, place=place)
            engine.count_received(partial(self._tracker.tag, category="messages"))

    def step(self) -> AbstractContextManager[object]:
        """A context that counts the storages of a step or an evaluation."""
        return nullcontext() if self._tracker is None else self._tracker

    def facts(self, checkpoints: Checkpoints, copies: int | None) -> dict[str, dict[str, int]]:
        """{"device": {category: bytes}, "host": {...}} at the peak. All except parameters, gradients, states and
        buckets is "working": activations, deferred operands, workspace, messages, pending small sums.

        copies: bytes of the copies that are kept to survive lost ranks; None without copies.
        """
        found = self._engine.memory()
        lasting = sum(found["device"].values())
        peak = torch.cuda.max_memory_allocated(self._device) if self._tracker is None else self._tracker.peak_bytes()
        found["device"]["working"] = max(0, peak - lasting)
        if self._tracker is None:
            found["device"] |= self._overhead(peak)
        found["host"]["checkpoint"] = checkpoints.host_bytes
        if copies is not None:
            found["host"]["copies"] = copies
        return found


    def _overhead(self, peak: int) -> dict[str, int]:
        """Memory of the device apart from tensors: the allocator's excess over them at its peak, and memory outside the
        allocator (context, libraries, communicators), including other processes on the same device."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        return {"allocator": max(0, reserved - peak),
                "context and libraries": max(0, total - free - torch.cuda.memory_reserved(self._device))}


def report_text(predicted: Sequence[RankMemory], measured: Sequence[Mapping[str, Mapping[str, int]]],
                stage_of: Callable[[int], int]) -> str:
    """Predicted and measured MiB side by side, for the rank of each stage that needed most. measured: by rank."""
    rows: list[list[str]] = []
    largest = [max((facts for rank, facts in enumerate(measured) if stage_of(rank) == entry.pipeline_rank),
                   key=lambda facts: sum(facts["device"].values())) for entry in predicted]
    entries = [{"device": merge_categories(entry.device), "host": dict(entry.host)} for entry in predicted]
    for place in ("device", "host"):
        names = dict.fromkeys(name for facts in (*entries, *largest) for name, size in facts[place].items() if size)
        for name in names:
            sizes = [facts[place].get(name, 0) for pair in zip(entries, largest, strict=True) for facts in pair]
            rows.append([name if place == "device" else f"host {name}",
                         *(three_digits(size / 2**20) for size in sizes)])
        if names:
            sums = [sum(facts[place].values()) for pair in zip(entries, largest, strict=True) for facts in pair]
            rows.append([f"{place} in all", *(three_digits(size / 2**20) for size in sums)])
    return str(TextTable(header=["memory in MiB", *(f"stage {entry.pipeline_rank}\n{kind}" for entry in predicted
                                                    for kind in ("predicted", "measured"))], rows=rows, words=(0,)))


def predicted_peaks(past: Sequence[tuple[ResolvedRun, FrozenLayers]], num_ranks: int, *, on_cpu: bool) -> list[int]:
    """For each rank, the most bytes that its device, or on a CPU its process, needs on any of these meshes with these
    layers frozen."""
    found = [0] * num_ranks
    for run, frozen in past:
        memory = laid_out(run, frozen.prefix, frozen.above)[1]
        for rank in range(min(num_ranks, run.mesh.size)):
            entry = memory[run.mesh.coordinates(rank).pipeline_rank]
            found[rank] = max(found[rank], entry.device_bytes + entry.host_bytes + PROCESS_BYTES if on_cpu else
                              with_overhead(entry, context=True).device_bytes)
    return found


def merge_categories(device: Mapping[str, int]) -> dict[str, int]:
    """The prediction, with the categories merged that one measurement covers."""
    lasting = {name: size for name, size in device.items() if name not in _WORKING}
    return lasting | {"working": sum(device.get(name, 0) for name in _WORKING)}


def device_bytes(device: torch.device) -> int | None:
    """Bytes of its device that this process could use: those that are free, and those that it holds, which a transition
    frees. None if device and host are the same memory."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def memory_or_problem(run: ResolvedRun, frozen: FrozenLayers) -> Sequence[RankMemory] | RanvierError:
    """Memory of each rank of `run` with these layers frozen; or the error if the run is invalid, whatever its
    memory."""
    if found := problems(run):
        return found[0]
    try:
        return laid_out(run, frozen.prefix, frozen.above)[1]
    except RanvierError as error:
        return error


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory budget of a run that was started as `first`, with these layers frozen.

    device_bytes: bytes of its device that each rank may need; None if device and host are the same memory.
    """

    first: ResolvedRun
    frozen: FrozenLayers
    device_bytes: int | None = None

    def problem(self, run: ResolvedRun) -> RanvierError | None:
        """Why the run cannot continue as `run`: a setting; a rank that does not fit on its device; or all ranks
        together, if they were all on this machine."""
        memory, on_cuda = memory_or_problem(run, self.frozen), self.device_bytes is not None
        if isinstance(memory, RanvierError):
            return memory
        if self.device_bytes is not None:
            problem = too_large(memory, place="device", processes=1, run=run, available_bytes=self.device_bytes)
            if problem is not None:
                return problem
        ranks = [entry for entry in memory for _ in range(entry.ranks)]
        before = sum(entry.host_bytes + (0 if on_cuda else entry.device_bytes)
                     for entry in laid_out(self.first)[1] for _ in range(entry.ranks))
        return too_large(ranks, place="host" if on_cuda else "both", processes=len(ranks), run=run,
                         available_bytes=available_memory_bytes() + before)

    def stage_bytes(self, run: ResolvedRun) -> StageBytes | None:
        """A function that returns the bytes of its device that a rank of a candidate stage would need. None if ranks
        are judged together, which hardly depends on the cut, or if `run` is invalid."""
        if self.device_bytes is None or problems(run):
            return None
        try:
            return device_bytes_of_stages(run, self.frozen.prefix, self.frozen.above)
        except RanvierError:
            return None
