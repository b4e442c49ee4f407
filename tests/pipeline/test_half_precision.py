"""Half precision from Python: a user's optimizer updates fp32 copies, and fp16 starts with a suitable loss scale."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.optim import masters, optimizer
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, quick
from tests.errors import raises
from tests.pipeline.parity import chain

HALF = [torch.bfloat16, torch.float16]
PLAIN = {"lr": 1e-5, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}


def squared(output, targets):
    return ((output - targets).float() ** 2).sum(), targets.numel()


def batch_of(dtype, replica, rows=3, count=2):
    generator = torch.Generator().manual_seed(replica)
    return [tuple(torch.randn(rows, 4, generator=generator).to(dtype) for _ in range(2)) for _ in range(count)]


def linears():
    """Two blocks with the same initial values on every rank, whatever other threads draw at the same time."""
    return chain(*[partial(nn.Linear, 4, 4)] * 2, loss=squared)


def train(world, mesh, dtype, steps, work=lambda engine: None, **options):
    engine = Engine(linears(), world, mesh=mesh, dtype=dtype, **options)
    scales = []
    for _ in range(steps):
        result = engine.train_batch(batch_of(dtype, engine.coordinates.data))
        scales.append((result.stepped, engine.loss_scale and engine.loss_scale.scale))
    found = {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}
    other = work(engine)
    engine.close()
    return found, scales, other


@pytest.mark.parametrize(("dtype", "accumulate"), covering(HALF, ["half", "fp32"]), ids=str)
@pytest.mark.parametrize("mesh", quick(1, [Mesh(), Mesh(data=2, pipe=2)]), ids=str)
def test_a_users_optimizer_has_fp32_master_copies(mesh, dtype, accumulate):
    """40 steps of 1e-5 are less than half of the distance between two half-precision numbers: they must add up. The
    reference is Ranvier's own AdamW, which has such copies."""
    settings = {"accumulate": accumulate, "loss_scale_window": 5, "clip_norm": 0.5}
    own = Optim(betas=PLAIN["betas"], epsilon=PLAIN["eps"], weight_decay=0.0, **settings)

    def masters(engine):
        return {name: engine.updated(parameter).detach().clone()
                for name, parameter in engine.named_parameters().items() if engine.optimizer}

    expected = run_ranks(lambda world: train(world, mesh, dtype, 40, optim=own, learning_rate=1e-5), mesh.size)
    found = run_ranks(lambda world: train(
        world, mesh, dtype, 40, masters, optim=Optim(**settings),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **PLAIN)), mesh.size)
    for (mine, scales, copies), (theirs, their_scales, _) in zip(found, expected, strict=True):
        assert scales == their_scales
        for name in theirs:
            assert torch.equal(mine[name], theirs[name])
            assert copies[name].dtype is torch.float32 and torch.equal(copies[name].to(dtype), mine[name])
            assert not torch.equal(copies[name].to(dtype).float(), copies[name]), "no bits below the parameter's"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_groups_by_identity_and_early_states_go_over_to_the_copies(dtype):
    """An optimizer may choose its groups by parameter identity, and create states when it is built."""
    def rank(world):
        model = [nn.Linear(4, 4) for _ in range(2)]
        biases = {module.bias for module in model}

        def build(parameters):
            return torch.optim.Adagrad([{"params": [one for one in parameters if one not in biases]},
                                        {"params": [one for one in parameters if one in biases], "lr": 0.0}], lr=0.1)

        engine = Engine(model, world, loss=squared, dtype=dtype, optimizer=build)
        before = [module.bias.detach().clone() for module in model]
        weights = [module.weight.detach().clone() for module in model]
        for _ in range(2):
            engine.train_batch(batch_of(dtype, 0))
        assert all(torch.equal(module.bias, old) for module, old in zip(model, before, strict=True))
        assert not any(torch.equal(module.weight, old) for module, old in zip(model, weights, strict=True))
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [2, 2]
        assert all(state["sum"].dtype is torch.float32 for state in engine.optimizer.state.values())
        assert engine.memory()["device"]["master"] == 4 * 40
        engine.close()

    run_ranks(rank, 1)


def zero_in_place(parameter):
    with torch.no_grad():
        parameter[:2].zero_()


def zero_data(parameter):
    """torch's version counter does not change."""
    parameter.data[:2].zero_()


def replace_data(parameter):
    parameter.data = torch.cat([torch.zeros_like(parameter[:2]), parameter.detach()[2:]])


def sgd(**options):
    return {"optim": Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0, **options), "learning_rate": 1e-5}


