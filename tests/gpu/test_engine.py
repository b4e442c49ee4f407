"""The engine on one CUDA device, against the CPU. Run with -m gpu.

Several ranks share the device: NCCL takes them for different hosts (`benchmarks.gpu.programs.one_device_environment`).
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.gpu.cases_correctness import BETWEEN_MESHES, COMPILED, MESHES, VARIANTS, furthest, host_waits
from benchmarks.gpu.programs import (
    Program,
    batches,
    engine_of,
    losses_on_shared_device,
    on_one_rank,
    seconds_after_kill,
    world_of_one,
)
from ranvier.config.run import Memory
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.train.determinism import deterministic_algorithms
from tests.checkpoint.anywhere import SAMPLES

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROGRAM = Program(layers=2, hidden=64, heads=2, vocab=256, sequence=32, steps=6, microbatches=4, samples=4)


@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-11), ("fp32", 2e-4)])
@pytest.mark.parametrize("name", VARIANTS)
def test_cuda_agrees_with_the_cpu(name, precision, limit):
    program = replace(PROGRAM, precision=precision, **VARIANTS[name])
    assert furthest(on_one_rank(program, CUDA), on_one_rank(program, CPU)) < limit


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_agree_with_the_cpu(name):
    program = replace(PROGRAM, steps=3, vocab=131, **COMPILED[name])
    assert furthest(on_one_rank(program, CUDA), on_one_rank(replace(program, compile=False), CPU)) < 2e-4


def test_wide_products_and_padded_logits_agree_with_the_cpu():
    """bf16: products are summed in fp32 without rounding in between; the vocabulary is not a multiple of 128."""
    program = replace(PROGRAM, precision="bf16", vocab=131)
    assert furthest(on_one_rank(program, CUDA), on_one_rank(program, CPU)) < 3e-2


@pytest.mark.parametrize("recompute", ["none", 1, "selective"])
def test_autocast_is_that_of_a_plain_loop(recompute):
    """Three steps; a recomputed segment runs in a thread of autograd's, in which torch casts to fp16 by default."""
    def blocks():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)).to(CUDA) for _ in range(3)]

    def loss(output, target):
        return ((output - target) ** 2).sum(), target.numel()

    ours, theirs = blocks(), blocks()
    x, y = torch.randn(2, 32, 64, device=CUDA)
    engine = Engine(ours, world_of_one(CUDA), loss=loss, optimizer=lambda parameters: torch.optim.SGD(
        parameters, lr=0.1), autocast=torch.bfloat16, memory=Memory(recompute=recompute))
    plain = torch.optim.SGD([parameter for block in theirs for parameter in block.parameters()], lr=0.1)
    for _ in range(3):
        engine.train_batch([(x, y)])
        with torch.autocast("cuda", torch.bfloat16):
            total, weight = loss(nn.Sequential(*theirs)(x), y)
        (total / weight).backward()
        plain.step()
        plain.zero_grad()
    engine.close()
    for one, two in zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True):
        assert float((one - two).detach().norm() / two.detach().norm()) < 1e-2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_streamed_states_give_the_same_bits(precision):
    found = [on_one_rank(replace(PROGRAM, precision=precision, optim={"offload": offload, "clip_norm": 1.0}), CUDA)
             for offload in ("none", "stream", "hybrid")]
    assert found[0] == found[1] == found[2]


def test_dropout_masks_are_the_cpus():
    masks = [_first_mask(device).cpu() for device in (CPU, CUDA)]
    assert torch.equal(*masks) and 0.2 < masks[0].double().mean() < 0.4


def _first_mask(device):
    """Mask of the zeros of the embedding's dropout in a step."""
    program, seen = replace(PROGRAM, layers=1, dropout=0.3, steps=1), []
    with engine_of(program, world_of_one(device)) as engine:
        (batch,) = batches(program, engine.mesh, 0)
        next(iter(engine.blocks.values())).register_forward_hook(
            lambda module, inputs, output: seen.append((output == 0).detach()))
        engine.train_batch(batch)
    return seen[0]


@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_share_the_device_agree_with_one(name):
    program = replace(PROGRAM, **{"precision": "fp32", **MESHES[name]})
    expected = on_one_rank(replace(program, mesh={}, compile=False), CUDA)
    for found in losses_on_shared_device(program):
        assert furthest(found, expected) < BETWEEN_MESHES[program.precision]


@pytest.mark.parametrize("offload", ["none", "stream"])
def test_a_resumed_run_has_the_same_bits(offload, tmp_path):
    """With deterministic algorithms; the optimizer's states come from the device or from pinned memory."""
    program = replace(PROGRAM, precision="bf16", optim={"offload": offload})
    with deterministic_algorithms(True):
        expected = on_one_rank(program, CUDA)
        steps = list(batches(program, Mesh(), 0))
        with engine_of(program, world_of_one(CUDA)) as engine:
            for batch in steps[:3]:
                engine.train_batch(batch)
            torch.save(engine.state_dict(), tmp_path / "state.pt")
        with engine_of(program, world_of_one(CUDA)) as engine:
            engine.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
            found = [engine.train_batch(batch).loss for batch in steps[3:]]
    assert found == [loss for loss, _ in expected[3:]]


def test_a_rank_leaves_when_the_other_is_killed():
    assert seconds_after_kill(replace(PROGRAM, mesh={"pipe": 2}, steps=500), "cuda") < 55


@pytest.mark.parametrize("offload", ["none", "stream", "hybrid"])
def test_no_step_waits_for_the_device(offload):
    """With clipping and the default guard, and with inputs and targets that are already on the device."""
    program = replace(PROGRAM, precision="bf16", optim={"offload": offload, "clip_norm": 1.0})
    with engine_of(program, world_of_one(CUDA)) as engine:
        steps = [[replace(one, inputs=one.inputs.to(CUDA), targets=one.targets.to(CUDA)) for one in batch]
                 for batch in batches(program, engine.mesh, 0)]
        for batch in steps[:3]:
            engine.train_batch(batch)
        with host_waits() as waits:
            engine.train_batch(steps[3])
    assert not waits.operations


def test_a_batch_made_ahead_has_the_same_samples():
    loaders = [Loader(SAMPLES, Sampler(len(SAMPLES), 3), global_size=8, microbatch_size=2, device=device)
               for device in (CPU, CUDA)]
    for step in range(4):
        plain, ahead = (loader.microbatches(step) for loader in loaders)
        loaders[1].prefetch(step + 1)
        assert all(torch.equal(one.inputs, two.inputs.cpu()) for one, two in zip(plain, ahead, strict=True))
