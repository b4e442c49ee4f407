"""Several stages on a rank: gradients equal those of one process for every placement, with all features of a stage."""

import json
from functools import partial

import pytest
import torch

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.resolve import Facts, resolve
from ranvier.config.rules import problems
from ranvier.config.run import (
    Batch,
    Checkpoint,
    Data,
    Elastic,
    Memory,
    MeshSettings,
    Optim,
    Pipeline,
    Run,
    Train,
    Transformer,
)
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.planner.candidates import predict
from ranvier.planner.count import laid_out
from ranvier.planner.plan import Request, plan, simulation
from ranvier.planner.work import Work
from ranvier.schedule.limits import Limits
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train as train_run
from tests.checkpoint import anywhere
from tests.covering import covering, quick
from tests.errors import raises
from tests.pipeline.parity import assert_parity, frozen, gradients_on, on_mesh, share, small_gpt, tokens
from tests.tensor import split_parity
from tests.tiny_runs import random_texts

PLACEMENTS = ("v-shape", "interleaved")


def several(per_rank=2, placement="v-shape", **changed):
    return Pipeline(stages_per_rank=per_rank, placement=placement, **changed)


@pytest.mark.parametrize(("mesh", "per_rank", "counts", "placement"), covering([
    (Mesh(pipe=2), 2, [[2, 1, 2, 1, 2]]), (Mesh(pipe=3), 2, [[1]]), (Mesh(pipe=2), 3, [[2, 2, 1]]),
    (Mesh(pipe=2, data=2), 2, [[2, 1, 2], [1, 1, 1]])], PLACEMENTS), ids=str)
def test_gradients_equal_plain_pytorch(mesh, per_rank, counts, placement):
    """Embedding and head are tied; sequences have several lengths, and some targets do not count."""
    assert_parity(small_gpt, tokens(counts, lengths=(6, 4), ignored=0.3), mesh, pipeline=several(per_rank, placement))


@pytest.mark.parametrize(("placement", "boundaries", "recompute", "in_flight"), [
    ("v-shape", (1, 2, 7), "none", 1), ("interleaved", (1, 2, 7), "none", 7),
    pytest.param("v-shape", None, 1, "auto", marks=pytest.mark.slow)])
def test_uneven_stages_frozen_parts_and_recomputation(placement, boundaries, recompute, in_flight):
    batches = tokens([[2, 1, 2, 1]], ignored=0.3)
    options = {"sample": batches[0][0], "pipeline": several(placement=placement, boundaries=boundaries,
                                                            in_flight=in_flight), "memory": Memory(recompute=recompute)}
    assert_parity(lambda: frozen(small_gpt(), lambda name: name.startswith(("embedding", "layer0", "head.projection"))),
                  batches, Mesh(pipe=2), **options)


@pytest.mark.parametrize(("counts", "waiting"), [([2, 1, 2, 1, 2], 0), ([1], 0), ([2, 1, 1], 2)], ids=str)
def test_interleaved_1f1bs_order(counts, waiting):
    limits = Limits(in_flight=4, deferred=(waiting, waiting), alternating=True)
    assert_parity(small_gpt, tokens([counts], lengths=(6, 4), ignored=0.3), Mesh(pipe=2),
                  also=partial(Engine.use_limits, limits=limits), pipeline=several(2, "interleaved"))


@pytest.mark.parametrize("mesh", quick(1, [Mesh(pipe=2, col=3), Mesh(pipe=2, row=2, col=2)]), ids=str)
def test_rows_and_columns(mesh):
    """A leader orders the actions of all stages for its peers."""
    split_parity.assert_parity(split_parity.tiny_gpt, split_parity.token_batches(mesh, count=3, per_row=2), mesh,
                               pipeline=several())


