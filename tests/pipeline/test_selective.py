"""Selective recomputation: outputs of expensive operations are kept, all others are recomputed, as are outputs that
cannot be kept."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.config.run import Memory, Transformer
from ranvier.cost.memory import segment_bytes
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.pipeline.segment import Segment
from ranvier.plan.block_costs import block_costs
from ranvier.plan.cut import meta_mesh, split_model
from ranvier.plan.kernel_count import KernelCount
from ranvier.tensor.kept_outputs import KeptOutputs
from tests.errors import raises
from tests.pipeline.parity import FP64_SUMS, assert_parity, chain, points, small_gpt, tokens
from tests.tensor.split_parity import SCHEMES, on_mesh, row_share, share, token_batches

SELECTIVE = Memory(recompute="selective")


# ---------------------------------------------------------------------- what is found in a second run

@pytest.fixture
def second_runs(monkeypatch):
    """How many outputs second runs have looked up, and how many of them they have computed."""
    counted = Counter()
    inner = KeptOutputs._next

    def following(kept, key, compute):
        def computed():
            counted["computed"] += 1
            return compute()

        counted["all"] += 1
        return inner(kept, key, computed)

    monkeypatch.setattr(KeptOutputs, "_next", following)
    return counted


class Attention(nn.Module):
    """Attention with one head, in one kernel or with scores."""

    def __init__(self, is_fused, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.is_fused, self.dropout = is_fused, dropout

    def forward(self, x):
        query, key, value = self.qkv(x.view(1, 1, -1, 4)).chunk(3, dim=-1)
        if self.is_fused:
            y = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        else:
            y = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        return x + self.out(y).view(-1, 4)


class InPlace(nn.Module):
    """Changes the output of a product in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.relu_(self.first(x)))


class ReturnsBoth(InPlace):
    """Returns a kept output, which other blocks may change."""

    def forward(self, x):
        y = self.first(x)
        return {"y": y, "z": self.second(torch.tanh(y))}


