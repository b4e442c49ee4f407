"""From measurements of ranks to times of blocks: a block's cost does not depend on the mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Elastic, Optim, Pipeline
from ranvier.elastic import mesh_candidates as module
from ranvier.elastic.auto_pipe import best_cut, compress, greedy, stage_sizes
from ranvier.elastic.freezing import FrozenLayers
from ranvier.elastic.inputs import LINKS, ElasticRules
from ranvier.elastic.mesh_candidates import MeshCandidate, StageMemory, candidate_moved_bytes, mesh_candidates
from ranvier.elastic.microbatch_profile import MicrobatchProfile, microbatch_counts
from ranvier.mesh import Mesh
from ranvier.system import machine
from ranvier.system.machine import shared_cores
from ranvier.train.measured_blocks import measured_blocks, present_mesh

BLOCKS, SECONDS = 8, 0.002


@dataclass(frozen=True)
class Cost:
    """The part of `ranvier.cost.blocks.BlockCost` that is used here."""

    output_bytes: int = 800

    def weight(self, device):
        return 5.0


def runtime(mesh, *, frozen=0, cached=0, device="cpu"):
    """The part of a runtime that the choice of a mesh uses: eight layers of one block with a million parameters."""
    parameters = [SimpleNamespace(is_owner=True, block=number, numel=1_000_000) for number in range(BLOCKS)]
    names = [f"layer{number}" for number in range(BLOCKS)]
    engine = SimpleNamespace(stages=SimpleNamespace(costs=[Cost()] * BLOCKS), frozen_blocks=frozen,
                             cached_blocks=cached, boundaries=(), layers=tuple((name,) for name in names),
                             block_names=names,
                             layout=SimpleNamespace(num_blocks=BLOCKS, parameters=parameters))
    world = SimpleNamespace(device=torch.device(device), local_size=mesh.size,
                            backend=SimpleNamespace(name="in-process"))
    return SimpleNamespace(run=ResolvedRun(mesh=mesh, batch=Batch(global_size=32, microbatch_size=4)), engine=engine,
                           world=world, frozen=FrozenLayers(frozen))


def rows(mesh, *, steps=10, cores=range(64), frozen=0, cached=0):
    """Measurements of ranks that share no cores: per block, a share of a sample takes SECONDS forward, and twice that
    backward."""
    shares = steps * 32 / mesh.data / mesh.pipe / mesh.row / mesh.col * mesh.row * mesh.col / mesh.row / mesh.col
    return [{"busy": {"forward": SECONDS * (BLOCKS - cached) * shares, "backward": SECONDS * (BLOCKS - frozen) * shares,
                      "weight": SECONDS * (BLOCKS - frozen) * shares}, "steps": steps, "cores": list(cores)}
            for _ in range(mesh.size)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine, "cpu_quota", lambda cgroup: None)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=4), Mesh(data=2, pipe=2), Mesh(row=2, col=2), Mesh(pipe=2, row=2)],
                         ids=str)
@pytest.mark.parametrize(("frozen", "cached"), [(0, 0), (3, 0), (3, 3)])
def test_times_are_those_of_a_share_of_a_sample(mesh, frozen, cached):
    work = measured_blocks(runtime(mesh, frozen=frozen, cached=cached), rows(mesh, frozen=frozen, cached=cached))
    each = SECONDS / mesh.row / mesh.col
    assert work.forward_seconds == pytest.approx((each,) * BLOCKS)
    assert work.backward_seconds == pytest.approx((2 * each,) * BLOCKS)
    assert work.parameter_bytes == (4_000_000,) * BLOCKS and work.output_bytes == (200 * mesh.row,) * BLOCKS


def test_ranks_that_share_cores_are_busy_longer_than_they_compute():
    mesh = Mesh(pipe=4)
    alone, shared = (measured_blocks(runtime(mesh), rows(mesh, cores=range(count))) for count in (4, 2))
    assert shared.forward_seconds == pytest.approx(tuple(seconds / 2 for seconds in alone.forward_seconds))
    assert (alone.cores, shared.cores) == (4, 2)


def test_ranks_that_are_bound_to_a_core_each_do_not_share_it():
    mesh = Mesh(pipe=4)
    bound = [row | {"cores": [rank]} for rank, row in enumerate(rows(mesh))]
    assert measured_blocks(runtime(mesh), bound).cores == 4
    assert shared_cores([[0], [1], [1, 2]]) == 3 and shared_cores([[]]) == 1


def test_on_devices_nothing_is_shared():
    mesh = Mesh(pipe=2)
    assert measured_blocks(runtime(mesh, device="cuda"), rows(mesh, cores=range(1))).cores is None


def chosen(now, depth, *, cached=0, first=None, num_ranks=None, **elastic):
    """first: the mesh with which the run was started. num_ranks: the number of ranks that it has now."""
    run = replace(now.run, mesh=first or now.run.mesh, elastic=Elastic(**elastic))
    return mesh_candidates(ElasticRules(run), present_mesh(now), depth, measured_blocks(now, rows(now.run.mesh)),
                           num_ranks=num_ranks or run.mesh.size, cached=cached)


def test_candidates_are_all_meshes_of_all_ranks():
    found = chosen(runtime(Mesh(pipe=4)), 4, auto_pipe=True, auto_dp=True)
    assert {(each.mesh.data, each.mesh.pipe) for each in found} == {(1, 4), (2, 2), (4, 1)}
    assert [each.seconds_per_sample for each in found] == sorted(each.seconds_per_sample for each in found)
    assert all(each.samples == 32 for each in found)
    grown = chosen(runtime(Mesh(pipe=4)), 4, auto_pipe=True, auto_dp=True, global_batch="grow")
    assert {each.mesh.data: each.samples for each in grown} == {1: 32, 2: 64, 4: 128}


@pytest.mark.parametrize("cut", ["exact", "reference"])
@pytest.mark.parametrize(("first", "now", "num_ranks", "meshes"), [
    (Mesh(data=2, pipe=2), Mesh(pipe=3), 3, {(1, 3), (3, 1)}),  # one of four ranks was lost
    (Mesh(pipe=4), Mesh(pipe=2), 3, {(1, 2), (1, 3), (3, 1)}),  # one rank was lost, and one of the others is idle
    (Mesh(pipe=4), Mesh(pipe=2), 2, {(1, 2), (2, 1)}),
    (Mesh(pipe=2), Mesh(data=2, pipe=2), 4, {(2, 2), (4, 1), (1, 4)}),  # two ranks have joined
    (Mesh(pipe=2), Mesh(data=2, pipe=2), 6, {(2, 2), (6, 1), (3, 2), (2, 3), (1, 6)})], ids=str)
def test_candidates_have_the_ranks_that_the_run_has_now(first, now, num_ranks, meshes, cut):
    found = chosen(runtime(now), 4, first=first, num_ranks=num_ranks, auto_pipe=True, auto_dp=True, cut=cut)
    assert {(each.mesh.data, each.mesh.pipe) for each in found} <= meshes
    assert cut == "reference" or len(found) == len(meshes)
    without = chosen(runtime(now), 4, first=first, num_ranks=num_ranks, auto_pipe=True, cut=cut)
    assert all(each.mesh.data == now.data and each.mesh.data * each.mesh.pipe <= num_ranks for each in without)


def test_without_replicas_the_others_are_idle():
    found = chosen(runtime(Mesh(pipe=4)), 4, auto_pipe=True)
    assert {(each.mesh.data, each.mesh.pipe) for each in found} == {(1, 4), (1, 2), (1, 1)}


def test_cached_layers_are_on_the_first_stage():
    now = runtime(Mesh(pipe=4))
    blocks = present_mesh(now).frozen_blocks(5)
    here = next(each for each in chosen(now, 5, auto_pipe=True, auto_dp=True, cached=blocks) if each.mesh.pipe == 2)
    assert here.boundaries[0] >= 5


def test_meshes_are_judged_by_what_their_steps_read():
    """In the epoch after more layers freeze, their outputs are not yet read, and the policy is asked again before it
    ends. All frozen blocks are read only if that takes several epochs, or if no more layers freeze."""
    present = replace(present_mesh(runtime(Mesh(pipe=4))), frozen=2, cached_blocks=2)
    rules, blocks = ElasticRules(runtime(Mesh(pipe=4)).run), present.frozen_blocks(5)
    epoch = 10 * present.global_size

    def read(depth, after):
        return rules.cached_blocks(present, depth, epoch_samples=epoch, asked_after=after)

    assert read(5, 10) == read(5, 19) == 2 < blocks
    assert read(5, 20) == blocks
    assert read(2, 10) == present.frozen_blocks(2) >= 2 and read(1, 10) == present.frozen_blocks(1)


def test_the_articles_rule_goes_by_sizes():
    sizes, lengths = [1.0] * BLOCKS, []
    for depth in range(BLOCKS + 1):
        (only,) = chosen(runtime(Mesh(pipe=4)), depth, auto_pipe=True, auto_dp=True, cut="reference")
        counts = greedy(sizes, only.mesh.pipe, depth)
        assert only.mesh.data * only.mesh.pipe == 4 and only.seconds is None and only.fits
        assert only.boundaries == tuple(sum(counts[:stage]) for stage in range(1, only.mesh.pipe))
        assert only.mesh.pipe == compress(sizes, 4, depth, max(stage_sizes(sizes, greedy(sizes, 4))))
        lengths.append(only.mesh.pipe)
    assert lengths[0] == 4 and lengths[-1] == 1 and lengths == sorted(lengths, reverse=True)


def test_without_a_measurement_costs_decide():
    now = runtime(Mesh(pipe=4))
    work = measured_blocks(now, [{"busy": {}, "steps": 0, "cores": [0]} for _ in range(4)])
    both = zip(work.forward_seconds, work.backward_seconds, strict=True)
    assert all(backward == 2 * forward > 0 for forward, backward in both)
    assert LINKS["in-process"][1] == 0.0


# ---------------------------------------------------------------------- during the run

def asked(monkeypatch, now, first=None, **options):
    """(data, pipe) -> the situation for which a cut was requested; and the candidates by (data, pipe)."""
    situations = {}

    def spy(situation):
        situations[situation.num_replicas, situation.placement.num_ranks] = situation
        return best_cut(situation)

    work = measured_blocks(now, rows(now.run.mesh))
    monkeypatch.setattr(module, "best_cut", spy)
    first = replace(first or now.run, elastic=Elastic(auto_pipe=True, auto_dp=True))
    found = mesh_candidates(ElasticRules(first), present_mesh(now), 4, work,
                            **{"num_ranks": first.mesh.size, "cached": 0, **options})
    return situations, {(each.mesh.data, each.mesh.pipe): each for each in found}


def test_predictions_are_of_the_runs_own_schedule(monkeypatch):
    now = runtime(Mesh(pipe=4))
    situations, auto = asked(monkeypatch, now)
    assert {(each.policy.name, each.in_flight) for each in situations.values()} == {("message-driven", None)}
    first = replace(now.run, pipeline=Pipeline(policy="gpipe", in_flight=3))
    situations, gpipe = asked(monkeypatch, now, first)
    assert {(each.policy.name, each.in_flight) for each in situations.values()} == {("gpipe", 3)}
    assert gpipe[2, 2].seconds > auto[2, 2].seconds and gpipe[4, 1].seconds == pytest.approx(auto[4, 1].seconds)


def test_the_best_number_of_microbatches_is_the_profiled_one(monkeypatch):
    counts, profile = microbatch_counts(2, 16), MicrobatchProfile()
    for count in counts:
        profile = profile.with_measurement(2, 2, 0, count, 1.0 / count)
    begun = profile.with_measurement(4, 1, 0, microbatch_counts(4, 32)[-1], 0.1)
    now, given = runtime(Mesh(pipe=4)), []
    memory = StageMemory(limit_bytes=1, needed=lambda run: given.append((run.mesh.pipe, run.batch.microbatch_size)) or (
        lambda stage, start, stop: 0))
    situations, _ = asked(monkeypatch, now, profile=begun, memory=memory)
    assert {mesh: each.microbatches for mesh, each in situations.items()} == {
        (2, 2): counts[-1], (1, 4): 8, (4, 1): 2} and counts[-1] != 4
    assert dict(given) == {2: -(-16 // counts[-1]), 4: 4, 1: 4}
    assert {mesh: each.microbatches for mesh, each in asked(monkeypatch, now)[0].items()} == {
        (2, 2): 4, (1, 4): 8, (4, 1): 2}
    here = runtime(Mesh(data=2, pipe=2))
    with_profile = measured_blocks(here, rows(here.run.mesh), profile)
    assert with_profile.seconds != measured_blocks(here, rows(here.run.mesh)).seconds


def test_a_cut_that_does_not_fit_the_devices_is_made_leaner(monkeypatch):
    now = runtime(Mesh(pipe=4))
    memory = StageMemory(limit_bytes=4, needed=lambda there: lambda stage, start, stop: stop - start)
    _, free = asked(monkeypatch, now)
    _, found = asked(monkeypatch, now, memory=memory)
    assert free[2, 2].boundaries != (4,) and found[2, 2].boundaries == (4,) and found[2, 2].fits
    assert found[2, 2].seconds > free[2, 2].seconds
    assert (found[4, 1].fits, found[4, 1].too_large) == (False, True) and "no cut fits" in found[4, 1].reason
    assert not any(each.too_large for each in free.values())


@pytest.mark.parametrize(("optim", "frozen", "each", "holders"), [
    (Optim(), 0, 0.1 / 8, 1), (Optim(), 4, 0.1 / 4, 1), (Optim(shard=True), 0, 0.2 / 8, 4),
    (Optim(update_in_backward=True), 0, 0.0, 1)], ids=str)
def test_what_the_optimizer_takes_is_measured(optim, frozen, each, holders):
    """All ranks together take 0.2 s a step. With sharded states each of four replicas would update a quarter."""
    now = runtime(Mesh(data=2, pipe=2), frozen=frozen)
    now.run = replace(now.run, optim=optim)
    work = measured_blocks(now, [row | {"busy": row["busy"] | {"optimizer": 0.5}} for row in rows(now.run.mesh)])
    assert work.update_seconds == pytest.approx((each,) * BLOCKS)
    first = replace(now.run, elastic=Elastic(auto_pipe=True, auto_dp=True))
    seconds = [next(found.seconds for found in mesh_candidates(
        ElasticRules(first), present_mesh(now), 4, given, num_ranks=4, cached=0) if found.mesh.data == 4)
        for given in (work, replace(work, update_seconds=(0.0,) * BLOCKS))]
    assert seconds[0] - seconds[1] == pytest.approx(4 * each / holders)  # one stage, in which four blocks train


def test_nothing_is_made_of_what_was_not_measured():
    """No step has been taken since the last transition."""
    work = measured_blocks(runtime(Mesh(pipe=4)), [{"busy": {}, "steps": -1, "cores": [0]} for _ in range(4)])
    assert work.update_seconds == (0.0,) * BLOCKS and all(seconds > 0 for seconds in work.forward_seconds)


def test_among_some_meshes_and_the_present_one(monkeypatch):
    assert set(asked(monkeypatch, runtime(Mesh(pipe=4)), among={(4, 1)})[1]) == {(4, 1), (1, 4)}


@pytest.mark.parametrize(("optim", "moved"), [(Optim(), 16 + 48 + 24 + 24), (Optim(shard=True), 12 + 32 + 20 + 16)])
def test_what_a_transition_moves(optim, moved):
    """For each block that is new to a rank, 4 MB of parameters, and 8 MB of states if it trains."""
    now = runtime(Mesh(pipe=4))
    now.run, now.engine.boundaries = replace(now.run, optim=optim), (2, 4, 6)
    there = MeshCandidate(mesh=Mesh(data=2, pipe=2), boundaries=(4,), samples=32, seconds=1.0, fits=True, reason="")
    work = measured_blocks(now, rows(now.run.mesh))
    assert candidate_moved_bytes(ElasticRules(now.run), present_mesh(now), there, work, 3) == moved * 1_000_000
    back = runtime(Mesh(pipe=2))
    back.engine.boundaries = (4,)
    grown = MeshCandidate(mesh=Mesh(pipe=4), boundaries=(2, 4, 6), samples=32, seconds=1.0, fits=True, reason="")
    facts = measured_blocks(back, rows(back.run.mesh))
    assert candidate_moved_bytes(ElasticRules(back.run), present_mesh(back), grown, facts, 0) == (
        2 + 2 + 2) * 12_000_000
    back.run = replace(back.run, pipeline=Pipeline(stages_per_rank=2))
    back.engine.boundaries = (2, 4, 6)  # rank 0 has blocks 0, 1, 6, 7, then 0, 7; rank 1 has 2-5, then 1, 6
    grown = replace(grown, boundaries=(1, 2, 3, 4, 5, 6, 7))
    assert candidate_moved_bytes(ElasticRules(back.run), present_mesh(back), grown, facts, 0) == (
        2 + 2 + 2) * 12_000_000
