"""Algorithms for a sum over the members of a group: by the library, or exchanged and added by the members.

    library     the library adds during the transfer, in the tensor's own dtype: a ring
    gathered    every member receives all tensors and adds them: one round, for small sums between hosts
    exchanged   member k receives shard k of all tensors and adds it; an all-reduce then gathers the sums

    library     all-reduce   reduce and reduce-scatter
    nccl        library      library
    mpi         library      exchanged with at most 16 members, else library
    gloo        library      exchanged: twice as fast as Gloo's own

Between hosts small all-reduces are gathered. Dtypes that no library adds exactly (half precision, int16, bool) are
always exchanged: they are sent in their own dtype, added in a wider one, and rounded once. NCCL adds half precision
itself, and rounds after each addition.
"""

from __future__ import annotations

from typing import Literal

import torch

Operation = Literal["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
"""The collective operations of `protocol.Group`."""
Library = Literal["gloo", "mpi", "nccl"]
"""The communication library below a group."""
SumAlgorithm = Literal["library", "gathered", "exchanged"]
"""See above."""

NATIVE = (torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8)
"""Dtypes that every library adds."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32,
         torch.int16: torch.int32, torch.bool: torch.int32}
"""Dtype -> the wider dtype in which its sums are accumulated."""
DIRECT_MEMBERS = 16
"""Groups of at most this size exchange directly, each member with each, in one round. If ranks share cores, every
further round waits until all of them have been scheduled."""
DIRECT_REDUCE_BYTES = 64 << 10
"""Sums of at most this many bytes are gathered and added by every member."""


def ring_bytes(operation: Operation, members: int, payload_bytes: int) -> int:
    """Bytes one member receives when a ring carries `operation`; `payload_bytes` is the size of the whole tensor.

    For a broadcast: any member except the root. For a reduce, which passes along the ring and ends at the root: any
    member except the first.
    """
    if members == 1:
        return 0
    if operation in ("broadcast", "reduce"):
        return payload_bytes
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (members - 1) * payload_bytes // members


def choose_algorithm(library: Library, operation: Operation, dtype: torch.dtype, payload_bytes: int, members: int
                     ) -> SumAlgorithm:
    """Choose the algorithm for the sum of a tensor of `payload_bytes` (unsharded) in this operation."""
    if library == "nccl":
        return "library" if dtype in NATIVE or dtype in (torch.bfloat16, torch.float16) else "exchanged"
    few = members <= DIRECT_MEMBERS
    if operation == "all_reduce":
        if few and payload_bytes <= DIRECT_REDUCE_BYTES:
            return "gathered"
        return "library" if dtype in NATIVE else "exchanged"
    return "exchanged" if few or library == "gloo" or dtype not in NATIVE else "library"


def shard_elements(numel: int, members: int) -> int:
    """Elements in each member's shard of an exchanged all-reduce; the last shards may be padded."""
    return -(-numel // members)


def sum_bytes(algorithm: SumAlgorithm, operation: Operation, numel: int, itemsize: int, members: int, *,
              from_root: int = 0) -> int:
    """Bytes that a member receives for a sum of `numel` elements of `itemsize` bytes.

    from_root: the member's distance after the root of a reduce, 0 for the root.
    """
    payload = numel * itemsize
    if members == 1 or not numel:
        return 0
    if algorithm == "gathered":
        return (members - 1) * payload
    if operation == "reduce":
        if algorithm == "library":
            return payload if from_root != 1 else 0
        return (members - 1) * payload if from_root == 0 else 0
    if algorithm == "exchanged" and operation == "all_reduce":
        return 2 * (members - 1) * shard_elements(numel, members) * itemsize
    return ring_bytes(operation, members, payload)


def buffer_bytes(algorithm: SumAlgorithm, operation: Operation, numel: int, itemsize: int, members: int) -> int:
    """Bytes that a member (for a reduce, the root) allocates during a sum, in addition to the caller's tensors."""
    if members == 1 or algorithm == "library" or not numel:
        return 0
    if algorithm == "gathered" or operation == "reduce":
        return members * numel * itemsize
    if operation == "all_reduce":
        padded = shard_elements(numel, members) * members
        return (padded + (padded if padded != numel else 0)) * itemsize
    return numel * itemsize
