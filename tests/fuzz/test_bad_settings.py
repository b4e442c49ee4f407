"""Run files and command lines are taken literally, or refused with a RanvierError."""

import pytest

from tests.fuzz.settings import FUZZERS


@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_settings(tmp_path, monkeypatch, fuzzer, rounds):
    monkeypatch.chdir(tmp_path)
    count = rounds * FUZZERS[fuzzer]
    assert fuzzer(tmp_path, count) >= count
