"""Steps, evaluations and predictions in sequence, equal to those of one process with a torch optimizer."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.slow_links import Link
from ranvier.block import Model
from ranvier.config.run import Optim, Pipeline
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference, relative_error
from tests.covering import chosen, pairwise, quick
from tests.errors import raises
from tests.pipeline.parity import (
    IGNORED,
    SEED,
    assert_close,
    assert_parity,
    chain,
    frozen,
    merge,
    on_mesh,
    points,
    share,
    small_gpt,
    squared,
    tokens,
)
from tests.pipeline.test_parity import of_blocks, residuals

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True),
}
MESHES = [Mesh(), Mesh(pipe=2), Mesh(data=2), Mesh(data=2, pipe=3)]


def three_ends():
    """The first block's weight is also that of the third and the last."""
    return chain(*[partial(nn.Linear, 4, 4)] * 5, tied=(("b2.weight", "b0.weight", "b4.weight"),))


def weights(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}


def assert_same_weights(found, reference, mesh):
    """Every end of every parameter has the reference's value, on every rank that holds it."""
    held = set()
    for parameters in found:
        for name, value in parameters.items():
            assert relative_error(value, reference.parameters[name].detach()) <= 1e-12, name
        held |= set(parameters)
    assert held == set(reference.parameters)
    pipe = mesh.pipe
    for stage in range(pipe):  # replicas are bit-identical
        assert all(torch.equal(value, found[rank][name]) for rank in range(stage, mesh.size, pipe)
                   for name, value in found[stage].items())


def batch_of(make, mesh, seed=0):
    if make is small_gpt:
        return tokens([[2, 1]] * mesh.data, ignored=0.3, seed=seed)
    return points([[2, 3]] * mesh.data, seed=seed)


@pytest.mark.parametrize(("mesh", "optimizer"), chosen(
    [(Mesh(), "adamw"), (Mesh(data=2, pipe=3), "sgd")], MESHES, list(OPTIMIZERS)), ids=str)
@pytest.mark.parametrize("make", [small_gpt, three_ends, lambda: frozen(residuals(), of_blocks(0, 1, 4, 7))],
                         ids=["gpt", "three ends", "partly frozen"])
def test_steps_equal_those_of_plain_pytorch(make, mesh, optimizer):
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS[optimizer])
    batches = [batch_of(make, mesh, seed) for seed in range(2)]
    expected = [reference.train_batch([one for replica in batch for one in replica]) for batch in batches]

    def work(engine):
        return [engine.train_batch(share(engine, batch)).loss for batch in batches], weights(engine)

    losses, parameters = zip(*on_mesh(make, mesh, work, optimizer=OPTIMIZERS[optimizer]), strict=True)
    assert all(loss == pytest.approx(expected, rel=1e-12) for loss in losses)
    assert_same_weights(parameters, reference, mesh)


@pytest.mark.parametrize("seed", quick(1, range(3)))
def test_steps_with_messages_that_dawdle(seed):
    """Tied gradients and values of three stages, steps that overlap, and delays."""
    mesh = Mesh(data=2, pipe=3)
    reference = Reference(three_ends(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS["adamw"])
    batches = [points([[1, 1], [1]], seed=number) for number in range(4)]
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])

    def work(engine):
        for batch in batches:
            engine.train_batch(share(engine, batch))
        return weights(engine)

    found = on_mesh(three_ends, mesh, work, optimizer=OPTIMIZERS["adamw"],
                    throttle=Link(latency_seconds=1e-3, jitter_seconds=4e-3, seed=seed))
    assert_same_weights(found, reference, mesh)


