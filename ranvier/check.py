"""Everything that is wrong with a configuration, at once, and what it would come to: stages and memory per rank.

Runs for any number of ranks on any machine: models are built on the meta device, so no weight exists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ranvier import effects
from ranvier.data import lm
from ranvier.data.prepare import problems as data_problems
from ranvier.elastic import rules
from ranvier.errors import ConfigError, RanvierError
from ranvier.machine import available_memory_bytes
from ranvier.mesh import AXES
from ranvier.models import families
from ranvier.optim import groups
from ranvier.optim.guard import guard_problems
from ranvier.optim.step import in_backward_problems
from ranvier.pipeline.build import StageTable
from ranvier.pipeline.partition import check_boundaries
from ranvier.planner.memory import PROCESS_BYTES, RankMemory, laid_out, remedies
from ranvier.precision import DTYPES, reduce_dtype
from ranvier.run import Run, TensorParallel
from ranvier.tensor.mesh import tensor_problems
from ranvier.tensor.placement import best_tile, bytes_between_nodes
from ranvier.tensor.shape import best_shape
from ranvier.tensor.volume import Scheme, layer_volume

if TYPE_CHECKING:
    from rich.table import Table

_MOST_LAYERS = 10_000
_MOST_LOCAL_RANKS = 64
_PREVENT_A_CUT = ("model.", "mesh.", "tensor.", "pipeline.boundaries", "optim.groups")
"""Where problems are that leave no model to cut."""
TOO_LARGE = (RuntimeError, OverflowError, MemoryError, ValueError, TypeError)
"""What torch raises for sizes that no tensor can have."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `ranvier check` knows. `stages` is None where problems prevent a cut."""

    problems: tuple[RanvierError, ...]
    warnings: tuple[ConfigError, ...]
    stages: StageTable | None
    memory: tuple[RankMemory, ...]
    tensor_mesh: TensorMeshFacts | None
    machine: MachineMemory | None
    """What all ranks would need together here, and what there is; None for more ranks than a machine has."""
    planned: str | None = None
    """The mesh and microbatch in the place of auto."""

    def document(self) -> dict[str, object]:
        """As JSON can hold it."""
        rows = self.stages.rows if self.stages else ()
        return {"problems": [as_dict(problem) for problem in self.problems],
                "warnings": [as_dict(warning) for warning in self.warnings],
                "stages": [asdict(row) for row in rows],
                "memory": [{"pipe": entry.pipe, "ranks": entry.ranks, "device": dict(entry.device),
                            "host": dict(entry.host), "device_bytes": entry.device_bytes,
                            "host_bytes": entry.host_bytes} for entry in self.memory],
                "tensor_mesh": None if self.tensor_mesh is None else asdict(self.tensor_mesh),
                "machine": None if self.machine is None else asdict(self.machine), "planned": self.planned}


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Host memory, if all ranks ran on this machine. needed_bytes: tensors (on CPU those of the device too) and
    processes. available_bytes: what could be allocated now."""

    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        enough = "enough" if self.needed_bytes <= self.available_bytes else "not enough"
        return (f"all ranks on this machine need {self.needed_bytes / 2**20:,.0f} MiB of its memory; "
                f"{self.available_bytes / 2**20:,.0f} MiB are free: {enough}")


def this_machine(run: Run, memory: Sequence[RankMemory]) -> MachineMemory:
    """What all ranks of the run would need together on this machine."""
    on_cpu = run.launch.device != "cuda"
    return MachineMemory(available_bytes=available_memory_bytes(), needed_bytes=sum(
        entry.ranks * (PROCESS_BYTES + entry.host_bytes + (entry.device_bytes if on_cpu else 0)) for entry in memory))


def _machine_warnings(run: Run, machine: MachineMemory | None) -> Iterator[ConfigError]:
    """Ranks may run elsewhere, so this is no problem of the configuration."""
    if machine is not None and machine.needed_bytes > machine.available_bytes:
        needed, free = machine.needed_bytes / 2**20, machine.available_bytes / 2**20
        yield ConfigError(f"would not suffice for all {run.mesh.size} ranks: they need {needed:,.0f} MiB, and "
                          f"{free:,.0f} are free", where="memory of this machine", remedy="In this order: " + "; ".join(
                              remedies(run, shared=run.launch.device != "cuda")) + ".")


def as_dict(problem: RanvierError) -> dict[str, object]:
    value = problem.value if isinstance(problem.value, (str, int, float, bool, type(None))) else str(problem.value)
    return {"where": problem.where, "value": value, "message": problem.what, "remedy": problem.remedy}


def check(run: Run, num_ranks: int | None = None, ranks_per_node: int | None = None, *,
          chosen: Collection[str] | None = None) -> Report:
    """Look at `run` as a whole. Never raises for what a user can set. chosen: settings that have a value of the
    user's (`Resolved.chosen`); None: those that differ from their defaults."""
    run, found = with_pretrained(run)
    given = run
    run, more = with_plan(run, num_ranks, ranks_per_node)
    planned = None if run is given or more else f"{run.mesh}, microbatches of {run.batch.microbatch_size}"
    found += more
    found += problems(run, None if found else num_ranks)  # a stand-in has another size
    stages, memory = None, ()
    if not more and not any(problem.where.startswith(_PREVENT_A_CUT) for problem in found):
        try:
            stages, memory = laid_out(run)
        except RanvierError as problem:
            found.append(problem)
        except TOO_LARGE as error:
            found.append(cannot_be_laid_out(error))
    machine = this_machine(run, memory) if memory and run.mesh.size <= _MOST_LOCAL_RANKS else None
    return Report(problems=tuple(found), warnings=(*warnings(run, chosen, given), *_machine_warnings(run, machine)),
                  stages=stages, memory=memory, tensor_mesh=tensor_mesh_facts(run, ranks_per_node), machine=machine,
                  planned=planned)


