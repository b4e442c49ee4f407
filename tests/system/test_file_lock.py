"""A wait for another process's lock names that process, ends with its heartbeat, and reacts to signals."""

import fcntl
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from ranvier.data.cache import one_writer
from ranvier.errors import DataError
from ranvier.system import file_lock
from ranvier.system.lease import Owner, heartbeat_content
from ranvier.system.untrusted_file import open_lock
from tests.errors import raises


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(file_lock, "EXPIRY_SECONDS", 0.6)
    monkeypatch.setattr(file_lock, "HEARTBEAT_SECONDS", 0.1)


@contextmanager
def silent_holder(path, content):
    """Hold a lock without a heartbeat, as a stopped process does."""
    handle = open_lock(path.with_name(f".{path.name}.lock"))
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.pwrite(handle, content, 0)
    yield
    os.close(handle)


def test_a_holder_that_shows_no_life_is_named(tmp_path):
    holder, told = Owner(host="node3", machine="", pid=4711, started="5", since="2026-01-02 03:04:05 UTC"), []
    with silent_holder(tmp_path / "train", heartbeat_content(3, holder)), pytest.raises(DataError) as found, \
            one_writer(tmp_path / "train", told.append):
        pass
    assert found.value.where == str(tmp_path / "train") and found.value.value == str(holder)
    assert holder.since in found.value.what and str(holder) in told[0]
    assert "kill 4711 on node3" in found.value.remedy
    with silent_holder(tmp_path / "other", b"node3 4711"), raises("data-preparation-stalled") as \
            found, one_writer(tmp_path / "other", told.append):
        pass
    assert found.value.value is None and "kill" not in found.value.remedy


def test_an_honest_holder_may_take_as_long_as_it_likes(tmp_path):
    entered, order = threading.Event(), []

    def hold():
        with one_writer(tmp_path / "train", order.append):
            entered.set()
            time.sleep(1.5)
            order.append("held")

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    with one_writer(tmp_path / "train", lambda line: None):
        order.append("entered")
    holder.join(10)
    assert order == ["held", "entered"]
    assert not [thread for thread in threading.enumerate() if thread.name == "ranvier-lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_obeys_signals(tmp_path, monkeypatch, number):
    monkeypatch.setattr(file_lock, "EXPIRY_SECONDS", 60.0)

    class Asked(Exception):
        pass

    def raise_it(*_):
        raise Asked

    before = signal.signal(number, raise_it)
    try:
        with silent_holder(tmp_path / "train", b""), pytest.raises(Asked), one_writer(
                tmp_path / "train", lambda line: os.kill(os.getpid(), number)):
            pass
    finally:
        signal.signal(number, before)
