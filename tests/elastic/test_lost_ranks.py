"""Ranks that are killed while others have their state: the run continues without them, with the same losses.

Processes are killed from outside at an arbitrary moment; the agreement after a loss is tested within one process.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from ranvier.checkpoint.state import Piece
from ranvier.comm.inprocess import InProcessWorld
from ranvier.comm.torch_backend import PeerSockets, torch_generation
from ranvier.config import effects
from ranvier.config.resolve import resolve
from ranvier.config.run import Checkpoint, Comm, Elastic, Launch, Run, Train
from ranvier.elastic.transition import Held, with_states_of_neighbour
from ranvier.errors import TransportError
from ranvier.launch import contact, start
from ranvier.launch import lost_ranks as lost_rank_protocol
from ranvier.launch.heartbeat import FAILED
from ranvier.launch.launchers import Started
from ranvier.launch.lost_ranks import Agreement, LostRank, LostRanks, end_reason, report_lost_rank
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.planner.problems import problems
from ranvier.testing.ranks import run_ranks
from ranvier.train import elasticity, session
from ranvier.train.loop import train
from ranvier.train.resize import Requests, write_request
from ranvier.train.restart import mesh_without
from ranvier.train.survival import LastSteps, missing_state
from ranvier.world import World
from tests.elastic.processes import events, resize, silent_newcomer, stopped, undisturbed
from tests.elastic.runs import events as told
from tests.elastic.runs import tiny
from tests.errors import raises


def begin(start_run, ranks, **options):
    """A run that survives losses, on `ranks` replicas unless told otherwise."""
    options = {"mesh__data": ranks, "mesh__pipe": 1, "launch__survive_losses": "true",
               "comm__timeout_seconds": 60} | options
    return start_run[0](ranks, **options)


def steps(run):
    return [line["step"] for line in run.lines("metrics.jsonl")]


def kill(run, process, *, after=5, number=signal.SIGKILL):
    """Kill or stop a rank after `after` more steps; returns once the run has lost it."""
    at, lost = len(steps(run)), len(events(run, "lost"))
    run.wait_until(lambda: len(steps(run)) >= at + after)
    os.kill(process, number)
    run.wait_until(lambda: len(events(run, "lost")) > lost)


def wait_until_resumed(run):
    """Wait for the run's first step after resuming: before it there is nothing to save, and a signal ends it."""
    run.wait_until(lambda: any("resumes from" in line.get("text", "") for line in run.lines("events.jsonl")))
    at = len(steps(run))
    run.wait_until(lambda: len(steps(run)) > at)


def check(run, tmp_path, count):
    """Check that the run succeeded, reported each of `count` steps once, and has the losses of one rank."""
    code, text = run.end()
    assert code == 0, text
    assert "restart" not in text
    assert steps(run) == list(range(1, count + 1))
    assert run.losses == pytest.approx(undisturbed(run, tmp_path), rel=1e-12)
    return text


def test_a_rank_joins_and_is_lost_and_nothing_changes_but_the_mesh(start_run, tmp_path):
    """One rank, then two replicas. Only the user can read the secret, which is removed at the end."""
    run = begin(start_run, 1, model__num_layers=2, train__steps=40, checkpoint__every=7, train__eval_every=10)
    with stopped(run):
        assert (run.folder / contact.NAME).stat().st_mode & 0o777 == 0o600
        joined = start_run[1](run, "--ranks", 1)
        run.wait_until(lambda: list(run.folder.glob("resize-*.json")))
    run.wait_until(lambda: run.transitions)
    kill(run, joined.ranks()[0])
    text = check(run, tmp_path, 40)
    assert text.count("rank 1, which was killed by SIGKILL, is lost: the run goes on with") == 1
    assert [line["mesh"]["data"] for line in run.transitions] == [2, 1]
    assert "(for ranks that have joined)" in run.transitions[0]["text"]
    assert [(line["ranks"], line["text"]) for line in events(run, "joined")] == [
        (1, "1 rank has joined: the run has 2")]
    assert [(line["ranks"], line["left"], line["mesh"]["data"]) for line in events(run, "lost")] == [([1], 1, 1)]
    assert not (run.folder / contact.NAME).exists()
    code, text = joined.end()
    assert code == 1 and f"joined {run.folder}: rank 1 of 2" in text, text


