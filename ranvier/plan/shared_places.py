"""Places where code of one stage may leave a value that code of another stage reads, outside the carried state.

    class Block(nn.Module):                  as one process:  block 3 reads what block 0 has computed for the microbatch
        def forward(self, x):                on two stages:   block 3 reads its own rank's value, which is None, or old
            if self.first:
                context.mask = mask_of(x)
            return f(x, context.mask)

    reached_objects           which objects the code of a stage reaches, and by which names
    code_uses                 which of these names its functions read, and which they write
    here                      an object that two stages reach, a name that one writes and the other one reads
    pipeline/left_values      whether a forward does write it, which is refused

A value that every reader also computes itself, such as a table that each stage builds if it is missing, is accepted as
long as all have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ranvier.originals.object_contents import entries_of, is_whole
from ranvier.originals.same_memory import ByMemory
from ranvier.plan.code_uses import Key
from ranvier.plan.reached_objects import CodeReach, PlaceName, Reached, tensors_in


class Element(NamedTuple):
    """One element of a container, by its key or number."""

    key: Any


_RUNNING = frozenset({"running_mean", "running_var"})
Entry = str | Element | None
"""An attribute or variable; None for the contents of a container, a tensor, an array, or a variable of a closure."""
ANY_NAME = "*"
"""An entry whose name is computed."""


@dataclass(frozen=True, kw_only=True)
class SharedPlace:
    """A place that a stage may write, and another stage may read.

    stage, at: where it is reached. other: a name of it on a stage that reads it. number: the same on all stages that
    reach it, which are `stages`. read: entries that another stage reads. agreed: those that each reader also writes,
    and never computes from their old value. keys: of the elements of a container that other stages read; None if they
    may read any.
    """

    stage: int
    at: PlaceName
    other: str
    number: int
    stages: tuple[int, ...]
    read: frozenset[Entry]
    agreed: frozenset[Entry]
    keys: frozenset[Key] | None = None

    def is_agreed(self, entry: Entry) -> bool:
        of_place = None if isinstance(entry, Element) else entry
        return (of_place if of_place in self.read else ANY_NAME) in self.agreed


def code_of_stages(stages: Mapping[str, int], modules: Mapping[str, nn.Module], loss: object) -> dict[int, CodeReach]:
    """What the code of each stage reaches; empty for a single stage. stages: block -> its stage. modules: blocks, in
    order."""
    roots, several = _roots(stages, modules, loss), dict.fromkeys(stages.values())
    return {stage: CodeReach.from_roots((name, root) for at, name, root in roots if at == stage)
            for stage in several} if len(several) > 1 else {}


def _roots(stages: Mapping[str, int], modules: Mapping[str, nn.Module], loss: object) -> list[tuple[int, str, object]]:
    """Stage, name and module of each block, and the loss, which is the last stage's."""
    return [*((stages[name], name, module) for name, module in modules.items()), (max(stages.values()), "loss", loss)]


def code_with_others_parameters(reaches: Mapping[int, CodeReach], stages: Mapping[str, int],
                                modules: Mapping[str, nn.Module], loss: object) -> frozenset[str]:
    """The blocks, and "loss", whose code reaches parameters that blocks of other stages have and those of its own stage
    do not, their layers, or tensors in their memory. Other arguments as for `code_of_stages`."""
    holders: dict[object, set[int]] = {}
    for name, module in modules.items():
        for part in module.modules():
            own = [parameter for parameter in part._parameters.values() if parameter is not None]
            for one in (*own, part) if own else ():
                holders.setdefault(one, set()).add(stages[name])
    memory = ByMemory((here, one) for one, here in holders.items() if isinstance(one, nn.Parameter))

    def reaches_others(stage: int, reach: CodeReach) -> bool:
        return any(stage not in here and reach.contains(id(one)) for one, here in holders.items()) or any(
            stage not in here for _, tensor in tensors_in(reach.found.values()) for here in memory.overlapping(tensor))

    suspects = {stage: reach for stage, reach in reaches.items() if reaches_others(stage, reach)}
    return frozenset(name for stage, name, root in _roots(stages, modules, loss)
                     if stage in suspects
                     and reaches_others(stage, CodeReach.from_roots([(name, root)], suspects[stage])))


def shared_places(reaches: Mapping[int, CodeReach]) -> tuple[SharedPlace, ...]:
    """All shared places of a model. reaches: of `code_of_stages`."""
    stages: dict[int, list[int]] = {}
    stored_on = frozenset[str]().union(*(reach.stored_on for reach in reaches.values()))
    for stage, reach in reaches.items():
        for identity, (_, value, _) in reach.found.items():
            if not isinstance(value, FunctionType) or vars(value) or value.__name__ in stored_on:
                stages.setdefault(identity, []).append(stage)
    names = {stage: {id(value): name for name, value in reach.places().items()} for stage, reach in reaches.items()}
    several = [(identity, here) for identity, here in stages.items() if len(here) > 1]
    places = (place for number, (identity, here) in enumerate(several)
              for place in _places_of(identity, number, {stage: reaches[stage] for stage in here}, names))
    return (*places, *_over_one_memory(reaches, len(several), names))