def copy_of(engine, weight):
    copy = engine.updated(weight) if engine.optimizer else torch.cat([
        part.states["master"] for part in engine.flat_optimizer.slices() if part.parameter == "b0.weight"])
    return copy.detach().view(weight.shape)


@pytest.mark.parametrize(("write", "first", "on_device"), [
    *((write, 1, on_device) for write in (zero_in_place, zero_data, replace_data) for on_device in (False, True)),
    (zero_in_place, 3, True), (replace_data, 3, True)])
@pytest.mark.parametrize(("dtype", "options"), [
    (torch.bfloat16, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-5)}),
    (torch.bfloat16, sgd()), (torch.bfloat16, sgd(offload="stream")), (torch.bfloat16, sgd(offload="host")),
    (torch.bfloat16, sgd(update_in_backward=True)), (torch.float32, sgd(offload="host"))],
    ids=["torch", "none", "stream", "host", "in backward", "host, fp32"])
def test_copies_follow_elements_that_are_written(dtype, options, write, first, on_device, monkeypatch):
    """Before step `first` and each later one two rows are written; other rows' copies keep their bits below the
    parameter's resolution. On a device two checks are enough to detect writes; version counters always do."""
    def linear(outputs, targets):
        return (outputs * targets).float().sum(), 1

    def rank(world, write):
        engine = Engine(chain(partial(nn.Linear, 4, 4), loss=linear), world, dtype=dtype, **options)
        weight = engine.named_parameters()["b0.weight"]
        for number in range(4):
            if number >= first:
                write(weight)
            engine.train_batch(batch_of(dtype, 0, count=1))
        found = [weight.detach().clone(), copy_of(engine, weight).clone()]
        write(weight)
        last = copy_of(engine, weight)
        assert torch.equal(last.to(dtype), weight), "the values that are saved"
        engine.close()
        return found

    if on_device:
        for module in (masters, optimizer):
            monkeypatch.setattr(module, "Watch", lambda device_type, watch=masters.Watch: watch("cuda"))
    (plain, plain_copy), = run_ranks(lambda world: rank(world, lambda parameter: None), 1)
    (weight, copy), = run_ranks(lambda world: rank(world, write), 1)
    assert 0 < weight[:2].abs().max() < 1e-3 and 0 < copy[:2].abs().max() < 1e-3
    assert torch.equal(copy[2:], plain_copy[2:]) and torch.equal(weight[2:], plain[2:])


def groups_of(engine):
    return [one for group in engine.optimizer.param_groups for one in group["params"]]


def plainly(engine, number):
    engine.step(engine.forward_backward(batch_of(engine.dtype, number)))


def by_the_optimizer(engine, number):
    engine.forward_backward(batch_of(engine.dtype, number))
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def skipping(engine, number):
    engine.forward_backward(batch_of(engine.dtype, 7))
    engine.zero_grad()
    engine.optimizer.step()
    for set_to_none in (True, False):
        engine.forward_backward(batch_of(engine.dtype, 7))
        engine.optimizer.zero_grad(set_to_none)
    plainly(engine, number)


