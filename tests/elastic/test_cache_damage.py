"""Whatever a disk, a stranger or a killed writer leaves in the folder causes a miss, never a wrong entry or a crash."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier.elastic.cache_file import CHECKSUM_BYTES, CacheFile, RowFormat, RunFolder
from tests.covering import examples
from tests.elastic.cached import HIT, MISS, Cached, Prefix, files

EXAMPLES = settings(examples(24), suppress_health_check=list(HealthCheck))


@pytest.fixture
def written(tmp_path):
    """A folder with entries of samples 0 to 3 at depths 2 and 4, and its files' bytes."""
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1, 2, 3)
        cached.deepen(4)
        cached.right(0, 1)
    return tmp_path, {path: path.read_bytes() for path in files(tmp_path)}


def restore(contents):
    for path, data in contents.items():
        path.write_bytes(data)


@given(data=st.data())
@EXAMPLES
def test_changed_bytes_anywhere_are_misses(written, data):
    """Up to eight bytes of either file, in checksums and payloads."""
    folder, contents = written
    restore(contents)
    for _ in range(data.draw(st.integers(1, 8))):
        path = data.draw(st.sampled_from(sorted(contents)))
        place = data.draw(st.integers(0, len(contents[path]) - 1))
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(bytes([data.draw(st.integers(0, 255))]))
    with Cached(folder, knows=True) as cached:
        cached.right(3, 0, 1, 2)
        assert cached.right(3, 0, 1, 2) == HIT  # damaged entries have been written again
        assert not cached.told


def test_every_single_changed_byte_of_a_row_is_noticed(tmp_path):
    """Exhaustive over checksum and payload."""
    with Cached(tmp_path, Prefix(width=1)) as cached:
        cached.right(0, 1)
        path, store = files(tmp_path)[0], cached.cache._newest
        for place in range(int(store._starts[1]), int(store._starts[2])):
            with open(path, "r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
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
    with Cached(folder, knows=True) as cached:
        cached.right(3, 0, 1, 2)
        assert cached.right(3, 0, 1, 2) == HIT


def test_a_file_that_is_cut_off_while_it_is_read_from(tmp_path):
    """Another process truncates the file: a short read, no SIGBUS."""
    with Cached(tmp_path) as cached:
        cached.right(0, 1, 2, 3)
        os.truncate(files(tmp_path)[0], 200)
        assert cached.right(0, 3) != HIT
        assert cached.right(0, 3) == HIT


def test_rows_of_another_file_or_sample(tmp_path):
    """A row's checksum covers the key and the row's number."""
    with Cached(tmp_path / "a") as one, Cached(tmp_path / "b", part="other") as other:
        one.right(0, 1)
        other.right(0, 1)
        path = files(tmp_path / "a")[0]
        whole, size = path.read_bytes(), int(one.cache._newest._sizes[0])
        path.write_bytes(files(tmp_path / "b")[0].read_bytes())
        assert one.right(0, 1) == MISS
        path.write_bytes(whole[size:] + whole[:size])
        assert one.right(0, 1) == MISS


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
def test_things_that_are_no_files(written, instead):
    """The cache never waits for a pipe and never writes through a link."""
    folder, contents = written
    for path in files(folder):
        instead(path)
    with Cached(folder, knows=True) as cached:
        for _ in range(2):
            cached.right(3, 0, 1, 2)
    for path in folder.glob("*/*.elsewhere"):
        assert path.read_bytes() == contents[path.with_suffix(".rows")]


def test_a_folder_that_cannot_be_made_or_goes_away(tmp_path):
    (tmp_path / "file").write_text("")
    with Cached(tmp_path / "file") as cached:
        assert cached.right(0) == MISS and cached.right(0) == MISS
        assert len(cached.told) == 1 and "cannot be used" in cached.told[0]
    with Cached(tmp_path / "cache") as cached:
        cached.right(0)
        shutil.rmtree(tmp_path / "cache")
        assert cached.right(0, 1) == [(0, [1])]
        assert not cached.told


# ---------------------------------------------------------------------- several processes

WRITER = """
import os, random, sys, numpy as np
from pathlib import Path
from tests.elastic.test_cache_damage import BIG, CHECKSUM_BYTES, opened

def write(folder, samples, seed):
    _, store = opened(folder, samples)
    choose = random.Random(seed)
    while True:
        sample, text = choose.randrange(samples), choose.randrange(1 << 40)
        row = np.full(BIG.record_bytes // 8, text * 64 + sample, dtype=np.int64)
        store.write(sample, np.concatenate([np.zeros(CHECKSUM_BYTES, np.uint8), row.view(np.uint8)]))

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
"""A process whose children write entries again and again, each filled with one number that contains the sample's."""
BIG = RowFormat.from_state(torch.zeros(1, 1 << 16, dtype=torch.int64), "full", count=1)
"""Rows of half a megabyte: a signal comes while one is being written."""


def opened(folder, samples):
    run = RunFolder(folder, "run")
    run.acquire()
    return run, CacheFile(run, "ab" * 16, 1, BIG, np.ones(samples, np.int64), 1 << 30, creates=True)


def check(store, samples):
    """Check that every entry that can be read is complete and its sample's own; returns their number."""
    places, rows = store.read(range(samples))
    payload = rows[:, CHECKSUM_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.int64)
    for place, row in zip(places.tolist(), payload, strict=True):
        assert (row == row[0]).all() and int(row[0]) % 64 == place
    return len(places)


def kill_writers(folder, rounds, samples=12):
    """Repeatedly kill two concurrent writers at a random moment while all entries are read; returns how many entries
    were incomplete afterwards, and how many complete."""
    run, store = opened(folder / "cache", samples)
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
        run.remove()
    return torn, whole


@pytest.mark.slow
def test_killed_writers_leave_whole_entries_or_none(tmp_path):
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
    """States are bit-identical to uncached ones, even if one process is deeper and removes the other's files."""
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
    assert 120 <= written <= 240  # 40 samples at 3 depths; what both computed at the same time was written twice
