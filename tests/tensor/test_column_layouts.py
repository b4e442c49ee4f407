"""Activations carry their layout over the columns: a block's own code computes the right result, or is refused."""

from __future__ import annotations

import copy
import io
import math
import random
import re
import threading
from collections import Counter, OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ranvier.block import Model, as_named_tensors, from_named_tensors
from ranvier.config.run import Memory, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models import bert
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.block_costs import block_costs
from ranvier.plan.cut import Parts
from ranvier.tensor import layers
from ranvier.tensor.columns import mapped
from ranvier.tensor.split.layers import split_layers
from ranvier.testing import SplitError, check_split
from ranvier.testing.reference import Reference
from ranvier.testing.split import SCHEMES
from tests.covering import covering, quick
from tests.errors import raises
from tests.tensor.split_parity import SEED, assert_close, gradients_on, on_tensor_mesh

HIDDEN, HEADS, LENGTH = 12, 6, 6
IDS = torch.randint(0, 20, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(20, HIDDEN)

    def forward(self, ids):
        return self.token(ids)


class Own(nn.Module):
    """A block of the given layers and forward."""

    def __init__(self, forward, **own) -> None:
        super().__init__()
        self.compute = forward
        for name, layer in own.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.compute(self, x)


def output(width=HIDDEN, units=None):
    return layers.Linear(HIDDEN, width, stationary="output", units=units)


def inputs(width=HIDDEN, units=None):
    return layers.Linear(width, HIDDEN, stationary="input", units=units)


def heads(block, x, *names):
    return [block.get_submodule(name)(x).unflatten(-1, (-1, 2)).transpose(1, 2) for name in names]


# ---------------------------------------------------------------------- what is right on every mesh and scheme

def gate(block, x):
    return x * torch.sigmoid(block.score(x))


def router(block, x):
    """Two experts, weighted by a softmax over scores that every column has."""
    weights = block.score(x).softmax(-1)
    return x + sum(weights[..., place, None] * block.get_submodule(name)(x) for place, name in enumerate(("a", "b")))


def feature_gate(block, x):
    """A replicated tensor of full width next to the residual stream and an inner activation."""
    wide = block.score(x)
    return x * wide + block.back(block.into(x) * wide)


def normed_heads(block, x):
    """OLMo-2's norm over all heads of queries, Qwen3's over each head of keys; grouped keys and values; a mask."""
    query = block.norm_query(block.query(x)).unflatten(-1, (-1, 2)).transpose(1, 2)
    key, value = heads(block, x, "key", "value")
    mask = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool).tril() | torch.eye(LENGTH, dtype=torch.bool)
    mixed = functional.scaled_dot_product_attention(query, block.norm_key(key), value, attn_mask=mask)
    return x + block.back(mixed.transpose(1, 2).flatten(2))


def by_einsum(block, x):
    """Grouped keys, repeated as in models."""
    query, key, value = (block.get_submodule(name)(x).unflatten(-1, (-1, 2)) for name in ("query", "key", "value"))
    scores = torch.einsum("bsnd,btnd->bnst", query, key.repeat_interleave(2, 2)).softmax(-1)
    return x + block.back(torch.einsum("bnst,btnd->bsnd", scores, value).flatten(2))


def scattered(block, x):
    """Tokens that are picked, changed and put back."""
    places, change = torch.tensor([4, 1]), block.back(functional.silu(block.into(block.norm(x))))
    y = torch.zeros_like(x) + x
    y[:, places] += change[:, places] * 0.5
    y = y.index_add(1, torch.tensor([0, 0, 3, 2, 1, 5]), change)
    return torch.cat([y[:, :3], y[:, 3:].flip(1)], 1)


