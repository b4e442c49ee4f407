"""Steps on a data x row x col mesh: sums over groups of their own, copies that do not count, torch's update."""

import zlib
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.step import Updater
from ranvier.schedule.spans import Timeline
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, pairwise, quick

BLOCKS, STEPS, WEIGHT, LEARNING_RATE = 3, 2, 2.0, 1e-2
KINDS = {  # shape, axes along which it is cut, axes along which each copy has a part of the gradient (else all of it)
    "matrix": ((5, 3), ("row", "col"), ()),
    "bias": ((7,), ("col",), ("row",)),
    "embedding": ((3, 2), ("row",), ()),
    "gain": ((4,), (), ("col",)),
    "scale": ((1,), (), ("row", "col"))}
MESHES = [Mesh(data=2, row=2), Mesh(data=2, col=2), Mesh(row=2, col=2), Mesh(data=2, row=2, col=2), Mesh(data=3)]


def along(at, axes):
    return tuple(getattr(at, axis) for axis in axes)


def drawn(shape, *key):
    """Values of few bits, so that their sums are exact in half precision too."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(-8, 9, shape, generator=generator) / 4


def part(step, block, kind, at):
    """A rank's part of the gradient of the summed loss; the same on all copies that have the full gradient."""
    shape, cut, partial_along = KINDS[kind]
    return drawn(shape, step, block, kind, along(at, cut), at.data, along(at, partial_along))


def specs_on(mesh, at, backend, dtype):
    groups = {axes: backend.group(" x ".join(("data", *axes)), mesh.groups("data", *axes))
              for axes in ((), ("row",), ("col",), ("row", "col"))}
    specs = []
    for block, (kind, (shape, cut, partial_along)) in product(range(BLOCKS), KINDS.items()):
        whole_along = {"row", "col"} - {*cut, *partial_along}
        parameter = nn.Parameter(drawn(shape, block, kind, along(at, cut)).to(dtype))
        specs.append(GradientSpec(
            name=f"{block}.{kind}", parameter=parameter, numel=parameter.numel(),
            blocks=frozenset([block]), group=groups[partial_along] if partial_along else None,
            counts=not any(along(at, whole_along))))
    return specs, groups[()]


def train(world, mesh, optim, dtype, apart):
    """The norm of each step, with `apart` its mean gradients, and the final parameters, by name."""
    at, gradients = mesh.coordinates(world.rank), []
    specs, replicas = specs_on(mesh, at, world.backend, dtype)
    updater = Updater(specs, replicas, world.backend.group("all", [list(range(mesh.size))]), optim=optim, own=True,
                      optimizer=None, dtype=dtype, device=world.device, nominal_weight=4.0,
                      runs=[range(block, block + 1) for block in range(BLOCKS)] if optim.update_in_backward else (),
                      send_to_owner=lambda spec: None,
                      weight=lambda: WEIGHT, timeline=Timeline(), progress=lambda: None)
    assert updater.flat.sharded == optim.shard
    updater.learning_rate, norms = LEARNING_RATE, []
    for step in range(STEPS):
        updater.begin(step + 1, updates=not apart)
        updater.gradients.block_passed(BLOCKS)
        for block in reversed(range(BLOCKS)):
            for spec in specs[block * len(KINDS):(block + 1) * len(KINDS)]:
                spec.parameter.grad += part(step, block, spec.name.partition(".")[2], at) * updater.loss_factor
            updater.gradients.block_passed(block)
            updater.progress()
        status = updater.average() if apart else updater.finish()
        if apart:
            gradients.append({spec.name: spec.parameter.grad.clone() for spec in specs})
            updater.apply()
        norms.append(status.norm)
        updater.wait()
    return norms, gradients, {spec.name: spec.parameter.detach() for spec in specs}


def reference(mesh, clip_norm, dtype, late=False):
    """The same with torch: each parameter once, by name and index along its cut axes. late: clipped by the norm of the
    step before."""
    ranks = [mesh.coordinates(rank) for rank in range(mesh.size)]
    parameters = {(block, kind, along(at, KINDS[kind][1])): None
                  for block, kind, at in product(range(BLOCKS), KINDS, ranks)}
    parameters = {key: nn.Parameter(drawn(KINDS[key[1]][0], *key).to(dtype)) for key in parameters}
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, weight_decay=0.1)
    norms, gradients = [], []
    for step in range(STEPS):
        for (block, kind, index), parameter in parameters.items():
            _, cut, partial_along = KINDS[kind]
            parts = {(at.data, along(at, partial_along)): part(step, block, kind, at)
                     for at in ranks if along(at, cut) == index}
            parameter.grad = (sum(parts.values()) / WEIGHT).to(dtype)
        gradients.append({key: parameter.grad.clone() for key, parameter in parameters.items()})
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), 1e9 if late else clip_norm or 1e9)))
        for parameter in parameters.values() if late and step else ():
            parameter.grad *= min(1.0, clip_norm / (norms[-2] + 1e-6))
        optimizer.step()
    return norms, gradients, {key: parameter.detach() for key, parameter in parameters.items()}


