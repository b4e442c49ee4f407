"""A run on other ranks than it was meant for: another mesh, and what of its settings depends on that.

The global batch stays, and with it the numbers of the run. Boundaries between stages go where pipe, row or col change;
microbatches become smaller where a replica's share of the batch does.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier import check
from ranvier.errors import ConfigError
from ranvier.fallback import difference, fallback, microbatch_size
from ranvier.mesh import Mesh
from ranvier.run import Run


def on_mesh(run: Run, mesh: Mesh) -> Run:
    """`run` on `mesh`, with the settings that must follow."""
    batch = replace(run.batch, microbatch_size=microbatch_size(
        run.batch.microbatch_size, global_size=run.batch.global_size, mesh=mesh))
    kept = mesh.shape[1:] == run.mesh.shape[1:]
    return replace(run, mesh=mesh, batch=batch,
                   pipeline=run.pipeline if kept else replace(run.pipeline, boundaries=None))


def refit(run: Run, num_ranks: int, launcher: str) -> tuple[Run, ConfigError]:
    """`run` on the first legal mesh of `num_ranks` ranks (see `ranvier.fallback`), and the warning that says so.

    ConfigError when it is legal on none.
    """
    refitted = on_mesh(run, fallback(run.mesh, num_ranks, lambda mesh: check.problems(on_mesh(run, mesh))))
    size = refitted.batch.microbatch_size
    smaller = f", and microbatches of {size} sequences" if size != run.batch.microbatch_size else ""
    return refitted, ConfigError(
        f"does not fit the {num_ranks} ranks that {launcher} started: the run goes on with {refitted.mesh} "
        f"({difference(run.mesh, refitted.mesh)}{smaller})", where="mesh", value=str(run.mesh),
        remedy="Set another mesh to choose for yourself.")
