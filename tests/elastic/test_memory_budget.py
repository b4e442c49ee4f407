"""Every mesh of a run must fit: each rank on its device, all ranks on the machine, and each stage of a cut."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Data, Elastic, Launch, Memory, Optim, Pipeline, Train, Transformer
from ranvier.elastic.change import Change
from ranvier.elastic.freezing import NONE_FROZEN, FrozenLayers
from ranvier.elastic.transition import take
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.plan.limits import first_that_fits, schedules
from ranvier.planner.count import device_bytes_of_stages, laid_out
from ranvier.train import elasticity, memory, session, start
from ranvier.train.memory import MemoryBudget, device_bytes
from ranvier.train.metrics import Meter
from ranvier.train.runtime import build_runtime
from tests.elastic.runs import BY_HAND, Wishes, always, lines, losses, run_all, tiny, transitions


def small(folder=Path("nowhere"), **changed):
    """Four layers: ten blocks. folder: of the sentences, if they are read."""
    return replace(ResolvedRun(model=Transformer(num_layers=4, hidden=64, heads=2, vocab=300, sequence=64),
                       data=Data(task="classification", train=str(folder / "train.tsv"), eval=str(folder / "eval.tsv")),
                       mesh=Mesh(pipe=2), batch=Batch(global_size=16, microbatch_size=2),
                       launch=Launch(device="cuda"), pipeline=Pipeline(memory=None)), **changed)


def test_a_device_has_what_is_free_and_what_this_process_holds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 30)
    assert device_bytes(torch.device("cuda", 0)) == 12 << 30
    assert device_bytes(torch.device("cpu")) is None


def test_a_transition_holds_states_once(sentences, tmp_path, monkeypatch):
    """States in host memory are not copied, gradients are gone before there is another engine, and states when the
    other engine has them, even if something still refers to the previous engine."""
    always(monkeypatch)
    gradients, states, alive = {}, {}, []

    def taken(engine, **options):
        flat, rank = engine.flat_optimizer, engine.world.rank
        storages = [state.untyped_storage() for _, found in flat.placement.homes() for state in found.values()]
        gradients[rank] = weakref.ref(engine._updater.gradients.flat.untyped_storage())
        states[rank] = [weakref.ref(storage) for storage in storages]
        held = take(engine, **options)
        assert {storage.data_ptr() for storage in storages} <= {
            piece.tensor.untyped_storage().data_ptr() for piece in held.pieces}
        return held

    def built(run, whole, data, **options):
        alive.append(gradients.pop(whole.rank)() is not None)
        return build_runtime(run, whole, data, **options)

    def metered(timeline, ranks, *args):
        alive.extend(storage() is not None for storage in states.pop(ranks.index))
        return Meter(timeline, ranks, *args)

    for name, replaced in (("take", taken), ("build_runtime", built), ("Meter", metered)):
        monkeypatch.setattr(session, name, replaced)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=2), elastic=Elastic(
        freeze="manual", manual=("1:2",), auto_pipe=True, auto_dp=True))
    run_all(run)
    assert len(transitions(run)) == 1 and alive == [False] * 6 and not gradients and not states


def test_each_rank_must_fit_its_device_alone(sentences, monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    run = small(sentences, mesh=Mesh(data=2, pipe=2))
    for frozen in (0, 3):
        most = max(entry.device_bytes for entry in laid_out(run, frozen)[1])
        assert MemoryBudget(first=run, frozen=FrozenLayers(frozen), device_bytes=most).problem(run) is None
        problem = MemoryBudget(first=run, frozen=FrozenLayers(frozen), device_bytes=most - 1).problem(run)
        assert "memory of the device: is too small: a rank of stage" in str(problem)
    # If the device is the host, ranks are judged together.
    assert MemoryBudget(first=run, frozen=NONE_FROZEN).problem(run) is None


def test_hosts_of_devices_are_judged_too(sentences, monkeypatch):
    run = small(sentences, precision="bf16", optim=Optim(offload="host"))
    needed = sum(entry.ranks * entry.host_bytes for entry in laid_out(run, 0)[1])
    there = replace(run, mesh=Mesh(data=2, pipe=2))
    more = sum(entry.ranks * entry.host_bytes for entry in laid_out(there, 0)[1]) - needed
    for short, fits in ((0, True), (1, False)):
        monkeypatch.setattr(memory, "available_memory_bytes", lambda short=short: more - short)
        problem = MemoryBudget(first=run, frozen=NONE_FROZEN, device_bytes=1 << 40).problem(there)
        assert (problem is None) == fits and (fits or "memory of the machine" in str(problem))


@pytest.mark.parametrize(("changed", "frozen"), [
    ({}, 0), ({}, 3), ({"mesh": Mesh(pipe=4)}, 0), ({"mesh": Mesh()}, 2),
    ({"mesh": Mesh(data=2, pipe=2), "precision": "bf16", "optim": Optim(shard=True, offload="stream")}, 1),
    ({"mesh": Mesh(pipe=3), "memory": Memory(recompute="auto")}, 0)], ids=str)
def test_a_stage_needs_what_the_run_with_that_cut_is_said_to_need(changed, frozen):
    run = small(**changed)
    needed = device_bytes_of_stages(run, frozen)
    for boundaries in (None, tuple(range(3, 3 + run.mesh.pipe - 1)), tuple(range(6, 6 + run.mesh.pipe - 1))):
        there = replace(run, pipeline=replace(run.pipeline, boundaries=boundaries or None))
        stages, memory = laid_out(there, frozen)
        edges = (0, *stages.boundaries, len(stages.costs))
        assert [needed(stage, edges[stage], edges[stage + 1]) for stage in range(run.mesh.pipe)] == [
            entry.device_bytes for entry in memory]


def test_on_rows_and_columns_a_stage_needs_no_less():
    run = small(mesh=Mesh(pipe=2, row=2, col=2))
    stages, memory = laid_out(run)
    edges, needed = (0, *stages.boundaries, len(stages.costs)), device_bytes_of_stages(run)
    found = [needed(stage, edges[stage], edges[stage + 1]) for stage in range(2)]
    most = max(entry.device["tensor mesh"] for entry in memory)
    assert found == [entry.device_bytes - entry.device["tensor mesh"] + most for entry in memory]


def test_stages_are_judged_alone_on_devices_only(sentences):
    run = small(sentences)
    assert MemoryBudget(first=run, frozen=NONE_FROZEN).stage_bytes(run) is None
    needed = MemoryBudget(first=run, frozen=NONE_FROZEN, device_bytes=1).stage_bytes(run)
    assert needed(0, 0, 4) == device_bytes_of_stages(run)(0, 0, 4)
    forbidden = small(sentences, mesh=Mesh(pipe=2, row=2), batch=Batch(global_size=1, microbatch_size=1))
    assert MemoryBudget(first=run, frozen=NONE_FROZEN, device_bytes=1).stage_bytes(forbidden) is None


def change_to(run):
    return Change(mesh=run.mesh.sizes, frozen=NONE_FROZEN, old_frozen=NONE_FROZEN, boundaries=run.pipeline.boundaries,
                  global_size=run.batch.global_size, microbatch_size=run.batch.microbatch_size, reason="")


@pytest.mark.parametrize("on_cuda", [True, False], ids=["device", "host"])
def test_a_transition_that_the_start_would_accept_is_accepted(sentences, monkeypatch, on_cuda):
    """With the most and the least memory that one of the run's schedules needs, and with one byte less."""
    run = small(sentences, pipeline=Pipeline(memory=2.0), launch=Launch(device="cuda" if on_cuda else "cpu"))
    there = replace(run, mesh=Mesh(pipe=4))
    sizes = [[entry.device_bytes * (1 if on_cuda else entry.ranks) for entry in laid_out(each)[1]]
             for each in schedules(there)]
    needed = [max(each) if on_cuda else sum(each) for each in sizes]
    before = sum(entry.ranks * entry.device_bytes for entry in laid_out(run)[1])
    assert needed[0] > needed[-1]
    for most in (max(needed), min(needed), min(needed) - 1):
        if on_cuda:
            monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
        else:
            hosts = sum(entry.ranks * entry.host_bytes for entry in laid_out(there)[1]) - sum(
                entry.ranks * entry.host_bytes for entry in laid_out(run)[1])
            monkeypatch.setattr(memory, "available_memory_bytes", lambda most=most, more=hosts: most + more - before)
        budget = MemoryBudget(first=run, frozen=NONE_FROZEN, device_bytes=most if on_cuda else None)
        change, problem = change_to(there).first_fitting(run, budget.problem)
        assert (problem is None) == (most >= min(needed))
        starts = first_that_fits(there, lambda each: needed[schedules(there).index(each)],
                                 lambda each, needs, most=most: needs <= most)[0]
        assert change.apply_to(run) == starts
        assert Change.read(json.loads(json.dumps(asdict(change)))) == change
        assert (change.schedule is None) == (starts == there)


