"""Starts ranks with the same command under plain python, torchrun, mpiexec and srun.

Under plain python the process becomes the supervisor of local ranks: it runs its own command again as each of them
(ranvier.launch.supervision), and ends with their exit code. Under a launcher it is a rank already. Either way `start`
returns only on ranks, with their `World`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, TextIO

import torch
from torch.distributed import HashStore, PrefixStore, Store

from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.mixed_backend import MixedBackend
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.protocol import Backend
from ranvier.comm.signed_store import SharedStore, clone_store
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.python_names import naming_arguments
from ranvier.config.rules import collectives_problems
from ranvier.config.run import Comm, Launch
from ranvier.errors import ConfigError, LaunchError, RanvierError, counted
from ranvier.launch import failures as failure
from ranvier.launch.cuda_environment import cuda_defaults
from ranvier.launch.devices import choose_devices, exchange, visible_devices
from ranvier.launch.heartbeat import exit_with_launcher, mpi_start_watch
from ranvier.launch.launchers import LAUNCHERS, Setting, Started, detect
from ranvier.launch.mpiexec import mpi_available
from ranvier.launch.shared_store import check_mpi, open_store
from ranvier.mesh import Mesh, mesh_of
from ranvier.system import child
from ranvier.system.machine import address_towards, available_cores, interface_towards, threads_per_rank
from ranvier.system.terminal import open_closed_streams
from ranvier.world import JoinPoint, World

Restart = Callable[[int], tuple[Mesh, Sequence[str]] | None]
"""Receives the number of ranks left after a fault; returns the mesh and command of the next start, None to give up."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value chosen for a setting, and the reason."""

    value: str
    reason: str


def start(mesh: Mesh | None = None, *, data: int = 1, pipe: int = 1, row: int = 1, col: int = 1,
          transport: Literal["auto", "torch", "mpi"] = "auto",
          collectives: Literal["auto", "torch", "mpi"] = "auto", launcher: Setting = "auto",
          threads: int | Literal["auto"] = "auto", device: Literal["auto", "cpu", "cuda"] = "auto",
          timeout_seconds: float = 300.0, rerun: Sequence[str] | None = None, stopped_seconds: float = 5.0,
          hang_seconds: float | Literal["auto"] = "auto", join_address: str | None = None,
          survive_losses: bool = False) -> World:
    """Start the ranks of `mesh` (or of data x pipe x row x col); returns this rank, connected to all others.

    Under plain python with more than one rank this does not return in the calling process: the command is run again as
    each rank, and the process exits with their exit code.

    Args:
        mesh: the mesh; None for one of the axes `data`, `pipe`, `row` and `col`.
        transport: torch (Gloo, NCCL) or mpi; auto takes the faster one that works here.
        collectives: the library of the collectives if the transport is mpi; auto takes NCCL between CUDA devices.
        launcher: what started this process; auto detects it.
        threads: compute threads of each rank; auto divides the cores among local ranks.
        device: auto takes CUDA if each local rank has a device.
        timeout_seconds: limit of the wait for collectives, and for the other ranks at start.
        rerun: the command that starts a rank, under plain python; None for the command line of this process.
        stopped_seconds: a rank that a signal (SIGSTOP) has stopped for this long ends the run; 0 never.
        hang_seconds: an action that runs for longer ends the run; 0 never; auto as in `ranvier.comm.hang`.
        join_address: address of this machine at which ranks may join later (`World.joins`); None lets none join.
        survive_losses: the ranks may continue without a rank that is killed (ranvier.launch.lost_ranks).

    ConfigError if the launcher has started another number of ranks, or a setting cannot work here; LaunchError if ranks
    cannot be started or reached.
    """
    _end_on_errors()
    with naming_arguments("ranvier.start"):
        mesh = mesh_of(mesh, "ranvier.start", data=data, pipe=pipe, row=row, col=col)
        try:
            comm = Comm(transport=transport, collectives=collectives, timeout_seconds=timeout_seconds)
            launch = Launch(launcher=launcher, threads=threads, device=device, stopped_seconds=stopped_seconds,
                            hang_seconds=hang_seconds, join_address=join_address, survive_losses=survive_losses)
        except ConfigError as error:  # it names the section's argument
            where = f"ranvier.start({error.where.partition('(')[2]}"
            raise ConfigError(**(error.texts | {"where": where}), value=error.value) from None
        return start_ranks(mesh, comm, launch, rerun=rerun)


