"""Automatic restarts of a run after a fault, under plain python: `--max-restarts`.

Each start resumes from the newest complete checkpoint (`--resume auto`). A rank that was killed, stopped or hung
counts as lost, with its device: the run resumes on the remaining ranks, on the first legal mesh of that many ranks
(ranvier.config.other_mesh), or of fewer if there is none. After other faults, such as a message that did not arrive,
all ranks are started again. Errors in settings and data, and signals to stop, end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ranvier.checkpoint.manifest import checkpoints
from ranvier.config.other_mesh import refit
from ranvier.config.resolve import ResolvedRun
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.planner.problems import problems
from ranvier.system.terminal import print_stderr


class Restarts:
    """Restarts of `run`, which `command` starts, after a fault; called with the number of remaining ranks."""

    def __init__(self, run: ResolvedRun, command: Sequence[str]) -> None:
        self._run, self._command, self._count = run, list(command), 0

    def __call__(self, num_ranks: int) -> tuple[Mesh, Sequence[str]] | None:
        """The mesh and the command of the next start; None if there should be none."""
        run = self._run
        if self._count >= run.max_restarts:
            return None
        self._count += 1
        folder = run.checkpoint.dir or (run.run_dir and run.run_dir / "checkpoint")
        has_saved = folder is not None and bool(checkpoints(folder))
        if not has_saved and run.resume not in ("none", "auto"):
            self._report("from where it began")  # a checkpoint elsewhere: the run begins on its own mesh
            return run.mesh, self._command
        mesh = mesh_without(run, num_ranks)
        if mesh is None:
            return None
        on = "" if mesh == run.mesh else f", on {mesh.size} of the {num_ranks} ranks that are left: {mesh}"
        self._report(f"from its {'newest checkpoint' if has_saved else 'beginning, since it has no checkpoint'}{on}")
        return mesh, [*self._command, "--resume", "auto"]

    def _report(self, how: str) -> None:
        print_stderr(f"ranvier: restart {self._count} of {self._run.max_restarts}: the run starts again {how}")


def mesh_without(run: ResolvedRun, num_ranks: int) -> Mesh | None:
    """The mesh of a run that resumes on `num_ranks` ranks after others were lost: its own, or the first legal mesh of
    the largest possible number of ranks; None if there is none."""
    for count in range(min(num_ranks, run.mesh.size), 0, -1):
        if count == run.mesh.size:
            return run.mesh
        with suppress(ConfigError):
            return refit(replace(run, resume="auto"), count, "the loss", problems)[0].mesh
    return None
