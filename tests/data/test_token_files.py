"""Token files: written completely or not at all, checked when opened, and prepared once for any number of processes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from ranvier.config.run import Data, Run, Transformer
from ranvier.data.arrays import Tokens, made_once, open_arrays, write_arrays, write_tokens
from ranvier.data.cache import PreparationProgress, one_writer, publish_file
from ranvier.data.prepare import prepare, problems
from ranvier.data.token_samples import TokenSamples
from tests.errors import check, raises


def write(path, ids, vocab=1000):
    with write_tokens(path, vocab=vocab, tokenizer="t", corpus="c") as append:
        for part in np.array_split(ids, 3):
            append(part.tolist())
    return Tokens(open_arrays(path))


@pytest.mark.parametrize(("vocab", "dtype", "bytes_each"),
                         [(1000, "uint16", 2), (65536, "uint16", 2), (65537, "uint32", 4)])
def test_numbers_come_back_in_the_smallest_type(tmp_path, vocab, dtype, bytes_each):
    ids = np.arange(vocab - 11, vocab)
    tokens = write(tmp_path / "train", ids, vocab)
    found = np.load(tmp_path / "train" / "tokens.npy")
    assert (found.dtype, found.tolist(), found.nbytes, tokens.vocab) == (dtype, ids.tolist(), 11 * bytes_each, vocab)
    assert tokens.sequences(np.array([0]), 10).tolist() == [ids.tolist()]
    assert tokens.head(3) == ids[:3].tolist()
    assert sorted(os.listdir(tmp_path / "train")) == ["about.json", "tokens.npy"]


@pytest.mark.parametrize(("count", "length", "expected"), [(11, 5, 2), (10, 5, 1), (6, 5, 1), (5, 5, 0), (0, 5, 0)])
def test_sequences_overlap_by_the_last_target(tmp_path, count, length, expected):
    tokens = write(tmp_path / "train", np.arange(count))
    assert tokens.num_sequences(length) == expected
    which = np.arange(expected)[::-1]
    assert tokens.sequences(which, length).tolist() == [list(range(i * length, (i + 1) * length + 1)) for i in which]


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), write_tokens(tmp_path / "train", vocab=9, tokenizer="", corpus="") as append:
        append([1, 2])
        raise KeyboardInterrupt
    assert os.listdir(tmp_path / "train") == []


def damage_size(folder):
    with open(folder / "tokens.npy", "ab") as file:
        file.write(b"x")


def damage_number(folder, number=1000):
    with open(folder / "tokens.npy", "r+b") as file:
        file.seek(np.load(folder / "tokens.npy", mmap_mode="r").offset)
        file.write(np.array([number], dtype="<u2").tobytes())


def instead_of_the_side_file(folder):
    (folder / "about.json").unlink()
    os.mkfifo(folder / "about.json")


def damage_side_file(folder):
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps(about | {"facts": {**about["facts"], "vocab": 2000}}))


@pytest.mark.parametrize(("damage", "error"), [
    (damage_size, ("tokens.npy", 168, 169)), (damage_number, ("tokens.npy",)),
    (instead_of_the_side_file, ("regular file",)), (damage_side_file, ("about.json",)),
    (lambda path: (path / "about.json").write_text("[" * 60_000), ()),
    (lambda path: (path / "tokens.npy").unlink(), ("tokens.npy",)),
    (lambda path: (path / "about.json").write_text("{"), ()),
    (lambda path: (path / "about.json").unlink(), ("about.json",)),
])
def test_damage_is_named_with_its_remedy(tmp_path, damage, error):
    write(tmp_path / "train", np.arange(20))
    damage(tmp_path / "train")
    with raises("cached-arrays-changed", *error, "Delete this folder"):
        Tokens(open_arrays(tmp_path / "train"))


def test_a_number_outside_the_vocabulary_is_named(tmp_path):
    with raises("token-file-beyond-vocabulary", "tokens.npy", 19):
        write(tmp_path / "train", np.arange(20), vocab=19)


def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path):
    """A read beyond the end of a mapped file would end all ranks by SIGBUS, which says nothing."""
    write(tmp_path / "train", np.arange(10_000) % 1000)
    tokens = Tokens(open_arrays(tmp_path / "train"))
    packed = TokenSamples(tokens, np.array([4]), np.array([9]), 4)
    os.truncate(tmp_path / "train" / "tokens.npy", 5000)
    for read in (lambda: tokens.sequences(np.array([1]), 4), lambda: packed.inputs(np.array([0])),
                 lambda: packed.targets(np.array([0])), lambda: tokens.head(1), lambda: tokens.documents(7)):
        with raises("token-file-size", "tokens.npy", 20_128, 5000):
            read()


def test_a_large_file_is_not_read_when_it_is_opened(tmp_path, monkeypatch):
    """But reading a number outside the vocabulary is an error."""
    monkeypatch.setattr("ranvier.data.arrays.MOST_READ_BYTES", 39)
    write(tmp_path / "train", np.arange(20))
    damage_number(tmp_path / "train")
    tokens = Tokens(open_arrays(tmp_path / "train"))
    assert tokens.sequences(np.array([1]), 4).tolist() == [[4, 5, 6, 7, 8]]
    for read in (lambda: tokens.sequences(np.array([1, 0]), 4), lambda: tokens.documents(7)):
        with raises("token-file-beyond-vocabulary", "tokens.npy", 1000):
            read()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("data-not-writable"), \
            publish_file(tmp_path / "file" / "train.bin"):
        pass
    with raises("data-not-writable"), one_writer(tmp_path / "file" / "x", print):
        pass


SOURCE = "def function_{0}(argument):\n    return argument * {0}\n\n\n"


def run(tmp_path, *, lines=3000, **settings):
    text = tmp_path / "text.py"
    if not text.exists():
        text.write_text("".join(SOURCE.format(number) for number in range(lines)))
    model = {"vocab": 400, "sequence": 16} | settings.pop("model", {})
    return Run(model=Transformer(**model), data=Data(corpus=str(text), cache_dir=tmp_path / "cache", **settings))


def test_prepared_once_then_taken_from_the_cache(tmp_path):
    lines = []
    first = prepare(run(tmp_path), lines.append)
    assert any("training a tokenizer" in line for line in lines) and any("tokenising" in line for line in lines)
    again = []
    second = prepare(run(tmp_path), again.append)
    assert again == []
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.vocab == 400
    text = (tmp_path / "text.py").read_text()
    train, held = (part.tokens.head(len(part.tokens)) for part in (first.train, first.eval))
    assert first.tokenizer.decode(train[:-1] + held[:-1]) == text
    assert 0.04 < len(held) / (len(train) + len(held)) < 0.06
    assert train[-1] == first.tokenizer.end


@pytest.mark.parametrize("other", [dict(max_bytes=50_000), dict(model={"vocab": 300})])
def test_other_settings_make_other_files(tmp_path, other):
    assert prepare(run(tmp_path)).fingerprint != prepare(run(tmp_path, **other)).fingerprint


def test_sequence_and_mesh_share_the_files(tmp_path):
    assert prepare(run(tmp_path)).fingerprint == prepare(run(tmp_path, model={"sequence": 8})).fingerprint


def test_the_fingerprint_is_that_of_the_text_not_of_the_file(tmp_path):
    elsewhere = tmp_path / "another machine"
    elsewhere.mkdir()
    first = prepare(run(tmp_path))
    run(elsewhere)
    os.utime(elsewhere / "text.py", (1, 1))
    second = prepare(run(elsewhere))
    assert second.fingerprint == first.fingerprint
    assert second.train.tokens.folder != first.train.tokens.folder


def test_a_changed_text_is_read_again(tmp_path):
    before = prepare(run(tmp_path)).fingerprint
    (tmp_path / "text.py").write_text("x = 1\n" * 5000)
    assert prepare(run(tmp_path)).fingerprint != before


PREPARE = """
import sys
from ranvier.data.prepare import prepare
from ranvier.config.run import Transformer, Data, Run
run = Run(model=Transformer(vocab=400, sequence=16), data=Data(corpus=sys.argv[1], cache_dir=sys.argv[2]))
prepared = prepare(run, print)
print("fingerprint", prepared.fingerprint, len(prepared.train))
"""


@pytest.mark.slow
def test_processes_that_ask_at_once_share_one_preparation(tmp_path):
    run(tmp_path)
    arguments = [sys.executable, "-c", PREPARE, str(tmp_path / "text.py"), str(tmp_path / "cache")]
    started = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum("tokenising" in output for output in outputs) == 1
    assert sum("training a tokenizer" in output for output in outputs) == 1


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_a_killed_writer_has_left_is_removed(tmp_path, monkeypatch, has_locks):
    """Unless the file system has no locks, so that another process may still be writing it."""
    left = tmp_path / "train" / f".input.npy.{'0a' * 6}"
    left.parent.mkdir()
    left.write_bytes(b"0")
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat(tmp_path / "missing"))
    made_once(tmp_path, lambda: [write_arrays(tmp_path / name, {"input": np.zeros((1, 2), np.int32)}, {})
                                 for name in ("train", "eval")], lambda line: None)
    assert left.exists() != has_locks


def test_a_waiting_process_says_so(tmp_path):
    import threading

    entered, leave, lines = threading.Event(), threading.Event(), []

    def hold():
        with one_writer(tmp_path / "train", lines.append):
            entered.set()
            leave.wait(10)

    def waits(line):
        lines.append(line)
        leave.set()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    with one_writer(tmp_path / "train", waits):
        holder.join(10)
    line, = lines
    assert re.fullmatch(rf"process {os.getpid()} on \S+ \(since [\d-]+ [\d:]+ UTC\) is preparing train: .*", line)


@pytest.mark.parametrize("own", [True, False])
def test_a_wait_is_told_only_for_a_stranger(tmp_path, own):
    """The ranks of a run wait silently for the rank that prepares the data; only a wait for another process is
    logged."""
    program = ("import sys\nfrom pathlib import Path\nfrom ranvier.data.cache import one_writer, process_name\n"
               "with one_writer(Path(sys.argv[1]), print):\n    print(process_name(), flush=True)\n    input()\n")
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "train")], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    name, asked, lines = holder.stdout.readline().strip(), [], []

    def is_own(process):
        asked.append(process)
        holder.stdin.close()  # the end of input raises an error in the holder, which releases the lock
        return own

    with one_writer(tmp_path / "train", PreparationProgress(tell=lines.append, is_own=is_own)):
        pass
    holder.wait(20)
    holder.stdout.close()
    assert asked == [name]
    assert len(lines) == (0 if own else 1)
    assert all(line.startswith(f"process {holder.pid} on ") for line in lines)


def test_every_problem_that_shows_without_reading_is_listed():
    bad = Run(model=Transformer(vocab=100), data=Data(corpus="./nowhere"))
    assert [problem.where for problem in problems(bad)] == ["data.corpus", "model.vocab"]
    small = Run(model=Transformer(vocab=1024), data=Data(tokenizer="gpt2"))
    problem, = problems(small)
    check(problem, "vocab-too-small", 50257, where="model.vocab", value=1024)
    assert problems(Run()) == []
    with raises("corpus-missing"):
        prepare(bad)


def test_too_little_text_is_said_with_its_amount(tmp_path):
    with raises("too-little-text", "held-out", 500):
        prepare(run(tmp_path, lines=50, model={"sequence": 500}))
