"""All problems of a configuration at the same time, with its stages and its memory per rank.

Works for any number of ranks on any machine: models are built on the meta device, so no weights are allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from ranvier.checkpoint.hf.from_pretrained import missing_weights
from ranvier.cli.problems import settings_of
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.memory import PROCESS_BYTES, RankMemory, remedies
from ranvier.cost.memory_table import memory_table
from ranvier.cost.tensor_traffic import TensorMeshFacts, tensor_mesh_facts
from ranvier.data.prepare import hub_names, load_cached
from ranvier.data.prepare import problems as data_problems
from ranvier.errors import ConfigError, RanvierError, counted
from ranvier.optim.learning_rate import describe
from ranvier.plan.cut import StageTable
from ranvier.plan.limits import MemoryChoice, first_that_fits, schedule_note
from ranvier.planner.auto import open_axes_of, with_plan, with_pretrained
from ranvier.planner.candidates import on_cluster
from ranvier.planner.count import laid_out, memory_curve
from ranvier.planner.problems import PREVENT_A_CUT, TOO_LARGE, cannot_be_laid_out, problems, warnings
from ranvier.planner.report import schedule_text
from ranvier.planner.work import shortage
from ranvier.system.machine import available_memory_bytes
from ranvier.system.terminal import Screen, TextTable, fields, terminal_width, three_digits

_MAX_LOCAL_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `ranvier check`. `stages` is None if problems prevent a cut."""

    problems: tuple[RanvierError, ...]
    warnings: tuple[RanvierError, ...]
    stages: StageTable | None
    memory: tuple[RankMemory, ...]
    tensor_mesh: TensorMeshFacts | None
    machine: MachineMemory | None
    """Memory that all ranks would need together on this machine, and the available memory; None for more ranks than a
    machine has."""
    planned: str | None = None
    """The mesh and microbatch size chosen for auto."""
    schedule_note: str = ""
    """Note on how the available memory has changed the schedule."""
    schedule: tuple[MemoryChoice, ...] = ()
    """The schedule's limits for the run's `pipeline.memory`, then for other values."""
    learning_rate: str = ""
    """The schedule of the learning rate in words."""
    padding: str = ""
    """The share of padding in words, if data is padded and has been prepared."""

    cluster: str = ""
    """The memory of a device of the named cluster, and the memory that ranks need, in words."""

    def document(self) -> dict[str, object]:
        """The report for JSON."""
        return {"problems": [as_dict(problem) for problem in self.problems],
                "warnings": [as_dict(warning) for warning in self.warnings],
                "stages": [asdict(row) for row in self.stages.rows] if self.stages else [],
                "memory": [{"pipe": entry.pipeline_rank, "ranks": entry.ranks, "device": dict(entry.device),
                            "host": dict(entry.host), "device_bytes": entry.device_bytes,
                            "host_bytes": entry.host_bytes} for entry in self.memory],
                "tensor_mesh": None if self.tensor_mesh is None else asdict(self.tensor_mesh),
                "machine": None if self.machine is None else asdict(self.machine), "planned": self.planned,
                "schedule_note": self.schedule_note,
                "schedule": [asdict(choice) for choice in self.schedule], "learning_rate": self.learning_rate,
                "padding": self.padding, "cluster": self.cluster}


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Host memory, if all ranks ran on this machine. needed_bytes: tensors (on CPU also those of the device) and
    processes. available_bytes: memory that could be allocated now."""

    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        enough = "enough" if self.needed_bytes <= self.available_bytes else "not enough"
        return (f"all ranks on this machine need {self.needed_bytes / 2**20:,.0f} MiB of its memory; "
                f"{self.available_bytes / 2**20:,.0f} MiB are free: {enough}")


def this_machine(run: ResolvedRun, memory: Sequence[RankMemory]) -> MachineMemory:
    """Memory that all ranks of the run would need together on this machine."""
    on_cpu = run.launch.device != "cuda"
    return MachineMemory(available_bytes=available_memory_bytes(), needed_bytes=sum(
        entry.ranks * (PROCESS_BYTES + entry.host_bytes + (entry.device_bytes if on_cpu else 0)) for entry in memory))


def _machine_warnings(run: ResolvedRun, machine: MachineMemory | None) -> Iterator[ConfigError]:
    """A warning if this machine has too little memory; not an error, since ranks may run elsewhere."""
    if machine is not None and machine.needed_bytes > machine.available_bytes:
        needed, free = machine.needed_bytes / 2**20, machine.available_bytes / 2**20
        yield ConfigError(f"would be too small: {counted(run.mesh.size, 'rank')} would take {needed:,.0f} MiB, and "
                          f"{free:,.0f} are free", code="machine-memory-too-small", where="memory of this machine",
                          remedy="In this order: " + "; ".join(
remedies(run, shared=run.launch.device != "cuda")) + ".")


def _missing_here(run: ResolvedRun, found: Sequence[RanvierError]) -> list[RanvierError]:
    """Warnings for weights and data that are not on this machine, since ranks may run elsewhere."""
    reported = set(map(str, found))
    hub = [ConfigError("names no file or folder here, so a run looks for it on the Hugging Face hub",
                       code="data-from-hub", where=setting, value=name,
                       remedy="If it is meant to be a file, give a path that begins with ./ or /.")
           for setting, name in hub_names(run)]
    return [problem for problem in (*missing_weights(run), *data_problems(run), *hub) if str(problem) not in reported]


def _fits(run: ResolvedRun, cluster: Cluster | None, memory: Sequence[RankMemory]) -> bool:
    """Whether the run fits the devices of the cluster, or without a cluster this machine."""
    if cluster is not None:
        return shortage(run, cluster, memory) is None
    machine = this_machine(run, memory)
    return run.mesh.size > _MAX_LOCAL_RANKS or machine.needed_bytes <= machine.available_bytes


def _too_small(run: ResolvedRun, cluster: Cluster, memory: Sequence[RankMemory]) -> ConfigError | None:
    """The error for a cluster with too few devices or too little memory for this run; None if it suffices."""
    if run.mesh.size > cluster.num_devices:
        return ConfigError(f"has more ranks than {cluster.name} has devices ({cluster.num_devices:,})",
                           code="mesh-above-cluster", where="mesh", value=run.mesh.size,
                           remedy="Choose a smaller mesh, or raise `nodes` in the cluster's file.")
    return shortage(run, cluster, memory)


def _cluster_line(cluster: Cluster, memory: Sequence[RankMemory]) -> str:
    usable = usable_bytes(cluster.device) / 2**20
    needed = three_digits(max(entry.device_bytes for entry in memory) / 2**20)
    host = f"; a node has {cluster.host.memory_bytes / 2**20:,.0f} MiB of host memory"
    if cluster.device.cores is not None:
        return f"{cluster.name} ({cluster.device.name}): a rank needs {needed} MiB{host}"
    return (f"{cluster.name} ({cluster.device.name}): a rank needs {needed} MiB, and its device has "
            f"{usable:,.0f}{host}")


def as_dict(problem: RanvierError) -> dict[str, object]:
    """An error for JSON: code, where, value (as text unless JSON can represent it), message, remedy, and the settings
    to change, each with its new value, or null for any value other than the present one."""
    value = problem.value if isinstance(problem.value, (str, int, float, bool, type(None))) else str(problem.value)
    return {"code": problem.code, "where": problem.where, "value": value, "message": problem.what,
            "remedy": problem.remedy, "set": settings_of(problem)}


def check(run: Run, num_ranks: int | None = None, ranks_per_node: int | None = None, *,
          chosen: Collection[str] | None = None, cluster: str | None = None) -> Report:
    """Check all of `run`. Never raises for a user's settings. chosen: settings whose value comes from the user
    (`Merged.chosen`); None for those that differ from their defaults. cluster: shipped name or file of the cluster
    whose memory is compared; None for this machine. ConfigError if there is no such cluster."""
    place = None if cluster is None else load_cluster(cluster)
    if place is not None:
        ranks_per_node = ranks_per_node or place.devices_per_node
        run = on_cluster(run, place)
    is_open = bool(open_axes_of(run) or run.batch.microbatch_size == "auto")
    if place is not None and is_open:
        run = replace(run, launch=replace(run.launch, cluster=cluster))
    asked, found = with_pretrained(run)
    is_stand_in = bool(found)
    run, more = with_plan(asked, num_ranks, ranks_per_node)
    is_planned = not more and (not open_axes_of(asked) or num_ranks in (None, run.mesh.size))
    found += more
    found += problems(run, None if found or not is_planned else num_ranks)
    stages: StageTable | None = None
    memory: tuple[RankMemory, ...] = ()
    note = ""
    if not more and not is_stand_in and not any(problem.where.startswith(PREVENT_A_CUT) for problem in found):
        try:
            planned = run
            run, (stages, memory) = first_that_fits(
                run, partial(laid_out, cluster=place), lambda run, found: _fits(run, place, found[1]))
            note = schedule_note(planned, run)
        except RanvierError as problem:
            found.append(problem)
        except TOO_LARGE as error:
            found.append(cannot_be_laid_out(error))
    if place is not None and memory and (too_small := _too_small(run, place, memory)) is not None:
        found.append(too_small)
    machine = this_machine(run, memory) if memory and place is None and run.mesh.size <= _MAX_LOCAL_RANKS else None
    data = None if found else load_cached(run)
    return Report(problems=tuple(found),
                  warnings=(*warnings(run, chosen, asked), *_missing_here(run, found), *_machine_warnings(run, machine),
                            *(() if data is None else data.warnings)),
                  stages=stages, memory=memory, tensor_mesh=tensor_mesh_facts(run, ranks_per_node), machine=machine,
                  schedule=() if stages is None else memory_curve(run, stages, place),
                  planned=(f"{run.mesh}, microbatches of {run.batch.microbatch_size}" if is_open and is_planned
                           else None),
                  schedule_note=note,
                  cluster=_cluster_line(place, memory) if place is not None and memory else "",
                  learning_rate=describe(run.train), padding="" if data is None else data.padding)


_SHOWN_STAGES = 6
"""Most stages that are shown; of more stages, the first and last ones, and between them the one with most memory."""


def print_report(report: Report, values: Sequence[tuple[str, str, str]], *, everything: bool = False) -> None:
    """Print the report for people on standard output: problems first, settings last.

    values: (name, value, origin) of every setting. everything: also print the categories of memory, all stages, other
    limits of the schedule, and the settings that have their defaults.
    """
    screen = Screen(sys.stdout)
    for problem in report.problems:
        screen.print(f"problem: {problem}", style="red")
    if not report.problems:
        screen.print("no problems found", style="green")
    for warning in report.warnings:
        screen.print(f"warning: {warning}", style="yellow")
    for line in (report.planned and f"\nauto is {report.planned}", report.schedule_note):
        if line:
            screen.print(line)
    if report.stages:
        screen.print()
        if everything:
            screen.print(str(report.stages))
            screen.print()
            screen.print(memory_table(report.memory))
        else:
            screen.print(_stages_and_memory(report.stages, report.memory))
        screen.print()
    is_told = report.machine and any(warning.code == "machine-memory-too-small" for warning in report.warnings)
    for fact in (report.tensor_mesh, report.cluster, None if is_told else report.machine):
        if report.stages and fact:
            screen.print(str(fact))
    if report.schedule:
        own = report.schedule[0]
        some = "" if own.num_microbatches == own.step_microbatches else f" of the step's {own.step_microbatches:,}"
        screen.print(schedule_text(report.schedule) if everything else
                     f"schedule: at most {counted(own.in_flight, 'microbatch')} in flight; simulated bubble with "
                     f"{own.num_microbatches}{some} microbatch{'es' if own.step_microbatches > 1 else ''}: "
                     f"{own.bubble_fraction:.1%}")
    for name, text in (("learning rate", report.learning_rate), ("padding", report.padding)):
        if text:
            screen.print(f"{name}: {text}")
    screen.print()
    if everything:
        screen.print(TextTable(header=("setting", "value", "from"), rows=values, words=(0, 1, 2),
                               styles=[None if row[2] == "default" else "bold" for row in values]))
        return
    origins = dict.fromkeys(origin for _, _, origin in values if origin != "default")
    for origin in origins:
        listed = [f"{name} {value}" for name, value, source in values if source == origin]
        screen.print(fields([f"from {origin}:", *listed], terminal_width()))
    left_out = sum(origin == "default" for _, _, origin in values)
    screen.print(f"{left_out} settings have their defaults: --all shows them, and the memory by category")


def _stages_and_memory(stages: StageTable, memory: Sequence[RankMemory]) -> TextTable:
    """Table of each pipeline rank's blocks, and of the categories that need most of its memory."""
    rows: list[tuple[str, ...]] = []
    largest = max(memory, key=lambda entry: entry.device_bytes).pipeline_rank
    last = len(memory) - 1
    for place, entry in enumerate(memory):
        if len(memory) > _SHOWN_STAGES and place not in (0, 1, largest, last - 1, last):
            if rows[-1][0] != "...":
                rows.append(("...", *[""] * 6))
            continue
        here = [row for row in stages.rows if row.pipeline_rank == entry.pipeline_rank]
        name, size = max(entry.device.items(), key=lambda each: each[1])
        rows.append((str(entry.pipeline_rank), str(sum(len(row.blocks) for row in here)),
                     f"{sum(row.num_parameters for row in here):,}", str(entry.ranks),
                     three_digits(entry.device_bytes / 2**20), three_digits(entry.host_bytes / 2**20),
                     f"{name} {three_digits(size / 2**20)}"))
    return TextTable(header=("stage", "blocks", "parameters", "ranks", "device\nMiB", "host\nMiB", "largest part, MiB"),
                     rows=rows, words=(6,))
