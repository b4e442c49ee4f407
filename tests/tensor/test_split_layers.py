"""Each split layer alone: outputs, input gradients and parameter gradients are parts of the full layer's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ranvier import keyed_random
from ranvier.config.run import TensorParallel as Settings
from ranvier.tensor import layers
from ranvier.tensor.columns import ColumnLayout, gather_whole, mark
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.split.loss import NextTokenLoss
from ranvier.tensor.weight_gradients import WeightGradients, root_of
from ranvier.testing.reference import relative_error
from tests.covering import covering, first, pairwise, quick
from tests.tensor.split_parity import (
    EACH,
    IGNORED,
    SCHEMES,
    SEED,
    TOLERANCE,
    assert_layer_parity,
    inner_part,
    legal,
    on_tensor_mesh,
    random,
    row_part,
    samples_of,
    stream_part,
)

SEQUENCE, HIDDEN, INNER, VOCAB = 12, 36, 24, 61
MESHES = legal([(1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (3, 3)])
FEW = first(EACH, legal([(1, 2), (2, 2), (2, 3)]))
HIDDEN_SPLIT = [one for one in MESHES if one[2] in ("stationary", "summa")]


def filled(build, **options):
    """A layer whose parameters, including biases, are random numbers."""
    layer = build(dtype=torch.float64, **options)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=number + 10))
    return layer


def stream(rows, seed=1):
    return random(2 * rows, SEQUENCE, HIDDEN, seed=seed)


def ids(rows):
    return torch.randint(0, VOCAB, (2 * rows, SEQUENCE), generator=torch.Generator().manual_seed(0))


def linear(stationary, rows, **options):
    """make, x, dy, enter and leave of a Linear into or out of a sublayer."""
    inner = random(2 * rows, SEQUENCE, INNER, seed=2)
    sizes, ends = ((HIDDEN, INNER), (stream_part, inner_part)) if stationary == "output" \
        else ((INNER, HIDDEN), (inner_part, stream_part))
    x, dy = (stream(rows), inner) if stationary == "output" else (inner, stream(rows))
    return partial(filled, partial(layers.Linear, *sizes, stationary=stationary, **options)), x, dy, *ends


# ---------------------------------------------------------------------- products

@pytest.mark.parametrize("stationary", ["output", "input"])
def test_autograd_inside_the_backward_queues_nothing(stationary):
    """If a hook differentiates the same layer, its product goes to the hook, and the layer's own is not deferred."""
    make, x, dy, enter, leave = linear(stationary, 2)

    def gradient(mesh, *, inside):
        layer = split_layers(make(), mesh, "block")
        layer.weight_gradients = WeightGradients(*[lambda given: [0]] * 2)
        layer.may_wait = layer.has_own_weights = True
        own_x = enter(mesh, x).clone().requires_grad_()
        inner, y = layer(own_x), layer(own_x)
        if inside:
            y.register_hook(lambda dy: torch.autograd.grad(inner, own_x, dy)[0].sum() * 0 + dy)
        products = layer.weight_gradients.backward_pass(0, [root_of(y)], [leave(mesh, dy).clone()], True)
        assert len(products) == (not inside)
        for number in range(len(products)):
            layer.weight_gradients.run(0, number)
        mesh.sums.finish()
        return layer.weight.grad.clone()

    for alone, beside in on_tensor_mesh(2, 2, SCHEMES["stationary"],
                                        lambda mesh: [gradient(mesh, inside=inside) for inside in (False, True)]):
        assert relative_error(beside, alone) <= TOLERANCE


@pytest.mark.parametrize("panel_bytes", quick(1, [None, 3000]))
@pytest.mark.parametrize(("rows", "cols", "scheme", "stationary", "bias"), covering(
    MESHES, [("output", True), ("input", False), ("input", True), ("output", False)]))
def test_linear(rows, cols, scheme, stationary, bias, panel_bytes):
    make, x, dy, enter, leave = linear(stationary, rows, bias=bias)
    assert_layer_parity(make, x, dy, rows, cols, scheme, enter=enter, leave=leave, panel_bytes=panel_bytes)


