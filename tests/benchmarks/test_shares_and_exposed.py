"""Simulated shares of a pipeline's time, and exposed bytes of the tensor mesh: both run and distinguish rules."""

from dataclasses import replace

import pytest
import torch

from benchmarks.pipeline import shares, slices
from benchmarks.pipeline.block_times import BlockTimes
from benchmarks.tensor import exposed
from ranvier.cost.cluster_files import load_cluster

EVEN = BlockTimes(forward=(1.0,) * 4, backward=(1.0,) * 4, weight=(1.0,) * 4, num_parameters=(1,) * 4,
                  products=(1,) * 4, alive_bytes=(10,) * 4, optimizer_seconds_per_parameter=0.0)


def test_the_recorded_times_are_whole():
    times = shares.measured()
    assert len(times.forward) == len(times.alive_bytes) == 18 and min(times.forward) > 0
    assert len(set(times.forward[1:-1:2])) == len(set(times.weight[2:-1:2])) == 1


def test_more_room_is_never_slower():
    found = [shares.step(EVEN, replace(rules, cut=2), 8) for rules in shares.STEPS]
    assert all(0.5 < one.share <= 1.0 for one in found)
    assert found[-1].share >= found[0].share and found[-1].most_queued_bytes > found[0].most_queued_bytes


def test_budgets_are_those_of_each_rank():
    rules = shares.Rules(name="", in_flight=3, deferred=(1, 2), head=True, cut=2)
    assert shares.step(EVEN, rules, 8).most_queued_bytes <= (20, 40)
    nothing = shares.step(EVEN, replace(rules, deferred=(0, 0)), 8)
    assert nothing.most_queued_bytes == (0, 0) and nothing.share < shares.step(EVEN, rules, 8).share


def test_slices_of_products_are_simulated():
    """With one stage a rank the work is the same, and slices lose nothing."""
    case = slices.Case(pipe=4, per_rank=1, microbatches=8, head=8.0, memory=1.1)
    whole, cut = (slices.share(case, slices.Slices(head=count)) for count in (1, 4))
    assert 0 < whole <= cut < 1
    assert [row[2:] for row in slices.rows([case], [slices.Slices()])] == [["+0.000"] * 4]


def test_a_cut_that_is_uneven_is_seen():
    even, uneven = (shares.step(EVEN, shares.Rules(name="", cut=cut), 8) for cut in (2, 3))
    assert uneven.share < 0.75 < even.share


def test_shares_prints_tables(capsys):
    assert shares.main(["--microbatches", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("/" in line for line in lines) == len(shares.STEPS) + 2 * len(shares.POLICIES) + 3
    assert "forward first, 3 in flight" in "".join(lines)


@pytest.mark.parametrize("before", [0, 1, 4])
def test_products_before_the_wait_hide_a_transfer(before):
    """Each product hides a transfer for as long as the product takes, and only once."""
    clock = exposed.Clock(flops_per_second=2 * 8**3, bytes_per_second=768 / 2)  # a product 1 s, a transfer 2 s
    group = exposed.WatchedGroup("row", 4, clock)
    with torch.device("meta"), exposed.Products(clock):
        matrix, whole = torch.empty(8, 8), torch.empty(32, 8)
        matrix @ matrix
        first, second = (group.all_gather(whole, matrix) for _ in range(2))
        for _ in range(before):
            matrix @ matrix
        first.wait()
        second.wait()
        matrix @ matrix
    flop = before * 2 * 8**3
    assert [(one.name, one.num_bytes, one.flop) for one in clock.transfers] == [("row all_gather", 768, flop)] * 2
    assert exposed.hidden_bytes(clock.transfers) == (2 * 768 if before else 0, 2 * 768)
    assert exposed.waited_share(clock.transfers) == pytest.approx((4 - before) / 4)


@pytest.mark.parametrize(("case", "last"), [
    pytest.param(case, last, marks=() if last and case in exposed.HELD[1::80] else pytest.mark.slow)
    for case in exposed.HELD for last in (False, True)], ids=str)
def test_products_hide_all_but_one_panel_of_each_activation(case, last):
    """On the first and the last rank of the mesh."""
    at = (case.row - 1, case.col - 1) if last else (0, 0)
    transfers = exposed.transfers(replace(case, at=at), load_cluster("h100"))
    hidden, total = exposed.hidden_bytes(transfers)
    assert hidden >= (1 - exposed.LIMIT) * total > 0
    assert exposed.waited_share(transfers) <= exposed.WAITED[case.hidden]


def test_exposed_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(exposed, "CASES", [replace(exposed.CASES[0], col=2, sequence=1024, hidden=1024)])
    assert exposed.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "stationary 1x2" in lines[1] and lines[1].endswith("%")
