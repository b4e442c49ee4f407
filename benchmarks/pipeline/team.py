"""The ranks of one contender, as the driver sees them: started, told to run steps, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from torch.distributed import PrefixStore, Store

from benchmarks.pipeline.contender import Contender
from benchmarks.pipeline.workload import Workload
from ranvier.launch.mpiexec import mpiexec_command

ROOT = Path(__file__).parents[2]
ALLOCATORS = {
    "default": {},
    "keep": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
             "MALLOC_TOP_PAD_": str(16 << 20)},
}
"""glibc's settings by name. "keep" gives no memory back to the kernel: fewer page faults, higher peaks."""

_POLL_SECONDS = 0.05


class TeamFailed(RuntimeError):
    """Ranks of a contender that ended or did not answer in time; the text shows what they printed."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where teams run: the store through which they get commands, and the folder for their output."""

    store: Store
    port: int
    folder: Path
    cores: int
    pin: bool = True
    """One rank per core if there are enough cores."""
    allocator: str = "default"
    warmup: int = 3
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some steps of one contender."""

    step_seconds: tuple[float, ...]
    """Seconds per step. For several independent loops: the time per batch of all of them together."""
    cpu_seconds: float
    """CPU seconds per step, all ranks together."""
    peak_bytes: tuple[int, ...]
    peak_above_imports_bytes: tuple[int, ...]
    reports: tuple[dict, ...]

    @property
    def seconds(self) -> float:
        return median(self.step_seconds)


class Team:
    """The processes of one contender."""

    def __init__(self, contender: Contender, workload: Workload, stand: Stand) -> None:
        self.contender, self._stand = contender, stand
        self._prefix = f"team{stand.store.add('teams', 1)}"
        self._store = PrefixStore(self._prefix, stand.store)
        self._commands = 0
        self._store.set("job", json.dumps({"workload": asdict(workload), "contender": asdict(contender),
                                           "warmup": stand.warmup,
                                           "pin": stand.pin and contender.ranks <= stand.cores}))
        self._output = stand.folder / f"{self._prefix}.txt"
        self._children = self._start()
        self._ended = False
        self.losses: tuple[float, ...] = ()
        """Losses of the warm-up steps; () if the contender has none."""
        self.reports: list[dict] = []
        """Report of each rank after the warm-up."""

    program = "benchmarks.pipeline.rank"
    """The module that each rank runs."""

    def _start(self) -> list[subprocess.Popen]:
        environment = {**os.environ, **ALLOCATORS[self._stand.allocator], "OMP_NUM_THREADS": "1",
                       "MKL_NUM_THREADS": "1",
                       "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        command = [sys.executable, "-m", self.program, str(self._stand.port), self._prefix]
        ranks = self.contender.ranks
        commands = ([mpiexec_command(ranks, command)] if self.contender.launch == "mpi"
                    else [[*command, str(rank)] for rank in range(ranks)])
        with open(self._output, "wb") as output:
            return [subprocess.Popen(one, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                     stderr=subprocess.STDOUT) for one in commands]

    def wait_ready(self) -> None:
        """Return when all ranks have done their warm-up steps."""
        answers = self._answers("ready")
        shares = [answer["losses"] for answer in answers if None not in answer["losses"]]
        self.losses = tuple(sum(values) for values in zip(*shares, strict=True))
        self.reports = [answer["report"] for answer in answers]

    def run(self, steps: int) -> Block:
        """Have the team train for `steps` timed steps."""
        answers = self._commanded(steps)
        return Block(step_seconds=step_seconds([answer["marks"] for answer in answers], self.contender.kind == "plain"),
                     cpu_seconds=sum(answer["cpu_seconds"] for answer in answers) / steps,
                     peak_bytes=tuple(answer["peak_bytes"] for answer in answers),
                     peak_above_imports_bytes=tuple(answer["peak_above_imports_bytes"] for answer in answers),
                     reports=tuple(answer["report"] for answer in answers))

    def stop(self) -> None:
        """End the processes, by command if they still answer. Idempotent."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(Exception):
            self._store.set(f"command/{self._commands}", json.dumps(0))
        deadline = time.monotonic() + 30.0
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5.0)
                child.kill()
                child.wait()

    def kill(self) -> None:
        """Kill the processes."""
        for child in self._children:
            child.terminate()
        self.stop()

    def _commanded(self, steps: int) -> list[dict]:
        """Report of each rank on `steps` timed steps."""
        self._store.set(f"command/{self._commands}", json.dumps(steps))
        answers = self._answers(f"done/{self._commands}")
        self._commands += 1
        return answers

    def _answers(self, what: str) -> list[dict]:
        keys = [f"{what}/{rank}" for rank in range(self.contender.ranks)]
        deadline = time.monotonic() + self._stand.timeout_seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline or any(child.poll() is not None for child in self._children):
                why = "has ended" if time.monotonic() <= deadline else "does not answer"
                self.kill()
                raise TeamFailed(f"{self.contender.name} {why}:\n{self._output.read_text(errors='replace')}")
            time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys]


def step_seconds(marks: Sequence[Sequence[float]], independent: bool) -> tuple[float, ...]:
    """Seconds of each step from the ranks' clocks, in seconds, after the step before the first and after each.

    Ranks that work together have done a step when the last of them has. Independent loops each do full steps, so the
    time per step of all together is one over the sum of their rates.
    """
    if independent:
        steps = zip(*([b - a for a, b in pairwise(mine)] for mine in marks), strict=True)
        return tuple(1.0 / sum(1.0 / seconds for seconds in of_all) for of_all in steps)
    ends = [max(of_all) for of_all in zip(*marks, strict=True)]
    return tuple(b - a for a, b in pairwise(ends))
