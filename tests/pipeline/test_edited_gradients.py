"""Edits of `parameter.grad` between forward_backward and step take effect, as in a plain loop."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from ranvier.config.run import Optim
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.reference import Reference
from tests.covering import covering, label, pairwise
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, chain, merge, on_mesh, points, share
from tests.pipeline.test_ties import blocks

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
OWN = Optim(weight_decay=0.1, bucket_size=5, chunk_buckets=1)
KINDS = [{"optimizer": ADAMW}, {"optim": OWN}, {"optim": Optim(weight_decay=0.1, shard=True, offload="stream")},
         {"optim": Optim(weight_decay=0.1, clip_norm=0.05)}, {"optimizer": ADAMW, "optim": Optim(clip_norm=0.05)}]
make = partial(blocks, (0, 5))


def remove(name, parameter):
    if name == "b1.linear.weight":
        parameter.grad = None


def remove_all(name, parameter):
    parameter.grad = None


def scale(name, parameter):
    parameter.grad.mul_(3.0 if name.startswith("b2") else 0.5)


def replace(name, parameter):
    if name != "b3.linear.bias":
        parameter.grad = parameter.grad.sign() if name.startswith("b0") else 2 * parameter.grad


def freeze(name, parameter):
    """It already has a gradient, as in a plain loop: this step updates it, and no later step does."""
    if name in ("b0.linear.weight", "b2.linear.bias"):
        parameter.requires_grad_(False)


def transpose(name, parameter):
    """A view that begins at the same address as the gradient."""
    parameter.grad = parameter.grad.t()


def transpose_data(name, parameter):
    """The gradient stays the same object."""
    parameter.grad.data = 2.0 * parameter.grad.data.t()


def sparse(name, parameter):
    if name.startswith("b1"):
        parameter.grad = (2.0 * parameter.grad).to_sparse()


EDITS = [remove, remove_all, scale, replace, freeze, transpose, transpose_data, sparse]


def by_torch(edit, steps, max_norm=None):
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    optimizer = ADAMW(reference.parameters.values())
    norms = []
    for batch in steps:
        reference.forward_backward([one for replica in batch for one in replica])
        for name, parameter in reference.parameters.items():
            edit(name, parameter)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(reference.parameters.values(), max_norm)))
        optimizer.step()
    return {name: value.detach() for name, value in reference.parameters.items()}, norms


def batches(mesh):
    return [points([[2, 1], [1, 2]][:mesh.data], seed=seed) for seed in range(2)]


def owned(engine):
    """The parameters that this rank updates, by name."""
    updated = set(engine.parameters())
    return {name: parameter for name, parameter in engine.named_parameters().items() if parameter in updated}


def edit_owned(engine, edit):
    for name, parameter in owned(engine).items():
        edit(name, parameter)


def values(engine):
    return {name: parameter.detach().clone() for name, parameter in owned(engine).items()}


@pytest.mark.parametrize(("mesh", "options", "edit"), covering(
    [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)], KINDS, EDITS),
    ids=lambda one: getattr(one, "__name__", str(one)))
def test_edits_are_obeyed(mesh, options, edit):
    clip = options.get("optim", OWN).clip_norm or None
    expected, _ = by_torch(edit, batches(mesh), clip)

    def work(engine):
        for batch in batches(mesh):
            result = engine.forward_backward(share(engine, batch))
            edit_owned(engine, edit)
            engine.step(result)
        return values(engine)

    assert_close(merge(on_mesh(make, mesh, work, learning_rate=1e-2, **options), mesh), expected)


def copied(name, parameter):
    """Another tensor with the same values: nothing changes."""
    if not name.startswith("b3"):
        parameter.grad = parameter.grad.clone()


@pytest.mark.parametrize(("mesh", "options", "edit"), pairwise(
    [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(data=2, pipe=2)], KINDS,
    [copied, remove, remove_all, transpose, transpose_data, sparse]), ids=label)
def test_a_hook_replaces_gradients_in_the_backward(mesh, options, edit):
    clip = options.get("optim", OWN).clip_norm or None
    steps = batches(mesh)
    if edit not in (copied, remove, remove_all):  # the hook is called after each microbatch, by_torch's once
        steps = [points([[2], [1]][:mesh.data], seed=seed) for seed in range(2)]
    expected, _ = by_torch(edit, steps, clip)

    def work(engine):
        for name, parameter in engine.named_parameters().items():
            parameter.register_post_accumulate_grad_hook(partial(edit, name))
        for batch in steps:
            engine.train_batch(share(engine, batch))
        return values(engine)

    assert_close(merge(on_mesh(make, mesh, work, learning_rate=1e-2, **options), mesh), expected)


def clip_by_hook(parameter):
    parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def clip_when_added(parameter):
    parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad.clamp(-0.1, 0.1)))


@pytest.mark.parametrize("hook", [clip_by_hook, clip_when_added], ids=label)
@pytest.mark.parametrize(("mesh", "counts", "options", "is_told"), [
    (Mesh(), [[2]], {"nominal_weight": 8.0}, False), (Mesh(), [[2]], {}, True), (Mesh(), [[1, 1]],
    {"nominal_weight": 8.0}, True), (Mesh(data=2), [[1], [1]], {"nominal_weight": 8.0}, True)],
    ids=["one microbatch", "its summed loss", "two microbatches", "two replicas"])
def test_a_hook_that_sees_another_gradient_than_in_a_plain_loop_is_told_of(hook, mesh, counts, options, is_told):
    batch = points(counts)
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    list(map(hook, reference.parameters.values()))
    whole = [torch.cat([getattr(one, name) for replica in batch for one in replica]) for name in ("inputs", "targets")]
    reference.forward_backward([type(batch[0][0])(*whole)])

    def work(engine):
        list(map(hook, engine.named_parameters().values()))
        for _ in range(2):
            engine.zero_grad()
            engine.forward_backward(share(engine, batch))
        return {name: gradient.clone() for name, gradient in engine.gradients().items()}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = merge(on_mesh(make, mesh, work, **options), mesh)
    if not is_told:
        assert_close(found, reference.gradients())
    told = [one for one in caught if "gradient hook" in str(one.message)]
    assert len(told) == (mesh.size if is_told else 0)


@pytest.mark.parametrize(("options", "mesh"), covering(KINDS, [Mesh(data=2, pipe=2), Mesh()]), ids=label)
def test_freezing_between_the_batches_of_a_step(options, mesh):
    """A parameter that trained in any batch is updated once; one frozen, or else not reached, in all of them is not."""
    names = {"b1.linear.weight": (0,), "b3.linear.weight": (1,), "b2.linear.bias": (0, 1)}  # frozen in these batches
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    optimizer, clip = ADAMW(reference.parameters.values()), options.get("optim", OWN).clip_norm

    def freeze_in(parameters, number):
        for name in names.keys() & parameters.keys():
            parameters[name].requires_grad_(number not in names[name])

    sums = {}
    for number, batch in enumerate(batches(mesh)):
        freeze_in(reference.parameters, number)
        reference.forward_backward([one for replica in batch for one in replica])
        for name, parameter in reference.parameters.items():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad / 2  # both batches have the same weight
    for name, parameter in reference.parameters.items():
        parameter.grad = sums.get(name)
    if clip:
        nn.utils.clip_grad_norm_(reference.parameters.values(), clip)
    optimizer.step()

    def work(engine):
        for number, batch in enumerate(batches(mesh)):
            freeze_in(owned(engine), number)
            result = engine.forward_backward(share(engine, batch))
        engine.step(result)
        return values(engine)

    assert_close(merge(on_mesh(make, mesh, work, learning_rate=1e-2, **options), mesh),
                 {name: value.detach() for name, value in reference.parameters.items()})


def give(parameters):
    parameters["b0.linear.weight"].grad = torch.full_like(parameters["b0.linear.weight"], 0.5)


@pytest.mark.parametrize("options", KINDS, ids=label)
def test_a_frozen_parameter_that_is_given_a_gradient_is_updated(options):
    """As by torch's optimizers; the next step, in which it has no gradient, does not update it."""
    mesh, name = Mesh(data=2), "b0.linear.weight"
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    optimizer, clip = ADAMW(reference.parameters.values()), options.get("optim", OWN).clip_norm
    reference.parameters[name].requires_grad_(False)
    for number, batch in enumerate(batches(mesh)):
        reference.parameters[name].grad = None
        reference.forward_backward([one for replica in batch for one in replica])
        if number == 0:
            give(reference.parameters)
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters.values(), clip)
        optimizer.step()

    def work(engine):
        owned(engine)[name].requires_grad_(False)
        for number, batch in enumerate(batches(mesh)):
            result = engine.forward_backward(share(engine, batch))
            if number == 0:
                give(owned(engine))
            engine.step(result)
        return values(engine)

    assert_close(merge(on_mesh(make, mesh, work, learning_rate=1e-2, **options), mesh),
                 {name: value.detach() for name, value in reference.parameters.items()})


