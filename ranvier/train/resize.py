"""A user's requests for another mesh, from `ranvier resize` and `ranvier join` to the run that they are meant for,
through its folder.

    resize-ID.json   one request; the run takes it away before it reads it (resize.json, written by hand, is one too)
    events.jsonl     the run's one answer: a transition, or a refusal, each with the request's ID ("wish")

The run looks between two steps. Whoever may write to its folder may put anything there: what is no plain file of the
run's own user is refused without being read.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ranvier.elastic.change import MeshRequest
from ranvier.errors import RanvierError
from ranvier.mesh import AXES, REQUIRED_AXES
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import open_regular_file, parse_json
from ranvier.train.logs import read_events

NAME = "resize.json"
_REQUEST = re.compile(r"resize(?:-([0-9a-f]{16}))?\.json")
_MOST_BYTES = 4096
_POLL_SECONDS = 0.1


class ResizeRequests:
    """Those of one run's folder; used on rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir

    def asked(self) -> bool:
        """Whether somebody wants another mesh. Cheap: asked after every step."""
        try:
            return any(_REQUEST.fullmatch(name) for name in os.listdir(self._folder))
        except OSError:
            return False

    def take(self) -> MeshRequest | None:
        """The oldest request, which is then no more; None where there is none. It has whatever its author has given of
        whole numbers, and None for other sizes and those that each request must name (`REQUIRED_AXES`)."""
        for path in self._waiting():
            taken = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
            try:
                os.rename(path, taken)
            except OSError:
                continue  # its author has withdrawn it
            name = _REQUEST.fullmatch(path.name)
            assert name is not None  # `_waiting` lists no other names
            try:
                return _read(taken, name[1])
            finally:
                _remove(taken)
        return None

    def take_all(self) -> list[MeshRequest]:
        """All that are left, for a run that can do nothing about them."""
        found = []
        while (request := self.take()) is not None:
            found.append(request)
        return found

    def _waiting(self) -> list[Path]:
        """The requests, oldest first."""
        found = []
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if _REQUEST.fullmatch(name):
                    with suppress(OSError):
                        found.append((os.lstat(self._folder / name).st_mtime_ns, name))
        return [self._folder / name for _, name in sorted(found)]


def _read(path: Path, wish: str | None) -> MeshRequest:
    try:
        with open_regular_file(path, own=True) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        return MeshRequest(sizes=dict.fromkeys(REQUIRED_AXES), wish=wish,
                           problem=f"cannot be read: {error.strerror or error}")
    found: object = None
    if len(content) <= _MOST_BYTES:
        with suppress(ValueError):
            found = parse_json(content)
    told = found if isinstance(found, dict) else {}
    said = told.get("wish")
    sizes = {name: told[name] if type(told.get(name)) is int and abs(told[name]) < 1 << 40 else None
             for name in (*AXES, "ranks") if name in REQUIRED_AXES or told.get(name) is not None}
    return MeshRequest(ranks=sizes.pop("ranks", None), sizes=sizes, wish=wish or (
        said if isinstance(said, str) and re.fullmatch(r"[\w-]{1,64}", said) else None))


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        path.rmdir()


def ask_and_wait(run_dir: Path, *, seconds: float, **sizes: int | None) -> str:
    """Leave a request in the folder of a run, and wait for the answer. sizes: by axis; None leaves it. RanvierError
    when the run refuses, ends, or says nothing for so long; the request is withdrawn then, if the run has not taken it
    yet."""
    wish = ask(run_dir, **sizes)
    if not seconds:
        mesh = MeshRequest(sizes=_given(sizes), wish=wish)
        return f"asked {run_dir} for {mesh}; its events.jsonl will say what came of it"
    deadline = time.monotonic() + seconds
    while True:
        ended = (run_dir / "summary.json").exists()
        for line in read_events(run_dir).lines:
            if line.get("wish") == wish and line["event"] == "transition":
                return f"step {line['step']}: {line.get('text')}"
            if line.get("wish") == wish:
                raise RanvierError(f"refuses: {line.get('text')}", code="resize-refused", where=f"run {run_dir}",
                                   remedy="Ask for another mesh.")
        if ended or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    if not withdraw(run_dir, wish):
        raise RanvierError("has taken the request, and has not yet said what came of it", code="resize-unanswered",
                           where=f"run {run_dir}", remedy="Look into its events.jsonl, or wait longer with `--wait`.")
    if ended:
        raise RanvierError("has ended", code="resize-ended-run", where=f"run {run_dir}",
                           remedy="Resize runs that are under way.")
    raise RanvierError(f"has not answered within {seconds:g} s", code="resize-late", where=f"run {run_dir}",
                       remedy="Is it under way? Wait longer with `--wait`, for runs with long steps.")


def _given(sizes: Mapping[str, int | None]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size is not None}


def ask(run_dir: Path, **sizes: int | None) -> str:
    """Leave a request in the folder of a run; returns its ID. sizes: by axis; None leaves it. RanvierError where
    there is no such run, or it has ended."""
    if not (run_dir / "run.toml").is_file():
        raise RanvierError("is no run's folder: it has no run.toml", code="not-a-run-folder", where="RUN",
                           value=str(run_dir),
                           remedy="Name the folder that the run has printed as its own (`--run-dir`).")
    if (run_dir / "summary.json").exists():
        raise RanvierError("has ended", code="resize-ended-run", where=f"run {run_dir}",
                           remedy="Resize runs that are under way.")
    wish = new_wish()
    leave(run_dir, wish, _given(sizes))
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
