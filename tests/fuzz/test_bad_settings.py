"""Run files and command lines are taken as what they say, or refused in words."""

import pytest

from tests.fuzz.settings import FUZZERS


@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_settings(tmp_path, monkeypatch, fuzzer):
    monkeypatch.chdir(tmp_path)
    count = 12 * FUZZERS[fuzzer]
    assert fuzzer(tmp_path, count) >= count
