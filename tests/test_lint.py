"""The pre-commit hook runs what CI runs before the tests; large files and merge markers are refused."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML comes with transformers, without stubs

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (shutil.which("make") and shutil.which("git")), reason="needs make and git")


def _check_files(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "check-files"], cwd=folder,
                          capture_output=True, text=True, timeout=60)


def _tracked(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", name], cwd=folder, check=True)


def test_the_hook_is_local_and_runs_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    repository, = config["repos"]
    assert repository["repo"] == "local"
    hook, = repository["hooks"]
    assert (hook["entry"], hook["language"], hook["pass_filenames"]) == ("make lint", "system", False)


def _recipe_of(target: str) -> str:
    """The commands of a target, without the folder's name that make would add when it runs under `make test`."""
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    return subprocess.run(["make", "-n", target], cwd=ROOT, env=outside, capture_output=True, text=True,
                          check=True).stdout


def test_make_test_runs_lint_and_checks_types_beside_the_tests() -> None:
    shown, lint, lines = map(_recipe_of, ("test", "lint", "lint-lines"))
    assert lint == f"{lines}.venv/bin/mypy\n" and "ruff check" in lines and "git ls-files" in lines
    assert shown.startswith(f"{lines}.venv/bin/mypy & ")


@pytest.mark.parametrize(("types", "tests", "code"), [("true", "true", 0), ("false", "true", 2), ("true", "false", 2)])
def test_make_test_fails_with_either(tmp_path: Path, types: str, tests: str, code: int) -> None:
    (tmp_path / "mypy").symlink_to(shutil.which(types) or types)
    done = subprocess.run(["make", "-f", str(ROOT / "Makefile"), "-o", "lint-lines", "test", f"BIN={tmp_path}",
                           f"PYTEST={tests}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and ("mypy has found errors" in done.stdout) == (types == "false"), done


def test_files_of_usual_size_pass(tmp_path: Path) -> None:
    _tracked(tmp_path, "a.txt", "text\n=======\n")
    result = _check_files(tmp_path)
    assert (result.returncode, result.stdout) == (0, "")


def test_outside_a_checkout_there_is_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<<<<<<< ours\n")
    assert _check_files(tmp_path).returncode == 0


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    _tracked(tmp_path, "large.bin", "0" * (3 << 20))
    result = _check_files(tmp_path)
    assert result.returncode != 0
    assert "larger than 2048 KiB, keep it outside the repository: large.bin" in result.stdout


def test_a_merge_marker_is_refused(tmp_path: Path) -> None:
    _tracked(tmp_path, "merged.py", "<" * 7 + " ours\na = 1\n" + "=" * 7 + "\na = 2\n" + ">" * 7 + " theirs\n")
    result = _check_files(tmp_path)
    assert result.returncode != 0 and "has merge markers: merged.py" in result.stdout
