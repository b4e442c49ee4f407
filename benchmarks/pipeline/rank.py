"""One rank of a contender: a process that trains when the driver says so.

    python -m benchmarks.pipeline.rank PORT PREFIX [RANK]      without RANK if mpiexec numbers the ranks

It sets itself up, runs the warm-up steps, and then sleeps until there is a command in the driver's store. A command is
a number of steps; one more step is run before them and not timed. Losses are read one step late, as training loops do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch.distributed import PrefixStore, TCPStore

from benchmarks.pipeline.contender import Contender, Kind, Place
from benchmarks.pipeline.workload import Stepper, Workload
from ranvier.launch import launchers
from ranvier.system import parent_death

_DAY = timedelta(days=1)


def opener(kind: Kind):
    """The function that sets up a contender of this kind; its module, with its imports, is loaded here."""
    match kind:
        case "plain":
            from benchmarks.pipeline.plain import plain_loop
            return plain_loop
        case "ddp":
            from benchmarks.pipeline.ddp import open_ddp
            return open_ddp
        case "torch":
            from benchmarks.pipeline.torch_schedules import open_torch
            return open_torch
        case "ours":
            from benchmarks.pipeline.ours import open_ours
            return open_ours
        case "times":
            from benchmarks.pipeline.block_times import open_times
            return open_times


def enter(port: int, prefix: str, rank: int | None) -> tuple[PrefixStore, dict, int]:
    """The driver's store for this team, the job in it, and the rank. Pins the rank to its core, and ends it with the
    driver."""
    parent_death.signal_on_parent_death(os.getppid(), signal.SIGKILL)
    control = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, timeout=_DAY))
    job = json.loads(control.get("job"))
    if rank is None:
        rank = launchers.detect(os.environ, "mpiexec").rank
    if job["pin"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    return control, job, rank


def place_of(port: int, prefix: str, rank: int, size: int) -> Place:
    """Place with a second connection: a rank that waits for a command must not block the contender's threads at the
    store."""
    shared = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    return Place(rank=rank, size=size, store=PrefixStore(f"{prefix}/shared", shared))


def main(port: int, prefix: str, rank: int | None) -> None:
    control, job, rank = enter(port, prefix, rank)
    workload, contender = Workload(**job["workload"]), Contender(**job["contender"])
    open_contender = opener(contender.kind)
    load_libraries()
    imports_bytes = psutil.Process().memory_info().rss
    with open_contender(workload, contender, place_of(port, prefix, rank, contender.ranks)) as stepper:
        losses = [stepper.run(number)() for number in range(job["warmup"])]
        control.set(f"ready/{rank}", json.dumps({"losses": losses, "report": stepper.report()}))
        number, command = job["warmup"], 0
        while (steps := json.loads(control.get(f"command/{command}"))) > 0:
            found = timed(stepper, number, steps)
            memory = {"peak_bytes": peak_bytes(), "peak_above_imports_bytes": peak_bytes() - imports_bytes}
            control.set(f"done/{command}/{rank}", json.dumps({**found, **memory}))
            number, command = number + 1 + steps, command + 1


def load_libraries() -> None:
    """Have torch load the modules of its first step (the compiler's alone take 80 MB), so that all contenders start
    from the same memory."""
    layer = torch.nn.Linear(1, 1)
    layer(torch.ones(1, 1)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def timed(stepper: Stepper, number: int, steps: int) -> dict:
    """Run `steps` + 1 steps from `number` on. marks: seconds on the machine's clock after each of them."""
    previous = stepper.run(number)
    stepper.report()
    marks, cpu_started = [time.monotonic()], time.process_time()
    for offset in range(1, steps + 1):
        loss = stepper.run(number + offset)
        previous()
        previous = loss
        marks.append(time.monotonic())
    cpu_seconds = time.process_time() - cpu_started
    return {"marks": marks, "cpu_seconds": cpu_seconds, "last_loss": previous(), "report": stepper.report()}


def peak_bytes() -> int:
    """Peak resident memory so far. Not from getrusage if there is a choice: that starts from the parent's peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
