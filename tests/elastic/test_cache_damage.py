"""Whatever a disk, a stranger or a killed writer leaves in the folder: a miss, never a wrong entry or a crash."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier.elastic.cache.store import HEADER_BYTES, RowFormat, RunFolder, Store
from tests.elastic.cached import HIT, MISS, Cached, Prefix, files

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def written(tmp_path):
    """A folder with entries of samples 0 to 3 at depths 2 and 4, and its files' bytes."""
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1, 2, 3)
        cached.deepen(4)
        cached.right(0, 1)
    return tmp_path, {path: path.read_bytes() for path in files(tmp_path, "*")}


def restore(contents):
    for path, data in contents.items():
        path.write_bytes(data)


@given(data=st.data())
@EXAMPLES
def test_changed_bytes_anywhere_are_misses(written, data):
    """Up to eight bytes of any of the four files, in checksums, payloads, between slots, in descriptions."""
    folder, contents = written
    restore(contents)
    for _ in range(data.draw(st.integers(1, 8))):
        path = data.draw(st.sampled_from(sorted(contents)))
        place = data.draw(st.integers(0, len(contents[path]) - 1))
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(bytes([data.draw(st.integers(0, 255))]))
    with Cached(folder) as cached:
        cached.right(3, 0, 1, 2)
        assert cached.right(3, 0, 1, 2) == HIT  # damaged files and entries have been made again
        assert not cached.told


def test_every_single_changed_byte_of_a_slot_is_noticed(tmp_path):
    """Exhaustive over checksum and payload; bytes that only fill up are not looked at."""
    with Cached(tmp_path, Prefix(width=1)) as cached:
        cached.right(0, 1)
        path, store = files(tmp_path, "bin")[0], cached.cache._newest
        for place in [*range(4), *range(HEADER_BYTES, store.stride)]:
            with open(path, "r+b") as file:
                file.seek(store.stride + place)
                byte = file.read(1)[0]
                file.seek(store.stride + place)
                file.write(bytes([byte ^ 0x10]))
            assert cached.right(1, 0) == [(0, [0])], place
            assert cached.right(1, 0) == HIT


@given(data=st.data())
@EXAMPLES
def test_files_that_end_early_or_are_replaced(written, data):
    folder, contents = written
    restore(contents)
    for path in data.draw(st.lists(st.sampled_from(sorted(contents)), min_size=1, unique=True)):
        other = contents[data.draw(st.sampled_from(sorted(contents)))]
        new = data.draw(st.sampled_from([b"", b"\0" * 5000, other, contents[path] + other, b"x" * 300_000,
                                         contents[path][:data.draw(st.integers(0, len(contents[path])))]]))
        path.write_bytes(new)
    with Cached(folder) as cached:
        cached.right(3, 0, 1, 2)
        assert cached.right(3, 0, 1, 2) == HIT


def test_a_file_that_is_cut_off_while_it_is_read_from(tmp_path):
    """Another process truncates it: a short read, no SIGBUS."""
    with Cached(tmp_path) as cached:
        cached.right(0, 1, 2, 3)
        os.truncate(files(tmp_path, "bin")[0], 200)
        assert cached.right(0, 3) != HIT
        assert cached.right(0, 3) == HIT


def test_entries_of_another_file_under_this_name(tmp_path):
    """Slots know their key and their number."""
    with Cached(tmp_path / "a") as one, Cached(tmp_path / "b", fingerprint="other") as other:
        one.right(0, 1)
        other.right(0, 1)
        path = files(tmp_path / "a", "bin")[0]
        whole = path.read_bytes()
        path.write_bytes(files(tmp_path / "b", "bin")[0].read_bytes())
        assert one.right(0, 1) == MISS
        stride = one.cache._newest.stride
        path.write_bytes(whole[stride:stride * 2].ljust(stride, b"\0") + whole[:stride])
        assert one.right(0, 1) == MISS


def checked(form):
    return json.dumps([zlib.crc32(json.dumps(form).encode()), form])


@pytest.mark.parametrize("text", [
    "", "\0", "5", "[5, [null, []]]", "9" * 5000, "x" * 300_000, "[" * 100_000, "[]", checked(None), checked([None]),
    checked([None, []]), checked([None, 5]), checked([None, [["", [5, 6]]]]), checked([None, [["", [5], "complex64"]]]),
    checked([None, [["", ["x"], "float32"]]]), checked([None, [["", [-1], "float32"]]]),
    checked([None, [["", [1 << 39] * 3, "float64"]]]), checked([None, [["x", [1], "float32"]] * 2000])], ids=range(18))
def test_descriptions_that_are_damaged(written, text):
    folder, _ = written
    for path in files(folder, "json"):
        path.write_text(text)
    with Cached(folder) as cached:
        cached.right(3, 0, 1, 2)
        assert cached.right(3, 0, 1, 2) == HIT
        assert not cached.told


