"""Several hosts on one machine: network namespaces joined by a wire, which is cut in the middle of a run.

As on many real machines the host's own name means a loopback address, so Gloo has to be told which interface leads to
the others.
"""

import json
import os
import re
from contextlib import suppress

import pytest

from ranvier.checkpoint.manifest import checkpoints, step_of
from tests.launch.network_hosts import ADDRESSES, Agent, connected, wait_until

TIMEOUT_SECONDS = 8
LIMIT_SECONDS = TIMEOUT_SECONDS + 60  # the others' wait, what they look for, torchrun's own end, a loaded machine
PORT = 29533


@pytest.fixture
def hosts(tmp_path):
    yield from connected(tmp_path)


def agent(hosts, index, num_hosts, output, args):
    return Agent(hosts.run(index), output, "--nnodes", num_hosts, "--nproc-per-node", 2, "--node-rank", index,
                 "--master-addr", ADDRESSES[0], "--master-port", PORT, "-m", "ranvier", *args)


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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(data=2, pipe=2), dict(data=1, pipe=4)], ids=str)
def test_a_host_that_is_cut_off(hosts, tmp_path, mesh):
    """All ranks of both hosts end, each host's output says who cannot be heard, and one host goes on with the rest."""
    folder = tmp_path / "run" / "checkpoint"
    agents = [agent(hosts, index, 2, tmp_path / f"{index}.txt", train(tmp_path, mesh, "--train.steps", 1_000_000))
              for index in range(2)]
    try:
        assert wait_until(lambda: len(checkpoints(folder)) > 1 or any(each.process.poll() is not None
                                                                      for each in agents), 240)
        assert [each.process.poll() for each in agents] == [None, None], "".join(each.text for each in agents)
        hosts.cut_off(1)
        ended = wait_until(lambda: all(each.process.poll() is not None for each in agents), LIMIT_SECONDS)
        assert ended, "".join(each.text for each in agents)
        assert wait_until(lambda: not ranks_left(tmp_path), 20), ranks_left(tmp_path)
    finally:
        for each in agents:
            each.end()
    here, there = (each.text for each in agents)
    assert "Traceback" not in re.sub(r"(?s)Traceback.{0,3000}ChildFailedError", "", here + there), here + there
    assert re.search(r"ranvier: no heartbeat from rank 2 \(.*; rank 3 \(", here), here
    assert re.search(r"ranvier: error: .*\[rank [23] ", there, re.DOTALL), there
    assert "ranvier: rank 0's store does not answer: this machine is disconnected from it" in there, there

    newest = step_of(checkpoints(folder)[0])
    again = agent(hosts, 0, 1, tmp_path / "again.txt", train(tmp_path, mesh, "--train.steps", newest + 7))
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
