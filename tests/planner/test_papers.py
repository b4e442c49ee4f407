"""The planner against the papers' numbers, with the tolerances that docs/experiments states for them."""

from itertools import islice

import pytest

from benchmarks.planner.papers import AXONN, BILLIONS, ByCommand, Papers, growth, median_error

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def papers():
    return Papers()


@pytest.fixture(scope="module")
def axonn(papers):
    return {row.what: row for row in papers.axonn_rows()}


def test_the_command_says_of_a_step_what_the_law_does(papers):
    run = papers.axonn(12, 1, 6, 8, 2048, bucket_size=16_000_000)
    law, command = papers.on_summit(run), ByCommand(work=papers.work).on_summit(run)
    assert command.pipeline_seconds == pytest.approx(law.pipeline_seconds)
    assert command.seconds == pytest.approx(law.seconds) and command.days() == pytest.approx(law.days())


@pytest.mark.slow
def test_median_error(papers, axonn):
    rows = [*axonn.values(), *papers.optimus_rows(), *papers.batch_rows()]
    assert median_error(rows) <= 0.15


def test_times_and_memory_of_the_12_billion_model(papers):
    rows = list(islice(papers.axonn_rows(), 6))
    assert sum("batch 2048" in row.what for row in rows) == 4 and sum("memory" in row.what for row in rows) == 2
    for row in rows:
        assert abs(row.error) <= 0.15, row


@pytest.mark.slow
@pytest.mark.parametrize("billions", BILLIONS)
def test_the_papers_configuration_is_the_best_or_near_it(papers, billions):
    found = papers.table_two(billions)
    assert found.problem is None and found.published == AXONN[billions]
    assert 1.0 <= found.ratio <= 1.03, found


@pytest.mark.slow
def test_shares_of_the_peak_and_ratios(axonn):
    """1.18 and 2.46 times slower at 100 B, 11.47 and 18.14 % on 384; 49.4 to 54.78, 39 to 42 and 21 to 41 % of peak."""
    shares = [row for what, row in axonn.items() if "share of the peak" in what]
    ratios = [row for what, row in axonn.items() if "time over" in what]
    assert len(shares) == 12 and len(ratios) == 4
    for row in shares + ratios:
        assert abs(row.error) <= 0.15, row


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["100 B", pytest.param("12 B on 384, batch 32768", marks=pytest.mark.xfail(
    strict=True, reason="predicted 1.22 and 1.21 times AxoNN's, published 1.11 and 1.18 (docs/planner.md)"))])
def test_deepspeed_is_faster_than_megatron_and_axonn_than_both(axonn, scale):
    deepspeed, megatron = (axonn[f"{scale}, {name}: time over AxoNN's"].predicted
                           for name in ("DeepSpeed", "Megatron-LM"))
    assert 1.0 < deepspeed < megatron


@pytest.mark.slow
def test_trends(papers):
    five, eight = papers.figure_five(), papers.figure_eight()
    assert list(five.values()) == sorted(five.values())
    best = min(eight, key=eight.get)
    assert eight[1] > eight[0] > eight[2] > eight[best] and 2 <= best <= 16
    assert eight[best] < eight[32] < eight[64]


@pytest.mark.slow
def test_a_rank_computes_less_for_what_it_sends_with_more_stages(papers):
    """Theorem 5.3: computing over bytes sent falls as 1 / G_inter."""
    assert list(papers.theorem().values()) == pytest.approx([1.0] * 4, abs=0.02)


@pytest.mark.slow
def test_strong_scaling(papers):
    """Figure 11: AxoNN is the fastest on every number of devices; eight times as many need an eighth of the days."""
    found = papers.figure_eleven()
    assert list(found) == [48, 96, 192, 384] and all(min(days, key=days.get) == "AxoNN" for days in found.values())
    for name, days in found[48].items():
        assert days / found[384][name] == pytest.approx(8.0, rel=0.03)


@pytest.mark.slow
def test_optimus_tables(papers):
    """Forward and backward together; Megatron's forward alone is predicted up to 54 % too long in strong scaling."""
    rows = list(papers.optimus_rows())
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        together = (forward.predicted + backward.predicted) / (forward.published + backward.published)
        assert 0.8 < together < 1.3, forward
    assert median_error(rows) <= 0.15


@pytest.mark.slow
def test_the_problem_grows_as_the_isoefficiency_functions_do(papers):
    """Megatron's p^3; Optimus' (sqrt p log p)^3, which from 16 to 256 devices is p^2.25."""
    powers = {scheme: growth(papers.isoefficiency(scheme)) for scheme in ("Megatron", "Optimus")}
    assert powers["Megatron"] == pytest.approx(3.0, abs=0.25)
    assert powers["Optimus"] == pytest.approx(2.25, abs=0.25)


def test_batch_limits(papers):
    for row in papers.batch_rows():
        assert abs(row.error) <= 0.15, row


@pytest.mark.slow
def test_optimus_against_megatron(papers):
    for what, said, predicted in papers.rankings():
        assert said == predicted, what
