"""Detects the launcher that started this process from its environment variables.

    local     our own supervisor (ranvier.launch.supervision), by variables that only it sets
    torchrun  TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE; or the last two alone, if WORLD_SIZE is more than 1, for ranks
              that are started by hand as for torch's env:// rendezvous
    mpiexec   PMI_RANK, PMI_SIZE (MPICH) or OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE (Open MPI)
    srun      SLURM_STEP_ID, SLURM_PROCID: an sbatch script or a salloc shell has only the latter

If launchers are nested, several sets of variables are present. They are accepted if they agree (srun with an MPI
plugin; RANK and WORLD_SIZE that a job script exports), or if one is known to run the other (one torchrun per task of
srun). Anything else is an error that names both: a wrong guess would start a run of the wrong size. Pure: the
environment is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ranvier.errors import ConfigError

SECRET = "RANVIER_SECRET"
"""Environment variable in which our own supervisor, or a job script, passes the run's secret to ranks."""
Launcher = Literal["local", "torchrun", "mpiexec", "srun"]
"""Program that started a rank; "local" is our own supervisor."""
Setting = Literal["auto"] | Launcher
"""Values of launch.launcher."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """One rank, as described by its launcher.

    launcher, rank, size: who started it, its number, and the number of ranks.
    local_rank, local_size: among the ranks of its machine; None if the launcher does not set them (MPI then does).
    master: (host, port) where rank 0 can be reached; None if that must be found through MPI.
    agent_store: whether a store already listens at `master`, so that rank 0 must not host one.
    mpi: whether MPI's ranks are those of the launcher.
    reason: why our own supervisor chose its transport.
    secret: shared by the ranks of this run only; None if the environment has none.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    master: tuple[str, int] | None = None
    agent_store: bool = False
    mpi: bool = False
    reason: str = ""
    secret: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.launcher} says rank {self.rank} of {self.size}"

    @property
    def impossible(self) -> str:
        """The part of the description that is impossible; empty for a possible rank."""
        if self.rank >= self.size:
            return f"rank {self.rank} of {self.size}"
        if self.local_rank is not None and self.local_size is not None and self.local_rank >= self.local_size:
            return f"rank {self.local_rank} of {self.local_size} on this machine"
        return f"port {self.master[1]}" if self.master is not None and not 0 < self.master[1] < 1 << 16 else ""


@dataclass(frozen=True, kw_only=True)
class LauncherForm:
    """Facts about a launcher.

    read: the rank that environment variables describe; None if the launcher has not started this process.
    variables: variables that its ranks have, and shells in between, but not the launcher itself.
    sign: the variables that identify it, in words. process: its process on a rank's machine, in words.
    store_host: the process that hosts the shared store, in words; None if rank 0 hosts it.
    command: starts the number of ranks that follows it, torchrun on each node.
    """

    read: Callable[[Mapping[str, str]], Started | None]
    variables: tuple[str, ...]
    process: str
    store_host: str | None = None
    sign: str = ""
    command: str = ""


def detect(environ: Mapping[str, str], setting: Setting = "auto") -> Started | None:
    """The rank that `environ` describes, or None under plain python.

    ConfigError if two launchers contradict each other, if `setting` names a launcher that did not start this process,
    if a launcher's variables are incomplete, or if the secret is empty.
    """
    started = _detect(environ, setting)
    if started is not None and (impossible := started.impossible):
        raise _refusal("launcher-contradicts", f"is not possible: {started.launcher} says {impossible}", setting,
                       f"Start the command with {started.launcher} itself, or set `--launch.launcher`.")
    secret = environ.get(SECRET)
    if started is not None and secret is not None and not secret.strip():
        raise ConfigError("is empty, so that values of the ranks' store would not be signed", code="secret-empty",
                          where=SECRET, value=secret,
                          remedy=f"Export a random one, such as {SECRET}=$(openssl rand -hex 32), or unset it.")
    return started and replace(started, secret=secret)


