"""Random sequences of all operations on a cache, with and without space: states always equal the uncached ones."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering import examples
from tests.elastic.cached import NUM_SAMPLES, Cached, Prefix, files

SAMPLES = st.lists(st.integers(0, NUM_SAMPLES + 1), min_size=0, max_size=9)
STEPS = st.lists(st.one_of(
    st.tuples(st.just("forward"), st.integers(0, 1), SAMPLES),
    st.tuples(st.just("forward"), st.integers(0, 1), SAMPLES),
    st.tuples(st.just("prefetch"), st.integers(0, 1), st.lists(SAMPLES, max_size=3)),
    st.tuples(st.just("deepen"), st.integers(0, 1), st.integers(0, 8)),
    st.tuples(st.just("weight"), st.integers(0, 1), st.integers(0, 7)),
    st.tuples(st.just("damage"), st.integers(0, 7), st.integers(0, 1 << 20)),
    st.tuples(st.just("remove"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 1), st.just(0))), max_size=30)


def damage(path, place):
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(place % size)
            byte = file.read(1)[0]
            file.seek(place % size)
            file.write(bytes([byte ^ 0xff]))


@pytest.mark.slow
@given(steps=STEPS, wide=st.booleans(), state=st.sampled_from(["tensor", "dict"]), most=st.sampled_from(
    [0, 60_000, 200_000, 1 << 24]))
@settings(examples(24), suppress_health_check=list(HealthCheck))
def test_every_state_is_the_plain_one(tmp_path_factory, steps, wide, state, most):
    """Two ranks use one folder, whose limit has space for no, few, some or all entries."""
    folder = tmp_path_factory.mktemp("cache")

    def opened():
        return Cached(folder, Prefix(depth=2, width=400 if wide else 6, state=state), max_bytes=most)

    ends = [opened(), opened()]
    for what, which, value in steps:
        found = files(folder)
        match what:
            case "forward":
                ends[which].right(*value)
            case "prefetch":
                ends[which].cache.prefetch([torch.tensor(each, dtype=torch.int64) for each in value])
            case "deepen":
                ends[which].deepen(value)
            case "weight":
                ends[which].prefix.blocks[value][2].scale.mul_(1.5)
            case "reopen":
                ends[which].cache.close()
                ends[which] = opened()
            case "damage" if found:
                damage(found[which % len(found)], value)
            case "remove" if found:
                found[which % len(found)].unlink()
        assert all(path.stat().st_size <= most for path in files(folder))
    for end in ends:
        end.right(*range(NUM_SAMPLES))
        end.cache.close()
