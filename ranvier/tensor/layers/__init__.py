"""The layers from which a tensor-parallel model is built.

    from ranvier.tensor import layers as tensor

    class MLP(nn.Module):
        def __init__(self, hidden):
            self.norm = tensor.LayerNorm(hidden)
            self.fc1 = tensor.Linear(hidden, 4 * hidden, stationary="output")
            self.fc2 = tensor.Linear(4 * hidden, hidden, stationary="input")

        def forward(self, x_BSH):
            return x_BSH + self.fc2(tensor.gelu(self.fc1(self.norm(x_BSH))))

On one rank they are torch's own: `Linear` is an nn.Linear that also says how it may be sharded. On a row x col mesh
`ranvier.tensor.split.layers.split_layers` replaces those of a block by tensor-parallel ones, which hold their shard of
the parameters. The model's code does not change, and does not depend on the scheme. It follows two rules:

    the residual stream is what `Linear(stationary="input")`, embeddings and norms return; any dim may be sharded
    between an output- and an input-stationary Linear a tensor has all tokens of a row, and a shard of the features

On several columns each activation carries its layout, and has the sizes of the full tensor. An operation that breaks a
rule is refused by name: it either computes what it computes on one rank, gradients included, or raises a ModelError
(`ranvier.tensor.columns`), as does reading a layer's weights outside of it. Computations on each head independently may
use `local_map`, which passes plain shards to a function and checks nothing inside. `ranvier.testing.check_split`
compares a model with the unsplit one. Your own layer takes part if it has the methods of `Splittable`.
"""

from ranvier.tensor.columns import local_map
from ranvier.tensor.layers.dropout import Dropout
from ranvier.tensor.layers.elementwise import gated, gelu, softcap
from ranvier.tensor.layers.embeddings import (
    BiasTable,
    Embedding,
    PatchEmbedding,
    PositionEmbedding,
    TokenTypeEmbedding,
)
from ranvier.tensor.layers.features import DepthwiseConv1d, Scalar, Scale
from ranvier.tensor.layers.linear import ClassifierHead, Linear, ReplicatedLinear, VocabularyLinear
from ranvier.tensor.layers.linear_group import SharedInputLinear
from ranvier.tensor.layers.norms import LayerNorm, RMSNorm
from ranvier.tensor.layers.rotary import Rotary
from ranvier.tensor.splittable import Splittable, block_splits

__all__ = ["BiasTable", "ClassifierHead", "DepthwiseConv1d", "Dropout", "Embedding", "LayerNorm", "Linear",
           "PatchEmbedding", "PositionEmbedding", "RMSNorm", "ReplicatedLinear", "Rotary", "Scalar", "Scale",
           "SharedInputLinear", "Splittable", "TokenTypeEmbedding", "VocabularyLinear", "block_splits", "gated", "gelu",
           "local_map", "softcap"]
