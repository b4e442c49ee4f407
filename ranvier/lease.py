"""Folders that belong to one run at a time: a lease with a generation, on any file system that the machines share.

    RUN/.owner.7       the lease of generation 7: who holds it, and a count that a thread of the owner raises

    start              the owner of the newest generation is gone?  create .owner.8 exclusively  still the newest?
                       remove the older ones: whoever held them has lost the folder
    before a rename    .owner.8 is there, and is still this owner's?  else OwnershipError
    end                .owner.8 says "released", and stays, so that generations only rise

The generation is a fencing token: a former owner that wakes up later finds its lease gone, and what it was about to
publish is cleared away by the next one. Exclusive creation (O_EXCL) decides between two starts; it works on NFS, where
file locks may not. Whether an owner is gone is never a matter of wall clocks: on the same machine its process tells
(pid and start time), on another one its count, which must stand still while this machine's monotonic clock goes on.
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

from pydantic import TypeAdapter, ValidationError

from ranvier.comm.protocol import Group
from ranvier.errors import CheckpointError, OwnershipError
from ranvier.plain_file import open_plain

BEAT_SECONDS = 2.0
"""Between two counts of an owner."""
STILL_SECONDS = 30.0
"""An owner on another machine whose count stands still for so long is gone."""
PATIENCE_SECONDS = 5.0
"""How long a start waits for an owner that may be about to end."""
_POLL_SECONDS = 0.1
_LEASE = re.compile(r"\.owner\.([1-9][0-9]{0,11})")
_COUNT_DIGITS = 12
_MOST_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process. machine: where its pid means something (boot and pid namespace); "" where the system does not say.
    started: the kernel's start time of the process, which tells it from a later one of the same pid."""

    host: str
    machine: str
    pid: int
    started: str
    since: str = ""
    """When it took the folder, by its own wall clock: for people only."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this lease from all others."""
    released: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        pid, machine = os.getpid(), ""
        with suppress(OSError):
            machine = (Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " "
                       + os.readlink("/proc/self/ns/pid"))
        state = _process(pid)
        return cls(host=socket.gethostname(), machine=machine if state else "", pid=pid,
                   started=state[1] if state else "", since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_owner = TypeAdapter(Owner)


def _process(pid: int) -> tuple[str, str] | None:
    """(state, start time) of a process of this machine; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError, UnicodeDecodeError):
        return None


# --- one folder ------------------------------------------------------------------------------------------------------


def _path(folder: Path, generation: int) -> Path:
    return folder / f".owner.{generation}"


def _generations(folder: Path) -> list[int]:
    """Of the leases that are in `folder`, rising."""
    return sorted(int(match[1]) for name in os.listdir(folder) if (match := _LEASE.fullmatch(name)))


def _content(count: int, owner: Owner) -> bytes:
    return f"{count:0{_COUNT_DIGITS}}\n{json.dumps(asdict(owner))}\n".encode()


def _read(path: Path) -> bytes:
    """What a lease says. FileNotFoundError where it is gone, another OSError where it cannot be read."""
    with open_plain(path, links=False) as file:
        return file.read(_MOST_BYTES)


def _owner_in(content: bytes) -> Owner | None:
    """The owner that a lease names; None where it is damaged, or just being written."""
    try:
        return _owner.validate_json(content.partition(b"\n")[2])
    except ValidationError:
        return None


class _Watch:
    """Looks at one folder's newest lease again and again, until it can be said whether its owner is there."""

    def __init__(self, folder: Path, me: Owner, still_seconds: float, patience_seconds: float) -> None:
        self._folder, self._me, self._still, self._patience = folder, me, still_seconds, patience_seconds
        self._began = time.monotonic()
        self._seen: tuple[int, bytes] | None = None
        self._seen_at = self._began
        self._beats = False

    def gone(self, generation: int) -> bool:
        """Whether nobody holds the lease of this generation any more. OwnershipError where somebody does."""
        try:
            content = _read(_path(self._folder, generation))
        except FileNotFoundError:
            return False  # somebody else has taken the folder since: look again
        except OSError:
            content = b""  # no plain file, or not to be read: it counts like one that stands still
        owner, now = _owner_in(content), time.monotonic()
        if owner is not None and owner.released:
            return True
        if self._seen != (generation, content):
            self._beats = self._seen is not None and self._seen[0] == generation
            self._seen, self._seen_at = (generation, content), now
        if owner is not None and owner.machine and owner.machine == self._me.machine:
            return self._gone_here(generation, owner, now)
        if now - self._seen_at >= self._still:
            return True
        if self._beats and now - self._began >= self._patience:
            raise self._refusal(generation, owner)
        return False

    def _gone_here(self, generation: int, owner: Owner, now: float) -> bool:
        if (owner.pid, owner.started) == (self._me.pid, self._me.started):
            return True  # in one process the last one has the folder; the one before is told when it publishes
        state = _process(owner.pid)
        if state is None or state[0] in "ZX" or state[1] != owner.started:
            return True
        if now - self._began >= self._patience:
            raise self._refusal(generation, owner, stopped=state[0] in "Tt")
        return False

    def _refusal(self, generation: int, owner: Owner | None, stopped: bool = False) -> OwnershipError:
        who = "a process that it does not name" if owner is None else str(owner)
        state = ", which is stopped" if stopped else ""
        since = f" since {owner.since}" if owner is not None and owner.since else ""
        return OwnershipError(
            f"belongs to a run that is under way: {who}{state} has it{since} (generation {generation})",
            where=f"folder {self._folder}",
            remedy=f"Wait for that run or end it{f' (kill {owner.pid} on {owner.host})' if owner else ''}, or choose "
                   f"another --run-dir and --checkpoint.dir. If the folder is a copy, remove "
                   f"{_path(self._folder, generation).name} from it.")

    @property
    def waits_for(self) -> str:
        owner = self._seen and _owner_in(self._seen[1])
        return f"{self._folder} belongs to {owner or 'another process'}: looking whether that is still there"


@dataclass(kw_only=True)
class _Held:
    """One folder, and the generation that this process holds of it."""

    folder: Path
    generation: int
    owner: Owner
    count: int = 0

    @property
    def path(self) -> Path:
        return _path(self.folder, self.generation)

    def verify(self) -> None:
        """OwnershipError unless the folder is still this owner's; OSError where that cannot be seen."""
        try:
            found = _owner_in(_read(self.path))
        except FileNotFoundError:
            found = None
        if found is None or found.token != self.owner.token:
            raise self._lost()

    def beat(self) -> None:
        """Raise the count, in the file that is there: it is never made again. Raises as `verify`."""
        self.verify()
        self.count += 1
        self._write(f"{self.count:0{_COUNT_DIGITS}}".encode())

    def release(self) -> None:
        """Say that the folder is free. What is lost already is left alone."""
        with suppress(OSError, OwnershipError):
            self.verify()
            self._write(_content(self.count, Owner(**{**asdict(self.owner), "released": True})))

    def _write(self, content: bytes) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(handle, content, 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _lost(self) -> OwnershipError:
        new = None
        with suppress(OSError, IndexError):
            newest = _generations(self.folder)[-1]
            new = _owner_in(_read(_path(self.folder, newest)))
        by = f"{new} has taken it over" if new is not None and new.token != self.owner.token else \
            f"{self.path.name} is gone from it, or the folder itself"
        return OwnershipError(f"does not belong to this run any more (generation {self.generation}): {by}",
                              where=f"folder {self.folder}",
                              remedy="This run ends, and publishes nothing more there. If no other run has taken the "
                                     "folder, go on with --resume auto.")


def _claim(folder: Path, watch: _Watch, me: Owner, meanwhile: Callable[[str], None]) -> _Held:
    while True:
        newest = max(_generations(folder), default=0)
        if newest and not watch.gone(newest):
            meanwhile(watch.waits_for)
            time.sleep(_POLL_SECONDS)
            continue
        held = _Held(folder=folder, generation=newest + 1, owner=me)
        try:
            handle = os.open(held.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            os.write(handle, _content(0, me))
            os.fsync(handle)
        finally:
            os.close(handle)
        there = _generations(folder)
        if there[-1:] != [held.generation]:  # somebody was faster, and has removed what this start had looked at
            held.path.unlink(missing_ok=True)
            continue
        for older in there[:-1]:
            with suppress(OSError):  # a folder of that name is nobody's lease, and may stay
                _path(folder, older).unlink()
        return held


# --- the lease of a run ----------------------------------------------------------------------------------------------


class Lease:
    """A hold on folders, all of them or none; a thread keeps it alive until `release`, or until it is lost."""

    def __init__(self, held: Sequence[_Held], beat_seconds: float) -> None:
        self._held = tuple(held)
        self._lost: OwnershipError | None = None
        self._stop = threading.Event()
        threading.Thread(target=_keep_beating, args=(weakref.ref(self), self._stop, beat_seconds),
                         name="ranvier-lease", daemon=True).start()

    @classmethod
    def take(cls, folders: Sequence[Path], *, me: Owner | None = None,
             meanwhile: Callable[[str], None] = lambda text: None, beat_seconds: float = BEAT_SECONDS,
             still_seconds: float = STILL_SECONDS, patience_seconds: float = PATIENCE_SECONDS) -> Lease:
        """Hold `folders`, which are made where they are not there; waits where an owner may be about to end.

        me: who takes them; this process by default. meanwhile: called with what is waited for, ten times a second.
        OwnershipError where one belongs to another run, CheckpointError where one cannot be written.
        """
        me, held = me or Owner.this_process(), []
        try:
            for folder in dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders):
                with _writable(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    held.append(_claim(folder, _Watch(folder, me, still_seconds, patience_seconds), me, meanwhile))
        except BaseException:
            for one in held:
                one.release()
            raise
        return cls(held, beat_seconds)

    @property
    def generations(self) -> tuple[int, ...]:
        """Of the folders, in their order."""
        return tuple(one.generation for one in self._held)

    def check(self) -> None:
        """OwnershipError where a folder was found to be lost. Looks at no file: for every step."""
        if self._lost is not None:
            raise self._lost

    def verify(self) -> None:
        """The same, after a look at the files: before something gets a name there, or goes. OSError where they cannot
        be looked at."""
        self.check()
        if self._stop.is_set():
            raise OwnershipError("does not belong to this run any more: it has released it",
                                 where=f"folder {self._held[0].folder}", remedy="Write before the run has ended.")
        try:
            for one in self._held:
                one.verify()
        except OwnershipError as error:
            self._lost = error
            raise

    def release(self) -> None:
        """Let go of the folders: the next start need not wait. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            for one in self._held:
                one.release()

    def _beat(self) -> None:
        for one in self._held:
            try:
                one.beat()
            except OwnershipError as error:
                self._lost = error
                return
            except OSError:
                continue  # a full disk, a server that does not answer: the count stands still, and others may come


def _keep_beating(lease: weakref.ref[Lease], stop: threading.Event, seconds: float) -> None:
    """Until the lease is released, lost, or forgotten by the program."""
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
        raise CheckpointError(f"cannot be written: {error.strerror or error}", where=f"folder {folder}",
                              remedy="Choose a folder that this user may write to, on a disk with free space, with "
                                     "--run-dir and --checkpoint.dir.") from error


def hold(folders: Sequence[Path], ranks: Group, *, tell: Callable[[str], None] = lambda text: None,
         **times: float) -> Lease | None:
    """Rank 0 takes `folders` for all `ranks`; its lease, None on the others. Collective: where rank 0 cannot have them,
    all raise what `Lease.take` says. tell: takes a line on rank 0 where it must wait."""
    if ranks.index:
        while (outcome := ranks.gather_objects(None)[0]) == "wait":
            pass
        if outcome is not None:
            kind, what, where, remedy = outcome
            raise {"owned": OwnershipError}.get(kind, CheckpointError)(what, where=where, remedy=remedy)
        return None
    told: list[str] = []

    def meanwhile(text: str) -> None:
        ranks.gather_objects("wait")
        if not told:
            told.append(text)
            tell(text)

    try:
        lease = Lease.take(folders, meanwhile=meanwhile, **times)
    except (OwnershipError, CheckpointError) as error:
        kind = "owned" if isinstance(error, OwnershipError) else "unwritable"
        ranks.gather_objects([kind, error.what, error.where, error.remedy])
        raise
    ranks.gather_objects(None)
    return lease
