"""Checkpoints are complete or absent; failures to write are reported, and older checkpoints stay."""

import json
import os
import re
import resource
import shutil
import stat
import subprocess
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ranvier.checkpoint import checkpoints as module
from ranvier.checkpoint import files
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import MANIFEST, Saved, find, read_manifest
from ranvier.comm.board import Board
from ranvier.config.run import Optim
from ranvier.errors import CheckpointError, OwnershipError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.system.lease import Lease, Owner
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import assert_same, engine_on, everything, on, train, write_manifest
from tests.errors import raises


def save_steps(folder, steps=1, mesh=None, **options):
    """Save a checkpoint after each of `steps` steps; returns the results of the saves."""
    def work(engine):
        checkpoints = Checkpoints(engine, folder, **options)
        told = []
        for _ in range(steps):
            train(engine, 1)
            checkpoints.save()
            told += checkpoints.wait()
        return told

    return on(mesh or Mesh(), work)[0]


def load(folder, mesh=None, path=None):
    """Load on each rank: the result of the load, and the steps that the engine has taken."""
    return on(mesh or Mesh(), lambda engine: (Checkpoints(engine, folder).load(path), engine.steps))[0]


def names(folder):
    """Names of the folder's entries; temporary folders without their random part."""
    return sorted(re.sub(r"^(\.step-\d+)\..*\.tmp$", r"\1.tmp", path.name) for path in folder.iterdir()
                  if not path.name.startswith(".owner."))


@pytest.mark.parametrize(("options", "kept"), [
    ({"keep": 2}, ["step-4", "step-5"]), ({"keep": 1, "keep_every": 2}, ["step-2", "step-4", "step-5"])])
def test_the_newest_stay_and_those_of_some_steps(tmp_path, options, kept):
    save_steps(tmp_path, 5, **options)
    assert names(tmp_path) == kept


def test_newer_ones_of_another_beginning_are_told_of(tmp_path):
    """After going back on purpose, the next automatic resume would use the newer checkpoints of the earlier course."""
    save_steps(tmp_path, 3)
    (tmp_path / "step-3" / "part-00000.safetensors").unlink()

    def work(engine, path):
        checkpoints = Checkpoints(engine, tmp_path)
        with warnings.catch_warnings(record=True) as found:
            checkpoints.load(path)
            for _ in range(2):
                train(engine, 1)
                checkpoints.save()
                checkpoints.wait()
        return [str(one.message) for one in found]

    assert on(Mesh(), lambda engine: work(engine, None)) == [[]]  # no warning about a damaged one
    (told,), = on(Mesh(), lambda engine: work(engine, tmp_path / "step-2"))
    assert "step-3 is saved next to newer checkpoints" in told and ": step-4 in" in told


def test_damaged_ones_do_not_count_as_kept(tmp_path, monkeypatch):
    """The run resumes from before them, and fails to write one of them again, so the undamaged checkpoint must stay."""
    save_steps(tmp_path, 4, keep=4)
    for step in (3, 4):
        (tmp_path / f"step-{step}" / "part-00000.safetensors").unlink()
    write = files.write_part

    def no_third(path, tensors):
        if ".step-3." in str(path):
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path, keep=2)
        assert checkpoints.load().step == 2
        monkeypatch.setattr(files, "write_part", no_third)
        told = []
        for _ in range(3):
            train(engine, 1)
            checkpoints.save()
            told += [(one.step, one.error) for one in checkpoints.wait()]
            if engine.steps == 4:
                assert names(tmp_path) == ["step-2", "step-3", "step-4"]
        return told

    assert on(Mesh(), work)[0] == [(3, "No space left on device (rank 0)"), (4, None), (5, None)]
    assert names(tmp_path) == ["step-4", "step-5"]


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    """The writer is delayed while steps are taken; the written state is that at the call."""
    hold, write = threading.Event(), files.write_part

    def held_up(path, tensors):
        assert hold.wait(60)
        return write(path, tensors)

    monkeypatch.setattr(files, "write_part", held_up)

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path / "held up")
        train(engine, 1)
        checkpoints.save()
        train(engine, 2)
        assert checkpoints.written() == [] and not (tmp_path / "held up" / "step-1").exists()
        checkpoints.broadcast_from_rank0("")  # not before the other rank has also looked
        hold.set()
        return checkpoints.wait()

    for told in on(Mesh(data=2), work):
        assert [(one.step, one.error) for one in told] == [(1, None)]
    save_steps(tmp_path / "plain", 1, Mesh(data=2))
    assert_same(everything(tmp_path / "held up" / "step-1"), everything(tmp_path / "plain" / "step-1"))


