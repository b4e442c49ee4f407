"""Steps that are not applied, and their cause: the same decision and the same name on every mesh."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier import keyed_random
from ranvier.config.run import Guard, Memory, Optim
from ranvier.mesh import Mesh
from ranvier.optim.guard import USUAL_STEPS, BadSteps
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from tests.covering import first, label, quick
from tests.errors import raises
from tests.pipeline.parity import chain, on_mesh, points, share, small_gpt, tokens
from tests.pipeline.test_training import weights
from tests.tensor.split_parity import on_mesh as on_tensor_mesh
from tests.tensor.split_parity import share as split_share
from tests.tensor.split_parity import tiny_gpt, token_batches

MESHES = [Mesh(), Mesh(data=2, pipe=2), Mesh(data=3)]
STOP = Guard()


def faulty(model, block, fault, *, samples, steps=None, by_hook=True):
    """`model` whose block applies `fault(output, module)` to microbatches with one of `samples`, in all steps or in
    `steps`; by a hook, which recomputed blocks may not have, or by a replaced forward."""
    def build():
        module = model.blocks[block]()
        if by_hook:
            module.register_forward_hook(hook)
        else:
            forward = module.forward
            module.forward = lambda *args: hook(module, args, forward(*args))
        return module

    def hook(module, args, output):
        here = keyed_random._current.scope
        if here is None or not set(here.samples.tolist()) & set(samples) or (steps and here.step not in steps):
            return output
        return fault(output, module)

    return replace(model, blocks={**model.blocks, block: build})


def makes_nan(output, module):
    return output * torch.full_like(output, torch.nan)


def infinite_gradient(output, module):
    """The value is unchanged; the gradient of the block's input is infinite."""
    return output + (output - output.detach()).abs().sqrt()


def infinite_weight_gradient(output, module):
    """The gradient of the first parameter is infinite, that of the input is not."""
    first = next(module.parameters())
    return output + (first - first.detach()).sum().sqrt()


def grows(output, module):
    return output * 1e3


def optim(**options):
    return Optim(**{"weight_decay": 0.1, "bucket_size": 30, "chunk_buckets": 2, **options})


def batch_of(mesh, seed):
    """Three microbatches of two samples on replica 0, and fewer on the others; samples are numbered consecutively."""
    counts = [[2, 2, 2], [2, 2], [1, 2]][:mesh.data]
    return tokens(counts, seed=seed)


# ---------------------------------------------------------------------- what is not applied

OPTIONS = {"plain": {"optim": optim()}, "shard": {"optim": optim(shard=True)},
           "clip": {"optim": optim(shard=True, clip_norm=0.3)}, "stream": {"optim": optim(offload="stream")},
           "torch's": {"optimizer": partial(torch.optim.AdamW, lr=1e-2)}}


@pytest.mark.parametrize(("mesh", "options", "fault"), first([
    (Mesh(), "shard", makes_nan), (Mesh(data=2, pipe=2), "torch's", makes_nan)], [
    *((mesh, "shard", fault) for mesh in MESHES for fault in (makes_nan, infinite_gradient)),
    *((Mesh(data=2, pipe=2), options, makes_nan) for options in OPTIONS if options != "shard")]),
    ids=label)
def test_a_bad_step_is_as_if_its_batch_had_not_been(mesh, options, fault):
    """Parameters are bit-identical to those of a run without guard and without the batch."""
    make, options = partial(lambda: faulty(small_gpt(), "layer1.mlp", fault, samples=[2], steps=[2])), OPTIONS[options]
    first, bad, last = (batch_of(mesh, seed) for seed in range(3))

    def guarded(engine):
        results = [engine.train_batch(share(engine, batch)) for batch in (first, bad, last)]
        steps = None if engine.flat_optimizer is None else engine.flat_optimizer.steps
        return [(result.stepped, result.bad) for result in results], steps, weights(engine)

    def without(engine):
        results = [engine.train_batch(share(engine, batch)) for batch in (first, last)]
        assert [result.bad for result in results] == [None, None]
        return weights(engine)

    expected = on_mesh(small_gpt, mesh, without, learning_rate=1e-2, **options)
    why = "loss is nan" if fault is makes_nan else "gradient norm is nan"
    for (results, steps, found), reference in zip(
            on_mesh(make, mesh, guarded, learning_rate=1e-2, guard=Guard(bad_step="skip"), **options), expected,
            strict=True):
        assert [stepped for stepped, _ in results] == [True, False, True]
        assert [results[0][1], results[2][1]] == [None, None]
        assert results[1][1] in (why, why.replace("nan", "inf"))
        assert steps in (2, None)
        assert all(torch.equal(value, reference[name]) for name, value in found.items())


