"""`ranvier.run`: a function of a notebook or a prompt on local ranks, and the tutorial notebooks."""

import copy
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import ranvier
from ranvier.errors import ConfigError, LaunchError
from ranvier.launch import run_function
from ranvier.launch.start import rerun_command
from tests.errors import raises

cloudpickle = pytest.importorskip("cloudpickle")
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_results_and_output_of_ranks(capsys):
    factor = 3

    class Found:
        def __init__(self, values):
            self.values = values

    def work(world, samples):
        print("hello from", world.rank, flush=True)
        total = torch.full((1,), float(samples + world.rank))
        world.backend.group("all", [range(world.size)]).all_reduce(total).wait()
        return Found(torch.tensor([world.rank * factor])), float(total), str(world.mesh), torch.rand(1).tolist()

    torch.manual_seed(5)
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    try:
        results = ranvier.run(work, 4, pipe=2, transport="torch")
        drawn = torch.rand(1).tolist()  # as the function would draw here
    finally:
        torch.set_default_dtype(torch.float32)
    assert [int(found.values) for found, *_ in results] == [0, 3] and isinstance(results[0][0], Found)
    assert [told for _, *told in results] == [[9.0, "data 1 x pipe 2 x row 1 x col 1", drawn]] * 2
    shown = capsys.readouterr().out
    assert "hello from 0" in shown and "hello from 1" not in shown


def test_ranks_that_end_well_without_a_result(monkeypatch):
    """As with sys.exit() in the function."""
    monkeypatch.setattr("ranvier.launch.run_function._run_program", lambda folder: 0)
    with raises("function-ranks-ended", 0):
        ranvier.run(print)


@pytest.mark.slow
def test_the_rank_that_fails_is_named(capsys):
    def work(world):
        if world.rank == 1:
            raise ValueError("no such number.")
        time.sleep(60)

    with pytest.raises(LaunchError, match=r"^rank 1 of 2: failed: ValueError: no such number. Its traceback is in the"):
        ranvier.run(work, pipe=2, transport="torch")
    assert "ValueError: no such number." in capsys.readouterr().out


@pytest.mark.slow
def test_other_failures_of_ranks():
    with pytest.raises(LaunchError, match=r"the ranks: ended with exit code \d+ before they had a result"):
        ranvier.run(lambda world: os.kill(os.getpid(), signal.SIGKILL), pipe=2)
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match=r"ranvier.run: failed: ConfigError: .*device"):
            ranvier.run(lambda world: None, pipe=2, device="cuda")


def test_what_is_refused_before_ranks_start(monkeypatch):
    with raises("function-not-picklable"):
        ranvier.run(print, threading.Lock())
    with pytest.raises(ConfigError):
        ranvier.run(print, pipe=0)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with raises("start-from-prompt"):
        rerun_command()
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with raises("cloudpickle-missing"):
        ranvier.run(print)


def test_a_result_that_cannot_be_pickled(tmp_path, monkeypatch):
    monkeypatch.setattr(run_function, "start", lambda **_: Mock(rank=0, size=2))
    job = {}, run_function._torchs_state(), lambda world: threading.Lock(), ()
    (tmp_path / "job").write_bytes(cloudpickle.dumps(job))
    with raises("result-not-picklable", value="lock"):
        run_function.run_as_rank(str(tmp_path))
    assert next(tmp_path.glob("*.error")).read_text().startswith("rank 0 of 2\nLaunchError: ranvier.run: ")


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import os, sys, time
import ranvier

if __name__ == "__main__":
    folder = sys.argv[1]
    def placed(world):
        with open(f"{folder}/{world.rank}.pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(120)
    ranvier.run(placed, pipe=2, transport="torch")
""")
    process = subprocess.Popen([sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    pids = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text() for path in pids):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in output
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_has_kept(path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    kept = nbformat.read(path, 4)
    found = copy.deepcopy(kept)
    nbclient.NotebookClient(found, timeout=250, kernel_name="python3",
                            resources={"metadata": {"path": str(ROOT)}}).execute()

    def lines(notebook):
        """All printed lines, without those that depend on the machine."""
        outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
        text = "".join(one["text"] for one in outputs
                       if one["output_type"] == "stream" and one["name"] == "stdout").splitlines()
        assert any("image/png" in one.get("data", {}) for one in outputs)
        differences = [float(line.split()[2]) for line in text if line.startswith("largest difference ")]
        assert differences and max(differences) < 1e-5
        varies = ("transport ", "device ", "largest difference ", "time: ")
        return [line for line in text if not line.startswith(varies)]

    assert lines(found) == lines(kept)
    losses = [float(line.split()[-1]) for line in lines(kept) if re.match(r"step \d+: loss ", line)]
    assert losses[-1] < 0.6 * losses[0]