def test_a_run_takes_a_schedule_that_fits_and_its_own_again(sentences, tmp_path, monkeypatch):
    """Here two stages have memory for 1F1B only, four for any schedule; a resumed run returns to its last schedule."""
    problem, built = MemoryBudget.problem, []

    def tight(budget, run):
        is_too_much = run.mesh.pipe == 2 and run.pipeline.policy != "1f1b"
        return ConfigError("is too small", where="memory", remedy="") if is_too_much else problem(budget, run)

    def noted(run, world, *args, **options):
        if world.rank == 0:
            built.append((run.mesh.pipe, run.pipeline.policy, run.pipeline.memory))
        return build_runtime(run, world, *args, **options)

    monkeypatch.setattr(MemoryBudget, "problem", tight)
    for module in (start, session):
        monkeypatch.setattr(module, "build_runtime", noted)
    run = tiny(sentences, tmp_path / "run", pipeline=Pipeline(memory=2.0), train=Train(steps=9))
    wishes = {2: dict(data=1, pipe=2), 4: dict(data=1, pipe=4), 6: dict(data=1, pipe=2)}
    run_all(run, trackers=[Wishes(run, wishes)])
    own, plain = (4, "message-driven", 2.0), (2, "1f1b", 1.0)
    assert built == [own, plain, own, plain]
    notes = [line["text"] for line in lines(run, "events.jsonl") if line["event"] == "schedule"]
    assert len(notes) == 2 and all("pipeline.policy is 1f1b" in note for note in notes)
    built.clear()
    run_all(replace(run, train=Train(steps=12), resume="auto"))
    assert built == [own, plain] and len(losses(run)) == 12


