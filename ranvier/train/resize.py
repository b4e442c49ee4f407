"""Requests for another mesh: a user makes them (`ranvier resize`, `ranvier join`), the run takes and answers them.

    resize-ID.json   one request; the run moves the file away before reading it (a hand-written resize.json works too)
    events.jsonl     the run's one answer: a transition, or a refusal, each with the request's ID ("request_id")

The run looks for requests between steps. `ranvier.train.joining` chooses the mesh after ranks have joined. Anyone with
write access can put anything into the folder: only a regular file of the run's own user is read, all else is refused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from ranvier.comm.protocol import Group
from ranvier.elastic.change import MeshRequest
from ranvier.errors import RanvierError
from ranvier.launch.contact import check_under_way, has_ended
from ranvier.launch.joining import give_verdict
from ranvier.mesh import AXES, REQUIRED_AXES
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import parse_json, read_bytes
from ranvier.train.events import NoteEvent
from ranvier.train.logs import read_events
from ranvier.world import World

NAME = "resize.json"
_REQUEST = re.compile(r"resize(?:-([0-9a-f]{16}))?\.json")
_MOST_BYTES = 4096
_POLL_SECONDS = 0.1


class Requests:
    """Resize requests of one run, on one rank. run_dir: the run's folder, where requests arrive, on rank 0; None on
    other ranks."""

    def __init__(self, world: World, run_dir: Path | None) -> None:
        self._world, self._folder = world, run_dir
        self.current: MeshRequest | None = None
        """The request being handled, until it is fulfilled or refused."""
        self._again: MeshRequest | None = None

    def are_waiting(self) -> bool:
        """Whether there is a request to take. Cheap: called after every step."""
        return self._again is not None or (self._folder is not None and is_waiting(self._folder))

    def take(self, ranks: Group) -> MeshRequest | None:
        """Take the oldest request, which becomes the current one; None if there is none. Collective over the ranks of
        the mesh, and the same on all of them."""
        request, self._again = self._again or (self._folder and take_oldest(self._folder)), None
        found = ranks.gather_objects(request and asdict(request))[0]
        self.current = found and MeshRequest(**found)
        return self.current

    def refuse_all(self, step: int, why: str) -> list[NoteEvent]:
        """Refuse each request that this run can no longer handle; returns the notes, none on ranks other than 0."""
        found = []
        while self._folder is not None and (request := take_oldest(self._folder)) is not None:
            found.append(self._refusal(request, step, why))
        return found

    def after_loss(self, step: int) -> NoteEvent | None:
        """On rank 0: the answer to the current request, which a lost rank has interrupted; None if none is due. If
        ranks of the request have joined nevertheless, the run takes it again, for the mesh of the remaining ranks."""
        request = self.current
        if request is None:
            return None
        is_here = any(name.startswith(f"{request.request_id}/") for name in self._world.members)
        if is_here:
            self._again = replace(request, has_joined=True)
        if request.has_joined:
            return None
        return (join_note(request, step, self._world.size, None) if is_here
                else self._refusal(request, step, "a rank of the run was lost meanwhile"))

    def _refusal(self, request: MeshRequest, step: int, why: str) -> NoteEvent:
        """Refuse a request, and notify the ranks that want to join."""
        if request.ranks and request.request_id:
            give_verdict(self._world.store, request.request_id, why)
        return NoteEvent(step=step, event="resize-refused",
                         text=f"resize request for {request} refused: {why}", fields=request.fields())


def join_note(request: MeshRequest, step: int, size: int, problem: str | None) -> NoteEvent:
    """The note about ranks that have joined, or why they are refused. size: present number of ranks of the run."""
    fields = {"request_id": request.request_id, "ranks": request.ranks}
    if problem is not None:
        return NoteEvent(step=step, event="join-refused", fields=fields,
                         text=f"ranks that wanted to join are refused: {problem}")
    newcomers = "1 rank has" if request.ranks == 1 else f"{request.ranks} ranks have"
    return NoteEvent(step=step, event="joined", fields=fields, text=f"{newcomers} joined: the run has {size}")


def is_waiting(folder: Path) -> bool:
    """Whether there is a request in a run's folder. Cheap."""
    try:
        return any(_REQUEST.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def take_oldest(folder: Path) -> MeshRequest | None:
    """Remove and return the oldest request in a run's folder; None if there is none. It has the sizes that are
    integers, and None for other values and for missing required axes (`REQUIRED_AXES`)."""
    waiting = []
    with suppress(OSError):
        for name in os.listdir(folder):
            if _REQUEST.fullmatch(name):
                with suppress(OSError):
                    waiting.append((os.lstat(folder / name).st_mtime_ns, name))
    for _, name in sorted(waiting):
        taken = folder / f".{name}.{secrets.token_hex(6)}"
        try:
            os.rename(folder / name, taken)
        except OSError:
            continue  # its author has withdrawn it
        found = _REQUEST.fullmatch(name)
        assert found is not None  # no other names wait
        try:
            return _read(taken, found[1])
        finally:
            with suppress(OSError):
                taken.unlink()
            with suppress(OSError):
                taken.rmdir()
    return None


def _read(path: Path, request_id: str | None) -> MeshRequest:
    found: object = None
    try:
        with suppress(ValueError):
            found = parse_json(read_bytes(path, _MOST_BYTES, own=True))
    except OSError as error:
        return MeshRequest(sizes=dict.fromkeys(REQUIRED_AXES), request_id=request_id,
                           problem=f"cannot be read: {error.strerror or error}")
    document = found if isinstance(found, dict) else {}
    said = document.get("request_id")
    sizes = {name: document[name] if type(document.get(name)) is int and abs(document[name]) < 1 << 40 else None
             for name in (*AXES, "ranks") if name in REQUIRED_AXES or document.get(name) is not None}
    return MeshRequest(ranks=sizes.pop("ranks", None), sizes=sizes, request_id=request_id or (
        said if isinstance(said, str) and re.fullmatch(r"[\w-]{1,64}", said) else None))


def ask_and_wait(run_dir: Path, *, seconds: float, **sizes: int | None) -> str:
    """Leave a request in the folder of a run, and wait for the answer. sizes: by axis; None keeps the size.
    RanvierError if the run refuses, ends, or does not answer within `seconds`; the request is then withdrawn, as at
    Ctrl-C, if the run has not taken it yet."""
    request_id = ask(run_dir, **sizes)
    if not seconds:
        mesh = MeshRequest(sizes=_given_sizes(sizes), request_id=request_id)
        return f"asked {run_dir} for {mesh}; its events.jsonl will say what came of it"
    deadline = time.monotonic() + seconds
    while True:
        ended = has_ended(run_dir)
        for line in read_events(run_dir).lines:
            if line.get("request_id") == request_id and line["event"] == "transition":
                return f"step {line['step']}: {line.get('text')}"
            if line.get("request_id") == request_id:
                raise RanvierError(f"refuses: {line.get('text')}", code="resize-refused", where=f"run {run_dir}",
                                   remedy="Ask for another mesh.")
        if ended or time.monotonic() >= deadline:
            break
        try:
            time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            withdraw(run_dir, request_id)
            raise
    if not withdraw(run_dir, request_id):
        raise RanvierError("has accepted the request, but has not reported the result yet", code="resize-unanswered",
                           where=f"run {run_dir}", remedy="Look into its events.jsonl, or wait longer with `--wait`.")
    if ended:
        check_under_way(run_dir)
    raise RanvierError(f"has not answered within {seconds:g} s", code="resize-late", where=f"run {run_dir}",
                       remedy="Check that it is running; for runs with long steps, wait longer with `--wait`.")


def _given_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size is not None}


