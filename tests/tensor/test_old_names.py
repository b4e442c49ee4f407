"""Old spellings of public names work for one release, with a warning that names the new ones."""

import pytest
import torch
from torch import nn

from ranvier.layout import Split
from ranvier.tensor import layers
from ranvier.testing import check_split
from tests.errors import raises

IDS = torch.arange(18).view(3, 6)


@pytest.mark.parametrize(("old", "new"), [("TokenLinear", "ClassifierHead"), ("WholeLinear", "ReplicatedLinear"),
                                          ("SmallEmbedding", "TokenTypeEmbedding")])
def test_old_layer_names(old, new):
    with pytest.warns(FutureWarning, match=rf"ranvier\.tensor\.layers\.{old} is now {new}; the old name works for one"):
        assert getattr(layers, old) is getattr(layers, new)


def test_names_that_never_were():
    with pytest.raises(AttributeError, match="has no attribute 'SparseLinear'"):
        layers.SparseLinear  # noqa: B018


class Scale(nn.Module):
    """A splittable module of a user's own, with the old name of its constraints."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def splits(self, settings):
        return {"weight": Split(((),), summed=("row",))}

    def cannot(self, mesh):
        yield "samples", 3, "row", mesh.num_rows

    def split(self, mesh):
        return Scaled(self.weight)

    def forward(self, x):
        return x * self.weight.sum()


class Scaled(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        return x * self.weight.sum()


class Narrow(layers.LayerNorm):
    """A subclass of a layer of ours that adds a constraint under the old name."""

    def cannot(self, mesh):
        yield from super().cannot(mesh)
        yield "units", 3, "col", mesh.num_cols


def test_constraints_under_their_old_name():
    with pytest.warns(FutureWarning, match=r"Scale\.cannot\(mesh\) is now divisibility_constraints\(mesh\)"):
        with raises("split-refused", "mesh.row", 2, 3):
            check_split([layers.Embedding(20, 12), Scale()], IDS, meshes=[(2, 1)], schemes=["stationary"])
    with pytest.warns(FutureWarning, match=r"Scale\.cannot"):
        check_split([layers.Embedding(20, 12), Scale()], IDS, meshes=[(1, 1)], schemes=["stationary"])


def test_constraints_of_a_subclass_under_their_old_name():
    with pytest.warns(FutureWarning, match=r"Narrow\.cannot"):
        with raises("split-refused", "mesh.col", 2, 3):
            check_split([layers.Embedding(20, 12), Narrow(12)], IDS, meshes=[(1, 2)], schemes=["stationary"])
    with pytest.warns(FutureWarning, match=r"LayerNorm\.cannot"):
        assert list(layers.LayerNorm(12).cannot(_OneColumn())) == []


class _OneColumn:
    """What a constraint asks of a mesh on which columns share the sequence."""

    num_cols = 1

    class activations:
        name = "sequence"