def _detect(environ: Mapping[str, str], setting: Setting) -> Started | None:
    ours = _local(environ)
    if ours is not None:
        return ours
    if setting == "local":
        return None
    if setting != "auto":
        started = LAUNCHERS[setting].read(environ)
        if started is None:
            raise _refusal("launcher-absent", f"{setting} did not start this process: {LAUNCHERS[setting].sign} "
                           "is not set", setting,
                           f"Start the command with {setting}, or set `--launch.launcher local`.")
        return started
    mpiexec, srun = _mpiexec(environ), _srun(environ)
    known, exported = srun or mpiexec, (environ.get("RANK"), environ.get("WORLD_SIZE"))
    # A job script may export them for each task, or once for all tasks, which says nothing about this task.
    repeats = known and _AGENT not in environ and (
        "LOCAL_RANK" not in environ or exported == (str(known.rank), str(known.size)))
    torchrun = None if repeats else _torchrun(environ)
    if torchrun and srun and environ.get("GROUP_WORLD_SIZE") == str(srun.size):
        srun = None  # there are as many agents as tasks: each task of srun is one torchrun
    if srun and mpiexec and (srun.rank, srun.size) == (mpiexec.rank, mpiexec.size):
        srun, mpiexec = replace(srun, mpi=True), None
    all_found = [started for started in (torchrun, mpiexec, srun) if started]
    if len(all_found) > 1:
        raise _refusal("launcher-ambiguous", "is ambiguous: " + ", but ".join(map(str, all_found)), "auto",
                       "Set `--launch.launcher` to the one that started the ranks: "
                       + " or ".join(started.launcher for started in all_found) + ".")
    return all_found[0] if all_found else None


def _refusal(code: str, what: str, value: str | None, remedy: str) -> ConfigError:
    return ConfigError(what, code=code, where="launch.launcher", value=value, remedy=remedy)


_AGENT = "TORCHELASTIC_RUN_ID"


def local_variables(rank: int | None, size: int, store: tuple[str, int], transport: str, reason: str
                    ) -> dict[str, str]:
    """Environment variables that our own supervisor sets for a rank; `rank` is None if mpiexec numbers the ranks.

    store: address and port of the shared store. reason: why `transport` was chosen, for rank 0 to print.
    """
    variables = {"RANVIER_LOCAL_SIZE": str(size), "RANVIER_STORE_ADDRESS": store[0],
                 "RANVIER_STORE_PORT": str(store[1]), "RANVIER_TRANSPORT": transport,
                 "RANVIER_TRANSPORT_REASON": reason}
    return variables if rank is None else {**variables, "RANVIER_LOCAL_RANK": str(rank)}


def _local(environ: Mapping[str, str]) -> Started | None:
    if "RANVIER_LOCAL_SIZE" not in environ:
        return None
    size = _number(environ, "RANVIER_LOCAL_SIZE", "our own supervisor")
    mpi = environ.get("RANVIER_TRANSPORT") == "mpi"
    if mpi:
        inner = _mpiexec(environ)
        if inner is None or inner.size != size:
            raise _refusal("mpiexec-rank-count", f"mpiexec should have started {size} ranks, but "
                           f"{inner or 'its variables are missing'}", "local", "Set `--comm.transport torch`.")
        rank = inner.rank
    else:
        rank = _number(environ, "RANVIER_LOCAL_RANK", "our own supervisor")
    return Started(launcher="local", rank=rank, size=size, local_rank=rank, local_size=size, agent_store=True, mpi=mpi,
                   master=(_text(environ, "RANVIER_STORE_ADDRESS", "our own supervisor"),
                           _number(environ, "RANVIER_STORE_PORT", "our own supervisor")),
                   reason=environ.get("RANVIER_TRANSPORT_REASON", ""))


