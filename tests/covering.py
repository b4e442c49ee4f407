"""Products of settings are long and their cases alike: each value is in `make test`, each combination in `test-all`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest


def covering(*axes: Sequence[object]) -> list:
    """The product of `axes` as parametrize takes it, its diagonal as it is and the rest slow.

    The diagonal goes through all axes at once, a shorter one again and again, so that every value is in it; an axis'
    value that is a tuple gives several arguments.
    """
    kept = {tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))}
    params = []
    for place in product(*(range(len(axis)) for axis in axes)):
        values = [axis[number] for axis, number in zip(axes, place, strict=True)]
        flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        params.append(pytest.param(*flat, marks=() if place in kept else pytest.mark.slow))
    return params


def label(value: object) -> str:
    """An id of a test's parameter: the same in every process, unlike the address in a function's text."""
    return getattr(value, "__name__", None) or str(value)
