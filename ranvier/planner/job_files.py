"""The job file next to a planned run's file, which starts the run under Slurm, torchrun or Kubernetes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from math import ceil
from os.path import normpath
from pathlib import Path
from typing import Literal, get_args

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.hardware import Cluster
from ranvier.errors import ConfigError
from ranvier.planner.run_cost import SAVED_BYTES_PER_SECOND, saved_bytes
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import read_bytes

Launcher = Literal["slurm", "torchrun", "kubernetes"]
_SUFFIXES: dict[Launcher, str] = {"slurm": ".sbatch", "torchrun": ".sh", "kubernetes": ".yaml"}
_MOST_BYTES = 1 << 20
_NAME_CHARS = 48
_SAVING_SECONDS = 120
"""Seconds for the checkpoint of a run that is asked to stop, in addition to those for its bytes, after the step in
progress and one more."""
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)


def write_job(launcher: Launcher, run: ResolvedRun, cluster: Cluster, run_file: Path, step_seconds: float) -> Path:
    """Write the file that starts `run_file` on the run's devices next to that file; returns its path. ConfigError if it
    cannot be written, or if the devices do not fill entire nodes. step_seconds: of one step; a run that is asked to
    stop needs two steps before it saves."""
    nodes, per_node = nodes_of(run.mesh.size, cluster)
    path = job_path(launcher, run_file)
    saved = saved_bytes(run)
    makes: dict[Launcher, Callable[..., str]] = {
        "slurm": partial(_slurm, checkpoints=run.checkpoint.dir, saving=(
            f"{saved / 1e9:,.1f} GB at {SAVED_BYTES_PER_SECOND / 1e9:g} GB/s")),
        "torchrun": _torchrun, "kubernetes": partial(_kubernetes, checkpoints=run.checkpoint.dir)}
    text = makes[launcher](
        run_file, run.run_dir or Path("runs", run_file.stem), nodes, per_node, on_gpus=cluster.device.cores is None,
        stop_seconds=60 * ceil((2 * step_seconds + _SAVING_SECONDS + saved / SAVED_BYTES_PER_SECOND) / 60),
        whole_nodes=per_node == cluster.devices_per_node)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise job_not_writable(path, error.strerror or str(error)) from error
    return path


def job_path(launcher: Launcher, run_file: Path) -> Path:
    """The path of the job file of `run_file`, next to it."""
    return run_file.with_suffix(_SUFFIXES[launcher])


def job_not_writable(path: Path, reason: str) -> ConfigError:
    """The error for a job file that cannot be written."""
    return ConfigError(f"cannot be written: {reason}", code="job-not-writable", where="--launcher", value=str(path),
                       remedy="Name a file for `--out` in a folder you own.")


def nodes_of(ranks: int, cluster: Cluster) -> tuple[int, int]:
    """The number of nodes of a job, and of ranks on each. ConfigError if ranks do not fill entire nodes."""
    per_node = min(cluster.devices_per_node, ranks)
    nodes, rest = divmod(ranks, per_node)
    if rest:
        raise ConfigError(f"does not fill nodes of {per_node} devices", code="job-of-partial-nodes",
                          where="--launcher", value=ranks,
                          remedy=f"Plan for a multiple of {per_node} ranks, or start the ranks yourself.")
    return nodes, per_node


def start_command(launcher: Launcher, path: Path, nodes: int) -> str:
    """The command that a user types to start the job file `path` on `nodes`."""
    name = shlex.quote(str(path))
    return {"slurm": f"sbatch {name}", "kubernetes": f"kubectl apply -f {name}",
            "torchrun": f"bash {name}" + (" FIRST_MACHINE (on each machine)" if nodes > 1 else "")}[launcher]


def _slurm(run_file: Path, run_dir: Path, nodes: int, per_node: int, *, checkpoints: Path | None, saving: str,
           on_gpus: bool, stop_seconds: int, whole_nodes: bool) -> str:
    saved = '"$run_dir/checkpoint"' if checkpoints is None else shlex.quote(str(checkpoints))
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if on_gpus else ""
    # Slurm gives an exclusive job all cores, but only the requested memory, and a task one core. A node of CPUs may
    # have fewer cores than ranks.
    gpus += "#SBATCH --exclusive\n#SBATCH --mem=0\n" if whole_nodes else ""
    cores = f" --cpus-per-task=$((SLURM_CPUS_ON_NODE / {per_node}))" if whole_nodes and on_gpus else ""
    return f"""#!/bin/bash
# sbatch {run_file.with_suffix(".sbatch").name} [/shared/folder/of/the/run]
# Saves before its time is up, is put back into the queue, and resumes. --signal: two steps, {_SAVING_SECONDS} s, and a
# checkpoint of {saving} to your file system: allow more where that is slower.
#SBATCH --job-name={shlex.quote(run_file.stem)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{gpus}#SBATCH --time=24:00:00
#SBATCH --signal=USR1@{stop_seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

