"""Where a file can be written, and what is never replaced by one."""

import os
import stat

import pytest

from ranvier.system.atomic_file import folder_problem, write_atomically, write_problem


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(OSError, match="pipe"):
        write_atomically(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and write_problem(tmp_path / "pipe")
    write_atomically(tmp_path / "link", "text")
    assert not (tmp_path / "link").is_symlink()


def test_where_a_file_can_be_written(tmp_path):
    before = sorted(tmp_path.iterdir())
    assert write_problem(tmp_path / "new") is None and folder_problem(tmp_path / "new" / "er") is None
    assert write_problem(tmp_path / "none" / "new") == "no such folder" and write_problem(tmp_path) == "it is a folder"
    assert write_problem(tmp_path / ("x" * 5000)) is not None and folder_problem(tmp_path) is None
    assert sorted(tmp_path.iterdir()) == before