@pytest.mark.parametrize(("rows", "cols", "scheme", "stationary", "frozen"), pairwise(
    EACH, ["output", "input"], [["weight"], ["bias"], ["weight", "bias"]]))
def test_linear_partly_frozen(rows, cols, scheme, stationary, frozen):
    make, x, dy, enter, leave = linear(stationary, rows)

    def make_frozen():
        layer = make()
        for name in frozen:
            layer.get_parameter(name).requires_grad_(False)
        return layer

    assert_layer_parity(make_frozen, x, dy, rows, cols, scheme, enter=enter, leave=leave)


@pytest.mark.parametrize("stationary", ["output", "input"])
@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (2, 2), (2, 3)])
def test_linear_that_keeps_weights(rows, cols, stationary):
    """Each rank gathers its weight once, for the forward and the backward."""
    make, x, dy, enter, leave = linear(stationary, rows)
    gathers = []

    def count(layer):
        start = layer.start_gather
        layer.start_gather = lambda *args, **kept: (gathers.append(layer), start(*args, **kept))[1]

    assert_layer_parity(make, x, dy, rows, cols, "stationary", enter=enter, leave=leave,
                        settings=Settings(keep_weights=True), prepare=count)
    assert len(gathers) == rows * cols


@pytest.mark.parametrize("stationary", ["output", "input"])
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_linear_that_is_recomputed(rows, cols, scheme, stationary):
    """The backward uses what the layer gathers for the recomputation."""
    make, x, dy, enter, leave = linear(stationary, rows)

    def prepare(layer):
        inner, layer.recomputed = layer.forward, True
        layer.forward = lambda x: checkpoint(inner, x, use_reentrant=False)

    assert_layer_parity(make, x, dy, rows, cols, scheme, enter=enter, leave=leave, prepare=prepare)


@pytest.mark.parametrize(("rows", "cols", "scheme"), MESHES)
def test_a_vocabulary_that_nothing_divides(rows, cols, scheme):
    make = partial(filled, partial(layers.VocabularyLinear, HIDDEN, VOCAB))
    assert_layer_parity(make, stream(rows), random(2 * rows, SEQUENCE, VOCAB, seed=2), rows, cols, scheme,
                        enter=stream_part, leave=inner_part)


@pytest.mark.parametrize(("rows", "cols", "scheme"), MESHES)
def test_whole_logits(rows, cols, scheme):
    layer = filled(partial(layers.VocabularyLinear, HIDDEN, VOCAB))
    x = stream(rows)

    @torch.no_grad()
    def work(mesh):
        mine = split_layers(filled(partial(layers.VocabularyLinear, HIDDEN, VOCAB)), mesh, "block")
        logits = mine(stream_part(mesh, x).contiguous())
        if mesh.num_cols > 1:
            logits = mark(logits, ColumnLayout(mesh, 2, VOCAB))
        return relative_error(gather_whole(logits), row_part(mesh, layer(x)))

    assert max(on_tensor_mesh(rows, cols, SCHEMES[scheme], work)) < TOLERANCE


@pytest.mark.parametrize("stationary", ["output", "input"])
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_linear_of_tensors_that_are_not_contiguous(rows, cols, scheme, stationary):
    """Inputs that are part of a wider tensor, and a gradient that is one expanded number."""
    make, x, dy, enter, leave = linear(stationary, rows)

    def prepare(layer):
        inner = layer.forward
        layer.forward = lambda x: inner(torch.cat([x, x], -1)[..., :x.shape[-1]])

    assert_layer_parity(make, x, torch.ones(1, dtype=torch.float64).expand(dy.shape), rows, cols, scheme,
                        enter=enter, leave=leave, prepare=prepare)


# ---------------------------------------------------------------------- embeddings

@pytest.mark.parametrize(("rows", "cols", "scheme"), MESHES)
def test_embedding(rows, cols, scheme):
    assert_layer_parity(partial(filled, partial(layers.Embedding, VOCAB, HIDDEN)), ids(rows), stream(rows), rows, cols,
                        scheme, enter=row_part, leave=stream_part)