def test_gradients_that_no_step_has_applied_are_told_of(tmp_path):
    """Checkpoints have no gradients: a run that resumes between two batches of one step loses those of the first
    batch."""
    def rank(world):
        model, loss = torch.nn.Linear(2, 1), (lambda outputs, targets: (outputs.sum(), targets.numel()))
        x, said = [(torch.ones(1, 2), torch.ones(1, 1))], []
        for optimizer in (partial(torch.optim.SGD, lr=0.1), None):
            engine = Engine([model], world, loss=loss, optimizer=optimizer)
            checkpoints = Checkpoints(engine, tmp_path / str(bool(optimizer)))
            for zeroes in (False, False, True):
                result = engine.forward_backward(x)
                if zeroes:
                    for parameter in engine.parameters():
                        parameter.grad = None
                with warnings.catch_warnings(record=True) as found:
                    checkpoints.save()
                said += [str(one.message) for one in found]
            if optimizer:
                engine.forward_backward(x)
                engine.step(result)
                checkpoints.save()
            checkpoints.close()
            engine.close()
        return said

    first, second = run_ranks(rank, 1)[0]
    assert "step 1 is without the gradients of the last batch" in first and "the last 2 batches" in second


def test_without_a_background_training_waits_and_nothing_is_copied(tmp_path, monkeypatch):
    """When `save` returns, the same files exist, except for the name that they get when all ranks have written; errors
    of a rank are reported as usual."""
    threads, write = [], files.write_part

    def noted(path, tensors):
        threads.append(threading.current_thread())
        if ".step-2." in str(path) and "00001" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(files, "write_part", noted)

    def work(engine):
        rank = threading.current_thread()
        kept = Checkpoints(engine, tmp_path / "background")
        direct = Checkpoints(engine, tmp_path / "direct", background=False)
        train(engine, 1)
        kept.save()
        assert [(one.error, one.remedy) for one in kept.wait()] == [(None, "")]
        assert kept.host_bytes > 0
        threads.clear()
        direct.broadcast_from_rank0("")
        began = time.monotonic()
        stall_seconds = direct.save()
        assert 0 < stall_seconds <= time.monotonic() - began
        assert rank in threads and direct.host_bytes == 0
        train(engine, 1)  # the written state is that at the call
        assert [one.error for one in direct.wait()] == [None]
        direct.save()
        return [one.error for one in direct.wait()]

    assert on(Mesh(data=2), work)[0] == ["No space left on device (rank 1)"]
    assert_same(everything(tmp_path / "background" / "step-1"), everything(tmp_path / "direct" / "step-1"))


def test_a_second_one_waits_for_the_first(tmp_path, monkeypatch):
    """No save leaves keys in the store, through which ranks report their parts."""
    monkeypatch.setattr(files, "retain", lambda *args, **options: None)

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        for _ in range(4):
            train(engine, 1)
            checkpoints.save()
        saved = [one.step for one in checkpoints.wait()]
        left = [number for number in saved for rank in range(2)
                if checkpoints._store.check([checkpoints._name(number, rank)])]
        return saved, left

    assert on(Mesh(pipe=2), work) == [([1, 2, 3, 4], [])] * 2
    assert len(find(tmp_path)) == 4


@pytest.mark.parametrize("when", ["part", "manifest", "rename"])
def test_a_run_that_dies_leaves_nothing_half_done(tmp_path, monkeypatch, when):
    """At any moment, older checkpoints are complete, and the next start removes the rest."""
    save_steps(tmp_path, 1)

    class Dies(BaseException):
        """Nothing catches it, so the thread ends as if its process had died."""

    def die(*args, **options):
        raise Dies

    monkeypatch.setattr(threading, "excepthook", lambda caught: None)
    write = files.write_part
    with monkeypatch.context() as patch:
        def work(engine):
            train(engine, 2)
            checkpoints = Checkpoints(engine, tmp_path)
            checkpoints.claim()
            if when == "part":
                patch.setattr(files, "write_part", lambda path, tensors: (write(path, tensors), die()))
            else:
                patch.setattr(files.os, "rename" if when == "rename" else "fsync", die)
            checkpoints.save()
            return checkpoints.wait()

        told, = on(Mesh(), work)[0]
    assert told.error == "it was given up before it was written"
    assert names(tmp_path) == [".step-2.tmp", "step-1"]
    loaded, steps = load(tmp_path)
    assert (loaded.folder.name, steps, names(tmp_path)) == ("step-1", 1, ["step-1"])


