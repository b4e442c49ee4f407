"""Raw gradients, losses and norms of every mesh are those of plain PyTorch, in fp64 to 1e-10."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.reference import Reference
from tests.covering import covering, first, label, pairwise, quick
from tests.pipeline.parity import (
    IGNORED,
    SEED,
    assert_close,
    assert_parity,
    chain,
    chunks_of,
    frozen,
    gradients_on,
    points,
    small_gpt,
    tokens,
)

MESHES = [Mesh(data=data, pipe=pipe) for data in range(1, 9) for pipe in range(1, 9) if data * pipe <= 8]
FEW = first([Mesh(), Mesh(pipe=5), Mesh(data=2, pipe=2)], MESHES)
POLICIES = ("message-driven", "1f1b", "gpipe")


class Residual(nn.Module):
    """x + tanh(linear(x)), four numbers wide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def residuals(count=8):
    return chain(*[Residual] * count)


def mesh_id(mesh):
    return f"{mesh.data}x{mesh.pipe}"


def whole(batches):
    """All microbatches of all replicas as one microbatch."""
    every = [one for replica in batches for one in replica]
    return [Microbatch(torch.cat([one.inputs for one in every]), torch.cat([one.targets for one in every]),
                       torch.cat([one.samples for one in every]))]


@pytest.mark.parametrize("mesh", FEW, ids=mesh_id)
def test_gpt_on_every_mesh(mesh):
    """Against one process with the global batch; each replica has its own tokens, and many targets do not count."""
    batches = tokens([[2, 2, 1]] * mesh.data, ignored=0.4)
    reference = Reference(small_gpt(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward(whole(batches))
    outcome = gradients_on(small_gpt, batches, mesh, pipeline=Pipeline(policy=POLICIES[(mesh.data + mesh.pipe) % 3]),
                           optim=chunks_of(125))
    assert_close(outcome.gradients, reference.gradients())
    assert set(outcome.losses) == {outcome.losses[0]} and abs(outcome.losses[0] - loss) < 1e-12 * loss


@pytest.mark.parametrize("mesh", FEW, ids=mesh_id)
def test_own_blocks_on_every_mesh(mesh):
    batches = points([[3, 1, 2, 2]] * mesh.data)
    assert_parity(residuals, batches, mesh, pipeline=Pipeline(policy=POLICIES[(mesh.data + mesh.pipe + 1) % 3]),
                  optim=chunks_of(5))


@pytest.mark.parametrize(("make", "mesh", "chunk_size"), quick(2, pairwise(
    [residuals, small_gpt], [Mesh(data=3), Mesh(data=2, pipe=2)], [3, 40, 2000])), ids=label)
def test_chunks_of_every_size(make, mesh, chunk_size):
    """A weight and its bias may be in different chunks, one of which is complete before the other."""
    batches = tokens([[2, 2, 1]] * mesh.data) if make is small_gpt else points([[2, 2, 1]] * mesh.data)
    assert_parity(make, batches, mesh, optim=chunks_of(chunk_size), pipeline=Pipeline(defer_bytes=1 << 40))


# ---------------------------------------------------------------------- cuts

@pytest.mark.parametrize(("boundaries", "policy"), covering([((1, 2),), ((1, 7),), ((5, 6),), ((3, 4),)], POLICIES),
                         ids=str)
def test_boundaries_by_hand(policy, boundaries):
    assert_parity(small_gpt, tokens([[2] * 4]), Mesh(pipe=3), pipeline=Pipeline(boundaries=boundaries, policy=policy))


@pytest.mark.parametrize("count", [3, 5, 7])
def test_blocks_that_do_not_divide(count):
    assert_parity(partial(residuals, count), points([[2, 2], [2, 2]]), Mesh(data=2, pipe=3),
                  pipeline=Pipeline(partition="uniform"))


# ---------------------------------------------------------------------- numbers of microbatches and samples

@pytest.mark.parametrize(("counts", "policy"), covering([
    [[3]], [[2, 2]], [[1] * 20], [[4, 4, 1]], [[2, 2], [1, 1]], [[2] * 3, [2] * 7], [[2, 2, 2], []], [[], [2]],
    [[3, 2], [5]]], POLICIES), ids=str)
def test_numbers_of_microbatches(policy, counts):
    """One, fewer than stages, many; a smaller last one; another number, or none, on another replica."""
    assert_parity(residuals, points(counts), Mesh(data=len(counts), pipe=3), pipeline=Pipeline(policy=policy))


@pytest.mark.parametrize(("in_flight", "policy"), covering([1, 2, 3, 9], POLICIES))
def test_in_flight_limits(policy, in_flight):
    assert_parity(residuals, points([[1] * 7]), Mesh(pipe=4), pipeline=Pipeline(policy=policy, in_flight=in_flight))


@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(data=2, pipe=4)], ids=mesh_id)
def test_lengths_that_change(mesh):
    batches = tokens([[2, 3, 1, 2, 2]] * mesh.data, lengths=(6, 1, 4, 2))
    assert_parity(small_gpt, batches, mesh)


