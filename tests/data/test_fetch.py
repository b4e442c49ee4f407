"""Packages: fetched once, checked to the bit, and what is said when that fails."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from ranvier.data.fetch import Package, fetch
from ranvier.errors import DataError

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
    with pytest.raises(DataError, match=r"has not the sha256 .*Delete it"):
        fetch(package("get"), tmp_path, quiet, never)


def test_a_wrong_file_never_enters_the_cache(tmp_path):
    with pytest.raises(DataError, match="has not the sha256"):
        fetch(package("get"), tmp_path, quiet, writing(b"something else"))
    assert not (tmp_path / "packages" / "thing-1.0.tgz").exists()


def test_a_missing_package_manager_is_named_with_the_way_by_hand(tmp_path):
    with pytest.raises(DataError, match=r"could not be fetched .*no-such-command.*Fetch it elsewhere "
                                        r"\(no-such-command pack\) and put it into .*packages"):
        fetch(package("no-such-command", "pack"), tmp_path, quiet)


def test_a_failing_command_is_quoted(tmp_path):
    script = "import sys; print('first', file=sys.stderr); print('404 not here', file=sys.stderr); sys.exit(3)"
    with pytest.raises(DataError, match=r"could not be fetched \(got '404 not here'\)"):
        fetch(package(sys.executable, "-c", script), tmp_path, quiet)


def test_a_command_that_hangs_is_an_error(tmp_path):
    def hanging(command, folder):
        raise subprocess.TimeoutExpired(command, 600)

    with pytest.raises(DataError, match="timed out after 600 seconds"):
        fetch(package("get"), tmp_path, quiet, hanging)


def test_a_command_that_leaves_something_else_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"was not among what was fetched \(got \['thing-2.0.tgz'\]\)"):
        fetch(package("get"), tmp_path, quiet, lambda command, folder: (folder / "thing-2.0.tgz").touch())
