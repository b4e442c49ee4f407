"""The values of `pipeline.in-flight` and `pipeline.defer-bytes` when they are auto."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Elastic, Launch, Memory, Pipeline, Run, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.elastic.freezing import NONE_FROZEN
from ranvier.mesh import Mesh, StagePlacement
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.limits import expected_seconds, memory_choices, run_limits
from ranvier.planner.count import laid_out, recomputed_runs
from ranvier.planner.report import schedule_text
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work
from ranvier.schedule.computed_limits import (
    MAX_SIMULATED_STAGES,
    StageLoad,
    _Case,
    _outcome,
    _round_loads,
    computed_limits,
    predict,
    simulated_microbatches,
)
from ranvier.schedule.limits import Conditions, Deferral, Limits, measured_conditions, rule_limits
from ranvier.schedule.policies import GPipe, MessageDriven, OneForwardOneBackward
from ranvier.schedule.simulator import StageTimes, simulate
from ranvier.testing.ranks import run_ranks
from ranvier.train.runtime import build_engine
from tests.covering import chosen, examples

RUN = resolve(Run(model=Transformer(num_layers=4, hidden=32, heads=4, vocab=512, sequence=16), mesh=Mesh(pipe=2),
                  batch=Batch(global_size=16, microbatch_size=2), pipeline=Pipeline(boundaries=(7,))))


def load(forward=1.0, backward=1.0, weight=1.0, *, trains=True, fixed=10.0, graph=0.5, operands=0.4, factor=1.0):
    return StageLoad(forward=forward, backward=backward if trains else 0.0, weight=weight if trains else 0.0,
                     trains=trains, fixed=fixed, graph=graph if trains else 0.0, operands=operands if trains else 0.0,
                     deferred_factor=factor)


def test_the_rule():
    assert rule_limits([True]) == Limits(in_flight=1, deferred=(0,))
    assert rule_limits([True] * 4) == Limits(in_flight=4, deferred=(0, 1, 2, 4))
    assert rule_limits([False, True, True]) == Limits(in_flight=4, deferred=(0, 0, 3)), "no stage waits for stage 1"
    assert rule_limits([False] * 2) == Limits(in_flight=4, deferred=(0, 0))


def test_uneven_stages_have_more_in_flight():
    """Two stages as of a GPT, the first 5 % slower: one more microbatch in flight removes most of the waits."""
    stages = [load(1.05, 1.05, 1.0, graph=1.0, operands=1.0), load(1.0, 1.0, 0.95, graph=0.9, operands=0.9)]
    chosen = computed_limits(stages, MessageDriven(), memory=1.1)
    assert chosen.in_flight > 2
    ruled, made = (predict(stages, MessageDriven(), limits) for limits in (rule_limits([True] * 2), chosen))
    assert made.bubble_fraction < 0.6 * ruled.bubble_fraction < 0.6 * 0.07
    assert 1.0 == ruled.memory < made.memory <= 1.1


MEMORIES = (1.0, 1.1, 1.25, 1.5, 2.0)
LOADS = st.builds(load, *[st.floats(0.2, 3.0)] * 3, trains=st.booleans(), fixed=st.floats(0.0, 20.0),
                  graph=st.floats(0.01, 2.0), operands=st.floats(0.01, 2.0), factor=st.sampled_from((1.0, 1.1)))

TRAINED = LOADS.filter(lambda one: one.trains)


def case_of(stages, placement, num_microbatches):
    return _Case(stages=_round_loads(stages), policy=MessageDriven(), placement=placement,
                 count=simulated_microbatches(placement.num_ranks, num_microbatches))


@examples(4)
@given(st.lists(TRAINED, min_size=2, max_size=5), st.sampled_from(MEMORIES), st.none() | st.integers(1, 40))
def test_limits_are_no_slower_than_1f1b_and_within_the_memory(stages, memory, num_microbatches):
    """In a simulation with rounded loads. No bound holds for the exact loads, since a schedule that follows arrivals
    may become slower when an action becomes faster."""
    placement = StagePlacement(num_ranks=len(stages))
    chosen = computed_limits(stages, MessageDriven(), memory=memory, num_microbatches=num_microbatches)
    case = case_of(stages, placement, num_microbatches)
    made = _outcome(case, chosen)
    plain = _outcome(replace(case, policy=OneForwardOneBackward()), limits_of_1f1b(len(stages)))
    assert made.seconds <= plain.seconds * (1 + 1e-9)
    assert max(made.rank_bytes(case, chosen)) <= memory * case.bytes_under_1f1b() * (1 + 1e-9)


@examples(4)
@given(st.integers(2, 3), st.integers(2, 3), st.sampled_from(["v-shape", "interleaved"]), st.sampled_from(MEMORIES),
       st.none() | st.integers(1, 12), st.data())
def test_several_stages_of_a_rank_stay_within_the_memory(pipe, per_rank, how, memory, num_microbatches, data):
    placement = StagePlacement(num_ranks=pipe, per_rank=per_rank, how=how)
    stages = data.draw(st.lists(LOADS, min_size=placement.num_stages, max_size=placement.num_stages))
    assume(any(stage.trains for stage in stages))
    chosen = computed_limits(stages, MessageDriven(), memory=memory, placement=placement,
                             num_microbatches=num_microbatches)
    case = case_of(stages, placement, num_microbatches)
    assert max(_outcome(case, chosen).peak) <= memory * case.bytes_under_1f1b() * (1 + 1e-9)


def test_stages_that_store_unequally_are_slower_than_by_the_rule():
    """The rule's limits need more memory than 1F1B. No limits within that memory are faster, and with the requested
    number in flight none are within it."""
    placement = StagePlacement(num_ranks=2, per_rank=2)
    stages = [load(graph=2.0, fixed=0.0), load(fixed=2.0), load(fixed=2.0), load(fixed=0.0)]
    within, three, rule = (predict(stages, MessageDriven(), limits, placement) for limits in (
        *(computed_limits(stages, MessageDriven(), memory=1.0, placement=placement, in_flight=in_flight)
          for in_flight in (None, 3)), rule_limits([True] * 4, placement)))
    assert within.memory <= 1.0 < three.memory < rule.memory
    assert within.step > three.step > rule.step


def limits_of_1f1b(pipe):
    return Limits(in_flight=pipe, deferred=(0,) * pipe)


@pytest.mark.parametrize(("pipe", "microbatches", "variation", "messages", "recomputed"), [
    (2, 2, 0.2, 0.05, True), (2, 8, 0.05, 0.2, False), (3, 24, 0.2, 0.2, True), (4, 16, 0.0, 0.05, True),
    (6, 6, 0.1, 0.1, False), pytest.param(6, 48, 0.2, 0.1, True, marks=pytest.mark.slow),
    pytest.param(8, 16, 0.1, 0.0, True, marks=pytest.mark.slow),
    pytest.param(12, 24, 0.2, 0.2, True, marks=pytest.mark.slow),
    pytest.param(16, 16, 0.1, 0.05, False, marks=pytest.mark.slow)])
def test_the_choice_is_no_slower_than_1f1b_in_its_memory(pipe, microbatches, variation, messages, recomputed):
    """On the mean of draws that the choice has not seen, with the given message times and variation."""
    stage = load(1.0, 3.0, 0.0, operands=0.0) if recomputed else load()
    conditions = Conditions(messages=messages, variation=variation)
    chosen = computed_limits([stage] * pipe, MessageDriven(), memory=1.0, num_microbatches=microbatches,
                             conditions=conditions)
    times = [StageTimes(forward=stage.forward, backward=stage.backward, weight=stage.weight, products=4, alive_bytes=4)
             for _ in range(pipe)]

    def mean(policy, limits):
        return fmean(simulate(
            times, microbatches, policy, limits.in_flight, hop=messages, alternating=limits.alternating,
            defer_bytes=[4 * waiting for waiting in limits.deferred], defer_last=limits.last,
            jitter=drawn(seed, variation)).seconds for seed in range(8))

    assert mean(MessageDriven(), chosen) <= 1.005 * mean(OneForwardOneBackward(), limits_of_1f1b(pipe))
    assert chosen.alternating or not (recomputed and variation == 0.2), "fixed order is fastest where times vary much"


def drawn(seed, variation):
    factors = {}
    choose = random.Random(seed)

    def factor(rank, action):
        key = rank, action.kind, action.microbatch, action.product
        if key not in factors:
            factors[key] = choose.lognormvariate(-variation**2 / 2, variation)
        return factors[key]

    return factor


@pytest.mark.parametrize("pipe", [4, pytest.param(8, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)])
def test_as_many_in_flight_as_stages_are_nearly_enough(pipe):
    """Equal work, weight gradients that may wait, times that vary by 10 %: 3 m + 2 (p - 1) forwards."""
    stage = StageTimes(forward=1.0, backward=1.0, weight=1.0, products=4, alive_bytes=4)
    for count in (2 * pipe, 4 * pipe):
        seconds = fmean(simulate([stage] * pipe, count, MessageDriven(), pipe, hop=0.02, defer_bytes="auto",
                                 jitter=drawn(seed, 0.1)).seconds for seed in range(6))
        assert seconds <= 3 * count + 2 * (pipe - 1)


def assert_more_memory_is_never_slower(stages, placement, num_microbatches, memories=MEMORIES):
    policy = MessageDriven()
    steps = [round(predict(stages, policy, computed_limits(
        stages, policy, memory=memory, placement=placement, num_microbatches=num_microbatches), placement,
        num_microbatches).step, 12) for memory in memories]
    assert steps == sorted(steps, reverse=True), f"{placement}, {num_microbatches}: {steps}"


@pytest.mark.parametrize(("pipe", "per_rank", "num_microbatches"), chosen(
    [(2, 2, 8), (2, 1, 8), (4, 1, 16)], [2, 4, 8], [(1, 8), (2, 16), (1, 16), (2, 8)]))
def test_more_memory_is_never_slower(pipe, per_rank, num_microbatches):
    choose = random.Random(f"{pipe} {per_rank}")
    stages = [load(*(choose.uniform(0.8, 1.2) for _ in range(3)), fixed=choose.uniform(0.0, 4.0),
                   graph=choose.uniform(0.8, 1.2), operands=choose.uniform(0.4, 1.2),
                   factor=1.1 if num_microbatches == 8 else 1.0) for _ in range(pipe * per_rank)]
    assert_more_memory_is_never_slower(stages, StagePlacement(num_ranks=pipe, per_rank=per_rank), num_microbatches)


@examples(4)
@given(st.lists(LOADS, min_size=2, max_size=4), st.integers(1, 12),
       st.lists(st.floats(1.0, 4.0), min_size=2, max_size=4))
def test_nor_with_any_memory_and_any_stages(stages, num_microbatches, memories):
    alone = StagePlacement(num_ranks=len(stages))
    assert_more_memory_is_never_slower(stages, alone, num_microbatches, sorted(memories))
    several = StagePlacement(num_ranks=2, per_rank=2)
    if len(stages) == several.num_stages:
        assert_more_memory_is_never_slower(stages, several, num_microbatches, sorted(memories))


PRICES = st.builds(Deferral, st.floats(-0.5, 1.0), st.floats(0.5, 2.0))


@examples(12)
@given(st.lists(st.tuples(TRAINED, PRICES), min_size=2, max_size=4), st.integers(1, 24), st.sampled_from([1.0, 2.0]))
def test_nothing_waits_where_that_is_slower(stages, num_microbatches, memory):
    """Whatever the prices: with the same number in flight, a step without deferral is no faster."""
    loads, prices = zip(*stages, strict=True)
    conditions = Conditions(deferral=prices)
    found = computed_limits(loads, MessageDriven(), memory=memory, num_microbatches=num_microbatches,
                            conditions=conditions)
    own, none = (predict(loads, MessageDriven(), limits, None, num_microbatches, conditions).step
                 for limits in (found, replace(found, deferred=(0,) * len(loads), last=None)))
    assert own <= 1.003 * none


def test_a_price_of_deferral_decides_how_many_wait():
    """With 24 microbatches on four equal stages: all products that fill waits are deferred, those at a step's end, or
    none. A deep pipeline defers by its rule, or nothing."""
    def found(pipe, *price):
        return computed_limits([load()] * pipe, MessageDriven(), memory=2.0, num_microbatches=24,
                               conditions=Conditions(deferral=(Deferral(*price),) * pipe))

    assert found(4, 0.0, 0.0).last is None and max(found(4, 0.0, 0.0).deferred) > 0
    assert found(4, 0.0, 0.3).last in (4, 6, 8)
    assert found(4, 0.9, 0.9).deferred == (0,) * 4
    assert found(MAX_SIMULATED_STAGES + 1, 0.2, 0.2) == rule_limits([True] * (MAX_SIMULATED_STAGES + 1))
    assert not any(found(MAX_SIMULATED_STAGES + 1, 2.0, 2.0).deferred)


def test_the_choice_is_about_the_microbatches_of_a_batch():
    """With few microbatches a step's end matters; with many, uneven stages need more in flight, up to a limit."""
    stages = [load(1.03, 1.03, 1.0, graph=1.0, operands=1.0), load(1.0, 1.0, 0.97, graph=0.9, operands=0.9)]

    def chosen(count):
        return computed_limits(stages, MessageDriven(), memory=1.1, num_microbatches=count)

    assert chosen(2).in_flight == 2 < chosen(16).in_flight
    assert simulated_microbatches(2, 7) == 7 and simulated_microbatches(2, 10**6) < 100
    assert chosen(10**6) == chosen(64) == chosen(24)


