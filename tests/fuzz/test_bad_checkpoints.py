"""Any checkpoint, however damaged or hostile, is refused with a RanvierError; none is read as another one."""

import pytest

from tests.fuzz.checkpoints import FUZZERS, Whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("rounds", [2, pytest.param(14, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_checkpoints(whole, fuzzer, rounds):
    count = rounds * FUZZERS[fuzzer]
    assert fuzzer(whole, count) >= count


def test_the_whole_one_is_read_and_loaded(whole):
    """The checks of the tests above read and load the checkpoint completely."""
    whole.check(whole.copy())
    whole.load(whole.copy())