@pytest.mark.slow
def test_two_of_three_replicas_are_lost_one_after_the_other(start_run, tmp_path):
    """The survivors stay the same processes, and the second lost rank then has another number."""
    run = begin(start_run, 3, train__steps=60, checkpoint__every=7, train__eval_every=10, launch__stopped_seconds=1)
    run.wait_until(lambda: steps(run))
    ranks = run.ranks()
    kill(run, ranks[1])
    assert {rank: process for rank, process in run.ranks().items() if rank != 1} == {0: ranks[0], 2: ranks[2]}
    kill(run, ranks[2], number=signal.SIGSTOP)
    text = check(run, tmp_path, 60)
    assert "was stopped by SIGSTOP, and killed; the others try" in text and text.count("; the others try") == 2
    first, second = events(run, "lost")
    assert (first["ranks"], first["left"], first["mesh"]["data"]) == ([1], 2, 2)
    assert (second["ranks"], second["left"], second["mesh"]["data"]) == ([1], 1, 1)
    assert "rank 1, which was killed by SIGKILL, is lost: the run goes on with 2 ranks as data 2 from step" in text
    assert [line["mesh"]["data"] for line in run.transitions] == [2, 1]


@pytest.mark.slow
def test_a_rank_whose_state_nobody_else_has(start_run):
    run = begin(start_run, 2, mesh__data=1, mesh__pipe=2, train__steps=10**6)
    run.wait_until(lambda: len(steps(run)) > 3)
    os.kill(run.ranks()[1], signal.SIGKILL)
    code, text = run.end()
    assert code == 1, text
    assert "was killed by SIGKILL (by the kernel, if memory ran out); the other ranks were terminated" in text
    assert "ranvier: the run cannot continue without it: no other rank has the state of pipe 1" in text
    assert not events(run, "lost")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_of_two_pipelines(start_run, tmp_path, victim):
    run = begin(start_run, 4, mesh__data=2, mesh__pipe=2, train__steps=100)
    run.wait_until(lambda: steps(run))
    kill(run, run.ranks()[victim])
    check(run, tmp_path, 100)
    lost, = events(run, "lost")
    assert (lost["ranks"], lost["left"], lost["mesh"]) == ([victim], 3, {"data": 1, "pipe": 3, "row": 1, "col": 1})


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 0.02, 0.05, 0.1])
def test_while_every_step_is_evaluated_and_saved(start_run, tmp_path, wait):
    """The last checkpoint is complete at the end."""
    run = begin(start_run, 3, train__steps=60, checkpoint__every=1, train__eval_every=1)
    run.wait_until(lambda: len(steps(run)) > 4)
    time.sleep(wait)
    kill(run, run.ranks()[2], after=0)
    check(run, tmp_path, 60)
    assert (run.folder / "checkpoint" / "step-60").is_dir()
    assert not events(run, "checkpoint-failed")


@pytest.mark.slow
def test_two_at_once(start_run, tmp_path):
    run = begin(start_run, 4, train__steps=100)
    run.wait_until(lambda: len(steps(run)) > 3)
    ranks = run.ranks()
    for rank in (1, 3):
        os.kill(ranks[rank], signal.SIGKILL)
    check(run, tmp_path, 100)
    assert sum(len(line["ranks"]) for line in events(run, "lost")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.05, 0.15, 0.3, 0.6])
def test_another_one_while_the_run_lets_go_of_one(start_run, tmp_path, wait):
    run = begin(start_run, 4, train__steps=100)
    run.wait_until(lambda: len(steps(run)) > 3)
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    time.sleep(wait)
    os.kill(ranks[2], signal.SIGKILL)
    check(run, tmp_path, 100)