@pytest.mark.parametrize("bounds", quick(1, [[(4, 2), (6, None)], [(1, None), (6, 1)]]), ids=str)
def test_all_policies_agree_to_the_bit(bounds):
    batches = tokens([[2, 1, 2, 1, 2, 2]])
    found = [gradients_on(small_gpt, batches, Mesh(pipe=2), pipeline=several(policy=policy, defer_bytes=defer_bytes))
             for policy, defer_bytes in (("message-driven", 0), ("message-driven", 1 << 30), ("gpipe", 0))]
    for max_stored, last in bounds:
        limits = Limits(in_flight=4, deferred=(4, 4), last=last, max_stored=max_stored)
        found.append(gradients_on(small_gpt, batches, Mesh(pipe=2), also=partial(Engine.use_limits, limits=limits),
                                  pipeline=several()))
    found.append(gradients_on(small_gpt, batches, Mesh(pipe=2), also=lambda engine: engine.limits.max_stored,
                              sample=batches[0][0], pipeline=several()))
    assert all(found[-1].others), "the simulation must choose a bound"
    for name, gradient in found[0].gradients.items():
        assert all(torch.equal(gradient, other.gradients[name]) for other in found[1:]), name


def test_evaluation_before_training_and_outputs():
    batches = tokens([[2, 1]])

    def work(engine):
        loss = engine.evaluate(share(engine, batches)).loss
        return engine.world.rank == engine.rank_of_outputs(), loss, engine.predict(share(engine, batches))

    plain = on_mesh(small_gpt, Mesh(), work)[0]
    for placement, last in (("v-shape", 0), ("interleaved", 1)):
        found = on_mesh(small_gpt, Mesh(pipe=2), work, pipeline=several(placement=placement))
        assert [is_root for is_root, _, _ in found] == [rank == last for rank in range(2)]
        assert all(abs(loss - plain[1]) < 1e-12 for _, loss, _ in found)
        assert all(torch.allclose(mine, theirs, atol=1e-12)
                   for mine, theirs in zip(found[last][2], plain[2], strict=True))


@pytest.mark.parametrize("options", quick(1, [
    {"shard": True, "offload": "stream", "ema": 0.9}, {"shard": True, "offload": "stream"}, {"offload": "host"},
    {"ema": 0.9}]), ids=str)
def test_training_goes_on_from_a_checkpoint_on_other_stages(tmp_path, options):
    """Three steps with two stages on each rank and three with one, and vice versa, equal six with neither."""
    def first(engine):
        losses = anywhere.train(engine, 3)
        checkpoints = Checkpoints(engine, tmp_path / str(engine.layout.stages.per_rank))
        checkpoints.save()
        assert [one.error for one in checkpoints.wait()] == [None]
        return losses

    def second(per_rank):
        def work(engine):
            Checkpoints(engine, tmp_path / str(per_rank)).load()
            return anywhere.train(engine, 3)
        return work

    whole = anywhere.on(Mesh(), lambda engine: anywhere.train(engine, 6), dtype=torch.float64, **options)[0]
    for before, after in ((2, 1), (1, 2)):
        mesh = Mesh(pipe=2, data=2)
        losses = anywhere.on(mesh, first, dtype=torch.float64, pipeline=several(before), **options)[0]
        losses += anywhere.on(mesh, second(before), dtype=torch.float64, pipeline=several(after), **options)[0]
        assert losses == pytest.approx(whole, abs=1e-12)


# ---------------------------------------------------------------------- the command

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("virtual")
    random_texts(folder / "texts", 40, words=200)
    return Run(mesh=Mesh(pipe=2), batch=Batch(global_size=8, microbatch_size=2), pipeline=several(),
               train=Train(steps=4, sample_tokens=4, eval_every=2, eval_sequences=4),
               model=Transformer(num_layers=3, hidden=16, heads=2, vocab=300, sequence=16), seed=1,
               data=Data(corpus=str(folder / "texts"), cache_dir=folder / "cache"), checkpoint=Checkpoint(every=2),
               run_dir=folder / "run")


def resolved(run):
    return resolve(run, Facts())


def replaced(run, **changed):
    return Run(**{field: getattr(run, field) for field in type(run).__dataclass_fields__} | changed)


