"""Calls on separate threads, for calls that may block and cannot be interrupted: the caller stops waiting, and leaves
the thread behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def set_result(future: Future[_Result], function: Callable[[], _Result]) -> None:
    """Give `future` what `function()` returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:  # raised again when it is awaited
        future.set_exception(error)
    finally:
        del future, function  # the error has this frame: no cycle that keeps what it refers to


def in_background(function: Callable[[], _Result], name: str) -> Future[_Result]:
    """Call `function` on a daemon thread of this name. Raises RuntimeError while the interpreter shuts down."""
    future: Future[_Result] = Future()
    threading.Thread(target=set_result, args=(future, function), name=name, daemon=True).start()
    return future