@pytest.mark.parametrize("mesh", quick(2, MESHES), ids=str)
def test_evaluation_before_between_and_after_steps(mesh):
    """With dropout in the model: off in evaluation, and in training not affected by evaluations."""
    make = partial(small_gpt, dropout=0.3)
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS["adamw"])
    batches, held_out = [batch_of(small_gpt, mesh, seed) for seed in range(2)], tokens([[3, 1]] * mesh.data, seed=9)
    flat = [[one for replica in batch for one in replica] for batch in (*batches, held_out)]
    expected = [reference.evaluate(flat[2]), reference.train_batch(flat[0]), reference.evaluate(flat[2]),
                reference.evaluate(flat[0]), reference.train_batch(flat[1]), reference.evaluate(flat[2])]

    def work(engine):
        train = [share(engine, batch) for batch in batches]
        test = share(engine, held_out)
        results = [engine.evaluate(test), engine.train_batch(train[0]), engine.evaluate(test),
                   engine.evaluate(train[0]), engine.train_batch(train[1]), engine.evaluate(test)]
        return [result.loss for result in results], [result.grad_norm is None for result in results], weights(engine)

    losses, without_norm, parameters = zip(*on_mesh(make, mesh, work, optimizer=OPTIMIZERS["adamw"]), strict=True)
    assert all(loss == pytest.approx(expected, rel=1e-12) for loss in losses)
    assert without_norm[0] == [True, False, True, True, False, True]
    assert_same_weights(parameters, reference, mesh)


@pytest.mark.parametrize("mesh", quick(3, [*MESHES, Mesh(data=4, pipe=2)]), ids=str)
def test_dropout_is_that_of_one_process(mesh):
    """Masks depend on sample numbers, not on the rank that draws them; and masks are applied."""
    make, batches = partial(small_gpt, dropout=0.5), tokens([[2, 2, 1]] * mesh.data, ignored=0.3)
    outcome = assert_parity(make, batches, mesh)
    plain = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    assert abs(plain.forward_backward([one for replica in batches for one in replica]) - outcome.losses[0]) > 1e-3


def test_dropout_without_sample_numbers_is_refused():
    batch = [Microbatch(one.inputs, one.targets) for one in tokens([[2]])[0]]
    with raises("dropout-without-samples", 0, 2):
        on_mesh(partial(small_gpt, dropout=0.5), Mesh(), lambda engine: engine.forward_backward(batch))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_predictions(mesh):
    batches = tokens([[2, 1, 3]] * mesh.data, lengths=(6, 2))
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)

    def work(engine):
        mine = [Microbatch(one.inputs) for one in share(engine, batches)]
        return engine.coordinates, engine.predict(mine)

    for at, outputs in on_mesh(small_gpt, mesh, work):
        if at.pipe < mesh.pipe - 1:
            assert outputs is None
            continue
        expected = reference.predict(batches[at.data])
        assert [one.shape for one in outputs] == [one.shape for one in expected]
        assert all(relative_error(one, other) < 1e-12 for one, other in zip(outputs, expected, strict=True))


# ---------------------------------------------------------------------- batches without weight

@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, pipe=2)], ids=str)
def test_a_batch_of_weight_zero_is_skipped(mesh):
    """The next step is as if the skipped batch had not been there."""
    empty = [[Microbatch(one.inputs, torch.full_like(one.targets, IGNORED)) for one in replica]
             for replica in points([[2, 2]] * mesh.data)]
    full = points([[2, 1]] * mesh.data)
    reference = Reference(residuals(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS["adamw"])
    reference.train_batch([one for replica in full for one in replica])

    def work(engine):
        start = weights(engine)
        skipped = engine.train_batch(share(engine, empty))
        unchanged = all(torch.equal(start[name], value) for name, value in weights(engine).items())
        stepped = engine.train_batch(share(engine, full))
        return skipped.stepped, skipped.loss, skipped.weight, unchanged, stepped.stepped, weights(engine)

    with pytest.warns(UserWarning, match="step 1 is skipped: no valid target in the global batch"):
        found = on_mesh(residuals, mesh, work, optimizer=OPTIMIZERS["adamw"])
    for skipped, loss, weight, unchanged, stepped, _ in found:
        assert not skipped and loss != loss and weight == 0.0 and unchanged and stepped
    assert_same_weights([parameters for *_, parameters in found], reference, mesh)


def test_an_empty_batch_everywhere_is_one_of_weight_zero():
    found = on_mesh(residuals, Mesh(data=2, pipe=2), lambda engine: (
        engine.forward_backward([]).stepped, engine.evaluate([]).weight, engine.predict([])))
    assert found == [(False, 0.0, None), (False, 0.0, [])] * 2


# ---------------------------------------------------------------------- one's own loop

def test_gradients_only_and_an_update_by_hand():
    """The parts of `train_batch`, with an optimizer that sets gradients to None."""
    mesh, batches = Mesh(data=2, pipe=2), [points([[2, 2]] * 2, seed=seed) for seed in range(3)]
    reference = Reference(three_ends(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS["adamw"])
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])

    def work(engine):
        for batch in batches:
            result = engine.forward_backward(share(engine, batch))
            engine.step(result)
            if engine.optimizer is not None:
                engine.optimizer.zero_grad(set_to_none=True)
        return weights(engine)

    assert_same_weights(on_mesh(three_ends, mesh, work, optimizer=OPTIMIZERS["adamw"]), reference, mesh)


