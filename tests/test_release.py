"""A release: one version everywhere, distributions that install on their own, and documented extras."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML comes with transformers, without stubs

import ranvier

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ranvier.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "ranvier.__version__"
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == ranvier.__version__
    assert cited["license"] == PROJECT["project"]["license"]
    released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == "Unreleased"
    assert released[1:2] in ([], [ranvier.__version__])


def test_the_wheel_has_all_files_of_the_package() -> None:
    """The slow test builds the wheel and installs it."""
    package = ROOT / "ranvier"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ranvier"]
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in package.glob(pattern)} and len(others) > 10
    assert not [path for path in package.rglob("*.py") if not (path.parent / "__init__.py").exists()]


def test_every_dependency_and_extra_is_in_its_document() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    table = page[page.index("## What is installed"):page.index("## Extras")]
    named = {re.split(r"[><=\[ ]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert named == set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE))))
    extras = page[page.index("## Extras"):page.index("## Own code")]
    assert set(PROJECT["project"]["optional-dependencies"]) == set(
        re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (.+?) \|", extras, flags=re.MULTILINE))))


@pytest.mark.slow
def test_the_wheel_of_the_sdist_installs_and_runs(tmp_path: Path) -> None:
    """It needs no network: the environment sees the packages of this environment, but not this checkout."""
    pytest.importorskip("build")
    setuptools = pytest.importorskip("setuptools", minversion="77")
    assert setuptools
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):  # build/ and *.egg-info of the checkout are not in the release
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"),
                    str(tmp_path / "source")], check=True, capture_output=True, text=True, timeout=250)
    wheel, = (tmp_path / "dist").glob("*.whl")
    sdist, = (tmp_path / "dist").glob("*.tar.gz")
    assert wheel.name.startswith(f"ranvier-{ranvier.__version__}-py3-none-any")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ranvier/config/recipes/gpt-tiny.toml", "ranvier/cost/clusters/h100.toml", "ranvier/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "website", "docs"))]
    with tarfile.open(sdist) as archive:
        assert f"ranvier-{ranvier.__version__}/README.md" in archive.getnames()

    import torch

    packages = Path(torch.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: object) -> str:
        return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, cwd=tmp_path,
                              env=environment, timeout=120).stdout

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = output(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    Path(site, "borrowed.pth").write_text(f"{packages}\n")
    output(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed",
           wheel)
    command = python.with_name("ranvier")
    assert output(command, "--version") == f"ranvier, version {ranvier.__version__}\n"
    assert "train" in output(command, "--help")
    home, *recipes = output(python, "-c", "import ranvier; from ranvier.config import read; "
                                          "print(ranvier.__file__, *read.recipe_names())").split()
    assert home.startswith(site)
    assert "gpt-tiny" in recipes


def test_the_lock_has_every_dependency_of_the_two_commands() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert not any("://" in line or "+" in line for line in lines) and pinned["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]
    for text in (*PROJECT["project"]["dependencies"], *extras["mpi"], *extras["test"], *extras["docs"]):
        wanted = Requirement(text)
        assert pinned.get(canonicalize_name(wanted.name)) in wanted.specifier, f"{text}: run make lock"
    assert len(pinned) > 80  # including indirect dependencies
