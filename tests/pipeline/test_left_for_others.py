"""Values that a forward leaves outside the carried state, where code of another stage would find them in a plain loop:
refused by name, and accepted if nothing else reads them or each stage makes the same."""

import random
import sys
import threading
from random import random as draw
from random import uniform
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.originals.object_contents import elements
from ranvier.pipeline.engine import Engine
from ranvier.plan.reached_objects import reached_from
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import points, share, squared

V_SHAPE = Pipeline(stages_per_rank=2)
PENALTIES = threading.local()  # each rank is a thread and has its own


class Penalised(nn.Module):
    """A layer that leaves a penalty with `leave`, and adds the penalties that it finds with `find`."""

    def __init__(self, leave=None, find=None):
        super().__init__()
        self.linear, self.leave, self.find = nn.Linear(4, 4), leave, find
        self.penalty = torch.zeros(())

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.leave is not None:
            self.leave(self, y.square().mean())
        return y if self.find is None else y + self.find()


def keep(module, penalty):
    module.penalty = penalty


def read_by_a_list():
    blocks = [Penalised(keep) for _ in range(3)]
    return [*blocks, Penalised(find=lambda: sum(block.penalty for block in blocks))], squared


def read_by_a_bound_method():
    class Reads(Penalised):
        def read(self):
            return self.penalty

    block = Reads(keep)
    return [block, Penalised(), Penalised(), Penalised(find=block.read)], squared


def in_an_object():
    class Context:
        total = 0.0

    context = Context()

    def leave(_, penalty):
        context.total = context.total + penalty

    def find():
        found, context.total = context.total, 0.0
        return found

    return [*(Penalised(leave) for _ in range(3)), Penalised(find=find)], squared


def in_a_global_object():
    def leave(_, penalty):
        PENALTIES.total = penalty

    def find():
        return getattr(PENALTIES, "total", 0.0)

    return [Penalised(leave), Penalised(), Penalised(), Penalised(find=find)], squared


def in_a_class():
    class Collects(Penalised):
        penalties: ClassVar[list[torch.Tensor]] = []

    def find():
        total = sum(Collects.penalties)
        Collects.penalties.clear()
        return total

    blocks = [Collects(lambda module, penalty: module.penalties.append(penalty)) for _ in range(3)]
    return [*blocks, Penalised(find=find)], squared


def by_a_constructor():
    class Penalty:
        all: ClassVar[list["Penalty"]] = []

        def __init__(self, value):
            self.value = value
            Penalty.all.append(self)

    def leave(_, penalty):
        if not isinstance(penalty, int):
            Penalty(penalty)

    def find():
        total = sum(one.value for one in Penalty.all)
        Penalty.all.clear()
        return total

    return [*(Penalised(leave) for _ in range(3)), Penalised(find=find)], squared


def by_hooks():
    blocks, found = [Penalised() for _ in range(4)], {}
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda _, __, y, number=number: found.__setitem__(number, y))
    return blocks, lambda y, t: (squared(y, t)[0] + sum(one.square().sum() for one in found.values()), t.numel())


def read_by_the_loss():
    blocks = nn.Sequential(*(Penalised(keep) for _ in range(4)))
    return blocks, lambda y, t: (squared(y, t)[0] + sum(block.penalty for block in blocks), t.numel())


class InTable(Penalised):
    """Writes its penalty into its part of a table; the last one reads another part."""

    def __init__(self, part, read=None, *, hold=setattr):
        super().__init__(lambda module, penalty: module.part.fill_(penalty.detach()))
        hold(self, "part", part)
        if read is not None:
            hold(self, "read", read)
            self.find = lambda: self.read.sum()


def in_a_part_of_a_table():
    table = torch.zeros(4, dtype=torch.float64)
    return [*(InTable(table[number]) for number in range(3)), InTable(table[3], read=table)], squared


def in_a_buffer_over_a_part_of_a_table():
    table = torch.zeros(4, dtype=torch.float64)
    return [InTable(table[0], hold=nn.Module.register_buffer), Penalised(), Penalised(),
            InTable(torch.zeros(()), read=table)], squared


