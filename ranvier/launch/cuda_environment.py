"""Environment variables of CUDA with which ranks start, unless the user has set them.

    CUDA_MODULE_LOADING=EAGER                            kernels are loaded at the start, not at their first use
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True     the allocator returns memory without cudaFree

Both prevent waits for the entire device inside a step. Such a wait ends only when all sends of this rank have
completed, which needs other ranks (`ranvier.comm.nccl_transport`).
"""

from __future__ import annotations

from collections.abc import Mapping

_MODULES = "CUDA_MODULE_LOADING"
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_ALLOCATOR_NAMES = (_ALLOCATOR, "PYTORCH_ALLOC_CONF")
"""The allocator's variable, and its name in newer versions of torch, which still read the first."""


def cuda_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables above that `environ` does not set."""
    found = {} if _MODULES in environ else {_MODULES: "EAGER"}
    if not any(name in environ for name in _ALLOCATOR_NAMES):
        found[_ALLOCATOR] = "expandable_segments:True"
    return found
