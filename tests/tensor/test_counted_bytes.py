"""Bytes received, counted while layers run, against the closed formulas; on real groups against the meta device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.tensor.counted import (
    MESHES,
    ONE_PANEL,
    SETTINGS,
    Meter,
    Sizes,
    cases,
    count_embedding,
    count_head,
    count_layer,
    formulas,
    whole,
)
from benchmarks.tensor.paper_volumes import PRODUCTS, layer_volume, product_volumes
from ranvier.config.run import Transformer
from ranvier.cost.volume import Bytes, SplitLayer, block_volume
from ranvier.mesh import Mesh
from ranvier.models import llama
from ranvier.models.gpt import MLP, Attention, gpt
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.stage import Stage
from ranvier.tensor.layers import Linear
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.split.linear import SplitLinear
from ranvier.tensor.weight_gradients import WeightGradients, root_of
from ranvier.testing.ranks import run_ranks
from tests.covering import chosen, quick

SIZES = Sizes(batch=24, sequence=144, hidden=288, heads=144, vocab=720)
"""All meshes divide them; 64 columns of Megatron are left out."""
CASES = [(scheme, row, col) for scheme, row, col in
         cases([*(mesh for mesh in MESHES if mesh != (8, 8)), (1, 1), (1, 3), (3, 1), (3, 2), (8, 4)])
         if SIZES.heads % col == 0 and SIZES.vocab % col == 0 and SIZES.sequence % col == 0]


@pytest.mark.parametrize(("scheme", "row", "col"), quick(3, CASES))
def test_counts_are_those_of_the_formulas(scheme, row, col):
    """A layer is the sum of its parts."""
    for checkpointed in (False, True):
        expected = formulas(scheme, row, col, SIZES, checkpointed=checkpointed)
        last, counted = (count_layer(Meter(scheme, row, col, at), SIZES, checkpointed=checkpointed)
                         for at in ((row - 1, col - 1), (0, 0)))
        parts = whole(counted.parts)
        assert counted.parts == last.parts == {name: expected[name] for name in PRODUCTS}
        assert parts == expected["layer"]
        forward, backward = (a + b for a, b in ((parts.forward, counted.small.forward),
                                                (parts.backward, counted.small.backward)))
        assert whole_mesh_count(Meter(scheme, row, col), SIZES, checkpointed) == (
            (forward.weights, forward.activations), (backward.weights, backward.activations))
    assert count_embedding(Meter(scheme, row, col), SIZES).parts == {"embedding": expected["embedding"]}
    assert count_head(Meter(scheme, row, col), SIZES).parts == {"head": expected["head"]}


@pytest.mark.parametrize("dtype", quick(1, [torch.bfloat16, torch.float64]))
def test_counts_are_in_the_size_of_elements(dtype):
    sizes = replace(SIZES, dtype=dtype)
    for scheme, row, col in (("summa", 2, 3), ("stationary", 2, 3), ("megatron", 1, 4), ("megatron-sequence", 1, 4)):
        for checkpointed in (False, True):
            expected = formulas(scheme, row, col, sizes, checkpointed=checkpointed)
            assert whole(count_layer(Meter(scheme, row, col), sizes, checkpointed=checkpointed).parts
                         ) == expected["layer"]


@pytest.mark.parametrize(("scheme", "row", "col"), quick(1, [("summa", 2, 3), ("stationary", 2, 3), ("megatron", 1, 4),
                                                    ("megatron-sequence", 1, 4)]))
def test_panels_do_not_change_the_counts(scheme, row, col):
    counts = [count_layer(Meter(scheme, row, col, panel_bytes=panel_bytes), SIZES, checkpointed=True)
              for panel_bytes in (10_000, 100_000, ONE_PANEL)]
    assert counts[0] == counts[1] == counts[2]


def layer_of(config, dtype=torch.float32):
    return nn.Sequential(Attention(config, dtype), MLP(config, dtype))


def whole_mesh_count(meter, sizes, checkpointed):
    """(forward, backward) bytes of a layer on one pair of groups, each as (row, col)."""
    mesh = meter.mesh("all")
    with torch.device("meta"):
        layer = split_layers(layer_of(sizes.config), mesh, "layer")
    return counted_pass(layer, mesh, meter.residual(sizes), checkpointed)


def counted_pass(layer, mesh, x, checkpointed):
    """((row, col) bytes of the forward, (row, col) bytes of the backward) of this rank."""
    def received():
        return mesh.over_rows.bytes_received, mesh.over_cols.bytes_received

    for linear in layer.modules():
        if isinstance(linear, SplitLinear):
            linear.recomputed = checkpointed
    begin = received()
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False
                                          ) if checkpointed else layer(x)
    middle = received()
    y.backward(torch.ones_like(y))
    end = received()
    return (tuple(b - a for a, b in zip(begin, middle, strict=True)),
            tuple(b - a for a, b in zip(middle, end, strict=True)))


@pytest.mark.parametrize(("scheme", "row", "col"), [("summa", 2, 2), ("stationary", 2, 4), ("stationary", 3, 1),
                                                    ("megatron", 1, 4), ("megatron-sequence", 1, 2)])
def test_a_llamas_products_receive_what_is_predicted(scheme, row, col):
    """Queries, keys and values are one product, and gate and up are another."""
    sizes = Sizes(batch=6, sequence=12, hidden=36, heads=12, vocab=36)
    config = Transformer(family="llama", hidden=36, heads=12, kv_heads=4, head_dim=6, intermediate=48)
    meter = Meter(scheme, row, col)
    with torch.device("meta"):
        attention, mlp = (meter.split(block) for block in (llama.Attention(config, sizes.dtype, None, True),
                                                           llama.MLP(config, sizes.dtype)))
    found = meter.run(meter.residual(sizes), lambda x: mlp(attention(x)))
    for name, (kind, into, out) in {"qkv": ("output", 36, 20 * 6), "projection": ("input", 12 * 6, 36),
                                    "fc1": ("output", 36, 2 * 48), "fc2": ("input", 48, 36)}.items():
        itemsize = sizes.dtype.itemsize
        volume = block_volume([SplitLayer(kind, into, out)], scheme, row=row, col=col, batch=6, sequence=12, hidden=36,
                              itemsize=itemsize, sum_itemsize=itemsize, recompute="none", last=True)
        for way in ("forward", "backward"):
            ours, theirs = getattr(found[name], way), getattr(volume, way)
            assert ours.activations == pytest.approx(theirs.activations), (name, way)
            assert ours.weights == pytest.approx(theirs.weights), (name, way)


SMALL = Sizes(batch=6, sequence=12, hidden=36, heads=12, vocab=36)
REAL = [("summa", 2, 2), ("summa", 2, 3), ("summa", 1, 3), ("summa", 3, 1), ("stationary", 2, 2), ("stationary", 2, 3),
        ("stationary", 1, 3), ("stationary", 3, 1), ("megatron", 1, 4), ("megatron-sequence", 1, 4)]


@pytest.mark.parametrize(("scheme", "row", "col", "checkpointed"), chosen(
    [("summa", 2, 2, True), ("megatron-sequence", 1, 4, True)], REAL, [False, True]))
def test_real_ranks_receive_what_the_meta_device_counts(scheme, row, col, checkpointed):
    panel_bytes = 1500  # one unit of megatron-sequence, several of the others; each has several panels

    def on_rank(world):
        mesh, at = Mesh(row=row, col=col), Mesh(row=row, col=col).coordinates(world.rank)
        over_rows, over_cols = (world.backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        tensor_mesh = TensorMesh(over_rows, over_cols, SETTINGS[scheme], panel_bytes=panel_bytes)
        layer = split_layers(layer_of(SMALL.config), tensor_mesh, "layer")
        x = torch.ones(Meter(scheme, row, col).residual(SMALL).shape, requires_grad=True)
        return (at.row, at.col), counted_pass(layer, tensor_mesh, x, checkpointed)

    found = dict(run_ranks(on_rank, row * col))
    assert len(set(found.values())) == 1, found
    for at, received in found.items():
        assert received == whole_mesh_count(Meter(scheme, row, col, at, panel_bytes, device="cpu"), SMALL,
                                            checkpointed)


def test_of_a_segment_all_layers_but_the_last_compute_fc2_again():
    """Two layers in one segment, as a stage has them with `memory.checkpoint 2`."""
    meter = Meter("stationary", 2, 2)
    mesh = meter.mesh("all")
    with torch.device("meta"):
        blocks = [(number, f"block{number}", split_layers(block, mesh, "block")) for number, block in
                  enumerate([*layer_of(SMALL.config), *layer_of(SMALL.config)])]
        stage = Stage(blocks, loss=None, seed=0, device=torch.device("meta"), progress=lambda: None,
                      block_passed=lambda number: None, segments=[range(4)],
                      weight_gradients=WeightGradients(lambda parameters: [0], lambda chunks: None))
        for _, _, block in blocks:
            for parameter in block.parameters():
                parameter.grad = torch.zeros_like(parameter)
        stage.begin(training=True, num_microbatches=1)
        x = meter.residual(SMALL).detach()
        stage.forward(0, 0, Microbatch(inputs=None, targets=None), {"": x}, frozenset([""]))
        before = mesh.over_rows.bytes_received
        stage.backward(0, {"": torch.empty_like(x)}, defer=False, last=False)
    shape = dict(row=2, col=2, **SMALL.volume)
    volumes = [layer_volume("stationary", recompute="kept", last=last, **shape) for last in (False, True)]
    assert before == sum(volume.forward.weights for volume in volumes)
    assert mesh.over_rows.bytes_received - before == sum(volume.backward.weights for volume in volumes)
    small = count_layer(Meter("stationary", 2, 2), SMALL, checkpointed=True).small
    assert mesh.over_cols.bytes_received == sum(volume.forward.activations + volume.backward.activations
                                                for volume in volumes) + 2 * (small.forward + small.backward).total


MODEL = Transformer(num_layers=2, hidden=16, heads=4, vocab=24, sequence=8)


@pytest.mark.parametrize(("row", "col", "keep"), chosen(
    [(2, 1, True)], [(2, 2), (2, 1), (4, 1)], [False, True]))
def test_kept_weights_are_gathered_once_a_step(row, col, keep):
    """Bytes along `row` and `col` in steps of 1, 3 and again 1 microbatches. Kept weights and their gradients travel
    once; on one column the head's gradient travels each time, because the embedding has the same parameter.
    """
    batch = 4
    settings = replace(SETTINGS["stationary"], keep_weights=keep)

    def on_rank(world):
        engine = Engine(gpt(MODEL), world, mesh=Mesh(row=row, col=col), tensor=settings, dtype=torch.float32,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        ids = torch.randint(MODEL.vocab, (batch // row, MODEL.sequence), generator=torch.Generator().manual_seed(0))
        received = [(0, 0)]
        for count in (1, 3, 1):
            engine.train_batch([Microbatch(ids, ids, torch.arange(batch // row)) for _ in range(count)])
            axes = engine.counters()["bytes_received_by_axis"]
            received.append((axes["row"], axes["col"]))
        engine.close()
        return [tuple(b - a for a, b in zip(received[step], received[step + 1], strict=True)) for step in range(3)]

    ranks = run_ranks(on_rank, row * col)
    assert all(rank == ranks[0] for rank in ranks)
    one, three, again = ranks[0]
    assert one == again
    sizes = Sizes(batch=batch, sequence=MODEL.sequence, hidden=MODEL.hidden, heads=MODEL.heads, vocab=MODEL.vocab)
    expected = formulas("stationary", row, col, sizes, checkpointed=False)
    products = [expected["layer"]] * MODEL.num_layers + [expected["head"]]
    embedding, ids = expected["embedding"], count_embedding(Meter("stationary", row, col), sizes).small
    gathered = sum(volume.forward.weights for volume in products)
    sums = sum(volume.backward.weights for volume in products) - gathered  # of weight gradients
    once = sums if col > 1 else sums - (products[-1].backward.weights - products[-1].forward.weights)
    every = sums + (embedding.forward + embedding.backward).total + ids.forward.total
    assert three[0] - one[0] == 2 * (every - once if keep else every + 2 * gathered)
    assert one[0] == every + gathered * (1 if keep else 2)
    small = [count(Meter("stationary", row, col), sizes).small for count in
             [count_layer] * MODEL.num_layers + [count_head]]
    along_col = sum(volume.forward.activations + volume.backward.activations for volume in products) + sum(
        (each.forward + each.backward).activations for each in small)
    assert one[1] == along_col and three[1] == 3 * along_col


@pytest.mark.parametrize("stationary", ["output", "input"])
@pytest.mark.parametrize(("scheme", "row", "col"), [("stationary", 2, 3), ("stationary", 1, 4), ("stationary", 3, 1),
                                                    ("megatron-sequence", 1, 4), ("megatron", 1, 4), ("summa", 2, 2)])
def test_deferred_weight_gradients_receive_no_more(scheme, row, col, stationary):
    """An input-stationary product gathers dy in the backward, once for both gradients; an output-stationary one gathers
    x when its weight gradient is computed."""
    into, out = (4, 1) if stationary == "input" else (1, 4)
    name = "fc2" if stationary == "input" else "fc1"
    mesh = Meter(scheme, row, col).mesh("all")
    with torch.device("meta"):
        linear = Linear(into * SMALL.hidden, out * SMALL.hidden, stationary=stationary)
        layer = split_layers(linear, mesh, "linear")
        layer.weight.grad = torch.zeros_like(layer.weight)
    layer.may_wait = True
    gradients = layer.weight_gradients = WeightGradients(lambda parameters: [0], lambda chunks: None)
    x = Meter(scheme, row, col).residual(SMALL)
    if stationary == "input":
        inner = mesh.activations.whole_dims(x)
        x = torch.empty(*inner, into * SMALL.hidden // col, device="meta", requires_grad=True)

    def received():
        return Bytes(mesh.over_cols.bytes_received, mesh.over_rows.bytes_received)

    y = layer(x)
    volume = product_volumes(scheme, row=row, col=col, **SMALL.volume)[name]
    assert received() == volume.forward
    products = gradients.backward_pass(0, [root_of(y)], [torch.empty_like(y)], defer=True)
    assert len(products) == 1 and x.grad is not None
    at_once = received()
    gradients.run(0, 0)
    assert received() == volume.forward + volume.backward
    unit = Bytes(SMALL.batch * SMALL.sequence * SMALL.hidden * 4 * (col - 1) // (row * col),
                 SMALL.hidden**2 * 4 * (row - 1) // (row * col))
    waited = Bytes(received().activations - at_once.activations, received().weights - at_once.weights)
    gathers_x = scheme == "summa" or (stationary == "output" and scheme != "megatron")
    assert waited == Bytes(into * unit.activations if gathers_x else 0, 4 * unit.weights)
