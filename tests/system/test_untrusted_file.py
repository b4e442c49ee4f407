"""Files that may be another user's: reads do not block or follow links, and sizes are bounded."""

import fcntl
import json
import os
import resource

import numpy as np
import psutil
import pytest

from ranvier.checkpoint.hf.peft import AdapterFolder
from ranvier.data.arrays import open_arrays, write_arrays
from ranvier.data.cache import one_writer
from ranvier.errors import CheckpointError, DataError, OwnershipError
from ranvier.system.lease import Lease
from ranvier.system.untrusted_file import (
    append_file,
    json_object,
    member,
    new_file,
    open_lock,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
)
from tests.errors import raises


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def as_another_user(monkeypatch):
    """Make this process appear to belong to another user than the files that it has written."""
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    if real == 0:  # root's files are trusted, so the files of this test must not appear as root's
        monkeypatch.setattr("ranvier.system.untrusted_file._writers", lambda found: f"belongs to {found.st_uid}")


def test_reads_are_bounded(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bytes(path, 4)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path, 1 << 20)
    os.mkfifo(tmp_path / "fifo")
    for wrong in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_bytes(wrong, 5)


@pytest.mark.parametrize("content", [
    "[" * 250 + "]" * 250, '{"a":' * 100_000, "9" * 5000, "{", b"\xff\xfe\x00", "[1, 2"])
def test_whatever_is_no_json_is_a_value_error(content):
    with pytest.raises(ValueError):
        parse_json(content)


@pytest.mark.parametrize("content", [
    "a = " + "9" * 5000, "a = " + "[" * 100_000, "a" + ".a" * 40 + " = 1", "[" + "a . " * 40 + "a]", "a = 1\na = 2",
    '"".' * 40 + '"" = 1', '"\\"".' * 40 + "a = 1", "'.'." * 40 + "a = 1", "[[a" + ".b" * 33 + "]]"])
def test_whatever_is_no_toml_is_a_value_error(content):
    """Also a name of many parts, which is valid TOML but takes memory with the square of its length."""
    with pytest.raises(ValueError):
        parse_toml(content)


@pytest.mark.parametrize("content", [b'{"a": "\\ud800"}', b'["\\uDFFF"]', '["\\ud800"]'.encode("utf-16")])
def test_half_of_a_surrogate_pair_is_a_value_error(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="surrogate"):
        read_json(tmp_path / "x", 100)
    (tmp_path / "x").write_bytes(b'["\\ud83d\\ude42"]')
    assert read_json(tmp_path / "x", 100) == ["\U0001f642"]


def test_documents_are_read():
    assert parse_json("[" * 150 + "]" * 150) and parse_json(b'{"a": Infinity}') == {"a": float("inf")}
    assert parse_toml('a.b.c = "1.2.3"\n# ' + "w." * 20) == {"a": {"b": {"c": "1.2.3"}}}


def test_writes_follow_no_link(tmp_path, victim):
    link = tmp_path / "link"
    link.symlink_to(victim)
    for door in (new_file, append_file, open_lock):
        with pytest.raises(OSError):
            door(link)
    hard = tmp_path / "hard"
    os.link(victim, hard)
    for door in (append_file, open_lock):
        with pytest.raises(OSError, match="one name"):
            door(hard)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        append_file(tmp_path / "fifo")
    assert victim.read_text() == "precious"


def test_a_file_that_everybody_may_write_is_not_believed(tmp_path):
    path = tmp_path / "x"
    path.write_text("1")
    path.chmod(0o664)
    assert read_json(path, 10, unshared=True) == 1
    path.chmod(0o666)
    with pytest.raises(OSError, match="may be written by everybody"):
        read_json(path, 10, unshared=True)


def test_members_of_a_folder(tmp_path, victim):
    folder, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "b").write_text("{}")
    (folder / "config.json").symlink_to(blobs / "b")
    assert read_json(member(folder, "config.json"), 10) == {}
    (folder / "out").symlink_to(victim)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "fifo")
    for name in ("out", "loop", "fifo", "missing"):
        with pytest.raises(OSError):
            member(folder, name)


def test_a_lock_that_is_a_link_harms_nothing(tmp_path, victim):
    (tmp_path / ".x.lock").symlink_to(victim)
    with raises("data-not-writable") as raised, one_writer(tmp_path / "x", print):
        pass
    assert raised.value.where == str(tmp_path / "x") and victim.read_text() == "precious"


def test_a_lock_names_its_holder(tmp_path):
    with one_writer(tmp_path / "x", print):
        handle = open_lock(tmp_path / ".x.lock")
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert str(os.getpid()) in os.pread(handle, 1000, 0).decode()
        os.close(handle)


@pytest.mark.parametrize("name", ["about.json", "a.npy"])
def test_arrays_of_others_are_refused(tmp_path, name):
    write_arrays(tmp_path, {"a": np.arange(4), "empty": np.empty((0, 3), np.int32)}, {})
    found = open_arrays(tmp_path).arrays
    assert found["a"].tolist() == [0, 1, 2, 3] and found["empty"].shape == (0, 3)
    (tmp_path / name).chmod(0o666)
    with raises("cached-arrays-changed") as raised:
        open_arrays(tmp_path)
    assert "everybody" in raised.value.value


def test_files_of_another_user_are_refused(tmp_path, monkeypatch):
    write_arrays(tmp_path, {"a": np.arange(4)}, {})
    as_another_user(monkeypatch)
    with raises("cached-arrays-changed"):
        open_arrays(tmp_path)


@pytest.mark.parametrize("content", ["[" * 50_000, "[]", "{", " " * (1 << 21)])
def test_adapters_with_an_odd_configuration(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError) as raised:
        AdapterFolder(tmp_path)
    assert raised.value.where == f"adapters {tmp_path}"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_in_a_pipe_do_not_block(tmp_path, name):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with raises("adapter-file-unreadable"):
        AdapterFolder(tmp_path)


def test_a_lease_after_which_none_can_come_ends_the_start(tmp_path):
    (tmp_path / ".owner.999999999999").write_text("")
    with pytest.raises(OwnershipError) as raised:
        Lease.acquire([tmp_path], expiry_seconds=0.0, wait_seconds=0.0)
    assert raised.value.value == ".owner.999999999999"


@pytest.mark.parametrize("nested", [True, False])
def test_the_configuration_beside_a_tokenizer_neither_blocks_nor_overflows(tmp_path, nested):
    from ranvier.data import tokenizer
    from ranvier.data.run_tokenizer import _vocab_of

    for name in ("tokenizer_config.json", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("[" * 50_000) if nested else os.mkfifo(tmp_path / name)
    with raises("file-beside-tokenizer-unreadable"):
        tokenizer._named_beside(tmp_path / "tokenizer.json", "eos_token")
    assert json_object(tmp_path / "tokenizer_config.json", 1 << 20) == {} and _vocab_of(tmp_path, 7) == 7
    with pytest.raises(DataError, match="nested too deeply" if nested else "not a regular file"):
        tokenizer.load(tmp_path / "tokenizer.json")


def test_reading_takes_memory_for_what_is_there_and_not_for_the_limit(tmp_path):
    """Otherwise every small file would be refused if a process has little memory, as under `ulimit -v`."""
    (tmp_path / "small").write_bytes(b"12" * (1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (256 << 20), hard))
    try:
        assert read_bytes(tmp_path / "small", 1 << 40) == b"12" * (1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with pytest.raises(ValueError):
        read_bytes(tmp_path / "small", (2 << 20) - 1)
    assert len(read_bytes(tmp_path / "small", 2 << 20)) == 2 << 20
