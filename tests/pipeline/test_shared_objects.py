"""Objects that blocks share by identity, on one stage, on several ranks, and on several stages of one rank."""

import random
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering, examples, quick
from tests.errors import raises
from tests.pipeline.drawn_models import REFUSED, Drawn, draw_model, loss
from tests.pipeline.parity import assert_close, merge, points, share, squared
from tests.pipeline.test_unusual_blocks import Plain

V_SHAPE, INTERLEAVED = Pipeline(stages_per_rank=2), Pipeline(stages_per_rank=2, placement="interleaved")


class Outer(nn.Module):
    """A block with a module that other blocks may have too, under two names, and a layer of its own."""

    def __init__(self, inner):
        super().__init__()
        self.own, self.inner, self.again = nn.Linear(4, 4), inner, inner

    def forward(self, x):
        return x + torch.tanh(self.again(self.own(x)))


class Unembed(nn.Module):
    """A head that multiplies by the weight of another block's layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return F.linear(x, self.layer.weight.t())


def tied(count, *groups):
    """Blocks of one linear layer each, with the weights of these groups of blocks tied."""
    blocks = [Plain() for _ in range(count)]
    for group in groups:
        for end in group[1:]:
            blocks[end].linear.weight = blocks[group[0]].linear.weight
    return blocks


def assert_training(make, mesh, pipeline, memory=None, counts=(2, 1, 3)):
    """Gradients and parameters of some steps equal those of plain PyTorch; afterwards blocks still share the same."""
    def build():
        torch.manual_seed(1)
        return make()

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    data = [points([counts] * mesh.data, seed=seed) for seed in range(2)]
    reference = Reference(build(), loss=squared, dtype=torch.float64, optimizer=optimizer)
    expected = []
    for batch in data:
        reference.train_batch([one for replica in batch for one in replica])
        expected.append(reference.gradients())
    models = [build() for _ in range(mesh.size)]
    sharing = [shared_names(model) for model in models]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=mesh, loss=squared, dtype=torch.float64, optimizer=optimizer,
                        pipeline=pipeline, memory=memory)
        found = []
        for batch in data:
            result = engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.step(result)
        parameters = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        engine.close()
        return found, parameters

    ranks = run_ranks(rank, mesh.size)
    for number, gradients in enumerate(expected):
        assert_close(merge([found[number] for found, _ in ranks], mesh), gradients)
    for _, parameters in ranks:
        known = {name: value for name, value in parameters.items() if name in reference.parameters}
        assert_close(known, {name: reference.parameters[name].detach() for name in known})
    assert [shared_names(model) for model in models] == sharing


def shared_names(blocks):
    """Groups of names that stand for one parameter."""
    names = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{number}.{name}")
    return sorted(group for group in names.values() if len(group) > 1)


@pytest.mark.parametrize(("ends", "mesh", "pipeline"), quick(4, covering(
    [([0, 2],), ([0, 3],), ([1, 2],), ([0, 1, 2],), ([0, 1, 3],), ([1, 2, 3],), ([0, 1, 2, 3],)],
    [(Mesh(data=2, pipe=2), V_SHAPE), (Mesh(pipe=2), INTERLEAVED), (Mesh(pipe=2), V_SHAPE),
     (Mesh(data=2, pipe=2), INTERLEAVED)])), ids=str)
def test_ends_on_two_stages_of_a_rank(ends, mesh, pipeline):
    assert_training(lambda: tied(4, ends), mesh, pipeline)


@given(st.randoms(use_true_random=False))
@examples(4)
def test_any_model_on_any_stages(draw: random.Random):
    """A model of `drawn_models`: three steps equal those of plain PyTorch, or it is refused before the first."""
    assert_drawn(draw_model(draw))


def assert_drawn(drawn: Drawn):
    data = [points([(2, 3)] * drawn.mesh.data, seed=seed) for seed in range(3)]

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=drawn.mesh, loss=loss, dtype=torch.float64, learning_rate=0.05,
                        optimizer=None if drawn.optim else optimizer, optim=drawn.optim, pipeline=drawn.pipeline,
                        memory=drawn.memory, seed=0)
        found = []
        for step, batch in enumerate(data):
            drawn.before_step(step, engine.named_parameters(), engine.blocks)
            result = engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.step(result)
        parameters = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        engine.close()
        return found, parameters

    models = [drawn.model() for _ in range(drawn.mesh.size)]
    if drawn.container in REFUSED:
        with pytest.raises(ModelError) as caught:
            run_ranks(rank, drawn.mesh.size)
        assert caught.value.where == "model" and "ranvier.blocks_of" in caught.value.remedy
        return
    reference = Reference(drawn.blocks(), loss=loss, dtype=torch.float64, optimizer=optimizer)
    expected = []
    for step, batch in enumerate(data):
        drawn.before_step(step, reference.parameters, reference.modules)
        reference.train_batch([one for replica in batch for one in replica])
        expected.append(reference.gradients())
    try:
        ranks = run_ranks(rank, drawn.mesh.size)
    except ModelError as error:
        assert drawn.differentiates_beside_a_hook and "has a hook of an earlier block" in error.what
        return
    for number, gradients in enumerate(expected):
        merged = merge([found[number] for found, _ in ranks], drawn.mesh)
        assert_close({name: one for name, one in merged.items() if name in gradients or one.any()}, gradients)
    for _, parameters in ranks:
        known = {name: value for name, value in parameters.items() if name in reference.parameters}
        assert_close(known, {name: reference.parameters[name].detach() for name in known})


def one_block_everywhere():
    return [Plain()] * 5


def inside_each_block():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return [Outer(inner) for _ in range(4)]


def embedding_and_head():
    embedding = nn.Linear(4, 4, bias=False)
    return [embedding, Plain(), Plain(), Unembed(embedding)]


def with_a_bound_method():
    class Own(Plain):
        def __init__(self):
            super().__init__()
            self.call = self.multiply

        def multiply(self, x):
            return self.linear(x)

        def forward(self, x):
            return torch.tanh(self.call(x))

    return [Own()] * 4


def with_hooks():
    blocks = tied(4, (0, 3))
    blocks[0].linear.weight.register_hook(lambda gradient: 2 * gradient)
    return blocks


SHARING = [one_block_everywhere, inside_each_block, embedding_and_head, with_a_bound_method, with_hooks]


@pytest.mark.parametrize(("make", "mesh", "pipeline", "memory"), [
    *((make, Mesh(pipe=2), V_SHAPE, Memory(recompute=1)) for make in SHARING),
    *covering(SHARING, [(Mesh(pipe=2), V_SHAPE, None), (Mesh(pipe=2), INTERLEAVED, None),
                        (Mesh(pipe=2), Pipeline(stages_per_rank=1), None), (Mesh(), None, None)])])
def test_shared_modules(make, mesh, pipeline, memory):
    assert_training(make, mesh, pipeline, memory)


@pytest.mark.parametrize("attribute", [lambda block: threading.Lock(), lambda block: block.linear.weight.data.t(),
                                       lambda block: nn.Buffer(block.linear.bias.detach()[1:])],
                         ids=["no copy", "view", "buffer"])
def test_a_module_that_cannot_be_copied_is_named(attribute):
    """A copy of a module with a view of its own parameter would have a view of the original's."""
    def make():
        block = Plain().double()
        block.kept = attribute(block)
        return [block] * 4

    assert_training(make, Mesh(pipe=2), Pipeline(stages_per_rank=1))
    with raises("shared-module-not-copied", "stages_per_rank=1", value="Plain"):
        assert_training(make, Mesh(pipe=2), V_SHAPE)


