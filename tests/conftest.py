"""Ranks are often threads here: each computes with one thread, so that many of them fit on few cores. Times of
hypothesis' examples say nothing on a machine that others use too."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("ranvier", deadline=None)
hypothesis.settings.load_profile("ranvier")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