def _end_on_errors() -> bool:
    """Make an error end this process with one line, except at a prompt; returns whether there is a prompt."""
    interactive = hasattr(sys, "ps1")
    if not interactive:
        failure.install_start_error_handlers(None)
    return interactive


def start_ranks(mesh: Mesh, comm: Comm, launch: Launch, *, rerun: Sequence[str] | None = None,
                explain_kill: Callable[[], str] | None = None, saves_on_stop: bool = False,
                restart: Restart | None = None, stream: TextIO | None = None,
                explain_stop: Callable[[], str] | None = None) -> World:
    """`start` with the settings of a run; errors name its flags.

    Args:
        rerun: as for `start`.
        explain_kill: text to print when the kernel has killed a rank.
        saves_on_stop: ranks handle `ranvier.launch.stop.STOP_SIGNALS` themselves, so the supervisor forwards these
            signals and waits instead of ending the ranks.
        restart: how to start again after a failure that a new start may avoid; None for never.
        stream: where rank 0 prints what `auto` stands for; standard output by default.
        explain_stop: text to print when a second signal has ended ranks that save.
    """
    mesh.require_known_axes("the start of ranks")
    open_closed_streams()
    interactive = _end_on_errors()
    started = detect(os.environ, launch.launcher)
    for setting, value in (("join-address", launch.join_address),
                           ("survive-losses", "true" if launch.survive_losses else None)):
        if value is not None:
            _check_membership(f"launch.{setting}", value, started, comm.transport)
            comm = replace(comm, transport="torch")
    if started is None and (mesh.size > 1 or launch.join_address is not None):
        code = _run_local_ranks(mesh, comm.transport, launch, rerun, explain_kill, saves_on_stop, restart, explain_stop)
        failure.flush_or_discard()
        sys.exit(code)
    if started is not None:
        exit_with_launcher(started)
    launched = started is not None
    started = started or Started(launcher="local", rank=0, size=1, local_rank=0, local_size=1)
    if not interactive:
        failure.install_start_error_handlers(started.local_rank)
    try:
        _check_size(mesh, started)
        world = _connect_rank(mesh, started, comm, launch, stream)
        world.launched = launched
    except RanvierError:
        # Only when this process ends, after it has printed the error: torchrun's agent ends it as soon as another rank
        # is gone.
        atexit.register(failure.kill_local_stopped_ranks, started.launcher)
        raise
    if not interactive:
        failure.install_error_handlers(world, launch, timeout_seconds=comm.timeout_seconds)
    return world


