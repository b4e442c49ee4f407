"""A plan is data: an engine is built from it as from settings, and refuses one that was made for something else."""

from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch
from torch import nn

import ranvier
from ranvier import Engine, Memory, Mesh, Optim, Pipeline
from ranvier.block import as_model
from ranvier.layout import Split
from ranvier.plan.plan import make
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import chain, points, squared

MESH = Mesh(data=2, pipe=2)
SETTINGS = {"pipeline": Pipeline(in_flight=3), "memory": Memory(recompute=2), "optim": Optim(clip_norm=1.0)}


def model(width=4):
    return chain(*[partial(nn.Linear, width, width)] * 4)


def planned(**also):
    return make(model(), MESH, sample=(torch.zeros(2, 4), torch.zeros(2, 4)), dtype=torch.float64,
                **(SETTINGS | also))


def trained(world, **given):
    engine = Engine(model(), world, **given)
    for _ in range(2):
        engine.train_batch(points([[2, 2, 1]], width=4)[0])
    state = {name: value.clone() for name, value in engine.named_parameters().items()}
    engine.close()
    return state, engine.plan


def test_an_engine_builds_a_plan_as_it_builds_settings():
    plan = planned()
    assert plan.limits.in_flight == plan.pipeline.in_flight == 3 and any(plan.recomputed)
    assert isinstance(plan, ranvier.Plan) and plan.optim.bucket_size == 262_144 and plan.pipeline.boundaries
    sample = torch.zeros(2, 4), torch.zeros(2, 4)
    for (one, own), (other, given) in zip(
            run_ranks(lambda world: trained(world, mesh=MESH, sample=sample, dtype=torch.float64,
                                               **SETTINGS), 4),
            run_ranks(lambda world: trained(world, plan=plan), 4), strict=True):
        assert own == given == plan and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_frozen_and_printed():
    plan = planned()
    with pytest.raises(FrozenInstanceError):
        plan.policy = "gpipe"
    text = str(plan)
    assert "data 2 x pipe 2" in text and "at most 3 microbatches in flight" in text and "recomputed" in text
    assert "stage" in text and "262,144 parameters" in text


def engine(size=4, made=model, **given):
    run_ranks(lambda world: Engine(made(), world, **given), size)


def test_what_does_not_belong_to_it_is_refused():
    plan = planned()
    with raises("setting-of-the-plan", where="Engine(mesh=...)"):
        engine(plan=plan, mesh=MESH)
    with raises("setting-of-the-plan", where="Engine(optim=...)"):
        engine(plan=plan, optim=Optim())
    with raises("setting-of-the-plan", where="Engine(sample=...)"):
        engine(plan=plan, sample=ranvier.Microbatch(torch.zeros(2, 4), torch.zeros(2, 4)))
    for code, given in (("plan-for-other-engine", {"size": 2}), ("plan-of-other-model", {"made": partial(model, 5)}),
                        ("plan-for-other-engine", {"dtype": torch.float32}),
                        ("plan-for-other-engine", {"optimizer": torch.optim.SGD})):
        with raises(code, where="Engine(plan=...)"):
            engine(plan=plan, **given)


def edit(plan, path, value):
    """The plan with another value for a dotted path."""
    name, _, rest = path.partition(".")
    return replace(plan, **{name: edit(getattr(plan, name), rest, value) if rest else value})


@pytest.mark.parametrize(("path", "value"), [
    *((name, None) for name in ("mesh", "stages", "layout", "recomputed", "limits", "policy", "pipeline", "tensor",
                                "memory", "optim", "own_optimizer", "layout.chunking")),
    ("mesh", Mesh(data=4)), ("layout.mesh", Mesh(col=4)), ("layout.num_blocks", 5), ("stages.costs", (None,)),
    ("pipeline.stages_per_rank", 2), ("pipeline.boundaries", (1,)), ("stages.boundaries", (1,)),
    ("layout.boundaries", (1,)), ("limits.in_flight", 0), ("limits.in_flight", "auto"), ("limits.deferred", (1,)),
    ("limits.deferred", (1, -1)), ("limits.last", 0), ("recomputed", ()), ("recomputed", ((range(9),), ())),
    ("recomputed", ((range(2), range(1, 2)), ())), ("recomputed", ((0, 1), ())), ("recomputed", ((range(-1, 1),), ())),
    ("layout.chunking.chunk_size", 0), ("layout.chunking.whole", frozenset({"b0.weight"})), ("optim.shard", True),
    ("optim.algorithm", "muon")])
def test_parts_that_contradict_each_other_are_refused(path, value):
    plan = edit(planned(), path, value)
    with raises("plan-contradicts-itself"):
        plan.check(as_model(model(), None), 4, torch.float64, has_optimizer=False)


def test_what_is_no_plan_and_no_limits_is_refused():
    plan = planned()
    for limits in (Pipeline(), replace(plan.limits, deferred=(1, 1, 1))):
        with raises("limits-of-other-pipeline"):
            plan.with_limits(limits)
    with raises("dtype-not-trained", torch.int64):
        engine(dtype=torch.int64)
    moved = replace(plan.layout.parameters[0], block=3)
    with raises("plan-of-other-model"):
        engine(plan=edit(plan, "layout.parameters", (moved, *plan.layout.parameters[1:])))


def test_measured_limits_are_the_second_decision():
    plan = planned()
    later = plan.with_limits(replace(plan.limits, in_flight=2))
    assert later.pipeline.in_flight == 2 and replace(later, limits=plan.limits, pipeline=plan.pipeline) == plan


class Diagonal(nn.Linear):
    """Both dims of its weight are cut by columns: no column holds the parts off the diagonal."""

    def splits(self, settings):
        return {"weight": Split((("col",), ("col",)))}

    def divisibility_constraints(self, mesh):
        return ()

    def split(self, mesh):
        return self


def test_a_parameter_of_which_nobody_holds_a_part():
    with raises("parameter-not-owned-once", where="parameter 0.weight"):
        make(as_model([Diagonal(4, 4, bias=False)], squared), Mesh(col=2))
