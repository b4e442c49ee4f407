"""Activation checkpointing: the intervals, their bytes, and the same gradients whatever is recomputed."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranvier.config.run import Memory, Pipeline
from ranvier.mesh import Mesh
from ranvier.plan.recomputation import (
    best_interval,
    layers_of,
    paper_interval,
    segments_of,
    stage_segments,
    stored_bytes,
)
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import assert_parity, chain, chunks_of, frozen, on_mesh, points, share, small_gpt, tokens
from tests.pipeline.test_parity import of_blocks, residuals
from tests.pipeline.test_unusual_blocks import Plain

MESHES = [Mesh(), Mesh(pipe=3), Mesh(data=2, pipe=2)]
POLICIES = ("message-driven", "1f1b", "gpipe")


# ---------------------------------------------------------------------- the rule

def test_bytes_of_a_stage():
    kept, stored = [10, 20, 30, 40, 50], [1, 2, 3, 4, 5]
    assert stored_bytes(kept, stored, 0, 3) == 3 * 150
    assert stored_bytes(kept, stored, 1, 3) == 3 * 15 + 50
    assert stored_bytes(kept, stored, 2, 3) == 3 * (1 + 3 + 5) + 70
    assert stored_bytes(kept, stored, 5, 3) == 3 + 150
    assert stored_bytes([], [], 1, 3) == 0


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 50), st.integers(1, 50))
def test_the_best_interval_has_the_fewest_bytes_and_is_near_the_formula(layers, microbatches, stored, kept):
    def needs(interval):
        return stored_bytes([kept] * layers, [stored] * layers, interval, microbatches)

    best = best_interval((kept,) * layers, (stored,) * layers, microbatches)
    assert needs(best) == min(map(needs, range(layers + 1)))
    formula = math.sqrt(microbatches * layers * stored / kept)
    if 1 <= formula <= layers and best:
        near = (math.floor(formula), math.ceil(formula))
        assert needs(best) <= min(needs(interval) for interval in near if interval <= layers)


def test_one_layer_alone_is_not_checkpointed():
    assert best_interval((100,), (10,), 1) == 0 and best_interval((100,), (10,), 3) == 1
    assert best_interval((), (), 4) == 0


@pytest.mark.parametrize(("num_layers", "stage_layers", "expected"), [
    (48, 8, 8), (48, 24, 6), (24, 24, 4), (16, 4, 4), (16, 1, 1), (36, 12, 6), (48, 7, 7), (10, 0, 0)])
def test_the_papers_rule(num_layers, stage_layers, expected):
    """The divisor of the stage's layers nearest to the root of the model's; the smaller one of two equally near."""
    assert paper_interval(num_layers, stage_layers) == expected


def test_layers_and_segments_of_a_stage():
    blocks = ["embedding", "a.attention", "a.mlp", "b.attention", "b.mlp", "c.attention", "head"]
    layers = [("a.attention", "a.mlp"), ("b.attention", "b.mlp"), ("c.attention", "c.mlp")]
    own = layers_of(blocks, layers)
    assert own == [range(1, 3), range(3, 5), range(5, 6)]
    assert segments_of(own, 2) == [range(1, 5), range(5, 6)] and segments_of(own, 0) == []
    assert segments_of(own, 9) == [range(1, 6)]
    assert layers_of(["x", "y"], ()) == [range(0, 1), range(1, 2)]
    assert segments_of(layers_of(["a", "between", "b"], [("a",), ("b",)]), 2) == [range(0, 1), range(2, 3)]
    assert stage_segments("none", blocks, layers, [1] * 7, [1] * 7, 1) == []
    assert stage_segments("axonn", blocks, layers, [], [], 1) == [range(1, 3), range(3, 5), range(5, 6)]
    assert stage_segments("auto", blocks, layers, [9] * 7, [1] * 7, 4) == [range(1, 3), range(3, 5), range(5, 6)]
    assert stage_segments(3, blocks, layers, [], [], 1) == [range(1, 6)]
    assert stage_segments("alternate", blocks, layers, [], [], 1) == [range(1, 3), range(5, 6)]
    assert stage_segments("selective", blocks, layers, [], [], 1) == [range(at, at + 1) for at in range(1, 6)]


# ---------------------------------------------------------------------- the same gradients

@pytest.mark.parametrize(("checkpoint", "mesh", "policy"), covering(
    [1, 2, "paper", "alternate", "selective"], MESHES, POLICIES), ids=str)
def test_gpt_with_dropout(checkpoint, mesh, policy):
    """The recomputed forward drops the same elements."""
    assert_parity(partial(small_gpt, dropout=0.2), tokens([[2, 1, 2]] * mesh.data, ignored=0.3), mesh,
                  pipeline=Pipeline(policy=policy),
                  memory=Memory(recompute=checkpoint))


@pytest.mark.parametrize(("checkpoint", "mesh"), covering([1, 3, 100, "selective"], MESHES), ids=str)
def test_own_blocks(checkpoint, mesh):
    assert_parity(residuals, points([[3, 1, 2, 2]] * mesh.data), mesh, memory=Memory(recompute=checkpoint))


@pytest.mark.parametrize(("mesh", "checkpoint"), covering(MESHES, ["selective", 2]), ids=str)
def test_frozen_and_tied_blocks(mesh, checkpoint):
    assert_parity(lambda: frozen(residuals(), of_blocks(0, 1, 4)), points([[2, 1]] * mesh.data), mesh,
                  memory=Memory(recompute=checkpoint))
    assert_parity(partial(chain, *[Plain] * 6, tied=(("b0.linear.weight", "b4.linear.weight"),)),
                  points([[2, 1]] * mesh.data), mesh, memory=Memory(recompute=checkpoint))


def test_auto_chooses_by_bytes_and_needs_a_sample():
    batches = tokens([[2, 1]])
    assert_parity(small_gpt, batches, Mesh(pipe=2), memory=Memory(recompute="auto"), sample=batches[0][0])
    with raises("recompute-needs-sample"):
        assert_parity(small_gpt, batches, Mesh(), memory=Memory(recompute="auto"))


class Counted(nn.Module):
    """Counts its forwards."""

    forwards = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        type(self).forwards += 1
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(("checkpoint", "expected"), [
    ("none", 8), (1, 16), (4, 16), ("alternate", 12), ("selective", 16)])
def test_what_is_computed_again(checkpoint, expected):
    """Four blocks, two microbatches: each forward runs again under checkpointing, but never in an evaluation."""
    Counted.forwards = 0
    batches = points([[1, 2]])
    assert_parity(partial(chain, *[Counted] * 4), batches, Mesh(), memory=Memory(recompute=checkpoint),
                  also=lambda engine: engine.evaluate(batches[0]).loss)
    assert Counted.forwards == expected + 8 + 8, "in addition to the reference's and the evaluation's"


def test_reductions_start_while_the_backward_runs():
    """A segment's gradients are complete when its backward has ended."""
    def work(engine):
        events, gradients = [], engine._updater.gradients
        reduce, backward = engine._connections.data.all_reduce, engine._stages.first.backward

        def reducing(tensor, op="sum"):
            events.append("reduce")
            return reduce(tensor, op)

        def running(*args, **options):
            result = backward(*args, **options)
            events.append("backward")
            return result

        engine._connections.data.all_reduce, engine._stages.first.backward = reducing, running
        engine.forward_backward(share(engine, points([[1, 1], [1, 1]])))
        assert len(gradients.chunks) == 6
        last = max(place for place, event in enumerate(events) if event == "backward")
        return events[:last].count("reduce")

    found = on_mesh(partial(chain, *[Plain] * 6), Mesh(data=2), work, optim=chunks_of(20), memory=Memory(recompute=2))
    assert found == [4, 4], "the loss's sum, and the chunks of two segments of three; the first segment's come after"
