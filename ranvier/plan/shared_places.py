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
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ranvier.originals.same_memory import overlaps, storage_of
from ranvier.plan.code_uses import Key
from ranvier.plan.object_contents import is_whole
from ranvier.plan.reached_objects import CodeReach, Reached


class Element(NamedTuple):
    """One element of a container, by its key or number."""

    key: Any


_RUNNING = frozenset({"running_mean", "running_var"})
Entry = str | Element | None
"""An attribute or variable; None for what is in a container, a tensor, an array, or a variable of a closure."""


@dataclass(frozen=True, kw_only=True)
class SharedPlace:
    """What a stage may write, and another one read.

    stage, name, kind, namesakes: how it is reached there, its class, and how many before it have both alike. other: a
    name of it on a stage that reads it. number: the same on all stages that reach it, which are `stages`. read:
    entries that another stage reads. agreed: those of them that each reader writes, too, and never makes of their old
    value. any: whether another stage may read others, too, by names that are computed. any_agreed: whether each of
    those stages writes them, too. called: entries that other stages only call. keys: of the elements of a container
    that other stages read; None where they may read any.
    """

    stage: int
    name: str
    kind: str
    namesakes: int = 0
    other: str
    number: int
    stages: tuple[int, ...]
    read: frozenset[Entry]
    agreed: frozenset[Entry]
    any: bool
    any_agreed: bool
    called: frozenset[Entry] = frozenset()
    keys: frozenset[Key] | None = None


def code_of_stages(stages: Mapping[str, int], modules: Mapping[str, nn.Module], loss: object) -> dict[int, CodeReach]:
    """What the code of each stage reaches; nothing of one stage alone. stages: block -> its stage. modules: blocks, in
    order."""
    reaches = {stage: CodeReach() for stage in dict.fromkeys(stages.values())}
    if len(reaches) < 2:
        return {}
    for name, module in modules.items():
        reaches[stages[name]].add(name, module)
    reaches[max(reaches)].add("loss", loss)
    return reaches


def code_with_others_parameters(reaches: Mapping[int, CodeReach], stages: Mapping[str, int],
                                modules: Mapping[str, nn.Module], loss: object) -> frozenset[str]:
    """The blocks, and "loss", whose code reaches parameters that blocks of other stages have, and those of its own do
    not, their layers, or tensors over their memory. The others are as in `code_of_stages`."""
    holders: dict[int, set[int]] = {}
    over: dict[int, dict[nn.Parameter, set[int]]] = {}
    for name, module in modules.items():
        for part in module.modules():
            own = [one for one in part._parameters.values() if one is not None]
            for one in (*own, part) if own else ():
                holders.setdefault(id(one), set()).add(stages[name])
            for one in own:
                over.setdefault(storage_of(one), {}).setdefault(one, set()).add(stages[name])
    over.pop(0, None)

    def reaches_others(stage: int, reach: CodeReach, roots: Iterable[object]) -> bool:
        tensors = [one.value for one in reach.found.values() if isinstance(one.value, Tensor)]
        tensors += [one for root in roots if isinstance(root, nn.Module) for one in root.buffers()]
        return any(stage not in here and reach.has(identity) for identity, here in holders.items()) or any(
            stage not in here and overlaps(one, parameter) for one in tensors
            for parameter, here in over.get(storage_of(one), {}).items())

    found = set[str]()
    for stage, whole in reaches.items():
        roots: dict[str, object] = {name: one for name, one in modules.items() if stages[name] == stage}
        if stage == max(reaches):
            roots["loss"] = loss
        if not reaches_others(stage, whole, roots.values()):
            continue
        for name, root in roots.items():
            reach = CodeReach(whole)
            reach.add(name, root)
            if reaches_others(stage, reach, [root]):
                found.add(name)
    return frozenset(found)


def shared_places(reaches: Mapping[int, CodeReach]) -> tuple[SharedPlace, ...]:
    """All of a model, by `code_of_stages`."""
    places: dict[int, list[int]] = {}
    for stage, reach in reaches.items():
        for identity in reach.found:
            places.setdefault(identity, []).append(stage)
    several = {identity: {stage: reaches[stage] for stage in here} for identity, here in places.items()
               if len(here) > 1}
    names = {stage: {id(value): name for name, value in reach.places().items()} for stage, reach in reaches.items()}
    known: dict[object, list[_Use]] = {}
    return tuple(replace(place, namesakes=names[place.stage][identity].number)
                 for number, (identity, here) in enumerate(several.items())
                 for place in _of_one(number, identity, here, known))


