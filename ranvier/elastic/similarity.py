"""Change of a layer's outputs for the same samples: the similarity-preserving loss.

A layer's outputs A [b, n] for b samples become G = A A^T [b, b], with rows normalised to length 1. The distance between
two states of a layer is |G - G'|^2 / b^2 (Tung and Mori, "Similarity-Preserving Knowledge Distillation", 2019); Egeria
(Wang et al., EuroSys 2023) calls this the plasticity of a layer. G is small whatever the layer's size. Since A A^T is a
sum over the elements of outputs, ranks that hold parts of them add up their products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Similarity = list[list[float]]
"""Similarity matrix of the samples of one row: [b, b], rows of length 1."""


def products(outputs: Tensor) -> Tensor:
    """A A^T of outputs [b, ...]: [b, b] in fp64, on the CPU."""
    rows = outputs.flatten(1).to("cpu", torch.float64)
    return rows @ rows.T


def normalised(products: Tensor) -> Similarity:
    """G of products [b, b] that have been summed over all parts of the outputs."""
    found: Similarity = torch.nn.functional.normalize(products, dim=1).tolist()
    return found


def similarity_loss(current: Sequence[Similarity], before: Sequence[Similarity]) -> float:
    """Distance between two states of a layer, averaged over the rows of the mesh; only samples of the same row are
    compared. 0 to 4 / b; NaN if outputs were not finite."""
    squared = [(torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).square().mean()
               for one, other in zip(current, before, strict=True)]
    return float(sum(squared)) / len(squared)
