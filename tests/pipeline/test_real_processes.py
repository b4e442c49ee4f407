"""Raw gradients in fp64 equal plain PyTorch's, over real Gloo and MPI processes."""

import pytest
import torch

from ranvier.config.run import Optim, Pipeline, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_processes
from ranvier.testing.reference import Reference, relative_error
from ranvier.world import World
from tests.mpi import MPI

CONFIG = Transformer(num_layers=2, hidden=16, heads=2, vocab=32, sequence=8)


def batch_of(replica: int) -> list[Microbatch]:
    """Microbatches of unequal sizes, lengths and numbers of valid targets, different on each replica."""
    generator = torch.Generator().manual_seed(replica)
    batch = []
    for number, (samples, length) in enumerate([(2, 8), (1, 5), (2, 8), (1, 3)][:4 - replica]):
        tokens = torch.randint(0, CONFIG.vocab, (samples, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, :number + replica] = -100
        batch.append(Microbatch(tokens[:, :-1], targets))
    return batch


def errors(world: World, data: int, pipe: int, policy: str) -> list[float]:
    """Largest relative error of a gradient owned here, of the loss, and of the loss evaluated before training."""
    reference = Reference(gpt(CONFIG), dtype=torch.float64)
    expected = reference.forward_backward([microbatch for replica in range(data) for microbatch in batch_of(replica)])
    gradients = reference.gradients()
    engine = Engine(gpt(CONFIG), world, mesh=Mesh(data=data, pipe=pipe), pipeline=Pipeline(policy=policy),
                    dtype=torch.float64,
                    optim=Optim(bucket_size=125, chunk_buckets=1), sample=batch_of(0)[0])
    mine = batch_of(engine.coordinates.data)
    evaluated = engine.evaluate(mine).loss
    trained = engine.forward_backward(mine).loss
    owned = engine.gradients()
    assert owned
    worst = max(relative_error(gradient, gradients[name]) for name, gradient in owned.items())
    engine.close()
    return [float(worst), abs(trained - expected) / expected, abs(evaluated - expected) / expected]


def errors_of_all(world: World, cases: list[tuple[int, int, str]]) -> list[list[float]]:
    """Errors of one engine after another in the same processes."""
    found = [errors(world, *case) for case in cases]
    world.backend.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_gradients_equal_plain_pytorch(transport):
    cases = [(2, 2, "message-driven"), (1, 4, "message-driven"), (2, 2, "1f1b"), (1, 4, "1f1b")]
    ranks = run_processes("tests.pipeline.test_real_processes:errors_of_all", 4, transport, args=[cases],
                          timeout_seconds=240)
    assert all(len(found) == len(cases) for found in ranks)
    assert max(max(case) for found in ranks for case in found) < 1e-10