@pytest.mark.parametrize(("edit", "options", "mesh"), pairwise(
    [lambda name, parameter: None, remove, replace], KINDS[:3], [Mesh(), Mesh(data=2, pipe=2)]), ids=label)
def test_clipping_by_the_norm_of_all_stages(mesh, options, edit):
    expected, expected_norms = by_torch(edit, batches(mesh), 0.05)

    def work(engine):
        norms = []
        for batch in batches(mesh):
            result = engine.forward_backward(share(engine, batch))
            edit_owned(engine, edit)
            norms.append(engine.clip_grad_norm_(0.05).item())
            engine.step(result)
        return norms, values(engine)

    norms, parameters = zip(*on_mesh(make, mesh, work, learning_rate=1e-2, **options), strict=True)
    assert_close(merge(list(parameters), mesh), expected)
    assert all(found == pytest.approx(expected_norms, rel=1e-12) for found in norms)


class Difference(torch.optim.Optimizer):
    """Keeps the gradient of the previous step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            before = self.state[one].setdefault("before", one.grad)
            self.state[one]["before"] = one.grad
            one.sub_(1.5 * one.grad - 0.5 * before, alpha=0.1)


def zero_by_hand(engine):
    for one in engine.parameters():
        one.grad = None


@pytest.mark.parametrize("zero", [Engine.zero_grad, zero_by_hand, None], ids=label)
@pytest.mark.parametrize(("mesh", "options"), covering(
    [Mesh(), Mesh(data=2, pipe=2)], [{"optimizer": Difference}, {"optimizer": ADAMW}, {"optim": OWN}]), ids=label)
def test_gradients_that_a_program_keeps_stay(mesh, options, zero):
    """As in a plain loop that sets gradients to None and computes new ones."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    optimizer = options.get("optimizer", ADAMW)(reference.parameters.values())
    steps, sums = [*batches(mesh), *batches(mesh)[:1]], {}
    for batch in steps:
        reference.forward_backward([one for replica in batch for one in replica])
        for name, one in reference.parameters.items():
            if zero is not None:  # half of what was there before
                one.grad, sums[name] = (one.grad + 0.5 * sums[name] if name in sums else one.grad), one.grad
        optimizer.step()

    def work(engine):
        kept, copies = {}, {}
        for batch in steps:
            result = engine.forward_backward(share(engine, batch))
            new = {name: one.grad for name, one in owned(engine).items()}
            for name, one in owned(engine).items() if kept else ():
                assert torch.equal(kept[name], copies[name])
                one.grad = new[name] + 0.5 * kept[name]
            if zero is not None:
                kept, copies = new, {name: grad.clone() for name, grad in new.items()}
            engine.step(result)
            if zero is not None:
                zero(engine)
        return values(engine)

    found = on_mesh(make, mesh, work, learning_rate=1e-2, **options)
    assert_close(merge(found, mesh), {name: value.detach() for name, value in reference.parameters.items()})


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, pipe=2)], ids=str)
def test_views_of_gradients_that_a_program_keeps_stay(mesh):
    """As above: `detach`, a row, an array of numpy over the memory, and the engine's own dict of gradients."""
    def work(engine):
        kept = []
        for batch in batches(mesh) * 2:
            engine.train_batch(share(engine, batch))
            grads = [one.grad for one in engine.parameters()]
            kept.append(([*(grad.detach() for grad in grads), grads[0].t()[0], torch.from_numpy(grads[-1].numpy()),
                          *engine.gradients().values()],))
            kept[-1] += ([one.clone() for one in kept[-1][0]],)
            del grads
        assert all(torch.equal(*pair) for both in kept for pair in zip(*both, strict=True))
        assert len({both[0][0].data_ptr() for both in kept}) == len(kept)

    on_mesh(make, mesh, work, optimizer=ADAMW)


