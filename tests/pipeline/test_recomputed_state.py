"""Changes that blocks make to their state and themselves under recomputation: made once, or refused by name."""

import random
import warnings
from dataclasses import replace
from functools import partial
from threading import Lock
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from ranvier.block import Model
from ranvier.config.run import Memory, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.segment import Segment
from ranvier.tensor.state_snapshot import StateSnapshot
from ranvier.testing.reference import Reference
from tests.covering import covering, pairwise
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_parity, gradients_on, on_mesh, points, share, squared

linear = partial(nn.Linear, 4, 4)


SEEDING = Lock()


def model(*blocks):
    """A model with its builders' values, always the same: ranks are threads, which share torch's generator."""
    def build(number, block):
        with SEEDING:
            torch.manual_seed(number)
            return block()

    return Model(blocks={f"b{number}": partial(build, number, block) for number, block in enumerate(blocks)},
                 loss=squared)


# ---------------------------------------------------------------------- buffers

class Tanh(nn.Module):
    """A layer with other modules before and after it."""

    def __init__(self, before=nn.Identity, after=nn.Identity):
        super().__init__()
        self.before, self.linear, self.after = before(), linear(), after()

    def forward(self, x):
        return torch.tanh(self.after(self.linear(self.before(x))))


class Averaged(nn.Module):
    """Subtracts a running mean, which it keeps in a buffer that is written in place, in its data, or replaced."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x.detach().mean(0)
        y = x - self.mean + self.first
        now = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.how == "replaced":
            self.mean = now
        elif self.how == "in place":
            self.mean.copy_(now)
        else:
            self.mean.data.copy_(now)
        return y


class Counts(nn.Module):
    """Counts its calls, computes with the count, and remembers a tensor from the first call."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = linear(), 0

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "first"):
            self.first = x.detach().mean()
        self.last = torch.tanh(self.linear(x))
        return self.last * self.calls + self.first


class Remembers(nn.Module):
    """Computes with what earlier calls left in a list, a dict of lists, a tensor that is not a buffer, and a set."""

    def __init__(self):
        super().__init__()
        self.linear, self.means, self.sums, self.seen = linear(), [0.5], {"all": [0.5]}, set()
        self.decayed = torch.ones((), dtype=torch.float64)

    def forward(self, x):
        self.means.append(float(x.detach().mean()))
        self.sums["all"].append(float(x.detach().sum()))
        self.seen.add(len(self.means))
        self.decayed.mul_(0.5).add_(x.detach().mean())
        factor = self.means[-2] + self.sums["all"][-2] + len(self.seen) + self.decayed.clone()
        return torch.tanh(self.linear(x)) * factor


class HasObjects(nn.Module):
    """Computes with counts in an object of another class, and in an object inside that one."""

    def __init__(self):
        super().__init__()
        self.linear, self.settings = linear(), SimpleNamespace(calls=0, inner=SimpleNamespace(calls=0, means=[]))

    def forward(self, x):
        inner = self.settings.inner
        self.settings.calls, inner.calls = self.settings.calls + 1, inner.calls + 1
        inner.means.append(float(x.detach().mean()))
        return torch.tanh(self.linear(x)) * (self.settings.calls + inner.calls + inner.means[-1])


class MakesLater(nn.Module):
    """From the third forward on, changes in place what the second has made: a plain tensor, and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.mean = linear(), 0, None
        self.register_buffer("sum", None)

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.mean, self.sum = x.detach().mean(0), x.detach().sum(0)
        elif self.calls > 2:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            self.sum.add_(x.detach().sum(0))
        return torch.tanh(self.linear(x)) * (1 if self.mean is None else self.mean + self.sum)


class Draws(nn.Module):
    """Computes with numbers of its own generators of each kind; it also has one of the system's, without a state."""

    def __init__(self):
        super().__init__()
        self.unused = random.SystemRandom()
        self.linear, self.own = linear(), torch.Generator().manual_seed(3)
        self.others = [random.Random(3), numpy.random.RandomState(3), numpy.random.default_rng(3)]

    def forward(self, x):
        factor = torch.rand((), generator=self.own) + sum(one.uniform(0, 1) for one in self.others)
        return torch.tanh(self.linear(x)) * (1 + factor)


