"""A checkpoint contains a user's complete torch optimizer, and the objects that belong to it, on every mesh."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.elastic.transition import hand_over, take
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, chain, points, share
from tests.pipeline.test_unusual_blocks import Plain

make = partial(chain, Plain, Plain, Plain, Plain)
BATCHES = [points([[2, 1]], seed=seed) for seed in range(6)]
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(optimizer, [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [3])}


def grouped(parameters, kind=torch.optim.AdamW, **options):
    """An optimizer with separate groups of weights and biases."""
    groups = [[parameter for parameter in parameters if parameter.dim() == dims] for dims in (2, 1)]
    return kind([{"params": group, "weight_decay": 0.1 * (2 - place)} for place, group in enumerate(groups) if group],
                lr=1e-2, **options)


def train(engine, scheduler, batches):
    for batch in batches:
        engine.train_batch(share(engine, batch if engine.mesh.data == 1 else [batch[0][:1], batch[0][1:]]))
        if scheduler is not None:
            scheduler.step()


def build(world, mesh, optimizer=grouped):
    return Engine(make(), world, mesh=mesh, seed=SEED, dtype=torch.float64, optimizer=optimizer)


def values(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}


@pytest.mark.parametrize(("after", "scheduled"), covering(
    [Mesh(pipe=2), Mesh(), Mesh(data=2, pipe=2)], list(SCHEDULERS)), ids=str)
def test_training_goes_on_as_if_never_interrupted(after, scheduled, tmp_path):
    reference = Reference(make(), seed=SEED, dtype=torch.float64, optimizer=grouped)
    scheduler = SCHEDULERS[scheduled](reference._optimizer)
    for batch in BATCHES:
        reference.train_batch(batch[0])
        scheduler.step()

    def first(world):
        engine = build(world, Mesh(pipe=2))
        scheduler = SCHEDULERS[scheduled](engine.optimizer)
        train(engine, scheduler, BATCHES[:3])
        checkpoints = Checkpoints(engine, tmp_path, objects={"scheduler": scheduler})
        checkpoints.save()
        assert not [one.error for one in checkpoints.wait() if one.error]

    def second(world):
        engine = build(world, after, partial(grouped, eps=1e-3))
        scheduler = SCHEDULERS[scheduled](engine.optimizer)
        Checkpoints(engine, tmp_path, objects={"scheduler": scheduler}).load()
        assert engine.optimizer.param_groups[0]["eps"] == 1e-8
        train(engine, scheduler, BATCHES[3:])
        return values(engine), [group["lr"] for group in engine.optimizer.param_groups]

    run_ranks(first, 2)
    for parameters, rates in run_ranks(second, after.size):
        assert_close(parameters, {name: reference.parameters[name].detach() for name in parameters})
        assert rates == [group["lr"] for group in reference._optimizer.param_groups]


class Transposed(nn.Module):
    """Its weight, and so its states, are not in memory in the order of their elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4).t())

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_states_that_lie_otherwise_in_memory(dtype, tmp_path):
    def rank(world, batches, load=False):
        engine = Engine(chain(Transposed, Transposed), world, seed=SEED, dtype=dtype,
                        optimizer=partial(torch.optim.AdamW, lr=0.1))
        checkpoints = Checkpoints(engine, tmp_path)
        if load:
            checkpoints.load()
        for batch in batches:
            engine.train_batch([(one.inputs.to(dtype), one.targets.to(dtype)) for one in batch[0]])
        if not load:
            checkpoints.save()
            checkpoints.wait()
        found = {name: engine.updated(one).detach().clone() for name, one in engine.named_parameters().items()}
        checkpoints.close()
        return found

    run_ranks(partial(rank, batches=BATCHES[:2]), 1)
    found, = run_ranks(partial(rank, batches=BATCHES[2:4], load=True), 1)
    expected, = run_ranks(partial(rank, batches=BATCHES[:4]), 1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Counting(torch.optim.SGD):
    """Counts in a Python number, and keeps its rate in a tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=torch.tensor(lr), foreach=False)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                assert isinstance(state["count"], int)
        return super().step(closure)


def test_numbers_stay_numbers_and_tensors_stay_tensors(tmp_path):
    def rank(world, load):
        engine = build(world, Mesh(), partial(Counting, lr=0.5 if load else 0.25))
        checkpoints = Checkpoints(engine, tmp_path)
        if load:
            rate = engine.optimizer.param_groups[0]["lr"]
            checkpoints.load()
            assert engine.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25
        train(engine, None, BATCHES[:1])
        checkpoints.save()
        assert not [one.error for one in checkpoints.wait() if one.error]
        checkpoints.close()
        return {state["count"] for state in engine.optimizer.state.values()}

    assert run_ranks(partial(rank, load=False), 1) == [{1}]
    assert run_ranks(partial(rank, load=True), 1) == [{2}]


class OfManyKinds(torch.optim.Optimizer):
    """Has states of other number formats than the parameter, a Python float, and a count in its groups; ignores
    vectors."""

    def __init__(self, parameters):
        super().__init__([one for one in parameters if one.dim() > 1], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(sum=torch.zeros_like(parameter), decay=0.1, signs=torch.zeros_like(
                        parameter, dtype=torch.bool))
                state["decay"] *= 0.9
                state["signs"] ^= parameter.grad > 0
                state["sum"].mul_(1 - state["decay"]).add_(parameter.grad)
                parameter -= group["lr"] / group["count"] * (state["sum"] + 0.01 * ~state["signs"])


class WithNothing(Plain):
    """Has a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


@pytest.mark.parametrize("optimizer", [OfManyKinds, partial(torch.optim.AdamW, lr=0.1)], ids=["own", "adamw"])
@pytest.mark.parametrize("transition", [False, True])
def test_states_of_many_kinds(optimizer, transition, tmp_path):
    """The states move to another mesh, from rank to rank or through a checkpoint."""
    def build(world, mesh):
        return Engine(chain(Transposed, WithNothing, Plain), world, mesh=mesh, seed=SEED, dtype=torch.float64,
                      optimizer=optimizer)

    def both(world):
        engine = build(world, Mesh(pipe=2))
        train(engine, None, BATCHES[:2])
        if transition:
            held = take(engine)
        else:
            checkpoints = Checkpoints(engine, tmp_path)
            checkpoints.save()
            checkpoints.wait()
            checkpoints.close()
        engine.optimizer.state_dict()  # torch fails if the search for states has created new ones
        engine.close()
        engine = build(world, Mesh(data=2))
        if transition:
            hand_over(held, engine, world.backend, timeout_seconds=20.0)
        else:
            Checkpoints(engine, tmp_path).load()
        train(engine, None, BATCHES[2:4])
        return values(engine)

    reference = Reference(chain(Transposed, WithNothing, Plain), seed=SEED, dtype=torch.float64, optimizer=optimizer)
    for batch in BATCHES[:4]:
        reference.train_batch(batch[0])
    assert_close(run_ranks(both, 2)[0], {name: one.detach() for name, one in reference.parameters.items()})


def test_other_groups_are_refused(tmp_path):
    def first(world):
        checkpoints = Checkpoints(build(world, Mesh()), tmp_path)
        checkpoints.save()
        checkpoints.wait()
        checkpoints.close()

    run_ranks(first, 1)
    parameters = []

    def second(world):
        engine = build(world, Mesh(), partial(torch.optim.AdamW, lr=1e-2))
        parameters.extend(engine.named_parameters().values())
        torch._foreach_zero_([parameter.detach() for parameter in parameters])
        Checkpoints(engine, tmp_path).load()

    with raises("optimizer-groups-differ", 0, "step-0"):
        run_ranks(second, 1)
    assert parameters and not any(parameter.any() for parameter in parameters), "refused before anything is read"


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=4)], ids=str)
def test_groups_whose_parameters_were_all_frozen(mesh, tmp_path):
    """They go on with the settings of the one group that was like them, but for what schedulers change. At first only
    the last block trains, which has no bias."""
    def rank(world, frozen, decays, rate):
        def optimizer(parameters):
            return torch.optim.SGD([{"params": [one for one in parameters if one.dim() == dims], "weight_decay": decay}
                                    for dims, decay in zip((2, 1), decays, strict=True)], lr=rate)

        model = chain(Plain, Plain, Plain, partial(nn.Linear, 4, 4, bias=False))
        engine = Engine(replace(model, layers=(("b0",), ("b1",), ("b2",))), world, mesh=mesh, frozen=frozen, seed=SEED,
                        dtype=torch.float64, optimizer=optimizer)
        checkpoints = Checkpoints(engine, tmp_path)
        groups = [] if engine.optimizer is None else engine.optimizer.param_groups
        if frozen:
            for number, group in enumerate(groups):
                group["lr"] = rate / (2 + number * (decays[0] == decays[1]))
            checkpoints.save()
            assert not [one.error for one in checkpoints.wait() if one.error]
        else:
            checkpoints.load()
        checkpoints.close()
        return [(group["lr"], group["weight_decay"]) for group in groups]

    run_ranks(lambda world: rank(world, 3, (0.2, 0.1), 0.1), mesh.size)
    assert run_ranks(lambda world: rank(world, 0, (0.2, 0.1), 0.1), mesh.size) == [
        [(0.05, 0.2), (0.05, 0.1)]] * mesh.size
    run_ranks(lambda world: rank(world, 3, (0.2, 0.2), 0.1), mesh.size)
    with raises("optimizer-groups-alike"):
        run_ranks(lambda world: rank(world, 0, (0.2, 0.2), 0.1), mesh.size)


