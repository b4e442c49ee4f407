"""Counting equal panels once gives the same numbers and kernels as counting them one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Memory, TensorParallel, Transformer
from ranvier.cost.blocks import BlockCost
from ranvier.cost.kernels import Kernel, backward_of, without_panels
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.plan.block_costs import block_costs
from ranvier.plan.cut import meta_mesh, split_model
from ranvier.plan.kernel_count import counting_of
from ranvier.planner import count
from ranvier.precision import DTYPES
from ranvier.tensor import meta_mesh as module


def run_of(family: str, sequence: int, mesh: Mesh, tensor: TensorParallel, microbatch: int) -> ResolvedRun:
    return ResolvedRun(
        mesh=mesh, precision="bf16", batch=Batch(global_size=microbatch, microbatch_size=microbatch),
        model=Transformer(family=family, num_layers=1, hidden=256, heads=4, vocab=1001, sequence=sequence),
        tensor=replace(tensor, panel_bytes=1 << 19))


def costs(run: ResolvedRun) -> tuple[BlockCost, ...]:
    dtype = DTYPES[run.precision]
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, run.row_microbatch_size)
    model = split_model(families.model_of(run, dtype=dtype), meta_mesh(run.mesh, run.tensor, "cuda"))
    return tuple(block_costs(model, inputs, targets, dtype,
                             counting_of(run, device="cuda", stage_size=run.mesh.stage_size)))


def without_storages(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [replace(kernel, reads=tuple(each._replace(storage=0) for each in kernel.reads),
                    writes=tuple(each._replace(storage=0) for each in kernel.writes)) for kernel in kernels]


def noted_gaps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The gap of each product from now on, or None."""
    gaps, found = [], module._gap
    monkeypatch.setattr(module, "_gap", lambda lengths: gaps.append(found(lengths)) or gaps[-1])
    return gaps


@pytest.mark.parametrize(("family", "sequence", "mesh", "tensor", "microbatch"), [
    ("gpt", 15_000, Mesh(col=2), TensorParallel(sequence_sharding=True), 2),
    ("llama", 9973, Mesh(row=2, col=2), TensorParallel(), 6),
    pytest.param("llama", 15_000, Mesh(col=2), TensorParallel(scheme="megatron", sequence_sharding=True), 2,
                 marks=pytest.mark.slow),
    ("gpt", 1 << 15, Mesh(row=2), TensorParallel(), 2),
])
def test_like_panels_cost_what_they_cost_one_by_one(monkeypatch: pytest.MonkeyPatch, family: str, sequence: int,
                                                    mesh: Mesh, tensor: TensorParallel, microbatch: int):
    run, gaps = run_of(family, sequence, mesh, tensor, microbatch), noted_gaps(monkeypatch)
    counted = costs(run)
    assert any(gap is not None for gap in gaps) == (mesh.col > 1)
    monkeypatch.setattr(module, "_gap", lambda lengths: None)
    one_by_one = costs(run)
    for mine, other in zip(counted, one_by_one, strict=True):
        assert replace(mine, kernels=(), repeated=None) == replace(other, kernels=(), repeated=None)
        assert without_storages(mine.kernels) == without_storages(other.kernels)
        assert without_storages(mine.repeated.kernels) == without_storages(other.repeated.kernels)
        assert replace(mine.repeated, kernels=()) == replace(other.repeated, kernels=())
        for follows in (backward_of, without_panels):  # these look at storages, which are the same for equal panels
            assert without_storages(follows(mine.kernels)) == without_storages(follows(other.kernels))


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), 1])
def test_like_panels_need_the_memory_that_they_need_one_by_one(monkeypatch: pytest.MonkeyPatch, recompute: int | str):
    """A layer that is recomputed keeps the panels that it has gathered."""
    run = replace(run_of("llama", 9973, Mesh(row=2, col=2), TensorParallel(), 6),
                  memory=Memory(recompute=recompute), launch=Launch(device="cuda"))
    gaps = noted_gaps(monkeypatch)
    monkeypatch.setattr(count._laid_out, "get", lambda key, found: found())
    counted = count.laid_out(run)[1]
    assert gaps and all(gap is not None for gap in gaps)
    monkeypatch.setattr(module, "_gap", lambda lengths: None)
    assert count.laid_out(run)[1] == counted