def test_a_checkpoint_that_was_about_to_be_replaced_comes_back(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.replaced")
    assert load(tmp_path)[0].step == 1


def test_a_folder_of_results_of_a_killed_writer_is_removed_by_the_next(tmp_path):
    left = tmp_path / f".out.{'0a' * 6}.tmp"
    left.symlink_to("nowhere")
    with files.new_folder(tmp_path / "out", 0):
        assert left.is_symlink(), "a leftover that cannot be opened does not prevent writing"
    (tmp_path / "out").rmdir()
    left.unlink()
    left.mkdir()
    with files.new_folder(tmp_path / "out", 0) as first:
        assert not left.exists()
        with raises("output-exists"), files.new_folder(tmp_path / "out", 0) as second:
            assert {first, second} == set(tmp_path.iterdir()), "a folder that is still being written stays"
            (tmp_path / "out").write_bytes(b"")
        (tmp_path / "out").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_mark_of_the_best_is_set_or_leaves_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: os.stat(tmp_path / "missing"))
        with pytest.raises(FileNotFoundError):
            files.mark_best(tmp_path / "step-1")
    assert not list(tmp_path.iterdir())
    files.mark_best(tmp_path / "step-1")
    assert os.listdir(tmp_path) == ["best"] and os.readlink(tmp_path / "best") == "step-1"


def test_a_step_that_is_saved_again_replaces_what_was_there(tmp_path):
    save_steps(tmp_path, 2)
    damage = tmp_path / "step-2" / "part-00000.safetensors"
    damage.write_bytes(damage.read_bytes()[:-1])

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        loaded = checkpoints.load()
        train(engine, 1)
        checkpoints.save()
        return loaded, checkpoints.wait()

    loaded, told = on(Mesh(pipe=2), work)[0]
    assert loaded.step == 1
    assert re.search(r"step-2: part-00000.safetensors should have \d+ bytes$", loaded.skipped[0])
    assert [one.error for one in told] == [None]
    assert list(Saved(tmp_path / "step-2").damage()) == [] and names(tmp_path) == ["step-1", "step-2"]


# ---------------------------------------------------------------------- what cannot be written

def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("lease-not-writable", "file/checkpoint"):
        save_steps(tmp_path / "file" / "checkpoint")


def test_a_folder_that_one_rank_cannot_write_to_is_refused_before_the_first_checkpoint(tmp_path, monkeypatch):
    """For example if one machine has it mounted read-only: rank 0 alone would not notice."""
    write = files.try_to_write

    def read_only(path):
        if path.name.endswith("-1"):
            raise OSError(30, "Read-only file system")
        write(path)

    monkeypatch.setattr(files, "try_to_write", read_only)
    with raises("checkpoint-folder-not-writable", 1):
        on(Mesh(data=2), lambda engine: Checkpoints(engine, tmp_path).claim())
    monkeypatch.setattr(files, "try_to_write", lambda path: path.name.endswith("-1") or write(path))
    with raises("checkpoint-folder-not-shared", 1):
        on(Mesh(data=2), lambda engine: Checkpoints(engine, tmp_path).claim())
    assert names(tmp_path) == []


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0, 0o777, 0o666)])
def test_all_files_follow_the_umask(tmp_path, umask, folder, file):
    """Colleagues who may read a manifest may read what it lists."""
    before = os.umask(umask)
    try:
        save_steps(tmp_path / "saved", 1, Mesh(data=2))
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "saved").rglob("*")]
    assert len(made) == 5
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


# ---------------------------------------------------------------------- whose folder it is

def elsewhere(number):
    return Owner(host=f"host{number}", machine=f"machine{number}", pid=number, started="1")


