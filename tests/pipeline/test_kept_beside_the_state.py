"""Values that blocks keep besides the carried state and that no other block reads, as of logs, timers and caches, are
accepted; similar values that another stage reads are refused."""

import itertools
import time
from collections import defaultdict
from contextvars import ContextVar
from random import Random
from types import FunctionType, SimpleNamespace
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from torch import nn

from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.left_values import Watch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.pipeline.parity import assert_close, merge, points, share, squared

V_SHAPE = Pipeline(stages_per_rank=2)
REFUSED = ("shared-container-changes", "shared-container-differs")


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def four(step, **attributes):
    """Four layers whose forward calls step(self, x, y), a method."""
    kind = type("Keeps", (Layer,), {"forward": lambda self, x: self.step(x, Layer.forward(self, x)), "step": step,
                                    **attributes})
    return [kind(number) for number in range(4)], squared


def train(make, *, batches=3, **options):
    """Gradients of some batches on two stages equal those of plain PyTorch."""
    def build():
        torch.manual_seed(1)
        return make()

    data, mesh = [points([[2, 3]], seed=seed) for seed in range(batches)], Mesh(pipe=2)
    models = [build() for _ in range(2)]

    def rank(world):
        blocks, loss = models[world.rank]
        engine = Engine(blocks, world, mesh=mesh, loss=loss, dtype=torch.float64, **options)
        found = []
        for batch in data:
            engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.zero_grad()
            engine.evaluate(share(engine, batch))
        engine.close()
        return found

    ranks = run_ranks(rank, 2)
    blocks, loss = build()
    reference = Reference(blocks, loss=loss, dtype=torch.float64)
    for number, (batch,) in enumerate(data):
        reference.forward_backward(batch)
        assert_close(merge([found[number] for found in ranks], mesh), reference.gradients())


# ---------------------------------------------------------------------- taken

def by_its_own_number():
    cache = {}

    def step(self, x, y):
        old = cache.get(self.number)
        cache[self.number] = y.detach().mean()
        return y * cache[self.number] if old is None else y * cache[self.number] + 0 * old
    return four(step)


def by_a_text_and_a_size():
    masks, tables = {}, {}

    def step(self, x, y):
        key = f"layer{self.number}"
        other = (self.number, x.shape[1])
        if key not in masks:
            masks[key] = torch.full((), 1.0 + self.number, dtype=x.dtype)
        if other not in tables:
            tables[other] = torch.arange(4, dtype=x.dtype).cos() * self.number
        return y * masks[key] + tables[other]
    return four(step)


def in_a_list_and_a_cache_object():
    class Cache:
        def __init__(self):
            self.keys = {}

        def update(self, key, number):
            self.keys[number] = key
            return self.keys[number]

    maps, cache = [None] * 4, Cache()

    def step(self, x, y):
        maps[self.number] = torch.softmax(x.detach(), -1)
        return y * maps[self.number] + 0 * cache.update(x.detach(), self.number)
    return four(step)


def of_logs_and_timers():
    times, stats, table, calls = {}, SimpleNamespace(mean=0.0, var=torch.zeros(4)), {"sum": 0.0}, 0

    def step(self, x, y):
        nonlocal calls
        begun, name, size = time.perf_counter(), type(self).__name__, float(y.detach().abs().mean())
        calls += 1
        stats.mean = 0.9 * stats.mean + 0.1 * size
        stats.var.mul_(0.9).add_(y.detach().var(0, unbiased=False))
        table["sum"] = table["sum"] + size
        times[name] = times.get(name, 0.0) + time.perf_counter() - begun
        return y + 0 * y.mean()
    return four(step)


def a_longest_length():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.longest, self.table = 2, None

        def forward(self, x):
            if self.table is None or x.shape[-1] > self.longest:
                self.longest = max(x.shape[-1], self.longest)
                self.table = torch.arange(self.longest, dtype=x.dtype).cos()
            return x * self.table

    rotary = Rotary()
    blocks, loss = four(lambda self, x, y: self.rotary(y))
    for block in blocks:
        block.rotary = rotary
    return blocks, loss


