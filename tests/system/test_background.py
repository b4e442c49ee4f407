"""Calls on threads that may be abandoned."""

import gc
import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from ranvier.comm.board import call_with_timeout
from ranvier.system.background import in_background


def fail():
    raise ValueError("at work")


def test_the_caller_gets_what_the_call_returns_or_raises():
    assert in_background(lambda: threading.current_thread().name, "ranvier-test").result(10) == "ranvier-test"
    with pytest.raises(ValueError, match="at work"):
        in_background(fail, "ranvier-test").result(10)


def test_a_call_that_does_not_end_is_left_behind():
    may_end = threading.Event()
    future = in_background(may_end.wait, "ranvier-test")
    assert wait((future,), 0.01).not_done
    may_end.set()
    assert future.result(10)


def test_a_call_with_a_limit_that_fails_or_is_late_has_no_result():
    may_end = threading.Event()
    assert call_with_timeout(lambda: 7) == 7
    assert call_with_timeout(fail) is None
    assert call_with_timeout(may_end.wait, 0.01) is None
    may_end.set()


def test_a_call_that_fails_keeps_nothing_until_the_collector_runs():
    held = threading.Event()
    left = weakref.ref(held)

    def work(held=held):
        raise ValueError

    gc.disable()
    try:
        assert call_with_timeout(work) is None
        del held, work
        until = time.monotonic() + 10
        while left() is not None and time.monotonic() < until:
            time.sleep(0.01)  # the thread ends a moment later
        assert left() is None
    finally:
        gc.enable()
