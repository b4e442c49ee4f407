"""Raw gradients in fp64 equal plain PyTorch's on a tensor mesh of real Gloo and MPI processes."""

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_processes
from ranvier.testing.reference import Reference, relative_error
from ranvier.world import World
from tests.mpi import MPI, NEEDS_MPI
from tests.tensor.split_parity import SCHEMES, SEED, every, share, tiny_gpt, token_batches


class Descent:
    """Plain SGD; torch's optimizers import its compiler, which takes seconds in each process."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter -= 1e-2 * parameter.grad


def errors(world: World, rows: int, cols: int, scheme: str) -> list[float]:
    """Largest relative error of the gradients owned here, and errors of the losses before and after a step."""
    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh, count=2)
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64, optimizer=Descent)
    expected = reference.train_batch(every(batches))
    engine = Engine(tiny_gpt(), world, mesh=mesh, seed=SEED, dtype=torch.float64, tensor=SCHEMES[scheme],
                    optim=Optim(algorithm="sgd", weight_decay=0.0, bucket_size=500), learning_rate=1e-2)
    mine = share(engine, batches)
    result = engine.forward_backward(mine)
    found = [abs(result.loss - expected) / expected]
    for name, gradient in engine.gradients().items():
        box = engine.layout.box(engine.layout[name], engine.coordinates.position)
        found.append(relative_error(gradient.cpu(), reference.gradients()[name][tuple(slice(*edges) for edges in box)]))
    engine.step(result)
    expected = reference.evaluate(every(batches))
    found.append(abs(engine.evaluate(mine).loss - expected) / expected)
    engine.close()
    return [float(max(found))]


def errors_and_end(world: World, schemes: list[str]) -> list[float]:
    found = [error for scheme in schemes for error in errors(world, 2, 2, scheme)]
    world.backend.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_gradients_equal_plain_pytorch(transport):
    """A process takes seconds to start, so in `make test` the processes of tests/comm/test_mpi.py do this too."""
    ranks = run_processes("tests.tensor.test_tensor_real_processes:errors_and_end", 4, transport,
                          args=[["stationary", "summa"]], timeout_seconds=240)
    assert max(max(found) for found in ranks) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["stationary", "summa"])
@NEEDS_MPI
def test_ranks_that_share_a_gpu(scheme):
    """All messages go through host memory."""
    ranks = run_processes("tests.tensor.test_tensor_real_processes:errors_and_end", 4, "mpi", args=[[scheme]],
                          timeout_seconds=240, device="cuda")
    assert max(max(found) for found in ranks) < 1e-10
