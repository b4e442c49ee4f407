"""A run on another number of ranks than it was meant for: another mesh, and the settings that follow from it.

A checkpoint fits any mesh, so a run resumes on any valid mesh. It takes the first mesh that uses all ranks in this
order, which keeps the chosen sizes as far as possible, and then prefers less memory on each rank:

    rows            unchanged, then each smaller divisor of them, largest first
      columns       unchanged, then each smaller divisor of them, largest first
        stages      unchanged, then more, fewest first; then fewer, most first
          replicas  take the remaining ranks

The global batch stays the same, and with it the results of the run. Boundaries between stages, and limits of single
ranks, are dropped if pipe, row or col change; microbatches become smaller if a replica's share of the batch does. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ranvier.config.resolve import ResolvedRun
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh, divisors

_MOST_TOLD = 4


def on_mesh(run: ResolvedRun, mesh: Mesh) -> ResolvedRun:
    """`run` on `mesh`, with the settings that must follow."""
    batch = replace(run.batch, microbatch_size=microbatch_size(
        run.batch.microbatch_size, global_size=run.batch.global_size, mesh=mesh))
    pipeline = run.pipeline if has_same_replicas(mesh, run.mesh) else replace(
        run.pipeline, boundaries=None, deferred=None, defer_last=None)
    return replace(run, mesh=mesh, batch=batch, pipeline=pipeline)


def refit(run: ResolvedRun, num_ranks: int, launcher: str, problems: Callable[[ResolvedRun], Sequence[RanvierError]]
          ) -> tuple[ResolvedRun, ConfigError]:
    """`run` on the first valid mesh of `num_ranks` ranks, and the warning about it. problems: gives the problems of a
    run.

    ConfigError when there is no valid mesh.
    """
    refitted = on_mesh(run, fallback(run.mesh, num_ranks, lambda mesh: problems(on_mesh(run, mesh))))
    size = refitted.batch.microbatch_size
    smaller = f", and microbatches of {size} sequences" if size != run.batch.microbatch_size else ""
    return refitted, ConfigError(
        f"does not fit the {num_ranks} ranks that {launcher} started: the run resumes with {refitted.mesh} "
        f"({difference(run.mesh, refitted.mesh)}{smaller})", code="mesh-refitted", where="mesh", value=str(run.mesh),
        remedy="Set another mesh to choose it yourself.")


def has_same_replicas(mesh: Mesh, other: Mesh) -> bool:
    """Whether a replica has the same shape on both meshes, so that they can differ only in `data`."""
    return set(mesh.changed_axes(other)) <= {*mesh.replica_axes}


def fallback_meshes(mesh: Mesh, num_ranks: int) -> Iterator[Mesh]:
    """All candidates of `num_ranks` ranks for a run that was meant for `mesh`, in order, each once.

    A tile is kept if pipe, row and col are.
    """
    mesh.require_known_axes("another number of ranks")
    for row in reversed(divisors(mesh.row)):
        for col in reversed(divisors(mesh.col)):
            num_stages, rest = divmod(num_ranks, row * col)
            for pipe in _pipes(mesh.pipe, num_stages) if not rest else ():
                found = mesh.resized(data=num_stages // pipe, pipe=pipe, row=row, col=col)
                yield found if has_same_replicas(found, mesh) else found.with_tile(None)


def fallback(mesh: Mesh, num_ranks: int, problems: Callable[[Mesh], Sequence[RanvierError]]) -> Mesh:
    """The first candidate without problems; `problems` gives those of the run on a mesh. Deterministic.

    ConfigError, with the meshes that were tried, when there is none.
    """
    tried = []
    for candidate in fallback_meshes(mesh, num_ranks):
        found = problems(candidate)
        if not found:
            return candidate
        tried.append(f"{candidate} ({found[0].where}: {found[0].what})")
    more = f"; {len(tried) - _MOST_TOLD} more" if len(tried) > _MOST_TOLD else ""
    raise ConfigError(f"does not fit the {num_ranks} ranks that were started, and the run cannot resume on any other "
                      f"mesh with that many. Tried: {'; '.join(tried[:_MOST_TOLD])}{more}", code="no-mesh-for-ranks",
                      where="mesh", value=str(mesh),
                      remedy="Start as many ranks as the mesh has, or set a mesh and a batch for these ranks.")


def resized(first: Mesh, **sizes: int) -> Mesh:
    """A mesh of these sizes for a run that was started on `first`, whose tile is only for its rows and columns."""
    first.require_known_axes("a change of mesh")
    return first.resized(**sizes)


def difference(old: Mesh, new: Mesh) -> str:
    """Description of the changes from `old` to `new`."""
    axes = sorted(old.axes, key=lambda axis: (not axis.divides_stages) + axis.replicates_parameters)
    changed = [(axis.plural, old[axis.name], new[axis.name]) for axis in axes]
    return ", ".join(f"{'more' if after > before else 'fewer'} {name}" for name, before, after in changed
                     if before != after) or "nothing"


def microbatch_size(size: int, *, global_size: int, mesh: Mesh) -> int:
    """`size`, or, if it is less, the share of a replica of `mesh` in a global batch of `global_size` sequences.

    The share is rounded down to a number of sequences that the rows divide, if possible.
    """
    share = -(-global_size // mesh.data)
    return size if size <= share else max(share - share % mesh.row, 1)


def _pipes(pipe: int, num_ranks: int) -> list[int]:
    """The divisors of `num_ranks`: `pipe`, then larger ones, smallest first, then smaller ones, largest first."""
    return sorted(divisors(num_ranks), key=lambda other: (other != pipe, other < pipe, abs(other - pipe)))