def test_products_that_take_longer_later_wait_at_the_end_only():
    """Two equal ranks with two stages each: products deferred at the end of a step fill it, and cost nothing before. A
    deep pipeline of one stage on each rank defers all, as does one whose deferred products take no longer."""
    placement = StagePlacement(num_ranks=2, per_rank=2)
    options = {"memory": 1.5, "placement": placement, "num_microbatches": 8}
    slower, same = [load(factor=1.1)] * 4, [load()] * 4
    chosen = computed_limits(slower, MessageDriven(), **options)
    assert chosen.last is not None and chosen.last < 8 and max(chosen.deferred) <= chosen.last
    any_waits = replace(chosen, last=None, deferred=(8, 8))
    last_wait, all_wait = (predict(slower, MessageDriven(), limits, placement, 8) for limits in (chosen, any_waits))
    assert last_wait.step < all_wait.step and last_wait.memory <= all_wait.memory
    assert all_wait.bubble_fraction == pytest.approx(
        1.0 - (1.0 / all_wait.step) * (1.0 + 0.1 / 3), abs=2e-3), "longer products do not count as bubble"
    assert computed_limits(same, MessageDriven(), **options).last is None
    assert computed_limits([load(factor=1.1)] * 8, MessageDriven(), memory=1.5, num_microbatches=8).last is None