def test_a_folder_of_another_program_is_left_alone(tmp_path, monkeypatch):
    """None of its files are removed; its checkpoints can be loaded by their names."""
    monkeypatch.setitem(Lease.acquire.__kwdefaults__, "wait_seconds", 0.2)
    save_steps(tmp_path, 1)
    theirs = Lease.acquire([tmp_path], owner=elsewhere(1), heartbeat_seconds=0.05, expiry_seconds=0.2)
    (tmp_path / ".step-2.abc.tmp").mkdir()
    for call in (Checkpoints.load, Checkpoints.save):
        with raises("folder-in-use", 1, "host1"):
            on(Mesh(data=2), lambda engine, call=call: call(Checkpoints(engine, tmp_path)))
    assert load(tmp_path / "own", path=tmp_path / "step-1")[0].step == 1
    assert names(tmp_path) == [".step-2.tmp", "step-1"]
    theirs.verify()


def test_a_program_that_has_lost_its_folder_publishes_and_removes_nothing(tmp_path, monkeypatch):
    """The program is suspended while another one takes the folder and removes incomplete files, and then continues."""
    write, taken = files.write_part, []

    def overtaken(path, tensors):
        written = write(path, tensors)
        if ".step-3." in str(path) and not taken:
            taken.append(Lease.acquire([tmp_path]))  # within one process the latest lease is the owner
            files.clear_leftovers(tmp_path)
        return written

    monkeypatch.setattr(files, "write_part", overtaken)
    *before, lost, again = save_steps(tmp_path, 4, keep=1)
    assert [one.error for one in before] == [None, None]
    for told in (lost, again):
        assert re.search(r"folder .* no longer belongs to this run \(generation 1\): process \d+ on .* has "
                         "taken it over", told.error) or "as seen from rank 0" in told.error
    assert "This run ends, and writes nothing more there" in again.remedy
    assert names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("moment", ["before the old one is moved", "between the two renames"])
def test_a_folder_that_is_lost_in_the_middle_of_a_publication(tmp_path, monkeypatch, moment):
    """The checkpoint of the same step that was to be replaced keeps its name."""
    save_steps(tmp_path, 1)
    before = (tmp_path / "step-1" / MANIFEST).read_bytes()
    verified = []

    def verify(self):
        verified.append(self)
        if len(verified) > (moment == "between the two renames"):
            raise OwnershipError("is lost", where="folder", remedy="End.")

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.claim()
        monkeypatch.setattr(Lease, "verify", verify)
        train(engine, 1)
        checkpoints.save()
        return checkpoints.wait()

    told, = on(Mesh(), work)[0]
    assert told.error == "folder: is lost" and (told.remedy, names(tmp_path)) == ("End.", ["step-1"])
    assert (tmp_path / "step-1" / MANIFEST).read_bytes() == before


def test_checkpoints_let_go_of_their_folder_when_they_are_closed(tmp_path):
    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        return checkpoints.wait(), checkpoints.close()

    on(Mesh(), work)
    Lease.acquire([tmp_path], owner=elsewhere(1), wait_seconds=0.0).verify()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_without_a_store_has_failed(tmp_path, rank):
    """The launcher that kept the store was killed, so the parts of other ranks are unknown. No checkpoint counts as
    saved."""
    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path, timeout_seconds=1.0)
        checkpoints.claim()
        if engine.world.rank == rank:
            def gone(*args):
                raise torch.distributed.DistNetworkError("Connection reset by peer")

            checkpoints._store = SimpleNamespace(set=gone, check=gone, get=gone)
        checkpoints.save()
        if rank:
            engine._connections.board.close()
        return checkpoints.wait()

    for told, in on(Mesh(data=2), work):
        if rank == 0:
            assert "the store that the ranks share is gone" in told.error and "--resume auto" in told.remedy
        else:
            assert told.error == "rank 1 has not written its part, and is not heard of any more"
    assert find(tmp_path) == []


def limited_part(path, tensors):
    """On one rank, as on a full disk: the kernel refuses writes beyond a file size (in all threads of this process)."""
    if path.name != "part-00001.safetensors":
        return _write_part(path, tensors)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        return _write_part(path, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_write_part = files.write_part


def test_a_file_that_cannot_grow(tmp_path, monkeypatch):
    """A failure of one rank is one of all ranks: no checkpoint and no leftovers, older ones intact; the next save
    works."""
    save_steps(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_part", limited_part)

        def work(engine):
            train(engine, 2)
            checkpoints = Checkpoints(engine, tmp_path)
            checkpoints.save()
            first = checkpoints.wait()
            patch.undo()
            checkpoints.save()
            return first + checkpoints.wait()

        for failed, written in on(Mesh(data=2), work):
            assert "File too large" in failed.error and written.error is None
    assert names(tmp_path) == ["step-1", "step-2"]


def can_mount(path):
    path.mkdir()
    return subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)],
                          capture_output=True).returncode == 0