class _Use(NamedTuple):
    """What a stage may write of a place. other: the first stage that reads it. The others are as in `SharedPlace`."""

    stage: int
    other: int
    read: frozenset[Entry]
    agreed: frozenset[Entry]
    any: bool
    any_agreed: bool
    called: frozenset[Entry]
    keys: frozenset[Key] | None


def _of_one(number: int, identity: int, reaches: Mapping[int, CodeReach], known: dict[object, list[_Use]]
            ) -> Iterator[SharedPlace]:
    """The place on each stage that may write there. known: of places that are used alike, of which there are many."""
    found = {stage: reach.found[identity] for stage, reach in reaches.items()}
    value = next(iter(found.values())).value
    key = identity if is_whole(value) else (type(value), _buffers(value), *(
        (stage, one.is_part, reaches[stage].is_own(value)) for stage, one in found.items()))
    if key not in known:
        known[key] = list(_uses_of_one(found, reaches))
    for use in known[key]:
        yield SharedPlace(
            stage=use.stage, name=found[use.stage].name, kind=type(value).__name__, other=found[use.other].name,
            number=number, stages=tuple(reaches), read=use.read, any=use.any, any_agreed=use.any_agreed,
            agreed=use.agreed, called=use.called, keys=use.keys)


def _uses_of_one(found: Mapping[int, Reached], reaches: Mapping[int, CodeReach]) -> Iterator[_Use]:
    value = next(iter(found.values())).value
    has_any = not is_whole(value) and not isinstance(value, type | FunctionType | ModuleType)
    """Whether attributes are written by names that are computed: not those of classes, functions and modules."""
    any_writers = {stage for stage, reach in reaches.items() if has_any and reach.uses.stores_any}
    any_readers = {stage for stage, reach in reaches.items() if reach.uses.reads_any}
    names = frozenset[str]()
    if not is_whole(value):
        names = names.union(*(reach.uses.stores for reach in reaches.values()))
    if any_writers:
        names = names.union(*(reach.uses.own | reach.uses.others | reach.uses.called for stage, reach in reaches.items()
                              if stage not in any_readers))
    readers: dict[Entry, list[int]] = {}
    for stage, reach in reaches.items():
        for entry in _read(reach, found[stage], names):
            readers.setdefault(entry, []).append(stage)
    reading = {stage: reach.names_read(value, names) for stage, reach in reaches.items()}
    keys = {stage: reach.keys_read(value) for stage, reach in reaches.items() if (None in readers)}
    makers = {entry: {stage for stage, reach in reaches.items() if _makes(reach, found[stage], entry)}
              for entry in readers}
    for stage, reach in reaches.items():
        others = {entry: [other for other in reading if other != stage] for entry, reading in readers.items()
                  if entry is None or entry in reach.uses.stores or entry in _buffers(value) or stage in any_writers}
        read = frozenset(entry for entry, reading in others.items() if reading)
        any_others = any_readers - {stage} if stage in any_writers else set[int]()
        called = frozenset(entry for entry in read if entry is not None and entry not in _buffers(value)
                           and not any(entry in reading[other] for other in others[entry]))
        keys_of_others = [keys[other] for other in others.get(None, ())] or [None]
        if read or any_others:
            yield _Use(stage, min([*(min(others[entry]) for entry in read), *any_others]), read,
                       frozenset(entry for entry in read if makers[entry].issuperset((stage, *others[entry]))),
                       bool(any_others), bool(any_others) and any_others <= any_writers, called,
                       frozenset().union(*filter(None, keys_of_others)) if None not in keys_of_others else None)


def _read(reach: CodeReach, one: Reached, names: frozenset[str]) -> Iterable[Entry]:
    """Those of `names`, or None for a whole value, that a stage may read of a place. Buffers of its own modules are
    its own."""
    if is_whole(one.value):
        return (None,) if reach.reads(one.value, None) else ()
    if one.is_part:
        return (reach.names_read(one.value, names) | names & reach.uses.called) - _buffers(one.value)
    read = reach.names_read(one.value, names | _buffers(one.value))
    if not read.isdisjoint(_RUNNING):  # kernels that change these leave no trace, but for the count beside them
        read |= _buffers(one.value) & {"num_batches_tracked"}
    return read | names & reach.uses.called


def _buffers(value: object) -> frozenset[str]:
    return frozenset(value._buffers) if isinstance(value, nn.Module) else frozenset()


def _makes(reach: CodeReach, one: Reached, entry: Entry) -> bool:
    """Whether a stage writes an entry by itself, and not by changing what it finds there."""
    names = {entry} if entry is not None else reach.names_of(one.value)
    return all(name in reach.uses.stores and name not in reach.uses.accumulates for name in names)