def in_a_part_of_a_buffer():
    table = torch.zeros(4, dtype=torch.float64)
    return [InTable(table[0]), Penalised(), Penalised(),
            InTable(torch.zeros(()), read=table, hold=nn.Module.register_buffer)], squared


def in_parts_of_a_table_that_do_not_overlap():
    table = torch.zeros(4, dtype=torch.float64)
    return [*(InTable(table[number]) for number in range(3)), InTable(table[3], read=table[3:])], squared


def train(make, mesh, **options):
    models = [make() for _ in range(mesh.size)]
    batches = points([[2, 1, 3]])

    def rank(world):
        blocks, loss = models[world.rank]
        engine = Engine(blocks, world, mesh=mesh, loss=loss, dtype=torch.float64, **options)
        engine.forward_backward(share(engine, batches))
        engine.close()

    run_ranks(rank, mesh.size)


@pytest.mark.parametrize("options", [{}, {"pipeline": V_SHAPE}], ids=["two ranks", "four stages"])
@pytest.mark.parametrize(("make", "attribute"), [
    (read_by_a_list, "penalty"), (read_by_a_bound_method, "penalty"), (in_an_object, "context.total"),
    (in_a_global_object, "PENALTIES.total"), (in_a_class, "penalties"), (by_a_constructor, "all"), (by_hooks, "found"),
    (read_by_the_loss, "penalty"), (in_a_part_of_a_table, "part"),
    (in_a_buffer_over_a_part_of_a_table, "part"), (in_a_part_of_a_buffer, "part")])
def test_what_another_stage_would_find_is_refused(make, attribute, options):
    with raises("shared-container-changes") as caught:
        train(make, Mesh(pipe=2), **options)
    assert caught.value.where.startswith("attribute ") and caught.value.where.endswith(attribute)


def test_under_recomputation():
    with raises("shared-container-changes", "3.find.blocks[0].penalty", where="attribute 0.penalty"):
        train(read_by_a_list, Mesh(pipe=2), memory=Memory(recompute=1))


class Follows(nn.Module):
    """One of four numbered layers, whose forward is a function of (layer, input, output)."""

    def __init__(self, number, follow):
        super().__init__()
        self.number, self.linear, self.follow = number, nn.Linear(4, 4), follow

    def forward(self, x):
        return self.follow(self, x, torch.tanh(self.linear(x)))


def four(follow):
    return [Follows(number, follow) for number in range(4)], squared


def detached():
    blocks, loss = read_by_a_list()
    for block in blocks[:3]:
        block.leave = lambda module, penalty: keep(module, penalty.detach())
    return blocks, loss


def a_mask():
    context = SimpleNamespace(mask=torch.ones(()))

    def follow(block, x, y):
        if block.number == 0:
            context.mask = x > 0
        return y * context.mask if block.number == 3 else y
    return four(follow)


def a_number_by_computed_names():
    context = SimpleNamespace(scale=1.0)

    def follow(block, x, y):
        name = "".join(["sca", "le"])
        if block.number == 0:
            setattr(context, name, float(x.abs().mean()))
        return y * getattr(context, name) if block.number == 3 else y
    return four(follow)


def a_closure_variable():
    steps = 0

    def follow(block, x, y):
        nonlocal steps
        steps += block.number == 0
        return y * steps if block.number == 3 else y
    return four(follow)


def a_counted_layer():
    context = SimpleNamespace(layer=0)

    def follow(block, x, y):
        context.layer = 1 if block.number == 0 else context.layer + 1
        return y * context.layer
    return four(follow)


def a_mark_of_the_first_block():
    context = SimpleNamespace(forwards=None)

    def follow(block, x, y):
        block.forwards = getattr(block, "forwards", 0) + 1
        if context.forwards != block.forwards:
            context.forwards = block.forwards
            y = y * 2
        return y
    return four(follow)


def a_class_attribute():
    class Scale:
        value = 1.0

    def follow(block, x, y):
        if block.number == 0:
            Scale.value = float(x.abs().mean())
        return y * Scale.value if block.number == 3 else y
    return four(follow)


def a_default_argument():
    def follow(block, x, y, seen=[]):  # noqa: B006
        if block.number == 0:
            seen.append(float(x.abs().mean()))
        return y * sum(seen) if block.number == 3 else y
    return four(follow)