def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    if not shutil.which("mount") or not can_mount(disk):
        pytest.skip("may not mount a small disk")
    try:
        first, *_, last = save_steps(disk, 4, keep=3)
        assert first.error is None and "No space left on device" in last.error
        assert [path.name for path in find(disk)] == names(disk)[::-1]
        assert load(disk)[0].skipped == ()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_later_ones_that_are_damaged_do_not_count_as_kept(tmp_path):
    """A run that resumed from step 2 keeps what it writes, although there are newer names."""
    save_steps(tmp_path, 5, keep=4)
    for step in (3, 4, 5):
        (tmp_path / f"step-{step}" / MANIFEST).write_text("{")

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path, keep=1)
        assert checkpoints.load().step == 2
        train(engine, 1)
        checkpoints.save()
        checkpoints.wait()

    on(Mesh(), work)
    assert names(tmp_path) == ["step-3", "step-4", "step-5"] and read_manifest(tmp_path / "step-3").step == 3


def test_a_checkpoint_waits_until_it_may_have_its_name(tmp_path):
    may = threading.Event()

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        train(engine, 1)
        checkpoints.save(when=may.is_set)
        time.sleep(0.3)
        before = names(tmp_path)
        engine.world.store.add("looked", 1)
        while engine.world.store.add("looked", 0) < 2:
            time.sleep(0.01)
        may.set()
        checkpoints.wait()
        return before, names(tmp_path)

    assert on(Mesh(data=2), work) == [([".step-1.tmp"], ["step-1"])] * 2


def test_one_that_never_may_is_left_when_it_is_closed(tmp_path):
    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save(when=lambda: False)
        checkpoints.close(0.1)
        checkpoints._thread.join(30)
        return checkpoints._thread.is_alive()

    assert on(Mesh(), work) == [False] and names(tmp_path) == [".step-0.tmp"]


def late_part(tmp_path, monkeypatch, then):
    """Results on rank 0 if the thread of rank 1 calls `then(engine, write)` instead of writing its part."""
    init = Board.__init__
    monkeypatch.setattr(Board, "__init__", lambda self, store, rank, mesh, **more: init(
        self, store, rank, mesh, **{**more, "interval_seconds": 0.05}))

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path, timeout_seconds=0.3)
        train(engine, 1)
        if engine.world.rank == 1:
            write = checkpoints._write
            monkeypatch.setattr(checkpoints, "_write", lambda job: then(engine, lambda: write(job)))
        checkpoints.save()
        return checkpoints.wait()

    return on(Mesh(data=2), work)[0]


def test_a_rank_that_is_gone_before_its_part_is_there(tmp_path, monkeypatch):
    told, = late_part(tmp_path, monkeypatch, lambda engine, write: engine._connections.board.close())
    assert told.error == "rank 1 has not written its part, and is not heard of any more" and names(tmp_path) == []


def test_a_rank_that_takes_long_for_its_part_is_waited_for(tmp_path, monkeypatch):
    told, = late_part(tmp_path, monkeypatch, lambda engine, write: (time.sleep(1.5), write()))
    assert told.error is None and names(tmp_path) == ["step-1"]


def test_parts_that_rank_0_cannot_see(tmp_path, monkeypatch):
    """For example if each machine has its own folder of the same name."""
    def elsewhere(path, tensors):
        return _write_part(path.with_name("part-00009.safetensors"), tensors)

    def renamed(path, tensors):
        found = elsewhere(path, tensors)
        return type(found)(name=path.name, size_bytes=found.size_bytes, crc32=found.crc32)

    monkeypatch.setattr(files, "write_part", renamed)
    told, = save_steps(tmp_path)
    assert "is missing or incomplete as seen from rank 0" in told.error and names(tmp_path) == []


# ---------------------------------------------------------------------- what cannot be read

def test_a_damaged_one_is_passed_over(tmp_path):
    save_steps(tmp_path, 3, Mesh(data=2))
    part = tmp_path / "step-3" / "part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    (tmp_path / "step-2" / "part-00000.safetensors").unlink()
    for loaded, steps in on(Mesh(pipe=3), lambda engine: (Checkpoints(engine, tmp_path).load(), engine.steps)):
        assert steps == 1
        assert loaded.skipped == (
            f"checkpoint {tmp_path}/step-3: part-00001.safetensors has been changed: its checksum is not the "
            "manifest's",
            f"checkpoint {tmp_path}/step-2: part-00000.safetensors is missing")


