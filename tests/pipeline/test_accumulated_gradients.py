"""Several calls of forward_backward are one batch, until a step or zero_grad."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import (
    SEED,
    TOLERANCE,
    assert_close,
    chain,
    on_mesh,
    points,
    share,
    small_gpt,
    squared,
    tokens,
)
from tests.pipeline.test_unreached_parameters import MODEL, SGD, expected, routed
from tests.pipeline.test_unusual_blocks import Plain

PARTS = [tokens([[2, 1], [1]], ignored=0.3, seed=1), tokens([[1], [3]], ignored=0.6, seed=2),
         tokens([[1], [1]], seed=3)]
"""Batches with different numbers of valid targets."""
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
KINDS = [{"optim": Optim(bucket_size=30, chunk_buckets=2)}, {"optim": Optim(shard=True, offload="stream")},
         {"optim": Optim(clip_norm=0.01)}, {"optimizer": ADAMW}]


def of_replica(batch, replicas):
    """The batch on fewer replicas, each of which gets all of it."""
    return batch if replicas == 2 else [[one for replica in batch for one in replica]]


@pytest.mark.parametrize(("mesh", "options", "last"), covering(
    [Mesh(data=2), Mesh(data=2, pipe=2), Mesh()], KINDS, ["step", "train_batch"]), ids=str)
def test_calls_add_up_to_one_batch(mesh, options, last):
    """Loss, weight, norm, gradients and the step are those of all microbatches together, by plain PyTorch."""
    parts = [of_replica(part, mesh.data) for part in PARTS]
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([one for part in parts for replica in part for one in replica])
    gradients = reference.gradients()
    norm = sum(float((gradient ** 2).sum()) for gradient in gradients.values()) ** 0.5

    def at_once(engine):
        engine.train_batch([one for part in parts for one in share(engine, part)])
        return {name: value.clone() for name, value in engine.named_parameters().items()}

    def in_parts(engine):
        *first, final = [share(engine, part) for part in parts]
        for part in first:
            engine.forward_backward(part)
        if last == "step":
            result = engine.forward_backward(final)
            assert_close({name: engine.gradients()[name] for name in engine.gradients()},
                         {name: gradients[name] for name in engine.gradients()})
            engine.step(result)
        else:
            result = engine.train_batch(final)
        assert result.loss == pytest.approx(loss, rel=TOLERANCE) and result.grad_norm == pytest.approx(norm, rel=1e-9)
        assert result.weight == sum(float((one.targets != -100).sum()) for part in parts for replica in part
                                    for one in replica)
        return {name: value.clone() for name, value in engine.named_parameters().items()}

    expected_ones, found = (on_mesh(small_gpt, mesh, work, learning_rate=1e-2, **options)
                            for work in (at_once, in_parts))
    for mine, theirs in zip(found, expected_ones, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-12)


def by_step(engine, result):
    engine.step(result)


def by_zero_grad(engine, result):
    engine.zero_grad()


def by_none(engine, result):
    for parameter in engine.parameters():
        parameter.grad = None


def by_zeroing(engine, result):
    torch.optim.SGD(engine.parameters(), lr=0.0).zero_grad(set_to_none=False)


@pytest.mark.parametrize("end", [by_step, by_zero_grad, by_none, by_zeroing])
def test_what_ends_an_accumulation(end):
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([one for replica in PARTS[1] for one in replica])
    gradients = reference.gradients()

    def work(engine):
        end(engine, engine.forward_backward(share(engine, PARTS[0])))
        result = engine.forward_backward(share(engine, PARTS[1]))
        assert_close(engine.gradients(), {name: gradients[name] for name in engine.gradients()})
        assert result.loss == pytest.approx(loss, rel=TOLERANCE)

    on_mesh(small_gpt, Mesh(data=2, pipe=2), work, optimizer=partial(torch.optim.SGD, lr=0.0))


@pytest.mark.parametrize("remove", [lambda weight: setattr(weight, "grad", None), lambda weight: weight.grad.zero_()],
                         ids=["none", "zero"])
def test_gradients_of_one_stage_that_are_removed_end_no_accumulation(remove):
    """Gradients of other stages stay, as in a plain loop."""
    parts = [points([[2], [1]], seed=seed) for seed in range(2)]
    blocks = nn.Sequential(Plain(), nn.Linear(4, 4, bias=False))
    weight = sum(one.targets.numel() for part in parts for replica in part for one in replica)
    model = copy.deepcopy(blocks).double()
    for number, part in enumerate(parts):
        for one in (one for replica in part for one in replica):
            (squared(model(one.inputs), one.targets)[0] / weight).backward()
        if not number:
            model[1].weight.grad = None

    def work(world):
        engine = Engine(copy.deepcopy(blocks), world, mesh=Mesh(data=2, pipe=2), loss=squared, dtype=torch.float64,
                        optimizer=partial(torch.optim.SGD, lr=0.1))
        engine.forward_backward(share(engine, parts[0]))
        if engine.is_last_stage:
            remove(engine.named_parameters()["1.weight"])
        result = engine.forward_backward(share(engine, parts[1]))
        assert result.weight == weight and engine.num_accumulated == 2
        found = engine.gradients()
        assert_close(found, {name: model.get_parameter(name).grad for name in found})
        engine.close()

    run_ranks(work, 4)


def test_gradients_that_are_written_count_as_they_are():
    """As in torch, the next backward adds to what is in .grad."""
    def work(engine):
        engine.forward_backward(share(engine, PARTS[0]))
        first = {name: value.clone() for name, value in engine.gradients().items()}
        engine.zero_grad()
        engine.forward_backward(share(engine, PARTS[1]))
        second = {name: value.clone() for name, value in engine.gradients().items()}
        weights = [sum(float((one.targets != -100).sum()) for replica in part for one in replica) for part in PARTS[:2]]
        for parameter in engine.parameters():
            parameter.grad.mul_(3.0)
        engine.forward_backward(share(engine, PARTS[0]))
        assert_close(engine.gradients(), {
            name: (first[name] * weights[0] + 3.0 * second[name] * weights[1]) / sum(weights) for name in first})

    on_mesh(small_gpt, Mesh(data=2), work)


def test_what_one_call_reaches_is_reached():
    """Experts that any of the calls reaches are trained, others are left unchanged."""
    steps = routed([[0], [0]], [[1], [0]])
    theirs = expected(SGD, [[[*one, *two] for one, two in zip(*steps, strict=True)]])

    def work(engine):
        engine.forward_backward(share(engine, steps[0]))
        engine.step(engine.forward_backward(share(engine, steps[1])))
        return {name: value.clone() for name, value in engine.named_parameters().items()}

    optim = Optim(algorithm="sgd", momentum=0.9, weight_decay=0.1)
    for mine in on_mesh(MODEL, Mesh(data=2), work, optim=optim, learning_rate=0.1):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


def test_the_loss_scale_counts_a_step_once():
    """An overflow in one call skips the step and halves the scale once; several good calls are one good step."""
    def rank(world):
        engine = Engine([torch.nn.Linear(4, 4)], world, dtype=torch.float16, optim=Optim(initial_loss_scale=8.0),
                        loss=lambda output, targets: (output.float().sum(), 4.0))
        before = engine.parameters()[0].detach().clone()
        results = [engine.forward_backward([(torch.full((1, 4), value).half(), torch.zeros(1))])
                   for value in (60000.0, 1.0)]
        engine.step(results[-1])
        assert [result.overflow for result in results] == [True, True] and engine.loss_scale.scale == 4.0
        assert torch.equal(before, engine.parameters()[0])
        for _ in range(2):
            result = engine.forward_backward([(torch.ones(1, 4).half(), torch.zeros(1))])
        engine.step(result)
        assert not torch.equal(before, engine.parameters()[0]) and engine.loss_scale.good_steps == 1
        for _ in range(2):  # two steps, since the gradients are removed in between
            engine.forward_backward([(torch.full((50, 4), 10000.0).half(), torch.zeros(1))])
            for parameter in engine.parameters():
                parameter.grad = None
        assert engine.loss_scale.scale == 1.0
        engine.close()

    run_ranks(rank, 1)


@pytest.mark.parametrize("options", [{"optim": Optim()}, {"optimizer": partial(torch.optim.SGD, lr=0.1)}], ids=str)
def test_gradients_are_applied_once(options):
    def work(engine):
        done = engine.train_batch(share(engine, PARTS[0]))
        kept = engine.forward_backward(share(engine, PARTS[0]))
        engine.step(kept)
        before = [parameter.clone() for parameter in engine.parameters()]
        for result in (done, kept):
            with raises("step-without-gradients", "forward_backward", "train_batch"):
                engine.step(result)
        with raises("clip-without-gradients"):
            engine.clip_grad_norm_(1.0)
        assert all(map(torch.equal, before, engine.parameters()))

    on_mesh(small_gpt, Mesh(data=2), work, **options)


def test_a_step_with_the_result_of_an_evaluation_is_refused():
    def work(engine):
        result = engine.evaluate(share(engine, PARTS[0]))
        with raises("step-after-evaluation", "Engine.step"):
            engine.step(result)

    on_mesh(small_gpt, Mesh(data=2), work, learning_rate=1e-2, optim=Optim())


@pytest.mark.filterwarnings("ignore:.*none of the parameters")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_an_optimizer_of_some_parameters_ends_a_batch(mesh, dtype):
    """Its zero_grad leaves the gradients of the others, as in a plain loop, whose loss does not depend on them."""
    x, blocks = torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4), nn.Sequential(Plain(), nn.Linear(4, 4)).to(dtype)

    def losses(world, by_engine):
        model = copy.deepcopy(blocks)
        engine = Engine(model, world, mesh=mesh, loss=squared, dtype=dtype,
                        optimizer=lambda parameters: torch.optim.SGD(model[1].parameters(), lr=0.1))
        found = []
        for _ in range(3):
            found.append((result := engine.forward_backward([(x, x.flip(1))])).loss)
            if by_engine:
                engine.step(result)
            elif engine.optimizer is not None:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        engine.close()
        return found

    assert run_ranks(partial(losses, by_engine=False), mesh.size) == run_ranks(
        partial(losses, by_engine=True), mesh.size)


@pytest.mark.parametrize("options", [
    {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1)},
    {"optim": Optim(weight_decay=0.1, ema=0.5, clip_norm=0.1, clip_from="previous-step")}], ids=["torch", "ranvier"])
def test_a_step_after_zero_grad_changes_nothing(options):
    """Like a step of a plain loop without gradients: neither decay nor momentum, nor averages of parameters, nor the
    norm that clips the next step change."""
    def values(engine):
        def now(what):
            return {what + name: value.detach().clone() for name, value in engine.named_parameters().items()}

        with engine.averaged() if "optim" in options else nullcontext():
            averages = now("average of ")
        return averages | now("")

    def work(engine):
        engine.train_batch(share(engine, PARTS[0]))
        before = {name: value.detach().clone() for name, value in engine.named_parameters().items()}
        result = engine.forward_backward(share(engine, PARTS[1]))
        engine.zero_grad()
        assert not any(gradient.any() for gradient in engine.gradients().values())
        engine.step(result)
        assert all(torch.equal(value, before[name]) for name, value in engine.named_parameters().items())
        engine.train_batch(share(engine, PARTS[1]))
        return values(engine)

    def without(engine):
        for part in PARTS[:2]:
            engine.train_batch(share(engine, part))
        return values(engine)

    mesh = Mesh(data=2, pipe=2)
    found, expected = on_mesh(small_gpt, mesh, work, **options), on_mesh(small_gpt, mesh, without, **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


def test_a_step_is_refused_for_any_batch_of_it_whichever_result_it_is_given():
    def work(engine):
        good, bad = points([[2]])[0], points([[2]])[0]
        bad[0].inputs.fill_(math.nan)
        first = engine.forward_backward(good)
        engine.forward_backward(bad)
        before = [parameter.clone() for parameter in engine.parameters()]
        with raises("step-without-result", value="float"):
            engine.step(first.loss)
        with raises("step-refused"):
            engine.step(first)
        assert all(map(torch.equal, before, engine.parameters()))

    on_mesh(partial(chain, partial(nn.Linear, 4, 4), loss=squared), Mesh(), work,
            optimizer=partial(torch.optim.SGD, lr=0.1))