def an_array():
    scale = numpy.ones(2)

    def follow(block, x, y):
        if block.number == 0:
            scale[0] = float(x.abs().mean())
        return y * float(scale[0]) if block.number == 3 else y
    return four(follow)


def by_bound_methods_of_a_list():
    scales = [1.0]

    def follow(block, x, y):
        if block.number == 0:
            block.keep(float(x.abs().mean()))
        return y * block.kept(-1) if block.number == 3 else y

    blocks, loss = four(follow)
    blocks[0].keep, blocks[3].kept = scales.append, scales.__getitem__
    return blocks, loss


def by_a_method_that_a_text_names():
    class Scale:
        value = 1.0

        def keep(self, x):
            self.value = float(x.abs().mean())

    scale = Scale()

    def follow(block, x, y):
        if block.number == 0:
            getattr(scale, "keep")(x)  # noqa: B009
        return y * scale.value if block.number == 3 else y
    return four(follow)


def a_new_attribute_of_a_function():
    def scale_by(y):
        return y * getattr(scale_by, "value", 1.0)

    def follow(block, x, y):
        if block.number == 0:
            scale_by.value = float(x.abs().mean())
        return scale_by(y) if block.number == 3 else y
    return four(follow)


def a_tensor_in_place():
    scale = torch.ones(2)

    def follow(block, x, y):
        if block.number == 0:
            scale[0] = float(x.abs().mean())
        return y * float(scale[0]) if block.number == 3 else y
    return four(follow)


def a_tensor_by_its_data():
    scale = torch.ones(())

    def follow(block, x, y):
        if block.number == 0:
            scale.data = x.abs().mean()
        return y * scale if block.number == 3 else y
    return four(follow)


def a_module_of_torch():
    def follow(block, x, y):
        if block.number == 0:
            model.scale = float(x.abs().mean())
        return y * model.scale if block.number == 3 else y

    blocks, loss = four(follow)
    model = nn.Sequential(*blocks)
    model.scale = 1.0
    return model, loss


def a_registered_module():
    context = nn.Module()
    context.__class__ = type("Context", (nn.Module,), {"__module__": __name__})
    context.scale = 1.0

    def follow(block, x, y):
        if block.number == 0:
            block.context.scale = float(x.abs().mean())
        return y * block.context.scale if block.number == 3 else y

    blocks, loss = four(follow)
    for block in blocks:
        block.context = context
    return blocks, loss


def from_the_loss():
    context = SimpleNamespace(average=1.0)

    def loss(y, t):
        total, weight = squared(y, t)
        context.average = float(total.detach())
        return total, weight

    return four(lambda block, x, y: y * context.average if block.number == 0 else y)[0], loss


@pytest.mark.parametrize("make", [
    detached, a_mask, a_number_by_computed_names, a_closure_variable, a_counted_layer, a_mark_of_the_first_block,
    a_class_attribute, a_default_argument, an_array, by_bound_methods_of_a_list,
    by_a_method_that_a_text_names, a_new_attribute_of_a_function, a_tensor_in_place, a_tensor_by_its_data,
    a_module_of_torch, a_registered_module, from_the_loss])
def test_values_without_gradients_that_another_stage_would_read_are_refused(make):
    with pytest.raises(ModelError) as caught:
        train(make, Mesh(pipe=2))
    assert caught.value.code in ("shared-container-changes", "shared-container-differs")


def test_stages_that_make_different_values_are_told_before_the_update():
    def make():
        table = {}

        def follow(block, x, y):
            return y * table.setdefault("scale", float(x.detach().abs().mean()))
        return four(follow)

    with raises("shared-container-differs"):
        train(make, Mesh(pipe=2))


def made_alike():
    context, tables = SimpleNamespace(cos=None), {}

    def halves(size):
        if size in tables:
            return tables[size]
        new = torch.arange(size) / 2
        tables[size] = new
        return new

    def follow(block, x, y):
        if context.cos is None:
            context.cos = torch.arange(4, dtype=x.dtype).cos()
        y = y * halves(y.shape[1])
        if (key := x.shape[1]) not in tables:
            tables[key] = torch.arange(key, dtype=x.dtype).sin()
        return y * context.cos * tables[key]
    return four(follow)


