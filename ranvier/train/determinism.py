"""`--deterministic`: bit-identical runs on the same devices.

On CUDA, attention's backward, the gradient of an embedding and index operations add in the order in which threads
happen to run. PyTorch has slower algorithms that do not; cuBLAS also needs workspaces of a fixed size. The mesh, the
number of microbatches and the versions of the libraries still matter, as on a CPU. NCCL adds in the same order as long
as ranks, topology and its settings are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE, _SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Context in which PyTorch uses deterministic algorithms if `wanted`, and raises if an operation has none."""
    if not wanted:
        yield
        return
    os.environ.setdefault(_WORKSPACE, _SIZE)  # cuBLAS reads it when it is first used
    settings: Any = torch.utils.deterministic  # torch creates its attributes on access
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # the engine reads no memory that it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
