"""Limits that are auto adapt to the available memory: a run that fits under 1F1B is never refused."""

from dataclasses import replace
from functools import partial

import pytest

from ranvier.cli.check import check
from ranvier.config import presets, read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Pipeline
from ranvier.cost.cluster_files import load_cluster, write_cluster
from ranvier.cost.device_overhead import ALLOCATOR_SHARE
from ranvier.mesh import Mesh
from ranvier.plan.limits import first_that_fits, schedule_note, schedules
from ranvier.planner.auto import resolve_with_least
from ranvier.planner.candidates import predict
from ranvier.planner.count import laid_out
from ranvier.planner.work import Work


def needed(run, work=None):
    """Bytes of the rank that needs most. work: has the blocks of this model if they are already counted."""
    return max(entry.device_bytes for entry in (laid_out(run)[1] if work is None else work.memory(run)))


EVERY = [pytest.param(name, marks=() if name in ("gpt-tiny", "gpt2-small") else pytest.mark.slow)
         for name in [*read.recipe_names(), *presets.PRESETS]]


def on_stages(name, *, per_rank=1):
    """A recipe or preset on its own mesh, or on four stages if its mesh has one stage."""
    run = resolve_with_least(read.merge([read.load(name)[1]]).run)
    mesh = run.mesh if run.mesh.pipe > 1 else run.mesh.resized(pipe=4)
    size = min(run.batch.microbatch_size, max(1, run.batch.global_size // mesh.data))
    return resolve(replace(run, mesh=mesh, batch=replace(run.batch, microbatch_size=size), pipeline=replace(
        run.pipeline, stages_per_rank=per_rank, boundaries=None)))


@pytest.mark.parametrize("name", EVERY)
def test_what_fits_under_1f1b_fits_under_auto(name):
    """On a device with exactly the memory that 1F1B needs, and on one with the memory that auto would use."""
    run, look = on_stages(name), partial(needed, work=Work())
    own, plain = look(run), look(replace(run, pipeline=replace(run.pipeline, policy="1f1b")))
    for memory in (plain, own):
        found, most = first_that_fits(run, look, lambda run, most, memory=memory: most <= memory)
        assert most <= memory
        assert (found == run) == (schedule_note(run, found) == "") == (own <= memory)


@pytest.mark.parametrize("per_rank", [1, 2])
def test_schedules_that_need_less(per_rank):
    run = on_stages("gpt-tiny", per_rank=per_rank)
    own, within, plainest = schedules(run)
    assert own is run and within.pipeline == replace(run.pipeline, memory=1.0)
    assert (plainest.pipeline.policy, plainest.pipeline.defer_bytes) == (
        ("1f1b", "auto") if per_rank == 1 else ("message-driven", 0))
    assert max(needed(plainest), needed(within)) <= needed(own)
    assert per_rank > 1 or needed(plainest) <= needed(within)
    assert "pipeline.memory is 1" in schedule_note(run, within)
    assert ("pipeline.policy is 1f1b" if per_rank == 1 else "pipeline.defer-bytes is 0") in schedule_note(run, plainest)


@pytest.mark.parametrize("pipeline", [Pipeline(in_flight=3), Pipeline(deferred=(1, 1)), Pipeline(defer_bytes=0),
                                      Pipeline(policy="1f1b"), Pipeline(policy="gpipe")])
def test_what_a_user_has_set_stays(pipeline):
    run = ResolvedRun(mesh=Mesh(pipe=2), pipeline=pipeline)
    assert schedules(run) == (run,) and schedules(ResolvedRun()) == (ResolvedRun(),)
    assert first_that_fits(run, needed, lambda run, most: False)[0] == run


def test_check_says_what_has_become_of_the_schedule(tmp_path):
    """On a cluster whose devices have exactly the memory that 1F1B needs. With a tie both schedules would need the same
    memory, most of it when the tie's gradient arrives."""
    run = read.merge([read.load("gpt-12b")[1]]).run
    run = replace(run, model=replace(run.model, untied=True))
    wide = check(run, 48, cluster="summit")
    plain = check(replace(run, pipeline=replace(run.pipeline, policy="1f1b")), 48, cluster="summit")
    needs = [max(entry.device_bytes for entry in one.memory) for one in (wide, plain)]
    assert needs[0] > needs[1] and wide.schedule_note == ""
    cluster = tmp_path / "small.toml"
    found = load_cluster("summit")
    write_cluster(replace(found, device=replace(found.device, memory_bytes=int(
        needs[1] * (1 + ALLOCATOR_SHARE)) + found.device.reserved_bytes + 9)), cluster)
    tight = check(run, 48, cluster=str(cluster))
    assert not [problem for problem in tight.problems if "memory" in problem.where]
    assert max(entry.device_bytes for entry in tight.memory) <= needs[1] and tight.schedule_note
    assert tight.document()["schedule_note"] == tight.schedule_note
    assert predict(resolve(run), load_cluster(str(cluster))).fits
