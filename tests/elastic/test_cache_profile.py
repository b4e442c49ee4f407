"""The decision whether the cache pays, against its formula summed sample by sample."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.elastic.cache_profile import Times, decide

CHEAP = Times(compute=10e-3, read=1e-3, write=2e-3)


@pytest.mark.parametrize(("cache_from", "frozen", "times", "reads", "kept", "pays", "why"), [
    ("auto", 3, CHEAP, 300, 0, True, r"saves 1\.6 s: a sample's 3 frozen layers take 10 ms, reading .* 1 ms .* 2 ms"),
    ("auto", 0, CHEAP, 300, 0, False, "nothing is frozen"),
    ("auto", 3, None, 300, 0, False, "nothing has been measured yet"),
    ("auto", 3, CHEAP, 100, 0, False, "no sample that would be kept comes again"),
    ("auto", 3, CHEAP, 100, 100, True, r"saves 0\.9 s"),
    ("auto", 3, CHEAP, 0, 100, False, "no sample that would be kept comes again"),
    ("auto", 3, Times(compute=1e-3, read=1e-3, write=0.0), 300, 0, False, "reading takes no less than computing"),
    ("auto", 3, Times(compute=10e-3, read=1e-3, write=20e-3), 300, 0, False, "writing would not be earned back"),
    ("auto", 3, Times(compute=10e-3, read=1e-3, write=20e-3), 400, 0, True, r"saves 0\.7 s"),
    (3, 3, None, 300, 0, True, "3 layers are frozen, and the cache is on from 3"),
    (3, 2, CHEAP, 300, 0, False, "2 layers are frozen, and the cache is on from 3"),
    (1, 0, CHEAP, 300, 0, False, "nothing is frozen"),
    (0, 0, CHEAP, 300, 0, False, "nothing is frozen"),
    (0, 1, Times(compute=1e-3, read=1.0, write=1.0), 300, 0, True, "1 layers are frozen"),
])
def test_the_table(cache_from, frozen, times, reads, kept, pays, why):
    decision = decide(cache_from, frozen_layers=frozen, times=times, remaining_reads=reads, num_samples=100, kept=kept)
    assert decision.pays is pays
    assert re.search(why, decision.why), decision.why


SECONDS = st.floats(0, 1)


@given(st.builds(Times, compute=SECONDS, read=SECONDS, write=SECONDS), st.integers(1, 5), st.integers(1, 20),
       st.integers(0, 20))
def test_what_is_saved_is_what_each_read_saves(times, epochs, num_samples, kept):
    """Sample by sample: the first time without an entry it is computed and written, then read."""
    kept = min(kept, num_samples)
    without = with_cache = 0.0
    for sample in range(num_samples):
        there = sample < kept
        for _ in range(epochs):
            without += times.compute
            with_cache += times.read if there else times.compute + times.write
            there = True
    decision = decide("auto", frozen_layers=1, times=times, remaining_reads=epochs * num_samples,
                      num_samples=num_samples, kept=kept)
    assert decision.saved_seconds == pytest.approx(without - with_cache, abs=1e-9)
    if abs(without - with_cache) > 1e-9:
        assert decision.pays == (with_cache < without) or times.compute <= times.read