# ---------------------------------------------------------------------- weights of the loss

def without_targets(batches, replicas):
    """`batches` in which no target of these replicas counts."""
    return [[Microbatch(one.inputs, torch.full_like(one.targets, IGNORED), one.samples) for one in replica]
            if index in replicas else replica for index, replica in enumerate(batches)]


@pytest.mark.parametrize(("nominal", "policy"), covering([1.0, 37.0], POLICIES))
def test_unequal_numbers_of_valid_targets(policy, nominal):
    batches = tokens([[2, 2]], ignored=0.9) + tokens([[2, 2, 2]], ignored=0.1, seed=5)
    assert_parity(small_gpt, batches, Mesh(data=2, pipe=2), pipeline=Pipeline(policy=policy), nominal_weight=nominal)


def test_a_replica_without_valid_targets():
    batches = without_targets(tokens([[2, 2]] * 3), replicas=(1,))
    assert_parity(small_gpt, batches, Mesh(data=3, pipe=2))


# ---------------------------------------------------------------------- freezing

def of_blocks(*numbers):
    return lambda name: int(name.split(".")[0][1:]) in numbers


SUBSETS = {
    "first block": of_blocks(0), "prefix": of_blocks(0, 1, 2), "first stage": of_blocks(0, 1),
    "second stage": of_blocks(2, 3), "middle stages": of_blocks(2, 3, 4, 5), "last stage": of_blocks(6, 7),
    "every other stage": of_blocks(0, 1, 4, 5), "suffix": of_blocks(3, 4, 5, 6, 7),
    "all but one weight": lambda name: name != "b3.linear.weight",
    "all but the first bias": lambda name: name != "b0.linear.bias",
    "all but the last bias": lambda name: name != "b7.linear.bias",
    "biases only": lambda name: name.endswith("weight"), "weights only": lambda name: name.endswith("bias")}


@pytest.mark.parametrize(("subset", "policy"), quick(4, covering(list(SUBSETS), POLICIES)))
def test_any_subset_frozen(subset, policy):
    """Two blocks on each of four stages."""
    assert_parity(lambda: frozen(residuals(), SUBSETS[subset]), points([[2, 1, 2], [2, 2, 2]]), Mesh(data=2, pipe=4),
                  pipeline=Pipeline(boundaries=(2, 4, 6), policy=policy), optim=chunks_of(5))


def test_everything_frozen():
    outcome = assert_parity(lambda: frozen(residuals(), lambda name: True), points([[2, 2]]), Mesh(pipe=3))
    assert outcome.gradients == {} and outcome.norms == [0.0] * 3


@pytest.mark.parametrize("policy", quick(1, POLICIES))
def test_gpt_with_a_frozen_prefix_that_is_untied(policy):
    def make():
        model = frozen(small_gpt(), lambda name: name.startswith(("embedding", "layer0")))
        return type(model)(blocks=model.blocks, loss=model.loss, initial=model.initial)

    assert_parity(make, tokens([[2, 2, 2], [2]]), Mesh(data=2, pipe=3), pipeline=Pipeline(policy=policy))
