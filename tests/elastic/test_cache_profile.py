"""The decision whether the cache pays, against its formula summed sample by sample."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.elastic.cache_profile import Times, decide

CHEAP = Times(compute=10e-3, read=1e-3, write=2e-3)


@pytest.mark.parametrize(("times", "reads", "pays", "why"), [
    (CHEAP, 300, True, r"saves 1\.6 s: a sample's 3 frozen layers take 10 ms, reading .* 1 ms .* 2 ms"),
    (CHEAP, 100, False, "no sample that would be kept comes again"),
    (CHEAP, 0, False, "no sample that would be kept comes again"),
    (Times(compute=1e-3, read=1e-3, write=0.0), 300, False, "reading takes no less than computing"),
    (Times(compute=10e-3, read=1e-3, write=20e-3), 300, False, "writing would not be earned back"),
    (Times(compute=10e-3, read=1e-3, write=20e-3), 400, True, r"saves 0\.7 s"),
])
def test_the_table(times, reads, pays, why):
    decision = decide(times, frozen_layers=3, remaining_reads=reads, num_samples=100)
    assert decision.pays is pays
    assert re.search(why, decision.why), decision.why


SECONDS = st.floats(0, 1)


@given(st.builds(Times, compute=SECONDS, read=SECONDS, write=SECONDS), st.integers(1, 5), st.integers(1, 20))
def test_what_is_saved_is_what_each_read_saves(times, epochs, num_samples):
    """Sample by sample: it is computed and written the first time, and then read."""
    without = num_samples * epochs * times.compute
    with_cache = num_samples * (times.compute + times.write + (epochs - 1) * times.read)
    decision = decide(times, frozen_layers=1, remaining_reads=epochs * num_samples, num_samples=num_samples)
    assert decision.saved_seconds == pytest.approx(without - with_cache, abs=1e-9)
    if abs(without - with_cache) > 1e-9:
        assert decision.pays == (with_cache < without) or times.compute <= times.read