# ---------------------------------------------------------------------- buffers

class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), norm

    def forward(self, x):
        return self.norm(self.linear(x))


class Counting(nn.Module):
    """Changes a buffer, in place or not."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x):
        if self.training:
            self.seen = self.seen.add_(len(x)) if self.in_place else self.seen + len(x)
        return x


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        return self.scale * x


def normed(kind, *arguments, count=4):
    def make():
        norm = kind(*arguments)
        return [Normed(norm), *[Plain() for _ in range(count - 2)], Normed(norm)]
    return make


def counted_over_one_memory():
    ends = [Normed(Counting(True)) for _ in range(2)]
    ends[1].norm.seen = ends[0].norm.seen.view(())
    return [ends[0], Plain(), Plain(), ends[1]]


PLACES = pytest.mark.parametrize("pipeline", [V_SHAPE, Pipeline(stages_per_rank=1)], ids=["one rank", "two ranks"])


@PLACES
def test_a_batch_norm_of_two_stages_is_refused(pipeline):
    def rank(world):
        Engine(normed(nn.BatchNorm1d, 4)(), world, mesh=Mesh(pipe=2), loss=squared, pipeline=pipeline)

    with raises("shared-buffer-changes", "0.norm.running_mean", where="buffer 3.norm.running_mean",
                value="nn.BatchNorm1d"):
        run_ranks(rank, 2)


def test_a_batch_norm_of_one_stage_is_taken():
    assert_training(normed(nn.BatchNorm1d, 4), Mesh(), None, counts=(2, 3))
    assert_training(lambda: [nn.BatchNorm1d(4)] * 2 + [Plain()], Mesh(pipe=2),
                    Pipeline(stages_per_rank=1, boundaries=(2,)), counts=(2, 3))


@PLACES
@pytest.mark.parametrize("make", [normed(Counting, True), normed(Counting, False), counted_over_one_memory],
                         ids=["in place", "replaced", "a view"])
def test_a_shared_buffer_that_training_changes_is_named_before_the_update(make, pipeline):
    models = [make() for _ in range(2)]
    parameters = [parameter for end in (0, 3) for parameter in models[0][end].parameters()]
    before = [parameter.detach().clone() for parameter in parameters]

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(pipe=2), loss=squared, pipeline=pipeline,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        engine.train_batch([(torch.randn(2, 4), torch.randn(2, 4))] * 2)

    with pytest.raises(ModelError) as caught:
        run_ranks(rank, 2)
    assert caught.value.where in ("buffer 0.norm.seen", "buffer 3.norm.seen")
    assert all(torch.equal(value, parameter) for value, parameter in zip(before, parameters, strict=True))


@PLACES
def test_running_statistics_of_a_function_are_named(pipeline):
    """Its kernel changes no version counter, only values."""
    class Normalises(Plain):
        def __init__(self, mean, variance):
            super().__init__()
            self.register_buffer("mean", mean)
            self.register_buffer("variance", variance)

        def forward(self, x):
            return nn.functional.batch_norm(super().forward(x), self.mean, self.variance, training=True)

    def rank(world):
        statistics = torch.zeros(4), torch.ones(4)
        model = [Normalises(*statistics), Plain(), Plain(), Normalises(*statistics)]
        engine = Engine(model, world, mesh=Mesh(pipe=2), loss=squared, pipeline=pipeline)
        engine.forward_backward([(torch.randn(2, 4), torch.randn(2, 4))] * 2)

    with raises("shared-buffer-changes"):
        run_ranks(rank, 2)


@PLACES
def test_a_shared_buffer_that_stays_is_taken(pipeline):
    assert_training(normed(Constant), Mesh(pipe=2), pipeline)


@dataclass
class Found:
    loss: torch.Tensor


@pytest.mark.parametrize("pipeline", [Pipeline(), V_SHAPE])
@pytest.mark.parametrize("memory", [Memory(), Memory(recompute=1)], ids=["stored", "recomputed"])
@pytest.mark.parametrize("change", [lambda shared, x: shared["losses"].append(x.mean()),
                                    lambda shared, x: shared.update(mean={"of": (3, Found(x.mean()))})],
                         ids=["list", "dict"])
def test_a_shared_list_with_new_gradients_is_named_before_the_update(change, memory, pipeline):
    """Such as losses that blocks leave besides the carried state: a later stage lacks those of earlier stages."""
    class Leaves(Plain):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.losses = shared, shared["losses"]

        def forward(self, x):
            change(self.shared, x)
            return super().forward(x)

    def rank(world):
        shared = {"losses": []}
        blocks = [Leaves(shared) for _ in range(4)]
        engine = Engine(blocks, world, mesh=Mesh(pipe=2), loss=squared, pipeline=pipeline, memory=memory,
                        dtype=torch.float64)
        engine.forward_backward(share(engine, points([[1, 2]])))

    with raises("shared-container-changes") as caught:
        run_ranks(rank, 2)
    assert caught.value.where.startswith("attribute ")


@pytest.mark.parametrize("pipeline", [Pipeline(), V_SHAPE])
def test_what_blocks_memoize_log_or_replace_is_taken(pipeline):
    class Memoizes(Plain):
        def __init__(self, masks, seen, losses):
            super().__init__()
            self.masks, self.seen, self.losses = masks, seen, losses

        def forward(self, x):
            mask = self.masks.setdefault(tuple(x.shape), torch.linspace(0, 1, x.shape[-1], dtype=x.dtype))
            self.seen.append(float(x.detach().mean()))
            self.losses = [*self.losses[-1:], x.mean()]
            self.losses.append(x.sum())
            return super().forward(x) * mask

    def make():
        masks, seen, losses = {}, [], []
        masks["itself"] = masks
        return [Memoizes(masks, seen, losses) for _ in range(4)]

    assert_training(make, Mesh(pipe=2), pipeline)


def test_a_shared_list_that_stays_is_taken():
    class Reads(Plain):
        def __init__(self, sizes):
            super().__init__()
            self.sizes = sizes

        def forward(self, x):
            return super().forward(x) * self.sizes[0]

    def make():
        sizes = [2, 3]
        return [Reads(sizes) for _ in range(4)]

    assert_training(make, Mesh(pipe=2), Pipeline())
