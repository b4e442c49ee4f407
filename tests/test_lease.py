"""A folder has one owner: which process may take it, which one loses it, and that two never own it at the same time."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.checkpoint.files import acquire_folders
from ranvier.errors import OwnershipError
from ranvier.system import lease
from ranvier.system.lease import Lease, Owner, check_usable
from ranvier.system.processes import process_state
from ranvier.testing.ranks import run_ranks
from tests.errors import raises

FAST = {"heartbeat_seconds": 0.02, "expiry_seconds": 0.3, "wait_seconds": 0.15}


def elsewhere(number):
    """A process of another machine, of which only its heartbeat count can be seen."""
    return Owner(host=f"host{number}", machine=f"machine{number}", pid=number, started="1")


def leases(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".owner"))


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def generations(lease):
    return [int(one.path.suffix.removeprefix(".")) for one in lease._held]


def of_process(process):
    return replace(Owner.this_process(), pid=process.pid, started=process_state(process.pid)[1], token="theirs")


def test_a_released_folder_is_taken_with_the_next_generation(tmp_path):
    first = Lease.acquire([tmp_path], **FAST)
    first.verify()
    first.release()
    second = Lease.acquire([tmp_path], **FAST)
    assert leases(tmp_path) == [".owner.2"]
    with raises("folder-released"):
        first.verify()
    second.release()


def test_a_live_process_of_this_machine_keeps_its_folder(tmp_path, sleeper):
    theirs = Lease.acquire([tmp_path], owner=of_process(sleeper), **FAST)
    with raises("folder-in-use", sleeper.pid, 1):
        Lease.acquire([tmp_path], **FAST)
    os.kill(sleeper.pid, 19)
    while process_state(sleeper.pid)[0] not in "Tt":
        time.sleep(0.01)
    with raises("folder-in-use"):
        Lease.acquire([tmp_path], **FAST)
    theirs.verify()


def test_what_the_machine_alone_can_tell_is_refused_before_ranks_are_started(tmp_path, sleeper):
    theirs, told = Lease.acquire([tmp_path], owner=of_process(sleeper), **FAST), []
    with raises("folder-in-use", sleeper.pid, 1):
        check_usable([tmp_path], tell=told.append, wait_seconds=0.3)
    assert len(told) == 1 and str(sleeper.pid) in told[0] and leases(tmp_path) == [".owner.1"]
    theirs.release()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "runs", Path("/proc/self")):  # where not even root can create anything
        with raises("lease-not-writable"):
            check_usable([folder])
    other = Lease.acquire([tmp_path / "other"], owner=elsewhere(1), **FAST)
    check_usable([tmp_path, tmp_path / "new", tmp_path / "other"], tell=told.append)
    assert len(told) == 1 and not (tmp_path / "new").exists() and leases(tmp_path) == [".owner.1"]
    other.release()


def test_a_process_that_was_killed_is_followed_at_once(tmp_path, sleeper):
    """Long before its count would be found unchanged; a zombie counts as dead."""
    Lease.acquire([tmp_path], owner=of_process(sleeper), **FAST)
    sleeper.kill()
    while process_state(sleeper.pid)[0] != "Z":
        time.sleep(0.01)
    mine = Lease.acquire([tmp_path], expiry_seconds=3600.0, wait_seconds=3600.0)
    assert generations(mine) == [2]


def test_another_process_of_the_same_pid_is_another_one(tmp_path, sleeper):
    Lease.acquire([tmp_path], owner=replace(of_process(sleeper), started="1"), **FAST)
    assert generations(Lease.acquire([tmp_path], expiry_seconds=3600.0)) == [2]


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path, sleeper):
    Lease.acquire([tmp_path], owner=of_process(sleeper), **FAST)
    said = []
    killer = threading.Timer(0.3, sleeper.kill)
    killer.start()
    threading.Thread(target=sleeper.wait, daemon=True).start()
    mine = Lease.acquire([tmp_path], on_wait=said.append, wait_seconds=60.0)
    assert generations(mine) == [2] and f"process {sleeper.pid} on" in said[0]


def test_an_owner_elsewhere_is_told_by_its_count_alone(tmp_path):
    theirs = Lease.acquire([tmp_path], owner=elsewhere(1), **FAST)
    with raises("folder-in-use", 1, "host1"):
        Lease.acquire([tmp_path], owner=elsewhere(2), **FAST)
    theirs._stop.set()  # its machine is gone, so the folder is never released
    theirs._thread.join()  # a heartbeat in progress would count as that of a live owner
    began = time.monotonic()
    mine = Lease.acquire([tmp_path], owner=elsewhere(2), **FAST)
    assert generations(mine) == [2] and time.monotonic() - began >= 0.3


def test_a_lease_that_nobody_holds_any_more_expires(tmp_path):
    """For example the lease of an engine's checkpoints in a notebook, when a cell is run again in another process."""
    Lease.acquire([tmp_path], owner=elsewhere(1), **FAST)
    gc.collect()
    assert generations(Lease.acquire([tmp_path], owner=elsewhere(2), **FAST)) == [2]


