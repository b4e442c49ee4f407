"""The README's commands and code do what it says, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
RUNNABLE = [command for command in COMMANDS if not command.startswith("make ")]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """`command` in a shell, as in an activated environment with the checkout at hand."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_readme_has_what_is_tested_here() -> None:
    assert len(RUNNABLE) >= 9
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("command", RUNNABLE)
def test_command(command: str, tmp_path: Path) -> None:
    if command.startswith("mpiexec"):
        pytest.importorskip("mpi4py")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if folder := re.search(r"--run-dir (\S+)", command):
        for name in ("run.toml", "metrics.jsonl", "events.jsonl", "summary.json", "timeline.png", "timeline.json",
                     "loss.png", "tensorboard"):
            assert (tmp_path / folder[1] / name).exists(), name


def test_python_example_learns(tmp_path: Path) -> None:
    (code,) = blocks("python")
    (tmp_path / "example.py").write_text(code)
    done = run("python example.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    loss = float(re.search(r"^loss (\S+)$", done.stdout, flags=re.MULTILINE)[1])
    assert loss < 0.5  # the targets have a variance of 0.67 around their mean, and a mean square of 16.7