def of_rank(values, at):
    return {f"{block}.{kind}": value for (block, kind, index), value in values.items()
            if index == along(at, KINDS[kind][1])}


def assert_equals_torch(mesh, *, dtype, apart, clip_norm, **options):
    optim = Optim(weight_decay=0.1, bucket_size=5, chunk_buckets=2, clip_norm=clip_norm, initial_loss_scale=8.0,
                  **options)
    wide = torch.promote_types(dtype, torch.float32)
    norms, gradients, parameters = reference(mesh, clip_norm, wide, optim.clip_from == "previous-step")
    exact = dict(rtol=1e-12, atol=1e-14) if dtype is torch.float64 else dict(rtol=1e-5, atol=1e-6)
    rounded = exact if dtype is wide else dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    outcomes = run_ranks(partial(train, mesh=mesh, optim=optim, dtype=dtype, apart=apart), mesh.size)
    for rank, (found_norms, found_gradients, found) in enumerate(outcomes):
        at = mesh.coordinates(rank)
        assert found_norms == pytest.approx(norms, rel=exact["rtol"])
        for step, one in enumerate(found_gradients):
            torch.testing.assert_close(one, of_rank(gradients[step], at), **exact, check_dtype=False)
        torch.testing.assert_close(found, of_rank(parameters, at), **rounded, check_dtype=False)


@pytest.mark.parametrize(("mesh", "shard", "apart", "clip_norm"), pairwise(
    MESHES, [False, True], [False, True], [0.0, 0.5]), ids=str)
def test_steps_equal_those_of_torch(mesh, shard, apart, clip_norm):
    """Each rank has its own gradients; norms, mean gradients (apart) and parameters are those of the full model."""
    assert_equals_torch(mesh, dtype=torch.float64, shard=shard, apart=apart, clip_norm=clip_norm)


@pytest.mark.parametrize(("options", "mesh", "dtype"), covering([
    {"accumulate": "half"}, {"shard": True}, {"reduce_dtype": "fp32", "shard": True},
    {"offload": "stream", "shard": True}, {"offload": "host"}, {"offload": "hybrid"}],
    [(mesh, dtype) for mesh in (Mesh(data=2, row=2), Mesh(row=2, col=2)) for dtype in (torch.bfloat16, torch.float16)]),
    ids=str)
def test_in_half_precision(mesh, dtype, options):
    assert_equals_torch(mesh, dtype=dtype, apart=False, clip_norm=0.5, **options)


@pytest.mark.parametrize(("options", "mesh", "dtype"), covering([
    {}, {"shard": True}, {"clip_norm": 0.5, "clip_from": "previous-step"},
    {"clip_norm": 0.5, "clip_from": "previous-step", "shard": True, "offload": "hybrid", "offload_share": 0.5}],
    [(MESHES[0], torch.float64), (MESHES[-2], torch.bfloat16), (MESHES[-2], torch.float64),
     (MESHES[0], torch.bfloat16)]), ids=str)
def test_updates_in_the_backward(mesh, dtype, options):
    """Copies that count and others share a run's memory; gradients with a group of their own keep theirs. Clipped by
    the norm of the step before."""
    assert_equals_torch(mesh, dtype=dtype, apart=False, update_in_backward=True, **{"clip_norm": 0.0, **options})


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("mesh", quick(1, MESHES), ids=str)
def test_steps_clipped_by_the_norm_before(mesh, apart):
    """The numbers equal the definition in plain torch, and differ from clipping by a step's own norm."""
    assert_equals_torch(mesh, dtype=torch.float64, apart=apart, clip_norm=0.5, clip_from="previous-step")
    late, own = (reference(mesh, 0.5, torch.float64, late)[2] for late in (True, False))
    assert any(not torch.allclose(late[name], own[name]) for name in own)
