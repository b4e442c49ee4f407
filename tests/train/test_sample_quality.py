"""The sentence above a run's sample text follows from the held-out loss and the frequencies of tokens."""

import math

import pytest
import torch

from ranvier.tensor.split.loss import IGNORED
from ranvier.train import evaluation
from ranvier.train.evaluation import expectation, frequency_entropy


class Targets:
    """Samples with given targets."""

    def __init__(self, targets):
        self.rows = torch.tensor(targets)

    def __len__(self):
        return len(self.rows)

    def targets(self, samples):
        return self.rows[torch.from_numpy(samples)]


def test_the_entropy_is_that_of_single_tokens():
    assert frequency_entropy(Targets([[0, 1, 2, 3], [3, 2, 1, 0]])) == pytest.approx(math.log(4))
    assert frequency_entropy(Targets([[7, 7, IGNORED, IGNORED], [7, 5, IGNORED, 5]])) == pytest.approx(
        -0.6 * math.log(0.6) - 0.4 * math.log(0.4))


def test_samples_come_from_all_of_the_text(monkeypatch):
    monkeypatch.setattr(evaluation, "COUNTED_TOKENS", 4)
    assert frequency_entropy(Targets([[0, 0], [1, 1], [2, 2]])) == pytest.approx(math.log(2)), "the first and the last"


@pytest.mark.parametrize(("loss", "text"), [
    (7.0, "expect random tokens. The held-out loss is 7.00 per token, and the frequencies of single tokens alone give "
          "6.50"),
    (6.5, "expect random tokens"),
    (math.log(50), "as uncertain as a choice among 50 tokens; the frequencies of single tokens alone give 6.50"),
    (None, "no held-out loss"), (math.nan, "no held-out loss")])
def test_the_sentence(loss, text):
    assert text in expectation(loss, 6.5)
