"""Several hosts on one machine: network namespaces joined by a wire, which is cut in the middle of a run.

As on many real machines the host's own name means a loopback address, so Gloo has to be told which interface leads to
the others. Needs root and iproute2; skipped elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from ranvier.checkpoint.manifest import checkpoints, step_of

TIMEOUT_SECONDS = 8
LIMIT_SECONDS = TIMEOUT_SECONDS + 60  # the others' wait, what they look for, torchrun's own end, a loaded machine
PORT = 29533


def ip(*args, check=True):
    return subprocess.run(["ip", *map(str, args)], capture_output=True, text=True, check=check, timeout=30)


class Hosts:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2."""

    def __init__(self):
        self.names = [f"ranvier-{os.getpid()}-{index}" for index in range(2)]
        self.wires = [f"rv{os.getpid()}n{index}"[:15] for index in range(2)]

    def connect(self):
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.wires[0], "netns", self.names[0], "type", "veth", "peer", "name", self.wires[1], "netns",
           self.names[1])
        for index, (name, wire) in enumerate(zip(self.names, self.wires, strict=True)):
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", wire)
            for device in (wire, "lo"):
                ip("-n", name, "link", "set", device, "up")

    def cut_off(self, index):
        ip("-n", self.names[index], "link", "set", self.wires[index], "down")

    def remove(self):
        for name in self.names:
            ip("netns", "del", name, check=False)


@pytest.fixture
def hosts():
    found = Hosts()
    try:
        found.connect()
    except (OSError, subprocess.SubprocessError) as error:
        found.remove() if shutil.which("ip") else None
        pytest.skip(f"may not make network namespaces: {error}")
    try:
        yield found
    finally:
        found.remove()


class Agent:
    """torchrun on one of the hosts."""

    def __init__(self, hosts, index, num_hosts, output, args):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "PYTEST"))}
        self.path = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", hosts.names[index], sys.executable, "-m", "torch.distributed.run", "--nnodes",
                 str(num_hosts), "--nproc-per-node", "2", "--node-rank", str(index), "--master-addr", "10.77.0.1",
                 "--master-port", str(PORT), "-m", "ranvier", *map(str, args)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})

    @property
    def text(self):
        return self.path.read_text(errors="replace")

    def end(self):
        """torchrun ends its ranks on SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
            self.process.kill()
            self.process.wait()


def train(tmp_path, mesh, *more):
    corpus = tmp_path / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(20):
            (corpus / f"{number}.txt").write_text("".join(f"line {number * line} of a text\n" for line in range(40)))
    return ["train", "gpt-tiny", "--data.corpus", corpus, "--data.cache-dir", tmp_path / "cache",
            *(word for axis, size in mesh.items() for word in (f"--mesh.{axis}", size)),
            "--model.num-layers", 2, "--model.hidden", 16, "--model.heads", 2, "--model.vocab", 260,
            "--model.sequence", 16, "--batch.global-size", 8, "--batch.microbatch-size", 2, "--train.warmup-steps", 0,
            "--train.eval-sequences", 4, "--train.sample-tokens", 2, "--run-dir", tmp_path / "run", "--resume", "auto",
            "--checkpoint.every", 5, "--comm.timeout-seconds", TIMEOUT_SECONDS, "--comm.transport", "torch", *more]


def ranks_left(tmp_path):
    """Processes of this test's runs."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/cmdline") as file:
            if f"{tmp_path}/run" in file.read():
                found.append(int(name))
    return found


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(data=2, pipe=2), dict(data=1, pipe=4)], ids=str)
def test_a_host_that_is_cut_off(hosts, tmp_path, mesh):
    """All ranks of both hosts end, each host's output says who cannot be heard, and one host goes on with the rest."""
    folder = tmp_path / "run" / "checkpoint"
    agents = [Agent(hosts, index, 2, tmp_path / f"{index}.txt", train(tmp_path, mesh, "--train.steps", 1_000_000))
              for index in range(2)]
    try:
        assert wait_until(lambda: len(checkpoints(folder)) > 1 or any(agent.process.poll() is not None
                                                                      for agent in agents), 240)
        assert [agent.process.poll() for agent in agents] == [None, None], "".join(agent.text for agent in agents)
        hosts.cut_off(1)
        ended = wait_until(lambda: all(agent.process.poll() is not None for agent in agents), LIMIT_SECONDS)
        assert ended, "".join(agent.text for agent in agents)
        assert wait_until(lambda: not ranks_left(tmp_path), 20), ranks_left(tmp_path)
    finally:
        for agent in agents:
            agent.end()
    here, there = (agent.text for agent in agents)
    assert "Traceback" not in re.sub(r"(?s)Traceback.{0,3000}ChildFailedError", "", here + there), here + there
    assert re.search(r"ranvier: no heartbeat from rank 2 \(.*; rank 3 \(", here), here
    assert re.search(r"ranvier: error: .*\[rank [23] ", there, re.DOTALL), there
    assert "ranvier: rank 0's store does not answer: this machine is disconnected from it" in there, there

    newest = step_of(checkpoints(folder)[0])
    again = Agent(hosts, 0, 1, tmp_path / "again.txt", train(tmp_path, mesh, "--train.steps", newest + 7))
    try:
        assert wait_until(lambda: again.process.poll() is not None, 200), again.text
        assert again.process.returncode == 0, again.text
    finally:
        again.end()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, newest + 8))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["folder"] for event in events if event["event"] == "resume" and "folder" in event][-1] == str(
        folder / f"step-{newest}")