def ask(run_dir: Path, **sizes: int | None) -> str:
    """Leave a request in the folder of a run; returns its ID. sizes: by axis; None keeps the size. RanvierError if
    there is no such run, or it has ended."""
    check_under_way(run_dir)
    request_id = new_request_id()
    write_request(run_dir, request_id, _given_sizes(sizes))
    return request_id


def new_request_id() -> str:
    """An ID for a request."""
    return secrets.token_hex(8)


def write_request(run_dir: Path, request_id: str, sizes: Mapping[str, int]) -> None:
    """Leave a request in the folder of a run. sizes: of axes, and "ranks" for ranks that wait to join. RanvierError if
    the folder cannot be written."""
    path = _path(run_dir, request_id)
    try:
        write_atomically(path, json.dumps({**sizes, "request_id": request_id}))
    except OSError as error:
        raise RanvierError(f"cannot be written: {error.strerror or error}", code="resize-not-writable", where=str(path),
                           remedy="Ask as the user whose run it is.") from error


def withdraw(run_dir: Path, request_id: str) -> bool:
    """Withdraw a request; returns whether the run had not taken it yet."""
    try:
        _path(run_dir, request_id).unlink()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _path(run_dir: Path, request_id: str) -> Path:
    return run_dir / f"resize-{request_id}.json"
