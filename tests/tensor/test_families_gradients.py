"""BERT and ViT on every mesh: raw gradients, losses and norms are those of plain PyTorch, in fp64 to 1e-10."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ranvier.comm.message import MessageKind
from ranvier.config.run import Memory, Pipeline, Transformer
from ranvier.mesh import Mesh
from ranvier.models import bert, vit
from ranvier.pipeline.microbatch import Microbatch
from tests.covering import chosen, covering, quick
from tests.errors import raises
from tests.pipeline.parity import frozen
from tests.tensor.split_parity import IGNORED, assert_parity, assert_predictions, legal, on_mesh

SIZES = dict(hidden=36, heads=12, vocab=61, dropout=0.1, num_classes=5)
KINDS = ["classes", "span", "images"]
FEW = legal([(1, 2), (2, 1), (2, 2), (2, 3)])


def make(kind, **changed):
    """A tiny model in fp64 that every mesh of this folder can split; images have 10 tokens."""
    if kind == "images":
        config = Transformer(**SIZES | dict(num_layers=1, image_size=12, patch_size=4) | changed)
        return vit.vit(config, dtype=torch.float64)
    config = Transformer(**SIZES | dict(num_layers=1, sequence=12, intermediate=72) | changed)
    return bert.bert(config, kind, dtype=torch.float64)


def batches_of(kind, mesh, *, count=2):
    """`count` microbatches for each replica, with two samples a row and random padding. Some samples have no target,
    in the first microbatch all samples of the last row."""
    batches = []
    for replica in range(mesh.data):
        batches.append([])
        for number in range(count):
            generator = torch.Generator().manual_seed(10 * replica + number)
            samples = 2 * mesh.row
            targets = torch.randint(5, (samples,), generator=generator)
            targets[(replica + number) % samples] = IGNORED
            if mesh.row > 1 and number == 0:
                targets[-2:] = IGNORED
            if kind == "images":
                inputs = torch.randn(samples, 3, 12, 12, generator=generator, dtype=torch.float64)
            else:
                place = torch.arange(12)
                lengths = torch.randint(6, 13, (samples, 1), generator=generator)
                inputs = {"ids": torch.randint(61, (samples, 12), generator=generator),
                          "mask": (place < lengths).long(), "types": (place >= lengths // 2).long()}
            if kind == "span":
                targets = {"start": targets, "end": torch.randint(6, (samples,), generator=generator)}
            first = (replica * count + number) * samples
            batches[-1].append(Microbatch(inputs, targets, torch.arange(first, first + samples)))
    return batches


def assert_as_one_process(kind, mesh, *, count=2, change=lambda model: model, **options):
    """Adding a constant to all scores of a span changes nothing, so some of its gradients are zero up to rounding."""
    return assert_parity(lambda: change(make(kind, num_layers=1 if mesh.pipe == 1 else 2)),
                         batches_of(kind, mesh, count=count), mesh, least=1e-3 if kind == "span" else 0.0, **options)


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), quick(4, covering(FEW, KINDS)))
def test_on_tensor_meshes(rows, cols, scheme, kind):
    mesh = Mesh(row=rows, col=cols)
    assert_as_one_process(kind, mesh, scheme=scheme)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), [
    (*one, kind) for one in legal() for kind in KINDS if one[1] != 4 or kind != "images" or "sequence" not in one[2]])
def test_on_all_tensor_meshes(rows, cols, scheme, kind):
    mesh = Mesh(row=rows, col=cols)
    assert_as_one_process(kind, mesh, count=3, scheme=scheme)


@pytest.mark.parametrize(("mesh", "scheme", "kind"), chosen([
    (Mesh(data=2, pipe=2, col=2), "sequence", "images"), (Mesh(data=2, pipe=3), "stationary", "span")], [
    (Mesh(data=2, pipe=2, row=2, col=2), "stationary"), (Mesh(pipe=2, row=2, col=2), "summa"),
    (Mesh(data=2, pipe=2, col=2), "sequence"), (Mesh(pipe=3, col=2), "megatron"),
    (Mesh(data=2, pipe=3), "stationary")], KINDS), ids=str)
def test_on_all_axes(mesh, scheme, kind):
    assert_as_one_process(kind, mesh, scheme=scheme)


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), chosen(
    [(1, 2, "sequence", "images"), (1, 1, "stationary", "classes")],
    [(2, 1, "stationary"), (2, 2, "stationary"), (2, 2, "summa"), (1, 2, "sequence"), (1, 1, "stationary")], KINDS))
def test_checkpointed_and_deferred(rows, cols, scheme, kind):
    mesh = Mesh(pipe=2, row=rows, col=cols)
    assert_as_one_process(kind, mesh, scheme=scheme, memory=Memory(recompute=1))
    assert_as_one_process(kind, mesh, scheme=scheme, pipeline=Pipeline(defer_bytes=1 << 40))


@pytest.mark.parametrize(("rows", "cols", "scheme", "kind"), chosen(
    [(1, 2, "megatron", "classes"), (1, 2, "sequence", "images")],
    [(2, 2, "stationary"), (2, 2, "summa"), (1, 2, "sequence"), (1, 2, "megatron"), (1, 1, "stationary")], KINDS))
def test_predictions_are_whole(rows, cols, scheme, kind):
    mesh = Mesh(pipe=2, row=rows, col=cols)
    assert_predictions(partial(make, kind, num_layers=2), batches_of(kind, mesh), mesh, scheme)


# ---------------------------------------------------------------------- frozen prefixes

def first_layer(name):
    return name.startswith(("embedding.", "layer0."))


@pytest.mark.parametrize(("kind", "boundaries", "backward"), covering(
    KINDS, [((3,), 0), ((2,), 0), ((4,), 2)]))
def test_a_frozen_prefix_on_two_stages(kind, boundaries, backward):
    """Of two layers and a head, the embedding and the first layer are frozen. If the cut is after or within them, no
    gradient travels back; if the first stage also trains blocks, one gradient does for each microbatch."""
    mesh = Mesh(pipe=2)
    change = partial(frozen, is_frozen=first_layer)

    def watch(engine):
        sent, transport = [], engine._connections.transport
        send = transport.send

        def watched(to, message):
            sent.append(message.kind)
            send(to, message)

        transport.send = watched
        return sent

    outcome = assert_as_one_process(kind, mesh, change=change, pipeline=Pipeline(boundaries=boundaries), also=watch)
    assert not any(map(first_layer, outcome.gradients)) and outcome.gradients
    assert outcome.others[1].count(MessageKind.BACKWARD) == backward


@pytest.mark.parametrize(("kind", "mesh", "scheme"), quick(2, covering(KINDS, [
    (Mesh(pipe=2, row=2, col=2), "stationary"), (Mesh(pipe=2, col=2), "sequence"), (Mesh(row=2, col=2), "summa"),
    (Mesh(data=2, pipe=2), "stationary")])), ids=str)
def test_a_frozen_prefix_on_meshes(kind, mesh, scheme):
    assert_as_one_process(kind, mesh, scheme=scheme, change=partial(frozen, is_frozen=first_layer))


# ---------------------------------------------------------------------- what cannot be

@pytest.mark.parametrize(("kind", "mesh", "scheme", "error"), [
    ("images", Mesh(col=4), "sequence", ("layer-not-divisible", 4, 10)),
    ("classes", Mesh(col=8), "sequence", ("layer-not-divisible", 8, 12)),
    ("classes", Mesh(col=5), "stationary", ("layer-not-divisible", 5)),
    ("images", Mesh(col=5), "summa", ("layer-not-divisible", 5)),
    ("span", Mesh(row=5), "stationary", ("layer-not-divisible", 5)),
])
def test_what_cannot_be_cut_is_named(kind, mesh, scheme, error):
    with raises(*error):
        on_mesh(partial(make, kind), mesh, lambda engine: None, scheme=scheme)