def said_to_be_each_stages_own():
    class Timer:
        ranvier_per_stage = True
        started = total = 0.0

        def __enter__(self):
            self.started = time.perf_counter()

        def __exit__(self, *_):
            self.total += time.perf_counter() - self.started

    class Workspace(dict):
        ranvier_per_stage = True

    timer, workspace, log = Timer(), Workspace(), SimpleNamespace(ranvier_per_stage=True, step=0, lines=[])

    def step(self, x, y):
        log.step += 1
        if log.step % 3 == 0:
            log.lines.append(log.step)
        with timer:
            buffer = workspace.setdefault(x.shape, torch.empty_like(x.detach()))
            buffer.copy_(x.detach())
        return y + 0 * buffer.mean()
    return four(step)


TAKEN = [by_its_own_number, by_a_text_and_a_size, in_a_list_and_a_cache_object, of_logs_and_timers, a_longest_length,
         said_to_be_each_stages_own]


@pytest.mark.parametrize("options", [{}, {"pipeline": V_SHAPE, "memory": Memory(recompute=1)}],
                         ids=["two ranks", "four stages recomputed"])
@pytest.mark.parametrize("make", TAKEN)
def test_what_no_other_stage_reads_is_taken(make, options):
    train(make, **options)


# ---------------------------------------------------------------------- refused

def by_the_number_of_another():
    cache = {}

    def step(self, x, y):
        cache[self.number] = y.detach().mean()
        return y * (1 + cache.get(self.source, 0.0))

    blocks, loss = four(step)
    for block in blocks:
        block.source = max(block.number - 2, 0)
    return blocks, loss


def by_a_number_chosen():
    cache = {}

    def step(self, x, y):
        cache[self.number] = y.detach().mean()
        key = 0 if self.number == 3 else self.number
        return y * (1 + cache.get(key, 0.0))
    return four(step)


def by_a_view_made_in_the_forward():
    cache = {}

    class View:
        def __init__(self, number):
            self.number = number

        def read(self):
            return cache.get(self.number, 0.0)

    def step(self, x, y):
        cache[self.number] = y.detach().mean()
        return y * (1 + View(self.number % 2).read())
    return four(step)


def by_a_function_with_another_self():
    cache = {}

    def step(self, x, y):
        def of(self):
            return cache.get(self.number, 0.0)

        cache[self.number] = y.detach().mean()
        return y * (1 + of(SimpleNamespace(number=0)))
    return four(step)


def by_a_default():
    cache = defaultdict(float)

    def step(self, x, y):
        cache[self.number] = float(y.detach().mean())
        return y * (1 + cache[0])
    return four(step)


def from_the_end():
    values = [0.0]

    def step(self, x, y):
        if self.number < 2:
            values.append(float(y.detach().mean()))
        return y * (1 + values[-1])
    return four(step)


def another_key_after_its_own():
    cache = {0: 0.0, 1: 0.0}

    def step(self, x, y):
        key = self.number
        cache[key] = float(y.detach().mean())
        key = max(key - 2, 0)
        return y * (1 + cache[key])
    return four(step)


def the_greatest_of_all():
    table = {"most": 1e-3}

    def step(self, x, y):
        table["most"] = max(table["most"], float(y.detach().abs().max()))
        return y / table["most"]
    return four(step)


def the_greatest_on_its_way():
    stats = SimpleNamespace(most=0.0)

    def step(self, x, y):
        most = stats.most = max(stats.most, float(y.detach().abs().max()))
        return y * most
    return four(step)


def decided_by_the_greatest():
    stats = SimpleNamespace(most=0.0)

    def step(self, x, y):
        size = float(y.detach().abs().mean())
        if size > stats.most:
            stats.most = size
        else:
            y = y * 2
        return y
    return four(step)


def a_function():
    context = SimpleNamespace(scale=lambda y: y)

    def step(self, x, y):
        if self.number == 0:
            size = float(x.detach().abs().mean())
            context.scale = lambda y: y * size
        return context.scale(y)
    return four(step)


def one_attribute_for_another():
    context = SimpleNamespace(other=0)

    def step(self, x, y):
        if self.number == 0:
            context.__dict__.pop("other", None)
            context.scale = float(x.detach().mean())
        return y * (1 + getattr(context, "scale", 0.0))
    return four(step)


