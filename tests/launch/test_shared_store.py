"""The shared store listens where ranks need it, and accepts values only from processes with the run's secret."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from ranvier.comm.signed_store import SignedStore, private_prefix, sign_store
from ranvier.launch import shared_store
from ranvier.launch.launchers import Started, detect
from ranvier.launch.shared_store import agree_on_start, new_secret, open_store
from ranvier.launch.stopped_ranks import read_pids
from ranvier.launch.stores import create_store
from ranvier.system.machine import address_towards
from tests.errors import raises

SECOND = timedelta(seconds=5)


def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False


@pytest.fixture
def other_address():
    address = address_towards("192.0.2.1")
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    return address


def srun(rank, host="localhost", port=0, local_size=2, **more):
    return Started(launcher="srun", rank=rank, size=2, local_rank=0, local_size=local_size, master=(host, port), **more)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_ranks_of_one_machine_are_reached_from_there_alone(other_address):
    port = free_port()
    store, _ = open_store(srun(0, port=port), 5.0)
    assert reaches("127.0.0.1", port) and not reaches(other_address, port)
    store.set("key", "value")
    assert open_store(srun(1, port=port), 5.0)[0].get("key") == b"value"


def test_ranks_of_several_machines_are_reached_on_their_address(other_address):
    port = free_port()
    store, _ = open_store(srun(0, host=other_address, port=port, local_size=1), 5.0)
    assert reaches(other_address, port) and not reaches("127.0.0.1", port)
    del store


def test_a_name_that_says_nothing_to_others_means_all_interfaces(other_address):
    """In many /etc/hosts files the machine's own name is a loopback address."""
    port = free_port()
    store, _ = open_store(srun(0, port=port, local_size=1), 5.0)
    assert reaches(other_address, port)
    del store


def test_a_launcher_that_is_gone_before_its_ranks_look_for_it():
    began, port = time.monotonic(), free_port()
    torchrun = Started(launcher="torchrun", rank=0, size=2, local_rank=0, local_size=2, master=("127.0.0.1", port),
                       agent_store=True)
    with raises("launcher-gone", 127):
        open_store(torchrun, 300.0)
    assert time.monotonic() - began < 30


def test_the_launcher_says_a_loopback_address_for_a_rank_on_another_machine():
    torchrun = Started(launcher="torchrun", rank=3, size=4, local_rank=1, local_size=2, agent_store=True,
                       master=("localhost", free_port()))
    with raises("master-address-is-local", "localhost", "--local-addr"):
        open_store(torchrun, 300.0)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (4, 2), (3, 1, 3)], ids=str)
def test_ranks_of_one_start_agree_on_a_word_that_no_other_start_has(sizes):
    """The store is kept between the starts, and a failed start has left a question."""
    store = HashStore()
    store.set("question/1", "abandoned")
    words = []
    for size in sizes:
        with ThreadPoolExecutor(size) as pool:
            ranks = reversed(range(size))
            found = set(pool.map(lambda rank, size=size: agree_on_start(rank, size, store, 20.0), ranks))
        assert len(found) == 1
        words += found
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_start(rank, missing):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with raises("rank-start-late", missing):
        agree_on_start(rank, 2, store, 0.2)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with raises("store-unreachable", "MASTER_PORT"):
            open_store(srun(0, host="127.0.0.1", port=taken.getsockname()[1]), 5.0)


def test_the_store_of_our_own_starter_takes_a_strangers_word_for_nothing():
    tcp = create_store("127.0.0.1", 0, SECOND)
    secret = new_secret()
    ours = sign_store(tcp, secret)[1]
    ours.set("ranvier/pid/0", "4711")
    stranger = TCPStore("127.0.0.1", tcp.port, is_master=False, timeout=SECOND)
    (key,) = [key for key in stranger.list_keys() if key.endswith("ranvier/pid/0")] if hasattr(
        stranger, "list_keys") else [f"{private_prefix(secret)}/ranvier/pid/0"]
    signature = stranger.get(key)[:64].decode()
    for forged in ("1", "-1", signature + "1", "0" * 64 + "1", ""):
        stranger.set(key, forged)
        assert not ours.check(["ranvier/pid/0"]) and ours.get("ranvier/pid/0") == b""
        assert read_pids(ours, 1) == {}
    stranger.set(key.replace("pid/0", "pid/1"), signature + "4711")
    assert not ours.check(["ranvier/pid/1"]), "a signature covers its key, too"
    stranger.set("ranvier/pid/0", "1")
    assert read_pids(ours, 2) == {}


def test_ranks_with_one_secret_agree():
    store = HashStore()
    one, other, stranger = (SignedStore(store, secret) for secret in ("a", "a", "b"))
    one.set("key", "valü")
    assert other.get("key").decode() == "valü" and other.check(["key"])
    assert not stranger.check(["key"]) and not other.check(["key", "none"])
    assert stranger.compare_set("first", "", "stranger") == b"stranger"
    assert one.compare_set("first", "", "one") == b"one", "values that no rank of this run wrote are ignored"
    assert other.clone().compare_set("first", "", "other") == b"one"
    assert other.delete_key("key") and not one.check(["key"])
    assert sign_store(store, None) == (store, store)


def test_where_the_secret_comes_from(monkeypatch):
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert detect(variables).secret is None
    started = detect(variables | {"RANVIER_SECRET": "from the job script"})
    assert started.secret == "from the job script" and "job script" not in repr(started) + str(started)
    assert len({new_secret() for _ in range(8)}) == 8 and len(new_secret()) == 64
    assert "from the job" not in private_prefix("from the job script")
    monkeypatch.setattr(shared_store, "find_spec", lambda name: None)
    with raises("rank-0-address-unknown"):
        open_store(Started(launcher="mpiexec", rank=0, size=2, mpi=True), 5.0)
