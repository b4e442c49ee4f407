"""The address at which ranks join a running run: `join.json` in the run's folder, which only the run's user may read.

    {"version": ..., "address": ..., "port": ..., "secret": ...}

Rank 0 writes the file once the run can accept ranks, and removes it when the run ends. After a run was killed the file
stays, and names a port on which nothing, or another program, listens.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from ranvier import __version__
from ranvier.errors import LaunchError, RanvierError
from ranvier.launch.stores import connect_store
from ranvier.system.atomic_file import write_atomically
from ranvier.system.lease import is_abandoned
from ranvier.system.untrusted_file import parse_json, read_bytes
from ranvier.world import JoinPoint

NAME = "join.json"
_MOST_BYTES = 4096
_CONNECT_SECONDS = 10.0


def write_contact(run_dir: Path, point: JoinPoint) -> None:
    """Write `join.json` into the run's folder. OSError if that fails."""
    write_atomically(run_dir / NAME, json.dumps({"version": __version__, **asdict(point)}), private=True)


def remove_contact(run_dir: Path) -> None:
    """Remove `join.json`: the run accepts no more ranks."""
    with suppress(OSError):
        (run_dir / NAME).unlink()


def check_under_way(run_dir: Path) -> None:
    """RanvierError for a folder that is not a run's, and for a run that has ended."""
    if not (run_dir / "run.toml").is_file():
        raise RanvierError("is not a run's folder: it has no run.toml", code="not-a-run-folder", where="RUN",
                           value=str(run_dir),
                           remedy="Name the folder that the run has printed as its own (`--run-dir`).")
    if has_ended(run_dir):
        raise RanvierError("has ended", code="run-has-ended", where=f"run {run_dir}",
                           remedy="Name a run in progress, or continue this one: `ranvier train RUN`.")


def has_ended(run_dir: Path) -> bool:
    """Whether a run is no longer in progress: it is finished, or according to its lease was stopped or killed."""
    return (run_dir / "summary.json").exists() or is_abandoned(run_dir)


def read_contact(run_dir: Path) -> JoinPoint:
    """The join point of a running run. RanvierError for a folder without one, and for a run of another version."""
    check_under_way(run_dir)
    try:
        found: Any = parse_json(read_bytes(run_dir / NAME, _MOST_BYTES, own=True))
        version, contact = found["version"], JoinPoint(address=str(found["address"]), port=int(found["port"]),
                                                     secret=str(found["secret"]))
        if not contact.secret:
            raise ValueError("no secret")
    except FileNotFoundError:
        raise RanvierError(f"takes no ranks: it has no {NAME}", code="run-takes-no-ranks", where=f"run {run_dir}",
                           remedy="Start it with `--launch.join-address`, with torch as the transport and under plain "
                                  "python; it accepts ranks from its first step on.") from None
    except OSError as error:
        raise RanvierError(f"cannot be read: {error.strerror or error}", code="contact-unreadable",
                           where=str(run_dir / NAME), remedy="Join as the user whose run it is.") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RanvierError("is damaged", code="contact-damaged", where=str(run_dir / NAME), value=type(error).__name__,
                           remedy="Stop the run, and start it again with `--resume auto`.") from error
    if version != __version__:
        raise RanvierError(f"runs with version {version} of Ranvier", code="join-other-version", where=f"run {run_dir}",
                           value=__version__, remedy="Install that version here.")
    return contact


def connect(contact: JoinPoint) -> TCPStore:
    """A connection to the run's store; blocking calls have the same time limit as those of the run's own supervisor.
    LaunchError if nothing listens, or if it is not a store."""
    where = f"store of the run at {contact.address}:{contact.port}"
    try:
        socket.create_connection((contact.address, contact.port), timeout=_CONNECT_SECONDS).close()
        return connect_store(contact.address, contact.port, timedelta(seconds=_CONNECT_SECONDS))
    except (OSError, RuntimeError, OverflowError) as error:
        raise LaunchError("cannot be reached", code="run-unreachable", where=where, value=str(error).partition("\n")[0],
                          remedy="If the run was killed, start it again with `--resume auto`. From another machine, "
                                 "`--launch.join-address` must be an address that it reaches.") from error