run_dir=${{1:-{shlex.quote(str(run_dir))}}}
export RANVIER_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n') # signs what ranks tell each other
newest() {{ find {saved} -maxdepth 1 -name 'step-*' 2>/dev/null | sort -V | tail -n 1; }}
export TORCH_CPP_LOG_LEVEL=ERROR # otherwise torch prints 20 lines of C++ for each rank that a lost one brings down
before=$(newest)
srun --kill-on-bad-exit=1{cores} ranvier train {shlex.quote(str(run_file))} --resume auto --run-dir "$run_dir"
code=$?
if [ -e "$run_dir/summary.json" ]; then exit "$code"; fi # finished
if [ "$(newest)" = "$before" ]; then
    echo "no checkpoint after ${{before:-the start}}: not put back into the queue" >&2
    exit "$((code == 0 ? 1 : code))"
fi
scontrol requeue "$SLURM_JOB_ID"
"""


def _torchrun(run_file: Path, run_dir: Path, nodes: int, per_node: int, *, on_gpus: bool, stop_seconds: int,
              whole_nodes: bool) -> str:
    way = ('--nnodes ' + str(nodes) + ' --rdzv-backend c10d --rdzv-endpoint "${1:?say the first machine}:29400" '
           f'--rdzv-id {shlex.quote(run_file.stem)}') if nodes > 1 else "--standalone"
    where = "on each machine, with the first one's name or address" if nodes > 1 else "on the machine"
    return f"""#!/bin/bash
# {where}: bash {run_file.with_suffix(".sh").name}{" FIRST_MACHINE" if nodes > 1 else ""}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={stop_seconds} # until torchrun kills ranks that save
exec torchrun {way} \\
    --nproc-per-node {per_node} --max-restarts 3 \\
    -m ranvier train {shlex.quote(str(run_file))} --resume auto --run-dir {shlex.quote(str(run_dir))}
"""


def _service_name(text: str) -> str:
    """A valid name of a Service (RFC 1035), short enough for the pods' host names, and not the API server's."""
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in text.lower())
    name = name.strip("-")[:_NAME_CHARS].strip("-")
    return name if name[:1].isalpha() and name != "kubernetes" else f"ranvier-{name}".strip("-")


def _kubernetes(run_file: Path, run_dir: Path, nodes: int, per_node: int, *, checkpoints: Path | None, on_gpus: bool,
                stop_seconds: int, whole_nodes: bool) -> str:
    name = _service_name(run_file.stem)
    if not run_dir.is_absolute() or len(run_dir.parts) < 3:  # it must be on the volume
        run_dir = Path("/runs", run_dir.name or name)
    volume = run_dir.parent
    if checkpoints is not None and not Path(normpath(checkpoints)).is_relative_to(volume):
        raise ConfigError(f"is not on the volume, which the pods have as {volume}: a checkpoint would be lost with its "
                          "pod", code="job-checkpoints-off-volume", where="checkpoint.dir", value=str(checkpoints),
                          remedy=f"Leave it out, for {run_dir}/checkpoint, or give a folder in {volume}.")
    gpus = f'\n            limits: {{nvidia.com/gpu: "{per_node}"}}' if on_gpus else ""
    settings = "\n".join(f"    {line}" for line in read_bytes(run_file, _MOST_BYTES).decode().splitlines())
    return f"""# kubectl apply -f {run_file.with_suffix(".yaml").name}
# Insert your image, which has ranvier and torchrun, and a volume claim that all nodes can write to.
# docs/kubernetes.md has a job that also survives evictions.
apiVersion: v1
kind: ConfigMap
metadata: {{name: "{name}"}}
data:
  run.toml: |
{settings}
---
apiVersion: v1
kind: Service
metadata: {{name: "{name}"}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{job-name: "{name}"}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: "{name}"}}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 10
  template:
    spec:
      subdomain: "{name}"
      restartPolicy: Never
      terminationGracePeriodSeconds: {stop_seconds + 30}
      containers:
        - name: train
          image: example.com/ranvier:latest
          command: [bash, -c]
          args:
            - >-
              exec torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d
              --rdzv-endpoint {name}-0.{name}:29400 --rdzv-id {name} --max-restarts 3
              -m ranvier train /settings/run.toml --resume auto --run-dir {shlex.quote(str(run_dir))}
          env:
            - {{name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{stop_seconds}"}}
          resources:
            requests: {{cpu: "{4 * per_node}"}}{gpus}
          volumeMounts:
            - {{name: runs, mountPath: {json.dumps(str(volume))}}}
            - {{name: settings, mountPath: /settings}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: runs
          persistentVolumeClaim: {{claimName: ranvier-runs}}
        - name: settings
          configMap: {{name: "{name}"}}
        - name: shm
          emptyDir: {{medium: Memory}}
"""