def test_wall_clocks_decide_nothing(tmp_path, monkeypatch):
    """Neither the time of a file nor an owner's clock matters."""
    theirs = Lease.acquire([tmp_path], owner=replace(elsewhere(1), since="1970-01-01"), **FAST)
    stop = threading.Event()

    def turn_back():
        while not stop.wait(0.01):
            for name in leases(tmp_path):
                os.utime(tmp_path / name, (0, 0))

    thread = threading.Thread(target=turn_back)
    thread.start()
    monkeypatch.setattr(time, "time", lambda: 4e9)
    try:
        with raises("folder-in-use", "1970-01-01"):
            Lease.acquire([tmp_path], owner=elsewhere(2), **FAST)
    finally:
        stop.set()
        thread.join()
    theirs.verify()


def test_a_former_owner_that_wakes_up_has_lost(tmp_path):
    """It did not run for a while, as on a machine that was suspended."""
    former = Lease.acquire([tmp_path], owner=elsewhere(1), heartbeat_seconds=3600.0)
    mine = Lease.acquire([tmp_path], owner=elsewhere(2), **FAST)
    with raises("folder-lost", 1, 2, "host2"):
        former.verify()
    with pytest.raises(OwnershipError):
        former.check()
    former.release()
    mine.verify()
    assert leases(tmp_path) == [".owner.2"]


def test_the_thread_of_the_owner_finds_it_out_by_itself(tmp_path):
    former = Lease.acquire([tmp_path], owner=elsewhere(1), **FAST)
    former.check()
    (tmp_path / ".owner.1").unlink()
    deadline = time.monotonic() + 30
    while former._lost is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with raises("folder-lost", ".owner.1"):
        former.check()


def test_in_one_process_the_last_one_has_it(tmp_path):
    first, second = Lease.acquire([tmp_path]), Lease.acquire([tmp_path])
    second.verify()
    with raises("folder-lost"):
        first.verify()


def full_folder(path):
    path.mkdir()
    (path / "file").touch()


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


