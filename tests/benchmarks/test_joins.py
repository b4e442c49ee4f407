"""The soak of joins and losses: one run in `make test-all`, and tests that it detects what it looks for."""

import json

import pytest

from benchmarks.faults import joins
from benchmarks.faults.joins import STEPS, JoinTrial, Outcome, table
from benchmarks.faults.training import Training

LOSSES = [1.0 / step for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_events_and_none_again(tmp_path, capsys):
    args = ["--events", "10", "--outcomes", str(tmp_path / "outcomes.jsonl"), "--folder", str(tmp_path / "runs")]
    assert joins.main(args) == 0, capsys.readouterr()
    assert "10 events in 1 runs, seed 0: 0 runs went wrong." in capsys.readouterr().out
    assert joins.main(args) == 0
    assert len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 1


class Ended:
    """A run that has ended with exit code 0."""

    code, text = 0, "ranvier: restart 1 of 100: ..."


@pytest.mark.parametrize(("steps", "factor", "problem"), [
    (range(1, STEPS + 1), 1.0, None),
    ([*range(1, STEPS), STEPS - 1], 1.0, f"metrics of {STEPS} steps, not of each once"),
    (range(1, STEPS), 1.0, f"metrics of {STEPS - 1} steps, not of each once"),
    (range(1, STEPS + 1), 1.0 + 1e-8, "losses differ by 1.0e-08")], ids=["good", "twice", "missing", "other losses"])
def test_a_run_is_judged_by_its_metrics(tmp_path, steps, factor, problem):
    training = Training(tmp_path)
    training.run_dir.mkdir()
    (training.run_dir / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": factor * loss}) + "\n" for step, loss in zip(steps, LOSSES, strict=False)))
    trial = JoinTrial(0, 0, training)
    trial._run, trial._firsts = Ended(), 1
    trial._judge(LOSSES)
    assert trial._outcome.problems == ([] if problem is None else [problem])
    assert trial._outcome.restarts == 1


def test_a_restart_that_no_loss_of_rank_0_explains(tmp_path):
    trial = JoinTrial(0, 0, Training(tmp_path))
    trial._run = Ended()
    trial._judge(LOSSES)
    assert trial._outcome.problems[0].startswith("1 restarts, and rank 0 was killed 0 times")


def test_what_went_wrong_is_in_the_table():
    outcomes = [Outcome(number=0, seed=0, events=["join", "dies"], joined=1, refused=1),
                Outcome(number=1, seed=0, events=["join", "newcomer"], problems=["the run did not end"])]
    text = table(outcomes, 0)
    assert "4 events in 2 runs, seed 0: 1 runs went wrong." in text
    assert "| 2 | 1 | 1 | 0 | 0 | 0 | 1 | 1 | 0 | 0 | 0.0e+00 |" in text
    assert "- case 1 (join, newcomer): the run did not end" in text