def _torchrun(environ: Mapping[str, str]) -> Started | None:
    if _AGENT not in environ and (environ.get("RANK", "") == "" or environ.get("WORLD_SIZE", "1") in ("", "0", "1")):
        return None
    rank, size, local_rank, local_size, port = (
        _number(environ, name, "torchrun") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                                         "MASTER_PORT"))
    return Started(launcher="torchrun", rank=rank, size=size, local_rank=local_rank, local_size=local_size,
                   master=(_text(environ, "MASTER_ADDR", "torchrun"), port),
                   agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _mpiexec(environ: Mapping[str, str]) -> Started | None:
    mpich, open_mpi = (_mpi(environ, *names) for names in (
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")))
    if mpich and open_mpi and (mpich.rank, mpich.size) != (open_mpi.rank, open_mpi.size):
        raise _refusal("mpi-ambiguous", f"is ambiguous: MPICH's variables say rank {mpich.rank} of {mpich.size}, but "
                       f"Open MPI's say rank {open_mpi.rank} of {open_mpi.size}", "mpiexec",
                       "Start the command with one mpiexec, outside any other.")
    return mpich or open_mpi


def _mpi(environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Started | None:
    if rank not in environ:
        return None
    local = {name: _number(environ, name, "mpiexec") if name in environ else None for name in (local_rank, local_size)}
    return Started(launcher="mpiexec", rank=_number(environ, rank, "mpiexec"), size=_number(environ, size, "mpiexec"),
                   local_rank=local[local_rank], local_size=local[local_size], mpi=True,
                   master=_given_master(environ))


def _srun(environ: Mapping[str, str]) -> Started | None:
    step = environ.get("SLURM_STEP_ID", "")
    if not (step.isascii() and step.isdigit()) or int(step) >= _FIRST_SPECIAL_STEP:
        return None  # an sbatch script or a salloc shell: no srun started this process
    rank = _number(environ, "SLURM_PROCID", "srun")
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", "srun")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts, node = tasks_per_node(per_node), _number(environ, "SLURM_NODEID", "srun", default=0)
    master = _given_master(environ)
    if master is None and hosts:
        job = _number(environ, "SLURM_JOB_ID", "srun", default=0)
        # All ranks must know the port before they can communicate. Steps of one job get different ports, so that two of
        # them can run side by side.
        master = (first_host(hosts), 20_000 + (job * 31 + int(step)) % 40_000)
    return Started(launcher="srun", rank=rank, size=size,
                   local_rank=_number(environ, "SLURM_LOCALID", "srun") if "SLURM_LOCALID" in environ else None,
                   local_size=counts[node] if node < len(counts) else None, master=master,
                   mpi="PMIX_RANK" in environ)


_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's batch, interactive and extern steps have numbers from here on
LAUNCHERS: Mapping[str, LauncherForm] = {
    "local": LauncherForm(read=_local, variables=("RANVIER_LOCAL_SIZE",), process="the command that started it",
                          store_host="the command that started the ranks"),
    "torchrun": LauncherForm(read=_torchrun, variables=(_AGENT,), process="torchrun's agent",
                             store_host="torchrun's agent", sign=f"{_AGENT}, or RANK with a WORLD_SIZE above 1,",
                             command="torchrun --nproc-per-node"),
    "mpiexec": LauncherForm(read=_mpiexec, variables=("PMI_RANK", "OMPI_COMM_WORLD_RANK"), process="mpiexec",
                            sign="PMI_RANK or OMPI_COMM_WORLD_RANK", command="mpiexec -n"),
    "srun": LauncherForm(read=_srun, variables=("SLURM_PROCID",), process="Slurm's step daemon", sign="SLURM_STEP_ID",
                         command="srun --ntasks")}
"""All launchers, by name."""


def _given_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT as set by the user, for launchers that do not set them."""
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", "the environment")
    return None


def _text(environ: Mapping[str, str], name: str, launcher: str) -> str:
    if not environ.get(name):
        raise _refusal("launcher-variable-missing", f"{name} is missing, although other variables of {launcher} are "
                       "set", None, f"Start the command with {launcher} itself, set {name} as well, or ignore the "
                       "variables with `--launch.launcher local`.")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name, launcher)
    if not (text.isascii() and text.isdigit()):
        raise _refusal("launcher-variable-not-number", f"{name} of {launcher} is not a whole number", text,
                       f"Start the command with {launcher} itself, or set `--launch.launcher`.")
    return int(text)


def first_host(nodes: str) -> str:
    """The first host in a Slurm node list: node01 of "node[01-03,7],login". ConfigError if the text is not such a
    list."""
    ranges = r"\d+(?:-\d+)?"
    entry = rf"(?:[\w.\-]|\[{ranges}(?:,{ranges})*\])+"
    found = re.fullmatch(rf"({entry})(?:,{entry})*", nodes, re.ASCII)
    if found is None:
        raise ConfigError("is not a node list", code="node-list", where="SLURM_STEP_NODELIST", value=nodes,
                          remedy="Set MASTER_ADDR and MASTER_PORT to where rank 0 runs.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, from Slurm's notation: "2(x3),1" is 2, 2, 2, 1. Empty if the text is not in that notation."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