def _connect_rank(mesh: Mesh, started: Started, comm: Comm, launch: Launch, stream: TextIO | None) -> World:
    """Set this process up as rank `started`, and connect it."""
    address, seconds, threads = launch.join_address, comm.timeout_seconds, launch.threads
    if started.launcher == "local" and started.size > 1:
        _use_terminals()
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(line_buffering=True)
    os.environ.update(cuda_defaults(os.environ))  # CUDA reads them at its first use, which is below
    with mpi_start_watch(started, seconds, launch.stopped_seconds):
        started, local_rank, local_size = _with_local_rank(started)
        stores = None if started.size == 1 and address is None else open_store(started, seconds)
    torch.set_num_threads(threads_per_rank(local_size) if threads == "auto" else threads)
    place, device, local_ranks = _agree_on_device(started, launch.device, comm.transport if comm.collectives == "auto"
                                                  else f"{comm.transport}, collectives {comm.collectives}", stores)
    transport = choose_transport(comm.transport, started, device.value)
    if place.type == "cuda" and launch.survive_losses:
        raise ConfigError("works on CPUs only: a wait inside NCCL for a lost rank cannot be interrupted",
                          code="survive-losses-on-device", where="launch.survive-losses", value=str(place),
                          remedy="Set `--launch.device cpu`, or use `--max-restarts` instead.")
    if place.type == "cuda":
        torch.cuda.set_device(place)  # code that names no device, also in libraries, must not use device 0
    library = choose_collectives(comm.collectives, transport.value, device.value)
    if address is not None:
        use_interface_towards(address)
    with mpi_start_watch(started, seconds, launch.stopped_seconds) if transport.value == "mpi" else nullcontext():
        backend, store = _connect(started, transport.value, library.value, place, seconds, stores)
    joins = None
    if address is not None and stores is not None:
        assert started.master is not None and started.secret is not None, "our own supervisor gives them"
        joins = JoinPoint(address=started.master[0], port=started.master[1], secret=started.secret)
    world = World(backend=backend, store=store, launcher=started.launcher, device=place, mesh=mesh, joins=joins,
                  local_rank=local_rank, local_size=local_size, local_ranks=local_ranks,
                  torch_store=stores[0] if stores is not None and (launch.survive_losses or joins) else None)
    if isinstance(backend, TorchBackend):
        world.sever = backend.sockets.sever
    if isinstance(backend, TorchBackend | MixedBackend):
        world.overdue, world.lost = backend.waits.overdue, backend.waits.lost_peer
    if started.rank == 0 and started.size > 1:
        _print_choices(world, transport if comm.transport == "auto" else None,
                       device if launch.device == "auto" else None, stream)
    return world


def _agree_on_device(started: Started, setting: str, transport: str, stores: tuple[Store, SharedStore] | None
                     ) -> tuple[torch.device, Choice, tuple[int, ...]]:
    """This rank's device, which all ranks choose together over the store, the reason, and the ranks of its machine; see
    `ranvier.launch.devices`."""
    assert started.local_rank is not None and started.local_size is not None, "they are known by now"
    seen = visible_devices(rank=started.rank, local_rank=started.local_rank, local_size=started.local_size,
                           setting=setting, transport=transport)
    everyone = [seen] if stores is None else exchange(seen, started.size, stores[1])
    local_ranks = tuple(other.rank for other in everyone if other.machine == seen.machine)
    choice = choose_devices(everyone)
    number = choice.devices[started.rank]
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    return device, Choice(value=device.type, reason=choice.reason), local_ranks


def local_devices(setting: str) -> int:
    """The number of ranks for which this machine has devices: CUDA devices if `setting` allows them, else cores.

    setting: auto, cpu or cuda.
    """
    devices = torch.cuda.device_count() if setting != "cpu" and torch.cuda.is_available() else 0
    return devices or available_cores()