def test_gradients_of_batch_after_batch_without_a_step():
    """Gradients start from zero after `zero_grad`, including tied ones."""
    assert_gradients_of_batches(three_ends, Mesh(pipe=3), [points([[2, 2, 1]], seed=seed) for seed in range(3)])


def assert_gradients_of_batches(make, mesh, batches, **options):
    """Gradients of one batch after another, without a step."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)

    def work(engine):
        found = []
        for batch in batches:
            engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.zero_grad()
        return found

    found = on_mesh(make, mesh, work, **options)
    for number, batch in enumerate(batches):
        reference.forward_backward([one for replica in batch for one in replica])
        assert_close(merge([one[number] for one in found], mesh), reference.gradients())


def only_ties_train():
    return frozen(three_ends(), lambda name: name not in ("b0.weight", "b2.weight", "b4.weight"))


def test_the_owners_of_a_tied_weight_alone_have_an_optimizer():
    """If nothing else trains, other stages have no optimizer, and training continues."""
    reference = Reference(only_ties_train(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS["sgd"])
    batches, mesh = [points([[2, 1]], seed=seed) for seed in range(3)], Mesh(pipe=5)
    for batch in batches:
        reference.train_batch(batch[0])

    def work(engine):
        for batch in batches:
            engine.train_batch(share(engine, batch))
        return engine.optimizer is not None, len(engine.parameters()), weights(engine)

    has_one, counts, parameters = zip(*on_mesh(only_ties_train, mesh, work, optimizer=OPTIMIZERS["sgd"]),
                                       strict=True)
    assert has_one == (False, False, True, False, False) and counts == (0, 0, 1, 0, 0)
    assert_same_weights(parameters, reference, mesh)


def test_many_batches_without_microbatches_on_one_replica():
    """A rank without work may be batches ahead; messages that it sends early must not be lost."""
    batches = [points([[1] * 6, []], seed=seed) for seed in range(4)]
    batches.insert(2, [[], []])
    assert_gradients_of_batches(only_ties_train, Mesh(data=2, pipe=3), batches,
                                throttle=Link(jitter_seconds=2e-3, seed=4))


# ---------------------------------------------------------------------- freezing on the way

@pytest.mark.parametrize(("names", "mesh", "optimizer"), pairwise(
    [["b1.weight", "b1.bias"], ["b0.weight", "b2.weight", "b4.weight", "b0.bias"],
     [f"b{block}.{kind}" for block in range(5) for kind in ("weight", "bias")]],
    [Mesh(), Mesh(data=2, pipe=3)], list(OPTIMIZERS)), ids=str)
def test_freezing_between_steps(names, mesh, optimizer):
    """Frozen parameters stay unchanged, without decay or momentum, including ties."""
    reference = Reference(three_ends(), seed=SEED, dtype=torch.float64, optimizer=OPTIMIZERS[optimizer])
    batches = [points([[2, 1]] * mesh.data, seed=seed) for seed in range(4)]

    def freeze(parameters):
        for name in parameters.keys() & set(names):
            parameters[name].requires_grad_(False)

    for number, batch in enumerate(batches):
        if number == 2:
            freeze(reference.parameters)
        reference.train_batch([one for replica in batch for one in replica])

    def work(engine):
        for number, batch in enumerate(batches):
            if number == 2:
                freeze(engine.named_parameters())
            engine.train_batch(share(engine, batch))
        return weights(engine)

    assert_same_weights(on_mesh(three_ends, mesh, work, optimizer=OPTIMIZERS[optimizer]), reference, mesh)


def test_thawing_needs_a_new_engine():
    def work(engine):
        engine.named_parameters()["b0.linear.weight"].requires_grad_(True)
        engine.forward_backward([])

    with raises("parameter-unfrozen", "b0.linear.weight"):
        on_mesh(lambda: frozen(residuals(2), of_blocks(0)), Mesh(), work)


# ---------------------------------------------------------------------- mistakes

def test_training_without_an_optimizer():
    with raises("optimizer-missing"):
        on_mesh(residuals, Mesh(), lambda engine: engine.train_batch([]))


def test_a_model_of_which_nothing_trains_is_refused_beside_an_optimizer():
    def run(world):
        blocks = [torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
        Engine(blocks, world, mesh=Mesh(pipe=2), loss=squared).close()
        with raises("nothing-trains", "4 parameters"):
            Engine(blocks, world, mesh=Mesh(pipe=2), loss=squared, optim=Optim())

    run_ranks(run, 2)


@pytest.mark.parametrize("boundaries", [(9,), (1, 2)])
def test_boundaries_that_do_not_fit_the_model(boundaries):
    with pytest.raises(ConfigError) as caught:
        on_mesh(residuals, Mesh(pipe=2), lambda engine: None, pipeline=Pipeline(boundaries=boundaries))
    assert (caught.value.where, caught.value.value) == ("Pipeline(boundaries=...)", boundaries)


def test_a_policy_by_its_name_is_a_setting_of_the_pipeline():
    with pytest.raises(ConfigError) as caught:
        on_mesh(residuals, Mesh(), lambda engine: None, policy="gpipe")
    assert (caught.value.where, caught.value.value) == ("Engine(policy=...)", "gpipe")


def test_more_stages_than_blocks():
    with raises("more-stages-than-blocks", 4, "Mesh"):
        on_mesh(partial(residuals, 3), Mesh(pipe=4), lambda engine: None)


def test_more_virtual_stages_than_blocks():
    with raises("more-virtual-stages-than-blocks", 4, 3, where="Pipeline(stages_per_rank=...)", value=2):
        on_mesh(partial(residuals, 3), Mesh(pipe=2), lambda engine: None, pipeline=Pipeline(stages_per_rank=2))


def test_a_mesh_of_another_size():
    with raises("mesh-of-other-size", 4, 2):
        run_ranks(lambda world: Engine(residuals(), world, mesh=Mesh(pipe=4)), 2)


def test_an_optimizer_instead_of_a_function_that_makes_one():
    model = residuals()
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1e-2)
    with raises("optimizer-not-a-factory", "SGD"):
        run_ranks(lambda world: Engine(model, world, mesh=Mesh(), optimizer=optimizer), 1)


def test_a_function_that_makes_no_optimizer():
    with raises("optimizer-not-made", where="optimizer", value="NoneType"):
        run_ranks(lambda world: Engine(residuals(), world, mesh=Mesh(), optimizer=lambda parameters: None), 1)


class Strided(nn.Module):
    """A convolution in channels_last, and a matrix that is transposed in memory."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, (2, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.empty(4, 3).t())

    def forward(self, x):
        rows = x.t().view(1, 4, 1, -1).expand(1, 4, 2, -1)
        return x + self.conv(rows).view(4, -1).t() @ self.matrix.t() @ self.matrix


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, pipe=2)], ids=str)
def test_parameters_whose_elements_are_not_in_order(mesh, fused):
    """torch's fused optimizers process tensors in memory order."""
    make = partial(chain, Strided, Strided)
    optimizer = partial(torch.optim.AdamW, lr=0.1, fused=fused)
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=optimizer)
    steps = [points([[2, 3]] * mesh.data, seed=seed) for seed in range(2)]
    for batch in steps:
        reference.train_batch([one for replica in batch for one in replica])

    def work(engine):
        for number, batch in enumerate(steps):
            result = engine.forward_backward(share(engine, batch))
            for one in engine.parameters() if number else ():
                assert one.grad.stride() == one.stride()
                one.grad = one.grad.contiguous()
            engine.step(result)
        assert not engine.blocks[min(engine.blocks)].conv.weight.is_contiguous()
        return {name: one.detach().clone() for name, one in engine.named_parameters().items()}

    assert_close(merge(on_mesh(make, mesh, work, optimizer=optimizer), mesh),
                 {name: one.detach() for name, one in reference.parameters.items()})