def test_the_guard_none_applies_everything():
    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", makes_nan, samples=[2]))

    def work(engine):
        result = engine.train_batch(share(engine, batch_of(Mesh(), 0)))
        assert result.stepped and result.bad is None and result.loss != result.loss
        return any(bool(value.isnan().any()) for value in weights(engine).values())

    assert on_mesh(make, Mesh(), work, optim=optim(), guard=Guard(bad_step="none")) == [True]


def test_gradients_that_are_judged_are_not_applied_apart():
    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", makes_nan, samples=[2]))

    def work(engine):
        before = weights(engine)
        result = engine.forward_backward(share(engine, batch_of(Mesh(pipe=2), 0)))
        engine.step(result)
        assert result.bad == "loss is nan" and not result.stepped
        return all(torch.equal(value, before[name]) for name, value in weights(engine).items())

    assert on_mesh(make, Mesh(pipe=2), work, optim=optim(), guard=STOP) == [True, True]


def test_a_batch_without_a_target_is_no_bad_step():
    def work(engine):
        result = engine.train_batch(share(engine, tokens([[2], [1]], ignored=1.0)))
        return result.stepped, result.bad

    with pytest.warns(UserWarning, match="no valid target in the global batch"):
        assert on_mesh(small_gpt, Mesh(data=2), work, optim=optim(), guard=STOP) == [(False, None)] * 2


@pytest.mark.parametrize(("fault", "bad", "scale"), [(makes_nan, "loss is nan", 4.0), (infinite_gradient, None, 2.0)])
def test_an_overflow_in_half_precision_is_the_loss_scales_business(fault, bad, scale):
    """A loss that is NaN is not: the scale would fall for nothing."""
    make = partial(lambda: faulty(chain(*[partial(nn.Linear, 4, 4)] * 3), "b1", fault, samples=[1]))
    batch = [[Microbatch(one.inputs.half(), one.targets.half(), one.samples) for one in replica]
             for replica in points([[1, 2]])]

    def work(world):
        engine = Engine(make(), world, mesh=Mesh(pipe=2), dtype=torch.float16, guard=STOP,
                        optim=Optim(initial_loss_scale=4.0))
        result = engine.train_batch(share(engine, batch))
        assert (result.stepped, result.bad, result.overflow) == (False, bad, bad is None)
        assert engine.loss_scale.scale == scale
        engine.close()

    run_ranks(work, 2)


def test_a_loss_far_above_the_usual_is_bad():
    make = partial(lambda: faulty(small_gpt(), "head", grows, samples=[3], steps=[3]))
    mesh = Mesh(data=2, pipe=2)

    def work(engine):
        results, causes = [], []
        for seed in range(4):
            results.append(engine.train_batch(share(engine, batch_of(mesh, seed))))
            if results[-1].bad:
                causes.append(engine.examine(share(engine, batch_of(mesh, seed))))
        return [result.bad for result in results], causes

    for bad, causes in on_mesh(make, mesh, work, optim=optim(), guard=Guard(loss_spike_factor=2.0)):
        assert [bool(text) for text in bad] == [False, False, True, False]
        assert "more than 2 times 2.5" in bad[2] and "the median of the last 2 good ones" in bad[2]
        cause, = causes
        assert (cause.kind, cause.microbatch, cause.replica) == ("largest loss", 1, 0)
        assert str(cause).startswith("microbatch 1 of replica 0: its loss is the largest, ")
    for bad, _ in on_mesh(make, mesh, work, optim=optim(), guard=STOP):
        assert bad == [None] * 4


