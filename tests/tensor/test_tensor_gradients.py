"""Raw gradients, losses and norms of a full GPT on every tensor mesh are those of plain PyTorch, in fp64 to 1e-10."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.slow_links import Link
from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.config.run import TensorParallel as Settings
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.mesh import BUNDLE_ELEMENTS
from ranvier.testing.reference import Reference
from tests.covering import chosen, first, quick
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import (
    EACH,
    SCHEMES,
    SEED,
    TOLERANCE,
    assemble,
    assert_close,
    assert_parity,
    assert_predictions,
    every,
    gradients_of,
    gradients_on,
    legal,
    on_mesh,
    on_tensor_mesh,
    row_share,
    share,
    tiny_gpt,
    token_batches,
)

HUGE = 1 << 40
FEW = first([(2, 2, "summa"), (1, 2, "sequence")], legal([(1, 2), (2, 2), (2, 3)]))
ALL_AXES = Mesh(data=2, pipe=2, row=2, col=2)
TIED = [True]


def two_layers(**options):
    return tiny_gpt(num_layers=2, **options)


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize(("rows", "cols", "scheme", "count"), chosen(
    [(2, 3, "stationary", 1), (1, 4, "megatron", 3), (2, 1, "summa", 1)], legal(), [1, 3]))
def test_gpt_on_every_mesh(rows, cols, scheme, count, tied):
    mesh = Mesh(row=rows, col=cols)
    assert_parity(partial(two_layers, tied=tied), token_batches(mesh, count=count), mesh, scheme=scheme)


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize(("scheme", "boundaries"), quick(1, [
    ("stationary", (1,)), ("stationary", None), ("summa", (4,))]))
def test_gpt_on_all_four_axes(scheme, boundaries, tied):
    """Two replicas whose rows have unequal numbers of targets; stages have unequal numbers of layers."""
    assert_parity(partial(two_layers, tied=tied), token_batches(ALL_AXES), ALL_AXES, scheme=scheme,
                  pipeline=Pipeline(boundaries=boundaries))


@pytest.mark.parametrize(("mesh", "scheme"), quick(2, [
    (Mesh(pipe=2, row=2, col=2), "summa"), (Mesh(data=2, row=2, col=2), "stationary"), (Mesh(data=2, row=2), "summa"),
    (Mesh(pipe=3, col=2), "sequence"), (Mesh(pipe=2, row=3, col=2), "stationary"), (Mesh(data=3, col=2), "megatron"),
    (Mesh(data=2, col=2), "sequence"), (Mesh(data=2, pipe=2, col=2), "megatron")]), ids=str)
def test_gpt_with_pipeline_or_replicas(mesh, scheme):
    assert_parity(tiny_gpt, token_batches(mesh, per_row=2), mesh, scheme=scheme)


@pytest.mark.parametrize(("rows", "cols", "scheme", "checkpoint"), quick(1, [
    (*one, checkpoint) for one in legal([(1, 2), (2, 2)]) for checkpoint in (1, 2, "auto")
    if checkpoint != 2 or one == (2, 2, "stationary")]))
def test_checkpointing(rows, cols, scheme, checkpoint):
    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh, count=2)
    assert_parity(two_layers, batches, mesh, scheme=scheme, memory=Memory(recompute=checkpoint),
                  sample=row_share(batches[0][0], mesh, 0))


@pytest.mark.parametrize(("mesh", "checkpoint"), chosen(
    [(Mesh(row=2), 1)], [Mesh(row=2), Mesh(row=2, col=3), Mesh(pipe=2, row=2, col=2)], [1, "none"]), ids=str)
def test_weights_that_are_kept(mesh, checkpoint):
    """Weights are gathered once in a step, so that fewer bytes are sent within columns."""
    def work(engine):
        engine.forward_backward(share(engine, batches))
        return engine.counters()["bytes_received_by_axis"]["row"], gradients_of(engine), engine.layout

    batches = token_batches(mesh)
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(every(batches))
    received = []
    for settings in (Settings(keep_weights=True), Settings()):
        counts, gradients, layouts = zip(*on_mesh(
            tiny_gpt, mesh, work, settings=settings, memory=Memory(recompute=checkpoint)), strict=True)
        assert_close(assemble(gradients, layouts[0]), reference.gradients())
        received.append(counts)
    assert all(few < many for few, many in zip(*received, strict=True))


@pytest.mark.parametrize("mesh", quick(1, [Mesh(row=2, col=2), Mesh(row=2, col=3)]), ids=str)
def test_a_recomputed_layer_gathers_once_for_recomputation_and_backward(mesh):
    """With checkpointing, as without, weights travel for the forward and for the backward: the backward also uses those
    gathered for the recomputation."""
    def work(engine):
        engine.forward_backward(share(engine, batches))
        return engine.counters()["bytes_received_by_axis"]["row"]

    batches = token_batches(mesh, count=1)
    plain, recomputed = (on_mesh(tiny_gpt, mesh, work, memory=Memory(recompute=checkpoint))
                         for checkpoint in ("none", 1))
    assert all(again <= once for once, again in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize(("mesh", "settings"), quick(1, [
    (Mesh(pipe=2, row=2), Settings(keep_weights=True)), (Mesh(pipe=2, row=2, col=2), Settings(keep_weights=True)),
    (Mesh(pipe=2, row=2, col=2), Settings()), (Mesh(pipe=2, row=2, col=2), Settings(scheme="summa"))]), ids=str)
def test_policies_agree_to_the_bit(mesh, settings):
    """Weight gradients immediate, partly deferred, or all deferred; in every order of microbatches."""
    batches = token_batches(mesh, count=4)
    one = gradients_on(tiny_gpt, batches, mesh, settings=settings, pipeline=Pipeline(policy="gpipe"))
    for options in (Pipeline(policy="1f1b"), Pipeline(defer_bytes=HUGE, in_flight=4),
                    Pipeline(defer_bytes=20_000, in_flight=3)):
        other = gradients_on(tiny_gpt, batches, mesh, settings=settings, pipeline=options)
        for mine, theirs in zip(one.of_ranks, other.of_ranks, strict=True):
            wrong = [name for name in mine if not torch.equal(mine[name], theirs[name])]
            assert set(mine) == set(theirs) and not wrong, f"{options}: {wrong}"
        assert one.losses == other.losses


@pytest.mark.parametrize(("mesh", "scheme"), quick(1, [
    (Mesh(pipe=2, row=2), "stationary"), (Mesh(pipe=2, row=2, col=2), "stationary"),
    (Mesh(pipe=2, row=2, col=2), "summa")]), ids=str)
def test_gradients_agree_to_the_bit_whatever_arrives_when(mesh, scheme):
    """The ranks of a stage run the same actions, in an order that is not known in advance."""
    batches = token_batches(mesh, count=4)
    one, two = (gradients_on(tiny_gpt, batches, mesh, scheme=scheme, pipeline=Pipeline(in_flight=3),
                                  check_order=seed == 1,
                                  throttle=Link(jitter_seconds=1e-3, seed=seed)).gradients for seed in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("mesh", "settings"), chosen(
    [(Mesh(row=2, col=2), {"scheme": "summa"}), (Mesh(pipe=2, row=2), {"keep_weights": True})],
    [Mesh(row=2, col=2), Mesh(pipe=2, row=2, col=3), Mesh(pipe=2, row=2)],
    [{}, {"scheme": "summa"}, {"keep_weights": True}]), ids=str)
def test_deferred_weight_gradients(mesh, settings):
    def deferred(engine):
        inner, queue = engine._stages.first.weight, []
        engine._stages.first.weight = lambda *action: (queue.append(action), inner(*action))
        return queue

    outcome = assert_parity(tiny_gpt, token_batches(mesh, count=3), mesh, settings=Settings(**settings), also=deferred,
                            pipeline=Pipeline(defer_bytes=HUGE))
    assert all(outcome.others), "nothing was deferred, so nothing was tested"


@pytest.mark.parametrize(("mesh", "scheme"), quick(2, [
    (Mesh(pipe=2, col=2), "megatron"), (Mesh(pipe=2, col=2), "sequence"), (Mesh(col=4), "megatron"),
    (Mesh(col=2), "stationary")]), ids=str)
def test_deferred_weight_gradients_on_columns_alone(mesh, scheme):
    """They are added to the gradients in place."""
    assert_parity(tiny_gpt, token_batches(mesh, count=3), mesh, scheme=scheme,
                  pipeline=Pipeline(defer_bytes=HUGE, boundaries=None))


@pytest.mark.parametrize(("mesh", "bucket_size"), chosen(
    [(Mesh(row=2, col=2), 7)],
    [Mesh(row=2), Mesh(row=2, col=2), Mesh(data=2, row=2, col=3)], [7, 1000]), ids=str)
def test_chunks_of_every_size(monkeypatch, mesh, bucket_size):
    """Also if no weights travel together, or only small ones."""
    monkeypatch.setitem(BUNDLE_ELEMENTS, "cpu", 0 if bucket_size == 7 else 300)
    assert_parity(tiny_gpt, token_batches(mesh), mesh, optim=Optim(bucket_size=bucket_size, chunk_buckets=1))


FROZEN = {"an attention": lambda name: name.startswith("layer0.attention"),
          "a prefix": lambda name: name.startswith(("embedding", "layer0")),
          "all but a layer": lambda name: not name.startswith("layer1.mlp"),
          "weights": lambda name: name.endswith("weight") and "norm" not in name,
          "biases": lambda name: name.endswith("bias"),
          "the head": lambda name: name.startswith("head")}


@pytest.mark.parametrize(("which", "rows", "cols", "scheme"), chosen(
    [("weights", 1, 2, "sequence")],
    list(FROZEN), [(1, 2, "sequence"), (2, 2, "stationary"), (2, 2, "summa")]))
def test_partly_frozen(rows, cols, scheme, which):
    mesh = Mesh(row=rows, col=cols)
    assert_parity(lambda: frozen(two_layers(), FROZEN[which]), token_batches(mesh, count=2), mesh, scheme=scheme)


@pytest.mark.parametrize("which", first(["all but a layer"], FROZEN))
def test_partly_frozen_on_stages(which):
    """A frozen first stage keeps no graph; a frozen stage in the middle passes gradients on."""
    mesh = Mesh(pipe=3, row=2, col=2)
    assert_parity(lambda: frozen(two_layers(), FROZEN[which]), token_batches(mesh), mesh,
                  pipeline=Pipeline(boundaries=(3, 5), defer_bytes=HUGE),
                  memory=Memory(recompute=1 if which == "a prefix" else "none"))


@pytest.mark.parametrize(("rows", "cols", "scheme", "count"), chosen(
    [(2, 2, "summa", 2)],
    [*EACH, (3, 3, "stationary"), (1, 4, "sequence")], [1, 2]))
def test_predictions_are_whole(rows, cols, scheme, count):
    mesh = Mesh(pipe=count, row=rows, col=cols)
    assert_predictions(tiny_gpt, token_batches(mesh, count=2), mesh, scheme)


@pytest.mark.parametrize(("mesh", "scheme"), first(
    [(Mesh(col=2), "sequence")],
    [(Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=3), "summa"), (Mesh(col=2), "sequence"),
     (Mesh(pipe=2, row=2, col=2), "stationary")]), ids=str)
def test_evaluation_and_prediction_before_training(mesh, scheme):
    batches = token_batches(mesh)
    loss = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64).evaluate(every(batches))

    def before(engine):
        engine.predict(share(engine, batches))
        return engine.evaluate(share(engine, batches)).loss

    outcome = assert_parity(tiny_gpt, batches, mesh, scheme=scheme, also=before)
    assert all(abs(found - loss) <= TOLERANCE * loss for found in outcome.others)


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_no_valid_target_anywhere(rows, cols, scheme):
    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh)
    for one in batches[0]:
        one.targets.fill_(-100)
    outcome = gradients_on(tiny_gpt, batches, mesh, scheme=scheme)
    assert all(loss != loss for loss in outcome.losses) and outcome.weights == [0.0] * mesh.size
    assert not any(gradient.any() for gradient in outcome.gradients.values())


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_a_microbatch_without_samples(rows, cols, scheme):
    """It adds nothing, as on one rank."""
    mesh = Mesh(row=rows, col=cols)
    full, = token_batches(mesh, count=1)[0]
    empty = Microbatch(full.inputs[:0], full.targets[:0], full.samples[:0])
    assert_parity(tiny_gpt, [[full, empty]], mesh, scheme=scheme)


@pytest.mark.parametrize("which", ["inputs", "targets"])
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_tokens_outside_the_vocabulary_are_no_tokens(rows, cols, scheme, which):
    """One process raises; a mesh on which no rank has such a token would silently train on wrong data."""
    def one_process():
        Reference(tiny_gpt(), seed=SEED, dtype=torch.float64).forward_backward(batches[0])

    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh, count=1)
    getattr(batches[0][0], which)[0, 0] = 61
    for run in (one_process, partial(gradients_on, tiny_gpt, batches, mesh, scheme=scheme)):
        with pytest.raises((IndexError, RuntimeError, RanvierError), match=r"(?i)out of (range|bounds)|vocab"):
            run()


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_shorter_sequences_and_other_sizes(rows, cols, scheme):
    """Microbatches have different lengths and sizes; workspaces grow and are reused."""
    mesh = Mesh(row=rows, col=cols)
    batches = [[*token_batches(mesh, count=1, length=4)[0], *token_batches(mesh, count=1, per_row=3, seed=1)[0],
                *token_batches(mesh, count=1, length=6, seed=2)[0]]]
    assert_parity(tiny_gpt, batches, mesh, scheme=scheme)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(1, 4, "stationary")], legal([(1, 4), (2, 2), (3, 3)])))
def test_one_token_of_the_vocabulary_for_each(rows, cols, scheme):
    mesh, vocab = Mesh(row=rows, col=cols), max(rows, cols)
    assert_parity(partial(tiny_gpt, vocab=vocab), token_batches(mesh, count=1, vocab=vocab), mesh, scheme=scheme)


@pytest.mark.parametrize("shapes", quick(1, [[(1, 2), (2, 2)], [(2, 3)]]))
def test_small_panels(shapes):
    for rows, cols, scheme in legal(shapes, ("stationary", "megatron", "sequence")):
        mesh, settings = Mesh(row=rows, col=cols), replace(SCHEMES[scheme], panel_bytes=1500)
        assert_parity(tiny_gpt, token_batches(mesh, per_row=2), mesh, settings=settings)
        (few, *_), (many, *_) = (on_tensor_mesh(rows, cols, one, lambda mesh: len(mesh.panels(torch.zeros(8, 8, 12))))
                                 for one in (SCHEMES[scheme], settings))
        assert few == 1 < many


def test_fp32_is_close():
    mesh = Mesh(row=2, col=2)
    batches = token_batches(mesh)
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(every(batches))
    for scheme in ("stationary", "summa"):
        outcome = gradients_on(tiny_gpt, batches, mesh, scheme=scheme, dtype=torch.float32)
        assert_close({name: gradient.double() for name, gradient in outcome.gradients.items()}, reference.gradients(),
                     1e-4)
