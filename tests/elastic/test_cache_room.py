"""The cache keeps its quota, lives with a full disk, and leaves nothing behind that nobody wants."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ranvier.elastic.cache import store as store_module
from ranvier.elastic.cache.store import Folder, RowFormat, Store, lock
from tests.elastic.cached import HIT, MISS, NUM_SAMPLES, Cached, Prefix

EVERY = [*range(NUM_SAMPLES)]
WIDE = 2000
"""Wide rows (40,000 bytes) have pages of their own; those of the plain prefix are packed."""
SLOT_BYTES = 40_960
PAGE_BYTES = 4096
SPARE_BYTES = (1 << 15) + 2500


def used(folder):
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def depths(folder):
    return len(list(folder.glob("*.bin")))


def can_punch(folder):
    """Whether this file system makes holes; where it does not, older entries go file by file."""
    store = Store.create(Folder(folder, 1 << 20), "cd" * 16, RowFormat.of(torch.zeros(1, WIDE * 5), "full"), "full", {})
    store.write(0, torch.zeros(WIDE * 20, dtype=torch.uint8).numpy())
    gone = store.free_slots([0]) and not store.has(0)
    store.close()
    Folder(folder, 1 << 20).remove("cd" * 16)
    return gone


# ---------------------------------------------------------------------- quota

def test_the_quota_holds_and_what_has_no_room_is_computed(tmp_path):
    quota = 10 * SLOT_BYTES + SPARE_BYTES + PAGE_BYTES
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota) as cached:
        for start in range(0, NUM_SAMPLES, 8):
            cached.right(*range(start, start + 8))
            assert used(tmp_path) <= quota
        counts = cached.cache.counts
        assert 8 <= counts.written <= 10 and counts.written + counts.unwritten == NUM_SAMPLES
        assert cached.right(*range(8)) == HIT
        first, = cached.right(*EVERY)
        assert first == (0, EVERY[counts.written:])
        told, = cached.told
        assert f"{quota:,} bytes" in told and "--elastic.cache-bytes" in told


def test_ranks_keep_one_quota_together(tmp_path):
    quota = 10 * SLOT_BYTES + SPARE_BYTES + PAGE_BYTES
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota) as one, \
            Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, part="col 1 of 2") as other:
        for start in range(0, NUM_SAMPLES, 4):
            one.right(*range(start, start + 4))
            other.right(*range(start, start + 4))
            assert used(tmp_path) <= quota
        assert one.cache.counts.written + other.cache.counts.written >= 8


@pytest.mark.parametrize("quota", [0, 1000, SPARE_BYTES])
def test_a_quota_that_holds_nothing(tmp_path, quota):
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1


def test_upgrades_take_the_place_of_what_they_were_made_from(tmp_path):
    """A quota for one depth is enough: each entry gives its room to its upgrade."""
    if not can_punch(tmp_path):
        pytest.skip("this file system makes no holes")
    quota = NUM_SAMPLES * SLOT_BYTES + SPARE_BYTES + 10 * PAGE_BYTES
    with Cached(tmp_path, Prefix(depth=2, width=WIDE), quota_bytes=quota) as cached:
        cached.right(*EVERY)
        for depth in (4, 6):
            cached.deepen(depth)
            for start in range(0, NUM_SAMPLES, 8):
                assert cached.right(*range(start, start + 8)) == [(depth - 2, None)]
                assert used(tmp_path) <= quota
            assert cached.right(*EVERY) == HIT
        assert cached.cache.counts.unwritten == 0 and not cached.told


def test_an_older_file_makes_room_for_samples_that_it_never_had(tmp_path):
    quota = 26 * SLOT_BYTES + SPARE_BYTES
    with Cached(tmp_path, Prefix(depth=2, width=WIDE), quota_bytes=quota) as cached:
        cached.right(*range(10))
        cached.deepen(4)
        cached.right(*range(10))
        assert depths(tmp_path) == 2
        cached.right(*range(10, 20))
        assert depths(tmp_path) == 1 and used(tmp_path) <= quota
        assert cached.right(*range(20)) == HIT and not cached.told


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_older_file_goes_when_all_of_it_is_upgraded_and_room_is_wanted(tmp_path, ranks):
    """Packed slots: entries cannot be given back one by one. The file goes when the last rank has let go of it."""
    quota = 7 * PAGE_BYTES + SPARE_BYTES  # a depth has two pages and one of its description: two depths, not three
    ends = [Cached(tmp_path, Prefix(depth=2), quota_bytes=quota) for _ in range(ranks)]
    for cached in ends:
        cached.right(*EVERY)
    for depth in (4, 6):
        for number, cached in enumerate(ends):
            cached.deepen(depth)
            assert cached.right(*EVERY) == (HIT if number else [(depth - 2, None)]) or depth == 6
            assert used(tmp_path) <= quota
    for cached in ends:
        assert cached.right(*EVERY) in (HIT, [(4, None)])
    if ranks == 1:
        assert depths(tmp_path) == 2 and not cached.told
    for cached in ends:
        cached.cache.close()


def test_an_older_file_stays_while_upgrades_need_it(tmp_path):
    quota = 5 * PAGE_BYTES + SPARE_BYTES  # the second depth has half of its entries
    with Cached(tmp_path, Prefix(depth=2), quota_bytes=quota) as cached:
        cached.right(*EVERY)
        cached.deepen(4)
        (first, _), *_ = cached.right(*EVERY)
        assert first == 2 and cached.cache.counts.unwritten > 0
        calls = cached.right(*EVERY)  # some hits, the others upgraded again
        assert calls[0][0] == 2 and len(calls) == 1 and 0 < len(calls[0][1] or EVERY) <= NUM_SAMPLES


def test_files_that_no_run_uses_make_room_the_oldest_first(tmp_path):
    quota = 3 * (10 * SLOT_BYTES + PAGE_BYTES) + SPARE_BYTES + PAGE_BYTES
    ten = range(10)
    for number in range(3):
        with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, fingerprint=f"run {number}") as cached:
            cached.right(*ten)
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > time.time() - 100:
                os.utime(path, (time.time() - 1000 + number,) * 2)
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, fingerprint="run 1") as held:
        assert held.right(*ten) == HIT
        with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, fingerprint="run 3") as cached:
            cached.right(*ten)
            assert cached.right(*ten) == HIT and used(tmp_path) <= quota
        assert held.right(*ten) == HIT
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, fingerprint="run 2") as cached:
        assert cached.right(*ten) == HIT  # run 0's were enough
    with Cached(tmp_path, Prefix(width=WIDE), quota_bytes=quota, fingerprint="run 0") as cached:
        assert cached.right(*ten) == MISS


def test_a_writer_that_does_not_let_go_is_not_waited_for(tmp_path, monkeypatch):
    with Cached(tmp_path) as cached:
        cached.right(0)
        file = os.open(tmp_path, os.O_RDONLY)
        assert lock(file, exclusive=True)
        monkeypatch.setattr(store_module, "_LOCK_TIMEOUT_SECONDS", 0.01)
        assert cached.right(1) == MISS and cached.cache.counts.unwritten == 1
        os.close(file)
        assert cached.right(1) == MISS and cached.right(1) == HIT


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
    """`after` writes pass (heads and payloads), the next one is cut short, then there is no space left."""
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


def test_a_folder_that_was_named_keeps_its_entries(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(0)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == HIT


def test_a_folder_that_nobody_named_goes_with_its_last_run(unnamed):
    with Cached(None, Prefix(depth=2)) as one:
        one.right(0, 1)
        assert unnamed.stat().st_mode & 0o777 == 0o700
        with Cached(None, Prefix(depth=2)) as other:
            other.right(0, 1)
            other.deepen(4)
            other.right(0, 1)
            assert depths(unnamed) == 2
        assert depths(unnamed) == 1  # the first run uses it still
        assert one.right(0, 1) == HIT
    assert not unnamed.exists()


def test_a_cache_that_another_one_follows_leaves_its_files(unnamed):
    """The stage is built anew, deeper, and what was kept is upgraded; the last one removes all."""
    before = Cached(None, Prefix(depth=2))
    before.right(0, 1)
    before.cache.close(keep=True)
    with Cached(None, Prefix(depth=4)) as after:
        assert after.right(0, 1) == [(2, None)]
    assert not unnamed.exists()


def test_entries_of_other_weights_go_at_once(unnamed):
    with Cached(None) as cached:
        cached.right(0)
        for _ in range(3):
            cached.prefix.blocks[0][2].scale += 1
            cached.right(0)
        assert depths(unnamed) == 1


KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.elastic.cached import Cached
for name in ("old", "fresh", "live"):
    cached = Cached(None, fingerprint=name)
    cached.right(0, 1)
if sys.argv[2] == "wait":
    print("ready", flush=True)
    sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_runs_left_goes_and_what_live_runs_hold_stays(unnamed, tmp_path):
    """An hour after it was written; until then the killed run may come back for it."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), "wait"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    keys = {}
    for name in ("old", "fresh", "live"):
        with Cached(None, fingerprint=name) as cached:
            assert cached.right(0, 1) == HIT  # entries of a run that lives are anybody's
            keys[name] = cached.cache._newest.key

    def age(*names):
        for name in names:
            for path in unnamed.glob(f"*{keys[name]}*"):
                os.utime(path, (time.time() - 4000,) * 2)

    (unnamed / f".{keys['old']}.json.{'0' * 12}").write_text("half a description")
    (unnamed / "notes.txt").write_text("somebody's")
    age("old", "fresh", "live")
    with Cached(None) as cached:
        cached.right(0)
        assert {path.stem for path in unnamed.glob("*.bin")} >= set(keys.values())  # the process lives
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        for path in unnamed.glob(f"*{keys['fresh']}*"):
            os.utime(path)
        with Cached(None, fingerprint="live") as live:
            assert live.right(0, 1) == HIT  # held by this one now, as old as it is
            with Cached(None, fingerprint="another") as other:
                other.right(0)
                assert not list(unnamed.glob(f"*{keys['old']}*"))
                assert len(list(unnamed.glob(f"{keys['fresh']}.*"))) == 2
                assert live.right(0, 1) == HIT
    assert (unnamed / "notes.txt").exists()