class Shared(nn.Module):
    """Uses one normalisation twice, and one buffer under two names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scale = Averaged("in place")
        self.register_buffer("mean", self.scale.mean)

    def forward(self, x):
        return self.norm(x) + self.norm(self.scale(x) + self.mean)


class Overlapping(nn.Module):
    """Its statistics are two views of a buffer that it reads as a whole; another buffer is a conjugate view of one that
    it changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_buffer("both", torch.ones(2, 4, dtype=torch.float64))
        self.norm.running_mean, self.norm.running_var = self.both
        self.register_buffer("wave", torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
        self.register_buffer("mirrored", self.wave.conj())

    def forward(self, x):
        y = self.norm(x) * self.both.sum() * (2 * self.wave + self.mirrored).imag.sum().exp()
        with torch.no_grad():
            self.wave.mul_(1.1j)
        return y


KEPT = {"batch norm": partial(Tanh, after=partial(nn.BatchNorm1d, 4)),
        "cumulative batch norm": partial(Tanh, after=partial(nn.BatchNorm1d, 4, momentum=None)),
        "instance norm": partial(Tanh, after=lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())),
        "spectral norm": lambda: parametrizations.spectral_norm(linear()),
        "spectral norm by a hook": lambda: spectral_norm(linear()),
        "weight norm by a hook": lambda: weight_norm(linear()),
        "pruned": lambda: prune.l1_unstructured(linear(), "weight", 3),
        "shared": Shared, "views of each other": partial(Tanh, after=Overlapping),
        "attributes": Counts, "made later": MakesLater, "what is in attributes": Remembers,
        "objects": HasObjects, "own generators": Draws,
        **{f"average {how}": partial(Tanh, before=partial(Averaged, how))
           for how in ("in place", "in data", "replaced")}}


@pytest.mark.filterwarnings("ignore:.*(weight_norm|lower than).*")
@pytest.mark.parametrize(("block", "recompute"), covering(list(KEPT), [1, 2]))
def test_buffers_change_once(block, recompute):
    """Gradients and buffers of several steps are those of plain torch, with several microbatches in flight."""
    make = partial(model, linear, KEPT[block], KEPT[block], linear)
    batches = [points([[3, 2, 4]], seed=seed) for seed in range(2)]
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    expected = []
    for batch in batches:
        reference.forward_backward(batch[0])
        expected.append(reference.gradients())
    buffers = {f"{block}.{name}": buffer for block, module in reference.modules.items()
               for name, buffer in module.named_buffers()}

    def work(engine):
        found = []
        for batch in batches:
            engine.zero_grad()
            engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
        assert [module.calls for module in engine.blocks.values() if isinstance(module, Counts)] in ([], [6])
        return found, {name: buffer.clone() for name, buffer in engine.named_buffers().items()}

    ranks = on_mesh(make, Mesh(pipe=2), work, memory=Memory(recompute=recompute))
    for step, gradients in enumerate(expected):
        found = {name: value for found, _ in ranks for name, value in found[step].items()}
        for name, gradient in gradients.items():  # the gradient of a bias before a normalisation is zero
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    found = {name: value for _, kept in ranks for name, value in kept.items()}
    assert buffers or block in ("weight norm by a hook", "attributes", "what is in attributes", "objects",
                                "own generators")
    for name, buffer in buffers.items():
        torch.testing.assert_close(found[name], buffer, rtol=1e-10, atol=1e-12)


def test_a_buffer_that_changes_later_is_refused():
    """It is changed in place from the second batch on, and its earlier value is not kept."""
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = linear(), 0
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                self.count += 1
            return self.linear(x) * (1 + self.count)

    def work(engine):
        engine.forward_backward(share(engine, points([[1, 2]])))
        engine.forward_backward(share(engine, points([[1, 2]])))

    with raises("recompute-buffer-changed", "recompute", where="buffer b1.count"):
        on_mesh(partial(model, linear, Later), Mesh(), work, memory=Memory(recompute=1))


@pytest.mark.parametrize("held", [
    lambda: [torch.zeros(())], lambda: {"count": torch.zeros(())}, lambda: SimpleNamespace(count=torch.zeros(())),
    lambda: numpy.zeros(1), lambda: [numpy.zeros(1)]], ids=["list", "dict", "object", "array", "array in a list"])
def test_what_is_changed_in_place_in_attributes_is_refused(held):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.held = linear(), held()

        def forward(self, x):
            held = self.held if not isinstance(self.held, SimpleNamespace) else vars(self.held)
            count = held if isinstance(held, numpy.ndarray) else held["count"] if isinstance(held, dict) else held[0]
            count += 1
            return self.linear(x) * count.item()

    def work(engine):
        engine.forward_backward(share(engine, points([[1, 2]])))

    with raises("recompute-held-changed", "recompute", where="attribute b1.held"):
        on_mesh(partial(model, linear, Counts), Mesh(), work, memory=Memory(recompute=1))