def in_one_of_two_of_a_name():
    log = SimpleNamespace(scale=1.0)

    def step(self, x, y):
        if self.number == 0:
            log.scale = float(x.detach().mean())
        return y * log.scale * self.log.unit
    return four(step, log=SimpleNamespace(unit=1.0))


def in_much_data():
    values, array = [0.0] * 20_000, numpy.zeros((600, 1000))

    def step(self, x, y):
        if self.number == 0:
            values.append(float(x.detach().mean()))
            array[:] = float(x.detach().mean())
        return y * (1 + values[-1] + float(array[3, 3]))
    return four(step)


def by_the_number_of_the_class():
    cache = {}

    def lookup(cls):
        return cache.get(cls.number, 1.0)

    def step(self, x, y):
        cache[self.number] = y.detach().mean()
        return y * self.lookup() if self.number else y
    return four(step, number=0, lookup=classmethod(lookup))


def by_what_changes_its_argument():
    notes = SimpleNamespace(high=1.0)

    def step(self, x, y):
        z = y.clone()
        torch.clamp_(z, -1.0, notes.high)
        if self.number == 0:
            notes.high = 0.5 * float(y.detach().max())
        return z
    return four(step)


def by_another_max():
    def step(self, x, y):
        z = y.clone()
        max(z, notes.factor)  # noqa: F821
        if self.number == 0:
            notes.factor = float(y.detach().mean())  # noqa: F821
        return z
    names = {"__name__": __name__, "notes": SimpleNamespace(factor=1.0), "max": lambda z, factor: z.mul_(factor)}
    return four(FunctionType(step.__code__, names))


class Mixed(dict):
    """Keeps half of the old value."""

    def __setitem__(self, key, value):
        super().__setitem__(key, 0.5 * (value + self.get(key, value)))


def in_a_container_with_code():
    cache = Mixed()

    def step(self, x, y):
        cache["mean"] = y.detach().mean()
        return y * cache["mean"]
    return four(step)


def by_an_iterator():
    numbers = itertools.count(1)
    return four(lambda self, x, y: y / next(numbers))


def by_a_factory_of_defaults():
    made = []

    def new():
        made.append(1)
        return float(len(made))

    table = defaultdict(new)
    return four(lambda self, x, y: y / table[self.number])


def by_a_mark():
    context = SimpleNamespace(done=False)

    def step(self, x, y):
        if not context.done:
            context.done = True
            y = y * 3
        return y
    return four(step)


def in_an_object_that_a_forward_makes():
    context = SimpleNamespace(size=None)

    def step(self, x, y):
        if context.size is None:
            context.size = SimpleNamespace(mean=float(x.detach().abs().mean()))
        return y * context.size.mean
    return four(step)


def by_the_key_before():
    table = {}

    def step(self, x, y):
        table[self.number] = table.get(self.number - 1, 1.0) * 1.5
        return y * table[self.number]
    return four(step)


def by_a_key_that_a_loop_changes():
    table = dict.fromkeys(range(4), 1.0)

    def step(self, x, y):
        key = self.number
        table[key] = float(x.detach().abs().mean())
        for _ in range(2):
            y = y * table[key]
            key = 0
        return y
    return four(step)


def by_code_without_source():
    names = {"context": SimpleNamespace(calls=0)}
    exec("def step(self, x, y):\n    context.calls += 1\n    return y / context.calls", names)
    return four(names["step"])


def read_by_another_self():
    class Keeps(Layer):
        last = 1.0

        def forward(self, x):
            self.last = float(x.detach().abs().mean())
            return super().forward(x)

    first = Keeps(0)

    class Reads(Layer):
        def forward(self, x):
            y = super().forward(x)
            self = first
            return y * self.last

    return [first, Layer(1), Layer(2), Reads(3)], squared


def by_the_first(write, read):
    def step(self, x, y):
        if self.number == 0:
            write(1 + float(x.detach().abs().mean()))
        return y * read()
    return four(step)


def in_a_context_variable():
    scale = ContextVar("scale", default=1.0)
    return by_the_first(lambda value: scale.set(value), lambda: scale.get())


def in_a_weak_dict():
    table = WeakKeyDictionary()
    return by_the_first(lambda value: table.update({nn.Module: value}), lambda: table.get(nn.Module, 1.0))


