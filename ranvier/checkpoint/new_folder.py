"""A folder of results that appears whole, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranvier.checkpoint.files import to_disk
from ranvier.errors import CheckpointError

_SPARE_BYTES = 1 << 20


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder beside `out` to write into. When the block ends well, it is on the disk and has the name `out`; when it
    does not, nothing is left.

    CheckpointError when there is something at `out` that is not an empty folder, when the disk has no `needed_bytes`
    left, and when something cannot be written.
    """
    out = Path(os.path.abspath(out))
    check_free(out)
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(out.parent).free) < needed_bytes + _SPARE_BYTES:
            raise CheckpointError(f"would have {needed_bytes:,} bytes, and the disk has {free:,} left",
                                  code="disk-too-small", where=str(out),
                                  remedy="Free space there, or name a folder on another disk.")
        unfinished.mkdir()
        yield unfinished
        # All of it is on the disk before it gets its name.
        for place, _, names in os.walk(unfinished, topdown=False):
            for name in names:
                to_disk(Path(place, name))
            to_disk(Path(place))
        os.rename(unfinished, out)
        to_disk(out.parent)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", code="output-not-writable",
                              where=str(out),
                              remedy="Free space on that disk, or name a folder that can be written.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_free(out: Path) -> None:
    """CheckpointError unless `out` can become a folder: nothing is there, or an empty folder."""
    try:
        taken = out.is_symlink() or (out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None))
    except OSError as error:
        raise CheckpointError(f"cannot be looked into: {error.strerror or error}", code="output-unreadable",
                              where=str(out), remedy="Name a folder that can be written.") from error
    if taken:
        raise CheckpointError("exists already, and is not an empty folder", code="output-exists", where=str(out),
                              remedy="Name a new folder, or remove that one.")
