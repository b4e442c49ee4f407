"""Every change in a place is noticed, with identities compared first."""

import threading
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from ranvier.pipeline.left_values import Identities, Watch
from ranvier.plan.reached_objects import PlaceName
from ranvier.plan.shared_places import Element, SharedPlace


class Slotted:
    __slots__ = ("kept", "other")


def place(read=frozenset({None}), **options):
    return SharedPlace(stage=0, at=PlaceName("it", "", 0), other="it", number=0, stages=(0, 1), read=read,
                       agreed=frozenset(), **options)


def closure(value):
    def function():
        return value
    return function.__closure__[0]


def changed_cell(cell):
    cell.cell_contents = 2


def with_attributes(value, **attributes):
    for name, one in attributes.items():
        setattr(value, name, one)
    return value


def large(value):
    value[0] = 5


NAMES = frozenset({"kept", "other"})
WHOLE = [
    ([1, 2], lambda v: v.append(3)), ([1, 2], lambda v: v.reverse()), ({"a": 1}, lambda v: v.update(a=2)),
    ({"a": 1}, lambda v: v.update(b=v.pop("a"))), (OrderedDict(a=1), dict.clear), ({1, 2}, lambda v: v.add(3)),
    (deque([1]), lambda v: v.append(2)), ([[1], {"a": {2}}], lambda v: v[1]["a"].add(3)),
    ([torch.zeros(2)], lambda v: v[0].add_(1)), (torch.zeros(2), lambda v: v.fill_(1)),
    (numpy.zeros(3), lambda v: v.fill(1)), (numpy.zeros((3, 1 << 18)), lambda v: v.fill(1)),
    ([0] * 20_000, large), ([0] * 20_000, lambda v: v.append(1)), (dict.fromkeys(range(20_000)), lambda v: v.pop(3)),
    (closure(1), changed_cell), (type("Of", (list,), {})([1]), lambda v: v.append(2))]
ATTRIBUTES = [
    (SimpleNamespace(kept=1), lambda v: setattr(v, "kept", 2)), (SimpleNamespace(), lambda v: setattr(v, "kept", 2)),
    (SimpleNamespace(kept=1), lambda v: delattr(v, "kept")), (SimpleNamespace(kept=[1]), lambda v: v.kept.append(2)),
    (SimpleNamespace(unseen=1), lambda v: (delattr(v, "unseen"), setattr(v, "kept", 1))),
    (Slotted(), lambda v: setattr(v, "kept", 2)), (with_attributes(Slotted(), kept=1), lambda v: setattr(v, "kept", 2)),
    (threading.local(), lambda v: setattr(v, "kept", 2)), (type("K", (), {}), lambda v: setattr(v, "kept", 1)),
    (with_attributes(nn.Module(), kept=1), lambda v: setattr(v, "kept", 2)),
    (nn.BatchNorm1d(2), lambda v: v.register_buffer("kept", torch.ones(2)))]


@pytest.mark.parametrize(("read", "value", "change"), [
    *((frozenset({None}), *one) for one in WHOLE), *((NAMES, *one) for one in ATTRIBUTES)])
def test_a_change_is_noticed(read, value, change):
    watch = Watch(place(read), value, ())
    steady = None if watch.iterators is None else Identities([watch])
    assert not list(watch.changes()) and (steady is None or steady.is_same())
    change(value)
    assert steady is None or not steady.is_same()
    assert list(watch.changes()) and not list(watch.changes())


def test_equal_numbers_are_the_same():
    value = SimpleNamespace(kept=1000.5)
    watch = Watch(place(NAMES), value, ())
    value.kept = float("1000.5")
    assert not list(watch.changes())


def test_what_an_optimizer_updates_is_no_change():
    weight = nn.Parameter(torch.zeros(2))
    watch = Watch(place(), [weight], ())
    with torch.no_grad():
        weight.add_(1)
    assert Identities([watch]).is_same() and not list(watch.changes())


def test_elements_are_told_apart():
    value = {"a": 1, "b": [2], 3: 4}
    watch = Watch(place(keys=frozenset({("is", "b"), ("tuple", (("is", 0), ("any",)))})), value, ())
    value.update(a=5, b=[6])
    value[0, "c"] = value.pop(3)
    found = {change.entry: change.is_read for change in watch.changes()}
    assert found == {Element("a"): False, Element("b"): True, Element(3): False, Element((0, "c")): True}
