"""What a test says of an error: its code, and the names and numbers that its message shows; never its sentences."""

import re
from contextlib import contextmanager
from unittest import mock

import pytest

from ranvier.errors import RanvierError


@contextmanager
def raises(code, *facts, **fields):
    """The block raises a RanvierError of this code. facts: names and numbers that its message has, each as a whole
    word. fields: `where`, `value`, `settings` and others that it has."""
    with pytest.raises(RanvierError) as caught:
        yield caught
    check(caught.value, code, *facts, **fields)


@contextmanager
def reports(code):
    """The block makes an error of this code in this process: a warning, or what a command prints."""
    codes, init = [], RanvierError.__init__

    def noted(self, *args, **fields):
        init(self, *args, **fields)
        codes.append(self.code)

    with mock.patch.object(RanvierError, "__init__", noted):
        yield
    assert code in codes, codes


def check(error, code, *facts, **fields):
    """`error` is what `raises` expects."""
    assert error.code == code, f"{error.code}: {error}"
    missing = [fact for fact in facts if not says(error, fact)]
    assert not missing, f"{missing} not in: {error}"
    assert {name: getattr(error, name) for name in fields} == fields


def says(error, fact):
    """Whether the message has `fact` as a whole word."""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(str(fact))}(?!\w)", str(error)) is not None
