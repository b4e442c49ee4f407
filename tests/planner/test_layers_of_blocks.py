"""What a block sends on a tensor mesh depends on its layers only, not on its name or what else it computes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ranvier.block import Model
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Data, Transformer
from ranvier.cost.blocks import ById
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.kernels import Access, Kernel
from ranvier.cost.step import _layer_seconds
from ranvier.cost.volume import SplitLayer, block_volume, transformer_layer
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.models.family import ModelFacts, ModelFamily
from ranvier.planner.conditions import element_bytes, split_layers
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work
from ranvier.tensor import layers as tensor
from ranvier.tensor.split.loss import NextTokenLoss

WIDTH, VOCAB, TOKENS = 24, 40, 8


class Ids(nn.Module):
    """Only a token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tensor.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Wide(nn.Module):
    """Two widening and two narrowing products, not a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.ModuleList(tensor.Linear(WIDTH, 2 * WIDTH, stationary="output") for _ in range(2))
        self.back = nn.ModuleList(tensor.Linear(2 * WIDTH, WIDTH, stationary="input") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for out, back in zip(self.out, self.back, strict=True):
            x = x + back(tensor.gelu(out(x)))
        return x


class Logits(nn.Module):
    """Only the product to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = tensor.VocabularyLinear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


class Wider(ModelFamily):
    """Its blocks have names that no transformer has, and one block has the name of another kind of block."""

    def model(self, settings, head, *, dtype=torch.float32):
        return Model(blocks={"ids": Ids, "attention": Wide, "logits": Logits}, loss=NextTokenLoss(VOCAB))

    def sample(self, settings, head, count):
        ids = torch.zeros(count, TOKENS, dtype=torch.int64)
        return ids, ids

    def flops_per_sample(self, settings, *, recomputed=False):
        return 1.0

    def describe(self, settings):
        return ModelFacts(text="wider", tokens=TOKENS)


RUN = ResolvedRun(mesh=Mesh(row=2, col=2), batch=Batch(global_size=8, microbatch_size=4),
                  model=Transformer(family=f"{__name__}:Wider", hidden=WIDTH, heads=2, num_layers=1, vocab=VOCAB,
                                    sequence=TOKENS))
LAYERS = (SplitLayer("output", 24, 48), SplitLayer("output", 24, 48), SplitLayer("input", 48, 24),
          SplitLayer("input", 48, 24, ends_layer=True))


def test_layers_of_blocks_that_are_no_transformers():
    assert split_layers(RUN) == {"ids": (SplitLayer("embedding", VOCAB, WIDTH),), "attention": LAYERS,
                                 "logits": (SplitLayer("vocabulary", WIDTH, VOCAB),)}


def test_a_step_sends_what_the_blocks_layers_send():
    """An output-stationary product: 1 + 2 of x and 2 + 4 of a square weight, forward and backward; an input-stationary
    one: 1 + 1 and 2 + 4."""
    cost = run_cost(RUN, load_cluster("h100"), Work().stages(RUN))
    a, w = 4 * TOKENS * WIDTH * 4 / 4, WIDTH * WIDTH * 4 / 4  # what a rank lacks of x and of a square weight
    sizes = {"row": 2, "col": 2, "batch": 4, "sequence": TOKENS, "hidden": WIDTH, "itemsize": 4, "sum_itemsize": 4}
    found = block_volume(LAYERS, "stationary", recompute="none", last=True, **sizes)
    assert (found.forward.activations + found.backward.activations, found.forward.weights + found.backward.weights
            ) == pytest.approx((2 * (3 + 2) * a, 4 * 6 * w))
    others = [block_volume(split_layers(RUN)[name], "stationary", recompute="none", last=True, **sizes)
              for name in ("ids", "logits")]
    assert cost.link_bytes["row"] == pytest.approx(2 * sum(
        each.forward.weights + each.backward.weights for each in (found, *others)))
    assert cost.link_bytes["col"] == pytest.approx(2 * sum(
        each.forward.activations + each.backward.activations for each in (found, *others)))


@pytest.mark.parametrize("scheme", ["summa", "stationary", "megatron", "megatron-sequence"])
@pytest.mark.parametrize("recompute", ["none", "kept", "again"])
def test_transformers_layers_send_what_the_tables_say(scheme, recompute):
    run = replace(RUN, model=Transformer(num_layers=2, hidden=24, heads=4, vocab=VOCAB, sequence=TOKENS))
    row = 1 if scheme.startswith("megatron") else 2
    sizes = {"row": row, "col": 2, "batch": 4, "sequence": TOKENS, "hidden": 24, "itemsize": 2, "sum_itemsize": 4}
    layer = block_volume(transformer_layer(24), scheme, recompute=recompute, **sizes)
    blocks = [block_volume(split_layers(run)[name], scheme, recompute=recompute, last=True, **sizes)
              for name in ("layer1.attention", "layer1.mlp")]
    assert sum(each.total for each in blocks) == pytest.approx(layer.total)


def test_heads_of_few_classes_and_patches_send_nothing_that_counts():
    run = replace(RUN, model=Transformer(num_layers=1, hidden=24, heads=2, image_size=8, patch_size=4),
                  data=Data(task="images"))
    assert families.config_of(run).family == "vit"
    assert split_layers(run)["embedding"] == split_layers(run)["head"] == ()


def test_each_product_hides_messages_of_one_layer():
    """Two layers whose sizes differ by 4 %, one with the keys and values of all heads on each column, and two square
    ones that are output- and input-stationary."""
    layers = (SplitLayer("output", 1000, 1000), SplitLayer("output", 1000, 1040), SplitLayer("output", 500, 600),
              SplitLayer("output", 800, 800), SplitLayer("input", 800, 800), SplitLayer("embedding", 50, 1000))
    sizes = [(500, 1000), (520, 1000), (400, 500), (400, 800), (800, 400), (8, 1000)]
    kernels = tuple(Kernel(kind="product", flops=2 * 64 * n * k, shape=(1, 64, n, k), weight="trains",
                           reads=(Access(0, 0, 1), Access(1, 0, 1)), writes=(Access(2, 0, 1),)) for n, k in sizes)
    device = load_cluster("h100").device
    found = _layer_seconds(ById(kernels), ById(layers), 2, ById(device), "bf16", element_bytes(RUN))
    assert [y for y, _, _ in found] == pytest.approx([device.kernel_seconds(one, "bf16") for one in kernels[:5]] + [0])