@pytest.mark.parametrize(("cut", "text"), [("exact", "no cut fits the memory"), pytest.param(
    "reference", "memory of the device", marks=pytest.mark.slow)])
def test_a_run_goes_to_no_mesh_that_its_devices_cannot_hold(sentences, tmp_path, monkeypatch, cut, text):
    always(monkeypatch)
    monkeypatch.setattr(elasticity, "device_bytes", lambda device: 1)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=8),
               elastic=replace(BY_HAND, cut=cut, manual=("2:5",)))
    run_all(run)
    assert [(line["mesh"]["pipe"], line["frozen_layers"]) for line in transitions(run)] == [(2, 5)]
    dropped = [line["text"] for line in lines(run, "events.jsonl") if line["event"] == "dropped"]
    assert len(dropped) == 1 and text in dropped[0] and "data 2 x pipe 1 with 5 frozen layers" in dropped[0]


def test_a_wish_that_devices_cannot_hold_is_refused(sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(elasticity, "device_bytes", lambda device: 1)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), train=Train(steps=6), elastic=Elastic())
    run_all(run, trackers=[Wishes(run, {2: dict(data=2, pipe=1)})])
    refused = [line["text"] for line in lines(run, "events.jsonl") if line["event"] == "resize-refused"]
    assert len(refused) == 1 and "memory of the device" in refused[0] and not transitions(run)