@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (2, 2), (2, 3)])
def test_an_embedding_of_one_feature_on_each_rank(rows, cols):
    """Its output is the input of a product."""
    width = rows * cols
    table, weight = random(VOCAB, width), random(6 * width, width, seed=2)

    def work(mesh):
        embedding = layers.Embedding(VOCAB, width, dtype=torch.float64)
        linear = layers.Linear(width, 6 * width, bias=False, stationary="output", dtype=torch.float64)
        embedding.weight.data.copy_(table)
        linear.weight.data.copy_(weight)
        block = split_layers(nn.Sequential(embedding, linear), mesh, "block")
        return relative_error(block(row_part(mesh, ids(rows))), inner_part(mesh, table[ids(rows)] @ weight.t()))

    assert max(on_tensor_mesh(rows, cols, SCHEMES["stationary"], work)) < TOLERANCE


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_embedding_with_a_padding_token(rows, cols, scheme):
    """Its row of the table has no gradient."""
    tokens = ids(rows)
    tokens[:, ::3] = 7
    assert_layer_parity(partial(filled, partial(layers.Embedding, VOCAB, HIDDEN, padding_idx=7)), tokens, stream(rows),
                        rows, cols, scheme, enter=row_part, leave=stream_part)


@pytest.mark.parametrize(("rows", "cols", "scheme", "length"), covering(MESHES, [SEQUENCE, SEQUENCE + 4]))
def test_position_embedding(rows, cols, scheme, length):
    """Also with fewer positions than the table has; each row adds the gradients of its own sequences."""
    table = random(length, HIDDEN, seed=3)
    dy = stream(rows)
    settings = SCHEMES[scheme]

    def work(mesh):
        layer = layers.PositionEmbedding(length, HIDDEN, dtype=torch.float64)
        layer.weight.data.copy_(table)
        split = layer.splits(settings)["weight"]
        layer = split_layers(layer, mesh, "block")
        mine = stream_part(mesh, dy)
        y = layer(SEQUENCE).expand(mine.shape)
        (y * mine).sum().backward()
        gradient = layer.weight.grad.contiguous()
        for axis, group in (("row", mesh.over_rows), ("col", mesh.over_cols)):
            if axis in split.summed:
                group.all_reduce(gradient).wait()
        (_, features) = split.box(table.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
        expected = functional.pad(dy.sum(0), (0, 0, 0, length - SEQUENCE))[:, slice(*features)]
        return max(relative_error(y, stream_part(mesh, table[:SEQUENCE].expand(dy.shape))),
                   relative_error(gradient, expected))

    assert max(on_tensor_mesh(rows, cols, settings, work)) < TOLERANCE


# ---------------------------------------------------------------------- norms

@pytest.mark.parametrize(("rows", "cols", "scheme", "mean"), covering(MESHES, [0.0, 1e4]))
def test_layer_norm(rows, cols, scheme, mean):
    assert_layer_parity(partial(filled, partial(layers.LayerNorm, HIDDEN)), stream(rows) + mean, stream(rows, 2), rows,
                        cols, scheme, enter=stream_part, leave=stream_part, tolerance=1e-10 if not mean else 1e-8)


@pytest.mark.parametrize(("rows", "cols", "scheme"), HIDDEN_SPLIT)
def test_layer_norm_in_fp32_of_a_large_mean(rows, cols, scheme):
    """A mean of 1e4 with a deviation of 1: E[x^2] - E[x]^2 has no correct digit in fp32, but merged moments have all
    the digits of x."""
    x = (stream(rows) + 1e4).float()
    means, squares = x.mean(-1), (x * x).mean(-1)
    naive = (x - means[..., None]) * (squares - means * means).clamp(min=1e-5).rsqrt()[..., None]
    assert relative_error(naive.double(), functional.layer_norm(x.double(), (HIDDEN,))) > 0.1

    def make():
        return filled(partial(layers.LayerNorm, HIDDEN)).float()

    assert_layer_parity(make, x, stream(rows, 2).float(), rows, cols, scheme, enter=stream_part, leave=stream_part,
                        tolerance=2e-3)


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_layer_norm_without_parameters(rows, cols, scheme, options):
    assert_layer_parity(partial(filled, partial(layers.LayerNorm, HIDDEN, **options)), stream(rows), stream(rows, 2),
                        rows, cols, scheme, enter=stream_part, leave=stream_part)


# ---------------------------------------------------------------------- dropout

@pytest.mark.parametrize(("rows", "cols", "scheme"), MESHES)
def test_dropout_drops_what_the_unsplit_layer_drops(rows, cols, scheme):
    """Each call in a block drops its own elements."""
    x = torch.ones(2 * rows, SEQUENCE, HIDDEN, dtype=torch.float64)
    layer = layers.Dropout(0.3)
    with keyed_random.scope(SEED, 1, samples_of(len(x)), "block"):
        expected = [layer(x), layer(x)]
    assert not torch.equal(*expected)

    def work(mesh):
        mine = split_layers(layers.Dropout(0.3), mesh, "block")
        with keyed_random.scope(SEED, 1, row_part(mesh, samples_of(len(x))), "block"):
            found = [mine(stream_part(mesh, x)) for _ in range(2)]
        mine.eval()
        assert torch.equal(mine(stream_part(mesh, x)), stream_part(mesh, x))
        return all(torch.equal(one, stream_part(mesh, whole)) for one, whole in zip(found, expected, strict=True))

    assert all(on_tensor_mesh(rows, cols, SCHEMES[scheme], work))
    assert_layer_parity(partial(layers.Dropout, 0.3), stream(rows), stream(rows, 2), rows, cols, scheme,
                        enter=stream_part, leave=stream_part)


# ---------------------------------------------------------------------- heads and losses

@pytest.mark.parametrize(("rows", "cols", "scheme", "token", "bias"), pairwise(
    EACH, [0, 5, SEQUENCE - 1, -1, None], [True, False]))
def test_token_linear(rows, cols, scheme, token, bias):
    make = partial(filled, partial(layers.ClassifierHead, HIDDEN, 5, bias, token=token))
    dy = random(2 * rows, 5) if token is not None else random(2 * rows, SEQUENCE, 5)
    assert_layer_parity(make, stream(rows), dy, rows, cols, scheme, enter=stream_part, leave=row_part)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_whole_linear(rows, cols, scheme, bias):
    make = partial(filled, partial(layers.ReplicatedLinear, HIDDEN, 5, bias))
    assert_layer_parity(make, random(2 * rows, HIDDEN), random(2 * rows, 5), rows, cols, scheme, enter=row_part,
                        leave=row_part)


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_small_embedding(rows, cols, scheme):
    kinds = torch.randint(3, (2 * rows, SEQUENCE), generator=torch.Generator().manual_seed(5))
    make = partial(filled, partial(layers.TokenTypeEmbedding, 3, HIDDEN))
    assert_layer_parity(make, kinds, stream(rows), rows, cols, scheme, enter=row_part, leave=stream_part)


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_patch_embedding(rows, cols, scheme):
    """The first token is on only one of the columns that share a sequence."""
    make = partial(filled, partial(layers.PatchEmbedding, 7, HIDDEN, length=SEQUENCE))
    assert_layer_parity(make, random(2 * rows, SEQUENCE - 1, 7), stream(rows), rows, cols, scheme, enter=row_part,
                        leave=stream_part)


@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_dropout_of_what_all_columns_have(rows, cols, scheme):
    x = random(2 * rows, HIDDEN)
    assert_layer_parity(lambda: layers.Dropout(0.5, whole=True), x, random(2 * rows, HIDDEN), rows, cols, scheme,
                        enter=row_part, leave=row_part)


@pytest.mark.parametrize("token", [SEQUENCE, -SEQUENCE - 1])
@pytest.mark.parametrize(("rows", "cols", "scheme"), FEW)
def test_token_linear_of_a_token_that_is_not_there(rows, cols, scheme, token):
    def work(mesh):
        head = split_layers(layers.ClassifierHead(HIDDEN, 5, token=token, dtype=torch.float64), mesh, "block")
        with pytest.raises(IndexError):
            head(stream_part(mesh, stream(rows)))

    on_tensor_mesh(rows, cols, SCHEMES[scheme], work)


def split_loss(rows, cols, scheme, logits, targets):
    """(loss, weight, gradient) of all rows together, from the last column of each row."""
    def work(mesh):
        loss = split_layers(NextTokenLoss(logits.shape[-1]), mesh, "loss")
        mine = inner_part(mesh, logits).detach().clone().requires_grad_()
        total, weight = loss(mine * 1, row_part(mesh, targets))
        total.backward()
        with torch.no_grad():
            again, _ = loss(mine, row_part(mesh, targets))
        assert torch.equal(again, total) and torch.equal(mine, inner_part(mesh, logits))
        return total.detach(), weight, mine.grad

    found = on_tensor_mesh(rows, cols, SCHEMES[scheme], work)
    grid = [found[row * cols:(row + 1) * cols] for row in range(rows)]
    for row in grid:
        assert all(torch.equal(one[0], row[0][0]) and one[1] == row[0][1] for one in row), "columns differ"
    return (sum(row[0][0] for row in grid), sum(int(row[0][1]) for row in grid),
            torch.cat([torch.cat([one[2] for one in row], -1) for row in grid]))


def whole_loss(logits, targets):
    leaf = logits.detach().clone().requires_grad_()
    total = functional.cross_entropy(leaf.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    total.backward()
    return total.detach(), int((targets != IGNORED).sum()), leaf.grad


@pytest.mark.parametrize(("rows", "cols", "ignored", "scale"), covering(
    [(1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (3, 3)],
    [("none", 1.0), ("some", 1e4), ("a row", 1.0), ("all", 1.0), ("none", 1e4), ("some", 1.0), ("a row", 1e4)]))
def test_next_token_loss(rows, cols, ignored, scale):
    """With logits of 1e4 an exponential overflows unless the largest logit is subtracted."""
    logits, targets = random(2 * rows, SEQUENCE, VOCAB) * scale, ids(rows)
    if ignored == "some":
        targets[:, ::3] = IGNORED
    elif ignored != "none":
        targets[:2 if ignored == "a row" else None] = IGNORED
    total, weight, gradient = split_loss(rows, cols, "stationary", logits, targets)
    expected, count, expected_gradient = whole_loss(logits, targets)
    assert weight == count and torch.isfinite(gradient).all()
    assert abs(total - expected) <= 1e-12 * abs(expected)
    assert relative_error(gradient, expected_gradient) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_next_token_loss_in_narrow_types(dtype):
    logits, targets = (random(4, SEQUENCE, VOCAB) * 4).to(dtype), ids(2)
    total, _, gradient = split_loss(2, 2, "stationary", logits, targets)
    expected, _, expected_gradient = whole_loss(logits.double(), targets)
    assert total.dtype is torch.float32 and abs(total - expected) <= 1e-6 * expected
    assert relative_error(gradient.double(), expected_gradient) <= (1e-6 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("impossible", [slice(0, 1), slice(40, None)], ids=["the first of a column", "a whole column"])
def test_next_token_loss_with_impossible_tokens(impossible):
    """Logits of minus infinity, which models give to entries that only pad the vocabulary."""
    logits, targets = random(2, SEQUENCE, VOCAB), 1 + ids(1) % 39
    logits[..., impossible] = -torch.inf  # the last of three columns begins at 41
    total, _, gradient = split_loss(1, 3, "stationary", logits, targets)
    expected, _, expected_gradient = whole_loss(logits, targets)
    assert abs(total - expected) <= 1e-12 * expected
    assert relative_error(gradient, expected_gradient) <= 1e-10


def test_split_layers_leave_other_modules_alone():
    def work(mesh):
        block = nn.Sequential(layers.LayerNorm(HIDDEN), nn.GELU(), nn.Sequential(layers.Dropout(0.1)))
        split = split_layers(block, mesh, "block")
        return type(split[1]), list(split.state_dict())

    assert on_tensor_mesh(1, 2, SCHEMES["stationary"], work) == [(nn.GELU, ["0.weight", "0.bias"])] * 2
