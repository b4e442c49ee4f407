"""Parameters that a user writes or replaces between batches: the new value is trained, or an error names them."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from ranvier.checkpoint import state
from ranvier.config.run import Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.held_parameters import changed_norms, with_norms
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, label
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_parity, chain, points, share, squared

SGD = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {"flat": {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, bucket_size=7)},
              "streamed": {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, offload="stream")},
              "on host": {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, offload="host")},
              "torch": {"optimizer": SGD}}


def by_data(module, values):
    for name, parameter in module.named_parameters():
        parameter.data = values[name].to(parameter.dtype)


def by_vector(module, values):
    vector = torch.cat([values[name].reshape(-1) for name, _ in module.named_parameters()])
    nn.utils.vector_to_parameters(vector.to(next(module.parameters()).dtype), module.parameters())


def by_assign(module, values):
    dtype = next(module.parameters()).dtype
    module.load_state_dict({name: value.to(dtype) for name, value in values.items()}, assign=True)


def by_attribute(module, values):
    for name in ("weight", "bias"):
        setattr(module, name, nn.Parameter(values[name].to(module.weight.dtype)))


def new_values(number):
    generator = torch.Generator().manual_seed(number)
    return {"weight": torch.randn(4, 4, generator=generator, dtype=torch.float64),
            "bias": torch.randn(4, generator=generator, dtype=torch.float64)}


def trained(world, mesh, write, dtype=torch.float64, apart=False, **options):
    """Three steps on blocks that stay the same modules; `write` changes every block after the first step."""
    modules = [nn.Linear(4, 4) for _ in range(3)]
    with torch.no_grad():
        for number, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                parameter.copy_(new_values(10 + number)[name])
    engine = Engine(modules, world, mesh=mesh, loss=squared, seed=SEED, dtype=dtype, learning_rate=0.1, **options)
    for step in range(3):
        batch = share(engine, points([[2, 1]] * mesh.data, seed=step))
        batch = [type(one)(*(part if part is None or not part.is_floating_point() else part.to(dtype)
                             for part in (one.inputs, one.targets, one.samples))) for one in batch]
        if step == 1:
            for number, module in enumerate(modules):
                write(module, new_values(number))
        if apart:
            engine.step(engine.forward_backward(batch))
        else:
            engine.train_batch(batch)
    mine = engine.named_parameters()
    assert all(dict(modules[int(name[0])].named_parameters())[name[2:]] is parameter
               for name, parameter in mine.items())
    found = {name: parameter.detach().clone() for name, parameter in mine.items()}
    engine.close()
    return found


def in_place(module, values):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


@pytest.mark.parametrize(("write", "kind", "dtype", "mesh"), covering(
    [by_data, by_vector, by_assign, by_attribute], list(OPTIMIZERS), [torch.float64, torch.bfloat16],
    [Mesh(), Mesh(data=2, pipe=2)]), ids=label)
def test_new_values_train(mesh, dtype, kind, write):
    """Bit-identical to values that are written in place, and the parameter objects stay the same."""
    options = {**OPTIMIZERS[kind], "pipeline": Pipeline(defer_bytes=1 << 20)}
    expected, found = (run_ranks(partial(trained, mesh=mesh, write=one, dtype=dtype, **options), mesh.size)
                       for one in (in_place, write))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("mesh", "options"), [
    (Mesh(data=2), {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, bucket_size=7, shard=True)}),
    (Mesh(pipe=2), {"optimizer": SGD})], ids=["sharded", "tied"])
def test_a_program_writes_its_modules_as_soon_as_a_step_returns(mesh, options):
    """Values that other ranks updated used to arrive later and to overwrite what was written."""
    def rank(world, asks):
        modules = [nn.Linear(4, 4) for _ in range(4)]
        with torch.no_grad():
            for number, module in enumerate(modules):
                in_place(module, new_values(number))
        modules[3].weight = modules[0].weight
        engine = Engine(modules, world, mesh=mesh, loss=squared, dtype=torch.float64, learning_rate=0.1, **options)
        for step in range(3):
            engine.train_batch(share(engine, points([[2, 1]] * mesh.data, seed=step)))
            if asks:  # waits for values in transit
                engine.named_parameters()
            with torch.no_grad():
                for one in nn.ModuleList(modules).parameters():
                    one.mul_(0.5)
        return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}

    for mine, theirs in zip(*(run_ranks(partial(rank, asks=asks), mesh.size) for asks in (False, True)), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["flat", "torch"])
def test_new_values_train_step_by_step(kind):
    expected, found = (run_ranks(partial(trained, mesh=Mesh(), write=one, apart=True, **OPTIMIZERS[kind]), 1)[0]
                       for one in (in_place, by_assign))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_module_with_a_list_of_its_parameters_computes_with_those_of_the_start():
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, dtype=torch.float64)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = module

        def forward(self, x):
            return self.lstm(x)[0]

    def rank(world):
        engine = Engine([First()], world, loss=squared, optimizer=SGD)
        module.load_state_dict({name: one.detach() / 2 for name, one in module.named_parameters()}, assign=True)
        result = engine.forward_backward(points([[2, 3]])[0])
        lost = [name for name, gradient in engine.gradients().items() if not gradient.any()]
        engine.step(result)
        return lost, all(one is other for one, other in zip(module._flat_weights, module.parameters(), strict=True))

    assert run_ranks(rank, 1) == [([], True)]


def test_a_checkpoint_before_the_next_step_has_the_new_values():
    """In half precision a checkpoint has parameters and master copies: both have the new value."""
    def rank(world):
        module = nn.Linear(4, 4)
        engine = Engine([module], world, loss=squared, dtype=torch.bfloat16, optim=Optim())
        by_assign(module, new_values(0))
        pieces = {(piece.kind, piece.name): piece.tensor.clone() for piece in state.pieces_to_write(engine)}
        engine.close()
        return pieces

    (pieces,) = run_ranks(rank, 1)
    for name, value in new_values(0).items():
        assert torch.equal(pieces["parameter", f"0.{name}"], value.bfloat16())
        assert torch.equal(pieces["master", f"0.{name}"], value.bfloat16().float())


def exchange(first, second):
    first.weight.data, second.weight.data = second.weight.data, first.weight.data


def transpose(first, second):
    first.weight.data = first.weight.data.t()


def one_memory(first, second):
    first.weight.data = second.weight.data


def one_new_memory(first, second):
    first.weight.data = second.weight.data = torch.ones(4, 4)


def changed_after_a_step(change, kind):
    def work(world):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = Engine(model, world, loss=squared, learning_rate=0.1, **OPTIMIZERS[kind])
        for number in range(3):
            engine.train_batch([(x, x.flip(1)) for x in torch.linspace(-1, 1, 16 + number)[number:].view(1, 4, 4)])
            if number == 0:
                change(*model)
        engine.close()
        return model.state_dict()

    return run_ranks(work, 1)[0]


@pytest.mark.parametrize("kind", ["flat", "streamed", "on host"])
@pytest.mark.parametrize("change", [exchange, transpose])
def test_memory_that_parameters_have_already(change, kind):
    """Values are copied to where parameters belong, from where others belong."""
    mine, theirs = changed_after_a_step(change, kind), changed_after_a_step(change, "torch")
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [one_memory, one_new_memory])
def test_two_parameters_that_get_one_memory_are_refused(change):
    """In plain PyTorch both updates would change it."""
    with raises("parameters-over-one-memory", "1.weight", where="parameter 0.weight"):
        changed_after_a_step(change, "flat")


def test_both_ends_of_a_tie_that_are_written_keep_their_value():
    """The owner's value from the previous step arrives later, and must not overwrite it."""
    def rank(world):
        modules = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        modules[1].weight = modules[0].weight
        engine = Engine(modules, world, mesh=Mesh(pipe=2), loss=squared, dtype=torch.float64,
                        optim=OPTIMIZERS["flat"]["optim"])
        engine.train_batch(share(engine, points([[2]])))
        modules[world.rank].weight.data = new_values(0)["weight"]
        engine.evaluate(share(engine, points([[2]])))
        found = modules[world.rank].weight.detach().clone()
        engine.close()
        return found

    for found in run_ranks(rank, 2):
        assert torch.equal(found, new_values(0)["weight"])