def test_a_folder_of_somebody_else_is_not_used(unnamed, tmp_path, monkeypatch):
    unnamed.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "ranvier-cache-12345").mkdir()
    with Cached(None) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "belongs to another user" in cached.told[0]


def test_a_link_in_place_of_the_folder_is_not_followed(unnamed, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    unnamed.symlink_to(tmp_path / "elsewhere")
    with Cached(None) as cached:
        assert cached.right(0) == MISS and len(cached.told) == 1
    assert not list(Path(tmp_path / "elsewhere").iterdir())


def test_a_file_that_is_removed_while_it_is_opened_is_made_again(tmp_path, monkeypatch):
    """The remover was between the name and the lock."""
    with Cached(tmp_path) as cached:
        cached.right(0)
    removed = []

    def remove_first(file, **how):
        if not removed:
            removed.extend(tmp_path.glob("*.bin"))
            removed[0].unlink()
        return lock(file, **how)

    monkeypatch.setattr(store_module, "lock", remove_first)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == MISS
        assert cached.right(0) == HIT
    assert removed and depths(tmp_path) == 1


def test_a_file_that_is_removed_whenever_it_is_made_is_given_up(tmp_path, monkeypatch):
    def remove(file, **how):
        for path in tmp_path.glob("*.bin"):
            path.unlink()
        return True

    monkeypatch.setattr(store_module, "lock", remove)
    with Cached(tmp_path) as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "removed whenever it is created" in cached.told[0]