@pytest.mark.parametrize("saved", [[0.1], [0.1, 0.2]])
def test_a_new_group_with_a_learning_rate_of_its_own_keeps_it(saved, tmp_path):
    """The checkpoint has the groups of the last block. The new group, of a block that was frozen, is another one."""
    def rank(world, frozen, rates):
        def optimizer(parameters):
            parts = [parameters[-2:]] if len(saved) == 1 else [[parameters[-2]], [parameters[-1]]]
            return torch.optim.SGD([{"params": part, "lr": rate}
                                    for part, rate in zip([*parts, parameters[:-2]], rates, strict=False)])

        engine = Engine(replace(chain(Plain, Plain), layers=(("b0",),)), world, frozen=frozen, seed=SEED,
                        dtype=torch.float64, optimizer=optimizer)
        checkpoints = Checkpoints(engine, tmp_path)
        if frozen:
            checkpoints.save()
        else:
            checkpoints.load()
        checkpoints.close()
        return [group["lr"] for group in engine.optimizer.param_groups]

    run_ranks(lambda world: rank(world, 1, saved), 1)
    assert run_ranks(lambda world: rank(world, 0, [0.05 * rate for rate in saved] + [0.01]), 1) == [[*saved, 0.01]]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_a_group_that_is_added_later_is_added_before_the_load(mesh, tmp_path):
    """Otherwise the group's settings and states have no place, and the load fails."""
    def rank(world, add, code=None):
        engine = build(world, mesh, lambda parameters: torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9))
        if add:
            engine.optimizer.add_param_group({"params": engine.parameters()[1:], "lr": add})
        checkpoints = Checkpoints(engine, tmp_path)
        if code is None:
            checkpoints.load()
            train(engine, None, BATCHES[:1])
            checkpoints.save()
            assert not checkpoints.wait()[0].error
            checkpoints.close()
        else:
            with raises(code):
                checkpoints.load()
        return [group["lr"] for group in engine.optimizer.param_groups]

    run_ranks(lambda world: rank(world, 0.05), mesh.size)
    assert run_ranks(lambda world: rank(world, 0.3), mesh.size) == [[0.1, 0.05]] * mesh.size
    run_ranks(lambda world: rank(world, None, "optimizer-lacks-parameter"), mesh.size)


