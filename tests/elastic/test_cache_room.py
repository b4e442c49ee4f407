"""The cache stays within its limit, continues with a full disk, and leaves nothing behind."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from ranvier.elastic import cache_file
from ranvier.elastic.cache_file import CHECKSUM_BYTES, RunFolder
from tests.elastic.cached import HIT, MISS, NUM_SAMPLES, Cached, Prefix, files

EVERY = [*range(NUM_SAMPLES)]
ROW_BYTES = CHECKSUM_BYTES + 5 * 6 * 4


# ---------------------------------------------------------------------- the limit

@pytest.mark.parametrize("kept", [0, 10])
def test_the_limit_holds_and_what_has_no_room_is_computed(tmp_path, kept):
    most = kept * ROW_BYTES + 50
    with Cached(tmp_path, max_bytes=most) as cached:
        for start in range(0, NUM_SAMPLES, 4):
            cached.right(*range(start, start + 4))
        assert files(tmp_path)[0].stat().st_size == kept * ROW_BYTES <= most
        counts = cached.cache.counts
        assert (counts.written, counts.unwritten) == (kept, NUM_SAMPLES - kept)
        assert cached.right(*EVERY) == ([(0, EVERY[kept:])] if kept else MISS)
        told, = cached.told
        assert f"{most:,} bytes" in told and "--elastic.cache-bytes" in told


@pytest.mark.parametrize(("depths", "calls"), [(2, [(2, None)]), (1.9, MISS)])
def test_entries_of_two_depths_have_one_limit(tmp_path, depths, calls):
    """If both do not fit, the entries of fewer layers are removed immediately."""
    with Cached(tmp_path, Prefix(depth=2), max_bytes=int(depths * NUM_SAMPLES * ROW_BYTES)) as cached:
        cached.right(*range(20))
        cached.deepen(4)
        assert cached.right(*range(20)) == calls and cached.right(*range(20)) == HIT
        assert len(files(tmp_path)) == int(depths)
        assert cached.cache.counts.unwritten == 0 and not cached.told


# ---------------------------------------------------------------------- a disk that is full

def test_files_that_cannot_grow(tmp_path):
    """Earlier entries stay; the run continues with one warning."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Cached(tmp_path, Prefix(width=2000)) as cached:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * (CHECKSUM_BYTES + 40_000) + 100, before[1]))
        try:
            for _ in range(3):
                cached.right(*EVERY)
            assert cached.right(0, 1, 2) == HIT and cached.right(3) == MISS
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(cached.told) == 1 and "the disk does not take it" in cached.told[0]
        assert (cached.cache.counts.written, cached.cache.counts.unwritten) == (3, NUM_SAMPLES - 3)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_disk_that_fills_up_in_the_middle_of_an_entry(tmp_path, monkeypatch, after):
    """`after` rows pass, the next one is cut short, then there is no space left."""
    left, write = [after], os.pwrite

    def full(file, data, place):
        if threading.current_thread().name == "ranvier-lease":  # the heartbeat of another test's folder
            return write(file, data, place)
        left[0] -= 1
        if left[0] >= 0:
            return write(file, data, place)
        if left[0] == -1:
            return write(file, data[:len(data) // 2], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Cached(tmp_path) as cached:
        with monkeypatch.context() as patch:
            patch.setattr(cache_file.os, "pwrite", full)
            cached.right(0, 1, 2, 3)
        assert cached.right(0, 1, 2, 3) == ([(0, [*range(after, 4)])] if after else MISS)
        assert cached.cache.counts.written == after
        assert len(cached.told) == 1 and "No space left" in cached.told[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_must_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1


# ---------------------------------------------------------------------- what is left behind

@pytest.fixture
def unnamed(tmp_path, monkeypatch):
    """The cache's folder if none is set."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "ranvier-cache-run"


def test_the_folder_of_a_run_goes_with_the_last_rank_that_uses_it(unnamed):
    with Cached(None, Prefix(depth=2)) as one:
        one.right(0, 1)
        assert unnamed.stat().st_mode & 0o777 == 0o700
        with Cached(None, Prefix(depth=2), knows=True) as other, Cached(None, token="another") as third:
            third.right(0)
            assert other.right(0, 1) == HIT
        other.folder.remove()
        assert one.right(0, 1) == HIT and unnamed.exists()  # the first rank still uses it
    one.folder.remove()
    assert not unnamed.exists() and third.folder.path.exists()


def test_entries_of_other_weights_go_at_once(tmp_path):
    """Entries of other parts of the state stay."""
    with Cached(tmp_path) as cached, Cached(tmp_path, part="col 1") as other:
        other.right(0)
        for _ in range(3):
            cached.prefix.blocks[0][2].scale += 1
            cached.right(0)
            assert len(files(tmp_path)) == 2
        assert other.right(0) == HIT


def test_folders_that_no_run_holds_go_a_minute_after_their_last_file(unnamed):
    left, new = (RunFolder(None, token).path for token in ("left", "new"))
    left.mkdir()
    new.mkdir()
    with Cached(None, token="held") as held:
        held.right(0)
        for old in (left, held.folder.path):
            os.utime(old, (time.time() - 4000,) * 2)
        RunFolder(None, "another").acquire()
        assert [path.exists() for path in (left, new, held.folder.path)] == [False, True, True]


KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.elastic.cached import Cached
cached = Cached(None, token="killed")
cached.right(0, 1)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_what_killed_runs_left_goes_and_what_live_runs_hold_stays(unnamed, tmp_path):
    """The folder of a killed run is removed a minute after its last file was created."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    killed = RunFolder(None, "killed").path
    (tmp_path / "notes.txt").write_text("somebody's")

    def start_another(token):
        RunFolder(None, token).acquire()

    try:
        os.utime(killed, (time.time() - 4000,) * 2)
        start_another("a")
        assert killed.exists()  # the process lives
    finally:
        process.kill()
        process.communicate()
    os.utime(killed)
    start_another("b")
    assert killed.exists()
    os.utime(killed, (time.time() - 4000,) * 2)
    start_another("c")
    assert not killed.exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_of_somebody_else_is_not_used(unnamed, monkeypatch):
    unnamed.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with Cached(None) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "belongs to another user" in cached.told[0]


def test_a_link_in_place_of_the_folder_is_not_followed(unnamed, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    unnamed.symlink_to(tmp_path / "elsewhere")
    with Cached(None) as cached:
        assert cached.right(0) == MISS and len(cached.told) == 1
    assert not list((tmp_path / "elsewhere").iterdir())
