"""Leases on folders, so that only one run at a time owns each; on any file system that the machines share.

    RUN/.owner.7       the lease of generation 7: its owner, and a heartbeat count that a thread of the owner increments

    start              if the owner of the newest generation is gone: create .owner.8 exclusively; if it is still the
                       newest, remove the older ones, whose owners have now lost the folder
    before a rename    OwnershipError unless .owner.8 still exists and names this owner
    end                mark .owner.8 as released; the file stays, so that generations only rise

The generation is a fencing token: a former owner that wakes up later finds its lease gone, and the next owner removes
its half-written folders. Exclusive creation (O_EXCL) decides between two starts; it works on NFS, where file locks may
not. No wall clock decides whether an owner is gone: on the same machine its process does (pid and start time), on
another one its count, which must be constant for a time by this machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from pydantic import TypeAdapter, ValidationError

from ranvier.errors import CheckpointError, OwnershipError
from ranvier.system.processes import process_state
from ranvier.system.untrusted_file import new_file, open_regular_file

HEARTBEAT_SECONDS = 2.0
"""Time between two heartbeats of an owner."""
EXPIRY_SECONDS = 30.0
"""An owner on another machine without a heartbeat for this time is gone."""
WAIT_SECONDS = 5.0
"""Seconds that a start waits for an owner that may be about to exit."""
_POLL_SECONDS = 0.1
_LEASE = re.compile(r"\.owner\.([1-9][0-9]{0,11})")
_COUNT_DIGITS = 12
_MACHINES_OWN = "pid:[4026531836]"
"""The first pid namespace of every Linux kernel, in which no container is (PROC_PID_INIT_INO)."""
_MOST_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that owns a folder.

    host, pid: its machine's name and its process id.
    machine: boot id and pid namespace, within which the pid is meaningful; "" if unknown.
    started: the kernel's start time of the process, which tells it from a later process with the same pid.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str = ""
    """When it acquired the folder, by its own wall clock; only for display."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies this lease."""
    released: bool = False
    """Whether the owner has given up the folder."""

    @classmethod
    def this_process(cls) -> Owner:
        """This process, with a new token."""
        pid, machine = os.getpid(), _this_machine()
        state = process_state(pid)
        return cls(host=socket.gethostname(), machine=machine if state else "", pid=pid,
                   started=state[1] if state else "", since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")

    @property
    def has_known_pid(self) -> bool:
        """Whether the process id is that of a machine, or of this process's own container, and not of another one."""
        own = _this_machine()
        boot, _, namespace = self.machine.partition(" ")
        return self.machine == own or (boot != own.partition(" ")[0] and namespace in ("", _MACHINES_OWN))

    def has_exited(self, state: tuple[str, str] | None) -> bool:
        """Whether its process, one of this machine, is gone. state: `process_state` of its pid."""
        return state is None or state[0] in "ZX" or state[1] != self.started

    def __str__(self) -> str:
        name = f"process {self.pid}" if self.has_known_pid else "a process in a container"
        return f"{name} on {self.host}"


def _this_machine() -> str:
    """Boot id and pid namespace; "" if unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    return ""


_owner = TypeAdapter(Owner)


# --- one folder ------------------------------------------------------------------------------------------------------


def _path(folder: Path, generation: int) -> Path:
    return folder / f".owner.{generation}"


def _generations(folder: Path) -> list[int]:
    """Generations of the leases in `folder`, in ascending order."""
    return sorted(int(match[1]) for name in os.listdir(folder) if (match := _LEASE.fullmatch(name)))


def heartbeat_content(count: int, owner: Owner) -> bytes:
    return f"{count:0{_COUNT_DIGITS}}\n{json.dumps(asdict(owner))}\n".encode()


def _read(path: Path) -> bytes:
    """Content of a lease. Raises FileNotFoundError if it is gone, another OSError if it cannot be read."""
    with open_regular_file(path, links=False) as file:
        return file.read(_MOST_BYTES)


def owner_in(content: bytes) -> Owner | None:
    """The owner named in a lease; None if it is damaged, or just being written."""
    try:
        return _owner.validate_json(content.partition(b"\n")[2])
    except ValidationError:
        return None


def _newest_owner(folder: Path) -> Owner | None:
    """The owner named in the newest lease of `folder`; None if none can be read."""
    with suppress(OSError, IndexError):
        return owner_in(_read(_path(folder, _generations(folder)[-1])))
    return None


def is_abandoned(folder: Path) -> bool:
    """Whether the newest owner of `folder` is known to be gone: it has released it, or was a process of this machine.
    False if nothing is known: no lease, an owner elsewhere."""
    owner = _newest_owner(folder)
    if owner is None or owner.released:
        return owner is not None
    return bool(owner.machine) and owner.machine == _this_machine() and owner.has_exited(process_state(owner.pid))


class _Watch:
    """Observes the newest lease of a folder until it is known whether its owner is gone."""

    def __init__(self, folder: Path, owner: Owner, expiry_seconds: float, wait_seconds: float) -> None:
        self._folder, self._owner, self._expiry, self._wait = folder, owner, expiry_seconds, wait_seconds
        self._began = time.monotonic()
        self._seen: tuple[int, bytes] | None = None
        self._seen_at = self._began
        self._beats = False

    def is_gone(self, generation: int) -> bool:
        """Whether the owner of this generation is gone; False if unknown yet. Raises OwnershipError if it is alive."""
        try:
            content = _read(_path(self._folder, generation))
        except FileNotFoundError:
            return False  # another start has acquired the folder since: list the generations again
        except OSError:
            content = b""  # not a regular file, or not readable: counts as a lease without heartbeat
        owner, now = owner_in(content), time.monotonic()
        if owner is not None and owner.released:
            return True
        if self._seen != (generation, content):
            self._beats = self._seen is not None and self._seen[0] == generation
            self._seen, self._seen_at = (generation, content), now
        if owner is not None and owner.machine and owner.machine == self._owner.machine:
            if (owner.pid, owner.started) == (self._owner.pid, self._owner.started):
                return True  # within one process the last acquisition wins; the previous one fails when it publishes
            state = process_state(owner.pid)
            if owner.has_exited(state):
                return True
            assert state is not None, "a process that has not exited has a state"
            if now - self._began >= self._wait:
                raise self._refusal(generation, owner, stopped=state[0] in "Tt")
            return False
        if now - self._seen_at >= self._expiry:
            return True
        if self._beats and now - self._began >= self._wait:
            raise self._refusal(generation, owner)
        return False

    def _refusal(self, generation: int, owner: Owner | None, stopped: bool = False) -> OwnershipError:
        name = "an unknown process" if owner is None else str(owner)
        state = ", which is stopped," if stopped else ""
        since = f" since {owner.since}" if owner is not None and owner.since else ""
        kill = f" (kill {owner.pid} on {owner.host})" if owner is not None and owner.has_known_pid else ""
        return OwnershipError(
            f"belongs to a run in progress: {name}{state} owns it{since} (generation {generation})",
            code="folder-in-use", where=f"folder {self._folder}",
            remedy=f"Wait for that run, or end it{kill}, or choose "
                   f"another `--run-dir` and `--checkpoint.dir`. If the folder is a copy, remove "
                   f"{_path(self._folder, generation).name} from it.")

    def describe(self) -> str:
        """One line for the user about what is waited for."""
        owner = self._seen and owner_in(self._seen[1])
        return f"{self._folder} belongs to {owner or 'another process'}: checking whether that is still running"


@dataclass(kw_only=True)
class _Held:
    """A folder that this process owns, and the generation of its lease."""

    folder: Path
    generation: int
    owner: Owner
    count: int = 0

    @property
    def path(self) -> Path:
        return _path(self.folder, self.generation)

    def verify(self) -> None:
        """Raise OwnershipError unless this owner still owns the folder; OSError if the lease cannot be read."""
        try:
            found = owner_in(_read(self.path))
        except FileNotFoundError:
            found = None
        if found is None or found.token != self.owner.token:
            raise self._lost_error()

    def beat(self) -> None:
        """Increment the count in the existing file, which is never created again. Raises as `verify`."""
        self.verify()
        self.count += 1
        self._write(f"{self.count:0{_COUNT_DIGITS}}".encode())

    def release(self) -> None:
        """Mark the folder as released, unless it is lost already."""
        with suppress(OSError, OwnershipError):
            self.verify()
            self._write(heartbeat_content(self.count, Owner(**{**asdict(self.owner), "released": True})))

    def _write(self, content: bytes) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(handle, content, 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _lost_error(self) -> OwnershipError:
        new = _newest_owner(self.folder)
        cause = f"{new} has taken it over" if new is not None and new.token != self.owner.token else \
            f"{self.path.name} is gone from it, or the folder itself"
        return OwnershipError(f"no longer belongs to this run (generation {self.generation}): {cause}",
                              code="folder-lost", where=f"folder {self.folder}",
                              remedy="This run ends, and writes nothing more there. If no other run has taken the "
                                     "folder over, resume with `--resume auto`.")


def _claim(folder: Path, watch: _Watch, owner: Owner, on_wait: Callable[[str], None]) -> _Held:
    while True:
        newest = max(_generations(folder), default=0)
        if newest and not watch.is_gone(newest):
            on_wait(watch.describe())
            time.sleep(_POLL_SECONDS)
            continue
        held = _Held(folder=folder, generation=newest + 1, owner=owner)
        if _LEASE.fullmatch(held.path.name) is None:
            raise OwnershipError("has a lease after which none can come, which no run has written",
                                 code="lease-unknown", where=f"folder {folder}", value=_path(folder, newest).name,
                                 remedy="Remove that file if no run uses the folder.")
        try:
            with new_file(held.path) as file:
                file.write(heartbeat_content(0, owner))
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            continue
        there = _generations(folder)
        if there[-1:] != [held.generation]:  # another start was faster, and has removed the lease that was checked
            held.path.unlink(missing_ok=True)
            continue
        for older in there[:-1]:
            with suppress(OSError):  # a directory of that name is not a lease, and may stay
                _path(folder, older).unlink()
        return held


def check_usable(folders: Sequence[Path], *, tell: Callable[[str], None] = lambda text: None,
                 wait_seconds: float = WAIT_SECONDS) -> None:
    """Refuse early what `Lease.acquire` would refuse: a folder that cannot be written, or that another process of this
    machine owns. Leaves nothing behind, and waits for an owner that may be about to exit, which it reports once. Raises
    the errors of `acquire`."""
    this, reported = Owner.this_process(), False
    for folder in dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders):
        with _writable(folder):
            there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
            with TemporaryFile(dir=there) as file:
                file.write(bytes(_MOST_BYTES))
                file.flush()
            if there != folder:
                continue
            watch = _Watch(folder, this, EXPIRY_SECONDS, wait_seconds)
            while (newest := max(_generations(folder), default=0)) and (
                    _is_owned_here(folder, this) and not watch.is_gone(newest)):
                if not reported:
                    tell(watch.describe())
                reported = True
                time.sleep(_POLL_SECONDS)


def _is_owned_here(folder: Path, this: Owner) -> bool:
    """Whether the newest lease names a process of this machine."""
    owner = _newest_owner(folder)
    return owner is not None and bool(owner.machine) and owner.machine == this.machine


# --- the lease of a run ----------------------------------------------------------------------------------------------


class Lease:
    """Ownership of several folders; a thread sends heartbeats until `release`, or until a folder is lost."""

    def __init__(self, held: Sequence[_Held], heartbeat_seconds: float) -> None:
        self._held = tuple(held)
        self._lost: OwnershipError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=_keep_beating, name="ranvier-lease", daemon=True,
                                        args=(weakref.ref(self), self._stop, heartbeat_seconds))
        self._thread.start()

    @classmethod
    def acquire(cls, folders: Sequence[Path], *, owner: Owner | None = None,
             on_wait: Callable[[str], None] = lambda text: None, heartbeat_seconds: float = HEARTBEAT_SECONDS,
             expiry_seconds: float = EXPIRY_SECONDS, wait_seconds: float = WAIT_SECONDS) -> Lease:
        """Acquire all of `folders` or none; creates missing ones, and waits for an owner that may be about to exit.

        Args:
            owner: the new owner; None for this process.
            on_wait: called ten times a second while waiting, with one line about what is waited for.
            heartbeat_seconds, expiry_seconds, wait_seconds: see the constants of this module.

        Raises OwnershipError if one belongs to another run, CheckpointError if one cannot be written.
        """
        owner, held = owner or Owner.this_process(), []
        try:
            for folder in dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders):
                with _writable(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    held.append(_claim(folder, _Watch(folder, owner, expiry_seconds, wait_seconds), owner, on_wait))
        except BaseException:
            for lease in held:
                lease.release()
            raise
        return cls(held, heartbeat_seconds)

    def check(self) -> None:
        """Raise OwnershipError if a folder is known to be lost. Reads no file, so it is cheap enough for every step."""
        if self._lost is not None:
            raise self._lost

    def verify(self) -> None:
        """Check the lease files themselves; to be called before anything in the folders is renamed or removed.

        Raises OSError if they cannot be read.
        """
        self.check()
        if self._stop.is_set():
            raise OwnershipError("no longer belongs to this run, which has released it", code="folder-released",
                                 where=f"folder {self._held[0].folder}", remedy="Write before the run ends.")
        try:
            for lease in self._held:
                lease.verify()
        except OwnershipError as error:
            self._lost = error
            raise

    def release(self) -> None:
        """Release the folders, so that the next start need not wait. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            for lease in self._held:
                lease.release()

    def _beat(self) -> None:
        for lease in self._held:
            try:
                lease.beat()
            except OwnershipError as error:
                self._lost = error
                return
            except OSError:
                continue  # a full disk or a file server that does not answer: without heartbeat the lease expires


def _keep_beating(lease: weakref.ref[Lease], stop: threading.Event, seconds: float) -> None:
    """Send heartbeats until the lease is released, lost, or garbage-collected."""
    while not stop.wait(seconds):
        held = lease()
        if held is None or held._lost is not None:
            return
        held._beat()
        del held


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", code="lease-not-writable",
                              where=f"folder {folder}",
                              remedy="Choose a folder that this user may write to, on a disk with free space, with "
                                     "`--run-dir` and `--checkpoint.dir`.") from error
