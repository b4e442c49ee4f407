"""Tied parameters that a program writes or freezes itself: all ends follow, or an error names the tie."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranvier.config.run import Pipeline
from ranvier.layout import Split
from ranvier.mesh import Mesh
from ranvier.pipeline.ties import _number_of
from ranvier.testing.reference import Reference
from tests.covering import covering, examples, label
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, chain, merge, on_mesh, points, share
from tests.pipeline.test_ties import SPLITS, Ranks, blocks, tied_layout
from tests.pipeline.test_unusual_blocks import Plain

SGD = partial(torch.optim.SGD, lr=0.1)
MESHES = [(Mesh(pipe=2), Pipeline()), (Mesh(data=2, pipe=3), Pipeline()), (Mesh(pipe=2), Pipeline(stages_per_rank=2))]
IDS = ["2 stages", "2 x 3 stages", "2 stages per rank"]
BATCHES = [points([[2, 1], [3]], seed=seed) for seed in range(3)]


def plain(group, change=lambda parameters: None, optimizer=SGD):
    """Parameters and losses of plain PyTorch, with `change` made after each step."""
    reference, losses = Reference(blocks(group), seed=SEED, dtype=torch.float64, optimizer=optimizer), []
    for batch in BATCHES:
        one = [each for replica in batch for each in replica]
        losses.append(reference.train_batch(one))
        with torch.no_grad():
            change(reference.parameters.values())
        losses.append(reference.evaluate(one))
    return reference.parameters, losses


def batches_of(engine, batch):
    """All microbatches of a batch, on any number of replicas."""
    return share(engine, batch if engine.mesh.data == 2 else [[one for replica in batch for one in replica]])


def owned(engine):
    """Clones of the parameters that a rank owns, by name."""
    found = engine.named_parameters()
    return {name: found[name].detach().clone() for name in engine.gradients()}


@pytest.mark.parametrize(("group", "mesh", "pipeline", "whose"), covering(
    [[0, 5], [5, 0], [2, 0, 5]], MESHES, ["parameters", "named_parameters"]), ids=label)
def test_ends_follow_owners_that_a_user_updates(group, mesh, pipeline, whose):
    expected, losses = plain(group)

    def work(engine):
        optimizer, found = SGD(engine.parameters() if whose == "parameters" else engine.named_parameters().values()), []
        for batch in BATCHES:
            found.append(engine.forward_backward(batches_of(engine, batch)).loss)
            optimizer.step()
            engine.zero_grad()
            found.append(engine.evaluate(batches_of(engine, batch)).loss)
        assert found == pytest.approx(losses, rel=1e-10)
        engine.forward_backward(batches_of(engine, batch))
        return owned(engine)

    assert_close(merge(on_mesh(partial(blocks, group), mesh, work, pipeline=pipeline), mesh),
                 {name: one.detach() for name, one in expected.items()})


@pytest.mark.parametrize(("mesh", "pipeline"), MESHES, ids=IDS)
def test_whoever_writes_all_ends_alike_may(mesh, pipeline):
    def change(parameters):
        for parameter in parameters:
            parameter.mul_(0.9).clamp_(-0.3, 0.3)

    expected, losses = plain((2, 0, 5), change)

    def work(engine):
        found = []
        for batch in BATCHES:
            found.append(engine.train_batch(batches_of(engine, batch)).loss)
            with torch.no_grad():
                change(engine.named_parameters().values())
            found.append(engine.evaluate(batches_of(engine, batch)).loss)
        assert found == pytest.approx(losses, rel=1e-10)
        return owned(engine)

    assert_close(merge(on_mesh(partial(blocks, (2, 0, 5)), mesh, work, pipeline=pipeline, optimizer=SGD), mesh),
                 {name: one.detach() for name, one in expected.items()})


def by_parameters(engine):
    for parameter in engine.parameters():
        parameter.mul_(0.9)


def through_data(engine):
    for parameter in engine.parameters():
        parameter.data.mul_(0.9)


def by_optimizer(engine):
    with torch.enable_grad():
        engine.forward_backward(batches_of(engine, BATCHES[1]))
    if engine.optimizer is not None:
        engine.optimizer.step()
    engine.zero_grad()


def by_block(name, engine):
    for parameter in engine.blocks[name].parameters() if name in engine.blocks else ():
        parameter.mul_(0.9)


def by_owner(engine):
    by_block("b0", engine)


def by_end(engine):
    by_block("b5", engine)


def differently(engine):
    for parameter in engine.named_parameters().values():
        parameter.mul_(0.9 + 0.01 * engine.coordinates.pipe)


@pytest.mark.parametrize(("write", "use", "mesh", "pipeline"), covering(
    [by_parameters, through_data, by_optimizer, by_owner, by_end, differently],
    ["train_batch", "forward_backward", "evaluate", "predict"], MESHES[:2]), ids=label)
def test_ends_that_are_written_differently_are_refused(write, use, mesh, pipeline):
    def work(engine):
        engine.train_batch(batches_of(engine, BATCHES[0]))
        with torch.no_grad():
            write(engine)
        found = getattr(engine, use)(batches_of(engine, BATCHES[2]))
        _ = found if use == "predict" else found.loss
        engine.train_batch(batches_of(engine, BATCHES[2]))  # ranks that have not noticed it wait for those that have

    with raises("tied-end-written", "b0.linear.weight", "b5.linear.weight"):
        on_mesh(partial(blocks, (0, 5)), mesh, work, pipeline=pipeline, optimizer=SGD)


def test_stages_of_one_rank_see_it_too():
    def work(engine):
        engine.train_batch(batches_of(engine, BATCHES[0]))
        with torch.no_grad():
            by_owner(engine)
        engine.train_batch(batches_of(engine, BATCHES[1]))

    with raises("tied-end-written", "b0.linear.weight"):
        on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), work, pipeline=Pipeline(stages_per_rank=2), optimizer=SGD)


def test_an_end_that_a_user_writes_alone_is_refused_where_he_updates_too():
    def work(engine):
        for batch in BATCHES:
            with torch.no_grad():
                by_end(engine)
            engine.forward_backward(batches_of(engine, batch))

    with raises("tied-end-written", "b5.linear.weight"):
        on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), work)


class Shrinks(Plain):
    """Its forward writes its own weight."""

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(stages_per_rank=2)], ids=["one stage", "two"])
@pytest.mark.parametrize("optimizer", [None, SGD], ids=["user", "engine"])
def test_a_forward_that_writes_one_end_is_refused(pipeline, optimizer):
    make = partial(chain, Shrinks, Plain, Plain, Plain, tied=(("b0.linear.weight", "b3.linear.weight"),))
    with raises("tied-end-written", "b0.linear.weight"):
        on_mesh(make, Mesh(pipe=2), lambda engine: engine.forward_backward(share(engine, points([[2]]))),
                pipeline=pipeline, optimizer=optimizer)


def test_what_a_user_has_updated_may_be_saved_before_the_next_batch():
    """Ends that have not followed yet are loaded as they are, and follow afterwards."""
    def state(engine, optimizer):
        engine.forward_backward(batches_of(engine, BATCHES[0]))
        optimizer.step()
        return copy.deepcopy(engine.state_dict())

    def work(engine):
        first = state(engine, SGD(engine.parameters()))
        expected = engine.evaluate(batches_of(engine, BATCHES[1])).loss
        state(engine, SGD(engine.parameters()))
        engine.load_state_dict(first)
        assert engine.evaluate(batches_of(engine, BATCHES[1])).loss == expected

    on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), work)


def test_an_end_has_no_gradient_beside_its_owners():
    def work(engine):
        engine.forward_backward(batches_of(engine, BATCHES[0]))
        return {name for name, parameter in engine.named_parameters().items() if parameter.grad is not None}

    found = on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), work)
    assert [f"b{owner}.linear.weight" in names for owner, names in zip((0, 0), found, strict=True)] == [True, False]


def twice(gradient):
    return gradient * 2


@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(stages_per_rank=2)], ids=["one stage", "two"])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_one_end_is_refused(method, pipeline):
    """A plain loop has one gradient, of which each end sees a part. `parameters` are those that a rank owns."""
    def work(engine, all_ends):
        for parameter in engine.named_parameters().values() if all_ends else engine.parameters():
            getattr(parameter, method)(twice if method == "register_hook" else print)
        engine.train_batch(batches_of(engine, BATCHES[0]))

    on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), partial(work, all_ends=True), optimizer=SGD, pipeline=pipeline)
    with raises("tied-end-hooked", "b0.linear.weight", "b5.linear.weight"):
        on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), partial(work, all_ends=False), optimizer=SGD, pipeline=pipeline)


@pytest.mark.parametrize("frozen", ["b0", "b5"])
@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(stages_per_rank=2)], ids=["one stage", "two"])
def test_freezing_one_end_during_the_training_is_refused(frozen, pipeline):
    """A plain loop has one parameter, which is either frozen or not."""
    def work(engine):
        engine.train_batch(batches_of(engine, BATCHES[0]))
        if frozen in engine.blocks:
            engine.blocks[frozen].requires_grad_(False)
        for batch in BATCHES[1:]:
            engine.train_batch(batches_of(engine, batch))

    with raises("tied-end-frozen", "b0.linear.weight", "b5.linear.weight"):
        on_mesh(partial(blocks, (0, 5)), Mesh(pipe=2), work, pipeline=pipeline, optimizer=SGD)


# ---------------------------------------------------------------------- the number of a parameter's values

@examples(25)
@given(st.sampled_from(SPLITS), st.integers(1, 2), st.integers(1, 3), st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]), st.integers(0, 34))
def test_parameters_with_the_same_values_have_one_number_however_they_are_cut(split, rows, cols, dtype, element):
    value = torch.linspace(-1, 1, 35).reshape(7, 5).to(dtype)
    value[0] = 0.0

    def number(value, split):
        ranks = Ranks(tied_layout(Mesh(pipe=2, row=rows, col=cols), [0, 2], [split, SPLITS[0]], 0))
        for _, _, parameter, index in ranks.each((0, "b0.w")):
            parameter.data = value[index].clone()
        return sum(_number_of(tie) for ends in ranks.ends for tie in ends.ties
                   if tie.owns and tie.is_compared) % (1 << 20)

    whole = number(value, Split(((), ()), ()))
    assert number(value, split) == whole
    other = value.clone().reshape(-1)
    other[element] += 2.0 ** -7
    assert number(other.reshape(7, 5), split) != whole


def test_a_parameter_without_dims_or_elements_has_a_number():
    for value in (torch.tensor(2.0), torch.zeros(0, 3)):
        layout = tied_layout(Mesh(pipe=2), [0, 2], [SPLITS[0]] * 2, 0)
        tie, = Ranks(layout).ends[0].ties
        shape = tuple(value.shape)
        assert 0 <= _number_of(replace(tie, parameter=nn.Parameter(value), shape=shape,
                                       box=tuple((0, size) for size in shape))) < 1 << 20
