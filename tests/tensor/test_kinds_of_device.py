"""Counts on the meta device against counts of real ranks, for each scheme and kind of device: bytes, the workspaces of
products and sums, and the number of collectives, which depends on the size of panels."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.tensor.counted import SETTINGS, Meter, Sizes
from ranvier.comm.inprocess import InProcessGroup
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import MLP, Attention
from ranvier.plan.cut import meta_mesh
from ranvier.planner.work import Work
from ranvier.tensor import mesh as tensor_mesh
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, quick

SIZES = Sizes(batch=6, sequence=12, hidden=36, heads=12, vocab=36)
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


class Observed:
    """Counts the collectives of a group."""

    def __init__(self, group):
        self.calls = Counter()
        for name in COLLECTIVES:
            setattr(group, name, self.noted(name, getattr(group, name)))

    def noted(self, name, call):
        def collective(*args, **options):
            self.calls[name] += 1
            return call(*args, **options)
        return collective


def through_a_layer(mesh, groups, scheme, row, col, dtype, device):
    """(bytes received, calls) along rows and columns, and the sizes of the workspace."""
    observed = [Observed(group) for group in groups]
    shape = Meter(scheme, row, col).residual(SIZES).shape
    with torch.device(device):
        layer = split_layers(nn.Sequential(Attention(SIZES.config, dtype), MLP(SIZES.config, dtype)).to(dtype), mesh,
                             "layer")
        x = torch.ones(shape, dtype=dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    return ([(group.bytes_received, dict(seen.calls)) for group, seen in zip(groups, observed, strict=True)],
            mesh.workspace.sizes())


@pytest.mark.parametrize("travel", quick(1, ["auto", "fp32"]))
@pytest.mark.parametrize(("scheme", "row", "col", "kind", "dtype"), covering(
    [("stationary", 2, 3), ("summa", 2, 2), ("megatron", 1, 3), ("stationary-sequence", 2, 3),
     ("megatron-sequence", 1, 3)],
    [("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16)]))
def test_what_is_counted_is_what_runs(monkeypatch, scheme, row, col, kind, dtype, travel):
    """Panels are small, so that their number depends on the kind; groups of threads sum as groups of GPUs do."""
    monkeypatch.setattr(tensor_mesh, "PANEL_BYTES", {"cpu": 1500, "cuda": 6000})
    monkeypatch.setattr(InProcessGroup, "library", lambda self, device: {"cpu": "gloo", "cuda": "nccl"}[kind])
    settings, mesh = replace(SETTINGS[scheme], reduce_dtype=travel), Mesh(row=row, col=col)

    def on_rank(world):
        groups = [world.backend.group(axis, mesh.groups(axis)) for axis in ("row", "col")]
        on_mesh = TensorMesh(*groups, settings, device=kind)
        return through_a_layer(on_mesh, groups, scheme, row, col, dtype, "cpu")

    counted = meta_mesh(mesh, settings, kind)
    inner = [getattr(group, "_inner", group) for group in (counted.over_rows, counted.over_cols)]
    assert run_ranks(on_rank, row * col)[0] == through_a_layer(counted, inner, scheme, row, col, dtype, "meta")


def test_sums_in_fp32_take_twice_the_bytes_of_half():
    def received(device="cuda", **settings):
        mesh = meta_mesh(Mesh(col=3), TensorParallel(**settings), device)
        mesh.over_cols.all_reduce(torch.empty(3000, dtype=torch.bfloat16, device="meta")).wait()
        return mesh.over_cols.bytes_received

    assert received() == received(reduce_dtype="half") == 2 * 2 * 2000
    assert received(reduce_dtype="fp32") == 2 * 4 * 2000
    assert received(device="cpu") == 2 * received(device="cpu", reduce_dtype="half")


def test_plans_count_the_panels_of_the_clusters_devices():
    """A GPU's panels are 16 times as large, so it runs fewer operations."""
    run = ResolvedRun(mesh=Mesh(row=2, col=2), batch=Batch(global_size=8, microbatch_size=8),
              model=Transformer(num_layers=1, hidden=512, heads=8, vocab=1024, sequence=16_384))
    work = Work()
    cpu, cuda = (sum(len(block.kernels) for block in work.blocks(replace(run, launch=Launch(device=device))))
                 for device in ("cpu", "cuda"))
    assert cuda < cpu
