"""Checks of errors in tests: the code, and names and numbers in the message; never its sentences."""

import re
from contextlib import contextmanager
from unittest import mock

import pytest

from ranvier.errors import RanvierError


@contextmanager
def raises(code, *facts, **fields):
    """Check that the block raises a RanvierError with this code. facts: names and numbers in its message, each as a
    separate word. fields: its `where`, `value`, `settings` and others."""
    with pytest.raises(RanvierError) as caught:
        yield caught
    check(caught.value, code, *facts, **fields)


@contextmanager
def reports(code):
    """Check that the block creates an error with this code in this process: a warning, or what a command prints."""
    codes, init = [], RanvierError.__init__

    def noted(self, *args, **fields):
        init(self, *args, **fields)
        codes.append(self.code)

    with mock.patch.object(RanvierError, "__init__", noted):
        yield
    assert code in codes, codes


def check(error, code, *facts, **fields):
    """Check that `error` is as `raises` expects."""
    assert error.code == code, f"{error.code}: {error}"
    missing = [fact for fact in facts if not says(error, fact)]
    assert not missing, f"{missing} not in: {error}"
    assert {name: getattr(error, name) for name in fields} == fields


def says(error, fact):
    """Whether the message contains `fact` as a separate word."""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(str(fact))}(?!\w)", str(error)) is not None