def _over_one_memory(reaches: Mapping[int, CodeReach], first: int, names_of: Mapping[int, Mapping[int, PlaceName]]
                     ) -> Iterator[SharedPlace]:
    """Yield the tensors and buffers of a stage over whose memory code of another stage reads another one, such as a
    view. Buffers over each other are noticed by `shared_buffers`. first: their first number."""
    tensors = [(stage, one, entry, tensor) for stage, reach in reaches.items() for one in reach.found.values()
               for entry, tensor in _tensors_of(one.value)]
    memory, number = ByMemory((of, of[-1]) for of in tensors), count(first)
    for stage, one, entry, tensor in tensors:
        for other, theirs, name, _ in memory.overlapping(tensor):
            if other == stage or id(theirs.value) in reaches[stage].found or (one.is_part and theirs.is_part):
                continue
            if theirs.is_part or (reaches[other].reads(theirs.value) if name is None else
                                  reaches[other].names_read(theirs.value, frozenset({name}))):
                path = names_of[other][id(theirs.value)].path
                yield SharedPlace(stage=stage, at=names_of[stage][id(one.value)], number=next(number),
                                  other=f"in the memory of {path}" + (f".{name}" if name else ""),
                                  stages=(stage, other), read=frozenset({entry}), agreed=frozenset())
                break


def _tensors_of(value: object) -> Iterable[tuple[str | None, Tensor]]:
    """A tensor itself, and the buffers of a module, by their names."""
    if isinstance(value, Tensor):
        return [(None, value)]
    buffers = value._buffers if isinstance(value, nn.Module) else {}
    return [(name, buffer) for name, buffer in buffers.items() if buffer is not None]


def _places_of(identity: int, number: int, reaches: Mapping[int, CodeReach],
               names_of: Mapping[int, Mapping[int, PlaceName]]) -> Iterator[SharedPlace]:
    """Yield the places of stages that may write there. names_of: for each stage, the name of each of its places."""
    found = {stage: reach.found[identity] for stage, reach in reaches.items()}
    value = next(iter(found.values())).value
    names = frozenset[str]().union(*(reach.uses.stores for reach in reaches.values()))
    any_writers = frozenset[int]()
    if not is_whole(value) and not isinstance(value, type | FunctionType | ModuleType):
        any_writers = frozenset(stage for stage, reach in reaches.items() if reach.uses.stores_any)
        names = names.union(*(reach.uses.own | reach.uses.others | reach.uses.called for reach in reaches.values()
                              if any_writers and not reach.uses.reads_any))
    reading = {stage: frozenset(_read(reach, found[stage], names)) for stage, reach in reaches.items()}
    making = {stage: _entries_written(reach, value, any_name=stage in any_writers) for stage, reach in reaches.items()}
    for stage, reach in reaches.items():
        others = {other: entries if stage in any_writers else entries & {None, *reach.uses.stores, *_buffers(value)}
                  for other, entries in reading.items() if other != stage}
        others = {other: entries for other, entries in others.items() if entries}
        if others:
            read = frozenset[Entry]().union(*others.values())
            agreed = (read & making[stage]).difference(*(entries - making[other] for other, entries in others.items()))
            keys = [reaches[other].keys_read(value) for other, entries in others.items() if None in entries] or [None]
            yield SharedPlace(stage=stage, at=names_of[stage][identity], other=names_of[min(others)][identity].path,
                              number=number, stages=tuple(reaches), read=read, agreed=agreed,
                              keys=None if None in keys else frozenset[Key]().union(*filter(None, keys)))


def _read(reach: CodeReach, reached: Reached, names: frozenset[str]) -> Iterable[Entry]:
    """Those of `names`, or None for the contents of a container, that a stage may read of a place. Buffers of the
    stage's own modules belong to it."""
    if is_whole(reached.value):
        return (None,) if reach.reads(reached.value) else ()
    own = _buffers(reached.value)
    read = reach.names_read(reached.value, names - own if reached.is_part else names | own)
    if not reached.is_part and not read.isdisjoint(_RUNNING):
        read |= own & {"num_batches_tracked"}  # kernels that change these leave no trace except in the count
    read |= _callable(reached.value, names & reach.uses.called)
    return read | {ANY_NAME} if reach.uses.reads_any else read


def _callable(value: object, names: frozenset[str]) -> frozenset[str]:
    """The attributes among `names` that may be called: a call does not read a number that has a method's name."""
    return frozenset(name for name, one in entries_of(value, names) if name and callable(one)) if names else names


def _buffers(value: object) -> frozenset[str]:
    return frozenset(value._buffers) if isinstance(value, nn.Module) else frozenset()


def _entries_written(reach: CodeReach, value: object, *, any_name: bool) -> frozenset[Entry]:
    """The entries that a stage writes itself, without computing them from what it finds there."""
    made = reach.uses.only_written
    return made.union([None] if made.issuperset(reach.names_of(value)) else (), [ANY_NAME] if any_name else ())
