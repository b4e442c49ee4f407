"""The search for the number of microbatches, as a function of what was measured."""

import json
from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st

from ranvier.elastic.microbatch_profile import MicrobatchProfile, Trial, size_of
from ranvier.elastic.state import ElasticState


def search(profile, seconds, *, pipe=4, data=1, frozen=0, candidates=(4, 8, 12)):
    """Measure until the search is over; returns (profile, counts that were tried)."""
    tried = []
    while (count := profile.next_count(pipe, data, frozen, candidates)) is not None:
        tried.append(count)
        profile = profile.with_measurement(pipe, data, frozen, count, seconds[count])
    return profile, tried


def test_every_candidate_once_and_then_the_best():
    profile, tried = search(MicrobatchProfile(), {4: 3.0, 8: 1.0, 12: 2.0})
    assert tried == [4, 8, 12] and profile.best(4, 1, 0, (4, 8, 12)) == 8
    assert len(profile.trials) == 3


def test_the_best_so_far_while_the_search_goes_on():
    profile = MicrobatchProfile()
    assert profile.best(4, 1, 0, (4, 8, 12)) == 4, "the first candidate before any measurement"
    profile = profile.with_measurement(4, 1, 0, 8, 1.0)
    assert profile.best(4, 1, 0, (4, 8, 12)) == 8 and profile.next_count(4, 1, 0, (4, 8, 12)) == 4


def test_once_per_pipeline_length_whatever_is_frozen_later():
    profile, _ = search(MicrobatchProfile(), {4: 3.0, 8: 1.0, 12: 2.0}, frozen=2)
    assert search(profile, {}, frozen=5) == (profile, []) and profile.best(4, 1, 5, (4, 8, 12)) == 8
    profile, tried = search(profile, {2: 1.0, 4: 0.5}, pipe=2, data=2, frozen=5, candidates=(2, 4))
    assert tried == [2, 4] and profile.best(2, 2, 5, (2, 4)) == 4 and profile.best(4, 1, 5, (4, 8, 12)) == 8
    assert search(profile, {4: 0.5, 8: 1.0, 12: 1.0}, data=2)[1] == [4, 8, 12], "another share of the batch"


def test_a_search_that_a_new_depth_interrupts_begins_again():
    """Steps of different depths are not compared."""
    profile = MicrobatchProfile().with_measurement(4, 1, 0, 4, 3.0).with_measurement(4, 1, 0, 8, 2.0)
    profile, tried = search(profile, {4: 1.0, 8: 1.5, 12: 1.6}, frozen=3)
    assert tried == [4, 8, 12] and profile.best(4, 1, 3, (4, 8, 12)) == 4


def test_the_latest_finished_search_counts():
    profile, _ = search(MicrobatchProfile(), {4: 3.0, 8: 1.0, 12: 2.0})
    for count, seconds in ((4, 0.5), (8, 0.6), (12, 0.7)):
        profile = profile.with_measurement(4, 1, 6, count, seconds)
    assert profile.best(4, 1, 6, (4, 8, 12)) == profile.best(4, 1, 9, (4, 8, 12)) == 4


def test_the_least_of_several_measurements():
    profile = MicrobatchProfile()
    for seconds in (3.0, 1.0, 2.0):
        profile = profile.with_measurement(2, 1, 0, 4, seconds)
    assert profile.trials == (Trial(pipe=2, data=1, frozen=0, microbatches=4, seconds=1.0),)


def test_times_that_are_none_are_left_out():
    assert MicrobatchProfile().with_measurement(2, 1, 0, 4, nan) == MicrobatchProfile()
    assert MicrobatchProfile().with_measurement(2, 1, 0, 4, inf) == MicrobatchProfile()


def test_other_candidates_are_searched_too():
    """For example after a change of the batch: a count that is no longer a candidate is not the best."""
    profile, _ = search(MicrobatchProfile(), {4: 3.0, 8: 0.1, 12: 2.0})
    profile, tried = search(profile, {6: 2.5}, candidates=(4, 6))
    assert tried == [6] and profile.best(4, 1, 0, (4, 6)) == 6


small = st.integers(0, 4)


@given(st.lists(st.tuples(small, small, small, st.sampled_from([4, 8, 12]), st.floats())))
def test_it_survives_json_and_ends(measurements):
    profile = MicrobatchProfile()
    for pipe, data, frozen, count, seconds in measurements:
        profile = profile.with_measurement(pipe, data, frozen, count, seconds)
    saved = json.dumps(ElasticState(profile=profile).document(), allow_nan=False)
    assert ElasticState.read(json.loads(saved)).profile == profile
    done, tried = search(profile, {4: 1.0, 8: 1.0, 12: 1.0}, pipe=1, data=1)
    assert len(tried) <= 3 and done.next_count(1, 1, 0, (4, 8, 12)) is None
    assert done.best(1, 1, 0, (4, 8, 12)) in (4, 8, 12)


def test_what_is_found_is_of_a_finished_search_alone():
    profile = MicrobatchProfile().with_measurement(4, 1, 0, 8, 1.0).with_measurement(4, 1, 0, 4, 2.0)
    assert profile.best_count(4, 1, (4, 8, 12)) is None and profile.best_count(4, 1, (4, 8)) == 8
    assert profile.best_count(2, 1, (4, 8)) is None and profile.best_count(4, 2, (4, 8)) is None


def test_sizes_that_rows_can_share():
    assert [size_of(16, count, 1) for count in (1, 3, 8, 16, 32)] == [16, 6, 2, 1, 1]
    assert [size_of(16, count, 4) for count in (1, 3, 8, 16)] == [16, 8, 4, 4]
