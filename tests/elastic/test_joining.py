"""Ranks that join a run in progress: what it then computes, and what happens to newcomers that die or do not belong.

If a test needs a certain moment of the run, its ranks are stopped (SIGSTOP) until the newcomers wait for them.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from ranvier.cli.main import run_command
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.signed_store import sign_store
from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import Comm, Data, Elastic, Launch, Run
from ranvier.elastic.change import MeshRequest
from ranvier.launch import contact, devices, joining, start, supervision
from ranvier.launch.contact import connect, read_contact
from ranvier.launch.joining import Call, Newcomer
from ranvier.launch.launchers import Started
from ranvier.launch.stores import create_store
from ranvier.mesh import Mesh
from ranvier.planner.problems import problems
from ranvier.train import joining as joining_run
from ranvier.train.joining import RUN, _read_facts, join_problem, read_run, wanted_mesh
from ranvier.train.resize import take_oldest, write_request
from ranvier.world import JoinPoint, World
from tests.elastic.processes import events, silent_newcomer, stopped, undisturbed
from tests.elastic.runs import tiny
from tests.errors import raises
from tests.launch.network_hosts import ADDRESSES, connected
from tests.launch.test_shared_store import SECOND


def requests(run):
    return list(run.folder.glob("resize-*.json"))


@pytest.mark.slow
def test_ranks_join_twice_and_nothing_changes_but_the_mesh(start_run, tmp_path):
    """One rank, then three replicas, then four ranks in a pipeline of two: losses are those of one rank, each is
    reported once, and all ranks end the same. Only the user can read the secret, which is removed at the end.

    test_lost_ranks also tests ranks that join once."""
    begin, join = start_run
    run = begin(1, model__num_layers=2, train__steps=50, checkpoint__every=20, train__eval_every=22)
    with stopped(run):
        assert (run.folder / contact.NAME).stat().st_mode & 0o777 == 0o600
        first = join(run, "--ranks", 2)
        run.wait_until(lambda: requests(run))
    run.wait_until(lambda: len(run.transitions) == 1)
    with stopped(run):
        second = join(run, "--data", 2, "--pipe", 2)
        run.wait_until(lambda: requests(run))
    code, text = run.end()
    assert code == 0, text
    for each, name in ((first, "rank 1 to 2 of 3"), (second, "rank 3 of 4")):
        code, joined = each.end()
        assert code == 0 and f"joined {run.folder}: {name}" in joined, joined
    assert [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in run.transitions] == [(3, 1), (2, 2)]
    assert all("(for ranks that have joined)" in line["text"] for line in run.transitions)
    assert [(line["ranks"], line["text"]) for line in events(run, "joined")] == [
        (2, "2 ranks have joined: the run has 3"), (1, "1 rank has joined: the run has 4")]
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, 51))
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-12)
    assert not (run.folder / contact.NAME).exists()


@pytest.mark.slow
def test_ranks_that_find_no_place_idle_until_a_mesh_takes_them(start_run, tmp_path):
    """Layers freeze in the meantime, and a later request takes the idle rank as a replica."""
    begin, join = start_run
    run = begin(2, train__steps=200, manual="150:2")
    with stopped(run):
        joined = join(run, "--ranks", 1)
        run.wait_until(lambda: requests(run))
    run.wait_until(lambda: events(run, "resize-refused"))
    refused, = events(run, "resize-refused")
    assert "is the mesh that the run has" in refused["text"]
    write_request(run.folder, "0123456789abcdef", {"data": 3, "pipe": 1})
    code, text = run.end()
    assert code == 0, text
    assert joined.end()[0] == 0
    assert (3, 1) in [(line["mesh"]["data"], line["mesh"]["pipe"]) for line in run.transitions]
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-9)


@pytest.mark.slow
def test_newcomers_that_die_before_the_run_calls_them(start_run, tmp_path):
    begin, join = start_run
    run = begin(2, train__steps=160)
    with stopped(run):
        dead = join(run)
        run.wait_until(lambda: requests(run))
        for process in dead.ranks().values():
            os.kill(process, signal.SIGKILL)
        assert dead.process.wait() == 1
        assert "joining rank 0, which has not joined, was killed by SIGKILL" in dead.end()[1]
    code, text = run.end()
    assert code == 0, text
    refused, = events(run, "join-refused")
    assert "1 of 1 ranks that wanted to join do not answer" in refused["text"]
    assert not run.transitions
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-12)


@pytest.mark.slow
def test_a_newcomer_that_answers_and_never_connects(start_run, tmp_path):
    """All ranks of the run give up after the same limit, and continue as before."""
    begin, _ = start_run
    run = begin(2, train__steps=60, comm__timeout_seconds=6)
    store, place = silent_newcomer(run)
    run.wait_until(lambda: store.check([f"{place}/verdict"]))
    assert "one of them is gone or does not answer" in json.loads(store.get(f"{place}/verdict"))
    code, text = run.end()
    assert code == 0, text
    assert len(events(run, "join-refused")) == 1 and not run.transitions
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-12)


@pytest.mark.slow
def test_a_rank_that_has_joined_is_killed(start_run, tmp_path):
    """The run restarts from its last checkpoint, on the ranks with which it was started."""
    begin, join = start_run
    run = begin(2, train__steps=10**6, max_restarts=1, checkpoint__every=5)
    with stopped(run):
        joined = join(run, "--ranks", 2)
        run.wait_until(lambda: requests(run))
    run.wait_until(lambda: run.transitions and run.lines("metrics.jsonl")[-1]["step"] > run.transitions[0]["step"] + 5)
    os.kill(joined.ranks()[1], signal.SIGKILL)
    code, text = joined.end()
    assert code == 1 and "joining rank 1, which was rank 3 of the run, was killed by SIGKILL" in text, text
    run.wait_until(lambda: any("resumes from" in line.get("text", "") for line in run.lines("events.jsonl")))
    at = run.lines("metrics.jsonl")[-1]["step"]
    run.wait_until(lambda: run.lines("metrics.jsonl")[-1]["step"] > at + 5)
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "restart 1 of 1: the run starts again from its newest checkpoint" in text, text
    steps = [line["step"] for line in run.lines("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.fixture
def hosts(tmp_path):
    yield from connected(tmp_path)


@pytest.mark.slow
def test_ranks_of_another_machine_join(hosts, start_run, tmp_path):
    """Two network namespaces, whose own host names resolve to loopback addresses."""
    begin, join = start_run
    run = begin(1, train__steps=60, launch__join_address=ADDRESSES[0], inside=hosts.run(0))
    with stopped(run):
        joined = join(run, inside=hosts.run(1))
        run.wait_until(lambda: requests(run))
    code, text = run.end()
    assert code == 0, text
    code, text = joined.end()
    assert code == 0 and "rank 1 of 2" in text, text
    assert [line["mesh"]["data"] for line in run.transitions] == [2]
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-12)


@pytest.mark.slow
def test_a_newcomer_that_is_told_to_stop_stops_the_run(start_run):
    begin, join = start_run
    run = begin(1, train__steps=10**6)
    run.wait_until((run.folder / contact.NAME).exists)
    joined = join(run)
    run.wait_until(lambda: run.transitions)
    joined.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "stopped by SIGTERM" in text, text
    assert joined.end()[0] == 0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.toml").write_text("")
    return tmp_path


def write(folder, **changes):
    contents = {"version": contact.__version__, "address": "127.0.0.1", "port": 1, "secret": "ab"} | changes
    (folder / contact.NAME).write_text(json.dumps(contents))


@pytest.mark.parametrize(("prepare", "code"), [
    (lambda folder: (folder / "run.toml").unlink(), "not-a-run-folder"),
    (lambda folder: (folder / "summary.json").write_text("{}"), "run-has-ended"),
    (lambda folder: None, "run-takes-no-ranks"),
    (lambda folder: (folder / contact.NAME).symlink_to("/etc/hostname"), "contact-unreadable"),
    (lambda folder: write(folder, port="x"), "contact-damaged"),
    (lambda folder: write(folder, port=float("inf")), "contact-damaged"),
    (lambda folder: (folder / contact.NAME).write_text("[" * 4000), "contact-damaged"),
    (lambda folder: write(folder, version="0.0.1"), "join-other-version"),
], ids=["no run", "ended", "takes none", "a link", "no number", "infinite",
        "no JSON", "other version"])
def test_a_folder_that_cannot_be_joined(folder, prepare, code):
    prepare(folder)
    with raises(code):
        read_contact(folder)


@pytest.mark.parametrize("port", [1, 70_000])
def test_a_run_that_was_killed(port):
    with raises("run-unreachable", "127.0.0.1"):
        connect(JoinPoint(address="127.0.0.1", port=port, secret="ab"))


def test_the_command_says_so(folder, capsys):
    """The error is one line, and no rank is started."""
    assert run_command(["join", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "takes no ranks: it has no join.json" in said.err


def test_under_a_launcher(folder, monkeypatch):
    from click.testing import CliRunner

    from ranvier.cli.join import join

    for name, value in {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(join, [str(folder)])
    assert result.exception.code == "join-under-launcher" and "torchrun" in result.exception.what
    with raises("membership-under-launcher"):
        start.start(join_address="127.0.0.1")


def test_a_run_over_mpi_takes_no_ranks():
    run = resolve(Run(comm=Comm(transport="mpi"), launch=Launch(join_address="127.0.0.1"), mesh=Mesh(data=2)))
    assert "join-needs-torch" in [found.code for found in problems(run)]
    with raises("membership-needs-torch"):
        start.start(join_address="127.0.0.1", transport="mpi")


def test_an_address_that_is_not_this_machines():
    from ranvier.launch.supervision import supervise

    with raises("join-address-not-here"):
        supervise(Mesh(), "torch", "", ["true"], {}, address="192.0.2.1")


def test_a_policy_that_newcomers_could_not_have(sentences, tmp_path):
    from ranvier.testing.ranks import run_ranks
    from ranvier.train.loop import train
    def work(world):
        world.joins = JoinPoint(address="127.0.0.1", port=1, secret="")
        train(tiny(sentences, tmp_path / "run", mesh=Mesh()), "tiny", world, freezing=object())

    with raises("join-with-policy-object"):
        run_ranks(work, 1)


@pytest.mark.parametrize(("said", "code"), [
    (None, "join-run-silent"), ({"torch": "1.0"}, "join-other-torch")])
def test_a_store_of_another_run(said, code, tmp_path):
    store = HashStore()
    if said is not None:
        store.set(RUN, json.dumps(said))
    with raises(code):
        _read_facts(store, tmp_path)


@pytest.mark.slow
def test_newcomers_with_other_data(start_run, sentences):
    begin, join = start_run
    run = begin(1, train__steps=10**6)
    run.wait_until((run.folder / contact.NAME).exists)
    path = sentences / "train.tsv"
    before = path.read_text()
    try:
        path.write_text(before + "1\tone more sentence\n")
        code, text = join(run).end()
    finally:
        path.write_text(before)
    assert code == 2 and text.count("ranvier: ") == 1 and "error: data: differs from the run's" in text, text
    assert run.process.poll() is None


def test_data_that_is_not_the_runs(tmp_path):
    started = Started(launcher="local", rank=0, size=1, local_rank=0, local_size=1, master=("127.0.0.1", 1), secret="s")
    run = resolve(Run(launch=Launch(threads=torch.get_num_threads())))
    with mock.patch.multiple(
            joining_run, exit_with_launcher=mock.DEFAULT, install_start_error_handlers=mock.DEFAULT,
            connect=mock.DEFAULT, use_interface_towards=mock.DEFAULT,
            sign_store=lambda *_: (None, None), _read_facts=lambda *_: {"data": "theirs"},
            read_run=lambda *_: run, prepare_run=lambda *_: (None, None, None), fingerprint=lambda _: "ours"):
        with raises("join-other-data", "theirs", where="data", value="ours"):
            joining_run.join_run(tmp_path, started, {}, seconds=1.0, stream=io.StringIO())


def test_newcomers_that_no_run_answers():
    store = HashStore()
    world = World(backend=InProcessWorld(1).backend(0), store=store, launcher="local", device=None, local_rank=0,
                  local_size=1)
    newcomer = Newcomer(world, "aa", 0, 2)
    with raises("join-late", "joining rank 1"):
        newcomer.await_others(0.05)
    with raises("join-late", "the run has not taken the request"):
        newcomer.join(0.05)
    joining.give_verdict(store, "aa", "the run ends")
    with raises("join-refused", 0):
        newcomer.join(5.0)


def test_the_rank_of_a_newcomer_that_has_died():
    """Its supervisor tells the run once the verdict has made the newcomer a rank, even if it died before: the others
    would wait for it until collectives time out."""
    store = HashStore()
    assert joining.rank_of_newcomer(store, "aa", 1) is None
    call = Call(request_id="aa", first=2, size=4, local_size=2, timeout_seconds=0.1)
    store.set("ranvier/join/aa/call", json.dumps(asdict(call)))
    assert joining.rank_of_newcomer(store, "aa", 1) is None
    later = threading.Timer(0.02, joining.give_verdict, (store, "aa", None))
    later.start()
    assert joining.rank_of_newcomer(store, "aa", 1) == 3
    later.join()
    joining.give_verdict(store, "aa", "the run ends")
    assert joining.rank_of_newcomer(store, "aa", 1) is None


def test_newcomers_whose_run_has_gone():
    tcp = create_store("127.0.0.1", 0, SECOND)
    _, store = sign_store(connect(JoinPoint(address="127.0.0.1", port=tcp.port, secret="ab")), "ab")
    world = World(backend=InProcessWorld(1).backend(0), store=store, launcher="local", device=None, local_rank=0,
                  local_size=1)
    del tcp
    with raises("join-run-gone"):
        Newcomer(world, "aa", 0, 1).join(5.0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"ranks": 0}, "must be from 1 to"), ({"ranks": None}, "must be from 1 to"), ({"request_id": None}, "has no ID"),
    ({"problem": "cannot be read"}, "cannot be read")])
def test_a_request_that_names_no_newcomers(changes, message):
    store = HashStore()
    world = World(backend=InProcessWorld(1).backend(0), store=store, launcher="local", device=None, local_rank=0,
                  local_size=1)
    request = MeshRequest(sizes={"data": None, "pipe": None}, ranks=1, request_id="aa")
    assert "without --launch.join-address" in join_problem(world, request)
    world.joins = JoinPoint(address="127.0.0.1", port=1, secret="")
    assert join_problem(world, request) is None
    assert message in join_problem(world, replace(request, **changes))


def test_a_request_of_newcomers_is_read(tmp_path):
    write_request(tmp_path, "00000000000000aa", {"ranks": 3, "pipe": 2})
    request = take_oldest(tmp_path)
    assert request == MeshRequest(sizes={"data": None, "pipe": 2}, ranks=3, request_id="00000000000000aa")
    assert wanted_mesh(request, Mesh(data=2, row=2), 13) == MeshRequest(
        sizes={"data": 3, "pipe": 2, "row": 2, "col": 1}, request_id="00000000000000aa",
                                                                        reason="for ranks that have joined")
    assert wanted_mesh(replace(request, sizes={"data": 1}), Mesh(data=2), 13).sizes["data"] == 1


# --- what newcomers need ---------------------------------------------------------------------------------------------


def test_newcomers_read_the_run_as_it_was_asked_for(tmp_path):
    run = resolve(Run(mesh=Mesh(data=2, row=2, col=2, tile=(1, 2)), data=Data(cache_dir=tmp_path),
                      elastic=Elastic(freeze="manual", manual=("3:1", "5:2")), launch=Launch(join_address="127.0.0.1")))
    said = json.loads(json.dumps({"run": read.document(run), "tile": run.mesh.tile}))
    assert read_run(said, tmp_path / "there") == replace(run, run_dir=tmp_path / "there")


def test_the_supervisor_of_newcomers_has_the_runs_limit_for_stopped_ranks(tmp_path, monkeypatch):
    run = resolve(Run(mesh=Mesh(), data=Data(cache_dir=tmp_path), launch=Launch(
        join_address="127.0.0.1", stopped_seconds=7.0)))
    store = create_store("127.0.0.1", 0, SECOND)
    sign_store(store, "ab")[1].set(RUN, json.dumps({
        "run": read.document(run), "tile": None, "torch": torch.__version__.partition("+")[0]}))
    (tmp_path / "run.toml").touch()
    contact.write_contact(tmp_path, JoinPoint(address="127.0.0.1", port=store.port, secret="ab"))
    found = []
    monkeypatch.setattr(supervision, "supervise", lambda *args, **options: (
        found.append(options["stopped_seconds"]), supervision.Outcome(code=0))[1])
    assert run_command(["join", str(tmp_path)]) == 0 and found == [7.0]


def test_each_newcomer_claims_a_device_of_its_own():
    store = HashStore()

    def seen(machine, *uuids, rank=0, local_rank=0):
        return devices.RankDevices(rank=rank, local_rank=local_rank, local_size=2, machine=machine, devices=uuids,
                                   setting="auto", transport="torch", torch="2", nccl="2")

    for rank in range(2):
        store.set(f"{devices.DEVICES_KEY}{rank}", json.dumps(devices.asdict(
            seen("here", *"abcd", rank=rank, local_rank=rank))))
    assert [devices.claim_device(seen("here", *"abcd"), store) for _ in range(3)] == [2, 3, None]
    assert devices.claim_device(seen("there", *"ab"), store) == 0


def test_limits_leave_time_for_ranks_that_are_through():
    call = Call(request_id="aa", first=1, size=2, local_size=1, timeout_seconds=6.0)
    assert call.answer_seconds + call.connect_seconds < call.timeout_seconds
    assert Call(**json.loads(json.dumps(asdict(call)))) == call
