"""What `pipeline.in-flight` and `pipeline.defer-bytes` stand for where they are auto."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Elastic, Memory, Pipeline, Run, Transformer
from ranvier.cost.count import laid_out
from ranvier.cost.limits import memory_choices, run_limits
from ranvier.mesh import Mesh, StagePlacement
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.schedule.computed_limits import (
    MAX_SIMULATED_STAGES,
    StageLoad,
    _needs,
    _of_ranks,
    _simulated,
    computed_limits,
    predicted_bubble,
)
from ranvier.schedule.limits import Limits, rule_limits
from ranvier.schedule.policies import GPipe, MessageDriven, OneForwardOneBackward
from ranvier.testing.ranks import run_ranks

RUN = resolve(Run(model=Transformer(num_layers=4, hidden=32, heads=4, vocab=512, sequence=16), mesh=Mesh(pipe=2),
                  batch=Batch(global_size=16, microbatch_size=2), pipeline=Pipeline(boundaries=(7,))))


def load(forward=1.0, backward=1.0, weight=1.0, *, trains=True, fixed=10.0, graph=0.5, operands=0.4):
    return StageLoad(forward=forward, backward=backward if trains else 0.0, weight=weight if trains else 0.0,
                     trains=trains, fixed=fixed, graph=graph if trains else 0.0, operands=operands if trains else 0.0)


def test_the_rule():
    assert rule_limits([True]) == Limits(in_flight=1, deferred=(0,))
    assert rule_limits([True] * 4) == Limits(in_flight=4, deferred=(0, 1, 2, 4))
    assert rule_limits([False, True, True]) == Limits(in_flight=4, deferred=(0, 0, 3)), "nobody waits for stage 1"
    assert rule_limits([False] * 2) == Limits(in_flight=4, deferred=(0, 0))


def test_uneven_stages_have_more_in_flight():
    """Two stages as of a GPT, the first 5 % slower: one more microbatch in flight removes most of the waits."""
    stages = [load(1.05, 1.05, 1.0, graph=1.0, operands=1.0), load(1.0, 1.0, 0.95, graph=0.9, operands=0.9)]
    chosen = computed_limits(stages, MessageDriven(), memory=1.1)
    assert chosen.in_flight > 2
    bubbles = [predicted_bubble(stages, MessageDriven(), limits) for limits in (rule_limits([True] * 2), chosen)]
    assert bubbles[1] < 0.5 * bubbles[0]


@given(st.lists(st.builds(load, *[st.floats(0.2, 3.0)] * 3, trains=st.booleans(), fixed=st.floats(0.0, 20.0),
                          graph=st.floats(0.01, 2.0), operands=st.floats(0.01, 2.0)), min_size=2, max_size=5),
       st.sampled_from([1.0, 1.1, 1.5]))
def test_limits_are_no_slower_than_the_rule_and_within_the_memory(stages, memory):
    rule, policy, placement = rule_limits([stage.trains for stage in stages]), MessageDriven(), StagePlacement(
        pipe=len(stages))
    chosen = computed_limits(stages, policy, memory=memory)
    made, ruled = (_simulated(stages, policy, limits, placement) for limits in (chosen, rule))
    ranks = _of_ranks(stages, placement)
    assert made.seconds <= 1.1 * ruled.seconds  # loads are rounded, each by up to 5 %
    largest = max(stage.fixed + (len(stages) - place) * stage.graph for place, stage in enumerate(stages))
    assert _needs(ranks, made, chosen) <= max(1.06 * memory * largest, _needs(ranks, ruled, rule))


def test_where_the_rule_holds():
    stages = [load(), load(1.5)]
    for policy in (OneForwardOneBackward(), GPipe()):
        assert computed_limits(stages, policy, memory=2.0) == rule_limits([True] * 2)
    deep = [load()] * (MAX_SIMULATED_STAGES + 1)
    assert computed_limits(deep, MessageDriven(), memory=2.0) == rule_limits([True] * len(deep))
    assert computed_limits([load()], MessageDriven(), memory=2.0) == rule_limits([True])
    assert computed_limits([load(trains=False)] * 2, MessageDriven(), memory=2.0) == rule_limits([False] * 2)
    assert computed_limits(stages, MessageDriven(), memory=2.0, in_flight=7).in_flight == 7


def limits_of(run):
    return run_limits(run, laid_out(run)[0].stage_costs())


@pytest.mark.parametrize(("settings", "follows_rule"), [
    ({}, False), ({"pipeline": replace(RUN.pipeline, memory=None)}, True), ({"memory": Memory(recompute=1)}, True),
    ({"elastic": Elastic(freeze="cap")}, True)])
def test_the_engine_and_predictions_agree(settings, follows_rule):
    run = replace(RUN, **settings)
    model = families.model_of(run)
    inputs, targets = families.sample_of(run, 2)

    def chosen(world):
        engine = Engine(model, world, mesh=run.mesh, memory=run.memory, sample=Microbatch(inputs, targets),
                        pipeline=replace(run.pipeline, memory=run.schedule_memory))
        return engine.limits

    expected = limits_of(run)
    assert run_ranks(chosen, 2) == [expected] * 2
    assert (expected == rule_limits([True] * 2)) == follows_rule


def test_memory_against_speed():
    choices = memory_choices(RUN, laid_out(RUN)[0].stage_costs())
    assert [choice.memory for choice in choices] == [1.1, 1.0, 1.1, 1.25, 1.5, 2.0]
    assert choices[0].limits == choices[2].limits == limits_of(RUN)
    assert choices[-1].bubble_fraction <= choices[1].bubble_fraction + 0.01
    one = replace(RUN, mesh=Mesh(), pipeline=Pipeline())
    assert memory_choices(one, laid_out(one)[0].stage_costs()) == ()