def by_a_generator_of_torch():
    generator = torch.Generator().manual_seed(1)
    return four(lambda self, x, y: y * torch.rand((), generator=generator, dtype=y.dtype))


def by_a_generator_of_python():
    numbers = Random(1)
    return four(lambda self, x, y: y * numbers.random())


def by_a_generator_of_numpy():
    numbers = numpy.random.default_rng(1)
    return four(lambda self, x, y: y * numbers.random())


def by_a_backward_hook():
    context = SimpleNamespace(scale=1.0)
    blocks, loss = four(lambda self, x, y: y * context.scale if self.number == 0 else y)
    blocks[3].register_full_backward_hook(
        lambda module, _, gradients: setattr(context, "scale", float(1 + gradients[0].abs().mean())))
    return blocks, loss


def by_the_backward_of_a_function():
    context = SimpleNamespace(scale=1.0)

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            context.scale = float(1 + gradient.abs().mean())
            return gradient

    return four(lambda self, x, y: Passes.apply(y) if self.number == 3 else y * context.scale)


@pytest.mark.parametrize("make", [
    by_an_iterator, by_a_factory_of_defaults, by_a_mark, in_an_object_that_a_forward_makes, by_the_key_before,
    by_a_key_that_a_loop_changes, by_code_without_source, read_by_another_self, in_a_context_variable, in_a_weak_dict,
    by_a_generator_of_torch, by_a_generator_of_python, by_a_generator_of_numpy, by_the_number_of_the_class,
    by_what_changes_its_argument, by_another_max, in_a_container_with_code, by_the_number_of_another,
    by_a_number_chosen, by_a_view_made_in_the_forward, by_a_function_with_another_self, by_a_default,
    from_the_end, another_key_after_its_own, the_greatest_of_all, the_greatest_on_its_way, decided_by_the_greatest,
    a_function, in_one_of_two_of_a_name, one_attribute_for_another, in_much_data, by_a_backward_hook,
    by_the_backward_of_a_function])
def test_what_another_stage_reads_is_refused(make):
    with pytest.raises(ModelError) as caught:
        train(make)
    assert caught.value.code in REFUSED


@pytest.mark.parametrize("make", [by_a_backward_hook, by_the_backward_of_a_function])
def test_what_a_backward_leaves_is_refused_where_stages_take_turns(make):
    with pytest.raises(ModelError) as caught:
        train(make, batches=1, pipeline=V_SHAPE)
    assert caught.value.code in REFUSED


def test_stages_of_one_rank_that_nobody_can_compare_are_refused():
    """Blocks 0 and 3 are on one rank, where microbatches take turns: block 3 may read another microbatch's value."""
    class Keeps(Layer):
        last = None

        def forward(self, x):
            self.last = x.detach().mean()
            return super().forward(x)

    def make():
        blocks = [Keeps(0), Layer(1), Layer(2), Layer(3)]
        first, inner = blocks[0], blocks[3].forward
        blocks[3].forward = lambda x: inner(x) * (1 + (0 if first.last is None else first.last))
        return blocks, squared

    with raises("shared-container-changes", where="attribute 0.last"):
        train(make, pipeline=V_SHAPE)


def test_the_error_says_how_to_keep_a_log():
    def make():
        log = SimpleNamespace(step=0, lines=[])

        def step(self, x, y):
            log.step += 1
            if log.step % 3 == 0:
                log.lines.append(log.step)
            return y
        return four(step)

    with raises("shared-container-changes", "ranvier_per_stage") as caught:
        train(make)
    assert caught.value.where.endswith("log.step")


# ---------------------------------------------------------------------- what it costs

def test_steady_places_are_compared_at_once(monkeypatch):
    """After the first batch, places that do not change are not inspected again."""
    looks, batches = [], 4

    def look(watch):
        looks.extend([watch.place.at.path] if hasattr(watch, "marks") else [])  # not at the first time
        inner(watch)

    inner = Watch._look
    monkeypatch.setattr(Watch, "_look", look)
    settings = {"scale": 2.0, "sizes": [1, 2], "inner": {"of": (3, {4})}}
    train(lambda: four(lambda self, x, y: y * settings["scale"] * len(settings)), batches=batches)
    assert not looks
    train(by_its_own_number, batches=batches)
    assert {name.rpartition(".")[2] for name in looks} == {"cache"}