def test_all_damaged(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / "step-1" / MANIFEST).write_text("{")
    with raises("no-whole-checkpoint", "step-1", "manifest.json"):
        load(tmp_path)
    with raises("no-whole-checkpoint"):
        load(tmp_path, path=tmp_path / "step-1")


def test_nothing_to_load(tmp_path):
    assert load(tmp_path)[0] is None
    with raises("not-a-checkpoint"):
        load(tmp_path, path=tmp_path / "nothing")


@pytest.mark.parametrize("path", ["run/checkpoint/step-1", "run/checkpoint", "run"])
def test_a_checkpoint_a_folder_of_them_and_a_run(tmp_path, path):
    save_steps(tmp_path / "run" / "checkpoint", 1)
    assert load(tmp_path / "empty", path=tmp_path / path)[1] == 1


def test_another_model(tmp_path):
    save_steps(tmp_path, 1, Mesh(pipe=2))

    def rank(world):
        engine = Engine([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], world,
                        loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()))
        return Checkpoints(engine, tmp_path).load()

    with raises("parameter-not-in-checkpoint", "step-1", value="0.weight"):
        run_ranks(rank, 2)


def changed(tmp_path, change):
    """Load a checkpoint after `change` has modified its manifest."""
    document = json.loads((tmp_path / "step-1" / MANIFEST).read_text())
    change(document)
    write_manifest(tmp_path / "step-1", document)
    load(tmp_path)


def test_a_model_with_fewer_parameters_or_other_shapes(tmp_path):
    save_steps(tmp_path, 1)
    kept = (tmp_path / "step-1" / MANIFEST).read_text()

    def more(document):
        tensor = document["tensors"]["parameter"].pop("layer0.mlp.fc1.bias")
        document["tensors"]["parameter"] |= {"layer0.mlp.fc1.bias": tensor,
                                             "other": {**tensor, "shape": [0], "pieces": []}}

    with raises("parameter-not-in-model", "other"):
        changed(tmp_path, more)
    (tmp_path / "step-1" / MANIFEST).write_text(kept)

    def other(document):
        tensor = document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]
        tensor["shape"] = [4, 8]
        tensor["pieces"] = [[0, tensor["pieces"][0][1], [[0, 4], [0, 8]]]]

    with raises("checkpoint-shape", "layer0.mlp.fc1.bias", 4, 8, 32):
        changed(tmp_path, other)


def test_another_optimizer(tmp_path):
    save_steps(tmp_path, 1)

    def rank(world):
        engine = engine_on(world, Mesh(), algorithm="sgd")
        Checkpoints(engine, tmp_path).load()

    with raises("checkpoint-without-state", "momentum_buffer"):
        run_ranks(rank, 1)


def torchs(world, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    return Engine([torch.nn.Linear(2, 3)], world, loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()),
                  optimizer=optimizer, **options)


def test_an_optimizer_of_another_kind(tmp_path):
    def rank(world):
        engine = torchs(world)
        engine.train_batch([(torch.ones(2, 2), torch.ones(2, 3))])
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.wait()
        ours = torchs(world, None, optim=Optim())
        with raises("checkpoint-of-other-kind-of-optimizer"):
            Checkpoints(ours, tmp_path).load()

    run_ranks(rank, 1)