@pytest.mark.slow
def test_losses_after_joins_and_joins_after_losses(start_run, tmp_path):
    run = begin(start_run, 2, train__steps=600)
    run.wait_until(lambda: steps(run))
    first = start_run[1](run, "--ranks", 2)
    run.wait_until(lambda: events(run, "joined"))
    kill(run, run.ranks()[1])  # the others are rank 0, and ranks 1 and 2, which have joined
    kill(run, first.ranks()[0])
    second = start_run[1](run)
    run.wait_until(lambda: len(events(run, "joined")) == 2)
    kill(run, first.ranks()[1])
    check(run, tmp_path, 600)
    assert first.end()[0] == 1 and second.end()[0] == 0
    assert [line["left"] for line in events(run, "lost")] == [3, 2, 2]
    assert [line["ranks"] for line in events(run, "joined")] == [2, 1]


@pytest.mark.slow
def test_a_loss_right_after_a_join(start_run, tmp_path):
    """The newcomers get their place, whether the loss comes before, during or after the transition to it."""
    run = begin(start_run, 2, train__steps=200)
    run.wait_until(lambda: steps(run))
    newcomers, ranks = start_run[1](run, "--ranks", 2), run.ranks()
    run.wait_until(lambda: events(run, "joined"))
    kill(run, ranks[1], after=0)
    run.wait_until(lambda: run.transitions and run.transitions[-1]["mesh"]["data"] == 3)
    check(run, tmp_path, 200)
    assert newcomers.end()[0] == 0


@pytest.mark.slow
def test_a_loss_while_ranks_connect(start_run, tmp_path):
    """A newcomer that answers and never connects is refused immediately."""
    run = begin(start_run, 3, train__steps=160)
    store, place = silent_newcomer(run)
    kill(run, run.ranks()[1], after=0)
    assert json.loads(store.get(f"{place}/verdict")) == "a rank of the run was lost meanwhile"
    refused, = events(run, "resize-refused")
    assert refused["ranks"] == 1 and "refused: a rank of the run was lost meanwhile" in refused["text"]
    check(run, tmp_path, 160)


@pytest.mark.slow
def test_an_idle_rank_is_lost(start_run, tmp_path):
    run = begin(start_run, 3, train__steps=200, batch__global_size=8)
    run.wait_until(lambda: steps(run))
    assert resize(run, 2, 1).returncode == 0
    kill(run, run.ranks()[2])
    assert events(run, "lost")[0]["mesh"]["data"] == 2
    check(run, tmp_path, 200)


@pytest.mark.slow
def test_rank_0_is_lost(start_run):
    run = begin(start_run, 3, train__steps=10**6, checkpoint__every=5, max_restarts=1)
    run.wait_until(lambda: len(steps(run)) > 7)
    os.kill(run.ranks()[0], signal.SIGKILL)
    wait_until_resumed(run)
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "restart 1 of 1: the run starts again from its newest checkpoint, on 2 of the 2" in text, text


@pytest.mark.slow
@pytest.mark.parametrize(("data", "pipe", "victim"), [(3, 1, 2), (3, 1, 1), (2, 2, 3)])
def test_sharded_states_of_a_lost_rank_are_with_the_next_replica(start_run, tmp_path, data, pipe, victim):
    run = begin(start_run, data * pipe, mesh__data=data, mesh__pipe=pipe, train__steps=100, optim__shard="true")
    run.wait_until(lambda: steps(run))
    kill(run, run.ranks()[victim])
    check(run, tmp_path, 100)


@pytest.mark.slow
def test_sharded_states_of_neighbours_are_lost(start_run):
    run = begin(start_run, 4, train__steps=10**6, checkpoint__every=5, max_restarts=1, optim__shard="true")
    run.wait_until(lambda: len(steps(run)) > 7)
    ranks = run.ranks()
    for rank in (2, 3):
        os.kill(ranks[rank], signal.SIGKILL)
    wait_until_resumed(run)
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "the run cannot continue without it: no other rank has the state of data 2" in text, text


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_after_a_loss_and_resumes(start_run, tmp_path):
    run = begin(start_run, 3, train__steps=10**6, checkpoint__every=0)
    run.wait_until(lambda: steps(run))
    kill(run, run.ranks()[1])
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0 and "stopped by SIGTERM" in text, text
    assert steps(run) == list(range(1, len(steps(run)) + 1))


# --- what is missing, and where the run goes -------------------------------------------------------------------------


