"""Run a function on several ranks: threads of this process, or real processes over torch.distributed or MPI.

    run_ranks(lambda world: world.rank ** 2, 4) == [0, 1, 4, 9]

    run_processes("package.module:function", 4, "mpi")        # function(world, *args) returns something JSON can hold
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ranvier.arguments import check_arguments
from ranvier.comm.hang import frames_of_threads
from ranvier.comm.inprocess import InProcessWorld
from ranvier.config.run import Positive, Seconds
from ranvier.launch.rank_processes import RanksFailed, run_processes
from ranvier.world import World

__all__ = ["RanksFailed", "run_processes", "run_ranks"]

Result = TypeVar("Result")


def run_ranks(fn: Callable[[World], Result], size: Positive, *, timeout_seconds: Seconds = 60.0) -> list[Result]:
    """Run `fn(world)` on `size` ranks that are threads of this process; returns their results in rank order.

    Raises the first failure of any rank, with a note that names the rank; the failure also wakes and ends ranks that
    wait for a message or a collective. RanksFailed with stacks if some threads have not ended in `timeout_seconds`.
    """
    check_arguments(run_ranks, locals())
    shared, store = InProcessWorld(size), dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_seconds))
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        world = World(backend=shared.backend(rank), store=store, launcher="in-process", device=torch.device("cpu"),
                      local_rank=rank, local_size=size)
        try:
            results[rank] = fn(world)
            world.backend.close()
        except BaseException as error:
            failures.append((rank, error))
            shared.abort(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    late = "" if not stuck else f"{', '.join(thread.name for thread in stuck)} of {size} had not ended after " \
                                f"{timeout_seconds:g} s\n{_stacks(stuck)}"
    if failures:
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {size}")
        if late:
            error.add_note(late)
        raise error
    if stuck:
        shared.abort()
        for thread in stuck:
            thread.join(2.0)
        raise RanksFailed(late, hung=True)
    return results


def _stacks(threads: list[threading.Thread]) -> str:
    frames = frames_of_threads()
    return "\n".join(f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                     for thread in threads if thread.ident in frames)
