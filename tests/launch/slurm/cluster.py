"""A Slurm cluster of two nodes on this machine, from Debian's packages, for as long as a `with` block lasts.

    apt-get install slurmctld slurmd slurm-client munge
    python -m tests.launch.slurm.cluster            # a shell in which sbatch, squeue and the others reach the cluster

Everything (keys, sockets, state, logs) is in one temporary folder. The nodes claim 16 processors each,
whatever the machine has. Partitions: `low`, whose jobs are preempted (SIGTERM, 30 seconds of grace, back into the
queue), and `high`, which preempts. Needs root, since the daemons start processes for users.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare")
NODES = ("n1", "n2")
_GRACE_SECONDS = 30
_REQUEUE_SECONDS = 5
"""Delay before a job that went back into the queue may start; Slurm's default is 120."""


def missing() -> str:
    """Why a cluster cannot be started here; empty if it can."""
    absent = [name for name in PROGRAMS if _path_of(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")


class Cluster:
    """environment: variables for processes that use the cluster. folder: contains all its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        inherited = [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_"))]
        for name in set(inherited) - {"SLURM_CONF"}:
            del self.environment[name]
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def run(self, *command: str, **more: object) -> str:
        """The output of a command; CalledProcessError if it fails."""
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True, timeout=60,
                              **more).stdout.strip()

    def submit(self, *command: str, **more: object) -> str:
        """Submit a job with `sbatch --parsable`; returns its number."""
        return self.run("sbatch", "--parsable", *command, **more)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` reports about a job."""
        return dict(entry.split("=", 1) for entry in self.run("scontrol", "--oneliner", "show", "job", number).split()
                    if "=" in entry)

    def wait(self, number: str, *states: str, seconds: float = 240) -> dict[str, str]:
        """The job, once it is in one of these states; AssertionError with the daemons' last log lines if never."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < end, f"job {number} is {job['JobState']} ({job.get('Reason')}):\n{self.logs()}"
            time.sleep(0.2)
        return job

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
                         for path in sorted(self.folder.glob("*.log")))

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration())
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                     f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed",
                     f"--log-file={self.folder}/munge.log")
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
        self._daemon("slurmctld", "-D", "-i")
        (self.folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
        for node in NODES:  # in a mount namespace whose hosts file names all nodes
            self._daemon("unshare", "--mount", "sh", "-c", f"mount --bind {self.folder}/hosts /etc/hosts && "
                         f"exec {_path_of('slurmd')} -D -N {node}")
        self._until(lambda: self.run("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
                    >= len(NODES), "idle nodes")

    def stop(self) -> None:
        """End all jobs and daemons, and return when they are gone."""
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root")
            self._until(lambda: not self.run("squeue", "--noheader"), "an empty queue", seconds=60)
        for _, daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for _, daemon in reversed(self._daemons):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, program: str, *options: str) -> None:
        path = _path_of(program)
        assert path is not None
        with (self.folder / f"{program}-{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append((program, subprocess.Popen([path, *options], env=self.environment, stdout=log,
                                                            stderr=log, stdin=subprocess.DEVNULL)))

    def _until(self, true, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            with suppress(subprocess.SubprocessError):
                if true():
                    return
            for program, daemon in self._daemons:
                assert daemon.poll() is None, f"{program} has ended with {daemon.returncode}:\n{self.logs()}"
            assert time.monotonic() < end, f"no {what}:\n{self.logs()}"
            time.sleep(0.2)

    def _configuration(self) -> str:
        host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
        nodes = "\n".join(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 State=UNKNOWN"
                          for node, port in zip(NODES, ports[1:], strict=True))
        return f"""\
ClusterName=ranvier
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket,cred_expire={_REQUEUE_SECONDS}
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
InactiveLimit=0
{nodes}
PartitionName=low Nodes={','.join(NODES)} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={_GRACE_SECONDS}
PartitionName=high Nodes={','.join(NODES)} PriorityTier=10 PreemptMode=OFF
"""


def _free_ports(count: int) -> list[int]:
    found = []
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
        found.append(each.getsockname()[1])
    for each in sockets:
        each.close()
    return found


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A running cluster."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()


if __name__ == "__main__":
    if problem := missing():
        sys.exit(problem)
    with cluster() as found:
        subprocess.run([os.environ.get("SHELL", "/bin/bash")], env=found.environment)
