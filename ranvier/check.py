"""Everything that is wrong with a configuration, at once, and what it would come to: stages and memory per rank.

Runs for any number of ranks on any machine: models are built on the meta device, so no weight exists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ranvier.data.tokenizer import GPT2_VOCAB, SMALLEST_VOCAB
from ranvier.errors import ConfigError, RanvierError
from ranvier.models import gpt
from ranvier.pipeline.build import StageTable, cut
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.partition import check_boundaries
from ranvier.pipeline.policies import auto_in_flight, policy_named
from ranvier.run import Run

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_ADAMW_STATES = 2
_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Predicted peak bytes on each of the `ranks` ranks that hold stage `pipe`.

    `activations_bytes` counts all that the blocks' operations write, for every microbatch that may wait for its
    backward: an upper bound.
    """

    pipe: int
    ranks: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `ranvier check` knows. `stages` is None where problems prevent a cut."""

    problems: tuple[RanvierError, ...]
    warnings: tuple[ConfigError, ...]
    stages: StageTable | None
    memory: tuple[StageMemory, ...]

    def document(self) -> dict[str, object]:
        """As JSON can hold it."""
        rows = self.stages.rows if self.stages else ()
        return {"problems": [as_dict(problem) for problem in self.problems],
                "warnings": [as_dict(warning) for warning in self.warnings],
                "stages": [asdict(row) for row in rows],
                "memory": [{**asdict(entry), "total_bytes": entry.total_bytes} for entry in self.memory]}


def as_dict(problem: RanvierError) -> dict[str, object]:
    value = problem.value if isinstance(problem.value, (str, int, float, bool, type(None))) else str(problem.value)
    return {"where": problem.where, "value": value, "message": problem.what, "remedy": problem.remedy}


def check(run: Run, num_ranks: int | None = None) -> Report:
    """Look at `run` as a whole. Never raises for what a user can set."""
    found = problems(run, num_ranks)
    stages = None
    if not any(problem.where.startswith(("model.", "mesh.pipe", "pipeline.boundaries")) for problem in found):
        try:
            stages = stages_of(run)
        except RanvierError as problem:
            found.append(problem)
        except (RuntimeError, OverflowError, MemoryError, ValueError, TypeError) as error:
            found.append(ConfigError(f"cannot be laid out: {str(error).partition(chr(10))[0]}", where="model",
                                     remedy="Choose smaller sizes: a tensor of the model is larger than any can be."))
    return Report(problems=tuple(found), warnings=tuple(warnings(run)), stages=stages,
                  memory=memory_of(run, stages) if stages else ())


def problems(run: Run, num_ranks: int | None = None) -> list[RanvierError]:
    """What cannot work, as far as that follows from the settings alone."""
    return [*gpt.problems(run.model), *_mesh_problems(run, num_ranks), *_batch_problems(run), *_vocab_problems(run)]


def stages_of(run: Run) -> StageTable:
    """The cut of the run's model. ConfigError when the model or the boundaries do not allow one."""
    with torch.device("meta"):
        tokens = torch.zeros(run.batch.microbatch_size, run.model.sequence, dtype=torch.int64)
    sample = Microbatch(inputs=tokens, targets=tokens, samples=torch.arange(1))
    # Replicas, rows and columns do not change the cut, and there may be very many of them.
    return cut(gpt.gpt(run.model, dtype=_DTYPES[run.precision]), replace(run.mesh, data=1, row=1, col=1),
               boundaries=run.pipeline.boundaries, how=run.pipeline.partition, sample=sample,
               dtype=_DTYPES[run.precision], device="cuda" if run.launch.device == "cuda" else "cpu")[0]