def test_gradients_that_nobody_keeps_have_one_memory():
    def work(engine):
        found = set()
        for batch in batches(Mesh()) * 2:
            engine.train_batch(share(engine, batch))
            found.add(tuple((one.grad.view(-1).data_ptr(), id(one.grad)) for one in engine.parameters()))
            engine.gradients()
        return len(found)

    assert on_mesh(make, Mesh(), work, optimizer=ADAMW) == [1]


def test_gradients_that_a_program_keeps_grow_within_a_step():
    """As in a plain loop that calls backward twice."""
    def work(engine):
        engine.forward_backward(share(engine, points([[2]])))
        kept = [one.grad for one in engine.parameters()]
        engine.forward_backward(share(engine, points([[2]])))
        assert all(one.grad is grad for one, grad in zip(engine.parameters(), kept, strict=True))

    on_mesh(make, Mesh(), work, optimizer=ADAMW)


def test_gradients_that_a_program_keeps_stay_after_updates_in_the_backward():
    """Blocks share one memory for their gradients, in turn."""
    batch, three = points([[3]]), partial(chain, *[partial(nn.Linear, 4, 4)] * 3)

    def work(engine):
        kept = {}
        for name, one in engine.named_parameters().items():
            one.register_post_accumulate_grad_hook(lambda one, name=name: kept.update({name: one.grad}))
        engine.train_batch(share(engine, batch))
        return kept

    found, = on_mesh(three, Mesh(), work, optim=Optim(update_in_backward=True))
    expected, = on_mesh(three, Mesh(), lambda engine: (
        engine.forward_backward(share(engine, batch)), engine.gradients())[1])
    assert_close(found, expected)