@pytest.mark.parametrize(("placement", "microbatches", "gain"), [
    (StagePlacement(num_ranks=12, per_rank=4, how="interleaved"), 24, 0.10),
    (StagePlacement(num_ranks=20), 32, 0.02)], ids=str)
def test_deep_pipelines_use_the_memory_that_there_is(placement, microbatches, gain):
    """Interleaved 1F1B, and the rule for one stage on each rank, wait longer."""
    stages, policy = [load()] * placement.num_stages, MessageDriven()
    chosen = computed_limits(stages, policy, memory=1.1, placement=placement, num_microbatches=microbatches)
    usual = Limits(in_flight=24, deferred=(0,) * 12, alternating=True) if placement.per_rank > 1 else rule_limits(
        [True] * 20)
    found, other = (predict(stages, policy, limits, placement, microbatches) for limits in (chosen, usual))
    assert found.memory <= 1.1 and found.step < (1 - gain) * other.step


@pytest.mark.parametrize("how", ["v-shape", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_deep_pipelines_have_fewer_in_flight_where_a_stage_keeps_more(how):
    """The first stage keeps too much for an even flow with the maximum in flight; the rule waits longer."""
    placement, policy = StagePlacement(num_ranks=12, per_rank=4, how=how), MessageDriven()
    stages = [replace(load(), graph=1.3), *[load()] * 47]
    chosen = computed_limits(stages, policy, memory=1.0, placement=placement, num_microbatches=24)
    found, rule = (predict(stages, policy, limits, placement, 24)
                   for limits in (chosen, rule_limits([True] * 48, placement)))
    assert found.memory <= 1.0 and found.step < 0.96 * rule.step


def test_where_the_rule_holds():
    stages = [load(), load(1.5)]
    for policy in (OneForwardOneBackward(), GPipe()):
        assert computed_limits(stages, policy, memory=2.0) == rule_limits([True] * 2)
    deep = [load()] * (MAX_SIMULATED_STAGES + 1)
    assert computed_limits(deep, MessageDriven(), memory=2.0) == rule_limits([True] * len(deep))
    head = replace(deep[0], operands=3.0)  # 5 of 3 fit into 1F1B's 26.5 besides 10 and one of 0.5
    assert computed_limits([*deep[1:], head], MessageDriven(), memory=1.0).deferred[-1] == 5
    assert computed_limits([load()], MessageDriven(), memory=2.0) == rule_limits([True])
    assert computed_limits([load(trains=False)] * 2, MessageDriven(), memory=2.0) == rule_limits([False] * 2)
    assert computed_limits(stages, MessageDriven(), memory=2.0, in_flight=7).in_flight == 7


def test_where_nothing_may_wait_limits_are_those_of_such_a_schedule():
    """With as many in flight as ranks, interleaved stages would wait for a quarter of a step, unless deferred products
    fill it."""
    run = resolve(replace(
        Run(), model=Transformer(num_layers=16, hidden=1024, heads=8, vocab=1024, sequence=512), precision="bf16",
        mesh=Mesh(pipe=2), batch=Batch(global_size=16, microbatch_size=1), launch=Launch(device="cuda"),
        pipeline=Pipeline(stages_per_rank=4, placement="interleaved", defer_bytes=0)))
    cluster, work = load_cluster("h100"), Work()
    auto, few = (run_cost(replace(run, pipeline=replace(run.pipeline, in_flight=limit)), cluster, work.stages(run))
                 for limit in ("auto", 2))
    assert auto.bubble_fraction < 0.05 < 0.2 < few.bubble_fraction


def test_only_the_message_driven_policy_of_several_stages_has_room():
    stages, placement = [load(fixed=0.0)] * 4, StagePlacement(num_ranks=2, per_rank=2)
    chosen = computed_limits(stages, MessageDriven(), memory=1.1, placement=placement)
    assert chosen.max_stored is not None and chosen.in_flight <= chosen.max_stored <= 4
    assert computed_limits(stages, GPipe(), memory=1.1, placement=placement).max_stored is None
    assert computed_limits(stages, MessageDriven(), memory=1.1).max_stored is None


@pytest.mark.parametrize(("pipe", "per_rank"), [(4, 2), (8, 12)])
def test_interleaved_stages_run_as_interleaved_1f1b_where_nothing_may_wait(pipe, per_rank):
    """Even in a deep pipeline, which is not simulated, and within that schedule's own memory."""
    stages = [load(1 / per_rank, 1 / per_rank, 1 / per_rank, fixed=0.0, operands=0.0)] * pipe * per_rank
    placement = StagePlacement(num_ranks=pipe, per_rank=per_rank, how="interleaved")
    quiet = Conditions(messages=0.0, variation=0.0)
    limits = computed_limits(stages, MessageDriven(), memory=1.0, placement=placement, num_microbatches=2 * pipe,
                             conditions=quiet)
    made = predict(stages, MessageDriven(), limits, placement, 2 * pipe, quiet)
    assert limits.alternating and limits.in_flight == 2 * pipe and made.memory == pytest.approx(1.0)
    assert made.bubble_fraction == pytest.approx((pipe - 1) / (2 * pipe * per_rank + pipe - 1), rel=0.01)
    for other, limit in ((replace(placement, how="v-shape"), 2 * pipe), (placement, pipe)):
        assert not computed_limits(stages, MessageDriven(), memory=9.0, placement=other, in_flight=limit).alternating


def test_conditions_are_measured_across_clocks_that_differ():
    """Two ranks, the second one's clock 1000 ahead: messages take 2 forward and 4 back, forwards 10 and 20."""
    first = {(1, "F0"): (0, 8), (1, "F1"): (8, 20), (1, "B0"): (46, 60), (1, "B1"): (95, 99)}
    second = {(1, "F0"): (1010, 1030), (1, "B0"): (1030, 1042), (1, "F1"): (1042, 1062), (1, "B1"): (1062, 1080)}
    found = measured_conditions([first, second])
    assert found is not None and found.messages == pytest.approx(3 / 20)
    assert found.variation == pytest.approx((2 / 10 + 0) / 2)
    assert measured_conditions([first, {}]) is None


def limits_of(run):
    costs = laid_out(run)[0].stage_costs()
    return run_limits(run, costs, recomputed_runs(run, costs))


@pytest.mark.parametrize(("settings", "follows_rule"), [
    ({}, False), ({"pipeline": replace(RUN.pipeline, memory=None)}, True), ({"memory": Memory(recompute=1)}, False),
    ({"memory": Memory(recompute="auto")}, False), ({"elastic": Elastic(freeze="cap")}, False)], ids=str)
def test_a_runs_engine_and_predictions_agree(settings, follows_rule):
    """On the limits, and on what is recomputed; an engine without a run simulates another number of microbatches."""
    run = replace(RUN, **settings)
    inputs, targets = families.sample_of(run, 2)

    def chosen(world):
        engine = build_engine(run, world, 1.0, frozen=NONE_FROZEN, fresh=True)
        alone = Engine(families.model_of(run), world, mesh=run.mesh, memory=run.memory, pipeline=run.pipeline,
                       sample=Microbatch(inputs, targets))
        again = [engine._stages.first._segments, alone._stages.first._segments]
        return engine.limits, alone.limits, again

    expected = limits_of(run)
    costs = laid_out(run)[0].stage_costs()
    segments = recomputed_runs(run, costs)
    for rank, (limits, of_engine, again) in enumerate(run_ranks(chosen, 2)):
        assert limits == expected
        assert of_engine == run_limits(replace(run, batch=replace(run.batch, global_size=20)), costs, segments)
        assert [list(each) for each in again] == [segments[rank]] * 2
    assert (expected == rule_limits([True] * 2)) == follows_rule


def test_a_second_run_ends_before_the_last_product_of_its_segment():
    """It leaves out each layer's fc2 and the sum after it: their operations, and four for each byte that they write."""
    run = replace(RUN, memory=Memory(recompute=1))
    costs = laid_out(run)[0].stage_costs()
    segments = recomputed_runs(run, costs)
    factors = ((1.0, 1.0),) * sum(map(len, costs))
    plain, again = (expected_seconds(run, costs, factors, each) for each in ((), segments))
    fc2 = 2 * 2 * 16 * 4 * 32 * 32
    for rank, blocks in enumerate(costs):
        whole = sum(blocks[place].weight() for segment in segments[rank] for place in segment)
        left_out = len(segments[rank]) * (fc2 + 4.0 * 2 * (2 * 16 * 32 * 4))
        assert segments[rank] and again[rank][1] - plain[rank][1] == pytest.approx(whole - left_out)


def test_memory_against_speed():
    choices = memory_choices(RUN, laid_out(RUN)[0].stage_costs())
    assert [choice.memory for choice in choices] == [1.1, 1.0, 1.1, 1.25, 1.5, 2.0]
    assert choices[0].limits == choices[2].limits == limits_of(RUN)
    steps = [choice.step for choice in choices[1:]]
    assert steps == sorted(steps, reverse=True)
    assert "step time" + "".join(f"{step:8.3f}" for step in steps) in schedule_text(choices)
    peaks = [choice.peak_memory for choice in choices[1:]]
    assert 1.0 <= peaks[0] < peaks[-1] and peaks[1] <= 1.1
    assert "peak memory" + "".join(f"{peak:8.2f}" for peak in peaks) in schedule_text(choices)
    assert "chosen by a simulation of 8 microbatches, whose" in schedule_text(choices)
    long = replace(RUN, batch=Batch(global_size=4000, microbatch_size=2))
    shown = schedule_text(memory_choices(long, laid_out(long)[0].stage_costs()))
    assert "chosen by a simulation of 24 of the step's 2,000 microbatches, whose" in shown
    few = memory_choices(replace(RUN, batch=Batch(global_size=2, microbatch_size=2)), laid_out(RUN)[0].stage_costs())
    assert few[0].limits.in_flight > 1 == max(choice.in_flight for choice in few), "with one microbatch"
    assert "at most 1 microbatch in flight" in schedule_text(few)
    one = replace(RUN, mesh=Mesh(), pipeline=Pipeline())
    assert memory_choices(one, laid_out(one)[0].stage_costs()) == ()
