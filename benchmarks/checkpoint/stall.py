"""Cost of a checkpoint for a run: ours against torch.distributed.checkpoint's asynchronous save, in one run.

    python -m benchmarks.checkpoint.stall [--quick] [--folder DIR]

Two ranks on data 2 over Gloo train one model with AdamW, ours by our engine, the peer by DistributedDataParallel. Each
contender's turn is two blocks of the same number of steps: one that begins with an asynchronous save and ends when both
the steps and the save are done, and one without a save. Contenders are processes that stay alive; they take turns,
alternately forwards and backwards through the list, and sleep between their turns.

    stall      how long training is held up, on the rank that waits longest: by the call that begins the save, and
               (where a thread stages) before the next update by what is not staged yet
    cost       additional time of the block with the save: the stall, and cores that the writing takes

Both write all parameters and both moments, each rank its share, to the same folder, flushed to the disk. Ratios are the
peer's over ours, formed within each round: above 1 ours costs less.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory.program import MIB, build_engine, parser, ratios, replica_batch, table
from benchmarks.pipeline.workload import Workload, whole_network
from benchmarks.record import results_file, write_results
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.world import World

FULL = Workload(num_layers=6, hidden=512, vocab=8192, sequence=64, sequences=8, microbatches=4)
QUICK = Workload(num_layers=2, hidden=64, heads=2, vocab=512, sequence=32, sequences=4, microbatches=4)
CONTENDERS = ("ours", "DCP", "DCP, staged by a thread")
RANKS = 2
_TIMEOUT = timedelta(seconds=300)

Step = Callable[[int], float]
"""Training step `number`; returns the seconds that it waited for a copy before its update."""
Save = Callable[[Path], Callable[[], None]]
"""Begins a save; returns a function that waits until the save is on the disk."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One block on one rank, in seconds."""

    seconds: float
    stall_seconds: float = 0.0


@contextmanager
def open_ours(workload: Workload, rank: int, store: dist.Store) -> Iterator[tuple[Step, Save]]:
    device = torch.device("cpu")
    backend = TorchBackend(rank, RANKS, store, device, _TIMEOUT.total_seconds())
    world = World(backend=backend, store=store, launcher="benchmark", device=device, local_rank=rank, local_size=RANKS)
    engine = build_engine(workload, world, Mesh(data=RANKS), Optim())
    opened: dict[Path, Checkpoints] = {}

    def step(number: int) -> float:
        result = engine.train_batch(replica_batch(workload, engine, number))
        engine.timeline.take()
        _ = result.loss
        return 0.0

    def save(folder: Path) -> Callable[[], None]:
        checkpoints = opened.get(folder) or opened.setdefault(folder, Checkpoints(engine, folder, keep=1))
        checkpoints.save()

        def wait() -> None:
            for written in checkpoints.wait():
                assert written.error is None, written.error

        return wait

    yield step, save
    engine.close()
    backend.close()


@contextmanager
def open_torch(workload: Workload, rank: int, store: dist.Store, *, thread: bool) -> Iterator[tuple[Step, Save]]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    saving = dist.new_group(backend="gloo")  # a separate group, as the peer's documentation asks for
    model = workload.model()
    network = DistributedDataParallel(whole_network(workload, model), gradient_as_bucket_view=True)
    optimizer = workload.optimizer(network.parameters())
    share, pieces = workload.sequences // RANKS, workload.microbatches // RANKS
    stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=True,
                                          use_non_blocking_copy=False)) if thread else None
    staging: list[Future] = []

    def step(number: int) -> float:
        inputs, targets = (tensor[rank * share:(rank + 1) * share] for tensor in workload.batch(number))
        optimizer.zero_grad()
        for piece, (part, wanted) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
            with network.no_sync() if piece < pieces - 1 else nullcontext():
                total, _ = model.loss(network(part), wanted)
                (total * (RANKS / workload.tokens_per_step)).backward()
        began = time.monotonic()
        while staging:
            staging.pop().result()
        waited = time.monotonic() - began
        optimizer.step()
        return waited

    def save(folder: Path) -> Callable[[], None]:
        parameters, moments = get_state_dict(network, optimizer)
        response = dcp.async_save({"model": parameters, "optimizer": moments}, process_group=saving,
                                  storage_writer=dcp.FileSystemWriter(folder), async_stager=stager)
        if thread:
            staging.append(response.staging_completion)
            return lambda: response.upload_completion.result() and None
        return lambda: response.result() and None

    yield step, save
    dist.destroy_process_group()


