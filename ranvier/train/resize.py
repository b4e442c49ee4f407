"""Requests for another mesh: a user leaves them (`ranvier resize`, `ranvier join`), the run takes and answers them.

    resize-ID.json   one request; the run takes it away before it reads it (resize.json, written by hand, is one too)
    events.jsonl     the run's one answer: a transition, or a refusal, each with the request's ID ("wish")

The run looks between two steps. Which mesh ranks that join lead to says `ranvier.train.joining`. Whoever may write to
the folder may put anything there: what is not a plain file of the run's own user is refused without being read.
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
    """Resize requests of one run, on one rank. run_dir: the run's folder, on rank 0, where its requests come in; None
    on other ranks."""

    def __init__(self, world: World, run_dir: Path | None) -> None:
        self._world, self._folder = world, run_dir
        self.current: MeshRequest | None = None
        """The request being handled, until it is fulfilled or refused."""
        self._again: MeshRequest | None = None

    def are_waiting(self) -> bool:
        """Whether there is one to take. Cheap: asked after every step."""
        return self._again is not None or (self._folder is not None and is_waiting(self._folder))

    def take(self, ranks: Group) -> MeshRequest | None:
        """The oldest, which is the current one from now on; None where there is none. Collective over the ranks of the
        mesh, and the same on all of them."""
        request, self._again = self._again or (self._folder and take_oldest(self._folder)), None
        found = ranks.gather_objects(request and asdict(request))[0]
        self.current = found and MeshRequest(**found)
        return self.current

    def refuse_all(self, step: int, why: str) -> list[NoteEvent]:
        """One answer to each request that this run cannot look at any more; none on other ranks than 0."""
        found = []
        while self._folder is not None and (request := take_oldest(self._folder)) is not None:
            found.append(self._refusal(request, step, why))
        return found

    def after_loss(self, step: int) -> NoteEvent | None:
        """On rank 0: the answer to the current request, which a loss has interrupted; None if none is due. Where ranks
        of it have joined all the same, the run takes it again, for the mesh of those that are left."""
        request = self.current
        if request is None:
            return None
        is_here = any(name.startswith(f"{request.wish}/") for name in self._world.members)
        if is_here:
            self._again = replace(request, has_joined=True)
        if request.has_joined:
            return None
        return (join_note(request, step, self._world.size, None) if is_here
                else self._refusal(request, step, "a rank of the run was lost meanwhile"))

    def _refusal(self, request: MeshRequest, step: int, why: str) -> NoteEvent:
        """Ranks that want to join hear of it, too."""
        if request.ranks and request.wish:
            give_verdict(self._world.store, request.wish, why)
        return NoteEvent(step=step, event="resize-refused",
                         text=f"resize request for {request} refused: {why}", fields=request.fields())


def join_note(request: MeshRequest, step: int, size: int, problem: str | None) -> NoteEvent:
    """The note about ranks that have joined, or why they are refused. size: ranks of the run now."""
    fields = {"wish": request.wish, "ranks": request.ranks}
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
    """The oldest request in a run's folder, which is then no more; None where there is none. It has whatever its author
    has given of whole numbers, and None for other sizes and those that each request must name (`REQUIRED_AXES`)."""
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


def _read(path: Path, wish: str | None) -> MeshRequest:
    found: object = None
    try:
        with suppress(ValueError):
            found = parse_json(read_bytes(path, _MOST_BYTES, own=True))
    except OSError as error:
        return MeshRequest(sizes=dict.fromkeys(REQUIRED_AXES), wish=wish,
                           problem=f"cannot be read: {error.strerror or error}")
    document = found if isinstance(found, dict) else {}
    said = document.get("wish")
    sizes = {name: document[name] if type(document.get(name)) is int and abs(document[name]) < 1 << 40 else None
             for name in (*AXES, "ranks") if name in REQUIRED_AXES or document.get(name) is not None}
    return MeshRequest(ranks=sizes.pop("ranks", None), sizes=sizes, wish=wish or (
        said if isinstance(said, str) and re.fullmatch(r"[\w-]{1,64}", said) else None))


def ask_and_wait(run_dir: Path, *, seconds: float, **sizes: int | None) -> str:
    """Leave a request in the folder of a run, and wait for the answer. sizes: by axis; None leaves it. RanvierError
    when the run refuses, ends, or says nothing for so long; the request is withdrawn then, and at Ctrl-C, if the run
    has not taken it yet."""
    wish = ask(run_dir, **sizes)
    if not seconds:
        mesh = MeshRequest(sizes=_given_sizes(sizes), wish=wish)
        return f"asked {run_dir} for {mesh}; its events.jsonl will say what came of it"
    deadline = time.monotonic() + seconds
    while True:
        ended = has_ended(run_dir)
        for line in read_events(run_dir).lines:
            if line.get("wish") == wish and line["event"] == "transition":
                return f"step {line['step']}: {line.get('text')}"
            if line.get("wish") == wish:
                raise RanvierError(f"refuses: {line.get('text')}", code="resize-refused", where=f"run {run_dir}",
                                   remedy="Ask for another mesh.")
        if ended or time.monotonic() >= deadline:
            break
        try:
            time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            withdraw(run_dir, wish)
            raise
    if not withdraw(run_dir, wish):
        raise RanvierError("has accepted the request, but has not reported the result yet", code="resize-unanswered",
                           where=f"run {run_dir}", remedy="Look into its events.jsonl, or wait longer with `--wait`.")
    if ended:
        check_under_way(run_dir)
    raise RanvierError(f"has not answered within {seconds:g} s", code="resize-late", where=f"run {run_dir}",
                       remedy="Check that it is running; for runs with long steps, wait longer with `--wait`.")


def _given_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size is not None}


def ask(run_dir: Path, **sizes: int | None) -> str:
    """Leave a request in the folder of a run; returns its ID. sizes: by axis; None leaves it. RanvierError where
    there is no such run, or it has ended."""
    check_under_way(run_dir)
    wish = new_wish()
    leave(run_dir, wish, _given_sizes(sizes))
    return wish


def new_wish() -> str:
    """An ID for a request."""
    return secrets.token_hex(8)


def leave(run_dir: Path, wish: str, sizes: Mapping[str, int]) -> None:
    """Leave a request in the folder of a run. sizes: of axes, and "ranks" for ranks that wait to join. RanvierError
    where nothing can be written there."""
    path = _path(run_dir, wish)
    try:
        write_atomically(path, json.dumps({**sizes, "wish": wish}))
    except OSError as error:
        raise RanvierError(f"cannot be written: {error.strerror or error}", code="resize-not-writable", where=str(path),
                           remedy="Ask as the user whose run it is.") from error


def withdraw(run_dir: Path, wish: str) -> bool:
    """Take a request back; whether the run had not taken it yet."""
    try:
        _path(run_dir, wish).unlink()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _path(run_dir: Path, wish: str) -> Path:
    return run_dir / f"resize-{wish}.json"
