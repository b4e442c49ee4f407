"""The schedule without tensors: random pipelines, known results, and its errors for invalid events."""

from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.mesh import StagePlacement
from ranvier.schedule import simulator
from ranvier.schedule.policies import POLICIES, GPipe, MessageDriven, OneForwardOneBackward, policy_named
from ranvier.schedule.schedule import Action, Done, Product, RankSchedule, Schedule, Wait, actions_text
from ranvier.schedule.simulator import StageTimes, simulate
from ranvier.testing.policies import check_policy, check_run
from tests.covering import examples
from tests.errors import raises

EQUAL = StageTimes(forward=1.0, backward=1.0, weight=1.0)


class AskedTwice(RankSchedule):
    """Asks for every action twice."""

    def next_action(self):
        first, second = super().next_action(), super().next_action()
        assert first == second, f"{first} and then {second}"
        return first


@st.composite
def pipelines(draw):
    depth = draw(st.integers(1, 8))
    times = st.floats(0.0, 4.0)
    alive = draw(st.sampled_from([0, 1, 6]))
    stages = [StageTimes(forward=draw(times), backward=draw(times), weight=draw(times), trains=draw(st.booleans()),
                         products=draw(st.integers(1, 3)), alive_bytes=alive) for _ in range(depth)]
    return stages, draw(st.integers(0, 40)), dict(in_flight=draw(st.integers(1, 20)), training=draw(st.booleans()),
                                                  defer_bytes=draw(st.sampled_from([0, 1, 5, 6, 17, 1 << 40])))


@examples(6)
@given(pipelines(), st.integers(2, 4), st.integers(2, 4), st.randoms(use_true_random=False))
def test_interleaved_1f1b_ends_within_its_bounds_whatever_is_late(pipeline, pipe, per_rank, chance):
    """Even if the number of microbatches is not a multiple of the ranks, and if stages train nothing."""
    stages, microbatches, options = pipeline
    placement = StagePlacement(num_ranks=pipe, per_rank=per_rank, how="interleaved")
    stages = [stages[number % len(stages)] for number in range(placement.num_stages)]
    options |= {"in_flight": 2 * pipe, "placement": placement, "alternating": True}
    run = simulate(stages, microbatches, MessageDriven(), hop=lambda source, destination: 2 * chance.random(),
                   jitter=lambda stage, action: chance.uniform(0.0, 3.0), **options)
    for rank, states in enumerate(run.states if options["training"] else ()):
        most = 1 + (per_rank - 1) * pipe + 2 * (pipe - 1 - rank)
        assert max(sum(state[::2]) for state in states or [(0,)]) <= most


@pytest.mark.parametrize(("pipe", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (3, 3, 6), (2, 4, 6)])
@pytest.mark.parametrize("hop", [0.0, 0.3])
def test_interleaved_1f1b_is_torchs(pipe, per_rank, microbatches, hop):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    placement = StagePlacement(num_ranks=pipe, per_rank=per_rank, how="interleaved")
    stages = [StageTimes(forward=0.5, backward=1.0, weight=0.0, alive_bytes=0)] * placement.num_stages
    run = simulate(stages, microbatches, MessageDriven(), 2 * pipe, placement=placement, alternating=True, hop=hop)
    for rank, actions in enumerate(run.actions):
        theirs = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(SimpleNamespace(
            n_local_stages=per_rank, pp_group_size=pipe, microbatches_per_round=pipe, _n_microbatches=microbatches,
        ), rank)
        assert [("FORWARD" if action.kind == "F" else "FULL_BACKWARD", placement.stages_of(rank)[action.turn],
                 action.microbatch) for action, _, _ in actions] == [
            (one.computation_type.name, one.stage_index, one.microbatch_index) for one in theirs if one is not None]
    if not hop:  # the bubble according to Narayanan et al., 2021
        assert run.seconds == pytest.approx(1.5 * (per_rank * microbatches + pipe - 1))


@examples(25)
@given(pipelines(), st.sampled_from(POLICIES), st.floats(0.0, 5.0), st.booleans(), st.randoms(use_true_random=False))
def test_every_pipeline_ends_in_order_and_within_its_bounds(pipeline, policy, hop, alternating, chance):
    stages, microbatches, options = pipeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "RankSchedule", AskedTwice)
        run = simulate(stages, microbatches, policy, hop=lambda source, destination: hop * chance.random(),
                       jitter=lambda stage, action: chance.uniform(0.0, 3.0), alternating=alternating, **options)
    check_run(run, stages, microbatches, policy, **options)