class Inner(nn.Module):
    """Calls autograd during its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        slope, = torch.autograd.grad(y.square().sum(), x, create_graph=True) if x.requires_grad else (x,)
        return self.second(y) + slope


class OnceMore(nn.Module):
    """Has a product in its first forward that the second lacks, since its result is kept outside the module."""

    tables = threading.local()

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        made = getattr(self.tables, "made", {})
        if id(self) not in made:
            made[id(self)] = x.detach() @ torch.eye(4, dtype=x.dtype)
            self.tables.made = made
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(("block", "found", "computed"), [
    (partial(Attention, True), 2, 0), (partial(Attention, False), 2, 0), (InPlace, 1, 1), (Inner, None, None),
    (OnceMore, None, None)])
def test_gradients_whatever_is_found(block, found, computed, second_runs):
    """Three blocks. found, computed: for each block and microbatch, without the last product, which never runs again,
    and without scores, which are not kept."""
    batches = points([[10, 10]])
    assert_parity(partial(chain, *[block] * 3), batches, Mesh(), memory=SELECTIVE)
    if found is not None:
        assert (second_runs["computed"], second_runs["all"]) == (6 * computed, 6 * found)


@pytest.mark.parametrize("change", [
    lambda y, x: y.mul_(2), lambda y, x: y.add_(x), lambda y, x: y[:, :1].mul_(3), lambda y, x: y.view(-1, 4).mul_(2)])
@pytest.mark.parametrize("product", [
    lambda x, w: functional.linear(x, w), lambda x, w: x @ w, lambda x, w: torch.softmax(x @ w[:, :3], -1) @ x])
def test_products_of_three_dims_that_are_changed_in_place(product, change):
    """Without a bias they are the result of `_unsafe_view`, which has its own version counter."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)

    def compute(state):
        y = product(state, weight)
        change(y, state)
        return torch.sin(y)

    block, found = nn.Identity(), []
    block.weight = nn.Parameter(weight)
    for run in (Segment([("b", block)], selective=True).run, lambda compute, state: compute(state)):
        run(compute, x).sum().backward()
        found.append((x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_an_output_that_others_change_later(second_runs):
    block, x = ReturnsBoth(), torch.randn(3, 4, requires_grad=True)
    gradients = []
    for run in (Segment([("b", block)], selective=True).run, lambda compute, state: compute(state)):
        outputs = run(block, x)
        if gradients:
            expected, = torch.autograd.grad(outputs["z"].sum(), x)
        else:
            with torch.no_grad():
                outputs["y"].mul_(2)
            gradients += torch.autograd.grad(outputs["z"].sum(), x)
    assert torch.equal(gradients[0], expected) and second_runs["computed"] == 1


def test_attention_with_dropout_of_its_own_draws_the_same_masks():
    """The generator of later masks is where it was after the first run."""
    block = Attention(True, 0.5).double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def gradients(run):
        torch.manual_seed(3)
        y = run(lambda state: functional.dropout(block(state)), x)
        return torch.autograd.grad(y.sum(), [x, *block.parameters()])

    again, plain = (gradients(run) for run in (Segment([("b", block)], selective=True).run, lambda f, x: f(x)))
    assert all(map(torch.equal, again, plain))


def test_settings_that_cannot_be_together():
    batches = points([[1]])
    with raises("recompute-selective-compiled"):
        assert_parity(partial(chain, InPlace), batches, Mesh(), memory=SELECTIVE, compile=True)
    with raises("recompute-selective-float8"):
        assert_parity(small_gpt, tokens([[1]]), Mesh(), memory=SELECTIVE, float8=True)


# ---------------------------------------------------------------------- the law: what runs again, and what is kept

class Found:
    """Outputs that a second run has found, in the form in which a first run shows what it keeps."""

    def __init__(self, outputs):
        self.outputs, self.count = outputs, 0
        following = outputs._next

        def counting(key, compute):
            ran = []
            result = following(key, lambda: ran.append(True) or compute())
            self.count += not ran
            return result

        outputs._next = counting

    is_inside = property(lambda self: self.outputs.is_inside)

    def first_run(self, func, args, kwargs, *, run):
        return run(func, args, kwargs)

    def __len__(self):
        return self.count


class Ran(KernelCount):
    """Counts what real ranks run, in the same way as is counted without values."""

    def counts(self, tensors):
        return True


def counted(model, mesh, batch, tensor=None):
    if mesh.stage_size > 1:
        model = split_model(model, meta_mesh(mesh, tensor, "cpu"))
    return {cost.name: cost for cost in block_costs(
        model, batch.inputs.to("meta"), batch.targets.to("meta"), torch.float64)}


def seen(kernels):
    return [(kernel.kind, kernel.shape, kernel.moved_bytes) for kernel in kernels]


MODELS = {"llama": partial(llama, Transformer(family="llama", num_layers=2, hidden=24, heads=4, kv_heads=2, vocab=61,
                                              sequence=8), dtype=torch.float64),
          "gpt": partial(gpt, Transformer(num_layers=2, hidden=24, heads=4, vocab=61, sequence=8), dtype=torch.float64)}


@FP64_SUMS
@pytest.mark.parametrize(("name", "mesh", "scheme"), [
    ("gpt", Mesh(), "stationary"), ("llama", Mesh(col=2), "sequence"),
    pytest.param("llama", Mesh(row=2, col=2), "stationary-sequence", marks=pytest.mark.slow)], ids=str)
def test_what_is_counted_is_what_runs_again_and_is_kept(name, mesh, scheme, monkeypatch):
    """Kernel by kernel in the second runs of real ranks, and to the byte in what is kept between the runs."""
    ran, kept, place = {}, {}, threading.local()
    replayed, recorded, run = KeptOutputs.replaying, KeptOutputs.recording, Segment.run

    @contextmanager
    def recording(outputs):
        outputs.block = place.block
        with recorded(outputs):
            yield
        if place.rank == 0:
            kept[outputs.block] = sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes()
                                       for one in outputs.tensors}.values())

    @contextmanager
    def replaying(outputs):
        count = Ran(kept_outputs=Found(outputs))
        with replayed(outputs), count:
            try:
                yield
            finally:
                ran[outputs.block] = seen(kernel for kernel in count.kernels if not kernel.is_kept)

    def running(segment, compute, state):
        place.block = segment._blocks[0][0]
        return run(segment, compute, state)

    monkeypatch.setattr(KeptOutputs, "recording", recording)
    monkeypatch.setattr(KeptOutputs, "replaying", replaying)
    monkeypatch.setattr(Segment, "run", running)

    def work(engine):
        place.rank = engine.world.rank
        engine.forward_backward(share(engine, batches))

    batches = token_batches(mesh, count=1)
    on_mesh(MODELS[name], mesh, work, scheme=scheme, memory=SELECTIVE)
    monkeypatch.undo()
    costs = counted(MODELS[name](), mesh, row_share(batches[0][0], mesh, 0), SCHEMES[scheme])
    assert ran.keys() == kept.keys() and len(ran) == 4
    for block, kernels in ran.items():
        assert kernels == seen(costs[block].repeated.kernels), block
        assert kept[block] == costs[block].repeated.kept_bytes, block


@FP64_SUMS
def test_what_selective_recomputation_keeps():
    """Of a GPT layer: queries, keys and values, attention's output and sums, the first product of the MLP; neither
    norms nor an activation's output. The last product of a block comes after everything that is saved."""
    cost = counted(MODELS["gpt"](), Mesh(), token_batches(Mesh(), count=1)[0][0])
    tokens, itemsize = token_batches(Mesh(), count=1)[0][0].inputs.numel(), 8
    attention, mlp = cost["layer0.attention"].repeated, cost["layer0.mlp"].repeated
    assert attention.kept_bytes == tokens * itemsize * (3 * 24 + 24) + tokens * 4 * itemsize
    assert mlp.kept_bytes == tokens * itemsize * 4 * 24
    assert not any(kernel.flops for kernel in (*attention.kernels, *mlp.kernels))
    both = [replace(cost[f"layer0.{part}"], is_selective=True) for part in ("attention", "mlp")]
    assert segment_bytes(both, [0]) == both[0].input_bytes + attention.kept_bytes < both[0].kept_bytes
