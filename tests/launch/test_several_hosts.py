"""Several hosts on one machine: network namespaces joined by a wire, which is cut in the middle of a run.

As on many real machines, the host's own name is a loopback address, so Gloo must be told which interface leads to
the others.
"""

import json
import re

import pytest

from ranvier.checkpoint.manifest import checkpoints, step_of
from tests import tiny_runs
from tests.launch.network_hosts import ADDRESSES, Agent, connected, wait_until
from tests.processes import processes_with

TIMEOUT_SECONDS = 8
LIMIT_SECONDS = TIMEOUT_SECONDS + 60  # the ranks' wait, their search for the cause, torchrun's end, a loaded machine
PORT = 29533


@pytest.fixture
def hosts(tmp_path):
    yield from connected(tmp_path)


def agent(hosts, index, num_hosts, output, args):
    return Agent(hosts.run(index), output, "--nnodes", num_hosts, "--nproc-per-node", 2, "--node-rank", index,
                 "--master-addr", ADDRESSES[0], "--master-port", PORT, "-m", "ranvier", *args)


def train(tmp_path, mesh, steps, *, timeout_seconds):
    return ["train", "gpt-tiny", *tiny_runs.flags(
        tmp_path, **{f"mesh__{axis}": size for axis, size in mesh.items()}, train__sample_tokens=2,
        run_dir=tmp_path / "run", resume="auto", checkpoint__every=5, comm__timeout_seconds=timeout_seconds,
        comm__transport="torch", train__steps=steps)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(data=2, pipe=2), dict(data=1, pipe=4)], ids=str)
def test_a_host_that_is_cut_off(hosts, tmp_path, mesh):
    """All ranks of both hosts end, each host's output names the unreachable ranks, and the run resumes on one host."""
    folder = tmp_path / "run" / "checkpoint"
    endless = train(tmp_path, mesh, 1_000_000, timeout_seconds=TIMEOUT_SECONDS)
    agents = [agent(hosts, index, 2, tmp_path / f"{index}.txt", endless) for index in range(2)]
    try:
        assert wait_until(lambda: len(checkpoints(folder)) > 1 or any(each.process.poll() is not None
                                                                      for each in agents), 240)
        assert [each.process.poll() for each in agents] == [None, None], "".join(each.text for each in agents)
        hosts.cut_off(1)
        ended = wait_until(lambda: all(each.process.poll() is not None for each in agents), LIMIT_SECONDS)
        assert ended, "".join(each.text for each in agents)
        run_dir = tmp_path / "run"
        assert wait_until(lambda: not processes_with(run_dir), 20), processes_with(run_dir)
    finally:
        for each in agents:
            each.end()
    here, there = (each.text for each in agents)
    assert "Traceback" not in re.sub(r"(?s)Traceback.{0,3000}ChildFailedError", "", here + there), here + there
    assert re.search(r"ranvier: no heartbeat from rank 2 \(.*; rank 3 \(", here), here
    assert re.search(r"ranvier: error: .*\[rank [23] ", there, re.DOTALL), there
    assert "ranvier: rank 0's store does not answer: this machine is disconnected from it" in there, there

    newest = step_of(checkpoints(folder)[0])
    again = agent(hosts, 0, 1, tmp_path / "again.txt", train(tmp_path, mesh, newest + 7, timeout_seconds=120))
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
