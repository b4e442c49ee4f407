"""The pure parts of the pipeline benchmark: cuts, bounds, ratios."""

from dataclasses import replace

import pytest

from benchmarks.pipeline.block_times import BlockTimes, mean_times
from benchmarks.pipeline.bounds import best_cut, bound_seconds, run_in_order
from benchmarks.pipeline.case import Case, with_cut
from benchmarks.pipeline.contender import Contender, contenders, ours
from benchmarks.pipeline.pipeline import parse
from benchmarks.pipeline.slowed import slowness
from benchmarks.pipeline.summary import markdown, rows
from benchmarks.pipeline.team import step_seconds
from benchmarks.pipeline.workload import Workload

WORKLOAD = Workload(num_layers=3, microbatches=8)
NUM_BLOCKS = 8
TIMES = BlockTimes(forward=(1.0,) * NUM_BLOCKS, backward=(1.0,) * NUM_BLOCKS, weight=(1.0,) * NUM_BLOCKS,
                   num_parameters=(10,) * NUM_BLOCKS, products=(1,) * NUM_BLOCKS, alive_bytes=(100,) * NUM_BLOCKS,
                   optimizer_seconds_per_parameter=0.0)


def test_best_cut_levels_the_dearest_rank():
    assert best_cut(TIMES, WORKLOAD, ranks=2) == (4,)
    dear_head = replace(TIMES, forward=(1.0,) * 7 + (5.0,))
    assert best_cut(dear_head, WORKLOAD, ranks=2) == (5,)  # 15 and 13; (4,) has 12 and 16
    dear_update = replace(TIMES, optimizer_seconds_per_parameter=1.0, num_parameters=(1000,) + (0,) * 7)
    assert best_cut(dear_update, WORKLOAD, ranks=2) == (1,)
    cut = best_cut(TIMES, WORKLOAD, ranks=2, per_rank=2)
    assert cut == (2, 4, 6), "equal ranks first, then equal stages"


def test_a_contender_with_one_stage_per_rank_takes_the_cut_given_by_hand():
    case = Case(workload=WORKLOAD, ranks=2, boundaries=(3,))
    by_name = {one.name: with_cut(one, case, TIMES).settings.get("boundaries") for one in contenders(2, cores=2)}
    assert by_name["ours-message-driven-mpi"] == by_name["torch-1f1b"] == by_name["torch-gpipe"] == (3,)
    assert by_name["torch-interleaved-zb"] == (2, 4, 6)
    assert by_name["ddp"] is by_name["ceiling"] is None


def test_bounds_are_the_closed_forms():
    stage = 4 * 3.0  # forward and backward of one microbatch on one of two equal stages
    flush = (8 + 1) * stage
    for schedule in ("Schedule1F1B", "ScheduleGPipe"):
        torch_bound = bound_seconds(Contender(name="t", kind="torch", ranks=2, settings={
            "schedule": schedule, "boundaries": (4,)}), WORKLOAD, TIMES, cores=2)
        assert torch_bound == pytest.approx(flush)
    assert bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,)), WORKLOAD, TIMES, cores=2) == pytest.approx(flush)
    deferring = bound_seconds(ours("message-driven", "mpi", 2, boundaries=(4,)), WORKLOAD, TIMES, cores=2)
    assert 8 * stage < deferring < flush
    assert bound_seconds(Contender(name="c", kind="plain", ranks=2), WORKLOAD, TIMES, cores=2) == 8 * stage
    assert bound_seconds(Contender(name="p", kind="plain", ranks=1), WORKLOAD, TIMES, cores=2) == 8 * 2 * stage
    assert bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,)), WORKLOAD, TIMES, cores=1) == 8 * 2 * stage


def test_slow_stages_and_messages_raise_the_bound():
    base = bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,)), WORKLOAD, TIMES, cores=2)
    slow = bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,), slowness={"stage": 1, "factor": 1.5}), WORKLOAD, TIMES,
                         cores=2)
    late = bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,), latency_seconds=2.0), WORKLOAD, TIMES, cores=2)
    assert slow > 1.3 * base
    assert late >= base + 2 * 2.0


def test_a_tied_weight_is_updated_once_by_ours_and_at_both_ends_by_torch():
    tied = WORKLOAD.vocab * WORKLOAD.hidden
    times = replace(TIMES, forward=(0.0,) * 8, backward=(0.0,) * 8, weight=(0.0,) * 8,
                    optimizer_seconds_per_parameter=1.0, num_parameters=(0,) * 7 + (tied + 5,))
    torch_schedule = Contender(name="t", kind="torch", ranks=2,
                               settings={"schedule": "Schedule1F1B", "boundaries": (4,)})
    assert bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,)), WORKLOAD, times, cores=2) == 5
    assert bound_seconds(torch_schedule, WORKLOAD, times, cores=2) == tied + 5
    assert bound_seconds(ours("1f1b", "mpi", 2, boundaries=(4,)), replace(WORKLOAD, tied=False), times,
                         cores=2) == tied + 5


def test_a_given_order_runs_as_soon_as_its_inputs_are_there():
    order = [[(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)], [(1, "F", 0), (1, "I", 0), (1, "F", 1), (1, "I", 1),
                                                                    (1, "W", 0), (1, "W", 1)]]
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    #  rank 0   F0 F1 -- B0 B0 B1 B1         rank 1   -- F0 I0 F1 I1 W0 W1
    assert run_in_order(order, lambda stage, kind: seconds[kind], num_stages=2) == [7.0, 7.0]
    with pytest.raises(ValueError, match="waits for itself"):
        run_in_order([[(0, "B", 0), (0, "F", 0)]], lambda stage, kind: 1.0, num_stages=1)