def cannot_be_laid_out(error: Exception) -> ConfigError:
    """What torch raised for a model whose sizes no tensor can have, in words."""
    return ConfigError(f"cannot be laid out: {str(error).partition(chr(10))[0]}", where="model",
                       remedy="Choose smaller sizes: a tensor of the model is larger than any can be.")


def problems(run: Run, num_ranks: int | None = None) -> list[RanvierError]:
    """What cannot work, as far as that follows from the settings alone."""
    return [*families.problems(run), *_mesh_problems(run, num_ranks), *_batch_problems(run), *_update_problems(run),
            *groups.problems(run.optim), *_data_problems(run), *_resume_problems(run), *rules.problems(run)]


def with_pretrained(run: Run) -> tuple[Run, list[RanvierError]]:
    """The run with the sizes of its pretrained model, and why that may not be possible."""
    from ranvier.checkpoint.from_pretrained import settled  # which reads files

    try:
        return settled(run), []
    except RanvierError as problem:
        return run, [problem]


def with_plan(run: Run, num_ranks: int | None, ranks_per_node: int | None = None) -> tuple[Run, list[RanvierError]]:
    """The run with a number in the place of each auto of mesh and microbatch, and why that may not be possible: they
    are 1 then.

    num_ranks: all ranks, as their launcher or the user says.
    """
    from ranvier.planner.auto import closed, planned  # which looks for problems of what it considers

    mesh = run.mesh
    if "auto" not in (mesh.data, mesh.pipe, run.batch.microbatch_size):
        return _with_shape(run, num_ranks)
    if num_ranks is None and mesh.is_open:
        return closed(run), [_unknown_ranks(next(axis for axis in AXES if getattr(mesh, axis) == "auto"))]
    if any(problem.where.startswith(_PREVENT_A_CUT) for problem in problems(closed(run))):
        where = next((f"mesh.{axis}" for axis in AXES if getattr(mesh, axis) == "auto"), "batch.microbatch-size")
        return closed(run), [ConfigError("is not planned before the other problems are mended", where=where,
                                         value="auto", remedy="Mend them, or give a number.")]
    try:
        return planned(run, mesh.size if num_ranks is None else num_ranks, ranks_per_node), []
    except RanvierError as problem:
        return closed(run), [problem]
    except TOO_LARGE as error:
        return closed(run), [cannot_be_laid_out(error)]