class WithAFunction(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__([{"params": parameters, "hook": len}], lr=0.1)


class WithAList(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state[parameters[0]]["history"] = [1.0]


class WithItsOwnPart(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def state_dict(self):
        return {**super().state_dict(), "extra": 1}


class WithACommonState(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state["common"]["steps"] = 1


@pytest.mark.parametrize(("kind", "code", "value"), [
    (WithAFunction, "optimizer-setting-not-json", "builtin_function_or_method"),
    (WithAList, "optimizer-state-type", "list"), (WithItsOwnPart, "optimizer-part-of-its-own", "WithItsOwnPart"),
    (WithACommonState, "optimizer-state-of-no-parameter", "common")])
def test_what_cannot_be_kept_is_refused(kind, code, value, tmp_path):
    with raises(code, where="the optimizer", value=value):
        run_ranks(lambda world: Checkpoints(build(world, Mesh(), kind), tmp_path).save(), 1)


class WithAttributes(torch.optim.SGD):
    """Has attributes of many kinds, which `change` changes in each step."""

    def __init__(self, parameters, change=None):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.history, self.average, self.is_ready, self.change = 0, [], None, False, change
        self.inner = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
        self.outer_state = self.state

    def step(self, closure=None):
        super().step()
        self.is_ready = True
        if self.change is not None:
            self.change(self)


def averages(optimizer):
    optimizer.average = torch.ones(2)


@pytest.mark.parametrize(("change", "name"), [
    (None, None), (lambda one: setattr(one, "count", one.count + 1), "count"), (averages, "average"),
    (lambda one: one.history.append(one.count), "history"), (lambda one: one.inner.step(), "inner")],
    ids=["none", "count", "average", "history", "inner"])
def test_attributes_that_are_in_no_state_are_told_of_once(change, name, tmp_path):
    def rank(world):
        engine = build(world, Mesh(), partial(WithAttributes, change=change))
        scheduler = lr_scheduler.StepLR(engine.optimizer, 2)
        train(engine, scheduler, BATCHES[:2])
        engine.state_dict()
        Checkpoints(engine, tmp_path).save()
        engine.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank, 1)
    told = [str(one.message) for one in caught if "is not saved" in str(one.message)]
    assert [one.split()[1] for one in told] == ([] if name is None else [name])


# ---------------------------------------------------------------------- objects

ONE_RANK = Mesh(), Mesh()


class Kept:
    """An object whose state is `state`."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]


def through(objects, loaders, tmp_path, meshes=ONE_RANK):
    """Save `objects(rank)` on the first mesh, load them into `loaders(rank)` on the second; returns these by rank."""
    def first(world):
        checkpoints = Checkpoints(build(world, meshes[0]), tmp_path, objects=objects(world.rank))
        checkpoints.save()
        assert not [one.error for one in checkpoints.wait() if one.error]
        checkpoints.close()

    def second(world):
        found = loaders(world.rank)
        Checkpoints(build(world, meshes[1]), tmp_path, objects=found).load()
        return found

    run_ranks(first, meshes[0].size)
    return run_ranks(second, meshes[1].size)


def test_every_kind_of_value(tmp_path):
    state = [1, 2.5, float("inf"), None, True, "text", (1, [2]), {"a": {3: "b"}}, torch.arange(6.0).view(2, 3),
             torch.tensor(3), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    (found,) = through(lambda rank: {"kept": Kept(state)}, lambda rank: {"kept": Kept(None)}, tmp_path)
    assert found["kept"].state[:8] == state[:8]
    for mine, theirs in zip(found["kept"].state[8:], state[8:], strict=True):
        assert torch.equal(mine, theirs) and mine.dtype is theirs.dtype


def test_each_rank_has_its_own_on_the_mesh_that_wrote_it(tmp_path):
    ranks = through(lambda rank: {"kept": Kept(rank)}, lambda rank: {"kept": Kept(None)}, tmp_path, (Mesh(data=2),) * 2)
    assert [found["kept"].state for found in ranks] == [0, 1]


def test_on_another_mesh_it_must_be_alike(tmp_path):
    ranks = through(lambda rank: {"kept": Kept([7]), "here": Kept(1) if rank else None},
                    lambda rank: {"kept": Kept(None), "here": Kept(None)}, tmp_path / "alike",
                    (Mesh(data=2), Mesh(pipe=4)))
    assert [(found["kept"].state, found["here"].state) for found in ranks] == [([7], 1)] * 4
    with raises("object-states-differ", "kept"):
        through(lambda rank: {"kept": Kept(rank)}, lambda rank: {"kept": Kept(None)}, tmp_path / "different",
                (Mesh(data=2), Mesh()))


def test_objects_that_are_missing_on_either_side(tmp_path):
    with raises("checkpoint-without-object", "other"):
        through(lambda rank: {"one": Kept(1)}, lambda rank: {"other": Kept(None)}, tmp_path / "here")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        through(lambda rank: {"one": Kept(1), "two": Kept(2)}, lambda rank: {"two": None}, tmp_path / "there")
    assert ["no one" in str(one.message) for one in found] == [True]


@pytest.mark.parametrize(("objects", "code"), [({"it": 3}, "object-without-state"),
                                               ({3: Kept(1)}, "malformed-argument")])
def test_what_is_no_object_is_refused(objects, code, tmp_path):
    with raises(code, where="Checkpoints(objects=...)"):
        run_ranks(lambda world: Checkpoints(build(world, Mesh()), tmp_path, objects=objects), 1)


itself: list[object] = []
itself.append(itself)


@pytest.mark.parametrize(("state", "place", "value"), [
    (len, "['state'][0]", "builtin_function_or_method"), (itself, "", "something that contains itself"),
    (torch.ones(2, dtype=torch.complex64), "['state'][0]", "a tensor of torch.complex64, torch.strided, cpu"),
    (torch.eye(2).to_sparse(), "['state'][0]", "a tensor of torch.float32, torch.sparse_coo, cpu"),
    (torch.ones(2, device="meta"), "['state'][0]", "a tensor of torch.float32, torch.strided, meta")],
    ids=["function", "recursive", "complex", "sparse", "meta"])
def test_a_state_of_other_kinds_is_refused(state, place, value, tmp_path):
    with raises("object-state-type", where=f"objects['it']{place}", value=value):
        run_ranks(lambda world: Checkpoints(build(world, Mesh()), tmp_path, objects={"it": Kept([state])}).save(), 1)


def test_a_rank_that_cannot_save_keeps_no_other_waiting(tmp_path):
    """Nor does its next part become part of the checkpoint that it has failed to write."""
    def rank(world):
        engine, kept = build(world, Mesh(data=2)), Kept(len if world.rank else 1)
        checkpoints = Checkpoints(engine, tmp_path, objects={"it": kept})
        if world.rank:
            with raises("object-state-type"):
                checkpoints.save()
        else:
            checkpoints.save()
        kept.state = 1
        train(engine, None, BATCHES[:1])
        checkpoints.save()
        return [(one.step, one.error) for one in checkpoints.wait()]

    with pytest.warns(match="step 0 .*rank 1"):
        assert run_ranks(rank, 2, timeout_seconds=10.0) == [[(1, None)]] * 2
