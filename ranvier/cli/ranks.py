"""A subcommand's work on one rank: its errors end all ranks, and determine the exit code."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ranvier.launch.launchers import detect
from ranvier.system.terminal import print_stderr

if TYPE_CHECKING:
    from ranvier.world import World


_COLLECTIONS = gc.get_threshold()
"""Python's own thresholds of garbage collection, which ranks use so that tensors in cycles are freed in time."""


def print_once(text: str) -> None:
    """Print `text` on standard error in only one of the processes that run this command: the process that starts the
    ranks, or rank 0 of another launcher."""
    started = detect(os.environ)
    if started is None or (started.launcher != "local" and started.rank == 0):
        print_stderr(text)


def work_as_rank(world: World, work: Callable[[], object]) -> int:
    """Do `work` on this rank of `world`, and leave the world. Returns the exit code."""
    from ranvier.launch import failures

    gc.set_threshold(*_COLLECTIONS)
    try:
        work()
        world.close()
    except BaseException as error:
        code = failures.report_failure(world, error)
        if not world.is_alone:
            failures.abort_all_ranks(world, code)
        return code
    return 0
