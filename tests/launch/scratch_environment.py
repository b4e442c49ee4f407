"""A virtual environment with a few more packages than this one, and runs whose ranks get the launcher's variables."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny_runs

ROOT = Path(__file__).resolve().parents[2]
INSTALL_SECONDS = 500


def scratch_python(folder, *packages):
    """The interpreter of a new environment in `folder` that has `packages` and all packages of this one. Skips the test
    if they cannot be installed."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--retries", "1", *packages],
                          capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip install {' '.join(packages)} fails: {last}")
    own, = folder.glob("lib/python*/site-packages")
    present = [path for path in sys.path if path.endswith("site-packages")]
    (own / "present_environment.pth").write_text("\n".join([str(ROOT), *present]))  # after the environment's own
    return python


def settings(tmp_path, steps):
    """Flags of a small run of gpt-tiny on two ranks."""
    return ["gpt-tiny", *tiny_runs.flags(
        tmp_path, mesh__data=1, mesh__pipe=2, train__eval_every=0, train__steps=steps, checkpoint__every=20,
        launch__device="cpu", run_dir=tmp_path / "run")]


def wait_for(condition, process, output, seconds=180):
    """Wait until `condition()` is true while `process` runs, and return its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text(errors="replace")
        time.sleep(0.05)
    return found


def started(command, output, **variables):
    """Start `command` in its own session, with its output in the file `output`."""
    with output.open("wb") as file:
        return subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                env=os.environ | variables, start_new_session=True)
