"""Container files: the files they name exist, their commands are valid, Kubernetes' schema accepts the job."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ranvier.cli.main import run_command

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/containers"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())


def assert_valid(arguments, capsys):
    """Check that `ranvier check` accepts the arguments of `ranvier train`."""
    values = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in arguments]
    assert run_command(["check", *values]) == 0, capsys.readouterr()


def test_compose_starts_two_nodes_that_meet(capsys):
    first, second = COMPOSE["services"]["first"], COMPOSE["services"]["second"]
    assert first["command"] == second["command"] and first["volumes"] == second["volumes"]
    assert [first["hostname"], second["hostname"]] == ["first", "second"] and first["entrypoint"] == ["torchrun"]
    options, (module, train, *arguments) = _split(first["command"], "-m")
    assert (module, train) == ("ranvier", "train")
    assert {"--nnodes=2", "--rdzv-endpoint=first:29400"} <= set(options)
    build = first["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    run_dir = next(argument for argument in arguments if argument.startswith("--run-dir="))
    assert run_dir.removeprefix("--run-dir=").startswith(first["volumes"][0].partition(":")[2])
    assert_valid([argument for argument in arguments if argument != "--resume=auto"], capsys)


def _split(words, at):
    place = words.index(at)
    return words[:place], words[place + 1:]


def test_the_image_is_made_of_what_there_is():
    text = (FOLDER / "Dockerfile").read_text()
    assert "--constraint constraints.txt" in text and (ROOT / "constraints.txt").is_file()
    left_out = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv"} <= set(left_out)
    needed = {"pyproject.toml", "README.md", "ranvier", "constraints.txt", "LICENSE"}
    assert not needed & set(left_out) and all((ROOT / name).exists() for name in needed)
    definition = (FOLDER / "ranvier.def").read_text()
    assert re.findall(r"python:[\w.-]+", text)[0] == re.findall(r"python:[\w.-]+", definition)[0]


def test_the_page_names_these_files(capsys):
    page = (ROOT / "docs/containers.md").read_text()
    for name in re.findall(r"examples/containers/[\w.]+", page):
        assert (ROOT / name).is_file(), name
    blocks = re.findall(r"```bash\n(.*?)```", page, re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    trains = [words[words.index("train") + 1:] for words in commands if "train" in words]
    assert len(trains) == 3
    for words in trains:
        assert_valid([word for word in words if word not in ("--resume", "auto")], capsys)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_accepts_the_job(version):
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = list(yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["PersistentVolumeClaim", "Service", "Job"]
    for document in documents:
        validate(document, version, strict=True)
