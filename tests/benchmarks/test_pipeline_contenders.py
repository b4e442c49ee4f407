"""Every contender of the pipeline benchmark does the same work: its losses are those of the plain loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.pipeline.case import LOSS_TOLERANCE, LossesDiffer, check_losses
from benchmarks.pipeline.contender import TORCH_SCHEDULES
from tests.processes import python_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def losses():
    """Name -> losses of the first steps, the ranks' shares added up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.benchmarks.peer_rank", str(store.port), str(rank), "2"],
                              cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    shares = [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]
    return {name: [sum(share) for share in zip(*(rank[name] for rank in shares
                                                 if None not in rank.get(name, [None])), strict=True)]
            for name in shares[0]}


@pytest.mark.slow
def test_all_contenders_have_the_plain_loop_s_losses(losses):
    plain = losses.pop("one-process")
    broken = losses.pop("ends of the tie not summed")
    ours = {f"ours-message-driven-gloo{how}" for how in ("", "-rule", "-v-shape", "-interleaved")}
    assert {*TORCH_SCHEDULES, "ceiling", "one-process-whole", "ddp", *ours} == set(losses)
    assert len(set(plain)) == len(plain), "the steps must tell a trained model from an untrained one"
    for name, got in losses.items():
        assert got == pytest.approx(plain, rel=1e-5), name

    assert broken[0] == pytest.approx(plain[0], rel=1e-5)
    with pytest.raises(LossesDiffer, match="no ratios: broken"):
        check_losses({"one-process": plain, "broken": broken})


def test_losses_within_rounding_pass_and_others_do_not():
    check_losses({"a": (9.0, 8.0), "b": (9.0 * (1 + 0.9 * LOSS_TOLERANCE), 8.0)})
    for other in ((9.0 * (1 + 1.1 * LOSS_TOLERANCE), 8.0), (9.0, 8.1), (9.0,)):
        with pytest.raises(LossesDiffer, match="b: "):
            check_losses({"a": (9.0, 8.0), "b": other})