def made_first_or_only_counted():
    context, log, means = SimpleNamespace(calls=0, scale=None), [], {}
    note = log.append

    class Counter:
        linear = 0

        def add(self, value):
            self.linear += 1
            means.setdefault(value, []).append(self)

    counter = Counter()  # blocks read their own `linear`

    def follow(block, x, y):
        context.calls += 1
        counter.add(block.number)
        context.device = x.device
        note(float(y.detach().to(context.device).mean()))
        log.append(block.number)
        means[block.number, 0] = y.detach()
        context.scale = y.mean()
        return y * context.scale
    return four(follow)


def drawn_from_pythons_own_generator():
    return four(lambda block, x, y: y * (2 if random.random() < uniform(2, 3) < 3 + draw() else 1))


def of_each_sibling_its_own():
    def follow(block, x, y):
        return y * len(siblings)

    class Keeps(Follows):
        def forward(self, x):
            if getattr(self, "table", None) is None:
                self.table = torch.arange(4, dtype=x.dtype).cos() * self.number
            self.last = super().forward(x) * self.table
            return self.last

    siblings = [Keeps(number, follow) for number in range(4)]
    return siblings, squared


def read_by_nobody():
    return [Penalised(keep) for _ in range(4)], squared


def normalised_beside_a_loss_that_has_the_model():
    blocks = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(4)))
    return blocks, lambda y, t: (squared(y, t)[0] * len(blocks), t.numel())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("make", "mesh"), [(made_alike, Mesh(pipe=2)), (made_first_or_only_counted, Mesh(pipe=2)),
                                            (drawn_from_pythons_own_generator, Mesh(pipe=2)),
                                            (of_each_sibling_its_own, Mesh(pipe=2)), (read_by_nobody, Mesh(pipe=2)),
                                            (in_parts_of_a_table_that_do_not_overlap, Mesh(pipe=2)),
                                            (normalised_beside_a_loss_that_has_the_model, Mesh(pipe=2)),
                                            (read_by_a_list, Mesh()), (in_an_object, Mesh()), (by_hooks, Mesh()),
                                            (in_a_part_of_a_table, Mesh())])
def test_what_no_other_stage_would_find_is_taken(make, mesh):
    train(make, mesh)


# ---------------------------------------------------------------------- the walk

linear = {"no": "global of a block, whose own attributes have such names"}


class Hostile(dict):
    """An attribute that a program may have, and whose code must not run."""

    __getattr__ = dict.__getitem__

    def values(self):
        raise AssertionError

    __iter__ = __len__ = __repr__ = items = values


def test_the_walk_runs_no_code_of_the_users_and_ends_at_data():
    class Slotted:
        __slots__ = ("of",)

        def __getattr__(self, name):
            raise ZeroDivisionError(name)

    class Block(Penalised):
        settings, slotted = Hostile(width=4), Slotted()

        def forward(self, x):
            return self.linear(x)

    block = Block()
    block.table, block.slotted.of = {number: [number] for number in range(10_001)}, [torch.zeros(())]
    block.kept = {Slotted(): [torch.ones(())]}
    found = [(one.name, type(one.value)) for one in reached_from("block", block)]
    assert ("block.settings", Hostile) in found and ("block.kept[Slotted]", list) in found
    assert len(found) < 20 and all(one.value is not linear for one in reached_from("block", block))
    assert elements(block.settings) == [4] and elements(block.table) == []


@pytest.mark.parametrize("uses_torch", [False, True])
def test_of_installed_packages_those_that_use_torch_are_followed(uses_torch, monkeypatch):
    package = ModuleType(f"plots_{uses_torch}")
    package.__file__ = f"/lib/site-packages/{package.__name__}/__init__.py"
    exec("found = []\ndef draw(x): found.append(x)", vars(package))
    if uses_torch:
        package.torch = torch
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(globals(), "plots", package)
    reached = [one.value for one in reached_from("loss", lambda y, t: plots.draw(y))]  # noqa: F821
    assert any(one is package.found for one in reached) == uses_torch


