"""Commands under test whose ranks are ended with the test."""

import pytest

from tests.launch.announced import Ranks


@pytest.fixture
def start_ranks(tmp_path):
    started = []

    def begin(*command, environ=None):
        started.append(Ranks(*command, output=tmp_path / f"{len(started)}.txt", environ=environ))
        return started[-1]

    yield begin
    for each in started:
        each.end()