ODD = {"empty": lambda path: path.write_bytes(b""), "bytes": lambda path: path.write_bytes(b"\xff" * 300),
       "null": lambda path: path.write_bytes(b"000000000001\n{\"host\": null}\n"),
       "nested": lambda path: path.write_bytes(b"[" * 5000), "a FIFO": os.mkfifo, "a folder": os.mkdir,
       "a full folder": full_folder, "a socket": socket_at,
       "a link to nothing": lambda path: path.symlink_to("nothing"),
       "a link to itself": lambda path: path.symlink_to(path.name),
       "an endless file": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", ODD)
def test_a_damaged_lease_counts_as_one_that_stands_still(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # paths of sockets must be short
    ODD[kind](Path(".owner.5"))
    mine = Lease.acquire([tmp_path], **FAST)
    mine.verify()
    assert generations(mine) == [6] and leases(tmp_path)[-1] == ".owner.6"
    mine.release()
    assert generations(Lease.acquire([tmp_path], owner=elsewhere(1), wait_seconds=0.0)) == [7]


def test_other_names_are_no_leases(tmp_path):
    for name in (".owner.0", ".owner.-1", ".owner.x", ".owner.1.tmp", ".owner.99999999999999"):
        (tmp_path / name).touch()
    assert generations(Lease.acquire([tmp_path], **FAST)) == [1]


def test_all_folders_or_none(tmp_path):
    theirs = Lease.acquire([tmp_path / "b"], owner=elsewhere(1), **FAST)
    with pytest.raises(OwnershipError, match=str(tmp_path / "b")):
        Lease.acquire([tmp_path / "a", tmp_path / "b"], owner=elsewhere(2), **FAST)
    assert generations(Lease.acquire([tmp_path / "a"], owner=elsewhere(3), expiry_seconds=3600.0)) == [2]
    theirs.verify()


def test_of_many_that_start_at_once_one_has_it(tmp_path):
    """Ten rounds of six contenders, whose predecessor is gone; each winner checks that it is alone."""
    inside, most, winners = [], [], []
    lock = threading.Lock()

    def contend(number):
        try:
            mine = Lease.acquire([tmp_path], owner=elsewhere(number), heartbeat_seconds=0.01, expiry_seconds=1.0,
                              wait_seconds=0.0)
        except OwnershipError:
            return
        with lock:
            inside.append(number)
            most.append(len(inside))
        time.sleep(0.05)
        mine.verify()
        with lock:
            inside.remove(number)
            winners.append(number)
        mine.release()

    for round_ in range(10):
        threads = [threading.Thread(target=contend, args=(10 * round_ + place,)) for place in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert max(most) == 1 and len(winners) >= 10


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with raises("lease-not-writable", "file/runs"):
        Lease.acquire([tmp_path / "file" / "runs"])


@pytest.mark.parametrize("taken", [True, False])
def test_all_ranks_know_who_has_it(tmp_path, sleeper, taken):
    """Rank 0 waits for the owner, longer than a collective may take, and no rank is left waiting."""
    if taken:
        theirs = Lease.acquire([tmp_path], owner=of_process(sleeper), **FAST)
    told, outcomes = [], {}

    def rank(world):
        group = world.backend.group("everyone", [(0, 1, 2)])
        try:
            outcomes[world.rank] = acquire_folders([tmp_path], group, tell=told.append, **FAST)
        except OwnershipError as error:
            outcomes[world.rank] = str(error)

    run_ranks(rank, 3)
    if taken:
        assert len({str(outcome) for outcome in outcomes.values()}) == 1 and "in progress" in outcomes[2]
        assert len(told) == 1
        theirs.verify()
    else:
        assert isinstance(outcomes[0], Lease) and outcomes[1] is None and not told


def test_a_program_that_dies_by_kill_9(tmp_path):
    """As a launcher that restarts the run finds it: no process has that pid any more."""
    program = ("import time; from pathlib import Path; from ranvier.system.lease import Lease; "
               f"held = Lease.acquire([Path({str(tmp_path)!r})]); print('held', flush=True); time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parent.parent)
    assert process.stdout.readline() == "held\n"
    with raises("folder-in-use", process.pid):
        Lease.acquire([tmp_path], **FAST)
    process.kill()
    process.wait()
    assert generations(Lease.acquire([tmp_path], expiry_seconds=3600.0)) == [2]


@pytest.mark.parametrize(("machine", "is_shown"), [
    ("{boot} {own}", True), ("{boot} pid:[1]", False), ("{boot} pid:[4026531836]", False), ("other pid:[1]", False),
    ("other pid:[4026531836]", True), ("machine1", True)])
def test_a_pid_of_another_container_is_not_printed(monkeypatch, machine, is_shown):
    monkeypatch.setattr(lease, "_this_machine", lambda: "boot pid:[7]")
    owner = lease.Owner(host="host1", machine=machine.format(boot="boot", own="pid:[7]"), pid=4711, started="1")
    assert ("4711" in str(owner)) is is_shown and "host1" in str(owner)
    watch = lease._Watch(Path("folder"), owner, 1.0, 1.0)
    refusal = watch._refusal(3, owner)
    assert ("4711" in str(refusal)) is is_shown and "generation 3" in refusal.what
