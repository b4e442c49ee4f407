"""Reports a failure once, with the coordinates of the rank that failed first, and ends all ranks.

A failing rank brings the others down, and each of them then fails too, with errors that only say that a peer is gone.
Failing ranks therefore compete for one key of the shared store, and only the first one prints its error. A rank that
was killed prints nothing, so the first of the other ranks to fail prints its error.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NoReturn

from ranvier.comm.board import (
    EXIT_THREAD,
    call_with_timeout,
    describe_actions,
    find_silent_ranks,
    find_waiting_rank,
    read_actions,
)
from ranvier.comm.hang import HangDetector
from ranvier.comm.signed_store import SharedStore, clone_shared_store
from ranvier.config.run import Launch
from ranvier.errors import Hang, LaunchError, MessageTimeout, RanvierError, TransportError, UnsavedError
from ranvier.launch.heartbeat import (
    FAILED,
    FINISHED,
    Heartbeat,
    find_launcher_processes,
    launcher_variable,
    may_report_killed,
    store_is_gone,
)
from ranvier.launch.stop import STOP_SIGNALS, StopRequest
from ranvier.launch.stopped_ranks import CHECK_SECONDS, kill_stopped_ranks
from ranvier.mesh import Mesh
from ranvier.system.processes import Process
from ranvier.system.terminal import print_stderr
from ranvier.world import World

MESH = "ranvier/mesh"
"""Store key of the current numbers of replicas and stages, if they have changed since the start."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
_MPIEXEC_RELAY_SECONDS = 0.3  # mpiexec discards output that it has not read yet when a rank aborts


