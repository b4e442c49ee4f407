"""Ranks of one replica that were given different samples: refused on every rank, before anything is updated. Replicas
that were given the same samples: a warning."""

import warnings

import pytest
import torch

from ranvier.config.run import Optim, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh, StagePlacement
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.same_on_ranks import SameTargets
from tests.covering import first
from tests.errors import raises
from tests.fake_cuda import FakeCuda
from tests.pipeline.parity import chain, on_mesh, points, share, small_gpt, tokens

MESHES = [Mesh(pipe=2), Mesh(data=2, pipe=3), Mesh(col=2), Mesh(pipe=2, col=2)]


def drawn(engine, seed):
    """Complete microbatches of this replica, from a program that gives each rank inputs and targets."""
    return tokens([[2, 1]] * engine.mesh.data, seed=seed)[engine.coordinates.data]


@pytest.mark.parametrize("mesh", first(MESHES[:3], MESHES), ids=str)
def test_samples_that_differ_within_a_replica_are_refused(mesh):
    def work(engine):
        last = engine.world.rank == mesh.size - 1
        engine.train_batch(drawn(engine, 0))
        engine.evaluate(drawn(engine, 1))
        before = [parameter.clone() for parameter in engine.parameters()]
        evaluated = engine.evaluate(drawn(engine, 2 if last else 1))
        engine.evaluate(drawn(engine, 1))
        with raises("targets-differ"):
            _ = evaluated.loss  # even if only some ranks read it
        with raises("targets-differ"):
            engine.train_batch(drawn(engine, 3 if last else 2))
        return all(map(torch.equal, before, engine.parameters()))

    assert all(on_mesh(small_gpt, mesh, work, optim=Optim()))


@pytest.mark.parametrize(("mesh", "pipeline"), [
    (Mesh(data=2), None), (Mesh(data=2, pipe=2), None), (Mesh(pipe=2), Pipeline(stages_per_rank=2))], ids=str)
def test_what_no_loss_depends_on_may_differ(mesh, pipeline):
    """Different samples on other replicas, targets on ranks that do not need them, which may also be None or
    placeholders."""
    def work(engine):
        def batch(instead):
            return [Microbatch(one.inputs, one.targets if engine.is_last_stage else instead(one.targets), one.samples)
                    for one in drawn(engine, 0)]

        for instead in (lambda targets: None, torch.zeros_like, torch.ones_like):
            assert engine.train_batch(batch(instead)).loss
        assert engine.train_batch(share(engine, tokens([[2, 1]] * mesh.data))).loss

    on_mesh(small_gpt, mesh, work, optim=Optim(), pipeline=pipeline)


def numbers_of(*targets):
    """The input of `check` if these are the targets of the first and the last stage."""
    mesh = Mesh(pipe=2)
    ends = [SameTargets(mesh.coordinates(rank), StagePlacement(num_ranks=2)) for rank in range(2)]
    return ends[0], sum(end.numbers([Microbatch(None, one) for one in batch])
                        for end, batch in zip(ends, targets, strict=True))


def some(seed, kind=torch.int64):
    return torch.randint(0, 2, (3, 4), generator=torch.Generator().manual_seed(seed)).to(kind)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
def test_numbers_of_integers_differ(kind):
    one, other = some(0, kind), some(1, kind)
    same, sums = numbers_of(*[[{"a": one.T, "b": [one], "c": 3, "d": one.float()}, one]] * 2)
    same.check(sums)
    assert sums.tolist()[:3] == [0, 2, 0]
    with raises("targets-differ"):
        same.check(numbers_of([{"a": one.T, "b": [one]}, one], [{"a": one.T, "b": [one]}, other])[1])
    singles = [torch.tensor([value]).to(kind) for value in (0, 1)]
    assert numbers_of(singles, singles)[1].tolist()[:2] == [0, 2]


@pytest.mark.parametrize(("first", "last"), [
    (torch.zeros(3, 4), torch.randn(3, 4)), (1 + 1e-5 * torch.randn(3, 4), torch.randn(3, 4)),
    (torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj()),
    (torch.full((3, 4), -100), some(0)), (torch.zeros(3, 4), some(0)), (torch.zeros(0, dtype=torch.int64), some(0)),
    (torch.zeros(0, 4), torch.zeros(0, 4)),
    ({"labels": torch.zeros(3, 4, dtype=torch.int64), "mask": some(1)}, {"labels": some(0), "mask": some(1)})],
    ids=["zeros beside reals", "nearly constant", "complex", "constant", "zeros", "none",
         "no reals", "one of two"])
def test_what_cannot_say_is_not_compared(first, last):
    same, sums = numbers_of([first], [last])
    same.check(sums)
    assert sums[1] < 2 and sums[4] < 2


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_real_numbers_differ_beyond_their_rounding(kind):
    def of(seed):
        return 3 + torch.randn(64, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(kind)

    rounded = of(0) * (1 + 1e-3 * torch.randn(64, 4, generator=torch.Generator().manual_seed(9))).to(kind)
    for other in (of(0), rounded):
        same, sums = numbers_of([of(0)], [other])
        same.check(sums)
        assert sums[4] == 2
    found = 0
    for seed in range(1, 21):
        try:
            same.check(numbers_of([{"y": of(0), "n": some(0)}], [{"y": of(seed), "n": some(0)}])[1])
        except ModelError as error:
            found += error.code == "targets-differ"
    assert found >= 18


def test_real_targets_of_other_samples_are_refused():
    def work(engine):
        with raises("targets-differ"):
            engine.train_batch(points([[4, 4]], seed=engine.world.rank)[0])
        return True

    def model():
        return chain(lambda: torch.nn.Linear(4, 4), lambda: torch.nn.Linear(4, 4))

    assert all(on_mesh(model, Mesh(pipe=2), work, optim=Optim()))


@pytest.mark.parametrize(("mesh", "own", "expected"), [
    (Mesh(data=2, pipe=2), [], "data"), pytest.param(Mesh(data=2, row=2), [], "data and row", marks=pytest.mark.slow),
    (Mesh(data=2, row=2), ["data"], "row"),
    pytest.param(Mesh(data=2, row=2), ["data", "row"], None, marks=pytest.mark.slow),
    (Mesh(data=2, col=2), ["data"], None), (Mesh(pipe=2), [], None)], ids=str)
def test_the_same_samples_along_an_axis_are_told(mesh, own, expected):
    def work(engine):
        for _ in range(2):
            engine.train_batch(tokens([[2, 1]], seed=engine.coordinates.index(own))[0])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_mesh(small_gpt, mesh, work, optim=Optim())
    assert [str(one.message).split(" were given the same samples")[0] for one in told if "same samples" in str(
        one.message)] == [f"all ranks along {expected}"] * (expected is not None)


@pytest.mark.parametrize("targets", [[some(0)], [torch.randn(3, 4)], [some(0), torch.randn(3, 4)]],
                         ids=["integers", "reals", "both"])
def test_the_host_does_not_wait_for_targets_on_a_gpu(targets):
    device = torch.device("cuda", 1)
    with FakeCuda(devices=2):
        same, there = SameTargets(Mesh(pipe=2).coordinates(1), StagePlacement(num_ranks=2)), [
            one.to(device) for one in targets]
        torch.cuda.set_sync_debug_mode("error")
        found = same.numbers([Microbatch(None, there)])
        torch.cuda.set_sync_debug_mode("default")
        assert found.device == device
