"""Products of settings are long, and their cases are similar: `make test` has each value or each pair of values, and
`test-all` has each combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings


def covering(*axes: Sequence[object]) -> list:
    """The product of `axes` for parametrize; all cases but its diagonal are slow.

    The diagonal runs through all axes at the same time, and repeats shorter ones, so that it has every value. A value
    that is a tuple gives several arguments.
    """
    return _params(axes, {tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))})


def pairwise(*axes: Sequence[object]) -> list:
    """The product of `axes` for parametrize; all cases are slow but a small set with every pair of values of different
    axes. Values are as in `covering`."""
    places = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {place: set(combinations(enumerate(place), 2)) for place in places}
    missing, kept = set().union(*pairs.values()), set()
    while missing:
        kept.add(best := max(places, key=lambda place: len(pairs[place] & missing)))
        missing -= pairs[best]
    return _params(axes, kept)


def chosen(kept: Sequence[tuple], *axes: Sequence[object]) -> list:
    """The product of `axes` for parametrize; all cases but those in `kept` are slow. Values are as in `covering`."""
    return first(kept, [_flat(values) for values in product(*axes)])


def _params(axes: Sequence[Sequence[object]], kept: set[tuple[int, ...]]) -> list:
    params = []
    for place in product(*(range(len(axis)) for axis in axes)):
        flat = _flat([axis[number] for axis, number in zip(axes, place, strict=True)])
        params.append(pytest.param(*flat, marks=() if place in kept else pytest.mark.slow))
    return params


def _flat(values: Iterable[object]) -> tuple:
    return tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,)))


def label(value: object) -> str:
    """The ID of a test's parameter: the same in every process, unlike the address in a function's repr."""
    return getattr(value, "__name__", None) or str(value)


def quick(count: int, values: Iterable[object]) -> list:
    """`values` for parametrize; all are slow but `count` of those that are not yet slow, spread evenly."""
    found = list(values)
    fast = [place for place, value in enumerate(found) if not _is_slow(value)]
    kept = {fast[round(number * (len(fast) - 1) / max(count - 1, 1))] for number in range(count)}
    return [value if place in kept or _is_slow(value) else _slow(value) for place, value in enumerate(found)]


def first(kept: Sequence[object], values: Iterable[object]) -> list:
    """`values` for parametrize; all but those in `kept` are slow."""
    found = list(values)
    assert all(value in found for value in kept)
    return [value if value in kept else _slow(value) for value in found]


def without(slow: Sequence[object], values: Iterable[object]) -> list:
    """`values` for parametrize; those in `slow` are slow."""
    found = list(values)
    assert all(value in found for value in slow)
    return [_slow(value) if value in slow else value for value in found]


def examples(count: int) -> settings:
    """`count` examples of hypothesis, always the same, in `make test`; four times as many at random in `test-all`."""
    return settings(max_examples=count if settings().derandomize else 4 * count)


def _is_slow(value: object) -> bool:
    return isinstance(value, ParameterSet) and any(getattr(mark, "name", "") == "slow" for mark in value.marks)


def _slow(value: object) -> object:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, id=value.id, marks=(*value.marks, pytest.mark.slow))
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
