"""Samples, steps and learning rates of a run whose global batch changes."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Checkpoint, Elastic, Train
from ranvier.optim.learning_rate import learning_rate
from ranvier.train.progress import Progress

RUN = ResolvedRun(batch=Batch(global_size=8, microbatch_size=2), checkpoint=Checkpoint(every=4),
                  train=Train(steps=30, warmup_steps=3, schedule="cosine", eval_every=7))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=4))
def test_a_run_takes_all_samples_once_whatever_its_batches(changes):
    progress, step, samples = Progress.begin(RUN), 0, 0
    for steps, size in (*changes, (10**6, 8)):
        for _ in range(steps):
            if not progress.steps_left(step):
                break
            step, samples = step + 1, samples + progress.size
            assert progress.samples(step) == samples
        progress = progress.with_size(step, size)
        assert Progress.begin(RUN).restore(json.loads(json.dumps(progress.state()))) == progress
    assert progress.steps_left(step) == 0 and 0 <= samples - RUN.samples_of(30) < 40


def test_a_run_evaluates_and_saves_at_its_times_and_at_its_end():
    progress = Progress.begin(RUN)
    assert [step for step in range(1, 31) if progress.evaluates(step)] == [7, 14, 21, 28, 30]
    assert [step for step in range(1, 31) if progress.is_save_due(step)] == [4, 8, 12, 16, 20, 24, 28, 30]
    never = Progress.begin(replace(RUN, train=replace(RUN.train, eval_every=0), checkpoint=Checkpoint(every=0)))
    assert [step for step in range(1, 31) if never.evaluates(step) or never.is_save_due(step)] == [30]


@pytest.mark.parametrize(("global_batch", "factor"), [("keep", 1.0), ("scale", 3.0)])
def test_learning_rates_stay_at_their_place_in_the_data(global_batch, factor):
    run = replace(RUN, elastic=Elastic(global_batch=global_batch))
    progress = Progress.begin(run).with_size(6, 24)
    assert Progress.begin(run).learning_rate(5) == learning_rate(run.train, 5)
    assert progress.learning_rate(8) == pytest.approx(factor * learning_rate(run.train, 12))
    assert progress.learning_rate(20) == factor * learning_rate(run.train, 30)


def test_another_global_batch_that_is_asked_for_counts_from_the_start():
    progress = Progress.begin(RUN).with_size(6, 24)
    other = Progress.begin(replace(RUN, batch=replace(RUN.batch, global_size=16)))
    assert other.restore(progress.state()) == other and other.restore({}) == other
