"""The files and commands of docs/slurm.md, docs/kubernetes.md and docs/torchrun.md, with scripts in place of a cluster.

Fast tests replace the training too; slow ones train, are told to stop or lose a rank, and resume.
"""

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranvier.config import read
from tests import tiny_runs
from tests.processes import processes_with, python_path

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
JOB = ROOT / "examples" / "kubernetes" / "job.yaml"
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("torchrun", "slurm", "kubernetes")}
DEADLINE_SECONDS = 200
STEPS = 150

SRUN = """#!/bin/bash
# Each task as Slurm would start it: $TASKS of them on this machine. Their process ids go to the file $PIDS.
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((rank = 0; rank < TASKS; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$TASKS \\
        SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=$TASKS "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" > "$PIDS"
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$REQUEUED"
"""
RANVIER = """#!/bin/bash
exec {python} -m ranvier "$@"
"""
PLAYED = """#!/bin/bash
# In the place of the training: says what it was asked, and does what $DOES says.
echo "${0##*/} $*" >> "$ASKED"
while [[ $1 != --run-dir ]]; do shift; done
run_dir=$2
mkdir -p "$run_dir/checkpoint"
eval "$DOES"
"""


@pytest.fixture
def shell(tmp_path):
    """Start `command` with scripts of these names first on PATH."""
    started = []

    def begin(command, programs, **variables):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        foreign = ("PYTEST", "COVERAGE", "SLURM_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        environ |= {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
                    **{name: str(value) for name, value in variables.items()}}
        started.append(subprocess.Popen([*map(str, command)], env=environ, cwd=tmp_path, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            for rank in processes_with(tmp_path):  # a torchrun that is killed leaves its ranks
                rank.kill()
        process.communicate()


def finish(process):
    output = process.communicate(timeout=DEADLINE_SECONDS)[0]
    return process.returncode, output


@pytest.fixture
def tiny(tmp_path):
    return tiny_runs.flags(tmp_path, model__num_layers=1, batch__global_size=4, batch__microbatch_size=1,
                           train__steps=STEPS, train__eval_every=0, checkpoint__every=10, launch__threads=1)


def steps_in(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, process):
    """Wait until `condition()` is true, while `process` runs."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def job_with_free_port():
    """A job number that leads to an unused port (ranvier.launch.launchers)."""
    for job in range(os.getpid(), os.getpid() + 1000):
        try:
            socket.create_server(("127.0.0.1", 20_000 + job * 31 % 40_000)).close()
            return job
        except OSError:
            pass
    raise AssertionError("no port is free")


# ------------------------------------------------------------------------------------------------------------- Slurm


def sbatch(shell, tmp_path, *train, programs, **variables):
    """Start the script as Slurm does, with scripts in place of srun and scontrol."""
    process = shell([SBATCH, tmp_path / "run", *train], {"srun": SRUN, "scontrol": SCONTROL, **programs},
                    SLURM_JOB_ID=variables.pop("job", 7), SLURM_CPUS_PER_TASK=1, PIDS=tmp_path / "pids",
                    REQUEUED=tmp_path / "requeued", ASKED=tmp_path / "asked", **variables)
    return process


def contents(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(("does", "code", "requeued"), [
    ('mkdir "$run_dir/checkpoint/step-20"', 0, True),
    ('mkdir "$run_dir/checkpoint/step-20"; exit 1', 0, True),
    ('touch "$run_dir/summary.json"; mkdir "$run_dir/checkpoint/step-20"', 0, False),
    ("true", 1, False),
    ("exit 2", 2, False)],
    ids=["stopped", "lost a rank", "finished", "no step further", "refused"])
def test_the_job_is_requeued_while_the_run_is_unfinished_and_goes_on(shell, tmp_path, does, code, requeued):
    (tmp_path / "run" / "checkpoint" / "step-9").mkdir(parents=True)
    process = sbatch(shell, tmp_path, "gpt-tiny", "--seed", "3", programs={"ranvier": PLAYED}, TASKS=1, DOES=does)
    assert finish(process)[0] == code
    assert contents(tmp_path / "requeued") == ("requeue 7\n" if requeued else "")
    assert contents(tmp_path / "asked") == (
        f"ranvier train gpt-tiny --seed 3 --resume auto --run-dir {tmp_path / 'run'}\n")


def test_the_script_tells_slurm_what_the_page_says():
    options = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=USR1@120", "--open-mode=append"} <= set(options)
    assert SBATCH.stat().st_mode & stat.S_IXUSR
    assert "`--signal=USR1@120`" in PAGES["slurm"] and "`--requeue`" in PAGES["slurm"]


@pytest.mark.slow
def test_a_job_is_signalled_and_the_next_one_has_fewer_tasks(shell, tmp_path, tiny):
    """The complete cycle with Slurm: told to stop, requeued, and finished on another mesh."""
    train = ["gpt-tiny", "--mesh.data", 1, "--mesh.pipe", 2, *tiny]
    ranvier, run_dir = RANVIER.format(python=sys.executable), tmp_path / "run"
    first = sbatch(shell, tmp_path, *train, programs={"ranvier": ranvier}, TASKS=2, job=job_with_free_port())
    wait_for(lambda: len(steps_in(run_dir)) > 5, first)
    for task in contents(tmp_path / "pids").split():
        os.kill(int(task), signal.SIGUSR1)
    code, output = finish(first)
    assert code == 0, output
    assert contents(tmp_path / "requeued").startswith("requeue ") and not (run_dir / "summary.json").exists()
    done = steps_in(run_dir)
    assert done == [*range(1, len(done) + 1)] and len(done) < STEPS
    assert (run_dir / "checkpoint" / f"step-{len(done)}").is_dir(), "nothing is lost"

    second = sbatch(shell, tmp_path, *train, programs={"ranvier": ranvier}, TASKS=1, job=job_with_free_port())
    code, output = finish(second)
    assert code == 0, output
    assert "the run resumes with data 1 x pipe 1 x row 1 x col 1 (fewer stages)" in output
    assert steps_in(run_dir) == [*range(1, STEPS + 1)]
    assert (run_dir / "summary.json").exists()
    assert contents(tmp_path / "requeued").count("requeue") == 1


# -------------------------------------------------------------------------------------------------------- Kubernetes


def manifest():
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all(JOB.read_text())}


def container():
    return manifest()["Job"]["spec"]["template"]["spec"]["containers"][0]


def pod(shell, index, programs, **variables):
    """Run the container's command with its environment and that of an indexed Job."""
    given = {entry["name"]: entry["value"] for entry in container()["env"]}
    assert set(variables) & set(given) <= {"TRAIN", "RUN_DIR", "NODES", "RANKS_PER_NODE", "RENDEZVOUS"}
    return shell([*container()["command"], *container()["args"]], programs,
                 **{**given, "JOB_COMPLETION_INDEX": index, **variables})


def test_the_parts_of_the_manifest_fit():
    documents = manifest()
    assert set(documents) == {"PersistentVolumeClaim", "Service", "Job"}
    job, service, claim = documents["Job"], documents["Service"], documents["PersistentVolumeClaim"]
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    environ = {entry["name"]: entry["value"] for entry in container()["env"]}
    assert all(isinstance(value, str) for value in environ.values()), "Kubernetes accepts only text"
    assert (job["apiVersion"], spec["completionMode"], template["restartPolicy"]) == ("batch/v1", "Indexed", "Never")
    assert spec["completions"] == spec["parallelism"] == int(environ["NODES"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert template["subdomain"] == service["metadata"]["name"]
    assert environ["RENDEZVOUS"].partition(":")[0] == f"{job['metadata']['name']}-0.{template['subdomain']}"
    assert int(environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < template["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in template["volumes"]}
    assert template["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert environ["RUN_DIR"].startswith(mounts["runs"] + "/")
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert {"operator": "In", "values": [75]} in [rule.get("onExitCodes") for rule in ignored]


@pytest.mark.parametrize(("does", "code"), [
    ('touch "$run_dir/summary.json"', 0), ('touch "$run_dir/summary.json"; exit 1', 0), ("exit 0", 75), ("exit 1", 1)],
    ids=["finished", "finished, then failed", "stopped", "failed"])
def test_a_pod_is_done_when_the_run_is_finished(shell, tmp_path, does, code):
    process = pod(shell, 0, {"torchrun": PLAYED}, RUN_DIR=tmp_path / "run", DOES=does, ASKED=tmp_path / "asked")
    assert finish(process)[0] == code
    asked = contents(tmp_path / "asked")
    assert asked.startswith("torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint "
                            "ranvier-0.ranvier:29400 ")
    assert asked.endswith(f" -m ranvier train gpt-tiny --train.steps 100000 --resume auto --run-dir {tmp_path}/run\n")


def test_a_pod_of_a_finished_run_has_nothing_to_do(shell, tmp_path):
    (tmp_path / "summary.json").touch()
    process = pod(shell, 0, {"torchrun": PLAYED}, RUN_DIR=tmp_path, DOES="exit 1", ASKED=tmp_path / "asked")
    assert finish(process)[0] == 0
    assert contents(tmp_path / "asked") == ""


def test_one_pods_eviction_stops_all(shell, tmp_path):
    """Both pods are told and end as stopped; the note that stopped them does not stop later pods."""
    does = 'trap "touch $run_dir/told-$JOB_COMPLETION_INDEX; exit 1" TERM; touch $run_dir/up-$JOB_COMPLETION_INDEX; ' \
           "while true; do sleep 0.05; done"
    run_dir = tmp_path / "run"
    pods = [pod(shell, index, {"torchrun": PLAYED}, RUN_DIR=run_dir, DOES=does, ASKED=tmp_path / "asked")
            for index in (0, 1)]
    for index, process in enumerate(pods):
        wait_for((run_dir / f"up-{index}").exists, process)
    pods[1].send_signal(signal.SIGTERM)
    assert [finish(process)[0] for process in pods] == [75, 75]
    assert {path.name for path in run_dir.glob("told-*")} == {"told-0", "told-1"}
    again = pod(shell, 1, {"torchrun": PLAYED}, RUN_DIR=run_dir, DOES='sleep 1.5; touch "$run_dir/summary.json"',
                ASKED=tmp_path / "asked")
    assert finish(again)[0] == 0


@pytest.mark.slow
def test_pods_train_are_evicted_and_go_on(shell, tmp_path, tiny):
    run_dir = tmp_path / "run"
    train = shlex.join(map(str, ["gpt-tiny", "--mesh.data", 2, "--mesh.pipe", 1, *tiny]))

    def pods():
        where = f"127.0.0.1:{free_port()}"
        return [pod(shell, index, {}, RUN_DIR=run_dir, TRAIN=train, RANKS_PER_NODE=1, RENDEZVOUS=where)
                for index in (0, 1)]

    first = pods()
    wait_for(lambda: len(steps_in(run_dir)) > 5, first[0])
    first[0].send_signal(signal.SIGTERM)
    ends = [finish(process) for process in first]
    assert [code for code, _ in ends] == [75, 75], ends
    done = len(steps_in(run_dir))
    assert (run_dir / "checkpoint" / f"step-{done}").is_dir() and done < STEPS
    ends = [finish(process) for process in pods()]
    assert [code for code, _ in ends] == [0, 0], ends
    assert steps_in(run_dir) == [*range(1, STEPS + 1)]


# ---------------------------------------------------------------------------------------------------------- torchrun


def commands(page):
    return [line for block in re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL) for line in block.splitlines()]


def test_the_pages_commands_are_those_that_are_tested():
    assert [command.split()[:2] for command in commands("torchrun")] == [["torchrun", "--standalone"],
                                                                        ["torchrun", "--nnodes"]]
    assert commands("slurm") == ["sbatch examples/slurm/train.sbatch /shared/runs/first gpt-tiny --train.steps 100000"]
    assert commands("kubernetes")[0] == "kubectl apply -f examples/kubernetes/job.yaml"
    flags = {flag for page in PAGES.values() for flag in re.findall(r"`--([a-z-]+\.[a-z-]+)", page)}
    assert flags and flags <= {setting.flag for setting in read.settings().values()}
    for page in PAGES.values():
        for link in re.findall(r"\]\(([^)#]+)", page):
            assert (ROOT / "docs" / link).exists(), link


@pytest.mark.slow
def test_torchrun_starts_again_after_a_rank_died_and_then_with_fewer_ranks(shell, tmp_path, tiny):
    command, _ = commands("torchrun")
    run_dir = tmp_path / "runs" / "torchrun"

    def train(num_ranks, *more):
        words = shlex.split(command)
        words[words.index("--nproc-per-node") + 1] = str(num_ranks)
        return shell([*words, "--mesh.data", 2, "--mesh.pipe", 1, *tiny, *more], {})

    first = train(2)
    wait_for((run_dir / "checkpoint" / "step-20").exists, first)
    (victim,) = processes_with(tmp_path, "RANK=1")
    victim.kill()
    code, output = finish(first)
    assert code == 0, output
    resumed = int(re.search(r"resumes from .*?step-(\d+)", output, re.DOTALL)[1])
    assert resumed >= 20
    steps = steps_in(run_dir)
    assert steps == sorted(set(steps)), "each step once, although some were run twice"
    # A step's numbers are logged during the next one: rank 0 may have been killed between saving and logging.
    assert {*range(1, STEPS + 1)} - {*steps} <= {resumed}

    second = train(1, "--train.steps", STEPS + 5)
    code, output = finish(second)
    assert code == 0, output
    assert "the run resumes with data 1 x pipe 1 x row 1 x col 1 (fewer replicas)" in output
    assert steps_in(run_dir)[-6:] == [*range(STEPS, STEPS + 6)]


@pytest.mark.slow
def test_several_machines_become_fewer(shell, tmp_path, tiny):
    """The page's second command with two machines, and then, as --nnodes 1:2 allows, with one."""
    run_dir = tmp_path / "run"

    def machines(count):
        words = shlex.split(commands("torchrun")[1].replace("/shared/runs/first", str(run_dir)))
        for option, value in (("--nnodes", str(count)), ("--nproc-per-node", "1"), ("--mesh.data", "2"),
                              ("--rdzv-endpoint", f"127.0.0.1:{port}")):
            words[words.index(option) + 1] = value
        return [shell([*words, "--mesh.pipe", 1, *tiny], {}) for _ in range(count)]

    port = free_port()
    both = machines(2)
    wait_for(lambda: len(steps_in(run_dir)) > 5, both[0])
    for process in both:
        process.send_signal(signal.SIGTERM)
    ends = [finish(process) for process in both]
    done = len(steps_in(run_dir))
    assert (run_dir / "checkpoint" / f"step-{done}").is_dir() and done < STEPS, ends
    port = free_port()
    (one,) = machines(1)
    code, output = finish(one)
    assert code == 0, output
    assert "(fewer replicas)" in output
    assert steps_in(run_dir) == [*range(1, STEPS + 1)]