def test_a_second_run_with_other_tensors_is_named():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            parts = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
            return x + torch.cat(list(self.linear(parts).unbind()))

    with raises("recompute-differs", "recompute"):
        gradients_on(partial(model, linear, Nested), points([[3]]), Mesh(), memory=Memory(recompute=1))


class Changes(nn.Module):
    """Changes its parameter in place, before or after it reads it."""

    def __init__(self, change, *, late=False):
        super().__init__()
        self.linear, self.scale, self.change, self.late = linear(), nn.Parameter(torch.full((4,), 2.0)), change, late

    def forward(self, x):
        y = torch.tanh(self.linear(x) + self.scale) if self.late else None
        with torch.no_grad():
            self.change(self.scale)
        return torch.tanh(self.linear(x) + self.scale) if y is None else y


class Looks(nn.Module):
    """Looks up rows; the forward limits their norms."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = linear(), nn.Embedding(2, 4, max_norm=0.5)

    def forward(self, x):
        both = torch.tensor([0, 1], device=x.device)
        return torch.tanh(self.linear(x) * self.rows(both).sum(0))


@pytest.mark.parametrize("recompute", [1, "selective"])
@pytest.mark.parametrize("block", [partial(Changes, lambda scale: scale.clamp_(0, 1.5)), Looks],
                         ids=["clamps", "norms"])
def test_a_parameter_that_a_second_forward_leaves_alone(block, recompute):
    assert_parity(partial(model, linear, block, linear), points([[3, 2, 4]]), Mesh(pipe=2),
                  memory=Memory(recompute=recompute))


@pytest.mark.parametrize(("change", "late"), [(lambda scale: scale.mul_(0.9), False),
                                              (lambda scale: scale.clamp_(0, 1.5), True)], ids=["again", "late"])
def test_a_parameter_that_a_forward_changes_is_refused(change, late):
    with raises("recompute-parameter-changed", "recompute", where="parameter b1.scale"):
        gradients_on(partial(model, linear, partial(Changes, change, late=late)), points([[1, 2]]), Mesh(),
                     memory=Memory(recompute=1))


@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("common", [random, numpy.random])
def test_python_and_numpy_draw_once(common, least):
    """With generators that a program shares: the second run draws the first one's numbers and advances no generator,
    whether each microbatch draws or only the last one."""
    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return x + torch.tanh(self.linear(x)) * (common.uniform(0, 1) if len(x) > least else 1.0)

    make, batch = partial(model, linear, LayerDrop, LayerDrop, linear), points([[3, 2, 4]])
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    common.seed(5)
    reference.forward_backward(batch[0])
    drawn = common.uniform(0, 1)

    def work(engine):
        common.seed(5)
        engine.forward_backward(share(engine, batch))
        assert common.uniform(0, 1) == drawn
        return engine.gradients()

    found, = on_mesh(make, Mesh(), work, memory=Memory(recompute=2))
    for name, gradient in reference.gradients().items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


class Common(nn.Module):
    """An object of two blocks: one writes values there that the other reads."""

    def __init__(self):
        super().__init__()
        self.items, self.sum = {"mean": 1.0}, torch.ones((), dtype=torch.float64)
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))


LEFT = {"item": (lambda common, mean: common.items.update(mean=mean), lambda common: common.items["mean"]),
        "buffer": (lambda common, mean: setattr(common, "mean", mean), lambda common: common.mean),
        "buffer in place": (lambda common, mean: common.mean.add_(mean), lambda common: common.mean.clone()),
        "tensor in place": (lambda common, mean: common.sum.add_(mean), lambda common: common.sum.clone())}


@pytest.mark.parametrize(("how", "late", "recompute"), covering(list(LEFT), [False, True], [1, "selective"]))
def test_what_blocks_share_beside_the_state(how, late, recompute):
    """A block reads what another block has left, in this microbatch or the previous one; its second run reads the same
    as the first."""
    leave, read = LEFT[how]

    def make():
        common = Common()

        class Leaves(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.common = linear(), common

            def forward(self, x):
                leave(self.common, x.detach().mean())
                return self.linear(x)

        class Reads(Leaves):
            def forward(self, x):
                return torch.tanh(self.linear(x)) * read(self.common)

        return model(*((Reads, Leaves) if late else (Leaves, Reads)), linear, linear)

    assert_parity(make, points([[3, 2, 4]]), Mesh(pipe=2), memory=Memory(recompute=recompute),
                  pipeline=Pipeline(boundaries=(2,)))


def test_a_shared_tensor_that_another_block_changes_later_is_refused():
    """It changes from the third forward on, and its value in earlier forwards is not kept."""
    def make():
        common = Common()

        class Later(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.common, self.calls = linear(), common, 0

            def forward(self, x):
                self.calls += 1
                if self.calls == 3:
                    self.common.mean.add_(1.0)
                return self.linear(x)

        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.common = linear(), common

            def forward(self, x):
                return torch.tanh(self.linear(x)) * self.common.mean.clone()

        return model(Reads, Later, linear, linear)

    with raises("recompute-buffer-changed", "recompute", where="buffer b0.common.mean"):
        gradients_on(make, points([[1, 2, 2, 1]]), Mesh(pipe=2), memory=Memory(recompute="alternate"),
                     pipeline=Pipeline(boundaries=(2,), in_flight=3))


def test_a_parameter_that_another_block_changes_is_refused():
    """Even by a block whose activations are stored."""
    def make():
        scale = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.scale = linear(), scale

            def forward(self, x):
                return torch.tanh(self.linear(x)) * self.scale.clone()

        class Averages(Reads):
            def forward(self, x):
                self.scale.lerp_(x.detach().mean(0), 0.1)
                return self.linear(x)

        return replace(model(Reads, Averages, linear, linear), tied=(("b0.scale", "b1.scale"),))

    with raises("recompute-parameter-changed", "recompute", where="parameter b0.scale"):
        gradients_on(make, points([[1, 2, 2]]), Mesh(), memory=Memory(recompute="alternate"))


def test_elements_that_hold_nothing_are_not_visited(monkeypatch):
    """They are restored all the same, as are the contents of lists among them."""
    visited, note = [], StateSnapshot._note
    monkeypatch.setattr(StateSnapshot, "_note", lambda self, value: (visited.append(value), note(self, value)))
    block = nn.Module()
    block.words, block.mixed = {str(number): number for number in range(100)}, [1, "a", ([2], torch.ones(()))]
    then = StateSnapshot([block])
    assert len(visited) == 2 + 2 + 2  # Python's and NumPy's generators, the attributes, the tuple and its list
    block.words["1"], block.words["new"] = -1, -1
    block.mixed[2][0].append(3)
    block.mixed.pop(0)
    with then.restored():
        assert block.words == {str(number): number for number in range(100)}
        assert len(block.mixed) == 3
        assert block.mixed[2][0] == [2]
    assert block.words["1"] == block.words["new"] == -1
    assert len(block.mixed) == 2
    assert block.mixed[1][0] == [2, 3]


# ---------------------------------------------------------------------- hooks

class HooksItsInput(nn.Module):
    """Scales the gradient that leaves it with a hook on its input."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("recompute", [1, 2, "selective"])
