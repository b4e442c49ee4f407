"""Work on pieces of data in several processes, with results in the order of the pieces."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import TypeVar

from ranvier.system.child import safe_spawning

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")
_PIECES_PER_PROCESS = 3
"""Pieces per process that wait or are being worked on: pieces that are read ahead must fit into memory."""


def map_in_order(work: Callable[[_Piece], _Result], pieces: Iterable[_Piece], processes: int) -> Iterator[_Result]:
    """`work` of each piece, in order. processes: with 1, or a single piece, this process does the work. Otherwise
    `work`, pieces and results are pickled, and new interpreters are started (spawn): forked processes would inherit the
    locks of this process's threads."""
    pieces = iter(pieces)
    first = list(islice(pieces, 2))
    pieces = chain(first, pieces)
    if processes == 1 or len(first) < 2:
        yield from map(work, pieces)
        return
    waiting: deque[Future[_Result]] = deque()
    with safe_spawning():  # it starts a process that tracks its locks
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _use_one_thread)
    with pool:
        try:
            for piece in pieces:
                with safe_spawning():  # the pool starts its processes as work is submitted
                    waiting.append(pool.submit(work, piece))
                if len(waiting) >= _PIECES_PER_PROCESS * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _use_one_thread() -> None:
    """Limit a process to one thread: the package tokenizers would use all cores in each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
