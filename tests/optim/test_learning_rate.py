"""The learning rate of each step."""

import math

import pytest
import torch

from ranvier.config.run import Train
from ranvier.optim.learning_rate import describe, learning_rate


def rates(**options):
    train = Train(**{"steps": 10, "learning_rate": 2.0, **options})
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_constant():
    assert rates() == [2.0] * 10
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5] + [2.0] * 7
    assert rates(warmup_steps=20) == pytest.approx([0.1 * step for step in range(1, 11)])


def test_linear_ends_where_it_is_told_to():
    assert rates(schedule="linear") == pytest.approx([1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    found = rates(schedule="linear", warmup_steps=5, final_learning_rate=1.0)
    assert found == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0])


def test_cosine_is_torchs():
    """torch's schedule gives the rate before its step; ours that of the step, so the last step has the final rate."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.5)
    expected = []
    for _ in range(10):
        optimizer.step()
        schedule.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates(schedule="cosine", final_learning_rate=0.5) == pytest.approx(expected)
    warm = rates(schedule="cosine", warmup_steps=2)
    assert warm[:2] == [1.0, 2.0] and warm[-1] == pytest.approx(0.0)
    assert warm[2] == pytest.approx(1.0 + math.cos(math.pi / 8))


def test_wsd_decays_at_the_end():
    found = rates(schedule="wsd", decay_share=0.4, decay_shape="linear")
    assert found == pytest.approx([2.0] * 6 + [1.5, 1.0, 0.5, 0.0])
    found = rates(schedule="wsd", decay_share=0.4, warmup_steps=2, final_learning_rate=1.0)
    assert found == pytest.approx([1.0] + [2.0] * 5 + [1.0 + 1.0 - math.sqrt(part / 4) for part in (1, 2, 3, 4)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_every_schedule_ends_at_its_final_rate(schedule):
    for steps, warmup, share in [(1, 0, 0.2), (3, 0, 0.01), (7, 6, 1.0), (7, 2, 1.0), (100, 50, 0.9)]:
        found = rates(schedule=schedule, steps=steps, warmup_steps=warmup, decay_share=share, final_learning_rate=0.25)
        assert found[-1] == pytest.approx(0.25) and max(found) <= 2.0, (steps, warmup, share)


def test_a_schedule_in_words():
    train = Train(steps=100, learning_rate=1e-3, warmup_steps=10, schedule="wsd")
    assert describe(train) == "wsd, 0.001 after 10 steps of warmup, 1-sqrt decay from step 80 to 0 at step 100"
    assert describe(Train()) == "constant, 0.001"
    assert describe(Train(schedule="cosine", steps=5, warmup_steps=30)).endswith("warmup, of which the run has 5")
    assert describe(Train(schedule="cosine", steps=5)) == "cosine, 0.001, decay from step 0 to 0 at step 5"
