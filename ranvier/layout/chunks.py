"""The order of a rank's gradients in one flat buffer, and the cut of that buffer into chunks and shares.

    buffer   | head ........ | layer 7 .... | layer 6 .... | ... |      in the order in which a backward finishes them
    chunks   |  0   |  1   |   2   |  3  |   4    | ...                 of equal size; they cut through parameters
    share    |  |me |  |me |       |me   |...                           what this member of a group sums, or updates

Gradients whose update needs full tensors are never cut: chunks end where they end. With `shard` each has one owner, the
first member of the group for the first gradients and so on, with about the same number of elements for each member:

    chunks   | down | up | projection qkv | down | up | projection qkv |
    owner        0     0       0       0      1     1       1       1

Everything that depends on these intervals follows from this one cut: what is reduced together, which rank has which
optimizer states, and which rank writes what to a checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FlatGradient:
    """One gradient of a rank, in the flat buffer.

    numel: elements on this rank.
    blocks: numbers of all the blocks of its stage that use the parameter.
    remote_ends: other ends of a tied parameter that send their gradients here (this rank's stage owns it).
    sent_to_owner: the gradient goes to the stage that owns the parameter, and is not reduced here.
    group: the key (hashable) of the group over which it is summed; None for the group of most gradients.
    copied: whether ranks of the stage hold copies with the same gradient. They are cut separately from the others, and
        so in the same way on every rank: an update's last bit may depend on where pieces begin.
    counts: whether this rank's copy is the one that enters the norm; the same on all members of the group.
    whole: whether its update needs the full tensor, so that no chunk, share or bucket may cut it.
    weight: approximate number of elements, the same on all ranks of its stage: `numel` may differ slightly. It decides
        which rank updates a whole gradient. 0 stands for `numel`.
    shape: of the full parameter; None if it is not known. in_layer: as in `Parameter`.
    settings_name: the name by which settings refer to the parameter; "" for its own.
    """

    name: str
    numel: int
    blocks: frozenset[int]
    remote_ends: int = 0
    sent_to_owner: bool = False
    group: object = None
    copied: bool = False
    counts: bool = True
    whole: bool = False
    weight: int = 0
    shape: tuple[int, ...] | None = None
    in_layer: bool = True
    settings_name: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether it shares no chunk, since it is complete at another time than its neighbours."""
        return self.sent_to_owner or self.remote_ends > 0


@dataclass(frozen=True, kw_only=True)
class ChunkCut:
    """Elements [start, stop) of all gradients, which are reduced in one piece.

    gradients: those with elements in it, by their number in model order, in the order of the buffer. An empty gradient
        is in the last chunk of its run.
    share: the part that this member of the group sums; all chunks of a group of one are their own share.
    shares: what each member updates, if whole gradients have owners; `share` is this member's. None: members have equal
        parts.
    group: as in its gradients.
    run: the blocks whose chunks use the same memory in turn; None if it keeps its own memory.
    offset: added to a place in the order to find it in the buffer's memory.
    """

    start: int
    stop: int
    gradients: tuple[int, ...]
    share: tuple[int, int]
    group: object
    counts: bool
    run: range | None = None
    offset: int = 0
    shares: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class FlatOrder:
    """Offsets of a rank's gradients in its flat buffer, and the buffer's chunks.

    order: numbers of the gradients (their places in model order), in the order of the buffer.
    places: for each gradient, in model order, (start, stop) in the order of the buffer.
    chunks_of: for each gradient, in model order, the numbers of its chunks.
    size: elements of all gradients, padding included. length: elements of the memory; fewer if it is used in turn.
    """

    order: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    chunks: tuple[ChunkCut, ...]
    chunks_of: tuple[range, ...]
    size: int
    length: int


Member = tuple[int, int]
"""Size of a group, and this rank's place in it."""


def flat_order(gradients: Sequence[FlatGradient], members: Mapping[Any, Member], chunk_size: int,
               runs: Sequence[range] = (), *, shard: bool = False) -> FlatOrder:
    """Order and cut the gradients of one rank.

    gradients: in model order. members: of each group of `gradients`, by key; None is the group of most gradients.
    chunk_size: elements that are reduced in one piece; rounded up to a multiple of the group's size.
    runs: blocks (their numbers) whose gradients use the same memory in turn; `chunk_size` is not used then. Gradients
    that are tied, used in several runs, copied, or summed over another group keep their own memory.
    shard: whether members update their shares, so that each whole gradient must lie within one.

    Gradients that are sent to an owner, those that await other ends, and the rest never share a chunk; a chunk that
    ends for this reason is padded to a multiple of its group's size. Groups other than None come last, in the order of
    their first gradients, so all ranks of a stage start their collectives in one order.
    """
    groups: list[object] = [None, *dict.fromkeys(each.group for each in gradients if each.group is not None)]
    run_of = [_run_of(each, runs) for each in gradients]

    def turn(number: int) -> tuple[int, ...]:
        each = gradients[number]
        late = groups.index(each.group)
        return (late, each.copied, late > 0 and not each.counts, bool(runs) and run_of[number] is None,
                -min(each.blocks), -number)

    def kind(number: int) -> tuple[object, ...]:
        """Key of a gradient; all gradients of a chunk have the same key."""
        each = gradients[number]
        return run_of[number], each.group, each.copied, each.counts

    packs = any(each.whole for each in gradients)

    def is_cut(number: int) -> bool:
        """Whether it is cut although there are whole gradients: it need not be whole, and is longer than a chunk."""
        each = gradients[number]
        return packs and not each.whole and run_of[number] is None and _weight(each) > chunk_size

    def is_alone(number: int) -> bool:
        """Whether it shares no chunk."""
        return gradients[number].is_alone or is_cut(number)

    order = sorted(range(len(gradients)), key=turn)
    places: dict[int, tuple[int, int]] = {}
    chunks_of: dict[int, list[int]] = {}
    chunks: list[ChunkCut] = []
    offset = 0
    owners = _owners([number for number in order if not is_cut(number)], gradients, members) if packs and shard else {}
    for together in _together(order, is_alone, kind):
        first = gradients[together[0]]
        run, (size, index) = run_of[together[0]], members[first.group]
        in_one = first.sent_to_owner or run is not None
        cuts: list[tuple[int, int]] = []
        is_whole = not first.sent_to_owner and any(gradients[number].whole for number in together)
        for part in _uncut(together, gradients, None if in_one or not is_whole else chunk_size):
            start = offset
            for number in part:
                places[number] = offset, offset + gradients[number].numel
                offset += gradients[number].numel
            offset += -(offset - start) % size
            step = max(1, offset - start) if in_one or is_whole else -(-chunk_size // size) * size
            cuts += ((begin, min(begin + step, offset)) for begin in range(start, max(offset, start + 1), step))
        starts, stops = zip(*(places[number] for number in together), strict=True)
        for begin, end in cuts:
            inside = tuple(together[bisect_right(stops, begin):bisect_left(starts, end)])
            for number in inside:
                chunks_of.setdefault(number, []).append(len(chunks))
            width = (end - begin) // size
            shares = _owned_intervals(inside, owners, places, size, begin) if is_whole and shard else None
            share = shares[index] if shares else (begin + index * width, begin + (index + 1) * width)
            chunks.append(ChunkCut(start=begin, stop=end, gradients=inside, share=share, group=first.group,
                                   counts=first.counts, run=run, shares=shares))
        if empty := tuple(number for number in together if number not in chunks_of):
            chunks[-1] = replace(chunks[-1], gradients=chunks[-1].gradients + empty)
            chunks_of |= {number: [len(chunks) - 1] for number in empty}
    placed, length = (_share_memory(chunks) if runs else (chunks, offset))
    numbers = range(len(gradients))
    return FlatOrder(order=tuple(order), places=tuple(places[number] for number in numbers), chunks=tuple(placed),
                     chunks_of=tuple(range(chunks_of[number][0], chunks_of[number][-1] + 1) for number in numbers),
                     size=offset, length=length)


def _run_of(gradient: FlatGradient, runs: Sequence[range]) -> range | None:
    """The run whose memory a gradient uses in turn; None if it keeps its own."""
    if gradient.is_alone or gradient.group is not None or gradient.copied:
        return None
    return next((run for run in runs if all(block in run for block in gradient.blocks)), None)


def _together(order: Sequence[int], is_alone: Callable[[int], bool], kind: Callable[[int], object]
              ) -> Iterator[list[int]]:
    """Yield consecutive gradients that may share a chunk: those of one kind; some are alone."""
    run: list[int] = []
    for number in order:
        if run and (is_alone(number) or is_alone(run[0]) or kind(run[0]) != kind(number)):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _weight(gradient: FlatGradient) -> int:
    """Approximate number of elements, the same on all ranks of its stage."""
    return gradient.weight or gradient.numel


def _uncut(together: Sequence[int], gradients: Sequence[FlatGradient], chunk_size: int | None) -> Iterator[list[int]]:
    """Yield the gradients of each chunk, if chunks cut none; at most `chunk_size` elements unless a single gradient has
    more (None: all together)."""
    part: list[int] = []
    filled = 0
    for number in together:
        weight = _weight(gradients[number])
        if part and chunk_size is not None and filled + weight > chunk_size:
            yield part
            part, filled = [], 0
        part.append(number)
        filled += weight
    yield part


def _owners(numbers: Sequence[int], gradients: Sequence[FlatGradient], members: Mapping[Any, Member]) -> dict[int, int]:
    """Gradient -> the member of its group that updates it: each updates consecutive gradients, with about the same
    number of elements. It depends on weights alone, so owners have the same index in the groups of all ranks that share
    a tensor."""
    found: dict[int, int] = {}
    for group, (size, _) in members.items():
        inside = [number for number in numbers
                  if gradients[number].group == group and not gradients[number].sent_to_owner]
        total, before = sum(_weight(gradients[number]) for number in inside), 0
        for number in inside:
            weight = _weight(gradients[number])
            found[number] = min(size - 1, (2 * before + weight) * size // max(1, 2 * total))
            before += weight
    return found


def _owned_intervals(inside: Sequence[int], owners: Mapping[int, int], places: Mapping[int, tuple[int, int]], size: int,
                     begin: int) -> tuple[tuple[int, int], ...]:
    """The interval of a chunk with these gradients, which begins at `begin`, that each member updates."""
    shares = []
    for member in range(size):
        owned = [places[number] for number in inside if owners[number] == member]
        shares.append((owned[0][0], owned[-1][1]) if owned else (begin, begin))
    return tuple(shares)


def _share_memory(chunks: Sequence[ChunkCut]) -> tuple[list[ChunkCut], int]:
    """The chunks with offsets, and the size of their memory: those of all runs begin at 0, the others follow after
    them."""
    first: dict[range, int] = {}
    taken = 0
    found = list(chunks)
    for number, chunk in enumerate(chunks):
        if chunk.run is not None:
            found[number] = replace(chunk, offset=-first.setdefault(chunk.run, chunk.start))
            taken = max(taken, chunk.stop + found[number].offset)
    for number, chunk in enumerate(chunks):
        if chunk.run is None:
            found[number] = replace(chunk, offset=taken - chunk.start)
            taken += chunk.stop - chunk.start
    return found, taken
