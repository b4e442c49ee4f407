"""The same command under plain python, torchrun, mpiexec and srun: from a process to a started rank.

Under plain python the process becomes the parent of local ranks: it runs its own command again as each of them
(ranvier.supervise), and ends with their exit code. Under a launcher it is a rank already. Either way what returns from
`start` is a rank with a `World`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch.distributed import HashStore, PrefixStore, Store

from ranvier import failure
from ranvier.arguments import of_function
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.mpi_launch import mpi_available
from ranvier.comm.protocol import Backend
from ranvier.comm.signed_store import SignedStore
from ranvier.comm.torch_backend import TorchBackend
from ranvier.errors import ConfigError, LaunchError
from ranvier.launchers import Setting, Started, detect
from ranvier.lifeline import follow_launcher
from ranvier.machine import available_cores, interface_towards, threads_per_rank
from ranvier.mesh import Mesh
from ranvier.shared_store import open_store
from ranvier.world import World

TransportName = Literal["torch", "mpi"]
Restart = Callable[[int], tuple[Mesh, Sequence[str]] | None]
"""From the number of ranks that are left after a fault: the mesh and the command of the next start, or None."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a setting of `auto` came to, and why."""

    value: str
    reason: str


@of_function("ranvier.start")
def start(mesh: Mesh | None = None, *, data: int = 1, pipe: int = 1, row: int = 1, col: int = 1,
          transport: Literal["auto", "torch", "mpi"] = "auto", launcher: Setting = "auto",
          threads: int | Literal["auto"] = "auto", device: Literal["auto", "cpu", "cuda"] = "auto",
          timeout_seconds: float = 300.0, rerun: Sequence[str] | None = None,
          explain_kill: Callable[[], str] | None = None, saves_on_stop: bool = False, stopped_seconds: float = 5.0,
          hang_seconds: float | Literal["auto"] = "auto", restart: Restart | None = None, flags: bool = False) -> World:
    """This rank of `mesh` (or of data x pipe x row x col), connected to all others.

    Under plain python with more than one rank this does not return: the command (`rerun`, by default this process's
    own) is run again as each rank, and the process exits with their code; `explain_kill` adds to what it says of a rank
    that the kernel has killed; with `saves_on_stop` its ranks are told to stop rather than ended, and waited for
    (`ranvier.stop`). Where the ranks end in a way that another start may mend, `restart` says how they start again.
    `timeout_seconds` bounds the wait for messages and for the other ranks at start. A rank that is stopped by a signal
    for `stopped_seconds` ends the run, as does an action that runs for more than `hang_seconds` (ranvier.comm.hang says
    what auto is); 0 lets it be. With `flags` errors name the command's flags, rather than arguments.

    ConfigError when the launcher's ranks are not those of the mesh, or a setting cannot work here; LaunchError when
    ranks cannot be started or reached.
    """
    mesh = mesh or Mesh(data=data, pipe=pipe, row=row, col=col)
    interactive = hasattr(sys, "ps1")  # at a prompt, an error must not end the process
    if not interactive:
        failure.end_on_start_errors(None)
    started = detect(os.environ, launcher)
    if started is None and mesh.size > 1:
        sys.exit(_run_local_ranks(mesh, transport, threads, device, rerun, explain_kill, saves_on_stop,
                                  stopped_seconds, restart))
    if started is not None:
        follow_launcher(started)
    started = started or Started(launcher="local", rank=0, size=1, local_rank=0, local_size=1)
    if not interactive:
        failure.end_on_start_errors(started.local_rank)
    _check_size(mesh, started)
    world = _join(mesh, started, transport, threads, device, timeout_seconds)
    if not interactive:
        failure.end_on_errors(world, mesh, stopped_seconds=stopped_seconds, timeout_seconds=timeout_seconds,
                              hang_seconds=None if hang_seconds == "auto" else hang_seconds)
    return world


def _join(mesh: Mesh, started: Started, transport: str, threads: int | str, device: str, timeout_seconds: float
          ) -> World:
    """Set this process up as the rank that `started` says, and connect it."""
    if started.launcher == "local" and started.size > 1:
        _use_terminals()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    started = _with_local_place(started)
    chosen_device = choose_device(device, started.local_size)
    chosen = choose_transport(transport, started, chosen_device.value)
    torch.set_num_threads(threads_per_rank(started.local_size) if threads == "auto" else threads)
    place = torch.device("cpu") if chosen_device.value == "cpu" else torch.device("cuda", started.local_rank)
    backend, store = _connect(started, chosen.value, place, timeout_seconds)
    world = World(backend=backend, store=store, launcher=started.launcher, device=place, mesh=mesh,
                  local_rank=started.local_rank, local_size=started.local_size)
    if isinstance(backend, TorchBackend):
        world.overdue = backend.waits.overdue
    if started.rank == 0 and started.size > 1:
        _tell(world, chosen if transport == "auto" else None, chosen_device if device == "auto" else None)
    return world