def memory_of(run: Run, stages: StageTable) -> tuple[StageMemory, ...]:
    """One prediction for each stage."""
    size, mesh = _DTYPES[run.precision].itemsize, run.mesh
    written = {cost.name: cost.written_bytes for cost in stages.costs or ()}
    share = -(-run.batch.global_size // mesh.data)
    num_microbatches = -(-share // run.batch.microbatch_size)
    limit = auto_in_flight(mesh.pipe) if run.pipeline.in_flight == "auto" else run.pipeline.in_flight
    limit = min(policy_named(run.pipeline.policy).in_flight(limit, num_microbatches), num_microbatches)
    found = []
    for row in stages.rows:
        kept = limit
        if run.pipeline.policy == "1f1b":
            kept = min(limit, mesh.pipe - row.stage)
        elif run.pipeline.policy == "message-driven" and row.stage == mesh.pipe - 1:
            kept = 1  # a forward of the last stage is followed by its backward
        found.append(StageMemory(
            pipe=row.stage, ranks=mesh.data * mesh.stage_size, parameters_bytes=row.num_parameters * size,
            gradients_bytes=row.num_trainable * size, optimizer_bytes=row.num_trainable * size * _ADAMW_STATES,
            activations_bytes=kept * sum(written.get(block, 0) for block in row.blocks)))
    return tuple(found)


def _mesh_problems(run: Run, num_ranks: int | None) -> Iterator[RanvierError]:
    mesh, num_layers = run.mesh, run.model.num_layers
    if num_ranks is not None and mesh.size != num_ranks:
        yield ConfigError(f"needs {mesh.size} ranks, not {num_ranks}", where="mesh", value=str(mesh),
                          remedy=f"Change --mesh.data and --mesh.pipe so that their product is {num_ranks}, or start "
                                 f"{mesh.size} ranks.")
    for axis in ("row", "col"):
        if getattr(mesh, axis) != 1:
            yield ConfigError("must be 1: this version does not split blocks over a tensor mesh", where=f"mesh.{axis}",
                              value=getattr(mesh, axis),
                              remedy=f"Set --mesh.{axis} 1, and use --mesh.data or --mesh.pipe instead.")
    if num_layers > _MOST_LAYERS:
        yield ConfigError(f"is more than {_MOST_LAYERS}, the most that can be cut into stages",
                          where="model.num-layers", value=num_layers, remedy="Use fewer and wider layers.")
    num_blocks = 2 * num_layers + 2
    if mesh.pipe > num_blocks:
        yield ConfigError(f"is more than the {num_blocks} blocks of the model", where="mesh.pipe", value=mesh.pipe,
                          remedy=f"Set --mesh.pipe {num_blocks} or less, or raise --model.num-layers.")
    elif run.pipeline.boundaries is not None:
        try:
            check_boundaries(run.pipeline.boundaries, num_blocks, mesh.pipe)
        except ConfigError as problem:
            yield problem


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


def _vocab_problems(run: Run) -> Iterator[ConfigError]:
    smallest, kind = (GPT2_VOCAB, "GPT-2's") if run.data.tokenizer == "gpt2" else (SMALLEST_VOCAB, "a byte-level")
    if run.model.vocab < smallest:
        yield ConfigError(f"is less than {kind} tokenizer has: {smallest}", where="model.vocab", value=run.model.vocab,
                          remedy=f"Set --model.vocab {smallest} or more.")


def warnings(run: Run) -> Iterator[ConfigError]:
    """Settings that have no effect, or hardly the one that was meant."""
    pipeline, train = run.pipeline, run.train
    if pipeline.policy == "gpipe" and pipeline.in_flight != "auto":
        yield ConfigError("has no effect: gpipe keeps all microbatches in flight", where="pipeline.in-flight",
                          value=pipeline.in_flight, remedy="Set --pipeline.in-flight auto, or another policy.")
    if pipeline.policy != "message-driven" and pipeline.defer_bytes not in ("auto", 0):
        yield ConfigError(f"has no effect: {pipeline.policy} postpones no weight gradients",
                          where="pipeline.defer-bytes", value=pipeline.defer_bytes,
                          remedy="Set --pipeline.defer-bytes auto, or --pipeline.policy message-driven.")
    if pipeline.in_flight != "auto" and pipeline.policy != "gpipe" and pipeline.in_flight < run.mesh.pipe:
        yield ConfigError(f"leaves some of the {run.mesh.pipe} stages idle", where="pipeline.in-flight",
                          value=pipeline.in_flight,
                          remedy=f"Set --pipeline.in-flight {run.mesh.pipe} or more, or auto.")
    if pipeline.boundaries is not None and pipeline.partition == "uniform":
        yield ConfigError("has no effect beside pipeline.boundaries", where="pipeline.partition",
                          value=pipeline.partition, remedy="Leave out one of the two.")
    if train.warmup_steps >= train.steps:
        yield ConfigError(f"ends the run of {train.steps} steps before the full learning rate is reached",
                          where="train.warmup-steps", value=train.warmup_steps,
                          remedy="Lower --train.warmup-steps, or raise --train.steps.")


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
    if report.stages:
        console.print()
        console.print(str(report.stages))
        memory = Table("stage", "ranks", "parameters", "gradients", "optimizer", "activations", "MiB per rank",
                       box=None, header_style="bold")
        for entry in report.memory:
            parts = (entry.parameters_bytes, entry.gradients_bytes, entry.optimizer_bytes, entry.activations_bytes,
                     entry.total_bytes)
            memory.add_row(str(entry.pipe), str(entry.ranks), *(f"{part / 2**20:,.1f}" for part in parts))
        console.print()
        console.print(memory)
    console.print()
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for problem in report.problems:
        console.print(f"problem: {problem}", style="red")
    if not report.problems:
        console.print("no problems found", style="green")
