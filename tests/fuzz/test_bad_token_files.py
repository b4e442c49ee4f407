"""Token files and tokenizers are what was written, or are refused in words."""

import pytest

from tests.fuzz.token_files import FUZZERS, Kept


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return Kept(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_token_files(kept, fuzzer, rounds):
    count = rounds * FUZZERS[fuzzer]
    assert fuzzer(kept, count) >= count


def test_whole_ones_are_read(kept):
    kept.check_tokens()
    kept.check_tokenizer()