def test_a_hook_on_a_tensor_of_the_state_runs_once(recompute):
    assert_parity(partial(model, linear, HooksItsInput, HooksItsInput, linear), points([[2, 1, 3]]), Mesh(pipe=2),
                  memory=Memory(recompute=recompute))



class Leaky(nn.Module):
    def forward(self, x):
        return functional.rrelu(x, training=self.training)


@pytest.mark.parametrize("activation", [nn.RReLU, Leaky])
def test_random_slopes_are_there_where_they_are_the_last_thing_saved(activation):
    """rrelu saves their tensor before it fills it, and torch would end the second run there."""
    block = nn.Sequential(linear(), activation()).double()
    x = torch.randn(6, 4, dtype=torch.float64)

    def gradients(run):
        torch.manual_seed(3)
        return torch.autograd.grad(run(block, x).sum(), list(block.parameters()))

    again, plain = (gradients(run) for run in (Segment([("b", block)]).run, lambda f, x: f(x)))
    assert all(map(torch.equal, again, plain))


def test_hooks_of_others_are_refused():
    """When the engine is built, and when a hook is added afterwards."""
    def hooked():
        block = Tanh()
        block.linear.register_forward_hook(lambda module, inputs, output: None)
        return block

    def adds(engine):
        engine.forward_backward(share(engine, points([[1, 2]])))
        handle = engine.blocks["b1"].register_forward_pre_hook(lambda module, inputs: None)
        with raises("recompute-with-hook", where="b1"):
            engine.forward_backward(share(engine, points([[1, 2]])))
        handle.remove()

    with raises("recompute-with-hook", "<lambda>", "recompute", where="b1.linear"):
        on_mesh(partial(model, linear, hooked), Mesh(), lambda engine: None, memory=Memory(recompute=1))
    on_mesh(partial(model, linear, hooked), Mesh(), lambda engine: None)
    on_mesh(partial(model, linear, Tanh), Mesh(), adds, memory=Memory(recompute=1))