def test_the_usual_is_the_median_of_good_losses_and_survives():
    losses = [1.0] * 5 + [3.0] * (USUAL_STEPS - 1)
    at = iter(losses)
    now = [0.0]
    steps = BadSteps(Guard(loss_spike_factor=2.0), lambda: now[0])
    for now[0] in at:
        steps.bad_loss()
        now[0] = 1e9  # a later step's loss, which may come before the verdict is read
        steps.note_good()
    now[0] = 5.9
    assert steps.bad_loss() is None
    again = BadSteps(Guard(loss_spike_factor=2.0), lambda: now[0])
    assert again.bad_loss() is None, "there is no median yet"
    again.load(steps.state())
    now[0] = 6.1
    assert again.bad_loss() == steps.bad_loss() == \
        "loss is 6.1, more than 2 times 3, the median of the last 20 good ones"
    now[0] = float("-inf")
    assert steps.bad_loss() == "loss is -inf"


def test_blocks_updated_in_the_backward_cannot_be_guarded():
    early = Optim(update_in_backward=True)
    with raises("guard-with-in-backward", "Guard"):
        on_mesh(small_gpt, Mesh(), lambda engine: None, optim=early, guard=Guard(bad_step="skip"))
    with raises("spikes-not-judged", "Guard"):
        on_mesh(small_gpt, Mesh(), lambda engine: None, optim=early, guard=Guard(loss_spike_factor=2.0))
    with raises("spikes-not-judged", "Guard(bad_step=...)", where="Guard(loss_spike_factor=...)"):
        on_mesh(small_gpt, Mesh(), lambda engine: None, optim=Optim(),
                guard=Guard(loss_spike_factor=2.0, bad_step="none"))

    def work(engine):
        result = engine.train_batch(share(engine, tokens([[2]])))
        with raises("in-backward-examined"):
            engine.examine(share(engine, tokens([[2]])))
        return result.stepped, result.bad

    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", makes_nan, samples=[1]))
    assert on_mesh(make, Mesh(), work, optim=early, guard=STOP) == [(True, None)], "stop acts as none here"


# ---------------------------------------------------------------------- what it began with

def examined(make, mesh, batch, **options):
    """The cause that all ranks name, which must be the same."""
    def work(engine):
        before = weights(engine)
        result = engine.train_batch(share(engine, batch))
        assert result.bad and not result.stepped
        cause = engine.examine(share(engine, batch))
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        return cause

    causes = on_mesh(make, mesh, work, guard=STOP, **{"optim": optim(), **options})
    assert len(set(causes)) == 1
    return causes[0]


SAMPLES = [(Mesh(), 3, 1, 0), (Mesh(pipe=3), 5, 2, 0), (Mesh(data=2, pipe=2), 8, 1, 1), (Mesh(data=3), 10, 0, 2)]
"""mesh, a sample, and the sample's microbatch and replica."""


@pytest.mark.parametrize(("mesh", "sample", "microbatch", "replica", "block"), [
    *first([(*SAMPLES[2], "embedding")], [
        (*SAMPLES[2], block) for block in ("embedding", "layer0.attention", "layer1.mlp", "head")]),
    *first([(*SAMPLES[0], "layer1.mlp"), (*SAMPLES[1], "layer1.mlp")], [
        (*sample, "layer1.mlp") for sample in SAMPLES if sample is not SAMPLES[2]]),
    (Mesh(data=2), 5, 2, 0, "layer1.mlp")], ids=str)  # the other replica does not have this microbatch
def test_the_first_block_whose_output_is_not_finite_is_named(mesh, sample, microbatch, replica, block):
    make = partial(lambda: faulty(small_gpt(), block, makes_nan, samples=[sample]))
    cause = examined(make, mesh, batch_of(mesh, 0))
    assert str(cause) == f"block {block}, microbatch {microbatch} of replica {replica}: its output has nan"
    assert (cause.kind, cause.block, cause.microbatch, cause.replica) == ("output", block, microbatch, replica)
    assert mesh.coordinates(cause.rank).data == replica


