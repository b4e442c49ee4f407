"""The schedule that is chosen by simulation compared with ZB-V and DualPipeV: bounds of a deterministic simulation."""

import json
import random

import pytest

from benchmarks.pipeline import static_schedules
from benchmarks.pipeline.bounds import run_in_order
from benchmarks.pipeline.static_schedules import (
    CASES,
    OWN_HOP,
    Case,
    main,
    one_f_one_b,
    ours,
    stages_of,
    static,
    static_order,
)
from ranvier.mesh import StagePlacement
from ranvier.schedule.computed_limits import computed_limits
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.simulator import StageTimes, simulate
from tests.covering import covering, first, quick

OWN = [case for case in CASES if case.hop == OWN_HOP]


def name_of(case):
    if isinstance(case, float | str):
        return str(case)
    return f"{case.blocks}, {case.microbatches} microbatches on {case.pipe}"


@pytest.mark.parametrize(("pipe", "microbatches"), [(4, 8), (4, 16), (8, 16)])
def test_the_fixed_orders_are_what_their_papers_say(pipe, microbatches):
    """Without message times and with equal blocks, only the way to the last rank is lost, at 1F1B's memory, plus half a
    microbatch with DualPipeV."""
    case = Case(pipe=pipe, microbatches=microbatches, blocks="equal", hop=0.0)
    least = (pipe - 1) / (6 * microbatches + pipe - 1)
    for schedule, peak in (("ScheduleZBVZeroBubble", 1.0), ("ScheduleDualPipeV", 1 + 1 / (2 * pipe))):
        found = static(case, schedule)
        assert found.bubble == pytest.approx(least) and found.peak == pytest.approx(peak)
    assert one_f_one_b(case).bubble == pytest.approx((pipe - 1) / (microbatches + pipe - 1))


@pytest.mark.parametrize(("case", "memory"), quick(1, covering(OWN, [1.0, 1.1])), ids=name_of)
def test_half_the_bubble_of_1f1b_in_its_memory(case, memory):
    found, other = ours(case, 2, memory), one_f_one_b(case)
    assert found.bubble <= 0.5 * other.bubble and found.peak <= memory + 1e-9 and other.peak == 1.0


def slower(found, other):
    """Ratio of the step times of `found` and `other`."""
    return found.seconds / other.seconds


@pytest.mark.parametrize("case", quick(1, OWN), ids=name_of)
def test_within_three_percent_of_zb_v_with_more_memory(case):
    found = ours(case, 2, 1.5)
    assert slower(found, static(case, "ScheduleZBVZeroBubble")) <= 1.03 and found.peak <= 1.51


@pytest.mark.parametrize(("case", "schedule"), first([
    (OWN[0], "ScheduleZBVZeroBubble"), (OWN[4], "ScheduleZBVZeroBubble"), (OWN[1], "ScheduleDualPipeV")], [
    (case, schedule) for schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") for case in OWN
    if schedule == "ScheduleZBVZeroBubble" or case.microbatches >= 2 * case.pipe]), ids=name_of)
def test_within_three_percent_of_the_fixed_orders_at_their_memory(case, schedule):
    """DualPipeV needs as many microbatches as stages."""
    other = static(case, schedule)
    found = ours(case, 2, max(1.0, other.peak))
    assert slower(found, other) <= 1.03 and found.peak <= max(1.0, other.peak) + 1e-9


@pytest.mark.parametrize("case", quick(1, [case for case in OWN if case.blocks == "equal"]), ids=name_of)
def test_as_fast_as_zb_v_where_times_vary(case):
    """Each action takes up to 20 % more or less: a fixed order waits for what has not arrived."""
    placement = StagePlacement(num_ranks=case.pipe, per_rank=2)
    limits = computed_limits(stages_of(case, placement), MessageDriven(), memory=1.0, placement=placement,
                             num_microbatches=case.microbatches)
    loads = stages_of(case, placement)
    times = [StageTimes(forward=each.forward, backward=each.backward, weight=each.weight, products=4) for each in loads]
    order = static_order("ScheduleZBVZeroBubble", case.pipe, case.microbatches)
    hop = 2 * case.hop
    mine, theirs = 0.0, 0.0
    for seed in range(20):
        chance = random.Random(seed)

        def one(seconds, chance=chance):
            return seconds * chance.uniform(0.8, 1.2)

        def takes(stage, kind):
            load = loads[stage]
            weight = sum(one(load.weight / 4) for _ in range(4)) if kind in "BW" else 0.0
            return weight + sum(one(part) for part in {"F": [load.forward], "W": []}.get(kind, [load.backward]))

        mine += simulate(times, case.microbatches, MessageDriven(), limits.in_flight, hop=hop, placement=placement,
                         jitter=lambda rank, action: one(1.0), defer_bytes=1 << 40,
                         max_stored=limits.max_stored).seconds
        theirs += max(run_in_order(order, takes, len(loads), hop))
    assert mine <= 1.005 * theirs


def test_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(static_schedules, "CASES", [Case(pipe=2, microbatches=2, blocks="gpt"),
                                                    Case(pipe=2, microbatches=4, blocks="equal")])
    assert main(["--output", str(tmp_path / "found.json")]) == 0
    head, few, many, *_ = capsys.readouterr().out.splitlines()
    assert "DualPipeV" in head and " - " in few and " - " not in many
    found = json.loads((tmp_path / "found.json").read_text())
    assert [case["pipe"] for case in found["cases"]] == [2, 2] and found["commit"] and found["machine"]
    assert found["cases"][1]["schedules"]["ZB-V"]["peak"] == pytest.approx(1.0)