def parts(mesh, *ranks, frozen=(), sharded=False):
    def places(at):
        return [at, at.replace("data", (at.data - 1) % mesh.data)] if sharded else [at]

    return [{"7": {"mesh": dict(mesh.sizes), "places": [dict(place) for place in places(mesh.coordinates(rank))],
                   "replica_axes": mesh.replica_axes, "frozen": list(frozen)}} for rank in ranks]


@pytest.mark.parametrize(("mesh", "survivors", "sharded", "missing"), [
    (Mesh(data=3), [0], False, None),
    (Mesh(data=3), [0, 1], True, None),
    (Mesh(data=3), [0], True, "no other rank has the state of data 1"),
    (Mesh(data=2, pipe=2), [0, 1], False, None),
    (Mesh(data=2, pipe=2), [0, 3], False, None),
    (Mesh(data=2, pipe=2), [0, 2], False, "no other rank has the state of pipe 1"),
    (Mesh(row=2, col=2), [0, 1, 2], False, "no other rank has the state of row 1, col 1"),
], ids=str)
def test_the_state_that_no_survivor_has(mesh, survivors, sharded, missing):
    have = [*parts(mesh, *survivors, sharded=sharded), {}, {"6": {}}]  # and an idle rank, and one a step behind
    assert missing_state(have, 7, sharded=sharded) == missing


def test_state_of_two_meshes_counts_where_one_is_whole():
    """A rank is lost while a transition ends: some ranks have already copied the state on the new mesh."""
    there = [*parts(Mesh(pipe=2), 0), *parts(Mesh(data=2), 1)]
    assert missing_state(there, 7, sharded=False) is None
    assert missing_state(parts(Mesh(pipe=2), 0) + parts(Mesh(data=2), 1, frozen=[0]), 7, sharded=False)
    assert missing_state([{}], 7, sharded=False) == "no survivor has the state of the last step"


@pytest.mark.parametrize(("mesh", "left", "found"), [
    (Mesh(data=3), 2, Mesh(data=2)), (Mesh(data=2), 3, Mesh(data=2)), (Mesh(data=2, pipe=2), 3, Mesh(pipe=3))], ids=str)
def test_the_mesh_of_those_that_are_left(mesh, left, found, tmp_path):
    assert mesh_without(resolve(Run(mesh=mesh, train=Train(steps=5), run_dir=tmp_path)), left) == found


@pytest.mark.parametrize("shard", [pytest.param(False, marks=pytest.mark.slow), True])
def test_copies_take_what_is_predicted(sentences, tmp_path, shard, monkeypatch):
    """The prediction is exact to the byte. The third copy reuses the memory of the first."""
    keep, places = LastSteps.keep, {}

    def noted(self, step, now):
        keep(self, step, now)
        places[now.world.rank, step] = {piece.tensor.data_ptr() for piece in self.state_after(step).pieces}

    monkeypatch.setattr(LastSteps, "keep", noted)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), memory_report=True, train=Train(steps=3),
               launch=Launch(survive_losses=True))
    run = replace(run, optim=replace(run.optim, shard=shard))

    def work(world):
        world.torch_store = HashStore()
        return train(run, "tiny", world, stream=io.StringIO())

    for rank in run_ranks(work, 2)[0]["memory"]:
        assert rank["host"]["copies"] == laid_out(resolve(run))[1][0].host["copies"]
    for rank in range(2):
        assert places[rank, 3] & places[rank, 1] and not places[rank, 3] & places[rank, 2]


