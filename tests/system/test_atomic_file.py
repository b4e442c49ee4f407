"""Where a file can be written, and what a file never replaces."""

from pathlib import Path

import pytest

from ranvier.system.atomic_file import folder_problem, write_atomically, write_problem


def test_a_device_is_not_replaced(tmp_path, monkeypatch):
    assert write_problem(Path("/dev/null")) == "it is a device"
    (tmp_path / "link").symlink_to("/dev/null")
    write_atomically(tmp_path / "link", "text")
    assert not (tmp_path / "link").is_symlink()
    monkeypatch.setattr(Path, "is_char_device", lambda path: True)  # a failing test must not replace the real device
    with pytest.raises(OSError, match="device"):
        write_atomically(tmp_path / "link", "other")
    assert (tmp_path / "link").read_text() == "text"


def test_where_a_file_can_be_written(tmp_path):
    before = sorted(tmp_path.iterdir())
    assert write_problem(tmp_path / "new") is None and folder_problem(tmp_path / "new" / "er") is None
    assert write_problem(tmp_path / "none" / "new") == "no such folder" and write_problem(tmp_path) == "it is a folder"
    assert write_problem(tmp_path / ("x" * 5000)) is not None and folder_problem(tmp_path) is None
    assert folder_problem(tmp_path / ("x" * 300)) is not None  # cannot even be looked up
    assert sorted(tmp_path.iterdir()) == before


def test_links_to_streams_are_not_replaced():
    """/dev/stdout is such a link, and root would remove it for the entire machine."""
    assert {write_problem(Path("/dev", name)) for name in ("stdout", "stderr")} == {"it is a device"}
    with pytest.raises(OSError, match="device"):
        write_atomically(Path("/dev/nothing-of-this-name"), "text")
