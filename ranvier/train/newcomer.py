"""One process that joins a run under way (`ranvier join`): from the run's folder to its place among the ranks.

    folder -> store -> what the run says of itself -> the same data -> request -> call -> connections -> verdict

It takes its settings from the run, and prepares all it can before the run is asked, so that the run waits for nothing
but connections.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.signed_store import SharedStore, signed
from ranvier.config.resolve import ResolvedRun
from ranvier.errors import ConfigError, DataError, LaunchError
from ranvier.launch.contact import connect
from ranvier.launch.devices import claim_device, visible_devices
from ranvier.launch.failures import install_error_handlers, install_start_error_handlers
from ranvier.launch.heartbeat import exit_with_launcher
from ranvier.launch.joining import WISH, Newcomer
from ranvier.launch.launchers import Started
from ranvier.launch.start import use_interface_towards
from ranvier.system.machine import threads_per_rank
from ranvier.train.joining import RUN, RunFacts, read_run
from ranvier.train.peak import PeakRate
from ranvier.train.resize import leave, withdraw
from ranvier.train.setup import fingerprint, prepare_run
from ranvier.world import JoinPoint, World


def join_run(run_dir: Path, started: Started, sizes: Mapping[str, int], *, seconds: float, stream: TextIO
             ) -> tuple[World, RunFacts]:
    """Make this process a rank of the run in `run_dir`; returns it, connected to all others, and the run.

    started: its number among those that join with it. sizes: axes of the mesh that is wanted then. seconds: to wait for
    the run's answer. stream: where the first of them prints.

    RanvierError where the run cannot be reached, has other versions or data, refuses, or says nothing for so long.
    """
    exit_with_launcher(started)
    install_start_error_handlers(started.local_rank)
    assert started.master is not None and started.secret is not None, "our own supervisor gives them"
    point = JoinPoint(address=started.master[0], port=started.master[1], secret=started.secret)
    torch_store, store = signed(connect(point), point.secret)
    said = _said(store, run_dir)
    run = read_run(said, run_dir)
    use_interface_towards(point.address)
    threads = run.launch.threads
    torch.set_num_threads(threads_per_rank(started.size) if threads == "auto" else threads)
    world = World(backend=InProcessWorld(1).backend(0), store=store, launcher="local", local_rank=started.rank,
                  local_size=started.size, device=_device(run.launch.device, started, store), mesh=run.mesh,
                  joins=point, torch_store=torch_store)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        _, data, _ = prepare_run(run, world, nowhere if started.rank else stream)
    if fingerprint(data) != said["data"]:
        raise DataError(f"differs from the run's ({said['data']})", code="join-other-data", where="data",
                        value=fingerprint(data),
                        remedy="Give this machine the same files and versions, or one shared `--data.cache-dir`; start "
                               "the command in the folder in which the run was started.")
    world = _join(world, run_dir, started, sizes, seconds)
    install_error_handlers(world, run.mesh, run.launch, timeout_seconds=run.comm.timeout_seconds)
    if started.rank == 0:
        print(f"joined {run_dir}: rank {world.rank}" + (f" to {world.size - 1}" if started.size > 1 else "")
              + f" of {world.size}", file=stream, flush=True)
    return world, RunFacts(run=run, recipe=said["recipe"], data=data, origin=said["origin"],
                            peak=PeakRate(**said["peak"]))


def run_to_join(contact: JoinPoint, run_dir: Path) -> ResolvedRun:
    """The settings of the run in `run_dir`, for the process that starts those that join it. RanvierError where the run
    cannot be reached, or has another version of torch."""
    return read_run(_said(signed(connect(contact), contact.secret)[1], run_dir), run_dir)


def _said(store: SharedStore, run_dir: Path) -> dict[str, Any]:
    """The facts that the run has published."""
    if not store.check([RUN]):
        raise LaunchError("says nothing of itself in its store", code="join-run-silent", where=f"run {run_dir}",
                          remedy="Join once it has taken its first step.")
    said: dict[str, Any] = json.loads(store.get(RUN))
    own = torch.__version__.partition("+")[0]
    if said["torch"] != own:
        raise LaunchError(f"runs with torch {said['torch']}", code="join-other-torch", where=f"run {run_dir}",
                          value=own, remedy="Install the same version of torch here.")
    return said


def _device(setting: str, started: Started, store: SharedStore) -> torch.device:
    """The device of this process: of the run's kind, and no other rank's."""
    if setting != "cuda":
        return torch.device("cpu")
    seen = visible_devices(rank=started.rank, local_rank=started.rank, local_size=started.size, setting=setting,
                           transport="torch")
    number = claim_device(seen, store)
    if number is None:
        raise ConfigError("needs a device for each rank that joins, beside those of the run's ranks here",
                          code="join-needs-device", where="launch.device", value=f"{len(seen.devices)} visible",
                          remedy="Join with fewer ranks, or from a machine with free devices.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _join(world: World, run_dir: Path, started: Started, sizes: Mapping[str, int], seconds: float) -> World:
    wish = os.environ[WISH]
    newcomer = Newcomer(world, wish, started.rank, started.size)
    newcomer.await_others(seconds)
    if started.rank:
        return newcomer.join(seconds)
    leave(run_dir, wish, {**sizes, "ranks": started.size})
    try:
        return newcomer.join(seconds)
    except BaseException:  # Ctrl-C, too: the run would wait for ranks that are gone
        withdraw(run_dir, wish)
        raise