@pytest.mark.parametrize("place", [(elasticity.Elasticity, "decide"), (session, "hand_over")], ids=["decide", "moves"])
def test_a_loss_in_a_transition_costs_no_checkpoint(sentences, tmp_path, monkeypatch, place):
    """Layers freeze after step 3, whose checkpoint is written after the transition, and is the best one so far."""
    (owner, name), broken = place, []
    method = getattr(owner, name)

    def breaks(*args, **options):
        if not broken:
            broken.append(name)
            raise TransportError("is gone", code="peer-lost", where="rank 1", remedy="")
        return method(*args, **options)

    def agree(self, error, has, decide):
        lost = {1: LostRank(member="1", how="was killed")}
        return Agreement(number=1, lost=lost, members=("0",), decision=decide([has]))

    monkeypatch.setattr(owner, name, breaks)
    monkeypatch.setattr(LostRanks, "agree", agree)
    monkeypatch.setattr(LostRanks, "connect", lambda self, agreement: None)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(), train=Train(steps=4, eval_every=3, learning_rate=3e-3),
               launch=Launch(survive_losses=True), checkpoint=Checkpoint(every=3, best="eval_loss"),
               elastic=Elastic(freeze="manual", manual=("3:1",)))

    def work(world):
        world.torch_store = HashStore()
        return train(run, "tiny", world, stream=io.StringIO())

    run_ranks(work, 1)
    steps = {path.name for path in (tmp_path / "run/checkpoint").glob("step-*")}
    assert broken and len(told(run, "lost")) == 1 and steps == {"step-3", "step-4"}
    assert (tmp_path / "run/checkpoint/best").exists()


def test_the_states_of_the_replica_before():
    def work(world):
        rank = world.rank
        own = [Piece(kind="parameter", name="a", shape=(2,), box=((0, 2),), tensor=torch.zeros(2)),
               Piece(kind="step", name="a", shape=(), box=(), tensor=torch.tensor(float(rank))),
               Piece(kind="exp_avg", name="a", shape=(9, 2), box=((rank, rank + 1), (0, 2)),
                     tensor=torch.full((1, 2), rank, dtype=torch.bfloat16)),
               *[Piece(kind="exp_avg_sq", name="a", shape=(4,), box=((0, 3),),
                       tensor=torch.arange(3, dtype=torch.float64) + rank)] * rank]
        held = Held(pieces=own, numbers={}, frozen=[], missed_updates={f"of {rank}": rank},
                    optimizer_groups=[])
        found = with_states_of_neighbour(held, world.backend.group("copies", [range(3)]))
        assert found.pieces[:len(own)] == own
        return found.pieces[len(own):], found.missed_updates

    for rank, (found, missed_updates) in enumerate(run_ranks(work, 3)):
        before = (rank - 1) % 3
        assert missed_updates == {f"of {rank}": rank, f"of {before}": before}
        assert [(piece.kind, piece.shape, piece.box) for piece in found] == [
            ("step", (), ()), ("exp_avg", (9, 2), ((before, before + 1), (0, 2))),
            *[("exp_avg_sq", (4,), ((0, 3),))] * before]
        assert found[0].tensor.item() == before and found[1].tensor.tolist() == [[before, before]]
        assert found[1].tensor.dtype is torch.bfloat16
        assert all(piece.tensor.tolist() == [before, before + 1, before + 2] for piece in found[2:])


@pytest.mark.parametrize("left", [1, 0])
def test_a_loss_between_a_join_and_its_mesh(tmp_path, left):
    """The run takes the request again, unless the newcomers are gone. It has been answered, so it is not reported."""
    def work(world):
        requests, everyone = Requests(world, tmp_path), world.backend.group("everyone", [range(1)])
        write_request(tmp_path, request_id := "00000000000000aa", {"ranks": 2})
        taken = requests.take(everyone)
        requests.current = replace(taken, has_joined=True)
        world.members = ("0", *[f"{request_id}/1"] * left)
        assert requests.after_loss(5) is None
        assert requests.are_waiting() is bool(left)
        assert requests.take(everyone) == (replace(taken, has_joined=True) if left else None)
        assert not requests.are_waiting()

    run_ranks(work, 1)


# --- what is agreed on -----------------------------------------------------------------------------------------------


class Ranks:
    """Ranks that only run the agreement, each on its own thread."""

    def __init__(self, count, *, seconds=5.0):
        self.store, self.broken = HashStore(), []
        self.worlds = [World(backend=backend, store=Cloned(self.store), launcher="local", device=None, local_rank=rank,
                             local_size=count, sever=lambda rank=rank: self.broken.append(rank))
                       for rank, backend in enumerate(InProcessWorld(count).backend(rank) for rank in range(count))]
        self.losses = [LostRanks(world, timeout_seconds=seconds, on_lost_rank=lambda: None) for world in self.worlds]
        for each in self.losses:
            each.begin()

    def agree(self, *ranks, decide=lambda parts: {"parts": parts}):
        """What each of `ranks` gets: an agreement, or the error."""
        found = {}

        def work(rank):
            try:
                found[rank] = self.losses[rank].agree(TransportError("gone", where="x", remedy=""), rank, decide)
            except TransportError as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in ranks]