def serve(commands: Connection, workload: Workload, contender: str, rank: int, port: int, folder: Path) -> None:
    """Process of one rank: runs blocks of steps, with or without a save, until the driver ends it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # each save replaces the previous one
    store = dist.PrefixStore(contender, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))
    opened = open_ours(workload, rank, store) if contender == "ours" else open_torch(
        workload, rank, store, thread=contender != "DCP")
    with opened as (step, save):
        number = 0
        commands.send("ready")
        while (command := commands.recv()) is not None:
            steps, saves = command
            step(number)  # wakes up threads that slept
            began, stall, wait = time.monotonic(), 0.0, None
            if saves:
                wait = save(folder)
                stall = time.monotonic() - began
            stall += sum(step(following) for following in range(number + 1, number + 1 + steps))
            if wait is not None:
                wait()
            number += 1 + steps
            commands.send(Turn(seconds=time.monotonic() - began, stall_seconds=stall))


class Team:
    """The ranks of one contender."""

    def __init__(self, context, workload: Workload, contender: str, port: int, folder: Path) -> None:
        self.folder = folder
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, workload, contender, rank, port, folder), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()

    def turn(self, steps: int, *, saves: bool) -> Turn:
        """The block of its slowest rank."""
        for pipe in self._pipes:
            pipe.send((steps, saves))
        turns = self._answers()
        return Turn(seconds=max(turn.seconds for turn in turns),
                    stall_seconds=max(turn.stall_seconds for turn in turns))

    def _answers(self) -> list:
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that has failed has printed the reason
                pipe.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(workload: Workload, rounds: int, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Contender -> stalls and costs in seconds, one per round, seconds of a step, and bytes of a checkpoint."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    teams = {name: Team(context, workload, name, store.port, folder / name.replace(" ", "-"))
             for name in CONTENDERS}
    found: dict[str, dict[str, Any]] = {name: {"stall_seconds": [], "cost_seconds": [], "step_seconds": []}
                                           for name in CONTENDERS}
    try:
        for name in CONTENDERS:
            teams[name].turn(2, saves=True)
        for number in range(rounds):
            for name in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
                first = number % 4 < 2
                with_it, without = (teams[name].turn(steps, saves=saves) for saves in (first, not first))
                if not first:
                    with_it, without = without, with_it
                found[name]["stall_seconds"].append(with_it.stall_seconds)
                found[name]["cost_seconds"].append(with_it.seconds - without.seconds)
                found[name]["step_seconds"].append(without.seconds / steps)
        for name in CONTENDERS:
            found[name]["bytes"] = folder_bytes(teams[name].folder)
    finally:
        for team in teams.values():
            team.end()
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, help="where checkpoints are written; by default a temporary folder")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--steps", type=int, default=12, help="of a block, in which the save has room to end")
    options = made.parse_args()
    workload, rounds, steps = (QUICK, 2, 2) if options.quick else (FULL, options.rounds, options.steps)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        found = run(workload, rounds, steps, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    ours, rows = found["ours"], []
    for name, one in found.items():
        block = [steps * seconds for seconds in one["step_seconds"]]
        rows.append([name, f"{one['bytes'] / MIB:.0f}", f"{1e3 * median(one['stall_seconds']):.0f}",
                     f"{1e3 * median(one['cost_seconds']):.0f}",
                     f"{median(cost / whole for cost, whole in zip(one['cost_seconds'], block, strict=True)):.1%}",
                     f"{1e3 * median(one['step_seconds']):.0f}",
                     str(ratios(one["stall_seconds"], ours["stall_seconds"]))])
    print(table(["contender", "MiB", "stall ms", "cost ms", f"of {steps} steps", "step ms", "stall over ours"], rows))
    path = options.output or results_file("checkpoint", "stall", quick=options.quick)
    write_results(path, {"workload": vars(workload), "rounds": rounds, "steps": steps, "contenders": found})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
