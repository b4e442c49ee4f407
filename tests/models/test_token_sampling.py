"""Sampling: reproducible, and from the right distribution."""

from __future__ import annotations

import pytest
import torch

from ranvier.models.token_sampling import Sampling, next_token
from tests.covering import quick
from tests.errors import raises

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def shares(count=2000, **options):
    sampling = Sampling(seed=1, **options)
    drawn = torch.tensor([next_token(LOGITS, sampling, position=position) for position in range(count)])
    return torch.bincount(drawn, minlength=len(LOGITS)) / count


def test_same_seed_and_position_same_token():
    draws = [[next_token(LOGITS, Sampling(seed=seed), position=position) for position in range(50)]
             for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("temperature", quick(1, [0.5, 1.0, 3.0]))
def test_draws_follow_the_softmax(temperature):
    assert (shares(temperature=temperature) - (LOGITS / temperature).softmax(0)).abs().max() < 0.04


def test_top_k_leaves_the_rest_out():
    expected = torch.tensor([0, 3.0, 0, 0, 2.5]).where(torch.tensor([0, 1, 0, 0, 1]).bool(), -torch.inf).softmax(0)
    measured = shares(top_k=2)
    assert measured[[0, 2, 3]].sum() == 0
    assert (measured - expected).abs().max() < 0.04
    assert torch.equal(shares(200, top_k=99), shares(200))
    equal = torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0])  # ties, common in half precision; transformers keeps them too
    drawn = {next_token(equal, Sampling(top_k=2), position=position) for position in range(50)}
    assert drawn == {1, 2, 3, 4}


def test_temperature_zero_takes_the_most_likely():
    assert {next_token(LOGITS, Sampling(seed=seed, temperature=0), position=0) for seed in range(20)} == {1}


def test_top_p_takes_the_fewest_that_add_up_to_it():
    assert set(shares(top_p=0.5).nonzero().flatten().tolist()) == {1, 4}
    assert set(shares(200, top_p=1e-9).nonzero().flatten().tolist()) == {1}
    assert torch.equal(shares(200, top_p=1.0), shares(200))


def test_texts_have_draws_of_their_own():
    draws = [[next_token(LOGITS, Sampling(), position=position, text=text) for position in range(50)]
             for text in range(2)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("wrong", [dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_k=0),
                                   dict(top_p=0.0), dict(top_p=1.1), dict(repetition_penalty=0.0)])
def test_settings_that_mean_nothing_are_refused(wrong):
    with raises("sampling-value", next(iter(wrong)).replace('_', '-')):
        Sampling(**wrong)