def test_a_state_that_cannot_be_cut(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = torch.zeros(3)

    def rank(world):
        engine = torchs(world, lambda parameters: Odd(parameters, lr=0.1))
        engine.train_batch([(torch.ones(2, 2), torch.ones(2, 3))])
        with raises("state-shape-not-cut", "0.weight"):
            Checkpoints(engine, tmp_path).save()

    run_ranks(rank, 1)


def test_who_closes_early_leaves_no_thread(tmp_path, monkeypatch):
    """Another rank never reports its part, as if it had died."""
    write = module.Checkpoints._write
    monkeypatch.setattr(module.Checkpoints, "_write",
                        lambda self, job: write(self, job) if self._rank == 0 else None)

    def work(engine):
        checkpoints = Checkpoints(engine, tmp_path)
        checkpoints.save()
        checkpoints.close(0.1)
        checkpoints._thread.join(30)
        return checkpoints._thread.is_alive()

    assert on(Mesh(data=2), work) == [False, False]
    assert find(tmp_path) == []


# ---------------------------------------------------------------------- manifests of strangers

def twice(document):
    document["files"] *= 2
    return "a file is listed twice"


def outside(document):
    document["files"][0]["name"] = "../part-00000.safetensors"
    return "'../part-00000.safetensors' is not a name of a file of pieces"


def huge(document):
    tensor = next(iter(document["tensors"]["parameter"].values()))
    tensor["shape"], tensor["pieces"] = [1 << 50], [[0, "piece-0", [[0, 1 << 50]]]]
    return "the files are too small for parameter of"


def format_of_pickles(document):
    next(iter(document["tensors"]["parameter"].values()))["dtype"] = "object"
    return "has the unknown number format 'object'"


def beyond(document):
    tensor = document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]
    tensor["pieces"][0][2] = [[1, 33]]
    return "has a piece"


def other_file(document):
    document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]["pieces"][0][0] = 7
    return "has a piece in file 7 of 1"


def a_hole(document):
    document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]["pieces"] = []
    return "do not make up its shape"


def an_overlap(document):
    tensor = document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]
    key = tensor["pieces"][0][1]
    tensor["pieces"] = [[0, key, [[0, 16]]], [0, key, [[8, 24]]]]
    return "do not make up its shape"


def another_kind(document):
    document["step"] = "1"
    return "is not a manifest: step: Input should be a valid integer"


def of_the_future(document):
    document["format"] = 2
    return "is not a manifest: format: "


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_steps(folder, 1)
    return folder / "step-1"


@pytest.mark.parametrize("change", [twice, outside, huge, format_of_pickles, beyond, other_file, a_hole, an_overlap,
                                    another_kind, of_the_future], ids=lambda change: change.__name__)
def test_a_manifest_that_cannot_be_true(tmp_path, one_checkpoint, change):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    document = json.loads((folder / MANIFEST).read_text())
    message = change(document)
    write_manifest(folder, document)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert message in caught.value.what


@pytest.mark.parametrize(("before", "after"), [
    ('"step":1,', '"step":3,'), ('"optimizer_steps":1,', '"optimizer_steps":3,'), ('"written":"20', '"written":"21')])
def test_a_bit_of_a_manifest_that_makes_it_another(tmp_path, one_checkpoint, before, after):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    text = (folder / MANIFEST).read_text()
    assert before in text
    (folder / MANIFEST).write_text(text.replace(before, after))
    with raises("manifest-changed", "manifest.json"):
        read_manifest(folder)


def test_no_manifest_and_one_that_is_too_large(tmp_path, monkeypatch):
    with raises("manifest-unreadable", "manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{}" * 10)
    monkeypatch.setattr("ranvier.checkpoint.manifest.MOST_BYTES", 5)
    with raises("not-a-manifest", 5):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("change", "code"), [
    ({"dtype": "int32"}, "saved-number-format"),
    ({"shape": [16, 2], "pieces": [[0, None, [[0, 16], [0, 2]]]]}, "saved-shape")])
def test_a_file_that_is_not_as_its_manifest_says(tmp_path, one_checkpoint, change, code):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    document = json.loads((folder / MANIFEST).read_text())
    tensor = document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]
    key = tensor["pieces"][0][1]
    tensor |= json.loads(json.dumps(change).replace("null", json.dumps(key)))
    write_manifest(folder, document)
    with raises(code):
        Saved(folder).read("parameter", "layer0.mlp.fc1.bias")


def test_a_part_that_is_a_link_or_not_safetensors(tmp_path, one_checkpoint):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    part = folder / "part-00000.safetensors"
    other = part.rename(tmp_path / "elsewhere.safetensors")
    part.symlink_to(other)
    assert [error.what for error in Saved(folder).damage()] == ["part-00000.safetensors is missing"]
    part.unlink()
    part.write_bytes(b"\xff" * other.stat().st_size)
    with raises("checkpoint-file-unreadable", "part-00000.safetensors"):
        Saved(folder).read("parameter", "layer0.mlp.fc1.bias")
    with raises("checkpoint-without-state", "exp_max", "layer0.mlp.fc1.bias"):
        Saved(folder).read("exp_max", "layer0.mlp.fc1.bias")