def test_a_run_and_its_memory(run, tmp_path):
    """Losses equal those of one stage on each rank; the table has each stage's rank, the prediction both ranks."""
    def losses(folder, **changed):
        changed = replaced(run, run_dir=folder, **changed)
        run_ranks(lambda world: train_run(changed, "tiny", world), 2)
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [step["loss"] for step in steps], [step["eval_loss"] for step in steps if "eval_loss" in step]

    wanted = losses(tmp_path / "one", pipeline=Pipeline())
    for found, expected in zip(losses(tmp_path / "two"), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    table, memory = laid_out(resolved(run))
    assert [(row.stage, row.pipeline_rank) for row in table.rows] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    assert str(table).splitlines()[0].split()[:3] == ["stage", "pipe", "blocks"]
    assert [entry.pipeline_rank for entry in memory] == [0, 1]
    states = sum(entry.device["moments"] for entry in memory)
    assert states == sum(entry.device["moments"] for entry in laid_out(resolved(replaced(run, pipeline=Pipeline())))[1])


@pytest.mark.parametrize(("changed", "where", "what"), [
    ({"pipeline": several(policy="1f1b")}, "pipeline.policy", "one stage per rank"),
    ({"pipeline": several(5)}, "pipeline.stages-per-rank", "10 stages on 2 ranks, more than the 8 blocks"),
    ({"elastic": Elastic(freeze="cap", auto_pipe=True, cut="reference")}, "elastic.cut",
     "supports one stage per rank only, and there are 2"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_go_together(run, changed, where, what):
    found = list(problems(resolved(replaced(run, **changed)), 2, num_blocks=8))
    assert [problem.where for problem in found] == [where] and what in str(found[0])


def test_an_engine_refuses_an_order_for_one_stage():
    with raises("policy-for-one-stage"):
        on_mesh(small_gpt, Mesh(pipe=2), lambda engine: None, pipeline=several(policy="1f1b"))


def test_a_step_is_predicted_by_the_schedule_that_runs():
    """Equal stages, few microbatches: less bubble, twice the messages, the same work; `simulate` agrees."""
    big = Run(mesh=Mesh(pipe=4), batch=Batch(global_size=8, microbatch_size=1), precision="bf16",
              model=Transformer(num_layers=16, hidden=1024, heads=8, vocab=2048, sequence=512))
    cluster, work = load_cluster("a100"), Work()
    one, two, more = (replaced(big, pipeline=pipeline) for pipeline in (
        Pipeline(memory=1.25), several(memory=1.25), several(memory=1.5)))
    costs = [predict(resolved(each), cluster, work).cost for each in (one, two, more)]
    assert costs[1].bubble_fraction < 0.75 * costs[0].bubble_fraction and costs[1].seconds < costs[0].seconds
    assert costs[2].seconds <= costs[1].seconds, "also with the cluster's message times, which the choice does not know"
    assert costs[0].model_flops == costs[1].model_flops
    assert costs[1].link_bytes["pipe"] == 2 * costs[0].link_bytes["pipe"]
    assert simulation(resolved(two), cluster).seconds == pytest.approx(costs[1].seconds, rel=0.05)
    found = plan("big", replaced(two, mesh=MeshSettings(pipe="auto")), ["a100"], Request(ranks=4, searched="mesh"))
    assert all(each.run.placement.num_stages <= 34 for each in found.best)


def test_optimizers_in_the_backward():
    """One microbatch; gradients of consecutive blocks share one memory, across both stages of a rank."""
    batches = tokens([[3]])

    def work(engine):
        engine.train_batch(share(engine, batches))
        return {name: value.detach().clone() for name, value in engine.named_parameters().items()}

    optim = {"optim": Optim(update_in_backward=True), "memory": Memory(recompute=1)}
    found = [on_mesh(small_gpt, mesh, work, pipeline=pipeline, **optim)
             for mesh, pipeline in ((Mesh(), Pipeline()), (Mesh(pipe=2), several()))]
    plain, parts = found[0][0], found[1][0] | found[1][1]
    assert torch.equal(parts.pop("head.projection.weight"), parts["embedding.token.weight"])
    assert parts.keys() == plain.keys()
    assert all(torch.allclose(parts[name], plain[name], atol=1e-12) for name in plain)