def choose_device(setting: str, local_size: int) -> Choice:
    """cpu or cuda, for `setting` and `local_size` ranks on this machine, as seen by one process before ranks start.

    The ranks choose their devices together (`ranvier.launch.devices`).

    ConfigError if CUDA is requested and there are fewer devices than local ranks.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cuda" and devices < local_size:
        raise ConfigError(f"needs a device for each of the {local_size} ranks of this machine, which has {devices}",
                          code="too-few-local-devices", where="launch.device", value=setting,
                          remedy="Start fewer ranks per machine, or set `--launch.device cpu`.")
    if setting != "auto":
        return Choice(value=setting, reason="as set")
    if devices == 0:
        return Choice(value="cpu", reason="no CUDA device found")
    if devices < local_size:
        return Choice(value="cpu", reason=f"{counted(devices, 'CUDA device')} for {counted(local_size, 'rank')}")
    return Choice(value="cuda", reason=f"{counted(devices, 'CUDA device')} found")


def choose_transport(setting: str, started: Started | None, device: str) -> Choice:
    """torch or mpi, for `setting` and a device type. started: this rank; None before our supervisor starts ranks.

    ConfigError if MPI is requested and cannot work: not installed, or a launcher that does not start MPI.
    """
    if started is not None and started.launcher == "local" and started.size > 1:
        return Choice(value="mpi" if started.mpi else "torch", reason=started.reason)
    if setting == "torch":
        return Choice(value="torch", reason="as set")
    # The launcher, if it does not start MPI: each rank's MPI would see only itself.
    without_mpi = started.launcher if started is not None and not started.mpi and started.size > 1 else None
    # Ranks of an mpiexec use MPI; whether mpi4py loads the same MPI is checked when they connect.
    problem = mpi_available() if started is None else None if find_spec("mpi4py") else "mpi4py is not installed"
    if setting == "mpi":
        if without_mpi:
            raise ConfigError(f"cannot work under {without_mpi}: each rank's MPI would see only itself",
                              code="mpi-under-launcher", where="comm.transport", value=setting,
                              remedy="Start the ranks with mpiexec or plain python, or set `--comm.transport torch`.")
        if problem:
            raise ConfigError(f"cannot work here: {problem}", code="mpi-not-usable", where="comm.transport",
                              value=setting,
                              remedy="Install it with pip install 'ranvier[mpi]', or set `--comm.transport torch`.")
        return Choice(value="mpi", reason="as set")
    if device == "cuda":
        return Choice(value="torch", reason="NCCL between CUDA devices")
    if without_mpi:
        return Choice(value="torch", reason=f"{without_mpi} started the ranks: each rank's MPI would see only itself")
    if problem:
        return Choice(value="torch", reason=f"MPI, much faster for small messages, cannot be used: {problem}")
    return Choice(value="mpi", reason="point-to-point 30 to 100 times faster than Gloo for small messages; mpi4py and "
                                      "mpiexec found")


def choose_collectives(setting: str, transport: str, device: str) -> Choice:
    """torch or mpi, for `setting`, the chosen transport and a device type.

    ConfigError if MPI is requested and messages do not use it.
    """
    for problem in collectives_problems(transport, setting):
        raise problem
    if transport == "torch":
        return Choice(value="torch", reason="as the transport")
    if setting != "auto":
        return Choice(value=setting, reason="as set")
    if device == "cuda":
        return Choice(value="torch", reason="NCCL between CUDA devices")
    return Choice(value="mpi", reason="as the transport")


def rerun_command() -> list[str]:
    """The command line of this process, to run it again. LaunchError if there is none (notebook or prompt)."""
    command = list(sys.orig_argv)
    main = sys.modules.get("__main__")
    scripted = getattr(main, "__file__", None) is not None or "-c" in command
    if hasattr(sys, "ps1") or sys.flags.interactive or not scripted or "ipykernel" in sys.modules:
        raise LaunchError("cannot start ranks from a prompt or a notebook: there is no command to run again",
                          code="start-from-prompt", where="launch",
                          remedy="Put the code into a function of the world and call ranvier.run(function, data=..., "
                                 "pipe=...), or put it into a file.")
    if command[1:2] and getattr(main, "__file__", None) == "<stdin>":
        raise LaunchError("cannot start ranks from a program on standard input", code="start-from-standard-input",
                          where="launch", remedy="Put the code into a file and run `python file.py`.")
    return child.python(*command[1:]) if _is_own_program(main) else [sys.executable, *command[1:]]


def _is_own_program(main: ModuleType | None) -> bool:
    """Whether the program is the command `ranvier` rather than a user's program, whose folder is searched for
    modules."""
    spec = getattr(main, "__spec__", None)
    name: str = Path(getattr(main, "__file__", None) or "").stem if spec is None else spec.name.partition(".")[0]
    return name == "ranvier"


def _first_folder() -> Path | None:
    """The folder in which this program was started, which it may have left since; None if that cannot be told."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None) or "", getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # python -m searches that folder first
        root = Path(file).parents[spec.name.count(".")] if file else None
        return root if not sys.flags.safe_path and str(root) == sys.path[0] and os.getcwd() not in sys.path else None
    if spec is not None:  # of a folder or zip file, which is the script
        file = os.path.dirname(file)
    script = next((word for word in (word.removeprefix("./") for word in sys.orig_argv[1:])
                   if f"{os.sep}{file}".endswith(f"{os.sep}{word}")), file)
    return Path(file.removesuffix(script)) if script != file else None


