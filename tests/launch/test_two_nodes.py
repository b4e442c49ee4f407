"""The command of docs/torchrun.md for several machines, on two named hosts: one is lost, and comes back.

The hosts are network namespaces (tests/launch/network_hosts.py). Skipped if they cannot be created.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranvier.checkpoint.manifest import checkpoints, step_of
from tests import tiny_runs
from tests.launch.network_hosts import ADDRESSES, NAMES, Agent, connected, wait_until

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 8
LIMIT_SECONDS = 200
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torch 2.13 cannot add a machine without it
COMMAND = next(line for line in (ROOT / "docs" / "torchrun.md").read_text().splitlines()
               if line.startswith("torchrun --nnodes"))
TRUE_ADDRESSES = dict(zip(NAMES, ADDRESSES, strict=True))


@pytest.fixture
def hosts(tmp_path):
    yield from connected(tmp_path)


def settings(tmp_path, steps):
    return tiny_runs.flags(tmp_path, mesh__data=2, mesh__pipe=2, train__eval_every=0, train__steps=steps,
                           checkpoint__every=20, comm__timeout_seconds=TIMEOUT_SECONDS, comm__transport="torch")


def agent(hosts, index, output, tmp_path, known, nodes="1:2", more=(), endpoint=NAMES[0], **variables):
    """The page's command on one host, for a small run that has no end."""
    words = shlex.split(COMMAND.replace("/shared/runs/first", str(tmp_path / "run")))[1:]
    for option, value in (("--nnodes", nodes), ("--nproc-per-node", "2"), ("--rdzv-endpoint", f"{endpoint}:29400")):
        words[words.index(option) + 1] = value
    return Agent(hosts.run(index, known), tmp_path / output, *more, *words, *settings(tmp_path, 1_000_000), **variables)


def losses(folder):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def texts(agents):
    return "\n".join(f"---- {each.path.name}\n{each.text}" for each in agents)


def wait_for(condition, agents, seconds=LIMIT_SECONDS):
    """Wait until `condition()` is true while all agents run; returns the seconds."""
    began = time.monotonic()
    assert wait_until(lambda: condition() or any(each.process.poll() is not None for each in agents), seconds
                      ), texts(agents)
    assert condition(), texts(agents)
    return time.monotonic() - began


@pytest.fixture
def agents():
    started = []
    yield started
    for each in started:
        each.end()


def local_losses(tmp_path, steps):
    folder = tmp_path / "local"
    subprocess.run([sys.executable, "-m", "ranvier", "train", "gpt-tiny", "--run-dir", str(folder),
                    *settings(tmp_path, steps)], check=True, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL,
                   capture_output=True)
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "own_address", "seconds"),
                         [("killed", None, 20), ("cut off", "127.0.1.1", TIMEOUT_SECONDS + 30)],
                         ids=["killed", "cut off, its own name means the loopback"])
def test_a_machine_is_lost_and_comes_back(hosts, tmp_path, agents, loss, own_address, seconds):
    """torchrun continues on the other machine, adds the lost one when it returns; the losses are a local run's."""
    known = [TRUE_ADDRESSES | ({name: own_address} if own_address else {}) for name in NAMES]
    folder = tmp_path / "run" / "checkpoint"

    def start(index, output):
        agents.append(agent(hosts, index, output, tmp_path, known[index], **REJOIN))
        return agents[-1]

    first, lost = start(0, "first.txt"), start(1, "second.txt")
    wait_for(lambda: len(checkpoints(folder)) > 1, agents)
    (hosts.kill if loss == "killed" else hosts.cut_off)(1)
    agents.remove(lost)
    try:
        wait_for(lambda: re.search(r"ranvier: no heartbeat from rank 2 \(.*; rank 3 \(", first.text), agents, seconds)
        wait_for(lambda: "the run resumes with data 1 x pipe 2" in first.text, agents)
        if loss == "cut off":
            assert "ranvier: rank 0's store does not answer: this machine is disconnected from it" in lost.text
            hosts.kill(1)  # its torchrun waits for an answer that will never come
        assert wait_until(lambda: lost.process.poll() is not None, 20), texts([first, lost])
    finally:
        lost.end()
    alone = step_of(checkpoints(folder)[0])
    wait_for(lambda: step_of(checkpoints(folder)[0]) >= alone + 40, agents)

    hosts.connect_again(1)
    start(1, "again.txt")
    wait_for(lambda: first.text.count(": resumes from ") == 2, agents)
    together = step_of(checkpoints(folder)[0])
    wait_for(lambda: step_of(checkpoints(folder)[0]) >= together + 40, agents)
    for each in agents:
        each.process.terminate()
    assert wait_until(lambda: all(each.process.poll() is not None for each in agents), 60), texts(agents)

    assert first.text.count("on mesh data 2 x pipe 2") == 2 and first.text.count("on mesh data 1 x pipe 2") == 1
    found, local = losses(tmp_path / "run"), local_losses(tmp_path, alone + 30)
    # Rank 0 may be lost between saving a step and writing its numbers.
    assert len({*range(1, max(found) + 1)} - {*found}) <= 1
    for step in {*found} & {*local}:
        assert found[step] == pytest.approx(local[step], rel=1e-3), step


@pytest.mark.slow
def test_machines_that_no_name_reaches(hosts, tmp_path, agents):
    """Each name is a loopback address: the error names an option of torchrun, with which the run trains."""
    def start(number, more=((), ())):
        agents.extend(agent(hosts, index, f"{number}-{index}.txt", tmp_path, {NAMES[index]: "127.0.0.1"}, nodes="2",
                            more=["--rdzv-conf", f"is_host={1 - index}", *more[index]], endpoint=ADDRESSES[0])
                      for index in range(2))

    start(0)
    wait_for(lambda: re.search(r"MASTER_ADDR: means this machine itself here.*--local-addr", texts(agents)), agents, 60)
    for each in agents:
        each.process.terminate()
    for each in agents:
        each.end()
    agents.clear()
    start(1, [("--local-addr", address) for address in ADDRESSES])
    wait_for(lambda: checkpoints(tmp_path / "run" / "checkpoint"), agents)
