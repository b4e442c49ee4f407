"""The commands and code of README and of the pages that it links to do what they say: unchanged in `make test-all`; in
`make test` most of them with fewer steps and one rank, in the tests' own process, and only one of those that differ in
the mesh alone. Ranks that are processes start in tests/launch."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import suite
from ranvier.cli.main import run_command
from ranvier.testing.freezing import check_freeze_policy

pytestmark = pytest.mark.pictures
ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/train.md", "docs/memory.md", "docs/checkpoints.md", "docs/hugging-face.md",
         "docs/tensor-parallelism.md", "docs/own-model.md", "docs/elastic.md", "benchmarks/README.md")


def blocks(language: str) -> list[str]:
    texts = [(ROOT / page).read_text() for page in PAGES]
    return [block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)]


def commands() -> list[str]:
    """Each command of the pages once; commands of a block that depend on one another are one command."""
    found = []
    for block in blocks("bash"):
        lines = [line for line in block.splitlines() if line.strip()]
        follows = any(name in block for name in ("ranvier export", "--resume", "ranvier train runs/"))
        found += [" && ".join(lines)] if follows else lines
    return list(dict.fromkeys(found))


COMMANDS = commands()
RUNNABLE = [command for command in COMMANDS if not command.startswith("make ") and " resize runs/mine" not in command]
HELPS = [command for command in RUNNABLE if command.startswith("python -m ") and command.endswith(" --help")]
SLOW = ("bert-sentiment", "vit-cifar10", "torchrun", "mpiexec", "runs/small", "runs/writer", "--mesh.row 2",
        "runs/kept", "runs/frugal", "runs/own-family", "runs/upper", "runs/auto", "--explain", "runs/base", "gpt-12b")
"""Parts of commands that only `make test-all` runs: recipes that download, and commands that other tests also start."""
FEW_STEPS = "--train.steps 3 --train.eval-sequences 8 --train.sample-tokens 8"
ONE_RANK = "--mesh.data 1 --mesh.pipe 1"
SMALL_CORPUS = "--data.max-bytes 100000"


IN_PROCESS = ("check", "plan", "simulate", "resize", "doctor")
"""Subcommands that start no process: like training on one rank, they run in the tests' process, which has torch."""


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `command` in a shell, as in an activated environment with the checkout, with garbage collections at Python's
    own thresholds and at the end, unlike tests/interpreter."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site creates them, and anchors that the page defines itself."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"\{#[^}]*\}|[^\w\s-]", "", title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in titles} | set(re.findall(r"\{#([\w-]+)", text))


def test_links_lead_to_files_and_headings() -> None:
    """`make test-all` checks the site's own links, since it builds the pages about the code."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]+))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert "://" in link or target.exists(), f"{page.name}: {link}"
            if anchor and target.suffix == ".md" and "::: " not in target.read_text():
                assert anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def test_the_pages_have_what_is_tested_here() -> None:
    assert len(RUNNABLE) >= 9
    assert len(blocks("python")) == 6


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def quick(command: str) -> str:
    """The command with fewer steps; gpt-tiny, which has two replicas of two stages, on one rank with less text."""
    alone = " gpt-tiny " in command and "--mesh." not in command and "--data." not in command
    return re.sub(r"--train\.steps \d+", f"{ONE_RANK} {FEW_STEPS} {SMALL_CORPUS}" if alone else FEW_STEPS, command)


def in_make_test() -> list:
    """Commands with few steps; a command that differs from an earlier one only in the mesh is slow."""
    seen, params = set(), []
    for command in RUNNABLE:
        if command not in HELPS:
            alike = re.sub(r"--(mesh\.data|mesh\.pipe|run-dir) \S+ ?", "", command)
            params.append(pytest.param(quick(command), marks=pytest.mark.slow if alike in seen or any(
                name in command for name in SLOW) else ()))
            seen.add(alike)
    return params


@pytest.mark.parametrize("command", [*in_make_test(), *(pytest.param(command, marks=pytest.mark.slow)
                                                        for command in RUNNABLE if quick(command) != command)])
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0] == "ranvier" and "&&" not in words and (
            words[1] in IN_PROCESS or (ONE_RANK in command and "--mesh.row" not in command)):
        monkeypatch.chdir(tmp_path)
        assert run_command(words[1:]) == 0
    elif words[:3] == ["python", "-m", "benchmarks.gpu.suite"] and not torch.cuda.is_available():
        assert suite.main(words[3:]) == 0, "it only reads its arguments here"
    else:
        if command.startswith("mpiexec"):
            pytest.importorskip("mpi4py")
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    if folder := re.search(r"--run-dir (\S+)", command):
        for name in ("run.toml", "metrics.jsonl", "events.jsonl", "summary.json", "timeline.png", "timeline.json",
                     "loss.png", "tensorboard"):
            assert (tmp_path / folder[1] / name).exists(), name


@pytest.mark.parametrize("command", HELPS)
@pytest.mark.filterwarnings(
    "ignore:.* found in sys.modules after import of package:RuntimeWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_helps(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands run in the tests' own process, which has loaded torch."""
    module = command.split()[2]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code and "usage:" in capsys.readouterr().out


def python_example(text: str) -> str:
    """The example that contains this text."""
    found, = (code for code in blocks("python") if text in code)
    return found


def test_the_freeze_policy_of_the_page_conforms() -> None:
    names: dict[str, Any] = {}
    exec(python_example("frozen_layers"), names)
    check_freeze_policy(names["WhileTheLossFalls"])


def test_python_example_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    exec(python_example("check_split"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert all("agrees" in line for line in lines)
    assert len(lines) == 13  # the schemes on four meshes


def test_the_five_lines_are_those_of_the_program() -> None:
    five, = (code for code in blocks("python") if len(code.splitlines()) == 5)
    assert five in python_example("def batches")


def test_python_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """It learns on one rank, which is this process."""
    exec(python_example("def batches").replace("data=2, pipe=2", "data=1"), {"__name__": "__main__"})
    assert final_loss(capsys.readouterr().out) < 0.5  # the targets vary by 0.67 around their mean, 16.7 around zero


@pytest.mark.slow
def test_python_example_learns_on_four_ranks(tmp_path: Path) -> None:
    code = python_example("def batches")
    assert "ranvier.start(data=2, pipe=2)" in code
    (tmp_path / "example.py").write_text(code)
    done = run("python example.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert final_loss(done.stdout) < 0.5


def final_loss(said: str) -> float:
    found = re.search(r"^loss (\S+)$", said, flags=re.MULTILINE)
    assert found
    return float(found[1])