@pytest.mark.parametrize("recompute", ["none", 1])
def test_a_hook_of_all_modules_is_told_of_once(recompute):
    def work(engine):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                engine.forward_backward(share(engine, points([[1, 2]])))
        return sum("is called twice for modules" in str(one.message) for one in caught)

    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        found = on_mesh(partial(model, linear, Tanh), Mesh(), work, memory=Memory(recompute=recompute))
        assert found == [recompute == 1]
    finally:
        hook.remove()


# ---------------------------------------------------------------------- the carried state

class Opens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return {"h": self.linear(x), "mask": x[:, :1] > 0}


class Assigns(Opens):
    def forward(self, state):
        state["h"] = state["h"] + torch.tanh(self.linear(state["h"])) * state["mask"]
        return state


class Pops(Opens):
    def forward(self, state):
        h = state.pop("h")
        state.setdefault("before", h)
        state["h"] = h + torch.tanh(self.linear(h)) * state["mask"] + state["before"]
        return state


class Closes(Opens):
    def forward(self, state):
        return self.linear(state["h"]) * state["mask"]


@pytest.mark.parametrize(("block", "mesh", "recompute"), pairwise(
    [Assigns, Pops], [Mesh(), Mesh(data=2, pipe=2)], [1, 2, 3]))
def test_a_state_that_blocks_change(block, mesh, recompute):
    """A block puts new tensors into the dict that it was given, and removes others."""
    assert_parity(partial(model, Opens, block, block, block, Closes), points([[2, 1, 3]] * mesh.data), mesh,
                  memory=Memory(recompute=recompute))


class InPlace(Opens):
    """Changes a tensor of its state in place."""

    def forward(self, state):
        h = state["h"]
        h += torch.tanh(self.linear(h.clone()))
        return state


class Passes(Opens):
    """Needs the state's tensor again, and passes it on."""

    def forward(self, state):
        return {**state, "mask": state["mask"] * torch.tanh(self.linear(state["h"]))}


@pytest.mark.parametrize(("blocks", "where", "what"), [
    ([Opens, InPlace, Closes], "block b1", "tensor h of the carried state"),
    ([Opens, Passes, InPlace, Closes], "block b2", "tensor h of the carried state"),
    ([linear, partial(nn.ReLU, inplace=True), linear], "block b1", "the carried state"),
])
def test_a_tensor_that_is_changed_in_place_is_named(blocks, where, what):
    """If it is recomputed, and only then."""
    batches = points([[2, 1]])
    with raises("recompute-input-changed", what, "recompute", where=where):
        gradients_on(partial(model, *blocks), batches, Mesh(), memory=Memory(recompute=1))


def test_a_tensor_that_a_later_block_changes_in_place_is_named():
    """By the segment that needs it and has passed it on: the block that changes it is not recomputed."""
    def layered(*blocks):
        made = model(*blocks)
        return Model(blocks=made.blocks, loss=made.loss, layers=(("b0",), ("b1",)))

    with raises("recompute-input-changed", "tensor h of the carried state", where="block b1"):
        gradients_on(partial(layered, Opens, Passes, InPlace, Closes), points([[2, 1]]), Mesh(),
                     memory=Memory(recompute=1))


class WithinItself(nn.Module):
    """Changes its own tensors in place, as residual networks do."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        y = self.linear(x)
        y += x
        return functional.relu_(y)


@pytest.mark.parametrize("recompute", [1, 2])
def test_tensors_of_a_block_may_change_in_place(recompute):
    assert_parity(partial(model, linear, WithinItself, WithinItself, linear), points([[2, 1]]), Mesh(pipe=2),
                  memory=Memory(recompute=recompute))


def test_an_error_leaves_no_hooks_of_saved_tensors():
    """torch 2.11 would leave those of its checkpoint on the thread while the error is held, and remove others' then."""
    def fails(state):
        raise ValueError("of a block")

    with pytest.raises(ValueError, match="of a block") as held:
        Segment([("b0", linear())]).run(fails, torch.ones(1))
    x = torch.tensor(3.0, requires_grad=True)
    x.square().backward()
    assert x.grad == 6 and held.value.__context__ is None
