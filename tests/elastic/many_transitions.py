"""For test_elastic_processes: the ranks of a run change their mesh many times, and count what each mesh leaves."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

from ranvier.mesh import Mesh
from tests.elastic.test_transition import Layouts


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def go_round(world, times):
    """Threads, files and bytes of this rank after a few transitions, and after `times` more."""
    meshes = [Mesh(pipe=2), Mesh(data=2), Mesh(), Mesh(data=2)]
    layouts, found = Layouts(world, meshes[0]), []
    for number in range(1, 9 + times):
        layouts.move(meshes[number % len(meshes)])
        if number in (8, 8 + times):
            gc.collect()
            found.append([threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()])
    layouts.close()
    return found