def _run_local_ranks(mesh: Mesh, transport: str, launch: Launch, rerun: Sequence[str] | None,
                     explain_kill: Callable[[], str] | None, saves_on_stop: bool, restart: Restart | None,
                     explain_stop: Callable[[], str] | None = None) -> int:
    """Supervise the ranks, and restart them as `restart` says; returns the exit code."""
    command: Sequence[str] = rerun if rerun is not None else rerun_command()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("can start ranks only from the main thread", code="start-from-thread", where="launch",
                          remedy="Call ranvier.start before starting threads.")
    if rerun is None and (folder := _first_folder()) is not None:
        os.chdir(folder)  # the command is that of a user's program, and its paths are relative to this folder
    from ranvier.launch.supervision import supervise  # not needed on ranks

    chosen = choose_transport(transport, None, choose_device(launch.device, mesh.size).value)
    while True:
        variables = rank_variables(mesh.size, launch.threads, launch.survive_losses)
        outcome = supervise(mesh, chosen.value, chosen.reason, command, variables, explain_kill, saves_on_stop,
                            launch.stopped_seconds, launch.join_address, explain_stop=explain_stop)
        again = restart and outcome.retryable and restart(max(mesh.size - outcome.num_lost, 1))
        if not again:
            return outcome.code
        mesh, command = again


def rank_variables(num_ranks: int, threads: int | Literal["auto"], survive_losses: bool) -> dict[str, str]:
    """Environment variables of each of `num_ranks` ranks on this machine: threads of libraries, and CUDA's.

    survive_losses: silences torch's warnings, each with a C++ stack, about connections that are broken on purpose.
    """
    count = str(threads_per_rank(num_ranks) if threads == "auto" else threads)
    quiet = {_LOG_LEVEL: os.environ.get(_LOG_LEVEL, "ERROR")} if survive_losses else {}
    return dict.fromkeys(_THREAD_VARIABLES, count) | cuda_defaults(os.environ) | quiet


def _check_membership(setting: str, value: str, started: Started | None, transport: str) -> None:
    """ConfigError if ranks cannot join or be lost, as `setting` requests."""
    if transport == "mpi":
        raise ConfigError("needs transport torch: MPI's ranks are those that were started",
                          code="membership-needs-torch", where=setting, value=value, remedy="Leave the transport auto.")
    if started is not None and started.launcher != "local":
        raise ConfigError(f"has no effect under {started.launcher}, whose ranks are those that it has started",
                          code="membership-under-launcher", where=setting, value=value,
                          remedy=f"Start the run under plain python, or leave --{setting} out.")


def use_interface_towards(address: str) -> None:
    """Make Gloo use the interface on the route to `address`, unless the user has named one."""
    name = interface_towards(address)
    if name is not None and _INTERFACE not in os.environ:
        os.environ[_INTERFACE] = name


def _check_size(mesh: Mesh, started: Started) -> None:
    if started.size == mesh.size:
        return
    if started.launcher == "local":  # our own supervisor, which has started as many as its `start` asked for
        raise ConfigError(f"needs {counted(mesh.size, 'rank')} ({mesh}), but another ranvier.start of this program "
                          f"has started {started.size}", code="second-start", where="mesh",
                          remedy="Start once, with as many ranks as any engine of the program needs, and give each "
                                 "engine its mesh of all of them: Engine(mesh=...).")
    nodes = started.size // (started.local_size or started.size) if started.launcher == "torchrun" else 1
    command = "" if mesh.size % nodes else (f", or start the command with {LAUNCHERS[started.launcher].command} "
                                            f"{mesh.size // nodes}{' on each node' if nodes > 1 else ''}")
    raise ConfigError(f"needs {counted(mesh.size, 'rank')} ({mesh}), but {started.launcher} started {started.size}",
                      code="launcher-started-other-number", where="mesh",
                      remedy="Change `--mesh.data` and `--mesh.pipe` so that data x pipe x row x col is "
                             f"{started.size}{command}.")