class Cloned:
    """A store whose clone is the store itself, which is enough for these tests."""

    def __init__(self, store):
        self._store = store

    def clone(self):
        return self

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(lost_rank_protocol, "_NOTICE_SECONDS", 0.3)
    made = []

    def make(count, **options):
        made.append(Ranks(count, **options))
        return made[-1]

    yield make
    for each in made:
        for one in each.losses:
            one.close()


def test_survivors_agree(ranks):
    run = ranks(4)
    assert report_lost_rank(run.store, LostRank(member="1", how="died"))
    found = run.agree(0, 2, 3)
    assert {one.members for one in found} == {("0", "2", "3")}
    assert [dict(one.lost) for one in found] == [{1: LostRank(member="1", how="died")}] * 3
    assert found[2].decision == {"parts": [0, 2, 3]}
    assert {0, 1, 2} <= {*run.broken} and [world.num_lost_ranks for world in run.worlds] == [1, 0, 1, 1]


def test_an_error_without_a_loss_stays(ranks):
    run = ranks(2)
    error, = run.agree(1)
    assert isinstance(error, TransportError) and not run.broken


def test_a_rank_that_fails_by_itself_is_not_waited_for(ranks, monkeypatch):
    monkeypatch.setattr(lost_rank_protocol, "_NOTICE_SECONDS", 30.0)
    run, began = ranks(2), time.monotonic()
    run.store.set(FAILED, "{}")
    error, = run.agree(1)
    assert isinstance(error, TransportError) and time.monotonic() - began < 10.0


@pytest.mark.parametrize(("lost", "asked", "why"), [
    ("1", (0, 2), "nobody has it"), ("1", (0,), "survivors do not answer"), ("0", (1, 2), None)],
    ids=["state is missing", "one does not answer", "rank 0"])
def test_a_run_that_cannot_go_on(ranks, lost, asked, why):
    run = ranks(3, seconds=0.3)
    report_lost_rank(run.store, LostRank(member=lost, how="died"))
    found = run.agree(*asked, decide=lambda parts: "nobody has it")
    assert all(isinstance(one, TransportError) for one in found)
    assert end_reason(run.store) == why


def test_another_loss_begins_it_again(ranks):
    run = ranks(4)
    report_lost_rank(run.store, LostRank(member="1", how="died"))
    later = threading.Timer(0.3, report_lost_rank, (run.store, LostRank(member="3", how="died, too")))
    later.start()
    found = run.agree(0, 2)  # 3 never answers
    assert {one.members for one in found} == {("0", "2")} and found[0].number == 2
    later.join()


def test_losses_before_the_begin_and_after_the_end():
    store = HashStore()
    assert not report_lost_rank(store, LostRank(member="1", how="died"))
    run = Ranks(2)
    run.losses[0].end()
    assert not report_lost_rank(run.store, LostRank(member="1", how="died"))
    for each in run.losses:
        each.close()


def test_the_end_is_put_off_by_a_loss(ranks):
    run = ranks(2)
    assert report_lost_rank(run.store, LostRank(member="1", how="died"))
    with raises("rank-lost"):
        run.losses[0].end()


def test_the_other_end_of_a_severed_connection_wakes():
    server = socket.create_server(("127.0.0.1", 0))
    sockets, kept = PeerSockets(), socket.create_connection(server.getsockname())
    with sockets.opening():
        own = socket.create_connection(server.getsockname())
    others = [server.accept()[0] for _ in range(2)]
    threading.Timer(0.05, sockets.sever).start()
    assert others[1].recv(1) == b"" and own.recv(1) == b""
    assert sockets.sever() == 0
    kept.sendall(b"x")  # not a connection of a group
    assert others[0].recv(1) == b"x"
    for each in (server, kept, own, *others):
        each.close()


