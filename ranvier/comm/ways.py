"""How a sum travels: added by the library, or received in parts that each member adds up itself.

    library     the library adds on the way, in the tensor's own number format: a ring
    gathered    every member receives all tensors, and adds them: one round, for small sums on hosts
    exchanged   member k receives everybody's part k, and adds them; an all-reduce then gathers the sums

    library     all-reduce   reduce and reduce-scatter
    nccl        library      library
    mpi         library      library; of at most 16 members small ones, and all that go to one root, are exchanged
    gloo        library      exchanged: twice as fast as its own

On hosts small all-reduces are gathered, and what no library adds exactly (half precision, int16, bool) is always
exchanged: so it travels in its own format, is added in a wider one, and rounded once. NCCL adds half precision itself,
and rounds wherever it adds. Pure.
"""

from __future__ import annotations

from typing import Literal

import torch

Operation = Literal["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
Library = Literal["gloo", "mpi", "nccl"]
Way = Literal["library", "gathered", "exchanged"]

NATIVE = (torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8)
"""Formats that every library adds as they are."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32,
         torch.int16: torch.int32, torch.bool: torch.int32}
"""Formats of which sums are accumulated in a wider one."""
DIRECT_MEMBERS = 16
"""Groups of at most so many exchange directly, each with each, in one round: where ranks share cores, every further
round waits for all of them to be scheduled."""
DIRECT_REDUCE_BYTES = 64 << 10
"""Sums of at most so many bytes are gathered and added up by everyone."""


def ring_bytes(operation: Operation, members: int, payload_bytes: int) -> int:
    """Bytes one member receives when a ring carries `operation`; `payload_bytes` is the whole (unscattered) tensor.

    A broadcast is counted for a member that is not its root; a reduction, which passes along the ring and ends at its
    root, for one that it does not begin with.
    """
    if members == 1:
        return 0
    if operation in ("broadcast", "reduce"):
        return payload_bytes
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (members - 1) * payload_bytes // members


def way_of(library: Library, operation: Operation, dtype: torch.dtype, payload_bytes: int, members: int) -> Way:
    """How the sum of `payload_bytes` (of the whole tensor) travels."""
    if library == "nccl":
        return "library" if dtype in NATIVE or dtype in (torch.bfloat16, torch.float16) else "exchanged"
    small, few = payload_bytes <= DIRECT_REDUCE_BYTES, members <= DIRECT_MEMBERS
    if operation == "all_reduce":
        if small and few:
            return "gathered"
        return "library" if dtype in NATIVE else "exchanged"
    if library == "gloo" or dtype not in NATIVE or (few and (small or operation == "reduce")):
        return "exchanged"
    return "library"


def part_elements(numel: int, members: int) -> int:
    """Elements of each member's part of an exchanged all-reduce; the last parts may be filled up."""
    return -(-numel // members)


def sum_bytes(way: Way, operation: Operation, numel: int, itemsize: int, members: int, *, from_root: int = 0) -> int:
    """Bytes that a member receives for a sum over `members`. from_root: its place behind the root of a reduction."""
    payload = numel * itemsize
    if members == 1 or not numel:
        return 0
    if way == "gathered":
        return (members - 1) * payload
    if operation == "reduce":
        if way == "library":
            return payload if from_root != 1 else 0
        return (members - 1) * payload if from_root == 0 else 0
    if way == "exchanged" and operation == "all_reduce":
        return 2 * (members - 1) * part_elements(numel, members) * itemsize
    return ring_bytes(operation, members, payload)


def buffer_bytes(way: Way, operation: Operation, numel: int, itemsize: int, members: int, *, is_root: bool = True
                 ) -> int:
    """Bytes that a member takes for a sum while it is under way, beside the caller's tensors."""
    if members == 1 or way == "library" or not numel:
        return 0
    if way == "gathered":
        return members * numel * itemsize
    match operation:
        case "reduce":
            return members * numel * itemsize if is_root else 0
        case "all_reduce":
            parts = part_elements(numel, members) * members
            return (parts + (parts if parts != numel else 0)) * itemsize
    return numel * itemsize