@pytest.mark.parametrize("recompute", ["selective", 1])
def test_a_block_that_is_recomputed_is_named(recompute):
    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", makes_nan, samples=[3], by_hook=False))
    cause = examined(make, Mesh(), batch_of(Mesh(), 0), memory=Memory(recompute=recompute))
    assert (cause.kind, cause.block, cause.microbatch) == ("output", "layer1.mlp", 1)


def test_the_first_microbatch_is_named_where_several_are_bad():
    make = partial(lambda: faulty(faulty(small_gpt(), "layer2.mlp", makes_nan, samples=[1]), "layer0.mlp", makes_nan,
                                  samples=[4, 6]))
    assert str(examined(make, Mesh(data=2, pipe=2), batch_of(Mesh(data=2), 0))) == \
        "block layer2.mlp, microbatch 0 of replica 0: its output has nan"


@pytest.mark.parametrize(("mesh", "sample", "microbatch", "replica", "checkpoint"), first([
    (*SAMPLES[2], 2), (*SAMPLES[0], "none"), (*SAMPLES[1], "none")], [
    *((*SAMPLES[2], checkpoint) for checkpoint in (1, 2)), *((*sample, "none") for sample in SAMPLES)]), ids=str)
def test_the_block_whose_gradients_are_not_finite_is_named(mesh, sample, microbatch, replica, checkpoint):
    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", infinite_gradient, samples=[sample], by_hook=False))
    cause = examined(make, mesh, batch_of(mesh, 0), memory=Memory(recompute=checkpoint))
    assert str(cause) in [f"block layer1.mlp, microbatch {microbatch} of replica {replica}: the gradient of its input "
                          f"has {flaw}" for flaw in ("inf", "nan")]


@pytest.mark.parametrize(("mesh", "sample", "microbatch", "replica"), first([SAMPLES[0], SAMPLES[2]], SAMPLES), ids=str)
def test_a_parameter_whose_gradient_is_not_finite_is_named(mesh, sample, microbatch, replica):
    make = partial(lambda: faulty(small_gpt(), "layer1.mlp", infinite_weight_gradient, samples=[sample]))
    cause = examined(make, mesh, batch_of(mesh, 0))
    assert str(cause).startswith(f"block layer1.mlp, microbatch {microbatch} of replica {replica}: the gradient of "
                                 "layer1.mlp.norm.weight has ")
    assert cause.parameter == "layer1.mlp.norm.weight" and cause.kind == "gradient"


def test_the_gradient_of_the_loss_is_told_apart():
    def loss(output, targets):
        return ((output - output.detach()).abs().sqrt() + (output - targets) ** 2).sum(), output.numel()

    make = partial(lambda: chain(*[partial(nn.Linear, 4, 4)] * 3, loss=loss))
    assert str(examined(make, Mesh(pipe=2), points([[2, 1]]))) in [
        f"the loss, microbatch 0 of replica 0: the gradient of what it was given has {flaw}" for flaw in ("inf", "nan")]


def test_a_loss_of_finite_outputs_is_told_apart():
    def loss(output, targets):
        return (output - targets).sum() / (targets.sum() * 0), output.numel()

    make = partial(lambda: chain(*[partial(nn.Linear, 4, 4)] * 3, loss=loss))
    assert str(examined(make, Mesh(pipe=2), points([[2, 1]]))) in [
        f"the loss, microbatch 0 of replica 0: it is {flaw}, while every block's output is finite"
        for flaw in ("inf", "nan")]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, pipe=2)], ids=str)
@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_bad_data_is_told_apart(mesh, which):
    batch = [list(replica) for replica in points([[2, 2, 1], [1, 2]][:mesh.data])]
    replica, number = mesh.data - 1, 1
    data = getattr(batch[replica][number], which).clone()
    data[0, 2] = float("inf")
    batch[replica][number] = replace(batch[replica][number], **{which: data})
    make = partial(chain, *[partial(nn.Linear, 4, 4)] * 3)
    cause = examined(make, mesh, batch)
    assert str(cause) == f"microbatch 1 of replica {replica}: its {which} have inf"