def clipped(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    engine.clip_grad_norm_(0.1)
    engine.step(result)


def clipped_by_torch(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    nn.utils.clip_grad_norm_(groups_of(engine), 0.1)
    engine.step(result)


def clipped_before_the_optimizer(engine, number):
    engine.forward_backward(batch_of(engine.dtype, number))
    engine.clip_grad_norm_(0.1)
    engine.optimizer.step()


def clipped_by_torch_before_the_optimizer(engine, number):
    engine.forward_backward(batch_of(engine.dtype, number))
    nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
    engine.optimizer.step()


def clipped_after_groups_doubled(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    for one in groups_of(engine):
        one.grad = one.grad * 2.0
    engine.clip_grad_norm_(0.1)
    engine.step(result)


def none_of_the_first(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    next(iter(engine.parameters())).grad = None
    engine.step(result)


def none_of_the_first_before_the_optimizer(engine, number):
    engine.forward_backward(batch_of(engine.dtype, number))
    next(iter(engine.parameters())).grad = None
    engine.optimizer.step()
    engine.zero_grad()


def doubled(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    for one in engine.parameters():
        one.grad.mul_(2.0)
    engine.step(result)


def doubled_in_groups(engine, number):
    result = engine.forward_backward(batch_of(engine.dtype, number))
    for one in groups_of(engine):
        one.grad = one.grad * 2.0
    engine.step(result)


@pytest.mark.parametrize("accumulate", ["fp32", "half"])
@pytest.mark.parametrize(("loop", "same"), [
    (by_the_optimizer, plainly), (skipping, plainly), (clipped_by_torch, clipped), (doubled_in_groups, doubled),
    (clipped_before_the_optimizer, clipped), (clipped_by_torch_before_the_optimizer, clipped),
    (clipped_after_groups_doubled, clipped), (none_of_the_first_before_the_optimizer, none_of_the_first)])
def test_a_loop_that_works_with_the_optimizers_parameters(loop, same, accumulate):
    """The optimizer's parameters are the copies, and have the gradients of the batch."""
    def rank(world, loop):
        engine = Engine(linears(), world, dtype=torch.bfloat16, optim=Optim(accumulate=accumulate),
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9))
        engine.dtype = torch.bfloat16
        for number in range(3):
            loop(engine, number)
        found = [value.detach().clone() for one in engine.parameters() for value in (one, engine.updated(one))]
        engine.close()
        return found

    found, expected = run_ranks(partial(rank, loop=loop), 1)[0], run_ranks(partial(rank, loop=same), 1)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if accumulate == "half" else 1e-6, atol=1e-3)


def test_a_parameter_that_a_program_adds_to_a_group_has_a_copy():
    def rank(world):
        engine = Engine(linears(), world, dtype=torch.bfloat16, optimizer=lambda parameters: torch.optim.SGD(
            [one for one in parameters if one.dim() == 1], lr=1e-5))
        engine.train_batch(batch_of(torch.bfloat16, 0))
        engine.optimizer.add_param_group({"params": [one for one in engine.parameters() if one.dim() == 2]})
        engine.train_batch(batch_of(torch.bfloat16, 0))
        assert all(engine.updated(one).dtype is torch.float32 for one in engine.parameters())
        assert {id(engine.updated(one)) for one in engine.parameters()} == set(map(id, groups_of(engine)))
        assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in groups_of(engine) if copy.dim() == 2)
        engine.close()

    run_ranks(rank, 1)


@torch.no_grad()
def halve(optimizer, *_):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.data.mul_(0.5)


def halve_in_place(one):
    with torch.no_grad():
        one.mul_(0.5)


def halve_data(one):
    """The version does not change, and evaluations do not see the write, but the next update does."""
    one.data.mul_(0.5)


def halve_memory(one):
    one.data = one.data * 0.5


@pytest.mark.parametrize("write", [None, halve_in_place, halve_data, halve_memory])
def test_a_program_that_writes_what_the_optimizer_updates(write):
    """By a hook, or between steps. Forwards use the written values."""
    def rank(world):
        engine = Engine(linears(), world, dtype=torch.bfloat16,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        before = [one.detach().clone() for one in engine.parameters()]
        if write is None:
            engine.optimizer.register_step_post_hook(halve)
            engine.train_batch(batch_of(torch.bfloat16, 0))
        else:
            engine.train_batch(batch_of(torch.bfloat16, 0))
            list(map(write, groups_of(engine)))
        if write is halve_data:
            engine.train_batch(batch_of(torch.bfloat16, 0))
        engine.evaluate(batch_of(torch.bfloat16, 0))
        found = [one.detach().clone() for one in engine.parameters()]
        assert all(torch.equal(one, 0.5 * other) for one, other in zip(found, before, strict=True))
        engine.close()

    run_ranks(rank, 1)


def by_copy(parameter, values):
    with torch.no_grad():
        parameter.copy_(values)


def by_memory(parameter, values):
    parameter.data = values


@pytest.mark.parametrize("swap", [by_copy, by_memory])
def test_an_evaluation_of_other_values_leaves_the_copies_what_they_have_below_the_parameters_resolution(swap):
    """A program replaces parameters with averages, evaluates, and restores the parameters."""
    def rank(world, swaps):
        engine = Engine(linears(), world, dtype=torch.bfloat16,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5))
        for _ in range(5):
            engine.train_batch(batch_of(torch.bfloat16, 0))
            kept = {one: one.detach().clone() for one in engine.parameters()}
            for one in kept if swaps else ():
                swap(one, torch.ones_like(one))
            engine.evaluate(batch_of(torch.bfloat16, 0))
            for one, values in kept.items() if swaps else ():
                swap(one, values)
        found = [engine.updated(one).detach().clone() for one in engine.parameters()]
        engine.close()
        return found

    (swapped,), (plain,) = (run_ranks(partial(rank, swaps=swaps), 1) for swaps in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(swapped, plain, strict=True))


class Alone:
    """An optimizer whose parameters are only in a list of its own."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        raise AssertionError


class Beside(torch.optim.SGD):
    def __init__(self, parameters):
        self.parameters = list(parameters)
        super().__init__(self.parameters)


class Inside(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.parts = {"all": [torch.optim.SGD(parameters)]}
        super().__init__(parameters, {})


class Around(torch.optim.Optimizer):
    """It shares the inner optimizer's groups, as Lookahead does."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self):
        self.inner.step()


def test_an_optimizer_around_another():
    def rank(world, optimizer):
        engine = Engine(linears(), world, dtype=torch.bfloat16, optimizer=optimizer)
        engine.train_batch(batch_of(torch.bfloat16, 0))
        found = [engine.updated(one).detach().clone() for one in engine.parameters()]
        engine.close()
        return found

    found, expected = (run_ranks(partial(rank, optimizer=one), 1)[0]
                       for one in (Around, partial(torch.optim.SGD, lr=0.1)))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("optimizer", "code"), [
    (Alone, "optimizer-without-groups"), (Beside, "optimizer-keeps-parameters"),
    (Inside, "optimizer-keeps-parameters")])
def test_an_optimizer_in_which_copies_cannot_take_the_places_of_parameters(optimizer, code):
    with raises(code, where="optimizer", value=optimizer.__name__):
        run_ranks(lambda world: Engine(linears(), world, dtype=torch.bfloat16, optimizer=optimizer), 1)


def test_copies_go_through_a_checkpoint(tmp_path):
    """Two steps, a checkpoint, and two more steps equal four steps, in every bit of the copies."""
    def rank(world, steps, folder=None, load=False):
        engine = Engine(linears(), world, mesh=Mesh(pipe=2), dtype=torch.bfloat16,
                        optimizer=lambda parameters: torch.optim.AdamW(parameters, **PLAIN))
        checkpoints = Checkpoints(engine, folder) if folder else None
        if load:
            checkpoints.load()
        for _ in range(steps):
            engine.train_batch(batch_of(torch.bfloat16, 0))
        if folder and not load:
            checkpoints.save()
        found = {name: engine.updated(parameter).detach().clone()
                 for name, parameter in engine.named_parameters().items()}
        if checkpoints:
            checkpoints.close()
        engine.close()
        return found

    expected = run_ranks(partial(rank, steps=4), 2)
    run_ranks(partial(rank, steps=2, folder=tmp_path), 2)
    for mine, theirs in zip(run_ranks(partial(rank, steps=2, folder=tmp_path, load=True), 2), expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# ---------------------------------------------------------------------- fp16 and the weight of a batch

def wide_batch(dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(64, 16, generator=generator).to(dtype) for _ in range(2)) for _ in range(8)]


@pytest.mark.parametrize(("mesh", "counts", "options"), covering(
    [(Mesh(), [8]), (Mesh(data=2, pipe=2), [8, 8]), (Mesh(data=2), [8, 0])], [{}, {"nominal_weight": 1.0}]), ids=str)
def test_fp16_skips_no_step_at_the_start(mesh, counts, options):
    """Sums over thousands of targets times the loss scale overflow; a replica without a microbatch is informed, too."""
    def rank(world):
        model = chain(partial(nn.Linear, 16, 16), nn.Tanh, partial(nn.Linear, 16, 16), loss=squared)
        engine = Engine(model, world, mesh=mesh, dtype=torch.float16, optim=Optim(), **options)
        batch = wide_batch()[:counts[engine.coordinates.data]]
        for _ in range(6):
            engine.train_batch(batch)
        factor, skipped = engine._updater.loss_factor, engine.loss_scale.skipped_steps
        engine.close()
        return factor, skipped

    found = run_ranks(rank, mesh.size)
    assert set(found) == {(65536.0 / (sum(counts) * 1024), 0)}


def test_a_first_batch_without_a_valid_target_leaves_the_estimate_to_the_next():
    def loss(output, targets):
        return ((output - targets.nan_to_num()).float() ** 2).sum(), 0 if targets.isnan().all() else 64

    def rank(world):
        engine = Engine(chain(partial(nn.Linear, 16, 16), loss=loss), world, mesh=Mesh(data=2), dtype=torch.float16,
                        optim=Optim())
        nothing = [(torch.zeros(2, 16).half(), torch.full((2, 16), float("nan")).half())]
        engine.train_batch(nothing)
        first = engine._updater.nominal_weight
        engine.train_batch(nothing if world.rank == 0 else [(one[:2], one[:2]) for one in wide_batch()[0][:1]])
        nominal = engine._updater.nominal_weight
        engine.close()
        return first, nominal

    with pytest.warns(UserWarning, match="no valid target"):
        assert run_ranks(rank, 2) == [(1.0, 64.0)] * 2