def test_modules_that_a_function_imports_are_followed(monkeypatch):
    module = ModuleType("settings_of_a_test")
    module.sizes = [1]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def loss(y, t):
        import settings_of_a_test
        return y * len(settings_of_a_test.sizes)

    assert any(one.value is module.sizes for one in reached_from("loss", loss))


REGISTERED = [[]]


class Registered(nn.Module):
    """Its constructor, which its forward never calls, reaches more than its forward, as many of PEFT's do."""

    def __init__(self):
        super().__init__()
        self.number = len(REGISTERED)

    def forward(self, x):
        return x if isinstance(self, Registered) and super().training else nn.Embedding.__init__


def test_ranks_find_objects_in_one_order_whatever_numbers_names_hash_to():
    """Methods that are not named yet wait until they are. A plan must be the same on every rank."""
    kept = {f"step{number}": [number] for number in range(12)}
    steps = type("Steps", (), {name: lambda self, found=found: found for name, found in kept.items()})()
    names_them = [[[eval(f"lambda one: ({','.join(f'one.{name}' for name in kept)})")]]]
    found = [one.value for one in reached_from("loss", lambda y, t: (steps, names_them))]
    assert [one for one in found if one in kept.values()] == list(kept.values())


def test_constructors_of_what_there_is_already_are_not_followed():
    assert all(one.value is not REGISTERED for one in reached_from("block", Registered()))


# ---------------------------------------------------------------------- what has no parameters of its own

def tied_by_memory():
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    blocks[3].weight = nn.Parameter(blocks[0].weight.data)
    return blocks, squared


def columns_of_one_tensor():
    whole, blocks = torch.randn(4, 8), [nn.Linear(4, 4) for _ in range(4)]
    blocks[0].weight, blocks[3].weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    return blocks, squared


def test_two_parameters_over_one_memory_are_refused():
    """Each update of one parameter would change the other, if both are on one rank."""
    with raises("parameters-over-one-memory", "0.weight", where="parameter 3.weight"):
        train(tied_by_memory, Mesh())
    train(columns_of_one_tensor, Mesh(pipe=2))


@pytest.mark.parametrize(("layer", "where"), [
    (nn.LazyLinear, "parameter 1.weight"), (lambda _: nn.LazyBatchNorm1d(affine=False), "buffer 1.running_mean")])
def test_a_parameter_or_buffer_without_a_shape_is_refused(layer, where):
    with raises("lazy-parameter", where=where):
        train(lambda: ([nn.Linear(4, 4), layer(4)], squared), Mesh())


def test_a_sparse_buffer_is_refused():
    def blocks():
        layer = nn.Linear(4, 4)
        layer.register_buffer("neighbours", torch.eye(4).to_sparse())
        return [nn.Linear(4, 4), layer], squared

    with raises("sparse-buffer", "torch.sparse_coo", where="buffer 1.neighbours"):
        train(blocks, Mesh())


@pytest.mark.parametrize("weight", [torch.zeros(4, 4).to_sparse(), TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4))],
                         ids=["sparse", "wrapper"])
def test_a_parameter_that_is_no_plain_tensor_is_refused(weight):
    def wrapped():
        blocks = [nn.Linear(4, 4) for _ in range(2)]
        blocks[1].weight = nn.Parameter(weight)
        return blocks, squared

    with raises("wrapped-parameter", f"{type(weight).__name__}, {weight.layout}", where="parameter 1.weight"):
        train(wrapped, Mesh())


def test_batch_norm_over_all_ranks_is_refused_on_several_stages():
    """It communicates with all ranks of torch.distributed."""
    def model(training=True):
        return [nn.Linear(4, 4), nn.Sequential(nn.SyncBatchNorm(4).train(training), nn.Linear(4, 4))], squared

    train(lambda: model(training=False), Mesh(pipe=2))
    run_ranks(lambda world: Engine(model()[0], world, mesh=Mesh(data=2), loss=squared).close(), 2)  # all ranks call it
    with raises("sync-batch-norm", where="module 1.0"):
        train(model, Mesh(pipe=2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_is_refused():
    with raises("scripted-module", where="module 1.0"):
        train(lambda: ([nn.Linear(4, 4), nn.Sequential(torch.jit.script(nn.Linear(4, 4)))], squared), Mesh())