def within_heads(block, x):
    """Attention and a function without a rule within each head; scaled by scores that every column has."""
    def attended(qkv, score):
        query, key, value = (one.transpose(1, 2) for one in qkv.unflatten(-1, (-1, 3, 2)).unbind(3))
        mixed = torch.fft.fft(functional.scaled_dot_product_attention(query, key, value), dim=2).real
        return mixed.transpose(1, 2).flatten(2) * score

    changed = layers.local_map(torch.sin, x)
    return changed + block.back(layers.local_map(attended, block.qkv(x), block.score(x)))


def whole_sizes(block, x):
    """Numbers, branches, constants and views from sizes, which are always those of the full tensor."""
    inner = block.into(x)
    scale = x.shape[-1] ** -0.5 * math.log(x.size(1)) * float(np.sqrt(x.shape[1:].numel())) / int(x.shape[-1])
    if inner.shape[-1] >= 24:
        inner = inner * (divmod(inner.size(-1), 5)[1] + inner.numel() / len(inner))
    slopes = 0.5 ** torch.arange(HEADS, dtype=x.dtype)[:, None]
    wide = inner.view(len(x), LENGTH, HEADS, -1) * slopes
    wide = wide.reshape(*wide.shape[:-2], -1, wide.shape[-1]).transpose(1, 2) + wide.new_ones(4)
    return x * scale + block.back(wide.transpose(1, 2).reshape(*x.shape[:2], inner.shape[-1]))


def in_place(block, x):
    """Outputs of layers are changed in place."""
    inner = block.into(x)
    inner.mul_(2).add_(1).relu_()
    y = block.norm(block.back(inner))
    y += x
    y[..., None].squeeze(-1).mul_(block.score(x).tanh_())
    return y


