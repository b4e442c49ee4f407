"""Processes that a test starts: their imports, and how to find them by their command line and environment."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def python_path(folder):
    """PYTHONPATH of a process that also finds packages in `folder`."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def processes_with(path, variable=""):
    """Other processes with `path` on their command line and `variable` ("RANK=1", or "RANK" of any value) in their
    environment."""
    name, equals, value = variable.partition("=")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or its environment cannot be read
            of_path = process.pid != os.getpid() and any(str(path) in word for word in process.cmdline())
            told = process.environ().get(name) if of_path and name else None
            if of_path and (not name or (told == value if equals else told is not None)):
                found.append(process)
    return found