def exit_code(error: BaseException) -> int:
    """2 for a RanvierError, 130 for Ctrl-C, otherwise 1, as for an UnsavedError; SystemExit keeps its own."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, UnsavedError):
        return 1
    return 2 if isinstance(error, RanvierError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def report_failure(world: World, error: BaseException, *, names_culprit: bool = False) -> int:
    """Print that this rank failed with `error`, if it is the first to fail. Returns the exit code; does not exit.

    names_culprit: the error names the rank at fault, so the search for ranks without heartbeat is skipped.
    """
    code, is_user_error = exit_code(error), isinstance(error, RanvierError)
    if isinstance(error, KeyboardInterrupt) or not code:
        return code
    # The search for silent ranks takes seconds, so a lost peer or its supervisor reports its own error first. Ranks
    # that failed like this one still have a heartbeat, so only the culprits are silent.
    searches = isinstance(error, TransportError) and world.size > 1 and not names_culprit
    # Meanwhile a launcher that saw the lost rank end sends SIGTERM to the others; our supervisor reports the end
    # itself.
    with StopRequest(STOP_SIGNALS if world.launcher != "local" else ()):
        silence = _describe_silence(world) if searches else ""
    name = f"rank {world.rank} ({_describe_now(world, world.rank)})"
    first = None if silence is None else call_with_timeout(
        lambda: _is_first(world, error, code, is_user_error), 2.0 if names_culprit else None)
    if isinstance(error, SystemExit):
        return code
    if first is None and not is_user_error:
        print_stderr(f"ranvier: {name} stopped: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    elif is_user_error and (first or (first is None and (names_culprit or isinstance(error, MessageTimeout)))):
        actions = describe_actions(world.store, world.size) if isinstance(
            error, MessageTimeout) and silence is not None and "\n" not in str(error) else ""
        print_stderr(f"ranvier: error: {error}" + ("" if world.size == 1 else f" [{name}]")
                     + (actions and f"\n{actions}") + (_STORE_IS_SILENT if silence is None else silence))
    elif first is None and isinstance(error, TransportError):  # the store's host may have been killed silently
        print_stderr(f"ranvier: {store_is_gone(world, error)}")
    elif first:
        text = "".join(traceback.format_exception(error)).rstrip()
        print_stderr(text if world.size == 1 else f"{name} failed:\n{text}")
    return code


def as_user_error(error: BaseException, thread: threading.Thread | None) -> BaseException:
    """A RanvierError if `error`, which ended `thread`, comes from a full or read-only disk; else `error` itself.

    For threads of libraries that write logs.
    """
    if not isinstance(error, OSError) or error.errno not in _DISK_ERRORS:
        return error
    return RanvierError(f"cannot be written: {error.strerror}", code="disk-failed",
                        where=error.filename or f"a file of {thread.name if thread else 'a thread'}",
                        remedy="Free space on that disk, or choose another folder with `--run-dir`.")


def flush_or_discard() -> None:
    """Flush standard output and error before the process ends. Output that cannot be written is discarded, since Python
    would exit with 120 otherwise."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def abort_all_ranks(world: World, code: int) -> NoReturn:
    """End this process with exit code `code`, and all ranks as far as the backend can."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a log on a full disk must not delay the end of the other ranks
            stream.flush()
    if world.backend.name == "mpi":
        time.sleep(_MPIEXEC_RELAY_SECONDS)
        if world.launcher == "local":  # the supervisor reports how this rank ended; MPI's message would repeat it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    else:
        kill_local_stopped_ranks(world.launcher)
    try:
        world.backend.abort(code)
    finally:
        os._exit(code)


def install_error_handlers(world: World, launch: Launch, *, timeout_seconds: float) -> None:
    """Install handlers so that an uncaught error on any thread of this rank is reported and ends all ranks.

    The same happens if a signal has stopped a rank of this machine for `launch.stopped_seconds`, or if an action of
    this rank hangs, by `launch.hang_seconds` (`HangDetector`). The normal end of the program waits for all ranks and
    then closes the backend; it fails if a rank sends no heartbeat for `timeout_seconds`. sys.exit with an error code
    does not wait, but ends the other ranks.
    """
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:  # a program may have its own object in sys.stderr
        with suppress(OSError, ValueError):  # standard error may be closed
            faulthandler.enable(sys.__stderr__, all_threads=False)

    def fail(error: BaseException, *, names_culprit: bool = False) -> NoReturn:
        abort_all_ranks(world, report_failure(world, error, names_culprit=names_culprit))

    def on_stopped(rank: int, process: Process) -> None:
        fail(TransportError(
            "is stopped (SIGSTOP) while all others wait for it, so the run ends", code="rank-stopped",
            value=f"process {process.pid}", where=f"rank {rank} ({_describe_now(world, rank)})",
            remedy="Start again with `--resume auto`; `--launch.stopped-seconds 0` allows a rank to be stopped."),
            names_culprit=True)

    def on_overdue(where: str) -> None:
        actions = call_with_timeout(lambda: read_actions(world.store, range(world.size))) or {}
        lines = (f"\n  rank {rank} ({_describe_now(world, rank)}): {action}" for rank, (_, action) in actions.items())
        fail(MessageTimeout(
            f"a collective did not end{''.join(lines)}", code="collective-late", where=where,
            value=f"more than {timeout_seconds:g} s",
            remedy="Check what the other members do, or raise `--comm.timeout-seconds`."))

    def on_left_behind(report: Callable[[Callable[[int], str]], str | None]) -> NoReturn:
        text = report(partial(_describe_now, world))
        if text is not None:
            print_stderr(f"ranvier: {text}")
        abort_all_ranks(world, 1)

    heartbeat = None
    if not world.is_alone:
        heartbeat = Heartbeat(world, stopped_seconds=launch.stopped_seconds, timeout_seconds=timeout_seconds,
                              on_stopped=on_stopped, on_overdue=on_overdue, on_left_behind=on_left_behind)
        world.hang = lambda: HangDetector(None if launch.hang_seconds == "auto" else launch.hang_seconds, fail)
    codes = [0]

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        code = report_failure(world, error)
        if not world.is_alone:
            abort_all_ranks(world, code)
        codes[0] = code
        raise SystemExit(code)

    def on_thread_error(caught: threading.ExceptHookArgs) -> None:
        if not issubclass(caught.exc_type, SystemExit):
            fail(as_user_error(caught.exc_value or caught.exc_type(), caught.thread))

    def on_exit(code: str | int | None = None) -> NoReturn:
        codes[0] = exit_code(SystemExit(code))  # recorded here because atexit handlers cannot see the code
        raise SystemExit(code)

    sys.excepthook, threading.excepthook, sys.exit = on_error, on_thread_error, on_exit
    EXIT_THREAD.start()
    atexit.register(_finish, world, codes, heartbeat)


def _finish(world: World, codes: list[int], heartbeat: Heartbeat | None) -> None:
    """The end of the program, as an atexit handler."""
    flush_or_discard()
    if heartbeat is None:
        world.close()
        return
    if codes[0]:
        abort_all_ranks(world, report_failure(world, SystemExit(codes[0])))
    try:
        _await_all_ranks(world, heartbeat)
        heartbeat.close()
        world.close()
    except RanvierError as error:  # an error that leaves an atexit handler is printed, but the exit code stays 0
        abort_all_ranks(world, report_failure(world, error))


def _await_all_ranks(world: World, heartbeat: Heartbeat) -> None:
    """Wait until the program of every rank has ended; some ranks still write reports long after the others have ended.

    MessageTimeout if a rank sends no heartbeat in time, LaunchError if a rank is in a call that needs this one.
    """
    try:
        world.store.set(f"{FINISHED}/{world.rank}", "")
        checked, unfinished = time.monotonic(), set(range(world.size)) if world.rank == 0 else set()
        needed_by = None
        while not world.store.check([FINISHED]):
            unfinished = {rank for rank in unfinished if not world.store.check([f"{FINISHED}/{rank}"])}
            if world.rank == 0 and not unfinished:
                world.store.set(FINISHED, "")
            time.sleep(0.02)
            if time.monotonic() - checked >= CHECK_SECONDS:
                # Two checks in a row: between publishing its last call and its end, a rank may appear to be waiting.
                before, needed_by = needed_by, find_waiting_rank(world.store, world.rank, range(world.size))
                needed_by = heartbeat.find_waiting_rank() if needed_by is None else needed_by
                if needed_by is not None and needed_by == before:
                    raise _ended_early(world, needed_by)
                checked, (rank, seconds) = time.monotonic(), heartbeat.longest_silence()
                if seconds >= heartbeat.timeout_seconds:
                    raise MessageTimeout("sends no heartbeat, and the run waits for it to end",
                                         code="heartbeat-missing", where=f"rank {rank}", value=f"{seconds:.0f} s",
                                         remedy="Check what that rank does, and start again with `--resume auto`.")
    except RuntimeError:
        pass  # rank 0, which hosts the store, has seen that all ranks finished, and has exited


def _ended_early(world: World, other: int) -> LaunchError:
    action = (call_with_timeout(lambda: read_actions(world.store, [other])) or {}).get(other, (0, "a call"))[1]
    return LaunchError(f"ended its program while rank {other} ({_describe_now(world, other)}) needs it, which is in "
                       f"{action}", code="rank-ended-early", where=f"rank {world.rank}",
                       remedy="Make the same calls of the engine, of Checkpoints and of the world on all ranks, and "
                              "end the program after the last one; sys.exit with an error ends all ranks.")


def kill_local_stopped_ranks(launcher: str) -> None:
    """Kill ranks of this machine that a signal has stopped: their launcher would wait for them forever. Our own
    supervisor handles its ranks itself."""
    if launcher != "local":
        for process in find_launcher_processes(launcher)[-1:]:
            kill_stopped_ranks(process, launcher_variable(launcher))


def install_start_error_handlers(local_rank: int | None) -> None:
    """Until `install_error_handlers` is called, print an uncaught RanvierError in one line per machine, and exit with
    2.

    local_rank: of this rank; None before ranks are started.
    """
    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, RanvierError):
            sys.__excepthook__(kind, error, trace)
            return
        if not local_rank:  # before ranks are connected, all of them get the same errors
            print_stderr(f"ranvier: error: {error}")
        raise SystemExit(2)

    sys.excepthook = on_error


def _is_first(world: World, error: BaseException, code: int, is_user_error: bool) -> bool:
    """Whether this rank is the first to fail, or the first of those brought down by a killed rank, which cannot report
    itself. The record of the first failed rank stays in the store.

    Raises an error of the store if the process that hosts it has exited.
    """
    record = json.dumps({"rank": world.rank, "code": code, "reported": is_user_error,
                         "num_lost": int(isinstance(error, Hang)),
                         "retryable": isinstance(error, TransportError) or not is_user_error})
    store = clone_shared_store(world.store)  # a separate connection: another thread may be waiting on the shared one
    found = store.compare_set(FAILED, "", record).decode()
    return found == record or (json.loads(found).get("killed", False) and may_report_killed(store, world.rank))


_STORE_IS_SILENT = ("\nranvier: rank 0's store does not answer: this machine is disconnected from it, or rank 0 has "
                    "exited or is stopped")


def _describe_silence(world: World) -> str | None:
    """A line that names the ranks without heartbeat, which a waiting peer cannot tell from busy ones; None if rank 0's
    store does not answer."""
    ranks = find_silent_ranks(world.store, [rank for rank in range(world.size) if rank != world.rank])
    if ranks is None:
        return None
    names = "; ".join(f"rank {rank} ({_describe_now(world, rank)})" for rank in ranks)
    return f"\nranvier: no heartbeat from {names}" if ranks else ""


def _describe_now(world: World, rank: int) -> str:
    """A rank's coordinates on the run's present mesh."""
    return describe_rank(world.mesh or Mesh.of_replicas(world.size), rank)


def describe_rank(mesh: Mesh, rank: int) -> str:
    """A rank's coordinates in words; "idle" for a rank beyond the mesh."""
    return str(mesh.coordinates(rank)) if rank < mesh.size else "idle"


def publish_mesh(store: SharedStore, mesh: Mesh) -> None:
    """Publish that the run now uses `mesh`, for the supervisor, which names ranks by their coordinates."""
    store.set(MESH, json.dumps(mesh.sizes))


def read_mesh(store: SharedStore, mesh: Mesh) -> Mesh:
    """The last published mesh of a run that was started with `mesh`."""
    if not store.check([MESH]):
        return mesh
    return mesh.resized(**json.loads(store.get(MESH)))