def local_devices(setting: str) -> int:
    """How many ranks this machine has devices for: CUDA devices where it has some and they are not ruled out, else
    cores."""
    devices = torch.cuda.device_count() if setting != "cpu" and torch.cuda.is_available() else 0
    return devices or available_cores()


def choose_device(setting: str, local_size: int) -> Choice:
    """cpu or cuda. ConfigError when CUDA is asked for and the local ranks outnumber the devices."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cuda" and devices < local_size:
        raise ConfigError(f"needs a device for each of the {local_size} ranks of this machine, which has {devices}",
                          where="launch.device", value=setting,
                          remedy="Start fewer ranks per machine, or set --launch.device cpu.")
    if setting != "auto":
        return Choice(value=setting, reason="as set")
    if devices == 0:
        return Choice(value="cpu", reason="no CUDA device found")
    if devices < local_size:
        return Choice(value="cpu", reason=f"{devices} CUDA devices for {local_size} ranks")
    return Choice(value="cuda", reason=f"{devices} CUDA devices found")


def choose_transport(setting: str, started: Started | None, device: str) -> Choice:
    """torch or mpi; `started` is None before our own starter has run.

    ConfigError when MPI is asked for and cannot work: not installed, or a launcher that does not start MPI.
    """
    if started is not None and started.launcher == "local" and started.size > 1:
        return Choice(value="mpi" if started.mpi else "torch", reason=started.reason)
    if setting == "torch":
        return Choice(value="torch", reason="as set")
    alone = started is not None and not started.mpi and started.size > 1
    # Under an mpiexec, what it starts is MPI; whether it is mpi4py's shows when they connect.
    problem = mpi_available() if started is None else None if find_spec("mpi4py") else "mpi4py is not installed"
    if setting == "mpi":
        if alone:
            raise ConfigError(f"cannot work under {started.launcher}: each rank's MPI would see itself alone",
                              where="comm.transport", value=setting,
                              remedy="Start the ranks with mpiexec or plain python, or set --comm.transport torch.")
        if problem:
            raise ConfigError(f"cannot work here: {problem}", where="comm.transport", value=setting,
                              remedy="Install it with pip install 'ranvier[mpi]', or set --comm.transport torch.")
        return Choice(value="mpi", reason="as set")
    if device == "cuda":
        return Choice(value="torch", reason="NCCL between CUDA devices")
    if alone:
        return Choice(value="torch", reason=f"{started.launcher} started the ranks, and MPI would see each alone")
    if problem:
        return Choice(value="torch", reason=f"MPI, many times faster for small messages, cannot be used: {problem}")
    return Choice(value="mpi", reason="point-to-point 30 to 100 times faster than Gloo for small messages; mpi4py and "
                                      "mpiexec found")


def rerun_command() -> list[str]:
    """The command line of this process, to be run again. LaunchError where there is none: a notebook, a prompt."""
    command = list(sys.orig_argv)
    main = sys.modules.get("__main__")
    scripted = getattr(main, "__file__", None) is not None or "-c" in command
    if hasattr(sys, "ps1") or sys.flags.interactive or not scripted or "ipykernel" in sys.modules:
        raise LaunchError("cannot start ranks from a prompt or a notebook: there is no command to run again",
                          where="launch", remedy="Put the code into a file and run `python file.py`, or use a mesh of "
                                                 "one rank here.")
    if command[1:2] and getattr(main, "__file__", None) == "<stdin>":
        raise LaunchError("cannot start ranks from a program on standard input", where="launch",
                          remedy="Put the code into a file and run `python file.py`.")
    return [sys.executable, *command[1:]]


def _run_local_ranks(mesh: Mesh, transport: str, threads: int | str, device: str, rerun: Sequence[str] | None,
                     explain_kill: Callable[[], str] | None, saves_on_stop: bool, stopped_seconds: float,
                     restart: Restart | None) -> int:
    command = list(rerun) if rerun is not None else rerun_command()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("can start ranks from the main thread only", where="launch",
                          remedy="Call ranvier.start before starting threads.")
    from ranvier.supervise import supervise  # the parent's part; ranks never need it

    chosen = choose_transport(transport, None, choose_device(device, mesh.size).value)
    while True:
        count = str(threads_per_rank(mesh.size) if threads == "auto" else threads)
        outcome = supervise(mesh, chosen.value, chosen.reason, command, dict.fromkeys(_THREAD_VARIABLES, count),
                            explain_kill, saves_on_stop, stopped_seconds)
        again = restart and outcome.may_succeed_again and restart(max(mesh.size - outcome.num_lost, 1))
        if not again:
            return outcome.code
        mesh, command = again


def _check_size(mesh: Mesh, started: Started) -> None:
    if started.size == mesh.size:
        return
    how = {"torchrun": f"torchrun --nproc-per-node {mesh.size}", "mpiexec": f"mpiexec -n {mesh.size}",
           "srun": f"srun --ntasks {mesh.size}", "local": "plain python"}[started.launcher]
    raise ConfigError(f"needs {mesh.size} ranks ({mesh}), but {started.launcher} started {started.size}", where="mesh",
                      remedy=f"Start the command with {how}, or change --mesh.data and --mesh.pipe so that "
                             f"data x pipe x row x col is {started.size}.")


def _with_local_place(started: Started) -> Started:
    """`started` with its local rank and size, from MPI where the launcher does not say."""
    if started.local_rank is not None and started.local_size is not None:
        return started
    if not started.mpi or find_spec("mpi4py") is None:
        raise LaunchError(f"{started.launcher} does not say how many ranks share this machine", where="launch",
                          remedy="Start the ranks with torchrun, or install mpi4py.")
    from mpi4py import MPI

    neighbours = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    started = replace(started, local_rank=neighbours.rank, local_size=neighbours.size)
    neighbours.Free()
    return started


def _connect(started: Started, transport: str, device: torch.device, timeout_seconds: float
             ) -> tuple[Backend, Store | SignedStore]:
    if started.size == 1:
        return InProcessWorld(1).backend(0), HashStore()
    if transport == "torch":
        torchs, store = open_store(started, timeout_seconds)
        _choose_interface(started)
        try:
            return TorchBackend(started.rank, started.size, PrefixStore("comm", torchs.clone()), device,
                                timeout_seconds), store
        except RuntimeError as error:
            raise LaunchError(f"Gloo cannot connect the ranks: {str(error).partition(chr(10))[0]}", where="launch",
                              value=os.environ.get(_INTERFACE),
                              remedy=f"Set {_INTERFACE} on each machine to the network interface that reaches the "
                                     "others (ip addr lists them).") from error
    backend = MPIBackend(device, timeout_seconds)
    if (backend.rank, backend.size) != (started.rank, started.size):
        raise LaunchError(f"{started}, but MPI says rank {backend.rank} of {backend.size}: another MPI's launcher "
                          "started the ranks", where="comm.transport", value="mpi",
                          remedy="Use the mpiexec of the MPI library that mpi4py loads, or set --comm.transport torch.")
    return backend, open_store(started, timeout_seconds)[1]


def _choose_interface(started: Started) -> None:
    """Have Gloo use the interface that leads to rank 0's machine. Left to itself it takes the address that the host's
    own name has, which is often a loopback address (/etc/hosts), where no other machine reaches it."""
    if started.local_size == started.size or started.master is None or _INTERFACE in os.environ:
        return
    name = interface_towards(started.master[0])
    if name is not None:
        os.environ[_INTERFACE] = name


def _tell(world: World, transport: Choice | None, device: Choice | None) -> None:
    """What `auto` came to, once."""
    if transport is not None:
        version = f" ({_mpi_version()})" if transport.value == "mpi" else ""
        print(f"transport {transport.value}{version}: {transport.reason}")
    if device is not None:
        print(f"device {device.value}: {device.reason}; {torch.get_num_threads()} threads for each of "
              f"{world.local_size} ranks on {available_cores()} cores")


def _mpi_version() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _use_terminals() -> None:
    """Write to the parent's terminals rather than to mpiexec's pipes, so that progress is drawn in place."""
    for number in (1, 2):
        path = os.environ.get(f"RANVIER_TERMINAL_{number}")
        if path:
            terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            os.dup2(terminal, number)
            os.close(terminal)