def _with_local_rank(started: Started) -> tuple[Started, int, int]:
    """`started` with its local rank and size, and these two; they come from MPI if the launcher does not set them."""
    if started.local_rank is not None and started.local_size is not None:
        return started, started.local_rank, started.local_size
    if not started.mpi or find_spec("mpi4py") is None:
        raise LaunchError(f"{started.launcher} does not set the number of ranks on this machine",
                          code="local-size-unknown", where="launch",
                          remedy="Start the ranks with torchrun, or install mpi4py.")
    from mpi4py import MPI

    neighbours = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = neighbours.rank, neighbours.size
    neighbours.Free()
    return replace(started, local_rank=local_rank, local_size=local_size), local_rank, local_size


def _connect(started: Started, transport: str, collectives: str, device: torch.device, timeout_seconds: float,
             stores: tuple[Store, SharedStore] | None) -> tuple[Backend, SharedStore]:
    if stores is None:
        return InProcessWorld(1).backend(0), HashStore()
    torch_store, store = stores
    if transport == "torch":
        return _connect_torch(started, device, timeout_seconds, torch_store), store
    backend = MPIBackend(device, timeout_seconds)
    check_mpi(started, backend.rank, backend.size)
    if collectives == "mpi":
        return backend, store
    return MixedBackend(backend, _connect_torch(started, device, timeout_seconds, torch_store)), store


def _connect_torch(started: Started, device: torch.device, timeout_seconds: float, store: Store) -> TorchBackend:
    try:
        _choose_interface(started, store)
        return TorchBackend(started.rank, started.size, PrefixStore("comm", clone_store(store)), device,
                            timeout_seconds)
    except RuntimeError as error:
        raise LaunchError(f"Gloo cannot connect the ranks: {str(error).partition(chr(10))[0]}",
                          code="gloo-cannot-connect", where="launch", value=os.environ.get(_INTERFACE),
                          remedy=f"Set {_INTERFACE} on each machine to the network interface that reaches the others "
                                 "(ip addr lists them).") from error


def _choose_interface(started: Started, store: Store) -> None:
    """Make Gloo use the interface on the route to rank 0's machine; on that machine, the one on the route to another.

    By default Gloo uses the address of the host's own name, which is often a loopback address (/etc/hosts) that no
    other machine can reach. On rank 0's machine, its name may resolve to such an address, too.
    """
    if started.local_size == started.size or started.master is None:
        return
    address = address_towards(started.master[0])
    store.set(f"address/{started.rank}", address or "")
    if _INTERFACE in os.environ:
        return
    others = (store.get(f"address/{rank}").decode() for rank in range(started.size) if rank != started.rank)
    host = started.master[0] if address else next(filter(None, others), None)
    if host:
        use_interface_towards(host)


def _print_choices(world: World, transport: Choice | None, device: Choice | None, stream: TextIO | None) -> None:
    """Print the values chosen for `auto`."""
    if transport is not None:
        version = ""
        if transport.value == "mpi":
            from mpi4py import MPI

            vendor, numbers = MPI.get_vendor()
            version = f" ({vendor} {'.'.join(map(str, numbers))})"
        print(f"transport {transport.value}{version}: {transport.reason}", file=stream)
    if device is not None:
        print(f"device {device.value}: {device.reason}; threads for each of "
              f"{counted(world.local_size, 'rank')} on {counted(available_cores(), 'core')}: "
              f"{torch.get_num_threads()}", file=stream)


def _use_terminals() -> None:
    """Write to the supervisor's terminals rather than to mpiexec's pipes, so that progress bars are drawn in place."""
    for number in (1, 2):
        path = os.environ.get(f"RANVIER_TERMINAL_{number}")
        if path:
            terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            os.dup2(terminal, number)
            os.close(terminal)
