"""A small disk that can be full or read-only: a tmpfs, which needs root."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType

_SIZE_BYTES = 8 << 20
_BUSY_SECONDS = 5.0


@cache
def can_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with SmallDisk(Path(folder) / "disk"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


class SmallDisk:
    """A tmpfs of 8 MiB at `folder`, inside a `with`; the folder remains afterwards, empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    def __enter__(self) -> SmallDisk:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE_BYTES}", "none", str(self.folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        unmount(self.folder)

    def fill(self, *, leave_bytes: int) -> None:
        """Fill the disk, except for this many bytes."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                pass
            file.truncate(max(0, os.fstat(file.fileno()).st_size - leave_bytes))

    def free(self) -> None:
        self._ballast.unlink()

    def read_only(self, read_only: bool) -> None:
        """Make the disk read-only or writable, as soon as no file is open for writing."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                return _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(self.folder))
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.002)


def unmount(folder: Path) -> None:
    """Unmount a file system at `folder`, if there is one: from a soak that was killed, for example."""
    if os.path.ismount(folder):
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