def test_step_times_of_teams_and_of_independent_loops():
    assert step_seconds([[0.0, 1.0, 3.0], [0.5, 1.5, 2.5]], independent=False) == (1.0, 1.5)
    assert step_seconds([[0.0, 2.0], [1.0, 3.0]], independent=True) == (1.0,)
    assert step_seconds([[0.0, 2.0], [0.0, 6.0]], independent=True) == (1.5,)


def test_slowness_is_the_same_at_every_step():
    jitter = slowness({"jitter": 0.5})
    factors = [jitter(stage, kind, number) for stage in range(2) for kind in "FBW" for number in range(8)]
    assert factors == [jitter(stage, kind, number) for stage in range(2) for kind in "FBW" for number in range(8)]
    assert all(1.0 <= factor <= 1.5 for factor in factors) and len(set(factors)) == len(factors)
    slow = slowness({"stage": 1, "factor": 1.5})
    assert (slow(0, "F", 0), slow(1, "W", 3)) == (1.0, 1.5)


def _measured(name: str, kind: str, seconds: list[float], transport: str | None = None) -> dict:
    return {"name": name, "kind": kind, "ranks": 2, "settings": {"transport": transport} if transport else {},
            "rounds": [{"seconds": value, "bound_seconds": 1.0, "cpu_seconds": 3.0, "step_seconds": [value],
                        "peak_bytes": [2**20 * (number + 1), 2**21], "peak_above_imports_bytes": [2**20, 2**20],
                        "seconds_by_category": [{"wait": 0.25}, None] if transport else [None, None]}
                       for number, value in enumerate(seconds)]}


CASE = {"scenario": "plain", "ranks": 2, "cores": 2, "workload": {"microbatches": 8}, "contenders": [
    _measured("ceiling", "plain", [1.0, 2.0, 4.0]), _measured("one-process", "plain", [2.0, 4.0, 8.0]),
    _measured("torch-gpipe", "torch", [1.3, 2.4, 5.0]), _measured("torch-1f1b", "torch", [1.25, 2.5, 5.0]),
    _measured("ours-1f1b-mpi", "ours", [1.25, 2.5, 5.0], "mpi"),
    _measured("ours-message-driven-mpi", "ours", [1.0, 2.5, 4.0], "mpi")]}


def test_ratios_are_formed_within_rounds():
    table = {row.name: row for row in rows(CASE)}
    mine = table["ours-message-driven-mpi"]
    assert (mine.to_ceiling.least, mine.to_ceiling.middle, mine.to_ceiling.greatest) == (0.8, 1.0, 1.0)
    assert mine.to_one_process.middle == 1.0
    assert (mine.to_best_torch.least, mine.to_best_torch.middle, mine.to_best_torch.greatest) == (0.96, 1.25, 1.3)
    assert (mine.to_torch_1f1b.least, mine.to_torch_1f1b.middle) == (1.0, 1.25)
    assert mine.to_own_1f1b.middle == 1.25
    assert (mine.seconds, mine.bound_seconds, mine.to_bound.middle) == (2.5, 1.0, 0.4)
    assert mine.peak_bytes == (3 * 2**20, 2**21)
    assert table["torch-1f1b"].to_own_1f1b is None


def test_a_table_without_what_it_would_compare_with():
    alone = {**CASE, "contenders": CASE["contenders"][-1:]}
    (row,) = rows(alone)
    assert row.to_ceiling is row.to_one_process is row.to_best_torch is row.to_torch_1f1b is row.to_own_1f1b is None
    text = markdown([alone], "# title")
    assert "| ours-message-driven-mpi | 2 " in text and "rank 0  wait 250.0" in text


def test_mean_times_over_ranks():
    one = {**vars(TIMES)}
    other = {**one, "forward": (3.0,) * NUM_BLOCKS, "optimizer_seconds_per_parameter": 2.0}
    mean = mean_times([one, other])
    assert mean.forward == (2.0,) * NUM_BLOCKS and mean.optimizer_seconds_per_parameter == 1.0


@pytest.mark.parametrize("arguments, told", [
    (["--ranks", "1"], "at least 2"),
    (["--microbatches", "5"], "5 microbatches do not divide 32 sequences"),
    (["--scenario", "jitter", "--ranks", "1000"], "needs a core for each rank"),
])
def test_settings_that_cannot_be(arguments, told, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert told in capsys.readouterr().err


def test_the_default_plan():
    plan = parse([])
    assert [(case.ranks, case.workload.microbatches) for case in plan.cases] == [(2, 8), (2, 16), (4, 8), (4, 16)]
    assert (plan.cases[0].workload.num_layers, plan.cases[0].workload.hidden, plan.cases[0].workload.vocab) == (
        8, 256, 8192)
    (quick,) = parse(["--quick", "--only", "torch-*"]).cases
    assert [one.name for one in contenders(2, 2) if quick.wanted(one)] == [
        "torch-gpipe", "torch-1f1b", "torch-interleaved-1f1b", "torch-interleaved-zb"]
