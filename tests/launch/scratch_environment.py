"""A virtual environment with a few packages more than this one, and the ranks of a run by the launcher's variables."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL_SECONDS = 500


def scratch_python(folder, *packages):
    """The interpreter of a new environment in `folder` that has `packages`, and all that this one has. Skips the test
    where they cannot be installed."""
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
    """Of a small run of gpt-tiny on two ranks."""
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        (tmp_path / "corpus" / f"{number}.txt").write_text(
            "".join(f"line {number * line} of a text\n" for line in range(40)))
    return [str(word) for word in (
        "gpt-tiny", "--mesh.data", 1, "--mesh.pipe", 2, "--data.corpus", tmp_path / "corpus", "--data.cache-dir",
        tmp_path / "cache", "--model.num-layers", 2, "--model.hidden", 16, "--model.heads", 2, "--model.vocab", 260,
        "--model.sequence", 16, "--batch.global-size", 8, "--batch.microbatch-size", 2, "--train.warmup-steps", 0,
        "--train.eval-every", 0, "--train.eval-sequences", 4, "--train.sample-tokens", 0, "--train.steps", steps,
        "--checkpoint.every", 20, "--launch.device", "cpu", "--run-dir", tmp_path / "run")]


def wait_for(condition, process, output, seconds=180):
    """The first true `condition()`, while `process` runs."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text(errors="replace")
        time.sleep(0.05)
    return found


def pid_of_rank(run_dir, variable):
    """The process of the run in `run_dir` that has `variable` ("RANK=1") in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if str(run_dir).encode() in words and variable.encode() in environ:
            return int(process.name)
    return None


def parent_of(pid):
    """Process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(command, output, **variables):
    """`command` in a session of its own, with what it prints in the file `output`."""
    with output.open("wb") as file:
        return subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                env=os.environ | variables, start_new_session=True)