class Wrapped:
    """SGD of the head, which has only a `step` method."""

    def __init__(self, named_parameters):
        self.step = torch.optim.SGD([one for name, one in named_parameters if name.startswith("b1")], lr=0.1).step


def test_an_optimizer_of_one_stages_parameters():
    """Its step is called on all ranks with trainable parameters."""
    make = partial(chain, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4))
    with raises("optimizer-picks-none", "a group with lr=0", where="optimizer", value=2):
        on_mesh(make, Mesh(pipe=2), lambda engine: None, optimizer=lambda named_parameters: Wrapped(named_parameters))

    def work(engine):
        engine.train_batch(share(engine, points([[2]])))
        return engine.memory()["device"].get("moments", 0), engine.optimizer is None

    assert on_mesh(lambda: frozen(make(), lambda name: name.startswith("b0")), Mesh(pipe=2), work,
                   optimizer=lambda named_parameters: Wrapped(named_parameters)) == [(0, True), (0, False)]


@pytest.mark.parametrize("size", [1, 2])
def test_two_engines_that_share_a_block_train_each_their_own(size):
    """A GAN: the generator's engine has a group with lr 0 for the discriminator, also on a stage of its own."""
    def network():
        torch.manual_seed(0)
        return nn.Linear(4, 4), nn.Linear(4, 1)

    networks = [network() for _ in range(size)]  # ranks are threads, which share torch's generator

    def program(world):
        (maker, judge), mesh = networks[world.rank], Mesh(pipe=world.size)
        own = set(map(id, maker.parameters()))

        def groups(parameters):
            parts = [[one for one in parameters if (id(one) in own) is wanted] for wanted in (True, False)]
            return torch.optim.Adam([{"params": parts[0]}, {"params": parts[1], "lr": 0.0}], lr=0.05)

        generator = Engine([maker, judge], world, mesh=mesh, optimizer=groups,
                           loss=lambda y, t: (nn.functional.softplus(-y).sum(), len(t)))
        discriminator = Engine([nn.Identity(), judge], world, mesh=mesh,
                               optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
                               loss=lambda y, t: ((y - t).square().sum(), len(t)))
        batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]
        return [engine.train_batch([(x, torch.ones(8, 1))]).loss for x in batches
                for engine in (discriminator, generator)]

    losses = run_ranks(program, size)[0]
    maker, judge = network()
    steps = [torch.optim.Adam(one.parameters(), lr=0.05) for one in (judge, maker)]
    for step, loss in enumerate(losses):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step // 2))
        expected = ((judge(x) - 1).square() if step % 2 == 0 else nn.functional.softplus(-judge(maker(x)))).sum() / 8
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for one in steps:
            one.zero_grad()
        expected.backward()
        steps[step % 2].step()


