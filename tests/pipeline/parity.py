"""Runs a model on in-process ranks and compares the result with plain PyTorch: shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from benchmarks.slow_links import slowed
from ranvier.block import Initial, Model
from ranvier.config.run import Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference, relative_error

SEED = 3
IGNORED = -100
TOLERANCE = 1e-10
Batches = Sequence[Sequence[Microbatch]]
"""One sequence of microbatches for each replica."""
FP64_SUMS = pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13),
                               reason="torch 2.11 gives attention's sums of fp64 in fp32 on the meta device")


# ---------------------------------------------------------------------- models

def frozen(model: Model, is_frozen: Callable[[str], bool]) -> Model:
    """`model` with those parameters frozen whose global name `is_frozen` accepts."""
    def builder(block: str, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def frozen_build() -> nn.Module:
            module = build()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not is_frozen(f"{block}.{name}"))
            return module
        return frozen_build

    return replace(model, blocks={block: builder(block, build) for block, build in model.blocks.items()})


def chain(*builders: Callable[[], nn.Module], tied: tuple[tuple[str, ...], ...] = (), loss=None) -> Model:
    """A model of blocks b0, b1, ..., whose initial values depend only on the seed and the names."""
    return Model(blocks={f"b{number}": builder for number, builder in enumerate(builders)}, loss=loss or squared,
                 tied=tied, initial=lambda name: Initial("normal", 0.4))


def squared(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squared errors of the targets that count, and their number."""
    valid = targets != IGNORED
    return ((outputs - targets) ** 2 * valid).sum(), valid.sum()


def small_gpt(num_layers: int = 3, **changed) -> Model:
    """A GPT of 2 num_layers + 2 blocks in fp64."""
    config = dict(num_layers=num_layers, hidden=8, heads=2, vocab=13, sequence=6) | changed
    return gpt(Transformer(**config), dtype=torch.float64)


def chunks_of(size: int) -> Optim:
    """Settings that reduce gradients in chunks of `size` elements."""
    return Optim(bucket_size=size, chunk_buckets=1)


# ---------------------------------------------------------------------- data

def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed))


def points(counts: Sequence[Sequence[int]], width: int = 4, out: int = 4, seed: int = 0) -> Batches:
    """Real vectors for `chain`: counts[replica][microbatch] samples."""
    samples = iter(range(1 << 30))
    return [[Microbatch(torch.randn(count, width, generator=(g := generator(seed, replica, number)),
                                    dtype=torch.float64),
                        torch.randn(count, out, generator=g, dtype=torch.float64),
                        torch.tensor([next(samples) for _ in range(count)], dtype=torch.int64))
             for number, count in enumerate(microbatches)] for replica, microbatches in enumerate(counts)]


def tokens(counts: Sequence[Sequence[int]], lengths: Sequence[int] = (6,), vocab: int = 13, ignored: float = 0.0,
           seed: int = 0) -> Batches:
    """Token sequences for `small_gpt`, of alternating lengths; a share `ignored` of the targets does not count."""
    samples = iter(range(1 << 30))
    batches = []
    for replica, microbatches in enumerate(counts):
        batches.append([])
        for number, count in enumerate(microbatches):
            g = generator(seed, replica, number)
            ids = torch.randint(0, vocab, (count, lengths[number % len(lengths)] + 1), generator=g)
            targets = ids[:, 1:].clone()
            targets[torch.rand(targets.shape, generator=g) < ignored] = IGNORED
            batches[-1].append(Microbatch(ids[:, :-1], targets,
                                          torch.tensor([next(samples) for _ in range(count)], dtype=torch.int64)))
    return batches


# ---------------------------------------------------------------------- runs

@dataclass
class Outcome:
    """What a mesh computed: gradients by owner's name, and each rank's loss, weight and norm."""

    gradients: dict[str, Tensor]
    losses: list[float]
    weights: list[float]
    norms: list[float]
    others: list


def share(engine: Engine, batches: Batches) -> list[Microbatch]:
    """The parts of its replica's microbatches that this rank of the mesh needs."""
    return [Microbatch(one.inputs if engine.is_first_stage else None, one.targets if engine.is_last_stage else None,
                       one.samples) for one in batches[engine.coordinates.data]]


def on_mesh(make: Callable[[], Model], mesh: Mesh, work: Callable[[Engine], object], *, throttle=None,
            run_seconds: float = 60.0, **options) -> list:
    """Results of `work(engine)` on every rank, in rank order."""
    def rank(world):
        engine = Engine(make(), world, mesh=mesh, seed=SEED, dtype=torch.float64, **options)
        result = work(engine)
        engine.close()
        return result

    return run_ranks(slowed(rank, throttle), mesh.size, timeout_seconds=run_seconds)


def merge(found: list[dict[str, Tensor]], mesh: Mesh) -> dict[str, Tensor]:
    """One dict of all ranks' tensors; each is owned by one stage, and bit-identical on all ranks of that stage."""
    merged: dict[str, tuple[int, Tensor]] = {}
    for rank, tensors in enumerate(found):
        stage = mesh.coordinates(rank).pipe
        for name, tensor in tensors.items():
            home, first = merged.setdefault(name, (stage, tensor))
            assert home == stage, f"{name} is owned by stages {home} and {stage}"
            assert torch.equal(tensor, first), f"{name} differs between replicas"
    return {name: tensor for name, (_, tensor) in merged.items()}


def gradients_on(make: Callable[[], Model], batches: Batches, mesh: Mesh,
                 also: Callable[[Engine], object] = lambda engine: None, **options) -> Outcome:
    """Gradients, loss, weight and norm of one batch on `mesh`."""
    def work(engine: Engine):
        other = also(engine)
        result = engine.forward_backward(share(engine, batches))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        return gradients, result.loss, result.weight, result.grad_norm, other

    gradients, losses, weights, norms, others = zip(*on_mesh(make, mesh, work, **options), strict=True)
    return Outcome(merge(list(gradients), mesh), list(losses), list(weights), list(norms), list(others))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Exactly the expected tensors are there, and each is within the tolerance."""
    assert set(actual) == set(expected)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"relative errors {wrong}"


def assert_parity(make: Callable[[], Model], batches: Batches, mesh: Mesh, **options) -> Outcome:
    """Raw gradients, loss and norm on `mesh` equal those of one process with plain PyTorch."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([one for replica in batches for one in replica])
    expected = reference.gradients()
    outcome = gradients_on(make, batches, mesh, **options)
    assert_close(outcome.gradients, expected)
    norm = sum(float((gradient ** 2).sum()) for gradient in expected.values()) ** 0.5
    for rank in range(mesh.size):
        if loss == loss:
            assert abs(outcome.losses[rank] - loss) <= TOLERANCE * abs(loss)
        else:
            assert outcome.losses[rank] != outcome.losses[rank]
        assert abs(outcome.norms[rank] - norm) <= TOLERANCE * norm
    return outcome
