"""No checkpoint, however damaged or hostile, does more than to be refused in words; none is read as another one."""

import pytest

from tests.fuzz.checkpoints import FUZZERS, Whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_checkpoints(whole, fuzzer, rounds):
    count = rounds * FUZZERS[fuzzer]
    assert fuzzer(whole, count) >= count


def test_the_whole_one_is_read_and_loaded(whole):
    """What finds nothing wrong above has looked."""
    whole.check(whole.copy())
    whole.load(whole.copy())