RIGHT = {
    "sizes": lambda: Own(whole_sizes, into=output(24, units=HEADS), back=inputs(24, units=HEADS)),
    "in place": lambda: Own(in_place, into=output(24), back=inputs(24), norm=layers.RMSNorm(HIDDEN),
                            score=layers.ClassifierHead(HIDDEN, 1, token=None)),
    "within heads": lambda: Own(within_heads, qkv=output(3 * HIDDEN, units=HEADS), back=inputs(units=HEADS),
                                score=layers.ClassifierHead(HIDDEN, 1, token=None)),
    "gate": lambda: Own(gate, score=layers.ClassifierHead(HIDDEN, 1, token=None)),
    "router": lambda: Own(router, score=layers.ClassifierHead(HIDDEN, 2, token=None), a=layers.LayerNorm(HIDDEN),
                          b=layers.RMSNorm(HIDDEN)),
    "feature gate": lambda: Own(feature_gate, score=layers.ClassifierHead(HIDDEN, HIDDEN, token=None), into=output(),
                                back=inputs()),
    "norms of heads": lambda: Own(normed_heads, query=output(units=HEADS), key=output(units=HEADS),
                                  value=output(units=HEADS), norm_query=layers.RMSNorm(HIDDEN, over="inner"),
                                  norm_key=layers.RMSNorm(2, over="heads"), back=inputs(units=HEADS)),
    "einsum": lambda: Own(by_einsum, query=output(24, HEADS), key=output(HIDDEN, HEADS), value=output(24, HEADS),
                          back=inputs(24, HEADS)),
    "scattered": lambda: Own(scattered, norm=layers.RMSNorm(HIDDEN), into=output(24), back=inputs(24)),
    "tokens and samples merged": lambda: Own(lambda block, x: x.flatten(0, 1)),
    "norms of what is inside": lambda: Own(lambda block, x: x + block.back(block.norm(block.into(x))), into=output(24),
                                           norm=layers.LayerNorm(24, over="inner"), back=inputs(24)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_on_columns(name):
    """The fault that this notices: gate, router and feature gate had gradients up to 110 % off."""
    outcomes = check_split([Words(), RIGHT[name]()], IDS, schemes=["stationary", "megatron"], meshes=[(1, 2), (2, 2)])
    assert [one.status for one in outcomes] == ["agrees"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_everywhere(name):
    schemes = [scheme for scheme in SCHEMES if name != "scattered" or not scheme.endswith("sequence")]
    outcomes = check_split([Words(), RIGHT[name]()], IDS, schemes=schemes)
    meshes = {"stationary": 4, "summa": 4, "megatron": 1, "stationary-sequence": 3, "megatron-sequence": 1}
    assert Counter(one.status for one in outcomes) == {"agrees": sum(meshes[scheme] for scheme in schemes)}


@pytest.mark.parametrize(("shape", "checkpoint"), covering(
    [dict(pipe=3, row=2, col=2), dict(data=2, row=1, col=2)], [1, "none"]), ids=str)
def test_layouts_cross_stages_and_recomputation(shape, checkpoint):
    """A state with scores that every column has, tokens, and an activation between two Linears, over stages."""
    def first(block, ids):
        x = block.token(ids)
        return {"x": x, "score": block.score(x), "inner": block.into(x), "ids": ids,
                "flat": x.flatten(1)}

    def second(block, state):
        inner = functional.silu(state["inner"]) * torch.sigmoid(state["score"])
        x = state["flat"].view_as(state["x"])
        return {"x": x + block.back(inner) * (state["ids"] > 3)[..., None], "score": state["score"] * 2}

    def third(block, state):
        return block.classes(state["x"] * state["score"])

    def make():
        return Model(blocks={name: (lambda block=block: block) for name, block in zip(
            ("first", "second", "third"), blocks, strict=True)},
            loss=lambda y, t: (functional.cross_entropy(y, t, reduction="sum"), len(t)))

    ready = [Own(first, token=layers.Embedding(20, HIDDEN), score=layers.ClassifierHead(HIDDEN, 1, token=None),
                 into=output(24)), Own(second, back=inputs(24)), Own(third, classes=layers.ClassifierHead(HIDDEN, 3))]
    blocks = [block.double() for block in ready]
    mesh = Mesh(**shape)
    ids = torch.randint(0, 20, (2 * mesh.data, 2 * mesh.row, LENGTH), generator=torch.Generator().manual_seed(2))
    batches = [[Microbatch(one, one[:, 0] % 3, torch.arange(len(one)) + 10 * number)
                for number, one in enumerate(ids[2 * replica:2 * replica + 2])] for replica in range(mesh.data)]
    outcome = gradients_on(make, batches, mesh, memory=Memory(recompute=checkpoint))
    reference = Reference(copy.deepcopy(make()), seed=SEED, dtype=torch.float64)
    reference.forward_backward([one for replica in batches for one in replica])
    assert_close(outcome.gradients, reference.gradients())


@pytest.mark.parametrize("packed", [False, True], ids=["a tensor", "a tuple"])
def test_layouts_go_through_a_cache(packed):
    """The output of a frozen block is split over columns, and so is the output that the cache returns."""
    def first(block, ids):
        inner = block.into(block.token(ids))
        return (inner, ids) if packed else inner

    def second(block, state):
        return block.classes(block.back(state[0] * (state[1] > 3)[..., None] if packed else state))

    frozen = Own(first, token=layers.Embedding(20, HIDDEN), into=output(24)).double().requires_grad_(False)
    trained = Own(second, back=inputs(24), classes=layers.ClassifierHead(HIDDEN, 3)).double()

    def make():
        return Model(blocks={"first": lambda: frozen, "second": lambda: trained},
                     loss=lambda y, t: (functional.cross_entropy(y, t, reduction="sum"), len(t)))

    def cached(samples, inputs, compute):
        return from_named_tensors(dict(as_named_tensors(compute(0, inputs, None), "the first block")))

    batch = [Microbatch(IDS, IDS[:, 0] % 3, torch.arange(2))]
    outcome = gradients_on(make, [batch], Mesh(col=2), also=lambda engine: engine.use_cache(cached, 1))
    reference = Reference(copy.deepcopy(make()), seed=SEED, dtype=torch.float64)
    reference.forward_backward(batch)
    assert_close(outcome.gradients, reference.gradients())


def test_attention_with_a_mask_is_counted_on_columns():
    """On the meta device attention is counted as the fused kernel, whose mask is another argument."""
    config = Transformer(family="bert", num_layers=1, hidden=24, heads=4, vocab=31, sequence=8)
    counted = [block_costs(Parts(bert.bert(config, "classes"), Mesh(col=columns), TensorParallel(), "cpu").model,
                           *bert.BERT.sample(config, "classes", 2)) for columns in (1, 2)]
    whole, half = (next(cost for cost in costs if cost.name == "layer0.attention") for costs in counted)
    assert half.flops == whole.flops / 2 and type(half.output_bytes) is int


# ---------------------------------------------------------------------- what is refused, by name

FREE = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))


class Unit(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm over features."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy / (1 + dy.norm(dim=-1, keepdim=True))


def hooked(block, x):
    if x.requires_grad:
        x.register_hook(lambda dx: dx / dx.norm())
    return x


def without_gradients(function):
    def compute(block, x):
        with torch.no_grad():
            scale = function(x)
        return x * scale
    return compute


REFUSED = {
    "a norm of the stream": (lambda block, x: functional.rms_norm(x, (HIDDEN,)), "stationary",
                             "torch.nn.functional.rms_norm over a dim that is sharded over columns", "layers.RMSNorm"),
    "a mean of features": (lambda block, x: x * x.pow(2).mean(-1, keepdim=True), "stationary",
                           "mean along dim 2, which is sharded over columns,", "RMSNorm or LayerNorm"),
    "a softmax over heads": (lambda block, x: block.back(block.into(x).softmax(-1)), "megatron",
                             "softmax along dim 2, which is sharded over columns,", "layers.local_map"),
    "a norm across heads": (lambda block, x: block.back(functional.layer_norm(block.into(x), (HIDDEN,))), "stationary",
                            "torch.nn.functional.layer_norm over a dim that is sharded over columns", "over='inner'"),
    "two output-stationary products": (lambda block, x: block.back(block.into(block.into(x))), "megatron",
                                       "block 1.into: takes the residual stream, and was given something else",
                                       "Linear(stationary='input') leads back"),
    "an input-stationary product alone": (lambda block, x: block.back(x), "megatron-sequence",
                                          "block 1.back: takes activations between two Linears", "leads from the"),
    "a residual around the inside": (lambda block, x: x + block.into(x), "megatron-sequence",
                                     "add of tensors with different layouts over columns", "Go from one to the"),
    "a layer's parameter": (lambda block, x: x @ FREE.diag(), "megatron",
                            "with a parameter outside of its layer", "Call the layer"),
    "dropout": (lambda block, x: functional.dropout(x, 0.1), "stationary", "torch.nn.functional.dropout",
                "layers.Dropout"),
    "dropout of what is replicated": (lambda block, x: functional.dropout(x, 0.1), "megatron",
                                      "torch.nn.functional.dropout draws different numbers on each rank",
                                      "layers.Dropout"),
    "a view that columns do not divide": (
        lambda block, x: block.back(block.into(x).unflatten(-1, (3, -1)).flatten(2)), "stationary",
        "unflatten with -1, (3, -1)", "the columns divide the new size"),
    "an index of a token that another column has": (lambda block, x: x[:, [4]] + x, "megatron-sequence",
                                                    "__getitem__ with (slice(None, None, None), [4])", "in front"),
    "an index of a feature": (lambda block, x: x * x[..., :1], "stationary", "__getitem__ with", "in front of"),
    "a matrix product over features": (lambda block, x: x @ torch.eye(HIDDEN, dtype=x.dtype), "stationary",
                                       "matmul along the dim that is sharded over columns", "layers.local_map"),
    "an unknown function": (lambda block, x: torch.fft.fft(x).real, "stationary", "fft_fft", "layers.local_map"),
    "an autograd function": (lambda block, x: x + block.back(Unit.apply(block.into(x))), "megatron",
                             "block 1.back (test_column_layouts.py", "local_map"),
    "an autograd function that a block returns": (lambda block, x: Unit.apply(x), "stationary",
                                                  "is the result of the autograd.Function Unit", "local_map"),
    "an autograd function of what is replicated": (lambda block, x: x * Unit.apply(block.score(x)), "stationary",
                                                   "is the result of the autograd.Function Unit", "local_map"),
    "a hook": (hooked, "stationary", "register_hook", "local_map"),
    "vmap": (lambda block, x: torch.func.vmap(torch.sin)(x), "stationary", "aten.sin.default is called past torch",
             "local_map"),
    "vmap without gradients": (without_gradients(torch.func.vmap(torch.sin)), "stationary",
                               "aten.sin.default is called past torch", "local_map"),
    "torch.tensor": (lambda block, x: x * torch.tensor(x), "stationary", "aten._to_copy.default is called past torch",
                     "local_map"),
    "the memory": (lambda block, x: x * x.data_ptr(), "stationary", "data_ptr", "local_map"),
    "numpy": (lambda block, x: x + torch.from_numpy(x.detach().numpy()), "stationary", "numpy", "local_map"),
    "numbers": (lambda block, x: x * x.detach().tolist()[0][0][0], "stationary", "tolist", "local_map"),
    "memory of the caller": (without_gradients(lambda x: torch.sin(x, out=torch.empty(x.shape, dtype=x.dtype))),
                             "stationary",
                             "sin cannot be computed", "local_map"),
    "sizes that change in place": (lambda block, x: x * block.score(x).squeeze_(-1)[..., None], "stationary",
                                   "changes the sizes of a tensor in place", "returns a new tensor"),
    "a tensor that local_map was not given": (
        lambda block, x: layers.local_map(lambda y: y.detach() * block.score(x), x), "stationary",
        "local_map's function computes with a tensor between layers", "Pass it to local_map"),
    "a weight": (lambda block, x: x * float(block.into.weight.detach().norm()), "stationary",
                 "weight of a layer that is split over rows and columns is read outside", "Call the layer"),
    "all weights": (lambda block, x: x * sum(float(one.detach().norm()) for one in block.parameters()), "megatron",
                    "parameters() of a layer that is split over rows and columns is read outside", "Call the layer"),
    "ids of a part": (lambda block, x: block.words((x[..., None] > 0).long().flatten(2)), "stationary",
                      "block 1.words: takes integers that are the same on every column", "from the block's inputs"),
    "a parameter beside a shard": (lambda block, x: layers.local_map(torch.mul, x, FREE), "stationary",
                                   "local_map with a parameter outside of its layer", "Call the layer"),
    "a shard beside what is replicated": (lambda block, x: layers.local_map(lambda x, _: x, x, block.into(x)),
                                          "megatron", "local_map of a replicated tensor and a shard", "Give the shard"),
    "a result with other dims": (lambda block, x: layers.local_map(lambda x: x.flatten(1), x), "stationary",
                                 "local_map cannot tell which dim of the result is sharded", "Return the dims"),
    "a part of uneven shards": (lambda block, x: layers.local_map(lambda y: y[..., :1], block.logits(x)), "stationary",
                                "local_map cannot tell which dim of the result is sharded", "must keep it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    compute, scheme, what, remedy = REFUSED[name]
    block = Own(compute, into=output(), back=inputs(), norm=layers.LayerNorm(HIDDEN), words=layers.Embedding(3, HIDDEN),
                logits=layers.VocabularyLinear(HIDDEN, 5), score=layers.ClassifierHead(HIDDEN, 1, token=None))
    with pytest.raises(SplitError, match=re.escape(what)) as caught:
        check_split([Words(), block], IDS, meshes=[(1, 2)], schemes=[scheme])
    assert remedy in str(caught.value) and "block 1" in str(caught.value)
    assert ": takes" in what or name.endswith("returns") or re.search(r"test_column_layouts\.py, line \d+",
                                                                     str(caught.value))


def test_a_loss_of_each_columns_own():
    with raises("split-refused"):
        check_split([Words()], (IDS, torch.zeros(2, LENGTH, HIDDEN)), meshes=[(1, 2)], schemes=["stationary"],
                    loss=lambda y, t: (((y - t) ** 2).sum(), 1))


def test_a_loss_reads_no_weights():
    """Also on rows alone, where each rank has a part of each weight."""
    block = Own(lambda block, x: block.score(x), score=layers.ClassifierHead(HIDDEN, 3))

    def compute(y, t):
        return functional.cross_entropy(y, t, reduction="sum") + reading.split.score.weight.detach().norm(), len(t)

    class Reading(nn.Module):
        """A block that makes itself known to the loss."""

        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            reading.split = self.block
            return self.block(x)

    reading = threading.local()
    with raises("split-refused", "test_column_layouts.py"):
        check_split([Words(), Reading(block)], (IDS, IDS[:, 0] % 3), meshes=[(2, 1)], schemes=["stationary"],
                    loss=compute)


def test_a_scripted_function_is_refused():
    with raises("split-refused"):
        check_split([Words(), Own(lambda block, x: scripted(x))], IDS, meshes=[(1, 2)], schemes=["stationary"])


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Chosen(nn.Module):
    """A block that chooses one of its methods when it is created."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.chosen = output(24), inputs(24), self.squared

    def squared(self, x):
        return x + self.back(self.into(x).square())

    def forward(self, x):
        return self.chosen(x)


def test_a_method_that_is_an_attribute():
    """It must be the method of this rank's part; on rows alone too, another would silently train the full layers."""
    check_split([Words(), Chosen()], IDS, meshes=[(2, 1), (1, 2)])
    other = Chosen()
    other.chosen = Chosen().squared
    compiled = Chosen()
    compiled.compile(backend="eager")
    optimized = torch.compile(Chosen(), backend="eager")
    for block, name in ((other, "chosen"), (compiled, "compile()"), (optimized, "forward")):
        with raises("function-of-whole-layers", f"block.{name}"):
            on_tensor_mesh(2, 1, TensorParallel(), partial(split_layers, block, where="block"))


def test_floats_are_the_residual_stream_too():
    """A block that is right if its input is replicated, and is refused or wrong in the middle of a model."""
    x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    by_hand = Own(lambda block, x: block.norm(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
                  norm=layers.LayerNorm(HIDDEN))
    wrong = Own(lambda block, x: block.norm(layers.local_map(partial(torch.softmax, dim=-1), x)),
                norm=layers.LayerNorm(HIDDEN))
    loss = partial(functional.mse_loss, reduction="sum")
    for block, status in ((by_hand, "refused"), (wrong, "differs")):
        with pytest.raises(SplitError, match="1 x 2 with stationary, inputs as the residual stream") as caught:
            check_split(block, x, meshes=[(1, 2)])
        found = [one for one in caught.value.outcomes if one.inputs == "stream"]
        assert {one.status for one in found} == {status} and {one.scheme for one in found} == {"stationary", "summa"}
        check_split(block, x, inputs="replicated", meshes=[(1, 2)])
        check_split([block], (x, x), loss=lambda y, t: (loss(y, t), len(t)), meshes=[(1, 2)], schemes=["megatron"])
    with raises("split-refused"):
        check_split(layers.ReplicatedLinear(HIDDEN, HIDDEN), x)
    check_split(layers.LayerNorm(HIDDEN), x, inputs="stream")


def test_compiled_helpers_of_a_block():
    """Within columns torch.compile compiles; between layers the code runs uncompiled, or is refused by name."""
    counted = []

    def counting(graph, example):
        counted.append(graph)
        return graph

    within = torch.compile(lambda x, y: torch.sin(x) * y, backend=counting)
    block = partial(Own, into=output(24), back=inputs(24), score=layers.ClassifierHead(HIDDEN, 1, token=None))
    compute = partial(check_split, sample=IDS, meshes=[(1, 2)], schemes=["stationary", "megatron"])
    compute([Words(), block(lambda block, x: x + block.back(layers.local_map(within, block.into(x), block.score(x))))])
    assert counted
    for number, function in enumerate((lambda x: x * 2, lambda x: torch.sin(x).unflatten(-1, (2, -1)).flatten(-2))):
        helper = torch.compile(function, backend="eager", fullgraph=number == 0)
        own = block(lambda block, x, helper=helper: x + block.back(helper(block.into(x))))
        try:
            compute([Words(), own])
        except SplitError as error:
            assert {one.status for one in error.outcomes} == {"refused"}
            assert number == 0 or all("local_map(compiled, x)" in one.reason for one in error.outcomes)
        else:
            assert number == 1


@pytest.mark.parametrize("convert", ["type_as", "to", "copy"])
def test_a_buffer_stays_a_plain_tensor(convert):
    """Whatever the block does with the buffer, and on every rank."""
    found = []

    def compute(block, x):
        score = block.score(x)
        scale = {"type_as": block.scale.type_as, "to": block.scale.to, "copy": lambda y: block.scale.expand_as(y[0])}
        found.append(type(block.scale))
        return x * (score * scale[convert](score)).sigmoid()

    block = Own(compute, score=layers.ClassifierHead(HIDDEN, 1, token=None))
    block.register_buffer("scale", torch.full((1,), 2.0, dtype=torch.float64))
    check_split([Words(), block], IDS, meshes=[(1, 2)])
    assert type(block.scale) is torch.Tensor and set(found) == {torch.Tensor}
    torch.save(block.state_dict(), io.BytesIO())


def test_a_layer_that_does_not_say_what_it_gives():
    class Wider(layers.Linear):
        takes = gives = "same"

        def __init__(self):
            super().__init__(HIDDEN, 24, stationary="output")
            del self.takes, self.gives

    with raises("split-refused"):
        check_split([Words(), Wider()], IDS, meshes=[(1, 2)], schemes=["stationary"])


def test_a_norm_of_something_else():
    with raises("layer-over"):
        layers.RMSNorm(8, over="tokens")


# ---------------------------------------------------------------------- many small modules: right, or refused

LAYERS = [
    output, partial(output, 24), inputs, partial(inputs, 24), partial(layers.ClassifierHead, HIDDEN, 1, token=None),
    partial(layers.ClassifierHead, HIDDEN, HIDDEN, token=None), partial(layers.LayerNorm, HIDDEN),
    partial(layers.RMSNorm, HIDDEN), partial(layers.RMSNorm, HIDDEN, over="inner"),
    partial(layers.RMSNorm, 2, over="heads"), partial(layers.ReplicatedLinear, HIDDEN, HIDDEN),
    partial(layers.Dropout, 0.3)]
STEPS = [
    lambda a, b, d: a + b, lambda a, b, d: a * torch.tanh(b), lambda a, b, d: a.softmax(d),
    lambda a, b, d: a.sum(d, keepdim=True), lambda a, b, d: functional.rms_norm(a, (int(a.size(-1)),)),
    lambda a, b, d: functional.normalize(a, dim=d), lambda a, b, d: a.unflatten(-1, (-1, 2)),
    lambda a, b, d: a.unflatten(-1, (2, -1)), lambda a, b, d: a.flatten(2), lambda a, b, d: a.transpose(1, d),
    lambda a, b, d: a.flatten(0, 1).unflatten(0, (2, -1)), lambda a, b, d: a.reshape(a.shape[0], a.shape[1], -1),
    lambda a, b, d: a.reshape(*a.shape[:2], a.shape[2] // 2, 2), lambda a, b, d: a.reshape(*a.shape[:2], 2, -1),
    lambda a, b, d: a @ b.transpose(-1, -2), lambda a, b, d: a @ b,
    lambda a, b, d: functional.scaled_dot_product_attention(a, b, b), lambda a, b, d: a[:, 1:],
    lambda a, b, d: a[..., :1],
    lambda a, b, d: a[:, torch.tensor([0, 2, 1])], lambda a, b, d: torch.cat([a, b], d),
    lambda a, b, d: torch.stack([a, b], d), lambda a, b, d: a.chunk(2, d)[1], lambda a, b, d: a.cumsum(d),
    lambda a, b, d: a * torch.arange(HIDDEN), lambda a, b, d: a * torch.arange(LENGTH)[:, None],
    lambda a, b, d: a / a.shape[-1], lambda a, b, d: a + a.new_ones(a.shape), lambda a, b, d: torch.where(a > 0, a, b),
    lambda a, b, d: a.repeat_interleave(2, d), lambda a, b, d: a.unsqueeze(2).expand(-1, -1, 2, -1).flatten(2),
    lambda a, b, d: a.unsqueeze(3).expand(-1, -1, -1, 2).flatten(2), lambda a, b, d: a.clone().add_(b),
    lambda a, b, d: layers.gelu(a * 1), lambda a, b, d: functional.glu(a, d), lambda a, b, d: a * b.mean(),
    lambda a, b, d: functional.linear(a, torch.ones(3, HIDDEN, dtype=a.dtype)), lambda a, b, d: a.movedim(1, d)]


class Program(nn.Module):
    """Random layers and functions, each applied to earlier results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.plan, draw = nn.ModuleList(), [], random.Random(seed)
        for number in range(draw.randint(2, 6)):
            if draw.random() < 0.5 or not number:
                self.layers.append(draw.choice(LAYERS)())
                step = self.layers[-1]
            else:
                step = partial(draw.choice(STEPS), d=draw.choice([1, 2, -1]))
            self.plan.append((step if not isinstance(step, nn.Module) else len(self.layers) - 1,
                              *(max(0, number - draw.choice([0, 0, 0, 1, 2])) for _ in range(2))))

    def forward(self, x):
        values = [x]
        for step, a, b in self.plan:
            values.append(self.layers[step](values[a]) if isinstance(step, int) else step(values[a], values[b]))
        return values[-1]


ROUNDED = {1137}
"""Programs that normalise a single number, so that gradients are scaled by `eps`, but their rounding errors are not."""


def tried(seed: int) -> Counter:
    """How often a program agrees and how often it is refused; fails if it differs."""
    torch.manual_seed(seed)
    block = Program(seed)
    try:
        with torch.no_grad():
            result = nn.Sequential(Words(), block).eval()(IDS)
    except Exception:
        return Counter(invalid=1)  # also on one rank
    if result.dim() == 0 or len(result) not in (2, 2 * LENGTH):
        return Counter(invalid=1)  # it has no dim of samples
    try:
        outcomes = check_split([Words(), block], IDS, meshes=[(1, 2)], tolerance=1e-6 if seed in ROUNDED else 1e-9)
    except SplitError as error:
        outcomes = error.outcomes
    wrong = [one for one in outcomes if one.status == "differs"]
    assert not wrong, f"program {seed}: {wrong}, {block.plan}"
    return Counter(one.status for one in outcomes)


@pytest.mark.parametrize(("start", "count"), quick(1, [(0, 40), *((start, 500) for start in range(1000, 4000, 500))]))
def test_any_module_is_right_or_refused(start, count):
    found = sum((tried(seed) for seed in range(start, start + count)), Counter())
    assert min(found["agrees"], found["refused"]) > 15 * count / 40


def test_containers_are_walked_as_torch_walks_them():
    Pair = namedtuple("Pair", "first second")
    tree = {"a": (torch.ones(1), [2.5, None, "x"]), "b": OrderedDict(c=Pair(torch.ones(3), (4,))), "d": []}
    found = mapped(Tensor.tolist, tree)
    assert found == tree_map_only(Tensor, Tensor.tolist, tree)
    assert type(found["b"]) is OrderedDict and type(found["b"]["c"]) is Pair