@examples(30)
@given(pipelines(), st.sampled_from([MessageDriven(), GPipe()]), st.integers(1, 3),
       st.sampled_from(["v-shape", "interleaved"]), st.randoms(use_true_random=False))
def test_ranks_with_several_stages_end_in_order_and_within_their_bounds(pipeline, policy, pipe, how, chance):
    stages, microbatches, options = pipeline
    per_rank = max(1, len(stages) // pipe)
    placement = StagePlacement(num_ranks=pipe, per_rank=per_rank, how=how)
    stages = [stages[number % len(stages)] for number in range(placement.num_stages)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "RankSchedule", AskedTwice)
        run = simulate(stages, microbatches, policy, hop=lambda source, destination: chance.random(),
                       jitter=lambda stage, action: chance.uniform(0.0, 3.0), placement=placement, **options)
    check_run(run, stages, microbatches, policy, placement=placement, **options)


def held_at_most(run, stages, placement):
    """For each rank, the maximum number of microbatches that its stages store or have products of."""
    most = []
    for rank, spans in enumerate(run.actions):
        held, peak, products = 0, 0, {}
        for action, _, _ in spans:
            match action.kind:
                case "F":
                    held += 1
                case "B" | "C":
                    products[action.turn, action.microbatch] = stages[placement.stages_of(rank)[action.turn]].products
                    held -= not action.defer
                case "W":
                    products[action.turn, action.microbatch] -= 1
                    held -= not products[action.turn, action.microbatch]
            peak = max(peak, held)
        most.append(peak)
    return most


def held_in_order(placement, microbatches, in_flight):
    """For each rank, the maximum number that its stages store if all actions run exactly when due."""
    made = [Schedule(stage=stage, num_stages=placement.num_stages, num_microbatches=microbatches,
                     policy=MessageDriven(), in_flight=in_flight) for stage in range(placement.num_stages)]
    most = []
    for rank in range(placement.num_ranks):
        events = sorted((made[stage].due(kind, number), change) for stage in placement.stages_of(rank)
                        for number in range(microbatches) for kind, change in (("F", 1), ("B", -1)))
        most.append(max(accumulate((change for _, change in events), initial=0)))
    return most


@examples(20)
@given(pipelines(), st.integers(1, 4), st.integers(0, 40), st.sampled_from(["v-shape", "interleaved"]),
       st.randoms(use_true_random=False))
def test_what_is_due_first_ends_in_order_and_within_the_room(pipeline, pipe, room, how, chance):
    """Whatever times actions and messages take, and whatever trains. The number needed when all run as due is exceeded
    only up to `room`."""
    stages, microbatches, options = pipeline
    placement = StagePlacement(num_ranks=pipe, per_rank=max(2, len(stages) // pipe), how=how)
    stages = [stages[number % len(stages)] for number in range(placement.num_stages)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "RankSchedule", AskedTwice)
        run = simulate(stages, microbatches, MessageDriven(), hop=lambda source, destination: chance.random(),
                       jitter=lambda stage, action: chance.uniform(0.0, 3.0), placement=placement,
                       max_stored=room, **options)
    check_run(run, stages, microbatches, MessageDriven(), placement=placement, **options)
    if options["training"] and all(stage.trains for stage in stages):
        in_order = held_in_order(placement, microbatches, options["in_flight"])
        assert all(held <= max(room, least) for held, least in zip(
            held_at_most(run, stages, placement), in_order, strict=True))


def test_an_even_flow_alternates_as_zb_v_does():
    """Equal stages, as many in flight as stages: once a rank is full, it has a forward, a backward and a weight
    gradient in turn, within 1F1B's memory."""
    placement = StagePlacement(num_ranks=4, per_rank=2)
    assert [max(held_in_order(placement, 16, in_flight)) for in_flight in (4, 6, 8)] == [4, 6, 8]
    run = simulate([EQUAL] * 8, 16, MessageDriven(), 8, placement=placement, defer_bytes=1 << 40, max_stored=8)
    assert max(held_at_most(run, [EQUAL] * 8, placement)) == 8
    assert "F5 B0 W0 F4.1 B2.1 W2.1 F6 B1 W1 F5.1 B3.1 W3.1 F7 B2 W2" in text(run, 2), text(run, 2)
    assert run.seconds <= 1.021 * (6 * 16 + 3), "little more is lost than the way to the last rank"


def test_a_forward_that_is_due_later_leaves_room():
    """Two ranks, four stages: with three stored, the first stage's next forward waits, since a forward of the last
    stage is due earlier; the weight gradient runs."""
    rank = RankSchedule(stages=(0, 3), num_stages=4, num_microbatches=4, policy=MessageDriven(), in_flight=4,
                        defer_bytes=100, max_stored=3)
    done = dict(expects_backward=True, deferrable_bytes=10)
    for number in range(2):
        assert rank.next_action() == Action("F", number)
        rank.on_done(Action("F", number), **done)
    assert rank.next_action() == Wait(forward=0, backward=None, stage=3), "F2 is due after F0 of stage 3"
    rank.on_message("forward", 0, 3)
    assert rank.next_action() == Action("F", 0, turn=1)


def test_stages_of_a_placement():
    zigzag = StagePlacement(num_ranks=4, per_rank=2)
    assert [zigzag.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    rounds = StagePlacement(num_ranks=4, per_rank=2, how="interleaved")
    assert [rounds.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    for placement in (zigzag, rounds, StagePlacement(num_ranks=3, per_rank=3)):
        for stage in range(placement.num_stages):
            assert placement.stages_of(placement.rank_of(stage))[placement.local(stage)] == stage


@pytest.mark.parametrize(("pipe", "microbatches", "deferred"), [(4, 8, 500), (4, 16, 500), (8, 8, 4750), (8, 16, 2250)])
def test_virtual_stages_have_half_of_1f1bs_bubble_in_its_memory(pipe, microbatches, deferred):
    """Two stages on each rank, in a v-shape; memory that deferred products keep alive counts like what it replaces."""
    plain = simulate([replace(EQUAL, kept_bytes=1000)] * pipe, microbatches, OneForwardOneBackward(), pipe)
    half = StageTimes(forward=0.5, backward=0.5, weight=0.5, products=4, alive_bytes=500, kept_bytes=500)
    run = simulate([half] * 2 * pipe, microbatches, MessageDriven(), pipe, defer_bytes=deferred,
                   placement=StagePlacement(num_ranks=pipe, per_rank=2))
    assert run.bubble_fraction <= 0.502 * plain.bubble_fraction
    assert max(one.alive for one in run.held) <= max(one.alive for one in plain.held) == 1000 * pipe


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_fewer_in_flight_than_stages(policy, in_flight):
    run = simulate([EQUAL] * 4, 6, policy, in_flight)
    limit = 6 if policy.name == "gpipe" else in_flight
    assert max(run.most_stored) == min(limit, 6)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_in_flight_limit_is_used_where_nothing_returns(policy):
    """Evaluation of many microbatches through a short pipeline: credits return, so it ends, within the limit."""
    run = simulate([EQUAL] * 2, 40, policy, 3, training=False, hop=2.0)
    assert max(run.most_stored) <= (40 if policy.name == "gpipe" else 3)
    assert actions_text([action for action, _, _ in run.actions[1]]).startswith("F0 C0 F1 C1")


# ---------------------------------------------------------------------- known answers

@pytest.mark.parametrize("policy", [OneForwardOneBackward(), GPipe()], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("depth", "microbatches"), [(1, 3), (2, 2), (2, 8), (4, 8), (5, 11)])
def test_bubble_of_equal_stages(policy, depth, microbatches):
    run = simulate([EQUAL] * depth, microbatches, policy, depth)
    assert run.bubble_fraction == pytest.approx((depth - 1) / (microbatches + depth - 1))


def test_stored_microbatches_of_one_forward_one_backward():
    assert simulate([EQUAL] * 4, 12, OneForwardOneBackward(), 4).most_stored == (4, 3, 2, 1)
    assert simulate([EQUAL] * 4, 12, GPipe(), 4).most_stored == (12, 12, 12, 12)


@pytest.mark.parametrize(("in_flight", "idle"), [(4, 0.204), (8, 0.101)])
def test_hop_times_starve_a_pipeline_as_deep_as_its_limit(in_flight, idle):
    """4 stages, 32 microbatches, a hop of 0.3 forward times, backward twice the forward; ideal 3/35 = 8.6 %. If a
    backward always runs before a forward, 4 in flight give 29.5 %."""
    times = StageTimes(forward=1.0, backward=1.0, weight=1.0)
    run = simulate([times] * 4, 32, MessageDriven(), in_flight, hop=0.3)
    assert run.bubble_fraction == pytest.approx(idle, abs=5e-4)


def test_deferred_products_fill_the_waits():
    wanted = simulate([EQUAL] * 4, 16, MessageDriven(), 4, hop=0.3, defer_bytes=1)
    without = simulate([EQUAL] * 4, 16, MessageDriven(), 4, hop=0.3)
    assert 48 / wanted.seconds == pytest.approx(0.86, abs=5e-3)
    assert 48 / without.seconds == pytest.approx(0.734, abs=5e-3)


def text(run, stage):
    return actions_text([action for action, _, _ in run.actions[stage]])


@pytest.mark.parametrize(("policy", "room", "first", "second"), [
    ("message-driven", 0, "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    ("message-driven", 1, "F0 F1 B0 F2 W0 B1 F3 W1 B2 W2 B3 W3", "F0 B0 F1 W0 B1 F2 W1 B2 F3 W2 B3 W3"),
    ("message-driven", 2, "F0 F1 B0 F2 W0 B1 F3 W1 B2 W2 B3 W3", "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"),
    ("1f1b", 2, "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    ("gpipe", 2, "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"),
])
def test_actions_of_small_cases(policy, room, first, second):
    """Two equal stages, four microbatches, two in flight; `room` deferred microbatches fit."""
    run = simulate([EQUAL] * 2, 4, policy_named(policy), 2, defer_bytes=room)
    assert (text(run, 0), text(run, 1)) == (first, second)


@pytest.mark.parametrize(("last", "first", "second"), [
    (1, "F0 F1 B0 F2 B1 F3 B2 B3 W3", "F0 B0 F1 B1 F2 B2 F3 B3 W3"),
    (2, "F0 F1 B0 F2 B1 F3 B2 W2 B3 W3", "F0 B0 F1 B1 F2 B2 W2 F3 B3 W3"),
    (9, "F0 F1 B0 F2 W0 B1 F3 W1 B2 W2 B3 W3", "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"),
])
def test_only_the_last_products_wait(last, first, second):
    """Products of the last microbatch on each of two stages, of the last two, and of more than exist."""
    run = simulate([EQUAL] * 2, 4, MessageDriven(), 2, defer_bytes=2, defer_last=last)
    assert (text(run, 0), text(run, 1)) == (first, second)


def test_a_deferred_product_may_take_longer():
    stages = [replace(EQUAL, deferred_factor=1.5)] * 2
    run = simulate(stages, 4, MessageDriven(), 2, defer_bytes=1 << 40, defer_last=1)
    times = {str(action): stop - start for action, start, stop in run.actions[0]}
    assert times["W3"] == pytest.approx(1.5 * EQUAL.weight)
    assert times["B2"] == pytest.approx(EQUAL.backward + EQUAL.weight)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("depth", "microbatches", "last"), [(1, 0, ""), (1, 1, "F0 B0"), (3, 0, ""), (3, 1, "F0 B0")])
def test_no_and_one_microbatch(policy, depth, microbatches, last):
    run = simulate([EQUAL] * depth, microbatches, policy, depth)
    assert text(run, depth - 1) == last


def test_of_a_forward_and_a_backward_what_is_due_first_runs():
    """Stage 1 of 4 with four in flight: microbatch m's forward is due at 8 m + 4, its return at 8 m + 20."""
    one = stage(1, 4, microbatches=8, in_flight=4)
    for number in range(2):
        one.on_message("forward", number)
        run_next(one, "F", expects_backward=True)
    one.on_message("return", 0)
    one.on_message("forward", 2)
    assert run_next(one, "F", expects_backward=True).microbatch == 2, "both are due at 20"
    one.on_message("forward", 3)
    assert run_next(one, "B").microbatch == 0, "three are stored, as under 1F1B"
    one.on_message("return", 1)
    assert run_next(one, "F").microbatch == 3 and run_next(one, "B").microbatch == 1


def test_an_alternating_stage_waits_for_the_forward_that_is_next():
    one = stage(0, 2, microbatches=4, alternating=True)
    run_next(one, "F", expects_backward=True)
    run_next(one, "F", expects_backward=True)
    one.on_message("return", 0)
    run_next(one, "B")
    last = stage(1, 3, microbatches=4, in_flight=3, alternating=True)
    last.on_message("forward", 0)
    run_next(last, "F", expects_backward=True)
    last.on_message("return", 0)
    assert last.next_action() == Wait(forward=1, backward=None, stage=1)
    last.on_message("forward", 1)
    run_next(last, "F", expects_backward=True)
    assert run_next(last, "B").microbatch == 0


@pytest.mark.parametrize("hop", [0.0, 0.3])
@pytest.mark.parametrize("depth", [2, 5])
def test_alternating_without_deferral_is_1f1b(depth, hop):
    alternating = simulate([EQUAL] * depth, 12, MessageDriven(), depth, hop=hop, alternating=True)
    assert alternating.actions == simulate([EQUAL] * depth, 12, OneForwardOneBackward(), depth, hop=hop).actions


def test_frozen_prefix_passes_credits_on():
    frozen = StageTimes(forward=1.0, backward=1.0, weight=1.0, trains=False)
    run = simulate([frozen, frozen, EQUAL], 2, MessageDriven(), 3)
    assert text(run, 0) == "F0 F1 C0 C1" and text(run, 1) == "F0 F1 C0 C1" and text(run, 2) == "F0 B0 F1 B1"
    middle = simulate([EQUAL, frozen, EQUAL], 2, MessageDriven(), 3)
    assert sorted(text(middle, 1).split()) == ["B0", "B1", "F0", "F1"], "gradients must pass a frozen stage"


# ---------------------------------------------------------------------- one stage by hand

def stage(index=0, of=2, microbatches=3, policy=None, in_flight=2, **options):
    return Schedule(stage=index, num_stages=of, num_microbatches=microbatches, policy=policy or MessageDriven(),
                    in_flight=in_flight, **options)


def run_next(schedule, kind, **facts):
    action = schedule.next_action()
    assert isinstance(action, Action) and action.kind == kind, action
    schedule.on_done(action, **facts)
    return action


def test_products_drain_in_reduction_order_at_the_end_and_in_order_of_queueing_before():
    one = stage(0, 1, microbatches=2, in_flight=1, defer_bytes=100)
    run_next(one, "F", expects_backward=True, deferrable_bytes=10)
    run_next(one, "B", products=[Product(5, chunk=1), Product(5, chunk=0)])
    run_next(one, "F", expects_backward=True, deferrable_bytes=10)
    run_next(one, "B", products=[Product(5, chunk=1), Product(5, chunk=0)])
    order = [run_next(one, "W") for _ in range(4)]
    assert [(action.microbatch, action.product) for action in order] == [(0, 1), (1, 1), (0, 0), (1, 0)]
    assert one.next_action() == Done() and one.budget.used == 0

    waiting = stage(0, 2, microbatches=3, in_flight=1, defer_bytes=100)
    run_next(waiting, "F", expects_backward=True, deferrable_bytes=10)
    waiting.on_message("return", 0)
    run_next(waiting, "B", products=[Product(5, chunk=1), Product(5, chunk=0)])
    run_next(waiting, "F", expects_backward=True, deferrable_bytes=10)
    assert [run_next(waiting, "W").product for _ in range(2)] == [0, 1]
    assert waiting.next_action() == Wait(forward=None, backward=1)


def test_the_oldest_products_run_first_where_a_backward_has_no_room():
    one = stage(0, 2, microbatches=2, defer_bytes=10)
    run_next(one, "F", expects_backward=True, deferrable_bytes=10)
    run_next(one, "F", expects_backward=True, deferrable_bytes=10)
    one.on_message("return", 0)
    assert run_next(one, "B", products=[Product(6, 0), Product(4, 1)]).defer
    one.on_message("return", 1)
    run_next(one, "W")
    run_next(one, "W")
    assert one.budget.used == 0 and run_next(one, "B", products=[]).defer


def test_a_backward_that_never_fits_empties_the_queue_and_defers_nothing():
    one = stage(0, 2, microbatches=2, defer_bytes=10)
    run_next(one, "F", expects_backward=True, deferrable_bytes=10)
    run_next(one, "F", expects_backward=True, deferrable_bytes=11)
    one.on_message("return", 0)
    run_next(one, "B", products=[Product(10, 0)])
    one.on_message("return", 1)
    run_next(one, "W")
    assert not run_next(one, "B").defer


def test_gradients_that_are_not_wanted_need_no_backward():
    one = stage(1, 2)
    one.on_message("forward", 0)
    run_next(one, "F", expects_backward=False)
    assert run_next(one, "C") == Action("C", 0)
    assert one.next_action() == Wait(forward=1, backward=None, stage=1)


@pytest.mark.parametrize(("index", "kind", "microbatch", "says"), [
    (1, "forward", 1, "stage 1 got the forward of microbatch 1, expected 0 of 3; so far: nothing"),
    (1, "forward", 7, "stage 1 got the forward of microbatch 7, expected 0 of 3; so far: nothing"),
    (0, "forward", 0, "stage 0 got the forward of microbatch 0, expected none of 3; so far: nothing"),
    (0, "return", 0, "stage 0 got the return of microbatch 0, expected none of 3; so far: nothing"),
    (1, "return", 0, "stage 1 got the return of microbatch 0, expected none of 3; so far: nothing"),
])
def test_wrong_arrivals_are_refused(index, kind, microbatch, says):
    with pytest.raises(AssertionError, match=f"^{says}$"):
        stage(index).on_message(kind, microbatch)


def test_a_refusal_shows_the_actions_so_far():
    one = stage(0)
    run_next(one, "F", expects_backward=True)
    run_next(one, "F", expects_backward=True)
    one.on_message("return", 0)
    run_next(one, "B")
    with pytest.raises(AssertionError, match=r"got the return of microbatch 0, expected 1 of 3; so far: F0 F1 B0$"):
        one.on_message("return", 0)


def test_actions_as_text():
    actions = [Action("F", 0), Action("B", 0, defer=True), Action("W", 0), Action("W", 0, product=1), Action("W", 1)]
    assert actions_text(actions) == "F0 B0 W0x2 W1"


# ---------------------------------------------------------------------- policies

@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_conform(policy):
    check_policy(policy, cases=60)


@dataclass(frozen=True)
class ForwardFirst:
    """A minimal policy: as many forwards as the limit allows, then backwards."""

    name: str = "forward-first"
    defers: bool = True

    def choose(self, ready):
        return ready.forward or ready.backward or ready.weight

    def stored(self, in_flight, stage, num_stages):
        return in_flight

    def in_flight(self, in_flight, num_microbatches):
        return in_flight


def test_a_policy_of_ones_own():
    assert policy_named(ForwardFirst()) == ForwardFirst()
    check_policy(ForwardFirst(), cases=60)
    assert text(simulate([EQUAL] * 2, 4, ForwardFirst(), 3), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"


class NeverBackward(ForwardFirst):
    def choose(self, ready):
        return ready.forward


class NotReady(ForwardFirst):
    def choose(self, ready):
        return ready.forward or Action("B", ready.returns_done)


class Undecided(ForwardFirst):
    def choose(self, ready):
        object.__setattr__(self, "turn", not getattr(self, "turn", False))
        return ready.forward if self.turn else ready.backward or ready.weight


class MoreThanAllowed(ForwardFirst):
    def choose(self, ready):
        return Action("F", ready.forwards_done) if ready.forwards_done < ready.num_microbatches else ready.backward


@pytest.mark.parametrize(("policy", "says"), [
    (NeverBackward(), "unfinished stages"), (NotReady(), "chose B0, but ready are"),
    (Undecided(), "of the same"), (MoreThanAllowed(), "but ready are"),
])
def test_the_conformance_check_finds_policies_that_do_not_work(policy, says):
    with pytest.raises(AssertionError, match=says):
        check_policy(policy)


def test_unknown_policy():
    with raises("unknown-policy", "gppipe", "message-driven", "1f1b"):
        policy_named("gppipe")


def test_auto_defers_only_where_a_stage_before_waits():
    stages = [StageTimes(forward=1, backward=1, weight=1, products=4, alive_bytes=100, trains=trains)
              for trains in (False, True, True)]
    result = simulate(stages, 6, MessageDriven(), 3, defer_bytes="auto")
    assert [most > 0 for most in result.most_queued_bytes] == [False, False, True]
    both = simulate(stages[1:], 6, MessageDriven(), 2, defer_bytes="auto")
    assert both.most_queued_bytes[0] == 0 and 100 < both.most_queued_bytes[1] <= 200