def test_a_description_of_another_form(written):
    """As whole as ours, but of states that this run does not have."""
    folder, _ = written
    for path in files(folder, "json"):
        path.write_text(checked([None, [["", [5, 7], "float32"]]]))
    with Cached(folder) as cached:
        for _ in range(2):
            assert cached.right(3, 0, 1, 2) == MISS
        assert len(cached.told) == 1 and "shapes differ" in cached.told[0]


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def link(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("instead", [fifo, folder_instead, link])
@pytest.mark.parametrize("end", ["bin", "json"])
def test_things_that_are_no_files(written, instead, end):
    """Nothing waits for a pipe, and nothing is written through a link."""
    folder, contents = written
    for path in files(folder, end):
        instead(path)
    with Cached(folder) as cached:
        for _ in range(2):
            cached.right(3, 0, 1, 2)
    for path in files(folder, "elsewhere"):
        assert path.read_bytes() == contents[path.with_suffix(f".{end}")]


def test_a_folder_that_cannot_be_made_or_goes_away(tmp_path):
    (tmp_path / "file").write_text("")
    with Cached(tmp_path / "file") as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "cannot be used" in cached.told[0]
    with Cached(tmp_path / "cache") as cached:
        cached.right(0)
        shutil.rmtree(tmp_path / "cache")
        assert cached.right(0, 1) == [(0, [1])]
        assert len(cached.told) == 1


# ---------------------------------------------------------------------- several processes

WRITER = """
import os, random, sys, numpy as np
from pathlib import Path
from tests.elastic.test_cache_damage import BIG, KEY
from ranvier.elastic.cache.store import RunFolder, Store

def write(folder, samples, seed):
    run = RunFolder(folder, "run", 1 << 30)
    run.acquire()
    store = Store.create(run, KEY, 1, BIG, None)
    choose = random.Random(seed)
    while True:
        sample, text = choose.randrange(samples), choose.randrange(1 << 40)
        row = np.full(BIG.payload_bytes // 8, text * 64 + sample, dtype=np.int64)
        store.write(sample, row.view(np.uint8))

for line in sys.stdin:
    pids = []
    for which in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            write(Path(sys.argv[1]), int(sys.argv[2]), 2 * int(line) + which)
    print(*pids, flush=True)
    for pid in pids:
        os.waitpid(pid, 0)
    print("gone", flush=True)
"""
"""A process whose children write entries of one number each, whose last digits are the sample's, over and over."""
KEY = "ab" * 16
BIG = RowFormat.of(torch.zeros(1, 1 << 16, dtype=torch.int64), "full")
"""Rows of half a megabyte: a signal comes while one is being written."""


def check(store, samples):
    """Every entry that can be read is whole and its sample's own; how many there are."""
    entries = store.read(range(samples))
    for place, row in zip(
            entries.places.tolist(), entries.slots.view(torch.int64)[:, HEADER_BYTES // 8:], strict=True):
        assert (row == row[0]).all() and int(row[0]) % 64 == place
    return len(entries.places)


def kill_writers(folder, rounds, samples=12):
    """Two writers at once, killed at a random moment, again and again, while all is read; how many entries were not
    whole afterwards, and how many were."""
    run = RunFolder(folder / "cache", "run", 1 << 30)
    run.acquire()
    store = Store.create(run, KEY, 1, BIG, None)
    mother = subprocess.Popen([sys.executable, "-c", WRITER, str(folder / "cache"), str(samples)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    torn = whole = 0
    try:
        for number in range(rounds):
            mother.stdin.write(f"{number}\n")
            mother.stdin.flush()
            pids = [int(pid) for pid in mother.stdout.readline().split()]
            until = time.monotonic() + 0.05 + 0.017 * (number % 7)
            try:
                while time.monotonic() < until:
                    check(store, samples)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            assert mother.stdout.readline() == "gone\n"
            there = check(store, samples)
            torn, whole = torn + samples - there, whole + there
    finally:
        mother.stdin.close()
        mother.wait(20)
        mother.stdout.close()
        store.close()
        run.release()
    return torn, whole


def test_killed_writers_leave_whole_entries_or_none(tmp_path):
    _, whole = kill_writers(tmp_path, rounds=8)
    assert whole > 0


@pytest.mark.slow
def test_writers_killed_at_many_moments(tmp_path):
    torn, whole = kill_writers(tmp_path, rounds=200)
    assert torn > 0 and whole > 0


RUN = """
import sys, torch
from pathlib import Path
from tests.elastic.cached import Cached, Prefix
torch.set_num_threads(1)
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
order = torch.Generator().manual_seed(seed)
with Cached(folder, Prefix(depth=2)) as cached:
    print("ready", flush=True)
    sys.stdin.readline()
    for depth in (2, 4, 6):
        cached.deepen(depth)
        for _ in range(60):
            samples = [torch.randint(0, 40, (6,), generator=order).tolist() for _ in range(3)]
            cached.cache.prefetch([torch.tensor(each) for each in samples])
            for each in samples:
                cached.right(*each)
    counts = cached.cache.counts
    print(counts.hits, counts.upgraded, counts.misses, counts.written, cached.told, flush=True)
"""


@pytest.mark.slow
def test_processes_that_write_and_read_at_once(tmp_path):
    """Every state equals the plain one to the bit, also where one is at another depth and removes the other's files."""
    pair = [subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), str(seed)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True) for seed in range(2)]
    for process in pair:
        assert process.stdout.readline() == "ready\n"
    for process in pair:
        process.stdin.write("go\n")
        process.stdin.flush()
    written = 0
    for process in pair:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        hits, upgraded, misses, wrote, rest = told.split(maxsplit=4)
        assert rest.strip() == "[]" and int(hits) > 5 * (int(upgraded) + int(misses))
        written += int(wrote)
    assert 120 <= written <= 240  # 40 samples at 3 depths; what both computed at once was written twice
