"""Stores are hosted and connected to in one file, within a time limit, with signals handled during the wait."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

import ranvier
from ranvier.cli import main
from ranvier.comm.signed_store import SignedStore
from ranvier.errors import ConfigError, LaunchError, RanvierError
from ranvier.launch import contact, devices, stores
from ranvier.launch.contact import connect, read_contact
from ranvier.launch.launchers import detect
from ranvier.launch.stores import connect_store, create_store
from ranvier.world import JoinPoint


@pytest.fixture
def silent(monkeypatch):
    """A port that accepts connections and never answers."""
    monkeypatch.setattr(stores, "_GRACE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_store_that_answers():
    store = create_store("127.0.0.1", 0, timedelta(seconds=5))
    store.set("key", "value")
    assert connect_store("127.0.0.1", store.port, timedelta(seconds=5)).get("key") == b"value"


def test_a_port_that_says_nothing(silent, monkeypatch):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connect_store("127.0.0.1", silent, timedelta(seconds=0.2))
    monkeypatch.setattr(contact, "_CONNECT_SECONDS", 0.2)
    with pytest.raises(LaunchError) as refused:
        connect(JoinPoint(address="127.0.0.1", port=silent, secret="s"))
    assert f"127.0.0.1:{silent}" in refused.value.where
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(silent, number):
    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(number, stop)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            connect_store("127.0.0.1", silent, timedelta(seconds=5))  # its thread keeps trying for that long
    finally:
        timer.join()
        signal.signal(number, before)


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "refused"), ("no-such-host.invalid", None)])
def test_a_place_where_nobody_listens(host, why, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(stores, "TELL_SECONDS", 0.1)
    with pytest.raises(OSError, match=why) as found:
        connect_store(host, port, timedelta(seconds=0.5), tells=True)
    assert not isinstance(found.value, TimeoutError)  # it says what is wrong, not only that time is up
    lines = [line for line in capfd.readouterr().err.splitlines() if f"{host}:{port}" in line]
    assert len(lines) == 1  # our line, and no C++ stacks


def test_ranks_that_are_missing_are_told(monkeypatch, capfd):
    monkeypatch.setattr(devices, "TELL_SECONDS", 0.1)
    store = create_store("127.0.0.1", 0, timedelta(seconds=0.5))
    seen = devices.visible_devices(rank=0, local_rank=0, local_size=1, setting="cpu", transport="torch")
    with pytest.raises(LaunchError) as late:
        devices.exchange(seen, 3, store)
    assert late.value.code == "devices-not-reported" and "2 of 3 ranks: 1, 2" in capfd.readouterr().err


# ---------------------------------------------------------------------- secrets

@pytest.mark.parametrize("secret", ["", "  "])
def test_an_empty_secret_is_refused(secret):
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError) as refused:
        detect(variables | {"RANVIER_SECRET": secret})
    assert refused.value.where == "RANVIER_SECRET" and refused.value.value == secret
    assert detect({"RANVIER_SECRET": secret}) is None  # not a rank: the command gives its ranks a secret
    with pytest.raises(AssertionError):
        SignedStore(HashStore(), "")


def test_a_contact_without_a_secret_is_damaged(tmp_path):
    (tmp_path / "run.toml").touch()
    (tmp_path / "join.json").write_text(json.dumps({"version": ranvier.__version__, "address": "127.0.0.1", "port": 1,
                                                    "secret": ""}))
    os.chmod(tmp_path / "join.json", 0o600)
    with pytest.raises(RanvierError) as refused:
        read_contact(tmp_path)
    assert refused.value.where == str(tmp_path / "join.json")


def test_the_command_exits_at_once_while_a_thread_connects(silent, monkeypatch):
    """In the interpreter's own shutdown that thread's return from C++ would abort the process."""
    def exits(code):
        raise SystemExit(f"at once with {code}")

    ended = threading.Event()
    monkeypatch.setattr(stores, "TCPStore", lambda *args, **fields: ended.wait(60))
    with pytest.raises(TimeoutError):
        connect_store("127.0.0.1", silent, timedelta(seconds=0.1))
    for owner, name, does in ((main, "run_command", lambda args: 2), (main, "outlive_readers", lambda: None),
                              (main.gc, "set_threshold", lambda *numbers: None), (os, "_exit", exits),
                              (main.atexit, "register", lambda function: None)):
        monkeypatch.setattr(owner, name, does)
    with pytest.raises(SystemExit, match="at once with 2"):
        main.main()
    ended.set()


@pytest.mark.slow
def test_the_command_ends_with_its_own_code_while_a_thread_connects(tmp_path):
    """TCPStore may return while the interpreter shuts down, which aborts the process: the command exits before that."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent("""
        import atexit, socket, time
        from datetime import timedelta
        from ranvier.cli import main
        from ranvier.launch import stores

        def fails(args):
            try:
                stores.connect_store("127.0.0.1", listener.getsockname()[1], timedelta(seconds=0.5))
            except TimeoutError:
                return 2

        listener = socket.create_server(("127.0.0.1", 0))
        stores._GRACE_SECONDS = 0.0
        stores.TCPStore = lambda *args, **fields: time.sleep(60)  # as one that answers nothing
        main.run_command = fails
        atexit.register(print, "the interpreter ends")
        main.main()
    """))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