def test_data_that_harms_nobody_is_not_named():
    """A block may handle NaN in its input: what matters is the result."""
    class Cleans(nn.Linear):
        def forward(self, x):
            return super().forward(x.nan_to_num())

    batch = [list(replica) for replica in points([[2, 2, 1]])]
    batch[0][0].inputs[0, 0] = float("nan")
    make = partial(lambda: faulty(chain(partial(Cleans, 4, 4), partial(nn.Linear, 4, 4)), "b1", makes_nan, samples=[4]))
    assert str(examined(make, Mesh(pipe=2), batch)) == "block b1, microbatch 2 of replica 0: its output has nan"


@pytest.mark.parametrize(("mesh", "everywhere", "text"), [
    (Mesh(), True, ": it had inf before the step"), (Mesh(data=2, pipe=2), True, ": it had inf before the step"),
    (Mesh(data=2, pipe=2), False, ", on replica 1 alone: it had inf before the step")], ids=str)
def test_a_parameter_that_was_bad_before_comes_first(mesh, everywhere, text):
    """Even if an earlier microbatch has a fault of its own."""
    def work(engine):
        held = engine.named_parameters()
        if "layer1.mlp.fc1.weight" in held and (everywhere or engine.coordinates.data == 1):
            with torch.no_grad():
                held["layer1.mlp.fc1.weight"][1, 2] = float("inf")
        batch = share(engine, batch_of(mesh, 0))
        assert engine.train_batch(batch).bad
        return engine.examine(batch)

    make = partial(lambda: faulty(small_gpt(), "layer0.mlp", makes_nan, samples=[0]))
    causes = on_mesh(make, mesh, work, optim=optim(), guard=STOP)
    assert {str(cause) for cause in causes} == {f"parameter layer1.mlp.fc1.weight is not finite{text}"}
    assert causes[0].replica == (0 if everywhere else 1)


@pytest.mark.parametrize(("fault", "what", "scheme"), quick(1, [
    (infinite_gradient, "the gradient of its input has ", "stationary"), (makes_nan, "its output has nan", "summa"),
    (infinite_gradient, "the gradient of its input has ", "summa"), (makes_nan, "its output has nan", "stationary")]))
def test_on_rows_and_columns(fault, what, scheme):
    """The fault is in one row's part of a microbatch, and all ranks make the same decision."""
    mesh = Mesh(row=2, col=2)
    make = partial(lambda: faulty(tiny_gpt(num_layers=2), "layer1.mlp", fault, samples=[bad]))
    batch = token_batches(mesh, count=2)
    bad = int(batch[0][1].samples[-1])

    def work(engine):
        result = engine.train_batch(split_share(engine, batch))
        assert result.bad and not result.stepped
        return engine.examine(split_share(engine, batch))

    causes = on_tensor_mesh(make, mesh, work, scheme=scheme, optim=optim(bucket_size=300), guard=STOP)
    assert len(set(causes)) == 1
    assert str(causes[0]).startswith(f"block layer1.mlp, microbatch 1 of replica 0: {what}")


def test_an_examination_leaves_no_trace():
    """Training continues as without an examination: dropout, running means, hooks, gradients."""
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return keyed_random.dropout(self.norm(self.linear(x)), 0.2, self.training)

    batches = [points([[3, 3], [2, 3]], seed=seed) for seed in range(3)]

    def work(engine, examines):
        for batch in batches:
            engine.train_batch(share(engine, batch))
            if examines:
                assert engine.examine(share(engine, batch)).kind == "largest loss"
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks)
                    for _, _, block in engine._stages.blocks for module in block.modules())
        buffers = {name: value.clone() for block, module in engine.blocks.items()
                   for name, value in module.named_buffers(prefix=block)}
        return weights(engine) | buffers, hooks

    make = partial(chain, *[Normed] * 3)
    found, expected = (on_mesh(make, Mesh(data=2, pipe=2), partial(work, examines=examines), optim=optim(), guard=STOP)
                       for examines in (True, False))
    for (mine, hooks), (theirs, _) in zip(found, expected, strict=True):
        assert hooks == 0
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
