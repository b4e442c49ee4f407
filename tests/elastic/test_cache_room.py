"""The cache keeps its limit, lives with a full disk, and leaves nothing behind that nobody wants."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ranvier.elastic.cache import store as store_module
from ranvier.elastic.cache.store import RunFolder
from tests.elastic.cached import HIT, MISS, NUM_SAMPLES, Cached, Prefix, files

EVERY = [*range(NUM_SAMPLES)]
WIDE = 2000
"""Wide rows (40,000 bytes) have pages of their own; those of the plain prefix are packed."""
SLOT_BYTES = 40_960
PAGE_BYTES = 4096
SPARE_BYTES = 4 * PAGE_BYTES


def used(folder):
    return sum(512 * path.stat().st_blocks for path in files(folder, "*"))


# ---------------------------------------------------------------------- the limit

@pytest.mark.parametrize("ranks", [1, 2])
def test_the_limit_holds_and_what_has_no_room_is_computed(tmp_path, ranks):
    """The ranks of a machine have one limit together."""
    most = 10 * SLOT_BYTES + SPARE_BYTES
    ends = [Cached(tmp_path, Prefix(width=WIDE), max_bytes=most, part=f"col {rank}") for rank in range(ranks)]
    for start in range(0, NUM_SAMPLES, 4):
        for cached in ends:
            cached.right(*range(start, start + 4))
            assert used(tmp_path) <= most
    counts = [cached.cache.counts for cached in ends]
    assert 8 <= sum(each.written for each in counts) <= 10
    assert all(each.written + each.unwritten == NUM_SAMPLES for each in counts)
    for cached in ends:
        assert cached.right(*range(4)) == HIT
        first, = cached.right(*EVERY)
        assert first == (0, EVERY[cached.cache.counts.written:])
        told, = cached.told
        assert f"{most:,} bytes" in told and "--elastic.cache-bytes" in told
        cached.cache.close()


@pytest.mark.parametrize("most", [0, 1000, SPARE_BYTES])
def test_a_limit_that_holds_nothing(tmp_path, most):
    with Cached(tmp_path, Prefix(width=WIDE), max_bytes=most) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1


def test_entries_of_the_depth_before_make_room(tmp_path):
    """What was not upgraded yet is computed again, once."""
    most = 30 * SLOT_BYTES + SPARE_BYTES
    with Cached(tmp_path, Prefix(depth=2, width=WIDE), max_bytes=most) as cached:
        cached.right(*range(20))
        cached.deepen(4)
        assert cached.right(*range(8)) == [(2, None)] and used(tmp_path) <= most
        assert cached.right(*range(8, 16)) == [(2, None)] and used(tmp_path) <= most
        assert cached.right(*range(16, 20)) == MISS
        assert cached.right(*range(20)) == HIT
        assert cached.cache.counts.unwritten == 0 and not cached.told


# ---------------------------------------------------------------------- a disk that is full

def test_files_that_cannot_grow(tmp_path):
    """The entries until then stay; the run goes on and is told once."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Cached(tmp_path, Prefix(width=WIDE)) as cached:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SLOT_BYTES + 100, before[1]))
        try:
            for _ in range(3):
                cached.right(*EVERY)
            assert cached.right(0, 1, 2) == HIT and cached.right(3) == MISS
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(cached.told) == 1 and "the disk does not take it" in cached.told[0]
        counts = cached.cache.counts
        assert counts.written == 3 and counts.unwritten == 3 * (NUM_SAMPLES - 3) + 1


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5])
def test_a_disk_that_fills_up_in_the_middle_of_an_entry(tmp_path, monkeypatch, after):
    """`after` writes pass (payloads and checksums), the next one is cut short, then there is no space left."""
    left, write = [after], os.pwrite

    def full(file, data, place):
        left[0] -= 1
        if left[0] >= 0:
            return write(file, data, place)
        if left[0] == -1:
            return write(file, data[:len(data) // 2], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Cached(tmp_path) as cached:
        with monkeypatch.context() as patch:
            patch.setattr(store_module.os, "pwrite", full)
            cached.right(0, 1, 2, 3)
        calls = cached.right(0, 1, 2, 3)
        assert calls == ([(0, [*range(after // 2, 4)])] if after // 2 else MISS)
        assert cached.cache.counts.written == after // 2
        assert len(cached.told) == 1 and "No space left" in cached.told[0]
    with Cached(tmp_path) as cached:
        cached.right(0, 1, 2, 3)
        assert cached.right(0, 1, 2, 3) == HIT


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_must_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1


# ---------------------------------------------------------------------- what is left behind

@pytest.fixture
def unnamed(tmp_path, monkeypatch):
    """Where the cache is when nobody names a folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ranvier-cache-{os.getuid()}"


def test_a_later_start_of_a_run_finds_its_entries(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(0)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == HIT


def test_the_folder_of_a_run_goes_with_the_last_rank_that_uses_it(unnamed):
    with Cached(None, Prefix(depth=2)) as one:
        one.right(0, 1)
        assert unnamed.stat().st_mode & 0o777 == 0o700
        with Cached(None, Prefix(depth=2)) as other, Cached(None, run="another") as third:
            third.right(0)
            assert other.right(0, 1) == HIT
        other.folder.remove()
        assert one.right(0, 1) == HIT and one.folder.path.exists()  # the first rank uses it still
    one.folder.remove()
    assert not one.folder.path.exists() and third.folder.path.exists()
    third.folder.remove()
    assert not unnamed.exists()


def test_entries_of_other_weights_go_at_once(tmp_path):
    """Those of other parts of the state stay."""
    with Cached(tmp_path) as cached, Cached(tmp_path, part="col 1") as other:
        other.right(0)
        for _ in range(3):
            cached.prefix.blocks[0][2].scale += 1
            cached.right(0)
            assert len(files(tmp_path, "bin")) == len(files(tmp_path, "json")) == 2
        assert other.right(0) == HIT


KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.elastic.cached import Cached
cached = Cached(None, run="killed")
cached.right(0, 1)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_what_killed_runs_left_goes_and_what_live_runs_hold_stays(unnamed, tmp_path):
    """An hour after it was written; until then the killed run may come back for it."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    killed = RunFolder(None, "killed", 0).path
    (unnamed / "notes.txt").write_text("somebody's")

    def start_another():
        with Cached(None, run="another") as cached:
            cached.right(0)

    try:
        os.utime(killed, (time.time() - 4000,) * 2)
        start_another()
        assert killed.exists()  # the process lives
    finally:
        process.kill()
        process.communicate()
    os.utime(killed)
    start_another()
    assert killed.exists()
    os.utime(killed, (time.time() - 4000,) * 2)
    start_another()
    assert not killed.exists()
    assert (unnamed / "notes.txt").exists()


def test_a_folder_of_somebody_else_is_not_used(unnamed, tmp_path, monkeypatch):
    unnamed.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "ranvier-cache-12345").mkdir()
    with Cached(None) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "belongs to another user" in cached.told[0]


@pytest.mark.parametrize("run", [False, True])
def test_a_link_in_place_of_the_folder_is_not_followed(unnamed, tmp_path, run):
    (tmp_path / "elsewhere").mkdir()
    if run:
        unnamed.mkdir(mode=0o700)
    (RunFolder(None, "run", 0).path if run else unnamed).symlink_to(tmp_path / "elsewhere")
    with Cached(None) as cached:
        assert cached.right(0) == MISS and len(cached.told) == 1
    assert not list(Path(tmp_path / "elsewhere").iterdir())