def test_torch_does_not_warn_of_connections_that_are_broken_on_purpose(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert start.rank_variables(1, 1, True)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert "TORCH_CPP_LOG_LEVEL" not in start.rank_variables(1, 1, False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert start.rank_variables(1, 1, True)["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_a_rank_that_connects_does_not_wait_for_a_lost_one():
    """The rank waits inside Gloo, where nothing else wakes it."""
    backend = torch_generation("alone", 0, 1, HashStore(), torch.device("cpu"), 5.0, connect_seconds=5.0)
    backend.size = 2
    timer, began = threading.Timer(0.2, backend.sockets.sever), time.monotonic()
    timer.start()
    with raises("group-not-connected", "late", 0):
        backend.group("late", [[0, 1]])
    assert time.monotonic() - began < 4.0
    timer.join()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"comm": Comm(transport="mpi")}, "survive-losses: needs comm.transport torch"),
    ({"device": "cuda"}, "survive-losses: needs launch.device cpu")], ids=["MPI", "CUDA"])
def test_where_losses_cannot_be_survived(changes, message):
    launch = Launch(survive_losses=True, device=changes.pop("device", "auto"))
    assert any(message in str(found) for found in problems(resolve(Run(launch=launch, mesh=Mesh(data=2), **changes))))


def test_under_another_launcher_or_transport(monkeypatch):
    with raises("membership-needs-torch", "survive_losses"):
        start.start(survive_losses=True, transport="mpi", data=2)
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with raises("membership-under-launcher"):
        start.start(survive_losses=True, data=2)


def test_on_devices_that_are_found_late(monkeypatch):
    monkeypatch.setattr(start, "_agree_on_device", lambda *given: (
        torch.device("cuda", 0), start.Choice(value="cuda", reason=""), (0,)))
    alone = Started(launcher="local", rank=0, size=1, local_rank=0, local_size=1)
    with raises("survive-losses-on-device"):
        start._connect_rank(Mesh(), alone, Comm(transport="torch"), Launch(
            threads=torch.get_num_threads(), survive_losses=True), None)


@pytest.mark.parametrize(("run", "reason"), [
    (Run(mesh=Mesh(pipe=2)), "no other rank has the state of a lost one"),
    (Run(mesh=Mesh(data=2)), None)], ids=["one replica", "replicas"])
def test_where_it_has_no_effect(run, reason):
    found = effects.CONDITIONS["launch.survive_losses"](resolve(run))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("survives", [True, False])
def test_a_stopped_rank_is_lost_as_a_killed_one(monkeypatch, capsys, survives):
    """Its supervisor kills it and tells the run; a run that does not survive losses ends."""
    from ranvier.launch import supervision
    from ranvier.system import child

    monkeypatch.setattr(supervision, "CHECK_SECONDS", 0.05)
    children = supervision._Children(3, supervision.StoppedRankDetector(1.0), supervision.LOOPBACK, None)
    children.started = [supervision._Child(rank, child.start(["sleep", "100"])) for rank in range(3)]
    rank = children.started[1]
    if survives:
        children.store.set(lost_rank_protocol._SURVIVES, "")
    received = []

    def continues_without(end):
        found = supervision._continues_without(children, Mesh(data=3), None, end)
        received.append(signal.SIGTERM)
        return found

    try:
        while not os.path.exists(f"/proc/{rank.process.pid}/stat") or time.sleep(0.2):
            pass
        os.kill(rank.process.pid, signal.SIGSTOP)
        end = supervision._first_failure(children, received, continues_without)
        if survives:
            assert end is None and [entry.rank for entry in children.started] == [0, 2]
            assert rank.process.returncode == -signal.SIGKILL and children.lost[0].code == -signal.SIGSTOP
            assert LostRanks._read(children.store) == [LostRank(member="1", how="was stopped by SIGSTOP, and killed")]
            assert "rank 1 (data 1" in capsys.readouterr().err
        else:
            assert (end.rank, end.code) == (1, -signal.SIGSTOP) and len(children.started) == 3
    finally:
        for entry in [*children.started, rank]:
            entry.process.kill()
            entry.process.wait()