def test_a_layer_that_is_replaced_gives_its_value():
    """Another module with parameters of the same names; one that is frozen stops training."""
    def rank(world):
        block = nn.Sequential(nn.Linear(4, 4))
        engine = Engine([block], world, loss=squared, dtype=torch.float64, optimizer=SGD)
        block[0] = nn.Linear(4, 4).to(torch.float64)
        block[0].bias.requires_grad_(False)
        old = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
        engine.train_batch(points([[2]])[0])
        new = dict(block.named_parameters())
        assert torch.equal(new["0.bias"], old["0.bias"]) and not torch.equal(new["0.weight"], old["0.weight"])
        assert new["0.weight"] is engine.named_parameters()["0.0.weight"]
        engine.close()

    run_ranks(rank, 1)


def other_shape(block):
    block[0].weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))


def other_shape_of_data(block):
    block[0].weight.data = torch.zeros(5, 4, dtype=torch.float64)


def added(block):
    block[0].scale = nn.Parameter(torch.ones(4, dtype=torch.float64))


def gone(block):
    block[0].bias = None


def two_values(block):
    block[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    block[1].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.parametrize(("change", "error"), [
    (other_shape, ("parameter-replaced-by-other-shape", 4, 5)),
    (other_shape_of_data, ("parameter-form-changed", 5, 4)),
    (lambda block: block.float(), ("parameter-form-changed", 4)),
    (added, ("parameter-added",)),
    (gone, ("parameter-gone",)),
    (two_values, ("tied-parameter-replaced",)),
    (lambda block: block.to("meta"), ("parameter-without-values",))])
def test_what_cannot_be_adopted_is_named(change, error):
    def rank(world):
        block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        block[1].weight = block[0].weight
        engine = Engine([block], world, loss=squared, dtype=torch.float64, optim=Optim())
        change(block)
        engine.train_batch(points([[2]])[0])

    with raises(*error):
        run_ranks(rank, 1)


def tie(model):
    model[2].weight = model[0].weight


def tie_by_a_new_one(model):
    model[2].weight = model[3].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize(("change", "mesh", "first"), [
    (tie, Mesh(), "0.weight"), (tie, Mesh(pipe=2), "0.weight"), (tie_by_a_new_one, Mesh(), "2.weight"),
    (tie_by_a_new_one, Mesh(pipe=4), "2.weight")], ids=label)
def test_parameters_that_are_tied_after_the_engine_was_built(change, mesh, first):
    """They have two gradients and two states. Parameters that were tied before may be tied again."""
    def rank(world, tied):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        if tied:
            change(model)
        engine = Engine(model, world, mesh=mesh, loss=squared, dtype=torch.float64, optimizer=SGD,
                        pipeline=Pipeline(stages_per_rank=2) if tied and mesh.pipe == 2 else None)
        change(model)
        engine.train_batch(points([[2, 1]])[0])
        engine.close()

    with raises("parameter-tied-late", first):
        run_ranks(partial(rank, tied=False), mesh.size)
    run_ranks(partial(rank, tied=True), mesh.size)


def replace_block(model):
    model[1] = nn.Linear(4, 4)


def remove_block(model):
    del model[1]


def append_block(model):
    model.append(nn.Linear(4, 4))


@pytest.mark.parametrize(("change", "block", "pipe"), [
    (replace_block, "block 1", 1), (replace_block, "block 1", 2), (remove_block, "block 1", 2),
    (append_block, "block 2", 2)])
def test_another_block_in_the_users_container_is_refused(change, block, pipe):
    """The engine has the original blocks, and would train them silently."""
    def rank(world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = Engine(model, world, loss=squared, dtype=torch.float64, optim=Optim(), mesh=Mesh(pipe=pipe))
        engine.train_batch(points([[2]])[0])
        change(model)
        engine.train_batch(points([[2]])[0])

    with raises("block-replaced", where=block):
        run_ranks(rank, pipe)


@pytest.mark.parametrize("defer_bytes", [0, 1 << 20])
def test_a_forward_that_replaces_its_weight_is_refused(defer_bytes):
    """The weight's gradient would be lost in every batch."""
    class Renews(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight.detach() * 0.5)
            return super().forward(x)

    def rank(world):
        engine = Engine(chain(partial(Renews, 4, 4), partial(nn.Linear, 4, 4), loss=squared), world,
                        dtype=torch.float64, optim=Optim(), pipeline=Pipeline(defer_bytes=defer_bytes))
        engine.train_batch(points([[2]])[0])

    with raises("parameter-replaced-during-batch", "b0.weight"):
        run_ranks(rank, 1)


@pytest.mark.parametrize("how", ["forward", "data", "hook"])
def test_a_parameter_that_each_replica_changes_during_a_batch(how):
    """By a forward, or by a hook that updates it from this replica's gradient alone. A single replica may do so."""
    class Changes(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            if how == "hook":
                def update(parameter):
                    with torch.no_grad():
                        parameter.sub_(0.1 * parameter.grad)

                self.bias.register_post_accumulate_grad_hook(update)

        def forward(self, x):
            if how == "forward" and self.training:
                with torch.no_grad():
                    self.bias.mul_(0.9)
            if how == "data" and self.training:
                self.bias.data.add_(x.mean())
            return super().forward(x)

    def work(mesh, world):
        engine = Engine(chain(Changes, Changes), world, mesh=mesh, seed=SEED, dtype=torch.float64, nominal_weight=8.0)
        engine.forward_backward(share(engine, points([[2], [2]][:mesh.data])))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(partial(work, Mesh()), 1)
    with raises("parameter-changed-in-backward", "b0.bias", 2) if how == "hook" else pytest.warns(
            UserWarning, match="parameter b0.bias .* 2 replicas"):
        run_ranks(partial(work, Mesh(data=2)), 2)


def test_the_norm_of_a_large_parameter_needs_little_memory():
    """No dispatch mode sees what an operation allocates and frees, and no prediction counts it."""
    large = torch.ones(5 << 21, dtype=torch.bfloat16)
    with profile(profile_memory=True) as seen:
        (_, norm), = before = with_norms([large])
    assert norm == (5 << 21) ** 0.5 and not changed_norms(before)
    assert 0 < max(event.cpu_memory_usage for event in seen.function_events) <= 8 << 22
    large[-1] += 2.0**-7
    assert changed_norms(before) == [large]


def test_a_table_that_a_forward_renormalises_is_refused_on_several_replicas():
    def rank(mesh, world):
        return Engine([nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 4)], world, mesh=mesh, loss=squared).close()

    run_ranks(partial(rank, Mesh(pipe=2)), 2)
    with raises("embedding-max-norm", where="module 0", value="max_norm=0.5"):
        run_ranks(partial(rank, Mesh(data=2)), 2)


@pytest.mark.parametrize("when, place", [(lambda count: count == 3, 0), (lambda count: count % 2 == 0, 0),
                                         (lambda count: count == 3, 1)],
                         ids=["own", "own, by turns", "other stage's"])
def test_a_forward_that_freezes_is_refused(when, place):
    """Other microbatches are in flight, and other stages do not notice it."""
    class Freezes(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layer, self.layers, self.count = layers[1], layers, 0

        def forward(self, x):
            self.count += 1
            if when(self.count):
                self.layers[1 - place].bias.requires_grad_(not self.layers[1 - place].bias.requires_grad)
            return self.layer(x)

    def rank(world):
        layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
        engine = Engine([layers[0], Freezes(layers)], world, mesh=Mesh(pipe=2), loss=squared)
        for _ in range(2):
            engine.forward_backward(share(engine, points([[2, 2, 2, 2]])))

    with raises("parameter-used-from-outside" if place else "parameter-frozen-during-batch",
                where="parameter 0.bias" if place else "parameter 1.layer.bias"):
        run_ranks(rank, 2)


def test_a_forward_may_freeze_for_a_while():
    class Freezes(nn.Linear):
        def forward(self, x):
            self.weight.requires_grad_(False)
            y = super().forward(x)
            self.weight.requires_grad_(True)
            return y + super().forward(torch.sin(x))

    assert_parity(partial(chain, partial(Freezes, 4, 4), partial(Freezes, 4, 4)), points([[2, 3]]), Mesh(pipe=2))
