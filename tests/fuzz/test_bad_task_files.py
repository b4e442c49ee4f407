"""Any file of sentences, questions or images is learnt from as it should be, or refused with a RanvierError."""

import pytest

from tests.fuzz.task_files import FUZZERS


@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda fuzzer: fuzzer.__name__)
def test_bad_task_files(tmp_path, fuzzer):
    count = 8 * FUZZERS[fuzzer]
    assert fuzzer(tmp_path / "files", count) >= count
