"""The sums of chunks over their groups: the dtype in which they are sent, their memory, and their number in flight.

At most `in_flight` reductions that use their own memory are in flight, however late a peer is, and use such memory in
turn. With half-precision sums, which have two halves, and in_flight 3:

    scatter        | 0 | 1 | 2 | 3 | 4 |      before scatter 3 begins, 0 has been gathered, and gather 1 has begun
    gather                 | 0 | 1 | 2 |

If rows or columns take part, each has a part of one gradient, such as that of a norm's weight: these parts are summed
in fp32, like those of split weights, and the sum is rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ranvier.comm.collectives import PIECE_ELEMENTS, ChainedWork
from ranvier.comm.protocol import Group, Work
from ranvier.optim.chunks import Chunk
from ranvier.precision import is_half, wide

MAX_COLLECTIVES = 4
"""Number of reductions, and of gathers of parameters, that may use their own memory at the same time. A replica that
is this many chunks ahead of the slowest waits for it, as it would at the end of the step."""


class Reductions:
    """Sums the chunks of one rank, in their order.

    Args:
        chunks: all of them.
        dtype: of the buffer. reduce_dtype: in which chunks that are summed over replicas only are sent.
        in_flight: number of reductions that may use their own memory at the same time, 2 or more.

    `flat`, the buffer [elements of its memory], is set before the first reduction.
    """

    flat: Tensor

    def __init__(self, chunks: Sequence[Chunk], *, dtype: torch.dtype, reduce_dtype: torch.dtype, device: torch.device,
                 in_flight: int) -> None:
        self._chunks, self._dtype, self._reduce_dtype, self._device = chunks, dtype, reduce_dtype, device
        self._in_flight = in_flight
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._under_way: dict[int, Chunk] = {}
        self.scatter = False
        """Whether each member of a group gets only the sums of its share."""

    def begin(self, *, scatter: bool) -> None:
        """Begin a batch, with nothing in flight."""
        self._under_way.clear()
        self.scatter = scatter

    def flat_slice(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of all gradients, which lie in `chunk`."""
        return self.flat[start + chunk.offset:stop + chunk.offset]

    def start(self, chunk: Chunk, tables: Sequence[TouchedRows] = ()) -> None:
        """Start the sum of one chunk over its group, in the dtype in which it is sent.

        In half precision, shares are summed by their member; members that need the full sum then gather the shares.

        tables: those in it for which only some rows need to be summed; if packing pays, all members get all sums.
        """
        whole, needs = self.flat_slice(chunk, chunk.start, chunk.stop), self._workspace_bytes(chunk, self.scatter)
        packed = PackedChunk(whole, chunk.start, tables) if tables else None
        if packed is not None and packed.pays:
            few = packed.take().to(self._dtype_of(chunk))
            chunk.work = ChainedWork(chunk.group.all_reduce(few), lambda: packed.put(few))
            return
        slot = self._next_slot(chunk) if needs else 0
        sent = self._buffer(slot, "copy", chunk, len(whole)).copy_(whole) if "copy" in needs else whole
        if "share" not in needs:
            work = chunk.group.all_reduce(sent)
            chunk.work = work if sent is whole else ChainedWork(work, lambda: whole.copy_(sent))
            return
        share = self._buffer(slot, "share", chunk, len(whole) // len(chunk.group.ranks))
        room = self._buffer(slot, "room", chunk, needs["room"] // share.itemsize) if "room" in needs else None
        work = chunk.group.reduce_scatter(share, sent, room)
        if self.scatter:
            place = self.flat_slice(chunk, *chunk.share)
            chunk.work = ChainedWork(work, lambda: place.copy_(share))
        else:
            chunk.work, chunk.gather = work, partial(_gather, chunk.group, whole, sent, share)

    def wait(self, chunk: Chunk) -> None:
        """Return when `chunk` is reduced."""
        chunk.work.wait()
        if chunk.gather is not None:
            self._collect(chunk)
            chunk.work.wait()

    def forget(self) -> None:
        """Forget reductions that were waited for: their memory is free."""
        self._under_way.clear()

    def summed_chunks(self) -> Iterator[Chunk]:
        """The chunks that keep their memory and are summed here, in order, each as soon as its sum is available."""
        gathering: Chunk | None = None
        for chunk in (chunk for chunk in self._chunks if not chunk.reused):
            ready: Chunk | None = chunk
            chunk.work.wait()
            if chunk.gather is not None:  # in the order of chunks, the same on every replica
                self._collect(chunk)
                gathering, ready = chunk, gathering
                if ready is None:
                    continue
                ready.work.wait()
            elif gathering is not None:  # a packed chunk has no second half, but the previous chunk still comes first
                gathering.work.wait()
                yield gathering
                gathering = None
            if ready is not None and not ready.sent_to_owner:
                yield ready
        if gathering is not None:
            gathering.work.wait()
            yield gathering

    def _collect(self, chunk: Chunk) -> None:
        """Start gathering the shares of `chunk`, all of which have been summed."""
        assert chunk.gather is not None
        chunk.work, chunk.gather = chunk.gather(), None

    # ------------------------------------------------------------------ memory

    def _dtype_of(self, chunk: Chunk) -> torch.dtype:
        """The number format in which `chunk` is sent."""
        return wide(self._reduce_dtype) if chunk.adds_parts else self._reduce_dtype

    def _workspace_bytes(self, chunk: Chunk, scatter: bool) -> dict[str, int]:
        """Bytes that the reduction of `chunk` uses in addition to its gradients: a copy in the dtype that is sent, the
        share that is summed here, and a receive buffer (`passing` if the group allocates it)."""
        size, members, dtype = chunk.stop - chunk.start, len(chunk.group.ranks), self._dtype_of(chunk)
        if members == 1 or not size or chunk.sent_to_owner:
            return {}
        scattered, each = scatter or is_half(dtype), dtype.itemsize
        arriving = chunk.group.buffer_bytes("reduce_scatter" if scattered else "all_reduce", size, dtype,
                                            self._device.type)
        found = {"copy": size * each if dtype is not self._dtype else 0,
                 "share": size // members * each if scattered else 0, "room" if scattered else "passing": arriving}
        return {name: needed for name, needed in found.items() if needed}

    def _next_slot(self, chunk: Chunk) -> int:
        """The number of the memory that `chunk` uses. The previous user of it must be done, and the next user must have
        been summed: both are awaited in the order of chunks, the same on every replica, whichever is late."""
        waiting = self._under_way
        if len(waiting) == self._in_flight:
            self.wait(waiting.pop(next(iter(waiting))))
        if len(waiting) == self._in_flight - 1:
            oldest = next(iter(waiting.values()))
            if oldest.gather is not None:
                oldest.work.wait()
                self._collect(oldest)
        slot = next(number for number in range(self._in_flight) if number not in waiting)
        waiting[slot] = chunk
        return slot

    def _buffer(self, slot: int, name: str, chunk: Chunk, elements: int) -> Tensor:
        if (slot, name) not in self._memory:
            self._memory[slot, name] = torch.empty(_largest(self._needing(self.scatter))[name],
                                                   dtype=torch.uint8, device=self._device)
        dtype = self._dtype_of(chunk)
        return self._memory[slot, name][:elements * dtype.itemsize].view(dtype)

    def _needing(self, scatter: bool) -> list[tuple[Chunk, dict[str, int]]]:
        """The chunks whose reductions use memory in addition to the gradients, and how much. There may be tens of
        thousands of chunks, of a few sizes: equal chunks are counted once."""
        known: dict[object, dict[str, int]] = {}
        found = []
        for chunk in self._chunks:
            alike = chunk.stop - chunk.start, chunk.group, chunk.sent_to_owner, chunk.adds_parts
            if alike not in known:
                known[alike] = self._workspace_bytes(chunk, scatter)
            if known[alike]:
                found.append((chunk, known[alike]))
        return found

    def bytes(self, *, scatter: bool) -> tuple[int, int]:
        """Bytes of reductions in addition to the buffer, with the maximum number in flight: persistent memory, and the
        temporary memory of groups."""
        needing = self._needing(scatter)
        slots = max(min(self._in_flight, sum(not chunk.reused for chunk, _ in needing)),
                    any(chunk.reused for chunk, _ in needing))
        passing = sorted((needs.get("passing", 0) for _, needs in needing), reverse=True)
        return slots * sum(_largest(needing).values()), sum(passing[:slots])

    def widened_bytes(self, *, scatter: bool) -> int:
        """Bytes of a half-precision sum and of its summand, both in fp32, if this rank does the addition itself."""
        return 2 * 4 * max((min(needs["share"] // 2, PIECE_ELEMENTS) for chunk, needs in self._needing(scatter)
                            if "room" in needs and is_half(self._dtype_of(chunk))), default=0)

    def forget_buffers(self) -> None:
        """Free the work buffers."""
        self._memory.clear()

    @property
    def buffers(self) -> list[Tensor]:
        """Work buffers of reductions, which are reused."""
        return list(self._memory.values())


def _largest(needing: Sequence[tuple[Chunk, dict[str, int]]]) -> Counter[str]:
    """Bytes of one piece of the memory that reductions use in turn."""
    found: Counter[str] = Counter()
    for _, needs in needing:
        for name, needed in needs.items():
            found[name] = max(found[name], needed)
    del found["passing"]
    return found


def _gather(group: Group, whole: Tensor, sent: Tensor, share: Tensor) -> Work:
    """Start gathering all shares of a chunk into its place, through the sent copy if formats differ."""
    work = group.all_gather(sent, share)
    return work if sent is whole else ChainedWork(work, lambda: whole.copy_(sent))


# --- sums of some rows ------------------------------------------------------------------------------------------------

# Sums of lookup tables' gradients over replicas: only of the rows that some replica has added to.
#
#     replica 0   rows 3 and 7        all-reduce of one byte a row: 3, 7, 9        all-reduce of three rows
#     replica 1   rows 7 and 9
#
# All other rows are zero everywhere, and stay so. Whether it pays is decided by counts that are the same on all
# replicas. A replica that cannot guarantee its zeros (autograd, or a user, added to the gradient too; or no loss has
# reached it, which the sign of zero signals) reports this in one more byte, and everything is summed.


_ROWS_PER_FOUND = 4
"""A table's rows are packed if at most one of this many was found, since packing copies twice."""


class TouchedRows:
    """Rows of one table's gradient that a batch has touched.

    start: where the gradient begins in the buffer. rows, width: the table's shape.
    """

    def __init__(self, start: int, rows: int, width: int) -> None:
        self.start, self.rows, self.width = start, rows, width
        self.additions = 0
        """Calls of `add`; each has written to the gradient once."""
        self.found: Tensor | None = None
        """Rows that are not zero on some replica, ascending; None: any may be nonzero, or there are too many."""
        self.decided = False
        self._touched = torch.zeros(rows + 1, dtype=torch.uint8)

    def begin(self) -> None:
        """Begin a batch."""
        self._touched.zero_()
        self.additions, self.found, self.decided = 0, None, False

    def add(self, rows: Tensor) -> None:
        """Note that these rows were added to."""
        self._touched[rows.long()] = 1
        self.additions += 1

    def agree(self, group: Group, *, any_row: bool) -> None:
        """Agree on the same `found` on all members. any_row: whether rows that were not passed to `add` may differ from
        +0.0 here. Collective; waits."""
        self._touched[-1] = any_row
        group.all_reduce(self._touched, "max").wait()
        found = self._touched[:-1].nonzero().reshape(-1)
        self.found = None if self._touched[-1] or _ROWS_PER_FOUND * len(found) > self.rows else found
        self.decided = True


class PackedChunk:
    """Elements of a chunk that are summed: all outside the full rows of tables, and the found rows.

    gradients: the chunk's, which begin at `start` in the buffer. tables: those with found rows.
    """

    def __init__(self, gradients: Tensor, start: int, tables: Sequence[TouchedRows]) -> None:
        stop, edges = start + len(gradients), [start]
        self._rows: list[tuple[Tensor, Tensor]] = []
        for table in sorted(tables, key=lambda each: each.start):
            first = max(0, -(-(start - table.start) // table.width))
            last = min(table.rows, (stop - table.start) // table.width)
            if first < last and table.found is not None:
                begin, end = table.start + first * table.width, table.start + last * table.width
                inside = table.found[(table.found >= first) & (table.found < last)] - first
                self._rows.append((gradients[begin - start:end - start].view(-1, table.width), inside))
                edges += [begin, end]
        self._rest = [gradients[first - start:last - start] for first, last in list(pairwise([*edges, stop]))[::2]]
        self.size = sum(map(len, self._rest)) + sum(len(rows) * block.shape[1] for block, rows in self._rows)
        self.pays = 2 * self.size <= len(gradients)
        """Whether few enough elements are left that packing costs less than sending zeros; the same on all members."""

    def take(self) -> Tensor:
        """[size]: a copy of the elements to be summed."""
        return torch.cat([*self._rest, *(block.index_select(0, rows).reshape(-1) for block, rows in self._rows)])

    def put(self, sums: Tensor) -> None:
        """Write back what `take` returned."""
        parts = iter(sums.split([*map(len, self._rest), *(len(rows) * block.shape[1] for block, rows in self._rows)]))
        for piece in self._rest:
            piece.copy_(next(parts))
        for block, rows in self._rows:
            block.index_copy_(0, rows, next(parts).view(-1, block.shape[1]).to(block.dtype))
