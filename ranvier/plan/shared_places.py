"""Places where code of one stage may leave a value that code of another stage reads, past the carried state.

    class Block(nn.Module):                  as one process:  block 3 reads what block 0 has computed for the microbatch
        def forward(self, x):                on two stages:   block 3 reads its own rank's, which is None, or old
            if self.first:
                context.mask = mask_of(x)
            return f(x, context.mask)

Which names a stage reads and writes is known from its code (`code_uses`); whether a forward does write, the run shows
(`pipeline/left_values`). What every reader also makes by itself, such as a table that each stage builds where it misses
it, is taken as long as all have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType

from torch import nn

from ranvier.plan.reached_objects import CodeReach, Reached, is_whole

Entry = str | None
"""An attribute or variable; None for what is in a container, a tensor, an array, or a variable of a closure."""


@dataclass(frozen=True, kw_only=True)
class SharedPlace:
    """What a stage may write, and another one read.

    stage, name, kind: how it is reached there, and its class. other: a name of it on a stage that reads it. number: the
    same on all stages that reach it, which are `stages`. read: entries that another stage reads. agreed: those of them
    that each reader writes, too, and never makes of their old value. any: whether another stage may read others, too,
    by names that are computed. any_agreed: whether each of those stages writes them, too.
    """

    stage: int
    name: str
    kind: str
    other: str
    number: int
    stages: tuple[int, ...]
    read: frozenset[Entry]
    agreed: frozenset[Entry]
    any: bool
    any_agreed: bool


def shared_places(stages: Mapping[str, int], modules: Mapping[str, nn.Module], loss: object) -> tuple[SharedPlace, ...]:
    """All of a model. stages: block -> its stage. modules: blocks, in order."""
    reaches = {stage: CodeReach() for stage in dict.fromkeys(stages.values())}
    if len(reaches) < 2:
        return ()
    for name, module in modules.items():
        reaches[stages[name]].add(name, module)
    reaches[max(reaches)].add("loss", loss)
    places: dict[int, list[int]] = {}
    for stage, reach in reaches.items():
        for identity in reach.found:
            places.setdefault(identity, []).append(stage)
    several = [(identity, here) for identity, here in places.items() if len(here) > 1]
    return tuple(place for number, (identity, here) in enumerate(several)
                 for place in _of_one(number, identity, {stage: reaches[stage] for stage in here}))


def _of_one(number: int, identity: int, reaches: Mapping[int, CodeReach]) -> Iterator[SharedPlace]:
    """The place on each stage that may write there."""
    value = next(iter(reaches.values())).found[identity].value
    has_any = not is_whole(value) and not isinstance(value, type | FunctionType | ModuleType)
    """Whether attributes are written by names that are computed: not those of classes, functions and modules."""
    any_writers = {stage for stage, reach in reaches.items() if has_any and reach.uses.stores_any}
    any_readers = {stage for stage, reach in reaches.items() if reach.uses.reads_any}
    names = frozenset[str]().union(*(reach.uses.stores for reach in reaches.values()))
    if any_writers:
        names = names.union(*(reach.uses.own | reach.uses.others for stage, reach in reaches.items()
                              if stage not in any_readers))
    readers: dict[Entry, list[int]] = {}
    for stage, reach in reaches.items():
        for entry in _read(reach, reach.found[identity], names):
            readers.setdefault(entry, []).append(stage)
    makers = {entry: {stage for stage, reach in reaches.items() if _makes(reach, reach.found[identity], entry)}
              for entry in readers}
    for stage, reach in reaches.items():
        one = reach.found[identity]
        others = {entry: [other for other in reading if other != stage] for entry, reading in readers.items()
                  if entry is None or entry in reach.uses.stores or entry in _buffers(one) or stage in any_writers}
        read = frozenset(entry for entry, reading in others.items() if reading)
        any_others = any_readers - {stage} if stage in any_writers else set[int]()
        if read or any_others:
            first = min([*(min(others[entry]) for entry in read), *any_others])
            yield SharedPlace(
                stage=stage, name=one.name, kind=type(value).__name__, other=reaches[first].found[identity].name,
                number=number, stages=tuple(reaches), read=read, any=bool(any_others),
                any_agreed=bool(any_others) and any_others <= any_writers,
                agreed=frozenset(entry for entry in read if makers[entry].issuperset((stage, *others[entry]))))


def _read(reach: CodeReach, one: Reached, names: frozenset[str]) -> Iterable[Entry]:
    """Those of `names`, or None for a whole value, that a stage may read of a place. Buffers of its own modules are
    its own."""
    if is_whole(one.value):
        return (None,) if reach.reads(one.value, None) else ()
    if one.is_part:
        return reach.names_read(one.value, names) - _buffers(one)
    return reach.names_read(one.value, names | _buffers(one))


def _buffers(one: Reached) -> frozenset[str]:
    return frozenset(one.value._buffers) if isinstance(one.value, nn.Module) else frozenset()


def _makes(reach: CodeReach, one: Reached, entry: Entry) -> bool:
    """Whether a stage writes an entry by itself, and not by changing what it finds there."""
    names = {entry} if entry is not None else reach.names_of(one.value)
    return all(name in reach.uses.stores and name not in reach.uses.accumulates for name in names)