def _unknown_ranks(axis: str) -> ConfigError:
    return ConfigError("needs to know how many ranks there are", where=f"mesh.{axis}", value="auto",
                       remedy="Start them with torchrun, mpiexec or srun (check and simulate: say --ranks N), or set "
                              f"--mesh.{axis}.")


def _with_shape(run: Run, num_ranks: int | None) -> tuple[Run, list[RanvierError]]:
    """`with_plan` where rows and columns alone are open: the fewest bytes."""
    mesh = run.mesh
    if not mesh.is_open:
        return run, []
    given = {axis: getattr(mesh, axis) for axis in ("row", "col") if getattr(mesh, axis) != "auto"}
    alone = replace(run, mesh=replace(mesh, row=given.get("row", 1), col=given.get("col", 1), tile=None))
    where = "mesh.col" if "row" in given else "mesh.row"
    if num_ranks is None:
        return alone, [_unknown_ranks(where.removeprefix("mesh."))]
    stage, rest = divmod(num_ranks, mesh.data * mesh.pipe)
    other = prod(given.values())
    if rest or stage % other or not stage:
        return alone, [ConfigError(f"is not possible: {num_ranks} ranks are no multiple of "
                                   f"{mesh.data * mesh.pipe * other}, which the other axes take", where=where,
                                   value="auto", remedy="Change --mesh.data, --mesh.pipe or the number of ranks.")]
    try:
        if given:
            shape = {"row": stage // other, "col": stage // other, **given}
        else:
            row, col = best_shape(stage, batch=run.batch.microbatch_size, sequence=run.model.sequence,
                                  hidden=run.model.hidden, heads=run.model.heads, scheme=_volume_scheme(run.tensor))
            shape = {"row": row, "col": col}
        return replace(run, mesh=replace(mesh, **shape)), []
    except ConfigError as problem:
        return alone, [problem]


def _volume_scheme(tensor: TensorParallel) -> Scheme:
    return "megatron-sequence" if tensor.scheme == "megatron" and tensor.sequence_sharding else tensor.scheme


@dataclass(frozen=True, kw_only=True)
class TensorMeshFacts:
    """What a rank of the tensor mesh receives for one layer and one microbatch, forward and backward, in bytes, and
    what of it crosses between nodes where a node holds `tile` (rows, columns) of the mesh. None: on one node, or nodes
    are not known."""

    row: int
    col: int
    scheme: str
    layer_bytes: int
    tile: tuple[int, int] | None = None
    node_bytes: int | None = None
    node_bytes_row_by_row: int | None = None

    def __str__(self) -> str:
        text = (f"tensor mesh {self.row} x {self.col}, {self.scheme}: a rank receives {self.layer_bytes / 2**20:,.2f} "
                f"MiB a layer and microbatch, forward and backward")
        if self.tile is None:
            return text
        return (f"{text}\nplacement: {self.tile[0]} x {self.tile[1]} of it on each node; "
                f"{self.node_bytes / 2**20:,.2f} MiB of that enter a node (row by row: "
                f"{self.node_bytes_row_by_row / 2**20:,.2f})")


def tensor_mesh_facts(run: Run, ranks_per_node: int | None) -> TensorMeshFacts | None:
    """None on stages of one rank, and where the sizes do not fit."""
    mesh, model = run.mesh, run.model
    if mesh.stage_size == 1:
        return None
    try:
        volume = layer_volume(_volume_scheme(run.tensor), row=mesh.row, col=mesh.col, batch=run.batch.microbatch_size,
                              sequence=model.sequence, hidden=model.hidden, itemsize=DTYPES[run.precision].itemsize,
                              sum_itemsize=reduce_dtype(run.tensor, DTYPES[run.precision]).itemsize)
    except ValueError:
        return None
    facts = TensorMeshFacts(row=mesh.row, col=mesh.col, scheme=_volume_scheme(run.tensor),
                            layer_bytes=round(volume.total))
    if ranks_per_node is None or ranks_per_node >= mesh.stage_size:
        return facts
    received = {"along_row_bytes": volume.forward.weights + volume.backward.weights,
                "along_col_bytes": volume.forward.activations + volume.backward.activations}
    tile = mesh.tile or best_tile(mesh.row, mesh.col, ranks_per_node, **received)
    by_row = (max(1, ranks_per_node // mesh.col), min(mesh.col, ranks_per_node))
    return replace(facts, tile=tile, node_bytes=round(bytes_between_nodes(mesh.row, mesh.col, tile, **received)),
                   node_bytes_row_by_row=round(bytes_between_nodes(mesh.row, mesh.col, by_row, **received)))


def _mesh_problems(run: Run, num_ranks: int | None) -> Iterator[RanvierError]:
    mesh, num_layers = run.mesh, run.model.num_layers
    if num_ranks is not None and mesh.size != num_ranks:
        yield ConfigError(f"needs {mesh.size} ranks, not {num_ranks}", where="mesh", value=str(mesh),
                          remedy=f"Change --mesh.data and --mesh.pipe so that data x pipe x row x col is {num_ranks}, "
                                 f"or start {mesh.size} ranks.")
    yield from tensor_problems(mesh, run.tensor)
    yield from _share_problems(run)
    if num_layers > _MOST_LAYERS:
        yield ConfigError(f"is more than {_MOST_LAYERS}, the most that can be cut into stages",
                          where="model.num-layers", value=num_layers, remedy="Use fewer and wider layers.")
    num_blocks = families.num_blocks(run)
    if mesh.pipe > num_blocks:
        yield ConfigError(f"is more than the {num_blocks} blocks of the model", where="mesh.pipe", value=mesh.pipe,
                          remedy=f"Set --mesh.pipe {num_blocks} or less, or raise --model.num-layers.")
    elif run.pipeline.boundaries is not None:
        try:
            check_boundaries(run.pipeline.boundaries, num_blocks, mesh.pipe)
        except ConfigError as problem:
            yield problem


def _share_problems(run: Run) -> Iterator[ConfigError]:
    """What rows and columns cannot share."""
    mesh, model, tensor = run.mesh, run.model, run.tensor
    shares = [("row", "batch.microbatch-size", run.batch.microbatch_size), ("col", "model.heads", model.heads)]
    if tensor.scheme == "stationary" and model.hidden % mesh.col == 0:
        shares.append(("row", f"model.hidden / {mesh.col}, the features of a column:", model.hidden // mesh.col))
    if tensor.scheme == "megatron" and tensor.sequence_sharding:
        shares.append(("col", "model.sequence", model.sequence))
    for axis, what, size in shares:
        count = getattr(mesh, axis)
        if size % count:
            largest = next(part for part in range(count, 0, -1) if size % part == 0)
            yield ConfigError(f"does not divide {what} {size}", where=f"mesh.{axis}", value=count,
                              remedy=f"Set --mesh.{axis} {largest}, or change {what.partition(' ')[0]}.")
    if model.vocab < max(mesh.row, mesh.col):
        yield ConfigError(f"is smaller than the tensor mesh: every rank needs a part of it, on {mesh.row} rows and "
                          f"{mesh.col} columns", where="model.vocab", value=model.vocab,
                          remedy=f"Set --model.vocab {max(mesh.row, mesh.col)} or more.")


def _batch_problems(run: Run) -> Iterator[ConfigError]:
    mesh, batch = run.mesh, run.batch
    share = -(-batch.global_size // mesh.data)
    if batch.global_size < mesh.data:
        yield ConfigError(f"leaves replicas without a sequence: mesh.data is {mesh.data}", where="batch.global-size",
                          value=batch.global_size,
                          remedy=f"Set --batch.global-size {mesh.data} or more, or lower --mesh.data.")
    elif batch.microbatch_size > share:
        yield ConfigError(f"is more than a replica's share of the batch, {share} of {batch.global_size} sequences",
                          where="batch.microbatch-size", value=batch.microbatch_size,
                          remedy=f"Set --batch.microbatch-size {share} or less, or raise --batch.global-size.")


def _resume_problems(run: Run) -> Iterator[ConfigError]:
    if run.resume == "auto" and run.run_dir is None and run.checkpoint.dir is None:
        yield ConfigError("needs a folder to look for checkpoints in", where="resume", value="auto",
                          remedy="Set --run-dir, or --checkpoint.dir, to the same folder each time.")
    if run.resume not in ("auto", "none") and not (run.resume and os.path.exists(run.resume)):
        yield ConfigError("is no checkpoint that is there", where="resume", value=run.resume,
                          remedy="Name a folder such as RUN/checkpoint/step-100, RUN/checkpoint, or RUN.")


def _update_problems(run: Run) -> Iterator[ConfigError]:
    share = -(-run.batch.global_size // run.mesh.data)
    count = -(-share // run.batch.microbatch_size)
    if run.optim.update_in_backward and count > 1:
        yield ConfigError(f"needs batches of one microbatch, not {count}", where="optim.update-in-backward", value=True,
                          remedy=f"Set --batch.microbatch-size {share}, or leave it out.")
    yield from in_backward_problems(run.optim, DTYPES[run.precision])
    yield from guard_problems(run.guard, run.optim)


def _data_problems(run: Run) -> list[RanvierError]:
    # a corpus may lie on the machines that the run is meant for
    return lm.first_look(run) if run.data.task == "lm" else data_problems(run)


def warnings(run: Run, chosen: Collection[str] | None = None, asked: Run | None = None) -> Iterator[ConfigError]:
    """Settings that have no effect, or hardly the one that was meant. chosen, asked: see `ranvier.effects`."""
    pipeline, train = run.pipeline, run.train
    yield from effects.warnings(run, chosen, asked)
    if run.data.task == "lm":
        yield from lm.warnings(run)
    if pipeline.in_flight != "auto" and pipeline.policy != "gpipe" and pipeline.in_flight < run.mesh.pipe:
        yield ConfigError(f"leaves some of the {run.mesh.pipe} stages idle", where="pipeline.in-flight",
                          value=pipeline.in_flight,
                          remedy=f"Set --pipeline.in-flight {run.mesh.pipe} or more, or auto.")
    if train.epochs is None and train.warmup_steps >= train.steps:
        yield ConfigError(f"ends the run of {train.steps} steps before the full learning rate is reached",
                          where="train.warmup-steps", value=train.warmup_steps,
                          remedy="Lower --train.warmup-steps, or raise --train.steps.")


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """MiB per rank by stage and category; what is nowhere needed is left out."""
    from rich.table import Table

    names = [(place, name) for place in ("device", "host") for name in dict.fromkeys(
        name for entry in memory for name, size in getattr(entry, place).items() if size)]
    table = Table("stage", "ranks", *(name if place == "device" else f"host {name}" for place, name in names),
                  "MiB per rank", *(["and of the host"] if any(entry.host_bytes for entry in memory) else []), box=None,
                  header_style="bold")
    for entry in memory:
        sizes = [getattr(entry, place).get(name, 0) for place, name in names] + [entry.device_bytes]
        sizes += [entry.host_bytes] if len(table.columns) > len(names) + 3 else []
        table.add_row(str(entry.pipe), str(entry.ranks), *(f"{size / 2**20:,.1f}" for size in sizes))
    return table


def print_report(report: Report, values: Sequence[tuple[str, str, str]]) -> None:
    """The report for people, on standard output. values: (name, value, origin) of every setting."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False,
                      width=None if sys.stdout.isatty() else 200)  # lines in a pipe are not cut to a screen's width
    settings = Table("setting", "value", "from", box=None, header_style="bold")
    for row in values:
        settings.add_row(*row, style=None if row[2] == "default" else "bold")
    console.print(settings)
    if report.planned:
        console.print(f"\nauto is {report.planned}")
    if report.stages:
        console.print()
        console.print(str(report.stages))
        memory = memory_table(report.memory)
        console.print()
        console.print(memory)
        if report.tensor_mesh:
            console.print(str(report.tensor_mesh))
        if report.machine:
            console.print(str(report.machine))
    console.print()
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for problem in report.problems:
        console.print(f"problem: {problem}", style="red")
    if not report.problems:
        console.print("no problems found", style="green")