def test_an_optimizer_that_computes_the_loss_itself():
    with raises("optimizer-needs-closure", "LBFGS"):
        run_ranks(lambda world: Engine(residuals(), world, mesh=Mesh(), optimizer=torch.optim.LBFGS), 1)


@pytest.mark.parametrize("batch", [(torch.zeros(8, 4), torch.zeros(8, 4)), torch.zeros(8, 4), ["text"], "", {}])
def test_a_batch_that_is_no_list_of_microbatches(batch):
    def work(world):
        Engine(residuals(), world, mesh=Mesh()).forward_backward(batch)

    with raises("not-a-microbatch"):
        run_ranks(work, 1)


@pytest.mark.parametrize(("model", "loss", "error"), [
    (lambda: nn.Sequential(nn.Linear(4, 4)), None, ("loss-missing",)),
    (residuals, squared, ("loss-given-twice",)),
    (lambda: 3, squared, ("model-not-blocks",)),
    (lambda: nn.Linear(4, 4), squared, ("module-not-blocks",)),
    (lambda: [nn.Linear(4, 4), torch.tanh], squared, ("block-not-module", 1)),
    (lambda: [], squared, ("model-without-blocks",)),
    (lambda: Model(blocks={"": nn.Tanh}, loss=squared), None, ("block-name",)),
])
def test_what_is_no_model(model, loss, error):
    with raises(*error):
        run_ranks(lambda world: Engine(model(), world, mesh=Mesh(), loss=loss), 1)
