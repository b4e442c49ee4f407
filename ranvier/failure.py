"""What happens when a rank fails: the first one to fail says why, once, with its coordinates; the others stay quiet.

A failing rank brings the others down, and each of them then fails too, with errors that only say that a peer is gone.
So failing ranks race for one key of the store that all share: the first one's account is the one worth reading.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace

from torch.distributed import Store

from ranvier.comm.board import in_time, said, silent, waits_for
from ranvier.comm.hang import HangWatch
from ranvier.comm.signed_store import SignedStore
from ranvier.errors import Hang, LaunchError, MessageTimeout, RanvierError, TransportError, UnsavedError
from ranvier.lifeline import Heartbeat, launcher_processes, launcher_variable
from ranvier.mesh import Mesh
from ranvier.processes import Process
from ranvier.stopped import LOOK_SECONDS, kill_stopped
from ranvier.world import World

FAILED = "ranvier/failed"
FINISHED = "ranvier/finished"
MESH = "ranvier/mesh"
INTERRUPTED = 130
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
_RELAY_SECONDS = 0.3  # mpiexec throws away what it has not yet read when a rank aborts


def exit_code(error: BaseException) -> int:
    """2 for a RanvierError, 130 for Ctrl-C, otherwise 1, as for an UnsavedError; SystemExit keeps its own."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, UnsavedError):
        return 1
    return 2 if isinstance(error, RanvierError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def failed(world: World, mesh: Mesh, error: BaseException) -> int:
    """Report that this rank failed with `error`, if it is the first to; returns the exit code. Ends nothing."""
    code, told = exit_code(error), isinstance(error, RanvierError)
    if isinstance(error, KeyboardInterrupt) or not code:
        return code
    # Meanwhile a lost peer gives its own account, or its parent does. Ranks that have failed like this one still say
    # what they do, since all look for as long: those that do not are the culprits.
    quiet = _quiet(world, mesh) if isinstance(error, TransportError) and world.size > 1 else ""
    who = f"rank {world.rank} ({_place(world, mesh, world.rank)})"
    first = in_time(lambda: _is_first(world, error, code, told))
    if isinstance(error, SystemExit):
        return code
    if first is None and not told:
        _say(f"ranvier: {who} stopped: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    elif told and (first or (first is None and isinstance(error, MessageTimeout))):
        _say(f"ranvier: error: {error}" + ("" if world.size == 1 else f" [{who}]") + quiet)
    elif first:
        text = "".join(traceback.format_exception(error)).rstrip()
        _say(text if world.size == 1 else f"{who} failed:\n{text}")
    return code


def in_words(error: BaseException, thread: threading.Thread | None) -> BaseException:
    """What ended `thread`; a RanvierError where that is a disk, such as in a library's thread that writes a log."""
    if not isinstance(error, OSError) or error.errno not in _OF_A_DISK:
        return error
    return RanvierError(f"cannot be written: {error.strerror}",
                        where=error.filename or f"a file of {thread.name if thread else 'a thread'}",
                        remedy="Free space on that disk, or choose another folder with --run-dir.")


def leave(world: World, code: int) -> None:
    """End this process with `code`, and all ranks as far as the backend can. Does not return."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a log on a full disk must not keep the others waiting for this rank
            stream.flush()
    if world.backend.name == "mpi":
        time.sleep(_RELAY_SECONDS)
        if world.launcher == "local":  # the parent says how this rank ended; MPI's line would say it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    elif world.launcher != "local":  # our own starter does that
        for launcher in launcher_processes(world.launcher)[-1:]:
            kill_stopped(launcher, launcher_variable(world.launcher))
    try:
        world.backend.abort(code)
    finally:
        os._exit(code)


def end_on_errors(world: World, mesh: Mesh, *, stopped_seconds: float, hang_seconds: float | None,
                  timeout_seconds: float) -> None:
    """From now on an uncaught error, on any thread of this rank, is reported by `failed` and ends all ranks; so are a
    rank of this machine that is stopped for `stopped_seconds`, and an action of this one that hangs (HangWatch).

    The normal end of the program waits until all ranks are there and then closes the backend, and fails where nothing
    is heard of one of them for `timeout_seconds`; sys.exit with an error code does not wait, but ends the others.
    """
    def on_stopped(rank: int, process: Process) -> None:
        leave(world, failed(world, mesh, TransportError(
            "is stopped (SIGSTOP), and the run is ended: all others wait for it", value=f"process {process.pid}",
            where=f"rank {rank} ({_place(world, mesh, rank)})",
            remedy="Start again with --resume auto; --launch.stopped-seconds 0 lets a rank be stopped.")))

    def on_overdue(where: str) -> None:
        leave(world, failed(world, mesh, MessageTimeout(
            "a collective did not end", where=where, value=f"more than {timeout_seconds:g} s",
            remedy="See what the other members do, or raise --comm.timeout-seconds.")))

    heartbeat = None
    if world.size > 1:
        heartbeat = Heartbeat(world, stopped_seconds=stopped_seconds, timeout_seconds=timeout_seconds,
                              on_stopped=on_stopped, on_overdue=on_overdue)
        world.hang = lambda: HangWatch(hang_seconds, lambda error: leave(world, failed(world, mesh, error)))
    codes = [0]

    def on_error(kind, error, trace) -> None:
        code = failed(world, mesh, error)
        if world.size > 1:
            leave(world, code)
        codes[0] = code
        raise SystemExit(code)

    def on_thread_error(caught) -> None:
        if not issubclass(caught.exc_type, SystemExit):
            leave(world, failed(world, mesh, in_words(caught.exc_value or caught.exc_type(), caught.thread)))

    def on_exit(code: object = None) -> None:
        codes[0] = exit_code(SystemExit(code))  # later, at exit, nothing tells it
        raise SystemExit(code)

    sys.excepthook, threading.excepthook, sys.exit = on_error, on_thread_error, on_exit
    atexit.register(_end, world, mesh, codes, heartbeat)


def _end(world: World, mesh: Mesh, codes: list[int], heartbeat: Heartbeat | None) -> None:
    if heartbeat is None:
        world.backend.close()
        return
    if codes[0]:
        leave(world, failed(world, mesh, SystemExit(codes[0])))
    try:
        _await_all(world, mesh, heartbeat)
        heartbeat.close()
        world.backend.close()
    except RanvierError as error:  # raised at exit, it would be printed, and the exit code stay 0
        leave(world, failed(world, mesh, error))


def _await_all(world: World, mesh: Mesh, heartbeat: Heartbeat) -> None:
    """Return when every rank's program has come to its end: some write reports long after the others are done.
    MessageTimeout where one gives no sign of life in time, LaunchError where one needs this rank for what it does."""
    try:
        world.store.set(f"{FINISHED}/{world.rank}", "")
        looked, unfinished = time.monotonic(), set(range(world.size)) if world.rank == 0 else set()
        needed_by = None
        while not world.store.check([FINISHED]):
            unfinished = {rank for rank in unfinished if not world.store.check([f"{FINISHED}/{rank}"])}
            if world.rank == 0 and not unfinished:
                world.store.set(FINISHED, "")
            time.sleep(0.02)
            if time.monotonic() - looked >= LOOK_SECONDS:
                before, needed_by = needed_by, waits_for(world.store, world.rank, range(world.size))
                if needed_by is not None and needed_by == before:
                    raise _ended_early(world, mesh, needed_by)
                looked, (rank, seconds) = time.monotonic(), heartbeat.longest_silence()
                if seconds >= heartbeat.timeout_seconds:
                    raise MessageTimeout("gives no sign of life, and the run waits for its end", where=f"rank {rank}",
                                         value=f"{seconds:.0f} s",
                                         remedy="See what that rank does, and start again with --resume auto.")
    except RuntimeError:
        pass  # rank 0, which keeps the store, saw all of them and has left


def _ended_early(world: World, mesh: Mesh, other: int) -> LaunchError:
    doing = (in_time(lambda: said(world.store, [other])) or {}).get(other, (0, "a call"))[1]
    return LaunchError(f"ended its program with exit code 0 while rank {other} ({_place(world, mesh, other)}) needs "
                       f"it: that is in {doing}", where=f"rank {world.rank}",
                       remedy="Have all ranks make the same calls of the engine, and end after the last one.")


def end_on_start_errors(local_rank: int | None) -> None:
    """Until `end_on_errors`: an uncaught RanvierError becomes one line on each machine, and exit code 2."""
    def on_error(kind, error, trace) -> None:
        if not isinstance(error, RanvierError):
            sys.__excepthook__(kind, error, trace)
            return
        say_once(error, local_rank)
        raise SystemExit(2)

    sys.excepthook = on_error


def say_once(error: RanvierError, local_rank: int | None) -> None:
    """The error's line, on the first rank of each machine: before ranks are connected, all meet the same errors."""
    if not local_rank:
        _say(f"ranvier: error: {error}")


def _is_first(world: World, error: BaseException, code: int, told: bool) -> bool:
    """Whether this rank is the first to fail. Raises when the store is gone (its keeper failed before)."""
    mine = json.dumps({"rank": world.rank, "code": code, "told": told, "num_lost": int(isinstance(error, Hang)),
                       "may_succeed_again": isinstance(error, TransportError) or not told})
    # A connection of its own: another thread may be waiting on the shared one.
    return world.store.clone().compare_set(FAILED, "", mine).decode() == mine


def _quiet(world: World, mesh: Mesh) -> str:
    """A line on the ranks that say nothing any more, which a peer that waits cannot tell from busy ones."""
    ranks = silent(world.store, [rank for rank in range(world.size) if rank != world.rank])
    if ranks is None:
        return "\nranvier: rank 0's store does not answer: this machine is cut off from it, or rank 0 has ended"
    named = "; ".join(f"rank {rank} ({_place(world, mesh, rank)})" for rank in ranks)
    return f"\nranvier: nothing is heard any more from {named}" if ranks else ""


def _place(world: World, mesh: Mesh, rank: int) -> str:
    """A rank's coordinates on the mesh of the moment, which the run may have changed since its start."""
    return place(world.mesh or mesh, rank)


def place(mesh: Mesh, rank: int) -> str:
    """A rank's coordinates in words; "idle" for one that the mesh does not take."""
    return str(mesh.coordinates(rank)) if rank < mesh.size else "idle"


def tell_mesh(store: Store | SignedStore, mesh: Mesh) -> None:
    """The run takes another mesh from now on: for the parent, which names ranks by their coordinates."""
    store.set(MESH, json.dumps([mesh.data, mesh.pipe]))


def mesh_of_now(store: Store | SignedStore, mesh: Mesh) -> Mesh:
    """The mesh that was told last, in a run that has begun with `mesh`."""
    if not store.check([MESH]):
        return mesh
    data, pipe = json.loads(store.get(MESH))
    return replace(mesh, data=data, pipe=pipe)


def _say(text: str) -> None:
    """One write, so that the lines of several ranks do not mix."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