def test_nothing_to_clip_is_refused():
    def work(engine: Engine):
        engine.train_batch(share(engine, points([[2]])))
        with pytest.raises(ConfigError) as caught:
            engine.clip_grad_norm_(1.0)
        assert caught.value.where == "Engine.clip_grad_norm_" and caught.value.value == 1.0
        for value in (None, "1", -1.0, float("nan"), torch.ones(2)):
            with raises("malformed-argument", where="Engine.clip_grad_norm_(max_norm=...)"):
                engine.clip_grad_norm_(value)

    on_mesh(make, Mesh(), work, optim=OWN)


@pytest.mark.parametrize(("mesh", "warns"), [(Mesh(data=2), False), (Mesh(pipe=2), True)], ids=str)
@pytest.mark.parametrize("clip", [
    lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1.0),
    lambda engine: clip_grad_norm_((one for block in engine.blocks.values() for one in block.parameters()), 1.0),
    lambda engine: nn.utils.get_total_norm([one.grad for one in engine.parameters()]),
    lambda engine: get_total_norm(one.grad for one in engine.parameters()),
], ids=["the engine's parameters", "the module's", "the norm alone", "imported before any engine"])
def test_clipping_a_stage_by_its_own_norm_warns(mesh, warns, clip):
    def work(engine):
        engine.forward_backward(share(engine, points([[2]] * mesh.data)))
        list(engine.parameters())
        nn.utils.clip_grad_value_(engine.parameters(), 1.0)
        nn.utils.clip_grads_with_norm_(engine.parameters(), 1.0, torch.ones(()))
        torch.optim.SGD(engine.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clip(engine)
        return [str(one.message) for one in caught]

    def rank(engine):  # ranks are threads, which share warning filters
        if engine.world.rank == 0:
            return work(engine)
        return engine.forward_backward(share(engine, points([[2]] * mesh.data)))

    found = on_mesh(make, mesh, rank)[0]
    assert bool(found) is warns and all("engine.clip_grad_norm_" in text for text in found)


def test_norms_of_other_models_are_torchs_beside_an_engine():
    """In one graph of torch.compile, and in transforms of functions."""
    def rank(engine):
        norm = partial(nn.utils.get_total_norm, foreach=False)
        compiled = torch.compile(lambda tensor: norm([tensor]), fullgraph=True, backend="eager")
        tensors = torch.arange(6.0).view(2, 3)
        return [*map(compiled, tensors), *torch.func.vmap(lambda tensor: norm([tensor]))(tensors)], tensors.norm(dim=1)

    found, expected = on_mesh(make, Mesh(pipe=2), lambda engine: engine.world.rank or rank(engine))[0]
    assert torch.equal(torch.stack(found), expected.repeat(2))


@pytest.mark.parametrize("options", [{"optimizer": ADAMW}, {"optim": OWN}], ids=["torch", "ranvier"])
@pytest.mark.parametrize("call", ["train_batch", "forward_backward"])
def test_gradients_of_a_backward_before_the_batch_are_lost_with_a_warning(call, options):
    """In a plain loop the batch would add to them. Gradients after the batch count, and zeros are no loss."""
    def work(engine: Engine):
        batch = share(engine, points([[2]]))

        def own_backward():
            sum(parameter.square().sum() for parameter in engine.parameters()).backward()

        own_backward()
        with pytest.warns(UserWarning, match="before the batch is lost"):  # before the first batch, too
            engine.train_batch(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.train_batch(batch)
            result = engine.forward_backward(batch)
            own_backward()
            engine.step(result)
            for parameter in engine.parameters():
                parameter.grad.zero_()
            engine.train_batch(batch)
            own_backward()
            engine.zero_grad()
            engine.train_batch(batch)
        own_backward()
        with pytest.warns(UserWarning, match="before the batch is lost"):
            getattr(engine, call)(batch)

    on_mesh(make, Mesh(), work, **options)
